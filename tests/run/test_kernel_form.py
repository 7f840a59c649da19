"""The form of a model's blocks is chosen by measurement; CPUs get stand-ins for kernels."""

import functools
import itertools
import json
import logging

import jax
import pytest
from asked import prepare, train_and_evaluate
from at_fault import at_fault

import vit_jax
from vit_jax.config.stored import read_stored
from vit_jax.devices import kernels
from vit_jax.devices.mesh import make_mesh
from vit_jax.models.block_ops import BlockOps
from vit_jax.models.dot_product import plain_attention
from vit_jax.run.watch import kernel_choice
from vit_jax.run.watch.kernel_check import compare_with_plain

pytestmark = pytest.mark.usefixtures("never_with_checks")


class Clock:
    """Seconds that pass only where a form is slow."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now

    monotonic = perf_counter

    def attend(self, seconds):
        """A kernel of attention that takes so long, beside 1 s of each run."""

        def wait(x):
            self.now += seconds
            return x

        def kernel(qkv, biases, turns, num_keys):
            del turns, num_keys
            q, k, v = (
                x if b is None else x + b[None, None] for x, b in zip(qkv, biases, strict=True)
            )
            shape = jax.ShapeDtypeStruct((), q.dtype)
            waited = jax.pure_callback(wait, shape, jax.lax.stop_gradient(q.ravel()[0]))
            return plain_attention(q, k, v) + 0.0 * waited

        return kernel


def broken(qkv, *_):
    raise RuntimeError("Mosaic failed to compile the kernel")


def ends(qkv, biases, turns, num_keys):
    def fail(x):
        raise RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")

    number = jax.pure_callback(fail, jax.ShapeDtypeStruct((), qkv[0].dtype), 0.0)
    return qkv[2] + number


def wrong(qkv, *_):
    return 1.2 * qkv[2]


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(kernel_choice, "time", clock)
    return clock


@pytest.fixture
def use_forms(monkeypatch, tmp_path, clock):
    """Gives the devices forms by name, {name: kernel of attention}, beside a slow plain one."""
    monkeypatch.setattr(kernel_choice, "_place", lambda facts: tmp_path / "kept.json")
    plain = BlockOps(attention_kernel=clock.attend(8.0))

    def use(**attention):
        forms = {name: BlockOps(attention_kernel=kernel) for name, kernel in attention.items()}
        for module in (kernels, kernel_choice):
            monkeypatch.setattr(module, "find_forms", lambda model, mesh: {"plain": plain} | forms)

    return use


def choose(tmp_path, **overrides):
    """The form that a new run resolves to, and who decided it."""
    config = vit_jax.load_config("quickstart:debug", overrides)
    resolved = prepare(config, tmp_path / "run", by_user=overrides).resolved
    return resolved.config.model.kernels, resolved.decided_by["model.kernels"]


@pytest.mark.parametrize(
    ("seconds", "memory", "chosen"),
    [
        ({"plain": [9.0], "attention": [4.0], "rows": [2.0]}, {}, "rows"),
        ({"plain": [9.0], "attention": [2.0], "rows": [4.0]}, {}, "attention"),
        ({"plain": [9.0], "attention": [3.9], "rows": [4.0]}, {}, "rows"),  # by less than 5 %
        ({"plain": [1.0, 1.0, 4.1], "attention": [3.0], "rows": [4.0]}, {}, "attention"),
        ({"plain": [1.0], "attention": [3.0], "rows": [4.0]}, {"plain": 11}, "attention"),
        ({"plain": [2.0], "attention": [1.0]}, {}, "attention"),  # the calculated one has failed
    ],
    ids=str,
)
def test_another_form_must_be_faster_in_every_round(seconds, memory, chosen, clock, monkeypatch):
    rounds = {
        name: itertools.cycle([s for s in each for _ in range(10)])
        for name, each in seconds.items()
    }

    def run(name):
        clock.now += next(rounds[name]) - 1.0

    runs = {name: (functools.partial(run, name), memory.get(name, 10)) for name in seconds}
    monkeypatch.setattr(kernel_choice, "_compile_forms", lambda *args: (runs, {}))
    mesh = make_mesh(replica=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])
    assert kernel_choice._measure(None, mesh, 1, ["plain", "attention", "rows"], None, {}) == chosen


@pytest.mark.slow
def test_a_form_that_fails_is_left_out_and_a_run_that_asks_for_it_ends(
    clock, use_forms, tmp_path, monkeypatch, caplog
):
    def compare(model, mesh):  # which takes long; test_kernel_check compares forms that agree
        is_wrong = model.ops.attention_kernel is wrong
        return compare_with_plain(model, mesh) if is_wrong else (0.0, None)

    monkeypatch.setattr(kernel_choice, "compare_with_plain", compare)
    use_forms(attention=clock.attend(0.0), cudnn=ends, biases=wrong, rows=broken)
    assert choose(tmp_path) == ("attention", "measured")
    left_out = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    faults = {"cudnn": "CpuCallback", "biases": "relative error", "rows": "Mosaic failed"}
    for said, (name, cause) in zip(left_out, faults.items(), strict=True):
        assert f"{name} is left out" in said and cause in said

    asked = vit_jax.load_config("quickstart:debug", {"model.kernels": "rows"})
    with pytest.raises(RuntimeError, match="Mosaic failed"):
        train_and_evaluate(asked, tmp_path / "run")


def test_the_answer_is_kept_for_later_runs_and_in_the_run(clock, use_forms, tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_choice, "compare_with_plain", lambda *args: (0.0, None))
    use_forms(rows=clock.attend(0.0))
    config = vit_jax.load_config("quickstart:debug", {"duration": "6 steps"})
    train_and_evaluate(config, tmp_path / "first")
    assert read_stored(tmp_path / "first").resolved.model.kernels == "rows"
    found = map(json.loads, (tmp_path / "first" / "metrics.jsonl").read_text().splitlines())
    chosen_s = [row["time/choose_s"] for row in found if "time/choose_s" in row]
    assert len(chosen_s) == 1 and chosen_s[0] > 0
    assert {*json.loads((tmp_path / "kept.json").read_text())["seconds"]} == {"plain", "rows"}

    def measure(*args):
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(kernel_choice, "_measure", measure)
        assert choose(tmp_path) == ("rows", "measured")
        (tmp_path / "kept.json").write_text("{")
        assert prepare(config, tmp_path / "first").resolved.config.model.kernels == "rows"
        with pytest.raises(AssertionError, match="measured again"):
            choose(tmp_path)

    use_forms(attention=clock.attend(0.0))  # as with recomputation: another layout, other forms
    again = vit_jax.load_config(config, {"model.remat": "full"})
    resolved = prepare(again, tmp_path / "first", by_user=["model.remat"]).resolved
    assert resolved.config.model.kernels == "attention"
    assert resolved.decided_by["model.kernels"] == "measured"


def test_only_an_open_form_is_measured(use_forms, tmp_path):
    use_forms(attention=broken)
    assert choose(tmp_path, **{"model.kernels": "calculated"}) == ("calculated", "user")
    assert choose(tmp_path, **{"model.kernels": "plain"}) == ("plain", "user")
    with at_fault("model.kernels"):
        choose(tmp_path, **{"model.kernels": "cudnn"})


def test_cpus_keep_what_is_calculated(tmp_path):
    assert choose(tmp_path) == ("auto", "default")


def test_answers_differ_by_device_model_and_software():
    facts = {"device": "TPU v5e", "images": 64, "forms": ["plain", "attention", "rows"]}
    others = {"images": 32}, {"jax": "0.11"}, {"forms": ["plain", "attention"]}  # as with fsdp
    places = [kernel_choice._place(facts | more) for more in ({}, *others)]
    assert len({*places}) == 4
    assert {str(place.parent) for place in places} == {jax.config.jax_compilation_cache_dir}
