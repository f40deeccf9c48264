"""A step of GCD for a GPU: a few launches of Triton kernels and no host synchronisation."""

from typing import Any

from torch import Tensor

from givens import kernels, pairing
from givens.kernels.gpu.matching import Matcher
from givens.kernels.gpu.planes import Planes
from givens.kernels.gpu.turning import Turner
from givens.optim import choose_partners
from givens.options import Options, gradient_limit
from givens.pairing import every_pairing_for


def step_(
    W: Tensor,
    G: Tensor,
    state: dict[str, Any],
    how: Options,
    found_inf: Tensor | None,
    workspaces: dict[Any, Any],
) -> None:
    """`optim.step_` in one to eight launches, safe in a CUDA graph."""
    if W.shape[-1] == 1:
        return
    rows, G = W.detach().contiguous(), G.contiguous()
    turn = _turn_planes if how.by_plane else _turn_pairings
    turn(rows, G, state, how, found_inf, workspaces)
    if W.is_contiguous():
        kernels.mark_written(W)
    else:
        W.detach().copy_(rows)


def _turn_planes(
    W: Tensor,
    G: Tensor,
    state: dict[str, Any],
    how: Options,
    found_inf: Tensor | None,
    workspaces: dict[Any, Any],
) -> None:
    """`optim.turn_planes_`; D is a product in TF32 where n is large (`kernels.gpu.planes`)."""
    n = W.shape[-1]
    planes = kernels.reuse(workspaces, Planes, W, 1 if how.by_products(n) else _rounds(n, how))
    planes.check(G, how, found_inf, gradient_limit(W, how))
    planes.differentiate(W, G, state, how)
    if how.by_products(n):
        planes.exponentiate(W, state, how)
        return
    if how.turns > 1 and not how.all_planes:
        planes.choose(state["step"], how.seed, how.stream)
    elif how.all_planes:
        planes.take(kernels.reuse(workspaces, every_pairing_for, W))
    else:
        planes.take(choose_partners(planes.D, how))
    planes.turn(W, state, how)
    planes.tidy(W, state["step"], how)


def _turn_pairings(
    W: Tensor,
    G: Tensor,
    state: dict[str, Any],
    how: Options,
    found_inf: Tensor | None,
    workspaces: dict[Any, Any],
) -> None:
    """`optim.turn_pairing_`, pairing after pairing.

    The product that chooses the planes may use TF32; angles come from float32 sums over the chosen
    rows.
    """
    turner = kernels.reuse(workspaces, Turner, W)
    H = state["momentum"] if how.momentum else None
    skip = found_inf
    draw = how.pairing.endswith("random")
    overlap = how.pairing.startswith("overlapping")
    if H is not None:
        turner.blend(H, G, 1 - how.betas[0], found_inf, gradient_limit(W, how))
        skip = turner.skip
    elif overlap or how.turns > 1:
        # These planes do not see every row, or the later ones not what the first has refused.
        wrong = ~(G.abs() <= gradient_limit(W, how)).all()
        skip = (wrong if found_inf is None else wrong | (found_inf != 0)).int()
    if not draw:
        matcher = kernels.reuse(workspaces, Matcher, W)
        magnitudes = matcher.magnitudes(G if H is None else H, W)
        if how.pairing == "greedy":
            matcher.greedy(magnitudes, turner.pairs)
        elif overlap:
            turner.take(pairing.largest_pairs(magnitudes))
        elif not how.exact:
            matcher.steepest(magnitudes, turner.pairs)
        else:
            turner.take(pairing.matched_pairs(magnitudes, steepest=True, exact=True))
    for number in range(how.turns):
        turner.descend(
            W,
            G,
            H,
            state.get("scale"),
            state["step"],
            how.lr,
            state["skipped"],
            draw=draw,
            overlap=overlap,
            skip=skip,
            adapt=how.adapt,
            betas=how.betas if how.adapt in ("adam", "matrix") else (0.0, 0.0),
            share=how.share,
            seed=how.seed,
            stream=how.stream,
            turn=number,
        )


def _rounds(n: int, how: Options) -> int:
    """The number of pairings of a step; an odd n has one more in all."""
    return how.turns + n % 2 if how.all_planes else how.turns
