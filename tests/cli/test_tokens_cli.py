import json
import os
import sys

import numpy as np
import pytest
from test_cli import invoke, main_in_process

import givens
from givens.tokens import Ids, Tokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Items and what became of them: 20 have moved, 5 are new and 10 have gone."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    x = generator.standard_normal((400, 8)).astype(np.float32)
    np.save("x.npy", x)
    (tmp_path / "items.txt").write_text("".join(f"item {i}\n" for i in range(400)), "utf-8")
    moved = x.copy()
    moved[50:70] *= -1
    np.save("new.npy", np.concatenate([moved[10:], generator.standard_normal((5, 8))]))
    (tmp_path / "new.txt").write_text("".join(f"item {i}\n" for i in range(10, 405)), "utf-8")
    return tmp_path


def test_ids_and_a_refresh(folder):
    options = ("--items", "items.txt", "--stages", "4", "--subspaces", 2, "--codewords", 8)
    told = invoke("tokens", "x.npy", "-o", "ids.parquet", "--further", *options)
    old = Ids.load(folder / "ids.parquet")
    tokenizer = Tokenizer.load(folder / "ids.safetensors")
    assert tokenizer.sizes == [4, 8, 8]
    assert old.names.tolist() == [f"item {i}" for i in range(400)]
    assert np.array_equal(old.tokens[:, :3], tokenizer.encode(np.load("x.npy")))
    assert len({tuple(row) for row in old.tokens.tolist()}) == 400
    record = json.loads((folder / "ids.parquet.json").read_text())
    assert record["fingerprint"] == tokenizer.fingerprint
    assert record["vocabulary"] == [4, 8, 8, old.tokens[:, 3].max() + 1]
    assert record["distortion"] == pytest.approx(tokenizer.distortion(np.load("x.npy")))
    assert 0 < record["colliding"] < 1
    assert f"Collisions: {100 * record['colliding']:.2f} %" in told

    again = ("--quantizer", "ids.safetensors", "--previous", "ids.parquet", "--items", "new.txt")
    told = invoke("tokens", "new.npy", "-o", "new.parquet", "--further", *again)
    new = Ids.load(folder / "new.parquet")
    before = dict(zip(old.names, old.tokens.tolist(), strict=True))
    now = dict(zip(new.names, new.tokens.tolist(), strict=True))
    changed = {name for name in before.keys() & now.keys() if before[name] != now[name]}
    assert changed <= {f"item {i}" for i in range(50, 70)}
    assert len(changed) > 10
    churn = json.loads((folder / "new.parquet.json").read_text())["churn"]
    assert (churn["changed"], churn["added"], churn["removed"]) == (len(changed), 5, 10)
    assert f"{len(changed)} of 390 items have a new ID; 5 items came, 10 went" in told
    assert not (folder / "new.safetensors").exists()


def test_a_quantizer_from_fit_gives_its_codes(folder):
    invoke("fit", "x.npy", "-o", "q.safetensors", "--subspaces", 2, "--codewords", 8)
    invoke("tokens", "x.npy", "-o", "ids.npy", "--quantizer", "q.safetensors")
    codes = givens.load("q.safetensors").encode(np.load("x.npy")).fine
    assert np.array_equal(np.load("ids.npy"), codes)
    # By their positions, where there are no names: nothing has moved.
    kept = ("--quantizer", "q.safetensors", "--previous", "ids.npy")
    assert "Churn: 0.00 %" in invoke("tokens", "x.npy", "-o", "again.npy", *kept)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x.npy", "-o", "ids.csv"), "ids.csv must end in .parquet or .npy"),
        (("x.npy", "-o", "x.npy"), "--output must not be x.npy, which is read"),
        (
            ("x.npy", "-o", "i.npy", "--items", "new.txt"),
            "must have 400 lines, one a vector, but has 395",
        ),
        (("x.npy", "-o", "i.npy", "--stages", "4;4"), "--stages must be sizes as 256,256"),
        (
            ("x.npy", "-o", "i.npy", "--subspaces", 0, "--stages", 4, "--method", "opq"),
            "no token changes",
        ),
        (("x.npy", "-o", "i.npy", "--previous", "x.npy"), "--previous needs the --quantizer"),
        (("x.npy", "-o", "i.npy", "--quantizer", "no"), "there is no quantizer no"),
        (
            ("x.npy", "-o", "i.npy", "--quantizer", "a.safetensors", "--metric", "cosine"),
            "--metric must be left out with --quantizer",
        ),
        (
            ("x.npy", "-o", "i.npy", "--quantizer", "a.safetensors", "--seed", 0),
            "--seed must be left out with --quantizer",
        ),
        (("x.npy", "-o", "i.npy", "--items", "x.npy"), "--items must be text in UTF-8, but x.npy"),
        (("x.npy", "-o", "model.parquet"), "model.safetensors, which is a file of another program"),
        (("x.npy", "-o", "q.npy"), "q.safetensors, which is a quantizer; choose another --output"),
        (
            ("x.npy", "-o", "i.npy", "--quantizer", "b.safetensors", "--previous", "a.npy"),
            "a.npy.json names another one",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(folder, arguments, message):
    for name, seed in (("a", 0), ("b", 1)):
        small = ("--subspaces", 1, "--codewords", 4, "--seed", seed)
        invoke("tokens", "x.npy", "-o", f"{name}.npy", *small)
    (folder / "model.safetensors").write_bytes(b"weights")
    invoke("fit", "x.npy", "-o", "q.safetensors", "--subspaces", 2, "--codewords", 8)
    before = sorted(os.listdir(folder))  # noqa: PTH208
    done = main_in_process(("tokens", *arguments))
    assert done.code == 1
    assert message in done.error
    assert done.error.count("\n") == 1
    assert sorted(os.listdir(folder)) == before  # noqa: PTH208


def test_without_pyarrow_it_says_so_before_the_work(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = main_in_process(("tokens", "x.npy", "-o", "ids.parquet"))
    assert "pip install 'givens[formats]', or write .npy" in done.error
