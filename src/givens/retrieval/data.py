"""Click logs: who clicked what, and when.

The protocol: ratings of at least 4 and users with at least 10 of them, by default; some users are
held out for validation and some for the test. The first half of a held-out user's items by time is
the history, the second half the truth.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Num, Shaped, UInt8
from numpy.typing import NDArray

from givens.checks import check_number, check_seed, check_whole

MIN_RATING, MIN_ITEMS = 4.0, 10
# The largest absolute rating.
LARGEST = 1e9
# Held-out users of each kind; a fifth of all users if there are few.
HELD_OUT = 1000
# Tastes of a user of the built-in log, and their probabilities.
TASTES, SHARES = 3, (0.5, 0.3, 0.2)
# The spread of clicks around a taste: a share of the ring, and a bound in items.
SPREAD, AROUND = 0.005, 50
# The share of clicks that follow popularity only.
STRAY = 0.1
# The number of times that the items of a drifting log change their places.
EPOCHS = 16
# The probability that a word of a query is wrong.
WRONG = 0.1
# Names in one write.
NAMES_AT_ONCE = 65_536


@dataclass(frozen=True)
class Selection:
    """The rules that select rows and users of a file, and how many they leave out."""

    min_rating: float
    """Rows with lower ratings are left out; without ratings every row counts."""
    min_items: int
    """Users with fewer rows than this are left out."""
    rows: int
    low_rows: int
    """Of `rows`, those rated below `min_rating`."""
    users: int
    small_users: int
    """Of `users`, those with fewer than `min_items` rows that count."""
    rated: bool

    @property
    def rules(self) -> dict[str, float]:
        """The rules by name."""
        return {"min_rating": self.min_rating, "min_items": self.min_items}

    @property
    def drops(self) -> bool:
        """Whether anything is left out."""
        return bool(self.low_rows or self.small_users)

    def __str__(self) -> str:
        rated = f" rated {self.min_rating:g} or more" if self.rated else ""
        text = (
            f"{self.small_users:,} of {self.users:,} users have under {self.min_items} items{rated}"
        )
        if self.rated:
            text += f", {self.low_rows:,} of {self.rows:,} ratings are below {self.min_rating:g}"
        return text


@dataclass(frozen=True, eq=False)
class Names:
    """Names in one UTF-8 buffer with offsets, without a Python object for each."""

    ends: Int[np.ndarray, " ends"]
    """Name i is from byte `ends[i]` to byte `ends[i + 1]`."""
    text: UInt8[np.ndarray, " bytes"]

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, rows: slice) -> list[str]:
        ends = self.ends[rows.start or 0 : len(self) + 1 if rows.stop is None else rows.stop + 1]
        raw = self.text[ends[0] : ends[-1]].tobytes() if len(ends) else b""
        at = (ends - ends[0]).tolist() if len(ends) else []
        return [raw[a:b].decode() for a, b in itertools.pairwise(at)]


def write_names(path: Path, names: "Shaped[np.ndarray, ' catalogue'] | Names") -> None:
    """Write a line for each name, in chunks."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for first in range(0, len(names), NAMES_AT_ONCE):
            file.writelines(f"{name}\n" for name in names[first : first + NAMES_AT_ONCE])


@dataclass(frozen=True, eq=False)
class Log:
    """Clicks by user, each user's in order of time."""

    name: str
    starts: Int[np.ndarray, " starts"]
    """The first click of each user; the last entry is the number of clicks."""
    items: Int[np.ndarray, " clicks"]
    times: Float[np.ndarray, " clicks"]
    """From 0 to 1, in the log's order of time."""
    catalogue: int
    """The number of items."""
    train: Int[np.ndarray, " a"]
    valid: Int[np.ndarray, " b"]
    test: Int[np.ndarray, " c"]
    words: Int[np.ndarray, "users w"] | None = None
    """What a user looks for: the words of a query, or features."""
    names: Shaped[np.ndarray, " catalogue"] | Names | None = None
    """The items' names in the source of the log."""
    selection: Selection | None = None
    """What was left out of the file; None for a log made in memory."""

    @property
    def rules(self) -> dict[str, float]:
        """The rules that selected rows and users; empty for a log made in memory."""
        return {} if self.selection is None else self.selection.rules

    @property
    def users(self) -> int:
        """The number of users."""
        return len(self.starts) - 1

    @property
    def streamed(self) -> bool:
        """Whether only the clicks of held-out users are in memory, the others in files."""
        return False

    @property
    def vocabulary(self) -> int:
        """The number of different words."""
        return 0 if self.words is None else int(self.words.max()) + 1

    @property
    def unseen(self) -> int:
        """The number of items that no training user has clicked, so that they are not trained."""
        trained = np.zeros(self.users, bool)
        trained[self.train] = True
        clicked = self.items[np.repeat(trained, np.diff(self.starts))]
        return self.catalogue - len(np.unique(clicked))

    @property
    def fingerprint(self) -> str:
        """A digest by which a checkpoint identifies its log."""
        digest = hashlib.sha256(f"{self.catalogue}".encode())
        for part in (self.starts, self.items, self.train, self.valid, self.test, self.words):
            digest.update(b"" if part is None else part.tobytes())
        return digest.hexdigest()[:32]

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.items):,} clicks of {self.users:,} users on "
            f"{self.catalogue:,} items; {len(self.valid):,} users held out for validation, "
            f"{len(self.test):,} for the test; {self.unseen:,} items seen by none but them"
        )


def split(
    user: Shaped[np.ndarray, " rows"],
    item: Shaped[np.ndarray, " rows"],
    rating: Num[np.ndarray, " rows"] | None = None,
    time: Num[np.ndarray, " rows"] | None = None,
    *,
    name: str = "log",
    min_rating: float = MIN_RATING,
    min_items: int = MIN_ITEMS,
    held_out: int = HELD_OUT,
    seed: int = 0,
) -> Log:
    """Make a log from rows, by the protocol.

    Args:
        user: the user of each row.
        item: the item of each row.
        rating: the rating of each row; without ratings every row counts.
        time: the time of each row; by default rows are in order of time.
        name: the name of the log, for messages.
        min_rating: rows with lower ratings are left out.
        min_items: users with fewer rows than this are left out.
        held_out: users for validation, and as many for the test; a fifth if there are few.
        seed: the seed of the draw of held-out users.
    """
    check_number("min_rating", min_rating, -LARGEST)
    # At least one for the history and one for the truth.
    check_whole("min_items", min_items, 2)
    rows, everyone = len(user), len(np.unique(user))
    if time is None:
        time = np.arange(len(user))
    if rating is not None:
        good = rating >= min_rating
        user, item, time = user[good], item[good], time[good]
    _, user, counts = np.unique(user, return_inverse=True, return_counts=True)
    many = counts[user] >= min_items if len(user) else np.zeros(0, bool)
    if not many.any():
        raise ValueError(
            describe_empty(name, rows, min_rating, min_items, rated=rating is not None)
        )
    low, few = rows - len(user), everyone - int((counts >= min_items).sum())
    selection = Selection(min_rating, min_items, rows, low, everyone, few, rated=rating is not None)
    user, item, time = user[many], item[many], time[many]
    order = np.lexsort((time, user))
    names, items = np.unique(item[order], return_inverse=True)
    counts = counts[counts >= min_items]
    # Ranks of the times from 0 to 1, so that their unit does not matter.
    places = np.empty(len(order), np.float32)
    places[np.argsort(time[order], kind="stable")] = np.linspace(0, 1, len(order), dtype=np.float32)
    log = hold_out(name, counts, items.astype(np.int32), places, held_out=held_out, seed=seed)
    return dataclasses.replace(log, names=names, selection=selection)


def hold_out(
    name: str,
    counts: Int[np.ndarray, " users"],
    items: Int[np.ndarray, " clicks"],
    times: Float[np.ndarray, " clicks"],
    words: Int[np.ndarray, "users w"] | None = None,
    *,
    catalogue: int | None = None,
    held_out: int = HELD_OUT,
    seed: int = 0,
) -> Log:
    """Make a log, with held-out users drawn by the seed."""
    users = len(counts)
    out = min(held_out, users // 5)
    if out < 1:
        raise ValueError(
            f"{name} must have at least 5 valid users to hold some out, but has {users}"
        )
    drawn = np.random.default_rng(seed).permutation(users)
    valid, test, train = (np.sort(part) for part in np.split(drawn, [out, 2 * out]))
    starts = np.concatenate([[0], np.cumsum(counts)])
    trained = np.zeros(users, bool)
    trained[train] = True
    seen = np.zeros(catalogue or int(items.max()) + 1, bool)
    seen[items[np.repeat(trained, counts)]] = True
    check_held_out(name, starts, items, seen, valid, test)
    return Log(name, starts, items, times, len(seen), train, valid, test, words)


def check_held_out(
    name: str,
    starts: Int[np.ndarray, " starts"],
    items: Int[np.ndarray, " clicks"],
    seen: Bool[np.ndarray, " catalogue"],
    *halves: Int[np.ndarray, " b"],
) -> None:
    """Raise if held-out users share no item with training users, or have no truth.

    Args:
        name: the name of the log.
        starts: where the clicks of each user begin.
        items: the items of all clicks.
        seen: which items training users have clicked.
        halves: the users for validation and for the test.
    """
    for users in halves:
        clicks = [items[starts[one] : starts[one + 1]] for one in users]
        if not seen[np.concatenate(clicks)].any():
            raise ValueError(
                f"{name} cannot be learned: every item of the {len(users)} held-out users is seen "
                "by them alone"
            )
        if not any(map(_has_truth, clicks)):
            raise ValueError(
                f"{name} cannot be tested: none of the {len(users)} held-out users has an item in "
                "the second half that was not in the first"
            )


def describe_empty(name: str, rows: int, min_rating: float, min_items: int, *, rated: bool) -> str:
    """The error message for a log without valid users."""
    text, lower = (f" rated {min_rating:g} or more", " or min_rating") if rated else ("", "")
    return (
        f"{name} has no valid users: none has {min_items} items{text} in {rows:,} rows; "
        f"lower min_items{lower}"
    )


def _has_truth(items: Int[np.ndarray, " clicks"]) -> bool:
    half = len(items) // 2
    return not np.isin(items[half:], items[:half]).all()


def click_log(
    users: int = 20_000,
    items: int = 10_000,
    clicks: int = 600_000,
    *,
    drift: float = 0.002,
    words: int = 0,
    seed: int = 0,
) -> Log:
    """Generate a log from taste, popularity and drift.

    The items lie on a ring, each on an arc whose length is its popularity. A user has a few tastes,
    which are points of the ring; a click falls near one of them, or anywhere. With drift, items
    move along the ring, so that similar items become dissimilar. The words of a query name the
    sections of the ring that its tastes are in.

    Args:
        users: users, of at least 10 clicks each.
        items: items in the catalogue, with popularities by a power law.
        clicks: clicks of all users.
        drift: how far items move over the time of the log, as a share of the ring.
        words: the vocabulary of queries, one word for each section of the ring; 0 for no queries.
        seed: the seed of all random draws.
    """
    for name, number, least in (("users", users, 10), ("items", items, 2), ("clicks", clicks, 1)):
        check_whole(name, number, least)
    check_whole("words", words, 0)
    check_number("drift", drift, 0)
    check_seed(seed)
    _check_clicks(clicks, users)
    rng = np.random.default_rng(seed)
    counts, times, tastes, at = _draw_clicks(users, items, clicks, rng)
    clicked = _Ring(items, drift, rng).find(at, times)
    said = None
    if words:
        said = (tastes * words).astype(np.int32)
        wrong = rng.random(said.shape) < WRONG
        said[wrong] = rng.integers(0, words, int(wrong.sum()))
    return hold_out(
        "built-in", counts, clicked, times.astype(np.float32), said, catalogue=items, seed=seed
    )


def click_pieces(
    users: int, items: int, clicks: int, *, piece: int = 50_000, seed: int = 0
) -> Iterator[tuple[Int[np.ndarray, " piece"], Int[np.ndarray, " clicks"]]]:
    """Generate a built-in log without drift in pieces, so that it need not fit in memory.

    Yields the number of clicks of each user, and their items, user by user and in order of time.

    Args:
        users: users, as in `click_log`.
        items: items in the catalogue.
        clicks: clicks of all users.
        piece: users in a piece.
        seed: the seed of all random draws.
    """
    for name, number in (("users", users), ("items", items), ("piece", piece)):
        check_whole(name, number, 1)
    check_seed(seed)
    _check_clicks(clicks, users)
    ring = _Ring(items, 0.0, np.random.default_rng(seed))
    for first in range(0, users, piece):
        end = min(first + piece, users)
        rng = np.random.default_rng([seed, first])
        number = end * clicks // users - first * clicks // users
        counts, times, _, at = _draw_clicks(end - first, items, number, rng)
        yield counts, ring.find(at, times)


def _check_clicks(clicks: int, users: int) -> None:
    if clicks < MIN_ITEMS * users:
        raise ValueError(
            f"clicks must be at least {MIN_ITEMS} for each user, "
            f"but got clicks={clicks} for users={users}"
        )


def _draw_clicks(
    users: int, items: int, clicks: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The number of clicks of each user, their times, the users' tastes, and points of clicks."""
    shares = rng.lognormal(0, 1, users)
    counts = MIN_ITEMS + rng.multinomial(clicks - MIN_ITEMS * users, shares / shares.sum())
    starts = np.cumsum(counts) - counts
    user = np.repeat(np.arange(users), counts)
    # One click in each interval of a user's time, so that they are sorted.
    times = (np.arange(clicks) - starts[user] + rng.random(clicks)) / counts[user]
    tastes = rng.random((users, TASTES))
    at = tastes[user, rng.choice(TASTES, clicks, p=SHARES)]
    at += rng.laplace(0, min(SPREAD, AROUND / items), clicks)
    stray = rng.random(clicks) < STRAY
    at[stray] = rng.random(int(stray.sum()))
    return counts, times, tastes, at % 1


class _Ring:
    """Items on a ring, each on an arc whose length is its popularity."""

    def __init__(self, items: int, drift: float, rng: np.random.Generator) -> None:
        self.popularity = (rng.permutation(items) + 10.0) ** -0.8
        self.places, self.speed = rng.random(items), rng.uniform(-drift, drift, items)
        self.drift = drift
        # The arcs of the latest epoch.
        self.known: tuple[int, Any, Any] = (-1, None, None)

    def find(self, at: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.int32]:
        """The items whose arcs hold these points at these times."""
        clicked = np.empty(len(at), np.int32)
        epoch = np.zeros(len(at), np.int64)
        if self.drift:
            epoch = (times * EPOCHS).astype(np.int64)
        for number in np.unique(epoch):
            order, ends = self._find_arcs(int(number))
            here = np.flatnonzero(epoch == number)
            # Sorted, so that the lookups of neighbouring points share caches.
            here = here[np.argsort(at[here])]
            found = np.searchsorted(ends, at[here] * ends[-1], side="right")
            clicked[here] = order[np.minimum(found, len(order) - 1)]
        return clicked

    def _find_arcs(self, epoch: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The items in order, and where the arc of each ends."""
        if self.known[0] != epoch:
            order = np.argsort((self.places + self.speed * epoch / EPOCHS) % 1).astype(np.int32)
            self.known = (epoch, order, np.cumsum(self.popularity[order]))
        return self.known[1], self.known[2]
