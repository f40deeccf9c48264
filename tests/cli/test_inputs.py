import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import faiss
import numpy as np
import pytest
from test_cli import invoke, main_in_process

import givens
from givens.cli import output as out
from givens.export.faiss import inverted, load_index

WORDS = [f"word {i}" if i % 3 == 0 else f"w{i}" for i in range(300)]


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Word vectors as text, two of them the same, and the same as an array."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    x[7] = x[5]
    lines = (f"{w} {' '.join(map(str, row))}" for w, row in zip(WORDS, x.tolist(), strict=True))
    (tmp_path / "glove.txt").write_text("\n".join(lines), "utf-8")
    np.save("x.npy", x)
    return x


def test_word_vectors_are_searched_by_their_words(words, tmp_path):
    invoke("fit", "glove.txt", "-o", "q.safetensors", "--subspaces", 4, "--codewords", 16)
    told = invoke("build", "q.safetensors", "glove.txt", "-o", "index.faiss")
    assert "index.faiss.items.txt" in told
    assert (tmp_path / "index.faiss.items.txt").read_text("utf-8").splitlines() == WORDS
    np.save("queries.npy", words[[5, 9]])
    told = invoke("search", "index.faiss", "queries.npy", "-k", 3, "--rerank", "x.npy")
    found = {line.partition(": ")[2] for line in told.splitlines() if line.startswith("0: ")}
    assert {", ".join(line.split(", ")[:2]) for line in found} <= {
        "w5, w7",
        "w7, w5",
    }
    assert "dimension  8" in invoke("inspect", "glove.txt")
    # An index of other vectors has no words, and those of the one before it are gone.
    invoke("build", "q.safetensors", "x.npy", "-o", "index.faiss")
    assert not (tmp_path / "index.faiss.items.txt").exists()
    assert "w5" not in invoke("search", "index.faiss", "queries.npy", "-k", 3)
    # Tokens are the words' own.
    invoke("tokens", "glove.txt", "-o", "ids.parquet", "--quantizer", "q.safetensors")
    assert givens.tokens.Ids.load("ids.parquet").names.tolist() == WORDS


def test_names_of_a_list_that_is_not_the_index_s_are_not_taken(words, tmp_path):
    invoke("fit", "x.npy", "-o", "q.safetensors", "--subspaces", 4, "--codewords", 16)
    invoke("build", "q.safetensors", "x.npy", "-o", "index.faiss")
    (tmp_path / "items.txt").write_text("something\nelse\n")
    assert out.read_names(tmp_path / "index.faiss", {0}) is None


@pytest.mark.parametrize("kind", ["pq", "hnswpq", "ivfpq"])
@pytest.mark.parametrize("refine", [False, True])
def test_build_knows_the_graph_and_the_second_look(words, kind, refine):
    lists = ("--coarse", 4) if kind == "ivfpq" else ()
    invoke("fit", "x.npy", "-o", "q.safetensors", "--subspaces", 4, "--codewords", 16, *lists)
    options = ("--kind", kind, *["--refine"] * refine)
    invoke("build", "q.safetensors", "x.npy", "-o", "index.faiss", *options)
    index = load_index("index.faiss").index
    assert isinstance(index, faiss.IndexRefineFlat) == refine
    if inverted(index) is not None:
        inverted(index).nprobe = 4
    values, found = index.search(words[20:40], 1)
    if refine:
        assert np.array_equal(found[:, 0], np.arange(20, 40))
        assert (values == 0).all()
    told = invoke("inspect", "index.faiss")
    assert givens.load("q.safetensors").fingerprint in told
    if kind == "ivfpq" and refine:
        done = main_in_process(
            ("build", "q.safetensors", "x.npy", "-o", "s", "--shards", "--refine")
        )
        assert "--refine keeps vectors in one file" in done.error


def test_off_a_terminal_there_is_a_line_at_times(monkeypatch):
    """However long the work says nothing itself, and not once it is done."""
    monkeypatch.setattr(out, "LINE_EVERY", 0.05)
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with out.progress("encoding") as bar:
        time.sleep(0.12)
        bar.start(400)
        bar.advance(100)
        time.sleep(0.12)
        bar.stand(300, 400, "distortion 3")
        time.sleep(0.12)
    lines = stderr.getvalue().splitlines()
    assert lines[0].startswith("encoding: 0 s")
    assert any(line.startswith("encoding: 100 of 400, 0 s, about ") for line in lines)
    assert lines[-1].startswith("distortion 3: 300 of 400, ")
    time.sleep(0.1)
    assert stderr.getvalue().splitlines() == lines


def test_short_work_is_quiet(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with pytest.raises(ZeroDivisionError), out.progress("encoding") as bar:
        bar.start(1 // 0)
    assert stderr.getvalue() == ""


def test_a_path_that_is_no_utf_8_is_recorded_as_it_is(words, tmp_path):
    source, output = (os.fsdecode(name) for name in (b"\xfcx.npy", b"\xfcq.safetensors"))
    Path("x.npy").rename(source)
    command = ("fit", source, "-o", output, "--subspaces", "4", "--codewords", "16")
    done = subprocess.run([sys.executable, "-m", "givens", *command], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"Written: \\udcfcq.safetensors" in done.stdout
    assert json.loads(Path(f"{output}.json").read_text())["command"][1] == source


def test_a_path_that_is_empty_or_begins_with_a_dash(words, tmp_path):
    small = ("--subspaces", 4, "--codewords", 16)
    told = invoke("fit", "x.npy", "-o", "-q.safetensors", *small)
    assert "Next: givens build ./-q.safetensors" in told
    done = main_in_process(("fit", "", "-o", "q.safetensors", *small))
    assert done.error == "givens: the path of vectors must not be empty; the folder here is .\n"


def test_vectors_to_rerank_by_must_be_finite(words, tmp_path):
    invoke("fit", "x.npy", "-o", "q.safetensors", "--subspaces", 4, "--codewords", 16)
    invoke("build", "q.safetensors", "x.npy", "-o", "index.faiss")
    np.save("nan.npy", words * np.nan)
    done = main_in_process(("search", "index.faiss", "x.npy", "--rerank", "nan.npy"))
    assert "x must be finite, but row 0 has NaN or infinite values" in done.error
