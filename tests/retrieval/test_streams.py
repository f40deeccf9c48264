"""Logs that stay in their Parquet files, against the same rows in memory."""

import dataclasses
import itertools
import json
import tracemalloc
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from givens.retrieval import grouping, parquet, streamed, streams, survey
from givens.retrieval.batches import Examples, open_examples
from givens.retrieval.config import Config
from givens.retrieval.data import Names, click_log, click_pieces, split, write_names
from givens.retrieval.readers import read
from givens.retrieval.train import train
from givens.storage import files


def rows(users=60, items=40, clicks=1500, seed=0):
    """user, item, rating and time of clicks, user by user, times in order."""
    rng = np.random.default_rng(seed)
    user = np.sort(rng.integers(0, users, clicks))
    # Users are together, but not in the order of their numbers.
    return {
        "user": 1000 + (user * 37) % users,
        "item": rng.integers(0, items, clicks) ** 2 + 7,
        "rating": rng.choice([3.0, 4.0, 5.0], clicks),
        "time": np.arange(clicks),
    }


def put(folder, table, cuts=(), group=97, **changed):
    """Write rows as files that end at these places, in row groups of so many."""
    folder.mkdir(exist_ok=True)
    table = pa.table({**table, **changed})
    ends = [0, *cuts, len(table)]
    for number, (first, end) in enumerate(itertools.pairwise(ends)):
        part = table.slice(first, end - first)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=group)
    return folder


def in_memory(table, **options):
    return split(*(np.asarray(table[what]) for what in table), name="log", **options)


def texts(table):
    """The same with names as users and items."""
    named = {what: [f"{what} {number} é" for number in table[what]] for what in ("user", "item")}
    return {**table, **named}


def by_user(log):
    """The clicks of a log in memory, of each user by its number."""
    return [tuple(log.items[a:b]) for a, b in zip(log.starts, log.starts[1:], strict=False)]


def users_of(log):
    """The same of a streamed log, sorted: of training users from the files, and those held out."""
    reader = streams.Reader(log)
    found = []
    for group in range(len(log.source)):
        if log.examples[group]:
            users = reader.read(group)
            found += by_user(users)
    return sorted([*found, *by_user(log)])


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("rules", [{}, {"min_rating": 4.5, "min_items": 5}, {"min_rating": 1.0}])
def test_it_is_the_log_that_the_reader_in_memory_has(tmp_path, named, rules):
    table = texts(rows()) if named else rows()
    log = read(put(tmp_path / "log", table, [500, 501, 1200]), **rules)
    memory = in_memory(table, **rules)
    assert (log.catalogue, log.users) == (memory.catalogue, memory.users)
    assert list(log.names[:]) == list(memory.names)
    assert log.selection == memory.selection
    assert log.rules == memory.rules
    assert users_of(log) == sorted(by_user(memory))
    counts = np.bincount(log.items, minlength=log.catalogue) + log.popularity
    assert counts.tolist() == np.bincount(memory.items, minlength=log.catalogue).tolist()
    assert log.unseen == np.count_nonzero(log.popularity == 0)
    assert len(log.valid) == len(log.test) == len(memory.valid)
    assert f"{len(memory.items):,} clicks of {memory.users} users" in str(log)
    for name in (tmp_path / "a", tmp_path / "b"):
        write_names(name, log.names if name.name == "a" else memory.names)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_times_may_be_mixed_up_and_row_groups_be_of_any_size(tmp_path):
    table = rows()
    rng = np.random.default_rng(1)
    table["time"] = rng.integers(0, 50, 1500)
    expected = sorted(by_user(in_memory(table)))
    logs = [read(put(tmp_path / f"{group}", table, [700], group=group)) for group in (1, 5, 10_000)]
    for log in logs:
        assert users_of(log) == expected
        assert log.held.tolist() == logs[0].held.tolist()
        assert log.items.tolist() == logs[0].items.tolist()
    # A user of more rows than a row group has: groups in which nobody begins.
    assert (logs[1].lead < 0).sum() > 50
    assert (logs[1].examples[logs[1].lead < 0] == 0).all()


def test_other_shapes_of_the_same_rows(tmp_path):
    table = rows()
    log = read(put(tmp_path / "plain", table))
    other = {
        "userId": pa.array(table["user"], pa.int32()),
        "extra": pa.array([None] * 1500, pa.string()),
        "ITEM": pa.array(table["item"]).dictionary_encode(),
        "overall": pa.array(table["rating"].astype(np.int8)),
        "timestamp": pa.array(table["time"], pa.timestamp("ms")),
    }
    (tmp_path / "log" / "day=1").mkdir(parents=True)
    (tmp_path / "log" / "day=2" / "hour=1").mkdir(parents=True)
    for where, first, end in (("day=1", 0, 800), ("day=2/hour=1", 800, 1500)):
        part = pa.table(other).slice(first, end - first)
        pq.write_table(part, tmp_path / "log" / where / "part.parquet", row_group_size=100)
    # A row for each user, with lists.
    at = np.flatnonzero(np.diff(table["user"], prepend=-1))
    ends = pa.array(np.append(at, 1500), pa.int32())
    lists = {what: pa.ListArray.from_arrays(ends, table[what]) for what in table if what != "user"}
    put(tmp_path / "lists", {"user": table["user"][at], **lists}, group=7)
    # Empty files and row groups.
    empty = pa.table(table).slice(0, 0)
    put(tmp_path / "gaps", table, [600, 600])
    with pq.ParquetWriter(tmp_path / "gaps" / "0a.parquet", empty.schema) as writer:
        writer.write_table(empty)
    for name in ("log", "lists", "gaps"):
        found = read(tmp_path / name)
        assert found.held.tolist() == log.held.tolist()
        assert users_of(found) == users_of(log)
        assert found.names.tolist() == log.names.tolist()


def marked(users=300, each=(10, 30), seed=0):
    """Every click is on an item of its own, so that examples can be told apart."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(*each, users)
    total = int(counts.sum())
    return {"user": np.repeat(np.arange(users), counts), "item": np.arange(total)}


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(streams, "WINDOW", 100)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize(
    ("group", "batch"), [(97, 64), (1000, 60), (10_000, 16), (300, 7), (10_000, 2)]
)
def test_every_example_comes_once_in_an_epoch(tmp_path, monkeypatch, group, batch):
    # So that nobody's items are seen by the held-out users alone.
    monkeypatch.setattr(survey, "check_held_out", lambda *_: None)
    table = marked()
    log = read(put(tmp_path / "log", table, [2500], group=group), held_out=20)
    examples = open_examples(log, history=6, ahead=1, seed=3)
    order, memory = streams.Order(log.examples, batch, 3), in_memory_users(table, log)
    total = int(log.examples.sum())
    seen, steps = {}, 0
    while len(seen.get(0, ())) < total:
        asked, target = examples.draw(steps, batch)
        pieces = [*order.find(steps)]
        assert [piece.row for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
        for piece in pieces:
            targets = target[piece.row : piece.end].tolist()
            seen.setdefault(piece.key[1], []).extend(targets)
        for history, item in zip(asked.history.tolist(), target.tolist(), strict=True):
            # The target is the next item, and the history what was before it, the latest first.
            clicks, at = memory[item]
            past = clicks[max(at - 6, 0) : at][::-1]
            assert history == past + [-1] * (6 - len(past))
        steps += 1
    for stream in range(order.streams):
        spans, last = [order.find_span((stream, 0, 0))], (stream, 0, 0)
        while (last := order.find_next(last))[1] == 0:
            spans.append(order.find_span(last))
        assert max(span.stop - span.first for span in spans) <= 5 * streams.WINDOW
        assert sum(b - a for span in spans for _, a, b in span.pieces) == spans[-1].stop
    counted = Counter(seen[0])
    assert set(counted.values()) == {1}
    assert counted.keys() == memory.keys()
    # The order of the next epoch is another, and a step draws the same whenever it is asked for.
    again = open_examples(log, history=6, ahead=1, seed=3)
    late, soon = (again.draw(step, batch)[1] for step in (steps - 1, 0))
    assert torch.equal(late, target)
    assert torch.equal(soon, examples.draw(0, batch)[1])
    other = open_examples(log, history=6, ahead=1, seed=4).draw(0, batch)[1]
    assert not torch.equal(other, soon)


def in_memory_users(table, log):
    """The clicks of training users and the place there, by item; none for a first click."""
    found, start = {}, 0
    for user, clicks in zip(*np.unique(table["user"], return_counts=True), strict=True):
        items = list(range(start, start + clicks))
        start += clicks
        if user not in log.held:
            found.update({item: (items, at) for at, item in enumerate(items) if at})
    return found


@pytest.mark.usefixtures("small_windows")
def test_a_batch_is_of_all_parts_of_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(survey, "check_held_out", lambda *_: None)
    log = read(put(tmp_path / "log", marked(), group=50), held_out=20)
    examples = open_examples(log, history=6, ahead=3)
    _, target = examples.draw(2, 160)
    # Of 16 streams, each of row groups from anywhere.
    parts = np.bincount(target.numpy() // 600, minlength=10)
    assert np.count_nonzero(parts) >= 8
    _, one = open_examples(log, history=6, ahead=1).draw(2, 160)
    ahead = target - one
    assert set(ahead.tolist()) == {0, 1, 2}
    # No two streams come in one order.
    assert (np.diff(target.numpy()) < 0).mean() > 0.2


def test_targets_and_popularity_are_as_in_memory(tmp_path):
    """The same distribution: of targets, and of how often items are clicked."""
    parquet.write_clicks(tmp_path / "log", 400, 50, 12_000, file=3000)
    log = read(tmp_path / "log", held_out=20)
    whole = pq.read_table(tmp_path / "log")
    memory = in_memory({what: whole[what].to_numpy() for what in ("user", "item")}, held_out=20)
    shares = []
    for one in (log, memory):
        examples = open_examples(one, history=6, ahead=5)
        drawn = torch.cat([examples.draw(step, 512)[1] for step in range(40)])
        shares.append(torch.bincount(drawn, minlength=50) / len(drawn))
        assert examples.popularity.sum() == pytest.approx(1)
        assert torch.allclose(examples.popularity, shares[-1], atol=0.015)
    assert torch.allclose(*shares, atol=0.01)


def test_memory_is_a_window_or_two_of_each_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "WINDOW", 400)
    monkeypatch.setattr(streams, "STREAMS", 4)
    peaks, clicks = [], []
    for size in (100, 800):
        parquet.write_clicks(tmp_path / f"{size}", size * 5, 500, size * 100, file=size * 25)
        table = pq.read_table(tmp_path / f"{size}")
        folder = put(tmp_path / f"{size} cut", {n: table[n] for n in table.column_names}, group=500)
        log = read(folder, held_out=50)
        examples = open_examples(log, history=10, ahead=5)
        tracemalloc.start()
        steps = int(log.examples.sum()) // 64
        for step in range(steps):
            examples.draw(step, 64)
        peaks.append((examples.most_bytes, tracemalloc.get_traced_memory()[1]))
        tracemalloc.stop()
        clicks.append(log.clicks)
    # Of 8 times as many clicks, as much as before.
    assert clicks[1] == 8 * clicks[0]
    assert peaks[1][0] < 1.3 * peaks[0][0]
    # In all, with a few numbers for each row group: a quarter of what the clicks would need.
    assert peaks[1][1] - peaks[0][1] < 8 * (clicks[1] - clicks[0]) / 4
    # Two windows of a row group or two of each of the four streams, 8 bytes a click and 8 a user.
    assert peaks[1][0] < 2 * 4 * 2 * 500 * 9


SMALL = Config(
    dim=16,
    subspaces=4,
    codewords=16,
    history=20,
    batch=128,
    lr=1e-2,
    joint_lr=1e-2,
    temperature=0.1,
    warmup=40,
    steps=20,
    every=10,
    sample=400,
    iterations=5,
)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks") / "log"
    parquet.write_clicks(folder, 1000, 400, 20_000, file=4000)
    return folder


def test_it_learns_as_from_the_log_in_memory(clicks):
    whole = pq.read_table(clicks)
    memory = in_memory({what: whole[what].to_numpy() for what in ("user", "item")})
    config = dataclasses.replace(SMALL, warmup=250, steps=0, dim=32, batch=256, every=50)
    found = [train(log, config).results for log in (memory, read(clicks))]
    kept, streamed = (results["full"]["recall@100"] for results in found)
    assert streamed == pytest.approx(kept, abs=0.03)
    assert streamed > found[1]["popularity"]["recall@100"] + 0.04


@pytest.mark.usefixtures("small_windows")
def test_a_run_goes_on_inside_an_epoch_as_if_it_had_not_stopped(clicks, tmp_path, monkeypatch):
    whole = train(read(clicks), SMALL)

    class StoppedError(Exception):
        pass

    def stop(row):
        if row["step"] == 50:
            raise StoppedError

    log = read(clicks, folder=tmp_path)
    with pytest.raises(StoppedError):
        train(log, SMALL, tmp_path, tell=stop)
    # Nothing but the checkpoint and what was kept of the log.
    monkeypatch.setattr(streamed, "survey", None)
    log = read(clicks, folder=tmp_path)
    done = train(log, SMALL, tmp_path, resume=True)
    assert done.rows == whole.rows
    assert done.results == whole.results
    assert done.quantizer.fingerprint == whole.quantizer.fingerprint
    assert (tmp_path / "items.txt").read_text() == "".join(f"{n}\n" for n in log.names.tolist())


def test_what_was_found_is_kept_until_a_file_changes(tmp_path):
    table, told = rows(), []
    folder = put(tmp_path / "log", table, [700])

    def again(**options):
        told.clear()
        return read(folder, folder=tmp_path / "run", tell=told.append, **options)

    first = again()
    written = (tmp_path / "run" / "log.safetensors").stat().st_mtime_ns
    second = again()
    assert not told
    assert (tmp_path / "run" / "log.safetensors").stat().st_mtime_ns == written
    assert first.fingerprint == second.fingerprint == read(folder).fingerprint
    assert first.names.tolist() == second.names.tolist()
    assert str(first) == str(second)
    # Of other rules it is made again, without a word: they were asked for.
    assert again(min_rating=1.0).fingerprint != first.fingerprint
    assert not told
    # The same rows at another time, and others.
    again()
    put(folder, table, [700])
    assert again().fingerprint == first.fingerprint
    assert len(told) == 1
    assert told[0].startswith("0.parquet has changed since ")
    put(folder, rows(seed=1), [700])
    assert again().fingerprint != first.fingerprint
    (folder / "1.parquet").unlink()
    assert again().users < first.users
    assert told[0].startswith("1.parquet has changed")
    # A damaged one is refused, with its name.
    kept = tmp_path / "run" / "log.safetensors"
    raw = bytearray(kept.read_bytes())
    raw[-1] ^= 1
    kept.write_bytes(raw)
    with pytest.raises(ValueError, match=r"log.safetensors is damaged: the digest of '\w+'"):
        again()


def test_items_by_a_hash(tmp_path):
    table = texts(rows())
    log = read(put(tmp_path / "log", table), hash_items=11)
    plain = read(tmp_path / "log")
    assert log.names is None
    assert log.catalogue == 11
    assert log.rules == {**plain.rules, "hash_items": 11}
    assert "11 rows that items share by a hash" in str(log)
    row = dict(zip(range(plain.catalogue), survey.hash_items(plain.keys, 11), strict=True))
    assert [row[item] for item in plain.items] == log.items.tolist()
    assert users_of(log) == sorted(tuple(row[item] for item in user) for user in users_of(plain))
    assert plain.fingerprint != log.fingerprint
    with pytest.raises(ValueError, match="hash_items must be at least 1, but got hash_items=0"):
        read(tmp_path / "log", hash_items=0)
    (tmp_path / "log.txt").write_text("1 2\n")
    with pytest.raises(ValueError, match=r"hash_items goes with Parquet files, but .* has none"):
        read(tmp_path / "log.txt", hash_items=3)


@pytest.mark.parametrize("named", [False, True])
def test_users_that_are_not_together_are_sorted_first(tmp_path, monkeypatch, named):
    monkeypatch.setattr(grouping, "ROUND", 400)
    monkeypatch.setattr(grouping, "BUCKET", 300)
    monkeypatch.setattr(parquet, "GROUP", 100)
    table = texts(rows()) if named else rows()
    order = np.random.default_rng(0).permutation(1500)
    mixed = pa.table(table).take(order)
    mixed = {what: mixed[what] for what in table}
    folder, told, steps = put(tmp_path / "log", mixed, [400]), [], []
    with pytest.raises(ValueError, match=r"must have the rows of a user together, but one comes"):
        read(folder)
    log = read(
        folder,
        folder=tmp_path / "run",
        tell=told.append,
        progress=lambda done, total: steps.append(done / total),
    )
    assert len(told) == 1
    assert "its 1,500 rows are sorted into" in told[0]
    assert users_of(log) == users_of(read(put(tmp_path / "sorted", table)))
    assert log.name == "log"
    assert max(steps) == 1
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"log", "log.safetensors"}
    sizes = log.source.groups[:, 2]
    assert len(sizes) > 10
    assert (log.lead == 0).all()
    # It is not done again, until something changes.
    monkeypatch.setattr(streamed, "group_users", None)
    again = read(folder, folder=tmp_path / "run", tell=told.append)
    assert again.fingerprint == log.fingerprint
    assert read(folder, folder=tmp_path / "run", min_rating=1.0, tell=told.append).clicks == 1500
    read(folder, folder=tmp_path / "run")
    assert len(told) == 1
    monkeypatch.undo()
    (tmp_path / "run" / "log" / "000000.parquet").unlink()
    again = read(folder, folder=tmp_path / "run", tell=told.append)
    assert f"{tmp_path / 'run' / 'log'} has changed since" in told[1]
    assert again.fingerprint != log.fingerprint
    assert users_of(again) == users_of(read(tmp_path / "sorted"))


def test_a_sort_that_was_stopped_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(grouping, "ROUND", 400)
    monkeypatch.setattr(grouping, "BUCKET", 300)
    table = pa.table(rows()).take(np.random.default_rng(0).permutation(1500))
    folder = put(tmp_path / "log", {what: table[what] for what in table.column_names})
    written, whole = [], {"round": grouping._write_round, "bucket": grouping._write_bucket}

    def stopping(kind, after):
        def write(*arguments):
            if len(written) == after:
                raise OSError(28, "No space left on device")
            written.append(kind)
            return whole[kind](*arguments)

        return write

    for after in (2, 6, 100):
        for kind in whole:
            monkeypatch.setattr(grouping, f"_write_{kind}", stopping(kind, after))
        if after < 100:
            with pytest.raises(OSError, match="No space left"):
                read(folder, folder=tmp_path / "run")
            assert not (tmp_path / "run" / "log").exists()
            assert not (tmp_path / "run" / "log.safetensors").exists()
    log = read(folder, folder=tmp_path / "run")
    # Four rounds and five buckets, none of them twice.
    assert written == ["round"] * 4 + ["bucket"] * 5
    assert log.clicks == read(put(tmp_path / "sorted", rows())).clicks


def bad_folders(folder):
    """Folders of Parquet files with something wrong, by name."""
    table = rows()

    def bad(name, **changed):
        return put(folder / name, {**table, **changed}, [700])

    bad("cut")
    raw = (folder / "cut" / "1.parquet").read_bytes()
    (folder / "cut" / "1.parquet").write_bytes(raw[:-50])
    bad("empty-file")
    (folder / "empty-file" / "1.parquet").write_bytes(b"")
    bad("text")
    (folder / "text" / "1.parquet").write_text("user,item\n1,2\n" * 9)
    bad("flipped")
    raw = bytearray((folder / "flipped" / "1.parquet").read_bytes())
    raw[4:2000] = bytes(1996)
    (folder / "flipped" / "1.parquet").write_bytes(raw)
    bad("other-columns")
    put(folder / "other", {"user": table["user"], "item": table["item"]})
    (folder / "other" / "0.parquet").replace(folder / "other-columns" / "1.parquet")
    bad("other-types")
    put(folder / "another", texts(table))
    (folder / "another" / "0.parquet").replace(folder / "other-types" / "1.parquet")
    put(folder / "no-items", {"user": table["user"], "thing": table["item"]})
    bad("float-items", item=table["item"].astype(float))
    bad("text-ratings", rating=table["rating"].astype(str))
    bad("null-users", user=pa.array([None, *table["user"][1:]], pa.int64()))
    bad("null-ratings", rating=pa.array([*table["rating"][:-1], None]))
    bad("nan-ratings", rating=np.where(np.arange(1500) == 205, np.nan, table["rating"]))
    bad("inf-times", time=np.where(np.arange(1500) == 1499, np.inf, table["time"]))
    bad("huge-items", item=table["item"].astype(np.uint64) + 2**63)
    bad("lines", item=["a\nb"] * 1500)
    bad("nameless", item=[""] * 1500)
    bad("mixed-up", user=np.arange(1500) % 60)
    twice = pa.table([[1], [2], [2]], names=["user", "item", "item"])
    (folder / "two-columns").mkdir()
    pq.write_table(twice, folder / "two-columns" / "0.parquet")
    # Together in each file, but not in all.
    half = {what: values[:700] for what, values in table.items()}
    put(folder / "twice", {w: np.concatenate([v, v]) for w, v in half.items()}, [700], group=2000)
    later = np.concatenate([table["user"], table["user"][1300:]])
    put(folder / "late", {"user": np.append(later, 7), "item": np.arange(len(later) + 1)}, [1500])
    put(folder / "no-rows", {what: values[:0] for what, values in table.items()})
    lists = pa.array([[1, 2, 3]] * 1500)
    bad("half-lists", item=lists)
    put(folder / "short-lists", {"user": np.arange(9), "item": [[1, 2]] * 9, "time": [[1]] * 9})
    put(folder / "user-lists", {"user": [[1]] * 9, "item": [[1, 2]] * 9})
    put(folder / "null-lists", {"user": np.arange(2), "item": [[1, None], [1, 2]]})
    put(folder / "few", {"user": np.repeat(np.arange(4), 12), "item": np.arange(48) % 7})
    put(folder / "short", {"user": np.arange(50), "item": np.arange(50)})
    put(folder / "lonely", marked(60))


BAD = [
    ("cut", "1.parquet is not a parquet file, or is truncated"),
    ("empty-file", "1.parquet is empty"),
    ("text", "1.parquet is not a parquet file, or is truncated"),
    ("flipped", "1.parquet is damaged: "),
    ("other-columns", "1.parquet must have the columns of 0.parquet .*, but has user: whole"),
    ("other-types", "1.parquet must have the columns of 0.parquet .*item: whole numbers.*, but"),
    ("no-items", r"has no column of the items \(item, .*\), but user, thing"),
    ("float-items", "must have whole numbers or text as items, but has double"),
    ("text-ratings", "must have numbers as ratings, but has string"),
    ("null-users", "0.parquet, row group 0 must have no nulls in 'user', but has 1"),
    ("null-ratings", "1.parquet, row group 8 must have no nulls in 'rating', but has 1"),
    ("nan-ratings", "row group 2 must have finite ratings, but row 11 has nan"),
    ("inf-times", "row group 8 must have finite times, but row 23 has inf"),
    ("huge-items", "row group 0 must have users and items below 2⁶³, but has larger ones"),
    ("lines", "row group 0: a name must be in one line, but an item has one in several"),
    ("two-columns", "0.parquet must have one column 'item', but has 2"),
    ("nameless", "row group 0: a name must not be empty, but that of an item is"),
    (
        "mixed-up",
        "mixed-up must have the rows of a user together, but one comes again in .*group 0",
    ),
    ("twice", "twice must have the rows of a user together, but one comes again in .*1.parquet"),
    ("late", "late must have the rows of a user together, but those of some come again"),
    ("no-rows", "no-rows has no rows"),
    ("half-lists", "must have a row for each click, or for each user with lists of items"),
    ("short-lists", "must have as many times as items in every list"),
    ("user-lists", "must have whole numbers or text as users|must have a row for each click"),
    ("null-lists", "must have no nulls in 'item', but has 1"),
    ("few", "few must have at least 5 valid users to hold some out, but has 4"),
    ("short", "short has no valid users: none has 10 items in 50 rows; lower min_items"),
    ("lonely", "lonely cannot be learned: every item of the 12 held-out users is seen by them"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    bad_folders(folder)
    return folder


@pytest.mark.parametrize(("name", "message"), BAD, ids=[name for name, _ in BAD])
def test_bad_files(folders, tmp_path, name, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(folders / name)
    assert "\n" not in str(caught.value)
    # In a run's folder too, where nothing is left; but rows that are not together are sorted.
    if "together" not in message:
        with pytest.raises(ValueError, match=message):
            read(folders / name, folder=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_files_that_change_while_a_run_reads_them(tmp_path):
    table = rows()
    folder = put(tmp_path / "log", table, group=100)
    for changed in (
        {"item": table["item"] + 1},
        {"user": np.roll(table["user"], 5)},
        {"rating": np.full(1500, 5.0)},
    ):
        put(folder, table, group=100)
        examples = open_examples(read(folder), history=5, ahead=3)
        put(folder, {**table, **changed}, group=100)
        examples.reader.log.source._last = (-1, None)
        # A step that reaches the end of each stream, and so all windows.
        with pytest.raises(ValueError, match=r"row group \d+ has changed"):
            examples.draw(0, int(examples.reader.log.examples.sum()))
    put(folder, table, group=100)
    log = read(folder)
    (folder / "0.parquet").unlink()
    log.source._last = (-1, None)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*0.parquet, which was there"):
        open_examples(log, history=5, ahead=3).draw(0, 64)


def test_an_order_of_time_is_refused(clicks):
    with pytest.raises(ValueError, match="stream must be left out for log: Parquet files are read"):
        train(read(clicks), dataclasses.replace(SMALL, stream=True))


def test_without_pyarrow_it_says_what_to_install(clicks, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"log needs pyarrow: pip install 'givens\[formats\]'"):
        read(clicks)


def test_a_vocabulary_of_many_that_grows():
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**63), 2**63 - 1, 200_000)
    found = survey.Vocabulary()
    drawn = [rng.choice(keys, 30_000) for _ in range(12)]
    for part in drawn:
        found.count(part, None)
    parts = found.finish()
    names, counts = np.unique(np.concatenate(drawn), return_counts=True)
    assert np.array_equal(parts["keys"], names)
    assert np.array_equal(parts["counts"], counts)
    numbers = survey.Numbers(len(names), names)
    order = rng.permutation(len(names))
    assert np.array_equal(numbers.find(names[order]), order)
    unknown = np.setdiff1d(rng.integers(-(2**63), 2**63 - 1, 1000), names)
    assert (numbers.find(unknown) == -1).all()


def test_names_are_texts():
    words = ["", "a", "é\u4e00", "b c"]
    raw = [word.encode() for word in words]
    ends = np.cumsum([0, *map(len, raw)])
    names = Names(ends, np.frombuffer(b"".join(raw), np.uint8))
    assert len(names) == 4
    assert names[:] == words
    assert names[1:3] == words[1:3]
    assert names[2:99] == words[2:]
    assert names[4:] == []


def test_a_large_log_is_written_in_pieces(tmp_path):
    parts = list(click_pieces(300, 200, 9000, piece=100, seed=1))
    counts, items = (np.concatenate(part) for part in zip(*parts, strict=True))
    assert len(parts) == 3
    assert len(counts) == 300
    assert counts.min() >= 10
    assert counts.sum() == len(items) == 9000
    assert len(np.unique(items)) > 150
    popular = np.sort(np.bincount(items, minlength=200))[::-1]
    assert popular[:20].sum() > 3 * popular[-20:].sum()
    # Popular in one piece, popular in another; and users have tastes.
    first, last = (np.bincount(part[1], minlength=200) for part in (parts[0], parts[2]))
    assert np.corrcoef(first, last)[0, 1] > 0.5
    user = np.repeat(np.arange(300), counts)
    kinds = len(np.unique(user * 200 + items)) / len(items)
    shuffled = np.random.default_rng(0).permutation(items)
    assert kinds < 0.97 * len(np.unique(user * 200 + shuffled)) / len(items)
    parquet.write_clicks(tmp_path / "log", 300, 200, 9000, file=3000, seed=1)
    table = pq.read_table(tmp_path / "log")
    assert np.array_equal(table["user"].to_numpy(), user)
    assert np.array_equal(table["item"].to_numpy(), items)
    for options, message in (((5, 9, 40), "clicks must be at least 10"), ((0, 9, 0), "users must")):
        with pytest.raises(ValueError, match=message):
            list(click_pieces(*options))


def test_the_examples_in_memory_draw_what_they_drew():
    """Dropout and rows of ranks are inside the draw now; the numbers are the same."""
    examples = Examples(click_log(100, 50, 2000, seed=2), history=5, ahead=3, seed=1)
    plain, target = examples.draw(7, 6)
    dropped, again = examples.draw(7, 6, dropout=0.5)
    assert torch.equal(target, again)
    examples.draw(7, 6)
    share = torch.rand(6, 5, generator=examples.generator)
    assert torch.equal(dropped.history, plain.history.masked_fill(share < 0.5, -1))


def test_metadata_is_small(clicks, tmp_path):
    """What grows with the log is in tensors, not in the header."""
    read(clicks, folder=tmp_path)
    about = files.read_header(tmp_path / "log.safetensors")
    assert len(json.dumps(about.metadata)) < 1000
