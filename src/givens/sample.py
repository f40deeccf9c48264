"""The vectors that a fit looks at, as its codebooks see them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from givens.kmeans import as_float, chunks, nearest, rows_of


class Sample:
    """Vectors (N, n), normalised where asked, less their coarse centroid where there are some.

    In memory as float32, or read again from x, a slice at a time, in every pass.
    """

    def __init__(self, x: Any, device: torch.device, *, normalise: bool = False) -> None:
        self.x, self.device, self.normalise = x, device, normalise
        self.centroids: Tensor | None = None

    def __len__(self) -> int:
        return int(self.x.shape[0])

    @property
    def dim(self) -> int:
        """The dimension n."""
        return int(self.x.shape[1])

    @property
    def held(self) -> bool:
        """Whether they are in memory as they are seen."""
        plain = self.centroids is None and not self.normalise
        return plain and isinstance(self.x, Tensor) and self.x.dtype == torch.float32

    def chunks(self) -> Iterator[Float[Tensor, "m n"]]:
        """All of them, a slice at a time."""
        for part in chunks(self.x, self.device):
            yield part if self.held else self._seen(part)

    def drawn(self, count: int, seed: int) -> "Sample":
        """So many of them in memory, drawn without replacement; all of them in their order."""
        if count >= len(self):
            rows = as_float(self.x, self.device)
        else:
            index = np.random.default_rng(seed).choice(len(self), count, replace=False)
            rows = rows_of(self.x, torch.from_numpy(index), self.device)
        return Sample(rows if self.held else self._seen(rows), self.device)

    def less(self, centroids: Float[Tensor, "L n"]) -> "Sample":
        """Their residuals."""
        residuals = Sample(self.x, self.device, normalise=self.normalise)
        residuals.centroids = centroids
        return residuals.drawn(len(self), 0) if self.held else residuals

    def check(self) -> None:
        """Refuse values that no distance can be taken of."""
        row = 0
        for part in chunks(self.x, self.device):
            good = part.isfinite().all(1)
            if not good.all():
                row += int((~good).nonzero()[0])
                raise ValueError(f"x must be finite, but row {row} has NaN or infinite values")
            row += len(part)

    def _seen(self, part: Tensor) -> Tensor:
        if self.normalise:
            part = torch.nn.functional.normalize(part)
        if self.centroids is not None:
            part = part - self.centroids[nearest(part, self.centroids[None])[:, 0].long()]
        return part
