"""Dispatch: the one place that decides which code runs a hot loop.

Every operation has a reference in ordinary torch, which runs anywhere and is the oracle of the
tests, and a twin in numba for the CPU, in Triton for a GPU, or both. The reference is decorated
with `operation`; its twin is the function of the same name in the module that `OPERATIONS` gives.
`kernels/cpu` and `kernels/gpu` are mirror images. A twin is imported when it first runs.
"""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor

Backend = Literal["reference", "numba", "triton"]

P = ParamSpec("P")
T = TypeVar("T")


class Operation(NamedTuple):
    """The modules with each version of an operation; None where the reference runs instead."""

    reference: str
    numba: str | None = None
    triton: str | None = None


OPERATIONS = {
    "step_": Operation("optim", "kernels.cpu.step", "kernels.gpu.step"),
    "turn_rows_": Operation("rotation", "kernels.cpu.turning"),
    "orthonormalise_rows_": Operation("rotation", "kernels.cpu.turning"),
    "skew_magnitudes": Operation("rotation", "kernels.cpu.matching"),
    "largest": Operation("rotation", "kernels.cpu.turning"),
    "draw_pairs": Operation("pairing", "kernels.cpu.turning"),
    "greedy_partners": Operation("pairing", "kernels.cpu.choosing"),
    "match_nearly": Operation("pairing", None, "kernels.gpu.matching"),
    "match_greedily": Operation("pairing", "kernels.cpu.matching"),
    "bid": Operation("pairing", "kernels.cpu.matching"),
    "exchange": Operation("pairing", "kernels.cpu.matching"),
    "assign": Operation("kmeans", "kernels.cpu.nearest", "kernels.gpu.nearest"),
    "quantize": Operation("kmeans", None, "kernels.gpu.nearest"),
    "add_up_": Operation("kmeans", "kernels.cpu.nearest"),
    "root_gains": Operation("fixed.turns", "kernels.cpu.angles"),
    "plane_angles": Operation("fixed.turns", "kernels.cpu.angles"),
    "record": Operation("fixed.turns", None, "kernels.gpu.replay"),
    "normalise": Operation("layer.straight_through", None, "kernels.gpu.straight"),
    "find_gradients": Operation("layer.straight_through", None, "kernels.gpu.straight"),
}

# The stream of random pairings, the same in every backend (`pairing.random_pairs`). numba's cache
# on disk does not notice a change here: remove __pycache__/*.nbi after one.
WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
SPREAD = 0x85EBCA6B
SHUFFLE_ROUNDS = 6
SHUFFLE_BITS = 8
# Streams from here on draw the pairings on which rounding errors are repaired, at intervals.
TIDY_STREAM = 1 << 30
TIDY_EVERY = 16

# Far beyond any useful rate; no angle overflows in float32.
MOST_RATE = 1e20

# The widest matrix for the Triton kernels: a matching holds whole rows in registers.
WIDEST = 16384

_forced: ContextVar[Backend | None] = ContextVar("givens.backend", default=None)
_references: dict[str, Callable[..., Any]] = {}


def backend(name: Backend | None) -> contextlib.AbstractContextManager[None]:
    """Run every operation on one backend inside a `with` block.

    "reference" is ordinary torch. "numba" and "triton" run the compiled operations, and raise with
    the reason if they cannot run; operations without a version for that backend run in torch. None,
    the default, chooses by the device and dtype of each tensor.

    The choice belongs to the current context (see `contextvars`). A new thread starts without it;
    `contextvars.copy_context().run` passes it on.

        with givens.backend("reference"):
            optimizer.step()
    """
    if name is not None and name not in get_args(Backend):
        known = ", ".join(map(repr, get_args(Backend)))
        raise ValueError(f"backend must be one of {known} or None, but got {name!r}")
    return _force(name)


@contextlib.contextmanager
def _force(name: Backend | None) -> Iterator[None]:
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def operation(reference: Callable[P, T]) -> Callable[P, T]:
    """Make a torch function an operation: its first argument decides which version runs.

    That argument is positional: a tensor, or anything else for work on the CPU. Under
    torch.compile, which cannot trace a kernel, the reference runs.
    """
    name = reference.__name__
    _references[name] = reference
    twins: dict[Backend, Callable[..., T]] = {"reference": reference}

    @functools.wraps(reference)
    def run(first: Any, /, *args: Any, **options: Any) -> T:
        if torch.compiler.is_compiling():
            return twins["reference"](first, *args, **options)
        chosen = choose(first if isinstance(first, Tensor) else None)
        twin = twins.get(chosen)
        if twin is None:
            twin = twins[chosen] = load(name, chosen)
        return twin(first, *args, **options)

    return run  # type: ignore[return-value]  # its first argument is positional


def load(name: str, chosen: Backend) -> Callable[..., Any]:
    """Import an operation's code for a backend, or its reference if there is none."""
    module = getattr(OPERATIONS[name], chosen)
    if chosen == "reference" or module is None:
        return _references[name]
    twin: Callable[..., Any] = getattr(importlib.import_module(f"givens.{module}"), name)
    return twin


def choose(W: Tensor | None = None) -> Backend:
    """The backend for W, or for work without a tensor."""
    forced = _forced.get()
    if forced == "reference":
        return forced
    if W is None:
        return forced or "numba"
    wanted: Backend = forced or ("triton" if W.is_cuda else "numba")
    reason = _why_not_numba(W) if wanted == "numba" else _why_not_triton(W)
    if reason and forced:
        raise RuntimeError(f"the {wanted} kernels cannot run: {reason}")
    # An empty tensor launches no kernel.
    return "reference" if reason or (wanted == "triton" and not W.numel()) else wanted


def fall_back(name: str, reason: str) -> Callable[..., Any]:
    """The reference, for arguments that a twin does not support; raises if the twin was forced."""
    if forced := _forced.get():
        raise RuntimeError(f"the {forced} kernels cannot run: {reason}")
    return _references[name]


def current_backend() -> Backend | None:
    """The backend of the surrounding `with` block, if any; None under torch.compile."""
    return None if torch.compiler.is_compiling() else _forced.get()


def resume(name: Backend | None) -> contextlib.AbstractContextManager[None]:
    """Enter the block that `current_backend` was called in, on a thread such as autograd's."""
    return contextlib.nullcontext() if name is None else _force(name)


def reuse(workspaces: dict[Any, Any], make: Callable[..., Any], W: Tensor, *sizes: int) -> Any:
    """The buffers from `make` for matrices like W; created once and overwritten in every step."""
    key = make, W.shape, W.device, W.dtype, sizes
    if key not in workspaces:
        workspaces[key] = make(W, *sizes)
    return workspaces[key]


def mark_written(W: Tensor) -> None:
    """Record for autograd that a compiled loop has changed W in place."""
    torch.autograd.graph.increment_version(W)


def _why_not_triton(W: Tensor) -> str | None:
    if not W.is_cuda:
        return f"the tensor is on {W.device}"
    if W.dtype is not torch.float32:
        return f"the tensor is {W.dtype}, and they take float32"
    if W.shape[-1] > WIDEST:
        return f"n = {W.shape[-1]}, and they take n up to {WIDEST}"
    return None if _has_triton() else "triton is not installed"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _why_not_numba(W: Tensor) -> str | None:
    if not W.is_cpu:
        return f"the tensor is on {W.device}"
    if W.dtype is not torch.float32 and W.dtype is not torch.float64:
        return f"the tensor is {W.dtype}, and they take float32 and float64"
    return None
