import struct
import sys

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from givens.storage import formats, vectors

FLOATS = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)
BYTES = np.random.default_rng(0).integers(0, 256, (50, 6)).astype(np.uint8)
INTS = np.random.default_rng(0).integers(-9, 9, (50, 6)).astype(np.int32)


def vecs(path, table):
    lead = struct.pack("<i", table.shape[1])
    path.write_bytes(b"".join(lead + row.tobytes() for row in table))


def parquet(path, table):
    flat = pa.array(table.ravel())
    lists = pa.FixedSizeListArray.from_arrays(flat, table.shape[1])
    columns = {"id": pa.array(np.arange(len(table))), "vector": lists}
    pq.write_table(pa.table(columns), path, row_group_size=7)


def hdf5(path, **tables):
    with h5py.File(path, "w") as file:
        for name, table in tables.items():
            file[name] = table


WRITERS = {
    "x.npy": lambda path: np.save(path, FLOATS),
    "y.npy": lambda path: np.save(path, BYTES),
    "columns.npy": lambda path: np.save(path, np.asfortranarray(FLOATS)),
    "x.fvecs": lambda path: vecs(path, FLOATS),
    "x.bvecs": lambda path: vecs(path, BYTES),
    "x.ivecs": lambda path: vecs(path, INTS),
    "x.hdf5": lambda path: hdf5(path, train=FLOATS, test=FLOATS[:5]),
    "one.h5": lambda path: hdf5(path, things=FLOATS),
    "x.parquet": lambda path: parquet(path, FLOATS),
    "x.safetensors": lambda path: safetensors.torch.save_file(
        {"x": torch.from_numpy(FLOATS)}, path
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_slices_and_rows_of_every_format(tmp_path, monkeypatch, name):
    monkeypatch.setattr(formats, "SLAB", 8)
    path = tmp_path / name
    WRITERS[name](path)
    x = vectors.read(path, "train")
    want = {".bvecs": BYTES, ".ivecs": INTS}.get(path.suffix, BYTES if name[0] == "y" else FLOATS)
    assert tuple(x.shape) == want.shape
    assert len(x) == 50
    assert x.dtype == want.dtype
    for rows in (
        slice(0, 50),
        slice(5, 9),
        slice(48, 60),
        np.array([49, 3, 3, 14, 0, 7, 8]),
        np.array([], int),
    ):
        part = x[rows]
        assert part.dtype == want.dtype
        assert np.array_equal(part, want[rows])
    got = torch.cat(list(vectors.chunks(x, 8)))
    assert got.dtype == torch.float32
    assert np.array_equal(got.numpy(), want.astype(np.float32))


def test_tables_by_name(tmp_path):
    hdf5(tmp_path / "x.hdf5", train=FLOATS, test=FLOATS[:5], neighbors=INTS[:5])
    assert len(vectors.read(f"{tmp_path}/x.hdf5:test", "train")) == 5
    assert vectors.read(tmp_path / "x.hdf5", "neighbors").dtype == np.int32
    for path in (f"{tmp_path}/x.hdf5", f"{tmp_path}/x.hdf5:nothing"):
        with pytest.raises(ValueError, match="'neighbors', 'test', 'train': name one"):
            vectors.read(path)


def test_halves_of_safetensors_and_lists_of_parquet(tmp_path):
    half = torch.from_numpy(FLOATS).bfloat16()
    safetensors.torch.save_file({"a": half, "b": half[:3].clone()}, tmp_path / "x.safetensors")
    x = vectors.read(f"{tmp_path}/x.safetensors:a")
    assert np.array_equal(x[4:9], half[4:9].float().numpy())
    rows = pa.array([list(map(float, row)) for row in FLOATS], pa.list_(pa.float64()))
    pq.write_table(pa.table({"v": rows}), tmp_path / "x.parquet")
    assert np.array_equal(vectors.read(tmp_path / "x.parquet")[2:4], FLOATS[2:4].astype(np.float64))


def text(content):
    return lambda path: path.write_text(content)


def raw(content):
    return lambda path: path.write_bytes(content)


def cut(write, keep):
    def cut_short(path):
        write(path)
        path.write_bytes(path.read_bytes()[:keep])

    return cut_short


def ragged(path):
    pq.write_table(pa.table({"v": pa.array([[1.0, 2.0], [3.0, 4.0, 5.0], [6.0]])}), path)


def with_a_null(path):
    with pq.ParquetWriter(path, pa.schema({"v": pa.list_(pa.int64())})) as writer:
        for rows in ([[1, 2]], [[3, None]]):
            writer.write_table(pa.table({"v": pa.array(rows, pa.list_(pa.int64()))}))


def without_rows(path):
    pq.write_table(pa.table({"v": pa.array([], pa.list_(pa.float32()))}), path)


def npy_of(shape, descr="<f4", room=4096):
    """A .npy file whose header says this, with some room behind it."""
    said = repr({"descr": descr, "fortran_order": False, "shape": ...}).replace("Ellipsis", shape)
    head = said.encode() + b" " * (117 - len(said)) + b"\n"
    return raw(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(room))


def rows_of_other_widths(path, dtype, at):
    """Rows that fit together to the byte, though one says otherwise where no sample looks."""
    n, rows = 6, 5000
    table = np.zeros((rows, 4 + n * np.dtype(dtype).itemsize), np.uint8)
    table[:, :4] = np.full(rows, n, "<i4").view(np.uint8).reshape(rows, 4)
    table[at, 0] = 7
    path.write_bytes(table.tobytes())


def archive(path):
    np.savez(path.with_suffix(".npz"), a=FLOATS)
    path.with_suffix(".npz").rename(path)


def empty_table(path):
    with h5py.File(path, "w") as file:
        file["x"] = h5py.Empty("f4")


def never_written(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (1 << 40, 16), "f4", chunks=(4096, 16))


def stored_outside(path):
    np.zeros((50, 6), np.float32).tofile(path.with_name("outside"))
    with h5py.File(path, "w") as file:
        outside = [(str(path.with_name("outside")), 0, 1200)]
        file.create_dataset("x", (50, 6), "f4", external=outside)


def virtual(path):
    hdf5(path.with_name("other.h5"), x=FLOATS)
    layout = h5py.VirtualLayout((50, 6), "f4")
    layout[:] = h5py.VirtualSource(str(path.with_name("other.h5")), "x", (50, 6))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout)


def linked(link):
    def write(path):
        hdf5(path.with_name("other.h5"), train=FLOATS)
        hdf5(path, other=FLOATS[:3])
        with h5py.File(path, "a") as file:
            file["train"] = link

    return write


def eighths(path):
    table = torch.from_numpy(FLOATS).to(torch.float8_e4m3fn)
    safetensors.torch.save_file({"x": table}, path)


def words(path):
    pq.write_table(pa.table({"v": pa.array([["a", "b"]] * 4)}), path)


CSV = "1.0,2.0\n3.0,4.0\n" * 20


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("x.csv", text(CSV), "must end in one of .npy, .fvecs"),
        ("x.npy", text(CSV), "not a complete .npy file"),
        ("x.npy", raw(b""), "is empty"),
        ("x.npy", cut(WRITERS["x.npy"], 700), "not a complete .npy file"),
        ("x.npy", lambda path: np.save(path, np.array([{}])), "not a complete .npy file"),
        ("x.npy", lambda path: np.save(path, np.zeros(5)), r"shape \(N, n\), but holds float64"),
        ("x.npy", lambda path: np.save(path, np.zeros((5, 2), complex)), "holds complex128"),
        ("x.npy", lambda path: np.save(path, np.zeros((0, 2))), r"of shape \(0, 2\)"),
        ("x.fvecs", text(CSV), "not a complete .fvecs file"),
        ("x.fvecs", cut(WRITERS["x.fvecs"], 699), "not a complete .fvecs file"),
        ("x.fvecs", raw(struct.pack("<iiiiii", 2, 0, 0, 3, 0, 0)), "row 1 does not say n = 2 as"),
        ("x.bvecs", raw(struct.pack("<i", -4) + b"ab"), "not a complete .bvecs file"),
        ("x.npy", npy_of("(-5, 16)"), "not a complete .npy file"),
        ("x.npy", npy_of("(True, 16)"), "not a complete .npy file"),
        ("x.npy", npy_of("(1.0, 16)"), "not a complete .npy file"),
        ("x.npy", npy_of("(4611686018427387904, 16)"), "not a complete .npy file"),
        ("x.npy", npy_of("(2, 2)", "|O"), "not a complete .npy file"),
        ("x.npy", npy_of("(2, 2)", "<f3"), "not a complete .npy file"),
        ("x.npy", npy_of("(2, 2)", "|V0"), "not a complete .npy file"),
        ("x.npy", npy_of("{}"), "not a complete .npy file"),
        ("x.npy", npy_of("(5, 16"), "not a complete .npy file"),
        ("x.npy", npy_of("(2, 2)", "|S4"), r"holds \|S4 of shape"),
        ("x.npy", archive, "not a complete .npy file"),
        ("x.fvecs", lambda path: rows_of_other_widths(path, "f4", 4321), "row 4321 does not say"),
        ("x.bvecs", lambda path: rows_of_other_widths(path, "u1", 1234), "row 1234 does not say"),
        ("x.ivecs", lambda path: rows_of_other_widths(path, "i4", 2345), "row 2345 does not say"),
        ("x.hdf5", empty_table, r"of shape \(\)"),
        ("x.hdf5", never_written, "parts of x were never written"),
        ("x.hdf5", stored_outside, "must hold the numbers of x itself, not in other files"),
        ("x.hdf5", virtual, "must hold the numbers of x itself, not in other files"),
        ("x.hdf5", linked(h5py.ExternalLink("other.h5", "train")), "but train is a link"),
        ("x.hdf5", linked(h5py.SoftLink("/other")), "but train is a link"),
        ("x.safetensors", eighths, "bfloat16, but has F8_E4M3"),
        ("x.parquet", words, "holds object"),
        ("x.hdf5", text(CSV), "not an HDF5 file"),
        ("x.hdf5", cut(WRITERS["x.hdf5"], 900), "not an HDF5 file"),
        ("x.hdf5", hdf5, "no table"),
        ("x.parquet", text(CSV), "not a parquet file"),
        ("x.parquet", ragged, "lists of one length"),
        ("x.parquet", with_a_null, "nulls among the numbers"),
        ("x.parquet", without_rows, "is empty"),
        ("x.safetensors", text(CSV), "not a safetensors file"),
        ("x.safetensors", cut(WRITERS["x.safetensors"], 300), "not a safetensors file"),
    ],
)
def test_wrong_files_are_one_line(tmp_path, name, write, message):
    path = tmp_path / name
    write(path)
    with pytest.raises(ValueError, match=message) as caught:
        vectors.read(path, "train")[:]
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_parquet_file_may_begin_with_an_empty_group(tmp_path):
    path = tmp_path / "x.parquet"
    with pq.ParquetWriter(path, pa.schema({"v": pa.list_(pa.float32())})) as writer:
        for rows in ([], [[1, 2], [3, 4]], [], [[5, 6]]):
            writer.write_table(pa.table({"v": pa.array(rows, pa.list_(pa.float32()))}))
    assert vectors.read(path)[:].tolist() == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("rows", [slice(1, 9, 3), slice(5, 2), slice(-3, None), [4, 1, 4]])
def test_rows_are_taken_as_from_an_array(tmp_path, name, rows):
    WRITERS[name](tmp_path / name)
    read = vectors.read(tmp_path / name, "train")
    whole = read[:]
    assert np.array_equal(read[rows], whole[rows])
    assert np.array_equal(vectors.Range(read, 2, 9)[rows], whole[2:9][rows])


@pytest.mark.parametrize(("name", "package"), [("x.hdf5", "h5py"), ("x.parquet", "pyarrow")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, name, package):
    WRITERS[name](tmp_path / name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'givens\[formats\]'"):
        vectors.read(tmp_path / name)
