"""From an array of vectors to a Faiss index, and what the rotation is worth on the way.

    python examples/vectors.py                                 100,000 vectors made here
    python examples/vectors.py base.npy queries.npy            your own, one row each

Fits PQ, Faiss's OPQ and GCD-G on the same sample, builds an index of each, and counts how many of
the ten true neighbours are among the ten found. Writes the last one to index.faiss.
"""

import argparse
import json
import time
from pathlib import Path

import faiss
import numpy as np

import givens
from givens.export.faiss import fit_opq, save_index, to_faiss


def made(rows: int, seed: int) -> np.ndarray:
    """Vectors around topics, with correlated axes of unequal weight, as embeddings have."""
    topics, axes = np.random.default_rng(0), np.random.default_rng(1)
    draws = np.random.default_rng(seed)
    centres = topics.standard_normal((200, 64))
    mixing = axes.standard_normal((64, 64)) * np.geomspace(1, 0.05, 64)[:, None]
    x = centres[draws.integers(200, size=rows)] + 2 * draws.standard_normal((rows, 64))
    return (x @ mixing).astype(np.float32)


def nearest(base: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The ten true neighbours of each query."""
    exact = faiss.IndexFlatL2(base.shape[1])
    exact.add(base)
    return exact.search(queries, 10)[1]


def recall(found: np.ndarray, truth: np.ndarray) -> float:
    """How many of the true neighbours were found."""
    return float(
        np.mean([len(np.intersect1d(*pair)) / 10 for pair in zip(found, truth, strict=True)])
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="base.npy and queries.npy")
    parser.add_argument("--rows", type=int, default=100_000, help="of vectors made here")
    parser.add_argument("--bytes", type=int, default=8, help="of each code")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    if options.files:
        base, queries = (np.load(path, mmap_mode="r") for path in options.files)
    else:
        base, queries = made(options.rows, 2), made(1000, 3)
    truth = nearest(np.asarray(base), np.asarray(queries))

    fitters = {
        "PQ": lambda: givens.fit(base, options.bytes, method="pq"),
        "OPQ, Faiss": lambda: fit_opq(base, options.bytes),
        "GCD-G": lambda: givens.fit(base, options.bytes),
    }
    print(f"{len(base):,} vectors of {base.shape[1]}, {options.bytes} bytes each")
    rows = []
    for name, fitter in fitters.items():
        began = time.process_time()
        q = fitter()
        row = {"method": name, "cpu seconds": time.process_time() - began}
        index = to_faiss(q, base)
        row["recall@10"] = recall(index.search(np.asarray(queries), 10)[1], truth)
        row["distortion"] = q.distortion(base)
        print("{method:12} recall@10 {recall@10:.1%}  distortion {distortion:.2f}".format(**row))
        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    save_index(index, "index.faiss")
    print("Written: index.faiss; serve it with examples/serve.py")
