"""The GPU kernels on a CPU, under Triton's interpreter: small shapes, one program at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has wheels for Linux alone")

SCRIPT = """
import sys

sys.path.insert(0, sys.argv[1])
import oracles
import torch

import givens
from givens import pairing as pairings
from givens.layer import straight_through
from givens.kernels.gpu import grid, matching, nearest, straight, turning
from givens.kernels.gpu.turning import Turner

# Small enough that the rounds of the whole grid run too, and not only the last in registers.
# Words of few bits: a draw seldom falls outside, and the interpreter is slow.
grid.SHUFFLE_BITS = pairings.SHUFFLE_BITS = 3
matching.TILE, matching.LISTED, matching.BELIEFS = 8, 4, 3

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
codes, distances = nearest.nearest(X.flatten(1), C)
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
for found, wanted in zip(straight.normalised(V, 1e-12), straight_through.normalised(V)):
    torch.testing.assert_close(found, wanted, equal_nan=True)
V, g, gd = torch.randn(70, 15), torch.randn(15, 70).T, torch.tensor(0.7)
for normalise in (False, True):
    x, length = straight_through.normalised(V) if normalise else (V, None)
    W = givens.random_rotation(15)
    _, at, q, error, distortion = nearest.quantize(x @ W.T, C)
    torch.testing.assert_close(distortion, error.square().sum(1).mean())
    kept = straight_through.Kept(x, length, W, q, error, at, None)
    for to_v, to_W in ((True, True), (True, False), (False, True)):
        how = (g, gd, kept, C.shape, None, (to_v, to_W, True, False))
        found = straight_through._launched_gradients(*how)
        for mine, wanted in zip(found, straight_through._gradients(*how)):
            torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5)
# And the layer, as it calls all of these on a device.
layer = givens.IndexLayer(15, 3, 9, metric="cosine")
layer.warm_start(V, 2)
usage, steps = layer.usage.clone(), []
for on_device in (lambda x: False, lambda x: True):
    givens.kernels.on_device = on_device
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

for n, stack, held, pairing, adapt, betas in (
    (5, 1, 0, "random", None, (0.0, 0.0)),
    (6, 2, 0, "random", "adam", (0.0, 0.99)),
    (6, 2, 0, "greedy", "adam", (0.9, 0.99)),
    (5, 1, 4096, "greedy", "adagrad", (0.0, 0.0)),
    (5, 2, 4096, "random", "adam", (0.9, 0.99)),
    (5, 2, 0, "overlapping-random", "adam", (0.9, 0.99)),
    (6, 1, 4096, "overlapping-greedy", None, (0.0, 0.0)),
):
    turning.HELD = held
    start = torch.stack([givens.random_rotation(n, b) for b in range(stack)])
    W, V = start.clone(), torch.nn.Parameter(start.clone())
    turner, matcher = Turner(W), matching.Matcher(W)
    step, skipped = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int32)
    scale = torch.zeros(stack)
    H = torch.zeros_like(W) if betas[0] else None
    options = {"betas": betas} if adapt == "adam" else {}
    draw, overlap = pairing.endswith("random"), pairing.startswith("overlapping")
    oracle = givens.GCD([V], 0.05, pairing=pairing, adapt=adapt, seed=5, **options)
    for number in range(3):
        G = torch.randn(stack, n, n)
        for bad in (True, False):
            g = G.clone()
            if bad:
                g[-1, number, 1] = float("nan")
            if H is not None:
                turner.blend(H, g, 1 - betas[0], None)
            if overlap and not draw:
                S = matcher.magnitudes(g if H is None else H, W)
                turner.take(pairings.largest_pairs(S))
            elif not draw:
                matcher.greedy(matcher.magnitudes(g if H is None else H, W), turner.pairs)
            skip = turner.skip
            if H is None:
                skip.fill_(0 if g.isfinite().all() else 1)
            before = W.clone()
            turner.descend(
                W, g, H, scale, step, 0.05, skipped, draw=draw, overlap=overlap, skip=skip,
                adapt=adapt, betas=betas, maximize=False, seed=5, stream=0,
            )
            assert torch.equal(W, before) == bad
        V.grad = G
        with givens.kernels.use("reference"):
            oracle.step()
    assert int(step) == 3 and int(skipped) == 3
    torch.testing.assert_close(W, V.detach(), rtol=1e-5, atol=1e-5)
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
