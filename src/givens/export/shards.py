"""Inverted lists in shards: encoded separately, searched together or merged into one index.

    FOLDER/00000-….lists codes and ids of some rows, list by list in Faiss's layout
    FOLDER/quantizer-….safetensors
    FOLDER/manifest.json written last: the files of the index, with their checksums

A shard's name and header identify its content: the rows, the quantizer's fingerprint and the state
of the source files. So a stopped build continues where it was, and a new build leaves the old index
intact until the manifest is replaced.

Shards consist of whole slices of `to_faiss` and keep the order of rows: merged, they equal, byte
for byte, the file that `to_faiss` and Faiss would have written.
"""

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import torch

from givens import distributed
from givens.export.faiss import (
    Source,
    Stored,
    check_ids,
    empty_index,
    inverted,
    recording,
    save_index,
    slice_rows,
)
from givens.export.lists import ID, KIND, Ids, Lists, centroids, total
from givens.export.parts import core_of
from givens.quantizer import Quantizer, load
from givens.storage import files, vectors

FORMAT = 1
MANIFEST, LOCK = "manifest.json", "lock"
# The approximate number of vectors in a shard; a worker holds their codes.
ROWS = 1 << 19
# Bytes of mapped shards to read before their pages are dropped.
WINDOW = 1 << 26

Progress = Callable[[float], object]


@dataclass(frozen=True)
class Piece:
    """Rows of one file, with the file's state when the build was planned."""

    address: str
    first: int
    stop: int
    stamp: str


@dataclass(frozen=True)
class Job:
    """The rows of a shard: the first one's position among all, and the files."""

    number: int
    first: int
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(piece.stop - piece.first for piece in self.pieces)

    def read(self) -> vectors.Vectors:
        """Read the vectors; raises if a file has changed."""
        for piece in self.pieces:
            if vectors.stamp(piece.address) != piece.stamp:
                raise ValueError(f"{piece.address} has changed since the build began; run it again")
        parts = [
            vectors.Range(vectors.read(piece.address, "train"), piece.first, piece.stop)
            for piece in self.pieces
        ]
        return vectors.Joined(parts)


@dataclass(frozen=True)
class Shard:
    """A finished shard, as the manifest names it."""

    name: str
    vectors: int
    checksum: str


def plan(sources: Sequence[str], dim: int) -> list[Job]:
    """Divide the vectors of all files into shards."""
    slices = slice_rows(dim)
    room = max(ROWS // slices, 1) * slices
    jobs: list[Job] = []
    pieces: list[Piece] = []
    at, held = 0, 0
    for address in (file for source in sources for file in vectors.list_files(source)):
        x = vectors.read(address, "train")
        stamp = vectors.stamp(address)
        if x.shape[1] != dim:
            raise ValueError(
                f"{address} must have vectors of {dim} dimensions, but has {x.shape[1]}"
            )
        # Workers have folders of their own.
        where = address if vectors.is_remote(address) else str(Path(address).absolute())
        first = 0
        while first < len(x):
            stop = min(first + room - held, len(x))
            pieces.append(Piece(where, first, stop, stamp))
            held, first = held + stop - first, stop
            if held == room:
                jobs.append(Job(len(jobs), at, tuple(pieces)))
                at, held, pieces = at + held, 0, []
    if pieces:
        jobs.append(Job(len(jobs), at, tuple(pieces)))
    return jobs


def encode(q: Quantizer, job: Job, folder: str | Path, ids: Ids | None = None) -> Shard:
    """Write the shard of a job, unless it is there and complete.

    Needs memory for a slice of vectors, and for the shard's codes and ids at most three times.
    """
    claim = {
        "fingerprint": q.fingerprint,
        "job": hashlib.sha256(json.dumps(astuple(job)).encode()).hexdigest(),
        "ids": None if ids is None else hashlib.sha256(ids.tobytes()).hexdigest(),
        "format": FORMAT,
    }
    key = hashlib.sha256(json.dumps(claim).encode()).hexdigest()[:12]
    path = Path(folder) / f"{job.number:05d}-{key}.lists"
    if not _is_whole(path, claim, job.rows):
        names = np.arange(job.first, job.first + job.rows) if ids is None else ids
        source = Source(job.read(), q.dim, None, first=job.first, metric=q.metric)
        sizes, lists = _lists(q, source, check_ids(names, job.rows))
        tensors = {"sizes": torch.from_numpy(sizes), "lists": torch.from_numpy(lists)}
        files.save(path, KIND, tensors, claim)
    return Shard(path.name, job.rows, files.checksum(path))


def encode_here(
    q: Quantizer,
    jobs: Sequence[Job],
    folder: str | Path,
    *,
    ids: Ids | None = None,
    progress: Progress | None = None,
) -> list[Shard]:
    """Write all shards in this process, one after another."""
    shards = []
    for job in jobs:
        shards.append(encode(q, job, folder, ids_of(job, ids)))
        if progress is not None:
            progress(job.rows)
    return shards


def ids_of(job: Job, ids: Ids | None) -> Ids | None:
    """The ids of a job's rows, among those of all."""
    return None if ids is None else ids[job.first : job.first + job.rows]


@contextlib.contextmanager
def building(folder: str | Path) -> Iterator[None]:
    """Create the folder if needed, and lock it against other builds."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} must be a folder for shards, but is a file")
    folder.mkdir(exist_ok=True)
    ours = {LOCK, MANIFEST}
    strange = [
        path.name
        for path in folder.iterdir()
        if path.name not in ours and not _is_ours(path) and not path.name.endswith(".tmp")
    ]
    if strange:
        raise ValueError(f"{folder} must be empty or hold shards, but has {min(strange)}")
    refusal = f"{folder} is being written by another build; wait for it, or take another --output"
    try:
        with files.locked(folder / LOCK, refusal):
            yield
    finally:
        # A failed build leaves nothing.
        with contextlib.suppress(OSError):
            folder.rmdir()


def finish(
    q: Quantizer, shards: Sequence[Shard], folder: str | Path, about: Mapping[str, Any]
) -> None:
    """Write the manifest of finished shards, and delete files that belong to no index."""
    folder = Path(folder)
    name = f"quantizer-{q.fingerprint[:12]}.safetensors"
    q.save(folder / name)
    manifest = {
        **about,
        "kind": KIND,
        "format": FORMAT,
        "quantizer": name,
        "fingerprint": q.fingerprint,
        "vectors": sum(shard.vectors for shard in shards),
        "shards": [shard.__dict__ for shard in shards],
    }
    files.write_sealed(folder / MANIFEST, manifest)
    kept = {name, *(shard.name for shard in shards)}
    for path in folder.iterdir():
        if _is_ours(path) and path.name not in kept:
            path.unlink()


def load_shards(folder: str | Path) -> Stored:
    """Load the index in a folder of shards, with memory-mapped lists and the manifest as record."""
    folder = Path(folder)
    manifest = _manifest(folder)
    q = load(_inside(folder, manifest["quantizer"]))
    if q.fingerprint != manifest["fingerprint"]:
        raise ValueError(f"{folder} is damaged: {manifest['quantizer']} is not its quantizer")
    index = empty_index(q)
    core = inverted(index)
    opened: dict[str, Lists] = {}
    for shard in manifest["shards"]:
        path = _inside(folder, shard["name"])
        if files.checksum(path) != shard["checksum"]:
            raise ValueError(f"{folder} is damaged: {path.name} is not as {MANIFEST} says")
        lists = Lists(path, q, core.code_size, shard["vectors"])
        if other := opened.get(lists.job):
            names = f"{path.name} and {other.path.name}"
            raise ValueError(f"{folder} is damaged: {names} are of the same vectors")
        opened[lists.job] = lists
    # Any: Faiss's stubs are incomplete.
    pointers: Any = getattr(faiss, "InvertedListsPtrVector")()  # noqa: B009
    mapped = [lists.map() for lists in opened.values()]
    for part in mapped:
        pointers.push_back(part)
    together = faiss.HStackInvertedLists(len(mapped), pointers.data())
    core.replace_invlists(together, False)
    index.ntotal = core.ntotal = manifest["vectors"]
    # Faiss only holds pointers.
    index.referenced_objects = [*getattr(index, "referenced_objects", []), together, *mapped]
    return Stored(index, manifest)


def merge(
    q: Quantizer,
    shards: Sequence[Shard],
    folder: str | Path,
    path: str | Path,
    about: Mapping[str, Any],
    progress: Progress | None = None,
) -> None:
    """Merge shards into one index, the file that Faiss would have written.

    Not `faiss.contrib.ondisk`, which writes the lists into a second file. Needs memory for the
    quantizer, a buffer and a window of the shards, for any number of vectors.
    """
    index = empty_index(q, table=False)
    code = inverted(index).code_size
    opened = [Lists(Path(folder) / shard.name, q, code, shard.vectors) for shard in shards]
    sizes = sum((lists.sizes for lists in opened), np.int64(0) * opened[0].sizes)
    index.ntotal = inverted(index).ntotal = int(sizes.sum())
    record = {**about, "fingerprint": q.fingerprint, "vectors": index.ntotal}
    began = time.perf_counter()
    with recording(path, record) as temporary:
        with temporary.open("wb", buffering=1 << 20) as file:
            file.write(_head(index, sizes))
            _copy_lists(opened, sizes, code, file, progress)
        _check_merged(temporary, sizes)
        record["seconds"] = {**about.get("seconds", {}), "merge": time.perf_counter() - began}


def save_parts(
    index: Any,
    q: Quantizer,
    path: str | Path,
    about: Mapping[str, Any],
    *,
    first: int = 0,
    device: torch.device | str = "cpu",
) -> None:
    """Write the one index of vectors of which each rank has a part, in the order of the ranks.

    It is the file that one process writes of all. Parts of inverted files go through shards in a
    folder that ranks share; without lists, the first rank holds the codes of all vectors.

    Args:
        index: from `to_faiss`, of this rank's part.
        q: the quantizer of all parts.
        path: of the index, the same on all ranks.
        about: what its record says.
        first: the number of this part's first vector.
        device: by which ranks exchange codes.
    """
    if distributed.is_alone():
        save_index(index, path, about)
    elif q.coarse is not None:
        folder = Path(path).with_name(f"{Path(path).name}.parts")
        distributed.from_first(lambda: folder.mkdir(exist_ok=True))
        shards = distributed.from_all(lambda: _save_part(index, q, first, folder))
        distributed.from_first(lambda: merge(q, shards, folder, path, about))
        distributed.from_first(lambda: shutil.rmtree(folder))
    else:
        codes = torch.from_numpy(faiss.vector_to_array(core_of(index).codes)).to(device)
        counts = distributed.from_all(lambda: len(codes))
        others = [0] * (len(counts) - 1)
        taken = counts if distributed.is_first() else [0, *others]
        codes = distributed.exchange(codes, [len(codes), *others], taken)
        distributed.from_first(lambda: save_index(_index_of(q, codes), path, about))


def _save_part(index: Any, q: Quantizer, first: int, folder: Path) -> Shard:
    """A rank's lists as a shard, its ids those among all vectors."""
    core = inverted(index)
    lists, code = faiss.downcast_InvertedLists(core.invlists), core.code_size
    sizes = np.array([lists.list_size(number) for number in range(core.nlist)], np.int64)
    raw, at = np.empty(core.ntotal * (code + ID), np.uint8), 0
    for number in np.flatnonzero(sizes).tolist():
        size = int(sizes[number])
        middle, end = at + size * code, at + size * (code + ID)
        raw[at:middle] = faiss.rev_swig_ptr(lists.get_codes(number), size * code)
        ids = faiss.rev_swig_ptr(lists.get_ids(number), size) + first
        raw[middle:end] = ids.view(np.uint8)
        at = end
    path = folder / f"{first:012d}.lists"
    tensors = {"sizes": torch.from_numpy(sizes), "lists": torch.from_numpy(raw)}
    files.save(path, KIND, tensors, {"fingerprint": q.fingerprint, "job": path.name})
    return Shard(path.name, core.ntotal, files.checksum(path))


def _index_of(q: Quantizer, codes: torch.Tensor) -> Any:
    """An index of packed codes, one after another."""
    index = empty_index(q)
    core = core_of(index)
    core.add_sa_codes(codes.cpu().numpy().reshape(-1, core.code_size))
    index.ntotal = core.ntotal
    return index


def _lists(q: Quantizer, source: Source, ids: Ids) -> tuple[Ids, npt.NDArray[np.uint8]]:
    """Encode all vectors: the sizes of all lists, and their bytes."""
    coarse = centroids(q)
    # Kept, since its parts live no longer than it does.
    index = empty_index(q, table=False)
    pq = inverted(index).pq
    N, code, device = len(source.vectors), pq.code_size, q.device
    numbers, codes, at = np.empty(N, np.int64), np.empty((N, code), np.uint8), 0
    for part, _ in source.slices():
        rows = slice(at, at := at + len(part))
        Y = q.rotate(part.to(device))
        owners = q.assign(Y)
        codes[rows] = pq.compute_codes((Y - coarse[owners]).cpu().numpy())
        numbers[rows] = owners.cpu().numpy()
    order = np.argsort(numbers, kind="stable")
    sizes = np.bincount(numbers, minlength=len(coarse)).astype(np.int64)
    codes, raw_ids = codes[order], ids[order].view(np.uint8).reshape(N, ID)
    lists, end, first = np.empty(N * (code + ID), np.uint8), 0, 0
    for size in sizes[sizes > 0].tolist():
        rows = slice(first, first := first + size)
        start, middle = end, end + size * code
        end = middle + size * ID
        lists[start:middle] = codes[rows].reshape(-1)
        lists[middle:end] = raw_ids[rows].reshape(-1)
    return sizes, lists


def _head(index: Any, sizes: Ids) -> bytes:
    """The part of Faiss's file before the lists."""
    core = inverted(index)
    raw = faiss.serialize_index(index).tobytes()
    lead = b"ilar" + np.array([core.nlist, core.code_size], "<u8").tobytes()
    none = lead + b"sprs" + bytes(8)
    if not raw.endswith(none):
        raise ValueError(f"Faiss {faiss.__version__} lays out lists otherwise; build with --shards")
    used = np.flatnonzero(sizes)
    if len(used) > len(sizes) // 2:
        form, table = b"full", sizes
    else:
        form, table = b"sprs", np.stack([used, sizes[used]], 1).ravel()
    table = np.concatenate([[len(table)], table]).astype("<u8")
    return raw.removesuffix(none) + lead + form + table.tobytes()


def _copy_lists(
    shards: Sequence[Lists], sizes: Ids, code: int, out: Any, progress: Progress | None
) -> None:
    with contextlib.ExitStack() as stack:
        maps = []
        for shard in shards:
            file = stack.enter_context(shard.path.open("rb"))
            maps.append(stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        at, since, done = [shard.at for shard in shards], 0, 0
        for number in np.flatnonzero(sizes).tolist():
            counts = [int(shard.sizes[number]) for shard in shards]
            for place, count, raw in zip(at, counts, maps, strict=True):
                out.write(raw[place : place + count * code])
            for place, count, raw in zip(at, counts, maps, strict=True):
                out.write(raw[place + count * code : place + count * (code + ID)])
            at = [a + count * (code + ID) for a, count in zip(at, counts, strict=True)]
            done += int(sizes[number])
            if (done - since) * (code + ID) > WINDOW:
                for raw in maps:
                    raw.madvise(mmap.MADV_DONTNEED)
                if progress is not None:
                    progress(done - since)
                since = done
    if progress is not None:
        progress(done - since)


def _check_merged(path: Path, sizes: Ids) -> None:
    """Check that Faiss reads from the file what was written."""
    flags = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE
    index = faiss.read_index(str(path), flags)
    core = inverted(index)
    read = [core.invlists.list_size(number) for number in range(core.nlist)]
    if read != sizes.tolist() or core.ntotal != sizes.sum():
        raise ValueError(f"Faiss {faiss.__version__} lays out lists otherwise; build with --shards")


def _is_whole(path: Path, claim: Mapping[str, Any], rows: int) -> bool:
    try:
        contents = files.load(path, KIND)
    except (FileNotFoundError, ValueError):
        return False
    sizes = contents.tensors.get("sizes", torch.empty(0)).numpy()
    return contents.metadata == claim and sizes.dtype == np.int64 and total(sizes, rows) == rows


def _is_ours(path: Path) -> bool:
    return path.suffix == ".lists" or path.name.startswith("quantizer-")


def _manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest, and check its types and counts."""
    if not (folder / MANIFEST).exists():
        raise ValueError(
            f"{folder} holds no finished index: there is no {MANIFEST}; run `givens build` again"
        )
    # An earlier version's has no seal; running the build again reuses its shards.
    try:
        manifest = files.read_sealed(folder / MANIFEST)
        shards = manifest["shards"]
        names, counts = ([shard[of] for shard in shards] for of in ("name", "vectors"))
        if (
            (manifest["kind"], manifest["format"]) == (KIND, FORMAT)
            and all(isinstance(name, str) for name in (manifest["quantizer"], *names))
            and all(type(count) is int and count > 0 for count in counts)
            and (len(set(names)), sum(counts)) == (len(shards) or -1, manifest["vectors"])
        ):
            return manifest
    except (ValueError, LookupError, TypeError):
        pass
    raise ValueError(
        f"{folder} is damaged: {MANIFEST} is not that of an index; run `givens build` again"
    )


def _inside(folder: Path, name: str) -> Path:
    """The path of a file that a manifest names, which must be in its folder."""
    path = folder / name
    home = Path(os.path.realpath(folder))
    if "\0" in name or Path(os.path.realpath(path)).parent != home:
        raise ValueError(f"{folder} is damaged: {MANIFEST} names {name!r:.80}, outside the folder")
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is incomplete: {path.name} is missing; build it again")
    return path
