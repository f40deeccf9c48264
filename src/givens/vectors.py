"""Vectors in files of any size: opened at once, read a slice at a time.

`read` gives something with a shape and a dtype whose slices are arrays, for .npy, .fvecs, .bvecs,
.ivecs, .hdf5 (the layout of ann-benchmarks), .parquet and .safetensors. A file with several tables
takes the name of one after a colon: `glove.hdf5:test`. A folder is its files, one after another; an
address such as `s3://bucket/base.parquet` is read where it is (`givens.remote`).
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
# Tables that an error lists.
MOST_NAMED = 8
SUFFIXES = (".npy", ".fvecs", ".bvecs", ".ivecs", ".hdf5", ".h5", ".parquet", ".safetensors")
# Rows of an .fvecs file whose own dimension is looked at when it is opened.
SAMPLE = 1000
# Rows that are read at once for those wanted among them.
SLAB = 4096


class Vectors(Protocol):
    """N vectors of n numbers: an array, or a file that is read where it is sliced."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, n)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """What the numbers are."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Array: ...


def read(path: str | Path, part: str | None = None) -> Vectors:
    """Open a file of vectors, or a folder of them.

    Args:
        path: the file, with `:name` behind it for one of several tables.
        part: the table to take where the path names none and there are several.
    """
    found = listed(path)
    if found != [os.fspath(path)]:
        return join(found, part)
    if is_remote(path):
        from givens import remote

        return _checked(path, remote.read(os.fspath(path), part))
    file, name = split(path)
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{file} must end in one of {', '.join(SUFFIXES)}{_converted(file)}")
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}; looked in {file.absolute().parent}")
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty")
    if name and suffix in (".npy", ".fvecs", ".bvecs", ".ivecs"):
        raise ValueError(f"{file} holds one table, without a name: leave :{name} out")
    match suffix:
        case ".npy":
            vectors: Vectors = Mapped(_npy(file))
        case ".fvecs" | ".bvecs" | ".ivecs":
            vectors = Mapped(_vecs(file))
        case ".parquet":
            vectors = Parquet(file, name, part)
        case ".safetensors":
            vectors = Safetensors(file, name, part)
        case _:
            vectors = Hdf5(file, name, part)
    return _checked(path, vectors)


def join(paths: Sequence[str], part: str | None = None) -> Vectors:
    """The vectors of several files, one after another."""
    parts = [read(path, part) for path in paths]
    for path, one in zip(paths, parts, strict=True):
        if one.shape[1] != parts[0].shape[1]:
            raise ValueError(
                f"{path} must have vectors of {parts[0].shape[1]} dimensions as {paths[0]} has, "
                f"but has {one.shape[1]}"
            )
    return parts[0] if len(parts) == 1 else Joined(parts)


def listed(path: str | Path) -> list[str]:
    """The files of vectors in a folder, by name; a file is its own list."""
    if is_remote(path):
        from givens import remote

        return remote.listed(os.fspath(path))
    folder = Path(path)
    if not folder.is_dir():
        return [os.fspath(path)]
    found = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
    if not found:
        raise ValueError(f"{path} has no files that end in one of {', '.join(SUFFIXES)}")
    return list(map(os.fspath, found))


def stamp(path: str) -> str:
    """What changes when a file does: its size and time, or what its store says of it."""
    if is_remote(path):
        from givens import remote

        return remote.stamp(path)
    about = split(path)[0].stat()
    return f"{about.st_size}:{about.st_mtime_ns}"


def is_remote(path: str | Path) -> bool:
    """Whether it is an address, as s3://bucket/base.npy."""
    return isinstance(path, str) and "://" in path


def _checked(path: str | Path, vectors: Vectors) -> Vectors:
    if len(vectors.shape) != 2 or 0 in vectors.shape or vectors.dtype.kind not in "fiu":
        raise ValueError(
            f"{path} must hold vectors of shape (N, n), but holds {vectors.dtype} "
            f"of shape {tuple(vectors.shape)}"
        )
    return vectors


def chunks(x: Any, rows: int, device: torch.device | str = "cpu") -> Iterator[Tensor]:
    """Slices of a tensor, an array or a file in float32 on the device, one after another."""
    rows = max(rows, 1)
    for first in range(0, len(x), rows):
        yield as_float(x[first : first + rows], device)
        drop_pages(x)


def rows_of(x: Any, index: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """The rows of that index in float32, read in the order of the file."""
    index = index.sort().values
    return as_float(x[index.to(x.device) if isinstance(x, Tensor) else index.numpy()], device)


def as_float(part: Any, device: torch.device | str = "cpu") -> Tensor:
    """An array or a tensor as a float32 tensor on the device."""
    if not isinstance(part, Tensor):
        part = np.ascontiguousarray(part, dtype=np.float32)
        # A tensor cannot share what may not be written: a file mapped for reading.
        part = torch.from_numpy(part if part.flags.writeable else part.copy())
    tensor: Tensor = part.detach().to(device, torch.float32)
    return tensor


def drop_pages(x: Any) -> None:
    """Let the system forget what was read of a mapped file, so that memory stays as it was."""
    mapped = getattr(x, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED") and not x.flags.writeable:
        mapped.madvise(mmap.MADV_DONTNEED)


class File:
    """What the formats have in common; each opens its file and reads rows of it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any, /) -> Array:
        raise NotImplementedError

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


class Joined(File):
    """Vectors of several files, one after another."""

    def __init__(self, parts: Sequence[Vectors]) -> None:
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])
        self.shape = (int(self.ends[-1]), parts[0].shape[1])
        self.dtype = np.result_type(*{part.dtype for part in parts})

    def __getitem__(self, rows: Any, /) -> Array:
        rows = places(rows, len(self))
        out = np.empty((len(rows), self.shape[1]), self.dtype)
        owners = np.searchsorted(self.ends, rows, side="right")
        for owner in np.unique(owners):
            here = np.flatnonzero(owners == owner)
            part = self.parts[owner]
            inside = rows[here] - (self.ends[owner] - len(part))
            run = slice(int(inside[0]), int(inside[-1]) + 1)
            whole = run.stop - run.start == len(inside) and (np.diff(inside) == 1).all()
            # A run is read at once, where single rows might be gathered.
            out[here] = part[run] if whole else part[inside]
        return out


class Range(File):
    """The rows from `first` to `stop` of vectors."""

    def __init__(self, vectors: Vectors, first: int, stop: int) -> None:
        self.vectors, self.first = vectors, first
        self.shape = (stop - first, vectors.shape[1])
        self.dtype = vectors.dtype

    def __getitem__(self, rows: Any, /) -> Array:
        if isinstance(rows, slice) and rows.step in (None, 1):
            start, stop, _ = rows.indices(len(self))
            return self.vectors[self.first + start : self.first + max(start, stop)]
        return self.vectors[self.first + places(rows, len(self))]


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


def split(path: str | Path) -> tuple[Path, str | None]:
    """A file, and the name behind its colon."""
    text = os.fspath(path)
    file, colon, name = text.rpartition(":")
    if colon and name and not Path(text).exists() and Path(file).suffix.lower() in SUFFIXES:
        return Path(file), name
    return Path(text), None


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


def _converted(file: Path) -> str:
    """What to do with a table of text."""
    delimiter = {".csv": ", delimiter=','", ".tsv": "", ".txt": ""}.get(file.suffix.lower())
    if delimiter is None:
        return ""
    made = f"numpy.save('{file.stem}.npy', numpy.loadtxt('{file}', 'float32'{delimiter}))"
    return f"; of a table of text, make one in Python with {made}"


def _npy(path: Path) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is not a whole .npy file of numbers") from error
    if not isinstance(array, np.memmap):
        raise ValueError(f"{path} is not a whole .npy file of numbers")
    return array


def _vecs(path: Path) -> Array:
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
