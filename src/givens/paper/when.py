"""When does learning the rotation pay? Frozen against GCD; the paper has no such figure.

{OPQ, identity, random start} × {towers free, items fixed} × {standing, drifting log} × bytes. On
the drifting log, training follows the order of time, so that the warm start is out of date. The
angle of each case is chosen on the validation users of hidden seeds, as in table 1.
"""

import dataclasses
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from givens.paper.joint import (
    HIDDEN,
    SIGNIFICANT,
    SMOKE,
    Runs,
    Value,
    describe_setting,
    distortion,
    holm,
    p_value,
    pair_values,
    paired_p_value,
    recall,
    select,
)
from givens.paper.rates import ANGLES, tune
from givens.paper.rows import Rows, save_picture
from givens.retrieval.config import Config
from givens.retrieval.data import Log, click_log
from givens.retrieval.readers import read

STARTS = ("opq", "identity", "random")
KINDS = ("standing", "drifting")
LOG = {"users": 20_000, "items": 10_000, "clicks": 600_000}
DRIFT = 0.02
# Rows of an earlier version say "stationary".
NAMES = {"stationary": "standing", False: "towers free", True: "items fixed"}
PAYS, COSTS, OPEN = "#8fd19e", "#f2a0a0", "#ededed"
Case = tuple[str, bool, str, int]
"""Kind of the log, fixed items, start and bytes."""


def open_logs(data: Path | None, *, smoke: bool) -> dict[str, Log]:
    """The built-in log, standing and drifting; or the log of a folder for both."""
    if data is not None:
        return dict.fromkeys(KINDS, read(data))
    sizes = SMOKE if smoke else LOG
    return {name: click_log(**sizes, drift=DRIFT * (name == "drifting")) for name in KINDS}


def run(runs: Runs, hidden: Runs, made: dict[str, Log], configs: list[Config],
        angle: float | None) -> Rows:  # fmt: skip
    """Run all cases for each seed and size, after choosing the angle of each case unless given."""
    first = {config.bytes: config for config in configs}
    cases = [
        (kind, fixed, start, size)
        for kind in made
        for size in first
        for fixed in (False, True)
        for start in STARTS
    ]
    angles: dict[Case, float] = {}
    for case in cases:
        log = made[case[0]]
        learned = _configure(first[case[3]], case, "gcd")
        if angle is None:
            learned = tune(learned, "angle", ANGLES, partial(hidden.explore, log))
        angles[case] = learned.angle if angle is None else angle
    for seed in HIDDEN:
        hidden.forget(seed)
    rows = []
    for seed in dict.fromkeys(config.seed for config in configs):
        for case in cases:
            kind, fixed, start, size = case
            for method in ("frozen", "gcd"):
                config = dataclasses.replace(_configure(first[size], case, method), seed=seed)
                if method == "gcd":
                    config = dataclasses.replace(config, angle=angles[case])
                labels = {"kind": kind, "fixed": fixed, "start": start}
                rows.append(runs.run(made[kind], config, **labels))
        runs.forget(seed)
    return rows


def _configure(config: Config, case: Case, method: str) -> Config:
    kind, fixed, start, _ = case
    options: Any = {"method": method, "start": start, "fixed_items": fixed}
    return dataclasses.replace(config, **options, stream=kind == "drifting")


def select_latest(rows: Rows) -> Rows:
    """The rows of the latest version."""
    last = max(row.get("version", 1) for row in rows)
    return [row for row in rows if row.get("version", 1) == last and "results" in row]


def plot(pyplot: Any, rows: Rows, path: Path) -> list[str]:
    """Draw how learning R changes recall and distortion in each case, with the p-value."""
    rows = select_latest(rows)
    sizes = sorted({row["bytes"] for row in rows})
    figure, panels = pyplot.subplots(len(sizes), 2, figsize=(10, 3 * len(sizes) + 0.5),
                                     squeeze=False)  # fmt: skip
    for column, (value, told) in enumerate(_VALUES.items()):
        tests = compare_cases(rows, value)
        for size, panel in zip(sizes, panels[:, column], strict=True):
            fields = [case for case in tests if case[3] == size]
            _fill(
                panel,
                {case: (find_effect(rows, case, value), tests[case]) for case in fields},
                value,
            )
            panel.set_title(told if len(sizes) == 1 else f"{told}, {size} bytes", fontsize=10)
    config = rows[0]["config"]
    caption = f"Learned against frozen R, means; p by seed, after Holm. n = {config['dim']}"
    caption += f"{f', {sizes[0]} bytes' if len(sizes) == 1 else ''}, {describe_setting(rows)}"
    figure.suptitle(
        "Where does learning R pay? Green: yes, grey: not shown, red: it costs", size=11
    )
    save_picture(pyplot, figure, caption, path)
    return claims(rows)


def _fill(panel: Any, fields: dict[Case, tuple[float, float]], value: Value) -> None:
    """Fill one panel: starts across, items and logs down."""
    from matplotlib.patches import Rectangle

    lines = list(dict.fromkeys((case[0], case[1]) for case in fields))
    for case, (change, p) in fields.items():
        x, y = STARTS.index(case[2]), lines.index((case[0], case[1]))
        good = (change > 0) == (value is recall)
        color = OPEN if not p < SIGNIFICANT else PAYS if good else COSTS
        panel.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", lw=2))
        amount = f"{change:+.2f}" if value is recall else f"{change:+.1f} %"
        panel.text(x + 0.5, y + 0.4, amount, ha="center", va="center", weight="bold")
        chance = "p = –" if math.isnan(p) else f"p = {p:.2g}"
        panel.text(x + 0.5, y + 0.72, chance, ha="center", va="center", fontsize=7.5)
    panel.set(xlim=(0, len(STARTS)), ylim=(len(lines), 0))
    panel.set_xticks(
        [x + 0.5 for x in range(len(STARTS))], ["from OPQ", "from identity", "from random"]
    )
    names = [f"{NAMES.get(kind, kind)}, {NAMES[fixed]}" for kind, fixed in lines]
    panel.set_yticks([y + 0.5 for y in range(len(lines))], names, fontsize=8)
    panel.tick_params(length=0)
    for spine in panel.spines.values():
        spine.set_visible(False)


_VALUES: dict[Value, str] = {recall: "recall@100, points", distortion: "distortion, %"}


def claims(rows: Rows) -> list[str]:
    """Where learning R pays, with a line for each case, and the cost of an identity start."""
    rows = select_latest(rows)
    told = []
    tests = {value: compare_cases(rows, value) for value in _VALUES}
    named: list[tuple[Value, str]] = [(recall, "raises recall@100")]
    for value, name in (*named, (distortion, "lowers distortion")):
        good = [
            case
            for case, p in tests[value].items()
            if p < SIGNIFICANT and (find_effect(rows, case, value) > 0) == (value is recall)
        ]
        where = "; ".join(map(_name, good)) or "none"
        told.append(
            f"Learning R {name}, p < {SIGNIFICANT} after Holm's correction, in {len(good)} of "
            f"{len(tests[value])} cases: {where}"
        )
    for case in tests[recall]:
        parts = []
        for value, title in _VALUES.items():
            values = _pair_case(rows, case, value)
            p, paired = p_value(*values), paired_p_value(*values)
            change = find_effect(rows, case, value)
            told_p = f"p = {p:.2g}, seed by seed {paired:.2g}, after Holm {tests[value][case]:.2g}"
            parts.append(f"{title.replace(', ', ' ')} {change:+.2f} ({told_p})")
        told.append(f"{_name(case)}: {', '.join(parts)}")
    for fixed in (False, True):
        for size in sorted({case[3] for case in tests[recall]}):
            told += _compare_starts(rows, fixed=fixed, size=size)
    return told


def _compare_starts(rows: Rows, *, fixed: bool, size: int) -> list[str]:
    kind = next(kind for kind, *_ in compare_cases(rows, distortion))
    ends = [_select_case(rows, (kind, fixed, start, size), True) for start in ("opq", "identity")]
    if not all(ends):
        return []
    opq, identity = (statistics.fmean(map(distortion, mine)) for mine in ends)
    return [
        f"Learned from the identity, distortion ends {100 * (identity / opq - 1):+.2f} % from "
        f"where it ends from OPQ ({NAMES.get(kind, kind)}, {NAMES[fixed]}, {size} bytes)"
    ]


def compare_cases(rows: Rows, value: Value) -> dict[Case, float]:
    """Paired p-values of learned against frozen R in each case, after Holm's correction."""
    found = {(row["kind"], row["fixed"], row["start"], row["bytes"]) for row in select_latest(rows)}
    cases = sorted(
        found,
        key=lambda case: (case[0] == "drifting", case[1], STARTS.index(case[2]), case[3]),
    )
    return holm({
        case: paired_p_value(*_pair_case(rows, case, value))
        for case in cases
    })  # fmt: skip


def find_effect(rows: Rows, case: Case, value: Value) -> float:
    """The mean change by learning R: recall in points, distortion in percent."""
    mine, base = _pair_case(rows, case, value)
    if value is recall:
        return 100 * (statistics.fmean(mine) - statistics.fmean(base))
    return 100 * (statistics.fmean(mine) / max(statistics.fmean(base), 1e-12) - 1)


def _name(case: Case) -> str:
    kind, fixed, start, size = case
    return f"{NAMES.get(kind, kind)} log, {NAMES[fixed]}, from {start}, {size} bytes"


def _pair_case(rows: Rows, case: Case, value: Value) -> tuple[list[float], list[float]]:
    """The values of a case with learned and with frozen R, by seed."""
    return pair_values(_select_case(rows, case, True), _select_case(rows, case, False), value)


def _select_case(rows: Rows, case: Case, learned: bool) -> Rows:
    kind, fixed, start, size = case
    mine = select(rows, kind=kind, fixed=fixed, start=start, bytes=size)
    return [row for row in mine if (row["method"] != "frozen") == learned]
