"""The same seed gives the same bits with any number of threads."""

import hashlib

import faiss
import pytest
import torch

import givens
from givens.export.faiss import to_faiss
from givens.retrieval.config import Config
from givens.retrieval.data import click_log
from givens.retrieval.train import train

n = 64
X = torch.randn(20_000, n, generator=torch.Generator().manual_seed(0)) * torch.linspace(2, 0.3, n)
CONFIG = {
    "dim": 32,
    "subspaces": 4,
    "codewords": 16,
    "history": 20,
    "batch": 256,
    "warmup": 6,
    "steps": 6,
    "every": 6,
    "iterations": 3,
}


@pytest.fixture(autouse=True)
def threads():
    before, theirs = torch.get_num_threads(), faiss.omp_get_max_threads()
    yield
    torch.set_num_threads(before)
    faiss.omp_set_num_threads(theirs)


def digest(*parts):
    found = hashlib.sha256()
    for part in parts:
        found.update(part if isinstance(part, bytes) else part.detach().numpy().tobytes())
    return found.hexdigest()


def with_threads(count, work):
    torch.set_num_threads(count)
    faiss.omp_set_num_threads(count)
    return work()


def fitted(**options):
    q = givens.fit(X, 8, codewords=64, max_iter=2, **options)
    codes = q.encode(X)
    parts = [q.rotation, q.codebooks, codes.fine, q.decode(codes)]
    parts += [] if codes.coarse is None else [q.coarse, codes.coarse]
    index = faiss.serialize_index(to_faiss(q, X)).tobytes()
    return digest(*parts, index), q.distortion(X)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"init": "eigen", "method": "gcd-random"},
        {"method": "opq"},
        {"method": "cayley", "metric": "cosine"},
        {"coarse": 32},
        {"coarse": 32, "metric": "ip"},
    ],
    ids=str,
)
def test_fit_encode_and_build(options):
    first, *others = (with_threads(count, lambda: fitted(**options)) for count in (1, 2, 4))
    assert others == [first, first]


@pytest.mark.parametrize(
    "options", [{}, {"negatives": 128, "coarse": 8}, {"pool": "mean", "method": "cayley"}], ids=str
)
def test_train(options):
    log = click_log(800, 1500, 16_000, drift=0.0)

    def trained():
        run = train(log, Config(**CONFIG, **options))
        q = run.quantizer
        return digest(*run.towers.state_dict().values(), q.rotation, q.codebooks), run.rows

    first, *others = (with_threads(count, trained) for count in (1, 2, 4))
    assert others == [first, first]
