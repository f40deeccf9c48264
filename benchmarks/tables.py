"""Tables split over ranks: engines, their cost, and the quality of the optimizer.

    python benchmarks/tables.py engines --json results/tables-engines.json

Three ways to split an embedding table by rows, on CPU ranks with gloo: TorchRec, a DTensor sharded
over rows, and `givens.retrieval.tables`. Every step looks up the same ids, drawn by a power law,
and updates their rows: TorchRec by its row-wise Adagrad, a DTensor by dense Adagrad, since its
gradient is dense, ours by `RowWise`. TorchRec is not in the `bench` extra, since each of its
versions needs one version of torch:

    pip install --target EXTRA --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict pyvers \
        torchmetrics==1.0.3 lightning-utilities pyre-extensions typing-inspect mypy-extensions \
        iopath portalocker cloudpickle orjson
    PYTHONPATH=EXTRA python benchmarks/tables.py engines …

    python benchmarks/tables.py optimizers --json results/tables-optimizers.json

The same run with `RowWise` and with torch's SparseAdam, which has two numbers of state per entry.

    python benchmarks/tables.py large --items 20000000 --json results/tables-large.json

Four ranks train on tables that do not fit into one process with twice the memory of a rank, encode
all items and write one index, which is then searched; that process is run too, and is refused.
"""

import argparse
import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from givens import distributed
from givens.paper.rows import Rows, environment, write
from givens.retrieval.tables import RowWise, Table

PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu")
ENGINES = ("torchrec", "dtensor", "givens")
DIM, IDS, LR = 64, 16_384, 0.02
EXACT, SETTLE, TIMED = 20, 2, 12

# A lookup of this rank's ids, and a step of the optimizer.
Engine = tuple[Callable[[Tensor], Tensor], Callable[[], object]]


def make_givens(items: int) -> Engine:
    """`givens.retrieval.tables`."""
    table = Table(items, DIM, seed=0, number=0)
    turn = RowWise(table.parameters(), LR)

    def step() -> None:
        turn.step()
        turn.zero_grad()

    return table, step


def make_dtensor(items: int) -> Engine:
    """A DTensor over rows: all ranks look up all ids, and sum the rows that each has."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = Table(items, DIM, seed=0, number=0).weight.detach()
    weight = nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)]))
    turn = torch.optim.Adagrad([weight], LR, initial_accumulator_value=1e-12)

    def look_up(ids: Tensor) -> Tensor:
        everything = [torch.empty_like(ids) for _ in range(mesh.size())]
        dist.all_gather(everything, ids)
        whole = DTensor.from_local(torch.cat(everything), mesh, [Replicate()])
        found = nn.functional.embedding(whole, weight)
        return found.redistribute(mesh, [Shard(0)]).to_local()

    def step() -> None:
        turn.step()
        turn.zero_grad()

    return look_up, step


def make_torchrec(items: int) -> Engine:
    """TorchRec's row-wise sharding of an EmbeddingCollection, with its fused optimizer.

    `use_index_dedup` would send each id once, but FBGEMM 1.8 has its operator only on GPUs.
    """
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from torchrec.distributed.types import ShardingType

    config = torchrec.EmbeddingConfig(
        name="table", embedding_dim=DIM, num_embeddings=items, feature_names=["item"]
    )
    module = torchrec.EmbeddingCollection(tables=[config], device=torch.device("meta"))
    how = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": 1e-30}
    sharder = EmbeddingCollectionSharder(fused_params=how)
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    constraint = ParameterConstraints(
        sharding_types=[ShardingType.ROW_WISE.value],
        compute_kernels=[EmbeddingComputeKernel.FUSED.value],
    )
    planner = EmbeddingShardingPlanner(topology=topology, constraints={"table": constraint})
    plan = planner.collective_plan(module, [sharder], dist.group.WORLD)
    model: Any = DistributedModelParallel(
        module, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    rows = Table(items, DIM, seed=0, number=0)
    sharded = model.state_dict()["embeddings.table.weight"].local_shards()
    # It splits rows by ceil(items / ranks), we by floor: equal if ranks divide items.
    sharded[0].tensor.copy_(rows.weight.detach())
    lengths = torch.ones(IDS // dist.get_world_size(), dtype=torch.int64)

    def look_up(ids: Tensor) -> Tensor:
        jagged = torchrec.KeyedJaggedTensor(["item"], ids, lengths=lengths)
        found: Tensor = model(jagged).wait()["item"].values()
        return found

    # The backward pass moves the rows.
    return look_up, lambda: None


def draw_ids(items: int) -> Iterator[Tensor]:
    """The ids of all ranks in each step, by a power law, unsorted."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(items, generator=torch.Generator().manual_seed(1))
    while True:
        at = torch.rand(IDS, generator=generator, dtype=torch.float64)
        yield order[((items + 1.0) ** at - 1).long().clamp_max(items - 1)]


class Counted(TorchDispatchMode):
    """Counts the bytes that a rank sends in collectives of any name."""

    sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count it if it is a collective."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self.sent += _cost(func.__name__.split(".")[0].strip("_"), args)
        return func(*args, **(kwargs or {}))


def _cost(name: str, args: Any) -> float:
    N = dist.get_world_size()
    if name == "barrier" or name.startswith(("wait_tensor", "wrap_tensor")):
        return 0
    x = args[1] if name in ("alltoall_base", "allgather", "reduce_scatter_base") else args[0]
    while isinstance(x, list):
        x = x[0]
    if name in ("alltoall_base", "all_to_all_single"):
        given = args[4] if name == "alltoall_base" else args[2]
        kept = given[dist.get_rank()] if given else len(x) / N
        return float(x.nbytes * (1 - kept / max(len(x), 1)))
    factors = {
        "allgather": N - 1,
        "all_gather_into_tensor": N - 1,
        "allreduce": 2 * (N - 1) / N,
        "all_reduce": 2 * (N - 1) / N,
        "reduce_scatter_tensor": (N - 1) / N,
        "reduce_scatter_single": (N - 1) / N,
        "reduce_scatter_base": (N - 1) / N,
    }
    return float(x.nbytes * factors[name])


def run_rank(engine: str, items: int, store: str, output: str) -> None:
    """Run one rank; the first writes losses of the first steps, times, bytes and memory."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    idle = peak_bytes()
    look_up, step = globals()[f"make_{engine}"](items)
    generator = torch.Generator().manual_seed(2)
    sought = torch.randn(IDS, DIM, generator=generator)
    mine = distributed.rows(IDS)
    losses, seconds = [], []
    for number, ids in zip(range(EXACT + SETTLE + TIMED + 1), draw_ids(items), strict=False):
        last = number == EXACT + SETTLE + TIMED
        counted = Counted()
        dist.barrier()
        began = time.perf_counter()
        with counted if last else contextlib.nullcontext():
            found = look_up(ids[mine])
            loss = (found - sought[mine]).square().sum() / IDS
            loss.backward()
            step()
        dist.barrier()
        spent = time.perf_counter() - began
        if number < EXACT:
            losses.append(float(distributed.sum_ranks(loss.detach())))
        elif number >= EXACT + SETTLE and not last:
            seconds.append(spent)
    moved = counted.sent
    peaks = distributed.from_all(lambda: [idle, peak_bytes(), moved])
    if rank == 0:
        row = {
            "losses": losses,
            "seconds": statistics.median(seconds),
            "idle_bytes": max(one[0] for one in peaks),
            "peak_bytes": max(one[1] for one in peaks),
            "sent_bytes": max(one[2] for one in peaks),
        }
        Path(output).write_text(json.dumps(row))
    dist.barrier()
    os._exit(0)


def peak_bytes() -> int:
    """The peak memory of this process, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def start(world: int, arguments: list[str]) -> None:
    """Run this file on `world` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, *arguments, f"{folder}/store"],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)},
            )
            for rank in range(world)
        ]
        if sum(rank.wait() for rank in ranks):
            raise SystemExit(f"a rank of {' '.join(arguments)} failed")


def engines(options: argparse.Namespace) -> Rows:
    """Rows of every engine, for all numbers of ranks and items."""
    rows = []
    for items in options.items:
        for world in options.ranks:
            for engine in options.engines:
                with tempfile.NamedTemporaryFile() as file:
                    start(world, ["rank", engine, str(items), file.name])
                    row = json.loads(Path(file.name).read_text())
                row = {"engine": engine, "items": items, "ranks": world, **row}
                print(
                    f"{engine:<9}{items:>12,} items {world} ranks {1e3 * row['seconds']:8.1f} ms "
                    f"{row['sent_bytes'] / 1e6:8.2f} MB sent  {row['idle_bytes'] / 2**20:6.0f} to "
                    f"{row['peak_bytes'] / 2**20:6.0f} MiB  losses {row['losses'][0]:.6f} "
                    f"{row['losses'][-1]:.6f}",
                    flush=True,
                )
                rows.append(row)
    return [{**row, "dim": DIM, "ids": IDS, **environment("cpu", PACKAGES)} for row in rows]


def optimizers(options: argparse.Namespace) -> Rows:
    """Rows of the recall by both optimizers, after the same steps."""
    from givens.retrieval import state as states
    from givens.retrieval.config import Config
    from givens.retrieval.data import click_log
    from givens.retrieval.train import train

    class Sparse(torch.optim.SparseAdam):
        """SparseAdam with its step count as a tensor of rows, as `State` needs it."""

        def step(self, closure: Any = None) -> None:
            for state in self.state.values():
                state["step"] = int(state["step"][0])
            super().step()
            for table, state in self.state.items():
                state["step"] = torch.full((len(table),), state["step"])

    known = {"row-wise": RowWise, "SparseAdam": Sparse}
    rows = []
    for seed, (name, optimizer) in itertools.product(range(options.seeds), known.items()):
        states.RowWise, states.LARGE = optimizer, 1000
        log = click_log(2000, 4000, 60_000, drift=0.0, seed=seed)
        config = Config(
            dim=32, subspaces=8, codewords=32, history=20, batch=256, negatives=256, lr=2e-2,
            joint_lr=5e-3, temperature=0.1, warmup=200, steps=100, every=100, sample=4000,
            iterations=10, weight=1.0, seed=seed,
        )  # fmt: skip
        began = time.perf_counter()
        done = train(log, config)
        row = {
            "optimizer": name,
            "seed": seed,
            "items": log.catalogue,
            "recall_full": done.results["full"]["recall@100"],
            "recall_index": done.results["index"]["recall@100"],
            "validation": [one["recall"] for one in done.rows],
            "numbers_of_a_row": 2 if name == "row-wise" else 2 * config.dim,
            "seconds": time.perf_counter() - began,
        }
        print(row, flush=True)
        rows.append(row)
    return [{**row, **environment("cpu", PACKAGES)} for row in rows]


def run_large(world: int, items: int, folder: Path, store: str) -> None:
    """Run a rank of the large run, or one process alone."""
    from givens.export.faiss import load_index
    from givens.retrieval.config import Config
    from givens.retrieval.data import Log
    from givens.retrieval.train import train

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    log = Log(**np.load(folder / "log.npz"), name="built-in", catalogue=items)
    config = Config(
        dim=DIM, subspaces=8, codewords=256, coarse=256, history=20, batch=1024, negatives=1024,
        lr=2e-2, joint_lr=5e-3, temperature=0.1, weight=1.0, warmup=20, steps=20, every=20,
        sample=16_384, iterations=5,
    )  # fmt: skip
    idle, times = peak_bytes(), []

    def count(step: int) -> None:
        times.append((step, time.perf_counter()))

    began = time.perf_counter()
    done = train(log, config, folder / "run", progress=count)
    spent = time.perf_counter() - began
    peaks = distributed.from_all(peak_bytes)
    if rank:
        dist.barrier()
        os._exit(0)
    steps = [(b, t - s) for (a, s), (b, t) in itertools.pairwise(times)]
    index = load_index(folder / "run" / "index.faiss").index
    queries = torch.nn.functional.normalize(torch.randn(100, DIM)).numpy()
    since = time.perf_counter()
    index.search(queries, 100)
    row = {
        "step_seconds": statistics.median(t for b, t in steps if b <= 20),
        "joint_step_seconds": statistics.median(t for b, t in steps if b > 22),
        "seconds": spent,
        "idle_bytes": idle,
        "peak_bytes": peaks,
        "table_bytes": [4 * DIM * 2 * count for count in distributed.sizes(items)],
        "indexed": index.ntotal,
        "index_bytes": (folder / "run" / "index.faiss").stat().st_size,
        "search_seconds": time.perf_counter() - since,
        "agreement": done.results["agreement"],
        "distortion": done.results["distortion"],
        "losses": [one.get("loss") for one in done.rows],
        "load": os.getloadavg()[0],
    }
    (folder / "row.json").write_text(json.dumps(row))
    if world > 1:
        dist.barrier()
    os._exit(0)


def large(options: argparse.Namespace) -> Rows:
    """The row of the large run on ranks, and of its refusal with the memory of two ranks."""
    from givens.retrieval.data import click_log

    (items,), world = options.items, max(options.ranks)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        log = click_log(1000, items, 200_000, drift=0.0)
        parts = ("starts", "items", "times", "train", "valid", "test")
        np.savez(folder / "log.npz", **{part: getattr(log, part) for part in parts})
        start(world, ["large", str(world), str(items), name])
        row = json.loads((folder / "row.json").read_text())
        limit = 2 * max(row["peak_bytes"])
        command = [sys.executable, __file__, "large", "1", str(items), name, "-"]
        alone = subprocess.run(
            ["bash", "-c", 'ulimit -v "$0"; exec "$@"', str(limit // 1024), *command],
            env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    row |= {"limit_bytes": limit, "refusal": alone.stderr.strip().splitlines()[-1]}
    print(json.dumps(row, indent=1))
    return [{"items": items, "dim": DIM, "ranks": world, **row, **environment("cpu", PACKAGES)}]


def main() -> None:
    """Measure, print and write rows."""
    if sys.argv[1] == "rank":
        run_rank(sys.argv[2], int(sys.argv[3]), sys.argv[5], sys.argv[4])
    if sys.argv[1] == "large" and sys.argv[2].isdigit():
        run_large(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
    what = {"engines": engines, "optimizers": optimizers, "large": large}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=what)
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument("--items", nargs="+", type=int, default=[200_000, 2_000_000])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="folder of the tables' files: 4 times their size"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = what[options.what](options)
    if options.json:
        write(options.json, rows)


if __name__ == "__main__":
    main()
