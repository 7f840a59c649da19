"""The export command: of a run, and of the goldens."""

import functools
import hashlib
import json
import os
import pathlib
import re
import shutil

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
from asked import prepare
from at_fault import at_fault
from etils import epath
from numpy_vit import random_params
from published import random_model

import vit_jax
from vit_jax import load_pretrained, pretrained_spec, save_pretrained
from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.checkpoints.checkpoint import Checkpoints
from vit_jax.checkpoints.checksums import hash_params
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.data.division import Division
from vit_jax.data.images.given import image_files
from vit_jax.inference.outputs import outputs
from vit_jax.main import main
from vit_jax.models import create_model
from vit_jax.run.setup.workdir import write_workdir
from vit_jax.transfer import export as export_lib
from vit_jax.transfer import init_variables, read_pretrained, with_image_size
from vit_jax.transfer.pretrained import Cut, Spec, ops_for, ops_of_cut
from vit_jax.transfer.workdir import _cut

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")

FILE = str(pathlib.Path(__file__).parents[2] / "configs/quickstart.py") + ":debug"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a run with a running average, saved at step 10."""
    workdir = epath.Path(tmp_path_factory.mktemp("run"))
    config = load_config(FILE)
    overrides = {"optimizer.ema_decay": "0.5", "model.scan": "true", "data.mean": "0.4,0.5,0.6"}
    assert not apply_overrides(config, list(overrides.items()))
    prepared = prepare(config, workdir)
    with jax.set_mesh(prepared.mesh):
        state = prepared.experiment.init()
        state = state.replace(ema=jax.tree.map(lambda leaf: leaf + 0.01, state.ema))
        write_workdir(prepared.workdir, prepared.resolved, prepared.train_source)
        checkpoints = Checkpoints(workdir / "checkpoints", keep_last=2, keep_every=None)
        checkpoints.save(10, state, {})
        checkpoints.close()
    rows = [{"step": 5, "test/top1": 0.25, "test/loss": None},
            {"step": 10, "test/top1": 0.5, "test/top1_raw": 0.375, "train/loss": 2.0},
            {"step": 15, "test/top1": 0.75}]  # fmt: skip
    torn = '{"step": 5, "test/'  # as a process that is killed leaves
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (workdir / "metrics.jsonl").write_text(f"{torn}\n{lines}{torn}")
    return workdir


def export(capsys, *words):
    """What the command prints."""
    assert main(["export", *map(str, words)]) == 0
    return json.loads(capsys.readouterr().out)


def changed(run, tmp_path, ops, loss="softmax", data="digits"):
    """A copy of `run`, as if it had been evaluated by these ops, and so on."""
    config = json.loads((run / "config.json").read_text())
    resolved = config["resolved"]
    resolved["evals"]["test"]["ops"], resolved["loss"]["name"] = ops, loss
    resolved["data"]["name"] = data
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def named(variables):
    return tree.flatten_names(variables["params"])


@pytest.mark.parametrize("format", ["npz", "timm"])
def test_a_run(run, tmp_path, capsys, format):
    output = tmp_path / ("model.npz" if format == "npz" else "model")
    shown = export(capsys, f"--workdir={run}", f"--output={output}", f"--format={format}")
    assert shown["largest_logit_difference"] == 0
    model, variables = load_pretrained(output)
    expected_model, expected = load_pretrained(run, scan=False)
    assert model == expected_model
    for name, leaf in named(expected).items():
        np.testing.assert_array_equal(named(variables)[name], leaf, err_msg=name)
    spec = pretrained_spec(output)
    assert spec.class_names == tuple("0123456789")
    assert spec.mean == (0.4, 0.5, 0.6)

    folder, stem = (output, "") if output.is_dir() else (tmp_path, "model.npz.")
    receipt = json.loads((folder / f"{stem}receipt.json").read_text())
    assert (receipt["source"], receipt["step"]) == (str(run), 10)
    assert receipt["weights"] == "running average"
    stored = json.loads((run / "config.json").read_text())
    assert stored["resolved"] == receipt["config"]
    assert receipt["results"] == {
        "test/top1": {"value": 0.5, "step": 10}, "test/loss": {"value": None, "step": 5},
    }  # fmt: skip
    assert receipt["parameters"]["count"] == sum(leaf.size for leaf in named(variables).values())
    assert receipt["parameters"]["sha256"] == hash_params(read_pretrained(run).params)
    results = with_image_size(read_pretrained(run), 8).run["results"]
    assert results == receipt["results"]
    assert not with_image_size(read_pretrained(run), 12).run["results"]  # measured at 8 px
    for name, digest in receipt["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    card = (folder / ("README.md" if stem == "" else "model.npz.md")).read_text()
    assert "step 10" in card
    assert "computes in" not in card
    assert "| test/top1 | 0.5 | 10 |" in card
    assert "| test/loss | not finite | 5 |" in card


def test_every_route_to_a_checkpoint_gives_the_same_features(run, tmp_path):
    """A run and its files, read, fine-tuned and given to `predict`."""
    routes = {"run": run, "npz": tmp_path / "model.npz", "timm": tmp_path / "model"}
    spec = read_pretrained(run).spec
    for format in ("npz", "timm"):
        save_pretrained(routes[format], *load_pretrained(run, scan=False), format, spec)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)
    images = ((pixels / 255 - [0.4, 0.5, 0.6]) / 0.5).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def features(model, variables):
        return model.apply(variables, images, method="features")

    model, variables = load_pretrained(run)
    expected = np.asarray(features(model, variables))
    assert np.abs(expected[0] - expected[1]).max() > 0.01
    for name, path in routes.items():
        params, _ = init_variables(read_pretrained(path), model)  # of a run with init_from=PATH
        started = {"params": variables["params"] | tree.unflatten_names(params)}
        for found in (features(*load_pretrained(path)), features(model, started)):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=name)
    for i, image in enumerate(pixels):
        PIL.Image.fromarray(image).save(tmp_path / f"{i}.png")
    files = image_files([str(tmp_path / f"{i}.png") for i in range(2)])
    ((found, _),) = outputs(read_pretrained(routes["npz"]), files, batch_size=2, what="features")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_run_in_bfloat16_is_told_from_its_export(run, tmp_path, capsys):
    source = read_pretrained(run)
    coarse = source._replace(model=source.model.clone(dtype=jnp.bfloat16))
    receipt = export_lib.export(coarse, tmp_path / "model.npz", "npz")
    assert (receipt["computed_in"], receipt["read_back"]["dtype"]) == ("bfloat16", "float32")
    assert "The source computes in bfloat16" in (tmp_path / "model.npz.md").read_text()


def test_the_weights_are_a_choice(run, tmp_path, capsys):
    both = {}
    for weights in ("average", "raw"):
        words = [f"--workdir={run}", f"--weights={weights}", "--format=timm"]
        export(capsys, *words, f"--output={tmp_path / weights}")
        both[weights] = named(load_pretrained(tmp_path / weights)[1])
    results = json.loads((tmp_path / "raw/receipt.json").read_text())["results"]
    assert results == {"test/top1": {"value": 0.375, "step": 10}}
    raw = read_pretrained(run, averaged=False).params
    for name, leaf in raw.items():
        np.testing.assert_array_equal(both["raw"][name], leaf)
    assert any((both["average"][name] != leaf).any() for name, leaf in raw.items())


def test_a_program_for_any_batch_on_every_platform(golden, tmp_path, capsys):
    output = tmp_path / "vit.stablehlo"
    source = golden / "timm_vit.safetensors"
    shown = export(capsys, f"--init_from={source}", f"--output={output}", "--format=stablehlo")
    assert shown["largest_logit_difference"] <= 1e-6 * shown["largest_logit"]
    program = jax.export.deserialize(bytearray(output.read_bytes()))
    assert program.platforms == ("cpu", "cuda", "tpu")
    with np.load(golden / "timm_vit.io.npz") as io:
        for images, logits in ((io["image"], io["logits"]), (io["image"][:1], io["logits"][:1])):
            found = np.asarray(program.call(images))
            np.testing.assert_allclose(found, logits, atol=1e-4 * np.abs(logits).max())


def test_another_image_size(golden, tmp_path, capsys):
    words = [f"--init_from={golden / 'hf_vit'}", "--image_size=48,40", "--format=hf"]
    export(capsys, *words, f"--output={tmp_path / 'larger'}")
    model, variables = load_pretrained(tmp_path / "larger")
    assert model.image_size == (48, 40)
    with np.load(golden / "hf_vit/io.npz") as io:
        found = jax.jit(model.apply)(variables, io["image_resampled"])
        expected = io["logits_resampled"]
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_of_any_size_it_stays(golden, tmp_path):
    source = read_pretrained(golden / "bit.npz")
    receipt = vit_jax.export(golden / "bit.npz", tmp_path / "model.npz", "npz")
    assert source.model.image_size is receipt["preprocessing"]["image_size"] is None
    assert "- Images: any size, (pixel" in (tmp_path / "model.npz.md").read_text()
    assert read_pretrained(tmp_path / "model.npz").model == source.model
    with pytest.raises(InputError, match=r"images of any size; choose .*--image_size"):
        export_lib.export(source, tmp_path / "bit.stablehlo", "stablehlo")


def test_the_card_says_how_files_become_pixels_where_that_is_unusual(golden, tmp_path):
    pretrained = read_pretrained(golden / "hf_vit")
    usual = vit_jax.export(pretrained, tmp_path / "usual", "hf")
    spec = pretrained.spec._replace(pixel_range=(100, 4095), exif=False)
    other = vit_jax.export(pretrained._replace(spec=spec), tmp_path / "other", "hf")
    stated = {"pixel_range": (100, 4095), "exif": False}
    assert other["preprocessing"] == usual["preprocessing"] | stated
    lines = (tmp_path / "other/README.md").read_text().splitlines()
    further = [line for line in lines if line.startswith("- Files")]
    assert "255 (value - 100) / (4095 - 100)" in further[0] and "EXIF" in further[1]
    assert "- Files" not in (tmp_path / "usual/README.md").read_text()


def test_outputs_that_a_folder_cannot_have(golden, tmp_path, capsys):
    """Called like a file, there already, below a file; tests/refused.txt has other refusals."""
    words = ["export", f"--init_from={golden / 'hf_vit'}", "--format=hf"]
    for output in (tmp_path / "out.npz", tmp_path, golden / "vit_pretrained.npz/x"):
        assert main([*words, f"--output={output}"]) == 2
        assert "error: --output=" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_files_of_others_are_left_alone(golden, tmp_path, capsys):
    words = ["export", f"--init_from={golden / 'timm_vit_gap.safetensors'}", "--format=timm"]
    for name in ("model.json", "model.safetensors.md", "model.safetensors.receipt.json"):
        (tmp_path / name).write_text("mine")
        assert main([*words, f"--output={tmp_path / 'model.safetensors'}"]) == 2
        assert f"{name} already exists; remove it" in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()


def test_a_disk_that_fills_up_leaves_nothing(golden, tmp_path, monkeypatch):
    source, fsync = read_pretrained(golden / "hf_vit"), os.fsync
    for error, raised in ((OSError("no space left"), InputError), (KeyboardInterrupt(), None)):

        def full(number, error=error):
            if "/b/.model.safetensors" in os.readlink(f"/proc/self/fd/{number}"):
                raise error
            fsync(number)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(raised or type(error)):
            export_lib.export(source, tmp_path / "a/b", "hf")
        assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", fsync)
    export_lib.export(source, tmp_path / "a/b", "hf")


@pytest.mark.parametrize(
    ("format", "cut", "ops", "by_library"),
    [
        ("npz", None, None, None),
        ("npz", Cut(0.5, "squash", "bicubic"), "decode|resize(64)|central_crop", None),
        ("npz", Cut(0.5, "center", "bicubic", "transformers"), None, None),
        ("timm", Cut(0.5, "squash", "bicubic"), None, None),
        ("timm", Cut(0.5, "center"), "decode|resize_small(64)|central_crop",
         "decode|torchvision_resize(64, 'bilinear')|torchvision_crop"),
        ("hf", Cut(0.5, "squash", "bicubic"), "decode|torchvision_resize((64, 64), 'bicubic')|"
         "central_crop", None),
        ("hf", Cut(0.5, "center"), "decode|resize_small(64)|central_crop",
         "decode|torchvision_resize(64, 'bilinear')|central_crop"),
    ],
)  # fmt: skip
def test_what_is_cropped_stays_so(golden, tmp_path, format, cut, ops, by_library):
    source = read_pretrained(golden / "vit_finetuned.npz")
    spec = source.spec._replace(cut=cut, ops=ops, loss="sigmoid")
    output = tmp_path / ("model.npz" if format == "npz" else "model")
    receipt = export_lib.export(source._replace(spec=spec), output, format)
    assert receipt["preprocessing"]["ops"] == ops_for(spec)
    card = (tmp_path / "model.npz.md" if format == "npz" else output / "README.md").read_text()
    assert f"by `{ops_for(spec)}`" in card
    assert "probabilities by sigmoid" in card
    assert ("does not support these ops" in card) == (by_library is not None)
    assert by_library is None or f"from these files it does `{by_library}`" in card
    again = pretrained_spec(output)
    library = {"hf": "transformers", "timm": "timm"}.get(format, (cut or Cut()).library)
    assert (again.cut or Cut()) == (cut or Cut())._replace(library=library)
    assert (ops_for(again), again.loss) == (ops_for(spec), "sigmoid")


@pytest.mark.parametrize(
    ("loss", "formats"), [("softmax", ("npz",)), ("sigmoid", ("npz", "hf", "timm"))]
)
def test_a_run_its_exports_and_their_reload_give_the_same_probabilities(
    run, tmp_path, loss, formats
):
    """For a file of another size, by the ops of the run's evaluator, which no other library has."""
    run = changed(run, tmp_path, "decode|resize_small(9)|central_crop", loss)
    noise = np.random.default_rng(0).integers(0, 256, (17, 23, 3)).astype(np.uint8)
    PIL.Image.fromarray(noise).save(tmp_path / "noise.png")
    images = image_files([str(tmp_path / "noise.png")])

    def probabilities(pretrained):
        ((found, _),) = outputs(pretrained, images, batch_size=8, what="probabilities")
        return found

    # One small model in place of the run's, as there is none that all formats hold.
    model = create_model("ViT-mu/4", 3, 8, depth=1, width=8, mlp_dim=8, num_heads=2)
    params = random_params(model, np.zeros((1, 8, 8, 3), np.float32))
    source = read_pretrained(run)
    spec = source.spec._replace(class_names=None)
    source = source._replace(model=model, params=tree.flatten_names(params), spec=spec)
    expected = probabilities(source)
    assert (abs(expected.sum() - 1) < 1e-5) == (loss == "softmax")
    for format in formats:
        path = tmp_path / format / ("model.npz" if format.startswith("npz") else "model")
        save_pretrained(path, model, {"params": params}, format, spec)
        np.testing.assert_allclose(probabilities(read_pretrained(path)), expected, rtol=1e-5)


def test_a_run_whose_names_of_classes_are_broken_is_refused(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/classes.json").write_text('["0", ')
    with at_fault(f"{tmp_path}/run/classes.json"):
        read_pretrained(tmp_path / "run")


CUTS = pathlib.Path(__file__).with_name("cuts_of_runs.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize("case", CUTS)
def test_images_are_cut_as_the_run_s_evaluator_does(run, tmp_path, case):
    ops, at_its_size, cut = re.fullmatch("(.*) -> (.*); (.*)", case).groups()
    ops, at_its_size = ops.replace("(none)", ""), at_its_size.replace("the same", "")
    size = read_pretrained(run).spec.image_size
    scale = size[0] / 4
    text = re.sub(r"(?<!\.)\d+", lambda match: str(round(int(match[0]) * scale)), ops)
    spec = pretrained_spec(changed(run, tmp_path, text))
    at_its_size = re.sub(r"\d+", lambda match: str(round(int(match[0]) * scale)), at_its_size)
    assert ops_for(spec) == (at_its_size or text)
    library = "vit_jax" if "central_crop" in ops else "timm"
    if cut == "no cut":
        assert spec.cut is None
    else:
        share, *how = cut.split()
        assert spec.cut == Cut(pytest.approx(float(share)), *how, library)
    larger = spec.at((64, 64))
    names_a_size = re.search(r"(?<!\.)\d", ops_for(spec))
    assert larger.ops == (None if names_a_size else ops_for(spec))


def test_a_cut_covers_both_sides_at_another_size_as_the_run_did():
    """transformers resizes the shorter side to the larger size instead."""
    cut = _cut("decode|resize_small(crop=0.8)|central_crop", (8, 12))
    expected = "decode|torchvision_resize((20, 30), 'bilinear', cover=True)|central_crop"
    assert ops_of_cut(cut, (16, 24)) == expected
    of_transformers = ops_of_cut(cut._replace(library="transformers"), (16, 24))
    assert of_transformers == "decode|torchvision_resize(30, 'bilinear')|central_crop"


@pytest.mark.parametrize("side", [224, 384])
def test_a_cut_resizes_to_the_run_s_pixel(side):
    cut = _cut("scaled_decode(crop=0.875)|resize_small(crop=0.875)|central_crop", (side, side))
    assert cut.resized((side, side)) == (round(side / 0.875),) * 2


@pytest.mark.parametrize("ops", ["central_crop", "decode | central_crop"])
def test_data_of_one_size_are_cropped_as_the_run_did(run, tmp_path, ops):
    resized = "decode|resize_small(antialias=True)|central_crop"
    source = read_pretrained(changed(run, tmp_path, ops))
    export_lib.export(source, tmp_path / "export", "timm")
    for spec in (source.spec, pretrained_spec(tmp_path / "export")):
        for data_size, image_size, expected in (
            ((10, 10), (8, 8), "central_crop"),
            ((7, 10), (8, 8), resized),  # too small
            ((10, 10), (9, 9), resized),  # not the run's size
            (None, (8, 8), resized),  # files of any size
        ):
            assert ops_for(spec.at(image_size), data_size) == expected


def test_images_of_any_size_that_a_run_only_crops_stay_so(run, tmp_path):
    run = changed(run, tmp_path, "decode|central_crop", data="folder")
    (run / "images.csv.gz").write_bytes(Division({"train/cat/0.png": "train"}).to_bytes())
    assert ops_for(pretrained_spec(run)) == "decode|central_crop"


@pytest.mark.slow
def test_a_size_that_the_source_tells_is_kept(tmp_path):
    """Of fixed positions only NAME.json tells it."""
    model = create_model("ViT-mu/4", 3, (8, 12), pos_embed="sincos_2d", pool="gap")
    variables = model.init(jax.random.key(0), np.zeros((1, 8, 12, 3), np.float32))
    save_pretrained(tmp_path / "a.npz", model, variables, "npz_v2")
    source = read_pretrained(tmp_path / "a.npz")
    assert (source.model.image_size, source.spec.image_size) == (None, (8, 12))
    receipt = export_lib.export(source, tmp_path / "b.npz", "npz_v2")
    assert receipt["preprocessing"]["image_size"] == [8, 12]
    assert "8 x 12 pixels" in (tmp_path / "b.npz.md").read_text()
    assert pretrained_spec(tmp_path / "b.npz") == source.spec
    export_lib.export(source, tmp_path / "b.stablehlo", "stablehlo")


@pytest.mark.parametrize(("format", "kind"), [("hf", "none"), ("timm", "sincos_2d")])
def test_formats_that_state_a_size_need_one(tmp_path, format, kind):
    model = create_model("ViT-mu/4", 3, None, pos_embed=kind)
    params = random_params(model, np.zeros((1, 8, 8, 3), np.float32))
    with pytest.raises(InputError, match=r"has no image size.* give image_size"):
        save_pretrained(tmp_path / "x", model, {"params": params}, format)
    assert not list(tmp_path.iterdir())


def test_what_computes_something_else_is_not_written(golden, tmp_path, capsys, monkeypatch):
    def spoiled(path):
        found = read_pretrained(path)
        return found._replace(params=jax.tree.map(lambda leaf: leaf * 1.01, found.params))

    monkeypatch.setattr(export_lib, "read_pretrained", spoiled)
    words = [f"--init_from={golden / 'hf_vit'}", f"--output={tmp_path / 'hf'}", "--format=hf"]
    assert main(["export", *words]) == 1
    assert "give logits that differ by" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("matters", "dtype"),
    [("", "float32"), ("", "bfloat16"), ("always", "float32"), ("for plain images", "float32")],
)
def test_timm_opens_a_model_of_another_epsilon_if_that_matters_little(matters, dtype, tmp_path):
    model, variables = random_model(gelu="exact", norm_eps=1e-12, dtype=jnp.dtype(dtype))
    if matters:  # tokens of a variance far below timm's epsilon
        names = {"embedding": 1e-4, "pos_embedding": 1e-4, "class_token": 1e-4}
        names = names if matters == "always" else {"pos_embedding": 1e-4}
        params = variables["params"]
        params |= {name: jax.tree.map(lambda x, by=by: by * x, params[name])
                   for name, by in names.items()}  # fmt: skip
        if matters == "for plain images":  # which the embedding does not see
            kernel = params["embedding"]["kernel"]
            kernel -= kernel.mean(axis=0)
            params["embedding"] = {"kernel": kernel, "bias": 0 * params["embedding"]["bias"]}
    vit_jax.save_pretrained(tmp_path / "out", model, variables, "timm")
    stated = json.loads((tmp_path / "out/config.json").read_text())
    assert ("eps" in stated["model_args"], "norm_eps" in stated) == (bool(matters), not matters)
    assert read_pretrained(tmp_path / "out").model.norm_eps == 1e-12


def test_the_epsilon_is_compared_in_a_model_of_four_channels(tmp_path):
    model, variables = random_model(gelu="exact", norm_eps=1e-12, channels=4)
    spec = Spec(model.image_size, "antialiased", mean=(0.485, 0.456, 0.406))
    vit_jax.save_pretrained(tmp_path / "out", model, variables, "timm", spec)
    assert json.loads((tmp_path / "out/config.json").read_text())["norm_eps"] == 1e-12
