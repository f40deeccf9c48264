"""The Quantizer: a rotation, codebooks and, for an inverted file, coarse centroids.

    y = x R              rotated; for cosine, x is normalised before
    c(y)                 the coarse centroid of y, by the metric; 0 without coarse centroids
    q(y) = c(y) + the nearest codeword of each subspace of y − c(y)
    x ≈ q(y) Rᵀ

X (N, n) vectors; R (n, n) rotation; D subspaces of width w = n/D; K codewords; L coarse centroids.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from givens.checks import LONGEST, check_choice, check_lengths, check_table, check_tensor
from givens.kmeans import assign_lists, nearest
from givens.rotation import check_orthogonal, determinant, full_precision
from givens.storage import files
from givens.storage.given import as_vectors
from givens.storage.vectors import chunks

Metric = Literal["l2", "ip", "cosine"]
KIND = "quantizer"

# Numbers held at once while vectors are streamed: rows times the widest intermediate result.
BUFFER = 1 << 23


@dataclass(frozen=True, eq=False)
class Codes:
    """The codes of N vectors: a codeword for each subspace, and the coarse centroid if any."""

    fine: UInt8[Tensor, "N D"]
    coarse: Int64[Tensor, " N"] | None = None

    def __len__(self) -> int:
        return len(self.fine)


class Quantizer:
    """A rotation, codebooks and optional coarse centroids, in float32.

    Vectors may be a tensor, an array or a memory-mapped file of any size and real type, which is
    read a slice at a time; or lists, an Arrow column, a column or frame of pandas or polars, or the
    path of a file. No vector may be longer than 1e14, and for cosine none but zero shorter than
    1e-12. Everything is computed in float32, also under autocast.
    """

    def __init__(
        self,
        rotation: Float[Tensor, "n n"],
        codebooks: Float[Tensor, "D K w"],
        coarse: Float[Tensor, "L n"] | None = None,
        metric: Metric = "l2",
    ) -> None:
        """Check that the parts fit together, and hold them.

        Args:
            rotation: R, with determinant +1.
            codebooks: (D, K, n/D), for the rotated vectors, or for their residuals with `coarse`.
            coarse: coarse centroids (L, n) in the rotated space.
            metric: of the index and of the assignment to coarse centroids.
        """
        check_choice("metric", metric, get_args(Metric))
        check_tensor("rotation", rotation)
        self.rotation = _part("rotation", rotation, 2, rotation.device)
        self.codebooks = _part("codebooks", codebooks, 3, rotation.device)
        self.coarse = None if coarse is None else _part("coarse", coarse, 2, rotation.device)
        self.metric: Metric = metric
        _check(self.rotation, self.codebooks, self.coarse)

    @property
    def dim(self) -> int:
        """The dimension n."""
        return len(self.rotation)

    @property
    def subspaces(self) -> int:
        """D."""
        return self.codebooks.shape[0]

    @property
    def codewords(self) -> int:
        """K, in each subspace."""
        return self.codebooks.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of its parts and of the codes that it computes."""
        return self.rotation.device

    @property
    def fingerprint(self) -> str:
        """A digest of the parts, which tells whether an index and a model belong together."""
        digest = hashlib.sha256(self.metric.encode())
        for name, tensor in self._tensors().items():
            digest.update(f"{name}{tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().numpy().tobytes())
        return digest.hexdigest()[:32]

    def rotate(self, x: Any) -> Float[Tensor, "N n"]:
        """Y = x R, with x normalised first for cosine: the space of the codebooks."""
        check_table("x", x, self.dim)
        x = torch.as_tensor(x, dtype=self.rotation.dtype, device=self.device)
        check_lengths("x", x, self.metric)
        return self._rotate(x)

    def encode(self, x: Any) -> Codes:
        """The codes of vectors (N, n), on the quantizer's device."""
        x = as_vectors(x)
        N, device = self._rows(x), self.device
        fine = torch.empty(N, self.subspaces, dtype=torch.uint8, device=device)
        coarse = torch.empty(N, dtype=torch.int64, device=device)
        at = 0
        for part in self._chunks(x):
            rows = slice(at, at := at + len(part))
            codes = self.encode_rotated(self._rotate(part))
            fine[rows] = codes.fine
            if codes.coarse is not None:
                coarse[rows] = codes.coarse
        return Codes(fine, None if self.coarse is None else coarse)

    def encode_rotated(self, Y: Float[Tensor, "N n"]) -> Codes:
        """The codes of vectors from `rotate`, all at once."""
        with full_precision(Y.device):
            if self.coarse is None:
                return Codes(nearest(Y, self.codebooks))
            coarse = self.assign(Y)
            return Codes(nearest(Y - self.coarse[coarse], self.codebooks), coarse)

    def decode(self, codes: Codes) -> Float[Tensor, "N n"]:
        """Decode codes and rotate back: q(y) Rᵀ."""
        with full_precision(self.device):
            return self.codewords_of(codes) @ self.rotation.mT

    def codewords_of(self, codes: Codes) -> Float[Tensor, "N n"]:
        """q(y), in the rotated space."""
        self.check_codes(codes)
        fine = codes.fine.to(self.codebooks.device, torch.int64)
        Y = self.codebooks[torch.arange(self.subspaces, device=fine.device), fine].flatten(1)
        if self.coarse is not None and codes.coarse is not None:
            Y = Y + self.coarse[codes.coarse.to(Y.device, torch.int64)]
        return Y

    def distortion(self, x: Any) -> float:
        """The mean squared L2 error of vectors (N, n), normalised first for cosine."""
        x = as_vectors(x)
        N = self._rows(x)
        if N == 0:
            raise ValueError("x must have at least one vector, but got 0")
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in self._chunks(x):
            Y = self._rotate(part)
            q = self.codewords_of(self.encode_rotated(Y))
            # By column first: the order of a plain sum depends on the number of threads.
            total += (Y - q).square().sum(0, dtype=torch.float64).sum()
        return float(total / N)

    def assign(self, Y: Float[Tensor, "N n"]) -> Int64[Tensor, " N"]:
        """The coarse centroid of rotated vectors, by the metric."""
        if self.coarse is None:
            raise ValueError("assign needs coarse centroids, but this quantizer has none")
        return assign_lists(Y, self.coarse, self.metric)

    def to(self, device: torch.device | str | int) -> "Quantizer":
        """A copy on another device; the parts stay in float32."""
        if not isinstance(device, torch.device | str | int):
            raise TypeError(f"device must be a device or its name, but got {device!r}")
        coarse = None if self.coarse is None else self.coarse.to(device)
        rotation, codebooks = self.rotation.to(device), self.codebooks.to(device)
        return Quantizer(rotation, codebooks, coarse, self.metric)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, atomically."""
        files.save(path, KIND, self._tensors(), {"metric": self.metric})

    @classmethod
    def load(cls, path: str | Path) -> "Quantizer":
        """Load a file that `save` wrote, on the CPU. Raises ValueError if it is damaged."""
        contents = files.load(path, KIND)
        parts = contents.tensors
        try:
            rotation, codebooks = parts.pop("rotation"), parts.pop("codebooks")
            coarse, metric = parts.pop("coarse", None), contents.metadata["metric"]
            if parts:
                raise ValueError(f"it has an unknown part {min(parts)!r}")
            return cls(rotation, codebooks, coarse, metric)
        except (KeyError, ValueError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path} is not a quantizer: {what}") from error

    def __repr__(self) -> str:
        return (
            f"Quantizer(dim={self.dim}, subspaces={self.subspaces}, codewords={self.codewords}, "
            f"{self._lists()}, metric={self.metric!r})"
        )

    def _lists(self) -> str:
        return "no coarse" if self.coarse is None else f"coarse={len(self.coarse)}"

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"rotation": self.rotation, "codebooks": self.codebooks}
        return tensors if self.coarse is None else {**tensors, "coarse": self.coarse}

    def _rotate(self, x: Tensor) -> Tensor:
        if self.metric == "cosine":
            x = torch.nn.functional.normalize(x)
        with full_precision(x.device):
            return x @ self.rotation

    def check_codes(self, codes: Any) -> None:
        """Raise unless codes are this quantizer's."""
        if not isinstance(codes, Codes):
            raise TypeError(f"codes must be Codes, as encode gives, but got {type(codes).__name__}")
        for name, part in (("codes", codes.fine), ("coarse codes", codes.coarse)):
            if part is not None or name == "codes":
                check_tensor(name, part)
        N, lists = len(codes.fine), 0 if self.coarse is None else len(self.coarse)
        if codes.fine.shape != (N, self.subspaces) or (codes.coarse is None) != (not lists):
            raise ValueError(
                f"codes must have shape (N, {self.subspaces}) and {self._lists()}, but got "
                f"{tuple(codes.fine.shape)} and {'no ' if codes.coarse is None else ''}coarse codes"
            )
        if codes.coarse is not None and codes.coarse.shape != (N,):
            shape = tuple(codes.coarse.shape)
            raise ValueError(f"coarse codes must have shape ({N},), but got {shape}")
        both = (("codes", codes.fine, self.codewords), ("coarse codes", codes.coarse, lists))
        for name, part, count in both:
            if part is None:
                continue
            if part.is_floating_point() or part.is_complex() or part.dtype == torch.bool:
                raise TypeError(f"{name} must be integers, but got {part.dtype}")
            # torch has no minimum of the wider unsigned types.
            part = part if part.dtype == torch.uint8 else part.to(torch.int64)
            if N and not 0 <= int(part.min()) <= int(part.max()) < count:
                raise ValueError(
                    f"{name} must be in 0..{count - 1}, "
                    f"but got {int(part.min())} to {int(part.max())}"
                )

    def _rows(self, x: Any) -> int:
        check_table("x", x, self.dim)
        return int(x.shape[0])

    def _chunks(self, x: Any) -> Iterator[Tensor]:
        """Slices of x in float32 on the device, checked for lengths that float32 can compare."""
        widest = max(self.dim, 0 if self.coarse is None else len(self.coarse))
        at = 0
        for part in chunks(x, BUFFER // widest, self.device):
            check_lengths("x", part, self.metric, first=at)
            yield part
            at += len(part)


def load(path: str | Path) -> Quantizer:
    """Load a quantizer that `Quantizer.save` wrote. Raises ValueError if the file is damaged."""
    return Quantizer.load(path)


def _part(name: str, tensor: Tensor, ndim: int, device: torch.device) -> Tensor:
    check_tensor(name, tensor)
    if tensor.ndim != ndim or not tensor.is_floating_point():
        shape = tuple(tensor.shape)
        raise ValueError(
            f"{name} must be a floating-point tensor of {ndim} axes, "
            f"but got {tensor.dtype} of shape {shape}"
        )
    tensor = tensor.detach().to(device, torch.float32).contiguous()
    if not tensor.isfinite().all():
        raise ValueError(f"{name} must be finite, but has NaN or infinite entries")
    # The largest that accepted vectors can lead to.
    if tensor.numel() and tensor.abs().max() > 4 * LONGEST:
        raise ValueError(
            f"{name} must be no larger than {4 * LONGEST:g} to be compared in float32, "
            f"but has {float(tensor.abs().max()):.1e}; scale vectors and {name} down"
        )
    return tensor


def _check(R: Tensor, codebooks: Tensor, coarse: Tensor | None) -> None:
    n = R.shape[1]
    D, K, w = codebooks.shape
    if R.shape != (n, n) or n < 1:
        raise ValueError(f"rotation must have shape (n, n), but got {tuple(R.shape)}")
    if D * w != n:
        raise ValueError(
            f"codebooks must have shape (D, K, w) with D·w = {n}, but got {tuple(codebooks.shape)}"
        )
    if not 2 <= K <= 256:
        raise ValueError(f"codebooks must have 2 to 256 codewords, but got {K}")
    if coarse is not None and (coarse.shape[1] != n or len(coarse) < 1):
        raise ValueError(f"coarse must have shape (L, {n}), but got {tuple(coarse.shape)}")
    check_orthogonal("rotation", R)
    if determinant(R) < 0:
        raise ValueError(
            "rotation must have determinant +1, but got −1; flip the sign of one column together "
            "with that coordinate of codebooks and coarse"
        )
