"""Loss against steps and time, for GCD and everything else that keeps a matrix orthogonal.

    python benchmarks/learn.py --processes 2 --json results/learn.json
    python benchmarks/learn.py --json results/learn.json --time --time-json results/learn-time.json
    python benchmarks/learn.py --json … --time-json … --table --plot results/learn.png

The problems are those of problems.py. Each method has the best rate of a grid of factor √10, on
hidden seeds; the grid is widened if the best rate is on its edge, and then refined around the best.
Rates have a cosine decay to zero. A run that diverges or leaves SO(n) counts as infinitely bad.
Every run is a row.
"""

import argparse
import functools
import math
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import curves
import torch
from opponents import CAPTURED, PACKAGES, make_optimizer
from problems import PROBLEMS, Problem
from torch.optim.lr_scheduler import CosineAnnealingLR

import givens
from givens.paper import fig4, rows, timing

# The middle of each method's first grid, as a power of √10. GCD's rate is an angle, Adam's is for
# the entries of a skew matrix, and that of POGO and Landing is a Frobenius norm.
METHODS = {
    **dict.fromkeys(("gcd-1", "gcd-4", "gcd-8", "gcd", "gcd-32", "gcd-all"), -2),
    **{"gcd-random": -2, "gcd-greedy": -2, "cayley": -4, "expm": -4, "geotorch": -4},
    **{"geoopt": -2, "pogo": 1, "rsdm": -2, "landing": -1},
}
GRID, WIDENINGS = range(-3, 3), 3
HIDDEN_SEEDS = (100, 101)
# Runs that end farther from SO(n) have failed.
LEAST_ORTHOGONAL = 1e-2
ADAM_RATE = 1e-3
# Batches that timed steps cycle through.
POOL = 8
# Seconds between two writes of the rows.
WRITE_EVERY = 2
SMALL = {"dim": 40, "steps": 10}


class Run(NamedTuple):
    """One training run, and what identifies its row."""

    problem: str
    n: int
    method: str
    lr: float
    seed: int
    shown: bool
    steps: int


def rate(power: float) -> float:
    """√10 to this power, rounded to three digits."""
    return float(f"{10 ** (power / 2):.3g}")


def powers_to_try(
    centre: int, scores: Mapping[float, float], widenings: int = WIDENINGS
) -> set[float]:
    """The powers of √10 to try next, given the mean figures of those tried.

    First the grid around the centre; then one more beyond the edge if the best is on it, at most
    `widenings` times each way; then the two halfway to the neighbours of the best; then none.
    """
    grid: set[float] = {centre + step for step in GRID}
    if missing := grid - scores.keys():
        return missing
    whole = {power: score for power, score in scores.items() if power == round(power)}
    best = best_power(whole)
    if best == min(whole) and best > min(grid) - widenings:
        return {best - 1}
    if best == max(whole) and best < max(grid) + widenings:
        return {best + 1}
    return ({best - 0.5, best + 0.5} if widenings else set()) - scores.keys()


def best_power(scores: Mapping[float, float]) -> float:
    """The power with the least mean figure; the mean is infinite if a run failed."""
    return min(sorted(scores), key=lambda power: scores[power])


def mean_score(figures: list[float | None]) -> float:
    """The mean figure; infinite if a run failed."""
    finite = [figure for figure in figures if figure is not None and math.isfinite(figure)]
    return statistics.fmean(finite) if len(finite) == len(figures) else math.inf


class Search:
    """The runs of one method on one problem, each requested as soon as it is known."""

    def __init__(
        self, problem: str, n: int, method: str, steps: int, seeds: int, small: bool = False
    ) -> None:
        self.fixed = (problem, n, method)
        self.steps, self.seeds = steps, seeds
        self.hidden = HIDDEN_SEEDS[:1] if small else HIDDEN_SEEDS
        self.widenings = 0 if small else WIDENINGS
        self.asked: set[Run] = set()
        self.figures: dict[tuple[float, bool], dict[int, float | None]] = defaultdict(dict)

    def tell(self, run: Run, figure: float | None) -> None:
        """Record the figure of a finished run, of this or of an earlier call."""
        self.asked.add(run)
        self.figures[run.lr, run.shown][run.seed] = figure

    def next_runs(self) -> list[Run]:
        """The runs that can start now and have not been requested."""
        scores = self.scores()
        powers = powers_to_try(METHODS[self.fixed[2]], scores, self.widenings)
        shown, seeds = False, self.hidden
        if not powers:
            powers, shown, seeds = {best_power(scores)}, True, range(self.seeds)
        runs = [
            Run(*self.fixed, rate(power), seed, shown, self.steps)
            for power in sorted(powers)
            for seed in seeds
        ]
        runs = [run for run in runs if run not in self.asked]
        self.asked.update(runs)
        return runs

    def scores(self) -> dict[float, float]:
        """The mean figures of the powers at which all hidden seeds are finished."""
        return {
            power: mean_score(list(figures.values()))
            for power in (half / 2 for half in range(-60, 40))
            if len(figures := self.figures.get((rate(power), False), {})) == len(self.hidden)
        }


def train(run: Run, device: str = "cpu") -> dict[str, Any]:
    """Train; returns the row, with the final figure, or None if it failed, and the curve."""
    problem = make_problem(run.problem, run.n, run.seed, device)
    rotation = givens.Rotation(run.n, problem.start.mT)
    optimizers = [make_optimizer(rotation, run.method, run.lr, run.seed)]
    if problem.parameters:
        optimizers.append(torch.optim.Adam(problem.parameters, ADAM_RATE))
    schedules = [CosineAnnealingLR(optimizer, run.steps) for optimizer in optimizers]
    points = curves.points(run.steps)
    curve: list[float] = []
    failure = None
    for step in range(run.steps + 1):
        if step in points:
            with torch.no_grad():
                curve.append(float(problem.figure(rotation.weight)))
            if not math.isfinite(curve[-1]):
                failure = "the figure is not finite"
                break
        if step < run.steps:
            try:
                do_step(problem, rotation, optimizers, problem.draw_batch())
            except (ValueError, torch.linalg.LinAlgError) as error:
                # GCD refuses a gradient that is not finite, and LAPACK a matrix.
                failure = str(error)
                break
            for schedule in schedules:
                schedule.step()
    error = givens.orthogonality_error(rotation.weight)
    if failure is None and not error <= LEAST_ORTHOGONAL:
        failure = f"it is not orthogonal: {error:.1e}"
    return {
        **run._asdict(),
        "figure": curve[-1] if failure is None else None,
        "failure": failure,
        "orthogonality_error": error if math.isfinite(error) else None,
        "curve": [float(f"{value:.5g}") for value in curve if math.isfinite(value)],
        **describe(device),
    }


def make_problem(name: str, n: int, seed: int, device: str) -> Problem:
    """A problem by its name."""
    return PROBLEMS[name][0](n, seed, device)


@functools.cache
def describe(device: str) -> dict[str, Any]:
    """The environment of a row."""
    return rows.environment(device, (*rows.PACKAGES, *PACKAGES))


def do_step(
    problem: Problem,
    rotation: givens.Rotation,
    optimizers: list[torch.optim.Optimizer],
    batch: tuple[torch.Tensor, ...],
) -> None:
    """Do one training step: loss, backward pass and the optimizers' steps."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    problem.loss(rotation.weight, *batch).backward()
    for optimizer in optimizers:
        optimizer.step()


def find_missing(methods: list[str]) -> dict[str, str]:
    """The methods whose packages are missing, with the error message."""
    missing = {}
    for method in methods:
        try:
            make_optimizer(givens.Rotation(40), method, rate(METHODS[method]))
        except ImportError as error:
            missing[method] = str(error)
    return missing


def learn_all(
    searches: list[Search],
    done: rows.Rows,
    submit: Callable[[Run], Future[dict[str, Any]]],
) -> Iterator[dict[str, Any]]:
    """The rows that are missing in `done`, as they are finished."""
    by_problem = {search.fixed: search for search in searches}
    for row in done:
        run = Run(*(row[name] for name in Run._fields))
        search = by_problem.get(run[:3])
        if search and run.steps == search.steps:
            search.tell(run, row["figure"])
    under_way = {submit(run): search for search in searches for run in search.next_runs()}
    while under_way:
        ended, _ = wait(under_way, return_when=FIRST_COMPLETED)
        for future in ended:
            search, row = under_way.pop(future), future.result()
            search.tell(Run(*(row[name] for name in Run._fields)), row["figure"])
            under_way |= {submit(run): search for run in search.next_runs()}
            yield row


def time_steps(
    problem_name: str, n: int, rates: Mapping[str, float], device: str
) -> Iterator[dict[str, Any]]:
    """Median times of a training step, the methods taking turns."""
    steps = {}
    for method, lr in rates.items():
        # The package synchronises with the host; its arithmetic alone can be captured.
        timed = "pogo-products" if device == "cuda" and method == "pogo" else method
        step = make_timed_step(problem_name, n, timed, lr, device)
        step()
        captures = device == "cuda" and CAPTURED.fullmatch(timed)
        steps[method] = (*(timing.capture(step) if captures else (step, 1)), timed)
    times: dict[str, list[float]] = {method: [] for method in steps}
    measure = timing.time_by_events if device == "cuda" else timing.time_by_clock
    for _ in range(fig4.ROUNDS[device]):
        for method, (step, count, _) in steps.items():
            times[method] += measure(step, count)
    for method, (_, count, timed) in steps.items():
        tenths = statistics.quantiles(times[method], n=10)
        yield {
            **{"problem": problem_name, "n": n, "method": method, "timed": timed},
            "lr": rates[method],
            "median_us": round(statistics.median(times[method]) * 1e6, 2),
            "p10_us": round(tenths[0] * 1e6, 2),
            "p90_us": round(tenths[8] * 1e6, 2),
            "samples": len(times[method]),
            "timed_by": "graph" if count > 1 else "events" if device == "cuda" else "host clock",
            **describe(device),
        }


def make_timed_step(name: str, n: int, method: str, lr: float, device: str) -> Callable[[], None]:
    """A training step with batches from a small pool, chosen by a counter on the device."""
    problem = make_problem(name, n, 0, device)
    rotation = givens.Rotation(n, problem.start.mT)
    optimizers = [make_optimizer(rotation, method, lr)]
    if problem.parameters:
        options = {"capturable": device == "cuda"}
        optimizers.append(torch.optim.Adam(problem.parameters, ADAM_RATE, **options))
    batches = [problem.draw_batch() for _ in range(POOL)]
    pool = [torch.stack(parts) for parts in zip(*batches, strict=True)]
    counter = torch.zeros(1, dtype=torch.int64, device=device)

    def step() -> None:
        batch = tuple(parts.index_select(0, counter)[0] for parts in pool)
        do_step(problem, rotation, optimizers, batch)
        counter.add_(1).remainder_(POOL)

    return step


def select_rates(found: rows.Rows) -> dict[tuple[str, int], dict[str, float]]:
    """The rates of the shown runs, by problem and method."""
    rates: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for row in found:
        if row["shown"]:
            rates[row["problem"], row["n"]][row["method"]] = row["lr"]
    return rates


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="processes, of one thread each")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of the steps that --time times"
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of shown seeds")
    parser.add_argument("--json", type=Path, help="rows of the runs")
    parser.add_argument(
        "--resume", action="store_true", help="keep the rows and run what is missing"
    )
    parser.add_argument("--smoke", action="store_true", help="small runs of everything")
    parser.add_argument("--time", action="store_true", help="time the steps of the methods in rows")
    parser.add_argument("--time-json", type=Path, help="rows of the times")
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown")
    parser.add_argument("--plot", type=Path, help="draw the rows")
    given = parser.parse_args(arguments)
    for name, known in (("problems", PROBLEMS), ("methods", METHODS)):
        chosen = getattr(given, name).split(",")
        if unknown := [one for one in chosen if one not in known]:
            parser.error(f"--{name} must be of {', '.join(known)}, but got {', '.join(unknown)}")
        setattr(given, name, chosen)
    if (given.time or given.table or given.plot or given.resume) and not given.json:
        parser.error("--json is needed: --time, --table, --plot and --resume read its rows")
    if given.plot and not given.time_json:
        parser.error("--time-json is needed: --plot draws the loss against time")
    return given


def run_all(given: argparse.Namespace) -> None:
    """Do all runs, and write the rows as they are finished."""
    missing = find_missing(given.methods)
    for method, why in missing.items():
        print(f"{method}: left out, {why}")
    searches = [
        Search(
            problem,
            SMALL["dim"] if given.smoke else n,
            method,
            SMALL["steps"] if given.smoke else steps,
            1 if given.smoke else given.seeds,
            given.smoke,
        )
        for problem in given.problems
        for n, steps in list(PROBLEMS[problem][1].items())[: 1 if given.smoke else None]
        for method in given.methods
        if method not in missing
    ]
    written = 0.0
    done = rows.read(given.json) if given.resume and given.json.exists() else []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        given.processes, context, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        # Slow methods first, so that they do not run alone at the end.
        searches.sort(key=lambda search: search.fixed[2] not in ("expm", "geotorch", "cayley"))
        for row in learn_all(searches, done, lambda run: pool.submit(train, run, given.device)):
            figure = row["failure"] or f"{row['figure']:.5g}"
            kind = "shown" if row["shown"] else "search"
            print("{problem} {n} {method} lr {lr:g} seed {seed}".format(**row), kind, figure)
            done.append(row)
            if given.json and time.monotonic() > written + WRITE_EVERY:
                rows.write(given.json, done)
                written = time.monotonic()
    if given.json:
        rows.write(given.json, done)


def main() -> None:
    """Run, time, print or draw."""
    given = parse()
    if not (given.time or given.table or given.plot):
        run_all(given)
        return
    found = rows.read(given.json)
    if given.time:
        torch.set_num_threads(given.threads)
        times = []
        for (problem, n), rates in select_rates(found).items():
            if problem in given.problems:
                wanted = {method: lr for method, lr in rates.items() if method in given.methods}
                for row in time_steps(problem, n, wanted, given.device):
                    print("{problem} {n} {method:12} {median_us:10.1f} µs".format(**row))
                    times.append(row)
                if given.time_json:
                    rows.write(given.time_json, times)
    times = rows.read(given.time_json) if given.time_json else []
    if given.table:
        print(curves.format_table(found, times))
    if given.plot:
        curves.plot(found, times, given.plot)


if __name__ == "__main__":
    main()
