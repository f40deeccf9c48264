"""The straight-through gradient of an index: from X to T(X) = φ(XR)Rᵀ and the distortion, and back.

    Y = XR
    q                           the codewords of Y, on coarse centroids where there are any
    φ(Y) = q + (Y − sg(Y))      forward q, backward as if it were Y
    distortion = (1/m)‖Y − q‖²  with the codes held fixed

For a gradient g of T(X) and γ of the distortion, with h = gR and e = (2γ/m)(Y − q):

    X: g + eRᵀ      W = Rᵀ: qᵀg + (h + e)ᵀX      q: h − e, added up over each codeword's vectors

and where each x is a unit vector v/‖v‖, for a gradient g of x that of v is (g − (g·x)x)/‖v‖.
Ordinary autograd finds the same with thrice the kernels, most of a step's time on a GPU.
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
    """Unit vectors and lengths; a vector shorter than `SHORTEST` is divided by that."""
    return normalise_exactly(v)


def normalise_exactly(v: Tensor) -> tuple[Tensor, Tensor]:
    """`normalise` as `torch.nn.functional.normalize`, to the last bit."""
    length = torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(SHORTEST)
    return v / length, length


class Kept(NamedTuple):
    """What the way back needs."""

    x: Tensor
    length: Tensor | None
    W: Tensor
    q: Tensor
    error: Tensor
    at: Tensor
    lists: Tensor | None


class StraightThrough(torch.autograd.Function):
    """From V, given what the codebooks make of Y, to T(X) and the distortion; and back."""

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
        """φ(Y)Rᵀ and the distortion, given with the codewords' rows, these, and Y − q.

        X is V, or its unit vectors where there are any.
        """
        x = v if unit is None else unit
        q = words
        if coarse is not None and lists is not None:
            q = q + coarse[lists]
        ctx.save_for_backward(*Kept(x, length, W, q, error, at, lists))
        ctx.shapes = codebooks.shape, None if coarse is None else coarse.shape
        # Autograd goes back on a thread of its own where there is a GPU.
        ctx.backend = kernels.current_backend()
        # Given as it is, and not as a view, which nobody could change in place.
        ctx.mark_dirty(distortion)
        return q @ R.mT, distortion

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, gd: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of V, W, the codebooks and the centroids."""
        kept, needed = Kept(*ctx.saved_tensors), ctx.needs_input_grad[:4]
        # On a device codewords' gradients are added up in whatever order.
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
    """Those of V, W and the codebooks, where there are no centroids."""
    return find_gradients_in_order(g, gd, kept, codebooks, coarse, needed)


def find_gradients_in_order(
    g: Tensor, gd: Tensor, kept: Kept, codebooks: torch.Size, coarse: Any, needed: Sequence[bool]
) -> Gradients:
    """Those of V, W, the codebooks and the centroids, as far as they are needed.

    Deterministic where torch's own operations are.
    """
    x, length, W, q, error, at, lists = kept
    gv = gW = gc = gl = None
    # e is `share` of this: the gradient of the distortion by Y; by q it is −e.
    e, share = error * gd, 2 / max(len(x), 1)
    if needed[0]:
        gv = torch.addmm(g, e, W, alpha=share)
        if length is not None:
            along = torch.linalg.vecdot(gv, x)[:, None]
            gv = gv.addcmul_(along, x, value=-1).div_(length)
    if needed[1]:
        gy = torch.addmm(e, g, W.mT, beta=share)
        # Both of W's places: φ(Y) W and x Wᵀ.
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
