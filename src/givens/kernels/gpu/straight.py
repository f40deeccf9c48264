"""The straight-through gradient on a GPU: as `straight_through`, in fewer launches.

Launching most of these kernels takes longer than running them. So one program does all the work on
a vector, and sums the codewords' gradients on the way.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from givens.checks import SHORTEST
from givens.kernels.gpu.grid import power_of_2
from givens.kernels.gpu.launch import launch
from givens.layer.straight_through import Gradients, Kept

# The minimum of numbers in a program.
BLOCK = 1024


@triton.jit
def normalise_kernel(V, units, lengths, width, SHORTEST: tl.constexpr, WIDTH: tl.constexpr):
    """Each program computes a unit vector and its length."""
    row = tl.program_id(0).to(tl.int64)
    axes = tl.arange(0, WIDTH)
    at, inside = row * width + axes, axes < width
    v = tl.load(V + at, mask=inside, other=0.0)
    length = tl.sqrt_rn(tl.sum(v * v, axis=0))
    # Written so that NaN stays NaN.
    length = tl.where(length < SHORTEST, SHORTEST, length)
    tl.store(units + at, tl.div_rn(v, length), mask=inside)
    tl.store(lengths + row, length)


@triton.jit
def enter_kernel(
    G, E, scale, X, lengths, width, share, NORMALISED: tl.constexpr, WIDTH: tl.constexpr
):
    """Each program computes a row of the gradient of V from G and E, and overwrites E."""
    row = tl.program_id(0).to(tl.int64)
    axes = tl.arange(0, WIDTH)
    at, inside = row * width + axes, axes < width
    e = tl.load(E + at, mask=inside, other=0.0) * (share * tl.load(scale))
    g = tl.load(G + at, mask=inside, other=0.0) + e
    if NORMALISED:
        x = tl.load(X + at, mask=inside, other=0.0)
        g = tl.div_rn(g - tl.sum(g * x, axis=0) * x, tl.load(lengths + row))
    tl.store(E + at, g, mask=inside)


@triton.jit
def add_up_kernel(
    H, errors, scale, places, sums, count, width, share,
    KEPT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add h − e of every sub-vector to its codeword; `KEPT`, h + e is written over H."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    axes = tl.arange(0, WIDTH)
    here = rows < count
    at, inside = rows[:, None] * width + axes[None, :], here[:, None] & (axes < width)[None, :]
    h = tl.load(H + at, mask=inside, other=0.0)
    e = tl.load(errors + at, mask=inside, other=0.0) * (share * tl.load(scale))
    place = tl.load(places + rows, mask=here, other=0)
    tl.atomic_add(sums + place[:, None] * width + axes[None, :], h - e, mask=inside, sem="relaxed")
    if KEPT:
        tl.store(H + at, h + e, mask=inside)


def normalise(V: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors (m, n) and lengths (m, 1), as torch up to the order of summation."""
    (m, n), V = V.shape, V.contiguous()
    units, lengths = torch.empty_like(V), V.new_empty(m, 1)
    launch(
        normalise_kernel, (m,), V.device, V, units, lengths, n,
        SHORTEST=SHORTEST, WIDTH=power_of_2(n), num_warps=_warps(n), together=False,
    )  # fmt: skip
    return units, lengths


def find_gradients(
    g: Tensor, gd: Tensor, kept: Kept, codebooks: torch.Size, coarse: None, needed: Sequence[bool]
) -> Gradients:
    """`straight_through.find_gradients` in fewer launches; codewords' are summed in any order."""
    x, length, W, q, error, at, _ = kept
    gv = to_vectors(g, gd, W, error, x, length) if needed[0] else None
    gy = g @ W.mT
    gc = to_codewords(gy, gd, error, at, codebooks, keep=needed[1])
    gW = (q.mT @ g).addmm_(gy.mT, x) if needed[1] else None
    return gv, gW, gc, None


def to_vectors(
    g: Tensor, scale: Tensor, W: Tensor, error: Tensor, x: Tensor, length: Tensor | None
) -> Tensor:
    """The gradient of V, from those of T(X) and of the distortion."""
    gv, (m, n) = error @ W, x.shape
    launch(
        enter_kernel, (m,), g.device, g.contiguous(), gv, scale, x.contiguous(), length, n, 2 / m,
        NORMALISED=length is not None, WIDTH=power_of_2(n), num_warps=_warps(n), together=False,
    )  # fmt: skip
    return gv


def to_codewords(
    h: Tensor, scale: Tensor, error: Tensor, at: Tensor, shape: torch.Size, *, keep: bool
) -> Tensor:
    """The gradient of the codebooks, from h = gR; with `keep`, h becomes the gradient of Y."""
    gc, w = h.new_zeros(shape), shape[-1]
    width = power_of_2(w)
    rows = max(BLOCK // width, 1)
    launch(
        add_up_kernel, (-(-len(at) // rows),), h.device,
        h, error, scale, at, gc, len(at), w, 2 / len(h),
        KEPT=keep, ROWS=rows, WIDTH=width, num_warps=_warps(width), together=False,
    )  # fmt: skip
    return gc


def _warps(width: int) -> int:
    return min(max(power_of_2(width) // 512, 4), 16)
