"""Atomic files: written to a temporary file in the same folder, synced and renamed.

Tensors are saved as a safetensors file with a kind, a format version, metadata and a digest for
each tensor; a digest of the header covers the rest. A file that does not match is rejected: it
loads as it was saved or not at all. Nothing in a file is ever executed.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import secrets
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if sys.platform != "win32":
    import fcntl

FORMAT = 1
# Our headers have a few kilobytes; longer ones are not parsed.
HEADER_LIMIT = 1 << 20
MOST_AXES = 8
# Temporary files of this process, from before they are created until they are gone.
_written: set[Path] = set()
_claiming = threading.Lock()
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Header:
    """The header of a file."""

    kind: str
    metadata: dict[str, Any]
    # In file order.
    tensors: dict[str, dict[str, Any]]
    digests: dict[str, str]
    # A digest of all of it.
    seal: str


@dataclass(frozen=True)
class Contents:
    """The contents of a file."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


def save(
    path: str | Path, kind: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> str:
    """Write tensors and metadata (JSON) as a file of this kind; an old file is replaced.

    Returns its seal.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries: dict[str, Any] = {}
    digests: dict[str, str] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        if tensor.dtype not in names:
            raise ValueError(f"{name} must be of a type that files hold, but is {tensor.dtype}")
        entries[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        digests[name] = hashlib.sha256(_bytes(tensor)).hexdigest()
    about = {"kind": kind, "format": FORMAT, "metadata": dict(metadata), "digests": digests}
    strings = {"givens": _canonical(about).decode()}
    header: dict[str, Any] = {"__metadata__": strings, **entries}
    strings["seal"] = hashlib.sha256(_canonical(header)).hexdigest()
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # Tensors start at a multiple of 8, as the format recommends.
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"{path} would have a header of {len(text):,} bytes: too many to be read")
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(_bytes(tensor))
    return strings["seal"]


def load(path: str | Path, kind: str) -> Contents:
    """Load a file of this kind. Raises ValueError if it is damaged."""
    with opened(path, kind) as (header, tensors):
        return Contents(dict(tensors), header.metadata)


@contextlib.contextmanager
def opened(path: str | Path, kind: str) -> Iterator[tuple[Header, Iterator[tuple[str, Tensor]]]]:
    """The header of a file of this kind, and its tensors, read and checked one after another."""
    with _open(path) as file:
        header = _header(path, file)
        if header.kind != kind:
            raise ValueError(f"{path} holds a {header.kind!r:.40}, not a {kind!r}")
        yield header, _tensors(path, file, header)


def read_header(path: str | Path) -> Header:
    """Read and check the header of a file, without its tensors."""
    with _open(path) as file:
        return _header(path, file)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary file beside `path`, which replaces it if the block ends without an error.

    The old file stays until the new one is complete and on the disk, even if the process or the
    machine stops. Temporary files of killed processes are removed by the next writer.
    """
    # Replace the file that a link points to, not the link.
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise ValueError(f"{path} must be a file, but is a folder or a device")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to write {target.name} into")
    try:
        sweep(target.parent, _escape(target.name))
        temporary, descriptor = _claim(target)
        try:
            yield temporary
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            os.fsync(descriptor)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
            os.close(descriptor)
            _written.discard(temporary)
        _sync_folder(target.parent)
    except OSError as error:
        # Name the user's path, not the temporary one, also where the system names none.
        named = Path(str(error.filename or target))
        ours = named in (target, target.parent) or named.name.startswith(f".{target.name}.")
        if error.errno is None or not ours:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def remove_unfinished(*, for_good: bool = False) -> None:
    """Remove the temporary files of this process, for a signal handler.

    `for_good` also stops other threads from starting another file: the process is about to end.
    """
    _claiming.acquire()
    for temporary in list(_written):
        temporary.unlink(missing_ok=True)
    if not for_good:
        _claiming.release()


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON for people and programs to read."""
    with replacing(path) as temporary:
        temporary.write_bytes(json_bytes(content))


def write_sealed(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write JSON that includes a digest of the rest."""
    write_json(path, {**content, "seal": _seal(content)})


def read_sealed(path: str | Path) -> dict[str, Any]:
    """Read what `write_sealed` wrote. Raises ValueError if it is damaged."""
    with _open(path) as file:
        text = file.read()
    try:
        content = json.loads(text)
        if content.pop("seal") == _seal(content):
            return dict(content)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise _damage_error(path, "its digest does not match, or it has none")


def record_path(path: str | Path) -> Path:
    """The path of a file's record: beside it, as index.faiss.json."""
    return Path(path).with_name(Path(path).name + ".json")


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write files that belong together: none is renamed before all are on the disk."""
    with contextlib.ExitStack() as stack:
        for path, content in contents.items():
            with stack.enter_context(replacing(path)).open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())


def npy_bytes(table: npt.NDArray[Any]) -> bytes:
    """An array as a .npy file; numpy's own writer does not say why it fails."""
    content = io.BytesIO()
    np.save(content, table, allow_pickle=False)
    return content.getvalue()


def png(figure: Any) -> bytes:
    """A matplotlib figure as PNG; matplotlib's own writer does not say why it fails."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130, format="png")
    return picture.getvalue()


def json_bytes(content: Any) -> bytes:
    """JSON for people and programs to read.

    What is no UTF-8 in the name of a file becomes an escape of JSON, which reads as it was.
    """
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")


def check_writable(path: str | Path) -> None:
    """Raise, before the work is done, if its result could not be written here."""
    with contextlib.suppress(_NotMeantError), replacing(path):
        raise _NotMeantError


@contextlib.contextmanager
def locked(path: str | Path, refusal: str) -> Iterator[None]:
    """Hold a lock file; a second holder raises. The lock ends with its process.

    Not filelock, which leaves its file behind: a failed build must leave nothing.
    """
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            if sys.platform != "win32":
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between the two calls its holder may have removed the file.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), Path(path).stat()):
                    break
        except BlockingIOError as error:
            os.close(descriptor)
            raise ValueError(refusal) from error
        os.close(descriptor)
    try:
        yield
    finally:
        Path(path).unlink(missing_ok=True)
        os.close(descriptor)


def checksum(path: str | Path) -> str:
    """SHA-256 of a file."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _NotMeantError(Exception):
    """Leave a `replacing` block without replacing."""


def _open(path: str | Path) -> BufferedReader:
    # A pipe would block for ever.
    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise ValueError(f"{path} must be a file, but is a folder or a device")
    return Path(path).open("rb")


def _header(path: str | Path, file: BufferedReader) -> Header:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    # Checked before that many bytes are read.
    if size < 8 or length > min(size - 8, HEADER_LIMIT):
        raise ValueError(f"{path} is not a givens file, or is truncated")
    header = _parse(path, file.read(length))
    try:
        strings = header["__metadata__"]
        seal = strings.pop("seal")
        if hashlib.sha256(_canonical(header)).hexdigest() != seal:
            raise _damage_error(path, "the digest of its header does not match")
        about = _parse(path, strings["givens"])
        if about["format"] != FORMAT:
            raise ValueError(
                f"{path} has format {about['format']!r:.40}, "
                f"but this version of givens reads {FORMAT}"
            )
        del header["__metadata__"]
        _check_layout(path, header, size - 8 - length)
        digests = {name: about["digests"][name] for name in header}
        return Header(str(about["kind"]), dict(about["metadata"]), header, digests, seal)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a givens file, or its header is damaged") from error


def _tensors(
    path: str | Path, file: BufferedReader, header: Header
) -> Iterator[tuple[str, Tensor]]:
    for name, entry in header.tensors.items():
        start, end = entry["data_offsets"]
        # Read, not memory-mapped: a file cut short meanwhile is an error, not a crash.
        data = torch.empty(end - start, dtype=torch.uint8)
        if file.readinto(_bytes(data)) != end - start:
            raise _damage_error(path, f"it ends inside {name!r}")
        if hashlib.sha256(_bytes(data)).hexdigest() != header.digests[name]:
            raise _damage_error(path, f"the digest of {name!r} does not match")
        yield name, data.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])


def _parse(path: str | Path, text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a givens file, or its header is damaged") from error


def _check_layout(path: str | Path, entries: dict[str, Any], size: int) -> None:
    """Check the sizes of tensors, and that they fill the file without gap or overlap."""
    at = 0
    for name, entry in entries.items():
        (start, end), shape = entry["data_offsets"], entry["shape"]
        fits = len(shape) <= MOST_AXES
        fits = fits and all(type(number) is int and number >= 0 for number in (end, *shape))
        room = DTYPES[entry["dtype"]].itemsize * math.prod(shape) if fits else -1
        if start != at or end - start != room:
            raise _damage_error(path, f"{name!r} does not fit its shape and offset")
        at = end
    if at != size:
        raise _damage_error(path, f"it has {size} bytes of tensors instead of {at}")


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    # A damaged header may have half a surrogate pair, which must be hashed, too.
    return text.encode("utf-8", "surrogatepass")


def _seal(content: Mapping[str, Any]) -> str:
    # As in JSON: tuples become lists, and keys strings.
    return hashlib.sha256(_canonical(json.loads(json.dumps(content)))).hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _damage_error(path: str | Path, how: str) -> ValueError:
    return ValueError(f"{path} is damaged: {how}")


def _claim(target: Path) -> tuple[Path, int]:
    """Create a temporary file beside the target and lock it; the lock ends with its process."""
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        with _claiming:
            _written.add(temporary)
            descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        if sys.platform == "win32":
            return temporary, descriptor
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Between the two calls another process may have removed it.
        if temporary.exists():
            return temporary, descriptor
        os.close(descriptor)


def sweep(folder: Path, names: str) -> None:
    """Remove what killed processes left of files of these names: temporary ones nobody locks."""
    if sys.platform == "win32":
        return
    for path in folder.glob(f".{names}.????????.tmp"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _sync_folder(folder: Path) -> None:
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
