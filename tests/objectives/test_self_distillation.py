"""Self-distillation: its losses against published code, and how its parts fit together."""

import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from read_settings import settings_of

from vit_jax.config import OBJECTIVES
from vit_jax.config.text import load_config
from vit_jax.devices.mesh import make_mesh
from vit_jax.diagnosis.benchmarks.step import made_up_batch
from vit_jax.experiment.experiment import make_experiment
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import skip_step
from vit_jax.models import create_model
from vit_jax.models.patches import row_keys
from vit_jax.models.vit import ViT
from vit_jax.objectives import centring
from vit_jax.objectives.block_masks import Hidden, block_mask, draw_hidden
from vit_jax.objectives.contract import RunFacts
from vit_jax.objectives.gram import gram_distance
from vit_jax.objectives.koleo import koleo
from vit_jax.objectives.other_sizes import at_size, resize_tokens
from vit_jax.objectives.prototypes import cross_entropies, patch_entropies
from vit_jax.objectives.self_distillation import SelfDistillation, _SelfDistillation

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
B, SIZE, SMALL = 8, 16, 8
RNG = np.random.default_rng(0)
BATCH = {
    "global_views": RNG.normal(size=(B, 2, SIZE, SIZE, 3)).astype(np.float32),
    "local_views": RNG.normal(size=(B, 2, SMALL, SMALL, 3)).astype(np.float32),
    "mask": np.array([1, 1, 1, 0, 1, 1, 1, 1], np.float32),
}
SMALL_HEAD = {"num_prototypes": 24, "head_width": 16, "bottleneck": 8}
KEYS = {
    **SMALL_HEAD, "first_temperature": 0.04, "teacher_temperature": 0.07,
    "temperature_warmup": "4 steps", "freeze_prototypes": "2 steps",
    "patch_weight": 1.0, "patch_head": "own", "koleo_weight": 0.1, "koleo_group": 4,
    "gram_weight": 0.5, "gram_every": "3 steps",
}  # fmt: skip
DURATIONS = {
    "objective.temperature_warmup": 4, "objective.freeze_prototypes": 2, "objective.gram_every": 3,
}  # fmt: skip


def close(found, wanted):
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * max(1, np.abs(wanted).max()))


def by_image(crops, number):
    """(number B, K), crop after crop -> (B, number, K)."""
    return jnp.swapaxes(jnp.asarray(crops).reshape(number, -1, crops.shape[-1]), 0, 1)


def test_dino_agrees_with_published_code(golden):
    z = np.load(golden / "loss_dino.npz")
    config = json.loads(str(z["config"]))
    temperature = config["teacher_temp"]
    teacher, weights = jnp.asarray(z["teacher"]), jnp.ones(6)

    @jax.jit
    @jax.value_and_grad
    def loss(student, targets):
        each = cross_entropies(by_image(student, 4), by_image(targets, 2), config["student_temp"])
        return each.mean()

    sinkhorn = jax.jit(functools.partial(centring.sinkhorn, temperature=temperature))
    centred = centring.centred(teacher, jnp.asarray(z["center"][0]), temperature)
    close(centred, z["teacher_probs_centered"])
    found, grad = loss(z["student"], centred)
    close(found, z["loss"])
    close(grad, z["grad_student"])
    moved = centring.moved_centre(jnp.asarray(z["center"][0]), teacher, weights, 0.9)
    close(moved, z["center_after"][0])
    even = sinkhorn(teacher, weights_N=weights)
    close(even, z["teacher_probs_sinkhorn"])
    found, grad = loss(z["student"], even)
    close(found, z["loss_sinkhorn_total_pairs_unlike"])
    close(grad, z["grad_student_sinkhorn_pairs_unlike"])
    more = jnp.concatenate([teacher, 9 * teacher[:2]])  # rows that do not count change nothing
    weights = jnp.asarray([1.0] * 6 + [0.0] * 2)
    close(sinkhorn(more, weights_N=weights)[:6], even)
    close(centring.moved_centre(jnp.asarray(z["center"][0]), more, weights, 0.9), moved)


def test_ibot_agrees_with_published_code(golden):
    z = np.load(golden / "loss_ibot.npz")
    config = json.loads(str(z["config"]))
    masks = z["masks"]
    rows, patches = np.nonzero(masks)
    counts = jnp.asarray(masks, jnp.float32)
    temperature = config["teacher_temp"]

    @jax.jit
    @jax.value_and_grad
    def loss(student, targets):
        whole = (jnp.zeros((*masks.shape, 12)).at[rows, patches].set(x) for x in (student, targets))
        return patch_entropies(*whole, counts, config["student_temp"]).mean()

    teacher = jnp.asarray(z["teacher_masked"])
    sinkhorn = jax.jit(functools.partial(centring.sinkhorn, temperature=temperature))
    targets = sinkhorn(teacher, weights_N=jnp.ones(len(teacher)))
    close(targets, z["teacher_probs_sinkhorn"])
    found, grad = loss(z["student_masked"], targets)
    close(found, z["loss_sinkhorn"])
    close(grad, z["grad_student_sinkhorn"])
    targets = centring.centred(teacher, jnp.asarray(z["center"][0, 0]), temperature)
    close(loss(z["student_masked"], targets)[0], z["loss_centered"])


def test_koleo_agrees_with_published_code(golden):
    z = np.load(golden / "loss_koleo.npz")

    @jax.jit
    def outputs(x):
        whole = jax.value_and_grad(lambda x: koleo(x, jnp.ones(6), 6).mean())(x)
        first = koleo(x, jnp.asarray([1.0, 1, 1, 0, 0, 0]), 6)
        return whole, koleo(x, jnp.ones(6), 3), koleo(x[3:], jnp.ones(3), 3), first

    (loss, grad), halves, second, first = outputs(z["features"])
    close(loss, z["loss"])
    close(grad, z["grad"])
    close(halves[3:], second)
    close(first, [*halves[:3], 0, 0, 0])


@pytest.mark.parametrize(
    ("name", "group", "negatives"),
    [
        ("image", 1, "kept"),
        ("batch", 2, "kept"),
        ("image_remove_neg", 1, "removed"),
        ("image_remove_teacher_neg", 1, "removed_from_teacher"),
    ],
)
def test_gram_agrees_with_published_code(golden, name, group, negatives):
    z = np.load(golden / "loss_gram.npz")

    @jax.jit
    @jax.value_and_grad
    def loss(x):
        return gram_distance(x, jnp.asarray(z["teacher"]), group, negatives).mean()

    found, grad = loss(z["student"])
    close(found, z[f"loss_{name}"])
    close(grad, z[f"grad_{name}"])


def test_blocks_hide_what_was_asked_and_a_row_s_depend_on_its_key_only():
    keys = row_keys(jax.random.key(0), 64)
    sizes = {"grid": (8, 8), "num_views": 2, "masked_views": 1, "shares": (0.1, 0.5)}
    draw = jax.jit(functools.partial(draw_hidden, **sizes))
    hidden = draw(keys)
    numbers = np.asarray(hidden.mask.sum(2))[:, 0]
    assert numbers.min() > 0 and numbers.max() <= 32 and 12 < numbers.mean() < 22
    assert {*np.asarray(hidden.views).ravel()} == {0, 1}
    for row in range(8):
        chosen = np.asarray(hidden.which[row, 0])[: numbers[row]]
        assert hidden.mask[row, 0][chosen].all() and hidden.counts[row].sum() == numbers[row]
    again = draw(keys[::-1])
    np.testing.assert_array_equal(again.mask[::-1], hidden.mask)
    # A block never hides more than is left: few patches are asked for, so that many do not fit.
    numbers = jnp.arange(64) % 8 + 1
    few = jax.jit(jax.vmap(functools.partial(block_mask, grid=(8, 8))))(keys, number=numbers)
    assert (few.sum((1, 2)) <= numbers).all()
    # Patches are hidden together: most neighbours of hidden ones are hidden too.
    masks = np.asarray(hidden.mask).reshape(64, 8, 8)
    assert masks[:, 1:][masks[:, :-1]].mean() > 0.5


@functools.cache
def network(**fields):
    return ViT(
        num_classes=None, image_size=(SIZE, SIZE), patch_size=(4, 4), width=16, depth=1,
        num_heads=2, mlp_dim=16, **fields,
    )  # fmt: skip


def make(model=None, **own):
    shapes = {key: leaf.shape for key, leaf in BATCH.items()}
    setting = RunFacts((0.5,) * 3, (0.5,) * 3, shapes=shapes, durations=DURATIONS)
    keys = {"name": "self_distillation", **KEYS, **own}
    return OBJECTIVES.make(keys).bind(model or network(), None, setting)


@pytest.fixture(scope="module")
def compiled():
    """(state, {name: gradients and sums of a step})."""
    objective = make()

    def init(key):
        params = dict(network().init(key, jnp.zeros((1, SIZE, SIZE, 3)))["params"])
        own, objective_state = objective.init(key)
        params["objective"] = own
        ema = jax.tree.map(lambda x: 1.1 * x, params)
        step = jnp.int32(0)
        return TrainState(step, params, {}, (), ema, {}, objective_state)

    def loss(params, state, batch):
        out = objective.loss(params, state, batch, None, jax.random.key(1))
        return out.loss, out

    return jax.jit(init)(jax.random.key(0)), jax.jit(jax.grad(loss, has_aux=True))


def test_a_step_of_self_distillation(compiled):
    state, step = compiled
    grads, out = step(state.params, state, BATCH)
    assert sorted(out.terms) == ["gram", "koleo", "patches"]
    assert sorted(out.metric_sums) == ["teacher_entropy", "teacher_kl"]
    # At step 0 the prototypes are frozen, and the Gram teacher is the average of the start.
    for head in ("head", "patch_head"):
        own = grads["objective"][head]
        assert not own["prototypes"]["kernel"].any() and own["bottleneck"]["kernel"].any()
    assert grads["objective"]["mask_token"].any() and grads["pos_embedding"].any()
    close(out.objective_state["gram_teacher"]["pos_embedding"], state.ema["pos_embedding"])
    assert out.objective_state["centre"]["views"].any()
    assert out.objective_state["centre"]["patches"].any()
    entropy = out.metric_sums["teacher_entropy"] / 7
    assert 0 < entropy < np.log(24)
    later = state.replace(step=jnp.int32(2))
    grads, changed = step(later.params, later, BATCH)
    assert grads["objective"]["head"]["prototypes"]["kernel"].any()
    assert not changed.objective_state["gram_teacher"]["pos_embedding"].any()  # not copied again
    # The temperature has risen, so that the targets are less sharp.
    assert changed.metric_sums["teacher_entropy"] > out.metric_sums["teacher_entropy"]


def test_a_replay_sees_fewer_rows_than_a_group_has(compiled):
    """Those of one device; they are spread apart, and compared, in groups that divide them."""
    state, _ = compiled
    objective = make(koleo_group=8, gram_group=4)
    rows = {name: leaf[:6] for name, leaf in BATCH.items()}
    out = jax.eval_shape(objective.loss, state.params, state, rows, None, jax.random.key(1))
    assert sorted(out.terms) == ["gram", "koleo", "patches"]


@pytest.mark.parametrize(("step", "copied"), [(3, True), (4, False)])
def test_a_step_that_is_left_out_still_copies_the_gram_teacher(compiled, step, copied):
    state = compiled[0].replace(step=jnp.int32(step))
    left, _ = skip_step(make(), state, BATCH)
    teacher = left.objective_state["gram_teacher"]["pos_embedding"]
    assert (teacher == state.ema["pos_embedding"]).all() == copied == teacher.any()
    assert left.objective_state["centre"] is state.objective_state["centre"]


def test_the_gram_teacher_may_see_larger_crops(compiled):
    """Its patches are resampled to the student's grid; of equal crops the term stays the same."""
    state, _ = compiled
    wide = BATCH["global_views"].repeat(2, axis=2).repeat(2, axis=3)

    def gram(batch, **own):
        objective = make(**own)

        @jax.jit
        def loss(params):
            terms = objective.loss(params, state, batch, None, jax.random.key(1)).terms
            return terms["gram"].sum

        return float(loss(state.params))

    large = gram(BATCH | {"gram_views": wide}, gram_size=2 * SIZE)
    same = gram(BATCH | {"gram_views": BATCH["global_views"]}, gram_size=SIZE)
    assert same == gram(BATCH) and abs(large / same - 1) > 1e-3
    tokens = RNG.normal(size=(2, 4, 4, 3)).astype(np.float32)
    row, column = np.mgrid[:4, :4]
    tokens[..., 0] = row * 10 + column
    small = resize_tokens(jnp.asarray(tokens.reshape(2, 16, 3)), (4, 4), (2, 2))
    low, high = 7 / 17, 44 / 17  # Keys's kernel at half a step, without what lies outside
    close(small[0, :, 0], [11 * low, 10 * low + high, 10 * high + low, 11 * high])


def test_a_masked_row_changes_nothing(compiled):
    state, step = compiled
    other = {key: leaf.copy() for key, leaf in BATCH.items()}
    other["global_views"][3] *= -2
    other["local_views"][3] *= -2
    found, wanted = (step(state.params, state, batch)[1] for batch in (other, BATCH))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, wanted)


def test_positions_of_local_views_are_resampled():
    model = network()
    table = RNG.normal(size=(1, 17, 16)).astype(np.float32)
    rows, columns = np.mgrid[:4, :4]
    table[0, 1:, 0] = (rows * 10 + columns).ravel()
    small, params = at_size(model, {"pos_embedding": jnp.asarray(table)}, (8, 8))
    assert small.grid == (2, 2)
    close(params["pos_embedding"][:, 0], table[:, 0])
    low, high = 7 / 17, 44 / 17  # Keys's kernel at half a step, without what lies outside
    wanted = [[11 * low, 10 * low + high], [10 * high + low, 11 * high]]
    close(params["pos_embedding"][0, 1:, 0].reshape(2, 2), wanted)
    _, same = at_size(model, {"pos_embedding": jnp.asarray(table)}, (SIZE, SIZE))
    close(same["pos_embedding"], table)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ViTC-1GF", {"patch_size": (4, 4), "stem_channels": (4, 8)}),
        ("R50+ViT-B/16", {"stages": (1,), "stem_width": 32, "patch_size": (1, 1)}),
    ],
)
def test_outputs_of_a_stem_are_hidden(name, fields):
    """With all of them hidden, the student's features do not depend on the image."""
    sizes = {"width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 16}
    model = create_model(name, None, SIZE, **fields, **sizes, pos_embed="sincos_2d", pool="gap")
    seen = _SelfDistillation(model, SelfDistillation(patch_weight=1.0, **SMALL_HEAD), {})
    num = math.prod(model.grid)
    all_N = jnp.arange(num)[None, None]
    hidden = Hidden(jnp.zeros((1, 1), int), all_N >= 0, all_N, jnp.ones((1, 1, num)))

    @functools.partial(jax.jit, static_argnums=1)
    def features(images, hides):
        params = dict(model.init(jax.random.key(0), images[0])["params"])
        params["objective"] = seen.init(jax.random.key(1))[0]
        return seen._see(params, images, hidden, None, hides=hides)["features"]

    one, other = BATCH["global_views"][:2, None, 0]
    assert (features(one[None], True) == features(other[None], True)).all()
    assert (features(one[None], False) != features(other[None], False)).any()


def test_a_model_of_one_size_has_no_views():
    with at_fault("objective.name"):
        make(create_model("T2T-ViT-7", None, 32))


@pytest.mark.parametrize(
    ("own", "key"),
    [
        ({"koleo_group": 3}, "objective.koleo_group"),
        ({"gram_size": 32, "gram_weight": 0.0, "gram_every": None}, "objective.gram_size"),
        ({"masked_views": 0.1}, "objective.masked_views"),
        ({"mask_min": 0.01, "mask_max": 0.06}, "objective.mask_max"),
    ],
)
def test_what_does_not_fit_the_batch_is_refused(own, key):
    with at_fault(key):
        make(**own)


@pytest.mark.parametrize("name", ["freeze_prototypes", "temperature_warmup"])
def test_what_begins_with_the_run_ends_within_it(name):
    facts = RunFacts((), (), durations={"duration": 5, f"objective.{name}": 6})
    with at_fault(f"objective.{name}"):
        SelfDistillation().bind(network(), None, facts)


def tiny_dinov2():
    """A config with all parts."""
    config = load_config(f"{CONFIGS / 'dinov2.py'}:own_head,sinkhorn,debug")
    config.data.num_classes, config.data.num_examples = 10, 1437
    config.objective.gram_weight, config.objective.gram_every = 1.0, "2 steps"
    config.optimizer.name = "sgd"  # AdamW would divide rounding errors by themselves
    return config


def mesh_of(number, side):
    devices = jax.devices()[:number]
    return make_mesh(replica=1, data=side, fsdp=side, tensor=side, devices=devices)


@pytest.mark.slow
def test_a_plan_counts_the_flops_of_all_views_and_teachers():
    config, mesh = tiny_dinov2(), mesh_of(1, 1)
    with jax.set_mesh(mesh):
        experiment = make_experiment(settings_of(config), mesh)
        assert 0.9 < experiment.flops_per_step / 32 / experiment.flops_per_image < 1.1


def test_the_average_that_teaches_has_no_ramp():
    config, mesh = tiny_dinov2(), mesh_of(1, 1)
    with jax.set_mesh(mesh):
        config.optimizer.ema_decay_end = None  # the average would begin with a ramp
        with at_fault("optimizer.ema_decay_end"):
            make_experiment(settings_of(config), mesh)
        config.optimizer.ema_decay = None
        with at_fault("optimizer.ema_decay"):
            make_experiment(settings_of(config), mesh)


def test_a_batch_without_views_is_refused_by_the_experiment():
    config, mesh = tiny_dinov2(), mesh_of(1, 1)
    config.data.num_global = config.data.num_local = 0
    config.data.ops = "flip"
    with at_fault("objective.name"):
        make_experiment(settings_of(config), mesh)


@pytest.mark.slow
def test_every_mesh_gives_what_one_device_gives():
    """Two steps, with a second head, Sinkhorn-Knopp and a Gram teacher."""
    config = tiny_dinov2()
    states, metrics = [], []
    for number, side in ((1, 1), (8, 2)):
        mesh = mesh_of(number, side)
        with jax.set_mesh(mesh):
            experiment = make_experiment(settings_of(config), mesh)
            state, batch = experiment.init(), made_up_batch(experiment, 10)
            for _ in range(2):
                state, found = experiment.train_step(state, batch)
        states.append(jax.device_get((state.params, state.ema, state.objective_state)))
        metrics.append(jax.device_get(found))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-4), *states)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), *metrics)
    assert metrics[0]["loss_patches"] > 0 and metrics[0]["teacher_entropy"] > 0
