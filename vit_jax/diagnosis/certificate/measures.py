"""What the devices, their networks, the host and its disk do by themselves."""

import functools
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import psutil
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.checkpoints import restore
from vit_jax.checkpoints.checkpoint import Checkpoints
from vit_jax.data.elements import PARALLEL_CALLS
from vit_jax.devices.chips import count_chips, memory_limit
from vit_jax.devices.compiler import compiler_options
from vit_jax.devices.kernels import fastest, find_forms, in_dtype_of
from vit_jax.devices.mesh import AXES, make_mesh
from vit_jax.diagnosis.certificate import NotRunError, without_names
from vit_jax.diagnosis.certificate.context import Context
from vit_jax.diagnosis.certificate.steps import images_a_device, load
from vit_jax.diagnosis.settled import open_training_data, settle_step
from vit_jax.job.software import software
from vit_jax.models import model_of
from vit_jax.run.teachers import planned_experiment
from vit_jax.run.watch.kernel_choice import measure_forms, median_seconds

_ROUNDS = 5
_MIB, _GB = 2**20, 1e9
_PRODUCT, _PRODUCT_ON_CPU = 8192, 1536  # rows and columns of a matrix
_COPIED_MIB, _SENT_MIB = 256, (1, 16, 128)


def measure_devices(context: Context) -> dict[str, Any]:
    """Software and devices, and the speed of their largest products and of their memory."""
    devices = jax.devices()
    device, on_cpu = devices[0], jax.default_backend() == "cpu"
    size, dtype = (_PRODUCT_ON_CPU, jnp.float32) if on_cpu else (_PRODUCT, jnp.bfloat16)
    a = jnp.ones((size, size), dtype)
    product_s = _seconds(functools.partial(jax.jit(jnp.matmul), a, a))
    x = jnp.ones(_COPIED_MIB * _MIB, jnp.uint8)
    copy_s = _seconds(functools.partial(jax.jit(lambda x: x + 1), x))
    limit = memory_limit(jax.local_devices()[0]) or psutil.virtual_memory().total
    flops, copied = 2 * size**3 / product_s, 2 * x.size / copy_s
    kind = device.device_kind
    return {
        "software": {name: _without_values(text) for name, text in software().items()},
        "device_kind": kind,
        "num_devices": len(devices),
        "num_chips": count_chips(devices),
        "num_processes": jax.process_count(),
        "memory_bytes": limit,
        "flops_per_s": flops,
        "dtype": str(jnp.dtype(dtype)),
        "memory_bytes_per_s": copied,
        "held": None,
        "said": f"{len(devices)} x {kind}, {limit / 2**30:.1f} GiB, products at "
        f"{flops / 1e12:,.4g} TFLOP/s, memory at {copied / _GB:,.4g} GB/s",
    }


def _without_values(text: str) -> str:
    """A version, or the names of compiler flags, whose values may be paths."""
    return " ".join(word.partition("=")[0] for word in text.split())


def _seconds(run: Callable[[], Any]) -> float:
    """The median of several runs, after one that is not counted."""

    def wait() -> None:
        jax.block_until_ready(run())

    wait()
    return median_seconds(wait, _ROUNDS)


def measure_kernels(context: Context) -> dict[str, Any]:
    """Each form of a block against the plain one, and its seconds."""
    images, name = images_a_device(), context.models[0]
    settings, _ = settle_step(load(name, images * jax.device_count()))
    device = jax.local_devices()[0]
    mesh = make_mesh(**dict.fromkeys(AXES, 1), devices=[device])
    model = in_dtype_of(device, model_of(settings.model, settings.data))
    forms = find_forms(model, mesh)
    found, faults = measure_forms(model, mesh, images, [*forms], compiler_options(mesh))
    faults = {form: without_names(fault, fault) for form, fault in faults.items()}
    said = ", ".join(f"{form} {1e3 * timed.seconds:.4g} ms" for form, timed in found.items())
    left_out = "".join(f"; {form}: {fault}" for form, fault in faults.items())
    return {
        "model": name,
        "calculated": fastest(forms),
        "seconds": {form: timed.seconds for form, timed in found.items()},
        "left_out": faults,
        "held": not faults,
        "said": f"a block of {name}, on one device: {said}{left_out}",
    }


def measure_exchanges(context: Context) -> dict[str, Any]:
    """Collectives on each axis of the mesh, by size: bytes that a device sends in a second."""
    if jax.device_count() == 1:
        raise NotRunError("there is one device")
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    if context.asked is not None:
        mesh = settle_step(context.asked)[1]
    rows = [
        {"axis": axis, "kind": kind, "mib": mib, "bytes_per_s": sent(mesh, axis, kind, mib)}
        for axis, size in mesh.shape.items()
        if size > 1
        for kind in COLLECTIVES
        for mib in _SENT_MIB
    ]
    largest = {(r["axis"], r["kind"]): r["bytes_per_s"] / _GB for r in rows}  # the last of its kind
    said = ", ".join(f"{kind} over {axis} {gb:.4g} GB/s" for (axis, kind), gb in largest.items())
    return {"rows": rows, "held": None, "said": said}


# {kind: (the collective of x (n, m), the share of x that a ring of n devices sends)}
COLLECTIVES: dict[str, tuple[Callable[..., jax.Array], Callable[[int], float]]] = {
    "all-reduce": (jax.lax.psum, lambda n: 2 * (n - 1) / n),
    "all-gather": (
        lambda x, axis: jax.lax.all_gather(x[:1], axis, tiled=True), lambda n: (n - 1) / n),
    "reduce-scatter": (
        lambda x, axis: jax.lax.psum_scatter(x, axis, tiled=True), lambda n: (n - 1) / n),
    "all-to-all": (
        lambda x, axis: jax.lax.all_to_all(x, axis, 0, 0, tiled=True), lambda n: (n - 1) / n),
}  # fmt: skip


def sent(mesh: Mesh, axis: str, kind: str, mib: int) -> float:
    """Bytes that a device sends in a second in a collective of so many MiB over an axis."""
    collective, share = COLLECTIVES[kind]
    number = mesh.shape[axis]
    x = jnp.ones((number, mib * _MIB // (4 * number)), jnp.float32)
    run = jax.jit(
        jax.shard_map(
            lambda x: collective(x, axis)[:1], mesh=mesh, in_specs=P(), out_specs=P(axis),
            check_vma=False,
        )
    )  # fmt: skip
    x = jax.device_put(x, NamedSharding(mesh, P()))
    return x.nbytes * share(number) / _seconds(functools.partial(run, x))


def measure_transfers(context: Context) -> dict[str, Any]:
    """Bytes a second between this host and one of its devices."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        raise NotRunError("the host is the device")
    on_device = jax.device_put(jnp.ones(_COPIED_MIB * _MIB, jnp.uint8), device)
    on_host = jax.device_get(on_device)
    to_device = on_host.nbytes / _seconds(lambda: jax.device_put(on_host, device))
    # A device keeps the copy that was read, so that each read needs an array of its own.
    arrays = iter([jax.block_until_ready(on_device + i) for i in range(_ROUNDS + 1)])
    to_host = on_host.nbytes / _seconds(lambda: jax.device_get(next(arrays)))
    return {
        "to_device_bytes_per_s": to_device,
        "to_host_bytes_per_s": to_host,
        "held": None,
        "said": f"{to_device / _GB:.4g} GB/s to a device, {to_host / _GB:.4g} GB/s back",
    }


def measure_images(context: Context) -> dict[str, Any]:
    """Images that this host reads in a second for the user's config."""
    if importlib.util.find_spec("tensorflow") is None:
        raise NotRunError("TensorFlow, which reads images, is not installed")
    if context.asked is None:
        raise NotRunError("no --config says which images are read")
    from vit_jax.diagnosis.benchmarks.input import measure_input

    settings, source = open_training_data(context.asked)
    cpu_ms = measure_input(settings, source)["cpu_ms_per_image"]["pipeline"]["median"]
    figures = {"cpu_ms_per_image": cpu_ms, "cpu_cores": PARALLEL_CALLS, "held": None}
    images_per_s = 1e3 * PARALLEL_CALLS / cpu_ms
    said = f"{cpu_ms:.4g} CPU ms an image, {images_per_s:,.4g} images/s on {PARALLEL_CALLS} cores"
    return figures | {"images_per_s": images_per_s, "said": said}


def measure_saves(context: Context) -> dict[str, Any]:
    """Bytes a second of a save and of a restore, on the disk of the certificate."""
    settings, mesh = settle_step(load(context.models[0], jax.device_count()))
    experiment = planned_experiment(settings, mesh)
    folder = context.output / "saves"
    folder.rmtree(missing_ok=True)
    with jax.set_mesh(mesh):
        state = jax.block_until_ready(experiment.init())
        number = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        saver = Checkpoints(folder, keep_last=2, keep_every=None)
        saver.save(1, state, {})
        saver.wait()  # the first makes folders and threads
        since = time.perf_counter()
        saver.save(2, state, {})
        handed_over_s = time.perf_counter() - since
        saver.wait()
        save_s = time.perf_counter() - since
        saver.close()
        since = time.perf_counter()
        restored = restore.restore_newest(folder, experiment.abstract_state)
        jax.block_until_ready(restored)
        restore_s = time.perf_counter() - since
    folder.rmtree(missing_ok=True)
    return {
        "bytes": number,
        "training_waits_s": handed_over_s,
        "save_s": save_s,
        "restore_s": restore_s,
        "held": restored is not None,
        "said": f"{number / _GB:.3g} GB: saved at {number / save_s / _GB:.3g} GB/s, training waits "
        f"{handed_over_s:.2g} s of it; restored at {number / restore_s / _GB:.3g} GB/s",
    }
