import contextvars
import importlib
import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import givens
from givens import kernels


def test_compiled_loops_run_on_a_cpu_and_torch_elsewhere():
    assert kernels.choose(torch.eye(2)) == "numba"
    assert kernels.choose(torch.eye(2, dtype=torch.float64)) == "numba"
    assert kernels.choose(torch.eye(2, device="meta")) == "reference"
    assert kernels.choose(torch.eye(2, dtype=torch.bfloat16)) == "reference"


def test_a_backend_is_chosen_for_a_block():
    with givens.backend("reference"):
        assert kernels.choose(torch.eye(2)) == "reference"
        with givens.backend("numba"):
            assert kernels.choose(torch.eye(2)) == "numba"
        with givens.backend(None):
            assert kernels.choose(torch.eye(2)) == "numba"
        assert kernels.choose(torch.eye(2)) == "reference"
    assert kernels.choose(torch.eye(2)) == "numba"
    with pytest.raises(KeyError), givens.backend("reference"):
        raise KeyError
    assert kernels.choose(torch.eye(2)) == "numba"


@pytest.mark.parametrize(
    ("backend", "tensor", "reason"),
    [
        ("numba", torch.eye(2, device="meta"), "the tensor is on meta"),
        ("numba", torch.eye(2, dtype=torch.bfloat16), "the tensor is torch.bfloat16"),
        ("triton", torch.eye(2), "the tensor is on cpu"),
    ],
)
def test_a_backend_that_cannot_run_says_why(backend, tensor, reason):
    with givens.backend(backend), pytest.raises(RuntimeError, match=reason):
        kernels.choose(tensor)


def test_a_thread_starts_without_the_choice():
    """So says the docstring; a context that is taken along has it."""
    with ThreadPoolExecutor(1) as pool, givens.backend("reference"):
        context = contextvars.copy_context()
        assert pool.submit(kernels.choose, torch.eye(2)).result() == "numba"
        assert pool.submit(context.run, kernels.choose, torch.eye(2)).result() == "reference"

        def choose_here():
            with givens.backend("reference"):
                return kernels.choose(torch.eye(2))

        assert pool.submit(choose_here).result() == "reference"
        assert pool.submit(kernels.choose, torch.eye(2)).result() == "numba"


def test_a_layer_goes_back_on_the_backend_it_went_forward_on(monkeypatch):
    """Autograd runs on threads of its own where there is a GPU."""
    from givens.layer import straight_through

    layer, seen = givens.IndexLayer(4, 2, 2), []
    layer.warm_start(torch.randn(20, 4), 1)
    find = straight_through.find_gradients

    def spy(*arguments):
        seen.append(kernels.current_backend())
        return find(*arguments)

    monkeypatch.setattr(straight_through, "find_gradients", spy)
    with givens.backend("reference"):
        out = layer(torch.randn(3, 4, requires_grad=True))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(out.distortion.backward).result()
    assert seen == ["reference"]


@pytest.mark.parametrize("name", kernels.OPERATIONS)
def test_twins_take_what_the_reference_takes(name):
    """The table names code that is there, and every operation is in it."""
    operation = kernels.OPERATIONS[name]
    reference = getattr(importlib.import_module(f"givens.{operation.reference}"), name)
    assert kernels.load(name, "reference") is inspect.unwrap(reference, stop=is_reference)
    wanted = [p.kind for p in inspect.signature(reference).parameters.values()]
    assert operation.numba or operation.triton
    for backend in ("numba", "triton"):
        if getattr(operation, backend) is None:
            assert kernels.load(name, backend) is kernels.load(name, "reference")
            continue
        if backend == "triton":
            pytest.importorskip("triton", reason="Triton has wheels for Linux alone")
        twin = kernels.load(name, backend)
        assert twin is not kernels.load(name, "reference")
        assert [p.kind for p in inspect.signature(twin).parameters.values()] == wanted


def is_reference(function):
    return function in kernels._references.values()


def test_what_no_kernel_takes_is_refused_where_one_is_forced():
    wide = torch.randn(3, 300), torch.randn(1, 4, 300)
    assert kernels.fall_back("assign", "of its width")(*wide)[0].shape == (3, 1)
    with givens.backend("triton"), pytest.raises(RuntimeError, match="cannot run: of its width"):
        kernels.fall_back("assign", "of its width")
