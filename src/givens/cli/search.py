"""`givens search`: the nearest neighbours of queries, by an index and optionally once more."""

import hashlib
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer

from givens.cli import output as out
from givens.cli.build import read_ids
from givens.export import NPROBE
from givens.storage import files, vectors

# Queries searched at once: a batch for the bar to move, large enough for Faiss's threads.
BATCH = 1024


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
        typer.Option(metavar="VECTORS", help="Rank candidates again by these original vectors."),
    ] = None,
    candidates: Annotated[
        int | None, typer.Option(help="Candidates to rank again, 10·k if left out.")
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
    from givens.export.faiss import from_faiss

    for path in (output, scores):
        if path is not None and path.suffix != ".npy":
            raise ValueError(f"{path} must end in .npy")
    out.check_outputs({"--output": output, "--scores": scores}, [index, queries, rerank, ids])
    if rerank is None and (candidates is not None or ids is not None):
        raise ValueError("--candidates and --ids go with --rerank")
    stored = open_index(index, mapped=mapped)
    asked = vectors.read(queries, "test")
    check_queries(stored.index, asked, k)
    set_nprobe(stored.index, nprobe)
    proposed = 10 * k if candidates is None else candidates
    wanted = k if rerank is None else min(proposed, stored.index.ntotal)
    if wanted < k:
        raise ValueError(f"--candidates must be at least k, but got {candidates} and k={k}")
    ranker = None
    if rerank is not None:
        original = vectors.read(rerank, "train")
        rows = row_finder(stored, original, ids)
        ranker = (original, rows, from_faiss(stored.index).metric)

    found = np.empty((len(asked), k), np.int64)
    values = np.empty((len(asked), k), np.float32)
    spent = 0.0
    with out.progress("searching") as bar:
        bar.start(len(asked))
        for part, at in batches(asked):
            began = time.perf_counter()
            D, I = stored.index.search(part, wanted)  # noqa: E741
            if ranker is not None:
                D, I = ranked(part, I, *ranker, k)  # noqa: E741
            spent += time.perf_counter() - began
            found[at], values[at] = I, D
            bar.advance(len(part))

    tables = ((output, found), (scores, values))
    written = {path: files.npy_bytes(table) for path, table in tables if path is not None}
    if output is not None:
        about = out.record(
            None, "cpu", index=index, queries=queries, k=k, nprobe=nprobe, rerank=rerank
        )
        about |= {"seconds": spent, "checksum": hashlib.sha256(written[output]).hexdigest()}
        written[out.beside(output)] = files.json_bytes(about)
    files.write_together(written)
    typer.echo(
        f"Searched {len(asked):,} queries among {stored.index.ntotal:,} vectors in {spent:.2f} s "
        f"({len(asked) / spent:,.0f} a second)"
        + ("" if rerank is None else f", {wanted} candidates each ranked again")
    )
    if output is None:
        names = out.read_names(index) if ids is None else None
        for row in range(min(len(asked), 10)):
            called = [
                str(i) if names is None or not 0 <= i < len(names) else names[i] for i in found[row]
            ]
            typer.echo(f"{row}: " + (" " if names is None else ", ").join(called))
        typer.echo("Next: the same with -o neighbours.npy, for all of them")
    else:
        typer.echo(f"Written: {output}, {output}.json")
        again = out.command("givens", "evaluate", index, queries, "--groundtruth", "FILE")
        typer.echo(f"Next: {again}")


def open_index(path: Path, *, mapped: bool = False) -> Any:
    """An index from a file, or from a folder of shards."""
    if path.is_dir():
        from givens.export.shards import load_shards

        return load_shards(path)
    from givens.export.faiss import load_index

    return load_index(path, mapped=mapped)


def check_queries(index: Any, queries: vectors.Vectors, k: int) -> None:
    """Refuse what Faiss would answer with nothing, or with a crash."""
    if queries.shape[1] != index.d:
        raise ValueError(
            f"queries must have {index.d} dimensions as the index has, but got {queries.shape[1]}"
        )
    if index.ntotal == 0:
        raise ValueError("the index holds no vectors")
    if not 1 <= k <= index.ntotal:
        raise ValueError(f"k must be in 1..{index.ntotal}, the vectors in the index, but got {k}")


def set_nprobe(index: Any, nprobe: int) -> None:
    """Say how many lists to look into, where there are lists."""
    from givens.export.faiss import inverted

    if nprobe < 1:
        raise ValueError(f"--nprobe must be at least 1, but got {nprobe}")
    lists = inverted(index)
    if lists is not None:
        lists.nprobe = min(nprobe, lists.nlist)


def batches(queries: vectors.Vectors) -> Any:
    """Queries as float32 arrays, with their places."""
    at = 0
    for part in vectors.chunks(queries, BATCH):
        if not part.isfinite().all():
            raise ValueError(
                f"queries must be finite, but some of {at}..{at + len(part) - 1} are not"
            )
        yield part.numpy(), slice(at, at := at + len(part))


def row_finder(stored: Any, original: vectors.Vectors, ids: str | None) -> Any:
    """The rows of the original vectors by the index's ids; None where they are the same."""
    if original.shape[1] != stored.index.d or len(original) < stored.index.ntotal:
        raise ValueError(
            f"--rerank must be the {stored.index.ntotal} vectors of the index, of "
            f"{stored.index.d} dimensions, but got shape {tuple(original.shape)}"
        )
    named = stored.record and stored.record.get("configuration", {}).get("ids", "positions")
    if ids is None:
        if named not in (None, "positions"):
            raise ValueError(f"--rerank needs --ids {named}, by which the index names its vectors")
        return None
    names = read_ids(ids)
    if names.shape != (len(original),) or names.dtype.kind not in "iu":
        raise ValueError(
            f"--ids must be integers of shape ({len(original)},), but got {names.dtype} of shape "
            f"{names.shape}"
        )
    order = np.argsort(names)
    return names[order], order


def ranked(
    queries: npt.NDArray[np.float32],
    candidates: npt.NDArray[np.int64],
    original: vectors.Vectors,
    names: Any,
    metric: str,
    k: int,
) -> tuple[Any, Any]:
    """The k best of each query's candidates, by the original vectors."""
    rows = candidates
    if names is not None:
        at = np.searchsorted(names[0], candidates).clip(0, len(names[0]) - 1)
        rows = np.where(names[0][at] == candidates, names[1][at], -1)
    if rows.max() >= len(original) or ((rows < 0) != (candidates < 0)).any():
        raise ValueError("--rerank and the index do not belong together: an id has no vector")
    # Each vector once, however many queries it is a candidate of.
    unique, inverse = np.unique(rows.clip(0), return_inverse=True)
    table = torch.from_numpy(np.asarray(original[unique], dtype=np.float32))
    asked = torch.from_numpy(queries)
    if metric == "cosine":
        table, asked = (torch.nn.functional.normalize(t) for t in (table, asked))
    scores = torch.empty(rows.shape)
    for query, places in enumerate(torch.from_numpy(inverse.reshape(rows.shape))):
        if metric == "l2":
            scores[query] = (table[places] - asked[query]).square().sum(1)
        else:
            scores[query] = table[places] @ asked[query]
    worst = torch.inf if metric == "l2" else -torch.inf
    scores[torch.from_numpy(candidates < 0)] = worst
    best = scores.topk(k, largest=metric != "l2")
    return best.values.numpy(), np.take_along_axis(candidates, best.indices.numpy(), 1)
