"""Tables of more items than a step sees: their rows split over ranks, learned row by row.

A rank has a range of a table's rows and the optimizer's state of them; one alone has them all. A
step looks up the rows that its batch names, from whichever rank has them, and their gradients go
back the same way: what a rank sends depends on the batch, not on the number of items.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from givens import distributed

# Rows that are drawn or scored at once.
BLOCK = 1 << 16
# T and s of `RowWise`, and below any root of a mean square.
MEMORY, SCALE, LEAST = 1000, 0.1 / 0.001**0.5, 1e-30


class Table(nn.Module):
    """An embedding of `items` rows of which this rank holds a range, in `weight`."""

    def __init__(self, items: int, dim: int, *, seed: int, number: int) -> None:
        """Draw the rows of this rank, the same whatever the number of ranks.

        Args:
            items: rows of the whole table.
            dim: n.
            seed: of the start.
            number: of the table, so that two of one seed differ.
        """
        super().__init__()
        self.num_embeddings, self.range = items, distributed.rows(items)
        held = self.range.stop - self.range.start
        try:
            self.weight = nn.Parameter(torch.empty(held, dim))
        except RuntimeError as error:
            raise ValueError(
                f"a table of {items:,} items must fit into the memory of the ranks, but "
                f"{held:,} × {dim} numbers of {4 * held * dim / 1e9:.1f} GB do not fit here; "
                "take more ranks or a smaller dim"
            ) from error
        if not self.weight.is_meta:
            self._draw(seed * 2 + number)

    def forward(self, ids: Int[Tensor, " m"]) -> Float[Tensor, "m n"]:
        """The rows of these ids."""
        rows, at = self.find(ids)
        return functional.embedding(at, rows)

    def find(self, ids: Int[Tensor, "*m"]) -> tuple[Float[Tensor, "u n"], Int[Tensor, "*m"]]:
        """The rows that ids name, each once, and where among them each is; negative ids at −1.

        At least one row comes, so that there is always one to point to.
        """
        names, at = torch.unique(ids, return_inverse=True)
        none = int(torch.searchsorted(names, 0))
        rows = self._fetch(names[none:])
        if not len(rows):
            rows = functional.pad(rows, (0, 0, 0, 1))
        return rows, (at - none).clamp_min(-1)

    def _fetch(self, ids: Int[Tensor, " u"]) -> Float[Tensor, "u n"]:
        """Rows of different ids in their order, from the ranks that have them."""
        edges = torch.tensor(distributed.bounds(self.num_embeddings), device=ids.device)
        cuts = torch.searchsorted(ids, edges).tolist()
        if cuts[-1] != len(ids):
            count = self.num_embeddings
            raise ValueError(f"ids must be below the {count:,} of the table, but got {ids[-1]:d}")
        asked = [stop - first for first, stop in pairwise(cuts)]
        told = distributed.exchange(torch.tensor(asked, device=ids.device), *[[1] * len(asked)] * 2)
        wanted: list[int] = told.tolist()
        mine = distributed.exchange(ids, asked, wanted) - self.range.start
        return distributed.exchange(
            functional.embedding(mine, self.weight, sparse=True), wanted, asked
        )

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        n, first, stop = self.weight.shape[1], self.range.start, self.range.stop
        for begin in range(first - first % BLOCK, stop, BLOCK):
            rows = torch.empty(min(BLOCK, self.num_embeddings - begin), n)
            generator = torch.Generator().manual_seed((seed << 24) + begin // BLOCK)
            rows.normal_(0, n**-0.5, generator=generator)
            part = rows[max(first - begin, 0) : stop - begin]
            at = max(begin - first, 0)
            self.weight[at : at + len(part)] = part


class RowWise(Optimizer):
    """Adam for rows that come rarely, with two numbers for each instead of two for each number.

    Of the rows that have a gradient, and of no others,

        v ← v + (mean(g²) − v)/min(t, T)    t times that the row came; T of them are remembered
        row ← row − lr · s · g/√v           s = (1 − β₁)/√(1 − β₂) for Adam's β₁ = 0.9, β₂ = 0.999

    s is how far torch's SparseAdam moves a row that comes rarely, whose averages it takes for those
    of all steps, so that a rate for it does here too. There is no momentum: it would take as much
    memory as the table, and little is left of it when a row comes again.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for table in group["params"]:
                for name in ("squares", "times"):
                    self.state[table][name] = table.new_zeros(len(table))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move the rows that have a gradient."""
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is None:
                    continue
                gradient = table.grad.coalesce()
                rows, g = gradient.indices()[0], gradient.values()
                squares, times = self.state[table]["squares"], self.state[table]["times"]
                t = times[rows] + 1
                v = squares[rows].lerp(g.square().mean(1), 1 / t.clamp_max(MEMORY))
                times[rows], squares[rows] = t, v
                # A row whose gradient was 0 every time stays.
                table.index_add_(
                    0, rows, g * (-group["lr"] * SCALE / v.sqrt().clamp_min(LEAST))[:, None]
                )
