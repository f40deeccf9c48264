"""The drift of W from the orthogonal matrices by float32 rounding, over many steps.

    python benchmarks/drift.py --json results/drift-cpu.json

Every step has a new random gradient and turns planes by 0.05 rad (root mean square), far more than
in training. "fixed" is GCD-G with gradients that always select the same planes, so that the pairing
never changes.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import givens
from givens.paper.rows import environment


def drift(pairing: str, n: int, steps: int, device: str) -> dict[str, object]:
    """A row: max|RᵀR − I| and the determinant after these steps."""
    W = torch.nn.Parameter(givens.random_rotation(n).to(device))
    planes = "greedy" if pairing == "fixed" else pairing
    optimizer = givens.GCD([W], 0.05, pairing=planes, exact=False)
    noise = torch.randn(257, n, n, generator=torch.Generator().manual_seed(0)).to(device)
    signs = torch.randn(263, n // 2, 1, generator=torch.Generator().manual_seed(1)).to(device)
    W.grad = torch.empty_like(W)
    worst, began = 0.0, time.perf_counter()
    for step in range(steps):
        if pairing == "fixed":
            weight, swapped = W.detach(), W.grad
            torch.mul(weight[1::2], signs[step % 263], out=swapped[0::2])
            torch.mul(weight[0::2], -signs[step % 263], out=swapped[1::2])
        else:
            W.grad = noise[step % 257]
        optimizer.step()
        if step % (steps // 20) == 0:
            worst = max(worst, givens.orthogonality_error(W))
    worst = max(worst, givens.orthogonality_error(W))
    sign, logarithm = torch.linalg.slogdet(W.detach().double())
    return {
        "pairing": pairing,
        "n": n,
        "steps": steps,
        "worst_error": worst,
        "final_error": givens.orthogonality_error(W),
        "determinant": float(sign * logarithm.exp()),
        "seconds": round(time.perf_counter() - began, 1),
        **environment(device),
    }


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default="64:1000000,512:100000", help="n:steps, comma-separated")
    parser.add_argument("--pairings", default="random,fixed,greedy")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    rows = []
    for run in arguments.runs.split(","):
        n, steps = map(int, run.split(":"))
        for pairing in arguments.pairings.split(","):
            rows.append(drift(pairing, n, steps, arguments.device))
            print(rows[-1], flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
