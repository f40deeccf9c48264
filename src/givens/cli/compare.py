"""`givens compare`: all compressions at equal bytes, on your own vectors."""

import time
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from givens.cli import output as out
from givens.quantizer import Metric
from givens.storage import files, vectors


def compare(
    source: Annotated[str, typer.Argument(metavar="VECTORS", help="Your vectors.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The page to write, .html.")
    ] = Path("compare.html"),
    queries: Annotated[
        str | None,
        typer.Option(help="Query vectors; if left out, 1,000 of the vectors, held out."),
    ] = None,
    sizes: Annotated[
        str, typer.Option("--bytes", help="Bytes a vector, comma-separated.")
    ] = "16,32,64,96",
    minutes: Annotated[
        float | None, typer.Option(help="Time budget: nothing is started that would exceed it.")
    ] = None,
    metric: Annotated[str, typer.Option(help="l2, ip or cosine.")] = "l2",
    methods: Annotated[
        str | None, typer.Option(help="Methods to compare, comma-separated; all if left out.")
    ] = None,
    sample: Annotated[
        int, typer.Option(help="Vectors to search at most, drawn by the seed; 0 for all.")
    ] = 200_000,
    trained: Annotated[int, typer.Option(help="Vectors to learn from at most.")] = 65_536,
    threads: Annotated[int, typer.Option(help="Threads of every method.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
) -> None:
    """Find out which compression suits your vectors: recall and speed at equal bytes.

    Builds product quantizers with and without a rotation, RaBitQ, TurboQuant, scalar, residual and
    additive quantizers on the same vectors, and searches them with held-out queries.
    Writes a page with pictures, a table and advice, and the rows beside it, OUTPUT.json. The same
    command continues from the rows, also with more --bytes, --methods or --minutes.

    Methods: givens, pq, rabitq, sq8, sq4, opq-identity, pca-pq, givens-fastscan, rabitq-fastscan,
    givens-ivf, rabitq-ivf, turboquant, sq6, fp16, opq-default, prq, rq, lsq; in this order, the
    most useful first.

    Example: givens compare base.npy --bytes 16,32,64 --minutes 30 -o compare.html
    """
    if output.suffix != ".html":
        raise ValueError(f"{output} must end in .html")
    began = time.perf_counter()
    from givens.compare import page
    from givens.compare import run as comparing
    from givens.compare.methods import METHODS

    options = comparing.Options(
        bytes=_parse_numbers(sizes),
        metric=cast(Metric, metric),
        methods=tuple(METHODS) if methods is None else tuple(_split_words(methods)),
        minutes=minutes,
        sample=sample,
        trained=trained,
        seed=seed,
        threads=threads,
    )
    options.check()
    x = vectors.read(source, "train")
    Q = None if queries is None else vectors.read(queries, "test")
    rows = output.with_suffix(".json")
    out.check_outputs({"--output": output, "its rows": rows}, [source, queries])
    about: dict[str, Any] = {"source": Path(source).name, "file": vectors.stamp(source)}
    if queries is not None:
        about |= {"queries": Path(queries).name, "queries_file": vectors.stamp(queries)}
    with out.progress("reading") as bar:
        result = comparing.compare(x, rows, options, queries=Q, about=about, tell=bar.stand)
    told = page.advice(result)
    with files.replacing(output) as temporary:
        temporary.write_text(page.page(result), "utf-8")
    for line in told:
        typer.echo(line)
    if result["left_out"]:
        names = ", ".join(f"{one['method']} {one['budget']}" for one in result["left_out"])
        typer.echo(f"No time for: {names}")
    typer.echo(
        f"Written in {time.perf_counter() - began:.0f} s: "
        f"{output} ({out.format_size(output)}), {rows}\n"
        f"Next: open {output} in a browser"
    )


def _split_words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _parse_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(word) for word in _split_words(text)}))
    except ValueError as error:
        raise ValueError(f"--bytes must be whole numbers such as 16,32, but got {text}") from error
