"""Givens coordinate descent, an optimizer for rotations (paper, algorithms 1 and 2).

A step turns planes (i, j), each by an angle against its own derivative:

    A = GᵀR − RᵀG                   A_ij = d/dθ L(R·R_ij(θ)) at 0, all planes at once
    D = m/√v                        running means of A and of A², as Adam has for every weight
    K pairings of the axes          the largest |D_ij| first, no plane twice
    R ← R ∏ R_ij(−lr·D_ij/√K)

so R stays a rotation without inverse, exponential or SVD. The paper's own step is one pairing,
K = 1, by θ = −λA_ij/√2. R is stored as W = Rᵀ: with ∂L/∂W = G from here on, A = G Wᵀ − W Gᵀ, and a
turn mixes two contiguous rows of W.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from givens import kernels, pairing
from givens.pairing import Pairing
from givens.rotation import (
    check_dtype,
    check_orthogonal,
    cos_and_sin,
    largest,
    orthonormalise_rows_,
    turn_by_exponential_,
    turn_rows_,
)
from givens.steps import check_gradient, choose_pairs, choose_partners, gradient_limit
from givens.steps.options import Adapt, Options, check_options, check_rate, fill_in, options_for

# What is checked again where it has changed.
OPTIONS = ("pairing", "turns", "adapt", "betas", "exact", "seed", "maximize")


class GCD(Optimizer):
    """Givens coordinate descent on square orthogonal matrices, of shape (n, n) or stacks (b, n, n).

    Takes `Rotation`s' parameters or any orthogonal weight, such as an `nn.Linear`'s, and keeps its
    determinant. The whole algorithm is `turn_planes_` below.
    """

    # GradScaler then hands over `grad_scale` and `found_inf` instead of waiting for the device.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        *,
        pairing: Pairing = "greedy",
        turns: int | Literal["all"] | None = None,
        adapt: Adapt | None = "adam",
        betas: tuple[float, float] | None = None,
        exact: bool = True,
        seed: int = 0,
        maximize: bool = False,
    ) -> None:
        """Choose the planes by `pairing` and `turns`, the angles by `adapt`.

        Args:
            params: the matrices, or groups of them.
            lr: how far an axis turns in a step, about, in radians; the paper's λ where `adapt` is
                None.
            pairing: "random" GCD-R, "greedy" GCD-G, "steepest" GCD-S, or the ablations
                "overlapping-random" and "overlapping-greedy", whose planes may share axes.
            turns: K, pairings for a gradient, no plane twice: 1 is the paper's algorithm, "all"
                turns every plane. By default 16 of "greedy" with "adam", and 1 otherwise; n − 1
                pairings are all there are. "steepest" and the overlapping ones take 1 alone.
            adapt: "adam" divides the derivative of each plane by its own running root mean square;
                "matrix" has one such number for the matrix, and "adagrad" the root of their sum;
                None is the paper's raw step θ = −λA_ij/√(2K), which has the loss's scale in it.
                Random and overlapping planes are not all looked at: for them "adam" is "matrix".
            betas: decay of the momentum and of the sizes. By default (0.9, 0.99), but without
                momentum where the planes are random: a step then reads W and G once and no more.
            exact: whether "steepest" is the exact maximum, O(n³) on one core, or nearly it.
            seed: of the random planes, which depend on nothing but it and the step.
            maximize: ascend instead.
        """
        defaults = {
            "lr": lr,
            "pairing": pairing,
            "turns": turns,
            "adapt": adapt,
            "betas": betas,
            "exact": exact,
            "seed": seed,
            "maximize": maximize,
        }
        super().__init__(params, defaults)
        # Buffers by matrix, made once, and the options that were checked; no part of the state.
        self._workspaces: dict[Any, Any] = {}
        self._checked: dict[int, list[Any]] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add matrices with options of their own, once they prove to be orthogonal."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            fill_in(group)
            check_options(group)
            names = group.get("param_names")
            for p, W in enumerate(group["params"]):
                _check_matrix(names[p] if names else f"parameter {p}", W)
        except BaseException:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on from a state that may have been saved on another device."""
        for W, saved in state["state"].items():
            if isinstance(W, Tensor):
                _check_state(saved, W)
        super().__setstate__(state)
        self._workspaces, self._checked = {}, {}
        for W, saved in self.state.items():
            _place_counts(saved, W)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Turn every matrix that has a gradient.

        On a CPU a gradient that is not finite is an error, and no matrix is turned. A device is not
        waited for: there the matrix with that gradient stays as it is, and state["skipped"] counts.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Both come from a GradScaler.
        loss_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.device.type == "cpu" and found_inf:
            return loss
        work, stream = [], 0
        for number, group in enumerate(self.param_groups):
            self._check_again(number, group)
            for W in group["params"]:
                if W.grad is not None:
                    # It has a history of its own after `backward(create_graph=True)`.
                    G = W.grad.detach() if W.grad.requires_grad else W.grad
                    _check_layout(W, G, self.state[W])
                    options = options_for(group, W, stream)
                    work.append((W, G if loss_scale is None else G / loss_scale, options))
                stream += 1 if W.ndim == 2 else len(W)
        # All or none: the first may not be turned before the last is known to be good.
        if len(work) > 1:
            for part in work:
                check_gradient(*part)
        for W, G, options in work:
            state = self.state[W]
            _start(state, W, options)
            step_(W, G, state, options, found_inf, self._workspaces)
        return loss

    def _check_again(self, number: int, group: dict[str, Any]) -> None:
        """Options are the caller's, and a scheduler's: what has changed is checked again."""
        lr = group["lr"]
        if not isinstance(lr, Tensor) or lr.device.type == "cpu":
            check_rate(lr)
        now = [group[name] for name in OPTIONS]
        if self._checked.get(number) != now:
            check_options(group)
            self._checked[number] = now


@kernels.operation
@torch.no_grad()
def step_(
    W: Tensor,
    G: Tensor,
    state: dict[str, Any],
    how: Options,
    found_inf: Tensor | None = None,
    workspaces: dict[Any, Any] | None = None,
) -> None:
    """One step on one matrix or stack; `workspaces` are buffers of the compiled versions."""
    check_gradient(W, G, how)
    if not largest(G) <= gradient_limit(W, how) or (found_inf is not None and found_inf):
        state["skipped"] += 1
        return
    W, G = as_stack(W), as_stack(G)
    state["step"] += 1
    t = int(state["step"])
    if how.by_plane:
        turn_planes_(W, G, state, how, t)
    else:
        for turn in range(how.turns):
            turn_pairing_(W, G, state, how, t, turn)
    if t % how.tidy_every == 0:
        for b, w in enumerate(W):
            tidy = how.stream + b + kernels.TIDY_STREAM
            drawn = pairing.random_pairs(len(w), how.seed, step=t, stream=tidy)
            orthonormalise_rows_(w, drawn.to(w.device))


def turn_planes_(W: Tensor, G: Tensor, state: dict[str, Any], how: Options, t: int) -> None:
    """K pairings by one D: the algorithm at the top of this page."""
    P = G @ W.mT
    D = P - P.mT if how.adapt is None else unit_derivatives(P, state, how, t)
    ambient = as_stack(state["ambient"]) if how.adapt else None
    if how.by_products(W.shape[-1]):
        turn_by_exponential_(W, how.rate(t) * D, ambient)
        return
    for partner in choose_partners(D, how).unbind(1):
        i = partner[..., None]
        # D_ji = −D_ij turns the other axis of the plane the other way.
        cos, sin = cos_and_sin(how.rate(t) * D.gather(2, i).double())
        for M in (W, ambient):
            if M is not None:
                M.copy_(cos * M + sin * M.take_along_dim(i, 1))


def unit_derivatives(P: Tensor, state: dict[str, Any], how: Options, t: int) -> Tensor:
    """D = m/√v, by both moments of A = P − Pᵀ, each plane for itself.

    What axis i means, its place in a subspace, stays while R turns, so sizes and means belong to
    planes. Where R has far to go, the mean of the ambient gradient is worth more: with S a running
    mean of G Wᵀ whose columns turn with W, S − Sᵀ. The one that has foretold A better is used.
    """
    beta1, beta2 = how.betas
    planes, ambient = as_stack(state["planes"]), as_stack(state["ambient"])
    foresight = state["foresight"]
    A = P - P.mT
    # m above the diagonal and √v below it: one is skew, the other symmetric.
    m, size = planes.triu(1), planes.tril(-1)
    m, size, S = m - m.mT, size + size.mT, ambient.mT
    known = 1 - beta1 ** (t - 1) if t > 1 else 1.0
    misses = [(A - mean / known).double().triu(1).square().sum((1, 2)) for mean in (m, S - S.mT)]
    follow = (foresight[:, 1] < foresight[:, 0])[:, None, None]
    count = max(A.shape[-1] * (A.shape[-1] - 1) // 2, 1)
    mean_miss = torch.stack(misses, -1) / count
    foresight.copy_((beta2 * foresight.double() ** 2 + (1 - beta2) * mean_miss).sqrt())
    m = beta1 * m + (1 - beta1) * A
    S = beta1 * S + (1 - beta1) * P
    size = torch.hypot(math.sqrt(beta2) * size, math.sqrt(1 - beta2) * A)
    planes.copy_(m.triu(1) + size.tril(-1))
    ambient.copy_(S.mT)
    D = torch.where(size > 0, torch.where(follow, S - S.mT, m) / size, 0).triu(1)
    return D - D.mT


def turn_pairing_(
    W: Tensor, G: Tensor, state: dict[str, Any], how: Options, t: int, turn: int
) -> None:
    """The paper's step along one pairing, or with one size for the whole matrix.

    The momentum H is a running mean of G whose rows turn with those of W. So H Wᵀ − W Hᵀ is the
    running mean of all A so far, each carried along with the frame as QᵀAQ, at no extra product.
    """
    H = G
    if how.momentum:
        H = as_stack(state["momentum"])
        if turn == 0:
            H.lerp_(G, 1 - how.betas[0])
    pairs = choose_pairs(W, H, how, t, turn)
    rate: Any = how.rate(t)
    if how.adapt:
        scale = state["scale"]
        if turn == 0:
            squares = plane_derivatives(W, G, pairs).double().square().sum(dim=-1)
            decay, gain = how.memory
            mean = squares / max(W.shape[-1] // 2, 1)
            scale.copy_((decay * scale.double() ** 2 + gain * mean).sqrt())
        rate = torch.where(scale > 0, rate / scale.double(), 0)[:, None]
    # In double no angle overflows.
    theta = rate * plane_derivatives(W, H, pairs).double()
    disjoint = not how.pairing.startswith("overlapping")
    turn_rows_(W, pairs, theta, disjoint=disjoint)
    if how.momentum:
        turn_rows_(H, pairs, theta, disjoint=disjoint)


def plane_derivatives(W: Tensor, G: Tensor, pairs: Tensor) -> Tensor:
    """A_ij = g_i·w_j − w_i·g_j of the given planes alone: O(n²) for n/2 of them, never A itself."""
    i, j = (index[..., None] for index in pairs.unbind(-1))
    Wi, Wj = W.take_along_dim(i, -2), W.take_along_dim(j, -2)
    Gi, Gj = G.take_along_dim(i, -2), G.take_along_dim(j, -2)
    return (Gi * Wj - Wi * Gj).sum(dim=-1)


def as_stack(M: Tensor) -> Tensor:
    """One matrix as a stack of one."""
    return M if M.ndim == 3 else M[None]


def _start(state: dict[str, Any], W: Tensor, how: Options) -> None:
    """Make what is missing of the state: all of it at first, or what an option asks for since."""
    if "step" not in state:
        _place_counts(state, W)
    count = 1 if W.ndim == 2 else len(W)
    if how.by_plane:
        if how.adapt and "planes" not in state:
            for name in ("planes", "ambient"):
                state[name] = torch.zeros_like(W, memory_format=torch.contiguous_format)
            state["foresight"] = W.new_zeros(count, 2, requires_grad=False)
        return
    if how.adapt and "scale" not in state:
        state["scale"] = W.new_zeros(count, requires_grad=False)
    if how.momentum and "momentum" not in state:
        state["momentum"] = torch.zeros_like(W, memory_format=torch.contiguous_format)


def _place_counts(state: dict[str, Any], W: Tensor) -> None:
    """Count on the device, so that nothing waits and a replayed CUDA graph counts on."""
    for name, kind in (("step", torch.int64), ("skipped", torch.int32)):
        count = int(state.get(name, 0))
        on_cpu = W.device.type == "cpu"
        state[name] = count if on_cpu else torch.tensor(count, dtype=kind, device=W.device)


def _check_state(state: dict[str, Any], W: Tensor) -> None:
    """Refuse a state that would make W no rotation."""
    _check_shapes(state, W)
    for name, value in state.items():
        if isinstance(value, Tensor) and not value.isfinite().all():
            raise ValueError(f"the state must be finite, but {name} has NaN or infinite entries")
        if name in ("step", "skipped") and not 0 <= int(value) < 1 << 31:
            raise ValueError(f"{name} of a state must be in 0..2³¹−1, but got {int(value)}")


def _check_shapes(state: dict[str, Any], W: Tensor) -> None:
    """Refuse a state that is of another matrix."""
    for name in ("planes", "ambient", "momentum"):
        if name in state and state[name].shape != W.shape:
            raise ValueError(
                f"the state must be of a {tuple(W.shape)} matrix, but {name} has shape "
                f"{tuple(state[name].shape)}; make a new GCD for another matrix"
            )


def _check_layout(W: Tensor, G: Tensor, state: dict[str, Any]) -> None:
    """Refuse what the loops cannot read."""
    check_dtype("the matrix", W)
    _check_shapes(state, W)
    if G.dtype != W.dtype or G.layout != torch.strided:
        raise ValueError(f"the gradient must be dense and {W.dtype}, but got {G.layout} {G.dtype}")


def _check_matrix(name: str, W: Tensor) -> None:
    """Refuse a parameter that GCD cannot turn."""
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
