"""Joint training with each method at its own angle: does GCD lower the distortion as Cayley does?

    python benchmarks/angles.py --data ml-1m --device cuda --json results/angles-ml-1m.json
    python benchmarks/angles.py --smoke

The angle of each method is the one with the best recall of the validation users on two hidden
seeds, ties broken by the distortion; with it the shown seeds are run. All runs of a seed start from
the same towers and the same OPQ. Every seed is a process of its own.
"""

import argparse
import dataclasses
import functools
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from givens.paper.joint import Runs, log_for, recall
from givens.paper.rows import Rows, write
from givens.retrieval.config import config_for

HIDDEN = (100, 101)
ANGLES = (0.003, 0.01, 0.03, 0.1)
# A frozen rotation has no angle.
ALONE = ("frozen",)
SMOKE = {"dim": 16, "codewords": 16, "warmup": 4, "steps": 4, "every": 2, "iterations": 2}


def train_seed(
    given: argparse.Namespace, seed: int, plan: Iterable[tuple[str, float]]
) -> list[dict[str, Any]]:
    """Train every method and angle of a plan from the towers of one seed."""
    log = log_for(given.data, smoke=given.smoke)
    options = SMOKE if given.smoke else {}
    config = config_for(log, subspaces=given.bytes, seed=seed, **options)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder) / "rows.json", given.device, functools.partial(print, flush=True))
        for method, angle in plan:
            runs.run(log, dataclasses.replace(config, method=method, angle=angle))
        return [{**row, "angle": row["config"]["angle"]} for row in runs.rows]


def choose_angles(rows: Rows) -> dict[str, float]:
    """The angle of each method by the hidden seeds."""
    scores: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for row in rows:
        found = scores.setdefault((row["method"], row["angle"]), [])
        found.append((max(row["recall"]), -row["final_distortion"]))
    best: dict[str, tuple[tuple[float, ...], float]] = {}
    for (method, angle), found in scores.items():
        score = tuple(statistics.fmean(part) for part in zip(*found, strict=True))
        best[method] = max(best.get(method, (score, angle)), (score, angle))
    return {method: angle for method, (_, angle) in best.items()}


def main() -> None:
    """Choose the angles, train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of a log; the built-in one if left out")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--bytes", type=int, default=16)
    parser.add_argument("--methods", default="frozen,gcd,cayley")
    parser.add_argument("--seeds", type=int, default=5, help="that are shown")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--smoke", action="store_true", help="all of it, small")
    given = parser.parse_args()
    methods = given.methods.split(",")
    search = [(m, angle) for m in methods if m not in ALONE for angle in ANGLES]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.processes, context) as pool:
        hidden = [pool.submit(train_seed, given, seed, search) for seed in HIDDEN]
        rows = [{**row, "shown": False} for future in hidden for row in future.result()]
        angles = choose_angles(rows)
        print(f"angles: {angles}")
        plan = [(m, angles.get(m, ANGLES[0])) for m in methods]
        shown = [pool.submit(train_seed, given, seed, plan) for seed in range(given.seeds)]
        rows += [{**row, "shown": True} for future in shown for row in future.result()]
    if given.json:
        write(given.json, rows)
    for method in methods:
        mine = [row for row in rows if row["shown"] and row["method"] == method]
        told = [f"{statistics.fmean(row['final_distortion'] for row in mine):.6f}"]
        told.append(f"recall@100 {100 * statistics.fmean(map(recall, mine)):.2f} %")
        print(f"{method:12} angle {mine[0]['angle']:g}: distortion {', '.join(told)}")


if __name__ == "__main__":
    main()
