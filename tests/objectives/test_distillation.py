"""Distillation: the published loss of DeiT, features by their equations, several teachers."""

import json
import pathlib
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from at_fault import at_fault
from numpy_vit import random_params
from read_settings import make_loss

from vit_jax.config import LOSSES, OBJECTIVES
from vit_jax.devices.flops import program_flops
from vit_jax.experiment.state import TrainState
from vit_jax.experiment.step import make_train_step
from vit_jax.models import create_model
from vit_jax.models.batch_norm import BatchNorm
from vit_jax.models.block_ops import BlockOps
from vit_jax.models.dot_product import plain_attention
from vit_jax.objectives.contract import RunFacts, Teacher
from vit_jax.objectives.distillation import (
    as_seen_by,
    parse_teachers,
)
from vit_jax.objectives.features import parse_features
from vit_jax.objectives.losses import Sigmoid
from vit_jax.run.teachers import compare_classes

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden/loss_deit.npz")
RNG = np.random.default_rng(0)
RANGE = ((0.5,) * 3, (0.5,) * 3)


class Logits(nn.Module):
    """Its parameters are its logits, of one head or two."""

    names: tuple[str, ...] = ("class", "distillation")
    num_classes: int = 7
    image_size: tuple[int, int] | None = None

    @nn.compact
    def __call__(self, images, *, train=False):
        shape = (images.shape[0], self.num_classes)
        logits = {name: self.param(name, nn.initializers.zeros, shape) for name in self.names}
        return logits if train and len(logits) > 1 else sum(logits.values()) / len(logits)


def teacher_of(logits_BC, weight=1.0, **facts):
    return Teacher(
        "t", weight, Logits(("class",)), {"params": {"class": logits_BC}}, *RANGE, **facts
    )


def objective_of(model, teachers, loss=None, **own):
    setting = RunFacts(*RANGE, tuple(teachers))
    keys = {"name": "distillation", "teacher": "t", **own}
    return OBJECTIVES.make(keys).bind(model, loss or make_loss("softmax"), setting)


def loss_of(objective, params, batch):
    state = SimpleNamespace(model_state={}, objective_state={})
    return objective.loss(params, state, batch, objective.frozen, jax.random.key(0))


def batch_of(labels, mask=None):
    size = len(labels)
    mask = np.ones(size, np.float32) if mask is None else mask
    return {"image": np.zeros((size, 4, 4, 3), np.float32), "label": labels, "mask": mask}


@pytest.mark.parametrize("mode", ["soft", "hard"])
@pytest.mark.parametrize("labels", ["soft_targets", "smoothed"])
def test_loss_of_deit(mode, labels):
    config = json.loads(str(GOLDEN["config"]))
    smoothing = config["smoothing"] if labels == "smoothed" else 0.0
    target = GOLDEN["labels"].astype(np.int32) if labels == "smoothed" else GOLDEN["targets"]
    own = {"temperature": config["tau"]} if mode == "soft" else {}
    objective = objective_of(
        Logits(), [teacher_of(GOLDEN["teacher_logits"])], make_loss("softmax", smoothing),
        mode=mode, weight=config["alpha"], **own,
    )  # fmt: skip
    params = {"class": GOLDEN["logits_cls"], "distillation": GOLDEN["logits_dist"]}
    find = jax.value_and_grad(lambda p: loss_of(objective, p, batch_of(target)).loss)
    loss, grads = find(params)
    np.testing.assert_allclose(loss, GOLDEN[f"loss_{mode}_{labels}"], rtol=2e-5)
    if labels == "soft_targets":
        for name, golden in (("class", "cls"), ("distillation", "dist")):
            expected = GOLDEN[f"grad_{golden}_{mode}"]
            np.testing.assert_allclose(grads[name], expected, atol=2e-5 * np.abs(expected).max())


def test_one_head_several_teachers_and_masked_rows():
    """T^2 KL(mean of the teachers | student) over the rows that count, not divided by C."""
    student, a, b = RNG.normal(size=(3, 4, 7)).astype(np.float32)
    labels, mask = np.array([1, 6, 0, 3]), np.array([1, 1, 0, 1], np.float32)
    teachers = [teacher_of(a, 0.75), teacher_of(b, 0.25)]
    objective = objective_of(Logits(("class",)), teachers, mode="soft", weight=0.4, temperature=2.0)
    out = loss_of(objective, {"class": student}, batch_of(labels, mask))

    def softmax(x):
        return np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)

    p, q = 0.75 * softmax(a / 2) + 0.25 * softmax(b / 2), softmax(student / 2)
    kl_B = (p * np.log(p / q)).sum(axis=1)
    label_B = -np.log(softmax(student))[np.arange(4), labels]
    expected = (mask * (0.6 * label_B + 0.4 * 4 * kl_B)).sum() / 3
    assert float(out.loss) == pytest.approx(expected, rel=1e-5)
    same = student.argmax(axis=1) == (0.75 * softmax(a) + 0.25 * softmax(b)).argmax(axis=1)
    assert float(out.metric_sums["teacher_agreement"]) == (mask * same).sum()


class Normed(nn.Module):
    """A linear model of the mean pixel, with batch statistics as an EfficientNet has them."""

    num_classes: int = 7
    image_size: tuple[int, int] | None = None
    has_batch_statistics = True

    @nn.compact
    def __call__(self, images, *, mask=None, train=False):
        x_BHWC = BatchNorm(momentum=0.9, epsilon=1e-3, name="norm")(images, mask, train)
        return nn.Dense(self.num_classes, name="head")(x_BHWC.mean(axis=(1, 2)))


def test_batch_statistics_of_teacher_and_student():
    """The teacher's running averages normalise and stay; the student's follow the batch."""
    images = RNG.normal(1, 2, (4, 4, 4, 3)).astype(np.float32)
    variables = Normed().init(jax.random.key(0), images)
    stats = {"norm": {"mean": np.full(3, 0.5, np.float32), "var": np.full(3, 4, np.float32)}}
    taught = {"params": variables["params"], "batch_stats": stats}
    teacher = Teacher("t", 1.0, Normed(), taught, *RANGE)
    objective = objective_of(Normed(), [teacher], mode="hard", weight=1.0)
    mask = np.float32([1, 1, 0, 1])
    batch = {"image": images, "mask": mask}
    state = SimpleNamespace(
        model_state={"batch_stats": variables["batch_stats"]}, objective_state={}
    )
    found = objective.loss(variables["params"], state, batch, objective.frozen, jax.random.key(0))
    label_B = np.asarray(Normed().apply(taught, images)).argmax(axis=1)
    own = jax.tree.map(np.asarray, variables["params"])
    normal = images - images[mask > 0].mean(axis=(0, 1, 2))
    normal /= np.sqrt(images[mask > 0].var(axis=(0, 1, 2)) + 1e-3)
    logits = normal.mean(axis=(1, 2)) @ own["head"]["kernel"] + own["head"]["bias"][None]
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert float(found.loss) == pytest.approx(
        -(mask * log_p[np.arange(4), label_B]).sum() / 3, rel=1e-4
    )
    mean = found.model_state["batch_stats"]["norm"]["mean"]
    np.testing.assert_allclose(mean, 0.1 * images[mask > 0].mean(axis=(0, 1, 2)), rtol=1e-5)


@pytest.mark.slow
def test_microbatches_divide_every_term_by_its_own_weight():
    """The same update in one part and in two, with masked rows that fall unevenly."""
    model = create_model("ViT-mu/4", 7, 8, width=8, mlp_dim=8, num_heads=2, pool="gap")
    images = RNG.uniform(-1, 1, (4, 8, 8, 3)).astype(np.float32)
    params = random_params(model, images, scale=0.1)
    teacher = Teacher("t", 1.0, model, {"params": params}, *RANGE)
    objective = objective_of(
        model, [teacher], mode="features", features="pooled, tokens", weight=0.3
    )
    own, objective_state = jax.jit(objective.init)(jax.random.key(2))
    params = random_params(model, images, seed=3, scale=0.1) | {"objective": own}
    tx = optax.sgd(0.1)
    state = TrainState(jnp.int32(0), params, {}, tx.init(params), objective_state=objective_state)
    batch = {"image": images, "label": np.array([1, 6, 0, 3]), "mask": np.float32([1, 1, 0, 1])}
    steps = [
        jax.jit(make_train_step(objective, tx, lambda x, keys: x, 0, accum_steps=parts))
        for parts in (1, 2)
    ]
    (one, metrics), (two, others) = [step(state, batch, objective.frozen) for step in steps]
    # The weights of the terms are summed before, without the model.
    traced = [step.trace(state, batch, objective.frozen) for step in steps]
    flops = [program_flops(program.jaxpr.jaxpr) for program in traced]
    assert flops[0] == flops[1] > 0
    assert metrics.keys() == others.keys() >= {"loss_label", "loss_pooled", "loss_tokens"}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), (one.params, metrics),
        (two.params, others),
    )  # fmt: skip
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), one.params["objective"], own)
    assert min(jax.tree.leaves(moved)) > 0


def test_features_by_their_equations():
    """A convolutional teacher with another value range, image size, width and grid."""
    student = create_model("ViT-mu/4", None, 8, width=8, mlp_dim=8, num_heads=2)
    bit = create_model("BiT-R50x1", None, 32, stages=(1,), stem_width=32)
    images = RNG.uniform(-1, 1, (2, 8, 8, 3)).astype(np.float32)
    variables = {"params": random_params(bit, np.zeros((2, 32, 32, 3)), scale=0.1)}
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    teacher = Teacher("t", 1.0, bit, variables, mean, std)
    objective = objective_of(
        student, [teacher], mode="features", features="pooled,0:0", distance="smooth_l1", weight=1.0
    )
    assert objective.needs == ("image", "mask")
    own, _ = jax.jit(objective.init)(jax.random.key(2))
    params = random_params(student, images, seed=3)

    @jax.jit
    def outputs(params, own, variables):
        batch = batch_of(np.zeros(2, int)) | {"image": images}
        out = loss_of(objective, params | {"objective": own}, batch)
        its = as_seen_by(teacher, images, RunFacts(*RANGE))
        return (
            out.terms, out.metric_sums, its,
            bit.apply(variables, its, method="features"),
            student.apply({"params": params}, images, method="features"),
        )  # fmt: skip

    terms, metric_sums, its, y, x = outputs(params, own, variables)
    seen = jax.image.resize((images * 0.5 + 0.5), (2, 32, 32, 3), "bilinear")
    seen = (seen - np.reshape(mean, (1, 1, 1, 3))) / np.reshape(std, (1, 1, 1, 3))
    np.testing.assert_allclose(its, seen, atol=1e-5)
    y, x = np.asarray(y, np.float64), np.asarray(x, np.float64)
    adapter = jax.tree.map(np.asarray, own["adapter_0_0"])
    x = x @ adapter["kernel"] + adapter["bias"][None]
    y = (y - y.mean(axis=1, keepdims=True)) / y.std(axis=1, keepdims=True)
    far = np.abs(x - y)
    expected = np.where(far < 2, far**2 / 4, far - 1).mean()
    assert float(terms["pooled"].mean) == pytest.approx(expected, rel=1e-3)
    assert terms["layer_0"].factor == 0.5 and float(terms["layer_0"].mean) > 0
    assert "teacher_agreement" not in metric_sums and "top1" not in metric_sums


def test_teachers_and_features_are_parsed():
    assert parse_teachers("runs/a") == {"runs/a": 1.0}
    assert parse_teachers("runs/a=3, hf:b/c = 1") == {"runs/a": 0.75, "hf:b/c": 0.25}
    assert parse_teachers("runs/lr=x") == {"runs/lr=x": 1.0}
    pairs = parse_features("pooled, -1:11")
    assert [pair.student for pair in pairs] == ["pooled", -1] and pairs[1].teacher == 11


@pytest.mark.parametrize("mode", ["hard", "features"])
def test_classes_with_other_names(mode, caplog):
    """Logits of other classes give a warning; features of other classes no agreement."""
    objective = OBJECTIVES.make({"name": "distillation", "teacher": "a", "mode": mode})
    own, other = teacher_of(np.zeros((4, 2))), teacher_of(np.zeros((4, 2)))
    own, other = own._replace(class_names=("a", "b")), other._replace(class_names=("a", "c"))
    found = compare_classes(objective, [own, other], ("a", "b"))
    assert [teacher.same_classes for teacher in found] == [True, mode == "hard"]
    assert ("label 1 is 'b', but output 1 is 'c'" in caplog.text) == (mode == "hard")


@pytest.mark.parametrize(("names", "level"), [(("a", "b"), "INFO"), (("1", "2"), "WARNING")])
def test_classes_that_the_teacher_does_not_name(names, level, caplog):
    """Only their places can match, which is said; a new teacher has the student's classes."""
    caplog.set_level("INFO", "vit_jax")
    of_file = teacher_of(np.zeros((4, 2)))
    objective = OBJECTIVES.make({"name": "distillation", "teacher": "a"})
    compare_classes(objective, [of_file, of_file._replace(source="untrained:x")], names)
    (said,) = caplog.records
    assert said.levelname == level and f"'{names[0]}' is output 0" in said.getMessage()


@pytest.mark.parametrize("image_size", [(12, 16), pytest.param(8, marks=pytest.mark.slow)])
def test_features_of_layers_leave_out_padded_tokens(image_size):
    """Padding completes a row of patches, or does not."""
    model = create_model("ViT-mu/4", None, image_size, width=8, mlp_dim=8, num_heads=2, depth=2)
    images = RNG.uniform(-1, 1, (2, *model.image_size, 3)).astype(np.float32)
    params = random_params(model, images)
    teacher = Teacher("t", 1.0, model, {"params": random_params(model, images, seed=1)}, *RANGE)

    def kernel(qkv, biases, turns, num_keys):
        q, k, v = (x + b[None, None] for x, b in zip(qkv, biases, strict=True))
        return plain_attention(q, k[:, :num_keys], v[:, :num_keys])

    def distance(multiple):
        padded = model.clone(ops=BlockOps(attention_kernel=kernel, token_multiple=multiple))
        objective = objective_of(
            padded, [teacher._replace(model=padded)], mode="features", features="0:1", weight=1.0
        )
        batch = batch_of(np.zeros(2, int)) | {"image": images}

        @jax.jit
        def loss(params):
            own, _ = objective.init(jax.random.key(2))
            return loss_of(objective, params | {"objective": own}, batch).loss

        return float(loss(params))

    assert distance(8) == pytest.approx(distance(1), rel=1e-5)


class Binary(Sigmoid):
    """A plug-in's loss, whose classes do not exclude each other."""


def test_teachers_that_do_not_fit(monkeypatch):
    monkeypatch.setitem(LOSSES, "binary", Binary)
    other = teacher_of(GOLDEN["teacher_logits"])._replace(model=Logits(num_classes=5))
    with at_fault("objective.teacher"):
        objective_of(Logits(), [other])
    for loss in ("sigmoid", "binary"):
        teacher = teacher_of(GOLDEN["teacher_logits"], loss=loss)
        with at_fault("objective.teacher"):
            objective_of(Logits(), [teacher], mode="soft")
    scanned = create_model("ViT-mu/4", None, 8, width=8, mlp_dim=8, num_heads=2, scan=True)
    teacher = Teacher("t", 1.0, scanned, {}, *RANGE)
    with at_fault("model.scan"):
        objective_of(scanned, [teacher], mode="features", features="0:0")
    with at_fault("objective.features"):
        plain = scanned.clone(scan=False)
        objective_of(plain, [teacher], mode="features", features="3:0")
