"""Readers of logs, in the layouts of public datasets.

| layout | files |
|---|---|
| MovieLens 1M, 10M | `ratings.dat`: user::item::rating::time |
| MovieLens 20M, 25M | `ratings.csv` with its header |
| Amazon 5-core reviews | JSON lines, `.json` or `.json.gz` |
| KGAT | `train.txt` and `test.txt`: user item item … |
| plain rows | one `.txt`, `.tsv`, `.csv` or `.inter`, under a header or in the order user item \
[[rating] time]; or user item item … |
| Parquet | a file or a folder of them, streamed: `streamed` |

Text is parsed without pyarrow: its CSV reader is faster, but it is an optional dependency and reads
neither `::` nor lines of different lengths.
"""

import contextlib
import csv
import gzip
import json
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from givens.checks import check_seed, check_whole
from givens.retrieval.data import HELD_OUT, MIN_ITEMS, MIN_RATING, Log, split

REVIEW = ("reviewerID", "asin", "overall", "unixReviewTime")
# The names of columns in a header, in the order user, item, rating, time.
COLUMNS = (
    ("user", "userid", "user_id", "reviewerid"),
    ("item", "itemid", "item_id", "movieid", "asin"),
    ("rating", "overall"),
    ("time", "timestamp", "unixreviewtime"),
)
# Their positions in files without a header, by the number of columns.
LAYOUTS: dict[int, list[int | None]] = {
    2: [0, 1, None, None],
    3: [0, 1, None, 2],
    4: [0, 1, 2, 3],
}
PARQUET = ".parquet"
PLAIN = (".txt", ".tsv", ".csv", ".inter")

Table = list[NDArray[Any] | None]
"""Users, items, ratings and times; the last two may be None."""


def read(
    path: str | Path,
    *,
    min_rating: float = MIN_RATING,
    min_items: int = MIN_ITEMS,
    held_out: int = HELD_OUT,
    seed: int = 0,
    **streaming: Any,
) -> Log:
    """Read the log in a folder or file; the layout is recognised by names and the first line.

    Args:
        path: the folder or file.
        min_rating: rows with lower ratings are left out; without ratings every row counts.
        min_items: users with fewer rows than this are left out.
        held_out: users for validation, and as many for the test; a fifth if there are few.
        seed: the seed of the draw of held-out users.
        streaming: for Parquet files, which are streamed: the other arguments of
            `streamed.read_streamed`.
    """
    check_whole("held_out", held_out, 1)
    check_seed(seed)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no log {path}")
    if is_parquet(path):
        from givens.retrieval.streamed import read_streamed

        return read_streamed(
            path,
            min_rating=min_rating,
            min_items=min_items,
            held_out=held_out,
            seed=seed,
            **streaming,
        )
    if streaming.get("hash_items") is not None:
        raise ValueError(f"hash_items goes with Parquet files, but {path} has none")
    user, item, rating, time = _read_table(path)
    if user is None or item is None:
        raise ValueError(f"{path} has no rows")
    for what, values in (("rating", rating), ("time", time)):
        if values is not None and not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"{path} must have finite {what}s, but row {row} has {values[row]}")
    return split(
        user,
        item,
        rating,
        time,
        name=path.name,
        min_rating=min_rating,
        min_items=min_items,
        held_out=held_out,
        seed=seed,
    )


def is_parquet(path: Path) -> bool:
    """Whether a log is a Parquet file, or a folder with such files or partitions (day=1)."""
    if path.is_file():
        return path.suffix == PARQUET
    known = [path / name for name in ("ratings.dat", "ratings.csv", "train.txt")]
    return not any(one.exists() for one in known) and any(
        inside.suffix == PARQUET if inside.is_file() else "=" in inside.name and is_parquet(inside)
        for inside in path.iterdir()
    )


def _read_table(path: Path) -> Table:
    if path.is_dir():
        return _read_folder(path)
    if path.name.endswith((".json", ".json.gz")):
        return _read_reviews(path)
    if path.suffix == ".dat":
        return _parse_numbers(path, "::", LAYOUTS[4])
    if path.suffix in PLAIN:
        return _read_plain(path)
    raise ValueError(
        f"{path} is of no known layout; one of .dat, .json, .json.gz, .txt, .csv, .parquet"
    )


def _read_folder(folder: Path) -> Table:
    for name in ("ratings.dat", "ratings.csv"):
        if (folder / name).exists():
            return _read_table(folder / name)
    if (folder / "train.txt").exists() and (folder / "test.txt").exists():
        # A user's test items come after the others.
        parts = [_read_baskets(folder / name) for name in ("train.txt", "test.txt")]
        return [np.concatenate(part) for part in zip(*parts, strict=True)] + [None, None]
    found = [path for path in sorted(folder.iterdir()) if path.name.endswith((".json", ".json.gz"))]
    found = found or [path for path in sorted(folder.iterdir()) if path.suffix in PLAIN]
    if len(found) == 1:
        return _read_table(found[0])
    what = f"several: {', '.join(path.name for path in found)}" if found else "none"
    raise ValueError(
        f"{folder} must hold ratings.dat, ratings.csv, train.txt and test.txt, or one file of "
        f"reviews or rows, but has {what}; name a file"
    )


def _read_plain(path: Path) -> Table:
    with _open_text(path) as file:
        head = next((line for line in file if line.strip()), "")
    if not head:
        raise ValueError(f"{path} is empty")
    between = "\t" if "\t" in head else "," if "," in head else None
    fields = [field.strip(' "\n').split(":")[0].lower() for field in head.split(between)]
    if any(field in names for names in COLUMNS for field in fields):
        return _read_named(path, fields, between)
    if len(fields) in LAYOUTS:
        at = LAYOUTS[len(fields)]
        try:
            return _parse_numbers(path, between, at)
        except ValueError:
            if between or not _is_number(fields[0]):
                return _parse_names(path, between, 0, at)
            _check_baskets(path, len(fields))
    elif between:
        raise ValueError(
            f"{path} must have rows of user, item, [rating], [time], or name its columns in its "
            f"first line, but has {len(fields)} columns"
        )
    return [*_read_baskets(path), None, None]


def _read_named(path: Path, fields: list[str], between: str | None) -> Table:
    """Read rows under a header."""
    at = [next((i for i, f in enumerate(fields) if f in names), None) for names in COLUMNS]
    for what, found in zip(("user", "item"), at, strict=False):
        if found is None:
            known = ", ".join(COLUMNS[("user", "item").index(what)])
            raise ValueError(
                f"{path} has no column of the {what}s ({known}), but {', '.join(fields)}"
            )
    try:
        return _parse_numbers(path, between, at, skip=1)
    except ValueError:
        return _parse_names(path, between, 1, at)


def _parse_numbers(
    path: Path, between: str | None, at: list[int | None], *, skip: int = 0
) -> Table:
    """Parse the columns at these positions; users and items are whole numbers."""
    places = sorted(i for i in at if i is not None)
    kinds = [(f"{i}", np.int64 if i in at[:2] else np.float64) for i in places]
    # Rows have no other columns, unless a header names them.
    some, sign = places if skip else None, "\t" if between == "::" else between
    with _open_text(path) as file:
        filled = (line for line in file if line.strip())
        lines = (line.replace("::", "\t") for line in filled) if between == "::" else filled
        with warnings.catch_warnings():
            # loadtxt warns of files without rows; they raise below.
            warnings.simplefilter("ignore", UserWarning)
            try:
                rows = np.loadtxt(lines, kinds, None, sign, None, skip, some, ndmin=1)
            except (ValueError, OverflowError) as error:
                raise ValueError(
                    f"{path} must have {len(places)} numbers in every row, but has not"
                ) from error
    if not len(rows):
        raise ValueError(f"{path} has no rows")
    return [None if i is None else rows[f"{i}"] for i in at]


def _parse_names(path: Path, between: str | None, skip: int, at: list[int | None]) -> Table:
    """Parse the columns at these positions; users and items are names."""
    with _open_text(path) as file:
        lines = (line for line in file if line.strip())
        split_up = csv.reader(lines, delimiter=between) if between else map(str.split, lines)
        try:
            rows = [*split_up][skip:]
        except csv.Error as error:
            raise ValueError(f"{path} is not of rows: {error}") from error
    width = 1 + max(i for i in at if i is not None)
    if not rows or min(map(len, rows)) < width:
        raise ValueError(f"{path} must have {width} columns in every row, but has not")
    table: Table = []
    for column, i in enumerate(at):
        values = None if i is None else np.array([row[i].strip() for row in rows])
        what = COLUMNS[column][0]
        if values is not None and column < 2:
            if not all(values):
                raise ValueError(f"{path} has a row without {what}")
            if any(len(value.splitlines()) > 1 for value in values):
                raise ValueError(f"{path} must have a {what} in one line, but has one in several")
        elif values is not None:
            try:
                values = values.astype(np.float64)
            except ValueError as error:
                raise ValueError(f"{path} must have numbers as {what}s") from error
        table.append(values)
    return table


def _read_baskets(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Read lines of a user and its items (user item item …)."""
    users: list[NDArray[np.int64]] = []
    items: list[NDArray[np.int64]] = []
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            try:
                row = np.array(line.split(), np.int64)
            except (ValueError, OverflowError) as error:
                raise ValueError(
                    f"{path} must hold whole numbers alone, but not line {number}"
                ) from error
            if len(row) > 1:
                users.append(np.full(len(row) - 1, row[0]))
                items.append(row[1:])
    if not users:
        raise ValueError(f"{path} has no rows")
    return np.concatenate(users), np.concatenate(items)


def _read_reviews(path: Path) -> Table:
    """Read Amazon's reviews, a JSON object in each line."""
    texts: list[tuple[Any, ...]] = []
    with _open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                user, item, rating, time = (row[name] for name in REVIEW)
                texts.append(
                    (
                        _check_name(user),
                        _check_name(item),
                        _parse_amount(rating),
                        _parse_amount(time),
                    )
                )
            except KeyError as error:
                raise ValueError(f"{path} has no {error} in line {number}") from error
            except (ValueError, TypeError, OverflowError, RecursionError) as error:
                raise ValueError(f"{path} is not of JSON lines: line {number}") from error
    if not texts:
        raise ValueError(f"{path} has no rows")
    users, items, ratings, times = zip(*texts, strict=True)
    return [np.array(users), np.array(items), np.array(ratings), np.array(times)]


def _check_name(value: Any) -> str:
    """The name of a user or item, which must be one line of text."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError("a name must be a text or a number")
    name = str(value)
    if not name or len(name.splitlines()) > 1:
        raise ValueError("a name must be one line")
    # Raises for text that cannot be written as UTF-8.
    name.encode()
    return name


def _parse_amount(value: Any) -> float:
    """A rating or time."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError("a rating or time must be a number")
    return float(value)


@contextlib.contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    """Open a text file, compressed or not, with or without a byte-order mark."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8-sig") as file:
                yield file
        else:
            with path.open(encoding="utf-8-sig") as file:
                yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, but is not") from error
    except EOFError as error:
        raise ValueError(f"{path} is truncated") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: it cannot be decompressed") from error


def _check_baskets(path: Path, width: int) -> None:
    """Raise if nearly all rows have the same width: the others are broken rows, not baskets."""
    with _open_text(path) as file:
        widths = [len(line.split()) for line in file]
    others = [number for number, found in enumerate(widths, 1) if found not in (0, width)]
    if others and len(others) < len(widths) / 10:
        raise ValueError(f"{path} has rows of {width} columns, but not in line {others[0]}")


def _is_number(field: str) -> bool:
    return field.removeprefix("-").isdecimal()
