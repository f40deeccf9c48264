"""Turns in all planes at once: `rotation.turn_by_exponential_` without its matrix products.

D (b, n, n) is skew, and X = rate·D, shortened. scalars (b, 2): the factor from D to X, and a of I +
X + aX².
"""

import math

import triton
import triton.language as tl

from givens.kernels import GOLDEN, SPREAD
from givens.kernels.gpu.grid import barrier, follow
from givens.kernels.gpu.moments import is_bad, settle
from givens.rotation import CAUTION, LONGEST, POWERS

STRIDE, FACTOR = tl.constexpr(GOLDEN), tl.constexpr(SPREAD)
TIMES, CAREFUL, MOST = tl.constexpr(POWERS), tl.constexpr(CAUTION), tl.constexpr(LONGEST)
BEND = tl.constexpr((math.sqrt(2) - 1) / 4)


@triton.jit
def first_vector(axes):
    """The initial vector of the power method."""
    word = axes.to(tl.uint32) * STRIDE
    word = (word ^ (word >> 15)) * FACTOR
    word = word ^ (word >> 13)
    return (word.to(tl.float64) * 4.656612873077393e-10 - 1).to(tl.float32)


@triton.jit
def length_kernel(
    D, vectors, peaks, scalars, rates, waiting, batch, n,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The twin of `spectral_norm`, for every D, and the scalars that follow from it.

    vectors (2, n) and peaks, one for each program, are scratch.
    """
    follow(EARLY)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    every = tl.arange(0, ALL)
    root = tl.sqrt(1.0 * n)
    for b in range(0, batch):
        base = D + (0 * pid + b).to(tl.int64) * n * n
        top = 0.0
        for start in range(pid * ROWS, n, programs * ROWS):
            rows = start + tl.arange(0, ROWS)
            valid = (rows < n)[:, None] & inside[None, :]
            d = tl.load(base + (rows * n)[:, None] + columns[None, :], mask=valid, other=0.0)
            top = tl.maximum(top, tl.max(tl.max(tl.abs(d), axis=1), axis=0))
        tl.store(peaks + pid, top)
        barrier(waiting, programs)
        top = tl.load(peaks + every, mask=every < programs, other=0.0, cache_modifier=".cg")
        top = tl.maximum(tl.max(top, axis=0), 1.2e-38)
        for power in range(0, TIMES):
            v = first_vector(columns)
            if power > 0:
                old = vectors + (power - 1) % 2 * n
                v = tl.load(old + columns, mask=inside, other=0.0, cache_modifier=".cg")
            for start in range(pid * ROWS, n, programs * ROWS):
                rows = start + tl.arange(0, ROWS)
                valid = (rows < n)[:, None] & inside[None, :]
                d = tl.load(base + (rows * n)[:, None] + columns[None, :], mask=valid, other=0.0)
                product = tl.sum(d / top / root * v[None, :], axis=1)
                tl.store(vectors + power % 2 * n + rows, product, mask=rows < n)
            barrier(waiting, programs)
        if pid == 0:
            old = vectors + TIMES % 2 * n + columns
            new = vectors + (TIMES - 1) % 2 * n + columns
            u = tl.load(old, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float64)
            v = tl.load(new, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float64)
            before = tl.maximum(tl.sqrt(tl.sum(u * u, axis=0)), 1.2e-38)
            rate = tl.load(rates)
            norm = root * top * (tl.sqrt(tl.sum(v * v, axis=0)) / before).to(tl.float32)
            longest = tl.abs(rate) * norm * CAREFUL
            shorten = 1 / tl.maximum(longest / MOST, 1.0)
            sigma = shorten * longest
            tl.store(scalars + 2 * b, shorten * rate)
            tl.store(scalars + 2 * b + 1, sigma * sigma * BEND + 0.5)
        # All programs must be done with the scratch before it is reused.
        barrier(waiting, programs)


@triton.jit(do_not_specialize=["beta2"])
def finish_kernel(
    W, Y, ambient, moved, flags, count, foresight, misses, step, skipped,
    size, batch, n, wide, tiles, beta2,
    ADAPT: tl.constexpr, ALL: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """W ← Y and ambient ← ambient + X·ambient, unless the gradient is bad; and count the step.

    moved (b, n, wide) has X·ambient in its last n columns.
    """
    follow(EARLY)
    if not is_bad(flags, count, ALL):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        tl.store(W + at, tl.load(Y + at, mask=inside), mask=inside)
        if ADAPT:
            place = at // n * wide + wide - n + at % n
            more = tl.load(moved + place, mask=inside)
            tl.store(ambient + at, tl.load(ambient + at, mask=inside) + more, mask=inside)
    if tl.program_id(0) == 0:
        settle(
            foresight, misses, step, skipped, flags, count, batch, n, tiles, beta2,
            ADAPT, ALL, TILES,
        )  # fmt: skip
