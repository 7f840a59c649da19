"""Every program of the shipped configs compiles for eight H100s, without a GPU."""

import functools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from read_settings import settings_of
from shipped_forms import EVERY_FORM, without_files

from vit_jax.config import eval_splits
from vit_jax.data import make_source
from vit_jax.data.preprocessing import parse_preprocessing
from vit_jax.devices import kernels
from vit_jax.devices.chips import find_slice
from vit_jax.devices.flops import program_flops
from vit_jax.devices.gpus import has_cuda
from vit_jax.devices.kernels import find_forms, has_kernels
from vit_jax.devices.mesh import batch_sharding
from vit_jax.evaluators import linear_probe, make_evaluators
from vit_jax.evaluators.inputs import EvalInputs
from vit_jax.inference import outputs
from vit_jax.models import fields_of
from vit_jax.planning.hlo import Program
from vit_jax.planning.targets import Target, plan_mesh
from vit_jax.run.teachers import planned_experiment
from vit_jax.run.watch.kernel_check import check_kernels
from vit_jax.run.watch.layer_norms import layer_norms_program
from vit_jax.run.watch.replay import inputs_program, replay_program

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_cuda(), reason="JAX's plugin for CUDA is not installed"),
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache"),
]
FULL = [form for form in EVERY_FORM if "debug" not in form[1]]
STEPS = [
    (*form, scan)
    for form in FULL
    for scan in (False, True)
    if not scan or "scan" in fields_of(without_files(*form).model.name)
]
DATA, FSDP = {"data": 8, "fsdp": 1}, {"data": 1, "fsdp": 8}
# cuDNN's attention in a step: how often its forward pass, and its backward pass.
CALLS = {("pretrain", "ViT-B/16,imagenet2012"): (2, 2), ("deit", "DeiT-B/16"): (2, 2),
         ("mae", "ViT-B/16"): (10, 10)}  # fmt: skip


def on_gpus(name, words, axes, scan, devices=None):
    """(experiment, settings, mesh) of a form with two layers, and a batch that eight divides.

    EfficientNets have each of their kinds of blocks once or twice.

    The batch is so small that XLA need not compute again to save memory; three repeats divide it.
    """
    c = without_files(name, words)
    c.global_batch_size = min(c.global_batch_size + -c.global_batch_size % 8,
                              64 if "L2" in words else 2112)  # fmt: skip
    fields = fields_of(c.model.name)
    few = {"depth": 2, "depth_factor": 0.3, "scan": scan or None}
    c.model.update({key: value for key, value in few.items() if key in fields})
    c.mesh.update(axes)
    settings = settings_of(c)
    mesh = plan_mesh(settings, Target(find_slice("H100:8")), devices)
    return planned_experiment(settings, mesh), settings, mesh


@pytest.fixture(scope="module")
def shared_kernels(pytestconfig):
    """Options of a compiler that takes a kernel from an earlier program, also of an earlier run."""
    folder = pytestconfig.cache.mkdir(f"kernels-{jax.__version__}")
    return {"xla_gpu_kernel_cache_file": str(folder / "cache")}


@pytest.mark.parametrize("axes", [DATA, FSDP], ids=["data", "fsdp"])
@pytest.mark.parametrize(("name", "words", "scan"), STEPS)
def test_a_step_compiles(name, words, axes, scan, shared_kernels):
    """Every array of the state keeps its place; nothing goes to the host; products are narrow.

    The compiled program has the jaxpr's products, and attention by cuDNN.
    """
    experiment, settings, mesh = on_gpus(name, words, axes, scan)
    with jax.set_mesh(mesh):
        traced = experiment.trace()
        compiled = traced.lower().compile(compiler_options=shared_kernels)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 2**14  # the metrics
    assert not re.search(r"is_host_transfer=true|infeed|outfeed|python_gpu_callback|S\(5\)", text)
    flops, kinds = Counter(), Counter()
    for work in Program(text).work:
        flops.update({dtype: work.count * number for (dtype, _), number in work.flops.items()})
        kinds[work.kind] += work.count
    calls = kinds["__cudnn$fmhaSoftmax"], kinds["__cudnn$fmhaSoftmaxBackward"]
    assert calls == CALLS.get((name, words), calls)
    if has_kernels(experiment.model):
        assert calls[1] or (settings.optimizer.freeze and calls[0])
    expected = program_flops(traced.jaxpr.jaxpr)
    assert mesh.size * flops.total() == pytest.approx(expected, rel=0.01)
    if settings.model.dtype == "bfloat16":
        assert flops["bf16"] > 0.9 * flops.total()  # the others: prototypes, and views of images


@pytest.mark.parametrize(("name", "words"), [("dinov2", ""), ("folder", "BiT-R50x1")])
def test_deterministic_steps_have_no_scatter_that_adds(name, words, shared_kernels):
    """XLA gives the option to cuDNN on the device, so its calls look the same."""
    adding, calls = [], []
    for deterministic in (False, True):
        axes = DATA | {"deterministic": deterministic}
        experiment, _, mesh = on_gpus(name, words, axes, scan=False)
        with jax.set_mesh(mesh):
            text = experiment.lower().compile(compiler_options=shared_kernels).as_text()
        lines = text.splitlines()
        adding.append(sum(" scatter(" in x and "unique_indices=true" not in x for x in lines))
        calls.append(len(re.findall(r'"__cudnn\$(?:conv|fmhaSoftmax)Backward', text)))
    assert adding[0] > adding[1] == 0
    assert calls[0] == calls[1] > 0


@pytest.mark.parametrize(("name", "words"), FULL)
def test_a_step_lowers_for_rocm(name, words, monkeypatch):
    """With the operations that GPUs without cuDNN get."""
    monkeypatch.setattr(kernels, "has_cuda", lambda: False)
    monkeypatch.setattr(kernels, "find_forms", functools.partial(find_forms, platform="gpu"))
    experiment, _, mesh = on_gpus(name, words, DATA, scan=False, devices=jax.devices())
    with jax.set_mesh(mesh):
        text = experiment.trace().lower(lowering_platforms=("rocm",)).as_text()
    assert "stablehlo.dot_general" in text and "cudnn" not in text


class Compiling:
    """`jax.jit` whose functions compile when they are called, and return made-up arrays."""

    def __init__(self):
        self.jit, self.programs = jax.jit, 0

    def __call__(self, fun, **options):
        jitted = self.jit(fun, **options)

        @functools.wraps(fun)
        def call(*args):
            if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
                return jitted(*args)
            lowered = jitted.lower(*args)
            lowered.compile()
            self.programs += 1
            return jax.tree.map(made_up, lowered.out_info)

        return call


def made_up(x):
    values = np.arange(np.prod(x.shape)).reshape(x.shape) % 10
    return (values if x.dtype.kind in "iu" else values + 1).astype(x.dtype)


def on_devices(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


class Described(EvalInputs):
    """With one batch of each pass, which is described."""

    def batches(self, split_key="split", record_ids=None, batch_size=None):
        size = 8 * math.ceil((batch_size or self.batch_size) / 8)
        image = size, *self.image_size, self.settings.data.channels
        of = {"image": (image, np.uint8), "label": ((size,), np.int32), "id": ((size,), np.int32),
              "mask": ((size,), np.float32)}  # fmt: skip
        sharding = batch_sharding(self.mesh)
        yield {key: jax.ShapeDtypeStruct(*spec, sharding=sharding) for key, spec in of.items()}


# Of every objective, family of models and evaluator.
OTHERS = [("quickstart", ""), ("pretrain", "ViT-B/16,imagenet2012"), ("deit", "DeiT-B/16"),
          ("data_size", "fixed"), ("lejepa", "cifar10"), ("dinov2", ""), ("mae", "ViT-B/16"),
          ("masked_patches", "ViT-B/16,imagenet2012,small_patch"), ("folder", "BiT-R50x1"),
          ("distillation", "bit"), ("efficientnet", "EfficientNet-B0")]  # fmt: skip


@pytest.mark.parametrize(("name", "words"), OTHERS)
def test_what_watches_a_run_compiles(name, words, monkeypatch):
    """Replays, norms of layers, and the check of the kernels."""
    experiment, _, mesh = on_gpus(name, words, DATA, scan=False)
    with jax.set_mesh(mesh):
        inputs = inputs_program(experiment, mesh)
        inputs.lower(*experiment.arguments[:2]).compile()
        made = jax.eval_shape(inputs, *experiment.arguments[:2])
        turned = jax.ShapeDtypeStruct((), bool)
        given = experiment.abstract_state, *made, turned, *experiment.abstract_frozen
        replay_program(experiment, mesh).lower(*given).compile()
        layer_norms_program(experiment).lower(*experiment.arguments).compile()
    compiling = Compiling()
    monkeypatch.setattr(jax, "jit", compiling)
    check_kernels(experiment.passes, mesh)
    assert (compiling.programs > 0) == has_kernels(experiment.model)


@pytest.mark.parametrize(("name", "words"), OTHERS)
def test_evaluators_and_predict_compile(name, words, monkeypatch):
    experiment, settings, mesh = on_gpus(name, words, DATA, scan=False)
    data, state = settings.data, experiment.abstract_state
    size = {"image_size": data.image_size, "num_classes": 10, "num_examples": 1000}
    keys = {key for e in settings.evals.values() for key in eval_splits(data, e).values()}
    sources = {key: make_source("synthetic", split=key.split, **size) for key in keys}
    compiling = Compiling()
    monkeypatch.setattr(jax, "jit", compiling)
    monkeypatch.setattr("vit_jax.evaluators.EvalInputs", Described)
    monkeypatch.setattr(linear_probe, "fit", compiling(linear_probe.fit.__wrapped__))
    zeros = jnp.zeros

    def described(shape, *args, device=None, **given):
        if device is None:
            return zeros(shape, *args, **given)
        return on_devices(np.zeros(shape, np.float32), device)

    monkeypatch.setattr(jnp, "zeros", described)
    monkeypatch.setattr(linear_probe, "place", on_devices)
    given = settings, parse_preprocessing(settings), experiment.model, mesh, sources
    with jax.set_mesh(mesh):
        for measure in make_evaluators(*given).values():
            before = compiling.programs
            measure(state.replace(step=np.int32(0)))
            assert compiling.programs > before
    monkeypatch.undo()
    image = jax.ShapeDtypeStruct((64, *data.image_size, data.channels), np.uint8,
                                 sharding=batch_sharding(mesh))  # fmt: skip
    model = experiment.model
    fixed = {"model": model, "image_size": data.image_size, "mean": data.mean, "std": data.std,
             "loss": None, "layer": None}  # fmt: skip
    kinds = ["logits"] * bool(model.num_classes) + ["features"] + ["attention"] * has_kernels(model)
    with jax.set_mesh(mesh):
        for what in kinds:
            lower = outputs._jitted.lower
            lower(state.params, state.model_state, image, what=what, **fixed).compile()
