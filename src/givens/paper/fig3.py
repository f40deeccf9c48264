"""Figure 3: the distortion of an index that is trained with its towers, against the step."""

import statistics
from pathlib import Path
from typing import Any

from givens.paper.joint import (
    CHOSEN,
    METHODS,
    Runs,
    describe_setting,
    distortion,
    name_method,
    select,
    verdict,
)
from givens.paper.rates import Rates
from givens.paper.rows import Rows, save_picture, set_plain_ticks
from givens.paper.table1 import set_rates
from givens.retrieval.config import LABELS, Config
from givens.retrieval.data import Log

CURVES = tuple(method for method in METHODS if not method.startswith("post-hoc"))
BYTES = 16
# In percent: the axis is linear below NEAR and logarithmic beyond.
NEAR = 10
TICKS = (-50, -20, -10, -5, 0, 5, 10, 20, 50, 100, 200, 500)


def run(runs: Runs, log: Log, configs: list[Config], rates: dict[str, Rates]) -> Rows:
    """Run every method for each configuration, from the warm-up and start of its seed."""
    rows = []
    for config in configs:
        rows += [runs.run(log, set_rates(config, method, rates)) for method in rates]
        runs.forget(config.seed)
    return rows


def select_rows(rows: Rows) -> Rows:
    """The rows of the figure, from a file that also holds those of table 1 and others.

    They are of the latest version and of one size, the nearest to `BYTES`, and share the baseline's
    options except method, seed and chosen rates.
    """
    latest = max(row.get("version", 1) for row in rows)
    rows = [row for row in rows if row.get("version", 1) == latest]
    size = min((row["bytes"] for row in rows), key=lambda size: abs(size - BYTES))
    curves = [row for row in select(rows, bytes=size) if row["method"] in CURVES]
    wanted = _options(select(curves, method="frozen")[0])
    return [row for row in curves if _options(row) == wanted]


def _options(row: dict[str, Any]) -> dict[str, Any]:
    free = ("method", "seed", *CHOSEN)
    return {name: v for name, v in row["config"].items() if name not in free}


def plot(pyplot: Any, rows: Rows, path: Path) -> list[str]:
    """Draw the distortion of each method, and its difference from the baseline, seed by seed."""
    rows = select_rows(rows)
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.4))
    base = {row["seed"]: row["distortion"] for row in select(rows, method="frozen")}
    for number, method in enumerate(CURVES):
        mine = select(rows, method=method)
        if not mine:
            continue
        away = [
            [100 * (d / b - 1) for d, b in zip(row["distortion"], base[row["seed"]], strict=True)]
            for row in mine
        ]
        style = "-" if method.startswith("gcd") else "--" if method == "frozen" else ":"
        color = "k" if method == "frozen" else f"C{number}"
        for axes, curves in zip(panels, ([row["distortion"] for row in mine], away), strict=True):
            looks = list(zip(*curves, strict=True))
            mean = [statistics.mean(values) for values in looks]
            axes.plot(mine[0]["steps"], mean, style, color=color, label=name_method(mine, rows))
            low, high = ([f(values) for values in looks] for f in (min, max))
            axes.fill_between(mine[0]["steps"], low, high, alpha=0.1, color=color)
    about = rows[0]
    title = f"{about['name']}, n = {about['config']['dim']}, {about['bytes']} bytes"
    panels[0].set(xlabel="joint step", ylabel="distortion of unit vectors", title=title)
    panels[0].set_yscale("log")
    set_plain_ticks(panels[0].yaxis)
    panels[1].set(xlabel="joint step", ylabel="%", title="against the baseline of the same seed")
    shown = panels[1].get_ylim()
    if max(map(abs, shown)) > NEAR:
        # One outlying method must not flatten the others.
        panels[1].set_yscale("symlog", linthresh=NEAR)
        shown = panels[1].get_ylim()
        panels[1].set_yticks(TICKS)
        panels[1].set_ylim(shown)
    panels[1].yaxis.set_major_formatter(lambda tick, _: f"{tick:+g}" if tick else "0")
    for axes in panels:
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8)
    angles = [{row["config"]["angle"] for row in select(rows, method=m)} for m in CURVES]
    one = set().union(*angles)
    caption = f"Mean and range of {describe_setting(rows)}; lr {about['config']['lr']:g}, "
    caption += f"angle {one.pop():g}" if len(one) == 1 else "each method at its own angle"
    save_picture(pyplot, figure, caption, path)
    return claims(rows)


def claims(rows: Rows) -> list[str]:
    """The paper's claims, each with what the rows say about it."""
    rows, told = select_rows(rows), []
    for methods in (
        ("gcd", "frozen"),
        ("gcd", "cayley"),
        ("gcd-random", "frozen"),
        ("gcd-greedy", "frozen"),
        ("gcd-steepest", "frozen"),
        ("cayley", "frozen"),
        ("gcd-greedy", "gcd-random"),
        ("gcd-steepest", "gcd-greedy"),
    ):
        mine, other = (select(rows, method=method) for method in methods)
        if not (mine and other):
            continue
        first, second = (LABELS[method] for method in methods)
        found = verdict(mine, other, distortion, lower=True)
        told.append(f"{first} ends below {second}: {found}")
    return told
