"""What all subcommands say and leave behind: progress, records, sizes."""

import datetime
import json
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import givens
from givens.storage import files, vectors

Engine = Literal["local", "ray"]


def command(*words: object) -> str:
    """A command to go on with, as a shell takes it."""
    return shlex.join(map(str, words))


@contextmanager
def progress(description: str) -> Iterator[Any]:
    """A progress bar, on stderr so that the output can be piped."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *times)
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bar:
        yield Bar(bar, bar.add_task(description, total=None))


class Bar:
    """One task of a progress bar."""

    def __init__(self, bar: Any, task: Any) -> None:
        self.bar, self.task = bar, task

    def start(self, total: int) -> None:
        """Say how much there is to do."""
        self.bar.update(self.task, total=total)

    def advance(self, done: float = 1) -> None:
        """Say what was done."""
        self.bar.update(self.task, advance=done)

    def stand(self, at: int, total: int, note: str) -> None:
        """Say where it stands."""
        self.bar.update(self.task, completed=at, total=total, description=note)


def record(seed: int | None, device: str, **configuration: Any) -> dict[str, Any]:
    """How a file came about, to be kept beside it."""
    return {
        "configuration": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in configuration.items()
        },
        "command": sys.argv[1:],
        "seed": seed,
        "device": _device(device),
        "threads": torch.get_num_threads(),
        "versions": {
            "givens": givens.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_record(path: Path, content: dict[str, Any]) -> Path:
    """Write a record beside the file it is about."""
    beside = path.with_name(path.name + ".json")
    files.write_json(beside, {**content, "checksum": files.checksum(path)})
    return beside


def read_record(path: Path) -> dict[str, Any]:
    """What was recorded beside a file, if it is still there."""
    try:
        return dict(json.loads(path.with_name(path.name + ".json").read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def check_output(path: Path, *sources: str | Path, folder: bool = False) -> None:
    """Find out before the work whether it can be written, and not over what it is made of."""
    for source in sources:
        if vectors.is_remote(source):
            continue
        for read in (Path(source), *(vectors.split(file)[0] for file in vectors.listed(source))):
            if path.exists() and read.exists() and path.samefile(read):
                raise ValueError(f"--output must not be {read}, which is read")
    # A folder is written into, where it is there.
    files.check_writable(path / "manifest.json" if folder and path.is_dir() else path)


def make_folder(path: Path) -> None:
    """Make the folder of the results, unless it is there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"--output must be a folder, but {path} is a file or in one") from error


def size(path: Path) -> str:
    """The size of a file or of a folder's files, for people."""
    count = float(bytes_of(path))
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def bytes_of(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    inside = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in inside)


def check_device(name: str) -> torch.device:
    """A device that is there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device must be cpu or cuda, but got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, but got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device {name} needs a GPU that torch can use, but there is none; "
            "leave --device out for the CPU"
        )
    return device


def pyplot() -> Any:
    """Matplotlib, for files only."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install 'givens[plots]'") from error

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _device(name: str) -> str:
    device = torch.device(name)
    if device.type == "cuda":
        return f"{name}: {torch.cuda.get_device_name(device)}"
    return f"{name}: {platform.processor() or platform.machine()}"
