"""A run started by commit 918fdf2 gives the same results today; see golden/older_run."""

import hashlib
import json
import logging
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from etils import epath
from flax import linen as nn
from forked import Forked
from loaded_file import load_module
from ml_collections import ConfigDict

import vit_jax.config
from vit_jax.checkpoints import restore
from vit_jax.checkpoints import stored as stored_steps
from vit_jax.config import base, checks, evals, text
from vit_jax.config import stored as stored_configs
from vit_jax.evaluators import classification
from vit_jax.main import main
from vit_jax.models.layers import NORMS
from vit_jax.training.prepare import prepare
from vit_jax.training.train import train_and_evaluate
from vit_jax.transfer import read_pretrained


@pytest.fixture(scope="module")
def older_run(golden):
    """The fixture's folder; tests only read it."""
    return golden / "older_run"


@pytest.fixture(scope="module")
def make(older_run):
    return load_module(older_run / "make.py")


@pytest.fixture(scope="module")
def values(older_run):
    """The functions of values.py; `expected` holds their results with commit 918fdf2."""
    module = load_module(older_run / "values.py")
    module.expected = json.loads((older_run / "values.json").read_text())
    return module


def make_config(make, older_run):
    config = make.get_config()
    config.data.data_dir = str(older_run / "pictures")
    return config


def resume(older_run, make, target):
    """Resume a copy of the run in `target`; return the log."""
    shutil.copytree(older_run / "workdir", target)
    logged = []
    handler, logger = logging.Handler(), logging.getLogger("vit_jax")
    handler.emit = lambda record: logged.append(record.getMessage())
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        summary = train_and_evaluate(make_config(make, older_run), target)
    finally:
        logger.removeHandler(handler)
    assert summary["step"] == 6 and any("resumed at step 3" in line for line in logged)
    return logged


@pytest.fixture(scope="module")
def resumed(older_run, make, tmp_path_factory, one_device, never_with_checks):
    """A copy of the run after its end, and what resuming it logged."""
    workdir = tmp_path_factory.mktemp("resumed") / "workdir"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.random, "key", jax.random.key.func)  # of threefry
        return SimpleNamespace(workdir=workdir, logged=resume(older_run, make, workdir))


def files_in(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.fixture
def unchanged(older_run):
    """Check that a test does not change the folder."""
    before = files_in(older_run)
    yield
    assert files_in(older_run) == before


def without_top5(metrics):
    """`metrics` as of today, where a model with two classes has no top5, which was always 1."""
    return {name: value for name, value in metrics.items() if "top5" not in name}


def check(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    np.testing.assert_allclose(
        jax.tree.leaves(found), jax.tree.leaves(expected), rtol=1e-5, atol=1e-5
    )


def test_it_resumes_to_the_same_parameters(older_run, make, resumed, caplog):
    (warning,) = [line for line in resumed.logged if "continues with its original settings" in line]
    older = {"data.holdout": "seed 3", "model.kernels": "plain", "data.exif": False,
             "data.folder_rules": 1}  # fmt: skip
    assert all(f"{key}={value!r}" in warning for key, value in older.items())
    assert "(default for new runs: 'names'," in warning

    expected = dict(np.load(older_run / "finished.npz"))
    found, row = make.parameters(resumed.workdir), make.last_row(resumed.workdir)
    finished = json.loads((older_run / "finished.json").read_text())
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        if not name.endswith("key/bias"):  # its gradient is rounding, which Adam scales to lr
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
    metrics = without_top5(finished["metrics"])
    assert row.keys() >= metrics.keys()
    for name, value in metrics.items():
        assert row[name] == pytest.approx(value, rel=1e-5), name

    steps = epath.Path(resumed.workdir / "checkpoints")
    assert "format_version" not in restore.read_meta(steps / "3")  # the first, as is the
    meta = restore.read_meta(steps / "6")  # version of its fingerprint
    assert (meta["format_version"], meta["fingerprint_version"]) == (2, 2)
    assert json.loads((resumed.workdir / "config.json").read_text())["format_version"] == 2

    with caplog.at_level(logging.INFO, "vit_jax"):  # its config.json has the new keys now
        train_and_evaluate(make_config(make, older_run), resumed.workdir)
    assert "already finished at step 6" in caplog.text


def test_it_resumes_to_the_same_bits(older_run, make, tmp_path):
    """With XLA's usual settings, as the run was made."""
    finished = json.loads((older_run / "finished.json").read_text())
    if make.machine() != finished["machine"]:
        pytest.skip("the bits are those of another CPU or another jaxlib")
    workdir, output = shutil.copytree(older_run / "workdir", tmp_path / "run"), tmp_path / "output"
    words = (f"--config={older_run}/make.py", f"--config.data.data_dir={older_run}/pictures")
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8",
                   "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}  # fmt: skip
    process = Forked(("-m", "vit_jax.main"), [*words, f"--workdir={workdir}"], output, environment)
    assert process.wait(timeout=600) == 0, output.read_text()
    found = make.parameters(workdir)
    for name, array in np.load(older_run / "finished.npz").items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "command", ["evaluate", "predict", pytest.param("transfer", marks=pytest.mark.slow)]
)
def test_commands_give_the_same_values(older_run, make, values, command, capsys):
    expected = values.expected[command]
    expected = without_top5(expected) if command == "evaluate" else expected
    check(getattr(values, command)(older_run), expected)
    if command == "evaluate":
        said = " ".join(capsys.readouterr().err.split())
        assert said.count("WARNING") == 2
        assert "evaluated with data.holdout='seed 3'" in said
        assert "evaluates a tenth of" in said  # its pictures lie elsewhere now


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    "format",
    ["npz_v2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("npz", "timm", "stablehlo"))],
)
def test_it_is_exported_with_equal_logits(older_run, make, values, format, tmp_path):
    found, expected = values.export(older_run, format, tmp_path), values.expected["export"][format]
    assert found.pop("sha256") == expected["sha256"]
    check(found["logits"], expected["logits"])


@pytest.mark.usefixtures("unchanged")
def test_another_run_begins_with_its_weights(older_run, make, values, tmp_path):
    config = make_config(make, older_run)
    config.init_from = str(older_run / "workdir")
    config.data.name, config.data.image_size = "synthetic", values.SIZE
    config.data.num_classes, config.data.num_examples = values.NUM_CLASSES, 16
    params = prepare(config, tmp_path / "new").initial_params
    saved = read_pretrained(older_run / "workdir").params
    assert params.keys() == saved.keys() - {"head/kernel", "head/bias"}
    expected = values.expected["transfer"]["pos_embedding"]
    check(np.asarray(params.pop("pos_embedding")).tolist(), expected)
    for name, array in params.items():
        np.testing.assert_array_equal(array, saved[name], err_msg=name)


def test_all_evaluators_of_its_version_are_read(older_run, values):
    stored = json.loads((older_run / "workdir/config.json").read_text())
    stored["evals"] = values.expected["entries"]
    config = stored_configs.from_json(json.dumps(stored))
    for kind, entry in values.expected["entries"].items():
        found = json.loads(json.dumps(config.evals[kind].to_dict()))
        assert found.items() >= entry.items(), kind


class RenamedScale(nn.LayerNorm):
    """A LayerNorm whose scale is called gain."""

    def param(self, name, *args, **kwargs):
        return super().param("gain" if name == "scale" else name, *args, **kwargs)


def later_code(monkeypatch):
    """Keys and leaves as in a later version: some are new, some are renamed."""
    todays = base.default_config

    def later_config(plugins=()):
        c = todays(plugins).unlock()
        c.insight = ConfigDict({"every": "1 epochs"})
        c.data.exif = False
        c.lock().evals.unlock()
        return c

    def later_entry(*, split, every, ops, batch_size=None, data_name=None, data_dir=None, crops=1):
        return evals.typed_entry("classification", locals())

    for module in (base, checks, stored_configs, text, vit_jax.config):
        monkeypatch.setattr(module, "default_config", later_config)
    later = classification.EVALUATOR._replace(entry=later_entry)
    monkeypatch.setitem(evals.EVALUATORS, "classification", later)
    renamed = {
        "schedule.warm": "schedule.warmup",
        "accum.steps": "optimizer.accum_steps",
        "evals.*.freq": "evals.*.every",
    }
    for old, new in renamed.items():
        monkeypatch.setitem(stored_configs.RENAMED_KEYS, old, new)
    monkeypatch.setitem(NORMS, "layer", RenamedScale)
    monkeypatch.setitem(stored_steps.RENAMED_LEAVES, r"(.*/)scale", r"\1gain")


@pytest.mark.slow
def test_it_resumes_to_the_same_bits_after_keys_and_leaves_were_added_and_renamed(
    older_run, values, resumed, monkeypatch, tmp_path
):
    folder = shutil.copytree(older_run, tmp_path / "older_run")
    stored = json.loads((folder / "workdir/config.json").read_text())
    stored["schedule"]["warm"] = stored["schedule"].pop("warmup")
    stored["accum"] = {"steps": stored["optimizer"].pop("accum_steps")}
    stored["evals"]["val"]["freq"] = stored["evals"]["val"].pop("every")
    (folder / "workdir/config.json").write_text(json.dumps(stored))
    later_code(monkeypatch)
    monkeypatch.setattr(jax.random, "key", jax.random.key.func)  # of threefry, as in `resumed`

    for name, value in values.evaluate(folder).items():
        assert value == pytest.approx(values.expected["evaluate"][name], rel=1e-5), name
    make = load_module(folder / "make.py")  # its config has the new keys
    resume(folder, make, tmp_path / "workdir")
    expected = make.parameters(resumed.workdir)
    found = make.parameters(tmp_path / "workdir")
    assert any(name.endswith("norm/gain") for name in found)
    for name, array in expected.items():
        name = re.sub("/scale$", "/gain", name)
        np.testing.assert_array_equal(found.pop(name), array, err_msg=name)
    assert not found
    stored = json.loads((tmp_path / "workdir/config.json").read_text())
    assert stored["insight"] == {"every": "1 epochs"} and stored["data"]["exif"] is False
    assert stored["evals"]["val"].items() >= {"crops": 1, "every": "3 steps"}.items()
    assert stored["schedule"]["warmup"] == "1 steps" and "accum" not in stored


@pytest.mark.parametrize("command", ["train", "evaluate", "predict", "export", "init_from"])
def test_a_run_of_a_newer_version_is_refused_by_name(older_run, tmp_path, capsys, command):
    folder = shutil.copytree(older_run, tmp_path / "older_run")
    workdir, new = folder / "workdir", tmp_path / "new"
    stored = json.loads((workdir / "config.json").read_text())
    changes = {"format_version": 7, "from_the_future": {"key": 1}}
    (workdir / "config.json").write_text(json.dumps(stored | changes))
    before = files_in(tmp_path)
    config = [f"--config={folder}/make.py", f"--config.data.data_dir={folder}/pictures"]
    words = {
        "train": [*config, f"--workdir={workdir}"],
        "evaluate": ["evaluate", f"--workdir={workdir}"],
        "predict": ["predict", f"--workdir={workdir}", f"{folder}/pictures"],
        "export": ["export", f"--workdir={workdir}", f"--output={new}", "--format=timm"],
        "init_from": [*config, f"--workdir={new}", f"--config.init_from={workdir}"],
    }
    assert main(words[command]) == 2
    assert (
        f"error: {workdir}/config.json: format version 7; this vit_jax reads versions up "
        "to 2; use the vit_jax that wrote it, or a newer one"
    ) in " ".join(capsys.readouterr().err.split())
    assert files_in(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "evaluate", "predict"])
def test_a_checkpoint_of_a_newer_version_is_refused_by_name(
    older_run, resumed, monkeypatch, capsys, command
):
    monkeypatch.setattr(stored_steps, "FORMAT_VERSION", 1)
    (resumed.workdir / "summary.json").unlink(missing_ok=True)  # otherwise there is nothing to do
    before = files_in(resumed.workdir)
    config = [f"--config={older_run}/make.py", f"--config.data.data_dir={older_run}/pictures"]
    words = {
        "train": [*config, f"--workdir={resumed.workdir}"],
        "evaluate": ["evaluate", f"--workdir={resumed.workdir}", config[1]],
        "predict": ["predict", f"--workdir={resumed.workdir}", f"{older_run}/pictures"],
    }
    assert main(words[command]) == 2
    said = f"{resumed.workdir}/checkpoints/6: format version 2; this vit_jax reads"
    assert said in capsys.readouterr().err
    assert files_in(resumed.workdir) == before
