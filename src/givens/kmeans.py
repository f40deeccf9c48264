"""Lloyd's algorithm on all subspaces at once.

X (N, D, w) vectors cut into D sub-vectors of width w; C (D, K, w) the codewords of each subspace.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float, Int64, Integer, Num
from torch import Tensor

from givens import kernels
from givens.checks import check_seed, check_whole
from givens.rotation import full_precision
from givens.storage.vectors import chunks, rows_of

Start = Literal["sampled", "plus-plus"]

# Numbers in a slice of the data; distances held at once on a CPU and on a GPU.
SLICE = 1 << 22
BUFFER, DEVICE_BUFFER = 1 << 22, 1 << 26
# Vectors per codeword that k-means++ looks at.
SEEDS = 32


@dataclasses.dataclass(frozen=True)
class Clusters:
    """The sums, sizes and errors of all clusters, after a pass over the data."""

    sums: Float[Tensor, "D K v"]
    counts: Float[Tensor, "D K"]
    errors: Float[Tensor, "D K"]

    @property
    def error(self) -> Tensor:
        """The mean squared error over vectors."""
        return self.errors.sum() / self.counts[0].sum()


class Quantized(NamedTuple):
    """Vectors (N, n), quantized."""

    codes: Tensor
    """(N, D)."""
    at: Tensor
    """(N·D,), rows of the codewords in the codebooks as one table."""
    words: Tensor
    """The codewords, (N, n); NaN where a vector is not finite."""
    errors: Tensor
    """The vectors minus their codewords."""
    distortion: Tensor
    """Their mean squared length, a scalar."""


def nearest(
    Y: Float[Tensor, "N D w"] | Float[Tensor, "N n"], codebooks: Float[Tensor, "D K w"]
) -> Integer[Tensor, "N D"]:
    """The nearest codeword of every sub-vector by squared L2; ties go to the lowest index.

    uint8 up to 256 codewords, int64 beyond. Takes float32, and anything else as float32.
    """
    if torch.compiler.is_compiling():
        # torch.compile cannot trace a kernel: it sees one operation.
        found: Tensor = _nearest_operation(Y, codebooks)
        return found
    D, K, w = codebooks.shape
    if Y.shape[1:] not in {(D, w), (D * w,)}:
        raise ValueError(
            f"Y must have shape (N, {D * w}) or (N, {D}, {w}) to go with codebooks of shape "
            f"{tuple(codebooks.shape)}, but got {tuple(Y.shape)}"
        )
    Y, C = Y.detach().reshape(len(Y), D * w), codebooks.detach().float()
    dtype = torch.uint8 if K <= 256 else torch.int64
    with full_precision(Y.device):
        if 0 < len(Y) <= SLICE // (D * w):
            return assign(Y.float(), C)[0].to(dtype)
        codes = torch.empty(len(Y), D, dtype=dtype, device=Y.device)
        for rows in slices(len(Y), SLICE // (D * w)):
            codes[rows] = assign(Y[rows].float(), C)[0].to(dtype)
        return codes


@torch.library.custom_op("givens::nearest", mutates_args=())
def _nearest_operation(Y: Tensor, codebooks: Tensor) -> Tensor:
    return nearest(Y, codebooks)


@_nearest_operation.register_fake
def _(Y: Tensor, codebooks: Tensor) -> Tensor:
    dtype = torch.uint8 if codebooks.shape[1] <= 256 else torch.int64
    return Y.new_empty(len(Y), len(codebooks), dtype=dtype)


@kernels.operation
def quantize(
    Y: Float[Tensor, "N n"],
    codebooks: Float[Tensor, "D K w"],
    usage: Float[Tensor, "D K"] | None = None,
    share: float = 0.0,
) -> Quantized:
    """Quantize vectors; each chosen codeword's usage grows by `share`, in place.

    Takes float32.
    """
    D, K, _ = codebooks.shape
    codes = nearest(Y, codebooks)
    at = (codes + K * torch.arange(D, device=Y.device)).view(-1)
    words = codebooks.flatten(0, 1).index_select(0, at).view_as(Y)
    # Equal to `words` bit for bit, but NaN where a vector is not finite.
    words = torch.add(words, Y, alpha=0)
    if usage is not None:
        one = Y.new_ones(()).expand(len(at))
        usage.view(-1).index_add_(0, at, one, alpha=share)
    errors = Y - words
    return Quantized(codes, at, words, errors, mean_square(errors))


def assign_lists(
    Y: Float[Tensor, "N n"], centroids: Float[Tensor, "L n"], metric: str = "l2"
) -> Int64[Tensor, " N"]:
    """The list of each vector: that of the nearest centroid, or of the largest product."""
    if metric == "l2":
        return nearest(Y, centroids[None])[:, 0].long()
    with full_precision(Y.device):
        return (Y @ centroids.mT).argmax(1)


def mean_square(errors: Float[Tensor, "N n"]) -> Tensor:
    """The mean squared length of vectors, a scalar."""
    # By column first: the order of a plain sum depends on the number of threads.
    return errors.square().sum(0).sum() / max(len(errors), 1)


def kmeans(
    X: Num[Tensor, "N D w"] | Num[np.ndarray[Any, Any], "N D w"],
    codewords: int = 256,
    *,
    iterations: int = 25,
    seed: int = 0,
    start: Start | Float[Tensor, "D K w"] = "sampled",
    device: torch.device | str | None = None,
) -> Float[Tensor, "D K w"]:
    """Learn codebooks of K codewords by Lloyd's algorithm, one for each subspace.

    X is read a slice at a time, so a memory-mapped array may be larger than memory.

    Args:
        X: a tensor or an array, of any number type.
        codewords: K, at most the number of vectors.
        iterations: passes over the data.
        seed: for the start and for moving empty codewords.
        start: "sampled" starts at K random vectors, "plus-plus" at vectors far apart (k-means++);
            or the codebooks to start from.
        device: where to compute, if X is not a tensor.
    """
    N, D, w = X.shape
    check_whole("codewords", codewords, 1)
    check_whole("iterations", iterations, 0)
    seed = check_seed(seed)
    if codewords > N:
        raise ValueError(
            f"codewords must be in 1..N, but got codewords={codewords} for N={N} vectors"
        )
    device = X.device if isinstance(X, Tensor) else torch.device(device or "cpu")
    with full_precision(torch.device(device)):
        C = start_centroids(X, codewords, start, seed, device)
        for iteration in range(iterations):
            parts = (part.flatten(1) for part in chunks(X, SLICE // (D * w), device))
            C = update_centroids(C, pass_over(parts, C), seed + iteration)
    return C


def pass_over(parts: Iterable[Tensor], C: Tensor, *, whole: bool = False) -> Clusters:
    """Assign all vectors, given as slices (N, n), and add up the clusters.

    The sums are of sub-vectors, (D, K, w), or with `whole` of whole vectors, (D, K, n); in float32
    within a slice and in float64 over slices.
    """
    D, K, w = C.shape
    sums = torch.zeros(D, K, D * w if whole else w, dtype=torch.float64, device=C.device)
    counts = torch.zeros(D, K, dtype=torch.float64, device=C.device)
    errors = torch.zeros_like(counts)
    for Y in parts:
        codes, distances = assign(Y, C)
        add_up_(Y, codes, distances, Clusters(sums, counts, errors), whole=whole)
    return Clusters(sums, counts, errors)


@kernels.operation
def add_up_(Y: Tensor, codes: Tensor, distances: Tensor, to: Clusters, *, whole: bool) -> None:
    """Add vectors, counts and squared distances to the clusters of their codes, in place."""
    D, K = to.counts.shape
    # On a GPU a product with a 0/1 matrix adds in a fixed order; scatter-add does not.
    for rows in slices(len(Y), _buffer(Y) // (D * K)):
        member = (codes[rows].T[..., None] == torch.arange(K, device=Y.device)).to(Y.dtype)
        y = Y[rows].expand(D, -1, -1) if whole else cut(Y[rows], D)
        to.sums.add_(member.mT @ y)
        to.counts.add_(member.sum(1))
        to.errors.add_((member.mT @ distances[rows].T[..., None])[..., 0])


@kernels.operation
def assign(Y: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (N, D) and squared distances (N, D) of Y (N, n), float32: the one hot loop."""
    D, K, _ = C.shape
    # Relative to the codewords' mean both are small, and so is the rounding of |x|² − 2x·c + |c|².
    mean = C.mean(1, keepdim=True)
    C = C - mean
    squares = C.square().sum(-1)[:, None]
    codes = torch.empty(len(Y), D, dtype=torch.int64, device=Y.device)
    distances = torch.empty(len(Y), D, dtype=Y.dtype, device=Y.device)
    for rows in slices(len(Y), _buffer(Y) // (D * K)):
        X = cut(Y[rows], D) - mean
        least, index = torch.baddbmm(squares, X, C.mT, alpha=-2).min(-1)
        codes[rows], distances[rows] = index.T, (least + X.square().sum(-1)).clamp_min(0).T
    return codes, distances


def update_centroids(C: Tensor, clusters: Clusters, seed: int) -> Tensor:
    """Move codewords to their clusters' means, and empty ones into the clusters of largest error.

    The r-th empty codeword is put beside the r-th worst one, a typical error away; the next pass
    separates them. Does not synchronise with the device.
    """
    sums, counts, errors = clusters.sums, clusters.counts, clusters.errors
    C = torch.where(counts[..., None] > 0, sums / counts.clamp_min(1)[..., None], C).to(C.dtype)
    worst = errors.argsort(dim=1, descending=True, stable=True)
    empty = counts.argsort(dim=1, stable=True)
    size, error = counts.gather(1, worst), errors.gather(1, worst)
    split = ((counts.gather(1, empty) == 0) & (size > 1) & (error > 0))[..., None]
    typical = (error / size.clamp_min(1) / C.shape[-1]).sqrt()[..., None].to(C.dtype)
    generator = torch.Generator("cpu").manual_seed(seed)
    sides = torch.randint(0, 2, C.shape, generator=generator, device="cpu")
    shift = (sides - 0.5).to(C) * typical * split
    worst, empty = (index[..., None].expand_as(C) for index in (worst, empty))
    donors = C.gather(1, worst)
    C = C.scatter(1, worst, donors - shift)
    return C.scatter(1, empty, torch.where(split, donors + shift, C.gather(1, empty)))


def start_centroids(
    X: Any, K: int, start: Start | Tensor, seed: int, device: torch.device | str
) -> Tensor:
    """The initial codebooks."""
    N, D, w = X.shape
    if isinstance(start, Tensor):
        if start.shape != (D, K, w):
            raise ValueError(f"start must have shape ({D}, {K}, {w}), but got {tuple(start.shape)}")
        return start.detach().to(device, torch.float32).clone()
    if start not in get_args(Start):
        known = ", ".join(map(repr, get_args(Start)))
        raise ValueError(f"start must be one of {known} or codebooks, but got {start!r}")
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randperm(N, generator=generator, device="cpu")
    if start == "sampled":
        return rows_of(X, drawn[:K], device).transpose(0, 1).contiguous()
    return _far_apart(rows_of(X, drawn[: SEEDS * K], device).transpose(0, 1), K, generator)


def _far_apart(X: Tensor, K: int, generator: torch.Generator) -> Tensor:
    """k-means++: draw each codeword with probability proportional to its squared distance."""
    D, N, w = X.shape
    C = X.new_empty(D, K, w)
    distance = X.new_full((D, N), torch.inf)
    odds = torch.ones_like(distance)
    draws = torch.rand(K, D, 1, generator=generator, dtype=X.dtype, device="cpu").to(X.device)
    for k in range(K):
        upto = odds.cumsum(1, dtype=torch.float64)
        drawn = torch.searchsorted(upto, draws[k] * upto[:, -1:], right=True).clamp_max(N - 1)
        C[:, k] = X.gather(1, drawn[..., None].expand(D, 1, w))[:, 0]
        distance = torch.minimum(distance, (X - C[:, k, None]).square().sum(-1))
        odds = distance
    return C


def cut(Y: Tensor, D: int) -> Tensor:
    """Reshape (N, n) to (D, N, w)."""
    return Y.view(len(Y), D, -1).transpose(0, 1)


def slices(length: int, rows: int) -> Iterator[slice]:
    """Cut 0..length into slices of at least one row."""
    rows = max(rows, 1)
    for first in range(0, length, rows):
        yield slice(first, min(first + rows, length))


def _buffer(Y: Tensor) -> int:
    return DEVICE_BUFFER if Y.is_cuda else BUFFER
