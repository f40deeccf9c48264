"""`givens search`: the nearest neighbours of queries, optionally re-ranked."""

import hashlib
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from givens.cli import output as out
from givens.cli.build import read_ids
from givens.export import NPROBE
from givens.search import batches, check_queries, open_index
from givens.search import rerank as rerank_candidates
from givens.storage import files, vectors


def search(
    index: Annotated[
        Path, typer.Argument(help="An index, from `givens build` or Faiss, or a folder of shards.")
    ],
    queries: Annotated[str, typer.Argument(help="The query vectors.")],
    k: Annotated[int, typer.Option("-k", help="Neighbours of each query.")] = 10,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write ids (N, k) as .npy.")
    ] = None,
    scores: Annotated[
        Path | None, typer.Option(help="Write squared distances or inner products as .npy.")
    ] = None,
    nprobe: Annotated[int, typer.Option(help="Lists to look into, of an inverted file.")] = NPROBE,
    rerank: Annotated[
        str | None,
        typer.Option(metavar="VECTORS", help="Re-rank candidates by these original vectors."),
    ] = None,
    candidates: Annotated[
        int | None, typer.Option(help="Candidates to re-rank, 10·k if left out.")
    ] = None,
    ids: Annotated[
        str | None, typer.Option(help="The --ids that the index was built with, for --rerank.")
    ] = None,
    mapped: Annotated[
        bool, typer.Option("--mmap", help="Leave inverted lists on the disk; read what is needed.")
    ] = False,
) -> None:
    """Find the nearest neighbours of queries.

    With --rerank, the index proposes candidates and the original vectors decide.

    Example: givens search index.faiss queries.fvecs -k 10 --rerank base.fvecs -o neighbours.npy
    """
    from givens.export.faiss import metric_of

    for path in (output, scores):
        if path is not None and path.suffix != ".npy":
            raise ValueError(f"{path} must end in .npy")
    out.check_outputs({"--output": output, "--scores": scores}, [index, queries, rerank, ids])
    if rerank is None and (candidates is not None or ids is not None):
        raise ValueError("--candidates and --ids go with --rerank")
    stored = open_index(index, mapped=mapped)
    Q = vectors.read(queries, "test")
    check_queries(stored.index, Q, k)
    set_nprobe(stored.index, nprobe)
    proposed = 10 * k if candidates is None else candidates
    wanted = k if rerank is None else min(proposed, stored.index.ntotal)
    if wanted < k:
        raise ValueError(f"--candidates must be at least k, but got {candidates} and k={k}")
    original = names = None
    if rerank is not None:
        original = vectors.read(rerank, "train")
        names = match_ids(stored, original, ids, "--rerank")

    found = np.empty((len(Q), k), np.int64)
    values = np.empty((len(Q), k), np.float32)
    spent = 0.0
    with out.progress("searching") as bar:
        bar.start(len(Q))
        for part, at in batches(Q):
            began = time.perf_counter()
            D, I = stored.index.search(part, wanted)  # noqa: E741
            if original is not None:
                metric = metric_of(stored.index)
                D, I = rerank_candidates(I, original, part, k, metric, ids=names)  # noqa: E741
            spent += time.perf_counter() - began
            found[at], values[at] = I, D
            bar.advance(len(part))

    tables = ((output, found), (scores, values))
    written = {path: files.npy_bytes(table) for path, table in tables if path is not None}
    if output is not None:
        about = out.make_record(
            None, "cpu", index=index, queries=queries, k=k, nprobe=nprobe, rerank=rerank
        )
        about |= {"seconds": spent, "checksum": hashlib.sha256(written[output]).hexdigest()}
        written[files.record_path(output)] = files.json_bytes(about)
    files.write_together(written)
    typer.echo(
        f"Searched {len(Q):,} queries among {stored.index.ntotal:,} vectors in {spent:.2f} s "
        f"({len(Q) / spent:,.0f} a second)"
        + ("" if rerank is None else f", {wanted} candidates each ranked again")
    )
    if output is None:
        shown = found[:10]
        called = out.read_names(index, set(shown.ravel().tolist())) if ids is None else None
        for row, near in enumerate(shown):
            words = [(called or {}).get(i, str(i)) for i in near]
            typer.echo(f"{row}: " + (" " if called is None else ", ").join(words))
        typer.echo("Next: the same with -o neighbours.npy, for all of them")
    else:
        typer.echo(f"Written: {output}, {output}.json")
        again = out.quote_command("givens", "evaluate", index, queries, "--groundtruth", "FILE")
        typer.echo(f"Next: {again}")


def set_nprobe(index: Any, nprobe: int) -> None:
    """Set nprobe, if the index has lists."""
    from givens.export.faiss import inverted

    if nprobe < 1:
        raise ValueError(f"--nprobe must be at least 1, but got {nprobe}")
    lists = inverted(index)
    if lists is not None:
        lists.nprobe = min(nprobe, lists.nlist)


def match_ids(stored: Any, original: vectors.Vectors, ids: str | None, option: str) -> Any:
    """The ids of the original vectors in the index, (N,); None for their positions."""
    if original.shape[1] != stored.index.d or len(original) < stored.index.ntotal:
        raise ValueError(
            f"{option} must be the {stored.index.ntotal} vectors of the index, of "
            f"{stored.index.d} dimensions, but got shape {tuple(original.shape)}"
        )
    named = stored.record and stored.record.get("configuration", {}).get("ids", "positions")
    if ids is None:
        if named not in (None, "positions"):
            raise ValueError(f"{option} needs --ids {named}, by which the index names its vectors")
        return None
    names = read_ids(ids)
    if names.shape != (len(original),) or names.dtype.kind not in "iu":
        raise ValueError(
            f"--ids must be integers of shape ({len(original)},), but got {names.dtype} of shape "
            f"{names.shape}"
        )
    return names
