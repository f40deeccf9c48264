"""`givens evaluate`: recall and speed of an index."""

import os
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from givens.cli import output as out
from givens.cli.search import match_ids
from givens.search import batches, check_queries, first_recall, ground_truth, open_index, recall
from givens.storage import files, vectors

KS = (1, 10, 100)
LEAST_SECONDS, MOST_PASSES = 0.2, 10
# The share of the best recall that the recommended nprobe must reach.
ENOUGH = 0.99
PICTURE = "recall.png"


def evaluate(
    index: Annotated[
        Path, typer.Argument(help="An index, from `givens build` or Faiss, or a folder of shards.")
    ],
    queries: Annotated[str, typer.Argument(help="The query vectors.")],
    groundtruth: Annotated[
        str | None,
        typer.Option(help="File of the queries' true neighbours, nearest first."),
    ] = None,
    exact: Annotated[
        str | None,
        typer.Option(
            metavar="BASE", help="The vectors in the index, to compute the true neighbours."
        ),
    ] = None,
    ids: Annotated[
        str | None, typer.Option(help="The --ids that the index was built with, for --exact.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the results.")] = Path(
        "evaluation"
    ),
    threads: Annotated[int, typer.Option(help="Threads of Faiss; 0 is all.")] = 0,
    mapped: Annotated[
        bool, typer.Option("--mmap", help="Leave inverted lists on the disk; read what is needed.")
    ] = False,
) -> None:
    """Measure an index: recall@k, 1-recall@k, queries a second, bytes a vector.

    recall@k is the share of the k true neighbours among the k found; 1-recall@k is how often the
    nearest one is among them. An inverted file is measured at nprobe 1, 2, 4 and so on, until
    recall no longer rises, and plotted in recall.png.

    Example: givens evaluate index.faiss queries.fvecs --groundtruth groundtruth.ivecs

    Example: givens evaluate index.faiss queries.fvecs --exact base.fvecs
    """
    from givens.export.faiss import code_size, inverted

    if (groundtruth is None) == (exact is None):
        raise ValueError("give either --groundtruth FILE or --exact BASE")
    if exact is None and ids is not None:
        raise ValueError("--ids goes with --exact")
    cores = os.cpu_count() or 1
    if not 0 <= threads <= cores:
        raise ValueError(f"--threads must be 0, for all, to {cores} on this machine, not {threads}")
    stored = open_index(index, mapped=mapped)
    Q = vectors.read(queries, "test")
    if exact is not None:
        truth = _find_exact(stored, Q, exact, ids)
    else:
        truth = _read_truth(f"{groundtruth}", len(Q))
    ks = [k for k in KS if k <= min(truth.shape[1], stored.index.ntotal)]
    check_queries(stored.index, Q, max(ks, default=1))
    for _ in batches(Q):
        # Check that queries are finite before the folder is created.
        pass
    lists = inverted(stored.index)
    # Fail before the work if a package is missing or the folder cannot be written.
    pyplot = None if lists is None else out.import_pyplot()
    written = [output / "rows.json", *([] if pyplot is None else [output / PICTURE])]
    out.check_folder(output, ("rows.json", PICTURE), (index, queries, groundtruth, exact))
    with out.folder(output):
        files.check_writable(written[0])
        with out.progress("evaluating") as bar:
            rows = _sweep(stored.index, lists, Q, truth, ks, threads, bar)
        about = out.make_record(
            None, "cpu", index=index, queries=queries, groundtruth=groundtruth, exact=exact
        )
        code = code_size(stored.index)
        whole = out.count_bytes(index) / stored.index.ntotal
        about |= {"rows": rows, "bytes_a_vector": {"code": code, "file": whole}}
        picture = [] if pyplot is None else [_plot(pyplot, rows, ks)]
        files.write_together(dict(zip(written, [files.json_bytes(about), *picture], strict=True)))
        if pyplot is None:
            # A plot of another index would be mistaken for this one's.
            (output / PICTURE).unlink(missing_ok=True)
    for line in _format_table(rows, ks):
        typer.echo(line)
    coded = "" if code is None else f"{code} of code, "
    typer.echo(f"Bytes a vector: {coded}{whole:.1f} of file")
    typer.echo(f"Written: {', '.join(map(str, written))}")
    most = rows[-1][f"recall@{ks[-1]}"]
    enough = next(row for row in rows if row[f"recall@{ks[-1]}"] >= ENOUGH * most)
    nprobe = () if lists is None else ("--nprobe", enough["nprobe"])
    again = out.quote_command("givens", "search", index, queries, *nprobe, "--rerank", "VECTORS")
    typer.echo(f"Next: {again}, for more recall")


def _read_truth(groundtruth: str, queries: int) -> npt.NDArray[Any]:
    """Read true neighbours from a file."""
    truth = vectors.read(groundtruth, "neighbors")[:]
    if len(truth) != queries or truth.dtype.kind not in "iu":
        raise ValueError(
            f"--groundtruth must be integers for {queries} queries, but got {truth.dtype} "
            f"of shape {truth.shape}"
        )
    if not (truth[:, 0] >= 0).any():
        raise ValueError("--groundtruth must have neighbours, but has none first in its rows")
    ordered = np.sort(truth, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        raise ValueError(
            f"--groundtruth must have each neighbour of a query once, but row "
            f"{int(twice.any(1).argmax())} has one twice; are these ids?"
        )
    return truth


def _find_exact(stored: Any, Q: Any, base: str, ids: str | None) -> npt.NDArray[Any]:
    """Find the true neighbours among the index's vectors, by the index's metric."""
    from givens.export.faiss import metric_of

    original = vectors.read(base, "train")
    names = match_ids(stored, original, ids, "--exact")
    if len(original) != stored.index.ntotal:
        raise ValueError(
            f"--exact must be the {stored.index.ntotal} vectors of the index, but got "
            f"{len(original)}"
        )
    check_queries(stored.index, Q, 1)
    k = min(KS[-1], len(original))
    with out.progress("exact neighbours") as bar:
        bar.start(len(Q) * len(original))
        found = ground_truth(original, Q, k, metric_of(stored.index), progress=bar.advance)
    truth: npt.NDArray[Any] = found.numpy()
    return truth if names is None else names[truth]


def _sweep(
    index: Any, lists: Any, Q: Any, truth: Any, ks: list[int], threads: int, bar: out.Bar
) -> list[dict[str, Any]]:
    """Measure a row for each nprobe, until recall no longer rises."""
    import faiss

    if threads:
        faiss.omp_set_num_threads(threads)
    steps = [1 << power for power in range(lists.nlist.bit_length())] if lists else [1]
    if lists and steps[-1] != lists.nlist:
        steps.append(lists.nlist)
    bar.start(len(steps))
    rows: list[dict[str, Any]] = []
    for nprobe in steps:
        if lists:
            lists.nprobe = nprobe
        answers, speed = _search_timed(index, Q, ks[-1])
        rows.append(
            {
                **({"nprobe": nprobe} if lists else {}),
                **{f"recall@{k}": recall(answers, truth, k) for k in ks},
                **{f"1-recall@{k}": first_recall(answers, truth, k) for k in ks},
                "queries_a_second": speed,
                "threads": faiss.omp_get_max_threads(),
            }
        )
        bar.advance()
        last = [[row[f"recall@{k}"] for k in ks] for row in rows[-3:]]
        if len(last) == 3 and last[0] == last[1] == last[2]:
            return rows[:-2]
    return rows


def _search_timed(index: Any, Q: Any, k: int) -> tuple[npt.NDArray[Any], float]:
    """Search all queries; returns the results and queries a second. Few queries are repeated."""
    spent, passes = 0.0, 0
    while spent < LEAST_SECONDS and passes < MOST_PASSES:
        found = []
        for part, _ in batches(Q):
            began = time.perf_counter()
            found.append(index.search(part, k)[1])
            spent += time.perf_counter() - began
        passes += 1
    return np.concatenate(found), passes * len(Q) / spent


def _format_table(rows: list[dict[str, Any]], ks: list[int]) -> list[str]:
    names = [*(["nprobe"] if "nprobe" in rows[0] else [])]
    names += [f"recall@{k}" for k in ks] + [f"1-recall@{k}" for k in ks] + ["queries_a_second"]
    lines = ["  ".join(f"{name.replace('_', ' '):>12}" for name in names)]
    for row in rows:
        cells = [f"{row[n]:.4f}" if "recall" in n else f"{row[n]:,.0f}" for n in names]
        lines.append("  ".join(f"{cell:>12}" for cell in cells))
    return lines


def _plot(pyplot: Any, rows: list[dict[str, Any]], ks: list[int]) -> bytes:
    figure, axis = pyplot.subplots(figsize=(6.5, 4.2), layout="constrained")
    for k in ks:
        recalls = [row[f"recall@{k}"] for row in rows]
        speeds = [row["queries_a_second"] for row in rows]
        axis.plot(recalls, speeds, "o-", markersize=4, label=f"recall@{k}")
    for row in rows:
        at = (row[f"recall@{ks[-1]}"], row["queries_a_second"])
        axis.annotate(row["nprobe"], at, xytext=(4, 4), textcoords="offset points", fontsize=7)
    axis.set(yscale="log", xlabel="recall", ylabel="queries a second")
    threads = f"{rows[0]['threads']} thread{'s' * (rows[0]['threads'] > 1)}"
    axis.set_title(f"nprobe {rows[0]['nprobe']} to {rows[-1]['nprobe']}, {threads}")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    picture = files.png(figure)
    pyplot.close(figure)
    return picture
