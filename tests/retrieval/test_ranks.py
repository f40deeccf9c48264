"""Ranks that train together (gloo, on a CPU): they are as one, and one that dies stops them all."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from ranks import finish, start

from givens import load
from givens.export.faiss import load_index
from givens.export.refresh import refresh
from givens.retrieval import checkpoint
from givens.retrieval.config import Config
from givens.retrieval.data import click_log
from givens.retrieval.train import train
from givens.storage import files

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


TRAINED = """
import dataclasses, json, os, sys
from pathlib import Path

import torch
import torch.distributed as dist

from givens import distributed
from givens.retrieval import state as states
from givens.retrieval import train as module
from givens.retrieval.config import Config
from givens.retrieval.data import click_log
from givens.retrieval.evaluate import Evaluator
from givens.retrieval.state import State
from givens.retrieval.trainer import Trainer

store, output, device = sys.argv[1:]
world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


class Watched(Trainer):
    def advance(self):
        super().advance()
        losses.append(self.pending[-1].tolist())
        if len(losses) > 40:
            return
        state = self.state
        towers = [part for name, part in state.parts().items() if name.startswith("towers.")]
        parts = [state.layer.rotation.matrix, state.layer.codebooks, *towers]
        distributed.check_same(f"step {state.step}", parts, "")
        # Of split tables, and of what is kept of their rows, a rank has its part.
        held = {len(column) for column in state.columns().values()}
        split = self.state.log.catalogue > states.LARGE
        if held != ({len(range(400)[distributed.rows(400)])} if split else set()):
            sys.exit(f"rank {rank} has {held} rows")


module.Trainer = Watched
SMALL = Config(
    dim=16, subspaces=4, codewords=16, history=20, batch=128, lr=1e-2, joint_lr=1e-2,
    temperature=0.1, warmup=20, steps=0, every=10, sample=399, iterations=5,
)
log = click_log(1000, 400, 20_000, drift=0.0)
words = click_log(1000, 401, 20_000, drift=0.0, words=40)
untrained = {f"towers.{name}": part for name, part in State(log, SMALL).towers.state_dict().items()}
runs = {
    "warm-up": {},
    "drawn": {"negatives": 101},
    "words": {"history": 0},
    "joint": {"steps": 20},
    "joint, drawn": {"steps": 20, "negatives": 101, "coarse": 8, "start": "identity"},
    "hinge": {"steps": 20, "loss": "hinge", "negatives": 3, "batch": 8, "method": "gcd-random"},
    "hinge, all": {"steps": 20, "loss": "hinge", "method": "cayley", "fixed_items": True},
    "post-hoc": {"method": "post-hoc", "pool": "mean", "steps": 10},
    "jpq": {"steps": 20, "method": "jpq", "coarse": 8, "negatives": 101},
    "pogo": {"steps": 20, "method": "pogo"},
    "many items": {"steps": 20, "negatives": 101},
    "many items, lists": {"steps": 10, "negatives": 101, "coarse": 8, "fixed_items": True},
    "many items, jpq": {"steps": 20, "method": "jpq", "coarse": 8, "negatives": 101},
    "many items, post-hoc": {"method": "post-hoc", "steps": 0, "negatives": 101, "pool": "mean"},
    "many items, to the end": {"warmup": 150, "steps": 50, "dim": 32, "subspaces": 8,
                               "codewords": 64, "batch": 256, "every": 50, "negatives": 101},
    "whole": {"warmup": 150, "steps": 50, "dim": 32, "subspaces": 8, "codewords": 64,
              "batch": 256, "every": 50},
}
told = {}
for name, options in runs.items():
    losses, lines = [], []
    config = dataclasses.replace(SMALL, **options)
    states.LARGE = 100 if name.startswith("many items") else 10_000
    # What the first steps with the index do is seen best without others before them.
    known = untrained if 0 < config.steps == 20 else None
    folder = Path(output) / f"{world} {name}"
    done = module.train(words if name == "words" else log, config, folder, towers=known,
                        device=device, tell=lines.append)
    if len(lines) != (len(done.rows) if rank == 0 else 0):
        sys.exit(f"rank {rank} was told of {len(lines)} looks")
    index = [done.quantizer.rotation, done.quantizer.codebooks]
    distributed.check_same("what is trained", [*index, json.dumps([done.rows, done.results])], "")
    told[name] = {"losses": losses, "rows": done.rows, "results": done.results}

# Ranks that are not alike, and an error of the first alone, end all of them.
if world > 1:
    for options in ({"seed": rank}, {"lr": 0.1 * (1 + rank)}):
        try:
            module.train(log, dataclasses.replace(SMALL, **options), device=device)
        except ValueError as error:
            if "options, checkpoint and draws must be the same on all ranks" not in str(error):
                raise
        else:
            sys.exit(f"{options} was not refused")

    class Failing(Evaluator):
        def measure(self, losses):
            raise ValueError("seen by the first")

    module.Trainer, module.Evaluator = Trainer, Failing
    try:
        module.train(log, SMALL, device=device)
    except ValueError as error:
        if str(error) != "seen by the first":
            raise
    else:
        sys.exit("the first rank's error was lost")

    # A codebook that is another on one rank is found at the next look.
    class Differing(Trainer):
        def advance(self):
            super().advance()
            self.state.layer.codebooks.data[0, 0, 0] += rank * 1e-6

    module.Trainer, module.Evaluator = Differing, Evaluator
    try:
        module.train(log, dataclasses.replace(SMALL, steps=20), towers=untrained, device=device)
    except ValueError as error:
        if "R and codebooks must be the same on all ranks" not in str(error):
            raise
    else:
        sys.exit("ranks that differ went on")
if rank == 0:
    (Path(output) / f"{world}.json").write_text(json.dumps(told))
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
# All is checked; gloo's threads may still race with the interpreter's end.
os._exit(0)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the same runs told on one rank and on four, and where their folders are."""
    folder = tmp_path_factory.mktemp("runs")
    for world in (4, 1):
        finish(start(TRAINED, world, folder / "store", folder, "cpu"))
    return folder, *(json.loads((folder / f"{world}.json").read_text()) for world in (1, 4))


def test_four_ranks_are_one(told):
    """In the script, R, codebooks and towers are the same on all ranks at every step."""
    _, one, four = told
    assert one.keys() == four.keys()
    for name in one:
        losses = [np.array(those[name]["losses"]) for those in (one, four)]
        assert losses[0].shape == losses[1].shape, name
        assert len(losses[0]) >= 20, name
        np.testing.assert_allclose(losses[1][:20], losses[0][:20], 1e-5, 1e-7, err_msg=name)
        rows = [[dict(row) for row in those[name]["rows"]] for those in (one, four)]
        assert [r["step"] for r in rows[0]] == [r["step"] for r in rows[1]]
        # The codewords' use is counted over all ranks.
        used = [[r["perplexity"] for r in those if "perplexity" in r] for those in rows]
        assert used[1] == pytest.approx(used[0], rel=0.02), name


@pytest.mark.parametrize("name", ["whole", "many items, to the end"])
def test_four_ranks_end_where_one_does(told, name):
    _, one, four = told
    for kind in ("index", "decoded", "full"):
        ends = [those[name]["results"][kind]["recall@100"] for those in (one, four)]
        assert ends[1] == pytest.approx(ends[0], abs=0.01)
    ends = [those[name]["results"]["distortion"] for those in (one, four)]
    assert ends[1] == pytest.approx(ends[0], rel=0.02)
    assert one[name]["results"]["index"]["recall@100"] > 0.3


def test_one_rank_writes(told):
    folder, one, four = told
    for name in one:
        files_of = [
            {
                str(path.relative_to(top))
                for path in top.rglob("*")
                if "tfevents" not in path.name and path.suffix != ".rows"
            }
            for top in (folder / f"1 {name}", folder / f"4 {name}")
        ]
        assert files_of[0] == files_of[1]
        # All ranks write rows, at the last step and the best one.
        rows = [len(list((folder / f"{world} {name}").rglob("*.rows"))) for world in (1, 4)]
        assert rows[1] == 4 * rows[0]
        assert (rows[0] > 0) == name.startswith("many items")
        assert len(list((folder / f"4 {name}" / "tensorboard").iterdir())) == 1
        rows = (folder / f"4 {name}" / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row) for row in rows] == four[name]["rows"]


@pytest.mark.parametrize("name", ["whole", "many items", "many items, lists"])
def test_a_checkpoint_of_ranks_is_one_of_any_number(told, name, monkeypatch):
    """What four ranks left is gone on from by one, in the test's own process."""
    folder, _, four = told
    monkeypatch.setattr("givens.retrieval.state.LARGE", 10_000 if name == "whole" else 100)
    log = click_log(1000, 400, 20_000, drift=0.0)
    run = folder / f"4 {name}"
    config = files.load(run / "checkpoint.safetensors", "checkpoint").metadata
    found = load_index(run / "index.faiss").index
    # Refreshed from the rows of the ranks, which are never together in memory.
    items = checkpoint.open_items(run / "towers.safetensors")
    assert len(refresh(found, load(run / "quantizer.safetensors"), items)) == 0
    index = faiss.serialize_index(found)
    done = train(log, Config(**config["config"]), run, resume=True)
    assert done.rows == four[name]["rows"]
    # Items that share a code are found in any order.
    assert done.results["index"] == pytest.approx(four[name]["results"]["index"], abs=1e-3)
    # The index that four ranks put together is the one that one rank makes of all items.
    again = faiss.serialize_index(load_index(run / "index.faiss").index)
    np.testing.assert_array_equal(index, again)
    towers = checkpoint.load_towers(run / "towers.safetensors")
    assert torch.equal(towers["towers.items.weight"], done.towers.items.weight)


def torchrun(world, *arguments, restarts=0):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world}", f"--max-restarts={restarts}", "-m", "givens", "train"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def clicks(path):
    rng = np.random.default_rng(0)
    users, each = 200, 20
    items = (rng.integers(0, 60, (users, 1)) + rng.integers(0, 10, (users, each))) % 60
    path.write_text("".join(f"{u} {i}\n" for u in range(users) for i in items[u]))
    return path


def the_rank(torchrun, rank):
    """The process of a rank, by what torchrun gave it."""
    found = []
    for children in Path(f"/proc/{torchrun.pid}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"LOCAL_RANK={rank}".encode() in given:
                found.append(pid)
    (pid,) = found
    return pid


OPTIONS = ["--warmup", 40, "--steps", 200, "--every", 10, "--dim", 16, "--subspaces", 4]
OPTIONS += ["--codewords", 16, "--batch", 64]


def wait(process, folder):
    """Wait until a run has a checkpoint with the index."""
    file = folder / "checkpoint.safetensors"
    while process.poll() is None:
        if file.exists() and files.read_header(file).metadata["step"] >= 60:
            break
        time.sleep(0.01)


def kill(process, rank, folder):
    """Kill a rank of a run that has a checkpoint."""
    wait(process, folder)
    os.kill(the_rank(process, rank), signal.SIGKILL)


def the_line(errors):
    """The one line that the ranks of a run say as they end."""
    (line,) = (line for line in errors.splitlines() if line.startswith("givens: "))
    return line


def check_whole(folder):
    """The run of a folder has all its steps, and is finished."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [*range(10, 50, 10), *range(40, 250, 10)]
    assert files.read_header(folder / "checkpoint.safetensors").metadata["step"] == 240
    assert json.loads((folder / "results.json").read_text())["index"]["recall@50"] > 0


def test_a_rank_that_dies_stops_all_and_more_go_on(tmp_path):
    folder, data = tmp_path / "run", clicks(tmp_path / "clicks.txt")
    process = torchrun(2, *OPTIONS, "--data", data, "-o", folder)
    kill(process, 0, folder)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    # Torchrun says which; the other rank sees it or is stopped, and says what to do.
    assert "Signal 9 (SIGKILL)" in errors
    line = the_line(errors)
    assert line.startswith(("givens: a rank was lost (", "givens: interrupted; "))
    assert "--resume to continue" in line
    assert 60 <= files.read_header(folder / "checkpoint.safetensors").metadata["step"] < 240
    assert not (folder / "results.json").exists()

    process = torchrun(4, *OPTIONS, "--data", data, "-o", folder, "--resume")
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    check_whole(folder)
    assert out.count("clicks of 200 users") == out.count("Written in ") == 1
    assert json.loads((folder / "config.json").read_text())["configuration"]["ranks"] == 2


@pytest.mark.parametrize(("how", "world"), [(signal.SIGINT, 4), (signal.SIGTERM, 2)])
def test_ranks_that_are_stopped_say_so_once(tmp_path, how, world):
    folder, data = tmp_path / "run", clicks(tmp_path / "clicks.txt")
    process = torchrun(world, *OPTIONS, "--data", data, "-o", folder)
    wait(process, folder)
    # As a terminal does, which stops torchrun and its ranks.
    os.killpg(process.pid, how)
    _, errors = process.communicate(timeout=240)
    assert the_line(errors).startswith("givens: interrupted; ")
    assert "--resume to continue" in the_line(errors)


def test_ranks_start_again_by_themselves(tmp_path):
    folder, data = tmp_path / "run", clicks(tmp_path / "clicks.txt")
    process = torchrun(2, *OPTIONS, "--data", data, "-o", folder, "--resume", restarts=1)
    kill(process, 1, folder)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "failed (exitcode: -9) local_rank: 1" in errors
    check_whole(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "9"], "batch must be divisible by the number of ranks, but got batch=9 for 2"),
        (["--device", "tpu"], "--device must be cpu or cuda, but got 'tpu'"),
    ],
)
def test_bad_input_is_told_once(tmp_path, options, message):
    data = clicks(tmp_path / "clicks.txt")
    small = ["--dim", 16, "--subspaces", 4, "--codewords", 16, "--warmup", 5, "--steps", 0]
    process = torchrun(2, "-o", tmp_path / "run", "--data", data, *small, *options)
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    assert the_line(errors) == f"givens: {message}"
    assert out == ""
    assert not (tmp_path / "run").exists()


SHARDED = """
import copy, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import givens

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
n, heads = 16, 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(n, n)
        self.rotation = givens.Rotation(n, givens.random_rotation(n, seed=1))
        stack = [givens.random_rotation(n, seed=head) for head in range(heads)]
        self.stack = nn.Parameter(torch.stack(stack))
        self.last = nn.Linear(heads * n, n)
        self.index = givens.IndexLayer(n, 4, 8)

    def turned(self):
        return [self.rotation.weight, self.stack, self.index.rotation.weight]

    def vectors(self, x):
        y = torch.einsum("mn,hnk->mhk", self.rotation(self.first(x)).tanh(), self.stack)
        return self.last(y.flatten(1).tanh())

    def forward(self, x):
        out = self.index(self.vectors(x))
        return (out.embedding - x.flip(1)).square().mean() + out.distortion


def learners(model):
    towers = [*model.first.parameters(), *model.last.parameters()]
    adam = torch.optim.Adam([*towers, *model.index.index_parameters()], 1e-2, foreach=False)
    return [givens.GCD(model.turned(), 0.02), adam]


def mean_over_ranks(W):
    dist.all_reduce(W.grad)
    W.grad /= world


torch.manual_seed(0)
alone = Model()
alone.index.warm_start(alone.vectors(torch.randn(64, n)), 5)
model = copy.deepcopy(alone)
for tower in (model.first, model.last):
    fully_shard(tower, mesh=mesh)
for W in (*model.turned(), *model.index.index_parameters()):
    W.register_post_accumulate_grad_hook(mean_over_ranks)
begun = [W.detach().clone() for W in alone.turned()]
ours, others = learners(model), learners(alone)
data = torch.randn(20, 8 * world, n)
for x in data:
    for net, optimizers, part in ((model, ours, x.chunk(world)[rank]), (alone, others, x)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        net(part).backward()
        for optimizer in optimizers:
            optimizer.step()
for name, part in model.named_parameters():
    wanted = alone.get_parameter(name)
    sharded = isinstance(part, DTensor)
    if sharded != name.startswith(("first.", "last.")):
        sys.exit(f"{name} is {type(part)}")
    whole = part.full_tensor() if sharded else part
    torch.testing.assert_close(whole, wanted, rtol=1e-3, atol=1e-5)
for W, before in zip(model.turned(), begun, strict=True):
    everywhere = [torch.empty_like(W) for _ in range(world)]
    dist.all_gather(everywhere, W.detach())
    if not all(torch.equal(W, V) for V in everywhere):
        sys.exit("ranks differ")
    if torch.allclose(W, before, atol=1e-2):
        sys.exit("nothing was turned")

rotation = givens.Rotation(n)
fully_shard(rotation, mesh=mesh)
try:
    givens.GCD(rotation.parameters(), 0.1)
except ValueError as error:
    if "GCD turns whole matrices, but parameter 0 is a DTensor" not in str(error):
        raise
else:
    sys.exit("a part of a matrix was not refused")
dist.barrier()
dist.destroy_process_group()
# All is checked; gloo's threads may still race with the interpreter's end.
os._exit(0)
"""


def test_towers_are_sharded_beside_rotations_that_every_rank_has(tmp_path):
    """FSDP2, two ranks: as one process on the whole batch, for one rotation and for a stack."""
    finish(start(SHARDED, 2, tmp_path / "store"))


@pytest.mark.cuda
def test_on_a_gpu(tmp_path):
    """Two ranks by gloo on one GPU are as one; and one rank by nccl, which wants a GPU for each."""
    for world in (1, 2):
        finish(start(TRAINED, world, tmp_path / "store", tmp_path, "cuda"))
    one, two = (json.loads((tmp_path / f"{world}.json").read_text()) for world in (1, 2))
    for name in one:
        losses = [np.array(those[name]["losses"])[:20] for those in (one, two)]
        np.testing.assert_allclose(losses[1], losses[0], 1e-2, 1e-4, err_msg=name)
    ends = [those["whole"]["results"]["index"]["recall@100"] for those in (one, two)]
    assert ends[1] == pytest.approx(ends[0], abs=0.02)
    options = ["--warmup", 40, "--steps", 40, "--dim", 16, "--subspaces", 4, "--codewords", 16]
    options += ["--data", clicks(tmp_path / "clicks.txt"), "-o", tmp_path / "run"]
    process = torchrun(1, *options, "--device", "cuda")
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert json.loads((tmp_path / "run" / "results.json").read_text())["agreement"] < 1e-5
