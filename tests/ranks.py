"""Ranks that run a script together: processes forked from one that has imported what they need."""

import multiprocessing
import os
import sys
import time
import warnings
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "faiss",
        "givens.retrieval.train",
        "givens.kernels.cpu.step",
        "torch._dynamo",
    ]
)
# A rank that waits for one that has failed is ended after so many seconds.
PATIENCE = 600


class Rank(NamedTuple):
    """A process, and the file of what it writes to stderr."""

    process: ForkServerProcess
    errors: Path


def start(script, world, store, *arguments):
    """Start the ranks of a script; its first argument is the file in which they meet."""
    ranks = []
    for rank in range(world):
        errors = Path(f"{store}-{world}-{rank}.txt")
        process = CONTEXT.Process(target=run, args=(script, rank, world, errors, store, *arguments))
        process.start()
        ranks.append(Rank(process, errors))
    return ranks


def run(script, rank, world, errors, *arguments):
    """Run the script as one of the ranks."""
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666), 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    sys.argv = ["script", *map(str, arguments)]
    warnings.filterwarnings("error", category=UserWarning, module="givens")
    torch.set_num_threads(1)
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})


def finish(ranks, codes=None):
    """Wait for all of them; their exit codes must be these, or all 0."""
    until, told = time.monotonic() + PATIENCE, []
    for process, errors in ranks:
        process.join(max(until - time.monotonic(), 0))
        if process.exitcode is None:
            process.kill()
            process.join()
        told.append((process.exitcode, errors.read_text()))
        process.close()
    wanted = [0] * len(ranks) if codes is None else codes
    assert [code for code, _ in told] == wanted, "\n".join(text for _, text in told)
