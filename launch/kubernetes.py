"""Run a job on a Kubernetes cluster that has JobSet (https://jobset.sigs.k8s.io).

  python launch/kubernetes.py --image=IMAGE --topology=v5e:16x16 --num_slices=2 -- \\
    --config=configs/pretrain.py:ViT-L/16,imagenet21k --workdir=gs://bucket/runs/vit_l \\
    --config.data.data_dir=gs://bucket/tensorflow_datasets

--topology runs the job on TPU slices of GKE, after checking that it fits. --nodes and
--gpus_per_node run it on NVIDIA GPUs; --nodes without GPUs runs it on CPUs. Every node runs one
process, which uses all its chips.
--dry_run prints the manifest, for `kubectl create -f -`; with --xpk_cluster=NAME it prints the same
job on TPUs as a command of xpk, which makes a manifest of its own.

All processes restart when one of them was told to stop and has saved, or has lost its node.
They also restart after failures, at most --max_restarts times, except if the input is wrong.
"""

import argparse
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import tpus
import yaml
from command_line import (
    add_cluster_flags,
    add_common_flags,
    find_program,
    launcher_main,
    make_parser,
    name_of_job,
    pair,
    positive,
    say,
    shell,
)
from environment import Environment, read_environment
from job import Job, check_config_travels, check_data_travels, check_job

from vit_jax.base.errors import InputError
from vit_jax.job.exit_codes import DONE, INPUT_WRONG, PREEMPTED, TERMINATED

_PORT = 8482  # port of process 0 in its pod
_SPOT = "cloud.google.com/gke-spot"
_KUEUE = "kueue.x-k8s.io/"


def define_flags() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    where = parser.add_argument_group("where: --topology, or --nodes")
    where.add_argument("--nodes", type=positive, help="number of GPU or CPU nodes")
    where.add_argument("--gpus_per_node", type=positive, help="NVIDIA GPUs per process")
    where.add_argument("--spot", action="store_true", help="use GKE's spot nodes")
    where.add_argument(
        "--node_selector", type=pair("="), action="append", default=[], metavar="LABEL=VALUE",
        help="nodes to run on, e.g. cloud.google.com/gke-accelerator=nvidia-h100-80gb or "
        "cloud.google.com/reservation-name=NAME; repeatable",
    )  # fmt: skip
    parser.add_argument("--image", required=True, help="image built from launch/Dockerfile")
    parser.add_argument(
        "--volume", type=pair(":"), action="append", default=[], metavar="CLAIM:FOLDER",
        help="persistent volume claim and the folder to mount it at; repeatable",
    )  # fmt: skip
    parser.add_argument("--local_disk", metavar="FOLDER",
                        help="a node's own disk, for checkpoint.memory_dir")  # fmt: skip
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--queue", metavar="NAME", help="Kueue's LocalQueue that admits the job")
    parser.add_argument("--priority", metavar="CLASS", help="Kueue's WorkloadPriorityClass")
    parser.add_argument("--name", type=name_of_job, help="default: last part of the workdir")
    parser.add_argument("--cpus_per_node", type=positive, help="CPUs to request per pod")
    parser.add_argument("--memory_per_node", metavar="SIZE", help="memory per pod, e.g. 64Gi")
    parser.add_argument("--save_s", type=positive, default=300,
                        help="seconds for a pod to save when it is evicted")  # fmt: skip
    parser.add_argument("--xpk_cluster", metavar="NAME",
                        help="with --dry_run: print the command of xpk")  # fmt: skip
    add_cluster_flags(parser, max_restarts=10)
    add_common_flags(parser, "the manifest")
    return parser


def check(flags: argparse.Namespace, job: Job) -> None:
    """Raise InputError for flags that contradict each other, or a job that pods cannot run."""
    if (flags.topology is None) == (flags.nodes is None):
        raise InputError("--topology, --nodes: give one of them, e.g. --topology=v5e:4x4, or "
                         "--nodes=4 --gpus_per_node=8")  # fmt: skip
    if flags.topology is not None and flags.gpus_per_node is not None:
        raise InputError("--gpus_per_node: only works with --nodes, not with --topology")
    if flags.nodes is not None and flags.num_slices != 1:
        raise InputError("--num_slices: only works with --topology, not with --nodes")
    if "://" not in job.workdir and not is_mounted(flags, job.workdir):
        raise InputError(
            f"--workdir={job.workdir}: would be lost with its pod; give gs://bucket/... or a "
            "folder on a volume, --volume=CLAIM:FOLDER"
        )

    if flags.priority is not None and flags.queue is None:
        raise InputError("--priority: only works with --queue, since Kueue reads it")
    for name in ("queue", "priority"):
        value = getattr(flags, name)
        if value is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", value):
            raise InputError(
                f"--{name}={value}: needs at most 63 characters of a to z, 0 to 9, - and ."
            )
    if flags.local_disk is not None and not flags.local_disk.startswith("/"):
        raise InputError(f"--local_disk={flags.local_disk}: needs an absolute path")


def is_mounted(flags: argparse.Namespace, folder: str) -> bool:
    """Whether `folder` is on a volume of the pods."""
    return any(f"{folder}/".startswith(f"{mount.rstrip('/')}/") for _, mount in flags.volume)


# The JobSet of any job; `render` adds what depends on it. A Job's failures that match its
# podFailurePolicy have the reason PodFailurePolicy, all others another reason. The JobSet follows
# the first of its own rules that applies; otherwise maxRestarts counts.
_JOBSET = f"""
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
spec:
  failurePolicy:
    rules:
    - name: wrongInput
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
      onJobFailureMessagePatterns: [failed with exit code {INPUT_WRONG} matching]
    - name: preempted
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: worker
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes:
              containerName: train
              operator: In
              values: [{INPUT_WRONG}, {PREEMPTED}, {TERMINATED}]
          - action: FailJob
            onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
        template:
          spec:
            restartPolicy: Never
            nodeSelector: {{}}
            tolerations: []
            containers:
            - name: train
              env: [{{name: PYTHONUNBUFFERED, value: "1"}}]
              resources: {{requests: {{}}, limits: {{}}}}
              volumeMounts: []
            volumes: []
"""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def render(flags: argparse.Namespace, job: Job, variables: Environment) -> dict[str, Any]:
    """Make the JobSet's manifest."""
    jobset = yaml.safe_load(_JOBSET)
    # Kueue suspends a JobSet with such a label until its queue has room for all of its pods.
    labels = {f"{_KUEUE}queue-name": flags.queue, f"{_KUEUE}priority-class": flags.priority}
    jobset["metadata"] = {"name": flags.name, "namespace": flags.namespace, "labels": labels}
    jobset["spec"]["failurePolicy"]["maxRestarts"] = flags.max_restarts
    [group] = jobset["spec"]["replicatedJobs"]
    pod = group["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    container["image"] = flags.image
    container["env"] += [
        {"name": name, "value": value}
        for name, value in zip(variables.plain, escape(variables.plain.values()), strict=True)
    ]
    if variables.secret:
        container["envFrom"] = [{"secretRef": {"name": f"{flags.name}-env"}}]
    if flags.topology is None:
        add_nodes(flags, job, group, pod, container)
    else:
        add_slices(flags, job, jobset, group, pod, container)
    pod["terminationGracePeriodSeconds"] = flags.save_s
    pod["serviceAccountName"] = flags.service_account
    pod["nodeSelector"] |= dict(flags.node_selector)
    if flags.spot:
        pod["nodeSelector"][_SPOT] = "true"
        spot = {"key": _SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        pod["tolerations"].append(spot)
    for i, (claim, folder) in enumerate(flags.volume):
        volume = {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}}
        pod["volumes"].append(volume)
        container["volumeMounts"].append({"name": f"volume-{i}", "mountPath": folder})
    if flags.local_disk is not None:
        disk = {"path": flags.local_disk, "type": "Directory"}
        pod["volumes"].append({"name": "local-disk", "hostPath": disk})
        container["volumeMounts"].append({"name": "local-disk", "mountPath": flags.local_disk})
    asked = {"cpu": flags.cpus_per_node, "memory": flags.memory_per_node}
    container["resources"]["requests"] = asked | container["resources"]["limits"]
    return without_empty(jobset)


def xpk_command(flags: argparse.Namespace, job: Job, variables: Environment) -> list[str]:
    """The command with which xpk runs the job; its cluster has a queue and priorities of its own.

    Raises:
      InputError: for what xpk cannot pass on.
    """
    given = {"--nodes": flags.nodes, "--volume": flags.volume, "--queue": flags.queue,
             "--node_selector": flags.node_selector, "--cpus_per_node": flags.cpus_per_node,
             "--memory_per_node": flags.memory_per_node, "--local_disk": flags.local_disk,
             "--env": variables.secret}  # fmt: skip
    if wrong := [name for name, value in given.items() if value]:
        raise InputError(f"{wrong[0]}: not with --xpk_cluster; the command of xpk takes TPU slices "
                         "by --topology, no queue or volume, --env with --show_env")  # fmt: skip
    if not flags.dry_run:
        raise InputError("--xpk_cluster: only prints a command for xpk; add --dry_run")
    tpu = tpus.find_tpu_slice(flags)
    kind = tpus.GENERATIONS[tpu.chip]
    settings = [f"{name}={value}" for name, value in variables.plain.items()]
    options = {
        "cluster": flags.xpk_cluster, "workload": flags.name,
        "tpu-type": f"{kind.gcloud or tpu.chip}-{tpu.name.partition(':')[2]}",
        "num-slices": flags.num_slices, "docker-image": flags.image,
        "max-restarts": flags.max_restarts,
        "restart-on-exit-codes": f"{PREEMPTED},{TERMINATED}",
        "termination-grace-period-seconds": flags.save_s,
        # xpk passes SIGTERM on to the process that it starts, so that must not be a shell.
        "command": shell(["exec", "env", *settings, *job.on("tpu").command()]),
    }  # fmt: skip
    words = ["xpk", "workload", "create", *(f"--{name}={v}" for name, v in options.items())]
    return [*words, *(["--spot"] if flags.spot else [])]


def add_slices(flags, job, jobset, group, pod, container) -> None:
    """Run a job on TPU slices of GKE, one group of pods per slice.

    GKE sets TPU_WORKER_ID, TPU_WORKER_HOSTNAMES and MEGASCALE_*, from which JAX finds the place of
    each process and slice.
    """
    tpu = tpus.find_tpu_slice(flags)
    group.update(name="slice", replicas=flags.num_slices)
    group["template"]["spec"].update(parallelism=tpu.num_hosts, completions=tpu.num_hosts)
    container["command"] = escape(job.on("tpu").command())
    container["resources"]["limits"]["google.com/tpu"] = tpu.num_chips // tpu.num_hosts
    of_gke = "cloud.google.com/gke-"
    pod["nodeSelector"][f"{of_gke}tpu-accelerator"] = tpus.GENERATIONS[tpu.chip].gke
    pod["nodeSelector"][f"{of_gke}tpu-topology"] = tpu.name.partition(":")[2]
    # A slice is a node pool; exclude other jobs from its nodes.
    exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": f"{of_gke}nodepool"}
    jobset["metadata"]["annotations"] = exclusive
    if flags.num_slices > 1:  # traffic between slices bypasses the pod network
        pod.update(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet")


def add_nodes(flags, job, group, pod, container) -> None:
    """Run a job on nodes with GPUs or CPUs; its command gives each process its number."""
    name, gpus = flags.name, flags.gpus_per_node
    group["template"]["spec"].update(parallelism=flags.nodes, completions=flags.nodes)
    container["command"] = [
        *escape(job.on("cpu" if gpus is None else "gpu").command()),
        f"--coordinator={name}-worker-0-0.{name}:{_PORT}",
        f"--num_processes={flags.nodes}",
        "--process_id=$(PROCESS_ID)",
    ]
    number = {"name": "PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    container["env"].append(number)
    if gpus is not None:
        container["resources"]["limits"]["nvidia.com/gpu"] = gpus
        taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        pod["tolerations"].append(taint)
        # NCCL shares more memory between the GPUs of a process than a pod's default of 64 MiB.
        pod["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})


def without_empty(value: Any) -> Any:
    """`value` with every None, {} and [] in it left out; numbers stay."""
    if isinstance(value, dict):
        kept = {key: without_empty(part) for key, part in value.items()}
        return {key: part for key, part in kept.items() if part not in (None, {}, [])}
    return [without_empty(part) for part in value] if isinstance(value, list) else value


def escape(command: Iterable[str]) -> list[str]:
    """Words in which Kubernetes replaces neither $(NAME) by a variable nor $$ by $."""
    return [re.sub(r"\$(?=[$(])", "$$", word) for word in command]


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
    flags.name = name = flags.name or job.name
    manifest = to_yaml(render(flags, job, variables))
    check_data_travels(job, "a pod", variables.all, functools.partial(is_mounted, flags),
                       "give a folder on a volume, --volume=CLAIM:FOLDER")  # fmt: skip
    planned = flags.topology is not None and not flags.no_plan
    secret, at = f"{name}-env", ["--namespace", flags.namespace]
    if flags.xpk_cluster is not None:
        say(shell(xpk_command(flags, job, variables)))
        return DONE
    if flags.dry_run:
        plan = tpus.plan_command(job, flags) if planned else []
        lines = [f"# {shell(plan)}"] * bool(plan)
        if variables.secret:
            values = " ".join(f'--from-literal={name}="${name}"' for name in variables.secret)
            lines.append(f"# kubectl create secret generic {shell([secret, *at])} {values}")
        say("\n".join([*lines, "# kubectl create -f -", manifest.rstrip()]))
        return DONE
    kubectl = find_program("kubectl", "install it and select a cluster, or use --dry_run")
    if planned and (code := tpus.check_plan(job, flags)):
        return code
    if variables.secret:  # through standard input: command lines can be read by other users
        metadata = {"name": secret, "namespace": flags.namespace}
        stored = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
        stored["stringData"] = variables.secret
        call_kubectl([kubectl, "apply", "-f", "-"], to_yaml(stored), "the Secret of --env")
    print(call_kubectl([kubectl, "create", "-f", "-"], manifest, "the job"))
    first = f"jobset.sigs.k8s.io/jobset-name={name},jobset.sigs.k8s.io/job-index=0"
    first += ",batch.kubernetes.io/job-completion-index=0"
    print(f"state: {shell(['kubectl', 'get', 'jobset', name, *at])}")
    print(f"follow: {shell(['kubectl', 'logs', '--follow', '--selector', first, *at])}")
    print(f"delete: {shell(['kubectl', 'delete', 'jobset', name, *at])}")
    if variables.secret:
        print(f"        {shell(['kubectl', 'delete', 'secret', secret, *at])}")
    return DONE


if __name__ == "__main__":
    sys.exit(launcher_main(define_flags(), launch))
