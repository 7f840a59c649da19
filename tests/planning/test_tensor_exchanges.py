"""What models exchange over `tensor`, counted by hand and compiled; calculated plans."""

import collections
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from opened import with_known_facts
from read_settings import make_loss, settings_of

from vit_jax.base.errors import InputError
from vit_jax.config import OBJECTIVES, base_config
from vit_jax.devices.chips import find_slice
from vit_jax.devices.mesh import make_mesh
from vit_jax.devices.sharding import constrain, state_shardings
from vit_jax.experiment.state import TrainState
from vit_jax.models import create_model
from vit_jax.models.contract import about
from vit_jax.models.resnet import BIT, HYBRID, Bottleneck
from vit_jax.objectives.contract import RunFacts, TokenPass
from vit_jax.planning.calculated import calculate_plan
from vit_jax.planning.exchanges import collective_table
from vit_jax.planning.hlo import Program
from vit_jax.planning.targets import Target, describe_devices, plan_mesh
from vit_jax.run.teachers import planned_experiment

# An image of 32 x 64 pixels; after the root, of 32 channels, a map of 8 x 16; two units of 32 and
# 128 channels, then one of half the resolution and twice the width.
POSITIONS = 8 * 16
UNITS = [  # positions and channels in, positions out, channels within
    (POSITIONS, 32, POSITIONS, 32),
    (POSITIONS, 128, POSITIONS, 32),
    (POSITIONS, 128, POSITIONS // 4, 64),
]


def make(name, remat="none", **fields):
    fields |= {"remat": remat, "stages": (2, 1), "stem_width": 32, "dtype": jnp.bfloat16}
    return create_model(name, 10, (32, 64), **fields)


def inputs(unit):
    return unit[0] * unit[1]


def output(unit):
    return unit[2] * 4 * unit[3]


TENSOR = 2


def compiled_exchanges(convention, sizes, *, backward):
    """{kind: (count, numbers)} of one compiled unit, without what is as small as statistics."""
    positions_in, width_in, positions_out, width = sizes
    mesh = make_mesh(
        replica=1, data=1, fsdp=1, tensor=TENSOR, devices=jax.devices()[:TENSOR]
    )  # fmt: skip
    stride = 1 if positions_in == positions_out else 2
    x = jax.ShapeDtypeStruct((1, 8, positions_in // 8, width_in), jnp.float32)
    plain = Bottleneck(convention, width, stride)
    shapes = jax.eval_shape(plain.init, jax.random.key(0), x)["params"]
    model = plain.clone(constrain=constrain)

    def apply(params, x):
        return model.apply({"params": params}, constrain(x, ("batch", None, None, None)))

    def loss(params, x):
        return (apply(params, x) ** 2).sum()

    found = collections.Counter()
    with jax.set_mesh(mesh):
        shardings = state_shardings(shapes, mesh)
        whole = NamedSharding(mesh, PartitionSpec())
        step = jax.jit(apply, in_shardings=(shardings, whole), out_shardings=whole)
        if backward:
            step = jax.jit(
                jax.grad(loss, (0, 1)),
                in_shardings=(shardings, whole),
                out_shardings=(shardings, whole),
            )
        for each in Program(step.lower(shapes, x).compile().as_text()).collectives():
            if each.size // 4 > 16 * width:
                found[each.kind, "count"] += each.count
                found[each.kind, "numbers"] += each.count * each.size // 4
    return found


@pytest.mark.parametrize(
    ("convention", "sizes"),
    [(BIT, (512, 32, 512, 32)), (HYBRID, (512, 128, 128, 64))],
)
def test_exchanges_are_those_of_a_compiled_unit(convention, sizes):
    stages = (1,) if sizes[0] == sizes[2] else (1, 1)
    unit = create_model("BiT-R50x1", 10, (32, 256), stages=stages, stem_width=32).split_units()[-1]
    (output,), (inner, before) = unit.reduced, unit.reduced_back
    forward, both = (compiled_exchanges(convention, sizes, backward=b) for b in (False, True))
    assert forward == {
        ("all-reduce", "count"): 1, ("all-reduce", "numbers"): output,
        ("all-gather", "count"): 1, ("all-gather", "numbers"): inner,
    }  # fmt: skip
    assert both["all-gather", "count"] == 1
    assert both["all-gather", "numbers"] == inner
    # With the gradients of some norms.
    reduced = both["all-reduce", "numbers"] - output - before - inner
    assert both["all-reduce", "count"] == 3
    assert 0 <= reduced < 0.05 * before


def sums_of(model, tokens=None):
    """Arrays and values that the forward pass sums, those of the backward pass, and gathered."""
    layers = about(model).split_layers(tokens)
    groups = ([array for each in layers for array in each[i]] for i in (2, 3, 4))
    return [(len(arrays), sum(arrays)) for arrays in groups]


def test_exchanges_over_the_tensor_axis():
    inner, reduced = sum(unit[0] * unit[3] for unit in UNITS), sum(map(output, UNITS))
    backward = inner + sum(map(inputs, UNITS))
    bit, hybrid = make("BiT-R50x1"), make("R26+ViT-mu/16")
    assert sums_of(bit) == [(3, reduced), (6, backward), (3, inner)]
    of_blocks = 2 * (1 + 4 * 8) * 32  # both sums of its one block of tokens of width 32
    found = sums_of(hybrid)
    assert found == [(3 + 2, reduced + of_blocks), (6 + 2, backward + of_blocks), (3, inner)]
    assert sums_of(create_model("ViT-mu/8", 10, (32, 64))) == [(2, of_blocks)] * 2 + [(0, 0)]


@pytest.mark.parametrize(
    ("model", "parts", "recomputed"),
    [
        (create_model("ViT-mu/8", 10, 32, depth=3, remat="full", remat_layers=1), [1, 2, 3], 1),
        (create_model("ViT-mu/8", 10, 32, depth=2, remat="dots"), [1, 2], 2),
        (make("BiT-R50x1"), [1, 2, 3], 0),
        (make("BiT-R50x1", "dots"), [1, 2, 3], 3),
        (make("R26+ViT-mu/16", "full"), [0, 0, 0, 1], 4),
    ],
)
def test_parts_of_a_model_and_what_is_computed_again(model, parts, recomputed):
    layers = model.split_layers()
    assert [layer.part for layer in layers] == parts
    again = [layer.recomputed for layer in layers]
    assert again == [True] * recomputed + [False] * (len(layers) - recomputed)


def test_exchanges_of_an_efficientnet_and_of_axial_blocks():
    """Inputs and outputs of an EfficientNet's blocks; both halves of an axial one."""
    model = create_model("EfficientNet-B0", 10, 32, width_factor=0.125, depth_factor=0.1)
    # Positions before and after, channels before and after.
    blocks = [(256, 256, 8, 8), (256, 64, 8, 8), (64, 16, 8, 8), (16, 4, 8, 16),
              (4, 4, 16, 16), (4, 1, 16, 24), (1, 1, 24, 40)]  # fmt: skip
    outputs = sum(after * width for _, after, _, width in blocks)
    inputs = sum(before * width for before, _, width, _ in blocks)
    assert sums_of(model) == [(7, outputs), (7, inputs), (0, 0)]
    axial = create_model("Axial-ViT-mu/8", 10, (32, 64))
    assert sums_of(axial) == [(4, 4 * 32 * 32)] * 2 + [(0, 0)]


def objective_of(name, model, shapes=None, **keys):
    durations = {"objective.temperature_warmup": 0, "objective.freeze_prototypes": 0}
    setting = RunFacts((), (), shapes=shapes or {}, durations=durations)
    return OBJECTIVES.make({"name": name, **keys}).bind(model, make_loss("softmax"), setting)


def test_views_pass_once_each():
    model = create_model("ViT-mu/8", None, (32, 32))
    shapes = {"global_views": (4, 2, 32, 32, 3), "local_views": (4, 5, 16, 16, 3)}
    own = {"num_prototypes": 24, "head_width": 16, "bottleneck": 8}
    dino = objective_of("self_distillation", model, shapes, **own)
    assert [(each.images, each.learns) for each in dino.passes] == [
        (2, True), (2, False), (5, True),
    ]  # fmt: skip
    assert objective_of("supervised", model).passes == ()


def test_masked_autoencoders_by_their_tokens():
    """An encoder of 8 visible patches, a decoder of all 32, each as a ViT of so many patches."""
    model = create_model("ViT-mu/8", 10, (32, 64))
    sizes = {"width": 16, "depth": 3, "num_heads": 4, "mlp_dim": 48}
    keys = {f"decoder_{key.removeprefix('num_')}": size for key, size in sizes.items()}
    twins = (
        create_model("ViT-mu/8", 10, (16, 32)),
        create_model("ViT-mu/8", 10, (32, 64), **sizes),
    )
    passes = objective_of("mae", model, mask_ratio=0.75, **keys).passes
    for own, twin in zip(passes, twins, strict=True):
        assert sums_of(own.model, own.tokens) == sums_of(twin)
    assert {layer.part for layer in passes[1].model.split_layers()} == {None}


def test_of_other_families_it_is_unknown():
    class Other(nn.Module):
        num_classes: int | None
        image_size: tuple[int, int]

    model = Other(10, (32, 64))
    experiment = types.SimpleNamespace(
        model=model,
        objective=objective_of("supervised", model),
        abstract_state=TrainState(0, {}, {}, {}, ema={}),
        abstract_frozen=(),
        freeze=None,
        parts=types.SimpleNamespace(join=None),
        num_gradients=1,
        passes=(TokenPass(model),),
    )
    target = Target(find_slice("H100:8"))
    with pytest.raises(InputError, match=r"model Other: .*mesh.tensor=1"):
        collective_table(
            experiment, {"replica": 1, "data": 4, "fsdp": 1, "tensor": 2}, target, 1, 1
        )


@pytest.mark.slow
def test_a_calculated_plan():
    c = base_config()
    c.model.name, c.model.stages, c.model.stem_width = "R26+ViT-mu/16", (1,), 32
    c.data.name, c.data.image_size, c.data.ops = "imagenet2012", 32, "flip"
    c.global_batch_size, c.duration, c.optimizer.peak_lr = 64, "100 steps", 1e-3
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor = 2, 2, 2
    figures = calculate_plan(settings_of(with_known_facts(c)), Target(find_slice("H100:8")))
    flops = figures["flops"]
    assert flops["model_per_image_by_sizes"] is None
    # The gradient by the pixels is not asked for.
    forward = 2 * flops["forward_macs_per_image"]
    root = 2 * 16 * 16 * 7 * 7 * 3 * 32
    assert flops["model_per_image_by_jaxpr"] == 3 * forward - root
    assert ("all-gather", ["tensor"]) in [(r["kind"], r["axes"]) for r in figures["collectives"]]
    assert jax.tree.all(jax.tree.map(lambda size: size >= 0, figures["memory_bytes"]))


def test_exchanges_are_those_of_the_objective():
    """Of both encoders of MAE."""
    c = base_config()
    c.model.name, c.objective.name = "ViT-mu/8", "mae"
    c.objective.update({"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2})
    c.data.name, c.data.image_size, c.data.ops = "imagenet2012", 32, "flip"
    c.global_batch_size, c.duration, c.optimizer.peak_lr = 64, "100 steps", 1e-3
    c.mesh.data, c.mesh.tensor = 4, 2
    config, target = with_known_facts(c), Target(find_slice("H100:8"))
    mesh = plan_mesh(settings_of(config), target, describe_devices(target))
    table = collective_table(
        planned_experiment(settings_of(config), mesh), mesh.shape, target, 16, 1
    )
    # 5 and 17 tokens of 4 bytes, with two sums each of the forward and of the backward pass.
    (sums,) = [row for row in table if row["axes"] == ["tensor"]]
    assert (sums["count"], sums["bytes"]) == (8, 16 * 4 * (5 * 32 + 17 * 16) * 4)


@pytest.mark.parametrize("name", ["BiT-R50x1", "R26+ViT-mu/16"])
def test_scanned_units_are_gathered_again(name):
    """Compiled for eight devices with fsdp, each of the two loops gathers the kernels of a unit."""
    model = create_model(name, 10, 32, stages=(4, 2), stem_width=32, scan=True)
    units = ["stage_0/layer_0", "stage_0/layer_1", "stage_0/layer_3", "stage_1/layer_1"]
    stem = "trunk" if name.startswith("BiT") else "stem"
    found = [model.reads_again(f"{stem}/{unit}/conv2/kernel") for unit in units]
    assert found == [False, True, True, False]
