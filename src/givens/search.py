"""Ground truth, recall and re-ranking.

Distances are compared in float64; float32 products only rule out vectors that cannot be among the
nearest. With u = 2⁻²⁴ the error of such a product of n numbers is at most n·u·‖q‖·‖x‖, in any order
of summation, so every vector that is ruled out is farther.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from givens.checks import check_choice, check_integer, check_lengths, check_table
from givens.quantizer import Metric
from givens.rotation import full_precision
from givens.storage.given import as_vectors
from givens.storage.vectors import Vectors, as_float, chunks

# The most rows of scores (queries, vectors) held at once, and numbers of vectors or queries.
SCORES, NUMBERS = 1 << 22, 1 << 26
BLOCK = 512
ROUNDING = 2.0**-24
# Queries searched at once: few enough for a progress bar, enough for Faiss's threads.
BATCH = 1024
# The smallest norm to divide by, as in torch.nn.functional.normalize.
SMALLEST = 1e-12


def ground_truth(
    x: Any,
    queries: Any,
    k: int = 100,
    metric: Metric = "l2",
    *,
    progress: Callable[[int], object] | None = None,
) -> Tensor:
    """The k nearest of x to each query, nearest first: (Q, k) int64, where x is.

    Exact for float32 values, compared in float64; ties go to the smaller id. Only a slice of x and
    of the queries is in memory at a time.

    Args:
        x: vectors (N, n): a tensor, an array, or a file from `givens.storage.vectors.read`.
        queries: vectors (Q, n), likewise.
        k: neighbours of each query, at most N.
        metric: "l2", or "ip" and "cosine", where the nearest has the largest product.
        progress: called with the number of query-vector pairs that were compared since the last
            call.
    """
    check_choice("metric", metric, get_args(Metric))
    x, queries, k = _table("x", x), _table("queries", queries), check_integer("k", k)
    N, n = x.shape
    if queries.shape[1] != n:
        raise ValueError(
            f"queries must have {n} dimensions as x has, but got shape {tuple(queries.shape)}"
        )
    if not 1 <= k <= N:
        raise ValueError(f"k must be in 1..{N}, the number of vectors, but got {k}")
    tensors = [table.device for table in (x, queries) if isinstance(table, Tensor)]
    device = tensors[0] if tensors else torch.device("cpu")
    found, at = torch.empty(len(queries), k, dtype=torch.int64, device=device), 0
    with torch.no_grad(), full_precision(device):
        for part in chunks(queries, NUMBERS // (n + 2 * k), device):
            check_lengths("queries", part, metric, first=at)
            found[at : at + len(part)] = _nearest(x, part, k, metric, progress)
            at += len(part)
    return found


def recall(found: Any, truth: Any, k: int = 10) -> float:
    """The share of the k true neighbours among the first k found, the mean over queries.

    −1 in `found` is a missing result. −1 in `truth` is a missing neighbour: it does not count, nor
    does a query without any.

    Args:
        found: ids (Q, at least k), nearest first.
        truth: ids of the true neighbours (Q, at least k), nearest first.
        k: how many to look at.
    """
    found, truth = _ids("found", found, k), _ids("truth", truth, k)
    _check_rows(found, truth)
    mine, true = np.sort(found[:, :k]), np.sort(truth[:, :k])
    # Count each id once.
    mine[:, 1:][mine[:, 1:] == mine[:, :-1]] = -1
    true[:, 1:][true[:, 1:] == true[:, :-1]] = -1
    both = np.sort(np.concatenate([mine, true], axis=1))
    hits = ((both[:, 1:] == both[:, :-1]) & (both[:, 1:] >= 0)).sum(1)
    wanted = (true >= 0).sum(1)
    if not wanted.any():
        raise ValueError("truth must have neighbours, but every row is −1")
    return float(np.mean(hits[wanted > 0] / wanted[wanted > 0]))


def first_recall(found: Any, truth: Any, k: int = 10) -> float:
    """1-recall@k: the share of queries whose nearest neighbour is among the first k found."""
    found, truth = _ids("found", found, k), _ids("truth", truth, 1)
    _check_rows(found, truth)
    known = truth[:, 0] >= 0
    if not known.any():
        raise ValueError("truth must have neighbours, but every row begins with −1")
    return float((found[known, :k] == truth[known, :1]).any(1).mean())


def open_index(path: str | Path, *, mapped: bool = False) -> Any:
    """Open any index, a Faiss file or a folder of shards; returns `.index` and its `.record`.

    With `mapped`, inverted lists stay on the disk and are read as a search needs them.
    """
    if Path(path).is_dir():
        from givens.export.shards import load_shards

        return load_shards(Path(path))
    from givens.export.faiss import load_index

    return load_index(path, mapped=mapped)


def check_queries(index: Any, queries: Vectors, k: int) -> None:
    """Raise for queries that Faiss would answer with nothing, or with a crash."""
    if queries.shape[1] != index.d:
        raise ValueError(
            f"queries must have {index.d} dimensions as the index has, but got {queries.shape[1]}"
        )
    if index.ntotal == 0:
        raise ValueError("the index holds no vectors")
    if not 1 <= k <= index.ntotal:
        raise ValueError(f"k must be in 1..{index.ntotal}, the vectors in the index, but got {k}")


def batches(queries: Any) -> Iterator[tuple[npt.NDArray[np.float32], slice]]:
    """Queries as float32 arrays, with their positions."""
    at = 0
    for part in chunks(queries, BATCH):
        check_lengths("queries", part, first=at)
        yield part.numpy(), slice(at, at := at + len(part))


class Ranked(NamedTuple):
    """Re-ranked candidates, best first."""

    scores: npt.NDArray[np.float32]
    """Squared distances, or products: (Q, k)."""
    ids: npt.NDArray[np.int64]
    """(Q, k); −1 where there were fewer candidates."""


def rerank(
    candidates: npt.ArrayLike,
    x: Any,
    queries: Any,
    k: int = 10,
    metric: Metric = "l2",
    *,
    ids: npt.ArrayLike | None = None,
) -> Ranked:
    """The k best of each query's candidates, by the original vectors.

    Args:
        candidates: ids that an index found (Q, at least k), −1 for none.
        x: the vectors in the index (N, n), in any form that `ground_truth` takes.
        queries: (Q, n), likewise.
        k: how many to keep.
        metric: "l2", "ip" or "cosine".
        ids: the vectors' ids in the index (N,); their positions unless given.
    """
    check_choice("metric", metric, get_args(Metric))
    x, queries = _table("x", x), _table("queries", queries)
    check_table("queries", queries, x.shape[1])
    candidates = _ids("candidates", candidates, k)
    if len(candidates) != len(queries):
        raise ValueError(
            f"candidates must have a row for each of the {len(queries)} queries, "
            f"but have {len(candidates)}"
        )
    near = as_float(queries[:])
    check_lengths("queries", near, metric)
    rows = candidates
    if ids is not None:
        ids = np.asarray(ids)
        if ids.shape != (len(x),) or ids.dtype.kind not in "iu":
            raise ValueError(
                f"ids must be {len(x)} integers, one for each vector of x, "
                f"but got {ids.dtype} of shape {ids.shape}"
            )
        order = np.argsort(ids)
        at = np.searchsorted(ids, candidates, sorter=order).clip(0, len(ids) - 1)
        rows = np.where(ids[order[at]] == candidates, order[at], -1)
    if rows.max() >= len(x) or ((rows < 0) != (candidates < 0)).any():
        raise ValueError("candidates must be ids of x, but one has no vector there")
    # Read each vector once, however many queries have it as a candidate.
    unique, inverse = np.unique(rows.clip(0), return_inverse=True)
    table = as_float(x[torch.from_numpy(unique).to(x.device) if isinstance(x, Tensor) else unique])
    check_lengths("x", table, metric, rows=unique)
    if metric == "cosine":
        table, near = (torch.nn.functional.normalize(t) for t in (table, near))
    scores = torch.empty(rows.shape)
    for query, places in enumerate(torch.from_numpy(inverse.reshape(rows.shape))):
        if metric == "l2":
            scores[query] = (table[places] - near[query]).square().sum(1)
        else:
            scores[query] = table[places] @ near[query]
    scores[torch.from_numpy(candidates < 0)] = torch.inf if metric == "l2" else -torch.inf
    best = scores.topk(k, largest=metric != "l2")
    return Ranked(best.values.numpy(), np.take_along_axis(candidates, best.indices.numpy(), 1))


def _nearest(
    x: Any, queries: Tensor, k: int, metric: Metric, progress: Callable[[int], object] | None
) -> Tensor:
    """The k nearest neighbours of queries that are all in memory."""
    Q, n = queries.shape
    # Squared distances or negative products, smaller is better, and their ids.
    best = queries.new_full((Q, k), torch.inf, dtype=torch.float64)
    ids = torch.full((Q, k), -1, dtype=torch.int64, device=queries.device)
    screen: _Screen | None = None
    at = 0
    for part in chunks(x, min(SCORES // min(BLOCK, Q), NUMBERS // n), queries.device):
        check_lengths("x", part, metric, first=at)
        if screen is None:
            screen = _Screen(part, queries, metric)
        screen.take(part)
        for first in range(0, Q, BLOCK):
            rows = slice(first, min(first + BLOCK, Q))
            which, places = screen.candidates(rows, best[rows, -1], k)
            if len(which):
                far = _exact(part, queries[rows], which, places, metric)
                best[rows], ids[rows] = _merge(best[rows], ids[rows], which, far, places + at)
            if progress is not None:
                progress((rows.stop - rows.start) * len(part))
        at += len(part)
    return ids


class _Screen:
    """Finds the vectors of a slice that may be among the nearest, by float32 products."""

    def __init__(self, first: Tensor, queries: Tensor, metric: Metric) -> None:
        self.metric = metric
        # A switch of torch makes float32 products coarser than the bound.
        trusted = torch.get_float32_matmul_precision() == "highest"
        self.dtype = torch.float32 if trusted else torch.float64
        # Distances do not depend on the origin, and their rounding is smaller near it.
        self.origin = first.mean(0) if metric == "l2" else None
        self.queries = self._prepare(queries)
        self.lengths = self.queries.double().norm(dim=1)

    def take(self, part: Tensor) -> None:
        """Look at the next slice of vectors."""
        self.part = self._prepare(part)
        squares = self.part.square().sum(1)
        self.squares, self.longest = squares, squares.max().double().sqrt()

    def candidates(self, rows: slice, worst: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Pairs (query, row of the slice) that may be nearer than the worst one kept, in order.

        All other pairs are farther than the worst one, or than k others of the slice.
        """
        queries, lengths = self.queries[rows], self.lengths[rows]
        slack = (queries.shape[1] + 8) * ROUNDING * (lengths + self.longest).square()
        if self.metric == "l2":
            scores = torch.addmm(self.squares, queries, self.part.mT, alpha=-2)
            worst = worst - lengths.square()
        else:
            scores = (queries @ self.part.mT).neg_()
        # Twice, since ‖x‖² − 2 q·x is rounded, and so are the origin and ‖q‖² on the other side.
        near = _not_above(scores, worst + 2 * slack)
        # If many are left, as in the first slice, the k best of them bound the rest.
        if k <= scores.shape[1] and int(near.count_nonzero()) > 4 * k * len(queries):
            own = scores.topk(k, largest=False).values[:, -1]
            near &= _not_above(scores, own + 4 * slack)
        which, places = near.nonzero(as_tuple=True)
        return which, places

    def _prepare(self, table: Tensor) -> Tensor:
        table = table.to(self.dtype)
        if self.metric == "cosine":
            return torch.nn.functional.normalize(table, eps=SMALLEST)
        return table if self.origin is None else table - self.origin


def _not_above(scores: Tensor, limit: Tensor) -> Tensor:
    """Which scores are at most the limit of their row; NaN counts as one."""
    limit = limit.to(scores.dtype)
    limit = torch.nextafter(limit, torch.full_like(limit, torch.inf))
    return (scores > limit[:, None]).logical_not_()


def _exact(part: Tensor, queries: Tensor, which: Tensor, places: Tensor, metric: Metric) -> Tensor:
    """Squared distances or negative products of pairs in float64, all summed in the same order."""
    far = torch.empty(len(which), dtype=torch.float64, device=part.device)
    step = max(SCORES // part.shape[1], 1)
    for first in range(0, len(which), step):
        pairs = slice(first, first + step)
        q, y = queries[which[pairs]].double(), part[places[pairs]].double()
        if metric == "l2":
            far[pairs] = (q - y).square_().sum(1)
        else:
            far[pairs] = -(q * y).sum(1)
            if metric == "cosine":
                lengths = (table.norm(dim=1).clamp_min(SMALLEST) for table in (q, y))
                far[pairs] /= math.prod(lengths)
    return far


def _merge(
    best: Tensor, ids: Tensor, which: Tensor, far: Tensor, names: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the best so far with new ones, whose ids are larger and in order."""
    k, counts = best.shape[1], which.bincount(minlength=len(best))
    # A row for each query, as wide as the longest.
    place = k + torch.arange(len(which), device=which.device)
    place -= (counts.cumsum(0) - counts)[which]
    width = k + int(counts.max())
    wide = best.new_full((len(best), width), torch.inf)
    named = ids.new_full((len(best), width), -1)
    wide[:, :k], named[:, :k] = best, ids
    wide[which, place], named[which, place] = far, names
    # Stable, so ties keep the smaller id first; empty places are farthest.
    order = wide.sort(dim=1, stable=True).indices[:, :k]
    return wide.gather(1, order), named.gather(1, order)


def _table(name: str, table: Any) -> Any:
    """Vectors of at least one row and column."""
    table = as_vectors(table, name)
    check_table(name, table)
    if not len(table):
        raise ValueError(f"{name} must have at least one vector, but has none")
    return table


def _ids(name: str, table: Any, k: int) -> npt.NDArray[Any]:
    """Integers (Q, at least k)."""
    k = check_integer("k", k)
    if isinstance(table, Tensor):
        table = table.detach().cpu().numpy()
    try:
        table = np.asarray(table)
    except ValueError as error:
        raise ValueError(f"{name} must be ids of shape (Q, k), but its rows differ") from error
    if table.ndim != 2 or table.dtype.kind not in "iu" or len(table) == 0:
        raise ValueError(
            f"{name} must be ids of shape (Q, k), but got {table.dtype} of shape {table.shape}"
        )
    if not 1 <= k <= table.shape[1]:
        raise ValueError(f"k must be in 1..{table.shape[1]}, the columns of {name}, but got {k}")
    ids: npt.NDArray[Any] = table.astype(np.int64)
    return ids


def _check_rows(found: npt.NDArray[Any], truth: npt.NDArray[Any]) -> None:
    if len(found) != len(truth):
        raise ValueError(
            f"found and truth must have the same queries, but have {len(found)} and "
            f"{len(truth)} rows"
        )
