"""A recurrent network with an orthogonal matrix W, learned by GCD, geotorch and Cayley in turn.

    python examples/orthogonal_rnn.py --seeds 5 --json rows.json

The copying task: ten symbols, a long blank, a signal; then the network repeats the ten.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor, nn

import givens

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from opponents import make_optimizer

SYMBOLS, COPIED, STATE, BATCH = 8, 10, 64, 64
# Of W: each method's best of a grid of factor √10, on two seeds that are not among those shown.
RATES = {"gcd": 1e-2, "gcd-greedy": 1e-2, "gcd-random": 3e-4, "geotorch": 1e-3}
RATES |= {"torch-cayley": 3e-3, "free": 1e-3, "frozen": 0.0}


class Network(nn.Module):
    """h ← modrelu(W h + V x), and logits from h. W starts as turns by all kinds of angles."""

    def __init__(self) -> None:
        super().__init__()
        self.hear, self.say = nn.Embedding(SYMBOLS + 2, STATE), nn.Linear(STATE, SYMBOLS + 1)
        self.bias = nn.Parameter(torch.zeros(STATE))
        angles = torch.pi * (2 * torch.rand(STATE // 2) - 1)
        start = givens.rotate_pairs_(torch.eye(STATE), torch.arange(STATE).view(-1, 2), angles)
        self.turn = givens.Rotation(STATE, start.T)

    def forward(self, words: Tensor) -> Tensor:
        """(batch, time) → (batch, time, symbols)."""
        W, h, states = self.turn.weight, torch.zeros(STATE), []
        for x in self.hear(words).unbind(1):
            z = h @ W.T + x
            h = z.sgn() * (z.abs() + self.bias).relu()
            states.append(h)
        return self.say(torch.stack(states, 1))


def copying(blank: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch: what is heard (the blank is 0, the signal 9) and the right answers."""
    words = torch.zeros(BATCH, 2 * COPIED + blank, dtype=torch.int64)
    words[:, :COPIED] = torch.randint(1, SYMBOLS + 1, (BATCH, COPIED), generator=draws)
    words[:, -COPIED - 1] = SYMBOLS + 1
    return words, torch.cat([torch.zeros_like(words[:, COPIED:]), words[:, :COPIED]], 1)


def learn(method: str, lr: float, blank: int, steps: int, seed: int) -> dict[str, object]:
    """Train, and tell which part of the ten symbols comes back, at every tenth step."""
    torch.manual_seed(seed)
    net, draws = Network(), torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam([*net.hear.parameters(), *net.say.parameters(), net.bias], 1e-3)
    if method == "gcd":
        turn = givens.GCD(net.turn.parameters(), lr)
    elif method == "free":
        turn = torch.optim.Adam(net.turn.parameters(), lr)
    else:
        turn = make_optimizer(net.turn, method, lr)
    right, spent = [], []
    for _ in range(steps):
        (words, answers), began = copying(blank, draws), time.process_time()
        said = net(words)
        net.zero_grad()
        nn.functional.cross_entropy(said.flatten(0, 1), answers.flatten()).backward()
        adam.step()
        turn.step()
        spent.append(1e3 * (time.process_time() - began))
        right.append((said.argmax(2) == answers)[:, -COPIED:].float().mean().item())
    row = {"method": method, "lr": lr, "blank": blank, "steps": steps, "seed": seed}
    row |= {"right": fmean(right[-50:]), "error": givens.orthogonality_error(net.turn.weight)}
    row |= {"ms a step": median(spent), "threads": torch.get_num_threads()}
    row |= {"torch": torch.__version__, "givens": givens.__version__}
    return {**row, "curve": [round(fmean(right[at : at + 10]), 4) for at in range(0, steps, 10)]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default=",".join(RATES))
    parser.add_argument("--lr", type=float, help="of W; each method's own unless given")
    for name, value in (("blank", 50), ("steps", 600), ("seeds", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the rows here")
    given, rows = parser.parse_args(), []
    for seed, method in [(s, m) for s in range(given.seeds) for m in given.methods.split(",")]:
        rows.append(learn(method, given.lr or RATES[method], given.blank, given.steps, seed))
        print("{method:12} lr {lr:g}  {right:.1%} of the symbols come back".format(**rows[-1]))
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1) + "\n")
