"""The cost of the index in a training step: towers alone, with a frozen rotation, and with GCD.

    python benchmarks/layer.py --device cpu --runs 5 --threads 1 --processor-time --json FILE
    python benchmarks/layer.py --device cuda --runs 5 --json results/layer-cuda.json

A step is forward, backward and all optimizers, at n = 512, a batch of 1,024 and codes of 64 × 256.
Items are rows of a table of 10,000, users are the mean of 50 items of their history. Both go
through a hidden layer of 1,024 units, are scored by cosine and trained by softmax over the batch.
Steps run in eager mode, and on a GPU also as replays of a CUDA graph. The contenders take turns;
rows have medians. Every run is a process of its own, since times vary more between processes than
within one. Processor time is for a machine that has other work.
"""

import argparse
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from opponents import make_optimizer
from torch import Tensor, nn
from torch.nn import functional

import givens
from givens.paper import timing
from givens.paper.rows import environment, write

ITEMS, HISTORY, HIDDEN = 10_000, 50, 1024
TEMPERATURE, DISTORTION = 0.07, 0.1
CONTENDERS = ("no index", "frozen", "gcd", "gcd-greedy", "gcd-random", "cayley", "pogo")


class Towers(nn.Module):
    """Users, by their history, and items as vectors of one space."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, n)
        self.user, self.item = (
            nn.Sequential(nn.Linear(n, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, n)) for _ in range(2)
        )

    def forward(self, history: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """Users (m, n), normalised, and items (m, n), which go through the index first."""
        pooled = functional.embedding_bag(history, self.items.weight, mode="mean")
        return functional.normalize(self.user(pooled)), self.item(self.items(items))


def make_step(
    name: str, sizes: argparse.Namespace, device: str, *, capturable: bool
) -> Callable[[], Tensor]:
    """A whole training step, which returns its loss."""
    torch.manual_seed(0)
    n, m = sizes.dim, sizes.batch
    towers = Towers(n).to(device)
    history = torch.randint(ITEMS, (m, HISTORY), device=device)
    items = torch.randint(ITEMS, (m,), device=device)
    target = torch.arange(m, device=device)
    layer, turn = None, None
    trained = list(towers.parameters())
    if name != "no index":
        layer = givens.IndexLayer(n, sizes.subspaces, sizes.codewords, metric="cosine")
        layer = layer.to(device)
        with torch.no_grad():
            sample = torch.randint(ITEMS, (16 * sizes.codewords,), device=device)
            layer.warm_start(towers(sample[:, None], sample)[1], 3, method="pq")
        trained += layer.codebook_parameters()
        if name == "frozen":
            layer.rotation.requires_grad_(False)
        else:
            # The package of POGO synchronises with the host; its arithmetic can be captured.
            learner = "pogo-products" if capturable and name == "pogo" else name
            turn = make_optimizer(layer.rotation, learner, 1e-3)
    adam = torch.optim.Adam(trained, 1e-4, fused=True, capturable=capturable)

    def step() -> Tensor:
        users, embedded = towers(history, items)
        if layer is None:
            scores = users @ functional.normalize(embedded).mT
            loss = functional.cross_entropy(scores / TEMPERATURE, target)
        else:
            out = layer(embedded)
            loss = functional.cross_entropy(users @ out.embedding.mT / TEMPERATURE, target)
            loss = loss + DISTORTION * out.distortion
        adam.zero_grad()
        if turn is not None:
            turn.zero_grad()
        loss.backward()
        adam.step()
        if turn is not None:
            turn.step()
        return loss.detach()

    check(name, step, layer)
    return step


def check(name: str, step: Callable[[], Tensor], layer: givens.IndexLayer | None) -> None:
    """Raise if a step does not learn, or T(x) is not what the index decodes."""
    losses = [float(step()) for _ in range(6)]
    if not losses[-1] < losses[0]:
        raise SystemExit(f"{name} does not learn: losses {losses}")
    if layer is None:
        return
    error = givens.orthogonality_error(layer.rotation.matrix)
    if error > 1e-4:
        raise SystemExit(f"{name} is not orthogonal: {error:.1e}")
    q, x = layer.quantizer, torch.randn(256, layer.rotation.dim, device=layer.usage.device)
    same = torch.equal(layer.eval()(x).embedding, q.decode(q.encode(x)))
    layer.train()
    if not same:
        raise SystemExit(f"{name}: T(x) is not what the index decodes")


def measure(sizes: argparse.Namespace, device: str, mode: str) -> list[dict[str, Any]]:
    """Rows of one mode, "eager" or "graph"."""
    torch.set_num_threads(sizes.threads)
    graphs = mode == "graph"
    steps = {}
    for name in CONTENDERS:
        step = make_step(name, sizes, device, capturable=graphs)
        steps[name] = timing.capture(step, 5) if graphs else (step, 1)
    times: dict[str, list[float]] = {name: [] for name in steps}
    clock = time.process_time if sizes.processor_time else time.perf_counter
    by_clock = functools.partial(timing.time_by_clock, clock=clock)
    timed = timing.time_by_events if device == "cuda" else by_clock
    for _ in range(sizes.rounds):
        for name, (step, count) in steps.items():
            times[name] += timed(step, count)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    rows = []
    for name, seconds in times.items():
        tenths = statistics.quantiles(seconds, n=10) if len(seconds) > 1 else seconds * 9
        rows.append(
            {
                "contender": name,
                "mode": mode,
                "n": sizes.dim,
                "batch": sizes.batch,
                "subspaces": sizes.subspaces,
                "codewords": sizes.codewords,
                "median_us": round(medians[name] * 1e6, 1),
                "p10_us": round(tenths[0] * 1e6, 1),
                "p90_us": round(tenths[8] * 1e6, 1),
                "samples": len(seconds),
                "timed_by": "processor time" if sizes.processor_time else "wall time",
                "times_no_index": round(medians[name] / medians["no index"], 3),
                "times_frozen": round(medians[name] / medians["frozen"], 3),
            }
        )
        print("{mode:6} {contender:11} {median_us:10.1f} µs".format(**rows[-1]), end="")
        print("  {times_no_index:5.2f}× no index  {times_frozen:5.2f}× frozen".format(**rows[-1]))
    return rows


def main() -> None:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--subspaces", type=int, default=64)
    parser.add_argument("--codewords", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true", help="instead of wall time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    about = environment(arguments.device)
    print(about)
    rows = []
    for run in range(1, arguments.runs + 1):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as process:
            for mode in ("eager", "graph") if arguments.device == "cuda" else ("eager",):
                found = process.submit(measure, arguments, arguments.device, mode).result()
                rows += [{"run": run, **row, **about} for row in found]
                if arguments.json:
                    write(arguments.json, rows)


if __name__ == "__main__":
    main()
