"""The nearest codeword of every sub-vector on a device; the distances are never written out.

‖x − c‖² is ‖x‖² + ‖c‖² − 2x·c, and ‖x‖² is the same for every codeword. Both are taken from the
codewords' mean, where they are small and so is what rounding does. The products run on tensor
cores, each float32 as the sum of three TF32 numbers, which keeps the precision of float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The widest sub-vector: a program holds it whole.
WIDEST = 256


@triton.jit
def nearest_kernel(
    X, C, means, norms, codes, distances, count, subspaces, codewords, width,
    ROWS: tl.constexpr, WORDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """X (count, subspaces·width), C (subspaces, codewords, width) → codes (count, subspaces)."""
    d = tl.program_id(1)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    deep = depth < width
    at = rows[:, None] * (subspaces * width) + d * width + depth[None, :]
    x = tl.load(X + at, mask=(rows < count)[:, None] & deep[None, :], other=0.0)
    x -= tl.load(means + d * width + depth, mask=deep, other=0.0)[None, :]
    C += d * codewords * width
    best = tl.full((ROWS,), float("inf"), tl.float32)
    code = tl.zeros((ROWS,), tl.int32)
    for start in range(0, codewords, WORDS):
        words = start + tl.arange(0, WORDS)
        inside = words < codewords
        at_words = words[:, None] * width + depth[None, :]
        c = tl.load(C + at_words, mask=inside[:, None] & deep[None, :], other=0.0)
        norm = tl.load(norms + d * codewords + words, mask=inside, other=float("inf"))
        distance = norm[None, :] - 2 * tl.dot(x, tl.trans(c), input_precision="tf32x3")
        least = tl.min(distance, axis=1)
        # The first of equals, as argmin has it; what is NaN is near to nothing and keeps code 0.
        first = tl.min(tl.where(distance == least[:, None], words[None, :], codewords), axis=1)
        code = tl.where(least < best, first, code)
        best = tl.minimum(best, least)
    at_codes = rows * subspaces + d
    tl.store(codes + at_codes, code.to(codes.dtype.element_ty), mask=rows < count)
    squared = tl.maximum(best + tl.sum(x * x, axis=1), 0.0)
    tl.store(distances + at_codes, squared, mask=rows < count)


def nearest(X: Tensor, codebooks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and squared distances (N, D) of X (N, D·w) in codebooks (D, K, w), all float32.

    The codes are uint8 where K ≤ 256.
    """
    D, K, w = codebooks.shape
    means = codebooks.mean(dim=1)
    C = (codebooks - means[:, None]).contiguous()
    codes = torch.empty(len(X), D, dtype=torch.uint8 if K <= 256 else torch.int64, device=X.device)
    distances = torch.empty(len(X), D, device=X.device)
    depth = max(16, triton.next_power_of_2(w))
    rows = 128 if depth <= 64 else 64
    nearest_kernel[(triton.cdiv(len(X), rows), D)](
        X.contiguous(), C, means, C.square().sum(dim=-1), codes, distances, len(X), D, K, w,
        ROWS=rows, WORDS=64, DEPTH=depth, num_warps=4, num_stages=2,
    )  # fmt: skip
    return codes, distances
