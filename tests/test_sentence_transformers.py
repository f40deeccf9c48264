"""The index inside real sentence-transformers models, small and new, without a network."""

import copy
import json
import subprocess
import sys

import faiss
import numpy as np
import pytest
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    CoSENTLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import (
    Pooling,
    StaticEmbedding,
    Transformer,
)
from sentence_transformers.util import cos_sim, dot_score, pairwise_dot_score
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import givens
from givens.export.faiss import from_faiss
from givens.sentence_transformers import (
    Index,
    IndexLoss,
    IndexOptimizer,
    WarmStart,
    add_index,
    embed,
    index_of,
    to_faiss,
    warm_start,
)

WORDS = [f"w{i}" for i in range(60)]
DRAWS = np.random.default_rng(0)
TEXTS = [" ".join(DRAWS.choice(WORDS, 5)) for _ in range(200)]
PAIRS = [(" ".join(text.split()[:2]), text) for text in TEXTS]

# Those of the trainer and of the packages below it.
pytestmark = pytest.mark.filterwarnings("ignore")


def tokenizer():
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def static_model(dim=16):
    """The mean of word vectors."""
    torch.manual_seed(0)
    return SentenceTransformer(
        modules=[StaticEmbedding(tokenizer(), embedding_dim=dim)], device="cpu"
    )


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("bert"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(
        vocab_size=62,
        intermediate_size=32,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
        **sizes,
    )
    BertModel(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    return folder


def bert_model(folder):
    transformer = Transformer(folder)
    return SentenceTransformer(modules=[transformer, Pooling(16, "mean")], device="cpu")


def warm_model(model=None, **options):
    model = static_model() if model is None else model
    add_index(model, 4, 16, **options)
    warm_start(model, TEXTS, iterations=5)
    return model


def features(model, rows=slice(0, 24)):
    return [model.preprocess(list(column)) for column in zip(*PAIRS[rows], strict=True)]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("metric", ["cosine", "ip", "l2"])
def test_documents_come_out_decoded_and_queries_as_they_are(metric):
    plain = torch.from_numpy(static_model().encode(TEXTS))
    model = warm_model(metric=metric)
    q = index_of(model).quantizer
    expected = q.decode(q.encode(plain))
    for encode in (model.encode, model.encode_document):
        torch.testing.assert_close(torch.from_numpy(encode(TEXTS)), expected)
    query = torch.nn.functional.normalize(plain) if metric == "cosine" else plain
    assert torch.equal(torch.from_numpy(model.encode_query(TEXTS)), query)
    assert torch.equal(embed(model, TEXTS), query)
    rows = model.encode(TEXTS[:3], output_value=None)
    assert torch.equal(torch.stack([row["codes"] for row in rows]), q.encode(plain[:3]).fine)
    assert model.similarity_fn_name == ("euclidean" if metric == "l2" else "dot")


@pytest.mark.parametrize("options", [{}, {"coarse": 3, "metric": "l2"}, {"update": "ema"}])
def test_saved_and_loaded_bit_for_bit(tmp_path, options):
    model = warm_model(**options)
    model.save(str(tmp_path / "model"))
    again = SentenceTransformer(str(tmp_path / "model"), trust_remote_code=True, device="cpu")
    for name, part in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], part), name
    assert index_of(again).config == index_of(model).config
    assert index_of(again).layer.warm
    assert index_of(again).quantizer.fingerprint == index_of(model).quantizer.fingerprint
    assert np.array_equal(again.encode(TEXTS), model.encode(TEXTS))
    assert np.array_equal(again.encode_query(TEXTS), model.encode_query(TEXTS))
    assert again.similarity_fn_name == model.similarity_fn_name


def test_a_cold_index_is_saved_too(tmp_path):
    model = static_model()
    plain = model.encode(TEXTS)
    add_index(model, 4, 16, metric="l2")
    assert np.array_equal(model.encode(TEXTS), plain)
    model.save(str(tmp_path / "model"))
    again = SentenceTransformer(str(tmp_path / "model"), trust_remote_code=True, device="cpu")
    assert not index_of(again).layer.warm


def damage_a_byte(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_a_byte, "digest"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "index.safetensors"),
        (lambda path: path.unlink(), "has no 1_Index/index.safetensors"),
        (
            lambda path: givens.storage.files.save(path, "quantizer", {}, {}),
            "not a 'sentence-transformers index'",
        ),
        (
            lambda path: givens.storage.files.save(
                path, "sentence-transformers index", {}, {"dim": 16, "subspaces": 4}
            ),
            "is not an index of sentence-transformers",
        ),
    ],
)
def test_a_damaged_index_is_refused_when_the_model_is_loaded(tmp_path, damage, message):
    warm_model().save(str(tmp_path / "model"))
    damage(tmp_path / "model" / "1_Index" / "index.safetensors")
    with pytest.raises(ValueError, match=message):
        SentenceTransformer(str(tmp_path / "model"), trust_remote_code=True, device="cpu")


@pytest.mark.parametrize("coarse", [0, 5])
@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_the_faiss_index_has_the_codes_of_the_layer(metric, coarse):
    model = warm_model(coarse=coarse, metric=metric)
    index = to_faiss(model, TEXTS, kind="ivfpq" if coarse else "pq")
    assert from_faiss(index).fingerprint == index_of(model).quantizer.fingerprint
    layer = index_of(model).layer.eval()
    codes = layer(embed(model, TEXTS)).codes
    expected = index_of(model).quantizer.encode(embed(model, TEXTS))
    assert torch.equal(codes.fine, expected.fine)
    if coarse:
        faiss.extract_index_ivf(index).nprobe = coarse
    # The scores of the index are those of the model.
    scores, ids = index.search(model.encode_query(TEXTS[:20]), 10)
    told = model.similarity(model.encode_query(TEXTS[:20]), model.encode_document(TEXTS))
    if metric == "cosine":
        np.testing.assert_allclose(scores, told.gather(1, torch.from_numpy(ids)), rtol=1e-4)
        np.testing.assert_allclose(scores, told.topk(10).values, rtol=1e-4, atol=1e-5)
    else:
        np.testing.assert_allclose(-np.sqrt(scores), told.topk(10).values, rtol=1e-3, atol=1e-4)


def test_an_index_of_truncated_matryoshka_embeddings(tmp_path):
    plain = static_model().encode(TEXTS)
    model = static_model()
    model.truncate_dim = 8
    warm_model(model)
    q = index_of(model).quantizer
    assert q.dim == 8
    expected = q.decode(q.encode(plain[:, :8].copy()))
    torch.testing.assert_close(torch.from_numpy(model.encode(TEXTS)), expected)
    model.save(str(tmp_path / "model"))
    again = SentenceTransformer(str(tmp_path / "model"), trust_remote_code=True, device="cpu")
    assert np.array_equal(again.encode(TEXTS), model.encode(TEXTS))


@pytest.mark.parametrize("queries", [0, 1])
def test_the_loss_is_that_of_a_loop_by_hand(queries):
    model = warm_model()
    inner = MultipleNegativesRankingLoss(model)
    loss = IndexLoss(model, inner, 3.0, queries=queries)
    assert inner.similarity_fct is (dot_score if queries else cos_sim)
    parts = loss(features(model), None)
    sum(parts.values()).backward()
    found = gradients(model)
    model.zero_grad()
    layer = index_of(model).layer
    a, b = (model[0](column)["sentence_embedding"] for column in features(model))
    documents = [layer(x) for x in ([b] if queries else [a, b])]
    distortion = sum(out.distortion for out in documents) / len(documents)
    query = torch.nn.functional.normalize(a) if queries else documents[0].embedding
    score = dot_score if queries else cos_sim
    scores = 20 * score(query, documents[-1].embedding)
    base = torch.nn.functional.cross_entropy(scores, torch.arange(24))
    torch.testing.assert_close(parts["base_loss"], base)
    torch.testing.assert_close(parts["distortion"], 3 * distortion)
    (base + 3 * distortion).backward()
    expected = gradients(model)
    assert found.keys() == expected.keys()
    assert any("rotation" in name for name in found)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_labels_and_pairwise_scores_reach_the_loss_inside():
    model = warm_model()
    inner = CoSENTLoss(model)
    parts = IndexLoss(model, inner)(features(model), torch.linspace(0, 1, 24))
    assert inner.similarity_fct is pairwise_dot_score
    assert parts["base_loss"] > 0
    assert parts["distortion"] > 0


def test_matryoshka_counts_the_distortion_once():
    model = warm_model()
    inner = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), [16, 8])
    matryoshka = IndexLoss(model, inner)(features(model), None)
    single = IndexLoss(model, MultipleNegativesRankingLoss(model))(features(model), None)
    torch.testing.assert_close(matryoshka["distortion"], single["distortion"])
    assert matryoshka["base_loss"] > single["base_loss"]
    sum(matryoshka.values()).backward()
    assert all(gradient.abs().max() > 0 for gradient in gradients(model).values())


@pytest.mark.parametrize("matryoshka", [False, True])
def test_a_loss_that_caches_gradients_has_those_of_one_that_does_not(bert_folder, matryoshka):
    """The distortion's too, which are found where it embeds a second time, of unequal parts."""
    found = []
    for kind, options in (
        (MultipleNegativesRankingLoss, {}),
        (CachedMultipleNegativesRankingLoss, {"mini_batch_size": 7}),
    ):
        model = warm_model(bert_model(bert_folder))
        # Dropout would differ between one batch and its parts.
        model.eval()
        inner = kind(model, **options)
        if matryoshka:
            inner = MatryoshkaLoss(model, inner, [16, 8])
        loss = IndexLoss(model, inner, 2.0)
        parts = loss(features(model), None)
        # As a trainer scales the loss of a part of a batch.
        (sum(parts.values()) / 4).backward()
        found.append((parts, gradients(model)))
    (plain, expected), (cached, gotten) = found
    for name in ("base_loss", "distortion"):
        torch.testing.assert_close(cached[name].detach(), plain[name].detach())
    assert gotten.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gotten[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


def trainer(model, loss, folder, steps=40, optimizer=None, callbacks=(), **options):
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=16,
        report_to=[],
        save_strategy=options.pop("save_strategy", "no"),
        logging_steps=10,
        disable_tqdm=True,
        use_cpu=True,
        warmup_steps=4,
        **options,
    )
    anchors, positives = zip(*PAIRS, strict=True)
    data = Dataset.from_dict({"anchor": anchors, "positive": positives})
    return SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=data,
        loss=loss,
        optimizers=(optimizer, None),
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trainer_learns_all_of_it_and_the_rotation_stays_one(tmp_path, accumulation):
    model = warm_model()
    loss = IndexLoss(model, MultipleNegativesRankingLoss(model), weight=50)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = IndexOptimizer(loss, lr=1e-2, index_lr=1e-2, turn_lr=2e-2)
    learner = trainer(
        model, loss, tmp_path, optimizer=optimizer, gradient_accumulation_steps=accumulation
    )
    learner.train()
    for name, p in model.named_parameters():
        assert (p - before[name]).abs().max() > 1e-3, name
    R = index_of(model).layer.rotation.matrix
    assert givens.orthogonality_error(R) <= 1e-5
    logs = [entry for entry in learner.state.log_history if "distortion" in entry]
    assert logs[-1]["distortion"] < logs[0]["distortion"]
    # One schedule for all: warmed up, and down to nothing at the end.
    assert all(group["lr"] < 1e-9 for group in optimizer.param_groups)
    assert len({group["initial_lr"] for group in optimizer.param_groups}) == 2


def test_a_run_that_goes_on_ends_as_one_that_was_never_stopped(tmp_path):
    ends = []
    for folder, stop in (("whole", None), ("halves", 10)):
        for resume in (False, True) if stop else (False,):
            model = warm_model()
            loss = IndexLoss(model, MultipleNegativesRankingLoss(model))
            optimizer = IndexOptimizer(loss, lr=1e-2)
            learner = trainer(
                model, loss, tmp_path / folder, 20, optimizer, save_strategy="steps", save_steps=10
            )
            learner.train(
                resume_from_checkpoint=str(tmp_path / folder / "checkpoint-10") if resume else None
            )
        ends.append(model.state_dict())
    for name, part in ends[0].items():
        torch.testing.assert_close(ends[1][name], part, msg=name)


def test_the_callback_warms_up_at_its_step(tmp_path):
    model = static_model()
    index = add_index(model, 4, 16)
    loss = IndexLoss(model, MultipleNegativesRankingLoss(model))
    optimizer = IndexOptimizer(loss, lr=1e-2)
    callback = WarmStart(TEXTS, step=20, iterations=5)
    learner = trainer(model, loss, tmp_path, 40, optimizer, [callback])
    learner.train()
    distortions = [e["distortion"] for e in learner.state.log_history if "distortion" in e]
    assert distortions[:2] == [0, 0]
    assert min(distortions[2:]) > 0
    assert index.layer.warm
    assert model.training
    assert givens.orthogonality_error(index.layer.rotation.matrix) <= 1e-5


def test_a_frozen_rotation_stays(tmp_path):
    model = warm_model()
    layer = index_of(model).layer
    layer.rotation.requires_grad_(False)
    loss = IndexLoss(model, MultipleNegativesRankingLoss(model))
    optimizer = IndexOptimizer(loss)
    assert list(optimizer.parts) == ["adam"]
    before = layer.rotation.matrix.clone()
    trainer(model, loss, tmp_path, 5, optimizer).train()
    assert torch.equal(layer.rotation.matrix, before)


def test_a_rotation_that_another_optimizer_moves_is_noticed(tmp_path):
    model = warm_model()
    loss = IndexLoss(model, MultipleNegativesRankingLoss(model))
    with pytest.raises(ValueError, match=r"an optimizer other than givens\.GCD.*IndexOptimizer"):
        trainer(model, loss, tmp_path, learning_rate=1e-3).train()
    with pytest.raises(ValueError, match="IndexOptimizer"):
        model.save(str(tmp_path / "model"))


def test_an_empty_index_is_not_trained(tmp_path):
    model = static_model()
    add_index(model, 4, 16)
    loss = IndexLoss(model, MultipleNegativesRankingLoss(model))
    with pytest.raises(RuntimeError, match=r"no codebooks yet; call warm_start.*WarmStart"):
        trainer(model, loss, tmp_path, optimizer=IndexOptimizer(loss)).train()


def with_index(**options):
    model = static_model()
    add_index(model, 4, 16, **options)
    return model


def mnrl(model):
    return MultipleNegativesRankingLoss(model)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: add_index(static_model(), 5), ValueError, "dim must be divisible by subspaces"),
        (lambda: add_index(static_model(), 4, 1), ValueError, "codewords must be in 2..256"),
        (lambda: add_index(static_model(), 4, metric="dot"), ValueError, "metric must be one of"),
        (lambda: add_index(with_index(), 4), ValueError, "must have no index yet"),
        (lambda: index_of(static_model()), ValueError, r"but is StaticEmbedding; call add_index"),
        (lambda: warm_start(static_model(), TEXTS), ValueError, "must be an Index"),
        (lambda: warm_start(with_index(), TEXTS[:5]), ValueError, "at least as many vectors"),
        (lambda: warm_start(with_index(), "text"), TypeError, "must be a list of texts"),
        (lambda: to_faiss(with_index(), TEXTS), RuntimeError, "no codebooks yet"),
        (
            lambda: IndexLoss(static_model(), mnrl(static_model())),
            ValueError,
            "must be an Index",
        ),
        (
            lambda: IndexLoss(with_index(), mnrl(static_model())),
            ValueError,
            "loss must be of the same model",
        ),
        (lambda: IndexLoss(with_index(), None), TypeError, "loss must be a loss of"),
        (
            lambda: IndexLoss(m := with_index(), IndexLoss(m, mnrl(m))),
            TypeError,
            "but got IndexLoss",
        ),
        (
            lambda: IndexLoss(m := with_index(), mnrl(m), -1.0),
            ValueError,
            "weight must be finite, at least 0",
        ),
        (
            lambda: IndexLoss(m := warm_model(), mnrl(m), queries=2)(features(m)),
            ValueError,
            "queries must leave a column of documents, but got queries=2 for 2 columns",
        ),
        (lambda: IndexOptimizer(mnrl(static_model())), TypeError, "must be an IndexLoss"),
        (
            lambda: IndexOptimizer(IndexLoss(m := with_index(), mnrl(m))).load_state_dict({}),
            ValueError,
            r"must have the parts \['adam', 'gcd'\], but got \[\]",
        ),
        (
            lambda: IndexOptimizer(IndexLoss(m := with_index(), mnrl(m))).add_param_group(
                {"params": [torch.nn.Parameter(torch.ones(3))]}
            ),
            ValueError,
            "IndexOptimizer takes its parameters from its loss, and no further group",
        ),
        (lambda: WarmStart(TEXTS, -1), ValueError, "step must be at least 0"),
    ],
)
def test_bad_input_is_refused_in_one_line(call, error, message, unchecked):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_copy_of_the_optimizer_trains_the_copy_of_the_model():
    model = warm_model()
    loss = IndexLoss(model, mnrl(model))
    copied, optimizer = copy.deepcopy((loss, IndexOptimizer(loss)))
    before = copied.index.layer.rotation.matrix.detach().clone()
    sum(copied(features(copied.model)).values()).backward()
    optimizer.step()
    assert not torch.equal(copied.index.layer.rotation.matrix.detach(), before)
    assert torch.equal(loss.index.layer.rotation.matrix.detach(), before)
    assert optimizer.param_groups[-1] is optimizer.parts["gcd"].param_groups[0]


def test_truncation_after_the_index_is_refused():
    model = warm_model()
    model.truncate_dim = 8
    with pytest.raises(ValueError, match="truncate_dim=8; set it before add_index"):
        to_faiss(model, TEXTS)


def test_a_moving_average_is_not_counted_twice(bert_folder):
    model = bert_model(bert_folder)
    add_index(model, 4, 16, update="ema")
    with pytest.raises(ValueError, match="embeds twice, which update='ema' would count twice"):
        IndexLoss(model, CachedMultipleNegativesRankingLoss(model))


def test_its_file_says_what_it_is(tmp_path):
    warm_model().save(str(tmp_path / "model"))
    told = json.loads((tmp_path / "model" / "modules.json").read_text())[-1]
    assert told["type"] == f"{Index.__module__}.Index"
    header = givens.storage.files.read_header(tmp_path / "model" / "1_Index" / "index.safetensors")
    assert header.metadata["subspaces"] == 4


def test_without_sentence_transformers_it_says_what_to_install():
    code = (
        "import sys; sys.modules['sentence_transformers'] = None\n"
        "import givens\nimport givens.sentence_transformers"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "pip install 'givens[sentence-transformers]'" in run.stderr
