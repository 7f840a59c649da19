import pytest

from vit_jax.errors import InputError, collect_faults, nearest


def test_collect_faults():
    collect_faults([], "here")
    with pytest.raises(InputError, match=r"^here: one$"):
        collect_faults(["one"], "here")
    with pytest.raises(InputError, match=r"^here: 2 faults\n  one\n  two$"):
        collect_faults(["one", "two"], "here")


def test_nearest():
    assert nearest("colour", ["color", "size"]) == "did you mean color?"
    assert nearest("zzz", ["color", "size"]) == "known: color, size"
