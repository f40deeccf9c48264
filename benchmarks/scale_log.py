"""A click log that outgrows memory: surveyed, streamed and trained on from Parquet files.

    python benchmarks/scale_log.py --json results/scale-log.json

The built-in generator writes 200 million clicks of 10 million users on 20 million items, sorted by
user. Then each part runs in a process of its own, whose peak memory (VmHWM) is measured:

    read      the survey, the first batch, and batches of 4,096 without a model
    again     the same, with the saved survey
    train     the first steps of towers of 8 dimensions, from the start of the process

The files have just been written, so the page cache holds as much of them as it can. The size of the
tables of `train` (parameters, gradients and optimizer state) is given beside its peak.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from givens.paper.rows import environment, write

PACKAGES = ("torch", "numba", "numpy", "pyarrow")
BATCH, HISTORY, DRAWS, STEPS = 4096, 100, 1500, 10


def read_peak() -> int:
    """The peak memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def read(data: Path, run: Path, began: float) -> dict[str, Any]:
    """Survey the log, unless there is a survey, and draw batches."""
    import pyarrow.parquet  # noqa: F401
    import torch  # noqa: F401

    from givens.retrieval import streamed, streams
    from givens.retrieval.batches import open_examples

    imported, base = time.time() - began, read_peak()
    log = open_log(data, run)
    known, read_cpu = time.time() - began, time.process_time()
    examples = open_examples(log, history=HISTORY, ahead=20)
    opened = time.time() - began
    examples.draw(0, BATCH)
    first, first_cpu = time.time() - began, time.process_time()
    slowest = 0.0
    for step in range(1, DRAWS):
        before = time.perf_counter()
        examples.draw(step, BATCH, dropout=0.3)
        slowest = max(slowest, time.perf_counter() - before)
    spent, cpu = time.time() - began - first, time.process_time() - first_cpu
    assert isinstance(log, streamed.StreamedLog)
    assert isinstance(examples, streams.StreamedExamples)
    return {
        "clicks": log.clicks,
        "users": log.users,
        "items": log.catalogue,
        "files": len(log.source.files),
        "row_groups": len(log.source),
        "file_bytes": sum(file.stat().st_size for file in log.source.files),
        "imported": imported,
        "read": known,
        "opened": opened - known,
        "windows": first - opened,
        "first_batch": first,
        # Processor seconds of all threads, since the start of the process.
        "read_cpu": read_cpu,
        "first_batch_cpu": first_cpu,
        "draw_cpu_ms": 1000 * cpu / (DRAWS - 1),
        "draw_ms": 1000 * spent / (DRAWS - 1),
        "slowest_draw_ms": 1000 * slowest,
        "examples_per_second": BATCH * (DRAWS - 1) / spent,
        "base_bytes": base,
        "peak_bytes": read_peak(),
        "window_bytes": examples.most_bytes,
    }


def train(data: Path, run: Path, began: float) -> dict[str, Any]:
    """Take the first steps of a run."""
    from givens.retrieval.batches import open_examples
    from givens.retrieval.config import Config
    from givens.retrieval.state import State
    from givens.retrieval.trainer import Trainer

    log = open_log(data, run)
    known = time.time() - began
    config = Config(
        dim=8, subspaces=2, codewords=16, batch=BATCH, negatives=BATCH, history=HISTORY, sample=100
    )
    state = State(log, config)
    examples = open_examples(log, history=config.history, ahead=config.ahead)
    trainer = Trainer(state, examples)
    trainer.advance()
    first, first_cpu = time.time() - began, time.process_time()
    drawn = 0.0
    draw = examples.draw

    def draw_timed(*arguments: Any, **options: Any) -> Any:
        nonlocal drawn
        before = time.perf_counter()
        found = draw(*arguments, **options)
        drawn += time.perf_counter() - before
        return found

    examples.draw = draw_timed  # type: ignore[method-assign]
    for _ in range(STEPS):
        trainer.advance()
    spent, cpu = time.time() - began - first, time.process_time() - first_cpu
    parts = [*state.towers.parameters(), *state.layer.parameters()]
    tables = sum(part.nbytes for part in parts)
    tables += sum(
        part.grad.nbytes for part in parts if part.grad is not None and not part.grad.is_sparse
    )
    for optimizer in state.optimizers:
        for entries in optimizer.state.values():
            tables += sum(getattr(value, "nbytes", 0) for value in entries.values())
    return {
        "read": known,
        "first_step": first,
        "first_step_cpu": first_cpu,
        "step_cpu_ms": 1000 * cpu / STEPS,
        "step_ms": 1000 * spent / STEPS,
        "draw_ms": 1000 * drawn / STEPS,
        "table_bytes": tables,
        "peak_bytes": read_peak(),
        "beyond_tables": read_peak() - tables,
        "dim": config.dim,
        "batch": BATCH,
    }


def open_log(data: Path, run: Path) -> Any:
    """Open the log as `givens train` does."""
    from givens.retrieval.readers import read as read_log

    return read_log(data, folder=run)


def run_part(name: str, *arguments: Any) -> dict[str, Any]:
    """Run a part in a process of its own; returns its row."""
    print(f"{name} …", flush=True)
    command = [sys.executable, __file__, "--part", name, *map(str, arguments)]
    found = subprocess.run(
        [*command, "--began", str(time.time())], check=True, stdout=subprocess.PIPE, text=True
    )
    # The load of the machine, including this part.
    row = {"part": name, **json.loads(found.stdout.splitlines()[-1]), "load": os.getloadavg()[0]}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    """Write a log, read it, train on it, write rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=10_000_000)
    parser.add_argument("--items", type=int, default=20_000_000)
    parser.add_argument("--clicks", type=int, default=200_000_000)
    parser.add_argument(
        "--folder", type=Path, help="folder of the log, which is removed: 8 bytes a click"
    )
    parser.add_argument("--log", type=Path, help="an existing log")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        made = train if options.part == "train" else read
        print(json.dumps(made(options.log, options.run, options.began)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, rows = Path(name), []
        if options.log is None:
            from givens.retrieval.parquet import write_clicks

            options.log = folder / "log"
            before = time.perf_counter()
            write_clicks(options.log, options.users, options.items, options.clicks)
            rows.append({"part": "write", "seconds": time.perf_counter() - before})
        arguments = ("--log", options.log, "--run", folder / "run")
        rows.append(run_part("read", *arguments))
        rows.append(run_part("again", *arguments))
        shutil.rmtree(folder / "run")
        rows.append(run_part("train", *arguments))
    about = {**environment("cpu", PACKAGES), "cores": len(os.sched_getaffinity(0))}
    if options.json:
        write(options.json, [{**row, **about} for row in rows])


if __name__ == "__main__":
    main()
