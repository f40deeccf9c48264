"""The paper's statements, as tests; constants as the design corrects them."""

import itertools
import math

import oracles
import pytest
import torch
from torch import nn

import givens

GCDS = ["random", "greedy", "steepest"]


def test_disjoint_turns_commute_and_no_further_plane_does():
    """Lemma 2: ⌊n/2⌋ disjoint planes generate a maximal commuting subgroup."""
    for n in (4, 5, 8):
        pairs = givens.random_pairs(n, seed=n)
        theta = torch.rand(len(pairs), dtype=torch.float64) + 0.5
        turns = [
            oracles.plane_rotation(n, i, j, t)
            for (i, j), t in zip(pairs.tolist(), theta, strict=True)
        ]
        for P, Q in itertools.combinations(turns, 2):
            torch.testing.assert_close(P @ Q, Q @ P)
        for order in itertools.permutations(range(len(turns))):
            together = torch.linalg.multi_dot([torch.eye(n).double(), *(turns[p] for p in order)])
            torch.testing.assert_close(together, oracles.product(n, pairs, theta))
        chosen = {tuple(pair) for pair in pairs.tolist()}
        for i, j in itertools.combinations(range(n), 2):
            other = oracles.plane_rotation(n, i, j, 0.7)
            commutes = all(torch.allclose(other @ turn, turn @ other) for turn in turns)
            assert commutes == ((i, j) in chosen)


@pytest.mark.parametrize("n", [2, 3, 6, 9])
def test_every_rotation_is_a_product_of_plane_rotations(n):
    """Lemma 1 (Hurwitz): n(n−1)/2 turns, one for each plane, take R to the identity and back."""
    R = oracles.rotation(n, seed=n)
    left = R.clone()
    planes, angles = [], []
    for row in range(n):
        for column in range(row + 1, n):
            # Turn columns (row, column) so that the entry right of the diagonal vanishes.
            angle = math.atan2(float(left[row, column]), float(left[row, row]))
            planes.append((row, column))
            angles.append(angle)
            givens.rotate_pairs_(
                left, torch.tensor([[row, column]]), torch.tensor([angle], dtype=torch.float64)
            )
    torch.testing.assert_close(left, torch.eye(n, dtype=torch.float64))
    assert len(planes) == n * (n - 1) // 2
    undo = -torch.tensor(angles[::-1], dtype=torch.float64)
    back = oracles.product(n, torch.tensor(planes[::-1]), undo)
    torch.testing.assert_close(back, R)


def quadratic(n, seed):
    """L(R) = ½‖XR − Y‖² with a bound η on its curvature along geodesics R exp(tS), ‖S‖ = 1.

    The second derivative of −⟨XᵀY, R exp(tS)⟩ is at most σ₁(XᵀY).
    """
    generator = torch.Generator().manual_seed(seed)
    X, Y = torch.randn(2, 3 * n, n, generator=generator, dtype=torch.float64)
    eta = float(torch.linalg.matrix_norm(X.T @ Y, ord=2))
    return lambda R: float((X @ R - Y).square().sum() / 2), X, Y, eta


@pytest.mark.parametrize("n", [4, 7, 10])
def test_expected_descent(n):
    """Lemma 3: with θ = −A/(2η), E[L(R) − L(R⁺)] ≥ ‖∇L‖²/(2(n−1)η), ‖∇L‖² = ½ Σ_{i<j} A_ij²."""
    loss, X, Y, eta = quadratic(n, seed=n)
    for seed in range(3):
        R = oracles.rotation(n, seed)
        A = givens.skew_gradient(R, X.T @ (X @ R - Y))
        descents = []
        for draw in range(400):
            pairs = givens.random_pairs(n, draw)
            theta = -A[pairs[:, 0], pairs[:, 1]] / (2 * eta)
            descent = loss(R) - loss(givens.rotate_pairs_(R.clone(), pairs, theta))
            # Each draw obeys the lemma with the part of the gradient that it sees.
            seen = float(A[pairs[:, 0], pairs[:, 1]].square().sum()) / 2
            assert descent >= seen / (2 * eta) - 1e-9
            descents.append(descent)
        # An odd n leaves an axis out, so a pair is drawn with probability 1/n instead of 1/(n−1).
        chances = n - 1 if n % 2 == 0 else n
        bound = float(A.triu(1).square().sum()) / 2 / (2 * chances * eta)
        assert sum(descents) / len(descents) >= bound


def test_sublinear_convergence_near_the_optimum():
    """The theorem: L(R_k) − L* ≤ 1/(k/(2D²(n−1)η) + 1/Δ₀), started where L is geodesically convex.

    Near its minimum ⟨T, R⟩ with T = −diag(s) is convex along geodesics; D bounds the distance from
    the optimum within the level set.
    """
    n, steps = 6, 400
    s = torch.linspace(1, 2, n, dtype=torch.float64)
    T = -torch.diag(s)
    eta = float(s.max())
    start = torch.matrix_exp(0.05 * oracles.skew(n, 1, torch.float64))
    best = float((T * torch.eye(n)).sum())
    first = float((T * start).sum()) - best
    # In the level set Σ s_i(1 − R_ii) ≤ Δ₀ bounds ‖R − I‖² ≤ 2Δ₀/s_min; an arc ≤ π/2 chords.
    D2 = (math.pi / 2) ** 2 * 2 * first / float(s.min())
    mean = torch.zeros(steps + 1, dtype=torch.float64)
    for seed in range(5):
        W = nn.Parameter(start.T.contiguous().clone())
        # λ = 1/(√2 η) makes θ = −λA/√2 the theorem's −A/(2η).
        optimizer = givens.GCD([W], 1 / (2**0.5 * eta), pairing="random", adapt=None, seed=seed)
        for k in range(steps + 1):
            mean[k] += (float((T * W.detach().T).sum()) - best) / 5
            W.grad = T.T.clone()
            optimizer.step()
    k = torch.arange(steps + 1, dtype=torch.float64)
    bound = 1 / (k / (2 * D2 * (n - 1) * eta) + 1 / first)
    assert (mean <= bound + 1e-12).all()


@pytest.mark.parametrize("det", [1, -1])
@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("method", ["gcd", *(f"gcd-{pairing}" for pairing in GCDS)])
def test_linear_objectives_reach_the_optimum_of_the_svd(method, cosine, det):
    """The corollary: ⟨T, R⟩ and its cosine, minimised over SO(n), T of either determinant."""
    n = 8
    T = torch.randn(n, n, dtype=torch.float64)
    T[0] *= det * torch.linalg.det(T).sign()
    best = oracles.best_linear(T)
    norm = float(T.norm()) * n**0.5
    rotation = givens.Rotation(n, oracles.rotation(n, 1))
    optimizer = givens.baselines.optimizer_for(rotation, method, 0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6000)
    for _ in range(6000):
        optimizer.zero_grad()
        loss = (T * rotation.matrix).sum()
        if cosine:
            loss = loss / (T.norm() * rotation.matrix.norm())
        loss.backward()
        optimizer.step()
        schedule.step()
        if float(loss.detach()) * (norm if cosine else 1) <= best * (1 - 1e-7):
            break
    reached = float(loss.detach()) * (norm if cosine else 1)
    assert reached == pytest.approx(best, rel=1e-6)


def test_cayley_breaks_down_at_a_half_turn_and_gcd_does_not():
    """R with eigenvalue −1 is at infinity for Cayley; for GCD it is a point like any other."""
    n = 4
    goal = torch.diag(torch.tensor([-1.0, -1, 1, 1], dtype=torch.float64))
    errors, sizes = {}, {}
    for method, lr in (("cayley", 0.1), ("gcd-greedy", 0.1)):
        torch.manual_seed(1)
        near = torch.matrix_exp(0.1 * oracles.skew(n, 3, torch.float64))
        rotation = givens.Rotation(n, near)
        optimizer = givens.baselines.optimizer_for(rotation, method, lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2000)
        for _ in range(2000):
            optimizer.zero_grad()
            (rotation.matrix - goal).square().sum().backward()
            optimizer.step()
            schedule.step()
        errors[method] = float((rotation.matrix.detach() - goal).abs().max())
        sizes[method] = max(float(p.detach().abs().max()) for p in rotation.parameters())
    assert errors["gcd-greedy"] < 1e-6
    assert errors["cayley"] > 1e-4
    assert sizes["cayley"] > 5
    assert sizes["gcd-greedy"] <= 1 + 1e-9
