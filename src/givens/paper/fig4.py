"""Figure 4: the time of one step, from ∂L/∂R to the next R, against n.

Each method is first checked against itself in float64; a method that fails is not timed. Then the
methods take turns, round after round, and a row has the median of all rounds. A GCD row times
`GCD.step()` as a user calls it, including its pairing; a Cayley row times the forward pass to R,
the backward pass from its gradient and Adam's step. On a GPU, steps without host synchronisation
are timed by replays of a CUDA graph of many steps, the others by events around each step.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from givens import kernels
from givens.baselines import optimizer_for
from givens.paper.rows import Rows, environment, machine, save_picture
from givens.paper.timing import capture, time_by_clock, time_by_events
from givens.rotation import Rotation, orthogonality_error, random_rotation

METHODS = ("gcd-random", "gcd-greedy", "gcd-steepest", "cayley", "svd")
DIMS = {"cpu": (64, 128, 256, 512, 1024), "cuda": (128, 256, 512, 1024, 2048, 4096)}
NAMES = {
    "gcd-random": "GCD-R",
    "gcd-greedy": "GCD-G",
    "gcd-steepest": "GCD-S (approximate)",
    "gcd-steepest-exact": "GCD-S (exact)",
    "cayley": "Cayley",
    "expm": "matrix exponential",
    "svd": "SVD",
}
ROUNDS = {"cpu": 9, "cuda": 3}
LR = 1e-3
# Methods that a CUDA graph can capture; the others synchronise with the host.
CAPTURED = ("gcd-random", "gcd-greedy", "gcd-steepest", "cayley")
# The error of torch's SVD in float32 on a GPU; the others are far below it.
LEAST_ORTHOGONAL = 1e-2
LOOSE = ("svd",)

Contender = tuple[Callable[[], Tensor], Callable[[], Any]]
"""Reads the current W; does a step."""
Make = Callable[[str, int, torch.dtype, str], Contender]


def run(
    device: str,
    dims: Iterable[int],
    methods: Iterable[str] = METHODS,
    *,
    tell: Callable[[str], None] = lambda line: None,
) -> Rows:
    """Rows of all methods at all n."""
    about = environment(device)
    return [{**row, **about} for n in dims for row in measure(methods, n, device, tell=tell)]


@functools.cache
def problem(n: int) -> tuple[Tensor, Tensor]:
    """A random rotation and a random gradient."""
    generator = torch.Generator().manual_seed(1)
    return random_rotation(n), torch.randn(n, n, generator=generator, dtype=torch.float64)


def contender(method: str, n: int, dtype: torch.dtype, device: str) -> Contender:
    """A method, at a random rotation with a random gradient."""
    start, G = (part.to(device, dtype) for part in problem(n))
    rotation = Rotation(n, start)
    name = method.removesuffix("-exact")
    options = {}
    if name == "gcd-steepest":
        options = {"exact": method != name}
    elif name == "cayley":
        options = {"capturable": device == "cuda"}
    optimizer = optimizer_for(rotation, name, LR, **options)  # type: ignore[arg-type]
    if method.startswith("gcd") or method == "svd":
        # A graph holds many steps; a new gradient for each keeps the rotation from converging.
        others = torch.randn(6, n, n, device=device, dtype=dtype) if device == "cuda" else ()
        several = itertools.cycle([G, *others])

        def turn() -> None:
            rotation.weight.grad = next(several)
            optimizer.step()

        rotation.weight.grad = G
        return lambda: rotation.weight.detach(), optimizer.step if device == "cpu" else turn

    def step() -> None:
        optimizer.zero_grad()
        rotation.weight.backward(G)  # type: ignore[no-untyped-call]
        optimizer.step()

    return lambda: rotation.weight.detach(), step


def measure(
    methods: Iterable[str],
    n: int,
    device: str,
    *,
    make: Make = contender,
    graphs: Container[str] = CAPTURED,
    loose: Container[str] = LOOSE,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[dict[str, Any]]:
    """Rows of median times at one n, the methods taking turns.

    A CUDA graph can capture the methods in `graphs`; those in `loose` may leave SO(n) slightly.
    """
    steps, errors = {}, {}
    for method in methods:
        if method.endswith("-exact") and n > 512:
            continue
        try:
            errors[method], problem = check(method, n, device, make, loose)
        except ImportError as error:
            problem = str(error)
        if problem:
            tell(f"n = {n:4} {method}: not timed, {problem}")
            continue
        _, step = make(method, n, torch.float32, device)
        step()
        steps[method] = capture(step) if device == "cuda" and method in graphs else (step, 1)
    times: dict[str, list[float]] = {method: [] for method in steps}
    timed = time_by_events if device == "cuda" else time_by_clock
    for _ in range(ROUNDS[device]):
        for method, (step, count) in steps.items():
            times[method] += timed(step, count)
    cayley = statistics.median(times["cayley"]) if "cayley" in times else None
    for method, seconds in times.items():
        median = statistics.median(seconds)
        tenths = statistics.quantiles(seconds, n=10) if len(seconds) > 1 else seconds * 9
        tell(f"n = {n:4} {method:18} {median * 1e6:12.1f} µs")
        how = "graph" if steps[method][1] > 1 else "events" if device == "cuda" else "host clock"
        yield {
            "method": method,
            "n": n,
            "median_us": round(median * 1e6, 2),
            "p10_us": round(tenths[0] * 1e6, 2),
            "p90_us": round(tenths[8] * 1e6, 2),
            "samples": len(seconds),
            "timed_by": how,
            "orthogonality_error": errors[method],
            "times_faster_than_cayley": round(cayley / median, 2) if cayley else None,
        }


def check(
    method: str, n: int, device: str, make: Make, loose: Container[str] = LOOSE
) -> tuple[float, str | None]:
    """max|RᵀR − I| after three steps, and why the method must not be timed, or None."""
    results = []
    forced: tuple[kernels.Backend | None, ...] = (None, "reference")
    for dtype, backend in zip((torch.float32, torch.float64), forced, strict=True):
        torch.manual_seed(0)
        with kernels.backend(backend):
            weight, step = make(method, n, dtype, device)
            before = weight().double()
            for _ in range(3):
                step()
        results.append(weight().double())
    single, double = results
    error = orthogonality_error(single)
    away = float((single - double).abs().max())
    if error > (LEAST_ORTHOGONAL if method in loose else 1e-4):
        return error, f"it is not orthogonal: {error:.1e}"
    if float((single - before).abs().max()) == 0:
        return error, "it does not move"
    # Greedy choices may differ where float32 cannot tell two planes apart.
    if away > (LEAST_ORTHOGONAL if method in loose else 5 * LR):
        return error, f"it is {away:.1e} away from float64"
    return error, None


def plot(pyplot: Any, rows: Rows, path: Path) -> None:
    """Draw time against n, both on logarithmic axes."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4.4))
    for method in NAMES:
        if times := _times(rows, method):
            style = "o-" if method.startswith("gcd") else "s--"
            axes.plot(times.keys(), times.values(), style, ms=4, label=NAMES[method])
    dims = sorted({row["n"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="n", ylabel="µs for one step")
    axes.set_xticks(dims, dims, minor=False)
    axes.set_xticks([], minor=True)
    axes.set_title("One step, ∂L/∂R to the next R", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    caption = f"Medians, float32; {machine(rows[0])}, torch {rows[0]['torch']}"
    save_picture(pyplot, figure, caption, path)


def claims(rows: Rows) -> list[str]:
    """The paper's claims, each with what the rows say about it."""
    told = []
    if rows[0]["device"] == "cuda":
        found = {method: _growth(_times(rows, method)) for method in ("gcd-random", "cayley")}
        told.append(
            f"GCD-R grows as n² and Cayley as n³ on a GPU (the paper): here as "
            f"n^{found['gcd-random']:.1f} and n^{found['cayley']:.1f} between the two largest n"
        )
    for method, claimed in (("gcd-greedy", 5), ("gcd-random", 50)):
        ratios = {
            row["n"]: row["times_faster_than_cayley"]
            for row in rows
            if row["method"] == method and row["times_faster_than_cayley"]
        }
        if ratios:
            spread = ", ".join(f"{ratio:.3g}× at n = {n}" for n, ratio in ratios.items())
            holds = "holds" if min(ratios.values()) >= claimed else "does not hold at every n"
            told.append(
                f"{NAMES[method]} about {claimed}× faster than Cayley on a CPU (the paper): "
                f"{holds} here; {spread}"
            )
    return told


def _times(rows: Rows, method: str) -> dict[int, float]:
    """The median times of a method in µs, by n."""
    return {row["n"]: row["median_us"] for row in rows if row["method"] == method}


def _growth(times: dict[int, float]) -> float:
    """The exponent of n with which the time grows between the two largest n."""
    if len(times) < 2:
        return float("nan")
    (m, first), (n, last) = sorted(times.items())[-2:]
    return math.log(last / first) / math.log(n / m)
