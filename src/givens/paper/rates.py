"""One rule for the rates of all methods: the best recall of validation users on two hidden seeds.

    lr         rate of the towers' warm-up, by recall without an index; shared by all
    weight     of the distortion, with a frozen rotation; shared by methods that train the index
    joint_lr   likewise; jpq and post-hoc indexes each have their own
    angle      each method's own, on the same grid for all

They are chosen one after another, in this order. Recall is that of the index at the best step, as
in a run; ties go to the lower distortion. If the best value is at an end of its grid, the grid is
widened. The test users are never used.
"""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from givens.paper.joint import HIDDEN, Runs
from givens.paper.rows import Rows
from givens.retrieval.config import LABELS, Config
from givens.retrieval.data import Log

ANGLES = (0.003, 0.01, 0.03, 0.1)
# The factor between neighbours on a grid.
STEP = 3
# The most times that a grid is widened.
WIDER = 4
# Methods without an angle.
STILL = ("frozen", "jpq", "post-hoc", "post-hoc-fit")

Rates = dict[str, float]
"""The values of `CHOSEN` for one method."""
Measure = Callable[[Config], dict[str, Any]]


def choose(runs: Runs, log: Log, config: Config, methods: tuple[str, ...]) -> dict[str, Rates]:
    """The rates of every method; the configuration's seed is ignored."""
    towers = tune(config, "lr", make_grid(config.lr), lambda c: runs.explore_towers(log, c))

    def measure(c: Config) -> dict[str, Any]:
        return runs.explore(log, c)

    chosen: dict[str, Rates] = {}
    base = _set_method(towers, "frozen")
    if any(method not in ("jpq", "post-hoc", "post-hoc-fit") for method in methods):
        base = tune(base, "weight", make_grid(base.weight), measure)
        base = tune(base, "joint_lr", make_grid(base.joint_lr), measure)
    for method in methods:
        # Faiss and `givens.fit` index the same towers.
        own = _set_method(base, method)
        if method in ("jpq", "post-hoc", "post-hoc-fit"):
            own = _set_method(towers, "jpq" if method == "jpq" else "post-hoc")
            own = tune(own, "joint_lr", make_grid(own.joint_lr), measure)
        elif method not in STILL:
            own = tune(own, "angle", ANGLES, measure)
        chosen[method] = read_rates(own)
    for seed in HIDDEN:
        runs.forget(seed)
    return chosen


def tune(config: Config, name: str, grid: tuple[float, ...], measure: Measure) -> Config:
    """The configuration with one option at the best value of a grid, widened if necessary."""
    scores: dict[float, tuple[float, float]] = {}
    wanted = list(grid)
    for _ in range(WIDER + 1):
        for value in wanted:
            changed = dataclasses.replace(config, **{name: value})  # type: ignore[arg-type]
            scores[value] = score(
                [measure(dataclasses.replace(changed, seed=seed)) for seed in HIDDEN]
            )
        best = max(scores, key=lambda value: scores[value])
        wanted = []
        if scores[best][0] == max(scores[value][0] for value in scores if value != best):
            # Only the distortion decided, as when no step with the index improves recall.
            break
        if best == min(scores):
            wanted = [_round(best / STEP)]
        elif best == max(scores):
            wanted = [_round(best * STEP)]
        if not wanted:
            break
    return dataclasses.replace(config, **{name: best})  # type: ignore[arg-type]


def score(rows: Rows) -> tuple[float, float]:
    """Mean recall of the validation users, and minus the mean distortion."""
    if any(row.get("diverged") for row in rows):
        return -1.0, 0.0
    recalls = statistics.fmean(max(row["recall"]) for row in rows)
    return recalls, -statistics.fmean(row["final_distortion"] for row in rows)


def make_grid(value: float) -> tuple[float, ...]:
    """A grid of three values around this one."""
    return (_round(value / STEP), value, _round(value * STEP))


def read_rates(config: Config) -> Rates:
    """The chosen options of a configuration."""
    return {name: getattr(config, name) for name in ("lr", "joint_lr", "weight", "angle")}


def describe(chosen: dict[str, Rates]) -> list[str]:
    """A table of the rates, in Markdown."""
    lines = ["| | lr | joint lr | weight | angle |", "|---|---|---|---|---|"]
    for method, rates in chosen.items():
        weight = "" if method in ("jpq", "post-hoc", "post-hoc-fit") else f"{rates['weight']:g}"
        angle = "" if method in STILL else f"{rates['angle']:g}"
        cells = (f"{rates['lr']:g}", f"{rates['joint_lr']:g}", weight, angle)
        lines.append(f"| {LABELS[method]} | {' | '.join(cells)} |")
    return lines


def _set_method(config: Config, method: str) -> Config:
    return dataclasses.replace(config, method=method)  # type: ignore[arg-type]


def _round(value: float) -> float:
    return float(f"{value:.1g}")
