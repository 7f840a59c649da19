"""Checks of this machine: software, devices, memory, decoding, and all that a run would reach.

Every check ends within a time limit and gives a `Finding`; none raises.
"""

import concurrent.futures
import contextlib
import contextvars
import importlib.util
import io
import itertools
import logging
import netrc
import os
import pathlib
import secrets
import shutil
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import psutil
from etils import epath
from ml_collections import ConfigDict

import vit_jax
from vit_jax import files
from vit_jax.errors import InputError
from vit_jax.job.software import software

logger = logging.getLogger("vit_jax")

OK, WARNING, FAILED = "ok", "warning", "failed"
_LITTLE = 1 << 30  # bytes of memory or disk that a run soon exceeds
_PICTURES = 32  # decoded
_WANDB = "https://api.wandb.ai"
_ABSENT = "not installed"
# Errors of TensorFlow, which reads and writes buckets.
_WHY_OUT_OF_REACH = {
    "NotFoundError": "there is no such bucket",
    "PermissionDeniedError": "access is denied",
    "UnauthenticatedError": "access is denied",
}
_SHOWN = ("Python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class Finding(NamedTuple):
    """The result of a check: its subject, OK, WARNING or FAILED, what was found, and the remedy."""

    subject: str
    state: str
    found: str
    remedy: str = ""


def bounded(subject: str, check: Callable[[], Finding], timeout_s: float, remedy: str) -> Finding:
    """The result of `check`; FAILED with `remedy` if it raises or takes longer than `timeout_s`.

    A check that hangs is left behind in its thread, which does not keep the process alive.
    """
    result: concurrent.futures.Future[Finding] = concurrent.futures.Future()
    context = contextvars.copy_context()  # holds the plug-ins in use

    def run():
        try:
            result.set_result(context.run(check))
        except BaseException as e:
            result.set_exception(e)

    threading.Thread(target=run, daemon=True, name=f"doctor: {subject}").start()
    try:
        return result.result(timeout_s)
    except concurrent.futures.TimeoutError:
        return Finding(subject, FAILED, f"no answer within {timeout_s:g} s", remedy)
    except InputError as e:
        return Finding(subject, FAILED, str(e), "")  # it has its own remedy
    except Exception as e:
        said = " ".join(str(e).split())[:300]
        return Finding(subject, FAILED, f"{type(e).__name__}: {said}", remedy)


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
    if workdir is not None and not _is_in_bucket(workdir):
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
    from vit_jax.data.pictures import to_known_format

    encoded, what = [_made_picture()] * _PICTURES, "a JPEG of 500 x 375 pixels made here"
    paths = [] if data_dir is None else _some_pictures(os.path.expanduser(data_dir))
    if paths:
        encoded, what = [], f"{len(paths)} pictures of {data_dir}"
        for path in paths:
            with open(path, "rb") as file:
                encoded.append(to_known_format(file.read()))
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
    """The first pictures below a local folder, which may hold millions."""
    from vit_jax.data.pictures import EXTENSIONS

    found = (
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(EXTENSIONS) and not name.startswith(".")
    )
    return list(itertools.islice(found, _PICTURES))


def _made_picture() -> bytes:
    """A JPEG about as large as one of ImageNet."""
    from PIL import Image

    coarse = np.random.default_rng(0).integers(0, 256, (25, 33, 3), np.uint8)
    jpeg = io.BytesIO()
    Image.fromarray(coarse).resize((500, 375)).save(jpeg, "JPEG", quality=90)
    return jpeg.getvalue()


def check_data_dir(data_dir: str, data_name: str | None = None) -> Finding:
    """Whether `data_dir` can be read: a folder of pictures, of TFDS data sets, or a bucket's.

    `data_name`: the data set that the config reads there; None: unknown.
    """
    path = files.absolute(data_dir)
    with _reaching(path):
        is_folder = path.is_dir()
        names = sorted(entry.name for entry in path.iterdir()) if is_folder else []
    if not is_folder:
        return Finding("data folder", FAILED, f"{path}: no such folder",
                       "check the path, its mount and your rights; --data_dir=DIR")  # fmt: skip
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    if not names:
        return Finding("data folder", FAILED, f"{path}: is empty", "put the data there")
    if data_name in (None, "folder") and not _is_in_bucket(path):
        loose = _find_loose_pictures(pathlib.Path(path))
        if loose is not None:
            remedy = (
                "train needs a folder for each class (data.name=folder) or a list of labels "
                "(data.name=list); as they are, predict reads them, and so do objectives without "
                "labels (data.name=unlabelled)"
            )
            return Finding("data folder", WARNING, loose, remedy)
    return Finding("data folder", OK, f"{path}: {len(names)} entries: {shown}")


def _find_loose_pictures(root: pathlib.Path) -> str | None:
    """What a folder of pictures without labels holds; None if it has classes or a list."""
    from vit_jax.data.folder_contents import class_like_folders, describe_contents
    from vit_jax.data.image_folder import find_layout
    from vit_jax.data.picture_list import SUFFIXES

    base = find_layout(root).train_root
    lists = [path for path in root.iterdir() if path.suffix.lower() in SUFFIXES]
    if lists or class_like_folders(base):
        return None
    found = describe_contents(base, "").removesuffix("; ")
    return f"{base}: {found}, no folders of classes" if " picture" in found else None


def _is_in_bucket(path: str | os.PathLike) -> bool:
    return "://" in os.fspath(path)


def _bucket_of(path: str | os.PathLike) -> str:
    """gs://bucket of gs://bucket/any/path."""
    return "/".join(os.fspath(path).split("/")[:3])


@contextlib.contextmanager
def _reaching(path: epath.Path) -> Iterator[None]:
    """Turn errors of a store's client, whose texts are for its developers, into one line."""
    try:
        yield
    except Exception as e:
        if isinstance(e, InputError) or not _is_in_bucket(path):
            raise
        why = _WHY_OUT_OF_REACH.get(type(e).__name__, "cannot be reached")
        raise InputError(f"{_bucket_of(path)}: {why}; {_remedy_of_bucket(path)}") from e


def _remedy_of_bucket(path: str | os.PathLike) -> str:
    return (
        f"check the name of the bucket {_bucket_of(path)}, the network, and your credentials "
        "(for gs://: gcloud auth application-default login)"
    )


def check_workdir(workdir: epath.Path) -> Finding:
    """Whether `workdir` can be written: a bucket gets a small object, which is removed again."""
    from vit_jax.training.workdir import check_writable

    if not _is_in_bucket(workdir):
        check_writable(workdir)
        return Finding("workdir", OK, f"{workdir}: can be written")
    with _reaching(workdir):
        check_writable(workdir)
        probe, content = workdir / f"doctor-{secrets.token_hex(4)}", secrets.token_bytes(16)
        probe.write_bytes(content)
        same = probe.read_bytes() == content
        probe.unlink()
    if not same:
        return Finding("workdir", FAILED, f"{workdir}: gave back other bytes than were written",
                       "check who else writes there")  # fmt: skip
    return Finding("workdir", OK, f"{workdir}: written, read and removed an object")


def check_wandb(timeout_s: float) -> Finding:
    """Whether W&B is installed, has a key, and its host answers."""
    if importlib.util.find_spec("wandb") is None:
        return Finding("W&B", FAILED, "not installed", "pip install -e '.[wandb]'")
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return Finding("W&B", OK, f"WANDB_MODE={os.environ['WANDB_MODE']}: sends nothing")
    url = os.environ.get("WANDB_BASE_URL", _WANDB)
    host = urllib.parse.urlparse(url).hostname or url
    if not os.environ.get("WANDB_API_KEY") and not _has_netrc_entry(host):
        return Finding("W&B", FAILED, f"no key for {host}",
                       "run wandb login, or set WANDB_API_KEY")  # fmt: skip
    try:
        urllib.request.urlopen(url, timeout=timeout_s).close()
    except urllib.error.HTTPError as e:  # an answer
        if e.code >= 500:
            return Finding("W&B", FAILED, f"{url}: status {e.code}", "try later")
    return Finding("W&B", OK, f"{url} answers; a key is set")


def _has_netrc_entry(host: str) -> bool:
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def check_cluster(coordinator: str | None, timeout_s: float) -> Finding:
    """The cluster that this process belongs to, and whether `coordinator` (HOST:PORT) answers."""
    from vit_jax.jax_private import find_cluster

    cluster = find_cluster()
    text = "no cluster detected: one process"
    if cluster is not None:
        text = f"{cluster.name or cluster.__name__}: {cluster.get_process_count()} processes"
    if coordinator is None:
        return Finding("cluster", OK, text)
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"--coordinator={coordinator}: needs HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    return Finding("cluster", OK, f"{text}; {coordinator} answers")


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
    from vit_jax.models.attention import choose_attention
    from vit_jax.training.description import describe
    from vit_jax.training.prepare import prepare

    unused = epath.Path(tempfile.gettempdir()) / f"vit_jax-doctor-{secrets.token_hex(4)}"
    run = prepare(config, workdir or unused)
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

    `timeout_s` limits each check, `training_timeout_s` the one that opens the data of `config`.
    """
    platform = None
    if config is not None:
        platform, wandb = config.mesh.platform, wandb or config.log.wandb is not None
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
        if _is_in_bucket(data_dir):
            remedy = _remedy_of_bucket(data_dir)
        yield bounded("data folder", lambda: check_data_dir(data_dir, name), timeout_s, remedy)
    yield bounded("decoding", lambda: check_decoding(data_dir), start, "pip install -e '.'")
    if workdir is not None:
        remedy = "check the path, its mount and your rights"
        if _is_in_bucket(workdir):
            remedy = _remedy_of_bucket(workdir)
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
