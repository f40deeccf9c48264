import networkx
import numpy as np
import oracles
import pytest
import scipy.stats
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import givens
from givens.kernels.cpu import turning
from givens.pairing import overlapping_greedy_pairs, overlapping_random_pairs

SIZES = st.integers(1, 13)
SEEDS = st.integers(0, 2**16)


def tied(n, seed):
    """A skew matrix of few different magnitudes."""
    values = torch.randint(-2, 3, (n, n), generator=torch.Generator().manual_seed(seed)).float()
    return values.triu(1) - values.triu(1).T


def chain(n):
    """Weights that grow along a path: greedy can match one pair a round."""
    A = torch.zeros(n, n)
    i = torch.arange(n - 1)
    A[i, i + 1] = 1 + torch.arange(n - 1.0)
    return A - A.T


def star(n):
    """Every axis prefers axis 0, then axis 1, and so on: each round sends all to look again."""
    axes = torch.arange(float(n))
    A = 1 / (1 + torch.minimum(axes, axes[:, None]) + axes / n**2 + axes[:, None] / n**2)
    return A.triu(1) - A.triu(1).T


def is_pairing(pairs, n):
    assert pairs.shape == (n // 2, 2)
    assert pairs.dtype == torch.int64
    assert (pairs[:, 0] < pairs[:, 1]).all()
    assert len(set(pairs.flatten().tolist())) == 2 * (n // 2)
    assert n < 2 or (pairs.min() >= 0 and pairs.max() < n)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), seed=SEEDS)
def test_every_pairing_is_a_perfect_matching(n, seed):
    A = oracles.skew(n, seed)
    for pairs in (
        givens.random_pairs(n, seed),
        givens.greedy_pairs(A),
        givens.steepest_pairs(A),
        givens.steepest_pairs(A, exact=False),
    ):
        is_pairing(pairs, n)


@pytest.mark.parametrize("make", [oracles.skew, tied, lambda n, _: chain(n), lambda n, _: star(n)])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 16, 33, 64])
def test_greedy_equals_sorting(n, make, backend):
    for seed in range(3):
        A = make(n, seed)
        assert [tuple(p) for p in givens.greedy_pairs(A).tolist()] == oracles.sorted_greedy(A)
        assert torch.equal(givens.greedy_pairs(A.double()), givens.greedy_pairs(A))


def test_greedy_on_zeros_is_still_a_pairing(backend):
    for n in (2, 5, 128):
        is_pairing(givens.greedy_pairs(torch.zeros(n, n)), n)


def test_greedy_reads_what_is_above_the_diagonal():
    A = oracles.skew(12)
    assert torch.equal(givens.greedy_pairs(A.triu()), givens.greedy_pairs(A))
    assert torch.equal(givens.greedy_pairs(A.abs()), givens.greedy_pairs(A))


def test_pairings_of_stacks_are_stacks_of_pairings(backend):
    A = torch.stack([oracles.skew(10, seed) for seed in range(3)])
    for pairing in (givens.greedy_pairs, givens.steepest_pairs, overlapping_greedy_pairs):
        assert torch.equal(pairing(A), torch.stack([pairing(a) for a in A]))


@settings(max_examples=40, deadline=None)
@given(n=SIZES, seed=SEEDS, ties=st.booleans())
def test_steepest_equals_an_independent_exact_solver(n, seed, ties):
    A = tied(n, seed) if ties else oracles.skew(n, seed)
    graph = networkx.Graph()
    graph.add_nodes_from(range(n))
    for i in range(n):
        for j in range(i + 1, n):
            graph.add_edge(i, j, weight=float(A[i, j].double() ** 2))
    best = networkx.max_weight_matching(graph, maxcardinality=True)
    expected = sum(graph.edges[edge]["weight"] for edge in best)
    pairs = givens.steepest_pairs(A)
    is_pairing(pairs, n)
    assert oracles.weight(A, pairs) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 24), seed=SEEDS, ties=st.booleans())
# Greedy of 22 axes, one of them of weight 0, breaks ties in another way.
@example(n=21, seed=3799, ties=True)
def test_order_of_the_first_order_descents(n, seed, ties):
    """½·steepest ≤ greedy ≤ steepest and mean of random ≤ steepest, always."""
    A = tied(n, seed) if ties else oracles.skew(n, seed)
    steepest = oracles.weight(A, givens.steepest_pairs(A))
    greedy = oracles.weight(A, givens.greedy_pairs(A))
    nearly = oracles.weight(A, givens.steepest_pairs(A, exact=False))
    slack = 1e-6 * (1 + steepest)
    assert steepest / 2 - slack <= greedy <= nearly + slack
    assert nearly <= steepest + slack
    assert oracles.mean_random_weight(A) <= steepest + slack


@pytest.mark.parametrize("n", [8, 65, 128])
def test_greedy_beats_the_mean_of_random_on_gaussian_derivatives(n):
    for seed in range(5):
        A = oracles.skew(n, seed)
        assert oracles.weight(A, givens.greedy_pairs(A)) > oracles.mean_random_weight(A)


def test_greedy_can_fall_below_the_mean_of_random():
    """Squared weights 1.01 on one edge, 1 on its neighbours, 0 opposite: greedy takes 1.01 + 0."""
    A = torch.zeros(4, 4, dtype=torch.float64)
    A[0, 1] = 1.01**0.5
    A[0, 2] = A[0, 3] = A[1, 2] = A[1, 3] = 1
    A = A - A.T
    assert oracles.weight(A, givens.greedy_pairs(A)) == pytest.approx(1.01)
    assert oracles.mean_random_weight(A) == pytest.approx(5.01 / 3)
    assert oracles.weight(A, givens.steepest_pairs(A)) == pytest.approx(2)
    assert oracles.weight(A, givens.steepest_pairs(A, exact=False)) == pytest.approx(2)


@pytest.mark.parametrize("factor", [1e-38, 1e-30, 1e30])
@pytest.mark.parametrize("exact", [True, False])
def test_steepest_does_not_depend_on_the_scale(factor, exact):
    """Squares of such weights vanish or overflow in float32."""
    A = oracles.skew(20)
    expected = oracles.weight(A, givens.steepest_pairs(A, exact=exact))
    found = givens.steepest_pairs(A * factor, exact=exact)
    assert oracles.weight(A, found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("n", "seeds"), [(64, 8), (65, 4), (128, 5), (256, 3), (512, 2)])
def test_approximate_steepest_closes_the_gap(n, seeds):
    """At least half of greedy's gap to the exact weight on each matrix, and 0.8 on average."""
    closed = []
    for seed in range(seeds):
        A = oracles.skew(n, seed)
        greedy = oracles.weight(A, givens.greedy_pairs(A))
        gap = oracles.weight(A, givens.steepest_pairs(A)) - greedy
        gained = oracles.weight(A, givens.steepest_pairs(A, exact=False)) - greedy
        closed.append(gained / gap)
    assert min(closed) >= 0.5
    assert sum(closed) / seeds >= 0.8


@pytest.mark.parametrize("n", [2, 3, 8, 33, 128])
def test_compiled_approximation_equals_the_reference(n):
    for seed in range(3):
        A = oracles.skew(n, seed, torch.float64)
        fast = givens.steepest_pairs(A, exact=False)
        with givens.backend("reference"):
            assert torch.equal(fast, givens.steepest_pairs(A, exact=False))


@pytest.mark.parametrize("n", [6, 8, 64])
def test_random_pairs_are_uniform(n):
    """Every pair equally often, and at n = 6 every one of the 15 pairings."""
    draws = 3000 if n < 64 else 1500
    drawn = np.empty((draws, n // 2, 2), np.int64)
    for step in range(draws):
        turning.draw_pairs_loop(n, 5, step, 0, 0, drawn[step])
    planes = np.bincount((drawn[..., 0] * n + drawn[..., 1]).ravel(), minlength=n * n)
    planes = planes.reshape(n, n)[np.triu_indices(n, 1)]
    assert scipy.stats.chisquare(planes).pvalue > 1e-4
    if n == 6:
        _, counts = np.unique([sorted(map(tuple, d)) for d in drawn], axis=0, return_counts=True)
        assert len(counts) == 15
        assert scipy.stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("n", [1, 2, 3, 64, 100, 513, 4096])
def test_compiled_draw_equals_the_reference(n):
    for seed, step, stream in ((0, 1, 0), (2**40 + 3, 2**33 + 1, 7), (1, 5, 1 << 30)):
        drawn = givens.random_pairs(n, seed, step=step, stream=stream)
        with givens.backend("reference"):
            assert torch.equal(drawn, givens.random_pairs(n, seed, step=step, stream=stream))


def test_random_pairs_depend_on_seed_step_and_stream_alone():
    first = givens.random_pairs(64, 3, step=5, stream=1)
    assert torch.equal(first, givens.random_pairs(64, 3, step=5, stream=1))
    for other in (
        givens.random_pairs(64, 4, step=5, stream=1),
        givens.random_pairs(64, 3, step=6, stream=1),
        givens.random_pairs(64, 3, step=5, stream=2),
        givens.random_pairs(64, 3 + 2**32, step=5, stream=1),
    ):
        assert not torch.equal(first, other)


@settings(max_examples=40, deadline=None)
@given(n=SIZES, seed=SEEDS)
def test_overlapping_random_planes_are_different_planes(n, seed):
    planes = overlapping_random_pairs(n, seed)
    assert planes.shape == (n // 2, 2)
    assert (planes[:, 0] < planes[:, 1]).all()
    assert (planes >= 0).all()
    assert (planes < n).all()
    assert len({tuple(p) for p in planes.tolist()}) == n // 2


def test_overlapping_random_planes_are_uniform():
    n, draws = 7, 2000
    planes = torch.cat([overlapping_random_pairs(n, 1, step=step) for step in range(draws)])
    counts = torch.bincount(planes[:, 0] * n + planes[:, 1], minlength=n * n).view(n, n)
    i, j = torch.triu_indices(n, n, 1)
    assert scipy.stats.chisquare(counts[i, j].numpy()).pvalue > 1e-4


def test_overlapping_greedy_takes_the_largest():
    A = oracles.skew(9)
    i, j = overlapping_greedy_pairs(A).T
    largest = A.triu(1).abs().flatten().sort(descending=True).values[:4]
    assert torch.equal(A[i, j].abs(), largest)


BAD = [
    (lambda: givens.random_pairs(0), "n must be at least 1, but got n=0"),
    (lambda: givens.random_pairs(4, -1), "seed must be in 0"),
    (lambda: givens.greedy_pairs(torch.ones(2, 3)), "A must be square"),
    (lambda: givens.greedy_pairs(torch.ones(3)), "A must be square"),
    (lambda: givens.greedy_pairs(torch.full((2, 2), float("nan"))), "A must be finite"),
    (lambda: givens.steepest_pairs(torch.full((2, 2), float("inf"))), "A must be finite"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input(call, message, unchecked):
    with pytest.raises(ValueError, match=message):
        call()
