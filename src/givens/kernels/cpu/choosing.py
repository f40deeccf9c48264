"""K pairings by |D| for a CPU: the twin of `pairing.greedy_partners`.

Planes are visited once, the heaviest first, and each joins the first pairing in which both of its
axes are free. A sample tells how heavy a plane must be to have a chance; only such planes are
collected and sorted. Lighter ones follow in the same way if places are left.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from givens.kernels.cpu.grid import compiled

# Planes are sorted by the exponent and 7 bits of the mantissa of |D|; all below 2⁻²⁴ of the largest
# are alike.
KEY_SHIFT = 16
KEYS = 24 << 7
# Planes of one key are visited in scattered order, or the first axes would meet the first axes.
SCATTER = 8
MAGNITUDE = np.int32(0x7FFFFFFF)
# The sample is one plane in so many, of a large matrix.
SAMPLE = 8
# A sequence in which all words of six bits are different: its product with 2ᵏ tells k.
BRUIJN = np.uint64(0x03F79D71B4CB0A89)


def greedy_partners(magnitudes: Tensor, turns: int) -> Tensor:
    """`pairing.greedy_partners`."""
    if magnitudes.ndim > 2:
        return torch.stack([greedy_partners(m, turns) for m in magnitudes])
    partners = torch.empty(turns, len(magnitudes), dtype=torch.int32, device="cpu")
    # As float32, whose bits sort like numbers; scaled, or float64 would not fit.
    most = magnitudes.amax().clamp_min(torch.finfo(magnitudes.dtype).tiny)
    keys = (magnitudes / most).float().contiguous().view(torch.int32)
    choose(keys.numpy(), partners.numpy())
    return partners.long()


@compiled()
def choose(keys: NDArray[Any], partners: NDArray[Any]) -> None:
    """`pairing.greedy_partners`; keys (n, n) are the bits of |D| above the diagonal, as int32."""
    turns, n = partners.shape
    for k in range(turns):
        for i in range(n):
            partners[k, i] = i
    most = heaviest(keys)
    if most == 0:
        return
    lowest = (most >> KEY_SHIFT) - KEYS + 1
    # A bit for each pairing in which an axis is still free.
    free = np.full(n, ~np.uint64(0) >> np.uint64(64 - turns), np.uint64)
    colours = np.empty(64, np.int64)
    for k in range(64):
        colours[(BRUIJN << np.uint64(k)) >> np.uint64(58)] = k
    every = min(1 + n // 64, SAMPLE)
    sample = sample_keys(keys, lowest, every)
    left = turns * (n // 2)
    wanted = 3 * left
    end = KEYS
    # The last places are hard to fill, and little is gained by them.
    spare = left // 32
    while end > 0 and left > spare:
        begin, expected = end, 0
        while begin > 0 and expected < wanted:
            begin -= 1
            expected += every * sample[begin]
        low = np.int32(max((begin + lowest) << KEY_SHIFT, 1) if begin else 1)
        high = np.int32(min(((end + lowest) << KEY_SHIFT) - 1, MAGNITUDE))
        planes = collect(keys, low, high)
        for plane in sort(planes, keys, lowest + begin, (end - begin) * SCATTER):
            i, j = plane >> 32, plane & 0xFFFFFFFF
            both = free[i] & free[j]
            if both != 0:
                first = both & (~both + np.uint64(1))
                k = colours[(BRUIJN * first) >> np.uint64(58)]
                partners[k, i], partners[k, j] = j, i
                free[i] ^= first
                free[j] ^= first
                left -= 1
        end = begin
        wanted *= 4


@compiled()
def heaviest(keys: NDArray[Any]) -> Any:
    """The largest key above the diagonal."""
    most = np.int32(0)
    for i in range(len(keys)):
        row = keys[i, i + 1 :]
        for j in range(len(row)):
            most = max(most, row[j] & MAGNITUDE)
    return most


@compiled()
def sample_keys(keys: NDArray[Any], lowest: int, every: int) -> NDArray[Any]:
    """How many planes have each key, among one in `every`."""
    counts = np.zeros(KEYS, np.int64)
    for i in range(len(keys)):
        row = keys[i]
        for j in range(i + 1 + i % every, len(row), every):
            counts[max(((row[j] & MAGNITUDE) >> KEY_SHIFT) - lowest, 0)] += 1
    return counts


@compiled()
def collect(keys: NDArray[Any], low: Any, high: Any) -> NDArray[Any]:
    """The planes with keys from low to high, as i << 32 | j; no branch depends on a key."""
    count = np.int32(0)
    for i in range(len(keys)):
        row = keys[i, i + 1 :]
        for j in range(len(row)):
            key = row[j] & MAGNITUDE
            count += np.int32(key >= low) & np.int32(key <= high)
    planes = np.empty(count + 1, np.int64)
    at = np.uint64(0)
    for i in range(len(keys)):
        row = keys[i, i + 1 :]
        for j in range(len(row)):
            key = row[j] & MAGNITUDE
            planes[at] = i << 32 | (i + 1 + j)
            at += np.uint64(key >= low) & np.uint64(key <= high)
    return planes[:-1]


@compiled()
def sort(planes: NDArray[Any], keys: NDArray[Any], lowest: int, bins: int) -> NDArray[Any]:
    """The planes, the heaviest first, by counting."""
    places = np.empty(len(planes), np.int32)
    starts = np.zeros(bins + 1, np.int32)
    for p in range(len(planes)):
        i, j = planes[p] >> 32, planes[p] & 0xFFFFFFFF
        coarse = max(((keys[i, j] & MAGNITUDE) >> KEY_SHIFT) - lowest, 0)
        scattered = (i * 40503 + j * 30341) >> 7 & (SCATTER - 1)
        places[p] = bins - 1 - (coarse * SCATTER + scattered)
        starts[places[p] + 1] += 1
    for at in range(bins):
        starts[at + 1] += starts[at]
    order = np.empty_like(planes)
    for p in range(len(planes)):
        order[starts[places[p]]] = planes[p]
        starts[places[p]] += 1
    return order
