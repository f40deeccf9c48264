"""A sentence-transformers model whose documents go through the index while it learns.

    python examples/sentences.py --seeds 3 --json rows.json      a small model, from nothing
    python examples/sentences.py --model FOLDER --lr 2e-5        one that is there already

The text is docstrings: the first sentence asks for the rest, of which 8 bytes are kept.
"""

import argparse
import inspect
import json
import sys
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import givens
from givens.export.faiss import to_faiss

BYTES, BATCH, HELD = 8, 64, 500


class Indexed(nn.Module):
    """The last module of a sentence-transformers model: embeddings as the index will hold them."""

    def __init__(self, layer: givens.IndexLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Replace the embedding, and tell the distortion."""
        out = self.layer(features["sentence_embedding"])
        return {**features, "sentence_embedding": out.embedding, "distortion": out.distortion}


def docstrings(most: int) -> np.ndarray:
    """Questions and documents, (most, 2), from torch and numpy and all they import."""
    things = [thing for module in list(sys.modules.values()) for thing in vars(module).values()]
    texts = [inspect.cleandoc(t.__doc__ or "") for t in things if type(t) is type(docstrings)]
    parts = (text.partition("\n\n") for text in texts)
    pairs = {head: " ".join(rest.split()[:64]) for head, _, rest in parts if len(rest) > 100}
    return np.random.default_rng(0).permutation(sorted(pairs.items()))[:most]


def small_model(texts: list[str]) -> SentenceTransformer:
    """The mean of word pieces' vectors, which nobody has learned yet."""
    words = Tokenizer(models.WordPiece(unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    how = trainers.WordPieceTrainer(vocab_size=8000, special_tokens=["?"], show_progress=False)
    words.train_from_iterator(texts, how)
    return SentenceTransformer(modules=[StaticEmbedding(words, embedding_dim=128)])


def train(ask: SentenceTransformer, pairs: np.ndarray, kind: str) -> givens.Quantizer:
    """Half of the steps without the index and half with it, or without it to the end."""
    index = givens.IndexLayer(ask.get_embedding_dimension(), BYTES, metric="cosine")
    tell = SentenceTransformer(modules=[*ask, Indexed(index)])
    adam = torch.optim.Adam([*ask.parameters(), *index.index_parameters()], given.lr)
    turn = givens.GCD(index.rotation.parameters(), lr=1e-2)
    rates = [torch.optim.lr_scheduler.CosineAnnealingLR(o, given.steps) for o in (adam, turn)]
    for step in range(given.steps):
        if kind == "layer" and step == given.steps // 2:
            index.warm_start(torch.from_numpy(ask.encode(pairs[:, 1])))
        questions, documents = pairs[torch.randperm(len(pairs))[:BATCH]].T.tolist()
        asked = ask(ask.preprocess(questions))["sentence_embedding"]
        told = tell(tell.preprocess(documents))
        scores = normalize(asked) @ told["sentence_embedding"].T / 0.05
        loss = cross_entropy(scores, torch.arange(BATCH)) + told["distortion"]
        tell.zero_grad()
        loss.backward()
        for learner in (adam, turn, *rates):
            learner.step()
    items = ask.encode(pairs[:, 1])
    return index.quantizer if kind == "layer" else givens.fit(items, BYTES, metric="cosine")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder; a small new model unless given")
    for name, value in (("lr", 1e-2), ("documents", 3000), ("steps", 400), ("seeds", 1)):
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--json", type=Path, help="write the rows here")
    given = parser.parse_args()
    rows, pairs = [], docstrings(given.documents)
    for seed, kind in [(s, k) for s in range(given.seeds) for k in ("after", "layer")]:
        torch.manual_seed(seed)
        model = SentenceTransformer(given.model) if given.model else small_model(pairs.ravel())
        index = to_faiss(train(model, pairs[HELD:], kind), model.encode(pairs[:, 1]))
        found = index.search(model.encode(pairs[:HELD, 0]), 10)[1] == np.arange(HELD)[:, None]
        rows.append({"index": kind, "seed": seed, "recall@10": float(found.any(1).mean())})
        print("{index:6} recall@10 {recall@10:.1%}".format(**rows[-1]))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
