"""Checks of what a run would reach: its data, workdir, Weights & Biases, and cluster."""

import contextlib
import importlib.util
import netrc
import os
import pathlib
import secrets
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

from etils import epath

from vit_jax import files
from vit_jax.errors import InputError
from vit_jax.insight.findings import FAILED, OK, WARNING, Finding

_WANDB = "https://api.wandb.ai"
# Errors of TensorFlow, which reads and writes buckets.
_WHY_OUT_OF_REACH = {
    "NotFoundError": "there is no such bucket",
    "PermissionDeniedError": "access is denied",
    "UnauthenticatedError": "access is denied",
}


def check_data_dir(data_dir: str, data_name: str | None = None) -> Finding:
    """Whether `data_dir` can be read: a list, or a folder of pictures or of TFDS data sets.

    `data_name`: the data set that the config reads there; None: unknown.
    """
    from vit_jax.data.picture_list import find_lists

    path = files.absolute(data_dir)
    with _reaching(path):
        is_folder = path.is_dir()
        names = sorted(entry.name for entry in path.iterdir()) if is_folder else []
    if not is_folder:
        if data_name in (None, "list") and not is_in_bucket(path) and path.is_file():
            with _naming_the_flag(data_name):
                find_lists(path)
            return Finding("data folder", OK, f"{path}: a list of pictures")
        return Finding(
            "data folder", FAILED, f"{path}: no such folder", "check the path, its mount and rights"
        )
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    if not names:
        return Finding("data folder", FAILED, f"{path}: is empty", "put the data there")
    if data_name in (None, "folder") and not is_in_bucket(path):
        with _naming_the_flag(data_name):
            loose = _find_loose_pictures(pathlib.Path(path))
        if loose is not None:
            remedy = (
                "train needs a folder for each class (data.name=folder) or a list of labels "
                "(data.name=list); as they are, predict reads them, and so do objectives without "
                "labels (data.name=unlabelled)"
            )
            return Finding("data folder", WARNING, loose, remedy)
    return Finding("data folder", OK, f"{path}: {len(names)} entries: {shown}")


@contextlib.contextmanager
def _naming_the_flag(data_name: str | None) -> Iterator[None]:
    """Name --data_dir in faults unless the user typed a config, which has `data_name`."""
    try:
        yield
    except InputError as e:
        if data_name is not None:
            raise
        named = [fault.replace("--config.data.data_dir", "--data_dir") for fault in e.faults]
        raise InputError(*(f.replace("data.data_dir=", "--data_dir=") for f in named)) from None


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


def is_in_bucket(path: str | os.PathLike) -> bool:
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
        if isinstance(e, InputError) or not is_in_bucket(path):
            raise
        why = _WHY_OUT_OF_REACH.get(type(e).__name__, "cannot be reached")
        raise InputError(f"{_bucket_of(path)}: {why}; {remedy_of_bucket(path)}") from e


def remedy_of_bucket(path: str | os.PathLike) -> str:
    return (
        f"check the name of the bucket {_bucket_of(path)}, the network, and your credentials "
        "(for gs://: gcloud auth application-default login)"
    )


def check_workdir(workdir: epath.Path) -> Finding:
    """Whether `workdir` can be written: a bucket gets a small object, which is removed again."""
    from vit_jax.run.workdir import check_writable

    if not is_in_bucket(workdir):
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
