"""The inverted lists in a shard's file, checked before they are used."""

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
from torch import Tensor

from givens.quantizer import Quantizer
from givens.storage import files

KIND = "lists"
# Bytes of an id.
ID = 8

Ids = npt.NDArray[np.int64]


def centroids(q: Quantizer) -> Tensor:
    """The coarse centroids of a quantizer; raises if there are none."""
    if q.coarse is None:
        raise ValueError("shards are of inverted lists: the quantizer needs coarse centroids")
    return q.coarse


class Lists:
    """The lists of a shard: the codes and then the ids of each, as in Faiss's own files.

    Their sizes are checked against the quantizer, the number of vectors and the size of the file
    before Faiss or a merge uses them.
    """

    def __init__(self, path: Path, q: Quantizer, code_size: int, count: int) -> None:
        header = files.read_header(path)
        if header.kind != KIND or [*header.tensors] != ["sizes", "lists"]:
            raise ValueError(f"{path} is not a shard, or is from another version of givens")
        first, last = (header.tensors[name]["data_offsets"] for name in ("sizes", "lists"))
        nlist, size = len(centroids(q)), path.stat().st_size
        start = size - last[1]
        self.path, self.at, self.size, self.code_size = path, start + last[0], size, code_size
        self.job = str(header.metadata.get("job"))
        if header.metadata.get("fingerprint") != q.fingerprint or first[1] - first[0] != 8 * nlist:
            raise ValueError(f"{path} belongs to another quantizer")
        # Mapped: the sizes of many lists in a thousand shards add up.
        self.sizes: Ids = np.memmap(path, np.int64, "r", start + first[0], (nlist,))
        if (last[1] - last[0], count) != ((code_size + ID) * count, total(self.sizes, count)):
            raise ValueError(f"{path} is damaged: its lists do not have {count} vectors")

    def map(self) -> Any:
        """Memory-map the lists for Faiss."""
        lists: Any = faiss.OnDiskInvertedLists()
        lists.nlist, lists.code_size = len(self.sizes), self.code_size
        lists.filename, lists.totsize, lists.read_only = str(self.path), self.size, True
        ends = self.at + np.cumsum(self.sizes) * (self.code_size + ID)
        # Faiss has three numbers for each list: size, capacity and offset.
        starts = ends - self.sizes * (self.code_size + ID)
        table = np.stack([self.sizes, self.sizes, starts], 1).astype(np.uint64)
        lists.lists.resize(len(table))
        faiss.memcpy(lists.lists.data(), faiss.swig_ptr(table), table.nbytes)
        lists.do_mmap()
        return lists


def total(sizes: Ids, most: int) -> int:
    """The sum of sizes, or −1 if one is impossible: an overflowing sum could be anything."""
    return int(sizes.sum()) if ((sizes >= 0) & (sizes <= most)).all() else -1
