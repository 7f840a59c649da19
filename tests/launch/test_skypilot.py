"""Tasks for SkyPilot: their text, and their `run` as local processes."""

import subprocess

import yaml

VIT_L_JOB = [
    "--config=configs/pretrain.py:ViT-L/16,imagenet21k", "--workdir=gs://bucket/runs/vit_l",
    "--config.data.data_dir=gs://bucket/tensorflow_datasets",
]  # fmt: skip


def test_a_task_restarts_where_it_has_saved(skypilot, call):
    """As `sky.Task.from_yaml` of SkyPilot 0.14 takes it."""
    words = ["--nodes=4", "--accelerators=H100:8", "--infra=gcp", "--spot", "--env=A=b",
             "--show_env", "--env=WANDB_API_KEY=key"]  # fmt: skip
    code, out, err = call(skypilot, *words, "--", *VIT_L_JOB)
    assert (code, err) == (0, "") and "key" not in out.replace("API_KEY", "")
    task = yaml.safe_load(out)
    assert task["num_nodes"] == 4 and task["name"] == "vit-l"
    assert task["resources"] == {
        "infra": "gcp", "accelerators": "H100:8", "use_spot": True,
        "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [75, 143]},
    }  # fmt: skip
    assert task["envs"] == {"PYTHONUNBUFFERED": "1", "A": "b"}
    assert task["secrets"] == {"WANDB_API_KEY": None}
    assert task["setup"].rstrip().endswith("--editable '.[cuda,gcs]'")


def test_each_node_finds_its_place(skypilot, call, tmp_path):
    _, out, _ = call(skypilot, "--nodes=2", "--", *VIT_L_JOB)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text('python() { echo "$@"; }\nexec() { "$@"; }\n')
    places = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2",
              "SKYPILOT_NODE_RANK": "1", "PATH": "/usr/bin:/bin"}  # fmt: skip
    run = ["bash", "-c", yaml.safe_load(out)["run"]]
    said = subprocess.run(run, cwd=tmp_path, env=places, capture_output=True, text=True).stdout
    assert said.split()[-4:] == [
        "--config.mesh.platform=cpu", "--coordinator=10.0.0.1:8482", "--num_processes=2",
        "--process_id=1",
    ]  # fmt: skip
