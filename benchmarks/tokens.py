r"""Semantic IDs side by side: `givens.tokens` and the Faiss string that recommenders use.

    givens train -o RUN --data LOG --method post-hoc
    python benchmarks/tokens.py games=RUN/towers.safetensors:towers.items.weight \
        --json results/tokens.json

The vectors are item embeddings of such runs, or of any file that `givens fit` reads, given as
name=file; they are normalised, since they are compared by cosine. All items are used for training
and for evaluation. Faiss's string is `OPQ{m},IVF1,PQ{m}x8`, as in RPG and others, with default
options; its codes are read from its only list. Distortion is computed from the decoded vectors, in
the same way for both. Churn is the share of IDs that change when a little noise is added to the
embeddings, like that of further training. Existing rows of other data are kept.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import faiss
import numpy as np
import torch
from torch import Tensor

from givens import tokens
from givens.paper.rows import PACKAGES, environment, read, write
from givens.storage import vectors

# The noise, relative to the standard deviation of the items.
NOISE = 0.05
Encode = Callable[[Tensor], tuple[Tensor, Tensor]]


def fit_givens(x: Tensor, m: int, seed: int, **options: object) -> tuple[Encode, list[int]]:
    """Fit by givens; returns a function from vectors to codes and their vectors, and the sizes."""
    made = tokens.fit(x, m, sample=None, seed=seed, **options)

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        codes = made.encode(x)
        return codes, made.decode(codes)

    return encode, made.sizes


def fit_faiss(x: Tensor, m: int, seed: int, opq: bool = True) -> tuple[Encode, list[int]]:
    """Fit by Faiss's index factory; a seed is another order of the vectors."""
    n = x.shape[1]
    index = faiss.index_factory(n, f"{f'OPQ{m},' if opq else ''}IVF1,PQ{m}x8")
    order = np.random.default_rng(seed).permutation(len(x)) if seed else np.arange(len(x))
    index.train(x.numpy()[order])

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        index.reset()
        index.add(x.numpy())
        core = faiss.extract_index_ivf(index)
        size = core.invlists.list_size(0)
        ids = faiss.rev_swig_ptr(core.invlists.get_ids(0), size).copy()
        packed = faiss.rev_swig_ptr(core.invlists.get_codes(0), size * core.code_size)
        codes = np.empty((size, m), np.int64)
        codes[ids] = packed.reshape(size, m)
        core.make_direct_map()
        return torch.from_numpy(codes), torch.from_numpy(index.reconstruct_n(0, size))

    return encode, [256] * m


CONTENDERS: dict[str, Callable[[Tensor, int, int], tuple[Encode, list[int]]]] = {
    "givens gcd-greedy": fit_givens,
    "givens pq": lambda x, m, seed: fit_givens(x, m, seed, method="pq"),
    "givens residual": lambda x, m, seed: fit_givens(x, 0, seed, stages=(256,) * m),
    "givens residual + tail": lambda x, m, seed: fit_givens(x, m - 1, seed, stages=(256,)),
    "faiss OPQ,IVF1,PQ": fit_faiss,
    "faiss IVF1,PQ": lambda x, m, seed: fit_faiss(x, m, seed, opq=False),
}


def main() -> None:
    """Fit, evaluate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", help="name=file of vectors")
    parser.add_argument("--tokens", default="4,8,16,32", help="tokens an item")
    parser.add_argument(
        "--contenders", default=",".join(["*"]), help="names, separated by |; * for all"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    faiss.omp_set_num_threads(arguments.threads)
    asked = CONTENDERS if arguments.contenders == "*" else arguments.contenders.split("|")
    about = environment("cpu", PACKAGES)
    # Compile before timing.
    tokens.fit(torch.randn(300, 16), 4, 16)
    rows = read(arguments.json) if arguments.json and arguments.json.exists() else []
    for source in arguments.sources:
        name, _, file = source.partition("=")
        rows = [row for row in rows if row["data"] != name]
        x = torch.nn.functional.normalize(vectors.as_float(vectors.read(file, "items")[:]))
        spread = (x - x.mean(0)).square().sum(1).mean().sqrt() / x.shape[1] ** 0.5
        moved = x + NOISE * spread * torch.randn(x.shape, generator=torch.manual_seed(0))
        norm = float(x.square().sum(1).mean())
        for m in map(int, arguments.tokens.split(",")):
            for seed in range(arguments.seeds):
                for contender in asked:
                    if "residual" in contender and m > 8:
                        continue
                    if "tail" in contender and x.shape[1] % (m - 1):
                        continue
                    began = time.perf_counter()
                    encode, sizes = CONTENDERS[contender](x, m, seed)
                    seconds = time.perf_counter() - began
                    codes, decoded = encode(x)
                    told = asdict(tokens.report(codes, sizes))
                    row = {
                        "data": name,
                        "items": len(x),
                        "dim": x.shape[1],
                        "tokens": m,
                        "contender": contender,
                        "seed": seed,
                        "seconds": round(seconds, 3),
                        "distortion": float((x - decoded).square().sum(1).mean()),
                        "norm": norm,
                        "colliding": told["colliding"],
                        "distinct": told["distinct"],
                        "largest": told["largest"],
                        "perplexity": float(np.mean(told["perplexity"])),
                        "least_perplexity": min(told["perplexity"]),
                        "used": sum(told["used"]),
                        "imbalance": float(np.mean(told["imbalance"])),
                        "churn": float((encode(moved)[0] != codes).any(1).double().mean()),
                        "noise": NOISE,
                    }
                    rows.append({**row, **about})
                    print(
                        f"{name:8s} m={m:<3d} {contender:24s} seed {seed} {seconds:7.2f} s  "
                        f"distortion {row['distortion'] / norm:.4f}  "
                        f"colliding {100 * row['colliding']:6.2f} %  "
                        f"perplexity {row['perplexity']:6.1f}  churn {100 * row['churn']:.1f} %",
                        flush=True,
                    )
                    if arguments.json:
                        write(arguments.json, rows)


if __name__ == "__main__":
    main()
