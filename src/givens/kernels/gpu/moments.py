"""A size for each plane, on a device: the product G Wᵀ, and from it both moments and D.

The twin of `optim.unit_derivatives`. W, G, planes, ambient, D (b, n, n) row-major float32; planes
has m above its diagonal and √v below it, ambient is Sᵀ. A program has a tile and its mirror image.
"""

import triton
import triton.language as tl

from givens.kernels import MOST_RATE
from givens.kernels.gpu.grid import follow

MOST = tl.constexpr(MOST_RATE)


@triton.jit
def check_kernel(
    G, flags, found_inf, lr, size, limit,
    FOUND: tl.constexpr, RATE_ON_DEVICE: tl.constexpr, RAW: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """flags[program] ← whether its part of G, or the rate, would damage W.

    The angles of the RAW step have the gradient's size in them.
    """
    follow(EARLY)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    bad = 0
    if RATE_ON_DEVICE:
        rate = tl.load(lr).to(tl.float32)
        bad = is_wrong_rate(rate)
        if RAW:
            limit = limit / tl.maximum(rate, 1.0)
    wrong = tl.zeros((BLOCK,), tl.int32)
    for start in range(pid * BLOCK, size, programs * BLOCK):
        at = tl.arange(0, BLOCK).to(tl.int64) + start
        g = tl.load(G + at, mask=at < size, other=0.0)
        # Written so that NaN is wrong too.
        wrong |= (tl.abs(g) <= limit).to(tl.int32) ^ 1
    bad |= tl.max(wrong, axis=0)
    if FOUND:
        bad |= (tl.load(found_inf) != 0).to(tl.int32)
    tl.store(flags + pid, bad)


@triton.jit
def is_wrong_rate(rate):
    """Whether a rate is invalid, NaN included: the twin of `check_rate`."""
    return ((rate >= 0) & (rate <= MOST)).to(tl.int32) ^ 1


@triton.jit
def is_bad(flags, count, ALL: tl.constexpr):
    """Whether any program of `check_kernel` has found something."""
    every = tl.arange(0, ALL)
    return tl.max(tl.load(flags + every, mask=every < count, other=0), axis=0) > 0


@triton.jit
def product_kernel(
    G, W, P, n, SIDE: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr, TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """P ← G Wᵀ, a tile of (SIDE, WIDE) to a program.

    PRECISION is "tf32", or "tf32x3", which is as exact as float32.

    TOGETHER rows of tiles are worked on at the same time, so that what they read stays in the
    second-level cache.
    """
    follow(EARLY)
    down = tl.cdiv(n, SIDE)
    across = tl.cdiv(n, WIDE)
    group = tl.program_id(0) // (TOGETHER * across)
    height = tl.minimum(down - group * TOGETHER, TOGETHER)
    within = tl.program_id(0) % (TOGETHER * across)
    rows = (group * TOGETHER + within % height) * SIDE + tl.arange(0, SIDE)
    columns = (within // height) * WIDE + tl.arange(0, WIDE)
    depth = tl.arange(0, DEPTH)
    base = tl.program_id(1).to(tl.int64) * n * n
    at_g = G + base + (rows * n)[:, None] + depth[None, :]
    at_w = W + base + (columns * n)[:, None] + depth[None, :]
    sums = tl.zeros((SIDE, WIDE), tl.float32)
    for start in range(0, n, DEPTH):
        deep = (start + depth < n)[None, :]
        g = tl.load(at_g, mask=(rows < n)[:, None] & deep, other=0.0)
        w = tl.load(at_w, mask=(columns < n)[:, None] & deep, other=0.0)
        sums = tl.dot(g, tl.trans(w), sums, input_precision=PRECISION)
        at_g += DEPTH
        at_w += DEPTH
    at = P + base + (rows * n)[:, None] + columns[None, :]
    tl.store(at, sums, mask=(rows < n)[:, None] & (columns < n)[None, :])


@triton.jit
def plain_rate(lr, share, step, log_beta1, log_beta2, RATE_ON_DEVICE: tl.constexpr,
               ADAPT: tl.constexpr):  # fmt: skip
    """The twin of `Options.rate`, for the current step."""
    t = (tl.load(step) + 1).to(tl.float64)
    rate = 0.0 * t + (tl.load(lr) if RATE_ON_DEVICE else lr)
    rate = rate * share
    if ADAPT:
        rate = rate * tl.sqrt(1 - tl.exp(t * log_beta2)) / (1 - tl.exp(t * log_beta1))
    return rate.to(tl.float32)


@triton.jit
def sizes_after(size, a, keep, take):
    """√(keep²·size² + take²·a²), without a square that overflows or vanishes."""
    x = keep * size
    y = take * tl.abs(a)
    top = tl.maximum(x, y)
    ratio = tl.minimum(x, y) / tl.where(top > 0, top, 1.0)
    return top * tl.sqrt(1 + ratio * ratio)


@triton.jit(do_not_specialize=["lr", "share", "beta1", "beta2"])
def moments_kernel(
    P, planes, ambient, D, foresight, misses, rates, step, lr, flags, count,
    n, share, beta1, beta2, keep, take, log_beta1, log_beta2,
    ADAPT: tl.constexpr, RATE_ON_DEVICE: tl.constexpr, SIDE: tl.constexpr, ALL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """From P = G Wᵀ both running means, the sizes and D = m/√v; D = P − Pᵀ unless ADAPT.

    D may be P. misses (b, tiles, tiles, 2) gets the sums of (A − m)² of both means as they were.
    """
    follow(EARLY)
    r = tl.program_id(0)
    c = tl.program_id(1)
    b = tl.program_id(2)
    if r == 0:
        if (b == 0) & (c == 0):
            rate = plain_rate(lr, share, step, log_beta1, log_beta2, RATE_ON_DEVICE, ADAPT)
            tl.store(rates, rate)
    if r <= c:
        base = b.to(tl.int64) * n * n
        rows = r * SIDE + tl.arange(0, SIDE)
        columns = c * SIDE + tl.arange(0, SIDE)
        at = base + rows[:, None].to(tl.int64) * n + columns[None, :]
        mirrored = base + columns[:, None].to(tl.int64) * n + rows[None, :]
        valid = (rows < n)[:, None] & (columns < n)[None, :]
        plus = tl.load(P + at, mask=valid, other=0.0)
        minus = tl.trans(tl.load(P + mirrored, mask=tl.trans(valid), other=0.0))
        a = plus - minus
        above = valid & (rows[:, None] < columns[None, :])
        bad = is_bad(flags, count, ALL)
        d = a
        if ADAPT:
            t = tl.load(step) + 1
            known = 1.0
            if t > 1:
                known = (1 / (1 - tl.exp((t - 1).to(tl.float64) * log_beta1))).to(tl.float32)
            m = tl.load(planes + at, mask=above, other=0.0)
            size = tl.trans(tl.load(planes + mirrored, mask=tl.trans(above), other=0.0))
            # ambient is Sᵀ: S_ij lies in the mirror image.
            lower = tl.load(ambient + at, mask=valid, other=0.0)
            upper = tl.trans(tl.load(ambient + mirrored, mask=tl.trans(valid), other=0.0))
            miss = tl.where(above, a - m * known, 0.0).to(tl.float64)
            near = tl.sum(tl.sum(miss * miss, axis=1), axis=0)
            miss = tl.where(above, a - (upper - lower) * known, 0.0).to(tl.float64)
            far = tl.sum(tl.sum(miss * miss, axis=1), axis=0)
            tiles = tl.num_programs(0)
            told = misses + 2 * ((b * tiles + r) * tiles + c)
            m = beta1 * m + (1 - beta1) * a
            size = sizes_after(size, a, keep, take)
            upper = beta1 * upper + (1 - beta1) * plus
            lower = beta1 * lower + (1 - beta1) * minus
            ahead = tl.load(foresight + 2 * b + 1) < tl.load(foresight + 2 * b)
            d = tl.where(ahead, upper - lower, m)
            d = tl.where(size > 0, d / tl.where(size > 0, size, 1.0), 0.0)
            if not bad:
                tl.store(told, near)
                tl.store(told + 1, far)
                tl.store(planes + at, m, mask=above)
                tl.store(planes + mirrored, tl.trans(size), mask=tl.trans(above))
                tl.store(ambient + at, lower, mask=valid)
                if r < c:
                    tl.store(ambient + mirrored, tl.trans(upper), mask=tl.trans(valid))
        if bad:
            d = 0.0 * rows[:, None] + 0.0 * columns[None, :]
        # Skew to the last bit, on the diagonal tiles too.
        tl.store(D + at, d, mask=above)
        tl.store(D + mirrored, -tl.trans(d), mask=tl.trans(above))
        tl.store(D + at, 0.0 * d, mask=valid & (rows[:, None] == columns[None, :]))


@triton.jit
def settle(foresight, misses, step, skipped, flags, count, batch, n, tiles, beta2,
           ADAPT: tl.constexpr, ALL: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """Count the step and update the foresight: one program, after all others have read them."""
    if is_bad(flags, count, ALL):
        tl.store(skipped, tl.load(skipped) + 1)
    else:
        tl.store(step, tl.load(step) + 1)
        if ADAPT:
            for b in range(0, batch):
                for frame in tl.static_range(2):
                    total = 0.0 * tl.load(misses)
                    for r in range(0, tiles):
                        c = tl.arange(0, TILES)
                        at = misses + 2 * ((b * tiles + r) * tiles + c) + frame
                        inside = (c < tiles) & (c >= r)
                        total += tl.sum(tl.load(at, mask=inside, other=0.0), axis=0)
                    old = tl.load(foresight + 2 * b + frame).to(tl.float64)
                    mean = total / tl.maximum(n * (n - 1) // 2, 1)
                    new = tl.sqrt(beta2 * old * old + (1 - beta2) * mean)
                    tl.store(foresight + 2 * b + frame, new.to(tl.float32))
