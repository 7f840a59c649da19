"""Passwords and tokens in addresses."""

import pytest

from vit_jax.base.addresses import hide, reveal


@pytest.mark.parametrize(
    ("whole", "hidden"),
    [
        ("https://me:pw@h.org/a.npz", "https://***@h.org/a.npz"),
        ("--x='http://h/a?sig=pw==&v=2'", "--x='http://h/a?sig=***==&v=***'"),
        ("https://h/a?t=pw=3, https://h/b?t=pw=1", "https://h/a?t=***=3, https://h/b?t=***=1"),
        ("https://huggingface.co/a/b/resolve/main/m.npz?download=true", None),
        ("gs://bucket/a@b?c=d", None),
    ],
)  # fmt: skip
def test_what_is_secret_is_hidden_and_known(whole, hidden):
    assert hide(whole) == (hidden or whole)
    assert hide(hide(whole)) == hide(whole)
    assert reveal(hide(whole)) == whole


def test_the_weight_of_a_teacher_is_no_part_of_its_address():
    hide("https://h/teacher.npz?t=pw=3")
    assert reveal("https://h/teacher.npz?t=***") == "https://h/teacher.npz?t=pw"
