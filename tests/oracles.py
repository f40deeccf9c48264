"""Slow, plain and independent versions of what the library computes."""

import contextlib
import itertools
import warnings

import numpy as np
import torch


@contextlib.contextmanager
def waiting_is_an_error():
    """Fail where the host waits for the GPU."""

    def mode(name):
        with warnings.catch_warnings():
            # torch says that the mode is a prototype.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode(name)

    mode("error")
    try:
        yield
    finally:
        mode("default")


def plane_rotation(n, i, j, theta):
    """R_ij(θ) as the design writes it: −sinθ at (i, j), sinθ at (j, i)."""
    R = torch.eye(n, dtype=torch.float64)
    c, s = np.cos(float(theta)), np.sin(float(theta))
    R[i, i] = R[j, j] = c
    R[i, j], R[j, i] = -s, s
    return R


def product(n, pairs, theta):
    R = torch.eye(n, dtype=torch.float64)
    for (i, j), angle in zip(pairs.tolist(), theta.tolist(), strict=True):
        R = R @ plane_rotation(n, i, j, angle)
    return R


def rotation(n, seed=0):
    """A rotation by scipy, which shares no code with the library."""
    from scipy.stats import special_ortho_group

    if n == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    return torch.from_numpy(special_ortho_group.rvs(n, random_state=seed))


def skew(n, seed=0, dtype=torch.float32):
    A = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (A - A.T).to(dtype)


def hashed(x):
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
    return x ^ (x >> 16)


def sorted_greedy(A):
    """Sort all pairs by |A_ij|, ties by the hash, and take each whose axes are free."""
    n = len(A)
    rows = A.double().abs().tolist()
    order = sorted(
        itertools.combinations(range(n), 2),
        key=lambda p: (rows[p[0]][p[1]], hashed(p[0] * n + p[1])),
        reverse=True,
    )
    free, pairs = set(range(n)), []
    for i, j in order:
        if i in free and j in free:
            free -= {i, j}
            pairs.append((i, j))
    return sorted(pairs)


def weight(A, pairs):
    """Σ A_ij² over the pairs."""
    return float(A.double()[pairs[:, 0], pairs[:, 1]].square().sum())


def mean_random_weight(A):
    """The mean of Σ A_ij² over all pairings: every pair is in one of n − 1 (n odd: n) of them."""
    n = len(A)
    return float(A.double().triu(1).square().sum()) / (n - 1 if n % 2 == 0 else n)


def best_linear(T):
    """Min ⟨T, R⟩ over SO(n), by SVD: minus the singular values, the last one signed."""
    U, s, Vt = np.linalg.svd(-T.double().numpy())
    s[-1] *= np.sign(np.linalg.det(U @ Vt))
    return -s.sum()
