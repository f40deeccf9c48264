"""The nearest codeword of every sub-vector on a device; the distances are never written out.

‖x − c‖² is ‖x‖² + ‖c‖² − 2x·c, and ‖x‖² is the same for every codeword. Both are relative to the
codewords' mean, where they are small, and so is their rounding. The products run on tensor cores,
each float32 as the sum of three TF32 numbers, which keeps the precision of float32.

X (count, subspaces·width), C (subspaces, codewords, width) → codes (count, subspaces).
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from givens import kernels
from givens.kernels.gpu.grid import power_of_2
from givens.kernels.gpu.launch import launch
from givens.kmeans import Quantized, mean_square

# The widest sub-vector: a program holds it whole.
WIDEST = 256
_TOO_WIDE = f"they take sub-vectors of width up to {WIDEST}"


@triton.jit
def load_words(C, words, depth, codewords, width):
    """Codewords of one subspace, (words, depth), padded with 0."""
    inside = (words < codewords)[:, None] & (depth < width)[None, :]
    return tl.load(C + words[:, None] * width + depth[None, :], mask=inside, other=0.0)


@triton.jit
def load_rows(X, count, subspaces, width, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """This program's subspace, rows and axes, with the pointers, the mask and the numbers.

    The numbers are (ROWS, DEPTH), a sub-vector in each row, padded with 0.
    """
    d = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    inside = (rows < count)[:, None] & (depth < width)[None, :]
    at = rows[:, None] * (subspaces * width) + d * width + depth[None, :]
    return d, rows, depth, at, inside, tl.load(X + at, mask=inside, other=0.0)


@triton.jit
def search(x, C, depth, codewords, width, ROWS: tl.constexpr, WORDS: tl.constexpr,
           DEPTH: tl.constexpr):  # fmt: skip
    """The codes of sub-vectors x (ROWS, DEPTH) in the codebook C, and their squared distances."""
    mean = tl.zeros((DEPTH,), tl.float32)
    for start in range(0, codewords, WORDS):
        words = start + tl.arange(0, WORDS)
        mean += tl.sum(load_words(C, words, depth, codewords, width), axis=0)
    mean /= codewords
    x -= mean[None, :]
    best = tl.full((ROWS,), float("inf"), tl.float32)
    code = tl.zeros((ROWS,), tl.int32)
    for start in range(0, codewords, WORDS):
        words = start + tl.arange(0, WORDS)
        c = load_words(C, words, depth, codewords, width) - mean[None, :]
        norm = tl.where(words < codewords, tl.sum(c * c, axis=1), float("inf"))
        distance = norm[None, :] - 2 * tl.dot(x, tl.trans(c), input_precision="tf32x3")
        least = tl.min(distance, axis=1)
        # Ties go to the first, as in argmin; NaN is near to nothing and keeps code 0.
        first = tl.min(tl.where(distance == least[:, None], words[None, :], codewords), axis=1)
        code = tl.where(least < best, first, code)
        best = tl.minimum(best, least)
    return code, tl.maximum(best + tl.sum(x * x, axis=1), 0.0)


@triton.jit
def nearest_kernel(
    X, C, codes, distances, count, subspaces, codewords, width,
    ROWS: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Codes, and squared distances."""
    d, rows, depth, _, _, x = load_rows(X, count, subspaces, width, ROWS, DEPTH)
    C += d * codewords * width
    code, squared = search(x, C, depth, codewords, width, ROWS, WORDS, DEPTH)
    tl.store(codes + rows * subspaces + d, code.to(codes.dtype.element_ty), mask=rows < count)
    tl.store(distances + rows * subspaces + d, squared, mask=rows < count)


@triton.jit
def quantize_kernel(
    X, C, codes, places, chosen, errors, total, usage, share, count, subspaces, codewords, width,
    COUNTED: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Codes, codewords and errors; every choice adds a share to the codeword's usage.

    The mean of the squared errors is added to `total`.
    """
    d, rows, depth, at, inside, x = load_rows(X, count, subspaces, width, ROWS, DEPTH)
    code, _ = search(x, C + d * codewords * width, depth, codewords, width, ROWS, WORDS, DEPTH)
    place = d * codewords + code
    word = tl.load(C + place[:, None] * width + depth[None, :], mask=inside, other=0.0)
    # 0, but NaN where x is not finite.
    word += x - x
    tl.store(chosen + at, word, mask=inside)
    error = x - word
    tl.store(errors + at, error, mask=inside)
    mean = tl.sum(tl.sum(error * error, axis=1), axis=0) / count
    tl.atomic_add(total, mean, sem="relaxed")
    tl.store(codes + rows * subspaces + d, code.to(codes.dtype.element_ty), mask=rows < count)
    tl.store(places + rows * subspaces + d, place, mask=rows < count)
    if COUNTED:
        # Equal shares add up to the same in any order.
        shares = tl.zeros((ROWS,), tl.float32) + share
        tl.atomic_add(usage + place, shares, mask=rows < count, sem="relaxed")


def assign(X: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """`kmeans.assign`: codes and squared distances (N, D) of X (N, D·w), all float32.

    The codes are uint8 where K ≤ 256.
    """
    if codebooks.shape[-1] > WIDEST:
        plainly: Callable[..., tuple[Tensor, Tensor]] = kernels.fall_back("assign", _TOO_WIDE)
        return plainly(X, codebooks)
    codes = _codes(X, codebooks)
    distances = torch.empty(codes.shape, dtype=torch.float32, device=X.device)
    _launch(nearest_kernel, X, codebooks, codes, distances)
    return codes, distances


def quantize(
    X: Tensor, codebooks: Tensor, usage: Tensor | None = None, share: float = 0.0
) -> Quantized:
    """`kmeans.quantize`; the distortion is added up in any order unless torch forbids that."""
    if codebooks.shape[-1] > WIDEST:
        plainly: Callable[..., Quantized] = kernels.fall_back("quantize", _TOO_WIDE)
        return plainly(X, codebooks, usage, share)
    codes, X = _codes(X, codebooks), X.contiguous()
    places = torch.empty(codes.numel(), dtype=torch.int32, device=X.device)
    words, errors, distortion = torch.empty_like(X), torch.empty_like(X), X.new_zeros(())
    found = codes, places, words, errors, distortion
    _launch(quantize_kernel, X, codebooks, *found, usage, share, COUNTED=usage is not None)
    if torch.are_deterministic_algorithms_enabled():
        return Quantized(codes, places, words, errors, mean_square(errors))
    return Quantized(*found)


def _codes(X: Tensor, codebooks: Tensor) -> Tensor:
    D, K, _ = codebooks.shape
    return torch.empty(len(X), D, dtype=torch.uint8 if K <= 256 else torch.int64, device=X.device)


def _launch(kernel: Any, X: Tensor, codebooks: Tensor, *parts: Any, **constants: bool) -> None:
    D, K, w = codebooks.shape
    depth = max(16, power_of_2(w))
    rows = 128 if depth <= 64 else 64
    grid = -(-len(X) // rows), D
    launch(
        kernel, grid, X.device,
        X.contiguous(), codebooks.contiguous(), *parts, len(X), D, K, w,
        **constants, ROWS=rows, WORDS=64, DEPTH=depth, num_warps=4, num_stages=2, together=False,
    )  # fmt: skip
