"""EfficientNet: sizes, batch statistics in a step, and timm's files."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from at_fault import at_fault
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax.base import tree
from vit_jax.devices.mesh import batch_sharding, make_mesh
from vit_jax.devices.sharding import constrain, state_shardings
from vit_jax.models import create_model
from vit_jax.models.batch_norm import BatchNorm
from vit_jax.models.efficientnet import (
    EFFICIENTNET_NAMES,
    EFFICIENTNET_VARIANTS,
    MBConv,
    Variant,
    find_variant,
)
from vit_jax.objectives.forward import apply_in_training
from vit_jax.transfer.pretrained import Cut

RNG = np.random.default_rng(0)
TINY = {"width_factor": 0.125, "depth_factor": 0.1}  # 7 blocks
# B0's stages: blocks, kernel, stride, expansion, channels; factors of width and depth by size.
MBCONVS = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80),
           (3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320))  # fmt: skip
FACTORS = {"B0": (1.0, 1.0), "B1": (1.0, 1.1), "B2": (1.1, 1.2), "B3": (1.2, 1.4), "B4": (1.4, 1.8),
           "B5": (1.6, 2.2), "B6": (1.8, 2.6), "B7": (2.0, 3.1), "B8": (2.2, 3.6),
           "L2": (4.3, 5.3)}  # fmt: skip


def by_hand(name):
    """(parameters, multiply-adds) of the model called `name`."""
    wider, deeper = FACTORS[name.removeprefix("EfficientNet-")]

    def scaled(channels):
        low = int(channels * wider) // 8 * 8
        nearest = low + 8 * (channels * wider - low >= 4)
        return nearest + 8 * (nearest < 0.9 * channels * wider)

    side, channels, last = math.ceil(224 / 2), scaled(32), scaled(1280)
    params, macs = 27 * channels + 2 * channels, 27 * channels * side**2
    for blocks, kernel, stride, expansion, width in MBCONVS:
        for block in range(math.ceil(blocks * deeper)):
            inner, squeezed, width_out = expansion * channels, channels // 4, scaled(width)
            if expansion > 1:
                params += channels * inner + 2 * inner
                macs += channels * inner * side**2
            side = math.ceil(side / stride) if block == 0 else side
            params += kernel**2 * inner + 2 * inner + inner * width_out + 2 * width_out
            params += 2 * inner * squeezed + squeezed + inner
            macs += (kernel**2 + width_out) * inner * side**2 + 2 * inner * squeezed
            channels = width_out
    params += channels * last + 2 * last + (last + 1) * 1000
    return params, macs + channels * last * side**2 + last * 1000


def test_every_published_image_size():
    sizes = [find_variant(name).image_size for name in EFFICIENTNET_NAMES]
    assert sizes == [224, 240, 260, 300, 380, 456, 528, 600, 672, 800]


# Batch normalisation


def normalise(x, state, mask=None, train=True):
    norm = BatchNorm(momentum=0.9, epsilon=1e-3)
    variables = {"params": {"scale": np.array([2.0, 3.0]), "bias": np.array([0.5, -1.0])}}
    return norm.apply(variables | state, x, mask, train, mutable=["batch_stats"])


def test_batch_norm_by_hand_without_the_masked_rows():
    x = RNG.normal(1, 2, (4, 3, 5, 2)).astype(np.float32)
    before = {"batch_stats": {"mean": np.array([1.0, -1.0]), "var": np.array([0.5, 2.0])}}
    mask = np.array([1, 0, 1, 1], np.float32)
    y, after = normalise(x, before, mask)
    seen = x[mask > 0].astype(np.float64)
    mean, var = seen.mean(axis=(0, 1, 2)), seen.var(axis=(0, 1, 2))
    expected = (x - mean) / np.sqrt(var + 1e-3) * [2, 3] + [0.5, -1]
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5)
    for name, statistic in (("mean", mean), ("var", var)):
        moved = 0.9 * before["batch_stats"][name] + 0.1 * statistic
        np.testing.assert_allclose(after["batch_stats"][name], moved, rtol=1e-5)
    y, same = normalise(x, before, train=False)
    of_averages = (x - [1, -1]) / np.sqrt(np.array([0.501, 2.001])) * [2, 3] + [0.5, -1]
    np.testing.assert_allclose(y, of_averages, rtol=0, atol=2e-5)
    _, unseen = normalise(x, before, np.zeros(4, np.float32))
    for state in (same, unseen):
        jax.tree.map(np.testing.assert_array_equal, dict(state), before)


def test_masked_rows_change_neither_the_others_nor_the_statistics():
    model = create_model("EfficientNet-B0", 3, 32, **TINY)
    images = RNG.normal(size=(6, 32, 32, 3)).astype(np.float32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    variables = jax.tree.map(lambda leaf: np.float32(RNG.uniform(0.1, 0.3, leaf.shape)), shapes)
    mask = np.array([1, 1, 0, 1, 0, 1], np.float32)

    @jax.jit
    def step(images):
        batch = {"image": images, "mask": mask}
        state = {"batch_stats": variables["batch_stats"]}
        return apply_in_training(model, variables["params"], state, batch, jax.random.key(1))

    logits, state = step(images)
    other, state_of_other = step(np.where(mask[:, None, None, None] > 0, images, 9))
    np.testing.assert_allclose(logits[mask > 0], other[mask > 0], rtol=0, atol=1e-5)
    assert np.abs(logits - other).max() > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
                 state, state_of_other)  # fmt: skip
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max() > 0, dict(variables)["batch_stats"],
                         state["batch_stats"])  # fmt: skip
    assert all(jax.tree.leaves(moved))


# The step


def mesh_of(devices):
    split = 2 if devices == 8 else 1
    axes = {"replica": 1, "data": split, "fsdp": split, "tensor": split}
    return make_mesh(**axes, devices=jax.devices()[:devices])


def gradients_and_statistics(devices):
    """Of a block whose channels and images are split over `devices`; a third are masked."""
    rng, mesh = np.random.default_rng(0), mesh_of(devices)
    block = MBConv(8, 3, 1, 6, 0.2, 0.9, 1e-3, constrain=constrain)
    images = rng.normal(size=(16, 8, 8, 8)).astype(np.float32)
    mask = (np.arange(16) % 3 > 0).astype(np.float32)
    weights = jnp.reshape(jnp.arange(64.0), (1, 8, 8, 1))

    def loss(params, state, images, mask):
        out, state = block.apply(
            {"params": params, **state}, images, mask, True,
            mutable=["batch_stats"], rngs={"dropout": jax.random.key(3)},
        )  # fmt: skip
        return (jnp.square(out) * weights * jnp.reshape(mask, (-1, 1, 1, 1))).sum(), state

    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: block.init(jax.random.key(0), images, mask, False))
        variables = jax.tree.map(lambda leaf: rng.uniform(0.1, 1, leaf.shape), dict(shapes))
        variables = jax.tree.map(np.float32, variables)
        placed = jax.device_put(variables, state_shardings(variables, mesh))
        params, state = placed.pop("params"), placed
        batch = jax.device_put((images, mask), batch_sharding(mesh))
        found = jax.jit(jax.grad(loss, has_aux=True))(params, state, *batch)
    return tree.flatten_names(jax.device_get(found))


def test_eight_devices_have_the_statistics_and_gradients_of_one():
    expected, found = gradients_and_statistics(1), gradients_and_statistics(8)
    assert "1/batch_stats/norm_expand/mean" in expected
    for name, leaf in expected.items():
        tolerance = 2e-5 * np.abs(leaf).max()
        np.testing.assert_allclose(found[name], leaf, rtol=0, atol=tolerance, err_msg=name)


# Files of timm


def test_golden_in_and_out(golden, tmp_path):
    source = golden / "timm_efficientnet.safetensors"
    with np.load(golden / "timm_efficientnet.io.npz") as arrays:
        images, expected = arrays["image"], arrays["logits"]
    model, variables = vit_jax.load_pretrained(source)
    assert (model.width_factor, model.depth_factor, model.image_size) == (0.125, 0.3, None)
    found = jax.jit(model.apply)(variables, images)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    target = tmp_path / "made" / source.name
    spec = vit_jax.pretrained_spec(source)
    vit_jax.save_pretrained(target, model, variables, "timm", spec)
    ours, theirs = load_file(target), load_file(source)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].tobytes()) == (array.dtype, array.tobytes()), name
    assert vit_jax.read_pretrained(target).spec == spec
    with at_fault("variables"):
        vit_jax.save_pretrained(target, model, {"params": variables["params"]}, "timm")
    tuned, fresh = vit_jax.load_pretrained(source, num_classes=3, image_size=(32, 40))
    assert (tuned.num_classes, tuned.image_size) == (3, (32, 40))
    assert not any(leaf.any() for leaf in fresh["params"]["head"].values())
    jax.tree.map(np.testing.assert_array_equal, fresh["batch_stats"], variables["batch_stats"])


def test_what_a_published_file_states(golden, tmp_path, monkeypatch):
    """A config.json as on the Hub; sizes come from the arrays, preprocessing from the file."""
    monkeypatch.setitem(EFFICIENTNET_VARIANTS, "B1", Variant(*TINY.values(), 240, 0.2))
    model = create_model("EfficientNet-B1", 4, None)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    variables = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    vit_jax.save_pretrained(tmp_path, model, variables, "timm")
    pixels = {
        "input_size": [3, 240, 240], "crop_pct": 0.882, "interpolation": "bicubic",
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
    }  # fmt: skip
    config = {"architecture": "tf_efficientnet_b1", "num_classes": 4, "pretrained_cfg": pixels}
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architecture"] == config["architecture"] and "width" not in written
    (tmp_path / "config.json").write_text(json.dumps(config))
    pretrained = vit_jax.read_pretrained(tmp_path)
    assert pretrained.model == model.clone(image_size=(240, 240))
    assert pretrained.spec.cut == Cut(0.882, "center", "bicubic")
    assert pretrained.spec.mean == (0.485, 0.456, 0.406)
    padded = json.dumps(config | {"architecture": "efficientnet_b1"})
    (tmp_path / "config.json").write_text(padded)
    with at_fault("init_from"):
        vit_jax.read_pretrained(tmp_path)
    golden = load_file(golden / "timm_efficientnet.safetensors")
    save_file(golden, tmp_path / "unknown.safetensors")
    with at_fault("init_from"):
        vit_jax.read_pretrained(tmp_path / "unknown.safetensors")
