"""The context in which the parts of a certificate run."""

from typing import NamedTuple

from etils import epath
from ml_collections import ConfigDict


class Context(NamedTuple):
    """The arguments of a part.

    output: folder of the certificate.
    models: whose steps are measured.
    config: of the user; None: none is given.
    words: the flags that connect the processes of a job.
    is_first: whether this is process 0 of its job.
    """

    output: epath.Path
    models: tuple[str, ...]
    config: ConfigDict | None
    words: tuple[str, ...]
    is_first: bool
