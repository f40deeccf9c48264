"""A sentence-transformers model whose documents go through the index while it learns.

    python examples/sentences.py --json rows.json       a small model, learned from nothing
    python examples/sentences.py --model FOLDER         one that sentence-transformers can load

The text is what every Python has: docstrings. Their first sentence is the question, the rest the
document. Questions stay as they are; of documents 16 bytes are kept.
"""

import argparse
import inspect
import json
import sys
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer, models
from sentence_transformers.models.tokenizer import WhitespaceTokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import givens
from givens.export.faiss import fit_opq, to_faiss

BYTES, BATCH, HELD_OUT = 16, 64, 500


class Indexed(nn.Module):
    """The last module of a sentence-transformers model: embeddings as the index will hold them."""

    def __init__(self, layer: givens.IndexLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Replace the embedding, and tell the distortion."""
        out = self.layer(features["sentence_embedding"])
        return {**features, "sentence_embedding": out.embedding, "distortion": out.distortion}


def docstrings() -> list[tuple[str, str]]:
    """Questions and documents, from all that is imported here."""
    found, modules = {}, [vars(module) for module in list(sys.modules.values())]
    classes = [vars(c) for names in modules for c in names.values() if inspect.isclass(c)]
    for thing in (thing for names in modules + classes for thing in list(names.values())):
        text = thing.__doc__ if callable(thing) and isinstance(thing.__doc__, str) else ""
        question, _, document = inspect.cleandoc(text).partition("\n\n")
        if len(question.split()) > 4 and len(document.split()) > 20:
            found[question] = document
    return sorted(found.items())


def small_model(texts: list[str]) -> list[nn.Module]:
    """The mean of its words' vectors, which nobody has learned yet."""
    vocabulary = {word.strip(".,:;()`'\"") for text in texts for word in text.lower().split()}
    tokenizer = WhitespaceTokenizer(sorted(vocabulary), stop_words=[], do_lower_case=True)
    words = models.WordEmbeddings(tokenizer, torch.randn(len(vocabulary), 128), True)
    return [words, models.Pooling(128)]


def train(encoder: list[nn.Module], pairs: np.ndarray, steps: int, lr: float, after: bool) -> float:
    """Half of the steps without the index, half with it; recall@10 of what was held out."""
    index = givens.IndexLayer(
        encoder[-1].get_sentence_embedding_dimension(), BYTES, metric="cosine"
    )
    ask = SentenceTransformer(modules=encoder)
    tell = SentenceTransformer(modules=[*encoder, Indexed(index)])
    adam = torch.optim.Adam([*ask.parameters(), *index.index_parameters()], lr)
    turn = givens.GCD(index.rotation.parameters(), 1e-2)
    draws = np.random.default_rng(0)
    for step in range(steps):
        if step == steps // 2 and not after:
            index.warm_start(torch.from_numpy(tell.encode(pairs[:, 1])))
        questions, documents = draws.choice(pairs[HELD_OUT:], BATCH, replace=False).T.tolist()
        asked = normalize(ask(ask.tokenize(questions))["sentence_embedding"])
        told = tell(tell.tokenize(documents))
        scores = asked @ told["sentence_embedding"].T / 0.05
        loss = cross_entropy(scores, torch.arange(BATCH)) + told["distortion"]
        adam.zero_grad()
        turn.zero_grad()
        loss.backward()
        adam.step()
        turn.step()
    items = ask.encode(pairs[:, 1])
    q = fit_opq(items, BYTES, metric="cosine") if after else index.quantizer
    asked = ask.encode(pairs[:HELD_OUT, 0])
    _, found = to_faiss(q, items).search(asked, 10)
    return float((found == np.arange(HELD_OUT)[:, None]).any(1).mean())
