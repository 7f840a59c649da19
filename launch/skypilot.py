"""Print a task for SkyPilot (https://docs.skypilot.co), which runs it on many clouds.

  python launch/skypilot.py --nodes=4 --accelerators=H100:8 -- \\
    --config=configs/pretrain.py:ViT-L/16,imagenet21k --workdir=gs://bucket/runs/vit_l \\
    --config.data.data_dir=gs://bucket/tensorflow_datasets > task.yaml
  sky jobs launch task.yaml

Each node runs one process, which uses all its GPUs. SkyPilot sends this clone to the nodes and
installs it. It starts the task again, on other nodes if need be, after a preemption, after a job
has saved (exit code 75), and at most --max_restarts times after a failure.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

import yaml
from command_line import add_common_flags, launcher_main, make_parser, positive, say, shell
from environment import read_environment
from job import Job, check_config_travels, check_data_travels, check_job

from vit_jax.base.errors import InputError
from vit_jax.job.exit_codes import DONE, PREEMPTED, TERMINATED

_PORT = 8482  # of process 0

_RUN = """\
. .venv/bin/activate
exec {command} \\
  --coordinator="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{port}" \\
  --num_processes="$SKYPILOT_NUM_NODES" --process_id="$SKYPILOT_NODE_RANK"
"""
_SETUP = """\
python3 -m pip install --quiet --user uv
python3 -m uv venv --quiet --python 3.11 .venv
python3 -m uv pip install --quiet --python .venv/bin/python \\
  --constraint launch/constraints.txt --editable {package}
"""


def define_flags() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--nodes", type=positive, default=1)
    parser.add_argument("--accelerators", metavar="NAME:NUMBER",
                        help="GPUs of a node, e.g. H100:8; default: run on CPU")  # fmt: skip
    parser.add_argument("--infra", help="cloud, region or context, e.g. gcp/us-central1")
    parser.add_argument("--spot", action="store_true", help="use spot nodes")
    parser.add_argument("--max_restarts", type=int, default=3, help="limit after failures")
    add_common_flags(parser, "the task, as without it,")
    return parser


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def launch(flags: argparse.Namespace, words: Sequence[str]) -> int:
    """Print the task that runs the job of `words`; return the exit code."""
    job = check_job(words)
    if "://" not in job.workdir:
        raise InputError(f"--workdir={job.workdir}: would be lost with its node; give a bucket")
    check_config_travels(job, "a node")
    variables = read_environment(flags, job)
    check_data_travels(job, "a node", variables.all, lambda folder: False, "use a bucket")
    task = render(flags, job, variables.plain, sorted(variables.secret))
    say(yaml.dump(task, Dumper=_Dumper, sort_keys=False, width=100).rstrip())
    return DONE


def render(flags, job: Job, plain: dict[str, str], secret: Sequence[str]) -> dict:
    """Make the task; the values of `secret` variables are given to `sky` by --secret NAME."""
    on_gpu = flags.accelerators is not None
    extras = ",".join((*(["cuda"] if on_gpu else []), *job.extras))
    package = shlex.quote(f".[{extras}]" if extras else ".")
    command = shell(job.on("gpu" if on_gpu else "cpu").command())
    restarts = {
        "max_restarts_on_errors": flags.max_restarts,
        "recover_on_exit_codes": [PREEMPTED, TERMINATED],
    }
    resources = {"infra": flags.infra, "accelerators": flags.accelerators,
                 "use_spot": flags.spot or None, "job_recovery": restarts}  # fmt: skip
    task = {
        "name": job.name,
        "workdir": ".",
        "num_nodes": flags.nodes,
        "resources": {key: value for key, value in resources.items() if value is not None},
        "envs": {"PYTHONUNBUFFERED": "1", **plain},
        "secrets": dict.fromkeys(secret),
        "setup": _SETUP.format(package=package),
        "run": _RUN.format(command=command, port=_PORT),
    }
    return {key: value for key, value in task.items() if value != {}}


if __name__ == "__main__":
    sys.exit(launcher_main(define_flags(), launch))
