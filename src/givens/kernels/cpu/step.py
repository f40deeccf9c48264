"""A step of GCD on a CPU, with loops compiled by numba."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from givens import kernels
from givens.kernels.cpu import choosing, moments, sweep, turning
from givens.optim import choose_pairs, choose_partners
from givens.options import Options, check_gradient
from givens.pairing import every_pairing_for
from givens.rotation import turn_by_exponential_


def step_(
    W: Tensor,
    G: Tensor,
    state: dict[str, Any],
    how: Options,
    found_inf: Tensor | None,
    workspaces: dict[Any, Any],
) -> None:
    """`optim.step_`; if a GradScaler has found infinity, the optimizer does not call it."""
    t = state["step"] + 1
    n, b = W.shape[-1], 1 if W.ndim == 2 else len(W)
    rows, G = W.detach().contiguous(), G.contiguous()
    w, g = rows.numpy().reshape(b, n, n), G.numpy().reshape(b, n, n)
    # This loop checks G itself, in the same pass.
    once = how.pairing == "random" and not how.momentum and how.turns == 1
    if not once:
        check_gradient(W, G, how)
    if how.by_plane:
        _turn_planes(rows.view(b, n, n), G.view(b, n, n), state, how, t, workspaces)
    else:
        H = state["momentum"].lerp_(G, 1 - how.betas[0]) if how.momentum else G
        h = H.numpy().reshape(b, n, n)
        scale = state["scale"].numpy() if how.adapt else np.empty(b, w.dtype)
        draw = how.pairing == "random"
        if draw:
            pairs = np.empty((b, n // 2, 2), np.int64)
        else:
            product = kernels.reuse(workspaces, _product, W)
            pairs = choose_pairs(
                rows.view(b, n, n), H.view(b, n, n), how, t, product=product
            ).numpy()
        rate = (float(how.rate(t)), *how.memory, bool(how.adapt), how.momentum)
        for turn in range(how.turns):
            numbers = (*rate, draw, how.seed, t, how.stream, turn)
            if not turning.descend(w, g, h, pairs, scale, *numbers):
                check_gradient(W, G, how)
                raise ValueError(f"the {tuple(W.shape)} matrix has NaN or infinite entries")
    if t % how.tidy_every == 0:
        turning.tidy(w, how.seed, t, how.stream)
    state["step"] = t
    if W.is_contiguous():
        kernels.mark_written(W)
    else:
        W.detach().copy_(rows)


def _turn_planes(
    W: Tensor,
    G: Tensor,
    state: dict[str, Any],
    how: Options,
    t: int,
    workspaces: dict[Any, Any],
) -> None:
    """`optim.turn_planes_`, one matrix after another."""
    b, n, _ = W.shape
    P = torch.matmul(G, W.mT, out=kernels.reuse(workspaces, _product, W))
    rate = float(how.rate(t))
    for k in range(b):
        ambient = None
        if how.adapt is None:
            P[k] -= P[k].mT.clone()
        else:
            ambient = state["ambient"].view(b, n, n)[k]
            _update_moments(P[k], state["planes"].view(b, n, n)[k], ambient, state, k, how, t)
        if how.by_products(n):
            D = P[k].triu(1)
            turn_by_exponential_(W[k], rate * (D - D.mT), ambient)
            continue
        partners = _partners(P[k], how, workspaces).numpy()
        planes = sweep.list_planes(P[k].numpy(), partners, rate)
        for M in (W[k], ambient):
            if M is not None:
                sweep.turn(M.numpy(), *planes)


def _update_moments(
    P: Tensor, planes: Tensor, ambient: Tensor, state: dict[str, Any], k: int, how: Options, t: int
) -> None:
    """`optim.unit_derivatives` of matrix k; D replaces P above the diagonal."""
    n, (beta1, beta2) = len(P), how.betas
    foresight, misses = state["foresight"][k].numpy(), np.empty(2)
    known = 1 / (1 - beta1 ** (t - 1)) if t > 1 else 1.0
    follow = bool(foresight[1] < foresight[0])
    parts = (M.numpy() for M in (P, planes, ambient))
    moments.update_moments(*parts, known, beta1, beta2, follow, misses)
    misses /= max(n * (n - 1) // 2, 1)
    foresight[:] = np.sqrt(beta2 * foresight.astype(np.float64) ** 2 + (1 - beta2) * misses)


def _partners(D: Tensor, how: Options, workspaces: dict[Any, Any]) -> Tensor:
    """`optim.choose_partners` from the entries above the diagonal of one D."""
    if how.all_planes:
        everything: Tensor = kernels.reuse(workspaces, every_pairing_for, D)
        return everything
    if how.turns == 1 or D.dtype is not torch.float32:
        D = D.triu(1)
        return choose_partners((D - D.mT)[None], how)[0].int()
    partners = torch.empty(how.turns, len(D), dtype=torch.int32, device="cpu")
    choosing.choose(D.view(torch.int32).numpy(), partners.numpy())
    return partners


def _product(W: Tensor) -> Tensor:
    shape = (-1, *W.shape[-2:])
    return torch.empty_like(W.detach(), memory_format=torch.contiguous_format).view(shape)
