"""GCD's loops for a CPU, compiled by numba; each does what its torch twin does.

W, G, H (n, n) row-major; pairs (k, 2); a, theta (k,). The loops are serial: at the sizes that
matter W lives in one core's cache, and a second core would only pull it to and fro.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from givens.kernels import GOLDEN, SHUFFLE_BITS, SHUFFLE_ROUNDS, TIDY_EVERY, TIDY_STREAM

# Sums may be reordered into vector lanes; NaN and infinity keep their meaning.
SUMS = {"reassoc", "contract", "nsz"}
TILE = 16
WORD = np.uint32


def compiled(fastmath: set[str] | bool = False) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit`, kept on disk between runs where there is a folder to keep it in."""

    def decorate(function: Callable[..., Any]) -> Any:
        jitted = numba.njit(fastmath=fastmath, error_model="numpy", nogil=True)(function)
        # Without a folder that numba may write, every process compiles for itself.
        with contextlib.suppress(RuntimeError):
            jitted.enable_caching()
        return jitted

    return decorate


@compiled(fastmath={"contract"})
def turn_rows(W: NDArray[Any], pairs: NDArray[Any], theta: NDArray[Any]) -> None:
    """Row i ← c·W_i + s·W_j, row j ← c·W_j − s·W_i, plane after plane."""
    for p in range(len(pairs)):
        c, s = W.dtype.type(math.cos(theta[p])), W.dtype.type(math.sin(theta[p]))
        x, y = W[pairs[p, 0]], W[pairs[p, 1]]
        for m in range(len(x)):
            u, v = x[m], y[m]
            x[m] = c * u + s * v
            y[m] = c * v - s * u


@compiled(fastmath=SUMS)
def derivatives(W: NDArray[Any], G: NDArray[Any], pairs: NDArray[Any], a: NDArray[Any]) -> None:
    """A_ij = g_i·w_j − w_i·g_j of the given planes alone, O(nk)."""
    for p in range(len(pairs)):
        wi, wj, gi, gj = W[pairs[p, 0]], W[pairs[p, 1]], G[pairs[p, 0]], G[pairs[p, 1]]
        total = W.dtype.type(0)
        for m in range(len(wi)):
            total += gi[m] * wj[m] - wi[m] * gj[m]
        a[p] = total


@compiled(fastmath=SUMS)
def orthonormalise_rows(W: NDArray[Any], pairs: NDArray[Any]) -> None:
    """Multiply each pair of rows by (3I − Gram)/2."""
    half, three = W.dtype.type(0.5), W.dtype.type(3)
    for p in range(len(pairs)):
        x, y = W[pairs[p, 0]], W[pairs[p, 1]]
        xx = xy = yy = W.dtype.type(0)
        for m in range(len(x)):
            xx += x[m] * x[m]
            xy += x[m] * y[m]
            yy += y[m] * y[m]
        for m in range(len(x)):
            u, v = x[m], y[m]
            x[m] = half * ((three - xx) * u - xy * v)
            y[m] = half * ((three - yy) * v - xy * u)


@compiled()
def hashed(x: np.uint32) -> np.uint32:
    """The twin of `pairing._hash`."""
    x = WORD((x ^ (x >> WORD(16))) * WORD(0x85EBCA6B))
    x = WORD((x ^ (x >> WORD(13))) * WORD(0xC2B2AE35))
    return WORD(x ^ (x >> WORD(16)))


@compiled()
def draw_pairs(n: int, seed: int, step: int, stream: int, pairs: NDArray[Any]) -> None:
    """The twin of `pairing.random_pairs`."""
    key = WORD(0)
    for word in (seed, seed >> 32, step, step >> 32, stream):
        key = hashed(WORD(key + WORD(GOLDEN)) ^ WORD(word & 0xFFFFFFFF))
    bits = SHUFFLE_BITS
    while (1 << bits) < n:
        bits += 1
    mask, half = WORD((1 << bits) - 1), WORD((bits + 1) // 2)
    factor = np.empty(SHUFFLE_ROUNDS, WORD)
    shift = np.empty(SHUFFLE_ROUNDS, WORD)
    for r in range(SHUFFLE_ROUNDS):
        factor[r] = hashed(WORD(key + WORD((2 * r + 1) * GOLDEN))) | WORD(1)
        shift[r] = hashed(WORD(key + WORD((2 * r + 2) * GOLDEN)))
    for p in range(n // 2):
        for side in range(2):
            x = WORD(2 * p + side)
            while True:
                for r in range(SHUFFLE_ROUNDS):
                    x = WORD(x * factor[r] + shift[r]) & mask
                    x = x ^ (x >> half)
                if x < n:
                    break
            pairs[p, side] = x
        if pairs[p, 0] > pairs[p, 1]:
            pairs[p, 0], pairs[p, 1] = pairs[p, 1], pairs[p, 0]


@compiled()
def peak(row: NDArray[Any]) -> tuple[Any, Any, Any]:
    """The largest key of a row, and where it occurs first and last; integers fill vector lanes."""
    most = row[0]
    for m in range(1, len(row)):
        most = max(most, row[m])
    first, last = np.int32(len(row)), np.int32(-1)
    for m in range(len(row)):
        here = np.int32(m)
        first = min(first, here if row[m] == most else np.int32(len(row)))
        last = max(last, here if row[m] == most else np.int32(-1))
    return most, first, last


@compiled()
def tie(i: int, j: int, n: int) -> Any:
    """What tells equal keys apart: a fixed hash of the pair."""
    return hashed(WORD(min(i, j) * n + max(i, j)))


@compiled()
def match(keys: NDArray[Any], partner: NDArray[Any]) -> None:
    """Greedy matching by locally dominant rounds; partner[i] = −1 for a free axis.

    keys (n, n) symmetric integers, the larger the better; the diagonal is overwritten.
    """
    n = len(keys)
    best = np.empty(n, np.int64)
    free = np.arange(n)
    partner[:] = -1
    for i in range(n):
        row = keys[i]
        row[i] = np.iinfo(keys.dtype).min
        most, found, last = peak(row)
        for j in range(found + 1, last + 1):
            if row[j] == most and j != i and (found == i or tie(i, j, n) > tie(i, found, n)):
                found = j
        best[i] = found
    left = n
    while left > 1:
        for f in range(left):
            i = free[f]
            if best[best[i]] == i:
                partner[i] = best[i]
        kept = 0
        for f in range(left):
            if partner[free[f]] < 0:
                free[kept] = free[f]
                kept += 1
        left = kept
        for f in range(left):
            i = free[f]
            if partner[best[i]] >= 0 and left > 1:
                row = keys[i]
                found = free[0] if f else free[1]
                most = row[found]
                for g in range(left):
                    j = free[g]
                    key = row[j]
                    if key > most or (key == most and j != i and tie(i, j, n) > tie(i, found, n)):
                        found, most = j, key
                best[i] = found


@compiled()
def bid(
    weights: NDArray[Any],
    first: NDArray[Any],
    second: NDArray[Any],
    bidder: NDArray[Any],
    offer: NDArray[Any],
    keys: NDArray[Any],
) -> None:
    """The twin of `pairing._bid`, in place; offer (n,) is overwritten, and keys are its bits."""
    n = len(weights)
    asked, least, was = first.copy(), second.copy(), bidder.copy()
    sign, rest = keys.dtype.type(keys.itemsize * 8 - 1), np.iinfo(keys.dtype).max
    order = np.empty_like(keys)
    for i in range(n):
        row = weights[i]
        for k in range(n):
            offer[k] = row[k] - (least[k] if was[k] == i else asked[k])
        for k in range(n):
            order[k] = keys[k] ^ ((keys[k] >> sign) & rest)
        order[i] = np.iinfo(keys.dtype).min
        _, top, _ = peak(order)
        first[i], bidder[i] = offer[top], top
        order[top] = np.iinfo(keys.dtype).min
        _, top, _ = peak(order)
        second[i] = offer[top] if n > 2 else -np.inf


@compiled()
def exchange(
    weights: NDArray[Any], partner: NDArray[Any], gain: NDArray[Any], keys: NDArray[Any]
) -> bool:
    """One round of `pairing._exchanged`, in place; whether there was anything to gain.

    gain (n/2, n/2) is overwritten, and keys are its bits: in order, as no gain is negative.
    """
    n = len(partner)
    a = np.flatnonzero(partner > np.arange(n))
    b = partner[a]
    pairs = len(a)
    gain[:] = 0
    any_gain = False
    for p in range(pairs):
        for q in range(p):
            straight = weights[a[p], a[q]] + weights[b[p], b[q]]
            crossed = weights[a[p], b[q]] + weights[b[p], a[q]]
            more = max(straight, crossed) - (weights[a[p], b[p]] + weights[a[q], b[q]])
            if more > 0:
                gain[p, q] = gain[q, p] = more
                any_gain = True
    if not any_gain:
        return False
    other = np.empty(pairs, np.int64)
    match(keys, other)
    for p in range(pairs):
        q = other[p]
        if p < q and gain[p, q] > 0:
            straight = weights[a[p], a[q]] + weights[b[p], b[q]]
            crossed = weights[a[p], b[q]] + weights[b[p], a[q]]
            c, d = (b[q], a[q]) if crossed > straight else (a[q], b[q])
            partner[a[p]], partner[c] = c, a[p]
            partner[b[p]], partner[d] = d, b[p]
    return True


@compiled()
def magnitudes(P: NDArray[Any]) -> None:
    """P ← |P − Pᵀ|, in place, in tiles whose columns fit the cache's sets even where n = 2ᵏ."""
    n = len(P)
    for r in range(0, n, TILE):
        for c in range(r, n, TILE):
            for i in range(r, min(r + TILE, n)):
                row = P[i]
                for j in range(max(c, i), min(c + TILE, n)):
                    row[j] = P[j, i] = abs(row[j] - P[j, i])


@compiled(fastmath=SUMS)
def finite(G: NDArray[Any]) -> bool:
    """Whether every entry is finite: 0·x is 0 for a finite x and NaN for any other."""
    total = G.dtype.type(0)
    flat = G.ravel()
    for m in range(len(flat)):
        total += flat[m] * G.dtype.type(0)
    return bool(total == 0)


@compiled()
def descend(
    W: NDArray[Any],
    G: NDArray[Any],
    H: NDArray[Any],
    pairs: NDArray[Any],
    scale: NDArray[Any],
    factor: float,
    decay: float,
    gain: float,
    adaptive: bool,
    momentum: bool,
    draw: bool,
    seed: int,
    step: int,
    stream: int,
) -> bool:
    """The rest of `optim.step_` once H is there, for a stack; False, nothing turned, for a bad G.

    pairs (b, k, 2) are the planes, drawn here at random if `draw`: then one call from Python is a
    whole step of GCD-R.
    """
    k = pairs.shape[1]
    angles = np.empty((len(W), k), W.dtype)
    squares = np.empty(len(W))
    for b in range(len(W)):
        if draw:
            draw_pairs(len(W[b]), seed, step, stream + b, pairs[b])
        derivatives(W[b], G[b], pairs[b], angles[b])
        squares[b] = 0.0
        for p in range(k):
            squares[b] += np.float64(angles[b, p]) ** 2
        if not math.isfinite(squares[b]) or (draw and not rest_is_finite(G[b], pairs[b])):
            return False
    for b in range(len(W)):
        if momentum:
            derivatives(W[b], H[b], pairs[b], angles[b])
        angle = factor
        if adaptive:
            before = np.float64(scale[b])
            scale[b] = math.sqrt(decay * before**2 + gain * squares[b] / max(k, 1))
            angle = factor / np.float64(scale[b]) if scale[b] > 0 else 0.0
        for p in range(k):
            angles[b, p] *= angle
        turn_rows(W[b], pairs[b], angles[b])
        if momentum:
            turn_rows(H[b], pairs[b], angles[b])
        if step % TIDY_EVERY == 0:
            drawn = np.empty((len(W[b]) // 2, 2), np.int64)
            draw_pairs(len(W[b]), seed, step, stream + b + TIDY_STREAM, drawn)
            orthonormalise_rows(W[b], drawn)
    return True


@compiled()
def rest_is_finite(G: NDArray[Any], pairs: NDArray[Any]) -> bool:
    """Whether the row of G that is in no pair, where n is odd, is finite too."""
    n = len(G)
    if n % 2 == 0:
        return True
    rest = n * (n - 1) // 2
    for p in range(len(pairs)):
        rest -= pairs[p, 0] + pairs[p, 1]
    return bool(finite(G[rest]))
