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


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        sizes = (0,)
    if any(n < 2 for n in sizes):
        raise ValueError(f"--dims must be numbers from 2 on with commas between, but got {text!r}")
    return sizes
