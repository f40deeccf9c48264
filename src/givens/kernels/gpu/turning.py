"""The Triton kernels that blend the momentum and turn the planes: `optim.step_` on a device.

Every kernel is one launch. W, G, H (b, n, n) row-major float32; pairs (b, ⌈n/2⌉, 2), whose last
row, where n is odd, names the resting axis twice.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from givens.kernels import TIDY_EVERY, TIDY_STREAM
from givens.kernels.gpu.grid import (
    barrier,
    counters,
    follow,
    permuted,
    power_of_2,
    programs_at_once,
    shuffle_bits,
    stream_key,
)
from givens.kernels.gpu.launch import launch
from givens.kernels.gpu.moments import is_wrong_rate

TIDY = tl.constexpr(TIDY_EVERY)
TIDY_FROM = tl.constexpr(TIDY_STREAM)
# Numbers of a row that a program reads at a time.
WIDE = 4096
# Numbers of each of W, G and H, one row of every pair, that a program keeps in registers.
HELD = 4096


@triton.jit
def drawn_pairs(p, n, turn, key, BITS: tl.constexpr):
    """Pairs p of the random pairing of that turn; the resting axis last, twice, where n is odd."""
    places = (n + 1) // 2
    around = 2 * places - 1
    a = (p + 1) % places
    x = (turn + a) % around
    y = tl.where(a > 0, (turn + around - a) % around, tl.where(n % 2 == 0, around, x))
    i = permuted(x, n, key, BITS)
    j = permuted(y, n, key, BITS)
    return tl.minimum(i, j), tl.maximum(i, j)


@triton.jit
def drawn_planes(p, n, key, BITS: tl.constexpr):
    """Planes p of ⌊n/2⌋ that may share axes, the twin of `overlapping_random_pairs`."""
    # A permutation of all planes; where n is odd, the item after the last is no plane.
    index = permuted(p, n * (n - 1) // 2, key, BITS)
    j = ((1 + tl.sqrt(1.0 + 8 * index.to(tl.float64))) / 2).to(tl.int32)
    j -= (j * (j - 1) // 2 > index).to(tl.int32)
    i = index - j * (j - 1) // 2
    return tl.where(p < n // 2, i, 0), tl.where(p < n // 2, j, 0)


@triton.jit
def choose_pairs(pairs, pid, programs, total, items, n, seed, t, stream, turn,
                 DRAW: tl.constexpr, OVERLAP: tl.constexpr, MANY: tl.constexpr,
                 BITS: tl.constexpr):  # fmt: skip
    """Draw the pairs of all items of this program at once, and write them down."""
    if DRAW:
        item = pid + programs * tl.arange(0, MANY)
        key = stream_key(0 * t + seed, t, stream + item // items)
        if OVERLAP:
            i, j = drawn_planes(item % items, n, key, BITS)
        else:
            i, j = drawn_pairs(item % items, n, turn, key, BITS)
        tl.store(pairs + 2 * item, i, mask=item < total)
        tl.store(pairs + 2 * item + 1, j, mask=item < total)
        tl.debug_barrier()


@triton.jit
def added(a, b, c, d, e, f, g, h):
    """Add four pairs of numbers, for a reduction of four sums at once."""
    return a + e, b + f, c + g, d + h


@triton.jit
def planes(wi, wj, gi, gj, AXIS: tl.constexpr):
    """A_ij and the Gram matrix of two rows: w_i·w_i, w_i·w_j, w_j·w_j."""
    return tl.reduce((gi * wj - wi * gj, wi * wi, wi * wj, wj * wj), AXIS, added)


@triton.jit
def mix_rows(M, i, j, n, ii, ij, ji, jj, BLOCK: tl.constexpr):
    """(row i, row j) ← (ii·row i + ij·row j, ji·row i + jj·row j)."""
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < n
        at_i = M + i.to(tl.int64) * n + columns
        at_j = M + j.to(tl.int64) * n + columns
        x = tl.load(at_i, mask=inside, other=0.0)
        y = tl.load(at_j, mask=inside, other=0.0)
        tl.store(at_i, ii * x + ij * y, mask=inside)
        tl.store(at_j, ji * x + jj * y, mask=inside)


@triton.jit
def turned(theta, ii, ij, jj):
    """cosθ, sinθ, and the 2×2 turn after (3I − Gram)/2, which undoes the rounding of the pair."""
    # The raw step's angle may overflow.
    theta = tl.where(tl.abs(theta) < float("inf"), theta, 0.0)
    c = tl.cos(theta)
    s = tl.sin(theta)
    x = 1.5 - 0.5 * ii
    y = 1.5 - 0.5 * jj
    z = -0.5 * ij
    return c, s, c * x + s * z, c * z + s * y, c * z - s * x, c * y - s * z


@triton.jit
def tell(words, item, tag, a, scale, real):
    """Publish A_ij of an item. A broken scale makes it NaN, and the step is skipped.

    The tag goes with the number in one word, so whoever sees the tag of this launch has the number
    too, and knows that this program has read its scale: no barrier is needed.
    """
    a = tl.where(scale >= 0, a, float("nan"))
    word = (tag << 32) | (a.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    tl.atomic_xchg(words + item, word, mask=real, sem="relaxed")


@triton.jit
def mean_square(words, b, items, n, tag, ALL: tl.constexpr):
    """The mean of A_ij² of matrix b, once all are published, summed in one order everywhere."""
    index = tl.arange(0, ALL)
    mine = index < items
    at = words + b * items + index
    word = tl.load(at, mask=mine, other=0, volatile=True)
    while tl.max((mine & ((word >> 32) != tag)).to(tl.int32), axis=0) > 0:
        word = tl.load(at, mask=mine, other=0, volatile=True)
    a = word.to(tl.int32).to(tl.float32, bitcast=True).to(tl.float64)
    return tl.sum(a * a, axis=0) / (n // 2)


@triton.jit
def new_scale(mean, old, BETA2: tl.constexpr, ADAPT: tl.constexpr, FIRST: tl.constexpr):
    """scale² ← decay·scale² + gain·mean(A_ij²), by the first pairing of a step alone."""
    old = old.to(tl.float64)
    if not FIRST:
        squared = old * old + 0.0 * mean
    elif ADAPT == 1:
        squared = BETA2 * old * old + (1 - BETA2) * mean
    else:
        squared = old * old + mean
    return tl.sqrt(squared)


@triton.jit
def derive(
    W, G, H, pairs, words, details, scale, tag, item, items, n, total,
    MOMENTUM: tl.constexpr, ADAPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Publish A_ij of an item, and keep what its turn needs."""
    b = item // items
    i = tl.load(pairs + 2 * item)
    j = tl.load(pairs + 2 * item + 1)
    old = 0.0
    if ADAPT > 0:
        old = tl.load(scale + b)
    a = 0.0
    m = 0.0
    ii = 0.0
    ij = 0.0
    jj = 0.0
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < n
        at_i = (b * n + i).to(tl.int64) * n + columns
        at_j = (b * n + j).to(tl.int64) * n + columns
        wi = tl.load(W + at_i, mask=inside, other=0.0, eviction_policy="evict_first")
        wj = tl.load(W + at_j, mask=inside, other=0.0, eviction_policy="evict_first")
        gi = tl.load(G + at_i, mask=inside, other=0.0, eviction_policy="evict_first")
        gj = tl.load(G + at_j, mask=inside, other=0.0, eviction_policy="evict_first")
        part, part_ii, part_ij, part_jj = planes(wi, wj, gi, gj, 0)
        a += part
        ii += part_ii
        ij += part_ij
        jj += part_jj
        if MOMENTUM:
            hi = tl.load(H + at_i, mask=inside, other=0.0)
            hj = tl.load(H + at_j, mask=inside, other=0.0)
            m += tl.sum(hi * wj - wi * hj)
    if not MOMENTUM:
        m = a
    tell(words, item, tag, a, old, item < total)
    detail = details + 5 * item
    tl.store(detail, m)
    tl.store(detail + 1, ii)
    tl.store(detail + 2, ij)
    tl.store(detail + 3, jj)
    tl.store(detail + 4, old)


@triton.jit(do_not_specialize=["seed", "stream", "lr", "share", "turn"])
def descend_kernel(
    W, G, H, pairs, words, details, scale, step, lr, skip, bad, launches, waiting,
    batch, n, seed, stream, share, turn,
    FIRST: tl.constexpr, DRAW: tl.constexpr, OVERLAP: tl.constexpr, MOMENTUM: tl.constexpr,
    ADAPT: tl.constexpr,
    SKIP: tl.constexpr, RATE_ON_DEVICE: tl.constexpr, BETA2: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, HELD: tl.constexpr, EARLY: tl.constexpr,
    BLOCK: tl.constexpr, ALL: tl.constexpr, MANY: tl.constexpr, BITS: tl.constexpr,
    TIDY_BITS: tl.constexpr,
):  # fmt: skip
    """Derivatives of the chosen planes, then, once all are known, angles and turns.

    words holds A_ij of every pair; details what its program keeps for the turn. With HELD every
    program has MANY pairs, and keeps their rows in registers in between. FIRST is the first pairing
    of a step: it counts, and updates the scale.
    """
    follow(EARLY)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    items = (n + 1) // 2
    total = batch * items
    columns = tl.arange(0, BLOCK)
    tag = (tl.load(launches) + 1) & 0x7FFFFFFF
    t = tl.load(step)
    if FIRST:
        t += 1
    if HELD:
        item = pid * MANY + tl.arange(0, MANY)
        real = item < total
        matrix = item // items
        old = 0.0 * matrix
        if ADAPT > 0:
            old = tl.load(scale + matrix, mask=real, other=0.0)
        if DRAW:
            key = stream_key(0 * t + seed, t, stream + matrix)
            i, j = drawn_pairs(item % items, n, turn, key, BITS)
        else:
            i = tl.load(pairs + 2 * item, mask=real, other=0)
            j = tl.load(pairs + 2 * item + 1, mask=real, other=0)
        at_i = ((matrix * n + i).to(tl.int64) * n)[:, None] + columns[None, :]
        at_j = ((matrix * n + j).to(tl.int64) * n)[:, None] + columns[None, :]
        inside = real[:, None] & (columns < n)[None, :]
        wi = tl.load(W + at_i, mask=inside, other=0.0)
        wj = tl.load(W + at_j, mask=inside, other=0.0)
        gi = tl.load(G + at_i, mask=inside, other=0.0)
        gj = tl.load(G + at_j, mask=inside, other=0.0)
        a, ii, ij, jj = planes(wi, wj, gi, gj, 1)
        tell(words, item, tag, a, old, real)
        m = a
        if MOMENTUM:
            hi = tl.load(H + at_i, mask=inside, other=0.0)
            hj = tl.load(H + at_j, mask=inside, other=0.0)
            m = tl.sum(hi * wj - wi * hj, axis=1)
    else:
        choose_pairs(
            pairs, pid, programs, total, items, n, seed, t, stream, turn, DRAW, OVERLAP, MANY, BITS
        )
        for item in range(pid, total, programs):
            derive(W, G, H, pairs, words, details, scale, tag, item, items, n, total,
                   MOMENTUM, ADAPT, BLOCK)  # fmt: skip
    good = t > 0
    if SKIP:
        good = good & (tl.load(skip) == 0)
    steps = t.to(tl.float64)
    rate = 0.0 * steps + share * (tl.load(lr) if RATE_ON_DEVICE else lr)
    if RATE_ON_DEVICE:
        good = good & (is_wrong_rate(tl.load(lr).to(tl.float32)) == 0)
    if ADAPT == 1:
        rate = rate * tl.sqrt(1 - tl.exp(steps * LOG_BETA2))
        if MOMENTUM:
            rate = rate / (1 - tl.exp(steps * LOG_BETA1))

    mean = mean_square(words, 0, items, n, tag, ALL)
    good = good & (mean < float("inf"))
    if HELD:
        means = 0.0 * matrix + mean
    for b in range(1, batch):
        mean = mean_square(words, b, items, n, tag, ALL)
        good = good & (mean < float("inf"))
        if HELD:
            means = tl.where(matrix == b, mean, means)
    if good:
        if HELD:
            angle = rate + 0.0 * means
            if ADAPT > 0:
                now = new_scale(means, old, BETA2, ADAPT, FIRST)
                angle = tl.where(now > 0, rate / now, 0.0)
            c, s, x, y, z, w = turned((angle * m).to(tl.float32), ii, ij, jj)
            turning = inside & (item % items < n // 2)[:, None]
            tl.store(W + at_i, x[:, None] * wi + y[:, None] * wj, mask=turning)
            tl.store(W + at_j, z[:, None] * wi + w[:, None] * wj, mask=turning)
            if MOMENTUM:
                tl.store(H + at_i, c[:, None] * hi + s[:, None] * hj, mask=turning)
                tl.store(H + at_j, c[:, None] * hj - s[:, None] * hi, mask=turning)
        else:
            last = (total - 1 - pid) // programs
            for back in range(0, last + 1):
                # Backwards: the rows read last may still be in the cache.
                item = pid + (last - back) * programs
                b = item // items
                if item % items < n // 2:
                    i = tl.load(pairs + 2 * item)
                    j = tl.load(pairs + 2 * item + 1)
                    detail = details + 5 * item
                    angle = rate
                    if ADAPT > 0:
                        if batch > 1:
                            mean = mean_square(words, b, items, n, tag, ALL)
                        now = new_scale(mean, tl.load(detail + 4), BETA2, ADAPT, FIRST)
                        angle = tl.where(now > 0, rate / now, 0.0)
                    theta = (angle * tl.load(detail)).to(tl.float32)
                    if OVERLAP:
                        # One after another, by `turn_kernel`; the raw step's angle may overflow.
                        tl.debug_barrier()
                        tl.store(detail, tl.where(tl.abs(theta) < float("inf"), theta, 0.0))
                    else:
                        ii = tl.load(detail + 1)
                        ij = tl.load(detail + 2)
                        jj = tl.load(detail + 3)
                        c, s, x, y, z, w = turned(theta, ii, ij, jj)
                        base = b.to(tl.int64) * n * n
                        mix_rows(W + base, i, j, n, x, y, z, w, BLOCK)
                        if MOMENTUM:
                            mix_rows(H + base, i, j, n, c, s, -s, c, BLOCK)
        if FIRST:
            if pid == 0:
                tl.store(step, t)
                if ADAPT > 0:
                    for b in range(0, batch):
                        mean = mean_square(words, b, items, n, tag, ALL)
                        updated = new_scale(mean, tl.load(scale + b), BETA2, ADAPT, FIRST)
                        tl.store(scale + b, updated.to(tl.float32))
        if OVERLAP or not DRAW:
            if t % TIDY == 0:
                # Rows that the chosen planes never bring together are tidied on a random pairing.
                barrier(waiting, programs, FENCE=True)
                for place in range(pid, total, programs):
                    b = place // items
                    if place % items < n // 2:
                        key = stream_key(0 * t + seed, t, stream + b + TIDY_FROM)
                        p, q = drawn_pairs(place % items + tl.arange(0, 1), n, 0, key, TIDY_BITS)
                        at = W + b.to(tl.int64) * n * n
                        tidy(at, tl.max(p, axis=0), tl.max(q, axis=0), n, BLOCK)
    else:
        if OVERLAP:
            for place in range(pid, total, programs):
                tl.store(details + 5 * place, 0.0)
        if FIRST:
            if pid == 0:
                tl.store(bad, tl.load(bad) + 1)
    if pid == 0:
        tl.store(launches, tl.load(launches) + 1)


@triton.jit
def turn_kernel(
    W, H, pairs, details, n, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Turn planes that may share axes, one after another; each program has columns of its own."""
    follow(EARLY)
    b = tl.program_id(1)
    items = (n + 1) // 2
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    at = (b * n).to(tl.int64) * n + columns
    for p in range(0, n // 2):
        place = b * items + p
        theta = tl.load(details + 5 * place)
        c = tl.cos(theta)
        s = tl.sin(theta)
        at_i = at + tl.load(pairs + 2 * place).to(tl.int64) * n
        at_j = at + tl.load(pairs + 2 * place + 1).to(tl.int64) * n
        wi = tl.load(W + at_i, mask=inside, other=0.0)
        wj = tl.load(W + at_j, mask=inside, other=0.0)
        tl.store(W + at_i, c * wi + s * wj, mask=inside)
        tl.store(W + at_j, c * wj - s * wi, mask=inside)
        if MOMENTUM:
            hi = tl.load(H + at_i, mask=inside, other=0.0)
            hj = tl.load(H + at_j, mask=inside, other=0.0)
            tl.store(H + at_i, c * hi + s * hj, mask=inside)
            tl.store(H + at_j, c * hj - s * hi, mask=inside)


@triton.jit
def tidy(W, i, j, n, BLOCK: tl.constexpr):
    """Repair the rounding of two rows: (3I − Gram)/2."""
    ii = 0.0
    ij = 0.0
    jj = 0.0
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < n
        wi = tl.load(W + i.to(tl.int64) * n + columns, mask=inside, other=0.0)
        wj = tl.load(W + j.to(tl.int64) * n + columns, mask=inside, other=0.0)
        ii += tl.sum(wi * wi)
        ij += tl.sum(wi * wj)
        jj += tl.sum(wj * wj)
    ij = -0.5 * ij
    mix_rows(W, i, j, n, 1.5 - 0.5 * ii, ij, ij, 1.5 - 0.5 * jj, BLOCK)


@triton.jit
def blend_kernel(H, G, flags, skip, found_inf, waiting, size, limit, WEIGHT, SKIP: tl.constexpr,
                 ALL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """H ← H + weight·(G − H) if no entry of G is beyond the limit; skip ← whether one is."""
    follow(EARLY)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    wrong = tl.zeros((BLOCK,), tl.float32)
    for start in range(pid * BLOCK, size, programs * BLOCK):
        at = tl.arange(0, BLOCK).to(tl.int64) + start
        # Written so that NaN is wrong too.
        g = tl.load(G + at, mask=at < size, other=0.0)
        wrong += tl.where(tl.abs(g) <= limit, 0.0, 1.0)
    tl.store(flags + pid, tl.sum(wrong))
    barrier(waiting, programs)
    every = tl.arange(0, ALL)
    seen = tl.load(flags + every, mask=every < programs, other=0.0, cache_modifier=".cg")
    good = tl.sum(seen) == 0.0
    if SKIP:
        good = good & (tl.load(found_inf) == 0)
    if pid == 0:
        tl.store(skip, tl.where(good, 0, 1))
    if good:
        for start in range(pid * BLOCK, size, programs * BLOCK):
            at = tl.arange(0, BLOCK).to(tl.int64) + start
            g = tl.load(G + at, mask=at < size, other=0.0)
            h = tl.load(H + at, mask=at < size, other=0.0)
            tl.store(H + at, h + WEIGHT * (g - h), mask=at < size)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


class Turner:
    """The buffers of one matrix or stack on its device, and the launches that use them."""

    def __init__(self, W: Tensor) -> None:
        device, n = W.device, W.shape[-1]
        self.batch = W.numel() // n**2
        self.items = (n + 1) // 2
        total = self.batch * self.items
        self.block = min(power_of_2(n), WIDE)
        # One program on each processor holds its pairs in registers; or two go over theirs twice.
        at_once = programs_at_once(device, 1, total)
        self.many = power_of_2(triton.cdiv(total, at_once))
        self.held = n <= self.block and self.many * self.block <= HELD
        self.programs = triton.cdiv(total, self.many)
        if not self.held:
            # Rows that are not aligned take more registers: two programs would not fit.
            each = 2 if n <= WIDE and n % 16 == 0 else 1
            self.programs = programs_at_once(device, each, total)
            self.many = power_of_2(triton.cdiv(total, self.programs))
        held = self.many * self.block if self.held else HELD
        self.warps = max(1, min(8, held // 256))
        self.pairs = torch.empty(self.batch, self.items, 2, dtype=torch.int32, device=device)
        # What every pair publishes to all programs, and what it keeps to itself.
        self.words = torch.zeros(total, dtype=torch.int64, device=device)
        self.details = torch.empty(total, 5, dtype=torch.float32, device=device)
        self.launches = torch.zeros((), dtype=torch.int64, device=device)
        self.flags = torch.empty(self.programs, dtype=torch.float32, device=device)
        self.skip = torch.zeros((), dtype=torch.int32, device=device)
        self.waiting = counters(device)

    def take(self, pairs: Tensor) -> None:
        """Use these pairs, (b, k, 2), in the next `descend`."""
        k = pairs.shape[1]
        self.pairs[:, :k] = pairs
        if k < self.items:
            # The axis that rests, where the pairs share none.
            axes = torch.arange(2 * k + 1, device=pairs.device).sum()
            self.pairs[:, k] = (axes - pairs.sum(dim=(1, 2)))[:, None].clamp(0, 2 * k)

    def blend(
        self, H: Tensor, G: Tensor, weight: float, found_inf: Tensor | None, limit: float
    ) -> None:
        """Move the momentum towards G, unless an entry of G is beyond the limit."""
        launch(
            blend_kernel, (self.programs,), H.device,
            H, G, self.flags, self.skip, found_inf, self.waiting, H.numel(), limit, weight,
            SKIP=found_inf is not None, ALL=power_of_2(self.programs), BLOCK=2048,
        )  # fmt: skip

    def descend(
        self,
        W: Tensor,
        G: Tensor,
        H: Tensor | None,
        scale: Tensor | None,
        step: Tensor,
        lr: float | Tensor,
        bad: Tensor,
        *,
        draw: bool,
        overlap: bool,
        skip: Tensor | None,
        adapt: str | None,
        betas: tuple[float, float],
        share: float,
        seed: int,
        stream: int,
        turn: int = 0,
    ) -> None:
        """Turn along `self.pairs`, or along random planes drawn into them, by lr·share."""
        n = W.shape[-1]
        drawn = shuffle_bits(n * (n - 1) // 2 if overlap else n)
        launch(
            descend_kernel, (self.programs,), W.device,
            W, G, H, self.pairs, self.words, self.details, scale, step, lr, skip, bad,
            self.launches, self.waiting, self.batch, n, seed, stream, share, turn,
            FIRST=turn == 0, DRAW=draw, OVERLAP=overlap, MOMENTUM=H is not None,
            SKIP=skip is not None,
            ADAPT={None: 0, "adam": 1, "matrix": 1, "adagrad": 2}[adapt],
            RATE_ON_DEVICE=isinstance(lr, Tensor),
            BETA2=betas[1], LOG_BETA1=_log(betas[0]), LOG_BETA2=_log(betas[1]),
            HELD=self.held and not overlap, BLOCK=self.block,
            ALL=power_of_2(self.items), MANY=self.many, BITS=drawn,
            TIDY_BITS=shuffle_bits(n), num_warps=self.warps,
        )  # fmt: skip
        if overlap:
            launch(
                turn_kernel, (triton.cdiv(n, 64), self.batch), W.device,
                W, H, self.pairs, self.details, n,
                MOMENTUM=H is not None, BLOCK=64, num_warps=2, together=False,
            )  # fmt: skip
