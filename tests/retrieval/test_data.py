"""Logs, their layouts, the protocol, losses and metrics, against plain versions."""

import gzip
import json
import math

import numpy as np
import pytest
import torch

import givens
from givens.export.faiss import to_faiss
from givens.retrieval import evaluate
from givens.retrieval.batches import Examples, Inputs
from givens.retrieval.config import Config, config_for
from givens.retrieval.data import Log, click_log, split
from givens.retrieval.losses import hinge_loss, softmax_loss
from givens.retrieval.readers import read
from givens.retrieval.towers import Towers


def rows(users=10, clicks=12):
    """(user, item, rating, time): users and items by odd names, times backwards."""
    return [
        (100 + 7 * user, 1000 + 3 * ((user + click) % 15), 5 if click else 3, 900 - click)
        for user in range(users)
        for click in range(clicks)
    ]


def movielens(folder):
    (folder / "ratings.dat").write_text("".join("::".join(map(str, r)) + "\n" for r in rows()))


def movielens_csv(folder):
    lines = [f"{u},{i},{r}.5,{t}\n" for u, i, r, t in rows()]
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n" + "".join(lines))


def amazon(folder):
    with gzip.open(folder / "reviews_Books_5.json.gz", "wt") as file:
        for u, i, r, t in rows():
            row = {"reviewerID": f"A{u}", "asin": f"B{i}", "overall": r, "unixReviewTime": t}
            file.write(json.dumps({**row, "reviewText": "fine, 5 stars"}) + "\n")


def plain(folder):
    lines = [f"{u} {i} {t}\n" for u, i, r, t in rows() if r >= 4]
    (folder / "clicks.txt").write_text("".join(lines))


def named(folder):
    lines = [f"u{u}\ti{i}\t{t}\n" for u, i, r, t in rows() if r >= 4]
    (folder / "clicks.tsv").write_text("".join(lines))


def ordered(folder):
    kept = [(u, i) for u, i, r, t in sorted(rows(), key=lambda row: row[3]) if r >= 4]
    (folder / "clicks.txt").write_text("".join(f"{u} {i}\n" for u, i in kept))


def baskets(folder):
    by_user = {}
    for u, i, r, _ in sorted(rows(), key=lambda row: row[3]):
        if r >= 4:
            by_user.setdefault(u, []).append(i)
    for name, part in (("train", slice(0, 8)), ("test", slice(8, None))):
        lines = [f"{u} {' '.join(map(str, items[part]))}\n" for u, items in by_user.items()]
        (folder / f"{name}.txt").write_text("".join(lines))


def rated(folder):
    lines = [f"A{u},B{i},{r}.0,{t}\n" for u, i, r, t in rows()]
    (folder / "ratings_Books.csv").write_text("".join(lines))


def rated_numbers(folder):
    """As MovieLens 100K is, after a byte-order mark and a blank line."""
    lines = [f"{u}\t{i}\t{r}\t{t}\n" for u, i, r, t in rows()]
    (folder / "u.txt").write_text("\ufeff\n" + "".join(lines), encoding="utf-8")


def large(folder):
    """Ids that are neighbours as whole numbers, and one as floating-point numbers."""
    far = 1_700_000_000_000_000_000
    lines = [f"{far + u} {far + i} {t}\n" for u, i, r, t in rows() if r >= 4]
    (folder / "clicks.txt").write_text("".join(lines))


def titled(folder):
    """Names of several words, in columns by tabs, under a quoted header."""
    lines = [f"user {u}\tthe {i}\t{t}\n" for u, i, r, t in rows() if r >= 4]
    (folder / "clicks.tsv").write_text('"user"\t"item"\t"timestamp"\n' + "".join(lines))


LAYOUTS = [movielens, movielens_csv, amazon, plain, named, ordered, baskets]
LAYOUTS += [rated, rated_numbers, large, titled]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_layout_gives_the_same_log(tmp_path, layout):
    layout(tmp_path)
    log = read(tmp_path)
    # By hand: a rating below 4 first, then 11 good ones, whose times run backwards.
    good = [(u, i, t) for u, i, r, t in rows() if r >= 4]
    if layout is movielens_csv:
        # 3.5 is below 4, and 5.5 above it, as well.
        assert all(r != 3 for _, _, r, _ in rows()[1:12])
    names = sorted({i for _, i, _ in good})
    assert log.users == 10
    assert log.catalogue == len(names)
    if layout in (movielens, plain, rated_numbers):
        assert log.names.tolist() == names
    elif layout is titled:
        assert set(log.names) == {f"the {name}" for name in names}
    for user, name in enumerate(sorted({u for u, _, _ in good})):
        mine = sorted((t, i) for u, i, t in good if u == name)
        found = log.items[log.starts[user] : log.starts[user + 1]]
        assert [names[item] for item in found] == [i for _, i in mine]
    assert len(log.valid) == len(log.test) == 2
    assert sorted([*log.train, *log.valid, *log.test]) == list(range(10))
    trained = {item for user in log.train for item in log.items[log.starts[user] :][:11]}
    assert log.unseen == log.catalogue - len(trained)


def test_protocol_by_hand():
    user = np.repeat([0, 1, 2, 3, 4, 5], [12, 9, 10, 10, 10, 10])
    item = np.concatenate([np.arange(12), np.arange(9), *(np.arange(2, 12),) * 4])
    rating = np.full(len(user), 4.0)
    rating[0] = 3.9
    log = split(user, item, rating, -np.arange(len(user)))
    # User 1 has 9; item 0 was only theirs and of the low rating.
    assert log.users == 5
    assert log.catalogue == 11
    assert np.diff(log.starts).tolist() == [11, 10, 10, 10, 10]
    examples = Examples(log, history=3, ahead=2)
    held = examples.hold_out(np.array([0]))
    # Times run backwards: items 11 … 1 as numbers 10 … 0; the first 5 of 11 are the history.
    assert held.inputs.history.tolist() == [[6, 7, 8]]
    assert held.seen.tolist() == [6, 7, 8, 9, 10]
    assert held.truth.tolist() == [0, 1, 2, 3, 4, 5]
    assert held.sizes.tolist() == [6]


def test_other_rules_and_what_they_leave_out():
    user = np.repeat(np.arange(8), [12, 9, 6, 6, 6, 6, 5, 4])
    item = np.concatenate([np.arange(count) for count in np.bincount(user)])
    rating = np.full(len(user), 3.0)
    rating[:10] = 2.5
    log = split(user, item, rating, min_rating=3.0, min_items=6)
    # User 0 keeps 2 of 12 rows; users 6 and 7 never had 6.
    assert log.users == 5
    assert np.diff(log.starts).tolist() == [9, 6, 6, 6, 6]
    assert log.rules == {"min_rating": 3, "min_items": 6}
    assert str(log.selection) == (
        "3 of 8 users have under 6 items rated 3 or more, 10 of 54 ratings are below 3"
    )
    assert log.selection.drops
    everything = split(user, item, min_items=4)
    assert everything.users == 8
    assert not everything.selection.drops
    assert str(everything.selection) == "0 of 8 users have under 4 items"
    assert click_log(50, 100, 600).rules == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_items": 1}, "min_items must be at least 2, but got min_items=1"),
        ({"min_items": 99}, "none has 99 items rated 4 or more in 120 rows; lower min_items or"),
        ({"min_rating": 9.0}, "none has 10 items rated 9 or more in 120 rows; lower min_items or"),
        ({"min_rating": math.nan}, "min_rating must be finite"),
    ],
)
def test_bad_rules(options, message):
    user, item, rating, _ = np.array(rows()).T
    with pytest.raises(ValueError, match=message):
        split(user, item, rating, **options)


def test_examples_are_of_the_past_and_targets_of_the_near_future():
    # Every user clicks on one run of 30 numbers, so that places can be read off the items.
    users = 20
    starts = np.arange(users + 1) * 30
    items = np.arange(users * 30, dtype=np.int32)
    times = np.linspace(0, 1, len(items), dtype=np.float32)
    log = Log("runs", starts, items, times, len(items), *np.split(np.arange(users), [14, 17]))
    examples = Examples(log, history=5, ahead=4)
    asked, target = examples.draw(3, 500)
    assert (target // 30 < 14).all()
    latest = asked.history[:, 0]
    assert (latest >= 0).all()
    assert set((target - latest).tolist()) == {1, 2, 3, 4}
    for row, item in zip(asked.history.tolist(), target.tolist(), strict=True):
        past = [number for number in row if number >= 0]
        assert past == list(range(past[0], max(past[0] - 5, item // 30 * 30 - 1), -1))
    again, same = examples.draw(3, 500)
    assert torch.equal(again.history, asked.history)
    assert torch.equal(same, target)
    assert not torch.equal(examples.draw(4, 500)[1], target)
    assert examples.popularity.count_nonzero() == 14 * 30
    # A stream goes through the log in order of time.
    stream = Examples(log, history=5, ahead=1, stream=True)
    early, late = (stream.draw(0, 100, progress)[1] for progress in (0.0, 1.0))
    assert early.max() < late.min()


def test_losses_are_their_formulas():
    b, c, n = 5, 9, 4
    users, items = torch.randn(b, n).double(), torch.randn(c, n).double()
    target = torch.tensor([0, 3, 3, 8, 1])
    log_q = torch.rand(c).double().log()
    same = torch.rand(b, c) < 0.3
    same[range(b), target] = True
    softmax, hinge, count = 0.0, 0.0, 0
    for row in range(b):
        t = int(target[row])
        counted = [j for j in range(c) if j == t or not same[row, j]]
        logit = {j: float(users[row] @ items[j]) / 0.2 - float(log_q[j]) for j in counted}
        softmax -= (logit[t] - math.log(sum(math.exp(logit[j]) for j in counted))) / b
        for j in counted:
            if j != t:
                hinge += max(0.0, 0.1 - float(users[row] @ items[t]) + float(users[row] @ items[j]))
                count += 1
    found = softmax_loss(users, items, target, temperature=0.2, log_q=log_q, same=same)
    assert found.item() == pytest.approx(softmax)
    assert hinge_loss(users, items, target, same=same).item() == pytest.approx(hinge / count)
    plainly = torch.nn.functional.cross_entropy(users @ items.mT / 0.07, target)
    assert torch.allclose(softmax_loss(users, items, target), plainly)


def test_metrics_and_rankings_against_plain_python():
    log = click_log(60, 40, 900, seed=3)
    held = Examples(log, history=5, ahead=3).hold_out(np.arange(60))
    users, items = torch.randn(60, 8), torch.randn(40, 8)
    ranking = evaluate.search_exact(users, items, held, 20)
    sums = dict.fromkeys(
        [f"{m}@{k}" for k in (5, 20) for m in ("precision", "recall", "ndcg")], 0.0
    )
    counted = 0
    for user in range(60):
        clicks = log.items[log.starts[user] : log.starts[user + 1]].tolist()
        seen = set(clicks[: len(clicks) // 2])
        truth = set(clicks[len(clicks) // 2 :]) - seen
        order = sorted(set(range(40)) - seen, key=lambda item: -float(users[user] @ items[item]))
        found = ranking.items[user].tolist()
        assert [item for item in found if item >= 0] == order[:20]
        if not truth:
            continue
        counted += 1
        for k in (5, 20):
            hits = [place for place, item in enumerate(order[:k]) if item in truth]
            ideal = sum(1 / math.log2(place + 2) for place in range(min(k, len(truth))))
            sums[f"precision@{k}"] += len(hits) / k
            sums[f"recall@{k}"] += len(hits) / len(truth)
            sums[f"ndcg@{k}"] += sum(1 / math.log2(place + 2) for place in hits) / ideal
    told = evaluate.compute_metrics(ranking.items, held, 40, (5, 20))
    assert counted
    assert told == pytest.approx({name: value / counted for name, value in sums.items()})


def test_click_log_is_of_tastes_and_popularity():
    log = click_log(2000, 500, 60_000, drift=0.0, seed=1)
    again = click_log(2000, 500, 60_000, drift=0.0, seed=1)
    assert log.fingerprint == again.fingerprint
    assert log.fingerprint != click_log(2000, 500, 60_000, drift=0.0, seed=2).fingerprint
    assert np.diff(log.starts).min() >= 10
    for user in range(20):
        times = log.times[log.starts[user] : log.starts[user + 1]]
        assert (np.diff(times) > 0).all()
    popularity = np.sort(np.bincount(log.items, minlength=500))[::-1]
    assert popularity[:50].sum() > 3 * popularity[-50:].sum()
    # A user comes back to the same items far more often than another user does.
    first = [set(log.items[log.starts[u] :][:10].tolist()) for u in range(400)]
    later = [set(log.items[log.starts[u] :][5:20].tolist()) for u in range(400)]
    own = np.mean([len(a & b) for a, b in zip(first, later, strict=True)])
    other = np.mean([len(a & b) for a, b in zip(first, later[1:], strict=False)])
    assert own > 3 * other
    # With the drift, neighbours of the early part are so no longer in the late part.
    words = click_log(2000, 500, 60_000, words=50).words
    assert words.shape == (2000, 3)


@pytest.mark.parametrize("pool", ["mean", "attention"])
def test_towers_give_unit_vectors_of_what_is_there(pool):
    towers = Towers(30, 8, history=6, pool=pool, vocabulary=11, seed=1)
    torch.manual_seed(0)
    for part in towers.parameters():
        torch.nn.init.normal_(part)
    log = click_log(50, 30, 600, words=11)
    asked = Examples(log, history=6, ahead=2).hold_out(np.arange(50)).inputs
    users = towers.user(asked)
    assert torch.allclose(users.norm(dim=1), torch.ones(50))
    assert torch.allclose(towers.item().norm(dim=1), torch.ones(30))
    assert torch.equal(towers.item(torch.tensor([3])), towers.item()[[3]])
    # Nothing after a gap counts: −1 in the place of an item is the same as a shorter history.
    gone = asked.history.clone()
    gone[:, 4:] = -1
    assert torch.allclose(
        towers.user(type(asked)(gone, asked.words)),
        towers.user(type(asked)(asked.history[:, :4], asked.words)),
        atol=1e-6,
    )
    # An order that is turned around is another history: recency counts.
    assert not torch.allclose(users, towers.user(type(asked)(asked.history.flip(1), asked.words)))
    # An empty history leaves the words.
    empty = type(asked)(torch.full_like(asked.history, -1), asked.words)
    assert towers.user(empty).isfinite().all()


def test_attention_is_its_formula():
    towers = Towers(12, 8, history=4, pool="attention")
    pool = towers.pool
    for part in pool.parameters():
        torch.nn.init.normal_(part)
    history = torch.tensor([[3, 7, -1, 1]])
    E, found = pool.embedding.weight, []
    for head in range(4):
        there = [(j, i) for j, i in enumerate(history[0].tolist()) if i >= 0]
        scores = [
            pool.recency[head, j] + math.sqrt(8) * (E[i] @ pool.queries[:, head]) for j, i in there
        ]
        weights = torch.stack(scores).softmax(0)
        parts = [
            w * E[i, 2 * head : 2 * head + 2] for w, (_, i) in zip(weights, there, strict=True)
        ]
        found.append(sum(parts))
    assert torch.allclose(pool(history)[0], torch.cat(found), atol=1e-6)


# A review with one field of a type that it cannot have.
REVIEWS = {
    "list-as-rating": {"overall": [5]},
    "object-as-rating": {"overall": {"stars": 5}},
    "bool-as-rating": {"overall": True},
    "word-as-rating": {"overall": "five"},
    "huge-rating": {"overall": 10**400},
    "null-time": {"unixReviewTime": None},
    "list-as-user": {"reviewerID": ["A"]},
    "null-item": {"asin": None},
    "empty-item": {"asin": ""},
    "lines-as-item": {"asin": "a\nb"},
    "surrogate-as-item": {"asin": "\ud800"},
}


def bad_files(folder):
    (folder / "few.txt").write_text("1 2\n" * 5)
    (folder / "header.csv").write_text("person,movieId,rating\n1,2,5\n")
    (folder / "words.dat").write_text("1::2::five::3\n")
    (folder / "ragged.dat").write_text("1::2::5::3\n1::2\n")
    (folder / "gap.csv").write_text("userId,movieId,rating,timestamp\n1,2,,3\n1,3,,4\n" * 2)
    (folder / "nobody.csv").write_text("user,item\na,b\n,c\n")
    cut = "".join(f"{u} {i} {t}\n" for u, i, _, t in rows()) + "7 8\n"
    (folder / "short.txt").write_text(cut)
    (folder / "five.csv").write_text("1,2,3,4,5\n" * 9)
    (folder / "latin.csv").write_bytes("user,item\nZoë,1\n".encode("latin-1"))
    (folder / "huge.txt").write_text("1 2 3\n1 100000000000000000000 3 5 6\n")
    (folder / "lines.json").write_text('{"reviewerID": "A"}\n')
    (folder / "text.json").write_text("hello\n")
    review = {"reviewerID": "A", "asin": "B", "overall": 5, "unixReviewTime": 1}
    for name, change in REVIEWS.items():
        (folder / f"{name}.json").write_text(json.dumps({**review, **change}) + "\n")
    (folder / "deep.json").write_text("[" * 100_000 + "]" * 100_000 + "\n")
    (folder / "list.json").write_text("[1, 2]\n")
    (folder / "wide.csv").write_text(f"user,item\n{'a' * 140_000},b\n")
    (folder / "lines.csv").write_text('user,item\n"a\nb",c\n')
    (folder / "nan.csv").write_text("userId,movieId,rating,timestamp\n" + "1,2,nan,3\n" * 12)
    (folder / "inf.dat").write_text("1::2::5::inf\n" * 12)
    with gzip.open(folder / "damaged.json.gz", "wt") as file:
        file.write(json.dumps(review) * 200)
    raw = bytearray((folder / "damaged.json.gz").read_bytes())
    raw[15:40] = bytes(25)
    (folder / "damaged.json.gz").write_bytes(raw)
    (folder / "plain.json.gz").write_text("{}")
    (folder / "log.parquet").write_text("")
    (folder / "empty.txt").write_text("")
    (folder / "low.dat").write_text("".join(f"1::{i}::3::{i}\n" for i in range(20)))
    (folder / "lonely.txt").write_text(
        "".join(f"{user} {100 * user + i}\n" for user in range(10) for i in range(10))
    )
    again = [(user, item) for user in range(10) for item in [0, 1, 2, 3, 4] * 2]
    (folder / "again.txt").write_text("".join(f"{user} {item}\n" for user, item in again))
    (folder / "nothing").mkdir()
    (folder / "two").mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / "two" / name).write_text("1 2\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("few.txt", "few.txt has no valid users: none has 10 items in 5 rows"),
        ("low.dat", "none has 10 items rated 4 or more"),
        ("header.csv", r"has no column of the users \(user, userid.*but person, movieid, rating"),
        ("words.dat", "must have 4 numbers in every row"),
        ("ragged.dat", "must have 4 numbers in every row"),
        ("gap.csv", "must have numbers as ratings"),
        ("nobody.csv", "has a row without user"),
        ("short.txt", "has rows of 3 columns, but not in line"),
        ("five.csv", "but has 5 columns"),
        ("latin.csv", "must be text in UTF-8"),
        ("huge.txt", "must hold whole numbers alone, but not line 2"),
        ("lines.json", "has no 'asin' in line 1"),
        ("text.json", "is not of JSON lines: line 1"),
        *((f"{name}.json", "is not of JSON lines: line 1") for name in REVIEWS),
        ("deep.json", "is not of JSON lines: line 1"),
        ("list.json", "is not of JSON lines: line 1"),
        ("wide.csv", "wide.csv is not of rows: field larger than field limit"),
        ("lines.csv", "must have a user in one line, but has one in several"),
        ("nan.csv", "must have finite ratings, but row 0 has nan"),
        ("inf.dat", "must have finite times, but row 0 has inf"),
        ("damaged.json.gz", "damaged.json.gz is damaged: it cannot be decompressed"),
        ("plain.json.gz", "plain.json.gz is damaged: it cannot be decompressed"),
        ("log.parquet", "log.parquet is empty"),
        ("empty.txt", "is empty"),
        ("lonely.txt", "cannot be learned: every item of the 2 held-out users"),
        ("again.txt", "cannot be tested: none of the 2 held-out users has an item in the second"),
        ("nothing", "but has none; name a file"),
        ("two", "but has several: a.txt, b.txt; name a file"),
    ],
)
def test_bad_files(tmp_path, name, message):
    bad_files(tmp_path)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no log"):
        read(tmp_path / "missing")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "svd"}, "method must be one of 'frozen'"),
        ({"start": "eigen"}, "start must be one of 'opq'"),
        ({"loss": "bpr"}, "loss must be one of"),
        ({"batch": 0}, "batch must be at least 1, but got batch=0"),
        ({"lr": -1.0}, "lr must be finite, above 0, but got lr=-1.0"),
        ({"lr": math.inf}, "lr must be finite, above 0, but got lr=inf"),
        ({"temperature": math.nan}, "temperature must be finite, above 0"),
        ({"dropout": 1.0}, "dropout must be in"),
        ({"dropout": math.nan}, "dropout must be finite"),
        ({"steps": -1}, "steps must be at least 0, but got steps=-1"),
        ({"negatives": -1}, "negatives must be at least 0"),
        ({"angle": math.nan}, "angle must be finite, at least 0, but got angle=nan"),
        ({"weight": math.inf}, "weight must be finite, at least 0, but got weight=inf"),
        ({"margin": -0.1}, "margin must be finite, at least 0"),
        ({"seed": 1 << 31}, r"seed must be in 0\.\.2147483647"),
        ({"warmup": 10**30}, r"warmup must be in 1\.\.2147483647"),
        ({"dim": 16, "subspaces": 5}, "dim must be divisible by subspaces, but got dim=16"),
        ({"codewords": 300}, "codewords must be in 2..256"),
        ({"method": "post-hoc", "codewords": 20}, "codewords must be a power of two for Faiss"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**options)


def test_bytes_are_those_of_the_packed_code():
    for codewords, size in ((256, 8), (200, 8), (16, 4), (17, 5), (2, 1)):
        assert Config(dim=64, subspaces=8, codewords=codewords).bytes == size


@pytest.mark.usefixtures("unchecked")
def test_sizes_are_configurations():
    log = click_log(50, 100, 600)
    assert config_for(log) == config_for(log, size="large") == Config()
    small, medium = (config_for(log, size=size) for size in ("small", "medium"))
    assert small.dim < medium.dim < Config().dim
    assert small.total < medium.total <= Config().total
    assert config_for(log, size="small", dim=32, lr=None).dim == 32
    with pytest.raises(ValueError, match="size must be one of 'small', 'medium', 'large', but got"):
        config_for(log, size="huge")


def test_a_log_too_small_for_the_index():
    log = click_log(50, 100, 600)
    with pytest.raises(ValueError, match="at least as many items as codewords, but has 100"):
        config_for(log).check(log)
    with pytest.raises(ValueError, match="history must be at least 1 where a log has no words"):
        config_for(log, codewords=16, history=0).check(log)
    for arguments, message in (
        ((5, 100, 600), "users must be at least 10"),
        ((50, 100, 100), "clicks must be at least 10 for each user"),
    ):
        with pytest.raises(ValueError, match=message):
            click_log(*arguments)


def test_gradients_are_the_same_each_time():
    """By several threads too: otherwise a resumed run would go on elsewhere."""
    towers = Towers(300, 16, history=50, pool="attention", seed=0)
    history = torch.randint(300, (2000, 50))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    found = []
    for _ in range(8):
        towers.zero_grad()
        towers.user(Inputs(history)).square().mul(torch.arange(16)).sum().backward()
        found.append([part.grad for part in towers.pool.parameters()])
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_an_index_that_ranks_otherwise_is_refused():
    ranking = evaluate.Ranking(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[0.5, 0.25]]))
    other = evaluate.Ranking(ranking.items, torch.tensor([[0.5, 0.2]]))
    assert evaluate.check_agreement(ranking, ranking) == 0
    with pytest.raises(ValueError, match="does not rank as the model scores"):
        evaluate.check_agreement(ranking, other)


def test_an_item_between_two_codewords_may_have_either():
    """Faiss and the model may round a tie in two ways, which is no reason to lose a run."""
    codebooks = torch.tensor([[[0.0], [1.0]], [[0.0], [1.0]]])
    items = torch.rand(50, 2, generator=torch.Generator().manual_seed(0))
    for coarse in (torch.eye(3, 2) * 0.1, None):
        q = givens.Quantizer(torch.eye(2), codebooks, coarse, "ip")
        index, decoded = to_faiss(q, items), q.decode(q.encode(items))
        assert torch.allclose(evaluate.decode_as_indexed(index, items, decoded), decoded, atol=1e-6)
    # As near to the codeword 0 of the first subspace as to 1.
    items[7, 0] = 0.5
    served = torch.from_numpy(index.sa_decode(index.sa_encode(items.numpy())))
    for chosen in (0.0, 1.0):
        decoded[7, 0] = chosen
        assert torch.equal(evaluate.decode_as_indexed(index, items, decoded), served)
    for wrong in (1 - decoded[7, 1], torch.nan):
        decoded[7, 1] = wrong
        with pytest.raises(ValueError, match="does not encode as the model does: 1 items"):
            evaluate.decode_as_indexed(index, items, decoded)
