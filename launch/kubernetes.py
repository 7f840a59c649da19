"""Run a job on a Kubernetes cluster that has JobSet (https://jobset.sigs.k8s.io).

  python launch/kubernetes.py --image=IMAGE --topology=v5e:16x16 --num_slices=2 -- \\
    --config=configs/pretrain.py:ViT-L/16,imagenet21k --workdir=gs://bucket/runs/vit_l \\
    --config.data.data_dir=gs://bucket/tensorflow_datasets

--topology runs the job on TPU slices of GKE, after checking that it fits. --nodes and
--gpus_per_node run it on NVIDIA GPUs; --nodes without GPUs runs it on CPUs. Every node runs one
process, which uses all its chips.
--dry_run prints the manifest, for `kubectl create -f -`.

All processes restart when one of them was told to stop and has saved, or has lost its node.
They also restart after failures, at most --max_restarts times, except if the input is wrong.
"""

import argparse
import functools
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tpus
import yaml
from command_line import (
    check_name,
    find_program,
    launcher_main,
    make_parser,
    parse_pairs,
    positive,
    shell,
)
from environment import Environment, define_env_flag, read_environment
from job import Job, check_config_travels, check_data_travels, check_job

from vit_jax.errors import InputError
from vit_jax.job.exit_codes import DONE, INPUT_WRONG, PREEMPTED, TERMINATED

_PORT = 8482  # port of process 0 in its pod
_SPOT = "cloud.google.com/gke-spot"


def define_flags() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    where = parser.add_argument_group("where: --topology, or --nodes")
    where.add_argument("--topology", metavar="SLICE", help="TPU slice of GKE, e.g. v5e:4x4")
    where.add_argument("--num_slices", type=int, default=1, help="TPU slices connected by DCN")
    where.add_argument("--nodes", type=int, help="number of GPU or CPU nodes")
    where.add_argument("--gpus_per_node", type=int, help="NVIDIA GPUs per process")
    where.add_argument("--spot", action="store_true", help="use GKE's spot nodes")
    where.add_argument(
        "--node_selector", action="append", default=[], metavar="LABEL=VALUE",
        help="nodes to run on, e.g. cloud.google.com/gke-accelerator=nvidia-h100-80gb or "
        "cloud.google.com/reservation-name=NAME; repeatable",
    )  # fmt: skip
    parser.add_argument("--image", required=True, help="image built from launch/Dockerfile")
    parser.add_argument(
        "--volume", action="append", default=[], metavar="CLAIM:FOLDER",
        help="persistent volume claim and the folder to mount it at; repeatable",
    )  # fmt: skip
    parser.add_argument("--service_account", help="account that may write to the workdir")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--name", help="name of the JobSet; default: last part of the workdir")
    parser.add_argument("--cpus_per_node", type=int, help="CPUs to request per pod")
    parser.add_argument("--memory_per_node", metavar="SIZE", help="memory per pod, e.g. 64Gi")
    parser.add_argument(
        "--save_s", type=int, default=300, help="seconds for a pod to save when it is evicted"
    )
    parser.add_argument(
        "--max_restarts", type=int, default=10, help="limit of restarts after failures"
    )
    parser.add_argument("--no_plan", action="store_true", help="do not check that the job fits")
    define_env_flag(parser)
    parser.add_argument("--dry_run", action="store_true", help="print the manifest and exit")
    return parser


def check(flags: argparse.Namespace, job: Job) -> None:
    """Raise InputError for flags that contradict each other, or a job that pods cannot run."""
    positive(flags, "num_slices", "nodes", "gpus_per_node", "cpus_per_node", "save_s")
    if (flags.topology is None) == (flags.nodes is None):
        raise InputError(
            "--topology, --nodes: give one of them; a TPU slice such as --topology=v5e:4x4, or "
            "--nodes=4 --gpus_per_node=8"
        )
    if flags.topology is not None and flags.gpus_per_node is not None:
        raise InputError("--gpus_per_node: only works with --nodes, not with --topology")
    if flags.nodes is not None and flags.num_slices != 1:
        raise InputError("--num_slices: only works with --topology, not with --nodes")
    if flags.max_restarts < 0:
        raise InputError(f"--max_restarts={flags.max_restarts}: must be at least 0")
    check_name(flags.name)
    if "://" not in job.workdir and not is_mounted(flags, job.workdir):
        raise InputError(
            f"--workdir={job.workdir}: would be lost with its pod; give gs://bucket/... or a "
            "folder on a volume, --volume=CLAIM:FOLDER"
        )


def is_mounted(flags: argparse.Namespace, folder: str) -> bool:
    """Whether `folder` is on a volume of the pods."""
    mounts = parse_pairs("volume", flags.volume, ":").values()
    return any(f"{folder}/".startswith(f"{mount.rstrip('/')}/") for mount in mounts)


class Placement(NamedTuple):
    """The pods of a job, with one process each.

    group: name of the group of pods.
    num_groups, num_pods: number of groups, and of pods in each.
    command: command of each process.
    env, resources, selector, annotations, pod: parts of the manifest.
    """

    group: str
    num_groups: int
    num_pods: int
    command: list[str]
    env: list[dict[str, Any]]
    resources: dict[str, Any]
    selector: dict[str, str]
    annotations: dict[str, str]
    pod: dict[str, Any]


def on_slices(flags: argparse.Namespace, job: Job) -> Placement:
    """Place a job on TPU slices of GKE, one group per slice.

    GKE sets TPU_WORKER_ID, TPU_WORKER_HOSTNAMES and MEGASCALE_*, from which JAX finds the place of
    each process and slice.
    """
    tpu = tpus.find_tpu_slice(flags.topology, flags.num_slices)
    return Placement(
        "slice",
        flags.num_slices,
        tpu.num_hosts,
        escape(job.on("tpu").command()),
        env=[],
        resources={"google.com/tpu": tpu.num_chips // tpu.num_hosts},
        selector={
            "cloud.google.com/gke-tpu-accelerator": tpus.GENERATIONS[tpu.chip].gke,
            "cloud.google.com/gke-tpu-topology": tpu.name.partition(":")[2],
        },
        # A slice is a node pool; exclude other jobs from its nodes.
        annotations={
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        },
        # Traffic between slices bypasses the pod network.
        pod={"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
        if flags.num_slices > 1
        else {},
    )


def on_nodes(flags: argparse.Namespace, job: Job, name: str) -> Placement:
    """Place a job on nodes with GPUs or CPUs; its command gives each process its number."""
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    command = escape(job.on("cpu" if flags.gpus_per_node is None else "gpu").command())
    command += [
        f"--coordinator={name}-worker-0-0.{name}:{_PORT}",
        f"--num_processes={flags.nodes}",
        "--process_id=$(PROCESS_ID)",
    ]
    return Placement(
        "worker",
        1,
        flags.nodes,
        command,
        env=[{"name": "PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": index}}}],
        resources=given({"nvidia.com/gpu": flags.gpus_per_node}),
        selector={},
        annotations={},
        pod={},
    )


def render_secret(flags: argparse.Namespace, job: Job, values: Mapping[str, str]) -> dict[str, Any]:
    """Make the manifest of the Secret that holds the hidden variables of the processes."""
    metadata = {"name": _secret_name(flags, job), "namespace": flags.namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": dict(values)}


def _secret_name(flags: argparse.Namespace, job: Job) -> str:
    return f"{flags.name or job.name}-env"


def render(flags: argparse.Namespace, job: Job, variables: Environment) -> dict[str, Any]:
    """Make the JobSet's manifest."""
    name = flags.name or job.name
    secret = _secret_name(flags, job) if variables.secret else None
    place = on_nodes(flags, job, name) if flags.topology is None else on_slices(flags, job)
    metadata = {"name": name, "namespace": flags.namespace, "annotations": place.annotations}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": given(metadata),
        "spec": {
            "failurePolicy": failure_policy(flags.max_restarts),
            "replicatedJobs": [
                {
                    "name": place.group,
                    "replicas": place.num_groups,
                    "template": {
                        "spec": {
                            "parallelism": place.num_pods,
                            "completions": place.num_pods,
                            "completionMode": "Indexed",
                            "backoffLimit": 0,
                            "podFailurePolicy": POD_FAILURE_POLICY,
                            "template": {"spec": render_pod(flags, place, variables.plain, secret)},
                        }
                    },
                }
            ],
        },
    }


def render_pod(
    flags: argparse.Namespace,
    place: Placement,
    variables: Mapping[str, str],
    secret: str | None,
) -> dict[str, Any]:
    """Make the pod of one process: container, volumes, and the nodes it may run on.

    `secret` is the name of the Secret with more variables; None: there is none.
    """
    selector = place.selector | parse_pairs("node_selector", flags.node_selector, "=")
    tolerations, volumes, mounts = [], [], []
    if flags.gpus_per_node is not None:
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
        # NCCL shares more memory between the GPUs of a process than a pod's default of 64 MiB.
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if flags.spot:
        selector[_SPOT] = "true"
        tolerations.append(
            {"key": _SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    for i, (claim, folder) in enumerate(parse_pairs("volume", flags.volume, ":").items()):
        volumes.append({"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{i}", "mountPath": folder})
    requests = {"cpu": flags.cpus_per_node, "memory": flags.memory_per_node} | place.resources
    container = {
        "name": "train",
        "image": flags.image,
        "command": place.command,
        "env": [
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            *({"name": name, "value": value} for name, value in variables.items()),
            *place.env,
        ],
        "envFrom": [{"secretRef": {"name": secret}}] if secret else [],
        "resources": given({"requests": given(requests), "limits": place.resources}),
        "volumeMounts": mounts,
    }
    pod = place.pod | {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": flags.save_s,
        "serviceAccountName": flags.service_account,
        "nodeSelector": selector,
        "tolerations": tolerations,
        "containers": [given(container)],
        "volumes": volumes,
    }
    return given(pod)


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`fields` without empty values."""
    return {key: value for key, value in fields.items() if value}


def escape(command: Sequence[str]) -> list[str]:
    """A command in which Kubernetes does not replace $(NAME) by a variable."""
    return [word.replace("$(", "$$(") for word in command]


# Failures that match these rules have the reason PodFailurePolicy; all others another reason.
POD_FAILURE_POLICY = {
    "rules": [
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": "train",
                "operator": "In",
                "values": [INPUT_WRONG, PREEMPTED, TERMINATED],
            },
        },
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
}


def failure_policy(max_restarts: int) -> dict[str, Any]:
    """When the JobSet restarts: the first rule that applies, else `max_restarts` counts."""
    return {
        "maxRestarts": max_restarts,
        "rules": [
            {
                "name": "wrongInput",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [f"failed with exit code {INPUT_WRONG} matching"],
            },
            {
                "name": "preempted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ],
    }


def to_yaml(manifest: dict[str, Any]) -> str:
    return yaml.safe_dump(manifest, sort_keys=False, width=100)


def call_kubectl(command: Sequence[str], manifest: str, what: str) -> str:
    """Run `command` with `manifest` as its input; return its output.

    Raises:
      InputError: it rejects `what`.
    """
    done = subprocess.run(command, input=manifest, text=True, capture_output=True)
    if done.returncode:
        raise InputError(f"kubectl rejected {what}: {done.stderr.strip()}")
    return done.stdout.strip()


def launch(flags: argparse.Namespace, words: Sequence[str]) -> int:
    """Create the JobSet that runs the job of `words`; return the exit code."""
    job = check_job(words)
    check(flags, job)
    check_config_travels(job, "the image")
    variables = read_environment(flags, job)
    manifest = to_yaml(render(flags, job, variables))
    remedy = "give a folder on a volume, --volume=CLAIM:FOLDER"
    mounted = functools.partial(is_mounted, flags)
    check_data_travels(job, "a pod", variables.all, mounted, remedy)
    planned = flags.topology is not None and not flags.no_plan
    if flags.dry_run:
        plan = tpus.plan_command(job, flags.topology, flags.num_slices) if planned else []
        if plan:
            print(f"# {shell(plan)}")
        if variables.secret:
            values = " ".join(f'--from-literal={name}="${name}"' for name in variables.secret)
            where = shell([_secret_name(flags, job), "--namespace", flags.namespace])
            print(f"# kubectl create secret generic {where} {values}")
        print(f"# kubectl create -f -\n{manifest}", end="")
        return DONE
    kubectl = find_program("kubectl", "install it and select a cluster, or use --dry_run")
    if planned and (code := tpus.check_plan(job, flags.topology, flags.num_slices)):
        return code
    if variables.secret:  # through standard input: command lines can be read by other users
        secret = to_yaml(render_secret(flags, job, variables.secret))
        call_kubectl([kubectl, "apply", "-f", "-"], secret, "the Secret of --env")
    created = call_kubectl([kubectl, "create", "-f", "-"], manifest, "the job")
    name, at = flags.name or job.name, ["--namespace", flags.namespace]
    first = f"jobset.sigs.k8s.io/jobset-name={name},jobset.sigs.k8s.io/job-index=0"
    first += ",batch.kubernetes.io/job-completion-index=0"
    print(created)
    print(f"state: {shell(['kubectl', 'get', 'jobset', name, *at])}")
    print(f"follow: {shell(['kubectl', 'logs', '--follow', '--selector', first, *at])}")
    print(f"delete: {shell(['kubectl', 'delete', 'jobset', name, *at])}")
    if variables.secret:
        print(f"        {shell(['kubectl', 'delete', 'secret', _secret_name(flags, job), *at])}")
    return DONE


if __name__ == "__main__":
    sys.exit(launcher_main(define_flags(), launch))
