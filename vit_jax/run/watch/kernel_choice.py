"""Chooses the form in which a model's blocks compute, by a measurement on the run's devices."""

import contextlib
import hashlib
import json
import logging
import math
import statistics
import textwrap
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from etils import epath
from jax.sharding import Mesh

from vit_jax.base import files
from vit_jax.base.tree import Params
from vit_jax.config import Settings
from vit_jax.devices import flops
from vit_jax.devices.compiler import compiler_options
from vit_jax.devices.kernels import find_forms, in_dtype_of, why_plain
from vit_jax.devices.mesh import BATCH_AXES, make_mesh
from vit_jax.devices.sharding import constrain
from vit_jax.job import processes, watchdog
from vit_jax.job.software import software
from vit_jax.models import model_of
from vit_jax.models.block_ops import PLAIN, BlockOps
from vit_jax.models.contract import field_names, with_known
from vit_jax.run.watch.kernel_check import compare_with_plain, sample_block

logger = logging.getLogger("vit_jax")

_ROUNDS, _RUNS = 3, 10
_SHOWN = 300  # characters of an error
_FASTER = 0.95  # a form with this share of the calculated one's time may take its place


Options = dict[str, bool]  # of XLA's compiler


class Timed(NamedTuple):
    """A form of a block: its seconds in each round, and the bytes of its temporaries."""

    rounds: list[float]
    temporaries: int

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)

    def replaces(self, calculated: "Timed") -> bool:
        """Whether it is faster in every round, and keeps no more for the backward pass."""
        pairs = zip(self.rounds, calculated.rounds, strict=True)
        is_faster = all(own < _FASTER * other for own, other in pairs)
        return is_faster and self.temporaries <= calculated.temporaries


def choose_kernels(settings: Settings, mesh: Mesh) -> str | None:
    """The name of the form, see `devices.kernels.find_forms`, that is fastest for the run's model.

    A block runs forward and backward in each form, with the tokens, the dtype, the dropout and the
    rows of one device. Another form takes the place of the calculated one if it is 5 % faster in
    each of three rounds and takes no more memory, since the layout is chosen before. A form that
    fails, or differs from the plain one, is left out with a warning. Process 0 measures, on its own
    devices, and all take its answer. The answer is kept beside the compiled programs.

    Returns:
      None: there is nothing to choose, as on CPUs.
    """
    model, forms = _find(settings, mesh)
    if not any(ops.attention_kernel for ops in forms.values()):
        return None
    is_split = mesh.shape["fsdp"] > 1 and (
        settings.model.own.get("scan") or not settings.mesh.shares
    )
    if is_split or mesh.shape["tensor"] > 1:
        forms.pop("rows", None)  # needs whole weights
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES) * settings.optimizer.accum_steps
    images = settings.run.global_batch_size // ways

    def choose() -> str | None:
        tensor = mesh.shape["tensor"]
        here = [each for each in mesh.devices.flat if each.process_index == jax.process_index()]
        if len(here) < tensor:
            logger.info("kernels are not measured: mesh.tensor=%d is larger than a host", tensor)
            return None
        share = make_mesh(replica=1, data=1, fsdp=1, tensor=tensor, devices=here[:tensor])
        facts = {
            "device": here[0].device_kind,
            "model": repr(settings.model),
            "image_size": settings.data.image_size,
            "images": images,
            "tensor": tensor,
            "forms": [*forms],
            "deterministic": settings.mesh.deterministic,
        }
        kept = _place(facts | software())
        options = compiler_options(share, deterministic=settings.mesh.deterministic)
        return _read(kept, forms) or _measure(model, share, images, [*forms], kept, options)

    with watchdog.phase("compile"):
        deadline_s = settings.job.compile_deadline_s
        return processes.say_to_all("the fastest kernels", choose, deadline_s)


def missing_form(settings: Settings, mesh: Mesh) -> str | None:
    """The fault of a form `model.kernels` that the devices of `mesh` lack; None: they have it."""
    asked, model = settings.model.kernels, settings.model.name
    if asked in ("auto", "calculated"):
        return None
    made, forms = _find(settings, mesh)
    if asked in forms:
        return None
    device, reason = mesh.devices.flat[0], None
    if device.platform != "cpu":
        reason = why_plain(made, mesh, on_tpu=device.platform == "tpu")
    return (
        f"model.kernels={asked!r}: {model} has no such form on {device.device_kind}; use auto, "
        f"calculated, {', '.join(forms)}"
        + ("" if reason is None else f"; attention has no kernel there: {reason}")
    )


def _find(settings: Settings, mesh: Mesh) -> tuple[nn.Module, dict[str, BlockOps]]:
    """The run's model, and its forms on the devices of `mesh`."""
    model = with_known(model_of(settings.model, settings.data), constrain=constrain)
    model = in_dtype_of(mesh.devices.flat[0], model)
    has_forms = "ops" in field_names(type(model))
    return model, find_forms(model, mesh) if has_forms else {"plain": PLAIN}


def _place(facts: Mapping[str, Any]) -> epath.Path | None:
    """The file of an answer beside the compiled programs; None: these are not kept."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return folder and epath.Path(folder) / f"kernels-{digest[:16]}.json"


def _read(kept: epath.Path | None, names: Collection[str]) -> str | None:
    """The answer in a file; None: there is none."""
    if kept is None:
        return None
    try:
        name = json.loads(kept.read_text())["fastest"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if name not in names:
        return None
    logger.info("kernels: %s, as measured before", name)
    return name


def _measure(
    model: nn.Module,
    mesh: Mesh,
    images: int,
    names: Sequence[str],
    kept: epath.Path | None,
    options: Options,
) -> str:
    """The fastest form of `names`, which end with the calculated one; writes it to `kept`."""
    began, kind = time.monotonic(), mesh.devices.flat[0].device_kind
    found, faults = measure_forms(model, mesh, images, names, options)
    for name, fault in faults.items():
        logger.warning("model.kernels: the form %s is left out: %s", name, fault)
    if not found:
        return names[-1]  # the step will fail too, and say why
    calculated = names[-1] if names[-1] in found else min(found, key=lambda n: found[n].seconds)
    better = [name for name, timed in found.items() if timed.replaces(found[calculated])]
    name = min(better, key=lambda n: found[n].seconds, default=calculated)
    said = ", ".join(f"{n} {timed.seconds * 1e3:.3g} ms" for n, timed in found.items())
    took_s = time.monotonic() - began
    logger.info("kernels: %s; a block on %s: %s; measured in %.1f s", name, kind, said, took_s)
    if kept is not None:
        seconds = {n: timed.seconds for n, timed in found.items()}
        with contextlib.suppress(OSError):  # the next start measures again
            files.write_whole(kept, json.dumps({"fastest": name, "seconds": seconds}))
    return name


def measure_forms(
    model: nn.Module, mesh: Mesh, images: int, names: Sequence[str], options: Options
) -> tuple[dict[str, Timed], dict[str, str]]:
    """Run a block forward and backward in each form of `names`, compiled with `options`.

    Returns:
      {name: what was measured}, and {name: the fault of a form that fails or differs from the plain
      one}.
    """
    runs, faults = _compile_forms(model, mesh, images, names, options)
    rounds = [
        {name: median_seconds(run, _RUNS) for name, (run, _) in runs.items()}
        for _ in range(_ROUNDS)
    ]
    return {
        name: Timed([each[name] for each in rounds], temporaries)
        for name, (_, temporaries) in runs.items()
    }, faults


def _compile_forms(
    model: nn.Module, mesh: Mesh, images: int, names: Sequence[str], options: Options
) -> tuple[dict[str, tuple[Callable[[], Any], int]], dict[str, str]]:
    """`_compile` of the forms that compute as they should; the faults of the others."""
    forms, runs, faults = find_forms(model, mesh), {}, {}
    for name in names:
        of_form = model.clone(ops=forms[name])
        try:
            _, difference = compare_with_plain(of_form, mesh)
            if difference is None:
                compiled = _compile(of_form, mesh, images, options)
                compiled[0]()
                runs[name] = compiled
        except Exception as error:  # a compiler, a kernel or JAX may raise anything
            difference = textwrap.shorten(f"{type(error).__name__}: {error}", _SHOWN)
        if difference is not None:
            faults[name] = difference
    return runs, faults


def _compile(
    model: nn.Module, mesh: Mesh, images: int, options: Options
) -> tuple[Callable[[], Any], int]:
    """A function that runs a block of `model` forward and backward and waits for it, and the bytes
    of its temporaries.
    """
    fields = {"stochastic_depth": getattr(model, "stochastic_depth", 0.0) > 0}
    with jax.set_mesh(mesh):
        sample = sample_block(model, mesh, images, fields)
        arrays = sample.params, sample.x, sample.grad

        def run(params: Params, x: jax.Array, grad: jax.Array) -> Any:
            given = sample._replace(params=params, x=x, grad=grad)
            return given.run(sample.block, train=True)

        program = jax.jit(run, compiler_options=options).lower(*arrays).compile()
    memory = flops.expected_memory(program.memory_analysis())
    return lambda: jax.block_until_ready(program(*arrays)), memory.temporaries


def median_seconds(run: Callable[[], Any], number: int) -> float:
    """The median of the seconds that so many calls of `run` take."""
    times = []
    for _ in range(number):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
