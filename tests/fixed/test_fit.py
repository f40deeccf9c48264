import dataclasses
import itertools

import numpy as np
import pytest
import torch

import givens
from givens.fixed.fit import METHODS, Progress, eigen_allocation, fit
from givens.fixed.sample import Sample
from givens.storage import formats

N, n, D, K = 3000, 16, 4, 16


def data(N=N, seed=0):
    """Correlated vectors, which a rotation helps."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(N, n, generator=generator) * torch.linspace(4, 0.2, n)
    return X @ givens.random_rotation(n, 5) + 3


def quick(x, **options):
    return fit(x, D, codewords=K, **{"max_iter": 9, **options})


def same(p, q):
    return all(
        torch.equal(a, b) for a, b in zip(p._tensors().values(), q._tensors().values(), strict=True)
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_a_rotation_and_is_not_above_plain_pq(method):
    X = data()
    q, plain = quick(X, method=method), quick(X, method="pq")
    assert q.codebooks.shape == (D, K, n // D)
    assert givens.orthogonality_error(q.rotation) < 1e-5
    assert float(torch.linalg.det(q.rotation)) == pytest.approx(1, abs=1e-4)
    assert q.distortion(X) <= plain.distortion(X) * (1 + 1e-6)
    assert (q.distortion(X) < 0.9 * plain.distortion(X)) == (method != "pq")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_data_of_any_scale_are_fitted_alike(method, scale):
    X = data(500)
    p, q = quick(X, method=method), quick(scale * X, method=method)
    assert torch.equal(p.rotation, q.rotation)
    assert torch.equal(scale * p.codebooks, q.codebooks)


@pytest.mark.parametrize("method", METHODS)
def test_no_default_of_torch_matters(method):
    X = data(500)
    q = quick(X, method=method, coarse=3, metric="cosine")
    torch.set_default_dtype(torch.float64)
    try:
        assert same(q, quick(X, method=method, coarse=3, metric="cosine"))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert same(q, quick(X, method=method, coarse=3, metric="cosine"))


def test_where_nothing_can_be_gained_plain_pq_is_what_comes_back():
    # One clear direction for each axis: any rotation can only mix them.
    X = torch.randint(0, 2, (1000, 4), generator=torch.Generator().manual_seed(0)) * 100.0
    q = fit(X, 4, codewords=2)
    assert q.distortion(X) <= fit(X, 4, codewords=2, method="pq").distortion(X) + 1e-6


def test_at_least_as_good_as_svd_and_better_than_pq_on_new_vectors():
    X, new = data(), data(seed=1)
    error = {
        m: quick(X, method=m, max_iter=20).distortion(new) for m in ("gcd-greedy", "opq", "pq")
    }
    assert error["gcd-greedy"] < 1.02 * error["opq"] < 1.02 * error["pq"]


def test_distortion_falls_in_every_pass(backend):
    told = []
    quick(data(), init="identity", grow=False, tol=-1.0, callback=told.append)
    errors = [p.distortion for p in told]
    assert len(errors) == 9
    assert all(after < before for before, after in itertools.pairwise(errors[1:]))


def test_the_same_seed_gives_the_same_quantizer():
    X = data()
    assert same(quick(X, seed=1, coarse=4), quick(X, seed=1, coarse=4))
    assert not same(quick(X, seed=1), quick(X, seed=2))


@pytest.mark.parametrize(
    "options", [{}, {"coarse": 5}, {"method": "gcd-random"}, {"init": "identity"}]
)
@pytest.mark.parametrize("stopped", [1, 5])
def test_a_resumed_run_ends_as_if_it_had_not_stopped(tmp_path, options, stopped):
    X = data(6000)
    options = {"max_iter": 18, **options}
    whole = fit(X, D, codewords=K, **options)
    passes = []

    def interrupt(progress):
        passes.append(progress)
        if len(passes) == stopped:
            progress.save(tmp_path / "half.safetensors")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(X, D, codewords=K, callback=interrupt, **options)
    resumed = fit(X, D, codewords=K, resume=Progress.load(tmp_path / "half.safetensors"), **options)
    assert same(resumed, whole)


def test_progress_survives_its_file(tmp_path):
    told = []
    quick(data(), callback=told.append)
    told[0].save(tmp_path / "p.safetensors")
    loaded = Progress.load(tmp_path / "p.safetensors")
    for field in dataclasses.fields(Progress):
        before, after = getattr(told[0], field.name), getattr(loaded, field.name)
        assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after


def test_a_warm_start_is_ahead_of_a_cold_one():
    old, drifted = data(), data(seed=1) + 0.1
    before = quick(old)
    first = {}
    for name, init in (("warm", before), ("cold", "identity")):
        told = []
        q = quick(drifted, init=init, callback=told.append)
        first[name] = told[0].distortion, q.distortion(drifted)
    assert first["warm"][0] < first["cold"][0]
    assert first["warm"][1] < before.distortion(drifted)


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_coarse_centroids_leave_residuals(metric):
    X = data()
    flat, coarse = quick(X, metric=metric), quick(X, metric=metric, coarse=20)
    assert coarse.coarse.shape == (20, n)
    assert coarse.distortion(X) < flat.distortion(X)
    assert len(coarse.encode(X).coarse.unique()) > 10


def test_a_file_is_never_read_whole(monkeypatch):
    class Reader(formats.File):
        def __init__(self, x):
            self.x, self.shape, self.dtype, self.most = x, x.shape, x.dtype, 0

        def __getitem__(self, rows):
            part = self.x[rows]
            self.most = max(self.most, len(part))
            return part

    monkeypatch.setattr("givens.fixed.sample.SLICE", 100 * 8)
    x = np.random.default_rng(0).standard_normal((1000, 8)).astype(np.float32)
    for init in ("identity", "eigen", "auto"):
        file = Reader(x)
        q = givens.fit(file, 2, codewords=16, sample=None, grow=False, init=init, max_iter=3)
        assert file.most == 100
        again = givens.fit(x, 2, codewords=16, sample=None, grow=False, init=init, max_iter=3)
        assert q.distortion(x) == pytest.approx(again.distortion(x), rel=1e-5)


def test_streaming_gives_what_memory_gives(tmp_path):
    X = data().numpy()
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    held = quick(torch.from_numpy(X), coarse=4)
    assert same(quick(mapped, coarse=4), held)
    assert same(quick(mapped, coarse=4, sample=0), held)


def test_bytes_are_read_as_numbers():
    X = (data() * 8 + 120).clamp(0, 255).to(torch.uint8)
    assert same(quick(X.numpy()), quick(X.float()))


def test_a_sample_is_drawn_by_the_seed():
    X = data(5000)
    a, b, c = (quick(X, sample=500, seed=s) for s in (0, 0, 1))
    assert same(a, b)
    assert not same(a, c)
    assert a.distortion(X) < 1.5 * quick(X).distortion(X)


def test_the_sample_grows():
    told = []
    fit(data(20_000), D, codewords=K, tol=-1.0, max_iter=12, callback=told.append)
    assert [p.vectors for p in told][-1] == 20_000
    assert {p.vectors for p in told} == {1250, 5000, 20_000}
    assert told[-1].iteration == told[-1].iterations == 12


def test_eigenvalues_are_dealt_evenly():
    X = torch.randn(20_000, 8) * torch.tensor([8.0, 4, 2, 1, 8, 4, 2, 1])
    W = eigen_allocation(Sample(X, torch.device("cpu")), 2)
    variances = (X @ W.T).var(0).view(2, 4).log().sum(1)
    assert float((variances[0] - variances[1]).abs()) < 0.2
    assert float(torch.linalg.det(W)) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    "X",
    [
        torch.zeros(40, n),
        torch.full((40, n), 7.0),
        torch.eye(n)[torch.arange(400) % 5],
        torch.randn(K, n, generator=torch.Generator().manual_seed(0)),
    ],
)
@pytest.mark.parametrize("method", ["pq", "opq", "cayley", "gcd-greedy", "overlapping-greedy"])
def test_constant_and_duplicate_vectors(X, method):
    q = quick(X, method=method)
    assert q.distortion(X) < 1e-5
    assert quick(X, method=method, metric="cosine", coarse=2).codebooks.isfinite().all()


def broken(value):
    X = data()
    X[17, 3] = value
    return X


BAD = [
    (
        data(10),
        {},
        "x must have at least as many vectors as codewords, but got 10 for codewords=16",
    ),
    (data(30), {"coarse": 31}, "at least as many vectors as coarse, but got 30 for coarse=31"),
    (data(), {"sample": 8}, "but got 8 for codewords=16"),
    (broken(float("nan")), {}, "x must be finite, but row 17 has NaN or infinite values"),
    (broken(float("inf")), {"sample": 2999}, "x must be finite, but row 17 has NaN"),
    (data(), {"subspaces": 5}, "dim must be divisible by subspaces, but got dim=16, subspaces=5"),
    (data(), {"subspaces": 0}, "subspaces must be at least 1, but got subspaces=0"),
    (data(), {"subspaces": 5}, "subspaces=5; its divisors are 1, 2, 4, 8, 16$"),
    (data()[0], {}, r"x must have shape \(N, n\), but got \(16,\)"),
    (data(), {"codewords": 257}, "codewords must be in 2..256, but got codewords=257"),
    (data(), {"codewords": 1}, "codewords must be in 2..256"),
    (data(), {"coarse": -1}, "coarse must be at least 0, but got coarse=-1"),
    (data(), {"method": "gcd"}, "method must be one of 'pq', 'opq', .*, but got 'gcd'"),
    (data(), {"metric": "dot"}, "metric must be one of 'l2', 'ip', 'cosine', but got 'dot'"),
    (data(), {"init": "zero"}, "init must be one of 'auto', .* a rotation or a Quantizer"),
    (
        data(),
        {"init": torch.eye(3)},
        r"init must be floats of shape \(16, 16\), but got .*\(3, 3\)",
    ),
    (data(), {"init": 2 * torch.eye(n)}, "init must be orthogonal"),
    (
        data(),
        {"init": -torch.eye(n).index_fill(0, torch.tensor(0), 0) + torch.eye(n)[0].diag()},
        "determinant",
    ),
    (data(), {"max_iter": 0}, "max_iter must be at least 1"),
    (data(), {"steps": 0}, "steps must be at least 1"),
    (data(), {"rate": -1.0}, "rate must be finite, above 0, but got rate=-1.0"),
    (data(), {"rate": 1.0, "method": "opq"}, "rate goes with cayley, gcd and overlapping methods"),
    (data(), {"steps": 4, "method": "opq"}, "steps goes with cayley, .* got steps=4 for method='o"),
    (data(), {"steps": 4, "method": "pq"}, "steps goes with cayley, gcd and overlapping methods"),
]


@pytest.mark.parametrize(("x", "options", "message"), BAD)
def test_bad_input(unchecked, x, options, message):
    with pytest.raises(ValueError, match=message):
        fit(x, **{"subspaces": D, "codewords": K, **options})


def test_a_quantizer_of_another_shape_is_no_start():
    with pytest.raises(ValueError, match=r"init must have codebooks of shape \(4, 8, 4\)"):
        fit(data(), D, codewords=8, init=quick(data()))


def test_plain_pq_in_a_given_frame():
    """R stays as it was given, and the codebooks are of the vectors that it turns."""
    x, R = torch.randn(600, 8) * torch.linspace(3, 0.2, 8), givens.random_rotation(8, 5)
    q = givens.fit(x, 2, codewords=16, method="pq", init=R)
    assert torch.equal(q.rotation, R)
    turned = givens.fit(x @ R, 2, codewords=16, method="pq", init="identity")
    assert q.distortion(x) == pytest.approx(turned.distortion(x @ R), rel=1e-3)


def test_old_calls_work_and_name_the_new_one():
    """Codewords by position, iterations and tolerance."""
    x = data()
    new = fit(x, D, codewords=8, coarse=2, max_iter=2, tol=0.5)
    with pytest.warns(DeprecationWarning, match="call fit with codewords=8, coarse=2, max_iter=2:"):
        old = fit(x, D, 8, 2, iterations=2, tol=0.5)
    with pytest.warns(DeprecationWarning, match="call fit with tol=0.5: the earlier"):
        again = fit(x, D, codewords=8, coarse=2, max_iter=2, tolerance=0.5)
    assert old.fingerprint == again.fingerprint == new.fingerprint
    refused = pytest.raises(TypeError, match="positional argument")
    with pytest.warns(DeprecationWarning, match="codewords=8, coarse=2"), refused:
        fit(x, D, 8, 2, "opq")


def test_all_vectors_are_looked_at():
    x = data()
    whole = quick(x, sample=len(x))
    assert same(quick(x, sample=0), whole)
    assert same(quick(x, sample=None), whole)
    assert not same(quick(x, sample=500), whole)
