"""The contact sheet of augmentations."""

import numpy as np
import PIL.Image
import pytest
from at_fault import at_fault
from read_settings import settings_of

from vit_jax.config import Settings, base_config
from vit_jax.data import augment, make_source
from vit_jax.diagnosis.benchmarks.augmentations import draw_bands, draw_contact_sheet, make_columns
from vit_jax.diagnosis.settled import open_training_data


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch):
    monkeypatch.setattr("vit_jax.diagnosis.benchmarks.augmentations._SAMPLES", 2)


@pytest.fixture
def two_operations(monkeypatch):
    names = "Invert", "Rotate"
    operations = {name: augment.OPERATIONS[name] for name in names}
    monkeypatch.setattr(augment, "OPERATIONS", operations)
    monkeypatch.setattr("vit_jax.diagnosis.benchmarks.augmentations._DEVICE_OPS", ("mixup(8.0)",))


def drawn(config):
    """What `draw_contact_sheet` takes of a config."""
    settings, source = open_training_data(Settings.of(config))
    return settings.data, settings.run.seed, source


@pytest.fixture
def config():
    c = base_config()
    c.global_batch_size, c.duration, c.optimizer.peak_lr = 32, "1 epochs", 1e-3
    c.model.name, c.data.name, c.data.image_size = "ViT-mu/4", "digits", 8
    c.data.ops = "pad_crop(1)|randaugment(1, 5)|flip|mixup(0.2)"
    return c


@pytest.mark.slow
def test_columns(config):
    source = make_source("digits", split="train", image_size=(8, 8))
    config.data.num_classes = 10
    columns = dict(make_columns(settings_of(config).data, config.seed, source))
    assert [*columns][:3] == ["original\n", "data.ops\ndraw 1", "data.ops\ndraw 2"]
    original = columns["before\nrandaugment"]
    digits = source.read(np.array([0, 359, 718, 1077]))["image"].numpy()
    np.testing.assert_array_equal(columns["original\n"], digits)
    for image, digit in zip(original, digits, strict=True):  # cropped, not yet augmented
        padded = np.pad(digit, [(1, 1), (1, 1), (0, 0)])
        windows = [padded[y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
        assert any(np.array_equal(image, window) for window in windows)
    for name in augment.OPERATIONS:
        shown = [columns[f"{name}\nmagnitude {magnitude}"] for magnitude in (5, 15)]
        assert np.shape(shown) == (2, 4, 8, 8, 3)
    np.testing.assert_array_equal(columns["Invert\nmagnitude 5"], 255 - np.stack(original))
    for op in ("mixup(8.0)\n", "cutmix(1.0)\n", "erase(1.0)\n"):
        assert (columns[op] != np.stack(original)).any(), op
    draws = [np.stack(columns[f"data.ops\ndraw {i}"]).tobytes() for i in (1, 2)]
    assert len(set(draws)) == 2


def test_bands_lie_below_each_other_and_columns_beside():
    def column(red):
        """Four images in one shade of red, lighter in green from row to row."""
        return f"{red}\n", [np.full((8, 16, 3), (red, 60 * row, 9), np.uint8) for row in range(4)]

    sheet = np.asarray(draw_bands("title", [[column(10), column(20)], [column(30)]]))

    def box(red, row):
        at = np.argwhere((sheet == (red, 60 * row, 9)).all(-1))
        assert len(at) == 112 * 56  # twice as wide as high; seven pixels for one
        return at[0]

    right, down = np.array([0, 116]), np.array([116, 0])
    np.testing.assert_array_equal(box(20, 0) - box(10, 0), right)
    for red in (10, 20, 30):
        for row in (1, 2, 3):
            np.testing.assert_array_equal(box(red, row) - box(red, 0), row * down)
    assert box(30, 0)[0] > box(10, 3)[0] + 112
    assert box(30, 0)[1] == box(10, 0)[1]
    assert (sheet[: box(10, 0)[0], 116:] < 128).any()  # a heading above the second column


def test_the_file(config, tmp_path, monkeypatch):
    columns = [(f"{i}\n", [np.zeros((8, 8, 3), np.uint8)] * 4) for i in range(40)]
    made = "vit_jax.diagnosis.benchmarks.augmentations.make_columns"
    monkeypatch.setattr(made, lambda *_: columns)
    draw_contact_sheet(*drawn(config), tmp_path / "sheet.png")
    assert PIL.Image.open(tmp_path / "sheet.png").size == (4 + 17 * 116, 30 + 3 * (45 + 4 * 116))


@pytest.mark.slow
def test_operations_before_the_crop_and_images_decoded_by_their_reader(
    shared_data, config, tmp_path, two_operations
):
    config.data.name, config.data.data_dir = "imagenet_sample", str(shared_data)
    config.data.split = "train[:8]"
    config.data.ops = "decode|randaugment(1, 5)|inception_crop|flip"
    draw_contact_sheet(*drawn(config), tmp_path / "sizes.png")
    config.data.name, config.data.image_size, config.model.name = "cifar10", 32, "ViT-mu/8"
    config.data.split, config.data.reader, config.data.ops = "test[:50]", "offsets", "flip"
    draw_contact_sheet(*drawn(config), tmp_path / "encoded.png")
    with PIL.Image.open(tmp_path / "sizes.png") as a, PIL.Image.open(tmp_path / "encoded.png") as b:
        assert a.size == b.size


def test_records_that_cannot_be_decoded_are_passed_over(tmp_path, config, two_operations):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "broken.jpg").write_bytes(b"no image")
        for i in range(3):
            red = np.full((8, 8, 3), (200, 10 * i, 0), np.uint8)
            PIL.Image.fromarray(red).save(tmp_path / name / f"{i}.png")
    source = make_source("folder", split="train", image_size=(8, 8), data_dir=tmp_path)
    config.data.num_classes, config.data.ops = 2, "decode|resize"
    original = np.stack(
        dict(make_columns(settings_of(config).data, config.seed, source))["original\n"]
    )
    assert (original[..., 0] == 200).all()


def test_pictures_keep_their_shape(tmp_path, config, two_operations):
    """Cut into patches and flipped as a run does; no column needs images of one size."""
    pixels = np.arange(8 * 24 * 3, dtype=np.uint8).reshape(8, 24, 3)  # 2 x 6 patches
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            image = pixels if i % 2 else pixels.transpose(1, 0, 2)
            PIL.Image.fromarray(image).save(tmp_path / name / f"{i}.png")
    config.data.name, config.data.data_dir = "folder", str(tmp_path)
    config.data.max_tokens, config.data.ops = 12, "decode|flip"
    columns = dict(make_columns(*drawn(config)))
    flipped = set()
    for i, image in enumerate(columns["original\n"]):
        np.testing.assert_array_equal(columns["before\nrandaugment"][i], image)
        for draw in (columns[f"data.ops\ndraw {j}"][i] for j in (1, 2)):
            flipped.add(is_flipped := bool((draw != image).any()))
            np.testing.assert_array_equal(draw, image[:, ::-1] if is_flipped else image)
    assert flipped == {False, True}
    assert "Rotate\nmagnitude 5" in columns and "mixup(8.0)\n" not in columns
    config.data.max_tokens, config.data.ops = None, "decode"
    with at_fault("data.ops"):  # as a run, which needs images of one size
        make_columns(*drawn(config))


def test_images_of_other_than_three_channels(tmp_path, config):
    """Every column but RandAugment's, and pixels as they are."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            PIL.Image.new("RGBA", (1 + i, 9), (200, 200, 200, 99)).save(
                tmp_path / name / f"{i}.png"
            )
    config.data.name, config.data.data_dir = "folder", str(tmp_path)
    config.data.channels, config.data.ops = 4, "decode|resize|flip"
    settings, seed, source = drawn(config)
    columns = dict(make_columns(settings, seed, source))
    assert [*columns][3:] == [
        "before\nrandaugment",
        "mixup(8.0)\n",
        "cutmix(1.0)\n",
        "erase(1.0)\n",
    ]
    for name in ("data.ops\ndraw 1", "before\nrandaugment"):
        expected = np.broadcast_to([200, 200, 200, 99], (4, 8, 8, 4))
        np.testing.assert_array_equal(columns[name], expected)
    draw_contact_sheet(settings, seed, source, tmp_path / "sheet.png")
    sheet = np.asarray(PIL.Image.open(tmp_path / "sheet.png"))
    assert (sheet == 200).all(-1).sum() > 3 * 112 * 112
