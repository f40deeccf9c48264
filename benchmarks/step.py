"""Time one step, from ∂L/∂R to the next R, for GCD and everything else that keeps R orthogonal.

    python benchmarks/step.py --device cpu --dims 64,128,256,512,1024 --json results/step-cpu.json

Each method is first checked against its reference in float64; one that fails is not timed. Then the
methods take turns, round after round, and a row has the median of all rounds. A GCD row is
`GCD.step()` as a user calls it, pairing included; a parametrized row is the backward pass from the
gradient of R, the optimizer's step and the forward pass to the next R.
"""

import argparse
import importlib.metadata
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


def make(
    method: str, n: int, dtype: torch.dtype
) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """(read the current W, do a step) of a method at a random rotation with a random gradient."""
    start = givens.random_rotation(n).to(dtype)
    G = torch.randn(n, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
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
        return lambda: rotation.weight.detach(), optimizer.step
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
        module = nn.Linear(n, n, bias=False, dtype=dtype)
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


def check(method: str, n: int) -> str | None:
    """What is wrong with a method, or None: it must follow its float64 self and stay orthogonal."""
    before = None
    results = []
    for dtype, backend in ((torch.float32, None), (torch.float64, "reference")):
        torch.manual_seed(0)
        with givens.kernels.use(backend):
            weight, step = make(method, n, dtype)
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


def time_methods(methods: list[str], n: int) -> list[dict[str, object]]:
    """Rows of median times, the methods taking turns."""
    rows, steps = [], {}
    for method in methods:
        if method.endswith("-exact") and n > 512:
            continue
        problem = check(method, n)
        if problem:
            print(f"n={n:5d} {method:20s} not timed: {problem}")
            continue
        _, step = make(method, n, torch.float32)
        step()
        steps[method] = step
    times: dict[str, list[float]] = {method: [] for method in steps}
    for _ in range(ROUNDS):
        for method, step in steps.items():
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
            "steps": len(measured),
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
    packages = ["torch", "numba", "rustworkx", "geotorch", "geoopt"]
    return {
        "device": device,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "givens": givens.__version__,
        "commit": commit,
        **{name: importlib.metadata.version(name) for name in packages},
    }


def main() -> None:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu"], default="cpu")
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
        timed = time_methods(arguments.methods.split(","), n)
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
