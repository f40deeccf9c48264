import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import givens
from givens.export.diskann import paths, to_diskann
from givens.quantizer import Quantizer

n = 16


def data(rows=2000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, n, generator=generator) * torch.linspace(3, 0.1, n) + 0.5


def make(K=256, metric="l2", subspaces=4):
    """A quantizer whose codewords are sub-vectors of the data, rotated."""
    R = givens.random_rotation(n, 3)
    Y = data(K, seed=1)
    Y = (torch.nn.functional.normalize(Y) if metric == "cosine" else Y) @ R
    return Quantizer(R, Y.reshape(K, subspaces, -1).transpose(0, 1), None, metric)


class Reader:
    """What DiskANN's reader does (FixedChunkPQTable, 0.7.0), in numpy."""

    def __init__(self, prefix):
        pivots, rotation, compressed = paths(prefix)
        starts = table(pivots, "<u8", 0)
        assert starts.shape == (4, 1)
        starts = starts[:, 0]
        self.tables = table(pivots, "<f4", starts[0])
        self.centroid = table(pivots, "<f4", starts[1])
        self.offsets = table(pivots, "<u4", starts[2])[:, 0]
        assert starts[3] == pivots.stat().st_size
        self.rotation = table(rotation, "<f4", 0)
        self.codes = table(compressed, "u1", 0)
        dim = self.tables.shape[1]
        assert self.tables.shape == (256, dim)
        assert self.centroid.shape == (dim, 1)
        assert self.rotation.shape == (dim, dim)
        assert len(self.offsets) == self.codes.shape[1] + 1

    def distances(self, query):
        """Of a query to all points, by a table of the distances to pivots in each chunk."""
        y = (query - self.centroid[:, 0]) @ self.rotation
        far = 0
        for chunk, (first, stop) in enumerate(zip(self.offsets, self.offsets[1:], strict=False)):
            gap = self.tables[:, first:stop].astype(float) - y[first:stop]
            far = far + (gap**2).sum(1)[self.codes[:, chunk]]
        return far


def table(path, dtype, start):
    raw = path.read_bytes()[int(start) :]
    rows, columns = np.frombuffer(raw[:8], "<i4")
    return np.frombuffer(raw, dtype, rows * columns, 8).reshape(rows, columns)


@pytest.mark.parametrize("K", [256, 100, 2])
@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_distances_by_the_files_are_those_to_decoded_vectors(tmp_path, K, metric):
    q, x, told = make(K, metric), data(), []
    written = to_diskann(q, x, tmp_path / "ann", progress=told.append)
    assert sorted(written) == sorted(tmp_path.iterdir())
    assert sum(told) == 2000
    reader = Reader(tmp_path / "ann")
    assert np.array_equal(reader.codes, q.encode(x).fine)
    query = data(1, seed=9)[0]
    decoded = q.decode(q.encode(x))
    expected = (decoded - query).square().sum(1)
    assert np.allclose(reader.distances(query.numpy()), expected, rtol=1e-4, atol=1e-4)


def test_without_vectors_the_pivots_alone(tmp_path):
    written = to_diskann(make(), None, tmp_path / "ann")
    assert [path.name for path in written] == [
        "ann_pq_pivots.bin",
        "ann_pq_pivots.bin_rotation_matrix.bin",
    ]
    assert sorted(written) == sorted(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("q", "x", "message"),
    [
        (Quantizer(torch.eye(n), make().codebooks, torch.ones(2, n)), data(), "no coarse"),
        (make(metric="ip"), data(), "'l2' or 'cosine', but got 'ip'"),
        (make(), data()[:, :5], r"shape \(N, 16\)"),
        (make(), data() / 0, "finite"),
        (make(), data() + 0j, "real numbers, but got torch.complex64"),
    ],
)
def test_what_diskann_cannot_read_is_refused_and_leaves_nothing(tmp_path, q, x, message):
    with pytest.raises((TypeError, ValueError), match=message):
        to_diskann(q, x, tmp_path / "ann")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def call(tmp_path):
    """Run code by a Python that has diskannpy, whose wheel wants a numpy of its own."""
    python = os.environ.get("DISKANN_PYTHON", sys.executable)
    known = subprocess.run([python, "-c", "import diskannpy"], capture_output=True, check=False)
    if known.returncode:
        pytest.skip("no diskannpy; set DISKANN_PYTHON to the Python of a venv that has it")

    def called(code):
        done = subprocess.run(
            [python, "-c", f"folder = {str(tmp_path)!r}\n{code}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    return called


BUILD = """
import diskannpy, numpy as np
diskannpy.build_disk_index(np.load(folder + "/x.npy"), "l2", folder, complexity=50, graph_degree=32,
    search_memory_maximum=5000 * 4 / 2**30, build_memory_maximum=1, num_threads=2)
"""
# It borrows two of its threads' places while it opens: with one it waits for ever.
SEARCH = """
import diskannpy, numpy as np
index = diskannpy.StaticDiskIndex(folder, num_threads=2, num_nodes_to_cache=0)
asked = np.load(folder + "/queries.npy")
found = [index.search(query, 10, 10, beam_width=1).identifiers for query in asked]
np.save(folder + "/found.npy", np.array(found))
"""


def test_diskann_encodes_by_our_pivots_as_we_do(tmp_path, call):
    """It takes pivots that are there already; its build does not rotate."""
    x = data(5000)
    np.save(tmp_path / "x.npy", x.numpy())
    q = givens.fit(x, 4, codewords=256, method="pq", max_iter=4)
    to_diskann(q, None, tmp_path / "ann")
    pivots, rotation, compressed = paths(tmp_path / "ann")
    before = pivots.read_bytes()
    rotation.unlink()
    told = call(BUILD)
    assert "PQ pivot file exists. Not generating again" in told
    assert pivots.read_bytes() == before
    same = table(compressed, "u1", 0) == q.encode(x).fine.numpy()
    assert same.mean() > 0.999


def test_diskann_opens_them_and_searches_by_them(tmp_path, call):
    """Its own graph, our codes: as long as they are right, a short search finds what is near."""
    x, queries = data(5000), data(60, seed=5)
    np.save(tmp_path / "x.npy", x.numpy())
    np.save(tmp_path / "queries.npy", queries.numpy())
    near = torch.cdist(queries, x).topk(10, largest=False).indices.numpy()

    def recall():
        told = call(SEARCH)
        assert "#ctrs: 256, #dims: 16, #chunks: 4" in told
        found = np.load(tmp_path / "found.npy")
        return sum(len({*a} & {*b}) for a, b in zip(found, near, strict=True)) / near.size

    call(BUILD)
    theirs = recall()
    q = givens.fit(x, 4, codewords=256, max_iter=4)
    to_diskann(q, x, tmp_path / "ann")
    ours = recall()
    # The rotation is read: with another one the codes mean nothing.
    to_diskann(Quantizer(givens.random_rotation(n, 8), q.codebooks), None, tmp_path / "ann")
    wrong = recall()
    assert ours > theirs
    assert ours > 2 * wrong
