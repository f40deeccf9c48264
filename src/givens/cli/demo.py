"""`givens demo`: an index trained with its towers, with a frozen rotation, and post-hoc."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from givens.cli import output as out
from givens.cli.train import run_record
from givens.report.runs import Folder
from givens.retrieval.config import LABELS, Method, config_for
from givens.retrieval.data import click_log
from givens.storage import files

# The built-in log, and what differs from `givens train`: codes of 4 bits, as in small indexes, and
# an identity start of R, so that the whole rotation is learned.
LOG: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {"subspaces": 16, "codewords": 16, "start": "identity", "every": 50}
METHODS: tuple[Method, ...] = ("frozen", "gcd", "post-hoc")
# The report's share of the progress bar, relative to all steps.
REPORT = 0.05


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the results.")] = Path(
        "demo"
    ),
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn.")] = 0,
) -> None:
    """Train two towers and their index on a synthetic click log, in three ways.

    With a frozen rotation, with a rotation learned by GCD, and with Faiss OPQ run afterwards, all
    from the same warm-up. Takes a few minutes on two cores; writes a page of pictures, and a folder
    for each way, with an index that Faiss opens.

    Example: givens demo -o demo
    """
    from givens.report.findings import describe_findings
    from givens.report.page import write_report
    from givens.retrieval.train import train, warm_up

    began = time.perf_counter()
    with out.folder(output):
        files.check_writable(output / "report.html")
    log = click_log(**LOG)
    config = config_for(log, size="small", **{**OPTIONS, "seed": seed})
    typer.echo(log)
    total = (1 + REPORT) * (config.warmup + len(METHODS) * config.steps)
    with out.progress("warm-up") as bar:
        whole = _SharedBar(bar, total)
        towers = warm_up(log, config, tell=whole.add_part("warm-up", 0, config.warmup))
        warmed = time.perf_counter() - began
        typer.echo(f"Warm-up: {config.warmup:,} steps of the towers alone, {warmed:.0f} s")
        for method in METHODS:
            start = time.perf_counter()
            chosen = dataclasses.replace(config, method=method)
            folder = output / method
            tell = whole.add_part(LABELS[method], config.warmup, config.steps)
            train(log, chosen, folder, towers=towers, tell=tell)
            spent = time.perf_counter() - start
            about = run_record(chosen, log, "cpu", None)
            files.write_json(folder / "config.json", {**about, "seconds": spent})
            typer.echo(f"{LABELS[method]}: {config.steps:,} steps and its index, {spent:.0f} s")
        entries = write_report([output / method for method in METHODS], output / "report.html")
    runs = {entry.run.method: entry.run for entry in entries}
    _show(runs, 4 * config.dim)
    for line in describe_findings(entries):
        typer.echo(f"• {line}")
    run = output / "gcd"
    asked = f"{run}/users.safetensors:queries"
    typer.echo(
        f"Written in {time.perf_counter() - began:.0f} s: {output}/report.html and the runs "
        f"{', '.join(f'{output}/{method}' for method in METHODS)}, each with an index.faiss\n"
        f"Next: open {output}/report.html in a browser, or\n"
        f"      {out.quote_command('givens', 'search', run / 'index.faiss', asked, '-k', 10)}"
    )


def _show(runs: dict[str, Folder], full: int) -> None:
    """Show the table: each run, the towers without an index, and popularity alone."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("", "distortion", "recall@100", "bytes an item", "seconds"):
        table.add_column(name, justify="right" if name else "left")
    for run in runs.values():
        recall, seconds = f"{100 * (run.recall or 0):.2f} %", f"{run.about['seconds']:.0f}"
        table.add_row(run.label, f"{run.distortion:.4f}", recall, str(run.bytes), seconds)
    alone = runs["post-hoc"]
    for name, by, size in (
        ("full precision, no index", "full", str(full)),
        ("popularity", "popularity", "–"),
    ):
        table.add_row(name, "–", f"{100 * (alone.find_recall(by) or 0):.2f} %", size, "–")
    Console().print(table)
    typer.echo("Distortion and recall at the step that did best on the validation users.")


class _SharedBar:
    """One progress bar over the steps of all parts."""

    def __init__(self, bar: out.Bar, total: float) -> None:
        self.bar, self.total, self.before = bar, int(total), 0

    def add_part(self, name: str, first: int, steps: int) -> Callable[[dict[str, Any]], None]:
        """Add the next part, whose steps start at `first`; returns its callback."""
        before = self.before
        self.before += steps

        def tell(row: dict[str, Any]) -> None:
            self.bar.stand(before + row["step"] - first, self.total, name)

        return tell
