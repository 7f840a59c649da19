"""Every file in configs/, and the paper's table of pretraining recipes."""

import dataclasses
import fnmatch
import functools
import itertools
import re
import types

import jax
import numpy as np
import pytest
from asked import prepare
from etils import epath
from images import write_images
from opened import open_all, with_known_facts
from read_settings import data_and_evals, model_fields, settings_of, splits_of, teaching
from shipped_forms import CONFIGS, EVERY_FORM, FORMS, OF_EVALUATION, load, without_files

from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Pictures
from vit_jax.config import (
    FAMILIES,
    REQUIRED_TO_EVALUATE,
    Settings,
    base_config,
    eval_splits,
    flatten,
    image_hw,
)
from vit_jax.data import check_crops, parse_ops
from vit_jax.data.host_tf import tf
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.devices.chips import find_slice
from vit_jax.devices.flops import forward_macs
from vit_jax.devices.mesh import make_mesh
from vit_jax.experiment.experiment import make_experiment
from vit_jax.experiment.schedules import schedule_of
from vit_jax.inference import evaluate as evaluation
from vit_jax.models import create_model, fields_of, token_stride
from vit_jax.models.fields import field_names
from vit_jax.models.variants import Variant
from vit_jax.planning.calculated import calculate_plan
from vit_jax.planning.estimates import estimate
from vit_jax.planning.targets import Target
from vit_jax.run.setup.recipes import hyper_rule, make_tiny
from vit_jax.run.setup.sources import check_images, find_absent
from vit_jax.run.setup.validation import find_faults
from vit_jax.run.teachers import place_teachers, planned_experiment, read_teachers
from vit_jax.run.watch.replay import find_differences, inputs_program, replay_program
from vit_jax.studies.engine import Study, parse_entries
from vit_jax.transfer import huggingface_images, read_pretrained, timm_config, workdir
from vit_jax.transfer.pretrained import Cut, Pretrained, Spec, ops_for, preparation, with_resize
from vit_jax.transfer.source import Source


@pytest.fixture
def images(tmp_path):
    """A folder with twelve images of two classes, and beside it a list of them, list.csv."""
    classes = ["cat", "dog"] * 6
    names = [f"images/{name}/{i}.png" for i, name in enumerate(classes)]
    pixels = np.random.default_rng(0).integers(0, 256, (12, 70, 90, 3), dtype=np.uint8)
    write_images(tmp_path, dict(zip(names, pixels, strict=True)))
    rows = map(",".join, zip(names, classes, strict=True))
    (tmp_path / "list.csv").write_text("\n".join(["file,labels", *rows]))
    return str(tmp_path / "images")


def test_every_config_has_both_forms():
    for forms in (*FORMS.values(), OF_EVALUATION):
        assert any("debug" in form for form in forms) and any("debug" not in f for f in forms)


@pytest.mark.parametrize(("name", "words"), EVERY_FORM)
def test_config_is_valid(name, words):
    config = load(name, words)
    if config.objective.teacher == "":  # must be given
        (fault,) = find_faults(config)
        assert fault.startswith("objective.teacher='': needs a source")
        config.objective.teacher = "runs/teacher"
    if config.init_from == "":  # init_from must be given
        (fault,) = find_faults(config)
        assert fault.startswith("init_from: not set; give --config.init_from=SOURCE")
        config.init_from = "w.npz" if config.init_fields == "source" else "scratch"
    assert find_faults(config) == []
    assert Settings.of(config).to_config() == config


def test_debug_form_of_mae_goes_on_from_its_own_pretraining():
    """Both models have the same values of the fields that `init_from` compares."""
    models = [load("mae", words).model for words in ("debug", "finetune,debug", "linear,debug")]
    for model in models[1:]:
        changed = {key for key in model if model[key] != models[0][key]}
        assert changed <= {"stochastic_depth", "head_batch_norm"}


@pytest.mark.parametrize("words", OF_EVALUATION)
def test_evaluation_config_is_valid(words):
    assert find_faults(load("evaluate", words), REQUIRED_TO_EVALUATE) == []
    text = (CONFIGS / "evaluate.py").read_text()
    assert "evaluate --init_from=SOURCE --config=configs/evaluate.py:" in text
    assert "--config=configs/evaluate.py:debug" in text


@pytest.mark.parametrize("name", FORMS)
def test_config_file_says_how_to_run_it(name):
    text = (CONFIGS / f"{name}.py").read_text()
    assert re.search(rf"python -m vit_jax.main (study )?--config=configs/{name}\.py", text)
    assert re.search(rf"--config=configs/{name}\.py:(\S+,)?debug", text)


# The kinds of data: digits, prepared images, a folder, and views.
CHECKED = ("quickstart", "cifar10", "folder", "lejepa")


def debug_forms():
    """Every debug form, and whether its images and outputs are checked, which takes long.

    All forms are checked if slow tests run; without them the first form of each file runs.
    """
    for name, forms in FORMS.items():
        for i, words in enumerate(form for form in forms if "debug" in form):
            yield pytest.param(
                name, words, True, marks=pytest.mark.slow if i or name not in CHECKED else ()
            )
            if not i and name not in CHECKED:
                yield name, words, False


@pytest.mark.parametrize(("name", "words", "checked"), list(debug_forms()))
def test_debug_form_is_ready_to_run(name, words, checked, tmp_path, images, request):
    """Data, model and schedule are compatible and small."""
    if not checked:
        request.getfixturevalue("without_checks")
    config = load(name, words)
    if config.data.name in ("folder", "unlabelled"):
        config.data.data_dir = images
    elif config.data.name == "list":
        config.data.data_dir = str(tmp_path / "list.csv")
    run = prepare(config, epath.Path(tmp_path / "workdir"))
    assert run.experiment.total_steps <= 40
    assert run.experiment.num_params < 400_000
    assert not (tmp_path / "workdir").exists()
    for name, entry in run.settings.evals.items():
        assert set(eval_splits(run.settings.data, entry).values()) <= run.sources.keys()
        assert 0 < run.settings.durations[f"evals.{name}.every"] <= run.experiment.total_steps


# One form of each objective, in full and for debugging.
OF_OBJECTIVES = [("quickstart", "", "debug"), ("deit", "DeiT-B/16", "DeiT-S/16,debug"),
                 ("masked_patches", "ViT-B/16,imagenet2012,small_patch", "debug"),
                 ("mae", "ViT-B/16", "debug"), ("lejepa", "cifar10", "debug"),
                 ("dinov2", "", "debug"), ("siglip", "ViT-B/16", "debug"),
                 ("captions", "ViT-B/16", "debug")]  # fmt: skip
PLANNED_ALWAYS = ("quickstart",)


def in_layers(name, words, number, scan):
    """The experiment of a debug form with that number of layers, on one device."""
    c = without_files(name, words)
    fields = fields_of(c.model.name)
    c.model.update({key: value for key, value in (("depth", number), ("scan", scan or None))
                    if key in fields})  # fmt: skip
    mesh = make_mesh(replica=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    return planned_experiment(settings_of(c), mesh), c, mesh


def made_up_batch(experiment, c):
    rng = np.random.default_rng(0)
    batch = {key: rng.integers(0, 256, leaf.shape, np.uint8).astype(leaf.dtype)
             for key, leaf in experiment.abstract_batch.items()}  # fmt: skip
    if c.data.max_tokens is not None:
        grids = np.tile(np.int32([[1, c.data.max_tokens]]), (len(batch["mask"]), 1))
        batch["image"] = Pictures(batch["image"], grids)
    for name in {"mask", "text_mask"} & {*batch}:
        batch[name] = np.ones_like(batch[name])
    batch["label"] = (batch["label"] % c.data.num_classes).astype(batch["label"].dtype)
    if batch["label"].ndim == 2:
        batch["label"] = (batch["label"] < 2).astype(np.float32)
    return batch


@pytest.mark.parametrize("name", ["mae", pytest.param("dinov2", marks=pytest.mark.slow)])
def test_two_layers_are_traced_in_both_forms(name):
    for scan in (False, True):
        experiment, _, mesh = in_layers(name, "debug", 2, scan)
        with jax.set_mesh(mesh):
            assert experiment.flops_per_step > 0


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(("name", "words"), [form for form in EVERY_FORM if "debug" in form[1]])
def test_two_layers_train_in_both_forms(name, words, scan):
    experiment, c, mesh = in_layers(name, words, 2, scan)
    batch = made_up_batch(experiment, c)
    with jax.set_mesh(mesh):
        teachers = place_teachers(read_teachers(*teaching(c)), experiment.abstract_frozen)
        state = experiment.init()
        for _ in range(2):
            state, metrics = experiment.train_step(state, batch, *teachers)
    assert np.isfinite(metrics["loss"]) and int(state.step) == 2


@pytest.mark.parametrize(
    ("name", "words", "fsdp"),
    [
        *(pytest.param(name, words, 1, marks=pytest.mark.slow)
          for name, words in EVERY_FORM if "debug" in words),
        *(pytest.param(name, debug, 2, marks=pytest.mark.slow) for name, _, debug in OF_OBJECTIVES),
    ],
)  # fmt: skip
def test_healthy_devices_agree_in_a_replay(name, words, fsdp):
    """Bit by bit, whatever the transform rounds, and of gradients that are not all 0."""
    c = without_files(name, words)
    c.data.mean, c.data.std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    mesh = make_mesh(replica=1, data=8 // fsdp, fsdp=fsdp, tensor=1)
    experiment = planned_experiment(settings_of(c), mesh)
    shards = jax.tree.map(lambda leaf: leaf.sharding, experiment.abstract_batch)
    with jax.set_mesh(mesh):
        teachers = place_teachers(read_teachers(*teaching(c)), experiment.abstract_frozen)
        state = experiment.init()  # with a head of zeros, which passes no gradients
        state = state.replace(params=jax.tree.map(lambda p: p + 0.01, state.params))
        batch = jax.device_put(made_up_batch(experiment, c), shards)
        inputs = inputs_program(experiment, mesh)(state, batch)
        replay = replay_program(experiment, mesh)
        own, turned = (
            jax.device_get(replay(state, *inputs, np.bool_(turned), *teachers)) for turned in (0, 1)
        )
    assert find_differences(mesh, own, turned) == []
    of_gradients = [norm for name, norm in own[1].items() if name != "loss"]
    assert any(norm.all() for norm in of_gradients)


# The others have plans of small models in planning/test_plan.py.
@pytest.mark.parametrize(
    ("name", "words", "depth"),
    [
        *((name, full, 2) for name, full, _ in OF_OBJECTIVES if name in PLANNED_ALWAYS),
        *(pytest.param(name, words, None, marks=pytest.mark.slow)
          for name, words in EVERY_FORM if "debug" not in words),
    ],
)  # fmt: skip
def test_a_full_config_is_planned(name, words, depth):
    """In the scanned form; the work of a step is at least that of its gradients."""
    c = without_files(name, words)
    c.model.depth = depth or c.model.depth
    figures = calculate_plan(settings_of(c), Target(find_slice("H100:2")))
    flops = figures["flops"]
    assert 2 * flops["forward_macs_per_image"] <= flops["model_per_image_by_jaxpr"]
    assert flops["model_per_step"] <= 1.001 * flops["counted_per_step"]
    assert estimate(figures, None)["roofline"]["mfu"] <= 1.001


def on_pixels(ops):
    return tuple(repr(op) for op in ops if op.name != "decode")


def prepared_by(spec, source, folder):
    """(by whom, host ops, rule) of the commands for a run's spec, and its exports' specs."""
    timm_config.write(epath.Path(folder), {}, {}, spec)
    pixels = huggingface_images.write_pixels(spec)
    specs = {
        "run": spec,
        "timm": timm_config.Config(Source(epath.Path(folder))).read_spec(
            spec.image_size, None, "antialiased"
        ),
        "hf": huggingface_images.with_patches(spec, pixels, spec.rule.patch_size, "hf")
        if spec.rule else huggingface_images.with_pixels(spec, pixels, False, "hf"),
    }  # fmt: skip
    config = load("evaluate", "classification,debug")
    (key,) = splits_of(config, "classification").values()
    for name, found in specs.items():
        pretrained = Pretrained(name, None, {}, found)
        prepared, rule = preparation(found, source.image_shape)
        yield f"{name}: predict, label", parse_ops(prepared, found.image_size)[0], rule
        config.data.image_size, config.evals.classification.ops = found.image_size, ""
        config.data.max_tokens = rule and rule.most  # as `complete_by_source` sets it
        settings = settings_of(config)
        evals = evaluation.with_ops(settings.data, settings.evals, pretrained, {key: source})
        settings = dataclasses.replace(settings, evals=evals)
        yield f"{name}: evaluate", parse_preprocessing(settings).eval_ops["classification"], rule


def test_every_command_prepares_images_as_the_evaluators_of_a_run_do(tmp_path):
    of_one_size = {"digits": (8, 8, 3), "cifar10": (32, 32, 3)}
    (tmp_path / "classes.json").write_text("null")
    cases = {}
    for name, words in [*EVERY_FORM, ("folder", "multilabel"), ("folder", "multilabel,debug")]:
        config = load(name, words)
        config.data.image_size = config.data.image_size or 32  # of the weights
        if config.objective.teacher == "":
            config.objective.teacher = "runs/mine"
        config.data.patch_size = config.data.max_tokens and 16  # of the model
        size = image_hw(config.data.image_size)
        shape = (*size, 3) if config.data.name == "synthetic" else of_one_size.get(config.data.name)
        model = types.SimpleNamespace(image_size=size, num_classes=None)
        settings = settings_of(config)
        evals = [*settings.evals.values()]
        spec = workdir._spec_of(
            settings.data, evals, settings.loss.name, model, epath.Path(tmp_path)
        )
        eval_ops = parse_preprocessing(settings).eval_ops
        own = {on_pixels(eval_ops[n]) for n, e in config.evals.items() if e.data_name is None}
        if own:  # siglip and clip measure other data only
            cases[spec, shape, *own] = f"{name}:{words}"
    for i, ((spec, shape, own), case) in enumerate(cases.items()):
        source = types.SimpleNamespace(image_shape=shape)
        squashed = on_pixels(parse_ops(with_resize("decode"), spec.image_size)[0])
        for command, ops, rule in prepared_by(spec, source, tmp_path / str(i)):
            is_vit = command.startswith("timm")  # of one size; a NaFlexVit takes pictures
            assert rule == (None if is_vit else spec.rule), (case, command)
            squashes = spec.rule is not None and is_vit
            assert on_pixels(ops) == (squashed if squashes else own), (case, command)
            assert shape or ops[0].takes_encoded, (case, command)


# Images of these shapes are evaluated.
SHAPES = [(300, 400), (400, 300), (37, 90)]


@pytest.fixture(scope="module")
def evaluation_ops():
    """The ops of all evaluators of all configs."""
    configs = [load(*form) for form in EVERY_FORM]
    configs += [load("evaluate", words) for words in OF_EVALUATION]
    return {entry.ops for c in configs for entry in c.evals.values()}


@pytest.mark.parametrize("image_size", [(224, 224), (160, 256)])
def test_no_pixel_of_an_evaluated_image_is_padding(image_size, evaluation_ops):
    """A white image stays white, for every config at every size."""
    cuts = [None, *(Cut(share, mode) for share in (0.875, 1.0) for mode in ("center", "squash"))]
    published = {ops_for(Spec(image_size, "antialiased", cut=cut)) for cut in cuts}
    for string in evaluation_ops | published:
        check_crops(parse_ops(string, image_size)[0], string)
        for shape in SHAPES:
            image = tf.fill((*shape, 3), tf.constant(255, tf.uint8))
            for op in parse_ops(string, image_size)[0]:
                image = op(image, [0, 0])
            assert image.numpy().min() == 255, string
            assert image.shape[:2] in (image_size, shape), string


@pytest.mark.parametrize(
    ("name", "words"),
    [("pretrain", "ViT-B/16,jft=x,fewshot"), ("augreg", "ViT-B/16,imagenet2012,none"),
     ("vit_s16_in1k", "")],
)  # fmt: skip
def test_evaluated_pixels_at_224_are_those_of_a_resize_to_256(name, words):
    """As in the published recipes, and in earlier versions of the configs."""
    for entry in load(name, words).evals.values():
        for shape in SHAPES:
            y, x = np.mgrid[: shape[0], : shape[1]]
            pixels = np.stack([y * x, 3 * x, y + 7 * x], -1).astype(np.uint8)
            ours, published = (
                functools.reduce(lambda image, op: op(image, [0, 0]), parse_ops(ops, (224, 224))[0],
                                 tf.constant(pixels))
                for ops in (entry.ops, "decode|resize_small(256)|central_crop(224)")
            )  # fmt: skip
            np.testing.assert_array_equal(ours, published)


def without_braces(form):
    """A{B C}D as ABD and ACD."""
    start, brace, rest = form.partition("{")
    choices, _, end = rest.partition("}")
    if not brace:
        return [form]
    return [f for choice in choices.split() for f in without_braces(start + choice + end)]


def read_recipes():
    """(config's name, words, {key: value}) of each form of recipes.txt, which says how it is read.

    A form has each key once.
    """
    rules = []
    for paragraph in (CONFIGS.parent / "tests/recipes.txt").read_text().split("\n\n"):
        lines = [line for line in paragraph.splitlines() if not line.startswith("#")]
        heads = {form for line in lines if line[0] != " " for form in without_braces(line)}
        rules.append((heads, [line.strip().split(" = ", 1) for line in lines if line[0] == " "]))
    for form in sorted({form for heads, _ in rules for form in heads if "*" not in form}):
        name, words = form.split(":")
        fits = functools.partial(fnmatch.fnmatchcase, form)
        lines = [line for heads, lines in rules if any(map(fits, heads)) for line in lines]
        keys = {key: eval(text, {"FIRST": words.partition(",")[0]}) for key, text in lines}
        assert len(keys) == len(lines), form
        yield name, words, keys


@pytest.mark.parametrize(("name", "words", "keys"), list(read_recipes()))
def test_recipe_is_the_papers(name, words, keys):
    c = load(name, words)
    found = flatten(c)
    assert {key: found[key] for key in keys} == keys
    if name in ("pretrain", "augreg", "vit_s16_in1k"):
        assert find_faults(c) == []


def test_evaluators_of_evaluation():
    assert list(load("evaluate", "probe,vtab/dtd,knn").evals) == ["knn", "probe"]
    assert list(load("evaluate").evals) == ["fewshot", "knn", "probe"]


@pytest.mark.parametrize(
    ("words", "num_classes", "num_examples", "steps", "num_params"),
    [
        # 90 * 14,147,841 / 4096 = 310,865.8
        (("pretrain", "ViT-B/16,imagenet21k"), 21_843, 14_147_841, 310_866,
         85_798_656 + 768 * 769 + 769 * 21_843),
        # 3 * 50,000 / 128 = 1171.9
        (("cifar10", "small"), 10, 50_000, 1172, 1_217_930),
    ],
)  # fmt: skip
def test_recipe_becomes_an_experiment(words, num_classes, num_examples, steps, num_params):
    c = load(*words)
    c.data.num_classes, c.data.num_examples = num_classes, num_examples
    e = make_experiment(settings_of(c), make_mesh(replica=1, data=-1, fsdp=1, tensor=1))
    assert (e.total_steps, e.num_params) == (steps, num_params)
    peak, warmup = c.optimizer.peak_lr, settings_of(c).durations["schedule.warmup"]
    np.testing.assert_allclose(float(e.schedule(warmup / 2)), peak / 2, rtol=1e-6)
    np.testing.assert_allclose(float(e.schedule(warmup)), peak, rtol=1e-6)
    np.testing.assert_allclose(float(e.schedule((warmup + steps) / 2)), peak / 2, rtol=1e-5)


def test_better_plain_vit_trains_as_long_as_published():
    c = with_known_facts(load("vit_s16_in1k"))
    assert c.data.num_examples == 1_268_355
    assert settings_of(c).durations["duration"] == 111_477  # 90 * 1,268,355 / 1024 = 111,476.5


def test_words_of_pretraining_in_any_place():
    expected = load("pretrain", "ViT-L/16,imagenet21k,30ep,debug")
    for words in ("debug,ViT-L/16,30ep,imagenet21k", "30ep,debug,ViT-L/16,imagenet21k"):
        assert load("pretrain", words) == expected
    assert expected.model.name == "ViT-mu/16"


@pytest.mark.parametrize(
    ("words", "model", "image_size"),
    [
        ("", "ViT-Ti/8", 64),
        ("debug,ViT-B/32", "ViT-mu/32", 64),
        *((name, name, 224) for name in (FAMILIES.find(key).names[-1] for key in FAMILIES)),
        *((f"{name},debug", None, None)
          for name in ("EfficientNet-B0", "BiT-R50x1", "T2T-ViT-7", "Axial-ViT-B/32")),
    ],
)  # fmt: skip
def test_folder_takes_every_family(words, model, image_size):
    c = load("folder", words)
    assert model is None or (c.model.name, c.data.image_size) == (model, image_size)
    create_model(c.model.name, 2, c.data.image_size, **model_fields(c))


@pytest.mark.parametrize("name", ["mae", "dino", "ibot", "lejepa", "selfsup"])
def test_self_supervision_measures_what_own_images_allow(name, images):
    """Without folders of classes there are no neighbours; in each layout all images are trained."""
    c = load(name, "folder,debug")
    c.data.data_dir = images
    assert find_absent(settings_of(c), training=True) == {}
    opened, sources = open_all(c)
    assert opened.data.num_examples == 12 and "near" in opened.evals
    assert {"folder val", "folder train"} <= {f"{key.data_name} {key.split}" for key in sources}
    c.data.data_dir = f"{images}/cat"
    assert (
        {"evals.near"}
        <= {*find_absent(settings_of(c), training=True)}
        <= {"evals.near", "evals.images"}
    )


def test_folder_at_another_image_size(images):
    """The ops follow data.image_size, in training and in evaluation."""
    c, image_size = load("folder", "debug"), (96, 64)
    c.data.image_size, c.data.data_dir, c.global_batch_size = image_size, images, 8
    assert find_faults(c) == []
    c, sources = open_all(c)
    assert (c.data.num_classes, c.data.num_examples) == (2, 10)
    check_images(*data_and_evals(c), parse_preprocessing(settings_of(c)), sources)


def test_the_two_arms_of_5k_differ_in_their_ops_only():
    plain, medium1 = load("cifar10", "5k"), load("cifar10", "5k,medium1")
    medium1.data.ops = plain.data.ops
    assert plain == medium1


@pytest.mark.parametrize("word", ["fast", "hour"])
def test_choices_are_made_on_a_tenth_of_train(word):
    """The test split is read once, at the end, by the recipe that trains on all of train."""
    whole, choosing = load("cifar10", word), load("cifar10", f"{word},held_out")
    (entry,) = choosing.evals.values()
    assert (choosing.data.split, entry.split) == ("train[:90%]", "train[90%:]")
    assert (whole.data.split, [*whole.evals]) == ("train", ["test"])
    assert (whole.evals.test.split, whole.evals.test.every) == ("test", "100 %")
    choosing.data.split, entry.split, choosing.evals = "train", "test", {"test": entry}
    assert whole == choosing
    with pytest.raises(InputError, match="held_out goes without 5k"):
        load("cifar10", "5k,held_out")


@pytest.mark.parametrize("word", ["fast", "hour"])
def test_blocks_hold_most_of_the_flops(word):
    c = load("cifar10", word)
    model = create_model(c.model.name, 10, 32, **model_fields(c))
    tokens, matrices = model.num_tokens_in_training, 4 * model.width + 2 * model.mlp_dim
    blocks = model.depth * tokens * model.width * (matrices + 2 * tokens)
    assert model.depth >= 6 and blocks >= 0.6 * forward_macs(model.clone(keep_tokens=1.0))


SMALL = (160, 128, 500, 100, (200, 300, 400), None)
MIDDLE = (10_000, 500, (3_000, 6_000, 9_000), 0.1)
LARGE = (20_000, 500, (6_000, 12_000, 18_000), 0.1)


@pytest.mark.parametrize(
    ("num_examples", "image_size", "rule"),
    [
        (19_999, (95, 96), SMALL),
        (19_999, (96, 96), (512, 480, *SMALL[2:])),
        (20_000, (32, 32), (160, 128, *MIDDLE)),
        (20_000, (64, 144), (512, 480, *MIDDLE)),  # 96 * 96 pixels
        (499_999, (375, 500), (512, 480, *MIDDLE)),
        (500_000, (375, 500), (512, 480, *LARGE)),
        (500_000, (28, 28), (160, 128, *LARGE)),
    ],
)
def test_hyper_rule(num_examples, image_size, rule):
    assert hyper_rule(num_examples, image_size) == rule


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        ("cifar10", (160, 128, *MIDDLE)),
        ("cifar100", (160, 128, *MIDDLE)),
        ("oxford_iiit_pet", (512, 480, *SMALL[2:])),
        ("oxford_flowers102", (512, 480, *SMALL[2:])),
        ("imagenet2012", (512, 480, *LARGE)),
    ],
)
def test_a_bit_is_fine_tuned_by_its_rule(data, rule):
    resize, crop, steps, warmup, milestones, mixup = rule
    c = load("finetune", f"BiT-R50x1,{data}")
    assert (c.model.name, c.duration, c.data.image_size) == ("BiT-R50x1", f"{steps} steps", crop)
    mixing = f"|mixup({mixup})" if mixup else ""
    assert c.data.ops == f"decode|resize(crop={crop / resize})|random_crop|flip{mixing}"
    assert parse_ops(c.data.ops, (crop, crop))[0][1].gives == (resize, resize)
    assert c.evals.test.ops == "decode|resize"
    optimizer = c.optimizer
    assert (optimizer.name, optimizer.peak_lr, c.global_batch_size) == ("sgd", 0.003, 512)
    assert (optimizer.momentum, optimizer.weight_decay, optimizer.grad_clip_norm) == (None, 0, None)
    c.init_from = "bit.npz"
    schedule = schedule_of(settings_of(with_known_facts(c)))
    bounds = (warmup, *milestones, steps)
    for k, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for step in (begin, end - 1):
            np.testing.assert_allclose(float(schedule(step)), 0.003 / 10**k, rtol=1e-5)
    np.testing.assert_allclose(float(schedule(warmup // 2)), 0.0015, rtol=1e-6)
    study = load("finetune_study", f"BiT-R50x1,{data}").study
    assert (study.peak_lrs, study.seeds) == ((0.003,), 3)


@pytest.mark.parametrize(
    ("name", "tiny", "side"),
    [
        ("ViT-L/14", "ViT-mu/14", 28),
        ("DeiT-B/16", "DeiT-mu/16", 32),
        ("R50+ViT-B/32", "R50+ViT-mu/32", 64),
        ("R+ViT-Ti/16", "R+ViT-mu/16", 64),
        ("BiT-R152x4", "BiT-R152x4", 64),
        ("Axial-ViT-B/32", "Axial-ViT-mu/32", 64),
        ("T2T-ViT-14", "T2T-ViT-14", 32),
        ("ViTC-18GF", "ViTC-18GF", 32),
    ],
)
def test_tiny_models_have_the_tokens_of_their_family(name, tiny, side):
    c = base_config()
    assert make_tiny(c.model, name) == side
    assert c.model.name == tiny
    model = create_model(c.model.name, 10, side, **model_fields(c))
    if "BiT" in name:
        assert model.stages == (1,)
        return
    assert model.grid == (2, 2) and model.token_stride == token_stride(name)
    assert (model.width, model.depth) == (32, 1)
    stages = {"R50": (1,), "R": ()}.get(name.partition("+")[0])
    assert stages is None or model.stages == stages


def test_cells_of_the_ablation_are_those_of_table_8_and_more():
    cells = parse_entries("cells", load("position_ablation").study.cells)
    assert {*cells} == {
        ("no positions", "stem"),
        *((row, column) for row in ("1-D", "2-D")
          for column in ("stem", "every layer", "every layer, shared")),
        ("relative", "every layer"), ("relative", "every layer, shared"),
        ("sine-cosine", "stem"), ("sine-cosine", "every layer"),
    }  # fmt: skip


def test_blocks_of_today_are_the_published_ones_and_cost_the_same(golden):
    c = load("blocks_of_today")
    study, costs = Study.of(c), {}
    for (name, _), changes in study.entries["cells"].items():
        own = study.config_of(changes)
        model = create_model(own.model.name, 10, 32, **model_fields(own))
        assert (name == "plain ViT") == (model.layer_scale is None)
        if published := {"DeiT III": "timm_deit3", "ViT-5": "vit5"}.get(name):
            theirs = read_pretrained(golden / f"{published}.safetensors").model
            sizes = {"num_classes", "image_size", "patch_size", *Variant._fields, "layer_scale"}
            of_blocks = {*field_names(type(model))} - sizes  # the start of the scale is in no file
            assert {f for f in of_blocks if getattr(model, f) != getattr(theirs, f)} == set()
        costs[name] = model.flops_by_sizes * int(own.duration.partition(" ")[0])
    assert max(costs.values()) < 1.001 * min(costs.values())


@pytest.mark.parametrize("words", ["folder", "ViT-B/16,folder,lora", "list", "multilabel"])
def test_debug_form_of_fine_tuning_keeps_your_own_images(words):
    full, debug = load("finetune", words), load("finetune", f"{words},debug")
    for key in ("data.name", "data.ops", "data.multi_label", "loss.name", "evals.val.ops"):
        assert flatten(debug)[key] == flatten(full)[key]
    assert debug.evals.val.every == debug.evals.test.every == "10 steps"


def test_head_only_trains_the_head():
    c = load("finetune", "ViT-B/16,cifar10,head_only")
    assert re.fullmatch(c.optimizer.freeze, "encoder/layer_0/mlp/up/kernel")
    for head in ("head/kernel", "head_distillation/bias"):
        assert not re.fullmatch(c.optimizer.freeze, head)
