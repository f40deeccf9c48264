"""The straight-through estimator of an index: T(X) = φ(XR)Rᵀ and the distortion, with gradients.

    Y = XR
    q the codewords of Y, plus coarse centroids if there are any
    φ(Y) = q + (Y − sg(Y))      forward q, backward as if it were Y
    distortion = (1/m)‖Y − q‖²  with the codes held fixed

For a gradient g of T(X) and γ of the distortion, with h = gR and e = (2γ/m)(Y − q):

    X: g + eRᵀ W = Rᵀ: qᵀg + (h + e)ᵀX q: h − e, summed over each codeword's vectors

and if x = v/‖v‖, a gradient g of x gives (g − (g·x)x)/‖v‖ for v. Autograd would compute the same
with three times as many kernels, which are most of a step's time on a GPU.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from givens import kernels
from givens.checks import SHORTEST
from givens.rotation import full_precision


@kernels.operation
def normalise(v: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors and lengths; a vector shorter than `SHORTEST` is divided by `SHORTEST`."""
    return normalise_exactly(v)


def normalise_exactly(v: Tensor) -> tuple[Tensor, Tensor]:
    """`normalise`, bit for bit as `torch.nn.functional.normalize`."""
    length = torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(SHORTEST)
    return v / length, length


class Kept(NamedTuple):
    """What the backward pass needs."""

    x: Tensor
    length: Tensor | None
    W: Tensor
    q: Tensor
    error: Tensor
    at: Tensor
    lists: Tensor | None


class StraightThrough(torch.autograd.Function):
    """T(X) and the distortion, from V and the quantized Y; with gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        v: Tensor,
        W: Tensor,
        codebooks: Tensor,
        coarse: Tensor | None,
        unit: Tensor | None,
        length: Tensor | None,
        R: Tensor,
        lists: Tensor | None,
        at: Tensor,
        words: Tensor,
        error: Tensor,
        distortion: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """φ(Y)Rᵀ and the distortion, given the codewords' rows, the codewords q, and Y − q.

        X is V, or V normalised.
        """
        x = v if unit is None else unit
        q = words
        if coarse is not None and lists is not None:
            q = q + coarse[lists]
        ctx.save_for_backward(*Kept(x, length, W, q, error, at, lists))
        ctx.shapes = codebooks.shape, None if coarse is None else coarse.shape
        # With a GPU, autograd runs the backward pass on a thread of its own.
        ctx.backend = kernels.current_backend()
        # Returned as it is, not as a view, which could not be changed in place.
        ctx.mark_dirty(distortion)
        return q @ R.mT, distortion

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, gd: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of V, W, the codebooks and the centroids."""
        kept, needed = Kept(*ctx.saved_tensors), ctx.needs_input_grad[:4]
        # On a GPU the codewords' gradients are summed in no fixed order.
        ordered = torch.are_deterministic_algorithms_enabled()
        in_order = ordered or not needed[2] or kept.lists is not None
        find = find_gradients_in_order if in_order else find_gradients
        codebooks, coarse = ctx.shapes
        with full_precision(g.device), kernels.resume(ctx.backend):
            found = find(g, gd, kept, codebooks, coarse, needed)
        return *found, None, None, None, None, None, None, None, None


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@kernels.operation
def find_gradients(
    g: Tensor, gd: Tensor, kept: Kept, codebooks: torch.Size, coarse: Any, needed: Sequence[bool]
) -> Gradients:
    """Gradients of V, W and the codebooks, without centroids."""
    return find_gradients_in_order(g, gd, kept, codebooks, coarse, needed)


def find_gradients_in_order(
    g: Tensor, gd: Tensor, kept: Kept, codebooks: torch.Size, coarse: Any, needed: Sequence[bool]
) -> Gradients:
    """Gradients of V, W, the codebooks and the centroids, as far as they are needed.

    Deterministic where torch's own operations are.
    """
    x, length, W, q, error, at, lists = kept
    gv = gW = gc = gl = None
    # e is `share` times this: the distortion's gradient for Y; that for q is −e.
    e, share = error * gd, 2 / max(len(x), 1)
    if needed[0]:
        gv = torch.addmm(g, e, W, alpha=share)
        if length is not None:
            along = torch.linalg.vecdot(gv, x)[:, None]
            gv = gv.addcmul_(along, x, value=-1).div_(length)
    if needed[1]:
        gy = torch.addmm(e, g, W.mT, beta=share)
        # W occurs twice: φ(Y) W and x Wᵀ.
        gW = (q.mT @ g).addmm_(gy.mT, x)
    if needed[2] or needed[3]:
        if needed[1]:
            gq = torch.sub(gy, e, alpha=2 * share)
        else:
            gq = torch.addmm(e, g, W.mT, beta=-share)
    if needed[2]:
        D, K, w = codebooks
        gc = e.new_zeros(D * K, w).index_add_(0, at, gq.view(-1, w)).view(D, K, w)
    if needed[3] and lists is not None:
        gl = e.new_zeros(coarse).index_add_(0, lists, gq)
    return gv, gW, gc, gl
