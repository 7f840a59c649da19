"""The context in which the parts of a certificate run."""

from typing import NamedTuple

from etils import epath

from vit_jax.config import Settings


class Context(NamedTuple):
    """The arguments of a part.

    output: folder of the certificate.
    models: whose steps are measured.
    asked: settings of the user; None: none are given.
    words: the flags that connect the processes of a job.
    is_first: whether this is process 0 of its job.
    """

    output: epath.Path
    models: tuple[str, ...]
    asked: Settings | None
    words: tuple[str, ...]
    is_first: bool
