"""The fastest layout that fits: which are tried, which is chosen, and what a run keeps of it."""

import json
import logging
import types

import numpy as np
import pytest
from opened import with_known_facts

from vit_jax import planning
from vit_jax.config import base_config, with_values
from vit_jax.config.stored import StoredConfig
from vit_jax.devices.chips import SLICES, Slice
from vit_jax.devices.mesh import make_mesh
from vit_jax.errors import InputError
from vit_jax.main import main
from vit_jax.planning.search import changed, choose_layout, find_layouts
from vit_jax.planning.targets import Target, describe_devices, target_of
from vit_jax.run.opener import Files
from vit_jax.run.resolve import continue_run
from vit_jax.run.workdir import read_run

GIB = 2**30
DEPTH, SIXTEEN = 12, Target(SLICES["v5e:4x4"])


def config_of(**changes):
    c = base_config()
    c.model.name, c.data.name, c.data.image_size = "ViT-B/16", "imagenet2012", 32
    c.data.ops, c.global_batch_size, c.duration = "flip", 256, "100 steps"
    c.update_from_flattened_dict(changes)
    return with_known_facts(c)


@pytest.fixture
def planned(monkeypatch, pytestconfig):
    """Plans of a state of 8 GiB and of layers that keep `by_layer[0]` GiB each, or a tenth of it.

    A layer takes 3 cycles, 4 if it recomputes, a tenth more in a scan, and less over fsdp.
    """
    calls, by_layer = [], [0.5]

    def plan(config, target, devices):
        m, fsdp = config.model, config.mesh.fsdp
        again = 0 if m.remat != "full" else DEPTH if m.remat_layers is None else m.remat_layers
        calls.append((fsdp, bool(m.scan), again))
        kept = (DEPTH - again + again / 10) * by_layer[0] * GIB
        peak, capacity = int(8 * GIB / fsdp + kept), int(15.75 * GIB)
        cycles = (3 * DEPTH + again) * (1.1 if m.scan else 1) * 1e9 * (2 - fsdp / 64)
        return {
            "mesh": {"replica": 1, "data": 16 // fsdp, "fsdp": fsdp, "tensor": 1},
            "scan": bool(m.scan), "remat": m.remat or "none", "remat_layers": m.remat_layers,
            "memory_bytes": {"temporaries": int(kept), "peak": peak, "margin": capacity - peak,
                             "fits": peak <= capacity, "params": 0, "optimizer": 0, "ema": 0,
                             "other_state": 0, "batch": 0},
            "flops": {"counted_per_step": 1, "model_per_step": 1}, "hbm_bytes_accessed": 1,
            "collectives": [], "compiler_cycles": cycles, "num_chips": 16, "compile_s": 1.0,
            "topology": "v5e:4x4", "total_steps": 100, "global_batch_size": 256,
        }  # fmt: skip

    monkeypatch.setattr(planning, "plan", plan)
    monkeypatch.chdir(pytestconfig.rootpath)
    return calls, by_layer


def test_layers_recompute_nothing_where_that_fits(planned):
    rows = find_layouts(config_of(), SIXTEEN)
    assert rows[0]["changes"] == {
        "mesh.data": -1, "mesh.fsdp": 16, "model.remat": "none", "model.scan": False
    }  # fmt: skip
    assert {row["mesh"]["fsdp"] for row in rows} == {1, 4, 16}
    assert {row["scan"] for row in rows} == {False, True}


@pytest.mark.parametrize(("by_layer", "layers"), [(1.3, 1), (2.0, 5), (2.5, 7)])
def test_else_as_few_layers_recompute_as_fit(planned, by_layer, layers):
    planned[1][0] = by_layer
    row = find_layouts(config_of(**{"mesh.fsdp": 16}), SIXTEEN)[0]
    assert (row["scan"], row["remat"], row["remat_layers"]) == (False, "full", layers)


def test_of_layouts_that_do_not_fit_only_the_smallest_is_tried(planned):
    planned[1][0] = 99
    rows = find_layouts(config_of(), SIXTEEN)
    assert planned[0] == [(1, True, DEPTH), (4, True, DEPTH), (16, True, DEPTH)]
    assert not any(row["fits"] for row in rows)


@pytest.mark.parametrize(
    ("own", "tried"),
    [
        ({"mesh.fsdp": 4}, {(4, True, DEPTH), (4, False, 0)}),
        ({"mesh.fsdp": 4, "model.scan": True}, {(4, True, DEPTH), (4, True, 0)}),
        ({"mesh.fsdp": 4, "model.scan": False}, {(4, False, DEPTH), (4, False, 0)}),
        ({"mesh.fsdp": 4, "model.remat": "full"}, {(4, False, DEPTH)}),
        # Single layers that a distillation compares are neither scanned nor recomputed.
        ({"mesh.fsdp": 4, "objective.features": "0:0"}, {(4, False, 0)}),
    ],
    ids=str,
)
def test_what_the_config_sets_stays(planned, own, tried):
    find_layouts(config_of(**own), SIXTEEN)
    assert set(planned[0]) == tried


def test_a_bit_recomputes_without_a_scan(planned):
    """A scan of its units makes a step slower and saves no memory."""
    planned[1][0] = 1.3  # 15.6 GiB without remat
    rows = find_layouts(config_of(**{"model.name": "BiT-R50x1", "mesh.fsdp": 16}), SIXTEEN)
    assert [(row["scan"], row["remat"]) for row in rows] == [(False, "full")]
    assert planned[0] == [(16, False, DEPTH), (16, False, 0)]


def mesh_of(target):
    """What `choose_layout` reads of a mesh of the target's devices."""
    devices = np.array(describe_devices(target), dtype=object)
    return types.SimpleNamespace(devices=devices)


def test_a_run_takes_the_fastest(planned, caplog):
    with caplog.at_level(logging.INFO, "vit_jax"):
        chosen = choose_layout(config_of(), mesh_of(SIXTEEN))
    assert (chosen.mesh.data, chosen.mesh.fsdp) == (-1, 16)
    assert (chosen.model.scan, chosen.model.remat) == (False, "none")
    assert "--config.mesh.fsdp=16 --config.model.remat=none" in caplog.text


def test_a_run_that_fits_no_layout_is_refused(planned):
    planned[1][0] = 99
    with pytest.raises(InputError, match=r"auto=true: no layout fits v5e:4x4; the smallest needs"):
        choose_layout(config_of(), mesh_of(SIXTEEN))


def test_devices_of_unknown_memory_keep_the_layout(planned, caplog):
    with caplog.at_level(logging.INFO, "vit_jax"):
        config = config_of()
        assert choose_layout(config, make_mesh(replica=1, data=-1, fsdp=1, tensor=1)) is config
    assert "not known" in caplog.text and not planned[0]


def test_the_command_prints_layouts_and_the_flags_of_the_fastest(planned, capsys):
    words = ["plan", "--config=configs/pretrain.py:ViT-B/16,imagenet21k,debug",
             "--config.global_batch_size=256", "--topology=v5e:4x4"]  # fmt: skip
    assert main([*words, "--search"]) == 0
    shown = capsys.readouterr().out
    assert "unrolled" in shown
    assert "--config.mesh.fsdp=16 --config.model.remat=none" in " ".join(shown.split())
    planned[1][0] = 1.3
    assert main([*words, "--search=layout", "--format=json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["remat_layers"] == 1
    planned[1][0] = 99
    assert main([*words, "--search"]) == 3
    assert main([*words, "--search=layers"]) == 2
    assert "--search=layers: known: layout, batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    "target",
    [*map(Target, SLICES.values()), Target(SLICES["v5e:4x4"], 2),
     Target(Slice("H100:16", "H100", 16, 2))],
    ids=str,
)  # fmt: skip
def test_the_hardware_is_known_by_its_devices(target):
    assert target_of(describe_devices(target)) == target


@pytest.mark.parametrize(
    ("last", "was_auto", "auto", "kept"),
    [((8, "cpu"), True, True, {"mesh.fsdp": 4, "model.remat": "full", "model.scan": True}),
     ((4, "cpu"), True, True, {"mesh.fsdp": 1, "model.remat": "none", "model.scan": True}),
     ((8, "cpu"), False, True, {"mesh.fsdp": 1, "model.remat": "none", "model.scan": True}),
     ((8, "cpu"), True, False, {"mesh.fsdp": 1, "model.remat": None, "model.scan": True})],
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
    hardware = dict(zip(("devices", "device_kind"), last, strict=True))
    (tmp_path / "starts.jsonl").write_text(json.dumps({"hardware": hardware}) + "\n")
    mesh = make_mesh(replica=1, data=-1, fsdp=1, tensor=1)

    def choose(config, mesh):
        assert mesh.size == 8
        return changed(config, {"model.remat": "none"})

    opened = Files(tmp_path, run := read_run(tmp_path), choose)
    opened.mesh = mesh
    config, _ = continue_run(asked, opened, run.stored, ())
    config = with_values(config, opened.layout(config))
    values = {key: config[key.split(".")[0]][key.split(".")[1]] for key in kept}
    assert values == kept
