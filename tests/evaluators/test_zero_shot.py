"""Evaluation by the words of the classes, on own images, against predictions by labels."""

import numpy as np
import pytest
from images import write_images
from pairs import siglip

import vit_jax
from vit_jax.base.errors import InputError
from vit_jax.config import EVALUATORS
from vit_jax.data.words import PROMPTS

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")


@pytest.fixture(scope="module")
def source(golden, tmp_path_factory):
    return siglip(golden, tmp_path_factory.mktemp("pair") / "siglip")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Images of three classes, twelve in val/ and as many in train/."""
    names = ("big_ant", "bee", "cat")
    pixels = np.random.default_rng(0).integers(0, 256, (24, 64, 64, 3), np.uint8)
    return write_images(tmp_path_factory.mktemp("own"), {
        f"{'val' if i < 12 else 'train'}/{names[i % 3]}/{i}.png": pixels[i] for i in range(24)
    })  # fmt: skip


@pytest.mark.slow
def test_top1_is_that_of_predictions_by_labels(source, images, json_of):
    words = [f"--init_from={source}", "--config=evaluate:zeroshot,folder",
             f"--config.data.data_dir={images}", "--config.global_batch_size=8"]  # fmt: skip
    found = json_of("evaluate", *words)
    labels = ("a bee", "a big ant", "a cat")
    rows = vit_jax.predict(images / "val", source, labels=labels, top=1)
    right = [row["classes"][0]["name"].split()[-1] in row["file"] for row in rows]
    assert found["zeroshot/top1"] == pytest.approx(np.mean(right))
    assert found["zeroshot/num_examples"] == 12
    declared = EVALUATORS.find("zeroshot")(split="val", every="1 epochs").reports()
    assert {name.partition("/")[2] for name in found} <= {*declared}


def test_several_labels_have_the_mean_average_precision(source):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (10, 64, 64, 3), np.uint8)
    several = rng.integers(0, 2, (10, 3))
    data = {"test": (pixels, several), "class_names": ["ant", "bee", "cat"]}
    overrides = {"data.multi_label": True, "loss.name": "sigmoid", "global_batch_size": 8}
    found = vit_jax.evaluate(source, "evaluate:zeroshot", overrides, data=data)
    assert found.keys() == {"zeroshot/mean_ap", "zeroshot/num_examples"}


def test_what_it_needs(golden, source, images, tmp_path):
    where = {"data.data_dir": str(images)}
    with pytest.raises(InputError, match=r"evals.zeroshot.type='zeroshot': the model has no text"):
        vit_jax.evaluate(golden / "hf_siglip", "evaluate:zeroshot,folder", where)
    (tmp_path / "prompts.txt").write_text("a photo")
    wrong = where | {"evals.zeroshot.prompts": str(tmp_path / "prompts.txt")}
    with pytest.raises(InputError, match=r"evals.zeroshot.prompts=.* has 'a photo'; needs lines"):
        vit_jax.evaluate(source, "evaluate:zeroshot,folder", wrong)
    (tmp_path / "prompts.txt").write_text("a photo of {}" + " seen from afar" * 20)
    with pytest.raises(InputError, match=r"evals.zeroshot.prompts: 'a photo of a big ant .* takes"):
        vit_jax.evaluate(source, "evaluate:zeroshot,folder", wrong)
    data = {"test": (np.zeros((8, 64, 64, 3), np.uint8), np.arange(8) % 3)}
    data["class_names"] = ["ant", "_, ,", ""]
    with pytest.raises(InputError) as error:
        vit_jax.evaluate(source, "evaluate:zeroshot", {"global_batch_size": 8}, data=data)
    assert error.value.faults == tuple(
        f"evals.zeroshot.split: class {name!r} has no words; rename it" for name in ("_, ,", "")
    )
    assert len(PROMPTS) > 1
