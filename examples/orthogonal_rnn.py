"""A recurrent network with an orthogonal matrix W, learned by GCD, geotorch and Cayley in turn.

    python examples/orthogonal_rnn.py --seeds 5 --json rows.json

The copying task: ten symbols, a long blank, a signal; then the ten are to be said again.
"""

import argparse
import json
from pathlib import Path
from statistics import mean

import geotorch
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import givens

SYMBOLS, COPIED, STATE, BATCH = 8, 10, 64, 64
# Of W: each method's best of 3e-4, 1e-3, 3e-3 and 1e-2, on a seed that is not among those shown.
RATES = {"gcd": 1e-2, "gcd-random": 3e-3, "gcd-greedy": 1e-2}
RATES |= {"geotorch": 1e-3, "cayley": 1e-3, "free": 1e-3}


class Network(nn.Module):
    """h ← modrelu(W h + V x), and what it says at h."""

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
    """A batch: what is heard (the blank is 0, the signal 9) and what is to be said."""
    words = torch.zeros(BATCH, 2 * COPIED + blank, dtype=torch.int64)
    words[:, :COPIED] = torch.randint(1, SYMBOLS + 1, (BATCH, COPIED), generator=draws)
    words[:, -COPIED - 1] = SYMBOLS + 1
    return words, torch.cat([torch.zeros_like(words[:, COPIED:]), words[:, :COPIED]], 1)


def learn(method: str, lr: float, blank: int, steps: int, seed: int) -> dict[str, object]:
    """Train, and tell how many of the ten symbols come back."""
    torch.manual_seed(seed)
    net, draws = Network(method), torch.Generator().manual_seed(seed)
    adam = torch.optim.Adam([*net.hear.parameters(), *net.say.parameters(), net.bias], 1e-3)
    if method == "gcd":
        turn = givens.GCD(net.turn.parameters(), lr)
    elif method.startswith("gcd-"):
        # As the paper has it: one pairing, and one size for the matrix.
        pairing = method.removeprefix("gcd-")
        turn = givens.GCD(net.turn.parameters(), lr, pairing=pairing, turns=1, adapt="matrix")
    else:
        turn = torch.optim.Adam(net.turn.parameters(), lr)
    right = []
    for _ in range(steps):
        words, answers = copying(blank, draws)
        said = net(words)
        net.zero_grad()
        nn.functional.cross_entropy(said.flatten(0, 1), answers.flatten()).backward()
        adam.step()
        turn.step()
        right.append((said.argmax(2) == answers)[:, -COPIED:].float().mean().item())
    how = {"method": method, "lr": lr, "blank": blank, "steps": steps, "seed": seed}
    curve = [mean(right[at : at + 50]) for at in range(0, steps, 50)]
    ends = {"right": curve[-1], "error": givens.orthogonality_error(net.turn.weight)}
    return {**how, **ends, "curve": curve, "torch": torch.__version__}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=RATES, help="all of them unless given")
    parser.add_argument("--lr", type=float, help="of W; each method's own unless given")
    parser.add_argument("--blank", type=int, default=50, help="how long to remember")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows here")
    given = parser.parse_args()
    rows = []
    for method in [given.method] if given.method else RATES:
        for seed in range(given.seeds):
            rows.append(learn(method, given.lr or RATES[method], given.blank, given.steps, seed))
            print("{method:10}  lr {lr:g}  {right:.1%} of the symbols come back".format(**rows[-1]))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
