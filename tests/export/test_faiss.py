import json
import os
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

import givens
from givens.export.faiss import fit_opq, from_faiss, inverted, load_index, save_index, to_faiss
from givens.export.refresh import refresh
from givens.quantizer import Quantizer
from givens.storage import files
from givens.storage.vectors import read

METRICS = ["l2", "ip", "cosine"]
KINDS = ["pq", "ivfpq", "pq-fastscan", "ivfpq-fastscan"]
GRAPH = "hnswpq"
N, n, D = 3000, 16, 4


def data(rows=N, seed=0):
    """Vectors with a spectrum, away from the origin."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, n, generator=generator) * torch.linspace(2, 0.3, n) + 0.5


def make(kind="pq", metric="l2", K=None, L=12, subspaces=D):
    """A quantizer whose codewords are sub-vectors of the data."""
    K = K or (16 if kind.endswith("fastscan") else 256)
    R = givens.random_rotation(n, 3)
    x = data(seed=1)
    Y = (torch.nn.functional.normalize(x) if metric == "cosine" else x) @ R
    coarse = Y[:L] if kind.startswith("ivf") else None
    if coarse is not None:
        Y = Y[L:] - coarse[torch.cdist(Y[L:], coarse).argmin(1)]
    codebooks = Y[-K:].reshape(K, subspaces, -1).transpose(0, 1)
    return Quantizer(R, codebooks, coarse, metric)


def unpacked(packed, q):
    """Faiss's bytes as coarse (N,) or None and fine (N, D) codes."""
    bits = np.unpackbits(packed, axis=1, bitorder="little").astype(np.int64)
    nbits = (q.codewords - 1).bit_length()
    # Lists are numbered in whole bytes, before the codes.
    lead = 0 if q.coarse is None else 8 * -(-(len(q.coarse) - 1).bit_length() // 8)
    fine = bits[:, lead : lead + q.subspaces * nbits].reshape(len(bits), q.subspaces, nbits)
    weights = 1 << np.arange(max(nbits, lead))
    return bits[:, :lead] @ weights[:lead], fine @ weights[:nbits]


def assert_same_codes(q, index, x):
    """Equal, except where two distances agree within 1e-5."""
    codes = q.encode(x)
    coarse, fine = unpacked(index.sa_encode(x.numpy()), q)
    Y = q.rotate(x)
    same = np.ones(len(x), bool)
    if q.coarse is not None:
        same = codes.coarse.numpy() == coarse
        C = q.coarse
        for row in np.flatnonzero(~same):
            scores = (Y[row] - C).norm(dim=1) if q.metric == "l2" else C @ Y[row]
            ours, theirs = scores[codes.coarse[row]], scores[coarse[row]]
            assert torch.isclose(ours, theirs, rtol=1e-5)
        Y = Y - C[codes.coarse]
    parts = Y.reshape(len(x), q.subspaces, -1)
    for row, d in zip(*np.nonzero((codes.fine.numpy() != fine) & same[:, None]), strict=True):
        distances = (parts[row, d] - q.codebooks[d]).norm(dim=1)
        assert torch.isclose(distances[codes.fine[row, d]], distances[fine[row, d]], rtol=1e-5)
    assert (codes.fine.numpy() == fine)[same].mean() > 0.999
    assert same.mean() > 0.999


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_faiss(kind, metric):
    q, x = make(kind, metric), data()
    index = to_faiss(q, x, kind=kind)
    assert index.ntotal == N
    assert_same_codes(q, index, x)
    # What is stored decodes to what we decode, FastScan's interleaved blocks too.
    if inverted(index) is not None:
        inverted(index).make_direct_map()
    stored = torch.from_numpy(index.reconstruct_n(0, N))
    rows = torch.isclose(stored, q.decode(q.encode(x)), atol=1e-4).all(1)
    assert rows.float().mean() > 0.999


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("K", [256, 100])
def test_a_graph_holds_our_codes_and_searches_them(tmp_path, K, metric):
    q, x, queries = make(GRAPH, metric, K), data(), data(40, seed=5)
    index = to_faiss(q, x, kind=GRAPH)
    storage = faiss.downcast_index(faiss.downcast_index(index.index).storage)
    bits = faiss.vector_to_array(storage.codes).reshape(N, -1)
    codes = faiss.unpack_bitstrings(bits, D, storage.pq.nbits)
    assert (codes == q.encode(x).fine.numpy()).all(1).mean() > 0.999
    # What a full search of the same codes finds, nearly.
    flat = to_faiss(q, x).search(queries.numpy(), 10)
    faiss.downcast_index(index.index).hnsw.efSearch = 400
    save_index(index, tmp_path / "i.faiss")
    loaded = load_index(tmp_path / "i.faiss").index
    for graph in (index, loaded):
        found = graph.search(queries.numpy(), 10)
        assert np.isclose(found[0], flat[0], rtol=1e-4, atol=1e-4).mean() > 0.9
    assert from_faiss(loaded).fingerprint == q.fingerprint


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", [*KINDS, GRAPH])
@pytest.mark.parametrize("named", [False, True])
def test_refined_by_the_vectors_it_finds_the_true_neighbours(tmp_path, kind, metric, named):
    q, x, queries = make(kind, metric), data(), data(40, seed=5)
    ids = 7 * np.arange(N) + 1000 if named else None
    index = to_faiss(q, x, kind=kind, refine=True, ids=ids)
    save_index(index, tmp_path / "i.faiss")
    loaded = load_index(tmp_path / "i.faiss").index
    assert from_faiss(loaded).fingerprint == q.fingerprint
    assert loaded.ntotal == N
    asked, held = queries, x
    if metric == "cosine":
        asked, held = (torch.nn.functional.normalize(one) for one in (queries, x))
    scores = -torch.cdist(asked, held) if metric == "l2" else asked @ held.T
    true = scores.topk(10).indices.numpy()
    if inverted(loaded) is not None:
        inverted(loaded).nprobe = 12
    hits = {}
    for name, one in (("refined", loaded), ("alone", to_faiss(q, x, kind=kind))):
        if inverted(one) is not None:
            inverted(one).nprobe = 12
        values, found = one.search(queries.numpy(), 10)
        if named and name == "refined":
            assert ((found - 1000) % 7 == 0).all()
            found = (found - 1000) // 7
        if name == "refined":
            # By the vectors themselves, exactly.
            exact = scores.gather(1, torch.from_numpy(found)).numpy()
            exact = exact**2 if metric == "l2" else exact
            assert np.allclose(values, exact, rtol=1e-3, atol=1e-3)
        hits[name] = sum(len({*a} & {*b}) for a, b in zip(found, true, strict=True)) / true.size
    assert hits["refined"] > min(hits["alone"] + 0.1, 0.95)


@pytest.mark.parametrize("K", [2, 3, 5, 12, 16, 100, 129, 200, 255])
@pytest.mark.parametrize("L", [0, 300])
def test_any_number_of_codewords(K, L):
    q = make("ivfpq" if L else "pq", K=K, L=L)
    index = to_faiss(q, data())
    assert_same_codes(q, index, data())
    assert from_faiss(index).fingerprint == q.fingerprint


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_are_those_of_the_decoded_vectors(kind, metric):
    """An oracle without Faiss: exact search among decoded vectors."""
    q, x, queries = make(kind, metric), data(), data(40, seed=5)
    index = to_faiss(q, x, kind=kind)
    if inverted(index) is not None:
        inverted(index).nprobe = 12
    decoded = q.decode(q.encode(x)).double()
    asked = torch.nn.functional.normalize(queries) if metric == "cosine" else queries
    scores = -torch.cdist(asked.double(), decoded) if metric == "l2" else asked.double() @ decoded.T
    best = scores.sort(descending=True).values
    _, found = index.search(queries.numpy(), 10)
    at = scores.gather(1, torch.from_numpy(found))
    # FastScan rounds its tables to bytes.
    loose = 0.1 if kind.endswith("fastscan") else 1e-3
    assert (best[:, :10] - at).max() < loose * float(scores.std())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("named", [False, True])
def test_written_and_read_it_answers_the_same_and_goes_on_in_faiss(tmp_path, kind, named):
    q, x = make(kind), data()
    ids = 7 * np.arange(N) + 1000 if named else None
    index = to_faiss(q, x, kind=kind, ids=ids)
    path = tmp_path / "index.faiss"
    save_index(index, path, {"seed": 3})
    plain = faiss.read_index(str(path))
    before = index.search(x[:50].numpy(), 5)
    for loaded in (plain, load_index(path).index):
        for a, b in zip(before, loaded.search(x[:50].numpy(), 5), strict=True):
            assert np.array_equal(a, b)
    if named:
        assert set(np.unique(before[1])) <= set(ids)
    new = x[:100].numpy() * 0.5
    if named:
        plain.add_with_ids(new, np.arange(100))
    else:
        plain.add(new)
    assert plain.ntotal == N + 100
    if inverted(plain) is not None:
        inverted(plain).nprobe = 12
    gone = before[1][:, 0]
    assert plain.remove_ids(np.unique(gone)) == len(np.unique(gone))
    if named or kind.startswith("ivf"):
        # Others keep their names; a flat index numbers them anew.
        assert not set(gone) & set(plain.search(x[:50].numpy(), 5)[1].ravel())
    assert plain.ntotal == N + 100 - len(np.unique(gone))


def test_the_record_beside_an_index(tmp_path):
    q, path = make("ivfpq"), tmp_path / "index.faiss"
    save_index(to_faiss(q, data()), path, {"seed": 3})
    record = json.loads((tmp_path / "index.faiss.json").read_text())
    assert record["seed"] == 3
    assert record["fingerprint"] == q.fingerprint
    assert record["checksum"] == files.checksum(path)
    assert record["vectors"] == N
    stored = load_index(path)
    assert stored.record == {name: record[name] for name in record if name != "seal"}
    assert from_faiss(stored.index).fingerprint == q.fingerprint

    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"is not as index\.faiss\.json says: it is damaged"):
        load_index(path)
    (tmp_path / "index.faiss.json").unlink()
    assert load_index(path).record is None


def test_stopped_between_index_and_record_the_old_ones_belong_together(tmp_path, monkeypatch):
    path = tmp_path / "index.faiss"
    save_index(to_faiss(make(), data()), path, {"seed": 0})
    for seed in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", _stop_after(2))
            with pytest.raises(KeyboardInterrupt):
                save_index(to_faiss(make("ivfpq"), data()), path, {"seed": seed})
        assert load_index(path).record["seed"] == 0
    assert len(os.listdir(tmp_path)) == 2  # noqa: PTH208
    save_index(to_faiss(make("ivfpq"), data()), path, {"seed": 3})
    assert load_index(path).record["seed"] == 3
    assert "previous" not in json.loads((tmp_path / "index.faiss.json").read_text())


def _stop_after(calls):
    """The record's file and folder are synced; then comes Ctrl-C."""
    fsync, left = os.fsync, iter(range(calls))

    def stopping(descriptor):
        if next(left, None) is None:
            raise KeyboardInterrupt
        fsync(descriptor)

    return stopping


def trained(factory, metric=faiss.METRIC_L2):
    index = faiss.index_factory(n, factory, metric)
    if factory.startswith("OPQ"):
        opq = faiss.downcast_VectorTransform(index.chain.at(0))
        opq.niter, opq.pq = 2, faiss.ProductQuantizer(n, 4, 3)
    index.train(data().numpy())
    return index


@pytest.mark.parametrize(
    "factory", ["OPQ4,PQ4x4", "OPQ4,IVF8,PQ4x5", "PQ4x4", "OPQ4,PQ4x4fs", "RR16,PQ4x3"]
)
@pytest.mark.parametrize("metric", [faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT])
def test_an_index_of_faiss_comes_in_and_goes_out(factory, metric):
    x = data()
    index = trained(factory, metric)
    q = from_faiss(index)
    assert torch.linalg.slogdet(q.rotation).sign == 1
    back = to_faiss(q, kind="pq-fastscan" if factory.endswith("fs") else None)
    # The same codes, whatever the determinant was.
    agree = (index.sa_encode(x.numpy()) == back.sa_encode(x.numpy())).all(1)
    assert agree.mean() > 0.998
    decoded = torch.from_numpy(index.sa_decode(index.sa_encode(x.numpy())))
    rows = torch.isclose(decoded, q.decode(q.encode(x)), atol=1e-4).all(1)
    assert rows.float().mean() > 0.998


def test_opq_of_determinant_minus_one_is_among_them():
    index = trained("OPQ4,PQ4x4")
    A = faiss.vector_to_array(faiss.downcast_VectorTransform(index.chain.at(0)).A).reshape(n, n)
    linear = faiss.LinearTransform(n, n, False)
    for sign in (1, -1):
        # Its last row flipped, for the determinant it did not have.
        flipped = A * np.where(np.arange(n) < n - 1, 1, sign)[:, None]
        faiss.copy_array_to_vector(flipped.ravel().astype(np.float32), linear.A)
        linear.is_trained = True
        q = from_faiss(faiss.IndexPreTransform(linear, index.index))
        assert torch.linalg.slogdet(q.rotation).sign == 1


def test_files_of_vectors_stream_into_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr("givens.export.source.BUFFER", 16 * 700)
    x = (data() * 20 + 100).clamp(0, 255).to(torch.uint8)
    np.save(tmp_path / "x.npy", x.numpy())
    q = make("ivfpq")
    told = []
    streamed = to_faiss(q, read(tmp_path / "x.npy"), progress=told.append)
    assert told == 2 * [350, 350, 350, 350, 100]
    whole = to_faiss(q, x)
    for a, b in zip(streamed.search(data(9), 5), whole.search(data(9), 5), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "hnsw"}, "kind must be one of 'pq'"),
        ({"q": make("ivfpq"), "kind": "hnswpq"}, "needs a quantizer without coarse centroids"),
        ({"kind": "ivfpq"}, "kind 'ivfpq' needs a quantizer with coarse centroids"),
        ({"kind": "pq-fastscan"}, "needs 16 codewords, but got 256"),
        ({"vectors": data()[:, :5]}, r"shape \(N, 16\)"),
        ({"vectors": data() / 0}, "row 0"),
        ({"vectors": data(), "ids": np.arange(5)}, "ids must be 3000 integers"),
        ({"vectors": data(), "ids": np.arange(N) * 1.0}, "but got float64"),
        ({"vectors": data(), "ids": np.arange(N) - 1}, "must not be negative"),
        ({"vectors": data(), "ids": np.arange(N) // 2}, "ids must differ"),
        ({"ids": np.arange(5)}, "ids must come with vectors"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        to_faiss(**{"q": make(), **arguments})


@pytest.mark.parametrize(
    ("factory", "trained", "message"),
    [
        ("Flat", True, "must have a product quantizer, but got IndexFlat"),
        ("PCA8,PQ4", True, "rotations only"),
        ("PCA16,PQ4", True, "rotations only"),
        ("L2norm,PQ4", True, "must not normalise"),
        ("PQ2x10", True, "2 to 256 codewords"),
        ("IVF8,PQ4x4fs", True, "by_residual is off"),
        ("OPQ4,PQ4", False, "must be trained"),
    ],
)
def test_what_is_no_quantizer_is_refused(factory, trained, message):
    index = faiss.index_factory(n, factory)
    index.is_trained = trained
    with pytest.raises(ValueError, match=message):
        from_faiss(index)


def test_files_that_are_no_index_are_one_line(tmp_path):
    path = tmp_path / "index.faiss"
    with pytest.raises(FileNotFoundError, match="make one with `givens build`"):
        load_index(path)
    path.write_text("1,2,3\n" * 100)
    with pytest.raises(ValueError, match="is not a Faiss index") as caught:
        load_index(path)
    assert "\n" not in str(caught.value)
    (tmp_path / "index.faiss.json").write_text("[")
    with pytest.raises(ValueError, match="not the record of an index"):
        load_index(path)
    save_index(to_faiss(make()), path)
    assert load_index(path).record["vectors"] == 0
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        save_index(to_faiss(make()), tmp_path / "no" / "index.faiss")


def test_without_faiss_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.delitem(sys.modules, "givens.export.faiss")
    with pytest.raises(ImportError, match=r"pip install 'givens\[faiss\]'"):
        import givens.export.faiss  # noqa: F401


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_opq_by_faiss_is_its_own(metric, capfd):
    x = torch.randn(300, 8) * torch.linspace(2, 0.2, 8)
    q = fit_opq(x, 4, 16, metric=metric)
    assert q.metric == metric
    assert q.codebooks.shape == (4, 16, 2)
    # Far better than nothing, and without a word on stderr.
    seen = torch.nn.functional.normalize(x) if metric == "cosine" else x
    assert q.distortion(x) < 0.3 * float(seen.square().sum(1).mean())
    assert not capfd.readouterr().err
    with pytest.raises(ValueError, match="power of two"):
        fit_opq(x, 4, 15)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc on this system")
@pytest.mark.parametrize("metric", METRICS)
def test_mapped_lists_stay_on_the_disk(tmp_path, metric):
    q, x, path = make("ivfpq", metric), data(), tmp_path / "mapped.faiss"
    save_index(to_faiss(q, x), path, {})
    asked = data(20, seed=9).numpy()
    found = []
    for mapped in (False, True):
        index = load_index(path, mapped=mapped).index
        lists = faiss.downcast_InvertedLists(inverted(index).invlists)
        assert isinstance(lists, faiss.OnDiskInvertedLists) == mapped
        maps = Path("/proc/self/maps").read_text()
        assert (str(path) in maps) == mapped
        inverted(index).nprobe = 4
        found.append(index.search(asked, 10))
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a, b)
    # Part of it cannot be written: nothing is.
    before = from_faiss(index).fingerprint
    with pytest.raises(ValueError, match="index must have its lists in memory"):
        refresh(index, make("ivfpq", metric, L=12), 2 * x)
    assert from_faiss(index).fingerprint == before
