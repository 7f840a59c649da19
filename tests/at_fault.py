"""The keys that an error finds at fault, whatever its words are."""

import contextlib
import re

import pytest

from vit_jax.errors import InputError


def keys_of(error):
    """The keys of its faults: what stands before the first "=" or ":"."""
    return [re.split("[=:]", fault)[0] for fault in error.faults]


@contextlib.contextmanager
def at_fault(*keys):
    """The block must raise an InputError with one fault for each of `keys`, in this order."""
    with pytest.raises(InputError) as error:
        yield error
    assert keys_of(error.value) == [*keys], str(error.value)
