import contextlib
import errno
import hashlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings

from givens.storage import files

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor([True, False]),
    "c": torch.randn(3, dtype=torch.bfloat16),
    "d": torch.empty(0, 4, dtype=torch.int64),
    "e": torch.tensor(7, dtype=torch.uint8),
}
METADATA = {"metric": "l2", "ü": [1, 2.5, None, {"x": True}]}


def same(contents):
    return (
        contents.metadata == METADATA
        and list(contents.tensors) == list(TENSORS)
        and all(
            torch.equal(contents.tensors[name], tensor)
            and contents.tensors[name].dtype == tensor.dtype
            for name, tensor in TENSORS.items()
        )
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "x.safetensors"
    files.save(path, "thing", TENSORS, METADATA)
    return path


def test_round_trip_in_plain_safetensors(saved):
    assert same(files.load(saved, "thing"))
    header = files.read_header(saved)
    assert (header.kind, header.metadata) == ("thing", METADATA)
    plain = safetensors.torch.load_file(saved)
    assert all(torch.equal(plain[name], tensor) for name, tensor in TENSORS.items())


def test_no_flipped_bit_changes_what_loads(saved, tmp_path):
    """All of them, one after another."""
    raw = bytearray(saved.read_bytes())
    path = tmp_path / "flipped"
    for place in range(8 * len(raw)):
        raw[place // 8] ^= 1 << place % 8
        path.write_bytes(raw)
        raw[place // 8] ^= 1 << place % 8
        with contextlib.suppress(ValueError):
            assert same(files.load(path, "thing")), place


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_mutation_changes_what_loads(saved, tmp_path, data):
    raw = bytearray(saved.read_bytes())
    match data.draw(st.sampled_from(["flip", "cut", "splice", "zero", "grow"])):
        case "flip":
            for _ in range(data.draw(st.integers(1, 3))):
                raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        case "splice":
            at, to = (data.draw(st.integers(0, len(raw) - 9)) for _ in range(2))
            raw[to : to + 8] = raw[at : at + 8]
        case "zero":
            at = data.draw(st.integers(0, len(raw) - 1))
            raw[at : at + 64] = bytes(len(raw[at : at + 64]))
        case "grow":
            raw += data.draw(st.binary(min_size=1, max_size=20))
    path = tmp_path / "mutated"
    path.write_bytes(raw)
    try:
        assert same(files.load(path, "thing"))
    except ValueError as error:
        message = str(error)
        assert "\n" not in message


def sealed(header, about, data=b""):
    """A file whose seal is right, as a hostile writer would make it."""
    header = {"__metadata__": {"givens": json.dumps(about)}, **header}
    header["__metadata__"]["seal"] = hashlib.sha256(files._canonical(header)).hexdigest()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


ABOUT = {"kind": "thing", "format": 1, "metadata": {}, "digests": {"a": "0"}}
HUGE = {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not a givens file"),
        (b"id,x,y\n1,2,3\n", "not a givens file"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "not a givens file"),
        ((4).to_bytes(8, "little") + b"\xff\xfe{}", "not a givens file"),
        ((50_000).to_bytes(8, "little") + b"[" * 50_000, "header is damaged"),
        ((2).to_bytes(8, "little") + b"{}", "not a givens file"),
        (sealed({}, {**ABOUT, "format": 2}), "has format 2, but this version of givens reads 1"),
        (sealed({}, {**ABOUT, "kind": "other"}), "holds a 'other', not a 'thing'"),
        (sealed({}, [1]), "header is damaged"),
        ((5002).to_bytes(8, "little") + b"[" + b"9" * 5000 + b"]", "header is damaged"),
        (
            sealed({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1.0]}}, ABOUT, b"x"),
            "fit",
        ),
        (sealed(HUGE, ABOUT), "bytes of tensors instead of"),
        (sealed({"a": {**HUGE["a"], "shape": [3] * 9}}, ABOUT), "does not fit its shape"),
        (sealed({"a": {**HUGE["a"], "shape": [-1, -4]}}, ABOUT), "does not fit its shape"),
        (sealed({"a": {**HUGE["a"], "shape": 3}}, ABOUT), "header is damaged"),
        (sealed({"a": {**HUGE["a"], "dtype": "F8"}}, ABOUT), "header is damaged"),
        (
            sealed({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, ABOUT, b"x"),
            "the digest of 'a' does not match",
        ),
        (
            sealed({"b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, ABOUT, b"x"),
            "header is damaged",
        ),
    ],
)
def test_hostile_files_are_one_line(tmp_path, raw, message):
    path = tmp_path / "hostile"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=message) as caught:
        files.load(path, "thing")
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_not_a_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="must be a file"):
            files.load(path, "thing")
        with pytest.raises(ValueError, match="must be a file"):
            files.save(path, "thing", {}, {})
    with pytest.raises(FileNotFoundError):
        files.load(tmp_path / "missing", "thing")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        files.save(tmp_path / "no" / "x", "thing", {}, {})


def test_types_that_files_do_not_hold_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"a must be of a type that files hold, but is torch\.comp"
    ):
        files.save(tmp_path / "x", "thing", {"a": torch.zeros(2, dtype=torch.complex64)}, {})
    assert names(tmp_path) == []


def test_a_failure_leaves_the_old_file_and_nothing_else(saved):
    old = saved.read_bytes()
    with contextlib.suppress(KeyboardInterrupt), files.replacing(saved) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert saved.read_bytes() == old
    assert names(saved.parent) == [saved.name]
    files.check_writable(saved)
    assert saved.read_bytes() == old
    assert names(saved.parent) == [saved.name]


def test_synced_renamed_and_synced_again(saved, monkeypatch):
    """The file before it is renamed, its folder after: else a power cut may leave neither."""
    told = []
    fsync, replace = os.fsync, Path.replace

    def note_sync(descriptor):
        told.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def note_replace(path, target):
        told.append(f"{path} → {target}")
        replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    files.save(saved, "thing", TENSORS, METADATA)
    written = told[0]
    assert told == [written, f"{written} → {saved}", saved.parent]


def test_a_full_disk_leaves_the_old_file(saved):
    old = saved.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=saved.name) as caught:
            files.save(saved, "thing", {"big": torch.zeros(1 << 16)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert saved.read_bytes() == old
    assert names(saved.parent) == [saved.name]


def test_what_a_killed_process_left_is_swept_and_a_living_one_is_not(saved):
    code = (
        "import os, signal, sys; from givens.storage import files\n"
        f"with files.replacing({str(saved)!r}) as temporary:\n"
        "    temporary.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(names(saved.parent)) == 2
    with files.replacing(saved) as living:
        files.save(saved, "thing", TENSORS, METADATA)
        assert names(saved.parent) == sorted([living.name, saved.name])
        living.write_text("last")
    assert names(saved.parent) == [saved.name]
    assert saved.read_text() == "last"


def test_mode_and_link_are_kept(saved, tmp_path):
    saved.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(saved.name)
    files.save(link, "thing", {}, {})
    assert link.is_symlink()
    assert files.load(saved, "thing").tensors == {}
    assert stat.S_IMODE(saved.stat().st_mode) == 0o640


def test_json_and_checksum(tmp_path):
    path = tmp_path / "x.json"
    files.write_json(path, METADATA)
    assert json.loads(path.read_text("utf-8")) == METADATA
    assert files.checksum(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_sealed_json_is_read_as_it_was_written(tmp_path):
    """And no flipped bit of it, nor what has no seal."""
    path, content = tmp_path / "x.json", {"a": [1, 2.5, None], "ü": {"b": "x"}}
    files.write_sealed(path, content)
    assert files.read_sealed(path) == content
    raw = bytearray(path.read_bytes())
    for place in range(8 * len(raw)):
        raw[place // 8] ^= 1 << place % 8
        path.write_bytes(raw)
        raw[place // 8] ^= 1 << place % 8
        with contextlib.suppress(ValueError):
            assert files.read_sealed(path) == content, place
    for text in (json.dumps(content), "[1]", "[" * 100_000, ""):
        path.write_text(text)
        with pytest.raises(ValueError, match="is damaged: its digest does not match, or it has no"):
            files.read_sealed(path)


def test_files_that_belong_together_are_replaced_together(tmp_path):
    first, second = tmp_path / "a", tmp_path / "no" / "b"
    first.write_text("old")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        files.write_together({first: b"new", second: b"new"})
    assert first.read_text() == "old"
    assert names(tmp_path) == ["a"]
    files.write_together({first: b"new", tmp_path / "b": b"new too"})
    assert (first.read_text(), (tmp_path / "b").read_text()) == ("new", "new too")
