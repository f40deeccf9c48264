"""The paper's figures in small: rows that mean something, pictures from rows, bad input."""

import json

import pytest
import torch
from typer.testing import CliRunner

from givens.cli import app
from givens.paper import fig4, rows


def test_fig4_measures_checks_and_draws(tmp_path):
    run = CliRunner().invoke(app, ["paper", "fig4", "-o", str(tmp_path), "--dims", "8,16"])
    assert run.exit_code == 0, run.output
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


def test_rows_that_are_none(tmp_path):
    path = tmp_path / "rows.json"
    for text in ("{", "{}", "[1]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="holds no rows"):
            rows.read(path)
    rows.write(path, [{"n": 1}])
    assert json.loads(path.read_text()) == rows.read(path) == [{"n": 1}]
