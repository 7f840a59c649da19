"""Values of more than 8 bits: their range, and a warning where files do not use their bits."""

import json

import numpy as np
import PIL.Image
import pytest
from images import encode, smooth_image
from test_modes import ALPHA, png

from vit_jax.data import image_batch, make_source, parse_ops
from vit_jax.data.images.bits import unused_bits_of
from vit_jax.data.images.formats import Reading, to_pixels, why_unreadable
from vit_jax.data.images.given import image_files, open_images
from vit_jax.data.pipeline import host_eval_batches
from vit_jax.diagnosis.doctor import OK, WARNING, check_decoding
from vit_jax.inference import neighbours
from vit_jax.transfer.pretrained import Spec, load_image, read_preparation
from vit_jax.transfer.source import KINDS, READING

SIZE = (12, 16)
GREY = np.arange(12 * 16, dtype=np.uint16).reshape(SIZE) * 21  # up to 4,011
COLOURS = np.dstack([GREY, GREY.T.reshape(SIZE), 4095 - GREY])
RANGE = (100, 4095)
FILES = {
    "grey.png": encode(GREY, "PNG"),
    "grey.tif": encode(GREY, "TIFF"),
    "lzw.tif": encode(GREY, "TIFF", compression="tiff_lzw"),
    "other.tif": encode(GREY.astype(">u2"), "TIFF"),
    "int.tif": encode(GREY.astype(np.int32), "TIFF"),
    "float.tif": encode(GREY.astype(np.float32), "TIFF"),
    "colours.png": png(16, 2, COLOURS),
    "alpha.png": png(16, 6, np.dstack([COLOURS, ALPHA * np.uint16(257)])),
}


def scaled(values):
    low, high = RANGE
    return np.rint(255 * ((values - float(low)) / (high - low)).clip(0, 1)).astype(np.uint8)


def expected(name):
    values = COLOURS if name in ("colours.png", "alpha.png") else np.dstack([GREY] * 3)
    return scaled(values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_range_scales_files_of_16_and_32_bits_and_no_others(folder):
    paths = [folder / name for name in FILES]
    (folder / "8-bit").mkdir()
    shallow = [folder / "8-bit" / name for name in ("plain.png", "plain.jpg")]
    for path in shallow:
        PIL.Image.fromarray(smooth_image(*SIZE)).save(path)
    source = image_files([*map(str, paths + shallow)], Reading(pixel_range=RANGE))
    spec = image_batch(10, SIZE, parse_ops("decode|central_crop", SIZE)[0])
    (batch,) = host_eval_batches(source, spec, rows=np.arange(10))
    assert batch["mask"].all()
    for path, found in zip(paths, batch["image"], strict=False):
        np.testing.assert_array_equal(found, expected(path.name), err_msg=path.name)
    for path, found in zip(shallow, batch["image"][8:], strict=True):
        np.testing.assert_array_equal(found, np.asarray(PIL.Image.open(path)))


def test_alpha_is_not_scaled(folder):
    source = image_files([str(folder / "alpha.png")], Reading(channels=4, pixel_range=RANGE))
    found = to_pixels(source.read(0)["image"], 4).numpy()
    np.testing.assert_array_equal(found, np.dstack([expected("alpha.png"), ALPHA]))


def test_a_model_keeps_the_range_of_its_run(folder):
    spec = Spec(None, "antialiased", (0.0,) * 3, (1.0,) * 3, pixel_range=RANGE)
    for name in FILES:
        found = np.rint(255 * load_image(folder / name, spec))
        np.testing.assert_array_equal(found, expected(name), err_msg=name)
    source = open_images(PIL.Image.open(folder / "float.tif"), spec.reading)
    found = to_pixels(source.read(0)["image"])
    np.testing.assert_array_equal(found, expected("float.tif"))


def test_what_no_range_scales_is_named():
    for kind in (np.int32, np.float32):
        why = why_unreadable(encode(GREY.astype(kind), "TIFF"))
        assert "--config.data.pixel_range=LOW,HIGH" in why
    assert not why_unreadable(FILES["float.tif"], Reading(pixel_range=RANGE))


@pytest.mark.parametrize(("most", "bits"), [(255, 8), (4095, 12), (9000, 14), (40_000, None)])
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_unused_bits_are_seen_by_doctor_and_at_the_start(tmp_path, most, bits, suffix):
    for i in range(3):
        pixels = np.full((4, 4), most if i == 1 else 0, np.uint16)
        (tmp_path / f"{i}.{suffix}").write_bytes(encode(pixels, suffix.replace("tif", "tiff")))
    where = {"split": "all", "data_dir": tmp_path, "image_size": (4, 4)}
    found = unused_bits_of(make_source("unlabelled", **where))
    doctor = check_decoding(str(tmp_path))
    assert doctor.state == (WARNING if bits else OK)
    if bits is None:
        assert found is None
    else:
        remedy = f"set --config.data.pixel_range=0,{2**bits - 1} for {bits} bits"
        assert found[1] == doctor.remedy == remedy and f"{most:,}" in found[0]
    pixel_range = (0, most)
    assert unused_bits_of(make_source("unlabelled", **where, pixel_range=pixel_range)) is None
    assert check_decoding(str(tmp_path), pixel_range).state == OK


def test_pictures_of_a_sheet_are_those_that_the_model_sees(folder):
    tile = neighbours._tile(str(folder / "grey.tif"), "", Reading(pixel_range=(0, 4095)))
    middle = np.asarray(tile)[64, 64]  # half way, of values up to 4,011
    assert (abs(middle.astype(int) - 125) < 10).all()


def test_a_file_of_weights_states_the_range():
    spec = Spec((8, 8), "antialiased", pixel_range=RANGE)
    stated = json.loads(json.dumps(spec.stated_reading))
    assert all(KINDS[READING[key]](value) for key, value in stated.items() if value is not None)
    assert read_preparation(stated, (8, 8), "x")["pixel_range"] == RANGE
    assert read_preparation({}, (8, 8), "x")["pixel_range"] is None
