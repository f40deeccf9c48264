import array
import decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse
import torch

import givens
from givens.export.faiss import to_faiss
from givens.storage.given import as_vectors

ROWS = np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32)
LISTS = ROWS.tolist()


def fixed(rows=ROWS):
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])


FORMS = {
    "lists": LISTS,
    "tuples": tuple(map(tuple, LISTS)),
    "list of arrays": list(ROWS),
    "list of tensors": list(torch.from_numpy(ROWS)),
    "list of array.array": [array.array("f", row) for row in LISTS],
    "arrow list": pa.array(LISTS, pa.list_(pa.float32())),
    "arrow large list": pa.array(LISTS, pa.large_list(pa.float64())),
    "arrow fixed": fixed(),
    "arrow slice": fixed(np.concatenate([ROWS[:3], ROWS]))[3:],
    "arrow chunks": pa.chunked_array([fixed(ROWS[:7]), fixed(ROWS[7:])]),
    "arrow half": pa.array(LISTS, pa.list_(pa.float16())),
    "arrow tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(ROWS),
    "arrow table": pa.table({"id": range(40), "vector": fixed()}),
    "arrow batch": pa.record_batch({"id": list(range(40)), "vector": fixed()}),
    "pandas frame": pd.DataFrame(ROWS, columns=list("abcdef")),
    "pandas nullable": pd.DataFrame(ROWS).astype("Float32"),
    "pandas arrow numbers": pd.DataFrame(ROWS).astype("float[pyarrow]"),
    "pandas column": pd.Series(list(ROWS)),
    "pandas lists": pd.Series(LISTS, index=range(5, 45)),
    "pandas one column": pd.DataFrame({"vector": LISTS}),
    "pandas arrow": pd.Series(fixed(), dtype=pd.ArrowDtype(pa.list_(pa.float32(), 6))),
    "polars frame": pl.DataFrame(ROWS, schema=list("abcdef")),
    "polars array": pl.Series(ROWS),
    "polars lists": pl.Series(LISTS),
    "polars one column": pl.DataFrame({"vector": LISTS}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_vectors(form):
    given = as_vectors(FORMS[form])
    assert tuple(given.shape) == (40, 6)
    loose = 1e-3 if "half" in form else 0
    assert np.allclose(np.asarray(given[:]), ROWS, rtol=loose, atol=loose)


@pytest.mark.parametrize("form", ["lists", "arrow chunks", "pandas column", "polars lists"])
def test_they_are_fitted_encoded_and_indexed(form):
    x = FORMS[form]
    q = givens.fit(x, 3, codewords=8, method="pq")
    assert q.fingerprint == givens.fit(ROWS, 3, codewords=8, method="pq").fingerprint
    assert torch.equal(q.encode(x).fine, q.encode(ROWS).fine)
    assert q.distortion(x) == q.distortion(ROWS)
    index = to_faiss(q, x)
    assert np.array_equal(index.search(ROWS, 3)[1], to_faiss(q, ROWS).search(ROWS, 3)[1])


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_the_path_of_a_file(tmp_path, kind):
    np.save(tmp_path / "x.npy", ROWS)
    q = givens.fit(kind(tmp_path / "x.npy"), 3, codewords=4, method="pq")
    assert torch.equal(q.encode(kind(tmp_path / "x.npy")).fine, q.encode(ROWS).fine)
    assert to_faiss(q, kind(tmp_path / "x.npy")).ntotal == 40


def test_arrays_and_tensors_stay_where_they_are(tmp_path):
    np.save(tmp_path / "x.npy", ROWS)
    for x in (ROWS, torch.from_numpy(ROWS), np.load(tmp_path / "x.npy", mmap_mode="r")):
        assert as_vectors(x) is x


@pytest.mark.parametrize(
    ("x", "got"),
    [
        (3, "int"),
        (None, "NoneType"),
        ({"a": 1}, "dict"),
        (iter(LISTS), "list_iterator"),
        (scipy.sparse.csr_array(ROWS), "scipy's csr_array"),
        (pa.array([1, 2]), "a pyarrow Int64Array of int64"),
    ],
)
def test_anything_else_is_refused_by_what_is_taken(x, got):
    with pytest.raises(TypeError, match="x must be a tensor, an array, lists of numbers") as caught:
        givens.fit(x, 1, codewords=2)
    assert str(caught.value).endswith(got)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([[1, 2], [1]], "row 0 has 2 numbers and row 1 has 1 numbers"),
        ([[1, 2], None], "row 1 has null"),
        (pa.array([[1.0], [1.0, 2.0]]), r"0 nulls and the lengths \[1, 2\]"),
        (pa.array([[1.0], None]), "1 nulls"),
        (pa.array([[1.0], [None]]), "numbers without nulls, but got 1"),
        (pd.Series([[1.0, 2.0], [1.0]]), "row 1 has 1 numbers"),
        (pd.DataFrame({"a": [1, None], "b": [1, 2]}).astype("Float64"), "x must be finite"),
        ("", "the path of vectors must not be empty; the folder here is ."),
        (pl.Series([[1.0, 2.0], None]), "row 1 has null"),
        ([1.0, 2.0], r"shape \(N, n\), but got \(2,\)"),
        ([], r"shape \(N, n\), but got \(0,\)"),
        (["a", "b"], "real numbers, but got <U1"),
        (np.array([["a"]]), "real numbers, but got <U1"),
        ([[decimal.Decimal(1)]], "real numbers, but got object"),
        (pa.array([["a"]]), "real numbers, but got object"),
        (pd.DataFrame({"a": ["x"], "b": [1]}), "real numbers, but got object"),
        (pl.DataFrame({"a": [[1.0]], "b": [[1.0]]}), "real numbers, but got object"),
        (pa.table({"a": fixed(), "b": fixed()}), "one column of vectors"),
    ],
)
def test_what_is_no_table_is_refused(x, message):
    with pytest.raises((ValueError, TypeError), match=message):
        givens.fit(x, 1, codewords=2)
