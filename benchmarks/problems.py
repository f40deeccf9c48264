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
    """A problem drawn by `seed` on the CPU, so that it is the same on every device."""

    parameters: tuple[nn.Parameter, ...] = ()
    """Parameters that Adam learns beside W."""
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
        """The arguments of the loss beside W; none if it uses all data."""
        return ()

    def loss(self, W: Tensor, *batch: Tensor) -> Tensor:
        """The loss of a batch."""
        raise NotImplementedError

    def figure(self, W: Tensor) -> Tensor:
        """The figure of merit of W, on held-out data."""
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

    Figure: the relative error of rounding. W starts at a random rotation.
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
        """The relative error of rounding to −3…3 times a row's scale, at fixed integers."""
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
        """A batch of x, and the teacher's answers."""
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
    """A rotation before fixed codebooks: 8 correlated axes in a subspace, 64 codewords.

    The codebooks are fitted once, at a random rotation, which is the start. Figure: the distortion
    of held-out vectors, relative to that of the start.
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


class Regression(Procrustes):
    """As Procrustes, of y = x R* + noise as large as half of x: each batch points elsewhere.

    Figure: ‖x R − x R*‖²/‖x‖² of a held-out batch, without the noise.
    """

    noise = 0.5

    def draw_batch(self) -> tuple[Tensor, ...]:
        """A batch of x, and the noise of y."""
        x = self.normal(BATCH, self.n) * self.sizes
        e = self.noise * self.sizes.square().mean().sqrt() * self.normal(BATCH, self.n)
        return x.to(self.device), e.to(self.device)

    def loss(self, W: Tensor, *batch: Tensor) -> Tensor:
        """‖x R − y‖²/‖x‖²."""
        x, e = batch
        return (linear(x, W - self.target) - e).square().sum() / x.square().sum()

    def figure(self, W: Tensor) -> Tensor:
        """The held-out loss, without noise."""
        return self.loss(W, self.held_out, torch.zeros_like(self.held_out[:1]))


class Eigenvectors(Problem):
    """The eigenvectors of a symmetric M in order: Brockett's cost Σ_i c_i (W M Wᵀ)_ii, 0 < c_i ≤ 1.

    Figure: how far the cost is above its least value, as a part of that. W starts at random.
    """

    def __init__(self, n: int, seed: int, device: str) -> None:
        super().__init__(n, seed, device)
        self.start = givens.random_rotation(n, seed + 1)
        M = self.normal(n, n) / n**0.5
        self.M, self.c = M + M.T, torch.linspace(1 / n, 1, n)
        # The largest weights meet the smallest eigenvalues.
        self.least = (torch.linalg.eigvalsh(self.M.double()).flip(0) * self.c.double()).sum()
        self.place("start", "M", "c", "least")

    def loss(self, W: Tensor, *batch: Tensor) -> Tensor:
        """Brockett's cost."""
        return ((W @ self.M * W).sum(1) * self.c).sum()

    def figure(self, W: Tensor) -> Tensor:
        """The rest above the least value, relative."""
        cost = ((W.double() @ self.M.double() * W.double()).sum(1) * self.c.double()).sum()
        return (cost - self.least) / self.least.abs()


class Components(Problem):
    """Independent components: Laplace sources, mixed by R*, are found by log cosh of batches.

    Figure: 1 less the correlation of a component with its source, the mean. W starts at the
    identity.
    """

    vectors = 20_000

    def __init__(self, n: int, seed: int, device: str) -> None:
        super().__init__(n, seed, device)
        self.start = torch.eye(n)
        self.mixing = givens.random_rotation(n, seed + 1)
        exponential = [
            torch.empty(self.vectors, n).exponential_(generator=self.draws) for _ in range(2)
        ]
        # A difference of exponential variables, of variance 1.
        self.data = (exponential[0] - exponential[1]) / 2**0.5 @ self.mixing
        self.place("start", "mixing", "data")

    def draw_batch(self) -> tuple[Tensor, ...]:
        """A batch of mixed sources."""
        drawn = torch.randint(self.vectors, (BATCH,), generator=self.draws)
        return (self.data[drawn.to(self.device)],)

    def loss(self, W: Tensor, *batch: Tensor) -> Tensor:
        """Σ log cosh of the components, the mean: least where they are farthest from normal."""
        return linear(batch[0], W).cosh().log().sum(1).mean()

    def figure(self, W: Tensor) -> Tensor:
        """What the nearest source of each component leaves open."""
        return 1 - linear(W, self.mixing).abs().amax(1).mean()


class Copying(Problem):
    """The copying network of examples/orthogonal_rnn.py: ten symbols come back after 50 blanks.

    Figure: the share of wrong symbols over the last 50 steps. Each step has a new batch, which is
    measured before it is learned from.
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
        """Inputs (the blank is 0, the signal 9) and targets, (time, batch).

        Inputs are one-hot: the gradient of a product needs no sorting.
        """
        words = torch.zeros(self.batch, 2 * self.copied + self.blank, dtype=torch.int64)
        told = torch.randint(1, self.symbols + 1, (self.batch, self.copied), generator=self.draws)
        words[:, : self.copied] = told
        words[:, -self.copied - 1] = self.symbols + 1
        answers = torch.cat([torch.zeros_like(words[:, self.copied :]), told], 1)
        return one_hot(words.T, self.symbols + 2).float().to(self.device), answers.T.to(self.device)

    def loss(self, W: Tensor, *batch: Tensor) -> Tensor:
        """The cross entropy of the network's outputs."""
        words, answers = batch
        said = self.say(_Recurrence.apply(W, words @ self.hear.weight, self.bias))
        found = said.detach()[-self.copied :].argmax(2)
        self.wrong.append((found != answers[-self.copied :]).float().mean())
        return cross_entropy(said.flatten(0, 1), answers.flatten())

    def figure(self, W: Tensor) -> Tensor:
        """The share of wrong symbols over the last steps."""
        return torch.stack(list(self.wrong)).mean() if self.wrong else torch.ones(())


class _Recurrence(torch.autograd.Function):
    """h_t = modrelu(W h_{t−1} + x_t), modrelu(z) = sgn(z)·relu(|z| + bias); (time, batch, n).

    The gradients are those of autograd, with one product for ∂L/∂W: three times faster on one core.
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


# Each problem with its dimensions, and the steps at each.
PROBLEMS: dict[str, tuple[type[Problem], dict[int, int]]] = {
    "procrustes": (Procrustes, {256: 300}),
    "low-bit": (LowBit, {128: 300, 256: 300}),
    "copying": (Copying, {64: 600}),
    "far-rotation": (FarRotation, {64: 80, 256: 250}),
    "codebooks": (Codebooks, {128: 300}),
    # Added when the methods were finished: nothing was tuned to them.
    "regression": (Regression, {128: 300}),
    "eigenvectors": (Eigenvectors, {128: 300}),
    "components": (Components, {64: 300}),
}
