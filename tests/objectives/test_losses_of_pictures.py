"""Objectives on pictures in their own shape: a padded batch computes as each image alone."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from numpy_vit import random_params
from padded import MOST, PATCH, as_pictures

from vit_jax.base.pictures import cut_out
from vit_jax.config import OBJECTIVES
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.evaluators.image_table import as_table
from vit_jax.models import create_model
from vit_jax.models.own_shapes import squash
from vit_jax.objectives.contract import RunFacts, Teacher
from vit_jax.objectives.losses import cross_entropy
from vit_jax.objectives.mae import Mae, _Mae
from vit_jax.run.setup.validation import find_faults

GRIDS = ((2, 5), (3, 3), (4, 1), (1, 1))
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RNG = np.random.default_rng(0)
IMAGES = [RNG.normal(size=(1, r * PATCH, c * PATCH, 3)).astype(np.float32) for r, c in GRIDS]
KEYS = {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}


def network(num_classes=None, patch=PATCH, **fields):
    fields = {"width": 16, "mlp_dim": 16, "depth": 2, "pos_embed": "sincos_2d"} | fields
    return create_model(f"ViT-mu/{patch}", num_classes, **{"image_size": 12} | fields)


@pytest.mark.parametrize(
    "fields", [{}, pytest.param({"registers": 2, "pool": "gap"}, marks=pytest.mark.slow)]
)
def test_mae_hides_a_share_of_each_pictures_own_patches(fields):
    fields = {"depth": 1} | fields
    model, keys = network(max_tokens=MOST, **fields), Mae(mask_ratio=0.6, **KEYS)
    params, pictures = random_params(model, IMAGES[1]), as_pictures(IMAGES, 9.0)
    objective = keys.bind(model, None, RunFacts(*IMAGENET))
    params["objective"], _ = jax.jit(objective.init)(jax.random.key(1))
    mae, of_rows = _Mae(model, keys), jax.random.split(jax.random.key(2), len(GRIDS))
    first = mae.count_visible()

    @jax.jit
    def find(params):
        order = mae._draw_order(of_rows, pictures)

        def loss(params):
            losses, found = mae.predict(params, pictures, order)
            return losses[:-1].sum(), (losses, found)

        return order, *jax.value_and_grad(loss, has_aux=True)(params)

    order, (_, (losses, found)), grads = jax.device_get(find(params))
    assert losses[-1] == 0  # of one patch, nothing is hidden
    drawn = jax.device_get(jax.jit(objective.reconstruct)(params, pictures, of_rows))
    patches = np.asarray(pictures.patches)
    np.testing.assert_allclose(drawn.loss_B, losses, rtol=1e-6)
    singles = []
    for row, image in enumerate(IMAGES[:-1]):
        number = np.prod(GRIDS[row])
        seen = int(number * (1 - 0.6))
        visible, hidden = order[row, :seen], order[row, first : first + number - seen]
        assert sorted([*visible, *hidden]) == [*range(number)]
        assert sorted(np.asarray(order[row])) == [*range(MOST)]
        own = np.concatenate([visible, hidden])[None]
        loss, predicted, grads_of_one = mae_of_image(network(**fields), keys, params, image, own)
        np.testing.assert_allclose(losses[row], loss, rtol=2e-5)
        np.testing.assert_allclose(found[row, : number - seen], predicted, atol=2e-5)
        shown = drawn.restored.patches[row, visible]
        np.testing.assert_array_equal(shown, patches[row, visible])
        is_hidden = (drawn.hidden.patches[row, :number] == 0).all(axis=(1, 2, 3))
        np.testing.assert_array_equal(np.flatnonzero(is_hidden), np.sort(hidden))
        singles.append(grads_of_one)
    summed = jax.tree.map(lambda *x: sum(x), *singles)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), grads, summed)


def mae_of_image(model, keys, params, image, order):
    """The loss, predicted patches and gradient of an image alone."""
    mae = _Mae(model.clone(image_size=image.shape[1:3]), keys)

    def loss(params):
        losses, found = mae.predict(params, image, order)
        return losses[0], found[0]

    (loss, found), grads = jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params))
    return loss, found, grads


FORMS = {
    "soft": {"mode": "soft"},
    "features": {"mode": "features", "features": "pooled, tokens, 0:1", "distance": "smooth_l1"},
}


@pytest.mark.parametrize("name", [pytest.param("soft", marks=pytest.mark.slow), "features"])
def test_teachers_see_the_same_patches(name):
    """Kept patches are drawn, so that only the padding can be compared there."""
    taught = network(5, width=8, registers=1)
    teacher = Teacher("t", 1.0, taught, {"params": random_params(taught, IMAGES[1])}, *IMAGENET)

    def losses(images, counts, **fields):
        model = network(5, **fields)
        keys = {"name": "distillation", "teacher": "t", "weight": 1.0, **FORMS[name]}
        its = taught.clone(image_size=fields.get("image_size", (12, 12)))
        facts = RunFacts((0.5,) * 3, (0.5,) * 3, (teacher._replace(model=its),))
        objective = OBJECTIVES.make(keys).bind(model, cross_entropy, facts)
        params = random_params(network(5), IMAGES[1])
        own = objective.init(jax.random.key(2))[0] if objective.init else {}
        state = SimpleNamespace(model_state={}, objective_state={})

        @jax.jit
        def sums(mask):
            batch = {"image": images, "mask": mask, "label": jnp.zeros(len(mask), jnp.int32)}
            given = params | {"objective": own}, state, batch, objective.frozen
            return objective.loss(*given, jax.random.key(3)).terms

        return [
            {k: v.sum for k, v in sums(row).items()} for row in np.eye(counts, dtype=np.float32)
        ]

    found = losses(as_pictures(IMAGES, 9.0), len(GRIDS), max_tokens=MOST)
    for row in (0, len(IMAGES) - 1):  # the largest and the smallest
        (alone,) = losses(IMAGES[row], 1, image_size=IMAGES[row].shape[1:3])
        assert found[row].keys() == alone.keys()
        np.testing.assert_allclose([*found[row].values()], [*alone.values()], rtol=5e-5)
    kept = [losses(as_pictures(IMAGES, x), 4, max_tokens=MOST, keep_tokens=0.5) for x in (9.0, 1.0)]
    np.testing.assert_allclose(*([[*row.values()] for row in rows] for rows in kept), rtol=1e-6)
    assert kept[0] != found


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("ViT-mu/2", {}),
        ("BiT-R50x1", {}),
        ("R50+ViT-B/16", {}),
        ("ViT-mu/4", {"pos_embed": "relative"}),
    ],
)
def test_a_teacher_of_other_patches_is_refused(model, fields):
    other = create_model(model, 5, 32, **fields)
    teacher = Teacher("t", 1.0, other, {}, *IMAGENET)
    facts = RunFacts(*IMAGENET, (teacher,))
    with at_fault("objective.teacher"):
        OBJECTIVES.make({"name": "distillation", "teacher": "t"}).bind(
            network(5, max_tokens=MOST), cross_entropy, facts
        )


@pytest.mark.parametrize(
    "words",
    [{"objective.name": "mae"},
     {"objective.name": "distillation", "objective.teacher": "t", "objective.mode": "features",
      "objective.features": "tokens"}],
)  # fmt: skip
def test_where_single_patches_count_rows_of_several_pictures_are_refused(words):
    config = load_config("folder:packed,debug")
    assert not apply_overrides(config, [*words.items()])
    assert any(fault.startswith("data.pack=") for fault in find_faults(config))


def test_pictures_are_drawn_and_squashed_as_images():
    pixels = jax.tree.map(np.asarray, as_pictures(IMAGES, 9.0))
    pixels = pixels._replace(patches=np.clip(pixels.patches * 20 + 100, 0, 255).astype(np.uint8))
    images = [np.clip(image[0] * 20 + 100, 0, 255).astype(np.uint8) for image in IMAGES]
    for found, image in zip(cut_out(pixels), images, strict=True):
        np.testing.assert_array_equal(found, image)
    top, drawn = 4, np.asarray(as_table([image, image[:4]] for image in cut_out(pixels)))
    widest = max(image.shape[1] for image in images)
    assert drawn.shape[1] % 2 == 0 and (drawn[:4] == 255).all()
    scale = (drawn.shape[1] - 12) // (2 * widest)
    for image in images:
        height, width = scale * image.shape[0], scale * image.shape[1]
        found = drawn[top : top + height, 4:]
        np.testing.assert_array_equal(found[::scale, :width:scale], image)
        assert (found[:, width : scale * widest + 4] == 255).all()
        second = found[: 4 * scale : scale, scale * widest + 4 :: scale][:, : image.shape[1]]
        np.testing.assert_array_equal(second, image[:4])
        assert (found[4 * scale :, scale * widest + 4 :] == 255).all()
        top += height + 4
        assert (drawn[top - 4 : top] == 255).all()
    assert len(drawn) == top
    long = np.zeros((2, 4096, 1), np.uint8)  # is made smaller
    assert as_table([[long, long], [long[:, :9], long]]).size == (4 + 2 * 1028, 4 + 5 + 6)
    for image, found in zip(images, np.asarray(squash(pixels, 6)), strict=True):
        wanted = jax.image.resize(image.astype(np.float32), (6, 6, 3), "linear")
        np.testing.assert_allclose(found, wanted, atol=1e-3)
