import contextlib
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import faiss
import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

import givens
from givens.cli import app, main
from givens.export.faiss import from_faiss
from givens.search import first_recall, recall
from givens.storage import vectors

n = 16


def run(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "givens", *map(str, arguments)],
        capture_output=True,
        text=True,
        **options,
    )


def invoke(*arguments):
    """The same in this process, where nothing is to be told in one line."""
    done = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@dataclass
class Done:
    code: int
    error: str


def main_in_process(arguments):
    """`givens` as a shell runs it, without starting Python anew."""
    error = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(error):
        patch.setattr(sys, "argv", ["givens", *map(str, arguments)])
        patch.setattr(signal, "signal", lambda *_: None)
        # On a slow machine lines of progress come before the one line of an error.
        patch.setattr("givens.cli.output.LINE_EVERY", 600.0)
        with pytest.raises(SystemExit) as left:
            main()
    return Done(left.value.code, error.getvalue())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    """Vectors, queries, their true neighbours and quantizers with and without lists."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2000, n)).astype(np.float32) * np.linspace(2, 0.3, n)
    queries = x[:50] + 0.05 * generator.standard_normal((50, n))
    far = ((queries[:, None] - x[None]) ** 2).sum(2)
    np.save(tmp_path / "x.npy", x.astype(np.float32))
    np.save(tmp_path / "queries.npy", queries.astype(np.float32))
    np.save(tmp_path / "truth.npy", far.argsort(1)[:, :100])
    for name, L in (("flat", 0), ("ivf", 20)):
        coarse = torch.from_numpy(x[:L]).float() if L else None
        words = torch.from_numpy(x[-256:]).float() * (0.5 if L else 1)
        q = givens.Quantizer(torch.eye(n), words.reshape(256, 8, 2).transpose(0, 1), coarse)
        q.save(tmp_path / f"{name}.safetensors")
    return tmp_path


COMMANDS = (
    "fit",
    "build",
    "search",
    "groundtruth",
    "evaluate",
    "compare",
    "train",
    "tokens",
    "report",
    "inspect",
    "demo",
)


def test_version_and_help():
    assert run("--version").stdout == f"givens {givens.__version__}\n"
    for command in COMMANDS:
        assert f"Example: givens {command}" in invoke(command, "--help")


def test_shells_complete_it(tmp_path):
    script = Path(sys.executable).with_name("givens")
    shell = {**os.environ, "HOME": str(tmp_path)}
    # The last command of bash takes its place, and then no shell is found above it.
    for option in ("--show-completion", "--install-completion"):
        done = subprocess.run(
            ["bash", "-c", f"{script} {option}; exit $?"], capture_output=True, text=True, env=shell
        )
        assert done.returncode == 0, done.stderr
        assert "completion" in done.stdout
    installed = (tmp_path / ".bash_completions" / "givens.sh").read_text()
    assert "complete -o default -F _givens_completion givens" in installed
    asked = {"_GIVENS_COMPLETE": "complete_bash", "COMP_WORDS": "givens ", "COMP_CWORD": "1"}
    done = subprocess.run([script], capture_output=True, text=True, env={**shell, **asked})
    assert {*COMMANDS, "paper"} == set(done.stdout.split())


@pytest.mark.usefixtures("unchecked")
def test_demo_shows_three_ways(tmp_path, monkeypatch):
    """In small: the whole of it, and its numbers are those of the runs."""
    demo = sys.modules["givens.cli.demo"]
    monkeypatch.setattr(demo, "LOG", {"users": 600, "items": 300, "clicks": 12_000})
    small = {"dim": 16, "subspaces": 4, "codewords": 16, "warmup": 60, "steps": 40, "every": 20}
    monkeypatch.setattr(demo, "OPTIONS", {**demo.OPTIONS, **small, "batch": 128})
    monkeypatch.setattr("givens.report.measure.SECONDS", 0.02)
    monkeypatch.chdir(tmp_path)
    told = invoke("demo")
    page = (tmp_path / "demo" / "report.html").read_text()
    for method in ("frozen", "gcd", "post-hoc"):
        folder = tmp_path / "demo" / method
        results = json.loads((folder / "results.json").read_text())
        recall = f"{100 * results['index']['recall@100']:.2f} %"
        for number in (f"{results['distortion']:.4f}", recall):
            assert number in told
            assert number in page
        assert faiss.read_index(str(folder / "index.faiss")).ntotal == 300
    for number in ("full", "popularity"):
        assert f"{100 * results[number]['recall@100']:.2f} %" in told
    assert "GCD: the index that is kept has distortion" in told
    assert "points" in told
    search = told.split("givens search ")[1].splitlines()[0].split()
    assert "among 300 vectors" in invoke("search", *search)
    # Again, in the same folder, with the same outcome.
    same = [line for line in invoke("demo").splitlines() if "•" in line]
    assert same == [line for line in told.splitlines() if "•" in line]


@pytest.fixture
def bad(folder):
    """What users bring."""
    x = np.load(folder / "x.npy")
    (folder / "table.csv").write_text("1.0,2.0\n" * 50)
    (folder / "csv.npy").write_text("1.0,2.0\n" * 50)
    (folder / "cut.npy").write_bytes((folder / "x.npy").read_bytes()[:5000])
    whole = (folder / "flat.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[:-100])
    np.save(folder / "narrow.npy", x[:, :5])
    np.save(folder / "few.npy", x[:5])
    np.save(folder / "same.npy", np.ones((len(np.load(folder / "queries.npy")), 10), np.int32))
    (folder / "cut.faiss").write_bytes(b"IxPT" + bytes(40))
    x[3, 2] = np.nan
    np.save(folder / "nan.npy", x)
    with contextlib.chdir(folder):
        for name in ("good", "bad"):
            invoke("build", "flat.safetensors", "x.npy", "-o", f"{name}.faiss")
    raw = bytearray((folder / "bad.faiss").read_bytes())
    raw[-5000] ^= 1
    (folder / "bad.faiss").write_bytes(raw)
    np.save(folder / "nan_truth.npy", np.arange(np.load(folder / "nan.npy").shape[0])[:, None])
    return folder


@pytest.mark.parametrize("name", ["flat", "ivf"])
def test_build_search_and_evaluate(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    told = invoke("build", f"{name}.safetensors", "x.npy", "-o", "index.faiss")
    assert "Indexed 2,000 vectors of 16 in " in told
    assert "Next: givens search index.faiss" in told
    record = json.loads((folder / "index.faiss.json").read_text())
    q = givens.load(f"{name}.safetensors")
    assert record["fingerprint"] == q.fingerprint
    assert record["configuration"]["vectors"] == "x.npy"
    assert {"torch", "givens"} <= set(record["versions"])
    assert from_faiss(faiss.read_index("index.faiss")).fingerprint == q.fingerprint

    told = invoke("search", "index.faiss", "queries.npy", "-k", 5)
    assert "Searched 50 queries among 2,000 vectors" in told
    told = invoke("search", "index.faiss", "queries.npy", "-k", 5, "--nprobe", 20, "-o", "n.npy")
    assert "Written: n.npy, n.npy.json" in told
    truth = np.load("truth.npy")
    found = np.load("n.npy")
    index = faiss.read_index("index.faiss")
    if name == "ivf":
        faiss.downcast_index(index.index).nprobe = 20
    assert np.array_equal(found, index.search(np.load("queries.npy"), 5)[1])

    again = ["--rerank", "x.npy", "--candidates", 200, "--nprobe", 20]
    invoke(
        "search", "index.faiss", "queries.npy", "-k", 5, *again, "-o", "r.npy", "--scores", "s.npy"
    )
    assert recall(np.load("r.npy"), truth, 5) > max(0.99, recall(found, truth, 5))
    best = ((np.load("queries.npy") - np.load("x.npy")[truth[:, 0]]) ** 2).sum(1)
    assert np.allclose(np.load("s.npy")[:, 0], best, rtol=1e-4)

    told = invoke("evaluate", "index.faiss", "queries.npy", "--groundtruth", "truth.npy")
    result = json.loads((folder / "evaluation" / "rows.json").read_text())
    last = result["rows"][-1]
    assert last["recall@10"] == pytest.approx(recall(_all(index), truth, 10), abs=1e-9)
    assert last["1-recall@100"] >= last["1-recall@10"] >= last["1-recall@1"] == last["recall@1"]
    assert last["queries_a_second"] > 0
    assert f"{last['recall@10']:.4f}" in told
    assert "Bytes a vector: " in told
    if name == "ivf":
        assert result["rows"][0]["nprobe"] == 1
        assert result["rows"][0]["recall@10"] < last["recall@10"]
        assert (folder / "evaluation" / "recall.png").stat().st_size > 10_000
    for file in ("index.faiss", f"{name}.safetensors", "x.npy"):
        assert "next" in invoke("inspect", file)
    assert q.fingerprint in invoke("inspect", "index.faiss")


def _all(index):
    return index.search(np.load("queries.npy"), 100)[1]


def test_fit_to_search(folder, monkeypatch):
    """The whole way, from vectors to neighbours."""
    monkeypatch.chdir(folder)
    options = ["--subspaces", 4, "--codewords", 64, "--coarse", 8, "--seed", 5]
    told = invoke("fit", "x.npy", "-o", "q.safetensors", *options)
    assert "Fitted gcd-greedy to 2,000 vectors of 16 in " in told
    assert "Next: givens build q.safetensors" in told
    q = givens.load("q.safetensors")
    assert q.codebooks.shape == (4, 64, 4)
    assert len(q.coarse) == 8
    record = json.loads((folder / "q.safetensors.json").read_text())
    assert record["fingerprint"] == q.fingerprint
    assert record["seed"] == 5
    assert record["configuration"]["subspaces"] == 4
    assert record["distortion"] == pytest.approx(q.distortion(np.load("x.npy")), rel=1e-4)
    invoke("fit", "x.npy", "-o", "again.safetensors", *options)
    assert givens.load("again.safetensors").fingerprint == q.fingerprint
    invoke("fit", "x.npy", "-o", "on.safetensors", *options, "--init", "q.safetensors")
    assert givens.load("on.safetensors").distortion(np.load("x.npy")) <= record["distortion"] * 1.01

    invoke("build", "q.safetensors", "x.npy", "-o", "index.faiss")
    assert json.loads((folder / "index.faiss.json").read_text())["seed"] == 5
    search = ["search", "index.faiss", "queries.npy", "-k", 10, "--nprobe", 8, "-o", "n.npy"]
    invoke(*search, "--rerank", "x.npy")
    assert recall(np.load("n.npy"), np.load("truth.npy"), 10) > 0.95


def test_recalls_by_hand():
    found, truth = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[3, 2, 9], [4, 7, 8]])
    assert recall(found, truth, 1) == 0.5
    assert recall(found, truth, 2) == 0.5
    assert recall(found, truth, 3) == 0.5
    assert first_recall(found, truth, 1) == 0.5
    assert first_recall(found, truth, 3) == 1.0


def test_ids_of_the_users_choosing(folder, monkeypatch):
    monkeypatch.chdir(folder)
    ids = np.random.default_rng(0).permutation(5000)[:2000]
    np.save("ids.npy", ids)
    for name in ("flat", "ivf"):
        invoke("build", f"{name}.safetensors", "x.npy", "-o", "index.faiss", "--ids", "ids.npy")
        search = ["search", "index.faiss", "queries.npy", "-k", 1, "--nprobe", 20, "-o", "n.npy"]
        invoke(*search, "--rerank", "x.npy", "--ids", "ids.npy")
        assert np.array_equal(np.load("n.npy")[:, 0], ids[np.load("truth.npy")[:, 0]])
        with pytest.raises(ValueError, match=r"--rerank needs --ids ids\.npy"):
            invoke(*search, "--rerank", "x.npy")


def test_one_file_of_ann_benchmarks_is_enough(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with h5py.File("data.hdf5", "w") as file:
        for table, name in (("train", "x"), ("test", "queries"), ("neighbors", "truth")):
            file[table] = np.load(f"{name}.npy")
    invoke("fit", "data.hdf5", "-o", "q.safetensors", "--codewords", 16, "--iterations", 3)
    invoke("build", "q.safetensors", "data.hdf5", "-o", "index.faiss")
    told = invoke("evaluate", "index.faiss", "data.hdf5", "--groundtruth", "data.hdf5")
    assert "recall@100" in told
    assert "2,000" in invoke("inspect", "data.hdf5:train")


@pytest.mark.parametrize(("kind", "code"), [("HNSW8", None), ("Flat", 64), ("IVF4,SQ8", 17)])
def test_an_index_without_a_quantizer(folder, monkeypatch, kind, code):
    """Made by Faiss alone, and of a name that a shell would take for two."""
    monkeypatch.chdir(folder)
    index, x = faiss.index_factory(n, kind), np.load("x.npy")
    index.train(x)
    index.add(x)
    faiss.write_index(index, "an index.faiss")
    told = invoke("inspect", "an index.faiss")
    assert "2,000" in told
    assert re.search("quantizer +none", told)
    assert "givens search 'an index.faiss' QUERIES -k 10" in told
    told = invoke("evaluate", "an index.faiss", "queries.npy", "--groundtruth", "truth.npy")
    assert (f"Bytes a vector: {code} of code, " in told) == (code is not None)
    assert json.loads(Path("evaluation/rows.json").read_text())["bytes_a_vector"]["code"] == code


def test_the_other_forms(folder, monkeypatch):
    monkeypatch.chdir(folder)
    q = givens.load("ivf.safetensors")
    givens.Quantizer(q.rotation, q.codebooks[:, :16], q.coarse).save("q.safetensors")
    invoke("build", "q.safetensors", "x.npy", "-o", "index.faiss", "--kind", "ivfpq-fastscan")
    assert "IVF" in type(faiss.downcast_index(faiss.read_index("index.faiss").index)).__name__


def test_building_needs_the_index_and_a_constant(folder, monkeypatch):
    """Peak memory with five times the vectors grows by their codes alone."""
    monkeypatch.chdir(folder)
    peaks = []
    for rows in (1_000_000, 5_000_000):
        table = np.lib.format.open_memmap("big.npy", "w+", np.uint8, (rows, n))
        table[:] = np.arange(n)
        del table
        code = (
            "import sys; from givens.cli import app\n"
            "app(sys.argv[1:], standalone_mode=False)\n"
            "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
        )
        build = ["build", "flat.safetensors", "big.npy", "-o", "big.faiss"]
        done = subprocess.run([sys.executable, "-c", code, *build], capture_output=True, text=True)
        peaks.append(1024 * int(done.stdout.split()[-1]))
    # 64 MB more of vectors went through, as float32 256 MB; 32 MB more of codes stay.
    assert peaks[1] - peaks[0] < 32_000_000 + 46_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["build", "none.safetensors", "x.npy"],
            "there is no quantizer none.safetensors; make one",
        ),
        (["build", "x.npy", "x.npy"], "x.npy is not a givens file"),
        (["build", "cut.safetensors", "x.npy"], "cut.safetensors is damaged"),
        (["build", "flat.safetensors", "none.npy"], "there is no file none.npy"),
        (["build", "flat.safetensors", "table.csv"], "numpy.save('table.npy', numpy.loadtxt("),
        (["build", "flat.safetensors", "csv.npy"], "csv.npy is not a complete .npy file"),
        (["build", "flat.safetensors", "cut.npy"], "cut.npy is not a complete .npy file"),
        (["build", "flat.safetensors", "nan.npy"], "row 3 has NaN"),
        (["build", "flat.safetensors", "narrow.npy"], "vectors must have shape (N, 16)"),
        (["build", "flat.safetensors", "x.npy", "--kind", "ivfpq"], "kind 'ivfpq' needs"),
        (["build", "flat.safetensors", "x.npy", "--kind", "tree"], "kind must be one of"),
        (["build", "flat.safetensors", "x.npy", "--ids", "nan.npy"], "ids must be 2000 integers"),
        (["build", "flat.safetensors", "x.npy", "-o", "no/index.faiss"], "there is no folder"),
        (["build", "flat.safetensors", "x.npy", "-o", "/proc/index.faiss"], "/proc/index.faiss"),
        (["build", "flat.safetensors", "x.npy", "-o", "/dev/null"], "/dev/null must be a file"),
        (["fit", "none.npy"], "there is no file none.npy; looked in /"),
        (["fit", "table.csv"], "table.csv must end in one of .npy"),
        (["fit", "good.faiss"], "good.faiss must end in one of .npy"),
        (["fit", "csv.npy"], "csv.npy is not a complete .npy file"),
        (["fit", "nan.npy"], "row 3 has NaN"),
        (["fit", "few.npy"], "at least as many vectors as codewords, but got 5"),
        (["fit", "x.npy", "--subspaces", "5"], "dim must be divisible by subspaces"),
        (["fit", "x.npy", "--codewords", "300"], "codewords must be in 2..256"),
        (["fit", "x.npy", "--method", "magic"], "method must be one of"),
        (["fit", "x.npy", "--init", "magic"], "--init must be one of auto"),
        (["fit", "x.npy", "--init", "cut.safetensors"], "cut.safetensors is damaged"),
        (["fit", "x.npy", "--device", "abacus"], "--device must be cpu or cuda"),
        pytest.param(
            ["fit", "x.npy", "--device", "cuda"],
            "--device cuda needs a GPU that torch can use, but there is none; leave --device out",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (["fit", "x.npy", "-o", "q.bin"], "q.bin must end in .safetensors"),
        (["fit", "x.npy", "-o", "/proc/q.safetensors"], "/proc/q.safetensors"),
        (["build", "flat.safetensors", "x.npy", "-o", "x.npy"], "--output must not be x.npy"),
        (["search", "good.faiss", "x.npy", "-o", "x.npy"], "--output must not be x.npy"),
        (["search", "none.faiss", "queries.npy"], "there is no index none.faiss; make one with"),
        (["search", "table.csv", "queries.npy"], "table.csv is not a Faiss index"),
        (["search", "good.faiss", "narrow.npy"], "queries must have 16 dimensions"),
        (["search", "good.faiss", "nan.npy"], "queries must be finite"),
        (["search", "good.faiss", "queries.npy", "-k", "2001"], "k must be in 1..2000"),
        (["search", "good.faiss", "queries.npy", "-o", "n.txt"], "n.txt must end in .npy"),
        (["search", "good.faiss", "queries.npy", "--nprobe", "0"], "--nprobe must be at least 1"),
        (["search", "good.faiss", "queries.npy", "--rerank", "narrow.npy"], "--rerank must be the"),
        (["search", "bad.faiss", "queries.npy"], "bad.faiss is not as bad.faiss.json says"),
        (["evaluate", "good.faiss", "queries.npy", "--groundtruth", "x.npy"], "--groundtruth must"),
        (
            ["evaluate", "good.faiss", "queries.npy", "--groundtruth", "same.npy"],
            "--groundtruth must have each neighbour of a query once, but row 0 has one twice",
        ),
        (
            ["evaluate", "good.faiss", "queries.npy", "--exact", "narrow.npy"],
            "--exact must be the 2000 vectors of the index",
        ),
        (["evaluate", "good.faiss", "queries.npy"], "give either --groundtruth FILE or --exact"),
        (
            ["evaluate", "good.faiss", "queries.npy", "--groundtruth", "x.npy", "--ids", "x.npy"],
            "--ids goes with --exact",
        ),
        (["groundtruth", "x.npy", "queries.npy", "-o", "t.txt"], "t.txt must end in .npy or"),
        (["groundtruth", "x.npy", "queries.npy", "-o", "x.npy"], "--output must not be x.npy"),
        (["groundtruth", "x.npy", "narrow.npy", "-o", "t.npy"], "queries must have 16 dimensions"),
        (["groundtruth", "nan.npy", "x.npy", "-o", "t.npy"], "x must be finite, but row 3"),
        (["groundtruth", "x.npy", "x.npy", "-o", "t.npy", "-k", "0"], "k must be in 1..2000"),
        (
            ["groundtruth", "x.npy", "x.npy", "-o", "t.npy", "--metric", "l1"],
            "metric must be one of 'l2', 'ip', 'cosine', but got 'l1'",
        ),
        (["compare", "x.npy", "-o", "c.pdf"], "c.pdf must end in .html"),
        (["compare", "x.npy", "--bytes", "x"], "--bytes must be whole numbers such as 16,32"),
        (["compare", "x.npy", "--bytes", "0"], "bytes must be positive numbers"),
        (["compare", "x.npy", "--methods", "magic"], "methods must be among 'givens', 'pq'"),
        (["compare", "few.npy"], "vectors must be at least 2,000 to compare, but got 5"),
        (["compare", "none.npy"], "there is no file none.npy"),
        (["compare", "nan.npy", "--queries", "x.npy"], "vectors must be finite, but row 3"),
        (["compare", "x.npy", "--queries", "narrow.npy"], "queries must have 16 dimensions"),
        (["inspect", "cut.faiss"], "cut.faiss is not a Faiss index, or is truncated: "),
        (["report", "none"], "there is no run in none, which is no folder; make one with `givens"),
        (["report", "."], "there is no run in ., which has no config.json; make one with"),
        (["report", ".", "-o", "r.pdf"], "r.pdf must end in .html"),
        (["train", "-o", "x.npy"], "--output must be a folder, but x.npy is a file"),
        (["demo", "-o", "x.npy"], "--output must be a folder, but x.npy is a file"),
        (["demo", "-o", "/proc/nowhere"], "/proc/nowhere"),
        (["inspect", "none.faiss"], "there is no file none.faiss"),
        (["search", "good.faiss", "queries.npy", "--ids", "x.npy"], "--ids go with --rerank"),
        (["search", "good.faiss", "queries.npy", "--candidates", "9"], "--ids go with --rerank"),
        (["fit", "x.npy:train"], "x.npy holds one table, without a name: leave :train out"),
        (["fit", "x.npy", "--device", "meta"], "--device must be cpu or cuda"),
        (["train", "-o", "run", "--pool", "sum"], "pool must be one of"),
        (
            ["train", "-o", "run", "--min-items", "5"],
            "--min-rating, --min-items and --hash-items go with --data",
        ),
        (["train", "-o", "run", "--dim", "16", "--subspaces", "5"], "dim must be divisible"),
        (
            ["search", "good.faiss", "queries.npy", "-o", "s.npy", "--scores", "s.npy"],
            "--output and --scores must be two files, but both are s.npy",
        ),
        (
            ["search", "good.faiss", "queries.npy", "--rerank", "x.npy", "--ids", "x.npy"],
            "--ids must be integers of shape (2000,), but got float32 of shape (2000, 16)",
        ),
        (["paper", "fig4", "-o", "pictures", "--device", "meta"], "--device must be cpu or cuda"),
        (
            ["paper", "fig4", "-o", "pictures", "--dims", "x"],
            "--dims must be comma-separated numbers",
        ),
        (
            ["evaluate", "good.faiss", "nan.npy", "--groundtruth", "nan_truth.npy"],
            "queries must be finite",
        ),
        (["inspect", "cut.safetensors"], "cut.safetensors is damaged"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(bad, monkeypatch, arguments, message, unchecked):
    monkeypatch.chdir(bad)
    before = names(bad)
    if arguments[0] in ("fit", "build") and "-o" not in arguments:
        arguments = [*arguments, "-o", "out.safetensors"]
    done = main_in_process(arguments)
    assert done.code == 1
    assert message in done.error
    assert done.error.startswith("givens: ")
    assert len(done.error.strip().splitlines()) == 1
    assert names(bad) == before


@pytest.mark.parametrize(
    "command",
    [
        "fit v.safetensors:train -o v.safetensors",
        "build flat.safetensors v.safetensors:train -o v.safetensors",
        "build flat.safetensors parts -o parts/b.npy",
        "build flat.safetensors x.npy --ids ids.npy -o ids.npy",
        "search index.faiss queries.npy --rerank x.npy --ids ids.npy -o ids.npy",
        "search index.faiss v.safetensors:test -o queries.npy --scores v.npy --rerank v.npy",
    ],
)
def test_what_is_read_is_not_written_over(folder, monkeypatch, command):
    monkeypatch.chdir(folder)
    invoke("build", "flat.safetensors", "x.npy", "-o", "index.faiss")
    x = np.load("x.npy")
    Path("parts").mkdir()
    for name in ("v.npy", "parts/a.npy", "parts/b.npy"):
        np.save(name, x)
    np.save("ids.npy", np.arange(len(x)))
    tables = {"train": torch.from_numpy(x), "test": torch.from_numpy(x[:9].copy())}
    safetensors.torch.save_file(tables, "v.safetensors")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = main_in_process(command.split())
    assert done.code == 1
    assert re.match("givens: --(output|scores) must not be .*, which is read", done.error)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_neighbours_that_are_not_there_are_not_missed():
    found, truth = np.array([[1, 2], [3, 4], [5, 6]]), np.array([[2, -1], [7, 4], [-1, -1]])
    assert recall(found, truth, 2) == (1 + 1 / 2) / 2
    assert first_recall(found, truth, 2) == 1 / 2
    assert recall(np.array([[-1, -1]]), np.array([[1, -1]]), 2) == 0


def test_a_picture_of_another_index_does_not_stay(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for name, drawn in (("ivf", True), ("flat", False)):
        invoke("build", f"{name}.safetensors", "x.npy", "-o", "index.faiss")
        invoke("evaluate", "index.faiss", "queries.npy", "--groundtruth", "truth.npy")
        assert Path("evaluation/recall.png").exists() == drawn


def test_plain_faiss_looks_into_as_many_lists(folder, monkeypatch):
    monkeypatch.chdir(folder)
    invoke("build", "ivf.safetensors", "x.npy", "-o", "index.faiss")
    invoke("search", "index.faiss", "queries.npy", "-k", 5, "-o", "n.npy")
    index = faiss.read_index("index.faiss")
    assert faiss.extract_index_ivf(index).nprobe == 16
    assert np.array_equal(index.search(np.load("queries.npy"), 5)[1], np.load("n.npy"))


def test_rows_outside_the_sample_may_be_anything(folder, monkeypatch):
    monkeypatch.chdir(folder)
    x = np.load("x.npy").astype(">f4")
    np.save("x.npy", x)
    invoke("fit", "x.npy", "-o", "q.safetensors", "--codewords", 16, "--iterations", 3)
    assert np.isfinite(json.loads(Path("q.safetensors.json").read_text())["distortion"])


@pytest.mark.parametrize(
    "command",
    [
        "build flat.safetensors x.npy -o i.faiss",
        "search i.faiss x.npy",
        "report .",
        "demo -o d",
        "compare x.npy",
    ],
)
def test_without_faiss_it_says_what_to_install(folder, monkeypatch, command):
    monkeypatch.chdir(folder)
    before = names(folder)
    monkeypatch.setitem(sys.modules, "faiss", None)
    # Imported anew, and put back afterwards.
    packages = ("export", "report", "compare")
    for package in packages:
        importlib.import_module(f"givens.{package}")
        monkeypatch.setattr(givens, package, getattr(givens, package))
    for name in [name for name in sys.modules if name.split(".")[1:2] in [[p] for p in packages]]:
        monkeypatch.delitem(sys.modules, name)
    done = main_in_process(command.split())
    assert done.code == 1
    assert done.error == "givens: a Faiss index needs faiss: pip install 'givens[faiss]'\n"
    assert names(folder) == before


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_the_old_files(folder, how):
    table = np.lib.format.open_memmap(folder / "big.npy", "w+", np.float32, (3_000_000, n))
    del table
    (folder / "index.faiss").write_text("old")
    before = names(folder)
    build = ["build", "flat.safetensors", "big.npy", "-o", "index.faiss"]
    process = subprocess.Popen(
        [sys.executable, "-m", "givens", *build],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    # Until it has looked at its inputs and encodes.
    while b"big.npy" not in _maps(process.pid):
        time.sleep(0.01)
    process.send_signal(how)
    _, error = process.communicate(timeout=240)
    assert process.returncode == 128 + how
    assert error == INTERRUPTED
    assert names(folder) == before
    assert (folder / "index.faiss").read_text() == "old"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after", [0.0, 0.3, 1.0])
def test_interrupted_while_it_starts(tmp_path, how, after):
    """From when its own code runs, while torch is imported, to when the command is at work."""
    code = (
        "import os, signal, sys, threading, givens.__main__ as command\n"
        "handle = signal.signal\n"
        "def told(number, handler):\n"
        "    handle(number, handler)\n"
        "    if number == signal.SIGTERM:\n"
        "        signal.signal = handle\n"
        f"        wait = threading.Timer({after}, os.kill, (os.getpid(), {int(how)}))\n"
        "        wait.daemon = True\n"
        "        wait.start()\n"
        "signal.signal = told\n"
        "sys.argv = ['givens', 'train', '-o', 'run', '--steps', '100000']\n"
        "command.main()\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 128 + how
    assert done.stderr.startswith("givens: interrupted")
    assert len(done.stderr.splitlines()) == 1


INTERRUPTED = "givens: interrupted; nothing is left half-written, run the same command again\n"
# Interrupts itself, and does something after that.
ITSELF = """
import os, pathlib, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(30)
pathlib.Path("after").touch()
"""
BARE = f"""
try:
    exec({ITSELF!r})
except:
    pass
"""
DESTRUCTOR = f"""
class Held:
    def __del__(self):
        exec({ITSELF!r})
Held()
"""


@pytest.mark.parametrize("work", ["import itself", DESTRUCTOR, BARE], ids=["import", "del", "bare"])
def test_interrupted_where_an_error_would_be_lost(tmp_path, work):
    """An import is not told as failed, and neither a destructor nor a bare except swallows it.

    Also where the command line itself is run by an import.
    """
    (tmp_path / "itself.py").write_text(ITSELF)
    lines = [
        "import sys, time",
        "from givens import cli",
        "@cli.app.command()",
        "def work():",
        f"    exec({work!r})",
        "    time.sleep(30)",
        "sys.argv[1:] = ['work']",
        "cli.main()",
    ]
    (tmp_path / "runs.py").write_text("\n".join(lines))
    command = [sys.executable, "-c", "import runs"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, INTERRUPTED)
    assert not (tmp_path / "after").exists()


def test_interrupted_where_a_package_takes_the_signal_for_itself(tmp_path):
    """As Ray does, which writes a stack trace."""
    lines = [
        "import faulthandler, os, signal, sys, threading, time",
        "from givens import cli",
        "@cli.app.command()",
        "def work():",
        "    faulthandler.register(signal.SIGTERM, chain=True)",
        "    time.sleep(2)",
        "    os.kill(os.getpid(), signal.SIGTERM)",
        "    time.sleep(30)",
        "sys.argv[1:] = ['work']",
        "cli.main()",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (143, INTERRUPTED)


def test_interrupted_while_nobody_reads_its_output(tmp_path):
    """As by a pager: the command holds the output, and waits for its reader."""
    code = (
        "import os, signal, sys, threading\n"
        "from givens import cli\n"
        "@cli.app.command()\n"
        "def work():\n"
        "    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    while True:\n"
        "        print('x' * 1000)\n"
        "sys.argv[1:] = ['work']\n"
        "cli.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.wait(timeout=120) == 130
    assert process.communicate()[1] == INTERRUPTED


def interrupted_in(folder, function, arguments, how):
    """`givens`, sent a signal when it calls this function."""
    module, _, name = function.rpartition(".")
    code = (
        "import os, signal, sys, time\n"
        "from givens.cli import main\n"
        f"import {module} as module\n"
        "def stop(*_, **__):\n"
        f"    os.kill(os.getpid(), {int(how)})\n"
        "    time.sleep(60)\n"
        f"module.{name} = stop\n"
        f"sys.argv = ['givens', *{list(map(str, arguments))!r}]\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_interrupted_wherever_it_writes(folder):
    """Before the file is known to whoever would remove it."""
    before = names(folder)
    build = ["build", "flat.safetensors", "x.npy", "-o", "index.faiss"]
    done = interrupted_in(folder, "fcntl.flock", build, signal.SIGTERM)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, INTERRUPTED)
    assert names(folder) == before


def test_interrupted_it_takes_its_empty_folders_away(folder):
    (folder / "there").mkdir()
    before = names(folder)
    for made in ("run", "there/run", "far/down/run"):
        train = ["train", "-o", made, "--steps", "5"]
        done = interrupted_in(folder, "givens.storage.files.write_json", train, signal.SIGINT)
        assert (done.returncode, len(done.stderr.splitlines())) == (130, 1)
        assert names(folder) == before
    assert names(folder / "there") == []


@pytest.mark.parametrize(
    ("function", "command"),
    [
        ("givens.retrieval.train.train", ["train", "-o", "run"]),
        ("givens.storage.vectors.read", ["fit", "x.npy", "-o", "q.safetensors"]),
    ],
)
def test_interrupted_it_says_how_to_go_on(folder, function, command):
    done = interrupted_in(folder, function, command, signal.SIGINT)
    assert done.returncode == 130
    assert done.stderr.startswith("givens: interrupted; ")
    assert "with --resume to continue" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def _maps(pid):
    return Path(f"/proc/{pid}/maps").read_bytes()


def test_fit_goes_on_where_it_was_stopped(folder, monkeypatch):
    fit = sys.modules["givens.cli.fit"]
    monkeypatch.chdir(folder)
    command = ["fit", "x.npy", "--subspaces", "2", "--codewords", "8", "--sample", "300"]
    invoke(*command, "-o", "whole.safetensors")
    monkeypatch.setattr(fit, "SAVED_EVERY", 0)
    save, passes = fit.Progress.save, []

    def stop_at_the_fifth(progress, path):
        save(progress, path)
        passes.append(progress.iteration)
        if len(passes) == 5:
            raise ValueError("stopped")

    monkeypatch.setattr(fit.Progress, "save", stop_at_the_fifth)
    with pytest.raises(ValueError, match="stopped"):
        invoke(*command, "-o", "part.safetensors")
    (state,) = folder.glob("part.safetensors.*.part")
    assert not (folder / "part.safetensors").exists()
    # Another configuration does not take it up.
    assert "nothing to go on from" in invoke(
        *command, "-o", "part.safetensors", "--seed", "1", "--resume"
    )
    assert state.exists()
    invoke(*command, "-o", "part.safetensors", "--resume")
    # The sixth pass and on, none twice.
    assert len(passes) > 5
    assert not list(folder.glob("*.part"))
    whole, part = (givens.load(f"{name}.safetensors") for name in ("whole", "part"))
    assert whole.fingerprint == part.fingerprint


@pytest.mark.parametrize(("metric", "kind"), [("l2", "Flat"), ("ip", "HNSW8"), ("cosine", "SQ8")])
@pytest.mark.parametrize("suffix", ["npy", "ivecs"])
def test_truth_is_found_and_used(folder, monkeypatch, metric, kind, suffix):
    """By the command alone, and by `evaluate` itself, for indexes without a quantizer too."""
    monkeypatch.chdir(folder)
    options = ["-k", 30, "--metric", metric]
    told = invoke("groundtruth", "x.npy", "queries.npy", "-o", f"t.{suffix}", *options)
    assert "Found the 30 nearest of 2,000 vectors to 50 queries" in told
    x, queries = np.load("x.npy"), np.load("queries.npy")
    truth = givens.ground_truth(x, queries, 30, metric)
    assert np.array_equal(vectors.read(f"t.{suffix}")[:], truth)
    assert json.loads(Path(f"t.{suffix}.json").read_text())["configuration"]["metric"] == metric

    by = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    index = faiss.index_factory(n, f"L2norm,{kind}" if metric == "cosine" else kind, by)
    index.train(x)
    index.add(x)
    faiss.write_index(index, "index.faiss")
    rows = []
    for given in (["--groundtruth", f"t.{suffix}"], ["--exact", "x.npy"]):
        invoke("evaluate", "index.faiss", "queries.npy", *given)
        rows.append(json.loads(Path("evaluation/rows.json").read_text())["rows"][0])
    found = recall(index.search(queries, 10)[1], truth, 10)
    assert rows[0]["recall@10"] == rows[1]["recall@10"] == pytest.approx(found)
    assert "recall@100" in rows[1]
    invoke("search", "index.faiss", "queries.npy", "-o", "n.npy", "--rerank", "x.npy")
    assert recall(np.load("n.npy"), truth, 10) >= found


def test_truth_by_ids_of_the_users_choosing(folder, monkeypatch):
    monkeypatch.chdir(folder)
    np.save("ids.npy", np.random.default_rng(0).permutation(5000)[:2000])
    found = []
    for ids in ([], ["--ids", "ids.npy"]):
        invoke("build", "flat.safetensors", "x.npy", "-o", "index.faiss", *ids)
        invoke("evaluate", "index.faiss", "queries.npy", "--exact", "x.npy", *ids)
        found.append(json.loads(Path("evaluation/rows.json").read_text())["rows"][0]["recall@10"])
    assert found[0] == found[1] > 0.3
    done = main_in_process(["evaluate", "index.faiss", "queries.npy", "--exact", "x.npy"])
    assert done.error.startswith("givens: --exact needs --ids ids.npy")


def test_compare_writes_a_page_and_its_rows(folder, monkeypatch):
    monkeypatch.chdir(folder)
    options = ["--bytes", "4,8", "--trained", "2000", "--queries", "queries.npy"]
    methods = ["--methods", "givens,pq,sq8"]
    told = invoke("compare", "x.npy", *options, *methods, "-o", "page.html")
    assert told.startswith("For these vectors take ")
    assert "At 8 bytes (4 bits a dimension): " in told
    rows = json.loads(Path("page.json").read_text())["rows"]
    assert [(row["method"], row["budget"]) for row in rows] == [
        (method, size) for method in ("givens", "pq", "sq8") for size in (4, 8)
    ]
    page = Path("page.html").read_text()
    assert all(f"{100 * row['recall@10']:.1f} %" in page for row in rows)
    # Again: nothing is measured anew.
    monkeypatch.setattr("givens.compare.run.measure", None)
    assert invoke("compare", "x.npy", *options, *methods, "-o", "page.html").splitlines()[0] in told


def test_the_help_of_compare_names_every_method():
    from givens.compare.methods import METHODS

    told = " ".join(invoke("compare", "--help").replace("│", " ").split())
    assert ", ".join(METHODS) in told
