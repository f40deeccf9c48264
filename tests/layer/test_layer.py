import copy
import pickle

import numpy as np
import oracles
import pytest
import torch
from ranks import finish, start
from torch import nn

import givens
from givens.baselines import optimizer_for
from givens.export.faiss import inverted, to_faiss
from givens.layer.layer import DEAD

METRICS = ["l2", "ip", "cosine"]
N, n, D, K = 400, 16, 4, 16


def data(rows=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, n, generator=generator) * torch.linspace(2, 0.3, n)


def make(coarse=0, metric="l2", **options):
    layer = givens.IndexLayer(n, D, K, coarse, metric=metric, **options)
    layer.warm_start(data(), 5, method="opq", init="identity")
    return layer


def gradients(layer, x, call=None):
    """Everything that a step sees: output, loss and the gradients of x and of all parameters."""
    x = x.clone().requires_grad_()
    out = (call or layer)(x)
    loss = (out.embedding - x.detach().flip(1)).square().mean() + 0.1 * out.distortion
    layer.zero_grad()
    loss.backward()
    grads = {name: part.grad for name, part in layer.named_parameters() if part.requires_grad}
    return {"embedding": out.embedding, "distortion": out.distortion, "x": x.grad, **grads}


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("coarse", [0, 6])
def test_it_is_decode_of_encode(coarse, metric, backend):
    layer = make(coarse, metric).eval()
    x, q = data(seed=1), layer.quantizer
    out, codes = layer(x), q.encode(x)
    assert torch.equal(out.embedding, q.decode(codes))
    assert torch.equal(out.codes.fine, codes.fine)
    assert coarse == 0 or torch.equal(out.codes.coarse, codes.coarse)
    assert out.distortion.item() == pytest.approx(q.distortion(x), rel=1e-5)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("coarse", [0, 6])
def test_the_index_in_the_middle_of_training_gives_what_the_model_scores(coarse, metric):
    """At nprobe = nlist every item's score is the inner product with T(x), or ‖query − T(x)‖²."""
    layer, x = make(coarse, metric), data(seed=1)
    turn = givens.GCD(layer.rotation.parameters(), 0.05)
    adam = torch.optim.Adam(layer.index_parameters(), 0.01)
    for _ in range(5):
        gradients(layer, x)
        turn.step()
        adam.step()
    queries = data(20, seed=2)
    T = layer.eval()(x).embedding.detach()
    if metric == "cosine":
        queries = nn.functional.normalize(queries)
    far = torch.cdist(queries, T).square()
    index = to_faiss(layer.quantizer, x, ids=np.arange(N))
    if coarse:
        inverted(index).nprobe = coarse
    scores, ids = index.search(queries.numpy(), N)
    wanted = (far if metric == "l2" else queries @ T.mT).gather(1, torch.from_numpy(ids))
    torch.testing.assert_close(torch.from_numpy(scores), wanted, rtol=1e-4, atol=1e-4)


def test_the_codebooks_of_a_coarse_layer_are_of_the_residual():
    layer = make(6)
    x = data()
    Y = x @ layer.rotation.matrix
    residual = Y - layer.coarse[layer(x).codes.coarse]
    shifted = (Y - layer.codebooks.mean(1).flatten()).square().mean()
    assert (residual - layer.codebooks.mean(1).flatten()).square().mean() < shifted
    assert layer(x).distortion < make(0)(x).distortion


@pytest.mark.parametrize("metric", METRICS)
def test_before_the_warm_start_embeddings_pass_through(metric):
    layer = givens.IndexLayer(n, D, K, 3, metric=metric)
    assert not layer.warm
    assert "passes embeddings through until warm_start" in repr(layer)
    x = data().requires_grad_()
    out = layer(x)
    wanted = nn.functional.normalize(x) if metric == "cosine" else x
    assert torch.equal(out.embedding, wanted)
    assert out.codes is None
    assert out.distortion == 0
    # Optimizers and DistributedDataParallel find a gradient, of 0, and leave everything in place.
    (out.embedding.sum() + out.distortion).backward()
    assert all((part.grad == 0).all() for part in layer.parameters())
    before = copy.deepcopy(layer.state_dict())
    givens.GCD(layer.rotation.parameters()).step()
    torch.optim.Adam(layer.index_parameters()).step()
    assert all(torch.equal(part, before[name]) for name, part in layer.state_dict().items())
    for use in (lambda: layer.quantizer, lambda: layer.revive(x)):
        with pytest.raises(RuntimeError, match=r"call layer\.warm_start\(sample\) first"):
            use()
    layer.warm_start(x)
    assert layer.warm
    assert "passes" not in repr(layer)


def test_warm_starts():
    x = data()
    errors = {}
    for method in ("pq", "opq", "gcd-greedy"):
        layer = givens.IndexLayer(n, D, K)
        layer.warm_start(x, 30, method=method)
        fitted = givens.fit(x, D, codewords=K, method=method, max_iter=30, sample=None)
        assert layer.quantizer.fingerprint == fitted.fingerprint
        errors[method] = layer(x).distortion.item()
    assert torch.equal(givens.IndexLayer(n).rotation.matrix, torch.eye(n))
    assert errors["opq"] <= errors["pq"] * 1.001
    fresh = givens.IndexLayer(n, D, K)
    fresh.start_from(layer.quantizer)
    assert torch.equal(fresh(x).embedding, layer(x).embedding)


def test_the_quantizer_is_a_copy():
    layer = make(3)
    q = layer.quantizer
    before = q.fingerprint
    with torch.no_grad():
        for part in layer.parameters():
            part.add_(1)
    assert q.fingerprint == before


def test_embeddings_with_a_gradient_are_encoded_and_exported():
    layer, x = make(), data().requires_grad_()
    q = layer.quantizer
    assert torch.equal(q.encode(x).fine, q.encode(x.detach()).fine)
    assert to_faiss(q, x).ntotal == N


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_computes_in_float32(dtype):
    layer, x = make(3), data(32)
    wanted = gradients(layer, x)
    with torch.autocast("cpu", dtype):
        found = gradients(layer, x)
    assert found["embedding"].dtype == torch.float32
    assert all(torch.equal(part, wanted[name]) for name, part in found.items())
    half = layer(x.to(dtype).requires_grad_())
    assert torch.equal(half.embedding, layer(x.to(dtype).float()).embedding)


def test_what_it_gives_may_be_changed_in_place():
    layer, x = make(), data(64).requires_grad_()
    out = layer(x)
    loss = out.distortion
    loss *= 2
    loss += out.embedding.mul_(3).sum()
    (found,) = torch.autograd.grad(loss, x)
    out = layer(x)
    (wanted,) = torch.autograd.grad(2 * out.distortion + 3 * out.embedding.sum(), x)
    assert torch.equal(found, wanted)


def test_batches_in_parts_add_up_to_the_whole():
    layer, x = make(3), data(64)
    whole = gradients(layer, x)
    parts = [gradients(layer, part) for part in x.chunk(4)]
    for name in ("rotation.weight", "codebooks", "coarse"):
        torch.testing.assert_close(sum(part[name] for part in parts) / 4, whole[name])


@pytest.mark.parametrize("update", ["gradient", "ema"])
def test_the_state_goes_into_a_fresh_layer(update):
    layer = make(3, update=update)
    layer(data(seed=1))
    for other in (
        givens.IndexLayer(n, D, K, 3, update=update),
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
    ):
        other.load_state_dict(layer.state_dict(), strict=True)
        assert other.warm
        x = data(seed=2)
        mine, wanted = gradients(other, x), gradients(layer, x)
        assert all(torch.equal(part, wanted[name]) for name, part in mine.items())
        for name, part in other.state_dict().items():
            assert torch.equal(part, layer.state_dict()[name])
        layer.load_state_dict(other.state_dict())
    cold = givens.IndexLayer(n, D, K, 3, update=update)
    layer.load_state_dict(cold.state_dict())
    assert not layer.warm


def test_only_training_moves_the_averages():
    layer = make(update="ema").eval()
    before = copy.deepcopy(layer.state_dict())
    layer(data(seed=1))
    assert all(torch.equal(part, before[name]) for name, part in layer.state_dict().items())
    layer.train()(data(seed=1))
    assert not torch.equal(layer.codebooks, before["codebooks"])


def test_usage_is_a_moving_average():
    layer, x = make(decay=0.9), data(50, seed=1)
    frequency = torch.full((D, K), 1 / K)
    for _ in range(3):
        codes = layer(x).codes.fine.long()
        counts = torch.stack([torch.bincount(codes[:, d], minlength=K) for d in range(D)])
        frequency = 0.9 * frequency + 0.1 * counts / 50
    torch.testing.assert_close(layer.usage, frequency)
    entropy = -(frequency * frequency.log()).sum(1)
    torch.testing.assert_close(layer.perplexity, entropy.exp())
    assert torch.equal(layer.dead, frequency < DEAD / K)


def test_moving_averages_are_the_formula():
    """N ← γN + (1 − γ)·counts, S ← γS + (1 − γ)·sums, codeword = S/N; and no gradient."""
    layer = make(3, update="ema", decay=0.8)
    assert layer.codebook_parameters() == [layer.coarse]
    assert layer.index_parameters() == layer.codebook_parameters()
    C = layer.codebooks.detach().double()
    count = torch.full((D, K), 1 / K, dtype=torch.float64)
    total = C * count[..., None]
    for seed in range(4):
        x = data(60, seed)
        out = layer(x)
        residual = (x @ layer.rotation.matrix - layer.coarse[out.codes.coarse]).detach().double()
        residual = residual.view(60, D, -1)
        count, total = 0.8 * count, 0.8 * total
        for row in range(60):
            for d in range(D):
                k = int(out.codes.fine[row, d])
                count[d, k] += 0.2 / 60
                total[d, k] += 0.2 / 60 * residual[row, d]
        torch.testing.assert_close(layer.codebooks, (total / count[..., None]).float())
    out.distortion.backward()
    assert layer.codebooks.grad is None


def test_a_moving_average_forgets_nothing_and_takes_no_nan():
    layer = make(update="ema", decay=0.0)
    x = data(seed=1)
    x[5, 5] = torch.nan
    assert layer(x).embedding[5].isnan().all()
    assert layer.codebooks.isfinite().all()
    # Without memory, a codeword that nobody chooses stays where it is.
    before = layer.codebooks.clone()
    layer(data(1, seed=1))
    assert layer.codebooks.isfinite().all()
    assert torch.equal(layer.codebooks[layer.usage == 0], before[layer.usage == 0])


@pytest.mark.parametrize("update", ["gradient", "ema"])
def test_dead_codewords_come_back(update):
    layer, x = make(update=update, decay=0.5), data(seed=1)
    with torch.no_grad():
        layer.codebooks[:, K // 2 :] += 1000
        if update == "ema":
            layer.sums.copy_(layer.codebooks * layer.usage[..., None])
    for _ in range(10):
        before = layer(x).distortion
    assert int(layer.dead.sum()) == D * K // 2
    assert (layer.perplexity <= K / 2 + 0.01).all()
    alive = layer.codebooks[~layer.dead].clone()
    kept = ~layer.dead
    spoilt = torch.cat([torch.tensor([[torch.nan], [torch.inf]]).expand(2, n), x])
    with torch.autocast("cpu", torch.bfloat16):
        assert int(layer.revive(spoilt)) == D * K // 2
    assert not layer.dead.any()
    # The others stay, and every new one is a sub-vector of the sample that erred.
    assert torch.equal(layer.codebooks[kept], alive)
    rotated = (x @ layer.rotation.matrix).view(N, D, -1).transpose(0, 1)
    far = (layer.codebooks[:, K // 2 :, None] - rotated[:, None]).norm(dim=3)
    assert (far.amin(2) < 1e-5).all()
    assert layer(x).distortion < 0.9 * before
    for _ in range(10):
        layer(x)
    assert not layer.dead.any()
    assert int(layer.revive(x)) == 0


def test_a_small_sample_revives_as_many_as_it_has():
    layer = make()
    with torch.no_grad():
        layer.usage[:, 3:] = 0
    assert int(layer.revive(data(5, seed=1))) == 5 * D
    assert int(layer.revive(layer(data(5, seed=1)).embedding.detach())) <= D * (K - 8)


@pytest.mark.parametrize("method", ["gcd", "gcd-random", "gcd-greedy", "gcd-steepest", "cayley"])
def test_learning_the_rotation_lowers_the_distortion(method):
    """On fixed vectors, codebooks trained in both cases, below what a frozen rotation gives."""
    mixed = data() @ givens.random_rotation(n, 5)
    errors = {}
    for name in ("frozen", method):
        layer = givens.IndexLayer(n, D, K)
        layer.warm_start(mixed, 20, method="pq")
        turn = optimizer_for(layer.rotation, name, 0.02 if name != "cayley" else 0.005)
        adam = torch.optim.Adam(layer.index_parameters(), 0.01)
        for _ in range(150):
            turn.zero_grad()
            adam.zero_grad()
            layer(mixed).distortion.backward()
            turn.step()
            adam.step()
        errors[name] = layer.eval()(mixed).distortion.item()
        assert givens.orthogonality_error(layer.rotation.matrix) < 1e-5
    assert errors[method] < 0.97 * errors["frozen"]


def test_a_parametrized_rotation_can_be_started():
    layer = givens.IndexLayer(n, D, K)
    optimizer_for(layer.rotation, "cayley", 0.01)
    layer.warm_start(data(), 5)
    wanted = givens.IndexLayer(n, D, K)
    wanted.warm_start(data(), 5)
    torch.testing.assert_close(layer(data()).embedding, wanted(data()).embedding)


@pytest.mark.parametrize("update", ["gradient", "ema"])
def test_empty_batches_leave_the_averages_alone(update):
    layer = givens.IndexLayer(16, 4, 16, update=update)
    layer.warm_start(torch.randn(64, 16), 3)
    layer(torch.randn(8, 16))
    before = {name: part.clone() for name, part in layer.state_dict().items()}
    for _ in range(3):
        layer(torch.randn(0, 16))
    assert all(torch.equal(part, before[name]) for name, part in layer.state_dict().items())


@pytest.mark.parametrize("coarse", [0, 3])
@pytest.mark.parametrize("metric", METRICS)
def test_the_quantizer_is_exact_under_autocast(metric, coarse):
    layer = givens.IndexLayer(64, 8, 64, coarse, metric=metric)
    x = torch.randn(500, 64)
    layer.warm_start(x, 3)
    q = layer.eval().quantizer
    codes, decoded, distortion = q.encode(x), q.decode(q.encode(x)), q.distortion(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.quantizer.encode(x).fine, codes.fine)
        assert torch.equal(layer.quantizer.decode(codes), decoded)
        assert layer.quantizer.distortion(x) == distortion
        assert torch.equal(layer(x).embedding, decoded)


def test_an_empty_batch_is_no_error():
    layer = make(3)
    found = gradients(layer, data(0))
    assert found["distortion"] == 0
    assert found["embedding"].shape == (0, n)
    assert (found["codebooks"] == 0).all()


def sample_with(value):
    x = data()
    x[7, 2] = value
    return x


BAD = [
    (lambda: givens.IndexLayer(100, 8), "dim must be divisible by subspaces, but got dim=100, sub"),
    (lambda: givens.IndexLayer(8, 0), "subspaces must be at least 1, but got subspaces=0"),
    (lambda: givens.IndexLayer(8, 2, 257), "codewords must be in 2..256, but got codewords=257"),
    (lambda: givens.IndexLayer(8, 2, coarse=-1), "coarse must be at least 0, but got coarse=-1"),
    (lambda: givens.IndexLayer(8, 2, metric="dot"), "metric must be one of 'l2', 'ip', 'cosine'"),
    (lambda: givens.IndexLayer(8, 2, update="sgd"), "update must be one of 'gradient', 'ema'"),
    (lambda: givens.IndexLayer(8, 2, decay=1.0), r"decay must be in \[0, 1\), but got decay=1.0"),
    (lambda: make()(torch.randn(3, n + 1)), r"x must be .* shape \(m, 16\), but .* \(3, 17\)"),
    (lambda: make()(torch.randn(n)), r"x must be .* \(m, 16\), but got torch.float32 of shape"),
    (lambda: make()(torch.ones(3, n).long()), "x must be a floating-point .* torch.int64"),
    (lambda: make().double()(data()), "float32, but they are torch.float64; use torch.autocast"),
    (lambda: make().warm_start(data(9)), "sample must have at least as many vectors as codewords"),
    (lambda: make(30).warm_start(data(20)), "as many vectors as coarse, but got 20 for coarse=30"),
    (lambda: make().warm_start(sample_with(torch.inf)), "sample must be finite, but row 7 has NaN"),
    (lambda: make().warm_start(data(), method="svd"), "method must be one of 'pq', 'opq'"),
    (lambda: make().revive(data(0)), "sample must have at least one vector, but got 0"),
    (lambda: make().start_from(make(3).quantizer), "q must have codebooks and coarse of shapes"),
]


@pytest.mark.parametrize(("act", "message"), BAD, ids=[message[:30] for _, message in BAD])
@pytest.mark.usefixtures("unchecked")
def test_bad_input(act, message):
    with pytest.raises(ValueError, match=message):
        act()


COMPILED = """
import copy, torch, givens

torch.manual_seed(0)
x = torch.randn(64, 16)
for coarse, metric, update in ((0, "l2", "gradient"), (3, "cosine", "ema")):
    eager = givens.IndexLayer(16, 4, 16, coarse, metric=metric, update=update)
    compiled = copy.deepcopy(eager)
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for warm in (False, True):
        if warm:
            eager.warm_start(x, 5)
            compiled.load_state_dict(eager.state_dict())
        for _ in range(3):
            found = []
            for layer, run in ((eager, eager), (compiled, call)):
                v = x.clone().requires_grad_()
                out = run(v)
                layer.zero_grad()
                (out.embedding.square().sum() + out.distortion).backward()
                found.append([out.embedding, out.distortion, v.grad, *layer.state_dict().values(),
                              *(p.grad for p in layer.parameters() if p.requires_grad)])
                assert (out.codes is not None) == warm
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(a, b)
"""


def test_compiled_it_is_the_same_without_a_break(tmp_path):
    finish(start(COMPILED, 1, tmp_path / "alone"))


RANKS = """
import os, sys, torch, givens
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

store, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
data = torch.randn(12, 64, 16, generator=torch.Generator().manual_seed(1))
rows = slice(32 * rank, 32 * rank + 32)


class Model(nn.Module):
    def __init__(self, update):
        super().__init__()
        self.tower = nn.Linear(16, 16)
        self.index = givens.IndexLayer(16, 4, 16, 3, update=update)

    def forward(self, x):
        return self.index(self.tower(x))


def gradients(model, x):
    out = model(x)
    (out.embedding.square().mean() + out.distortion).backward()
    return [part.grad for part in model.parameters() if part.requires_grad]


for update in ("gradient", "ema"):
    torch.manual_seed(0)
    model = Model(update)
    ddp, tower, index = DistributedDataParallel(model), model.tower, model.index
    turn = givens.GCD(index.rotation.parameters(), 0.02)
    sgd = torch.optim.SGD([*tower.parameters(), *index.index_parameters()], 0.05)
    for step in range(12):
        if step == 4:
            index.warm_start(tower(data[0][rows]), 5)
        if step == 8:
            with torch.no_grad():
                index.usage[:, :4] = 0
            index.revive(tower(data[1][rows]), seed=step)
        turn.zero_grad()
        sgd.zero_grad()
        gradients(ddp, data[step][rows])
        turn.step()
        sgd.step()
    for name, part in model.state_dict().items():
        # Each rank counts for itself where nothing but a statistic comes of it.
        if name != "index.usage" or update == "ema":
            everywhere = [torch.empty_like(part) for _ in range(2)]
            dist.all_gather(everywhere, part.contiguous())
            if not torch.equal(*everywhere):
                sys.exit(f"ranks differ in {name}")
    if not index.warm or givens.orthogonality_error(index.rotation.matrix) > 1e-5:
        sys.exit("nothing learned, or not a rotation")

    # From one state, a step of two ranks on halves is the step of one on the whole.
    both, alone = Model(update), Model(update)
    for one in (both, alone):
        one.load_state_dict(model.state_dict())
    mine = gradients(DistributedDataParallel(both), data[0][rows])
    # Both ranks see the whole here, so that the average over them is of the whole.
    wanted = gradients(alone, data[0])
    for a, b in zip(mine, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    if update == "ema":
        torch.testing.assert_close(both.index.codebooks, alone.index.codebooks)
dist.barrier()
dist.destroy_process_group()
# All is checked; gloo's threads may still race with the interpreter's end.
os._exit(0)
"""


def test_ranks_are_one(tmp_path):
    finish(start(RANKS, 2, tmp_path / "store"))


@pytest.mark.cuda
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("coarse", [0, 6])
def test_on_a_gpu_gradients_are_the_same(coarse, frozen, metric, monkeypatch):
    layer, x = make(coarse, metric), data(64)
    layer.rotation.requires_grad_(not frozen)
    device = copy.deepcopy(layer).cuda()
    wanted = gradients(layer, x)
    for ordered in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda o=ordered: o)
        found = gradients(device, x.cuda())
        assert found.keys() == wanted.keys()
        for name, part in wanted.items():
            torch.testing.assert_close(found[name].cpu(), part, rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
def test_on_a_gpu_it_goes_into_a_graph():
    device = make().cuda()
    static = data(64).cuda()
    device(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = device(static)
    static.copy_(data(64, seed=1).cuda())
    graph.replay()
    torch.testing.assert_close(out.embedding, device.eval()(static).embedding)
    # It holds on to the capture's stream, to which no other backward is to go.
    del out
    with oracles.waiting_is_an_error():
        device.train()(static).distortion.backward()
        device.revive(static)
