import copy
import sys
from typing import get_args

import oracles
import pytest
import torch

import givens
from givens.baselines import Method, optimizer_for

LEARNING = [method for method in get_args(Method) if method != "frozen"]


def learn(method, lr, steps, n=6, **options):
    """Learn the rotation that takes x to y; the loss before and after, and the rotation."""
    R = oracles.rotation(n, 2)
    x = torch.randn(200, n, dtype=torch.float64)
    y = x @ R
    rotation = givens.Rotation(n, oracles.rotation(n, 1))
    optimizer = optimizer_for(rotation, method, lr, **options)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (rotation(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, rotation, R


@pytest.mark.parametrize("method", LEARNING)
def test_methods_exchange_by_one_argument(method):
    losses, rotation, R = learn(method, lr=0.05, steps=400)
    assert losses[-1] < 0.02 * losses[0]
    assert (rotation.matrix - R).abs().max() < 0.3
    error = givens.orthogonality_error(rotation.matrix)
    assert error < {"penalty": 0.2, "pogo": 1e-4}.get(method, 1e-10)


def test_frozen_stays():
    losses, rotation, _ = learn("frozen", lr=0.1, steps=5)
    assert losses[0] == losses[-1]
    assert torch.equal(rotation.matrix, oracles.rotation(6, 1))


def test_pogo_is_its_formula_and_its_state_is_all_it_needs():
    """VectorAdam's step D, M = W − lr/2·(WWᵀD − WDᵀW), W ← M + (M − MMᵀM)/2."""
    rotation = givens.Rotation(4, oracles.rotation(4, 1))
    W, lr = rotation.weight, 0.3
    optimizer = optimizer_for(rotation, "pogo", lr)
    # A gradient of zeros comes first, which is no step.
    gradients = [torch.zeros(4, 4), torch.randn(4, 4), torch.randn(4, 4), torch.randn(4, 4)]
    mean, square, t = 0.0, 0.0, 0
    for number, G in enumerate(gradients):
        V, G = W.detach().clone(), G.double()
        if number:
            t += 1
            mean, square = 0.9 * mean + 0.1 * G, 0.999 * square + 0.001 * G.square().sum()
            D = mean / (1 - 0.9**t) / (square / (1 - 0.999**t)).sqrt()
            M = V - lr / 2 * (V @ V.T @ D - V @ D.T @ V)
            V = M + (M - M @ M.T @ M) / 2
        if number == 2:
            # What a checkpoint keeps: states alone.
            state = copy.deepcopy(optimizer.state_dict()["state"])
            optimizer = optimizer_for(rotation, "pogo", lr)
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        W.grad = G.clone()
        optimizer.step()
        torch.testing.assert_close(W.detach(), V, rtol=1e-6, atol=1e-8)


def test_pogo_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pogo", None)
    with pytest.raises(ImportError, match="the method pogo needs pogo-torch: pip install"):
        optimizer_for(givens.Rotation(3), "pogo", 0.1)


@pytest.mark.parametrize("method", ["cayley", "expm"])
def test_parametrizations_start_where_the_rotation_is(method):
    rotation = givens.Rotation(5, oracles.rotation(5, 4))
    optimizer_for(rotation, method, 0.1)
    torch.testing.assert_close(rotation.matrix, oracles.rotation(5, 4))
    x = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(rotation(x), x @ oracles.rotation(5, 4))


def test_cayley_is_its_formula():
    S = oracles.skew(5, 1, torch.float64)
    W0 = oracles.rotation(5)
    eye = torch.eye(5, dtype=torch.float64)
    expected = (eye - S) @ torch.linalg.inv(eye + S) @ W0
    torch.testing.assert_close(givens.baselines.Cayley(W0)(S), expected)
    torch.testing.assert_close(givens.baselines.Exponential(W0)(S), torch.matrix_exp(S) @ W0)


@pytest.mark.parametrize("det", [1, -1])
def test_procrustes_keeps_the_determinant(det):
    W = oracles.rotation(4)
    W[0] *= det
    W = torch.nn.Parameter(W)
    optimizer = givens.baselines.Procrustes([W], 10.0)
    W.grad = torch.randn(4, 4, dtype=torch.float64)
    optimizer.step()
    assert float(torch.linalg.det(W.detach())) == pytest.approx(det)
    assert givens.orthogonality_error(W) < 1e-12


def test_penalty_adds_its_gradient():
    W = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    W.grad = torch.zeros_like(W)
    weight = 0.3
    (expected,) = torch.autograd.grad(weight * (W @ W.T - torch.eye(4)).square().sum(), W)
    givens.baselines.Penalty([W], 1e-3, weight=weight).step()
    torch.testing.assert_close(W.grad, expected)


def test_a_copy_keeps_the_penalty():
    W = torch.nn.Parameter(torch.randn(4, 4))
    again = copy.deepcopy(givens.baselines.Penalty([W], 1e-3, weight=0.3))
    (V,) = again.param_groups[0]["params"]
    V.grad = torch.zeros_like(V)
    expected = 4 * 0.3 * (V @ V.mT @ V - V).detach()
    again.step()
    torch.testing.assert_close(V.grad, expected)
    again.add_param_group({"params": [torch.nn.Parameter(torch.eye(3))]})
    assert again.param_groups[1]["weight"] == 0.3


def test_unknown_method(unchecked):
    with pytest.raises(ValueError, match=r"method must be one of 'gcd', .*but got 'adam'"):
        optimizer_for(givens.Rotation(3), "adam", 0.1)
