"""What held-out users find: precision, recall and NDCG of the index, and of brute force beside it.

Items that a user has seen are not recommended. A ranking of the index must be that of brute force
on the decoded items: the same scores, place by place.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from givens.retrieval.batches import Held

KS = (10, 50, 100)
# Scores held at once.
BUFFER = 1 << 26
# Two float32 sums of a unit vector's products, added up in different orders, are this near.
CLOSE = 1e-4
# Two squared errors that rounding alone sets apart.
TIE = 1e-5


@dataclass(frozen=True, eq=False)
class Ranking:
    """Items for each user, the best first; −1 where there are no more."""

    items: Int[Tensor, "b k"]
    scores: Float[Tensor, "b k"]


def brute_force(
    users: Float[Tensor, "b n"], items: Float[Tensor, "m n"], held: Held, k: int
) -> Ranking:
    """The k items of the largest inner product that a user has not seen."""
    m = len(items)
    k = min(k, m)
    found, scores = [], []
    rows = max(BUFFER // m, 1)
    for first in range(0, len(users), rows):
        part = users[first : first + rows] @ items.mT
        low, high = torch.searchsorted(
            held.seen, torch.tensor([first * m, (first + rows) * m], device=items.device)
        )
        part.view(-1)[held.seen[low:high] - first * m] = -torch.inf
        best = part.topk(k, dim=1)
        found.append(best.indices.masked_fill(best.values == -torch.inf, -1))
        scores.append(best.values)
    return Ranking(torch.cat(found), torch.cat(scores))


def search(index: Any, users: Float[Tensor, "b n"], held: Held, k: int) -> Ranking:
    """The same from a Faiss index, all of its lists searched."""
    from givens.export.faiss import inverted

    if (lists := inverted(index)) is not None:
        lists.nprobe = lists.nlist
    m, device = index.ntotal, users.device
    # Enough that k are left when those that were seen are taken out.
    most = int(torch.bincount(held.seen // m, minlength=1).max()) if len(held.seen) else 0
    scores, found = index.search(users.detach().cpu().numpy(), min(k + most, m))
    answers = Ranking(torch.from_numpy(found).to(device), torch.from_numpy(scores).to(device))
    return unseen(answers, held, m, min(k, m))


def unseen(answers: Ranking, held: Held, catalogue: int, k: int) -> Ranking:
    """The first k of an index's answers without what the users have seen."""
    items = answers.items
    who = torch.arange(len(items), device=items.device)[:, None]
    drop = torch.isin(who * catalogue + items, held.seen) | (items < 0)
    order = drop.int().sort(dim=1, stable=True).indices[:, :k]
    gone = drop.gather(1, order)
    return Ranking(
        items.gather(1, order).masked_fill(gone, -1),
        answers.scores.gather(1, order).masked_fill(gone, -torch.inf),
    )


def as_indexed(
    index: Any, items: Float[Tensor, "m n"], decoded: Float[Tensor, "m n"]
) -> Float[Tensor, "m n"]:
    """Decoded items as the index has them.

    Where two codewords are equally near within rounding, Faiss may have taken the other one; that
    it took one that is farther is an error.
    """
    served = torch.from_numpy(index.reconstruct_n(0, index.ntotal)).to(items.device)
    # Here and below written so that NaN is refused.
    other = ~((served - decoded).abs().amax(1) <= CLOSE)
    ours, theirs = (
        (items[other] - vectors[other]).square().sum(1) for vectors in (decoded, served)
    )
    if not bool(((ours - theirs).abs() <= TIE * (1 + ours)).all()):
        raise ValueError(f"the index does not encode as the model does: {int(other.sum())} items")
    return torch.where(other[:, None], served, decoded)


def metrics(
    found: Int[Tensor, "b k"], held: Held, catalogue: int, ks: tuple[int, ...] = KS
) -> dict[str, float]:
    """precision@k, recall@k and NDCG@k, the means over users that have a truth."""
    who = torch.arange(len(found), device=found.device)[:, None]
    asked = held.sizes > 0
    hits = (torch.isin(who * catalogue + found, held.truth) & (found >= 0))[asked].double()
    sizes = held.sizes[asked]
    discount = 1 / torch.arange(2, hits.shape[1] + 2, device=found.device).double().log2()
    best = discount.cumsum(0)
    told = {}
    for k in (k for k in ks if k <= hits.shape[1]):
        count = hits[:, :k].sum(1)
        gain = (hits[:, :k] * discount[:k]).sum(1) / best[sizes.clamp_max(k) - 1]
        for name, value in (("precision", count / k), ("recall", count / sizes), ("ndcg", gain)):
            told[f"{name}@{k}"] = float(value.mean())
    return told


def check_agreement(index: Ranking, decoded: Ranking) -> float:
    """How far an index's scores are from those of brute force at most; an error if they differ."""
    there = decoded.scores.isfinite()
    gap = (index.scores - decoded.scores)[there].abs()
    worst = float(gap.max()) if len(gap) else 0.0
    # Written so that NaN is refused too.
    if not worst <= CLOSE:
        raise ValueError(
            f"the index does not rank as the model scores: scores differ by {worst:.1e} > {CLOSE:g}"
        )
    return worst
