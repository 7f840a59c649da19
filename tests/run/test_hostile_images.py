"""A folder of every kind of file and name that users have goes through all commands."""

import io
import json
import os

import numpy as np
import PIL.Image
import pytest
from images import encode, smooth_image

from vit_jax.diagnosis.benchmarks import input as input_benchmark
from vit_jax.main import main

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")

TINY = smooth_image(20, 24)


def image(file_format="JPEG", **options):
    return encode(TINY, file_format, **options)


def oriented(number, file_format="JPEG"):
    exif = PIL.Image.Exif()
    exif[0x0112] = number
    return image(file_format, exif=exif.tobytes())


def animated():
    frames = [PIL.Image.fromarray(smooth_image(20, 24, seed)) for seed in range(2)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


GREY_16 = encode((np.arange(480, dtype=np.uint16) * 100).reshape(20, 24), "PNG")

READ = {
    b"plain.jpg": image(),
    b"UPPER.JPG": image(),
    b"other.jpeg": image(),
    b"image.png": image("PNG"),
    b"modern.webp": image("WEBP"),
    b"windows.bmp": image("BMP"),
    b"moving.gif": animated(),
    b"scan.tif": image("TIFF"),
    b"packed.tiff": image("TIFF", compression="tiff_lzw"),
    b"grey.jpg": image(mode="L"),
    b"print.jpg": image(mode="CMYK"),
    b"alpha.png": image("PNG", mode="RGBA"),
    b"palette.png": image("PNG", mode="P"),
    b"bilevel.tif": image("TIFF", mode="1"),
    b"deep.png": GREY_16,
    b"deep.tif": encode((np.arange(480, dtype=np.uint16) * 100).reshape(20, 24), "TIFF"),
    b"progressive.jpg": image(progressive=True),
    b"phone.jpg": oriented(6),
    b"phone.png": oriented(8, "PNG"),
    b"strange_exif.jpg": oriented(77),
    b"no_exif_after_all.jpg": image(comment=b"Exif\x00\x00nothing"),
    b"dot.png": encode(TINY[:1, :1], "PNG"),
    b"line.png": encode(smooth_image(1, 300), "PNG"),
    b"truly_a.webp.jpg": image("WEBP"),
    b"latin_\xe9t\xe9.jpg": image(),
    "日本 é ☃.jpg".encode(): image(),
    b"new\nline and  spaces.jpg": image(),
    b"[bold]markup[red].jpg": image(),
    b"100%s{x}'\"$HOME.jpg": image(),
    b"-dash.jpg": image(),
    b"l" * 240 + b".jpg": image(),
    b"folder.jpg/inside.jpg": image(),
}
BROKEN = {
    b"empty.jpg": b"",
    b"page.jpg": b"<!DOCTYPE html><html><body>404</body></html>",
    b"half.jpg": image()[:200],
    b"half.png": image("PNG")[:200],
    b"words.webp": b"some words",
    b"float.tif": encode(np.ones((20, 24), np.float32), "TIFF"),
}
SKIPPED = (b"a.heic", b"b.HEIC", b"c.svg", b"notes.txt", b"README", b".hidden.jpg", b".DS_Store")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = os.fsencode(tmp_path_factory.mktemp("hostile"))
    for i, class_name in enumerate((b"one thing", b"\xff other")):
        folder = root + b"/images/" + class_name
        for name, content in [*READ.items(), *BROKEN.items(), *((n, b"x") for n in SKIPPED)]:
            path = folder + b"/" + name
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        os.symlink(b"nowhere", folder + b"/dangling.jpg")
        os.symlink(b"itself.jpg", folder + b"/itself.jpg")
        os.symlink(folder + b"/plain.jpg", folder + b"/link.jpg")
        os.symlink(folder, folder + b"/around")
        os.mkfifo(folder + b"/pipe.jpg")
        for hidden in (b"__MACOSX", b".cache"):
            os.mkdir(folder + b"/" + hidden)
            with open(folder + b"/" + hidden + b"/1.jpg", "wb") as file:
                file.write(image())
        assert i < 2
    os.mkdir(root + b"/images/empty class")
    os.mkdir(root + b"/images/__MACOSX")
    with open(root + b"/images/beside.jpg", "wb") as file:
        file.write(image())
    assert len({*READ, *BROKEN, *SKIPPED}) + 11 >= 40  # kinds
    return os.fsdecode(root)


@pytest.fixture(scope="module")
def words(root):
    return [
        "--config=configs/folder.py:debug",
        f"--config.data.data_dir={root}/images",
        "--config.data.image_size=16",
        "--config.data.max_corrupt_fraction=1",
        "--config.duration=4 steps",
        "--config.schedule.warmup=0 steps",
    ]


@pytest.fixture(scope="module")
def run(root, words, request):
    """The workdir of a run on the images, and what it said."""
    capture = request.getfixturevalue("capsys_of_module")
    workdir = f"{root}/run"
    assert main([*words, f"--workdir={workdir}"]) == 0
    return workdir, capture()


@pytest.fixture(scope="module")
def capsys_of_module(request):
    manager = request.config.pluginmanager.getplugin("capturemanager")

    def read():
        out, err = manager.read_global_capture()
        return out + err

    manager.read_global_capture()
    return read


def check_said(text):
    assert "Traceback" not in text
    for what in ("4 .heic", "2 .svg", "2 .jpg that is no file", "1 beside the folders",
                 "hold no image: empty class", "ignored these folders: "):  # fmt: skip
        assert what in text, what
    assert r"\udcff other/.cache" in text and "__MACOSX" in text


def test_training(run):
    workdir, said = run
    check_said(said)
    with open(f"{workdir}/classes.json") as file:
        assert json.load(file) == [r"\udcff other", "empty class", "one thing"]
    with open(f"{workdir}/metrics.jsonl") as file:
        rows = [json.loads(line) for line in file]
    with open(f"{workdir}/config.json") as file:
        num_examples = json.load(file)["resolved"]["data"]["num_examples"]
    last = {name: value for row in rows for name, value in row.items()}
    assert last["step"] == 4 and last["val/num_examples"] > 0
    num_files = 2 * (len(READ) + len(BROKEN) + 3)
    assert num_examples == num_files - round(num_files / 10)


@pytest.mark.slow  # training has evaluated them
def test_evaluation(run, json_of):
    assert "val/top1" in json_of("evaluate", f"--workdir={run[0]}")


@pytest.mark.slow
def test_prediction(root, run, capsys):
    words = ["predict", f"--init_from={run[0]}", f"{root}/images"]
    assert main([*words, "--format=json"]) == 1  # some cannot be read
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_name = {row["file"].removeprefix(f"{root}/images/"): row for row in rows}
    assert len(by_name) == len(rows) == 2 * (len(READ) + len(BROKEN) + 3) + 1
    for name in BROKEN:
        assert "not a readable image" in by_name[f"one thing/{os.fsdecode(name)}"]["error"]
    assert "error" in by_name["one thing/dangling.jpg"]
    assert sum("error" in row for row in rows) == 2 * (len(BROKEN) + 2)
    assert r"one thing/latin_\udce9t\udce9.jpg" in by_name
    features = f"{root}/features.npz"
    assert main([*words[:2], f"{root}/images", f"--features={features}"]) == 1
    assert int(np.load(features)["valid"].sum()) == len(rows) - 2 * (len(BROKEN) + 2)


def test_a_name_with_markup_is_shown_as_it_is(root, run, capsys):
    path = f"{root}/images/one thing/[bold]markup[red].jpg"
    assert main(["predict", f"--init_from={run[0]}", path]) == 0
    assert "[bold]" in capsys.readouterr().out


@pytest.mark.slow
def test_benchmark(words, root, json_of, monkeypatch):
    monkeypatch.setattr(input_benchmark, "_IMAGES_A_ROUND", 128)
    monkeypatch.setattr(input_benchmark, "_NUM_ROUNDS", 1)
    assert json_of("benchmark", "--what=input", *words[:3], "--format=json")["data"] == "folder"
    output = f"--output={root}/sheet.png"
    assert main(["benchmark", "--what=augmentations", *words[:3], output]) == 0
