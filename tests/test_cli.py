import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import givens
from givens.cli import app
from givens.cli.demo import METHODS


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "givens", *map(str, arguments)], capture_output=True, text=True
    )


def test_version_and_help():
    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"givens {givens.__version__}"
    assert "Example: givens demo" in CliRunner().invoke(app, ["demo", "--help"]).output


def test_demo_shows_every_method(tmp_path):
    done = run("demo", "--dim", 8, "--steps", 40, "-o", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads((tmp_path / "convergence.json").read_text())}
    assert set(rows) == set(METHODS)
    for method, row in rows.items():
        assert method in done.stdout
        assert method == "frozen" or row["excess"][-1] < 0.2 < row["excess"][0]
    assert rows["gcd-greedy"]["excess"][-1] < 0.1
    assert (tmp_path / "convergence.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--dim", "1"], "givens: --dim must be at least 2"),
        (["demo", "-o", "/proc/nowhere"], "givens: "),
    ],
)
def test_errors_are_one_line(arguments, message):
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(message)
    assert len(done.stderr.strip().splitlines()) == 1
