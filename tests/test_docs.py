"""What the pages say is so: their code runs, what they name is there, and they build offline."""

import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import faiss
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import givens
from givens.cli import app
from givens.export.faiss import to_faiss
from givens.paper import fig2, fig3, fig4, table1

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Modules of the pages: tables from rows, and the tables of bad input.
sys.path.insert(0, str(DOCS))
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
TABLES = [
    ("matrix.md", "example-rnn.json", "method", ("right", "in equal time", "ms a step")),
    ("matrix.md", "example-activations.json", "method", ("error", "1 − cosine", "cpu seconds")),
]
PARTS = {"recall@10", "recall@100", "right", "in equal time", "error", "1 − cosine"}
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
    return x, givens.fit(x, 4, codewords=16, coarse=4)


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
    if re.fullmatch(r"[A-Z_]+=\d+", words[0]):
        words = words[1:]
    if "givens" in words:
        check_options(words[words.index("givens") + 1 :])
        return
    assert words[0] in KNOWN
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "python" and words[1] != "-m":
        script = (ROOT / words[1]).read_text()
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in script or f'"{option[2:]}"' in script


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
    pages = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    found = set(re.findall(r"^:command: (.*)$", pages, re.MULTILINE))
    assert len(found) > 20
    for command in found:
        check_command(shlex.split(command))


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text())
    here = [link for link in links if not link.startswith("http")]
    assert here
    assert [link for link in here if not (ROOT / link).exists()] == []


def test_promises_name_tests_that_are_there():
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (DOCS / "promises.md").read_text())
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


def test_the_table_of_sentences_is_the_rows(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    format_table = importlib.import_module("sentences").format_table
    rows = json.loads((ROOT / "results" / "sentences.json").read_text())
    table = format_table([row for row in rows if row["part"] == "test"])
    assert (ROOT / "results" / "sentences.md").read_text() == table


def test_the_numbers_of_the_readme_are_the_rows():
    """The first screen is typed by hand; the other pages take theirs from the rows."""
    told = (ROOT / "README.md").read_text().replace("*", "")
    table = {line.split(" | ")[0]: line for line in told.splitlines() if line.startswith("| ")}
    rows = json.loads((ROOT / "results" / "fit.json").read_text())

    def values(name, size, key):
        wanted = {"data": "sift", "contender": name, "subspaces": size}.items()
        return [row[key] for row in rows if wanted <= row.items() and key in row]

    for label, name in (
        ("| `givens.fit`", "givens gcd-greedy"),
        ("| Faiss OPQ, identity start", "faiss opq identity"),
        ("| Faiss OPQ, default (random) start", "faiss opq"),
    ):
        cells = [f"{statistics.mean(values(name, n, 'recall_at_10')):.1%}" for n in (8, 16)]
        seconds = [
            [statistics.median(values(who, size, "seconds")) for size in (8, 16)]
            for who in (name, "givens gcd-greedy")
        ]
        ratios = sorted(f"{theirs / ours:.1f}" for theirs, ours in zip(*seconds, strict=True))
        cells.append(" to ".join(ratios) if ratios != ["1.0", "1.0"] else "1")
        assert table[label].replace(" %", "%") == f"{label} | {' | '.join(cells)} |"
    rows = json.loads((ROOT / "results" / "medium-joint-ml-1m.json").read_text())
    for method, kind in (("gcd", "index"), ("post-hoc", "index"), ("post-hoc", "full")):
        found = [row["results"][kind]["recall@100"] for row in rows if row["method"] == method]
        assert f"{100 * statistics.mean(found):.1f} %" in told


def test_the_verdicts_on_the_paper_are_those_of_the_rows():
    """Every number of the table of claims is one that the rows give."""

    def rows(*names):
        files = [ROOT / "results" / f"{name}.json" for name in names]
        return [row for file in files for row in json.loads(file.read_text())]

    logs = ("ml-1m", "amazon-book", "amazon-games", "built-in")
    lines = [
        *fig2.claims_a(rows("fig2a")),
        *fig2.claims_bc(rows("fig2b", "fig2c")),
        *(line for log in logs for line in fig3.claims(rows(f"joint-{log}"))),
        *(line for log in ("built-in", "ml-1m")
          for line in table1.claims(rows_of_16(rows(f"joint-{log}")))),
        *fig4.claims(rows("fig4-cpu")),
        *fig4.claims(rows("step-cuda")),
    ]  # fmt: skip
    known = [
        float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*\.?\d*", " ".join(lines))
    ]
    # How far each method ends below the frozen rotation at its best angle.
    least = [
        min(map(float, re.findall(r"0\.\d+", line)))
        for line in importlib.import_module("joint_tables").by_angle(rows("medium-rates-ml-1m"))[2:]
    ]
    known += [100 * (1 - distortion / least[0]) for distortion in least[1:]]
    page = (DOCS / "paper.md").read_text()
    table = page[page.index("| the paper says |") : page.index("Tests of significance")]
    wanted = [
        text
        for line in table.splitlines()[2:]
        if line
        for text in re.findall(r"([\d,]+\.?\d*)(?=(?: and [\d.−+]+)? ?(?:%|×))", line.split("|")[3])
    ]
    assert len(wanted) > 15
    for text in wanted:
        digits = len(text.partition(".")[2])
        value = float(text.replace(",", ""))
        assert any(round(number, digits) == value for number in known), text


def rows_of_16(rows):
    return [row for row in rows if row["bytes"] == 16 and row["config"]["start"] == "opq"]


def core(index):
    """The kinds of indexes from the outermost to the one that holds codes, without rotations."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        return core(index.index)
    inside = core(index.base_index) if isinstance(index, faiss.IndexRefine) else []
    return [type(index).__name__, *inside]


def test_strings_of_index_factory_are_what_the_calls_beside_them_make():
    x = np.random.default_rng(0).standard_normal((600, 16)).astype(np.float32)
    table = re.findall(r'^\| `"(.*)"` \| `(to_faiss.*)` \|$', (DOCS / "faiss.md").read_text(), re.M)
    assert len(table) > 5
    # One pass is enough: the kind of the index does not depend on how good it is.
    short = SimpleNamespace(fit=functools.partial(givens.fit, max_iter=1))
    for string, call in table:
        string, call = (text.replace("1024", "8") for text in (string, call))
        ours = eval(call, {"givens": short, "to_faiss": to_faiss, "x": x})
        assert core(ours) == core(faiss.index_factory(16, string))


def test_tables_are_made_from_rows_and_miss_none_silently():
    import scale_tables
    import tables

    def fitted(name, size, seconds, held_out, **more):
        about = {"data": "sift", "dim": 128, "contender": name, "subspaces": size}
        return {**about, "seconds": seconds, "held_out": held_out, **more}

    rows = [
        *(fitted("givens gcd-greedy", 8, s, 25_000.4, recall_at_10=0.3646) for s in (2, 3, 9)),
        fitted("faiss opq", 8, 21, 31_000),
        fitted("a new one", 8, 0.3, 0.123456),
    ]
    told = tables.fit(rows)
    assert "| givens | 25,000 |" in told
    assert "| Faiss OPQ, default (random) start | 7.0× |" in told
    assert "| a new one | 0.12346 |" in told
    assert "| givens | 36.5 % |" in told
    with pytest.raises(ValueError, match="there is none; measure it again"):
        tables.fit(rows[3:])
    steps = [
        {"method": "gcd-random", "n": 64, "median_us": 14.21, "times_faster_than_cayley": 33.7},
        {"method": "cayley", "n": 128, "median_us": 1_479.0, "times_faster_than_cayley": 1.0},
    ]
    assert tables.step(steps)[2:] == [
        "| GCD-R | 14.2 µs (34×) | – |",
        "| Cayley | – | 1.48 ms (1.0×) |",
    ]
    with pytest.raises(ValueError, match="must have Cayley"):
        tables.step([])
    with pytest.raises(ValueError, match="measure it again"):
        scale_tables.scale_plan([])
    row = {"engine": "givens", "items": 10, "sent_bytes": 5e5, "peak_bytes": 9 << 20}
    row |= {"idle_bytes": 1 << 20, "seconds": 0.0123}
    alone = {**row, "ranks": 1, "losses": [2.0, 1.0]}
    told = scale_tables.engines([alone, {**row, "ranks": 2, "losses": [2.0, 1.001]}])
    assert told[-1] == "| `retrieval.tables` | 10 | 2 | 12 ms | 0.50 MB | 8 MiB | 1e-03 |"
    large = {"items": 4e6, "ranks": 4, "dim": 64, "idle_bytes": 0, "peak_bytes": [522e6, 612e6]}
    plan = scale_tables.split_plan([large])
    # Of 10⁹ items 1,040 GB, 98.7 on a GPU; 100 bytes beside each row of a sixteenth of them.
    assert "| tables and their state | 0.10 TB | 1.04 TB | V·(8·n + 16) |" in plan
    assert "| GPUs, at least | 2 | 16 | 0.7 · 141 GB each, a power of two |" in plan
    assert "| beside them, of each rank | 5 GB | 6 GB | 100 bytes for each row, measured |" in plan
    damage = json.loads((ROOT / "results" / "files.json").read_text())
    damage["rows"] = [row for row in damage["rows"] if row["target"] != "hnswlib"]
    with pytest.raises(ValueError, match="must have hnswlib"):
        tables.damage(damage)


def test_tables_of_bad_input_are_read_from_the_tests():
    import refused

    tables = refused.tables()
    assert len({row for rows in tables.values() for row in rows}) >= 150
    assert ("gcd(lr=-1.0)", "lr must be finite and not negative") in tables["GCD"]


def build(source, target):
    """As `make docs` does it, where every warning is an error."""
    package = str(Path(givens.__file__).parents[1])
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", target / "trees"]
    return subprocess.run(
        [*command, source, target / "html"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((package, str(DOCS)))},
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the pages."""
    target = tmp_path_factory.mktemp("docs")
    done = build(DOCS, target)
    assert done.returncode == 0, done.stderr
    return target / "html"


def test_what_is_not_measured_stops_the_build(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "conf.py").write_text('extensions = ["myst_parser", "measured"]')
    pages = {
        "index": "{measured} none.json\n:command: make it",
        "other": "{measured} fit.json\n:command: make it\n:table: step",
        "wrong": "{measured} drift-cpu.json\n:command: make it\n:table: fit",
        "fine": "{measured} step-cuda.json\n:command: make it\n:table: step",
    }
    for name, block in pages.items():
        (source / f"{name}.md").write_text(f"---\norphan: true\n---\n# A page\n\n```{block}\n```\n")
    done = build(source, tmp_path)
    assert done.returncode != 0
    errors = [re.findall(rf"{name}.md:.*ERROR: (.*) \[docutils\]", done.stderr) for name in pages]
    assert [len(found) for found in errors] == [1, 1, 1, 0]
    assert errors[0] == ["results/none.json must be there; `make it` writes it"]
    assert errors[1][0].startswith("results/fit.json: ")
    assert errors[2][0].startswith("results/drift-cpu.json: ")


def public_members(owner):
    """Methods and properties that a class defines itself."""
    kinds = (property, staticmethod, classmethod)
    return [
        name
        for name, member in vars(owner).items()
        if not name.startswith("_")
        and name != "extra_repr"
        and (inspect.isfunction(member) or isinstance(member, kinds))
    ]


def test_every_public_name_is_in_the_reference(built):
    """By Sphinx's own list of what has an entry; a name in the text of another is none."""
    from sphinx.util.inventory import InventoryFile

    with (built / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, name: name)
    there = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    public = {name: getattr(givens, name) for name in givens.__all__}
    wanted = {f"givens.{n}" for n, value in public.items() if not isinstance(value, ModuleType)}
    for name, value in public.items():
        if inspect.isclass(value):
            wanted |= {f"givens.{name}.{member}" for member in public_members(value)}
    assert wanted
    assert sorted(wanted - there) == []


def test_the_pages_fetch_nothing(built):
    pages = list(built.rglob("*.html"))
    assert len(pages) > len(PAGES)
    fetched = r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"(?:https?:)?//"
    assert [page.name for page in pages if re.search(fetched, page.read_text())] == []
    assert "lr must be finite and not negative" in (built / "promises.html").read_text()
