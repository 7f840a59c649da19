"""A frozen image tower, and layer decay and adapters of the text tower."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from finished_run import final_state
from read_settings import settings_of
from shipped_forms import without_files

import vit_jax
from vit_jax.base import tree
from vit_jax.devices.flops import program_flops
from vit_jax.devices.mesh import make_mesh
from vit_jax.experiment.optimizers.layers import scale_layers
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.contract import with_known
from vit_jax.run.teachers import planned_experiment
from vit_jax.transfer import read_pretrained

pytestmark = pytest.mark.usefixtures("one_device")


def test_no_gradient_of_a_frozen_tower_is_computed():
    flops = {}
    for freeze in ("(?!objective/).*", None):
        config = without_files("lit", "debug")
        config.optimizer.freeze = freeze
        mesh = make_mesh(replica=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
        made = planned_experiment(settings_of(config), mesh)
        flops[freeze] = made.flops_per_image
    model, size = with_known(made.model, ops=PLAIN, constrain=unconstrained), made.model.image_size
    images = jnp.zeros((1, *size, 3))
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    apply = lambda variables: model.apply(variables, images, method="features")  # noqa: E731
    forward = program_flops(jax.make_jaxpr(apply)(variables).jaxpr)
    embedding = 2 * math.prod(model.grid) * math.prod(model.patch_size) * 3 * model.width
    backward = 2 * forward - embedding  # no gradient of the pixels
    assert flops[None] - flops["(?!objective/).*"] == backward


PARAMS = {
    "embedding": {"kernel": jnp.ones(2)},
    "encoder": {"layer_0": {"x": jnp.ones(2)}},
    "objective": {
        "logit_scale": jnp.ones(()),
        "text": {
            "token_embedding": {"embedding": jnp.ones(2)}, "pos_embedding": jnp.ones(2),
            "encoder": {"layers": {"x": jnp.ones((2, 3))}, "norm": {"scale": jnp.ones(2)}},
            "head": {"kernel": jnp.ones(2)},
        },
    },
}  # fmt: skip


def test_layers_of_the_text_tower_have_rates_of_their_own():
    tx = scale_layers(0.5, of_texts=True)
    found, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    text = found["objective"]["text"]
    assert text["head"]["kernel"].max() == text["encoder"]["norm"]["scale"].max() == 1
    np.testing.assert_array_equal(text["encoder"]["layers"]["x"], [[0.25] * 3, [0.5] * 3])
    assert text["token_embedding"]["embedding"].max() == text["pos_embedding"].max() == 0.125
    for name, leaf in tree.flatten_names(found).items():
        assert name.startswith("objective/text/") or leaf.min() == 1, name
    with at_fault("optimizer.text_layer_decay"):
        tx.init({"encoder": PARAMS["encoder"]})


ADAPTED = {
    "model.lora_rank": 2, "objective.text_lora_rank": 2, "evals": {}, "model.scan": True,
    "optimizer.freeze": "(?!objective/|.*/lora_).*|objective/text/(?!head|.*/lora_).*",
    "optimizer.name": "adamw", "optimizer.peak_lr": 0.05, "duration": "8 steps",
}  # fmt: skip


@pytest.mark.slow
def test_adapters_of_both_towers_are_merged_when_a_run_is_read(tmp_path):
    source = tmp_path / "first"
    plain = {"evals": {}, "model.scan": True, "duration": "8 steps", "optimizer.freeze": None}
    vit_jax.train("lit:debug", source, plain)
    before = final_state(source)[1]
    vit_jax.train("lit:debug", tmp_path / "adapted", ADAPTED | {"init_from": str(source)})
    after = final_state(tmp_path / "adapted")[1]
    changed = {name for name, leaf in before.items() if name.startswith("params/")
               and not np.array_equal(leaf, after[name])}  # fmt: skip
    assert changed == {f"params/objective/{name}" for name in
                       ("logit_scale", "text/head/bias", "text/head/kernel")}  # fmt: skip
    side = read_pretrained(tmp_path / "adapted").read_text_side()
    first = read_pretrained(source).read_text_side()
    assert {*side.params} == {*first.params} and side.matcher.text.lora_rank is None
    for layer in ("query", "value", "key"):
        name = f"text/encoder/layer_0/attention/{layer}/kernel"
        stacked = f"params/objective/text/encoder/layers/attention/{layer}"
        update = side.params[name] - first.params[name]
        if layer == "key":
            assert not update.any()
            continue
        expected = after[f"{stacked}/lora_a"][0] @ after[f"{stacked}/lora_b"][0]
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(update, expected, atol=1e-6)
