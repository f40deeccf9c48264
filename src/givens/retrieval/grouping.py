"""An external sort by user, for logs that do not fit in memory.

Rows are dealt into buckets by a hash of their users, one round at a time; each round is a file with
a batch for each bucket. Then each bucket is gathered, sorted by user and time, and written as a
Parquet file that splits no user between row groups. A sort that was stopped is resumed.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from givens.retrieval.parquet import GROUP, WHAT, Source, make_keys, make_numbers, write_groups
from givens.retrieval.survey import hash_items
from givens.storage import files

# The folder of the sorted log in a run's folder.
FOLDER = "log"
# About this many rows are in a round, and in a bucket.
ROUND, BUCKET = 4_000_000, 2_000_000


def group_users(
    source: Source, folder: Path, stamps: Any, progress: Callable[[int, int], object]
) -> Source:
    """Write a log into a folder, sorted by user.

    Args:
        source: the log.
        folder: the folder of its files, which replace older ones.
        stamps: a value that changes when a file of the log changes.
        progress: called with the rows done and their total, each row counted twice.
    """
    total = int(source.groups[:, 2].sum())
    buckets = -(-total // BUCKET)
    mark = hashlib.sha256(json.dumps([stamps, ROUND, BUCKET, GROUP]).encode()).hexdigest()[:16]
    work = folder.with_name(f"{folder.name}.{mark}.parts")
    # Parts of another log, or of this one before it changed.
    for other in folder.parent.glob(f"{folder.name}.{'?' * len(mark)}.parts"):
        if other != work:
            shutil.rmtree(other)
    (work / "sorted").mkdir(parents=True, exist_ok=True)
    done = 0
    rounds = []
    for number, groups in enumerate(_deal_rounds(source.groups[:, 2])):
        rounds.append(work / f"{number:06d}.arrow")
        if not rounds[-1].exists():
            _write_round(source, groups, buckets, rounds[-1])
        done += int(source.groups[groups, 2].sum())
        progress(done, 2 * total)
    for bucket in range(buckets):
        part = work / "sorted" / f"{bucket:06d}.parquet"
        if not part.exists():
            _write_bucket(rounds, bucket, part)
        progress(total + (bucket + 1) * total // buckets, 2 * total)
    if folder.exists():
        shutil.rmtree(folder)
    (work / "sorted").replace(folder)
    shutil.rmtree(work)
    return Source(folder, source.title)


def _deal_rounds(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """The numbers of the row groups of each round."""
    number = (np.cumsum(rows) - rows) // ROUND
    for one in np.unique(number):
        yield np.flatnonzero(number == one)


def _write_round(source: Source, groups: NDArray[np.int64], buckets: int, path: Path) -> None:
    """Write the rows of row groups, with one batch for each bucket."""
    import pyarrow as pa

    table = pa.concat_tables([pa.table(source.read_columns(int(group))) for group in groups])
    table = table.unify_dictionaries().combine_chunks()
    keys, _ = make_keys(table.column("user").combine_chunks())
    bucket = hash_items(keys, buckets)
    table = table.take(np.argsort(bucket, kind="stable")).combine_chunks()
    ends = np.cumsum(np.bincount(bucket, minlength=buckets))
    with files.replacing(path) as temporary, pa.ipc.new_file(str(temporary), table.schema) as file:
        for first, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            # An empty slice has no batches.
            batches = table.slice(first, end - first).to_batches()
            file.write_batch(batches[0] if batches else table.schema.empty_table().to_batches()[0])


def _write_bucket(rounds: list[Path], bucket: int, path: Path) -> None:
    """Write a bucket, sorted by user and time."""
    import pyarrow as pa

    batches = []
    for file in rounds:
        with pa.memory_map(str(file)) as mapped, pa.ipc.open_file(mapped) as opened:
            batches.append(opened.get_batch(bucket))
    table = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
    user, _ = make_keys(table.column("user").combine_chunks())
    by: tuple[Any, ...] = (user,)
    if "time" in table.column_names:
        by = (make_numbers(table.column("time").combine_chunks()), user)
    order = np.lexsort(by)
    columns = [what for what in WHAT if what in table.column_names]
    write_groups(path, table.select(columns).take(order), user[order])
