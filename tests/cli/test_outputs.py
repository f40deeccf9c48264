"""What commands write: apart from what they read and from each other, and whole or not there."""

import contextlib
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import invoke, main_in_process

import givens
from givens.cli import output as out
from givens.export.shards import building
from givens.storage import files

n, N = 16, 600


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A quantizer, vectors, an index, a folder of shards, a click log, and other names of them."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).standard_normal((N, n)).astype(np.float32)
    np.save("x.npy", x)
    np.save("many.npy", np.concatenate([x] * 20))
    np.save("few.npy", x[:3])
    np.save("truth.npy", ((x[:, None] - x) ** 2).sum(2).argsort(1)[:, :10])
    np.save("ids.npy", np.arange(N))
    words = torch.from_numpy(x[:256]).reshape(256, 8, 2).transpose(0, 1)
    givens.Quantizer(torch.eye(n), words).save("q.safetensors")
    givens.Quantizer(torch.eye(n), 0.5 * words, torch.from_numpy(x[:9])).save("lists.safetensors")
    invoke("build", "q.safetensors", "x.npy", "-o", "i.faiss")
    invoke("build", "lists.safetensors", "x.npy", "-o", "parts", "--shards")
    Path("sub").mkdir()
    Path("linked").symlink_to("sub")
    Path("soft.npy").symlink_to("x.npy")
    os.link("x.npy", "hard.npy")
    Path("soft.safetensors").symlink_to("q.safetensors")
    # What would be written beside an output is an input.
    os.link("x.npy", "beside.npy.json")
    Path("beside.faiss.json").symlink_to("x.npy")
    Path("log").mkdir()
    clicks = "".join(f"{user} {(user + item) % 40}\n" for user in range(60) for item in range(12))
    Path("log/items.txt").write_text(clicks)
    Path("results").mkdir()
    Path("results/recall.png").symlink_to("../x.npy")
    shutil.copy("i.faiss", "results/rows.json")
    Path("page.html").symlink_to("run/config.json")
    Path("run").mkdir()
    Path("run/config.json").write_text("{}")
    Path("rows.json").write_text("[]")
    Path("figures").mkdir()
    Path("figures/fig4-cpu.png").symlink_to("../rows.json")
    return tmp_path


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


SAME = "--output and --scores must be two files"
READ = "which is read"
BUILD = ("build", "q.safetensors", "x.npy", "-o", "b.faiss", "--ids")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("search i.faiss x.npy -o a.npy --scores {here}/a.npy", SAME),
        ("search i.faiss x.npy -o a.npy --scores ./sub/../a.npy", SAME),
        ("search i.faiss x.npy -o sub/a.npy --scores linked/a.npy", SAME),
        ("search i.faiss x.npy -o soft.npy", READ),
        ("search i.faiss x.npy -o hard.npy", READ),
        ("search i.faiss x.npy -o beside.npy", "beside.npy.json, written beside --output, must"),
        ("search i.faiss file://{here}/x.npy -o x.npy", READ),
        ("search i.faiss x.npy --rerank x.npy --ids ids.npy --scores ids.npy", "--scores must"),
        ("fit x.npy -o q.safetensors --init {here}/soft.safetensors --codewords 16", READ),
        ("build q.safetensors x.npy -o soft.safetensors", READ),
        ("build q.safetensors x.npy -o {here}/sub/../q.safetensors", READ),
        ("build q.safetensors x.npy -o beside.faiss", "beside.faiss.json, written beside"),
        ("build q.safetensors soft.npy -o hard.npy", READ),
        ("evaluate i.faiss x.npy --groundtruth truth.npy -o results", "its recall.png would be"),
        ("evaluate results/rows.json x.npy --groundtruth truth.npy -o results", "its rows.json"),
        ("evaluate parts x.npy --groundtruth truth.npy -o {here}/parts", "--output must not be"),
        (
            "train -o log --data log/items.txt --codewords 16",
            "its items.txt would be log/items",
        ),
        ("train -o log --data log --codewords 16", "--output must not be log, which is read"),
        ("report run -o page.html", READ),
        ("paper fig4 -o figures --rows rows.json", "holds no rows of fig4"),
    ],
)
def test_no_name_of_what_is_read_is_written(here, command, message):
    before = contents(here)
    done = main_in_process(command.format(here=here).split())
    assert (done.code, len(done.error.splitlines())) == (1, 1), done.error
    assert message in done.error
    assert contents(here) == before


def test_rows_are_not_drawn_over(here):
    with pytest.raises(ValueError, match=r"its fig4-cpu.png would be rows.json, which is read"):
        out.check_folder(Path("figures"), ["fig4-cpu.png"], ["rows.json"])


def test_the_same_command_twice_is_no_conflict(here):
    """What it wrote the first time is no source the second, also where sources are."""
    for command in (
        "search parts x.npy -o parts/n.npy --scores parts/s.npy",
        "build q.safetensors sub -o sub/i.faiss",
        "evaluate i.faiss x.npy --groundtruth truth.npy -o evaluation",
        "fit x.npy -o linked/fit.safetensors --codewords 16 --iterations 1",
    ):
        shutil.copy("x.npy", "sub/x.npy")
        for _ in range(2):
            invoke(*command.split())
    with pytest.raises(ValueError, match="must be empty or hold shards"), building("parts"):
        pass


@contextlib.contextmanager
def little_room(size):
    """As on a full disk: no file may have more bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


TRAIN = "--warmup 2 --steps 2 --every 2 --dim 16 --subspaces 4 --codewords 16 --batch 32"


@pytest.mark.parametrize(
    ("command", "named", "room"),
    [
        ("search i.faiss many.npy -o n.npy --scores s.npy", "n.npy", 4096),
        ("search i.faiss many.npy --scores s.npy", "s.npy", 4096),
        ("search i.faiss few.npy -k 1 -o n.npy", "n.npy.json", 300),
        ("evaluate i.faiss x.npy --groundtruth truth.npy -o e", "e/rows.json", 8),
        ("evaluate parts x.npy --groundtruth truth.npy -o deep/e", "deep/e/recall.png", 16384),
        ("fit x.npy -o f.safetensors --codewords 16 --iterations 1", "f.safetensors", 512),
        ("build q.safetensors x.npy -o b.faiss", "b.faiss", 4096),
        ("build lists.safetensors x.npy -o b.faiss", "b.faiss", 5000),
        ("build lists.safetensors many.npy -o b.faiss", "/", 4096),
        ("train -o run2 --data log/items.txt " + TRAIN, "run2/config.json", 16),
    ],
)
def test_a_full_disk_is_a_line_that_names_the_file(here, command, named, room):
    """And nothing of what the command began is left."""
    before = {*here.rglob("*")}
    with little_room(room):
        done = main_in_process(command.split())
    assert done.code == 1
    assert "File too large" in done.error
    assert named in done.error
    assert done.error.startswith("givens: ")
    assert len(done.error.splitlines()) == 1
    assert {*here.rglob("*")} == before


def test_of_two_results_none_is_new_if_one_has_no_room(here):
    """Numbers of one index beside the picture of another are worse than those of before."""
    command = ["evaluate", "parts", "x.npy", "--groundtruth", "truth.npy", "-o", "e"]
    invoke(*command)
    before = contents(here)
    with little_room(16384):
        assert main_in_process(command).code == 1
    assert contents(here) == before


@pytest.mark.parametrize("threads", [-1, 10**9, 10**30])
def test_threads_are_those_of_the_machine(here, threads):
    command = f"evaluate i.faiss x.npy --groundtruth truth.npy --threads {threads}"
    done = main_in_process(command.split())
    assert done.error == (
        f"givens: --threads must be 0, for all, to {os.cpu_count()} on this machine, "
        f"not {threads}\n"
    )
    assert not Path("evaluation").exists()


def test_workers_are_those_of_the_machine(here, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    command = "build lists.safetensors x.npy -o b.faiss --engine ray --workers 1000000000"
    done = main_in_process(command.split())
    assert f"workers must be at most {os.cpu_count()}, the cores here" in done.error
    assert not Path("b.faiss").exists()


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(N) * 1j,
        np.arange(N).astype("S4"),
        np.arange(N).astype("M8[s]"),
        np.zeros((), np.int64),
        np.zeros((N, 2), np.int64),
    ],
    ids=lambda ids: f"{ids.dtype}{ids.shape}",
)
def test_ids_of_other_kinds_are_refused(here, ids):
    np.save("other.npy", ids)
    done = main_in_process([*BUILD, "other.npy"])
    assert done.error.startswith(f"givens: ids must be {N} integers, one for each vector, but got")
    assert len(done.error.splitlines()) == 1


def test_ids_that_are_an_archive_are_refused(here):
    np.savez("ids.npz", ids=np.arange(N))
    Path("ids.npz").rename("archive.npy")
    done = main_in_process([*BUILD, "archive.npy"])
    assert done.error == "givens: archive.npy is not a complete .npy file of numbers\n"


def test_the_record_of_an_index_is_sealed(here):
    """Edited by hand, it is no record."""
    path = Path("i.faiss.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "seed": 7}))
    done = main_in_process(["inspect", "i.faiss"])
    assert "i.faiss.json is damaged" in done.error
    assert "delete the record to go on without it" in done.error
    files.write_sealed(path, {name: record[name] for name in record if name != "seal"})
    assert "as recorded" in invoke("inspect", "i.faiss")
