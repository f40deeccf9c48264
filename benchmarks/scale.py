"""Many vectors on one machine: built by one process and by Ray, searched in memory and on disk.

    python benchmarks/scale.py --json results/scale.json

10 million clustered random vectors of n = 96 in several files; a quantizer of 16 × 256 codewords
and 4,096 lists is fitted to the first file. Every command runs in a process of its own. Its memory
is that of all processes it starts, sampled four times a second as PSS, which counts shared pages
once and includes mapped files. Rows have the times to encode and to merge. Both builds must give
the same file, and all searches the same neighbours, or nothing is written.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from givens.paper.rows import Rows, environment, write
from givens.storage.files import checksum

FILE = 500_000
CLUSTERS, QUERIES, K = 20_000, 10_000, 10
PACKAGES = ("torch", "numba", "faiss-cpu", "ray")


def make_vectors(folder: Path, N: int, n: int) -> None:
    """Write files of vectors around centres, with a decaying spectrum, each by its own seed."""
    spectrum = np.linspace(1.5, 0.2, n, dtype=np.float32)
    centres = np.random.default_rng(0).standard_normal((CLUSTERS, n), np.float32) * spectrum
    (folder / "base").mkdir()
    for number, first in enumerate(range(0, N, FILE)):
        rows = min(FILE, N - first)
        np.save(folder / "base" / f"{number:04d}.npy", _draw(number + 1, rows, centres, spectrum))
    np.save(folder / "queries.npy", _draw(0, QUERIES, centres, spectrum))


def _draw(seed: int, rows: int, centres: Any, spectrum: Any) -> Any:
    generator = np.random.default_rng([7, seed])
    x = centres[generator.integers(0, CLUSTERS, rows)]
    x += 0.5 * spectrum * generator.standard_normal(x.shape, np.float32)
    return x


def measure(folder: Path, *command: str) -> dict[str, Any]:
    """Run a `givens` command; returns its time and the peak memory of all its processes."""
    began = time.perf_counter()
    arguments = [sys.executable, "-m", "givens", *command]
    peak: dict[str, int] = {}
    with subprocess.Popen(arguments, cwd=folder, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            now = read_memory(process.pid)
            if sum(now.values()) > sum(peak.values()):
                peak = now
            time.sleep(0.25)
    if process.returncode:
        raise SystemExit(f"givens {' '.join(command)} failed")
    return {
        "command": " ".join(["givens", *command]),
        "seconds": time.perf_counter() - began,
        "peak_bytes": sum(peak.values()),
        # The shares of the command itself, of Ray's workers, and of Ray's own processes.
        "peak_of": peak,
    }


def read_memory(root: int) -> dict[str, int]:
    """The PSS in bytes of a process and its descendants, by kind."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
            names[int(folder.name)] = (folder / "cmdline").read_bytes()
        except OSError:
            continue
    total: dict[str, int] = {}
    for pid in parents:
        above = pid
        while above not in (root, 0):
            above = parents.get(above, 0)
        if above == root:
            kind = "command" if pid == root else "ray"
            kind = "workers" if names[pid].startswith(b"ray::encode") else kind
            total[kind] = total.get(kind, 0) + _read_pss(pid)
    return total


def _read_pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def run(options: argparse.Namespace, folder: Path) -> Rows:
    """Run all commands; returns their rows."""
    make_vectors(folder, options.vectors, options.dim)
    about = {
        **environment("cpu", PACKAGES),
        "cores": len(os.sched_getaffinity(0)),
        "vectors": options.vectors,
        "dim": options.dim,
        "subspaces": options.subspaces,
        "coarse": options.coarse,
    }
    sizes = ["--subspaces", str(options.subspaces), "--coarse", str(options.coarse)]
    fit = ["fit", "base/0000.npy", "-o", "q.safetensors", *sizes, "--iterations", "10"]
    rows = [{"step": "fit", **measure(folder, *fit)}]
    for engine in ("local", "shards", "ray"):
        choice = ["--shards"] if engine == "shards" else ["--engine", engine]
        row = measure(folder, "build", "q.safetensors", "base", "-o", f"{engine}.faiss", *choice)
        inside = f"{engine}.faiss/manifest.json" if engine == "shards" else f"{engine}.faiss.json"
        record = json.loads((folder / inside).read_text())
        rows.append({"step": "build", "engine": engine, **row, "parts": record.get("seconds")})
    if checksum(folder / "local.faiss") != checksum(folder / "ray.faiss"):
        raise SystemExit("the two builds are not the same file")
    for name, *flags in (["local.faiss"], ["local.faiss", "--mmap"], ["shards.faiss"]):
        search = ["search", name, "queries.npy", "-k", str(K), "--nprobe", "16", "-o", "found.npy"]
        row = measure(folder, *search, *flags)
        spent = json.loads((folder / "found.npy.json").read_text())["seconds"]
        found = np.load(folder / "found.npy")
        if len(rows) == 4:
            first = found
        if not np.array_equal(found, first):
            raise SystemExit(f"{name} {flags} answers otherwise")
        rows.append({"step": "search", "index": name, "mapped": bool(flags), **row})
        rows[-1] |= {"queries": QUERIES, "search_seconds": spent}
    return [{**row, **about} for row in rows]


def main() -> None:
    """Make vectors, build, search, write rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vectors", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--subspaces", type=int, default=16)
    parser.add_argument("--coarse", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="folder of vectors and indexes: 2 × their size")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = run(options, Path(folder))
    for row in rows:
        peak = ", ".join(f"{kind} {count / 2**20:,.0f}" for kind, count in row["peak_of"].items())
        parts = row.get("parts") or {}
        print(
            f"{row['step']:<7}{row.get('engine') or row.get('index', ''):<13}"
            f"{row['seconds']:>8.1f} s {row['peak_bytes'] / 2**20:>8,.0f} MiB ({peak}) "
            + " ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
            + (f"search {row['search_seconds']:.2f} s" if "search_seconds" in row else "")
        )
    if options.json:
        write(options.json, rows)


if __name__ == "__main__":
    main()
