"""How the Triton kernels start.

The public call, `kernel[grid](...)`, looks at every argument to find the kernel that was compiled
for its kind, which takes the host longer than most of these kernels run. So what it found is kept,
by all that it looks at, and started again as Triton itself would start it. That needs parts of
Triton that are not public. They were compared with Triton's own for the versions in `VERIFIED`
(tests/kernels/test_launch.py); with any other version every start is the public call.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

# The first and the last version of Triton whose private parts are known.
VERIFIED = (3, 3), (3, 9)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    *arguments: Any,
    together: bool = True,
    **options: Any,
) -> None:
    """Start a kernel; `together` if its programs wait for each other, so must all run at once."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        # Triton launches on the current device, wherever the arguments are.
        with torch.cuda.device(device):
            launch(kernel, grid, device, *arguments, together=together, **options)
        return
    together = together and math.prod(grid) > 1
    if not is_verified(triton.__version__):
        _call(kernel, grid, device, arguments, together, options)
        return
    key = (kernel.fn, device, together, *map(_kind, arguments), *options, *options.values())
    found = _found.get(key)
    if found is None:
        compiled = _call(kernel, grid, device, arguments, together, options)
        # The interpreter compiles nothing.
        if compiled is not None:
            _found[key] = compiled, [options[name] for name in kernel.arg_names[len(arguments) :]]
        return
    compiled, constants = found
    stream = driver.active.get_current_stream(device.index)
    # The three are for hooks of Triton's own profiler, which is told of first launches alone.
    how = compiled.function, compiled.packed_metadata, None, None, None
    compiled.run(*(*grid, 1, 1)[:3], stream, *how, *arguments, *constants)


@functools.cache
def is_verified(version: str) -> bool:
    """Whether the private parts of this version of Triton are known."""
    first, last = VERIFIED
    major, minor, *_ = version.split(".")
    return first <= (int(major), int(minor)) <= last


# Compiled kernels, and their constants in order.
_found: dict[Any, tuple[Any, list[Any]]] = {}


def _call(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    arguments: Any,
    together: bool,
    options: dict[str, Any],
) -> Any:
    """Start a kernel by Triton's public call; what it compiled. Adds what is left to `options`."""
    if "EARLY" in kernel.arg_names[len(arguments) :]:
        options["EARLY"] = _starts_early(device)
    extra = {}
    if device.type == "cuda" and together:
        extra["launch_cooperative_grid"] = True
    if options.get("EARLY"):
        extra["launch_pdl"] = True
    return kernel[grid](*arguments, **options, **extra)


@functools.cache
def _starts_early(device: torch.device) -> bool:
    """Whether a kernel can be started before the one ahead of it has ended.

    From Hopper on, with a Triton that can.
    """
    able = device.type == "cuda" and hasattr(tl.extra.cuda, "gdc_wait")
    return able and torch.cuda.get_device_capability(device) >= (9, 0)


def _kind(argument: Any) -> Any:
    """What Triton compiles for: types, which pointers and numbers 16 divides, which number is 1."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return argument == 1 or (argument % 16 == 0, argument.bit_length() > 31)
    return type(argument)
