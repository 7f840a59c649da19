"""Upgrades of config.json, one function from each format to the next.

FORMAT goes up when config.json changes; UPGRADES then gets the function from the last format. The
first of them comes after version 0.2.0: until then nothing is released, and nothing is upgraded.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vit_jax.errors import InputError

FORMAT = 3

Content = dict[str, Any]  # of a config.json
UPGRADES: Mapping[int, Callable[[Content], Content]] = {}


def upgrade(
    content: Content,
    where: str,
    upgrades: Mapping[int, Callable[[Content], Content]] = UPGRADES,
    newest: int = FORMAT,
) -> Content:
    """`content` in the format `newest`; `where` names its file in errors.

    Raises:
      InputError: no upgrade leads there from its format.
    """
    version = content["format_version"]
    while version in upgrades and version < newest:
        version += 1
        content = upgrades[version - 1](content) | {"format_version": version}
    if version != newest:
        raise InputError(
            f"{where}: format_version={version!r}; this vit_jax reads {newest}; use the vit_jax "
            "that wrote it"
        )
    return content
