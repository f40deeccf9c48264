"""The rows of `learn.py` as a table, and as a picture of loss against time."""

import statistics
from pathlib import Path
from typing import Any, NamedTuple

from givens.paper.rows import Rows, save_picture, set_plain_ticks

POINTS = 50
# Every opponent has a colour; GCD has shades of one, the paper's variants shades of another.
STYLES: dict[str, dict[str, Any]] = {
    "gcd": {"color": "#c1121f", "lw": 3, "zorder": 5},
    "gcd-all": {"color": "#c1121f", "lw": 1.5, "ls": "--"},
    "gcd-32": {"color": "#e5636b", "lw": 1},
    "gcd-8": {"color": "#ec8f95", "lw": 1},
    "gcd-4": {"color": "#f2b5b8", "lw": 1},
    "gcd-1": {"color": "#f2b5b8", "lw": 1, "ls": ":"},
    "gcd-greedy": {"color": "#e09f3e", "lw": 1.5},
    "gcd-random": {"color": "#e09f3e", "lw": 1.5, "ls": ":"},
    "cayley": {"color": "#1d3557", "lw": 2},
    "expm": {"color": "#1d3557", "lw": 1.2, "ls": "--"},
    "geotorch": {"color": "#1d3557", "lw": 1.2, "ls": ":"},
    "cayley-sgd": {"color": "#457b9d", "lw": 2},
    "qr": {"color": "#8d6a9f", "lw": 1.5, "ls": "--"},
    "pogo": {"color": "#2a9d8f", "lw": 2},
    "landing": {"color": "#2a9d8f", "lw": 1.2, "ls": "--"},
    "geoopt": {"color": "#8d6a9f", "lw": 1.5},
    "rsdm": {"color": "#808080", "lw": 1.5},
}
UNITS = {
    "procrustes": "held-out relative error",
    "low-bit": "part lost to rounding",
    "copying": "symbols wrong",
    "far-rotation": "held-out squared error",
    "codebooks": "held-out distortion",
    "regression": "held-out relative error",
    "eigenvectors": "cost above its least, relative",
    "components": "1 − correlation with the source",
}


class Result(NamedTuple):
    """A method on a problem: its shown seeds, at its rate."""

    lr: float
    figures: list[float]
    failed: int
    curve: list[float]
    """Means over seeds at `points(steps)`, as far as all seeds got."""
    steps: int
    orthogonality_error: float
    median_us: float | None

    @property
    def mean(self) -> float:
        """The mean figure; infinite if a seed failed."""
        return float("inf") if self.failed else statistics.fmean(self.figures)


def points(steps: int) -> list[int]:
    """The steps at which figures are measured: about 50, and the last one."""
    return sorted({round(steps * point / POINTS) for point in range(POINTS + 1)})


def gather(found: Rows, times: Rows) -> dict[tuple[str, int], dict[str, Result]]:
    """Results by problem and method, in the order of `STYLES`."""
    medians = {(row["problem"], row["n"], row["method"]): row["median_us"] for row in times}
    results: dict[tuple[str, int], dict[str, Result]] = {}
    shown = [row for row in found if row["shown"]]
    for problem, n in dict.fromkeys((row["problem"], row["n"]) for row in shown):
        results[problem, n] = {}
        for method in STYLES:
            runs = [
                row
                for row in shown
                if (row["problem"], row["n"], row["method"]) == (problem, n, method)
            ]
            if runs:
                figures = [row["figure"] for row in runs if row["figure"] is not None]
                errors = [row["orthogonality_error"] for row in runs]
                curves = zip(*(row["curve"] for row in runs), strict=False)
                results[problem, n][method] = Result(
                    runs[0]["lr"],
                    figures,
                    len(runs) - len(figures),
                    [statistics.fmean(part) for part in curves],
                    runs[0]["steps"],
                    max((error for error in errors if error is not None), default=float("nan")),
                    medians.get((problem, n, method)),
                )
    return results


def time_to_reach(result: Result, figure: float) -> float | None:
    """Milliseconds until the mean curve reaches a figure; None if it never does."""
    if result.median_us is None:
        return None
    for step, value in zip(points(result.steps), result.curve, strict=False):
        # Curves are rounded to five digits.
        if value <= figure * (1 + 1e-4):
            return step * result.median_us / 1e3
    return None


def format_table(found: Rows, times: Rows) -> str:
    """A Markdown table for each problem, the best figure first."""
    lines = []
    for (problem, n), methods in gather(found, times).items():
        goal = methods["cayley"].mean if "cayley" in methods else None
        lines += [f"\n**{problem}, n = {n}**: {UNITS[problem]}, mean ± standard deviation\n"]
        lines += ["| method | figure | rate | off SO(n) | ms a step | ms to Cayley's figure |"]
        lines += ["|---|---|---|---|---|---|"]
        for method, result in sorted(methods.items(), key=lambda item: item[1].mean):
            spread = statistics.stdev(result.figures) if len(result.figures) > 1 else 0.0
            told = f"{result.mean:.4g} ± {spread:.1g}"
            if result.failed:
                told = f"{result.failed} of {result.failed + len(result.figures)} failed"
            reach = None if goal is None else time_to_reach(result, goal)
            step = "–" if result.median_us is None else f"{result.median_us / 1e3:.3g}"
            lines += [
                f"| {method} | {told} | {result.lr:g} | {result.orthogonality_error:.0e} | {step} "
                f"| {'–' if reach is None else f'{reach:.3g}'} |"
            ]
    return "\n".join(lines)


def plot(found: Rows, times: Rows, path: Path) -> None:
    """Draw the mean figure of the shown seeds against training time, one panel for each problem."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    results = gather(found, times)
    columns = min(4, len(results))
    height = -(-len(results) // columns)
    figure, panels = pyplot.subplots(
        height, columns, figsize=(3.05 * columns, 2.9 * height + 0.6), squeeze=False
    )
    lines: dict[str, Any] = {}
    for axes in panels.flat[len(results) :]:
        axes.axis("off")
    for axes, ((problem, n), methods) in zip(panels.flat, results.items(), strict=False):
        for method, result in methods.items():
            if result.median_us is not None:
                at = [step * result.median_us / 1e3 for step in points(result.steps)]
                # A logarithmic axis has no zero.
                drawn = list(zip(at, result.curve, strict=False))[1:]
                (lines[method],) = axes.plot(*zip(*drawn, strict=True), **STYLES[method])
        axes.set_title(f"{problem}, n = {n}", fontsize=10)
        axes.set_xlabel("ms of training", fontsize=8)
        axes.set_ylabel(UNITS[problem], fontsize=8)
        axes.set_xscale("log")
        set_plain_ticks(axes.xaxis)
        means = [result.curve[-1] for result in methods.values() if not result.failed]
        if problem != "codebooks" and min(means) > 0:
            axes.set_yscale("log")
            if max(means) < 1000 * min(means):
                set_plain_ticks(axes.yaxis)
        axes.tick_params(labelsize=7, which="both")
        axes.grid(alpha=0.25, which="both")
    order = [method for method in STYLES if method in lines]
    spare = panels.flat[-1] if len(results) < height * columns else figure
    place = "center" if spare is not figure else "upper center"
    spare.legend([lines[m] for m in order], order, loc=place, ncols=2, frameon=False, fontsize=8)
    save_picture(pyplot, figure, caption(found, times), path)


def caption(found: Rows, times: Rows) -> str:
    """Seeds, rates, machine and versions, in one line."""
    row = times[0]
    seeds = len({run["seed"] for run in found if run["shown"]})
    where = row["gpu"] or f"{row['cpu']}, {row['threads']} thread{'s' * (row['threads'] > 1)}"
    return (
        f"Means of {seeds} seed{'s' * (seeds > 1)}, each method at its best rate; "
        f"median time of a whole training step on {where}; "
        f"torch {row['torch']}, givens {row['givens']}."
    )
