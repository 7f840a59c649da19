"""Captions as a target: values and gradients of the published code, rows, devices, whole runs."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from numpy_vit import random_params

from vit_jax.base import tree
from vit_jax.config import OBJECTIVES
from vit_jax.data.tokenizers import TextFacts
from vit_jax.experiment.accumulation import accumulate
from vit_jax.models import create_model
from vit_jax.models.captioner import most_probable
from vit_jax.objectives.contract import RunFacts

pytestmark = pytest.mark.usefixtures("one_device")

STATE = SimpleNamespace(model_state={})
# The last parts of our names -> those of the published code.
OF_BLOCK = {
    "norm_attention": "LayerNorm1", "norm_image": "LayerNorm2", "norm_mlp": "LayerNorm3",
    "attention": "SelfAttn", "image_attention": "CrossAttn",
    "mlp/up": "MLP/Dense_0", "mlp/down": "MLP/Dense_1",
}  # fmt: skip
OF_LAYER = {
    "norm_attention": "LayerNorm_0", "norm_mlp": "LayerNorm_1",
    "attention": "MultiHeadDotProductAttention_0",
    "mlp/up": "MlpBlock_0/Dense_0", "mlp/down": "MlpBlock_0/Dense_1",
}  # fmt: skip
OTHERS = {
    "embedding": "encoder/embedding", "pos_embedding": "encoder/pos_embedding",
    "encoder/norm": "encoder/Transformer/encoder_norm",
    "objective/decoder/token_embedding": "decoder/EmbedTargets",
    "objective/decoder/pos_embedding": "pos_embedding_decoder",
    "objective/decoder/encoder/norm": "decoder/LayerNorm",
    "objective/decoder/head": "decoder/LogitsDense",
}  # fmt: skip


def published(name):
    """The published name of our parameter `name`."""
    for start, end, theirs in (
        ("encoder/layer_", "encoder/Transformer/encoderblock_", OF_LAYER),
        ("objective/decoder/encoder/layer_", "decoder/EncDecBlock", OF_BLOCK),
    ):
        if name.startswith(start):
            number, _, part = name.removeprefix(start).partition("/")
            old = max((p for p in theirs if part.startswith(f"{p}/")), key=len)
            return f"{end}{number}/{theirs[old]}{part.removeprefix(old)}"
    old = max((p for p in OTHERS if f"{name}/".startswith(f"{p}/")), key=len)
    return OTHERS[old] + name.removeprefix(old)


@pytest.fixture(scope="module")
def cappa(golden):
    with np.load(golden / "cappa.npz") as found:
        return dict(found)


def bound(facts, size=24, fields=(), **keys):
    """(objective, its part, model) with sizes of the golden."""
    sizes = {"patch_size": 8, "width": 32, "depth": 2, "mlp_dim": 64, "num_heads": 2}
    model = create_model("ViT-mu/8", None, size, pool="gap", **sizes | dict(fields))
    part = OBJECTIVES.make({"name": "captions", "decoder_depth": 2, "decoder_mlp_dim": 64} | keys)
    return part.bind(model, None, RunFacts((), (), text=facts)), part, model


def of_golden(cappa, **keys):
    """(objective, its part, model, parameters, batch) of the golden."""
    objective, part, model = bound(TextFacts(60, 9, 1, 0), **keys)
    images = jnp.asarray(cappa["image"])
    shapes = jax.eval_shape(model.init, jax.random.key(0), images[:1])["params"]
    shapes |= {"objective": jax.eval_shape(objective.init, jax.random.key(0))[0]}

    def take(name, leaf):
        array = cappa.get(f"weights/{published(name)}")
        assert array is not None or name.endswith("out/bias"), name
        return jnp.asarray(array).reshape(leaf.shape)

    params = jax.tree.map(take, tree.leaf_names(shapes), shapes)
    ones = np.ones(3, np.float32)
    batch = {"image": images, "text": cappa["labels"], "mask": ones, "text_mask": ones}
    return objective, part, model, params, {k: jnp.asarray(v) for k, v in batch.items()}


def close(found, expected, bound=2e-5):
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["causal", "parallel"])
def test_values_and_gradients_are_those_of_the_published_code(cappa, kind):
    share = float(kind == "parallel")
    objective, part, model, params, batch = of_golden(cappa, parallel_share=share)
    smooth = of_golden(cappa, parallel_share=share, smoothing=0.1)[0]
    captioner = part.make_captioner(model, TextFacts(60, 9, 1, 0))

    def of(objective, mask=batch["mask"]):
        rows = {**batch, "mask": mask}
        return lambda params: objective.loss(params, STATE, rows, None, jax.random.key(0)).loss

    @jax.jit
    def compute(params):
        own, is_parallel = {"params": params["objective"]["decoder"]}, np.full(3, bool(share))
        tokens = model.apply({"params": params}, batch["image"], method="tokens")
        logits = captioner.apply(own, tokens, batch["text"], is_parallel)
        smoothed = of(smooth)(params)
        return tokens, logits, smoothed, *jax.value_and_grad(of(objective))(params)

    tokens, logits, of_smooth, loss, grads = compute(params)
    close(tokens, cappa["encoded"])
    close(logits, cappa[f"logits_{kind}"])
    assert float(loss) == pytest.approx(float(cappa[f"loss_{kind}"]), rel=2e-5)
    smoothed = float(cappa[f"loss_{kind}_smoothed"])
    assert float(of_smooth) == pytest.approx(smoothed, rel=2e-5)
    start = f"grad_{kind}/"
    given = {published(name): grad for name, grad in tree.flatten_names(grads).items()}
    names = [name.removeprefix(start) for name in cappa if name.startswith(start)]
    assert len(names) == 5
    for name in names:
        expected = cappa[start + name]
        close(np.asarray(given[name]).reshape(expected.shape), expected)
    if kind == "causal":  # a row has the loss that it has alone
        masks = jnp.eye(3)
        each = jax.jit(jax.vmap(lambda mask: of(objective, mask)(params)))(masks)
        close(each, cappa["loss_each_causal"])


FACTS = TextFacts(20, 6)
RNG = np.random.default_rng(0)
IDS = RNG.integers(2, 20, (8, 6)).astype(np.int32)
IDS[:, 4:] = 1
BATCH = {
    "image": RNG.uniform(-1, 1, (8, 16, 16, 3)).astype(np.float32),
    "mask": np.float32([1, 1, 1, 0, 1, 1, 1, 1]),
    "text": IDS,
    "text_mask": np.float32([1, 1, 1, 1, 1, 0, 1, 1]),
}
SMALL = {"width": 16, "depth": 1, "mlp_dim": 16, "patch_size": 8}


def without_params(fields=(), **keys):
    """(objective, its part, model) of one layer each."""
    return bound(FACTS, 16, SMALL | dict(fields), decoder_depth=1, **keys)


def small(fields=(), **keys):
    """(objective, its part, model, parameters) of one layer each."""
    objective, part, model = without_params(fields, **keys)
    params = jax.jit(model.init)(jax.random.key(0), BATCH["image"][:1])["params"]
    own, _ = jax.jit(objective.init)(jax.random.key(1))
    return objective, part, model, params | {"objective": own}


@functools.cache
def compiled(loss):
    return jax.jit(lambda params, batch, key: loss(params, STATE, batch, None, key))


def output(objective, params, batch=BATCH, key=0):
    return compiled(objective.loss)(params, batch, jax.random.key(key))


@pytest.mark.slow
def test_rows_that_do_not_count_change_nothing():
    objective, _, _, params = small(parallel_share=0.5)
    out = output(objective, params)
    assert out.weight_sum == 6 and 0 <= out.metrics["right_tokens"] <= 1
    other = {**BATCH, "image": BATCH["image"].copy(), "text": BATCH["text"].copy()}
    other["image"][[3, 5]], other["text"][[3, 5], :3] = 0, 7
    other["text"][0, 5] = 9  # behind the end
    assert output(objective, params, other).loss == pytest.approx(float(out.loss), rel=1e-6)
    other["text"][0, 3] = 9
    assert output(objective, params, other).loss != pytest.approx(float(out.loss), rel=1e-4)
    row = {**BATCH, "mask": np.eye(8, dtype=np.float32)[1]}
    forms = [without_params(parallel_share=share)[0] for share in (0.0, 1.0)]
    whole = [float(output(form, params, row).loss) for form in forms]
    mixed = [float(output(objective, params, row, key).loss) for key in range(8)]
    near = np.isclose(np.array(mixed)[:, None], np.array(whole)[None], rtol=1e-6)
    assert (near.sum(axis=1) == 1).all() and near.any(axis=0).all()  # one form or the other


@pytest.mark.slow
def test_a_part_of_the_patches_is_read():
    objective, part, model, params = small({"keep_tokens": 0.5}, parallel_share=0.0)
    _, dropout_key = jax.random.split(jax.random.key(3))
    tokens = model.apply({"params": params}, BATCH["image"], train=True, method="tokens",
                         rngs={"dropout": dropout_key})  # fmt: skip
    assert tokens.shape == (8, 2, 16)
    own = {"params": params["objective"]["decoder"]}
    logits = part.make_captioner(model, FACTS).apply(own, tokens, IDS)
    logs = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), IDS[:, :, None], 2)[..., 0]
    counted = (BATCH["mask"] * BATCH["text_mask"])[:, None] * np.float32([1, 1, 1, 1, 1, 0])
    expected = -(counted * logs).sum() / counted.sum()
    assert output(objective, params, key=3).loss == pytest.approx(expected, rel=1e-5)


def test_the_contrastive_loss_is_added_with_its_weight():
    sizes = {"text_width": 8, "text_depth": 1, "text_heads": 2, "text_mlp_dim": 8}
    both, part, model, params = small(parallel_share=1.0, contrastive_weight=0.5, **sizes)
    captions = output(without_params(parallel_share=1.0)[0], params)
    pairs = OBJECTIVES.make({"name": "contrastive", **sizes})
    assert pairs.learns_texts and part.learns_texts and part.writes_captions
    pairs = output(pairs.bind(model, None, RunFacts((), (), text=FACTS)), params)
    out = output(both, params)
    assert out.loss == pytest.approx(float(captions.loss + pairs.loss / 2), rel=1e-5)
    assert out.metrics["image_to_text"] == pairs.metrics["image_to_text"]
    assert both.couples_rows and not without_params()[0].couples_rows


@pytest.mark.slow
def test_microbatches_give_the_same_gradients():
    objective, _, _, params = small(parallel_share=1.0)
    state = STATE.__class__(params=params, model_state={}, objective_state={})

    def sums_of(params, state, batch, key):
        return objective.loss(params, state, batch, None, key)

    state.replace = lambda **new: SimpleNamespace(**{**vars(state), **new})
    batch = jax.tree.map(jnp.asarray, BATCH)
    key = jax.random.key(0)
    compute = jax.jit(lambda n: accumulate(sums_of, state, batch, key, n)[0], static_argnums=0)
    whole, parts = compute(1), compute(4)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_refusals():
    with at_fault("objective.name"):
        part = OBJECTIVES.make({"name": "captions"})
        part.bind(create_model("BiT-R50x1", None), None, RunFacts((), (), text=FACTS))
    with at_fault("objective.decoder_width"):
        small(decoder_width=9)
    for wrong in (FACTS._replace(end_id=None), FACTS._replace(pads_left=True)):
        with at_fault("data.tokenizer"):
            bound(wrong)


def until_end(row):
    return (*itertools.takewhile(lambda token: token != 1, row),)


def test_the_search_finds_the_most_probable_captions():
    facts = TextFacts(5, 4)  # 1 ends a caption
    _, part, model = bound(facts, 16, SMALL, decoder_depth=1)
    captioner = part.make_captioner(model, facts)
    tokens = RNG.standard_normal((3, 2, 16)).astype(np.float32)
    own = {"params": random_params(captioner, tokens[:1], np.zeros((1, 4), np.int32), scale=0.6)}
    search = jax.jit(most_probable, static_argnums=0, static_argnames=("end_id", "beams", "top"))
    ids, found = search(captioner, own, tokens, end_id=1, beams=125, top=3)
    first, greedy = search(captioner, own, tokens, end_id=1, beams=1, top=1)
    every = np.array([*itertools.product(range(5), repeat=4)], np.int32)
    compute = jax.jit(captioner.apply)
    for i, image in enumerate(tokens):
        logits = compute(own, np.repeat(image[None], len(every), axis=0), every)
        logs = np.asarray(jax.nn.log_softmax(logits))
        each = np.take_along_axis(logs, every[:, :, None], 2)[..., 0]
        captions = [*map(until_end, every.tolist())]
        score = {c: row[: len(c) + 1].sum() for c, row in zip(captions, each, strict=True)}
        best = sorted(score, key=score.get, reverse=True)[:3]
        assert [*map(until_end, ids[i].tolist())] == best
        np.testing.assert_allclose(found[i], [score[caption] for caption in best], rtol=1e-5)
        chosen = until_end(first[i, 0].tolist())
        of_chosen = logs[captions.index(chosen), : len(chosen) + 1].argmax(axis=1).tolist()
        assert of_chosen == [*chosen, 1][:4]
        assert float(greedy[i, 0]) == pytest.approx(score[chosen], rel=1e-5)
