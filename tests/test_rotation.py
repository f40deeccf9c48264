import copy

import numpy as np
import oracles
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import givens

SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 2**16)


def smooth_loss(n, seed):
    """A random smooth function of R with terms of first, second and third order."""
    generator = torch.Generator().manual_seed(seed)
    T, B, X = torch.randn(3, n, n, generator=generator, dtype=torch.float64)
    return lambda R: (T * R).sum() + (R @ B @ R.T).diagonal().sin().sum() + (X @ R).pow(3).sum()


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 7), seed=SEEDS)
def test_skew_gradient_is_the_derivative_along_every_plane(n, seed):
    """Proposition 1: central differences of L(R·R_ij(θ)) in float64."""
    loss = smooth_loss(n, seed)
    R = oracles.rotation(n, seed).requires_grad_()
    (G,) = torch.autograd.grad(loss(R), R)
    A = givens.skew_gradient(R.detach(), G)
    assert torch.equal(A, -A.T)
    h = 1e-6
    for i in range(n):
        for j in range(i + 1, n):
            ahead = loss(R.detach() @ oracles.plane_rotation(n, i, j, h))
            behind = loss(R.detach() @ oracles.plane_rotation(n, i, j, -h))
            assert A[i, j] == pytest.approx(float((ahead - behind) / (2 * h)), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
@pytest.mark.parametrize("overlapping", [False, True])
@settings(max_examples=20, deadline=None)
@given(n=SIZES, m=st.integers(0, 6), seed=SEEDS)
def test_rotate_pairs_equals_the_dense_product(n, m, seed, layout, overlapping):
    generator = torch.Generator().manual_seed(seed)
    draw = givens.pairing.overlapping_random_pairs if overlapping else givens.random_pairs
    pairs = draw(n, seed)
    theta = torch.randn(len(pairs), generator=generator, dtype=torch.float64)
    dense = torch.randn(m, n, generator=generator, dtype=torch.float64)
    expected = dense @ oracles.product(n, pairs, theta)
    for backend in ("reference", "numba"):
        R = {
            "rows": dense.clone(),
            "columns": dense.T.clone(memory_format=torch.contiguous_format).T,
            "strided": torch.stack([dense, dense], dim=-1)[..., 0],
        }[layout]
        with givens.backend(backend):
            assert givens.rotate_pairs_(R, pairs, theta) is R
        torch.testing.assert_close(R, expected, rtol=1e-12, atol=1e-12)


def test_rotate_pairs_takes_stacks(backend):
    n, b = 6, 3
    R = torch.stack([oracles.rotation(n, seed) for seed in range(b)])
    pairs = torch.stack([givens.random_pairs(n, seed) for seed in range(b)])
    theta = torch.randn(b, n // 2, dtype=torch.float64)
    expected = [r @ oracles.product(n, p, t) for r, p, t in zip(R, pairs, theta, strict=True)]
    torch.testing.assert_close(givens.rotate_pairs_(R.clone(), pairs, theta), torch.stack(expected))


def test_rotate_pairs_takes_parameters(backend):
    rotation = givens.Rotation(4, dtype=torch.float64)
    pairs = givens.random_pairs(4)
    theta = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    givens.rotate_pairs_(rotation.matrix, pairs, theta)
    torch.testing.assert_close(rotation.matrix.detach(), oracles.product(4, pairs, theta.detach()))


def test_autograd_notices_an_in_place_turn():
    """A compiled loop writes behind autograd's back, and must say so."""
    R = torch.eye(4, requires_grad=True)
    doubled = R * 2
    squared = doubled.square().sum()
    givens.rotate_pairs_(doubled, givens.random_pairs(4), torch.ones(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


@given(n=SIZES, seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_project_is_procrustes(n, seed):
    M = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    Q = givens.project(M)
    assert givens.orthogonality_error(Q) < 1e-12
    assert float(torch.linalg.det(Q)) == pytest.approx(1)
    assert float((-M * Q).sum()) == pytest.approx(oracles.best_linear(-M))
    if np.linalg.det(M) > 0:
        expected, _ = scipy.linalg.orthogonal_procrustes(np.eye(n), M.numpy())
        np.testing.assert_allclose(Q.numpy(), expected, atol=1e-9)
    torch.testing.assert_close(givens.project(Q), Q)


@pytest.mark.parametrize("n", [1, 2, 5, 64])
def test_random_rotation_is_one(n):
    R = givens.random_rotation(n, seed=3)
    assert R.dtype == torch.float32
    assert givens.orthogonality_error(R) < 1e-6
    assert float(torch.linalg.det(R.double())) == pytest.approx(1)
    assert torch.equal(R, givens.random_rotation(n, seed=3))
    assert n == 1 or not torch.equal(R, givens.random_rotation(n, seed=4))


def test_random_rotation_is_uniform():
    """Haar measure: entries of R have mean 0, variance 1/n, and E[tr R] = 0, E[(tr R)²] = 1."""
    n, draws = 4, 3000
    R = torch.stack([givens.random_rotation(n, seed) for seed in range(draws)]).double()
    assert float(R.mean(0).abs().max()) < 5 * (1 / n / draws) ** 0.5
    assert float((R.square().mean(0) - 1 / n).abs().max()) < 0.03
    traces = R.diagonal(dim1=1, dim2=2).sum(1)
    assert float(traces.mean()) == pytest.approx(0, abs=5 / draws**0.5)
    assert float(traces.square().mean()) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotation_module(dtype):
    R = oracles.rotation(5).to(dtype)
    rotation = givens.Rotation(5, R)
    x = torch.randn(3, 2, 5, dtype=dtype)
    torch.testing.assert_close(rotation(x), x @ R)
    torch.testing.assert_close(rotation.inverse(rotation(x)), x)
    assert torch.equal(rotation.matrix, R)
    assert rotation.weight.is_contiguous()
    assert rotation.weight.data_ptr() == rotation.matrix.data_ptr()
    assert torch.equal(givens.Rotation(5).matrix, torch.eye(5))
    assert "dim=5" in repr(rotation)
    other = givens.Rotation(5, dtype=dtype)
    other.load_state_dict(copy.deepcopy(rotation).state_dict())
    assert torch.equal(other.matrix, R)


@pytest.mark.parametrize("n", [511, 512, 1024])
def test_determinants_of_large_matrices(n):
    """The product of an LU's pivots underflows here, and a reflection must still be seen as one."""
    R = givens.random_rotation(n)
    sign, _ = np.linalg.slogdet(R.double().numpy())
    assert sign == 1
    givens.Rotation(n, R)
    R[:, 3] *= -1
    with pytest.raises(ValueError, match="determinant"):
        givens.Rotation(n, R)
    sign, _ = np.linalg.slogdet(givens.project(R).double().numpy())
    assert sign == 1


def test_orthogonality_error_is_the_largest_entry():
    R = torch.eye(3)
    R[0, 1] = 0.25
    assert givens.orthogonality_error(R) == pytest.approx(0.25)
    assert givens.orthogonality_error(torch.stack([torch.eye(3), R])) == pytest.approx(0.25)


REFLECTION = torch.diag(torch.tensor([1.0, 1.0, -1.0]))
EYE = torch.eye(3)
PAIRS = torch.tensor([[0, 1]])
BAD = [
    (lambda: givens.Rotation(0), "dim must be at least 1, but got dim=0"),
    (lambda: givens.Rotation(3, torch.eye(2)), r"shape \(3, 3\), but got \(2, 2\)"),
    (lambda: givens.Rotation(3, 2 * EYE), r"matrix must be orthogonal.*call givens.project"),
    (lambda: givens.Rotation(3, EYE * float("nan")), "matrix must be orthogonal"),
    (lambda: givens.Rotation(3, REFLECTION), "determinant .1, but got −1.*givens.project"),
    (lambda: givens.Rotation(3, dtype=torch.bfloat16), "must be float32 or float64.*autocast"),
    (lambda: givens.Rotation(3, EYE.half()), "must be float32 or float64"),
    (lambda: givens.skew_gradient(EYE, torch.eye(2)), "G must be like R"),
    (lambda: givens.skew_gradient(EYE, EYE.double()), "G must be like R.*float64"),
    (lambda: givens.skew_gradient(EYE[:2], EYE[:2]), "R must be square"),
    (lambda: givens.skew_gradient(EYE, EYE.to("meta")), "G must be like R.* on meta"),
    (lambda: givens.rotate_pairs_(EYE, PAIRS.to("meta"), torch.ones(1)), "must go with R.* meta"),
    (lambda: givens.rotate_pairs_(EYE.half(), PAIRS, torch.ones(1)), "must go with R.*float16"),
    (lambda: givens.rotate_pairs_(EYE, PAIRS, torch.ones(2)), "must have shapes"),
    (lambda: givens.rotate_pairs_(EYE[0], PAIRS, torch.ones(1)), "must have shapes"),
    (lambda: givens.rotate_pairs_(EYE, PAIRS, torch.ones(1).double()), "theta and pairs must go"),
    (lambda: givens.rotate_pairs_(EYE, PAIRS + 2, torch.ones(1)), "two different axes in 0..2"),
    (lambda: givens.rotate_pairs_(EYE, PAIRS * 0, torch.ones(1)), "two different axes"),
    (lambda: givens.rotate_pairs_(EYE, PAIRS - 1, torch.ones(1)), "two different axes"),
    (lambda: givens.project(EYE / 0), "R must be finite"),
    (lambda: givens.project(EYE[:2]), "R must be square"),
    (lambda: givens.orthogonality_error(EYE[0]), "R must be square"),
    (
        lambda: givens.backend("cuda"),
        "one of 'reference', 'numba', 'triton' or None",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input(call, message, unchecked):
    before = EYE.clone()
    with pytest.raises(ValueError, match=message):
        call()
    assert torch.equal(before, EYE)
