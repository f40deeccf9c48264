"""What the pages say is so: their code runs, what they name is there, and they build offline."""

import importlib.util
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import givens
from givens.cli import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
TABLES = [
    ("vectors.md", "example-vectors.json", "method", ("recall@10", "distortion", "cpu seconds")),
    ("model.md", "example-two-towers.json", "index", ("recall@100",)),
    ("model.md", "example-sentences.json", "index", ("recall@10",)),
    ("matrix.md", "example-rnn.json", "method", ("right", "in equal time", "ms a step")),
    ("matrix.md", "example-activations.json", "method", ("error", "1 − cosine", "cpu seconds")),
]
PARTS = {"recall@10", "recall@100", "right", "in equal time", "error", "1 − cosine"}
# Of the table of damaged files, after ours.
PEERS = ("faiss.read_index (OPQ+PQ)", "hnswlib", "usearch", "plain safetensors")
# Programs that a page may name without ours being in the line.
KNOWN = {"make", "pip", "curl", "tensorboard", "python"}


def blocks(page):
    """(language, line, code) of every fenced block; Sphinx's own are its business."""
    for match in re.finditer(
        r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        if not match[1].startswith("{"):
            yield match[1], page.read_text()[: match.start(2)].count("\n"), match[2]


def commands(code):
    """The words of each line of a shell block, without comments."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


@pytest.fixture(scope="module")
def made():
    """Vectors, and a quantizer of them."""
    x = np.random.default_rng(0).standard_normal((1000, 16)).astype(np.float32)
    return x, givens.fit(x, 4, 16, coarse=4)


@pytest.fixture
def session(made, tmp_path, monkeypatch):
    """A folder with the files that pages name, in small, and what they take for granted."""
    monkeypatch.chdir(tmp_path)
    x, q = made
    for name, table in (
        ("learn", x),
        ("base", x),
        ("queries", x[:20]),
        ("items", x),
        ("new", 1.01 * x),
    ):
        np.save(f"{name}.npy", table)
    np.save("truth.npy", ((x[:20, None] - x) ** 2).sum(2).argsort(1)[:, :100])
    return {"q": q, "vectors": x, "queries": x[:20], "titles": [f"item {i}" for i in range(1000)]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page, session):
    """From top to bottom: Python as one session, `bash` as commands, `sh` as far as it is parsed.

    `sh` is for what takes long, or needs data or a network that a test has not.
    """
    for language, line, code in blocks(page):
        if language == "python":
            # At its own line of the page, so that a traceback tells where.
            exec(compile("\n" * line + code, str(page), "exec"), session)
        elif language == "bash":
            for words in commands(code):
                assert words[0] == "givens"
                done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
                assert done.exit_code == 0, done.output
        elif language in ("sh", ""):
            for words in commands(code):
                check_command(words)
        else:
            assert language in ("diff", "text")
    if Path("better.npy").exists():
        # Ranked again by the originals, a vector of the base is its own nearest neighbour.
        assert (np.load("better.npy")[:, 0] == np.arange(20)).all()


def check_command(words):
    """Every subcommand, option, target and script of a line is there."""
    if "givens" in words:
        check_options(words[words.index("givens") + 1 :])
        return
    assert words[0] in KNOWN
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "python" and words[1] != "-m":
        script = (ROOT / words[1]).read_text()
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in script


def check_options(words):
    """Let the command line take the words in, and go no further."""
    asked = [word for word in words if word not in ("-h", "--help")]
    command, name = typer.main.get_command(app), "givens"
    context = command.make_context(name, [*asked], resilient_parsing=asked != words)
    while hasattr(command, "resolve_command") and asked:
        name, command, asked = command.resolve_command(context, asked)
        context = command.make_context(
            name, [*asked], resilient_parsing=len(asked) < len(words) - 1
        )


def test_a_wrong_option_is_found():
    check_options(["fit", "x.npy", "-o", "q.safetensors"])
    with pytest.raises(Exception, match="No such option"):
        check_options(["fit", "x.npy", "-o", "q.safetensors", "--subspace-count", "8"])


def test_commands_behind_the_results_are_there():
    found = re.findall(r"^:command: (.*)$", (DOCS / "paper.md").read_text(), re.MULTILINE)
    assert found
    for command in found:
        check_command(shlex.split(command))


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text())
    here = [link for link in links if not link.startswith("http")]
    assert here
    assert [link for link in here if not (ROOT / link).exists()] == []


def test_the_table_of_bad_input_is_that_of_the_tests():
    spec = importlib.util.spec_from_file_location("refused", ROOT / "docs" / "refused.py")
    refused = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(refused)
    tables = refused.tables()
    assert len({row for rows in tables.values() for row in rows}) >= 150
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert refused.markdown() in page, "python docs/refused.py writes it anew"


def test_promises_name_tests_that_are_there():
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (DOCS / "reliability.md").read_text())
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


def derive(rows):
    """What follows from rows: how far each run is when the quickest method has done all steps."""
    times = defaultdict(list)
    for row in rows:
        times[row.get("method")].append(row.get("ms a step", 0))
    took = {method: statistics.median(found) for method, found in times.items()}
    for row in rows:
        if "cosine" in row:
            row["1 − cosine"] = 1 - row["cosine"]
        if "curve" in row:
            done = int(len(row["curve"]) * min(took.values()) / took[row["method"]])
            # A point of the curve is ten steps.
            row["in equal time"] = statistics.mean(row["curve"][done - 5 : done])
    return rows


def table(rows, by, columns):
    """Markdown: mean ± standard deviation over seeds, parts in percent."""
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name in dict.fromkeys(row[by] for row in rows):
        cells = []
        for column in columns:
            values = [row[column] for row in rows if row[by] == name]
            scale, unit = (100, " %") if column in PARTS else (1, "")
            spread = f" ± {scale * statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{scale * statistics.mean(values):.2f}{spread}{unit}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.mark.parametrize(("page", "rows", "by", "columns"), TABLES, ids=lambda value: str(value))
def test_tables_are_the_rows(page, rows, by, columns):
    """What a page tells of an example is what its run has left."""
    measured = derive(json.loads((ROOT / "results" / rows).read_text()))
    assert table(measured, by, columns) in (DOCS / page).read_text()


def test_the_table_of_damaged_files_is_what_was_measured():
    rows = json.loads((ROOT / "results" / "files.json").read_text())["rows"]
    damaged = {row["target"]: row for row in rows if row["part"] == "mutations"}
    kills = {row["target"]: row["lost"] for row in rows if row["part"] == "kills"}
    sealed = [row for row in damaged.values() if row["digest"]]
    mine = [row for name, row in damaged.items() if name not in PEERS]
    ours = {name: sum(row[name] for row in sealed) for name in ("changed", "files")}
    ours["crashed"] = sum(row["crashed"] for row in mine)
    each = (ours, *(damaged[name] for name in PEERS))
    told = (DOCS / "reliability.md").read_text()
    cells = " | ".join(f"{r['changed']:,} of {r['files']:,}" for r in each)
    assert f"| damaged files that load with other contents | {cells} |" in told
    crashes = " | ".join(f"{r['crashed']:,}" for r in each)
    assert f"| damaged files that crash the process | {crashes} |" in told
    lost = (kills["givens Quantizer.save"], kills["faiss.write_index"], "–", "–")
    cells = " | ".join(map(str, (*lost, kills["plain safetensors"])))
    assert f"| old file lost, of 1,000 kills while overwriting it | {cells} |" in told
    told = " ".join((DOCS / "reliability.md").read_text().split())
    others = [row for row in mine if not row["digest"]]
    for part in (
        f"{sum(row['files'] for row in others):,} files of {len(others)} kinds",
        f"{sum(row['crashed'] + row['hung'] for row in mine)} crashed or hung",
        f"{sum(row['over 2 s'] for row in mine)} took over 2 s",
        f"{sum(row['unclean'] for row in mine):,} ended in a traceback",
    ):
        assert part in told, part
    ours, theirs = (
        next(row["write_ms"] for row in rows if row["part"] == "kills" and row["target"] == name)
        for name in ("givens save_index", "faiss.write_index")
    )
    price = f"took {ours / theirs:.0f} times as long as Faiss alone"
    assert price in (DOCS / "reliability.md").read_text()


def test_what_the_index_costs_a_training_step_is_what_was_measured():
    told = " ".join((DOCS / "benchmarks.md").read_text().split())
    for device, mode, form in (
        ("cuda", "eager", "{1:.2f} times as long as with a frozen rotation and {0:.2f} times"),
        ("cuda", "graph", "as CUDA graphs {1:.2f} and {0:.2f} times"),
        ("cpu", "eager", "on 2 CPU threads {1:.2f} and {0:.2f}"),
    ):
        rows = json.loads((ROOT / "results" / f"layer-{device}.json").read_text())
        mine = [row for row in rows if (row["contender"], row["mode"]) == ("gcd-greedy", mode)]
        times = [[row[key] for row in mine] for key in ("times_no_index", "times_frozen")]
        assert form.format(*map(statistics.median, times)) in told, mode
        if mode == "eager" and device == "cuda":
            ends = [f"from {min(found):.2f} to {max(found):.2f}" for found in times]
            assert f"{ends[1]} and {ends[0]}" in told


def test_every_public_name_is_in_the_reference():
    reference = (DOCS / "api.md").read_text()
    assert [name for name in givens.__all__ if not re.search(rf"\b{name}\b", reference)] == []


def test_the_pages_build_and_fetch_nothing(tmp_path):
    """As `make docs` does it, where every warning is an error."""
    source = str(Path(givens.__file__).parents[1])
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", tmp_path / "trees"]
    done = subprocess.run(
        [*command, DOCS, tmp_path / "html"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "html").rglob("*.html"))
    assert len(pages) > len(PAGES)
    fetched = r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"(?:https?:)?//"
    assert [page.name for page in pages if re.search(fetched, page.read_text())] == []
