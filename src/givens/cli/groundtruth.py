"""`givens groundtruth`: the exact neighbours of queries."""

import time
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer

from givens.cli import output as out
from givens.quantizer import Metric
from givens.search import ground_truth
from givens.storage import files, vectors


def groundtruth(
    base: Annotated[str, typer.Argument(help="The vectors to search.")],
    queries: Annotated[str, typer.Argument(help="The query vectors.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Ids (Q, k), as .npy or .ivecs.")],
    k: Annotated[int, typer.Option("-k", help="Neighbours of each query.")] = 100,
    metric: Annotated[str, typer.Option(help="l2, ip or cosine.")] = "l2",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Find the exact neighbours of queries, for `givens evaluate` to compare with.

    Every query is compared with every vector; ties go to the smaller id. Vectors are streamed. A
    record, OUTPUT.json, is written beside the ids.

    Example: givens groundtruth base.fvecs queries.fvecs -o truth.npy
    """
    if output.suffix not in (".npy", ".ivecs"):
        raise ValueError(f"{output} must end in .npy or .ivecs")
    place = out.check_device(device)
    x, Q = vectors.read(base, "train"), vectors.read(queries, "test")
    out.check_outputs({"--output": output}, [base, queries])
    began = time.perf_counter()
    with out.progress("exact neighbours") as bar:
        bar.start(len(x) * len(Q))
        # Vectors are streamed; queries fit into memory if the result does.
        there: Any = Q if place.type == "cpu" else vectors.as_float(Q[:], place)
        found = ground_truth(x, there, k, cast(Metric, metric), progress=bar.advance)
    spent, ids = time.perf_counter() - began, found.cpu().numpy()
    with files.replacing(output) as temporary, temporary.open("wb") as file:
        if output.suffix == ".npy":
            np.save(file, ids)
        else:
            widths = np.full((len(ids), 1), k)
            np.hstack([widths, ids]).astype("<i4").tofile(file)
    about = out.make_record(None, device, base=base, queries=queries, k=k, metric=metric)
    out.write_record(output, {**about, "seconds": spent})
    again = out.quote_command("givens", "evaluate", "INDEX", queries, "--groundtruth", output)
    typer.echo(
        f"Found the {k} nearest of {len(x):,} vectors to {len(Q):,} queries in {spent:.1f} s\n"
        f"Written: {output} ({out.format_size(output)}), {output}.json\nNext: {again}"
    )
