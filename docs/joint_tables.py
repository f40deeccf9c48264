"""Tables of the pages from runs that train towers and index together: curves, rates, the MLP."""

import statistics

from cells import Row, Rows, grid, line, needed, percent, select, spread, table, unique
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


def _3(value: float) -> str:
    return f"{value:.3f}"
