"""GCD on a GPU: every kernel against the torch reference, graphs, bad gradients."""

import itertools

import oracles
import pytest
import torch
from torch import nn

import givens
from givens import kernels, optim

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]

SIZES = [2, 3, 16, 33, 100, 128, 129, 257, 512, 1000]


def parameter(n, stack=0, seed=0):
    if stack:
        matrices = [givens.random_rotation(n, seed + b) for b in range(stack)]
        return nn.Parameter(torch.stack(matrices).cuda())
    return nn.Parameter(givens.random_rotation(n, seed).cuda())


def gradients(W, count):
    generator = torch.Generator(device="cuda").manual_seed(1)
    return [torch.randn(W.shape, generator=generator, device="cuda") for _ in range(count)]


PAIRINGS = ["random", "greedy", "steepest", "overlapping-random", "overlapping-greedy"]


def optimizer(W, lr=1e-2, pairing="greedy", **options):
    return givens.GCD([W], lr, pairing=pairing, exact=False, **options)


def follow(fused, n, monkeypatch):
    """Let the reference turn the planes of the fused step before it: they may differ in ties."""

    def buffer(name):
        return next(getattr(w, name) for w in fused._workspaces.values() if hasattr(w, name))

    # Imported before the patch, which is for the reference alone.
    kernels.load("step_", "triton")
    # Without the axis that rests.
    monkeypatch.setattr(optim, "choose_pairs", lambda *_: buffer("pairs")[:, : n // 2].long())
    monkeypatch.setattr(optim, "choose_partners", lambda *_: buffer("partners").long())


@pytest.mark.parametrize("stack", [0, 3])
@pytest.mark.parametrize(
    ("pairing", "options"),
    [
        *itertools.product(PAIRINGS, [{}]),
        *itertools.product(
            ["random", "greedy"], [{"adapt": "adagrad"}, {"adapt": None}, {"betas": (0.7, 0.9)}]
        ),
        ("overlapping-random", {"betas": (0.7, 0.9)}),
        ("greedy", {"adapt": "matrix"}),
        ("greedy", {"turns": 1}),
        ("greedy", {"turns": 5, "adapt": None}),
        ("greedy", {"turns": 64}),
        ("greedy", {"turns": "all"}),
        ("random", {"turns": 3}),
    ],
)
@pytest.mark.parametrize("n", [2, 33, 257])
def test_fused_equals_reference(n, pairing, options, stack, monkeypatch):
    """20 steps along the same planes, which are those of the seed or compared below."""
    W, V = parameter(n, stack), nn.Parameter(parameter(n, stack).detach().double())
    lr = 0.02 if options.get("adapt", 1) else 1e-3
    fused, slow = (optimizer(M, lr, pairing, seed=3, **options) for M in (W, V))
    if not pairing.endswith("random"):
        follow(fused, n, monkeypatch)
    for G in gradients(W, 20):
        W.grad, V.grad = G, G.double()
        with givens.backend("triton"):
            fused.step()
        with givens.backend("reference"):
            slow.step()
    assert int(fused.state[W]["step"]) == 20
    assert givens.orthogonality_error(W) < 1e-5
    assert float((W.detach() - V.detach()).abs().max()) < 1e-4


@pytest.mark.parametrize("n", [1000, 2047, 2048, 3001, 4093, 4096, 5000])
def test_wide_steps_equal_reference(n, monkeypatch):
    """Rows that are read twice, or in parts."""
    for pairing, how in itertools.product(("random", "greedy"), ({}, {"adapt": "matrix"})):
        W, V = parameter(n), nn.Parameter(parameter(n).detach().double())
        fused, slow = (optimizer(M, 0.02, pairing, seed=3, **how) for M in (W, V))
        if pairing == "greedy":
            follow(fused, n, monkeypatch)
        for G in gradients(W, 3):
            W.grad, V.grad = G, G.double()
            fused.step()
            with givens.backend("reference"):
                slow.step()
        away = (W.detach() - V.detach()).abs()
        # Where A is below what TF32 resolves, its sign at the first step, when every plane has the
        # same size, is either: two rows differ for each such plane.
        assert float((away > 1e-4).float().mean()) < (2e-2 if n > 1024 and not how else 1e-9)
        assert float(away.max()) < (2e-3 if n > 1024 and not how else 1e-4)


def tied(n, seed):
    values = torch.randint(-2, 3, (n, n), generator=torch.Generator().manual_seed(seed)).float()
    return values.triu(1) - values.triu(1).T


def chain(n, seed):
    A = torch.zeros(n, n)
    i = torch.arange(n - 1)
    A[i, i + 1] = 1 + torch.arange(n - 1.0)
    return A - A.T


def zeros(n, seed):
    return torch.zeros(n, n)


@pytest.mark.parametrize("make", [oracles.skew, tied, chain, zeros])
@pytest.mark.parametrize("n", [*SIZES, 2048, 4097, 8192])
def test_greedy_equals_sorting(n, make):
    A = make(n, 1)
    pairs, expected = matched("greedy", A[None])[0], givens.greedy_pairs(A)
    assert torch.equal(pairs[: n // 2], expected)
    if n % 2:
        rests = set(range(n)) - set(expected.flatten().tolist())
        assert pairs[-1].tolist() == [*rests] * 2


def matched(pairing, A):
    """The pairs of a stack on the GPU, with the resting axis."""
    from givens.kernels.gpu.matching import Matcher

    b, n, _ = A.shape
    pairs = torch.full((b, (n + 1) // 2, 2), -7, dtype=torch.int32, device="cuda")
    getattr(Matcher(A.cuda()), pairing)(A.abs().cuda(), pairs)
    return pairs.cpu().long()


def test_pairings_of_tensors_on_the_gpu():
    A = torch.stack([oracles.skew(75, seed) for seed in range(4)])
    assert torch.equal(givens.greedy_pairs(A.cuda()).cpu(), givens.greedy_pairs(A))
    assert torch.equal(givens.greedy_pairs(A[0].cuda()).cpu(), givens.greedy_pairs(A[0]))
    found = givens.steepest_pairs(A.cuda(), exact=False).cpu()
    assert all(
        oracles.weight(a, pairs) >= oracles.weight(a, givens.greedy_pairs(a))
        for a, pairs in zip(A, found, strict=True)
    )


@pytest.mark.parametrize(("n", "stack"), [(30, 300), (100, 7), (129, 200), (700, 3)])
def test_stacks_are_matched_as_single_matrices_are(n, stack):
    A = torch.stack([oracles.skew(n, seed) for seed in range(stack)])
    for pairing in ("greedy", "steepest"):
        together = matched(pairing, A)
        for b in {0, 1, stack // 2, stack - 1}:
            assert torch.equal(together[b], matched(pairing, A[b : b + 1])[0])


@pytest.mark.parametrize("make", [oracles.skew, tied, chain, zeros])
@pytest.mark.parametrize("n", SIZES)
def test_steepest_is_a_pairing_no_worse_than_greedy(n, make):
    A = make(n, 1)
    pairs = matched("steepest", A[None])[0]
    assert sorted(pairs.flatten().tolist()[:n]) == list(range(n))
    if n % 2:
        assert pairs[-1, 0] == pairs[-1, 1]
    best = oracles.weight(A, givens.greedy_pairs(A))
    assert oracles.weight(A, pairs[: n // 2]) >= best * (1 - 1e-6)


@pytest.mark.parametrize("n", [64, 129, 256, 512])
def test_steepest_closes_half_of_the_gap(n):
    pytest.importorskip("rustworkx")
    closed = []
    for seed in range(5):
        A = oracles.skew(n, seed)
        greedy, exact = (
            oracles.weight(A, f(A)) for f in (givens.greedy_pairs, givens.steepest_pairs)
        )
        found = oracles.weight(A, matched("steepest", A[None])[0, : n // 2])
        closed.append((found - greedy) / (exact - greedy))
    assert sum(closed) / 5 > 0.5, closed
    assert max(closed) <= 1 + 1e-6


@pytest.mark.parametrize("n", [*SIZES, 2048])
def test_magnitudes_and_what_greedy_loses_by_tf32(n):
    """Symmetric to the last bit; the planes chosen from TF32 have the weight of the exact ones."""
    from givens.kernels.gpu.matching import Matcher

    W, H = givens.random_rotation(n).cuda(), torch.randn(n, n, device="cuda")
    matcher = Matcher(W)
    matcher.product.fill_(float("nan"))
    found = matcher.magnitudes(H[None], W[None])[0].fill_diagonal_(0)
    assert torch.equal(found, found.T)
    A = H.double() @ W.double().T
    A = A - A.T
    torch.testing.assert_close(found.double(), A.abs(), rtol=0, atol=5e-3 * float(A.std() + 1))
    chosen = givens.greedy_pairs(found.cpu())
    best = givens.greedy_pairs(A.cpu())
    assert oracles.weight(A.cpu(), chosen) > 0.998 * oracles.weight(A.cpu(), best)


def test_products_of_the_user_keep_their_precision():
    """The step's TF32 must not leak into torch's own products."""
    W = parameter(256)
    W.grad = gradients(W, 1)[0]
    givens.GCD([W]).step()
    x = torch.randn(256, 256, device="cuda")
    assert float((x @ x - x.double() @ x.double()).abs().max()) < 1e-3


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("n", [33, 256])
def test_graph_replays_are_steps(n, pairing):
    """A replay draws afresh, counts on and reads the learning rate from its tensor."""
    W, V = parameter(n), parameter(n)
    lr, rate = torch.tensor(0.02, device="cuda"), torch.tensor(0.02, device="cuda")
    captured, eager = optimizer(W, lr, pairing, seed=3), optimizer(V, rate, pairing, seed=3)
    steps = gradients(W, 12)
    W.grad = steps[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        captured.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    # Capture runs nothing; the warm-up was the first step.
    for number, G in enumerate(steps):
        if number == 6:
            lr.fill_(0.005)
            rate.fill_(0.005)
        V.grad = G
        eager.step()
        if number:
            W.grad.copy_(G)
            graph.replay()
    assert torch.equal(W, V)
    assert int(captured.state[W]["step"]) == 12


@pytest.mark.parametrize("options", [{}, {"adapt": None}, {"betas": (0.5, 0.9)}])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("n", [5, 200])
def test_bad_gradient_is_no_step_on_the_device(n, pairing, options):
    for row, bad in itertools.product(range(min(n, 5)), [float("nan"), float("inf")]):
        W = parameter(n)
        turn = optimizer(W, pairing=pairing, **options)
        first, second = gradients(W, 2)
        W.grad = first
        turn.step()
        before = W.detach().clone()
        state = {key: value.clone() for key, value in turn.state[W].items()}
        W.grad = second.clone()
        W.grad[row, 0] = bad
        turn.step()
        assert torch.equal(W.detach(), before)
        after = turn.state[W]
        assert int(after["skipped"]) == 1
        for key in state.keys() - {"skipped"}:
            assert torch.equal(after[key], state[key])


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_step_waits_for_nothing(pairing):
    W = parameter(65)
    turn = optimizer(W, pairing=pairing)
    scaler = torch.amp.GradScaler("cuda")
    W.grad = gradients(W, 1)[0]
    turn.step()
    with oracles.waiting_is_an_error():
        turn.step()
        scaler.scale((W * W.grad.clone()).sum()).backward()
        scaler.step(turn)


def test_grad_scaler_skips_on_the_device():
    W = parameter(8)
    optimizer = givens.GCD([W])
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((W * factor).sum()).backward()
        before = W.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(W.detach(), before) == (factor != 1.0)
    assert int(optimizer.state[W]["step"]) == 2


@pytest.mark.parametrize("turns", [1, 4, 16, 64])
@pytest.mark.parametrize("n", [40, 129, 512, 1000, 3001])
def test_weight_of_the_chosen_planes(n, turns):
    """Pairings without a plane twice, and most of what K greedy ones, one after another, take."""
    from givens.pairing import greedy_partners

    W = parameter(n)
    turn = optimizer(W, turns=turns)
    W.grad = gradients(W, 1)[0] * torch.rand(n, n, device="cuda").pow(4)
    with givens.backend("triton"):
        turn.step()
    planes = next(w for w in turn._workspaces.values() if hasattr(w, "partners"))
    partners = planes.partners[0].long()
    rest = torch.arange(n, device="cuda").expand_as(partners)
    assert torch.equal(partners.gather(1, partners), rest)
    codes = (partners * n + rest)[partners > rest]
    assert len(codes.unique()) == len(codes)
    # The state after the first step: m above the diagonal and √v below it.
    moments = turn.state[W]["planes"].double()
    weights = moments.triu(1).abs() / moments.tril(-1).T.where(moments.triu(1) != 0, 1.0)
    weights = (weights + weights.T).float()
    found = weights.flatten()[codes].sum()
    with givens.backend("reference"):
        best = greedy_partners(weights, turns)
    expected = weights.gather(0, best).sum() / 2
    assert float(found) >= (0.9 if n >= 8 * turns else 0.8) * float(expected)


def test_hammered():
    """Sizes, stacks, options, streams and gradients of any size: always a rotation."""
    draws = torch.Generator().manual_seed(7)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draws))]

    for trial in range(300):
        n = draw(1, 2, 3, 5, 16, 31, 64, 129, 500, 513, 1023, 2501)
        stack = draw(0, 0, 3) if n < 200 else 0
        name = draw("random", "greedy", "greedy", "steepest", "overlapping-greedy")
        adapt = draw("adam", "adam", "matrix", "adagrad", None)
        several = name == "random" or (name == "greedy" and adapt in ("adam", None))
        turns = draw(None, 1, 3, 16, "all") if several and n < 600 else None
        W = parameter(n, stack, trial)
        turn = optimizer(W, draw(1e-3, 0.1, 3.0), name, adapt=adapt, turns=turns)
        stream = draw(torch.cuda.current_stream(), torch.cuda.Stream())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(6):
                size = 10.0 ** draw(-38, -30, -10, 0, 10, 30, 38)
                W.grad = (torch.randn_like(W) * size).detach()
                if draw(0, 0, 1):
                    W.grad.flatten()[draw(0, -1)] = draw(float("nan"), float("inf"))
                turn.step()
        torch.cuda.current_stream().wait_stream(stream)
        assert givens.orthogonality_error(W) < 5e-6, (n, stack, name, adapt, turns)
        for value in turn.state[W].values():
            assert value.isfinite().all(), (n, stack, name, adapt, turns)


def test_state_moves_between_cpu_and_gpu():
    V = nn.Parameter(parameter(16).detach().cpu())
    here = givens.GCD([V], 0.02)
    for G in gradients(parameter(16), 5):
        V.grad = G.cpu()
        here.step()
    W = nn.Parameter(V.detach().cuda())
    there = givens.GCD([W], 0.02)
    there.load_state_dict(here.state_dict())
    V.grad = gradients(V, 1)[0].cpu()
    W.grad = V.grad.cuda()
    here.step()
    there.step()
    assert int(there.state[W]["step"]) == 6
    torch.testing.assert_close(W.detach().cpu(), V.detach(), rtol=1e-4, atol=1e-4)


def test_rounding_does_not_build_up():
    for pairing in ("random", "greedy"):
        W = parameter(64)
        optimizer = givens.GCD([W], 0.05, pairing=pairing)
        noise = torch.randn(64, 64, 64, device="cuda")
        for step in range(5000):
            W.grad = noise[step % 64]
            optimizer.step()
        assert givens.orthogonality_error(W) < 3e-6


def test_a_whole_training_step_in_a_graph():
    """Forward, backward, GCD and Adam, captured once and replayed, as the eager loop does it."""
    data = torch.randn(40, 256, 32, device="cuda")
    losses = {}
    for captured in (False, True):
        torch.manual_seed(0)
        rotation = givens.Rotation(32).cuda()
        scale = nn.Parameter(torch.ones(32, device="cuda"))
        turn = givens.GCD(rotation.parameters(), 0.05)
        adam = torch.optim.Adam([scale], 1e-2, capturable=True)
        x, seen = data[0].clone(), torch.zeros((), device="cuda")

        def step(x=x, seen=seen, rotation=rotation, scale=scale, turn=turn, adam=adam):
            turn.zero_grad()
            adam.zero_grad()
            loss = (rotation(x) * scale - x.roll(1, dims=1)).square().mean()
            loss.backward()
            turn.step()
            adam.step()
            seen.copy_(loss.detach())

        # The other stream is to see what this one has made.
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        run = step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        losses[captured] = []
        for batch in data:
            x.copy_(batch)
            run()
            losses[captured].append(float(seen))
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)
    assert losses[True][-1] < 0.8 * losses[True][0]


@pytest.mark.parametrize(("pairing", "matrices"), [("random", 0), ("greedy", 1), ("steepest", 2)])
def test_memory_beside_matrix_gradient_and_state(pairing, matrices):
    n = 2048
    W = parameter(n)
    W.grad = gradients(W, 1)[0]
    turn = optimizer(W, pairing=pairing)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    turn.step()
    state = sum(value.nbytes for value in turn.state[W].values())
    extra = torch.cuda.max_memory_allocated() - before - state
    # Lists of partners for each of 16 pairings.
    assert extra <= 4 * n * n * matrices + 1024 * n


@pytest.mark.parametrize(
    ("N", "D", "K", "w"),
    [(1, 1, 2, 1), (1000, 8, 256, 16), (777, 3, 200, 5), (500, 4, 17, 96), (300, 2, 1000, 64)],
)
def test_nearest_codewords(N, D, K, w):
    """The twice-the-reference rule, on distances: no codeword is farther than float32 can tell."""
    from givens.kernels.gpu.nearest import assign

    generator = torch.Generator(device="cuda").manual_seed(0)
    X = torch.randn(N, D * w, generator=generator, device="cuda") + 3
    C = torch.randn(D, K, w, generator=generator, device="cuda") + 3
    codes, squared = assign(X, C)
    assert codes.dtype == (torch.uint8 if K <= 256 else torch.int64)
    distances = torch.cdist(X.double().view(N, D, w).transpose(0, 1), C.double()).square()
    found = distances.gather(2, codes.T.long()[:, :, None])[..., 0]
    norm = C.double().square().sum(-1).amax()
    assert float((found - distances.amin(-1)).max()) <= 4e-6 * float(norm)
    torch.testing.assert_close(squared.T.double(), found, rtol=1e-4, atol=4e-6 * float(norm))


def test_fit_by_recorded_turns_and_by_torch():
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(4000, 32, generator=generator, device="cuda")
    x *= torch.linspace(2, 0.2, 32, device="cuda")
    how = {"max_iter": 6, "sample": None, "init": "identity"}
    recorded = givens.fit(x, 8, codewords=16, **how).distortion(x)
    with givens.backend("reference"):
        plain = givens.fit(x, 8, codewords=16, **how).distortion(x)
    assert recorded == pytest.approx(plain, rel=0.02)


def test_quantizing_is_the_nearest_codeword_and_what_follows():
    from givens.kernels.gpu.nearest import assign, quantize

    N, D, K, w = 3000, 4, 256, 8
    X, C = torch.randn(N, D * w, device="cuda"), torch.randn(D, K, w, device="cuda")
    X[5, 3], X[7, 9] = float("nan"), float("inf")
    usage = torch.ones(D, K, device="cuda")
    codes, at, words, errors, distortion = quantize(X, C, usage, 0.25)
    assert torch.equal(codes, assign(X, C)[0])
    assert torch.equal(at.view(N, D), codes.int() + K * torch.arange(D, device="cuda").int())
    expected = C.flatten(0, 1)[at].view(N, D * w).where(X.isfinite(), float("nan"))
    assert torch.equal(words.nan_to_num(7), expected.nan_to_num(7))
    assert int(words.isnan().sum()) == 2
    assert torch.equal(errors.nan_to_num(7), (X - expected).nan_to_num(7))
    counts = torch.bincount(at, minlength=D * K).view(D, K)
    assert torch.equal(usage, 1 + 0.25 * counts)
    assert distortion.isnan()
    *_, errors, distortion = quantize(X[8:], C)
    torch.testing.assert_close(distortion, errors.square().sum(1).mean())


def test_equal_codewords_give_the_first():
    from givens.kernels.gpu.nearest import assign

    X, C = torch.randn(100, 32, device="cuda"), torch.randn(4, 5, 8, device="cuda")
    assert int(assign(X, torch.cat([C, C, C], dim=1))[0].max()) < 5
