"""Examples of a log that stays in its files, drawn in batches.

What a step draws follows from the seed and the step by arithmetic, so there is no state to save and
the number of ranks changes nothing. In every epoch the row groups come in an order of its own. The
examples in that order are cut into streams of one length, and each stream into windows, of whole
row groups unless these are large; a window is shuffled. A batch takes the next examples of every
stream, and a rank reads the streams that its rows of the batch are of. So every example comes once
in an epoch, and memory holds a window or two of each stream.
"""

import functools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from givens import distributed
from givens.retrieval.batches import SEED_STRIDE, Examples, Inputs
from givens.retrieval.parquet import join
from givens.retrieval.streamed import StreamedLog
from givens.retrieval.survey import Numbers, find_good, is_among

# Streams of an epoch, unless a batch or the log has fewer examples.
STREAMS = 16
# Examples of a window: so many, and up to the end of a row group, but no more than four times that.
WINDOW, TIMES = 1 << 18, 4
# Tells the generators of epochs, windows and targets apart.
EPOCH, SHUFFLE, TARGET = range(3)

Key = tuple[int, int, int]
"""Of a window: its stream, epoch and number there."""


@dataclass(frozen=True)
class Span:
    """A window of a stream: positions there, and examples of row groups."""

    first: int
    stop: int
    pieces: tuple[tuple[int, int, int], ...]
    """Of each row group: its number, and the first and last of its examples."""


@dataclass(frozen=True)
class Piece:
    """Rows of a batch, and the window that they are from."""

    row: int
    end: int
    key: Key
    first: int
    """The position in the window of the first of them."""
    left: int
    """How many examples of the window come after them."""


class Order:
    """In which order the examples of row groups come."""

    def __init__(self, examples: Int[np.ndarray, " groups"], batch: int, seed: int) -> None:
        """Cut the examples into streams.

        Args:
            examples: how many each row group has.
            batch: how many a step draws.
            seed: of the order.
        """
        self.groups = np.flatnonzero(examples)
        self.examples, self.batch, self.seed = examples[self.groups], batch, seed
        total = int(self.examples.sum())
        self.streams = min(STREAMS, batch, total)
        self.ends = np.arange(self.streams + 1) * total // self.streams
        # Which rows of a batch each stream gives.
        self.rows = np.arange(self.streams + 1) * batch // self.streams
        self._spans = functools.lru_cache(4 * self.streams)(self._make_spans)

    def find(self, step: int) -> Iterator[Piece]:
        """Where the rows of a step's batch are from."""
        for stream in range(self.streams):
            length = int(self.ends[stream + 1] - self.ends[stream])
            row, end = map(int, self.rows[stream : stream + 2])
            at = step * (end - row)
            while row < end:
                epoch, inside = divmod(at, length)
                number, span = next(
                    (number, span)
                    for number, span in enumerate(self._spans(stream, epoch))
                    if inside < span.stop
                )
                take = min(end - row, span.stop - inside)
                key, first = (stream, epoch, number), inside - span.first
                yield Piece(row, row + take, key, first, span.stop - inside - take)
                row, at = row + take, at + take

    def span(self, key: Key) -> Span:
        """What a window is made of."""
        stream, epoch, number = key
        return self._spans(stream, epoch)[number]

    def next(self, key: Key) -> Key:
        """The window that follows in a stream."""
        stream, epoch, number = key
        last = number + 1 == len(self._spans(stream, epoch))
        return (stream, epoch + 1, 0) if last else (stream, epoch, number + 1)

    def _make_spans(self, stream: int, epoch: int) -> list[Span]:
        """The windows of a stream in an epoch."""
        order = self._shuffle(epoch)
        ends = np.cumsum(self.examples[order])
        low, high = int(self.ends[stream]), int(self.ends[stream + 1])
        first = int(np.searchsorted(ends, low, side="right"))
        spans: list[Span] = []
        pieces: list[tuple[int, int, int]] = []
        begun = at = low
        for place in range(first, len(order)):
            group, end = order[place], min(int(ends[place]), high)
            before = int(ends[place] - self.examples[group])
            while at < end:
                # What is left at the end goes with what is before it.
                limit = begun + TIMES * WINDOW
                limit = high if high - limit < WINDOW else limit
                stop = min(end, limit)
                pieces.append((int(self.groups[group]), at - before, stop - before))
                at = stop
                if at == high or (at - begun >= WINDOW and high - at >= WINDOW):
                    spans.append(Span(begun - low, at - low, tuple(pieces)))
                    pieces, begun = [], at
            if at == high:
                break
        return spans

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        """The order of the row groups in an epoch."""
        return np.random.default_rng([self.seed, EPOCH, epoch]).permutation(len(self.groups))


@dataclass(frozen=True, eq=False)
class Users:
    """The clicks of users, one user after another."""

    items: Int[np.ndarray, " clicks"]
    starts: Int[np.ndarray, " starts"]
    """Where each user's clicks begin; the last number is the number of clicks."""

    def cut(self, first: int, stop: int) -> tuple["Users", NDArray[np.int32]]:
        """The users of these examples, and where the examples are among their clicks."""
        # A user's first click has no history, and is no example.
        user = np.searchsorted(
            self.starts - np.arange(len(self.starts)), [first, stop - 1], "right"
        )
        low, high = self.starts[user[0] - 1], self.starts[user[1]]
        starts = self.starts[user[0] - 1 : user[1] + 1] - low
        places = np.arange(high - low, dtype=np.int32)
        places = np.delete(places, starts[:-1])
        skipped = first - (low - (user[0] - 1))
        mine = places[skipped : skipped + stop - first].copy()
        return Users(self.items[low:high].copy(), starts), mine


@dataclass(frozen=True, eq=False)
class Window:
    """Users, and the places of examples among their clicks, in the order of the draw."""

    users: Users
    places: Int[np.ndarray, " examples"]

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        return self.users.items.nbytes + self.users.starts.nbytes + self.places.nbytes


class Reader:
    """Reads the training users of row groups."""

    def __init__(self, log: StreamedLog) -> None:
        self.log, self.numbers = log, Numbers(log.catalogue, log.keys)
        # Streams that share a row group ask for it one after another.
        self.last: tuple[int, Users] | None = None

    def read(self, group: int) -> Users:
        """The users that begin in a row group and are trained on."""
        # Another thread may read meanwhile.
        last = self.last
        if last is None or last[0] != group:
            self.last = last = (group, self._read(group))
        return last[1]

    def _read(self, group: int) -> Users:
        log = self.log
        parts = [log.source.read(group)[abs(int(log.lead[group])) :]]
        # What the last user has in the groups that follow.
        for later in range(group + 1, len(log.lead)):
            lead = int(log.lead[later])
            if lead:
                parts.append(log.source.read(later, abs(lead))[: abs(lead)])
            if lead >= 0:
                break
        clicks = join(parts)
        begin = np.concatenate([[0], np.flatnonzero(np.diff(clicks.user)) + 1])
        if clicks.time is not None:
            run = np.repeat(np.arange(len(begin)), np.diff(np.append(begin, len(clicks))))
            if ((clicks.time[1:] < clicks.time[:-1]) & (run[1:] == run[:-1])).any():
                clicks = clicks[np.lexsort((clicks.time, run))]
        good = find_good(clicks, log.selection.min_rating)
        counts = np.add.reduceat(good, begin, dtype=np.int64) if len(clicks) else begin[:0]
        trained = counts >= log.selection.min_items
        trained &= ~is_among(clicks.user[begin], log.held)
        kept = good & np.repeat(trained, np.diff(np.append(begin, len(clicks))))
        items = self.numbers.find(clicks.item[kept])
        starts = np.concatenate([[0], np.cumsum(counts[trained])])
        if len(items) - len(starts) + 1 != log.examples[group] or (items < 0).any():
            raise ValueError(
                f"{log.source.name(group)} is not as it was when the log was read first; run again "
                "with --resume to read it again"
            )
        return Users(items, starts)


class StreamedExamples(Examples):
    """Training clicks of a log that stays in its files, drawn in batches."""

    def __init__(
        self,
        log: StreamedLog,
        *,
        history: int,
        ahead: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make ready to read; arguments are those of `Examples`."""
        self.log, self.history, self.ahead, self.seed = log, history, ahead, seed
        self.stream, self.device = False, torch.device(device)
        self.generator = torch.Generator(self.device)
        # Of held-out users, in memory.
        self.items = torch.from_numpy(log.items).to(self.device)
        self.starts = torch.from_numpy(log.starts).to(self.device)
        self.words = None
        popularity = torch.from_numpy(log.popularity).to(self.device)
        self.popularity = (popularity / popularity.sum()).float()
        self.reader, self.order = Reader(log), Order(log.examples, 1, seed)
        self.windows: dict[Key, Window] = {}
        # What the last step drew from, on all ranks.
        self.drawn: set[Key] = set()
        self.coming: tuple[Key, Future[Window]] | None = None
        self.pool = ThreadPoolExecutor(1, "givens-log")
        self.most_bytes = 0
        """Of windows, at most so far."""

    def draw(
        self, step: int, size: int, progress: float = 0.0, *, dropout: float = 0.0
    ) -> tuple[Inputs, Int[Tensor, " b"]]:
        """As `Examples.draw`; `progress` changes nothing here."""
        if self.order.batch != size:
            self.order = Order(self.reader.log.examples, size, self.seed)
        mine, share = distributed.rows(size), self._draw_shares(step, size)
        pieces = [*self.order.find(step)]
        keys = {piece.key for piece in pieces}
        own = [piece for piece in pieces if piece.row < mine.stop and piece.end > mine.start]
        if keys != self.drawn:
            # All ranks come here at the same steps: an error of one is that of all.
            distributed.together(lambda: self._read([piece.key for piece in own]))
            self.drawn = keys
        history = np.empty((mine.stop - mine.start, self.history), np.int32)
        target = np.empty(len(history), np.int64)
        for piece in own:
            low, high = max(piece.row, mine.start), min(piece.end, mine.stop)
            at = slice(piece.first + low - piece.row, piece.first + high - piece.row)
            found = self._look_up(self.windows[piece.key], at, share[low:high])
            history[low - mine.start : high - mine.start] = found[0]
            target[low - mine.start : high - mine.start] = found[1]
        self._read_ahead(own)
        self.generator.manual_seed(self.seed * SEED_STRIDE + step)
        inputs = Inputs(torch.from_numpy(history).to(self.device).long())
        targets = torch.from_numpy(target).to(self.device)
        return self._drop_items(inputs, dropout, size), distributed.gather_rows(targets, size)

    def _draw_shares(self, step: int, size: int) -> NDArray[np.float64]:
        """Where the target of each row is among the items that may be."""
        return np.random.default_rng([self.seed, TARGET, step]).random(size)

    def _look_up(
        self, window: Window, at: slice, share: NDArray[np.float64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Histories and targets of examples of a window."""
        items, starts = window.users.items, window.users.starts
        place = window.places[at].astype(np.int64)
        user = np.searchsorted(starts, place, side="right")
        left = np.minimum(starts[user] - place, self.ahead)
        target = items[place + np.minimum((share * left).astype(np.int64), left - 1)]
        back = place[:, None] - 1 - np.arange(self.history)
        history = items[np.maximum(back, 0)]
        history[back < starts[user - 1][:, None]] = -1
        return history, target

    def _read(self, keys: list[Key]) -> None:
        """Have the windows that this rank draws from."""
        for key in keys:
            if key in self.windows:
                continue
            if self.coming is not None and self.coming[0] == key:
                self.windows[key] = self.coming[1].result()
                self.coming = None
            else:
                self.windows[key] = self._make(key)

    def _read_ahead(self, own: list["Piece"]) -> None:
        """Read what is needed next meanwhile, one window at a time; forget what is over."""
        # By when it is needed.
        last = {piece.key[0]: piece for piece in own}
        urgent = sorted(last.values(), key=lambda piece: piece.left)
        coming = [self.order.next(piece.key) for piece in urgent]
        if self.coming is not None and self.coming[1].done() and not self.coming[1].exception():
            self.windows[self.coming[0]] = self.coming[1].result()
            self.coming = None
        kept = {*coming, *(piece.key for piece in own)}
        self.windows = {key: window for key, window in self.windows.items() if key in kept}
        held = sum(window.nbytes for window in self.windows.values())
        self.most_bytes = max(self.most_bytes, held)
        if self.coming is not None and self.coming[0] not in kept and self.coming[1].done():
            self.coming = None
        if self.coming is None:
            for key in coming:
                if key not in self.windows:
                    self.coming = (key, self.pool.submit(self._make, key))
                    break

    def _make(self, key: Key) -> Window:
        """Read a window, and shuffle it."""
        parts, at = [], 0
        for group, first, stop in self.order.span(key).pieces:
            users, places = self.reader.read(group).cut(first, stop)
            parts.append((users.items, users.starts[:-1] + at, places + np.int32(at)))
            at += len(users.items)
        items, starts, places = (np.concatenate(those) for those in zip(*parts, strict=True))
        order = np.random.default_rng([self.seed, SHUFFLE, *key]).permutation(len(places))
        return Window(Users(items, np.append(starts, at)), places[order])
