"""Steps of GCD: the planes one turns, and the gradients it takes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from givens import pairing
from givens.rotation import largest, skew_magnitudes
from givens.steps.options import Options


def gradient_limit(W: Tensor, how: Options) -> float:
    """The largest entry of a gradient with which no derivative, nor angle, overflows."""
    limit = torch.finfo(W.dtype).max / (8 * math.sqrt(W.shape[-1]))
    if how.adapt or (isinstance(how.lr, Tensor) and how.lr.device.type != "cpu"):
        return limit
    # The raw step has the gradient's size in its angles.
    return limit / max(1.0, float(how.lr))


def check_gradient(W: Tensor, G: Tensor, how: Options) -> None:
    """Refuse, on a CPU, a gradient that would damage W; a device is not waited for."""
    if W.device.type != "cpu":
        return
    most = largest(G)
    if not most < math.inf:
        raise ValueError(
            f"the gradient of the {tuple(W.shape)} matrix has NaN or infinite entries; "
            "no matrix was turned"
        )
    if most > gradient_limit(W, how):
        raise ValueError(
            f"the gradient of the {tuple(W.shape)} matrix has an entry of {most:.0e}, with which "
            "derivatives overflow; no matrix was turned"
        )


def choose_partners(D: Tensor, how: Options) -> Tensor:
    """The planes to turn by their D (b, n, n): everybody's partners, (b, K, n)."""
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
    """The planes to turn, (b, k, 2), from the skew derivatives H Wᵀ − W Hᵀ or from the seed."""
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


def every_pairing(W: Tensor) -> Tensor:
    """`pairing.every_pairing` on W's device."""
    return pairing.every_pairing(W.shape[-1]).int().to(W.device)


def buffers(workspaces: dict[Any, Any], make: Callable[..., Any], W: Tensor, *sizes: int) -> Any:
    """What is made for matrices like W, once: every step writes anew what it reads."""
    key = make, W.shape, W.device, W.dtype, sizes
    if key not in workspaces:
        workspaces[key] = make(W, *sizes)
    return workspaces[key]
