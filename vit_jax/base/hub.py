"""The Hugging Face Hub: what its errors mean.

huggingface_hub fetches and caches files. Its environment variables apply: HF_TOKEN, HF_HOME and
HF_HUB_CACHE (the cache's folder), HF_ENDPOINT (another server), HF_HUB_OFFLINE=1 (only the cache is
read).
"""

from huggingface_hub import constants, errors
from huggingface_hub.utils import logging as hub_logging

ERRORS = (errors.HFValidationError, errors.HTTPError, OSError)  # that its functions raise


def be_quiet() -> None:
    """Leave messages to us: without a network each of six tries would give two lines."""
    hub_logging.disable_propagation()
    hub_logging.set_verbosity_error()


def describe(error: Exception, repository: str, wanted: str, revision: str | None) -> str:
    """The cause and the remedy.

    Args:
      error: one of ERRORS.
      repository: its path at the Hub.
      wanted: what was to be fetched.
      revision: of the repository, None for the newest.
    """
    at = f"{constants.ENDPOINT}/{repository}"
    match error:
        case errors.LocalEntryNotFoundError() if constants.HF_HUB_OFFLINE:
            return f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} lacks files; unset it once"
        case errors.GatedRepoError():
            return f"{at} needs its terms accepted on that page, and then HF_TOKEN set"
        case errors.RepositoryNotFoundError():
            return f"{at} does not exist, or is private; check the name, or set HF_TOKEN"
        case errors.RevisionNotFoundError():
            return f"{at} has no revision {revision!r}; take a branch, a tag or a commit"
        case errors.LocalEntryNotFoundError():
            reason = _first_line(error.__cause__ or error)
            return f"{at} is not reached ({reason}) and the cache lacks {wanted}; check the network"
    return f"{at}: {wanted} cannot be fetched ({_first_line(error)}); try again"


def _first_line(error: BaseException) -> str:
    """The error's first line; its class if it says nothing, as a timeout may."""
    return next(iter(str(error).splitlines()), type(error).__name__)
