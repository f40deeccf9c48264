"""`optim.step_` compiled: the same step for a CPU by numba and for a GPU by Triton.

Both keep their buffers in `workspaces`, which the optimizer holds and never saves.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from givens import kernels, pairing
from givens.optim import (
    angle_factor,
    as_stack,
    check_gradient,
    choose_pairs,
    decays,
    scale_memory,
)


def step_compiled_(
    W: Tensor,
    G: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    stream: int,
    workspaces: dict[Any, Any],
) -> None:
    """`step_` on a CPU: the same, its loops compiled."""
    from givens.kernels.cpu import compiled

    t = state["step"] + 1
    n, b = W.shape[-1], 1 if W.ndim == 2 else len(W)
    beta1, _ = decays(group)
    draw = group["pairing"] == "random"
    if beta1 or not draw:
        check_gradient(W, G)
    H = state["momentum"].lerp_(G, 1 - beta1) if beta1 else G
    if draw:
        pairs = np.empty((b, n // 2, 2), np.int64)
    else:
        product = _buffers(workspaces, _product, W)
        pairs = choose_pairs(as_stack(W.detach()), as_stack(H), group, t, stream, product).numpy()

    rows = W.detach().contiguous()
    w, g = rows.numpy().reshape(b, n, n), G.numpy().reshape(b, n, n)
    h = H.numpy().reshape(b, n, n) if beta1 else g
    scale = state["scale"].numpy() if group["adapt"] else np.empty(b, w.dtype)
    how = (float(angle_factor(group, t)), *scale_memory(group), bool(group["adapt"]), bool(beta1))
    if not compiled.descend(w, g, h, pairs, scale, *how, draw, group["seed"], t, stream):
        check_gradient(W, G)
        raise ValueError(f"derivatives by the {tuple(W.shape)} matrix overflow; it was not turned")
    state["step"] = t
    if W.is_contiguous():
        kernels.written(W)
    else:
        W.detach().copy_(rows)


def step_fused_(
    W: Tensor,
    G: Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    stream: int,
    found_inf: Tensor | None,
    workspaces: dict[Any, Any],
) -> None:
    """`step_` on a GPU: a launch or five, nothing that waits, safe in a CUDA graph.

    The product that chooses the planes may use TF32; their angles come from float32 sums over the
    chosen rows alone.
    """
    from givens.kernels.gpu.matching import Matcher
    from givens.kernels.gpu.turning import Turner

    check_gradient(W, G)
    n = W.shape[-1]
    if n == 1:
        return
    turner = _buffers(workspaces, Turner, W)
    rows = W.detach().contiguous()
    G = G.contiguous()
    beta1, beta2 = decays(group)
    H = state["momentum"] if beta1 else None
    skip = found_inf
    draw = group["pairing"].endswith("random")
    overlap = group["pairing"].startswith("overlapping")
    if H is not None:
        turner.blend(H, G, 1 - beta1, found_inf)
        skip = turner.skip
    elif overlap:
        # These planes do not see every row.
        wrong = ~G.isfinite().all()
        skip = (wrong if found_inf is None else wrong | (found_inf != 0)).int()
    if not draw:
        matcher = _buffers(workspaces, Matcher, W)
        magnitudes = matcher.magnitudes(G if H is None else H, rows)
        if group["pairing"] == "greedy":
            matcher.greedy(magnitudes, turner.pairs)
        elif overlap:
            turner.take(pairing.largest_pairs(magnitudes))
        elif not group["exact"]:
            matcher.steepest(magnitudes, turner.pairs)
        else:
            turner.take(pairing.matched_pairs(magnitudes, steepest=True, exact=True))
    turner.descend(
        rows,
        G,
        H,
        state.get("scale"),
        state["step"],
        group["lr"],
        state["skipped"],
        draw=draw,
        overlap=overlap,
        skip=skip,
        adapt=group["adapt"],
        betas=(beta1, beta2),
        maximize=group["maximize"],
        seed=group["seed"],
        stream=stream,
    )
    if W.is_contiguous():
        kernels.written(W)
    else:
        W.detach().copy_(rows)


def _product(W: Tensor) -> Tensor:
    return torch.empty_like(as_stack(W.detach()), memory_format=torch.contiguous_format)


def _buffers(workspaces: dict[Any, Any], make: Callable[[Tensor], Any], W: Tensor) -> Any:
    """What is made for W, once for every place and shape that it has had."""
    key = make, W, W.device, W.shape
    if key not in workspaces:
        workspaces[key] = make(W)
    return workspaces[key]
