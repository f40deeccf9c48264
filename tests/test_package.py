import importlib.metadata
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import givens

ROOT = Path(__file__).parent.parent
HEAVY = ["faiss", "lance", "ray", "matplotlib", "triton", "numba", "rustworkx", "typer", "rich"]
HEAVY += ["h5py", "pyarrow", "fsspec"]


def test_import_is_light():
    """`import givens` brings in nothing heavy that `import torch` has not brought in already."""
    code = (
        "import sys, torch; before = set(sys.modules); import givens;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "givens" in run.stdout.split()
    assert not set(run.stdout.split()) & set(HEAVY)


def test_version_and_types():
    assert importlib.metadata.version("givens") == givens.__version__
    assert (Path(givens.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("name", givens.__all__)
def test_public_names_have_a_docstring(name):
    assert getattr(givens, name).__doc__


def blocks(path, language):
    found = re.finditer(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)
    return [
        pytest.param(match[1], id=f"{path.name}-{number}") for number, match in enumerate(found)
    ]


@pytest.mark.parametrize("block", blocks(ROOT / "README.md", "python"))
def test_readme_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("block", blocks(ROOT / "README.md", "bash"))
def test_readme_commands_run(block, tmp_path, monkeypatch):
    """The commands one after another, on files of the names that they use."""
    from givens.cli import app

    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).standard_normal((1000, 16)).astype(np.float32)
    for name, table in (("learn", x), ("base", x), ("queries", x[:20])):
        np.save(f"{name}.npy", table)
    np.save("truth.npy", ((x[:20, None] - x) ** 2).sum(2).argsort(1)[:, :100])
    for line in block.splitlines():
        done = CliRunner().invoke(app, shlex.split(line, comments=True)[1:], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    # A vector of the base is its own nearest neighbour.
    assert (np.load("better.npy")[:, 0] == np.arange(20)).all()


def test_every_module_has_its_test():
    """The map in CONTRIBUTING is kept: src/givens/x.py ↔ tests/test_x.py."""
    modules = {path.stem for path in (ROOT / "src" / "givens").glob("*.py")} - {
        "__init__",
        "__main__",
    }
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")}
    assert modules <= tests
