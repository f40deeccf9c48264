"""The launches of a step with a size for each plane, and the buffers between them."""

import math
from typing import Any

import torch
import triton
from torch import Tensor

from givens.kernels.gpu.choosing import ROUNDS, fill_kernel, list_kernel, rounds_kernel
from givens.kernels.gpu.grid import counters, power_of_2, programs_at_once, shuffle_bits
from givens.kernels.gpu.launch import launch
from givens.kernels.gpu.moments import check_kernel, moments_kernel, settle_kernel
from givens.kernels.gpu.sweep import angles_kernel, gather_kernel, tidy_kernel

# The widest matrix whose product G Wᵀ is one of float32.
PLAIN = 1024
# Numbers of a matrix that a program turns.
HELD = 32768


class Planes:
    """The buffers of one matrix or stack on its device, and the launches that use them."""

    def __init__(self, W: Tensor, turns: int) -> None:
        n, device = W.shape[-1], W.device
        self.n, self.batch, self.turns, self.device = n, W.numel() // n**2, turns, device
        total = self.batch * n
        self.programs = programs_at_once(device, 1, triton.cdiv(W.numel(), 4096))
        # A product in float32 is torch's own; a larger one takes TF32.
        self.fused = n > PLAIN
        self.side, self.depth = (128, 32) if self.fused else (32, 32)
        self.tiles = triton.cdiv(n, self.side)
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
        self.waiting = counters(device)

    def check(self, G: Tensor, lr: Any, found_inf: Tensor | None, limit: float) -> None:
        """Look whether the gradient and the rate are good; all that follows asks for it."""
        launch(
            check_kernel, (self.programs,), self.device,
            G, self.flags, found_inf, lr, G.numel(), limit,
            FOUND=found_inf is not None, RATE_ON_DEVICE=isinstance(lr, Tensor), BLOCK=2048,
            together=False,
        )  # fmt: skip

    def differentiate(self, W: Tensor, G: Tensor, state: dict[str, Any], how: Any) -> None:
        """D from both moments of G Wᵀ, which are updated."""
        beta1, beta2 = how.betas
        if not self.fused:
            torch.matmul(G.view_as(self.D), W.view_as(self.D).mT, out=self.D)
        launch(
            moments_kernel, (self.tiles, self.tiles, self.batch), self.device,
            G, W, self.D, state.get("planes"), state.get("ambient"), self.D, state.get("foresight"),
            self.misses, self.rates, state["step"], how.lr, self.flags, self.programs,
            self.n, how.share, beta1, beta2, math.sqrt(beta2), math.sqrt(1 - beta2),
            _log(beta1), _log(beta2),
            ADAPT=how.adapt is not None, RATE_ON_DEVICE=isinstance(how.lr, Tensor),
            FUSED=self.fused, SIDE=self.side, DEPTH=self.depth, ALL=power_of_2(self.programs),
            num_warps=8 if self.side == 128 else 4, together=False,
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
        """Use these partners (b, turns, n), or the same (turns, n) for all, with angles by D."""
        self.partners.copy_(partners)
        launch(
            angles_kernel, (triton.cdiv(self.n, 256), self.turns, self.batch), self.device,
            self.D, self.partners, self.cos, self.sin, self.rates, self.n, self.turns,
            BLOCK=256, together=False,
        )  # fmt: skip

    def turn(self, W: Tensor, state: dict[str, Any], how: Any) -> None:
        """Turn W and the ambient mean, and count the step."""
        rows = max(16, power_of_2(self.n))
        columns = max(1, min(8, HELD // rows))
        adapt = how.adapt is not None
        launch(
            gather_kernel, (triton.cdiv(self.n, columns), 1 + adapt, self.batch), self.device,
            W, state.get("ambient"), self.partners, self.cos, self.sin, self.flags, self.programs,
            state.get("foresight"), self.misses, state["step"], state["skipped"],
            self.batch, self.n, self.turns, self.tiles, how.betas[1],
            ADAPT=adapt, ROWS=rows, COLUMNS=columns, ALL=power_of_2(self.programs),
            TILES=power_of_2(self.tiles), num_warps=max(1, min(16, rows * columns // 1024)),
            together=False,
        )  # fmt: skip

    def settle(self, state: dict[str, Any], how: Any) -> None:
        """Count the step, where `turn` does not."""
        launch(
            settle_kernel, (1,), self.device,
            state.get("foresight"), self.misses, state["step"], state["skipped"], self.flags,
            self.programs, self.batch, self.n, self.tiles, how.betas[1],
            ADAPT=how.adapt is not None, ALL=power_of_2(self.programs),
            TILES=power_of_2(self.tiles), num_warps=1, together=False,
        )  # fmt: skip

    def tidy(self, W: Tensor, step: Tensor, how: Any) -> None:
        """Undo what rounding does, if it is time."""
        launch(
            tidy_kernel, (self.n // 2, self.batch), self.device,
            W, step, self.flags, self.programs, self.n, how.seed, how.stream, how.tidy_every,
            BITS=shuffle_bits(self.n), BLOCK=min(power_of_2(self.n), 4096),
            ALL=power_of_2(self.programs), num_warps=max(1, min(8, self.n // 512)),
            together=False,
        )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
