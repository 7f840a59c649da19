"""The contrastive objective by hand, its refusals, and whole runs: zero-shot, exports, restarts."""

import functools
import re
import shutil
from types import SimpleNamespace

import asked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from finished_run import final_state, rows
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from numpy_vit import random_params
from pairs import siglip
from scipy.special import expit, log_softmax

import vit_jax
from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.base.tree import flatten_names
from vit_jax.config import OBJECTIVES
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.data.sources import arrays
from vit_jax.data.tokenizers import TextFacts, are_equal
from vit_jax.experiment.objective import texts_that_learn
from vit_jax.main import main
from vit_jax.models import create_model
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.contract import with_known
from vit_jax.models.zero_shot import TextSide, zero_shot_head, zero_shot_model
from vit_jax.objectives.contract import RunFacts
from vit_jax.run.build import describe
from vit_jax.run.setup.validation import find_faults
from vit_jax.run.train import start_state
from vit_jax.transfer import read_pretrained
from vit_jax.transfer.export import export

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")

RNG = np.random.default_rng(0)
FACTS = RunFacts((), (), text=TextFacts(20, 6))
SIZES = {"width": 8, "depth": 2, "mlp_dim": 12, "num_heads": 2}
IDS = RNG.integers(2, 20, (6, 6))
IDS[:, 4:], IDS[3] = 1, IDS[1]
BATCH = {
    "image": RNG.uniform(-1, 1, (6, 8, 8, 3)).astype(np.float32),
    "mask": np.float32([1, 1, 1, 1, 0, 1]),
    "text": IDS.astype(np.int32),
    "text_mask": np.float32([1, 1, 1, 1, 1, 0]),
}


def made(name="ViT-mu/4", fields=(), **keys):
    """(objective, its matcher, model, parameters) of small towers."""
    model = create_model(name, None, 8, pool="gap", **SIZES, **dict(fields))
    part = OBJECTIVES.make({"name": "contrastive", **keys})
    objective = part.bind(model, None, FACTS)
    params = jax.tree.map(jnp.asarray, random_params(model, np.zeros((1, 8, 8, 3), np.float32)))
    own, _ = jax.jit(objective.init)(jax.random.key(1))
    return objective, part.make_matcher(model, FACTS.text), model, params | {"objective": own}


@functools.partial(jax.jit, static_argnums=(0, 1))
def logits(model, matcher, params, images, ids):
    features = model.apply({"params": params}, images, method="features")
    return matcher.apply({"params": params["objective"]}, features, ids)


def sums_of(objective, params):
    state = SimpleNamespace(model_state={})
    compute = lambda batch: objective.loss(params, state, batch, None, jax.random.key(0))  # noqa: E731
    return jax.jit(compute)


OF_STEM = {"patch_size": 4, "stem_channels": (4, 8)}
OF_CLIP = {"loss": "softmax", "causal": True, "common_width": 5, "text_width": 4, "text_depth": 1}


@pytest.mark.parametrize("keys", [{}, {"duplicates": "ignored"}, OF_CLIP])
def test_the_loss_is_that_of_the_logits_of_usable_rows(keys):
    objective, matcher, model, params = made(**keys)
    sums = sums_of(objective, params)
    out = sums(BATCH)
    found = np.asarray(logits(model, matcher, params, BATCH["image"][:4], BATCH["text"][:4]))
    if matcher.has_bias:
        losses = -np.log(expit(np.where(np.eye(4), found, -found)))
        losses[[1, 3], [3, 1]] *= "duplicates" not in keys
        expected = losses.sum() / 4
    else:
        expected = -np.mean([np.diag(log_softmax(found, axis)) for axis in (0, 1)])
    assert out.loss == pytest.approx(expected, rel=1e-5)
    rivals = np.where(np.eye(4) + np.eye(4)[[0, 3, 2, 1]], -np.inf, found)
    for name, axis in (("image_to_text", 1), ("text_to_image", 0)):
        right = np.diag(found) > rivals.max(axis)
        assert out.metrics[name] == pytest.approx(right.mean())
    assert out.metrics["duplicates"] == 0.5
    start = {"scale": 10, "bias": -10} if matcher.has_bias else {"scale": 1 / 0.07}
    assert {k: out.metrics.get(k) for k in ("scale", "bias") if k in out.metrics} == pytest.approx(
        start
    )
    other = {**BATCH, "image": BATCH["image"].copy(), "text": BATCH["text"].copy()}
    other["image"][4:], other["text"][4:] = 0, 3
    assert sums(other).loss == out.loss


@pytest.mark.parametrize(
    ("name", "fields", "keys"), [("ViT-mu/4", {}, OF_CLIP), ("ViTC-1GF", OF_STEM, {})]
)
def test_each_tower_classifies_by_the_logits_of_pairs(name, fields, keys):
    _, matcher, model, params = made(name, fields, **keys)
    expected = logits(model, matcher, params, BATCH["image"], IDS[:2])
    side = TextSide(matcher, tree.flatten_names(params["objective"]), None)
    head = tree.unflatten_names(zero_shot_head(side, [IDS[:1], IDS[1:2]]))
    by_words = zero_shot_model(model, matcher, 2)
    found = jax.jit(by_words.apply)({"params": params | head}, BATCH["image"])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_scale_of_the_softmax_is_at_most_100_everywhere():
    objective, matcher, _, params = made(loss="softmax")
    params["objective"]["logit_scale"] = jnp.float32(5)
    assert sums_of(objective, params)(BATCH).metrics["scale"] == pytest.approx(100)
    names = flatten_names(params["objective"])
    head = zero_shot_head(TextSide(matcher, names, lambda: None), [IDS[:1], IDS[1:2]])
    lengths = np.linalg.norm(head["head/classes/kernel"], axis=0)
    assert lengths == pytest.approx([100, 100], rel=1e-5)


def test_what_it_cannot_train():
    with at_fault("objective.name"):
        OBJECTIVES.make({"name": "contrastive"}).bind(create_model("BiT-R50x1", None), None, FACTS)
    with at_fault("objective.text_width"):
        made(text_width=9)
    endless = FACTS._replace(text=FACTS.text._replace(end_id=None))
    model = create_model("ViT-mu/4", None, 8, **SIZES)
    with at_fault("objective.causal"):
        OBJECTIVES.make({"name": "contrastive", "causal": True}).bind(model, None, endless)
    config = load_config("configs/siglip.py:debug")
    assert apply_overrides(config, [("data.text_length", "None")]) == []
    (fault,) = find_faults(config)
    assert fault.startswith("data.text_length=None: objective.name='contrastive' reads captions")


DECAYING = {"optimizer.weight_decay": 0.5, "optimizer.ema_decay": 0.9}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a run whose towers are scanned, on one device."""
    workdir = tmp_path_factory.mktemp("runs") / "siglip"
    overrides = {"model.scan": True, "model.remat": "full", "duration": "8 steps", **DECAYING}
    vit_jax.train("siglip:debug", workdir, overrides)
    return workdir


@pytest.mark.slow
def test_a_run_can_be_evaluated_exported_and_asked_in_words(run, tmp_path):
    last = rows(run)[-1]
    found = vit_jax.evaluate(run)
    assert found["zeroshot/top1"] == last["zeroshot/top1"] and found["zeroshot/loss_raw"] > 0
    assert main(["export", f"--init_from={run}", "--format=hf_pair", f"--output={tmp_path}/a"]) == 0
    pixels, labels = RNG.integers(0, 256, (3, 32, 32, 3), np.uint8), ["noise of class 3", "a 4"]
    ours, theirs = (vit_jax.predict(pixels, at, labels=labels) for at in (run, tmp_path / "a"))
    for mine, other in zip(ours, theirs, strict=True):
        for one, same in zip(mine["classes"], other["classes"], strict=True):
            assert one["name"] == same["name"]
            assert one["probability"] == pytest.approx(same["probability"], rel=1e-4)
    _, state = final_state(run)
    for name, value in {"logit_scale": np.log(10), "logit_bias": -10}.items():
        found = state[f"params/objective/{name}"]  # 8 steps of at most 1e-3, and no decay
        assert found == pytest.approx(value, abs=0.009) and found != np.float32(value)


def test_words_need_the_run_s_own_tokenizer(run, tmp_path):
    own = OBJECTIVES.make({"name": "contrastive"})
    assert texts_that_learn(own, create_model("ViT-mu/4", None, 8), pytest.fail)  # not read yet
    copy = shutil.copytree(run, tmp_path / "copy")
    stated = copy / "tokenizer/tokenizer_config.json"
    stated.write_text(stated.read_text().replace("Siglip", "Clip"))
    pixels = RNG.integers(0, 256, (1, 32, 32, 3), np.uint8)
    for use in (vit_jax.evaluate, lambda at: vit_jax.predict(pixels, at, labels=["a 3", "a 4"])):
        with pytest.raises(InputError, match="the run began with another tokenizer"):
            use(copy)


OF_GOLDEN = {
    "data.image_size": 64, "model.patch_size": 16, "model.width": 32, "model.depth": 2,
    "model.mlp_dim": 88, "model.num_heads": 4, "objective.text_width": 48,
    "objective.text_depth": 2, "objective.text_heads": 3, "objective.text_mlp_dim": 128,
}  # fmt: skip


def begin(source, workdir, **overrides):
    """(run, its first state) of siglip:debug from `source`."""
    config = load_config("configs/siglip.py:debug")
    values = {"init_from": source, **overrides}
    assert apply_overrides(config, [(key, str(value)) for key, value in values.items()]) == []
    started = asked.prepare(config, workdir)
    with jax.set_mesh(started.mesh):
        return started, start_state(started)[0]


@pytest.mark.parametrize("kind", ["hf", "run", pytest.param("export", marks=pytest.mark.slow)])
def test_a_run_begins_with_both_towers_of_a_pair(golden, run, tmp_path, caplog, kind):
    caplog.set_level("INFO", "vit_jax")
    source, own = run, {"model.scan": False}
    if kind != "run":
        source, own = siglip(golden, tmp_path / "pair"), {"model.scan": True, **OF_GOLDEN}
    if kind == "export":
        own["data.tokenizer"] = source
        export(source, source := tmp_path / "exported", "hf_pair")
        config = source / "tokenizer_config.json"
        assert config.read_bytes() != (own["data.tokenizer"] / config.name).read_bytes()
    started, state = begin(source, tmp_path / "new", **own)
    assert f"{source}: its text tower is taken" in caplog.text
    pretrained = read_pretrained(source)
    side = pretrained.read_text_side()
    images = RNG.uniform(-1, 1, (2, *pretrained.model.image_size, 3)).astype(np.float32)
    theirs = tree.unflatten_names(pretrained.params) | {"objective": side.variables["params"]}
    expected = logits(pretrained.model, side.matcher, theirs, images, IDS[:3])
    model = started.experiment.model
    part, facts = started.settings.objective, started.train_source.tokenizer.facts
    params = jax.tree.map(np.asarray, state.params)
    with jax.set_mesh(started.mesh):
        found = logits(model, part.make_matcher(model, facts), params, images, IDS[:3])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    own = {name for name in tree.flatten_names(params) if not name.startswith("head/")}
    assert {*started.initial_params} == own
    assert are_equal(started.tokenizer, {path.name: path.read_bytes() for path in side.files})


@pytest.mark.slow
def test_a_text_tower_of_another_tokenizer_or_shape_is_not_taken(golden, tmp_path, caplog):
    source = siglip(golden, tmp_path / "pair")
    other = {"data.tokenizer": golden / "tokenizer_clip", **OF_GOLDEN}
    started, state = begin(source, tmp_path / "new", **other)
    assert "the run has another tokenizer, so the text tower starts anew" in caplog.text
    assert not [name for name in started.initial_params if name.startswith("objective/")]
    assert state.params["objective"]["logit_bias"] == -10
    says = r"text_depth=1, but 2, objective.loss='softmax', but 'sigmoid'; set --config.obj.*h=2 --"
    with pytest.raises(InputError, match=says):
        wrong = {"objective.text_depth": 1, "objective.loss": "softmax"}
        begin(source, tmp_path / "other", **OF_GOLDEN | wrong)
    for file in ("spiece.model", "tokenizer_config.json"):
        (source / file).unlink()
    begin(source, tmp_path / "none", **OF_GOLDEN)
    assert "it has no tokenizer, so the text tower starts anew" in caplog.text


def test_a_text_tower_comes_from_another_source_without_its_projection(golden, run, tmp_path):
    source = siglip(golden, tmp_path / "pair")
    side = read_pretrained(source).read_text_side()
    keys = {"init_texts_from": source, **OF_GOLDEN, "objective.loss": "softmax"}
    started, state = begin("scratch", tmp_path / "new", **keys)
    expected = {f"objective/{name}": x for name, x in side.params.items()
                if name.startswith("text/") and not name.startswith("text/head/")}  # fmt: skip
    assert {*started.initial_params} == {*expected} and len(expected) > 20
    found = tree.flatten_names(state.params)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array[: len(found[name])], err_msg=name)
    assert started.tokenizer == {path.name: path.read_bytes() for path in side.files}
    with pytest.raises(InputError, match=r"^init_texts_from='.*' has another text tower: .*depth"):
        begin("scratch", tmp_path / "other", **keys | {"objective.text_depth": 1})
    images = {"init_texts_from": golden / "hf_vit", "data.tokenizer": None}
    with pytest.raises(InputError, match=r"init_texts_from='.*vit': the model has no text tower"):
        begin("scratch", tmp_path / "none", **images)


SMALL = {"model.depth": 1, "mesh.fsdp": 2}
SPLIT = {"mesh.tensor": 2, **SMALL}, (5e-6, 1e-5)
IN_BFLOAT16 = {"model.dtype": "bfloat16", **SMALL}, (5e-3, 5e-2)


@pytest.mark.parametrize(
    ("name", "keys", "bounds"),
    [
        ("siglip", *SPLIT),
        ("clip", *IN_BFLOAT16),
        pytest.param("siglip", *IN_BFLOAT16, marks=pytest.mark.slow),
        pytest.param("clip", *SPLIT, marks=pytest.mark.slow),
    ],
)
def test_a_step_on_8_devices_equals_the_whole_matrix_in_float32(
    one_device, tmp_path, name, keys, bounds
):
    """Bounds of the loss and of the distance of all gradients, both relative."""
    form = f"configs/{name}.py:debug"
    started, state, batch = asked.prepare_step(form, keys, one_device, tmp_path)
    e, part = started.experiment, started.settings.objective
    with jax.set_mesh(started.mesh):
        of = lambda p: e.objective.loss(p, state, batch, None, jax.random.key(0)).loss  # noqa: E731
        found, grads = jax.jit(jax.value_and_grad(of))(state.params)
    assert "tensor" not in str(keys) or "tensor" in str(jax.tree.map(lambda x: x.sharding, grads))
    tokens = state.params["objective"]["text"]["token_embedding"]["embedding"]
    assert tokens.sharding.spec == P(None, "fsdp")
    plain = with_known(e.model, dtype=jnp.float32, constrain=unconstrained, ops=PLAIN)
    matcher = part.make_matcher(plain, started.train_source.tokenizer.facts)
    images, texts, params = jax.device_get((batch["image"], batch["text"], state.params))

    def whole(params):
        features = plain.apply({"params": params}, images, method="features")
        logits = matcher.apply({"params": params["objective"]}, features, texts)
        if matcher.has_bias:
            return jax.nn.softplus(jnp.where(jnp.eye(32), -logits, logits)).sum() / 32
        return -sum(jnp.trace(jax.nn.log_softmax(logits, axis)) for axis in (0, 1)) / 64

    expected, expected_grads = jax.jit(jax.value_and_grad(whole))(params)
    assert float(found) == pytest.approx(float(expected), rel=bounds[0])
    both = [ravel_pytree(jax.device_get(each))[0] for each in (grads, expected_grads)]
    distance = jnp.linalg.norm(both[0] - both[1]) / jnp.linalg.norm(both[1])
    assert distance < bounds[1]


def test_the_log_counts_no_classes_of_images_without_labels(tmp_path, caplog):
    pixels = RNG.integers(0, 256, (32, 32, 32, 3), np.uint8)
    config = load_config("configs/siglip.py:debug")
    unknown = {"data.num_classes": None, "data.num_examples": None, "data.ops": "resize"}
    with arrays.give({"train": {"image": pixels, "caption": ["a dog"] * 32}}) as chosen:
        changes = [(key, str(value)) for key, value in (chosen | unknown).items()]
        assert apply_overrides(config, changes) == []
        started = asked.prepare(config, tmp_path)
    caplog.set_level("INFO", "vit_jax")
    describe(started)
    assert re.search(r"data: arrays\S+, examples: train 32", caplog.text)
