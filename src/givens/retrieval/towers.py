"""The two towers: users (histories and words) and items as unit vectors, scored by cosine."""

import math
from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from givens import distributed
from givens.retrieval.batches import Inputs
from givens.retrieval.tables import BLOCK, Table

Pool = Literal["mean", "attention"]
HEADS = 4
# Below any score.
LEAST = -1e30


class Towers(nn.Module):
    """A user tower over histories and words, and an item tower; both give unit vectors."""

    def __init__(
        self,
        items: int,
        dim: int,
        *,
        history: int = 100,
        pool: Pool = "attention",
        vocabulary: int = 0,
        split: bool = False,
        seed: int = 0,
    ) -> None:
        """Initialise both towers.

        Args:
            items: the number of items in the catalogue.
            dim: the dimension n of the vectors.
            history: the most items of a history; 0 for words only.
            pool: "mean" weights an item of the history by recency, "attention" also by content,
                with several heads.
            vocabulary: the number of words; 0 for none.
            split: whether the rows of tables are split over ranks, with sparse gradients.
            seed: the seed of the initial values.
        """
        super().__init__()
        if pool not in get_args(Pool):
            known = ", ".join(map(repr, get_args(Pool)))
            raise ValueError(f"pool must be one of {known}, but got {pool!r}")
        if not history and not vocabulary:
            raise ValueError("history must be at least 1 where there are no words, but got 0")
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.pool = None
            if history:
                table = Table(items, dim, seed=seed, number=0) if split else None
                self.pool = History(items, dim, history, pool, table)
            self.words = nn.EmbeddingBag(vocabulary, dim, mode="mean") if vocabulary else None
            self.mix = Mix(dim)
            self.items: nn.Embedding | Table
            if split:
                self.items = Table(items, dim, seed=seed, number=1)
            else:
                self.items = nn.Embedding(items, dim)
                nn.init.normal_(self.items.weight, std=dim**-0.5)
            if self.words is not None:
                # The norm of items: Adam moves all vectors equally, so long ones would turn slowly.
                nn.init.normal_(self.words.weight, std=dim**-0.5)

    def user(self, inputs: Inputs) -> Float[Tensor, "b n"]:
        """Unit vectors of users."""
        x: Tensor | float = 0.0
        if self.pool is not None:
            x = self.pool(inputs.history)
        if self.words is not None and inputs.words is not None:
            x = x + self.words(inputs.words)
        return functional.normalize(self.mix(x), dim=1)

    def item(self, ids: Int[Tensor, " m"] | None = None) -> Float[Tensor, "m n"]:
        """Unit vectors of these items, or of all items that this rank has."""
        return functional.normalize(self.items.weight if ids is None else self.items(ids), dim=1)

    def part(self) -> "Part":
        """This rank's part of the items."""
        W, rows = self.items.weight.detach(), distributed.rows(self.items.num_embeddings)
        return Part(W if isinstance(self.items, Table) else W[rows], rows.start)

    def tables(self) -> dict[str, Table]:
        """The split tables by name; empty if every rank has all rows."""
        return {name: part for name, part in self.named_modules() if isinstance(part, Table)}


class Part:
    """A range of the items as unit vectors, normalised when they are sliced."""

    def __init__(self, rows: Tensor, first: int) -> None:
        self.rows, self.first = rows, first
        self.shape, self.dtype = tuple(rows.shape), np.dtype(np.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice) -> Float[Tensor, "m n"]:
        return functional.normalize(self.rows[rows], dim=1)

    def blocks(self) -> Iterator[tuple[int, Float[Tensor, "m n"]]]:
        """The vectors in slices, each with its first row in the part."""
        for at in range(0, len(self), BLOCK):
            yield at, self[at : at + BLOCK]


class History(nn.Module):
    """The sum of the items of a history, weighted by recency and content.

    The weight of an item is a softmax over the history of b_j + e·q_h, with its position j, its
    vector e and the query q_h of head h. e·q_h is computed for all items as one small product,
    which avoids an array of shape (b, h, n).
    """

    def __init__(
        self, items: int, dim: int, length: int, pool: Pool, table: Table | None = None
    ) -> None:
        super().__init__()
        heads = HEADS if pool == "attention" else 1
        if dim % heads:
            raise ValueError(f"dim must be divisible by {heads} heads, but got dim={dim}")
        self.embedding = table or nn.Embedding(items, dim)
        if table is None:
            nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.recency = nn.Parameter(torch.zeros(heads, length))
        # Replaces an empty history, as after dropout, whose direction would be 0/0.
        self.empty = nn.Parameter(torch.randn(dim) * dim**-0.5)
        self.queries = nn.Parameter(torch.zeros(dim, heads)) if pool == "attention" else None

    def forward(self, history: Int[Tensor, "b h"]) -> Float[Tensor, "b n"]:
        """The weighted sum for each row; the learned vector for an empty history."""
        E, heads = self.embedding.weight, len(self.recency)
        if isinstance(self.embedding, Table):
            E, history = self.embedding.find(history)
        here = history >= 0
        # Padding gets weight 0. It points to different items, since the gradient is summed item by
        # item, and one very frequent item would be slow.
        other = torch.arange(history.numel(), device=history.device).view_as(history) % len(E)
        ids = torch.where(here, history, other)
        score = self.recency[:, : history.shape[1]].expand(len(ids), -1, -1)
        if self.queries is not None:
            # Not by indexing: its gradient is summed by threads in no fixed order.
            sought = functional.embedding(ids, E @ self.queries)
            score = score + sought.mT * math.sqrt(E.shape[1])
        # A softmax from operations whose gradients do not depend on the number of threads; it is 0
        # for an empty history.
        score = score.masked_fill(~here[:, None], -torch.inf)
        share = (score - score.detach().amax(2, keepdim=True).clamp_min(LEAST)).exp()
        weight = share / share.sum(2, keepdim=True).clamp_min(-1 / LEAST)
        parts = E.view(len(E), heads, -1)
        pooled = [
            functional.embedding_bag(
                ids, parts[:, head], mode="sum", per_sample_weights=weight[:, head]
            )
            for head in range(heads)
        ]
        return torch.where(here.any(1, keepdim=True), torch.cat(pooled, 1), self.empty)


class Mix(nn.Module):
    """x + W₂ gelu(W₁ norm(x)), initially x."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.wide = nn.Linear(dim, 2 * dim)
        self.narrow = nn.Linear(2 * dim, dim)
        nn.init.zeros_(self.narrow.weight)
        nn.init.zeros_(self.narrow.bias)

    def forward(self, x: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Add the MLP to x."""
        # Not one operation: the gradient of its weight would depend on the number of threads.
        x = functional.layer_norm(x, x.shape[1:], eps=self.norm.eps)
        x = x * self.norm.weight + self.norm.bias
        mixed: Tensor = x + self.narrow(functional.gelu(self.wide(x)))
        return mixed
