"""Examples of a log that is streamed from its files, drawn in batches.

The draws of a step are a function of the seed and the step, so there is no state to save, and the
number of ranks does not matter. Every epoch shuffles the row groups. Their examples are cut into
streams of equal length, and each stream into windows, of whole row groups unless these are large;
each window is shuffled. A batch takes the next examples of every stream, and a rank reads only the
streams of its rows. So every example comes once in an epoch, and memory holds one or two windows of
each stream.
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

# The number of streams, unless a batch or the log has fewer examples.
STREAMS = 16
# A window has at least WINDOW examples, and ends with a row group or after TIMES * WINDOW.
WINDOW, TIMES = 1 << 18, 4
# Separate the generators of epochs, windows and targets.
EPOCH, SHUFFLE, TARGET = range(3)

Key = tuple[int, int, int]
"""The key of a window: its stream, epoch and number."""


@dataclass(frozen=True)
class Span:
    """A window of a stream: its positions in the stream, and its parts of row groups."""

    first: int
    stop: int
    pieces: tuple[tuple[int, int, int], ...]
    """For each row group: its number, and its range of examples."""


@dataclass(frozen=True)
class Piece:
    """Rows of a batch that come from one window."""

    row: int
    end: int
    key: Key
    first: int
    """The position of the first row in the window."""
    left: int
    """The number of examples left in the window after them."""


class Order:
    """The order of the examples of all row groups."""

    def __init__(self, examples: Int[np.ndarray, " groups"], batch: int, seed: int) -> None:
        """Cut the examples into streams.

        Args:
            examples: the number of examples in each row group.
            batch: the number of examples in a step.
            seed: the seed of the order.
        """
        self.groups = np.flatnonzero(examples)
        self.examples, self.batch, self.seed = examples[self.groups], batch, seed
        total = int(self.examples.sum())
        self.streams = min(STREAMS, batch, total)
        self.ends = np.arange(self.streams + 1) * total // self.streams
        # The rows of a batch that each stream provides.
        self.rows = np.arange(self.streams + 1) * batch // self.streams
        self._spans = functools.lru_cache(4 * self.streams)(self._make_spans)

    def find(self, step: int) -> Iterator[Piece]:
        """The windows, and positions in them, of the rows of a step's batch."""
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

    def find_span(self, key: Key) -> Span:
        """The positions and row groups of a window."""
        stream, epoch, number = key
        return self._spans(stream, epoch)[number]

    def find_next(self, key: Key) -> Key:
        """The next window of the same stream."""
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
                # A short rest of the stream joins its last window.
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
    """The clicks of users, user by user."""

    items: Int[np.ndarray, " clicks"]
    starts: Int[np.ndarray, " starts"]
    """The first click of each user; the last entry is the number of clicks."""

    def cut(self, first: int, stop: int) -> tuple["Users", NDArray[np.int32]]:
        """The users of these examples, and the positions of the examples in their clicks."""
        # A user's first click has no history, so it is not an example.
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
    """Users, and the positions of examples in their clicks, in the order of the draw."""

    users: Users
    places: Int[np.ndarray, " examples"]

    @property
    def nbytes(self) -> int:
        """The bytes of its arrays."""
        return self.users.items.nbytes + self.users.starts.nbytes + self.places.nbytes


class Reader:
    """Reads the training users of row groups."""

    def __init__(self, log: StreamedLog) -> None:
        self.log, self.numbers = log, Numbers(log.catalogue, log.keys)
        # The latest group: streams that share a row group read it in succession.
        self.last: tuple[int, Users] | None = None

    def read(self, group: int) -> Users:
        """The training users that begin in a row group."""
        # Another thread may replace it.
        last = self.last
        if last is None or last[0] != group:
            self.last = last = (group, self._read_users(group))
        return last[1]

    def _read_users(self, group: int) -> Users:
        log = self.log
        parts = [log.source.read(group)[abs(int(log.lead[group])) :]]
        # The rows of the last user in the groups that follow.
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
                f"{log.source.name(group)} has changed since the log was first read; run again "
                "with --resume to read it again"
            )
        return Users(items, starts)


class StreamedExamples(Examples):
    """The training clicks of a log that is streamed from its files, drawn in batches."""

    def __init__(
        self,
        log: StreamedLog,
        *,
        history: int,
        ahead: int,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Prepare to read; arguments are those of `Examples`."""
        self.log, self.history, self.ahead, self.seed = log, history, ahead, seed
        self.stream, self.device = False, torch.device(device)
        self.generator = torch.Generator(self.device)
        # The clicks of held-out users are in memory.
        self.items = torch.from_numpy(log.items).to(self.device)
        self.starts = torch.from_numpy(log.starts).to(self.device)
        self.words = None
        popularity = torch.from_numpy(log.popularity).to(self.device)
        self.popularity = (popularity / popularity.sum()).float()
        self.reader, self.order = Reader(log), Order(log.examples, 1, seed)
        self.windows: dict[Key, Window] = {}
        # The windows of the last step, on all ranks.
        self.drawn: set[Key] = set()
        self.coming: tuple[Key, Future[Window]] | None = None
        self.pool = ThreadPoolExecutor(1, "givens-log")
        self.most_bytes = 0
        """The most bytes that windows have taken so far."""

    def draw(
        self, step: int, size: int, progress: float = 0.0, *, dropout: float = 0.0
    ) -> tuple[Inputs, Int[Tensor, " b"]]:
        """As `Examples.draw`; `progress` has no effect."""
        if self.order.batch != size:
            self.order = Order(self.reader.log.examples, size, self.seed)
        mine, share = distributed.rows(size), self._draw_shares(step, size)
        pieces = [*self.order.find(step)]
        keys = {piece.key for piece in pieces}
        own = [piece for piece in pieces if piece.row < mine.stop and piece.end > mine.start]
        if keys != self.drawn:
            # All ranks get here at the same steps, so that they can share an error.
            distributed.run_together(lambda: self._read_windows([piece.key for piece in own]))
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
        """A number in [0, 1) for each row, which chooses the target among the next items."""
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

    def _read_windows(self, keys: list[Key]) -> None:
        """Make sure that the windows of this rank's rows are in memory."""
        for key in keys:
            if key in self.windows:
                continue
            if self.coming is not None and self.coming[0] == key:
                self.windows[key] = self.coming[1].result()
                self.coming = None
            else:
                self.windows[key] = self._make_window(key)

    def _read_ahead(self, own: list["Piece"]) -> None:
        """Read the next windows in the background, one at a time, and drop finished ones."""
        # The window that is needed first comes first.
        last = {piece.key[0]: piece for piece in own}
        urgent = sorted(last.values(), key=lambda piece: piece.left)
        coming = [self.order.find_next(piece.key) for piece in urgent]
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
                    self.coming = (key, self.pool.submit(self._make_window, key))
                    break

    def _make_window(self, key: Key) -> Window:
        """Read and shuffle a window."""
        parts, at = [], 0
        for group, first, stop in self.order.find_span(key).pieces:
            users, places = self.reader.read(group).cut(first, stop)
            parts.append((users.items, users.starts[:-1] + at, places + np.int32(at)))
            at += len(users.items)
        items, starts, places = (np.concatenate(those) for those in zip(*parts, strict=True))
        order = np.random.default_rng([self.seed, SHUFFLE, *key]).permutation(len(places))
        return Window(Users(items, np.append(starts, at)), places[order])
