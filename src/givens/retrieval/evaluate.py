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
from torch.nn import functional

from givens import distributed
from givens.quantizer import Codes, Quantizer
from givens.retrieval.batches import Examples, HeldOut
from givens.retrieval.state import Row, State
from givens.retrieval.towers import Part
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
    users: Float[Tensor, "b n"],
    items: Float[Tensor, "m n"],
    held: HeldOut,
    k: int,
    *,
    first: int = 0,
    catalogue: int | None = None,
) -> Ranking:
    """The k items of the largest inner product that a user has not seen.

    The items may be a part of a catalogue, which begins at `first`.
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
    """The k best unseen items of a Faiss index, all of its lists searched.

    The index may be of a part of a catalogue, which begins at `first`.
    """
    from givens.export.faiss import inverted

    if (lists := inverted(index)) is not None:
        lists.nprobe = lists.nlist
    here, device = index.ntotal, users.device
    m = here if catalogue is None else catalogue
    # Enough that k are left when those that were seen are taken out.
    most = int(torch.bincount(held.seen // m, minlength=1).max()) if len(held.seen) else 0
    scores, found = index.search(users.detach().cpu().numpy(), min(k + most, here))
    items = torch.from_numpy(found).to(device)
    items = torch.where(items < 0, items, items + first)
    answers = Ranking(items, torch.from_numpy(scores).to(device))
    return drop_seen(answers, held, m, min(k, here))


def merge(rankings: list[Ranking], k: int) -> Ranking:
    """The k best of rankings of parts of a catalogue, and of those of all ranks."""
    best = _merge(rankings, k)
    if distributed.alone():
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
    index: Any, items: Float[Tensor, "m n"], decoded: Float[Tensor, "m n"], first: int = 0
) -> Float[Tensor, "m n"]:
    """Decoded items as the index holds them from its place `first` on.

    Where two codewords are equally near within rounding, Faiss may have taken the other one. A
    codeword that is farther away is an error.
    """
    served = torch.from_numpy(index.reconstruct_n(first, len(items))).to(items.device)
    # Here and below written so that NaN is refused.
    other = ~((served - decoded).abs().amax(1) <= CLOSE)
    ours, theirs = (
        (items[other] - vectors[other]).square().sum(1) for vectors in (decoded, served)
    )
    if not bool(((ours - theirs).abs() <= TIE * (1 + ours)).all()):
        raise ValueError(f"the index does not encode as the model does: {int(other.sum())} items")
    return torch.where(other[:, None], served, decoded)


def sum_errors(items: Float[Tensor, "m n"], decoded: Float[Tensor, "m n"]) -> float:
    """The squared L2 errors of items."""
    # By column first: a whole sum is cut up among as many threads as there are.
    return float((items - decoded).square().sum(0, dtype=torch.float64).sum())


def mean_error(errors: list[float], catalogue: int) -> float:
    """The distortion of a catalogue: the mean of the errors that ranks have summed."""
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
    """The number of different hashes on all ranks."""
    mine = torch.unique(torch.cat(hashes))
    # Equal ones meet on one rank.
    owner = mine % distributed.count()
    sent = torch.bincount(owner, minlength=distributed.count())
    ones = [1] * len(sent)
    came: list[int] = distributed.exchange(sent, ones, ones).tolist()
    met = distributed.exchange(mine[owner.argsort(stable=True)], sent.tolist(), came)
    return sum(distributed.from_all(lambda: len(torch.unique(met))))


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

        Each rank searches its part of the items; what the first makes of it decides for all.

        Args:
            losses: of the steps since the last evaluation.
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
        """Mean losses, recall of the validation users and, in the joint phase, of the index."""
        state = self.state
        row: Row = {"step": state.step, "phase": "joint" if state.joint else "towers"}
        if losses:
            check_finite(state.step - len(losses), losses)
            retrieval, distortion = torch.stack(losses).double().mean(0).tolist()
            row["loss"] = retrieval + state.config.weight * distortion
            row["retrieval"] = retrieval
        q = state.quantizer if state.joint else None
        recalls, distortion = self.recall(q)
        row["recall_full"], row["recall"] = recalls[0], recalls[-1]
        if state.joint:
            row["distortion"] = distortion
            row["orthogonality"] = orthogonality_error(state.layer.rotation.matrix)
            row["perplexity"] = float(state.layer.perplexity.mean())
            row["dead"] = int(state.layer.dead.sum())
            R = state.layer.rotation.matrix
            # Root mean square over the axes, of all steps since the last evaluation.
            row["angle"] = float((R - state.marked).norm()) / math.sqrt(len(R))
        return row

    def recall(self, q: Quantizer | None) -> tuple[list[float], float]:
        """recall@100 of the validation users by exact search, or of fewer in a small catalogue.

        Among items as they are and, with a quantizer, as it decodes them; and its distortion.
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
        """The codes of items from number `first` on: those that training keeps fixed, if any."""
        fixed, rows = self.state.codes, slice(first, first + len(items))
        if fixed is None:
            return q.encode(items)
        return Codes(fixed.fine[rows], None if fixed.coarse is None else fixed.coarse[rows])

    @torch.no_grad()
    def test(self, quantizer: Quantizer) -> tuple[Any, dict[str, Any]]:
        """The index of this rank's items, and what test users find in those of all ranks.

        In the index, among decoded items, in full precision, and by popularity alone.
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
        # Items that share a code are the same to the index.
        results["distinct"] = count_distinct(hashes) / m
        results["best_step"] = state.best.step
        return index, results
