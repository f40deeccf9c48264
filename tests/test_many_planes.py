"""A size for each plane and several pairings for a gradient, against slow and plain versions."""

import contextlib
import copy
import itertools
import math

import oracles
import pytest
import torch
from torch import nn

import givens
from givens import optim, options, pairing
from givens.kernels.cpu import choosing
from givens.kernels.cpu import step as cpu

EPS = {torch.float32: 1e-6, torch.float64: 1e-14}


def matrix(n, seed=0, dtype=torch.float64):
    return nn.Parameter(oracles.rotation(n, seed).to(dtype))


def gradient(n, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, n, generator=generator, dtype=torch.float64).to(dtype)


def turn_all(partners, theta):
    """∏ over the pairings of ∏ R_ij(θ_ij), as one matrix."""
    Q = torch.eye(len(theta), dtype=torch.float64)
    for partner in partners:
        pairs = torch.tensor([(i, j) for i, j in enumerate(partner.tolist()) if i < j])
        if len(pairs):
            Q = Q @ oracles.product(len(theta), pairs, theta[pairs[:, 0], pairs[:, 1]])
    return Q


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("turns", [1, 3])
def test_step_is_what_the_page_says(turns, follow, backend, monkeypatch):
    """Moments of every plane, the better of two frames, and K pairings by the same D."""
    n, lr, beta1, beta2 = 11, 0.1, 0.8, 0.9
    choose, chosen = optim.choose_partners, []

    def remember(D, how):
        chosen.append(choose(D, how)[0])
        return chosen[-1][None]

    for module in (optim, cpu):
        monkeypatch.setattr(module, "choose_partners", remember)
    W = matrix(n)
    optimizer = givens.GCD([W], lr, turns=turns, betas=(beta1, beta2))
    M = V = torch.zeros(n, n, dtype=torch.float64)
    H, misses, frames = M, [0.0, 0.0], set()
    for t in range(1, 25):
        # A gradient that stays in the frame of the planes, or in the space around.
        noise = 0.3 * gradient(n, t)
        G = (gradient(n, 0) if follow else gradient(n, 0) @ W.detach()) + noise
        before = W.detach().clone()
        P = G @ before.T
        A = P - P.T
        known = 1 - beta1 ** (t - 1) if t > 1 else 1.0
        S = H @ before.T
        ambient = misses[1] < misses[0]
        frames.add(ambient)
        for frame, mean in enumerate((M, S - S.T)):
            missed = (A - mean / known).triu(1).square().sum() / (n * (n - 1) / 2)
            misses[frame] = beta2 * misses[frame] + (1 - beta2) * float(missed)
        M = beta1 * M + (1 - beta1) * A
        H = beta1 * H + (1 - beta1) * G
        V = beta2 * V + (1 - beta2) * A.square()
        S = H @ before.T
        D = ((S - S.T) if ambient else M) / (1 - beta1**t)
        D = D / (V / (1 - beta2**t)).sqrt().clamp_min(1e-300)
        W.grad = G
        optimizer.step()
        Q = turn_all(chosen[-1], -lr / turns**0.5 * D)
        assert weight(chosen[-1], D.abs()) > 0.95 * greedy_one_by_one(D.abs(), turns)
        torch.testing.assert_close(W.detach(), Q.T @ before, rtol=1e-9, atol=1e-9)
    assert follow in frames


@pytest.mark.parametrize("n", [8, 9, 80])
def test_every_plane_is_an_exponential_to_first_order(n, backend):
    """With K = n − 1 a step is exp(−lr·D/√K) up to lr²: a third of the rate, a ninth of the gap."""
    gaps = []
    for lr in (0.03, 0.01):
        W = matrix(n)
        start, W.grad = W.detach().clone(), gradient(n, 1)
        P = W.grad @ start.T
        D = (P - P.T).sign()
        givens.GCD([W], lr, turns="all").step()
        exact = torch.matrix_exp(-lr / (n - 1) ** 0.5 * D) @ start
        gaps.append(float((W.detach() - exact).norm()))
    slope = math.log(gaps[0] / gaps[1]) / math.log(3)
    assert 1.8 < slope < 4.2
    assert gaps[1] < 0.2 * 0.01 * n**0.5


def test_drawn_pairings_descend_by_their_share():
    """E Σ A² over K pairings of a draw is K/(n − 1) of all of it; K = n − 1 is all of it."""
    n, K, draws = 9, 3, 4000
    squares = oracles.skew(n, dtype=torch.float64).square()
    every = float(squares.triu(1).sum())
    found = torch.zeros(draws, dtype=torch.float64)
    for draw, turn in itertools.product(range(draws), range(K)):
        i, j = givens.random_pairs(n, 1, step=draw, turn=turn).T
        found[draw] += squares[i, j].sum()
    # Of nine axes one rests: nine pairings have all planes.
    expected = K * every / n
    assert abs(float(found.mean()) - expected) < 5 * float(found.std()) / draws**0.5


@pytest.mark.parametrize("n", [2, 3, 6, 7])
def test_pairings_of_a_draw_share_no_plane(n, backend):
    planes = [
        tuple(pair)
        for turn in range((n + 1) // 2 * 2 - 1)
        for pair in givens.random_pairs(n, 3, step=5, turn=turn).tolist()
    ]
    assert sorted(planes) == list(itertools.combinations(range(n), 2))


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7])
def test_every_pairing_has_every_plane_once(n):
    partners = pairing.every_pairing(n)
    rest = torch.arange(n).expand_as(partners)
    assert torch.equal(partners.gather(1, partners), rest)
    planes = [(i, j) for row in partners.tolist() for i, j in enumerate(row) if i < j]
    assert sorted(planes) == list(itertools.combinations(range(n), 2))


def weight(partners, magnitudes):
    """The weight of the planes, after a look that they are pairings without a plane twice."""
    n = len(magnitudes)
    rest = torch.arange(n).expand_as(partners)
    assert torch.equal(partners.gather(1, partners), rest)
    planes = [(i, j) for row in partners.tolist() for i, j in enumerate(row) if i < j]
    assert len(set(planes)) == len(planes)
    return float(sum(magnitudes[i, j] for i, j in planes))


def greedy_one_by_one(magnitudes, turns):
    """K sorted greedy matchings, each of what the ones before have left."""
    left, total = magnitudes.clone(), 0.0
    for _ in range(turns):
        pairs = oracles.sorted_greedy(left.triu(1) - left.triu(1).T)
        for i, j in pairs:
            total += float(left[i, j])
            left[i, j] = left[j, i] = 0
    return total


def hub(n):
    """One axis has all the weight."""
    A = torch.zeros(n, n)
    A[0, 1:] = torch.rand(n - 1) + 1
    return A + A.T


def chain(n):
    """Each axis likes the next one better than the last."""
    i = torch.arange(n - 1)
    A = torch.zeros(n, n)
    A[i, i + 1] = 1 + i / n
    return A + A.T


@pytest.mark.parametrize("turns", [1, 4, 16])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("normal", lambda n: oracles.skew(n).abs()),
        ("heavy tails", lambda n: oracles.skew(n).abs().pow(8)),
        ("one plane", lambda n: torch.eye(n).roll(1, 0).triu(n - 1) + torch.eye(n).roll(-1, 0)),
        ("ties", lambda n: 1 - torch.eye(n)),
        ("few values", lambda n: oracles.skew(n).abs().round()),
        ("hub", hub),
        ("chain", chain),
    ],
)
def test_weight_of_the_chosen_planes(name, make, turns, backend):
    """At least 95 % of what K greedy matchings, one after another, take."""
    n = 40
    magnitudes = make(n)
    magnitudes = torch.maximum(magnitudes, magnitudes.T).fill_diagonal_(0).contiguous()
    found = weight(pairing.greedy_partners(magnitudes, turns), magnitudes)
    assert found >= 0.95 * greedy_one_by_one(magnitudes, turns)


@pytest.mark.parametrize("make", [hub, chain, lambda n: 1 + oracles.skew(n).abs()])
@pytest.mark.parametrize("heavy", ["all", "sampled", "others"])
def test_sample_of_the_planes_may_mislead(heavy, make):
    """It may have all heavy planes or none, and says how many of them are collected, no more."""
    n, turns = 200, 4
    every = min(1 + n // 64, choosing.SAMPLE)
    assert every > 1
    i, j = torch.arange(n)[:, None], torch.arange(n)
    sampled = (j - i - 1 - i % every) % every == 0
    factor = {"all": 1.0, "sampled": 1 + 99.0 * sampled, "others": 100 - 99.0 * sampled}[heavy]
    magnitudes = (make(n) * factor).triu(1)
    magnitudes = magnitudes + magnitudes.T
    found = weight(pairing.greedy_partners(magnitudes, turns), magnitudes)
    assert found >= 0.95 * greedy_one_by_one(magnitudes, turns)


def test_one_pairing_is_the_greedy_one():
    magnitudes = oracles.skew(33, 4).abs()
    found = weight(pairing.greedy_partners(magnitudes, 1), magnitudes)
    pairs = oracles.sorted_greedy(oracles.skew(33, 4))
    # Sorted to within 0.8 %.
    assert found == pytest.approx(sum(float(magnitudes[i, j]) for i, j in pairs), rel=0.01)


def test_planes_without_weight_are_not_turned(backend):
    assert weight(pairing.greedy_partners(torch.zeros(9, 9), 4), torch.zeros(9, 9)) == 0
    W, before = matrix(9), matrix(9).detach()
    W.grad = torch.zeros_like(W)
    givens.GCD([W], 0.5).step()
    assert torch.equal(W.detach(), before)


@pytest.mark.parametrize("turns", [1, 4, "all"])
@pytest.mark.parametrize("pairing", ["greedy", "random"])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 20, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_descends_and_stays_a_rotation(n, dtype, pairing, turns, backend):
    W = matrix(n, dtype=dtype)
    T = matrix(n, 1, dtype).detach()
    optimizer = givens.GCD([W], 0.05, pairing=pairing, turns=turns)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (W - T).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert n == 1 or losses[-1] < losses[0]
    assert givens.orthogonality_error(W) < 10 * EPS[dtype]
    assert float(torch.linalg.det(W.detach())) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("turns", [1, 16, "all"])
def test_state_is_three_matrices_at_most(turns):
    W = matrix(24, dtype=torch.float32)
    optimizer = givens.GCD([W], turns=turns)
    W.grad = gradient(24, 1, torch.float32)
    optimizer.step()
    tensors = [value for value in optimizer.state[W].values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() for tensor in tensors) <= 3 * W.numel()


@pytest.mark.parametrize("turns", [3, "all"])
@pytest.mark.parametrize("options", [{}, {"adapt": None}, {"pairing": "random"}])
@pytest.mark.parametrize("n", [7, 70])
def test_compiled_equals_reference(n, options, turns, monkeypatch):
    """The choice is not the same to the last plane, so both are given one."""
    choose = pairing.greedy_partners

    def alike(magnitudes, count):
        with givens.backend("reference"):
            return choose(magnitudes, count)

    monkeypatch.setattr(pairing, "greedy_partners", alike)
    # The raw step has the gradient's size in its angles.
    scale, found = 1.0 if options.get("adapt", "adam") is None else 1e6, []
    for name in ("numba", "reference"):
        W = nn.Parameter(torch.stack([oracles.rotation(n, b) for b in range(2)]))
        optimizer = givens.GCD([W], 0.02, turns=turns, seed=4, **options)
        with givens.backend(name):
            for step in range(12):
                W.grad = torch.stack([gradient(n, step), scale * gradient(n, step + 99)])
                optimizer.step()
        found.append((W.detach(), optimizer.state_dict()["state"][0]))
    (fast, fast_state), (slow, slow_state) = found
    torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-8)
    assert fast_state.keys() == slow_state.keys()
    for key, value in fast_state.items():
        torch.testing.assert_close(value, slow_state[key], rtol=1e-8, atol=1e-8)


PAIRINGS = ["random", "greedy", "steepest", "overlapping-random", "overlapping-greedy"]
SCALES = [1e-45, 1e-38, 1e-25, 1.0, 1e25, 1e36, 3e38]


@pytest.mark.parametrize(
    ("pairing", "adapt", "turns"),
    [
        *itertools.product(PAIRINGS, ["adam", "matrix", "adagrad", None], [1]),
        *itertools.product(["random", "greedy"], ["adam", None], [3, "all"]),
    ],
)
@pytest.mark.parametrize("lr", [1e-3, 1e20])
def test_no_gradient_damages_the_matrix(pairing, adapt, turns, lr, backend):
    """Whatever its size, and after whatever came before, W is a rotation and the state finite."""
    for first, second in itertools.permutations(SCALES, 2):
        W = matrix(6, dtype=torch.float32)
        optimizer = givens.GCD([W], lr, pairing=pairing, adapt=adapt, turns=turns)
        for step, scale in enumerate((first, second, first)):
            before, state = W.detach().clone(), copy.deepcopy(optimizer.state_dict())
            W.grad = (gradient(6, step) * scale).float().clamp(-3.4e38, 3.4e38)
            if not is_taken(optimizer):
                assert torch.equal(W.detach(), before)
                assert_same(optimizer.state_dict()["state"], state["state"])
        assert givens.orthogonality_error(W) < 1e-5
        for value in optimizer.state[W].values():
            assert torch.as_tensor(value).isfinite().all()


def is_taken(optimizer):
    """Do a step; whether its gradient was not refused."""
    with contextlib.suppress(ValueError):
        optimizer.step()
        return True
    return False


def assert_same(state, before):
    """Nothing of a state has changed; one that was empty may have got its zeros."""
    for number, saved in state.items():
        for key, value in saved.items():
            old = before.get(number, {}).get(key, torch.zeros_like(torch.as_tensor(value)))
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(old)), key


def test_refused_gradient_leaves_no_trace(backend):
    """What was refused has not entered the momentum: the run goes on as if it had not been."""
    found = []
    for bad in (False, True):
        W, T = matrix(8, dtype=torch.float32), matrix(8, 1, torch.float32).detach()
        optimizer = givens.GCD([W], 0.05)
        for step in range(40):
            optimizer.zero_grad()
            (W - T).square().sum().backward()
            if bad and step % 7 == 0:
                good, W.grad = W.grad, torch.full((8, 8), 3e38)
                with pytest.raises(ValueError, match="overflow"):
                    optimizer.step()
                W.grad = good
            optimizer.step()
        found.append(W.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("pairing", ["random", "greedy"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_all_matrices_turn_or_none(pairing, bad, backend):
    W, V = matrix(5, dtype=torch.float32), matrix(6, 1, torch.float32)
    optimizer = givens.GCD([{"params": [W]}, {"params": [V], "pairing": pairing}], 0.1)
    W.grad, V.grad = gradient(5, 1, torch.float32), gradient(6, 1, torch.float32)
    optimizer.step()
    before = [M.detach().clone() for M in (W, V)]
    state = copy.deepcopy(optimizer.state_dict())
    V.grad[2, 3] = bad
    with pytest.raises(ValueError, match="no matrix was turned"):
        optimizer.step()
    assert torch.equal(W.detach(), before[0])
    assert torch.equal(V.detach(), before[1])
    assert_same(optimizer.state_dict()["state"], state["state"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": float("nan")}, "lr must be finite"),
        ({"lr": float("inf")}, "lr must be finite"),
        ({"lr": -1e-3}, "lr must be finite and not negative"),
        ({"lr": torch.tensor(float("nan"))}, "lr must be finite"),
        ({"lr": None}, "lr must be a number"),
        ({"betas": (float("nan"), 0.9)}, "betas must be two numbers"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"betas": None}, "betas must be two numbers"),
        ({"turns": 0}, "turns must be in"),
        ({"turns": None}, "turns must be in"),
        ({"pairing": "best"}, "pairing must be one of"),
        ({"adapt": "sgd"}, "adapt must be one of"),
        ({"seed": 0.5}, "seed must be in"),
        ({"maximize": 1}, "maximize must be"),
    ],
)
def test_options_are_checked_when_they_are_used(change, message, backend):
    """A scheduler, or a hand, may have changed them since they were given."""
    W = matrix(4)
    optimizer = givens.GCD([W], 0.1)
    W.grad = gradient(4, 1)
    optimizer.step()
    before = W.detach().clone()
    optimizer.param_groups[0].update(change)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(W.detach(), before)


@pytest.mark.parametrize(
    "options",
    [{"betas": 0.9}, {"lr": None}, {"seed": "x"}, {"turns": []}, {"pairing": 3}, {"exact": None}],
)
def test_refused_group_leaves_nothing(options):
    optimizer = givens.GCD([matrix(4)])
    with pytest.raises((ValueError, TypeError)):
        optimizer.add_param_group({"params": [matrix(5)], **options})
    assert len(optimizer.param_groups) == 1


BAD_STATES = [
    ({"planes": torch.zeros(5, 5)}, r"must be of a \(4, 4\) matrix, but planes has shape \(5, 5\)"),
    ({"ambient": torch.full((4, 4), float("nan"))}, "ambient has NaN or infinite entries"),
    ({"foresight": torch.tensor([[float("inf"), 0.0]])}, "foresight has NaN"),
    ({"step": -3}, "step of a state must be in"),
    ({"step": 1 << 40}, "step of a state must be in"),
]


@pytest.mark.parametrize(("change", "message"), BAD_STATES)
def test_state_that_would_do_damage_is_refused(change, message):
    W = matrix(4, dtype=torch.float32)
    optimizer = givens.GCD([W])
    W.grad = gradient(4, 1, torch.float32)
    optimizer.step()
    good = copy.deepcopy(optimizer.state_dict())
    bad = copy.deepcopy(good)
    bad["state"][0].update(change)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(bad)
    optimizer.step()
    assert givens.orthogonality_error(W) < 1e-6


def test_state_of_another_matrix_is_refused():
    W = matrix(6)
    optimizer = givens.GCD([W])
    W.grad = gradient(6, 1)
    optimizer.step()
    W.data = givens.random_rotation(9).double()
    W.grad = gradient(9, 1)
    with pytest.raises(ValueError, match="make a new GCD for another matrix"):
        optimizer.step()


def test_devices_other_than_a_cpu_take_the_reference():
    """Its step and its counts are made wherever the matrix is."""
    state = {}
    optim._place_counts(state, torch.empty(3, 3, device="meta"))
    assert state["step"].device.type == state["skipped"].device.type == "meta"


def test_skipped_steps_are_remembered():
    W = matrix(4)
    optimizer = givens.GCD([W])
    W.grad = gradient(4, 1)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["skipped"] = torch.tensor(7, dtype=torch.int32)
    optimizer.load_state_dict(saved)
    assert optimizer.state[W]["skipped"] == 7


def test_defaults_are_those_that_the_docs_name():
    group = givens.GCD([matrix(4)]).param_groups[0]
    assert (group["pairing"], group["adapt"], group["turns"]) == ("greedy", "adam", 16)
    assert group["turns"] == options.TURNS
    for given in ({"pairing": "random"}, {"adapt": None}, {"adapt": "matrix"}):
        assert givens.GCD([matrix(4)], **given).param_groups[0]["turns"] == 1
