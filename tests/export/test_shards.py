"""Shards: encoded here and on Ray, searched together, merged, and broken in every way we know."""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from test_cli import invoke, main_in_process, names

import givens
from givens.export import shards
from givens.export.faiss import inverted, load_index, save_index, to_faiss
from givens.storage.vectors import read

ray = pytest.importorskip("ray")
# Ray forks to run its own programs at once, where another test has imported lance.
pytestmark = pytest.mark.filterwarnings("ignore:lance is not fork-safe")
N, n, L = 40_000, 16, 30
ROWS = 4_000


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine, once."""
    ray.init(
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True, scope="module")
def small():
    """Ten shards of a few vectors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("givens.export.source.BUFFER", n * ROWS)
        patch.setattr(shards, "ROWS", ROWS)
        yield


@pytest.fixture
def folder(original, tmp_path, monkeypatch):
    """A copy of the original, to work in."""
    return enter_copy(original, tmp_path, monkeypatch)


def enter_copy(source, target, monkeypatch):
    shutil.copytree(source, target, dirs_exist_ok=True)
    monkeypatch.chdir(target)
    return target


@pytest.fixture(scope="module")
def original(small, tmp_path_factory):
    """Vectors as one file and as files of three formats, a quantizer and its index."""
    path = tmp_path_factory.mktemp("original")
    with contextlib.chdir(path):
        write_original()
    return path


def write_original():
    import pyarrow as pa
    import pyarrow.parquet as pq

    generator = np.random.default_rng(0)
    x = generator.standard_normal((N, n)).astype(np.float32) * np.linspace(2, 0.3, n, dtype="f")
    np.save("x.npy", x)
    np.save("queries.npy", x[:300] + np.float32(0.1))
    Path("x").mkdir()
    np.save("x/a.npy", x[:7_001])
    lead = np.full((13_000, 1), n, "<i4").view("<f4")
    np.hstack([lead, x[7_001:20_001]]).tofile("x/b.fvecs")
    column = pa.FixedSizeListArray.from_arrays(pa.array(x[20_001:].reshape(-1)), n)
    pq.write_table(pa.table({"vector": column}), "x/c.parquet", row_group_size=5_000)
    q = make(x)
    q.save("q.safetensors")
    invoke("build", "q.safetensors", "x.npy", "-o", "one.faiss")


def make(x, K=200):
    x = torch.from_numpy(x)
    words = 0.5 * x[-K:].reshape(K, 4, -1).transpose(0, 1)
    return givens.Quantizer(givens.random_rotation(n, 1), words, x[:L])


def same(a, b="one.faiss"):
    return Path(a).read_bytes() == Path(b).read_bytes()


def answers(path, *options):
    invoke("search", path, "queries.npy", *options, "-o", "n.npy", "--scores", "s.npy")
    return np.load("n.npy"), np.load("s.npy")


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_has_every_row_once(tmp_path, seed):
    sizes = np.random.default_rng(seed).integers(1, 3 * ROWS, 7)
    for number, size in enumerate(sizes):
        np.save(tmp_path / f"{number}.npy", np.zeros((size, n), np.float32))
    jobs = shards.plan([str(tmp_path)], n)
    at = 0
    for job in jobs:
        assert job.first == at
        assert job.rows == ROWS or job is jobs[-1]
        assert len(job.read()) == job.rows
        at += job.rows
    assert at == sizes.sum()
    rows = [(piece.address, row) for j in jobs for piece in j.pieces for row in span(piece)]
    files_in_order = [str(tmp_path / f"{number}.npy") for number in range(7)]
    assert rows == [
        (f, r) for f, size in zip(files_in_order, sizes, strict=True) for r in range(size)
    ]


def span(piece):
    return range(piece.first, piece.stop)


@pytest.mark.parametrize("engine", [["--shards"], ["--engine", "ray"]])
@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_the_same_index_byte_for_byte(folder, cluster, engine, metric):
    q = givens.load("q.safetensors")
    givens.Quantizer(q.rotation, q.codebooks, q.coarse, metric).save("q.safetensors")
    invoke("build", "q.safetensors", "x.npy", "-o", "one.faiss")
    told = invoke("build", "q.safetensors", "x", "-o", "two", *engine)
    assert "Indexed 40,000 vectors of 16 in " in told
    if "ray" in engine:
        assert same("two")
        record = load_index("two").record
        assert record["seconds"]["encode"] > 0
        assert record["fingerprint"] == load_index("one.faiss").record["fingerprint"]
        assert names(folder) == sorted(
            ["x.npy", "x", "queries.npy", "q.safetensors"]
            + [f"{name}{end}" for name in ("one.faiss", "two") for end in ("", ".json")]
        )
    for nprobe in (1, 7, 30):
        for path, *options in (["two"], ["two", "--mmap"]):
            for a, b in zip(
                answers("one.faiss", "--nprobe", nprobe),
                answers(path, "--nprobe", nprobe, *options),
                strict=True,
            ):
                assert np.array_equal(a, b)


def test_few_lists_in_use_are_written_as_faiss_does(folder):
    """Faiss has two forms of the table of sizes."""
    q, x = givens.load("q.safetensors"), np.load("x.npy")
    for count in (0, 2, 15, 16, 29):
        coarse = q.coarse.clone()
        coarse[count + 1 :] += 1000
        lists = givens.Quantizer(q.rotation, q.codebooks, coarse)
        save_index(to_faiss(lists, x), "one.faiss")
        made = built(lists, "parts", "x.npy")
        shards.merge(lists, made, "parts", "two.faiss", {})
        assert same("two.faiss"), count


def built(q, folder, *sources):
    with shards.building(folder):
        made = shards.encode_here(q, shards.plan(sources, q.dim), folder)
        shards.finish(q, made, folder, {})
    return made


def test_evaluate_inspect_and_rerank_take_a_folder(folder):
    invoke("build", "q.safetensors", "x", "-o", "parts", "--shards")
    x, queries = (torch.from_numpy(np.load(f)) for f in ("x.npy", "queries.npy"))
    truth = torch.cdist(queries, x).topk(100, largest=False).indices
    np.save("truth.npy", truth.numpy())
    rows = []
    for path, *options in (["one.faiss"], ["parts"], ["one.faiss", "--mmap"]):
        invoke("evaluate", path, "queries.npy", "--groundtruth", "truth.npy", *options)
        result = json.loads(Path("evaluation/rows.json").read_text())
        rows.append([{k: v for k, v in row.items() if "recall" in k} for row in result["rows"]])
        assert 10 < result["bytes_a_vector"]["file"] < 14
    assert rows[0] == rows[1] == rows[2]
    found, _ = answers("parts", "--rerank", "x", "--nprobe", 30, "--candidates", 1000)
    assert np.array_equal(found[:, 0], truth[:, 0])
    assert "folder of shards" in invoke("inspect", "parts")


def test_lists_that_faiss_itself_keeps_on_disk(folder):
    index = load_index("one.faiss").index
    core = inverted(index)
    lists = faiss.OnDiskInvertedLists(core.nlist, core.code_size, "lists.ivfdata")
    lists.merge_from(core.invlists, False)
    core.replace_invlists(lists, False)
    save_index(index, "disk.faiss")
    for options in ([], ["--mmap"]):
        for a, b in zip(answers("one.faiss"), answers("disk.faiss", *options), strict=True):
            assert np.array_equal(a, b)


def test_ids_of_the_users_choosing(folder, cluster):
    np.save("ids.npy", np.random.default_rng(0).permutation(10 * N)[:N])
    invoke("build", "q.safetensors", "x", "-o", "one.faiss", "--ids", "ids.npy")
    invoke("build", "q.safetensors", "x", "-o", "two", "--ids", "ids.npy", "--engine", "ray")
    assert same("two")


def test_a_second_run_takes_what_the_first_has_left(folder):
    q = givens.load("q.safetensors")
    jobs = shards.plan(["x"], n)
    Path("parts").mkdir()
    first = shards.encode_here(q, jobs[:6], "parts")
    times = {shard.name: Path("parts", shard.name).stat().st_mtime_ns for shard in first}
    cut, flipped = (Path("parts", shard.name) for shard in first[:2])
    cut.write_bytes(cut.read_bytes()[:-100])
    raw = bytearray(flipped.read_bytes())
    raw[-9] ^= 1
    flipped.write_bytes(raw)
    invoke("build", "q.safetensors", "x", "-o", "parts", "--shards")
    for shard in first[2:]:
        assert Path("parts", shard.name).stat().st_mtime_ns == times[shard.name]
    for a, b in zip(answers("one.faiss"), answers("parts"), strict=True):
        assert np.array_equal(a, b)
    # Another file of the same size, another quantizer: nothing of the old is taken.
    time.sleep(0.01)
    os.utime("x/a.npy")
    before = names(folder / "parts")
    invoke("build", "q.safetensors", "x", "-o", "parts", "--shards")
    assert len(set(before) & set(names(folder / "parts"))) == len(before) - 2
    make(np.load("x.npy") * 2).save("q.safetensors")
    invoke("build", "q.safetensors", "x", "-o", "parts", "--shards")
    assert set(before) & set(names(folder / "parts")) == {"manifest.json"}


def stopped(*_):
    raise RuntimeError


def test_until_a_new_manifest_the_old_index_answers(folder, monkeypatch):
    invoke("build", "q.safetensors", "x", "-o", "parts", "--shards")
    before = answers("parts")
    make(np.load("x.npy") * 2).save("q.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(shards, "finish", stopped)
        with pytest.raises(RuntimeError):
            invoke("build", "q.safetensors", "x", "-o", "parts", "--shards")
    for a, b in zip(before, answers("parts"), strict=True):
        assert np.array_equal(a, b)


def test_a_killed_worker_changes_nothing(folder, cluster):
    killed, built = [], threading.Event()

    def kill():
        while not killed and not built.is_set():
            if len(list(folder.glob("two.faiss.parts/*.lists"))) >= 1:
                for pid in encoding_workers()[:1]:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    invoke("build", "q.safetensors", "x", "-o", "two.faiss", "--engine", "ray")
    built.set()
    killer.join()
    assert killed
    assert same("two.faiss")


def encoding_workers():
    """Processes of this test's own Ray that are at a job."""
    found = []
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            pid = int(status.parent.name)
            if status.read_bytes().startswith(b"ray::encode") and os.getpid() in ancestors(pid):
                found.append(pid)
    return found


def ancestors(pid):
    while pid > 1:
        yield (pid := int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]))


def test_a_killed_driver_and_a_second_run(folder, cluster):
    """Killed in the middle, refused beside another, and finished by the next."""
    code = (
        "from givens.export import shards, source; source.BUFFER, shards.ROWS = 16_000, 1_000\n"
        "from givens.cli import main; main()"
    )
    build = ["build", "q.safetensors", "x", "-o", "two.faiss", "--engine", "ray", "--workers", "1"]
    with subprocess.Popen([sys.executable, "-c", code, *build]) as driver:
        parts = folder / "two.faiss.parts"
        while len(list(parts.glob("*.lists"))) < 3:
            assert driver.poll() is None
            time.sleep(0.01)
        done = main_in_process(
            ["build", "q.safetensors", "x", "-o", "two.faiss", "--engine", "ray"]
        )
        assert done.error.startswith("givens: two.faiss.parts is being written by another build")
        assert len(done.error.splitlines()) == 1
        driver.kill()
    assert not (folder / "two.faiss").exists()
    assert driver.returncode == -signal.SIGKILL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("givens.export.source.BUFFER", 16_000)
        patch.setattr(shards, "ROWS", 1_000)
        kept = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.lists")}
        assert 3 <= len(kept) < 40
        invoke("build", "q.safetensors", "x", "-o", "parts", "--shards")
        # The same shards by name; those of the killed one are taken over in its own folder.
        assert set(kept) <= set(names(folder / "parts"))
        invoke("build", "q.safetensors", "x", "-o", "two.faiss", "--engine", "ray")
    assert same("two.faiss")
    assert not parts.exists()


def test_a_job_whose_workers_all_die(folder, cluster, monkeypatch):
    monkeypatch.setattr("givens.export.ray.encode", lambda *_: os.kill(os.getpid(), 9))
    monkeypatch.setattr("givens.export.ray.RETRIES", 1)
    done = main_in_process(["build", "q.safetensors", "x", "-o", "two.faiss", "--engine", "ray"])
    assert "givens: a worker died 2 times at rows " in done.error
    assert "run it again, it goes on where it was" in done.error
    assert len(done.error.splitlines()) == 1
    assert not Path("two.faiss").exists()


def test_a_worker_without_memory(folder, cluster, monkeypatch):
    def starved(*_):
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, limits[1]))
        try:
            return np.ones(1 << 31)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)

    monkeypatch.setattr("givens.export.ray.encode", starved)
    done = main_in_process(["build", "q.safetensors", "x", "-o", "two.faiss", "--engine", "ray"])
    assert done.error.startswith("givens: Unable to allocate")
    assert not Path("two.faiss").exists()


def test_a_full_disk_leaves_no_index(folder):
    q = givens.load("q.safetensors")
    made = built(q, "parts", "x")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = names(folder)
    # A shard has 64 kB, the index 480 kB.
    for limit, work in (
        (200_000, lambda: shards.merge(q, made, "parts", "two.faiss", {})),
        (20_000, lambda: built(q, "more", "x")),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                work()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(folder) == before
    shards.merge(q, made, "parts", "two.faiss", {})
    assert same("two.faiss")


@pytest.fixture(scope="module")
def spoiled(original, tmp_path_factory):
    """The original, with vectors and shards that are damaged."""
    path = tmp_path_factory.mktemp("spoiled")
    shutil.copytree(original, path, dirs_exist_ok=True)
    with contextlib.chdir(path):
        spoil()
    return path


@pytest.fixture
def bad(spoiled, tmp_path, monkeypatch):
    return enter_copy(spoiled, tmp_path, monkeypatch)


def spoil():
    x = np.load("x.npy")
    for name in ("narrow", "cut", "nan", "empty", "mixed"):
        Path(name).mkdir()
        np.save(f"{name}/a.npy", x[:6000])
    np.save("narrow/b.npy", x[:50, :5])
    Path("cut/b.npy").write_bytes(Path("x.npy").read_bytes()[:5000])
    x[4321] = np.nan
    np.save("nan/b.npy", x)
    Path("empty/a.npy").unlink()
    Path("mixed/notes.txt").write_text("mine")
    q = givens.load("q.safetensors")
    givens.Quantizer(q.rotation, q.codebooks).save("flat.safetensors")
    invoke("build", "q.safetensors", "x", "-o", "parts", "--shards")
    for name in ("missing", "damaged", "unfinished", "strange"):
        invoke("build", "q.safetensors", "x", "-o", name, "--shards")
    first = json.loads(Path("parts/manifest.json").read_text())["shards"][0]["name"]
    Path("missing", first).unlink()
    raw = bytearray(Path("damaged", first).read_bytes())
    raw[-1] ^= 1
    Path("damaged", first).write_bytes(raw)
    Path("unfinished/manifest.json").unlink()
    Path("strange/manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "q", "narrow"], "narrow/b.npy must have vectors of 16 dimensions, but has 5"),
        (["build", "q", "cut"], "cut/b.npy is not a complete .npy file"),
        (["build", "q", "x", "none.npy"], "there is no file none.npy"),
        (["build", "q", "x", "none/"], "none"),
        (["build", "q", "nan"], "row 10321 has NaN"),
        (["build", "q", "empty"], "empty has no files that end in one of .npy"),
        (["build", "q", "file:///nowhere/x.npy"], "there is no file file:///nowhere/x.npy"),
        (["build", "q", "gopher://x.npy"], "gopher"),
        (["build", "flat", "x"], "shards are of inverted lists: the quantizer needs coarse"),
        (["build", "q", "x", "--kind", "pq"], "make an index of kind ivfpq, not pq"),
        (["build", "q", "x", "--workers", "2"], "--address and --workers need --engine ray"),
        (["build", "q", "x", "--engine", "spark"], "--engine must be one of local, ray"),
        (["build", "q", "x", "--engine", "ray", "--workers", "0"], "workers must be at least 1"),
        (["build", "q", "x", "--ids", "queries.npy"], "ids must be 40000 integers"),
        (["build", "q", "x", "-o", "mixed"], "mixed must be empty or hold shards, but has"),
        (["build", "q", "x", "-o", "x.npy"], "x.npy must be a folder for shards, but is a file"),
        (["build", "q", "x", "-o", "x"], "--output must not be x, which is read"),
        (["build", "q", "x", "-o", "no/parts"], "there is no folder"),
        (["search", "missing", "queries.npy"], "missing is incomplete: 00000-"),
        (["search", "damaged", "queries.npy"], "damaged is damaged: 00000-"),
        (["search", "unfinished", "queries.npy"], "unfinished holds no finished index: there is"),
        (["search", "strange", "queries.npy"], "strange is damaged: manifest.json is not"),
        (["search", "x", "queries.npy"], "x holds no finished index"),
        (["evaluate", "missing", "queries.npy", "--groundtruth", "n.npy"], "missing is incomplete"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_index(bad, cluster, arguments, message):
    before = names(bad)
    if arguments[0] == "build":
        arguments = ["build", f"{arguments[1]}.safetensors", *arguments[2:], "--shards"]
        arguments += [] if "-o" in arguments else ["-o", "out"]
    done = main_in_process(arguments)
    assert done.code == 1
    assert message in done.error
    assert done.error.startswith("givens: ")
    assert len(done.error.strip().splitlines()) == 1
    assert set(names(bad)) <= {*before, "out"}
    assert not Path("out/manifest.json").exists()


def test_errors_of_workers_are_told_in_one_line(folder, cluster):
    x = np.load("x.npy")
    x[10_321] = np.nan
    np.save("nan.npy", x)
    done = main_in_process(["build", "q.safetensors", "nan.npy", "-o", "i", "--engine", "ray"])
    assert done.error == (
        "givens: vectors must be finite, but row 10321 has NaN or infinite values\n"
    )
    assert not Path("i").exists()


def test_a_file_that_changes_meanwhile(folder):
    jobs = shards.plan(["x"], n)
    np.save("x/a.npy", np.load("x.npy")[:7_002])
    with pytest.raises(ValueError, match=r"x/a.npy has changed since the build began"):
        shards.encode_here(givens.load("q.safetensors"), jobs, ".")


def test_memory_does_not_grow_with_the_vectors(folder):
    """Three times the vectors, and all the codes on disk."""
    # Large buffers go back to the system at once: the allocator's own habits differ by 20 MB.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "100000"}
    code = (
        "import sys; from givens.cli import app; from givens.export import shards\n"
        "shards.ROWS = 250_000; app(sys.argv[1:], standalone_mode=False)\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    peaks = []
    for rows in (2_000_000, 6_000_000):
        table = np.lib.format.open_memmap("big.npy", "w+", np.uint8, (rows, n))
        table[:] = np.arange(n)
        del table
        build = ["build", "q.safetensors", "big.npy", "-o", f"big{rows}", "--shards"]
        done = subprocess.run(
            [sys.executable, "-c", code, *build], capture_output=True, text=True, env=environment
        )
        peaks.append(1024 * int(done.stdout.split()[-1]))
    # Codes and ids of the 4 million more are 48 MB.
    assert peaks[1] - peaks[0] < 10_000_000


def test_an_address_where_nobody_is(folder):
    build = ["build", "q.safetensors", "x", "-o", "i.faiss", "--engine", "ray"]
    done = subprocess.run(
        [sys.executable, "-m", "givens", *build, "--address", "127.0.0.1:1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("givens: Ray does not answer at 127.0.0.1:1: ")
    assert len(done.stderr.splitlines()) == 1
    assert not {"i.faiss", "i.faiss.parts"} & set(names(folder))


@pytest.mark.parametrize(
    ("error", "told"),
    [(Exception("The node timed out.\nAnd more."), "The node timed out."), (OSError(), "OSError")],
)
def test_a_ray_that_does_not_start(folder, monkeypatch, error, told):
    def fail(**_):
        raise error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    before = names(folder)
    done = main_in_process(["build", "q.safetensors", "x", "-o", "i.faiss", "--engine", "ray"])
    assert (done.code, done.error) == (1, f"givens: Ray does not start here: {told}\n")
    assert names(folder) == before


def test_without_ray_it_says_what_to_install(folder):
    hide = "import sys; sys.modules['ray'] = None; from givens.cli import main; main()"
    build = ["build", "q.safetensors", "x", "-o", "i.faiss", "--engine", "ray"]
    done = subprocess.run([sys.executable, "-c", hide, *build], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "givens: --engine ray needs ray: pip install 'givens[ray]'\n"


def test_a_folder_of_vectors_reads_as_one(folder):
    x = read("x")
    assert x.shape == (N, n)
    assert np.array_equal(x[:], np.load("x.npy"))
    rows = np.random.default_rng(0).integers(0, N, 500)
    assert np.array_equal(x[rows], np.load("x.npy")[rows])
