"""One rule for every method's rates: what does best for the validation users of two hidden seeds.

    lr         of the towers' warm-up, by recall without an index; for all methods and sizes
    weight     of the distortion, with a frozen rotation; for all methods that train with the index
    joint_lr   likewise; for jpq and for indexes made afterwards each on its own
    angle      each method's own, on a grid that is the same for all

One after another, in this order. Recall is that of the index, at the best step, as a run itself
chooses it; ties go to the lower distortion. Where the best recall lies at an end of its grid, the
grid is widened. The test users are never asked.
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
# Beside the configuration's own value; ends of a grid are this far from its next value.
STEP = 3
# So often a grid is widened, at most.
WIDER = 4
# Methods without an angle.
STILL = ("frozen", "jpq", "post-hoc", "post-hoc-fit")

Rates = dict[str, float]
"""The values of `CHOSEN` for one method."""
Measure = Callable[[Config], dict[str, Any]]


def choose(runs: Runs, log: Log, config: Config, methods: tuple[str, ...]) -> dict[str, Rates]:
    """The rates of every method, for a configuration whose seed plays no part."""
    towers = tune(config, "lr", around(config.lr), lambda c: runs.explore_towers(log, c))

    def measure(c: Config) -> dict[str, Any]:
        return runs.explore(log, c)

    chosen: dict[str, Rates] = {}
    base = _with(towers, "frozen")
    if any(method not in ("jpq", "post-hoc", "post-hoc-fit") for method in methods):
        base = tune(base, "weight", around(base.weight), measure)
        base = tune(base, "joint_lr", around(base.joint_lr), measure)
    for method in methods:
        # The towers that Faiss and `givens.fit` index are the same.
        own = _with(base, method)
        if method in ("jpq", "post-hoc", "post-hoc-fit"):
            own = _with(towers, "jpq" if method == "jpq" else "post-hoc")
            own = tune(own, "joint_lr", around(own.joint_lr), measure)
        elif method not in STILL:
            own = tune(own, "angle", ANGLES, measure)
        chosen[method] = read_rates(own)
    for seed in HIDDEN:
        runs.forget(seed)
    return chosen


def tune(config: Config, name: str, grid: tuple[float, ...], measure: Measure) -> Config:
    """The configuration with one option at its best value, of a grid that may be widened."""
    scores: dict[float, tuple[float, float]] = {}
    wanted = list(grid)
    for _ in range(WIDER + 1):
        for value in wanted:
            changed = dataclasses.replace(config, **{name: value})  # type: ignore[arg-type]
            scores[value] = score([measure(with_seed(changed, seed)) for seed in HIDDEN])
        best = max(scores, key=lambda value: scores[value])
        wanted = []
        if scores[best][0] == max(scores[value][0] for value in scores if value != best):
            # The distortion alone decided, as where no step with the index was better than none.
            break
        if best == min(scores):
            wanted = [_rounded(best / STEP)]
        elif best == max(scores):
            wanted = [_rounded(best * STEP)]
        if not wanted:
            break
    return dataclasses.replace(config, **{name: best})  # type: ignore[arg-type]


def score(rows: Rows) -> tuple[float, float]:
    """Mean recall of the validation users, and the distortion with a minus sign."""
    if any(row.get("diverged") for row in rows):
        return -1.0, 0.0
    recalls = statistics.fmean(max(row["recall"]) for row in rows)
    return recalls, -statistics.fmean(row["final_distortion"] for row in rows)


def around(value: float) -> tuple[float, ...]:
    """A grid of three values around one."""
    return (_rounded(value / STEP), value, _rounded(value * STEP))


def read_rates(config: Config) -> Rates:
    """The chosen options of a configuration."""
    return {name: getattr(config, name) for name in ("lr", "joint_lr", "weight", "angle")}


def with_seed(config: Config, seed: int) -> Config:
    """The configuration with another seed."""
    return dataclasses.replace(config, seed=seed)


def describe(chosen: dict[str, Rates]) -> list[str]:
    """A table of the rates, in Markdown."""
    lines = ["| | lr | joint lr | weight | angle |", "|---|---|---|---|---|"]
    for method, rates in chosen.items():
        weight = "" if method in ("jpq", "post-hoc", "post-hoc-fit") else f"{rates['weight']:g}"
        angle = "" if method in STILL else f"{rates['angle']:g}"
        cells = (f"{rates['lr']:g}", f"{rates['joint_lr']:g}", weight, angle)
        lines.append(f"| {LABELS[method]} | {' | '.join(cells)} |")
    return lines


def _with(config: Config, method: str) -> Config:
    return dataclasses.replace(config, method=method)  # type: ignore[arg-type]


def _rounded(value: float) -> float:
    return float(f"{value:.1g}")
