"""Build each index, search it, and write a row; a stopped comparison can be resumed."""

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import faiss
import numpy as np
import torch

import givens
from givens.checks import check_finite, check_number
from givens.compare.methods import (
    ID_BYTES,
    METHODS,
    NPROBES,
    Contender,
    Table,
    choose_metric,
    contenders,
)
from givens.export.faiss import inverted
from givens.paper.rows import environment
from givens.quantizer import Metric
from givens.search import first_recall, ground_truth, recall, rerank
from givens.storage import files
from givens.storage.vectors import rows_of

BYTES = (16, 32, 64, 96)
# Defaults: vectors to search, vectors to train on, and held-out queries.
SAMPLE, TRAINED, QUERIES = 200_000, 65_536, 1_000
LEAST = 1_000
# Neighbours to search, which are also the candidates for re-ranking.
K = 100
# Queries to time, and the number of passes over them.
TIMED, PASSES = 200, 3


@dataclass(frozen=True)
class Options:
    """The options of a comparison."""

    bytes: tuple[int, ...] = BYTES
    metric: Metric = "l2"
    methods: tuple[str, ...] = tuple(METHODS)
    minutes: float | None = None
    """Time budget: contenders that are unlikely to end in time are skipped."""
    sample: int = SAMPLE
    trained: int = TRAINED
    seed: int = 0
    threads: int = 1

    def check(self) -> None:
        """Check the options before the work."""
        for name, known in (("metric", get_args(Metric)), ("methods", tuple(METHODS))):
            chosen = getattr(self, name)
            for one in chosen if name == "methods" else (chosen,):
                if one not in known:
                    told = ", ".join(map(repr, known))
                    raise ValueError(f"{name} must be among {told}, but got {one!r}")
        if not self.bytes or min(self.bytes) < 1:
            raise ValueError(f"bytes must be positive numbers, but got {self.bytes}")
        if self.minutes is not None:
            check_number("minutes", self.minutes, 0, above=True)
        if min(self.sample, self.trained) < LEAST and self.sample:
            raise ValueError(
                f"sample and trained must be at least {LEAST:,}, but got {self.sample:,} and "
                f"{self.trained:,}"
            )
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, but got {self.threads}")


@dataclass(frozen=True)
class Split:
    """Vectors to search, vectors to train on, and held-out queries."""

    base: Table
    train: Table
    queries: Table

    @property
    def dim(self) -> int:
        """The dimension n."""
        return int(self.base.shape[1])


def split(x: Any, queries: Any, options: Options) -> Split:
    """Draw the split by the seed, into memory; vectors are normalised for the cosine."""
    generator = np.random.default_rng(options.seed)
    N, held = len(x), QUERIES if queries is None else 0
    if LEAST + held > N:
        raise ValueError(f"vectors must be at least {LEAST + held:,} to compare, but got {N:,}")
    if queries is not None and queries.shape[1] != x.shape[1]:
        raise ValueError(
            f"queries must have {x.shape[1]} dimensions as the vectors have, but got "
            f"{queries.shape[1]}"
        )
    count = min(N, (options.sample or N) + held)
    drawn = generator.choice(N, count, replace=False)
    asked, kept = drawn[:held], np.sort(drawn[held:])
    learnt = np.sort(generator.choice(len(kept), min(len(kept), options.trained), replace=False))
    base = _rows(x, kept, options.metric)
    if queries is None:
        found = _rows(x, asked, options.metric)
    else:
        some = generator.choice(len(queries), min(len(queries), QUERIES), replace=False)
        found = _rows(queries, some, options.metric)
    return Split(base, base[learnt], found)


def compare(
    x: Any,
    path: Path,
    options: Options,
    *,
    queries: Any = None,
    about: dict[str, Any] | None = None,
    tell: Callable[[int, int, str], object] = lambda done, total, note: None,
) -> dict[str, Any]:
    """Measure all contenders; rows are saved at `path`, and another run continues from them.

    Args:
        x: vectors (N, n): an array, a tensor, or a file of them.
        path: the file of the rows, including existing ones.
        options: what to compare.
        queries: vectors (Q, n); by default some of x are held out.
        about: the name of the vectors, and whatever else the rows depend on.
        tell: called with the number of finished contenders, their total, and the current one.
    """
    options.check()
    began = time.perf_counter()
    given = {
        "vectors": f"{len(x):,} × {x.shape[1]}",
        **(about or {}),
        **{name: getattr(options, name) for name in ("metric", "sample", "trained")},
        **{name: getattr(options, name) for name in ("seed", "threads")},
    }
    before = _read_earlier_rows(path, given)
    data = split(x, queries, options)
    lists = 1 << round(np.log2(max(len(data.base), 4)) / 2)
    lists = min(lists, max(len(data.train) // 40, 1))
    asked = contenders(data.dim, list(options.bytes), lists, options.metric)
    asked = [one for one in asked if one.method in options.methods]
    result: dict[str, Any] = {
        "configuration": given,
        "data": {
            "base": len(data.base),
            "train": len(data.train),
            "queries": len(data.queries),
            "dim": data.dim,
            "lists": lists,
            "k": K,
        },
        "environment": {**environment(), "threads": options.threads},
        "rows": before,
        "left_out": [],
    }
    done = {(row["method"], row["index"]) for row in before}
    with _threads(options.threads):
        # Compile before timing.
        small = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
        givens.fit(small, 2, codewords=16)
        tell(0, len(asked), "exact neighbours")
        metric = choose_metric(options.metric)
        truth = ground_truth(data.base, data.queries, K, metric).numpy()
        for number, one in enumerate(asked):
            if (one.method, one.index) in done:
                continue
            why = _explain_skip(one, result["rows"], began, options.minutes)
            if why is None:
                tell(number, len(asked), f"{one.name}, {one.budget} bytes")
                result["rows"] += measure(one, data, truth, metric, options)
            else:
                result["left_out"].append({**_describe(one), "why": why})
            files.write_json(path, result)
        tell(len(asked), len(asked), "done")
    files.write_json(path, result)
    return result


def measure(
    one: Contender, data: Split, truth: Any, metric: Metric, options: Options
) -> list[dict[str, Any]]:
    """Build one index and search it; returns a row, or one for each nprobe."""
    began = time.perf_counter()
    clock = time.process_time if options.threads == 1 else time.perf_counter
    start = clock()
    index = one.make(data.train[: one.sample], metric, options.seed)
    trained = clock()
    parameters = len(faiss.serialize_index(index))
    start, added = trained - start, clock()
    index.add(data.base)
    added = clock() - added
    row = {
        **_describe(one),
        "bytes": _bytes(index),
        "parameter_bytes": parameters,
        "trained_on": min(len(data.train), one.sample or len(data.train)),
        "train_seconds": start,
        "encoded_a_second": len(data.base) / max(added, 1e-9),
    }
    rows = []
    lists = inverted(index)
    for nprobe in [n for n in NPROBES if n <= lists.nlist] if lists is not None else [None]:
        if lists is not None:
            lists.nprobe = nprobe
        found, speed = _time_search(index, data.queries, clock)
        again = rerank(found, data.base, data.queries, 10, metric).ids
        rows.append(
            {
                **row,
                "nprobe": nprobe,
                "queries_a_second": speed,
                "recall@10": recall(found, truth, 10),
                "recall@10_error": _error(found, truth),
                **{f"1-recall@{k}": first_recall(found, truth, k) for k in (1, 10, 100)},
                "reranked_recall@10": recall(again, truth, 10),
                "reranked_1-recall@1": first_recall(again, truth, 1),
                "reranked_1-recall@10": first_recall(again, truth, 10),
            }
        )
    spent = time.perf_counter() - began
    return [{**row, "seconds": spent} for row in rows]


def _time_search(index: Any, queries: Table, clock: Callable[[], float]) -> tuple[Any, float]:
    """The neighbours found, and queries a second: the median of passes over some queries."""
    found, speeds = index.search(queries, K)[1], []
    for _ in range(PASSES):
        began = clock()
        index.search(queries[:TIMED], K)
        speeds.append(len(queries[:TIMED]) / max(clock() - began, 1e-9))
    return found, statistics.median(speeds)


def _bytes(index: Any) -> int:
    """The bytes of a vector in memory: its code, and its id if one is stored."""
    if (lists := inverted(index)) is not None:
        return int(lists.code_size) + ID_BYTES
    return int(index.sa_code_size())


def _error(found: Any, truth: Any) -> float:
    """The standard error of recall@10 over queries."""
    parts = [recall(mine[None], true[None], 10) for mine, true in zip(found, truth, strict=True)]
    return float(np.std(parts, ddof=1) / np.sqrt(len(parts)))


def _describe(one: Contender) -> dict[str, Any]:
    return {
        "method": one.method,
        "name": one.name,
        "form": one.form,
        "budget": one.budget,
        "index": one.index,
    }


def _explain_skip(
    one: Contender, rows: list[dict[str, Any]], began: float, minutes: float | None
) -> str | None:
    """Why there is no time for a contender, estimated from its time at fewer bytes; or None."""
    if minutes is None:
        return None
    left = 60 * minutes - (time.perf_counter() - began)
    mine = [row for row in rows if row["method"] == one.method]
    takes = 0.0
    if mine:
        last = max(mine, key=lambda row: row["budget"])
        takes = last["seconds"] * max(one.budget / last["budget"], 1) ** one.growth
    if left <= 0:
        return f"the {minutes:g} minutes were over"
    if takes > left:
        return f"it would take about {takes:,.0f} s, and {left:,.0f} were left"
    return None


def _read_earlier_rows(path: Path, given: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run of the same comparison."""
    if not path.exists():
        return []
    try:
        stored = json.loads(path.read_text("utf-8"))
        rows: list[dict[str, Any]] = [dict(row) for row in stored["rows"]]
        earlier = dict(stored["configuration"])
        for row in rows:
            row["method"], row["index"], row["seconds"], row["budget"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} holds no rows of a comparison; take it away, or choose another --output"
        ) from error
    for name in given.keys() | earlier.keys():
        if given.get(name) != earlier.get(name):
            raise ValueError(
                f"{path} holds a comparison with {name} {earlier.get(name)}, not "
                f"{given.get(name)}; take it away, or choose another --output"
            )
    return rows


def _rows(x: Any, index: Any, metric: Metric) -> Table:
    """Some of the vectors, checked, and normalised for the cosine."""
    part = rows_of(x, torch.from_numpy(np.sort(index)))
    check_finite("vectors", part, rows=np.sort(index))
    if metric == "cosine":
        part = torch.nn.functional.normalize(part)
    table: Table = part.cpu().numpy()
    return np.ascontiguousarray(table)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set the number of threads of Faiss and torch, which our kernels follow."""
    before = faiss.omp_get_max_threads(), torch.get_num_threads()
    faiss.omp_set_num_threads(count)
    torch.set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before[0])
        torch.set_num_threads(before[1])
