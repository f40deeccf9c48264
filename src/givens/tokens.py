"""Semantic IDs: an item's vector as a few tokens, for generative recommenders.

    residual stages t_s = the nearest of L_s centroids to the residual of the stages before
    product tail t_d = the codewords of the last residual, rotated and cut into D pieces

With a tail only, tokens are those of Faiss's "OPQ{m},IVF1,PQ{m}x8", with a learned rotation. With
stages only, they are those of residual k-means, where a rotation has no effect: centroids rotate
with the vectors, and distances do not change.

IDs are stable: `assign` changes an item's ID only if its codes change.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from givens.checks import (
    SEEDS,
    check_choice,
    check_integer,
    check_lengths,
    check_seed,
    check_table,
    check_tensor,
    check_whole,
)
from givens.fixed.fit import SAMPLE, Method, Progress
from givens.fixed.fit import fit as fit_quantizer
from givens.fixed.sample import Sample
from givens.kmeans import assign_lists, kmeans
from givens.quantizer import BUFFER, KIND, Codes, Quantizer, load
from givens.storage import files
from givens.storage.given import as_vectors
from givens.storage.vectors import chunks

TOKENIZER = "tokenizer"
Metric = Literal["l2", "cosine"]
Integers = npt.NDArray[np.int64]
Names = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Centroids of the residual stages, and the quantizer of the last residual."""

    stages: Sequence[Float[Tensor, "L n"]]
    tail: Quantizer | None
    normalise: bool = False

    def __post_init__(self) -> None:
        """Check that the parts fit together."""
        if not self.stages and self.tail is None:
            raise ValueError("a tokenizer needs stages or a tail, but got neither")
        for stage in self.stages:
            check_tensor("stages", stage)
            if stage.ndim != 2 or stage.shape[1] != self.dim or not len(stage):
                raise ValueError(
                    f"stages must be of shape (L, {self.dim}), but got {tuple(stage.shape)}"
                )
            if stage.dtype != torch.float32 or not stage.isfinite().all():
                raise ValueError(f"stages must be finite and float32, but got {stage.dtype}")

    @property
    def dim(self) -> int:
        """The dimension n."""
        return self.stages[0].shape[1] if self.tail is None else self.tail.dim

    @property
    def sizes(self) -> list[int]:
        """The number of different tokens at each place."""
        sizes = [len(stage) for stage in self.stages]
        if self.tail is not None:
            sizes += [] if self.tail.coarse is None else [len(self.tail.coarse)]
            sizes += [self.tail.codewords] * self.tail.subspaces
        return sizes

    @property
    def fingerprint(self) -> str:
        """A digest of the parts, which tells whether IDs and a tokenizer belong together."""
        digest = hashlib.sha256(f"{self.normalise}".encode())
        for stage in self.stages:
            digest.update(f"{tuple(stage.shape)}".encode() + stage.numpy().tobytes())
        digest.update(b"" if self.tail is None else self.tail.fingerprint.encode())
        return digest.hexdigest()[:32]

    def encode(self, x: Any) -> Int64[Tensor, "N m"]:
        """The tokens of vectors (N, n)."""
        x = as_vectors(x)
        return torch.cat([self._encode_part(part)[0] for part in self._slice(x)])

    def decode(self, tokens: Int64[Tensor, "N m"]) -> Float[Tensor, "N n"]:
        """The vectors that tokens decode to."""
        check_tensor("tokens", tokens)
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise TypeError(f"tokens must be integers, but got {tokens.dtype}")
        tokens = tokens.long()
        if tokens.ndim != 2 or tokens.shape[1] != len(self.sizes):
            raise ValueError(
                f"tokens must have shape (N, {len(self.sizes)}), but got {tuple(tokens.shape)}"
            )
        if ((tokens < 0) | (tokens >= torch.tensor(self.sizes))).any():
            raise ValueError(f"tokens must be from 0 to below {self.sizes}, but some are not")
        x = torch.zeros(len(tokens), self.dim)
        for stage, column in zip(self.stages, tokens.T, strict=False):
            x += stage[column]
        if self.tail is not None:
            coarse, rest = None, tokens[:, len(self.stages) :]
            if self.tail.coarse is not None:
                coarse, rest = rest[:, 0], rest[:, 1:]
            x += self.tail.decode(Codes(rest.to(torch.uint8), coarse))
        return x

    def distortion(self, x: Any) -> float:
        """The mean squared error of vectors (N, n), normalised first for cosine."""
        x = as_vectors(x)
        total = sum(float(self._encode_part(part)[1]) for part in self._slice(x))
        return total / len(x)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, atomically."""
        tensors = {f"stage{at}": stage for at, stage in enumerate(self.stages)}
        about: dict[str, Any] = {"stages": len(self.stages), "normalise": self.normalise}
        if self.tail is not None:
            tensors |= {"rotation": self.tail.rotation, "codebooks": self.tail.codebooks}
            tensors |= {} if self.tail.coarse is None else {"coarse": self.tail.coarse}
            about["metric"] = self.tail.metric
        files.save(path, TOKENIZER, tensors, about)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Load a file that `save` wrote, or a quantizer, whose codes are the tokens."""
        if files.read_header(path).kind == KIND:
            return cls((), load(path))
        contents = files.load(path, TOKENIZER)
        parts, about = contents.tensors, contents.metadata
        try:
            stages = [parts[f"stage{at}"] for at in range(about["stages"])]
            tail = None
            if "metric" in about:
                coarse = parts.get("coarse")
                tail = Quantizer(parts["rotation"], parts["codebooks"], coarse, about["metric"])
            return cls(stages, tail, about["normalise"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a tokenizer: {error}") from error

    def _slice(self, x: Any) -> Iterator[Tensor]:
        check_table("x", x, self.dim)
        if not len(x):
            raise ValueError("x must have at least one vector, but got 0")
        at = 0
        for part in chunks(x, BUFFER // max(self.dim, *self.sizes)):
            check_lengths("x", part, "cosine" if self.normalise else "l2", first=at)
            yield torch.nn.functional.normalize(part) if self.normalise else part
            at += len(part)

    def _encode_part(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of a slice of vectors, and the sum of their squared errors."""
        found = []
        for stage in self.stages:
            token = assign_lists(part, stage)
            found.append(token[:, None])
            part = part - stage[token]
        if self.tail is not None:
            Y = self.tail.rotate(part)
            codes = self.tail.encode_rotated(Y)
            found += [] if codes.coarse is None else [codes.coarse[:, None]]
            found.append(codes.fine.long())
            part = Y - self.tail.codewords_of(codes)
        return torch.cat(found, dim=1), part.square().sum(dtype=torch.float64)


def fit(
    x: Any,
    subspaces: int = 8,
    codewords: int = 256,
    stages: Sequence[int] = (),
    *,
    method: Method | None = None,
    metric: Metric = "l2",
    seed: int = 0,
    sample: int | None = SAMPLE,
    callback: Callable[[Progress], None] | None = None,
) -> Tokenizer:
    """Learn a tokenizer for vectors (N, n), with len(stages) + subspaces tokens an item.

    Args:
        x: vectors in any form that `givens.fit` takes.
        subspaces: tokens of the product tail; must divide n. 0 for residual stages alone.
        codewords: different tokens at each place of the tail, 2 to 256.
        stages: different tokens of each residual stage before the tail.
        method: how the tail's rotation is learned, as in `givens.fit`; "gcd-greedy" by default. Not
            allowed with subspaces=0, where a rotation changes nothing.
        metric: "l2", or "cosine", which normalises vectors.
        seed: for all random draws.
        sample: number of vectors to learn from, which are held in memory; 0 for all.
        callback: called after every pass over the tail.
    """
    check_choice("metric", metric, get_args(Metric))
    seed, sample = check_seed(seed), check_whole("sample", sample or 0, 0)
    if isinstance(stages, str) or not isinstance(stages, Sequence):
        raise TypeError(f"stages must be a sequence of sizes, but got {stages!r}")
    if subspaces == 0 and method is not None:
        raise ValueError(
            f"method must be left out with subspaces=0, but got {method!r}: residual stages turn "
            "with any rotation of the vectors, and no token changes"
        )
    if subspaces == 0 and not stages:
        raise ValueError("subspaces must be at least 1 where there are no stages, but got 0")
    x = as_vectors(x)
    check_table("x", x)
    data = Sample(x, torch.device("cpu")).draw(sample or len(x), seed)
    data.check(metric)
    if metric == "cosine":
        data = data.transform(normalise=True)
    left, centroids = data.x, []
    for at, size in enumerate(stages):
        if not 1 <= check_integer("stages", size) <= len(left):
            raise ValueError(f"stages must be in 1..{len(left)}, the vectors, but got {size}")
        centroids.append(kmeans(left[:, None], size, seed=(seed + at) % SEEDS)[0])
        left = left - centroids[-1][assign_lists(left, centroids[-1])]
    tail = None
    if subspaces:
        how: dict[str, Any] = {"method": method or "gcd-greedy", "seed": seed, "sample": 0}
        tail = fit_quantizer(left, subspaces, codewords=codewords, callback=callback, **how)
    return Tokenizer(centroids, tail, metric == "cosine")


@dataclass(frozen=True, eq=False)
class Ids:
    """The names of items, and the tokens of each."""

    names: Names
    """(N,), strings or positions, all different."""
    tokens: Integers
    """(N, m)."""

    def __post_init__(self) -> None:
        """Check that every row has a name of its own."""
        if self.names.shape != self.tokens.shape[:1] or self.tokens.ndim != 2:
            raise ValueError(
                f"names must be {self.tokens.shape[:1]}, one for each row of tokens, "
                f"but got {self.names.shape}"
            )
        if self.tokens.size and not 0 <= self.tokens.min() <= self.tokens.max() < 1 << 31:
            raise ValueError(
                f"tokens must be in 0..2³¹−1, but got {self.tokens.min()} to {self.tokens.max()}"
            )
        if len(set(self.names.tolist())) != len(self.names):
            raise ValueError("names must differ, but some come more than once")

    def save(self, path: str | Path) -> None:
        """Write .parquet with the columns item and tokens, or .npy with the tokens alone."""
        if Path(path).suffix not in (".npy", ".parquet"):
            raise ValueError(f"{path} must end in .parquet or .npy")
        if Path(path).suffix == ".npy":
            with files.replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, self.tokens.astype(np.int32))
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        flat = pa.array(self.tokens.astype(np.int32).ravel())
        lists = pa.FixedSizeListArray.from_arrays(flat, self.tokens.shape[1])
        table = pa.table({"item": self.names.tolist(), "tokens": lists})
        with files.replacing(path) as temporary:
            pq.write_table(table, temporary)

    @classmethod
    def load(cls, path: str | Path) -> "Ids":
        """Load a file that `save` wrote."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        from givens.storage.vectors import read

        if path.suffix == ".npy":
            tokens = _read_integers(path, read(path))
            return cls(np.arange(len(tokens)), tokens)
        tokens = _read_integers(path, read(f"{path}:tokens"))
        import pyarrow.parquet as pq

        if "item" not in pq.read_schema(path).names:
            raise ValueError(f"{path} holds no IDs: it has no column 'item'")
        names = pq.read_table(path, columns=["item"]).column(0).to_pylist()
        return cls(np.array(names, object if names and isinstance(names[0], str) else None), tokens)


def _read_integers(path: Path, table: Any) -> Integers:
    if table.dtype.kind not in "iu":
        raise ValueError(f"{path} holds no IDs: its tokens are {table.dtype}, not integers")
    return np.asarray(table[:], np.int64)


@dataclass(frozen=True)
class Churn:
    """How IDs differ from earlier ones."""

    kept: int
    changed: int
    added: int
    removed: int

    @property
    def rate(self) -> float:
        """The share of the earlier items whose ID has changed."""
        return self.changed / max(self.kept + self.changed, 1)


@dataclass(frozen=True)
class Assigned:
    """IDs, and how they differ from the earlier ones."""

    ids: Ids
    churn: Churn | None


def assign(
    codes: Int64[Tensor, "N m"],
    names: Names | None = None,
    *,
    further: bool = False,
    previous: Ids | None = None,
) -> Assigned:
    """Make IDs from the codes of items, optionally with one further token that makes them unique.

    The further token numbers the items with the same codes from 0. An item whose codes have not
    changed keeps its ID, and no ID passes from one item to another.

    Args:
        codes: (N, m), from `Tokenizer.encode`.
        names: of the items, all different; positions by default.
        further: whether to add the further token.
        previous: earlier IDs, by the same tokenizer.
    """
    check_tensor("codes", codes)
    fresh = codes.numpy().astype(np.int64)
    N, m = fresh.shape
    ids = Ids(np.arange(N) if names is None else np.asarray(names), fresh)
    if previous is None:
        tokens = np.column_stack([fresh, _number_items(fresh)]) if further else fresh
        return Assigned(Ids(ids.names, tokens), None)
    if previous.tokens.shape[1] != m + further:
        raise ValueError(
            f"previous must have {m + further} tokens an item, as asked for now, "
            f"but got {previous.tokens.shape[1]}"
        )
    rows = {name: row for row, name in enumerate(previous.names.tolist())}
    at = np.array([rows.get(name, -1) for name in ids.names.tolist()], np.int64)
    known = at >= 0
    if not known.any():
        raise ValueError(
            f"previous must know some of the items, but none: it has "
            f"{previous.names.tolist()[0]!r}, where now there is {ids.names.tolist()[0]!r}"
        )
    stays = known & (fresh == previous.tokens[at, :m]).all(1)
    tokens = fresh
    if further:
        held = np.where(stays, previous.tokens[at, m], -1)
        tokens = np.column_stack([fresh, _number_items(fresh, held, previous.tokens)])
    kept = int(stays.sum())
    changed = int(known.sum()) - kept
    removed = len(previous.names) - int(known.sum())
    return Assigned(Ids(ids.names, tokens), Churn(kept, changed, int((~known).sum()), removed))


@dataclass(frozen=True)
class Report:
    """The quality of IDs: how many items share one, and how evenly tokens are used."""

    colliding: float
    """The share of items that share their codes with another item."""
    distinct: int
    """The number of distinct codes."""
    largest: int
    """The number of items with the most common codes."""
    perplexity: list[float]
    """At each place: e^entropy of the tokens; their number if all are used equally."""
    used: list[int]
    """At each place: the number of tokens in use."""
    imbalance: list[float]
    """At each place: 1 if all tokens are used equally, their number if only one is."""


def report(codes: Int64[Tensor, "N m"], sizes: Sequence[int]) -> Report:
    """Measure codes (N, m); `sizes` has the number of tokens at each place."""
    _, counts = np.unique(codes.numpy(), axis=0, return_counts=True)
    perplexity, used, imbalance = [], [], []
    for column, size in zip(codes.T, sizes, strict=True):
        p = torch.bincount(column, minlength=size).double() / len(codes)
        perplexity.append(float(torch.special.entr(p).sum().exp()))
        used.append(int((p > 0).sum()))
        imbalance.append(float(size * p.square().sum()))
    shared = counts[counts > 1]
    return Report(
        float(shared.sum() / len(codes)),
        len(counts),
        int(counts.max()),
        perplexity,
        used,
        imbalance,
    )


def _number_items(
    codes: Integers, held: Integers | None = None, before: Integers | None = None
) -> Integers:
    """Number the items with the same codes, without numbers that such items had before.

    Non-negative numbers in `held` are kept.
    """
    N, m = codes.shape
    known = codes if before is None else np.concatenate([codes, before[:, :m]])
    groups = np.unique(known, axis=0, return_inverse=True)[1].ravel().tolist()
    taken: dict[int, set[int]] = {}
    if before is not None:
        for group, number in zip(groups[N:], before[:, m].tolist(), strict=True):
            taken.setdefault(group, set()).add(number)
    numbers = np.full(N, -1) if held is None else held.copy()
    following: dict[int, int] = {}
    for row in np.flatnonzero(numbers < 0).tolist():
        group = groups[row]
        number, used = following.get(group, 0), taken.get(group, ())
        while number in used:
            number += 1
        numbers[row], following[group] = number, number + 1
    return numbers
