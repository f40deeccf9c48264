"""Vectors behind an address of fsspec, as s3://bucket/base.fvecs: read in ranges, never copied.

The formats are those whose rows can be found without reading the rest: .npy, .fvecs, .bvecs,
.ivecs and .parquet.
"""

from typing import Any

import numpy as np

from givens.storage.formats import Array, File, Parquet, gathered
from givens.storage.vectors import SUFFIXES, Vectors

RANGED = (".npy", ".fvecs", ".bvecs", ".ivecs", ".parquet")


class Ranged(File):
    """Rows of one width in a file, which is asked for the bytes of a slice."""

    def __init__(self, file: Any, dtype: np.dtype[Any], shape: tuple[int, int], at: int) -> None:
        # Numbers before each row's own, as the n of .fvecs.
        self.file, self.dtype, self.at = file, dtype, at
        self.lead = 4 // dtype.itemsize if at == 0 else 0
        self.shape = shape

    def __getitem__(self, rows: Any, /) -> Array:
        if not isinstance(rows, slice):
            return gathered(self, rows)
        first, stop, _ = rows.indices(len(self))
        width = self.lead + self.shape[1]
        self.file.seek(self.at + first * width * self.dtype.itemsize)
        count = max(stop - first, 0) * width
        raw = self.file.read(count * self.dtype.itemsize)
        return np.frombuffer(raw, self.dtype, count).reshape(-1, width)[:, self.lead :]


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
    try:
        return _npy(file, size) if suffix == ".npy" else _vecs(file, size, suffix)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{plain} is not a whole {suffix} file of numbers") from error


def listed(address: str) -> list[str]:
    """The files of vectors in a folder, by name; a file is its own list."""
    system, path = _system(_split(address)[0])
    if _suffix(_split(address)[0]) in SUFFIXES or not system.isdir(path):
        return [address]
    inside = [name for name in sorted(system.ls(path, detail=False)) if _suffix(name) in RANGED]
    if not inside:
        raise ValueError(f"{address} has no files that end in one of {', '.join(RANGED)}")
    return [system.unstrip_protocol(name) for name in inside]


def stamp(address: str) -> str:
    """What changes when the file does."""
    system, path = _system(_split(address)[0])
    # A store's listing may be cached from before.
    system.invalidate_cache()
    return str(system.ukey(path))


def _npy(file: Any, size: int) -> Vectors:
    version = np.lib.format.read_magic(file)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
    shape, columns_first, dtype = (header or np.lib.format.read_array_header_2_0)(file)
    at = file.tell()
    if columns_first or len(shape) != 2 or at + dtype.itemsize * shape[0] * shape[1] > size:
        raise ValueError(f"shape {shape} in {size} bytes")
    return Ranged(file, dtype, (shape[0], shape[1]), at)


def _vecs(file: Any, size: int, suffix: str) -> Vectors:
    dtype = np.dtype({".fvecs": "<f4", ".ivecs": "<i4", ".bvecs": "u1"}[suffix])
    n = int.from_bytes(file.read(4), "little", signed=True)
    row = 4 + n * dtype.itemsize
    if n < 1 or size % row:
        raise ValueError(f"{size} bytes, n = {n}")
    return Ranged(file, dtype, (size // row, n), 0)


def _system(address: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise ImportError(f"{address} needs fsspec: pip install 'givens[fsspec]'") from error
    return fsspec.core.url_to_fs(address)  # type: ignore[no-any-return]


def _split(address: str) -> tuple[str, str | None]:
    """An address, and the name of a table behind its last colon."""
    file, _, name = address.rpartition(":")
    return (file, name) if _suffix(file) in SUFFIXES and "/" not in name else (address, None)


def _suffix(path: str) -> str:
    return "." + path.rpartition("/")[2].lower().rpartition(".")[2]
