"""The loops of k-means for a CPU, compiled by numba.

X (N, n) vectors cut into D sub-vectors of width w; C (D, K, w) codewords; codes (N, D).
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from givens.kernels.cpu.grid import compiled
from givens.kmeans import Clusters

# Vectors that are compared at once, one in each vector lane: with their distances they fill L1.
BLOCK = 256
# Coordinates and codewords that stay in registers while a block passes by.
DEPTH, BREADTH = 4, 2
# Multiplications below which threads cost more than they save.
SMALL = 1 << 22


def assign(Y: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """`kmeans.assign`."""
    codes, distances = nearest(Y.contiguous().numpy(), C.contiguous().numpy())
    return torch.from_numpy(codes), torch.from_numpy(distances)


def add_up_(Y: Tensor, codes: Tensor, distances: Tensor, to: Clusters, *, whole: bool) -> None:
    """`kmeans.add_up_`; sums in float32 over these vectors."""
    added = torch.zeros_like(to.sums, dtype=torch.float32)
    arrays = (Y, codes, distances, added, to.counts, to.errors)
    add_up(*(array.numpy() for array in arrays), whole=whole)
    to.sums.add_(added)


def nearest(
    X: NDArray[np.float32], C: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Codes (N, D) and squared distances (N, D), on as many threads as torch has."""
    N, (D, K, w) = len(X), C.shape
    codes, errors = np.empty((N, D), np.int32), np.empty((N, D), np.float32)
    # A repeated last codeword is never nearer than itself, and a coordinate 0 is no distance.
    fill = ((0, 0), (0, -K % BREADTH), (0, 0))
    C = np.pad(np.pad(C, fill, "edge"), ((0, 0), (0, 0), (0, -w % DEPTH)))
    threads = torch.get_num_threads() if N * C[0].size * D > SMALL else 1
    rows = -(-N // (threads * BLOCK)) * BLOCK
    parts = [slice(first, first + rows) for first in range(0, N, max(rows, 1))]
    in_parallel(lambda p: scan(X[p], C, w, codes[p], errors[p]), parts)
    return codes, errors


def add_up(
    X: NDArray[np.float32],
    codes: NDArray[np.int32],
    errors: NDArray[np.float32],
    sums: NDArray[np.float32],
    counts: NDArray[np.float64],
    losses: NDArray[np.float64],
    *,
    whole: bool,
) -> None:
    """Add vectors, ones and errors to the clusters of each subspace.

    sums (D, K, n) take whole vectors, (D, K, w) sub-vectors. A thread has whole subspaces, so that
    the order of the additions, and the result, depend on nothing else.
    """
    width = sums.shape[2]

    def add(d: int) -> None:
        part = X if whole else X[:, d * width : (d + 1) * width]
        scatter(part, codes[:, d], errors[:, d], sums[d], counts[d], losses[d])

    in_parallel(add, range(len(sums)))


def in_parallel(work: Callable[[Any], None], parts: Any) -> None:
    """Do the work on every part; the threads end with it, so that a fork finds none."""
    threads = min(torch.get_num_threads(), len(parts))
    if threads < 2:
        for part in parts:
            work(part)
        return
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, part) for part in parts]:
            done.result()


@compiled(fastmath={"contract"})
def scan(
    X: NDArray[Any], C: NDArray[Any], w: int, codes: NDArray[Any], errors: NDArray[Any]
) -> None:
    """The nearest codeword of each sub-vector, and how far it is: Σ (x − c)², nothing expanded."""
    D, K, depth = C.shape
    x = np.zeros((depth, BLOCK), np.float32)
    a, b = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    least, index = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.int32)
    for first in range(0, len(X), BLOCK):
        rows = min(BLOCK, len(X) - first)
        for d in range(D):
            for p in range(rows):
                for j in range(w):
                    x[j, p] = X[first + p, d * w + j]
            least[:] = np.inf
            index[:] = 0
            a[:] = 0
            b[:] = 0
            for k in range(0, K, BREADTH):
                c, e = C[d, k], C[d, k + 1]
                here, next_one = np.int32(k), np.int32(k + 1)
                for j in range(0, depth, DEPTH):
                    c0, c1, c2, c3 = c[j], c[j + 1], c[j + 2], c[j + 3]
                    e0, e1, e2, e3 = e[j], e[j + 1], e[j + 2], e[j + 3]
                    x0, x1, x2, x3 = x[j], x[j + 1], x[j + 2], x[j + 3]
                    if j + DEPTH < depth:
                        # Cleared, not multiplied by 0, which would make NaN of an overflow.
                        if j == 0:
                            a[:] = 0
                            b[:] = 0
                        for p in range(BLOCK):
                            u0, u1, u2, u3 = x0[p], x1[p], x2[p], x3[p]
                            f = (u0 - c0) ** 2 + (u1 - c1) ** 2 + (u2 - c2) ** 2 + (u3 - c3) ** 2
                            g = (u0 - e0) ** 2 + (u1 - e1) ** 2 + (u2 - e2) ** 2 + (u3 - e3) ** 2
                            a[p] += f
                            b[p] += g
                    else:
                        # The last ones are compared at once, and never stored.
                        for p in range(BLOCK):
                            u0, u1, u2, u3 = x0[p], x1[p], x2[p], x3[p]
                            f = (u0 - c0) ** 2 + (u1 - c1) ** 2 + (u2 - c2) ** 2 + (u3 - c3) ** 2
                            g = (u0 - e0) ** 2 + (u1 - e1) ** 2 + (u2 - e2) ** 2 + (u3 - e3) ** 2
                            f += a[p]
                            g += b[p]
                            found = g if g < f else f
                            at = next_one if g < f else here
                            less = found < least[p]
                            least[p] = found if less else least[p]
                            index[p] = at if less else index[p]
            for p in range(rows):
                codes[first + p, d] = index[p]
                errors[first + p, d] = least[p]


@compiled()
def scatter(
    X: NDArray[Any],
    codes: NDArray[Any],
    errors: NDArray[Any],
    sums: NDArray[Any],
    counts: NDArray[Any],
    losses: NDArray[Any],
) -> None:
    """Add every row, a one and its error to its cluster."""
    for p in range(len(X)):
        k = codes[p]
        total, row = sums[k], X[p]
        for m in range(len(row)):
            total[m] += row[m]
        counts[k] += 1
        losses[k] += errors[p]
