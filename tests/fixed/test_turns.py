import numpy as np
import pytest
import torch
from oracles import plane_rotation

import givens
from givens import orthogonality_error, random_rotation
from givens.fixed import turns
from givens.kmeans import kmeans, nearest, pass_over

N, D, K, w = 600, 3, 8, 4
n = D * w


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(N, n, generator=generator) * torch.linspace(3, 0.3, n)
    return X @ random_rotation(n, seed)


def measured(K=K):
    X = data()
    C = kmeans(X.view(N, D, w), K, iterations=3)
    return X, nearest(X, C), pass_over([X], C, whole=True)


def fixed_code_distortion(X, codes, R, K=K):
    """The least over the codewords, the codes held: what is within the clusters, in float64."""
    Y = (X.double() @ R.double()).view(N, D, w)
    total = 0.0
    for d in range(D):
        for k in range(K):
            cluster = Y[codes[:, d] == k, d]
            total += float((cluster - cluster.mean(0)).square().sum()) if len(cluster) else 0.0
    return total / N


def by_moments(X, Z):
    return (float(X.double().square().sum()) - float(turns.cross_products(Z).trace())) / N


@pytest.mark.parametrize("K", [8, 32])
def test_the_moments_know_the_distortion(backend, K):
    X, codes, clusters = measured(K)
    Z = turns.roots(clusters)
    assert Z.shape == (n, D, min(K, n))
    expected = fixed_code_distortion(X, codes, torch.eye(n), K)
    assert by_moments(X, Z) == pytest.approx(expected, rel=1e-4)


def test_cross_products_are_Y_transposed_q():
    X, codes, clusters = measured()
    means = (clusters.sums / clusters.counts.clamp_min(1)[..., None]).float()
    q = torch.cat([means[d, codes[:, d].long(), d * w : (d + 1) * w] for d in range(D)], dim=1)
    T = turns.cross_products(turns.roots(clusters))
    torch.testing.assert_close(T, X.T @ q, rtol=1e-3, atol=1e-2 * float(T.abs().max()))


def test_the_angle_and_gain_of_a_plane_are_the_best_of_a_fine_grid(backend):
    X, codes, clusters = measured()
    Z = turns.roots(clusters)
    before = fixed_code_distortion(X, codes, torch.eye(n))
    grid = np.linspace(-np.pi / 2, np.pi / 2, 181)
    for i, j in [(0, 4), (1, 11), (5, 9), (3, 7)]:
        found = [fixed_code_distortion(X, codes, plane_rotation(n, i, j, a)) for a in grid]
        angle = float(turns.plane_angles(Z, torch.tensor([[i, j]]))[0])
        reached = fixed_code_distortion(X, codes, plane_rotation(n, i, j, angle))
        assert reached <= min(found) + 1e-9
        gain = float(turns.root_gains(Z)[i, j]) ** 2 / N
        assert before - reached == pytest.approx(gain, rel=2e-3, abs=1e-6)


def test_planes_within_a_subspace_are_left_alone(backend):
    _, _, clusters = measured()
    Z = turns.roots(clusters)
    assert turns.plane_angles(Z, torch.tensor([[0, 1], [4, 6]])).tolist() == [0, 0]
    assert float(turns.root_gains(Z)[:w, :w].max()) < 1e-2 * float(turns.root_gains(Z).max())


@pytest.mark.parametrize("K", [8, 32])
def test_compiled_loops_do_what_torch_does(K):
    _, _, clusters = measured(K)
    Z = turns.roots(clusters)
    pairs = torch.tensor([[0, 5], [1, 9], [4, 8], [2, 3]])
    with givens.backend("reference"):
        roots, theta = turns.root_gains(Z), turns.plane_angles(Z, pairs)
    found = turns.root_gains(Z)
    assert torch.equal(found, found.T)
    torch.testing.assert_close(found, roots, rtol=1e-3, atol=1e-3 * float(roots.max()))
    torch.testing.assert_close(turns.plane_angles(Z, pairs), theta, rtol=1e-4, atol=1e-5)


METHODS = ["gcd-random", "gcd-greedy", "gcd-steepest", "overlapping-random", "overlapping-greedy"]


@pytest.mark.parametrize("method", METHODS)
def test_every_exact_step_lowers_the_distortion(backend, method):
    X, codes, clusters = measured()
    Z, W = turns.roots(clusters), torch.eye(n)
    errors = [fixed_code_distortion(X, codes, W.T)]
    for step in range(12):
        turns.turn_best_(W, Z, method, steps=1, seed=0, step=step)
        errors.append(fixed_code_distortion(X, codes, W.T))
        assert errors[-1] <= errors[-2] * (1 + 1e-6)
        assert by_moments(X, Z) == pytest.approx(errors[-1], rel=1e-4)
    assert errors[-1] < 0.98 * errors[0]
    assert orthogonality_error(W) < 1e-5
    assert float(torch.linalg.det(W)) == pytest.approx(1, abs=1e-4)


def products():
    _, _, clusters = measured()
    return turns.cross_products(turns.roots(clusters)) / N


def test_raw_steps_come_to_the_procrustes_optimum():
    T, W = products(), torch.eye(n)
    best = float(torch.linalg.svdvals(T.double()).sum())
    turns.turn_procrustes_(W, T)
    assert float((W.double() @ T.double()).trace()) == pytest.approx(best, rel=1e-5)
    for method in ("gcd-greedy", "gcd-random", "gcd-steepest"):
        W, turned = torch.eye(n), T.clone()
        turns.turn_raw_(W, turned, method, rate=0.3 / float(T.norm()), steps=1500, seed=0, step=1)
        assert float(turned.trace()) == pytest.approx(best, rel=1e-4)
        torch.testing.assert_close(W @ T, turned, rtol=1e-3, atol=1e-3)
        assert orthogonality_error(W) < 1e-5


def test_a_raw_step_is_the_papers():
    T, W, rate = products(), torch.eye(n), 1e-3
    A = 2 * (T - T.T)
    turns.turn_raw_(W, T.clone(), "gcd-greedy", rate=rate, steps=1, seed=0, step=1)
    i, j = divmod(int(A.abs().argmax()), n)
    i, j = min(i, j), max(i, j)
    theta = -rate * float(A[i, j]) / 2**0.5
    # W = Rᵀ: row i becomes cosθ·e_i + sinθ·e_j.
    assert float(W[i, j]) == pytest.approx(np.sin(theta), rel=1e-4)


@pytest.mark.parametrize("rate", [None, 1e-3])
def test_cayley_climbs_and_stays_a_rotation(rate):
    T, W = products(), torch.eye(n)
    turned = T.clone()
    turns.turn_cayley_(W, turned, rate=rate, steps=30)
    assert float(turned.trace()) > float(T.trace())
    assert orthogonality_error(W) < 1e-4
    torch.testing.assert_close(W @ T, turned, rtol=1e-3, atol=1e-3)
