import copy
import io
import itertools

import oracles
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import givens

PAIRINGS = ["random", "greedy", "steepest", "overlapping-random", "overlapping-greedy"]
ADAPTS = ["adam", "matrix", "adagrad", None]


def parameter(n, seed=0, dtype=torch.float64, stack=0):
    if stack:
        return nn.Parameter(torch.stack([oracles.rotation(n, seed + b) for b in range(stack)]))
    return nn.Parameter(oracles.rotation(n, seed).to(dtype))


def target(W, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(W.shape, generator=generator, dtype=torch.float64).to(W.dtype)


def descend(W, optimizer, steps, T=None):
    T = target(W) if T is None else T
    for _ in range(steps):
        optimizer.zero_grad()
        (W * T).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_raw_step_is_the_papers(pairing, backend):
    """Algorithm 2: R ← R ∏ R_ij(−λ g_ij), g_ij = A_ij/√2."""
    n, lr = 9, 0.03
    rotation = givens.Rotation(n, oracles.rotation(n))
    R = rotation.matrix.detach().clone()
    T = target(R)
    (rotation.matrix * T).sum().backward()
    givens.GCD(rotation.parameters(), lr, pairing=pairing, adapt=None, seed=2).step()
    A = T.T @ R - R.T @ T
    pairs = {
        "random": lambda: givens.random_pairs(n, 2, step=1),
        "greedy": lambda: givens.greedy_pairs(A),
        "steepest": lambda: givens.steepest_pairs(A),
        "overlapping-random": lambda: givens.pairing.overlapping_random_pairs(n, 2, step=1),
        "overlapping-greedy": lambda: givens.pairing.overlapping_greedy_pairs(A),
    }[pairing]()
    theta = -lr * A[pairs[:, 0], pairs[:, 1]] / 2**0.5
    torch.testing.assert_close(rotation.matrix.detach(), R @ oracles.product(n, pairs, theta))


def test_momentum_is_carried_along_with_the_frame(backend):
    """The buffer whose rows turn with W is the skew momentum M ← β QᵀMQ + (1 − β) A."""
    n, beta1, beta2, lr = 8, 0.8, 0.9, 0.2
    W = parameter(n)
    optimizer = givens.GCD([W], lr, pairing="greedy", adapt="matrix", betas=(beta1, beta2))
    M, variance = torch.zeros(n, n, dtype=torch.float64), 0.0
    for t in range(1, 15):
        T = target(W, seed=t)
        A = T @ W.detach().T - W.detach() @ T.T
        M = beta1 * M + (1 - beta1) * A
        pairs = givens.greedy_pairs(M)
        i, j = pairs.T
        variance = beta2 * variance + (1 - beta2) * float(A[i, j].square().mean())
        step = M[i, j] / (1 - beta1**t) / (variance / (1 - beta2**t)) ** 0.5
        Q = oracles.product(n, pairs, -lr * step)
        expected = Q.T @ W.detach()
        M = Q.T @ M @ Q
        W.grad = T
        optimizer.step()
        torch.testing.assert_close(W.detach(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("adapt", ["adam", "adagrad"])
@pytest.mark.parametrize("factor", [1e-15, 1e12])
@pytest.mark.parametrize("pairing", ["random", "greedy"])
def test_adaptive_steps_do_not_depend_on_the_losss_scale(pairing, adapt, factor):
    results = []
    for scale in (1.0, factor):
        W = parameter(12, dtype=torch.float32)
        descend(W, givens.GCD([W], 0.02, pairing=pairing, adapt=adapt), 10, scale * target(W))
        results.append(W.detach())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [4, 64])
@pytest.mark.parametrize("adapt", ["adam", "adagrad"])
@pytest.mark.parametrize("pairing", ["random", "greedy", "steepest"])
def test_lr_is_a_typical_angle(pairing, adapt, n):
    """The first step turns its planes by lr, root mean square: ‖Q − I‖² = 4 Σ (1 − cos θ)."""
    lr = 0.01
    W = parameter(n)
    before = W.detach().clone()
    descend(W, givens.GCD([W], lr, pairing=pairing, adapt=adapt), 1)
    Q = W.detach() @ before.T
    # Of sixteen pairings the last places may stay empty.
    rel = 0.03 if (pairing, adapt) == ("greedy", "adam") else 1e-3
    turned = float((Q - torch.eye(n)).square().sum() / (2 * (n // 2))) ** 0.5
    assert turned == pytest.approx(lr, rel=rel)


@pytest.mark.parametrize("adapt", ADAPTS)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_resumed_run_goes_on_bit_for_bit(pairing, adapt):
    def start():
        W = parameter(10, dtype=torch.float32)
        return W, givens.GCD([W], 0.02, pairing=pairing, adapt=adapt, seed=9)

    W, optimizer = start()
    descend(W, optimizer, 40)
    V, first = start()
    descend(V, first, 17)
    saved = io.BytesIO()
    torch.save({"W": V.detach(), "optimizer": first.state_dict()}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    U, second = start()
    with torch.no_grad():
        U.copy_(loaded["W"])
    second.load_state_dict(loaded["optimizer"])
    descend(U, second, 23)
    assert torch.equal(W, U)


def spoil(optimizer, name, value):
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0][name] = value
    return state


def of_another_optimizer(state, **changes):
    """The state dict with other contents of its only group."""
    group = {"lr": 0.1, "params": [0], **changes}
    return {"state": state, "param_groups": [group]}


def trained(pairing, adapt, stack=0):
    W = parameter(6, stack=stack)
    optimizer = givens.GCD([W], pairing=pairing, adapt=adapt)
    descend(W, optimizer, 2)
    return optimizer


STATES = [
    (lambda o: trained("random", "adam", 2).state_dict(), r"\(3, 6, 6\) matrix, but scale"),
    (lambda o: trained("random", "adagrad").state_dict(), r"\(3, 6, 6\) matrix, but scale"),
    (lambda o: trained("greedy", "adam", 2).state_dict(), r"\(3, 6, 6\) matrix, but planes"),
    (lambda o: spoil(o, "foresight", torch.zeros(2, 2)), r"\(3, 6, 6\) matrix, but foresight"),
    (lambda o: spoil(o, "foresight", torch.zeros(())), "foresight has shape"),
    (lambda o: spoil(o, "planes", None), "planes of a state must be a tensor, but got NoneType"),
    (lambda o: spoil(o, "ambient", torch.full((3, 6, 6), float("nan"))), "state must be finite"),
    (lambda o: spoil(o, "step", None), "step of a state must be in 0..2³¹−1, but got None"),
    (lambda o: spoil(o, "step", float("nan")), "step of a state must be in 0..2³¹−1, but got nan"),
    (lambda o: spoil(o, "step", 2.5), "step of a state must be in 0..2³¹−1, but got 2.5"),
    (lambda o: spoil(o, "skipped", -1), "skipped of a state must be in 0..2³¹−1, but got -1"),
    (lambda o: spoil(o, "step", torch.ones(2)), "step of a state must be in"),
    (lambda o: of_another_optimizer({}), "state_dict must be of a GCD, but .* has no pairing"),
    (lambda o: {**o.state_dict(), "state": {"0": {}}}, "but has a state of '0'"),
]


@pytest.mark.parametrize(("state", "message"), STATES, ids=[f"{i}" for i in range(len(STATES))])
def test_a_state_that_would_do_damage_is_refused(state, message):
    """The compiled loops check no bounds."""
    optimizer = trained("greedy", "adam", 3)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state(optimizer))


def test_half_of_a_state_is_refused():
    optimizer = trained("greedy", "adam")
    state = optimizer.state_dict()
    del state["state"][0]["ambient"]
    with pytest.raises(ValueError, match="but has no ambient"):
        optimizer.load_state_dict(state)


def test_state_of_a_gpu_goes_on_here():
    """There the step is a tensor, and steps that were skipped are counted."""
    W, V = parameter(6), parameter(6)
    first, second = givens.GCD([W], 0.05), givens.GCD([V], 0.05)
    descend(W, first, 3)
    saved = copy.deepcopy(first.state_dict())
    saved["state"][0] |= {"step": torch.tensor(3), "skipped": torch.tensor(1)}
    with torch.no_grad():
        V.copy_(W)
    second.load_state_dict(saved)
    descend(W, first, 3)
    descend(V, second, 3)
    assert torch.equal(W, V)


def test_groups_take_their_own_options_and_schedulers_their_lr():
    W, V = parameter(6), parameter(6)
    groups = [{"params": [W]}, {"params": [V], "lr": 0.0, "pairing": "random"}]
    optimizer = givens.GCD(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    start = V.detach().clone()
    turned = []
    for _ in range(5):
        before = W.detach().clone()
        (W * target(W) + V * target(V)).sum().backward()
        optimizer.step()
        scheduler.step()
        turned.append(float((W.detach() - before).norm()))
    assert turned[4] < 1e-12 < turned[3] < turned[2] < turned[0]
    assert torch.equal(V.detach(), start)


def test_hooks_and_profiler_are_told():
    W = parameter(4)
    optimizer = givens.GCD([W])
    W.grad = target(W)
    told = []
    before = optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    after = optimizer.register_step_post_hook(lambda *_: told.append("after"))
    everywhere = register_optimizer_step_post_hook(lambda *_: told.append("everywhere"))
    optimizer.step()
    for handle in (before, after, everywhere):
        handle.remove()
    optimizer.step()
    assert told == ["before", "after", "everywhere"]
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert "Optimizer.step#GCD.step" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("adapt", ADAPTS)
@pytest.mark.parametrize("pairing", ["random", "greedy"])
def test_scheduler_that_cycles_the_momentum(pairing, adapt):
    W = parameter(6)
    optimizer = givens.GCD([W], 0.01, pairing=pairing, adapt=adapt)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
    for _ in range(12):
        descend(W, optimizer, 1)
        schedule.step() if schedule.last_epoch < 11 else None
    assert givens.orthogonality_error(W) < 1e-12
    momentum = adapt == "matrix" or (adapt, pairing) == ("adam", "random")
    assert ("momentum" in optimizer.state[W]) == momentum


def test_tensor_lr_is_read_at_every_step(backend):
    results = []
    for lr in (0.05, torch.tensor(0.05, dtype=torch.float64)):
        W = parameter(6)
        optimizer = givens.GCD([W], lr)
        descend(W, optimizer, 3)
        if isinstance(lr, torch.Tensor):
            lr.fill_(0.0)
        else:
            optimizer.param_groups[0]["lr"] = 0.0
        descend(W, optimizer, 3)
        results.append(W.detach())
    torch.testing.assert_close(*results)


def test_closure_and_missing_gradients():
    W, V = parameter(5), parameter(5, seed=1)
    optimizer = givens.GCD([W, V], 0.05)
    before = V.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = (W * target(W)).sum()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(10)]
    assert losses[-1] < losses[0]
    assert torch.equal(V.detach(), before)
    assert givens.GCD([V]).step() is None


def test_maximize_mirrors_minimize(backend):
    W, V = parameter(7), parameter(7)
    descend(W, givens.GCD([W], 0.05), 10)
    descend(V, givens.GCD([V], 0.05, maximize=True), 10, -target(V))
    torch.testing.assert_close(W, V)


def test_clipping_before_a_raw_step_shortens_it():
    W, V = parameter(6), parameter(6)
    for M, limit in ((W, None), (V, 1e-3)):
        optimizer = givens.GCD([M], 0.1, adapt=None)
        (M * target(M)).sum().backward()
        if limit:
            nn.utils.clip_grad_norm_([M], limit)
        optimizer.step()
    start = parameter(6).detach()
    assert 0 < float((V.detach() - start).norm()) < 0.01 * float((W.detach() - start).norm())


@pytest.mark.parametrize("adapt", ["adam", None])
def test_grad_scaler_unscales_and_skips(adapt):
    W, V = parameter(6, dtype=torch.float32), parameter(6, dtype=torch.float32)
    plain, scaled = givens.GCD([W], 0.05, adapt=adapt), givens.GCD([V], 0.05, adapt=adapt)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    descend(W, plain, 3)
    for step in range(4):
        scaled.zero_grad()
        factor = float("inf") if step == 1 else 1.0
        scaler.scale((V * target(V) * factor).sum()).backward()
        scaler.step(scaled)
        scaler.update()
    torch.testing.assert_close(W, V, rtol=1e-4, atol=1e-5)
    assert scaler.get_scale() == 2.0**9


def test_autocast_leaves_the_rotation_in_float32():
    rotation = givens.Rotation(8)
    optimizer = givens.GCD(rotation.parameters())
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (rotation(x) - x.roll(1, dims=1)).square().mean()
    loss.backward()
    optimizer.step()
    assert rotation.weight.dtype == torch.float32
    assert givens.orthogonality_error(rotation.matrix) < 1e-6
    assert not torch.equal(rotation.matrix, torch.eye(8))


def test_model_around_it_can_be_compiled(unchecked):
    """The traced model reads the turned weight at every step, without tracing again."""
    rotation = givens.Rotation(8, givens.random_rotation(8))
    twin = copy.deepcopy(rotation)
    compiled = torch.compile(rotation, backend="aot_eager")
    x = torch.randn(32, 8)
    y = x @ givens.random_rotation(8, seed=1)
    for model, optimizer in ((compiled, givens.GCD(rotation.parameters())), (twin, None)):
        optimizer = optimizer or givens.GCD(twin.parameters())
        for _ in range(5):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(rotation.weight, twin.weight)


def test_training_step_with_it_can_be_compiled(unchecked):
    x = torch.randn(32, 8)
    y = x @ givens.random_rotation(8, seed=1)
    results = []
    for whole in (False, True):
        rotation = givens.Rotation(8)
        optimizer = givens.GCD(rotation.parameters(), 0.05)

        def train(rotation=rotation, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (rotation(x) - y).square().mean()
            loss.backward()
            optimizer.step()

        step = torch.compile(train, backend="aot_eager") if whole else train
        for _ in range(5):
            step()
        results.append(rotation.weight.detach())
    torch.testing.assert_close(*results)
    assert not torch.equal(results[0], torch.eye(8))


@pytest.mark.parametrize("det", [1, -1])
def test_linear_weight_keeps_its_determinant(det):
    linear = nn.Linear(7, 7, bias=False)
    nn.init.orthogonal_(linear.weight)
    with torch.no_grad():
        linear.weight[0] *= det * torch.linalg.det(linear.weight).sign()
    optimizer = givens.GCD(linear.parameters(), 0.1)
    x = torch.randn(20, 7)
    y = x.roll(1, dims=1)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (linear(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert float(torch.linalg.det(linear.weight.detach())) == pytest.approx(det, abs=1e-5)
    assert givens.orthogonality_error(linear.weight) < 1e-5


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_stack_equals_its_matrices(pairing, backend):
    """Each matrix of a stack has its own planes and its own scale."""
    stack = parameter(6, stack=3)
    singles = [nn.Parameter(w.detach().clone()) for w in stack]
    T = target(stack) * torch.tensor([1.0, 100.0, 1e-3])[:, None, None]
    descend(stack, givens.GCD([stack], 0.05, pairing=pairing), 12, T)
    optimizer = givens.GCD(singles, 0.05, pairing=pairing)
    for _ in range(12):
        optimizer.zero_grad()
        sum((w * t).sum() for w, t in zip(singles, T, strict=True)).backward()
        optimizer.step()
    torch.testing.assert_close(stack.detach(), torch.stack([w.detach() for w in singles]))


def test_transposed_parameter_and_gradient(backend):
    W, V = parameter(9), nn.Parameter(oracles.rotation(9).T.contiguous().T)
    assert not V.is_contiguous()
    with givens.backend(None if backend == "numba" else backend):
        for M in (W, V):
            optimizer = givens.GCD([M], 0.05)
            for _ in range(5):
                M.grad = target(M).T.contiguous().T
                optimizer.step()
    torch.testing.assert_close(W, V)


def test_rounding_of_many_random_pairings_does_not_build_up():
    W = parameter(32, dtype=torch.float32)
    optimizer = givens.GCD([W], 10.0, pairing="random", turns="all")
    noise, most = torch.randn(64, 32, 32), 0.0
    for step in range(1000):
        W.grad = noise[step % 64]
        optimizer.step()
        most = max(most, givens.orthogonality_error(W))
    assert most < 2e-6


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rounding_does_not_build_up(pairing):
    """Float32 after 20,000 steps of random gradients; `benchmarks/drift.py` runs a million."""
    W = parameter(32, dtype=torch.float32)
    optimizer = givens.GCD([W], 0.05, pairing=pairing, exact=False)
    noise = torch.randn(64, 32, 32)
    for step in range(20_000 if pairing in ("random", "greedy") else 2_000):
        W.grad = noise[step % 64]
        optimizer.step()
    assert givens.orthogonality_error(W) < 3e-6
    assert float(torch.linalg.det(W.detach())) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("options", [{}, {"adapt": None}, {"betas": (0.5, 0.9)}])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("n", [4, 5])
def test_bad_gradient_leaves_everything_as_it_was(n, pairing, options, bad, backend):
    for row, column in itertools.product(range(n), range(n)):
        W = parameter(n)
        optimizer = givens.GCD([W], pairing=pairing, **options)
        descend(W, optimizer, 1)
        before, state = W.detach().clone(), copy.deepcopy(optimizer.state_dict())
        W.grad[row, column] = bad
        with pytest.raises(ValueError, match="NaN or infinite"):
            optimizer.step()
        assert torch.equal(W.detach(), before)
        for key, value in optimizer.state_dict()["state"][0].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(state["state"][0][key]))


def test_bad_gradient_of_one_matrix_stops_the_others(backend):
    W, V, stack = parameter(4), parameter(4, seed=1), parameter(4, stack=2)
    for random in ("random", "greedy"):
        optimizer = givens.GCD([W, V, stack], pairing=random)
        before = [M.detach().clone() for M in (W, V, stack)]
        W.grad, V.grad, stack.grad = target(W), target(V), target(stack)
        stack.grad[1, 0, 0] = float("nan")
        with pytest.raises(ValueError, match="no matrix was turned"):
            optimizer.step()
        assert all(torch.equal(M, b) for M, b in zip((W, V, stack), before, strict=True))


def test_overflowing_derivative_is_an_error():
    W = parameter(4, dtype=torch.float32)
    before = W.detach().clone()
    W.grad = torch.full((4, 4), 3e38) * torch.tensor([1.0, -1, 1, -1])
    with pytest.raises(ValueError, match="overflow; no matrix was turned"):
        givens.GCD([W], pairing="random").step()
    assert torch.equal(W.detach(), before)


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e12, 1e25])
@pytest.mark.parametrize("adapt", ["adam", "adagrad"])
@pytest.mark.parametrize("pairing", ["random", "greedy"])
def test_angles_do_not_know_the_scale_of_the_loss(backend, pairing, adapt, scale):
    """Squares of float32 derivatives would overflow, or vanish."""
    found = []
    for factor in (1.0, scale):
        W = parameter(8, dtype=torch.float32)
        turn = givens.GCD([W], pairing=pairing, adapt=adapt)
        for step in range(5):
            G = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            W.grad = G.double().mul(factor).float()
            turn.step()
        found.append(W.detach())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_gradient_with_a_graph_of_its_own(backend, pairing):
    W = parameter(6)
    turn = givens.GCD([W], pairing=pairing)
    for _ in range(2):
        turn.zero_grad()
        # As `backward(create_graph=True)` leaves it.
        (W.grad,) = torch.autograd.grad(W.pow(3).sum(), W, create_graph=True)
        turn.step()
    assert not any(isinstance(v, torch.Tensor) and v.requires_grad for v in turn.state[W].values())
    assert givens.orthogonality_error(W) < 1e-12


def test_no_default_of_torch_matters(backend):
    """Whatever new tensors are by default: float64, or on a device that holds nothing."""
    found = []
    for dtype, device in ((torch.float32, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")):
        W = parameter(8, dtype=torch.float32)
        W.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                for pairing in PAIRINGS:
                    givens.GCD([W], pairing=pairing).step()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(W.detach())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_matrix_that_is_exchanged_for_another():
    W = parameter(6)
    turn = givens.GCD([W], adapt=None)
    for n in (6, 9, 4):
        W.data = givens.random_rotation(n).double()
        W.grad = torch.ones(n, n, dtype=torch.float64).triu()
        turn.step()
        assert givens.orthogonality_error(W) < 1e-6


def test_zero_gradient_turns_nothing(backend):
    for pairing, adapt in itertools.product(PAIRINGS, ADAPTS):
        W = parameter(6)
        W.grad = torch.zeros_like(W)
        givens.GCD([W], 0.5, pairing=pairing, adapt=adapt).step()
        assert torch.equal(W.detach(), parameter(6).detach())


def gcd(matrix=None, **options):
    return givens.GCD([nn.Parameter(torch.eye(3) if matrix is None else matrix)], **options)


BAD = [
    (lambda: gcd(torch.randn(3, 2)), r"square matrices.*shape \(3, 2\).*another optimizer"),
    (lambda: gcd(torch.ones(3)), "square matrices"),
    (lambda: gcd(torch.empty(0, 0)), "square matrices"),
    (lambda: gcd(torch.eye(9).view(3, 3, 3, 3)), "square matrices"),
    (
        lambda: gcd(torch.randn(3, 3)),
        r"must be orthogonal: max\|RᵀR − I\| = .* call givens.project",
    ),
    (lambda: gcd(torch.full((2, 2), float("nan"))), "must be orthogonal"),
    (lambda: gcd(torch.eye(3).half()), "float32 or float64, but got torch.float16"),
    (lambda: gcd(torch.eye(3).bfloat16()), "float32 or float64, but got torch.bfloat16"),
    (lambda: gcd(pairing="best"), "pairing must be one of 'random', 'greedy'.*got 'best'"),
    (
        lambda: gcd(adapt="sgd"),
        "adapt must be one of 'adam', 'matrix', 'adagrad' or None, but got 'sgd'",
    ),
    (lambda: gcd(lr=-1.0), "lr must be finite and not negative"),
    (lambda: gcd(lr=float("nan")), "lr must be finite"),
    (lambda: gcd(betas=(0.9, 1.0)), "betas must be two numbers"),
    (lambda: gcd(betas=0.9), "betas must be two numbers"),
    (lambda: gcd(betas=(0.9, "0.99")), "betas must be two numbers"),
    (lambda: gcd(betas=(0.9, float("nan"))), "betas must be two numbers"),
    (lambda: gcd(betas=(0.9, 0.9), adapt=None), "betas go with adapt='adam'"),
    (lambda: gcd(lr=None), "lr must be a number"),
    (lambda: gcd(lr="0.1"), "lr must be a number"),
    (lambda: gcd(lr=True), "lr must be a number"),
    (lambda: gcd(lr=float("inf")), "lr must be finite"),
    (lambda: gcd(lr=1e30), "lr must be finite and not negative, at most 1e\\+20"),
    (lambda: gcd(lr=torch.ones(2)), r"lr must be a tensor of one number, but got shape \(2,\)"),
    (lambda: gcd(lr=torch.tensor(float("nan"))), "lr must be finite"),
    (lambda: gcd(turns=0), r"turns must be in 1\.\.64 or 'all', but got turns=0"),
    (lambda: gcd(turns=65), r"turns must be in 1\.\.64"),
    (lambda: gcd(turns=2.0), r"turns must be in 1\.\.64"),
    (lambda: gcd(turns=True), r"turns must be in 1\.\.64"),
    (lambda: gcd(turns="every"), r"turns must be in 1\.\.64"),
    (lambda: gcd(turns=2, pairing="steepest"), "turns=2 goes with pairing='greedy' or 'random'"),
    (lambda: gcd(turns="all", pairing="overlapping-random"), "turns='all' goes with pairing="),
    (lambda: gcd(turns=2, adapt="matrix"), "turns=2 goes with adapt='adam' or None"),
    (lambda: gcd(exact=1), "exact must be True or False"),
    (lambda: gcd(maximize="yes"), "maximize must be True or False"),
    (lambda: gcd(seed=-1), "seed must be in"),
    (lambda: gcd(seed="x"), "seed must be in"),
    (lambda: gcd(seed=True), "seed must be in"),
    (lambda: givens.GCD([]), "empty parameter list"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input(call, message, unchecked):
    with pytest.raises(ValueError, match=message):
        call()


def test_name_of_a_bad_parameter_is_told():
    model = nn.Sequential(givens.Rotation(4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"1\.weight has shape"):
        givens.GCD([*model.named_parameters()])


def test_refused_group_is_not_kept():
    W = parameter(4)
    optimizer = givens.GCD([W])
    with pytest.raises(ValueError, match="square"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [parameter(5)], "lr": 0.5})
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]


def test_half_precision_after_construction_is_refused():
    rotation = givens.Rotation(4)
    optimizer = givens.GCD(rotation.parameters())
    rotation.to(torch.bfloat16)
    rotation.weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="float32 or float64"):
        optimizer.step()
