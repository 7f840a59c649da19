"""Certificates: their parts, their texts, and plans by them."""

import functools
import json
import subprocess
import sys

import jax
import pytest
from at_fault import at_fault
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.config import Settings
from vit_jax.devices import flops
from vit_jax.devices.chips import CHIPS
from vit_jax.devices.mesh import AXES, make_mesh
from vit_jax.diagnosis import certificate
from vit_jax.diagnosis.certificate import measures, page, steps
from vit_jax.diagnosis.certificate.context import Context
from vit_jax.diagnosis.certificate.measures import _without_values
from vit_jax.main import main
from vit_jax.planning.calculated import calculate_memory
from vit_jax.planning.measured import read_certificate, target_of_certificate
from vit_jax.planning.run_plan import find_target
from vit_jax.run.setup.opener import Tables
from vit_jax.run.setup.resolve import resolve
from vit_jax.run.setup.validation import load_config
from vit_jax.run.teachers import planned_experiment

DEVICES = {"device_kind": "cpu", "num_chips": 1, "memory_bytes": 8e9, "flops_per_s": 1e11,
           "memory_bytes_per_s": 1e10, "software": {"jax": "0.10.2"}, "held": None,
           "said": "1 x cpu"}  # fmt: skip
STEP = {"model": "ViT-Ti/16", "flops": 2e10, "global_batch_size": 4, "step_s": 0.4,
        "scale_of_activations": 1.5}  # fmt: skip


@pytest.fixture
def made(tmp_path):
    """The file of a certificate of a CPU."""
    path = epath.Path(tmp_path) / "certificate.json"
    parts = {"devices": DEVICES, "steps": {"rows": [STEP], "held": None, "said": "a step"}}
    path.write_text(json.dumps({"schema": 2, "parts": parts}))
    return path


def planned(capsys, *words):
    words = ["--config=pretrain:ViT-Ti/16,imagenet2012", "--config.model.depth=1", *words]
    assert main(["plan", "--format=json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_by_a_certificate(made, capsys):
    words = ["--config.global_batch_size=4", "--config.model.dtype=float32"]
    figures = planned(capsys, f"--measured={made}", *words)
    run, flops = figures["estimate"]["run"], figures["flops"]["counted_per_step"]
    assert run["step_s"] == pytest.approx(flops * STEP["step_s"] / STEP["flops"])
    assert figures["topology"] == "cpu:1" and run["tpu_core_days"] is None
    memory = figures["memory_bytes"]
    kept = sum(memory[name] for name in ("params", "optimizer", "ema", "other_state", "batch"))
    assert memory["peak"] == kept + memory["temporaries"]
    made.write_text(made.read_text().replace(": 1.5}", ": 1.0}"))
    calculated = planned(capsys, f"--measured={made}", *words)["memory_bytes"]["temporaries"]
    assert 1.4 * calculated < memory["temporaries"] <= 1.5 * calculated
    assert "cpu" not in CHIPS  # the chip is known to plans by this certificate only
    with at_fault("--num_slices"):
        find_target(None, 2, read_certificate(made), may_compile=False)


@pytest.mark.slow
def test_a_plan_of_several_sizes_by_a_certificate(made, capsys):
    words = ["--config.global_batch_size=4", "--config.data.image_size=32, 64 at 50 %"]
    figures = planned(capsys, f"--measured={made}", *words, "--config.duration=10 steps",
                      "--config.schedule.warmup=0 steps")  # fmt: skip
    flops = [stage["flops"]["counted_per_step"] for stage in figures["stages"]]
    step_s = sum(flops) / 2 * STEP["step_s"] / STEP["flops"]
    assert figures["estimate"]["run"]["step_s"] == pytest.approx(step_s)
    peaks = [stage["memory_bytes"]["peak"] for stage in figures["stages"]]
    assert figures["memory_bytes"]["peak"] == max(peaks) == peaks[1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["no certificate", "vit_jax certify"]),
        (json.dumps({"schema": 2, "parts": {"devices": DEVICES}}), ["no certificate", "steps"]),
        (json.dumps({"schema": 1, "parts": {"devices": DEVICES, "steps": {"rows": [STEP]}}}),
         ["schema 1"]),
        (json.dumps({"schema": 2, "parts": {"devices": DEVICES, "steps": {"rows": [{}]}}}),
         ["0 steps"]),
        (json.dumps({"schema": 2, "parts": {"devices": DEVICES | {"device_kind": "Abacus"},
                                            "steps": {"rows": [STEP]}}}), ["Abacus"]),
    ],
)  # fmt: skip
def test_what_is_no_certificate_is_refused(content, words, made):
    made.write_text(content)
    with pytest.raises(InputError) as caught:
        read_certificate(made)
    assert all(word in str(caught.value) for word in ["--measured=", *words])


def test_a_certificate_is_of_one_chip(made):
    with pytest.raises(InputError, match="measured on cpu, not on v5e"):
        read_certificate(made).check_chip("v5e")


def sleep(start, words, **kwargs):
    return start(["sleep", "60"], **kwargs)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Makes a certificate of the results of parts, or of what keeps them from one."""

    def make(results, budget_s=60.0):
        def run_part(words, left_s, say):
            name = words[-1].removeprefix("--part=")
            found = results.get(name, {"held": None, "said": f"{name} measured"})
            if "failed" in found:
                return found
            certificate.part_file(output, name).write_text(json.dumps(found))
            return {}

        monkeypatch.setattr(certificate, "_run", run_part)
        output = epath.Path(tmp_path)
        (output / "parts").mkdir(exist_ok=True)
        return certificate.certify(output, ["certify"], budget_s, lambda line: None)

    return make


def test_a_certificate_names_what_does_not_hold(run, tmp_path):
    assert run({})["held"]
    made = run({
        "gradient": {"held": False, "said": "3 of 8 arrays differ"},
        "recovery": {"held": True, "said": "<b>equal</b> bits"},
        "exchanges": {"not_run": "there is one device"},
        "saves": {"failed": "OSError"},
    })  # fmt: skip
    others = certificate.certify(epath.Path(tmp_path), [], 60.0, print, is_first=False)
    assert others == {}
    assert not made["held"] and json.loads((tmp_path / "certificate.json").read_text()) == made
    text = page.as_text(made)
    assert len(text.splitlines()) == 1 + len(certificate.PARTS) == 10
    for line in (
        "gradient: DOES NOT HOLD: 3 of 8 arrays differ", "saves: FAILED: OSError",
        "exchanges: not run: there is one device", "recovery: <b>equal</b> bits",
    ):  # fmt: skip
        assert line in text.splitlines()
    shown = page.as_html(made)
    assert "&lt;b&gt;equal&lt;/b&gt; bits" in shown and "not run" in shown
    assert not run({"saves": {"failed": "x"}})["held"]


def test_a_part_without_time_is_not_run(run):
    made = run({}, budget_s=0.0)
    assert made["held"] and all("minutes" in part["not_run"] for part in made["parts"].values())


def test_an_error_in_a_certificate_is_its_type():
    """Since its text may name hosts, paths and keys."""
    text = "jax.errors.JaxRuntimeError: tpu-worker-3.internal:8471, runs/secret/x.npz"
    assert certificate.without_names(text, "exit code 1") == "JaxRuntimeError"
    assert certificate.without_names("killed on my-host", "exit code -9") == "exit code -9"
    assert _without_values("--xla_dump=runs/x --xla_y") == "--xla_dump --xla_y"


def test_a_process_that_fails_is_a_fault(monkeypatch):
    def fail(words, **kwargs):
        said = f"echo 'error: {words[-1]}: no part' >&2; exit 2"
        return popen(["sh", "-c", said], **kwargs)

    popen, said = subprocess.Popen, []
    monkeypatch.setattr(certificate.subprocess, "Popen", fail)
    failure = certificate._run(["certify", "--part=nothing"], 60.0, said.append)
    assert failure == {"failed": "exit code 2"} and said == ["error: --part=nothing: no part"]


def test_a_part_without_end_is_a_fault(monkeypatch):
    monkeypatch.setattr(certificate.subprocess, "Popen", functools.partial(sleep, subprocess.Popen))
    failure = certificate._run(["certify"], 0.1, print)
    assert "not over" in failure["failed"]


def test_the_figures_of_a_part_keep_their_names(monkeypatch):
    found = {"seconds": {"plain": 1.0}, "held": True, "said": "fine"}
    monkeypatch.setattr(measures, "measure_kernels", lambda context: found)
    assert certificate.run_part("kernels", None).items() > found.items()


@pytest.mark.parametrize("kind", measures.COLLECTIVES)
def test_exchanges_are_timed_on_each_axis(kind):
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    assert measures.sent(mesh, "fsdp", kind, mib=1) > 0


def test_the_nearest_step_has_as_many_flops_an_image(made):
    """Whatever the batch, which a plan has for all chips."""
    large = STEP | {"model": "ViT-L/16", "flops": 40 * STEP["flops"]}
    content = json.loads(made.read_text())
    content["parts"]["steps"]["rows"].append(large)
    made.write_text(json.dumps(content))
    figures = {"flops": {"counted_per_step": 1.1 * 64 * STEP["flops"] / 4}, "global_batch_size": 64}
    assert read_certificate(made).nearest_to(figures).model == "ViT-Ti/16"


@pytest.mark.slow
def test_memory_of_another_model_and_batch_is_planned(tmp_path):
    """Of what XLA compiles with all its optimizations, by a model of half its width."""
    devices = jax.devices()[:1]
    context = Context(epath.Path(tmp_path), (), None, (), True)
    (tmp_path / "parts").mkdir()
    certificate.keep(context, "devices", DEVICES)
    mesh = make_mesh(**dict.fromkeys(AXES, 1), devices=devices)

    def step(model, images):
        config = load_config(f"pretrain:{model},imagenet2012", {
            "global_batch_size": images, "model.dtype": "float32", "model.depth": 2,
        })  # fmt: skip
        settings = resolve(Settings.of(config), Tables(mesh)).settings
        with jax.set_mesh(mesh):
            compiled = planned_experiment(settings, mesh).lower().compile()
        return settings, flops.expected_memory(compiled.memory_analysis()).total

    jax.config.update("jax_disable_most_optimizations", False)
    try:
        (small, measured), (large, expected) = step("ViT-Ti/16", 4), step("ViT-S/16", 6)
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    found = steps._beside_plan(context, small, mesh, {"memory_bytes": measured})
    target = target_of_certificate(DEVICES, "c")._replace(scale=found["scale_of_activations"])
    assert calculate_memory(large, target)["peak"] == pytest.approx(expected, rel=0.1)
    assert 1 < found["scale_of_activations"] < 1.5  # and 2.0 by the rules of a TPU


def test_an_unknown_chip_has_steps_without_a_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "target_of", lambda devices: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    context = Context(epath.Path(tmp_path), ("ViT-Ti/16",), None, (), True)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    assert steps._beside_plan(context, None, mesh, {}) == {}


@pytest.mark.slow
def test_this_machine_is_certified(tmp_path):
    """With another batch of the model that it has, planned and measured: memory to 15 %."""
    job = subprocess.run(
        [sys.executable, "-m", "vit_jax.main", "certify", f"--output={tmp_path}",
         "--models=ViT-Ti/16", "--config=quickstart:debug", "--minutes=8"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert job.returncode == 0, job.stderr
    parts = json.loads((tmp_path / "certificate.json").read_text())["parts"]
    assert parts["gradient"]["held"] and parts["recovery"]["held"] and parts["saves"]["held"]
    assert parts["steps"]["rows"][0]["model"] == "ViT-Ti/16"
    assert parts["input"]["images_per_s"] > 0
    assert parts["kernels"]["seconds"]["products"] > 0
    assert str(tmp_path) not in (tmp_path / "certificate.json").read_text()
