"""Learning a rotation from the moments of the data's clusters.

With the codes held fixed, the best codewords are the means of the clusters, for any R. With
Z_d (K, n) the sums of the rotated vectors of each cluster of subspace d over √size, M_d = Z_dᵀZ_d,

    N·distortion = Σ|x|² − Σ_i (M_d(i))_ii        d(i) the subspace of axis i

so R is learned from D·K sums, without the data, and the codewords follow it. Each axis has a term
of its own, so the gains of disjoint planes are independent, and the best angle in the plane (i, j),
with i in subspace d and j in e, has a closed form:

    α = (M_d)_ii + (M_e)_jj − (M_d)_jj − (M_e)_ii      β = 2((M_d)_ij − (M_e)_ij)
    tan 2θ = β/α                                       gain = (√(α² + β²) − α)/2

T = Yᵀq, whose trace a rotation must raise, has T_ji = (M_d(i))_ji; the raw step of the paper and
Procrustes keep the codewords where they are and use T alone.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from givens import kernels, pairing
from givens.kmeans import Clusters
from givens.rotation import nearest, orthonormalise_rows_, skew_magnitudes, turn_rows_

Learned = Literal["opq", "cayley", pairing.Variant]

# The widest matrix for which GCD-S finds the exact matching. Beyond, that takes nearly as long as
# the rest of an iteration, and belief propagation is within a percent of it.
EXACT = 256
# Steps between two repairs of R's rounding errors.
TIDY_EVERY = kernels.TIDY_EVERY


def roots(clusters: Clusters) -> Float[Tensor, "n D K"]:
    """Z by axis, (n, D, K): a turn then mixes two contiguous rows."""
    scaled = clusters.sums / clusters.counts.clamp_min(1).sqrt()[..., None]
    _, K, n = clusters.sums.shape
    if n < K:
        # M_d has rank n at most, so n numbers an axis replace K. The multiple of the identity added
        # for the Cholesky factor is invariant under rotation.
        M = scaled.mT @ scaled
        least = M.diagonal(dim1=1, dim2=2).mean() * 1e-10 + torch.finfo(M.dtype).tiny
        M.diagonal(dim1=1, dim2=2).add_(least)
        scaled = torch.linalg.cholesky_ex(M).L.mT
    return scaled.permute(2, 0, 1).float().contiguous()


def scale_to_one(Z: Float[Tensor, "n D K"]) -> Float[Tensor, "n D K"]:
    """Scale Z to about 1 by a power of two, for results that do not depend on the data's scale.

    Gains are of fourth order in Z and would overflow early.
    """
    _, exponent = torch.frexp(Z.abs().amax())
    return torch.ldexp(Z, -exponent)


def cross_products(Z: Float[Tensor, "n D K"]) -> Float[Tensor, "n n"]:
    """T_ji = (M_d(i))_ji; this is Yᵀq if the codewords are the means of their clusters."""
    n, D, K = Z.shape
    own = Z.view(D, n // D, D, K).diagonal(dim1=0, dim2=2)
    return (Z.transpose(0, 1) @ own.permute(2, 1, 0)).transpose(0, 1).reshape(n, n)


@kernels.operation
def root_gains(Z: Float[Tensor, "n D K"]) -> Float[Tensor, "n n"]:
    """√gain of the best turn in each plane, symmetric to the last bit.

    A gain is of second order in the angle: its root takes the place of |A_ij|.
    """
    n, D, _ = Z.shape
    T = cross_products(Z)
    powers = Z.square().sum(-1).repeat_interleave(n // D, dim=1)
    own = powers.diagonal()
    beta = 2 * (T.mT - T)
    alpha = (own + own[:, None]) - (powers + powers.mT)
    length = torch.hypot(alpha, beta)
    # This form does not cancel where α is large.
    slope = beta.square() / (length + alpha).clamp_min(torch.finfo(beta.dtype).tiny)
    return (torch.where(alpha > 0, slope, length - alpha) / 2).sqrt()


@kernels.operation
def plane_angles(Z: Float[Tensor, "n D K"], pairs: Int[Tensor, "k 2"]) -> Float[Tensor, " k"]:
    """The best angles of the given planes, from their axes alone: O(nK)."""
    n, D, _ = Z.shape
    i, j = pairs.unbind(-1)
    d, e = i // (n // D), j // (n // D)
    id_, jd, ie, je = Z[i, d], Z[j, d], Z[i, e], Z[j, e]
    alpha = (id_.square() - jd.square() + je.square() - ie.square()).sum(-1)
    beta = 2 * (id_ * jd - ie * je).sum(-1)
    # A turn within a subspace changes nothing.
    return torch.where(d == e, 0, torch.atan2(beta, alpha) / 2)


def choose_planes(
    method: str, n: int, seed: int, step: int, magnitudes: Callable[[], Tensor]
) -> Int[Tensor, "k 2"]:
    """The planes that a step of the method turns; magnitudes are computed only if it needs them."""
    if method == "gcd-random":
        return pairing.random_pairs(n, seed, step=step)
    if method == "overlapping-random":
        return pairing.overlapping_random_pairs(n, seed, step=step)
    if method == "overlapping-greedy":
        return pairing.largest_pairs(magnitudes())
    return pairing.matched_pairs(magnitudes(), steepest=method == "gcd-steepest", exact=n <= EXACT)


def turn_best_(
    W: Float[Tensor, "n n"],
    Z: Float[Tensor, "n D K"],
    method: str,
    *,
    steps: int,
    seed: int,
    step: int,
) -> None:
    """Take steps of GCD with exact angles on W = Rᵀ and Z, in place, counted from `step`."""
    n = len(W)

    def once(s: int) -> Tensor:
        pairs = choose_planes(method, n, seed, s, lambda: root_gains(Z)).to(W.device)
        # Planes that share an axis turn one after another, each by its best angle at that point.
        for planes in (pairs,) if method.startswith("gcd") else pairs[:, None]:
            theta = plane_angles(Z, planes)
            turn_rows_(Z.view(n, -1), planes, theta, disjoint=True)
            turn_rows_(W, planes, theta, disjoint=True)
        return pairs

    # Greedy turns use only W and Z, in place, and do not synchronise with the host.
    turn = record(W, once) if method == "gcd-greedy" else once
    for s in range(step, step + steps):
        turn(s)
        _tidy_(W, seed, s)


@kernels.operation
def record(W: Tensor, once: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
    """Work on W that is the same at every step; on a GPU it is recorded once and replayed."""
    return once


def turn_raw_(
    W: Float[Tensor, "n n"],
    T: Float[Tensor, "n n"],
    method: str,
    *,
    rate: float,
    steps: int,
    seed: int,
    step: int,
) -> None:
    """The paper's steps θ = −λ A/√2 with A = 2(T − Tᵀ), T = Yᵀq/N, the codewords held; in place."""
    n = len(W)
    disjoint = method.startswith("gcd")
    for s in range(step, step + steps):
        pairs = choose_planes(method, n, seed, s, lambda: skew_magnitudes(T.clone())).to(W.device)
        i, j = pairs.unbind(-1)
        theta = -rate * math.sqrt(2) * (T[i, j] - T[j, i])
        turn_rows_(T, pairs, theta, disjoint=disjoint)
        turn_rows_(W, pairs, theta, disjoint=disjoint)
        _tidy_(W, seed, s)


def turn_cayley_(
    W: Float[Tensor, "n n"], T: Float[Tensor, "n n"], *, rate: float | None, steps: int
) -> None:
    """R ← R(I − S)(I + S)⁻¹ with S = −2λA: gradient descent on Cayley's S, from 0; in place.

    Without a rate, the step along A is found by doubling or halving while the distortion falls.
    """
    eye = torch.eye(len(W), dtype=W.dtype, device=W.device)
    A = 2 * (T - T.mT)
    tau = rate if rate is not None else 1 / float(A.norm().clamp_min(1e-30))
    for _ in range(steps):
        A = 2 * (T - T.mT)

        def cayley(tau: float, A: Tensor = A) -> Tensor:
            # The rows of T and W turn by Qᵀ.
            Q: Tensor = torch.linalg.solve(eye - 2 * tau * A, eye + 2 * tau * A)
            return Q.mT

        Q = cayley(tau)
        if rate is None:
            Q, tau = _search_step(cayley, T, tau)
        T.copy_(Q @ T)
        W.copy_(Q @ W)
    # One more product repairs the rounding of the others.
    W.copy_(W @ (3 * eye - W.mT @ W) / 2)


def _search_step(cayley: Callable[[float], Tensor], T: Tensor, tau: float) -> tuple[Tensor, float]:
    """Double or halve the step while the trace of T grows."""
    best, Q = float((cayley(tau) @ T).trace()), cayley(tau)
    for factor in (2.0, 0.5):
        while True:
            further = cayley(tau * factor)
            trace = float((further @ T).trace())
            if not trace > best:
                break
            best, Q, tau = trace, further, tau * factor
    eye = torch.eye(len(T), dtype=T.dtype, device=T.device)
    return (Q, tau) if best > float(T.trace()) else (eye, tau)


def turn_procrustes_(W: Float[Tensor, "n n"], T: Float[Tensor, "n n"]) -> None:
    """R ← R·Q with the Q in SO(n) that maximises tr QᵀT (OPQ), by SVD; in place."""
    Q = nearest(T.double(), torch.ones((), device=T.device)).to(W.dtype)
    W.copy_(Q.mT @ W)


def _tidy_(W: Tensor, seed: int, step: int) -> None:
    """Repair the rounding of W on a random pairing, every few steps."""
    if step % TIDY_EVERY == 0:
        pairs = pairing.random_pairs(len(W), seed, step=step, stream=kernels.TIDY_STREAM)
        orthonormalise_rows_(W, pairs.to(W.device))
