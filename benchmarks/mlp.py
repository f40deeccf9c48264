"""Does the MLP of the user tower pay? Validation recall with and without it.

    python benchmarks/mlp.py --data ml-1m --json results/mlp.json

Only the towers are trained, with the sizes of `givens train --size medium`. Without the MLP, a user
is the weighted sum of the history. Both see the same batches. Runs that have a row are skipped.
"""

import argparse
import statistics
from pathlib import Path

from torch import nn

from givens.paper.joint import paired_p_value
from givens.paper.rows import environment, read, write
from givens.retrieval import readers, towers
from givens.retrieval.config import Config, config_for
from givens.retrieval.data import Log
from givens.retrieval.train import warm_up

KINDS = {"with": towers.Mix, "without": nn.Identity}


def measure(log: Log, config: Config, kind: str) -> list[float]:
    """recall@100 of the validation users at each evaluation."""
    found: list[float] = []
    towers.Mix = KINDS[kind]
    try:
        warm_up(log, config, tell=lambda row: found.append(row["recall"]))
    finally:
        towers.Mix = KINDS["with"]
    return found


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of a log")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    log = readers.read(given.data)
    rows = read(given.json) if given.json and given.json.exists() else []
    for seed in range(given.seeds):
        for kind in KINDS:
            how = {"log": log.name, "mlp": kind, "seed": seed, "steps": given.steps, "lr": given.lr}
            if any(how.items() <= row.items() for row in rows):
                continue
            options = {"seed": seed, "warmup": given.steps, "lr": given.lr}
            config = config_for(log, size="medium", **options)
            found = measure(log, config, kind)
            rows.append({**how, "dim": config.dim, "recall": found, **environment()})
            print(f"{kind} the MLP, seed {seed}: {100 * max(found):.2f} %", flush=True)
            if given.json:
                write(given.json, rows)
    about = {"log": log.name, "steps": given.steps, "lr": given.lr}
    mine = [row for row in rows if about.items() <= row.items()]
    best = {kind: [max(row["recall"]) for row in mine if row["mlp"] == kind] for kind in KINDS}
    told = [f"{kind} {100 * statistics.fmean(values):.2f} %" for kind, values in best.items()]
    print(f"{', '.join(told)}; paired p = {paired_p_value(*best.values()):.2g}")


if __name__ == "__main__":
    main()
