"""Files of vectors of any size: opened without reading, read a slice at a time.

`read` returns an object with a shape and a dtype whose slices are arrays, for .npy, .fvecs, .bvecs,
.ivecs, .hdf5 (the layout of ann-benchmarks), .parquet, .safetensors and word vectors as text (.txt,
.vec, .glove, also with .gz; not in a folder or at an address). If a file has several tables, one is
named after a colon: `glove.hdf5:test`. The files of a folder are concatenated. An address such as
`s3://bucket/base.parquet` is read in ranges (`givens.storage.remote`).
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from givens.storage import text
from givens.storage.formats import (
    Array,
    File,
    Hdf5,
    Mapped,
    Parquet,
    Safetensors,
    Vecs,
    drop_pages,
    npy,
    places,
)

SUFFIXES = (".npy", ".fvecs", ".bvecs", ".ivecs", ".hdf5", ".h5", ".parquet", ".safetensors")


class Vectors(Protocol):
    """N vectors of n numbers: an array, or a file whose slices are read on demand."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, n)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Array: ...


def read(path: str | Path, part: str | None = None) -> Vectors:
    """Open a file of vectors, or a folder of them.

    Args:
        path: the file, followed by `:name` for one of several tables.
        part: the table to use if there are several and the path names none.
    """
    found = list_files(path)
    if found != [os.fspath(path)]:
        return join(found, part)
    if is_remote(path):
        from givens.storage import remote

        return _check_shape(path, remote.read(os.fspath(path), part))
    file, name = split(path)
    suffix = file.suffix.lower()
    if not is_vectors(file):
        known = ", ".join((*SUFFIXES, *text.SUFFIXES))
        raise ValueError(f"{file} must end in one of {known}{_advise(file)}")
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}; looked in {file.absolute().parent}")
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty")
    if name and (suffix in (".npy", ".fvecs", ".bvecs", ".ivecs") or text.is_text(file)):
        raise ValueError(f"{file} holds one table, without a name: leave :{name} out")
    match suffix:
        case ".npy":
            vectors: Vectors = Mapped(npy(file))
        case ".fvecs" | ".bvecs" | ".ivecs":
            vectors = Vecs(file)
        case ".parquet":
            vectors = Parquet(file, name, part)
        case ".safetensors":
            vectors = Safetensors(file, name, part)
        case ".hdf5" | ".h5":
            vectors = Hdf5(file, name, part)
        case _:
            vectors = text.Text(file)
    return _check_shape(path, vectors)


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


def list_files(path: str | Path) -> list[str]:
    """The files of vectors in a folder, sorted by name; a single file is a list of itself."""
    if path == "":
        raise ValueError("the path of vectors must not be empty; the folder here is .")
    if is_remote(path):
        from givens.storage import remote

        return remote.list_files(os.fspath(path))
    folder = Path(path)
    if not folder.is_dir():
        return [os.fspath(path)]
    found = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
    if not found:
        raise ValueError(f"{path} has no files that end in one of {', '.join(SUFFIXES)}")
    return list(map(os.fspath, found))


def stamp(path: str) -> str:
    """The state of a file, which changes whenever it does: size and time, or its store's own."""
    if is_remote(path):
        from givens.storage import remote

        return remote.stamp(path)
    about = split(path)[0].stat()
    return f"{about.st_size}:{about.st_mtime_ns}"


def is_vectors(file: Path) -> bool:
    """Whether a path has the suffix of a file of vectors."""
    return file.suffix.lower() in SUFFIXES or text.is_text(file)


def names_of(vectors: Any) -> list[str] | None:
    """The names of vectors from text; None if any have no names."""
    if not isinstance(vectors, Joined):
        found: list[str] | None = getattr(vectors, "names", None)
        return found
    parts = [names_of(part) for part in vectors.parts]
    known = [part for part in parts if part is not None]
    return [name for part in known for name in part] if len(known) == len(parts) else None


def is_remote(path: str | Path) -> bool:
    """Whether it is an address such as s3://bucket/base.npy."""
    return isinstance(path, str) and "://" in path


def _check_shape(path: str | Path, vectors: Vectors) -> Vectors:
    if len(vectors.shape) != 2 or 0 in vectors.shape or vectors.dtype.kind not in "fiu":
        raise ValueError(
            f"{path} must hold vectors of shape (N, n), but holds {vectors.dtype} "
            f"of shape {tuple(vectors.shape)}"
        )
    return vectors


def chunks(x: Any, rows: int, device: torch.device | str = "cpu") -> Iterator[Tensor]:
    """Iterate over slices of a tensor, an array or a file, in float32 on the device."""
    rows = max(rows, 1)
    for first in range(0, len(x), rows):
        yield as_float(x[first : first + rows], device)
        drop_pages(x)


def rows_of(x: Any, index: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """The rows of an index in float32, read in file order."""
    index = index.sort().values
    return as_float(x[index.to(x.device) if isinstance(x, Tensor) else index.numpy()], device)


def as_float(part: Any, device: torch.device | str = "cpu") -> Tensor:
    """An array or a tensor as a float32 tensor on the device."""
    if not isinstance(part, Tensor):
        # Numbers too large for float32 become infinite, which raises later, with the row.
        with np.errstate(over="ignore"):
            part = np.ascontiguousarray(part, dtype=np.float32)
        # A tensor cannot share read-only memory, such as a file mapped for reading.
        part = torch.from_numpy(part if part.flags.writeable else part.copy())
    tensor: Tensor = part.detach().to(device, torch.float32)
    return tensor


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
            # Consecutive rows are read at once.
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


def split(path: str | Path) -> tuple[Path, str | None]:
    """Split a path and the table's name behind its colon."""
    whole = os.fspath(path)
    file, colon, name = whole.rpartition(":")
    if colon and name and not Path(whole).exists() and is_vectors(Path(file)):
        return Path(file), name
    return Path(whole), None


def _advise(file: Path) -> str:
    """Advice for a table of text."""
    delimiter = {".csv": ", delimiter=','", ".tsv": ""}.get(file.suffix.lower())
    if delimiter is None:
        return ""
    made = f"numpy.save('{file.stem}.npy', numpy.loadtxt('{file}', 'float32'{delimiter}))"
    return f"; of a table of text, make one in Python with {made}"
