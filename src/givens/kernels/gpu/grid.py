"""What the Triton kernels share: how they start, a barrier, the hash, the random pairing."""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from givens.kernels import GOLDEN, SHUFFLE_BITS, SHUFFLE_ROUNDS

ROUNDS = tl.constexpr(SHUFFLE_ROUNDS)
STRIDE = tl.constexpr(GOLDEN)


@triton.jit
def follow(EARLY: tl.constexpr):
    """Wait for the kernel ahead, before which this one was started, and let the next one start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def arrive(counter):
    """Tell those at the `barrier` that what this program wrote before is there, without waiting."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def barrier(counter, members, FENCE: tl.constexpr = False):
    """Wait until so many programs are here; the counter only ever grows.

    What others wrote before it may then be read past the first-level cache (".cg"), or in any way
    after a fence.
    """
    if members > 1:
        tl.debug_barrier()
        ticket = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        goal = (ticket // members + 1) * members
        seen = ticket + 1
        while seen < goal:
            seen = tl.load(counter, volatile=True)
        if FENCE:
            tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def hashed(x):
    """The twin of `pairing._hash`, on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def unhashed(x):
    """The inverse of `hashed`: each multiplication by its inverse modulo 2³²."""
    x = (x ^ (x >> 16)) * 0x7ED1B41D
    x = (x ^ (x >> 13) ^ (x >> 26)) * 0xA5CB9243
    return x ^ (x >> 16)


@triton.jit
def stream_key(seed, step, stream):
    """The twin of `pairing._key`; seed and step are int64."""
    key = hashed((seed * 0).to(tl.uint32) + STRIDE ^ seed.to(tl.uint32))
    key = hashed(key + STRIDE ^ (seed >> 32).to(tl.uint32))
    key = hashed(key + STRIDE ^ step.to(tl.uint32))
    key = hashed(key + STRIDE ^ (step >> 32).to(tl.uint32))
    return hashed(key + STRIDE ^ stream.to(tl.uint32))


@triton.jit
def permuted(x, size, key, BITS: tl.constexpr):
    """The twin of `pairing._permute`, of a block of numbers."""
    x = shuffled(x.to(tl.uint32), key, BITS)
    while tl.max((x >= size).to(tl.int32), axis=0) > 0:
        x = tl.where(x >= size, shuffled(x, key, BITS), x)
    return x.to(tl.int32)


@triton.jit
def shuffled(x, key, BITS: tl.constexpr):
    """A permutation of the words of so many bits."""
    for _ in tl.static_range(ROUNDS):
        factor = hashed(key + STRIDE) | 1
        key = key + STRIDE + STRIDE
        x = (x * factor + hashed(key)) & ((1 << BITS) - 1)
        x = x ^ (x >> ((BITS + 1) // 2))
    return x


def shuffle_bits(size: int) -> int:
    """How many bits the words of a permutation of `size` have."""
    return max(SHUFFLE_BITS, (size - 1).bit_length())


def programs_at_once(device: torch.device, each: int, most: int) -> int:
    """So many programs on each processor of the device, but not more than there is work for.

    One under the interpreter, which runs one after another and would wait at a barrier for ever.
    """
    return min(each * _processors(device), most) if device.type == "cuda" else 1


@functools.cache
def _follows(device: torch.device) -> bool:
    """Whether a kernel can be started before the one ahead of it has ended.

    From Hopper on, with a Triton that can.
    """
    able = device.type == "cuda" and hasattr(tl.extra.cuda, "gdc_wait")
    return able and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    *arguments: Any,
    together: bool = True,
    **options: Any,
) -> None:
    """Start a kernel; `together` if its programs wait for each other, so must all run at once.

    To find the compiled one for its arguments, Triton takes longer than most of these kernels run.
    What it has found is kept by all that it looks at, and started as it would start it.
    """
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        # Triton launches on the current device, wherever the arguments are.
        with torch.cuda.device(device):
            launch(kernel, grid, device, *arguments, together=together, **options)
        return
    together = together and math.prod(grid) > 1
    key = (kernel.fn, device, together, *map(_kind, arguments), *options, *options.values())
    found = _found.get(key)
    if found is None:
        _find(key, kernel, grid, device, arguments, together, options)
        return
    compiled, constants = found
    stream = driver.active.get_current_stream(device.index)
    # The three are for hooks of Triton's own profiler, which is told of first launches alone.
    how = compiled.function, compiled.packed_metadata, None, None, None
    compiled.run(*(*grid, 1, 1)[:3], stream, *how, *arguments, *constants)


# Compiled kernels, and their constants in order.
_found: dict[Any, tuple[Any, list[Any]]] = {}


def _find(
    key: Any,
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    arguments: Any,
    together: bool,
    options: Any,
) -> None:
    """Start a kernel by Triton itself, and keep what it has compiled."""
    names = kernel.arg_names[len(arguments) :]
    if "EARLY" in names:
        options["EARLY"] = _follows(device)
    if device.type == "cuda" and together:
        options["launch_cooperative_grid"] = True
    if options.get("EARLY"):
        options["launch_pdl"] = True
    compiled = kernel[grid](*arguments, **options)
    # The interpreter compiles nothing.
    if compiled is not None:
        _found[key] = compiled, [options[name] for name in names]


def _kind(argument: Any) -> Any:
    """What Triton compiles for: types, which pointers and numbers 16 divides, which number is 1."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return argument == 1 or (argument % 16 == 0, argument.bit_length() > 31)
    return type(argument)


def power_of_2(least: int) -> int:
    """The first power of two from a number on; Triton's own takes as long as an operation."""
    return 1 << (least - 1).bit_length()


def counters(device: torch.device, groups: int = 1) -> Tensor:
    """A counter for the `barrier` of each group, which must always have as many members."""
    return torch.zeros(groups, dtype=torch.int64, device=device)
