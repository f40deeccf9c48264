"""Whole runs in small: what is learned, what is kept, and what a kill leaves."""

import dataclasses
import gc
import json
import signal
import time
import weakref
from typing import get_args

import numpy as np
import pytest
import torch
from ranks import finish, start

import givens
from givens.export.faiss import load_index
from givens.kernels.gpu import replay
from givens.retrieval import checkpoint, evaluate
from givens.retrieval.batches import Examples
from givens.retrieval.config import Config, Method
from givens.retrieval.data import click_log, split
from givens.retrieval.evaluate import Evaluator
from givens.retrieval.state import State
from givens.retrieval.train import train
from givens.retrieval.trainer import Trainer
from givens.storage import files

SMALL = Config(
    dim=16,
    subspaces=4,
    codewords=16,
    history=20,
    batch=128,
    lr=1e-2,
    joint_lr=1e-2,
    temperature=0.1,
    warmup=60,
    steps=40,
    every=20,
    sample=400,
    iterations=5,
)


@pytest.fixture(scope="module")
def log():
    return click_log(1000, 400, 20_000, drift=0.0)


def changed(**options):
    return dataclasses.replace(SMALL, **options)


def parts_of(log, config):
    """A state, and what trains and measures it."""
    state = State(log, config)
    examples = Examples(log, history=config.history, ahead=config.ahead, seed=config.seed)
    return state, Trainer(state, examples), Evaluator(state, examples)


def test_it_learns_and_the_index_is_what_the_model_scores(log, tmp_path):
    config = changed(warmup=200, steps=100, dim=32, subspaces=8, codewords=64, batch=256)
    done = train(log, config, tmp_path)
    results = done.results
    assert results["index"]["recall@100"] > results["popularity"]["recall@100"] + 0.02
    assert results["index"]["ndcg@10"] > 1.5 * results["popularity"]["ndcg@10"]
    assert results["index"] == pytest.approx(results["decoded"], abs=2e-3)
    assert results["agreement"] < 1e-5
    # What lies in the folder is what was measured.
    q = givens.load(tmp_path / "quantizer.safetensors")
    stored = load_index(tmp_path / "index.faiss")
    assert stored.record["fingerprint"] == q.fingerprint == done.quantizer.fingerprint
    state, trainer, _ = parts_of(log, config)
    state.load_parts(checkpoint.load_towers(tmp_path / "towers.safetensors"))
    held = trainer.examples.hold_out(log.test)
    with torch.no_grad():
        users, items = state.towers.user(held.inputs), state.towers.item()
    found = evaluate.search(stored.index, users, held, 100)
    assert evaluate.compute_metrics(found.items, held, log.catalogue) == pytest.approx(
        results["index"]
    )
    assert q.distortion(items) == pytest.approx(results["distortion"])
    # Both phases end with the best look of theirs.
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == done.rows
    joint = [row for row in rows if row["phase"] == "joint"]
    best = max(joint, key=lambda row: row["recall"])
    assert results["best_step"] == best["step"]
    assert [row["step"] for row in joint] == [200, 220, 240, 260, 280, 300]
    towers = [row for row in rows if row["phase"] == "towers"]
    assert joint[0]["recall_full"] == max(row["recall"] for row in towers)
    assert all(row["orthogonality"] < 1e-5 for row in joint)
    assert joint[0]["angle"] == 0 < joint[1]["angle"]
    assert any((tmp_path / "tensorboard").iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {"method": "frozen"},
        {"method": "cayley", "start": "random"},
        {"method": "expm", "negatives": 50},
        {"method": "penalty", "loss": "hinge", "negatives": 0},
        {"method": "gcd-random", "start": "identity", "fixed_items": True},
        {"method": "gcd-steepest", "exact": True, "stream": True},
        {"method": "gcd", "coarse": 8},
        {"method": "pogo", "angle": 0.1},
        {"method": "jpq", "coarse": 8},
        {"method": "post-hoc", "pool": "mean"},
        {"method": "post-hoc-fit", "coarse": 8},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_methods(log, options):
    config = changed(**options)
    done = train(log, config)
    assert done.results["index"]["recall@100"] > 0
    items = done.towers.item().detach()
    nearest = done.quantizer.distortion(items)
    if config.method == "jpq":
        assert done.results["distortion"] > nearest
    else:
        assert done.results["distortion"] == pytest.approx(nearest)
    assert givens.orthogonality_error(done.quantizer.rotation) < 1e-5
    joint = [row for row in done.rows if row["phase"] == "joint"]
    assert bool(joint) == (not config.method.startswith("post-hoc"))
    if config.method in ("frozen", "jpq"):
        assert all(row["angle"] == 0 for row in joint)
    elif joint:
        assert joint[-1]["angle"] > 0
    if config.start == "identity":
        assert joint[0]["distortion"] > 0
    if config.fixed_items or config.method == "jpq":
        # The items stay where the warm-up left them.
        before = train(log, changed(steps=0))
        assert torch.equal(before.towers.item(), done.towers.item())


@pytest.mark.parametrize("coarse", [0, 8])
def test_jpq_trains_codebooks_and_users_under_codes_that_stay(log, tmp_path, coarse):
    config = changed(method="jpq", coarse=coarse, warmup=20, steps=60, joint_lr=3e-2)
    done = train(log, config, tmp_path)
    joint = [row for row in done.rows if row["phase"] == "joint"]
    assert max(row["recall"] for row in joint) > joint[0]["recall"] + 0.01
    start, items = givens.load(tmp_path / "start.safetensors"), done.towers.item().detach()
    codes = start.encode(items)
    assert torch.equal(done.quantizer.rotation, start.rotation)
    assert not torch.equal(done.quantizer.codebooks, start.codebooks)
    # The index holds these codes, not those of the nearest codewords.
    index = load_index(tmp_path / "index.faiss").index
    held = torch.from_numpy(index.reconstruct_n(0, index.ntotal))
    torch.testing.assert_close(held, done.quantizer.decode(codes), atol=1e-5, rtol=0)
    assert (done.quantizer.encode(items).fine != codes.fine).any()


def test_no_gradient_stands_out_in_the_first_steps(log):
    """A history that dropout hides whole once had one of 1e10, after which Adam stood still."""
    state, trainer, _ = parts_of(log, changed(dim=64, subspaces=8, dropout=0.5))
    norms = []
    for _ in range(100):
        trainer.advance()
        parts = [part.grad.norm() for part in state.towers.parameters()]
        norms.append(float(torch.stack(parts).norm()))
    assert max(norms) < 100 * np.median(norms)


def test_in_a_small_catalogue_the_best_step_is_looked_for():
    """Whoever is given all 60 items finds everything, at every step alike."""
    done = train(click_log(300, 60, 6000, drift=0.0), changed(sample=60))
    assert len({row["recall"] for row in done.rows}) > 3
    assert all(row["recall"] < 1 for row in done.rows)


@pytest.mark.parametrize("method", ["gcd", "frozen"])
def test_without_steps_the_index_is_as_it_starts(log, tmp_path, method):
    done = train(log, changed(steps=0, method=method), tmp_path)
    start = givens.load(tmp_path / "start.safetensors")
    assert done.quantizer.fingerprint == start.fingerprint
    again = train(log, changed(steps=0, method=method), tmp_path, resume=True)
    assert again.quantizer.fingerprint == start.fingerprint
    assert again.rows == done.rows


def test_a_checkpoint_of_many_looks(log, tmp_path):
    state, trainer, evaluator = parts_of(log, SMALL)
    trainer.advance()
    evaluator.evaluate(trainer.take_losses())
    state.rows = state.rows * 10_000
    checkpoint.save(state, tmp_path / "run.safetensors")
    again = State(log, SMALL)
    checkpoint.load(again, tmp_path / "run.safetensors")
    assert again.rows == state.rows
    with pytest.raises(ValueError, match="too many to be read"):
        files.save(tmp_path / "long", "towers", {}, {"text": "x" * 2_000_000})
    assert not (tmp_path / "long").exists()


def test_another_run_in_the_folder_is_not_finished_before_it_is(log, tmp_path):
    train(log, changed(warmup=20, steps=20), tmp_path)

    def stop(row):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        train(log, changed(warmup=20, steps=20, seed=7), tmp_path, tell=stop)
    assert not (tmp_path / "results.json").exists()


def test_the_items_keep_their_names(log, tmp_path):
    names = np.array([f"item {number}" for number in range(log.catalogue)])
    train(dataclasses.replace(log, names=names), changed(warmup=20, steps=20), tmp_path)
    assert (tmp_path / "items.txt").read_text("utf-8").splitlines() == names.tolist()


def test_methods_share_a_warm_up(log, tmp_path):
    train(log, changed(steps=0), tmp_path)
    towers = checkpoint.load_towers(tmp_path / "towers.safetensors")
    whole = train(log, changed(method="frozen"))
    again = train(log, changed(method="frozen"), towers=towers)
    assert again.rows == [row for row in whole.rows if row["phase"] == "joint"]
    assert again.results == whole.results


def test_a_run_leaves_nothing_behind(log):
    """Its towers and optimizers may be gigabytes, which the next run needs."""
    gc.disable()
    try:
        state, trainer, evaluator = parts_of(log, changed(warmup=2, steps=2))
        while state.step < 4:
            if state.step == 2:
                evaluator.evaluate(trainer.take_losses())
                trainer.begin_joint()
            trainer.advance()
        gone = [weakref.ref(part) for part in (state, trainer, evaluator)]
        del state, trainer, evaluator
        assert [part() for part in gone] == [None] * 3
    finally:
        gc.enable()


def test_of_many_items_a_step_moves_those_it_sees(log, monkeypatch):
    monkeypatch.setattr("givens.retrieval.state.LARGE", 100)
    state, trainer, _ = parts_of(log, changed(negatives=20, batch=64))
    before = state.towers.items.weight.detach().clone()
    _, target = trainer.examples.draw(0, 64)
    trainer.advance()
    moved = (state.towers.items.weight != before).any(1)
    assert moved[target].all()
    assert 0 < int(moved.sum()) <= 64 + 20
    assert state.towers.items.weight.grad.is_sparse


def test_of_many_items_it_learns_and_resumes_bit_for_bit(log, tmp_path, monkeypatch):
    monkeypatch.setattr("givens.retrieval.state.LARGE", 100)
    config = changed(warmup=200, steps=60, dim=32, subspaces=8, negatives=100, lr=2e-2, every=20)
    whole = train(log, config)
    assert whole.results["index"]["recall@100"] > whole.results["popularity"]["recall@100"] + 0.02

    def stop(row):
        if row["step"] == 220:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(log, config, tmp_path, tell=stop)
    done = train(log, config, tmp_path, resume=True)
    assert done.rows == whole.rows
    assert done.results == whole.results


def test_a_query_is_words_without_a_history():
    log = click_log(1000, 400, 20_000, drift=0.0, words=40)
    done = train(log, changed(history=0, warmup=200, dim=32, subspaces=8, codewords=64, batch=256))
    results = done.results
    assert results["index"]["ndcg@10"] > 1.2 * results["popularity"]["ndcg@10"]


COMMAND = """
import sys
from givens.cli import main

del sys.argv[1]
main()
"""


def test_killed_and_resumed_bit_for_bit(tmp_path):
    """A run that is killed ends as one that is not."""
    plain = tmp_path / "plain.txt"
    rng = np.random.default_rng(0)
    users, clicks = 200, 20
    items = (rng.integers(0, 60, (users, 1)) + rng.integers(0, 10, (users, clicks))) % 60
    plain.write_text("".join(f"{u} {i}\n" for u in range(users) for i in items[u]))
    options = "--warmup 40 --steps 120 --every 10 --dim 16 --subspaces 4 --codewords 16 --batch 64"
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def begin(folder, *more):
        command = ["train", "-o", folder, "--data", plain, *options.split(), *more]
        return start(COMMAND, 1, folder, *command)

    together = [*begin(whole), *begin(killed)]
    file, process = killed / "checkpoint.safetensors", together[1].process
    while process.is_alive():
        if file.exists() and files.read_header(file).metadata["step"] >= 80:
            break
        time.sleep(0.01)
    process.kill()
    finish(together, [0, -signal.SIGKILL])
    assert files.read_header(file).metadata["step"] < 160
    finish(begin(killed, "--resume"))
    for name in ("towers.safetensors", "quantizer.safetensors", "metrics.jsonl", "results.json"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes(), name
    assert (whole / "index.faiss").read_bytes() == (killed / "index.faiss").read_bytes()


@pytest.mark.parametrize("method", get_args(Method))
def test_stopped_and_resumed_bit_for_bit(log, tmp_path, method):
    """The same for every method, stopped in both phases."""
    config = changed(method=method, warmup=30, steps=30, every=10)
    whole = train(log, config)
    for at in (20, 40):

        def stop(row, at=at):
            if row["step"] == at:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            train(log, config, tmp_path, resume=True, tell=stop)
    done = train(log, config, tmp_path, resume=True)
    assert done.rows == whole.rows
    assert done.results == whole.results
    for name, part in whole.towers.state_dict().items():
        assert torch.equal(done.towers.state_dict()[name], part)
    assert done.quantizer.fingerprint == whole.quantizer.fingerprint


def test_another_configuration_is_refused(log, tmp_path):
    train(log, changed(steps=0, warmup=20), tmp_path)
    with pytest.raises(ValueError, match=r"was made with dim=16, but got dim=32; give the same"):
        train(log, changed(steps=0, warmup=20, dim=32), tmp_path, resume=True)


def test_a_checkpoint_of_another_log_is_refused(log, tmp_path):
    train(log, changed(steps=0, warmup=20), tmp_path)
    other = click_log(600, 300, 12_000, seed=5)
    with pytest.raises(ValueError, match="was made from another log"):
        train(other, changed(steps=0, warmup=20), tmp_path, resume=True)


def test_other_rules_are_refused_even_where_they_keep_the_same_rows(tmp_path):
    rng = np.random.default_rng(0)
    user, item = np.repeat(np.arange(100), 20), rng.integers(0, 60, 2000)
    first, other = (split(user, item, min_items=least) for least in (10, 12))
    assert first.fingerprint == other.fingerprint
    config = changed(warmup=2, steps=0)
    train(first, config, tmp_path)
    with pytest.raises(ValueError, match="was made with min_items=10, but got min_items=12; give"):
        train(other, config, tmp_path, resume=True)


def test_a_loss_that_is_not_finite_stops_with_the_last_good_checkpoint(log, tmp_path):
    class Poisoned(Trainer):
        def compute_losses(self, *batch):
            retrieval, distortion = super().compute_losses(*batch)
            return retrieval * (float("nan") if self.state.step == 47 else 1), distortion

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("givens.retrieval.train.Trainer", Poisoned)
        with pytest.raises(ValueError, match=r"not finite at step 47: retrieval nan, distortion 0"):
            train(log, SMALL, tmp_path)
    assert files.read_header(tmp_path / "checkpoint.safetensors").metadata["step"] == 40
    done = train(log, SMALL, tmp_path, resume=True)
    assert done.rows == train(log, SMALL).rows


@pytest.mark.cuda
@pytest.mark.parametrize("negatives", [None, 100])
def test_recorded_steps_are_steps(log, negatives, monkeypatch):
    config = changed(dim=32, subspaces=8, negatives=negatives)
    losses = []
    for plain in (replay.PLAIN, config.total):
        monkeypatch.setattr(replay, "PLAIN", plain)
        losses.append(
            [row["loss"] for row in train(log, config, device="cuda").rows if "loss" in row]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("method", get_args(Method))
def test_on_a_gpu(log, tmp_path, method):
    """The same there, stopped and resumed; sums are added up in another order each time."""
    config = changed(method=method, dim=32, subspaces=8, negatives=100)

    def stop(row):
        if row["step"] == 80:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(log, config, tmp_path, device="cuda", tell=stop)
    done = train(log, config, tmp_path, resume=True, device="cuda")
    here = train(log, config)
    assert [row["step"] for row in done.rows] == [row["step"] for row in here.rows]
    assert done.results["agreement"] < 1e-5
    assert done.results["distortion"] == pytest.approx(here.results["distortion"], rel=0.2)
