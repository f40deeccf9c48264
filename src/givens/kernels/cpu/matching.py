"""Pairings of one matrix on a CPU: greedy, and approximately the steepest.

Weights are passed as integer keys of the same order, since integer loops vectorize.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from givens.kernels.cpu.grid import WORD, compiled, hashed
from givens.pairing import EXCHANGES

TILE = 16


def skew_magnitudes(P: Tensor) -> Tensor:
    """`rotation.skew_magnitudes`, in place."""
    for p in P.numpy().reshape(-1, *P.shape[-2:]):
        magnitudes(p)
    return P


def match_greedily(weights: Tensor, *, signed: bool = False) -> Tensor:
    """`pairing.match_greedily`."""
    partner = torch.empty(len(weights), dtype=torch.int64, device="cpu")
    match(sortable(weights, signed=signed).numpy(), partner.numpy())
    return partner


def bid(
    weights: Tensor, first: Tensor, second: Tensor, bidder: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`pairing.bid`."""
    now = first.clone(), second.clone(), bidder.clone()
    offer = torch.empty_like(first)
    buffers = (*now, offer, sortable(offer))
    bid_loop(weights.numpy(), *(buffer.numpy() for buffer in buffers))
    return now


def exchange(weights: Tensor, partner: Tensor) -> Tensor:
    """`pairing.exchange`."""
    partner = partner.clone()
    gain = weights.new_empty(len(partner) // 2, len(partner) // 2)
    arrays = (weights.numpy(), partner.numpy(), gain.numpy(), sortable(gain).numpy())
    for _ in range(EXCHANGES):
        if not exchange_loop(*arrays):
            break
    return partner


def sortable(weights: Tensor, *, signed: bool = False) -> Tensor:
    """Integers in the order of the floats: their bits, as they are if no float is negative."""
    bits = weights.element_size() * 8
    keys = weights.contiguous().view(torch.int32 if bits == 32 else torch.int64)
    return keys ^ ((keys >> (bits - 1)) & ((1 << (bits - 1)) - 1)) if signed else keys


@compiled()
def magnitudes(P: NDArray[Any]) -> None:
    """P ← |P − Pᵀ|, in place, tile by tile to avoid cache conflicts if n = 2ᵏ."""
    n = len(P)
    for r in range(0, n, TILE):
        for c in range(r, n, TILE):
            for i in range(r, min(r + TILE, n)):
                row = P[i]
                for j in range(max(c, i), min(c + TILE, n)):
                    row[j] = P[j, i] = abs(row[j] - P[j, i])


@compiled()
def peak(row: NDArray[Any]) -> tuple[Any, Any, Any]:
    """The largest key of a row, and where it occurs first and last."""
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
    """The tie-breaker of equal keys: a fixed hash of the pair."""
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
def bid_loop(
    weights: NDArray[Any],
    first: NDArray[Any],
    second: NDArray[Any],
    bidder: NDArray[Any],
    offer: NDArray[Any],
    keys: NDArray[Any],
) -> None:
    """The twin of `pairing.bid`, in place; offer (n,) is overwritten, and keys are its bits."""
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
def exchange_loop(
    weights: NDArray[Any], partner: NDArray[Any], gain: NDArray[Any], keys: NDArray[Any]
) -> bool:
    """One round of `pairing.exchange`, in place; returns whether anything was gained.

    gain (n/2, n/2) is overwritten; keys are its bits, which are in order since no gain is negative.
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
