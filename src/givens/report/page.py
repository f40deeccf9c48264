"""The page: what the runs say in words, a table, pictures, and how they came about."""

import datetime
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
from givens.report.findings import Entry, findings
from givens.report.measure import measured
from givens.report.runs import read_runs
from givens.storage import files


@dataclass(frozen=True)
class Cell:
    """Of a table: what it says, in the colour of its run, as a name or as code."""

    text: str
    colour: int | None = None
    name: bool = False
    code: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under heads, and a note under them."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str


def report(
    paths: Sequence[Path], output: Path, *, tell: Callable[[], object] = lambda: None
) -> list[Entry]:
    """Read runs, measure those that are finished, and write the page of all of them.

    `tell` is called after each run.
    """
    entries = []
    for run in read_runs(list(paths)):
        entries.append(Entry(run, measured(run)))
        tell()
    with files.replacing(output) as temporary:
        # A name may be no Unicode: of a folder, or in a run's JSON.
        temporary.write_text(page(entries), "utf-8", "backslashreplace")
    return entries


def page(entries: list[Entry]) -> str:
    """The whole page, self-contained: the browser is told to refuse it.

    All that comes from the runs is escaped by the template.
    """
    logs = list(dict.fromkeys(entry.run.about["log"] for entry in entries))
    sections = (
        ("What was learned", list(figures.learning(entries))),
        ("What the index gives", list(figures.serving(entries))),
        ("Codewords and rotation", list(figures.parts(entries))),
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    return environment.from_string(_resource("page.html")).render(
        entries=entries,
        style=Markup(_resource("page.css")),
        logs=logs,
        cautions=_cautions(entries, logs),
        findings=findings(entries),
        results=_results(entries),
        sections=sections,
        options=_options(entries),
        version=givens.__version__,
        written=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _resource(name: str) -> str:
    return resources.files("givens.report").joinpath(name).read_text("utf-8")


def _cautions(entries: list[Entry], logs: list[str]) -> list[str]:
    """What a reader must know before comparing."""
    told = []
    if len(logs) > 1:
        told.append(
            "These runs are of different logs: their numbers are not to be compared with each "
            "other, and the pictures show them side by side only."
        )
    told += [
        f"{entry.run.label} is {entry.run.standing}; it has no index yet, and is shown as far as "
        f"it came. Go on with: givens train … -o {entry.run.path} --resume"
        for entry in entries
        if entry.run.results is None
    ]
    return told


def _results(entries: list[Entry]) -> Table:
    """A row for each run, and what is there without an index."""
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
            _number(run.distortion, "{:.4f}"),
            _number(run.recall, "{:.2%}"),
            _number(run.found("full"), "{:.2%}"),
            f"{run.bytes}",
            perplexity or "–",
            _number(run.about.get("seconds"), "{:,.0f}"),
        )
        label = Cell(run.label, number % figures.COLOURS, name=True)
        rows.append((label, *map(Cell, cells)))
    popular = {run.found("popularity"): run for run in (e.run for e in entries) if run.results}
    for value, run in popular.items():
        log = f", {run.about['log'].split(':')[0]}" if len(popular) > 1 else ""
        found = _number(value, "{:.2%}")
        rows.append((Cell(f"popularity{log}", name=True), *map(Cell, ("–", found, *"––––"))))
    note = (
        "Distortion: mean squared error of an item's unit vector. Recall: the part of what test "
        "users liked next that is among the items they are given. Both are of the index that is "
        "kept, at the step that did best on the validation users. Full precision: the same towers "
        "without the index. Codewords in use: e^entropy, the mean over subspaces. Seconds: of the "
        "run, all its parts where it was resumed; one that went on from a shared warm-up does not "
        "count it."
    )
    return Table(heads, rows, note)


def _options(entries: list[Entry]) -> Table:
    """Options in which runs differ, those in which all agree, commands and environments."""
    runs = [entry.run for entry in entries]

    def row(name: str, values: Sequence[Any], *, code: bool = False) -> tuple[Cell, ...]:
        return Cell(name, name=True), *(Cell(_text(value), code=code) for value in values)

    names = list(dict.fromkeys(name for run in runs for name in run.options))
    apart = [name for name in names if len({_text(run.options.get(name)) for run in runs}) > 1]
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
    same = [f"{name} {_text(runs[0].options[name])}" for name in names if name not in apart]
    note = f"The same in all runs: {', '.join(same)}." if same else ""
    return Table(("option", *(run.label for run in runs)), rows, note)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value).replace("%", " %")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
