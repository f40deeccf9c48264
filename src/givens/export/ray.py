"""Encode shards with Ray, on this machine or on a cluster with a shared folder.

Each job is a task. Ray repeats it if its worker is killed; since shards are written atomically,
repetition is harmless.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from givens.export.lists import Ids
from givens.export.shards import Job, Progress, Shard, encode, ids_of
from givens.quantizer import Quantizer

try:
    import ray
except ImportError as error:
    raise ImportError("--engine ray needs ray: pip install 'givens[ray]'") from error

# Only the quantizer and some ids go through Ray's memory.
OBJECT_STORE = 128 << 20
# How often a job is retried after its worker has died.
RETRIES = 3


def encode_on_ray(
    q: Quantizer,
    jobs: Sequence[Job],
    folder: str | Path,
    *,
    ids: Ids | None = None,
    address: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Shard]:
    """Write all shards; each worker has one core.

    Args:
        q: the quantizer.
        jobs: from `shards.plan`; their paths must be valid on all machines.
        folder: of the shards, the same on all machines.
        ids: (N,) of all vectors; their positions by default.
        address: of a running cluster; None starts Ray on this machine for this call.
        workers: number of parallel jobs; all cores by default.
        progress: called with the number of vectors encoded since the last call.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, but got {workers}")
    cores = os.cpu_count() or 1
    if address is None and not ray.is_initialized() and (workers or 0) > cores:
        raise ValueError(f"workers must be at most {cores}, the cores here, but got {workers}")
    with _connect(address, workers):
        at_once = workers or int(ray.cluster_resources().get("CPU", 1))
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(encode)
        shared = ray.put(q.to("cpu"))
        where = str(Path(folder).resolve())
        waiting = iter(jobs)
        running: dict[Any, Job] = {}
        done: dict[int, Shard] = {}
        try:
            while len(done) < len(jobs):
                # A few at a time: Ray's memory holds the ids of each until it is done.
                for job in waiting:
                    running[task.remote(shared, job, where, ids_of(job, ids))] = job
                    if len(running) >= 2 * at_once:
                        break
                for ready in ray.wait(list(running))[0]:
                    job = running.pop(ready)
                    done[job.number] = _result(ready, job)
                    if progress is not None:
                        progress(job.rows)
        finally:
            for left in running:
                ray.cancel(left)
    return [done[job.number] for job in jobs]


@contextlib.contextmanager
def _connect(address: str | None, workers: int | None) -> Iterator[None]:
    """Use the caller's Ray, connect to the address, or start Ray for the duration of the block."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        _knock(address)
        if address is None:
            ray.init(
                num_cpus=workers or os.cpu_count(),
                object_store_memory=OBJECT_STORE,
                include_dashboard=False,
                **quiet,
            )
        else:
            ray.init(address=address, **quiet)
    except Exception as error:
        # Ray raises a bare Exception if it takes too long to start; what it started is stopped.
        ray.shutdown()
        where = "does not start here" if address is None else f"does not answer at {address}"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConnectionError(f"Ray {where}: {reason}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str | None) -> None:
    """Raise within seconds if nothing listens at host:port; Ray would take minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _result(ready: Any, job: Job) -> Shard:
    rows = f"rows {job.first} to {job.first + job.rows - 1}"
    try:
        shard: Shard = ray.get(ready)
    except ray.exceptions.RayTaskError as error:
        # The job's own error, without Ray's traceback around it.
        raise error.cause from None
    except ray.exceptions.OutOfMemoryError:
        raise MemoryError(
            f"workers ran out of memory at {rows}; take fewer --workers and run it again, "
            "it goes on where it was"
        ) from None
    except ray.exceptions.RayError as error:
        reason = type(error).__name__
        raise ChildProcessError(
            f"a worker died {RETRIES + 1} times at {rows} ({reason}); "
            "run it again, it goes on where it was"
        ) from None
    return shard
