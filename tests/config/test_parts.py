"""Parts and sections: what a declaration alone brings about."""

import pytest

from vit_jax.base.errors import InputError
from vit_jax.config import Part, base_config, key
from vit_jax.config.parts import Registry, Section
from vit_jax.config.registries import REGISTRIES
from vit_jax.config.sections import SECTIONS


class Common(Section):
    """Keys of every part."""

    name: str = key("first", "a part")
    rate: float = key(0.5, "of all", within="[0, 1)")


class First(Part):
    """A part."""

    width: int = key(4, "even", within="[1, 8]")
    kind: str | None = key(None, "a kind", choices=("round", "square"))
    sides: tuple[float, ...] | None = key(None, "lengths", within="(0, inf)")
    pattern: str = key(".*", "of names", form="regex")

    def check(self):
        return [f"width={self.width}: needs an even number"] if self.width % 2 else []


class Second(Part):
    """A part whose key must be set."""

    text: str = key(..., "anything")


PARTS = Registry("lab.name", Common, {"first": First, "second": f"{__name__}:Second"})


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"name": "frist"}, ["lab.name='frist'"]),
        ({"name": "first", "width": 9, "kind": "rond"}, ["lab.width=9", "lab.kind='rond'"]),
        ({"name": "first", "width": 3}, ["lab.width=3"]),
        ({"name": "first", "sides": (1.0, 0.0)}, ["lab.sides=(1.0, 0.0)"]),
        ({"name": "first", "pattern": "*"}, ["lab.pattern='*'"]),
        ({"name": "first", "text": "x"}, ["lab.text='x'"]),
        ({"name": "second"}, ["lab.text"]),
    ],
)
def test_faults_name_the_keys(values, keys):
    with pytest.raises(InputError) as error:
        PARTS.make(values)
    assert [fault.partition(": ")[0] for fault in error.value.faults] == keys


def test_a_part_gets_its_own_keys():
    values = {"name": "first", "rate": 0.1, "width": 2, "kind": None}
    assert PARTS.make(values) == First(width=2)
    assert PARTS.make({"name": "second", "text": "x"}).text == "x"


def all_parts():
    return [(registry, registry.find(name)) for registry in REGISTRIES for name in registry]


def test_one_key_has_one_meaning_and_no_part_declares_a_key_of_its_section():
    for registry in REGISTRIES:
        found = {}
        for name in registry:
            for k, declared in registry.keys_of(registry.find(name)).items():
                same = (declared.kind, declared.meaning)
                assert found.setdefault(k, same) == same, f"{registry.section}.{k}"
                assert k not in registry.common.declared()


def test_every_key_says_what_it_means_and_its_default_is_valid():
    declarations = [(section, section.declared()) for section in SECTIONS.values()]
    declarations += [(part, registry.keys_of(part)) for registry, part in all_parts()]
    for declaration, keys in declarations:
        assert declaration.__doc__.strip().endswith(".")
        for k, declared in keys.items():
            assert not declared.meaning.startswith("field of"), k
            assert declared.meaning and not declared.meaning.endswith("."), k
            if declared.default is not ...:
                assert declared.find_fault(declared.default) is None, k


def test_a_config_has_every_declared_key():
    config = base_config()
    for name, section in SECTIONS.items():
        node = config[name] if name else config
        for k, declared in section.declared().items():
            assert node.get_type(k) is declared.kind, f"{name}.{k}"
    for registry, part in all_parts():
        node = config[registry.section]
        for k, declared in registry.keys_of(part).items():
            assert node[k] is None and node.get_type(k) is declared.kind, f"{registry.section}.{k}"


def test_a_field_without_a_meaning_is_refused():
    class Bare(Part):
        """No key."""

        width: int = 3

    with pytest.raises(TypeError, match="width"):
        Bare.read({})


def test_a_name_that_is_taken_is_refused(monkeypatch):
    """As of a plug-in; a part may be imported again."""
    parts = Registry("lab.name", Common, {"first": First, "second": f"{__name__}:Second"})
    parts["first"] = First
    for name in ("first", "second"):
        other = type("Other", (Part,), {"__module__": "another"})
        with pytest.raises(InputError, match=rf"lab\.name='{name}'"):
            parts[name] = other
