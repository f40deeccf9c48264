"""A Quantizer as an index that Faiss loads, adds to and searches, and back.

    IndexPreTransform y = A x with A = Rᵀ; for cosine, x is normalised first
      over IndexPQ, IndexIVFPQ  the codebooks, and the coarse centroids as centres of the lists
      or their FastScan forms   for 16 codewords
      or IndexHNSWPQ            a graph of the same codes
    IndexRefineFlat optionally around these; for cosine, inside the normalisation

Codes equal Faiss's own, except where two codewords are equally near within rounding. Faiss packs
codes in ⌈log₂ K⌉ bits: if K is not a power of two, the codebooks are padded with codewords so far
away that none is ever chosen, and `from_faiss` removes them again.

The GPU build of Faiss moves "ivfpq" with 256 codewords to a GPU: `faiss.index_cpu_to_gpu(resources,
0, to_faiss(q, x))`.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

try:
    import faiss
except ImportError as error:
    raise ImportError("a Faiss index needs faiss: pip install 'givens[faiss]'") from error

from givens.checks import check_lengths, check_table
from givens.export.parts import (
    Kind,
    code_size,
    core_of,
    empty_index,
    from_faiss,
    inverted,
    is_quantized,
    metric_of,
    replace_parts,
)
from givens.export.source import FAR, Source, check_ids, slice_rows
from givens.export.stored import Stored, load_index, recording, save_index
from givens.quantizer import Codes, Metric, Quantizer
from givens.storage.given import as_vectors
from givens.storage.vectors import chunks

__all__ = [
    "FAR",
    "Kind",
    "Source",
    "Stored",
    "check_ids",
    "code_size",
    "empty_index",
    "fit_opq",
    "from_faiss",
    "inverted",
    "is_quantized",
    "load_index",
    "metric_of",
    "pack_codes",
    "recording",
    "replace_parts",
    "save_index",
    "slice_rows",
    "to_faiss",
]


def to_faiss(
    q: Quantizer,
    vectors: Any = None,
    *,
    kind: Kind | None = None,
    refine: bool = False,
    ids: npt.ArrayLike | None = None,
    progress: Callable[[float], object] | None = None,
) -> Any:
    """Build a Faiss index from a quantizer and vectors.

    Args:
        q: the quantizer.
        vectors: (N, n), in any form that `givens.fit` takes, streamed; or their `Codes`, stored as
            they are; None gives an empty index that Faiss can add to.
        kind: by default "ivfpq" with coarse centroids and "pq" without; the FastScan forms need 16
            codewords. "hnswpq" searches a graph of the codes, without coarse centroids; it does not
            support removal.
        refine: whether to keep the vectors too, in float32, and re-rank ten times as many
            candidates with them (`k_factor` of the index).
        ids: (N,) the ids that a search returns; the vectors' positions by default.
        progress: called with the number of vectors done since the last call; a vector counts half
            in each pass if there are two.
    """
    index = empty_index(q, kind, refine=refine)
    if ids is not None and (q.coarse is None or refine):
        index = faiss.IndexIDMap2(index)
    if isinstance(vectors, Codes):
        if ids is not None or refine or kind not in (None, "pq", "ivfpq"):
            raise ValueError(
                "codes must go into an index of kind 'pq' or 'ivfpq', without ids or refine"
            )
        _add_given(index, q, vectors)
    elif vectors is not None:
        _add(
            index,
            q,
            Source(vectors, q.dim, ids, progress, metric=q.metric),
            plain=not refine and kind != "hnswpq",
        )
    elif ids is not None:
        raise ValueError("ids must come with vectors, but got no vectors")
    return index


def fit_opq(
    vectors: Any,
    subspaces: int,
    codewords: int = 256,
    coarse: int = 0,
    *,
    metric: Metric = "l2",
    identity: bool = False,
) -> Quantizer:
    """Fit Faiss's own OPQ and PQ with its defaults, as a baseline.

    Its rotation has a random start, or the identity start if asked for.
    """
    nbits = (codewords - 1).bit_length()
    if codewords != 1 << nbits:
        raise ValueError(f"codewords must be a power of two for Faiss, but got {codewords}")
    check_table("vectors", vectors := as_vectors(vectors, "vectors"))
    x = torch.cat(list(chunks(vectors, slice_rows(vectors.shape[1]))))
    check_lengths("vectors", x, metric)
    if metric == "cosine":
        x = torch.nn.functional.normalize(x)
    n = x.shape[1]
    lists = f"IVF{coarse}," if coarse else ""
    by = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    # "np": no reordering of codewords, which changes no distance and takes longer than k-means.
    text = f"OPQ{subspaces}_{n},{lists}PQ{subspaces}x{nbits}{'' if coarse else 'np'}"
    index: Any = faiss.index_factory(n, text, by)
    rotation: Any = faiss.downcast_VectorTransform(index.chain.at(0))
    rotation.pq = alternated = faiss.ProductQuantizer(n, subspaces, nbits)
    if identity:
        # Training starts from the A that it finds.
        faiss.copy_array_to_vector(np.eye(n, dtype=np.float32).ravel(), rotation.A)
    # Silence the warning about fewer than 39 vectors for each codeword.
    for pq in (alternated, core_of(index).pq):
        pq.cp.min_points_per_centroid = 1
    index.train(x.numpy())
    q = from_faiss(index)
    return Quantizer(q.rotation, q.codebooks, q.coarse, metric)


def _add(index: Any, q: Quantizer, source: Source, *, plain: bool) -> None:
    """Fill an index; if it holds more than codes, Faiss encodes."""
    core = core_of(index)
    if plain and isinstance(core, faiss.IndexPQ):
        _add_codes(index, core, q, source)
    elif plain and isinstance(core, faiss.IndexIVFPQ):
        _add_to_lists(core, q, source)
        index.ntotal = core.ntotal
    else:
        for part, ids in source.slices():
            if ids is None:
                index.add(part.numpy())
            else:
                index.add_with_ids(part.numpy(), ids)


def _add_codes(index: Any, core: Any, q: Quantizer, source: Source) -> None:
    """Add vectors by our own codes, which equal Faiss's and take less time.

    Memory for all codes is allocated at once: growing would hold them twice.
    """
    core.codes.resize(len(source.vectors) * core.code_size)
    core.codes.resize(0)
    for part, _ in source.slices(device=q.device):
        core.add_sa_codes(pack_codes(q.encode_rotated(q.rotate(part)).fine, core.pq.nbits))
    if source.ids is not None:
        faiss.copy_array_to_vector(source.ids, index.id_map)
        index.construct_rev_map()
        faiss.downcast_index(index.index).ntotal = core.ntotal
    index.ntotal = core.ntotal


def _add_given(index: Any, q: Quantizer, codes: Codes) -> None:
    """Fill an index of kind "pq" or "ivfpq" with codes that are not to be found by encoding."""
    core = core_of(index)
    q.check_codes(codes)
    packed = pack_codes(codes.fine, core.pq.nbits)
    if codes.coarse is not None:
        # The number of a list in as few bytes as hold it, the lowest first.
        lists = codes.coarse.cpu().numpy().astype("<i8")[:, None].view(np.uint8)
        packed = np.hstack([lists[:, : core.coarse_code_size()], packed])
    core.add_sa_codes(packed, np.arange(len(packed)))
    index.ntotal = core.ntotal


def pack_codes(fine: Tensor, nbits: int) -> npt.NDArray[np.uint8]:
    """Pack codes (N, D) as Faiss does, (N, bytes)."""
    codes = fine.cpu().numpy()
    return codes if nbits == 8 else faiss.pack_bitstrings(codes.astype(np.int32), nbits)


def _add_to_lists(core: Any, q: Quantizer, source: Source) -> None:
    """Fill inverted lists in two passes: the first counts their sizes, the second adds."""
    device, lists = q.device, faiss.downcast_InvertedLists(core.invlists)
    counts = np.zeros(core.nlist, np.int64)
    with _scratch() as assigned:
        for part, _ in source.slices(0.5):
            numbers = q.assign(q.rotate(part.to(device))).cpu().numpy()
            counts += np.bincount(numbers, minlength=core.nlist)
            # Not `tofile`, which does not say why a write failed.
            assigned.write(numbers.data)
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


@contextlib.contextmanager
def _scratch() -> Iterator[Any]:
    """An unnamed temporary file, whose errors name its folder."""
    try:
        with tempfile.TemporaryFile() as file:
            yield file
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, tempfile.gettempdir()) from error
