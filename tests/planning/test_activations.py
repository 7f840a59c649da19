"""What is kept and exchanged of a ResNet's activations, counted by hand."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from opened import with_known_facts

from vit_jax import tree
from vit_jax.config import base_config
from vit_jax.devices.chips import find_slice
from vit_jax.devices.mesh import make_mesh
from vit_jax.devices.sharding import constrain, state_shardings
from vit_jax.errors import InputError
from vit_jax.models import create_model
from vit_jax.models.bit import PreActBottleneck
from vit_jax.models.hybrid import Bottleneck
from vit_jax.models.vit import ViT
from vit_jax.objectives import make_objective
from vit_jax.objectives.contract import RunFacts, TokenPass
from vit_jax.objectives.supervised import make_loss
from vit_jax.planning.activations import (
    Unit,
    activation_bytes,
    passes_of,
    resnet_units,
    step_activation_bytes,
    tensor_exchanges,
)
from vit_jax.planning.calculated import (
    _is_gathered_again,
    calculate_memory,
    calculate_plan,
    collective_table,
)
from vit_jax.planning.hlo import Program
from vit_jax.planning.targets import Target, describe_devices, plan_mesh
from vit_jax.run.teachers import planned_experiment
from vit_jax.transfer.shapes import abstract_params

# An image of 32 x 64 pixels; after the root, of 32 channels, a map of 8 x 16; two units of 32 and
# 128 channels, then one of half the resolution and twice the width.
PIXELS, POSITIONS = 32 * 64, 8 * 16
UNITS = [  # positions and channels in, positions out, channels within
    (POSITIONS, 32, POSITIONS, 32),
    (POSITIONS, 128, POSITIONS, 32),
    (POSITIONS, 128, POSITIONS // 4, 64),
]
PROJECTED = [True, False, True]
ROOT = 3 * PIXELS + 32 * PIXELS // 4


def make(name, remat="none", **fields):
    fields |= {"remat": remat, "stages": (2, 1), "stem_width": 32, "dtype": jnp.bfloat16}
    return create_model(name, 10, (32, 64), **fields)


def inputs(unit):
    return unit[0] * unit[1]


def middle(unit):
    return (unit[0] + unit[2]) * unit[3]


def output(unit):
    return unit[2] * 4 * unit[3]


def test_units():
    found = [
        (unit.positions_in, unit.width_in, unit.positions_out, unit.width)
        for unit in resnet_units(make("BiT-R50x1"))
    ]
    assert found == UNITS
    assert [unit.has_projection for unit in resnet_units(make("BiT-R50x1"))] == PROJECTED


def test_activations_of_a_bit():
    # Of a unit without remat its input and that normalised, and two convolutions' outputs, each
    # normalised too; in the end the last map and that normalised. Two bytes each.
    whole = [2 * inputs(unit) + 2 * middle(unit) for unit in UNITS]
    ends = ROOT + 2 * output(UNITS[-1])
    assert activation_bytes(make("BiT-R50x1")) == 2 * (ends + sum(whole))
    kept = sum(map(inputs, UNITS))
    assert activation_bytes(make("BiT-R50x1", "full")) == 2 * (ends + kept + max(whole))


def test_activations_of_a_hybrid():
    of_vit = activation_bytes(create_model("ViT-mu/8", 10, (32, 64), dtype=jnp.bfloat16))
    model = make("R26+ViT-mu/16")  # on a map of stride 8: as many tokens
    # Of a unit without remat its input, and what its convolutions give, two of them normalised;
    # in the end the last map, which is embedded.
    whole = [
        inputs(unit) + 2 * middle(unit) + output(unit) * (1 + projected)
        for unit, projected in zip(UNITS, PROJECTED, strict=True)
    ]
    root = ROOT + 32 * PIXELS // 4  # and normalised
    last = output(UNITS[-1])
    assert activation_bytes(model) - of_vit == 2 * (root + sum(whole) + last)
    of_vit = activation_bytes(create_model("ViT-mu/32", 10, (32, 64), dtype=jnp.bfloat16))
    model = create_model("R+ViT-mu/16", 10, (32, 64), stem_width=32, dtype=jnp.bfloat16)
    assert activation_bytes(model) - of_vit == 2 * (root + 32 * POSITIONS)


def test_dots_keeps_what_convolutions_give():
    kept = [
        inputs(unit) + middle(unit) + output(unit) * (1 + projected)
        for unit, projected in zip(UNITS, PROJECTED, strict=True)
    ]
    again = max(2 * inputs(unit) + 2 * middle(unit) for unit in UNITS)
    ends = ROOT + 2 * output(UNITS[-1])
    assert activation_bytes(make("BiT-R50x1", "dots")) == 2 * (ends + sum(kept) + again)
    blocks = create_model("ViT-mu/8", 10, (32, 64), dtype=jnp.bfloat16, remat="dots")
    again = max(k + middle(unit) for k, unit in zip(kept, UNITS, strict=True))
    ends = ROOT + 32 * PIXELS // 4 + output(UNITS[-1])
    found = activation_bytes(make("R26+ViT-mu/16", "dots")) - activation_bytes(blocks)
    assert found == 2 * (ends + sum(kept) + again)


TENSOR = 2


def compiled_exchanges(unit_of, sizes, *, backward):
    """{kind: (count, numbers)} of one compiled unit, without what is as small as statistics."""
    positions_in, width_in, positions_out, width = sizes
    mesh = make_mesh(
        replica=1, data=1, fsdp=1, tensor=TENSOR, devices=jax.devices()[:TENSOR]
    )  # fmt: skip
    stride = 1 if positions_in == positions_out else 2
    x = jax.ShapeDtypeStruct((1, 8, positions_in // 8, width_in), jnp.float32)
    plain = unit_of(width, stride)
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
    ("unit_of", "sizes"),
    [(PreActBottleneck, (512, 64, 512, 32)), (Bottleneck, (512, 128, 128, 64))],
)
def test_exchanges_are_those_of_a_compiled_unit(unit_of, sizes):
    unit = Unit(sizes[0], sizes[2], sizes[1], sizes[3])
    forward, both = (compiled_exchanges(unit_of, sizes, backward=b) for b in (False, True))
    inner = unit.positions_in * unit.width
    assert forward == {
        ("all-reduce", "count"): 1, ("all-reduce", "numbers"): unit.output,
        ("all-gather", "count"): 1, ("all-gather", "numbers"): inner,
    }  # fmt: skip
    assert both["all-gather", "count"] == 1
    assert both["all-gather", "numbers"] == inner
    # With the gradients of some norms.
    reduced = both["all-reduce", "numbers"] - unit.output - unit.input - inner
    assert both["all-reduce", "count"] == 3
    assert 0 <= reduced < 0.05 * unit.input


def test_exchanges_over_the_tensor_axis():
    inner, reduced = sum(unit[0] * unit[3] for unit in UNITS), sum(map(output, UNITS))
    backward = inner + sum(map(inputs, UNITS))
    bit, hybrid = make("BiT-R50x1"), make("R26+ViT-mu/16")
    assert tensor_exchanges(bit) == {"all-reduce": (3, 2 * reduced), "all-gather": (3, 2 * inner)}
    found = tensor_exchanges(bit, backward=True)
    assert found == {"all-reduce": (6, 2 * backward), "all-gather": (0, 0)}
    of_blocks = 2 * (1 + 4 * 8) * 32  # both sums of its one block of tokens of width 32
    found = tensor_exchanges(hybrid)
    assert found["all-gather"] == (3, 2 * inner)
    assert found["all-reduce"] == (3 + 2, 2 * (reduced + of_blocks))
    found = tensor_exchanges(hybrid, backward=True)
    assert found["all-reduce"] == (6 + 2, 2 * (backward + of_blocks))
    vit = create_model("ViT-mu/8", 10, (32, 64))
    for pass_ in ({}, {"backward": True}):
        expected = {"all-reduce": (2, 4 * of_blocks), "all-gather": (0, 0)}
        assert tensor_exchanges(vit, **pass_) == expected
    none = {"all-reduce": (0, 0), "all-gather": (0, 0)}
    assert tensor_exchanges(vit, again=True) == none
    again = vit.clone(depth=3, remat="full", remat_layers=1)
    assert tensor_exchanges(again, again=True) == expected
    assert tensor_exchanges(make("BiT-R50x1"), again=True) == none
    assert tensor_exchanges(make("BiT-R50x1", "dots"), again=True) == tensor_exchanges(bit)


def test_blocks_of_an_efficientnet_by_hand():
    """Inputs, outputs of the convolutions, inputs of convolutions and norms; image 32 x 32."""
    tiny = {"width_factor": 0.125, "depth_factor": 0.1, "dtype": jnp.bfloat16}
    model = create_model("EfficientNet-B0", 10, 32, **tiny)
    ends = 3 * 32**2 + 16**2 * 8 + 40 + 2 * 160
    # Positions before and after, channels before, inside and after.
    blocks = [(256, 256, 8, 8, 8), (256, 64, 8, 48, 8), (64, 16, 8, 48, 8), (16, 4, 8, 48, 16),
              (4, 4, 16, 96, 16), (4, 1, 16, 96, 24), (1, 1, 24, 144, 40)]  # fmt: skip
    inputs = [p * c for p, _, c, _, _ in blocks]
    middle = [(p * (i > c) + q) * i for p, q, c, i, _ in blocks]
    outputs = [q * w for _, q, _, _, w in blocks]
    excited = [q * i for _, q, _, i, _ in blocks]
    whole = [a + 2 * b + c + d for a, b, c, d in zip(inputs, middle, outputs, excited, strict=True)]
    assert activation_bytes(model) == 2 * (ends + sum(whole))
    full, dots = model.clone(remat="full"), model.clone(remat="dots")
    assert activation_bytes(full) == 2 * (ends + sum(inputs) + max(whole))
    kept = sum(inputs) + sum(middle) + sum(outputs)
    assert activation_bytes(dots) == 2 * (ends + kept + max(whole))
    assert tensor_exchanges(model)["all-reduce"] == (7, 2 * sum(outputs))
    assert tensor_exchanges(model, backward=True)["all-reduce"] == (7, 2 * sum(inputs))


def test_axial_blocks_and_token_modules_by_hand():
    bf16 = {"dtype": jnp.bfloat16}
    plain = create_model("ViT-mu/8", 10, (32, 64), pool="gap", **bf16)  # 4 x 8 patches, one block
    axial = create_model("Axial-ViT-mu/8", 10, (32, 64), **bf16)
    weights = 2 * 5  # bytes of each weight, of two heads
    expected = 2 * (activation_bytes(plain) - weights * 32**2) + weights * 32 * (4 + 8)
    assert activation_bytes(axial) == expected
    again = axial.clone(remat="dots")
    kept = 2 * 32 * (32 + 2 * (5 * 32 + 128))
    assert activation_bytes(again) == kept + expected
    assert tensor_exchanges(axial)["all-reduce"] == (4, 4 * 2 * 32 * 32)

    sizes = {"width": 32, "depth": 1, "mlp_dim": 128, "num_heads": 2, "token_width": 8}
    model = create_model("T2T-ViT-7", 10, 32, **sizes, **bf16)
    blocks = create_model("ViT-mu/16", 10, 32, **bf16)
    inputs = [2 * 64 * 147, 2 * 16 * 72, 2 * 4 * 72]
    layers = [2 * i + 2 * 9 * n * 8 for i, n in zip(inputs, (64, 16), strict=False)]
    features, weights = [4 * 64 * 8, 4 * 16 * 8], [2 * 64**2, 2 * 16**2]
    for kind, own in (("performer", features), ("transformer", weights)):
        found = activation_bytes(model.clone(token_module=kind)) - activation_bytes(blocks)
        assert found == sum(layers) + sum(own) + inputs[-1]
    remat = model.clone(remat="full"), blocks.clone(remat="full")
    found = activation_bytes(remat[0]) - activation_bytes(remat[1])
    assert found == sum(inputs) + layers[0] + features[0]
    dots = [activation_bytes(m.clone(remat="dots")) for m in (model, blocks)]
    assert dots[0] - dots[1] - found == 2 * 6 * (64 + 16) * 8  # outputs of dense layers


def objective_of(name, model, shapes=None, **keys):
    durations = {"objective.temperature_warmup": 0, "objective.freeze_prototypes": 0}
    setting = RunFacts((), (), shapes=shapes or {}, durations=durations)
    return make_objective(model, make_loss("softmax"), name, setting, **keys)


def test_masked_autoencoders_by_their_tokens():
    """An encoder of 8 visible patches, a decoder of all 32, each as a ViT of so many patches."""
    bf16 = {"dtype": jnp.bfloat16}
    model = create_model("ViT-mu/8", 10, (32, 64), **bf16)
    sizes = {"width": 16, "depth": 3, "num_heads": 4, "mlp_dim": 48}
    keys = {f"decoder_{key.removeprefix('num_')}": size for key, size in sizes.items()}
    encoder = create_model("ViT-mu/8", 10, (16, 32), **bf16)
    decoder = create_model("ViT-mu/8", 10, (32, 64), **sizes, **bf16)
    for remat in ("none", "full"):
        objective = objective_of("mae", model.clone(remat=remat), mask_ratio=0.75, **keys)
        both = [activation_bytes(m.clone(remat=remat)) for m in (encoder, decoder)]
        if remat == "full":  # only one block is computed again at a time
            both.append(-min(activation_bytes(encoder), activation_bytes(decoder) // 3))
        assert step_activation_bytes(model, objective) == sum(both)
    ours, twins = passes_of(model, objective), (encoder, decoder.clone(remat="full"))
    for own, twin in zip(ours, twins, strict=True):
        found = tensor_exchanges(own.model, own.tokens, backward=True)
        assert found == tensor_exchanges(twin, backward=True)


def test_views_pass_once_each_and_teachers_keep_nothing():
    model = create_model("ViT-mu/8", None, (32, 32), dtype=jnp.bfloat16)
    small = create_model("ViT-mu/8", None, (16, 16), dtype=jnp.bfloat16)
    shapes = {"global_views": (4, 2, 32, 32, 3), "local_views": (4, 5, 16, 16, 3)}
    views = 2 * activation_bytes(model) + 5 * activation_bytes(small)
    own = {"num_prototypes": 24, "head_width": 16, "bottleneck": 8}
    dino = objective_of("self_distillation", model, shapes, **own)
    logits = (2 * 7 + 2) * 24  # and their softmax, of all views; targets of global ones
    assert step_activation_bytes(model, dino) == views + 4 * logits
    patches = {"patch_weight": 1.0, "mask_max": 0.5, "masked_views": 0.5}
    ibot = objective_of("self_distillation", model, shapes, **own, **patches)
    assert step_activation_bytes(model, ibot) == views + 4 * (logits + 3 * 8 * 24)
    keys = {"directions": 16, "points": 5, "head_width": 12, "embedding_width": 6}
    lejepa = objective_of("lejepa", model, shapes, **keys)
    assert step_activation_bytes(model, lejepa) == views + 4 * 7 * (6 * 12 + 6 + 5 * 16)
    assert [(each.images, each.learns) for each in passes_of(model, dino)] == [
        (2, True), (2, False), (5, True),
    ]  # fmt: skip
    assert passes_of(model, objective_of("supervised", model)) == (TokenPass(model),)
    own_head = dataclasses.replace(dino, passes=(TokenPass(model, learns=False),), kept_values=3)
    assert step_activation_bytes(model, own_head) == 4 * 3


@pytest.mark.parametrize("name", ["ViT-mu/16", "R26+ViT-mu/16", "BiT-R50x1", "EfficientNet-B0"])
def test_layers_before_the_first_that_learns_keep_nothing(name):
    """Only what one of them needs is there at a time."""
    resnet = {"stages": (1, 2), "stem_width": 32} if name[0] in "RB" else {}
    vit = {"depth": 3} if "ViT" in name else {}
    model = create_model(name, 10, 64, **resnet, **vit)
    objective = objective_of("supervised", model)
    parts = len(tree.parts(tree.unflatten_names(abstract_params(model))))
    kept = [step_activation_bytes(model, objective, still) for still in range(parts)]
    assert kept[0] == activation_bytes(model)
    assert all(a >= b for a, b in itertools.pairwise(kept[1:-1]))
    assert kept[0] > 2 * kept[-1] > 0
    if name == "ViT-mu/16":
        layer, one = kept[0] // 3, 4 * 17 * (5 * 32 + 2 * 17)
        assert kept == [3 * layer, 3 * layer, 2 * layer + one, layer + one, one]


def test_of_other_families_it_is_unknown():
    class Other(ViT):
        pass

    model = create_model("ViT-mu/8", 10, (32, 64))
    other = Other(
        10, (32, 64), (8, 8), model.width, 1, num_heads=model.num_heads, mlp_dim=model.mlp_dim
    )
    for function in (activation_bytes, tensor_exchanges):
        with pytest.raises(InputError, match=r"model Other: .* cannot be calculated"):
            function(other)


def test_a_calculated_plan():
    c = base_config()
    c.model.name, c.model.stages, c.model.stem_width = "R26+ViT-mu/16", (1, 1), 32
    c.data.name, c.data.image_size, c.data.ops = "imagenet2012", 32, "flip"
    c.global_batch_size, c.duration, c.optimizer.peak_lr = 64, "100 steps", 1e-3
    c.mesh.data, c.mesh.fsdp, c.mesh.tensor = 2, 2, 2
    figures = calculate_plan(with_known_facts(c), Target(find_slice("H100:8")))
    flops = figures["flops"]
    assert flops["model_per_image_by_sizes"] is None
    # The gradient by the pixels is not asked for.
    forward = 2 * flops["forward_macs_per_image"]
    root = 2 * 16 * 16 * 7 * 7 * 3 * 32
    assert flops["model_per_image_by_jaxpr"] == 3 * forward - root
    assert ("all-gather", ["tensor"]) in [(r["kind"], r["axes"]) for r in figures["collectives"]]
    assert jax.tree.all(jax.tree.map(lambda size: size >= 0, figures["memory_bytes"]))


def test_a_calculated_plan_is_that_of_the_objective():
    """Activations of one example, and the exchanges of both encoders."""
    c = base_config()
    c.model.name, c.objective.name = "ViT-mu/8", "mae"
    c.objective.update({"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2})
    c.data.name, c.data.image_size, c.data.ops = "imagenet2012", 32, "flip"
    c.global_batch_size, c.duration, c.optimizer.peak_lr = 64, "100 steps", 1e-3
    c.mesh.data, c.mesh.tensor = 4, 2
    config, target = with_known_facts(c), Target(find_slice("H100:8"))
    mesh = plan_mesh(config, target, describe_devices(target))
    table = collective_table(planned_experiment(config, mesh), mesh.shape, target, 16, 1)
    # 5 and 17 tokens of 4 bytes, with two sums each of the forward and of the backward pass.
    (sums,) = [row for row in table if row["axes"] == ["tensor"]]
    assert (sums["count"], sums["bytes"]) == (8, 16 * 4 * (5 * 32 + 17 * 16) * 4)
    memory = calculate_memory(config, target)["temporaries"]
    c.objective.mask_ratio = 0.5
    more = calculate_memory(with_known_facts(c), target)["temporaries"]

    def of_encoder(tokens):
        return 4 * tokens * (8 * 32 + 2 * 128) + 2 * tokens * 32 + 9 * 2 * tokens**2

    assert more - memory == 16 * (of_encoder(9) - of_encoder(5))


@pytest.mark.parametrize("name", ["BiT-R50x1", "R26+ViT-mu/16"])
def test_scanned_units_are_gathered_again(name):
    """Compiled for eight devices with fsdp, each of the two loops gathers the kernels of a unit."""
    model = create_model(name, 10, 32, stages=(4, 2), stem_width=32, scan=True)
    units = ["stage_0/layer_0", "stage_0/layer_1", "stage_0/layer_3", "stage_1/layer_1"]
    stem = "trunk" if name.startswith("BiT") else "stem"
    found = [_is_gathered_again(f"{stem}/{unit}/conv2/kernel", model) for unit in units]
    assert found == [False, True, True, False]
