"""What held-out users find: precision, recall and NDCG of the index, and of exact search beside it.

Items that a user has seen are not recommended. A ranking of the index must be that of exact search
among the decoded items: the same scores, place by place.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from givens import distributed
from givens.quantizer import Codes, Quantizer
from givens.retrieval.batches import Examples, HeldOut
from givens.retrieval.state import Best, Row, State
from givens.retrieval.trainer import check_finite
from givens.rotation import orthogonality_error

KS = (10, 50, 100)
# recall@100 chooses the best step; in a small catalogue recall of a fifth of it, since every step
# finds everything among all items.
K, PART = 100, 5
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


def search_exact(
    users: Float[Tensor, "b n"], items: Float[Tensor, "m n"], held: HeldOut, k: int
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


def search(index: Any, users: Float[Tensor, "b n"], held: HeldOut, k: int) -> Ranking:
    """The k best unseen items of a Faiss index, all of its lists searched."""
    from givens.export.faiss import inverted

    if (lists := inverted(index)) is not None:
        lists.nprobe = lists.nlist
    m, device = index.ntotal, users.device
    # Enough that k are left when those that were seen are taken out.
    most = int(torch.bincount(held.seen // m, minlength=1).max()) if len(held.seen) else 0
    scores, found = index.search(users.detach().cpu().numpy(), min(k + most, m))
    answers = Ranking(torch.from_numpy(found).to(device), torch.from_numpy(scores).to(device))
    return drop_seen(answers, held, m, min(k, m))


def drop_seen(answers: Ranking, held: HeldOut, catalogue: int, k: int) -> Ranking:
    """The first k of an index's answers, without the items that users have seen."""
    items = answers.items
    who = torch.arange(len(items), device=items.device)[:, None]
    drop = torch.isin(who * catalogue + items, held.seen) | (items < 0)
    order = drop.int().sort(dim=1, stable=True).indices[:, :k]
    gone = drop.gather(1, order)
    return Ranking(
        items.gather(1, order).masked_fill(gone, -1),
        answers.scores.gather(1, order).masked_fill(gone, -torch.inf),
    )


def decode_as_indexed(
    index: Any, items: Float[Tensor, "m n"], decoded: Float[Tensor, "m n"]
) -> Float[Tensor, "m n"]:
    """Decoded items as the index holds them.

    Where two codewords are equally near within rounding, Faiss may have taken the other one. A
    codeword that is farther away is an error.
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


def mean_error(items: Float[Tensor, "m n"], decoded: Float[Tensor, "m n"]) -> float:
    """The distortion: the mean squared L2 error of unit vectors."""
    # By column first: a whole sum is cut up among as many threads as there are.
    return float((items - decoded).square().sum(0, dtype=torch.float64).sum() / len(items))


def share_distinct(codes: Codes) -> float:
    """How many codes there are for each item: those that share one are one to the index."""
    parts = (
        codes.fine if codes.coarse is None else torch.cat([codes.fine, codes.coarse[:, None]], 1)
    )
    return len(torch.unique(parts, dim=0)) / len(codes)


def compute_metrics(
    found: Int[Tensor, "b k"], held: HeldOut, catalogue: int, ks: tuple[int, ...] = KS
) -> dict[str, float]:
    """precision@k, recall@k and NDCG@k, the means over users that have a truth."""
    who = torch.arange(len(found), device=found.device)[:, None]
    counted = held.sizes > 0
    hits = (torch.isin(who * catalogue + found, held.truth) & (found >= 0))[counted].double()
    sizes = held.sizes[counted]
    discount = 1 / torch.arange(2, hits.shape[1] + 2, device=found.device).double().log2()
    best = discount.cumsum(0)
    values = {}
    for k in (k for k in ks if k <= hits.shape[1]):
        count = hits[:, :k].sum(1)
        gain = (hits[:, :k] * discount[:k]).sum(1) / best[sizes.clamp_max(k) - 1]
        for name, value in (("precision", count / k), ("recall", count / sizes), ("ndcg", gain)):
            values[f"{name}@{k}"] = float(value.mean())
    return values


def check_agreement(index: Ranking, decoded: Ranking) -> float:
    """The largest difference between scores of index and exact search; refused if above CLOSE."""
    there = decoded.scores.isfinite()
    gap = (index.scores - decoded.scores)[there].abs()
    worst = float(gap.max()) if len(gap) else 0.0
    # Written so that NaN is refused too.
    if not worst <= CLOSE:
        raise ValueError(
            f"the index does not rank as the model scores: scores differ by {worst:.1e} > {CLOSE:g}"
        )
    return worst


class Evaluator:
    """Measures a state on the held-out users of its log."""

    def __init__(self, state: State, examples: Examples) -> None:
        self.state, self.examples = state, examples
        self.valid = examples.hold_out(state.log.valid)

    @torch.no_grad()
    def evaluate(self, losses: list[Tensor]) -> Row:
        """Add a row of what the validation users find, and keep the parts if they did best.

        The first rank measures, and decides for all.

        Args:
            losses: of the steps since the last evaluation.
        """
        state = self.state
        row = distributed.from_first(lambda: self.measure(losses))
        state.mark_rotation()
        if row["recall"] > state.best.recall:
            state.best = Best(row["recall"], state.step, state.copy_parts())
        state.rows.append(row)
        return row

    def measure(self, losses: list[Tensor]) -> Row:
        """Mean losses, recall of the validation users and, in the joint phase, of the index."""
        state = self.state
        row: Row = {"step": state.step, "phase": "joint" if state.joint else "towers"}
        if losses:
            check_finite(state.step - len(losses), losses)
            retrieval, distortion = torch.stack(losses).double().mean(0).tolist()
            row["loss"] = retrieval + state.config.weight * distortion
            row["retrieval"] = retrieval
        users, items = state.towers.user(self.valid.inputs), state.towers.item()
        row["recall_full"] = self.recall(users, items)
        row["recall"] = row["recall_full"]
        if state.joint:
            q = state.quantizer
            decoded = q.decode(state.codes or q.encode(items))
            row["recall"] = self.recall(users, decoded)
            row["distortion"] = mean_error(items, decoded)
            row["orthogonality"] = orthogonality_error(state.layer.rotation.matrix)
            row["perplexity"] = float(state.layer.perplexity.mean())
            row["dead"] = int(state.layer.dead.sum())
            R = state.layer.rotation.matrix
            # Root mean square over the axes, of all steps since the last evaluation.
            row["angle"] = float((R - state.marked).norm()) / math.sqrt(len(R))
        return row

    def recall(self, users: Tensor, items: Tensor) -> float:
        """recall@100 of the validation users by exact search, or of fewer in a small catalogue."""
        m = self.state.log.catalogue
        k = min(K, max(1, m // PART))
        found = search_exact(users, items, self.valid, k).items
        return compute_metrics(found, self.valid, m, (k,))[f"recall@{k}"]

    @torch.no_grad()
    def test(self, quantizer: Quantizer) -> tuple[Any, dict[str, Any]]:
        """The index of all items, and what test users find in it and in full precision."""
        from givens.export.faiss import to_faiss

        state, m = self.state, self.state.log.catalogue
        held = self.examples.hold_out(state.log.test)
        users, items = state.towers.user(held.inputs), state.towers.item()
        codes = state.codes or quantizer.encode(items)
        index = to_faiss(quantizer, items if state.codes is None else codes)
        decoded = decode_as_indexed(index, items, quantizer.decode(codes))
        k = min(max(KS), m)
        rankings = {
            "index": search(index, users, held, k),
            "decoded": search_exact(users, decoded, held, k),
            "full": search_exact(users, items, held, k),
            "popularity": search_exact(
                users.new_ones(len(users), 1), self.examples.popularity[:, None], held, k
            ),
        }
        results: dict[str, Any] = {
            name: compute_metrics(ranking.items, held, m) for name, ranking in rankings.items()
        }
        results["agreement"] = check_agreement(rankings["index"], rankings["decoded"])
        results["distortion"] = mean_error(items, decoded)
        results["distinct"] = share_distinct(codes)
        results["best_step"] = state.best.step
        return index, results
