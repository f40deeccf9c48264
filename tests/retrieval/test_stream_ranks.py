"""Ranks that stream a log together (gloo, on a CPU): they draw what one draws."""

import json

import numpy as np
import pytest
from ranks import finish, start
from test_cli import main_in_process
from test_ranks import torchrun

from givens.retrieval import parquet

STREAMED = """
import dataclasses, json, os, sys
from pathlib import Path

import torch
import torch.distributed as dist

from givens import distributed
from givens.retrieval import streams
from givens.retrieval import train as module
from givens.retrieval.batches import open_examples
from givens.retrieval.config import Config
from givens.retrieval.readers import read
from givens.retrieval.trainer import Trainer

store, data, output = sys.argv[1:]
world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
streams.WINDOW = 300
data, output = Path(data), Path(output)
log = read(data, folder=output / f"log {world}")
told = {"fingerprint": log.fingerprint}

# Whole batches, with dropout: 100 is no multiple of the streams, and 8 are fewer than those.
for batch in (64, 100, 8):
    examples = open_examples(log, history=5, ahead=3, seed=2)
    drawn = []
    for step in (0, 1, 2, 60, 61, 400, 3):
        inputs, target = examples.draw(step, batch, dropout=0.3)
        history = distributed.gather_rows(inputs.history, batch)
        drawn.append([history.tolist(), target.tolist(), examples.draw_items(3).tolist()])
    told[f"drawn {batch}"] = drawn
    own = {key[0] for key in examples.windows}
    if batch == 64 and len(own) > 16 / world:
        sys.exit(f"rank {rank} of {world} reads the streams {own}")

SMALL = Config(
    dim=16, subspaces=4, codewords=16, history=20, batch=128, lr=1e-2, joint_lr=1e-2,
    temperature=0.1, warmup=30, steps=20, every=10, sample=399, iterations=5, negatives=64,
)
losses = []


class Watched(Trainer):
    def advance(self):
        super().advance()
        losses.append(self.pending[-1].tolist())


module.Trainer = Watched
done = module.train(log, SMALL, output / f"run {world}")
told |= {"losses": [*losses], "rows": done.rows}

# Ended in an epoch and gone on with by fewer.
class Stopped(Exception):
    pass


def stop(row):
    if row["step"] == 20:
        raise Stopped


if world == 4:
    class Stopping(Trainer):
        def advance(self):
            super().advance()
            if self.state.step == 25:
                raise Stopped

    module.Trainer = Stopping
    try:
        module.train(log, SMALL, output / "stopped")
    except Stopped:
        pass
if world == 2:
    losses.clear()
    module.train(log, SMALL, output / "stopped", resume=True)
    told["resumed"] = losses

# A file that is damaged where one rank reads it ends all of them, with its line.
if world > 1:
    distributed.from_first(lambda: None)
    bad = read(data, folder=output / f"log {world}")
    if rank == world - 1:
        bad.source.files[:] = [output / "nothing.parquet"] * len(bad.source.files)
        bad.source._last = (-1, None)
    examples = open_examples(bad, history=5, ahead=3)
    try:
        examples.draw(0, 64)
    except FileNotFoundError as error:
        if "there is no file" not in str(error):
            raise
    else:
        sys.exit("a lost file was not told of")
    # A rank that sees other files.
    try:
        read(data if rank == 0 else output / "other", folder=output / f"log {world}")
    except ValueError as error:
        if "must hold the same files for all ranks" not in str(error):
            raise
    else:
        sys.exit("other files were not told of")
    # Without a folder each reads for itself.
    if read(data).fingerprint != log.fingerprint:
        sys.exit("another log")
if rank == 0:
    (output / f"{world}.json").write_text(json.dumps(told))
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
os._exit(0)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    parquet.write_clicks(folder / "log", 600, 400, 12_000, file=1000)
    parquet.write_clicks(folder / "other", 600, 400, 12_000, file=1000, seed=1)
    return folder


@pytest.fixture(scope="module")
def told(data):
    for world in (4, 2, 1):
        finish(start(STREAMED, world, data / f"store {world}", data / "log", data))
    return {world: json.loads((data / f"{world}.json").read_text()) for world in (1, 2, 4)}


def test_ranks_draw_what_one_draws(told):
    for name in told[1]:
        if name.startswith(("drawn", "fingerprint")):
            assert told[1][name] == told[2][name] == told[4][name], name
    assert len(set(map(str, told[1]["drawn 64"]))) == 7


def test_ranks_learn_what_one_learns(told):
    losses = {world: np.array(those["losses"]) for world, those in told.items()}
    assert len(losses[1]) == 50
    for world in (2, 4):
        np.testing.assert_allclose(losses[world][:20], losses[1][:20], 1e-5, 1e-7)
        assert [row["step"] for row in told[world]["rows"]] == [10, 20, 30, 30, 40, 50]


def test_fewer_ranks_go_on_with_the_same_order(told):
    """The run stopped after step 25; its last checkpoint is of step 20."""
    resumed = np.array(told[2]["resumed"])
    assert len(resumed) == 30
    np.testing.assert_allclose(resumed[:10], np.array(told[1]["losses"])[20:30], 1e-4, 1e-6)


def test_on_the_command_line(data, tmp_path):
    options = ["--warmup", 20, "--steps", 10, "--every", 10, "--dim", 16, "--subspaces", 4]
    options += ["--codewords", 16, "--batch", 64, "--data", data / "log"]
    process = torchrun(2, *options, "-o", tmp_path / "run")
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert out.count("streamed from 12 files in 12 row groups") == 1
    assert json.loads((tmp_path / "run" / "results.json").read_text())["index"]["recall@50"] > 0
    names = (tmp_path / "run" / "items.txt").read_text().splitlines()
    assert names == sorted(names, key=int)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stream"], "stream must be left out for log: Parquet files are read user by user"),
        (["--dim", "63"], "dim must be divisible by subspaces"),
        (["--hash-items", "0"], "hash_items must be at least 1, but got hash_items=0"),
        (["--min-items", "99999"], "log has no valid users: none has 99999 items"),
    ],
)
def test_bad_options_are_one_line(data, tmp_path, options, message):
    command = ["train", "-o", tmp_path / "run", "--data", data / "log", "--size", "small"]
    done = main_in_process([*command, *options])
    assert done.code == 1
    assert done.error.startswith(f"givens: {message}")
    assert len(done.error.splitlines()) == 1
    # Refused before the log was read.
    assert not (tmp_path / "run" / "log.safetensors").exists()
