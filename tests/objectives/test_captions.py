"""Captions as a target: values and gradients of the published code, rows, devices, whole runs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.base import tree
from vit_jax.config import OBJECTIVES
from vit_jax.data.tokenizers import TextFacts
from vit_jax.models import create_model
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
    "objective/decoder/decoder/norm": "decoder/LayerNorm",
    "objective/decoder/head": "decoder/LogitsDense",
}  # fmt: skip


def published(name):
    """The published name of our parameter `name`."""
    for start, end, theirs in (
        ("encoder/layer_", "encoder/Transformer/encoderblock_", OF_LAYER),
        ("objective/decoder/decoder/layer_", "decoder/EncDecBlock", OF_BLOCK),
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
    part = OBJECTIVES.make({"name": "captions", "decoder_depth": 2, **keys})
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
    tokens = model.apply({"params": params}, batch["image"], method="tokens")
    close(tokens, cappa["encoded"])
    captioner = part.make_captioner(model, TextFacts(60, 9, 1, 0))
    own = {"params": params["objective"]["decoder"]}
    logits = captioner.apply(own, tokens, batch["text"], np.full(3, bool(share)))
    close(logits, cappa[f"logits_{kind}"])

    def of(objective):
        return lambda params: objective.loss(params, STATE, batch, None, jax.random.key(0)).loss

    loss, grads = jax.jit(jax.value_and_grad(of(objective)))(params)
    assert float(loss) == pytest.approx(float(cappa[f"loss_{kind}"]), rel=2e-5)
    smoothed = float(cappa[f"loss_{kind}_smoothed"])
    assert float(jax.jit(of(smooth))(params)) == pytest.approx(smoothed, rel=2e-5)
    start = f"grad_{kind}/"
    given = {published(name): grad for name, grad in tree.flatten_names(grads).items()}
    names = [name.removeprefix(start) for name in cappa if name.startswith(start)]
    assert len(names) == 5
    for name in names:
        expected = cappa[start + name]
        close(np.asarray(given[name]).reshape(expected.shape), expected)
    if kind == "causal":
        each = [objective.loss(params, STATE, {k: v[i : i + 1] for k, v in batch.items()}, None,
                               jax.random.key(0)).loss for i in range(3)]  # fmt: skip
        close(np.array(each), cappa["loss_each_causal"])
