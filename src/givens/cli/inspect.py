"""`givens inspect`: describe a file."""

from pathlib import Path
from typing import Annotated, Any

import typer

from givens.cli.output import quote_command
from givens.quantizer import KIND, Quantizer, load
from givens.search import open_index
from givens.storage import files, vectors

# The manifest of a folder of shards; `givens.export.shards` would import Faiss.
MANIFEST = "manifest.json"


def inspect(
    file: Annotated[str, typer.Argument(help="A quantizer, an index, or a file of vectors.")],
) -> None:
    """Describe a quantizer, an index or a file of vectors, after checking that it is complete.

    Example: givens inspect index.faiss
    """
    path = Path(file)
    if path.suffix == ".faiss" and not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix == ".safetensors" and path.is_file() and _is_givens(path):
        rows = _inspect_quantizer(path)
    elif (path / MANIFEST).is_file():
        rows = _inspect_index(path)
    elif vectors.is_vectors(vectors.split(file)[0]) or not path.is_file():
        rows = _inspect_vectors(file)
    else:
        rows = _inspect_index(path)
    width = max(map(len, rows))
    for name, value in rows.items():
        typer.echo(f"{name:<{width}}  {value}")


def _is_givens(path: Path) -> bool:
    """Whether a safetensors file is one of ours; a plain one holds vectors."""
    with path.open("rb") as file:
        return b'"givens"' in file.read(64)


def _inspect_quantizer(path: Path) -> dict[str, Any]:
    header = files.read_header(path)
    if header.kind != KIND:
        files.load(path, header.kind)
        return {"file": f"givens {header.kind}, whole", **header.metadata}
    q = load(path)
    rows = {"file": "quantizer, whole", **_list_parts(q)}
    return {**rows, "next": quote_command("givens", "build", path, "VECTORS", "-o", "index.faiss")}


def _inspect_index(path: Path) -> dict[str, Any]:
    from givens.export.faiss import code_size, from_faiss, inverted, is_quantized

    stored = open_index(path)
    index, lists = stored.index, inverted(stored.index)
    form = "folder of shards" if path.is_dir() else "Faiss index"
    whole = "as recorded" if stored.record else "without a record to check it by"
    rows = {
        "file": f"{form} ({type(index).__name__}), {whole}",
        "vectors": f"{index.ntotal:,}",
    }
    if (code := code_size(index)) is not None:
        rows["bytes a vector"] = f"{code} of code"
    if lists is not None:
        rows["lists"] = f"{lists.nlist:,}, imbalance {lists.invlists.imbalance_factor():.2f}"
    rows |= _list_parts(from_faiss(index)) if is_quantized(index) else {"quantizer": "none"}
    if stored.record is not None:
        belongs = stored.record.get("fingerprint") == rows.get("fingerprint")
        beside = MANIFEST if path.is_dir() else files.record_path(path).name
        rows["record"] = beside + ("" if belongs else ", of another quantizer")
        rows |= {
            name: stored.record[name]
            for name in ("seed", "written")
            if stored.record.get(name) is not None
        }
    return {**rows, "next": quote_command("givens", "search", path, "QUERIES", "-k", 10)}


def _inspect_vectors(file: str) -> dict[str, Any]:
    x = vectors.read(file)
    return {
        "file": "vectors",
        "vectors": f"{len(x):,}",
        "dimension": x.shape[1],
        "type": x.dtype,
        "next": quote_command("givens", "fit", file, "-o", "q.safetensors"),
    }


def _list_parts(q: Quantizer) -> dict[str, Any]:
    return {
        "dimension": q.dim,
        "subspaces": f"{q.subspaces} of width {q.dim // q.subspaces}",
        "codewords": q.codewords,
        "coarse": "none" if q.coarse is None else f"{len(q.coarse):,} centroids",
        "metric": q.metric,
        "fingerprint": q.fingerprint,
    }
