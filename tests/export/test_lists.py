"""Folders of shards whose seals are right and whose contents are not, as a hostile writer makes."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import givens
from givens.export import shards
from givens.export.faiss import to_faiss
from givens.export.shards import MANIFEST, load_shards
from givens.storage import files

N, n, L, ROWS = 300, 8, 5, 100


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Three shards."""
    monkeypatch.setattr("givens.export.source.BUFFER", n * ROWS)
    monkeypatch.setattr(shards, "ROWS", ROWS)


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, n, generator=generator)
    np.save(tmp_path / "x.npy", x.numpy())
    build(tmp_path, quantizer(x), "x.npy")
    return tmp_path / "parts"


def quantizer(x):
    return givens.Quantizer(
        torch.eye(n), x[:128].reshape(16, 4, 16)[..., :2].transpose(0, 1), x[:L]
    )


def build(root, q, source):
    with shards.building(root / "parts"):
        made = shards.encode_here(q, shards.plan([str(root / source)], n), root / "parts")
        shards.finish(q, made, root / "parts", {"seed": 3})


def manifest(folder):
    return files.read_sealed(folder / MANIFEST)


def change(folder, **fields):
    """Fields of the manifest, under a seal of its own."""
    files.write_sealed(folder / MANIFEST, {**manifest(folder), **fields})


def forge(folder, **parts):
    """Tensors and claims of the first shard, under seals of their own."""
    held = manifest(folder)
    path = folder / held["shards"][0]["name"]
    contents = files.load(path, "lists")
    tensors = {name: parts.pop(name, tensor) for name, tensor in contents.tensors.items()}
    files.save(path, "lists", tensors, contents.metadata | parts)
    held["shards"][0]["checksum"] = files.checksum(path)
    files.write_sealed(folder / MANIFEST, held)


def first_shard(folder, **fields):
    held = manifest(folder)["shards"]
    change(folder, shards=[{**held[0], **fields}, *held[1:]])


def sizes(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def listed_twice(folder):
    held = manifest(folder)
    first = held["shards"][0]
    change(folder, shards=[*held["shards"], first], vectors=N + ROWS)


def copied(folder):
    held = manifest(folder)
    first = held["shards"][0]
    shutil.copy(folder / first["name"], folder / "again.lists")
    change(folder, shards=[*held["shards"], {**first, "name": "again.lists"}], vectors=N + ROWS)


def elsewhere(name, *, link=False):
    """The first shard is another file, which is as it was."""

    def move(folder):
        held = manifest(folder)["shards"]
        outside = folder.parent / "outside.lists"
        (folder / held[0]["name"]).rename(outside)
        if link:
            (folder / name).symlink_to(outside)
        first_shard(folder, name=name.format(root=folder.parent))

    return move


def edited(folder):
    """By hand: a number, and no seal for it."""
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"vectors": 300', '"vectors": 200'))


def without_seal(folder):
    (folder / MANIFEST).write_text(json.dumps(manifest(folder)))


def pipe(folder):
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)


DAMAGE = {
    "edited": (edited, "is damaged: manifest.json is not that of an index"),
    "no seal": (without_seal, "manifest.json is not that of an index; run `givens build` again"),
    "nested": (lambda f: (f / MANIFEST).write_text("[" * 100_000), "is not that of an index"),
    "pipe": (pipe, "is not that of an index"),
    "list": (lambda f: (f / MANIFEST).write_text("[1]"), "is not that of an index"),
    "no shards": (lambda f: change(f, shards=[], vectors=0), "is not that of an index"),
    "shards are text": (lambda f: change(f, shards="abc"), "is not that of an index"),
    "shards are numbers": (lambda f: change(f, shards=7), "is not that of an index"),
    "quantizer is a number": (lambda f: change(f, quantizer=7), "is not that of an index"),
    "no name": (lambda f: change(f, shards=[{"vectors": N}]), "is not that of an index"),
    "count is true": (lambda f: first_shard(f, vectors=True), "is not that of an index"),
    "count is negative": (lambda f: first_shard(f, vectors=-100), "is not that of an index"),
    "count is too much": (lambda f: first_shard(f, vectors=200), "is not that of an index"),
    "total is too much": (lambda f: change(f, vectors=1 << 40), "is not that of an index"),
    "listed twice": (listed_twice, "is not that of an index"),
    "copied": (copied, "are of the same vectors"),
    "above": (elsewhere("../outside.lists"), "names '../outside.lists', outside the folder"),
    "absolute": (elsewhere("{root}/outside.lists"), "outside the folder"),
    "link": (elsewhere("in.lists", link=True), "names 'in.lists', outside the folder"),
    "no name at all": (lambda f: first_shard(f, name=""), "names '', outside the folder"),
    "zero byte": (lambda f: first_shard(f, name="a\0b"), "outside the folder"),
    "quantizer elsewhere": (
        lambda f: change(f, quantizer="../q.safetensors"),
        "outside the folder",
    ),
    "huge size": (lambda f: forge(f, sizes=sizes(1 << 40, 0, 0, 0, 0)), "do not have 100 vectors"),
    "negative size": (lambda f: forge(f, sizes=sizes(-5, 105, 0, 0, 0)), "not have 100 vectors"),
    "overflow": (lambda f: forge(f, sizes=sizes(*[1 << 62] * 4, 100)), "not have 100 vectors"),
    "too few": (lambda f: forge(f, sizes=sizes(99, 0, 0, 0, 0)), "do not have 100 vectors"),
    "more lists": (lambda f: forge(f, sizes=sizes(100, 0, 0, 0, 0, 0)), "to another quantizer"),
    "short": (lambda f: forge(f, lists=torch.zeros(99, dtype=torch.uint8)), "not have 100 vectors"),
    "other quantizer": (lambda f: forge(f, fingerprint="0"), "to another quantizer"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_folder_that_is_not_as_it_was_built_is_refused(folder, name):
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        load_shards(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_it_answers_as_one_index(folder):
    x = np.load(folder.parent / "x.npy")
    stored, whole = load_shards(folder), to_faiss(quantizer(torch.from_numpy(x)), x)
    for a, b in zip(stored.index.search(x, 5), whole.search(x, 5), strict=True):
        assert np.array_equal(a, b)
    assert stored.record["seed"] == 3


@pytest.mark.parametrize("name", ["huge size", "negative size", "too few"])
def test_a_forged_shard_is_built_again(folder, name):
    """Its claim is what the build would write, and its sizes are not."""
    DAMAGE[name][0](folder)
    x = torch.from_numpy(np.load(folder.parent / "x.npy"))
    build(folder.parent, quantizer(x), "x.npy")
    assert load_shards(folder).index.ntotal == N


def test_a_forged_shard_is_not_merged(folder):
    q = quantizer(torch.from_numpy(np.load(folder.parent / "x.npy")))
    forge(folder, sizes=sizes(1 << 40, 0, 0, 0, 0))
    made = [shards.Shard(**shard) for shard in manifest(folder)["shards"]]
    with pytest.raises(ValueError, match="do not have 100 vectors"):
        shards.merge(q, made, folder, folder.parent / "one.faiss", {})
    assert not Path(folder.parent / "one.faiss").exists()


def test_a_link_that_stays_in_the_folder_is_followed(folder):
    held = manifest(folder)["shards"]
    (folder / held[0]["name"]).rename(folder / "moved")
    (folder / held[0]["name"]).symlink_to("moved")
    assert load_shards(folder).index.ntotal == N
