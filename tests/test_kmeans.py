import itertools

import numpy as np
import pytest
import torch

from givens.kmeans import kmeans, nearest, pass_over, quantize, update_centroids


def clustered(N, D, w, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centres = 5 * torch.randn(12, D, w, generator=generator)
    drawn = torch.randint(12, (N,), generator=generator)
    return centres[drawn] + torch.randn(N, D, w, generator=generator)


def distances(X, C):
    """All of them, in float64: (N, D, K)."""
    return (X.double()[:, :, None] - C.double()[None]).square().sum(-1)


def distortion(X, C):
    return float(distances(X, C).amin(-1).sum() / len(X))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (257, 3, 4), (1000, 2, 7), (513, 1, 33)])
@pytest.mark.parametrize("K", [1, 2, 17, 256])
def test_nearest_is_the_brute_force_argmin(backend, shape, K):
    X = clustered(*shape)
    C = torch.randn(shape[1], K, shape[2]) * 5
    all_of_them = distances(X, C)
    codes = nearest(X, C)
    found = all_of_them.gather(2, codes.long()[..., None])[..., 0]
    least = all_of_them.amin(-1)
    assert codes.dtype == torch.uint8
    assert bool((found <= least * (1 + 1e-5) + 1e-6).all())
    assert torch.equal(nearest(X.flatten(1), C), codes)


def test_far_from_the_origin_nothing_is_lost(backend):
    X = clustered(500, 2, 8) / 5 + 300
    C = clustered(64, 2, 8, seed=1).transpose(0, 1) / 5 + 300
    all_of_them = distances(X, C)
    found = all_of_them.gather(2, nearest(X, C).long()[..., None])[..., 0]
    assert bool((found <= all_of_them.amin(-1) * (1 + 1e-4)).all())


def test_ties_go_to_the_lowest_index(backend):
    C = torch.zeros(2, 9, 4)
    C[:, 0] = 1
    assert nearest(torch.zeros(300, 2, 4), C).unique().tolist() == [1]


def test_more_codewords_than_a_byte_holds(backend):
    X = torch.arange(1000.0).view(-1, 1, 1)
    assert torch.equal(nearest(X, X.transpose(0, 1)), torch.arange(1000)[:, None])


def test_codes_are_those_of_faiss(backend):
    faiss = pytest.importorskip("faiss")
    X, C = clustered(2000, 4, 8), clustered(256, 4, 8, seed=1).transpose(0, 1).contiguous()
    pq = faiss.ProductQuantizer(32, 4, 8)
    faiss.copy_array_to_vector(C.numpy().ravel(), pq.centroids)
    theirs = torch.from_numpy(pq.compute_codes(X.flatten(1).numpy()))
    ours = nearest(X, C)
    near = distances(X, C).gather(2, torch.stack([ours, theirs], -1).long())
    tied = (near[..., 0] - near[..., 1]).abs() <= 1e-5 * near.amax(-1)
    assert bool(((ours == theirs) | tied).all())


@pytest.mark.parametrize("start", ["sampled", "plus-plus"])
def test_every_pass_lowers_the_distortion(backend, start):
    X = clustered(3000, 2, 6)
    errors = [distortion(X, kmeans(X, 16, iterations=i, start=start)) for i in range(7)]
    assert all(after <= before * (1 + 1e-6) for before, after in itertools.pairwise(errors))
    assert errors[-1] < errors[0]


def test_a_pass_is_one_of_lloyd(backend):
    X = clustered(700, 3, 5)
    C = kmeans(X, 8, iterations=0)
    moved = kmeans(X, 8, iterations=1, start=C)
    codes = distances(X, C).argmin(-1)
    for d in range(3):
        means = [X[codes[:, d] == k, d].mean(0) for k in range(8)]
        torch.testing.assert_close(moved[d], torch.stack(means), rtol=1e-5, atol=1e-5)


def test_whole_sums_hold_the_sub_vectors(backend):
    X = clustered(500, 4, 3)
    C = kmeans(X, 8, iterations=1)
    whole, parts = (pass_over([X.flatten(1)], C, whole=w) for w in (True, False))
    own = torch.stack([whole.sums[d][:, 3 * d : 3 * d + 3] for d in range(4)])
    torch.testing.assert_close(own, parts.sums, rtol=1e-5, atol=1e-4)
    assert float(whole.error) == pytest.approx(distortion(X, C), rel=1e-5)


def test_empty_codewords_come_back_to_life(backend):
    X = clustered(2000, 2, 4)
    lost = torch.full((2, 16, 4), 1e4)
    lost[:, 0] = 0
    C = kmeans(X, 16, iterations=12, start=lost)
    codes = nearest(X, C)
    assert all(len(codes[:, d].unique()) == 16 for d in range(2))
    assert distortion(X, C) < 1.5 * distortion(X, kmeans(X, 16, iterations=12))


@pytest.mark.parametrize(
    "X", [torch.zeros(40, 2, 3), torch.ones(40, 2, 3), torch.eye(4).repeat(10, 1)[:, None]]
)
def test_fewer_different_vectors_than_codewords(backend, X):
    C = kmeans(X, 16, iterations=10)
    assert bool(C.isfinite().all())
    assert distortion(X, C) < 1e-6


def test_plus_plus_starts_nearer():
    X = clustered(4000, 2, 8)
    sampled, far = (
        np.mean([distortion(X, kmeans(X, 12, iterations=0, start=s, seed=i)) for i in range(5)])
        for s in ("sampled", "plus-plus")
    )
    assert far < sampled


def test_a_mapped_file_gives_what_memory_gives(backend, tmp_path, monkeypatch):
    X = clustered(3000, 2, 6)
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    held = kmeans(X, 32, iterations=4, seed=3)
    torch.testing.assert_close(kmeans(mapped, 32, iterations=4, seed=3), held, rtol=0, atol=0)
    monkeypatch.setattr("givens.kmeans.SLICE", 1 << 10)
    torch.testing.assert_close(kmeans(mapped, 32, iterations=4, seed=3), held, rtol=1e-4, atol=1e-4)


def test_the_number_of_threads_changes_nothing():
    X = clustered(9000, 4, 8)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = kmeans(X, 64, iterations=3)
        torch.set_num_threads(3)
        three = kmeans(X, 64, iterations=3)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, three)


def test_seeds_differ_and_repeat():
    X = clustered(1000, 2, 4)
    a, b, c = (kmeans(X, 16, iterations=2, seed=s) for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_updated_keeps_what_has_nobody_to_share_with():
    X = torch.arange(4.0).view(4, 1, 1)
    C = torch.tensor([[[0.0], [1], [2], [3], [99]]])
    assert torch.equal(update_centroids(C, pass_over([X.flatten(1)], C), 0), C)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codewords": 11}, "codewords must be in 1..N, but got codewords=11 for N=10"),
        ({"codewords": 0}, "codewords must be at least 1, but got codewords=0"),
        ({"codewords": 2, "start": "farthest"}, "start must be one of 'sampled', 'plus-plus'"),
        ({"codewords": 2, "start": torch.zeros(1, 2, 3)}, r"start must have shape \(2, 2, 3\)"),
    ],
)
def test_bad_arguments(unchecked, arguments, message):
    with pytest.raises(ValueError, match=message):
        kmeans(torch.zeros(10, 2, 3), **arguments)


def test_shapes_that_do_not_go_together(unchecked):
    with pytest.raises(ValueError, match=r"Y must have shape \(N, 6\) or \(N, 2, 3\)"):
        nearest(torch.zeros(4, 5), torch.zeros(2, 8, 3))


def test_a_codeword_too_far_to_measure_leaves_the_others_alone():
    """Its distance overflows, in the sum of the first coordinates already."""
    C = torch.randn(1, 6, 12, generator=torch.Generator().manual_seed(0))
    C[0, :2] = 1e20
    assert nearest(C[0, 2:].clone(), C)[:, 0].tolist() == [2, 3, 4, 5]


def test_quantizing_is_the_nearest_codeword_and_what_follows(backend):
    N, D, K, w = 50, 3, 7, 4
    Y, C, usage = torch.randn(N, D * w), torch.randn(D, K, w), torch.ones(D, K)
    Y[5, 3] = torch.nan
    codes, at, words, errors, distortion = quantize(Y, C, usage, 0.5)
    assert torch.equal(codes, nearest(Y, C))
    assert torch.equal(at.view(N, D), codes.long() + K * torch.arange(D))
    expected = C[torch.arange(D), codes.long()].flatten(1).where(Y.isfinite(), torch.nan)
    assert torch.equal(words.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(errors.nan_to_num(7), (Y - expected).nan_to_num(7))
    assert int(words.isnan().sum()) == 1
    counts = torch.nn.functional.one_hot(codes.long(), K).sum(0)
    assert torch.equal(usage, 1 + 0.5 * counts)
    assert distortion.isnan()
    *_, errors, distortion = quantize(Y[6:], C)
    torch.testing.assert_close(distortion, errors.square().sum(1).mean())
