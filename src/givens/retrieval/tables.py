"""Large tables, of which a step sees few rows: split over ranks, with a row-wise optimizer.

Each rank has a range of a table's rows and their optimizer state. A step fetches the rows of its
batch from the ranks that hold them, and gradients go back the same way: communication depends on
the batch, not on the number of items.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from givens import distributed

# Rows that are initialised or scored at once.
BLOCK = 1 << 16
# T and s of `RowWise`, and a lower bound of √v.
MEMORY, SCALE, LEAST = 1000, 0.1 / 0.001**0.5, 1e-30


class Table(nn.Module):
    """An embedding of `items` rows; `weight` is the range of them that this rank holds."""

    def __init__(self, items: int, dim: int, *, seed: int, number: int) -> None:
        """Initialise the rows of this rank; values do not depend on the number of ranks.

        Args:
            items: the rows of the whole table.
            dim: the dimension n.
            seed: the seed of the initial values.
            number: the number of the table, so that two tables with one seed differ.
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
            self._initialise(seed * 2 + number)

    def forward(self, ids: Int[Tensor, " m"]) -> Float[Tensor, "m n"]:
        """The rows of these ids."""
        rows, at = self.find(ids)
        return functional.embedding(at, rows)

    def find(self, ids: Int[Tensor, "*m"]) -> tuple[Float[Tensor, "u n"], Int[Tensor, "*m"]]:
        """The distinct rows of these ids, and the position of each id among them.

        Negative ids have position −1. There is always at least one row.
        """
        names, at = torch.unique(ids, return_inverse=True)
        none = int(torch.searchsorted(names, 0))
        rows = self._fetch(names[none:])
        if not len(rows):
            rows = functional.pad(rows, (0, 0, 0, 1))
        return rows, (at - none).clamp_min(-1)

    def _fetch(self, ids: Int[Tensor, " u"]) -> Float[Tensor, "u n"]:
        """The rows of distinct, sorted ids, from the ranks that hold them."""
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
    def _initialise(self, seed: int) -> None:
        n, first, stop = self.weight.shape[1], self.range.start, self.range.stop
        for begin in range(first - first % BLOCK, stop, BLOCK):
            rows = torch.empty(min(BLOCK, self.num_embeddings - begin), n)
            generator = torch.Generator().manual_seed((seed << 24) + begin // BLOCK)
            rows.normal_(0, n**-0.5, generator=generator)
            part = rows[max(first - begin, 0) : stop - begin]
            at = max(begin - first, 0)
            self.weight[at : at + len(part)] = part


class RowWise(Optimizer):
    """Adam for rare rows, with two numbers of state for each row instead of two for each entry.

    For the rows that have a gradient, and for no others,

        v ← v + (mean(g²) − v)/min(t, T)    t counts the gradients of the row; T bounds the memory
        row ← row − lr · s · g/√v           s = (1 − β₁)/√(1 − β₂) for Adam's β₁ = 0.9, β₂ = 0.999

    With this s, rates for torch's SparseAdam carry over: it moves a rare row by lr·s, since it does
    not correct the bias of the row's own averages. There is no momentum: it would take as much
    memory as the table, and would have decayed when a row comes again.
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
                # A row whose gradients were all 0 stays.
                table.index_add_(
                    0, rows, g * (-group["lr"] * SCALE / v.sqrt().clamp_min(LEAST))[:, None]
                )
