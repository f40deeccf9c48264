"""A quantizer as the files of DiskANN's product quantizer.

    PREFIX_pq_pivots.bin                      at 0: where the three tables begin, 4 × uint64
                                              from 4096 on: pivots (256, n), centroid (n, 1),
                                              chunk offsets (D + 1, 1) uint32
    PREFIX_pq_pivots.bin_rotation_matrix.bin  (n, n), y = (x − centroid) M with M = R
    PREFIX_pq_compressed.bin                  codes (N, D), uint8

The numbers of rows and columns precede every table, as int32; all is little-endian, and float32
unless stated. DiskANN always has 256 pivots: fewer codewords are filled up with points so far away
that no code uses them. The centroid is 0, since the codebooks include the mean.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from givens.checks import check_table
from givens.export.source import FAR
from givens.quantizer import BUFFER, Quantizer
from givens.storage import files
from givens.storage.given import as_vectors
from givens.storage.vectors import chunks

PIVOTS = 256
# The first table starts here.
METADATA = 4096


def to_diskann(
    q: Quantizer,
    vectors: Any,
    prefix: str | Path,
    *,
    progress: Callable[[int], object] | None = None,
) -> list[Path]:
    """Write the pivots, the rotation and the vectors' codes; returns the paths.

    The files replace those that DiskANN has written beside its graph, PREFIX_disk.index, of the
    same vectors. Each write is atomic, but there are three: do not search before all are written.

    Args:
        q: without coarse centroids, with metric "l2" or "cosine"; for the latter normalise
            DiskANN's vectors and queries, and use L2 there.
        vectors: (N, n), in DiskANN's order; None writes only pivots and rotation.
        prefix: of the files, such as `index/ann`.
        progress: called with the number of vectors encoded since the last call.
    """
    if q.coarse is not None:
        raise ValueError(
            f"q must have no coarse centroids, which DiskANN has no place for, but got {q}"
        )
    if q.metric == "ip":
        raise ValueError(
            "q must be by 'l2' or 'cosine', but got 'ip': DiskANN makes inner products into "
            "distances by a coordinate more, which q has no codewords for"
        )
    N = None
    if vectors is not None:
        check_table("vectors", vectors := as_vectors(vectors, "vectors"), q.dim)
        N = int(vectors.shape[0])
    pivots, rotation, codes = paths(prefix)
    if N is not None:
        with files.replacing(codes) as temporary, temporary.open("wb") as file:
            _begin(file, N, q.subspaces)
            for part in chunks(vectors, BUFFER // q.dim, q.device):
                file.write(q.encode(part).fine.cpu().numpy().tobytes())
                if progress is not None:
                    progress(len(part))
    with files.replacing(rotation) as temporary, temporary.open("wb") as file:
        _write(file, q.rotation.cpu().numpy().astype("<f4"))
    with files.replacing(pivots) as temporary, temporary.open("wb") as file:
        _write_pivots(file, q)
    return [pivots, rotation] if N is None else [pivots, rotation, codes]


def paths(prefix: str | Path) -> tuple[Path, Path, Path]:
    """The paths of pivots, rotation and codes."""
    pivots = Path(f"{prefix}_pq_pivots.bin")
    rotation = pivots.with_name(pivots.name + "_rotation_matrix.bin")
    return pivots, rotation, Path(f"{prefix}_pq_compressed.bin")


def _write_pivots(file: BinaryIO, q: Quantizer) -> None:
    words = np.full((PIVOTS, q.dim), FAR, "<f4")
    words[: q.codewords] = q.codebooks.transpose(0, 1).flatten(1).cpu().numpy()
    width = q.dim // q.subspaces
    offsets = np.arange(0, q.dim + 1, width, dtype="<u4")[:, None]
    starts = [METADATA]
    file.seek(METADATA)
    for table in (words, np.zeros((q.dim, 1), "<f4"), offsets):
        _write(file, table)
        starts.append(file.tell())
    file.seek(0)
    _write(file, np.array(starts, "<u8")[:, None])


def _write(file: BinaryIO, table: npt.NDArray[Any]) -> None:
    _begin(file, *table.shape)
    file.write(table.tobytes())


def _begin(file: BinaryIO, rows: int, columns: int) -> None:
    file.write(np.array([rows, columns], "<i4").tobytes())
