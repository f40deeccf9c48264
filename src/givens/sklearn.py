"""A product quantizer as a scikit-learn estimator, for pipelines and grid searches."""

from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from givens.fixed.fit import SAMPLE, Method, Progress, fit
from givens.quantizer import Codes, Metric, Quantizer

try:
    from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import Tags, check_random_state
    from sklearn.utils.validation import check_array, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("givens.sklearn needs scikit-learn: pip install 'givens[sklearn]'") from error

Array = npt.NDArray[Any]


class ProductQuantizer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Learn a rotation and codebooks with `givens.fit`; transform vectors to codes.

    A code is a row of `subspaces` integers; with coarse centroids the number of the list comes
    first. Arrays and memory-mapped files are not copied unless scikit-learn has to convert them.

    Attributes:
        quantizer_: the `givens.Quantizer`.
        n_iter_: the number of passes over the vectors.
        n_features_in_: the dimension of the vectors.
        feature_names_in_: names of the columns, if all are strings.
    """

    def __init__(
        self,
        subspaces: int = 8,
        codewords: int = 256,
        *,
        coarse: int = 0,
        method: Method = "gcd-greedy",
        metric: Metric = "l2",
        max_iter: int | None = None,
        sample: int | None = SAMPLE,
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        """Store the options; `fit` checks them.

        Args:
            subspaces: the bytes of a code; must divide the number of features.
            codewords: for each subspace, 2 to 256.
            coarse: number of coarse centroids of an inverted file; 0 for none.
            method: how the rotation is learned, as in `givens.fit`; "pq" for none.
            metric: "l2", "ip" or "cosine"; the latter normalises vectors.
            max_iter: maximum number of passes over the vectors.
            sample: number of vectors to learn from; 0 for all.
            random_state: an integer is used as the seed of `givens.fit`.
        """
        self.subspaces = subspaces
        self.codewords = codewords
        self.coarse = coarse
        self.method = method
        self.metric = metric
        self.max_iter = max_iter
        self.sample = sample
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> "ProductQuantizer":
        """Learn the quantizer of vectors (N, n); y is ignored."""
        for name in ("subspaces", "codewords", "coarse"):
            if not isinstance(value := getattr(self, name), Integral):
                raise TypeError(f"{name} must be an integer, but got {value!r}")
        least = max(self.codewords, self.coarse, 1)
        X = validate_data(self, X, dtype="numeric", ensure_min_samples=least)
        self.n_iter_ = 0
        self.quantizer_: Quantizer = fit(
            X,
            self.subspaces,
            codewords=self.codewords,
            coarse=self.coarse,
            method=self.method,
            metric=self.metric,
            max_iter=self.max_iter,
            sample=self.sample,
            seed=self._seed(),
            callback=self._count,
        )
        return self

    def _count(self, _: Progress) -> None:
        self.n_iter_ += 1

    def transform(self, X: Any) -> Array:
        """Codes (N, D), uint8; with coarse centroids (N, 1 + D), int64, the list's number first."""
        codes = self._quantizer().encode(validate_data(self, X, dtype="numeric", reset=False))
        if codes.coarse is None:
            return codes.fine.numpy()
        return torch.cat([codes.coarse[:, None], codes.fine], dim=1).numpy()

    def inverse_transform(self, X: Any) -> Array:
        """The vectors (N, n) that codes decode to, float32."""
        q = self._quantizer()
        codes = check_array(X, dtype="numeric")
        if codes.shape[1] != self._n_features_out:
            raise ValueError(
                f"X must have the {self._n_features_out} columns that transform gives, "
                f"but got {codes.shape[1]}"
            )
        lists = 0 if q.coarse is None else len(q.coarse)
        limits = np.array([lists] * (lists > 0) + [q.codewords] * q.subspaces)
        wrong = (codes != np.floor(codes)) | (codes < 0) | (codes >= limits)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise ValueError(
                f"X must be codes, integers from 0 to {limits[column] - 1} in column {column}, "
                f"but got {codes[row, column]} in row {row}"
            )
        whole = torch.from_numpy(codes.astype(np.int64))
        fine = whole[:, lists > 0 :].to(torch.uint8)
        decoded: Array = q.decode(Codes(fine, whole[:, 0] if lists else None)).numpy()
        return decoded

    def score(self, X: Any, y: Any = None) -> float:
        """The negative distortion (mean squared error): higher is better. y is ignored."""
        return -self._quantizer().distortion(validate_data(self, X, dtype="numeric", reset=False))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        # Codes are integers for vectors of any type.
        tags.transformer_tags.preserves_dtype = []
        return tags

    @property
    def _n_features_out(self) -> int:
        return self.quantizer_.subspaces + (self.quantizer_.coarse is not None)

    def _quantizer(self) -> Quantizer:
        check_is_fitted(self)
        return self.quantizer_

    def _seed(self) -> int:
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
