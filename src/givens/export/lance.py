"""A Quantizer and its vectors as a Lance dataset with an IVF_PQ index of the same parts.

Lance has no place for a rotation, so the dataset holds rotated vectors, in the column "rotated",
and `query` rotates queries. Without `query`, one line does it; the metadata of the dataset's schema
shows it, with the fingerprint of the quantizer:

    nearest = {"column": "rotated", "q": q.rotate(x[None])[0].numpy(), "k": 10, "nprobes": 16}
    table = lance.dataset("items.lance").to_table(nearest=nearest)

For cosine, both are normalised and compared by L2, which gives the same order. The inner product is
not supported: Lance would encode the vectors themselves, while our codebooks are for residuals.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from givens.checks import check_choice, check_lengths, check_table, check_whole
from givens.export import NPROBE
from givens.export.source import FAR, Source, check_ids
from givens.quantizer import Quantizer
from givens.storage.given import as_vectors
from givens.storage.vectors import as_float

try:
    import lance
    import pyarrow as pa
except ImportError as error:
    raise ImportError("a Lance dataset needs lance: pip install 'givens[lance]'") from error

Mode = Literal["create", "overwrite"]
ROTATED, ID, QUERY, DISTANCE = "rotated", "id", "query", "_distance"
# The schema's metadata: the quantizer, and how to rotate a query.
FINGERPRINT, METRIC, HOW = "givens.fingerprint", "givens.metric", "givens.query"
ONE_LINE = f'{{"column": "{ROTATED}", "q": q.rotate(x[None])[0].numpy(), "k": 10}}'


def to_lance(
    q: Quantizer,
    vectors: Any,
    uri: str,
    *,
    payload: pa.Table | Mapping[str, Any] | None = None,
    ids: npt.ArrayLike | None = None,
    mode: Mode = "create",
) -> Any:
    """Write a Lance dataset of rotated vectors, ids and payload, with its index, and open it.

    Args:
        q: the quantizer, with coarse centroids.
        vectors: (N, n), in any form that `givens.fit` takes, streamed.
        uri: a folder, or an address that Lance writes to.
        payload: columns of N values to store beside the vectors.
        ids: (N,) integers; the vectors' positions by default.
        mode: "overwrite" writes a new version of an existing dataset.
    """
    if q.coarse is None:
        raise ValueError("an IVF_PQ index needs coarse centroids, but this quantizer has none")
    if q.metric == "ip":
        raise ValueError("metric must be 'l2' or 'cosine' for Lance, but got 'ip'")
    check_choice("mode", mode, get_args(Mode))
    vectors = as_vectors(vectors, "vectors")
    check_table("vectors", vectors, q.dim)
    N = len(vectors)
    names = np.arange(N) if ids is None else check_ids(ids, N)
    columns = _columns(payload, N)
    source = Source(vectors, q.dim, names, metric=q.metric)
    fields = [
        pa.field(ID, pa.int64()),
        pa.field(ROTATED, pa.list_(pa.float32(), q.dim)),
        *columns.schema,
    ]
    about = {FINGERPRINT: q.fingerprint, METRIC: q.metric, HOW: ONE_LINE}
    schema = pa.schema(fields, metadata=about)
    failed: list[Exception] = []
    batches = _batches(q, source, columns, schema, failed)
    try:
        reader = pa.RecordBatchReader.from_batches(schema, batches)
        dataset = lance.write_dataset(reader, uri, mode=mode)
    except OSError:
        # Lance wraps what was wrong with the vectors in a traceback.
        if failed:
            raise failed[0] from None
        raise
    nbits = 4 if q.codewords <= 16 else 8
    codebooks = np.full((q.subspaces, 1 << nbits, q.dim // q.subspaces), FAR, np.float32)
    codebooks[:, : q.codewords] = q.codebooks.cpu().numpy()
    return dataset.create_index(
        ROTATED,
        "IVF_PQ",
        metric="L2",
        num_partitions=len(q.coarse),
        ivf_centroids=q.coarse.cpu().numpy(),
        num_sub_vectors=q.subspaces,
        num_bits=nbits,
        pq_codebook=codebooks,
    )


def query(
    dataset: Any,
    q: Quantizer,
    queries: Any,
    k: int = 10,
    *,
    nprobes: int = NPROBE,
    refine: int | None = None,
    columns: list[str] | None = None,
) -> pa.Table:
    """Search the k nearest rows of each query (M, n); a table, query by query, nearest first.

    Args:
        dataset: from `to_lance`, or its address.
        q: the quantizer that it was made with.
        queries: not rotated.
        k: rows of each query.
        nprobes: number of lists to search.
        refine: re-rank refine·k candidates by the stored vectors.
        columns: of the payload, in addition to `query`, `id` and `_distance`.
    """
    for name, number in (("k", k), ("nprobes", nprobes), ("refine", refine)):
        if number is not None:
            check_whole(name, number, 1)
    opened = lance.dataset(f"{dataset}") if isinstance(dataset, str | Path) else dataset
    made_with = (opened.schema.metadata or {}).get(FINGERPRINT.encode(), b"").decode()
    if made_with != q.fingerprint:
        raise ValueError(
            f"q must be the quantizer that the dataset was made with, {made_with or 'none'}, "
            f"but got {q.fingerprint}"
        )
    queries = as_vectors(queries, "queries")
    check_table("queries", queries, q.dim)
    if not len(queries):
        raise ValueError("queries must have at least one vector, but has none")
    asked = as_float(queries[:], q.device)
    check_lengths("queries", asked, q.metric)
    asked = q.rotate(asked)
    found = []
    for number, one in enumerate(asked.cpu().numpy()):
        nearest: dict[str, Any] = {"column": ROTATED, "q": one, "k": k, "nprobes": nprobes}
        if refine is not None:
            nearest["refine_factor"] = refine
        table = opened.to_table(columns=[ID, *(columns or []), DISTANCE], nearest=nearest)
        place = pa.array(np.full(len(table), number))
        found.append(table.add_column(0, QUERY, place))
    return pa.concat_tables(found)


def _columns(payload: pa.Table | Mapping[str, Any] | None, N: int) -> pa.Table:
    # Of a mapping, or of a frame of pandas.
    given = {} if payload is None else payload
    columns = given if isinstance(given, pa.Table) else pa.table(dict(given))
    for name in columns.column_names:
        if name in (ID, ROTATED, QUERY, DISTANCE):
            raise ValueError(
                f"payload must not have a column {name!r}, which is the dataset's or `query`'s own"
            )
    if columns.num_columns and columns.num_rows != N:
        raise ValueError(f"payload must have {N} rows, one a vector, but got {columns.num_rows}")
    return columns


def _batches(
    q: Quantizer, source: Source, columns: pa.Table, schema: pa.Schema, failed: list[Exception]
) -> Iterator[pa.RecordBatch]:
    """The rows of the dataset; an error is also added to `failed`."""
    at = 0
    try:
        for part, names in source.slices():
            Y = q.rotate(part.to(q.device)).cpu().numpy()
            flat = pa.FixedSizeListArray.from_arrays(pa.array(Y.reshape(-1)), q.dim)
            rest = columns.slice(at, len(part)).combine_chunks()
            values = [chunked.combine_chunks() for chunked in rest.columns]
            yield pa.record_batch([pa.array(names), flat, *values], schema=schema)
            at += len(part)
    except Exception as error:
        failed.append(error)
        raise
