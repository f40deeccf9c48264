"""The page: what the runs say in words, a table, pictures, and how they came about."""

import datetime
import json
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import givens
from givens.report import figures
from givens.report.findings import Entry, findings
from givens.report.measure import measured
from givens.report.runs import read_runs
from givens.storage import files


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
        temporary.write_text(page(entries), "utf-8")
    return entries


def page(entries: list[Entry]) -> str:
    """The whole page, which fetches nothing: the browser is told to refuse it."""
    style = resources.files("givens.report").joinpath("page.css").read_text("utf-8")
    logs = list(dict.fromkeys(entry.run.about["log"] for entry in entries))
    written = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    told = "".join(f"<li>{escape(line)}</li>" for line in findings(entries))
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">",
        '<link rel="icon" href="data:,">',
        f"<title>givens: {_count(len(entries), 'run')}</title><style>{style}</style></head><body>",
        "<header><h1>Towers, codebooks and rotation, learned together</h1>",
        *(f'<p class="soft">{escape(log)}</p>' for log in logs),
        "</header><main>",
        *(f'<p class="warn">{escape(line)}</p>' for line in _cautions(entries, logs)),
        f'<ul class="told">{told}</ul>' if told else "",
        _table(entries),
        '<h2>What was learned</h2><div class="figures">',
        *figures.learning(entries),
        "</div>",
        '<h2>What the index gives</h2><div class="figures">',
        *figures.serving(entries),
        '</div><h2>Codewords and rotation</h2><div class="figures">',
        *figures.parts(entries),
        "</div><h2>How it was done</h2>",
        _options(entries),
        "</main><footer>Written by ",
        f"givens {givens.__version__}, {written}. One file, which fetches nothing.</footer>",
        "</body></html>\n",
    ]
    return "".join(parts)


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


def _table(entries: list[Entry]) -> str:
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
    rows: list[tuple[str, ...]] = []
    for number, (run, seen) in enumerate((entry.run, entry.seen) for entry in entries):
        perplexity = seen and f"{seen.perplexity:.0f} of {run.options['codewords']}"
        seconds = run.about.get("seconds")
        cells = (
            _number(run.distortion, "{:.4f}"),
            _number(run.recall, "{:.2%}"),
            _number(run.found("full"), "{:.2%}"),
            f"{run.bytes}",
            perplexity or "–",
            _number(seconds, "{:,.0f}"),
        )
        rows.append((_swatch(number, run.label), *cells))
    popular = {run.found("popularity"): run for run in (e.run for e in entries) if run.results}
    for value, run in popular.items():
        name = (
            "popularity" if len(popular) == 1 else f"popularity, {run.about['log'].split(':')[0]}"
        )
        rows.append((f"<span>{escape(name)}</span>", "–", _number(value, "{:.2%}"), *["–"] * 4))
    note = (
        "Distortion: mean squared error of an item's unit vector, after the last step. Recall: the "
        "part of what test users liked next that is among the items they are given, at the step "
        "that did best on the validation users. Full precision: the same towers "
        "without the index. Codewords in use: e^entropy, the mean over subspaces. Seconds: of "
        "the run; one that went on from a shared warm-up does not count it."
    )
    return _html_table(heads, rows, note)


def _options(entries: list[Entry]) -> str:
    """Options in which runs differ, those in which all agree, commands and environments."""
    runs = [entry.run for entry in entries]
    names = list(dict.fromkeys(name for run in runs for name in run.options))
    apart = [name for name in names if len({_text(run.options.get(name)) for run in runs}) > 1]
    shared = [name for name in names if name not in apart]
    heads = ("option", *(run.label for run in runs))
    rows = [
        (f"<span>{escape(name)}</span>", *(escape(_text(run.options.get(name))) for run in runs))
        for name in apart
    ]
    rows.append(("<span>standing</span>", *(escape(run.standing) for run in runs)))
    for name in ("device", "threads", "written"):
        rows.append((f"<span>{name}</span>", *(escape(_text(run.about.get(name))) for run in runs)))
    packages = dict.fromkeys(name for run in runs for name in run.about.get("versions", {}))
    rows += [
        (f"<span>{name}</span>", *(escape(_text(run.about["versions"].get(name))) for run in runs))
        for name in packages
    ]
    command = (
        f"<code>givens {escape(' '.join(map(str, run.about.get('command', []))))}</code>"
        for run in runs
    )
    rows.append(("<span>command</span>", *command))
    same = ", ".join(f"{name} {_text(runs[0].options[name])}" for name in shared)
    return _html_table(heads, rows, f"The same in all runs: {same}." if same else "")


def _html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
    """Rows are HTML already; heads and the note are not."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="table"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<p class="soft">{escape(note)}</p>'
    )


def _swatch(number: int, label: str) -> str:
    return f'<i class="swatch s{number % figures.COLOURS}"></i><span>{escape(label)}</span>'


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value).replace("%", " %")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
