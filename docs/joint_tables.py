"""Tables of the pages from runs that train towers and index together: curves, rates, the MLP."""

import statistics

from cells import Row, Rows, line, needed, percent, select, spread, table, unique
from tables import LOGS, MISSING, select_start

STEPS_SHOWN = (0, 100, 200, 300, 500, 1000, 1500)


def by_step(rows: Rows) -> list[str]:
    """Validation recall and distortion of a frozen rotation at 16 bytes, by the joint step."""
    rows = [row for row in select_start(rows) if row["bytes"] == 16 and row["method"] == "frozen"]
    lines = table("joint step", *(str(step) for step in STEPS_SHOWN))
    for log in (log for log in LOGS if select(needed(rows, "frozen"), name=log)):
        mine = select(rows, name=log)
        places = [mine[0]["steps"].index(step) if step in mine[0]["steps"] else None
                  for step in STEPS_SHOWN]  # fmt: skip
        for name, key, told in (
            ("recall@100", "recall", percent),
            ("distortion", "distortion", _3),
        ):
            cells = (
                MISSING if at is None else told(statistics.fmean(row[key][at] for row in mine))
                for at in places
            )
            lines.append(line(f"{LOGS[log]}, {name}", *cells))
    return lines


def searched(rows: Rows) -> list[str]:
    """What the validation users of the hidden seeds found with a frozen rotation, by its rates."""
    mine = needed([row for row in rows if row["method"] == "frozen"], "frozen")
    lines = table("weight", "joint lr", "recall@100, best step", "that step", "at the end",
                  "distortion", "distinct codes")  # fmt: skip
    cases = sorted({_rates(row) for row in mine})
    for weight, lr in cases:
        some = [row for row in mine if _rates(row) == (weight, lr)]
        best = [row["steps"][row["recall"].index(max(row["recall"]))] for row in some]
        lines.append(line(
            f"{weight:g}", f"{lr:g}",
            percent(statistics.fmean(max(row["recall"]) for row in some), 2),
            " and ".join(map(str, sorted(best))),
            percent(statistics.fmean(row["recall"][-1] for row in some), 2),
            _3(statistics.fmean(row["final_distortion"] for row in some)),
            percent(statistics.fmean(row["distinct"] for row in some)),
        ))  # fmt: skip
    return lines


def mlp(rows: Rows) -> list[str]:
    """Validation recall of towers with and without the user tower's MLP."""
    lines = table("MLP", "validation recall@100", "seeds")
    for kind in unique(row["mlp"] for row in needed(rows, "mlp")):
        best = [max(row["recall"]) for row in select(rows, mlp=kind)]
        lines.append(line(kind, spread(best), len(best)))
    return lines


def _rates(row: Row) -> tuple[float, float]:
    return row["config"]["weight"], row["config"]["joint_lr"]


def _3(value: float) -> str:
    return f"{value:.3f}"
