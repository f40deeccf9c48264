"""Helpers of the Triton kernels: a barrier, the hash, the random pairing."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from givens.kernels import GOLDEN, SHUFFLE_BITS, SHUFFLE_ROUNDS

ROUNDS = tl.constexpr(SHUFFLE_ROUNDS)
STRIDE = tl.constexpr(GOLDEN)


@triton.jit
def follow(EARLY: tl.constexpr):
    """Wait for the previous kernel, which may still be running, and let the next one start."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def arrive(counter):
    """Signal the `barrier` that this program's writes are visible, without waiting."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def barrier(counter, members, FENCE: tl.constexpr = False):
    """Wait until that many programs have arrived; the counter only grows.

    Other programs' writes may then be read past the first-level cache (".cg"), or in any way after
    a fence.
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
def cos_and_sin(theta):
    """Cosine and sine whose squares sum to 1 more accurately than the device's own."""
    c = tl.cos(theta)
    s = tl.sin(theta)
    unit = 1.5 - 0.5 * (c * c + s * s)
    return c * unit, s * unit


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
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_2(least: int) -> int:
    """The first power of two from a number on; Triton's own takes as long as an operation."""
    return 1 << (least - 1).bit_length()


def counters(device: torch.device, groups: int = 1) -> Tensor:
    """A counter for the `barrier` of each group, which must always have as many members."""
    return torch.zeros(groups, dtype=torch.int64, device=device)
