"""What values are taken, by every entry point alike, and what is said of those that are not."""

import math

import numpy as np
import pytest
import scipy.sparse
import torch

import givens
from givens import checks, search
from givens.export.faiss import fit_opq, from_faiss, to_faiss
from givens.export.source import FAR
from givens.fixed.fit import Progress
from givens.kmeans import kmeans
from givens.quantizer import Codes
from givens.retrieval.data import click_log

n, D, K = 16, 4, 16
X = torch.randn(200, n, generator=torch.Generator().manual_seed(0)) * torch.linspace(2, 0.3, n)
METRICS = ("l2", "ip", "cosine")


def quick(x=X, **options):
    how = {"codewords": K, "max_iter": 3, "init": "identity", **options}
    return givens.fit(x, D, **how)


QUANTIZERS = {metric: quick(metric=metric, coarse=4) for metric in METRICS}
PQ = quick()
LISTS = QUANTIZERS["l2"]


def layer(metric="l2"):
    made = givens.IndexLayer(n, D, K, 4, metric=metric)
    made.start_from(QUANTIZERS[metric])
    return made.eval()


ENTRIES = {
    "encode": lambda q, x: q.encode(x),
    "distortion": lambda q, x: q.distortion(x),
    "rotate": lambda q, x: q.rotate(x),
    "to_faiss": to_faiss,
    "fit": lambda q, x: quick(x, metric=q.metric, coarse=4),
    "layer": lambda q, x: layer(q.metric)(x),
    "warm_start": lambda q, x: layer(q.metric).warm_start(x, 2),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("metric", METRICS)
def test_lengths_are_refused_alike_everywhere(entry, metric):
    q, call = QUANTIZERS[metric], ENTRIES[entry]
    for length in (1e15, 1e20, 3e37):
        x = X.clone()
        x[7] *= length / x[7].norm()
        with pytest.raises(ValueError, match=r"1e\+14 to be compared in float32, but row 7 has"):
            call(q, x)
    x = X.clone()
    x[7] *= 1e13 / x[7].norm()
    call(q, x)
    for length in (1e-13, 1e-25, 1e-40):
        x = X.clone()
        x[7] = length / 4
        if metric == "cosine":
            with pytest.raises(ValueError, match=r"length 0 or 1e-12 to .* but row 7 has"):
                call(q, x)
        else:
            call(q, x)
    x[7] = 0
    call(q, x)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("power", [-35, -12, 0, 12, 40])
def test_what_is_taken_is_quantized_as_at_any_other_scale(metric, power):
    """Within the lengths a power of two changes no code, nor what the index has and Faiss says."""
    scaled, scale = X * 2.0**power, 1 if metric == "cosine" else 2.0**power
    p, q = quick(metric=metric, coarse=4), quick(scaled, metric=metric, coarse=4)
    torch.testing.assert_close(q.codebooks, p.codebooks * scale, rtol=1e-3, atol=1e-4 * scale)
    same = (q.encode(scaled).fine == p.encode(X).fine).all(1)
    assert same.float().mean() > 0.98
    assert q.distortion(scaled) == pytest.approx(p.distortion(X) * scale**2, rel=1e-3)
    assert q.distortion(scaled) > 0
    found = [to_faiss(one, x).search(x[:20].numpy(), 1)[1] for one, x in ((p, X), (q, scaled))]
    assert (found[0] == found[1]).mean() > 0.9


def test_vectors_too_short_to_be_told_apart_are_refused():
    for metric in ("l2", "ip"):
        with pytest.raises(ValueError, match=r"vector of length 1e-12 or more .* the longest has"):
            quick(X * 1e-15, metric=metric)
    assert quick(X * 0).distortion(X * 0) == 0


def test_codewords_that_fill_up_a_table_are_farther_than_what_is_taken():
    words = torch.full((2, 3, 2), 4 * checks.LONGEST)
    assert float(givens.Quantizer(torch.eye(4), words).codebooks.max()) < FAR / 2
    with pytest.raises(ValueError, match="codebooks must be no larger than 4e"):
        givens.Quantizer(torch.eye(4), 2 * words)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("metric", METRICS)
def test_autocast_changes_nothing(metric, dtype, backend):
    q, x = QUANTIZERS[metric], X
    table = X.view(len(X), D, -1)

    def everything():
        trained = givens.IndexLayer(n, D, K, 4, metric=metric)
        trained.warm_start(x, 3, method="gcd-greedy")
        fitted = [quick(metric=metric, coarse=4, method=m) for m in ("opq", "cayley", "gcd-greedy")]
        codes = q.encode(x)
        return [
            *(part for one in fitted for part in (one.rotation, one.codebooks, one.coarse)),
            trained.codebooks.detach(),
            trained.rotation.matrix.detach(),
            trained(x).embedding.detach(),
            trained.quantizer.decode(codes),
            codes.fine,
            codes.coarse,
            q.decode(codes),
            q.rotate(x),
            q.assign(q.rotate(x)),
            torch.tensor(q.distortion(x)),
            kmeans(table, K, iterations=2),
            torch.from_numpy(to_faiss(q, x).reconstruct_n(0, len(x))),
        ]

    plain = everything()
    with torch.autocast("cpu", dtype):
        cast = everything()
    for one, other in zip(plain, cast, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_any_library_are_taken():
    p = quick(max_iter=2, coarse=3, tol=0.0, seed=5)
    q = givens.fit(
        X,
        np.int64(D),
        codewords=torch.tensor(K),
        coarse=np.uint8(3),
        max_iter=np.int32(2),
        tol=np.float32(0),
        seed=np.uint64(5),
        init="identity",
    )
    assert torch.equal(p.codebooks, q.codebooks)
    assert torch.equal(givens.random_pairs(n, 3), givens.random_pairs(np.int64(n), np.uint64(3)))
    R = givens.random_rotation(n, 3)
    assert torch.equal(R, givens.random_rotation(np.int32(n), np.int64(3)))
    weights = []
    for lr, turns, seed in ((0.1, 4, 3), (np.float32(0.1), np.int64(4), np.uint8(3))):
        W = torch.nn.Parameter(R.clone())
        W.grad = X[:n].clone()
        givens.GCD([W], lr, turns=turns, pairing="random", seed=seed).step()
        weights.append(W.detach())
    torch.testing.assert_close(*weights)


def codes(fine, coarse=None):
    return Codes(torch.as_tensor(fine), None if coarse is None else torch.as_tensor(coarse))


FINE = torch.zeros(2, D, dtype=torch.uint8)
# Only the last code is wrong.
LATE = torch.tensor([[0] * D, [0] * (D - 1) + [16]])
FOUND = torch.zeros(200, 2, dtype=torch.int64)
NAN, INF, HUGE = math.nan, math.inf, 10**30
WHOLE = torch.ones(n, n, dtype=torch.int64)


PLANE, ANGLE = torch.tensor([[0, 1]]), torch.ones(1)


def turn(R=X[:n], pairs=PLANE, theta=ANGLE):
    return givens.rotate_pairs_(R, pairs, theta)


BAD = [
    (lambda: givens.fit([["a"] * n]), "x must hold real numbers, but got <U1"),
    (lambda: givens.fit([[0.0] * n, [0.0]]), "x must have vectors of one length, but row 0 has"),
    (lambda: givens.fit(None), "x must be a tensor, an array, lists of .* but got NoneType"),
    (lambda: givens.fit(X.to_sparse()), "x must be a tensor, an array .* but got Tensor"),
    (
        lambda: givens.fit(scipy.sparse.csr_matrix(X.numpy())),
        "x must be a tensor, an array, lists of .* but got scipy's csr_matrix",
    ),
    (
        lambda: givens.fit(np.ma.masked_less(X.numpy(), 0)),
        "but got MaskedArray",
    ),
    (lambda: givens.fit(X + 0j), "x must hold real numbers, but got torch.complex64"),
    (lambda: givens.fit(X > 0), "x must hold real numbers, but got torch.bool"),
    (lambda: givens.fit(X.numpy().astype(complex)), "x must hold real numbers, but got complex128"),
    (lambda: givens.fit(X.numpy().astype("S")), r"x must hold real numbers, but got \|S"),
    (lambda: givens.fit(X.numpy().astype("U")), "x must hold real numbers, but got <U"),
    (lambda: givens.fit(X.numpy().astype(object)), "x must hold real numbers, but got object"),
    (lambda: givens.fit(X.numpy().astype("M8[s]")), "x must hold real numbers, but got datetime64"),
    (lambda: givens.fit(X[None]), r"x must have shape \(N, n\), but got \(1, 200, 16\)"),
    (lambda: givens.fit(X[:, :0]), r"x must have shape \(N, n\), but got \(200, 0\)"),
    (lambda: quick(X.double() * 1e300), "x must be finite, but row 0 has NaN or infinite"),
    (lambda: givens.fit(X, 2.0), "subspaces must be an integer, but got subspaces=2.0"),
    (lambda: givens.fit(X, True), "subspaces must be an integer, but got subspaces=True"),
    (lambda: givens.fit(X, NAN), "subspaces must be an integer, but got subspaces=nan"),
    (lambda: givens.fit(X, "4"), "subspaces must be an integer, but got subspaces='4'"),
    (lambda: givens.fit(X, None), "subspaces must be an integer, but got subspaces=None"),
    (lambda: givens.fit(X, HUGE), r"subspaces must be in 1\.\.2147483647, but got subspaces=10000"),
    (
        lambda: quick(codewords=16.5),
        "codewords must be an integer, but got codewords=16.5",
    ),
    (
        lambda: quick(codewords=INF),
        "codewords must be an integer, but got codewords=inf",
    ),
    (
        lambda: quick(codewords=HUGE),
        r"codewords must be in 2\.\.256, but got codewords=10000",
    ),
    (
        lambda: quick(coarse=1.5),
        "coarse must be an integer, but got coarse=1.5",
    ),
    (
        lambda: quick(coarse=False),
        "coarse must be an integer, but got coarse=False",
    ),
    (lambda: quick(coarse=HUGE), r"coarse must be in 0\.\.2147483647"),
    (lambda: quick(seed=-1), "seed must be in 0..2⁶²−1, but got seed=-1"),
    (lambda: quick(seed=1 << 62), "seed must be in 0..2⁶²−1"),
    (lambda: quick(seed=0.5), "seed must be an integer, but got seed=0.5"),
    (lambda: quick(seed=True), "seed must be an integer, but got seed=True"),
    (lambda: quick(max_iter=2.5), "max_iter must be an integer, but got max_iter=2.5"),
    (lambda: quick(max_iter=NAN), "max_iter must be an integer, but got max_iter=nan"),
    (lambda: quick(max_iter=HUGE), r"max_iter must be in 1\.\.2147483647"),
    (lambda: quick(steps=INF), "steps must be an integer, but got steps=inf"),
    (lambda: quick(steps=True), "steps must be an integer, but got steps=True"),
    (lambda: quick(steps=HUGE), r"steps must be in 1\.\.2147483647"),
    (lambda: quick(sample=-5), "sample must be at least 0, but got sample=-5"),
    (lambda: quick(sample=100.0), "sample must be an integer, but got sample=100.0"),
    (lambda: quick(tol=NAN), "tol must be finite, at least -1 and at most 1, but got"),
    (lambda: quick(tol=INF), "tol must be finite, at least -1 and at most 1, but got"),
    (lambda: quick(tol=2), "tol must be finite, at least -1 and at most 1, but got"),
    (lambda: quick(tol="1"), "tol must be a number, but got tol='1'"),
    (lambda: quick(tol=True), "tol must be a number, but got tol=True"),
    (lambda: quick(rate=NAN), "rate must be finite, above 0, but got rate=nan"),
    (lambda: quick(rate=INF), "rate must be finite, above 0, but got rate=inf"),
    (lambda: quick(rate=0), "rate must be finite, above 0, but got rate=0"),
    (lambda: quick(rate=True), "rate must be a number, but got rate=True"),
    (lambda: quick(rate=10**400), "rate must be finite, above 0, but got rate=1000"),
    (lambda: quick(method=None), "method must be one of .* but got None"),
    (lambda: quick(metric=["l2"]), r"metric must be one of .* but got \['l2'\]"),
    (lambda: quick(init=None), "init must be one of .* but got None"),
    (lambda: quick(init=np.eye(n)), "init must be one of 'auto', .* a rotation or a Quantizer"),
    (lambda: quick(init=torch.eye(n) + 0j), r"init must be floats of shape \(16, 16\), but got"),
    (lambda: quick(init=torch.eye(n) * NAN), "init must be orthogonal"),
    (lambda: quick(resume="half"), "resume must be a Progress, but got str"),
    (
        lambda: quick(resume=Progress(1, 3, 9, 1.0, torch.eye(4), torch.ones(2, 3, 2))),
        "resume must have rotation and codebooks of shapes",
    ),
    (lambda: PQ.encode([0.0] * n), r"x must have shape \(N, 16\), but got \(16,\)"),
    (lambda: PQ.encode([["a"] * n]), "x must hold real numbers, but got <U1"),
    (lambda: PQ.encode(X + 0j), "x must hold real numbers, but got torch.complex64"),
    (lambda: PQ.encode(X.numpy().astype("S")), "x must hold real numbers"),
    (lambda: PQ.encode(X[0]), r"x must have shape \(N, 16\), but got \(16,\)"),
    (lambda: PQ.encode(X / 0), "x must be finite, but row 0 has NaN or infinite values"),
    (lambda: PQ.encode(X * 1e20), r"x must be no longer than 1e\+14 to be compared in float32"),
    (lambda: PQ.distortion("x"), "x must end in one of .npy"),
    (lambda: PQ.distortion(7), "x must be a tensor, an array, lists of .* but got int"),
    (lambda: PQ.distortion(X.numpy().astype(complex)), "x must hold real numbers"),
    (lambda: PQ.distortion(X[:, :5]), r"x must have shape \(N, 16\), but got \(200, 5\)"),
    (lambda: PQ.rotate(X[0]), r"x must have shape \(N, 16\), but got \(16,\)"),
    (lambda: PQ.rotate(X > 0), "x must hold real numbers, but got torch.bool"),
    (lambda: PQ.decode(X), "codes must be Codes, as encode gives, but got Tensor"),
    (lambda: PQ.decode(codes(FINE.float())), "codes must be integers, but got torch.float32"),
    (lambda: PQ.decode(codes(FINE > 0)), "codes must be integers, but got torch.bool"),
    (lambda: PQ.decode(codes(FINE.long() - 1)), r"codes must be in 0\.\.15, but got -1 to -1"),
    (lambda: PQ.decode(codes(FINE + 16)), r"codes must be in 0\.\.15, but got 16 to 16"),
    (lambda: PQ.decode(codes(FINE[0])), r"codes must have shape \(N, 4\) and no coarse, but got"),
    (lambda: PQ.decode(codes(FINE[None])), r"codes must have shape \(N, 4\) and no coarse"),
    (lambda: PQ.decode(codes(FINE, [0, 0])), r"codes must have shape \(N, 4\) and no coarse"),
    (lambda: LISTS.decode(codes(FINE)), r"codes must have shape \(N, 4\) and coarse=4, but got"),
    (lambda: LISTS.decode(codes(FINE, [0, -1])), r"coarse codes must be in 0\.\.3, but got -1 to"),
    (lambda: LISTS.decode(codes(FINE, [0, 4])), r"coarse codes must be in 0\.\.3, but got 0 to 4"),
    (
        lambda: LISTS.decode(codes(FINE, [0.0, 1])),
        "coarse codes must be integers, but got torch",
    ),
    (
        lambda: LISTS.decode(codes(FINE, [0])),
        r"coarse codes must have shape \(2,\), but got",
    ),
    (
        lambda: PQ.decode(codes((FINE + 16).to(torch.uint16))),
        r"codes must be in 0\.\.15, but got 16",
    ),
    (lambda: PQ.decode(Codes(FINE.numpy())), "codes must be a dense tensor, but got ndarray"),
    (
        lambda: LISTS.decode(Codes(FINE, [0, 0])),
        "coarse codes must be a dense tensor, but got list",
    ),
    (lambda: PQ.to(torch.float64), "device must be a device or its name, but got torch.float64"),
    (lambda: givens.Quantizer(np.eye(n), PQ.codebooks), "rotation must be a dense tensor, but got"),
    (
        lambda: givens.Quantizer(PQ.rotation, PQ.codebooks.numpy()),
        "codebooks must be a dense tensor, but got ndarray",
    ),
    (
        lambda: givens.Quantizer(PQ.rotation, PQ.codebooks, [[0.0] * n]),
        "coarse must be a dense tensor, but got list",
    ),
    (lambda: to_faiss(PQ, {0: X}), "vectors must be a tensor, an array, lists of .* but got dict"),
    (lambda: to_faiss(PQ, X + 0j), "vectors must hold real numbers, but got torch.complex64"),
    (lambda: to_faiss(PQ, X.numpy().astype("S")), "vectors must hold real numbers"),
    (lambda: to_faiss(PQ, X[:, 1:]), r"vectors must have shape \(N, 16\), but got \(200, 15\)"),
    (lambda: to_faiss(PQ, X * 1e20), r"vectors must be no longer than 1e\+14"),
    (lambda: to_faiss(PQ, X, ids=[0.5] * 200), "ids must be 200 integers, one for each vector"),
    (lambda: to_faiss(PQ, X, ids=[-1, *range(199)]), "ids must not be negative, but got -1"),
    (lambda: to_faiss(PQ, X, ids=[0] * 200), "ids must differ, but some come more than once"),
    (
        lambda: to_faiss(PQ, codes(FINE), kind="hnswpq"),
        "codes must go into an index of kind 'pq' or 'ivfpq', without ids or refine",
    ),
    (lambda: to_faiss(PQ, codes(FINE), refine=True), "codes must go into an index of kind 'pq'"),
    (lambda: to_faiss(PQ, codes(FINE), ids=[1, 2]), "codes must go into an index of kind 'pq'"),
    (lambda: to_faiss(PQ, codes(LATE)), r"codes must be in 0\.\.15, but got 0 to 16"),
    (lambda: to_faiss(LISTS, codes(FINE, [0, 4])), r"coarse codes must be in 0\.\.3, but got 0"),
    (lambda: from_faiss(None), "index must be a Faiss index, but got NoneType"),
    (lambda: from_faiss("index.faiss"), "index must be a Faiss index, but got str"),
    (lambda: to_faiss(PQ, ids=[0]), "ids must come with vectors, but got no vectors"),
    (lambda: to_faiss(PQ, kind="hnsw"), "kind must be one of 'pq', 'ivfpq'"),
    (lambda: to_faiss(PQ, kind="ivfpq"), "kind 'ivfpq' needs a quantizer with coarse centroids"),
    (lambda: fit_opq(X, D, 20), "codewords must be a power of two for Faiss, but got 20"),
    (lambda: fit_opq(X * 1e20, D, K), r"vectors must be no longer than 1e\+14"),
    (lambda: givens.IndexLayer(16.0), "dim must be an integer, but got dim=16.0"),
    (lambda: givens.IndexLayer(NAN), "dim must be an integer, but got dim=nan"),
    (lambda: givens.IndexLayer(0), "dim must be at least 1, but got dim=0"),
    (lambda: givens.IndexLayer(HUGE), r"dim must be in 1\.\.2147483647"),
    (lambda: givens.IndexLayer(n, True), "subspaces must be an integer, but got subspaces=True"),
    (lambda: givens.IndexLayer(n, D, 16.0), "codewords must be an integer, but got codewords=16.0"),
    (lambda: givens.IndexLayer(n, D, K, 2.5), "coarse must be an integer, but got coarse=2.5"),
    (lambda: givens.IndexLayer(n, D, decay=NAN), "decay must be finite, at least 0, but got"),
    (
        lambda: givens.IndexLayer(n, D, decay=-0.1),
        "decay must be finite, at least 0, but got",
    ),
    (lambda: givens.IndexLayer(n, D, decay="1"), "decay must be a number, but got decay='1'"),
    (lambda: layer()(X.numpy()), "x must be a dense tensor, but got ndarray"),
    (lambda: layer()(X.to_sparse()), "x must be a dense tensor, but got a torch.sparse_coo"),
    (lambda: layer().warm_start(X.tolist()), "sample must be a dense tensor, but got list"),
    (lambda: layer().revive(None), "sample must be a dense tensor, but got NoneType"),
    (lambda: layer().start_from("q.safetensors"), "q must be a Quantizer, but got str"),
    (lambda: givens.ground_truth(X, X, 2.5), "k must be an integer, but got k=2.5"),
    (lambda: givens.ground_truth(X, X, True), "k must be an integer, but got k=True"),
    (lambda: givens.ground_truth(X, X, 201), r"k must be in 1\.\.200, the number of vectors"),
    (lambda: givens.recall(FOUND, FOUND, 0.5), "k must be an integer, but got k=0.5"),
    (lambda: givens.recall([[1], [1, 2]], FOUND), "found must be ids of shape .*, but its rows"),
    (lambda: search.rerank(FOUND, X, X, 1, "dot"), "metric must be one of 'l2', 'ip', 'cosine'"),
    (lambda: search.rerank(FOUND, X, X, -1), r"k must be in 1\.\.2, the columns of candidates"),
    (lambda: search.rerank(FOUND, X, X[:9], 1), "candidates must have a row for each of the 9"),
    (lambda: search.rerank(FOUND, X[:, 1:], X, 1), r"queries must have shape \(N, 15\), but got"),
    (lambda: search.rerank(FOUND, X / 0, X, 1), "x must be finite, but row 0 has NaN or infinite"),
    (lambda: search.rerank(FOUND, X, X / 0, 1), "queries must be finite, but row 0 has NaN or inf"),
    (lambda: search.rerank(FOUND, X, X, 1, ids=[]), "ids must be 200 integers, one for each vec"),
    (lambda: givens.Rotation(2.5), "dim must be an integer, but got dim=2.5"),
    (lambda: givens.Rotation(True), "dim must be an integer, but got dim=True"),
    (lambda: givens.Rotation(n, np.eye(n)), "matrix must be a dense tensor, but got ndarray"),
    (lambda: givens.random_rotation(0), "dim must be at least 1, but got dim=0"),
    (lambda: givens.random_rotation(n, 0.5), "seed must be an integer, but got seed=0.5"),
    (lambda: givens.random_rotation(n, -1), "seed must be in 0..2⁶²−1, but got seed=-1"),
    (lambda: givens.random_pairs(2.5), "n must be an integer, but got n=2.5"),
    (lambda: givens.random_pairs(n, 0.5), "seed must be an integer, but got seed=0.5"),
    (lambda: givens.greedy_pairs(np.eye(n)), "A must be a dense tensor, but got ndarray"),
    (lambda: givens.greedy_pairs(WHOLE), "A must hold floating-point numbers, but got torch.int64"),
    (lambda: givens.steepest_pairs(WHOLE > 0), "A must hold floating-point numbers, but got"),
    (lambda: givens.project(np.eye(n)), "R must be a dense tensor, but got ndarray"),
    (lambda: givens.project(WHOLE), "R must hold floating-point numbers, but got torch.int64"),
    (lambda: givens.project(WHOLE[:0, :0].float()), r"R must hold .* of shape \(0, 0\)"),
    (lambda: givens.orthogonality_error([[1.0]]), "R must be a dense tensor, but got list"),
    (lambda: givens.skew_gradient(X[:n], X[:n].numpy()), "G must be a dense tensor, but got"),
    (lambda: turn(pairs=[[0, 1]]), "pairs must be a dense tensor, but got list"),
    (lambda: turn(theta=0.1), "theta must be a dense tensor, but got float"),
    (lambda: turn(pairs=torch.tensor([[0.0, 1.0]])), "R must hold floats and pairs integers, but"),
    (lambda: turn(R=WHOLE, theta=torch.tensor([1])), "R must hold floats and pairs integers, but"),
    (lambda: turn(theta=torch.tensor([NAN])), "theta must be finite, but has NaN or infinite ang"),
    (lambda: layer()(X * 1e20), r"x must be no longer than 1e\+14 to be compared in float32"),
    (lambda: layer("cosine")(X * 1e-20), r"x must have length 0 or 1e-12 to 1e\+14"),
    (lambda: layer().warm_start(X, 0), "iterations must be at least 1, but got iterations=0"),
    (lambda: layer().warm_start(X, 2.5), "iterations must be an integer, but got iterations=2.5"),
    (lambda: layer().warm_start(X * 1e20), r"sample must be no longer than 1e\+14"),
    (lambda: layer().warm_start(X, seed=-1), "seed must be in 0..2⁶²−1, but got seed=-1"),
    (lambda: layer().revive(X, seed=0.5), "seed must be an integer, but got seed=0.5"),
    (lambda: layer().start_from(None), "q must be a Quantizer on the first rank, but got None"),
    (lambda: kmeans(X[:, None], 0), "codewords must be at least 1, but got codewords=0"),
    (lambda: kmeans(X[:, None], 300), r"codewords must be in 1..N, but got codewords=300 for N=20"),
    (lambda: kmeans(X[:, None], 2.5), "codewords must be an integer, but got codewords=2.5"),
    (lambda: kmeans(X[:, None], 4, iterations=-1), "iterations must be at least 0, but got iter"),
    (lambda: kmeans(X[:, None], 4, seed=NAN), "seed must be an integer, but got seed=nan"),
    (lambda: kmeans(X[:, None], 4, start="zero"), "start must be one of 'sampled', 'plus-plus'"),
    (lambda: click_log(5), "users must be at least 10, but got users=5"),
    (lambda: click_log(50.5), "users must be an integer, but got users=50.5"),
    (lambda: click_log(50, 100, NAN), "clicks must be an integer, but got clicks=nan"),
    (lambda: click_log(50, 100, 100), "clicks must be at least 10 for each user"),
    (lambda: click_log(drift=NAN), "drift must be finite, at least 0, but got drift=nan"),
    (lambda: click_log(words=-1), "words must be at least 0, but got words=-1"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=[f"{i}" for i in range(len(BAD))])
@pytest.mark.usefixtures("unchecked")
def test_bad_input(call, message):
    with pytest.raises((TypeError, ValueError), match=message) as told:
        call()
    assert "\n" not in str(told.value)
