"""The mutations of mutations.py apply to the sources of today; running them is its own command."""

import ast
import collections
import functools

from mutations import MUTATIONS, ROOT, faults


def test_every_mutation_has_its_place():
    assert faults(MUTATIONS) == []


def test_every_mutation_changes_code_and_is_still_python():
    code_of = functools.cache(lambda text: ast.dump(ast.parse(text)))
    for mutation in MUTATIONS:
        text = (ROOT / mutation.file).read_text()
        assert code_of(text) != code_of(text.replace(mutation.old, mutation.new)), mutation


def test_every_mutation_names_tests_that_there_are():
    for mutation in MUTATIONS:
        for node_id in mutation.node_ids:
            file, _, name = node_id.partition("[")[0].partition("::")
            assert (ROOT / file).is_file(), mutation
            assert not name or f"\ndef {name}(" in (ROOT / file).read_text(), mutation


def test_mutations_are_of_all_rooms():
    found = collections.Counter(mutation.room for mutation in MUTATIONS)
    rooms = {path.name for path in (ROOT / "vit_jax").iterdir() if (path / "__init__.py").exists()}
    assert found.keys() >= rooms | {"configs", "launch"}
    assert found.total() >= 60


def test_a_mutation_without_its_place_is_a_fault(tmp_path):
    mutation = MUTATIONS[0]
    (tmp_path / mutation.file).parent.mkdir(parents=True)
    for text, count in (("", 0), (2 * mutation.old, 2)):
        (tmp_path / mutation.file).write_text(text)
        assert f"is there {count} times" in faults([mutation], tmp_path)[0]
