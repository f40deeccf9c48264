"""A step of GCD along one pairing on a CPU: derivatives, angles, turns, and the random draw.

W, G, H (n, n) row-major; pairs (k, 2); a, theta (k,). Each loop equals its twin in torch.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from givens import kernels
from givens.kernels import GOLDEN, SHUFFLE_BITS, SHUFFLE_ROUNDS, TIDY_STREAM
from givens.kernels.cpu.grid import SUMS, WORD, compiled, hashed


def turn_rows_(W: Tensor, pairs: Tensor, theta: Tensor, *, disjoint: bool) -> None:
    """`rotation.turn_rows_`; planes are turned in order, whether `disjoint` or not."""
    if W.ndim > 2:
        for w, p, t in zip(W, pairs, theta, strict=True):
            turn_rows_(w, p, t, disjoint=disjoint)
    else:
        turn_rows(W.numpy(), pairs.numpy(), theta.numpy())
        kernels.mark_written(W)


def orthonormalise_rows_(W: Tensor, pairs: Tensor) -> None:
    """`rotation.orthonormalise_rows_`."""
    orthonormalise_rows(W.numpy(), pairs.numpy())
    kernels.mark_written(W)


def largest(M: Tensor) -> float:
    """`rotation.largest`: without the sign, the bits of floats sort like the numbers."""
    entries = M.detach().numpy()
    bits = f"i{entries.itemsize}"
    most = largest_bits(entries.reshape(-1).view(bits), np.iinfo(bits).max)
    return float(np.array(most, bits).view(entries.dtype))


def draw_pairs(n: int, seed: int, step: int, stream: int, turn: int) -> Tensor:
    """`pairing.draw_pairs`."""
    pairs = torch.empty(n // 2, 2, dtype=torch.int64, device="cpu")
    draw_pairs_loop(n, seed, step, stream, turn, pairs.numpy())
    return pairs


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
def draw_pairs_loop(
    n: int, seed: int, step: int, stream: int, turn: int, pairs: NDArray[Any]
) -> None:
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
    places = (n + 1) // 2
    around = 2 * places - 1
    for p in range(n // 2):
        # A round robin (circle method): turn + a meets turn − a, and turn meets the last place.
        a = (p + 1) % places
        for side in range(2):
            x = WORD((turn + a) % around if side == 0 else (turn - a) % around)
            if side == 1 and a == 0:
                x = WORD(around)
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
def largest_bits(keys: NDArray[Any], mask: int) -> Any:
    """The largest of integers without their sign bit."""
    most, unsigned = keys[0] & keys.dtype.type(mask), keys.dtype.type(mask)
    for m in range(len(keys)):
        most = max(most, keys[m] & unsigned)
    return most


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
    turn: int,
) -> bool:
    """`optim.turn_pairing_` of a stack, given H; returns False, with nothing turned, for a bad G.

    pairs (b, k, 2) are the planes; with `draw` they are drawn here, so that one call from Python is
    a whole step of GCD-R.
    """
    k = pairs.shape[1]
    # In double precision no angle overflows.
    angles = np.empty((len(W), k))
    squares = np.empty(len(W))
    for b in range(len(W)):
        if draw:
            draw_pairs_loop(len(W[b]), seed, step, stream + b, turn, pairs[b])
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
            if turn == 0:
                before = np.float64(scale[b])
                scale[b] = math.sqrt(decay * before**2 + gain * squares[b] / max(k, 1))
            angle = factor / np.float64(scale[b]) if scale[b] > 0 else 0.0
        for p in range(k):
            angles[b, p] *= angle
        turn_rows(W[b], pairs[b], angles[b])
        if momentum:
            turn_rows(H[b], pairs[b], angles[b])
    return True


@compiled()
def tidy(W: NDArray[Any], seed: int, step: int, stream: int) -> None:
    """Correct rounding errors in a stack of matrices, on a random pairing of their rows."""
    for b in range(len(W)):
        drawn = np.empty((len(W[b]) // 2, 2), np.int64)
        draw_pairs_loop(len(W[b]), seed, step, stream + b + TIDY_STREAM, 0, drawn)
        orthonormalise_rows(W[b], drawn)


@compiled()
def rest_is_finite(G: NDArray[Any], pairs: NDArray[Any]) -> bool:
    """If n is odd, whether the row of G that is in no pair is finite, too."""
    n = len(G)
    if n % 2 == 0:
        return True
    rest = n * (n - 1) // 2
    for p in range(len(pairs)):
        rest -= pairs[p, 0] + pairs[p, 1]
    return bool(finite(G[rest]))
