"""The contenders: indexes with a given number of bytes a vector, ours and Faiss's.

Each method gets its best chance: codebooks of 256 codewords, RaBitQ and TurboQuant behind a random
rotation, and a PCA if the bytes require fewer dimensions. Faiss's PQ is its "np" form, without the
reordering of codewords, which changes no distance and takes longer than k-means. If the bytes do
not divide the dimension, zeros are spread evenly between the coordinates, which changes no
distance.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
import torch

import givens
from givens.export.faiss import fit_opq, inverted, to_faiss
from givens.quantizer import Metric, Quantizer

Table = npt.NDArray[np.float32]

# Additive quantizers learn from fewer vectors; otherwise they would take hours.
ADDITIVE_SAMPLE = 16_384
NPROBES = (1, 4, 16, 64)
# An inverted file stores the position of each vector; a flat index does not.
ID_BYTES = 8
# Bytes of RaBitQ's factors beside the bits: for one bit, and for more.
FACTORS = (8, 20)
RABITQ_BITS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Contender:
    """One index to build: a method at a budget."""

    method: str
    """Its name in `--methods`."""
    name: str
    budget: int
    """The most bytes a vector, without the ids of an inverted file."""
    index: str
    """Its name in Faiss."""
    make: Callable[[Table, Metric, int], Any]
    """A trained, empty index from vectors, metric and seed."""
    form: str = "flat"
    """flat, fastscan or ivf."""
    growth: int = 1
    """The power of the bytes with which its cost grows."""
    sample: int | None = None
    """The most vectors it learns from."""


def contenders(dim: int, budgets: list[int], lists: int, metric: Metric) -> list[Contender]:
    """All contenders that fit a budget, the most useful methods first, budgets ascending."""
    found: list[Contender] = []
    for method in METHODS.values():
        seen: set[str] = set()
        for budget in sorted(budgets):
            for one in method(dim, budget, lists, metric):
                # The same index may fit a larger budget, too.
                if one.index not in seen:
                    seen.add(one.index)
                    found.append(one)
    return found


def _givens(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    if (wide := _round_up(dim, budget)) is None:
        return
    name = "givens (PQ, learned rotation)"
    text = f"rotation,PQ{budget}x8"
    yield Contender("givens", name, budget, text, _make_fit(dim, wide, budget))


def _givens_ivf(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    if (wide := _round_up(dim, budget)) is None:
        return
    text = f"rotation,IVF{lists},PQ{budget}x8"
    make = _make_fit(dim, wide, budget, coarse=lists)
    yield Contender("givens-ivf", "givens, inverted file", budget, text, make, "ivf")


def _givens_fastscan(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    if (wide := _round_up(dim, 2 * budget)) is None:
        return
    text = f"rotation,PQ{2 * budget}x4fs"
    make = _make_fit(dim, wide, 2 * budget, codewords=16, kind="pq-fastscan")
    yield Contender("givens-fastscan", "givens, FastScan", budget, text, make, "fastscan")


def _pq(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    if (wide := _round_up(dim, budget)) is not None:
        text = f"PQ{budget}x8np"
        yield Contender("pq", "Faiss PQ", budget, text, _make_factory(dim, text, wide))


def _opq_identity(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    yield from _opq(dim, budget, identity=True)


def _opq_default(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    yield from _opq(dim, budget, identity=False)


def _opq(dim: int, budget: int, *, identity: bool) -> Iterator[Contender]:
    wide = _round_up(dim, budget)
    if wide is None:
        return

    def make(x: Table, metric: Metric, seed: int) -> Any:
        q = fit_opq(_pad(dim, wide, x), budget, metric=choose_metric(metric), identity=identity)
        return _add_padding(dim, wide, to_faiss(q))

    start = "identity" if identity else "default"
    text = f"OPQ{budget}_{wide},PQ{budget}x8" + (" from the identity" if identity else "")
    yield Contender(f"opq-{start}", f"Faiss OPQ, {start} start", budget, text, make)


def _pca_pq(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    # Half of the axes, so PQ has twice the bits for each.
    kept = -(-dim // (2 * budget)) * budget
    if kept < dim:
        text = f"PCA{kept},PQ{budget}x8np"
        yield Contender("pca-pq", f"PCA to {kept}, PQ", budget, text, _make_factory(dim, text))


def _rabitq(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    for bits, kept in _rabitq_forms(dim, budget):
        first = f"RR{dim}" if kept == dim else f"PCAR{kept}"
        text = f"{first},RaBitQ{bits}"
        name = (
            f"RaBitQ, {_format_bits(bits)}"
            if kept == dim
            else f"PCA to {kept}, RaBitQ, {_format_bits(bits)}"
        )
        yield Contender("rabitq", name, budget, text, _make_factory(dim, text))


def _rabitq_fastscan(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    for bits, kept in _rabitq_forms(dim, budget)[:1]:
        first, pca = (f"RR{dim}", "") if kept == dim else (f"PCAR{kept}", f"PCA to {kept}, ")
        text, name = f"{first},RaBitQfs{bits}", f"{pca}RaBitQ, {_format_bits(bits)}, FastScan"
        make = _make_factory(dim, text)
        yield Contender("rabitq-fastscan", name, budget, text, make, "fastscan")


def _rabitq_ivf(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    for bits, kept in _rabitq_forms(dim, budget)[:1]:
        first, pca = (f"RR{dim}", "") if kept == dim else (f"PCAR{kept}", f"PCA to {kept}, ")
        text = f"{first},IVF{lists},RaBitQ{bits}"
        name = f"{pca}RaBitQ, {_format_bits(bits)}, inverted file"
        yield Contender("rabitq-ivf", name, budget, text, _make_factory(dim, text), "ivf")


def _rabitq_forms(dim: int, budget: int) -> list[tuple[int, int]]:
    """(bits, dimensions): the most bits for all dimensions, and more bits after a PCA."""
    whole = [bits for bits in RABITQ_BITS if _rabitq_dims(bits, budget) >= dim]
    forms = [(whole[-1], dim)] if whole else []
    for bits in RABITQ_BITS[len(whole) :][:2]:
        kept = _rabitq_dims(bits, budget) // 8 * 8
        if dim / 4 <= kept < dim:
            forms.append((bits, kept))
    return forms


def _rabitq_dims(bits: int, budget: int) -> int:
    """The number of dimensions that fit into a budget, at this many bits each."""
    return max(0, 8 * (budget - FACTORS[bits > 1])) // bits


def _sq8(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    yield from _sq(dim, budget, "sq8", "8", 8)


def _sq6(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    yield from _sq(dim, budget, "sq6", "6", 6)


def _sq4(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    yield from _sq(dim, budget, "sq4", "4", 4)


def _fp16(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    yield from _sq(dim, budget, "fp16", "fp16", 16)


def _sq(dim: int, budget: int, method: str, kind: str, bits: int) -> Iterator[Contender]:
    kept = min(dim, 8 * budget // bits)
    pca, words = ("", "") if kept == dim else (f"PCA{kept},", f"PCA to {kept}, ")
    text = f"{pca}SQ{kind}"
    name = f"{words}{'half precision' if kind == 'fp16' else f'SQ{kind}'}"
    yield Contender(method, name, budget, text, _make_factory(dim, text))


def _turboquant(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
    # The plain form is for unit vectors; the other one stores two numbers beside the bits.
    unit = metric == "cosine"
    for bits in (4, 3, 2, 1) if unit else (4, 3, 2):
        text = f"RR{dim},SQtq{'mse' if unit else ''}{bits}"
        if dim * bits / 8 + (0 if unit else 8) <= budget and _is_known(dim, text):
            name = f"TurboQuant, {_format_bits(bits)}"
            yield Contender("turboquant", name, budget, text, _make_factory(dim, text))
            return


def _additive(form: str) -> Callable[[int, int, int, Metric], Iterator[Contender]]:
    """Additive quantizers; for L2, one byte holds the norm, so that lookup tables can be used."""

    def list_contenders(dim: int, budget: int, lists: int, metric: Metric) -> Iterator[Contender]:
        if form == "PRQ":
            if budget % 4 or (wide := _round_up(dim, budget // 4)) is None:
                return
            text, words = f"PRQ{budget // 4}x4x8", wide
        else:
            words = dim
            text = f"{form}{budget - 1}x8_Nqint8" if metric != "ip" else f"{form}{budget}x8_Nnone"
        names = {"RQ": "residual quantizer", "LSQ": "LSQ", "PRQ": "product residual quantizer"}
        make = _make_factory(dim, text, words)
        growth = 1 if form == "PRQ" else 2
        sample = ADDITIVE_SAMPLE
        yield Contender(form.lower(), names[form], budget, text, make, "flat", growth, sample)

    return list_contenders


METHODS: dict[str, Callable[[int, int, int, Metric], Iterator[Contender]]] = {
    "givens": _givens,
    "pq": _pq,
    "rabitq": _rabitq,
    "sq8": _sq8,
    "sq4": _sq4,
    "opq-identity": _opq_identity,
    "pca-pq": _pca_pq,
    "givens-fastscan": _givens_fastscan,
    "rabitq-fastscan": _rabitq_fastscan,
    "givens-ivf": _givens_ivf,
    "rabitq-ivf": _rabitq_ivf,
    "turboquant": _turboquant,
    "sq6": _sq6,
    "fp16": _fp16,
    "opq-default": _opq_default,
    "prq": _additive("PRQ"),
    "rq": _additive("RQ"),
    "lsq": _additive("LSQ"),
}


def _make_fit(
    dim: int, wide: int, subspaces: int, codewords: int = 256, coarse: int = 0, kind: Any = None
) -> Callable[[Table, Metric, int], Any]:
    def make(x: Table, metric: Metric, seed: int) -> Any:
        table = torch.from_numpy(_pad(dim, wide, x))
        by = choose_metric(metric)
        q: Quantizer = givens.fit(
            table, subspaces, codewords=codewords, coarse=coarse, metric=by, seed=seed, sample=0
        )
        return _add_padding(dim, wide, to_faiss(q, kind=kind))

    return make


def _make_factory(
    dim: int, text: str, wide: int | None = None
) -> Callable[[Table, Metric, int], Any]:
    def make(x: Table, metric: Metric, seed: int) -> Any:
        by = faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2
        index: Any = faiss.index_factory(wide or dim, text, by)
        _hush(index)
        if metric == "ip" and text.startswith("PCA"):
            # Inner products depend on the origin: the axes are those of the vectors as they are,
            # not centred.
            pca: Any = faiss.downcast_VectorTransform(index.chain.at(0))
            pca.train(np.concatenate([x, -x]))
        index.train(_pad(dim, wide or dim, x))
        return _add_padding(dim, wide or dim, index)

    return make


def _hush(index: Any) -> None:
    """Silence Faiss's warning about few vectors for each codeword."""
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        _hush(index.index)
        return
    for name in ("pq", "rq", "lsq"):
        if hasattr(getattr(index, name, None), "cp"):
            getattr(index, name).cp.min_points_per_centroid = 1
    if (lists := inverted(index)) is not None:
        lists.cp.min_points_per_centroid = 1


def _round_up(dim: int, pieces: int) -> int | None:
    """The next multiple of the pieces; None if there are more pieces than dimensions."""
    return -(-dim // pieces) * pieces if pieces <= dim else None


def _pad(dim: int, wide: int, x: Table) -> Table:
    if wide == dim:
        return np.ascontiguousarray(x)
    padded: Table = _remap(dim, wide).apply(x)
    return padded


def _remap(dim: int, wide: int) -> Any:
    # Faiss's stubs have another constructor.
    transform: Any = faiss.RemapDimensionsTransform
    return transform(dim, wide, True)


def _add_padding(dim: int, wide: int, index: Any) -> Any:
    """Put the padding of vectors in front of an index."""
    if wide == dim:
        return index
    remap = _remap(dim, wide)
    if isinstance(index, faiss.IndexPreTransform):
        index.prepend_transform(remap)
        return index
    return faiss.IndexPreTransform(remap, index)


def choose_metric(metric: Metric) -> Metric:
    """The metric of the indexes; for cosine, L2 on normalised vectors."""
    return "ip" if metric == "ip" else "l2"


def _is_known(dim: int, text: str) -> bool:
    """Whether the installed Faiss has such an index."""
    try:
        faiss.index_factory(dim, text)
    except RuntimeError:
        return False
    return True


def _format_bits(bits: int) -> str:
    return f"{bits} bit{'s' * (bits > 1)}"
