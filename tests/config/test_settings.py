"""The door from a config to the typed sections that rooms take."""

import ast
import dataclasses
import pathlib

import mypy.api
import pytest
from at_fault import at_fault
from read_settings import decided

from vit_jax.config import OBJECTIVES, Settings, base_config, classification, fewshot
from vit_jax.config.parts import Section, key
from vit_jax.config.plugins import warn_of_removal
from vit_jax.evaluators.classification import Classification
from vit_jax.evaluators.inputs import EvalInputs
from vit_jax.objectives.distillation import Distillation
from vit_jax.run.setup.validation import find_faults

PACKAGE = pathlib.Path(__file__).parents[2] / "vit_jax"
BELOW_RUN = ("base", "job", "models", "devices", "data", "objectives", "experiment", "checkpoints",
             "evaluators", "transfer")  # fmt: skip


@pytest.fixture
def config():
    c = base_config()
    c.model.name, c.data.name, c.data.image_size = "ViT-Ti/16", "digits", 32
    c.data.num_classes, c.data.num_examples = 10, 1000
    c.global_batch_size, c.duration, c.optimizer.peak_lr = 100, "4 epochs", 0.1
    c.schedule.name, c.schedule.warmup = "multistep", "10 %"
    c.schedule.milestones = "2 epochs, 30 steps"
    c.evals.test = classification(split="test", every="0.01 epochs")
    return decided(c)


def test_sizes_are_pairs_and_durations_steps(config):
    config.objective.name, config.objective.gram_size = "self_distillation", (64, 48)
    config.objective.gram_weight, config.objective.gram_every = 1.0, "1 epochs"
    found = Settings.read(config)
    assert found.data.image_size == (32, 32)
    assert found.objective.further_views == {"gram_views": ("gram_size", (64, 48))}
    assert (found.run.duration, found.schedule.warmup, found.schedule.milestones) == (
        40, 4, (20, 30),
    )  # fmt: skip
    every = found.evals["test"].every  # an interval of 0.1 steps
    assert (every, type(every)) == (1, int)
    assert found.durations["objective.gram_every"] == 10
    assert "schedule.milestones" not in found.durations


def test_an_open_config_keeps_what_is_open(config):
    config.data.order = config.duration = None
    with at_fault("duration", "data.order"):
        Settings.read(config)
    found, faults = Settings.read_open(config)
    assert not faults
    assert (found.data.order, found.run.duration) == (None, None)
    assert found.schedule.warmup == "10 %"


def test_values_make_the_config_again(config):
    config.evals.few = fewshot(train_split="train", test_split="test", every="1 epochs")
    made = Settings.of(config).to_config()
    assert made == config and made is not config
    assert Settings.read(config).with_values({"evals.test": None, "seed": 7}).values["seed"] == 7
    config.evals.bad = {"type": "none"}
    assert {*Settings.of(config).to_config().evals} == {"test", "few"}


def test_all_faults_are_found_and_their_values_stay(config):
    config.optimizer.ema_decay, config.loss.name, config.data.local_size = 2.0, "soft", -1
    found, faults = Settings.read_open(config)
    keys = [fault.split("=")[0] for fault in faults]
    assert keys == ["data.local_size", "loss.name", "optimizer.ema_decay"]
    assert (found.optimizer.ema_decay, found.loss.name, found.data.local_size) == (2.0, "soft", -1)


def test_what_one_section_declares_is_all_there_is():
    """Reading, checking and converting a new key takes its declaration only."""

    class Lamp(Section):
        size: tuple[int, int] = key(..., "of the lamp")
        every: int = key("2 steps", "between two flashes", form="interval")

        def check(self):
            return ["size=1: too small"] * (self.size == 1)

    lamp, faults = Lamp.read({"size": 3, "every": None}, lambda text, key: int(text.split()[0]))
    assert (lamp.size, lamp.every, faults) == ((3, 3), 2, [])
    assert Lamp.read({"size": 1})[1] == ["size=1: too small"]
    assert Lamp.read({"size": 0})[1] == ["size=0: needs a positive int or a pair of them, up to "
                                         "65535"]  # fmt: skip


def functions_of(rooms):
    for room in rooms:
        for path in sorted((PACKAGE / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    given = [*node.args.args, *node.args.kwonlyargs]
                    types = [ast.unparse(a.annotation) for a in given if a.annotation]
                    yield f"{path.relative_to(PACKAGE)}:{node.name}", types


def test_configs_are_taken_where_they_are_asked_for_and_resolved_only():
    """No other file imports the type, so none has a parameter or a field of it; nor has `Settings`,
    which they take.
    """
    importing = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.alias) and node.name.endswith(("ConfigDict", "ml_collections"))
    }
    rooms = ("config/", "run/setup/", "commands/", "studies/")
    assert {name for name in importing if not name.startswith(rooms)} == {"api.py"}
    assert not [f.name for f in dataclasses.fields(Settings) if "ConfigDict" in str(f.type)]


def test_rooms_below_run_take_sections():
    """Few functions take all of `Settings`; what an interface says, `conflicts`, counts once."""
    found = dict(functions_of(BELOW_RUN))
    assert len(found) > 1000
    whole = {name for name, types in found.items() if "Settings" in types}
    whole = {"conflicts" if name.endswith("conflicts") else name for name in whole}
    assert 0 < len(whole) <= 12, whole


def test_keys_of_one_objective_are_read_by_it_alone():
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "objectives"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("gram_size", "mode", "teacher"):
                of = ast.unparse(node.value).rpartition(".")[2]
                assert of not in ("objective", "keys"), f"{path}:{node.lineno}"


WRONG = """
from vit_jax.config import Settings

def read(settings: Settings) -> None:
    settings.optimiser
    settings.optimizer.peak_rl
    name: int = settings.model.name
    size: int = settings.data.image_size
"""


@pytest.mark.slow  # mypy reads the whole package
def test_mypy_knows_every_key(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    config = PACKAGE.parent / "pyproject.toml"
    said, _, status = mypy.api.run([str(tmp_path / "wrong.py"), f"--config-file={config}"])
    lines = [int(line.split(":")[1]) for line in said.splitlines() if ": error:" in line]
    assert status == 1 and lines == [5, 6, 7, 8], said


def test_plug_ins_of_earlier_versions_still_read_a_config(config, monkeypatch, caplog):
    class Old(Distillation):
        """Declares its conflicts in the earlier way."""

        def find_conflicts(self, config):
            return [*super().find_conflicts(config), f"data.name: not {config.data.name}"]

    warn_of_removal.cache_clear()
    monkeypatch.setitem(OBJECTIVES, "old", Old)
    config.objective.name, config.objective.teacher = "old", "untrained:ViT-Ti/16"
    config.objective.mode, config.loss.name = "soft", "sigmoid"
    for _ in range(2):
        keys = [fault.split("=")[0].split(":")[0] for fault in find_faults(config)]
        assert keys == ["objective.mode", "data.name"]
    settings = Settings.of(config)
    inputs = EvalInputs("test", settings, None, None, {}, (), (32, 32))
    assert inputs.config.data.name == "digits"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "use conflicts(settings)" in said[0]
    assert "use inputs.settings" in said[1]


def test_a_config_has_the_keys_that_an_entry_of_a_plain_dict_lacks(config):
    with config.unlocked():
        config.evals.test = {"type": "classification", "split": "test", "every": "1 epochs"}
    settings = Settings.read_open(config)[0]
    assert settings.to_config().evals.test.ops == settings.evals["test"].ops == ""


def test_a_plug_in_s_evaluator_may_declare_metrics_in_the_earlier_way(caplog):
    class Ours(Classification):
        """By the name of version 0.2.0."""

        def metrics(self):
            return {"own": "lower"}

    warn_of_removal.cache_clear()
    assert "top1" in Classification(split="test", every=1).reports() and not caplog.records
    for _ in range(2):
        assert Ours(split="test", every=1).reports() == {"own": "lower"}
    (record,) = caplog.records
    assert record.getMessage().endswith("metrics(), which version 0.4 removes; use reports()")


def test_any_part_may_have_a_key_called_own():
    class Lamp(Section):
        own: int = key(3, "of the lamp")

    assert Lamp.read({"own": 7})[0].own == 7
