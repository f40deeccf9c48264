import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import givens

ROOT = Path(__file__).parent.parent
HEAVY = ["faiss", "lance", "ray", "matplotlib", "triton", "numba", "rustworkx", "typer", "rich"]
HEAVY += ["h5py", "pyarrow", "fsspec", "jinja2", "sklearn", "pandas", "polars"]


def test_import_is_light():
    """`import givens` brings in nothing heavy that `import torch` has not brought in already."""
    code = (
        "import sys, torch; before = set(sys.modules); import givens;"
        "[getattr(givens, name) for name in givens.__all__];"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "givens" in run.stdout.split()
    assert not set(run.stdout.split()) & set(HEAVY)


def test_names_are_imported_where_they_are_used():
    """So that a command hears Ctrl-C before torch is there."""
    code = (
        "import sys, givens; assert 'torch' not in sys.modules; from givens import *; "
        "assert all(name in globals() for name in givens.__all__); givens.nothing"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.endswith("AttributeError: module 'givens' has no attribute 'nothing'\n")
    assert set(givens.__all__) <= set(dir(givens))


def test_version_and_types():
    assert importlib.metadata.version("givens") == givens.__version__
    assert (Path(givens.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("name", givens.__all__)
def test_public_names_have_a_docstring(name):
    assert getattr(givens, name).__doc__


def test_every_module_has_its_test():
    """The map in CONTRIBUTING is kept: src/givens/x.py ↔ tests/test_x.py, and folder by folder."""
    source, tests = ROOT / "src" / "givens", ROOT / "tests"
    modules = {path.stem for path in source.glob("*.py")} - {"__init__", "__main__"}
    assert modules <= {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")}
    for folder in source.iterdir():
        if (folder / "__init__.py").exists():
            assert list((tests / folder.name).glob("test_*.py")), folder
