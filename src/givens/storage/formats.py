"""Files of vectors, opened so that rows of them can be read: one class for each format."""

import mmap
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
# Tables that an error lists.
MOST_NAMED = 8
# Rows of an .fvecs file whose own dimension is looked at when it is opened.
SAMPLE = 1000
# Rows that are read at once for those wanted among them.
SLAB = 4096


class File(ABC):
    """What the formats have in common; each opens its file and reads rows of it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def __getitem__(self, rows: Any, /) -> Array:
        """Rows, as numpy gives them."""

    def __array__(self, dtype: npt.DTypeLike | None = None, *, copy: bool | None = None) -> Array:
        return np.asarray(self[: len(self)], dtype)


class Mapped(File):
    """A memory-mapped array whose slices are copies, so that its pages need not stay."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def __getitem__(self, rows: Any, /) -> Array:
        part = np.array(self.array[rows])
        drop_pages(self.array)
        return part


class Hdf5(File):
    """A table of an HDF5 file."""

    def __init__(self, path: Path, name: str | None, part: str | None) -> None:
        try:
            import h5py
        except ImportError as error:
            raise ImportError(f"{path} needs h5py: pip install 'givens[formats]'") from error
        try:
            file = h5py.File(path, "r")
        except OSError as error:
            raise ValueError(f"{path} is not an HDF5 file, or has lost its end") from error
        known = [key for key, table in file.items() if isinstance(table, h5py.Dataset)]
        self.table = file[_chosen(path, known, name, part)]
        self.shape = self.table.shape
        self.dtype = self.table.dtype

    def __getitem__(self, rows: Any, /) -> Array:
        if not isinstance(rows, slice):
            return gathered(self, rows)
        return np.asarray(self.table[rows])


class Safetensors(File):
    """A tensor of a safetensors file, bfloat16 too."""

    def __init__(self, path: Path, name: str | None, part: str | None) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file: Any = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file, or has lost its end") from error
        self.tensor = file.get_slice(_chosen(path, list(file.keys()), name, part))
        self.shape = tuple(self.tensor.get_shape())
        self.dtype = np.dtype("V1")
        if len(self.shape) == 2 and self.shape[0]:
            self.dtype = self[0:1].dtype

    def __getitem__(self, rows: Any, /) -> Array:
        if not isinstance(rows, slice):
            return gathered(self, rows)
        part: Tensor = self.tensor[rows]
        return (part.float() if part.dtype == torch.bfloat16 else part).numpy()


class Parquet(File):
    """A column of lists, all of one length, read by row groups."""

    def __init__(
        self, path: str | Path, name: str | None, part: str | None, source: Any = None
    ) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise ImportError(f"{path} needs pyarrow: pip install 'givens[formats]'") from error
        try:
            self.file = pq.ParquetFile(source or path)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path} is not a parquet file, or has lost its end") from error
        lists = [
            field.name
            for field in self.file.schema_arrow
            if pa.types.is_list(field.type)
            or pa.types.is_large_list(field.type)
            or pa.types.is_fixed_size_list(field.type)
        ]
        self.path, self.column = path, _chosen(path, lists, name, part)
        groups = self.file.metadata.num_row_groups
        sizes = [self.file.metadata.row_group(group).num_rows for group in range(groups)]
        self.ends = np.cumsum(sizes)
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

            column = self.file.read_row_group(group, columns=[self.column]).column(0)
            lengths = pc.min_max(pc.list_value_length(column)).as_py()
            width = lengths["min"]
            known = getattr(self, "shape", (0, width))[1]
            if column.null_count or width != lengths["max"] or width != known:
                raise ValueError(f"{self.path} must have lists of one length in {self.column!r}")
            numbers = column.combine_chunks().flatten()
            if numbers.null_count:
                raise ValueError(f"{self.path} has nulls among the numbers of {self.column!r}")
            flat = numbers.to_numpy(zero_copy_only=False)
            self.held = (group, flat.reshape(len(column), width))
        return self.held[1]


def places(rows: Any, count: int) -> Array:
    """The numbers of the rows that a slice, a mask or an array takes of so many."""
    if isinstance(rows, slice):
        return np.arange(*rows.indices(count))
    numbers: Array = np.asarray(rows)
    if numbers.dtype == bool:
        return np.flatnonzero(numbers)
    return np.where(numbers < 0, numbers + count, numbers)


def gathered(table: File, rows: Array) -> Array:
    """Rows of a table that can only be sliced, or is slow where it is not."""
    unique, inverse = np.unique(rows, return_inverse=True)
    parts = [table[0:0]]
    for wanted in np.split(unique, np.flatnonzero(np.diff(unique // SLAB)) + 1):
        if len(wanted):
            parts.append(table[int(wanted[0]) : int(wanted[-1]) + 1][wanted - wanted[0]])
    return np.concatenate(parts)[inverse]


def npy(path: Path) -> Array:
    """An array that numpy saved, mapped."""
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a whole .npy file of numbers") from error
    if not isinstance(array, np.memmap):
        raise ValueError(f"{path} is not a whole .npy file of numbers")
    return array


def vecs(path: Path) -> Array:
    """Rows of a little-endian int32 n, then n numbers."""
    dtype = np.dtype({".fvecs": "<f4", ".ivecs": "<i4", ".bvecs": "u1"}[path.suffix.lower()])
    size = path.stat().st_size
    with path.open("rb") as file:
        n = int.from_bytes(file.read(4), "little", signed=True)
    row = 4 + n * dtype.itemsize
    if n < 1 or size % row:
        raise ValueError(f"{path} is not a whole {path.suffix} file: {size} bytes, n = {n}")
    lead = 4 // dtype.itemsize
    table = np.memmap(path, dtype, "r", shape=(size // row, n + lead))
    for at in np.unique(np.linspace(0, len(table) - 1, SAMPLE).astype(int)):
        if np.array(table[at, :lead]).view("<i4")[0] != n:
            raise ValueError(f"{path} is not a {path.suffix} file: row {at} does not say n = {n}")
    return table[:, lead:]


def drop_pages(x: Any) -> None:
    """Let the system forget what was read of a mapped file, so that memory stays as it was."""
    mapped = getattr(x, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED") and not x.flags.writeable:
        mapped.madvise(mmap.MADV_DONTNEED)


def _chosen(path: str | Path, known: list[str], name: str | None, part: str | None) -> str:
    """The table asked for by name, else the usual one, else the only one."""
    if name is None:
        name = part if part in known else known[0] if len(known) == 1 else None
    if name in known:
        return name
    if not known:
        raise ValueError(f"{path} has no table of vectors")
    tables = ", ".join(map(repr, known[:MOST_NAMED]))
    tables += f" and {len(known) - MOST_NAMED} more" * (len(known) > MOST_NAMED)
    raise ValueError(f"{path} has the tables {tables}: name one, as in {path}:{known[0]}")
