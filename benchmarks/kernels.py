"""Time the pairings on a GPU for easy and hard matrices, and the nearest codewords against torch.

    python benchmarks/kernels.py --data learn.npy --json results/kernels-cuda.json

A pairing is first compared with the reference (greedy) or with the weight of the greedy pairing
(steepest). The matrices: "gaussian"; "captured", the A of a fit to the vectors of --data, of which
several make a row of length n; and hard ones: "zero", "tied" (integers from −2 to 2), "hubs", where
a few axes outweigh the rest, and "chain", whose pairs are found one after another, in n/2 rounds.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import givens
from givens.kernels.gpu.matching import Matcher
from givens.kernels.gpu.nearest import assign
from givens.paper.rows import environment, write
from givens.paper.timing import capture, time_by_events


def skew(values: Tensor) -> Tensor:
    """A skew matrix with these entries above its diagonal."""
    return values.triu(1) - values.triu(1).T


def chain(n: int) -> Tensor:
    """Pairs (i, i + 1) of increasing weight: each has to wait for the next."""
    return skew(torch.diag(torch.arange(1.0, n), 1))


def matrices(n: int, data: Path | None) -> dict[str, Tensor]:
    """Matrices A of every kind."""
    generator = torch.Generator().manual_seed(0)
    kinds = {
        "gaussian": skew(torch.randn(n, n, generator=generator)),
        "tied": skew(torch.randint(-2, 3, (n, n), generator=generator).float()),
        "zero": torch.zeros(n, n),
        "chain": chain(n),
    }
    if data:
        x = torch.from_numpy(np.load(data)).flatten()
        x = x[: x.numel() // n * n].view(-1, n)[:20_000].cuda().float()
        q = givens.fit(x, subspaces=n // 16, codewords=64, method="pq", max_iter=5)
        T = (x.T @ q.decode(q.encode(x))).cpu() * (2 / len(x))
        kinds |= {"captured": T - T.T, "hubs": skew(T)}
    return kinds


def milliseconds(step: Callable[[], object], count: int) -> float:
    """The median time of graph replays, or of single runs if count is 1."""
    step()
    run, count = capture(step, count) if count > 1 else (step, 1)
    return statistics.median(time_by_events(run, count)) * 1e3


def weight(A: Tensor, pairs: Tensor) -> float:
    """Σ A_ij² over the pairs."""
    return float(A.double()[pairs[:, 0], pairs[:, 1]].square().sum())


def time_pairings(n: int, data: Path | None) -> list[dict[str, object]]:
    """Rows of both pairings on every kind of matrix."""
    rows = []
    for kind, A in matrices(n, data).items():
        S, pairs = A.abs().cuda()[None], torch.empty(1, n // 2, 2, dtype=torch.int32).cuda()
        matcher, greedy = Matcher(S), givens.greedy_pairs(A)
        for pairing, match in (("greedy", matcher.greedy), ("steepest", matcher.steepest)):
            match(S, pairs)
            found = pairs[0].cpu().long()
            good = torch.equal(found, greedy)
            if pairing == "steepest":
                good = weight(A, found) >= weight(A, greedy) * (1 - 1e-6)
            if not good:
                print(f"n = {n} {pairing} {kind}: not timed, the pairs are wrong")
                continue
            us = 1e3 * milliseconds(lambda: match(S, pairs), 3 if kind == "chain" else 20)  # noqa: B023
            rows.append({"kernel": pairing, "n": n, "matrix": kind, "median_us": round(us, 1)})
            print(rows[-1], flush=True)
    return rows


def time_nearest(N: int, n: int, D: int, K: int) -> list[dict[str, object]]:
    """Rows of our kernel, and of torch's product and argmin in chunks, in float32."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    X = torch.randn(N, n, generator=generator, device="cuda")
    C = torch.randn(D, K, n // D, generator=generator, device="cuda")
    norms = C.square().sum(-1)[:, None]

    def product(chunk: int) -> Tensor:
        parts = (x.view(len(x), D, n // D).transpose(0, 1) for x in X.split(chunk))
        return torch.cat([torch.baddbmm(norms, x, C.mT, alpha=-2).argmin(-1).T for x in parts])

    def distances(chunk: int) -> Tensor:
        parts = (x.view(len(x), D, n // D).transpose(0, 1) for x in X.split(chunk))
        return torch.cat([torch.cdist(x.contiguous(), C).argmin(-1).T for x in parts])

    differ = float((assign(X, C)[0].long() != product(65_536)).float().mean())
    ways: dict[str, Callable[[], object]] = {"givens": lambda: assign(X, C)}
    for chunk in (16_384, 65_536, 262_144):
        ways[f"baddbmm, chunks of {chunk}"] = lambda chunk=chunk: product(chunk)
    ways["cdist, chunks of 65536"] = lambda: distances(65_536)
    rows = []
    for way, step in ways.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ms = milliseconds(step, 1)
        extra = (torch.cuda.max_memory_allocated() - before) / 1e6
        shape = {"N": N, "n": n, "subspaces": D, "codewords": K}
        measured = {"median_ms": round(ms, 3), "extra_MB": round(extra, 1), "codes_differ": differ}
        rows.append({"kernel": "nearest", "way": way, **shape, **measured})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", default="128,512,4096")
    parser.add_argument("--data", type=Path, help="vectors, .npy")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = time_nearest(1_000_000, 128, 8, 256)
    for n in map(int, arguments.dims.split(",")):
        rows += time_pairings(n, arguments.data)
    if arguments.json:
        write(arguments.json, [{**row, **environment("cuda")} for row in rows])


if __name__ == "__main__":
    main()
