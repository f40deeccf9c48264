"""Lloyd's algorithm on all subspaces at once.

X (N, D, w) vectors cut into D sub-vectors of width w; C (D, K, w) the codewords of each subspace.
"""

from collections.abc import Iterator
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from jaxtyping import Float, Integer
from torch import Tensor

Start = Literal["sampled", "plus-plus"]

# Distances held at once, in numbers.
BUFFER = 1 << 22


class Sliceable(Protocol):
    """What k-means reads, slice by slice: a tensor, an array, a memory-mapped file."""

    @property
    def shape(self) -> Any:
        """(N, D, w)."""

    def __getitem__(self, key: Any, /) -> Any: ...


def nearest(
    Y: Float[Tensor, "N D w"] | Float[Tensor, "N n"], codebooks: Float[Tensor, "D K w"]
) -> Integer[Tensor, "N D"]:
    """The nearest codeword of every sub-vector by squared L2, the lowest index where two are equal.

    uint8 up to 256 codewords, int64 beyond.
    """
    D, K, w = codebooks.shape
    Y = Y.reshape(len(Y), D, w)
    codes = torch.empty(len(Y), D, dtype=torch.uint8 if K <= 256 else torch.int64, device=Y.device)
    for rows in _slices(len(Y), max(BUFFER // (D * K), 1)):
        codes[rows] = _assign(Y[rows].float(), codebooks)[0].to(codes.dtype)
    return codes


def _assign(X: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (N, D) and squared distances (N, D)."""
    # From the codewords' mean both are small, and so is what rounding does to |x|² − 2x·c + |c|².
    mean = C.mean(1)
    X, C = (X - mean).transpose(0, 1), C - mean[:, None]
    scores = torch.baddbmm(C.square().sum(-1)[:, None], X, C.mT, alpha=-2)
    least, codes = scores.min(-1)
    return codes.T, (least + X.square().sum(-1)).clamp_min(0).T


def kmeans(
    X: Float[Tensor, "N D w"] | Sliceable,
    codewords: int = 256,
    *,
    iterations: int = 25,
    seed: int = 0,
    start: Start | Float[Tensor, "D K w"] = "sampled",
    device: torch.device | str | None = None,
) -> Float[Tensor, "D K w"]:
    """The codebooks of K codewords that Lloyd's algorithm finds, one for each subspace.

    X is read a slice at a time, so a memory-mapped array may be larger than memory.
    """
    N, D, w = X.shape
    if codewords > N:
        raise ValueError(
            f"codewords must be at most the number of vectors, but got codewords={codewords}, N={N}"
        )
    device = X.device if isinstance(X, Tensor) else torch.device(device or "cpu")
    C = _started(X, codewords, start, seed, device)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(iterations):
        sums = torch.zeros(D, codewords, w, dtype=torch.float64, device=device)
        counts = torch.zeros(D, codewords, device=device)
        errors = torch.zeros(D, codewords, device=device)
        for chunk in chunks(X, max(BUFFER // (D * codewords), 1), device):
            codes, distances = _assign(chunk, C)
            flat = (codes + torch.arange(D, device=device) * codewords).flatten()
            sums.view(-1, w).index_add_(0, flat, chunk.reshape(-1, w).double())
            counts.view(-1).index_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype))
            errors.view(-1).index_add_(0, flat, distances.flatten())
        C = update(C, sums, counts, errors, generator)
    return C


def update(
    C: Tensor, sums: Tensor, counts: Tensor, errors: Tensor, generator: torch.Generator
) -> Tensor:
    """Move every codeword to the mean of its cluster, and an empty one into a cluster that errs.

    The r-th empty codeword goes beside the r-th worst one, both half a typical error apart, which
    the next round pulls to where they belong. Nothing waits for a device.
    """
    C = torch.where(counts[..., None] > 0, sums / counts.clamp_min(1)[..., None], C).to(C.dtype)
    worst = errors.argsort(dim=1, descending=True, stable=True)
    emptiest = counts.argsort(dim=1, stable=True)
    split = (counts.gather(1, emptiest) == 0) & (errors.gather(1, worst) > 0)
    split &= counts.gather(1, worst) > 1
    share = errors.gather(1, worst) / counts.gather(1, worst).clamp_min(1) / C.shape[-1]
    sign = torch.randint(0, 2, C.shape, generator=generator).to(C) - 0.5
    shift = sign * share.sqrt()[..., None].to(C.dtype)
    index = worst[..., None].expand_as(C)
    donors = C.gather(1, index)
    C = C.scatter(1, index, torch.where(split[..., None], donors - shift, donors))
    index = emptiest[..., None].expand_as(C)
    return C.scatter(1, index, torch.where(split[..., None], donors + shift, C.gather(1, index)))


def chunks(X: Any, rows: int, device: torch.device | str) -> Iterator[Tensor]:
    """X in float32 on the device, a slice at a time."""
    for part in _slices(len(X), rows):
        yield as_float(X[part], device)


def as_float(part: Any, device: torch.device | str) -> Tensor:
    """An array or tensor as a float32 tensor on the device."""
    if not isinstance(part, Tensor):
        part = torch.from_numpy(np.ascontiguousarray(part))
    return part.to(device).float()


def _started(
    X: Any, K: int, start: Start | Tensor, seed: int, device: torch.device | str
) -> Tensor:
    if isinstance(start, Tensor):
        return start.to(device, torch.float32).clone()
    if start not in get_args(Start):
        known = ", ".join(map(repr, get_args(Start)))
        raise ValueError(f"start must be one of {known} or codebooks, but got {start!r}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(X), generator=generator)[:K].sort().values
    C = as_float(X[drawn if isinstance(X, Tensor) else drawn.numpy()], device)
    return C.transpose(0, 1).contiguous()


def _slices(length: int, rows: int) -> Iterator[slice]:
    for first in range(0, length, rows):
        yield slice(first, min(first + rows, length))
