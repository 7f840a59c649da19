import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpy_vit
import pytest
from at_fault import at_fault, keys_of, refused_with
from formulas import vit_macs, vit_params
from numpy_vit import random_params

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.models import create_model
from vit_jax.models.contract import about
from vit_jax.models.dropout import Dropout
from vit_jax.models.patches import extract_patches
from vit_jax.models.vit import ViT
from vit_jax.transfer.fit import merge_head_norm

IMAGE_SIZE, PATCH_SIZE = (4, 12), (2, 4)  # a grid of 2 x 3
RANDOM = np.random.default_rng(1)
IMAGES = np.random.default_rng(0).uniform(-1, 1, (2, *IMAGE_SIZE, 3)).astype(np.float32)
SMALL = {"patch_size": PATCH_SIZE, "width": 16, "depth": 2, "mlp_dim": 24, "num_heads": 2}


def by_hand(name):
    """(parameters, multiply-adds) of the model called `name`."""
    variant, patch = re.fullmatch(r"ViT-(\w+)/(\d+)", name).groups()
    size, sizes = (int(patch),) * 2, {"grid": (224 // int(patch),) * 2, "num_classes": 1000}
    pool = "map" if variant == "22B" else "token"
    return vit_params(variant, size, pool=pool, **sizes), vit_macs(variant, size, **sizes)


def small(num_classes=5, image_size=IMAGE_SIZE, **fields):
    return create_model("ViT-mu/4", num_classes, image_size, **(SMALL | fields))


@functools.partial(jax.jit, static_argnums=0)
def evaluate(model, params, images=IMAGES):
    """{method: what it gives}."""
    outputs, methods = {}, ("tokens", "features", "pre_logits", "__call__")

    def note(next_call, args, kwargs, context):
        found = next_call(*args, **kwargs)
        if not context.module.path:
            outputs[context.method_name] = found
        return found

    with nn.intercept_methods(note):  # of those that the logits go through, each once
        model.apply({"params": params}, images)
    for method in methods:
        if method not in outputs:
            outputs[method] = model.apply({"params": params}, images, method=method)
    return {method: outputs[method] for method in methods}


@functools.partial(jax.jit, static_argnums=0)
def train(model, params, key):
    return model.apply({"params": params}, IMAGES, train=True, rngs={"dropout": key})


def assert_same(ours, reference, tolerance=5e-6):
    reference = np.asarray(reference)
    np.testing.assert_allclose(ours, reference, rtol=0, atol=tolerance * np.abs(reference).max())


def test_patches_are_in_raster_order():
    expected = [numpy_vit.patches(image, PATCH_SIZE) for image in IMAGES]
    np.testing.assert_array_equal(extract_patches(IMAGES, PATCH_SIZE), expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"pool": "token", "hidden_head": True, "depth": 2},
        {"pool": "gap", "gelu": "exact"},
        {"pool": "map", "gelu": "exact", "hidden_head": True},
        {"pool": "token", "pos_embed_class_token": False},
        {"pool": "map", "pos_embed": "none"},
        {"pool": "token", "num_classes": None, "hidden_head": True},
        {"pool": "gap", "class_token": True, "norm_pooled": True, "hidden_head": True},
        {"pool": "map", "class_token": True},
        {"pool": "map", "parallel": True, "norm": "rms", "qk_norm": True, "qkv_bias": False},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_model_follows_the_equations(fields):
    model = small(**{"depth": 1} | fields)
    params = random_params(model, IMAGES)
    expected = [numpy_vit.vit(model, params, image) for image in IMAGES]
    for method, ours in evaluate(model, params).items():
        assert_same(ours, [e[method] for e in expected])


def test_every_norm_has_the_epsilon():
    model = small(pool="map", qk_norm=True, norm_eps=0.5)
    epsilons = []

    def note(next_call, args, kwargs, context):
        if isinstance(context.module, nn.LayerNorm):
            epsilons.append(context.module.epsilon)
        return next_call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(model.init, jax.random.key(0), IMAGES)
    assert epsilons == [0.5] * (2 * (2 + 2) + 1 + 1)  # of 2 layers; the last; the pooling head's


def init(**fields):
    fields = {"width": 64, "mlp_dim": 96, "depth": 3} | fields
    model = create_model("ViT-mu/8", 10, 32, hidden_head=True, head_bias=-10.0, **fields)
    images = jnp.zeros((1, 32, 32, 3))
    return tree.flatten_names(jax.jit(model.init)(jax.random.key(0), images)["params"])


@pytest.fixture(scope="module", params=["unrolled", "scanned"])
def initial(request):
    return init(pool="token", scan=request.param == "scanned")


def test_head_starts_at_zero_with_its_bias(initial):
    assert (initial["head/kernel"] == 0).all()
    assert (initial["head/bias"] == -10).all()


def test_class_token_starts_at_zero(initial):
    assert (initial["class_token"] == 0).all()


def test_position_embedding_starts_normal(initial):
    values = initial["pos_embedding"]
    assert values.std() == pytest.approx(0.02, rel=0.1)
    assert abs(values.mean()) < 0.003


def test_biases_start_at_zero_but_for_the_mlps(initial):
    for name, leaf in initial.items():
        if "/mlp/" in name and name.endswith("bias"):
            assert 0.5e-6 < leaf.std() < 1.5e-6, name
        elif name.endswith("bias") and name != "head/bias":
            assert (leaf == 0).all(), name
        elif name.endswith("scale"):
            assert (leaf == 1).all(), name


def test_kernels_start_xavier_uniform(initial):
    checked = 0
    for name, leaf in initial.items():
        if name.endswith("kernel") and name not in ("head/kernel", "embedding/kernel"):
            # q, k, v have as many outputs as inputs: the width, however many heads there are.
            bound = np.sqrt(6 / (leaf.shape[-2] + leaf.shape[-1]))
            layers = leaf if leaf.ndim == 3 else leaf[None]
            for layer in layers:
                assert 0.98 * bound < np.abs(layer).max() <= bound, name
                assert layer.std() == pytest.approx(bound / np.sqrt(3), rel=0.05), name
                checked += 1
    assert checked == 3 * 6 + 1  # q, k, v, out, up, down of 3 layers; the head's hidden layer


def test_embedding_starts_as_a_convolution(initial):
    kernel = initial["embedding/kernel"]
    assert kernel.std() == pytest.approx(1 / np.sqrt(8 * 8 * 3), rel=0.05)


def test_layers_start_differently(initial):
    if "encoder/layers/mlp/up/kernel" in initial:
        layers = initial["encoder/layers/mlp/up/kernel"]
    else:
        layers = jnp.stack([initial[f"encoder/layer_{i}/mlp/up/kernel"] for i in range(3)])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (layers[a] != layers[b]).mean() > 0.99


def test_map_head_starts_as_its_layers():
    params = init(pool="map", depth=1)
    bound = np.sqrt(6 / (64 + 64))
    for name in ("query", "key", "value", "out"):
        largest = np.abs(params[f"map_head/attention/{name}/kernel"]).max()
        assert 0.98 * bound < largest <= bound
    assert (params["map_head/probe"] != 0).all()


def dropout_places(model, params):
    """{path of a Dropout that acts: its rate} in training."""
    places = {}

    def note(next_call, args, kwargs, context):
        module = context.module
        if isinstance(module, Dropout) and module.rate > 0:
            places["/".join(module.path)] = module.rate
        return next_call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(
            lambda key: model.apply({"params": params}, IMAGES, train=True, rngs={"dropout": key}),
            jax.random.key(0),
        )
    return places


def test_dropout_stands_after_every_dense_layer_but_q_k_v_and_the_head():
    model = small(dropout=0.25, hidden_head=True)
    places = dropout_places(model, random_params(model, IMAGES))
    expected = {"embedding_dropout"}
    for i in range(2):
        layer = f"encoder/layer_{i}"
        expected |= {f"{layer}/Dropout_0", f"{layer}/mlp/Dropout_0", f"{layer}/mlp/Dropout_1"}
    assert places == dict.fromkeys(expected, 0.25)


def test_dropout_acts_on_the_sum_of_patches_and_positions():
    model = small(dropout=0.25, depth=1)
    params = random_params(model, IMAGES)

    def stem(train):
        _, kept = model.apply(
            {"params": params},
            IMAGES,
            train=train,
            rngs={"dropout": jax.random.key(1)},
            capture_intermediates=lambda module, _: module.name == "embedding_dropout",
        )
        return kept["intermediates"]["embedding_dropout"]["__call__"][0]

    whole, dropped = jax.device_get(jax.jit(lambda: (stem(train=False), stem(train=True)))())
    zero = dropped == 0
    assert 0.1 < zero.mean() < 0.4
    assert zero[:, 0].any()  # the class token, too
    np.testing.assert_allclose(dropped[~zero], whole[~zero] / 0.75, rtol=1e-6)


NOISE = {"dropout": 0.5, "attention_dropout": 0.5, "stochastic_depth": 0.5}


@pytest.mark.parametrize(
    "fields",
    [*({field: rate} for field, rate in NOISE.items()), NOISE | {"scan": True, "remat": "full"}],
    ids=[*NOISE, "all, scanned"],
)
def test_noise_is_in_training_and_follows_its_key(fields):
    model = small(**fields)
    params = random_params(model, IMAGES)
    a, same, b = (np.asarray(train(model, params, jax.random.key(seed))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(a, same)
    assert np.abs(a - b).max() > 1e-3


def test_no_noise_in_evaluation():
    params = random_params(small(), IMAGES)
    plain, noisy = evaluate(small(), params), evaluate(small(**NOISE), params)
    np.testing.assert_array_equal(noisy["__call__"], plain["__call__"])


def test_bfloat16_computes_in_it_and_keeps_parameters_and_logits_in_float32():
    plain, half = (small(pool="map", hidden_head=True, dtype=d) for d in ("float32", "bfloat16"))
    made = jax.eval_shape(lambda: half.init(jax.random.key(0), IMAGES))["params"]
    assert {leaf.dtype for leaf in jax.tree.leaves(made)} == {jnp.dtype("float32")}
    params = random_params(half, IMAGES, scale=0.1)
    out, expected = evaluate(half, params), evaluate(plain, params)["__call__"]
    logits = out.pop("__call__")
    assert {leaf.dtype for leaf in out.values()} == {jnp.dtype("bfloat16")}
    assert logits.dtype == jnp.float32
    error = np.abs(logits - expected).max() / np.abs(expected).max()
    assert 1e-6 < error < 0.03


def test_dtype_may_be_a_name_or_a_dtype():
    for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")):
        assert small(dtype=dtype).dtype == jnp.dtype("bfloat16")


def test_an_int_image_size_is_square():
    assert create_model("ViT-mu/16").image_size == (224, 224)


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({"num_heads": True, "depth": 2.5, "class_token": 1, "dropout": "0", "scan": "no"},
         "class_token depth dropout num_heads scan"),
        ({"num_classes": "10"}, "num_classes"),
        ({"num_clases": 10, "pol": "gap"}, "num_clases pol"),
        ({"depth": 0, "gelu": "erf", "num_heads": 3, "patch_size": 5},
         "depth gelu num_heads patch_size patch_size"),
        ({"num_classes": 0}, "num_classes"),
        ({"image_size": 0}, "image_size"),
        ({"image_size": (4, 4, 3)}, "image_size"),
    ],
)  # fmt: skip
def test_faulty_fields(fields, keys):
    """Those that a config cannot give; run/faults.txt has the others."""
    with pytest.raises(InputError) as error:
        small(**fields)
    assert sorted(keys_of(error.value)) == keys.split(" ")


@pytest.mark.parametrize("shape", [(2, 12, 4, 3), (2, 4, 12, 1), (2, 8, 24, 3), (4, 12, 3)])
def test_images_of_another_size(shape):
    model = small()
    params = random_params(model, IMAGES)
    with refused_with(str(shape), "image_size=(4, 12)", "resize"):
        model.apply({"params": params}, np.zeros(shape, np.float32))


def test_a_module_made_by_hand_is_checked_too():
    with at_fault("num_heads"):
        ViT(5, (4, 4), (2, 2), width=16, depth=1, mlp_dim=8, num_heads=5)


@pytest.mark.parametrize("place", ["stem", "layers_shared"])
def test_encode_of_some_patches_is_that_of_an_image_with_only_these(place):
    model = small(pos_embed="sincos_2d", pos_embed_at=place, depth=1)
    params = random_params(model, IMAGES)
    keep = np.array([[5, 0, 3], [1, 2, 4]])

    def encode(model, images, keep=None):
        return model.encode(model.embed(images), keep=keep)

    @jax.jit
    def outputs(params):
        every = np.array([[3, 1, 0, 5, 4, 2]] * 2)
        apply = functools.partial(model.apply, {"params": params}, IMAGES, method=encode)
        # Three patches in a row, of a model without positions, to which they are added by hand.
        bare = model.clone(pos_embed="none", pos_embed_at=None)
        own = functools.partial(bare.apply, {"params": params})
        table = model.positions(IMAGE_SIZE).build(None)
        some = own(IMAGES, method=lambda m, x: m.embed(x)) + table[:, 1:]
        some = jnp.take_along_axis(some, keep[:, :, None], axis=1)
        alone = own(some, method=lambda m, x: m.encode(x, image_size=(2, 12)))
        return apply(), apply(keep=every), apply(keep=keep), alone

    whole, permuted, kept, alone = outputs(params)
    assert kept.shape == (2, 1 + 3, 16)
    assert_same(permuted[:, 1:], whole[:, 1:][:, [3, 1, 0, 5, 4, 2]])
    assert_same(permuted[:, 0], whole[:, 0])
    assert np.abs(kept[:, 0] - whole[:, 0]).max() > 1e-3
    if place == "stem":
        assert_same(kept, alone)


def test_encode_refuses_to_leave_out_patches_that_the_layers_need():
    model = small(pos_embed="relative")
    x, keep = jnp.zeros((1, 6, 16)), jnp.zeros((1, 3), jnp.int32)
    with at_fault("pos_embed"):
        model.init(jax.random.key(0), x, keep=keep, method="encode")


def test_a_batch_norm_before_the_head_follows_the_batch_and_merges_into_the_head():
    model = small(head_batch_norm=True, pool="gap", depth=1)
    assert about(model).has_batch_statistics and not about(small()).has_batch_statistics
    images, mask = np.concatenate([IMAGES, IMAGES[::-1] + 1]), np.array([1, 1, 0, 1])
    params = random_params(model, images)

    @jax.jit
    def outputs(params, stats):
        variables = {"params": params, "batch_stats": stats}
        apply = functools.partial(model.apply, variables, images)
        features = apply(method="features")
        return features, apply(train=True, mask=mask, mutable=["batch_stats"]), apply()

    stats = {"head_norm": {"mean": RANDOM.normal(size=16), "var": RANDOM.uniform(1, 2, 16)}}
    features, (logits, changed), evaluated = jax.device_get(outputs(params, stats))
    seen = features[mask > 0]
    kernel, bias = params["head"]["kernel"], params["head"]["bias"]
    normed = (features - seen.mean(axis=0)) / np.sqrt(seen.var(axis=0) + 1e-6)
    assert_same(logits, normed @ kernel + bias, 2e-5)
    mean = 0.9 * stats["head_norm"]["mean"] + 0.1 * seen.mean(axis=0)
    assert_same(changed["batch_stats"]["head_norm"]["mean"], mean)
    named, state = tree.flatten_names(params), tree.flatten_names({"batch_stats": stats})
    plain, merged, left = merge_head_norm(model, named, state)
    assert left == {} and not plain.head_batch_norm
    merged = tree.unflatten_names(merged)
    assert_same(jax.jit(plain.apply)({"params": merged}, images), evaluated, 2e-5)
