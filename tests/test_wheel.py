"""The wheel: what is in it, what it says of itself, and that it works far from the repository."""

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import givens

ROOT = Path(__file__).parent.parent


def ran(*command, **options):
    """What a command prints; its errors if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built as `pip wheel . --no-deps` does, from a copy without what earlier builds have left."""
    copy = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    # Without isolation nothing is downloaded: setuptools is among what the tests install.
    pip = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    ran(*pip, "--no-index", "--wheel-dir", "dist", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


def test_it_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.endswith("/")}
    package = {name for name in names if name.startswith("givens/")}
    info = f"givens-{givens.__version__}.dist-info/"
    source = ROOT / "src"
    assert package == {
        path.relative_to(source).as_posix()
        for path in (source / "givens").rglob("*")
        if path.suffix in (".py", ".css", ".html") or path.name == "py.typed"
    }
    assert {name for name in names if not name.startswith(info)} == package
    assert info + "licenses/LICENSE" in names


def test_it_says_what_it_is(wheel):
    info = f"givens-{givens.__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as file:
        about = email.message_from_bytes(file.read(info + "METADATA"))
        scripts = file.read(info + "entry_points.txt").decode()
        tags = email.message_from_bytes(file.read(info + "WHEEL"))
    assert (about["Name"], about["Version"]) == ("givens", givens.__version__)
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.11"
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload().startswith("# givens")
    assert "Typing :: Typed" in about.get_all("Classifier")
    assert scripts.split() == ["[console_scripts]", "givens", "=", "givens.__main__:main"]
    assert tags["Root-Is-Purelib"] == "true"

    needed = about.get_all("Requires-Dist")
    always = {line.split(">")[0] for line in needed if "extra ==" not in line}
    assert {"torch", "numpy", "safetensors", "typer"} <= always
    assert not always & {"faiss-cpu", "ray", "pylance", "matplotlib", "triton"}
    extras = set(about.get_all("Provides-Extra"))
    assert {"faiss", "formats", "fsspec", "lance", "ray", "plots", "paper", "docs"} <= extras
    # Every extra asks for something, and those that name others name ones that are there.
    assert {
        extra for extra in extras if any(f'extra == "{extra}"' in line for line in needed)
    } == extras
    for line in needed:
        if line.startswith("givens["):
            assert set(line[len("givens[") : line.index("]")].split(",")) <= extras


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of a fresh environment with the wheel in it, in a folder that knows nothing of us.

    What givens needs is lent from here, after its own packages, so that torch is not installed
    anew. A path file does not lend an editable install: that is a path file, too.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "venv", with_pip=False, symlinks=os.name != "nt")
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    ran(*pip, "--no-index", "--quiet", str(wheel), cwd=folder)
    site = Path(ran(str(python), "-c", "import site; print(site.getsitepackages()[0])").strip())
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "lent.pth").write_text("\n".join(sorted(lent)) + "\n")
    return python


@pytest.fixture
def outside(installed, tmp_path, monkeypatch):
    """Run a program of that environment in an empty folder."""
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def outside(program, *arguments):
        return ran(str(installed.parent / program), *arguments, cwd=tmp_path)

    return outside


def test_it_works_elsewhere(outside, installed):
    """From vectors to an index, by the installed package alone."""
    code = """
import numpy as np, givens
from givens.export.faiss import from_faiss, save_index, to_faiss
x = np.random.default_rng(0).standard_normal((600, 8)).astype(np.float32)
q = givens.fit(x, 4, codewords=16)
q.save("q.safetensors")
index = to_faiss(givens.load("q.safetensors"), x)
save_index(index, "index.faiss")
np.save("x.npy", x)
assert from_faiss(index).fingerprint == q.fingerprint
print(givens.__file__)
"""
    assert str(installed.parent.parent) in outside("python", "-c", code)
    assert "index.faiss" in outside(
        "givens", "search", "index.faiss", "x.npy", "-k", "3", "-o", "n.npy"
    )


def test_both_ways_to_call_it(outside):
    told = f"givens {givens.__version__}\n"
    assert outside("givens", "--version") == told
    assert outside("python", "-m", "givens", "--version") == told
