"""Images of other than three channels: decoded, cropped, trained on, carried over."""

import json

import jax
import numpy as np
import PIL.Image
import pytest
from at_fault import at_fault
from images import encode, smooth_image

import vit_jax
from vit_jax.data import image_batch, make_source, parse_ops
from vit_jax.data.device_ops import to_value_range
from vit_jax.data.images.formats import Reading
from vit_jax.data.images.given import image_files
from vit_jax.data.pipeline import host_batches, host_eval_batches
from vit_jax.main import main
from vit_jax.run.setup.resolve import take_fields
from vit_jax.run.setup.validation import find_faults, load_config
from vit_jax.transfer.fit import fit
from vit_jax.transfer.pretrained import Pretrained, Spec
from vit_jax.transfer.resample import adapt_kernel
from vit_jax.transfer.shapes import abstract_params

pytestmark = pytest.mark.usefixtures("one_device")


def batch_of(source, string, evaluation=True):
    ops = parse_ops(string, (16, 16))[0]
    rows = np.arange(source.num_examples)
    spec = image_batch(len(rows), (16, 16), ops)
    if evaluation:
        return next(iter(host_eval_batches(source, spec, rows=rows)))
    return next(iter(host_batches(source, spec, steps=range(1), seed=0, rows=rows)))


def rgba():
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 4), np.uint8)
    return PIL.Image.fromarray(noise, "RGBA")


@pytest.mark.parametrize(
    ("ops", "channels"),
    [("inception_crop", 4), ("decode|resize_small(20)|central_crop", 1),
     ("decode|resize|pad_crop(2)", 4), ("decode|torchvision_resize(20)|torchvision_crop", 1)],
)  # fmt: skip
def test_ops_keep_the_channels(tmp_path, ops, channels):
    rgba().resize((30, 20)).save(tmp_path / "1.png")
    batch = batch_of(image_files([str(tmp_path / "1.png")], Reading(channels=channels)), ops, False)
    assert batch["image"].shape == (1, 16, 16, channels) and batch["mask"].all()


def test_pixels_become_grey_and_others_are_refused(tmp_path):
    colour = make_source("digits", split="test", image_size=(8, 8))
    grey = make_source("digits", split="test", image_size=(8, 8), channels=1)
    assert grey.image_shape == (8, 8, 1)
    ids = np.arange(5)
    np.testing.assert_array_equal(grey.read(ids)["image"], colour.read(ids)["image"][..., :1])
    with at_fault("data.channels"):
        make_source("digits", split="test", image_size=(8, 8), channels=4)
    (tmp_path / "1.png").write_bytes(encode(smooth_image(), "PNG"))
    with at_fault("data.channels"):
        image_files([str(tmp_path / "1.png")], Reading(channels=5))
    made_up = {"image_size": (8, 8), "num_classes": 2, "num_examples": 4}
    assert make_source("synthetic", split="train", **made_up, channels=5).image_shape[-1] == 5


def test_value_range_of_any_number_of_channels():
    images = np.zeros((2, 4, 4, 4), np.uint8)
    assert (np.asarray(to_value_range(images, (0.5,) * 3, (0.5,) * 3)) == -1).all()
    found = to_value_range(images, (0.1, 0.2, 0.3, 0.4), (1.0,) * 3)
    np.testing.assert_allclose(found[0, 0, 0], [-0.1, -0.2, -0.3, -0.4])


@pytest.mark.parametrize("shape", [(48, 5), (4, 4, 3, 5)])
def test_kernels_are_summed_or_repeated(shape):
    kernel = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    by_channel = kernel.reshape(16, 3, 5)
    one = adapt_kernel(kernel, 3, 1)
    np.testing.assert_allclose(one.reshape(16, 5), by_channel.sum(1))
    four = adapt_kernel(kernel, 3, 4).reshape(16, 4, 5)
    np.testing.assert_allclose(four, by_channel[:, [0, 1, 2, 0]] * (3 / 4))
    assert one.shape[-1] == four.shape[-1] == 5 and one.ndim == len(shape)


def test_a_hybrid_adapts_its_stem_and_not_its_embedding():
    fields = {"stages": (1, 1, 1), "stem_width": 32, "width": 8, "depth": 1, "num_heads": 1}
    model = vit_jax.create_model("R50+ViT-B/16", 2, 32, mlp_dim=8, **fields)
    params = abstract_params(model)
    params = {name: np.ones(leaf.shape, np.float32) for name, leaf in params.items()}
    pretrained = Pretrained("source", model, params, Spec((32, 32), "timm"))
    found, _ = fit(pretrained, model.clone(channels=1), reset_head=False)
    assert found["stem/conv_root/kernel"].shape[2] == 1
    np.testing.assert_array_equal(found["stem/conv_root/kernel"], 3.0)
    assert found["embedding/kernel"] is params["embedding/kernel"]


WORDS = ["--config=configs/quickstart.py:debug", "--config.duration=2 steps",
         "--config.schedule.warmup=0 steps"]  # fmt: skip


@pytest.fixture(scope="module")
def grey(tmp_path_factory, one_device):
    """The workdir of a run on grey images."""
    workdir = tmp_path_factory.mktemp("grey") / "run"
    assert main([*WORDS, "--config.data.channels=1", f"--workdir={workdir}"]) == 0
    return workdir


@pytest.mark.slow
def test_a_grey_run_classifies_and_adapts_to_colour(grey, tmp_path, capsys):
    spec = vit_jax.pretrained_spec(grey)
    model, variables = vit_jax.load_pretrained(grey)
    assert spec.channels == model.channels == 1
    PIL.Image.fromarray(smooth_image(8, 8)).save(tmp_path / "1.png")
    image = vit_jax.load_image(tmp_path / "1.png", spec)
    assert image.shape == (8, 8, 1)
    logits = np.asarray(jax.jit(model.apply)(variables, image[None]))

    colour, changed = vit_jax.load_pretrained(grey, channels=3)
    same = jax.jit(colour.apply)(changed, np.repeat(image, 3, -1)[None])
    np.testing.assert_allclose(same, logits, atol=1e-5)  # a third of the kernel, three times

    capsys.readouterr()
    assert main(["predict", f"--init_from={grey}", str(tmp_path / "1.png"), "--format=json"]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row["classes"][0]["index"] == logits.argmax()
    export = ["export", f"--init_from={grey}", f"--output={tmp_path / 'e'}", "--format=timm"]
    assert main(export) == 0
    exported, arrays = vit_jax.load_pretrained(tmp_path / "e")
    again = jax.jit(exported.apply)(arrays, image[None])
    np.testing.assert_allclose(again, logits, atol=1e-5)


@pytest.mark.slow
def test_a_grey_run_is_evaluated_and_starts_another(grey, tmp_path):
    assert main(["evaluate", f"--workdir={grey}"]) == 0
    assert main([*WORDS, f"--config.init_from={grey}", f"--workdir={tmp_path / 'tuned'}"]) == 0


def test_one_channel_takes_the_mean_of_three_values():
    """As it is, and where a source of three channels gives the values."""
    images = np.full((1, 2, 2, 1), 51, np.uint8)
    found = to_value_range(images, (0.1, 0.2, 0.6), (0.2, 0.3, 0.4))
    np.testing.assert_allclose(found, (0.2 - 0.3) / 0.3, rtol=1e-6)
    config = load_config("folder:debug", {"data.channels": 1, "data.mean": (0.1, 0.2, 0.6)})
    assert not find_faults(config)
    config = load_config("finetune:folder", {"data.channels": 1})
    config.model.name, config.init_from, config.data.image_size = "ViT-mu/4", "model.npz", 8
    model = vit_jax.create_model("ViT-mu/4", 10, 8)
    source = Pretrained("model.npz", model, {}, Spec((8, 8), "half_pixel", (0.1, 0.2, 0.6)))
    assert take_fields(config, source)["data.mean"] == (0.1, 0.2, 0.6)
