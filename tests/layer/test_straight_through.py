"""The gradients of T(X) and of the distortion, against autograd's and against differences."""

import pytest
import torch
from torch.nn import functional

import givens
from givens.kmeans import mean_square
from givens.layer.straight_through import StraightThrough, normalise_exactly

m, n, D, K, L = 9, 12, 3, 5, 4


def parts(coarse):
    """Names, float64 tensors and codes of a layer in the middle of its training."""
    found = {
        "x": torch.randn(m, n),
        "W": givens.random_rotation(n).mT.contiguous(),
        "codebooks": torch.randn(D, K, n // D),
        "coarse": torch.randn(L, n) if coarse else None,
    }
    found = {name: part.double() for name, part in found.items() if part is not None}
    at = (torch.randint(K, (m, D)) + torch.arange(D) * K).view(-1)
    return found, at, torch.randint(L, (m,)) if coarse else None


def plain(found, at, lists, unit=False):
    """The definition, left to autograd: T(X) = φ(XR)Rᵀ and (1/m)‖XR − q‖²."""
    x, R = found["x"], found["W"].mT
    y = (functional.normalize(x) if unit else x) @ R
    q = found["codebooks"].flatten(0, 1)[at].view(m, n)
    if lists is not None:
        q = q + found["coarse"][lists]
    phi = q + (y - y.detach())
    return phi @ R.mT, (y - q).square().sum() / m


def ours(found, at, lists, unit=False):
    v, W = found["x"], found["W"]
    x, length = normalise_exactly(v.detach()) if unit else (None, None)
    R = W.detach().mT.contiguous()
    coarse = found.get("coarse")
    residual = (v.detach() if x is None else x) @ R
    if lists is not None:
        residual = residual - coarse.detach()[lists]
    # NaN where a residual is not finite, as the layer has them.
    words = found["codebooks"].detach().flatten(0, 1)[at].view(m, n) + 0 * residual
    errors = residual - words
    rest = (x, length, R, lists, at, words, errors, mean_square(errors))
    return StraightThrough.apply(v, W, found["codebooks"], coarse, *rest)


def gradients(function, found, at, lists, weights, unit=False):
    leaves = {name: part.clone().requires_grad_() for name, part in found.items()}
    T, distortion = function(leaves, at, lists, unit)
    target = torch.linspace(-1, 1, m * n, dtype=T.dtype).view(m, n)
    loss = weights[0] * (T - target).square().sum() + weights[1] * distortion
    return T, distortion, dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("weights", [(1, 0), (0, 1), (0.3, 2)])
@pytest.mark.parametrize("unit", [False, True])
def test_it_is_the_definition(weights, coarse, unit):
    state = parts(coarse)
    T, distortion, mine = gradients(ours, *state, weights, unit)
    wanted_T, wanted_distortion, wanted = gradients(plain, *state, weights, unit)
    torch.testing.assert_close(T, wanted_T)
    torch.testing.assert_close(distortion, wanted_distortion)
    # A float32 rotation is one to 1e-7.
    torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


def test_unit_vectors_are_those_of_torch():
    v = torch.randn(50, 7) * torch.logspace(-20, 18, 50)[:, None]
    v[3] = 0
    assert torch.equal(normalise_exactly(v)[0], functional.normalize(v))


@pytest.mark.parametrize("name", ["x", "W", "codebooks", "coarse"])
def test_distortion_against_differences(name):
    found, at, lists = parts(coarse=True)
    *_, gradient = gradients(ours, found, at, lists, (0, 1))
    step = 1e-6
    part, differences = found[name].view(-1), torch.empty(found[name].numel(), dtype=torch.float64)
    for k in range(len(part)):
        ends = []
        for sign in (1, -1):
            part[k] += sign * step
            ends.append(plain(found, at, lists)[1])
            part[k] -= sign * step
        differences[k] = (ends[0] - ends[1]) / (2 * step)
    torch.testing.assert_close(gradient[name].view(-1), differences, rtol=1e-6, atol=1e-7)


def test_the_retrieval_gradient_reaches_x_to_the_last_bit():
    found, at, lists = parts(coarse=False)
    x = found["x"].requires_grad_()
    T, _ = ours(found, at, lists)
    g = torch.randn(m, n, dtype=T.dtype)
    T.backward(g)
    assert torch.equal(x.grad, g)


def test_the_derivative_by_planes_is_that_of_the_loss():
    """A_ij of the gradient is d/dθ of the distortion when R turns in the plane (i, j)."""
    found, at, lists = parts(coarse=True)
    *_, gradient = gradients(ours, found, at, lists, (0, 1))
    A = givens.skew_gradient(found["W"].mT, gradient["W"].mT)
    step = 1e-6
    for pair in ([0, 1], [2, 7], [5, 11]):
        ends = []
        for theta in (step, -step):
            R = found["W"].mT.clone()
            angle = torch.tensor([theta], dtype=R.dtype)
            givens.rotate_pairs_(R, torch.tensor([pair]), angle)
            ends.append(plain({**found, "W": R.mT}, at, lists)[1])
        assert float(A[tuple(pair)]) == pytest.approx(float(ends[0] - ends[1]) / 2e-6, rel=1e-5)


def test_what_needs_no_gradient_gets_none():
    found, at, lists = parts(coarse=True)
    found["codebooks"].requires_grad_()
    T, distortion = ours(found, at, lists)
    (T.sum() + distortion).backward()
    assert found["codebooks"].grad is not None
    assert all(found[name].grad is None for name in ("x", "W", "coarse"))


def test_what_is_not_finite_shows():
    found, at, lists = parts(coarse=False)
    found["x"][2, 3] = torch.nan
    T, distortion = ours(found, at, lists)
    assert T[2].isnan().all()
    assert distortion.isnan()
    assert T[[0, 1, 3]].isfinite().all()


def test_there_is_no_second_derivative():
    found, at, lists = parts(coarse=False)
    x = found["x"].requires_grad_()
    T, _ = ours(found, at, lists)
    (g,) = torch.autograd.grad(T.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()
