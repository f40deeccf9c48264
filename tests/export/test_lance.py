import ast
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_faiss import data, make

from givens.export.faiss import inverted, to_faiss
from givens.quantizer import Quantizer

lance = pytest.importorskip("lance")
pa = pytest.importorskip("pyarrow")
from givens.export.lance import query, to_lance  # noqa: E402

k = 10


def exact(x, queries, metric):
    if metric == "cosine":
        x, queries = (torch.nn.functional.normalize(t) for t in (x, queries))
    return torch.cdist(queries, x).topk(k, largest=False).indices.numpy()


def recall(found, truth):
    return np.mean([len(np.intersect1d(a, b)) / k for a, b in zip(found, truth, strict=True)])


@pytest.mark.parametrize(("metric", "K"), [("l2", 256), ("l2", 100), ("l2", 16), ("cosine", 256)])
@pytest.mark.parametrize("nprobes", [3, 12])
def test_it_finds_what_faiss_finds(tmp_path, metric, K, nprobes):
    q, x, queries = make("ivfpq", metric, K=K), data(), data(400, seed=5)
    uri = str(tmp_path / "items.lance")
    to_lance(q, x, uri)
    index = to_faiss(q, x)
    inverted(index).nprobe = nprobes
    truth = exact(x, queries, metric)
    answers = query(uri, q, queries, k, nprobes=nprobes)["id"].to_numpy().reshape(-1, k)
    theirs = index.search(queries.numpy(), k)[1]
    gain = recall(answers, truth) - recall(theirs, truth)
    assert gain > -0.005
    # By cosine Lance's L2 finds more than inner products with vectors whose norms are rounded.
    if metric == "l2":
        assert gain < 0.005
        assert recall(answers, theirs) > 0.98


def test_payload_ids_and_plain_lance(tmp_path, monkeypatch):
    monkeypatch.setattr("givens.export.source.BUFFER", 16 * 700)
    q, x = make("ivfpq"), data()
    uri, ids = str(tmp_path / "items.lance"), np.arange(len(x)) * 3 + 1
    payload = {"title": [f"item {row}" for row in ids], "price": np.linspace(0, 1, len(x))}
    to_lance(q, x, uri, payload=payload, ids=ids)
    rows = query(uri, q, x[:5], 2, nprobes=12, refine=10, columns=["title"])
    assert rows.column_names == ["query", "id", "title", "_distance"]
    assert rows["query"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert rows["title"].to_pylist()[::2] == [f"item {row}" for row in ids[:5]]
    assert max(rows["_distance"].to_pylist()[::2]) < 1e-6
    # Nothing of ours is needed to open, filter and search it, once a query is rotated.
    plain = lance.dataset(uri)
    # In a column and with a line that say so.
    told = plain.schema.metadata
    assert told[b"givens.fingerprint"].decode() == q.fingerprint
    line = eval(told[b"givens.query"], {"q": q, "x": x[7]})
    with pytest.raises(ValueError, match="vector"):
        plain.to_table(nearest={**line, "column": "vector"})
    nearest = {**line, "k": 3, "nprobes": 12}
    near = plain.to_table(nearest=nearest, filter="price < 0.5", prefilter=True)
    assert "item 22" in near["title"].to_pylist()
    assert plain.describe_indices()[0].index_type == "IVF_PQ"
    stored = np.stack(plain.to_table(columns=["rotated"])["rotated"].to_numpy())
    assert np.array_equal(stored, np.concatenate([q.rotate(p).numpy() for p in x.split(700)]))
    to_lance(q, x[:300], uri, mode="overwrite")
    assert lance.dataset(uri).count_rows() == 300


@pytest.mark.parametrize(
    ("quantizer", "arguments", "message"),
    [
        (("pq",), {}, "needs coarse centroids"),
        (("ivfpq", "ip"), {}, "metric must be 'l2' or 'cosine' for Lance, but got 'ip'"),
        (("ivfpq",), {"payload": {"rotated": range(3000)}}, "must not have a column 'rotated'"),
        (("ivfpq",), {"payload": {"query": range(3000)}}, "must not have a column 'query'"),
        (("ivfpq",), {"payload": {"_distance": range(3000)}}, "must not have a column '_distance'"),
        (("ivfpq",), {"payload": {"title": ["a"]}}, "payload must have 3000 rows"),
        (("ivfpq",), {"mode": "append"}, "mode must be one of 'create', 'overwrite', but got 'app"),
        (("ivfpq",), {"ids": [1, 1]}, "ids must be 3000 integers"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, quantizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        to_lance(make(*quantizer), data(), str(tmp_path / "items.lance"), **arguments)
    assert not list(tmp_path.iterdir())


def test_any_form_of_vectors_queries_and_payload(tmp_path):
    q, x, uri = make("ivfpq"), data(), tmp_path / "items.lance"
    np.save(tmp_path / "x.npy", x)
    frame = pytest.importorskip("pandas").DataFrame({"title": range(len(x))})
    assert to_lance(q, f"{tmp_path}/x.npy", f"{uri}", payload=frame).count_rows() == len(x)
    found = query(uri, q, x[:2].tolist(), k=3, columns=["title"])
    assert found.equals(query(f"{uri}", q, x[:2], k=3, columns=["title"]))
    with pytest.raises(ValueError, match="queries must have at least one vector"):
        query(uri, q, x[:0])


def test_a_bad_vector_is_named_in_one_line(tmp_path):
    x = data()
    x[2000] = torch.nan
    with pytest.raises(ValueError, match="row 2000 has NaN") as caught:
        to_lance(make("ivfpq"), x, str(tmp_path / "items.lance"))
    assert "\n" not in str(caught.value)


def test_a_query_by_another_quantizer_is_refused(tmp_path):
    q, x, uri = make("ivfpq"), data(), str(tmp_path / "items.lance")
    to_lance(q, x, uri)
    moved = Quantizer(q.rotation, q.codebooks + 1, q.coarse)
    with pytest.raises(ValueError, match=f"made with, {q.fingerprint}, but got"):
        query(uri, moved, x[:1])
    to_lance(moved, x, uri, mode="overwrite")
    assert len(query(uri, moved, x[:1], 3)) == 3


def test_without_faiss_it_is_written_and_searched(tmp_path):
    code = (
        "import sys; sys.modules['faiss'] = None\n"
        "import torch, givens; from givens.export.lance import query, to_lance\n"
        "x = torch.randn(600, 8); q = givens.fit(x, 2, codewords=16, coarse=4, max_iter=2)\n"
        "to_lance(q, x, sys.argv[1]); print(query(sys.argv[1], q, x[:2], 3)['id'].to_pylist())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "items.lance")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(ast.literal_eval(done.stdout)) == 6


def test_without_lance_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lance", None)
    monkeypatch.delitem(sys.modules, "givens.export.lance")
    with pytest.raises(ImportError, match=r"pip install 'givens\[lance\]'"):
        import givens.export.lance  # noqa: F401
