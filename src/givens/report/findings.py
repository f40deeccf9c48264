"""The findings of a report: sentences computed from the runs' numbers."""

import math
from dataclasses import dataclass

from givens.report.measure import Measured
from givens.report.runs import Folder

# Options that may differ between two runs that are compared as two ways to learn R.
APART = ("method", "exact", "angle", "data", "every")
BESIDE = {"frozen": "with the rotation frozen", "post-hoc": "with the index built afterwards"}
# Standard errors on either side, for a 95 % confidence interval.
SURE = 1.96


@dataclass(frozen=True)
class Entry:
    """A run and its measurements, or None if it is not finished."""

    run: Folder
    seen: Measured | None


def describe_findings(entries: list[Entry]) -> list[str]:
    """Sentences on each run that learned R, against frozen runs and post-hoc indexes."""
    done = [(entry.run, entry.seen) for entry in entries if entry.seen is not None]
    lines = []
    for run, seen in done:
        if run.method in ("frozen", "post-hoc"):
            continue
        for other, theirs in done:
            if other.method in BESIDE and _are_alike(run, other):
                if other.method == "frozen":
                    lines.append(_compare_distortion(run, other))
                lines.append(_compare_recall((run, seen), (other, theirs)))
        lines.append(_describe_size(run))
    return lines


def _are_alike(one: Folder, other: Folder) -> bool:
    """Whether two runs differ only in how R was learned."""
    mine, theirs = ({**run.options, "log": run.about["log"]} for run in (one, other))
    return all(mine.get(name) == theirs.get(name) for name in {*mine, *theirs} - set(APART))


def _compare_distortion(mine: Folder, frozen: Folder) -> str:
    here, there = mine.distortion or 0.0, frozen.distortion or 0.0
    change = 100 * (here / max(there, 1e-300) - 1)
    way = "lower" if change < 0 else "higher"
    return (
        f"{mine.label}: the index that is kept has distortion {here:.4f}, {abs(change):.1f} % "
        f"{way} than with the rotation frozen ({there:.4f})."
    )


def _compare_recall(mine: tuple[Folder, Measured], other: tuple[Folder, Measured]) -> str:
    """Compare recall in pairs, user by user, with a confidence interval of the difference."""
    difference = 100 * (mine[1].users - other[1].users)
    change = float(difference.mean())
    error = float(difference.std()) / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
    low, high = change - SURE * error, change + SURE * error
    interval = f"95 % confidence interval of the difference: {low:+.2f} to {high:+.2f} points"
    here, there = (f"{100 * (run.recall or 0):.1f} %" for run in (mine[0], other[0]))
    start = f"{mine[0].label}: {mine[0].metric} of the test users is {here}"
    if low <= 0 <= high:
        return (
            f"{start}, against {there} {BESIDE[other[0].method]}: no significant difference "
            f"({interval})."
        )
    way = "higher" if change > 0 else "lower"
    return (
        f"{start}, {abs(change):.1f} points {way} than the {there} {BESIDE[other[0].method]} "
        f"({interval})."
    )


def _describe_size(run: Folder) -> str:
    full, bytes_of_full = run.find_recall("full") or 0.0, 4 * run.options["dim"]
    return (
        f"{run.label}: with {run.bytes} bytes an item it finds "
        f"{100 * (run.recall or 0) / max(full, 1e-12):.0f} % of what its towers find in full "
        f"precision, with {bytes_of_full} bytes."
    )
