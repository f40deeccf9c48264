"""The page of runs: its numbers are the runs' own, and a browser shows it without a complaint."""

import base64
import copy
import dataclasses
import html
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image
from typer.testing import CliRunner

import givens
from givens.cli import app
from givens.cli.train import run_record
from givens.report import measure
from givens.report.findings import Entry, describe_findings
from givens.report.measure import compare_rotations, measure_run
from givens.report.page import render_page, write_report
from givens.report.runs import Folder, read_runs
from givens.report.svg import Axis, Scale, Series, chart, heat_map, log_ticks, round_ticks
from givens.retrieval import checkpoint, evaluate
from givens.retrieval.config import LABELS, Config, Method
from givens.retrieval.data import click_log
from givens.retrieval.train import train, warm_up
from givens.rotation import random_rotation, rotate_pairs_
from givens.storage import files

METHODS: tuple[Method, ...] = ("frozen", "gcd", "post-hoc")
CONFIG = Config(
    dim=16,
    subspaces=4,
    codewords=16,
    history=20,
    batch=128,
    lr=1e-2,
    joint_lr=1e-2,
    temperature=0.1,
    warmup=20,
    steps=40,
    every=10,
    iterations=5,
)
ITEMS = 150
ENDS = ("start", "quantizer")


def invoke(*arguments):
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "SECONDS", 0.02)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of three methods, one with inverted lists, and one that was stopped."""
    place = tmp_path_factory.mktemp("runs")
    log = click_log(400, ITEMS, 8000, drift=0.0)
    towers = warm_up(log, CONFIG)
    changes = {method: {"method": method} for method in METHODS} | {"lists": {"coarse": 8}}
    for number, (name, changed) in enumerate(changes.items()):
        config = dataclasses.replace(CONFIG, **changed)
        train(log, config, place / name, towers=towers)
        about = {**run_record(config, log, "cpu", None), "seconds": 10 + number}
        files.write_json(place / name / "config.json", about)
    shutil.copytree(place / "gcd", place / "stopped")
    for name in ("results.json", "index.faiss", "index.faiss.json"):
        (place / "stopped" / name).unlink()
    return place


@pytest.fixture(scope="module")
def three(folder):
    """The page of the three methods, and what was measured."""
    entries = write_report([folder / method for method in METHODS], folder / "report.html")
    return (folder / "report.html").read_text("utf-8"), entries


class Tables(HTMLParser):
    """The cells of a page's tables, row by row, and all that it would fetch."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.cell, self.fetched = [], None, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.cell = ""
        for name, value in attributes:
            if name in ("src", "href", "srcset", "data", "action", "xlink:href"):
                self.fetched.append(value)

    def handle_data(self, data):
        if self.cell is not None:
            self.cell += data

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.rows[-1].append(self.cell)
            self.cell = None


def results(folder, method):
    return json.loads((folder / method / "results.json").read_text())


def test_the_table_has_the_runs_numbers(folder, three):
    text, entries = three
    rows = {row[0]: row[1:] for row in Tables(text).rows}
    for method, entry in zip(METHODS, entries, strict=True):
        told = results(folder, method)
        if method != "post-hoc":
            # Of the same step.
            kept = next(row for row in entry.run.joint if row["step"] == told["best_step"])
            assert kept["distortion"] == pytest.approx(told["distortion"], rel=1e-4)
        assert rows[LABELS[method]] == [
            f"{told['distortion']:.4f}",
            f"{100 * told['index']['recall@100']:.2f} %",
            f"{100 * told['full']['recall@100']:.2f} %",
            "2",  # 4 parts of 4 bits
            f"{entry.seen.perplexity:.0f} of 16",
            f"{10 + METHODS.index(method)}",
        ]
    assert rows["popularity"][1] == f"{100 * told['popularity']['recall@100']:.2f} %"
    assert rows["method"] == list(METHODS)
    assert rows["torch"] == [torch.__version__] * 3
    assert "dim 16" in text
    assert faiss.read_index(str(folder / "frozen" / "index.faiss")).sa_code_size() == 2


def test_every_look_is_a_point(folder, three):
    text, _ = three
    for method in ("frozen", "gcd"):
        lines = (folder / method / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row["phase"] == "joint"]
        assert [row["step"] for row in rows] == [20, 30, 40, 50, 60]
        for row in rows:
            point = f"{LABELS[method]}: step {row['step']}, distortion {row['distortion']:.4g}"
            assert f"<title>{html.escape(point)}</title>" in text
            point = f"{LABELS[method]}: step {row['step']}, recall {100 * row['recall']:.1f} %"
            assert f"<title>{html.escape(point)}</title>" in text


def test_it_fetches_nothing(three):
    text, _ = three
    found = Tables(text).fetched
    assert found
    assert all(address.startswith("data:") for address in found)
    assert "@import" not in text
    assert not re.search(r"url\(|<script|http-equiv=.refresh", text)


def test_what_is_measured_is_what_was_trained(folder, three):
    _, entries = three
    for method, entry in zip(METHODS, entries, strict=True):
        told, seen = results(folder, method), entry.seen
        assert float(seen.users.mean()) == pytest.approx(told["index"]["recall@100"], abs=1e-9)
        assert [speed.way for speed in seen.speeds] == ["index", "FastScan", "full precision"]
        assert seen.speeds[0].recall == pytest.approx(told["index"]["recall@100"], abs=1e-9)
        # Its tables are of 8 bits.
        assert seen.speeds[1].recall == pytest.approx(told["index"]["recall@100"], abs=0.02)
        assert seen.speeds[2].recall == told["full"]["recall@100"]
        assert all(speed.queries_a_second > 10 for speed in seen.speeds)
        assert (seen.counts.sum(1) == ITEMS).all()
        # The codes that are served, as Faiss itself has them.
        index = faiss.read_index(str(folder / method / "index.faiss"))
        core = faiss.downcast_index(index.index)
        packed = faiss.vector_to_array(core.codes).reshape(ITEMS, -1)
        codes = faiss.unpack_bitstrings(packed, 4, 4)
        counted = [np.bincount(codes[:, d], minlength=16) for d in range(4)]
        assert (seen.counts.numpy() == np.stack(counted)).all()


def test_lists_are_looked_into_one_after_another(folder):
    (run,) = read_runs([folder / "lists"])
    seen = measure_run(run)
    ways = [f"{nprobe} of 8 lists" for nprobe in (1, 2, 4, 8)]
    assert [speed.way for speed in seen.speeds] == [*ways, "full precision"]
    recalls = [speed.recall for speed in seen.speeds[:-1]]
    assert recalls[0] < recalls[-1]
    assert recalls[-1] == pytest.approx(run.recall, abs=1e-9)


def test_users_are_kept_with_what_they_liked(folder):
    queries, held = checkpoint.load_users(folder / "frozen" / "users.safetensors")
    towers = checkpoint.load_towers(folder / "frozen" / "towers.safetensors")
    items = torch.nn.functional.normalize(towers["towers.items.weight"], dim=1)
    found = evaluate.search_exact(queries, items, held, 100).items
    told = evaluate.compute_metrics(found, held, ITEMS)
    assert told == pytest.approx(results(folder, "frozen")["full"])


def test_the_angles_are_those_of_the_planes_that_were_turned(tmp_path):
    R = random_rotation(8, seed=0)
    codebooks = torch.randn(2, 4, 4)
    givens.Quantizer(R, codebooks).save(tmp_path / "start.safetensors")
    pairs = torch.tensor([[0, 5], [1, 3], [2, 7]])
    angles = torch.tensor([0.5, -0.02, 1.2])
    givens.Quantizer(rotate_pairs_(R.clone(), pairs, angles), codebooks).save(
        tmp_path / "quantizer.safetensors"
    )
    turn = compare_rotations(*(givens.load(tmp_path / f"{end}.safetensors") for end in ENDS))
    expected = torch.tensor([1.2, 0.5, 0.02, 0]).rad2deg()
    assert torch.allclose(turn.angles, expected.double(), atol=1e-3)
    assert turn.moved
    # (0, 5) and (2, 7) are between the subspaces 0..3 and 4..7; (1, 3) is inside one.
    sines = angles.sin().square()
    assert turn.between == pytest.approx(float((sines[0] + sines[2]) / sines.sum()), rel=1e-4)


def test_what_was_turned_is_told(three):
    text, entries = three
    frozen, learned, afterwards = (entry.seen.turn for entry in entries)
    assert not frozen.moved
    assert learned.moved
    assert afterwards is None
    assert "; that of frozen (the baseline) is where it started." in text
    assert f"up to {float(learned.angles[0]):.1f}°" in text
    assert text.count('<img class="heat"') == 1


def test_findings_are_computed_from_the_runs(folder, three):
    _, entries = three
    lines = describe_findings(entries)
    told = {method: results(folder, method) for method in METHODS}
    change = 100 * (told["gcd"]["distortion"] / told["frozen"]["distortion"] - 1)
    way = "lower" if change < 0 else "higher"
    assert f"{abs(change):.1f} % {way} than with the rotation frozen" in lines[0]
    for line, method in ((lines[1], "frozen"), (lines[2], "post-hoc")):
        mine, other = (told[m]["index"]["recall@100"] for m in ("gcd", method))
        low, high = map(float, re.search(r"difference: (\S+) to (\S+) points", line).groups())
        assert (low + high) / 2 == pytest.approx(100 * (mine - other), abs=0.01)
        assert f"test users is {100 * mine:.1f} %" in line
        assert re.search(rf"(than the|against) {100 * other:.1f} % ", line)
    assert all(line.startswith("GCD: ") for line in lines)


@pytest.mark.parametrize(
    ("gain", "spread", "words"),
    [
        (0.05, 0.1, "5.0 points higher than the 20.0 % with the rotation frozen (95 % confidence"),
        (-0.05, 0.1, "5.0 points lower than the 20.0 % with the rotation frozen (95 % confidence"),
        (0.005, 0.1, "is 20.5 %, against 20.0 % with the rotation frozen: no significant diff"),
        (
            0.008,
            0.1,
            "against 20.0 % with the rotation frozen: no significant difference (95 % confidence "
            "interval of the difference: -0.18 to +1.78 points).",
        ),
    ],
)
def test_a_difference_within_its_error_is_not_called_one(three, gain, spread, words):
    _, (frozen, learned, _) = three
    noise = torch.linspace(-1, 1, 400, dtype=torch.float64)
    noise *= spread / noise.std()
    entries = []
    for entry, users in ((frozen, noise * 0 + 0.2), (learned, 0.2 + gain + noise)):
        recall = {"index": {"recall@100": float(users.mean())}}
        run = Folder(**{**vars(entry.run), "results": {**entry.run.results, **recall}})
        seen = measure.Measured(**{**vars(entry.seen), "users": users})
        entries.append(Entry(run, seen))
    assert words in describe_findings(entries)[1]


def test_an_index_worse_than_popularity_is_said_first(folder, tmp_path):
    shutil.copytree(folder / "frozen", tmp_path / "run")
    (run,) = read_runs([tmp_path / "run"])
    entry = Entry(run, measure_run(run))
    warning = "its index finds less than popularity alone"
    for gap, warned in ((-0.01, False), (0.01, True)):
        popular = {**run.results["popularity"], run.metric: run.recall + gap}
        parts = {**vars(run), "results": {**run.results, "popularity": popular}}
        text = render_page([Entry(Folder(**parts), entry.seen)])
        assert (warning in text) == warned


def test_every_picture_has_one_sentence_under_it(three):
    text, _ = three
    figures = re.findall(r"<figure>.*?</figure>", text, re.DOTALL)
    assert len(figures) == text.count("<svg") + text.count('<img class="heat"')
    for figure in figures:
        picture, words = figure.split("<figcaption><p>")
        sentence = words.removesuffix("</p></figcaption></figure>")
        assert "<svg" in picture or "<img" in picture
        assert sentence.endswith(".")
        assert ". " not in sentence


def test_the_numbers_beside_curves_are_of_the_step_that_is_kept(folder, three):
    text, entries = three
    kept = results(folder, "gcd")["best_step"]
    (row,) = (row for row in entries[1].run.joint if row["step"] == kept)
    assert f"<span>GCD</span><b>{100 * row['recall']:.1f} %</b>" in text
    assert f"<span>GCD</span><b>{row['distortion']:.4f}</b>" in text


def test_runs_that_differ_in_more_are_not_compared(folder):
    entries = [
        Entry(run, measure_run(run)) for run in read_runs([folder / "lists", folder / "frozen"])
    ]
    assert len(describe_findings(entries)) == 1


def test_a_run_that_was_stopped_is_shown_as_far_as_it_came(folder):
    out = folder / "stopped.html"
    invoke("report", folder / "stopped", folder / "frozen", "-o", out)
    text = out.read_text()
    assert "GCD is not finished: 60 of 60 steps; it has no index yet" in text
    assert "step 60, distortion" in text
    invoke("report", folder / "stopped", "-o", out)
    assert "None of the runs is finished, so there is no index to look at." in out.read_text()


def test_a_run_without_a_look_is_shown(folder, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(folder / "frozen" / "config.json", tmp_path / "run")
    invoke("report", tmp_path / "run", "-o", tmp_path / "r.html")
    assert "not finished: 0 of 60 steps" in (tmp_path / "r.html").read_text()


def test_runs_of_different_logs_are_said_to_be(folder, tmp_path):
    shutil.copytree(folder / "gcd", tmp_path / "other")
    about = json.loads((tmp_path / "other" / "config.json").read_text())
    about["log"] = "other.txt: 1 <click> of 1 user"
    (tmp_path / "other" / "config.json").write_text(json.dumps(about))
    invoke("report", folder / "frozen", tmp_path / "other", "-o", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "These runs are of different logs" in text
    assert "1 &lt;click&gt; of 1 user" in text
    assert "lower than" not in text


def test_runs_of_one_method_are_told_apart(folder, tmp_path):
    shutil.copytree(folder / "frozen", tmp_path / "again")
    runs = read_runs([folder / "frozen", tmp_path / "again", folder / "frozen"])
    labels = [run.label for run in runs]
    assert labels == [
        f"frozen (the baseline), {p}" for p in (folder / "frozen", tmp_path / "again")
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", r"config\.json is damaged"),
        ("config.json", "[1]", r"config\.json is damaged"),
        ("config.json", "[" * 100_000, r"config\.json is damaged"),
        ("config.json", b"\xff", r"config\.json is damaged: it is not text in UTF-8"),
        ("config.json", '{"seed": 0}', "does not hold a complete run: 'configuration' is"),
        ("metrics.jsonl", '{"step": 1\n', r"metrics\.jsonl is damaged"),
        ("results.json", '{"index": {}}', "does not hold a complete run"),
        ("users.safetensors", None, r"has results but no users\.safetensors; train it again"),
        ("index.faiss", None, r"has results but no index\.faiss"),
        ("index.faiss", "x", r"index\.faiss is not as index\.faiss\.json says"),
    ],
)
def test_folders_that_are_not_whole(folder, tmp_path, name, content, message):
    shutil.copytree(folder / "frozen", tmp_path / "run")
    if content is None:
        (tmp_path / "run" / name).unlink()
    else:
        content = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "run" / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        write_report([tmp_path / "run"], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_an_index_of_another_run_is_refused(folder, tmp_path):
    shutil.copytree(folder / "frozen", tmp_path / "run")
    for name in ("index.faiss", "index.faiss.json"):
        shutil.copy(folder / "post-hoc" / name, tmp_path / "run")
    with pytest.raises(ValueError, match="they are of different runs"):
        write_report([tmp_path / "run"], tmp_path / "r.html")


HOSTILE = """<meta http-equiv="refresh" content="0;url=x"><script>'&\"</script>"""


class Tags(HTMLParser):
    """What a browser makes of a page: its elements, and how their attributes are called."""

    def __init__(self, text):
        super().__init__()
        self.seen = Counter()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.seen[tag, *(name for name, _ in attributes)] += 1


def spoiled(value):
    """The same with hostile text in the place of every string, and a hostile key more."""
    if isinstance(value, dict):
        return {name: spoiled(one) for name, one in value.items()} | {HOSTILE: HOSTILE}
    if isinstance(value, list):
        return [spoiled(one) for one in value] + [HOSTILE]
    return HOSTILE if isinstance(value, str) else value


def test_no_field_of_a_run_becomes_markup(three):
    """Every string and key of every file, where the page takes them, and the name of the folder."""
    _, entries = three
    told, plain = [], []
    for entry in entries:
        run = entry.run
        kept = {**run.about["configuration"], "method": run.method}
        about = spoiled({**run.about, "configuration": {}, "versions": {}}) | {
            "configuration": spoiled(kept) | {"method": run.method},
            "versions": {HOSTILE: HOSTILE, "torch": HOSTILE},
        }
        rows = [{**spoiled(row), "phase": row["phase"]} for row in run.rows]
        parts = {"about": about, "rows": rows, "label": HOSTILE, "path": Path(HOSTILE)}
        told.append(Entry(Folder(**{**vars(run), **parts}), entry.seen))
        clean = json.loads(json.dumps(about).replace(json.dumps(HOSTILE)[1:-1], "plain"))
        parts = {"about": clean, "rows": run.rows, "label": "plain", "path": Path("plain")}
        plain.append(Entry(Folder(**{**vars(run), **parts}), entry.seen))
    text = render_page(told)
    assert Tags(text).seen == Tags(render_page(plain)).seen
    assert "<script" not in text
    assert (
        text.count(html.escape(HOSTILE).replace("&#x27;", "&#39;").replace("&quot;", "&#34;")) > 60
    )


def places(value, at=()):
    """Where in a JSON value there is something, from the whole down to numbers and strings."""
    inside = value.items() if isinstance(value, dict) else []
    if isinstance(value, list):
        inside = enumerate(value)
    return [at, *(place for name, one in inside for place in places(one, (*at, name)))]


def forged(value, at, wrong):
    if not at:
        return wrong
    changed = copy.deepcopy(value)
    inside = changed
    for name in at[:-1]:
        inside = inside[name]
    inside[at[-1]] = wrong
    return changed


WRONG = [None, [], {}, [[1]], {"a": 1}, "x", "", True, -1, 0, 2.5, 10**400, 1e300]
WRONG += [float("nan"), float("inf"), "\ud800"]


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "results.json"])
def test_a_wrong_type_in_any_field_is_shown_or_refused(folder, three, tmp_path, name):
    """Each field of each file with each kind of value: a page, or one line of error."""
    _, entries = three
    seen = entries[METHODS.index("gcd")].seen
    for file in ("config.json", "metrics.jsonl", "results.json"):
        shutil.copy(folder / "gcd" / file, tmp_path)
    first, *rest = (tmp_path / name).read_text().splitlines(keepends=True)
    whole = json.loads(first if name == "metrics.jsonl" else first + "".join(rest))
    errors = []
    for at in places(whole):
        for wrong in WRONG:
            text = json.dumps(forged(whole, at, wrong))
            if name == "metrics.jsonl":
                text += "\n" + "".join(rest)
            (tmp_path / name).write_text(text)
            try:
                (run,) = read_runs([tmp_path])
            except ValueError as error:
                errors.append(str(error))
            else:
                assert render_page([Entry(run, seen if run.results else None)]), (at, wrong)
    assert len(errors) > 20
    assert all(error.startswith(str(tmp_path)) and "\n" not in error for error in errors)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("towers", {"towers.items.weight": None}, "'towers.items.weight' is missing"),
        ("towers", {"towers.items.weight": torch.randn(ITEMS, 5)}, r"shape \(N, 16\), but got"),
        ("towers", {"towers.items.weight": torch.randn(9, 16)}, "index must hold 9 vectors"),
        ("towers", {"towers.items.weight": torch.full((ITEMS, 16), torch.nan)}, "must be finite"),
        ("users", {"queries": None}, "does not hold what givens saves there: KeyError: 'queries'"),
        ("users", {"queries": torch.zeros(0, 16)}, "must be in 0..-1|sizes must be of 0 users"),
        ("users", {"queries": torch.ones(80, 16).long()}, "queries must be float32"),
        ("users", {"truth": torch.tensor([1.5])}, "truth must be a list of integers"),
        ("users", {"truth": torch.tensor([1 << 40])}, "truth must be in 0"),
        ("users", {"seen": torch.tensor([-1])}, "seen must be in 0"),
        ("users", {"sizes": torch.tensor([1])}, "sizes must be of 80 users"),
        ("start", {"rotation": torch.eye(4), "codebooks": torch.ones(4, 2, 1)}, "quantizers must"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(folder, tmp_path, name, change, message):
    shutil.copytree(folder / "gcd", tmp_path / "run")
    path = tmp_path / "run" / f"{name}.safetensors"
    kind = {"start": "quantizer"}.get(name, name)
    contents = files.load(path, kind)
    tensors = {
        key: part for key, part in {**contents.tensors, **change}.items() if part is not None
    }
    files.save(path, kind, tensors, contents.metadata)
    with pytest.raises(ValueError, match=f"run are not of the same run: .*({message})"):
        write_report([tmp_path / "run"], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_points_are_where_their_numbers_are():
    points = [(0.0, 1.0), (5.0, 3.0), (10.0, 2.0)]
    text = chart([Series("a", 0, points)], Axis("x"), Axis("y"), alt="words & more")
    assert 'aria-label="words &amp; more"' in text
    drawn = np.array(re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', text), float)
    (left, top), (middle, highest), (right, between) = drawn
    assert middle == pytest.approx((left + right) / 2, abs=0.1)
    assert highest < between < top
    assert between == pytest.approx((highest + top) / 2, abs=0.1)
    assert re.findall(r"<title>(.*?)</title>", text)[1] == "a: x 5, y 3"


def test_a_log_axis_has_equal_factors_at_equal_distances():
    scale = Scale([1, 10, 100, 1000], Axis("x", log=True), 0, 100)
    places = [scale(value) for value in (1, 10, 100, 1000)]
    assert np.allclose(np.diff(places), places[1] - places[0])
    assert not scale.shows(0)
    # A value of 0 is left out, not drawn elsewhere.
    text = chart([Series("a", 0, [(1, 0.0), (2, 5.0)])], Axis("x"), Axis("y", log=True), alt="")
    assert text.count("<circle") == 1


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_and_inside(low, width):
    ticks = round_ticks(low, low + width)
    assert len(ticks) <= 6
    assert all(low - 1e-9 * width <= tick <= low + width * (1 + 1e-9) for tick in ticks)


@given(st.floats(1e-9, 1e6), st.floats(1.1, 1e9))
def test_log_ticks_are_inside(low, factor):
    ticks = log_ticks(low, low * factor)
    assert 0 < len(ticks) <= 8
    assert all(low * (1 - 1e-9) <= tick <= low * factor * (1 + 1e-9) for tick in ticks)


@pytest.mark.parametrize("n", [4, 300])
def test_a_heat_map_shows_the_entries(tmp_path, n):
    M = torch.zeros(n, n)
    M[1, n - 1] = 0.5
    M[0, 0] = 0.125
    text = heat_map(M, 0.5, alt="words")
    (tmp_path / "map.png").write_bytes(base64.b64decode(re.search(r"base64,(.*?)\"", text)[1]))
    alpha = image.imread(tmp_path / "map.png")[..., 3]
    side = 4 if n == 4 else 100
    assert alpha.shape == (side, side)
    assert alpha[1 if n == 4 else 0, -1] == 1
    assert alpha[0, 0] == pytest.approx(0.5, abs=0.01)
    assert (alpha > 0).sum() == 2


FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--enable-logging=stderr",
]
WIDTHS = (360, 768, 1280)
# What a reader on each width would see, told by the browser itself.
LOOK = """
addEventListener("load", () => {
  const seen = [...document.querySelectorAll("iframe")].map((frame) => {
    const view = frame.contentWindow, page = frame.contentDocument;
    const svgs = [...page.querySelectorAll("svg")];
    const texts = [...page.querySelectorAll("svg text")].map((t) => t.getBoundingClientRect());
    return {
      width: view.innerWidth,
      needed: page.documentElement.scrollWidth,
      dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
      paper: view.getComputedStyle(page.body).backgroundColor,
      ink: view.getComputedStyle(page.body).color,
      pictures: svgs.filter((s) => s.getBoundingClientRect().height > 100).length,
      maps: [...page.images].filter((i) => i.naturalWidth > 0).length,
      smallest: Math.min(...texts.map((box) => box.height)),
      outside: texts.filter((box) => box.left < 0 || box.right > view.innerWidth).length,
      unnamed: svgs.filter((s) => !s.getAttribute("aria-label")).length,
    };
  });
  document.body.textContent = JSON.stringify(seen);
});
"""


def chromium():
    """A browser, which CI must have."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    if os.environ.get("GIVENS_REQUIRE_BROWSER"):
        pytest.fail("GIVENS_REQUIRE_BROWSER is set, but there is no Chromium")
    return pytest.skip("no Chromium on this machine")


def browse(tmp_path, text, *flags):
    """Open a page in frames of several widths: what each shows, and what the console says."""
    frames = "".join(
        f'<iframe width="{width}" height="900" frameborder="0" srcdoc="{html.escape(text)}">'
        "</iframe>"
        for width in WIDTHS
    )
    file = tmp_path / "frames.html"
    file.write_text(f"<!doctype html><script>{LOOK}</script><body>{frames}", "utf-8")
    done = subprocess.run(
        [chromium(), *FLAGS, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
         file.as_uri()],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    shown = re.search(r"<body>(.*?)</body>", done.stdout, re.DOTALL)
    assert shown, done.stderr
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(html.unescape(shown[1])), console


def brightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_it(three, tmp_path, dark):
    text, _ = three
    seen, console = browse(tmp_path, text, *(["--force-dark-mode"] if dark else []))
    assert console == []
    assert [one["width"] for one in seen] == list(WIDTHS)
    for one in seen:
        assert one["needed"] <= one["width"]
        assert one["dark"] == dark
        paper, ink = brightness(one["paper"]), brightness(one["ink"])
        assert (paper < 60 < 200 < ink) if dark else (ink < 60 < 200 < paper)
        assert one["pictures"] == text.count("<svg") >= 7
        assert one["maps"] == 1
        # A line of letters is half as high again as they are.
        assert one["smallest"] >= 11
        assert one["outside"] == 0
        assert one["unnamed"] == 0


def test_a_browser_complains_of_what_is_fetched(three, tmp_path):
    """The test above can fail: a page that fetches, and one that is too wide."""
    text, _ = three
    spoiled = text.replace("<main>", '<main><img src="https://example.org/x.png">')
    _, console = browse(tmp_path, spoiled)
    assert any("Content Security Policy" in line for line in console)
    seen, _ = browse(tmp_path, text.replace("<main>", '<main><div style="width:500px">.</div>'))
    assert seen[0]["needed"] > seen[0]["width"]
