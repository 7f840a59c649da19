"""Environment variables that a launcher gives to the processes of its job."""

import argparse
import os
import re
import shlex
from collections.abc import Mapping
from typing import NamedTuple

from job import Job

from vit_jax.base.errors import collect_faults

_SECRET = re.compile(
    r"(^|_)(API)?KEY(_|$)|(^|_)DSN(_|$)|TOKEN|SECRET|PASS|AUTH|CRED", re.IGNORECASE
)
WANDB_KEY = "WANDB_API_KEY"


class Environment(NamedTuple):
    """Variables of the processes; the values of `secret` are never printed nor stored in a job."""

    plain: dict[str, str]
    secret: dict[str, str]

    @property
    def all(self) -> dict[str, str]:
        return self.plain | self.secret

    @property
    def shown(self) -> str:
        """The variables as words before a command, for --dry_run; the shell fills in secrets."""
        plain = [f"{name}={shlex.quote(value)} " for name, value in self.plain.items()]
        return "".join([*plain, *(f'{name}="${name}" ' for name in self.secret)])


def read_environment(flags: argparse.Namespace, job: Job) -> Environment:
    """The variables of --env, and W&B's key if the job logs to W&B and the key is set here.

    Raises:
      InputError: a name is invalid, or has no value here.
    """
    environment, faults = Environment({}, {}), []
    for entry in flags.env:
        name, has_value, value = entry.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            faults.append(f"--env={entry}: needs NAME or NAME=VALUE")
        elif not has_value and name not in os.environ:
            faults.append(f"--env={name}: not set here; set it, or give --env={name}=VALUE")
        else:
            is_shown = flags.show_env and not _SECRET.search(name)
            found = environment.plain if is_shown else environment.secret
            found[name] = value if has_value else os.environ[name]
    collect_faults(faults)
    if "wandb" in job.extras and WANDB_KEY in os.environ:
        environment.secret.setdefault(WANDB_KEY, os.environ[WANDB_KEY])
    return environment


def as_exports(variables: Mapping[str, str]) -> str:
    """Lines of a shell script that set `variables`."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
