"""T2T-ViT: its authors' files, and its constants in training."""

import json
import math
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from etils import epath
from read_settings import settings_of
from safetensors.numpy import load_file

import vit_jax
from vit_jax.base import tree
from vit_jax.checkpoints.checkpoint import Checkpoints
from vit_jax.checkpoints.restore import restore_newest
from vit_jax.config import base_config
from vit_jax.devices.mesh import make_mesh
from vit_jax.experiment.experiment import make_experiment
from vit_jax.inference.layers import attention_weights, layer_outputs
from vit_jax.models.t2t import SPLITS, _init_features, performer_attention, soft_split

RNG = np.random.default_rng(0)

# Width, layers, MLP.
T2T = {"7": (256, 7, 512), "10": (256, 10, 512), "12": (256, 12, 512), "14": (384, 14, 1152),
       "19": (448, 19, 1344), "24": (512, 24, 1536)}  # fmt: skip


def by_hand(name):
    """(trained parameters, multiply-adds), with tokens of width 64 and 32 random features."""
    width, depth, mlp_dim = T2T[name.removeprefix("T2T-ViT-")]
    side, params, macs = 224, 0, 0
    for inputs, stride in ((7 * 7 * 3, 4), (3 * 3 * 64, 2)):
        side //= stride
        positions = side**2
        params += 2 * inputs + 2 * 64 + inputs * 3 * 64 + 3 * (64 * 64 + 64)
        macs += positions * (inputs * 3 * 64 + 3 * 64 * 64)
        params += 3 * 64
        macs += positions * 32 * (64 + 64 + 64 + 64 + 1)
    tokens, patch = (side // 2) ** 2 + 1, 3 * 3 * 64
    block = 4 * width**2 + width + 2 * width * mlp_dim + mlp_dim + width + 4 * width
    params += (patch + 1) * width + width + depth * block + 2 * width + (width + 1) * 1000
    macs += (tokens - 1) * patch * width + width * 1000
    macs += depth * (tokens * width * (4 * width + 2 * mlp_dim) + 2 * tokens**2 * width)
    return params, macs


def compare(model, variables, arrays, suffix):
    @jax.jit
    def compute(variables, images):
        return {
            "tokens": model.apply(variables, images, method="tokens"),
            "logits": model.apply(variables, images),
        }

    for name, found in compute(variables, arrays[f"image{suffix}"]).items():
        expected = arrays[name + suffix]
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ["t2t_performer", "t2t_transformer"])
def test_goldens_in_and_out(name, golden, tmp_path):
    source = golden / f"{name}.safetensors"
    model, variables = vit_jax.load_pretrained(source)
    with np.load(golden / f"{name}.io.npz") as arrays:
        compare(model, variables, arrays, "")
        if "image_resampled" in arrays:
            compare(*vit_jax.load_pretrained(source, image_size=96), arrays, "_resampled")
    target, spec = tmp_path / source.name, vit_jax.pretrained_spec(source)
    vit_jax.save_pretrained(target, model, variables, "t2t", spec)
    ours, theirs = load_file(target), load_file(source)
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        np.testing.assert_array_equal(ours[key], array, err_msg=key)
    assert vit_jax.read_pretrained(target).model == model
    assert vit_jax.pretrained_spec(target) == spec
    with at_fault("variables"):
        vit_jax.save_pretrained(target, model, {"params": variables["params"]}, "t2t")


def test_a_stated_scale_of_the_logits_and_contradictions(golden, tmp_path):
    name = "t2t_transformer.safetensors"
    shutil.copy(golden / name, tmp_path / name)
    path = tmp_path / "t2t_transformer.json"
    config = json.loads((golden / "t2t_transformer.json").read_text())

    def read(**args):
        path.write_text(json.dumps(config | {"model_args": config["model_args"] | args}))
        return vit_jax.read_pretrained(tmp_path / name).params

    query, key = (f"encoder/layer_1/attention/{part}/kernel" for part in ("query", "key"))
    plain, scaled = read(), read(qk_scale=48**-0.5)  # heads are 16 wide
    np.testing.assert_allclose(scaled[query], plain[query] / 3**0.5, rtol=1e-6)
    np.testing.assert_array_equal(scaled[key], plain[key])
    for args in ({"tokens_type": "performer"}, {"num_heads": 5}):
        with at_fault(*args):
            read(**args)


@pytest.mark.parametrize("split", SPLITS[:2])
def test_soft_splits_by_hand(split):
    size, stride, padding = split
    x = RNG.normal(size=(1, 2 * stride, 3 * stride, 2)).astype(np.float32)
    found = np.asarray(soft_split(jnp.asarray(x), split))
    assert found.shape == (1, 2, 3, 2 * size**2)
    for row, column, channel, i, j in np.ndindex(2, 3, 2, size, size):
        y, z = row * stride - padding + i, column * stride - padding + j
        inside = 0 <= y < x.shape[1] and 0 <= z < x.shape[2]
        expected = x[0, y, z, channel] if inside else 0
        assert found[0, row, column, (channel * size + i) * size + j] == expected


def small_experiment(split):
    """One whose mesh has `split` devices along each of data, fsdp and tensor."""
    c = base_config()
    c.model.name, c.global_batch_size, c.duration = "T2T-ViT-7", 8, "3 steps"
    c.model.update({"width": 16, "depth": 1, "mlp_dim": 16, "num_heads": 2, "token_width": 8})
    c.data.name, c.data.num_classes, c.data.num_examples = "synthetic", 4, 64
    c.data.image_size, c.optimizer.peak_lr, c.optimizer.ema_decay = 32, 0.01, 0.9
    devices = jax.devices()[: split**3]
    mesh = make_mesh(replica=1, data=split, fsdp=split, tensor=split, devices=devices)
    return make_experiment(settings_of(c), mesh), mesh


STATES = ("model_state", "ema_model_state")


def test_constants_are_their_formula_at_the_start_and_after_a_restore_on_another_mesh(tmp_path):
    experiment, mesh = small_experiment(1)
    with jax.set_mesh(mesh):  # the rest of the state is not computed
        start = jax.jit(lambda: {name: getattr(experiment.init(), name) for name in STATES})()
    checkpoints = Checkpoints(epath.Path(tmp_path), keep_last=1, keep_every=None)
    checkpoints.save(1, start, {})
    checkpoints.close()
    other, _ = small_experiment(2)
    wanted = {name: getattr(other.abstract_state, name) for name in STATES}
    restored, _ = restore_newest(epath.Path(tmp_path), wanted)
    table = [
        [(math.cos if i % 2 else math.sin)(n / 10000 ** (i // 2 * 2 / 16)) for i in range(16)]
        for n in range(5)
    ]
    for state in (start, restored):
        for name in STATES:
            found = tree.flatten_names(state[name]["constants"])
            np.testing.assert_allclose(found.pop("pos_embedding")[0], table, atol=1e-6)
            for features in map(np.asarray, found.values()):
                np.testing.assert_allclose(features @ features.T, 4 * np.eye(4), atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, restored, start)


def test_constants_are_state_and_not_trained():
    experiment, mesh = small_experiment(1)
    state = experiment.abstract_state
    for kept in (state.model_state, state.ema_model_state):
        assert {name: leaf.shape for name, leaf in tree.flatten_names(kept).items()} == {
            "constants/pos_embedding": (1, 5, 16),
            "constants/stem/mixer_0/random_features": (4, 8),
            "constants/stem/mixer_1/random_features": (4, 8),
        }
    assert not any(
        "random_features" in n or "pos_emb" in n for n in tree.flatten_names(state.params)
    )
    images = jnp.zeros((2, 32, 32, 3))
    for function in (layer_outputs, attention_weights):
        with jax.set_mesh(mesh):
            found = jax.eval_shape(
                partial(function, experiment.model), state.params, images, state.model_state
            )
        assert len(found) == 1


def test_random_features_are_orthogonal_and_attention_approaches_the_softmax():
    features = _init_features(jax.random.key(0), (32, 64))
    np.testing.assert_allclose(features @ features.T, 32 * np.eye(32), atol=1e-4)
    q, k, v = RNG.normal(size=(3, 1, 5, 4)).astype(np.float32) / 4
    products = jax.make_jaxpr(performer_attention)(q, k, v, features[:, :4]).eqns
    exact = [e.params.get("precision") for e in products if e.primitive.name == "dot_general"]
    assert sum(str(precision).count("HIGHEST") == 2 for precision in exact) == 2  # W q and W k
    many = RNG.normal(size=(200_000, 4)).astype(np.float32)
    weights = np.exp(q[0] @ k[0].T)
    expected = weights @ v[0] / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(performer_attention(q, k, v, many)[0], expected, atol=1e-2)
