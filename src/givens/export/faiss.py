"""A Quantizer as an index that Faiss loads, adds to and searches, and back.

    IndexPreTransform           y = A x with A = Rᵀ; for cosine, x is normalised before
      over IndexPQ, IndexIVFPQ  the codebooks, and the coarse centroids as centres of the lists
      or their FastScan forms   for 16 codewords

Codes are Faiss's own, code for code, except where two codewords are equally near within rounding.
Faiss packs codes in ⌈log₂ K⌉ bits: where K is no power of two, the codebooks are filled up with
codewords so far away that none is ever chosen, and `from_faiss` takes them off again.

To a GPU goes what Faiss takes there: `faiss.index_cpu_to_gpu(resources, 0, to_faiss(q, x))` for
"ivfpq" with 256 codewords, by the GPU build of Faiss.
"""

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import givens
from givens.export import NPROBE
from givens.quantizer import Metric, Quantizer
from givens.rotation import determinant
from givens.storage import files
from givens.storage.vectors import chunks

try:
    import faiss
except ImportError as error:
    raise ImportError("a Faiss index needs faiss: pip install 'givens[faiss]'") from error

Kind = Literal["pq", "ivfpq", "pq-fastscan", "ivfpq-fastscan"]

# Its square times any width is still a float32, and no vector is nearer to it than to a codeword.
FAR = 1e15
# Numbers handed to Faiss at once.
BUFFER = 1 << 21


@dataclass(frozen=True)
class Stored:
    """An index from a file, and what the record beside the file says of it."""

    index: Any
    record: dict[str, Any] | None


def to_faiss(
    q: Quantizer,
    vectors: Any = None,
    *,
    kind: Kind | None = None,
    ids: npt.ArrayLike | None = None,
    progress: Callable[[float], object] | None = None,
) -> Any:
    """A Faiss index with the quantizer's parts and the vectors' codes.

    Args:
        q: the quantizer.
        vectors: (N, n), a tensor, an array or a file from `givens.storage.vectors.read`, streamed;
            none gives an empty index that Faiss can add to.
        kind: by default "ivfpq" with coarse centroids and "pq" without; the FastScan forms take
            16 codewords.
        ids: (N,) what the index answers with, instead of the vectors' positions.
        progress: is told of how many vectors were done, each time some were; of halves of them
            where they are read twice.
    """
    index = empty_index(q, kind)
    if ids is not None and q.coarse is None:
        index = faiss.IndexIDMap2(index)
    if vectors is not None:
        _add(index, _core(index), q, Source(vectors, q.dim, ids, progress))
    elif ids is not None:
        raise ValueError("ids must come with vectors, but got no vectors")
    return index


def empty_index(q: Quantizer, kind: Kind | None = None, *, table: bool = True) -> Any:
    """A Faiss index with the quantizer's parts and no vectors.

    The table lets an inverted file search faster and takes up to 2 GB: not for one that is written.
    """
    kind = kind or ("pq" if q.coarse is None else "ivfpq")
    _check_kind(q, kind)
    metric = faiss.METRIC_L2 if q.metric == "l2" else faiss.METRIC_INNER_PRODUCT
    n, D, nbits = q.dim, q.subspaces, max(1, (q.codewords - 1).bit_length())
    # Any: the stubs of Faiss know only some of its members.
    core: Any
    form: Any
    if q.coarse is None:
        form = faiss.IndexPQFastScan if kind.endswith("fastscan") else faiss.IndexPQ
        core = form(n, D, nbits, metric)
    else:
        form = faiss.IndexIVFPQFastScan if kind.endswith("fastscan") else faiss.IndexIVFPQ
        core = form(faiss.IndexFlat(n, metric), n, len(q.coarse), D, nbits, metric)
        core.by_residual = True
        core.nprobe = min(NPROBE, core.nlist)
    core.is_trained = True
    linear = faiss.LinearTransform(n, n, False)
    linear.is_trained = True
    index: Any = faiss.IndexPreTransform(linear, core)
    replace_parts(index, q, table=table)
    if q.metric == "cosine":
        index.prepend_transform(faiss.NormalizationTransform(n, 2.0))
    return index


def from_faiss(index: Any) -> Quantizer:
    """The Quantizer in a Faiss index: OPQ or any rotation, over PQ or IVFPQ or a FastScan form.

    A rotation of determinant −1, as Faiss's OPQ makes, has its last column flipped together with
    the last coordinate of codebooks and centroids, which changes no code and no distance.
    """
    if not index.is_trained:
        raise ValueError("index must be trained, but is not")
    A, normalised, core = _unwrapped(index)
    pq, nlist = core.pq, getattr(core, "nlist", 0)
    if nlist and not core.by_residual:
        raise ValueError("index must encode residuals, but its by_residual is off")
    if core.metric_type not in (faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT):
        raise ValueError(f"index must be by L2 or inner product, but got {core.metric_type}")
    metric: Metric = "l2"
    if core.metric_type == faiss.METRIC_INNER_PRODUCT:
        metric = "cosine" if normalised else "ip"
    elif normalised:
        raise ValueError("index must not normalise vectors that it compares by L2")
    R = torch.from_numpy(A.T.copy())
    codebooks = torch.from_numpy(faiss.vector_to_array(pq.centroids))
    codebooks = codebooks.reshape(pq.M, pq.ksub, pq.dsub)
    codebooks = codebooks[:, : int((codebooks < FAR / 2).all(2).all(0).sum())]
    coarse = torch.from_numpy(core.quantizer.reconstruct_n(0, nlist)) if nlist else None
    if determinant(R.double()) < 0:
        R[:, -1] *= -1
        codebooks[-1, :, -1] *= -1
        if coarse is not None:
            coarse[:, -1] *= -1
    return Quantizer(R, codebooks, coarse, metric)


def fit_opq(
    vectors: Any,
    subspaces: int,
    codewords: int = 256,
    coarse: int = 0,
    *,
    metric: Metric = "l2",
    identity: bool = False,
) -> Quantizer:
    """What Faiss's own OPQ and PQ make of vectors, with its defaults: to compare with.

    Its rotation starts at random, or from the identity where that is asked for.
    """
    nbits = (codewords - 1).bit_length()
    if codewords != 1 << nbits:
        raise ValueError(f"codewords must be a power of two for Faiss, but got {codewords}")
    x = torch.cat(list(chunks(vectors, BUFFER)))
    if metric == "cosine":
        x = torch.nn.functional.normalize(x)
    n = x.shape[1]
    lists = f"IVF{coarse}," if coarse else ""
    by = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    # "np": Faiss would reorder codewords, which changes no distance and takes longer than k-means.
    text = f"OPQ{subspaces}_{n},{lists}PQ{subspaces}x{nbits}{'' if coarse else 'np'}"
    index: Any = faiss.index_factory(n, text, by)
    rotation: Any = faiss.downcast_VectorTransform(index.chain.at(0))
    rotation.pq = alternated = faiss.ProductQuantizer(n, subspaces, nbits)
    if identity:
        # What training finds in A it starts from.
        faiss.copy_array_to_vector(np.eye(n, dtype=np.float32).ravel(), rotation.A)
    # They warn of fewer than 39 vectors for each codeword, which is what there may be.
    for pq in (alternated, _core(index).pq):
        pq.cp.min_points_per_centroid = 1
    index.train(x.numpy())
    q = from_faiss(index)
    return Quantizer(q.rotation, q.codebooks, q.coarse, metric)


def save_index(index: Any, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
    """Write an index and, beside it in `path.json`, its record with `about` in it."""
    record = {
        **(about or {}),
        "fingerprint": from_faiss(index).fingerprint,
        "vectors": index.ntotal,
    }
    with recording(path, record) as temporary:
        try:
            faiss.write_index(index, str(temporary))
        except RuntimeError as error:
            # Faiss's own words end in the system's: "… (No space left on device)".
            reason = re.search(r"\(([^()]*)\)\s*$", str(error))
            raise OSError(f"{path}: {reason[1] if reason else _line(error)}") from error


@contextlib.contextmanager
def recording(path: str | Path, record: Mapping[str, Any]) -> Iterator[Path]:
    """A temporary file that becomes the index at `path`, with its record beside it.

    The record goes first and keeps the old one until the index is in its place, so that whenever
    the process stops there is an index and a record that belong together.
    """
    record_path = _record_path(path)
    with files.replacing(path) as temporary:
        yield temporary
        whole = {
            **record,
            "checksum": files.checksum(temporary),
            "givens": givens.__version__,
            "faiss": faiss.__version__,
        }
        previous: list[dict[str, Any]] = []
        # A damaged record is no reason to keep it.
        with contextlib.suppress(ValueError):
            previous = _records(path)
        files.write_json(record_path, {**whole, "previous": previous})
    files.write_json(record_path, whole)


def load_index(path: str | Path, *, mapped: bool = False) -> Stored:
    """Read an index and its record. One whose bytes are not as recorded is refused.

    With `mapped`, inverted lists stay on the disk and are read where a search needs them.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no index {path}; make one with `givens build`")
    record = None
    if records := _records(path):
        checksum = files.checksum(path)
        record = next((one for one in records if one.get("checksum") == checksum), None)
        if record is None:
            raise ValueError(
                f"{path} is not as {_record_path(path).name} says: it is damaged, or another "
                "program has changed it; if so, delete the record"
            )
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP if mapped else 0)
        if mapped and not _holds_lists(index, path):
            index = faiss.read_index(str(path))
        return Stored(index, record)
    except RuntimeError as error:
        # Faiss ends with what the system said last, of whatever it said it.
        reason = re.sub(r"\s*\([^()]*\)$", "", _line(error))
        raise ValueError(f"{path} is not a Faiss index, or not all of one: {reason}") from error


def _holds_lists(index: Any, path: str | Path) -> bool:
    """Whether what Faiss mapped is in the index's own file.

    Lists in a file beside it are on the disk anyway, and this flag leaves them without memory.
    """
    lists = faiss.downcast_InvertedLists(inverted(index).invlists) if inverted(index) else None
    return getattr(lists, "filename", "") in ("", str(path))


def inverted(index: Any) -> Any:
    """The inverted file inside an index, whose `nprobe` can be set, or None."""
    core = _core(index)
    return core if hasattr(core, "nlist") else None


def is_quantized(index: Any) -> bool:
    """Whether an index has a product quantizer; Faiss has more kinds."""
    return hasattr(_core(index), "pq")


def code_size(index: Any) -> int | None:
    """Bytes of a vector's code; None where an index has none, as a graph."""
    if is_quantized(index):
        return int(_core(index).pq.code_size)
    try:
        return int(index.sa_code_size())
    except RuntimeError:
        return None


def metric_of(index: Any) -> Metric:
    """What an index of any kind ranks by: after a normalisation, it is the cosine."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexIDMap):
        return metric_of(index.index)
    by = index.metric_type
    if by not in (faiss.METRIC_L2, faiss.METRIC_INNER_PRODUCT):
        raise ValueError(f"index must be by L2 or inner product, but got {by}")
    if isinstance(index, faiss.IndexPreTransform):
        chain: Any = index.chain
        if isinstance(faiss.downcast_VectorTransform(chain.at(0)), faiss.NormalizationTransform):
            return "cosine"
    return "l2" if by == faiss.METRIC_L2 else "ip"


def _check_kind(q: Quantizer, kind: str) -> None:
    if kind not in get_args(Kind):
        known = ", ".join(map(repr, get_args(Kind)))
        raise ValueError(f"kind must be one of {known}, but got {kind!r}")
    if kind.startswith("ivf") != (q.coarse is not None):
        need, got = ("with", "none") if q.coarse is None else ("without", f"coarse={len(q.coarse)}")
        raise ValueError(f"kind {kind!r} needs a quantizer {need} coarse centroids, but got {got}")
    if kind.endswith("fastscan") and q.codewords != 16:
        raise ValueError(f"kind {kind!r} needs 16 codewords, but got {q.codewords}")


def replace_parts(index: Any, q: Quantizer, *, table: bool = True) -> None:
    """Give an index the rotation, codebooks and centroids of q; its codes stay as they are."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexIDMap):
        index = faiss.downcast_index(index.index)
    linear: Any = faiss.downcast_VectorTransform(index.chain.at(index.chain.size() - 1))
    faiss.copy_array_to_vector(q.rotation.mT.contiguous().cpu().numpy().ravel(), linear.A)
    # So that Faiss can go back, to reconstruct vectors.
    linear.set_is_orthonormal()
    core = _core(index)
    codebooks = np.full((q.subspaces, core.pq.ksub, core.pq.dsub), FAR, np.float32)
    codebooks[:, : q.codewords] = q.codebooks.cpu().numpy()
    faiss.copy_array_to_vector(codebooks.ravel(), core.pq.centroids)
    if q.coarse is not None:
        core.quantizer.reset()
        core.quantizer.add(q.coarse.cpu().numpy())
        if table:
            core.precompute_table()


class Source:
    """The vectors to add, checked, in slices."""

    def __init__(
        self,
        vectors: Any,
        dim: int,
        ids: npt.ArrayLike | None,
        progress: Callable[[float], object] | None = None,
        *,
        first: int = 0,
    ) -> None:
        """Look at shapes and ids; `first` is where the vectors begin among more of them."""
        if len(vectors.shape) != 2 or vectors.shape[1] != dim:
            raise ValueError(f"vectors must have shape (N, {dim}), but got {tuple(vectors.shape)}")
        self.vectors, self.progress, self.first = vectors, progress, first
        self.ids = None if ids is None else checked_ids(ids, len(vectors))

    def slices(
        self, weight: float = 1.0, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, npt.NDArray[np.int64] | None]]:
        """Vectors in float32 and their ids, told of afterwards as this part of the work."""
        at = 0
        for part in chunks(self.vectors, slice_rows(self.vectors.shape[1]), device):
            if not part.isfinite().all():
                row = self.first + at + int((~part.isfinite().all(1)).nonzero()[0])
                raise ValueError(
                    f"vectors must be finite, but row {row} has NaN or infinite values"
                )
            rows = slice(at, at := at + len(part))
            yield part, None if self.ids is None else self.ids[rows]
            if self.progress is not None:
                self.progress(weight * len(part))


def _add(index: Any, core: Any, q: Quantizer, source: Source) -> None:
    if isinstance(core, faiss.IndexPQ):
        _add_codes(index, core, q, source)
    elif isinstance(core, faiss.IndexIVFPQ):
        _add_to_lists(core, q, source)
        index.ntotal = core.ntotal
    else:
        for part, ids in source.slices():
            if ids is None:
                index.add(part.numpy())
            else:
                index.add_with_ids(part.numpy(), ids)


def _add_codes(index: Any, core: Any, q: Quantizer, source: Source) -> None:
    """Our codes are Faiss's, and take less time, the less on a GPU.

    There is room for all from the beginning: growing would hold twice the codes and more.
    """
    core.codes.resize(len(source.vectors) * core.code_size)
    core.codes.resize(0)
    for part, _ in source.slices(device=q.rotation.device):
        core.add_sa_codes(packed(q.encode_rotated(q.rotate(part)).fine, core.pq.nbits))
    if source.ids is not None:
        faiss.copy_array_to_vector(source.ids, index.id_map)
        index.construct_rev_map()
        faiss.downcast_index(index.index).ntotal = core.ntotal
    index.ntotal = core.ntotal


def packed(fine: Tensor, nbits: int) -> npt.NDArray[np.uint8]:
    """Codes (N, D) as Faiss keeps them, (N, bytes)."""
    codes = fine.cpu().numpy()
    return codes if nbits == 8 else faiss.pack_bitstrings(codes.astype(np.int32), nbits)


def _add_to_lists(core: Any, q: Quantizer, source: Source) -> None:
    """Two passes: the first says how long each list will be, the second fills it."""
    device, lists = q.rotation.device, faiss.downcast_InvertedLists(core.invlists)
    counts = np.zeros(core.nlist, np.int64)
    with tempfile.TemporaryFile() as assigned:
        for part, _ in source.slices(0.5):
            numbers = q.assign(q.rotate(part.to(device))).cpu().numpy()
            counts += np.bincount(numbers, minlength=core.nlist)
            numbers.tofile(assigned)
        assigned.seek(0)
        for number, count in enumerate(counts):
            lists.resize(number, int(count))
            lists.resize(number, 0)
        for part, ids in source.slices(0.5):
            if ids is None:
                ids = np.arange(core.ntotal, core.ntotal + len(part))
            Y = q.rotate(part.to(device)).cpu().numpy()
            numbers = np.fromfile(assigned, np.int64, len(part))
            pointers = map(faiss.swig_ptr, (Y, ids, numbers))
            core.add_core(len(part), *pointers, None)


def slice_rows(dim: int) -> int:
    """Vectors that are encoded at once."""
    return max(BUFFER // dim, 1)


def checked_ids(ids: npt.ArrayLike, N: int) -> npt.NDArray[np.int64]:
    """Ids as Faiss takes them: N different integers, none negative."""
    names = np.asarray(ids)
    if names.shape != (N,) or names.dtype.kind not in "iu":
        raise ValueError(
            f"ids must be {N} integers, one for each vector, "
            f"but got {names.dtype} of shape {names.shape}"
        )
    names = names.astype(np.int64)
    # Faiss answers −1 where it finds nothing.
    if N and names.min() < 0:
        raise ValueError(f"ids must not be negative, but got {names.min()}")
    if len(np.unique(names)) != N:
        raise ValueError("ids must differ, but some come more than once")
    return names


def _core(index: Any) -> Any:
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexIDMap | faiss.IndexPreTransform):
        return _core(index.index)
    return index


def _unwrapped(index: Any) -> tuple[npt.NDArray[np.float32], bool, Any]:
    """The product A of an index's transforms, whether it normalises, and what they are around."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexIDMap):
        return _unwrapped(index.index)
    A, normalised = np.eye(index.d, dtype=np.float32), False
    if isinstance(index, faiss.IndexPreTransform):
        chain: Any = index.chain
        for position in range(chain.size()):
            step = faiss.downcast_VectorTransform(chain.at(position))
            if isinstance(step, faiss.NormalizationTransform) and position == 0 and step.norm == 2:
                normalised = True
                continue
            square = step.d_in == step.d_out
            if not isinstance(step, faiss.LinearTransform) or not square or step.have_bias:
                raise ValueError(
                    "index must be transformed by rotations only, after an optional "
                    f"normalisation, but got {type(step).__name__} ({step.d_in} → {step.d_out})"
                )
            matrix = faiss.vector_to_array(step.A).reshape(step.d_out, step.d_in)
            A = matrix if (np.eye(len(A)) == A).all() else matrix @ A
    core = _core(index)
    if not hasattr(core, "pq"):
        raise ValueError(f"index must have a product quantizer, but got {type(core).__name__}")
    return A, normalised, core


def _record_path(path: str | Path) -> Path:
    return Path(path).with_name(Path(path).name + ".json")


def _records(path: str | Path) -> list[dict[str, Any]]:
    """The records beside an index: one, or more where a writer was stopped between two renames."""
    beside = _record_path(path)
    if not beside.is_file():
        return []
    try:
        record = json.loads(beside.read_text("utf-8"))
        previous = record.pop("previous", [])
        return [record, *(dict(one) for one in previous)]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{beside} is damaged: it is not the record of an index") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).rpartition("Error: ")[2]
