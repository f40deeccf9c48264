import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from givens.storage import vectors
from givens.storage.remote import list_files, stamp

N, n = 1000, 12


@pytest.fixture
def store(tmp_path):
    """A folder of one table in three formats, at an address of memory and one of the disk."""
    x = np.random.default_rng(0).standard_normal((N, n)).astype(np.float32)
    np.save(tmp_path / "a.npy", x)
    np.hstack([np.full((N, 1), n, "<i4").view("<f4"), x]).tofile(tmp_path / "b.fvecs")
    (255 * abs(x) % 255).astype(np.uint8).tofile(tmp_path / "raw")
    column = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), n)
    table = pa.table({"vector": column, "other": column})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=300)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path) + "/", "/store/", recursive=True)
    yield x, ["memory://store", f"file://{tmp_path}"]
    memory.rm("/store", recursive=True)


def test_an_address_reads_as_the_file_does(store):
    x, roots = store
    rows = np.random.default_rng(1).integers(0, N, 200)
    for root in roots:
        for name in ("a.npy", "b.fvecs", "c.parquet:vector"):
            found = vectors.read(f"{root}/{name}")
            assert found.shape == (N, n)
            assert np.array_equal(found[:], x)
            assert np.array_equal(found[10:345], x[10:345])
            assert np.array_equal(found[rows], x[rows])
            assert np.array_equal(found[3:90:7], x[3:90:7])
        assert found[5:5].shape == (0, n)


def test_a_folder_is_its_files(store):
    x, roots = store
    for root in roots:
        fsspec.core.url_to_fs(root)[0].rm(f"{root}/c.parquet")
        names = [address.rpartition("/")[2] for address in list_files(root)]
        assert names == ["a.npy", "b.fvecs"]
        assert np.array_equal(vectors.read(root)[N - 5 : N + 5], np.vstack([x[-5:], x[:5]]))


def test_a_stamp_tells_of_changes(store):
    _, roots = store
    for root in roots:
        before = stamp(f"{root}/a.npy"), stamp(f"{root}/b.fvecs")
        with fsspec.open(f"{root}/a.npy", "wb") as file:
            np.save(file, np.ones((N + 1, n), np.float32))
        assert stamp(f"{root}/a.npy") != before[0]
        assert stamp(f"{root}/b.fvecs") == before[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.npy", "there is no file memory://store/none.npy"),
        ("raw", "must end in one of .npy"),
        ("x.hdf5", "must end in one of .npy"),
        ("cut.npy", "cut.npy is not a complete .npy file"),
        ("cut.fvecs", "cut.fvecs is not a complete .fvecs file"),
        ("long.fvecs", "row 800 does not say n = 12"),
        ("negative.npy", "negative.npy is not a complete .npy file"),
        ("cut.parquet", "cut.parquet is not a parquet file"),
        ("flat.npy", r"flat.npy must be a table, row by row, but has shape \(5,\)"),
        ("c.parquet", "name one, as in memory://store/c.parquet:vector"),
    ],
)
def test_what_is_not_whole_is_refused(store, name, message):
    memory = fsspec.filesystem("memory")
    for suffix, whole in ((".npy", "a.npy"), (".fvecs", "b.fvecs"), (".parquet", "c.parquet")):
        memory.pipe(f"/store/cut{suffix}", memory.cat(f"/store/{whole}")[:-7])
    with memory.open("/store/flat.npy", "wb") as file:
        np.save(file, np.ones(5))
    long = bytearray(memory.cat("/store/b.fvecs"))
    long[800 * 4 * (n + 1)] = 13
    memory.pipe("/store/long.fvecs", bytes(long))
    negative = memory.cat("/store/a.npy").replace(b"(1000, 12)", b"(-100, 12)")
    memory.pipe("/store/negative.npy", negative)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        vectors.read(f"memory://store/{name}")[700:]
