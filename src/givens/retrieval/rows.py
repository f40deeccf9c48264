"""Files of the rows of split tables: each rank writes its range, any number of ranks reads them.

A file has a unique name, holds its rows in blocks, and is never overwritten. A checkpoint or a file
of towers names the files that belong to it, with their seals; they stay until it is replaced.
"""

import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from givens import distributed
from givens.storage import files
from givens.storage.formats import Safetensors
from givens.storage.vectors import Joined

KIND, SUFFIX = "rows", ".rows"
# Rows of a tensor in a file; reading needs memory for one such block beside the table.
BLOCK = 1 << 18

Entry = dict[str, Any]
"""A reference to a file: its name, its rows from `first` to below `stop`, and its seal."""


class RowFiles:
    """The files of a run's tables, in a folder or in a temporary one for each rank."""

    def __init__(self, folder: Path | None = None) -> None:
        self.given = folder
        # The files that the last checkpoint names.
        self.kept: list[Entry] = []

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        if self.given is None:
            self.given = Path(tempfile.mkdtemp(prefix="givens-"))
            weakref.finalize(self, shutil.rmtree, self.given, ignore_errors=True)
        return self.given

    def save(self, columns: Mapping[str, Tensor], first: int, step: int) -> list[Entry]:
        """Write this rank's rows of all columns; returns the files of all ranks."""
        return distributed.from_all(lambda: self._save(columns, first, step)) if columns else []

    def load(self, entries: Iterable[Entry], columns: Mapping[str, Tensor], first: int) -> None:
        """Fill columns, which begin at row `first`, from files."""
        if columns:
            distributed.from_all(lambda: fill(self.folder, entries, columns, first))

    def keep(self, entries: Iterable[Entry]) -> None:
        """Remove all files except these and those of the last checkpoint."""
        names = {entry["name"] for entry in (*entries, *self.kept)}
        if not names:
            return
        files.sweep(self.folder, f"*{SUFFIX}")
        for path in self.folder.glob(f"[!.]*{SUFFIX}"):
            if path.name not in names:
                path.unlink(missing_ok=True)

    def _save(self, columns: Mapping[str, Tensor], first: int, step: int) -> Entry:
        held = {len(column) for column in columns.values()}
        tensors = {
            f"{name}/{first + at}": column[at : at + BLOCK]
            for name, column in columns.items()
            for at in range(0, len(column), BLOCK)
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        stop = first + held.pop()
        name = f"{step:08d}-{first}-{secrets.token_hex(4)}{SUFFIX}"
        seal = files.save(self.folder / name, KIND, tensors, {"first": first, "stop": stop})
        return {"name": name, "first": first, "stop": stop, "seal": seal}


def fill(
    folder: Path, entries: Iterable[Entry], columns: Mapping[str, Tensor], first: int = 0
) -> None:
    """Copy rows from files into columns that begin at row `first`; raises if rows are missing."""
    missing = {name: len(column) for name, column in columns.items()}
    stop = first + max(missing.values())
    for entry in entries:
        if entry["stop"] <= first or entry["first"] >= stop:
            continue
        for name, at, rows in _read(folder, entry):
            if name in columns:
                low, high = max(at, first), min(at + len(rows), stop)
                if low < high:
                    columns[name][low - first : high - first].copy_(rows[low - at : high - at])
                    missing[name] -= high - low
    lacking = [name for name, count in missing.items() if count]
    if lacking:
        raise ValueError(f"{folder} is incomplete: rows of {lacking[0]} are missing")


def read_columns(folder: Path, entries: list[Entry]) -> dict[str, Tensor]:
    """All rows of all columns, in memory."""
    parts: dict[str, list[Tensor]] = {}
    for entry in sorted(entries, key=lambda entry: int(entry["first"])):
        for name, _, rows in _read(folder, entry):
            parts.setdefault(name, []).append(rows)
    return {name: torch.cat(blocks) for name, blocks in parts.items()}


def open_column(folder: Path, entries: list[Entry], name: str) -> Joined:
    """All rows of a column, read when they are sliced; digests are not checked."""
    blocks = []
    for entry in sorted(entries, key=lambda entry: int(entry["first"])):
        path = folder / Path(entry["name"]).name
        with files.opened(path, KIND) as (header, _):
            _check_seal(path, header, entry)
        keys = [key for key in header.tensors if key.rpartition("/")[0] == name]
        blocks += [Safetensors(path, key, None) for key in keys]
    return Joined(blocks)


def _read(folder: Path, entry: Entry) -> Iterator[tuple[str, int, Tensor]]:
    path = folder / Path(entry["name"]).name
    with files.opened(path, KIND) as (header, tensors):
        _check_seal(path, header, entry)
        for key, rows in tensors:
            name, _, at = key.rpartition("/")
            yield name, int(at), rows


def _check_seal(path: Path, header: files.Header, entry: Entry) -> None:
    if header.seal != entry["seal"]:
        raise ValueError(f"{path} is damaged: it is not the file that was saved")
