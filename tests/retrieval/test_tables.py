"""Split tables: lookups, the optimizer of rows, and their files; ranks are in `test_ranks.py`."""

import re

import pytest
import torch
from ranks import finish, start

from givens.retrieval.config import Config
from givens.retrieval.data import click_log
from givens.retrieval.rows import RowFiles, fill, read_columns
from givens.retrieval.tables import MEMORY, SCALE, RowWise, Table
from givens.retrieval.towers import Towers
from givens.retrieval.train import train
from givens.storage import files


def test_a_lookup_is_that_of_an_embedding():
    table = Table(100, 8, seed=1, number=0)
    plain = torch.nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False)
    ids = torch.tensor([3, 99, 3, 0, 50, 3])
    weights = torch.randn(6, 8)
    (table(ids) * weights).sum().backward()
    (plain(ids) * weights).sum().backward()
    assert torch.equal(table(ids), plain(ids))
    assert table.weight.grad.is_sparse
    torch.testing.assert_close(table.weight.grad.to_dense(), plain.weight.grad)


def test_rows_come_once_and_where_there_is_none_is_said():
    table = Table(100, 8, seed=1, number=0)
    ids = torch.tensor([[7, -1, 7], [-1, 2, 99]])
    rows, at = table.find(ids)
    assert torch.equal(rows, table.weight[[2, 7, 99]])
    assert torch.equal(at, torch.tensor([[1, -1, 1], [-1, 0, 2]]))
    rows, at = table.find(torch.full((2, 3), -1))
    assert torch.equal(rows, torch.zeros(1, 8))
    assert (at == -1).all()


@pytest.mark.parametrize("pool", ["attention", "mean"])
def test_users_are_those_of_whole_tables(pool):
    """The same vectors and gradients, though only the rows of the batch are worked on."""
    split, whole = (Towers(50, 16, history=6, pool=pool, split=one) for one in (True, False))
    whole.load_state_dict(split.state_dict())
    history = torch.randint(-1, 50, (9, 6), generator=torch.Generator().manual_seed(0))
    history[4] = -1
    from givens.retrieval.batches import Inputs

    weights = torch.randn(9, 16)
    for towers in (split, whole):
        (towers.user(Inputs(history)) * weights).sum().backward()
    torch.testing.assert_close(split.user(Inputs(history)), whole.user(Inputs(history)))
    for name, part in split.named_parameters():
        wanted = whole.get_parameter(name).grad
        if wanted is None:
            continue
        got = part.grad.to_dense() if part.grad.is_sparse else part.grad
        torch.testing.assert_close(got, wanted, msg=name)


def test_two_tables_of_a_seed_differ_and_a_seed_is_a_table():
    first, again, other, seeded = (
        Table(70_000, 4, seed=seed, number=number).weight
        for seed, number in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    assert torch.equal(first, again)
    for different in (other, seeded):
        assert not torch.isclose(first, different).all(1).any()
    assert not torch.isclose(first[: 70_000 - (1 << 16)], first[1 << 16 :]).all(1).any()
    assert first.std().item() == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("id_", [100, 2**40])
def test_ids_beyond_the_table_are_refused(id_):
    with pytest.raises(ValueError, match=f"ids must be below the 100 of the table, but got {id_}"):
        Table(100, 8, seed=0, number=0)(torch.tensor([1, id_]))


def test_a_table_that_does_not_fit_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"take more ranks or a smaller dim$") as told:
        Table(1 << 45, 512, seed=0, number=0)
    assert "\n" not in str(told.value)


def test_the_optimizer_of_rows_does_what_it_says():
    table = torch.nn.Parameter(torch.zeros(5, 3, dtype=torch.float64))
    turn = RowWise([table], lr=0.1)
    v, times = [0.0] * 5, [0] * 5
    wanted = table.detach().clone()
    generator = torch.Generator().manual_seed(0)
    for step in range(2 * MEMORY):
        # Row 3 comes twice in a step, row 4 never; row 2 with a gradient of 0.
        rows = [[0, 3, 3], [1, 3, 3], [2]][step % 3]
        g = torch.randn(len(rows), 3, dtype=torch.float64, generator=generator)
        if rows == [2]:
            g.zero_()
        at = torch.tensor([rows])
        table.grad = torch.sparse_coo_tensor(at, g, table.shape, check_invariants=True)
        turn.step()
        whole = torch.zeros(5, 3, dtype=torch.float64).index_add_(0, torch.tensor(rows), g)
        for row in set(rows):
            times[row] += 1
            v[row] += (float(whole[row].square().mean()) - v[row]) / min(times[row], MEMORY)
            if v[row]:
                wanted[row] -= 0.1 * SCALE * whole[row] / v[row] ** 0.5
    torch.testing.assert_close(table.detach(), wanted)
    assert not table[[2, 4]].any()


def columns(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(rows, 3, generator=generator), "a.times": torch.arange(rows)}


def save_as(folder, whole, ranks):
    """What so many ranks would save."""
    saved, total = RowFiles(folder), len(whole["a.times"])
    entries = []
    for rank in range(ranks):
        first, stop = rank * total // ranks, (rank + 1) * total // ranks
        mine = {name: column[first:stop] for name, column in whole.items()}
        entries += saved.save(mine, first, 7)
    return saved, entries


@pytest.mark.parametrize("block", [4, 1 << 18])
def test_what_some_ranks_save_others_load(tmp_path, monkeypatch, block):
    monkeypatch.setattr("givens.retrieval.rows.BLOCK", block)
    whole = columns(23)
    saved, entries = save_as(tmp_path, whole, 4)
    for ranks in (1, 2, 3, 5):
        for rank in range(ranks):
            first, stop = rank * 23 // ranks, (rank + 1) * 23 // ranks
            mine = {name: torch.zeros_like(column[first:stop]) for name, column in whole.items()}
            saved.load(entries, mine, first)
            for name, column in mine.items():
                assert torch.equal(column, whole[name][first:stop])
    for name, column in read_columns(tmp_path, entries).items():
        assert torch.equal(column, whole[name])


def test_rows_that_are_not_as_saved_are_refused(tmp_path):
    saved, entries = save_as(tmp_path, columns(23), 4)
    mine = {name: torch.zeros_like(column) for name, column in columns(23).items()}
    with pytest.raises(ValueError, match=r"rows of a\.weight are missing"):
        saved.load(entries[1:], mine, 0)
    # Another file in its place, whole as it is.
    others, strange = save_as(tmp_path / "other", columns(23, seed=1), 4)
    path = tmp_path / entries[2]["name"]
    was = path.read_bytes()
    path.write_bytes((others.folder / strange[2]["name"]).read_bytes())
    with pytest.raises(ValueError, match="it is not the file that was saved"):
        saved.load(entries, mine, 0)
    path.write_bytes(was[:-1] + bytes([was[-1] ^ 1]))
    with pytest.raises(ValueError, match="is damaged: the digest of"):
        saved.load(entries, mine, 0)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(path.name)):
        saved.load(entries, mine, 0)
    with pytest.raises(ValueError, match="rows of b are missing"):
        fill(tmp_path, entries[:2], {"b": torch.zeros(3)})


def test_files_stay_that_the_last_checkpoint_or_the_best_step_names(tmp_path):
    saved, old = save_as(tmp_path, columns(8), 2)
    saved.kept = old
    _, best = save_as(tmp_path, columns(8), 2)
    save_as(tmp_path, columns(8), 2)
    # What a rank was writing when it was killed.
    (tmp_path / f".{old[0]['name'][:-8]}00.rows.0123abcd.tmp").write_bytes(b"half")
    saved.keep(best)
    kept = {entry["name"] for entry in (*old, *best)}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_without_a_folder_nothing_stays():
    saved = RowFiles()
    entries = saved.save(columns(8), 0, 1)
    folder = saved.folder
    assert (folder / entries[0]["name"]).exists()
    del saved
    assert not folder.exists()


CONFIG = Config(
    dim=16, subspaces=4, codewords=16, history=20, batch=128, lr=1e-2, joint_lr=1e-2,
    temperature=0.1, warmup=20, steps=20, every=10, sample=399, iterations=5, negatives=101,
)  # fmt: skip

FAULTS = """
import errno, os, signal, sys
from pathlib import Path

import torch
import torch.distributed as dist

from givens.retrieval import checkpoint, state as states
from givens.retrieval.data import click_log
from givens.retrieval.train import train
from givens.storage import files
from test_tables import CONFIG

store, folder, fault = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
states.LARGE = 100
log = click_log(1000, 400, 20_000, drift=0.0)
plain, saved = files.save, checkpoint._save


def full(path, kind, *rest):
    if kind == "rows" and "00000030" in Path(path).name and rank == 1:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return plain(path, kind, *rest)


def killed(state, path, entries):
    if state.step == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    return saved(state, path, entries)


if fault == "full":
    files.save = full
else:
    checkpoint._save = killed
try:
    train(log, CONFIG, Path(folder))
except (OSError, ConnectionError) as error:
    (Path(folder) / f"told-{rank}").write_text(f"{type(error).__name__} {error}")
os._exit(0)
"""


@pytest.mark.parametrize("fault", ["full", "killed"])
def test_a_fault_in_a_checkpoint_loses_nothing(tmp_path, monkeypatch, fault):
    """At step 30 of 40, on two ranks; one goes on from the checkpoint before, and ends as ever."""
    monkeypatch.setattr("givens.retrieval.state.LARGE", 100)
    folder = tmp_path / "run"
    ranks = start(FAULTS, 2, tmp_path / "store", folder, fault)
    finish(ranks, [0, 0] if fault == "full" else [-9, 0])
    if fault == "full":
        lines = [(folder / f"told-{rank}").read_text() for rank in range(2)]
        assert lines[0] == lines[1]
        assert lines[0].startswith("OSError [Errno 28] No space left on device")
    else:
        assert (folder / "told-1").read_text().startswith("ConnectionError a rank was lost (")
    named = files.read_header(folder / "checkpoint.safetensors").metadata
    assert named["step"] == 20
    there = {path.name for path in (folder / "tables").glob("*.rows")}
    assert {entry["name"] for entry in named["rows"] + named["best"]["rows"]} <= there
    log = click_log(1000, 400, 20_000, drift=0.0)
    done = train(log, CONFIG, folder, resume=True)
    whole = train(log, CONFIG)
    assert [row["step"] for row in done.rows] == [row["step"] for row in whole.rows]
    for kind in ("full", "index"):
        ends = [one.results[kind]["recall@100"] for one in (done, whole)]
        assert ends[0] == pytest.approx(ends[1], abs=0.01)
    # What the killed one left is gone.
    named = files.read_header(folder / "checkpoint.safetensors").metadata
    there = {path.name for path in (folder / "tables").iterdir()}
    assert there == {entry["name"] for entry in named["rows"] + named["best"]["rows"]}
