import faiss
import numpy as np
import pytest
import torch

import givens
from givens.export.faiss import from_faiss, inverted, to_faiss
from givens.export.refresh import read_codes, refresh
from givens.quantizer import Quantizer

N, n = 600, 16
NAMES = np.arange(N) * 7 % 6007  # in no order


def make(L, metric, K=16):
    x = torch.randn(N, n) * torch.linspace(2, 0.3, n)
    return givens.fit(
        x, 4, codewords=K, coarse=L, metric=metric, max_iter=3, method="opq", init="identity"
    ), x


def trained_on(q, x, by=0.02):
    """What a few more steps make of a quantizer and of some of its vectors."""
    R = q.rotation.clone()
    pairs = givens.random_pairs(n, 1)
    givens.rotate_pairs_(R, pairs, torch.full((len(pairs),), by))
    coarse = None if q.coarse is None else q.coarse * (1 + by)
    codebooks = q.codebooks + by * torch.randn_like(q.codebooks)
    return Quantizer(R, codebooks, coarse, q.metric), x + by * torch.randn_like(x)


def answers(index, queries):
    """The score of every item, in the order of their ids: equal ones may come in any order."""
    if inverted(index) is not None:
        inverted(index).nprobe = inverted(index).nlist
    scores, ids = index.search(queries.numpy(), N)
    order = ids.argsort(1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)


def assert_same_answers(index, anew, queries):
    for mine, wanted in zip(answers(index, queries), answers(anew, queries), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
@pytest.mark.parametrize(("L", "K"), [(0, 16), (5, 16), (0, 100), (5, 7)])
def test_it_is_as_if_built_anew_and_few_codes_were_written(L, K, metric):
    q, x = make(L, metric, K)
    index = to_faiss(q, x, ids=NAMES)
    after, moved = trained_on(q, x)
    order = torch.randperm(N)
    written = refresh(index, after, moved[order], ids=NAMES[order])
    before, now = q.encode(x), after.encode(moved)
    changed = (before.fine != now.fine).any(1)
    if L:
        changed |= before.coarse != now.coarse
    assert set(written) == set(NAMES[changed.numpy()])
    assert 0 < len(written) < N
    assert from_faiss(index).fingerprint == after.fingerprint
    assert index.ntotal == N
    assert_same_answers(index, to_faiss(after, moved, ids=NAMES), torch.randn(20, n))
    # And it still is an index: items come and go.
    assert index.remove_ids(NAMES[:50]) == 50
    index.add_with_ids(moved[:50].numpy(), NAMES[:50])
    assert_same_answers(index, to_faiss(after, moved, ids=NAMES), torch.randn(20, n))


def test_positions_are_ids_where_none_were_given():
    q, x = make(0, "l2")
    index = to_faiss(q, x)
    after, moved = trained_on(q, x)
    refresh(index, after, moved)
    assert_same_answers(index, to_faiss(after, moved), torch.randn(20, n))


@pytest.mark.parametrize("L", [0, 5])
def test_with_the_same_quantizer_some_items_will_do(L):
    q, x = make(L, "l2")
    index = to_faiss(q, x, ids=NAMES)
    some = torch.randperm(N)[:40]
    x[some] = torch.randn(40, n)
    assert set(refresh(index, q, x[some], ids=NAMES[some])) <= set(NAMES[some])
    assert len(refresh(index, q, x, ids=NAMES)) == 0
    assert_same_answers(index, to_faiss(q, x, ids=NAMES), torch.randn(20, n))


def wrong(what):
    """(quantizer, vectors, ids, message) of a mistake."""
    q, x = make(5, "l2")
    after, _ = trained_on(q, x)
    spoilt = x.clone()
    spoilt[3, 3] = torch.nan
    return (
        q,
        x,
        *{
            "some": (after, x[:9], NAMES[:9], "vectors must have all items .* got 9 for 600"),
            "unknown": (q, x[:2], [NAMES[0], 6007], "but 6007 is not; add new items by"),
            "twice": (q, x[:2], NAMES[[4, 4]], "ids must be 2 different integers"),
            "length": (q, x, NAMES[:5], r"ids must be 600 .* shape \(5,\)"),
            "NaN": (after, spoilt, NAMES, "row 3 has NaN"),
            "sizes": (make(4, "l2")[0], x, NAMES, "q must be like the index's quantizer"),
            "metric": (make(5, "ip")[0], x, NAMES, "metric='l2'.* but got .*metric='ip'"),
        }[what],
    )


def test_vectors_in_a_file_and_none_at_all(tmp_path):
    q, x = make(5, "l2")
    index = to_faiss(q, x, ids=NAMES)
    np.save(tmp_path / "x.npy", x + 1)
    changed = refresh(index, q, f"{tmp_path}/x.npy", ids=NAMES)
    assert len(changed)
    assert_same_answers(index, to_faiss(q, x + 1, ids=NAMES), torch.randn(20, n))
    assert len(refresh(index, q, x[:0], ids=[])) == 0
    assert to_faiss(q, x[:0], ids=[]).ntotal == 0


@pytest.mark.parametrize("what", ["some", "unknown", "twice", "length", "NaN", "sizes", "metric"])
def test_mistakes_are_refused_and_change_nothing(what):
    q, x, *arguments, message = wrong(what)
    index = to_faiss(q, x, ids=NAMES)
    queries = torch.randn(20, n)
    before = answers(index, queries)
    with pytest.raises(ValueError, match=message):
        refresh(index, arguments[0], arguments[1], ids=arguments[2])
    assert all(np.array_equal(a, b) for a, b in zip(before, answers(index, queries), strict=True))


def test_other_kinds_are_refused():
    q, x = make(0, "l2")
    with pytest.raises(ValueError, match="'pq' or 'ivfpq', but got IndexPQFastScan"):
        refresh(to_faiss(q, x, kind="pq-fastscan"), q, x)
    q, x = make(5, "l2")
    index = to_faiss(q, x)
    inverted(index).make_direct_map()
    with pytest.raises(ValueError, match="no direct map"):
        refresh(index, q, x)
    plain = faiss.IndexPQ(n, 4, 4)
    plain.train(x.numpy())
    with pytest.raises(ValueError, match="must be from to_faiss, but has 0 transforms"):
        refresh(plain, from_faiss(plain), x)


@pytest.mark.parametrize("codewords", [16, 256])
@pytest.mark.parametrize("coarse", [0, 4])
def test_codes_go_into_an_index_and_come_out_as_they_are(codewords, coarse):
    """Codes that are not those of the nearest codewords."""
    x = torch.randn(600, 16, generator=torch.Generator().manual_seed(0))
    q = givens.fit(x, 4, codewords=codewords, coarse=coarse, max_iter=1, metric="cosine")
    draws = torch.Generator().manual_seed(1)
    fine = torch.randint(codewords, (600, 4), generator=draws, dtype=torch.uint8)
    lists = torch.randint(4, (600,), generator=draws) if coarse else None
    codes = givens.quantizer.Codes(fine, lists)
    index = to_faiss(q, codes)
    assert torch.equal(torch.from_numpy(read_codes(index)), fine)
    held = torch.from_numpy(index.reconstruct_n(0, 600)) if not coarse else None
    if held is not None:
        torch.testing.assert_close(held, q.decode(codes), atol=1e-5, rtol=0)
    # What the index answers are inner products with what the codes stand for.
    users = torch.nn.functional.normalize(x[:5])
    if coarse:
        inverted(index).nprobe = 4
    scores, _ = index.search(users.numpy(), 10)
    exact = (users @ q.decode(codes).T).topk(10).values
    torch.testing.assert_close(torch.from_numpy(scores), exact, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="codes must go into an index of kind 'pq' or 'ivfpq'"):
        to_faiss(q, codes, ids=range(600))
