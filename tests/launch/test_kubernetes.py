"""Manifests: checked against the schemas of GKE and other clusters, and run as local processes."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

import jsonschema
import kubernetes_validate
import pytest
import yaml
from started_job import free_address

GOLDEN = pathlib.Path(__file__).parent / "golden"
IMAGE = "--image=europe-docker.pkg.dev/project/images/vit_jax:1"
VIT_L = "--config=configs/pretrain.py:ViT-L/16,imagenet21k"
QUICKSTART = "--config=configs/quickstart.py:debug"
BUCKET = "--workdir=gs://bucket/runs/vit_l"
DATA = "--config.data.data_dir=gs://bucket/tensorflow_datasets"
VIT_L_JOB = [VIT_L, BUCKET, DATA]

# As in the documentation; `python launch/kubernetes.py WORDS --dry_run -- ...` makes them.
SHOWN = {
    "v5e_4x4": ["--topology=v5e:4x4"],
    "two_v5e_16x16": ["--topology=v5e:16x16", "--num_slices=2", "--spot"],
    "four_nodes_of_8_h100": [
        "--nodes=4", "--gpus_per_node=8",
        "--node_selector=cloud.google.com/gke-accelerator=nvidia-h100-80gb",
    ],
    "two_cpu_nodes": [
        "--nodes=2", "--cpus_per_node=8", "--memory_per_node=32Gi", "--volume=runs:/runs",
        "--service_account=trainer", "--namespace=vision", "--name=digits", "--queue=team",
        "--priority=high", "--local_disk=/mnt/disks/ssd0",
    ],
}  # fmt: skip


def job_words(name):
    return [QUICKSTART, "--workdir=/runs/digits"] if name == "two_cpu_nodes" else VIT_L_JOB


@pytest.fixture
def render(kubernetes, call):
    """render(*words, job=...) -> (comments, manifest) from a dry run."""

    def render(*words, job=VIT_L_JOB):
        code, out, err = call(kubernetes, IMAGE, *words, "--dry_run", "--", *job)
        assert (code, err) == (0, "")
        return [line for line in out.splitlines() if line.startswith("#")], yaml.safe_load(out)

    return render


def pod(manifest):
    [group] = manifest["spec"]["replicatedJobs"]
    return group["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", SHOWN)
def test_manifest_is_as_it_was(render, name):
    comments, manifest = render(*SHOWN[name], job=job_words(name))
    assert manifest == yaml.safe_load((GOLDEN / f"{name}.yaml").read_text())
    assert comments[-1] == "# kubectl create -f -"
    on_tpu = "google.com/tpu" in str(manifest)
    assert [" -m vit_jax.main plan " in line for line in comments[:-1]] == [True] * on_tpu


@pytest.mark.parametrize("name", SHOWN)
def test_manifest_fits_the_schemas(render, name):
    _, manifest = render(*SHOWN[name], job=job_words(name))
    [group] = manifest["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}} | group["template"]
    for version in ("1.31", "1.35"):
        kubernetes_validate.validate(job, version, strict=True)


def strict(schema):
    """Schema of a custom resource, made to reject fields that it does not name."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: strict(value) for key, value in schema.items()}
    if "properties" in schema and schema.get("type") == "object":
        schema["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        schema = {"type": ["integer", "string"]}
    return schema


@pytest.fixture(scope="module")
def jobset_schema(shared_data):
    path = shared_data / "kubernetes/jobset-crd.yaml"
    if not path.exists():
        pytest.skip(f"no {path}: the definition of JobSet, from its release's manifests")
    [version] = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", SHOWN)
def test_manifest_fits_the_definition_of_jobset(render, jobset_schema, name):
    _, manifest = render(*SHOWN[name], job=job_words(name))
    jobset_schema.validate(manifest)
    manifest["spec"]["failurePolicy"]["maxRestart"] = 3
    assert not jobset_schema.is_valid(manifest)


# Where each process finds its place


@pytest.mark.parametrize(
    ("topology", "num_slices", "accelerator", "shape", "hosts", "chips"),
    [
        ("v5e:1x1", 1, "tpu-v5-lite-podslice", "1x1", 1, 1),
        ("v5e:2x4", 1, "tpu-v5-lite-podslice", "2x4", 1, 8),
        ("v5e:4x4", 1, "tpu-v5-lite-podslice", "4x4", 4, 4),
        ("v6e:16x16", 4, "tpu-v6e-slice", "16x16", 64, 4),
        ("v5p:4x4x4", 2, "tpu-v5p-slice", "4x4x4", 16, 4),
        ("v4:2x2x1", 1, "tpu-v4-podslice", "2x2x1", 1, 4),
        ("tpu7x:4x4x4", 1, "tpu7x", "4x4x4", 16, 4),
    ],
)
def test_slices(render, topology, num_slices, accelerator, shape, hosts, chips):
    _, manifest = render(f"--topology={topology}", f"--num_slices={num_slices}")
    [group] = manifest["spec"]["replicatedJobs"]
    spec = group["template"]["spec"]
    assert group["replicas"] == num_slices
    assert (spec["parallelism"], spec["completions"]) == (hosts, hosts)
    assert pod(manifest)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": shape,
    }
    [container] = pod(manifest)["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": chips}
    assert container["command"][-1] == "--config.mesh.platform=tpu"


def in_pod(container, index, coordinator):
    """(command, environment) that the kubelet gives pod `index`, with its name for process 0."""
    env = {}
    for entry in container["env"]:
        if "valueFrom" in entry:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        env[entry["name"]] = entry.get("value", str(index))
    command = [
        re.sub(r"\$(\$|\((\w+)\))", lambda m: "$" if m[1] == "$" else env[m[2]], word)
        for word in container["command"]
    ]
    found = [word for word in command if word.startswith("--coordinator=")]
    host, _, port = found[0].removeprefix("--coordinator=").partition(":")
    assert port.isdigit()
    return [word.replace(f"{host}:{port}", coordinator) for word in command], env, host


@pytest.mark.slow
def test_processes_of_the_manifest_train(render, tmp_path, pytestconfig):
    """As the cluster would start them, except for names that only its DNS knows."""
    _, manifest = render(
        "--nodes=2", "--volume=runs:/runs", "--name=digits",
        job=[QUICKSTART, "--workdir=/runs/my digits", "--config.duration=10 steps"],
    )  # fmt: skip
    [container] = pod(manifest)["containers"]
    assert container["volumeMounts"] == [{"name": "volume-0", "mountPath": "/runs"}]
    coordinator, processes = free_address(), []
    for index in range(2):
        command, env, host = in_pod(container, index, coordinator)
        assert host == "digits-worker-0-0.digits"  # JobSet's name for the first pod
        command = [word.replace("/runs/", f"{tmp_path}/") for word in command]
        assert command[0] == "python"
        of_image = os.environ | {
            "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
            "JAX_COMPILATION_CACHE_DIR": str(pytestconfig.cache.mkdir("jax")),
        }
        processes.append(
            subprocess.Popen(command, env=of_image | env, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT)
        )  # fmt: skip
    said = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert "devices: 2 x cpu on 2 host(s)" in said[0]
    assert json.loads((tmp_path / "my digits/summary.json").read_text())["step"] == 10


def test_jax_finds_its_place_in_every_slice(render, monkeypatch):
    """From the variables that GKE adds to the pods of two slices, and not from the manifest."""
    from jax._src.clusters import cloud_tpu_cluster

    _, manifest = render("--topology=v5e:4x4", "--num_slices=2")
    [group] = manifest["spec"]["replicatedJobs"]
    name, hosts = manifest["metadata"]["name"], group["template"]["spec"]["completions"]
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster.socket, "gethostbyname", lambda host: "10.0.0.1")
    found = []
    for slice_id in range(group["replicas"]):
        names = [f"{name}-{group['name']}-{slice_id}-{host}.{name}" for host in range(hosts)]
        for host in range(hosts):
            of_gke = {
                "TPU_WORKER_ID": host,
                "TPU_WORKER_HOSTNAMES": ",".join(names),
                "MEGASCALE_NUM_SLICES": group["replicas"],
                "MEGASCALE_SLICE_ID": slice_id,
                "MEGASCALE_COORDINATOR_ADDRESS": f"{name}-{group['name']}-0-0.{name}",
            }
            for key, value in of_gke.items():
                monkeypatch.setenv(key, str(value))
            cluster = cloud_tpu_cluster.GkeTpuCluster
            assert cluster.is_env_present() and cluster.get_process_count() == 8
            assert cluster.get_coordinator_address(5, None) == "vit-l-slice-0-0.vit-l:8482"
            found.append(cluster.get_process_id())
    assert found == list(range(8))
    assert not any("coordinator" in word for word in pod(manifest)["containers"][0]["command"])


def test_words_of_the_job_are_not_taken_for_variables(render):
    _, manifest = render("--nodes=1", job=[QUICKSTART, BUCKET, "--config.log.wandb=$(A) $x $$(y"])
    assert "--config.log.wandb=$$(A) $x $$$$(y" in pod(manifest)["containers"][0]["command"]


# Restarts


@pytest.mark.parametrize(
    ("message", "action"),
    [
        ("failed with exit code 2 matching FailJob rule at index 0", "FailJobSet"),
        ("failed with exit code 75 matching FailJob rule at index 0",
         "RestartJobSetAndIgnoreMaxRestarts"),
        ("failed with exit code 143 matching FailJob rule at index 0",
         "RestartJobSetAndIgnoreMaxRestarts"),
        ("has condition DisruptionTarget matching FailJob rule at index 1",
         "RestartJobSetAndIgnoreMaxRestarts"),
    ],
)  # fmt: skip
def test_what_starts_again(render, message, action):
    """By the messages of Kubernetes' job controller, matched like JobSet: first rule first."""
    _, manifest = render("--topology=v5e:4x4", "--save_s=600", "--max_restarts=3")
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 3
    message = f"Container train for pod default/vit-l-slice-0-2-x {message}"
    applied = [
        rule["action"] for rule in policy["rules"]
        if "PodFailurePolicy" in rule["onJobFailureReasons"]
        and any(re.search(p, message) for p in rule.get("onJobFailureMessagePatterns", [""]))
    ]  # fmt: skip
    assert applied[0] == action
    assert pod(manifest)["terminationGracePeriodSeconds"] == 600


# Rejected input


IMAGES = "--config=configs/folder.py:debug"


@pytest.mark.parametrize(
    ("words", "job"),
    [
        (["--volume=CLAIM:/data"], [VIT_L, "--config.data.data_dir=/data"]),
        (["--volume=CLAIM:/data"], [IMAGES, "--config.data.data_dir=/data/images"]),
        (["--env=TFDS_DATA_DIR=gs://bucket/data"], [VIT_L]),
    ],
)
def test_data_that_a_pod_reaches(render, words, job):
    render("--nodes=2", *words, job=[*job, BUCKET])


def test_without_kubectl(kubernetes, refused, monkeypatch):
    monkeypatch.setenv("PATH", "")
    says = refused(kubernetes, IMAGE, "--nodes=2", "--", QUICKSTART, BUCKET)
    assert "kubectl: not found on PATH; install it" in says


# kubectl and the plan, with stand-ins


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    """A kubectl that stores its input; returns the file."""
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\ncat > {tmp_path}/manifest\n'
                       'echo jobset.jobset.x-k8s.io/vit-l created\n')  # fmt: skip
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return tmp_path / "manifest"


def test_secrets_go_into_a_secret(kubernetes, call, kubectl, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hidden1")
    words = [IMAGE, "--nodes=1", "--env=MODE=fast$$(A)", "--env=HF_TOKEN", "--show_env",
             "--no_plan", "--name=digits"]  # fmt: skip
    code, out, err = call(kubernetes, *words, "--", QUICKSTART, BUCKET)
    assert (code, err) == (0, "") and "hidden1" not in out
    assert "kubectl delete secret digits-env" in out
    stored = kubectl.read_text()
    [container] = pod(yaml.safe_load(stored))["containers"]
    assert {"name": "MODE", "value": "fast$$$$(A)"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "digits-env"}}]
    assert "hidden1" not in stored
    code, out, _ = call(kubernetes, *words, "--dry_run", "--", QUICKSTART, BUCKET)
    assert code == 0 and yaml.safe_load(out)["kind"] == "JobSet"
    made = "# kubectl create secret generic digits-env --namespace default --from-literal="
    assert f'{made}HF_TOKEN="$HF_TOKEN"' in out


@pytest.mark.parametrize(("ends_with", "flags"), [(0, []), (3, []), (2, []), (3, ["--no_plan"])])
def test_is_planned_before_it_is_started(kubernetes, call, kubectl, monkeypatch, ends_with, flags):
    script = f"echo peak 20 GiB; echo error: x >&2; exit {ends_with}"
    monkeypatch.setattr(kubernetes.tpus, "plan_command", lambda *args: ["sh", "-c", script])
    code, out, err = call(kubernetes, IMAGE, "--topology=v5e:4x4", *flags, "--", *VIT_L_JOB)
    if flags or not ends_with:
        assert code == 0 and "jobset.jobset.x-k8s.io/vit-l created" in out
        assert "kubectl logs --follow --selector jobset.sigs.k8s.io/jobset-name=vit-l," in out
        manifest = yaml.safe_load(kubectl.read_text())
        assert manifest["metadata"]["name"] == "vit-l"
        assert (kubectl.parent / "words").read_text() == "create -f -\n"
        return
    assert code == ends_with and not kubectl.exists()
    expected = {
        3: "error: x\npeak 20 GiB\nerror: the run does not fit v5e:4x4; to start it",
        2: "error: x\nerror: planning for v5e:4x4 failed, see above",
    }
    assert expected[ends_with] in err


def test_plan_is_asked_for_what_the_job_runs(kubernetes, slurm):
    from job import check_job

    words = [VIT_L, BUCKET, "--config.mesh.fsdp", "8", "--config.log.every=7 steps"]
    where = types.SimpleNamespace(topology="v5e:16x16", num_slices=2)
    asked = kubernetes.tpus.plan_command(check_job(words), where)
    assert asked[1:] == [
        "-m", "vit_jax.main", "plan", VIT_L, "--topology=v5e:16x16", "--num_slices=2",
        "--config.mesh.fsdp=8", "--config.log.every=7 steps",
    ]  # fmt: skip
    assert kubernetes.tpus.plan_command(check_job(["evaluate", BUCKET]), where) == []


def test_image_pins_what_setup_asks_for():
    """The image's constraints pin every package that setup.py installs, none too old."""
    root = pathlib.Path(__file__).parents[2]
    pins = dict(
        line.split("==") for line in (root / "launch/constraints.txt").read_text().splitlines()
        if "==" in line
    )  # fmt: skip
    asked = re.search(r"install_requires=\[(.*?)\n    \]", (root / "setup.py").read_text(), re.S)
    for name, low in re.findall(r'"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)[",;]', asked[1]):
        if name != "tensorflow":  # there is no CPU build of it
            pin = pins[name.replace("_", "-").lower()]
            assert [int(n) for n in pin.split(".")] >= [int(n) for n in low.split(".")], name
    assert not any(name.startswith(("libtpu", "nvidia", "jax-cuda")) for name in pins)  # jax's own


def test_the_command_for_xpk(kubernetes, call):
    """As `xpk workload create --dry-run --skip-validation` of xpk 1.16 takes it."""
    words = [IMAGE, "--topology=v5p:4x4x4", "--num_slices=2", "--spot", "--xpk_cluster=pod",
             "--show_env"]  # fmt: skip
    code, out, err = call(kubernetes, *words, "--env=A=b c", "--dry_run", "--", *VIT_L_JOB)
    assert (code, err) == (0, "")
    said = shlex.split(out)
    assert said[:5] == [
        "xpk", "workload", "create", "--cluster=pod", "--workload=vit-l",
    ]  # fmt: skip
    assert {"--tpu-type=v5p-4x4x4", "--num-slices=2", "--restart-on-exit-codes=75,143"} < {*said}
    [command] = [word for word in said if word.startswith("--command=")]
    assert command.startswith("--command=exec env 'A=b c' python -m vit_jax.main --config=")
    code, _, err = call(kubernetes, *words, "--cpus_per_node=4", "--dry_run", "--", *VIT_L_JOB)
    assert code != 0 and "--cpus_per_node: not with --xpk_cluster" in err
