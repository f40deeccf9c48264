"""The baselines of GCD, in the same form: a `Rotation` and an optimizer that learns it.

Cayley and the matrix exponential rebuild W from a skew matrix at every forward pass; Procrustes
follows the gradient off SO(n) and comes back by SVD; POGO follows it and comes nearly back by a few
products; the penalty pulls W towards SO(n) and lets it leave; frozen leaves it alone.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Adam, Optimizer

from givens.optim import GCD
from givens.pairing import Pairing, Variant
from givens.rotation import Rotation, determinant, nearest

Method = Literal["gcd", "gcd-all", Variant, "cayley", "expm", "svd", "pogo", "penalty", "frozen"]


def optimizer_for(rotation: Rotation, method: Method, lr: float, **options: Any) -> Optimizer:
    """The optimizer that learns `rotation` by `method`.

    "gcd" is GCD with its defaults, "gcd-all" turns every plane in every step; "gcd-random",
    "gcd-greedy", "gcd-steepest" and the overlapping variants are the paper's: one pairing for a
    gradient, with one scale for the matrix. `options` go to the optimizer. "cayley" and "expm"
    parametrize the rotation's weight in place, around its current value; `rotation` is used as
    before. "pogo" needs the package pogo-torch.
    """
    if method not in get_args(Method):
        known = ", ".join(map(repr, get_args(Method)))
        raise ValueError(f"method must be one of {known}, but got {method!r}")
    if method in ("gcd", "gcd-all"):
        turns: Any = "all" if method == "gcd-all" else None
        return GCD(rotation.parameters(), lr, **{"turns": turns, **options})
    if method.startswith(("gcd-", "overlapping-")):
        pairing = cast(Pairing, method.removeprefix("gcd-"))
        paper: Any = {"pairing": pairing, "turns": 1, "adapt": "matrix"}
        return GCD(rotation.parameters(), lr, **{**paper, **options})
    if method in ("cayley", "expm"):
        mapped = Cayley if method == "cayley" else Exponential
        parametrize.register_parametrization(rotation, "weight", mapped(rotation.weight))
        return Adam(rotation.parameters(), lr, **options)
    others: Any = {"svd": Procrustes, "penalty": Penalty, "pogo": make_pogo, "frozen": Frozen}
    return cast(Optimizer, others[method](rotation.parameters(), lr, **options))


class Cayley(nn.Module):
    """W = (I − S)(I + S)⁻¹ W₀ with S skew; cannot reach a turn by π in any plane from W₀."""

    base: Tensor

    def __init__(self, base: Float[Tensor, "n n"]) -> None:
        super().__init__()
        self.register_buffer("base", base.detach().clone())

    def forward(self, X: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
        """W, from the part of X above its diagonal."""
        S, eye = _skew(X)
        # (I − S) and (I + S)⁻¹ commute. I + S is never singular; checking would synchronise a GPU.
        W: Tensor = torch.linalg.solve_ex(eye + S, (eye - S) @ self.base).result
        return W

    def right_inverse(self, W: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
        """Restart from W, with S = 0."""
        self.base.copy_(W.detach())
        return torch.zeros_like(W)


class Exponential(Cayley):
    """W = exp(S) W₀ with S skew."""

    def forward(self, X: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
        """W, from the part of X above its diagonal."""
        S, _ = _skew(X)
        return torch.matrix_exp(S) @ self.base


class Procrustes(Optimizer):
    """A gradient step off SO(n), then back to the nearest orthogonal matrix by SVD."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """W ← nearest(W − lr·G), keeping the determinant."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            for W in group["params"]:
                if W.grad is not None:
                    state = self.state[W]
                    if not state:
                        state["det"] = determinant(W)
                    W.copy_(nearest(W - group["lr"] * W.grad, state["det"]))
        return loss


class Penalty(Adam):
    """Adam on the loss plus weight·‖WWᵀ − I‖²: W is only nearly a rotation."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, *, weight: float = 1.0, **options: Any
    ) -> None:
        super().__init__(params, lr, **options)
        # For these groups, and for those added later.
        self.defaults["weight"] = weight
        for group in self.param_groups:
            group.setdefault("weight", weight)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Add the penalty's gradient, 4·weight·(WWᵀ − I)W, and take Adam's step."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            for W in group["params"]:
                if W.grad is not None:
                    W.grad += 4 * group["weight"] * (W @ W.mT @ W - W)
        super().step()
        return loss


def make_pogo(params: Iterable[Tensor], lr: float = 1e-3) -> Optimizer:
    """POGO of the package pogo-torch with its VectorAdam: six n×n×n products.

    W is only nearly orthogonal: a large step leaves SO(n), and the next ones come back. The package
    counts steps in the parameter group, where a checkpoint would lose them, and fails after a first
    gradient of zeros; here the count is in the state.
    """
    try:
        # Its import compiles a function, by parts of torch that torch deprecates.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from pogo import POGO, base
    except ImportError as error:
        raise ImportError("the method pogo needs pogo-torch: pip install pogo-torch") from error

    class Counted(POGO):  # type: ignore[misc]
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = _evaluate(closure)
            for group in self.param_groups:
                (W,) = group["params"]
                group["step"] = self.state[W].get("step", 0)
            super().step()
            for group in self.param_groups:
                (W,), count = group["params"], group.pop("step")
                if "exp_avg" in self.state[W]:
                    self.state[W]["step"] = count
            return loss

    groups = [{"params": [W]} for W in params]
    return cast(Optimizer, Counted(groups, base.VectorAdam(), lr, flatten_fn=_as_batch))


def _as_batch(W: Tensor) -> Tensor:
    return W[None]


class Frozen(Optimizer):
    """An optimizer that changes nothing."""

    def __init__(self, params: Iterable[Any], lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, if any."""
        return _evaluate(closure)


def _skew(X: Tensor) -> tuple[Tensor, Tensor]:
    upper = X.triu(1)
    return upper - upper.mT, torch.eye(X.shape[-1], dtype=X.dtype, device=X.device)


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
