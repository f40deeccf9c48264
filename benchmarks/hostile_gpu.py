"""Random steps of GCD, meant to break it: is W always a rotation, and the state finite?

    python benchmarks/hostile_gpu.py --device cuda --json results/hostile-cuda.json
    python benchmarks/hostile_gpu.py --device cpu --steps 500                    half a minute
    python benchmarks/hostile_gpu.py --device cuda --seed 0 --only 17            one case again

A case runs one to three optimizers at the same time, each on its own stream and sometimes on
another: n from 1 to 8192, stacks, all pairings and numbers of turns, gradients from 1e-38 to 1e38,
with NaN, infinity and zeros, rates of 0, NaN, infinity and 3e38, the `found_inf` of a GradScaler,
and on a GPU replays of a CUDA graph between plain calls. After a case

- max|RᵀR − I|, in float64, is at most 2e-6 (1e-12 for a float64 matrix),
- W and the optimizer's state are finite,
- no step that must be refused has changed a bit of W or, on a CPU, of the state,
- the same steps as plain calls on one stream give the same bits.

A case is determined by the seed and its number. A failure is printed with the command that repeats
it, and the exit code is 1, also if a case hangs.
"""

import argparse
import contextlib
import copy
import importlib.util
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import givens
from givens.paper.rows import environment
from givens.storage import files

# The promised orthogonality, by type.
BARS = {torch.float32: 2e-6, torch.float64: 1e-12}
# Few sizes, since kernels are compiled for each; on both sides of where algorithms change.
SIZES = (1, 2, 3, 5, 8, 17, 33, 64, 65, 100, 129, 256, 511, 512, 768)
LARGE = (1000, 1025, 2048, 3001, 4096, 5555, 8191, 8192)
# Limits of n for all planes by products, and for exact matchings on the host.
PRODUCTS, EXACT = 1025, 129
PAIRINGS = ("random", "greedy", "greedy", "steepest", "overlapping-random", "overlapping-greedy")
RATES = (0.0, 1e-4, 1e-2, 0.1, 1.0, 3.0, 1e3)
# Rates that a scheduler may leave on a device, where all of them must be refused.
WRONG_RATES = (float("nan"), float("inf"), -float("inf"), 3e38)
HUNG = 180.0


@dataclass
class Step:
    """One step of an optimizer, drawn before anything is run."""

    seed: int
    """The seed of the gradients."""
    sizes: list[float]
    """The size of the gradient of each matrix; 0 for zeros."""
    planted: list[float | None]
    """NaN or infinity in the gradient of each matrix; None for neither."""
    rate: float | None
    """A new value for a rate that is a tensor."""
    overflow: float | None
    """The `found_inf` of a GradScaler, or None."""
    replay: bool
    elsewhere: bool
    """Whether the step is on another stream than the one before."""


@dataclass
class Lane:
    """An optimizer, its matrices and its steps."""

    n: int
    stack: int
    matrices: int
    dtype: torch.dtype
    backend: str | None
    transposed: bool
    lr: float
    rate_is_tensor: bool
    options: dict[str, Any]
    steps: list[Step] = field(default_factory=list)

    def __str__(self) -> str:
        words = {"n": self.n, "stack": self.stack, "matrices": self.matrices, "lr": self.lr}
        words |= {"dtype": str(self.dtype).removeprefix("torch."), "backend": self.backend}
        words |= {"rate is tensor": self.rate_is_tensor, "transposed": self.transposed}
        return ", ".join(f"{name}={value}" for name, value in (words | self.options).items())


def draw_case(seed: int, number: int, device: str, most: int) -> list[Lane]:
    """Draw the optimizers of a case, with all their steps."""
    draw = random.Random(f"{seed}/{number}")
    return [_draw_lane(draw, device, most) for _ in range(draw.choice([1, 1, 2, 3]))]


def _draw_lane(draw: random.Random, device: str, most: int) -> Lane:
    gpu = device == "cuda"
    sizes = [n for n in (LARGE if draw.random() < 0.2 else SIZES) if n <= most]
    n = draw.choice(sizes or [n for n in SIZES if n <= most])
    double = n <= EXACT and draw.random() < 0.1
    backend = "reference" if n <= EXACT and draw.random() < 0.1 else None
    name = draw.choice(PAIRINGS)
    adapt = draw.choice(["adam", "adam", "adam", "matrix", "adagrad", None])
    several = name == "random" or (name == "greedy" and adapt in ("adam", None))
    turns = draw.choice([None, 1, 2, 3, 16, 64, "all"]) if several else None
    if turns == "all" and n > PRODUCTS:
        turns = 16
    betas = draw.choice([None, (0.9, 0.99), (0.0, 0.5)]) if adapt in ("adam", "matrix") else None
    options = {"pairing": name, "adapt": adapt, "turns": turns, "betas": betas}
    exact = n <= EXACT and draw.random() < 0.5
    # Exact matchings need rustworkx.
    exact &= importlib.util.find_spec("rustworkx") is not None
    options |= {"exact": exact, "seed": draw.getrandbits(62)}
    options |= {"maximize": draw.random() < 0.2}
    lane = Lane(
        n=n,
        stack=draw.choice([0, 0, 1, 3]) if n <= 256 else 0,
        matrices=draw.choice([1, 1, 2]) if n <= 2048 else 1,
        dtype=torch.float64 if double else torch.float32,
        backend=backend,
        transposed=draw.random() < 0.1,
        lr=draw.choice(RATES),
        rate_is_tensor=draw.random() < 0.5,
        options=options,
    )
    # A graph needs kernels without host synchronisation.
    hosted = double or backend is not None or (options["exact"] and name == "steepest")
    graph = gpu and not hosted and draw.random() < 0.5
    for at in range(draw.choice([8, 20, 40] if n <= 512 else [8, 20])):
        lane.steps.append(_draw_step(draw, lane, graph, at))
    return lane


def _draw_step(draw: random.Random, lane: Lane, graph: bool, at: int) -> Step:
    def draw_size() -> float:
        return 10.0 ** draw.uniform(-38, 38) if draw.random() < 0.9 else 0.0

    def draw_wrong() -> float | None:
        return draw.choice([float("nan"), float("inf"), -float("inf")])

    rate = None
    if lane.rate_is_tensor and draw.random() < 0.3:
        rate = draw.choice(RATES if draw.random() < 0.7 else WRONG_RATES)
    # In most steps the gradients have similar sizes, as in training.
    common = draw_size() if draw.random() < 0.3 else 1.0
    # The first two steps compile what is recorded.
    replay = graph and at > 1 and draw.random() < 0.6
    scaled = at > 1 and not replay and draw.random() < 0.1
    return Step(
        seed=draw.getrandbits(62),
        sizes=[common if draw.random() < 0.7 else draw_size() for _ in range(lane.matrices)],
        planted=[draw_wrong() if draw.random() < 0.1 else None for _ in range(lane.matrices)],
        rate=rate,
        overflow=float(draw.random() < 0.5) if scaled else None,
        replay=replay,
        elsewhere=draw.random() < 0.2,
    )


def start(lane: Lane, device: str) -> list[Tensor]:
    """Dense matrices, orthogonal within their precision, in O(n²)."""
    made = []
    for matrix in range(lane.matrices):
        generator = torch.Generator().manual_seed(matrix)
        v = torch.randn(max(lane.stack, 1), 2, lane.n, generator=generator, dtype=torch.float64)
        v = torch.nn.functional.normalize(v.to(device), dim=-1)
        a, b = v.unsqueeze(-1).unbind(1)
        # Two reflections, I − 2aaᵀ and I − 2bbᵀ.
        W = torch.eye(lane.n, dtype=torch.float64, device=device) - 2 * a @ a.mT
        W = (W - 2 * (W @ b) @ b.mT).to(lane.dtype)
        W = W if lane.stack else W[0]
        made.append(W.mT.contiguous().mT if lane.transposed else W)
    return made


def draw_gradients(lane: Lane, step: Step, device: str) -> list[Tensor]:
    """The gradients of a step, one for each matrix."""
    generator = torch.Generator(device=device).manual_seed(step.seed)
    shape = (lane.stack, lane.n, lane.n) if lane.stack else (lane.n, lane.n)
    made = []
    for size, planted in zip(step.sizes, step.planted, strict=True):
        G = torch.randn(shape, generator=generator, device=device, dtype=lane.dtype)
        # A few large entries among many small ones.
        G *= G.square() * size
        # Only planted entries may be infinite, not those that overflowed.
        G.nan_to_num_(0.0, 1e38, -1e38)
        if planted is not None:
            G.view(-1)[step.seed % G.numel()] = planted
        made.append(G)
    return made


class Run:
    """Runs a lane: on several streams and with replays, or as plain calls on one stream."""

    def __init__(self, lane: Lane, device: str, *, mixed: bool) -> None:
        self.lane, self.device, self.mixed = lane, device, mixed and device == "cuda"
        self.parameters = [torch.nn.Parameter(W) for W in start(lane, device)]
        self.rate: Any = lane.lr
        self.latest = lane.lr
        if lane.rate_is_tensor:
            self.rate = torch.tensor(lane.lr, device=device)
        groups = [{"params": [W]} for W in self.parameters]
        self.optimizer = givens.GCD(groups, self.rate, **lane.options)
        self.places = [torch.zeros_like(W) for W in self.parameters]
        self.graph: Any = None
        self.streams = [torch.cuda.Stream() for _ in range(2)] if self.mixed else []
        # Counted on the device, so that steps do not synchronise with the host.
        self.moved = torch.zeros((), dtype=torch.int32, device=device)
        self.refused = self.replays = 0
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())

    def step(self, number: int) -> None:
        """Do one of the lane's steps."""
        if not self.streams:
            self._step(self.lane.steps[number])
            return
        if self.lane.steps[number].elsewhere:
            self.streams.reverse()
            self.streams[0].wait_stream(self.streams[1])
        with torch.cuda.stream(self.streams[0]):
            self._step(self.lane.steps[number])

    def _step(self, step: Step) -> None:
        if step.rate is not None:
            self.rate.fill_(step.rate)
            self.latest = step.rate
        wrong = self.latest in WRONG_RATES or self.latest != self.latest
        must_stay = [
            planted is not None or wrong or step.overflow == 1.0 for planted in step.planted
        ]
        made = draw_gradients(self.lane, step, self.device)
        before = [W.detach().clone() for W in self.parameters]
        if step.replay and self.mixed:
            for place, G in zip(self.places, made, strict=True):
                place.copy_(G)
            if self.graph is None:
                self._record()
            self.graph.replay()
            self.replays += 1
        else:
            for W, G in zip(self.parameters, made, strict=True):
                W.grad = G
            self._call(step)
        for W, old, stays in zip(self.parameters, before, must_stay, strict=True):
            if stays:
                self.moved += (W.detach() != old).any()

    def _call(self, step: Step) -> None:
        if step.overflow is not None:
            # As a GradScaler sets and removes them.
            self.optimizer.found_inf = torch.tensor(step.overflow, device=self.device)
            self.optimizer.grad_scale = torch.tensor(1.0, device=self.device)
        kept = None if self.device == "cuda" else copy.deepcopy(self.optimizer.state_dict())
        old = None if kept is None else [W.detach().clone() for W in self.parameters]
        try:
            with self._backend():
                self.optimizer.step()
        except ValueError:
            if kept is None or old is None:
                raise
            self.refused += 1
            now = self.optimizer.state_dict()
            same = all(torch.equal(W, M) for W, M in zip(self.parameters, old, strict=True))
            self.moved += not (same and _same(kept["state"], now["state"]))
        finally:
            if step.overflow is not None:
                del self.optimizer.found_inf, self.optimizer.grad_scale

    def _record(self) -> None:
        for W, place in zip(self.parameters, self.places, strict=True):
            W.grad = place
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.streams[0]):
            self.optimizer.step()

    def _backend(self) -> Any:
        backend = self.lane.backend
        return contextlib.nullcontext() if backend is None else givens.backend(backend)

    def find_faults(self) -> list[str]:
        """What is wrong after all steps, including steps that should have changed nothing."""
        found = []
        for W in self.parameters:
            error = givens.orthogonality_error(W)
            if not error <= BARS[self.lane.dtype]:
                found.append(f"max|RᵀR − I| = {error:.2e} > {BARS[self.lane.dtype]:g}")
            for name, value in self.optimizer.state[W].items():
                if not torch.as_tensor(value).isfinite().all():
                    found.append(f"the state's {name} is not finite")
        if int(self.moved):
            found.append(f"{int(self.moved)} steps that had to be refused changed something")
        return found

    def count_skipped(self) -> int:
        """The number of steps that were refused on the device."""
        return sum(int(self.optimizer.state[W].get("skipped", 0)) for W in self.parameters)


def _same(before: dict[Any, Any], now: dict[Any, Any]) -> bool:
    """Whether states have the same bits; a missing entry counts as zeros."""
    for matrix, state in now.items():
        for name, value in state.items():
            found = torch.as_tensor(value)
            old = before.get(matrix, {}).get(name, torch.zeros_like(found))
            if not torch.equal(torch.as_tensor(old), found):
                return False
    return True


def run_case(lanes: list[Lane], device: str) -> tuple[dict[str, Any], list[str]]:
    """Run a case; returns its row and what is wrong."""
    runs = [Run(lane, device, mixed=True) for lane in lanes]
    for number in range(max(len(lane.steps) for lane in lanes)):
        for run in runs:
            if number < len(run.lane.steps):
                run.step(number)
    if device == "cuda":
        torch.cuda.synchronize()
    found, worst = [], 0.0
    for run in runs:
        alone = Run(run.lane, device, mixed=False)
        for number in range(len(run.lane.steps)):
            alone.step(number)
        if device == "cuda":
            torch.cuda.synchronize()
        pairs = zip(run.parameters, alone.parameters, strict=True)
        faults = run.find_faults()
        if not all(torch.equal(W, V) for W, V in pairs):
            faults.append("the same steps alone, plainly, end with other bits")
        found += [f"{fault}: {run.lane}" for fault in faults]
        if run.lane.dtype is torch.float32:
            worst = max([worst, *(givens.orthogonality_error(W) for W in run.parameters)])
    row = {
        "lanes": [str(lane) for lane in lanes],
        "steps": sum(len(lane.steps) * lane.matrices for lane in lanes),
        "replays": sum(run.replays for run in runs),
        "refused": sum(run.refused + run.count_skipped() for run in runs),
        "worst_error": worst,
        "faults": found,
    }
    return row, found


def main() -> int:
    """Run cases until there are enough steps; returns 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--steps", type=int, default=10_000, help="steps of all matrices together")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this time")
    parser.add_argument("--most", type=int, default=8192, help="the largest n")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of the one case to run")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    began, number = time.perf_counter(), options.only or 0
    while counts["steps"] < options.steps and time.perf_counter() - began < options.seconds:
        lanes = draw_case(options.seed, number, options.device, options.most)
        again = f"{sys.argv[0]} --device {options.device} --most {options.most}"
        again += f" --seed {options.seed} --only {number}"
        case = f"case {number}: " + "; ".join(map(str, lanes)) + f"\n  again: python {again}"
        watch = threading.Timer(HUNG, _give_up, [case])
        watch.daemon = True
        watch.start()
        try:
            row, found = run_case(lanes, options.device)
        except Exception as error:
            # After an illegal access the device is unusable.
            traceback.print_exc()
            row, found = {"steps": 0, "faults": [repr(error)]}, [repr(error)]
            broken = "CUDA" in repr(error)
        else:
            broken = False
        finally:
            watch.cancel()
        rows.append({"case": number, **row})
        counts.update(steps=row["steps"], replays=row.get("replays", 0), failed=int(bool(found)))
        counts["refused"] += row.get("refused", 0)
        for fault in found:
            print(f"{fault}\n  in {case}", flush=True)
        number += 1
        if broken or options.only is not None:
            break
    worst = max((row.get("worst_error", 0.0) for row in rows), default=0.0)
    print(
        f"{len(rows)} cases, {counts['steps']} steps, {counts['replays']} replays, "
        f"{counts['refused']} refused, worst max|RᵀR − I| {worst:.2e}, {counts['failed']} failed, "
        f"{time.perf_counter() - began:.0f} s"
    )
    if options.json:
        about = {**environment(options.device), "seed": options.seed, "most": options.most}
        files.write_json(options.json, {**about, **counts, "worst_error": worst, "rows": rows})
    return int(counts["failed"] > 0)


def _give_up(case: str) -> None:
    print(f"no end after {HUNG:g} s in {case}", flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
