"""Every known name of a model: sizes, work, and the way through the step, checkpoints and exports.

Of each family the smallest here, all of them by -m slow. The family in vit_jax/models/FILE.py has
its own tests in test_FILE.py, with the formula `by_hand`: name -> (parameters, multiply-adds).
"""

import functools
import importlib
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from at_fault import at_fault
from etils import epath
from numpy_vit import random_params, random_variables
from read_settings import make_optimizer, settings_of

import vit_jax
from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.checkpoints import checkpoint, restore
from vit_jax.config import FAMILIES, base_config
from vit_jax.devices.flops import forward_macs
from vit_jax.devices.mesh import make_mesh
from vit_jax.experiment.experiment import make_experiment
from vit_jax.experiment.state import TrainState
from vit_jax.models import create_model, fields_of, find_family, known_names, token_stride
from vit_jax.models.contract import about, field_names
from vit_jax.transfer import init_variables
from vit_jax.transfer.export import export
from vit_jax.transfer.fit import stack_layers
from vit_jax.transfer.pretrained import Pretrained, Spec
from vit_jax.transfer.shapes import abstract_model_state, abstract_params

NAMES = known_names()
SMALLEST = tuple(FAMILIES.find(start).names[0] for start in FAMILIES)

_SIZES = pathlib.Path(__file__).with_name("published_sizes.txt").read_text().splitlines()
PUBLISHED = dict(line.split(maxsplit=1) for line in _SIZES if not line.startswith("#"))
TINY = {"width_factor": 0.125, "depth_factor": 0.1}  # of EfficientNets
slow = pytest.mark.slow


def each(*quick, names=NAMES):
    marks = {name: () if name in quick else slow for name in names}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=m) for n, m in marks.items()])


def shrunk(name, **fields):
    """The model called `name`, with few layers and channels, for images of 2 x 3 tokens."""
    small = {"width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 2, "stem_width": 32,
             "token_width": 8}  # fmt: skip
    small |= TINY
    module = find_family(name)
    small = {field: size for field, size in small.items() if field in field_names(module)}
    if "stages" in field_names(module) and not name.startswith("R+"):
        small["stages"] = (1, 2)
    height, width = token_stride(name) if "stages" not in small else (32, 32)
    return create_model(name, 5, (2 * height, 3 * width), **small, **fields)


def images_for(model):
    size = (2, *model.image_size, 3)
    return np.random.default_rng(0).uniform(-1, 1, size).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, variables, images):
    return model.apply(variables, images)


def by_hand(name):
    """(parameters, multiply-adds) by the formula beside the tests of its family."""
    file = find_family(name).__module__.rpartition(".")[2]
    return importlib.import_module(f"test_{file}").by_hand(name)


@each(*SMALLEST, "ViT-B/16", "ViT-H/14")
def test_parameters_and_multiply_adds(name):
    model = create_model(name)
    if "scan" in field_names(type(model)):
        model = model.clone(scan=True)
    params, macs = by_hand(name)
    assert sum(leaf.size for leaf in abstract_params(model).values()) == params
    assert forward_macs(model) == macs


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_formulas_give_what_is_published(name):
    (params, macs), (published, gmacs) = by_hand(name), PUBLISHED[name].split()
    assert f"{params:,}" == published
    assert gmacs == "-" or macs / 1e9 == pytest.approx(float(gmacs), rel=0.004)


def test_a_family_without_known_names_does_not_hide_a_wrong_name(monkeypatch):
    monkeypatch.setitem(FAMILIES, "Plain", type("Plain", (nn.Module,), {}))
    with at_fault("name"):
        find_family("VT-B/16")


def config_for(name, **model):
    c = base_config()
    c.model.name, c.global_batch_size, c.duration = name, 16, "2 steps"
    c.data.name, c.data.num_classes, c.data.num_examples = "synthetic", 8, 64
    c.data.image_size = tuple(2 * side for side in token_stride(name))
    c.optimizer.name, c.optimizer.peak_lr, c.optimizer.grad_clip_norm = "sgd", 0.1, 1.0
    c.optimizer.layer_decay = 0.9
    c.model.update(model)
    if "scan" in fields_of(name):
        c.model.scan = True
    return c


@each("T2T-ViT-7", "Axial-ViT-B/32", "ViTC-1GF")  # for others test_resnet_sharding.py
def test_a_step_is_traced_on_a_mesh(name, caplog):
    mesh = make_mesh(replica=1, data=2, fsdp=2, tensor=2)
    few = {"BiT": {"stages": (1, 2)}, "EfficientNet": TINY}.get(name.partition("-")[0], {})
    experiment = make_experiment(settings_of(config_for(name, dtype="bfloat16", **few)), mesh)
    with jax.set_mesh(mesh):
        state, _ = experiment.trace().out_info
    assert state.step.shape == ()
    assert [r for r in caplog.records if "replicated over" in r.getMessage()] == []


@each(
    "R+ViT-Ti/16",
    "Axial-ViT-B/32",
    "BiT-R50x1",
    names=[n for n in NAMES if "scan" in fields_of(n)],
)
def test_scanned_is_unrolled(name):
    model = shrunk(name)
    images = images_for(model)
    variables = random_variables(model, images)
    expected = logits_of(model, variables, images)
    scanned = model.clone(scan=True)
    if about(scanned).stacks_layers:
        variables |= {"params": stack_layers(variables["params"])}
    found = logits_of(scanned, variables, images)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@each()
def test_save_and_restore(name, tmp_path):
    model = shrunk(name)
    model_state = jax.tree.map(jnp.asarray, random_variables(model, images_for(model)))
    params = model_state.pop("params")
    state = TrainState(
        jnp.int32(3), params, model_state, optax.scale_by_adam().init(params),
        params, model_state,
    )  # fmt: skip
    folder = epath.Path(tmp_path / "checkpoints")
    checkpoints = checkpoint.Checkpoints(folder, keep_last=2, keep_every=None)
    checkpoints.save(3, state, {})
    checkpoints.close()
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restored, _ = restore.restore_newest(folder, target)
    jax.tree.map(np.testing.assert_array_equal, restored, state)


# Of others' formats; a family that is not here has none.
FORMATS = {
    "ViT": ("npz", "npz_v2", "hf", "timm"),
    "DeiT": ("hf", "timm"),
    "T2T": ("t2t",),
    "R+ViT": ("npz",),
    "BiT": ("npz",),
    "EfficientNet": ("timm",),
}


@each("DeiT-Ti/16")
def test_export(name, tmp_path):
    family = next(key for key in FAMILIES if FAMILIES.find(key) is find_family(name))
    model = shrunk(name, **({"gelu": "exact", "hidden_head": False} if family == "DeiT" else {}))
    # 22B: none.
    formats = () if family == "ViT" and model.parallel else FORMATS.get(family, ())
    expected = random_variables(model, images_for(model))
    params, state = expected["params"], {k: v for k, v in expected.items() if k != "params"}
    pretrained = Pretrained(
        "here", model, tree.flatten_names(params), Spec(model.image_size, "x"), None,
        tree.flatten_names(state),
    )  # fmt: skip
    others = " or ".join([*formats, "stablehlo"])
    for format in ("npz", "npz_v2", "hf", "timm", "t2t"):
        output = tmp_path / {"npz": "model.npz", "npz_v2": "v2.npz"}.get(format, format)
        if format not in formats:
            with pytest.raises(InputError, match=f"this model; export it as {others}: "):
                export(pretrained, output, format)
            continue
        assert export(pretrained, output, format)["read_back"]["largest_logit_difference"] < 1e-5
        loaded, variables = vit_jax.load_pretrained(output)
        assert (type(loaded), loaded.image_size) == (type(model), model.image_size)
        if format != "npz_v2":  # it holds the sum of the class token and its position
            jax.tree.map(np.testing.assert_array_equal, variables, expected)


@each("BiT-R50x1", names=("R+ViT-Ti/16", "BiT-R50x1"))
def test_export_as_a_program(name, tmp_path):
    size = (64, 64) if name.startswith("R+") else (32, 32)
    model = shrunk(name).clone(image_size=size)
    params = tree.flatten_names(random_params(model, images_for(model)))
    pretrained = Pretrained("here", model, params, Spec(size, "antialiased"))
    receipt = export(pretrained, tmp_path / "model.stablehlo", "stablehlo")
    assert receipt["read_back"]["largest_logit_difference"] < 1e-5
    card = (tmp_path / "model.stablehlo.md").read_text()
    assert "stem_width 32, " in card and ("stages (1, 2)" in card) == (name == "BiT-R50x1")


# Of each family its smallest, and a ViT with all that a ViT may have.
SWITCHES = {"registers": 2, "pool": "map", "hidden_head": True, "layer_scale": 0.1,
            "qk_norm": True, "gated_mlp": True, "mlp_norm": True, "pre_norm": True,
            "pos_embed": "learned_2d", "lora_rank": 2}  # fmt: skip


def decay_and_rate(params):
    """{leaf: (weight decay, learning rate / that of the head)}, with every key that sets them."""
    tx = make_optimizer("sgd", schedule=lambda step: 1.0, momentum=0.0, weight_decay=2.0**-10,
                        layer_decay=0.5, embedding_rate=0.75, head_decay=2.0)  # fmt: skip
    ones = tree.unflatten_names({name: np.ones((1,) * leaf.ndim, np.float32)
                                 for name, leaf in params.items()})  # fmt: skip
    state = tx.init(ones)
    zeros = jax.tree.map(np.zeros_like, ones)
    decays, rates = (
        tree.flatten_names(tx.update(grads, state, ones)[0]) for grads in (zeros, ones)
    )
    found = {}
    for name in params:
        decay, rate = (-x[name].item() for x in (decays, rates))
        found[name] = decay / (rate - decay), rate - decay
    return found


@functools.cache
def rates_by_name(name):
    if name != "ViT with all":
        return decay_and_rate(abstract_params(shrunk(name)))
    return decay_and_rate(abstract_params(shrunk("ViT-Ti/16", **SWITCHES)))


LEAVES = pathlib.Path(__file__).with_name("decays_and_rates.txt")


@pytest.mark.parametrize("name", [*SMALLEST, "ViT with all"])
def test_every_leaf_has_its_decay_and_rate(name):
    """As in decays_and_rates.txt: layer decay 0.5, patch embedding 0.75, decay of the head 2."""
    _, _, rest = LEAVES.read_text().partition(f"\n{name}\n")
    expected = dict(line.split(maxsplit=1) for line in rest.partition("\n\n")[0].splitlines())
    found = {leaf: f"{decay * 2**10:g} {rate:g}"
             for leaf, (decay, rate) in rates_by_name(name).items()}  # fmt: skip
    assert found == expected


@pytest.mark.parametrize("name", SMALLEST)
def test_every_leaf_that_is_not_loaded_has_the_rate_of_the_head(name):
    model = shrunk(name)
    params, state = (
        {leaf: np.zeros(x.shape, np.float32) for leaf, x in shapes(model).items()}
        for shapes in (abstract_params, abstract_model_state)
    )
    source = Pretrained("here", model, params, Spec(model.image_size, "x"), None, state)
    loaded, loaded_state = init_variables(source, model.clone(num_classes=7))
    new = params.keys() - loaded.keys()
    assert "head/kernel" in new and loaded_state.keys() == state.keys()
    rates = rates_by_name(name)
    assert {leaf: rates[leaf][1] for leaf in new} == dict.fromkeys(new, 1.0)


def initial(name, wanted, **fields):
    """The leaves that the regex `wanted` matches, at the start; no others are computed."""
    model = shrunk(name, **fields)

    def init():
        images = jnp.zeros((1, *model.image_size, 3))
        named = tree.flatten_names(model.init(jax.random.key(0), images)["params"])
        return {leaf: x for leaf, x in named.items() if re.fullmatch(wanted, leaf)}

    return jax.jit(init)()


INITIAL = {
    "head_bias": "head(_distillation)?/bias",
    "layer_scale": r".*/scale_(attention|mlp)/scale",
}


@pytest.mark.parametrize("name", SMALLEST)
def test_two_values_of_a_field_start_two_models(name):
    """The seed's is in experiment/test_experiment.py."""
    patterns = {field: p for field, p in INITIAL.items() if field in fields_of(name)}
    for value in (0.25, 3.0) if name.startswith("ViT-") else (3.0,):
        found = initial(name, "|".join(patterns.values()), **dict.fromkeys(patterns, value))
        for pattern in patterns.values():
            assert any(re.fullmatch(pattern, leaf) for leaf in found)
        for leaf, x in found.items():
            np.testing.assert_array_equal(x, value, err_msg=leaf)


@each("DeiT-Ti/16", "EfficientNet-B0", names=SMALLEST)
def test_flax_tabulates_every_family(name):
    few = {"BiT": {"stages": (1,)}, "EfficientNet": TINY}.get(name.partition("-")[0], {"depth": 1})
    model = create_model(name, 10, 32, **few)
    images = jnp.zeros((1, 32, 32, 3))
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    count = sum(leaf.size for leaf in jax.tree.leaves(dict(shapes)))
    plain = {"console_kwargs": {"no_color": True, "width": 200}}
    said = f"{count:,}" if len(shapes) > 1 else f"Total Parameters: {count:,}"
    assert said in model.tabulate(jax.random.key(0), images, **plain)
    assert f"{count:,}" in nn.tabulate(model, jax.random.key(0), **plain)(images)
