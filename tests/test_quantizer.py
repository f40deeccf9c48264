import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import givens
from givens import quantizer
from givens.quantizer import Codes, Quantizer

METRICS = ["l2", "ip", "cosine"]


def make(n=12, D=3, K=7, L=0, metric="l2", seed=0):
    generator = torch.Generator().manual_seed(seed)
    codebooks = torch.randn(D, K, n // D, generator=generator)
    coarse = torch.randn(L, n, generator=generator) if L else None
    return Quantizer(givens.random_rotation(n, seed), codebooks, coarse, metric)


def brute(q, x):
    """Codes one vector and one subspace at a time, in float64."""
    fine, coarse = [], []
    for row in x.double():
        if q.metric == "cosine":
            row = row / row.norm()
        y = row @ q.rotation.double()
        if q.coarse is not None:
            C = q.coarse.double()
            far = (y - C).norm(dim=1) if q.metric == "l2" else -C @ y
            coarse.append(int(far.argmin()))
            y = y - C[coarse[-1]]
        parts = zip(y.reshape(q.subspaces, -1), q.codebooks.double(), strict=True)
        fine.append([int((part - words).norm(dim=1).argmin()) for part, words in parts])
    return torch.tensor(fine), torch.tensor(coarse)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("L", [0, 5])
def test_codes_and_distortion_are_the_brute_force_ones(metric, L):
    q = make(L=L, metric=metric)
    x = torch.randn(200, 12)
    codes = q.encode(x)
    fine, coarse = brute(q, x)
    assert codes.fine.dtype == torch.uint8
    assert torch.equal(codes.fine.long(), fine)
    assert codes.coarse is None if L == 0 else torch.equal(codes.coarse, coarse)
    target = torch.nn.functional.normalize(x) if metric == "cosine" else x
    error = (target - q.decode(codes)).double().square().sum(1).mean()
    assert q.distortion(x) == pytest.approx(float(error), rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 256), st.integers(0, 5))
def test_what_was_decoded_is_encoded_without_loss(D, w, K, seed):
    q = make(D * w, D, K, seed=seed)
    assert q.distortion(q.decode(q.encode(torch.randn(20, D * w)))) < 1e-5


def test_any_kind_of_vectors_streams_to_the_same_codes(tmp_path, monkeypatch):
    q = make(L=3)
    x = np.random.default_rng(0).integers(0, 9, (100, 12)).astype(np.uint8)
    np.save(tmp_path / "x.npy", x)
    want = q.encode(torch.from_numpy(x).float())
    monkeypatch.setattr(quantizer, "BUFFER", 80)
    for same in (x, torch.from_numpy(x), np.load(tmp_path / "x.npy", mmap_mode="r"), x.astype("d")):
        codes = q.encode(same)
        assert torch.equal(codes.fine, want.fine)
        assert torch.equal(codes.coarse, want.coarse)
        assert q.distortion(same) == pytest.approx(q.distortion(torch.from_numpy(x).float()))
    assert len(q.encode(x[:0])) == 0


@pytest.mark.parametrize("L", [0, 4])
@pytest.mark.parametrize("metric", METRICS)
def test_saved_and_loaded_it_is_the_same(tmp_path, L, metric):
    q = make(L=L, metric=metric)
    q.save(tmp_path / "q.safetensors")
    loaded = givens.load(tmp_path / "q.safetensors")
    assert loaded.metric == metric
    assert torch.equal(loaded.rotation, q.rotation)
    assert torch.equal(loaded.codebooks, q.codebooks)
    assert loaded.coarse is None if L == 0 else torch.equal(loaded.coarse, q.coarse)
    assert loaded.fingerprint == q.fingerprint == q.to("cpu").fingerprint
    assert repr(loaded) == repr(q)


def test_fingerprints_differ_where_anything_does():
    parts = [make(), make(seed=1), make(L=3), make(L=3, seed=1), make(metric="ip"), make(D=2)]
    changed = make()
    changed.codebooks[0, 0, 0] += 1
    assert len({q.fingerprint for q in (*parts, changed)}) == 7


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
@pytest.mark.parametrize("metric", METRICS)
def test_on_a_gpu_it_is_the_same(tmp_path, metric):
    q = make(64, 8, 256, 20, metric)
    x = torch.randn(5000, 64)
    there = q.to("cuda")
    codes = there.encode(x.numpy())
    assert codes.fine.is_cuda
    want = q.encode(x)
    # Two codewords may be equally near within rounding.
    assert (codes.fine.cpu() == want.fine).float().mean() > 0.999
    assert (codes.coarse.cpu() == want.coarse).float().mean() > 0.999
    assert there.distortion(x.cuda()) == pytest.approx(q.distortion(x), rel=1e-4)
    assert there.decode(want).is_cuda
    there.save(tmp_path / "q.safetensors")
    assert givens.load(tmp_path / "q.safetensors").fingerprint == q.fingerprint


EYE = torch.eye(4)
BOOKS = torch.randn(2, 3, 2)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(4, 4), BOOKS), "rotation must be orthogonal"),
        ((torch.diag(torch.tensor([1.0, 1, 1, -1])), BOOKS), "determinant \\+1"),
        ((EYE[:3], BOOKS), "rotation must have shape"),
        ((EYE.long(), BOOKS), "rotation must be a floating-point tensor"),
        ((EYE, BOOKS[0]), "codebooks must be a floating-point tensor of 3 axes"),
        ((EYE, torch.randn(3, 3, 2)), "D·w = 4"),
        ((EYE, torch.randn(2, 1, 2)), "2 to 256 codewords"),
        ((EYE, torch.randn(2, 257, 2)), "2 to 256 codewords"),
        ((EYE, BOOKS * torch.nan), "codebooks must be finite"),
        ((EYE, BOOKS, torch.randn(3, 5)), "coarse must have shape"),
        ((EYE, BOOKS, None, "dot"), "metric must be one of 'l2', 'ip', 'cosine', but got 'dot'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Quantizer(*arguments)


@pytest.mark.usefixtures("unchecked")
def test_bad_vectors_and_codes_are_refused():
    q = make()
    x = torch.randn(10, 12)
    x[7, 3] = torch.inf
    with pytest.raises(ValueError, match="row 7"):
        q.encode(x)
    with pytest.raises(ValueError, match=r"shape \(N, 12\)"):
        q.encode(x[:, :5])
    with pytest.raises(ValueError, match="at least one"):
        q.distortion(x[:0])
    with pytest.raises(ValueError, match=r"codes must be in 0\.\.6, but got 7 to 7"):
        q.decode(Codes(torch.full((2, 3), 7, dtype=torch.uint8)))
    with pytest.raises(ValueError, match=r"shape \(N, 3\)"):
        q.decode(Codes(torch.zeros(2, 4, dtype=torch.uint8)))
    with pytest.raises(ValueError, match="coarse"):
        make(L=2).decode(Codes(torch.zeros(2, 3, dtype=torch.uint8)))


def test_a_file_that_is_no_quantizer_is_refused(tmp_path):
    path = tmp_path / "q.safetensors"
    parts = {"rotation": EYE, "codebooks": BOOKS}
    for tensors, message in [
        ({"rotation": EYE}, "it has no 'codebooks'"),
        ({**parts, "more": EYE}, "unknown part 'more'"),
        ({**parts, "rotation": EYE * 2}, "must be orthogonal"),
    ]:
        givens.storage.files.save(path, "quantizer", tensors, {"metric": "l2"})
        with pytest.raises(ValueError, match=message) as caught:
            givens.load(path)
        assert str(caught.value).startswith(str(path))
    givens.storage.files.save(path, "checkpoint", parts, {})
    with pytest.raises(ValueError, match="holds a 'checkpoint', not a 'quantizer'"):
        givens.load(path)


def test_a_saved_quantizer_is_loaded_by_its_class(tmp_path):
    q = make(L=3)
    q.save(tmp_path / "q.safetensors")
    loaded = Quantizer.load(tmp_path / "q.safetensors")
    assert isinstance(loaded, Quantizer)
    assert loaded.fingerprint == givens.load(tmp_path / "q.safetensors").fingerprint
    assert loaded.fingerprint == q.fingerprint
    assert loaded.device == torch.device("cpu")


def test_a_quantizer_moves_with_all_its_parts():
    q = make(L=3)
    moved = q.to("cpu")
    assert moved is not q
    assert moved.fingerprint == q.fingerprint
    assert {part.device for part in (moved.rotation, moved.codebooks, moved.coarse)} == {q.device}
