"""The parts in docs/how_to/extend next to our own; test_wheel.py trains with all of them."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from at_fault import at_fault
from etils import epath
from finished_run import final_state
from opened import config_json, open_all
from read_settings import decided, make_loss, make_optimizer, make_schedule, settings_of
from worked_parts import write_parts

from vit_jax import models, transfer
from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.config import (
    EVALUATORS,
    FAMILIES,
    LOSSES,
    METRICS,
    OBJECTIVES,
    OPS,
    OPTIMIZERS,
    POSITIONS,
    SCHEDULES,
    SOURCES,
    base_config,
    find_unrecorded,
    plugins,
)
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.data import make_source, parse_ops
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.devices.chips import find_slice
from vit_jax.devices.flops import forward_macs
from vit_jax.devices.mesh import make_mesh
from vit_jax.evaluators import make_evaluators
from vit_jax.experiment.experiment import make_experiment
from vit_jax.main import main
from vit_jax.models.contract import about, with_known
from vit_jax.objectives.other_sizes import at_size
from vit_jax.planning.calculated import calculate_memory
from vit_jax.planning.plan_figures import describe
from vit_jax.planning.targets import Target
from vit_jax.run.setup.validation import find_faults
from vit_jax.run.setup.workdir import write_workdir
from vit_jax.studies.engine import Member
from vit_jax.studies.running import Call, member_words
from vit_jax.transfer import load_pretrained, pretrained_spec, read_pretrained, save_pretrained
from vit_jax.transfer.fit import fit
from vit_jax.transfer.pretrained import Pretrained, Spec
from vit_jax.transfer.shapes import abstract_params

REGISTRIES = (
    FAMILIES, POSITIONS, OBJECTIVES, LOSSES, METRICS, EVALUATORS, SOURCES, OPS, OPTIMIZERS,
    SCHEDULES, transfer.FORMATS,
)  # fmt: skip


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Folder of the parts, all imported; our registries are restored afterwards."""
    folder = tmp_path_factory.mktemp("parts")
    names = [name for name in write_parts(folder) if name != "mine.py"]
    before = [dict(registry) for registry in REGISTRIES]
    known, modules = dict(plugins._PLUGINS), {*sys.modules}
    plugins.import_plugins([str(folder / name) for name in names])
    yield folder
    for registry, ours in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(ours)
    plugins._PLUGINS.clear()
    plugins._PLUGINS.update(known)
    for name in {*sys.modules} - modules:
        if name.startswith("vit_jax_plugins"):
            del sys.modules[name]


@pytest.fixture
def config(parts, monkeypatch):
    monkeypatch.chdir(parts)
    config = load_config("mine.py")
    assert find_faults(config) == []
    return config


def test_each_kind_is_a_line(parts):
    added = [list(registry)[-1] for registry in REGISTRIES]
    assert added == [
        "MyMixer", "my_fourier", "my_consistency", "my_poly1", "my_brier", "my_worst_class",
        "my_rings", "my_posterize", "my_adan", "my_polynomial", "my_msgpack",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model.name", "MyMixr-S/16", "did you mean MyMixer-S/16?"),
        ("model.dtype", "bfloat16", "model.dtype: Mixer has no such field"),
        ("model.remat", "full", "model.remat: Mixer has no such field"),
        ("objective.name", "my_consistncy", "did you mean my_consistency?"),
        ("loss.name", "my_ploy1", "did you mean my_poly1?"),
        ("data.ops", "my_posterise(4)", "did you mean my_posterize?"),
        ("data.ops", "my_posterize(9)", "bits=9: needs a number in [1, 8]; usage: my_posterize("),
        ("data.ops", "my_nose(4)", "did you mean my_noise?"),
        ("data.ops", "my_noise(4)|my_posterize(4)", "runs on the host"),
        ("optimizer.name", "adam", "did you mean"),
        ("evals.worst.min_examples", "0", "evals.worst.min_examples=0: needs a number in"),
    ],
)
def test_faults_name_them(config, key, value, says):
    assert apply_overrides(config, [(key, value)]) == []
    assert any(says in fault for fault in find_faults(config)), find_faults(config)


def test_a_run_that_goes_on_without_its_config_may_add_a_plug_in(parts, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(config_json(load_config("quickstart:debug")))
    seen = []
    monkeypatch.setattr(
        "vit_jax.run.train.train_and_evaluate", lambda *args, began: seen.append(args[0])
    )
    words = f"--config.plugins={parts / 'adan.py'}", "--config.optimizer.name=my_adan"
    assert main([f"--workdir={tmp_path}", *words, "--config.optimizer.b3=0.8"]) == 0
    assert (seen[0].run.plugins, seen[0].optimizer.b3) == (("adan.py",), 0.8)


def test_parts_that_no_other_process_finds_are_named(config, monkeypatch, tmp_path, caplog):
    assert find_unrecorded(config) == []
    cell = type("Cell", (OPTIMIZERS.find("adamw"),), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Cell", cell, raising=False)
    monkeypatch.setitem(OPTIMIZERS, "my_cell", "__main__:Cell")
    monkeypatch.setitem(SOURCES, "mine", SOURCES.find("digits"))
    for registry, name in ((LOSSES, "softmax"), (FAMILIES, "ViT"), (OPS, "flip")):
        cell = type("Cell", (registry.find(name),), {"__module__": "__main__"})
        monkeypatch.setitem(registry, "MyCell" if registry is FAMILIES else "my_cell", cell)
    monkeypatch.setitem(OPS, "images", cell)  # the last one
    monkeypatch.setitem(METRICS, "1", METRICS.find("top1"))
    config.data.data_dir, config.data.ops = "/home/images/my_cell", f"{config.data.ops}|erase(1.0)"
    assert find_unrecorded(config) == []  # it takes none of them
    config.model.name, config.loss.name, config.optimizer.name = "MyCell-S/4", "my_cell", "my_cell"
    config.data.ops += "|my_cell"
    config.data.mix, config.log.metrics = "mine@train=0.1, [not]=0.2", ("1",)
    unrecorded = ["model.name=MyCell", "data.name=mine", "loss.name=my_cell",
                  "optimizer.name=my_cell", "metrics=1", "op=my_cell"]  # fmt: skip
    assert find_unrecorded(config) == unrecorded
    config.data.mix = "[{'weight': 0.1, 'name': 'mine'}]"
    assert find_unrecorded(config) == unrecorded
    resolved = types.SimpleNamespace(config=config, asked=config, decided_by={})
    write_workdir(epath.Path(tmp_path / "run"), resolved, types.SimpleNamespace(class_names=None))
    assert f"{', '.join(unrecorded)}: this process registered" in caplog.text


def test_a_plug_in_may_add_a_class_of_another_library(parts, tmp_path, monkeypatch):
    library = types.ModuleType("other_library")
    library.Foreign = type("Foreign", (LOSSES.find("softmax"),), {"__module__": "other_library"})
    monkeypatch.setitem(sys.modules, "other_library", library)
    file = tmp_path / "adds_foreign.py"
    file.write_text("import other_library\nfrom vit_jax.config import LOSSES\n"
                    'LOSSES["foreign"] = other_library.Foreign\n')  # fmt: skip
    config = base_config([str(file)])
    config.loss.name = "foreign"
    assert find_unrecorded(config) == []
    config.plugins = ()
    assert find_unrecorded(config) == ["loss.name=foreign"]


def test_keys_reach_the_part_alone(config):
    with at_fault("loss.epsilon"):
        make_loss("softmax", epsilon=2.0)
    with at_fault("objective.strength"):
        OBJECTIVES.make({"name": "supervised", "strength": 1.0})
    with at_fault("objective.name"):
        OBJECTIVES.make({"name": "supervise"})
    with at_fault("objective.strength"):
        OBJECTIVES.make({"name": "my_consistency", "strength": -1.0})
    with at_fault("optimizer.b3"):
        make_optimizer("adamw", schedule=lambda step: 0.0, b3=0.5)
    with at_fault("optimizer.b3"):
        make_optimizer("my_adan", schedule=lambda step: 0.0, b3=2)
    schedule = make_schedule("my_polynomial", total_steps=20, peak_lr=2.0, warmup=4, power=0.5)
    np.testing.assert_allclose([schedule(t) for t in (2, 4, 16, 20)], [1, 2, 1, 0], rtol=1e-6)
    where = {"split": "test", "image_size": (8, 8), "own": {"most_rings": 4}}
    assert make_source("my_rings", **where).num_classes == 4
    assert make_source("digits", **where).num_classes == 10  # which does not take it


@pytest.mark.usefixtures("parts")
def test_loss_by_its_equation():
    logits_BC, labels = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32), np.array([0, 0])
    p_B = np.exp(logits_BC[:, 0]) / np.exp(logits_BC).sum(axis=1)
    found = make_loss("my_poly1", epsilon=3.0)(logits_BC, labels)
    np.testing.assert_allclose(found, -np.log(p_B) + 3 * (1 - p_B), rtol=1e-6)


def test_family_without_dtype_constrain_and_remat(config):
    config, sources = open_all(decided(config))
    mesh = make_mesh(replica=None, data=-1, fsdp=1, tensor=1)
    experiment = make_experiment(settings_of(config), mesh)
    assert experiment.num_params == sum(
        leaf.size for leaf in abstract_params(experiment.model).values()
    )
    assert experiment.flops_per_image > 0 and forward_macs(experiment.model) > 0
    preprocessing = parse_preprocessing(settings_of(config))
    make_evaluators(settings_of(config), preprocessing, experiment.model, mesh, sources)
    figures = describe(
        settings_of(decided(config)), Target(find_slice("v5e:2x4"), 1), mesh, experiment
    )
    assert (figures["remat"], figures["scan"]) == ("none", False)
    assert calculate_memory(settings_of(decided(config)), Target(find_slice("H100:1")))["fits"]


@pytest.mark.usefixtures("parts")
def test_format_holds_every_family(tmp_path):
    for name in ("MyMixer-mu/4", "ViT-mu/4"):
        model = models.create_model(name, num_classes=3, image_size=8)
        variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
        path = tmp_path / f"{name[:3]}.msgpack"
        save_pretrained(path, about(model), variables, format="my_msgpack")  # as a run's model is
        found, loaded = load_pretrained(path)
        assert found == with_known(model, scan=False)
        assert models.is_of_family(about(model), name)
        jax.tree.map(np.testing.assert_array_equal, loaded, variables)
    with pytest.raises(InputError, match="model; export it as stablehlo or my_msgpack"):
        model = models.create_model("MyMixer-mu/4", image_size=8)
        save_pretrained(tmp_path / "x", model, {}, format="hf")


@pytest.mark.usefixtures("parts")
def test_hf_leaves_out_a_loss_of_ones_own(tmp_path, caplog):
    model = models.create_model("ViT-mu/4", num_classes=3, image_size=8)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))
    spec = Spec((8, 8), "antialiased", loss="my_poly1")
    save_pretrained(tmp_path / "hf", model, variables, format="hf", spec=spec)
    assert "omits the loss my_poly1" in caplog.text
    assert pretrained_spec(tmp_path / "hf").loss is None


def test_list_of_models(parts, capsys):
    assert main(["models", "MyMixer-mu", f"--config.plugins={parts / 'mixer.py'}"]) == 0
    assert "MyMixer-mu/16" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "without_checks")
def test_own_positions_are_trained_evaluated_exported_and_drawn(parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plugin, run = f"--config.plugins={parts / 'fourier.py'}", "--workdir=run"
    words = ("--config.model.pos_embed=my_fourier", "--config.duration=4 steps",
             "--config.schedule.warmup=1 steps", "--config.evals.test.every=4 steps")  # fmt: skip
    assert main(["--config=quickstart:debug", plugin, run, *words]) == 0
    _, state = final_state(tmp_path / "run")
    frequencies = state["params/pos_embedding"]
    moments = [x for name, x in state.items() if name.endswith("/pos_embedding")]
    assert frequencies.shape == (2, 16) and len(moments) > 1 and all(x.any() for x in moments)

    assert main(["evaluate", run, plugin]) == 0
    assert main(["export", run, plugin, "--format=timm", "--output=run.safetensors"]) == 0
    places_S2 = (np.mgrid[:2, :2].reshape(2, -1).T + 0.5) / 2
    angles_SF = 2 * np.pi * places_S2 @ frequencies
    added_SD = np.concatenate([np.cos(angles_SF), np.sin(angles_SF)], axis=1)
    found = read_pretrained(tmp_path / "run.safetensors")
    assert found.model.pos_embed == "learned_1d"
    np.testing.assert_allclose(found.params["pos_embedding"][0], added_SD, atol=1e-5)

    assert main(["figures", run, plugin, "--figures=positions", "--output=figures"]) == 0
    norms_S = np.linalg.norm(added_SD, axis=1)
    similarity = added_SD @ added_SD.T / np.outer(norms_S, norms_S)
    with np.load(tmp_path / "figures/positions.npz") as drawn:
        np.testing.assert_allclose(drawn["stem"], similarity, atol=1e-5)


@pytest.mark.usefixtures("parts")
def test_own_positions_at_another_size():
    model = models.create_model("ViT-mu/4", 3, 8, pos_embed="my_fourier")
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8, 8, 3)))["params"]
    images = jnp.ones((1, 8, 16, 3))
    resized, tables = at_size(model, params, (8, 16))
    assert tables["pos_embedding"] is params["pos_embedding"]
    assert jax.eval_shape(resized.apply, {"params": tables}, images).shape == (1, 3)
    found = Pretrained("", model, tree.flatten_names(params), Spec((8, 8), "antialiased"))
    fitted, _ = fit(found, resized, reset_head=False)
    np.testing.assert_array_equal(fitted["pos_embedding"], params["pos_embedding"])


@pytest.mark.usefixtures("parts")
def test_host_op_keeps_the_highest_bits():
    (posterize,), _ = parse_ops("my_posterize(2, 1.0)", (1, 1))
    image = np.array([[[255, 64, 63]]], np.uint8)
    np.testing.assert_array_equal(posterize(image, np.zeros(2, np.int64)), [[[192, 64, 0]]])


def test_members_of_a_study_get_them(tmp_path):
    overrides = [("plugins", "adan.py"), ("optimizer.b3", "0.9")]
    call = Call("mine.py", overrides, tmp_path, None, False, trust_plugins=True)
    words = member_words(call, Member("first", {"seed": "1"}))
    assert words == [
        "--config=mine.py", "--config.plugins=adan.py", "--config.optimizer.b3=0.9",
        "--config.seed=1", f"--workdir={tmp_path}/first", "--trust_plugins",
    ]  # fmt: skip
