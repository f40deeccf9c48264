"""How loops are compiled for a CPU, and the hash that they share with the GPU kernels.

The loops are serial: at typical sizes a matrix fits one core's cache, and a second core would move
it back and forth.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

# Sums may be reordered into vector lanes; NaN and infinity keep their meaning.
SUMS = {"reassoc", "contract", "nsz"}
WORD = np.uint32


def compiled(fastmath: set[str] | bool = False) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with a cache on disk, if there is a writable folder for it."""

    def decorate(function: Callable[..., Any]) -> Any:
        jitted = numba.njit(fastmath=fastmath, error_model="numpy", nogil=True)(function)
        # Without a writable folder every process compiles for itself.
        with contextlib.suppress(RuntimeError):
            jitted.enable_caching()
        return jitted

    return decorate


@compiled()
def hashed(x: np.uint32) -> np.uint32:
    """The twin of `pairing._hash`."""
    x = WORD((x ^ (x >> WORD(16))) * WORD(0x85EBCA6B))
    x = WORD((x ^ (x >> WORD(13))) * WORD(0xC2B2AE35))
    return WORD(x ^ (x >> WORD(16)))
