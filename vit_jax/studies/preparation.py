"""Makes a study of a config, and checks it; writes nothing."""

import os
from collections.abc import Sequence

from ml_collections import ConfigDict

from vit_jax.base.errors import InputError, collect_faults
from vit_jax.run.setup.workdir import check_writable
from vit_jax.studies.engine import Study, accuracies
from vit_jax.studies.running import Call


def prepare_study(
    config: ConfigDict, call: Call, sweep: Sequence[str] = (), *, writes: bool = True
) -> Study:
    """The study of a valid config, which `sweep` may make of a config of one run.

    Args:
      config: changed in place by `sweep`.
      call: how the study was called.
      sweep: texts of `study.sweep`.
      writes: whether its workdir will be written to, and must be writable.

    Raises:
      InputError: it is no study, or names the faults of the study.
    """
    if sweep:
        make_sweep(config, call, sweep)
    name = config.study.name
    if name is None:
        raise InputError(
            f"study.name: not set by {call.config_file}, which describes one run; give "
            "--sweep=KEY=VALUE,VALUE, or use the config of a study, such as finetune_study"
        )
    study = Study.of(config, os.fspath(call.workdir))
    study.check_all()
    collect_faults([f"--config.{key}: set by the study {name} for each member; leave it out"
                    for key, _ in call.overrides if key in study.sets])  # fmt: skip
    if writes:
        check_writable(call.workdir)
    return study


def make_sweep(config: ConfigDict, call: Call, sweep: Sequence[str]) -> None:
    """Make the study "sweep" of a config, in place.

    Its metric, unless given, is the accuracy of the first evaluator whose split is always there.
    """
    if config.study.name not in (None, "sweep"):
        raise InputError(
            f"--sweep: {call.config_file} is a study already ({config.study.name}); take a config "
            "of one run"
        )
    config.study.name, config.study.sweep = "sweep", tuple(sweep)
    is_given = any(key == "study.metric" for key, _ in call.overrides)
    if not is_given and config.evals and config.study.metric.partition("/")[0] not in config.evals:
        always = [n for n, e in config.evals.items() if not e.get("split", "").endswith("?")]
        first = next(iter(always or config.evals))
        config.study.metric = next(iter(accuracies(config, first) or ()), f"{first}/top1")
