import json
import math
import runpy
import sys
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

import givens

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import activations
import curves
import hostile_gpu
import learn
import minilm
import opponents
import problems
import sentences

# The packages bring in parts of torch that warn of others.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def rotation(n: int = 24, dtype: torch.dtype = torch.float32) -> givens.Rotation:
    return givens.Rotation(n, givens.random_rotation(n, 1).to(dtype))


def minimise(method: str, lr: float, steps: int = 60) -> tuple[float, float, float]:
    """‖W − T‖² before and after, and max|WᵀW − I|."""
    learned = rotation()
    target = givens.random_rotation(24, 2)
    optimizer = opponents.make_optimizer(learned, method, lr)
    losses = []
    for _ in range(steps + 1):
        optimizer.zero_grad()
        loss = (learned.weight - target).square().sum()
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    return losses[0], losses[-1], givens.orthogonality_error(learned.weight)


def test_products_are_those_of_the_package():
    pytest.importorskip("pogo")
    package, own = rotation(dtype=torch.float64), rotation(dtype=torch.float64)
    draws = torch.Generator().manual_seed(0)
    contenders = ((package, "pogo"), (own, "pogo-products"))
    optimizers = [opponents.make_optimizer(learned, name, 0.3) for learned, name in contenders]
    for _ in range(12):
        G = torch.randn(24, 24, generator=draws, dtype=torch.float64)
        for (learned, _), optimizer in zip(contenders, optimizers, strict=True):
            learned.weight.grad = G.clone()
            optimizer.step()
    start, ends = (
        rotation(dtype=torch.float64),
        [learned.weight.detach() for learned, _ in contenders],
    )
    assert torch.allclose(*ends, rtol=0, atol=1e-6)
    assert not torch.allclose(ends[0], start.weight, rtol=0, atol=0.1)


@pytest.mark.parametrize(
    ("method", "lr", "off"),
    [
        ("torch-cayley", 0.05, 1e-5),
        ("qr", 0.05, 1e-5),
        ("cayley-sgd", 0.02, 1e-2),
        ("geotorch", 0.05, 1e-5),
        ("geoopt", 0.1, 1e-5),
        ("pogo", 0.3, 1e-4),
        ("pogo-products", 0.3, 1e-4),
        ("rsdm", 0.2, 1e-5),
        ("landing", 0.3, 1e-2),
    ],
)
def test_opponents_learn_and_stay_orthogonal(method, lr, off):
    if method in ("geotorch", "geoopt", "pogo"):
        pytest.importorskip(method)
    before, after, error = minimise(method, lr)
    assert after < 0.5 * before
    assert error < off


def test_cayley_sgd_stays_orthogonal_where_its_iteration_ends(monkeypatch):
    monkeypatch.setattr(opponents.CayleySGD, "rounds", 40)
    assert minimise("cayley-sgd", 0.02)[2] < 1e-5


def test_landing_comes_back_to_the_rotations():
    """Without a gradient W Wᵀ goes to I."""
    learned = rotation()
    with torch.no_grad():
        learned.weight *= 1.05
    learned.weight.grad = torch.zeros(24, 24)
    optimizer = opponents.make_optimizer(learned, "landing", 0.3)
    for _ in range(30):
        optimizer.step()
    assert givens.orthogonality_error(learned.weight) < 1e-5


def search(score, centre: int) -> tuple[float, set[float]]:
    """The power that the rule for rates chooses, and all that it tried."""
    scores: dict[float, float] = {}
    while powers := learn.powers_to_try(centre, scores):
        scores |= {power: score(power) for power in powers}
    return learn.best_power(scores), set(scores)


@pytest.mark.parametrize(
    ("minimum", "tried"),
    [
        (0, range(-3, 3)),
        (2, range(-3, 4)),
        (4, range(-3, 6)),
        (9, range(-3, 6)),
        (-3, range(-4, 3)),
        (-9, range(-6, 3)),
    ],
)
def test_grid_is_widened_at_its_edge_and_made_finer_around_the_best(minimum, tried):
    best, found = search(lambda power: abs(power - minimum), 0)
    nearest = min(max(minimum, min(tried)), max(tried))
    assert found == {*tried, nearest - 0.5, nearest + 0.5}
    assert abs(best - nearest) == (0.5 if abs(minimum) == 9 else 0)


def test_failed_run_never_wins():
    assert learn.mean_score([0.1, None]) == math.inf
    assert learn.mean_score([0.1, math.nan]) == math.inf
    best, _ = search(lambda power: learn.mean_score([None if power > 0 else -power, 1.0]), 0)
    assert best == 0


def test_resumed_run_repeats_nothing():
    ran = []

    def submit(run: learn.Run) -> Future:
        ran.append(run)
        future: Future = Future()
        future.set_result({**run._asdict(), "figure": abs(math.log10(run.lr) + 1)})
        return future

    def searches() -> list[learn.Search]:
        return [learn.Search("low-bit", 128, method, 300, 3) for method in ("rsdm", "pogo")]

    rows = list(learn.learn_all(searches(), [], submit))
    assert len(set(ran)) == len(ran) == len(rows)
    shown = [run for run in ran if run.shown]
    assert {(run.method, run.lr, run.seed) for run in shown} == {
        (method, 0.1, seed) for method in ("rsdm", "pogo") for seed in range(3)
    }
    assert not {run.seed for run in ran if not run.shown} & {run.seed for run in shown}
    for kept in (rows, rows[:7], rows[7:]):
        ran.clear()
        again = list(learn.learn_all(searches(), kept, submit))
        assert len(again) == len(rows) - len(kept)
        assert not set(ran) & {
            learn.Run(*(row[name] for name in learn.Run._fields)) for row in kept
        }


@pytest.mark.parametrize("name", problems.PROBLEMS)
def test_run_is_a_row_and_repeats(name):
    run = learn.Run(name, 16, "landing", 0.1, 3, True, 4)
    row, again = learn.train(run), learn.train(run)
    assert row == again
    assert row["failure"] is None
    assert len(row["curve"]) == len(curves.points(4)) == 5
    assert row["figure"] == pytest.approx(row["curve"][-1], rel=1e-4)
    assert name in curves.format_table([row], [])


def test_diverged_run_has_no_figure():
    row = learn.train(learn.Run("low-bit", 16, "landing", 100.0, 0, False, 20))
    assert row["figure"] is None
    assert row["failure"]


def test_copying_is_that_of_autograd():
    """The recurrence's own backward pass, against modrelu written out."""
    problem = problems.Copying(16, 0, "cpu")
    words, answers = problem.draw_batch()
    with torch.no_grad():
        problem.bias.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    W = problem.start.clone().requires_grad_()
    problem.loss(W, words, answers).backward()
    inputs = (W, *problem.parameters)
    own = [part.grad.clone() for part in inputs]
    h, states = torch.zeros(16), []
    for x in problem.hear(words.argmax(2)):
        z = h @ W.T + x
        h = z.sgn() * (z.abs() + problem.bias).relu()
        states.append(h)
    said = problem.say(torch.stack(states))
    loss = torch.nn.functional.cross_entropy(said.flatten(0, 1), answers.flatten())
    for found, wanted in zip(own, torch.autograd.grad(loss, inputs), strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)


def test_time_to_a_figure():
    result = curves.Result(0.1, [0.2], 0, [1.0, 0.5, 0.2], 2, 0.0, 2000.0)
    assert curves.time_to_reach(result, 0.5) == 2.0
    assert curves.time_to_reach(result, 0.1) is None


def test_hostile_steps_leave_rotations(monkeypatch):
    """Cases of the benchmark in small, the same again for the same seed."""
    counts = dict.fromkeys(("steps", "refused"), 0)
    for number in range(6):
        lanes = hostile_gpu.draw_case(3, number, "cpu", 33)
        assert str(lanes) == str(hostile_gpu.draw_case(3, number, "cpu", 33))
        row, found = hostile_gpu.run_case(lanes, "cpu")
        assert not found
        for name in counts:
            counts[name] += row[name]
    assert counts["steps"] > 100
    assert counts["refused"] > 10
    # And what it is to find is found: a matrix that loses a thousandth, or moves where it may not.
    honest = givens.GCD.step

    def shrink(self):
        honest(self)
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(0.999)

    def creep(self):
        try:
            honest(self)
        except ValueError:
            with torch.no_grad():
                self.param_groups[0]["params"][0].neg_()
            raise

    for damage, fault in ((shrink, "max|RᵀR − I|"), (creep, "changed something")):
        monkeypatch.setattr(givens.GCD, "step", damage)
        cases = (hostile_gpu.draw_case(3, number, "cpu", 33) for number in range(6))
        assert any(fault in str(hostile_gpu.run_case(lanes, "cpu")[1]) for lanes in cases)


@pytest.mark.filterwarnings("ignore")
def test_every_compression_of_sentences_is_measured_and_goes_on(tmp_path, monkeypatch):
    draws = np.random.default_rng(0)
    x = draws.standard_normal((2, 300, 32)).astype(np.float32)
    x[1] = x[0] + 0.3 * x[1]
    np.save(tmp_path / "300.npy", x)
    script, rows = Path(sentences.__file__), tmp_path / "rows.json"
    options = {"--count": 300, "--held": 50, "--bytes": 4, "--steps": 2, "--iterations": 2}
    words = [str(word) for option in options.items() for word in option]
    command = [script, "none", "--cache", tmp_path, *words, "--json", rows]
    for count in (1, 2):
        monkeypatch.setattr(sys, "argv", [str(w) for w in [*command, "--seeds", count]])
        runpy.run_path(str(script), run_name="__main__")
        measured = json.loads(rows.read_text())
        test = [row for row in measured if row["part"] == "test"]
        assert {row["seed"] for row in test} == set(range(count))
        ways = [(row["trained"], row["method"]) for row in test if row["seed"] == count - 1]
        assert len(ways) == len(set(ways)) == 16
        assert all(0 < row["recall@10"] <= 1 for row in test)
        # One of those that were tried, each once.
        tried = [row for row in measured if row["part"] == "validation"]
        assert len([row for row in tried if row["trained"] == "layer, GCD"]) == 9
        assert (tmp_path / "rows.md").read_text() == sentences.format_table(test)


def test_a_sentence_embedding_is_compressed_as_it_is_told():
    x = torch.nn.functional.normalize(torch.randn(50, 16))
    exact = x @ x.mT
    assert torch.allclose(sentences.score_int8(x, x, 16), exact, atol=0.02)
    assert not torch.equal(sentences.score_int8(x, x, 16), exact)
    assert torch.allclose(sentences.score_truncated(x, x, 64), exact, atol=1e-6)
    signs = sentences.score_binary(x, x, 2)
    assert torch.allclose(signs, x @ x.sign().mT, atol=1e-6)
    own = torch.arange(50)
    assert sentences.recall(exact, own) == {"recall@1": 1, "recall@10": 1}
    assert sentences.recall(-exact, own)["recall@10"] == 0


def test_rotated_layers_compute_the_same_until_they_are_rounded(monkeypatch):
    """Every layer of the copy has its rotation, and the weights belong to the inputs."""
    model, texts = minilm.load_model(smoke=True), minilm.read_manual()[:20]
    inputs = minilm.collect_inputs(model, texts)
    layers = [name for place in inputs.values() for name in place.layers]
    assert len(layers) == len(set(layers)) == 12
    rotations = {
        name: givens.random_rotation(place.X.shape[1], seed).mT
        for seed, place in enumerate(inputs.values())
        for name in place.layers
    }
    exact = minilm.embed(model, texts)
    rounded = minilm.embed(minilm.round_layers(model, rotations), texts)
    assert 1e-4 < (rounded - exact).abs().max() < 0.1
    X, M, _ = inputs["layer.1.intermediate.dense"]
    assert 1e-3 < minilm.output_error(X, M, torch.eye(32)) < 0.1
    monkeypatch.setattr(minilm, "LEVELS", 10**6)
    rounded = minilm.embed(minilm.round_layers(model, rotations), texts)
    assert (rounded - exact).abs().max() < 1e-4
    assert minilm.output_error(X, M, givens.random_rotation(32)) < 1e-8


def test_four_bits_are_fifteen_numbers():
    Y = torch.cat([torch.randn(50, 40), torch.zeros(1, 40)])
    rounded = minilm.round_rows(Y)
    assert max(len(row.unique()) for row in rounded) <= 15
    assert ((rounded - Y).abs() <= Y.abs().amax(1, keepdim=True) / 14 + 1e-6).all()
    assert torch.equal(minilm.round_rows(rounded).sign(), rounded.sign())


@pytest.fixture
def places():
    """The layers of a small transformer, problems of `learn` for the time of a test."""
    tables = (learn.METHODS, learn.PROBLEMS, curves.UNITS)
    before = [dict(table) for table in tables]
    yield activations.register(smoke=True)
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


@pytest.mark.parametrize("name", activations.PLACES)
def test_layer_loses_less_by_every_loss(places, name):
    row = learn.train(learn.Run(name, places[name].n, "gcd", 0.1, 0, True, 20))
    assert row["figure"] < 0.95 * row["curve"][0]
    # Hidden seeds have another layer and other texts.
    hidden = learn.train(learn.Run(name, places[name].n, "gcd", 0.1, 100, False, 1))
    assert hidden["curve"][0] != pytest.approx(row["curve"][0], rel=1e-3)


def test_tables_and_picture_of_layers(places, tmp_path):
    methods = ("gcd", "cayley", "qr")
    found = [
        learn.train(learn.Run(name, places[name].n, method, 0.03, seed, True, 6))
        for name in ("attention", "ffn")
        for method in methods
        for seed in (0, 1)
    ]
    times = [
        row
        for name in ("attention", "ffn")
        for row in activations.time_steps(name, places[name].n, dict.fromkeys(methods, 0.03))
    ]
    told = activations.format_tables(found, times)
    assert told.count("| frozen |") == 2
    assert all(told.count(f"| {method} |") == 2 for method in methods)
    activations.plot(found, times, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
