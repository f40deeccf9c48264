"""Precision, recall and NDCG of held-out users, by the index and by exact search.

Items that a user has seen are not recommended. The scores of an index must be those of exact search
among the decoded items, position by position.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from givens import distributed
from givens.quantizer import Codes, Quantizer
from givens.retrieval.batches import Examples, HeldOut
from givens.retrieval.state import Row, State
from givens.retrieval.towers import Part
from givens.retrieval.trainer import check_finite
from givens.rotation import orthogonality_error

KS = (10, 50, 100)
# recall@100 chooses the best step; in a small catalogue k is a fifth of it, since recall among all
# items is always 1.
K, PART = 100, 5
# Scores in memory at once.
BUFFER = 1 << 26
# The largest difference between float32 inner products of unit vectors, by order of summation.
CLOSE = 1e-4
# The largest difference between squared errors that is due to rounding.
TIE = 1e-5


@dataclass(frozen=True, eq=False)
class Ranking:
    """Items for each user, best first, padded with −1."""

    items: Int[Tensor, "b k"]
    scores: Float[Tensor, "b k"]


def search_exact(
    users: Float[Tensor, "b n"],
    items: Float[Tensor, "m n"],
    held: HeldOut,
    k: int,
    *,
    first: int = 0,
    catalogue: int | None = None,
) -> Ranking:
    """For each user, the k unseen items with the largest inner products.

    The items may be part of a catalogue, from item number `first` on.
    """
    m, seen = len(items), held.seen
    if catalogue is not None and m < catalogue:
        item = seen % catalogue - first
        inside = (item >= 0) & (item < m)
        seen = (seen // catalogue * m + item)[inside]
    k = min(k, m)
    found, scores = [], []
    rows = max(BUFFER // m, 1)
    for at in range(0, len(users), rows):
        part = users[at : at + rows] @ items.mT
        low, high = torch.searchsorted(
            seen, torch.tensor([at * m, (at + rows) * m], device=items.device)
        )
        part.view(-1)[seen[low:high] - at * m] = -torch.inf
        best = part.topk(k, dim=1)
        found.append((best.indices + first).masked_fill(best.values == -torch.inf, -1))
        scores.append(best.values)
    return Ranking(torch.cat(found), torch.cat(scores))


def search(
    index: Any,
    users: Float[Tensor, "b n"],
    held: HeldOut,
    k: int,
    *,
    first: int = 0,
    catalogue: int | None = None,
) -> Ranking:
    """For each user, the k best unseen items by a Faiss index, of which all lists are searched.

    The index may hold part of a catalogue, from item number `first` on.
    """
    from givens.export.faiss import inverted

    if (lists := inverted(index)) is not None:
        lists.nprobe = lists.nlist
    here, device = index.ntotal, users.device
    m = here if catalogue is None else catalogue
    # Enough that k remain after seen items are dropped.
    most = int(torch.bincount(held.seen // m, minlength=1).max()) if len(held.seen) else 0
    scores, found = index.search(users.detach().cpu().numpy(), min(k + most, here))
    items = torch.from_numpy(found).to(device)
    items = torch.where(items < 0, items, items + first)
    answers = Ranking(items, torch.from_numpy(scores).to(device))
    return drop_seen(answers, held, m, min(k, here))


def merge(rankings: list[Ranking], k: int) -> Ranking:
    """The k best items among rankings of parts of a catalogue, on all ranks."""
    best = _merge(rankings, k)
    if distributed.is_alone():
        return best
    # A rank may have fewer items than others.
    short = k - best.items.shape[1]
    items = functional.pad(best.items, (0, short), value=-1)
    scores = functional.pad(best.scores, (0, short), value=-torch.inf)
    total = distributed.count() * len(items)
    parts = (
        torch.split(distributed.gather_rows(part, total), len(items)) for part in (items, scores)
    )
    return _merge([Ranking(*both) for both in zip(*parts, strict=True)], k)


def _merge(rankings: list[Ranking], k: int) -> Ranking:
    if len(rankings) == 1:
        return rankings[0]
    items, scores = (
        torch.cat(parts, 1)
        for parts in zip(*((one.items, one.scores) for one in rankings), strict=True)
    )
    best = scores.topk(min(k, scores.shape[1]), dim=1)
    return Ranking(items.gather(1, best.indices), best.values)


def drop_seen(answers: Ranking, held: HeldOut, catalogue: int, k: int) -> Ranking:
    """The first k answers of an index that users have not seen."""
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
    index: Any, items: Float[Tensor, "m n"], decoded: Float[Tensor, "m n"], first: int = 0
) -> Float[Tensor, "m n"]:
    """Decoded items as the index holds them, from its position `first` on.

    Between two codewords at the same distance, Faiss may choose the other one. Choosing a codeword
    that is farther away is an error.
    """
    served = torch.from_numpy(index.reconstruct_n(first, len(items))).to(items.device)
    # Here and below, the comparison is false for NaN.
    other = ~((served - decoded).abs().amax(1) <= CLOSE)
    ours, theirs = (
        (items[other] - vectors[other]).square().sum(1) for vectors in (decoded, served)
    )
    if not bool(((ours - theirs).abs() <= TIE * (1 + ours)).all()):
        raise ValueError(f"the index does not encode as the model does: {int(other.sum())} items")
    return torch.where(other[:, None], served, decoded)


def sum_errors(items: Float[Tensor, "m n"], decoded: Float[Tensor, "m n"]) -> float:
    """The sum of the squared L2 errors of items."""
    # By column first: the order of a full reduction depends on the number of threads.
    return float((items - decoded).square().sum(0, dtype=torch.float64).sum())


def mean_error(errors: list[float], catalogue: int) -> float:
    """The distortion of a catalogue, from the summed errors of all ranks."""
    return math.fsum(distributed.from_all(lambda: math.fsum(errors))) / catalogue


def hash_codes(codes: Codes) -> Int[Tensor, " N"]:
    """A 64-bit hash of each code: among 10⁸ codes, two collide with a chance of 3·10⁻⁴."""
    generator = torch.Generator().manual_seed(0)
    columns = codes.fine.long()
    if codes.coarse is not None:
        columns = torch.cat([columns, codes.coarse[:, None]], 1)
    span = torch.iinfo(torch.int64)
    # Odd, so that no bit of a column is lost; sums wrap around.
    odd = torch.randint(span.min, span.max, (columns.shape[1],), generator=generator) | 1
    return (columns * odd.to(columns.device)).sum(1)


def count_distinct(hashes: list[Int[Tensor, " m"]]) -> int:
    """The number of distinct hashes on all ranks."""
    mine = torch.unique(torch.cat(hashes))
    # Equal hashes are sent to the same rank.
    owner = mine % distributed.count()
    sent = torch.bincount(owner, minlength=distributed.count())
    ones = [1] * len(sent)
    came: list[int] = distributed.exchange(sent, ones, ones).tolist()
    met = distributed.exchange(mine[owner.argsort(stable=True)], sent.tolist(), came)
    return sum(distributed.from_all(lambda: len(torch.unique(met))))


def compute_metrics(
    found: Int[Tensor, "b k"], held: HeldOut, catalogue: int, ks: tuple[int, ...] = KS
) -> dict[str, float]:
    """precision@k, recall@k and NDCG@k, averaged over users with a truth."""
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
    """The largest difference between the scores of index and exact search; raises above CLOSE."""
    there = decoded.scores.isfinite()
    gap = (index.scores - decoded.scores)[there].abs()
    worst = float(gap.max()) if len(gap) else 0.0
    # Not `worst > CLOSE`, which is false for NaN.
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
        """Measure the validation users, add a row, and keep the parts if recall is the best so far.

        Each rank searches its part of the items; the row of the first rank counts for all.

        Args:
            losses: the losses of the steps since the last evaluation.
        """
        state = self.state
        measured = self.measure(losses)
        row = distributed.from_first(lambda: measured)
        state.mark_rotation()
        if row["recall"] > state.best.recall:
            state.mark_best(row["recall"])
        state.rows.append(row)
        return row

    def measure(self, losses: list[Tensor]) -> Row:
        """The row of mean losses, validation recall and, in the joint phase, the index."""
        state = self.state
        row: Row = {"step": state.step, "phase": "joint" if state.joint else "towers"}
        if losses:
            check_finite(state.step - len(losses), losses)
            retrieval, distortion = torch.stack(losses).double().mean(0).tolist()
            row["loss"] = retrieval + state.config.weight * distortion
            row["retrieval"] = retrieval
        q = state.quantizer if state.joint else None
        recalls, distortion = self.measure_recall(q)
        row["recall_full"], row["recall"] = recalls[0], recalls[-1]
        if state.joint:
            row["distortion"] = distortion
            row["orthogonality"] = orthogonality_error(state.layer.rotation.matrix)
            row["perplexity"] = float(state.layer.perplexity.mean())
            row["dead"] = int(state.layer.dead.sum())
            R = state.layer.rotation.matrix
            # The root mean square over axes, of the turn since the last evaluation.
            row["angle"] = float((R - state.marked).norm()) / math.sqrt(len(R))
        return row

    def measure_recall(self, q: Quantizer | None) -> tuple[list[float], float]:
        """Validation recall by exact search, and the distortion.

        Recall is at 100, or at a smaller k in a small catalogue: among the item embeddings and,
        given a quantizer, also among the decoded ones.
        """
        m = self.state.log.catalogue
        k = min(K, max(1, m // PART))
        users, part = self.state.towers.user(self.valid.inputs), self.state.towers.part()
        rankings: list[list[Ranking]] = [[]] if q is None else [[], []]
        errors = []
        for at, items in part.blocks():
            both = [items]
            if q is not None:
                both.append(q.decode(self.encode(q, items, part.first + at)))
                errors.append(sum_errors(*both))
            for parts, vectors in zip(rankings, both, strict=True):
                where = {"first": part.first + at, "catalogue": m}
                parts.append(search_exact(users, vectors, self.valid, k, **where))
        found = [merge(parts, k).items for parts in rankings]
        recalls = [compute_metrics(one, self.valid, m, (k,))[f"recall@{k}"] for one in found]
        return recalls, mean_error(errors, m)

    def encode(self, q: Quantizer, items: Float[Tensor, "m n"] | Part, first: int) -> Codes:
        """The codes of items from number `first` on; the fixed codes if there are any."""
        fixed, rows = self.state.codes, slice(first, first + len(items))
        if fixed is None:
            return q.encode(items)
        return Codes(fixed.fine[rows], None if fixed.coarse is None else fixed.coarse[rows])

    @torch.no_grad()
    def test(self, quantizer: Quantizer) -> tuple[Any, dict[str, Any]]:
        """The index of this rank's items, and the results of the test users on all ranks.

        They search the index, the decoded items, the items in full precision, and by popularity.
        """
        from givens.export.faiss import to_faiss

        state, m = self.state, self.state.log.catalogue
        held = self.examples.hold_out(state.log.test)
        users, part = state.towers.user(held.inputs), state.towers.part()
        fixed = state.codes and self.encode(quantizer, part, part.first)
        index = to_faiss(quantizer, fixed or part)
        k = min(max(KS), m)
        found: dict[str, list[Ranking]] = {
            "index": [search(index, users, held, k, first=part.first, catalogue=m)],
            "decoded": [],
            "full": [],
            "popularity": [],
        }
        errors, hashes = [], []
        for at, items in part.blocks():
            first = part.first + at
            codes = self.encode(quantizer, items, first)
            decoded = quantizer.decode(codes)
            errors.append(sum_errors(items, decoded))
            hashes.append(hash_codes(codes))
            popular = self.examples.popularity[first : first + len(items), None]
            for name, vectors in (
                ("decoded", decode_as_indexed(index, items, decoded, at)),
                ("full", items),
                ("popularity", popular),
            ):
                asking = users if name != "popularity" else users.new_ones(len(users), 1)
                where = {"first": first, "catalogue": m}
                found[name].append(search_exact(asking, vectors, held, k, **where))
        rankings = {name: merge(parts, k) for name, parts in found.items()}
        results: dict[str, Any] = {
            name: compute_metrics(ranking.items, held, m) for name, ranking in rankings.items()
        }
        results["agreement"] = check_agreement(rankings["index"], rankings["decoded"])
        results["distortion"] = mean_error(errors, m)
        # The index cannot tell items apart that share a code.
        results["distinct"] = count_distinct(hashes) / m
        results["best_step"] = state.best.step
        return index, results
