"""The paper's figures in small: rows that mean something, pictures from rows, bad input."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from givens.cli import app
from givens.paper import fig2, fig3, fig4, joint, rows, table1
from givens.retrieval.config import Config


def test_fig4_measures_checks_and_draws(tmp_path):
    run = CliRunner().invoke(app, ["paper", "fig4", "-o", str(tmp_path), "--dims", "8,16"])
    assert run.exit_code == 0, run.exception or run.output
    measured = rows.read(tmp_path / "fig4-cpu.json")
    assert {(row["method"], row["n"]) for row in measured} == {
        (method, n) for method in fig4.METHODS for n in (8, 16)
    }
    for row in measured:
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]
        assert torch.__version__.startswith(row["torch"])
        assert row["orthogonality_error"] < 1e-5
    assert (tmp_path / "fig4-cpu.png").stat().st_size > 10_000
    assert "GCD-R about 50× faster than Cayley" in run.output
    # The picture again, from the rows alone.
    again = tmp_path / "again"
    args = ["paper", "fig4", "-o", str(again), "--rows", str(tmp_path / "fig4-cpu.json")]
    assert CliRunner().invoke(app, args).exit_code == 0
    assert (again / "fig4-cpu.png").exists()
    assert not (again / "fig4-cpu.json").exists()


def test_a_method_that_is_wrong_is_not_timed():
    def broken(method, n, dtype, device):
        weight, step = fig4.contender(method, n, dtype, device)
        if method == "svd":
            return weight, lambda: None
        return (lambda: 1.1 * weight()), step

    told = []
    assert not list(fig4.measured(["gcd-random", "svd"], 8, "cpu", make=broken, tell=told.append))
    assert "not orthogonal" in told[0]
    assert "does not move" in told[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "gcd-greedy"], "--methods must have frozen among them"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--methods", "adam"], "--methods must be of frozen"),
    ],
)
def test_bad_input_of_fig3(tmp_path, options, message):
    run = CliRunner().invoke(app, ["paper", "fig3", "--smoke", "-o", str(tmp_path), *options])
    assert run.exit_code != 0
    assert message in str(run.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dims", "8,x"], "--dims must be numbers"),
        (["--dims", "1"], "--dims must be numbers"),
        (["--device", "tpu"], "--device must be cpu or cuda"),
        (["--rows", "missing.json"], "missing.json"),
    ],
)
def test_bad_input(tmp_path, options, message):
    run = CliRunner().invoke(app, ["paper", "fig4", "-o", str(tmp_path), *options])
    assert run.exit_code != 0
    assert message in str(run.exception)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    generator = np.random.default_rng(0)
    x = generator.normal(size=(600, 16)) @ generator.normal(size=(16, 16)) * 20
    np.save(folder / "base_a.npy", x[:400].astype(np.float32))
    np.save(folder / "base_b.npy", x[400:].astype(np.float32))
    return folder


def test_fig2a_runs_once_and_says_what_holds(tmp_path, base, monkeypatch):
    monkeypatch.setattr(fig2, "RATES", (1e-6, 1e-5))
    monkeypatch.setattr(fig2, "CODEWORDS", 16)
    args = ["paper", "fig2a", "--data", str(base), "-o", str(tmp_path), "--iterations", "4"]
    run = CliRunner().invoke(app, args)
    assert run.exit_code == 0, run.exception or run.output
    measured = rows.read(tmp_path / "fig2a.json")
    assert {row["method"] for row in measured} == set(fig2.METHODS)
    assert {row["vectors"] for row in measured} == {600}
    for row in measured:
        assert len(row["distortion"]) == 4
        assert row["seed"] == 0
    opq = next(row for row in measured if row["method"] == "opq")
    assert opq["distortion"] == sorted(opq["distortion"], reverse=True)
    assert "GCD-R is behind GCD-G" in run.output
    assert (tmp_path / "fig2a.png").stat().st_size > 10_000
    # A rerun goes on from the rows: nothing is run again.
    monkeypatch.setattr(fig2, "fit", None)
    assert CliRunner().invoke(app, args).exit_code == 0
    assert rows.read(tmp_path / "fig2a.json") == measured


def test_fig2bc_compare_runs(tmp_path, base, monkeypatch):
    monkeypatch.setattr(fig2, "RUNS", 2)
    monkeypatch.setattr(fig2, "CODEWORDS", 16)
    monkeypatch.setattr(fig2, "FRACTIONS", (0.5, 1.0))
    for part in "bc":
        args = ["paper", f"fig2{part}", "--data", str(base), "-o", str(tmp_path)]
        run = CliRunner().invoke(app, [*args, "--iterations", "3"])
        assert run.exit_code == 0, run.exception or run.output
        measured = rows.read(tmp_path / f"fig2{part}.json")
        assert len({(row["fraction"], row["seed"]) for row in measured}) == 4
        assert (tmp_path / f"fig2{part}.png").exists()
    assert "GCD-G varies less between runs on 50 %" in run.output
    assert "GCD-G does better on 50 % of the data" in run.output


def test_fig2_without_vectors(tmp_path):
    run = CliRunner().invoke(app, ["paper", "fig2b", "--data", str(tmp_path), "-o", str(tmp_path)])
    assert run.exit_code != 0
    assert "has no base vectors" in str(run.exception)


def test_fig3_and_table1_share_their_runs(tmp_path, monkeypatch):
    """A smoke run of both: methods of a seed from one warm-up, rows kept, the table from rows."""
    monkeypatch.setattr(joint, "SMOKE", {"users": 200, "items": 150, "clicks": 4000})
    args = ["--smoke", "-o", str(tmp_path), "--steps", "4", "--warmup", "10"]
    run = CliRunner().invoke(app, ["paper", "fig3", *args])
    assert run.exit_code == 0, run.exception or run.output
    path = tmp_path / "joint-built-in.json"
    first = rows.read(path)
    assert {row["method"] for row in first} == set(joint.METHODS) - {"post-hoc"}
    assert len({row["warm_up"] for row in first}) == 1
    assert np.ptp([row["distortion"][0] for row in first]) < 1e-6
    assert {tuple(row["steps"]) for row in first} == {(0, 4)}
    assert (tmp_path / "fig3-built-in.png").stat().st_size > 10_000
    assert "GCD-G ends below frozen (the baseline): not shown" in run.output
    run = CliRunner().invoke(app, ["paper", "table1", *args])
    assert run.exit_code == 0, run.exception or run.output
    both = rows.read(path)
    assert both[: len(first)] == first
    assert {(row["method"], row["seed"]) for row in both} == {
        (method, seed) for method in joint.METHODS for seed in (0, 1)
    }
    table = (tmp_path / "table1-built-in.md").read_text()
    mine = [row["results"]["index"]["recall@100"] for row in both if row["method"] == "gcd-greedy"]
    line = next(line for line in table.splitlines() if line.startswith("| GCD-G"))
    assert f"{100 * np.mean(mine):.2f} ± {100 * np.std(mine, ddof=1):.2f}" in line
    assert "2.43, 51.37" in line
    # The warm-ups are gone, and nothing is run again.
    assert not list(tmp_path.glob("warm-up-*"))
    monkeypatch.setattr(joint, "train", None)
    monkeypatch.setattr(joint, "warm_up", None)
    assert CliRunner().invoke(app, ["paper", "table1", *args]).exit_code == 0


def test_when_has_every_case(tmp_path, monkeypatch):
    monkeypatch.setattr("givens.paper.when.SMOKE", {"users": 200, "items": 150, "clicks": 4000})
    args = ["paper", "when", "--smoke", "-o", str(tmp_path), "--steps", "2", "--warmup", "4"]
    run = CliRunner().invoke(app, args)
    assert run.exit_code == 0, run.exception or run.output
    measured = rows.read(tmp_path / "when.json")
    cases = {(row["kind"], row["fixed"], row["start"], row["method"]) for row in measured}
    assert len(cases) == 3 * 2 * 2 * 2
    assert len(measured) == 2 * len(cases)
    assert {row["config"]["stream"] for row in measured if row["kind"] == "drifting"} == {True}
    # Where items are fixed, their distortion is that of the warm-up's items; starts differ.
    assert "stationary, item tower fixed, from random: distortion" in run.output
    assert (tmp_path / "when.png").stat().st_size > 10_000


def test_numbers_are_told_to_five_digits():
    told = [rows.number(value) for value in (43347.6, 0.123456, 0.0, -2.5, np.nan, np.inf)]
    assert told == ["43,348", "0.12346", "0.0000", "-2.5000", "nan", "inf"]
    assert rows.number(45475.2, 1095.7) == "45,475 ± 1,096"


def test_p_values_and_verdicts():
    base, less = (
        [{"seed": seed, "final_distortion": value} for seed, value in enumerate(values)]
        for values in ((0.50, 0.53, 0.47), (0.40, 0.41, 0.39))
    )
    # F = (0.1² · 3/2) / 0.01², with 1 and 4 degrees of freedom.
    assert joint.p_value([0.50, 0.51, 0.49], [0.40, 0.41, 0.39]) == pytest.approx(2.55e-4, rel=0.01)
    # Differences of −0.10, −0.12 and −0.08: t = −0.1 / (0.02 / √3), with 2 degrees of freedom.
    told = joint.verdict(less, base, joint.distortion, lower=True)
    assert re.fullmatch(r"holds \(-20.00 %, p = 0.0054, seed by seed p = 0.013\)", told), told
    # Other seeds are no pairs.
    far = [{**row, "seed": row["seed"] + 9} for row in base]
    assert joint.verdict(less, far, joint.distortion, lower=True).startswith("not shown (no seed")
    # A seed that one of them lacks says nothing of the others.
    more = [*base, {"seed": 99, "final_distortion": 1e9}]
    assert joint.verdict(less, more, joint.distortion, lower=True) == told
    assert joint.verdict(base, less, joint.distortion, lower=True).startswith("does not hold")
    one = joint.verdict(less[:1], base, joint.distortion, lower=True)
    assert re.fullmatch(r"not shown \(-\d+\.\d\d %, one seed\)", one), one
    assert np.isnan(joint.p_value([1.0, 1.0], [1.0, 1.0]))
    assert table1.PAPER["MovieLens"]["gcd-steepest"] == (7.94, 36.35)


@pytest.mark.parametrize(("change", "ticks"), [(0.997, "-0.3"), (1.4, "+20")])
def test_fig3_shows_small_and_large_differences(tmp_path, monkeypatch, change, ticks):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(fig3, "save_picture", lambda _, figure, *__: drawn.append(figure))
    about = {"name": "log", "bytes": 16, "gpu": "a GPU", "threads": 2, "steps": [0, 100]}
    about["config"] = dataclasses.asdict(Config())
    made = [("frozen", 0, 1.0), ("frozen", 1, 1.0), ("gcd-greedy", 1, change)]
    curves = [
        {**about, "method": m, "seed": s, "distortion": [0.5, 0.5 * c], "final_distortion": 0.5 * c}
        for m, s, c in made
    ]
    # What table 1 and others have added to the file is not in the figure.
    other = {**curves[2], "distortion": [0.5, 9.0], "final_distortion": 9.0}
    more = [{**other, "bytes": 8}, {**other, "config": {**about["config"], "start": "identity"}}]
    told = fig3.plot(pyplot, [more[0], *curves, more[1]], tmp_path / "fig3.png")
    assert told == fig3.claims(curves)
    drawn[0].canvas.draw()
    left, right = drawn[0].axes
    shown = [tick.get_text() for tick in right.get_yticklabels()]
    assert ticks in shown
    assert "0" in shown
    names = [text.get_text() for text in left.get_legend().get_texts()]
    assert names == ["frozen (the baseline)", "GCD-G, 1 seed"]
    pyplot.close(drawn[0])


def test_rows_that_are_none(tmp_path):
    path = tmp_path / "rows.json"
    for text in ("{", "{}", "[1]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="holds no rows"):
            rows.read(path)
    rows.write(path, [{"n": 1}])
    assert json.loads(path.read_text()) == rows.read(path) == [{"n": 1}]
