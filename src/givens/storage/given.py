"""Convert vectors in any accepted form to something with a shape and slices."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, stack

from givens.storage.vectors import read

TAKEN = (
    "a tensor, an array, lists of numbers, an Arrow column of lists, a column or a frame of pandas "
    "or polars, or the path of a file of vectors"
)


def as_vectors(x: Any, name: str = "x") -> Any:
    """Convert vectors (N, n) in any accepted form; arrays and tensors are returned as they are.

    Args:
        x: the vectors.
        name: the argument's name, for errors.
    """
    if isinstance(x, Tensor):
        return x
    if isinstance(x, str | os.PathLike):
        return read(x if isinstance(x, str) else Path(x), "train")
    package = type(x).__module__.partition(".")[0]
    if isinstance(x, list | tuple):
        x = _stack(x, name)
    elif package == "pyarrow":
        x = _from_arrow(x, name)
    elif package in ("pandas", "polars"):
        x = _from_frame(x, name)
    sliced = all(hasattr(x, part) for part in ("shape", "dtype", "__getitem__", "__len__"))
    # A sparse matrix has all of these, but no rows that can be sliced.
    if not sliced or package == "scipy":
        what = type(x).__name__ if package == "builtins" else f"{package}'s {type(x).__name__}"
        raise TypeError(f"{name} must be {TAKEN}, but got {what}")
    if getattr(x.dtype, "kind", "f") not in "fiubV":
        raise TypeError(f"{name} must hold real numbers, but got {x.dtype}")
    return x


def _stack(rows: Any, name: str) -> Any:
    """Stack rows of equal length into an array or a tensor."""
    rows = list(rows)
    if rows and all(isinstance(row, Tensor) for row in rows):
        if len({row.shape for row in rows}) == 1:
            return stack(rows)
        rows = [row.tolist() for row in rows]
    lengths = [len(row) if hasattr(row, "__len__") and not _is_text(row) else None for row in rows]
    for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row is None or length != lengths[0]:
            got = "null" if row is None else f"{length} numbers"
            raise ValueError(
                f"{name} must have vectors of one length, but row 0 has {lengths[0]} numbers and "
                f"row {at} has {got}"
            )
    try:
        return np.asarray(rows)
    except ValueError as error:
        raise TypeError(f"{name} must be {TAKEN}, but got lists of something else") from error


def _is_text(row: Any) -> bool:
    return isinstance(row, str | bytes)


def _from_arrow(x: Any, name: str) -> Any:
    """Convert an Arrow column of lists of equal length without nulls, or a table's only column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(x, pa.Table | pa.RecordBatch):
        x = x.column(_only([field.name for field in x.schema if _is_list(field.type)], x, name))
    if isinstance(x, pa.ChunkedArray):
        x = x.combine_chunks()
    if isinstance(x, pa.ExtensionArray):
        x = x.storage
    if not isinstance(x, pa.Array) or not _is_list(x.type):
        what = f"{type(x).__name__} of {x.type}" if isinstance(x, pa.Array) else type(x).__name__
        raise TypeError(f"{name} must be {TAKEN}, but got a pyarrow {what}")
    lengths = pc.unique(pc.list_value_length(x)).to_pylist()
    if x.null_count or len(lengths) > 1:
        raise ValueError(
            f"{name} must have vectors of one length without nulls, but got {x.null_count} nulls "
            f"and the lengths {sorted(length for length in lengths if length is not None)[:8]}"
        )
    numbers = x.flatten()
    if numbers.null_count:
        raise ValueError(f"{name} must have numbers without nulls, but got {numbers.null_count}")
    flat = numbers.to_numpy(zero_copy_only=False)
    return flat.reshape(len(x), lengths[0] if lengths else 0)


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    kind = getattr(kind, "storage_type", kind)
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _from_frame(x: Any, name: str) -> Any:
    """Convert a frame of numbers, a frame with one column of vectors, or such a column."""
    if hasattr(x, "columns"):
        columns = list(x.columns)
        if len(columns) > 1:
            values = x.to_numpy()
            if values.dtype == object and hasattr(x, "iloc"):
                # Types of pandas that know nulls become numbers column by column.
                parts = [x.iloc[:, at].to_numpy() for at in range(len(columns))]
                values = np.column_stack(parts)
            return values
        x = x[_only(columns, x, name)]
    if not hasattr(x, "to_list"):
        raise TypeError(f"{name} must be {TAKEN}, but got {type(x).__name__}")
    values = x.to_numpy()
    nested = values.dtype == object or hasattr(getattr(x, "dtype", None), "inner")
    if nested:
        return values if values.ndim == 2 and values.dtype != object else _stack(x.to_list(), name)
    # A column of numbers is vectors of one dimension.
    return values[:, None]


def _only(columns: list[Any], x: Any, name: str) -> Any:
    if len(columns) != 1:
        raise TypeError(
            f"{name} must have one column of vectors, but {type(x).__name__} has {columns[:8]}: "
            "give one of them"
        )
    return columns[0]
