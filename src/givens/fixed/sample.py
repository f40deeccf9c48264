"""The vectors that a fit learns from, in the space of its codebooks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from givens.checks import SHORTEST, check_lengths, check_scale
from givens.kmeans import SLICE, assign_lists
from givens.storage.vectors import as_float, chunks, rows_of


class Sample:
    """Vectors (N, n), optionally normalised, minus their coarse centroids if there are any.

    Held in memory as float32, or read again from x in every pass, a slice at a time.
    """

    def __init__(
        self,
        x: Any,
        device: torch.device,
        *,
        normalise: bool = False,
        centroids: Float[Tensor, "L n"] | None = None,
    ) -> None:
        self.x, self.device = x, device
        self.normalise, self.centroids = normalise, centroids
        # The rows' positions in x, for error messages.
        self.index: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return int(self.x.shape[0])

    @property
    def dim(self) -> int:
        """The dimension n."""
        return int(self.x.shape[1])

    @property
    def in_memory(self) -> bool:
        """Whether they are in memory, transformed."""
        plain = self.centroids is None and not self.normalise
        return plain and isinstance(self.x, Tensor) and self.x.dtype == torch.float32

    def chunks(self) -> Iterator[Float[Tensor, "m n"]]:
        """All of them, a slice at a time."""
        for part in chunks(self.x, SLICE // self.dim, self.device):
            yield self._transform(part)

    def draw(self, count: int, seed: int) -> "Sample":
        """Draw `count` of them without replacement, into memory; all of them keep their order."""
        if count >= len(self):
            return Sample(self._transform(as_float(self.x, self.device)), self.device)
        index = np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False))
        rows = rows_of(self.x, torch.from_numpy(index), self.device)
        sample = Sample(self._transform(rows), self.device)
        sample.index = index
        return sample

    def transform(
        self, *, normalise: bool = False, centroids: Float[Tensor, "L n"] | None = None
    ) -> "Sample":
        """The same vectors normalised, or minus their centroids; in memory if these are."""
        normalise = normalise or self.normalise
        changed = Sample(self.x, self.device, normalise=normalise, centroids=centroids)
        return changed.draw(len(self), 0) if self.in_memory else changed

    def check(self, metric: str) -> None:
        """Raise for vectors that the metric cannot compare."""
        at, longest = 0, 0.0
        for part in self.chunks():
            rows = None if self.index is None else self.index[at : at + len(part)]
            check_lengths("x", part, metric, first=at, rows=rows)
            at += len(part)
            if metric != "cosine" and longest < SHORTEST:
                lengths = torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)
                longest = max(longest, float(lengths.amax()))
        check_scale("x", longest)

    def _transform(self, part: Tensor) -> Tensor:
        if self.normalise:
            part = torch.nn.functional.normalize(part)
        if self.centroids is not None:
            part = part - self.centroids[assign_lists(part, self.centroids)]
        return part
