"""Table 1: precision@100 and recall@100 of trained indexes, with p-values against the baseline."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

from givens.paper.joint import (
    METHODS,
    Runs,
    distortion,
    named,
    of,
    p_value,
    precision,
    recall,
    verdict,
)
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
Row = dict[str, Any]


def run(runs: Runs, log: Log, configs: list[Config], methods: tuple[str, ...] = METHODS) -> Rows:
    """Every method, for each configuration: several seeds, and several sizes of each."""
    rows = []
    for seed in dict.fromkeys(config.seed for config in configs):
        for config in (config for config in configs if config.seed == seed):
            for method in methods:
                changed = dataclasses.replace(config, method=method)  # type: ignore[arg-type]
                rows.append(runs.run(log, changed))
        runs.forget()
    return rows


def table(rows: Rows, log: Log) -> list[str]:
    """The table in Markdown, a part for each size, and what holds of the paper's claims."""
    paper = PAPER.get(paper_set(log), {})
    config = rows[0]["config"]
    lines = [f"# Table 1: {log}", ""]
    for size in sorted({row["bytes"] for row in rows}):
        mine = of(rows, bytes=size)
        lines += [f"## {size} bytes an item", ""]
        lines += ["| | p@100 % | p | r@100 % | p | distortion | p | the paper's p@100, r@100 |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for method in (method for method in METHODS if of(mine, method=method)):
            cells = [named(of(mine, method=method), rows)]
            for value, scale in ((precision, 100), (recall, 100), (distortion, 1)):
                cells += _cells(mine, method, value, scale)
            said = paper.get(method)
            cells.append(f"{said[0]}, {said[1]}" if said else "")
            lines.append(f"| {' | '.join(cells)} |")
        if full := [row["results"]["full"]["recall@100"] for row in of(mine, method="post-hoc")]:
            lines += ["", f"Full precision, without an index: r@100 {_mean(full, 100)} %."]
        lines.append("")
        lines += [f"- {line}" for line in claims(mine)] + [""]
    where = rows[0]["gpu"] or f"{rows[0]['threads']} CPU threads"
    lines.append(
        f"n = {config['dim']}, {config['loss']} loss, {config['warmup']} steps of warm-up and "
        f"{config['steps']} with the index, of {config['batch']}; lr {config['lr']:g}, angle "
        f"{config['angle']:g}, weight {config['weight']:g} of the distortion; mean ± standard "
        f"deviation over {len({row['seed'] for row in rows})} seeds, p by one-way ANOVA against "
        f"the baseline; {where}, torch {rows[0]['torch']}."
    )
    return lines


def claims(rows: Rows) -> list[str]:
    """What the rows of one size say about the paper's claims, and about indexing afterwards."""
    told = []
    base = of(rows, method="frozen")
    for method in ("gcd-steepest", "gcd-greedy", "gcd-random", "cayley"):
        if not (base and (mine := of(rows, method=method))):
            continue
        told.append(
            f"{LABELS[method]} lowers the distortion of the baseline: "
            f"{verdict(mine, base, distortion, lower=True)}"
        )
        told.append(
            f"{LABELS[method]} raises its recall@100: {verdict(mine, base, recall, lower=False)}"
        )
    mine, after = of(rows, method="gcd-greedy"), of(rows, method="post-hoc")
    if mine and after:
        found = verdict(mine, after, recall, lower=False)
        told.append(f"GCD-G finds more than Faiss's OPQ afterwards: {found}")
    return told


def paper_set(log: Log) -> str:
    """Which of the paper's data a log stands for."""
    name = log.name.lower()
    if "book" in name:
        return "Amazon Books"
    if name.startswith(("ml-", "movielens")) or name in ("ratings.dat", "ratings.csv"):
        return "MovieLens"
    return "industrial" if name == "built-in" else ""


def _cells(rows: Rows, method: str, value: Callable[[Row], float], scale: float) -> list[str]:
    mine, base = ([value(row) for row in of(rows, method=kind)] for kind in (method, "frozen"))
    p = p_value(mine, base)
    return [_mean(mine, scale), "" if method == "frozen" or math.isnan(p) else f"{p:.3g}"]


def _mean(values: list[float], scale: float) -> str:
    mean = scale * statistics.mean(values)
    told = f"{mean:.4g}" if scale == 1 else f"{mean:.2f}"
    if len(values) == 1:
        return told
    spread = scale * statistics.stdev(values)
    return f"{told} ± {spread:.2g}" if scale == 1 else f"{told} ± {spread:.2f}"
