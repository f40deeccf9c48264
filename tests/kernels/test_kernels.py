import pytest
import torch

from givens import kernels


def test_compiled_loops_run_on_a_cpu_and_torch_elsewhere():
    assert kernels.choose(torch.eye(2)) == "numba"
    assert kernels.choose(torch.eye(2, dtype=torch.float64)) == "numba"
    assert kernels.choose(torch.eye(2, device="meta")) == "reference"
    assert kernels.choose(torch.eye(2, dtype=torch.bfloat16)) == "reference"


def test_a_backend_can_be_asked_for():
    with kernels.use("reference"):
        assert kernels.choose(torch.eye(2)) == "reference"
        with kernels.use("numba"):
            assert kernels.choose(torch.eye(2)) == "numba"
        assert kernels.choose(torch.eye(2)) == "reference"
    assert kernels.choose(torch.eye(2)) == "numba"
    kernels.use("reference")
    assert kernels.choose(torch.eye(2)) == "reference"
    kernels.use(None)
    assert kernels.choose(torch.eye(2)) == "numba"


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(2, device="meta"), "the tensor is on meta"),
        (torch.eye(2, dtype=torch.bfloat16), "the tensor is torch.bfloat16"),
    ],
)
def test_a_backend_that_cannot_run_says_why(tensor, reason):
    with kernels.use("numba"), pytest.raises(RuntimeError, match=reason):
        kernels.choose(tensor)
