"""File formats of vectors: one class for each, which opens a file and reads rows."""

import contextlib
import math
import mmap
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
# The most tables that an error lists.
MOST_NAMED = 8
# Rows of an .fvecs file whose dimension is checked when it is opened.
SAMPLE = 1000
# Rows that are read at once to gather some of them.
SLAB = 4096
# A limit on dimensions, beyond any real file.
MOST_AXES = 8
# The type names of safetensors, and the numpy types that they are read as.
NUMBERS = {
    **{f"{kind}{8 * size}": f"{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)},
    **{"F16": "f2", "F32": "f4", "F64": "f8", "BF16": "f4"},
}


class File(ABC):
    """The base class of the formats."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, rows: Any, /) -> Array:
        """Rows, indexed as in numpy."""

    def __array__(self, dtype: npt.DTypeLike | None = None, *, copy: bool | None = None) -> Array:
        return np.asarray(self[: len(self)], dtype)


class Mapped(File):
    """A memory-mapped array whose slices are copies, so that its pages can be dropped."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def __getitem__(self, rows: Any, /) -> Array:
        part = np.array(self.array[rows])
        drop_pages(self.array)
        return part


class Vecs(File):
    """Each row is a little-endian int32 n, which is checked when it is read, then n numbers."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            self.dtype, self.shape = vecs_form(path, file.read(4), size)
        self.path, self.lead = path, 4 // self.dtype.itemsize
        count, n = self.shape
        self.table = np.memmap(path, self.dtype, "r", shape=(count, self.lead + n))
        # Check some rows at once, to fail early.
        check_dims(path, self.table, np.linspace(0, count - 1, SAMPLE).astype(int), self.shape)

    def __getitem__(self, rows: Any, /) -> Array:
        check_dims(self.path, self.table, rows, self.shape)
        part = np.array(self.table[rows][..., self.lead :])
        drop_pages(self.table)
        return part


class Hdf5(File):
    """A table of an HDF5 file, with all its numbers in that file."""

    def __init__(self, path: Path, name: str | None, part: str | None) -> None:
        try:
            import h5py
        except ImportError as error:
            raise ImportError(f"{path} needs h5py: pip install 'givens[formats]'") from error
        self.path = path
        with reading(path, "is not an HDF5 file, or is truncated"):
            file = h5py.File(path, "r")
            # Not followed: a link may lead to any other file.
            kinds = {key: file.get(key, getlink=True) for key in file}
            links = [key for key, kind in kinds.items() if not isinstance(kind, h5py.HardLink)]
            known = [
                key
                for key in kinds
                if key not in links and file.get(key, getclass=True) is h5py.Dataset
            ]
        if (name or part) in links or (links and not known):
            raise ValueError(f"{path} must hold its tables itself, but {links[0]} is a link")
        chosen = _choose(path, known, name, part)
        with reading(path):
            self.table = file[chosen]
            self.dtype, self.shape = self.table.dtype, self.table.shape or ()
            elsewhere = self.table.is_virtual or self.table.external
            written = elsewhere or not self.shape or _is_written(self.table)
        if elsewhere:
            raise ValueError(f"{path} must hold the numbers of {chosen} itself, not in other files")
        if not written:
            raise ValueError(f"{path} is incomplete: parts of {chosen} were never written")

    def __getitem__(self, rows: Any, /) -> Array:
        if not isinstance(rows, slice):
            return read_rows(self, rows)
        with reading(self.path):
            return np.asarray(self.table[rows])


class Safetensors(File):
    """A tensor of a safetensors file, also bfloat16."""

    def __init__(self, path: Path, name: str | None, part: str | None) -> None:
        from safetensors import safe_open

        with reading(path, "is not a safetensors file, or is truncated"):
            file: Any = safe_open(path, framework="pt")
        self.tensor = file.get_slice(_choose(path, list(file.keys()), name, part))
        self.shape = tuple(self.tensor.get_shape())
        dtype = self.tensor.get_dtype()
        if dtype not in NUMBERS:
            raise ValueError(
                f"{path} must hold numbers of a type that numpy has, or bfloat16, but has {dtype}"
            )
        self.dtype = np.dtype(NUMBERS[dtype])

    def __getitem__(self, rows: Any, /) -> Array:
        if not isinstance(rows, slice):
            return read_rows(self, rows)
        part: Tensor = self.tensor[rows]
        return (part.float() if part.dtype == torch.bfloat16 else part).numpy()


class Parquet(File):
    """A column of lists of equal length, read by row groups."""

    def __init__(
        self, path: str | Path, name: str | None, part: str | None, source: Any = None
    ) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise ImportError(f"{path} needs pyarrow: pip install 'givens[formats]'") from error
        with reading(path, "is not a parquet file, or is truncated"):
            # Verify checksums, if the writer left any.
            self.file = pq.ParquetFile(source or path, page_checksum_verification=True)
            lists = [
                field.name
                for field in self.file.schema_arrow
                if pa.types.is_list(field.type)
                or pa.types.is_large_list(field.type)
                or pa.types.is_fixed_size_list(field.type)
            ]
            groups = self.file.metadata.num_row_groups
            sizes = [self.file.metadata.row_group(group).num_rows for group in range(groups)]
        self.path, self.column = path, _choose(path, lists, name, part)
        if min(sizes, default=0) < 0 or sum(sizes) != self.file.metadata.num_rows:
            raise ValueError(f"{path} is damaged: its groups have not as many rows as it says")
        self.sizes, self.ends = sizes, np.cumsum(sizes)
        self.held: tuple[int, Array] = (-1, np.empty((0, 0)))
        filled = np.flatnonzero(sizes)
        if not len(filled):
            raise ValueError(f"{path} is empty")
        first = self._group(int(filled[0]))
        self.shape = (int(self.ends[-1]), first.shape[1])
        self.dtype = first.dtype

    def __getitem__(self, rows: Any, /) -> Array:
        rows = places(rows, len(self))
        out = np.empty((len(rows), self.shape[1]), self.dtype)
        groups = np.searchsorted(self.ends, rows, side="right")
        for group in np.unique(groups):
            here = groups == group
            values = self._group(int(group))
            out[here] = values[rows[here] - (self.ends[group] - len(values))]
        return out

    def _group(self, group: int) -> Array:
        if self.held[0] != group:
            import pyarrow.compute as pc

            with reading(self.path):
                column = self.file.read_row_group(group, columns=[self.column]).column(0)
                lengths = pc.min_max(pc.list_value_length(column)).as_py()
                numbers = column.combine_chunks().flatten()
                flat = numbers.to_numpy(zero_copy_only=False)
            width, count = lengths["min"], self.sizes[group]
            known = getattr(self, "shape", (0, width))[1]
            if column.null_count or width != lengths["max"] or width != known:
                raise ValueError(f"{self.path} must have lists of one length in {self.column!r}")
            if numbers.null_count:
                raise ValueError(f"{self.path} has nulls among the numbers of {self.column!r}")
            if len(flat) != count * width:
                raise ValueError(f"{self.path} is damaged: group {group} has not {count} rows")
            self.held = (group, flat.reshape(count, width))
        return self.held[1]


def places(rows: Any, count: int) -> Array:
    """The row numbers that a slice, a mask or an array selects from `count` rows."""
    if isinstance(rows, slice):
        return np.arange(*rows.indices(count))
    numbers: Array = np.asarray(rows)
    if numbers.dtype == bool:
        return np.flatnonzero(numbers)
    return np.where(numbers < 0, numbers + count, numbers)


def read_rows(table: File, rows: Array) -> Array:
    """Gather rows of a table that only supports slices, or is slow otherwise."""
    unique, inverse = np.unique(rows, return_inverse=True)
    parts = [table[0:0]]
    for wanted in np.split(unique, np.flatnonzero(np.diff(unique // SLAB)) + 1):
        if len(wanted):
            parts.append(table[int(wanted[0]) : int(wanted[-1]) + 1][wanted - wanted[0]])
    return np.concatenate(parts)[inverse]


def npy(path: Path) -> Array:
    """Memory-map a .npy file."""
    with path.open("rb") as file:
        dtype, shape, by_columns = npy_form(path, file, path.stat().st_size)
        at = file.tell()
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", at, shape, "F" if by_columns else "C")


def npy_form(path: str | Path, file: Any, size: int) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Type, shape and order of a .npy file; raises if the size of the file does not match."""
    with reading(path, "is not a complete .npy file of numbers"), warnings.catch_warnings():
        # numpy's warnings about headers by Python 2, and about damaged ones.
        warnings.simplefilter("ignore")
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
        shape, by_columns, dtype = (header or np.lib.format.read_array_header_2_0)(file)
    counts = len(shape) <= MOST_AXES and all(type(n) is int and 0 <= n <= size for n in shape)
    room = math.prod(shape) * dtype.itemsize if counts else size
    if dtype.hasobject or not dtype.itemsize or file.tell() + room > size:
        raise ValueError(f"{path} is not a complete .npy file of numbers")
    return dtype, shape, by_columns


def vecs_form(path: str | Path, head: bytes, size: int) -> tuple[np.dtype[Any], tuple[int, int]]:
    """Type and shape of an .fvecs, .bvecs or .ivecs file, from its size and first four bytes."""
    suffix = "." + str(path).lower().rpartition(".")[2]
    dtype = np.dtype({".fvecs": "<f4", ".ivecs": "<i4", ".bvecs": "u1"}[suffix])
    n = int.from_bytes(head, "little", signed=True)
    row = 4 + n * dtype.itemsize
    if n < 1 or size % row:
        raise ValueError(f"{path} is not a complete {suffix} file: {size} bytes, n = {n}")
    return dtype, (size // row, n)


def check_dims(
    path: str | Path, table: Array, rows: Any, shape: tuple[int, ...], first: int = 0
) -> None:
    """Raise unless all rows of an .fvecs file have the same n; `first` is the table's first row."""
    lead, n = 4 // table.dtype.itemsize, shape[1]
    wrong = np.ascontiguousarray(table[rows][..., :lead]).view("<i4")[..., 0] != n
    if wrong.any():
        row = first + int(np.atleast_1d(places(rows, len(table)))[np.atleast_1d(wrong)][0])
        raise ValueError(f"{path} is damaged: row {row} does not say n = {n} as the first does")


def drop_pages(x: Any) -> None:
    """Drop the pages of a mapped file that were read, so that memory use does not grow."""
    mapped = getattr(x, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED") and not x.flags.writeable:
        mapped.madvise(mmap.MADV_DONTNEED)


def _is_written(table: Any) -> bool:
    """Whether all of an HDF5 table was written; missing chunks would be read as zeros."""
    if table.chunks is None:
        return bool(table.id.get_storage_size() >= table.nbytes)
    grid = zip(table.shape, table.chunks, strict=True)
    return bool(table.id.get_num_chunks() == math.prod(-(-n // chunk) for n, chunk in grid))


@contextlib.contextmanager
def reading(path: str | Path, damage: str = "is damaged") -> Iterator[None]:
    """Turn any exception of a file-format library into a ValueError that names the file."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reason = f": {' '.join(str(error).split())}" if damage == "is damaged" else ""
        raise ValueError(f"{path} {damage}{reason}") from error


def _choose(path: str | Path, known: list[str], name: str | None, part: str | None) -> str:
    """Choose the named table, else the usual one, else the only one."""
    if name is None:
        name = part if part in known else known[0] if len(known) == 1 else None
    if name in known:
        return name
    if not known:
        raise ValueError(f"{path} has no table of vectors")
    tables = ", ".join(map(repr, known[:MOST_NAMED]))
    tables += f" and {len(known) - MOST_NAMED} more" * (len(known) > MOST_NAMED)
    raise ValueError(f"{path} has the tables {tables}: name one, as in {path}:{known[0]}")
