"""Figure 2: convergence on fixed embeddings, for OPQ and other ways to learn R.

Every iteration assigns the vectors, updates the codewords and turns R. (a) Distortion against
iteration for every method, with the paper's 5 steps at λ = 1e-4 and with the best rate of each
method; (b, c) mean and standard deviation of runs on parts of the data, for OPQ and GCD-G.
"""

import hashlib
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from givens.fixed.fit import fit
from givens.fixed.turns import Learned
from givens.paper.rows import (
    Rows,
    environment,
    format_number,
    machine,
    read,
    save_picture,
    set_plain_ticks,
    write,
)
from givens.storage import vectors

SUBSPACES, CODEWORDS = 4, 256
RATE, STEPS = 1e-4, 5
# A method's best rate is the one with the least distortion on a tenth of the data.
RATES = (1e-7, 1e-6, 1e-5, 3e-5, 1e-4, 3e-4)
METHODS: tuple[str, ...] = get_args(Learned)
FRACTIONS, RUNS = (0.1, 0.3, 1.0), 10
NAMES = {
    "opq": "OPQ (SVD)",
    "cayley": "Cayley",
    "gcd-random": "GCD-R",
    "gcd-greedy": "GCD-G",
    "gcd-steepest": "GCD-S",
    "overlapping-random": "GCD-R, overlapping",
    "overlapping-greedy": "GCD-G, overlapping",
    "exact": "GCD-G, exact angles (ours)",
}
LAYOUTS = ("sift_base.fvecs", "base.npy", "base.fvecs", "base_*.npy", "*_base.fvecs")


def read_base(folder: Path, device: str) -> Tensor:
    """The base vectors of a folder: SIFT1M's layout, or base.npy, in one or several parts."""
    for layout in LAYOUTS:
        found = sorted(folder.glob(layout))
        if found:
            parts = [np.asarray(vectors.read(path)[:]) for path in found]
            return torch.cat([torch.from_numpy(part).to(device).float() for part in parts])
    raise ValueError(f"{folder} has no base vectors; one of {', '.join(LAYOUTS)} is wanted")


def digest(x: Tensor) -> str:
    """A digest by which rows identify their vectors, from some thousands of them."""
    some = x[:: max(1, len(x) // 4096)].cpu().contiguous().numpy()
    return hashlib.sha256(f"{tuple(x.shape)}".encode() + some.tobytes()).hexdigest()[:16]


Chosen = dict[str, dict[str, Any]]
"""A row for each method."""


class Runs:
    """The rows of a figure, written as runs finish; runs that have a row are not repeated."""

    def __init__(self, path: Path, x: Tensor, iterations: int, tell: Callable[[str], None]) -> None:
        self.path, self.x, self.iterations, self.tell = path, x, iterations, tell
        self.about = environment("cuda" if x.is_cuda else "cpu")
        self.rows: Rows = read(path) if path.exists() else []
        self.data = digest(x)

    def run(
        self, method: str, *, rate: float | None, fraction: float = 1.0, seed: int = 0
    ) -> dict[str, Any]:
        """The row of a fit from the identity and sampled codewords, with its distortions."""
        how = {
            "method": method,
            "rate": None if method == "opq" else rate,
            "fraction": fraction,
            "seed": seed,
            "iterations": self.iterations,
            "vectors": len(self.x),
            "data": self.data,
        }
        for row in self.rows:
            if all(row.get(name) == value for name, value in how.items()):
                return row
        part = self.x
        if fraction < 1:
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randperm(len(part), generator=generator)[: int(fraction * len(part))]
            part = part[drawn.sort().values.to(part.device)]
        curve: list[float] = []
        q = fit(
            part,
            SUBSPACES,
            codewords=min(CODEWORDS, len(part)),
            method=method,  # type: ignore[arg-type]
            init="identity",
            seed=seed,
            max_iter=self.iterations,
            sample=0,
            grow=False,
            tol=-1.0,
            rate=how["rate"],  # type: ignore[arg-type]
            steps=STEPS if how["rate"] else None,
            callback=lambda progress: curve.append(progress.distortion),
        )
        row = {
            **how,
            "distortion": curve,
            "final": q.distortion(part),
            "final_on_all": q.distortion(self.x),
            **self.about,
        }
        self.rows.append(row)
        write(self.path, self.rows)
        rated = f" λ = {how['rate']:g}" if how["rate"] else ""
        self.tell(
            f"{method}{rated}, {100 * fraction:g} % of the data: {format_number(row['final'])}"
        )
        return row

    def tune(self, method: str) -> float:
        """The rate with the least distortion on a tenth of the data."""
        tried = {rate: self.run(method, rate=rate, fraction=0.1)["final"] for rate in RATES}
        return min(tried, key=lambda rate: tried[rate])


def run_a(runs: Runs) -> None:
    """Run all methods at the paper's rate, and each at its best rate."""
    for method in METHODS:
        runs.run(method, rate=RATE)
        if method != "opq":
            runs.run(method, rate=runs.tune(method))
    runs.run("gcd-greedy", rate=None)


def run_bc(runs: Runs, method: str) -> None:
    """Run a method ten times on each part of the data, GCD-G at the paper's rate."""
    for fraction in FRACTIONS:
        for seed in range(RUNS):
            runs.run(method, rate=RATE, fraction=fraction, seed=seed)


def select_a(rows: Rows) -> tuple[Chosen, Chosen, dict[str, Any] | None]:
    """The rows by method at the paper's rate and at the best rate, and the row of exact angles."""
    whole = [row for row in rows if row["fraction"] == 1]
    exact = next((row for row in whole if _is_exact(row)), None)
    paper = {
        row["method"]: row
        for row in whole
        if row["rate"] == (None if row["method"] == "opq" else RATE)
    }
    best = {m: min(_select(whole, m), key=lambda row: row["final"]) for m in paper}
    return paper, best, exact


def plot_a(pyplot: Any, rows: Rows, path: Path) -> list[str]:
    """Draw two panels: the paper's rate, and the best rate of each method."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    whole = [row for row in rows if row["fraction"] == 1]
    paper, best, exact = select_a(rows)
    for panel, chosen, title in (
        (axes[0], paper, f"5 steps at λ = {RATE:g} an iteration"),
        (axes[1], best, "each at its own best λ"),
    ):
        for method in METHODS:
            if method in chosen:
                row = chosen[method]
                rate = f", λ = {row['rate']:g}" if panel is axes[1] and row["rate"] else ""
                style = ":" if method.startswith("over") else "-" if "gcd" in method else "--"
                panel.plot(row["distortion"], style, label=NAMES[method] + rate)
        # Diverging curves leave the picture.
        low = min(min(row["distortion"]) for row in whole)
        top = 1.1 * max(row["distortion"][0] for row in whole)
        panel.set(xlabel="iteration", title=title, yscale="log", ylim=(0.98 * low, top))
        set_plain_ticks(panel.yaxis)
        panel.grid(alpha=0.3, which="both")
    if exact:
        axes[1].plot(exact["distortion"], "k-", lw=1, label=NAMES["exact"])
    axes[0].set_ylabel("distortion")
    for panel in axes:
        panel.legend(frameon=False, fontsize=7.5)
    save_picture(pyplot, figure, _caption(rows), path)
    return claims_a(rows)


def claims_a(rows: Rows) -> list[str]:
    """The paper's claims about figure 2a, each with what the rows say about it."""
    paper, best, exact = select_a(rows)
    told = []
    for name, chosen in (("at the paper's λ", paper), ("each at its best λ", best)):
        final = {method: row["final"] for method, row in chosen.items()}
        if not final.keys() >= set(METHODS):
            continue
        opq = final["opq"]

        def over(method: str, final: dict[str, float] = final, opq: float = opq) -> str:
            return f"{NAMES[method]} {100 * (final[method] / opq - 1):+.1f} %"

        greedy, random = (_compare_overlap(final, kind) for kind in ("greedy", "random"))
        like = max(final["gcd-greedy"], final["gcd-steepest"]) < 1.01 * opq
        told += [
            f"{name}, final distortion against OPQ's {format_number(opq)}: "
            + ", ".join(over(method) for method in METHODS[1:]),
            f"{_yes(like)} GCD-G and GCD-S end within 1 % of OPQ or below it ({name})",
            f"{_yes(final['cayley'] > final['gcd-greedy'])} Cayley is behind GCD-G ({name})",
            f"{_yes(final['gcd-random'] > final['gcd-greedy'])} GCD-R is behind GCD-G ({name})",
            f"{_yes(greedy > 0.001 and random < 0.001)} sharing axes hurts GCD-G "
            f"({100 * greedy:+.2f} %) and hardly GCD-R ({100 * random:+.2f} %; {name})",
        ]
    if exact:
        share = 100 * (exact["final"] / best["opq"]["final"] - 1)
        told.append(f"GCD-G with exact angles and no rate, ours: {share:+.1f} % against OPQ")
    return told


def plot_bc(pyplot: Any, rows: Rows, path: Path) -> list[str]:
    """Draw mean and standard deviation of the runs on each part of the data."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4.8))
    method = rows[0]["method"]
    for fraction in sorted({row["fraction"] for row in rows}):
        curves = np.array([row["distortion"] for row in rows if row["fraction"] == fraction])
        mean, spread = curves.mean(0), curves.std(0, ddof=1) if len(curves) > 1 else 0 * curves[0]
        axes.plot(mean, label=f"{100 * fraction:g} % of the data", lw=1.2)
        axes.fill_between(range(len(mean)), mean - spread, mean + spread, alpha=0.2)
    axes.set(xlabel="iteration", ylabel="distortion", yscale="log", title=NAMES[method])
    set_plain_ticks(axes.yaxis)
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False)
    save_picture(pyplot, figure, f"Mean ± standard deviation of runs; {_caption(rows)}", path)
    other = path.with_name(f"fig2{'c' if method == 'opq' else 'b'}.json")
    return claims_bc([*rows, *(read(other) if other.exists() else [])])


def claims_bc(rows: Rows) -> list[str]:
    """Each method on each part of the data; GCD-G against OPQ if the rows of both are given."""
    told = []
    for method in dict.fromkeys(row["method"] for row in rows):
        for fraction in sorted({row["fraction"] for row in rows}):
            seen, on_all = (_values(rows, method, fraction, k) for k in ("final", "final_on_all"))
            if seen:
                told.append(
                    f"{NAMES[method]} on {100 * fraction:g} %: {_mean(seen)} on the vectors it "
                    f"learned from, {_mean(on_all)} on all ({len(seen)} runs)"
                )
    for fraction in sorted({row["fraction"] for row in rows}):
        opq, gcd = (
            _values(rows, method, fraction, "final_on_all") for method in ("opq", "gcd-greedy")
        )
        if len(opq) < 2 or len(gcd) < 2:
            continue
        less = statistics.stdev(gcd) < statistics.stdev(opq)
        told.append(
            f"{_yes(less)} GCD-G varies less between runs on {100 * fraction:g} % "
            f"({_mean(gcd)} against {_mean(opq)} on all vectors)"
        )
        if fraction == min(FRACTIONS):
            lower = statistics.mean(gcd) < statistics.mean(opq)
            told.append(f"{_yes(lower)} GCD-G does better on {100 * fraction:g} % of the data")
    return told


def _caption(rows: Rows) -> str:
    count = rows[0]["vectors"]
    return f"{count:,} vectors, {SUBSPACES} × {CODEWORDS} codewords; {machine(rows[0])}"


def _values(rows: Rows, method: str, fraction: float, key: str) -> list[float]:
    return [row[key] for row in rows if (row["method"], row["fraction"]) == (method, fraction)]


def _mean(values: list[float]) -> str:
    return format_number(
        statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    )


def _is_exact(row: dict[str, Any]) -> bool:
    return row["method"] != "opq" and row["rate"] is None


def _select(rows: Rows, method: str) -> Rows:
    return [row for row in rows if row["method"] == method and not _is_exact(row)]


def _compare_overlap(final: dict[str, float], kind: str) -> float:
    return final[f"overlapping-{kind}"] / final[f"gcd-{kind}"] - 1


def _yes(holds: bool) -> str:
    return "holds:" if holds else "does not hold:"
