"""Time one step, from ∂L/∂R to the next R, for GCD and everything else that keeps R orthogonal.

    python benchmarks/step.py --device cpu --dims 64,128,256,512,1024 --json results/step-cpu.json
    python benchmarks/step.py --device cuda --dims 128,256,512,1024,2048,4096 --json FILE

Each method is first checked against its reference in float64; one that fails is not timed. Then the
methods take turns, round after round, and a row has the median of all rounds. A GCD row is
`GCD.step()` as a user calls it, pairing included; a parametrized row is the backward pass from the
gradient of R, the optimizer's step and the forward pass to the next R. On a GPU a step that can be
captured is timed by replays of a CUDA graph of many, the others by events around each.
"""

import argparse
import importlib.metadata
import itertools
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import givens
from givens.baselines import optimizer_for

METHODS = [
    "gcd-random",
    "gcd-greedy",
    "gcd-steepest",
    "gcd-steepest-exact",
    "cayley",
    "expm",
    "svd",
    "torch-cayley",
    "geotorch",
    "geoopt",
]
ROUNDS = 9
SECONDS_A_ROUND = 0.15
LR = 1e-3
# What a CUDA graph can hold: the others wait for the host.
CAPTURED = ("gcd-random", "gcd-greedy")


def make(
    method: str, n: int, dtype: torch.dtype, device: str
) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """(read the current W, do a step) of a method at a random rotation with a random gradient."""
    start = givens.random_rotation(n).to(device, dtype)
    G = torch.randn(n, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    G = G.to(device, dtype)
    if method.startswith("gcd"):
        rotation = givens.Rotation(n, start)
        exact = method.endswith("-exact")
        optimizer = optimizer_for(
            rotation,
            method.removesuffix("-exact"),
            LR,
            **({"exact": exact} if "steepest" in method else {}),
        )
        rotation.weight.grad = G
        if device == "cpu":
            return lambda: rotation.weight.detach(), optimizer.step
        # A graph holds many steps; a new gradient for each keeps the rotation from converging.
        several = itertools.cycle([G, *torch.randn(6, n, n, device=device, dtype=dtype)])

        def turn() -> None:
            rotation.weight.grad = next(several)
            optimizer.step()

        return lambda: rotation.weight.detach(), turn
    if method == "geoopt":
        import geoopt

        weight = geoopt.ManifoldParameter(start.clone(), manifold=geoopt.Stiefel())
        optimizer = geoopt.optim.RiemannianAdam([weight], LR)
        weight.grad = G
        return lambda: weight.detach(), optimizer.step
    if method == "svd":
        rotation = givens.Rotation(n, start)
        optimizer = optimizer_for(rotation, method, LR)
        rotation.weight.grad = G
        return lambda: rotation.weight.detach(), optimizer.step
    if method in ("cayley", "expm"):
        module: nn.Module = givens.Rotation(n, start)
        optimizer = optimizer_for(module, method, LR)
    else:
        module = nn.Linear(n, n, bias=False, dtype=dtype, device=device)
        module.weight = nn.Parameter(start.clone())
        if method == "torch-cayley":
            nn.utils.parametrizations.orthogonal(module, orthogonal_map="cayley")
        else:
            import geotorch

            geotorch.orthogonal(module, "weight")
            module.weight = start
        optimizer = torch.optim.Adam(module.parameters(), LR)
    current = [module.weight]

    def step() -> None:
        optimizer.zero_grad()
        current[0].backward(G)
        optimizer.step()
        current[0] = module.weight

    return lambda: current[0].detach(), step


def check(method: str, n: int, device: str) -> str | None:
    """What is wrong with a method, or None: it must follow its float64 self and stay orthogonal."""
    before = None
    results = []
    for dtype, backend in ((torch.float32, None), (torch.float64, "reference")):
        torch.manual_seed(0)
        with givens.kernels.use(backend):
            weight, step = make(method, n, dtype, device)
            before = weight().clone()
            for _ in range(3):
                step()
        results.append(weight().double())
    single, double = results
    if givens.orthogonality_error(single) > 1e-4:
        return f"not orthogonal: {givens.orthogonality_error(single):.1e}"
    if float((single - before).abs().max()) == 0:
        return "did not move"
    error = float((single - double).abs().max())
    # Greedy choices may differ where float32 cannot tell two planes apart.
    return f"{error:.1e} away from float64" if error > 5 * LR else None


def captured(step: Callable[[], None], count: int) -> torch.cuda.CUDAGraph | None:
    """A graph of `count` steps, or None where a step waits for the host."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(count):
            step()
    return graph


def time_on_gpu(method: str, step: Callable[[], None]) -> tuple[list[float], str]:
    """Seconds of single steps, and how they were taken."""
    count = 20 if method in CAPTURED else 1
    graph = captured(step, count) if method in CAPTURED else None
    run = graph.replay if graph else step
    times, began = [], time.perf_counter()
    while len(times) < 9 or time.perf_counter() - began < SECONDS_A_ROUND:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / count)
        if time.perf_counter() - began > 10 * SECONDS_A_ROUND:
            break
    return times, "graph" if graph else "events"


def time_methods(methods: list[str], n: int, device: str) -> list[dict[str, object]]:
    """Rows of median times, the methods taking turns."""
    rows, steps = [], {}
    for method in methods:
        if method.endswith("-exact") and n > 512:
            continue
        try:
            problem = check(method, n, device)
        except ImportError as error:
            problem = str(error)
        if problem:
            print(f"n={n:5d} {method:20s} not timed: {problem}")
            continue
        _, step = make(method, n, torch.float32, device)
        step()
        steps[method] = step
    times: dict[str, list[float]] = {method: [] for method in steps}
    how = dict.fromkeys(steps, "host clock")
    for _ in range(ROUNDS if device == "cpu" else 3):
        for method, step in steps.items():
            if device == "cuda":
                measured, how[method] = time_on_gpu(method, step)
                times[method] += measured
                continue
            began = time.perf_counter()
            # The first step of a turn finds the caches as the others left them; it counts only
            # where there is time for no other.
            step()
            if time.perf_counter() - began > SECONDS_A_ROUND:
                times[method].append(time.perf_counter() - began)
            while time.perf_counter() - began < SECONDS_A_ROUND:
                start = time.perf_counter()
                step()
                times[method].append(time.perf_counter() - start)
    for method, measured in times.items():
        tenths = statistics.quantiles(measured, n=10) if len(measured) > 1 else measured * 9
        row = {
            "method": method,
            "n": n,
            "median_us": round(statistics.median(measured) * 1e6, 2),
            "p10_us": round(tenths[0] * 1e6, 2),
            "p90_us": round(tenths[8] * 1e6, 2),
            "samples": len(measured),
            "timed_by": how[method],
        }
        rows.append(row)
    return rows


def environment(device: str) -> dict[str, object]:
    """What a measured row must carry to mean anything later."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    packages = ["torch", "numba", "triton", "rustworkx", "geotorch", "geoopt"]
    return {
        "device": device,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "givens": givens.__version__,
        "commit": commit,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        **{name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dims", default="64,128,256,512,1024")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    about = environment(arguments.device)
    print(about)
    rows = []
    for n in map(int, arguments.dims.split(",")):
        timed = time_methods(arguments.methods.split(","), n, arguments.device)
        cayley = next((row["median_us"] for row in timed if row["method"] == "cayley"), None)
        for row in timed:
            if cayley:
                row["times_faster_than_cayley"] = round(cayley / row["median_us"], 2)
            print(
                f"n={n:5d} {row['method']:20s} {row['median_us']:12.1f} µs "
                f"(p10 {row['p10_us']:.1f}, p90 {row['p90_us']:.1f}) "
                f"{row.get('times_faster_than_cayley', '')}×",
                flush=True,
            )
        rows += [{**row, **about} for row in timed]
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
