"""The launches of a step with two moments for each plane, and the buffers between them."""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from givens.kernels.gpu.choosing import ROUNDS, fill_kernel, list_kernel, rounds_kernel
from givens.kernels.gpu.exponential import finish_kernel, length_kernel
from givens.kernels.gpu.grid import counters, power_of_2, programs_at_once, shuffle_bits
from givens.kernels.gpu.launch import launch
from givens.kernels.gpu.moments import check_kernel, moments_kernel, product_kernel
from givens.kernels.gpu.sweep import angles_kernel, tidy_kernel, turn_all_kernel

# The widest matrix whose product G Wᵀ has float32 precision; wider ones use TF32.
PLAIN = 1024
# A tile of that product, the depth of one read, and how many tiles share their reads.
TILE = {"SIDE": 32, "WIDE": 32, "DEPTH": 32, "TOGETHER": 8, "num_warps": 2, "num_stages": 3}
WIDE_TILE = {"SIDE": 128, "WIDE": 256, "DEPTH": 32, "TOGETHER": 8, "num_warps": 8, "num_stages": 3}
# The columns that a program turns, and the maximum of rows at a time.
TURN = {"ROWS": 512, "COLUMNS": 8, "num_warps": 8}
WIDE_TURN = {"ROWS": 256, "COLUMNS": 32, "num_warps": 32}
# Numbers of the gradient that a program checks at a time.
CHECKED = 4096
# The side of a tile whose moments a program updates.
SIDE = 32


class Planes:
    """The buffers of one matrix or stack on its device, and the launches that use them."""

    def __init__(self, W: Tensor, turns: int) -> None:
        n, device = W.shape[-1], W.device
        self.n, self.batch, self.turns, self.device = n, W.numel() // n**2, turns, device
        total = self.batch * n
        self.programs = programs_at_once(device, 4, triton.cdiv(W.numel(), CHECKED))
        self.tiles = triton.cdiv(n, SIDE)
        # 2K of them; a list is walked in quarters.
        self.listed = max(4, power_of_2(2 * turns))
        whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
        real: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.flags = torch.zeros(self.programs, **whole)
        self.D = torch.empty(self.batch, n, n, **real)
        self.rates = torch.zeros((), **real)
        shape = (self.batch, self.tiles, self.tiles, 2)
        self.misses = torch.zeros(shape, dtype=torch.float64, device=device)
        self.lists, self.asked = torch.empty(2, total * self.listed, **whole)
        self.free = torch.empty(total, dtype=torch.int64, device=device)
        self.wins = torch.empty(total * turns, **whole)
        self.partners = torch.empty(self.batch, turns, n, **whole)
        self.cos, self.sin = torch.empty(2, self.batch, turns, n, **real)
        # Of the turn in all planes at once.
        self.scalars, self.vectors = torch.zeros(self.batch, 2, **real), torch.empty(2, n, **real)
        self.peaks = torch.empty(programs_at_once(device, 1, triton.cdiv(n, 4)), **real)
        self.waiting = counters(device)

    def check(self, G: Tensor, how: Any, found_inf: Tensor | None, limit: float) -> None:
        """Check the gradient and the rate; all following launches depend on the result."""
        launch(
            check_kernel, (self.programs,), self.device,
            G, self.flags, found_inf, how.lr, G.numel(), limit,
            FOUND=found_inf is not None, RATE_ON_DEVICE=isinstance(how.lr, Tensor),
            RAW=how.adapt is None, BLOCK=CHECKED, num_warps=8, together=False,
        )  # fmt: skip

    def differentiate(self, W: Tensor, G: Tensor, state: dict[str, Any], how: Any) -> None:
        """D from both moments of G Wᵀ, which are updated."""
        beta1, beta2 = how.betas
        tile = TILE if self.n <= PLAIN else WIDE_TILE
        tiles = triton.cdiv(self.n, tile["SIDE"]) * triton.cdiv(self.n, tile["WIDE"])
        launch(
            product_kernel, (tiles, self.batch), self.device, G, W, self.D, self.n,
            PRECISION="tf32x3" if self.n <= PLAIN else "tf32", **tile, together=False,
        )  # fmt: skip
        launch(
            moments_kernel, (self.tiles, self.tiles, self.batch), self.device,
            self.D, state.get("planes"), state.get("ambient"), self.D, state.get("foresight"),
            self.misses, self.rates, state["step"], how.lr, self.flags, self.programs,
            self.n, how.share, beta1, beta2, math.sqrt(beta2), math.sqrt(1 - beta2),
            _log(beta1), _log(beta2),
            ADAPT=how.adapt is not None, RATE_ON_DEVICE=isinstance(how.lr, Tensor),
            SIDE=SIDE, ALL=power_of_2(self.programs), num_warps=4, together=False,
        )  # fmt: skip

    def choose(self, step: Tensor, seed: int, stream: int) -> None:
        """Pairings by |D|, with their angles; D is used up."""
        n, turns = self.n, self.turns
        tables = self.partners, self.cos, self.sin
        block = max(16, power_of_2(n))
        launch(
            list_kernel, (n, self.batch), self.device,
            self.D, self.lists, self.free, self.wins, *tables, n, turns,
            LISTED=self.listed, TURNS=power_of_2(turns), INDEX=block.bit_length() - 1, BLOCK=block,
            num_warps=max(1, min(8, block // 512)), together=False,
        )  # fmt: skip
        axes = max(1, min(4, 4096 // self.listed**2))
        launch(
            rounds_kernel,
            (programs_at_once(self.device, 1, triton.cdiv(self.batch * n, axes)),), self.device,
            self.D, self.lists, self.asked, self.free, self.wins, *tables, self.rates,
            self.waiting, self.batch, n, turns, ROUNDS,
            LISTED=self.listed, AXES=axes, num_warps=4,
        )  # fmt: skip
        members = triton.cdiv(n, turns)
        side = 16 if members <= 16 else 32 if members <= 32 else 64
        launch(
            fill_kernel, (turns * turns, triton.cdiv(members, side), self.batch), self.device,
            self.D, self.free, *tables, self.rates, step, n, turns, seed, stream,
            SIDE=side, BITS=shuffle_bits(n), num_warps=side // 16, together=False,
        )  # fmt: skip

    def take(self, partners: Tensor) -> None:
        """Use these partners (b, turns, n), or (turns, n) for all matrices, with angles by D."""
        self.partners.copy_(partners)
        launch(
            angles_kernel, (triton.cdiv(self.n, 256), self.turns, self.batch), self.device,
            self.D, self.partners, self.cos, self.sin, self.rates, self.n, self.turns,
            BLOCK=256, together=False,
        )  # fmt: skip

    def turn(self, W: Tensor, state: dict[str, Any], how: Any) -> None:
        """Turn W and the ambient mean, and count the step."""
        shape = TURN if self.n <= PLAIN else WIDE_TURN
        rows = max(16, min(power_of_2(self.n), shape["ROWS"]))
        adapt = how.adapt is not None
        launch(
            turn_all_kernel,
            (triton.cdiv(self.n, shape["COLUMNS"]), 1 + adapt, self.batch), self.device,
            W, state.get("ambient"), self.partners, self.cos, self.sin, self.flags, self.programs,
            state.get("foresight"), self.misses, state["step"], state["skipped"],
            self.batch, self.n, self.turns, self.tiles, how.betas[1],
            ADAPT=adapt, ROWS=rows, COLUMNS=shape["COLUMNS"], ALL=power_of_2(self.programs),
            TILES=power_of_2(self.tiles), together=False,
            num_warps=max(1, shape["num_warps"] * rows // shape["ROWS"]),
        )  # fmt: skip

    def exponentiate(self, W: Tensor, state: dict[str, Any], how: Any) -> None:
        """Turn W and the ambient mean in all planes at once, and count the step."""
        n, adapt = self.n, how.adapt is not None
        block = max(16, power_of_2(n))
        rows = max(1, min(8192 // block, power_of_2(triton.cdiv(n, self.peaks.numel()))))
        launch(
            length_kernel, (self.peaks.numel(),), self.device,
            self.D, self.vectors, self.peaks, self.scalars, self.rates, self.waiting,
            self.batch, n,
            ROWS=rows, BLOCK=block, ALL=power_of_2(self.peaks.numel()),
            num_warps=max(1, min(8, rows * block // 512)),
        )  # fmt: skip
        scale, a = self.scalars[:, :, None, None].unbind(1)
        stack = W.view(-1, n, n)
        X = scale * self.D
        # One product for both: small ones leave most of the device idle.
        follower = state["ambient"].view_as(stack) if adapt else None
        both = stack if follower is None else torch.cat([stack, follower], -1)
        moved = X @ both
        XW = moved[..., :n]
        Y = torch.addcmul(stack + XW, a, X @ XW)
        Y = torch.baddbmm(Y, Y @ Y.mT, Y, beta=1.5, alpha=-0.5)
        size = W.numel()
        launch(
            finish_kernel, (triton.cdiv(size, 2048),), self.device,
            W, Y, follower, moved, self.flags, self.programs,
            state.get("foresight"), self.misses, state["step"], state["skipped"],
            size, self.batch, n, moved.shape[-1], self.tiles, how.betas[1],
            ADAPT=adapt, ALL=power_of_2(self.programs), TILES=power_of_2(self.tiles),
            BLOCK=2048, together=False,
        )  # fmt: skip

    def tidy(self, W: Tensor, step: Tensor, how: Any) -> None:
        """Repair rounding errors, at intervals."""
        launch(
            tidy_kernel, (self.n // 2, self.batch), self.device,
            W, step, self.flags, self.programs, self.n, how.seed, how.stream, how.tidy_every,
            BITS=shuffle_bits(self.n), BLOCK=min(power_of_2(self.n), 4096),
            ALL=power_of_2(self.programs), num_warps=max(1, min(8, power_of_2(self.n) // 512)),
            together=False,
        )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
