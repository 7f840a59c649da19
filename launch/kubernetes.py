"""Starts a job on a Kubernetes cluster that has JobSet (https://jobset.sigs.k8s.io).

  python launch/kubernetes.py --image=IMAGE --topology=v5e:16x16 --num_slices=2 -- \\
    --config=configs/pretrain.py:ViT-L/16,imagenet21k --workdir=gs://bucket/runs/vit_l

With --topology on TPU slices of GKE, planned for first; with --nodes and --gpus_per_node on NVIDIA
GPUs; with --nodes alone on CPUs. A node gets one process, which drives all its chips. --dry_run
prints the manifest, for `kubectl create -f -`.

All processes start again when one of them has been told to stop and has saved, or its node is
taken away; after a failure likewise, --max_restarts times, but not if the input is wrong.
"""

import argparse
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
from job import Job, check_config_travels, check_job

from vit_jax.errors import InputError
from vit_jax.job.exit_codes import DONE, INPUT_WRONG, PREEMPTED, TERMINATED

_PORT = 8482  # of process 0 in its pod
_SPOT = "cloud.google.com/gke-spot"


def define_flags() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    where = parser.add_argument_group("where: --topology, or --nodes")
    where.add_argument("--topology", metavar="SLICE", help="TPU slice of GKE, e.g. v5e:4x4")
    where.add_argument("--num_slices", type=int, default=1, help="slices of TPUs, over DCN")
    where.add_argument("--nodes", type=int, help="of GPUs or CPUs")
    where.add_argument("--gpus_per_node", type=int, help="NVIDIA GPUs that a process drives")
    where.add_argument("--spot", action="store_true", help="on GKE's spot nodes")
    where.add_argument(
        "--node_selector", action="append", default=[], metavar="LABEL=VALUE",
        help="nodes to run on, e.g. cloud.google.com/gke-accelerator=nvidia-h100-80gb or "
        "cloud.google.com/reservation-name=NAME; may be given again",
    )  # fmt: skip
    parser.add_argument("--image", required=True, help="as launch/Dockerfile makes it")
    parser.add_argument(
        "--volume", action="append", default=[], metavar="CLAIM:FOLDER",
        help="persistent volume claim and where it is seen; may be given again",
    )  # fmt: skip
    parser.add_argument("--service_account", help="that may write to the workdir")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--name", help="of the JobSet; default: the last part of the workdir")
    parser.add_argument("--cpus_per_node", type=int, help="that the pod asks for")
    parser.add_argument("--memory_per_node", metavar="SIZE", help="that it asks for, e.g. 64Gi")
    parser.add_argument(
        "--save_s", type=int, default=300, help="seconds that a pod gets to save when it must go"
    )
    parser.add_argument("--max_restarts", type=int, default=10, help="after failures")
    parser.add_argument("--no_plan", action="store_true", help="do not check that it fits")
    parser.add_argument("--dry_run", action="store_true", help="print the manifest, and end")
    return parser


def check(flags: argparse.Namespace, job: Job) -> None:
    """Raises InputError for flags that do not go together."""
    positive(flags, "num_slices", "nodes", "gpus_per_node", "cpus_per_node", "save_s")
    if (flags.topology is None) == (flags.nodes is None):
        raise InputError(
            "--topology, --nodes: give one of them: a TPU slice such as --topology=v5e:4x4, or "
            "--nodes=4 --gpus_per_node=8"
        )
    if flags.topology is not None and flags.gpus_per_node is not None:
        raise InputError("--gpus_per_node: goes with --nodes, not with --topology")
    if flags.nodes is not None and flags.num_slices != 1:
        raise InputError("--num_slices: goes with --topology, not with --nodes")
    if flags.max_restarts < 0:
        raise InputError(f"--max_restarts={flags.max_restarts}: needs a number from 0")
    check_name(flags.name)
    mounts = parse_pairs("volume", flags.volume, ":").values()
    if "://" not in job.workdir and not any(
        job.workdir.startswith(f"{mount.rstrip('/')}/") for mount in mounts
    ):
        raise InputError(
            f"--workdir={job.workdir}: would be lost with its pod; give gs://bucket/... or a "
            "folder on a volume, --volume=CLAIM:FOLDER"
        )


class Placement(NamedTuple):
    """Where the processes of a job run, one a pod.

    group: the name of the pods' group.
    num_groups, num_pods: groups, and pods in each.
    command: of each process.
    env, resources, selector, annotations, pod: what is asked for there, as manifests have it.
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
    """On TPU slices of GKE, a group each.

    GKE tells each process its place in the slice and the slices theirs (TPU_WORKER_ID,
    TPU_WORKER_HOSTNAMES, MEGASCALE_*), where JAX finds them.
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
        # A slice is a node pool: no other job may get a node of it.
        annotations={
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        },
        # Between slices, without the pods' own network.
        pod={"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
        if flags.num_slices > 1
        else {},
    )


def on_nodes(flags: argparse.Namespace, job: Job, name: str) -> Placement:
    """On nodes with GPUs or CPUs, whose processes are told their places by the command."""
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


def render(flags: argparse.Namespace, job: Job) -> dict[str, Any]:
    """The JobSet."""
    name = flags.name or job.name
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
                            "template": {"spec": render_pod(flags, place)},
                        }
                    },
                }
            ],
        },
    }


def render_pod(flags: argparse.Namespace, place: Placement) -> dict[str, Any]:
    """The pod of one process: its container, volumes and the nodes that it may run on."""
    selector = place.selector | parse_pairs("node_selector", flags.node_selector, "=")
    tolerations, volumes, mounts = [], [], []
    if flags.gpus_per_node is not None:
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
        # Between the GPUs of a process NCCL shares more memory than the 64 MiB a pod has.
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
        "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}, *place.env],
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
    """Those that are there: an empty one says nothing."""
    return {key: value for key, value in fields.items() if value}


def escape(command: Sequence[str]) -> list[str]:
    """A command as Kubernetes leaves it alone, which takes $(NAME) for a variable."""
    return [word.replace("$(", "$$(") for word in command]


# By these a job fails with the reason PodFailurePolicy, any other failure has another reason.
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
    """When the JobSet starts again: the first rule that applies, else `max_restarts` counts."""
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


def launch(flags: argparse.Namespace, words: Sequence[str]) -> int:
    """Creates the JobSet that runs the job of `words`; the exit code."""
    job = check_job(words)
    check(flags, job)
    check_config_travels(job, "the image")
    manifest = yaml.safe_dump(render(flags, job), sort_keys=False, width=100)
    planned = flags.topology is not None and not flags.no_plan
    if flags.dry_run:
        plan = tpus.plan_command(job, flags.topology, flags.num_slices) if planned else []
        if plan:
            print(f"# {shell(plan)}")
        print(f"# kubectl create -f -\n{manifest}", end="")
        return DONE
    kubectl = find_program("kubectl", "install it and choose a cluster, or take --dry_run")
    if planned and (code := tpus.check_plan(job, flags.topology, flags.num_slices)):
        return code
    done = subprocess.run([kubectl, "create", "-f", "-"], input=manifest, text=True,
                          capture_output=True)  # fmt: skip
    if done.returncode:
        raise InputError(f"kubectl refused the job: {done.stderr.strip()}")
    name, at = flags.name or job.name, ["--namespace", flags.namespace]
    first = f"jobset.sigs.k8s.io/jobset-name={name},jobset.sigs.k8s.io/job-index=0"
    first += ",batch.kubernetes.io/job-completion-index=0"
    print(done.stdout.strip())
    print(f"its state: {shell(['kubectl', 'get', 'jobset', name, *at])}")
    print(f"follow it: {shell(['kubectl', 'logs', '--follow', '--selector', first, *at])}")
    print(f"end it: {shell(['kubectl', 'delete', 'jobset', name, *at])}")
    return DONE


if __name__ == "__main__":
    sys.exit(launcher_main(define_flags(), launch))
