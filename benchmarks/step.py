"""Time one step, from ∂L/∂R to the next R, for GCD and everything else that keeps R orthogonal.

    python benchmarks/step.py --device cpu --json results/step-cpu.json
    python benchmarks/step.py --device cuda --dims 128,256,512,1024,2048,4096 --json FILE

Like figure 4 of the paper (`givens paper fig4`), with GCD's default of 16 pairings for a gradient
and more opponents: torch's own Cayley parametrization, geotorch, geoopt and POGO, each as users
would call it, and POGO's products, RSDM and Landing from opponents.py. On a GPU, methods that can
be captured are timed as replays of a CUDA graph.
"""

import argparse
from pathlib import Path

import torch
from opponents import CAPTURED, OPPONENTS, PACKAGES, PARAMETRIZED, make_optimizer

from givens.paper import fig4
from givens.paper.rows import PACKAGES as OURS
from givens.paper.rows import environment, write
from givens.rotation import Rotation

METHODS = (
    *("gcd", "gcd-all", "gcd-random", "gcd-greedy", "gcd-steepest", "gcd-steepest-exact"),
    *("cayley", "expm", "svd", "pogo", *OPPONENTS),
)
# TF32 has ten bits: after three steps W is off SO(n) by about 5e-4; rows have the error.
LOOSE = ("svd", "pogo-products-tf32")


def make(method: str, n: int, dtype: torch.dtype, device: str) -> fig4.Contender:
    """A method, ours or an opponent's, at a random rotation with a random gradient."""
    if method not in (*OPPONENTS, "pogo"):
        return fig4.contender(method, n, dtype, device)
    start, G = (part.to(device, dtype) for part in fig4.problem(n))
    rotation = Rotation(n, start.mT)
    optimizer = make_optimizer(rotation, method, fig4.LR)
    if method not in PARAMETRIZED:
        rotation.weight.grad = G
        return lambda: rotation.weight.detach(), optimizer.step

    def step() -> None:
        optimizer.zero_grad()
        rotation.weight.backward(G)
        optimizer.step()

    return lambda: rotation.weight.detach(), step


def main() -> None:
    """Check, time, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dims", default="64,128,256,512,1024")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    about = environment(arguments.device, (*OURS, "rustworkx", *PACKAGES))
    print(about)
    methods = arguments.methods.split(",")
    if arguments.device == "cpu":
        methods = [method for method in methods if not method.endswith("tf32")]
    graphs = [method for method in methods if CAPTURED.fullmatch(method)]
    rows = []
    for n in map(int, arguments.dims.split(",")):
        for row in fig4.measure(
            methods, n, arguments.device, make=make, graphs=graphs, loose=LOOSE, tell=print
        ):
            rows.append({**row, **about})
        if arguments.json:
            write(arguments.json, rows)


if __name__ == "__main__":
    main()
