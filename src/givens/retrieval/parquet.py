"""Logs in Parquet files, a row group at a time.

The columns are those of `readers.COLUMNS`, with a row for each click (user, item[, rating][, time])
or for each user, with a list of items and optional lists of ratings and times of the same length.
Users and items are whole numbers or text, and become 64-bit keys: a number is its own key, text is
hashed. Among 20 million names, the probability of a collision is 10⁻⁵.
"""

import dataclasses
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Num
from numpy.typing import NDArray

from givens.kernels.cpu.keys import hash_texts
from givens.retrieval.data import click_pieces
from givens.retrieval.readers import COLUMNS, PARQUET
from givens.storage import files
from givens.storage.formats import reading

WHAT = tuple(names[0] for names in COLUMNS)
# About this many rows are in a row group that `write_clicks` writes.
GROUP = 250_000


@dataclass(frozen=True, eq=False)
class Clicks:
    """Rows of a log."""

    user: Int[np.ndarray, " rows"]
    item: Int[np.ndarray, " rows"]
    rating: Num[np.ndarray, " rows"] | None
    time: Num[np.ndarray, " rows"] | None
    texts: tuple[NDArray[np.int64], Any] | None = None
    """For text items: the keys of the distinct items, and their texts as an Arrow array."""

    def __len__(self) -> int:
        return len(self.user)

    def __getitem__(self, rows: Any) -> "Clicks":
        rating, time = (None if x is None else x[rows] for x in (self.rating, self.time))
        return Clicks(self.user[rows], self.item[rows], rating, time, self.texts)

    def drop_other_texts(self) -> "Clicks":
        """The same rows, with only the texts of their own items."""
        if self.texts is None:
            return self
        keys, texts = self.texts
        mine = np.flatnonzero(np.isin(keys, self.item))
        return dataclasses.replace(self, texts=(keys[mine], texts.take(mine)))


def join(parts: list[Clicks]) -> Clicks:
    """Concatenate rows."""
    if len(parts) == 1:
        return parts[0]
    user, item = (np.concatenate([getattr(part, what) for part in parts]) for what in WHAT[:2])
    rating, time = (
        None
        if getattr(parts[0], what) is None
        else np.concatenate([getattr(part, what) for part in parts])
        for what in WHAT[2:]
    )
    texts = [part.texts for part in parts if part.texts is not None]
    if not texts:
        return Clicks(user, item, rating, time)
    import pyarrow as pa

    keys, arrays = zip(*texts, strict=True)
    return Clicks(user, item, rating, time, (np.concatenate(keys), pa.concat_arrays(arrays)))


def list_files(path: Path) -> list[Path]:
    """The Parquet files of a folder and its partitions (day=1) by name; or the file itself."""
    if path.is_file():
        return [path]
    found = []
    for inside in sorted(path.iterdir()):
        if inside.is_dir() and "=" in inside.name:
            found += list_files(inside)
        elif inside.suffix == PARQUET and inside.is_file() and inside.name[0] not in "._":
            found.append(inside)
    return found


class Source:
    """The Parquet files of a log, and their row groups that are not empty."""

    def __init__(self, path: Path, title: str | None = None) -> None:
        """Read the columns and row groups of all files; `title` is for messages."""
        self.path, self.title = path, title or path.name
        self.files = list_files(path)
        if not self.files:
            raise ValueError(f"{path} has no files that end in {PARQUET}")
        self.columns: dict[str, str] = {}
        self.kinds: dict[str, str] = {}
        # The latest open file. Its reader is not thread-safe.
        self._last: tuple[int, Any] = (-1, None)
        self._lock = threading.Lock()
        groups = []
        for number, file in enumerate(self.files):
            opened = self._open(number)
            self._check_columns(file, opened.schema_arrow)
            about = opened.metadata
            sizes = [about.row_group(group).num_rows for group in range(about.num_row_groups)]
            if min(sizes, default=0) < 0 or sum(sizes) != about.num_rows:
                raise ValueError(f"{file} is damaged: the rows of its groups do not add up")
            groups += [(number, group, size) for group, size in enumerate(sizes) if size]
        self.groups = np.array(groups, np.int64).reshape(-1, 3)
        """For each group: the number of its file, its number in the file, and its rows."""
        if not len(groups):
            raise ValueError(f"{path} has no rows")

    def __len__(self) -> int:
        return len(self.groups)

    def name(self, group: int) -> str:
        """The name of a group, for messages."""
        return f"{self.files[self.groups[group, 0]]}, row group {self.groups[group, 1]}"

    def read(self, group: int, rows: int | None = None) -> Clicks:
        """Read the clicks of a group, or of its first rows."""
        found = self.read_columns(group, rows)
        try:
            user, _ = make_keys(found["user"])
            item, texts = make_keys(found["item"])
        except ValueError as error:
            raise ValueError(
                f"{self.name(group)} must have users and items below 2⁶³, but has larger ones"
            ) from error
        amounts = [make_numbers(found[what]) if what in found else None for what in WHAT[2:]]
        for what, values in zip(WHAT[2:], amounts, strict=True):
            if values is not None and not (good := np.isfinite(values)).all():
                row = int(np.flatnonzero(~good)[0])
                raise ValueError(
                    f"{self.name(group)} must have finite {what}s, but row {row} has {values[row]}"
                )
        return Clicks(user, item, amounts[0], amounts[1], texts)

    def read_columns(self, group: int, rows: int | None = None) -> dict[str, Any]:
        """Read the columns of a group, or of its first rows, by meaning; a row for each click."""
        import pyarrow as pa

        number, inside, size = map(int, self.groups[group])
        file, wanted = self.files[number], list(self.columns.values())
        with self._lock:
            opened = self._open(number)
            with reading(file):
                if rows is None or rows >= size:
                    table = opened.read_row_group(inside, columns=wanted)
                else:
                    # Decodes no more than these rows.
                    batches = opened.iter_batches(rows, [inside], wanted)
                    table = pa.Table.from_batches([next(iter(batches))])
                found = {
                    what: table.column(name).combine_chunks() for what, name in self.columns.items()
                }
        if len(table) != min(rows or size, size):
            raise ValueError(f"{file} is damaged: group {inside} does not have {size:,} rows")
        for what, column in found.items():
            self._check_nulls(group, what, column)
        return self._flatten(group, found) if self.kinds["item"].startswith("list") else found

    def _open(self, number: int) -> Any:
        if self._last[0] != number:
            try:
                import pyarrow.parquet as pq
            except ImportError as error:
                raise ImportError(
                    f"{self.path} needs pyarrow: pip install 'givens[formats]'"
                ) from error
            file = self.files[number]
            if not file.is_file():
                raise FileNotFoundError(f"there is no file {file}, which was there before")
            if not file.stat().st_size:
                raise ValueError(f"{file} is empty")
            with reading(file, "is not a parquet file, or is truncated"):
                # Checksums are verified if the file has them.
                self._last = (number, pq.ParquetFile(file, page_checksum_verification=True))
        return self._last[1]

    def _check_columns(self, file: Path, schema: Any) -> None:
        """Find the columns of the first file, or check that another file has the same."""
        named = {name.lower(): name for name in reversed(schema.names)}
        columns = {
            what: next(named[name] for name in names if name in named)
            for what, names in zip(WHAT, COLUMNS, strict=True)
            if any(name in named for name in names)
        }
        for what, names in zip(WHAT[:2], COLUMNS, strict=False):
            if what not in columns:
                raise ValueError(
                    f"{file} has no column of the {what}s ({', '.join(names)}), "
                    f"but {', '.join(schema.names)}"
                )
        for name in columns.values():
            if (count := schema.names.count(name)) > 1:
                raise ValueError(f"{file} must have one column {name!r}, but has {count}")
        kinds = {
            what: _check_kind(file, what, schema.field(name).type) for what, name in columns.items()
        }
        lists = {what for what, kind in kinds.items() if kind.startswith("list")}
        if "user" in lists or lists not in (set(), set(kinds) - {"user"}):
            raise ValueError(
                f"{file} must have a row for each click, or for each user with lists of items, "
                f"ratings and times, but has lists of {' and '.join(sorted(lists))} alone"
            )
        self.columns, self.kinds = self.columns or columns, self.kinds or kinds
        if (columns, kinds) != (self.columns, self.kinds):
            mine, theirs = (
                ", ".join(f"{names[what]}: {kind}" for what, kind in those.items())
                for names, those in ((columns, kinds), (self.columns, self.kinds))
            )
            raise ValueError(
                f"{file} must have the columns of {self.files[0].name} ({theirs}), but has {mine}"
            )

    def _check_nulls(self, group: int, what: str, column: Any) -> None:
        holes = column.null_count
        if not holes and self.kinds[what].startswith("list"):
            holes = column.flatten().null_count
        if holes:
            raise ValueError(
                f"{self.name(group)} must have no nulls in {self.columns[what]!r}, but has {holes}"
            )

    def _flatten(self, group: int, found: dict[str, Any]) -> dict[str, Any]:
        """Turn rows for users into rows for clicks."""
        import pyarrow.compute as pc

        lengths = {what: pc.list_value_length(found[what]) for what in found if what != "user"}
        for what, those in lengths.items():
            if not those.equals(lengths["item"]):
                raise ValueError(
                    f"{self.name(group)} must have as many {what}s as items in every list"
                )
        user = np.repeat(np.arange(len(found["user"])), lengths["item"].to_numpy())
        flat = {what: column.flatten() for what, column in found.items() if what != "user"}
        return {**flat, "user": found["user"].take(user)}


def _check_kind(file: Path, what: str, kind: Any) -> str:
    """The kind of the values of a column, in words; raises if `what` cannot have it."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"lists of {_check_kind(file, what, kind.value_type)}"
    if pa.types.is_integer(kind):
        return "whole numbers"
    if what in ("user", "item"):
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return "text"
        rule = "whole numbers or text"
    elif pa.types.is_floating(kind):
        return "numbers"
    elif what == "time" and (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return str(kind)
    else:
        rule = "numbers"
    raise ValueError(f"{file} must have {rule} as {what}s, but has {kind}")


def make_keys(column: Any) -> tuple[NDArray[np.int64], tuple[NDArray[np.int64], Any] | None]:
    """The key of each row and, for text, the keys and texts of the distinct values."""
    import pyarrow as pa

    kind = column.type
    if not pa.types.is_dictionary(kind):
        if pa.types.is_integer(kind):
            return _make_writable(column.cast(pa.int64())), None
        column = column.dictionary_encode()
    elif pa.types.is_integer(kind.value_type):
        return _make_writable(column.cast(kind.value_type).cast(pa.int64())), None
    texts = column.dictionary.cast(pa.large_string())
    keys = np.empty(len(texts), np.int64)
    _, ends, text = texts.buffers()
    if len(texts):
        ends = np.frombuffer(ends, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        text = np.frombuffer(text or b"\0", np.uint8)
        hash_texts(ends.copy(), text.copy(), keys)
    return keys[_make_writable(column.indices.cast(pa.int64()))], (keys, texts)


def make_numbers(column: Any) -> NDArray[Any]:
    """Ratings or times as numbers; dates and timestamps as the integers of Arrow."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    if not pa.types.is_floating(column.type):
        column = column.cast(pa.int64())
    return _make_writable(column)


def _make_writable(column: Any) -> NDArray[Any]:
    """A writable array, as the compiled loops expect."""
    array: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return array if array.flags.writeable else array.copy()


def write_groups(path: Path, table: Any, user: NDArray[np.int64]) -> None:
    """Write a table as a file that splits no user between row groups."""
    import pyarrow.parquet as pq

    ends = np.append(np.flatnonzero(np.diff(user)) + 1, len(user))
    # A group has the users whose rows end in the same interval of GROUP rows.
    cuts = ends[np.append(np.diff(ends // GROUP) > 0, True)]
    with files.replacing(path) as temporary, pq.ParquetWriter(temporary, table.schema) as writer:
        for first, end in zip([0, *cuts[:-1].tolist()], cuts.tolist(), strict=True):
            writer.write_table(table.slice(first, end - first), row_group_size=max(end - first, 1))


def write_clicks(
    folder: Path, users: int, items: int, clicks: int, *, file: int = 4_000_000, seed: int = 0
) -> None:
    """Write a built-in log into a folder of Parquet files, in pieces that fit in memory.

    Args:
        folder: the folder of the files, created if necessary.
        users: users, as in `click_log`.
        items: items in the catalogue.
        clicks: clicks of all users.
        file: the approximate number of clicks in a file.
        seed: the seed of all random draws.
    """
    import pyarrow as pa

    folder.mkdir(parents=True, exist_ok=True)
    piece, first = max(file * users // max(clicks, 1), 1), 0
    pieces = click_pieces(users, items, clicks, piece=piece, seed=seed)
    for number, (counts, clicked) in enumerate(pieces):
        user = np.repeat(np.arange(first, first + len(counts)), counts)
        write_groups(
            folder / f"{number:05d}{PARQUET}", pa.table({"user": user, "item": clicked}), user
        )
        first += len(counts)
