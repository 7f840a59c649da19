"""The keys that an error finds at fault, and golden pages, which hold its words."""

import contextlib
import re

import pytest

from vit_jax.base.errors import InputError


def keys_of(error):
    """The keys of its faults: what stands before "=" or ":", after a source if there is one."""
    key = re.compile(r"(?:init_from='[^']*': (?=[\w.]+=))?([^=:]*)")
    return [key.match(fault)[1] for fault in error.faults]


@contextlib.contextmanager
def at_fault(*keys):
    """The block must raise an InputError with one fault for each of `keys`, in this order."""
    with pytest.raises(InputError) as error:
        yield error
    assert keys_of(error.value) == [*keys], str(error.value)


@contextlib.contextmanager
def refused_with(*words):
    """The block must raise an InputError whose text has all of `words`."""
    with pytest.raises(InputError) as error:
        yield
    for word in words:
        assert word in str(error.value), word


def golden_page(path):
    """{command line: what it is answered, in lines that are indented on the page}."""
    blocks = path.read_text().strip().split("\n\n")
    return dict(block.replace("\n    ", "\n").split("\n", 1) for block in blocks)
