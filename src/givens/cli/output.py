"""What the subcommands share: progress bars, records, checks of outputs."""

import datetime
import json
import os
import platform
import shlex
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import givens
from givens.storage import files, vectors

Engine = Literal["local", "ray"]
# The files of runs and of shards.
PARTS = (".faiss", ".jsonl", ".lists", ".safetensors")
NAMED = ("config.json", "manifest.json", "results.json")
# Seconds between two lines of progress without a terminal.
LINE_EVERY = 30.0
# Called by `undo`: an interrupt ends the process without leaving its `with` blocks.
_undoing: list[Callable[[], object]] = []


def undo() -> None:
    """Remove the progress bars and empty folders of an interrupted command."""
    for call in reversed(_undoing):
        with suppress(OSError):
            call()


@contextmanager
def _undone_by(call: Callable[[], object]) -> Iterator[None]:
    """Register a function with `undo` for the duration of the block."""
    _undoing.append(call)
    try:
        yield
    finally:
        _undoing.remove(call)


def quote_command(*words: object) -> str:
    """A command to run next, quoted for a shell; a path that begins with - is no option."""
    given = (
        f"./{word}" if isinstance(word, Path) and f"{word}"[:1] == "-" else word for word in words
    )
    return shlex.join(map(str, given))


@contextmanager
def progress(description: str) -> Iterator[Any]:
    """A progress bar on stderr, so that output can be piped; lines of text without a terminal."""
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
    if not console.is_terminal:
        with Lines(description) as lines:
            yield lines
        return
    with Progress(*columns, console=console, transient=True) as bar, _undone_by(bar.stop):
        yield Bar(bar, bar.add_task(description, total=None))


class Bar:
    """One task of a progress bar."""

    def __init__(self, bar: Any, task: Any) -> None:
        self.bar, self.task = bar, task

    def start(self, total: int) -> None:
        """Set the total."""
        self.bar.update(self.task, total=total)

    def advance(self, done: float = 1) -> None:
        """Add finished work."""
        self.bar.update(self.task, advance=done)

    def stand(self, at: int, total: int, note: str) -> None:
        """Set the finished work, the total and a note."""
        self.bar.update(self.task, completed=at, total=total, description=note)


class Lines:
    """Progress without a terminal, as in a log: a line every half minute, on stderr."""

    def __init__(self, description: str) -> None:
        self.description, self.done = description, 0.0
        self.total: float | None = None
        self.began = time.perf_counter()
        self.ended = threading.Event()
        # A thread of its own, since long work may not report for minutes.
        self.teller = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self) -> "Lines":
        self.teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.teller.join()

    def start(self, total: int) -> None:
        """Set the total."""
        self.total = total

    def advance(self, done: float = 1) -> None:
        """Add finished work."""
        self.done += done

    def stand(self, at: int, total: int, note: str) -> None:
        """Set the finished work, the total and a note."""
        self.done, self.total, self.description = at, total, note

    def _tell(self) -> None:
        while not self.ended.wait(LINE_EVERY):
            spent = time.perf_counter() - self.began
            line = f"{self.description}: "
            if self.total:
                line += f"{self.done:,.0f} of {self.total:,}, "
            line += f"{spent:.0f} s"
            if self.total and self.done:
                line += f", about {spent * (self.total / self.done - 1):.0f} s left"
            print(line, file=sys.stderr, flush=True)  # noqa: T201


def make_record(seed: int | None, device: str, **configuration: Any) -> dict[str, Any]:
    """The record of a file: how it was made."""
    return {
        "configuration": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in configuration.items()
        },
        "command": sys.argv[1:],
        "seed": seed,
        "device": _describe_device(device),
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
    """Write a record beside its file."""
    files.write_json(files.record_path(path), {**content, "checksum": files.checksum(path)})
    return files.record_path(path)


def get_names_path(index: Path) -> Path:
    """The path of the names of an index's vectors, a line for each id."""
    return index.with_name(index.name + ".items.txt")


def write_names(index: Path, names: Sequence[str] | None) -> None:
    """Write the names beside an index, or delete those of an earlier one if there are none."""
    if names is None:
        get_names_path(index).unlink(missing_ok=True)
        return
    with files.replacing(get_names_path(index)) as temporary:
        text = "".join(f"{' '.join(name.splitlines())}\n" for name in names)
        temporary.write_text(text, "utf-8", newline="\n")


def read_names(index: Path, ids: Container[int]) -> dict[int, str] | None:
    """The names of some of an index's vectors, by id; None if they have no names.

    They come from `givens build`, or from items.txt of `givens train`: millions of lines, maybe.
    """
    path = get_names_path(index)
    if not path.is_file() and "log" in read_record(index):
        path = index.with_name("items.txt")
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="\n") as lines:
        return {i: line.removesuffix("\n") for i, line in enumerate(lines) if i in ids}


def read_record(path: Path) -> dict[str, Any]:
    """The record beside a file, if there is one."""
    try:
        return dict(json.loads(files.record_path(path).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def check_outputs(
    outputs: Mapping[str, Path | None],
    sources: Iterable[str | Path | None] = (),
    *,
    folders: bool = False,
) -> None:
    """Check before the work that outputs can be written, differ, and are not inputs.

    Two names are the same file if the system says so: through links or other spellings. Files
    written beside an output are checked too, against those beside a source or in its folder.

    Args:
        outputs: paths by the options that name them; None is skipped.
        sources: inputs: files, folders, tables of files, addresses.
        folders: whether an output may be an existing folder.
    """
    read = {_identify(path): path for source in sources if source for path in _list_read(source)}
    taken: dict[Any, str] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        for written in (path, files.record_path(path)):
            if (source := read.get(_identify(written))) is not None:
                which = option if written == path else f"{written}, written beside {option},"
                raise ValueError(f"{which} must not be {source}, which is read")
            other = taken.setdefault(_identify(written), option)
            if other != option:
                raise ValueError(
                    f"{other} and {option} must be two files, but both are {outputs[other]}"
                )
    for path in outputs.values():
        if path is not None:
            files.check_writable(path / "manifest.json" if folders and path.is_dir() else path)


def check_folder(
    folder: Path, names: Iterable[str], sources: Iterable[str | Path | None] = ()
) -> None:
    """Check that a folder of results is not an input, and that no result would replace one."""
    read = {_identify(path): path for source in sources if source for path in _list_read(source)}
    for name in ("", *names):
        if (source := read.get(_identify(folder / name))) is not None:
            which = f": its {name} would be {source}," if name else ","
            raise ValueError(f"--output must not be {folder}{which} which is read")


def _identify(path: Path) -> Any:
    """A key that is equal for two names of the same file, even if it does not exist yet."""
    try:
        about = path.stat()
    except OSError:
        return os.path.realpath(path)
    return about.st_dev, about.st_ino


def _list_read(source: str | Path) -> Iterator[Path]:
    """The files that an input reads: itself, those in it, and its record."""
    path = Path(source)
    if vectors.is_remote(source):
        scheme, _, rest = str(source).partition("://")
        if scheme not in ("file", "local"):
            return
        path = Path(rest)
    path = vectors.split(path)[0]
    yield path
    if path.is_dir():
        ours = any((path / name).exists() for name in ("manifest.json", "config.json"))
        for file in path.iterdir():
            known = PARTS if ours else vectors.SUFFIXES
            if file.suffix.lower() in known or file.name in NAMED:
                yield file
    elif files.record_path(path).exists():
        yield files.record_path(path)


@contextmanager
def folder(path: Path) -> Iterator[None]:
    """Create a folder of results if needed; remove it if an error leaves it empty."""
    made = [one for one in (path, *path.parents) if not one.exists()]

    def remove() -> None:
        for one in made:
            with suppress(OSError):
                one.rmdir()

    with _undone_by(remove):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"--output must be a folder, but {path} is a file or in one"
            ) from error
        try:
            yield
        except BaseException:
            remove()
            raise


def format_size(path: Path) -> str:
    """The size of a file or of a folder's files, with a unit."""
    count = float(count_bytes(path))
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def count_bytes(path: Path) -> int:
    """The bytes of a file, or of the files in a folder."""
    inside = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in inside)


def check_device(name: str) -> torch.device:
    """Return a device that exists."""
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


def import_pyplot() -> Any:
    """Import matplotlib, for files only."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install 'givens[plots]'") from error

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _describe_device(name: str) -> str:
    device = torch.device(name)
    if device.type == "cuda":
        return f"{name}: {torch.cuda.get_device_name(device)}"
    return f"{name}: {platform.processor() or platform.machine()}"
