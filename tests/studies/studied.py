"""Studies for tests, and results as members leave them."""

import csv
import io

import pytest

from vit_jax.base.errors import InputError
from vit_jax.config import base_config, classification
from vit_jax.studies.engine import Found, Result, Study
from vit_jax.studies.tables import FINISHED


def config_of(name, **keys):
    """A config of the study `name` with an evaluator held_out, and keys of `study`."""
    c = base_config()
    c.study.name, c.data.name = name, "cifar10"
    c.evals.held_out = classification(split="test", every="1 epochs")
    c.study.update(keys)
    return c


def study_of(config):
    return Study.of(config, "/w")


def done(top1=None, **summary):
    metrics = {} if top1 is None else {"held_out/top1": top1}
    return Result(FINISHED, {"step": 9, **metrics, **summary})


def names_of(config, results=()):
    """Names of the members that can run, or have run."""
    return [member.name for member in study_of(config).ready(dict(results))]


def overrides_of(config, results=()):
    """{member: its overrides}."""
    return {m.name: m.overrides for m in study_of(config).ready(dict(results))}


def report_of(config, results):
    study = study_of(config)
    return study.report(Found(study, results))


def csv_of(config, results):
    return list(csv.DictReader(io.StringIO(Found(study_of(config), results).csv())))


def keys_at_fault(config):
    """The keys that `check` of the study finds at fault, in order."""
    with pytest.raises(InputError) as error:
        study_of(config).check_all()
    return [fault.partition(":")[0].partition("=")[0] for fault in error.value.faults]
