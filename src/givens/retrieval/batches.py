"""Training examples and held-out users of a log, as tensors on the device.

An example is a position in a training user's clicks: the history is what came before it, and the
target is drawn from the next few items. Draws depend only on the seed and the step, so a resumed
run draws the same batches.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from givens import distributed
from givens.retrieval.data import Log

# The share of the log from which a step of a stream draws.
STREAM_WINDOW = 0.1
# Runs of different seeds are this many steps apart, so that they share no draws.
SEED_STRIDE = 1 << 32


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of the user tower: histories with the latest item first, padded with −1."""

    history: Int[Tensor, "b h"]
    words: Int[Tensor, "b w"] | None = None

    def __len__(self) -> int:
        return len(self.history)

    def __getitem__(self, rows: slice) -> "Inputs":
        return Inputs(self.history[rows], None if self.words is None else self.words[rows])


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out users: tower inputs, the items that they have seen, and those that they liked next.

    `seen` and `truth` are sorted keys, user·catalogue + item.
    """

    inputs: Inputs
    seen: Int[Tensor, " s"]
    truth: Int[Tensor, " t"]
    sizes: Int[Tensor, " b"]
    """The number of true items of each user."""


class Examples:
    """The training clicks of a log on a device, drawn in batches."""

    def __init__(
        self,
        log: Log,
        *,
        history: int,
        ahead: int,
        seed: int = 0,
        stream: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """Put the log on the device.

        Args:
            log: the log.
            history: the most items of a history.
            ahead: the target is one of this many next items.
            seed: the seed of the draws.
            stream: whether steps follow the order of time, instead of drawing from the whole log.
            device: where the tensors are.
        """
        self.log, self.history, self.ahead, self.seed = log, history, ahead, seed
        self.stream, self.device = stream, torch.device(device)
        self.generator = torch.Generator(self.device)
        counts = np.diff(log.starts)
        user = np.repeat(np.arange(log.users), counts)
        trained = np.zeros(log.users, bool)
        trained[log.train] = True
        # A user's first click has no history; with words it is an example all the same.
        first = np.zeros(len(user), bool)
        first[log.starts[:-1]] = log.words is None
        places = np.flatnonzero(trained[user] & ~first)
        if stream:
            places = places[np.argsort(log.times[places], kind="stable")]
        self.places = torch.from_numpy(places).to(self.device)
        self.items = torch.from_numpy(log.items).to(self.device)
        self.user = torch.from_numpy(user.astype(np.int32)).to(self.device)
        self.starts = torch.from_numpy(log.starts).to(self.device)
        self.words = None if log.words is None else torch.from_numpy(log.words).to(self.device)
        clicks = np.bincount(log.items[trained[user]], minlength=log.catalogue)
        self.popularity = torch.from_numpy(clicks / clicks.sum()).float().to(self.device)

    def draw(
        self, step: int, size: int, progress: float = 0.0, *, dropout: float = 0.0
    ) -> tuple[Inputs, Int[Tensor, " b"]]:
        """Draw the batch of a step.

        Returns the inputs of this rank's rows, and the targets of the rows of all ranks. The batch
        does not depend on the number of ranks.

        Args:
            step: the number of the step.
            size: rows of the batch, on all ranks together.
            progress: the progress of training, from 0 to 1.
            dropout: the share of history items that is left out at random.
        """
        self.generator.manual_seed(self.seed * SEED_STRIDE + step)
        first, count = 0, len(self.places)
        if self.stream:
            count = max(int(STREAM_WINDOW * len(self.places)), 1)
            first = int(progress * (len(self.places) - count))
        drawn = torch.randint(count, (size,), generator=self.generator, device=self.device)
        place = self.places[first + drawn]
        user = self.user[place].long()
        # One random number for each row, whatever the number of items left to choose from.
        left = (self.starts[user + 1] - place).clamp_max(self.ahead)
        share = torch.rand(size, generator=self.generator, device=self.device)
        target = self.items[place + (share * left).long().clamp_max(left - 1)].long()
        mine = distributed.rows(size)
        return self._drop_items(self.build_inputs(user[mine], place[mine]), dropout, size), target

    def draw_items(self, count: int) -> Int[Tensor, " m"]:
        """Draw items uniformly, for the batch drawn last."""
        drawn: Tensor = torch.randint(
            self.log.catalogue, (count,), generator=self.generator, device=self.device
        )
        return drawn

    def build_inputs(self, user: Int[Tensor, " b"], place: Int[Tensor, " b"]) -> Inputs:
        """The inputs of users at these positions of the log."""
        back = place[:, None] - 1 - torch.arange(self.history, device=self.device)
        history = self.items[back.clamp_min(0)].long()
        history = history.masked_fill(back < self.starts[user][:, None], -1)
        return Inputs(history, None if self.words is None else self.words[user].long())

    def _drop_items(self, inputs: Inputs, dropout: float, size: int) -> Inputs:
        """Drop history items of this rank's inputs, for a batch of this size."""
        if not dropout:
            return inputs
        shape = (size, self.history)
        share = torch.rand(shape, generator=self.generator, device=self.device)
        dropped = inputs.history.masked_fill(share[distributed.rows(size)] < dropout, -1)
        return Inputs(dropped, inputs.words)

    def hold_out(self, users: Int[np.ndarray, " b"]) -> HeldOut:
        """Held-out users, with the first half of their clicks as the history, the rest as truth."""
        who = torch.from_numpy(users).to(self.device)
        begin, end = self.starts[who], self.starts[who + 1]
        middle = begin + (end - begin) // 2
        keys = []
        for first, last in ((begin, middle), (middle, end)):
            row = torch.repeat_interleave(torch.arange(len(who), device=self.device), last - first)
            before = (last - first).cumsum(0) - (last - first)
            at = first[row] + torch.arange(len(row), device=self.device) - before[row]
            keys.append(torch.unique(row * self.log.catalogue + self.items[at]))
        seen, truth = keys
        # Seen items are not recommended, so they are not in the truth either.
        truth = truth[~torch.isin(truth, seen)]
        sizes = torch.bincount(truth // self.log.catalogue, minlength=len(who))
        return HeldOut(self.build_inputs(who, middle), seen, truth, sizes)


def open_examples(log: Log, **options: Any) -> Examples:
    """The examples of a log, in memory or read from its files; options are those of `Examples`."""
    if not log.streamed:
        return Examples(log, **options)
    from givens.retrieval.streams import StreamedExamples

    # `Config.check` refuses an order of time.
    options.pop("stream", None)
    return StreamedExamples(log, **options)  # type: ignore[arg-type]
