"""Each number of a comparison beside what it stands for, computed by hand."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import faiss
import numpy as np
import pytest
import torch

import givens
from givens.compare import page, run
from givens.compare.methods import METHODS, choose_metric, contenders
from givens.compare.run import Options
from givens.search import ground_truth, recall, rerank

N, n = 2600, 24
# What learns slowly is tried once, by a metric.
SLOW = {"opq-identity": "l2", "lsq": "l2", "opq-default": "ip", "rq": "ip", "prq": "ip"}
SMALL = Options(bytes=(6, 13), sample=2000, trained=2000)


@pytest.fixture(scope="module")
def x():
    """Vectors with correlated axes and a mean."""
    generator = np.random.default_rng(0)
    z = generator.standard_normal((N, n)) * np.linspace(3, 0.2, n)
    return np.float32(z @ np.linalg.qr(generator.standard_normal((n, n)))[0] + 1)


@pytest.fixture(scope="module")
def queries(x):
    return x[:40] + np.float32(0.1)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(run, "TIMED", 5)


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_every_method_keeps_to_the_bytes_and_finds_neighbours(metric, x, queries, quick):
    """At budgets that divide the dimension and that do not; what it states is what Faiss keeps."""
    options = dataclasses.replace(SMALL, metric=metric)
    data = run.split(x, queries, options)
    by = choose_metric(metric)
    truth = ground_truth(data.base, data.queries, run.K, by).numpy()
    methods = {}
    for one in contenders(n, [8, 23], 8, metric):
        if one.method in SLOW:
            if one.budget > 8 or metric != SLOW[one.method]:
                continue
            one = dataclasses.replace(one, sample=300)
        rows = run.measure(one, data, truth, by, options)
        for row in rows:
            assert row["bytes"] - (8 if one.form == "ivf" else 0) <= one.budget, one
            # Of 2,000, chance would find 10 in 20,000; 20 bits and more find some.
            assert row["recall@10"] > 0.05, one
            assert row["reranked_recall@10"] >= row["recall@10"] - 1e-9
            assert row["1-recall@1"] <= row["1-recall@10"] <= row["1-recall@100"]
        methods.setdefault(one.method, []).extend(rows)
    assert set(METHODS) - set(methods) == {name for name, by in SLOW.items() if by != metric}
    # A PCA about the mean would lose the products' order.
    assert methods["sq8"][-1]["recall@10"] > 0.9
    # Bits cost what they cost: with 23 bytes more is found than with 8.
    for method in ("givens", "pq", "sq8"):
        first, *_, last = methods[method]
        assert last["recall@10"] > first["recall@10"]


def test_a_row_is_what_it_says(x, queries, quick):
    data = run.split(x, queries, SMALL)
    truth = ground_truth(data.base, data.queries, run.K).numpy()
    (one,) = [c for c in contenders(n, [8], 8, "l2") if c.method == "pq"]
    (row,) = run.measure(one, data, truth, "l2", SMALL)
    index = faiss.index_factory(n, "PQ8x8np")
    index.pq.cp.min_points_per_centroid = 1
    index.train(data.train)
    index.add(data.base)
    found = index.search(data.queries, 100)[1]
    parts = [recall(f[None], t[None], 10) for f, t in zip(found, truth, strict=True)]
    assert row["recall@10"] == pytest.approx(np.mean(parts))
    assert row["recall@10_error"] == pytest.approx(np.std(parts, ddof=1) / np.sqrt(40))
    assert row["1-recall@10"] == (found[:, :10] == truth[:, :1]).any(1).mean()
    again = rerank(found, data.base, data.queries, 10).ids
    assert row["reranked_recall@10"] == recall(again, truth, 10)
    assert row["bytes"] == index.code_size
    empty = faiss.index_factory(n, "PQ8x8np")
    empty.train(data.train)
    assert row["parameter_bytes"] == len(faiss.serialize_index(empty))


def test_zeros_between_the_coordinates_change_no_distance(x):
    """An index of 13 bytes for 24 dimensions, which a rotation of 26 turns."""
    (one,) = [c for c in contenders(n, [13], 8, "l2") if c.method == "givens"]
    index = one.make(x, "l2", 0)
    index.add(x)
    assert index.d == n
    close = index.reconstruct_n(0, 500)
    assert close.shape == (500, n)
    D, found = index.search(x[:5], 3)
    far = ((x[:5, None] - close_of(index, found)) ** 2).sum(2)
    # What falls into the zeros is lost when going back, and is little.
    assert np.allclose(D, far, rtol=0.05, atol=0.02)


def close_of(index, found):
    return np.stack([[index.reconstruct(int(i)) for i in row] for row in found])


def test_queries_are_held_out_and_the_seed_says_which(x):
    options = dataclasses.replace(SMALL, sample=0)
    x = np.concatenate([x, x + 9])
    data = run.split(x, None, options)
    together = np.concatenate([data.base, data.queries])
    assert np.array_equal(np.sort(together, axis=0), np.sort(x, axis=0))
    assert len(data.queries) == run.QUERIES
    held = {row.tobytes() for row in data.queries}
    assert not held & {row.tobytes() for row in data.base}
    assert {row.tobytes() for row in data.train} <= {row.tobytes() for row in data.base}
    same, other = (run.split(x, None, dataclasses.replace(options, seed=s)) for s in (0, 1))
    assert np.array_equal(same.queries, data.queries)
    assert not np.array_equal(other.queries, data.queries)


FEW = dataclasses.replace(SMALL, methods=("pq", "sq8"))


def test_a_run_that_was_stopped_goes_on(x, queries, tmp_path, monkeypatch, quick):
    path, begun = tmp_path / "rows.json", []
    original = run.measure

    def stopped(one, *rest):
        begun.append((one.method, one.budget))
        if len(begun) == 3:
            raise KeyboardInterrupt
        return original(one, *rest)

    monkeypatch.setattr(run, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        run.compare(x, path, FEW, queries=queries)
    first = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in first] == ["pq", "pq"]
    result = run.compare(x, path, FEW, queries=queries)
    assert begun == [("pq", 6), ("pq", 13), ("sq8", 6), ("sq8", 6), ("sq8", 13)]
    assert result["rows"][:2] == first
    assert json.loads(path.read_text()) == result
    # More bytes go on, too; another seed is another comparison.
    more = dataclasses.replace(FEW, bytes=(6, 13, 24))
    assert len(run.compare(x, path, more, queries=queries)["rows"]) == 6
    for change in ({"seed": 1}, {"metric": "ip"}, {"threads": 2}):
        name = next(iter(change))
        with pytest.raises(ValueError, match=f"holds a comparison with {name} .*take it away"):
            run.compare(x, path, dataclasses.replace(FEW, **change), queries=queries)
    path.write_text("[]")
    with pytest.raises(ValueError, match="holds no rows of a comparison"):
        run.compare(x, path, FEW, queries=queries)


def test_what_does_not_fit_into_the_time_is_told(x, queries, tmp_path, monkeypatch, quick):
    """The clock is ours: each contender takes 50 s, or what growth makes of it."""
    now = [0.0]
    monkeypatch.setattr(run.time, "perf_counter", lambda: now[0])
    original = run.measure

    def slow(one, *rest):
        now[0] += 50
        return [{**row, "seconds": 50} for row in original(one, *rest)]

    monkeypatch.setattr(run, "measure", slow)
    options = dataclasses.replace(FEW, minutes=2.0)
    result = run.compare(x, tmp_path / "rows.json", options, queries=queries)
    # pq at 6 bytes takes 50 s, so that 13 take 108 s, and 70 are left; sq8 is begun unknown.
    assert [(row["method"], row["budget"]) for row in result["rows"]] == [("pq", 6), ("sq8", 6)]
    told = [(one["method"], one["budget"], one["why"]) for one in result["left_out"]]
    assert told[0] == ("pq", 13, "it would take about 108 s, and 70 were left")
    assert told[1][:2] == ("sq8", 13)
    text = page.page(result)
    assert "No time for: Faiss PQ at 13 bytes (it would take about 108 s, and 70 were left)" in text
    later = run.compare(x, tmp_path / "rows.json", FEW, queries=queries)
    assert (len(later["rows"]), later["left_out"]) == (4, [])


class Tags(HTMLParser):
    """Every tag is closed, and nothing is fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        assert not {"src", "href"} & {name for name, _ in attributes} or tag == "link"
        if tag not in ("meta", "link", "path", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("path", "circle"):
            assert self.open.pop() == tag


def row(name, method, budget, value, **others):
    return {
        **{"name": name, "method": method, "budget": budget, "recall@10": value, "form": "flat"},
        **{"recall@10_error": 0.001, "reranked_recall@10": value / 2 + 0.5, "train_seconds": 1.0},
        **{"bytes": budget, "nprobe": None, "queries_a_second": 100.0, "encoded_a_second": 1e4},
        **{f"1-recall@{k}": value for k in (1, 10, 100)},
        "index": "X",
        **others,
    }


def result(*rows):
    return {
        "rows": list(rows),
        "left_out": [],
        "configuration": {"source": "<b>x</b>.npy", "metric": "l2", "threads": 1, "seed": 0},
        "data": {"base": 9, "train": 9, "queries": 9, "dim": 32, "lists": 4, "k": 100},
        "environment": {"givens": "0", "cpu": "<i>"},
    }


def test_advice_is_what_the_rows_say():
    told = page.advice(
        result(
            row("ours", "givens", 4, 0.5),
            row("theirs", "pq", 4, 0.4),
            row("ours", "givens", 16, 0.8),
            row("bits", "rabitq", 16, 0.9),
            row("lists", "givens-ivf", 16, 0.99, form="ivf", nprobe=4),
        )
    )
    assert told[0] == (
        "For these vectors take a product quantizer with a learned rotation (givens) at 4 bytes "
        "and RaBitQ at 16 bytes."
    )
    assert told[1] == (
        "At 4 bytes (1 bit a dimension): ours finds 50.0 % of the 10 nearest, 75.0 % when 100 are "
        "ranked again; then theirs with 40.0 %."
    )
    assert "bits finds 90.0 %" in told[2]
    # Within two standard errors the quicker one will do.
    level = [row("ours", "givens", 4, 0.5), row("plain", "pq", 4, 0.499, train_seconds=0.1)]
    told = page.advice(result(*level))
    assert told[0] == "For these vectors take a plain product quantizer at 4 bytes."
    assert "level with it within two standard errors: plain" in told[1]
    assert page.advice(result())[0].startswith("Nothing was measured")


def test_the_page_is_whole_and_escapes_what_it_is_given():
    rows = [row(f"<{m}>", m, 4, 0.5) for m in METHODS]
    rows += [row("lists", "givens-ivf", 4, 0.6, form="ivf", nprobe=p) for p in (1, 4)]
    text = page.page(result(*rows))
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert tags.seen.count("svg") == 3
    assert not {"script", "b>x", "i"} & set(tags.seen) - {"i"}
    assert "&lt;b&gt;x&lt;/b&gt;.npy" in text
    assert re.search(r"<td[^>]*>50\.0 %</td>", text)
    page.page(result())


def test_options_that_cannot_be():
    cases = [
        ({"metric": "l1"}, "metric must be among 'l2', 'ip', 'cosine', but got 'l1'"),
        ({"methods": ("magic",)}, "methods must be among 'givens', 'pq'"),
        ({"bytes": ()}, "bytes must be positive"),
        ({"bytes": (0, 4)}, "bytes must be positive"),
        ({"minutes": 0.0}, "minutes must be finite, above 0"),
        ({"minutes": float("nan")}, "minutes must be finite, above 0"),
        ({"trained": 10}, "sample and trained must be at least 1,000"),
        ({"threads": 0}, "threads must be at least 1"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(SMALL, **change).check()
    with pytest.raises(
        ValueError, match="vectors must be at least 2,000 to compare, but got 1,900"
    ):
        run.split(np.zeros((1900, 2), np.float32), None, SMALL)
    with pytest.raises(ValueError, match="queries must have 2 dimensions"):
        run.split(np.zeros((N, 2), np.float32), np.zeros((3, 4), np.float32), SMALL)
    hole = torch.zeros(N, 2)
    hole[5] = torch.nan
    with pytest.raises(ValueError, match="vectors must be finite, but row 5"):
        run.split(hole, hole[:3], dataclasses.replace(SMALL, sample=0))


def test_ours_is_what_fit_makes(x):
    (one,) = [c for c in contenders(n, [8], 8, "l2") if c.method == "givens"]
    index = one.make(x, "l2", 3)
    from givens.export.faiss import from_faiss

    q = givens.fit(torch.from_numpy(x), 8, seed=3, sample=None)
    assert from_faiss(index).fingerprint == q.fingerprint
