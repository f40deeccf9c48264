"""A recurrent network with an orthogonal matrix W, learned by GCD, geotorch and Cayley in turn.

    python examples/orthogonal_rnn.py --seeds 5 --json rows.json

The copying task: ten symbols, a long blank, a signal; then the network repeats the ten.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import mean, median

import geotorch
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import givens

SYMBOLS, COPIED, STATE, BATCH = 8, 10, 64, 64
# Of W: each method's best of a grid of factor √10, on a seed that is not among those shown.
RATES = {"gcd": 3e-3, "gcd-greedy": 1e-2, "gcd-random": 1e-3, "geotorch": 1e-3, "cayley": 1e-3}
RATES |= {"free": 1e-3, "frozen": 0.0}


class Network(nn.Module):
    """h ← modrelu(W h + V x), and logits from h."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.turn = nn.Linear(STATE, STATE, bias=False)
        self.hear, self.say = nn.Embedding(SYMBOLS + 2, STATE), nn.Linear(STATE, SYMBOLS + 1)
        self.bias = nn.Parameter(torch.zeros(STATE))
        # All start alike, at planes turned by all kinds of angles.
        angles = torch.pi * (2 * torch.rand(STATE // 2) - 1)
        start = givens.rotate_pairs_(torch.eye(STATE), torch.arange(STATE).view(-1, 2), angles)
        if method == "geotorch":
            geotorch.orthogonal(self.turn, "weight")
        elif method == "cayley":
            parametrizations.orthogonal(self.turn, orthogonal_map="cayley")
        self.turn.weight = start if method in ("geotorch", "cayley") else nn.Parameter(start)

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
    net, draws = Network(method), torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam([*net.hear.parameters(), *net.say.parameters(), net.bias], 1e-3)
    if method.startswith("gcd"):
        # "gcd" is the default; as in the paper are one pairing and one size for the matrix.
        paper = {"pairing": method.removeprefix("gcd-"), "turns": 1, "adapt": "matrix"}
        turn = givens.GCD(net.turn.parameters(), lr, **(paper if "-" in method else {}))
    else:
        turn = torch.optim.Adam(net.turn.parameters(), lr)
    right, spent = [], []
    for _ in range(steps):
        words, answers = copying(blank, draws)
        began = time.process_time()
        said = net(words)
        net.zero_grad()
        nn.functional.cross_entropy(said.flatten(0, 1), answers.flatten()).backward()
        adam.step()
        if method != "frozen":
            turn.step()
        spent.append(1e3 * (time.process_time() - began))
        right.append((said.argmax(2) == answers)[:, -COPIED:].float().mean().item())
    row = {"method": method, "lr": lr, "blank": blank, "steps": steps, "seed": seed}
    row |= {"right": mean(right[-50:]), "error": givens.orthogonality_error(net.turn.weight)}
    row |= {"ms a step": median(spent), "threads": torch.get_num_threads()}
    curve = [round(mean(right[at : at + 10]), 4) for at in range(0, steps, 10)]
    return {**row, "torch": torch.__version__, "curve": curve}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=RATES, help="all of them unless given")
    parser.add_argument("--lr", type=float, help="of W; each method's own unless given")
    for name, value in (("blank", 50), ("steps", 600), ("seeds", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the rows here")
    given, rows = parser.parse_args(), []
    methods = [given.method] if given.method else RATES
    # In turn, so that whatever else the machine does slows all of them.
    for seed, method in [(seed, method) for seed in range(given.seeds) for method in methods]:
        rows.append(learn(method, given.lr or RATES[method], given.blank, given.steps, seed))
        print("{method:10}  lr {lr:g}  {right:.1%} of the symbols come back".format(**rows[-1]))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
