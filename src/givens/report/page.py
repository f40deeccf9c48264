"""The page: findings, a table, figures, and the runs' options and environments."""

import datetime
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import givens
from givens.report import figures
from givens.report.findings import Entry, describe_findings
from givens.report.measure import measure_run
from givens.report.runs import read_runs
from givens.storage import files


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, with the colour of its run, as a name or as code."""

    text: str
    colour: int | None = None
    name: bool = False
    code: bool = False


@dataclass(frozen=True)
class Table:
    """A table: heads, rows and a note."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str


def write_report(
    paths: Sequence[Path], output: Path, *, tell: Callable[[], object] = lambda: None
) -> list[Entry]:
    """Read runs, measure the finished ones, and write the page.

    `tell` is called after each run.
    """
    entries = []
    for run in read_runs(list(paths)):
        entries.append(Entry(run, measure_run(run)))
        tell()
    with files.replacing(output) as temporary:
        # The name of a folder, or one in a run's JSON, may not be valid Unicode.
        temporary.write_text(render_page(entries), "utf-8", "backslashreplace")
    return entries


def render_page(entries: list[Entry]) -> str:
    """Render the self-contained page; its content policy forbids the browser to fetch anything.

    The template escapes everything that comes from runs.
    """
    logs = list(dict.fromkeys(entry.run.about["log"] for entry in entries))
    sections = (
        ("What was learned", list(figures.draw_learning(entries))),
        ("What the index gives", list(figures.draw_serving(entries))),
        ("Codewords and rotation", list(figures.draw_parts(entries))),
    )
    return _load_template().render(
        entries=entries,
        style=Markup(_read_resource("page.css")),
        logs=logs,
        cautions=_list_cautions(entries, logs),
        findings=describe_findings(entries),
        results=_tabulate_results(entries),
        sections=sections,
        options=_tabulate_options(entries),
        version=givens.__version__,
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _read_resource(name: str) -> str:
    return resources.files("givens.report").joinpath(name).read_text("utf-8")


@functools.cache
def _load_template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    return environment.from_string(_read_resource("page.html"))


def _list_cautions(entries: list[Entry], logs: list[str]) -> list[str]:
    """Warnings that a reader needs before comparing."""
    lines = []
    if len(logs) > 1:
        lines.append(
            "These runs are of different logs: their numbers are not to be compared with each "
            "other, and the pictures show them side by side only."
        )
    lines += [
        f"{entry.run.label}: its index finds less than popularity alone, the same most clicked "
        f"items for everybody ({100 * recall:.2f} % against {100 * popular:.2f} %); its towers "
        "have learned too little for these numbers to mean much"
        for entry in entries
        if (recall := entry.run.find_recall("index") or 0.0)
        < (popular := entry.run.find_recall("popularity") or 0.0)
    ]
    lines += [
        f"{entry.run.label} is {entry.run.standing}; it has no index yet, and is shown as far as "
        f"it came. Continue with: givens train … -o {entry.run.path} --resume"
        for entry in entries
        if entry.run.results is None
    ]
    return lines


def _tabulate_results(entries: list[Entry]) -> Table:
    """A row for each run, and the recall without an index."""
    metrics = list(dict.fromkeys(e.run.metric for e in entries if e.run.results is not None))
    metric = metrics[0] if len(metrics) == 1 else "recall"
    heads = (
        "run",
        "distortion",
        f"{metric}, index",
        f"{metric}, full precision",
        "bytes an item",
        "codewords in use",
        "seconds",
    )
    rows = []
    for number, (run, seen) in enumerate((entry.run, entry.seen) for entry in entries):
        perplexity = seen and f"{seen.perplexity:.0f} of {run.options['codewords']}"
        cells = (
            _format_number(run.distortion, "{:.4f}"),
            _format_number(run.recall, "{:.2%}"),
            _format_number(run.find_recall("full"), "{:.2%}"),
            f"{run.bytes}",
            perplexity or "–",
            _format_number(run.about.get("seconds"), "{:,.0f}"),
        )
        label = Cell(run.label, number % figures.COLOURS, name=True)
        rows.append((label, *map(Cell, cells)))
    popular = {
        run.find_recall("popularity"): run for run in (e.run for e in entries) if run.results
    }
    for value, run in popular.items():
        log = f", {run.about['log'].split(':')[0]}" if len(popular) > 1 else ""
        found = _format_number(value, "{:.2%}")
        rows.append((Cell(f"popularity{log}", name=True), *map(Cell, ("–", found, *"––––"))))
    note = (
        "Distortion: mean squared error of an item's unit vector. Recall: the part of what test "
        "users liked next that is among the items they are given. Both are of the index that is "
        "kept, from the step that did best on the validation users. Full precision: the same "
        "towers without an index. Codewords in use: e^entropy, the mean over subspaces. Seconds: "
        "of the whole run, also if it was resumed, but without a warm-up that it shares."
    )
    return Table(heads, rows, note)


def _tabulate_options(entries: list[Entry]) -> Table:
    """The options that differ, those that all runs share, commands and environments."""
    runs = [entry.run for entry in entries]

    def row(name: str, values: Sequence[Any], *, code: bool = False) -> tuple[Cell, ...]:
        return Cell(name, name=True), *(Cell(_format_value(value), code=code) for value in values)

    names = list(dict.fromkeys(name for run in runs for name in run.options))
    apart = [
        name for name in names if len({_format_value(run.options.get(name)) for run in runs}) > 1
    ]
    versions = [run.about.get("versions", {}) for run in runs]
    packages = dict.fromkeys(name for there in versions for name in there)
    commands = [f"givens {' '.join(map(str, run.about.get('command', [])))}" for run in runs]
    around = ("device", "threads", "written")
    rows = [
        *(row(name, [run.options.get(name) for run in runs]) for name in apart),
        row("standing", [run.standing for run in runs]),
        *(row(name, [run.about.get(name) for run in runs]) for name in around),
        *(row(name, [there.get(name) for there in versions]) for name in packages),
        row("command", commands, code=True),
    ]
    same = [f"{name} {_format_value(runs[0].options[name])}" for name in names if name not in apart]
    note = f"The same in all runs: {', '.join(same)}." if same else ""
    return Table(("option", *(run.label for run in runs)), rows, note)


def _format_number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value).replace("%", " %")


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
