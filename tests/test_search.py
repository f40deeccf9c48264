"""Exact neighbours and recall, each beside a slow version in float64."""

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import givens
from givens import search
from givens.export.faiss import metric_of, save_index, to_faiss
from givens.storage import vectors

METRICS = ["l2", "ip", "cosine"]


def brute(x, queries, k, metric):
    """Every pair in float64, and a sort that leaves equal ones in their order."""
    x, queries = np.float64(np.float32(x)), np.float64(np.float32(queries))
    rows = []
    for q in queries:
        if metric == "l2":
            far = ((q - x) ** 2).sum(1)
        elif metric == "ip":
            far = -(q * x).sum(1)
        else:
            lengths = np.maximum(np.linalg.norm(x, axis=1), 1e-12)
            far = -(q * x).sum(1) / lengths / max(np.linalg.norm(q), 1e-12)
        rows.append(np.argsort(far, kind="stable")[:k])
    return np.array(rows)


@pytest.fixture
def small_slices(monkeypatch):
    """So many slices of vectors and queries that everything meets everything."""
    monkeypatch.setattr(search, "SCORES", 300)
    monkeypatch.setattr(search, "BLOCK", 7)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("k", [1, 10, 150])
def test_neighbours_are_those_of_brute_force(metric, k, small_slices):
    generator = np.random.default_rng(k)
    # Far from the origin, where float32 products lose most.
    x = generator.standard_normal((500, 12)) + 40
    queries = generator.standard_normal((31, 12)) + 40
    x, queries = np.float32(x), np.float32(queries)
    truth = givens.ground_truth(torch.from_numpy(x), torch.from_numpy(queries), k, metric)
    assert truth.dtype == torch.int64
    assert truth.shape == (31, k)
    assert np.array_equal(truth, brute(x, queries, k, metric))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(METRICS),
    st.integers(1, 40),
    st.sampled_from([0.0, 1e-3, 1.0, 1e4, 1e12]),
)
def test_ties_go_to_the_smaller_id(seed, metric, k, offset):
    """Of vectors on a grid, most of which come several times; of any size."""
    generator = np.random.default_rng(seed)
    x = np.float32(generator.integers(-1, 2, (40, 3)) * (offset or 1.0) + offset)
    queries = np.float32(generator.integers(-1, 2, (5, 3)))
    if metric == "cosine":
        # Of other vectors, equal cosines are equal but for rounding.
        few = generator.standard_normal((6, 3)) * (offset or 1.0)
        x = np.float32(few)[generator.integers(6, size=40)]
        x *= np.exp2(generator.integers(-2, 3, (40, 1))).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "SCORES", 60)
        truth = givens.ground_truth(x, queries, k, metric)
    assert np.array_equal(truth, brute(x, queries, k, metric))


def test_all_the_same_and_ever_nearer(small_slices):
    queries = np.zeros((3, 2), np.float32)
    assert (givens.ground_truth(np.ones((900, 2)), queries, 5).numpy() == np.arange(5)).all()
    nearer = np.linspace(9, 1, 900, dtype=np.float32)[:, None].repeat(2, 1)
    expected = np.arange(899, 894, -1)
    assert (givens.ground_truth(nearer, queries, 5).numpy() == expected).all()


def test_a_switch_to_coarser_products_changes_nothing(small_slices):
    x = torch.randn(300, 8) + 5
    want = brute(x.numpy(), x[:20].numpy(), 10, "l2")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = givens.ground_truth(x, x[:20], 10)
    finally:
        torch.set_float32_matmul_precision(before)
    assert np.array_equal(found, want)


@pytest.mark.parametrize("suffix", ["npy", "fvecs", "bvecs"])
def test_files_are_streamed(tmp_path, suffix, monkeypatch, small_slices):
    x = np.random.default_rng(0).integers(0, 200, (400, 9))
    path = tmp_path / f"x.{suffix}"
    if suffix == "npy":
        np.save(path, x.astype(np.float16))
    else:
        dtype = np.dtype("<f4" if suffix == "fvecs" else "u1")
        width = np.full((400, 1), 9, "<i4").view("u1")
        rows = np.hstack([width, x.astype(dtype).view("u1").reshape(400, -1)])
        rows.tofile(path)
    opened, longest = vectors.read(path), []
    original = type(opened).__getitem__

    def spy(self, rows):
        part = original(self, rows)
        longest.append(len(part))
        return part

    monkeypatch.setattr(type(opened), "__getitem__", spy)
    done = []
    truth = givens.ground_truth(opened, opened[:15], 20, progress=done.append)
    assert np.array_equal(truth, brute(x, x[:15], 20, "l2"))
    assert max(longest) <= 300 // 7
    assert sum(done) == 400 * 15


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("metric", METRICS)
def test_neighbours_on_a_gpu(metric):
    x, queries = torch.randn(3000, 16), torch.randn(40, 16)
    truth = givens.ground_truth(x.cuda(), queries.cuda(), 20, metric)
    assert truth.is_cuda
    assert np.array_equal(truth.cpu(), brute(x.numpy(), queries.numpy(), 20, metric))


def test_what_cannot_be_compared():
    x = torch.randn(20, 4)
    hole = x.clone()
    hole[7, 1] = torch.nan
    cases = [
        ((x, x[:, :3]), {}, "queries must have 4 dimensions as x has"),
        ((x[0], x), {}, r"x must have shape \(N, n\), but got \(4,\)"),
        ((x, x[:0]), {}, "queries must have at least one vector, but has none"),
        ((x, x), {"k": 21}, r"k must be in 1..20"),
        ((x, x), {"k": 0}, r"k must be in 1..20"),
        ((x, x), {"k": 2, "metric": "l1"}, "metric must be one of 'l2', 'ip', 'cosine'"),
        ((hole, x), {"k": 2}, "x must be finite, but row 7 has"),
        ((x, hole), {"k": 2}, "queries must be finite, but row 7 has"),
    ]
    for tables, options, message in cases:
        with pytest.raises(ValueError, match=message):
            givens.ground_truth(*tables, **options)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8))
def test_recall_is_the_part_in_common(seed, k):
    """Counted with Python's sets, where some are missing and some come twice."""
    generator = np.random.default_rng(seed)
    found = generator.integers(-1, 12, (6, 9))
    truth = generator.permuted(np.arange(12)[None].repeat(6, 0), axis=1)[:, :8]
    parts = [
        len({i for i in mine[:k] if i >= 0} & set(true[:k])) / k
        for mine, true in zip(found.tolist(), truth.tolist(), strict=True)
    ]
    assert givens.recall(found, torch.from_numpy(truth), k) == pytest.approx(np.mean(parts))
    first = [true[0] in mine[:k] for mine, true in zip(found.tolist(), truth.tolist(), strict=True)]
    assert search.first_recall(found, truth, k) == pytest.approx(np.mean(first))


def test_recall_refuses_what_is_not_ids():
    ids = np.arange(30).reshape(3, 10)
    cases = [
        ((ids, ids[:2]), {}, "the same queries, but have 3 and 2 rows"),
        ((ids[:, :5], ids), {}, r"k must be in 1..5, the columns of found, but got 10"),
        ((ids, ids[:, :5]), {}, r"k must be in 1..5, the columns of truth, but got 10"),
        ((ids, ids), {"k": 0}, r"k must be in 1..10"),
        ((ids / 2, ids), {}, "found must be ids of shape"),
        ((ids, ids[0]), {}, "truth must be ids of shape"),
        ((ids, -np.ones_like(ids)), {}, "truth must have neighbours"),
    ]
    for tables, options, message in cases:
        with pytest.raises(ValueError, match=message):
            givens.recall(*tables, **options)
    assert givens.recall(-np.ones_like(ids), ids) == 0.0
    assert givens.recall(ids, ids) == 1.0


@pytest.mark.parametrize("metric", METRICS)
def test_candidates_ranked_again_are_the_best_of_them(metric):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((200, 6)).astype(np.float32)
    queries = generator.standard_normal((10, 6)).astype(np.float32)
    names = generator.permutation(1000)[:200]
    candidates = generator.permuted(np.arange(200)[None].repeat(10, 0), axis=1)[:, :30]
    candidates[0, 5:] = candidates[1, 2] = -1
    order = brute(x, queries, 200, metric)
    for ids in (None, names):
        asked = candidates if ids is None else np.where(candidates < 0, -1, ids[candidates])
        best = search.rerank(asked, torch.from_numpy(x), queries, 8, metric, ids=ids)
        listed = search.rerank(
            asked.tolist(), x.tolist(), torch.from_numpy(queries), 8, metric, ids=ids
        )
        assert np.array_equal(best.ids, listed.ids)
        for row, mine in enumerate(best.ids):
            wanted = [i for i in order[row] if i in candidates[row]][:8]
            wanted = wanted if ids is None else ids[wanted]
            assert mine[: len(wanted)].tolist() == list(wanted)
            assert (mine[len(wanted) :] == -1).all()


def test_candidates_that_are_no_vectors():
    x = np.ones((5, 2), np.float32)
    with pytest.raises(ValueError, match="candidates must be ids of x"):
        search.rerank(np.array([[1, 5]]), x, x[:1], 1)
    with pytest.raises(ValueError, match=r"k must be in 1\.\.2, the columns of candidates"):
        search.rerank(np.array([[1, 2]]), x, x[:1], 3)


def test_any_index_is_opened(tmp_path):
    """Ours with its record, Faiss's without, and a folder of shards."""
    x = np.random.default_rng(0).standard_normal((600, 8)).astype(np.float32)
    q = givens.fit(x, 4, codewords=16, coarse=4)
    save_index(to_faiss(q, x), tmp_path / "ours.faiss")
    assert search.open_index(tmp_path / "ours.faiss").record["vectors"] == 600
    flat = faiss.index_factory(8, "RaBitQ")
    flat.train(x)
    flat.add(x)
    faiss.write_index(flat, f"{tmp_path}/plain.faiss")
    plain = search.open_index(f"{tmp_path}/plain.faiss")
    assert (plain.index.ntotal, plain.record) == (600, None)

    from givens.export import shards

    np.save(tmp_path / "x.npy", x)
    jobs = shards.plan([f"{tmp_path}/x.npy"], 8)
    folder = tmp_path / "folder"
    with shards.building(folder):
        shards.finish(q, shards.encode_here(q, jobs, folder), folder, {})
    assert search.open_index(folder).index.ntotal == 600


def test_what_an_index_ranks_by():
    for metric, by in (("l2", faiss.METRIC_L2), ("ip", faiss.METRIC_INNER_PRODUCT)):
        for kind in ("Flat", "PCA4,SQ8", "IVF4,Flat", "IDMap,Flat", "RaBitQ"):
            assert metric_of(faiss.index_factory(8, kind, by)) == metric
        assert metric_of(faiss.index_factory(8, "L2norm,Flat", by)) == "cosine"
    with pytest.raises(ValueError, match="index must be by L2 or inner product"):
        metric_of(faiss.index_factory(8, "Flat", faiss.METRIC_L1))
