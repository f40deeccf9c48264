"""Damaged files, kills and full disks: what happens to a file, with givens and with its peers.

    python benchmarks/files.py --json results/files.json        10 minutes on one core
    python benchmarks/files.py --quick                          seconds

Mutations: files of every kind that the package reads, and files of the peers, are damaged and
loaded (`hostile.py` beside this script). Time and memory of every load are measured.

Kills: a child process overwrites a file repeatedly until SIGKILL; then the file must be the old or
the new one. Full disk: a file is overwritten by one that does not fit, on a small tmpfs or, if none
can be mounted, under a limit on the file size. `kills.py` stops whole commands.

hnswlib and usearch are included if they are installed. nanopq is not: it uses pickle, which
executes code from the file.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import random
import resource
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
from hostile import Target, attack, digest, ours, quantizer, search_index

import givens
from givens.export.faiss import load_index, save_index, to_faiss
from givens.storage import files

# Mutations of quantizers, of each of our other kinds, and of the peers' files; kills; vectors in
# the index that is overwritten.
FULL = (20_000, 4000, 10_000, 1000, 300_000)
QUICK = (200, 25, 100, 30, 20_000)


def peers() -> list[Target]:
    """Files of other packages, with the same contents as ours."""
    q = quantizer(64, 8, 256, 16, 0)
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(1))
    queries, index = x[:20].numpy(), to_faiss(quantizer(64, 8, 256, 0, 0), x)
    parts = {"rotation": q.rotation, "codebooks": q.codebooks, "coarse": q.coarse}

    def plain(path: Path) -> str:
        tensors = safetensors.torch.load_file(path)
        return digest(sorted(tensors), *(tensors[name] for name in sorted(tensors)))

    def target(name: str, write: Callable[[Path], object], answer: Callable[[Path], str]) -> Target:
        return Target(name, "file", write, answer, digest=False, refusals=(Exception,))

    found = [
        target("plain safetensors", lambda path: safetensors.torch.save_file(parts, path), plain),
        target(
            "faiss.read_index (OPQ+PQ)",
            lambda path: faiss.write_index(index, str(path)),
            lambda path: search_index(faiss.read_index(str(path)), queries),
        ),
    ]
    if importlib.util.find_spec("hnswlib"):
        found.append(target("hnswlib", *_hnswlib(x.numpy(), queries)))
    if importlib.util.find_spec("usearch"):
        found.append(target("usearch", *_usearch(x.numpy(), queries)))
    return found


def _hnswlib(x: np.ndarray, queries: np.ndarray) -> Any:
    import hnswlib

    index = hnswlib.Index("l2", x.shape[1])
    index.init_index(len(x), random_seed=0)
    index.set_num_threads(1)
    index.add_items(x)

    def answer(path: Path) -> str:
        loaded = hnswlib.Index("l2", x.shape[1])
        loaded.load_index(str(path))
        loaded.set_num_threads(1)
        return digest(*loaded.knn_query(queries, 10))

    return lambda path: index.save_index(str(path)), answer


def _usearch(x: np.ndarray, queries: np.ndarray) -> Any:
    from usearch.index import Index

    index = Index(ndim=x.shape[1], metric="l2sq", dtype="f32")
    index.add(np.arange(len(x)), x, threads=1)

    def answer(path: Path) -> str:
        loaded = Index(ndim=x.shape[1], metric="l2sq", dtype="f32")
        loaded.load(str(path))
        found = loaded.search(queries, 10, threads=1)
        return digest(found.keys, found.distances)

    return lambda path: index.save(str(path)), answer


@dataclass(frozen=True)
class Overwriting:
    """Writes versions 0 and 1 of a file and a much larger 2, and tells which one a path holds."""

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
        # After one more write, no temporary file may be left.
        "left_behind": sum(1 for name in folder.iterdir() if name.name.startswith(".")),
    }


def fill(one: Overwriting, folder: Path) -> dict[str, Any]:
    """Overwrite a file on a disk that has no room for the new version."""
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
    # Room for one and a half files; the larger version is three times as large.
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
    """Versions and system."""
    versions = {"givens": givens.__version__}
    for name in ("torch", "faiss-cpu", "safetensors", "hnswlib", "usearch", "h5py", "pyarrow"):
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
    # Threads do not survive a fork; children would wait for them.
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    many, some, theirs, kills, vectors = QUICK if options.quick else FULL
    about, rows = environment(), []
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        for target in ours():
            count = many if target.name == "givens Quantizer" else some
            rows.append(attack(target, count, Path(folder)))
            _show(rows[-1])
        for target in peers():
            rows.append(attack(target, theirs, Path(folder)))
            _show(rows[-1])
    # On a disk, not in memory.
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
