"""An index as the last module of a sentence-transformers model, trained with it.

    add_index(model, subspaces=48)                     # 48 bytes a document
    warm_start(model, documents)                       # codebooks and rotation, from a sample
    loss = IndexLoss(model, MultipleNegativesRankingLoss(model))
    trainer = SentenceTransformerTrainer(
        model, arguments, train_dataset=pairs, loss=loss,
        optimizers=(IndexOptimizer(loss, lr=2e-5), None),
    )

Documents come out decoded, as the index holds them; queries (`model.encode_query`, and the first
column of a loss) are not quantized, since an index compares them as they are.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from givens.checks import check_number, check_whole
from givens.layer.layer import IndexLayer, Update
from givens.optim import GCD
from givens.quantizer import Metric, Quantizer
from givens.rotation import check_orthogonal
from givens.storage import files

try:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Module
    from sentence_transformers.util import (
        cos_sim,
        dot_score,
        pairwise_cos_sim,
        pairwise_dot_score,
    )
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "givens.sentence_transformers needs sentence-transformers: "
        "pip install 'givens[sentence-transformers]'"
    ) from error

FILE, KIND = "index.safetensors", "sentence-transformers index"
# A loss's cosine similarity, and what a cosine index computes instead: T(x) keeps its length.
SCORES = {cos_sim: dot_score, pairwise_cos_sim: pairwise_dot_score}
SIMILARITY = {"cosine": "dot", "ip": "dot", "l2": "euclidean"}
# Steps between two checks of the rotation, which another optimizer would break.
EVERY = 32


class Index(Module):  # type: ignore[misc]
    """The last module of a model: documents as the index holds them, queries as they are.

    It uses the first `dim` numbers of an embedding, as for a Matryoshka model. For the cosine,
    queries and documents are normalised first; decoded documents are scored by the inner product,
    which `add_index` sets as the model's similarity.
    """

    forward_kwargs = frozenset({"task"})

    def __init__(
        self,
        dim: int,
        subspaces: int,
        codewords: int = 256,
        coarse: int = 0,
        *,
        metric: Metric = "cosine",
        update: Update = "gradient",
        decay: float = 0.99,
    ) -> None:
        """Allocate the parameters, as `givens.IndexLayer` does; `warm_start` sets them."""
        super().__init__()
        self.layer = IndexLayer(
            dim, subspaces, codewords, coarse, metric=metric, update=update, decay=decay
        )
        self.config = {
            "dim": dim,
            "subspaces": subspaces,
            "codewords": codewords,
            "coarse": coarse,
            "metric": metric,
            "update": update,
            "decay": decay,
        }
        # For the losses: distortions and rows during `recording`; and the gradients of a cached
        # loss.
        self.records: list[tuple[Tensor, int]] | None = None
        self.share: Tensor | None = None
        # Whether a callback will call `warm_start`.
        self.awaited = False

    def forward(self, features: dict[str, Any], task: str | None = None) -> dict[str, Any]:
        """Quantize the embedding, unless it is a query's; add the codes if there are any."""
        x = features["sentence_embedding"][:, : self.layer.rotation.dim]
        if (task or features.get("task")) == "query":
            x = x.float()
            features["sentence_embedding"] = normalize(x) if self._unit else x
            return features
        out = self.layer(x)
        embedding = out.embedding
        if self.records is not None:
            self.records.append((out.distortion, len(x)))
        elif self.share is not None and torch.is_grad_enabled():
            share = self.share * len(x)
            embedding = _WithDistortion.apply(embedding, out.distortion, share)  # type: ignore[no-untyped-call]
        features["sentence_embedding"] = embedding
        if out.codes is not None:
            features["codes"] = out.codes.fine
        return features

    @contextmanager
    def recording(self) -> Iterator[list[tuple[Tensor, int]]]:
        """Collect the distortion and the rows of every forward pass of documents."""
        records: list[tuple[Tensor, int]] = []
        self.records = records
        try:
            yield records
        finally:
            self.records = None

    @property
    def quantizer(self) -> Quantizer:
        """A copy of the current quantizer, to save or to export."""
        return self.layer.quantizer

    def get_embedding_dimension(self) -> int:
        """The dimension of the output."""
        return self.layer.rotation.dim

    def get_config_dict(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return dict(self.config)

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Write one file with digests, which is checked when the model is loaded."""
        self._check_rotation()
        state = {name: part.contiguous() for name, part in self.layer.state_dict().items()}
        files.save(Path(output_path) / FILE, KIND, state, self.config)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> "Index":
        """Load what `save` wrote. Raises ValueError if the file is damaged."""
        known = ("token", "cache_folder", "revision", "local_files_only")
        where = {name: kwargs[name] for name in known if name in kwargs}
        path = cls.load_file_path(model_name_or_path, FILE, subfolder, **where)
        if path is None:
            raise ValueError(f"{model_name_or_path} has no {Path(subfolder) / FILE}")
        contents = files.load(path, KIND)
        try:
            index = cls(**contents.metadata)
            index.layer.load_state_dict(contents.tensors)
            index._check_rotation()
        except (RuntimeError, TypeError, ValueError) as error:
            what = " ".join(str(error).split())
            raise ValueError(f"{path} is not an index of sentence-transformers: {what}") from error
        return index

    @property
    def _unit(self) -> bool:
        return self.layer.metric == "cosine"

    def _check_rotation(self) -> None:
        try:
            check_orthogonal("the rotation", self.layer.rotation.matrix.detach())
        except ValueError as error:
            raise ValueError(
                "the rotation must stay orthogonal, but an optimizer other than givens.GCD has "
                "moved it; give the trainer optimizers=(IndexOptimizer(loss, lr=...), None)"
            ) from error


def add_index(
    model: SentenceTransformer,
    subspaces: int,
    codewords: int = 256,
    coarse: int = 0,
    **options: Any,
) -> Index:
    """Append an `Index` to a model: `subspaces` bytes a document. Returns the new module.

    Its dimension is that of the model's embeddings, or `truncate_dim` if that is set. The model's
    similarity becomes that of the index. `options` are those of `Index`.
    """
    if isinstance(model[-1], Index):
        raise ValueError("model must have no index yet, but its last module is one")
    dim = model.get_embedding_dimension()
    if dim is None:
        raise ValueError(
            "model must tell its embedding dimension, but get_embedding_dimension() is None"
        )
    index = Index(dim, subspaces, codewords, coarse, **options)
    model.append(index.to(model.device))
    model.similarity_fn_name = SIMILARITY[index.layer.metric]
    return index


def index_of(model: Any) -> Index:
    """The index, which is the last module of a model. Raises ValueError if there is none."""
    last = model[-1] if isinstance(model, nn.Sequential) and len(model) else None
    if not isinstance(last, Index):
        raise ValueError(
            f"the last module of the model must be an Index, but is {type(last).__name__}; "
            "call add_index(model, subspaces) first"
        )
    cut = getattr(model, "truncate_dim", None)
    if cut is not None and cut < last.get_embedding_dimension():
        raise ValueError(
            f"truncate_dim must not cut what the index holds, {last.get_embedding_dimension()} "
            f"numbers, but got truncate_dim={cut}; set it before add_index instead"
        )
    return last


def embed(model: SentenceTransformer, documents: Sequence[str], **options: Any) -> Tensor:
    """Document embeddings before quantization (N, n), on the model's device.

    Uses the model's prompt for documents; `options` are those of `model.encode`. The model's
    training mode is restored.
    """
    n, training = index_of(model).get_embedding_dimension(), model.training
    if isinstance(documents, str):
        raise TypeError("documents must be a list of texts, but got one str")
    name = next((p for p in ("document", "passage", "corpus") if p in model.prompts), None)
    if "prompt" not in options:
        options.setdefault("prompt_name", name)
    try:
        x = model.encode(list(documents), task="query", convert_to_tensor=True, **options)
    finally:
        model.train(training)
    table: Tensor = x.reshape(-1, n).clone()
    return table


def warm_start(
    model: SentenceTransformer, documents: Sequence[str], *, seed: int = 0, **options: Any
) -> None:
    """Fit the index's rotation and codebooks to a sample of documents.

    A few thousand are enough; there must be at least as many as codewords. Call it at once for a
    pretrained model, and use the callback `WarmStart` for a new one, whose embeddings mean nothing
    yet. `options` are those of `IndexLayer.warm_start`.
    """
    index_of(model).layer.warm_start(embed(model, documents), seed=seed, **options)


def to_faiss(model: SentenceTransformer, documents: Sequence[str], **options: Any) -> Any:
    """A Faiss index of documents, to be searched with `model.encode_query`.

    `options` are those of `givens.export.faiss.to_faiss`: kind, refine, ids, progress.
    """
    from givens.export.faiss import to_faiss as export

    return export(index_of(model).quantizer, embed(model, documents).cpu(), **options)


class IndexLoss(nn.Module):
    """Any sentence-transformers loss on documents as the index decodes them, plus the distortion.

    It must be the outermost wrapper, also around MatryoshkaLoss. It returns both terms, which the
    trainer sums and logs: {"base_loss": …, "distortion": weight · …}.
    """

    def __init__(
        self, model: SentenceTransformer, loss: nn.Module, weight: float = 1.0, *, queries: int = 1
    ) -> None:
        """Wrap the loss of a model that has an index.

        Args:
            model: a model whose last module is the index.
            loss: of the same model. If both it and the index use the cosine, it is changed to the
                inner product: queries are normalised, and documents are compared as in the index.
            weight: of the distortion (mean squared error).
            queries: how many of the first columns of the data are queries, which are not quantized;
                0 if both sides of a pair are documents.
        """
        super().__init__()
        self.index = index_of(model)
        self.weight = check_number("weight", weight, 0)
        self.queries = check_whole("queries", queries, 0)
        if not isinstance(loss, nn.Module) or isinstance(loss, IndexLoss):
            raise TypeError(
                f"loss must be a loss of sentence-transformers, but got {type(loss).__name__}"
            )
        if getattr(loss, "model", model) is not model:
            raise ValueError("loss must be of the same model, but it holds another one")
        self.cached = any(getattr(m, "uses_gradient_cache", False) for m in loss.modules())
        if self.cached and self.index.layer.update == "ema":
            raise ValueError(
                "a loss that caches gradients embeds twice, which update='ema' would count twice; "
                "give the index update='gradient'"
            )
        if self.index._unit and queries:
            for part in loss.modules():
                score = getattr(part, "similarity_fct", None)
                if not isinstance(score, nn.Module) and score in SCORES:
                    part.similarity_fct = SCORES[score]
        self.model, self.loss = model, loss
        self._steps = 0

    def forward(
        self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The loss and the weighted distortion of the documents."""
        if self.training and torch.is_grad_enabled():
            self._check()
        columns = [
            {"task": "query" if place < self.queries else "document", **features}
            for place, features in enumerate(sentence_features)
        ]
        self.index.share = None
        with self.index.recording() as records:
            loss = self.loss(columns, labels)
        if not records:
            raise ValueError(
                f"queries must leave a column of documents, but got queries={self.queries} "
                f"for {len(columns)} columns"
            )
        rows = sum(count for _, count in records)
        distortion = sum(part * (count / rows) for part, count in records)
        if self.cached and torch.is_grad_enabled():
            # The backward pass of a cached loss embeds the documents again, with gradients.
            loss = _Replayed.apply(loss, self.index, self.weight / rows)  # type: ignore[no-untyped-call]
        parts = loss if isinstance(loss, dict) else {"base_loss": loss}
        return {**parts, "distortion": self.weight * distortion}

    def get_config_dict(self) -> dict[str, Any]:
        """The fields of a model card."""
        return {
            "loss": type(self.loss).__name__,
            "weight": self.weight,
            "queries": self.queries,
            **self.index.get_config_dict(),
        }

    def _check(self) -> None:
        """Raise if the index is empty, or its rotation not orthogonal (checked at intervals)."""
        if not self.index.layer.warm and not self.index.awaited:
            raise RuntimeError(
                "the index has no codebooks yet; call warm_start(model, documents) before "
                "training or give the trainer callbacks=[WarmStart(documents, step)]"
            )
        self._steps += 1
        if self._steps % EVERY == 0:
            self.index._check_rotation()


class IndexOptimizer(torch.optim.Optimizer):
    """AdamW for the model and the codebooks, `givens.GCD` for the rotation, as one optimizer.

    A trainer schedules all rates together, and saves and restores it with its checkpoints. A
    rotation whose weight has `requires_grad=False` is frozen.
    """

    def __init__(
        self,
        loss: IndexLoss,
        lr: float = 2e-5,
        *,
        index_lr: float = 1e-3,
        turn_lr: float = 1e-2,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        """Group the parameters of a loss and its model.

        Args:
            loss: an `IndexLoss`.
            lr: of the model.
            index_lr: of the codebooks and coarse centroids.
            turn_lr: of the rotation: about the angle by which an axis turns in a step, in radians.
            weight_decay: for the model's matrices; biases, norms and the index have none.
            betas: of AdamW.
        """
        if not isinstance(loss, IndexLoss):
            raise TypeError(f"loss must be an IndexLoss, but got {type(loss).__name__}")
        layer = loss.index.layer
        apart = {id(part) for part in layer.parameters()}
        rest = [p for p in loss.parameters() if p.requires_grad and id(p) not in apart]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.ndim < 2]},
            {"params": layer.codebook_parameters(), "lr": index_lr},
        ]
        groups = [group for group in groups if group["params"]]
        turned = [p for p in layer.rotation.parameters() if p.requires_grad]
        self.parts: dict[str, torch.optim.Optimizer] = {}
        if groups:
            self.parts["adam"] = torch.optim.AdamW(groups, lr, betas, weight_decay=0.0)
        if turned:
            self.parts["gcd"] = GCD(turned, turn_lr)
        if not self.parts:
            raise ValueError("loss must have parameters that require a gradient, but has none")
        # The same group objects as the parts', so that a scheduler sets their rates.
        super().__init__(self._groups(), {})

    def __getstate__(self) -> dict[str, Any]:
        """What a copy of the optimizer needs."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "parts": self.parts}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the parts; others are refused, since no part would train them."""
        if all(param_group is not group for group in self._groups()):
            raise ValueError(
                "IndexOptimizer takes its parameters from its loss, and no further group; "
                "make them part of the model before, or give them an optimizer of their own"
            )
        super().add_param_group(param_group)

    def step(self, closure: Any = None) -> Any:
        """Take a step with each part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts.values():
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of each part."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state of the same parts."""
        if set(state_dict) != set(self.parts):
            raise ValueError(
                f"state_dict must have the parts {sorted(self.parts)}, but got {sorted(state_dict)}"
            )
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups = self._groups()

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts.values() for group in part.param_groups]


class WarmStart(TrainerCallback):  # type: ignore[misc]
    """A callback that fits the index to a sample of documents at a given step.

    Until then the model trains without the index.
    """

    def __init__(self, documents: Sequence[str], step: int = 0, **options: Any) -> None:
        """Store the sample; `options` are those of `warm_start`."""
        self.documents, self.options = list(documents), options
        self.step = check_whole("step", step, 0)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any
    ) -> None:
        """Let the loss accept an index that is still empty."""
        index_of(model).awaited = True

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        """Call `warm_start` once, at the given step."""
        if state.global_step >= self.step and not index_of(model).layer.warm:
            warm_start(model, self.documents, **self.options)


class _Replayed(torch.autograd.Function):
    """A loss that caches gradients: its gradients are known before documents are embedded again."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, index: Index, share: float) -> Tensor:
        ctx.index, ctx.share = index, share
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        ctx.index.share = ctx.share * g
        return g, None, None


class _WithDistortion(torch.autograd.Function):
    """The identity on the embedding; its backward pass also gives the distortion its gradient."""

    @staticmethod
    def forward(ctx: Any, embedding: Tensor, distortion: Tensor, share: Tensor) -> Tensor:
        ctx.share = share
        return embedding.view_as(embedding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        return g, ctx.share, None
