"""The one place that decides which code runs a hot loop.

"reference" is the ordinary torch code in the domain modules: it runs anywhere and is the oracle of
the tests. "numba" is the same loops compiled for a CPU (`kernels.compiled`), "triton" for a GPU
(`kernels.turning`, `kernels.matching`).
"""

import functools
import importlib.util
from types import TracebackType
from typing import Literal, get_args

import torch
from torch import Tensor

Backend = Literal["reference", "numba", "triton"]

# The stream of random pairings, the same in every backend (`pairing.random_pairs`). What numba has
# compiled and kept on disk does not see a change here: remove __pycache__/*.nbi after one.
WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
SPREAD = 0x85EBCA6B
SHUFFLE_ROUNDS = 6
SHUFFLE_BITS = 8
# Streams from here on draw the pairings on which rounding is undone, every so many steps.
TIDY_STREAM = 1 << 30
TIDY_EVERY = 16

# Far beyond any rate that descends; no angle overflows in float32.
MOST_RATE = 1e20

# The widest matrix that the Triton kernels take: a matching holds whole rows in registers.
WIDEST = 16384

_forced: Backend | None = None


class use:  # noqa: N801 — reads as a verb: `kernels.use("reference")`
    """Run one backend everywhere, or with `with kernels.use(...):` for a while; None chooses again.

    Where the backend cannot run, the call that needs it raises and says why.
    """

    def __init__(self, backend: Backend | None) -> None:
        global _forced
        if backend is not None and backend not in get_args(Backend):
            known = ", ".join(map(repr, get_args(Backend)))
            raise ValueError(f"backend must be one of {known} or None, but got {backend!r}")
        self._before = _forced
        _forced = backend

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _forced
        _forced = self._before


def choose(W: Tensor | None = None) -> Backend:
    """The backend for W, or for no tensor at all: compiled where W is, else torch."""
    if _forced == "reference":
        return "reference"
    fitting: Backend = "triton" if W is not None and W.device.type == "cuda" else "numba"
    wanted = _forced or fitting
    reason = None if W is None else (_why_not_numba(W) if wanted == "numba" else _why_not_triton(W))
    if reason and _forced:
        raise RuntimeError(f"the {wanted} kernels cannot run: {reason}")
    return "reference" if reason else wanted


def on_device(x: Tensor) -> bool:
    """Whether a GPU kernel is to take the rows of x; torch.compile cannot look into it."""
    return not torch.compiler.is_compiling() and len(x) > 0 and choose(x) == "triton"


def written(W: Tensor) -> None:
    """Tell autograd that a compiled loop has changed W in place."""
    torch.autograd.graph.increment_version(W)


def _why_not_triton(W: Tensor) -> str | None:
    if W.device.type != "cuda":
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
    if W.device.type != "cpu":
        return f"the tensor is on {W.device}"
    if W.dtype is not torch.float32 and W.dtype is not torch.float64:
        return f"the tensor is {W.dtype}, and they take float32 and float64"
    return None
