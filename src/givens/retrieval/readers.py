"""Logs from files, in the layouts that they are handed out in.

| layout | files |
|---|---|
| MovieLens 1M, 10M | `ratings.dat`: user::item::rating::time |
| MovieLens 20M, 25M | `ratings.csv` with its header |
| Amazon 5-core reviews | JSON lines, `.json` or `.json.gz` |
| KGAT | `train.txt` and `test.txt`: user item item … |
| plain rows | one `.txt`, `.tsv`, `.csv` or `.inter`: user item [time], or user item item … |
"""

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from givens.retrieval.data import HELD_OUT, Log, split

REVIEW = ("reviewerID", "asin", "overall", "unixReviewTime")
# What a header may call its columns, in the order user, item, rating, time.
COLUMNS = (
    ("user", "userid", "user_id", "reviewerid"),
    ("item", "itemid", "item_id", "movieid", "asin"),
    ("rating", "overall"),
    ("time", "timestamp", "unixreviewtime"),
)
PLAIN = (".txt", ".tsv", ".csv", ".inter")
# Bytes of text that become numbers at once.
SLAB = 1 << 26

Table = list[NDArray[Any] | None]
"""Users, items, ratings and times; the last two may be missing."""


def read(path: str | Path, *, held_out: int = HELD_OUT, seed: int = 0) -> Log:
    """The log in a folder or file, its layout found out by the names in it."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no log {path}")
    user, item, rating, time = _table(path)
    if user is None or item is None:
        raise ValueError(f"{path} has no rows")
    return split(user, item, rating, time, name=path.name, held_out=held_out, seed=seed)


def _table(path: Path) -> Table:
    if path.is_dir():
        return _folder(path)
    if path.name.endswith((".json", ".json.gz")):
        return _reviews(path)
    if path.suffix == ".dat":
        return _columns(path, _numbers(path, "::"), 4)
    if path.suffix in PLAIN:
        return _plain(path)
    raise ValueError(f"{path} is of no known layout; one of .dat, .json, .json.gz, .txt, .csv")


def _folder(folder: Path) -> Table:
    for name in ("ratings.dat", "ratings.csv"):
        if (folder / name).exists():
            return _table(folder / name)
    if (folder / "train.txt").exists() and (folder / "test.txt").exists():
        # A user's test items come after the others.
        parts = [_baskets(folder / name) for name in ("train.txt", "test.txt")]
        return [np.concatenate(part) for part in zip(*parts, strict=True)] + [None, None]
    found = [path for path in sorted(folder.iterdir()) if path.name.endswith((".json", ".json.gz"))]
    found = found or [path for path in sorted(folder.iterdir()) if path.suffix in PLAIN]
    if len(found) == 1:
        return _table(found[0])
    what = f"several: {', '.join(path.name for path in found)}" if found else "none"
    raise ValueError(
        f"{folder} must hold ratings.dat, ratings.csv, train.txt and test.txt, or one file of "
        f"reviews or rows, but has {what}; name a file"
    )


def _plain(path: Path) -> Table:
    with path.open() as file:
        head = file.readline()
    comma = "," if "," in head else None
    fields = [field.strip().split(":")[0].lower() for field in head.split(comma)]
    named = any(field in names for names in COLUMNS for field in fields)
    if not fields or not head.strip():
        raise ValueError(f"{path} is empty")
    if named:
        return _named(path, fields, comma)
    try:
        numbers = _numbers(path, comma)
    except ValueError:
        numbers = None
    if numbers is None:
        return _texts(path, comma, 0, [0, 1, None, 2 if len(fields) > 2 else None])
    with path.open() as file:
        lines = sum(1 for line in file if line.strip())
    if len(fields) <= 3 and len(numbers) == lines * len(fields):
        return _columns(path, numbers, len(fields))
    return [*_baskets(path), None, None]


def _named(path: Path, fields: list[str], comma: str | None) -> Table:
    """Rows under a header."""
    at = [next((i for i, f in enumerate(fields) if f in names), None) for names in COLUMNS]
    for what, found in zip(("user", "item"), at, strict=False):
        if found is None:
            known = ", ".join(COLUMNS[("user", "item").index(what)])
            raise ValueError(
                f"{path} has no column of the {what}s ({known}), but {', '.join(fields)}"
            )
    try:
        table = _columns(path, _numbers(path, comma, skip=1), len(fields), named=True)
    except ValueError:
        return _texts(path, comma, 1, at)
    return [None if i is None else table[i] for i in at]


def _columns(path: Path, numbers: NDArray[np.float64], count: int, *, named: bool = False) -> Table:
    if len(numbers) == 0 or len(numbers) % count:
        raise ValueError(f"{path} must have {count} numbers in every row, but has not")
    columns: Table = list(numbers.reshape(-1, count).T)
    if named or count == 4:
        return columns
    return [*columns[:2], None, columns[2] if count == 3 else None]


def _numbers(path: Path, between: str | None, *, skip: int = 0) -> NDArray[np.float64]:
    """All numbers of a text, a slab of whole lines at a time."""
    parts = [np.empty(0)]
    with path.open() as file:
        for _ in range(skip):
            file.readline()
        while slab := file.read(SLAB):
            slab += file.readline()
            text = slab.replace(between, " ") if between else slab
            with warnings.catch_warnings():
                # Before numpy 2.3 it only warns of what is no number, and stops there.
                warnings.simplefilter("error", DeprecationWarning)
                try:
                    parts.append(np.fromstring(text, sep=" "))
                except (DeprecationWarning, ValueError) as error:
                    raise ValueError(f"{path} must hold numbers alone, but does not") from error
    return np.concatenate(parts)


def _texts(path: Path, comma: str | None, skip: int, at: list[int | None]) -> Table:
    """Rows whose users and items are names."""
    with path.open() as file:
        rows = [line.strip().split(comma) for line in file if line.strip()][skip:]
    width = 1 + max(i for i in at if i is not None)
    if not rows or min(map(len, rows)) < width:
        raise ValueError(f"{path} must have {width} columns in every row, but has not")
    table: Table = []
    for column, i in enumerate(at):
        values = None if i is None else np.array([row[i] for row in rows])
        if values is not None and column < 2:
            values = np.unique(values, return_inverse=True)[1]
        elif values is not None:
            try:
                values = values.astype(np.float64)
            except ValueError as error:
                raise ValueError(f"{path} must have numbers as {COLUMNS[column][0]}s") from error
        table.append(values)
    return table


def _baskets(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """User item item …, a user in each line."""
    users: list[NDArray[np.int64]] = []
    items: list[NDArray[np.int64]] = []
    with path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                row = np.array(line.split(), np.int64)
            except ValueError as error:
                raise ValueError(
                    f"{path} must hold numbers alone, but not line {number}"
                ) from error
            if len(row) > 1:
                users.append(np.full(len(row) - 1, row[0]))
                items.append(row[1:])
    if not users:
        raise ValueError(f"{path} has no rows")
    return np.concatenate(users), np.concatenate(items)


def _reviews(path: Path) -> Table:
    """Amazon's reviews: a JSON object in each line."""
    texts: list[tuple[Any, ...]] = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                texts.append(tuple(row[name] for name in REVIEW))
            except KeyError as error:
                raise ValueError(f"{path} has no {error} in line {number}") from error
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path} is not of JSON lines: line {number}") from error
    if not texts:
        raise ValueError(f"{path} has no rows")
    user, item, rating, time = zip(*texts, strict=True)
    numbered = [np.unique(np.array(names), return_inverse=True)[1] for names in (user, item)]
    return [*numbered, np.array(rating, np.float64), np.array(time, np.float64)]
