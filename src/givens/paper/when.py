"""When does learning the rotation pay? Frozen against GCD-G, which the paper has no figure of.

{OPQ, identity, random start} × {towers move freely, item tower fixed} × {stationary, drifting log}.
The drifting log is gone through in order of time, so that the warm start is of the past.
"""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from givens.paper.joint import (
    SMOKE,
    Runs,
    distortion,
    of,
    p_value,
    paired_p_value,
    recall,
    setting,
)
from givens.paper.rows import Rows, save_picture
from givens.retrieval.config import config_for
from givens.retrieval.data import Log, click_log

STARTS = ("opq", "identity", "random")
LOG = {"users": 20_000, "items": 10_000, "clicks": 600_000}
DRIFT = 0.02


def logs(*, smoke: bool) -> dict[str, Log]:
    """The built-in log, stationary and drifting."""
    sizes = SMOKE if smoke else LOG
    drifts = (("stationary", 0.0), ("drifting", DRIFT))
    return {name: click_log(**sizes, drift=drift) for name, drift in drifts}


def run(runs: Runs, made: dict[str, Log], options: dict[str, Any], seeds: int) -> Rows:
    """All of them, for each seed."""
    rows = []
    for seed in range(seeds):
        for name, log in made.items():
            for fixed in (False, True):
                for start in STARTS:
                    for method in ("frozen", "gcd-greedy"):
                        config = dataclasses.replace(
                            config_for(log, size="small", **options),
                            method=method,
                            start=start,  # type: ignore[arg-type]
                            fixed_items=fixed,
                            stream=name == "drifting",
                            seed=seed,
                        )
                        labels = {"kind": name, "fixed": fixed, "start": start}
                        rows.append(runs.run(log, config, **labels))
        runs.forget()
    return rows


def plot(pyplot: Any, rows: Rows, path: Path) -> list[str]:
    """How much GCD-G changes distortion and recall, for each case."""
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.8), sharey=True)
    cases = [
        (kind, fixed, start)
        for kind in ("stationary", "drifting")
        for fixed in (False, True)
        for start in STARTS
    ]
    names = [_name(*case) for case in cases]
    for axes, value, title in (
        (panels[0], distortion, "distortion at the end"),
        (panels[1], recall, "recall@100"),
    ):
        for place, case in enumerate(cases):
            changes = _changes(rows, case, value)
            axes.plot(changes, [place] * len(changes), "o", ms=4, color="C0", alpha=0.5)
            axes.plot([statistics.mean(changes)], [place], "|", ms=18, color="C3")
        axes.axvline(0, color="k", lw=0.8)
        axes.set(xlabel="GCD-G against frozen, %", title=title)
        axes.grid(alpha=0.3)
    panels[0].set_yticks(range(len(cases)), names, fontsize=8)
    panels[0].invert_yaxis()
    config = rows[0]["config"]
    sizes = f"n = {config['dim']}, {config['subspaces']} bytes"
    caption = f"Dots are runs, bars their means; {sizes}, {setting(rows)}"
    save_picture(pyplot, figure, caption, path)
    return claims(rows)


def claims(rows: Rows) -> list[str]:
    """A line for each case, and what an identity start costs."""
    told = []
    for case in dict.fromkeys((row["kind"], row["fixed"], row["start"]) for row in rows):
        mine, base = (_of(rows, case, method) for method in ("gcd-greedy", "frozen"))
        parts = []
        for name, value in (("distortion", distortion), ("recall@100", recall)):
            change = statistics.mean(_changes(rows, case, value))
            values = [[value(row) for row in rows] for rows in (mine, base)]
            p, paired = p_value(*values), paired_p_value(*values)
            parts.append(f"{name} {change:+.2f} % (p = {p:.2g}, seed by seed {paired:.2g})")
        told.append(f"{_name(*case)}: {', '.join(parts)}")
    for fixed in (False, True):
        ends = {
            start: statistics.mean(
                distortion(row) for row in _of(rows, ("stationary", fixed, start), "gcd-greedy")
            )
            for start in ("opq", "identity")
        }
        away = 100 * (ends["identity"] / ends["opq"] - 1)
        told.append(
            f"GCD-G from the identity ends {away:+.2f} % from where it ends from OPQ "
            f"({'item tower fixed' if fixed else 'towers free'}, stationary)"
        )
    return told


def _name(kind: str, fixed: bool, start: str) -> str:
    return f"{kind}, {'item tower fixed' if fixed else 'towers free'}, from {start}"


def _of(rows: Rows, case: tuple[str, bool, str], method: str) -> Rows:
    kind, fixed, start = case
    found = of(rows, kind=kind, fixed=fixed, start=start, method=method)
    return sorted(found, key=lambda row: row["seed"])


def _changes(rows: Rows, case: tuple[str, bool, str], value: Any) -> list[float]:
    """In percent of the frozen run of the same seed."""
    pairs = zip(_of(rows, case, "gcd-greedy"), _of(rows, case, "frozen"), strict=True)
    return [100 * (value(mine) / max(value(base), 1e-12) - 1) for mine, base in pairs]
