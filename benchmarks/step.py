"""Time one step, from ∂L/∂R to the next R, for GCD and everything else that keeps R orthogonal.

    python benchmarks/step.py --device cpu --json results/step-cpu.json
    python benchmarks/step.py --device cuda --dims 128,256,512,1024,2048,4096 --json FILE

As figure 4 of the paper (`givens paper fig4`), with the peers beside: torch's own Cayley
parametrization, geotorch and geoopt, each as its users would call it.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from givens.paper import fig4
from givens.paper.rows import PACKAGES, environment, write

METHODS = (
    *("gcd-random", "gcd-greedy", "gcd-steepest", "gcd-steepest-exact", "cayley", "expm", "svd"),
    *("torch-cayley", "geotorch", "geoopt"),
)


def make(method: str, n: int, dtype: torch.dtype, device: str) -> fig4.Contender:
    """A method of ours or of a peer, at a random rotation with a random gradient."""
    if method not in ("torch-cayley", "geotorch", "geoopt"):
        return fig4.contender(method, n, dtype, device)
    start, G = (part.to(device, dtype) for part in fig4.problem(n))
    if method == "geoopt":
        import geoopt

        weight = geoopt.ManifoldParameter(start.clone(), manifold=geoopt.Stiefel())
        optimizer = geoopt.optim.RiemannianAdam([weight], fig4.LR)
        weight.grad = G
        return lambda: weight.detach(), optimizer.step
    module = nn.Linear(n, n, bias=False, dtype=dtype, device=device)
    module.weight = nn.Parameter(start.clone())
    if method == "torch-cayley":
        nn.utils.parametrizations.orthogonal(module, orthogonal_map="cayley")
    else:
        import geotorch

        geotorch.orthogonal(module, "weight")
        module.weight = start
    optimizer = torch.optim.Adam(module.parameters(), fig4.LR)

    def step() -> None:
        optimizer.zero_grad()
        module.weight.backward(G)
        optimizer.step()

    return lambda: module.weight.detach(), step


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
    about = environment(arguments.device, (*PACKAGES, "rustworkx", "geotorch", "geoopt"))
    print(about)
    rows = []
    for n in map(int, arguments.dims.split(",")):
        methods = arguments.methods.split(",")
        for row in fig4.measured(methods, n, arguments.device, make=make, tell=print):
            rows.append({**row, **about})
        if arguments.json:
            write(arguments.json, rows)


if __name__ == "__main__":
    main()
