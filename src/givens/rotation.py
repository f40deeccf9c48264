"""Rotations of n-dimensional space and the planes they turn in (paper, sections 2.2 and 2.3).

R (n, n) rotation; W = Rᵀ, its row-major store; G = ∂L/∂R; A = GᵀR − RᵀG, skew;
R_ij(θ) the identity with cosθ at (i, i) and (j, j), −sinθ at (i, j), sinθ at (j, i).
"""

import contextlib
import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from givens import kernels
from givens.checks import check_seed, check_tensor, check_whole
from givens.kernels import GOLDEN, SPREAD, WORD

ORTHOGONAL_TOLERANCE = 1e-4
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Limit of the principal angles of a turn by an exponential, in radians; products of the power
# method; and a safety factor, since the power method approaches the norm from below.
LONGEST, POWERS, CAUTION = 0.4, 8, 1.25


class Rotation(nn.Module):
    """A learnable rotation: y = x R, x = y Rᵀ, with R in SO(n).

    The parameter is W = Rᵀ. The columns of R that a Givens rotation turns are then contiguous rows
    of W and of its gradient, which is what makes a step cheap; x R is `nn.Linear`'s x Wᵀ.
    """

    def __init__(
        self,
        dim: int,
        matrix: Tensor | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Start at `matrix`, or at the identity."""
        super().__init__()
        dim = check_whole("dim", dim, 1)
        if matrix is None:
            weight = torch.eye(dim, device=device, dtype=dtype)
        else:
            check_tensor("matrix", matrix)
            if matrix.shape != (dim, dim):
                raise ValueError(
                    f"matrix must have shape ({dim}, {dim}), but got {tuple(matrix.shape)}"
                )
            weight = matrix.detach().mT.to(device=device, dtype=dtype, copy=True).contiguous()
        check_dtype("Rotation", weight)
        if matrix is not None:
            check_orthogonal("matrix", weight)
            if determinant(weight) < 0:
                raise ValueError(
                    "matrix must have determinant +1, but got −1; "
                    "flip the sign of one column, or call givens.project(matrix) first"
                )
        self.weight = nn.Parameter(weight)

    @property
    def dim(self) -> int:
        """The dimension n."""
        return self.weight.shape[-1]

    @property
    def matrix(self) -> Float[Tensor, "n n"]:
        """R, a view of the parameter."""
        return self.weight.mT

    def forward(self, x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """Rotate the rows of x: x R."""
        return nn.functional.linear(x, self.weight)

    def inverse(self, y: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        """Rotate back: y Rᵀ."""
        return y @ self.weight

    def extra_repr(self) -> str:
        """Show the dimension in `print(model)`."""
        return f"dim={self.dim}"


def skew_gradient(
    R: Float[Tensor, "*batch n n"], G: Float[Tensor, "*batch n n"]
) -> Float[Tensor, "*batch n n"]:
    """A = GᵀR − RᵀG: A_ij is the derivative of L(R·R_ij(θ)) at θ = 0 (proposition 1)."""
    check_square("R", R)
    check_tensor("G", G)
    if G.shape != R.shape or G.dtype != R.dtype or G.device != R.device:
        raise ValueError(f"G must be like R, {_kind(R)}, but got {_kind(G)}")
    P = G.mT @ R
    return P - P.mT


def rotate_pairs_(
    R: Float[Tensor, "*batch m n"],
    pairs: Int[Tensor, "*batch k 2"],
    theta: Float[Tensor, "*batch k"],
) -> Float[Tensor, "*batch m n"]:
    """Right-multiply by ∏ R_ij(θ), in place.

    Column i becomes c·R_i + s·R_j, and column j c·R_j − s·R_i. Disjoint planes commute, so one
    pass over R is enough: O(mk). Planes that share an axis are turned one after another, in the
    order given. R may have any strides: `W.T` is a view.
    """
    for name, part in (("R", R), ("pairs", pairs), ("theta", theta)):
        check_tensor(name, part)
    shape = (*R.shape[:-2], pairs.shape[-2] if pairs.ndim > 1 else 0)
    if R.ndim < 2 or pairs.shape != (*shape, 2) or theta.shape != shape:
        raise ValueError(
            "R, pairs and theta must have shapes (m, n), (k, 2) and (k,), but got "
            f"{tuple(R.shape)}, {tuple(pairs.shape)} and {tuple(theta.shape)}"
        )
    if theta.dtype != R.dtype or not {theta.device, pairs.device} == {R.device}:
        raise ValueError(
            f"theta and pairs must go with R, {_kind(R)}, but got {_kind(theta)} and {_kind(pairs)}"
        )
    if not R.is_floating_point() or pairs.dtype not in INTEGERS:
        raise ValueError(
            f"R must hold floats and pairs integers, but got {R.dtype} and {pairs.dtype}"
        )
    if not theta.isfinite().all():
        raise ValueError("theta must be finite, but has NaN or infinite angles")
    if pairs.numel() == 0:
        return R
    n = R.shape[-1]
    i, j = pairs.unbind(-1)
    if pairs.min() < 0 or pairs.max() >= n or (i == j).any():
        raise ValueError(f"pairs must have two different axes in 0..{n - 1}, but got {pairs}")
    with torch.no_grad():
        turn_rows_(R.mT, pairs, theta.detach(), disjoint=False)
    return R


@kernels.operation
def turn_rows_(W: Tensor, pairs: Tensor, theta: Tensor, *, disjoint: bool) -> None:
    """Row i ← c·W_i + s·W_j, row j ← c·W_j − s·W_i, unchecked; W = Rᵀ makes it R ∏ R_ij(θ)."""
    if W.ndim > 2:
        for w, p, t in zip(W, pairs, theta, strict=True):
            turn_rows_(w, p, t, disjoint=disjoint)
    elif disjoint:
        i, j = pairs.unbind(-1)
        c, s = (part.to(W.dtype)[:, None] for part in cos_and_sin(theta))
        Wi, Wj = W[i], W[j]
        W[i] = c * Wi + s * Wj
        W[j] = c * Wj - s * Wi
    else:
        for p, t in zip(pairs, theta, strict=True):
            turn_rows_(W, p[None], t[None], disjoint=True)


def cos_and_sin(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the same angle; torch's own disagree on a huge one."""
    theta = theta.fmod(2 * math.pi)
    return theta.cos(), theta.sin()


@kernels.operation
def skew_magnitudes(P: Tensor) -> Tensor:
    """|P − Pᵀ|, symmetric to the last bit; P may be overwritten."""
    return (P - P.mT).abs()


@kernels.operation
def orthonormalise_rows_(W: Tensor, pairs: Tensor) -> None:
    """Multiply each pair of rows by (3I − Gram)/2, the Newton–Schulz step of its 2×2 Gram matrix.

    Rounding moves W off SO(n) by a random walk. One pass over a random pairing costs as much as a
    turn, and undoes the rounding of those pairs to first order.
    """
    i, j = pairs.unbind(-1)
    rows = torch.stack([W[i], W[j]], dim=1)
    gram = rows @ rows.mT
    rows = (1.5 * torch.eye(2, dtype=W.dtype, device=W.device) - gram / 2) @ rows
    W[i], W[j] = rows.unbind(1)


def turn_by_exponential_(W: Tensor, X: Tensor, follower: Tensor | None = None) -> None:
    """W ← exp(X) W for a skew X, in place, to second order and back to SO(n) by Newton–Schulz.

    With σ the largest singular value of X and Q = I + X + aX², QᵀQ is 1 − (2a − 1)σ² + a²σ⁴ in the
    plane that turns most; a minimises the deviation from 1 between 0 and σ. Principal angles are
    limited to LONGEST. The follower turns to first order. Costs five n × n products.
    """
    longest = CAUTION * spectral_norm(X)
    shorten = LONGEST / longest.clamp_min(LONGEST)
    X, sigma = shorten * X, shorten * longest
    a = 0.5 + (math.sqrt(2) - 1) / 4 * sigma**2
    XW = X @ W
    Y = W + XW + a * (X @ XW)
    # After one, only the rounding of float32 is left.
    for _ in range(1 if W.dtype is torch.float32 else 3):
        Y = 1.5 * Y - 0.5 * ((Y @ Y.mT) @ Y)
    W.copy_(Y)
    if follower is not None:
        follower += X @ follower


def spectral_norm(X: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch 1 1"]:
    """The largest singular value of a skew X, from below, by the power method.

    Starts at a fixed pseudo-random vector.
    """
    n, tiny = X.shape[-1], torch.finfo(X.dtype).tiny
    # Scaled to a norm between 1/√n and √n, so that no power overflows or underflows.
    most = X.abs().amax((-2, -1), keepdim=True).clamp_min(tiny)
    X = X / most / math.sqrt(n)
    word = torch.arange(n, device=X.device) * GOLDEN & WORD
    word = (word ^ word >> 15) * SPREAD & WORD
    v = ((word ^ word >> 13) * 2.0**-31 - 1).to(X.dtype)[:, None].expand(*X.shape[:-1], 1)
    u = v
    for _ in range(POWERS):
        u, v = v, X @ v
    before, after = (torch.linalg.vector_norm(w.double(), dim=-2, keepdim=True) for w in (u, v))
    norm: Tensor = most * math.sqrt(n) * (after / before.clamp_min(tiny)).to(X.dtype)
    return norm


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Disable autocast, only if it is on: entering its context takes as long as a kernel."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def orthogonality_error(R: Float[Tensor, "*batch n n"]) -> float:
    """Max |RᵀR − I|, computed in float64."""
    check_square("R", R)
    R = R.detach().double()
    eye = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    return float((R.mT @ R - eye).abs().max()) if R.numel() else 0.0


@kernels.operation
def largest(M: Tensor) -> float:
    """Max |M|, NaN if any entry is NaN; synchronises with the device."""
    return float(M.detach().abs().max())


def project(R: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """The rotation nearest to R: argmax of ⟨Q, R⟩ over Q in SO(n), by SVD in float64.

    It is also the Procrustes solution: project(XᵀY) minimises ‖XQ − Y‖ over rotations Q.
    """
    check_square("R", R)
    check_floats("R", R)
    if not R.isfinite().all():
        raise ValueError("R must be finite, but has NaN or infinite entries")
    return nearest(R.detach().double(), torch.ones((), device=R.device)).to(R.dtype)


def nearest(M: Tensor, det: Tensor) -> Tensor:
    """The orthogonal matrix of the given determinant nearest to M, by SVD in M's precision."""
    U, _, Vh = torch.linalg.svd(M)
    # If U Vᵀ has the other determinant, flip the direction that costs least.
    U[..., -1] *= (determinant(U @ Vh) * det)[..., None]
    return torch.matmul(U, Vh)


def determinant(Q: Tensor) -> Tensor:
    """±1 for an orthogonal matrix; the plain product of pivots underflows at n = 512."""
    sign: Tensor = torch.linalg.slogdet(Q).sign
    return sign


def random_rotation(dim: int, seed: int = 0) -> Float[Tensor, "n n"]:
    """A rotation drawn uniformly from SO(n) (Haar measure)."""
    dim, seed = check_whole("dim", dim, 1), check_seed(seed)
    generator = torch.Generator("cpu").manual_seed(seed)
    gaussian = torch.randn(dim, dim, generator=generator, dtype=torch.float64, device="cpu")
    Q, triangle = torch.linalg.qr(gaussian)
    Q *= triangle.diagonal().sign()
    Q[:, 0] *= determinant(Q)
    return torch.as_tensor(Q, dtype=torch.float32).contiguous()


def check_square(name: str, M: Tensor) -> None:
    """Raise unless M is a square matrix or a stack of them."""
    check_tensor(name, M)
    if M.ndim < 2 or M.shape[-1] != M.shape[-2]:
        raise ValueError(f"{name} must be square, (n, n), but got shape {tuple(M.shape)}")


def check_floats(name: str, M: Tensor) -> None:
    """Raise unless M holds real floating-point numbers, and any at all."""
    if not M.is_floating_point() or not M.numel():
        raise ValueError(
            f"{name} must hold floating-point numbers, but got {M.dtype} of shape {tuple(M.shape)}"
        )


def check_dtype(name: str, M: Tensor) -> None:
    """Raise unless M is float32 or float64: in less precision a rotation does not stay one."""
    if M.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{name} must be float32 or float64, but got {M.dtype}; "
            "keep the rotation in float32 and use torch.autocast around the model"
        )


def check_orthogonal(name: str, M: Tensor) -> None:
    """Raise unless M is orthogonal, with either determinant."""
    error = orthogonality_error(M)
    # `not <=`, so that NaN raises too.
    if not error <= ORTHOGONAL_TOLERANCE:
        raise ValueError(
            f"{name} must be orthogonal: max|RᵀR − I| = {error:.0e} > {ORTHOGONAL_TOLERANCE:.0e}; "
            "call givens.project first"
        )


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
