"""`givens train`: its options, what it says, and what it leaves behind."""

import dataclasses
import json
import sys
import typing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_cli import invoke, main_in_process, names

from givens.retrieval.config import Config

TRAIN = "--warmup 20 --steps 20 --every 10 --dim 16 --subspaces 4 --codewords 16 --batch 32"


@pytest.fixture
def clicks(tmp_path):
    rng = np.random.default_rng(0)
    items = (rng.integers(0, 60, (100, 1)) + rng.integers(0, 10, (100, 20))) % 60
    lines = [f"{user} {item}\n" for user in range(100) for item in items[user]]
    (tmp_path / "clicks.txt").write_text("".join(lines))
    return tmp_path


def test_train_streams_a_folder_of_parquet_files(clicks, monkeypatch):
    monkeypatch.chdir(clicks)
    user, item = np.loadtxt("clicks.txt", np.int64).T
    table = {"user_id": pa.array(np.char.add("u", user.astype(str))), "movieId": item}
    (clicks / "log").mkdir()
    pq.write_table(pa.table(table), "log/a.parquet", row_group_size=300)
    told = invoke("train", "-o", "run", "--data", "log", *TRAIN.split())
    assert "log: 2,000 clicks of 100 users on 60 items; 20 users held out" in told
    assert "streamed from 1 files in 7 row groups" in told
    assert "sorted" not in told
    assert (clicks / "run" / "items.txt").read_text().split() == [*map(str, range(60))]
    # Gone on with after a file was touched: the same rows, and said so.
    (clicks / "log" / "a.parquet").touch()
    told = invoke("train", "-o", "run", "--data", "log", *TRAIN.split(), "--resume")
    assert "a.parquet has changed since run/log.safetensors was written" in told
    # Of other rows, it is no longer the same run.
    pq.write_table(pa.table({**table, "movieId": item[::-1]}), "log/a.parquet")
    done = main_in_process(["train", "-o", "run", "--data", "log", *TRAIN.split(), "--resume"])
    assert "checkpoint.safetensors was made from another log than log" in done.error
    # By time, as most logs come.
    order = np.argsort(np.arange(2000) % 20, kind="stable")
    pq.write_table(pa.table(table).take(order), "log/a.parquet")
    told = invoke("train", "-o", "hashed", "--data", "log", *TRAIN.split(), "--hash-items", 50)
    assert "its 2,000 rows are sorted into hashed/log" in told
    assert "on 50 rows that items share by a hash" in told
    assert "items.txt" not in told
    config = json.loads((clicks / "hashed" / "config.json").read_text())
    assert config["configuration"]["hash_items"] == 50
    assert not (clicks / "hashed" / "items.txt").exists()
    # Nothing is written among the files that are read.
    done = main_in_process(["train", "-o", "log", "--data", "log", *TRAIN.split()])
    assert "--output must not be log" in done.error
    assert [*names(clicks / "log")] == ["a.parquet"]


def test_train_leaves_a_run_that_other_commands_read(clicks, monkeypatch):
    monkeypatch.chdir(clicks)
    told = invoke("train", "-o", "run", "--data", "clicks.txt", *TRAIN.split(), "--coarse", 4)
    assert "clicks.txt: 2,000 clicks of 100 users on 60 items; 20 users held out" in told
    assert "index, 2 bytes: precision@10" in told
    assert (clicks / "run" / "items.txt").read_text().splitlines() == sorted(
        {line.split()[1] for line in (clicks / "clicks.txt").read_text().splitlines()}, key=int
    )
    assert "Next: givens report run -o report.html" in told
    assert {"config.json", "metrics.jsonl", "results.json", "index.faiss", "index.faiss.json"} < {
        *names(clicks / "run")
    }
    config = json.loads((clicks / "run" / "config.json").read_text())
    assert config["configuration"]["method"] == "gcd"
    assert config["configuration"]["data"] == "clicks.txt"
    assert config["seed"] == 0
    assert {"torch", "givens"} <= set(config["versions"])
    rows = [
        json.loads(line) for line in (clicks / "run" / "metrics.jsonl").read_text().split("\n")[:-1]
    ]
    assert [row["step"] for row in rows] == [10, 20, 20, 30, 40]
    assert {"loss", "distortion", "recall", "orthogonality", "perplexity", "dead", "angle"} < {
        *rows[-1]
    }
    assert "16" in invoke("inspect", "run/quantizer.safetensors")
    np.save("queries.npy", np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32))
    assert "among 60 vectors" in invoke("search", "run/index.faiss", "queries.npy", "-k", 5)
    assert config["seconds"] > 0
    monkeypatch.setattr("givens.report.measure.SECONDS", 0.02)
    told = invoke("report", "run", "-o", "r.html")
    assert "GCD: with 2 bytes an item it finds" in told
    assert "Written: r.html (" in told
    # There are not 100 items to be found.
    assert "recall@50, index" in (clicks / "r.html").read_text()


def test_train_says_what_it_drops_and_keeps_the_rules(clicks, monkeypatch):
    monkeypatch.chdir(clicks)
    with (clicks / "clicks.txt").open("a") as file:
        file.writelines(f"{user} {item}\n" for user in range(100, 130) for item in range(7))
    command = ["train", "-o", "run", "--data", "clicks.txt", *TRAIN.split()]
    told = invoke(*command, "--min-items", 8)
    assert "Left out: 30 of 130 users have under 8 items (--min-items, --min-rating)" in told
    about = json.loads((clicks / "run" / "config.json").read_text())
    assert (about["configuration"]["min_items"], about["configuration"]["min_rating"]) == (8, 4)
    assert (about["selection"]["small_users"], about["selection"]["users"]) == (30, 130)
    # Another rule keeps other users, or the same: a run is not continued under it.
    for least in (7, 9):
        done = main_in_process([*command, "--min-items", least, "--resume"])
        assert (done.code, len(done.error.splitlines())) == (1, 1)
        assert f"was made with min_items=8, but got min_items={least}; give the" in done.error


def test_an_index_worse_than_popularity_is_said_first(clicks, monkeypatch):
    monkeypatch.chdir(clicks)
    # Everybody likes the same items; towers that have learned nothing do not know.
    with (clicks / "clicks.txt").open("w") as file:
        for user in range(100):
            own = [user % 50 + 20, *range(user % 10, user % 10 + 9)]
            file.writelines(f"{user} {item}\n" for item in own)
    options = [*TRAIN.split(), "--warmup", 1, "--steps", 0, "--lr", 1e-9]
    told = invoke("train", "-o", "run", "--data", "clicks.txt", *options)
    assert "Warning: recall@50 of the index" in told
    assert told.index("Warning: ") < told.index("full precision")


def test_every_option_of_a_run_is_one_of_train():
    help_ = " ".join(invoke("train", "--help").replace("│", " ").split())
    for field in dataclasses.fields(Config):
        assert f"--{field.name.replace('_', '-')} " in help_
        assert " ".join(typing.get_args(field.type)[1].text.split()) in help_
    assert "[default: 4.0]" in help_


def test_the_time_of_a_phase_is_told_from_its_first_steps(monkeypatch, capsys):
    """A step of 3 s, of which the first ones take longer; then one of 6 s with the index."""
    module = sys.modules["givens.cli.train"]
    now = 0.0
    monkeypatch.setattr(module.Clock, "_read", lambda _: now)
    config = Config(warmup=100, steps=60)
    clock = module.Clock(type("Bar", (), {"stand": lambda *_: None})(), config, torch.device("cpu"))
    for step in range(1, 161):
        now += 50 if step in (1, 101) else 3 if step <= 100 else 6
        clock.count(step)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        "Warm-up: about 4 min for the remaining 74 steps",
        "With the index: about 3 min for the remaining 34 steps",
    ]


def test_a_resumed_run_has_the_seconds_of_all_its_parts(clicks, monkeypatch):
    monkeypatch.chdir(clicks)
    command = ["train", "-o", "run", "--data", "clicks.txt", *TRAIN.split()]

    def stop(row):
        if row["step"] == 30:
            raise ValueError("stopped")
        return ""

    train = sys.modules["givens.cli.train"]
    with monkeypatch.context() as patch:
        patch.setattr(train, "_describe_row", stop)
        with pytest.raises(ValueError, match="stopped"):
            invoke(*command)
    path = clicks / "run" / "config.json"
    about = json.loads(path.read_text())
    assert about["seconds"] > 0
    path.write_text(json.dumps({**about, "seconds": 1000.0}))
    invoke(*command, "--resume")
    done = json.loads(path.read_text())
    assert 1000 < done["seconds"] < 1100
    assert {**done, "seconds": 0} == {**about, "seconds": 0}
    # Where those of a part are not known, none are told.
    path.write_text(json.dumps({**about, "seconds": None}))
    invoke(*command, "--resume")
    assert json.loads(path.read_text())["seconds"] is None
    path.write_text("{")
    done = main_in_process([*command, "--resume"])
    assert (done.code, len(done.error.splitlines())) == (1, 1)
    assert "config.json is damaged" in done.error


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data missing", "there is no log missing"),
        ("--method svd", "method must be one of 'frozen', 'cayley', 'expm', 'pogo'"),
        ("--codewords 100", "clicks.txt must have at least as many items as codewords, but has 60"),
        ("--dim 18", "dim must be divisible by"),
        ("--pool max", "pool must be one of 'mean', 'attention'"),
        ("--lr 1e38", "the loss is not finite at step"),
        ("--lr 0", "lr must be finite, above 0, but got lr=0.0"),
        ("--device tpu", "--device must be cpu or cuda"),
        ("--size huge", "size must be one of 'small', 'medium', 'large', but got 'huge'"),
        ("--min-items 21", "none has 21 items in 2,000 rows; lower min_items"),
        ("--min-items 1", "min_items must be at least 2, but got min_items=1"),
        ("--min-rating nan", "min_rating must be finite"),
    ],
)
def test_train_bad_input_is_one_line(clicks, monkeypatch, options, message):
    monkeypatch.chdir(clicks)
    arguments = ["train", "-o", "run", "--data", "clicks.txt", *TRAIN.split(), *options.split()]
    done = main_in_process(arguments)
    assert done.code == 1
    assert message in done.error
    assert len(done.error.splitlines()) == 1
