import gzip

import numpy as np
import pytest

from givens.storage import vectors

WORDS = ["the", ",", "0.5", ". . .", "é\xa0x", "1999", "-"]
TABLE = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)


def lines(names=WORDS, table=TABLE, end="\n"):
    return "".join(
        (f"{name} " if name is not None else "") + " ".join(map(repr, map(float, row))) + end
        for name, row in zip(names, table, strict=True)
    )


@pytest.mark.parametrize("suffix", [".txt", ".vec", ".glove", ".TXT", ".txt.gz", ".vec.gz"])
@pytest.mark.parametrize("header", ["", "7 5\n"])
@pytest.mark.parametrize("end", ["\n", " \n", "\r\n"])
def test_words_and_their_vectors(tmp_path, suffix, header, end):
    path = tmp_path / f"words{suffix}"
    text = (header + lines(end=end)).encode()
    path.write_bytes(gzip.compress(text) if suffix.endswith(".gz") else text)
    x = vectors.read(path)
    assert x.shape == (7, 5)
    assert x.dtype == np.float32
    assert vectors.names_of(x) == WORDS
    for rows in (slice(None), slice(2, 5), [6, 0, 3], np.arange(7) % 2 == 0):
        assert np.array_equal(x[rows], TABLE[rows])
    assert np.array_equal(np.asarray(x), TABLE)


def test_numbers_alone_are_vectors_without_names(tmp_path):
    np.savetxt(tmp_path / "x.txt", TABLE)
    x = vectors.read(tmp_path / "x.txt")
    assert np.allclose(x[:], TABLE)
    assert vectors.names_of(x) is None
    # Under a header too, and where all the words are numbers it says so.
    (tmp_path / "y.txt").write_text("7 5\n" + lines([None] * 7))
    assert np.allclose(vectors.read(tmp_path / "y.txt")[:], TABLE)
    (tmp_path / "z.txt").write_text("7 5\n" + lines(map(str, range(7))))
    assert vectors.names_of(vectors.read(tmp_path / "z.txt")) == list("0123456")


def test_two_columns_of_integers_are_no_header(tmp_path):
    (tmp_path / "x.txt").write_text("3 4\n5 6\n7 8\n")
    assert np.array_equal(vectors.read(tmp_path / "x.txt")[:], [[3, 4], [5, 6], [7, 8]])
    (tmp_path / "y.txt").write_text("2 1\na 6\nb 8\n")
    y = vectors.read(tmp_path / "y.txt")
    assert vectors.names_of(y) == ["a", "b"]
    assert np.array_equal(y[:], [[6], [8]])


def test_more_lines_than_it_looks_at_first(tmp_path):
    table = np.random.default_rng(1).standard_normal((5000, 3)).astype(np.float32)
    (tmp_path / "x.glove").write_text(lines([f"w{i}" for i in range(5000)], table))
    x = vectors.read(tmp_path / "x.glove")
    assert np.array_equal(x[:], table)
    assert vectors.names_of(x)[4999] == "w4999"


def test_files_one_after_another_keep_their_names(tmp_path):
    for name, part in (("a", slice(0, 2)), ("b", slice(2, 7))):
        (tmp_path / f"{name}.txt").write_text(lines(WORDS[part], TABLE[part]))
    both = vectors.join([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
    assert vectors.names_of(both) == WORDS
    np.save(tmp_path / "c.npy", TABLE)
    mixed = vectors.join([str(tmp_path / "a.txt"), str(tmp_path / "c.npy")])
    assert vectors.names_of(mixed) is None
    # In a folder, text may be anything.
    (tmp_path / "README.txt").write_text("not vectors")
    assert vectors.list_files(tmp_path) == [str(tmp_path / "c.npy")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("3 5\n", "is empty"),
        ("the\na\n", "must have a name and 1 numbers in each line, but line 1 is 'the'"),
        ("the 1 2\na 1\n", "a name and 2 numbers in each line, but line 2 is 'a 1'"),
        ("the 1 2\na 1 b\n", "but line 2 is 'a 1 b'"),
        ("1 2 3\n4 5 6 x\n", "but line 2 is '4 5 6 x'"),
        ("9 5\n" + lines(), "says that it has 9 vectors of 5, but has 7 of 5"),
    ],
)
def test_what_is_no_text_of_vectors_is_refused(tmp_path, text, message):
    (tmp_path / "x.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        vectors.read(tmp_path / "x.txt")


def test_a_damaged_archive_is_refused(tmp_path):
    raw = gzip.compress(lines().encode())
    for name, part in (("cut", raw[:-20]), ("none", b"the 1 2\n" * 9)):
        (tmp_path / f"{name}.vec.gz").write_bytes(part)
        with pytest.raises(ValueError, match=r"is not a complete \.gz file"):
            vectors.read(tmp_path / f"{name}.vec.gz")


def test_a_table_behind_a_name_is_not_there(tmp_path):
    (tmp_path / "x.vec").write_text(lines())
    with pytest.raises(ValueError, match="leave :words out"):
        vectors.read(f"{tmp_path}/x.vec:words")
