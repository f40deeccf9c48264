import math

import pytest
import torch

import givens
from givens.options import MOST_TURNS, Options, gradient_limit, options_for


def options(n=8, stream=0, **given):
    optimizer = givens.GCD([torch.nn.Parameter(torch.eye(n))], 0.1, **given)
    return options_for(optimizer.param_groups[0], torch.eye(n), stream)


@pytest.mark.parametrize(
    ("given", "turns", "every", "by_plane", "momentum"),
    [
        ({}, 7, True, True, False),
        ({"turns": 3}, 3, False, True, False),
        ({"turns": "all"}, 7, True, True, False),
        ({"turns": 1, "adapt": None}, 1, False, False, False),
        ({"turns": 3, "adapt": None}, 3, False, True, False),
        ({"turns": 1, "adapt": "matrix"}, 1, False, False, True),
        ({"pairing": "random"}, 1, False, False, False),
        ({"pairing": "random", "betas": (0.5, 0.9)}, 1, False, False, True),
        ({"pairing": "steepest"}, 1, False, True, False),
        ({"pairing": "overlapping-greedy"}, 1, False, False, True),
    ],
)
def test_what_a_step_does(given, turns, every, by_plane, momentum):
    """N − 1 = 7 pairings are all there are."""
    how = options(**given)
    assert (how.turns, how.all_planes, how.by_plane, how.momentum) == (
        turns,
        every,
        by_plane,
        momentum,
    )


def test_the_raw_rate_is_the_papers():
    how = options(turns=1, adapt=None)
    assert how.rate(1) == how.rate(99) == pytest.approx(-0.1 / math.sqrt(2))
    assert options(turns=1, adapt=None, maximize=True).rate(1) == -how.rate(1)


def test_both_running_means_are_unbiased():
    """Of a constant derivative, m/√v is 1 at every step, and an axis turns by lr."""
    how = options(64, turns=4)
    beta1, beta2 = how.betas
    for t in (1, 2, 10, 1000):
        m, v = 1 - beta1**t, 1 - beta2**t
        assert how.rate(t) * m / math.sqrt(v) == pytest.approx(-0.1 / math.sqrt(4))


def test_no_derivative_overflows_below_the_limit():
    n = 64
    for how in (options(n), options(n, turns=1, adapt=None)):
        limit = gradient_limit(torch.eye(n), how)
        rows = torch.full((2, n), limit)
        unit = torch.full((2, n), n**-0.5)
        most = (rows[0] * unit[1]).sum() + (rows[1] * unit[0]).sum()
        assert most.isfinite()
        assert not (16 * most).isfinite()
    assert isinstance(how, Options)
    assert MOST_TURNS == 64
