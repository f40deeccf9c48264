"""Damaged files of every kind that the package reads: a few hundred; in full, a benchmark's rows.

`benchmarks/files.py` is that benchmark, and its rows are in results/files.json.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SEALED = ("Quantizer", "index (Faiss file and record)", "shards", "checkpoint", "fit state")
LOGS = ("ratings.dat", "ratings.csv", "reviews.json", "rows.txt", "baskets.txt", "reviews.json.gz")
TABLES = (
    *("x.npy", "x.fvecs", "x.bvecs", "x.ivecs", "x.hdf5", "packed.hdf5", "x.parquet"),
    "x.safetensors",
)
KINDS = (
    *(f"givens {name}" for name in SEALED),
    *("run folder", "rows of a figure"),
    *(f"click log {name}" for name in LOGS),
    *(f"vectors {name}" for name in TABLES),
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """What the harness finds in small."""
    found = tmp_path_factory.mktemp("hostile") / "rows.json"
    command = [sys.executable, BENCHMARKS / "files.py", "--quick", "--json", found]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {(row["part"], row["target"]): row for row in json.loads(found.read_text())["rows"]}


@pytest.mark.parametrize("kind", KINDS)
def test_no_damage_crashes_hangs_or_passes_for_what_was_saved(rows, kind):
    """Without a digest a changed number is a number; a traceback is one nowhere."""
    row = rows["mutations", kind]
    bad = ["unclean", "crashed", "hung", "over 2 s", "over memory"]
    assert not any(row[name] for name in bad), row
    assert row["refused"]
    assert row["digest"] == kind.startswith("givens ")
    assert not (row["digest"] and row["changed"]), row


def test_all_kinds_are_there(rows):
    peers = {"plain safetensors", "faiss.read_index (OPQ+PQ)", "hnswlib", "usearch"}
    assert {name for part, name in rows if part == "mutations"} - peers == {*KINDS}


@pytest.mark.parametrize("writer", ["givens Quantizer.save", "givens save_index"])
def test_kills_and_a_full_disk_leave_the_old_file(rows, writer):
    killed, filled = rows["kills", writer], rows["full disk", writer]
    assert not killed["lost"] + killed["left_behind"], killed
    assert filled["old_file_kept"], filled
    assert not filled["left_behind"], filled
    assert "No space left" in filled["told"] or "too large" in filled["told"], filled


def test_the_harness_can_tell(rows):
    """Faiss takes damaged files, and loses files to kills."""
    assert rows["mutations", "faiss.read_index (OPQ+PQ)"]["changed"]
    assert rows["kills", "faiss.write_index"]["lost"]
    assert rows["mutations", "vectors x.npy"]["changed"]


def test_a_stopped_search_loses_nothing(tmp_path):
    """`benchmarks/kills.py` in small: of one command, a moment for each signal."""
    found = tmp_path / "rows.json"
    command = [sys.executable, BENCHMARKS / "kills.py", "--only", "search", "--moments", "3"]
    done = subprocess.run([*command, "--json", found], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(found.read_text())["rows"]
    for what in ("lost", "other end", "left behind", "not one line"):
        assert not row[what], row
