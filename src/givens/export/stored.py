"""Faiss indexes in files that are whole or not there, with a record to check them by."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss

import givens
from givens.export.parts import from_faiss, inverted
from givens.storage import files


@dataclass(frozen=True)
class Stored:
    """An index from a file, and what the record beside the file says of it."""

    index: Any
    record: dict[str, Any] | None


def save_index(index: Any, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
    """Write an index and, beside it in `path.json`, its record with `about` in it."""
    record = {
        **(about or {}),
        "fingerprint": from_faiss(index).fingerprint,
        "vectors": index.ntotal,
    }
    with recording(path, record) as temporary:
        try:
            faiss.write_index(index, str(temporary))
        except RuntimeError as error:
            # Faiss's own words end in the system's: "… (No space left on device)".
            reason = re.search(r"\(([^()]*)\)\s*$", str(error))
            raise OSError(f"{path}: {reason[1] if reason else _line(error)}") from error


@contextlib.contextmanager
def recording(path: str | Path, record: Mapping[str, Any]) -> Iterator[Path]:
    """A temporary file that becomes the index at `path`, with its record beside it.

    The record goes first and keeps the old one until the index is in its place, so that whenever
    the process stops there is an index and a record that belong together.
    """
    record_path = files.record_path(path)
    with files.replacing(path) as temporary:
        yield temporary
        # Read back from the page cache: cheaper than a Python callback for every write of Faiss.
        whole = {
            **record,
            "checksum": files.checksum(temporary),
            "givens": givens.__version__,
            "faiss": faiss.__version__,
        }
        previous: list[dict[str, Any]] = []
        # A damaged record is no reason to keep it.
        with contextlib.suppress(ValueError):
            previous = _records(path)
        files.write_sealed(record_path, {**whole, "previous": previous})
    files.write_sealed(record_path, whole)


def load_index(path: str | Path, *, mapped: bool = False) -> Stored:
    """Read an index and its record. One whose bytes are not as recorded is refused.

    With `mapped`, inverted lists stay on the disk and are read where a search needs them.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no index {path}; make one with `givens build`")
    record = None
    if records := _records(path):
        checksum = files.checksum(path)
        record = next((one for one in records if one.get("checksum") == checksum), None)
        if record is None:
            raise ValueError(
                f"{path} is not as {files.record_path(path).name} says: it is damaged, or another "
                "program has changed it; if so, delete the record"
            )
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP if mapped else 0)
        if mapped and not _holds_lists(index, path):
            index = faiss.read_index(str(path))
        return Stored(index, record)
    except RuntimeError as error:
        # Faiss ends with what the system said last, of whatever it said it.
        reason = re.sub(r"\s*\([^()]*\)$", "", _line(error))
        raise ValueError(f"{path} is not a Faiss index, or is truncated: {reason}") from error


def _holds_lists(index: Any, path: str | Path) -> bool:
    """Whether what Faiss mapped is in the index's own file.

    Lists in a file beside it are on the disk anyway, and this flag leaves them without memory.
    """
    lists = faiss.downcast_InvertedLists(inverted(index).invlists) if inverted(index) else None
    return getattr(lists, "filename", "") in ("", str(path))


def _records(path: str | Path) -> list[dict[str, Any]]:
    """The records beside an index: one, or more where a writer was stopped between two renames."""
    beside = files.record_path(path)
    if not beside.exists():
        return []
    try:
        record = files.read_sealed(beside)
        previous = record.pop("previous", [])
        return [record, *(dict(one) for one in previous)]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{beside} is damaged, or an earlier version's: it is not the record of an index; "
            "build the index again, or delete the record to go on without it"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rpartition("Error: ")[2]
