import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import givens
from givens import tokens
from givens.quantizer import Codes
from givens.tokens import Ids, Tokenizer, assign, report

n = 12


def data(rows=600, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, n, generator=generator) * torch.linspace(2, 0.3, n) + 1


@pytest.fixture(scope="module")
def made():
    """A tokenizer of each kind."""
    x = data()
    return {
        "tail": tokens.fit(x, 3, 16),
        "residual": tokens.fit(x, 0, stages=(300, 20)),
        "both": tokens.fit(x, 2, 8, stages=(5,)),
        "cosine": tokens.fit(x, 2, 8, stages=(5,), metric="cosine"),
        "lists": Tokenizer((), givens.fit(x, 2, codewords=8, coarse=6)),
    }


KINDS = ["tail", "residual", "both", "cosine", "lists"]


def by_hand(tokenizer, x):
    """Tokens one after another, by plain distances in float64."""
    found, left = [], x.double()
    if tokenizer.normalise:
        left = left / left.norm(dim=1, keepdim=True)
    for stage in tokenizer.stages:
        found.append(torch.cdist(left, stage.double()).argmin(1))
        left = left - stage.double()[found[-1]]
    if (q := tokenizer.tail) is not None:
        left = left @ q.rotation.double()
        if q.coarse is not None:
            found.append(torch.cdist(left, q.coarse.double()).argmin(1))
            left = left - q.coarse.double()[found[-1]]
        for part, words in zip(left.chunk(q.subspaces, 1), q.codebooks.double(), strict=True):
            found.append(torch.cdist(part, words).argmin(1))
    return torch.stack(found, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_nearest_stage_by_stage(made, kind):
    tokenizer, x = made[kind], data(seed=1)
    found = tokenizer.encode(x)
    assert found.shape == (600, len(tokenizer.sizes))
    assert (found == by_hand(tokenizer, x)).all(1).float().mean() > 0.995
    assert (found < torch.tensor(tokenizer.sizes)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_they_are_as_far_as_the_distortion_says(made, kind):
    tokenizer, x = made[kind], data(seed=2)
    seen = torch.nn.functional.normalize(x) if tokenizer.normalise else x
    error = (tokenizer.decode(tokenizer.encode(x)) - seen).square().sum(1).mean()
    assert tokenizer.distortion(x) == pytest.approx(float(error), rel=1e-4)


def test_without_stages_they_are_the_codes_of_the_fit():
    x = data()
    tokenizer, q = tokens.fit(x, 4, 16, seed=3), givens.fit(x, 4, codewords=16, seed=3)
    assert tokenizer.tail.fingerprint == q.fingerprint
    assert torch.equal(tokenizer.encode(x), q.encode(x).fine.long())


def test_a_quantizer_with_lists_is_a_stage_and_a_tail(made):
    q, x = made["lists"].tail, data()
    found = made["lists"].encode(x)
    codes = q.encode(x)
    assert torch.equal(found[:, 0], codes.coarse)
    assert torch.equal(found[:, 1:], codes.fine.long())
    assert torch.equal(made["lists"].decode(found), q.decode(Codes(codes.fine, codes.coarse)))


def test_a_rotation_changes_no_token_of_residual_stages_alone(made):
    R, x, stages = givens.random_rotation(n, 5), data(), made["residual"].stages
    turned = Tokenizer([stage @ R for stage in stages], None)
    assert torch.equal(turned.encode(x @ R), made["residual"].encode(x))


def test_more_stages_leave_less():
    x = data(1000)
    errors = [tokens.fit(x, 0, stages=(8,) * count).distortion(x) for count in (1, 2, 4)]
    assert errors[0] > 1.1 * errors[1] > 1.2 * errors[2]
    assert tokens.fit(x, 2, 8, stages=(8, 8)).distortion(x) < errors[1]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_is_the_same(made, kind, tmp_path):
    path = tmp_path / "t.safetensors"
    made[kind].save(path)
    loaded = Tokenizer.load(path)
    assert loaded.fingerprint == made[kind].fingerprint
    assert torch.equal(loaded.encode(data()), made[kind].encode(data()))
    assert len({one.fingerprint for one in made.values()}) == len(made)
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="damaged"):
        Tokenizer.load(path)


def test_any_integers_are_tokens(made):
    for kind in KINDS:
        codes = made[kind].encode(data())
        if max(made[kind].sizes) <= 256:
            assert torch.equal(made[kind].decode(codes.byte()), made[kind].decode(codes))
        assert torch.equal(made[kind].decode(codes.int()), made[kind].decode(codes))


def test_numbers_that_are_no_integers_are_no_ids(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([[1.5, 2.0]]))
    with pytest.raises(ValueError, match="holds no IDs: its tokens are float64, not integers"):
        Ids.load(tmp_path / "ids.npy")


def test_every_seed_is_taken_with_stages():
    assert tokens.fit(data(), 2, 8, (3, 3), seed=(1 << 62) - 1).sizes == [3, 3, 8, 8]


def test_a_quantizer_file_is_a_tokenizer(tmp_path):
    q = givens.fit(data(), 3, codewords=8)
    q.save(tmp_path / "q.safetensors")
    loaded = Tokenizer.load(tmp_path / "q.safetensors")
    assert torch.equal(loaded.encode(data()), q.encode(data()).fine.long())


def test_what_is_reported_is_so():
    codes = torch.tensor([[0, 1], [0, 1], [0, 1], [1, 1], [2, 3], [2, 3]])
    told = report(codes, [3, 4])
    assert (told.colliding, told.distinct, told.largest) == (5 / 6, 3, 3)
    assert told.used == [3, 2]
    p = np.array([3, 1, 2]) / 6
    assert told.perplexity[0] == pytest.approx(np.prod(p**-p))
    assert told.imbalance[0] == pytest.approx(3 * (p**2).sum())
    even = report(torch.arange(8)[:, None] % 4, [4])
    assert (even.perplexity, even.imbalance) == ([pytest.approx(4)], [pytest.approx(1)])


CODES = arrays(np.int64, st.tuples(st.integers(1, 30), st.just(2)), elements=st.integers(0, 2))


@given(CODES, CODES, st.data())
@settings(max_examples=200, deadline=None)
def test_ids_are_unique_and_stay_where_codes_do(old, new, drawn):
    """Over a refresh in which items come, go and change."""
    before = assign(torch.from_numpy(old), further=True).ids
    assert len({tuple(row) for row in before.tokens.tolist()}) == len(old)
    assert (before.tokens[:, :2] == old).all()
    first = drawn.draw(st.integers(0, len(old) - 1))
    names = np.arange(len(new)) + first
    found = assign(torch.from_numpy(new), names, further=True, previous=before)
    ids, churn = found.ids, found.churn
    assert (ids.tokens[:, :2] == new).all()
    assert len({tuple(row) for row in ids.tokens.tolist()}) == len(new)
    had = {tuple(row): name for name, row in enumerate(before.tokens.tolist())}
    changed = 0
    for name, row in zip(names.tolist(), ids.tokens.tolist(), strict=True):
        if name < len(old) and (old[name] == row[:2]).all():
            assert had[tuple(row)] == name
        else:
            changed += name < len(old)
            # Nobody else's, not even of an item that has gone.
            assert tuple(row) not in had
    both = min(len(old), first + len(new)) - first
    assert (churn.changed, churn.kept) == (changed, both - changed)
    assert (churn.added, churn.removed) == (len(new) - both, len(old) - both)
    assert churn.rate == changed / both


def test_without_a_further_token_ids_are_the_codes():
    codes = torch.tensor([[0, 1], [0, 1], [2, 0]])
    ids = assign(codes, np.array(["a", "b", "c"], object)).ids
    assert (ids.tokens == codes.numpy()).all()
    moved = torch.tensor([[2, 0], [0, 1], [0, 0]])
    found = assign(moved, np.array(["c", "b", "new"], object), previous=ids)
    assert (found.ids.tokens == moved.numpy()).all()
    assert found.churn == tokens.Churn(kept=2, changed=0, added=1, removed=1)


@pytest.mark.parametrize("suffix", [".parquet", ".npy"])
def test_ids_are_written_and_read(tmp_path, suffix):
    path = tmp_path / f"ids{suffix}"
    codes = np.random.default_rng(0).integers(0, 300, (50, 4))
    names = np.array([f"item {i}" for i in range(50)], object)
    for some in (names, np.arange(50)):
        if suffix == ".npy" and some is names:
            continue
        Ids(some, codes).save(path)
        read = Ids.load(path)
        assert read.names.tolist() == some.tolist()
        assert np.array_equal(read.tokens, codes)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Ids.load(tmp_path / "no.parquet")


def test_a_parquet_file_is_plain(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    Ids(np.array(["a", "b"], object), np.array([[1, 2, 3], [4, 5, 6]])).save(tmp_path / "i.parquet")
    table = pq.read_table(tmp_path / "i.parquet")
    assert table.schema.types == [pa.string(), pa.list_(pa.int32(), 3)]
    assert table.to_pydict() == {"item": ["a", "b"], "tokens": [[1, 2, 3], [4, 5, 6]]}
    pq.write_table(table.drop(["item"]), tmp_path / "j.parquet")
    with pytest.raises(ValueError, match="holds no IDs: it has no column 'item'"):
        Ids.load(tmp_path / "j.parquet")


OLD = Ids(np.array(["a", "b"], object), np.array([[0, 0], [1, 1]]))
TOKENIZER = Tokenizer([torch.eye(2)], None)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: tokens.fit(data(), 0), "subspaces must be at least 1 where there are no stages"),
        (lambda: tokens.fit(data(), 0, stages=(4,), method="opq"), "no token changes"),
        (lambda: tokens.fit(data(), 5), "dim must be divisible by subspaces"),
        (lambda: tokens.fit(data(), 2, stages=(601,)), r"stages must be in 1\.\.600"),
        (lambda: tokens.fit(data(), 2, stages=(0,)), r"stages must be in 1\.\.600"),
        (lambda: tokens.fit(data(), 2, stages=(2.5,)), "stages must be an integer, but got"),
        (lambda: tokens.fit(data(), 2, stages="4,4"), "stages must be a sequence of sizes, but"),
        (lambda: tokens.fit(data(), 2, stages=4), "stages must be a sequence of sizes, but got 4"),
        (lambda: tokens.fit(data(), 2, sample=-1), "sample must be at least 0, but got sample=-1"),
        (lambda: tokens.fit(data(), 2, sample=True), "sample must be an integer, but got"),
        (lambda: tokens.fit(data() + 0j, 2), "x must hold real numbers, but got torch.complex64"),
        (lambda: TOKENIZER.encode(data()[:, :2] + 0j), "x must hold real numbers, but got torch.c"),
        (lambda: TOKENIZER.encode(data()[:, :2] * 1e18), r"x must be no longer than 1e\+14"),
        (lambda: TOKENIZER.encode(data()[:0, :2]), "x must have at least one vector, but got 0"),
        (lambda: TOKENIZER.decode(torch.zeros(2, 1)), "tokens must be integers, but got torch.flo"),
        (lambda: TOKENIZER.decode([[0]]), "tokens must be a dense tensor, but got list"),
        (lambda: Tokenizer([np.eye(2)], None), "stages must be a dense tensor, but got ndarray"),
        (lambda: Tokenizer([torch.eye(2).double()], None), "float32, but got torch.float64"),
        (lambda: Tokenizer([torch.ones(0, 2)], None), r"stages must be of shape \(L, 2\), but got"),
        (lambda: assign(np.zeros((2, 2))), "codes must be a dense tensor, but got ndarray"),
        (lambda: Ids(np.arange(2), np.array([[1], [1 << 31]])), "tokens must be in 0..2³¹−1, but"),
        (
            lambda: Ids(np.arange(2), np.array([[1], [-1]])),
            "tokens must be in 0..2³¹−1, but got -1",
        ),
        (lambda: OLD.save("ids.csv"), "ids.csv must end in .parquet or .npy"),
        (lambda: tokens.fit(data(), 2, metric="ip"), "metric must be one of 'l2', 'cosine'"),
        (lambda: tokens.fit(data() / 0, 2, stages=(3,)), "row 0 has NaN"),
        (lambda: tokens.fit(data()[0], 2), r"x must have shape \(N, n\)"),
        (lambda: Tokenizer((), None), "neither"),
        (lambda: Tokenizer([torch.eye(2), torch.eye(3)], None), "stages must be of shape"),
        (lambda: Tokenizer([torch.eye(2)], None).encode(data()), r"x must have shape \(N, 2\)"),
        (lambda: Tokenizer([torch.eye(2)], None).encode(torch.ones(2, 2) / 0), "row 0"),
        (lambda: Tokenizer([torch.eye(2)], None).decode(torch.tensor([[2]])), "from 0 to below"),
        (lambda: Tokenizer([torch.eye(2)], None).decode(torch.tensor([2])), "shape"),
        (lambda: assign(torch.zeros(2, 2).long(), [0, 0]), "names must differ"),
        (lambda: assign(torch.zeros(2, 2).long(), [0]), "names must be"),
        (
            lambda: assign(torch.zeros(2, 3).long(), ["a", "b"], previous=OLD),
            "previous must have 3",
        ),
        (
            lambda: assign(torch.zeros(2, 2).long(), previous=OLD),
            "it has 'a', where now there is 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(refused, message):
    with pytest.raises((TypeError, ValueError), match=message):
        refused()
