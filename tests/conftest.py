import jaxtyping
import pytest
import torch

import givens


@pytest.fixture(params=["reference", "numba"])
def backend(request):
    """Run the test on every backend that this machine has."""
    with givens.backend(request.param):
        yield request.param


@pytest.fixture
def unchecked():
    """Switch the tests' shape checker off: what a user without it is told."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
