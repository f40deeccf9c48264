"""Prices for the nearly steepest pairing: belief propagation on all pairs of axes, in one launch.

Every axis bids for every other: the pair's worth, minus the other's price. An axis's price is the
best offer that it has from anybody else. After a few rounds, the pairs worth more than both prices
are nearly those of the steepest pairing; `matching` makes a pairing of them.
"""

import triton
import triton.language as tl

from givens.kernels.gpu.grid import barrier, follow


@triton.jit
def weight(S, unit, i, j, n, valid):
    """A_ij² in units of the largest |A|, so that squares neither vanish nor overflow."""
    # If n is odd, an extra axis n without weight takes the one that rests.
    valid = valid & (i < n) & (j < n)
    s = tl.load(S + i.to(tl.int64) * n + j, mask=valid, other=0.0) * unit
    return s * s


@triton.jit
def bid(w, rows, columns, real, old, new, old_bidder, new_bidder, count, u, inside):
    """Each row's best and second best offer at the current prices, and who makes the best.

    prices (2, count): the first and the second price of each axis. Before the first round prices
    are 0, and offers count half.
    """
    asking = inside & (u > 0)
    price = tl.load(old + columns, mask=asking, other=0.0, cache_modifier=".cg")
    second = tl.load(old + count + columns, mask=asking, other=0.0, cache_modifier=".cg")
    bidder = tl.load(old_bidder + columns, mask=asking, other=-1, cache_modifier=".cg")
    asked = tl.where(bidder[None, :] == rows[:, None], second[None, :], price[None, :])
    valid = inside[None, :] & (rows[:, None] != columns[None, :])
    offers = tl.where(valid, w - asked, float("-inf"))
    best, who = tl.max(offers, axis=1, return_indices=True)
    offers = tl.where(who[:, None] == columns[None, :], float("-inf"), offers)
    half = tl.where(u > 0, 1.0, 0.5)
    tl.store(new + rows, best * half, mask=real)
    tl.store(new + count + rows, tl.max(offers, axis=1) * half, mask=real)
    tl.store(new_bidder + rows, who, mask=real)


@triton.jit
def believe_kernel(
    S, units, prices, bidders, peaks, waiting, batch, n, count, members,
    BELIEFS: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Max-product belief propagation with O(n) state, in two buffers: current and next.

    An axis's price is its best offer from anybody else: the best one for all but the best bidder,
    and the second best for that one. With HELD every program keeps its rows in registers.
    """
    follow(EARLY)
    group = tl.program_id(0) // members
    groups = tl.num_programs(0) // members
    member = tl.program_id(0) % members
    waiting += group
    columns = tl.arange(0, BLOCK)
    inside = columns < count
    for b in range(group, batch, groups):
        s = S + (b * n).to(tl.int64) * n
        peak = peaks + b * count
        for start in range(member * ROWS, count, members * ROWS):
            rows = start + tl.arange(0, ROWS)
            valid = (
                (rows < n)[:, None] & (columns < n)[None, :] & (rows[:, None] != columns[None, :])
            )
            at = s + rows[:, None].to(tl.int64) * n + columns[None, :]
            largest = tl.max(tl.load(at, mask=valid, other=0.0), axis=1)
            tl.store(peak + rows, largest, mask=rows < count)
        barrier(waiting, members)
        top = tl.max(tl.load(peak + columns, mask=inside, other=0.0, cache_modifier=".cg"), axis=0)
        unit = 1.0 / tl.maximum(top, 1.2e-38)
        if member == 0:
            tl.store(units + b, unit)
        if HELD:
            mine = member * ROWS + tl.arange(0, ROWS)
            real = mine < count
            w = weight(s, unit, mine[:, None], columns[None, :], n, real[:, None] & inside[None, :])
        for u in range(0, BELIEFS + 1):
            # The last round ends in the first buffer.
            half = (BELIEFS - u) % 2
            new = prices + b * 4 * count + half * 2 * count
            old = prices + b * 4 * count + (1 - half) * 2 * count
            new_bidder = bidders + b * 2 * count + half * count
            old_bidder = bidders + b * 2 * count + (1 - half) * count
            if HELD:
                bid(w, mine, columns, real, old, new, old_bidder, new_bidder, count, u, inside)
            else:
                for start in range(member * ROWS, count, members * ROWS):
                    rows = start + tl.arange(0, ROWS)
                    held = rows < count
                    valid = held[:, None] & inside[None, :]
                    v = weight(s, unit, rows[:, None], columns[None, :], n, valid)
                    bid(v, rows, columns, held, old, new, old_bidder, new_bidder, count, u, inside)
            barrier(waiting, members)
