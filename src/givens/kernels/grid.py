"""What the Triton kernels share: a barrier across the grid, the hash, the random pairing."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from givens.kernels import GOLDEN, SHUFFLE_BITS, SHUFFLE_ROUNDS

ROUNDS = tl.constexpr(SHUFFLE_ROUNDS)
STRIDE = tl.constexpr(GOLDEN)


@triton.jit
def barrier(counter, FENCE: tl.constexpr = False):
    """Wait until every program of the grid is here; the counter only ever grows.

    What others wrote before it may then be read past the first-level cache (".cg"), or in any way
    after a fence.
    """
    programs = tl.num_programs(0)
    if programs > 1:
        tl.debug_barrier()
        ticket = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        goal = (ticket // programs + 1) * programs
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
    """The twin of `pairing._permute`, of one number."""
    x = shuffled(x.to(tl.uint32), key, BITS)
    while x >= size:
        x = shuffled(x, key, BITS)
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
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(
    kernel: Any, programs: int, device: torch.device, *arguments: Any, **options: Any
) -> None:
    """Start a kernel whose programs wait for each other, so they must all run at once."""
    if device.type == "cuda":
        options["launch_cooperative_grid"] = programs > 1
    kernel[(programs,)](*arguments, **options)


def counter(device: torch.device) -> Tensor:
    """A counter for `barrier`, for kernels of one grid size."""
    return torch.zeros((), dtype=torch.int64, device=device)
