"""Every file in configs/, and the paper's table of pretraining recipes."""

import functools
import itertools
import pathlib
import re
import types

import jax
import numpy as np
import pytest
from etils import epath
from opened import open_all, with_known_facts
from PIL import Image

from vit_jax.config import (
    REQUIRED_TO_EVALUATE,
    base_config,
    eval_splits,
    image_hw,
    model_fields,
)
from vit_jax.config.text import load_config
from vit_jax.data import check_crops, parse_ops
from vit_jax.data.host_tf import tf
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.devices.chips import find_slice
from vit_jax.devices.mesh import make_mesh
from vit_jax.errors import InputError
from vit_jax.experiment.durations import parse_durations
from vit_jax.experiment.experiment import make_experiment
from vit_jax.experiment.schedules import make_config_schedule
from vit_jax.inference import evaluate as evaluation
from vit_jax.inference import predict as prediction
from vit_jax.models import MODELS, create_model, fields_of, token_stride
from vit_jax.planning.calculated import calculate_plan
from vit_jax.planning.estimates import estimate
from vit_jax.planning.targets import Target
from vit_jax.recipes import VTAB, hyper_rule, make_tiny
from vit_jax.run.build import prepare
from vit_jax.run.opener import Tables
from vit_jax.run.resolve import resolve
from vit_jax.run.sources import check_images
from vit_jax.run.teachers import place_teachers, planned_experiment, read_teachers
from vit_jax.run.validation import find_faults
from vit_jax.studies.grid import parse_cells
from vit_jax.transfer import huggingface_images, timm_config, workdir
from vit_jax.transfer.images import ops_for
from vit_jax.transfer.pretrained import Cut, Pretrained, Spec

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"

# For every file: the words of its full form, and of its debug form.
FORMS = {
    "quickstart": ["", "debug"],
    "pretrain": [
        "ViT-B/16,imagenet2012",
        "ViT-L/16,imagenet21k,debug",
        "ViT-B/16,jft=mine,fewshot,debug",
        "BiT-R152x2,jft=mine,debug",
        "R50+ViT-L/32,jft=mine,debug",
    ],
    "cifar10": ["", "small", "5k", "5k,medium1", "debug", "small,debug", "5k,strong2,debug"],
    "folder": ["", "ViT-S/16", "BiT-R50x1", "debug", "ViT-S/16,debug", "BiT-R50x1,debug"],
    "vit_s16_in1k": ["", "debug"],
    "noisy_student": ["", "L2,my_pictures", "debug"],
    "distillation": ["bit", "large", "bit=runs/bit,large=runs/large", "debug", "bit,debug"],
    "deit": ["DeiT-B/16", "ViT-S/16", "DeiT-S/16,debug", "DeiT-Ti/16,384,soft,debug"],
    "efficientnet": ["EfficientNet-B0", "EfficientNet-L2", "EfficientNet-B7,debug"],
    "finetune": [
        "ViT-B/16,cifar10",
        "ViT-H/14,imagenet2012,headline",
        "ViT-B/16,cifar10,debug",
        "ViT-B/16,cifar10,head_only,debug",
        "BiT-R50x1,cifar10",
        "BiT-R50x1,cifar10,debug",
        "R26+ViT-S/32,imagenet2012,headline",
        "R50+ViT-B/16,cifar10,debug",
        "ViT-B/16,folder",
        "ViT-B/16,folder,last4",
        "DeiT-B/16,folder,head_only",
        "ViT-B/16,cifar10,lora16",
        "ViT-B/16,folder,lora,debug",
        "ViT-B/16,folder,last4,debug",
    ],
    "finetune_study": [
        "ViT-L/32,oxford_flowers102",
        "ViT-B/16,cifar10,debug",
        "BiT-R101x3,oxford_iiit_pet",
    ],
    "finetune_parts": ["", "choose", "debug"],
    "vtab": ["ViT-H/14", "ViT-B/16,debug", "BiT-R50x3", "BiT-R50x1,debug"],
    "position_ablation": ["", "debug"],
    "lejepa": ["", "cifar10", "digits", "debug"],
    "selfsup_study": ["", "debug"],
    "bit_and_vit": ["", "debug"],
    "data_size": ["tuned", "fixed", "tuned,debug", "fixed,debug"],
    "scaling": ["", "debug"],
    "adam_or_sgd": ["", "debug"],
    "token_or_mean": ["", "debug"],
    "vit_shapes": ["", "debug"],
    "five_classes": ["", "pretrain", "debug", "pretrain,debug"],
    "dino": ["", "cifar10", "debug"],
    "dinov2": ["", "own_head,sinkhorn", "debug"],
    "selfsup": ["ViT-S/16", "ViT-B/14,folder", "ViT-S/16,debug", "ViT-S/16,folder,debug"],
    "mae": [
        "ViT-B/16",
        "ViT-L/16,finetune",
        "ViT-H/14,1600ep",
        "ViT-B/16,linear",
        "cifar10",
        "cifar10,finetune",
        "debug",
        "finetune,debug",
        "linear,debug",
    ],
    "masked_patches": [
        "ViT-B/16,jft=mine",
        "ViT-B/16,imagenet2012,small_patch",
        "ViT-B/16,imagenet2012,finetune",
        "cifar10,pixels",
        "debug",
        "pixels,debug",
    ],
    "augreg": [
        "ViT-B/16,imagenet2012,none",
        "ViT-B/16,imagenet21k,medium1,debug",
        "R26+ViT-S/32,imagenet21k,light1,debug",
    ],
}


# Configs for `evaluate`, which do not describe a run.
EVALUATION_FORMS = {
    "evaluate": ["cifar10", "real,classification,imagenet2012", "shifts,objectnet", "debug"]
}


def load(name, words=""):
    return load_config(f"{CONFIGS / name}.py" + (f":{words}" if words else ""))


def refusal(name, words):
    with pytest.raises(InputError) as e:
        load(name, words)
    return str(e.value)


@pytest.fixture
def pictures(tmp_path):
    """A folder with twelve images of two classes."""
    rng = np.random.default_rng(0)
    for i in range(12):
        path = tmp_path / "pictures" / ("cat", "dog")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (70, 90, 3), dtype=np.uint8)).save(path)
    return str(tmp_path / "pictures")


def test_every_config_is_tested():
    forms_of = FORMS | EVALUATION_FORMS
    assert {path.stem for path in CONFIGS.glob("*.py")} == forms_of.keys()
    for forms in forms_of.values():
        assert any("debug" in form for form in forms) and any("debug" not in f for f in forms)


@pytest.mark.parametrize(("name", "words"), [(n, w) for n, forms in FORMS.items() for w in forms])
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


def test_debug_form_of_mae_goes_on_from_its_own_pretraining():
    """Both models have the same values of the fields that `init_from` compares."""
    models = [load("mae", words).model for words in ("debug", "finetune,debug", "linear,debug")]
    for model in models[1:]:
        changed = {key for key in model if model[key] != models[0][key]}
        assert changed <= {"stochastic_depth", "head_batch_norm"}


@pytest.mark.parametrize(
    ("name", "words"), [(n, w) for n, forms in EVALUATION_FORMS.items() for w in forms]
)
def test_evaluation_config_is_valid(name, words):
    config = load(name, words)
    assert find_faults(config, REQUIRED_TO_EVALUATE) == []
    text = (CONFIGS / f"{name}.py").read_text()
    assert f"evaluate --init_from=SOURCE --config=configs/{name}.py:" in text
    assert f"--config=configs/{name}.py:debug" in text


def test_words_of_evaluation():
    config = load("evaluate", "probe,vtab/dtd,knn")
    assert list(config.evals) == ["knn", "probe"]
    entry = config.evals.probe
    assert (config.data.name, entry.train_split, entry.test_split) == (
        "vtab/dtd", "train800val200", "test",
    )  # fmt: skip
    assert load("evaluate", "real,imagenet2012").evals.real.split == "validation"
    assert list(load("evaluate").evals) == ["fewshot", "knn", "probe"]
    message = refusal("evaluate", "knn,cifar10,cifar100")
    assert "unknown word 'cifar100'; known words: DATA: a data set; classification: " in message
    assert "unknown word 'fewsht'; did you mean fewshot?" in refusal("evaluate", "fewsht,cifar10")


@pytest.mark.parametrize("name", FORMS)
def test_config_file_says_how_to_run_it(name):
    text = (CONFIGS / f"{name}.py").read_text()
    assert re.search(rf"python -m vit_jax.main (study )?--config=configs/{name}\.py", text)
    assert re.search(rf"--config=configs/{name}\.py:(\S+,)?debug", text)


# The kinds of data: digits, prepared pictures, a folder, and views.
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
def test_debug_form_is_ready_to_run(name, words, checked, tmp_path, pictures, request):
    """Data, model and schedule are compatible and small."""
    if not checked:
        request.getfixturevalue("without_checks")
    config = load(name, words)
    if config.data.name in ("folder", "unlabelled"):
        config.data.data_dir = pictures
    run = prepare(config, epath.Path(tmp_path / "workdir"))
    assert run.experiment.total_steps <= 40
    assert run.experiment.num_params < 400_000
    assert not (tmp_path / "workdir").exists()
    for name, entry in run.config.evals.items():
        assert set(eval_splits(run.config, entry).values()) <= run.sources.keys()
        assert 0 < run.experiment.durations[f"evals.{name}.every"] <= run.experiment.total_steps


# One form of each objective, in full and for debugging.
OF_OBJECTIVES = [("quickstart", "", "debug"), ("deit", "DeiT-B/16", "DeiT-S/16,debug"),
                 ("masked_patches", "ViT-B/16,imagenet2012,small_patch", "debug"),
                 ("mae", "ViT-B/16", "debug"), ("lejepa", "cifar10", "debug"),
                 ("dinov2", "", "debug")]  # fmt: skip


def without_files(name, words):
    """A config with numbers in place of what it would read of data, weights and teachers."""
    c = load(name, words)
    c.init_from, c.init_fields = None, "config"
    c.data.num_classes, c.data.num_examples = c.data.num_classes or 10, 10**7
    c.data.image_size = c.data.image_size or 224
    if c.objective.name == "distillation":
        c.objective.teacher = "untrained:BiT-R50x1"
    return resolve(c, Tables()).config


def in_layers(name, words, number, scan):
    """The experiment of a debug form with that number of layers, on one device."""
    c = without_files(name, words)
    fields = fields_of(c.model.name)
    c.model.update({key: value for key, value in (("depth", number), ("scan", scan or None))
                    if key in fields})  # fmt: skip
    mesh = make_mesh(replica=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    return planned_experiment(c, mesh), c, mesh


@pytest.mark.parametrize(("name", "words"), [(name, debug) for name, _, debug in OF_OBJECTIVES])
def test_two_layers_are_traced_in_both_forms(name, words):
    for scan in (False, True):
        experiment, _, mesh = in_layers(name, words, 2, scan)
        with jax.set_mesh(mesh):
            assert experiment.flops_per_step > 0


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize(
    ("name", "words"), [(n, w) for n, forms in FORMS.items() for w in forms if "debug" in w]
)
def test_two_layers_train_in_both_forms(name, words, scan):
    experiment, c, mesh = in_layers(name, words, 2, scan)
    rng = np.random.default_rng(0)
    batch = {key: rng.integers(0, 256, leaf.shape, np.uint8).astype(leaf.dtype)
             for key, leaf in experiment.abstract_batch.items()}  # fmt: skip
    batch["mask"] = np.ones_like(batch["mask"])
    batch["label"] = (batch["label"] % c.data.num_classes).astype(batch["label"].dtype)
    if batch["label"].ndim == 2:
        batch["label"] = (batch["label"] < 2).astype(np.float32)
    with jax.set_mesh(mesh):
        teachers = place_teachers(read_teachers(c), experiment.abstract_frozen)
        state = experiment.init()
        for _ in range(2):
            state, metrics = experiment.train_step(state, batch, *teachers)
    assert np.isfinite(metrics["loss"]) and int(state.step) == 2


FULL_OF_OBJECTIVES = [(name, full) for name, full, _ in OF_OBJECTIVES]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *FULL_OF_OBJECTIVES,
        *(pytest.param(name, words, marks=pytest.mark.slow)
          for name, forms in FORMS.items() for words in forms
          if "debug" not in words and (name, words) not in FULL_OF_OBJECTIVES),
    ],
)  # fmt: skip
def test_a_full_config_is_planned(name, words):
    """In the scanned form; the work of a step is at least that of its gradients."""
    figures = calculate_plan(without_files(name, words), Target(find_slice("H100:2")))
    flops = figures["flops"]
    assert 2 * flops["forward_macs_per_image"] <= flops["model_per_image_by_jaxpr"]
    assert flops["model_per_step"] <= 1.001 * flops["counted_per_step"]
    assert estimate(figures, None)["roofline"]["mfu"] <= 1.001


@pytest.mark.parametrize("name", ["quickstart", "cifar10", "folder", "vit_s16_in1k"])
def test_unknown_word_names_those_known(name):
    words = "ViT-S/16,huge,debug" if name == "folder" else "debug,huge"
    message = refusal(name, words)
    assert "'huge'" in message and "debug: " in message


def on_pixels(ops):
    return tuple((op.name, op.arguments) for op in ops if op.name != "decode")


def prepared_by(spec, source, folder):
    """(by whom, host ops) of the commands for a run's spec, and for those of its exports."""
    model = types.SimpleNamespace(image_size=spec.image_size, num_classes=None)
    timm_config.write(folder, {}, {}, spec)
    pixels = huggingface_images.write_pixels(spec)
    specs = {
        "run": spec,
        "timm": timm_config.read_spec(timm_config.read_config(folder), model, "timm"),
        "hf": huggingface_images.with_pixels(spec, pixels, False, "hf"),
    }
    config = load("evaluate", "classification,debug")
    (key,) = eval_splits(config, config.evals.classification).values()
    for name, found in specs.items():
        pretrained = Pretrained(name, None, {}, found)
        yield f"{name}: predict, figures, label", prediction._host_ops(pretrained, source)
        config.data.image_size, config.evals.classification.ops = found.image_size, ""
        evaluation.fill_in_ops(config, pretrained, {key: source})
        yield f"{name}: evaluate", parse_preprocessing(config).eval_ops["classification"]


def test_every_command_prepares_images_as_the_evaluators_of_a_run_do(tmp_path):
    forms = [(name, words) for name, all_words in FORMS.items() for words in all_words]
    of_one_size = {"digits": (8, 8, 3), "cifar10": (32, 32, 3)}
    (tmp_path / "classes.json").write_text("null")
    cases = {}
    for name, words in [*forms, ("folder", "multilabel"), ("folder", "multilabel,debug")]:
        config = load(name, words)
        config.data.image_size = config.data.image_size or 32  # of the weights
        size = image_hw(config.data.image_size)
        shape = (*size, 3) if config.data.name == "synthetic" else of_one_size.get(config.data.name)
        model = types.SimpleNamespace(image_size=size, num_classes=None)
        spec = workdir._spec_of(config, model, epath.Path(tmp_path))
        eval_ops = parse_preprocessing(config).eval_ops
        own = {on_pixels(eval_ops[n]) for n, e in config.evals.items() if e.data_name is None}
        cases[spec, shape, *own] = f"{name}:{words}"
    for i, ((spec, shape, own), case) in enumerate(cases.items()):
        source = types.SimpleNamespace(image_shape=shape)
        for command, ops in prepared_by(spec, source, tmp_path / str(i)):
            assert on_pixels(ops) == own, (case, command)
            assert shape or ops[0].takes_encoded, (case, command)


# The paper's table 3, typed independently: model, data, epochs (the config's default first),
# base learning rate, decay, weight decay, dropout (a ResNet has none).
TABLE_3 = [
    ("ViT-B/16", "jft", (7,), 8e-4, "linear", 0.1, 0.0),
    ("ViT-B/32", "jft", (7,), 8e-4, "linear", 0.1, 0.0),
    ("ViT-L/32", "jft", (7,), 6e-4, "linear", 0.1, 0.0),
    ("ViT-L/16", "jft", (7, 14), 4e-4, "linear", 0.1, 0.0),
    ("ViT-H/14", "jft", (14,), 3e-4, "linear", 0.1, 0.0),
    ("ViT-B/16", "imagenet21k", (90,), 1e-3, "linear", 0.03, 0.1),
    ("ViT-B/32", "imagenet21k", (90,), 1e-3, "linear", 0.03, 0.1),
    ("ViT-L/16", "imagenet21k", (90, 30), 1e-3, "linear", 0.03, 0.1),
    ("ViT-L/32", "imagenet21k", (90, 30), 1e-3, "linear", 0.03, 0.1),
    ("ViT-B/16", "imagenet2012", (300,), 3e-3, "cosine", 0.3, 0.1),
    ("ViT-B/32", "imagenet2012", (300,), 3e-3, "cosine", 0.3, 0.1),
    ("ViT-L/16", "imagenet2012", (300,), 3e-3, "cosine", 0.3, 0.1),
    ("ViT-L/32", "imagenet2012", (300,), 3e-3, "cosine", 0.3, 0.1),
    ("ViT-H/14", "imagenet2012", (300,), 3e-3, "cosine", 0.3, 0.1),
    ("ViT-S/16", "imagenet2012", (300,), 3e-3, "cosine", 0.3, 0.1),
    ("BiT-R50x1", "jft", (7,), 1e-3, "linear", 0.1, None),
    ("BiT-R101x1", "jft", (7,), 8e-4, "linear", 0.1, None),
    ("BiT-R152x1", "jft", (7,), 6e-4, "linear", 0.1, None),
    ("BiT-R50x2", "jft", (7,), 1e-3, "linear", 0.1, None),
    ("BiT-R152x2", "jft", (7,), 6e-4, "linear", 0.1, None),
    ("R50+ViT-B/16", "jft", (7,), 8e-4, "linear", 0.1, 0.0),
    ("R50+ViT-B/32", "jft", (7,), 8e-4, "linear", 0.1, 0.0),
    ("R50+ViT-L/16", "jft", (7, 14), 4e-4, "linear", 0.1, 0.0),
    ("R50+ViT-L/32", "jft", (7,), 2e-4, "linear", 0.1, 0.0),
]
ROWS = [(*row[:2], *epochs, *row[3:]) for row in TABLE_3
        for epochs in [(row[2][0], "")] + [(n, f",{n}ep") for n in row[2] if n != 300]]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "data", "epochs", "word", "lr", "decay", "weight_decay", "dropout"), ROWS
)
def test_table_3(model, data, epochs, word, lr, decay, weight_decay, dropout):
    data_word = "jft=my_photos" if data == "jft" else data
    c = load("pretrain", f"{model},{data_word}{word}")
    assert find_faults(c) == []

    assert c.model.name == model
    assert c.data.name == ("my_photos" if data == "jft" else data)
    assert (c.duration, c.global_batch_size, c.data.image_size) == (f"{epochs} epochs", 4096, 224)
    # None: adamw's own 0.9 and 0.999, compared with the table in experiment/test_optimizers.py.
    assert (c.optimizer.name, c.optimizer.b1, c.optimizer.b2) == ("adamw", None, None)
    assert (c.optimizer.peak_lr, c.optimizer.weight_decay) == (lr, weight_decay)
    assert c.optimizer.weight_decay_on == ".*/kernel"
    assert (c.schedule.name, c.schedule.warmup, c.schedule.cooldown) == (
        decay, "10000 steps", "0 steps",
    )  # fmt: skip
    assert (c.model.dropout, c.model.attention_dropout) == (dropout, None)
    assert c.model.hidden_head is (None if model.startswith("BiT") else True)
    assert c.optimizer.grad_clip_norm == (1.0 if data == "imagenet2012" else None)
    assert c.loss.label_smoothing == 0.0
    if data == "imagenet2012":
        assert (c.loss.name, c.model.head_bias) == ("softmax", None)
    else:
        assert (c.loss.name, c.model.head_bias) == ("sigmoid", -10.0)


def test_recipe_becomes_an_experiment():
    """ViT-B/16 on 14,147,841 images: head, steps and learning rates as in the paper."""
    c = load("pretrain", "ViT-B/16,imagenet21k")
    c.data.num_classes, c.data.num_examples = 21_843, 14_147_841
    e = make_experiment(c, make_mesh(replica=1, data=-1, fsdp=1, tensor=1))
    assert e.total_steps == 310_866  # 90 * 14,147,841 / 4096 = 310,865.8
    assert e.num_params == 85_798_656 + 768 * 769 + 769 * 21_843
    np.testing.assert_allclose(float(e.schedule(5_000)), 5e-4, rtol=1e-6)
    np.testing.assert_allclose(float(e.schedule(10_000)), 1e-3, rtol=1e-6)
    np.testing.assert_allclose(float(e.schedule((10_000 + 310_866) / 2)), 5e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ViT-H/14,imagenet21k", ["no row for ViT-H/14 on imagenet21k"]),
        ("ViT-S/16,imagenet21k", ["no row for ViT-S/16 on imagenet21k"]),
        ("ViT-S/16,jft=x", ["no row for ViT-S/16 on jft"]),
        ("ViT-L/14,imagenet21k", ["no row for ViT-L/14 on imagenet21k"]),
        ("BiT-R50x3,jft=x", ["no row for BiT-R50x3 on jft"]),
        ("BiT-R50x1,imagenet2012", ["no row for BiT-R50x1 on imagenet2012"]),
        ("R26+ViT-B/32,jft=x", ["no row for R26+ViT-B/32 on jft"]),
        ("R50+ViT-B/16,imagenet2012", ["no row for R50+ViT-B/16 on imagenet2012"]),
    ],
)
def test_absent_row_names_those_that_are(words, says):
    message = refusal("pretrain", words)
    for text in [*says, "imagenet21k: ViT-B/16, ViT-B/32, ViT-L/16, ViT-L/32", "imagenet2012: any",
                 "jft: ViT-B/16, ViT-B/32, ViT-L/32, ViT-L/16, ViT-H/14"]:  # fmt: skip
        assert text in message


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ViT-B/16,jft=x,14ep", "14 epochs: the paper's row has 7"),
        ("ViT-H/14,jft=x,7ep", "7 epochs: the paper's row has 14"),
        ("ViT-L/16,jft=x,90ep", "90 epochs: the paper's row has 7 or 14"),
        ("ViT-B/16,imagenet21k,30ep", "30 epochs: the paper's row has 90"),
        ("ViT-B/16,imagenet2012,90ep", "90 epochs: the paper's row has 300"),
        ("ViT-L/16,imagenet21k,30ep,90ep,debug", "epochs: the paper's row has 90 or 30"),
    ],
)
def test_absent_epochs_name_those_that_are(words, says):
    assert says in refusal("pretrain", words)


@pytest.mark.parametrize("words", ["", "debug", "ViT-B/16", "imagenet2012", "ViT-B/16,jft=x,45ep"])
def test_pretraining_needs_model_and_data(words):
    message = refusal("pretrain", words)
    assert "needs MODEL,DATA, e.g. configs/pretrain.py:ViT-B/16,imagenet2012" in message
    assert "7ep, 14ep, 30ep, 90ep" in message


@pytest.mark.parametrize("data", ["jft", "jft=", "imagenet2012=x", "cifar10", "imagenet"])
def test_pretraining_data(data):
    message = refusal("pretrain", f"ViT-B/16,{data}")
    assert repr(data) in message and "needs imagenet2012, imagenet21k or jft=<TFDS name>" in message


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("ViT-B16", "needs ViT-VARIANT/PATCH"),
        ("BiT-R50x4", "no such ResNet; known: BiT-R50x1"),
        ("R51+ViT-B/16", "no ResNet R51"),
        ("ViT-l/16", "did you mean L?"),
        ("ViT-x9/16", "known: mu, Ti, S"),
        ("ViT-So400/14", "did you mean So400m?"),
    ],
)
@pytest.mark.parametrize("config", ["pretrain", "folder"])
def test_unknown_model_in_words(config, model, says):
    words = f"{model},imagenet2012" if config == "pretrain" else model
    message = refusal(config, words)
    assert repr(model) in message and says in message


def test_words_of_pretraining_in_any_place():
    expected = load("pretrain", "ViT-L/16,imagenet21k,30ep,debug")
    for words in ("debug,ViT-L/16,30ep,imagenet21k", "30ep,debug,ViT-L/16,imagenet21k"):
        assert load("pretrain", words) == expected
    assert expected.model.name == "ViT-mu/16"


@pytest.mark.parametrize(
    ("data", "train", "val"),
    [
        ("imagenet2012", "train", "validation"),
        ("imagenet21k", "train[50000:]", "train[:50000]"),
        ("jft=x", "train[50000:]", "train[:50000]"),
    ],
)
def test_pretraining_validates_on_what_it_does_not_train_on(data, train, val):
    c = load("pretrain", f"ViT-L/16,{data}")
    assert (c.data.split, c.evals.val.split) == (train, val)


@pytest.mark.parametrize(
    ("words", "model", "image_size"),
    [
        ("", "ViT-Ti/8", 64),
        ("debug,ViT-B/32", "ViT-mu/32", 64),
        *((family.names[-1], family.names[-1], 224) for family in MODELS.values()),
    ],
)
def test_folder_takes_a_model(words, model, image_size):
    c = load("folder", words)
    assert (c.model.name, c.data.image_size) == (model, image_size)
    create_model(model, 2, image_size, **model_fields(c))


def test_folder_takes_one_model():
    message = refusal("folder", "ViT-S/16,ViT-B/16")
    assert "unknown word 'ViT-B/16'; known words: MODEL: such as ViT-S/16" in message


def test_misspelt_words_are_not_taken_for_models():
    for config in ("folder", "selfsup"):
        assert "unknown word 'debugg'; known words: MODEL: " in refusal(config, "debugg")
    assert "data 'foldr': did you mean folder?" in refusal("finetune", "ViT-B/16,foldr")


def test_folder_at_another_image_size(pictures):
    """The ops follow data.image_size, in training and in evaluation."""
    c, image_size = load("folder", "debug"), (96, 64)
    c.data.image_size, c.data.data_dir, c.global_batch_size = image_size, pictures, 8
    assert find_faults(c) == []
    c, sources = open_all(c)
    assert (c.data.num_classes, c.data.num_examples) == (2, 10)
    check_images(c, parse_preprocessing(c), sources)


def test_small_cifar10_has_the_parameters_it_says():
    c = load("cifar10", "small")
    c.data.num_classes, c.data.num_examples = 10, 50_000
    e = make_experiment(c, make_mesh(replica=1, data=-1, fsdp=1, tensor=1))
    assert f"{e.num_params / 1e6:.1f}M parameters" == "1.2M parameters"
    assert e.total_steps == 1172  # 3 * 50,000 / 128 = 1171.9


# AugReg's table, typed independently: RandAugment's layers and magnitude, MixUp's alpha.
AUGREG = {
    "none": None,
    "light1": (2, 0, 0.0),
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}


def augreg_ops(crop, name):
    if AUGREG[name] is None:
        return f"{crop}|flip"
    layers, magnitude, mixup = AUGREG[name]
    mixing = f"|mixup({mixup})" if mixup else ""
    return f"{crop}|randaugment({layers}, {magnitude})|flip{mixing}"


@pytest.mark.parametrize("name", AUGREG)
def test_augreg(name):
    c = load("augreg", f"ViT-L/16,imagenet2012,{name}")
    assert find_faults(c) == []
    assert c.data.ops == augreg_ops("inception_crop", name)
    assert (c.model.name, c.data.name) == ("ViT-L/16", "imagenet2012")
    assert (c.duration, c.global_batch_size, c.data.image_size) == ("300 epochs", 4096, 224)
    optimizer = c.optimizer
    assert (optimizer.name, optimizer.peak_lr, optimizer.b2) == ("adamw", 1e-3, None)  # 0.999
    assert (optimizer.weight_decay, optimizer.grad_clip_norm) == (0.1, 1.0)
    assert (c.schedule.name, c.schedule.warmup) == ("cosine", "10000 steps")
    assert (c.model.dropout, c.model.stochastic_depth, c.model.hidden_head) == (None, None, None)
    assert (c.loss.name, c.model.head_bias) == ("softmax", None)
    assert load("cifar10", f"5k,{name}").data.ops == augreg_ops("decode", name)
    assert load("cifar10", name).data.ops == augreg_ops("decode|pad_crop(4)", name)


def test_augreg_s_other_choices():
    c = load("augreg", "ViT-S/16,imagenet21k,light1,reg,wd0.03,30ep")
    assert find_faults(c) == []
    assert (c.model.dropout, c.model.stochastic_depth) == (0.1, 0.1)
    assert (c.optimizer.weight_decay, c.duration) == (0.03, "30 epochs")
    assert (c.loss.name, c.model.head_bias) == ("sigmoid", -10.0)
    assert (c.data.split, c.evals.val.split) == ("train[50000:]", "train[:50000]")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ViT-B/16,imagenet21k", "needs MODEL,DATA,AUG, e.g. configs/augreg.py:ViT-B/16,"),
        ("ViT-B/16,imagenet21k,medum1", "augmentation 'medum1': did you mean medium1?"),
        ("ViT-B/16,cifar10,medium1", "data 'cifar10': needs imagenet2012 or imagenet21k"),
        ("ViT-b/16,imagenet21k,medium1", "did you mean B?"),
        ("BiT-R50x1,imagenet21k,medium1", "need a ViT or a hybrid, such as ViT-B/16"),
        ("ViT-B/16,imagenet2012,medium1,30ep", "30ep: the paper trains on imagenet2012 for 300"),
    ],
)
def test_augreg_refuses(words, says):
    assert says in refusal("augreg", words)


@pytest.mark.parametrize("words", ["medium1,strong1", "small,5k"])
def test_cifar10_takes_one_augmentation_and_one_size(words):
    message = refusal("cifar10", words)
    assert repr(words) in message and "at most one of none, light1" in message


def test_the_two_arms_of_5k_differ_in_their_ops_only():
    plain, medium1 = load("cifar10", "5k"), load("cifar10", "5k,medium1")
    assert plain.data.ops == "decode|flip"
    medium1.data.ops = plain.data.ops
    assert plain == medium1
    assert (plain.data.split, plain.evals.test.split) == ("train[:10%]", "test")


def test_better_plain_vit():
    c = load("vit_s16_in1k")
    assert (c.model.name, c.model.pool, c.model.pos_embed) == ("ViT-S/16", "gap", "sincos_2d")
    assert (c.global_batch_size, c.duration, c.data.image_size) == (1024, "90 epochs", 224)
    assert c.data.ops == "inception_crop|randaugment(2, 10)|flip|mixup(0.2)"
    assert (c.optimizer.peak_lr, c.optimizer.weight_decay) == (1e-3, 0.1)
    assert c.optimizer.grad_clip_norm == 1.0
    assert (c.schedule.name, c.schedule.warmup) == ("cosine", "10000 steps")
    assert c.model.hidden_head is True
    assert (c.data.split, c.evals.val.split) == ("train[:99%]", "validation")
    c = with_known_facts(c)
    assert c.data.num_examples == 1_268_355
    assert parse_durations(c)["duration"] == 111_477  # 90 * 1,268,355 / 1024 = 111,476.5


# Images of these shapes are evaluated.
SHAPES = [(300, 400), (400, 300), (37, 90)]


@pytest.fixture(scope="module")
def evaluation_ops():
    """The ops of all evaluators of all configs."""
    configs = [load(name, w) for name, ws in (FORMS | EVALUATION_FORMS).items() for w in ws]
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


# The paper's table 4, typed independently: data, steps, learning rates, development split in per
# cent, split that is reported.
TABLE_4 = [
    ("imagenet2012", 20_000, (0.003, 0.01, 0.03, 0.06), 1, "validation"),
    ("cifar100", 10_000, (0.001, 0.003, 0.01, 0.03), 2, "test"),
    ("cifar10", 10_000, (0.001, 0.003, 0.01, 0.03), 2, "test"),
    ("oxford_iiit_pet", 500, (0.001, 0.003, 0.01, 0.03), 10, "test"),
    ("oxford_flowers102", 500, (0.001, 0.003, 0.01, 0.03), 10, "test"),
]


@pytest.mark.parametrize(("data", "steps", "peak_lrs", "dev", "test_split"), TABLE_4)
def test_table_4(data, steps, peak_lrs, dev, test_split):
    c = load("finetune", f"ViT-L/16,{data}")
    assert (c.model.name, c.data.name, c.data.split) == ("ViT-L/16", data, "train")
    assert (c.duration, c.global_batch_size, c.data.image_size) == (f"{steps} steps", 512, 384)
    optimizer = c.optimizer
    assert (optimizer.name, optimizer.momentum) == ("sgd", None)  # its own: 0.9
    assert (optimizer.weight_decay, optimizer.grad_clip_norm) == (0.0, 1.0)
    assert optimizer.peak_lr in peak_lrs and optimizer.ema_decay is None
    assert (c.schedule.name, c.schedule.warmup) == ("cosine", "0 steps")
    assert (c.model.dropout, c.model.hidden_head, c.init_head) == (None, None, "new")
    assert (c.data.ops, c.evals.test.ops) == ("inception_crop|flip", "decode|resize")
    assert (c.evals.test.split, c.study.name) == (test_split, None)

    study = load("finetune_study", f"ViT-L/16,{data}")
    cut = 100 - dev
    assert study.study.name == "finetune_sweep" and study.study.peak_lrs == peak_lrs
    assert (study.study.train_split, study.study.dev_split) == (
        f"train[:{cut}%]",
        f"train[{cut}%:]",
    )
    assert study.study.seeds == 3 and study.evals.held_out == c.evals.test


def test_vtab_has_one_learning_rate():
    assert (VTAB.steps, VTAB.peak_lrs) == (2_500, (0.01,))


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
    schedule = make_config_schedule(c, parse_durations(c))
    bounds = (warmup, *milestones, steps)
    for k, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for step in (begin, end - 1):
            np.testing.assert_allclose(float(schedule(step)), 0.003 / 10**k, rtol=1e-5)
    np.testing.assert_allclose(float(schedule(warmup // 2)), 0.0015, rtol=1e-6)
    study = load("finetune_study", f"BiT-R50x1,{data}").study
    assert (study.peak_lrs, study.seeds) == ((0.003,), 3)


def test_headline_averages_its_weights():
    c = load("finetune", "ViT-H/14,imagenet2012,headline")
    assert (c.optimizer.ema_decay, c.data.image_size) == (0.9999, 518)  # 512 in patches of 14
    assert load("finetune", "ViT-H/14,imagenet2012").optimizer.ema_decay is None


def test_headline_is_of_vits():
    assert "headline: got BiT-R50x1 on imagenet2012" in refusal(
        "finetune", "BiT-R50x1,imagenet2012,headline"
    )


def test_deit():
    """Table 9 of the paper, typed independently, and the published commands at 384 px."""
    c, fine = load("deit", "DeiT-B/16"), load("deit", "DeiT-B/16,384,soft")
    assert c.data.ops == (
        "inception_crop(area_min=0.08)|randaugment(2, 9, 0.5)|flip|erase(0.25, area_max=0.333)"
        "|mixup_or_cutmix(0.8, 1.0)"
    )
    assert (c.duration, c.schedule.warmup, c.schedule.name) == ("300 epochs", "5 epochs", "cosine")
    assert (c.data.repeats, c.loss.label_smoothing, c.model.stochastic_depth) == (3, 0.1, 0.1)
    assert c.optimizer.weight_decay == 0.05 and c.optimizer.grad_clip_norm is None
    assert c.optimizer.peak_lr == pytest.approx(5e-4 * c.global_batch_size / 512)
    assert (c.objective.mode, c.objective.weight) == ("hard", 0.5)
    assert (fine.objective.mode, fine.objective.weight, fine.objective.temperature) == (
        "soft", 0.1, 3.0,
    )  # fmt: skip
    assert (fine.data.image_size, fine.duration, fine.init_head) == (384, "30 epochs", "kept")
    assert fine.optimizer.peak_lr == pytest.approx(5e-6 * fine.global_batch_size / 512)
    assert load("deit", "ViT-S/16").objective.name == "supervised"
    assert "soft with a DeiT only" in refusal("deit", "ViT-S/16,soft")


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


@pytest.mark.parametrize("name", ["EfficientNet-B0", "BiT-R50x1", "T2T-ViT-7", "Axial-ViT-B/32"])
def test_own_images_take_every_family(name):
    for words in (name, f"{name},debug"):
        c = load("folder", words)
        create_model(c.model.name, 10, c.data.image_size, **model_fields(c))


def test_cells_of_the_ablation_are_those_of_table_8_and_more():
    cells = parse_cells(load("position_ablation").study.cells)
    assert {(cell.row, cell.column) for cell in cells} == {
        ("no positions", "stem"),
        *((row, column) for row in ("1-D", "2-D")
          for column in ("stem", "every layer", "every layer, shared")),
        ("relative", "every layer"), ("relative", "every layer, shared"),
        ("sine-cosine", "stem"), ("sine-cosine", "every layer"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "usual", "headline"),
    [
        ("ViT-L/16", 384, 512),
        ("ViT-H/14", 378, 518),
        ("ViT-B/32", 384, 512),
        ("R50+ViT-L/32", 384, 512),
        ("R+ViT-Ti/16", 384, 512),
        ("R+ViT-Ti/14", 392, 504),  # whose tokens cover 28 pixels
    ],
)
def test_fine_tuning_sizes(model, usual, headline):
    assert load("finetune", f"{model},cifar10").data.image_size == usual
    c = load("finetune", f"{model},imagenet2012,headline")
    assert (c.data.image_size, c.optimizer.ema_decay) == (headline, 0.9999)
    assert load("finetune", f"{model},imagenet2012").optimizer.ema_decay is None


def test_head_only_trains_the_head():
    c = load("finetune", "ViT-B/16,cifar10,head_only")
    assert re.fullmatch(c.optimizer.freeze, "encoder/layer_0/mlp/up/kernel")
    for head in ("head/kernel", "head_distillation/bias"):
        assert not re.fullmatch(c.optimizer.freeze, head)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("ViT-B/16", "needs MODEL,DATA, e.g. configs/finetune.py:ViT-B/16,cifar10, DATA one of"),
        ("ViT-B/16,cifar", "data 'cifar': did you mean cifar10?"),
        ("ViT-b/16,cifar10", "did you mean B?"),
        ("ViT-B/16,cifar10,headline", "headline: got ViT-B/16 on cifar10; "),
    ],
)
@pytest.mark.parametrize("name", ["finetune", "finetune_study"])
def test_fine_tuning_refuses(name, words, says):
    assert says in refusal(name, words)


def test_no_arm_of_five_classes_sees_what_it_is_judged_by():
    """Pretraining and fine-tuning share no class; the splits of fine-tuning share no image."""
    pretraining, c = load("five_classes", "pretrain"), load("five_classes")
    assert sorted(pretraining.data.classes + c.data.classes) == list(range(10))
    assert (c.data.split, c.study.train_split) == ("train[2500:2961]", "train[2500:2961]")
    assert (c.study.dev_split, c.evals.held_out.split) == ("train[10000:20000]", "test")
