"""`givens build`: encode all vectors into an index that Faiss serves."""

import shutil
import time
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import numpy as np
import typer

from givens.cli import output as out
from givens.cli.output import Engine
from givens.quantizer import Quantizer, load
from givens.storage import vectors
from givens.storage.formats import npy


def build(
    quantizer: Annotated[Path, typer.Argument(help="A quantizer, from `givens fit`.")],
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="VECTORS...", help="The vectors to index: files, folders, addresses as s3://…"
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The index to write; a folder with --shards.")
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            help="pq, ivfpq, pq-fastscan, ivfpq-fastscan or hnswpq; by the quantizer if left out."
        ),
    ] = None,
    refine: Annotated[
        bool, typer.Option("--refine", help="Keep the vectors too, and re-rank candidates by them.")
    ] = False,
    ids: Annotated[
        str | None,
        typer.Option(help="File of integers, one a vector, to return instead of positions."),
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray: workers on many cores.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster; without one Ray starts on this machine.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Workers of Ray at once; all cores if left out.")
    ] = None,
    shards: Annotated[
        bool, typer.Option("--shards", help="Write a folder of shards instead of one file.")
    ] = False,
) -> None:
    """Encode vectors into an index that Faiss loads, adds to and searches.

    Vectors are streamed: memory holds the index and a slice of them. Codes do not depend on any
    seed. INDEX.json is written beside the index: configuration, versions, fingerprint and checksum.
    The words of a text file, as of GloVe or word2vec, go into INDEX.items.txt, a line for each id.

    With --engine ray or --shards, memory holds one shard for each worker, however many vectors
    there are, and a stopped build continues when it is run again.

    Example: givens build q.safetensors base.fvecs -o index.faiss
    """
    began = time.perf_counter()
    if not quantizer.is_file():
        raise FileNotFoundError(f"there is no quantizer {quantizer}; make one with `givens fit`")
    if engine not in get_args(Engine):
        raise ValueError(f"--engine must be one of {', '.join(get_args(Engine))}, but got {engine}")
    if engine == "local" and (address is not None or workers is not None):
        raise ValueError("--address and --workers need --engine ray")
    q = load(quantizer)
    read, names = ([], None) if ids is None else ([ids], read_ids(ids))
    from givens.export.faiss import Kind, save_index, to_faiss

    about = out.make_record(
        out.read_record(quantizer).get("seed"),
        "cpu",
        quantizer=quantizer,
        vectors=sources[0] if len(sources) == 1 else sources,
        kind=kind or ("pq" if q.coarse is None else "ivfpq"),
        refine=refine,
        ids="positions" if ids is None else ids,
    )
    if engine == "local" and not shards:
        x = vectors.join(
            [file for source in sources for file in vectors.list_files(source)], "train"
        )
        out.check_outputs({"--output": output}, [quantizer, *sources, *read])
        with out.progress("encoding") as bar:
            bar.start(len(x))
            index = to_faiss(
                q,
                x,
                kind=cast(Kind | None, kind),
                refine=refine,
                ids=names,
                progress=bar.advance,
            )
        save_index(index, output, about)
        N, called = len(x), vectors.names_of(x) if ids is None else None
        out.write_names(output, called)
    else:
        if refine:
            raise ValueError("--refine keeps vectors in one file: leave --engine and --shards out")
        if kind not in (None, "ivfpq"):
            raise ValueError(f"--engine ray and --shards make an index of kind ivfpq, not {kind}")
        out.check_outputs({"--output": output}, [quantizer, *sources, *read], folders=shards)
        called = None
        N = _build_shards(q, sources, output, names, (engine, address, workers), about, keep=shards)
    spent, size = time.perf_counter() - began, out.count_bytes(output)
    typer.echo(
        f"Indexed {N:,} vectors of {q.dim} in {spent:.1f} s: {q}\n"
        f"Written: {output} ({out.format_size(output)}, {size / N:.1f} bytes a vector)"
        f"{'' if shards else f', {output}.json'}"
        f"{'' if called is None else f', {out.get_names_path(output)}'}\n"
        f"Next: {out.quote_command('givens', 'search', output, 'QUERIES', '-k', 10)}"
    )


def _build_shards(
    q: Quantizer,
    sources: list[str],
    output: Path,
    names: Any,
    how: tuple[str, str | None, int | None],
    about: dict[str, Any],
    *,
    keep: bool,
) -> int:
    """Build shards in a folder, optionally merge them; returns the number of vectors."""
    from givens.export import shards
    from givens.export.faiss import check_ids
    from givens.export.lists import centroids

    # Checked before anything is created.
    centroids(q)
    engine, address, workers = how
    encode: Any = shards.encode_here
    options: dict[str, Any] = {}
    if engine == "ray":
        from givens.export.ray import encode_on_ray

        encode, options = encode_on_ray, {"address": address, "workers": workers}
    jobs = shards.plan(sources, q.dim)
    N = sum(job.rows for job in jobs)
    ids = None if names is None else check_ids(names, N)
    folder = output if keep else output.with_name(output.name + ".parts")
    began = time.perf_counter()
    with shards.building(folder):
        with out.progress("encoding") as bar:
            bar.start(N)
            made = encode(q, jobs, folder, ids=ids, progress=bar.advance, **options)
        encoded = time.perf_counter()
        about |= {"engine": engine, "seconds": {"encode": encoded - began}}
        if keep:
            shards.finish(q, made, folder, about)
            return N
        with out.progress("merging") as bar:
            bar.start(N)
            shards.merge(q, made, folder, output, about, bar.advance)
        shutil.rmtree(folder)
    return N


def read_ids(path: str) -> Any:
    """Read integers from a file of shape (N,) or (N, 1)."""
    if path.endswith(".npy") and Path(path).is_file():
        # One axis, so it is not a file of vectors.
        table = np.array(npy(Path(path)))
    else:
        table = vectors.read(path)[:]
    return table[:, 0] if table.ndim == 2 and table.shape[1] == 1 else table
