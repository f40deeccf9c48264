"""The opponents of GCD, each as an optimizer of a `Rotation`'s weight W.

`givens.baselines` has Cayley, the matrix exponential and POGO. Here are torch's parametrization,
the packages geotorch and geoopt, which are imported on use, and short implementations of RSDM,
Landing, Cayley SGD and QR, which have no package, and of POGO's arithmetic for CUDA graphs.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import givens
from givens.baselines import optimizer_for

PACKAGES = ("geotorch", "geoopt", "pogo-torch")
# Methods that a CUDA graph can capture; the others synchronise with the host.
CAPTURED = re.compile(r"gcd(-random|-greedy|-steepest|-all|-\d+)?|cayley|landing|pogo-products.*")
# Methods that compute W from other parameters in every forward pass.
PARAMETRIZED = ("cayley", "expm", "torch-cayley", "geotorch", "qr")


def make_optimizer(rotation: givens.Rotation, method: str, lr: float, seed: int = 0) -> Optimizer:
    """The optimizer of `rotation.weight` by `method`, which may parametrize it in place.

    "gcd-8" is GCD with 8 pairings for a gradient; `seed` is for the random draws of opponents.
    """
    if method in OPPONENTS:
        return OPPONENTS[method](rotation, lr, seed)
    if turns := re.fullmatch(r"gcd-(\d+)", method):
        return givens.GCD(rotation.parameters(), lr, turns=int(turns[1]))
    on_device = rotation.weight.is_cuda and method in PARAMETRIZED
    options = {"capturable": True} if on_device else {}
    return optimizer_for(rotation, method, lr, **options)


def _torch_cayley(rotation: givens.Rotation, lr: float, _: int) -> Optimizer:
    nn.utils.parametrizations.orthogonal(rotation, orthogonal_map="cayley")
    return Adam(rotation.parameters(), lr)


def _qr(rotation: givens.Rotation, lr: float, _: int) -> Optimizer:
    nn.utils.parametrize.register_parametrization(rotation, "weight", QR())
    return Adam(rotation.parameters(), lr)


class QR(nn.Module):
    """W = Q of Z = QT, with a free matrix Z that starts as W: DartQuant's QR-Orth (2025)."""

    def forward(self, Z: Tensor) -> Tensor:
        """The unique Q whose T has a positive diagonal; it is W at the start."""
        Q, T = torch.linalg.qr(Z)
        return Q * T.diagonal().sign()

    def right_inverse(self, W: Tensor) -> Tensor:
        """A Z with Q = W."""
        return W.clone()


def _geotorch(rotation: givens.Rotation, lr: float, _: int) -> Optimizer:
    import geotorch

    start = rotation.weight.detach().clone()
    geotorch.orthogonal(rotation, "weight")
    rotation.weight = start
    return Adam(rotation.parameters(), lr)


def _geoopt(rotation: givens.Rotation, lr: float, _: int) -> Optimizer:
    import geoopt

    weight = geoopt.ManifoldParameter(rotation.weight.detach(), manifold=geoopt.Stiefel())
    rotation.weight = weight
    return geoopt.optim.RiemannianAdam([weight], lr)


class _OneMatrix(Optimizer):
    """W ← `update`(W, G), which may keep state."""

    def __init__(self, rotation: givens.Rotation, lr: float, seed: int = 0) -> None:
        super().__init__([rotation.weight], {"lr": lr})
        self.generator = torch.Generator(rotation.weight.device).manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Do one step; closures are not supported."""
        (group,) = self.param_groups
        (W,) = group["params"]
        if W.grad is not None:
            W.copy_(self.update(W, W.grad, group["lr"]))

    def update(self, W: Tensor, G: Tensor, lr: float) -> Tensor:
        """The next W."""
        raise NotImplementedError

    def scaled_mean(self, G: Tensor, betas: tuple[float, float] = (0.9, 0.999)) -> Tensor:
        """VectorAdam: a running mean of G over the root of a running mean of ‖G‖², both unbiased.

        The count of steps is a tensor, so that replays of a CUDA graph increase it.
        """
        state = self.state[self.param_groups[0]["params"][0]]
        if not state:
            state["step"] = G.new_zeros((), dtype=torch.float64)
            state["mean"], state["square"] = torch.zeros_like(G), G.new_zeros(())
        t = state["step"].add_(1)
        mean = state["mean"].lerp_(G, 1 - betas[0])
        square = state["square"].lerp_(G.square().sum(), 1 - betas[1])
        size = (square / (1 - betas[1] ** t)).sqrt() + 1e-8
        return mean * (1 / ((1 - betas[0] ** t) * size)).to(G.dtype)


class POGOProducts(_OneMatrix):
    """POGO's arithmetic: six n×n×n products and no host synchronisation.

        M = W − lr/2·(WWᵀD − WDᵀW)
        W ← M + (M − MMᵀM)/2

    where D is VectorAdam's step. The package also skips gradients that are nearly zero, for which
    it synchronises with the host.
    """

    def update(self, W: Tensor, G: Tensor, lr: float) -> Tensor:
        """The next W."""
        D = self.scaled_mean(G)
        M = torch.addmm(W, W @ W.mT, D, alpha=-lr / 2)
        M = torch.addmm(M, W @ D.mT, W, alpha=lr / 2)
        return torch.addmm(M, M @ M.mT, M, beta=1.5, alpha=-0.5)


class POGOProductsTF32(POGOProducts):
    """As `POGOProducts`, with products in TF32, which only GPUs have."""

    def update(self, W: Tensor, G: Tensor, lr: float) -> Tensor:
        """The next W."""
        with _tf32():
            return super().update(W, G, lr)


class Landing(_OneMatrix):
    """W ← W − lr·(skew(D Wᵀ) + λ(WWᵀ − I))·W, skew(M) = (M − Mᵀ)/2 (Ablin and Peyré, 2022).

    D is VectorAdam's step and λ = 1. W leaves SO(n) and is pulled back at the rate lr·λ.
    """

    def update(self, W: Tensor, G: Tensor, lr: float, pull: float = 1.0) -> Tensor:
        """The next W."""
        P = self.scaled_mean(G) @ W.mT
        field = (P - P.mT) / 2 + pull * (W @ W.mT)
        return torch.addmm(W, field, W, beta=1 + lr * pull, alpha=-lr)


class CayleySGD(_OneMatrix):
    """Cayley SGD with momentum (Li, Li and Todorovic, 2020), the optimizer of SpinQuant.

        M ← 0.9 M − G,  B = M Wᵀ − W Wᵀ M Wᵀ/2,  A = B − Bᵀ,  M ← A W
        W ← (I − α/2·A)⁻¹ (I + α/2·A) W        by two rounds of a fixed-point iteration

    where α = min(lr, 1/‖A‖). The iteration stops early, so a large α leaves SO(n).
    """

    rounds = 2

    def update(self, W: Tensor, G: Tensor, lr: float) -> Tensor:
        """The next W."""
        state = self.state[self.param_groups[0]["params"][0]]
        M = state["mean"] = 0.9 * state.get("mean", torch.zeros_like(W)) - G
        P = M @ W.mT
        B = P - W @ (W.mT @ P) / 2
        A = B - B.mT
        M = state["mean"] = A @ W
        alpha = (1 / A.norm().clamp_min(1e-30)).clamp_max(lr)
        Y, A = W + alpha * M, alpha * A
        for _ in range(self.rounds):
            Y = torch.addmm(W, A, W + Y, alpha=0.5)
        return Y


class RSDM(_OneMatrix):
    """Turn a random block of r rows by an r×r rotation (Han et al., 2025).

        A = G_I W_Iᵀ − W_I G_Iᵀ        the derivatives of the block's planes
        W_I ← Q W_I                    Q of the QR decomposition of I − lr·A/‖A‖·√r

    A step turns the block by lr in root mean square. Blocks change from step to step, so there is
    no momentum.
    """

    def __init__(
        self, rotation: givens.Rotation, lr: float, seed: int = 0, *, rows: int | None = None
    ) -> None:
        """Turn `rows` axes in a step, by default n/2."""
        super().__init__(rotation, lr, seed)
        self.rows = rows or max(rotation.dim // 2, 2)

    def update(self, W: Tensor, G: Tensor, lr: float) -> Tensor:
        """The next W."""
        drawn = torch.randperm(len(W), generator=self.generator, device=W.device)[: self.rows]
        P = G[drawn] @ W[drawn].mT
        A = P - P.mT
        A *= self.rows**0.5 / A.norm().clamp_min(1e-30)
        eye = torch.eye(len(drawn), dtype=W.dtype, device=W.device)
        Q, triangle = torch.linalg.qr(eye - lr * A)
        # The decomposition with a positive diagonal is the one near I.
        Q = Q * triangle.diagonal().sign()
        return W.index_copy(0, drawn, Q @ W[drawn])


@contextmanager
def _tf32() -> Iterator[None]:
    """Use TF32 for products in this context."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    try:
        yield
    finally:
        matmul.allow_tf32 = before


OPPONENTS: dict[str, Callable[[givens.Rotation, float, int], Optimizer]] = {
    "torch-cayley": _torch_cayley,
    "qr": _qr,
    "cayley-sgd": CayleySGD,
    "geotorch": _geotorch,
    "geoopt": _geoopt,
    "pogo-products": POGOProducts,
    "pogo-products-tf32": POGOProductsTF32,
    "rsdm": RSDM,
    "landing": Landing,
}
