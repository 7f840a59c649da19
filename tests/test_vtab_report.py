import pytest

from vit_jax.data.vtab import TASKS
from vit_jax.errors import InputError
from vit_jax.vtab_report import report


def test_means_over_groups_and_over_all_tasks():
    """The mean over 19 tasks is not that of the three groups."""
    of_group = {"natural": 0.9, "specialised": 0.8, "structured": 0.5}
    top1 = {name: of_group[task.group] for name, task in reversed(TASKS.items())}
    top1["svhn"] += 0.07
    found = report(top1)
    assert list(found.tasks) == list(TASKS) and found.tasks == top1
    assert found.groups == pytest.approx(of_group | {"natural": 0.91})
    assert found.mean == pytest.approx((7 * 0.91 + 4 * 0.8 + 8 * 0.5) / 19)
    assert found.missing == ()


def test_a_mean_needs_all_its_tasks():
    specialised = {"patch_camelyon": 0.8, "eurosat": 0.9, "resisc45": 0.7, "retinopathy": 0.6}
    found = report({"dtd": 0.5} | specialised)
    assert found.groups == {"natural": None, "specialised": pytest.approx(0.75), "structured": None}
    assert found.mean is None and len(found.missing) == 14 and "cifar100" in found.missing


def test_unknown_tasks():
    with pytest.raises(InputError, match="'dtb': no task of VTAB; did you mean dtd"):
        report({"dtb": 0.5})
