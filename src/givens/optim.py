"""Givens coordinate descent, an optimizer for rotations (paper, algorithms 1 and 2).

A step turns planes (i, j), each by an angle against its own derivative:

    A = GᵀR − RᵀG                   A_ij = d/dθ L(R·R_ij(θ)) at 0, all planes at once
    D = m/√v                        running means of A and of A², as Adam has for every weight
    K pairings of the axes          the largest |D_ij| first, no plane twice
    R ← R ∏ R_ij(−lr·D_ij/√K)

so R stays a rotation without inverse, exponential or SVD. The paper's own step is one pairing,
K = 1, with θ = −λA_ij/√2. R is stored as W = Rᵀ. With G = ∂L/∂W from here on, A = G Wᵀ − W Gᵀ, and
a turn mixes two contiguous rows of W.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from givens import kernels, pairing
from givens.options import (
    OPTIONS,
    Adapt,
    Options,
    check_gradient,
    check_group,
    check_layout,
    check_matrix,
    check_options,
    check_rate,
    check_state,
    fill_in,
    gradient_limit,
    is_rate,
    options_for,
)
from givens.pairing import Pairing
from givens.rotation import (
    cos_and_sin,
    largest,
    orthonormalise_rows_,
    skew_magnitudes,
    turn_by_exponential_,
    turn_rows_,
)


class GCD(Optimizer):
    """Givens coordinate descent on square orthogonal matrices, of shape (n, n) or stacks (b, n, n).

    Takes `Rotation`s' parameters or any orthogonal weight, such as an `nn.Linear`'s, and keeps its
    determinant. The whole algorithm is `turn_planes_` below.
    """

    # Makes a GradScaler pass `grad_scale` and `found_inf` as tensors, without synchronisation.
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
            params: matrices, or parameter groups of them.
            lr: the typical angle by which a step turns an axis, in radians; the paper's λ if
                `adapt` is None.
            pairing: "random" GCD-R, "greedy" GCD-G, "steepest" GCD-S, or the ablations
                "overlapping-random" and "overlapping-greedy", whose planes may share axes.
            turns: K, the number of pairings per gradient; no plane is turned twice. 1 is the
                paper's algorithm, "all" turns every plane (n − 1 pairings). Default: 16 for
                "greedy" with "adam", otherwise 1. "steepest" and the overlapping variants support
                only 1.
            adapt: "adam" divides the derivative of each plane by its own running root mean square,
                "matrix" by one running root mean square for the whole matrix, "adagrad" by the
                root of the accumulated squares. None is the paper's raw step θ = −λA_ij/√(2K),
                which depends on the scale of the loss. Random and overlapping planes have no
                statistics of their own; for them "adam" is the same as "matrix".
            betas: decay rates of the running mean and of the running mean square. Default:
                (0.9, 0.99), and (0, 0.99) for random planes, so that a step reads W and G once.
            exact: whether "steepest" finds the exact maximum, in O(n³) on one core, or a close
                approximation.
            seed: seed of the random planes, which depend only on the seed and the step.
            maximize: ascend instead of descend.
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
        _leave_untraced()
        super().__init__(params, defaults)
        # Buffers of each matrix, and the options already checked; not part of the state.
        self._workspaces: dict[Any, Any] = {}
        self._checked: dict[int, list[Any]] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add orthogonal matrices with their own options; on an error nothing is added."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            fill_in(group)
            check_options(group)
            check_rate(group["lr"], wait=True)
            names = group.get("param_names")
            for p, W in enumerate(group["params"]):
                check_matrix(names[p] if names else f"parameter {p}", W)
        except BaseException:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a state, which may have been saved on another device."""
        for group in state["param_groups"]:
            check_group(group)
        for W, saved in state["state"].items():
            if not isinstance(W, Tensor):
                raise ValueError(
                    f"state_dict must number the parameters of its groups, but has a state of {W!r}"
                )
            check_state(saved, W)
        super().__setstate__(state)
        self._workspaces, self._checked = {}, {}
        for W, saved in self.state.items():
            _place_counts(saved, W)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Turn every matrix that has a gradient.

        On a CPU a gradient with NaN or infinite entries raises an error, and no matrix is turned.
        On a GPU, without host synchronisation, such a matrix stays as it is, and its
        state["skipped"] is incremented.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Set by a GradScaler.
        loss_scale: Tensor | None = getattr(self, "grad_scale", None)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.device.type == "cpu" and found_inf:
            return loss
        work, stream = [], 0
        for number, group in enumerate(self.param_groups):
            self._check_again(number, group)
            for W in group["params"]:
                if W.grad is not None:
                    # After `backward(create_graph=True)` the gradient itself has a graph.
                    G = W.grad.detach() if W.grad.requires_grad else W.grad
                    check_layout(W, G, self.state[W])
                    options = options_for(group, W, stream)
                    work.append((W, G if loss_scale is None else G / loss_scale, options))
                stream += 1 if W.ndim == 2 else len(W)
        # All or nothing: every gradient is checked before the first matrix is turned.
        if len(work) > 1:
            for part in work:
                check_gradient(*part)
        for W, G, options in work:
            state = self.state[W]
            _start(state, W, options)
            step_(W, G, state, options, found_inf, self._workspaces)
        return loss

    def _check_again(self, number: int, group: dict[str, Any]) -> None:
        """Check the options if the caller or a scheduler has changed them since the last step."""
        check_rate(group["lr"], wait=False)
        now = [group[name] for name in OPTIONS]
        if self._checked.get(number) != now:
            check_options(group)
            self._checked[number] = now


@functools.cache
def _leave_untraced() -> None:
    """Exclude `step` from torch.compile, which cannot trace a kernel.

    Called by the first optimizer rather than on import, since it imports the compiler.
    """
    GCD.step = torch.compiler.disable(GCD.step)  # type: ignore[method-assign,no-untyped-call]


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
    """One step on one matrix or stack: the reference for the compiled versions.

    W and state are updated in place, or not at all if the gradient overflows. `workspaces` holds
    the buffers of the compiled versions.
    """
    check_gradient(W, G, how)
    overflow = found_inf is not None and bool(found_inf)
    if overflow or not largest(G) <= gradient_limit(W, how) or not is_rate(how.lr):
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
    # Correct rounding errors, on a random pairing.
    if t % how.tidy_every == 0:
        for b, w in enumerate(W):
            tidy = how.stream + b + kernels.TIDY_STREAM
            drawn = pairing.random_pairs(len(w), how.seed, step=t, stream=tidy)
            orthonormalise_rows_(w, drawn.to(w.device))


def turn_planes_(W: Tensor, G: Tensor, state: dict[str, Any], how: Options, t: int) -> None:
    """Turn K pairings by one D: the algorithm at the top of this file."""
    P = G @ W.mT
    D = P - P.mT if how.adapt is None else unit_derivatives(P, state, how, t)
    ambient = as_stack(state["ambient"]) if how.adapt else None
    if how.by_products(W.shape[-1]):
        turn_by_exponential_(W, how.rate(t) * D, ambient)
        return
    for partner in choose_partners(D, how).unbind(1):
        i = partner[..., None]
        # D_ji = −D_ij turns the other axis of the plane in the opposite direction.
        cos, sin = cos_and_sin(how.rate(t) * D.gather(2, i).double())
        for M in (W, ambient):
            if M is not None:
                M.copy_(cos * M + sin * M.take_along_dim(i, 1))


def unit_derivatives(P: Tensor, state: dict[str, Any], how: Options, t: int) -> Tensor:
    """D = m/√v from P = G Wᵀ: running means of A = P − Pᵀ and of its squares, plane by plane.

    There are two candidates for the mean. One is m, the mean of A itself. It suits problems in
    which axis i keeps its meaning while R turns, such as its place in a subspace. The other is
    S − Sᵀ, where S is a running mean of P whose columns turn with W: the mean of the ambient
    gradient, which is better while R has far to go. A step uses the one that has predicted A
    better so far; state["foresight"] holds their root mean square errors.
    """
    beta1, beta2 = how.betas
    planes, ambient = as_stack(state["planes"]), as_stack(state["ambient"])
    foresight = state["foresight"]
    A = P - P.mT
    # m above the diagonal and √v below it: one is skew, the other symmetric.
    m, size = planes.triu(1), planes.tril(-1)
    m, size, S = m - m.mT, size + size.mT, ambient.mT

    # The error of each candidate on the new A, and which has been better until now.
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
    """The paper's step along one pairing; with `adapt`, one scale for the whole matrix.

    The momentum H is a running mean of G whose rows turn with those of W. So H Wᵀ − W Hᵀ is the
    running mean of all past A, each carried along with the frame as QᵀAQ, without another product.
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
    # In double precision no angle overflows.
    theta = rate * plane_derivatives(W, H, pairs).double()
    disjoint = not how.pairing.startswith("overlapping")
    turn_rows_(W, pairs, theta, disjoint=disjoint)
    if how.momentum:
        turn_rows_(H, pairs, theta, disjoint=disjoint)


def choose_partners(D: Tensor, how: Options) -> Tensor:
    """The planes to turn by D (b, n, n): the partner of each axis in each pairing, (b, K, n)."""
    if how.all_planes:
        return pairing.every_pairing(D.shape[-1]).to(D.device).expand(len(D), -1, -1)
    # D is skew to the last bit, so this is symmetric.
    magnitudes = D.abs()
    if how.turns > 1:
        return pairing.greedy_partners(magnitudes, how.turns)
    steepest = how.pairing == "steepest"
    pairs = pairing.matched_pairs(magnitudes, steepest=steepest, exact=how.exact)
    partners = torch.arange(D.shape[-1], device=D.device).repeat(len(D), 1)
    partners.scatter_(1, pairs.flatten(1), pairs.flip(-1).flatten(1))
    return partners[:, None]


def choose_pairs(
    W: Tensor, H: Tensor, how: Options, t: int, turn: int = 0, product: Tensor | None = None
) -> Tensor:
    """The planes to turn, (b, k, 2), chosen by the derivatives H Wᵀ − W Hᵀ or by the seed."""
    n, name = W.shape[-1], how.pairing
    if name.endswith("random"):
        streams = range(how.stream, how.stream + len(W))
        if name == "random":
            drawn = [
                pairing.random_pairs(n, how.seed, step=t, stream=s, turn=turn) for s in streams
            ]
        else:
            drawn = [
                pairing.overlapping_random_pairs(n, how.seed, step=t, stream=s) for s in streams
            ]
        return torch.stack(drawn).to(W.device)
    magnitudes = skew_magnitudes(torch.matmul(H, W.mT, out=product))
    if name == "overlapping-greedy":
        return pairing.largest_pairs(magnitudes)
    return pairing.matched_pairs(magnitudes, steepest=name == "steepest", exact=how.exact)


def plane_derivatives(W: Tensor, G: Tensor, pairs: Tensor) -> Tensor:
    """A_ij = g_i·w_j − w_i·g_j of the given planes only: O(n²) for n/2 planes."""
    i, j = (index[..., None] for index in pairs.unbind(-1))
    Wi, Wj = W.take_along_dim(i, -2), W.take_along_dim(j, -2)
    Gi, Gj = G.take_along_dim(i, -2), G.take_along_dim(j, -2)
    return (Gi * Wj - Wi * Gj).sum(dim=-1)


def as_stack(M: Tensor) -> Tensor:
    """M as a stack; a single matrix becomes a stack of one."""
    return M if M.ndim == 3 else M[None]


def _start(state: dict[str, Any], W: Tensor, how: Options) -> None:
    """Create the missing parts of the state, at the first step or after an option has changed."""
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
    """Move the counters to W's device, so that a replayed CUDA graph increments them."""
    for name, kind in (("step", torch.int64), ("skipped", torch.int32)):
        count = int(state.get(name, 0))
        on_cpu = W.device.type == "cpu"
        state[name] = count if on_cpu else torch.tensor(count, dtype=kind, device=W.device)
