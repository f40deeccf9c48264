"""Rotations learned before the 4-bit layers of a real transformer, MiniLM.

    python examples/activations.py --json rows.json
    python examples/activations.py --smoke        a small random transformer, without the package

A layer's x Mᵀ is (x R)(M R)ᵀ for every rotation R. Both factors are rounded to 4 bits, and R is to
spread their largest numbers, which set the size of a step. The text is Python's own manual.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

import givens

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from minilm import collect_inputs, embed, load_model, output_error, read_manual, round_layers
from opponents import make_optimizer

# Each method's best by benchmarks/activations.py, on a layer and texts that are not used here.
RATES = {"identity": 0.0, "random": 0.0, "gcd": 0.316, "gcd-all": 0.316, "cayley": 0.00316}
RATES |= {"qr": 0.01, "cayley-sgd": 1.0, "pogo": 3.16}
TOKENS, ROWS = 128, 384


def peak(Y: Tensor) -> Tensor:
    """The 8-norm of a row, a smooth maximum, over its root mean square, on average."""
    return (Y / Y.square().mean(1, keepdim=True).sqrt()).pow(8).mean(1).pow(1 / 8).mean()


def learn(X: Tensor, M: Tensor, method: str, lr: float, steps: int, seed: int) -> givens.Rotation:
    """Turn inputs X (N, n) and weights M (m, n) until their rows have no peaks."""
    n = X.shape[1]
    start = torch.eye(n) if method == "identity" else givens.random_rotation(n, seed)
    rotation, draws = givens.Rotation(n, start), torch.Generator().manual_seed(seed)
    if lr == 0:
        return rotation
    turn = make_optimizer(rotation, method, lr, seed)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(turn, steps)
    for _ in range(steps):
        x = X[torch.randint(len(X), (TOKENS,), generator=draws)]
        w = M[torch.randint(len(M), (ROWS,), generator=draws)]
        loss = peak(rotation(x)) + peak(rotation(w))
        turn.zero_grad()
        loss.backward()
        turn.step()
        schedule.step()
    return rotation


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default=",".join(RATES))
    for name, value in (("steps", 60), ("seeds", 1), ("widest", 384)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--smoke", action="store_true", help="a small random transformer")
    parser.add_argument("--json", type=Path, help="write the rows here")
    given, rows = parser.parse_args(), []
    model, texts = load_model(given.smoke), read_manual()
    inputs, held_out = (collect_inputs(model, part) for part in (texts[:96], texts[96:128]))
    exact = embed(model, texts[128:256])
    for seed, method in [(s, m) for s in range(given.seeds) for m in given.methods.split(",")]:
        began, learned = time.process_time(), {}
        for place, (X, M, _) in inputs.items():
            # The widest get a random rotation, where SpinQuant has a fixed Hadamard matrix.
            how = method if X.shape[1] <= given.widest or method == "identity" else "random"
            learned[place] = learn(X, M, how, RATES[how], given.steps, seed).matrix.detach()
        spent = time.process_time() - began
        errors = [output_error(*held_out[place][:2], R) for place, R in learned.items()]
        layers = {name: R for place, R in learned.items() for name in inputs[place].layers}
        found = embed(round_layers(model, layers), texts[128:256])
        row = {"method": method, "lr": RATES[method], "steps": given.steps, "seed": seed}
        row |= {"widest": given.widest, "texts": len(exact)}
        row |= {"error": fmean(errors), "cosine": float((found * exact).sum(1).mean())}
        row |= {"off SO(n)": max(map(givens.orthogonality_error, learned.values()))}
        row |= {"cpu seconds": spent, "threads": torch.get_num_threads()}
        rows.append({**row, "torch": torch.__version__, "givens": givens.__version__})
        print("{method:12} {error:7.3%} of the outputs lost, cosine {cosine:.4f}".format(**row))
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1) + "\n")
