"""Exports as programs: each is computed by its own runtime."""

import importlib.util
import json
import re
import unicodedata

import jax
import numpy as np
import PIL.Image
import pytest
from etils import epath
from numpy_vit import random_variables
from pairs import clip, siglip

import vit_jax
from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.config import FAMILIES
from vit_jax.data.words import imagenet_names
from vit_jax.inference.labels import with_labels
from vit_jax.main import main
from vit_jax.models import create_model, find_family, token_stride
from vit_jax.models.contract import field_names
from vit_jax.models.zero_shot import embed_texts
from vit_jax.transfer import read_pretrained, runtimes
from vit_jax.transfer.pretrained import Pretrained, Spec
from vit_jax.transfer.program import Choice, make_program

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")


def param(name, *values, slow=False):
    """A case of a runtime, whose packages are extras; `test` has them all."""
    packages = runtimes.RUNTIMES[name].PACKAGES
    mark = pytest.mark.skipif(
        any(importlib.util.find_spec(package) is None for package in packages),
        reason=f"needs {' and '.join(packages)}: pip install -e '.[{name}]'",
    )
    return pytest.param(name, *values, marks=[mark, pytest.mark.slow] if slow else mark)


INSTALLED = [param(name) for name in runtimes.RUNTIMES]
DOUBLES = {("onnx", "float16"), ("litert", "float32")}  # of the towers, and of half as many bits
FLOATS = [param(name, precision, slow=(name, precision) in DOUBLES)
          for name, runtime in runtimes.RUNTIMES.items()
          for precision in ("float32", "float16") if precision in runtime.PRECISIONS]  # fmt: skip
# One with two heads, and one with batch norms.
FAST = {("onnx", "DeiT-Ti/16"), ("litert", "EfficientNet-B0")}
FAMILIES_OF_ALL = [
    param(format, name, slow=(format, name) not in FAST)
    for format in runtimes.RUNTIMES
    for name in (FAMILIES.find(start).names[0] for start in FAMILIES)
]
each_runtime = pytest.mark.parametrize("format", INSTALLED)


@pytest.mark.parametrize(("format", "precision"), FLOATS)
def test_bytes_in_and_probabilities_out_as_predict_gives_them(
    format, precision, golden, tmp_path, json_of
):
    output, source = tmp_path / f"model.{format}", golden / "timm_vit.safetensors"
    words = [f"--init_from={source}", f"--output={output}", f"--format={format}"]
    words += [f"--precision={precision}"]
    shown = json_of("export", *words, "--takes=bytes", "--gives=probabilities")
    receipt = json.loads((tmp_path / f"model.{format}.receipt.json").read_text())
    assert {**shown, **receipt["read_back"]} == shown
    assert set(shown["runtime"]) == set(runtimes.RUNTIMES[format].PACKAGES)
    assert shown["images"] == 16 and shown["same_class"] == 1
    assert shown["cosine"] > (0.9999 if precision == "float32" else 0.999)
    assert (receipt["takes"], receipt["gives"]) == ("bytes", "probabilities")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    found = np.asarray(runtimes.RUNTIMES[format].load(output)(pixels))
    pretrained = read_pretrained(source)
    spec = pretrained.spec._replace(ops="decode|resize")
    expected = vit_jax.predict(pixels, pretrained._replace(spec=spec), output="probabilities")
    np.testing.assert_allclose(found, expected, atol=1e-5 if precision == "float32" else 2e-3)
    assert (shown["largest_probability_difference"] > 1e-6) == (precision == "float16")
    card = (tmp_path / f"model.{format}.md").read_text()
    assert "gives probabilities" in card and re.search(r"uint8 \([b1], 32, 32, 3\), RGB", card)


@pytest.mark.parametrize(
    ("format", "precision"),
    [param("onnx", name, slow=name != "float32") for name in runtimes.RUNTIMES["onnx"].PRECISIONS],
)
def test_arrays_above_the_limit_of_a_file_are_in_a_second_one(
    format, precision, golden, tmp_path, monkeypatch
):
    monkeypatch.setattr(runtimes.RUNTIMES[format], "MOST_BYTES", 10_000)
    source = golden / "vit_pretrained.npz"  # whose hidden head layer jax2onnx gives a bias of 0
    program = runtimes._make_program(read_pretrained(source), format)
    samples = np.random.default_rng(0).uniform(-1, 1, (4, *program.shape)).astype(np.float32)
    program = program._replace(precision=precision, samples=samples)
    files, _ = runtimes.RUNTIMES[format].convert(epath.Path(tmp_path) / "m.onnx", program)
    assert files == sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    found = runtimes.RUNTIMES[format].load(epath.Path(tmp_path) / "m.onnx")(samples)
    expected = np.asarray(jax.jit(program.call)(samples))
    least = {"float32": 0.99999, "float16": 0.9999, "int8": 0.95}[precision]
    assert runtimes._cosines(found, expected).min() > least


def test_a_program_of_one_file_holds_less_than_2_gib(golden, tmp_path, monkeypatch):
    monkeypatch.setattr(runtimes, "MOST_BYTES", 1000)
    with pytest.raises(
        InputError, match=r"the file holds at most 2 GiB; export as onnx, timm, hf or"
    ):
        vit_jax.export(golden / "hf_vit", tmp_path / "m.stablehlo", "stablehlo")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("format", "name"), FAMILIES_OF_ALL)
def test_every_family_is_computed(format, name, tmp_path):
    small = {"width": 32, "depth": 2, "mlp_dim": 48, "num_heads": 2, "stem_width": 32,
             "token_width": 8, "width_factor": 0.125, "depth_factor": 0.1}  # fmt: skip
    known = field_names(find_family(name))
    stages = {"stages": (1, 2)} if "stages" in known and not name.startswith("R+") else {}
    size = tuple(2 * side for side in token_stride(name))
    fields = {key: value for key, value in small.items() if key in known} | stages
    model = create_model(name, 5, size, **fields)
    state = random_variables(model, np.zeros((1, *size, 3), np.float32))
    params = tree.flatten_names(state.pop("params"))
    found = Pretrained(
        "here", model, params, Spec(size, "x"), model_state=tree.flatten_names(state)
    )
    back = vit_jax.export(found, tmp_path / f"model.{format}", format)["read_back"]
    assert back["cosine"] > 0.99999


def test_what_a_runtime_computes_otherwise_is_not_written(golden, tmp_path, capsys, monkeypatch):
    """All runtimes are compared so."""
    load = runtimes.stablehlo.load
    monkeypatch.setattr(
        runtimes.stablehlo, "load", lambda path: lambda images: 1.01 * load(path)(images)
    )
    words = [f"--init_from={golden / 'hf_vit'}", f"--output={tmp_path / 'm.stablehlo'}"]
    assert main(["export", *words, "--format=stablehlo"]) == 1
    assert "the exported file gives logits of cosine 1.00000 with" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_float16_is_measured_by_cosine_and_class():
    """Of three classes that are nearly as likely."""
    scales = np.array([[1, 1.001, 0.5]], np.float32)
    pictures = [np.linspace(sign, 9 * sign, 5)[:, None, None, None] for sign in (1, -1)]

    def compare(by, gives="logits"):
        choice = runtimes.Choice(precision="float16", gives=gives)
        compute = (lambda x: x[:, 0, 0, :1] * scales, lambda x: x[:, 0, 0, :1] * by)
        return runtimes._compare(*compute, pictures, choice)

    assert compare(1.01 * scales)["cosine"] == pytest.approx(1)
    with pytest.raises(RuntimeError, match=r"of cosine 0\.9"):
        compare(scales**2)
    with pytest.raises(RuntimeError, match=r"50\.0% of the pictures get another class"):
        compare(scales[:, [1, 0, 2]])
    assert compare(scales[:, [1, 0, 2]], "features")["images"] == 10
    scales = np.array([[1, 1 + 1e-6, 0.5]])  # as nearly equal as rounding makes them
    assert compare(scales[:, [1, 0, 2]])["same_class"] == 1


@pytest.mark.parametrize(
    ("format", "precision", "make"),
    [
        param("stablehlo", "float32", siglip, slow=True),
        param("onnx", "float32", siglip, slow=True),
        param("onnx", "float16", clip),
        param("litert", "float32", clip, slow=True),
        param("litert", "float16", siglip, slow=True),
    ],
)
def test_each_tower_of_two_gives_features_to_compare(format, precision, make, golden, tmp_path):
    source, run = make(golden, tmp_path / "source"), {}
    for gives in ("image_features", "text_features"):
        output = tmp_path / f"{gives}.{format}"
        receipt = vit_jax.export(source, output, format, gives=gives, precision=precision)
        assert receipt["read_back"]["cosine"] > (0.9999 if precision == "float32" else 0.999)
        run[gives] = runtimes.RUNTIMES[format].load(epath.Path(output))
    card, text = (tmp_path / f"{output.name}.md").read_text(), receipt["text"]
    assert receipt["takes"] == "ids" and receipt["read_back"]["texts"] == 16
    assert re.search(r"Takes token ids, int32 \([b1], 40\); gives text_features \([b1], ", card)
    kept = [f"{output.name}.{name}" for name in text["tokenizer"]["files"]]
    assert kept and {*kept} < {*receipt["files"]} and all((tmp_path / n).exists() for n in kept)
    pretrained = read_pretrained(source)
    side, labels = pretrained.read_text_side(), ("a cat", "two Dogs, one red")
    ids = side.read_tokenizer()(labels)
    atol = 1e-6 if precision == "float32" else 2e-3
    texts = np.asarray(run["text_features"](ids))
    np.testing.assert_allclose(texts, embed_texts(side, ids), atol=atol)
    images = np.random.default_rng(0).uniform(-1, 1, (3, *pretrained.spec.image_size, 3))
    found = text["scale"] * np.asarray(run["image_features"](images.astype("f"))) @ texts.T
    labelled = with_labels(pretrained, labels, ["{}"])
    expected = labelled.model.apply(labelled.variables, images)
    np.testing.assert_allclose(found + text["bias"], expected, atol=20 * atol)


def test_a_program_of_texts_has_no_int8():
    """tests/refused.txt has what else is refused."""
    with pytest.raises(InputError, match=r"precision=int8: .* takes token ids; take float16 or"):
        Choice(gives="text_features", precision="int8").check("onnx", ("float32", "int8"))


def test_a_quantiser_that_fails_is_said_to(golden, tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise IndexError("too many indices")

    monkeypatch.setattr(runtimes.RUNTIMES["onnx"], "convert", fail)
    others, pictures = tmp_path / "others", tmp_path / "pictures"
    choice = {"precision": "int8", "pictures": pictures, "calibration": others}
    for i, path in enumerate(
        (pictures / "class 0/a.png", pictures / "class 1/a.png", others / "b.png")
    ):
        path.parent.mkdir(parents=True)
        PIL.Image.new("RGB", (36, 36), (i, 0, 0)).save(path)
    model = read_pretrained(golden / "timm_vit.safetensors")
    with pytest.raises(RuntimeError, match=r"cannot hold this model so \(IndexError: .*float16"):
        runtimes.export_program(tmp_path / "m.onnx", model, "onnx", Choice(**choice))
    (others / "c.png").write_bytes((pictures / "class 1/a.png").read_bytes())
    with pytest.raises(RuntimeError, match="cannot hold this model so"):
        runtimes.export_program(tmp_path / "m.onnx", model, "onnx", Choice(**choice))
    assert re.search(r"1 of 2 pictures are in .*c\.png; they are left out", caplog.text)
    (others / "b.png").unlink()
    with pytest.raises(InputError, match=r"^calibration=.*: 1 of 1 pictures .*c\.png; give other"):
        runtimes.export_program(tmp_path / "m.onnx", model, "onnx", Choice(**choice))
    choice |= {"calibration": tmp_path / "none"}
    with pytest.raises(InputError, match=r"^calibration: .*none: no such file or folder"):
        runtimes.export_program(tmp_path / "m.onnx", model, "onnx", Choice(**choice))


@each_runtime
def test_int8_is_measured_by_top1_on_pictures_of_known_classes(
    format, golden, tmp_path, monkeypatch
):
    source = read_pretrained(golden / "timm_vit.safetensors")
    spec = source.spec._replace(class_names=tuple("abcdefghij"))
    source, draw = source._replace(spec=spec), np.random.default_rng(0).integers
    for folder in ("calibration", "pictures"):
        for i in range(8):
            image = PIL.Image.fromarray(draw(0, 256, (4, 4, 3), np.uint8)).resize((36, 36))
            (top,) = vit_jax.predict(image, source, top=1)
            path = tmp_path / folder / top["classes"][0]["name"] / f"deeper/{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
    choice = {"precision": "int8", "pictures": tmp_path / "pictures", "takes": "bytes"}
    choice["calibration"] = tmp_path / "calibration"
    monkeypatch.setattr(runtimes, "_CALIBRATED", 5)
    output = tmp_path / f"m.{format}"
    if "int8" not in runtimes.RUNTIMES[format].PRECISIONS:
        with pytest.raises(InputError, match="precision='int8'"):
            vit_jax.export(source, output, format, **choice)
        return
    back = vit_jax.export(source, output, format, **choice, max_drop=0.5)["read_back"]
    assert (back["images"], back["vit_jax_top1"]) == (8, 1)
    assert back["top1"] >= 0.5 and back["cosine"] > 0.9 and back["calibration_images"] == 4
    assert (
        f"top-1 {back['top1']:.2%}, the model's 100.00%"
        in (tmp_path / f"m.{format}.md").read_text()
    )
    if format == "onnx":  # no matrix of a layer stays in float32
        import onnx

        arrays = onnx.load(output).graph.initializer
        kinds = {x.data_type for x in arrays if len(x.dims) == 2 and min(x.dims) > 1}
        assert kinds == {onnx.TensorProto.INT8}
    load = runtimes.RUNTIMES[format].load
    of_others = lambda path: lambda images: np.roll(load(path)(images), 1, axis=-1)  # noqa: E731
    with (
        monkeypatch.context() as patched,
        pytest.raises(RuntimeError, match=r"its top-1 is 0\.00%"),
    ):
        patched.setattr(runtimes.RUNTIMES[format], "load", of_others)
        vit_jax.export(source, tmp_path / f"n.{format}", format, **choice)
    next((tmp_path / "pictures").iterdir()).rename(tmp_path / "pictures/z")
    with pytest.raises(InputError, match="has no class 'z'"):
        vit_jax.export(source, tmp_path / f"n.{format}", format, **choice)


def test_labels_are_the_first_folders_by_the_names_of_training():
    lemmas = tuple(imagenet_names().values())
    paths = ["x/n01443537/1.png", "x/tench, Tinca tinca/deeper/2.png"]
    assert runtimes._labels(paths, "x", lemmas).tolist() == [1, 0]
    decomposed = unicodedata.normalize("NFD", "é")
    assert runtimes._labels([f"x/{decomposed}/1.png"], "x", ("e", "é")).tolist() == [1]
    with pytest.raises(InputError, match="has no class 'n01443537'"):
        runtimes._labels(paths, "x", ("e", "é"))
    with pytest.raises(InputError, match=r"^pictures=x: x/1\.png .* a folder for each class"):
        runtimes._labels([*paths, "x/1.png"], "x", lemmas)


def test_a_picture_that_cannot_be_read_is_named(golden, tmp_path, monkeypatch):
    def refuse(path, spec):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(runtimes, "load_image", refuse)
    PIL.Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(InputError, match=r"a\.png'?: cannot be read \(Permission denied\)"):
        vit_jax.export(golden / "hf_vit", tmp_path / "m.stablehlo", "stablehlo", pictures=tmp_path)


def test_a_model_without_classes_gives_features(golden, tmp_path):
    source = read_pretrained(golden / "hf_vit")
    model = source.model.clone(num_classes=None)
    params = {name: x for name, x in source.params.items() if not name.startswith("head/")}
    source = source._replace(model=model, params=params)
    receipt = vit_jax.export(source, tmp_path / "m.stablehlo", "stablehlo")
    assert receipt["gives"] == "features" and receipt["read_back"]["largest_feature"] > 0
    with pytest.raises(InputError, match="is tested by top-1, and"):
        make_program(source, Choice(precision="int8"))


@each_runtime
def test_no_folder_is_named_like_a_program(format, golden, tmp_path):
    with pytest.raises(InputError, match=f"writes a folder or .* file; name one, or .*{format}$"):
        vit_jax.export(golden / "timm_vit.safetensors", tmp_path / f"m.{format}", "timm")


def test_a_choice_is_checked_before_the_model_is_read(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"max_drop=0\.5: is of precision=int8"):
        vit_jax.export("none.npz", tmp_path / "m.stablehlo", "stablehlo", max_drop=0.5)
    monkeypatch.setattr(runtimes.stablehlo, "PACKAGES", ("no_such_package",))
    with pytest.raises(InputError, match="no_such_package is not installed"):
        vit_jax.export("none.npz", tmp_path / "m.stablehlo", "stablehlo")


def test_logits_of_an_untrained_head_are_named(golden, tmp_path, caplog):
    source = read_pretrained(golden / "vit_finetuned.npz")
    zeros = {name: 0 * x for name, x in source.params.items() if name.startswith("head/")}
    for name, head in (("usual", {}), ("zeros", zeros)):
        changed = source._replace(params=source.params | head)
        vit_jax.export(changed, tmp_path / f"{name}.npz", "npz")
        assert ("the head was never trained" in caplog.text) == (name == "zeros")
