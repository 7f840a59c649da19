"""Upgrades of config.json, one function from each format to the next.

FORMAT goes up when a key is renamed or gets another meaning; UPGRADES then gets the function from
the last format. A new key needs none: see `before` of `parts.Key`. Version 0.2.0 wrote format 3;
every later version resumes its runs.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vit_jax.base.errors import InputError

FORMAT = 4

Content = dict[str, Any]  # of a config.json


def _same(content: Content) -> Content:
    """Format 4 only added a key."""
    return content


UPGRADES: Mapping[int, Callable[[Content], Content]] = {3: _same}


def upgrade(content: Content) -> Content:
    """`content` in the newest format; raises InputError if no upgrade leads there from its own."""
    version = content["format_version"]
    while version in UPGRADES:
        content = UPGRADES[version](content)
        version += 1
    if version != FORMAT:
        raise InputError(
            f"format_version={content['format_version']!r}: this vit_jax reads {FORMAT}; use the "
            "vit_jax that wrote it"
        )
    return content
