"""Addresses of the web: their passwords and tokens stay in the memory of the process.

A command and each function of the API hide them first, so nothing that is written or shown has
them; what opens an address reveals it.
"""

import re

HIDDEN = "***"
_ADDRESS = re.compile(r"https?://[^\s'\"]+")
_USER = re.compile(r"(?<=://)[^/?#]*@")
_VALUE = re.compile(r"(?<=[?&])(?!download=)([^=&#]*)=[^&#=,]+")
_WEIGHT = re.compile(r"(?:=[-+\d.eE]+)?,?$")  # of a teacher, behind its address

_known: dict[str, str] = {}  # {hidden address: the whole one}


def hide(text: str) -> str:
    """`text`, with the user and the values of the query hidden in each address in it."""

    def hidden(match: re.Match[str]) -> str:
        found = _VALUE.sub(rf"\1={HIDDEN}", _USER.sub(f"{HIDDEN}@", match[0]))
        if found != match[0] and HIDDEN not in match[0]:
            end = len(_WEIGHT.findall(found)[0])
            _known[found] = match[0]
            _known[found[: len(found) - end]] = match[0][: len(match[0]) - end]
        return found

    return _ADDRESS.sub(hidden, text)


def reveal(text: str) -> str:
    """`text` with the addresses that this process has hidden as they were."""
    return _ADDRESS.sub(lambda match: _known.get(match[0], match[0]), text)
