"""Published files by name, and downloads of files by address into a cache.

Sources of addresses, sizes and classes: the README of github.com/google-research/vision_transformer
for the ViT and AugReg releases, of github.com/google-research/big_transfer for BiT,
github.com/google-research/big_vision for "better plain ViT", and timm's models/efficientnet.py for
EfficientNet. None of them publishes hashes. The server of most files sends a hash with the file,
which is checked.
"""

import base64
import hashlib
import http.client
import json
import logging
import os
import pathlib
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, NamedTuple

from etils import epath

from vit_jax.errors import InputError, nearest
from vit_jax.files import absolute, cache_folder, replaced, write_whole
from vit_jax.transfer.hub import fetch_from_hub, files_beside, parse_address

logger = logging.getLogger("vit_jax")

_NOTE = "fetched.json"  # address and hashes, next to the fetched files
_ATTEMPTS = 3
_TIMEOUT_S = 60  # maximum time without a byte
_CHUNK_BYTES = 1 << 20
_SINGLE = (".npz", ".safetensors")
_I21K_CLASSES = 21_843


class Published(NamedTuple):
    """A published file.

    address: its URL, or "timm:NAME" on the Hugging Face Hub.
    num_classes: number of classes of its head.
    mebibytes: its rounded size, or None if that is not published.
    value_range: the model's input values for black and white; None: stated beside the file.
    """

    address: str
    num_classes: int
    mebibytes: int | None = None
    value_range: tuple[float, float] | None = (-1.0, 1.0)

    @property
    def loss(self) -> str:
        """The loss of its last training: sigmoid for ImageNet-21k, softmax for ImageNet-1k.

        Source: github.com/google-research/big_vision, configs/vit_i21k.py, bit_i21k.py,
        bit_i1k.py and vit_s16_i1k.py.
        """
        return "sigmoid" if self.num_classes == _I21K_CLASSES else "softmax"


_GOOGLE = "https://storage.googleapis.com/"  # the same objects as at gs://
_VIT = f"{_GOOGLE}vit_models"
_BIT = f"{_GOOGLE}bit_models"


def _table() -> dict[str, Published]:
    table = {}
    for model in ("ViT-B_16", "ViT-B_32", "ViT-L_16", "ViT-L_32", "ViT-H_14", "R50+ViT-B_16"):
        name = model.replace("_", "/")
        table[f"{name}@imagenet21k"] = Published(f"{_VIT}/imagenet21k/{model}.npz", _I21K_CLASSES)
        if model != "ViT-H_14":
            address = f"{_VIT}/imagenet21k+imagenet2012/{model}.npz"
            table[f"{name}@imagenet2012"] = Published(address, 1000)
    for model in ("ViT-B_16", "ViT-L_16"):
        address = f"{_VIT}/imagenet21k+imagenet2012/{model}-224.npz"
        table[f"{model.replace('_', '/')}@imagenet2012-224"] = Published(address, 1000)
    # The recommended models: model, file name, MiB, learning rate of fine-tuning at 384 px.
    for name, file, mebibytes, rate in (
        ("ViT-L/16", "L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0", 1243, "0.01"),
        ("ViT-B/16", "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0", 391, "0.03"),
        ("ViT-S/16", "S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0", 115, "0.03"),
        ("R50+ViT-L/32", "R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1", 1337,
         "0.01"),
        ("R26+ViT-S/32", "R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", 170,
         "0.01"),
        ("ViT-Ti/16", "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", 37, "0.03"),
        ("ViT-B/32", "B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", 398, "0.01"),
        ("ViT-S/32", "S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0", 118, "0.01"),
        ("R+ViT-Ti/16", "R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", 40, "0.03"),
    ):  # fmt: skip
        tuned = f"{file}--imagenet2012-steps_20k-lr_{rate}-res_384"
        table[f"{name}@augreg"] = Published(f"{_VIT}/augreg/{file}.npz", _I21K_CLASSES, mebibytes)
        table[f"{name}@augreg-imagenet2012"] = Published(f"{_VIT}/augreg/{tuned}.npz", 1000)
    table["ViT-S/16@better-plain"] = Published("gs://big_vision/vit_s16_i1k_90ep.npz", 1000)
    for size in ("R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4"):
        table[f"BiT-{size}@imagenet21k"] = Published(f"{_BIT}/BiT-M-{size}.npz", _I21K_CLASSES)
        table[f"BiT-{size}@imagenet2012"] = Published(f"{_BIT}/BiT-S-{size}.npz", 1000)
    for variant in ("B0", "B1", "B2", "B3", "B4", "B5", "B6", "B7", "L2"):
        address = f"timm:tf_efficientnet_{variant.lower()}.ns_jft_in1k"
        table[f"EfficientNet-{variant}@noisy-student"] = Published(address, 1000, value_range=None)
    address = "timm:tf_efficientnet_l2.ns_jft_in1k_475"
    table["EfficientNet-L2@noisy-student-475"] = Published(address, 1000, value_range=None)
    for number in range(9):
        address = f"timm:tf_efficientnet_b{number}.ap_in1k"
        table[f"EfficientNet-B{number}@advprop"] = Published(address, 1000, value_range=None)
    return table


PUBLISHED = _table()


def by_address(source: str | os.PathLike) -> Published | None:
    """The published file with the name or address `source`; None if there is none."""
    source = os.fspath(source)
    if source in PUBLISHED:
        return PUBLISHED[source]
    address = source.replace(_GOOGLE, "gs://")
    return next(
        (p for p in PUBLISHED.values() if p.address.replace(_GOOGLE, "gs://") == address), None
    )


def loss_by_file_name(name: str, num_classes: int | None) -> str | None:
    """The loss of the published files with that file name and number of classes, or None.

    Releases share file names, such as ViT-B_16.npz, but then differ in the number of classes.
    """
    same = (p for p in PUBLISHED.values() if p.address.endswith(f"/{name}"))
    return next((p.loss for p in same if p.num_classes == num_classes), None)


# Start of a source on the Hugging Face Hub -> start of the repository's name.
_ON_HUB = {"hf:": "", "timm:": "timm/"}


def is_on_hub(source: str | os.PathLike) -> bool:
    """Whether `source` names a repository of the Hub, as "hf:ORGANISATION/NAME" or "timm:NAME"."""
    return os.fspath(source).startswith(tuple(_ON_HUB))


def is_published(source: str | os.PathLike) -> bool:
    """Whether others can fetch `source`: a name in PUBLISHED, on the Hub, or at a web address."""
    at_web = os.fspath(source).startswith(("https://", "http://"))
    return at_web or is_on_hub(source) or by_address(source) is not None


def _fetch_repository(source: str) -> epath.Path:
    start = next(start for start in _ON_HUB if source.startswith(start))
    name, at, revision = source.removeprefix(start).partition("@")
    return fetch_from_hub(_ON_HUB[start] + name, revision=revision if at else None, source=source)


def locate(source: str | os.PathLike) -> epath.Path:
    """The file or folder of `source`: a path, an address, "hf:..." or "timm:...", or a name.

    A single remote file is fetched into the cache, $XDG_CACHE_HOME/vit_jax/pretrained, with its
    JSON file if there is one; a file of the Hugging Face Hub into the cache of huggingface_hub. A
    folder in an object store is read in place.

    Raises:
      InputError: if the source does not exist, or the download is incomplete or corrupt.
    """
    source = os.fspath(source)
    if source in PUBLISHED:
        known = PUBLISHED[source]
        if is_on_hub(known.address):
            return _fetch_repository(known.address)
        path = _cached(source, known.address)
        found = round(path.stat().length / 2**20)
        if known.mebibytes is not None and abs(found - known.mebibytes) > 1:
            raise InputError(
                f"init_from={source!r}: {known.address} has {found} MiB, but was published with "
                f"{known.mebibytes} MiB; fetch the file by other means and give the path"
            )
        return path
    if is_on_hub(source):
        return _fetch_repository(source)
    scheme = source.partition("://")[0] if "://" in source else None
    if scheme in ("http", "https") or (scheme and source.endswith(_SINGLE)):
        if not urllib.parse.urlsplit(source).path.endswith(_SINGLE):
            raise InputError(f"init_from={source!r}: the address must end in .npz or .safetensors")
        on_hub = parse_address(source)
        if on_hub is not None:
            return fetch_from_hub(*on_hub[:2], revision=on_hub[2], source=source)
        return _cached(source, source)
    path = absolute(source)
    try:
        there = path.exists()
    except Exception as e:  # whatever the client of an object store raises
        raise InputError(f"init_from={source!r}: cannot be reached ({e})") from None
    if not there:
        raise InputError(f"init_from={source!r}: no such file or directory{_hint(source)}")
    return path


def _hint(source: str) -> str:
    """A hint with similar published names if `source` looks like one, else ""."""
    versions = [name for name in PUBLISHED if name.startswith(f"{source}@")]
    if versions:
        return f"; published are {', '.join(versions)}"
    if re.fullmatch(r"(vit|deit)3?_\w+patch\d+[\w.]*|tf_efficientnet_[\w.]+", source):
        return f"; timm's models are called timm:{source}"
    if re.fullmatch(r"[\w.-]+/(vit|deit)-[\w.-]*patch[\w.-]*", source):
        return f"; Hugging Face's models are called hf:{source}"
    is_name = "@" in source or re.match(r"(r\d*\+)?(vit|deit|bit|efficientnet)-", source.lower())
    return f"; {nearest(source, list(PUBLISHED))}" if is_name else ""


def _cached(source: str, address: str) -> epath.Path:
    """The file at `address`, fetched unless the cache holds it unchanged."""
    folder = cache_folder("pretrained") / hashlib.sha256(address.encode()).hexdigest()[:16]
    name = pathlib.PurePosixPath(urllib.parse.urlsplit(address).path).name
    note = folder / _NOTE
    if note.exists():
        written = json.loads(note.read_text())
        if all(_sha256(folder / file) == digest for file, digest in written["sha256"].items()):
            return _entrance(folder, name)
        logger.warning("%s has changed since it was fetched; fetching it again", folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    logger.info("fetching %s", address)
    digests = {name: _fetch(source, address, folder / name)}
    for file in files_beside(name):
        digest = _fetch(source, urllib.parse.urljoin(address, file), folder / file, optional=True)
        if digest is not None:
            digests[file] = digest
    write_whole(epath.Path(note), json.dumps({"address": address, "sha256": digests}, indent=1))
    logger.info("fetched %s to %s", address, folder)
    return _entrance(folder, name)


def forget(path: epath.Path) -> None:
    """Mark the unreadable file or folder `path`, if it is in the cache, to be fetched again."""
    folder = pathlib.Path(path if path.is_dir() else path.parent)
    if folder.parent == cache_folder("pretrained"):
        (folder / _NOTE).unlink(missing_ok=True)


def _entrance(folder: pathlib.Path, name: str) -> epath.Path:
    return epath.Path(folder if name == "model.safetensors" else folder / name)


def _fetch(
    source: str, address: str, target: pathlib.Path, *, optional: bool = False
) -> str | None:
    """Fetch `address` to `target`, atomically; return its SHA-256, or None if it does not exist.

    Only an `optional` file may be missing.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with replaced(target) as file:
                if address.startswith(("http://", "https://")):
                    return _download(address, file)
                return _copy(address, file)
        except (OSError, http.client.HTTPException, ValueError) as e:
            refused = isinstance(e, urllib.error.HTTPError) and 400 <= e.code < 500
            gone = refused or isinstance(e, FileNotFoundError)
            if optional and gone:
                return None
            if gone or attempt == _ATTEMPTS:
                raise InputError(
                    f"init_from={source!r}: {address} cannot be fetched ({e}); check the "
                    "connection, or fetch it by other means and give the path"
                ) from None
            logger.warning("%s: %s; attempt %d of %d failed", address, e, attempt, _ATTEMPTS)


def _download(address: str, file: Any) -> str:
    """Download to `file`; raises ValueError if size or MD5 differ from the server's headers."""
    with urllib.request.urlopen(address, timeout=_TIMEOUT_S) as response:
        md5, sha256, size = hashlib.md5(usedforsecurity=False), hashlib.sha256(), 0
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            size += len(chunk)
            md5.update(chunk)
            sha256.update(chunk)
        stated = response.headers.get("Content-Length")
        if stated is not None and int(stated) != size:
            raise ValueError(f"got {size} of {stated} bytes")
        # "crc32c=...,md5=...", in one header or several.
        hashes = ",".join(response.headers.get_all("x-goog-hash", []))
        stated = [h.strip()[4:] for h in hashes.split(",") if h.strip().startswith("md5=")]
        found = base64.b64encode(md5.digest()).decode()
        if stated and stated[0] != found:
            raise ValueError(f"its MD5 is {found}, but the server states {stated[0]}")
    return sha256.hexdigest()


def _copy(address: str, file: Any) -> str:
    """Copy from an object store; any error becomes OSError, a missing object FileNotFoundError."""
    path = epath.Path(address)
    try:
        if not path.exists():
            raise FileNotFoundError("no such object")
        with path.open("rb") as stored:
            shutil.copyfileobj(stored, file, _CHUNK_BYTES)
    except FileNotFoundError:
        raise
    except Exception as e:
        raise OSError(str(e)) from e
    file.flush()
    return _sha256(pathlib.Path(file.name))


def _sha256(path: pathlib.Path) -> str | None:
    if not path.exists():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
