"""Studies: experiments of several runs that depend on each other's results.

A study is one module, which declares a `Study` (engine.py), and one line in STUDIES. Its members
are ordinary training runs, started by running.py.
"""

from vit_jax.studies.engine import Study
from vit_jax.studies.finetune_sweep import FinetuneSweep
from vit_jax.studies.grid import Grid
from vit_jax.studies.noisy_student import NoisyStudent
from vit_jax.studies.pretraining import Pretraining
from vit_jax.studies.scaling import Scaling
from vit_jax.studies.sweep import Sweep
from vit_jax.studies.vtab import Vtab

STUDIES: dict[str, type[Study]] = {
    "finetune_sweep": FinetuneSweep,
    "grid": Grid,
    "noisy_student": NoisyStudent,
    "pretraining": Pretraining,
    "scaling": Scaling,
    "sweep": Sweep,
    "vtab": Vtab,
}
