"""Plans: what the command prints, what it refuses, and what its figures are made of."""

import ast
import collections
import functools
import json
import math
import pathlib
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asked import prepare
from images import write_images
from jax.sharding import PartitionSpec as P
from opened import config_json, with_known_facts
from read_settings import settings_of
from shipped_forms import load

import vit_jax
from vit_jax import planning
from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.config import base_config
from vit_jax.devices import sharding
from vit_jax.devices.chips import CHIPS, find_slice
from vit_jax.devices.flops import forward_macs
from vit_jax.devices.mesh import make_mesh
from vit_jax.experiment.experiment import Experiment, make_experiment
from vit_jax.insight.runs import read_goodput
from vit_jax.main import main
from vit_jax.models import create_model
from vit_jax.objectives.contract import Teacher
from vit_jax.planning import (
    calculated,
    compiled,
    exchanges,
    hlo,
    plan_figures,
    plan_tables,
    recipe_costs,
    run_plan,
    search,
)
from vit_jax.planning.compiled import collective_table, compile_plan, needed_memory
from vit_jax.planning.estimates import estimate, speed_of
from vit_jax.planning.run_plan import plan_run
from vit_jax.planning.search import find_layouts, find_remedies, largest_batch
from vit_jax.planning.targets import Target, readable_mesh
from vit_jax.run import loop
from vit_jax.run.teachers import abstract_teachers, planned_experiment

pytestmark = pytest.mark.usefixtures("small_moments_are_split")

ROOT = pathlib.Path(__file__).parents[2]
TINY = "--config=configs/pretrain.py:ViT-B/16,imagenet21k,debug"
AS_IT_IS = "--config.auto=false"  # the layout of the config, without a search
GIB = 2**30
EIGHT = Target(find_slice("H100:8"))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch):
    """Plans for GPUs are calculated, unless a test compiles them."""
    monkeypatch.setattr("vit_jax.planning.targets.has_cuda", lambda: False)


def tiny_config(**changes):
    c = base_config()
    c.model.name, c.data.name, c.data.image_size = "ViT-mu/8", "imagenet2012", 16
    c.data.ops, c.model.dtype = "flip", "bfloat16"
    c.global_batch_size, c.duration, c.optimizer.peak_lr = 64, "100 steps", 1e-3
    c.update_from_flattened_dict(changes)
    return with_known_facts(c)


def plan_by_command(capsys, *words):
    code = main(["plan", "--format=json", *words])
    return code, json.loads(capsys.readouterr().out)


PLACES = """
import sys

from vit_jax.devices.chips import count_chips, find_slice
from vit_jax.main import main
from vit_jax.planning.targets import Target, describe_devices, find_devices, start_planning

for name, num_slices in [("v5e:1x1", 1), ("v5e:2x4", 1), ("v6e:4x8", 2), ("v5p:2x4x4", 2),
                         ("tpu7x:2x2x2", 1)]:
    target = Target(find_slice(name), num_slices)
    start_planning(target)
    assert count_chips(find_devices(target)) == target.num_chips
    described, found = (
        {(getattr(d, "slice_index", 0), *d.coords, d.core_on_chip, d.platform) for d in devices}
        for devices in (describe_devices(target), find_devices(target))
    )
    assert described == found, (name, described ^ found)
sys.exit(main(sys.argv[1:]))
"""


def plan_by_process(*words):
    """After `PLACES`, in another process: where libtpu was loaded, JAX's profiler crashes."""
    command = [sys.executable, "-c", PLACES, "plan", "--format=json", *words]
    job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert job.returncode in (0, 3), job.stderr
    return job.returncode, json.loads(job.stdout)


def test_plan_for_tpus_compiles_here_and_is_kept(tmp_path, capsys, monkeypatch):
    """And the TPUs that are described are as their compiler describes them."""
    pytest.importorskip("libtpu")
    monkeypatch.setattr(sharding, "SPLIT_FROM", 1 << 16)  # as in the process below
    words = (TINY, "--topology=v5e:2x2", "--price_per_chip_hour=2", "--config.mesh.fsdp=1",
             "--config.model.depth=1", AS_IT_IS)  # fmt: skip
    code, figures = plan_by_process(*words)
    memory, timing = figures["memory_bytes"], figures["estimate"]
    assert code == 0 and memory["fits"]
    assert memory["capacity"] == 15.75 * GIB
    assert memory["margin"] == memory["capacity"] - memory["peak"]
    # Every device keeps both of Adam's moments of parameters as small as these.
    assert 2 * memory["params"] <= memory["optimizer"] < 2.01 * memory["params"]
    held = sum(memory[part] for part in ("params", "optimizer", "batch", "temporaries"))
    assert held <= memory["peak"] < 1.3 * held
    assert figures["by"] == "compiler" and figures["compiler_cycles"] > 10_000
    exchanges = figures["collectives"]
    assert {(*row["axes"], row["network"]) for row in exchanges} == {("data", "ICI")}
    reduced = [row for row in exchanges if row["kind"] in ("all-reduce", "reduce-scatter")]
    assert sum(row["bytes"] for row in reduced) >= figures["num_params"] * 2
    assert timing["run"]["by"] == "compiler"
    assert timing["compiler"]["step_s"] > timing["roofline"]["step_s"] > 0
    assert timing["run"]["chip_hours"] == 4 * timing["run"]["hours"]
    assert timing["run"]["cost"] == 2 * timing["run"]["chip_hours"]
    assert timing["run"]["tpu_core_days"] * 24 == pytest.approx(timing["run"]["chip_hours"])

    (kept,) = (tmp_path / "cache" / "vit_jax" / "plans").iterdir()
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"compile_s": 12345}))
    assert plan_by_command(capsys, *words) == (code, figures | {"compile_s": 12345})

    # What is calculated moves as many bytes: gradients in bfloat16.
    _, others = plan_by_command(capsys, words[0], "--topology=H100:4", *words[3:])
    for kinds in (("all-reduce", "reduce-scatter"), ("all-gather",)):
        compiled, found = (
            sum(row["bytes"] for row in rows if row["kind"] in kinds)
            for rows in (exchanges, others["collectives"])
        )
        # The kernel of attention sums the gradients of its biases in float32.
        assert found == pytest.approx(compiled, rel=0.02)


def test_a_long_compilation_says_how_long_it_takes(monkeypatch):
    said = threading.Event()
    monkeypatch.setattr(compiled, "_SAID_EVERY_S", 1e-3)
    monkeypatch.setattr(compiled.logger, "info", lambda *args: said.set())
    with compiled.saying_how_long(0.0):
        assert said.wait(60)


def test_plan_is_of_the_step_that_is_trained(monkeypatch, tmp_path):
    config = base_config()
    config.model.name, config.data.name, config.data.image_size = "ViT-mu/4", "digits", 8
    config.global_batch_size, config.duration, config.optimizer.peak_lr = 16, "10 steps", 1e-3
    config.data.ops, config.mesh.fsdp = "flip", 2
    lowered, trace = [], Experiment.trace

    class Recorded(Exception):
        """Instead of a compilation."""

    def record(experiment):
        lowered.append(trace(experiment).lower().as_text())
        raise Recorded

    monkeypatch.setattr(Experiment, "trace", record)
    monkeypatch.setattr("vit_jax.planning.targets.find_devices", lambda target: jax.devices())
    with pytest.raises(Recorded):
        compile_plan(settings_of(with_known_facts(config)), Target(find_slice("v5e:2x4")))
    run = prepare(config, tmp_path / "workdir")
    with pytest.raises(Recorded), jax.set_mesh(run.mesh):
        loop.compile_step(run)
    planned, trained = lowered
    assert len(planned) > 10_000 and planned == trained


@pytest.mark.parametrize(("sent_bytes", "mfu"), [(1e3, 0.4), (1e12, 0.0)])
def test_no_estimate_is_faster_than_the_roofline(sent_bytes, mfu):
    exchange = {"kind": "all-reduce", "network": "network", "asynchronous": True,
                "bytes": sent_bytes, "sent_bytes": sent_bytes}  # fmt: skip
    figures = {
        "topology": "H100:8", "num_chips": 8, "total_steps": 1, "global_batch_size": 8,
        "flops": {"model_per_step": 1e12, "counted_per_step": 1e12}, "hbm_bytes_accessed": None,
        "compiler_cycles": None, "collectives": [exchange], "kernels": [],
    }  # fmt: skip
    found = estimate(figures, None)
    assert found["at_utilisation"]["step_s"] >= found["roofline"]["step_s"]
    assert found["at_utilisation"]["mfu"] == pytest.approx(mfu, abs=1e-4)


def test_plan_for_gpus_is_calculated(capsys):
    words = (TINY, AS_IT_IS, "--topology=L4:8", "--config.mesh.fsdp=4", "--config.mesh.data=2")
    code, figures = plan_by_command(capsys, *words, "--config.model.width=64")
    asked = {"auto": False, "mesh.fsdp": 4, "mesh.data": 2, "model.width": 64}
    assert vit_jax.plan(TINY.removeprefix("--config="), "L4:8", asked) == figures
    assert code == 0 and figures["by"] == "calculation"
    assert figures["model"].startswith("ViT/") and "(width 64, " in figures["model"]
    assert figures["compiler_cycles"] is None and figures["estimate"]["compiler"] is None
    assert figures["estimate"]["run"]["by"] == "at_utilisation"
    assert figures["estimate"]["run"]["tpu_core_days"] is None
    rows = figures["collectives"]
    assert {(row["kind"], *row["axes"]) for row in rows} == {
        (kind, axis)
        for kind in ("all-gather", "reduce-scatter", "all-reduce")
        for axis in ("fsdp", "data")
    }
    assert {row["network"] for row in rows} == {"PCIe"}
    sent = [row["sent_bytes"] for row in rows]
    assert sent == sorted(sent, reverse=True)


def eight_chips(topology="H100:8", **changes):
    """The experiment on 8 chips, and {(kind, axis): bytes} that a step of it exchanges."""
    experiment, found = exchanges_of(topology, frozenset(changes.items()))
    return experiment, dict(found)


@functools.cache
def exchanges_of(topology, changes):
    config, target = tiny_config(**dict(changes)), Target(find_slice(topology))
    mesh = planning.targets.plan_mesh(settings_of(config), target)
    experiment = planned_experiment(settings_of(config), mesh)
    accum_steps = settings_of(config).optimizer.accum_steps
    rows = exchanges.collective_table(experiment, mesh.shape, target, 8, accum_steps)
    return experiment, {(row["kind"], *row["axes"]): row["bytes"] for row in rows}


def test_texts_of_all_rows_pass_each_chip():
    """Twice, and their gradients once, each of 32 float32 numbers; by the slowest axis."""
    settings = settings_of(with_known_facts(load("siglip", "debug")))
    mesh = planning.targets.plan_mesh(settings, EIGHT)
    experiment = planned_experiment(settings, mesh)
    for axes, axis in (({}, "data"), ({"replica": 2, "data": 4}, "replica")):
        rows = exchanges.collective_table(experiment, {**mesh.shape, **axes}, EIGHT, 4, 1)
        (found,) = (row for row in rows if row["kind"] == "collective-permute")
        assert (found["axes"], found["bytes"]) == ([axis], 32 * 3 * 32 * 4)


def read_exchanged():
    """(changes of the config, {(kind, axis): bytes of each kind of kernel}) of exchanged.txt."""
    for paragraph in (ROOT / "tests/planning/exchanged.txt").read_text().split("\n\n"):
        if not paragraph.startswith("#"):
            words, *rows = paragraph.strip().split("\n    ")
            changes = (word.split("=") for word in words.split())
            expected = {tuple(row.split()[:2]): [*map(float, row.split()[2:])] for row in rows}
            yield {key: ast.literal_eval(value) for key, value in changes}, expected


@pytest.mark.parametrize(("changes", "expected"), list(read_exchanged()), ids=str)
def test_exchanges_of_parameters(changes, expected):
    """As the compiler of jax-cuda12-plugin 0.10.2 has them in a ViT-S/16's step for 8 H100."""
    experiment, rest = eight_chips(**{"mesh.data": 1, "model.depth": 2, **changes})
    numbers = collections.Counter()
    for name, leaf in tree.flatten_names(experiment.abstract_state.params).items():
        of = "layers" if "/layer" in name else "head" if name.startswith("head/") else "others"
        numbers[of if name.endswith("/kernel") else "small"] += leaf.size
    kernels = {
        key: sum(size * numbers[kind] for size, kind in zip(sizes, ("layers", "others", "head"),
                                                            strict=True))
        for key, sizes in expected.items()
    }  # fmt: skip
    for key, number in kernels.items():
        rest[key] -= number
    # Biases, norms and positions are reduced whole, and nothing else is exchanged.
    assert not any(number for (kind, _), number in rest.items() if kind != "all-reduce")
    assert 2 * numbers["small"] <= max(rest.values()) <= 4 * numbers["small"]


def test_chips_with_whole_parameters_exchange_the_gradients_of_microbatches_once():
    how = {"mesh.data": 8, "model.scan": True, "optimizer.accum_steps": 4}
    experiment, found = eight_chips("v5e:2x4", **how)
    assert found["all-reduce", "data"] == 4 * experiment.num_params


def test_sam_exchanges_gradients_twice_and_updates_once():
    changes = {"mesh.data": 8, "model.depth": 2}
    experiment, once = eight_chips(**changes)
    other, twice = eight_chips(**changes, **{"optimizer.sam_radius": 0.05})
    gathered = ("all-gather", "data")
    assert gathered in once and len(once) > 1
    assert twice == {key: size if key == gathered else 2 * size for key, size in once.items()}
    assert other.flops_per_image == 2 * experiment.flops_per_image


def test_what_is_frozen_is_gathered_but_has_no_gradient():
    """Layers before the first that learns are not gathered again."""
    mesh = {"mesh.data": 1, "mesh.fsdp": 8, "model.remat": "full", "model.depth": 2}
    _, everything = eight_chips(**mesh)
    layer = 4 * 32**2 + 2 * 32 * 128  # numbers in its kernels
    embedding, head = 8 * 8 * 3 * 32, 32 * 1000
    assert everything["reduce-scatter", "fsdp"] == 2 * (2 * layer + embedding) + 4 * head
    for freeze, learning, again in (("(?!head/).*", 0, 0), ("(?!head/|.*layer_1/).*", 1, 1)):
        _, frozen = eight_chips(**mesh, **{"optimizer.freeze": freeze})
        assert frozen["reduce-scatter", "fsdp"] == 2 * learning * layer + 4 * head
        weights = 2 * ((2 + again) * layer + embedding) + 4 * head
        assert frozen["all-gather", "fsdp"] == weights


def test_weights_of_teachers_are_gathered():
    mesh = {"mesh.data": 1, "mesh.fsdp": 8}
    _, alone = eight_chips(**mesh)
    kernels = 4 * 32**2 + 2 * 32 * 128 + 8 * 8 * 3 * 32
    taught = {"objective.name": "distillation", "objective.teacher": "untrained:ViT-mu/8"}
    _, frozen = eight_chips(**mesh, **taught)
    added = frozen["all-gather", "fsdp"] - alone["all-gather", "fsdp"]
    assert added == 2 * kernels + 4 * 32 * 1000
    own = {"num_prototypes": 64, "head_width": 32, "bottleneck": 16, "patch_weight": 0.0}
    dino = {f"objective.{key}": value for key, value in own.items()}
    dino |= {"objective.name": "self_distillation", "data.num_global": 2, "data.ops": ""}
    dino |= {"data.global_ops": "flip; flip"}
    dino |= {"optimizer.ema_decay": 0.9, "optimizer.ema_decay_end": 1.0}
    _, averaged = eight_chips(**mesh, **dino)
    assert averaged["all-gather", "fsdp"] >= 2 * 2 * kernels


def test_layers_that_are_compared_are_planned_as_they_are():
    taught = {"name": "distillation", "teacher": "untrained:ViT-mu/8", "mode": "features",
              "features": "0:0"}  # fmt: skip
    config = tiny_config(**{f"objective.{key}": value for key, value in taught.items()})
    figures = calculated.calculate_plan(settings_of(config), Target(find_slice("H100:1")))
    assert not figures["scan"] and figures["memory_bytes"]["fits"]


def test_gradients_are_scattered_over_data_and_fsdp_at_once():
    _, numbers = eight_chips(**{"mesh.data": 2, "mesh.fsdp": 4})
    width, hidden = 32, 128
    kernels = 4 * width**2 + 2 * width * hidden + 8 * 8 * 3 * width
    scattered = 2 * kernels + 4 * width * 1000
    assert numbers["reduce-scatter", "fsdp"] == scattered
    assert numbers["reduce-scatter", "data"] == scattered / 4
    assert numbers["all-reduce", "fsdp"] < 0.1 * scattered  # biases, norms and positions


def test_on_tpus_gradients_are_scattered_over_fsdp_and_their_parts_reduced_over_data():
    sizes = {"mesh.data": 2, "mesh.fsdp": 4, "model.scan": True}
    _, gpus = eight_chips(**sizes)
    _, tpus = eight_chips("v5e:2x4", **sizes)
    scattered = gpus["reduce-scatter", "fsdp"]
    assert tpus["reduce-scatter", "fsdp"] == scattered
    assert tpus["all-reduce", "data"] - gpus["all-reduce", "data"] == scattered / 4


def test_gradients_that_two_axes_of_an_array_split_are_reduced_whole():
    # 8 divides no axis that fsdp splits, so the moments have data on another one.
    sizes = {"model.width": 36, "model.num_heads": 2}
    _, numbers = eight_chips(**{"mesh.data": 2, "mesh.fsdp": 4}, **sizes)
    width, hidden = 36, 128
    kernels = 4 * width**2 + 2 * width * hidden + 8 * 8 * 3 * width
    reduced = 2 * kernels + 4 * width * 1000
    # With biases, norms and positions.
    assert reduced < numbers["all-reduce", "fsdp"] < 1.05 * reduced
    assert numbers["all-reduce", "data"] == pytest.approx(numbers["all-reduce", "fsdp"] / 4)
    assert ("reduce-scatter", "fsdp") not in numbers


@pytest.mark.parametrize(("name", "network"), [("L4", "PCIe"), ("A10", "PCIe"), ("RTX4090", "PCIe"),
                                               ("RTX5090", "PCIe"), ("A100", "NVLink"),
                                               ("B200", "NVLink")])  # fmt: skip
def test_network_within_a_host(name, network):
    chip = CHIPS[name]
    assert chip.fast_network == network
    assert speed_of(chip, network) == chip.fast_bytes_per_s
    assert speed_of(chip, "network") == chip.slow_bytes_per_s


def test_gpus_of_several_hosts_exchange_over_the_network():
    target = Target(find_slice("A100:32"))
    config = tiny_config(**{"mesh.data": 4, "mesh.fsdp": 8})
    exchanges = calculated.calculate_plan(settings_of(config), target)["collectives"]
    networks = {row["axes"][0]: row["network"] for row in exchanges}
    assert networks == {"fsdp": "NVLink", "data": "network"}
    for row in exchanges:  # a ring sends all but a device's own part; an all-reduce does it twice
        share = 1 - 1 / {"fsdp": 8, "data": 4}[row["axes"][0]]
        passes = 2 if row["kind"] == "all-reduce" else 1
        assert row["sent_bytes"] == pytest.approx(passes * share * row["bytes"])


def test_exchanges_name_axes_and_networks():
    mesh = make_mesh(replica=2, data=2, fsdp=2, tensor=1)

    def step(x):
        return jax.lax.psum(x, ("replica", "data")), jax.lax.all_gather(x, "fsdp")

    step = jax.shard_map(step, mesh=mesh, in_specs=P("fsdp"), out_specs=(P("fsdp"), P()),
                         check_vma=False)  # fmt: skip
    text = jax.jit(step).lower(jnp.zeros((4, 8))).compile().as_text()
    rows = collective_table(hlo.Program(text), mesh, FOUR)
    assert {row["kind"]: row["axes"] for row in rows} == {
        "all-reduce": ["replica", "data"],
        "all-gather": ["fsdp"],
    }
    assert {row["network"] for row in rows} == {"ICI"}


def fake_figures(**changes):
    return {
        "topology": "v5e:2x2", "num_chips": 4, "global_batch_size": 100, "total_steps": 3600,
        "flops": {"model_per_step": 4 * 197e12, "counted_per_step": 6 * 197e12},
        "hbm_bytes_accessed": 2 * 819e9, "compiler_cycles": 3_000_000_000, "kernels": [],
        "memory_bytes": {"params": 1e9, "optimizer": 398e9, "ema": 0, "other_state": 0,
                         "batch": 21e9},
        "collectives": [
            {"network": "ICI", "asynchronous": True, "sent_bytes": 100e9},
            {"network": "DCN", "asynchronous": False, "sent_bytes": 3.125e9},
        ],
    } | changes  # fmt: skip


def test_estimate():
    figures = estimate(fake_figures(), price_per_chip_hour=3.0)
    roofline, compiler, run = (figures[key] for key in ("roofline", "compiler", "run"))
    assert (roofline["flops_s"], roofline["hbm_s"], roofline["collectives_s"]) == (1.5, 1.0, 1.5)
    assert roofline["step_s"] == 1.5 and roofline["mfu"] == pytest.approx(1 / 1.5)
    # Two seconds of computation, which hide half a second of exchanges; one more is added.
    assert compiler["compute_s"] == 2.0 and compiler["step_s"] == 3.0
    assert compiler["mfu"] == pytest.approx(1 / 3)
    assert (run["hours"], run["chip_hours"], run["cost"]) == (3.0, 12.0, 36.0)
    assert run["tpu_core_days"] == 0.5
    assert all(part["assumptions"] for part in (roofline, compiler))
    # Bytes that may stay in VMEM make no minimum, and a kernel's unknown cycles none below FLOPs.
    figures = estimate(fake_figures(compiler_cycles=1, hbm_bytes_accessed=1e15), None)
    assert figures["compiler"]["step_s"] >= figures["roofline"]["step_s"] == 1.5


def test_goodput_of_runs_lengthens_the_hours(tmp_path, capsys, monkeypatch):
    """All seconds of all runs of a folder count; the answer says what its hours hold."""
    monkeypatch.setattr(planning, "compile_plan", None)  # cannot be called
    words = (TINY, AS_IT_IS, "--topology=v5e:2x2", "--no_compile", "--price_per_chip_hour=2")
    code, figures = plan_by_command(capsys, *words)
    assert code == 0 and figures["by"] == "calculation"
    alone = figures["estimate"]["run"]
    for name, waited in (("a", 1.0), ("b", 3.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config_json(tiny_config()))
        row = {"step": 1, "time/seconds": 8.0, "time/input_wait_s": waited, "time/wall_s": 10.0}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    figures = plan_by_command(capsys, *words, f"--goodput_of={tmp_path}")[1]
    run = figures["estimate"]["run"]
    assert run["goodput"] == pytest.approx(12 / 20)
    for key in ("hours", "chip_hours", "cost"):
        assert run[key] == pytest.approx(alone[key] / 0.6)
    assert " hours (goodput 60.0%), " in plan_tables.answer(figures)
    assert main(["plan", *words, f"--goodput_of={tmp_path / 'none'}"]) == 2
    assert "no such folder" in capsys.readouterr().err
    (tmp_path / "a/metrics.jsonl").write_text("")
    for name in ("--goodput_of", "goodput_of"):  # of the command, and of `vit_jax.plan`
        with pytest.raises(InputError, match=f"^{name}=.*/a: no step is timed yet"):
            read_goodput(tmp_path / "a", name)


def test_budget_lists_recipes(tmp_path, capsys, monkeypatch):
    """Of two rows of a recipe the compiler's counts; what does not fit is left out."""
    costs = ("calculation,v5e:4x4,{},yes,32", "calculation,v5e:4x4,{},no,1",
             "calculation,v5e:4x4,{},maybe,16", "calculation,H100:8,{},yes,1",
             "compiler,v5e:4x4,{},yes,160")  # fmt: skip
    times = ("at_utilisation",) * 4 + ("compiler",)
    rows = [f"{row.format(name)},{by}" for row, name, by in zip(costs, "abcda", times, strict=True)]
    table = tmp_path / "costs.csv"
    table.write_text("\n".join(["by,slice,recipe,fits,chip_hours,time_by", *rows, ""]))
    monkeypatch.setattr(recipe_costs, "TABLE", table)
    words = ("--topology=v5e:2x2", "--price_per_chip_hour=2")
    code, found = plan_by_command(capsys, "--budget=320", *words)
    assert code == 0 and [(row["recipe"], row["hours"], row["cost"]) for row in found] == [
        ("c", 1.0, 32.0), ("a", 10.0, 320.0)
    ]  # fmt: skip
    assert main(["plan", "--budget=320", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the compiler's" not in shown and "calculation only" not in shown
    assert "stage" not in shown and "Fit in no layout: b." in shown
    table.write_text(table.read_text().replace(",c,", ',"mae:c",') + (
        'calculation,v5e:4x4,"mae:c,finetune",yes,16,at_utilisation\n'
    ))  # fmt: skip
    assert main(["plan", "--budget=320", *words]) == 0
    assert "Add the cost of the stage that follows: mae:c (finetune)." in capsys.readouterr().out
    table.write_text(table.read_text().replace("yes,160", "yes,8"))
    assert main(["plan", "--budget=31", *words]) == 0
    shown = capsys.readouterr().out
    assert "take 25% to 25% of the calculated time" in " ".join(shown.split())
    assert "by calculation only: mae:c, mae:c,finetune." in shown
    table.write_text(table.read_text().replace("yes,8,compiler", "yes,8,at_utilisation"))
    assert main(["plan", "--budget=31", *words]) == 0
    shown = capsys.readouterr().out
    assert "of the calculated time" not in shown and "40% of peak" in shown
    assert main(["plan", "--budget=1", *words]) == 3
    assert main(["plan", "--budget=320", "--topology=v4:2x2x1", "--price_per_chip_hour=2"]) == 2
    assert "no costs are known for its chips; v5e:4x4, H100:8 are" in capsys.readouterr().err
    assert main(["plan", "--budget=320"]) == main(["plan", "--budget=320", TINY, *words]) == 2
    assert "--budget: lists shipped recipes; leave out --config" in capsys.readouterr().err
    table.write_text("\n".join(line for line in table.read_text().split("\n") if "mae" not in line))
    assert main(["plan", "--budget=320", *words]) == 0
    assert "of the calculated time" not in capsys.readouterr().out  # no row is calculated
    for flag in ("--budget=-1", "--budget=much"):
        with pytest.raises(SystemExit):
            main(["plan", flag, *words])
        assert "needs a number from 0 on" in capsys.readouterr().err


def test_estimate_without_cycles():
    figures = estimate(fake_figures(topology="v6e:2x2"), None)
    assert figures["roofline"]["bound_by"] == "hbm" and not figures["roofline"]["is_minimum"]
    assert figures["compiler"] is None  # the clock of v6e is not published
    assert figures["run"]["by"] == "at_utilisation" and figures["run"]["cost"] is None


def test_two_core_chips_count_twice():
    one, two = (estimate(fake_figures(topology=name, compiler_cycles=None), None)["run"]
                for name in ("v5e:2x2", "v5p:2x2x1"))  # fmt: skip
    assert one["tpu_core_days"] == one["chip_hours"] / 24
    assert two["tpu_core_days"] == 2 * two["chip_hours"] / 24


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        ("RESOURCE_EXHAUSTED: CompileTimeHbmOom: temporaries (304.00G) exceeds available HBM "
         "(15.75G)", 304 * GIB + 1000),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. "
         "Exceeded hbm capacity by 4.75G.", 20.5 * GIB),
        ("RESOURCE_EXHAUSTED: Used 512.0M of 256.0M hbm", 512 * 2**20),
        ("RESOURCE_EXHAUSTED: something else", None),
        ("INTERNAL: Used 20.50G of 15.75G hbm", None),
    ],
)  # fmt: skip
def test_compiler_says_how_much_is_needed(message, needed):
    assert needed_memory(message, state=1000) == needed


def test_state_and_host_bytes_follow_the_layout():
    mesh = make_mesh(replica=1, data=2, fsdp=4, tensor=1)
    experiment = make_experiment(settings_of(tiny_config()), mesh)
    kept = plan_figures.state_bytes(experiment)
    whole = sum(leaf.size * 4 for leaf in jax.tree.leaves(experiment.abstract_state.params))
    assert whole / 4 < kept["params"] < whole / 2  # the kernels lie in four parts
    state = sum(leaf.size * leaf.dtype.itemsize
                for leaf in jax.tree.leaves(experiment.abstract_state))  # fmt: skip
    # All devices here are of one host, which takes every part once.
    assert plan_figures.host_bytes_at_save(experiment, mesh) == state


@pytest.fixture
def linear(monkeypatch):
    """Plans whose temporaries are 1 GiB an image, a quarter of it with full remat.

    Over fsdp they are the same; gradients are accumulated without any of their own.
    """
    planned = []

    def plan(settings, target):
        config = settings.to_config()
        remat = config.model.remat or "none"
        data, fsdp = config.mesh.data, config.mesh.fsdp
        fsdp = fsdp or 1
        data = 4 // fsdp if data in (None, -1) else data
        images = config.global_batch_size // 4
        micro = images // settings_of(config).optimizer.accum_steps
        temporaries = int(micro * GIB * {"none": 1, "dots": 0.5, "full": 0.25}[remat])
        state = 8 * GIB // fsdp
        peak, capacity = state + temporaries, 15 * GIB
        planned.append((fsdp, remat, images))
        return fake_figures() | {
            "mesh": {"replica": 1, "data": data, "fsdp": fsdp, "tensor": 1},
            "remat": remat, "remat_layers": None, "scan": False, "compile_s": 1.0,
            "global_batch_size": config.global_batch_size,
            "images_per_way": images,
            "memory_bytes": fake_figures()["memory_bytes"] | {
                "temporaries": temporaries, "batch": 0, "peak": peak,
                "capacity": capacity, "fits": peak <= capacity},
        }  # fmt: skip

    monkeypatch.setattr("vit_jax.planning.search.plan", plan)
    monkeypatch.setattr(
        "vit_jax.planning.search.calculate_layout",
        lambda *_: {"memory_bytes": {"peak": 16 * GIB, "capacity": 15 * GIB, "fits": True}},
    )
    monkeypatch.setattr("vit_jax.planning.targets.find_devices", lambda _: jax.devices()[:4])
    return planned


FOUR = Target(find_slice("v5e:2x2"))
NOTHING_FITS = {"memory_bytes": {
    "temporaries": GIB, "batch": 0, "peak": 9 * GIB, "capacity": GIB, "fits": False
}}  # fmt: skip


@pytest.mark.parametrize("start", [4, 40, 4096])
def test_largest_batch(linear, start):
    figures = largest_batch(settings_of(tiny_config(global_batch_size=start)), FOUR)
    assert figures["images_per_way"] == 4  # 7 fit; 4 is the next that suits the chip
    full = tiny_config(**{"global_batch_size": start, "model.remat": "full", "mesh.fsdp": 4})
    assert largest_batch(settings_of(full), FOUR)["images_per_way"] == 48  # of 52
    assert len(linear) <= 12


def test_largest_batch_where_memory_grows_faster_than_it_seemed(monkeypatch):
    planned = []

    def plan(settings, target):
        config = settings.to_config()
        images = config.global_batch_size // 4
        planned.append(images)
        return {"images_per_way": images, "memory_bytes": {
            "temporaries": images * GIB // 10, "batch": 0, "peak": images * GIB // 10,
            "capacity": 7 * GIB, "fits": images <= 20}}  # fmt: skip

    monkeypatch.setattr("vit_jax.planning.search.plan", plan)
    monkeypatch.setattr("vit_jax.planning.targets.find_devices", lambda _: jax.devices()[:4])
    assert (
        largest_batch(settings_of(tiny_config(global_batch_size=16)), FOUR)["images_per_way"] == 16
    )
    assert planned == [4, 64, 32, 16, 24]
    monkeypatch.setattr("vit_jax.planning.search.plan", lambda *_: plan(*_) | NOTHING_FITS)
    figures = largest_batch(settings_of(tiny_config(global_batch_size=16)), FOUR)
    assert not figures["memory_bytes"]["fits"] and figures["images_per_way"] == 4


@pytest.mark.parametrize("suits", [16, 0])
def test_largest_batch_whose_stages_suit_the_devices(linear, monkeypatch, suits):
    plan_any = search.plan

    def plan(settings, target):
        if settings.run.global_batch_size != suits:
            raise InputError("the stage of 12 pixels has batches of 7")
        return plan_any(settings, target)

    monkeypatch.setattr(search, "plan", plan)
    settings = settings_of(tiny_config(global_batch_size=32))
    if not suits:
        with pytest.raises(InputError, match="has batches of 7"):
            largest_batch(settings, FOUR)
    else:
        assert largest_batch(settings, FOUR)["images_per_way"] == 4


def test_search_compares_meshes_and_remat(linear):
    rows = find_layouts(settings_of(tiny_config()), FOUR, batches=True, goodput=0.5)
    assert len(rows) == 6  # fsdp 1 and 4, times three
    assert {(row["mesh"]["fsdp"], row["remat"], row["images_per_way"]) for row in rows} == {
        (1, "none", 4), (1, "dots", 8), (1, "full", 24),
        (4, "none", 8), (4, "dots", 24), (4, "full", 48),
    }  # fmt: skip
    speeds = [row["estimate"]["images_per_s"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert plan_tables.layouts_table(rows)[0].title.endswith("; hours: goodput 50.0%")


@pytest.mark.parametrize(
    ("batch", "changes"),
    [
        (4 * 12, [{"model.remat": "dots"}]),
        (4 * 16, [{"model.remat": "dots"}, {"model.remat": "full"}]),
        (4 * 40, [{"model.remat": "dots"}, {"model.remat": "full"},
                  {"mesh.data": 1, "mesh.fsdp": 4},
                  {"model.remat": "full", "mesh.data": 1, "mesh.fsdp": 4}]),
    ],
)  # fmt: skip
def test_remedies_are_tried_until_one_fits(linear, batch, changes):
    config = tiny_config(global_batch_size=batch)
    figures = planning.search.plan(settings_of(config), FOUR)
    tried = find_remedies(settings_of(config), FOUR, figures)
    assert [remedy["fits"] for remedy in tried] == [False] * (len(tried) - 1) + [True]
    found = [{k: v for k, v in r["change"].items() if k != "mesh.replica"} for r in tried]
    assert found == changes


@pytest.mark.parametrize(
    "changes",
    [
        {"model.remat": "full", "model.remat_layers": 1},
        pytest.param({"optimizer.freeze": r"encoder/layer_0/.*"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_calculated_plans_count_the_step_that_is_trained(changes):
    """They trace it with a scan over the layers, which is faster, where that computes the same."""
    config = tiny_config(**{"model.depth": 2} | changes)
    figures = calculated.calculate_plan(settings_of(config), FOUR)
    mesh = planning.targets.plan_mesh(
        settings_of(config), FOUR, planning.targets.describe_devices(FOUR)
    )
    experiment = make_experiment(settings_of(config), mesh)
    assert not experiment.model.scan and figures["scan"] is False
    with jax.set_mesh(mesh):
        assert figures["flops"]["counted_per_step"] == experiment.flops_per_step
    assert figures["flops"]["model_per_image_by_jaxpr"] == experiment.flops_per_image


def test_what_is_far_too_large_by_calculation_is_not_compiled(linear, monkeypatch):
    config = tiny_config(global_batch_size=4 * 16)
    figures = planning.search.plan(settings_of(config), FOUR)
    del linear[:]

    def calculated_peak(settings, target):
        config = settings.to_config()
        peak = 40 if config.model.remat == "dots" else 10
        return {"memory_bytes": {"peak": peak * GIB, "capacity": 15 * GIB, "fits": peak < 15}}

    monkeypatch.setattr("vit_jax.planning.search.calculate_layout", calculated_peak)
    assert [row["fits"] for row in find_remedies(settings_of(config), FOUR, figures)] == [
        False,
        True,
    ]
    assert [remat for _, remat, _ in linear] == ["full"]


@pytest.mark.slow
def test_remedies_by_calculation_compile_nothing(monkeypatch):
    monkeypatch.setattr("vit_jax.planning.search.plan", None)  # cannot be called
    config = tiny_config(global_batch_size=4 * 4_000_037)  # no number of microbatches divides it
    figures = calculated.calculate_plan(settings_of(config), FOUR)
    *others, last = find_remedies(settings_of(config), FOUR, figures, calculate=True)
    assert not figures["memory_bytes"]["fits"] and not any(row["fits"] for row in others)
    assert last["fits"] and last["change"]["global_batch_size"] < config.global_batch_size
    certain = figures["memory_bytes"]["capacity"] / (1 + calculated.UNCERTAINTY)
    assert 0.9 * certain < last["peak_bytes"] <= certain


def test_of_smaller_batches_the_largest_that_fits_is_the_remedy(linear):
    config = tiny_config(global_batch_size=4 * 1000 + 4)  # no number of microbatches divides it
    *others, last = find_remedies(
        settings_of(config), FOUR, planning.search.plan(settings_of(config), FOUR)
    )
    assert not any(remedy["fits"] for remedy in others)
    assert last["fits"] and last["change"]["global_batch_size"] == 4 * 48


@pytest.mark.parametrize(
    ("target", "larger"), [(FOUR, "v5e:2x4"), (Target(find_slice("H100:4")), "H100:8")]
)
def test_remedies_name_a_larger_slice_in_the_end(target, larger, linear, monkeypatch):
    config = tiny_config(global_batch_size=4 * 10_000)
    memory = {"peak": 99 * GIB, "fits": False, "capacity": 7 * GIB, "temporaries": GIB, "batch": 0}
    monkeypatch.setattr("vit_jax.planning.search.plan", lambda *_: {"memory_bytes": memory})
    mesh = {"replica": 1, "data": target.num_chips, "fsdp": 1, "tensor": 1}
    figures = {"mesh": mesh, "remat": "none",
               "images_per_way": 10_000, "global_batch_size": 40_000}  # fmt: skip
    tried = find_remedies(settings_of(config), target, figures)
    assert tried[-1] == {"change": {"topology": larger}, "peak_bytes": None, "fits": None}
    assert any("optimizer.accum_steps" in remedy["change"] for remedy in tried)
    assert any("global_batch_size" in remedy["change"] for remedy in tried)


def test_a_change_that_the_run_would_refuse_is_no_remedy(linear, monkeypatch):
    config, planned = tiny_config(global_batch_size=4 * 400), planning.search.plan

    def plan(settings, target):
        config = settings.to_config()
        if (config.optimizer.accum_steps or 1) > 1:
            raise InputError("the loss of an image depends on the others of its batch")
        return planned(settings, target)

    monkeypatch.setattr("vit_jax.planning.search.plan", plan)
    *others, last = find_remedies(settings_of(config), FOUR, plan(settings_of(config), FOUR))
    assert others and last["fits"] and "global_batch_size" in last["change"]
    assert not any("optimizer.accum_steps" in remedy["change"] for remedy in others)


def test_plan_that_does_not_fit_says_so(capsys, monkeypatch):
    # Of GPUs, because that takes no compilation.
    words = (TINY, "--topology=H100:8", "--config.model.depth=3", AS_IT_IS)
    words += ("--config.model.mlp_dim=256", "--config.global_batch_size=13600000")
    code, figures = plan_by_command(capsys, *words)
    memory = figures["memory_bytes"]
    assert code == 3 and not memory["fits"] and memory["margin"] < 0
    *others, remedy = figures["remedies"]
    assert [row["change"] for row in others] == [{"model.scan": True, "model.remat": "dots"}]
    assert remedy["fits"] and remedy["change"] == {"model.scan": True, "model.remat": "full"}
    monkeypatch.setattr(
        planning, "plan", lambda *_, **__: figures
    )  # for the text, not calculated again
    monkeypatch.setattr(planning.search, "find_remedies", lambda *_, **__: figures["remedies"])
    assert main(["plan", *words]) == 3
    shown = capsys.readouterr().out
    assert re.match(
        r"Does not fit, by calculation: needs [\d.]+ GiB of 59.33 GiB a device; would take [\d.,]+ "
        r"ms a step, MFU \d+%; .* chip-\w+; fits with --config.model.scan=True "
        r"--config.model.remat=full \(.*\)\.\n",
        shown,
    )
    assert "too much" in shown and "8 on 1 host " in shown


def test_a_calculated_peak_near_the_capacity_may_not_fit():
    capacity = FOUR.chip.usable_bytes
    verdicts = [
        (found["fits"], found["may_not_fit"])
        for share in (0.86, 0.88, 1.14, 1.16)
        for found in [plan_figures.judge(int(share * capacity), FOUR, uncertainty=0.15)]
    ]
    assert verdicts == [(True, False), (True, True), (True, True), (False, False)]
    assert plan_figures.judge(capacity, FOUR) | {"margin": 0} == {
        "capacity": capacity, "margin": 0, "fits": True, "may_not_fit": False,
    }  # fmt: skip


def test_plan_counts_own_images(tmp_path, capsys):
    splits = {"val": ("cat", "dog", "eel"), "train": ("cat", "dog", "cat", "dog", "eel")}
    names = [f"{split}/{name}/{i}.png" for split in splits for i, name in enumerate(splits[split])]
    write_images(tmp_path / "images", dict.fromkeys(names, np.zeros((9, 9, 3), np.uint8)))
    words = ["--config=folder:debug", AS_IT_IS, "--topology=H100:1"]
    words += ["--config.global_batch_size=4"]
    code, figures = plan_by_command(capsys, *words, f"--config.data.data_dir={tmp_path}/images")
    data = json.loads(figures["config"])["data"]
    assert (code, data["num_classes"], data["num_examples"]) == (0, 3, 5)
    assert main(["plan", *words, f"--config.data.data_dir={tmp_path}/nothing"]) == 2
    assert "/nothing': there are no images to count; give " in capsys.readouterr().err


def test_budget_comes_first(capsys, monkeypatch):
    """Not the least possible time, which is below the time by the compiler."""
    words = (TINY, AS_IT_IS, "--topology=v5e:2x2", "--no_compile", "--price_per_chip_hour=2")
    _, figures = plan_by_command(capsys, *words)
    kinds = ("at_utilisation", "roofline", "run")
    usual, roofline, run = (figures["estimate"][key] for key in kinds)
    assert 0.4 * usual["step_s"] >= roofline["flops_s"] * 0.999
    monkeypatch.setattr(planning, "plan", lambda *_, **__: figures)  # not calculated again
    assert main(["plan", *words]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert f" {usual['step_s'] * 1e3:,.4g} ms a step, " in first and "at best" not in first
    assert run["cost"] < 0.01 and first.endswith(" under 0.001 chip-hours, cost under 0.01.")
    table = plan_tables.estimate_table(figures["estimate"])
    labels = list(table.columns[0].cells)
    assert labels[0] == "step" and labels[-1] == "MFU, by the roofline"
    assert table.title.startswith("Estimates at ")
    memory = plan_tables.memory_table(figures, "chip")
    assert "0.0 MiB" not in [*memory.columns[1].cells]


def test_first_line_is_by_calculation(monkeypatch, capsys):
    """It comes before the compiler starts, and says so if a calculation is refused."""
    pytest.importorskip("libtpu")

    def plan(settings, target):
        raise InputError("too early")

    monkeypatch.setattr(planning, "plan", plan)
    words = ["plan", TINY, AS_IT_IS, "--topology=v5e:2x2", "--price_per_chip_hour=2"]
    assert main(words) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert re.fullmatch(r"Fits, by calculation: .* ms a step, MFU .* chip-\w+, cost under 0.01. "
                        "The compiler's figures follow.", first)  # fmt: skip
    monkeypatch.setattr(run_plan, "calculate_plan", plan)
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("No quick answer by calculation")


def test_a_teacher_is_read_once_whatever_the_order_of_the_data():
    config = tiny_config()
    config.objective.name, config.objective.teacher = "distillation", "untrained:ViT-mu/4"
    chunks = {"data.order": "chunk", "data.streams": 2, "data.repeats": 2}
    orders = settings_of(config), settings_of(config).with_values(chunks)
    (first,), (other,) = map(abstract_teachers, orders)
    assert first is other


@pytest.mark.slow
def test_a_teacher_needs_memory_and_work():
    target = Target(find_slice("H100:1"), 1)
    config = tiny_config()
    plain = calculated.calculate_plan(settings_of(config), target)
    config.objective.name, config.objective.teacher = "distillation", "untrained:ViT-mu/4"
    taught = calculated.calculate_plan(settings_of(config), target)
    (teacher,) = abstract_teachers(settings_of(config))
    weights = sum(4 * leaf.size for leaf in jax.tree.leaves(teacher.variables))
    assert plain["memory_bytes"]["teachers"] == 0
    assert taught["memory_bytes"]["teachers"] == weights
    more = taught["memory_bytes"]["peak"] - plain["memory_bytes"]["peak"]
    assert weights <= more < 3 * weights  # what it computes too
    forward = 2 * forward_macs(teacher.model)
    found = [figures["flops"]["model_per_image_by_jaxpr"] for figures in (plain, taught)]
    assert found[1] - found[0] == forward


def test_show_sharding(capsys):
    words = ("--show_sharding", "--topology=H100:8", "--config.mesh.fsdp=8", "--config.mesh.data=1")
    code, rows = plan_by_command(capsys, TINY, *words)
    assert code == 0
    by_name = {row["name"]: row for row in rows}
    up = by_name["encoder/layer_0/mlp/up/kernel"]
    assert up["sharding"][0] == "fsdp"
    assert up["bytes_per_device"] * 8 == math.prod(up["shape"]) * 4
    assert main(["plan", TINY, *words]) == 0
    assert "encoder/layer_0/mlp/up/kernel" in capsys.readouterr().out


def test_plans_are_kept_by_all_that_they_depend_on(tmp_path, monkeypatch):
    target = Target(find_slice("v5e:2x2"))

    def of(config, target):
        return planning.cache_file(settings_of(config), target)

    first = of(tiny_config(), target)
    assert first == of(tiny_config(), target)
    assert first.is_relative_to(tmp_path / "cache" / "vit_jax" / "plans")
    others = {
        of(tiny_config(seed=1), target),
        of(tiny_config(), Target(find_slice("v5e:2x4"))),
        of(tiny_config(), Target(find_slice("v5e:2x2"), 2)),
        of(tiny_config(), Target(find_slice("v5e:2x2")._replace(num_hosts=2))),
        planning.cache_file(settings_of(tiny_config()), target, tried=True),
    }
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_some_flag=true")
    others.add(of(tiny_config(), target))
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    monkeypatch.setattr(planning, "software", lambda: {"code of vit_jax": "other"})
    others.add(of(tiny_config(), target))
    monkeypatch.setattr(Target, "is_compiled_for", False)  # without the compiler
    others.add(of(tiny_config(), target))
    assert len(others | {first}) == 9


def test_several_processes_compile_together(monkeypatch):
    """None of them reads its cache: XLA for GPUs lets each try a share of the kernels."""
    made = []
    monkeypatch.setattr(planning, "calculate_plan", lambda *_: made.append(1) or {"found": 1})
    given = settings_of(tiny_config()), Target(find_slice("v5e:2x2"), may_compile=False)
    for number, devices in ((1, None), (1, []), (2, None)):
        monkeypatch.setattr(jax, "process_count", lambda n=number: n)
        assert planning.plan(*given, devices)["found"] == len(made) == 1
    planning.plan(*given, [])
    assert len(made) == 2


def test_a_plan_with_a_teacher_is_found_again(monkeypatch):
    """Functions among the teacher's fields have other addresses in every process."""
    target, config = Target(find_slice("v5e:2x2")), tiny_config()
    found = set()
    for width in (8, 8, 16):
        model = create_model("ViT-mu/4", 10, 8, width=width).clone(constrain=lambda x, axes: x)
        teacher = Teacher("t", 1.0, model, {}, (0.5,), (0.5,))
        monkeypatch.setattr(planning, "abstract_teachers", lambda config, t=teacher: [t])
        found.add(planning.cache_file(settings_of(config), target))
    assert len(found) == 2


def test_readable_mesh():
    assert readable_mesh({"replica": 2, "data": 1, "fsdp": 8, "tensor": 1}) == "replica 2 x fsdp 8"
    assert readable_mesh(dict.fromkeys(("replica", "data", "fsdp", "tensor"), 1)) == "one device"


def test_plan_without_libtpu_is_calculated_and_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    words = (TINY, AS_IT_IS, "--topology=v5e:4x4", "--num_slices=2", "--config.mesh.fsdp=16")
    code = main(["plan", "--format=json", *words, "--config.mesh.data=1"])
    out, err = capsys.readouterr()
    assert "libtpu, which compiles for TPUs, is not installed" in err
    assert "pip install -e '.[plan]'" in err
    figures = json.loads(out)
    assert code == 0 and figures["by"] == "calculation"
    assert figures["memory_bytes"]["capacity"] == 15.75 * GIB
    assert {(row["kind"], *row["axes"], row["network"]) for row in figures["collectives"]} == {
        ("all-gather", "fsdp", "ICI"),
        ("reduce-scatter", "fsdp", "ICI"),
        ("all-reduce", "fsdp", "ICI"),
        ("all-reduce", "replica", "DCN"),
    }
    assert figures["estimate"]["run"]["by"] == "at_utilisation"


@pytest.mark.parametrize(
    ("name", "num_slices", "hosts", "devices"),
    [("v5e:2x4", 1, 1, 8), ("v5e:4x8", 2, 16, 4), ("v5p:2x2x4", 1, 4, 4), ("tpu7x:2x2x2", 1, 2, 8)],
)
def test_hosts_of_described_tpus(name, num_slices, hosts, devices):
    described = planning.targets.describe_devices(Target(find_slice(name), num_slices))
    by_host = collections.Counter(device.process_index for device in described)
    assert by_host == {host: devices for host in range(hosts)}


def test_devices_of_a_target_are_as_many_as_its_chips():
    target = Target(find_slice("B200:16"))
    devices = planning.targets.find_devices(target)
    assert len(devices) == target.num_chips == 16
    assert {device.process_index for device in devices} == {0, 1}
    assert {device.device_kind for device in devices} <= set(CHIPS["B200"].device_kinds)


@pytest.mark.slow
def test_a_plan_of_several_sizes_adds_up_their_plans():
    """A plan has the larger memory; for each size it equals the plan of a run at this size."""
    target = Target(find_slice("v5e:1x1"), may_compile=False)
    sizes = {"data.image_size": "8, 16 at 40 %", "data.image_size_keeps": "tokens"}
    figures = planning.plan(settings_of(tiny_config(**sizes)), target)
    small = {"data.image_size": 8, "global_batch_size": 256}
    alone = [planning.plan(settings_of(tiny_config(**keys)), target) for keys in (small, {})]
    run, *runs = (estimate(each, 2.0, 0.5)["run"] for each in (figures, *alone))
    for name in ("hours", "chip_hours", "cost", "tpu_core_days", "step_s"):
        by_hand = 0.4 * runs[0][name] + 0.6 * runs[1][name]
        assert run[name] == pytest.approx(by_hand, rel=1e-9), name
    images = 40 * 256 + 60 * 64
    assert run["images_per_s"] == pytest.approx(images / (100 * run["step_s"]))
    assert figures["memory_bytes"] == max(
        (each["memory_bytes"] for each in alone), key=lambda memory: memory["peak"]
    )
    shown = figures | {"estimate": estimate(figures)}
    [table] = [part for part in plan_tables.print_plan(shown)
               if str(getattr(part, "title", "")).startswith("Stages")]  # fmt: skip
    columns = {column.header: [*column.cells] for column in table.columns}
    assert columns["pixels"] == ["8 x 8", "16 x 16"] and columns["patches"] == ["100%", "100%"]


@pytest.mark.parametrize("auto", [True, False])
def test_a_batch_that_a_stage_cannot_split_names_the_stage(auto):
    target = Target(find_slice("v5e:2x2"), may_compile=False)
    keys = {"data.image_size": "12, 16 at 40 %", "data.image_size_keeps": "tokens", "auto": auto}
    config = tiny_config(**keys, global_batch_size=36)
    says = "data.image_size: the stage of 12 pixels has batches of 63, and needs a multiple of 4"
    with pytest.raises(InputError, match=says):
        plan_run(settings_of(config), target, {})


def test_kernels_of_two_towers_add_up():
    rows = [
        {"name": "mlp", "bound_by": "hbm", "count": count, "cycles": cycles}
        for count, cycles in ((2, 10), (3, 50), (1, 7))
    ]
    rows.append(rows[0] | {"bound_by": "bundles", "cycles": 60})
    assert plan_tables._sum_calls(rows, "cycles") == {
        "6 x mlp, bound by hbm": 67, "2 x mlp, bound by bundles": 60
    }  # fmt: skip
