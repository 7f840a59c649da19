"""`benchmark`: figures that agree with each other, and refusals."""

import json
import math

import jax
import PIL.Image
import pytest
from read_settings import decided, settings_of

from vit_jax.commands.benchmark import as_table
from vit_jax.config import Settings, base_config
from vit_jax.devices.chips import find_slice
from vit_jax.devices.mesh import make_mesh
from vit_jax.diagnosis.benchmarks import inference
from vit_jax.diagnosis.benchmarks import input as input_benchmark
from vit_jax.diagnosis.benchmarks.input import measure_input
from vit_jax.diagnosis.benchmarks.rounds import spread_of_ratio
from vit_jax.diagnosis.benchmarks.step import make_matmuls, measure_step
from vit_jax.diagnosis.settled import open_training_data
from vit_jax.experiment.experiment import make_experiment
from vit_jax.planning import targets

TINY = ("--config.global_batch_size=8", "--config.model.depth=1")
SPREAD = {"median", "min", "max"}


def tiny_config():
    c = base_config()
    c.model.name, c.data.name, c.data.image_size = "ViT-mu/8", "synthetic", 16
    c.data.num_classes, c.data.num_examples, c.data.ops = 10, 64, "flip"
    c.global_batch_size, c.duration, c.optimizer.peak_lr = 8, "10 steps", 1e-3
    return c


def make_data_mesh():
    """A mesh of two devices, on which a step compiles sooner than on eight."""
    devices = jax.devices()[:2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: devices)
        return make_mesh(replica=1, data=-1, fsdp=1, tensor=1)


@pytest.fixture(scope="module")
def step_figures():
    """Of one round: the median, the least and the greatest are that round's."""
    return measure_step(
        settings_of(decided(tiny_config())),
        make_data_mesh(),
        num_steps=1,
        num_rounds=3,
        matmul_size=64,
    )


def spreads(figures):
    return [v for v in figures.values() if isinstance(v, dict) and v.keys() == SPREAD]


@pytest.mark.slow
def test_step_figures_are_those_of_the_experiment(step_figures):
    experiment = make_experiment(settings_of(tiny_config()), make_data_mesh())
    assert step_figures["gflop_per_image"] * 1e9 == experiment.flops_per_image
    assert step_figures["num_params"] == experiment.num_params
    assert step_figures["num_devices"] == math.prod(step_figures["mesh"].values()) == 2
    assert step_figures["steps"] == 1
    assert step_figures["global_batch_size"] == 8
    assert step_figures["mfu"] is None  # a CPU's peak is in no table
    assert step_figures["memory_per_device_bytes"] > 3 * 4 * experiment.num_params


@pytest.mark.slow
def test_step_figures_are_positive_and_ordered(step_figures):
    assert step_figures["compile_s"] > 0
    assert len(spreads(step_figures)) == 4
    for figure in spreads(step_figures):
        assert 0 < figure["min"] <= figure["median"] <= figure["max"]


def test_step_ratio_is_the_quotient_of_steps_and_products(step_figures):
    steps, products = step_figures["cpu_s_per_image"], step_figures["matmul_cpu_s_per_image"]
    assert step_figures["ratio_to_matmul"]["median"] == steps["median"] / products["median"]
    several = spread_of_ratio([1.0, 2.0, 6.0], [1.0, 4.0, 2.0])
    assert several == {"median": 1.0, "min": 0.5, "max": 3.0}


def test_products_are_as_many_as_asked_for(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    make_matmuls(8, 3)()
    assert [product.shape for product in waited] == [(8, 8)] * 3


@pytest.fixture
def one_short_round(monkeypatch):
    monkeypatch.setattr("vit_jax.diagnosis.benchmarks.input._IMAGES_A_ROUND", 16)
    monkeypatch.setattr("vit_jax.diagnosis.benchmarks.input._NUM_ROUNDS", 1)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)])
def pipelines(request, monkeypatch):
    """With True the pipelines are timed; with False a sum is, as building them takes seconds."""
    if not request.param:
        monkeypatch.setattr(input_benchmark, "round_calls", lambda makers, *_: {
            name: lambda: sum(range(100_000)) for name in makers
        })  # fmt: skip


@pytest.mark.usefixtures("one_short_round", "pipelines")
def test_input_figures_are_consistent(tmp_path):
    for i in range(20):
        path = tmp_path / ("val/a" if i == 0 else f"train/{'ab'[i % 2]}") / f"{i}.jpg"
        path.parent.mkdir(exist_ok=True, parents=True)
        PIL.Image.new("RGB", (24, 20), (10 * i, 0, 0)).save(path)
    (tmp_path / "train/a/words.jpg").write_bytes(b"words")
    (tmp_path / "train/b/link.jpg").symlink_to("nowhere")
    c = tiny_config()
    c.data.name, c.data.data_dir, c.data.num_classes = "folder", str(tmp_path), None
    c.data.num_examples, c.data.ops = None, "scaled_inception_crop|flip"
    c.data.max_corrupt_fraction = 1.0
    figures = measure_input(*open_training_data(Settings.of(c)))
    assert (figures["data"], figures["rows"], figures["images"]) == ("folder", 8, 16)
    ms = figures["cpu_ms_per_image"]
    assert list(ms) == ["pipeline", "full_size", "decode", "fused_float32", "unfused_float32"]
    assert all(0 < figure["min"] <= figure["max"] for figure in ms.values())
    for name in list(ms)[1:]:
        assert (
            figures[f"ratio_to_{name}"]["median"] == ms["pipeline"]["median"] / ms[name]["median"]
        )


def test_input_of_pixels_stands_alone(one_short_round):
    figures = measure_input(*open_training_data(Settings.of(tiny_config())))
    assert list(figures["cpu_ms_per_image"]) == ["pipeline"]
    assert not [name for name in figures if name.startswith("ratio")]


@pytest.mark.slow
def test_step_needs_no_data_and_its_json_stands_alone_on_stdout_and_in_the_file(
    tmp_path, json_of, monkeypatch
):
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *args: devices)
    monkeypatch.setitem(measure_step.__kwdefaults__, "matmul_size", 64)
    output = tmp_path / "figures.json"
    words = ["--config=configs/pretrain.py:ViT-mu/16,imagenet2012", "--config.data.image_size=32"]
    words += ["--config.optimizer.peak_lr=0.1", f"--config.data.data_dir={tmp_path / 'nothing'}"]
    words += ["--format=json", f"--output={output}"]
    printed = json_of("benchmark", "--what=step", *words, *TINY, "--steps=1")
    assert printed == json.loads(output.read_text())
    assert printed["what"] == "step" and printed["gflop_per_image"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_inference_here_and_planned(monkeypatch):
    monkeypatch.setattr(inference, "BATCH_SIZES", (1, 2, 4))
    config = tiny_config()
    found = inference.measure_inference(settings_of(decided(config)), num_rounds=1)
    assert list(found["batch"]) == ["1", "2", "4"] and found["largest_batch"] > 1000
    assert all(row["images_per_s"].keys() == SPREAD for row in found["batch"].values())
    assert found["capacity_by"] == "all of the RAM"
    limit = found["batch"]["2"]["memory_bytes"]
    monkeypatch.setattr(inference, "_capacity", lambda device: (limit, "a limit"))
    limited = inference.measure_inference(settings_of(decided(config)), num_rounds=1)
    assert limited["largest_batch"] == 2 and limited["batch"]["4"]["images_per_s"] is None
    assert limited["batch"]["2"]["images_per_s"]["min"] > 0
    target = targets.Target(find_slice("H100:1"))
    planned = inference.plan_inference(settings_of(decided(config)), target)
    assert planned["gflop_per_image"] == found["gflop_per_image"]
    assert planned["images_per_s"] == pytest.approx(
        0.4 * 989e12 / (1e9 * planned["gflop_per_image"])
    )
    assert planned["memory_bytes"]["4"] == found["batch"]["4"]["memory_bytes"]


def test_the_largest_batch_lies_on_the_line_of_the_two_largest():
    assert inference.largest_batch({1: 900, 8: 1080, 64: 1640}, 2000) == 100
    assert inference.largest_batch({8: 1080, 64: 1640}, 900) == 0


def test_table_has_a_row_for_every_figure():
    table = as_table({"a": 1, "b": {"c": 2.0, "d": {"median": 3, "min": 1, "max": 5}}, "e": None})
    assert [list(column.cells) for column in table.columns] == [
        ["a", "b.c", "b.d", "e"],
        ["1", "2", "3", "unknown"],
        ["", "", "1", ""],
        ["", "", "5", ""],
    ]
