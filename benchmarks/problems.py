"""The problems of `learn.py`: each asks for one orthogonal matrix R, which is learned as W = Rᵀ.

A problem has a start, batches, the loss of a batch and a figure of merit, lower is better. No loss
synchronises with the host, so that a CUDA graph can hold a whole training step.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, one_hot

import givens

BATCH, HELD_OUT = 256, 4096


class Problem:
    """Draws from `seed` alone, on a CPU, and is the same on every device."""

    parameters: tuple[nn.Parameter, ...] = ()
    """What Adam learns beside W."""
    start: Tensor
    """W before the first step."""

    def __init__(self, n: int, seed: int, device: str) -> None:
        self.n, self.seed, self.device = n, seed, device
        self.draws = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, generator=self.draws)

    def place(self, *names: str) -> None:
        """Move attributes to the device."""
        for name in names:
            setattr(self, name, getattr(self, name).to(self.device))

    def draw_batch(self) -> tuple[Tensor, ...]:
        """What the loss takes beside W; nothing where it looks at all of the data."""
        return ()

    def loss(self, W: Tensor, *batch: Tensor) -> Tensor:
        """What is differentiated."""
        raise NotImplementedError

    def figure(self, W: Tensor) -> Tensor:
        """How well W does, on data that no step has seen."""
        return self.loss(W)


class Procrustes(Problem):
    """y = x R* with R* a random rotation, x of axes that fall in size from 1 to 1/10.

    Figure: ‖x R − y‖²/‖y‖² of a held-out batch. W starts at the identity.
    """

    def __init__(self, n: int, seed: int, device: str) -> None:
        super().__init__(n, seed, device)
        self.start = torch.eye(n)
        self.sizes = torch.logspace(0, -1, n)
        self.target = givens.random_rotation(n, seed + 1).mT
        self.held_out = self.normal(HELD_OUT, n) * self.sizes
        self.place("start", "target", "held_out")

    def draw_batch(self) -> tuple[Tensor, ...]:
        """A batch of x."""
        return ((self.normal(BATCH, self.n) * self.sizes).to(self.device),)

    def loss(self, W: Tensor, *batch: Tensor) -> Tensor:
        """‖x R − x R*‖²/‖x‖²."""
        (x,) = batch
        return linear(x, W - self.target).square().sum() / x.square().sum()

    def figure(self, W: Tensor) -> Tensor:
        """The held-out loss."""
        return self.loss(W, self.held_out)


class LowBit(Problem):
    """Weights M of 1,024 rows, rounded to three bits as M R.

    Figure: the part of M that rounding loses. W starts at a random rotation.
    """

    rows, levels = 1024, 3

    def __init__(self, n: int, seed: int, device: str) -> None:
        super().__init__(n, seed, device)
        self.start = givens.random_rotation(n, seed)
        mixing = self.normal(n, n) * torch.logspace(0, -1.5, n)
        self.M = self.normal(self.rows, n) @ mixing
        self.M[:, torch.randperm(n, generator=self.draws)[:4]] *= 8
        self.place("start", "M")

    def loss(self, W: Tensor, *batch: Tensor) -> Tensor:
        """What rounding to −3…3 times a row's scale loses; the integers are held fixed."""
        Y = linear(self.M, W)
        scale = Y.abs().amax(1, keepdim=True) / self.levels
        integers = (Y / scale).round().detach()
        return (Y - integers * scale).square().sum() / Y.detach().square().sum()


class FarRotation(Problem):
    """A student that must find a far rotation: y = 1.4·sin(2 x R*) V, with V known, R* random.

    Figure: the mean squared error on held-out x. W starts at the identity.
    """

    frequency = 2.0

    def __init__(self, n: int, seed: int, device: str) -> None:
        super().__init__(n, seed, device)
        self.start = torch.eye(n)
        self.V = 1.4 * self.normal(n, n) / n**0.5
        self.target = givens.random_rotation(n, seed + 1).mT
        self.held_out = self.normal(HELD_OUT, n)
        self.place("start", "V", "target", "held_out")
        self.answers = self.answer(self.target, self.held_out)

    def answer(self, W: Tensor, x: Tensor) -> Tensor:
        """1.4·sin(2 x R) V."""
        return (self.frequency * linear(x, W)).sin() @ self.V

    def draw_batch(self) -> tuple[Tensor, ...]:
        """A batch of x, and what the teacher says."""
        x = self.normal(BATCH, self.n).to(self.device)
        return x, self.answer(self.target, x)

    def loss(self, W: Tensor, *batch: Tensor) -> Tensor:
        """The mean squared error."""
        x, y = batch
        return (self.answer(W, x) - y).square().mean()

    def figure(self, W: Tensor) -> Tensor:
        """The held-out loss."""
        return self.loss(W, self.held_out, self.answers)


class Codebooks(Problem):
    """A rotation before codebooks that stay: 8 axes a subspace, 64 codewords, of correlated axes.

    The codebooks are fitted once, at a random rotation, which is the start. Figure: the distortion
    of held-out vectors over that of the start.
    """

    width, codewords, vectors = 8, 64, 8192

    def __init__(self, n: int, seed: int, device: str) -> None:
        super().__init__(n, seed, device)
        mixing = self.normal(n, n) * torch.logspace(0, -1.5, n)
        self.data = self.normal(self.vectors + HELD_OUT, n) @ mixing
        self.data /= self.data.square().sum(1).mean().sqrt()
        R = givens.random_rotation(n, seed)
        fitted = givens.fit(
            self.data[: self.vectors],
            n // self.width,
            codewords=self.codewords,
            method="pq",
            init=R,
            seed=seed,
            max_iter=12,
        )
        self.start = R.mT.contiguous()
        self.C = fitted.codebooks
        self.lengths = self.C.square().sum(2)[:, None]
        self.base = torch.ones(())
        self.base = self.figure(self.start)
        self.place("start", "data", "C", "lengths", "base")

    def draw_batch(self) -> tuple[Tensor, ...]:
        """A batch of the vectors."""
        drawn = torch.randint(self.vectors, (BATCH,), generator=self.draws)
        return (self.data[drawn.to(self.device)],)

    def loss(self, W: Tensor, *batch: Tensor) -> Tensor:
        """The mean squared distance to the nearest codewords."""
        Y = linear(batch[0], W).unflatten(1, (-1, self.width)).transpose(0, 1)
        with torch.no_grad():
            codes = torch.baddbmm(self.lengths, Y, self.C.mT, alpha=-2).argmin(2)
            nearest = self.C.gather(1, codes[..., None].expand(-1, -1, self.width))
        return (Y - nearest).square().sum() / len(batch[0])

    def figure(self, W: Tensor) -> Tensor:
        """The held-out distortion, relative."""
        return self.loss(W, self.data[self.vectors :]) / self.base


class Copying(Problem):
    """The copying network of examples/orthogonal_rnn.py: ten symbols come back after 50 blanks.

    Figure: the share of the symbols that come back wrong, over the 50 steps before. Each step has a
    new batch, and looks at it before it learns from it.
    """

    symbols, copied, blank, batch = 8, 10, 50, 64

    def __init__(self, n: int, seed: int, device: str) -> None:
        super().__init__(n, seed, device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            nn.Linear(n, n, bias=False)
            hear, say = nn.Embedding(self.symbols + 2, n), nn.Linear(n, self.symbols + 1)
            angles = torch.pi * (2 * torch.rand(n // 2) - 1)
        self.start = givens.rotate_pairs_(torch.eye(n), torch.arange(n).view(-1, 2), angles)
        self.place("start")
        self.hear, self.say = hear.to(device), say.to(device)
        self.bias = nn.Parameter(torch.zeros(n, device=device))
        self.parameters = (*self.hear.parameters(), *self.say.parameters(), self.bias)
        self.wrong: deque[Tensor] = deque(maxlen=50)

    def draw_batch(self) -> tuple[Tensor, ...]:
        """What is heard (the blank is 0, the signal 9) and what is to be said, (time, batch).

        Words are one-hot: a product has a gradient that needs no sorting.
        """
        words = torch.zeros(self.batch, 2 * self.copied + self.blank, dtype=torch.int64)
        told = torch.randint(1, self.symbols + 1, (self.batch, self.copied), generator=self.draws)
        words[:, : self.copied] = told
        words[:, -self.copied - 1] = self.symbols + 1
        answers = torch.cat([torch.zeros_like(words[:, self.copied :]), told], 1)
        return one_hot(words.T, self.symbols + 2).float().to(self.device), answers.T.to(self.device)

    def loss(self, W: Tensor, *batch: Tensor) -> Tensor:
        """The cross entropy of what the network says."""
        words, answers = batch
        said = self.say(_Recurrence.apply(W, words @ self.hear.weight, self.bias))
        found = said.detach()[-self.copied :].argmax(2)
        self.wrong.append((found != answers[-self.copied :]).float().mean())
        return cross_entropy(said.flatten(0, 1), answers.flatten())

    def figure(self, W: Tensor) -> Tensor:
        """The share that came back wrong of late."""
        return torch.stack(list(self.wrong)).mean() if self.wrong else torch.ones(())


class _Recurrence(torch.autograd.Function):
    """h_t = modrelu(W h_{t−1} + x_t), modrelu(z) = sgn(z)·relu(|z| + bias); (time, batch, n).

    As autograd would have it, but with one product for ∂L/∂W: three times faster on a core.
    """

    @staticmethod
    def forward(ctx: Any, W: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        """All states."""
        Z, H = torch.empty_like(x), torch.empty_like(x)
        h = x.new_zeros(x.shape[1:])
        for x_t, z, h_t in zip(x.unbind(), Z.unbind(), H.unbind(), strict=True):
            torch.addmm(x_t, h, W.T, out=z)
            h = torch.copysign(z.abs().add_(bias).relu_(), z, out=h_t)
        ctx.save_for_backward(W, Z, H)
        return H

    @staticmethod
    def backward(ctx: Any, dH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """∂L/∂W = Σ_t δ_tᵀ h_{t−1}, ∂L/∂x_t = δ_t, ∂L/∂bias = Σ_t δ_t·sgn(z_t)."""
        W, Z, H = ctx.saved_tensors
        passes = (H != 0).to(H.dtype)
        delta = torch.empty_like(Z)
        later = torch.zeros_like(Z[0])
        parts = zip(dH.unbind(), passes.unbind(), delta.unbind(), strict=True)
        for dh, passed, d in reversed(list(parts)):
            later = torch.addmm(dh, later, W, out=d).mul_(passed)
        dW = delta[1:].flatten(0, 1).T @ H[:-1].flatten(0, 1)
        return dW, delta, (delta * Z.sgn()).sum((0, 1))


# Each with its dimensions, and the steps at each.
PROBLEMS: dict[str, tuple[type[Problem], dict[int, int]]] = {
    "procrustes": (Procrustes, {256: 300}),
    "low-bit": (LowBit, {128: 300, 256: 300}),
    "copying": (Copying, {64: 600}),
    "far-rotation": (FarRotation, {64: 80, 256: 250}),
    "codebooks": (Codebooks, {128: 300}),
}
