"""What a study cannot be: the table faults.txt."""

import ast
import pathlib

import pytest
from studied import keys_at_fault
from test_finetune_sweep import make_config
from test_grid import grid_of
from test_noisy_student import noisy
from test_pretraining import pretraining

MADE = {
    "finetune_sweep": make_config,
    "grid": grid_of,
    "noisy_student": noisy,
    "pretraining": pretraining,
}
LINES = pathlib.Path(__file__).with_name("faults.txt").read_text().splitlines()[2:]


@pytest.mark.parametrize(("study", "keys"), [line.split("  ->  ") for line in LINES])
def test_its_keys_are_named(study, keys):
    name, changes = study.split("  ", 1)
    config = MADE[name]()
    config.study.update(ast.literal_eval(changes))
    assert {*keys_at_fault(config)} == {*keys.split(", ")}
