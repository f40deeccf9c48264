"""Update a Faiss index after further training of the model, under the same ids.

Rotation, codebooks and centroids are replaced. Only codes that have changed are rewritten.
"""

from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from givens.export.faiss import from_faiss, pack_codes, replace_parts
from givens.export.parts import core_of
from givens.quantizer import Codes, Quantizer
from givens.storage.given import as_vectors

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Held:
    """The contents of an index: ids, packed codes (N, bytes) and lists."""

    ids: Integers
    packed: npt.NDArray[np.uint8]
    lists: Integers

    def __getitem__(self, rows: Integers) -> "Held":
        return Held(self.ids[rows], self.packed[rows], self.lists[rows])


def refresh(
    index: Any, q: Quantizer, vectors: Any, *, ids: npt.ArrayLike | None = None
) -> Integers:
    """Turn an index into `to_faiss(q, vectors, ids=ids)`, in place; returns the changed ids.

    If an argument is invalid, nothing is changed. Remove items with `index.remove_ids` before, and
    add new ones with `index.add_with_ids` afterwards.

    Args:
        index: from `to_faiss`, of kind "pq" or "ivfpq", with the sizes and metric of q.
        q: the current quantizer. If it differs from the index's, all codes change their meaning,
            and `vectors` must have all items.
        vectors: (N, n), the items' current vectors.
        ids: (N,) of the items; their positions by default.
    """
    core = _check_core(index, q)
    held = _read_codes(index, core)
    old = from_faiss(index).fingerprint
    vectors = as_vectors(vectors, "vectors")
    names = np.arange(len(vectors)) if ids is None else np.asarray(ids)
    # An empty list has no integers.
    names = names.astype(np.int64) if names.shape == (0,) else names
    rows = _rows(names, held.ids, len(vectors), whole=old != q.fingerprint)
    fresh = _pack(q.encode(vectors), held.ids[rows], core)
    before = held[rows]
    differ = (fresh.packed != before.packed).any(1) | (fresh.lists != before.lists)
    changed = np.flatnonzero(differ)
    if old != q.fingerprint:
        replace_parts(index, q)
    if hasattr(core, "nlist") and len(changed):
        _write_to_lists(core, fresh[changed])
    elif len(changed):
        held.packed[rows] = fresh.packed
        faiss.copy_array_to_vector(held.packed.ravel(), core.codes)
    return fresh[changed].ids


def read_codes(index: Any) -> npt.NDArray[np.uint8]:
    """The fine codes (N, D) of an index of kind "pq" or "ivfpq", in the order of its ids."""
    core = core_of(index)
    held = _read_codes(index, core)
    packed = held.packed[np.argsort(held.ids)]
    if core.pq.nbits == 8:
        return packed
    return faiss.unpack_bitstrings(packed, core.pq.M, core.pq.nbits).astype(np.uint8)


def _read_codes(index: Any, core: Any) -> Held:
    if not hasattr(core, "nlist"):
        packed = faiss.vector_to_array(core.codes).reshape(core.ntotal, core.code_size)
        outer: Any = faiss.downcast_index(index)
        named = isinstance(outer, faiss.IndexIDMap)
        ids = faiss.vector_to_array(outer.id_map) if named else np.arange(core.ntotal)
        return Held(ids, packed, np.zeros(core.ntotal, np.int64))
    lists = faiss.downcast_InvertedLists(core.invlists)
    sizes = [lists.list_size(number) for number in range(core.nlist)]
    ids, packed = np.empty(core.ntotal, np.int64), np.empty((core.ntotal, core.code_size), np.uint8)
    at = 0
    for number, size in enumerate(sizes):
        rows = slice(at, at := at + size)
        if size:
            ids[rows] = faiss.rev_swig_ptr(lists.get_ids(number), size)
            codes = faiss.rev_swig_ptr(lists.get_codes(number), size * core.code_size)
            packed[rows] = codes.reshape(size, core.code_size)
    return Held(ids, packed, np.repeat(np.arange(core.nlist), sizes))


def _pack(codes: Codes, ids: Integers, core: Any) -> Held:
    lists = np.zeros(len(ids), np.int64) if codes.coarse is None else codes.coarse.cpu().numpy()
    return Held(ids, pack_codes(codes.fine, core.pq.nbits), lists)


def _write_to_lists(core: Any, fresh: Held) -> None:
    """Move items to the lists where they belong now."""
    core.remove_ids(fresh.ids)
    fresh = fresh[np.argsort(fresh.lists, kind="stable")]
    numbers, starts = np.unique(fresh.lists, return_index=True)
    for number, part in zip(numbers, np.split(np.arange(len(fresh.ids)), starts[1:]), strict=True):
        some = fresh[part]
        ids, packed = faiss.swig_ptr(some.ids), faiss.swig_ptr(some.packed)
        core.invlists.add_entries(int(number), len(part), ids, packed)
    core.ntotal += len(fresh.ids)


def _rows(names: npt.NDArray[Any], held: Integers, N: int, *, whole: bool) -> Integers:
    """The rows of the named items in the index."""
    if names.shape != (N,) or names.dtype.kind not in "iu" or len(np.unique(names)) != N:
        raise ValueError(
            f"ids must be {N} different integers, one for each vector, "
            f"but got {names.dtype} of shape {names.shape}"
        )
    order = np.argsort(held)
    at = np.searchsorted(held, names, sorter=order)
    rows = order[np.minimum(at, len(held) - 1)] if len(held) else at
    missing = np.ones(N, bool) if not len(held) else held[rows] != names
    if missing.any():
        raise ValueError(
            f"ids must be of items in the index, but {names[missing][0]} is not; "
            "add new items by index.add_with_ids afterwards"
        )
    if whole and len(held) != N:
        raise ValueError(
            "vectors must have all items if q differs from the index's quantizer, "
            f"but got {N} for {len(held)} in the index"
        )
    return rows


def _check_core(index: Any, q: Quantizer) -> Any:
    core: Any = faiss.downcast_index(index)
    transforms = 0
    while isinstance(core, faiss.IndexIDMap | faiss.IndexPreTransform):
        chain: Any = getattr(core, "chain", None)
        transforms += chain.size() if chain else 0
        core = faiss.downcast_index(core.index)
    if type(core) not in (faiss.IndexPQ, faiss.IndexIVFPQ):
        raise ValueError(
            f"index must be of kind 'pq' or 'ivfpq', but got {type(core).__name__}; "
            "build it anew by to_faiss"
        )
    lists = faiss.downcast_InvertedLists(core.invlists) if hasattr(core, "nlist") else None
    if lists is not None and not isinstance(lists, faiss.ArrayInvertedLists):
        raise ValueError("index must have its lists in memory, but they are on the disk")
    # 0 is Faiss's NoMap; writing into the lists here would bypass a map.
    if hasattr(core, "nlist") and core.direct_map.type != 0:
        raise ValueError("index must have no direct map, but has one; clear it first")
    old = repr(from_faiss(index))
    if old != repr(q):
        raise ValueError(f"q must be like the index's quantizer, {old}, but got {q}")
    if transforms != (2 if q.metric == "cosine" else 1):
        raise ValueError(f"index must be from to_faiss, but has {transforms} transforms")
    return core
