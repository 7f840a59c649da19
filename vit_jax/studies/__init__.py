"""Studies: experiments of several runs, which depend on each other's results.

A study is a `Study` of functions without side effects, one file and one line in STUDIES; running.py
runs its members, each of which is an ordinary training run.
"""

from vit_jax.studies import finetune_sweep, grid, vtab
from vit_jax.studies.members import Study

STUDIES: dict[str, Study] = {
    "finetune_sweep": finetune_sweep.STUDY,
    "grid": grid.STUDY,
    "vtab": vtab.STUDY,
}
