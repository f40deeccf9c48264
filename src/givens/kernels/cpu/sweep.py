"""All pairings of a step in one sweep over a matrix, for a CPU.

A block of columns is copied, goes through all pairings while it stays in the cache, and is copied
back: rows of W that are a power of two apart would push each other out of the cache.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from givens.kernels.cpu.grid import compiled

# Columns of a block: a constant, so that the compiler makes vectors of the inner loop.
COLUMNS = 32


@compiled()
def list_planes(
    D: NDArray[Any], partners: NDArray[Any], rate: float
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """All planes, pairing after pairing: axes i < j, and cos θ and sin θ of θ = rate·D_ij."""
    turns, n = partners.shape
    most = turns * (n // 2)
    first, second = np.empty(most, np.int32), np.empty(most, np.int32)
    cos, sin = np.empty(most, D.dtype), np.empty(most, D.dtype)
    count = 0
    for k in range(turns):
        for i in range(n):
            j = partners[k, i]
            if j > i:
                theta = rate * np.float64(D[i, j])
                first[count], second[count] = i, j
                cos[count], sin[count] = math.cos(theta), math.sin(theta)
                count += 1
    return first[:count], second[:count], cos[:count], sin[:count]


@compiled()
def turn(
    M: NDArray[Any],
    first: NDArray[Any],
    second: NDArray[Any],
    cos: NDArray[Any],
    sin: NDArray[Any],
) -> None:
    """Row i ← cos·M_i + sin·M_j, row j ← cos·M_j − sin·M_i, plane after plane."""
    n = len(M)
    whole = n - n % COLUMNS
    block = np.zeros((n, COLUMNS), M.dtype)
    for start in range(0, whole, COLUMNS):
        for i in range(n):
            x, y = M[i, start : start + COLUMNS], block[i]
            for m in range(COLUMNS):
                y[m] = x[m]
        mix(block, first, second, cos, sin)
        for i in range(n):
            x, y = M[i, start : start + COLUMNS], block[i]
            for m in range(COLUMNS):
                x[m] = y[m]
    if whole < n:
        block[:, : n - whole] = M[:, whole:]
        mix(block, first, second, cos, sin)
        M[:, whole:] = block[:, : n - whole]


@compiled(fastmath={"contract"})
def mix(
    block: NDArray[Any],
    first: NDArray[Any],
    second: NDArray[Any],
    cos: NDArray[Any],
    sin: NDArray[Any],
) -> None:
    """`turn` of one block."""
    for p in range(len(first)):
        c, s, x, y = cos[p], sin[p], block[first[p]], block[second[p]]
        for m in range(COLUMNS):
            u, v = x[m], y[m]
            x[m] = c * u + s * v
            y[m] = c * v - s * u
