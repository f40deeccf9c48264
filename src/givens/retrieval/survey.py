"""One pass over a log in Parquet files: vocabulary, popularity, selection and held-out users.

The rows of a user must be contiguous; they are sorted by time when they are read. A user belongs to
the row group in which its rows begin; the rows at the beginning of a group that continue a user of
an earlier group are its lead.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from numpy.typing import NDArray

from givens.checks import MOST
from givens.kernels.cpu import keys as loops
from givens.retrieval.data import Names, Selection, check_held_out, describe_empty
from givens.retrieval.parquet import Clicks, Source, join

# The largest load factor of a hash table.
FULL = 0.6
FIRST_SLOTS = 1 << 16
# The line boundaries of str.splitlines.
LINES = "[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]"

Parts = dict[str, NDArray[Any]]


class NotTogetherError(ValueError):
    """The rows of a user are not contiguous."""


class Vocabulary:
    """The items seen so far: their keys in order of appearance, and their counts."""

    def __init__(self) -> None:
        self.slots = np.full(FIRST_SLOTS, -1, np.int32)
        self.known, self.counts = (np.zeros(self.most, np.int64) for _ in range(2))
        self.size = 0
        # The texts of items, in the same order.
        self.texts: list[Any] = []

    @property
    def most(self) -> int:
        """The number of items that the table has room for."""
        return int(FULL * len(self.slots))

    def count(self, keys: Int[np.ndarray, " rows"], texts: tuple[Any, Any] | None) -> None:
        """Count the items with these keys."""
        before, at = self.size, 0
        while True:
            done, self.size = loops.count_keys(
                keys[at:], self.slots, self.known, self.counts, self.size, self.most
            )
            at += done
            if at == len(keys):
                break
            self._grow()
        if texts is not None and self.size > before:
            self._add_texts(self.known[before : self.size], *texts)

    def finish(self) -> Parts:
        """Names, keys and counts of all items, sorted by name."""
        # Free memory for the sort.
        self.slots = np.empty(0, np.int32)
        keys = self.known[: self.size]
        if not self.texts:
            order = np.argsort(keys)
            self.known = keys = keys[order]
            self.counts = self.counts[: self.size][order]
            return {"keys": keys, "counts": self.counts}
        import pyarrow as pa
        import pyarrow.compute as pc

        texts = pa.chunked_array(self.texts).combine_chunks()
        self.texts = []
        order = pc.array_sort_indices(texts)
        texts = texts.take(order)
        _, ends, text = texts.buffers()
        rows = order.to_numpy()
        return {
            "keys": keys[rows],
            "counts": self.counts[: self.size][rows],
            "ends": np.frombuffer(ends, np.int64)[: self.size + 1],
            "text": np.frombuffer(text, np.uint8),
        }

    def _grow(self) -> None:
        self.slots = np.full(2 * len(self.slots), -1, np.int32)
        self.known, self.counts = (
            np.concatenate([part, np.zeros(self.most - len(part), np.int64)])
            for part in (self.known, self.counts)
        )
        loops.place_keys(self.known[: self.size], self.slots)

    def _add_texts(self, new: NDArray[np.int64], keys: NDArray[np.int64], texts: Any) -> None:
        import pyarrow.compute as pc

        order = np.argsort(keys)
        found = texts.take(order[np.searchsorted(keys[order], new)])
        if pc.any(pc.match_substring_regex(found, LINES)).as_py():
            raise ValueError("a name must be in one line, but an item has one in several")
        if pc.min(pc.binary_length(found)).as_py() == 0:
            raise ValueError("a name must not be empty, but that of an item is")
        self.texts.append(found)


class Hashed:
    """As `Vocabulary`, with a fixed number of rows that items share by a hash."""

    def __init__(self, rows: int) -> None:
        self.counts = np.zeros(rows, np.int64)

    def count(self, keys: Int[np.ndarray, " rows"], texts: tuple[Any, Any] | None) -> None:
        """Count the items with these keys."""
        del texts
        np.add.at(self.counts, hash_items(keys, len(self.counts)), 1)

    def finish(self) -> Parts:
        """The count of each row."""
        return {"counts": self.counts}


class Numbers:
    """The row of each item by its key, in a vocabulary or by a hash."""

    def __init__(self, catalogue: int, keys: Int[np.ndarray, " items"] | None) -> None:
        self.catalogue, self.keys = catalogue, keys
        if keys is not None:
            self.slots = np.full(1 << int(len(keys) / FULL).bit_length(), -1, np.int32)
            loops.place_keys(keys, self.slots)

    def find(self, keys: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """The rows of these keys; −1 for unknown items."""
        if self.keys is None:
            return hash_items(keys, self.catalogue).astype(np.int32)
        rows = np.empty(len(keys), np.int32)
        loops.find_keys(keys, self.slots, self.keys, rows)
        return rows


def hash_items(keys: Int[np.ndarray, " n"], rows: int) -> Int[np.ndarray, " n"]:
    """The row of each key among `rows`: splitmix64 of the key, modulo `rows`."""
    found = np.empty(len(keys), np.uint64)
    loops.scramble_keys(keys, np.uint64(0), found)
    return (found % np.uint64(rows)).astype(np.int64)


class Held:
    """The held-out users: those with the smallest seeded hashes."""

    def __init__(self, most: int, seed: int) -> None:
        self.most, self.seed = most, np.uint64(seed)
        self.found: list[tuple[int, int, int, Clicks]] = []
        self.least = np.uint64(2**64 - 1)

    def add(self, users: NDArray[np.int64], groups: NDArray[np.int64], rows: Any) -> None:
        """Consider users with the groups that they begin in; `rows(i)` are the clicks of user i."""
        ranks = np.empty(len(users), np.uint64)
        loops.scramble_keys(users, self.seed, ranks)
        near = np.flatnonzero(ranks <= self.least)
        for i in near[np.argsort(ranks[near])[: self.most]].tolist():
            self.found.append((int(ranks[i]), int(users[i]), int(groups[i]), rows(i)))
        if len(self.found) > 2 * self.most:
            self._cut(self.most)

    def draw(self, count: int) -> list[tuple[int, int, int, Clicks]]:
        """The `count` users with the smallest hashes, in order."""
        self._cut(count)
        return self.found

    def _cut(self, count: int) -> None:
        self.found = sorted(self.found, key=lambda one: one[:2])[:count]
        self.least = np.uint64(self.found[-1][0]) if self.found else self.least


class Survey:
    """A pass over all row groups."""

    def __init__(
        self,
        source: Source,
        *,
        min_rating: float,
        min_items: int,
        held_out: int,
        seed: int,
        hash_items: int | None,
    ) -> None:
        self.source, self.min_rating, self.min_items = source, min_rating, min_items
        self.held_out = held_out
        self.items = Vocabulary() if hash_items is None else Hashed(hash_items)
        self.held = Held(2 * held_out, seed)
        self.examples, self.lead = (np.zeros(len(source), np.int64) for _ in range(2))
        self.rows = self.low = self.users = self.small = self.clicks = 0
        # The users of every group, to find users that reappear.
        self.seen: list[NDArray[np.int64]] = []
        # The last user, whose rows may continue in the next group, and the group it begins in.
        self.open: list[Clicks] = []
        self.begun = 0

    def add(self, group: int, clicks: Clicks) -> None:
        """Add the clicks of the next group."""
        if not len(clicks):
            return
        changes = np.flatnonzero(clicks.user[1:] != clicks.user[:-1]) + 1
        last = int(changes[-1]) if len(changes) else 0
        if self.open and self.open[0].user[0] == clicks.user[0]:
            lead = int(changes[0]) if len(changes) else len(clicks)
            self.lead[group] = lead
            if lead == len(clicks):
                self.lead[group] = -lead
                self.open.append(clicks)
                return
        self._count(join([*self.open, clicks[:last]]), group)
        self.open, self.begun = [clicks[last:].drop_other_texts()], group

    def finish(self) -> tuple[Parts, dict[str, Any]]:
        """The results, as arrays and as metadata."""
        if self.open:
            self._count(join(self.open), self.begun)
        self._check_all_together()
        name, rated = self.source.title, "rating" in self.source.columns
        users = self.users - self.small
        if not users:
            raise ValueError(
                describe_empty(name, self.rows, self.min_rating, self.min_items, rated=rated)
            )
        out = min(self.held_out, users // 5)
        if out < 1:
            raise ValueError(
                f"{name} must have at least 5 valid users to hold some out, but has {users}"
            )
        drawn = self.held.draw(2 * out)
        # Each half is sorted by key.
        drawn = [one for half in (drawn[:out], drawn[out:]) for one in sorted(half, key=_key)]
        parts = self.items.finish()
        catalogue = len(parts["counts"])
        if catalogue > MOST:
            raise ValueError(f"{name} must have at most {MOST:,} items, but has {catalogue:,}")
        held = join([clicks for *_, clicks in drawn])
        items = Numbers(catalogue, parts.get("keys")).find(held.item)
        counts = parts.pop("counts")
        np.subtract.at(counts, items, 1)
        starts = np.cumsum([0, *(len(clicks) for *_, clicks in drawn)])
        for _, _, group, clicks in drawn:
            self.examples[group] -= len(clicks) - 1
        halves = np.arange(out), np.arange(out, 2 * out)
        check_held_out(name, starts, items, counts > 0, *halves)
        selection = Selection(
            self.min_rating, self.min_items, self.rows, self.low, self.users, self.small, rated
        )
        parts |= {
            "popularity": counts,
            "examples": self.examples,
            "lead": self.lead,
            "users": np.array([user for _, user, *_ in drawn], np.int64),
            "starts": starts,
            "items": items,
        }
        return parts, {"selection": vars(selection), "clicks": self.clicks, "users": users}

    def _count(self, clicks: Clicks, group: int) -> None:
        """Count complete users; the first may begin in an earlier group than the others."""
        if not len(clicks):
            return
        begin = np.concatenate([[0], np.flatnonzero(clicks.user[1:] != clicks.user[:-1]) + 1])
        users = clicks.user[begin]
        self._check_together(users, group)
        end = np.append(begin[1:], len(clicks))
        groups = np.full(len(users), group)
        if self.open:
            groups[0] = self.begun
        good = find_good(clicks, self.min_rating)
        counts = np.add.reduceat(good, begin, dtype=np.int64)
        valid = counts >= self.min_items
        self.rows += len(clicks)
        self.low += len(clicks) - int(counts.sum())
        self.users += len(users)
        self.small += len(users) - int(valid.sum())
        self.clicks += int(counts[valid].sum())
        np.add.at(self.examples, groups[valid], counts[valid] - 1)
        kept = good & np.repeat(valid, end - begin)
        self.items.count(clicks.item[kept], clicks.texts)
        first, stop = begin[valid], end[valid]

        def take_rows(i: int) -> Clicks:
            mine = slice(int(first[i]), int(stop[i]))
            rows = Clicks(clicks.user[mine], clicks.item[mine], None, _slice(clicks.time, mine))
            rows = rows[good[mine]]
            if rows.time is not None:
                rows = rows[np.argsort(rows.time, kind="stable")]
            # Copies, so that the group can be freed.
            return Clicks(rows.user.copy(), rows.item.copy(), None, None)

        self.held.add(users[valid], groups[valid], take_rows)

    def _check_together(self, users: NDArray[np.int64], group: int) -> None:
        """Raise if users reappear in this group, or users of the first group do.

        `_check_all_together` finds the others at the end.
        """
        ordered = np.sort(users)
        again = bool((ordered[1:] == ordered[:-1]).any())
        if again or (self.seen and is_among(users, np.sort(self.seen[0])).any()):
            raise self._not_together(f"one comes again in {self.source.name(group)}")
        self.seen.append(users)

    def _check_all_together(self) -> None:
        """Raise if users reappear anywhere."""
        everyone = np.concatenate([*self.seen, np.empty(0, np.int64)])
        self.seen = []
        everyone.sort()
        if (everyone[1:] == everyone[:-1]).any():
            raise self._not_together("those of some come again in another place")

    def _not_together(self, where: str) -> NotTogetherError:
        return NotTogetherError(
            f"{self.source.path} must have the rows of a user together, but {where}; sort the log "
            "by user and time"
        )


def is_among(keys: Int[np.ndarray, " n"], ordered: Int[np.ndarray, " m"]) -> Bool[np.ndarray, " n"]:
    """Which keys are in `ordered`, which is sorted and not empty."""
    at = np.searchsorted(ordered, keys)
    return np.asarray(ordered[np.minimum(at, len(ordered) - 1)] == keys)


def find_good(clicks: Clicks, min_rating: float) -> Bool[np.ndarray, " rows"]:
    """Which rows count."""
    if clicks.rating is None:
        return np.ones(len(clicks), bool)
    return np.asarray(clicks.rating >= min_rating)


def read_ahead(source: Source) -> Iterator[Clicks]:
    """The clicks of all groups in order; the next group is read in the background."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(source.read, 0)
        for group in range(len(source)):
            clicks = coming.result()
            if group + 1 < len(source):
                coming = pool.submit(source.read, group + 1)
            yield clicks


def survey(
    source: Source, progress: Callable[[int, int], object], **rules: Any
) -> tuple[Parts, dict[str, Any]]:
    """Go over all row groups once; `progress` is called with the rows done and their total."""
    found = Survey(source, **rules)
    done, total = 0, int(source.groups[:, 2].sum())
    for group, clicks in enumerate(read_ahead(source)):
        try:
            found.add(group, clicks)
        except NotTogetherError:
            raise
        except ValueError as error:
            raise ValueError(f"{source.name(group)}: {error}") from error
        done += int(source.groups[group, 2])
        progress(done, total)
    return found.finish()


def names_of(parts: Parts) -> Any:
    """The names of the items; None if they are hashed."""
    if "ends" in parts:
        return Names(parts["ends"], parts["text"])
    return parts.get("keys")


def _key(one: tuple[int, int, int, Clicks]) -> int:
    return one[1]


def _slice(values: NDArray[Any] | None, rows: slice) -> NDArray[Any] | None:
    return None if values is None else values[rows]
