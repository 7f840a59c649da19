"""The predict command, and images as a model wants them."""

import csv
import functools
import io
import json

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from vit_jax import load_image, load_pretrained, pretrained_spec
from vit_jax.base.errors import InputError
from vit_jax.data import loading
from vit_jax.data.images.given import image_files, open_images
from vit_jax.inference.neighbours import nearest
from vit_jax.inference.outputs import outputs
from vit_jax.inference.predict import classify
from vit_jax.main import main
from vit_jax.transfer import read_pretrained
from vit_jax.transfer.pretrained import Cut, Spec, class_names

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")


@pytest.fixture
def images(tmp_path):
    """A folder with three images, one that is none, and a text."""
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, size in (("a.png", (32, 32)), ("b.JPG", (50, 40)), ("more/c.jpeg", (40, 50))):
        pixels = rng.integers(0, 256, (*size, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / name, "PNG" if name == "a.png" else "JPEG")
    (folder / "broken.png").write_bytes(b"not an image")
    (folder / "notes.txt").write_text("mine")
    return folder


def predict(capsys, *words, code=0):
    assert main(["predict", "--batch_size=8", *map(str, words)]) == code
    out, err = capsys.readouterr()
    assert "━" not in err  # no bar where there is no terminal
    return out


def test_images_and_folders(golden, images, one_device, capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *args: one_device)  # all eight, for five images
    source = golden / "hf_vit"
    words = [f"--init_from={source}", "--format=json", "--top=2", images, "no.png",
             images / "a.png"]  # fmt: skip
    rows = [json.loads(line) for line in predict(capsys, *words, code=1).splitlines()]
    names = ["a.png", "b.JPG", "broken.png", "more/c.jpeg", "a.png"]
    assert [row["file"] for row in rows[:5]] == [str(images / name) for name in names]
    assert rows[2]["error"].startswith("not a readable image (it holds no image; needed: JPEG")
    model, variables = load_pretrained(source)
    apply = jax.jit(model.apply)
    for row in (rows[0], rows[1], rows[3]):
        image = load_image(row["file"], pretrained_spec(source))
        expected = np.asarray(jax.nn.softmax(apply(variables, image[None])))[0]
        assert [c["index"] for c in row["classes"]] == list(np.argsort(-expected)[:2])
        for found in row["classes"]:
            assert found["probability"] == pytest.approx(expected[found["index"]], rel=1e-4)
            assert found["name"] == f"class {found['index']}"
    assert rows[4] == rows[0]
    assert rows[5] == {"file": "no.png", "error": "no such file or folder"}


def test_an_image_that_is_too_small_is_said_to_be(golden, tmp_path):
    Image.new("RGB", (8, 9)).save(tmp_path / "small.png")
    (tmp_path / "broken.png").write_bytes(b"not an image")
    source = read_pretrained(golden / "hf_vit")
    spec = source.spec._replace(ops="decode|central_crop")
    images = image_files([str(tmp_path / name) for name in ("broken.png", "small.png")])
    rows = classify(source._replace(spec=spec), images, batch_size=8, top=1)
    broken, small = (row["error"] for row in rows)
    assert broken.startswith("not a readable image (it holds no image")
    assert all(words in small for words in ("9 x 8 pixels", "'central_crop'", "takes 32 x 32"))


def test_other_padding_gives_the_same_outputs(golden, images):
    """Four files, one broken: in one full batch, and behind two more in batches with padding."""
    names = ("a.png", "b.JPG", "broken.png", "more/c.jpeg")
    source = read_pretrained(golden / "hf_vit")

    def found(names):
        files = image_files([str(images / name) for name in names])
        parts = outputs(source, files, batch_size=4, what="features")
        values, batches = zip(*parts, strict=True)
        return np.concatenate(values), np.concatenate([batch["mask"] for batch in batches])

    (expected, mask), (other, other_mask) = found(names), found((*names[:2], *names))
    assert list(mask) == [1, 1, 0, 1] and list(other_mask) == [1, 1, 1, 1, 0, 1]
    np.testing.assert_allclose(other[2:][mask == 1], expected[mask == 1], rtol=0, atol=1e-6)


def test_few_images_without_a_pipeline_are_those_of_a_pipeline(golden, images, monkeypatch, caplog):
    """Also one that cannot be read, in a predictor, which keeps the weights on the devices."""
    predictor = vit_jax.load_predictor(golden / "hf_vit")
    found = predictor(images, output="logits")
    assert "broken.png: not a readable image" in caplog.text and np.isnan(found).any()
    monkeypatch.setattr(loading, "_FEW", 0)
    np.testing.assert_array_equal(predictor(images, output="logits"), found)
    alone = vit_jax.predict(images, golden / "hf_vit", output="logits")
    np.testing.assert_array_equal(alone, found)
    monkeypatch.delattr(jax, "device_put")  # which takes time for each weight, also for one there
    np.testing.assert_array_equal(predictor(images, output="logits"), found)


def test_a_table(golden, images, capsys):
    out = predict(capsys, f"--init_from={golden / 'hf_vit'}", "--top=1", images / "a.png")
    assert "class " in out
    assert "%" in out
    words = [f"--init_from={golden / 'hf_vit'}", "--format=csv", "--top=2", images]
    head, *rows = csv.reader(io.StringIO(predict(capsys, *words, code=1)))
    assert head == ["file", "class", "probability", "class_2", "probability_2", "error"]
    assert rows[0][0] == str(images / "a.png") and 1 > float(rows[0][2]) > float(rows[0][4]) > 0
    assert rows[2][1:5] == [""] * 4 and rows[2][5].startswith("not a readable image")


def test_pixels_of_an_image(images):
    pixels = np.asarray(Image.open(images / "a.png"), np.float32)
    spec = Spec((32, 32), "antialiased", mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    expected = (pixels / 255 - spec.mean) / spec.std
    found = load_image(images / "a.png", spec)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # Squeezed, or cut out of its middle.
    assert load_image(images / "b.JPG", spec._replace(image_size=(8, 24))).shape == (8, 24, 3)
    np.testing.assert_array_equal(load_image((images / "a.png").read_bytes(), spec), found)
    with pytest.raises(InputError, match="got ndarray"):
        load_image(found, spec)
    file = images / "a.png"
    opened = [open_images(given) for given in (file, file.read_bytes())]
    first, second = (np.asarray(source.read(0)["image"]) for source in opened)
    np.testing.assert_array_equal(first, second)
    inner = load_image(images / "a.png", spec._replace(image_size=(16, 16), cut=Cut(0.5)))
    np.testing.assert_allclose(inner, expected[8:24, 8:24], atol=1e-6)


@pytest.mark.parametrize("tokens", [pytest.param("pooled", marks=pytest.mark.slow), "patches"])
def test_features_of_files(golden, images, tmp_path, capsys, tokens):
    source, output = golden / "hf_deit", tmp_path / "features.npz"
    words = [f"--init_from={source}", f"--features={output}", f"--tokens={tokens}", images]
    words += ["no.png", "none"]
    assert main(["predict", "--batch_size=8", *map(str, words)]) == 1  # one is broken
    out, err = capsys.readouterr()
    said = json.loads(out)
    assert "error: no.png: no such file or folder" in err
    assert "broken.png: not a readable image (it holds no image" in err and "; left out" in err
    why = "unreadable images: 1 (see `valid` in the file); paths without images: 2, such as no.png"
    assert err.splitlines()[-1].startswith(f"error: {why}")
    model, variables = load_pretrained(source)
    method = {"pooled": "features", "patches": "tokens"}[tokens]
    apply = jax.jit(functools.partial(model.apply, method=method))
    with np.load(output, allow_pickle=False) as file:
        assert said["shape"] == list(file["features"].shape)
        assert file["valid"].tolist() == [True, True, False, True]
        assert "label" not in file
        for name, valid, features in zip(
            file["record"], file["valid"], file["features"], strict=True
        ):
            if not valid:
                assert np.isnan(features).all()
                continue
            image = load_image(name, pretrained_spec(source))
            expected = np.asarray(apply(variables, image[None]))[0]
            if tokens == "patches":
                expected = expected[2:].reshape(4, 4, -1)
            np.testing.assert_allclose(features, expected, atol=1e-4 * np.abs(expected).max())


def test_the_nearest_pictures_of_a_folder(golden, images, tmp_path, capsys):
    source, asked = golden / "hf_vit", [images / "b.JPG", images / "broken.png"]
    words = [f"--init_from={source}", f"--neighbours={images}", *asked]
    sheet = tmp_path / "sheet.png"
    shown = predict(capsys, *words, "--format=json", "--top=5", f"--sheet={sheet}", code=1)
    row, broken = map(json.loads, shown.splitlines())
    unread = ["predict", *words[:2], str(asked[1])]
    assert main([*unread, f"--sheet={tmp_path / 'none.png'}"]) == 2
    assert "nothing to draw" in capsys.readouterr().err
    paths = [images / name for name in ("a.png", "b.JPG", "more/c.jpeg")]
    x = vit_jax.predict(paths, source, output="features")
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    similarity = {str(paths[i]): x[i] @ x[1] for i in (0, 2)}
    found = {one["file"]: one["similarity"] for one in row["neighbours"]}
    assert found == pytest.approx(similarity, abs=1e-5)  # neither itself nor what is broken
    assert [*found] == sorted(similarity, key=similarity.get, reverse=True)
    assert broken["error"].startswith("not a readable image")
    assert Image.open(sheet).size == (3 * 132 + 12, 146)
    rows = [*csv.DictReader(io.StringIO(predict(capsys, *words, "--format=csv", code=1)))]
    assert (rows[0]["neighbour"], rows[1]["neighbour"]) == (next(iter(found)), "")
    assert "…" not in predict(capsys, *words, code=1)  # long paths are folded, not cut


@pytest.mark.parametrize("number", [pytest.param(16, marks=pytest.mark.slow), 19])  # by 8
def test_each_picture_has_its_own_neighbours(golden, tmp_path, number):
    rng = np.random.default_rng(0)
    paths = [str(tmp_path / f"{i}.png") for i in range(number)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize((32, 32)).save(path)
    broken = paths[3]
    (tmp_path / "3.png").write_bytes(b"not an image")
    model = read_pretrained(golden / "hf_vit")
    rows = [*nearest(model, tmp_path, [], paths, top=1, batch_size=8)]
    assert [row["file"] for row in rows] == paths
    x = vit_jax.predict(paths, model, output="features", batch_size=8)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    similarity = np.nan_to_num(x @ x.T, nan=-2) - 4 * np.eye(number)
    for row, similar in zip(rows, similarity, strict=True):
        if row["file"] == broken:
            assert "not a readable image" in row["error"]
        else:
            assert [one["file"] for one in row["neighbours"]] == [paths[similar.argmax()]]


def test_features_of_a_data_set(golden, tmp_path, capsys):
    output = tmp_path / "digits.npz"
    words = [f"--init_from={golden / 'timm_vit_gap.safetensors'}", "--data=digits:test"]
    predict(capsys, *words, f"--features={output}", "--batch_size=64")  # the last one half full
    with np.load(output) as file:
        assert file["features"].shape == (360, 32)
        assert np.isfinite(file["features"]).all()
        assert file["label"].shape == file["record"].shape == (360,)
        assert sorted(set(file["label"])) == list(range(10))


def test_features_of_a_list_with_several_labels(golden, images, tmp_path, capsys):
    (images / "list.csv").write_text("file,labels\na.png,cat;dog\nb.JPG,\n")
    words = [
        f"--init_from={golden / 'hf_vit'}",
        "--data=list:all",
        f"--data_dir={images / 'list.csv'}",
    ]
    predict(capsys, *words, f"--features={tmp_path / 'f.npz'}")
    with np.load(tmp_path / "f.npz") as file:
        np.testing.assert_array_equal(file["label"], [[1, 1], [0, 0]])


def test_an_image_that_cannot_be_read(tmp_path):
    (tmp_path / "x.png").write_bytes(b"no image")
    Image.fromarray(np.ones((9, 9), np.float32)).save(tmp_path / "float.tif")
    whole = io.BytesIO()
    Image.new("RGB", (99, 99)).save(whole, "PNG")
    (tmp_path / "half.png").write_bytes(whole.getvalue()[:99])
    for name, why in (
        ("x.png", "image: it holds no image; needed: JPEG, PNG"),
        ("float.tif", "image: its pixels have 32 bits, .* save it with 8 or 16 bits"),
        ("half.png", "image: it is damaged; save it again"),
    ):
        with pytest.raises(InputError, match=f"{name}: not a readable {why}"):
            load_image(tmp_path / name, Spec((8, 8), "antialiased"))
    with pytest.raises(FileNotFoundError):
        load_image(tmp_path / "none.png", Spec((8, 8), "antialiased"))


def test_names_of_classes():
    spec = Spec((8, 8), "antialiased", class_names=("a", "b"))
    assert class_names(spec, 2) == ("a", "b")
    assert class_names(spec._replace(class_names=None), 2) == ("class 0", "class 1")
    imagenet = class_names(spec._replace(class_names=None), 1000)
    assert len(imagenet) == 1000
    assert imagenet[0] == "tench, Tinca tinca"
    assert imagenet[388].startswith("giant panda")
    assert imagenet[999].startswith("toilet tissue")


def test_a_head_that_was_never_trained_predicts_no_class(golden, images):
    found = read_pretrained(golden / "hf_vit")
    head = {name: np.zeros_like(found.params[name]) for name in ("head/kernel", "head/bias")}
    source = image_files([str(images / "a.png")])
    assert next(classify(found, source, batch_size=8, top=1))["classes"]
    untrained = found._replace(params=found.params | head)
    with pytest.raises(InputError, match="never trained; predict --features=FILE"):
        next(classify(untrained, source, batch_size=8, top=1))
