"""A sentence-transformers model that is trained with its index, saved with it and served by Faiss.

    python examples/sentences.py                     a small model, from nothing
    python examples/sentences.py --model FOLDER --lr 2e-5 --warm 0        a pretrained one

The text is docstrings: the first paragraph asks for the rest. Writes the model to model/ and the
index of all documents to index.faiss; the questions that are counted were held out.
"""

import argparse
import inspect
import json
import sys
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from givens.export.faiss import load_index, save_index
from givens.sentence_transformers import IndexLoss, IndexOptimizer, WarmStart, add_index, to_faiss


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


def train(model: SentenceTransformer, pairs: np.ndarray) -> None:
    """Learn the pairs; from step `warm` on, documents go through the index."""
    questions, documents = pairs.T.tolist()
    add_index(model, given.bytes)
    loss = IndexLoss(model, MultipleNegativesRankingLoss(model))
    arguments = SentenceTransformerTrainingArguments(
        "checkpoints",
        max_steps=given.steps,
        per_device_train_batch_size=64,
        lr_scheduler_type="cosine",
        save_strategy="no",
        report_to=[],
    )
    trainer = SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"question": questions, "document": documents}),
        loss=loss,
        optimizers=(IndexOptimizer(loss, given.lr), None),
        callbacks=[WarmStart(documents, given.warm)],
    )
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder; a small new model unless given")
    for name, value in (("lr", 1e-2), ("documents", 3000), ("steps", 400), ("warm", 200)):
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--bytes", type=int, default=8, help="of a document")
    parser.add_argument("--held", type=int, default=500, help="questions to count")
    parser.add_argument("--json", type=Path, help="write the row here")
    given = parser.parse_args()
    torch.manual_seed(0)
    pairs = docstrings(given.documents)
    model = SentenceTransformer(given.model) if given.model else small_model(pairs.ravel())
    train(model, pairs[given.held :])
    model.save("model")
    save_index(to_faiss(model, pairs[:, 1].tolist()), "index.faiss")
    served = SentenceTransformer("model", trust_remote_code=True)
    asked = served.encode_query(pairs[: given.held, 0].tolist())
    found = load_index("index.faiss").index.search(asked, 10)[1] == np.arange(given.held)[:, None]
    row = {"bytes": given.bytes, "recall@10": float(found.any(1).mean())}
    print("{bytes} bytes a document: recall@10 {recall@10:.1%}".format(**row))
    if given.json:
        given.json.write_text(json.dumps([row], indent=1) + "\n")
