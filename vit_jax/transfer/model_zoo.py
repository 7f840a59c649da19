"""Published files by name, and downloads of files by address, or from the Hub, into a cache.

Sources of addresses and classes: the README of github.com/google-research/vision_transformer
for the ViT and AugReg releases, of github.com/google-research/big_transfer for BiT,
github.com/google-research/big_vision for "better plain ViT", and timm's models/efficientnet.py for
EfficientNet. None of them publishes hashes. The server of most files sends a hash with the file,
which is checked. Files of the Hugging Face Hub are fetched as base/hub.py says.
"""

import base64
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import IO, NamedTuple

import huggingface_hub
from etils import epath
from huggingface_hub import constants, errors

from vit_jax.base import hub
from vit_jax.base.addresses import HIDDEN, hide, reveal
from vit_jax.base.errors import InputError, nearest
from vit_jax.base.files import absolute, cache_folder, replaced, write_whole
from vit_jax.data import tokenizers
from vit_jax.data.division import HASHES
from vit_jax.transfer.source import CONFIGS, OPEN_CLIP, Source
from vit_jax.transfer.tensors import INDEX, WEIGHTS

logger = logging.getLogger("vit_jax")

_NOTE = "fetched.json"  # address and hashes, next to the fetched files
_TIMEOUT_S = 60  # maximum time without a byte
_SINGLE = (".npz", ".safetensors")
_PICKLES = (".pth", ".pth.tar", ".pt", ".bin")
_I21K_CLASSES = 21_843


class Published(NamedTuple):
    """A published file.

    address: its URL, or "timm:NAME" on the Hugging Face Hub.
    num_classes: number of classes of its head.
    """

    address: str
    num_classes: int

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
        name, tuned = model.replace("_", "/"), f"{_VIT}/imagenet21k+imagenet2012/{model}"
        table[f"{name}@imagenet21k"] = Published(f"{_VIT}/imagenet21k/{model}.npz", _I21K_CLASSES)
        if model != "ViT-H_14":
            table[f"{name}@imagenet2012"] = Published(f"{tuned}.npz", 1000)
        if model in ("ViT-B_16", "ViT-L_16"):
            table[f"{name}@imagenet2012-224"] = Published(f"{tuned}-224.npz", 1000)
    # The recommended models: model, file name, learning rate of fine-tuning at 384 px.
    for name, file, rate in (
        ("ViT-L/16", "L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0", "0.01"),
        ("ViT-B/16", "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0", "0.03"),
        ("ViT-S/16", "S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0", "0.03"),
        ("R50+ViT-L/32", "R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1", "0.01"),
        ("R26+ViT-S/32", "R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", "0.01"),
        ("ViT-Ti/16", "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", "0.03"),
        ("ViT-B/32", "B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", "0.01"),
        ("ViT-S/32", "S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0", "0.01"),
        ("R+ViT-Ti/16", "R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", "0.03"),
    ):
        tuned = f"{file}--imagenet2012-steps_20k-lr_{rate}-res_384"
        table[f"{name}@augreg"] = Published(f"{_VIT}/augreg/{file}.npz", _I21K_CLASSES)
        table[f"{name}@augreg-imagenet2012"] = Published(f"{_VIT}/augreg/{tuned}.npz", 1000)
    table["ViT-S/16@better-plain"] = Published("gs://big_vision/vit_s16_i1k_90ep.npz", 1000)
    for size in ("R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4"):
        table[f"BiT-{size}@imagenet21k"] = Published(f"{_BIT}/BiT-M-{size}.npz", _I21K_CLASSES)
        table[f"BiT-{size}@imagenet2012"] = Published(f"{_BIT}/BiT-S-{size}.npz", 1000)
    efficientnets = {
        **{f"{size}@noisy-student": "ns_jft_in1k" for size in (*(f"B{i}" for i in range(8)), "L2")},
        "L2@noisy-student-475": "ns_jft_in1k_475",
        **{f"B{i}@advprop": "ap_in1k" for i in range(9)},
    }
    for name, tag in efficientnets.items():
        address = f"timm:tf_efficientnet_{name.partition('@')[0].lower()}.{tag}"
        table[f"EfficientNet-{name}"] = Published(address, 1000)
    return table


PUBLISHED = _table()


def by_address(source: str | os.PathLike) -> Published | None:
    """The published file with the name or address `source`; None if there is none."""
    source = os.fspath(source)
    addresses = {p.address.replace(_GOOGLE, "gs://"): p for p in PUBLISHED.values()}
    return PUBLISHED.get(source) or addresses.get(source.replace(_GOOGLE, "gs://"))


def loss_by_file_name(name: str, num_classes: int | None) -> str | None:
    """The loss of the published files with that file name and number of classes, or None.

    Releases share file names, such as ViT-B_16.npz, but then differ in the number of classes.
    """
    same = (p for p in PUBLISHED.values() if p.address.endswith(f"/{name}"))
    return next((p.loss for p in same if p.num_classes == num_classes), None)


# Start of a source on the Hugging Face Hub -> start of the repository's name.
_ON_HUB = {"hf:": "", "timm:": "timm/"}


def is_fetched(source: str | os.PathLike) -> bool:
    """Whether `source` is a name in PUBLISHED, on the Hub, or an address."""
    source = os.fspath(source)
    return "://" in source or source.startswith(tuple(_ON_HUB)) or source in PUBLISHED


def repository_of(source: str) -> tuple[str, str | None] | None:
    """(repository, revision or None) of a source on the Hub by name; None for other sources."""
    source = PUBLISHED[source].address if source in PUBLISHED else source
    for start, owner in _ON_HUB.items():
        if source.startswith(start):
            name, _, revision = source.removeprefix(start).partition("@")
            return owner + name, revision or None
    return None


def locate(source: str | os.PathLike) -> epath.Path:
    """The file or folder of `source`: a path, an address, "hf:..." or "timm:...", or a name.

    A single remote file is fetched into the cache, $XDG_CACHE_HOME/vit_jax/pretrained, with its
    JSON file if there is one; a file of the Hugging Face Hub into the cache of huggingface_hub. A
    folder in an object store is read in place.

    Raises:
      InputError: if the source does not exist or is a pickle, or the download is incomplete or
        corrupt.
    """
    source = os.fspath(source)
    address = PUBLISHED[source].address if source in PUBLISHED else reveal(source)
    if address.endswith(_PICKLES):
        raise InputError(
            f"init_from={source!r}: a pickle may run code and is never loaded; write its arrays to "
            "a .safetensors file as docs/how_to/weights.md shows"
        )
    if (named := repository_of(address)) is not None:
        return fetch_from_hub(named[0], revision=named[1], source=source)
    at_web, is_single = address.startswith(("http://", "https://")), address.endswith(_SINGLE)
    if at_web or ("://" in address and is_single):
        if not urllib.parse.urlsplit(address).path.endswith(_SINGLE):
            raise InputError(f"init_from={source!r}: the address must end in .npz or .safetensors")
        if HIDDEN in address:
            raise InputError(
                f"init_from={source!r}: what is hidden here is not stored; give the whole address "
                "again, as at the first start"
            )
        if (on_hub := parse_address(address)) is not None:
            repo_id, file, revision = on_hub
            return fetch_from_hub(repo_id, file, revision=revision, source=source)
        return _cached(source, address)
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
    if versions := [name for name in PUBLISHED if name.startswith(f"{source}@")]:
        return f"; published are {', '.join(versions)}"
    if re.fullmatch(r"(vit|deit)3?_\w+patch\d+[\w.]*|tf_efficientnet_[\w.]+", source):
        return f"; timm's models are called timm:{source}"
    if re.fullmatch(r"[\w.-]+/(vit|deit)-[\w.-]*patch[\w.-]*", source):
        return f"; Hugging Face's models are called hf:{source}"
    is_name = "@" in source or re.match(r"(r\d*\+)?(vit|deit|bit|efficientnet)-", source.lower())
    return f"; {nearest(source, list(PUBLISHED))}" if is_name else ""


def _files_beside(name: str, folder: pathlib.Path) -> Iterator[str]:
    """The files that may describe the weights in the file `name` of `folder`, to fetch in turn.

    A config that is fetched says whether there is a text tower, which has a tokenizer.
    """
    config = CONFIGS.get(name, f"{name.rpartition('.')[0]}.json")
    yield config
    if name == WEIGHTS:
        yield "preprocessor_config.json"
    yield f"{name}{HASHES}"
    path = folder / config
    if path.exists() and re.search(r'"text_(config|cfg)"', path.read_text(errors="replace")):
        yield from tokenizers.FILES


def _entrance(weights: pathlib.Path) -> epath.Path:
    """The path to read of a fetched file: the folder of WEIGHTS, or the file."""
    return epath.Path(weights.parent if weights.name == WEIGHTS else weights)


def _cached(source: str, address: str) -> epath.Path:
    """The file at `address`, fetched unless the cache holds it unchanged."""
    folder = cache_folder("pretrained") / hashlib.sha256(address.encode()).hexdigest()[:16]
    name = pathlib.PurePosixPath(urllib.parse.urlsplit(address).path).name
    note = folder / _NOTE
    if note.exists():
        written = json.loads(note.read_text())["sha256"]
        if all((folder / f).exists() and sha256(folder / f) == written[f] for f in written):
            return _entrance(folder / name)
        logger.warning("%s has changed since it was fetched; fetching it again", folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    logger.info("fetching %s", hide(address))
    _fetch(source, address, folder / name)
    fetched = [name] + [
        file
        for file in _files_beside(name, folder)
        if _fetch(source, urllib.parse.urljoin(address, file), folder / file, optional=True)
    ]
    digests = {file: sha256(folder / file) for file in fetched}
    facts = {"address": hide(address), "sha256": digests}
    write_whole(epath.Path(note), json.dumps(facts, indent=1))
    logger.info("fetched %s to %s", hide(address), folder)
    return _entrance(folder / name)


def forget(path: epath.Path) -> None:
    """Mark the unreadable file or folder `path`, if it is in the cache, to be fetched again."""
    folder = pathlib.Path(path if path.is_dir() else path.parent)
    if folder.parent == cache_folder("pretrained"):
        (folder / _NOTE).unlink(missing_ok=True)


def _fetch(source: str, address: str, target: pathlib.Path, *, optional: bool = False) -> bool:
    """Fetch `address` to `target`, atomically; False if an `optional` file does not exist."""
    try:
        with replaced(target) as file:
            if address.startswith(("http://", "https://")):
                _download(address, file)
            else:
                opened: IO[bytes] = epath.Path(address).open("rb")
                with opened as stored:
                    shutil.copyfileobj(stored, file)
    except Exception as e:  # whatever the client of an object store raises
        refused = isinstance(e, urllib.error.HTTPError) and 400 <= e.code < 500
        if optional and (refused or isinstance(e, FileNotFoundError)):
            return False
        raise InputError(
            f"init_from={source!r}: {hide(address)} cannot be fetched ({e}); check the "
            "connection, or fetch it by other means and give the path"
        ) from None
    return True


def _download(address: str, file: IO[bytes]) -> None:
    """Download to `file`; raises ValueError if size or MD5 differ from the server's headers."""
    md5 = hashlib.md5(usedforsecurity=False)
    parts = urllib.parse.urlsplit(address)
    user, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(parts._replace(netloc=host).geturl())
    if user:
        basic = base64.b64encode(urllib.parse.unquote_to_bytes(user)).decode()
        request.add_unredirected_header("Authorization", f"Basic {basic}")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        headers = response.headers
        while chunk := response.read(1 << 20):
            file.write(chunk)
            md5.update(chunk)
    if int(headers.get("Content-Length", file.tell())) != file.tell():
        raise ValueError(f"got {file.tell()} of {headers['Content-Length']} bytes")
    # "crc32c=...,md5=...", in one header or several.
    hashes = ",".join(headers.get_all("x-goog-hash", []))
    stated = [h.strip()[4:] for h in hashes.split(",") if h.strip().startswith("md5=")]
    found = base64.b64encode(md5.digest()).decode()
    if stated and stated[0] != found:
        raise ValueError(f"its MD5 is {found}, but the server states {stated[0]}")


def sha256(path: pathlib.Path | epath.Path) -> str:
    """The SHA-256 of a file on a disk."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_address(address: str) -> tuple[str, str, str] | None:
    """(repository, file, revision) of a file's address on the Hub; None for other addresses."""
    match = re.fullmatch(
        re.escape(constants.ENDPOINT) + r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?#]+)(\?[^#]*)?",
        address,
    )
    return match and (match[1], urllib.parse.unquote(match[3]), urllib.parse.unquote(match[2]))


def fetch_from_hub(
    repo_id: str, file: str = WEIGHTS, *, revision: str | None = None, source: str | None = None
) -> epath.Path:
    """Fetches weights and the files that describe them, unless the cache has this version of them.

    Args:
      repo_id: ORGANISATION/NAME, such as google/vit-base-patch16-224.
      file: the path of the weights in the repository.
      revision: a branch, a tag or a commit; None is the newest commit of the default branch.
      source: the value of `init_from`, for errors; by default "hf:" and `repo_id`.

    Returns:
      The cached file; for model.safetensors the folder that holds it and those files, all of
      one commit.

    Raises:
      InputError: if the repository, the revision or the file does not exist or may not be read, or
        if the Hub is not reached and the cache lacks a file.
    """
    hub.be_quiet()
    source = f"hf:{repo_id}" if source is None else source
    logger.info("asking %s for %s", constants.ENDPOINT, source)
    folder = file.rpartition("/")[0]
    try:
        weights = _fetch_weights(repo_id, file, revision)
        commit = weights.parents[file.count("/")].name
        for beside in _files_beside(weights.name, weights.parent):
            _fetch_optional(repo_id, f"{folder}/{beside}".lstrip("/"), commit)
    except hub.ERRORS as e:
        raise InputError(f"init_from={source!r}: {_describe(e, repo_id, file, revision)}") from None
    return _entrance(weights)


def _fetch_weights(repo_id: str, file: str, revision: str | None) -> pathlib.Path:
    """The cached weights: `file`; in a repository without WEIGHTS its shards, or open_clip's.

    With shards it is the path that WEIGHTS would have.
    """
    missing = None
    for name in (file, INDEX, OPEN_CLIP) if file == WEIGHTS else (file,):
        try:
            found = pathlib.Path(huggingface_hub.hf_hub_download(repo_id, name, revision=revision))
        except errors.EntryNotFoundError as e:
            missing = missing or e
            continue
        return _fetch_shards(repo_id, found) if name == INDEX else found
    assert missing is not None
    raise missing


def _fetch_shards(repo_id: str, index: pathlib.Path) -> pathlib.Path:
    """Fetch the shards that a cached INDEX names; the path that WEIGHTS would have."""
    for shard in Source(epath.Path(index.parent)).files():
        try:
            huggingface_hub.hf_hub_download(repo_id, shard.name, revision=index.parent.name)
        except errors.LocalEntryNotFoundError:
            raise
        except errors.EntryNotFoundError:
            raise InputError(
                f"hf:{repo_id}: has no file {shard.name}, which its {INDEX} names; the repository "
                "is not complete, so choose another, or a revision of it"
            ) from None
    return index.with_name(WEIGHTS)


def _fetch_optional(repo_id: str, file: str, commit: str) -> None:
    """Fetches a file that the commit may lack; raises if that cannot be found out."""
    try:
        huggingface_hub.hf_hub_download(repo_id, file, revision=commit)
    except errors.LocalEntryNotFoundError:  # not reached; an earlier answer may be in the cache
        # A path: cached; None: unknown; anything else: the commit is known to lack the file.
        cached = huggingface_hub.try_to_load_from_cache(repo_id, file, revision=commit)
        if cached is None or isinstance(cached, str):
            raise
    except errors.EntryNotFoundError:
        pass


def _describe(error: Exception, repo_id: str, file: str, revision: str | None) -> str:
    """The cause and the remedy."""
    at = f"{constants.ENDPOINT}/{repo_id}"
    match error:
        case errors.GatedRepoError() | errors.LocalEntryNotFoundError():
            pass
        case errors.RepositoryNotFoundError() if re.fullmatch(r"timm/[^.]+", repo_id):
            return (
                f"{at} does not exist; timm's names end in a tag, as in "
                "timm:vit_base_patch16_224.augreg_in21k; https://huggingface.co/timm lists them"
            )
        case errors.EntryNotFoundError():
            return f"{at} has no file {file}; choose a repository with {WEIGHTS}"
    return hub.describe(error, repo_id, file, revision)
