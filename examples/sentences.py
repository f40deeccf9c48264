"""A sentence-transformers model whose documents go through the index while it learns.

    python examples/sentences.py --seeds 5 --json rows.json      a small model, from nothing
    python examples/sentences.py --model FOLDER --lr 2e-5        one that is there already

The text is docstrings: their first sentence is the question, the rest the document. Questions stay
as they are; of a document 16 bytes are kept.
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
from givens.export.faiss import fit_opq, to_faiss

BYTES, BATCH, HELD = 16, 64, 500


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
    things = [t for module in list(sys.modules.values()) for t in list(vars(module).values())]
    texts = [inspect.cleandoc(t.__doc__ or "") for t in things if inspect.isroutine(t)]
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
    adam = torch.optim.Adam([*ask.parameters(), *index.index_parameters()], options.lr)
    turn = givens.GCD(index.rotation.parameters(), lr=1e-2)
    for step in range(options.steps):
        if kind == "layer" and step == options.steps // 2:
            index.warm_start(torch.from_numpy(ask.encode(pairs[:, 1])))
        questions, documents = pairs[torch.randperm(len(pairs))[:BATCH]].T.tolist()
        asked = ask(ask.preprocess(questions))["sentence_embedding"]
        told = tell(tell.preprocess(documents))
        scores = normalize(asked) @ told["sentence_embedding"].T / 0.05
        loss = cross_entropy(scores, torch.arange(BATCH)) + told["distortion"]
        tell.zero_grad()
        loss.backward()
        adam.step()
        turn.step()
    if kind == "layer":
        return index.quantizer
    return fit_opq(ask.encode(pairs[:, 1]), BYTES, metric="cosine")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder; a small new model unless given")
    parser.add_argument("--lr", type=float, default=1e-2)
    for name, value in (("--documents", 3000), ("--steps", 600), ("--seeds", 1)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows, pairs = [], docstrings(options.documents)
    for seed, kind in [(s, k) for s in range(options.seeds) for k in ("after", "layer")]:
        torch.manual_seed(seed)
        model = SentenceTransformer(options.model) if options.model else small_model(pairs.ravel())
        q = train(model, pairs[HELD:], kind)
        asked, items = model.encode(pairs[:HELD, 0]), model.encode(pairs[:, 1])
        found = to_faiss(q, items).search(asked, 10)[1] == np.arange(HELD)[:, None]
        rows.append({"index": kind, "seed": seed, "recall@10": float(found.any(1).mean())})
        print("{index:6} recall@10 {recall@10:.1%}".format(**rows[-1]))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
