"""Studies: experiments of several runs that depend on each other's results.

A study is a `Study` of functions without side effects: one module and one line in STUDIES. Its
members are ordinary training runs, started by running.py.
"""

from vit_jax.studies import (
    finetune_sweep,
    grid,
    noisy_student,
    pretraining,
    scaling,
    sweep,
    tuned_grid,
    vtab,
)
from vit_jax.studies.members import Study

STUDIES: dict[str, Study] = {
    "finetune_sweep": finetune_sweep.STUDY,
    "grid": grid.STUDY,
    "noisy_student": noisy_student.STUDY,
    "pretraining": pretraining.STUDY,
    "scaling": scaling.STUDY,
    "sweep": sweep.STUDY,
    "tuned_grid": tuned_grid.STUDY,
    "vtab": vtab.STUDY,
}
