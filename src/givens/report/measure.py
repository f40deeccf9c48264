"""Measurements of a finished run: recall and speed of its index, codeword usage, R's change."""

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from givens.checks import check_lengths, check_table
from givens.export.faiss import inverted, load_index, to_faiss
from givens.export.refresh import read_codes
from givens.quantizer import Quantizer, load
from givens.report.runs import Folder
from givens.retrieval import checkpoint, evaluate
from givens.retrieval.batches import HeldOut

# Seconds of timed single queries, and the number of queries before them that fill the caches.
SECONDS, BEFORE = 0.5, 20
# Codewords of a subspace in Faiss's FastScan.
FAST = 16
# An angle beyond rounding, in degrees.
TURNED = 0.01


@dataclass(frozen=True)
class Speed:
    """The speed of one way to search."""

    way: str
    recall: float
    queries_a_second: float


@dataclass(frozen=True, eq=False)
class Turn:
    """The change from R₀, when the index was started, to R at the end."""

    M: Float[Tensor, "n n"]
    """R₀ᵀR."""
    angles: Float[Tensor, " planes"]
    """The angles of the ⌊n/2⌋ planes that M turns, in degrees, largest first."""
    between: float
    """The share of the change, in squares, that is between subspaces; within one, codes stay."""

    @property
    def moved(self) -> bool:
        """Whether R has changed at all."""
        return bool(self.angles[0] > TURNED)


@dataclass(frozen=True, eq=False)
class Measured:
    """The measurements of one run."""

    users: Float[Tensor, " u"]
    """The recall of each test user by the index."""
    held: HeldOut
    speeds: list[Speed]
    """The index, at each nprobe where it has lists; its FastScan form where it may have one; full
    precision last."""
    counts: Int[Tensor, "D K"]
    """The number of items with each codeword."""
    turn: Turn | None

    @property
    def perplexity(self) -> float:
        """The effective number of codewords, e^entropy, the mean over subspaces."""
        share = self.counts / self.counts.sum(1, keepdim=True)
        return float(torch.special.entr(share).sum(1).exp().mean())


def measure_run(run: Folder) -> Measured | None:
    """Search a run's index with its test users; None if the run is not finished.

    Raises if the run's files do not belong together: the index must reproduce the recall in
    results.json.
    """
    names = ("index.faiss", "quantizer.safetensors", "towers.safetensors", "users.safetensors")
    if run.results is None:
        return None
    for name in names:
        if not (run.path / name).is_file():
            raise FileNotFoundError(
                f"{run.path} has results but no {name}; train it again with `givens train`"
            )
    index = load_index(run.path / names[0]).index
    q = load(run.path / names[1])
    try:
        weight = checkpoint.load_towers(run.path / names[2])["towers.items.weight"]
        queries, held = checkpoint.load_users(run.path / names[3])
        start = _load_start(run)
        _check_together(run, index, (q, start), weight, queries, held)
    except (KeyError, TypeError, ValueError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"the files in {run.path} are not of the same run: {what}") from error
    items = torch.nn.functional.normalize(weight, dim=1)
    k = min(int(run.metric.removeprefix("recall@")), len(items))
    found = evaluate.search(index, queries, held, k)
    users = compute_recalls(found.items, held, len(items))
    if abs(float(users.mean()) - run.results["index"][run.metric]) > evaluate.CLOSE:
        raise ValueError(
            f"{run.path}/index.faiss finds {float(users.mean()):.4f}, but results.json says "
            f"{run.results['index'][run.metric]:.4f}: they are of different runs"
        )
    # Read, not encoded again: the codes of jpq are not those of the nearest codewords.
    codes = torch.from_numpy(read_codes(index))
    counts = torch.stack([torch.bincount(c.long(), minlength=q.codewords) for c in codes.T])
    speeds = [
        *_measure_speeds(index, queries, held, k),
        _measure_flat(run, items, queries, held, k),
    ]
    if q.coarse is None and q.codewords == FAST and run.method != "jpq":
        fast = to_faiss(q, items, kind="pq-fastscan")
        recall, rate = (
            _measure_recall(fast, queries, held, k),
            _measure_rate(fast, queries, held, k),
        )
        speeds.insert(1, Speed("FastScan", recall, rate))
    turn = None if start is None else compare_rotations(start, q)
    return Measured(users, held, speeds, counts, turn)


def compute_recalls(
    found: Int[Tensor, "b k"], held: HeldOut, catalogue: int
) -> Float[Tensor, " u"]:
    """The recall of each user that has held-out items."""
    who = torch.arange(len(found))[:, None]
    hits = torch.isin(who * catalogue + found, held.truth) & (found >= 0)
    counted = held.sizes > 0
    return hits[counted].sum(1).double() / held.sizes[counted]


def compare_rotations(start: Quantizer, end: Quantizer) -> Turn:
    """The change of R from the index's start to its end."""
    before, after = start.rotation.double(), end.rotation.double()
    M = before.mT @ after
    # Eigenvalues come in pairs e^{±iθ}, one pair for each plane.
    angles = torch.linalg.eigvals(M).angle().abs().sort(descending=True).values
    block = torch.arange(len(M)) // (len(M) // end.subspaces)
    off = (M - M.diagonal().diag()).square()
    between = float(off[block[:, None] != block].sum() / off.sum().clamp_min(1e-300))
    return Turn(M.float(), angles[: 2 * (len(M) // 2) : 2].rad2deg(), between)


def _load_start(run: Folder) -> Quantizer | None:
    """The start of the index, if the run saved it."""
    path = run.path / "start.safetensors"
    return load(path) if path.is_file() else None


def _check_together(
    run: Folder,
    index: Any,
    quantizers: tuple[Quantizer, Quantizer | None],
    weight: Tensor,
    queries: Tensor,
    held: HeldOut,
) -> None:
    """Check that the parts fit together."""
    dim, subspaces = run.options["dim"], run.options["subspaces"]
    for q in quantizers:
        if q is not None and (q.dim, q.subspaces) != (dim, subspaces):
            raise ValueError(f"quantizers must be of {dim} and {subspaces}, but got {q}")
    for name, part in (("towers.items.weight", weight), ("queries", queries)):
        check_table(name, part, dim)
        if part.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, but got {part.dtype}")
        check_lengths(name, part)
    m, users = len(weight), len(queries)
    if (index.d, index.ntotal) != (dim, m):
        raise ValueError(
            f"index must hold {m} vectors of {dim}, but got {index.ntotal} of {index.d}"
        )
    for name, part, most in (
        ("seen", held.seen, users * m),
        ("truth", held.truth, users * m),
        ("sizes", held.sizes, m + 1),
    ):
        if part.ndim != 1 or part.dtype != torch.int64:
            raise TypeError(f"{name} must be a list of integers, but got {part.dtype}")
        if len(part) and not 0 <= int(part.min()) <= int(part.max()) < most:
            raise ValueError(f"{name} must be in 0..{most - 1}")
    if len(held.sizes) != users or not held.sizes.any():
        raise ValueError(f"sizes must be of {users} users, some above 0, but got {held.sizes}")


def _measure_speeds(index: Any, queries: Tensor, held: HeldOut, k: int) -> Iterator[Speed]:
    """The speed of the index on one thread; with lists, for nprobe 1, 2, 4, …."""
    lists = inverted(index)
    if lists is None:
        yield Speed(
            "index",
            _measure_recall(index, queries, held, k),
            _measure_rate(index, queries, held, k),
        )
        return
    for nprobe in [*(1 << power for power in range((lists.nlist - 1).bit_length())), lists.nlist]:
        lists.nprobe = nprobe
        recall, rate = (
            _measure_recall(index, queries, held, k),
            _measure_rate(index, queries, held, k),
        )
        yield Speed(f"{nprobe} of {lists.nlist} lists", recall, rate)


def _measure_flat(run: Folder, items: Tensor, queries: Tensor, held: HeldOut, k: int) -> Speed:
    """The speed of exhaustive search in full precision, also by Faiss."""
    import faiss

    flat = faiss.IndexFlatIP(items.shape[1])
    flat.add(items.numpy())
    return Speed(
        "full precision", run.find_recall("full") or 0.0, _measure_rate(flat, queries, held, k)
    )


def _measure_recall(index: Any, queries: Tensor, held: HeldOut, k: int) -> float:
    m = index.ntotal
    most = min(k + int(_count_seen(held, m, len(queries)).max()), m)
    scores, found = index.search(queries.numpy(), most)
    answers = evaluate.Ranking(torch.from_numpy(found), torch.from_numpy(scores))
    return float(compute_recalls(evaluate.drop_seen(answers, held, m, k).items, held, m).mean())


def _measure_rate(index: Any, queries: Tensor, held: HeldOut, k: int) -> float:
    """Single queries a second on one thread, each for k items not yet seen."""
    wanted = (k + _count_seen(held, index.ntotal, len(queries))).clamp_max(index.ntotal).tolist()
    rows = list(zip(np.split(queries.numpy(), len(queries)), wanted, strict=True))
    with _one_thread():
        for row, number in rows[:BEFORE]:
            index.search(row, number)
        began, done = time.perf_counter(), 0
        for row, number in itertools.cycle(rows):
            index.search(row, number)
            done += 1
            if (spent := time.perf_counter() - began) > SECONDS:
                break
    return done / spent


def _count_seen(held: HeldOut, catalogue: int, users: int) -> Int[Tensor, " users"]:
    """The number of items that each user has seen."""
    return torch.bincount(held.seen // catalogue, minlength=users)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import faiss

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
