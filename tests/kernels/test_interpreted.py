"""The GPU kernels on a CPU, under Triton's interpreter: small shapes, one program at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux alone")

SCRIPT = """
import dataclasses
import sys

sys.path.insert(0, sys.argv[1])
import oracles
import torch
from triton.runtime import interpreter

import givens
from givens import optim
from givens import pairing as pairings
from givens.layer import straight_through
from givens.kernels.gpu import grid, matching, nearest, planes, straight, turning
from givens.kernels.gpu import step as gpu
from givens.options import options_for

# Half of the interpreter's time goes into a check of integer overflow, whose result is dropped
# outside of debug mode, and into patching triton.language at each call of a device function.
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
patched = set()


def call(self, *args, **options):
    if (module := self.fn.__module__) not in patched:
        patched.add(module)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **options)


interpreter.InterpretedFunction.__call__ = call

# Small enough that the rounds of the whole grid run too, and not only the last in registers.
# Words of few bits: a draw seldom falls outside, and the interpreter is slow.
grid.SHUFFLE_BITS = pairings.SHUFFLE_BITS = 3
matching.TILE, matching.LISTED, matching.BELIEFS = 8, 4, 3


def check_choice(partners, how):
    # Pairings without a plane twice.
    n = partners.shape[-1]
    for rounds in partners:
        assert torch.equal(rounds.gather(1, rounds), torch.arange(n).expand_as(rounds))
        chosen = [(i, j) for row in rounds.tolist() for i, j in enumerate(row) if i < j]
        assert len(set(chosen)) == len(chosen) >= 0.7 * how.turns * (n // 2)


for n in (2, 5, 8, 17):
    for A in (oracles.skew(n), torch.zeros(n, n), oracles.skew(n).sign()):
        pairs = torch.full((1, (n + 1) // 2, 2), -7, dtype=torch.int32)
        matching.Matcher(A).greedy(A.abs()[None].contiguous(), pairs)
        found = [tuple(pair) for pair in pairs[0, : n // 2].tolist()]
        assert found == oracles.sorted_greedy(A), (n, found)
        matching.Matcher(A).steepest(A.abs()[None].contiguous(), pairs)
        chosen = pairs[0, : n // 2].long()
        assert sorted(pairs[0].flatten().tolist()[: n]) == list(range(n))
        assert oracles.weight(A, chosen) >= oracles.weight(A, givens.greedy_pairs(A))
    P = torch.randn(2, n, n)
    expected = (P - P.mT).abs()
    matcher = matching.Matcher(P)
    found = matcher.magnitudes(P, torch.eye(n).repeat(2, 1, 1))
    off = ~torch.eye(n, dtype=torch.bool)
    torch.testing.assert_close(found[:, off], expected[:, off])
    assert torch.equal(found[:, off], found.mT[:, off])

X, C = torch.randn(70, 3, 5), torch.randn(3, 9, 5)
C[:, 4] = C[:, 2]
codes, distances = nearest.assign(X.flatten(1), C)
assert codes.dtype == torch.uint8
least, expected = (X[:, :, None] - C).square().sum(-1).min(-1)
assert torch.equal(codes.long(), expected)
torch.testing.assert_close(distances, least)
X[3, 1, 2], usage = float("nan"), torch.ones(3, 9)
codes, at, words, errors, distortion = nearest.quantize(X.flatten(1), C, usage, 0.5)
expected[3, 1] = 0
assert torch.equal(codes.long(), expected)
assert torch.equal(at.view(70, 3).long(), expected + 9 * torch.arange(3))
chosen = C[torch.arange(3), expected].flatten(1).where(X.flatten(1).isfinite(), float("nan"))
assert torch.equal(words.nan_to_num(7), chosen.nan_to_num(7)) and int(words.isnan().sum()) == 1
assert torch.equal(errors.nan_to_num(7), (X.flatten(1) - chosen).nan_to_num(7))
assert distortion.isnan()
counts = torch.nn.functional.one_hot(expected, 9).sum(0)
assert torch.equal(usage, 1 + 0.5 * counts)

# The way back, with rows, sub-vectors and programs that do not come out even.
straight.BLOCK = 64
V = torch.randn(70, 15)
V[3], V[5, 1] = 0, float("nan")
for found, wanted in zip(straight.normalise(V), straight_through.normalise_exactly(V)):
    torch.testing.assert_close(found, wanted, equal_nan=True)
V, g, gd = torch.randn(70, 15), torch.randn(15, 70).T, torch.tensor(0.7)
for normalise in (False, True):
    x, length = straight_through.normalise_exactly(V) if normalise else (V, None)
    W = givens.random_rotation(15)
    _, at, q, error, distortion = nearest.quantize(x @ W.T, C)
    torch.testing.assert_close(distortion, error.square().sum(1).mean())
    kept = straight_through.Kept(x, length, W, q, error, at, None)
    for to_v, to_W in ((True, True), (True, False), (False, True)):
        how = (g, gd, kept, C.shape, None, (to_v, to_W, True, False))
        found = straight.find_gradients(*how)
        for mine, wanted in zip(found, straight_through.find_gradients_in_order(*how)):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
# And the layer, as it calls all of these on a device.
layer = givens.IndexLayer(15, 3, 9, metric="cosine")
layer.warm_start(V, 2)
usage, steps = layer.usage.clone(), []
choose = givens.kernels.choose
for backend in ("reference", "triton"):
    givens.kernels.choose = lambda W: backend
    layer.usage.copy_(usage)
    layer.zero_grad()
    v = V.clone().requires_grad_()
    out = layer(v)
    (out.embedding.square().sum() + (out.embedding * g).sum() + 3 * out.distortion).backward()
    grads = [part.grad for part in (v, *layer.parameters())]
    steps.append([*out, layer.usage.clone(), *grads])
assert torch.equal(steps[0][1].fine, steps[1][1].fine)
for mine, wanted in zip(steps[1][2:], steps[0][2:]):
    torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(steps[1][0], steps[0][0])
givens.kernels.choose = choose

# Whole steps, as the optimizer calls them on a device.
choose_partners = optim.choose_partners
for n, stack, held, plain, options in (
    (5, 1, 0, 0, {"pairing": "random", "adapt": None}),
    (6, 2, 0, 0, {"pairing": "random"}),
    (6, 1, 4096, 0, {"pairing": "random", "turns": 3}),
    (5, 2, 4096, 0, {"pairing": "random", "betas": (0.9, 0.99)}),
    (6, 2, 0, 0, {"adapt": "matrix"}),
    (5, 1, 4096, 0, {"adapt": "adagrad"}),
    (5, 2, 0, 0, {"pairing": "overlapping-random", "betas": (0.9, 0.99)}),
    (6, 1, 4096, 0, {"pairing": "overlapping-greedy", "adapt": None}),
    (1, 1, 0, 99, {}),
    (2, 1, 0, 99, {"turns": 4}),
    (6, 2, 0, 99, {"turns": 1}),
    (9, 1, 0, 99, {"turns": 1, "pairing": "steepest", "exact": False}),
    (17, 1, 0, 99, {"turns": 3}),
    (11, 2, 0, 99, {"turns": 2, "maximize": True}),
    (12, 1, 0, 4, {"turns": 3}),
    (9, 1, 0, 99, {"turns": 4, "adapt": None}),
    (7, 2, 0, 99, {"turns": "all"}),
    (70, 1, 0, 99, {"turns": "all"}),
):
    turning.HELD, planes.PLAIN = held, plain
    start = torch.stack([givens.random_rotation(n, b) for b in range(stack)])
    W, V = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    mine, oracle = (givens.GCD([M], 0.05, seed=5, **options) for M in (W, V))
    state, workspaces = {}, {}
    how = options_for(mine.param_groups[0], W, 0)
    optim._start(state, W, how)
    state |= {"step": torch.zeros((), dtype=torch.int64)}
    state |= {"skipped": torch.zeros((), dtype=torch.int32)}
    # Which planes are chosen is another matter: the oracle turns the same.
    taken = lambda D, _: next(
        space.partners.long() for space in workspaces.values() if hasattr(space, "partners")
    )
    optim.choose_partners = taken if n > 1 else choose_partners
    for number in range(3):
        G = torch.randn(stack, n, n)
        for bad in (True, False):
            g = G.clone()
            if bad:
                g[-1, number % n, 0] = float("nan")
            before = [W.detach().clone(), *(part.clone() for part in state.values())]
            gpu.step_(W, g, state, how, None, workspaces)
            after = [W.detach(), *state.values()]
            same = [torch.equal(x, y) for x, y in zip(before, after)]
            # A bad one is counted, and changes nothing else.
            assert not bad or n == 1 or (sum(same) == len(same) - 1 and int(state["skipped"]))
        if how.by_plane and not how.all_planes and how.turns > 1:
            check_choice(taken(None, None), how)
        V.grad = G
        with givens.backend("reference"):
            oracle.step()
    assert n == 1 or (int(state["step"]) == 3 and int(state["skipped"]) == 3)
    torch.testing.assert_close(W.detach(), V.detach(), rtol=2e-5, atol=2e-5)
    for key, value in oracle.state[V].items():
        if isinstance(value, torch.Tensor) and n > 1:
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)

# Rates that a scheduler may leave on a device, and gradients whose products overflow: refused.
wrong = [torch.tensor(lr) for lr in (float("nan"), float("inf"), -1.0, 3e38)]
for n, options in (
    (6, {"pairing": "random"}),
    (6, {"pairing": "random", "turns": 3, "adapt": None}),
    (5, {"pairing": "overlapping-random", "adapt": None}),
    (6, {"turns": 1, "adapt": None}),
    (6, {"pairing": "steepest", "exact": False, "adapt": "matrix", "betas": (0.0, 0.5)}),
    (6, {"pairing": "steepest", "exact": False, "adapt": "adagrad"}),
    (6, {"turns": 3}),
    (6, {"turns": 3, "adapt": None}),
    (66, {"turns": "all"}),
):
    turning.HELD, planes.PLAIN = 4096, 99
    W = torch.nn.Parameter(givens.random_rotation(n))
    group = givens.GCD([W], torch.tensor(0.05), **options).param_groups[0]
    state, workspaces = {}, {}
    optim._start(state, W, options_for(group, W, 0))
    state |= {"step": torch.zeros((), dtype=torch.int64)}
    state |= {"skipped": torch.zeros((), dtype=torch.int32)}
    cases = [(lr, torch.randn(n, n)) for lr in wrong]
    cases += [(torch.tensor(0.05), torch.full((n, n), size)) for size in (float("inf"), 3e38)]
    for lr, G in cases:
        before = [W.detach().clone(), *(part.clone() for part in state.values())]
        gpu.step_(W, G, state, options_for({**group, "lr": lr}, W, 0), None, workspaces)
        same = [torch.equal(x, y) for x, y in zip(before, [W.detach(), *state.values()])]
        assert sum(same) == len(same) - 1, (options, lr, float(G.max()))
    assert int(state["skipped"]) == len(cases)
    # The raw step by a large rate on the device: refused, or an angle like any other.
    lr = torch.tensor(1e19)
    gpu.step_(W, 1e30 * torch.randn(n, n), state, options_for({**group, "lr": lr}, W, 0), None, {})
    assert givens.orthogonality_error(W) < 1e-5, options
"""


def test_kernels_equal_the_reference():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, Path(__file__).parents[1]],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
