"""The loops over planes on a CPU: the twins of those in `fixed.turns`.

Z (n, D, K) as there; T (n, n) its cross products; w the width of a subspace.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from givens.kernels.cpu.grid import SUMS, compiled


def root_gains(Z: Tensor) -> Tensor:
    """`fixed.turns.root_gains`."""
    roots, scratch = Z.new_empty(len(Z), len(Z)), Z.new_empty(len(Z), len(Z))
    root_gains_loop(Z.numpy(), scratch.numpy(), roots.numpy())
    return roots


def plane_angles(Z: Tensor, pairs: Tensor) -> Tensor:
    """`fixed.turns.plane_angles`."""
    theta = Z.new_empty(len(pairs))
    angles(Z.numpy(), pairs.numpy(), theta.numpy())
    return theta


@compiled(fastmath=SUMS)
def cross_products(Z: NDArray[Any], T: NDArray[Any]) -> None:
    """T_ji = Z_jd · Z_id for i in subspace d, four of them at a time."""
    n, D, K = Z.shape
    w = n // D
    for j in range(n):
        for d in range(D):
            z, first, end = Z[j, d], d * w, (d + 1) * w
            for i in range(first, end - 3, 4):
                z0, z1, z2, z3 = Z[i, d], Z[i + 1, d], Z[i + 2, d], Z[i + 3, d]
                t0 = t1 = t2 = t3 = Z.dtype.type(0)
                for k in range(K):
                    t0 += z[k] * z0[k]
                    t1 += z[k] * z1[k]
                    t2 += z[k] * z2[k]
                    t3 += z[k] * z3[k]
                T[j, i], T[j, i + 1], T[j, i + 2], T[j, i + 3] = t0, t1, t2, t3
            for i in range(end - w % 4, end):
                z0 = Z[i, d]
                t0 = Z.dtype.type(0)
                for k in range(K):
                    t0 += z[k] * z0[k]
                T[j, i] = t0


@compiled(fastmath=SUMS)
def root_gains_loop(Z: NDArray[Any], T: NDArray[Any], roots: NDArray[Any]) -> None:
    """√gain of every plane, in both halves of (n, n); T is overwritten with the products of Z."""
    n, D, K = Z.shape
    w = n // D
    cross_products(Z, T)
    powers = np.empty((D, n), Z.dtype)
    own = np.empty(n, Z.dtype)
    for i in range(n):
        for d in range(D):
            z = Z[i, d]
            total = Z.dtype.type(0)
            for k in range(K):
                total += z[k] * z[k]
            powers[d, i] = total
        own[i] = powers[i // w, i]
    half, tiny = Z.dtype.type(0.5), np.finfo(Z.dtype).tiny
    columns = np.ascontiguousarray(T.T)
    for i in range(n):
        row, column, power, root = T[i], columns[i], powers[i // w], roots[i]
        for d in range(D):
            across = powers[d, i]
            for j in range(d * w, (d + 1) * w):
                alpha = (own[i] + own[j]) - (power[j] + across)
                beta = column[j] - row[j]
                beta = beta + beta
                length = math.sqrt(alpha * alpha + beta * beta)
                slope = beta * beta / max(length + alpha, tiny)
                root[j] = math.sqrt(half * (slope if alpha > 0 else length - alpha))


@compiled(fastmath=SUMS)
def angles(Z: NDArray[Any], pairs: NDArray[Any], theta: NDArray[Any]) -> None:
    """The best angle in each of the planes."""
    n, D, K = Z.shape
    w = n // D
    for p in range(len(pairs)):
        i, j = pairs[p, 0], pairs[p, 1]
        d, e = i // w, j // w
        a, b, c, f = Z[i, d], Z[j, d], Z[i, e], Z[j, e]
        alpha = beta = Z.dtype.type(0)
        for k in range(K):
            alpha += a[k] * a[k] - b[k] * b[k] + f[k] * f[k] - c[k] * c[k]
            beta += a[k] * b[k] - c[k] * f[k]
        theta[p] = 0.0 if d == e else 0.5 * math.atan2(2 * beta, alpha)
