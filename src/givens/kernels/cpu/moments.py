"""The running means of all planes on a CPU: the loops of `optim.unit_derivatives`.

P, planes, ambient (n, n) row-major; planes has m above its diagonal and √v below it; ambient is Sᵀ.
The matrices are processed in tiles that stay in the cache.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from givens.kernels.cpu.grid import SUMS, compiled

TILE = 16


@compiled(fastmath=SUMS)
def update_moments(
    P: NDArray[Any],
    planes: NDArray[Any],
    ambient: NDArray[Any],
    known: float,
    beta1: float,
    beta2: float,
    follow: bool,
    errors: NDArray[Any],
) -> None:
    """Update both means and √v by P = G Wᵀ, and replace P by D above the diagonal.

    known is the bias correction of the old means; `follow` selects the ambient mean for D. errors
    (2,) gets Σ_{i<j} (A − m)² of both old means.
    """
    n, kind = len(P), P.dtype.type
    old, new = kind(beta1), kind(1 - beta1)
    keep, take = kind(math.sqrt(beta2)), kind(math.sqrt(1 - beta2))
    # What lies below the diagonal, transposed, so that the long loops run along rows. Rows of a
    # strip are not a power of two apart, or they would push each other out of the cache.
    strips, a = np.empty((3, TILE, n + TILE), P.dtype), np.empty(n, P.dtype)
    errors[:] = 0
    for r in range(0, n, TILE):
        mirror(P, strips[0], r)
        mirror(ambient, strips[1], r)
        mirror(planes, strips[2], r)
        for i in range(min(TILE, n - r)):
            d = r + i
            # ambient is Sᵀ: S_ij lies below the diagonal.
            ambient[d, d] = strips[1, i, d] = old * ambient[d, d] + new * P[d, d]
            P[d, d] = 0
            p, below = P[d, d + 1 :], strips[0, i, d + 1 : n]
            lower, upper = ambient[d, d + 1 :], strips[1, i, d + 1 : n]
            m, size = planes[d, d + 1 :], strips[2, i, d + 1 : n]
            change = a[d + 1 :]
            subtract(p, below, change)
            errors[0] += missed(change, m, kind(known))
            errors[1] += missed_by_difference(change, upper, lower, kind(known))
            blend(m, change, old, new)
            blend(upper, p, old, new)
            blend(lower, below, old, new)
            grow(size, change, keep, take)
            if follow:
                subtract(upper, lower, p)
                divide(p, p, size)
            else:
                divide(p, m, size)
        mirror_back(strips[1], ambient, r)
        mirror_back(strips[2], planes, r)


# Each loop has few arrays, so that the compiler can vectorize it.
@compiled(fastmath=SUMS)
def subtract(x: NDArray[Any], y: NDArray[Any], out: NDArray[Any]) -> None:
    """Out ← x − y."""
    for j in range(len(x)):
        out[j] = x[j] - y[j]


@compiled(fastmath=SUMS)
def missed(a: NDArray[Any], m: NDArray[Any], known: Any) -> float:
    """Σ (a − known·m)², in double precision, where no square overflows."""
    total = 0.0
    for j in range(len(a)):
        miss = np.float64(a[j] - known * m[j])
        total += miss * miss
    return total


@compiled(fastmath=SUMS)
def missed_by_difference(
    a: NDArray[Any], upper: NDArray[Any], lower: NDArray[Any], known: Any
) -> float:
    """Σ (a − known·(upper − lower))²."""
    total = 0.0
    for j in range(len(a)):
        miss = np.float64(a[j] - known * (upper[j] - lower[j]))
        total += miss * miss
    return total


@compiled(fastmath=SUMS)
def blend(mean: NDArray[Any], x: NDArray[Any], old: Any, new: Any) -> None:
    """Mean ← old·mean + new·x."""
    for j in range(len(mean)):
        mean[j] = old * mean[j] + new * x[j]


@compiled(fastmath=SUMS)
def grow(size: NDArray[Any], a: NDArray[Any], keep: Any, take: Any) -> None:
    """Size ← √(keep²·size² + take²·a²), where no square overflows or vanishes."""
    one = size.dtype.type(1)
    for j in range(len(size)):
        x, y = keep * size[j], take * abs(a[j])
        top = x if x > y else y
        ratio = (x + y - top) / (top if top > 0 else one)
        size[j] = top * np.sqrt(one + ratio * ratio)


@compiled(fastmath=SUMS)
def divide(out: NDArray[Any], m: NDArray[Any], size: NDArray[Any]) -> None:
    """Out ← m/size, and 0 where size is 0."""
    none = out.dtype.type(0)
    for j in range(len(out)):
        out[j] = m[j] / size[j] if size[j] > none else none


@compiled()
def mirror(M: NDArray[Any], strip: NDArray[Any], r: int) -> None:
    """strip_ij ← M_j,r+i from the diagonal on, tile by tile to avoid cache conflicts if n = 2ᵏ."""
    n = len(M)
    rows = min(TILE, n - r)
    for c in range(r, n, TILE):
        for j in range(c, min(c + TILE, n)):
            row = M[j, r : r + rows]
            for i in range(rows):
                strip[i, j] = row[i]


@compiled()
def mirror_back(strip: NDArray[Any], M: NDArray[Any], r: int) -> None:
    """M_j,r+i ← strip_ij below the diagonal."""
    n = len(M)
    for c in range(r, n, TILE):
        for j in range(c, min(c + TILE, n)):
            row = M[j, r : min(r + TILE, j)]
            for i in range(len(row)):
                row[i] = strip[i, j]
