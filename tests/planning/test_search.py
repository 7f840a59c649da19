"""The fastest layout that fits: which are tried, which is chosen, and what a run keeps of it."""

import json
import logging
import types

import jax
import numpy as np
import pytest
from at_fault import at_fault
from opened import with_known_facts
from read_settings import settings_of

from vit_jax import planning
from vit_jax.config import Settings, base_config, flatten, with_values
from vit_jax.config.stored import StoredConfig
from vit_jax.devices.chips import CHIPS, SLICES, Slice, find_slice
from vit_jax.devices.mesh import make_mesh
from vit_jax.main import main
from vit_jax.models.contract import Model
from vit_jax.models.vit import ViT
from vit_jax.planning import calculated
from vit_jax.planning.calculated import UNCERTAINTY, calculate_layout
from vit_jax.planning.plan_figures import judge
from vit_jax.planning.search import (
    choose_layout,
    describe_layout,
    find_layouts,
    find_remedies,
    meshes,
    rank_layouts,
)
from vit_jax.planning.targets import (
    DescribedDevice,
    Target,
    describe_devices,
    settle,
    target_of,
)
from vit_jax.run.setup.opener import Files
from vit_jax.run.setup.resolve import continue_run
from vit_jax.run.setup.workdir import read_run

GIB = 2**30
DEPTH, SIXTEEN = 12, Target(SLICES["v5e:4x4"])
PLAN = ("plan", "--config=configs/pretrain.py:ViT-B/16,imagenet21k,debug",
        "--config.global_batch_size=256", "--topology=v5e:4x4")  # fmt: skip


COMPARED = {"objective.name": "distillation", "objective.mode": "features",
            "objective.features": "0:0", "objective.teacher": "untrained:ViT-B/16"}  # fmt: skip


def config_of(**changes):
    c = base_config()
    c.model.name, c.data.name, c.data.image_size = "ViT-B/16", "imagenet2012", 32
    c.data.ops, c.global_batch_size, c.duration = "flip", 256, "100 steps"
    c.optimizer.peak_lr = 1e-3
    c.update_from_flattened_dict(changes)
    return with_known_facts(c)


def rank(config, target):
    """The configs of `rank_layouts`."""
    return [layout.to_config() for layout in rank_layouts(settings_of(config), target)]


def choose(config, mesh, **how):
    """The config of `choose_layout`."""
    return choose_layout(settings_of(config), mesh, **how).to_config()


@pytest.fixture
def planned(monkeypatch, pytestconfig):
    """Plans of a state of 8 GiB and of layers that keep `by_layer` GiB each, or a tenth of it.

    A layer takes 3 cycles, 4 if it recomputes, a tenth more in a scan, and less over fsdp. The
    compiler's peaks are `error` times the calculated ones. By calculation a layer that recomputes
    takes 1 s; `waits`: {fsdp: seconds of exchanges}; `lost`: seconds without kernels, over fsdp.
    """
    facts = types.SimpleNamespace(by_layer=0.5, error=1.0, lost=0.0, compiled=[], calculated=[])
    facts.waits = {1: 3, 4: 2, 16: 1}

    def recomputed(m):
        if m.remat != "full":
            return 0.4 * DEPTH if m.remat == "dots" else 0
        return DEPTH if m.remat_layers is None else m.remat_layers

    def memory_of(config, target, error, **how):
        again = recomputed(config.model)
        kept = (DEPTH - again + again / 10) * facts.by_layer * GIB
        kept *= config.model.get("keep_tokens") or 1
        peak = int((8 * GIB / (config.mesh.fsdp or 1) + kept) * error)
        return {"temporaries": int(kept), "peak": peak, "params": 0, "optimizer": 0, "ema": 0,
                "other_state": 0, "batch": 0, **judge(peak, target, **how)}  # fmt: skip

    def layout_of(config):
        return config.mesh.fsdp or 1, bool(config.model.scan), recomputed(config.model)

    def calculate(settings, target):
        config = settings.to_config()
        fsdp, scan, again = layout_of(config)
        facts.calculated.append((fsdp, scan, again))
        return {
            "memory_bytes": memory_of(config, target, 1.0, uncertainty=UNCERTAINTY),
            "added_s": again + scan + facts.waits[fsdp] + facts.lost * (fsdp > 1),
            "hidden_s": 0.0,
        }

    def plan(settings, target, devices=None):
        config = settings.to_config()
        fsdp, scan, again = layout_of(config)
        facts.compiled.append((fsdp, scan, again))
        by = {"by": "calculation", "memory_bytes": calculate(settings, target)["memory_bytes"]}
        if target.is_compiled_for:
            by = {"by": "compiler", "memory_bytes": memory_of(config, target, facts.error)}
        m = config.model
        cycles = (3 * DEPTH + again) * (1.1 if scan else 1) * 1e9 * (2 - fsdp / 64)
        return {
            "mesh": {"replica": 1, "data": 16 // fsdp, "fsdp": fsdp, "tensor": 1}, **by,
            "scan": scan, "remat": m.remat or "none", "remat_layers": m.remat_layers,
            "flops": {"counted_per_step": 1, "model_per_step": 1}, "hbm_bytes_accessed": 1,
            "collectives": [], "compiler_cycles": cycles, "num_chips": 16, "compile_s": 1.0,
            "topology": "v5e:4x4", "total_steps": 100, "global_batch_size": 256,
            "images_per_way": 16,
        }  # fmt: skip

    monkeypatch.setattr(planning, "plan", plan)
    monkeypatch.setattr(planning.search, "calculate_layout", calculate)
    monkeypatch.chdir(pytestconfig.rootpath)
    return facts


def test_layers_recompute_nothing_where_that_fits(planned):
    rows = find_layouts(settings_of(config_of()), SIXTEEN)
    assert rows[0]["changes"] == {
        "mesh.data": -1, "mesh.fsdp": 16, "model.remat": "none", "model.scan": False
    }  # fmt: skip
    assert {row["mesh"]["fsdp"] for row in rows} == {1, 4, 16}
    assert {row["scan"] for row in rows} == {False, True}


@pytest.mark.parametrize(("by_layer", "layers"), [(1.3, 1), (2.0, 5), (2.5, 7)])
def test_else_as_few_layers_recompute_as_fit(planned, by_layer, layers):
    planned.by_layer = by_layer
    row = find_layouts(settings_of(config_of(**{"mesh.fsdp": 16})), SIXTEEN)[0]
    assert (row["scan"], row["remat"], row["remat_layers"]) == (False, "full", layers)


def test_of_layouts_that_do_not_fit_only_the_smallest_is_tried(planned):
    planned.by_layer = 99
    rows = find_layouts(settings_of(config_of()), SIXTEEN)
    assert planned.compiled == [(1, True, DEPTH), (4, True, DEPTH), (16, True, DEPTH)]
    assert not any(row["fits"] for row in rows)


@pytest.mark.parametrize(
    ("own", "tried"),
    [
        ({"mesh.fsdp": 4}, {(4, True, DEPTH), (4, False, 0)}),
        ({"mesh.fsdp": 1}, {(1, True, DEPTH), (1, False, 0)}),
        ({"mesh.data": 16}, {(1, True, DEPTH), (1, False, 0)}),
        ({"mesh.fsdp": 4, "model.scan": True}, {(4, True, DEPTH), (4, True, 0)}),
        ({"mesh.fsdp": 4, "model.scan": False}, {(4, False, DEPTH), (4, False, 0)}),
        ({"mesh.fsdp": 4, "model.remat": "full"}, {(4, False, DEPTH)}),
        # Single layers that a distillation compares are neither scanned nor recomputed.
        ({"mesh.fsdp": 4} | COMPARED, {(4, False, 0)}),
    ],
    ids=str,
)
def test_what_the_config_sets_stays(planned, own, tried):
    planned.by_layer = 0.3  # fits in every layout
    find_layouts(settings_of(config_of(**own)), SIXTEEN)
    assert set(planned.compiled) == tried
    for layout in rank(config_of(**own), SIXTEEN):
        assert own.items() <= flatten(layout).items()
    assert set(planned.calculated) == tried


def test_a_bit_recomputes_without_a_scan(planned):
    """A scan of its units makes a step slower and saves no memory."""
    planned.by_layer = 1.3  # 15.6 GiB without remat
    rows = find_layouts(
        settings_of(config_of(**{"model.name": "BiT-R50x1", "mesh.fsdp": 16})), SIXTEEN
    )
    assert [(row["scan"], row["remat"]) for row in rows] == [(False, "full")]
    assert planned.compiled == [(16, False, DEPTH), (16, False, 0)]


def mesh_of(target):
    """What `choose_layout` reads of a mesh of the target's devices."""
    devices = np.array(describe_devices(target), dtype=object)
    return types.SimpleNamespace(devices=devices)


def test_a_run_takes_the_fastest(planned, caplog):
    """By calculation; only its program is compiled."""
    with caplog.at_level(logging.INFO, "vit_jax"):
        chosen = choose(config_of(), mesh_of(SIXTEEN))
    assert planned.compiled == [(16, False, 0)]
    assert (chosen.mesh.data, chosen.mesh.fsdp) == (-1, 16)
    assert (chosen.model.scan, chosen.model.remat) == (False, "none")
    assert (
        "--config.mesh.fsdp=16 --config.model.scan=False --config.model.remat=none" in caplog.text
    )


@pytest.mark.parametrize(
    ("by_layer", "waits", "ranked"),
    [
        (0.1, {1: 3, 4: 1, 16: 2}, [(4, 0), (16, 0), (1, 0), (4, 12), (16, 12), (1, 12)]),
        (0.1, {1: 1, 4: 1, 16: 1}, [(16, 0), (4, 0), (1, 0), (16, 12), (4, 12), (1, 12)]),
        # Without remat it only fits over fsdp 16.
        (1.4, {1: 1, 4: 2, 16: 3}, [(16, 0), (4, 3), (16, 3), (4, 4), (4, 5), (1, 7), (1, 9)]),
        (1.4, {1: 1, 4: 2, 16: 9}, [(4, 3), (4, 4), (4, 5), (1, 7), (16, 0), (1, 9)]),
    ],
    ids=["waits least", "least memory", "recomputes least", "recomputes rather than waits"],
)
def test_the_fastest_recomputes_and_waits_least(planned, by_layer, waits, ranked):
    planned.by_layer, planned.waits = by_layer, waits
    layouts = [flatten(layout) for layout in rank(config_of(), SIXTEEN)]
    found = [
        (c["mesh.fsdp"], 0 if c["model.remat"] == "none" else c["model.remat_layers"] or DEPTH)
        for c in layouts
    ]
    assert found[: len(ranked)] == ranked and not planned.compiled


def test_the_stage_that_needs_most_memory_decides(planned):
    """Half of the patches would fit without remat, and the last tenth of the steps would not."""
    planned.by_layer = 2.0
    half = {"model.keep_tokens": 0.5, "model.keep_tokens_until": "90 %"}
    figures = {"mesh": {"replica": 1, "data": 16, "fsdp": 1}, "remat": "none", "images_per_way": 16}
    layouts, remedies = [], []
    for settings in (settings_of(config_of()), settings_of(config_of(**half))):
        layouts.append([describe_layout(layout) for layout in rank_layouts(settings, SIXTEEN)])
        remedies.append(find_remedies(settings, SIXTEEN, figures, calculate=True))
    assert layouts[0] == layouts[1] and remedies[0] == remedies[1]


@pytest.mark.parametrize(
    ("asked", "chip", "number"), [(None, "v5e", 4), (2, "v5e", 2), (None, "H100", 1)]
)
def test_a_large_batch_has_microbatches_on_tpus_unless_the_config_says_how_many(
    asked, chip, number
):
    large = {"data.image_size": 224, "model.dtype": "bfloat16", "global_batch_size": 4096}
    config = with_values(config_of(**large), {"optimizer.accum_steps": asked})
    target = SIXTEEN if chip == "v5e" else Target(Slice("H100:16", "H100", 16, 2))
    settled = settle(Settings.of(config), target)
    assert settled.optimizer.accum_steps == number
    said = f"--config.optimizer.accum_steps={number}"
    assert describe_layout(settled).endswith(said) == (number > 1)


@pytest.mark.parametrize(("lost", "first"), [(1.9, 16), (2.1, 1)])
def test_a_mesh_with_kernels_comes_first_if_they_gain_more_than_it_waits(planned, lost, first):
    planned.by_layer, planned.lost = 0.1, lost
    assert rank(config_of(), SIXTEEN)[0].mesh.fsdp == first


@pytest.mark.parametrize(("fsdp", "rows"), [(16, 24), (64, 6)])
def test_rows_of_weights_that_fill_no_tile_add_to_a_step(fsdp, rows, monkeypatch):
    own = {"model.name": "ViT-S/16", "model.depth": 1, "mesh.fsdp": fsdp, "mesh.data": -1}
    layout = settings_of(config_of(**own)), Target(SLICES["v5e:8x8"])
    added_s = calculate_layout(*layout)["added_s"]
    monkeypatch.setattr(calculated, "_ROWS", 1)
    assert 384 // fsdp == rows
    assert (added_s > calculate_layout(*layout)["added_s"]) == (rows % 8 > 0)


def test_layers_that_are_computed_again_add_to_a_step():
    """In proportion, and a scan more than all of them unrolled."""
    own = {"model.depth": 4, "model.remat": "full", "model.scan": False, "mesh.fsdp": 16}
    added = [
        calculate_layout(settings_of(config_of(**own | changes)), SIXTEEN)["added_s"]
        for changes in ({"model.remat": "none"}, {"model.remat_layers": 1},
                        {"model.remat_layers": 3}, {}, {"model.scan": True})
    ]  # fmt: skip
    assert added == sorted(set(added))
    assert added[2] - added[1] == pytest.approx(2 * (added[3] - added[2]), rel=1e-6)


def test_behind_a_layout_that_may_not_fit_is_one_that_fits(planned, caplog):
    """The run takes the first for which the compiler finds room, and says so."""
    planned.by_layer, planned.error = 1.2, 1.1  # 14.9 GiB by calculation, 16.4 by the compiler
    layouts = rank(config := config_of(**{"mesh.fsdp": 16}), SIXTEEN)
    assert [(c.model.remat, c.model.remat_layers) for c in layouts] == [
        ("none", None), ("full", 2), ("full", None)
    ]  # fmt: skip
    with caplog.at_level(logging.INFO, "vit_jax"):
        chosen = choose(config, mesh_of(SIXTEEN))
    assert planned.compiled == [(16, False, 0), (16, False, 2)]
    assert (chosen.model.remat, chosen.model.remat_layers) == ("full", 2)
    refused = "the compiler finds no room for --config.mesh.fsdp=16"
    assert f"{refused} --config.model.scan=False --config.model.remat=none; the next" in caplog.text
    by_calculation = choose(config, mesh_of(SIXTEEN), may_compile=False)
    assert by_calculation.model.remat_layers == 2 and len(planned.compiled) == 2


def test_gpus_take_no_risk_where_another_layout_fits(planned):
    """No compiler refuses what does not fit."""
    gpus = Target(Slice("H100:16", "H100", 16, 2), may_compile=False)
    # 54.5 of 59.33 GiB without remat, 72.5, and with which also the smallest layout may not fit.
    for by_layer, remat in [(4.5, "dots"), (6, "dots"), (45, "full")]:
        planned.by_layer = by_layer
        chosen = choose(config_of(**{"mesh.fsdp": 16}), mesh_of(gpus))
        assert (chosen.model.scan, chosen.model.remat) == (True, remat)
    assert not planned.compiled


def test_layers_that_recompute_are_scanned_on_gpus(planned):
    """Unrolled ones save little memory, so that a remedy scans them too."""
    planned.by_layer = 6  # 72.5 GiB without remat, 46.6 with "dots"
    gpus = Target(Slice("H100:16", "H100", 16, 2), may_compile=False)
    rank(config := config_of(**{"mesh.fsdp": 16}), gpus)
    assert set(planned.calculated) == {(16, True, 12), (16, False, 0), (16, True, 0.4 * DEPTH)}
    figures = {"mesh": {"replica": 1, "data": 1, "fsdp": 16}, "remat": "none", "images_per_way": 16}
    (remedy,) = find_remedies(settings_of(config), gpus, figures, calculate=True)
    assert remedy["fits"] and remedy["change"] == {"model.scan": True, "model.remat": "dots"}


@pytest.mark.parametrize(
    ("chip", "own", "more"),
    [("H100:8", {"model.remat": "dots"}, 0.7), ("H100:8", {"model.remat": "full"}, 2.5),
     ("H100:8", {}, 0.35), ("T4:8", {}, 0.5),
     ("H100:8", {"model.remat": "full", "model.scan": True}, UNCERTAINTY)],
    ids=str,
)  # fmt: skip
def test_unrolled_layers_with_remat_surely_fit_only_far_below_a_gpu_s_capacity(
    chip, own, more, monkeypatch
):
    settings, target = settings_of(config_of(**{"model.depth": 1} | own)), Target(find_slice(chip))
    memory = calculated.calculate_memory(settings, target)
    assert not memory["may_not_fit"]
    for share in (0.99, 1.01):
        capacity = int(memory["peak"] * (1 + more) / share)
        tight = target._replace(measured=target.chip._replace(usable_bytes=capacity))
        assert calculated.calculate_memory(settings, tight)["may_not_fit"] == (share > 1)


@pytest.mark.slow
def test_without_auto_the_layout_is_the_config_s(planned, capsys):
    config = config_of(auto=False)
    assert rank(config, SIXTEEN) == [config] and not planned.calculated
    assert main([*PLAN, "--config.auto=false", "--format=json"]) == 0
    assert planned.compiled == [(1, False, 0)]


@pytest.mark.parametrize(("by_layer", "code"), [(10, 0), (14, 0), (15, 3)])
def test_only_what_cannot_fit_in_any_layout_exits_with_3(planned, json_of, by_layer, code):
    """Scanned layers, recomputed over fsdp 16, of 12.5, 17.3 and 18.5 GiB; 15.75 GiB +- 15 %."""
    planned.by_layer = by_layer
    if code == 3:  # not the order of what waits, but the least memory
        planned.waits = {1: 1, 4: 2, 16: 3}
    figures = json_of(*PLAN, "--no_compile", "--format=json", code=code)
    assert figures["scan"] and figures["mesh"]["fsdp"] == 16
    assert (figures["memory_bytes"]["may_not_fit"], "remedies" in figures) == {
        10: (False, False), 14: (True, False), 15: (False, True)
    }[by_layer]  # fmt: skip


def test_exchanges_of_activations_need_not_be_known(monkeypatch):
    """A family of the user's own over `tensor`."""
    monkeypatch.setattr(ViT, "split_layers", Model.split_layers)
    config = config_of(**{"model.name": "ViT-mu/8", "mesh.tensor": 2, "optimizer.peak_lr": 1.0})
    chosen = choose(config, mesh_of(Target(Slice("H100:4", "H100", 4, 1))))
    assert chosen.model.remat == "none" and chosen.mesh.fsdp is not None


def test_a_run_that_fits_no_layout_is_refused(planned):
    planned.by_layer = 99
    with at_fault("auto"):
        choose(config_of(), mesh_of(SIXTEEN))


@pytest.mark.parametrize("devices", [jax.devices(), [DescribedDevice(0, 0, "TPU v99", "tpu")]])
def test_devices_of_unknown_memory_keep_the_layout(planned, caplog, devices):
    mesh = types.SimpleNamespace(devices=np.array(devices, dtype=object))
    with caplog.at_level(logging.INFO, "vit_jax"):
        assert choose_layout(settings := settings_of(config_of()), mesh) is settings
    assert ("TPU v99 is not known" in caplog.text) == (devices[0].platform == "tpu")
    assert not planned.compiled and not planned.calculated


def test_the_command_prints_layouts_and_the_flags_of_the_fastest(planned, capsys, json_of):
    assert main([*PLAN, "--search"]) == 0
    shown = capsys.readouterr().out
    assert "unrolled" in shown
    assert "--config.mesh.fsdp=16 --config.model.remat=none" in " ".join(shown.split())
    planned.by_layer = 1.3
    assert json_of(*PLAN, "--search=layout", "--format=json")[0]["remat_layers"] == 1
    planned.by_layer = 99
    assert main([*PLAN, "--search"]) == 3
    with pytest.raises(SystemExit) as stopped:
        main([*PLAN, "--search=layers"])
    assert stopped.value.code == 2 and "--search" in capsys.readouterr().err


@pytest.mark.parametrize(
    "target",
    [*map(Target, SLICES.values()), Target(SLICES["v5e:4x4"], 2),
     Target(Slice("H100:16", "H100", 16, 2)), Target(Slice("A10G:8", "A10G", 8, 2))],
    ids=str,
)  # fmt: skip
def test_the_hardware_is_known_by_its_devices(target):
    assert target_of(describe_devices(target)) == target


def test_a_gpu_has_the_memory_that_jax_may_take():
    (device,) = describe_devices(Target(find_slice("H100:1")))
    object.__setattr__(device, "memory_stats", lambda: {"bytes_limit": 5})
    assert target_of([device]).chip == CHIPS["H100"]._replace(usable_bytes=5)

    def refuse():
        raise RuntimeError("MemoryStats is only supported for addressable devices")

    object.__setattr__(device, "memory_stats", refuse)
    assert target_of([device]).chip == CHIPS["H100"]


def test_fsdp_may_be_one_of_several_hosts_with_gpus():
    target = Target(find_slice("H100:32"), may_compile=False)
    settings = settings_of(config_of(global_batch_size=target.num_chips))
    assert {shape["fsdp"] for shape in meshes(settings, target)} == {1, 4, 8, 16}
    assert rank_layouts(settings, target)[0].mesh.fsdp == 8


@pytest.mark.parametrize(
    ("kind", "chip"),
    [("NVIDIA A10G", "A10G"), ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
     ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe"), ("NVIDIA H100 PCIe", "H100-PCIe"),
     ("NVIDIA H100 NVL", "H100-NVL"), ("NVIDIA H200 NVL", "H200-NVL")],
)  # fmt: skip
def test_gpus_with_a_process_each_are_on_one_host(kind, chip, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 8)
    devices = [DescribedDevice(i, i, kind, "gpu", slice_index=i // 4) for i in range(8)]
    assert target_of(devices).slice == Slice(f"{chip}:8", chip, 8, 2)


@pytest.mark.parametrize(
    ("last", "was_auto", "auto", "kept"),
    [((8, "cpu"), True, True, {"mesh.fsdp": 4, "model.remat": "full", "model.scan": True}),
     ((4, "cpu"), True, True, {"mesh.fsdp": None, "model.remat": "none", "model.scan": True}),
     ((8, "cpu"), False, True, {"mesh.fsdp": None, "model.remat": "none", "model.scan": True}),
     ((8, "cpu"), True, False, {"mesh.fsdp": None, "model.remat": None, "model.scan": True})],
    ids=["same", "other", "turned on", "turned off"],
)  # fmt: skip
def test_a_run_keeps_its_layout_on_the_devices_of_its_last_start(
    tmp_path, last, was_auto, auto, kept
):
    stored = config_of(**{"auto": was_auto, "mesh.fsdp": 4, "model.remat": "full",
                          "model.scan": True})  # fmt: skip
    asked = config_of(auto=auto)
    began = StoredConfig(config_of(auto=was_auto), stored, {})
    (tmp_path / "config.json").write_text(began.to_json())
    hardware = dict(zip(("devices", "device_kind"), last, strict=True)) | {"host": "here"}
    start = {"time": "2026-11-22", "command": "", "resumed_at": None, "hardware": hardware}
    (tmp_path / "starts.jsonl").write_text(json.dumps(start) + "\n")
    mesh = make_mesh(replica=1, data=-1, fsdp=1, tensor=1)

    def choose(settings, mesh):
        assert mesh.size == 8
        return settings.with_values({"model.remat": "none"})

    opened = Files(tmp_path, run := read_run(tmp_path), choose)
    opened.mesh = mesh
    config, _ = continue_run(asked, opened, run.stored, ())
    config = with_values(config, opened.layout(config))
    values = {key: config[key.split(".")[0]][key.split(".")[1]] for key in kept}
    assert values == kept


@pytest.mark.slow
def test_parameters_are_split_where_their_update_takes_longer_than_kernels_save():
    """Whole ones of g/14 on 256 chips of v5e: 235.7 ms a step, by the compiler."""
    sizes = {"model.name": "ViT-g/14", "data.image_size": 224, "global_batch_size": 4096}
    settings = settings_of(config_of(**sizes, **{"model.dtype": "bfloat16"}))
    assert rank_layouts(settings, Target(find_slice("v5e:16x16")))[0].mesh.fsdp == 16
