"""`givens demo`: a hidden rotation found from noisy examples, by GCD and by everything else."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.utils import parametrize

from givens.baselines import Method, optimizer_for
from givens.cli import output as out
from givens.rotation import Rotation, orthogonality_error, project, random_rotation

METHODS: tuple[Method, ...] = (
    "gcd-random",
    "gcd-greedy",
    "gcd-steepest",
    "cayley",
    "expm",
    "svd",
    "penalty",
    "frozen",
)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
EXAMPLES, BATCH, NOISE = 8192, 256, 0.5


def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the results.")] = Path(
        "demo"
    ),
    dim: Annotated[int, typer.Option(help="Dimension n of the rotation.")] = 64,
    steps: Annotated[int, typer.Option(help="Steps of each method.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of data and methods.")] = 0,
) -> None:
    """Learn a rotation on data made in memory, and show how each method converges.

    Every method runs with each of five rates and shows its best. Takes about a minute.

    Example: givens demo --dim 128 -o demo
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    if dim < 2 or steps < 1:
        raise ValueError(f"--dim must be at least 2 and --steps 1, but got {dim} and {steps}")
    # Before the work, not after it: a missing package, or a folder that cannot be written.
    pyplot = out.pyplot()
    output.mkdir(parents=True, exist_ok=True)
    x, y, best = _examples(dim, seed)
    rows = []
    columns = (TextColumn("{task.description:14}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(METHODS) * len(RATES))
        for method in METHODS:
            progress.update(task, description=method)
            runs = []
            for rate in RATES:
                runs.append(_learn(method, rate, x, y, best, steps, seed))
                progress.advance(task)
            rows.append(min(runs, key=lambda run: run["excess"][-1]))

    table = Table(title=f"n = {dim}, {steps} steps of {BATCH} examples, the best of 5 rates")
    for name in ("method", "rate", "excess loss", "µs a step", "max|RᵀR − I|"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        table.add_row(
            row["method"],
            f"{row['lr']:g}",
            f"{100 * row['excess'][-1]:.3f} %",
            f"{row['step_us']:.0f}",
            f"{row['orthogonality_error']:.0e}",
        )
    console = Console()
    console.print(table)
    (output / "convergence.json").write_text(json.dumps(rows, indent=1) + "\n")
    _plot(pyplot, rows, output / "convergence.png")
    console.print(
        "Excess loss: what is left between the start (100 %) and the optimum by SVD on all data "
        f"(0 %).\nWritten: {output}/convergence.png, {output}/convergence.json"
    )


def _examples(dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, y = x R* + noise, and the rotation that fits all of them best."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(EXAMPLES, dim, generator=generator) * torch.linspace(2, 0.5, dim)
    y = x @ random_rotation(dim, seed + 1)
    y += NOISE * torch.randn(y.shape, generator=generator)
    return x, y, project(x.T @ y)


def _learn(
    method: Method, lr: float, x: Tensor, y: Tensor, best: Tensor, steps: int, seed: int
) -> dict[str, Any]:
    rotation = Rotation(x.shape[1])
    options = {"exact": False} if method == "gcd-steepest" else {}
    optimizer = optimizer_for(rotation, method, lr, **options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)

    def excess() -> float:
        with torch.no_grad():
            losses = [
                (x @ R - y).square().mean() for R in (rotation.matrix, best, torch.eye(len(best)))
            ]
        now, least, start = losses
        return float((now - least) / (start - least))

    curve, seconds, spent = [excess()], [0.0], 0.0
    for step in range(1, steps + 1):
        rows = torch.randint(len(x), (BATCH,), generator=generator)
        optimizer.zero_grad()
        began = time.perf_counter()
        R = rotation.matrix
        spent += time.perf_counter() - began
        gradient = 2 * x[rows].T @ (x[rows] @ R.detach() - y[rows]) / BATCH
        began = time.perf_counter()
        if parametrize.is_parametrized(rotation):
            torch.autograd.backward(R, gradient)
        else:
            rotation.weight.grad = gradient.T.contiguous()
        optimizer.step()
        spent += time.perf_counter() - began
        schedule.step()
        if step % max(steps // 40, 1) == 0 or step == steps:
            curve.append(excess())
            seconds.append(spent)
    return {
        "method": method,
        "lr": lr,
        "n": x.shape[1],
        "steps": steps,
        "seed": seed,
        "excess": curve,
        "seconds": seconds,
        "step_us": spent / steps * 1e6,
        "orthogonality_error": orthogonality_error(rotation.matrix),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _plot(pyplot: Any, rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for row in rows:
        style = "-" if row["method"].startswith("gcd") else "--"
        at = [row["steps"] * k / (len(row["excess"]) - 1) for k in range(len(row["excess"]))]
        percent = [100 * value for value in row["excess"]]
        axes[0].plot(at, percent, style, label=row["method"])
        axes[1].plot([1e3 * s for s in row["seconds"][1:]], percent[1:], style)
    axes[0].set(yscale="log", xlabel="step", ylabel="excess loss (%)")
    axes[1].set(xscale="log", xlabel="time in learning R (ms)")
    axes[0].set_title(f"n = {rows[0]['n']}: convergence by step")
    axes[1].set_title("and by time")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
