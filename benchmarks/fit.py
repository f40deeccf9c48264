"""Fit a quantizer to fixed vectors, side by side: givens, Faiss's OPQ and PQ, nanopq.

    python benchmarks/fit.py --data DIR --json results/fit.json
    python benchmarks/fit.py --data DIR --device cuda --json results/fit-cuda.json

DIR has learn, base_a, base_b, query and groundtruth (.npy, or compressed .npy.zst) of the SIFT
descriptors; without it only the synthetic data are used. All contenders train on the same 65,536
vectors and are compared by the mean squared error on held-out vectors, computed by the same code.
They take turns, seed by seed, on the same number of threads. Faiss's OPQ is run with its default
random start and with the identity start, each followed by its ProductQuantizer with default
options. On a GPU only givens is timed, on all base vectors: with its default sample, and with all
vectors in every pass.
"""

import argparse
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import givens
from givens.fixed.fit import SAMPLE
from givens.paper.rows import PACKAGES, environment, write

TRAIN, HELD = 65_536, 200_000
Fitted = tuple[np.ndarray, np.ndarray]


def read(folder: Path, name: str) -> np.ndarray:
    """Read an array of the folder, compressed or not."""
    plain = folder / f"{name}.npy"
    if plain.exists():
        return np.load(plain, mmap_mode="r")
    import zstandard

    with (folder / f"{name}.npy.zst").open("rb") as file:
        return np.load(io.BytesIO(zstandard.ZstdDecompressor().stream_reader(file).read()))


def load_sift(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """SIFT descriptors to train on, and held-out ones."""
    rng = np.random.default_rng(0)
    learn, base = read(folder, "learn"), read(folder, "base_a")
    train = learn[np.sort(rng.choice(len(learn), TRAIN, replace=False))]
    held = base[np.sort(rng.choice(len(base), HELD, replace=False))]
    return train.astype(np.float32), held.astype(np.float32)


def draw_decaying(n: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian vectors with variances 1/i, rotated at random."""
    rng = np.random.default_rng(0)
    spread = 1 / np.sqrt(np.arange(1, n + 1))
    R = givens.random_rotation(n, 0).numpy()
    x = (rng.standard_normal((TRAIN + HELD // 4, n)) * spread).astype(np.float32) @ R
    return x[:TRAIN], x[TRAIN:]


def draw_unit(n: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors of 1,000 loose clusters, like the embeddings of a trained model."""
    rng = np.random.default_rng(0)
    spread = 1 / np.sqrt(np.arange(1, n + 1))
    centres = rng.standard_normal((1000, n)) * spread
    x = centres[rng.integers(1000, size=TRAIN + HELD // 4)]
    x = (x + 0.7 * rng.standard_normal(x.shape) * spread).astype(np.float32)
    x = x @ givens.random_rotation(n, 1).numpy()
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x[:TRAIN], x[TRAIN:]


def fit_givens(method: str, x: np.ndarray, subspaces: int, seed: int) -> Fitted:
    """Fit by givens."""
    q = givens.fit(x, subspaces, method=method, seed=seed)
    return q.rotation.numpy(), q.codebooks.numpy()


def fit_faiss(start: str, x: np.ndarray, subspaces: int, seed: int) -> Fitted:
    """Fit by Faiss's OPQ, followed by its ProductQuantizer; start "none" is plain PQ."""
    import faiss

    n = x.shape[1]
    R = np.eye(n, dtype=np.float32)
    if start != "none":
        opq = faiss.OPQMatrix(n, subspaces)
        if start == "identity":
            # Training starts from the contents of A.
            faiss.copy_array_to_vector(R.ravel(), opq.A)
        elif seed:
            faiss.copy_array_to_vector(givens.random_rotation(n, seed).numpy().ravel(), opq.A)
        # The seed of its k-means is fixed, so a seed here is another order of the vectors.
        opq.train(shuffle(x, seed))
        R = faiss.vector_to_array(opq.A).reshape(n, n).T.copy()
    pq = faiss.ProductQuantizer(n, subspaces, 8)
    pq.cp.seed += seed
    pq.train(np.ascontiguousarray(x @ R))
    return R, faiss.vector_to_array(pq.centroids).reshape(subspaces, 256, -1).copy()


def fit_nanopq(x: np.ndarray, subspaces: int, seed: int) -> Fitted:
    """Fit by nanopq's OPQ, with its defaults."""
    import nanopq

    opq = nanopq.OPQ(M=subspaces, Ks=256, verbose=False)
    opq.fit(x, seed=seed)
    return opq.R.astype(np.float32), opq.codewords.astype(np.float32)


def shuffle(x: np.ndarray, seed: int) -> np.ndarray:
    """The vectors in a random order; in the given order for seed 0."""
    return x if seed == 0 else x[np.random.default_rng(seed).permutation(len(x))]


def distortion(fitted: Fitted, x: np.ndarray) -> float:
    """The mean squared error, by brute force in torch."""
    R, C = map(torch.from_numpy, fitted)
    total = 0.0
    for part in torch.from_numpy(x).split(10_000):
        for y, c in zip((part @ R).chunk(len(C), dim=1), C, strict=True):
            total += float((y.square().sum(1) + (c.square().sum(1) - 2 * y @ c.T).amin(1)).sum())
    return total / len(x)


CONTENDERS: dict[str, Callable[[np.ndarray, int, int], Fitted]] = {
    "givens gcd-greedy": lambda x, D, seed: fit_givens("gcd-greedy", x, D, seed),
    "givens pq": lambda x, D, seed: fit_givens("pq", x, D, seed),
    "faiss opq": lambda x, D, seed: fit_faiss("random", x, D, seed),
    "faiss opq identity": lambda x, D, seed: fit_faiss("identity", x, D, seed),
    "faiss pq": lambda x, D, seed: fit_faiss("none", x, D, seed),
    "nanopq opq": fit_nanopq,
}


def recall(fitted: Fitted, folder: Path) -> float:
    """recall@10 of a Faiss index of all base vectors, with one byte for each subspace."""
    import faiss

    from givens.export.faiss import to_faiss

    base = np.concatenate([read(folder, "base_a"), read(folder, "base_b")])
    queries, truth = read(folder, "query").astype(np.float32), read(folder, "groundtruth")
    R, C = (torch.from_numpy(part) for part in fitted)
    # A peer's R may be a reflection; flipping one axis makes it a rotation, with equal distances.
    if torch.linalg.det(R.double()) < 0:
        R, C = R.clone(), C.clone()
        R[:, 0] *= -1
        C[0, :, 0] *= -1
    index = to_faiss(givens.Quantizer(R, C), base)
    assert isinstance(index, faiss.IndexPreTransform)
    _, found = index.search(queries, 10)
    hits = [len(set(row) & set(true)) for row, true in zip(found, truth[:, :10], strict=True)]
    return sum(hits) / len(hits) / 10


def time_on_gpu(folder: Path, runs: int = 3) -> list[dict[str, object]]:
    """Rows of the time to fit all base vectors on the GPU; the first run compiles."""
    base = np.concatenate([read(folder, "base_a"), read(folder, "base_b")])
    x = torch.from_numpy(base).cuda().float()
    rows = []
    for run in range(runs):
        for name, sample in (("default", SAMPLE), ("all", None)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            q = givens.fit(x, 8, sample=sample)
            torch.cuda.synchronize()
            row = {
                "data": "sift",
                "dim": x.shape[1],
                "vectors": len(x),
                "subspaces": 8,
                "sample": name,
                "run": run,
                "seconds": round(time.perf_counter() - began, 3),
                "distortion": q.distortion(x),
            }
            print(row, flush=True)
            rows.append(row)
    return rows


def main() -> None:
    """Fit, evaluate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of learn.npy and base_a.npy")
    parser.add_argument("--sets", default="sift:4,sift:8,sift:16,decaying:32,unit:16")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--slow-seeds", type=int, default=1, help="seeds of nanopq, which takes minutes"
    )
    parser.add_argument("--recall-seeds", type=int, default=1, help="seeds to search with")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda":
        about = environment("cuda")
        rows = [{**row, **about} for row in time_on_gpu(arguments.data)]
        if arguments.json:
            write(arguments.json, rows)
        return

    import faiss

    faiss.omp_set_num_threads(arguments.threads)
    about = environment("cpu", (*PACKAGES, "nanopq"))
    print(about)
    # Compile before timing.
    givens.fit(np.random.default_rng(0).standard_normal((300, 16)), 4, codewords=16, max_iter=3)
    makers = {
        "sift": lambda: load_sift(arguments.data),
        "decaying": draw_decaying,
        "unit": draw_unit,
    }
    rows = []
    for entry in arguments.sets.split(","):
        name, subspaces = entry.split(":")[0], int(entry.split(":")[1])
        if name == "sift" and arguments.data is None:
            continue
        train, held = makers[name]()
        for seed in range(arguments.seeds):
            for contender in arguments.contenders.split(","):
                if contender.startswith("nanopq") and seed >= arguments.slow_seeds:
                    continue
                began = time.perf_counter()
                fitted = CONTENDERS[contender](train, subspaces, seed)
                seconds = time.perf_counter() - began
                row = {
                    "data": name,
                    "dim": train.shape[1],
                    "subspaces": subspaces,
                    "contender": contender,
                    "seed": seed,
                    "seconds": round(seconds, 3),
                    "trained": distortion(fitted, train),
                    "held_out": distortion(fitted, held),
                }
                if name == "sift" and seed < arguments.recall_seeds:
                    row["recall_at_10"] = recall(fitted, arguments.data)
                rows.append({**row, **about})
                print(
                    f"{name:8s} D={subspaces:<3d} {contender:20s} seed {seed} {seconds:8.2f} s  "
                    f"trained {row['trained']:.5g}  held out {row['held_out']:.5g}  "
                    f"recall@10 {row.get('recall_at_10', float('nan')):.4f}",
                    flush=True,
                )
                if arguments.json:
                    write(arguments.json, rows)
        summarise([row for row in rows if (row["data"], row["subspaces"]) == (name, subspaces)])


def summarise(rows: list[dict[str, object]]) -> None:
    """Print mean distortion and median seconds of each contender, and both against ours."""
    found = {}
    for contender in dict.fromkeys(row["contender"] for row in rows):
        own = [row for row in rows if row["contender"] == contender]
        found[contender] = (
            statistics.mean(row["held_out"] for row in own),
            statistics.median(row["seconds"] for row in own),
        )
    ours = found.get("givens gcd-greedy")
    for contender, (error, seconds) in found.items():
        against = (
            f"  ours {ours[0] / error:.3f} of it, {seconds / ours[1]:.1f}× faster" if ours else ""
        )
        print(f"    {contender:20s} {error:10.5g} {seconds:8.2f} s{against}", flush=True)


if __name__ == "__main__":
    main()
