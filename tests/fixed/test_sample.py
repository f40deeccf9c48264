import numpy as np
import pytest
import torch

from givens.fixed.sample import Sample


def sample(x, **seen):
    return Sample(x, torch.device("cpu"), **seen)


def whole(data):
    return torch.cat(list(data.chunks()))


@pytest.fixture
def x():
    return torch.randn(500, 6)


def test_drawn_rows_are_of_the_data_and_none_twice(x):
    drawn = sample(x).draw(100, 3)
    places = (whole(drawn)[:, None] == x).all(2).nonzero()[:, 1]
    assert len(places.unique()) == 100
    assert torch.equal(places, places.sort().values)
    assert torch.equal(whole(drawn), whole(sample(x).draw(100, 3)))
    assert not torch.equal(whole(drawn), whole(sample(x).draw(100, 4)))
    assert torch.equal(whole(sample(x).draw(9999, 0)), x)


def test_a_mapped_file_is_read_as_the_array(x, tmp_path):
    numbers = (x * 20).to(torch.uint8).numpy()
    np.save(tmp_path / "x.npy", numbers)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert torch.equal(whole(sample(mapped)), torch.from_numpy(numbers).float())
    assert torch.equal(whole(sample(mapped).draw(50, 0)), whole(sample(numbers).draw(50, 0)))


def test_seen_normalised_and_less_the_nearest_centroid(x):
    centroids = x[:7].contiguous()
    unit = torch.nn.functional.normalize(x)
    torch.testing.assert_close(whole(sample(x).transform(normalise=True)), unit)
    nearest = centroids[torch.cdist(x, centroids).argmin(1)]
    torch.testing.assert_close(whole(sample(x).transform(centroids=centroids)), x - nearest)
    # The centroids themselves leave nothing.
    assert float(whole(sample(x).transform(centroids=centroids))[:7].abs().max()) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_row_that_is_not_finite_is_named(x, bad):
    x[321, 2] = bad
    with pytest.raises(ValueError, match="row 321 has NaN or infinite values"):
        sample(x).check("l2")
    drawn = sample(x).draw(499, 1)
    assert 321 in drawn.index
    with pytest.raises(ValueError, match="row 321"):
        drawn.check("l2")
