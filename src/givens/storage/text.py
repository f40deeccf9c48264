"""Vectors as text, as GloVe and word2vec write them: a name and its numbers in each line.

    the 0.418 0.24968 … with or without a first line "rows dimensions"; or numbers alone

A file is read once, line by line, into a temporary file of float32, which is deleted with its
reader; names stay in memory. A name may contain spaces: numbers are counted from the end.
"""

import gzip
import itertools
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from givens.storage.formats import Array, File, drop_pages

SUFFIXES = (".txt", ".vec", ".glove")
# Lines that decide whether the first column holds names.
LOOKED_AT = 100

Lines = Iterator[tuple[int, bytes]]


class Text(File):
    """The vectors of a text file; `names` has their names, or is None."""

    def __init__(self, path: Path) -> None:
        self.dtype = np.dtype(np.float32)
        self.names: list[str] | None
        with tempfile.TemporaryFile() as file:
            try:
                with (gzip.open if _is_packed(path) else open)(path, "rb") as source:
                    self.names, self.shape = _parse(path, source, file)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{path} is not a complete .gz file") from error
            file.flush()
            # The mapping outlives the file's name.
            self.table = np.memmap(file, np.float32, "r", shape=self.shape)

    def __getitem__(self, rows: Any, /) -> Array:
        part = np.array(self.table[rows])
        drop_pages(self.table)
        return part


def is_text(path: Path) -> bool:
    """Whether a path ends in .txt, .vec or .glove, optionally with .gz."""
    plain = path.with_suffix("") if _is_packed(path) else path
    return plain.suffix.lower() in SUFFIXES


def _is_packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _parse(path: Path, source: Any, file: IO[bytes]) -> tuple[list[str] | None, tuple[int, int]]:
    """Write the numbers of all lines to a file; returns the names, or None, and the shape."""
    lines: Lines = ((at, line) for at, line in enumerate(source, 1) if line.strip())
    first = list(itertools.islice(lines, LOOKED_AT + 1))
    told = _header(first)
    first = first[1:] if told else first
    if not first:
        raise ValueError(f"{path} is empty")
    # The most common width: a name may contain spaces.
    fields = Counter(len(line.split()) for _, line in first).most_common(1)[0][0]
    named = fields - 1 == told[1] if told else not all(_is_number(line) for _, line in first)
    width, count = fields - named, 0
    names: list[str] = []
    for at, line in itertools.chain(first, lines):
        parts = line.rsplit(None, width)
        try:
            numbers = array("f", map(float, parts[named:]))
        except ValueError:
            numbers = array("f")
        if len(numbers) != width or width < 1:
            raise ValueError(
                f"{path} must have {'a name and ' if named else ''}{max(width, 1)} numbers in each "
                f"line, but line {at} is {line.decode('utf-8', 'replace').strip()[:40]!r}"
            )
        names += [parts[0].decode("utf-8", "replace")] * named
        numbers.tofile(file)
        count += 1
    if told and told != (count, width):
        raise ValueError(
            f"{path} says that it has {told[0]} vectors of {told[1]}, but has {count} of {width}"
        )
    return (names if named else None), (count, width)


def _header(first: list[tuple[int, bytes]]) -> tuple[int, int] | None:
    """Rows and dimensions from the first line, unless the second is as short."""
    fields = first[0][1].split() if first else []
    short = len(first) > 1 and len(first[1][1].split()) == 2 and fields[1:] != [b"1"]
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or short:
        return None
    return int(fields[0]), int(fields[1])


def _is_number(line: bytes) -> bool:
    """Whether a line starts with a number."""
    try:
        float(line.split(None, 1)[0])
    except ValueError:
        return False
    return True
