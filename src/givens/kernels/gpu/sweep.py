"""Turn W and the ambient mean through all pairings in one launch, on a device.

A program has some columns of one matrix, with all rows, and takes them through all pairings in its
processor's cache: row i ← cos·row i + sin·row j, row j ← cos·row j − sin·row i. No program waits
for another.
"""

import triton
import triton.language as tl

from givens.kernels import TIDY_STREAM
from givens.kernels.gpu.grid import cos_and_sin, follow, stream_key
from givens.kernels.gpu.moments import is_bad, settle
from givens.kernels.gpu.turning import drawn_pairs, tidy

TIDY_FROM = tl.constexpr(TIDY_STREAM)


@triton.jit
def angles_kernel(D, partners, cos, sin, rates, n, turns, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Cos θ and sin θ, θ = rate·D_ij, of partners (b, turns, n)."""
    follow(EARLY)
    b = tl.program_id(2)
    k = tl.program_id(1)
    axis = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = axis < n
    at = (b * turns + k) * n + axis
    partner = tl.load(partners + at, mask=inside, other=0)
    theta = tl.load(rates) * tl.load(
        D + (b * n + axis).to(tl.int64) * n + partner, mask=inside, other=0.0
    )
    c_now, s_now = cos_and_sin(theta)
    tl.store(cos + at, c_now, mask=inside)
    tl.store(sin + at, s_now, mask=inside)


@triton.jit(do_not_specialize=["beta2"])
def turn_all_kernel(
    W, ambient, partners, cos, sin, flags, count, foresight, misses, step, skipped,
    batch, n, turns, tiles, beta2,
    ADAPT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALL: tl.constexpr,
    TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Take some columns of W, or of the ambient mean, through all pairings, ROWS rows at a time."""
    follow(EARLY)
    b = tl.program_id(2)
    M = W
    if ADAPT:
        if tl.program_id(1) == 1:
            M = ambient
    if not is_bad(flags, count, ALL):
        columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        base = M + b.to(tl.int64) * n * n
        parts = tl.cdiv(n, ROWS)
        row = tl.arange(0, ROWS)
        at = b * turns * n + row
        partner = tl.load(partners + at, mask=row < n, other=0)
        c = tl.load(cos + at, mask=row < n, other=1.0)
        s = tl.load(sin + at, mask=row < n, other=0.0)
        for done in range(1, turns * parts + 1):
            # A pair is turned at its first axis. A matrix has less than 2³¹ numbers.
            turning = (partner > row)[:, None] & (columns < n)[None, :]
            at_i = base + (row * n)[:, None] + columns[None, :]
            at_j = base + (partner * n)[:, None] + columns[None, :]
            x = tl.load(at_i, mask=turning, other=0.0)
            y = tl.load(at_j, mask=turning, other=0.0)
            c_now = c[:, None]
            s_now = s[:, None]
            # Prefetch the next rows while these are turned.
            after = tl.minimum(done, turns * parts - 1)
            row = (after % parts) * ROWS + tl.arange(0, ROWS)
            at = (b * turns + after // parts) * n + row
            partner = tl.load(partners + at, mask=row < n, other=0)
            c = tl.load(cos + at, mask=row < n, other=1.0)
            s = tl.load(sin + at, mask=row < n, other=0.0)
            tl.store(at_i, c_now * x + s_now * y, mask=turning)
            tl.store(at_j, c_now * y - s_now * x, mask=turning)
            if done % parts == 0:
                # The next pairing combines other rows.
                tl.debug_barrier()
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (b == 0):
        settle(
            foresight, misses, step, skipped, flags, count, batch, n, tiles, beta2,
            ADAPT, ALL, TILES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["seed", "stream"])
def tidy_kernel(
    W, step, flags, count, n, seed, stream, every,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """At intervals, repair the rounding errors of the pairs of a random pairing."""
    follow(EARLY)
    t = tl.load(step)
    if (t % every == 0) & (is_bad(flags, count, ALL) == 0):
        b = tl.program_id(1)
        key = stream_key(0 * t + seed, t, stream + b + TIDY_FROM)
        p, q = drawn_pairs(tl.program_id(0) + tl.arange(0, 1), n, 0, key, BITS)
        at = W + b.to(tl.int64) * n * n
        tidy(at, tl.max(p, axis=0), tl.max(q, axis=0), n, BLOCK)
