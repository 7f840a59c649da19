"""Noisy Student: its members, and one round in this process."""

import dataclasses
import json
import pathlib
import signal
import sys

import jax
import numpy as np
import pytest
from asked import prepare
from at_fault import at_fault
from etils import epath
from finished_run import check_same_arrays
from studied import config_of, done, study_of

from vit_jax import create_model, save_pretrained
from vit_jax.base.errors import InputError
from vit_jax.config import Settings, sections
from vit_jax.config.text import load_config
from vit_jax.data import make_source
from vit_jax.data.sources.pseudo import read_pseudo_labels, select
from vit_jax.data.subset import soften
from vit_jax.devices.chips import find_slice
from vit_jax.inference import parts, pseudo_labels
from vit_jax.main import main
from vit_jax.planning.targets import Target
from vit_jax.run.setup.validation import find_faults
from vit_jax.studies import planned, running
from vit_jax.studies.engine import Found
from vit_jax.transfer import read_pretrained

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
KILLED = pathlib.Path(__file__).parents[1] / "killed_run.py"


def noisy(**study):
    stages = ("teacher: model.dropout=0.1", "student: study.ratio=3; study.soft_labels=false",
              "final: study.ratio=0; data.image_size=16")  # fmt: skip
    keys = {"seeds": 1, "unlabelled": "digits@test", "stages": stages}
    return config_of("noisy_student", **keys | study)


def call_of(workdir, launcher=None):
    return running.Call("noisy_student:debug", [], epath.Path(workdir), launcher, False)


def test_each_stage_waits_for_the_one_before(tmp_path, monkeypatch):
    study, results, commands = study_of(noisy()), {}, []

    def execute(command):
        commands.append(command)
        return 0, "", False

    monkeypatch.setattr(running, "_execute", execute)
    seen = []
    while new := [m for m in study.ready(results) if m.name not in results]:
        (member,) = new
        seen.append(member)
        running._bring_about(call_of(tmp_path, ["launch"]), member)
        results[member.name] = done(0.5, **{"labels/kept": 7})
    names = ["teacher_seed_0", "teacher_labels_seed_0", "student_seed_0", "final_seed_0"]
    assert [member.name for member in seen] == names
    _, labels, student, final = seen
    # Labels are made without the launcher.
    assert commands[0][:2] == ["launch", "--"]
    assert commands[1][:4] == [sys.executable, "-m", "vit_jax.main", "label"]
    assert labels.overrides["init_from"] == "/w/teacher_seed_0"
    assert labels.overrides["study.soft_labels"] == "false"
    assert student.overrides["data.soft_labels"] == "False"
    assert student.overrides["data.mix"] == "pseudo@/w/teacher_labels_seed_0/labels.npz=0.75"
    assert "data.mix" not in final.overrides
    assert final.overrides["init_from"] == "/w/student_seed_0"
    report = study.report(Found(study, results))
    assert report.is_complete and report.texts[0] == ["teacher", "50.00", "7", "-"]


def test_labels_of_another_choice_are_refused(tmp_path):
    config = debug_config()
    study, call = study_of(config), call_of(tmp_path)
    member = study.members({})[1]
    choice = {"study.confidence": config.study.confidence, "study.per_class": None, "seed": 0}
    (tmp_path / member.name).mkdir()
    (tmp_path / member.name / "summary.json").write_text(json.dumps({"choice": choice}))
    running.check_members(study, call, [member])
    config.study.confidence = 0.75
    with at_fault("study.confidence"):
        running.check_members(study, call, [member])


def test_a_plan_counts_pseudo_labels_that_do_not_exist_yet(monkeypatch):
    config = debug_config()
    config.duration = "2 epochs"
    figures = {"memory_bytes": {"fits": True}}
    monkeypatch.setattr(planned, "calculate_plan", lambda *_: figures)
    run = dict.fromkeys((*planned.COSTS, "step_s"), 1.0)
    monkeypatch.setattr(planned, "estimate", lambda *_: {"run": run})
    planner = planned.Planner(Target(find_slice("v5e:1x1")))
    for per_class, labelled in ((None, 360), (50, 500)):
        config.study.per_class = per_class
        teacher, student, _ = planned.plan_members(study_of(config), planner).rows
        assert int(teacher["steps"]) == pytest.approx(2 * 1437 / 32, abs=1)
        assert int(student["steps"]) == pytest.approx(2 * (1437 + labelled) / 32, abs=1)
    config.study.per_class, config.study.unlabelled = None, "mine"
    _, student, total = planned.plan_members(study_of(config), planner).rows
    assert "data.name='mine'" in student["note"] and total["member"] == "all 1"


def test_classes_are_balanced():
    """The most confident ones of each class; a smaller class comes several times."""
    top = np.array([0.9, 0.5, 0.2, 0.8, 0.7, 0.0], np.float32)
    label = np.array([0, 0, 0, 0, 1, 1])
    rule = {"confidence": 0.3, "num_classes": 3, "seed": 0}
    assert select(top, label, per_class=None, **rule).tolist() == [0, 1, 3, 4]
    assert select(top, label, per_class=2, **rule).tolist() == [0, 3, 4, 4]
    assert select(top, label, per_class=1, **rule).tolist() == [0, 4]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """The digits' test split, labelled by a new model, and the model's file."""
    folder = tmp_path_factory.mktemp("labelled")
    model = create_model("ViT-mu/4", 10, 8, width=8, mlp_dim=8, num_heads=2)
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 8, 8, 3)))
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=variables["params"]["head"]["kernel"].shape).astype(np.float32)
    variables["params"]["head"]["kernel"] = 3 * kernel
    save_pretrained(folder / "teacher.npz", model, variables, "npz")
    return folder


def debug_config(**study):
    c = load_config(str(CONFIGS / "noisy_student.py") + ":debug")
    c.study.update(study)
    return c


def label(config, teacher, workdir):
    study, _ = sections.Study.read(config.study)
    return pseudo_labels.label(study, Settings.of(config), teacher, workdir)


@pytest.mark.usefixtures("one_device")
def test_labels_are_reused_and_become_a_data_set(labelled, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_LEAST", 170)  # 192, as a batch has 32, of 360
    teacher = read_pretrained(labelled / "teacher.npz")
    computed = []

    def outputs(*args, **kwargs):
        computed.append(len(kwargs["record_ids"]))
        return found(*args, **kwargs)

    found = parts.outputs
    monkeypatch.setattr(parts, "outputs", outputs)
    config = debug_config(confidence=0.0)
    summary = label(config, teacher, tmp_path)
    assert computed == [360] and summary["labels/kept"] == summary["labels/examples"] == 360
    part = np.load(tmp_path / "part_00000.npz")
    top = part["top"]
    assert top.dtype == np.float32 and (top != part["probabilities"].max(axis=1)).any()
    config.study.confidence = float(np.median(top))  # the choice changes, the probabilities do not
    summary = label(config, teacher, tmp_path)
    assert computed == [360] and 0 < summary["labels/kept"] < 360
    assert summary["choice"]["study.confidence"] == config.study.confidence
    assert 0 <= summary["labels/top1"] < 1

    (tmp_path / "part_00001.npz").unlink()  # as if it was killed before
    manifest = tmp_path / "labels.json"  # of an earlier version, whose parts had one size
    stated = json.loads(manifest.read_text())
    monkeypatch.setattr(pseudo_labels, "_RECORDS_OF_PART", stated.pop("records_of_part"))
    manifest.write_text(json.dumps(stated))
    before = (tmp_path / "labels.npz").read_bytes()
    assert label(config, teacher, tmp_path) == summary
    assert computed == [360, 360 - 192] and (tmp_path / "labels.npz").read_bytes() == before
    config.study.unlabelled = "digits@train"
    with at_fault("--workdir"):
        label(config, teacher, tmp_path)

    file = str(tmp_path / "labels.npz")
    labels = read_pseudo_labels(file)
    source = make_source("pseudo", split=file, image_size=(8, 8))
    assert (source.num_examples, source.num_classes) == (len(labels.record), 10)
    example = source.read(np.array([3, 0]))
    images = make_source("digits", split="test", image_size=(8, 8))
    np.testing.assert_array_equal(example["image"], images.read(labels.record[[3, 0]])["image"])
    np.testing.assert_allclose(example["label"], labels.label[[3, 0]], atol=1e-3)
    np.testing.assert_allclose(np.sum(example["label"], axis=1), 1, atol=1e-6)
    assert labels.facts["adds_up"]
    stored = {key: value for key, value in labels.facts.items() if key != "adds_up"}
    for facts in (stored | {"loss": "sigmoid"}, stored | {"loss": "own", "adds_up": False}):
        halves = dataclasses.replace(labels, label=labels.label / 2, facts=facts)
        (tmp_path / "halves.npz").write_bytes(halves.to_bytes())
        of_halves = make_source("pseudo", split=str(tmp_path / "halves.npz"), image_size=(8, 8))
        found = of_halves.read(np.array([3, 0]))["label"]
        np.testing.assert_allclose(found, labels.label[[3, 0]] / 2, atol=1e-3)
    softened = soften(images).read(np.array([5]))["label"]
    np.testing.assert_array_equal(softened, np.eye(10)[images.read(np.array([5]))["label"]])

    student = debug_config()
    student.data.mix = f"pseudo@{file}=0.5"
    with at_fault("data.soft_labels"):
        prepare(student, tmp_path / "student")
    student.data.soft_labels, student.data.classes = True, tuple(range(10))
    run = prepare(student, tmp_path / "student")
    assert run.resolved.config.data.num_examples == 1437 + source.num_examples
    assert run.experiment.abstract_batch["label"].shape == (32, 10)


def test_hard_labels_and_no_confident_ones(labelled, tmp_path):
    teacher = read_pretrained(labelled / "teacher.npz")
    config = debug_config(confidence=1.5)
    with at_fault("study.confidence"):
        label(config, teacher, tmp_path)
    config.study.update(confidence=0.0, soft_labels=False, per_class=5)
    summary = label(config, teacher, tmp_path)  # of the same probabilities
    labels = read_pseudo_labels(str(tmp_path / "labels.npz")).label
    assert labels.dtype == np.int32
    assert np.bincount(labels)[np.unique(labels)].tolist() == [5] * summary["labels/classes"]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


@pytest.mark.usefixtures("one_device")
def test_labels_are_compared_by_the_names_of_the_classes(labelled, tmp_path):
    """Whose order differs between the teacher and the images."""
    teacher = read_pretrained(labelled / "teacher.npz")

    def top1(names):
        spec = teacher.spec._replace(class_names=names)
        config = debug_config(confidence=0.0)
        summary = label(config, teacher._replace(spec=spec), tmp_path)
        return summary.get("labels/top1")

    in_order = top1(tuple("0123456789"))
    assert in_order == top1(None)
    part = dict(np.load(tmp_path / "part_00000.npz"))
    reversed_order = top1(tuple("9876543210"))
    assert reversed_order == (part["label"] == 9 - part["true"]).mean() != in_order
    assert top1(("zero", *"123456789")) is None
    for first in (100, 0):  # the others have no label, as the test split of ImageNet
        true = np.where(np.arange(len(part["true"])) < first, part["true"], -1)
        np.savez(tmp_path / "part_00000.npz", **part | {"true": true})
        share = (part["label"] == true)[:first].mean() if first else None
        assert top1(tuple("0123456789")) == top1(None) == share


def test_what_label_refuses(labelled, tmp_path):
    teacher = read_pretrained(labelled / "teacher.npz")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    with at_fault("--workdir"):
        label(debug_config(), teacher, run)
    assert find_faults(debug_config(per_class=-5))[0].startswith("study.per_class=-5")
    several = teacher._replace(run={"config": {"data": {"multi_label": True}}})
    with at_fault("init_from"):
        label(debug_config(), several, tmp_path)
    without = teacher._replace(model=teacher.model.clone(num_classes=None))
    with pytest.raises(InputError, match="has no classes; predict --features"):
        label(debug_config(), without, tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut off"])
def test_damaged_pseudo_labels(tmp_path, content):
    (tmp_path / "labels.npz").write_bytes(content)
    with at_fault("data.split"):
        read_pseudo_labels(str(tmp_path / "labels.npz"))


def test_config_is_that_of_the_study():
    c = debug_config()
    assert find_faults(c) == []
    study_of(c).check_all()
    c.data.soft_labels = c.data.multi_label = True
    assert find_faults(c)[0].startswith("data.soft_labels=True")


@pytest.mark.slow
def test_a_killed_study_ends_with_the_same_parameters(tmp_path, monkeypatch):
    """SIGKILL to the member of every stage; the same command goes on each time."""
    armed = {}  # {member: moment}
    execute = running._execute

    def execute_killed(command):
        moment = armed.pop(command[-1].rpartition("/")[2], None)
        if moment is None:
            return execute(command)
        ended = execute([command[0], str(KILLED), moment, *command[3:]])
        assert ended[0] == 128 + signal.SIGKILL
        return ended

    monkeypatch.setattr(running, "_execute", execute_killed)
    monkeypatch.setenv("PYTHONPATH", str(CONFIGS.parent))
    flags = ["study", f"--config={CONFIGS / 'noisy_student.py'}:debug"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*flags, f"--workdir={whole}"]) == 0
    for stage, moment in (
        ("teacher_seed_0", "rows:2"),
        ("teacher_seed_0", "evaluation:1"),
        ("teacher_labels_seed_0", "files:3"),
        ("student_seed_0", "save:1"),
        ("student_seed_0", "evaluation:1"),
    ):
        armed[stage] = moment
        assert main([*flags, f"--workdir={killed}"]) == 1
        assert not armed and not (killed / stage / "summary.json").exists(), (stage, moment)
    assert main([*flags, f"--workdir={killed}"]) == 0

    labels = "teacher_labels_seed_0/labels.npz"
    found, expected = (read_pseudo_labels(str(study / labels)) for study in (killed, whole))
    np.testing.assert_array_equal(found.record, expected.record)
    np.testing.assert_array_equal(found.label, expected.label)
    for member in ("teacher_seed_0", "student_seed_0"):
        found, expected = (read_pretrained(study / member).params for study in (killed, whole))
        check_same_arrays(found, expected)
