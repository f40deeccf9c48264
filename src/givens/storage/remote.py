"""Vectors at an fsspec address such as s3://bucket/base.fvecs, read in ranges.

Supported are formats whose rows can be read without the rest: .npy, .fvecs, .bvecs, .ivecs and
.parquet.
"""

from typing import Any

import numpy as np

from givens.storage.formats import (
    Array,
    File,
    Parquet,
    check_dims,
    npy_form,
    places,
    read_rows,
    vecs_form,
)
from givens.storage.vectors import SUFFIXES, Vectors

RANGED = (".npy", ".fvecs", ".bvecs", ".ivecs", ".parquet")


class Ranged(File):
    """Rows of fixed width; a slice reads its range of bytes."""

    def __init__(
        self, plain: str, file: Any, dtype: np.dtype[Any], shape: tuple[int, int], at: int
    ) -> None:
        self.plain, self.file, self.dtype, self.at = plain, file, dtype, at
        # Numbers in front of each row, as the n of .fvecs.
        self.lead = 4 // dtype.itemsize if at == 0 else 0
        self.shape = shape

    def __getitem__(self, rows: Any, /) -> Array:
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            return read_rows(self, places(rows, len(self)))
        first, stop, _ = rows.indices(len(self))
        count, width = max(stop - first, 0), self.lead + self.shape[1]
        self.file.seek(self.at + first * width * self.dtype.itemsize)
        raw = self.file.read(count * width * self.dtype.itemsize)
        if len(raw) != count * width * self.dtype.itemsize:
            raise ValueError(f"{self.plain} has been truncated since it was opened")
        table = np.frombuffer(raw, self.dtype).reshape(count, width)
        if self.lead:
            check_dims(self.plain, table, slice(None), self.shape, first)
        return table[:, self.lead :]


def read(address: str, part: str | None = None) -> Vectors:
    """Open a file of vectors at an address."""
    plain, name = _split(address)
    suffix = _suffix(plain)
    if suffix not in RANGED:
        raise ValueError(f"{plain} must end in one of {', '.join(RANGED)}")
    system, path = _system(plain)
    if not system.exists(path):
        raise FileNotFoundError(f"there is no file {plain}")
    file, size = system.open(path, "rb"), system.size(path)
    if suffix == ".parquet":
        return Parquet(plain, name, part, file)
    if suffix != ".npy":
        return Ranged(plain, file, *vecs_form(plain, file.read(4), size), 0)
    dtype, shape, by_columns = npy_form(plain, file, size)
    if by_columns or len(shape) != 2:
        order = " by columns" * by_columns
        raise ValueError(f"{plain} must be a table, row by row, but has shape {shape}{order}")
    return Ranged(plain, file, dtype, (shape[0], shape[1]), file.tell())


def list_files(address: str) -> list[str]:
    """The files of vectors in a folder, by name; a file is its own list."""
    system, path = _system(_split(address)[0])
    if _suffix(_split(address)[0]) in SUFFIXES or not system.isdir(path):
        return [address]
    inside = [name for name in sorted(system.ls(path, detail=False)) if _suffix(name) in RANGED]
    if not inside:
        raise ValueError(f"{address} has no files that end in one of {', '.join(RANGED)}")
    return [system.unstrip_protocol(name) for name in inside]


def stamp(address: str) -> str:
    """The state of a file, which changes whenever the file does."""
    system, path = _system(_split(address)[0])
    # The listing of a store may be cached.
    system.invalidate_cache()
    return str(system.ukey(path))


def _system(address: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise ImportError(f"{address} needs fsspec: pip install 'givens[fsspec]'") from error
    return fsspec.core.url_to_fs(address)  # type: ignore[no-any-return]


def _split(address: str) -> tuple[str, str | None]:
    """Split an address and the table's name behind its last colon."""
    file, _, name = address.rpartition(":")
    return (file, name) if _suffix(file) in SUFFIXES and "/" not in name else (address, None)


def _suffix(path: str) -> str:
    return "." + path.rpartition("/")[2].lower().rpartition(".")[2]
