"""The Triton kernels that blend the momentum and turn the planes: `optim.step_` on a device.

Every kernel is one launch. W, G, H (b, n, n) row-major float32; pairs (b, ⌈n/2⌉, 2), whose last
row, where n is odd, names the resting axis twice.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from givens.kernels import TIDY_EVERY, TIDY_STREAM, WIDEST
from givens.kernels.grid import (
    barrier,
    counter,
    launch,
    permuted,
    programs_at_once,
    shuffle_bits,
    stream_key,
)

TIDY = tl.constexpr(TIDY_EVERY)
TIDY_FROM = tl.constexpr(TIDY_STREAM)


@triton.jit
def drawn_pair(p, n, key, BITS: tl.constexpr):
    """Pair p of the random pairing; the resting axis twice where n is odd."""
    i = permuted(2 * p, n, key, BITS)
    j = i
    if 2 * p + 1 < n:
        j = permuted(2 * p + 1, n, key, BITS)
    return tl.minimum(i, j), tl.maximum(i, j)


@triton.jit
def gram(W, i, j, n, BLOCK: tl.constexpr):
    """w_i·w_i, w_i·w_j, w_j·w_j."""
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
    return ii, ij, jj


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
def chosen_pair(pairs, item, items, n, seed, t, stream, DRAW: tl.constexpr, BITS: tl.constexpr):
    """The pair of an item, read or drawn; what is drawn is written down for the second half."""
    if DRAW:
        key = stream_key(0 * t + seed, t, stream + item // items)
        i, j = drawn_pair(item % items, n, key, BITS)
        tl.store(pairs + 2 * item, i)
        tl.store(pairs + 2 * item + 1, j)
    else:
        i = tl.load(pairs + 2 * item)
        j = tl.load(pairs + 2 * item + 1)
    return i, j


@triton.jit
def turned(theta, ii, ij, jj):
    """cosθ, sinθ, and the 2×2 turn after (3I − Gram)/2, which undoes the rounding of the pair."""
    c = tl.cos(theta)
    s = tl.sin(theta)
    x = 1.5 - 0.5 * ii
    y = 1.5 - 0.5 * jj
    z = -0.5 * ij
    return c, s, c * x + s * z, c * z + s * y, c * z - s * x, c * y - s * z


@triton.jit(do_not_specialize=["seed", "stream", "lr"])
def descend_kernel(
    W,
    G,
    H,
    pairs,
    sums,
    scale,
    step,
    lr,
    skip,
    bad,
    waiting,
    batch,
    n,
    seed,
    stream,
    DRAW: tl.constexpr,
    MOMENTUM: tl.constexpr,
    ADAPT: tl.constexpr,
    SKIP: tl.constexpr,
    RATE_ON_DEVICE: tl.constexpr,
    SIGN: tl.constexpr,
    BETA2: tl.constexpr,
    LOG_BETA1: tl.constexpr,
    LOG_BETA2: tl.constexpr,
    STACK: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL: tl.constexpr,
    BITS: tl.constexpr,
):
    """Derivatives of the chosen planes, then, once all are known, angles and turns.

    sums holds, for every pair, A_ij; then what the turn needs of it; then the scales so far. With
    HELD every program has one pair, and keeps its rows in registers in between.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    items = (n + 1) // 2
    total = batch * items
    details = sums + total
    old_scales = details + 4 * total
    columns = tl.arange(0, BLOCK)
    t = tl.load(step) + 1
    if HELD:
        i, j = chosen_pair(pairs, pid, items, n, seed, t, stream, DRAW, BITS)
        base = (pid // items).to(tl.int64) * n * n
        at_i = base + i.to(tl.int64) * n + columns
        at_j = base + j.to(tl.int64) * n + columns
        inside = columns < n
        wi = tl.load(W + at_i, mask=inside, other=0.0)
        wj = tl.load(W + at_j, mask=inside, other=0.0)
        gi = tl.load(G + at_i, mask=inside, other=0.0)
        gj = tl.load(G + at_j, mask=inside, other=0.0)
        a = tl.sum(gi * wj - wi * gj)
        ii = tl.sum(wi * wi)
        ij = tl.sum(wi * wj)
        jj = tl.sum(wj * wj)
        m = a
        if MOMENTUM:
            hi = tl.load(H + at_i, mask=inside, other=0.0)
            hj = tl.load(H + at_j, mask=inside, other=0.0)
            m = tl.sum(hi * wj - wi * hj)
        tl.store(sums + pid, a)
        if ADAPT > 0:
            if pid % items == 0:
                tl.store(old_scales + pid // items, tl.load(scale + pid // items))
    else:
        for item in range(pid, total, programs):
            b = item // items
            base = b.to(tl.int64) * n * n
            i, j = chosen_pair(pairs, item, items, n, seed, t, stream, DRAW, BITS)
            a = 0.0
            m = 0.0
            ii = 0.0
            ij = 0.0
            jj = 0.0
            for start in range(0, n, BLOCK):
                at_i = base + i.to(tl.int64) * n + start + columns
                at_j = base + j.to(tl.int64) * n + start + columns
                inside = start + columns < n
                wi = tl.load(W + at_i, mask=inside, other=0.0, eviction_policy="evict_last")
                wj = tl.load(W + at_j, mask=inside, other=0.0, eviction_policy="evict_last")
                gi = tl.load(G + at_i, mask=inside, other=0.0, eviction_policy="evict_first")
                gj = tl.load(G + at_j, mask=inside, other=0.0, eviction_policy="evict_first")
                a += tl.sum(gi * wj - wi * gj)
                ii += tl.sum(wi * wi)
                ij += tl.sum(wi * wj)
                jj += tl.sum(wj * wj)
                if MOMENTUM:
                    hi = tl.load(H + at_i, mask=inside, other=0.0)
                    hj = tl.load(H + at_j, mask=inside, other=0.0)
                    m += tl.sum(hi * wj - wi * hj)
            tl.store(sums + item, a)
            if MOMENTUM:
                tl.store(details + 4 * item, m)
            else:
                tl.store(details + 4 * item, a)
            tl.store(details + 4 * item + 1, ii)
            tl.store(details + 4 * item + 2, ij)
            tl.store(details + 4 * item + 3, jj)
            if ADAPT > 0:
                if item % items == 0:
                    tl.store(old_scales + b, tl.load(scale + b))
    good = t > 0
    if SKIP:
        good = good & (tl.load(skip) == 0)
    steps = t.to(tl.float64)
    rate = 0.0 * steps + SIGN * (tl.load(lr) if RATE_ON_DEVICE else lr)
    if ADAPT == 0:
        rate = rate * 0.7071067811865476
    if ADAPT == 1:
        rate = rate * tl.sqrt(1 - tl.exp(steps * LOG_BETA2))
        if MOMENTUM:
            rate = rate / (1 - tl.exp(steps * LOG_BETA1))
    barrier(waiting)

    for b in range(0, batch):
        good = good & (mean_square(sums, b, items, n, ALL) < float("inf"))
    if good:
        angle = rate
        if ADAPT > 0 and not STACK:
            now = new_scale(sums, old_scales, 0, items, n, BETA2, ADAPT, ALL)
            angle = tl.where(now > 0, rate / now, 0.0)
        if HELD:
            if pid % items < n // 2:
                if ADAPT > 0 and STACK:
                    now = new_scale(sums, old_scales, pid // items, items, n, BETA2, ADAPT, ALL)
                    angle = tl.where(now > 0, rate / now, 0.0)
                c, s, x, y, z, w = turned((angle * m).to(tl.float32), ii, ij, jj)
                tl.store(W + at_i, x * wi + y * wj, mask=inside)
                tl.store(W + at_j, z * wi + w * wj, mask=inside)
                if MOMENTUM:
                    tl.store(H + at_i, c * hi + s * hj, mask=inside)
                    tl.store(H + at_j, c * hj - s * hi, mask=inside)
        else:
            last = (total - 1 - pid) // programs
            for back in range(0, last + 1):
                # Backwards: the rows read last are still in the cache.
                item = pid + (last - back) * programs
                b = item // items
                if item % items < n // 2:
                    if ADAPT > 0 and STACK:
                        now = new_scale(sums, old_scales, b, items, n, BETA2, ADAPT, ALL)
                        angle = tl.where(now > 0, rate / now, 0.0)
                    i = tl.load(pairs + 2 * item)
                    j = tl.load(pairs + 2 * item + 1)
                    detail = details + 4 * item
                    theta = (angle * tl.load(detail)).to(tl.float32)
                    ii = tl.load(detail + 1)
                    ij = tl.load(detail + 2)
                    jj = tl.load(detail + 3)
                    c, s, x, y, z, w = turned(theta, ii, ij, jj)
                    base = b.to(tl.int64) * n * n
                    mix_rows(W + base, i, j, n, x, y, z, w, BLOCK)
                    if MOMENTUM:
                        mix_rows(H + base, i, j, n, c, s, -s, c, BLOCK)
        if pid == 0:
            tl.store(step, t)
            if ADAPT > 0:
                for b in range(0, batch):
                    now = new_scale(sums, old_scales, b, items, n, BETA2, ADAPT, ALL)
                    tl.store(scale + b, now.to(tl.float32))
        if not DRAW:
            if t % TIDY == 0:
                # Rows that the chosen planes never bring together are tidied on a random pairing.
                barrier(waiting, FENCE=True)
                for item in range(pid, total, programs):
                    b = item // items
                    if item % items < n // 2:
                        key = stream_key(0 * t + seed, t, stream + b + TIDY_FROM)
                        i, j = drawn_pair(item % items, n, key, BITS)
                        at = W + b.to(tl.int64) * n * n
                        ii, ij, jj = gram(at, i, j, n, BLOCK)
                        ij = -0.5 * ij
                        mix_rows(at, i, j, n, 1.5 - 0.5 * ii, ij, ij, 1.5 - 0.5 * jj, BLOCK)
    else:
        if pid == 0:
            tl.store(bad, tl.load(bad) + 1)


@triton.jit
def mean_square(sums, b, items, n, ALL: tl.constexpr):
    """The mean of A_ij² over the planes, summed in one order by every program."""
    index = tl.arange(0, ALL)
    at = sums + b * items + index
    seen = tl.load(at, mask=index < items, other=0.0, cache_modifier=".cg").to(tl.float64)
    return tl.sum(seen * seen) / (n // 2)


@triton.jit
def new_scale(
    sums, old_scales, b, items, n, BETA2: tl.constexpr, ADAPT: tl.constexpr, ALL: tl.constexpr
):
    """scale² ← decay·scale² + gain·mean(A_ij²)."""
    old = tl.load(old_scales + b, cache_modifier=".cg").to(tl.float64)
    mean = mean_square(sums, b, items, n, ALL)
    if ADAPT == 1:
        squared = BETA2 * old * old + (1 - BETA2) * mean
    else:
        squared = old * old + mean
    return tl.sqrt(squared)


@triton.jit
def blend_kernel(H, G, flags, skip, found_inf, waiting, size, WEIGHT, SKIP: tl.constexpr,
                 ALL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """H ← H + weight·(G − H) if all of G is finite; skip ← whether it is not."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    wrong = tl.zeros((BLOCK,), tl.float32)
    for start in range(pid * BLOCK, size, programs * BLOCK):
        at = tl.arange(0, BLOCK).to(tl.int64) + start
        # 0·x is 0 for a finite x and NaN for any other.
        wrong += 0.0 * tl.load(G + at, mask=at < size, other=0.0)
    tl.store(flags + pid, tl.sum(wrong))
    barrier(waiting)
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
        self.warps = 1 if n <= 256 else 2 if n <= 512 else 4 if n <= 1024 else 8
        self.programs = programs_at_once(device, 4 if n <= 1024 else 2, self.batch * self.items)
        self.held = self.programs == self.batch * self.items and n <= WIDEST
        self.pairs = torch.empty(self.batch, self.items, 2, dtype=torch.int32, device=device)
        self.sums = torch.empty(self.batch * (5 * self.items + 1), device=device)
        self.flags = torch.empty(self.programs, device=device)
        self.skip = torch.zeros((), dtype=torch.int32, device=device)
        self.waiting = counter(device)

    def take(self, pairs: Tensor) -> None:
        """Use these pairs, (b, k, 2), in the next `descend`."""
        k = pairs.shape[1]
        self.pairs[:, :k] = pairs
        if k < self.items:
            axes = torch.arange(2 * k + 1, device=pairs.device).sum()
            self.pairs[:, k] = (axes - pairs.sum(dim=(1, 2)))[:, None]

    def blend(self, H: Tensor, G: Tensor, weight: float, found_inf: Tensor | None) -> None:
        """Move the momentum towards G, unless G is not finite."""
        launch(
            blend_kernel, self.programs, H.device,
            H, G, self.flags, self.skip, found_inf, self.waiting, H.numel(), weight,
            SKIP=found_inf is not None, ALL=triton.next_power_of_2(self.programs), BLOCK=2048,
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
        skip: Tensor | None,
        adapt: str | None,
        betas: tuple[float, float],
        maximize: bool,
        seed: int,
        stream: int,
    ) -> None:
        """Turn along `self.pairs`, or along a random pairing drawn into them."""
        n = W.shape[-1]
        launch(
            descend_kernel, self.programs, W.device,
            W, G, H, self.pairs, self.sums, scale, step, lr, skip, bad, self.waiting,
            self.batch, n, seed, stream,
            DRAW=draw, MOMENTUM=H is not None, SKIP=skip is not None,
            ADAPT={None: 0, "adam": 1, "adagrad": 2}[adapt],
            RATE_ON_DEVICE=isinstance(lr, Tensor), SIGN=1 if maximize else -1,
            BETA2=betas[1], LOG_BETA1=_log(betas[0]), LOG_BETA2=_log(betas[1]),
            STACK=self.batch > 1, HELD=self.held,
            BLOCK=min(triton.next_power_of_2(n), WIDEST), ALL=triton.next_power_of_2(self.items),
            BITS=shuffle_bits(n), num_warps=self.warps,
        )  # fmt: skip
