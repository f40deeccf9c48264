"""A two-tower model in plain PyTorch, with the index made afterwards and with the index as a layer.

    python examples/two_towers.py --seeds 5 --json rows.json

"after" trains towers alone and leaves the index to Faiss's OPQ. "frozen" and "gcd" train towers and
codebooks through the layer, the rotation as OPQ has left it or turned by GCD.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import givens
from givens.export.faiss import fit_opq, to_faiss
from givens.retrieval.data import Log, click_log

DIM, BYTES, HISTORY, BATCH = 64, 8, 20, 256


class Towers(nn.Module):
    """A user is what they clicked before; an item is itself."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.items, self.past = nn.Embedding(items, DIM), nn.Embedding(items, DIM)
        self.users = nn.Sequential(nn.Linear(DIM, 128), nn.ReLU(), nn.Linear(128, DIM))

    def user(self, history: Tensor) -> Tensor:
        """(m, HISTORY) → (m, DIM), of length 1."""
        return normalize(self.users(self.past(history).mean(1)))


def examples(log: Log, draws: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Items that users clicked before some moment, and the one they clicked then."""
    user = draws.choice(log.train, BATCH)
    first, last = log.starts[user], log.starts[user + 1]
    now = draws.integers(first + 5, last)
    before = draws.integers(first[:, None], now[:, None], (BATCH, HISTORY))
    return torch.from_numpy(log.items[before]).long(), torch.from_numpy(log.items[now]).long()


def recall(towers: Towers, q: givens.Quantizer, log: Log) -> float:
    """recall@100 of test users by the index: the first half of their clicks finds the second."""
    first, last = log.starts[log.test], log.starts[log.test + 1]
    middle = (first + last) // 2
    places = np.linspace(first, middle - 1, HISTORY).astype(int).T
    users = towers.user(torch.from_numpy(log.items[places]).long()).detach()
    _, found = to_faiss(q, towers.items.weight).search(users.numpy(), 100)
    asked = zip(middle, last, found, strict=True)
    return float(np.mean([np.isin(log.items[a:b], ids).mean() for a, b, ids in asked]))


def train(kind: str, log: Log, steps: int, seed: int) -> dict[str, object]:
    """Towers alone for `steps`, then as many with the index, or more of the same."""
    torch.manual_seed(seed)
    draws, towers = np.random.default_rng(seed), Towers(log.catalogue)
    index = givens.IndexLayer(DIM, BYTES, metric="cosine")
    adam = torch.optim.Adam([*towers.parameters(), *index.codebook_parameters()])
    turn = givens.GCD(index.rotation.parameters())
    for step in range(2 * steps):
        if step == steps and kind != "after":
            index.warm_start(towers.items.weight, seed=seed)
        # Both rates fall to 0 twice: without the index, and with it.
        rate = 5e-3 * (1 + math.cos(math.pi * (step % steps) / steps))
        adam.param_groups[0]["lr"], turn.param_groups[0]["lr"] = rate, rate * (kind == "gcd")
        history, item = examples(log, draws)
        out = index(towers.items.weight)
        loss = cross_entropy(towers.user(history) @ out.embedding.T / 0.1, item) + out.distortion
        adam.zero_grad()
        turn.zero_grad()
        loss.backward()
        adam.step()
        turn.step()
    items = towers.items.weight.detach()
    q = fit_opq(items, BYTES, metric="cosine") if kind == "after" else index.quantizer
    found = {"distortion": q.distortion(items), "recall@100": recall(towers, q, log)}
    return {"index": kind, "seed": seed, "steps": 2 * steps, **found, "torch": torch.__version__}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("steps", 300), ("items", 2000), ("seeds", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    log = click_log(3 * options.items, options.items, 90 * options.items)
    rows = []
    for seed in range(options.seeds):
        for kind in ("after", "frozen", "gcd"):
            rows.append(train(kind, log, options.steps, seed))
            print("{index:7} recall@100 {recall@100:.2%}".format(**rows[-1]))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
