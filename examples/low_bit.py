"""A rotation learned before weights are rounded to three bits, by GCD, geotorch and Cayley in turn.

    python examples/low_bit.py --seeds 5 --json rows.json

M R is rounded, not M: x Mᵀ = (x R)(M R)ᵀ, and a rotation can spread what a few large columns would
spoil. Each row has one scale, set by its largest number. The weights are made here.
"""

import argparse
import json
import time
from pathlib import Path

import geotorch
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import givens

ROWS, LEVELS = 1024, 3
# Each method's best of three at n = 64, on a seed that is not among those shown.
RATES = {"identity": 0, "random": 0, "gcd": 0.1, "gcd-random": 0.03, "gcd-greedy": 0.1}
RATES |= {"geotorch": 0.03, "cayley": 0.03}


def weights(n: int, seed: int) -> Tensor:
    """Correlated columns of falling size, four of them eight times too large."""
    draws = torch.Generator().manual_seed(seed)
    mixing = torch.randn(n, n, generator=draws) * torch.logspace(0, -1.5, n)
    M = torch.randn(ROWS, n, generator=draws) @ mixing
    M[:, torch.randperm(n, generator=draws)[:4]] *= 8
    return M


def error(Y: Tensor) -> Tensor:
    """What rounding to −3…3 times a row's scale loses, as a part; the integers are held fixed."""
    scale = Y.abs().amax(1, keepdim=True) / LEVELS
    steps = (Y / scale).round().detach()
    return (Y - steps * scale).square().sum() / Y.detach().square().sum()


def learner(layer: nn.Linear, method: str, start: Tensor, lr: float) -> torch.optim.Optimizer:
    """What learns the layer's weight, which is Rᵀ, from its start."""
    if method == "geotorch":
        geotorch.orthogonal(layer, "weight")
    elif method == "cayley":
        parametrizations.orthogonal(layer, orthogonal_map="cayley")
    layer.weight = start if method in ("geotorch", "cayley") else nn.Parameter(start)
    if method == "gcd":
        return givens.GCD(layer.parameters(), lr)
    if method.startswith("gcd-"):
        # As the paper has it: one pairing, and one size for the matrix.
        pairing = method.removeprefix("gcd-")
        return givens.GCD(layer.parameters(), lr, pairing=pairing, turns=1, adapt="matrix")
    return torch.optim.Adam(layer.parameters(), lr)


def learn(method: str, n: int, lr: float, steps: int, seed: int) -> dict[str, object]:
    """Turn the weights until they round well."""
    M, turned = weights(n, seed), nn.Linear(n, n, bias=False)
    start = torch.eye(n) if method == "identity" else givens.random_rotation(n, seed)
    turn = learner(turned, method, start, lr)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(turn, steps)
    ends = [time.process_time()]
    for _ in range(steps if lr else 0):
        turn.zero_grad()
        error(turned(M)).backward()
        turn.step()
        rates.step()
        ends.append(time.process_time())
    # The first step compiles.
    spent = (ends[-1] - ends[1]) / (steps - 1) if lr else 0.0
    row = {"method": method, "n": n, "lr": lr, "steps": steps, "seed": seed}
    return {**row, "lost": error(turned(M)).item(), "ms a step": 1e3 * spent}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=RATES, help="all of them unless given")
    parser.add_argument("--lr", type=float, help="each method's own unless given")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows here")
    given = parser.parse_args()
    rows = []
    for method in [given.method] if given.method else RATES:
        for seed in range(given.seeds):
            rows.append(learn(method, given.dim, given.lr or RATES[method], given.steps, seed))
            print("{method:10}  lr {lr:g}  {lost:.3%} lost  {ms a step:.1f} ms".format(**rows[-1]))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
