"""Hostile files, kills and full disks: what is left of a file, here and with the peers.

    python benchmarks/files.py --json results/files.json        10 minutes on one core
    python benchmarks/files.py --quick                          seconds

Mutations: a valid file is damaged by bit flips, truncation, splices, zeroed ranges, edits of its
header and of its length field, and loaded in a child process, so that a crash is counted and not
suffered. A load either is refused by an exception, or must give what was saved. Time and memory of
every load are watched.

Kills: a child overwrites a file again and again until SIGKILL; then the file must be the old or the
new one. Full disk: a file is overwritten by one that does not fit, on a small tmpfs, or where it
cannot be mounted under a limit on the file's size.

hnswlib takes part where it is installed. nanopq is left out: it is stored by pickle, which runs
what a file says, so that there is nothing to expect of it.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import resource
import select
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import safetensors.torch
import torch

import givens
from givens.export.faiss import load_index, save_index, to_faiss
from givens.storage import files

SLOW = 1.0
HUNG = 20.0
MARGIN = 64 << 20
# Mutations of our file and of each other, kills, vectors in the index that is overwritten.
FULL = (100_000, 10_000, 1000, 300_000)
QUICK = (1000, 100, 30, 20_000)
OUTCOMES = ("refused", "same", "changed", "unclean", "crashed", "hung", "over 1 s", "over memory")


@dataclass(frozen=True)
class Target:
    """A kind of file: how to write one, and the answers that one gives."""

    name: str
    write: Callable[[Path], None]
    answer: Callable[[Path], str]
    # What a refusal may be; anything else Python raises is counted apart.
    refusals: tuple[type[Exception], ...] = (Exception,)


def quantizer(n: int, D: int, K: int, L: int, seed: int) -> givens.Quantizer:
    """One with random parts."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(L, n, generator=generator) if L else None
    codebooks = torch.randn(D, K, n // D, generator=generator)
    return givens.Quantizer(givens.random_rotation(n, seed), codebooks, coarse)


def targets() -> list[Target]:
    """Ours, and the peers' with the same contents."""
    q = quantizer(64, 8, 256, 16, 0)
    flat = quantizer(64, 8, 256, 0, 0)
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(1))
    queries = x[:20].numpy()
    index = to_faiss(flat, x)
    parts = {"rotation": q.rotation, "codebooks": q.codebooks, "coarse": q.coarse}

    def plain(path: Path) -> str:
        tensors = safetensors.torch.load_file(path)
        shapes = {name: tuple(tensor.shape) for name, tensor in sorted(tensors.items())}
        return _hash(str(shapes), *(tensors[name].numpy().tobytes() for name in shapes))

    ours = (ValueError, OSError)
    found = [
        Target("givens Quantizer", q.save, lambda path: givens.load(path).fingerprint, ours),
        Target(
            "givens index (Faiss file and record)",
            lambda path: save_index(index, path),
            lambda path: _searched(load_index(path).index, queries),
            ours,
        ),
        Target("plain safetensors", lambda path: safetensors.torch.save_file(parts, path), plain),
        Target(
            "faiss.read_index (OPQ+PQ)",
            lambda path: faiss.write_index(index, str(path)),
            lambda path: _searched(faiss.read_index(str(path)), queries),
        ),
    ]
    if importlib.util.find_spec("hnswlib"):
        found.append(_hnswlib(x.numpy(), queries))
    return found


def _hnswlib(x: np.ndarray, queries: np.ndarray) -> Target:
    import hnswlib

    index = hnswlib.Index("l2", x.shape[1])
    index.init_index(len(x), random_seed=0)
    index.set_num_threads(1)
    index.add_items(x)

    def answer(path: Path) -> str:
        loaded = hnswlib.Index("l2", x.shape[1])
        loaded.load_index(str(path))
        loaded.set_num_threads(1)
        return _hash(*(part.tobytes() for part in loaded.knn_query(queries, 10)))

    return Target("hnswlib", lambda path: index.save_index(str(path)), answer)


def _searched(index: Any, queries: np.ndarray) -> str:
    return _hash(*(part.tobytes() for part in index.search(queries, 10)))


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def mutated(raw: bytes, seed: int) -> tuple[str, bytes]:
    """A damaged copy, and the kind of damage; the same for the same seed."""
    draw = random.Random(seed)
    data = bytearray(raw)
    # A safetensors header, or about as much of another format.
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
            # A digit for a digit, so that the header often still parses.
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
    """Load `count` mutated files and count what happens."""
    original = folder / "original"
    target.write(original)
    raw, truth = original.read_bytes(), target.answer(original)
    record = original.with_name("original.json")
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    slowest, most, done = 0.0, 0, 0
    examples: dict[str, str] = {}
    while done < count:
        for row in _child(target, raw, truth, record, range(done, count), folder):
            if row is None:
                break
            done += 1
            outcomes[row["outcome"]] += 1
            kinds[f"{row['kind']}: {row['outcome']}"] += 1
            slowest, most = max(slowest, row["seconds"]), max(most, row["memory"])
            outcomes["over 1 s"] += row["seconds"] > SLOW
            outcomes["over memory"] += row["memory"] > 2 * len(raw) + MARGIN
            if row["outcome"] not in ("refused", "same"):
                examples.setdefault(row["outcome"], f"seed {row['seed']}: {row['detail']}")
    return {
        "part": "mutations",
        "target": target.name,
        "files": count,
        "bytes": len(raw),
        **{name: outcomes[name] for name in OUTCOMES},
        "slowest_s": round(slowest, 4),
        "most_memory_mb": round(most / 1e6, 1),
        "by_mutation": dict(sorted(kinds.items())),
        "examples": examples,
    }


def _child(target: Target, raw: bytes, truth: str, record: Path, seeds: range, folder: Path) -> Any:
    """Rows of a forked process that loads the files of these seeds; the last may be its death."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        with contextlib.suppress(BaseException):
            _loads(target, raw, truth, record, seeds, folder, write)
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
    died = next(expected, None)
    if died is not None:
        yield {
            "seed": died,
            "kind": mutated(raw, died)[0],
            "outcome": outcome or "crashed",
            "seconds": HUNG if outcome else 0.0,
            "memory": 0,
            "detail": f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "exit",
        }
    yield None


def _loads(
    target: Target,
    raw: bytes,
    truth: str,
    record: Path,
    seeds: range,
    folder: Path,
    pipe: int,
) -> None:
    path = folder / "mutated"
    if record.exists():
        path.with_name("mutated.json").write_bytes(record.read_bytes())
    # A peer's words on stderr are not wanted.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for seed in seeds:
        kind, data = mutated(raw, seed)
        path.write_bytes(data)
        _reset_peak()
        before, began, detail = _memory("VmRSS"), time.perf_counter(), ""
        try:
            outcome = "same" if target.answer(path) == truth else "changed"
        except target.refusals as error:
            detail = str(error)
            outcome = (
                "refused" if target.refusals == (Exception,) or "\n" not in detail else "unclean"
            )
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
        os.write(pipe, json.dumps(row).encode() + b"\n")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _memory(name: str) -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


@dataclass(frozen=True)
class Overwriting:
    """Versions 0 and 1 of a file and a much larger 2, and how to tell which one a path holds."""

    name: str
    write: Callable[[int, Path], None]
    which: Callable[[Path], str]


def overwritings(vectors: int) -> list[Overwriting]:
    """A quantizer and an index, ours and the peers'."""
    qs = [quantizer(512, 64, 256, L, L) for L in (1, 2, 4096)]
    x = torch.randn(vectors, 128, generator=torch.Generator().manual_seed(1))
    indexes = [to_faiss(quantizer(128, 64, 256, 0, seed), x) for seed in range(3)]
    for _ in range(2):
        indexes[2].add(x.numpy())

    def whole(path: Path) -> str:
        faiss.read_index(str(path))
        return files.checksum(path)

    return [
        Overwriting(
            "givens Quantizer.save",
            lambda version, path: qs[version].save(path),
            lambda path: givens.load(path).fingerprint,
        ),
        Overwriting(
            "givens save_index",
            lambda version, path: save_index(indexes[version], path, {"version": version}),
            lambda path: str((load_index(path).record or {})["version"]),
        ),
        Overwriting(
            "faiss.write_index",
            lambda version, path: faiss.write_index(indexes[version], str(path)),
            whole,
        ),
        Overwriting(
            "plain safetensors",
            lambda version, path: safetensors.torch.save_file(
                {"rotation": qs[version].rotation, "coarse": qs[version].coarse}, path
            ),
            files.checksum,
        ),
    ]


def kill(one: Overwriting, count: int, folder: Path) -> dict[str, Any]:
    """Kill a process that overwrites a file, `count` times."""
    path = folder / "file"
    draw = random.Random(0)
    known = []
    for version in (1, 0):
        before = time.perf_counter()
        one.write(version, path)
        spent = time.perf_counter() - before
        known.append(one.which(path))
    lost: Counter[str] = Counter()
    size = path.stat().st_size
    for _ in range(count):
        began, begins = os.pipe()
        process = os.fork()
        if process == 0:
            os.write(begins, b"!")
            while True:
                for version in (1, 0):
                    one.write(version, path)
        os.read(began, 1)
        time.sleep(draw.uniform(0, 3 * spent))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(began)
        os.close(begins)
        try:
            if one.which(path) not in known:
                lost["changed"] += 1
        except Exception as error:
            lost[type(error).__name__] += 1
            one.write(0, path)
    one.write(0, path)
    return {
        "part": "kills",
        "target": one.name,
        "kills": count,
        "bytes": size,
        "write_ms": round(1e3 * spent, 2),
        "lost": sum(lost.values()),
        "how": dict(lost),
        # After one more write nothing of the killed ones may lie about.
        "left_behind": sum(1 for name in folder.iterdir() if name.name.startswith(".")),
    }


def fill(one: Overwriting, folder: Path) -> dict[str, Any]:
    """Overwrite a file on a disk that has no room for a second one."""
    path = folder / "file"
    one.write(0, path)
    with _full_disk(path) as (where, how):
        if where != path:
            one.write(0, where)
        before = one.which(where)
        told, kept = "nothing", False
        try:
            one.write(2, where)
        except Exception as error:
            told = f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
        with contextlib.suppress(Exception):
            kept = one.which(where) == before
        temporary = sum(1 for name in where.parent.iterdir() if name.name.startswith("."))
    return {
        "part": "full disk",
        "target": one.name,
        "by": how,
        "told": told.replace(str(where), "FILE"),
        "old_file_kept": kept,
        "left_behind": temporary,
    }


@contextlib.contextmanager
def _full_disk(path: Path) -> Any:
    # For one and a half of them: the larger version is three.
    room = 3 * path.stat().st_size // 2
    disk = path.with_name("disk")
    disk.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(disk)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0:
        try:
            yield disk / "file", "tmpfs"
        finally:
            subprocess.run(["umount", str(disk)], check=True)
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield path, "RLIMIT_FSIZE"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    versions = {"givens": givens.__version__}
    for name in ("torch", "faiss-cpu", "safetensors", "hnswlib"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    return {
        "versions": versions,
        "python": platform.python_version(),
        "system": platform.system(),
        "commit": commit.strip(),
    }


def main() -> None:
    """Run all parts and print a row for each target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--quick", action="store_true", help="a hundredth of everything")
    options = parser.parse_args()
    # Forked children would wait for threads that they do not have.
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    ours, peers, kills, vectors = QUICK if options.quick else FULL
    about, rows = environment(), []
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for target in targets():
            count = ours if target.name == "givens Quantizer" else peers
            rows.append(attack(target, count, Path(folder)))
            _show(rows[-1])
    # On a disk that syncs, not in memory.
    for one in overwritings(vectors):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(kill(one, kills, Path(folder)))
            _show(rows[-1])
            rows.append(fill(one, Path(folder)))
            _show(rows[-1])
    if options.json:
        files.write_json(options.json, {**about, "rows": rows})


def _show(row: dict[str, Any]) -> None:
    print({name: value for name, value in row.items() if name not in ("by_mutation", "examples")})


if __name__ == "__main__":
    main()
