"""Many vectors on one machine: built by one process and by Ray, and searched in memory and on disk.

    python benchmarks/scale.py --json results/scale.json

10 million vectors of n = 96 in shards of files, made of clusters by a seed; a quantizer of 16 × 256
codes and 4,096 lists fitted to the first of them. Every command runs in a process of its own. Its
memory is that of all processes it starts, measured four times a second, pages that they share
counted once (PSS), pages of files that they map counted too. Rows say what a build took to encode
and to merge; both builds must give the same file, and all searches the same neighbours, or nothing
is written.
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
    """Files of vectors around centres, with a spectrum: each file by its own seed."""
    spectrum = np.linspace(1.5, 0.2, n, dtype=np.float32)
    centres = np.random.default_rng(0).standard_normal((CLUSTERS, n), np.float32) * spectrum
    (folder / "base").mkdir()
    for number, first in enumerate(range(0, N, FILE)):
        rows = min(FILE, N - first)
        np.save(folder / "base" / f"{number:04d}.npy", _drawn(number + 1, rows, centres, spectrum))
    np.save(folder / "queries.npy", _drawn(0, QUERIES, centres, spectrum))


def _drawn(seed: int, rows: int, centres: Any, spectrum: Any) -> Any:
    generator = np.random.default_rng([7, seed])
    x = centres[generator.integers(0, CLUSTERS, rows)]
    x += 0.5 * spectrum * generator.standard_normal(x.shape, np.float32)
    return x


def measured(folder: Path, *command: str) -> dict[str, Any]:
    """Seconds and peak bytes of a `givens` command with all its processes."""
    began = time.perf_counter()
    arguments = [sys.executable, "-m", "givens", *command]
    peak: dict[str, int] = {}
    with subprocess.Popen(arguments, cwd=folder, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            now = memory(process.pid)
            if sum(now.values()) > sum(peak.values()):
                peak = now
            time.sleep(0.25)
    if process.returncode:
        raise SystemExit(f"givens {' '.join(command)} failed")
    return {
        "command": " ".join(["givens", *command]),
        "seconds": time.perf_counter() - began,
        "peak_bytes": sum(peak.values()),
        # Where it went: the command itself, Ray's workers at a job, Ray's own processes.
        "peak_of": peak,
    }


def memory(root: int) -> dict[str, int]:
    """Proportional bytes of a process and all below it, by what they are."""
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
            total[kind] = total.get(kind, 0) + _pss(pid)
    return total


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def run(options: argparse.Namespace, folder: Path) -> Rows:
    """All rows."""
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
    rows = [{"step": "fit", **measured(folder, *fit)}]
    for engine in ("local", "shards", "ray"):
        choice = ["--shards"] if engine == "shards" else ["--engine", engine]
        row = measured(folder, "build", "q.safetensors", "base", "-o", f"{engine}.faiss", *choice)
        inside = f"{engine}.faiss/manifest.json" if engine == "shards" else f"{engine}.faiss.json"
        record = json.loads((folder / inside).read_text())
        rows.append({"step": "build", "engine": engine, **row, "parts": record.get("seconds")})
    if checksum(folder / "local.faiss") != checksum(folder / "ray.faiss"):
        raise SystemExit("the two builds are not the same file")
    for name, *flags in (["local.faiss"], ["local.faiss", "--mmap"], ["shards.faiss"]):
        search = ["search", name, "queries.npy", "-k", str(K), "--nprobe", "16", "-o", "found.npy"]
        row = measured(folder, *search, *flags)
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
    parser.add_argument("--folder", type=Path, help="for the vectors and indexes: 2 × their size")
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
