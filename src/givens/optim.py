"""Givens coordinate descent, an optimizer for rotations (paper, algorithms 1 and 2).

Every step turns ⌊n/2⌋ planes (i, j) at once, each by an angle θ against its own derivative:

    A = GᵀR − RᵀG        A_ij = d/dθ L(R·R_ij(θ)) at 0, all planes at once
    pairs ⊂ {i < j}      at random, greedily by |A_ij|, or to maximise Σ A_ij²
    R ← R ∏ R_ij(−λ A_ij)

so R stays a rotation without inverse, exponential or SVD. R is stored as W = Rᵀ: with ∂L/∂W = G
from here on, A = G Wᵀ − W Gᵀ, and a turn mixes two contiguous rows of W.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from givens import kernels, pairing
from givens.rotation import (
    check_dtype,
    check_orthogonal,
    is_finite,
    orthonormalise_rows_,
    skew_magnitudes,
    turn_rows_,
)

Pairing = Literal["random", "greedy", "steepest", "overlapping-random", "overlapping-greedy"]
Adapt = Literal["adam", "adagrad"]


class GCD(Optimizer):
    """Givens coordinate descent on square orthogonal matrices, of shape (n, n) or stacks (b, n, n).

    Takes `Rotation`s' parameters or any orthogonal weight, such as an `nn.Linear`'s, and keeps its
    determinant. The whole optimizer is `step_` below.
    """

    # GradScaler then hands over `grad_scale` and `found_inf` instead of waiting for the device.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        *,
        pairing: Pairing = "greedy",
        adapt: Adapt | None = "adam",
        betas: tuple[float, float] | None = None,
        exact: bool = True,
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        """Choose the planes by `pairing`, the angles by `adapt`.

        Args:
            params: the matrices, or groups of them.
            lr: a typical angle in radians where `adapt` is set; the paper's λ where it is None.
            pairing: "random" GCD-R, "greedy" GCD-G, "steepest" GCD-S, or the ablations
                "overlapping-random" and "overlapping-greedy", whose planes may share axes.
            adapt: "adam" divides by a running root mean square of the turned derivatives, one
                number for each matrix, and follows a momentum; "adagrad" by the root of their sum;
                None is the paper's raw step θ = −λ A_ij/√2, which has the loss's scale in it.
            betas: decay of Adam's momentum and of its scale. By default (0.9, 0.99), but without
                momentum where the planes are random: a step then reads W and G once and no more.
            exact: whether "steepest" is the exact maximum, O(n³) on one core, or nearly it.
            seed: of the random planes, which depend on nothing but it and the step.
            maximize: ascend instead.
        """
        defaults = {
            "lr": lr,
            "pairing": pairing,
            "adapt": adapt,
            "betas": betas,
            "exact": exact,
            "seed": seed,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add matrices with options of their own, once they prove to be orthogonal."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on from a state that may have been saved on another device."""
        super().__setstate__(state)
        for W, saved in self.state.items():
            _place_step(saved, W)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        if not set_to_none or torch.compiler.is_compiling() or _is_watched(self):
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for W in group["params"]:
                W.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Turn every matrix that has a gradient.

        On a CPU a gradient that is not finite is an error, and no matrix is turned. A device is not
        waited for: there the matrix with that gradient stays as it is, and state["skipped"] counts.
        """
        if torch.compiler.is_compiling():
            return _untraced_step(self, closure)
        return _told_step(self, closure) if _is_watched(self) else self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # this is how torch knows not to wrap it

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Both come from a GradScaler.
        loss_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.device.type == "cpu" and found_inf:
            return loss

        work = []
        stream = 0
        for group in self.param_groups:
            for W in group["params"]:
                if W.grad is not None:
                    # It has a history of its own after `backward(create_graph=True)`.
                    G = W.grad.detach() if W.grad.requires_grad else W.grad
                    _check_layout(W, G)
                    work.append((W, G if loss_scale is None else G / loss_scale, group, stream))
                stream += 1 if W.ndim == 2 else len(W)
        if len(work) > 1:
            for W, G, _, _ in work:
                check_gradient(W, G)
        for W, G, group, stream in work:
            state = self.state[W]
            _start(state, W, group)
            backend = kernels.choose(W)
            if backend == "reference":
                step_(W, G, state, group, stream, found_inf)
                continue
            from givens import twins

            if backend == "numba":
                twins.step_compiled_(W, G.contiguous(), state, group, stream, self._workspaces)
            else:
                twins.step_fused_(W, G, state, group, stream, found_inf, self._workspaces)
        return loss

    @functools.cached_property
    def _workspaces(self) -> dict[Any, Any]:
        """Buffers by matrix, made once; no part of the state."""
        return {}


def _is_watched(optimizer: Optimizer) -> bool:
    """Whether a profiler or hooks are to be told of a step.

    torch wraps every `step` to tell them, which costs a fifth of a step of GCD-R at n = 512, and
    `zero_grad` too; here it is done where there is somebody to tell.
    """
    return bool(
        torch.autograd.profiler._is_profiler_enabled
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


_told_step = Optimizer.profile_hook_step(GCD._step)


@_disable_dynamo
def _untraced_step(optimizer: GCD, closure: Callable[[], Any] | None) -> Any:
    """In a compiled training step: `torch.compile` would try to trace the compiled loops."""
    return _told_step(optimizer, closure)


@torch.no_grad()
def step_(
    W: Tensor,
    G: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    stream: int,
    found_inf: Tensor | None = None,
) -> None:
    """One step on one matrix or stack, in torch: the oracle of the compiled versions."""
    check_gradient(W, G)
    W, G = as_stack(W), as_stack(G)
    if not G.isfinite().all() or (found_inf is not None and found_inf):
        state["skipped"] += 1
        return
    state["step"] += 1
    t = int(state["step"])

    # The momentum H is a running mean of G whose rows turn with those of W. So H Wᵀ − W Hᵀ is the
    # running mean of all A so far, each carried along with the frame as QᵀAQ, at no extra product.
    beta1, _ = decays(group)
    H = G
    if beta1:
        H = as_stack(state["momentum"])
        H.lerp_(G, 1 - beta1)

    pairs = choose_pairs(W, H, group, t, stream)
    factor = angle_factor(group, t)
    if group["adapt"]:
        decay, gain = scale_memory(group)
        squares = plane_derivatives(W, G, pairs).double().square().sum(dim=-1)
        scale = (decay * state["scale"].double() ** 2 + gain * squares / _planes(W)).sqrt()
        state["scale"].copy_(scale)
        factor = torch.where(state["scale"] > 0, factor / state["scale"], 0)[:, None]
    theta = factor * plane_derivatives(W, H, pairs)

    disjoint = not group["pairing"].startswith("overlapping")
    turn_rows_(W, pairs, theta, disjoint=disjoint)
    if beta1:
        turn_rows_(H, pairs, theta, disjoint=disjoint)
    if t % kernels.TIDY_EVERY == 0:
        for b, w in enumerate(W):
            tidy = stream + b + kernels.TIDY_STREAM
            drawn = pairing.random_pairs(len(w), group["seed"], step=t, stream=tidy)
            orthonormalise_rows_(w, drawn.to(w.device))


def plane_derivatives(W: Tensor, G: Tensor, pairs: Tensor) -> Tensor:
    """A_ij = g_i·w_j − w_i·g_j of the given planes alone: O(n²) for n/2 of them, never A itself."""
    i, j = (index[..., None] for index in pairs.unbind(-1))
    Wi, Wj = W.take_along_dim(i, -2), W.take_along_dim(j, -2)
    Gi, Gj = G.take_along_dim(i, -2), G.take_along_dim(j, -2)
    return (Gi * Wj - Wi * Gj).sum(dim=-1)


def choose_pairs(
    W: Tensor,
    H: Tensor,
    group: dict[str, Any],
    t: int,
    stream: int,
    product: Tensor | None = None,
) -> Tensor:
    """The planes to turn, (b, k, 2), from the skew derivatives H Wᵀ − W Hᵀ or from the seed."""
    name = group["pairing"]
    if name.endswith("random"):
        draw = pairing.overlapping_random_pairs if "-" in name else pairing.random_pairs
        drawn = [draw(W.shape[-1], group["seed"], step=t, stream=stream + b) for b in range(len(W))]
        return torch.stack(drawn).to(W.device)
    magnitudes = skew_magnitudes(torch.matmul(H, W.mT, out=product))
    if name == "overlapping-greedy":
        return pairing.largest_pairs(magnitudes)
    return pairing.matched_pairs(magnitudes, steepest=name == "steepest", exact=group["exact"])


def _start(state: dict[str, Any], W: Tensor, group: dict[str, Any]) -> None:
    """Make what is missing of the state: all of it at first, or a momentum that was turned on."""
    if "step" not in state:
        _place_step(state, W)
    if group["adapt"] and "scale" not in state:
        state["scale"] = W.new_zeros(1 if W.ndim == 2 else len(W), requires_grad=False)
    if decays(group)[0] and "momentum" not in state:
        state["momentum"] = torch.zeros_like(W, memory_format=torch.contiguous_format)


def _place_step(state: dict[str, Any], W: Tensor) -> None:
    """Count on the device, so that nothing waits and a replayed CUDA graph counts on."""
    step = int(state.get("step", 0))
    if W.is_cuda:
        state["step"] = torch.tensor(step, dtype=torch.int64, device=W.device)
        state["skipped"] = torch.zeros((), dtype=torch.int32, device=W.device)
    else:
        state["step"] = step
        state.pop("skipped", None)


def decays(group: dict[str, Any]) -> tuple[float, float]:
    """Decay of the momentum and of the scale."""
    beta1, beta2 = group["betas"] if group["adapt"] == "adam" else (0.0, 0.0)
    return beta1, beta2


def scale_memory(group: dict[str, Any]) -> tuple[float, float]:
    """(decay, gain) of scale² ← decay·scale² + gain·mean(A_ij²)."""
    if group["adapt"] == "adagrad":
        return 1.0, 1.0
    _, beta2 = decays(group)
    return beta2, 1 - beta2


def angle_factor(group: dict[str, Any], t: int) -> float | Tensor:
    """θ over A_ij, but for the division by the scale: −lr with Adam's bias undone, or −λ/√2."""
    lr: float | Tensor = group["lr"] if group["maximize"] else -group["lr"]
    if group["adapt"] is None:
        return lr / math.sqrt(2)
    if group["adapt"] == "adagrad":
        return lr
    beta1, beta2 = decays(group)
    return lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)


def _planes(W: Tensor) -> int:
    """How many planes a step turns, or 1 where there are none."""
    return max(W.shape[-1] // 2, 1)


def as_stack(M: Tensor) -> Tensor:
    """One matrix as a stack of one."""
    return M if M.ndim == 3 else M[None]


def _check_layout(W: Tensor, G: Tensor) -> None:
    """Refuse what the loops cannot read."""
    check_dtype("the matrix", W)
    if G.dtype != W.dtype or G.layout != torch.strided:
        raise ValueError(f"the gradient must be dense and {W.dtype}, but got {G.layout} {G.dtype}")


def check_gradient(W: Tensor, G: Tensor) -> None:
    """Refuse, on a CPU, a gradient that would damage W; a device is not waited for."""
    if W.device.type == "cpu" and not is_finite(G):
        raise ValueError(
            f"the gradient of the {tuple(W.shape)} matrix has NaN or infinite entries; "
            "no matrix was turned"
        )


def _check_group(group: dict[str, Any]) -> None:
    """Check options and matrices, once, when they are added."""
    if group["pairing"] not in get_args(Pairing):
        known = ", ".join(map(repr, get_args(Pairing)))
        raise ValueError(f"pairing must be one of {known}, but got {group['pairing']!r}")
    if group["adapt"] not in (*get_args(Adapt), None):
        known = ", ".join(map(repr, get_args(Adapt)))
        raise ValueError(f"adapt must be one of {known} or None, but got {group['adapt']!r}")
    if not 0 <= float(group["lr"]) < float("inf"):
        raise ValueError(f"lr must be finite and not negative, but got lr={group['lr']}")
    if group["betas"] is None:
        # Set for each group by its own pairing, where schedulers that cycle the momentum look.
        group["betas"] = (0.0 if group["pairing"].endswith("random") else 0.9, 0.99)
    else:
        if group["adapt"] != "adam":
            raise ValueError(f"betas go with adapt='adam', but got adapt={group['adapt']!r}")
        if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas must be two numbers in [0, 1), but got {group['betas']}")
    if not 0 <= group["seed"] < 1 << 63:
        raise ValueError(f"seed must be in 0..2⁶³−1, but got seed={group['seed']}")
    names = group.get("param_names") or [f"parameter {p}" for p in range(len(group["params"]))]
    for name, W in zip(names, group["params"], strict=True):
        if W.ndim not in (2, 3) or W.shape[-1] != W.shape[-2] or W.numel() == 0:
            raise ValueError(
                f"GCD turns square matrices, (n, n) or stacks (b, n, n), but {name} has shape "
                f"{tuple(W.shape)}; leave it to another optimizer, or, if its columns are to stay "
                f"orthonormal, train a square givens.Rotation and use part of its columns"
            )
        if hasattr(W, "to_local"):
            raise ValueError(
                f"GCD turns whole matrices, but {name} is a DTensor, of which a rank has a part; "
                "leave it out of fully_shard (ignored_params), and average its gradient over ranks"
            )
        check_dtype(name, W)
        check_orthogonal(name, W)
