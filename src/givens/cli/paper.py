"""`givens paper`: the figures and tables of the paper, one command each."""

from pathlib import Path
from typing import Annotated

import typer

from givens.cli import output as out

app = typer.Typer(
    name="paper", help="The paper's figures and tables: rows, pictures and what they show.",
    no_args_is_help=True,
)  # fmt: skip

Output = Annotated[Path, typer.Option("-o", "--output", help="Folder of the results.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Data = Annotated[Path, typer.Option(help="Folder of the base vectors, as SIFT1M's.")]
Iterations = Annotated[int, typer.Option(help="Iterations of each run.")]
Smoke = Annotated[bool, typer.Option(help="A small run, to see that it works.")]


@app.command()
def fig4(
    output: Output,
    device: Device = "cpu",
    dims: Annotated[str, typer.Option(help="Sizes n, with commas between.")] = "",
    rows: Annotated[
        Path | None, typer.Option(help="Draw the picture from rows that were measured before.")
    ] = None,
    smoke: Smoke = False,
) -> None:
    """Time one step of GCD-R, GCD-G, GCD-S, Cayley and SVD against n.

    Example: givens paper fig4 --device cuda -o results
    """
    from givens.paper import fig4
    from givens.paper.rows import read, write

    place = out.check_device(device).type
    sizes = _sizes(dims) or ((16, 32) if smoke else fig4.DIMS[place])
    pyplot = out.pyplot()
    output.mkdir(parents=True, exist_ok=True)
    if rows:
        measured = read(rows)
    else:
        with out.progress("timing") as bar:
            bar.start(len(sizes) * len(fig4.METHODS))

            def tell(line: str) -> None:
                typer.echo(line)
                bar.advance()

            measured = fig4.run(place, sizes, tell=tell)
        write(output / f"fig4-{place}.json", measured)
    picture = output / f"fig4-{place}.png"
    fig4.plot(pyplot, measured, picture)
    for line in fig4.claims(measured):
        typer.echo(line)
    typer.echo(f"{picture}: look at it; the rows are beside it")


@app.command()
def fig2a(
    data: Data, output: Output, device: Device = "cpu", iterations: Iterations = 50,
    smoke: Smoke = False,
) -> None:  # fmt: skip
    """Show how OPQ, Cayley and every kind of GCD converge on fixed vectors.

    Example: givens paper fig2a --data sift -o results --device cuda
    """
    _fig2("a", data, output, device, iterations, smoke)


@app.command()
def fig2b(
    data: Data, output: Output, device: Device = "cpu", iterations: Iterations = 50,
    smoke: Smoke = False,
) -> None:  # fmt: skip
    """Show how much ten runs of OPQ differ, on 10 %, 30 % and all of the data.

    Example: givens paper fig2b --data sift -o results --device cuda
    """
    _fig2("b", data, output, device, iterations, smoke)


@app.command()
def fig2c(
    data: Data, output: Output, device: Device = "cpu", iterations: Iterations = 50,
    smoke: Smoke = False,
) -> None:  # fmt: skip
    """Show how much ten runs of GCD-G differ, on 10 %, 30 % and all of the data.

    Example: givens paper fig2c --data sift -o results --device cuda
    """
    _fig2("c", data, output, device, iterations, smoke)


def _fig2(part: str, data: Path, output: Path, device: str, iterations: int, smoke: bool) -> None:
    from givens.paper import fig2

    place = out.check_device(device).type
    if iterations < 1:
        raise ValueError(f"--iterations must be at least 1, but got {iterations}")
    pyplot = out.pyplot()
    x = fig2.read_base(data, place)
    if smoke:
        x, iterations = x[:5000], min(iterations, 3)
    output.mkdir(parents=True, exist_ok=True)
    rows, picture = output / f"fig2{part}.json", output / f"fig2{part}.png"
    with out.progress("runs") as bar:
        # At the most: a method's best rate may be the paper's.
        count = len(fig2.FRACTIONS) * fig2.RUNS
        bar.start((len(fig2.RATES) + 2) * (len(fig2.METHODS) - 1) + 2 if part == "a" else count)

        def tell(line: str) -> None:
            typer.echo(line)
            bar.advance()

        runs = fig2.Runs(rows, x, iterations, tell)
        if part == "a":
            fig2.run_a(runs)
        else:
            fig2.run_bc(runs, "opq" if part == "b" else "gcd-greedy")
    plot = fig2.plot_a if part == "a" else fig2.plot_bc
    for line in plot(pyplot, runs.rows, picture):
        typer.echo(line)
    typer.echo(f"{picture}: look at it; the rows are in {rows}, and a rerun goes on from them")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        sizes = (0,)
    if any(n < 2 for n in sizes):
        raise ValueError(f"--dims must be numbers from 2 on with commas between, but got {text!r}")
    return sizes
