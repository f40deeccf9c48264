"""K pairings by |D| for a CPU: the twin of `pairing.greedy_partners`.

The planes are walked once, the heaviest first, and each gets the first pairing in which both of its
axes are free. They are sorted by counting, as many at a time as are wanted.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from givens.kernels.cpu.grid import compiled

# A key is the exponent and 7 bits of the mantissa of |D|; below 2⁻²⁴ of the largest it is 0.
KEY_SHIFT = 16
KEYS = 24 << 7
# Planes with one key are taken in a scattered order, or the first axes would meet the first axes.
SCATTER = 8
MAGNITUDE = 0x7FFFFFFF
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
    """The twin of `pairing.greedy_partners`; keys (n, n) are the bits of |D| above the diagonal."""
    turns, n = partners.shape
    for k in range(turns):
        for i in range(n):
            partners[k, i] = i
    most = np.int32(0)
    for i in range(n):
        row = keys[i]
        for j in range(i + 1, n):
            most = max(most, row[j] & MAGNITUDE)
    if most == 0:
        return
    lowest = (most >> KEY_SHIFT) - KEYS + 1
    bins = KEYS * SCATTER
    counts = np.zeros(bins, np.int32)
    for i in range(n):
        row = keys[i]
        for j in range(i + 1, n):
            counts[place(row[j], i, j, lowest)] += 1
    free = np.full(n, (np.uint64(1) << np.uint64(turns)) - np.uint64(1), np.uint64)
    if turns == 64:
        free[:] = ~np.uint64(0)
    colours = np.empty(64, np.int64)
    for k in range(64):
        colours[(BRUIJN << np.uint64(k)) >> np.uint64(58)] = k
    left = turns * (n // 2)
    wanted = 3 * left
    starts = np.empty(bins, np.int32)
    end = bins
    # The last places are hard to fill, and little is gained by them.
    spare = left // 32
    while end > 0 and left > spare:
        # The heaviest planes that are left, sorted by counting.
        begin, total = end, 0
        while begin > 0 and (total < wanted or begin % SCATTER):
            begin -= 1
            starts[begin] = total
            total += counts[begin]
        lightest = max((begin // SCATTER + lowest) << KEY_SHIFT, 1) if begin else 1
        order = np.empty(total, np.int64)
        for i in range(n):
            row, mine = keys[i], free[i]
            if mine == 0:
                continue
            for j in range(i + 1, n):
                # Most planes are too light: this test comes first.
                if row[j] & MAGNITUDE >= lightest and mine & free[j] != 0:
                    at = place(row[j], i, j, lowest)
                    if at < end:
                        order[starts[at]] = i << 32 | j
                        starts[at] += 1
        # Bins have gaps where a plane was left out: they are walked one by one.
        offset = 0
        for at in range(end - 1, begin - 1, -1):
            for q in range(offset, starts[at]):
                i, j = order[q] >> 32, order[q] & 0xFFFFFFFF
                both = free[i] & free[j]
                if both != 0:
                    first = both & (~both + np.uint64(1))
                    k = colours[(BRUIJN * first) >> np.uint64(58)]
                    partners[k, i], partners[k, j] = j, i
                    free[i] ^= first
                    free[j] ^= first
                    left -= 1
            offset += counts[at]
        end = begin
        wanted *= 4


@compiled()
def place(key: int, i: int, j: int, lowest: int) -> int:
    """The bin of a plane: the larger |D_ij|, the higher."""
    coarse = max(((key & MAGNITUDE) >> KEY_SHIFT) - lowest, 0)
    return coarse * SCATTER + ((i * 40503 + j * 30341) >> 7 & (SCATTER - 1))
