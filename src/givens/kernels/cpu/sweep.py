"""All pairings of a step in one sweep over the matrix, for a CPU.

A block of columns goes through all of them before the next one does, and stays in the cache.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from givens.kernels.cpu.grid import compiled

# Numbers of a block of columns.
BLOCK = 1 << 17


@compiled()
def angles(
    D: NDArray[Any], partners: NDArray[Any], rate: float, cos: NDArray[Any], sin: NDArray[Any]
) -> None:
    """Cos θ and sin θ of every plane, θ = rate·D_ij, at its first axis."""
    turns, n = partners.shape
    for k in range(turns):
        for i in range(n):
            j = partners[k, i]
            if j > i:
                theta = rate * np.float64(D[i, j])
                cos[k, i], sin[k, i] = math.cos(theta), math.sin(theta)


@compiled(fastmath={"contract"})
def turn(M: NDArray[Any], partners: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any]) -> None:
    """Row i ← cos·M_i + sin·M_j, row j ← cos·M_j − sin·M_i, pairing after pairing."""
    turns, n = partners.shape
    columns = max(BLOCK // n, 64)
    for start in range(0, n, columns):
        end = min(start + columns, n)
        for k in range(turns):
            for i in range(n):
                j = partners[k, i]
                if j > i:
                    c, s = cos[k, i], sin[k, i]
                    x, y = M[i, start:end], M[j, start:end]
                    for m in range(len(x)):
                        u, v = x[m], y[m]
                        x[m] = c * u + s * v
                        y[m] = c * v - s * u
