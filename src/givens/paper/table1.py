"""Table 1: precision@100 and recall@100 of trained indexes, with p-values against the baseline."""

import dataclasses
import math
import statistics
from typing import Any

from givens.paper.joint import (
    METHODS,
    SIGNIFICANT,
    Runs,
    Value,
    distortion,
    find_undecided,
    holm,
    name_method,
    p_value,
    pair_values,
    paired_p_value,
    precision,
    recall,
    select,
    verdict,
)
from givens.paper.rates import STILL, Rates
from givens.paper.rows import Rows
from givens.retrieval.config import LABELS, Config
from givens.retrieval.data import Log

# p@100 and r@100 in %.
PAPER = {
    "industrial": {
        "frozen": (2.43, 51.29),
        "cayley": (2.44, 51.37),
        "gcd-random": (2.43, 51.28),
        "gcd-greedy": (2.43, 51.37),
        "gcd-steepest": (2.44, 51.43),
    },
    "MovieLens": {
        "frozen": (7.78, 35.53),
        "cayley": (7.73, 35.59),
        "gcd-random": (7.82, 35.78),
        "gcd-greedy": (7.83, 35.89),
        "gcd-steepest": (7.94, 36.35),
    },
    "Amazon Books": {
        "frozen": (0.74, 5.91),
        "cayley": (0.74, 5.88),
        "gcd-random": (0.73, 5.88),
        "gcd-greedy": (0.73, 5.81),
        "gcd-steepest": (0.74, 5.91),
    },
}


def run(
    runs: Runs,
    log: Log,
    configs: list[Config],
    rates: dict[int, dict[str, Rates]],
    *,
    more: int = 0,
) -> Rows:
    """Run every method for each configuration.

    Args:
        runs: the rows so far.
        log: the log.
        configs: one for each seed and size.
        rates: the rates of each method, by size.
        more: the number of seeds for methods whose difference from the baseline the first ones
            leave open; 0 for no further seeds.
    """
    rows = []
    for seed in dict.fromkeys(config.seed for config in configs):
        for config in (config for config in configs if config.seed == seed):
            for method in rates[config.bytes]:
                rows.append(runs.run(log, set_rates(config, method, rates[config.bytes])))
        runs.forget(seed)
    first = [config for config in configs if config.seed == configs[0].seed]
    open_ones = {config.bytes: find_undecided(select(rows, bytes=config.bytes)) for config in first}
    for seed in range(len(configs) // len(first), more if any(open_ones.values()) else 0):
        for config in (dataclasses.replace(config, seed=seed) for config in first):
            methods = open_ones[config.bytes]
            for method in ("frozen", *methods) if methods else ():
                rows.append(runs.run(log, set_rates(config, method, rates[config.bytes])))
        runs.forget(seed)
    return rows


def set_rates(config: Config, method: str, rates: dict[str, Rates]) -> Config:
    """The configuration of a method, with the rates chosen for it."""
    options: Any = rates[method]
    return dataclasses.replace(config, method=method, **options)  # type: ignore[arg-type]


def table(rows: Rows, log: Log) -> list[str]:
    """The table in Markdown, with a section and the paper's claims for each size."""
    paper = PAPER.get(paper_set(log), {})
    config = rows[0]["config"]
    lines = [f"# Table 1: {log}", ""]
    for size in sorted({row["bytes"] for row in rows}):
        mine = select(rows, bytes=size)
        methods = [method for method in METHODS if select(mine, method=method)]
        lines += [f"## {size} bytes an item", ""]
        lines += [
            "| | angle | p@100 % | p | r@100 % | p | by seed, Holm | distortion | p | "
            "by seed, Holm | distinct codes % | the paper's p@100, r@100 |"
        ]
        lines += ["|---" * 12 + "|"]
        tests = {value: compare_methods(mine, value) for value in (recall, distortion)}
        for method in methods:
            first = select(mine, method=method)
            angle = first[0]["config"]["angle"]
            cells = [name_method(first, rows), "" if method in STILL else f"{angle:g}"]
            cells += _cells(mine, method, precision, 100)
            for value, scale in ((recall, 100), (distortion, 1)):
                p = tests[value].get(method, math.nan)
                cells += [*_cells(mine, method, value, scale), "" if math.isnan(p) else f"{p:.2g}"]
            cells.append(f"{100 * statistics.mean(r['results']['distinct'] for r in first):.1f}")
            said = paper.get(method)
            cells.append(f"{said[0]}, {said[1]}" if said else "")
            lines.append(f"| {' | '.join(cells)} |")
        if full := [
            row["results"]["full"]["recall@100"] for row in select(mine, method="post-hoc")
        ]:
            lines += ["", f"Full precision, without an index: r@100 {_mean(full, 100)} %."]
        lines.append("")
        lines += [f"- {line}" for line in (*survivors(mine), *claims(mine))] + [""]
    where = rows[0]["gpu"] or f"{rows[0]['threads']} CPU threads"
    lines.append(
        f"n = {config['dim']}, {config['loss']} loss, {config['warmup']} steps of warm-up and "
        f"{config['steps']} with the index, of {config['batch']}; lr {config['lr']:g}, each "
        f"method at the rates that validation users chose on seeds of their own; mean ± standard "
        f"deviation over {len({row['seed'] for row in rows})} seeds, p by one-way ANOVA against "
        f"the baseline; by seed: paired Student's test, corrected by Holm for the number of "
        f"methods; distinct codes: how many the items have, in % of the items; {where}, "
        f"torch {rows[0]['torch']}."
    )
    return lines


def compare_methods(rows: Rows, value: Value) -> dict[str, float]:
    """Paired p-values of all methods of one size against the baseline, after Holm's correction."""
    base = select(rows, method="frozen")
    there = [m for m in METHODS if m != "frozen" and select(rows, method=m)]
    return holm(
        {m: paired_p_value(*pair_values(select(rows, method=m), base, value)) for m in there}
    )


def survivors(rows: Rows) -> list[str]:
    """Which differences from the baseline are significant after the correction."""
    base, told = select(rows, method="frozen"), []
    for name, value in (("recall@100", recall), ("the distortion", distortion)):
        tests = compare_methods(rows, value)
        found: dict[str, list[str]] = {"above": [], "below": [], "open": []}
        for method, p in tests.items():
            first, second = pair_values(select(rows, method=method), base, value)
            way = "above" if sum(first) > sum(second) else "below"
            found[way if p < SIGNIFICANT else "open"].append(LABELS[method])
        parts = [
            f"{way} the baseline: {', '.join(found[way]) or 'none'}" for way in ("above", "below")
        ]
        told.append(
            f"After Holm's correction for {len(tests)} methods, {name} is {'; '.join(parts)}; "
            f"not shown: {', '.join(found['open']) or 'none'}"
        )
    return told


def claims(rows: Rows) -> list[str]:
    """The paper's claims, and ours on post-hoc indexes, with what the rows of one size say."""
    told = []
    base = select(rows, method="frozen")
    for method in ("gcd", "gcd-steepest", "gcd-greedy", "gcd-random", "cayley", "pogo"):
        if not (base and (mine := select(rows, method=method))):
            continue
        told.append(
            f"{LABELS[method]} lowers the distortion of the baseline: "
            f"{verdict(mine, base, distortion, lower=True)}"
        )
        told.append(
            f"{LABELS[method]} raises its recall@100: {verdict(mine, base, recall, lower=False)}"
        )
    for method, other in (("gcd", "post-hoc"), ("gcd", "jpq"), ("gcd", "cayley")):
        mine, after = select(rows, method=method), select(rows, method=other)
        if mine and after:
            found = verdict(mine, after, recall, lower=False)
            told.append(f"{LABELS[method]} finds more than {LABELS[other]}: {found}")
    return told


def paper_set(log: Log) -> str:
    """The paper's dataset that a log corresponds to; empty if there is none."""
    name = log.name.lower()
    if "book" in name:
        return "Amazon Books"
    if name.startswith(("ml-", "movielens")) or name in ("ratings.dat", "ratings.csv"):
        return "MovieLens"
    return "industrial" if name == "built-in" else ""


def _cells(rows: Rows, method: str, value: Value, scale: float) -> list[str]:
    mine, base = ([value(row) for row in select(rows, method=kind)] for kind in (method, "frozen"))
    p = p_value(mine, base)
    return [_mean(mine, scale), "" if method == "frozen" or math.isnan(p) else f"{p:.3g}"]


def _mean(values: list[float], scale: float) -> str:
    mean = scale * statistics.mean(values)
    told = f"{mean:.4g}" if scale == 1 else f"{mean:.2f}"
    if len(values) == 1:
        return told
    spread = scale * statistics.stdev(values)
    return f"{told} ± {spread:.2g}" if scale == 1 else f"{told} ± {spread:.2f}"
