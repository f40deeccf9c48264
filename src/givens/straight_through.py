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

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# A vector shorter than this is divided by it: torch's own, so that all normalise alike.
SHORTEST = 1e-12


def normalised(v: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors, as `torch.nn.functional.normalize` gives them to the last bit, and lengths."""
    length = torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(SHORTEST)
    return v / length, length


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """No autocast; looked at first, since to enter its context takes as long as a kernel."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


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
        at: Tensor,
        words: Tensor,
        error: Tensor,
        lists: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """φ(Y)Rᵀ and (1/m)‖Y − q‖², from the rows of the codewords, these, and Y − q.

        X is V, or its unit vectors where there are any.
        """
        x = v if unit is None else unit
        q = words
        if coarse is not None and lists is not None:
            q = words + coarse[lists]
        ctx.save_for_backward(x, length, W, q, error, at, lists)
        ctx.shapes = codebooks.shape, None if coarse is None else coarse.shape
        flat = error.view(-1)
        return q @ R.mT, torch.dot(flat, flat) / max(len(x), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, gd: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of V, W, the codebooks and the centroids."""
        x, length, W, q, error, at, lists = ctx.saved_tensors
        (D, K, w), centroids = ctx.shapes
        gv = gW = gc = gl = None
        with full_precision(g.device):
            # e is `share` of this: the gradient of the distortion by Y; by q it is −e.
            e, share = error * gd, 2 / max(len(x), 1)
            if ctx.needs_input_grad[0]:
                gv = torch.addmm(g, e, W, alpha=share)
                if length is not None:
                    along = torch.linalg.vecdot(gv, x)[:, None]
                    gv = gv.addcmul_(along, x, value=-1).div_(length)
            if ctx.needs_input_grad[1]:
                gy = torch.addmm(e, g, W.mT, beta=share)
                # Both of W's places: φ(Y) W and x Wᵀ.
                gW = (q.mT @ g).addmm_(gy.mT, x)
            if any(ctx.needs_input_grad[2:4]):
                if ctx.needs_input_grad[1]:
                    gq = torch.sub(gy, e, alpha=2 * share)
                else:
                    gq = torch.addmm(e, g, W.mT, beta=-share)
            if ctx.needs_input_grad[2]:
                gc = e.new_zeros(D * K, w).index_add_(0, at, gq.view(-1, w)).view(D, K, w)
            if ctx.needs_input_grad[3]:
                gl = e.new_zeros(centroids).index_add_(0, lists, gq)
        return gv, gW, gc, gl, None, None, None, None, None, None, None
