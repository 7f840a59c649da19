"""The export command: of a run, and of the goldens."""

import hashlib
import json
import pathlib

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from vit_jax import load_pretrained, pretrained_spec, tree
from vit_jax.checkpoint import Checkpoints
from vit_jax.checksums import hash_params
from vit_jax.config_text import apply_overrides, load_config
from vit_jax.main import main
from vit_jax.run import prepare
from vit_jax.train import write_workdir
from vit_jax.transfer import export as export_lib
from vit_jax.transfer import read_pretrained

pytestmark = pytest.mark.usefixtures("cheap_compilation")

FILE = str(pathlib.Path(__file__).parents[1] / "configs/quickstart.py") + ":debug"


@pytest.fixture(scope="module")
def run(tmp_path_factory, cheap_compilation):
    """The workdir of a run with a running average, saved at step 10."""
    workdir = epath.Path(tmp_path_factory.mktemp("run"))
    config = load_config(FILE)
    overrides = {"optimizer.ema_decay": "0.5", "model.scan": "true", "data.mean": "0.4,0.5,0.6"}
    assert not apply_overrides(config, list(overrides.items()))
    prepared = prepare(config, workdir)
    with jax.set_mesh(prepared.mesh):
        state = prepared.experiment.init()
        state = state.replace(ema=jax.tree.map(lambda leaf: leaf + 0.01, state.ema))
        write_workdir(prepared)
        checkpoints = Checkpoints(workdir / "checkpoints", keep_last=2, keep_every=None)
        checkpoints.save(10, state, {})
        checkpoints.close()
    rows = [{"step": 5, "test/top1": 0.25}, {"step": 10, "test/top1": 0.5, "train/loss": 2.0},
            {"step": 15, "test/top1": 0.75}]  # fmt: skip
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return workdir


def export(capsys, *words):
    """What the command prints."""
    assert main(["export", *map(str, words)]) == 0
    return json.loads(capsys.readouterr().out)


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

    folder, stem = (output, "") if output.is_dir() else (tmp_path, "model.")
    receipt = json.loads((folder / f"{stem}receipt.json").read_text())
    assert (receipt["source"], receipt["step"]) == (str(run), 10)
    assert receipt["weights"] == "running average"
    assert receipt["config"] == json.loads((run / "config.json").read_text())
    assert receipt["results"] == {"test/top1": 0.5}
    assert receipt["parameters"]["count"] == sum(leaf.size for leaf in named(variables).values())
    assert receipt["parameters"]["sha256"] == hash_params(read_pretrained(run).params)
    for name, digest in receipt["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    card = (folder / ("README.md" if stem == "" else "model.md")).read_text()
    assert "step 10" in card
    assert "computes in" not in card
    assert "| test/top1 | 0.5 |" in card


def test_a_run_in_bfloat16_is_told_from_its_export(run, tmp_path, capsys):
    source = read_pretrained(run)
    coarse = source._replace(model=source.model.clone(dtype=jnp.bfloat16))
    receipt = export_lib.export(coarse, tmp_path / "model.npz", "npz")
    assert (receipt["computed_in"], receipt["read_back"]["dtype"]) == ("bfloat16", "float32")
    assert "The source computes in bfloat16" in (tmp_path / "model.md").read_text()


def test_the_weights_are_a_choice(run, tmp_path, capsys):
    both = {}
    for weights in ("average", "raw"):
        words = [f"--workdir={run}", f"--weights={weights}", "--format=timm"]
        export(capsys, *words, f"--output={tmp_path / weights}")
        both[weights] = named(load_pretrained(tmp_path / weights)[1])
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


REFUSED = {
    "no source": (["--format=hf", "--output=OUT"], "one of --workdir=DIR and --init_from=SOURCE"),
    "no run": (
        ["--workdir=/proc/self", "--format=hf", "--output=OUT"],
        "--workdir=/proc/self: not the workdir of a run, with config.json and checkpoints/",
    ),
    "no output": (["--init_from=GOLDEN", "--format=hf"], "--output: missing"),
    "unknown format": (["--init_from=GOLDEN", "--format=tim", "--output=OUT"], "mean timm?"),
    "cannot hold it": (["--init_from=GOLDEN", "--format=hf", "--output=OUT"], "format=npz holds"),
    "name of an npz": (["--init_from=GOLDEN", "--format=npz", "--output=OUT"], "ends in .npz"),
    "name of a program": (
        ["--init_from=GOLDEN", "--format=stablehlo", "--output=OUT"], "ends in .stablehlo",
    ),
    "there already": (["--init_from=GOLDEN", "--format=hf", "--output=."], "is there already"),
    "below a file": (["--init_from=GOLDEN", "--format=hf", "--output=GOLDEN/x"], "is a file"),
    "what cannot be made": (
        ["--init_from=GOLDEN", "--format=npz", "--output=/proc/none/x.npz"], "cannot be made",
    ),
    "no average": (
        ["--init_from=GOLDEN", "--weights=raw", "--format=npz", "--output=OUT.npz"],
        "only a workdir has weights to choose from",
    ),
    "a size in words": (
        ["--init_from=GOLDEN", "--image_size=big", "--format=npz", "--output=OUT.npz"],
        "--image_size=big",
    ),
    "undivided": (
        ["--init_from=GOLDEN", "--image_size=18", "--format=npz", "--output=OUT.npz"],
        "does not divide the image's height 18",
    ),
    "a config": (
        ["--init_from=GOLDEN", "--config.seed=1", "--format=npz", "--output=OUT.npz"],
        "takes no config",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(golden, tmp_path, capsys, monkeypatch, case):
    words, says = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    source = str(golden / "vit_pretrained.npz")
    words = [word.replace("GOLDEN", source) for word in words]
    assert main(["export", *words]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_computes_something_else_is_not_written(golden, tmp_path, capsys, monkeypatch):
    def spoiled(path):
        model, variables = load_pretrained(path)
        return model, jax.tree.map(lambda leaf: leaf * 1.01, variables)

    monkeypatch.setattr(export_lib, "load_pretrained", spoiled)
    words = [f"--init_from={golden / 'hf_vit'}", f"--output={tmp_path / 'hf'}", "--format=hf"]
    assert main(["export", *words]) == 1
    assert "gives logits that differ by" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
