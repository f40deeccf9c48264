"""Logs of who clicked what, and when.

The protocol: ratings of at least 4, users with at least 10 of them, unless told otherwise; some
users are held out for validation and some for the test. The first half of a held-out user's items
by time is the history, the second half the truth.
"""

import dataclasses
import hashlib
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Num, Shaped
from numpy.typing import NDArray

from givens.checks import check_number, check_seed, check_whole

MIN_RATING, MIN_ITEMS = 4.0, 10
# Of a rating, beside its sign.
LARGEST = 1e9
# Of each kind; a fifth of the users where there are few.
HELD_OUT = 1000
# Tastes of a user of the built-in log, and how likely each is.
TASTES, SHARES = 3, (0.5, 0.3, 0.2)
# How far around a taste clicks fall: as part of the ring, and no more than so many items.
SPREAD, AROUND = 0.005, 50
# Clicks that follow popularity alone.
STRAY = 0.1
# Over its time, the items of a drifting log change their neighbours so many times.
EPOCHS = 16
# How often a word of a query is a wrong one.
WRONG = 0.1


@dataclass(frozen=True)
class Selection:
    """The rules by which rows and users of a file are kept, and how many they leave out."""

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
class Log:
    """Clicks by user, each user's in order of time."""

    name: str
    starts: Int[np.ndarray, " starts"]
    """Where each user's clicks begin; the last number is the number of clicks."""
    items: Int[np.ndarray, " clicks"]
    times: Float[np.ndarray, " clicks"]
    """From 0 to 1, in the log's order of time."""
    catalogue: int
    """How many items there are."""
    train: Int[np.ndarray, " a"]
    valid: Int[np.ndarray, " b"]
    test: Int[np.ndarray, " c"]
    words: Int[np.ndarray, "users w"] | None = None
    """What a user says of what is wanted: a query's words, or features."""
    names: Shaped[np.ndarray, " catalogue"] | None = None
    """What the items are called where the log is from."""
    selection: Selection | None = None
    """What was left out of the file; none where the log was made in memory."""

    @property
    def rules(self) -> dict[str, float]:
        """The rules by which rows and users were kept; none where the log was made in memory."""
        return {} if self.selection is None else self.selection.rules

    @property
    def users(self) -> int:
        """How many users there are."""
        return len(self.starts) - 1

    @property
    def vocabulary(self) -> int:
        """How many different words there are."""
        return 0 if self.words is None else int(self.words.max()) + 1

    @property
    def unseen(self) -> int:
        """How many items no training user has clicked: nothing can be learned of them."""
        trained = np.zeros(self.users, bool)
        trained[self.train] = True
        clicked = self.items[np.repeat(trained, np.diff(self.starts))]
        return self.catalogue - len(np.unique(clicked))

    @property
    def fingerprint(self) -> str:
        """By which a checkpoint knows its log."""
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
    """A log from rows, by the protocol; without times, rows are in their order.

    Args:
        user: of each row.
        item: of each row.
        rating: of each row; without ratings every row counts.
        time: of each row.
        name: of the log, for messages.
        min_rating: the rule of `readers.read`, as all that follow.
        min_items: users with fewer rows go.
        held_out: how many users each for validation and test.
        seed: of their draw.
    """
    check_number("min_rating", min_rating, -LARGEST)
    # One for the history, one for the truth.
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
        rated, lower = f" rated {min_rating:g} or more", " or min_rating"
        if rating is None:
            rated = lower = ""
        raise ValueError(
            f"{name} has no valid users: none has {min_items} items{rated} in {rows:,} rows; "
            f"lower min_items{lower}"
        )
    low, few = rows - len(user), everyone - int((counts >= min_items).sum())
    selection = Selection(min_rating, min_items, rows, low, everyone, few, rated=rating is not None)
    user, item, time = user[many], item[many], time[many]
    order = np.lexsort((time, user))
    names, items = np.unique(item[order], return_inverse=True)
    counts = counts[counts >= min_items]
    # Where a click stands among all by time, so that no clock's scale matters.
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
    """A log with users held out by the seed."""
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
    for user in (valid, test):
        chosen = np.zeros(users, bool)
        chosen[user] = True
        if not seen[items[np.repeat(chosen, counts)]].any():
            raise ValueError(
                f"{name} cannot be learned: every item of the {len(user)} held-out users is seen "
                "by them alone"
            )
        if not any(_has_truth(items[starts[one] : starts[one + 1]]) for one in user):
            raise ValueError(
                f"{name} cannot be tested: none of the {len(user)} held-out users has an item in "
                "the second half that was not in the first"
            )
    return Log(name, starts, items, times, len(seen), train, valid, test, words)


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
    """A log made up of taste, popularity and drift.

    The items lie on a ring, each over an arc as long as it is popular. A user has a few tastes,
    points of the ring; a click falls near one of them, or anywhere. With the drift items wander, so
    that what was alike is so no longer. A query's words name the stretches its tastes are in.

    Args:
        users: each of at least 10 clicks.
        items: in the catalogue, popular by a power law.
        clicks: of all users.
        drift: how far along the ring items wander over the log's time, as part of the ring.
        words: that users have to say what they look for, as in search, each for a stretch of the
            ring; 0 for none.
        seed: of everything.
    """
    for name, number, least in (("users", users, 10), ("items", items, 2), ("clicks", clicks, 1)):
        check_whole(name, number, least)
    check_whole("words", words, 0)
    check_number("drift", drift, 0)
    check_seed(seed)
    if clicks < MIN_ITEMS * users:
        raise ValueError(
            f"clicks must be at least {MIN_ITEMS} for each user, "
            f"but got clicks={clicks} for users={users}"
        )
    rng = np.random.default_rng(seed)
    shares = rng.lognormal(0, 1, users)
    counts = MIN_ITEMS + rng.multinomial(clicks - MIN_ITEMS * users, shares / shares.sum())
    starts = np.cumsum(counts) - counts
    user = np.repeat(np.arange(users), counts)
    # One click in each part of a user's time: in order without a sort.
    times = (np.arange(clicks) - starts[user] + rng.random(clicks)) / counts[user]
    tastes = rng.random((users, TASTES))
    at = tastes[user, rng.choice(TASTES, clicks, p=SHARES)]
    at += rng.laplace(0, min(SPREAD, AROUND / items), clicks)
    stray = rng.random(clicks) < STRAY
    at[stray] = rng.random(int(stray.sum()))
    clicked = _find_on_ring(at % 1, times, items, drift, rng)
    said = None
    if words:
        said = (tastes * words).astype(np.int32)
        wrong = rng.random(said.shape) < WRONG
        said[wrong] = rng.integers(0, words, int(wrong.sum()))
    return hold_out(
        "built-in", counts, clicked, times.astype(np.float32), said, catalogue=items, seed=seed
    )


def _find_on_ring(
    at: NDArray[np.float64],
    times: NDArray[np.float64],
    items: int,
    drift: float,
    rng: np.random.Generator,
) -> NDArray[np.int32]:
    """The items whose arcs the points are in, at their times."""
    popularity = (rng.permutation(items) + 10.0) ** -0.8
    places, speed = rng.random(items), rng.uniform(-drift, drift, items)
    clicked = np.empty(len(at), np.int32)
    epoch = (times * EPOCHS).astype(np.int64) if drift else np.zeros(len(at), np.int64)
    for number in np.unique(epoch):
        order = np.argsort((places + speed * number / EPOCHS) % 1).astype(np.int32)
        ends = np.cumsum(popularity[order])
        here = epoch == number
        found = np.searchsorted(ends, at[here] * ends[-1], side="right")
        clicked[here] = order[np.minimum(found, items - 1)]
    return clicked
