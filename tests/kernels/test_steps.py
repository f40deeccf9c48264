"""The compiled step against the reference; on a GPU, `test_cuda.py`."""

import pytest
import torch
from test_optim import PAIRINGS, descend, parameter

import givens


@pytest.mark.parametrize("stack", [0, 3])
@pytest.mark.parametrize(
    "options", [{}, {"adapt": "adagrad"}, {"adapt": None}, {"betas": (0.7, 0.9)}]
)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_compiled_equals_reference(n, pairing, options, stack):
    results = []
    for backend in ("numba", "reference"):
        W = parameter(n, stack=stack)
        optimizer = givens.GCD([W], 0.05, pairing=pairing, seed=4, **options)
        with givens.backend(backend):
            descend(W, optimizer, 20)
        results.append((W.detach(), optimizer.state_dict()["state"][0]))
    (fast, fast_state), (slow, slow_state) = results
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    assert fast_state.keys() == slow_state.keys()
    assert fast_state["step"] == slow_state["step"] == 20
    for key in fast_state.keys() - {"step"}:
        torch.testing.assert_close(fast_state[key], slow_state[key], rtol=1e-10, atol=1e-10)
    assert n == 1 or not torch.allclose(slow, parameter(n, stack=stack).detach(), atol=1e-2)
