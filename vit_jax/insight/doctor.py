"""Checks of this machine: software, devices, memory, decoding, and all that a run would reach.

Every check ends within a time limit and gives a `Finding`; none raises.
"""

import copy
import functools
import io
import itertools
import logging
import os
import pathlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import psutil
from etils import epath
from ml_collections import ConfigDict

import vit_jax
from vit_jax.insight.findings import FAILED, OK, WARNING, Finding, bounded
from vit_jax.insight.reach import (
    check_cluster,
    check_data_dir,
    check_wandb,
    check_workdir,
    is_in_bucket,
    remedy_of_bucket,
)
from vit_jax.job.software import software

logger = logging.getLogger("vit_jax")

_LITTLE = 1 << 30  # bytes of memory or disk that a run soon exceeds
_PICTURES = 32  # decoded
_ABSENT = "not installed"
_SHOWN = ("Python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def check_software() -> Finding:
    """Versions of this package, Python and the libraries."""
    found = software()
    builds = [found["tensorflow-cpu"], found["tensorflow"]]
    tensorflow = next((version for version in builds if version != _ABSENT), _ABSENT)
    shown = {"vit_jax": vit_jax.__version__} | {name: found[name] for name in _SHOWN}
    shown["tensorflow"] = tensorflow
    text = ", ".join(f"{name} {version}" for name, version in shown.items())
    if _ABSENT in shown.values():
        return Finding("software", FAILED, text, "pip install -e '.' installs what is missing")
    return Finding("software", OK, text)


def check_devices(platform: str | None = None) -> Finding:
    """The devices that JAX finds, and their memory; `platform`: `mesh.platform`."""
    import jax

    from vit_jax.devices.flops import format_bytes
    from vit_jax.devices.mesh import accelerators_on_host, start_backend

    start_backend(platform)
    devices = jax.devices()
    text = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    try:
        limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    except Exception:  # a backend without statistics may raise anything
        limit = None
    if limit:
        text += f", {format_bytes(limit)} each"
    unused = accelerators_on_host() if devices[0].platform == "cpu" else []
    if unused and platform != "cpu":
        remedy = "pip install -e '.[cuda]' or '.[tpu]'; for the CPU: --config.mesh.platform=cpu"
        return Finding("devices", WARNING, f"{text}; unused: {', '.join(unused)}", remedy)
    return Finding("devices", OK, text)


def check_memory(workdir: epath.Path | None) -> Finding:
    """Free memory of the host, and free disk at `workdir` (None: the current folder)."""
    from vit_jax.devices.flops import format_bytes

    memory, local = psutil.virtual_memory(), pathlib.Path.cwd()
    if workdir is not None and not is_in_bucket(workdir):
        local = next(p for p in [workdir, *workdir.parents] if p.exists())
    disk = shutil.disk_usage(local)
    text = (
        f"{format_bytes(memory.available)} of {format_bytes(memory.total)} memory free, "
        f"{os.cpu_count()} cores; {format_bytes(disk.free)} free at {local}"
    )
    little = [name for name, free in (("memory", memory.available), ("disk", disk.free))
              if free < _LITTLE]  # fmt: skip
    if little:
        return Finding("memory", WARNING, text, f"free some {' and '.join(little)}")
    return Finding("memory", OK, text)


def check_decoding(data_dir: str | None) -> Finding:
    """CPU time to decode a JPEG of 500 x 375 pixels, or some pictures below `data_dir`."""
    from vit_jax.data.host_ops import to_pixels
    from vit_jax.data.host_tf import tf

    encoded, what = [_made_picture()] * _PICTURES, "a JPEG of 500 x 375 pixels made here"
    paths = [] if data_dir is None else _some_pictures(os.path.expanduser(data_dir))
    if paths:
        encoded, what = (
            [_picture_at(path) for path in paths],
            f"{len(paths)} pictures of {data_dir}",
        )
    with tf.device("cpu"):
        broken, since = 0, time.process_time()
        for image in encoded:
            try:
                to_pixels(tf.constant(image))
            except tf.errors.OpError:
                broken += 1
        cpu_s = (time.process_time() - since) / len(encoded)
    text = f"{1000 * cpu_s:.2g} ms of CPU a picture: {what}"
    if broken:
        remedy = "training leaves them out and names each; repair or remove them"
        return Finding("decoding", WARNING, f"{text}; {broken} cannot be decoded", remedy)
    return Finding("decoding", OK, text)


def _some_pictures(folder: str) -> list[str]:
    """The first pictures below a local folder, which may hold millions, or beside a list."""
    from vit_jax.data.pictures import EXTENSIONS, look_up

    if os.path.isfile(folder):
        folder = os.path.dirname(folder)
    found = (
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(EXTENSIONS) and not name.startswith(".")
    )
    readable = (path for path in found if look_up(path)[0] is not None)  # else reading may not end
    return list(itertools.islice(readable, _PICTURES))


def _picture_at(path: str) -> bytes:
    """A picture in a format that is decoded here; empty if its file cannot be read."""
    from vit_jax.data.pictures import to_known_format

    try:
        with open(path, "rb") as file:
            return to_known_format(file.read())
    except OSError:  # a link that leads to no file, no right to read
        return b""


def _made_picture() -> bytes:
    """A JPEG about as large as one of ImageNet."""
    from PIL import Image

    coarse = np.random.default_rng(0).integers(0, 256, (25, 33, 3), np.uint8)
    jpeg = io.BytesIO()
    Image.fromarray(coarse).resize((500, 375)).save(jpeg, "JPEG", quality=90)
    return jpeg.getvalue()


class _Lines(logging.Handler):
    """Collects messages."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def check_training(config: ConfigDict, workdir: epath.Path | None) -> Finding:
    """What `train` would choose for `config`, checked against data and devices; writes nothing.

    Without a `workdir` the run is taken to be new.
    """
    from vit_jax.models.dot_product import choose_attention
    from vit_jax.planning.search import choose_layout
    from vit_jax.run.build import describe, prepare

    unused = epath.Path(tempfile.gettempdir()) / f"vit_jax-doctor-{secrets.token_hex(4)}"
    by_calculation = functools.partial(choose_layout, may_compile=False)  # in seconds
    run = prepare(config, workdir or unused, by_calculation)
    collected, before = _Lines(), (logger.handlers, logger.level, logger.propagate)
    logger.handlers, logger.propagate = [collected], False
    logger.setLevel(logging.INFO)
    try:
        describe(run)
    finally:
        logger.handlers, _, logger.propagate = before
        logger.setLevel(before[1])
    attention = choose_attention(run.mesh.devices.flat[0].platform).__name__
    order = f"order of data: {run.config.data.order}; attention: {attention}"
    return Finding("train would choose", OK, "\n".join([*collected.lines, order]))


def examine(
    *,
    config: ConfigDict | None,
    workdir: epath.Path | None,
    data_dir: str | None,
    wandb: bool,
    coordinator: str | None,
    timeout_s: float,
    training_timeout_s: float = 300.0,
) -> Iterator[Finding]:
    """Run the checks one after another; what is not asked for (None, False) is left out.

    `data_dir` is also that of `config`, unless it sets one.
    `timeout_s` limits each check, `training_timeout_s` the one that opens the data of `config`.
    """
    platform = None
    if config is not None:
        platform, wandb = config.mesh.platform, wandb or config.log.wandb is not None
        if config.data.data_dir is None and data_dir is not None:
            config = copy.deepcopy(config)  # with the types of keys that are None
            config.data.data_dir = data_dir
        data_dir = data_dir or config.data.data_dir
    start = max(timeout_s, 60.0)  # imports of JAX and TensorFlow take seconds on a busy host
    again = "stop other programs that hold the devices; JAX_PLATFORMS=cpu leaves them out"
    yield bounded("software", check_software, start, "pip install -e '.'")
    devices = bounded("devices", lambda: check_devices(platform), start, again)
    yield devices
    yield bounded("memory", lambda: check_memory(workdir), timeout_s, "check the disk's mount")
    if data_dir is not None:
        name = None if config is None else config.data.name
        remedy = "check the path, its mount and your rights"
        if is_in_bucket(data_dir):
            remedy = remedy_of_bucket(data_dir)
        yield bounded("data folder", lambda: check_data_dir(data_dir, name), timeout_s, remedy)
    yield bounded("decoding", lambda: check_decoding(data_dir), start, "pip install -e '.'")
    if workdir is not None:
        remedy = "check the path, its mount and your rights"
        if is_in_bucket(workdir):
            remedy = remedy_of_bucket(workdir)
        yield bounded("workdir", lambda: check_workdir(workdir), timeout_s, remedy)
    if wandb:
        remedy = "check the network and proxy, or set WANDB_MODE=offline"
        yield bounded("W&B", lambda: check_wandb(timeout_s), timeout_s, remedy)
    remedy = "start process 0 first; check the host, the port and the firewall"
    yield bounded("cluster", lambda: check_cluster(coordinator, timeout_s), timeout_s, remedy)
    if config is not None and devices.state != FAILED:
        yield bounded(
            "train would choose",
            lambda: check_training(config, workdir),
            training_timeout_s,
            "run train itself for the whole traceback",
        )
