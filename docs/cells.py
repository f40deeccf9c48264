"""Cells and lines of Markdown tables, and the rows that they are made from."""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]
Rows = list[Row]

NO_BREAK = "\N{NO-BREAK SPACE}"


def select(rows: Iterable[Row], **labels: Any) -> Rows:
    """The rows that have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in labels.items())]


def unique(values: Iterable[Any]) -> list[Any]:
    """The values once each, in their order."""
    return list(dict.fromkeys(values))


def contenders(rows: Rows, key: str, names: dict[str, str]) -> list[str]:
    """What rows are of: first in the order of `names`, then the others."""
    there = unique(row[key] for row in rows)
    return [n for n in names if n in there] + [n for n in there if n not in names]


def needed(found: list[Any], what: str) -> list[Any]:
    """What was looked for, or an error that says what is missing."""
    if not [value for value in found if value is not None]:
        raise ValueError(f"the rows must have {what}, but there is none; measure it again")
    return found


def grid(
    names: Iterable[Any],
    titles: dict[str, str],
    cases: Iterable[Any],
    heads: Iterable[str],
    cell: Callable[[Any, Any], str],
) -> list[str]:
    """A line for each name, a column for each case."""
    cases = list(cases)
    lines = [line(titles.get(n, n), *(cell(n, case) for case in cases)) for n in names]
    return [*table("", *heads), *lines]


def table(*heads: str) -> list[str]:
    """The first two lines."""
    return [line(*heads), line(*["---"] * len(heads))]


def line(*cells: Any) -> str:
    """One row."""
    return f"| {' | '.join(map(str, cells))} |"


def percent(value: float, digits: int = 1) -> str:
    """A share in percent."""
    return f"{100 * value:.{digits}f} %"


def spread(values: list[float]) -> str:
    """Mean and standard deviation, in percent, on one line."""
    mean = 100 * statistics.mean(values)
    told = f"{mean:.2f} %"
    if len(values) > 1:
        told = f"{mean:.2f} ± {100 * statistics.stdev(values):.2f} %"
    return told.replace(" ", NO_BREAK)


def plain(values: list[float]) -> str:
    """Mean and standard deviation."""
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def times(values: list[float]) -> str:
    """A median of ratios, with the least and the most."""
    middle = f"{statistics.median(values):.2f}×"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


def factor(value: float) -> str:
    """A ratio: 284×, 7.0×, 0.45×."""
    digits = 0 if value >= 10 else 1 if value >= 1 else 2
    return f"{value:.{digits}f}×"


def figures(value: float, digits: int) -> str:
    """A number with so many significant digits: 43,709 or 0.94312."""
    before = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, digits - before)}f}"


def duration(us: float) -> str:
    """Microseconds in the unit that fits."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{figures(us / size, 3)} {unit}"
    return f"{figures(us, 3)} µs"
