"""Tables of the pages from runs that train towers and index together: curves, rates, the MLP."""

import statistics

from cells import Row, Rows, grid, line, needed, percent, select, spread, table, unique
from tables import LOGS, MISSING, select_start

from givens.paper.rates import STILL
from givens.retrieval.config import LABELS

# The rates that all methods with a learned rotation share.
SHARED = ("lr", "weight", "joint_lr")
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
    """What validation users of the hidden seeds found with a frozen rotation, by its rates."""
    mine = needed(select(rows, method="frozen"), "frozen")
    heads = ("at the start", "at the best step", "which is", "at the end")
    lines = table("weight", "joint lr", *heads, "distortion", "distinct codes")
    lr = mine[0]["config"]["lr"]
    before = [row for row in select(rows, method="warm-up") if row["config"]["lr"] == lr]
    alone = statistics.fmean(max(row["recall"]) for row in before)
    lines.append(line("no index", "", percent(alone, 2), *[""] * 5))
    for weight, rate in sorted({_rates(row) for row in mine}):
        some = [row for row in mine if _rates(row) == (weight, rate)]
        curves = [row["recall"] for row in some]
        steps = sorted({row["steps"][row["recall"].index(max(row["recall"]))] for row in some})
        found = [statistics.fmean(curve[0] for curve in curves)]
        found += [statistics.fmean(map(max, curves)), statistics.fmean(c[-1] for c in curves)]
        start, best, end = (percent(value, 2) for value in found)
        distortion = _3(statistics.fmean(row["final_distortion"] for row in some))
        distinct = percent(statistics.fmean(row["distinct"] for row in some))
        where = " and ".join(map(str, steps))
        lines.append(
            line(f"{weight:g}", f"{rate:g}", start, best, where, end, distortion, distinct)
        )
    return lines


def by_angle(rows: Rows) -> list[str]:
    """Distortion of the hidden seeds, by the angle of each method that learns R.

    At the rates of the towers, and the weight, that were chosen for these methods.
    """
    chosen = needed([row["config"] for row in select(rows, method="gcd")], "gcd")[0]
    same = [row for row in rows if all(row["config"][name] == chosen[name] for name in SHARED)]
    angles = sorted({row["config"]["angle"] for row in same if row["method"] not in STILL})

    def cell(method: str, angle: float | None) -> str:
        if (method in STILL) != (angle is None):
            return ""
        mine = [row for row in select(same, method=method) if angle in (None, _angle(row))]
        return f"{statistics.fmean(row['final_distortion'] for row in mine):.4f}" if mine else ""

    names = [name for name in LABELS if name == "frozen" or name not in STILL]
    names = [name for name in names if select(same, method=name)]
    heads = ["no angle", *(f"{angle:g}" for angle in angles)]
    return grid(names, LABELS, [None, *angles], heads, cell)


def mlp(rows: Rows) -> list[str]:
    """Validation recall of towers with and without the user tower's MLP, by steps."""
    counts = sorted({row["steps"] for row in needed(rows, "mlp")})

    def cell(kind: str, steps: int) -> str:
        best = [max(row["recall"]) for row in select(rows, mlp=kind, steps=steps)]
        return f"{spread(best)}, {len(best)} seed{'s' * (len(best) > 1)}" if best else MISSING

    heads = [f"{steps} steps" for steps in counts]
    return grid(unique(row["mlp"] for row in rows), {}, counts, heads, cell)


def _rates(row: Row) -> tuple[float, float]:
    return row["config"]["weight"], row["config"]["joint_lr"]


def _angle(row: Row) -> float:
    return float(row["config"]["angle"])


def _3(value: float) -> str:
    return f"{value:.3f}"
