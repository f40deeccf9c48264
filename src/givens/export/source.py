"""The vectors that an index is made of: checked, named, in slices.

Without any other program's package, which is for the files beside this one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from givens.checks import check_lengths, check_table
from givens.quantizer import Metric
from givens.storage.given import as_vectors
from givens.storage.vectors import chunks

# Codewords that fill up a table: the square times any width is still a float32, and no vector that
# is taken is nearer to one than to a codeword.
FAR = 1e15
# Numbers handed to a program at once.
BUFFER = 1 << 21


class Source:
    """The vectors to add, checked, in slices."""

    def __init__(
        self,
        vectors: Any,
        dim: int,
        ids: npt.ArrayLike | None,
        progress: Callable[[float], object] | None = None,
        *,
        first: int = 0,
        metric: Metric = "l2",
    ) -> None:
        """Look at shapes and ids; `first` is where the vectors begin among more of them."""
        vectors = as_vectors(vectors, "vectors")
        check_table("vectors", vectors, dim)
        self.vectors, self.metric = vectors, metric
        self.progress, self.first = progress, first
        self.ids = None if ids is None else check_ids(ids, len(vectors))

    def slices(
        self, weight: float = 1.0, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, npt.NDArray[np.int64] | None]]:
        """Vectors in float32 and their ids, told of afterwards as this part of the work."""
        at = 0
        for part in chunks(self.vectors, slice_rows(self.vectors.shape[1]), device):
            check_lengths("vectors", part, self.metric, first=self.first + at)
            rows = slice(at, at := at + len(part))
            yield part, None if self.ids is None else self.ids[rows]
            if self.progress is not None:
                self.progress(weight * len(part))


def slice_rows(dim: int) -> int:
    """Vectors that are encoded at once."""
    return max(BUFFER // dim, 1)


def check_ids(ids: npt.ArrayLike, N: int) -> npt.NDArray[np.int64]:
    """Ids as Faiss takes them: N different integers, none negative."""
    names = np.asarray(ids)
    # An empty list has no integers.
    names = names.astype(np.int64) if names.shape == (0,) else names
    if names.shape != (N,) or names.dtype.kind not in "iu":
        raise ValueError(
            f"ids must be {N} integers, one for each vector, "
            f"but got {names.dtype} of shape {names.shape}"
        )
    names = names.astype(np.int64)
    # Faiss answers −1 where it finds nothing.
    if N and names.min() < 0:
        raise ValueError(f"ids must not be negative, but got {names.min()}")
    if len(np.unique(names)) != N:
        raise ValueError("ids must differ, but some come more than once")
    return names
