"""`givens build`: codes of all vectors, in an index that Faiss serves."""

import json
import time
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer

from givens import vectors
from givens.cli import output as out
from givens.quantizer import load


def build(
    quantizer: Annotated[Path, typer.Argument(help="A quantizer, from `givens fit`.")],
    source: Annotated[str, typer.Argument(metavar="VECTORS", help="The vectors to index.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The index to write.")],
    kind: Annotated[
        str | None,
        typer.Option(
            help="pq, ivfpq, pq-fastscan or ivfpq-fastscan; by the quantizer if left out."
        ),
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option(help="File of integers to answer with instead of positions, one a vector."),
    ] = None,
) -> None:
    """Encode vectors into an index that Faiss loads, adds to and searches.

    Vectors are streamed: memory holds the index and a slice of them. The codes depend on nothing
    random. Beside the index goes INDEX.json: configuration, versions, fingerprint and checksum.

    Example: givens build q.safetensors base.fvecs -o index.faiss
    """
    began = time.perf_counter()
    if not quantizer.is_file():
        raise FileNotFoundError(f"there is no quantizer {quantizer}; make one with `givens fit`")
    q = load(quantizer)
    x = vectors.read(source, "train")
    names = None if ids is None else read_ids(ids)
    from givens.export.faiss import Kind, save_index, to_faiss

    out.check_output(output, quantizer, source)
    with out.progress("encoding") as bar:
        bar.start(len(x))
        index = to_faiss(q, x, kind=cast(Kind | None, kind), ids=names, progress=bar.advance)
    about = out.record(
        _record(quantizer).get("seed"),
        "cpu",
        quantizer=quantizer,
        vectors=source,
        kind=kind or ("pq" if q.coarse is None else "ivfpq"),
        ids="positions" if ids is None else ids,
    )
    save_index(index, output, about)
    spent = time.perf_counter() - began
    typer.echo(
        f"Indexed {len(x):,} vectors of {x.shape[1]} in {spent:.1f} s: {q}\n"
        f"Written: {output} ({out.size(output)}, {output.stat().st_size / len(x):.1f} bytes a "
        f"vector), {output}.json\n"
        f"Next: givens search {output} QUERIES -k 10"
    )


def read_ids(path: str) -> Any:
    """Integers from a file of shape (N,) or (N, 1)."""
    if path.endswith(".npy") and Path(path).is_file():
        try:
            table = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a whole .npy file of integers") from error
    else:
        table = vectors.read(path)[:]
    return table[:, 0] if table.ndim == 2 and table.shape[1] == 1 else table


def _record(path: Path) -> dict[str, Any]:
    """What `givens fit` wrote beside the quantizer, if it is still there."""
    beside = path.with_name(path.name + ".json")
    try:
        return dict(json.loads(beside.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
