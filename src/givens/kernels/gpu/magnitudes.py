"""|H Wᵀ − W Hᵀ|, the derivatives by which planes are chosen, in one launch."""

import triton
import triton.language as tl

from givens.kernels.gpu.grid import follow


@triton.jit
def magnitudes_kernel(H, W, S, n, SIDE: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr):
    """S ← |H Wᵀ − W Hᵀ|, two mirrored tiles to a program, products in TF32.

    NaN and infinity become 0, so that matching ends; the derivatives of the chosen planes will find
    them.
    """
    follow(EARLY)
    r = tl.program_id(0)
    c = tl.program_id(1)
    if r <= c:
        base = tl.program_id(2).to(tl.int64) * n * n
        rows = r * SIDE + tl.arange(0, SIDE)
        columns = c * SIDE + tl.arange(0, SIDE)
        depth = tl.arange(0, DEPTH)
        at_rows = base + rows[:, None].to(tl.int64) * n + depth[None, :]
        at_columns = base + columns[:, None].to(tl.int64) * n + depth[None, :]
        plus = tl.zeros((SIDE, SIDE), tl.float32)
        minus = tl.zeros((SIDE, SIDE), tl.float32)
        for start in range(0, n, DEPTH):
            deep = (start + depth < n)[None, :]
            here = (rows < n)[:, None] & deep
            there = (columns < n)[:, None] & deep
            h_here = tl.load(H + at_rows + start, mask=here, other=0.0)
            w_there = tl.load(W + at_columns + start, mask=there, other=0.0)
            plus = tl.dot(h_here, tl.trans(w_there), plus, input_precision="tf32")
            w_here = tl.load(W + at_rows + start, mask=here, other=0.0)
            h_there = tl.load(H + at_columns + start, mask=there, other=0.0)
            minus = tl.dot(w_here, tl.trans(h_there), minus, input_precision="tf32")
        a = tl.abs(plus - minus)
        a = tl.where(a < float("inf"), a, 0.0)
        at = base + rows[:, None].to(tl.int64) * n + columns[None, :]
        mirrored = base + columns[:, None].to(tl.int64) * n + rows[None, :]
        if r < c:
            tl.store(S + at, a, mask=(rows < n)[:, None] & (columns < n)[None, :])
            tl.store(S + mirrored, tl.trans(a), mask=(columns < n)[:, None] & (rows < n)[None, :])
        else:
            # On the diagonal the two halves may differ in the last bit; the upper one is kept.
            upper = rows[:, None] < columns[None, :]
            valid = (rows < n)[:, None] & (columns < n)[None, :]
            tl.store(S + at, a, mask=valid & upper)
            tl.store(S + mirrored, tl.trans(a), mask=tl.trans(valid & upper))
