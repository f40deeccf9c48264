"""The greedy and the nearly steepest pairing on a device: matchings in one launch, nothing sorted.

A matching alternates two stages. The whole grid lists the few best free partners of every free
item. Then a single program goes through rounds: each free item points at the first of its list that
is still free, and two items that point at each other are matched, until the lists are used up. The
remaining items, an eighth or less, get new lists; the last few are matched in registers. The result
is exactly greedy, since an item either has its best free partner on its list or waits.

The items are axes and their values |A_ij|; or, for the steepest pairing, what the prices of belief
propagation (`beliefs`) leave of A_ij²; or pairs, and what exchanging two of them gains.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from givens.kernels.gpu.beliefs import believe_kernel, weight
from givens.kernels.gpu.grid import (
    arrive,
    barrier,
    counters,
    follow,
    hashed,
    power_of_2,
    programs_at_once,
    unhashed,
)
from givens.kernels.gpu.launch import launch
from givens.kernels.gpu.magnitudes import magnitudes_kernel

NOTHING = tl.constexpr(-(2**63))
TAKEN = tl.constexpr(-2)
# So few that are left are finished in registers.
TILE = 64
# How many partners an item lists: more make fewer turns of the grid, but longer ones.
LISTED = 8
# Rounds of belief propagation before the one rounding, and of exchanges after it.
BELIEFS = 11
EXCHANGES = 1

# What the value of a pair of items is.
MAGNITUDE = tl.constexpr(0)
PRICED = tl.constexpr(1)
EXCHANGED = tl.constexpr(2)


@triton.jit
def packed(values, i, j, count, valid):
    """A value and the hash that breaks its ties in one integer, the same for (i, j) and (j, i).

    The largest of a row is then one reduction, exact ties included, and the pair can be read back
    from the hash, which is a bijection.
    """
    bits = values.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    code = (tl.minimum(i, j) * count + tl.maximum(i, j)).to(tl.uint32)
    return tl.where(valid, (order.to(tl.int64) << 32) | hashed(code).to(tl.int64), NOTHING)


@triton.jit
def partner_of(key, i, count):
    """The partner of item i in a packed pair."""
    code = unhashed((key & 0xFFFFFFFF).to(tl.uint32))
    low = code // (0 * code + count)
    return (low + (code - low * count)).to(tl.int32) - i


@triton.jit
def values(S, unit, first, second, bidder, pairs, rows, columns, n, valid, VALUE: tl.constexpr):
    """The values of all pairs of these items, (rows, columns), symmetric to the last bit."""
    i = rows[:, None]
    k = columns[None, :]
    if VALUE == MAGNITUDE:
        value = tl.load(S + i.to(tl.int64) * n + k, mask=valid, other=0.0)
    elif VALUE == PRICED:
        # What k asks of i, and i of k: its best offer, but of its best bidder the second best.
        his = tl.where(tl.load(bidder + k) == i, tl.load(second + k), tl.load(first + k))
        mine = tl.where(tl.load(bidder + i) == k, tl.load(second + i), tl.load(first + i))
        value = weight(S, unit, i, k, n, valid) - (his + mine)
    else:
        now, straight, crossed = exchange(S, unit, pairs, i, k, n, valid)
        value = tl.maximum(tl.maximum(straight, crossed) - now, 0.0)
    return value


@triton.jit
def exchange(S, unit, pairs, p, q, n, valid):
    """The weights of the pairs p and q as they are, and joined straight and crosswise.

    The axis that rests makes a pair with nothing, of weight 0.
    """
    a = tl.load(pairs + 2 * p)
    b = tl.load(pairs + 2 * p + 1)
    c = tl.load(pairs + 2 * q)
    d = tl.load(pairs + 2 * q + 1)
    two = valid & (a != b) & (c != d)
    ac = weight(S, unit, a, c, n, valid)
    bd = weight(S, unit, b, d, n, two)
    ad = weight(S, unit, a, d, n, valid & (c != d))
    bc = weight(S, unit, b, c, n, valid & (a != b))
    ab = weight(S, unit, a, b, n, valid & (a != b))
    cd = weight(S, unit, c, d, n, valid & (c != d))
    return ab + cd, ac + bd, ad + bc


@triton.jit
def free_items(listed, place, left, count):
    """The free items at these places of their list; before the first round all items are free."""
    some = tl.where(left < count, left, 0)
    item = tl.load(listed + place, mask=place < some, other=0, cache_modifier=".cg")
    return tl.where(place < left - some, place, item)


@triton.jit
def finish(
    S, unit, first, second, bidder, pairs, n, count, listed, left, partner,
    VALUE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Match the last few items with each other, in registers."""
    local = tl.arange(0, TILE)
    index = free_items(listed, local, left, count)
    inside = local < left
    valid = inside[:, None] & inside[None, :] & (local[:, None] != local[None, :])
    value = values(S, unit, first, second, bidder, pairs, index, index, n, valid, VALUE)
    keys = packed(value, index[:, None], index[None, :], count, valid)
    while left > 1:
        best = tl.max(keys, axis=1)
        # A pair that is the best of both its items; the keys are symmetric.
        mutual = (keys == best[:, None]) & (keys == best[None, :]) & (keys != NOTHING)
        other = tl.max(tl.where(mutual, index[None, :], -1), axis=1)
        matched = other >= 0
        tl.store(partner + index, other, mask=matched)
        keys = tl.where(matched[:, None] | matched[None, :], NOTHING, keys)
        left -= tl.sum(matched.to(tl.int32), axis=0)


@triton.jit
def list_best(
    S, unit, first, second, bidder, pairs, n, count, listed, lists, left, member, members,
    VALUE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """List the best free partners of every free item in lists (LISTED, count), the best first."""
    places = tl.arange(0, BLOCK)
    held = places < left
    columns = free_items(listed, places, left, count)
    for start in range(member * ROWS, left, members * ROWS):
        place = start + tl.arange(0, ROWS)
        real = place < left
        rows = free_items(listed, place, left, count)
        valid = real[:, None] & held[None, :] & (rows[:, None] != columns[None, :])
        value = values(S, unit, first, second, bidder, pairs, rows, columns, n, valid, VALUE)
        keys = packed(value, rows[:, None], columns[None, :], count, valid)
        for k in tl.static_range(LISTED):
            best = tl.max(keys, axis=1)
            found = tl.where(best == NOTHING, -1, partner_of(best, rows, count))
            tl.store(lists + k * count + rows, found, mask=real)
            if k + 1 < LISTED:
                keys = tl.where(keys == best[:, None], NOTHING, keys)


@triton.jit
def match_lists(lists, pointers, partner, count, free, BLOCK: tl.constexpr, LISTED: tl.constexpr):
    """Match in one program until the lists are used up; returns which items are still free.

    pointers (2, count): whom each item points at, in this round and in the next.
    """
    items = tl.arange(0, BLOCK)
    inside = items < count
    now = pointers
    later = pointers + count
    rank = 0 * items
    mine = tl.load(lists + items, mask=free, other=-1)
    tl.store(now + items, tl.where(free, mine, TAKEN), mask=inside)
    moved = 1
    while moved > 0:
        moves = items < 0
        # Whether anything still moves is worth asking every few rounds only.
        for _ in tl.static_range(4):
            tl.debug_barrier()
            asking = free & (mine >= 0)
            answer = tl.load(now + mine, mask=asking, other=-1)
            mutual = asking & (answer == items)
            refused = asking & (answer == TAKEN)
            moves = moves | mutual | refused
            tl.store(partner + items, mine, mask=mutual)
            free = free & (mutual == 0)
            rank += refused.to(tl.int32)
            listed = refused & (rank < LISTED)
            following = tl.load(lists + rank * count + items, mask=listed, other=-1)
            mine = tl.where(refused, following, mine)
            # Into the other buffer: somebody may still be reading this one.
            tl.store(later + items, tl.where(free, mine, TAKEN), mask=inside)
            swap = now
            now = later
            later = swap
        moved = tl.max(moves.to(tl.int32), axis=0)
    return free


@triton.jit
def write_pairs(S, partner, pairs, worth, n, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    """Write the list of pairs, given each axis's partner; an unpaired axis comes last, twice.

    A matching by prices is written only if it weighs more than the pairs already there.
    """
    axes = tl.arange(0, BLOCK)
    other = tl.load(partner + axes, mask=axes < n, other=-1)
    chosen = (axes < n) & (other > axes) & (other < n)
    s = tl.load(S + axes.to(tl.int64) * n + other, mask=chosen, other=0.0).to(tl.float64)
    total = tl.sum(s * s)
    better = total >= 0
    if VALUE == PRICED:
        better = total > tl.load(worth)
    if better:
        place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(pairs + 2 * place, axes, mask=chosen)
        tl.store(pairs + 2 * place + 1, other, mask=chosen)
        rests = (axes < n) & ((other < 0) | (other == n))
        tl.store(pairs + 2 * (n // 2) + 0 * axes, axes, mask=rests)
        tl.store(pairs + 2 * (n // 2) + 1 + 0 * axes, axes, mask=rests)
        tl.store(worth, total)


@triton.jit
def exchange_pairs(S, unit, partner, pairs, n, count, BLOCK: tl.constexpr):
    """Exchange the axes of matched pairs where that gains; an unpaired axis stays last, twice."""
    p = tl.arange(0, BLOCK)
    q = tl.load(partner + p, mask=p < count, other=-1)
    chosen = (p < count) & (q > p)
    q = tl.where(chosen, q, p)
    now, straight, crossed = exchange(S, unit, pairs, p % count, q % count, n, chosen)
    gains = chosen & (tl.maximum(straight, crossed) > now)
    cross = crossed > straight
    a = tl.load(pairs + 2 * p, mask=chosen, other=0)
    b = tl.load(pairs + 2 * p + 1, mask=chosen, other=0)
    c = tl.load(pairs + 2 * q, mask=chosen, other=0)
    d = tl.load(pairs + 2 * q + 1, mask=chosen, other=0)
    rests = c == d
    # (a, c) and (b, d), or (a, d) and (b, c); if c rests, b or a does then.
    with_c = tl.where(cross & rests, b, a)
    left_over = tl.where(cross & rests, a, b)
    met = tl.where(cross & (c != d), d, c)
    last = tl.where(rests, left_over, tl.where(cross, c, d))
    tl.debug_barrier()
    tl.store(pairs + 2 * p, tl.minimum(with_c, met), mask=gains)
    tl.store(pairs + 2 * p + 1, tl.maximum(with_c, met), mask=gains)
    tl.store(pairs + 2 * q, tl.minimum(left_over, last), mask=gains)
    tl.store(pairs + 2 * q + 1, tl.maximum(left_over, last), mask=gains)


@triton.jit
def match_kernel(
    S, units, prices, bidders, worths, lists, listed, lefts, pointers, partners, pairs, waiting,
    batch, n, count, members,
    VALUE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    LISTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Groups of `members` programs, each with a matrix of the stack at a time.

    Scratch for each group: lists (LISTED, count), listed (count,), lefts, pointers (2, count),
    partners (count,).
    """
    follow(EARLY)
    group = tl.program_id(0) // members
    groups = tl.num_programs(0) // members
    member = tl.program_id(0) % members
    waiting += group
    lists += group * LISTED * count
    listed += group * count
    lefts += group
    pointers += group * 2 * count
    partner = partners + group * count
    items = tl.arange(0, BLOCK)
    inside = items < count
    for b in range(group, batch, groups):
        s = S + (b * n).to(tl.int64) * n
        pair = pairs + b * 2 * ((n + 1) // 2)
        worth = worths + b
        first = prices + b * 4 * count
        second = first + count
        bidder = bidders + b * 2 * count
        unit = 1.0
        if VALUE != MAGNITUDE:
            unit = tl.load(units + b)
        left = count
        free = inside
        if member == 0:
            tl.store(partner + items, -1 + 0 * items, mask=inside)
        while left > TILE:
            list_best(
                s, unit, first, second, bidder, pair, n, count, listed, lists, left, member,
                members, VALUE, ROWS, BLOCK, LISTED,
            )  # fmt: skip
            barrier(waiting, members, FENCE=True)
            if member == 0:
                free = match_lists(lists, pointers, partner, count, free, BLOCK, LISTED)
                place = tl.cumsum(free.to(tl.int32), axis=0) - 1
                tl.store(listed + place, items, mask=free)
                left = tl.sum(free.to(tl.int32), axis=0)
                tl.store(lefts, left)
                # The others wait for this one, and it for nobody.
                arrive(waiting)
            else:
                barrier(waiting, members)
                left = tl.load(lefts, cache_modifier=".cg")
        if member == 0:
            tl.debug_barrier()
            if left > TILE // 2:
                finish(
                    s, unit, first, second, bidder, pair, n, count, listed, left, partner,
                    VALUE, TILE,
                )  # fmt: skip
            else:
                finish(
                    s, unit, first, second, bidder, pair, n, count, listed, left, partner,
                    VALUE, TILE // 2,
                )  # fmt: skip
            tl.debug_barrier()
            if VALUE == EXCHANGED:
                exchange_pairs(s, unit, partner, pair, n, count, BLOCK)
            else:
                write_pairs(s, partner, pair, worth, n, VALUE, BLOCK)
            tl.debug_barrier()


def match_nearly(magnitudes: Tensor, steepest: bool) -> Tensor:
    """`pairing.match_nearly`, of a stack at once."""
    n = magnitudes.shape[-1]
    if n == 1:
        return magnitudes.new_empty(*magnitudes.shape[:-2], 0, 2, dtype=torch.int64)
    matcher = Matcher(magnitudes)
    pairs = matcher.new_pairs()
    match = matcher.steepest if steepest else matcher.greedy
    match(magnitudes.contiguous(), pairs)
    return pairs[:, : n // 2].long().view(*magnitudes.shape[:-2], n // 2, 2)


class Matcher:
    """The buffers of the matchings of one matrix or stack, and the launches that use them."""

    def __init__(self, W: Tensor) -> None:
        n, device = W.shape[-1], W.device
        self.n, self.batch = n, W.numel() // n**2
        # With n odd, belief propagation has one axis more.
        count = n + n % 2
        self.block = max(16, power_of_2(n))
        self.warps = 8 if n <= 1024 else 16
        most = 2048 if n <= 1024 else 16384
        self.rows: int = max(1, min(8, most // self.block))
        wanted = 1 if n <= TILE else triton.cdiv(n, self.rows)
        at_once = programs_at_once(device, 1, self.batch * wanted)
        self.members = min(wanted, max(1, at_once // self.batch))
        self.groups = min(self.batch, at_once // self.members)
        self.units = torch.empty(self.batch, dtype=torch.float32, device=device)
        self.prices = torch.empty(self.batch, 2, 2, count, dtype=torch.float32, device=device)
        self.bidders = torch.empty(self.batch, 2, count, dtype=torch.int32, device=device)
        self.peaks = torch.empty(self.batch, count, dtype=torch.float32, device=device)
        self.worths = torch.empty(self.batch, dtype=torch.float64, device=device)
        # lists, listed, pointers, partners and lefts of each group.
        rows = LISTED + 4
        scratch = torch.empty(rows, self.groups * count, dtype=torch.int32, device=device)
        self.scratch = scratch.split([LISTED, 1, 2, 1])
        self.lefts = torch.empty(self.groups, dtype=torch.int32, device=device)
        self.waiting = counters(device, self.groups)

    @functools.cached_property
    def product(self) -> Tensor:
        """The buffer of the magnitudes."""
        return self.units.new_empty(self.batch, self.n, self.n)

    def new_pairs(self) -> Tensor:
        """A place for the pairs, (b, ⌈n/2⌉, 2): the last one, where n is odd, for who rests."""
        shape = self.batch, (self.n + 1) // 2, 2
        return torch.empty(shape, dtype=torch.int32, device=self.units.device)

    def magnitudes(self, H: Tensor, W: Tensor) -> Tensor:
        """|H Wᵀ − W Hᵀ|, up to TF32, in a buffer that the next call overwrites."""
        side, depth = (64, 32) if self.n <= 1024 else (128, 32)
        tiles = -(-self.n // side)
        launch(
            magnitudes_kernel, (tiles, tiles, self.batch), W.device,
            H, W, self.product, self.n, SIDE=side, DEPTH=depth, num_warps=4 if side < 128 else 8,
            together=False,
        )  # fmt: skip
        return self.product

    def greedy(self, S: Tensor, pairs: Tensor) -> None:
        """Write the greedy pairing of the weights S into `pairs`."""
        self._match(S, pairs, MAGNITUDE, self.n)

    def steepest(self, S: Tensor, pairs: Tensor) -> None:
        """Write a pairing with nearly the largest Σ S_ij² into `pairs`, never below greedy's."""
        self.greedy(S, pairs)
        if self.n <= 3:
            return
        count = self.n + self.n % 2
        launch(
            believe_kernel, (self.groups * self.members,), S.device,
            S, self.units, self.prices, self.bidders, self.peaks, self.waiting,
            self.batch, self.n, count, self.members,
            BELIEFS=BELIEFS, HELD=self.members * self.rows >= count,
            ROWS=self.rows, BLOCK=max(self.block, power_of_2(count)),
            num_warps=self.warps,
        )  # fmt: skip
        self._match(S, pairs, PRICED, count)
        for _ in range(EXCHANGES):
            self._match(S, pairs, EXCHANGED, count // 2)

    def _match(self, S: Tensor, pairs: Tensor, value: tl.constexpr, count: int) -> None:
        lists, listed, pointers, partners = self.scratch
        block = max(16, power_of_2(count))
        launch(
            match_kernel, (self.groups * self.members,), S.device,
            S, self.units, self.prices, self.bidders, self.worths, lists, listed, self.lefts,
            pointers, partners, pairs, self.waiting, self.batch, self.n, count, self.members,
            VALUE=value.value, ROWS=self.rows, BLOCK=block, TILE=min(TILE, block), LISTED=LISTED,
            num_warps=self.warps,
            # Fused, the value of (i, j) and of (j, i) could differ by a rounding.
            enable_fp_fusion=False,
        )  # fmt: skip
