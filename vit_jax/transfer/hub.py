"""Files of the Hugging Face Hub, fetched and cached by huggingface_hub.

Its environment variables apply: HF_TOKEN, HF_HOME and HF_HUB_CACHE (the cache's folder),
HF_ENDPOINT (another server), HF_HUB_OFFLINE=1 (only the cache is read).
"""

import pathlib
import re
import urllib.parse

import huggingface_hub
from etils import epath
from huggingface_hub import constants, errors
from huggingface_hub.utils import logging

from vit_jax.data.division import HASHES
from vit_jax.errors import InputError

_WEIGHTS = "model.safetensors"


def files_beside(name: str) -> list[str]:
    """The files that may describe the weights in the file `name`, in the same folder."""
    stem = name.rpartition(".")[0]
    described = (
        ["config.json", "preprocessor_config.json"] if name == _WEIGHTS else [f"{stem}.json"]
    )
    return [*described, f"{stem}{HASHES}"]


def parse_address(address: str) -> tuple[str, str, str] | None:
    """(repository, file, revision) of a file's address on the Hub; None for other addresses."""
    match = re.fullmatch(
        re.escape(constants.ENDPOINT) + r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?#]+)(\?[^#]*)?",
        address,
    )
    return match and (match[1], urllib.parse.unquote(match[3]), urllib.parse.unquote(match[2]))


def fetch_from_hub(
    repo_id: str, file: str = _WEIGHTS, *, revision: str | None = None, source: str | None = None
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
    logging.disable_propagation()  # it prints its own messages
    source = f"hf:{repo_id}" if source is None else source
    folder, _, name = file.rpartition("/")
    try:
        weights = pathlib.Path(huggingface_hub.hf_hub_download(repo_id, file, revision=revision))
        commit = weights.relative_to(_snapshots(weights)).parts[0]
        for beside in files_beside(name):
            _fetch_optional(repo_id, f"{folder}/{beside}".lstrip("/"), commit)
    except (errors.HFValidationError, errors.HTTPError, OSError) as e:
        raise InputError(f"init_from={source!r}: {_describe(e, repo_id, file, revision)}") from None
    return epath.Path(weights.parent if name == _WEIGHTS else weights)


def _snapshots(path: pathlib.Path) -> pathlib.Path:
    """The folder of all cached commits of a repository, above a cached file."""
    return next(parent for parent in path.parents if parent.name == "snapshots")


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
    """What happened and what to do."""
    at = f"{constants.ENDPOINT}/{repo_id}"
    match error:
        case errors.HFValidationError():
            return f"{repo_id!r} is no repository name; needs ORGANISATION/NAME"
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return (
                f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not hold {repo_id} "
                "completely; unset it once, or copy the cache of a machine that has fetched it"
            )
        case errors.GatedRepoError():
            return f"{at} needs its terms accepted on that page, and then HF_TOKEN set"
        case errors.RepositoryNotFoundError() if re.fullmatch(r"timm/[^.]+", repo_id):
            return (
                f"{at} does not exist; timm's names end in a tag, as in "
                "timm:vit_base_patch16_224.augreg_in21k; https://huggingface.co/timm lists them"
            )
        case errors.RepositoryNotFoundError():
            return f"{at} does not exist, or is private; check the name, or set HF_TOKEN"
        case errors.RevisionNotFoundError():
            return f"{at} has no revision {revision!r}; take a branch, a tag or a commit"
        case errors.LocalEntryNotFoundError():
            reason = _first_line(error.__cause__ or error)
            return f"{at} is not reached ({reason}) and the cache lacks {file}; check the network"
        case errors.EntryNotFoundError():
            return f"{at} has no file {file}; choose a repository with {_WEIGHTS}"
    return f"{at}: {file} cannot be fetched ({_first_line(error)}); try again"


def _first_line(error: BaseException) -> str:
    """The error's first line; its class if it says nothing, as a timeout may."""
    return next(iter(str(error).splitlines()), type(error).__name__)
