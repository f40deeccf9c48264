import pickle
import subprocess
import sys

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import givens
from givens.sklearn import ProductQuantizer

X = np.random.default_rng(0).standard_normal((300, 12)).astype(np.float32)
X *= np.linspace(2, 0.2, 12, dtype=np.float32)


# Sizes that any of the checks' data allow.
@parametrize_with_checks(
    [
        ProductQuantizer(subspaces=1, codewords=2),
        ProductQuantizer(subspaces=1, codewords=2, coarse=2, method="pq", max_iter=2),
    ]
)
def test_scikit_learn_takes_it_for_one_of_its_own(estimator, check):
    check(estimator)


@pytest.mark.parametrize("coarse", [0, 5])
@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_it_is_fit_encode_decode_and_distortion(coarse, metric):
    options = {"codewords": 16, "coarse": coarse, "metric": metric}
    estimator = ProductQuantizer(4, random_state=3, **options).fit(X)
    q = givens.fit(X, 4, seed=3, **options)
    assert estimator.quantizer_.fingerprint == q.fingerprint
    codes, expected = estimator.transform(X), q.encode(X)
    assert np.array_equal(codes[:, -4:], expected.fine)
    assert codes.shape == (300, 4 + (coarse > 0))
    assert codes.dtype == (np.int64 if coarse else np.uint8)
    if coarse:
        assert np.array_equal(codes[:, 0], expected.coarse)
    assert np.array_equal(estimator.inverse_transform(codes), q.decode(expected))
    assert estimator.score(X) == -q.distortion(X)


def test_in_a_pipeline_a_grid_finds_the_longest_code():
    pipeline = make_pipeline(StandardScaler(), ProductQuantizer(codewords=8, max_iter=3))
    grid = {"productquantizer__subspaces": [1, 2, 6]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(X)
    assert search.best_params_ == {"productquantizer__subspaces": 6}
    scores = search.cv_results_["mean_test_score"]
    assert (np.diff(scores) > 0).all()
    # The codes are features: a model stands behind them as behind any transformer.
    labels = make_pipeline(ProductQuantizer(3, 8), KMeans(2, n_init=1, random_state=0)).fit_predict(
        X
    )
    assert set(labels) == {0, 1}


def test_pandas_comes_in_and_goes_out():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=[f"x{i}" for i in range(12)], index=range(7, 307))
    estimator = ProductQuantizer(4, 16, coarse=3).set_output(transform="pandas").fit(frame)
    codes = estimator.transform(frame)
    names = [f"productquantizer{i}" for i in range(5)]
    assert list(codes.columns) == list(estimator.get_feature_names_out()) == names
    assert list(codes.index) == list(range(7, 307))
    assert list(estimator.feature_names_in_) == list(frame.columns)
    back = estimator.inverse_transform(codes)
    assert np.array_equal(back, clone(estimator).fit(X).inverse_transform(codes.to_numpy()))


def test_clones_are_empty_and_pickles_are_whole():
    estimator = ProductQuantizer(3, 8, method="opq", random_state=np.random.RandomState(1)).fit(X)
    assert not hasattr(clone(estimator), "quantizer_")
    read = pickle.loads(pickle.dumps(estimator))
    assert read.quantizer_.fingerprint == estimator.quantizer_.fingerprint
    assert np.array_equal(read.transform(X), estimator.transform(X))


def test_a_memory_mapped_file_of_bytes_is_not_converted(tmp_path):
    np.save(tmp_path / "x.npy", (X * 20 + 128).clip(0, 255).astype(np.uint8))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    estimator = ProductQuantizer(4, 16).fit(mapped)
    assert estimator.quantizer_.fingerprint == givens.fit(mapped, 4, codewords=16).fingerprint


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"subspaces": 5}, ValueError, "dim must be divisible by subspaces"),
        ({"subspaces": 2.0}, TypeError, "subspaces must be an integer, but got 2.0"),
        ({"codewords": 1}, ValueError, r"codewords must be in 2\.\.256"),
        ({"codewords": 257}, ValueError, r"codewords must be in 2\.\.256"),
        ({"codewords": 16, "coarse": 301}, ValueError, "minimum of 301 is required"),
        ({"codewords": 16, "method": "pca"}, ValueError, "method must be one of"),
        ({"codewords": 16, "random_state": "0"}, ValueError, "cannot be used to seed"),
    ],
)
def test_what_cannot_be_fitted_is_refused_by_fit(options, error, message, unchecked):
    estimator = ProductQuantizer(**{"subspaces": 4, **options})
    with pytest.raises(error, match=message):
        estimator.fit(X)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.zeros((2, 3), int), "the 5 columns that transform gives, but got 3"),
        (np.full((2, 5), 16), "from 0 to 2 in column 0, but got 16 in row 0"),
        ([[0, 0, 0, 0, 16]], "from 0 to 15 in column 4, but got 16"),
        ([[0, 0, 0, 0, 0], [0, 0, -1, 0, 0]], "but got -1 in row 1"),
        ([[0, 0, 0.5, 0, 0]], "but got 0.5"),
    ],
)
def test_what_is_no_code_is_refused(codes, message):
    with pytest.raises(ValueError, match=message):
        ProductQuantizer(4, 16, coarse=3).fit(X).inverse_transform(codes)


def test_without_scikit_learn_it_says_what_to_install():
    code = "import sys; sys.modules['sklearn'] = None\nimport givens\nimport givens.sklearn"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "pip install 'givens[sklearn]'" in run.stderr
