"""Put a quantizer's parts into a Faiss index, and take them out again."""

from typing import Any, Literal, get_args

import faiss
import numpy as np
import numpy.typing as npt
import torch

from givens.export import NPROBE
from givens.export.source import FAR
from givens.quantizer import Metric, Quantizer
from givens.rotation import determinant

Kind = Literal["pq", "ivfpq", "pq-fastscan", "ivfpq-fastscan", "hnswpq"]

# Edges of a vector in the graph of "hnswpq"; twice as many at the lowest level.
NEIGHBOURS = 32
# Candidates for re-ranking, as a multiple of k.
CANDIDATES = 10


def empty_index(
    q: Quantizer, kind: Kind | None = None, *, table: bool = True, refine: bool = False
) -> Any:
    """A Faiss index with the quantizer's parts, without vectors; `refine` is as in `to_faiss`.

    Faiss's precomputed table makes searches faster and takes up to 2 GB; it is not written to
    files.
    """
    kind = kind or ("pq" if q.coarse is None else "ivfpq")
    _check_kind(q, kind)
    metric = faiss.METRIC_L2 if q.metric == "l2" else faiss.METRIC_INNER_PRODUCT
    n, D, nbits = q.dim, q.subspaces, max(1, (q.codewords - 1).bit_length())
    # Any: Faiss's stubs are incomplete.
    core: Any
    form: Any
    if kind == "hnswpq":
        form = faiss.IndexHNSWPQ
        core = form(n, D, NEIGHBOURS, nbits, metric)
        core.storage.is_trained = True
    elif q.coarse is None:
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
    normal = faiss.NormalizationTransform(n, 2.0) if q.metric == "cosine" else None
    if refine:
        around: Any = faiss.IndexRefineFlat(index)
        around.k_factor = CANDIDATES
        # For cosine the vectors to re-rank by are normalised, as the codes are.
        index = around if normal is None else faiss.IndexPreTransform(normal, around)
    elif normal is not None:
        index.prepend_transform(normal)
    return index


def from_faiss(index: Any) -> Quantizer:
    """Take the Quantizer out of a Faiss index: any rotation, over PQ, IVFPQ or a FastScan form.

    If the rotation has determinant −1, as Faiss's OPQ often has, its last column is flipped
    together with the last coordinate of codebooks and centroids, which changes no code and no
    distance.
    """
    if not isinstance(index, faiss.Index):
        raise TypeError(f"index must be a Faiss index, but got {type(index).__name__}")
    if not index.is_trained:
        raise ValueError("index must be trained, but is not")
    A, normalised, core = _unwrap(index)
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


def replace_parts(index: Any, q: Quantizer, *, table: bool = True) -> None:
    """Replace the rotation, codebooks and centroids of an index by those of q; codes are kept."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexIDMap):
        index = faiss.downcast_index(index.index)
    linear: Any = faiss.downcast_VectorTransform(index.chain.at(index.chain.size() - 1))
    faiss.copy_array_to_vector(q.rotation.mT.contiguous().cpu().numpy().ravel(), linear.A)
    # So that Faiss can invert it to reconstruct vectors.
    linear.set_is_orthonormal()
    core = core_of(index)
    codebooks = np.full((q.subspaces, core.pq.ksub, core.pq.dsub), FAR, np.float32)
    codebooks[:, : q.codewords] = q.codebooks.cpu().numpy()
    faiss.copy_array_to_vector(codebooks.ravel(), core.pq.centroids)
    if isinstance(faiss.downcast_index(index.index), faiss.IndexHNSWPQ):
        # Used by the graph to compare its vectors.
        core.pq.compute_sdc_table()
    if q.coarse is not None:
        core.quantizer.reset()
        core.quantizer.add(q.coarse.cpu().numpy())
        if table:
            core.precompute_table()


def inverted(index: Any) -> Any:
    """The inverted file inside an index, to set its `nprobe`; None if there is none."""
    core = core_of(index)
    return core if hasattr(core, "nlist") else None


def is_quantized(index: Any) -> bool:
    """Whether an index has a product quantizer."""
    return hasattr(core_of(index), "pq")


def code_size(index: Any) -> int | None:
    """The bytes of a vector's code; None for an index without codes, such as a graph."""
    if is_quantized(index):
        return int(core_of(index).pq.code_size)
    try:
        return int(index.sa_code_size())
    except RuntimeError:
        return None


def _check_kind(q: Quantizer, kind: str) -> None:
    if kind not in get_args(Kind):
        known = ", ".join(map(repr, get_args(Kind)))
        raise ValueError(f"kind must be one of {known}, but got {kind!r}")
    if kind.startswith("ivf") != (q.coarse is not None):
        need, got = ("with", "none") if q.coarse is None else ("without", f"coarse={len(q.coarse)}")
        raise ValueError(f"kind {kind!r} needs a quantizer {need} coarse centroids, but got {got}")
    if kind.endswith("fastscan") and q.codewords != 16:
        raise ValueError(f"kind {kind!r} needs 16 codewords, but got {q.codewords}")


def core_of(index: Any) -> Any:
    """The innermost index, without transforms, id maps, graph and re-ranking."""
    index = faiss.downcast_index(index)
    inside = _inside(index)
    return index if inside is None else core_of(inside)


def _inside(index: Any) -> Any:
    if isinstance(index, faiss.IndexIDMap | faiss.IndexPreTransform):
        return index.index
    if isinstance(index, faiss.IndexRefine):
        return index.base_index
    return index.storage if isinstance(index, faiss.IndexHNSWPQ) else None


def _unwrap(index: Any) -> tuple[npt.NDArray[np.float32], bool, Any]:
    """The product A of an index's transforms, whether it normalises, and the index inside."""
    A, normalised, first = np.eye(index.d, dtype=np.float32), False, True
    inside = index
    while inside is not None:
        index = faiss.downcast_index(inside)
        inside = _inside(index)
        if not isinstance(index, faiss.IndexPreTransform):
            continue
        chain: Any = index.chain
        for position in range(chain.size()):
            step = faiss.downcast_VectorTransform(chain.at(position))
            if isinstance(step, faiss.NormalizationTransform) and first and step.norm == 2:
                normalised, first = True, False
                continue
            first = False
            square = step.d_in == step.d_out
            if not isinstance(step, faiss.LinearTransform) or not square or step.have_bias:
                raise ValueError(
                    "index must be transformed by rotations only, after an optional "
                    f"normalisation, but got {type(step).__name__} ({step.d_in} → {step.d_out})"
                )
            matrix = faiss.vector_to_array(step.A).reshape(step.d_out, step.d_in)
            A = matrix if (np.eye(len(A)) == A).all() else matrix @ A
    if not hasattr(index, "pq"):
        raise ValueError(f"index must have a product quantizer, but got {type(index).__name__}")
    return A, normalised, index


def metric_of(index: Any) -> Metric:
    """The metric of any index; after a normalisation it is the cosine."""
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
