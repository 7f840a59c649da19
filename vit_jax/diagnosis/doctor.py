"""Checks of this machine: software, devices, memory, decoding, and all that a run would reach.

Every check ends within a time limit and gives a `Finding`; none raises.
"""

import concurrent.futures
import contextlib
import contextvars
import datetime
import functools
import importlib.util
import io
import itertools
import math
import netrc
import os
import pathlib
import secrets
import shutil
import socket
import statistics
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import psutil
from etils import epath
from rich.console import Console

import vit_jax
from vit_jax.base import files
from vit_jax.base.errors import InputError
from vit_jax.config import Settings
from vit_jax.diagnosis.method import judge_method
from vit_jax.job.software import software

if TYPE_CHECKING:
    from vit_jax.run.build import Run

OK, WARNING, FAILED = "ok", "warning", "failed"

_LITTLE = 1 << 30  # bytes of memory or disk that a run soon exceeds
_IMAGES = 32  # decoded
_ABSENT = "not installed"
_SHOWN = ("Python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_WANDB = "https://api.wandb.ai"
_START_S = 60.0  # imports of JAX and TensorFlow take seconds on a busy host
_TRAINING_S = 300.0  # limit of the checks that open the data of a config, and that time its steps
_MEASURED_S, _FEWEST, _MOST = 5.0, 5, 100  # time of the steps that are measured; their number


class Finding(NamedTuple):
    """The result of a check: its subject, OK, WARNING or FAILED, what was found, and the remedy."""

    subject: str
    state: str
    found: str
    remedy: str = ""


def examine(
    *,
    asked: Settings | None,
    workdir: epath.Path | None,
    data_dir: str | None,
    wandb: bool,
    coordinator: str | None,
    all_images: bool,
    survey: Callable[["Run"], Iterator[Finding]] | None = None,
    timeout_s: float,
) -> Iterator[Finding]:
    """Run the checks one after another; what is not asked for (None, False) is left out.

    `all_images` and `survey`, which looks at the data of a run, need settings. `timeout_s` limits
    each check, but for those that import libraries or read the data of `asked`.
    """
    platform = pixel_range = None
    if asked is not None:
        platform, pixel_range = asked.mesh.platform, asked.data.pixel_range
        wandb = wandb or asked.log.wandb is not None
    start_s = max(timeout_s, _START_S)
    install = "pip install -e '.' installs what is missing"
    yield bounded("software", check_software, start_s, install)
    remedy = "stop other programs that hold the devices; JAX_PLATFORMS=cpu leaves them out"
    devices = bounded("devices", lambda: check_devices(platform), start_s, remedy)
    yield devices
    yield bounded("memory", lambda: check_memory(workdir), timeout_s, "check the disk's mount")
    if data_dir is not None:
        remedy = remedy_of_path(data_dir)
        yield bounded("data folder", lambda: check_data_dir(data_dir), timeout_s, remedy)
    yield bounded("decoding", lambda: check_decoding(data_dir, pixel_range), start_s, install)
    if workdir is not None:
        remedy = remedy_of_path(workdir)
        yield bounded("workdir", lambda: check_workdir(workdir), timeout_s, remedy)
    if wandb:
        remedy = "check the network and proxy, or set WANDB_MODE=offline"
        yield bounded("W&B", lambda: check_wandb(timeout_s), timeout_s, remedy)
    remedy = "start process 0 first; check the host, the port and the firewall"
    yield bounded("cluster", lambda: check_cluster(coordinator, timeout_s), timeout_s, remedy)
    if asked is not None and devices.state != FAILED:
        remedy, runs = "run train itself for the whole traceback", list["Run"]()
        yield bounded(
            "train would choose", lambda: check_training(asked, workdir, runs), _TRAINING_S, remedy
        )
        if runs:
            found = bounded("time", lambda: estimate_time(runs[0]), _TRAINING_S, remedy)
            yield found._replace(state=OK if found.state == OK else WARNING)  # training may go
            s = runs[0].settings
            said, advice = judge_method(s.objective, s.data.num_examples, s.run.weights_source)
            if said:
                yield Finding("method", WARNING if advice else OK, said, advice)
        if runs and all_images:
            yield bounded(
                "all images", lambda: check_images(runs[0]), threading.TIMEOUT_MAX, remedy
            )
        if runs and survey is not None:
            yield from survey(runs[0])


def bounded(subject: str, check: Callable[[], Finding], timeout_s: float, remedy: str) -> Finding:
    """The result of `check`; FAILED with `remedy` if it raises or takes longer than `timeout_s`.

    A check that hangs is left behind in its thread, which does not keep the process alive.
    """
    result: concurrent.futures.Future[Finding] = concurrent.futures.Future()
    context = contextvars.copy_context()  # holds the plug-ins in use

    def run() -> None:
        try:
            result.set_result(context.run(check))
        except BaseException as e:
            result.set_exception(e)

    threading.Thread(target=run, daemon=True, name=f"doctor: {subject}").start()
    try:
        return result.result(timeout_s)
    except concurrent.futures.TimeoutError:
        longer = f"on a busy machine wait longer, with --timeout_s={2 * timeout_s:g}; else {remedy}"
        return Finding(subject, FAILED, f"no answer within {timeout_s:g} s", longer)
    except InputError as e:
        return Finding(subject, FAILED, str(e), "")  # it has its own remedy
    except Exception as e:
        said = " ".join(str(e).split())[:300]
        return Finding(subject, FAILED, f"{type(e).__name__}: {said}", remedy)


def check_software() -> Finding:
    """Versions of this package, Python and the libraries."""
    found = software()
    shown = {"vit_jax": vit_jax.__version__} | {name: found[name] for name in _SHOWN}
    builds = [found["tensorflow-cpu"], found["tensorflow"]]
    shown["tensorflow"] = next((version for version in builds if version != _ABSENT), _ABSENT)
    text = ", ".join(f"{name} {version}" for name, version in shown.items())
    if _ABSENT in shown.values():
        return Finding("software", FAILED, text, "pip install -e '.' installs what is missing")
    return Finding("software", OK, text)


def check_devices(platform: str | None = None) -> Finding:
    """The devices that JAX finds, and their memory; `platform`: `mesh.platform`."""
    import jax

    from vit_jax.devices.chips import memory_limit
    from vit_jax.devices.flops import format_bytes
    from vit_jax.devices.mesh import accelerators_on_host, start_backend

    start_backend(platform)
    devices = jax.devices()
    text = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    if limit := memory_limit(jax.local_devices()[0]):
        text += f", {format_bytes(limit)} each"
    unused = accelerators_on_host() if devices[0].platform == "cpu" else []
    if unused and platform != "cpu":
        remedy = "pip install -e '.[cuda]' or '.[tpu]'; for the CPU: --config.mesh.platform=cpu"
        return Finding("devices", WARNING, f"{text}; unused: {', '.join(unused)}", remedy)
    return Finding("devices", OK, text)


def check_memory(workdir: epath.Path | None) -> Finding:
    """Free memory of the host, and free disk at `workdir` (None: the current folder)."""
    from vit_jax.devices.flops import format_bytes

    memory = psutil.virtual_memory()
    local: os.PathLike[str] = pathlib.Path.cwd()
    if workdir is not None and not is_in_bucket(workdir):
        local = next(p for p in [workdir, *workdir.parents] if p.exists())
    disk = shutil.disk_usage(local)
    text = (
        f"{format_bytes(memory.available)} of {format_bytes(memory.total)} memory free, "
        f"{os.cpu_count()} cores; {format_bytes(disk.free)} free at {local}"
    )
    free = {"memory": memory.available, "disk": disk.free}
    if little := [name for name, size in free.items() if size < _LITTLE]:
        return Finding("memory", WARNING, text, f"free some {' and '.join(little)}")
    return Finding("memory", OK, text)


def check_decoding(data_dir: str | None, pixel_range: tuple[float, ...] | None = None) -> Finding:
    """CPU time to decode a JPEG of 500 x 375 pixels, or some images below `data_dir`."""
    from vit_jax.data.host_tf import tf
    from vit_jax.data.images.bits import unused_bits
    from vit_jax.data.images.formats import Reading, to_known_format, to_pixels

    paths = [] if data_dir is None else some_images(os.path.expanduser(data_dir))
    what = f"{len(paths)} images of {data_dir}" if paths else "a JPEG of 500 x 375 pixels made here"
    images, broken = [path.read_bytes() for path in paths] or [_made_image()] * _IMAGES, 0
    known, reading = list[bytes](), Reading(pixel_range=pixel_range)
    with tf.device("cpu"):
        since = time.process_time()
        for image in images:
            try:
                known.append(to_known_format(image, reading))
                to_pixels(tf.constant(known[-1]))
            except (OSError, tf.errors.OpError):
                broken += 1
        cpu_s = (time.process_time() - since) / len(images)
    text = f"{1000 * cpu_s:.2g} ms of CPU an image: {what}"
    if broken:
        remedy = "training leaves them out and names each; repair or remove them"
        return Finding("decoding", WARNING, f"{text}; {broken} cannot be decoded", remedy)
    if fault := unused_bits(known):
        return Finding("decoding", WARNING, f"{text}; {fault[0]}", fault[1])
    return Finding("decoding", OK, text)


def some_images(folder: str) -> list[pathlib.Path]:
    """The first images below a local folder, which may hold millions, or beside a list."""
    from vit_jax.data.images.formats import EXTENSIONS

    root = pathlib.Path(folder)
    found = (root.parent if root.is_file() else root).rglob("[!.]*")
    images = (path for path in found if path.suffix.lower() in EXTENSIONS and path.is_file())
    return list(itertools.islice(images, _IMAGES))


def _made_image() -> bytes:
    """A JPEG about as large as one of ImageNet."""
    from PIL import Image

    coarse = np.random.default_rng(0).integers(0, 256, (25, 33, 3), np.uint8)
    jpeg = io.BytesIO()
    Image.fromarray(coarse).resize((500, 375)).save(jpeg, "JPEG", quality=90)
    return jpeg.getvalue()


def check_data_dir(data_dir: str) -> Finding:
    """Whether `data_dir`, a folder, a bucket or a list, can be read and is not empty."""
    path = files.absolute(data_dir)
    if not path.exists():
        what = f"{path}: no such file or folder"
        return Finding("data folder", FAILED, what, remedy_of_path(data_dir))
    if path.is_file():
        return Finding("data folder", OK, f"{path}: a file")
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return Finding("data folder", FAILED, f"{path}: is empty", "put the data there")
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return Finding("data folder", OK, f"{path}: {len(names)} entries: {shown}")


def is_in_bucket(path: str | os.PathLike) -> bool:
    return "://" in os.fspath(path)


def remedy_of_path(path: str | os.PathLike) -> str:
    """The remedy where a local path or a bucket cannot be reached."""
    if not is_in_bucket(path):
        return "check the path, its mount and your rights"
    return (
        "check the name of the bucket, the network, and your credentials (for gs://: "
        "gcloud auth application-default login)"
    )


def check_workdir(workdir: epath.Path) -> Finding:
    """Whether `workdir` can be written: a bucket gets a small object, which is removed again."""
    from vit_jax.run.setup.workdir import check_writable

    check_writable(workdir)
    if not is_in_bucket(workdir):
        return Finding("workdir", OK, f"{workdir}: can be written")
    probe = workdir / f"doctor-{secrets.token_hex(4)}"
    probe.write_bytes(b"")
    probe.read_bytes()
    probe.unlink()
    return Finding("workdir", OK, f"{workdir}: written, read and removed an object")


def check_wandb(timeout_s: float) -> Finding:
    """Whether W&B is installed, has a key, and its host answers."""
    if importlib.util.find_spec("wandb") is None:
        return Finding("W&B", FAILED, _ABSENT, "pip install -e '.[wandb]'")
    if os.environ.get("WANDB_MODE") in ("offline", "disabled"):
        return Finding("W&B", OK, f"WANDB_MODE={os.environ['WANDB_MODE']}: sends nothing")
    url = os.environ.get("WANDB_BASE_URL", _WANDB)
    host = urllib.parse.urlparse(url).hostname or url
    has_key = bool(os.environ.get("WANDB_API_KEY"))
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        has_key = has_key or netrc.netrc().authenticators(host) is not None
    if not has_key:
        return Finding("W&B", FAILED, f"no key for {host}",
                       "run wandb login, or set WANDB_API_KEY")  # fmt: skip
    with contextlib.suppress(urllib.error.HTTPError):  # an answer too
        urllib.request.urlopen(url, timeout=timeout_s).close()
    return Finding("W&B", OK, f"{url} answers; a key is set")


def check_cluster(coordinator: str | None, timeout_s: float) -> Finding:
    """The cluster that this process belongs to, and whether `coordinator` (HOST:PORT) answers."""
    from vit_jax.job.processes import find_cluster

    cluster = find_cluster()
    text = "no cluster detected: one process"
    if cluster is not None:
        text = f"{cluster.name or cluster.__name__}: {cluster.get_process_count()} processes"
    if coordinator is None:
        return Finding("cluster", OK, text)
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"--coordinator={coordinator}: needs HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    return Finding("cluster", OK, f"{text}; {coordinator} answers")


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    """Collects what the package logs."""
    from vit_jax.run import terminal

    said = io.StringIO()
    terminal.log_to_console(Console(file=said))
    try:
        yield said
    finally:
        terminal.log_to_console(Console(stderr=True), quiet=True)  # as before


def check_training(asked: Settings, workdir: epath.Path | None, runs: list["Run"]) -> Finding:
    """Check settings against their data and the devices, and report what `train` would choose.

    Nothing is written. Without a `workdir` the run counts as new. The run is added to `runs`.
    """
    from vit_jax.models.dot_product import choose_attention
    from vit_jax.planning.search import choose_layout
    from vit_jax.run.build import describe, prepare

    unused = epath.Path(tempfile.gettempdir()) / f"vit_jax-doctor-{secrets.token_hex(4)}"
    by_calculation = functools.partial(choose_layout, may_compile=False)  # in seconds
    run = prepare(asked, workdir or unused, by_calculation)
    runs.append(run)
    with captured() as said:
        describe(run)
    attention = choose_attention(run.mesh.devices.flat[0].platform).__name__
    order = f"order of data: {run.settings.data.order}; attention: {attention}"
    return Finding("train would choose", OK, said.getvalue() + order)


def estimate_time(run: "Run") -> Finding:
    """The time of the whole run, from some steps on these devices that wait for their batches.

    A few batches lie ready at first, so the later half of the steps counts.
    """
    import jax

    from vit_jax.devices.chips import memory_limit
    from vit_jax.devices.flops import format_bytes
    from vit_jax.diagnosis.benchmarks.rounds import measure
    from vit_jax.diagnosis.benchmarks.step import compile_steps
    from vit_jax.run.loop import Batches

    if run.settings.data.keep_features:
        text = "no estimate: the first start computes the features of all images"
        return Finding("time", OK, text)
    number, device = run.experiment.total_steps, run.mesh.local_devices[0]
    with jax.set_mesh(run.mesh), Batches(run, 0) as batches:
        take_steps, _, memory = compile_steps(run.experiment, run.settings.data.num_classes)
        free = memory_limit(device) or psutil.virtual_memory().available // run.mesh.size
        if memory.total > free:
            text = f"no estimate: a step needs {format_bytes(memory.total)} a device; free: "
            remedy = "try a smaller global_batch_size, or `vit_jax plan` for larger devices"
            return Finding("time", WARNING, text + format_bytes(free), remedy)
        calls = {"input": lambda: next(batches, None), "step": lambda: take_steps(1)}
        measure(calls, 1)
        first_s = sum(costs[0].wall_s for costs in measure(calls, 1).values())
        most = min(_MOST, max(number - 2, 1))
        costs = measure(calls, int(np.clip(_MEASURED_S / first_s, _FEWEST, most)))
    late = {k: [c.wall_s for c in found[len(found) // 2 :]] for k, found in costs.items()}
    wait_s, step_s = (statistics.median(late[name]) for name in calls)
    total = datetime.timedelta(seconds=math.ceil(number * (wait_s + step_s)))
    text = (
        f"about {total} (estimate): {number:,} steps of {1e3 * step_s:.3g} ms, and "
        f"{1e3 * wait_s:.3g} ms of waiting for images, as measured now in {len(costs['step'])} "
        "steps; without evaluations and saves"
    )
    return Finding("time", OK, text)


def check_images(run: "Run") -> Finding:
    """Reads, decodes and crops every image of the run's data, and names each that fails."""
    from vit_jax.config import eval_splits, train_split
    from vit_jax.data import host_eval_batches
    from vit_jax.data.loading import why_masked
    from vit_jax.data.preprocessing import eval_batch, parse_preprocessing

    settings, made = run.settings, parse_preprocessing(run.settings)
    specs = {train_split(settings.data): run.experiment.batch}
    if settings.data.keep_features:  # the batches have no images
        specs = {
            key: eval_batch(settings.data, _IMAGES, made.host_ops, "data.ops") for key in specs
        }
    for name, entry in settings.evals.items():
        spec = eval_batch(settings.data, _IMAGES, made.eval_ops[name], "ops")
        specs |= {key: specs.get(key, spec) for key in eval_splits(settings.data, entry).values()}
    names, lines = set[str](), dict[str, str]()  # an image may be in several splits
    with captured():  # each is named below
        for key, spec in specs.items():
            source, rows = run.sources[key], np.arange(spec.size)
            found = [f"{key.data_dir}/{source.record_name(i)}".partition(" (record ")[0]
                     for i in range(source.num_examples)]  # fmt: skip
            names |= {*found}
            ops = [ops for crop in spec.crops.values() for ops in crop.distinct_ops]
            for batch in host_eval_batches(source, spec, rows=rows):
                broken = batch["id"][(batch["mask"] == 0) & (batch["id"] >= 0)]
                lines |= {found[i]: f"{source.record_name(i)}: {why_masked(source, ops, i)[1]}"
                          for i in broken}  # fmt: skip
    said = f"{len(names):,} images read; {len(lines):,} fail{':' * bool(lines)}"
    text = "\n".join([said, *lines.values()])
    remedy = "the run leaves them out; repair or remove them" * bool(lines)
    return Finding("all images", WARNING if lines else OK, text, remedy)
