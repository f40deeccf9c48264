"""Raw rows: written once by a run, with its environment; pictures are drawn from them."""

import importlib.metadata
import json
import math
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import givens
from givens.storage import files

Rows = list[dict[str, Any]]
PACKAGES = ("torch", "numba", "triton", "faiss-cpu")


def environment(device: str = "cpu", packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """Device, versions and commit, which every measured row carries."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": device,
        "cpu": _processor(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "givens": givens.__version__,
        "commit": commit or None,
        **{name: _version(name) for name in packages},
    }


def write(path: Path, rows: Rows) -> None:
    """Write rows, atomically."""
    files.write_json(path, rows)


def read(path: Path) -> Rows:
    """The rows in a file that `write` wrote."""
    try:
        rows = json.loads(path.read_text())
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            return rows
    except ValueError:
        pass
    raise ValueError(f"{path} holds no rows: a list of JSON objects is wanted")


def set_plain_ticks(axis: Any) -> None:
    """Label a logarithmic axis, whose limits are set, with plain numbers such as 50,000."""
    from matplotlib import ticker

    low, high = axis.get_view_interval()
    steps = range(1, 10) if high < 6 * low else (1, 2, 5)
    axis.set_major_locator(ticker.LogLocator(subs=steps))
    axis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def format_number(value: float, spread: float | None = None) -> str:
    """A number to five digits, "43,348" or "0.12346"; "43,348 ± 99" with its spread."""
    if not math.isfinite(value):
        return f"{value}"
    digits = max(0, 4 - math.floor(math.log10(abs(value) or 1)))
    if spread is None:
        return f"{value:,.{digits}f}"
    return f"{value:,.{digits}f} ± {spread:,.{digits}f}"


def save_picture(pyplot: Any, figure: Any, caption: str, path: Path) -> None:
    """Write a picture with a line below it: data, sizes and machine."""
    height, below = figure.get_figheight(), 0.25
    figure.set_figheight(height + below)
    figure.tight_layout(rect=(0, below / (height + below), 1, 1))
    figure.text(0.01, 0.06 / (height + below), caption, fontsize=7.5, va="bottom", color="0.35")
    files.write_together({path: files.png(figure)})
    pyplot.close(figure)


def machine(row: dict[str, Any]) -> str:
    """The processor that a row was measured on: "NVIDIA H200", "AMD EPYC, 2 threads"."""
    threads = row["threads"]
    return str(row["gpu"] or f"{row['cpu']}, {threads} thread{'s' * (threads > 1)}")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
