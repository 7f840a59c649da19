from at_fault import at_fault

from vit_jax.base.errors import collect_faults, nearest


def test_collect_faults():
    collect_faults([], "here")
    with at_fault("one"):
        collect_faults(["one"], "here")
    with at_fault("one", "two"):
        collect_faults(["one", "two"], "here")


def test_nearest():
    assert nearest("colour", ["color", "size"]) == "did you mean color?"
    assert nearest("zzz", ["color", "size"]) == "known: color, size"
