"""Which planes to turn: the pairings of GCD-R, GCD-G and GCD-S (paper, section 2.3).

A (n, n) skew, A_ij the derivative along the plane (i, j). A pairing is ⌊n/2⌋ pairs i < j that share
no axis; if n is odd, one axis rests. Only the entries above A's diagonal are read.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from givens import kernels
from givens.checks import check_integer
from givens.kernels import GOLDEN, SHUFFLE_BITS, SHUFFLE_ROUNDS, WORD
from givens.rotation import check_floats, check_square

Pairing = Literal["random", "greedy", "steepest", "overlapping-random", "overlapping-greedy"]
# The names of the corresponding variants of GCD in the rest of the library.
Variant = Literal[
    "gcd-random", "gcd-greedy", "gcd-steepest", "overlapping-random", "overlapping-greedy"
]
Pairs = Int[Tensor, "*batch k 2"]

# After each of these iterations of belief propagation the prices are rounded to a matching; the
# best matching is kept.
ROUND_AFTER = (8, 16, 24)
EXCHANGES = 8


def random_pairs(
    n: int, seed: int = 0, *, step: int = 0, stream: int = 0, turn: int = 0
) -> Int[Tensor, "k 2"]:
    """A uniformly random pairing (GCD-R), a function of (seed, step, stream) alone.

    So all ranks draw the same pairing, and a resumed run continues unchanged. Up to n − 1 pairings
    that differ only in `turn` have no plane in common.
    """
    n, seed = _check_draw(n, seed)
    return draw_pairs(n, seed, step, stream, turn)


@kernels.operation
def draw_pairs(n: int, seed: int, step: int, stream: int, turn: int) -> Int[Tensor, "k 2"]:
    """`random_pairs`, unchecked."""
    places = _round_robin(n, turn)
    return _sort_pairs(_permute(places.flatten(), n, _key(seed, step, stream)).view(-1, 2))


def every_pairing(n: int) -> Int[Tensor, "rounds n"]:
    """All planes, each in one pairing: the partner of each axis, itself if it rests.

    n − 1 pairings if n is even, n if it is odd.
    """
    rounds = (n + 1) // 2 * 2 - 1
    partners = torch.arange(n, device="cpu").repeat(rounds, 1)
    for turn, partner in enumerate(partners):
        i, j = _round_robin(n, turn).unbind(-1)
        partner[i], partner[j] = j, i
    return partners


def every_pairing_for(W: Tensor) -> Tensor:
    """`every_pairing` of W's axes, int32, on its device."""
    return every_pairing(W.shape[-1]).int().to(W.device)


def _round_robin(n: int, turn: int) -> Int[Tensor, "k 2"]:
    """One round of a round robin (circle method): places turn ± a meet, and `turn` meets the last.

    If n is odd there is no last place, and `turn` rests.
    """
    half = (n + 1) // 2
    a = (torch.arange(n // 2, device="cpu") + 1) % half
    around = 2 * half - 1
    return torch.stack([(turn + a) % around, torch.where(a == 0, around, (turn - a) % around)], -1)


def overlapping_random_pairs(
    n: int, seed: int = 0, *, step: int = 0, stream: int = 0
) -> Int[Tensor, "k 2"]:
    """⌊n/2⌋ different planes drawn uniformly, which may share axes (the paper's ablation)."""
    n, seed = _check_draw(n, seed)
    planes = n * (n - 1) // 2
    drawn = _permute(torch.arange(n // 2, device="cpu"), planes, _key(seed, step, stream))
    return _plane(drawn)


def greedy_pairs(A: Float[Tensor, "*batch n n"]) -> Pairs:
    """The pairing that takes the largest |A_ij| first, then the largest that is left (GCD-G).

    It has at least half of the steepest weight. Found by locally dominant rounds: every free axis
    points at its largest free entry, and axes that point at each other are paired. Ties are broken
    by a fixed hash of (i, j); otherwise an all-zero A would take n/2 rounds.
    """
    return matched_pairs(_magnitudes(A))


@kernels.operation
def greedy_partners(
    magnitudes: Float[Tensor, "*batch n n"], turns: int
) -> Int[Tensor, "*batch turns n"]:
    """Greedy pairings one after another, no plane twice: the partner of each axis, itself at rest.

    Planes of weight zero are left out. The compiled version visits the planes once, the heaviest
    first, and adds each to the first pairing in which both of its axes are free, which gives the
    same pairings; it sorts planes to within 0.8 %. The GPU version takes at least 90 % of the
    weight, and 80 % if turns > n/8.
    """
    if magnitudes.ndim > 2:
        return torch.stack([greedy_partners(m, turns) for m in magnitudes])
    axes = torch.arange(len(magnitudes), device=magnitudes.device)
    left = torch.where(magnitudes > 0, magnitudes, -torch.inf)
    chosen = []
    for _ in range(turns):
        partner = _dominant_rounds(left.clone())
        partner = torch.where(partner < 0, axes, partner)
        left[axes, partner] = -torch.inf
        chosen.append(partner)
    return torch.stack(chosen)


def steepest_pairs(A: Float[Tensor, "*batch n n"], *, exact: bool = True) -> Pairs:
    """The pairing that maximises Σ A_ij², the steepest first-order descent (GCD-S).

    Exact by the blossom algorithm, O(n³) on one core: nearly a second at n = 512. exact=False uses
    belief propagation, which closes most of the gap between greedy and exact in O(n²).
    """
    return matched_pairs(_magnitudes(A), steepest=True, exact=exact)


def overlapping_greedy_pairs(A: Float[Tensor, "*batch n n"]) -> Pairs:
    """The ⌊n/2⌋ planes of largest |A_ij|, which may share axes (the paper's ablation)."""
    return largest_pairs(_magnitudes(A))


def largest_pairs(magnitudes: Float[Tensor, "*batch n n"]) -> Pairs:
    """`overlapping_greedy_pairs` of |A|, unchecked."""
    n = magnitudes.shape[-1]
    i, j = torch.triu_indices(n, n, 1, device=magnitudes.device)
    chosen = magnitudes[..., i, j].topk(n // 2).indices
    return torch.stack([i[chosen], j[chosen]], dim=-1)


def matched_pairs(
    magnitudes: Float[Tensor, "*batch n n"], *, steepest: bool = False, exact: bool = False
) -> Pairs:
    """`greedy_pairs` or `steepest_pairs` of |A|, which must be symmetric to the last bit."""
    return match_exactly(magnitudes) if steepest and exact else match_nearly(magnitudes, steepest)


def match_exactly(magnitudes: Float[Tensor, "*batch n n"]) -> Pairs:
    """The pairing of maximal Σ A_ij², on one core."""
    if magnitudes.ndim > 2:
        return torch.stack([match_exactly(m) for m in magnitudes])
    return _list_pairs(_blossom(_scale(magnitudes)))


@kernels.operation
def match_nearly(magnitudes: Float[Tensor, "*batch n n"], steepest: bool) -> Pairs:
    """The greedy pairing, or an approximation of the steepest one."""
    if magnitudes.ndim > 2:
        return torch.stack([match_nearly(m, steepest) for m in magnitudes])
    partner = match_greedily(magnitudes)
    return _list_pairs(_believe(_scale(magnitudes), partner) if steepest else partner)


def _scale(magnitudes: Tensor) -> Tensor:
    """Magnitudes divided by the largest, so that squares neither vanish nor overflow."""
    return magnitudes / magnitudes.amax().clamp_min(torch.finfo(magnitudes.dtype).tiny)


def _list_pairs(partner: Int[Tensor, " n"]) -> Int[Tensor, "k 2"]:
    i = torch.nonzero(partner > torch.arange(len(partner), device=partner.device)).squeeze(1)
    return torch.stack([i, partner[i]], dim=-1)


@kernels.operation
def match_greedily(weights: Float[Tensor, "n n"], *, signed: bool = False) -> Int[Tensor, " n"]:
    """The greedy matching of a complete graph with symmetric weights; −1 marks a free axis.

    Weights are not negative unless `signed`.
    """
    return _dominant_rounds(weights.clone())


def _dominant_rounds(free: Float[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """Rounds of mutual favourites, until no plane above −∞ is free; free is overwritten."""
    n = len(free)
    axes = torch.arange(n, device=free.device)
    tie = _hash(torch.minimum(axes, axes[:, None]) * n + torch.maximum(axes, axes[:, None]))
    partner = torch.full_like(axes, -1)
    free.fill_diagonal_(-torch.inf)
    for _ in range(n // 2):
        peak = free.amax(dim=1, keepdim=True)
        best = torch.where(free == peak, tie, -1).argmax(dim=1)
        mutual = (best[best] == axes) & (peak[:, 0] > -torch.inf)
        partner = torch.where(mutual, best, partner)
        free[mutual] = -torch.inf
        free[:, mutual] = -torch.inf
        if not mutual.any():
            break
    return partner


def _blossom(magnitudes: Float[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """The matching of maximal Σ A_ij², for magnitudes of at most 1.

    Integer weights keep the duals of the blossom algorithm exact. Rounding to multiples of 2⁻⁵⁰
    leaves an error of at most n·2⁻⁵¹ of the largest weight.
    """
    try:
        import rustworkx
    except ImportError as error:
        raise ImportError(
            "the exact steepest pairing needs rustworkx: pip install rustworkx, or use exact=False"
        ) from error

    weights = (magnitudes.double().square().cpu() * 2**50).round()
    weights.fill_diagonal_(-1)
    graph = rustworkx.PyGraph.from_adjacency_matrix(weights.numpy(), null_value=-1.0)
    matching = rustworkx.max_weight_matching(graph, max_cardinality=True, weight_fn=int)
    partner = torch.full((len(magnitudes),), -1, device="cpu")
    for i, j in matching:
        partner[i], partner[j] = j, i
    return partner.to(magnitudes.device)


def _believe(magnitudes: Float[Tensor, "n n"], greedy: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """A matching of nearly maximal Σ A_ij², never below greedy: prices, rounding, exchanges.

    Max-product belief propagation on the complete graph needs only O(n) state: the price an axis
    asks of a neighbour is its best offer from any other axis: its best offer, or the second best if
    that neighbour made the best. A greedy matching of what the prices leave rounds them; exchanging
    two pairs for two improves the result.
    """
    n = len(magnitudes)
    # If n is odd, an extra axis of weight 0 is paired with the one that rests.
    weights = torch.nn.functional.pad(magnitudes.square(), (0, n % 2, 0, n % 2))
    axes = torch.arange(len(weights), device=weights.device)
    best = greedy
    if n % 2:
        rests = greedy < 0
        best = torch.cat([torch.where(rests, n, greedy), axes[:n][rests]])
    best = exchange(weights, best)
    zero = torch.zeros_like(weights[0])
    first, second, bidder = bid(weights, zero, zero, torch.full_like(axes, -1))
    first, second = first / 2, second / 2
    for iteration in range(1, max(ROUND_AFTER) + 1):
        first, second, bidder = bid(weights, first, second, bidder)
        if iteration in ROUND_AFTER:
            prices = _prices(first, second, bidder)
            # Summed first, so that the result is symmetric to the last bit.
            left = weights - (prices + prices.mT)
            rounded = exchange(weights, match_greedily(left, signed=True))
            better = _weight(rounded, weights) > _weight(best, weights)
            best = torch.where(better, rounded, best)
    return torch.where(best[:n] < n, best[:n], -1)


@kernels.operation
def bid(
    weights: Tensor, first: Tensor, second: Tensor, bidder: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Each axis's best and second best offer at the current prices, and the best bidder."""
    offers = (weights - _prices(first, second, bidder)).fill_diagonal_(-torch.inf)
    first, bidder = offers.max(dim=1)
    second = offers.scatter(1, bidder[:, None], -torch.inf).amax(dim=1)
    return first, second, bidder


def _prices(first: Tensor, second: Tensor, bidder: Tensor) -> Tensor:
    """At [i, k] the price that k asks of i: its best offer, or the second best if i made that."""
    axes = torch.arange(len(first), device=first.device)
    return torch.where(bidder == axes[:, None], second, first)


@kernels.operation
def exchange(weights: Tensor, partner: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Exchange pairs (a, b), (c, d) for (a, c), (b, d) or (a, d), (b, c) while the weight grows."""
    axes = torch.arange(len(partner), device=partner.device)
    for _ in range(EXCHANGES):
        a = torch.nonzero(axes < partner).squeeze(1)
        b = partner[a]
        now = weights[a, b]
        straight = weights[a[:, None], a] + weights[b[:, None], b]
        crossed = weights[a[:, None], b] + weights[b[:, None], a]
        gain = torch.maximum(straight, crossed) - (now + now[:, None])
        other = match_greedily(gain.clamp_min(0))
        pair = torch.arange(len(a), device=a.device)
        pair = pair[other > pair]
        pair = pair[gain[pair, other[pair]] > 0]
        if not len(pair):
            break
        other = other[pair]
        crossing = crossed[pair, other] > straight[pair, other]
        p, q = a[pair], b[pair]
        r = torch.where(crossing, b[other], a[other])
        s = torch.where(crossing, a[other], b[other])
        partner = partner.clone()
        partner[p], partner[r] = r, p
        partner[q], partner[s] = s, q
    return partner


def _weight(partner: Int[Tensor, " n"], weights: Tensor) -> Tensor:
    return weights.gather(1, partner[:, None]).sum()


def _magnitudes(A: Tensor) -> Tensor:
    """|A| from what is above A's diagonal, checked."""
    check_square("A", A)
    check_floats("A", A)
    if not A.isfinite().all():
        raise ValueError("A must be finite, but has NaN or infinite entries")
    upper = A.detach().triu(1).abs()
    return upper + upper.mT


def _check_draw(n: int, seed: int) -> tuple[int, int]:
    n, seed = check_integer("n", n), check_integer("seed", seed)
    if n < 1:
        raise ValueError(f"n must be at least 1, but got n={n}")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be in 0..2⁶³−1, but got seed={seed}")
    return n, seed


def _sort_pairs(pairs: Tensor) -> Tensor:
    return torch.stack([pairs.amin(-1), pairs.amax(-1)], dim=-1)


def _plane(index: Tensor) -> Tensor:
    """The pair i < j at place `index` of the list (0, 1), (0, 2), (1, 2), (0, 3), and so on."""
    j = ((1 + (1 + 8 * index.double()).sqrt()) / 2).long()
    j -= (j * (j - 1) // 2 > index).long()
    return torch.stack([index - j * (j - 1) // 2, j], dim=-1)


def _hash(x: Tensor) -> Tensor:
    """A bijection of 32-bit words that scatters them (a multiply–xorshift finaliser)."""
    x = x & WORD
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & WORD
    return x ^ (x >> 16)


def _key(seed: int, step: int, stream: int) -> Tensor:
    key = torch.zeros((), dtype=torch.int64, device="cpu")
    for word in (seed, seed >> 32, step, step >> 32, stream):
        key = _hash((key + GOLDEN) ^ (word & WORD))
    return key


def _permute(x: Tensor, size: int, key: Tensor) -> Tensor:
    """A random permutation of 0..size−1 applied to x, in O(1) for each element by itself.

    Rounds of x ↦ ax + c and x ↦ x ⊕ (x >> h) permute the numbers below the next power of two; they
    are repeated for a number that falls outside until it is inside.
    """
    bits = max(SHUFFLE_BITS, (size - 1).bit_length())
    mask, half = (1 << bits) - 1, (bits + 1) // 2
    numbers = torch.arange(1, 2 * SHUFFLE_ROUNDS + 1, device=key.device)
    keys = _hash(key + numbers * GOLDEN).tolist()

    def shuffle(words: Tensor) -> Tensor:
        for factor, shift in zip(keys[::2], keys[1::2], strict=True):
            words = (words * (factor | 1) + shift) & mask
            words = words ^ (words >> half)
        return words

    # Of the fewest words most fall outside, again and again: they are looked up.
    table = shuffle(torch.arange(1 << bits, device=x.device)) if bits == SHUFFLE_BITS else None
    outside = torch.ones_like(x, dtype=torch.bool)
    while outside.any():
        x = torch.where(outside, shuffle(x) if table is None else table[x], x)
        outside = x >= size
    return x
