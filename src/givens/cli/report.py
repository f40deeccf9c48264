"""`givens report`: runs as one page."""

from pathlib import Path
from typing import Annotated

import typer

from givens.cli import output as out


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The page to write, .html.")
    ] = Path("report.html"),
) -> None:
    """Write a self-contained page about training runs.

    Takes the folders that `givens train` and `givens demo` write; runs that are not finished are
    shown up to their last step. The speed of searching is measured now, on this machine.

    Example: givens report frozen gcd post-hoc -o report.html
    """
    if output.suffix != ".html":
        raise ValueError(f"{output} must end in .html")
    out.check_outputs({"--output": output}, runs)
    from givens.report.findings import describe_findings
    from givens.report.page import write_report

    with out.progress("measuring") as bar:
        bar.start(len(runs))
        entries = write_report(runs, output, tell=bar.advance)
    for line in describe_findings(entries):
        typer.echo(line)
    typer.echo(f"Written: {output} ({out.format_size(output)}), of {len(entries)} runs")
    typer.echo(f"Next: open {output} in a browser")
