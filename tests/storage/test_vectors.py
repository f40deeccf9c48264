import subprocess
import sys

import numpy as np
import pytest

from givens.storage import vectors

ROWS = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        vectors.read(tmp_path / "x.npy")


def test_a_folder_is_its_files(tmp_path):
    for name, part in (("b.npy", ROWS[20:]), ("a.npy", ROWS[:20]), ("c.npy", ROWS[:1].astype(int))):
        np.save(tmp_path / name, part)
    x = vectors.read(tmp_path)
    whole = np.concatenate([ROWS, ROWS[:1].astype(int)])
    assert x.shape == (51, 6)
    assert x.dtype == np.float64
    for rows in (slice(15, 25), slice(None), [49, 3, 50, 3, 20], np.arange(51) % 2 == 0):
        assert np.array_equal(x[rows], whole[rows])
    np.save(tmp_path / "d.npy", ROWS[:, :5])
    with pytest.raises(ValueError, match=r"d.npy must have vectors of 6 dimensions as .*a.npy has"):
        vectors.read(tmp_path)


def test_a_large_file_streams_in_constant_memory(tmp_path):
    path = tmp_path / "x.npy"
    table = np.lib.format.open_memmap(path, "w+", np.float32, (400_000, 128))
    table.flush()
    code = (
        "import sys, resource; from givens.storage import vectors\n"
        "def peak(): return int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])\n"
        "x = vectors.read(sys.argv[1]); before = peak()\n"
        "for part in vectors.chunks(x, 8192): part.sum()\n"
        "print(peak() - before)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    # 200 MB went through.
    assert int(run.stdout) < 40_000
