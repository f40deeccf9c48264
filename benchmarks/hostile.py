"""Damaged files: valid files of every kind that the package reads, damaged and loaded.

`files.py` beside this script loads 100,000 of them, the tests a few hundred. A file is damaged by
bit flips, truncation, splices, zeroed ranges and edits of its header and length field, and loaded
in a child process, so that crashes can be counted. A kind with a digest must load with its original
contents or be refused by an exception of one line. A kind without, such as .npy or a click log, may
load with other contents, but must not crash, hang or end in a traceback.
"""

import contextlib
import gzip
import hashlib
import json
import os
import random
import resource
import select
import shutil
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import givens
from givens.export import shards
from givens.export.faiss import load_index, save_index, to_faiss
from givens.fixed.fit import Progress
from givens.paper import rows as paper_rows
from givens.report.runs import read_runs
from givens.retrieval import checkpoint, readers
from givens.retrieval.config import config_for
from givens.retrieval.data import click_log
from givens.retrieval.state import State
from givens.storage import vectors

SLOW = 2.0
HUNG = 20.0
MARGIN = 64 << 20
# The memory limit of a load, so that a wrong size cannot exhaust the machine.
MOST = 6 << 30
OUTCOMES = ("refused", "same", "changed", "unclean", "crashed", "hung", "over 2 s", "over memory")
# The exceptions that a command reports in one line.
OURS = (ValueError, OSError, ImportError, MemoryError)


@dataclass(frozen=True)
class Target:
    """A kind of file: how to write it, and a digest of what is read from it."""

    name: str
    file: str
    write: Callable[[Path], object]
    answer: Callable[[Path], str]
    digest: bool = True
    """Whether the file has a digest, so that no damage may pass."""
    # The exceptions that count as a refusal; others are counted as unclean.
    refusals: tuple[type[Exception], ...] = OURS


def digest(*parts: Any) -> str:
    """A digest of texts, bytes, arrays, tensors and anything with a `repr`."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor | np.ndarray):
            table = np.ascontiguousarray(part)
            found.update(f"{table.dtype}{table.shape}".encode() + table.tobytes())
        else:
            found.update(part if isinstance(part, bytes) else repr(part).encode())
    return found.hexdigest()


def search_index(index: Any, queries: np.ndarray) -> str:
    """A digest of an index's answers."""
    return digest(*index.search(queries, 10))


def quantizer(n: int, D: int, K: int, L: int, seed: int) -> givens.Quantizer:
    """A quantizer with random parts."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(L, n, generator=generator) if L else None
    codebooks = torch.randn(D, K, n // D, generator=generator)
    return givens.Quantizer(givens.random_rotation(n, seed), codebooks, coarse)


def ours() -> list[Target]:
    """All kinds of files that the package reads."""
    return [*_list_sealed(), _run_folder(), *_list_logs(), *_list_tables()]


def _list_sealed() -> list[Target]:
    """The kinds with digests."""
    q, flat = quantizer(64, 8, 256, 16, 0), quantizer(64, 8, 256, 0, 0)
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(1))
    queries, index = x[:20].numpy(), to_faiss(flat, x)

    def answer_index(path: Path) -> str:
        stored = load_index(path)
        return digest(search_index(stored.index, queries), stored.record)

    def answer_shards(path: Path) -> str:
        stored = shards.load_shards(path)
        return digest(search_index(stored.index, queries), stored.record)

    def answer_progress(path: Path) -> str:
        return digest(*vars(Progress.load(path)).values())

    log = click_log(300, 120, 6000)
    run = State(log, config_for(log, size="small", dim=16, subspaces=4, codewords=16, batch=32))

    def answer_checkpoint(path: Path) -> str:
        checkpoint.load(run, path)
        return digest(run.step, run.rows, sorted(run.parts()), *run.parts().values())

    progress = Progress(3, 16, 2000, 0.5, q.rotation, q.codebooks)
    return [
        Target("givens Quantizer", "q.safetensors", q.save, lambda p: givens.load(p).fingerprint),
        Target(
            "givens index (Faiss file and record)",
            "index.faiss",
            lambda path: save_index(index, path),
            answer_index,
        ),
        Target(
            "givens shards",
            "parts",
            lambda path: _write_shards(quantizer(64, 8, 256, 16, 0), path),
            answer_shards,
        ),
        Target(
            "givens checkpoint",
            "checkpoint.safetensors",
            lambda path: checkpoint.save(run, path),
            answer_checkpoint,
        ),
        Target("givens fit state", "q.part", progress.save, answer_progress),
    ]


def _write_shards(q: givens.Quantizer, folder: Path) -> None:
    """Write three shards."""
    x = torch.randn(1500, q.dim, generator=torch.Generator().manual_seed(1)).numpy()
    pieces = [x[:600], x[600:1200], x[1200:]]
    with shards.building(folder):
        made = []
        for number, part in enumerate(pieces):
            source = folder.with_name(f"{number}.npy")
            np.save(source, part)
            piece = shards.Piece(str(source), 0, len(part), vectors.stamp(str(source)))
            job = shards.Job(number, 600 * number, (piece,))
            made.append(shards.encode(q, job, folder))
            source.unlink()
        shards.finish(q, made, folder, {"seed": 3})


def _run_folder() -> Target:
    """The folder of a run, as a report reads it; it has no digest."""
    configuration = {"method": "gcd-greedy", "codewords": 16, "subspaces": 4, "dim": 16}
    configuration |= {"warmup": 10, "steps": 10}
    found = {"recall@10": 0.25, "recall@100": 0.5, "precision@10": 0.1}
    results = dict.fromkeys(("index", "full", "decoded", "popularity"), found)
    row = {"phase": "joint", "recall": 0.5, "distortion": 0.1, "angle": 1e-3, "orthogonality": 1e-6}

    def write(path: Path) -> None:
        path.mkdir()
        about = {"configuration": configuration, "seed": 0, "versions": {}, "command": []}
        about |= {"log": "a log of clicks"}
        (path / "config.json").write_text(json.dumps(about))
        rows = [json.dumps({**row, "step": step}) for step in (10, 20)]
        (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in rows))
        results_ = {**results, "distortion": 0.1, "best_step": 20, "agreement": 1.0}
        (path / "results.json").write_text(json.dumps(results_))

    def answer(path: Path) -> str:
        (run,) = read_runs([path])
        return digest(run.label, run.about, run.rows, run.results, run.standing, run.recall)

    return Target("run folder", "run", write, answer, digest=False)


def _list_logs() -> list[Target]:
    """The layouts of click logs."""
    draw = random.Random(0)
    clicks = [
        (user, item, draw.randrange(4, 6), 100 * at + user)
        for user in range(60)
        for at, item in enumerate(draw.sample(range(60), 15))
    ]
    review = '{{"reviewerID": "u{}", "asin": "i{}", "overall": {}, "unixReviewTime": {}}}'
    texts = {
        "ratings.dat": "".join("{}::{}::{}::{}\n".format(*click) for click in clicks),
        "ratings.csv": "userId,movieId,rating,timestamp\n"
        + "".join("{},{},{},{}\n".format(*click) for click in clicks),
        "reviews.json": "".join(review.format(*click) + "\n" for click in clicks),
        "rows.txt": "".join("{} {}\n".format(*click[:2]) for click in clicks),
        "baskets.txt": "".join(
            f"{user} {' '.join(str(i) for u, i, *_ in clicks if u == user)}\n" for user in range(60)
        ),
    }

    def answer(path: Path) -> str:
        return readers.read(path).fingerprint

    def log(file: str, content: bytes) -> Target:
        return Target(
            f"click log {file}", file, lambda path: path.write_bytes(content), answer, digest=False
        )

    packed = gzip.compress(texts["reviews.json"].encode(), mtime=0)
    return [
        *(log(file, text.encode()) for file, text in texts.items()),
        log("reviews.json.gz", packed),
    ]


def _list_tables() -> list[Target]:
    """Vectors of the seven formats, and rows of the paper's figures."""
    import h5py
    import pyarrow as pa
    import pyarrow.parquet as pq
    import safetensors.torch

    x = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)

    def vecs(path: Path) -> None:
        suffixes = {".fvecs": np.float32, ".ivecs": np.int32, ".bvecs": np.uint8}
        table = np.abs(x * 50).astype(suffixes[path.suffix])
        lead = np.full((len(x), 1), 16, "<i4").view(np.uint8)
        np.hstack([lead, table.view(np.uint8).reshape(len(x), -1)]).tofile(path)

    def hdf5(path: Path, **options: Any) -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("train", data=x, **options)
            file["test"] = x[:9]

    def parquet(path: Path) -> None:
        column = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 16)
        pq.write_table(pa.table({"vector": column}), path, row_group_size=100)

    def tensors(path: Path) -> None:
        safetensors.torch.save_file({"train": torch.from_numpy(x)}, path)

    writers = {
        "x.npy": lambda path: np.save(path, x),
        "x.fvecs": vecs,
        "x.bvecs": vecs,
        "x.ivecs": vecs,
        "x.hdf5": hdf5,
        "packed.hdf5": lambda path: hdf5(path, chunks=(64, 16), compression="gzip"),
        "x.parquet": parquet,
        "x.safetensors": tensors,
    }

    def answer(path: Path) -> str:
        return digest(vectors.read(path, "train")[:])

    def figure(path: Path) -> str:
        return digest(paper_rows.read(path))

    rows = [{"method": "pq", "iteration": i, "distortion": i / 7} for i in range(50)]
    return [
        *(Target(f"vectors {f}", f, write, answer, digest=False) for f, write in writers.items()),
        Target(
            "rows of a figure",
            "rows.json",
            lambda path: path.write_text(json.dumps(rows)),
            figure,
            digest=False,
        ),
    ]


def mutate(raw: bytes, seed: int) -> tuple[str, bytes]:
    """The kind of damage, and a damaged copy, both determined by the seed."""
    draw = random.Random(seed)
    data = bytearray(raw)
    # The header of a safetensors file, or the first bytes of another format.
    head = min(len(raw), 8 + min(int.from_bytes(raw[:8], "little"), 2048))
    at = draw.randrange(len(raw))
    length = draw.choice([1, 8, 64, 4096])
    kind = draw.choice(["flip", "truncate", "splice", "zero", "header", "length", "grow", "drop"])
    if kind == "flip":
        for _ in range(draw.choice([1, 1, 2, 8])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "truncate":
        del data[at:]
    elif kind == "splice":
        source = draw.randrange(len(raw))
        data[at : at + length] = raw[source : source + length]
    elif kind == "zero":
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == "header":
        for _ in range(draw.choice([1, 2, 4])):
            old = data[draw.randrange(head)]
            # Digits become digits, so that the header often still parses.
            new = draw.randrange(48, 58) if 48 <= old < 58 else draw.randrange(256)
            data[draw.choice([i for i in range(head) if data[i] == old])] = new
    elif kind == "length":
        field = draw.choice([0, 8 * draw.randrange(head // 8), 4 * draw.randrange(head // 4)])
        value = draw.choice([0, 1, len(raw), draw.getrandbits(16), draw.getrandbits(62), 2**63 - 1])
        data[field : field + 8] = value.to_bytes(8, "little")
    elif kind == "grow":
        data[at:at] = draw.randbytes(length)
    else:
        del data[at : at + length]
    return kind, bytes(data)


def attack(target: Target, count: int, folder: Path) -> dict[str, Any]:
    """Load `count` damaged files; returns a row of outcomes."""
    home = folder / "case"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    target.write(home / target.file)
    # If a kind has several files, one of them is damaged at a time.
    raws = {path: path.read_bytes() for path in sorted(home.rglob("*")) if path.is_file()}
    size, truth = sum(map(len, raws.values())), target.answer(home / target.file)
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    slowest, most, done = 0.0, 0, 0
    examples: dict[str, str] = {}
    while done < count:
        for row in _child(target, raws, truth, range(done, count), home):
            if row is None:
                break
            done += 1
            outcomes[row["outcome"]] += 1
            kinds[f"{row['kind']}: {row['outcome']}"] += 1
            slowest, most = max(slowest, row["seconds"]), max(most, row["memory"])
            outcomes["over 2 s"] += row["seconds"] > SLOW
            outcomes["over memory"] += row["memory"] > 2 * size + MARGIN
            if row["outcome"] not in ("refused", "same"):
                examples.setdefault(row["outcome"], f"seed {row['seed']}: {row['detail']}")
    return {
        "part": "mutations",
        "target": target.name,
        "digest": target.digest,
        "files": count,
        "bytes": size,
        **{name: outcomes[name] for name in OUTCOMES},
        "slowest_s": round(slowest, 4),
        "most_memory_mb": round(most / 1e6, 1),
        "by_mutation": dict(sorted(kinds.items())),
        "examples": examples,
    }


def damage(raws: dict[Path, bytes], seed: int) -> tuple[Path, str, bytes]:
    """The file that this seed damages, the kind of damage, and the damaged contents."""
    path = sorted(raws)[seed % len(raws)]
    return path, *mutate(raws[path], seed)


def _child(target: Target, raws: dict[Path, bytes], truth: str, seeds: range, home: Path) -> Any:
    """Rows of a forked process that loads the files of these seeds, until it crashes or ends."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        with contextlib.suppress(BaseException):
            _load_all(target, raws, truth, seeds, home, write)
        os._exit(0)
    os.close(write)
    pending = b""
    expected = iter(seeds)
    outcome = None
    try:
        while True:
            ready, _, _ = select.select([read], [], [], HUNG)
            if not ready:
                os.kill(process, signal.SIGKILL)
                outcome = "hung"
            block = os.read(read, 1 << 16) if ready else b""
            *lines, pending = (pending + block).split(b"\n")
            for line in lines:
                next(expected)
                yield json.loads(line)
            if not block:
                break
    finally:
        os.close(read)
        _, status = os.waitpid(process, 0)
    for path, raw in raws.items():
        path.write_bytes(raw)
    died = next(expected, None)
    if died is not None:
        yield {
            "seed": died,
            "kind": damage(raws, died)[1],
            "outcome": outcome or "crashed",
            "seconds": HUNG if outcome else 0.0,
            "memory": 0,
            "detail": f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "exit",
        }
    yield None


def _load_all(
    target: Target, raws: dict[Path, bytes], truth: str, seeds: range, home: Path, pipe: int
) -> None:
    # Silences the stderr of peers.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + MOST,) * 2)
    for seed in seeds:
        path, kind, data = damage(raws, seed)
        path.write_bytes(data)
        _reset_peak()
        before, began, detail = _memory("VmRSS"), time.perf_counter(), ""
        try:
            outcome = "same" if target.answer(home / target.file) == truth else "changed"
        except target.refusals as error:
            detail = str(error)
            peer = target.refusals == (Exception,)
            outcome = "refused" if peer or "\n" not in detail else "unclean"
        except Exception as error:
            outcome, detail = "unclean", repr(error)
        row = {
            "seed": seed,
            "kind": kind,
            "outcome": outcome,
            "seconds": time.perf_counter() - began,
            "memory": max(_memory("VmHWM") - before, 0),
            "detail": detail[:200],
        }
        path.write_bytes(raws[path])
        os.write(pipe, json.dumps(row).encode() + b"\n")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _memory(name: str) -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])
