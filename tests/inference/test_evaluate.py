"""Evaluation of models from anywhere, without training, against the model applied by hand."""

import operator

import jax
import numpy as np
import pytest
from asked import evaluate_model
from at_fault import at_fault
from numpy_vit import random_params
from sklearn.datasets import load_digits

import vit_jax
from vit_jax.base.errors import InputError
from vit_jax.config import REQUIRED_TO_EVALUATE, Settings
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.inference import evaluate as evaluation
from vit_jax.run.setup.evaluation import complete_by_source
from vit_jax.run.setup.validation import find_faults
from vit_jax.transfer import read_pretrained

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")

SMALL = {"num_heads": 2, "mlp_dim": 32}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A random ViT with ten classes for images of 8 x 8, as a file of the reference release."""
    path = tmp_path_factory.mktemp("published") / "digits.npz"
    model = vit_jax.create_model("ViT-mu/4", 10, 8, **SMALL)
    params = random_params(model, np.zeros((1, 8, 8, 3), np.float32))
    vit_jax.save_pretrained(path, model, {"params": params}, format="npz")
    return path


def evaluation_config(words, **overrides):
    config = load_config(f"configs/evaluate.py:{words}")
    pairs = [(key.replace("__", "."), value) for key, value in overrides.items()]
    assert apply_overrides(config, pairs) == []
    assert find_faults(config, REQUIRED_TO_EVALUATE) == []
    return config


def scores(path, image_size=None):
    """Of the test digits, as an image of twice the size has each pixel four times."""
    model, variables = vit_jax.load_pretrained(path, image_size=image_size)
    bunch = load_digits()
    grey = np.rint(bunch.images[::5] * (255 / 16))
    images = np.float32(np.repeat(grey[..., None], 3, axis=-1) / 127.5 - 1)
    return np.asarray(model.apply(variables, images)), bunch.target[::5]


@pytest.mark.slow
def test_a_file_on_the_command_line(published, one_device, json_of, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *args: one_device)  # all eight
    words = ["--config=configs/evaluate.py:classification,knn,debug"]
    results = json_of("evaluate", f"--init_from={published}", *words)
    logits, labels = scores(published)
    assert results["classification/num_examples"] == 360
    assert results["classification/top1"] == pytest.approx((logits.argmax(1) == labels).mean())
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    loss = -log_p[np.arange(360), labels].mean()
    assert results["classification/loss"] == pytest.approx(loss, rel=1e-5)
    assert results["knn/10nn_top1"] > 0.5  # of random features


@pytest.mark.slow
def test_the_loss_goes_with_the_weights(published, caplog):
    caplog.set_level("INFO", "vit_jax")
    pretrained = read_pretrained(published)
    logits, labels = scores(published)
    cross_entropies = np.logaddexp(0, logits) - logits * np.eye(10)[labels]
    of_sigmoid = pretrained._replace(spec=pretrained.spec._replace(loss="sigmoid"))
    results = evaluate_model(evaluation_config("classification,debug"), of_sigmoid)
    expected = cross_entropies.sum(axis=1).mean()
    assert results["classification/loss"] == pytest.approx(expected, rel=1e-5)
    assert "the loss is not stated" not in caplog.text


def test_at_another_size_positions_are_resampled(published, caplog):
    caplog.set_level("INFO", "vit_jax")
    config = evaluation_config("classification,debug", data__image_size="12")
    results = evaluate_model(config, read_pretrained(published))
    assert "the loss is not stated; assuming softmax" in caplog.text
    assert results["classification/num_examples"] == 360
    assert "from a grid of (2, 2) to (3, 3)" in caplog.text


@pytest.mark.slow
def test_features_know_no_classes(published, tmp_path):
    """Ten classes in the model, two in the data: of no matter to what learns its own."""
    config = evaluation_config(
        "knn,synthetic", data__num_examples="64", global_batch_size="32", data__num_classes="2"
    )
    pretrained = read_pretrained(published)
    config.evals.knn.data_name = "digits"
    assert "knn/10nn_top1" in evaluate_model(config, pretrained)

    headless = pretrained._replace(model=pretrained.model.clone(num_classes=None))
    config = evaluation_config("classification,knn,debug")
    with pytest.raises(
        InputError, match=r"evals\.classification\.type=.* has no classes; use one of"
    ):
        evaluate_model(config, headless)


@pytest.mark.usefixtures("without_checks")
def test_classes_of_other_names_are_warned_of(published, caplog, monkeypatch):
    monkeypatch.setattr(evaluation, "evaluate_one", lambda *_: {})
    pretrained = read_pretrained(published)
    config = evaluation_config("classification,knn,debug")

    def said(names):
        caplog.clear()
        evaluate_model(config, pretrained._replace(spec=pretrained.spec._replace(
            class_names=names)))  # fmt: skip
        return [record.message for record in caplog.records if record.levelname == "WARNING"]

    digits = tuple("0123456789")
    assert said(None) == said(digits) == said(tuple(f"n{i:08}" for i in range(10))) == []
    (warning,) = said(("0", "2", "1", *digits[3:]))
    assert warning.startswith("evals.classification: 2 of 10 classes have other names in digits")
    assert "label 1 is '1', but output 1 is '2'" in warning


def test_data_of_another_number_of_classes_are_refused(published):
    config = evaluation_config("classification,debug")
    pretrained = read_pretrained(published)
    config.data.classes = (1, 2, 3)
    with at_fault("evals.classification.split"):
        evaluate_model(config, pretrained)


def test_what_the_source_does_not_tell_must_be_said(published):
    pretrained = read_pretrained(published)
    of_any_size = pretrained._replace(spec=pretrained.spec._replace(image_size=None))
    with at_fault("data.image_size"):
        evaluate_model(evaluation_config("knn,debug"), of_any_size)
    with at_fault("init_resize"):
        evaluate_model(evaluation_config("knn,debug", init_resize="half-pixel"), pretrained)
    with at_fault("pools"):
        config = evaluation_config("knn,debug")
        config.model.unlock()
        config.model.pools = "gap"
        evaluate_model(config, pretrained)


@pytest.mark.parametrize(
    ("key", "text"),
    [("data.exif", "false"), ("data.exif", "true"), ("data.mean", "0.5,0.5,0.5"),
     ("data.std", "0.2,0.3,0.4"), ("data.pixel_range", "0,4095"), ("loss.name", "softmax")],
)  # fmt: skip
def test_a_key_of_the_user_goes_before_the_source_s(published, key, text):
    """Also one that is set to its default; without it, the source's value holds."""
    pretrained = read_pretrained(published)
    stated = {"exif": text != "true", "mean": (0.1, 0.2, 0.3), "std": (0.1, 0.1, 0.1)}
    spec = pretrained.spec._replace(**stated, pixel_range=(0.0, 10.0))
    run = {"config": {"plugins": (), "loss": {"name": "sigmoid"}, "data": {"multi_label": False}}}
    pretrained = pretrained._replace(spec=spec, run=run)
    config = evaluation_config("classification,debug", **{key.replace(".", "__"): text})
    value = operator.attrgetter(key)
    expected = value(Settings.of(config))
    assert value(complete_by_source(Settings.of(config), pretrained, {key: text})) == expected
    config = evaluation_config("classification,debug")
    assert value(complete_by_source(Settings.of(config), pretrained, ())) != expected


def test_the_multilabel_evaluator_follows_the_loss_of_the_model(published):
    pretrained, config = read_pretrained(published), evaluation_config("multilabel,list")
    for stated in ("sigmoid", None):
        spec = pretrained.spec._replace(loss=stated)
        of = complete_by_source(Settings.of(config), pretrained._replace(spec=spec), ())
        assert of.data.multi_label and of.loss.name == "sigmoid"
    spec = pretrained.spec._replace(loss="softmax")
    of_softmax = pretrained._replace(spec=spec)
    with at_fault("evals.multilabel.type"):
        complete_by_source(Settings.of(config), of_softmax, ())
    by_user = evaluation_config("multilabel,list", loss__name="sigmoid")
    assert complete_by_source(Settings.of(by_user), of_softmax, {"loss.name"}).data.multi_label


def test_features_are_judged_by_one_label_an_image_whatever_the_loss(published, tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(6, 8, 8, 3), dtype=np.uint8)
    labels = [[0, 1], 0, [0], [1], 1, 0]
    np.savez(tmp_path / "d.npz", **{
        f"{split}_{what}": value for split in ("train", "test") for what, value in
        {"images": pixels, "labels": np.float32([np.isin([0, 1], row) for row in labels])}.items()
    })  # fmt: skip
    given = {"data__name": "arrays", "data__data_dir": str(tmp_path / "d.npz")}
    config = evaluation_config("knn,probe,debug", **given, data__multi_label="true")
    with pytest.raises(InputError) as error:
        evaluate_model(config, read_pretrained(published))
    assert len(error.value.faults) == 2
    assert all("finetune:multilabel,head_only" in fault for fault in error.value.faults)


@pytest.mark.parametrize(
    ("key", "text"),
    [("data.channels", "1"), ("data.num_classes", "3"), ("data.ops", "decode|flip")],
)
def test_a_key_that_the_model_decides_is_refused(published, key, text):
    config = evaluation_config("classification,debug", **{key.replace(".", "__"): text})
    with at_fault(key):
        evaluate_model(config, read_pretrained(published), by_user={key: text})
