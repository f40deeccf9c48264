"""The inverted lists of a shard in its file, checked before anything goes by what they say."""

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
    """The centres of its lists, without which there is nothing to cut into shards."""
    if q.coarse is None:
        raise ValueError("shards are of inverted lists: the quantizer needs coarse centroids")
    return q.coarse


class Lists:
    """A shard's lists: for each its codes and then its ids, as in Faiss's own files.

    They are checked against the quantizer, the vectors that there should be and the bytes that
    there are, before Faiss or a copy goes by their sizes.
    """

    def __init__(self, path: Path, q: Quantizer, code_size: int, count: int) -> None:
        header = files.read_header(path)
        if header.kind != KIND or [*header.tensors] != ["sizes", "lists"]:
            raise ValueError(f"{path} is no shard, or of another version of givens")
        first, last = (header.tensors[name]["data_offsets"] for name in ("sizes", "lists"))
        nlist, size = len(centroids(q)), path.stat().st_size
        start = size - last[1]
        self.path, self.at, self.size, self.code_size = path, start + last[0], size, code_size
        self.job = str(header.metadata.get("job"))
        if header.metadata.get("fingerprint") != q.fingerprint or first[1] - first[0] != 8 * nlist:
            raise ValueError(f"{path} is of another quantizer")
        # Mapped: a thousand shards of many lists have many sizes.
        self.sizes: Ids = np.memmap(path, np.int64, "r", start + first[0], (nlist,))
        if (last[1] - last[0], count) != ((code_size + ID) * count, total(self.sizes, count)):
            raise ValueError(f"{path} is damaged: its lists do not have {count} vectors")

    def map(self) -> Any:
        """The lists for Faiss, read where they are."""
        lists: Any = faiss.OnDiskInvertedLists()
        lists.nlist, lists.code_size = len(self.sizes), self.code_size
        lists.filename, lists.totsize, lists.read_only = str(self.path), self.size, True
        ends = self.at + np.cumsum(self.sizes) * (self.code_size + ID)
        # Of each list Faiss keeps three numbers: size, capacity and offset.
        starts = ends - self.sizes * (self.code_size + ID)
        table = np.stack([self.sizes, self.sizes, starts], 1).astype(np.uint64)
        lists.lists.resize(len(table))
        faiss.memcpy(lists.lists.data(), faiss.swig_ptr(table), table.nbytes)
        lists.do_mmap()
        return lists


def total(sizes: Ids, most: int) -> int:
    """The sum of sizes, or −1 where one of them cannot be: a sum that overflows may be any."""
    return int(sizes.sum()) if ((sizes >= 0) & (sizes <= most)).all() else -1
