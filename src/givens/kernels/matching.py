"""The greedy pairing on a device: locally dominant rounds in one launch, nothing sorted.

Each program of the grid looks after some rows. A round: every program reads all pointers, so it
knows who is matched without being told; rows whose favourite is taken look again; barrier. About
half of the axes are matched in each round, and once few enough are free one program finishes them
in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from givens.kernels.grid import barrier, counter, hashed, launch, programs_at_once, unhashed

NOTHING = tl.constexpr(-(2**63))
TILE = 64


@triton.jit
def packed(weights, i, j, n, valid):
    """A weight and the hash that breaks its ties in one integer, the same for (i, j) and (j, i).

    The largest of a row is then one reduction, exact ties included, and the pair can be read back
    from the hash, which is a bijection.
    """
    bits = weights.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    code = (tl.minimum(i, j) * n + tl.maximum(i, j)).to(tl.uint32)
    return tl.where(valid, (order.to(tl.int64) << 32) | hashed(code).to(tl.int64), NOTHING)


@triton.jit
def partner_of(key, i, n):
    """Whom the packed pair of axis i joins it to."""
    code = unhashed((key & 0xFFFFFFFF).to(tl.uint32)).to(tl.int64)
    low = (code // n).to(tl.int32)
    high = (code % n).to(tl.int32)
    return low + high - i


@triton.jit
def finish(S, n, index, left, partner, TILE: tl.constexpr):
    """Match the axes listed in `index` (TILE,) among themselves, in registers."""
    local = tl.arange(0, TILE)
    inside = local < left
    valid = inside[:, None] & inside[None, :] & (local[:, None] != local[None, :])
    at = index[:, None].to(tl.int64) * n + index[None, :]
    weights = tl.load(S + at, mask=valid, other=0.0)
    keys = packed(weights, index[:, None], index[None, :], n, valid)
    while left > 1:
        best = tl.max(keys, axis=1)
        # A pair that is the best of both its axes; the keys are symmetric.
        mutual = (keys == best[:, None]) & (keys == best[None, :]) & (keys != NOTHING)
        other = tl.max(tl.where(mutual, index[None, :], -1), axis=1)
        matched = other >= 0
        tl.store(partner + index, other, mask=matched)
        keys = tl.where(matched[:, None] | matched[None, :], NOTHING, keys)
        left -= tl.sum(matched.to(tl.int32), axis=0)


@triton.jit
def write_pairs(partner, pairs, n, BLOCK: tl.constexpr):
    """The list of pairs from everybody's partner; the axis that rests comes last, twice."""
    axes = tl.arange(0, BLOCK)
    other = tl.load(partner + axes, mask=axes < n, other=-1, cache_modifier=".cg")
    chosen = (axes < n) & (other > axes)
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(pairs + 2 * place, axes, mask=chosen)
    tl.store(pairs + 2 * place + 1, other, mask=chosen)
    rests = (axes < n) & (other < 0)
    tl.store(pairs + 2 * (n // 2) + 0 * axes, axes, mask=rests)
    tl.store(pairs + 2 * (n // 2) + 1 + 0 * axes, axes, mask=rests)


@triton.jit
def match_small_kernel(S, partner, pairs, n, TILE: tl.constexpr):
    """One program for each matrix of a stack, n ≤ TILE."""
    b = tl.program_id(0).to(tl.int64)
    axes = tl.arange(0, TILE)
    partner += b * n
    tl.store(partner + axes, -1 + 0 * axes, mask=axes < n)
    tl.debug_barrier()
    finish(S + b * n * n, n, axes, n + 0 * tl.program_id(0), partner, TILE)
    tl.debug_barrier()
    write_pairs(partner, pairs + b * 2 * ((n + 1) // 2), n, TILE)


@triton.jit
def favourites(S, rows, columns, n, valid):
    """The best valid partner of each row."""
    at = rows[:, None].to(tl.int64) * n + columns[None, :]
    weights = tl.load(S + at, mask=valid, other=0.0)
    best = tl.max(packed(weights, rows[:, None], columns[None, :], n, valid), axis=1)
    return partner_of(best, rows, n)


@triton.jit
def match_kernel(
    S, best, listed, partner, pairs, waiting, n,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The whole grid on one matrix, n > TILE. best (2, n): what was, and what will be."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    for start in range(pid * ROWS, n, programs * ROWS):
        rows = start + tl.arange(0, ROWS)
        valid = (rows < n)[:, None] & inside[None, :] & (rows[:, None] != columns[None, :])
        found = favourites(S, rows, columns, n, valid)
        tl.store(best + rows, found, mask=rows < n)
    barrier(waiting)
    now = best
    later = best + n
    pointed = tl.load(now + columns, mask=inside, other=0, cache_modifier=".cg")
    back = tl.load(now + pointed, mask=inside, other=0, cache_modifier=".cg")
    free = inside & (back != columns)
    left = tl.sum(free.to(tl.int32), axis=0)
    while left > TILE:
        for start in range(pid * ROWS, n, programs * ROWS):
            rows = start + tl.arange(0, ROWS)
            real = rows < n
            mine = tl.load(now + rows, mask=real, other=0, cache_modifier=".cg")
            its = tl.load(now + mine, mask=real, other=0, cache_modifier=".cg")
            that = tl.load(now + its, mask=real, other=0, cache_modifier=".cg")
            # Free, but the favourite is not: it points at somebody who points back.
            again = real & (its != rows) & (that == mine)
            if tl.max(again.to(tl.int32), axis=0) > 0:
                valid = again[:, None] & free[None, :] & (rows[:, None] != columns[None, :])
                found = favourites(S, rows, columns, n, valid)
                mine = tl.where(again, found, mine)
            tl.store(later + rows, mine, mask=real)
        barrier(waiting)
        swap = now
        now = later
        later = swap
        pointed = tl.load(now + columns, mask=inside, other=0, cache_modifier=".cg")
        back = tl.load(now + pointed, mask=inside, other=0, cache_modifier=".cg")
        free = inside & (back != columns)
        left = tl.sum(free.to(tl.int32), axis=0)
    if pid == 0:
        place = tl.cumsum(free.to(tl.int32), axis=0) - 1
        tl.store(listed + place, columns, mask=free)
        tl.store(partner + columns, tl.where(free, -1, pointed), mask=inside)
        tl.debug_barrier()
        local = tl.arange(0, TILE)
        index = tl.load(listed + local, mask=local < left, other=0, cache_modifier=".cg")
        finish(S, n, index, left, partner, TILE)
        tl.debug_barrier()
        write_pairs(partner, pairs, n, BLOCK)


@triton.jit
def magnitudes_kernel(H, W, S, n, SIDE: tl.constexpr, DEPTH: tl.constexpr):
    """S ← |H Wᵀ − W Hᵀ|, two mirrored tiles to a program, products in TF32.

    NaN becomes 0, so that matching ends; the derivatives of the chosen planes will find it.
    """
    r = tl.program_id(0)
    c = tl.program_id(1)
    if r <= c:
        base = tl.program_id(2).to(tl.int64) * n * n
        rows = r * SIDE + tl.arange(0, SIDE)
        columns = c * SIDE + tl.arange(0, SIDE)
        depth = tl.arange(0, DEPTH)
        at_rows = base + rows[:, None].to(tl.int64) * n + depth[None, :]
        at_columns = base + columns[:, None].to(tl.int64) * n + depth[None, :]
        plus = tl.zeros((SIDE, SIDE), tl.float32)
        minus = tl.zeros((SIDE, SIDE), tl.float32)
        for start in range(0, n, DEPTH):
            deep = (start + depth < n)[None, :]
            here = (rows < n)[:, None] & deep
            there = (columns < n)[:, None] & deep
            h_here = tl.load(H + at_rows + start, mask=here, other=0.0)
            w_there = tl.load(W + at_columns + start, mask=there, other=0.0)
            plus = tl.dot(h_here, tl.trans(w_there), plus, input_precision="tf32")
            w_here = tl.load(W + at_rows + start, mask=here, other=0.0)
            h_there = tl.load(H + at_columns + start, mask=there, other=0.0)
            minus = tl.dot(w_here, tl.trans(h_there), minus, input_precision="tf32")
        a = tl.abs(plus - minus)
        a = tl.where(a == a, a, 0.0)
        at = base + rows[:, None].to(tl.int64) * n + columns[None, :]
        mirrored = base + columns[:, None].to(tl.int64) * n + rows[None, :]
        if r < c:
            tl.store(S + at, a, mask=(rows < n)[:, None] & (columns < n)[None, :])
            tl.store(S + mirrored, tl.trans(a), mask=(columns < n)[:, None] & (rows < n)[None, :])
        else:
            # On the diagonal the two halves may differ in the last bit; the upper one is kept.
            upper = rows[:, None] < columns[None, :]
            valid = (rows < n)[:, None] & (columns < n)[None, :]
            tl.store(S + at, a, mask=valid & upper)
            tl.store(S + mirrored, tl.trans(a), mask=tl.trans(valid & upper))


class Matcher:
    """The buffers of the matchings of one matrix or stack, and the launches that use them."""

    def __init__(self, W: Tensor) -> None:
        n, device = W.shape[-1], W.device
        batch = W.numel() // n**2
        self.batch, self.n = batch, n
        self.product = torch.empty(batch, n, n, device=device)
        self.small = n <= TILE
        self.block = triton.next_power_of_2(n)
        self.rows = max(1, min(8, 8192 // self.block))
        self.programs = programs_at_once(device, 1, triton.cdiv(n, self.rows))
        self.best = torch.empty(2, n, dtype=torch.int32, device=device)
        self.listed = torch.empty(TILE, dtype=torch.int32, device=device)
        self.partner = torch.empty(batch, n, dtype=torch.int32, device=device)
        self.waiting = counter(device)

    def magnitudes(self, H: Tensor, W: Tensor) -> Tensor:
        """|H Wᵀ − W Hᵀ|, up to TF32, in a buffer that the next call overwrites."""
        side, depth = (64, 64) if self.n <= 512 else (64, 32) if self.n <= 1024 else (128, 32)
        tiles = triton.cdiv(self.n, side)
        magnitudes_kernel[(tiles, tiles, self.batch)](
            H, W, self.product, self.n, SIDE=side, DEPTH=depth, num_warps=4 if side < 128 else 8
        )
        return self.product

    def greedy(self, S: Tensor, pairs: Tensor) -> None:
        """Write the greedy pairing of the weights S into `pairs`."""
        if self.small:
            match_small_kernel[(self.batch,)](
                S, self.partner, pairs, self.n, TILE=max(16, self.block), num_warps=8
            )
            return
        for b in range(self.batch):
            launch(
                match_kernel, self.programs, S.device,
                S[b], self.best, self.listed, self.partner[b], pairs[b], self.waiting, self.n,
                ROWS=self.rows, BLOCK=self.block, TILE=TILE, num_warps=8,
            )  # fmt: skip
