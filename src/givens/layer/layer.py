"""The index as a layer of a model: T(X) = φ(XR)Rᵀ, trained with the towers (paper, section 2.1).

X (m, n) embeddings; R (n, n) rotation, W = Rᵀ its parameter; D subspaces of width w = n/D;
K codewords each; L coarse centroids. The gradients are in `straight_through`; this module holds the
parameters, their warm start and the codewords' usage.
"""

from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils import parametrize

from givens import distributed
from givens.checks import (
    check_choice,
    check_lengths,
    check_number,
    check_seed,
    check_sizes,
    check_tensor,
    check_whole,
)
from givens.fixed.fit import Init, Method, fit
from givens.kmeans import Quantized, assign_lists, quantize
from givens.layer.straight_through import StraightThrough, normalise, normalise_exactly
from givens.quantizer import Codes, Metric, Quantizer
from givens.rotation import Rotation, full_precision

Update = Literal["gradient", "ema"]

# A codeword is dead if it is chosen less often than this share of the average.
DEAD = 0.01
# A moving average over a smaller share of the vectors than this is not used.
FLOOR = 1e-12


class Indexed(NamedTuple):
    """The output of an `IndexLayer`."""

    embedding: Tensor
    """T(X), (m, n): X as the index decodes it, float32."""
    codes: Codes | None
    """The codes of X; none while the layer passes embeddings through."""
    distortion: Tensor
    """The mean squared L2 error, a scalar; 0 while the layer passes embeddings through."""


class IndexLayer(nn.Module):
    """Embeddings as the index will decode them, with gradients to towers, R and codebooks.

    Until `warm_start` it passes embeddings through unchanged (normalised, for cosine), and
    `layer.warm` is False. It computes in float32, also under autocast, without host
    synchronisation.

        turn = givens.GCD(layer.rotation.parameters(), lr=1e-2)
        adam = torch.optim.Adam([*towers.parameters(), *layer.codebook_parameters()])
    """

    codebooks: nn.Parameter
    coarse: nn.Parameter | None
    usage: Tensor
    sums: Tensor | None
    started: Tensor

    def __init__(
        self,
        dim: int,
        subspaces: int = 8,
        codewords: int = 256,
        coarse: int = 0,
        *,
        metric: Metric = "l2",
        update: Update = "gradient",
        decay: float = 0.99,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate the parameters; `warm_start` sets them.

        Args:
            dim: n.
            subspaces: D, the bytes of a code; must divide `dim`.
            codewords: K, for each subspace, 2 to 256.
            coarse: number of coarse centroids of an inverted file; the codebooks then encode the
                residuals. 0 for none.
            metric: of the index. "cosine" normalises the input; score `out.embedding` by the inner
                product, without normalising it again.
            update: "gradient" if an optimizer of yours trains the codebooks; "ema" if every forward
                pass in training moves them to the moving average of the vectors that choose them,
                over all ranks.
            decay: of the moving averages: `usage`, and the codebooks with "ema".
            device: of the parameters.
        """
        super().__init__()
        _check(dim, subspaces, codewords, coarse, metric, update, decay)
        self.metric: Metric = metric
        self.update: Update = update
        self.decay = decay
        self.rotation = Rotation(dim, device=device, dtype=torch.float32)
        shape = (subspaces, codewords, dim // subspaces)
        words = torch.zeros(shape, dtype=torch.float32, device=device)
        self.codebooks = nn.Parameter(words, requires_grad=update == "gradient")
        centroids = nn.Parameter(words.new_zeros(coarse, dim)) if coarse else None
        self.register_parameter("coarse", centroids)
        # The frequency of each codeword: a moving average that sums to 1 in every subspace.
        self.register_buffer("usage", words.new_full(words.shape[:2], 1 / codewords))
        self.register_buffer("sums", torch.zeros_like(words) if update == "ema" else None)
        self.register_buffer("started", torch.zeros((), dtype=torch.uint8, device=device))
        # `started` as a Python bool: reading the tensor would synchronise with the device.
        self._warm = False

    def forward(self, x: Float[Tensor, "m n"]) -> Indexed:
        """T(x), its codes and the distortion."""
        self._check_vectors("x", x)
        with full_precision(x.device):
            v = x.float()
            if v.device.type == "cpu" and not torch.compiler.is_compiling():
                # On other devices this would synchronise.
                check_lengths("x", v.detach(), self.metric, holes=True)
            if not self._warm:
                return self._pass_through(self._normalise(v))
            W = self.rotation.weight
            with torch.no_grad():
                unit = length = None
                # In eval mode computed as in a Quantizer, so that both round alike.
                if self.metric == "cosine":
                    unit, length = (normalise if self.training else normalise_exactly)(v)
                R = W.mT if self.training else W.mT.contiguous()
                lists, residual = self._find_residuals((v if unit is None else unit) @ R)
                codes, *found = self._quantize(residual, count=self.training)
            parts = (W, self.codebooks, self.coarse, unit, length, R, lists, *found)
            embedding, distortion = StraightThrough.apply(v, *parts)  # type: ignore[no-untyped-call]
            return Indexed(embedding, Codes(codes, lists), distortion)

    @torch.no_grad()
    def warm_start(
        self,
        sample: Float[Tensor, "N n"],
        iterations: int = 200,
        *,
        method: Method = "opq",
        init: Init | Tensor | Quantizer = "auto",
        seed: int = 0,
    ) -> None:
        """Fit R, codebooks and centroids to a buffer of embeddings with `givens.fit`.

        With several ranks, the first fits its sample and broadcasts the result.

        Args:
            sample: N embeddings; N must be at least `codewords` and `coarse`.
            iterations: `max_iter` of `fit`, the maximum number of passes over the sample.
            method: as in `fit`: "opq", "pq" to leave R at the identity, "gcd-greedy", …
            init: the initial R, as in `fit`.
            seed: for all random draws.
        """
        self._check_vectors("sample", sample)
        (D, K, _), L = self.codebooks.shape, 0 if self.coarse is None else len(self.coarse)
        for name, count in (("codewords", K), ("coarse", L)):
            if len(sample) < count:
                raise ValueError(
                    f"sample must have at least as many vectors as {name}, "
                    f"but got {len(sample)} for {name}={count}"
                )
        check_whole("iterations", iterations, 1)
        check_lengths("sample", sample.detach().float(), self.metric)
        how: Any = {"method": method, "metric": self.metric, "init": init, "seed": seed}
        how |= {"max_iter": iterations, "sample": 0, "device": self.codebooks.device}
        with full_precision(self.codebooks.device):
            first = distributed.is_first()
            x = sample.detach().float()
            self.start_from(fit(x, D, codewords=K, coarse=L, **how) if first else None)

    @torch.no_grad()
    def start_from(self, q: Quantizer | None) -> None:
        """Continue from the parts of a quantizer that was fitted or loaded.

        With several ranks, the parts of the first are broadcast; others may give None.
        """
        with full_precision(self.codebooks.device):
            W = torch.empty_like(self.rotation.matrix, memory_format=torch.contiguous_format)
        if q is not None:
            if not isinstance(q, Quantizer):
                raise TypeError(f"q must be a Quantizer, but got {type(q).__name__}")
            mine = (self.codebooks, self.coarse)
            wanted = [None if part is None else tuple(part.shape) for part in mine]
            given = [
                None if part is None else tuple(part.shape) for part in (q.codebooks, q.coarse)
            ]
            if (given, q.metric) != (wanted, self.metric):
                raise ValueError(
                    f"q must have codebooks and coarse of shapes {wanted} for {self.metric}, "
                    f"but got {given} for {q.metric}"
                )
            W.copy_(q.rotation.mT)
            self.codebooks.copy_(q.codebooks)
            if self.coarse is not None and q.coarse is not None:
                self.coarse.copy_(q.coarse)
        elif distributed.is_first():
            raise ValueError("q must be a Quantizer on the first rank, but got None")
        distributed.copy_from_first(W, self.codebooks, self.coarse)
        self.usage.fill_(1 / self.usage.shape[1])
        if self.sums is not None:
            torch.mul(self.codebooks, self.usage[..., None], out=self.sums)
        if parametrize.is_parametrized(self.rotation):
            self.rotation.weight = W  # type: ignore[assignment]  # sets the parametrization
        else:
            self.rotation.weight.copy_(W)
        self.started.fill_(1)
        self._warm = True

    @property
    def warm(self) -> bool:
        """Whether the layer quantizes; False until `warm_start`."""
        return self._warm

    @property
    def quantizer(self) -> Quantizer:
        """A copy of the current Quantizer: to encode items, to save or to export."""
        self._check_warm()
        coarse = None if self.coarse is None else self.coarse.detach().clone()
        with full_precision(self.codebooks.device):
            rotation = self.rotation.matrix.detach().clone()
        return Quantizer(rotation, self.codebooks.detach().clone(), coarse, self.metric)

    def codebook_parameters(self) -> list[nn.Parameter]:
        """Codebooks and coarse centroids, for an ordinary optimizer; R is left to `GCD`."""
        parts = [self.codebooks, self.coarse]
        return [part for part in parts if part is not None and part.requires_grad]

    def index_parameters(self) -> list[nn.Parameter]:
        """`codebook_parameters`, by its earlier name."""
        return self.codebook_parameters()

    @property
    def perplexity(self) -> Float[Tensor, " D"]:
        """The effective number of codewords, e^entropy: K if all are chosen equally often."""
        frequency = self.usage / self.usage.sum(1, keepdim=True)
        entropy: Tensor = torch.special.entr(frequency).sum(1)
        return entropy.exp()

    @property
    def dead(self) -> Bool[Tensor, "D K"]:
        """Codewords that are chosen less than a hundredth as often as the average."""
        return self.usage < DEAD / self.usage.shape[1]

    @torch.no_grad()
    def revive(self, sample: Float[Tensor, "N n"], *, seed: int = 0) -> Int[Tensor, ""]:
        """Move dead codewords to sample vectors, drawn in proportion to their squared errors.

        Returns their number as a tensor, without host synchronisation. With several ranks every
        rank must call it: the codebooks of the first are broadcast.
        """
        self._check_vectors("sample", sample)
        self._check_warm()
        seed = check_seed(seed)
        if len(sample) == 0:
            raise ValueError("sample must have at least one vector, but got 0")
        with full_precision(sample.device):
            Y = self._normalise(sample.float()) @ self.rotation.matrix.contiguous()
            _, residual = self._find_residuals(Y)
            found = self._quantize(residual, count=False)
        D, K, w = self.codebooks.shape
        parts = residual.view(-1, D, w)
        errors = found.errors.view_as(parts).square().sum(2)
        generator = torch.Generator(sample.device).manual_seed(seed)
        # The smallest of exponential variables whose rates are the errors; NaN is never drawn.
        clocks = torch.empty_like(errors).exponential_(generator=generator)
        speeds, drawn = (errors / clocks).nan_to_num(0, 0, 0).mT.topk(min(len(parts), K))
        rank = self.dead.cumsum(1) - 1
        inside = rank.clamp(0, drawn.shape[1] - 1)
        moved = self.dead & (rank == inside) & (speeds.gather(1, inside) > 0)
        row = drawn.gather(1, inside)[..., None].expand(-1, -1, w)
        vectors = parts.transpose(0, 1).gather(1, row)
        self.codebooks.copy_(torch.where(moved[..., None], vectors, self.codebooks))
        self.usage.copy_(torch.where(moved, 1 / K, self.usage))
        if self.sums is not None:
            self.sums.copy_(torch.where(moved[..., None], self.codebooks / K, self.sums))
        distributed.copy_from_first(self.codebooks, self.usage, self.sums)
        return moved.sum()

    def extra_repr(self) -> str:
        """Show the sizes, and whether the layer quantizes yet."""
        (D, K, _), L = self.codebooks.shape, 0 if self.coarse is None else len(self.coarse)
        state = "" if self._warm else ", cold: passes embeddings through until warm_start"
        return (
            f"subspaces={D}, codewords={K}, coarse={L}, metric={self.metric!r}, "
            f"update={self.update!r}{state}"
        )

    def _normalise(self, v: Tensor) -> Tensor:
        return normalise_exactly(v)[0] if self.metric == "cosine" else v

    def _pass_through(self, x: Tensor) -> Indexed:
        """Pass x through; parameters get zero gradients, as DistributedDataParallel expects."""
        nothing = x.new_zeros(())
        for part in self.parameters():
            if part.requires_grad:
                nothing = nothing + 0 * part.flatten()[0]
        return Indexed(x + nothing, None, nothing)

    def _find_residuals(self, Y: Tensor) -> tuple[Tensor | None, Tensor]:
        """The lists of rotated vectors, if there are any, and the residuals."""
        if self.coarse is None:
            return None, Y
        lists = assign_lists(Y, self.coarse, self.metric)
        return lists, Y - self.coarse[lists]

    def _quantize(self, residual: Tensor, *, count: bool) -> Quantized:
        """Quantize residuals; with `count`, update the moving averages."""
        usage, share = None, (1 - self.decay) / max(len(residual), 1)
        count = count and len(residual) > 0
        if count and self.sums is None:
            usage = self.usage.mul_(self.decay)
        found = quantize(residual, self.codebooks.detach(), usage, share)
        if count and self.sums is not None:
            self._average(self.sums, residual, found.at)
        return found

    def _average(self, sums: Tensor, residual: Tensor, at: Tensor) -> None:
        """The update of "ema": moving averages of the codewords' counts and of their vectors."""
        D, K, w = self.codebooks.shape
        one = residual.new_ones(()).expand(len(at))
        # An average would keep NaN for ever.
        good = residual.isfinite().all(1).repeat_interleave(D)[:, None]
        chosen = torch.cat([one[:, None], residual.view(-1, w)], dim=1).where(good, 0)
        added = residual.new_zeros(D * K, 1 + w).index_add_(0, at, chosen)
        added = distributed.sum_ranks(added)
        # The counts of every subspace sum to the number of vectors.
        added = added.view(D, K, 1 + w) / added[:K, 0].sum().clamp_min(1)
        self.usage.lerp_(added[..., 0], 1 - self.decay)
        sums.lerp_(added[..., 1:], 1 - self.decay)
        usage = self.usage[..., None]
        self.codebooks.copy_(torch.where(usage > FLOOR, sums / usage, self.codebooks))

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._warm = bool(self.started)

    def _check_vectors(self, name: str, x: Tensor) -> None:
        D, _, w = self.codebooks.shape
        if self.codebooks.dtype != torch.float32:
            raise ValueError(
                f"IndexLayer keeps its parameters in float32, but they are {self.codebooks.dtype}; "
                "use torch.autocast around the model instead"
            )
        n = D * w
        check_tensor(name, x)
        if x.ndim != 2 or x.shape[1] != n or not x.is_floating_point():
            raise ValueError(
                f"{name} must be a floating-point tensor of shape (m, {n}), "
                f"but got {x.dtype} of shape {tuple(x.shape)}"
            )

    def _check_warm(self) -> None:
        if not self._warm:
            raise RuntimeError(
                "the layer has no codebooks yet; call layer.warm_start(sample) first"
            )


def _check(
    dim: int, subspaces: int, codewords: int, coarse: int, metric: str, update: str, decay: float
) -> None:
    check_sizes(dim, subspaces, codewords, coarse)
    check_choice("metric", metric, get_args(Metric))
    check_choice("update", update, get_args(Update))
    if check_number("decay", decay, 0) >= 1:
        raise ValueError(f"decay must be in [0, 1), but got decay={decay}")
