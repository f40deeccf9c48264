"""The paper's figures in small: rows that mean something, pictures from rows, bad input."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from givens.cli import app
from givens.paper import fig2, fig3, fig4, joint, rates, rows, stream, table1
from givens.retrieval.batches import Examples
from givens.retrieval.config import Config
from givens.retrieval.data import click_log


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
    assert not list(fig4.measure(["gcd-random", "svd"], 8, "cpu", make=broken, tell=told.append))
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
        (["--dims", "8,x"], "--dims must be comma-separated numbers"),
        (["--dims", "1"], "--dims must be comma-separated numbers"),
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
    args = ["--smoke", "-o", str(tmp_path), "--steps", "4", "--warmup", "10", "--angle", "0.01"]
    run = CliRunner().invoke(app, ["paper", "fig3", *args])
    assert run.exit_code == 0, run.exception or run.output
    path = tmp_path / "joint-built-in.json"
    first = rows.read(path)
    assert {row["method"] for row in first} == set(fig3.CURVES)
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
    assert "After Holm's correction for 11 methods, recall@100 is above the baseline" in table
    # The warm-ups are gone, and nothing is run again.
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    monkeypatch.setattr(joint, "train", None)
    monkeypatch.setattr(joint, "warm_up", None)
    assert CliRunner().invoke(app, ["paper", "table1", *args]).exit_code == 0


def test_when_has_every_case(tmp_path, monkeypatch):
    monkeypatch.setattr("givens.paper.when.SMOKE", {"users": 200, "items": 150, "clicks": 4000})
    args = ["paper", "when", "--smoke", "-o", str(tmp_path), "--steps", "2", "--warmup", "4"]
    run = CliRunner().invoke(app, [*args, "--angle", "0.02"])
    assert run.exit_code == 0, run.exception or run.output
    measured = rows.read(tmp_path / "small-when.json")
    assert {row["config"]["angle"] for row in measured if row["method"] == "gcd"} == {0.02}
    cases = {(row["kind"], row["fixed"], row["start"], row["method"]) for row in measured}
    assert len(cases) == 3 * 2 * 2 * 2
    assert len(measured) == 2 * len(cases)
    assert {row["config"]["stream"] for row in measured if row["kind"] == "drifting"} == {True}
    # Where items are fixed, their distortion is that of the warm-up's items; starts differ.
    assert "standing log, items fixed, from random, 2 bytes: recall@100 points" in run.output
    assert (tmp_path / "small-when.png").stat().st_size > 10_000


def test_a_stream_is_refreshed_in_four_ways(tmp_path):
    args = ["paper", "stream", "--smoke", "-o", str(tmp_path), "--angle", "0.02", "--seeds", "1"]
    run = CliRunner().invoke(app, args)
    assert run.exit_code == 0, run.exception or run.output
    measured = rows.read(tmp_path / "small-stream.json")
    assert [row["way"] for row in measured] == list(stream.WAYS)
    for row in measured:
        # The last step has no time after it.
        assert row["steps"] == [5, 10, 15]
        assert row["time"] == sorted(row["time"])
        assert all(0 <= share <= 1 for share in row["rewritten"])
    by_way = {row["way"]: row for row in measured}
    # A refit renames codewords, so that nearly every code is another one.
    assert min(by_way["refit"]["rewritten"]) > 0.5 > max(by_way["kept"]["rewritten"])
    assert by_way["refit"]["fitting"][0] > 10 * by_way["kept"]["fitting"][0]
    lines = (tmp_path / "small-stream.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(stream.WAYS.values())
    monkey = CliRunner().invoke(app, [*args, "--steps", "5"])
    assert "steps must be more than every=5 for a refresh, but got 5" in str(monkey.exception)


def test_at_a_time_of_the_stream_users_have_what_came_before_and_want_what_comes_next():
    log = click_log(200, 150, 4000, drift=0.02)
    examples = Examples(log, history=20, ahead=1, stream=True)
    held = stream.hold_out_at(examples, log.test, 0.5)
    row = 0
    for user in log.test:
        mine = slice(log.starts[user], log.starts[user + 1])
        past = log.items[mine][log.times[mine] <= 0.5]
        future = log.items[mine][log.times[mine] > 0.5][: stream.NEXT]
        if not (len(past) and len(future)):
            continue
        wanted = set(future.tolist()) - set(past.tolist())
        m = log.catalogue
        mask = (held.truth >= row * m) & (held.truth < (row + 1) * m)
        assert set((held.truth[mask] - row * m).tolist()) == wanted
        assert int(held.sizes[row]) == len(wanted)
        assert held.inputs.history[row, 0] == past[-1]
        row += 1
    assert row == len(held.inputs)
    with pytest.raises(ValueError, match=r"no held-out user with clicks before and after 2\.00"):
        stream.hold_out_at(examples, log.test, 2.0)


def best_at(peak, name, calls=None):
    """A measure whose recall falls with the distance to a value, on any seed."""

    def measure(config):
        value = getattr(config, name)
        if calls is not None:
            calls.append((value, config.seed))
        away = abs(np.log(value / peak))
        return {"recall": [0.1, 0.9 - away / 100], "final_distortion": 0.5, "diverged": None}

    return measure


@pytest.mark.parametrize(
    ("peak", "found", "grid"),
    [
        (0.01, 0.01, {0.003, 0.01, 0.03, 0.1}),
        (0.001, 0.001, {0.0003, 0.001, 0.003, 0.01, 0.03, 0.1}),
        (0.25, 0.3, {0.003, 0.01, 0.03, 0.1, 0.3, 0.9}),
    ],
)
def test_a_rate_is_the_best_of_a_grid_that_is_widened_at_its_ends(peak, found, grid):
    calls = []
    chosen = rates.tune(Config(), "angle", rates.ANGLES, best_at(peak, "angle", calls))
    assert chosen == dataclasses.replace(Config(), angle=found)
    assert {value for value, _ in calls} == grid
    assert {seed for _, seed in calls} == set(joint.HIDDEN) == {100, 101}


def test_ties_go_to_the_lower_distortion_and_what_diverges_loses():
    def measure(config):
        if config.angle == 0.1:
            return {"recall": [], "final_distortion": 0.0, "diverged": "the loss is not finite"}
        return {"recall": [0.5], "final_distortion": 0.2 + abs(config.angle - 0.03)}

    assert rates.tune(Config(), "angle", rates.ANGLES, measure).angle == 0.03

    def falling(config):
        return {"recall": [0.5], "final_distortion": 1 / config.angle}

    # Such a tie is no reason to look further.
    assert rates.tune(Config(), "angle", rates.ANGLES, falling).angle == 0.1


def test_rates_are_chosen_by_validation_users_and_kept(tmp_path, monkeypatch):
    log = click_log(200, 150, 4000)
    config = Config(
        dim=8, subspaces=2, codewords=8, history=10, batch=64, warmup=4, steps=4, every=2,
        sample=100, iterations=2, lr=1e-2, joint_lr=1e-2, negatives=10,
    )  # fmt: skip
    monkeypatch.setattr(rates, "WIDER", 0)
    told = []
    runs = joint.Runs(tmp_path / "rates.json", "cpu", told.append)
    methods = ("frozen", "gcd", "jpq", "post-hoc", "post-hoc-fit")
    chosen = rates.choose(runs, log, config, methods)
    assert set(chosen) == set(methods)
    assert chosen["gcd"]["angle"] in rates.ANGLES
    assert chosen["gcd"]["weight"] == chosen["frozen"]["weight"]
    assert chosen["post-hoc"] == chosen["post-hoc-fit"]
    assert len({found["lr"] for found in chosen.values()}) == 1
    # Test users are never asked, and one start serves all methods, weights and angles.
    assert not [row for row in runs.rows if "results" in row]
    assert {row["seed"] for row in runs.rows} == {100, 101}
    assert not runs.cache.exists()
    again = joint.Runs(tmp_path / "rates.json", "cpu", told.append)
    monkeypatch.setattr(joint, "explore", None)
    monkeypatch.setattr(joint, "warm_up", None)
    assert rates.choose(again, log, config, methods) == chosen


def test_a_rate_at_which_training_diverges_is_a_row(tmp_path, monkeypatch):
    log, told = click_log(200, 150, 4000), []
    config = Config(
        dim=8, subspaces=2, codewords=8, history=10, batch=64, warmup=4, steps=4, every=2,
        sample=100, iterations=2, joint_lr=1e-2, negatives=10, method="pogo", angle=1e20,
    )  # fmt: skip
    runs = joint.Runs(tmp_path / "rates.json", "cpu", told.append)
    row = runs.explore(log, config)
    assert "not finite at step" in row["diverged"]
    assert rates.score([row, row]) < rates.score([{"recall": [0.0], "final_distortion": 9.0}])
    assert rows.read(tmp_path / "rates.json")[-1] == row


def test_a_killed_table_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    log = click_log(200, 150, 4000)
    config = Config(
        dim=8, subspaces=2, codewords=8, history=10, batch=64, warmup=4, steps=4, every=2,
        sample=100, iterations=2, lr=1e-2, joint_lr=1e-2, negatives=10,
    )  # fmt: skip
    methods = ("frozen", "gcd", "cayley")
    chosen = {config.bytes: dict.fromkeys(methods, rates.read_rates(config))}

    def run(folder, tell):
        folder.mkdir(exist_ok=True)
        runs = joint.Runs(folder / "joint.json", "cpu", tell)
        table1.run(runs, log, [config], chosen)
        return runs.rows

    whole = run(tmp_path / "whole", lambda line: None)

    def stop(line):
        if "GCD" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", stop)
    kept = sorted(path.name for path in (tmp_path / "killed" / "joint.cache").iterdir())
    assert [name.split("-")[2] for name in kept] == ["start", "warm"]
    # Towers and start are read.
    monkeypatch.setattr(joint, "warm_up", None)
    monkeypatch.setattr("givens.retrieval.trainer.start_index", None)
    assert run(tmp_path / "killed", lambda line: None) == whole
    assert not (tmp_path / "killed" / "joint.cache").exists()


def test_holm_and_what_survives():
    # Holm's own way: 4 · 0.005, 3 · 0.01, 2 · 0.03, and 0.04 no less than the one before.
    values = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005, "e": float("nan")}
    found = joint.holm(values)
    assert np.isnan(found.pop("e"))
    assert found == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert joint.holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 1e-3, (4, 5))
    means = {"frozen": 0.5, "gcd": 0.48, "cayley": 0.52, "pogo": 0.5}
    made = [
        {
            "method": method, "seed": seed, "final_distortion": mean + noise[number, seed],
            "results": {"index": {"recall@100": 1 - mean + noise[number, seed]}},
        }
        for number, (method, mean) in enumerate(means.items())
        for seed in range(5)
    ]  # fmt: skip
    recalls, distortions = table1.survivors(made)
    assert recalls == (
        "After Holm's correction for 3 methods, recall@100 is above the baseline: GCD; below the "
        "baseline: Cayley; not shown: POGO"
    )
    assert distortions.split(", ", 1)[1] == (
        "the distortion is above the baseline: Cayley; below the baseline: GCD; not shown: POGO"
    )
    stats = pytest.importorskip("scipy.stats")
    ours, theirs = joint.pair_values(made[5:10], made[:5], joint.distortion)
    assert joint.paired_p_value(ours, theirs) == pytest.approx(stats.ttest_rel(ours, theirs).pvalue)
    assert joint.p_value(ours, theirs) == pytest.approx(stats.ttest_ind(ours, theirs).pvalue)


def test_ten_seeds_where_five_leave_it_open(monkeypatch):
    """GCD differs surely and POGO not at all; Cayley's p-value is between 0.01 and 0.1."""
    shift = {"frozen": 0.0, "gcd": -0.1, "pogo": 0.0, "cayley": -0.0015}
    ran = []

    class Fake:
        def run(self, log, config):
            ran.append((config.method, config.seed))
            noise = (-1) ** config.seed * 1e-3 * (config.method != "frozen")
            value = 0.5 + shift[config.method] + noise
            found = {"final_distortion": value, "results": {"index": {"recall@100": value}}}
            return {"method": config.method, "seed": config.seed, "bytes": config.bytes} | found

        def forget(self, seed):
            pass

    configs = [Config(seed=seed) for seed in range(5)]
    chosen = {32: dict.fromkeys(shift, rates.read_rates(Config()))}
    assert (
        0.01 < joint.paired_p_value([-0.5e-3, -2.5e-3, -0.5e-3, -2.5e-3, -0.5e-3], [0.0] * 5) < 0.1
    )
    table1.run(Fake(), None, configs, chosen, more=10)
    assert ran[20:] == [(method, seed) for seed in range(5, 10) for method in ("frozen", "cayley")]
    ran.clear()
    table1.run(Fake(), None, configs, chosen)
    assert len(ran) == 20


def test_numbers_are_told_to_five_digits():
    told = [rows.format_number(value) for value in (43347.6, 0.123456, 0.0, -2.5, np.nan, np.inf)]
    assert told == ["43,348", "0.12346", "0.0000", "-2.5000", "nan", "inf"]
    assert rows.format_number(45475.2, 1095.7) == "45,475 ± 1,096"


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
