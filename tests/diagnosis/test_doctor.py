"""Checks of the machine, against local servers and folders."""

import http.server
import os
import pathlib
import socket
import threading

import numpy as np
import pytest
from etils import epath
from images import write_images
from PIL import Image

from vit_jax.config import OBJECTIVES
from vit_jax.diagnosis import doctor
from vit_jax.diagnosis.doctor import FAILED, OK, WARNING, Finding, bounded
from vit_jax.diagnosis.method import judge_method
from vit_jax.main import main


@pytest.fixture
def silent():
    """host:port of a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def web():
    """The address of a server that answers every request with the status 404."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_check_that_hangs_or_raises_is_a_finding():
    never = threading.Event()
    found = bounded("x", never.wait, 0.05, "wait")
    assert found.state == FAILED and "--timeout_s=0.1" in found.remedy
    never.set()
    found = bounded("x", lambda: 1 / 0, 10, "mend")
    assert (found.state, found.remedy) == (FAILED, "mend") and "ZeroDivision" in found.found
    assert bounded("x", lambda: Finding("x", OK, "fine"), 10, "").found == "fine"


def test_software_names_what_is_missing(monkeypatch):
    assert doctor.check_software().state == OK
    absent = dict.fromkeys((*doctor._SHOWN, "tensorflow", "tensorflow-cpu"), "not installed")
    monkeypatch.setattr(doctor, "software", lambda: absent | {"jax": "1.0"})
    found = doctor.check_software()
    assert found.state == FAILED and found.remedy
    assert "tensorflow not installed" in found.found and "jax 1.0" in found.found


def test_little_memory_is_a_warning(monkeypatch, tmp_path):
    assert str(tmp_path) in doctor.check_memory(epath.Path(tmp_path / "new/run")).found
    monkeypatch.setattr(doctor, "_LITTLE", 1 << 62)
    found = doctor.check_memory(None)
    assert found.state == WARNING and "memory and disk" in found.remedy


def test_unused_accelerators_are_named(monkeypatch):
    from vit_jax.devices import mesh

    assert doctor.check_devices().found.startswith("8 x cpu")
    monkeypatch.setattr(mesh, "accelerators_on_host", lambda: ["NVIDIA GPU"])
    found = doctor.check_devices()
    assert found.state == WARNING and "NVIDIA GPU" in found.found and "cuda" in found.remedy
    assert doctor.check_devices("cpu").state == OK


def test_decoding(tmp_path):
    assert "500 x 375" in doctor.check_decoding(None).found
    Image.new("RGB", (20, 20)).save(tmp_path / "a.webp")
    found = doctor.check_decoding(str(tmp_path))
    assert found.state == OK and str(tmp_path) in found.found
    (tmp_path / "b.jpg").write_text("no image")
    (tmp_path / "c.jpg").symlink_to(tmp_path / "none.jpg")  # a link to no file
    found = doctor.check_decoding(str(tmp_path))
    assert found.state == WARNING and "; 1 " in found.found
    os.mkfifo(tmp_path / "pipe.jpg")  # which nobody writes to
    (tmp_path / "list.csv").write_text("file,label\na.webp,cat\n")
    for place in (tmp_path, tmp_path / "list.csv"):
        assert {p.name for p in doctor.some_images(str(place))} == {"a.webp", "b.jpg"}


def test_folders(tmp_path):
    (tmp_path / "list.csv").write_text("file,label\nloose/1.jpg,cat\n")
    (tmp_path / "empty").mkdir()
    for name, state in (
        ("none", FAILED), ("empty", FAILED), ("list.csv", OK), (".", OK)
    ):  # fmt: skip
        found = bounded("d", lambda p=tmp_path / name: doctor.check_data_dir(str(p)), 10, "look")
        assert found.state == state, name
        assert bool(found.remedy) == (state == FAILED)
    assert "empty, list.csv" in found.found
    assert doctor.check_workdir(epath.Path(tmp_path / "run")).state == OK
    found = bounded("w", lambda: doctor.check_workdir(epath.Path(tmp_path / "list.csv")), 10, "")
    assert found.state == FAILED and "--workdir=" in found.found


def test_a_bucket_is_written_and_left_clean(tmp_path, monkeypatch):
    """A folder in the place of a bucket."""

    class Bucket(type(epath.Path(tmp_path))):
        def __fspath__(self):
            return f"mem://{super().__fspath__()}"

    monkeypatch.setattr("vit_jax.run.setup.workdir.check_writable", lambda workdir: None)
    bucket = Bucket(tmp_path)
    monkeypatch.setattr(Bucket, "write_bytes", lambda s, b: pathlib.Path(str(s)).write_bytes(b))
    monkeypatch.setattr(Bucket, "read_bytes", lambda s: pathlib.Path(str(s)).read_bytes())
    monkeypatch.setattr(Bucket, "unlink", lambda s: pathlib.Path(str(s)).unlink())
    assert doctor.check_workdir(bucket).state == OK
    assert not list(tmp_path.iterdir())
    assert "bucket" in doctor.remedy_of_path("gs://images/train")


def test_wandb(web, silent, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    url = web
    monkeypatch.setenv("HOME", str(tmp_path))  # without a .netrc
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", url)
    found = doctor.check_wandb(5)
    assert found.state == FAILED and "WANDB_API_KEY" in found.remedy
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert doctor.check_wandb(5).state == OK
    monkeypatch.setenv("WANDB_BASE_URL", f"http://{silent}")
    assert bounded("W&B", lambda: doctor.check_wandb(0.1), 5, "network").state == FAILED
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert doctor.check_wandb(5).state == OK


def test_coordinator(silent):
    assert silent in doctor.check_cluster(silent, 5).found
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = bounded("c", lambda: doctor.check_cluster(f"127.0.0.1:{port}", 5), 10, "firewall")
    assert (found.state, found.remedy) == (FAILED, "firewall")
    found = bounded("c", lambda: doctor.check_cluster("host", 5), 10, "")
    assert "HOST:PORT" in found.found


@pytest.mark.parametrize(
    ("name", "number", "says", "remedy"),
    [
        ("masked_patches", 5000, "no run shows", "selfsup:folder"),
        ("self_distillation", 999_999, "no run shows", "selfsup:folder"),
        ("self_distillation", 1_000_000, "", ""),
        ("lejepa", 4999, "from 5,000", "init_from"), ("mae", 5000, "from 5,000", ""),
        ("supervised", 10, "", ""),
    ],
)  # fmt: skip
def test_a_method_that_was_not_seen_to_learn_from_so_few_images(name, number, says, remedy):
    found, advice = judge_method(OBJECTIVES.make({"name": name}), number)
    assert says in found and remedy in advice
    assert bool(found) == bool(says) and bool(advice) == bool(remedy)
    assert judge_method(OBJECTIVES.make({"name": name}), number, "runs/mine") == ("", "")


@pytest.mark.slow
def test_the_command(capsys, json_of, tmp_path, monkeypatch, vit_jax_logger):
    def choose(settings, mesh, *, may_compile):
        return settings if may_compile else settings.with_values({"mesh.fsdp": 8})

    monkeypatch.setattr("vit_jax.planning.search.choose_layout", choose)
    words = ["doctor", "--config=quickstart:debug", "--config.model.depth=1", "--format=json"]
    found = {one["subject"]: one for one in json_of(*words)}
    assert {one["state"] for one in found.values()} <= {"ok", "warning"}
    chosen = found["train would choose"]["found"]
    assert "mesh: replica 1, data 1, fsdp 8" in chosen and "train 1,437" in chosen
    assert "attention" in chosen
    assert found["time"]["state"] == "ok" and "(estimate): 40 steps of " in found["time"]["found"]
    # What is asked for and cannot be reached; the images of the config are missing too.
    missing = f"--config.data.data_dir={tmp_path / 'no'}"
    assert main(["doctor", "--config=folder:debug", missing]) == 1
    out = capsys.readouterr().out
    assert "failed" in out and "data folder" in out and "→" in out
    assert "no such file or folder" in out and "Errno" not in out
    names, black = ("cat", "dog"), np.zeros((20, 20, 3), np.uint8)
    images = {f"{name}/{i}.png": black for name in names for i in range(9)}
    write_images(tmp_path / "own", images | {"cat/3.png": b"no image", "dog/5.png": b""})
    monkeypatch.setattr(doctor, "estimate_time", lambda run: Finding("time", OK, "as above"))
    # Evaluators read the images, which have no labels in training, again as a folder of classes.
    words = ["--config=mae:folder,debug", f"--data_dir={tmp_path / 'own'}", "--format=json",
             "--config.global_batch_size=8", "--all_images"]  # fmt: skip
    found = {one["subject"]: one for one in json_of("doctor", *words)}
    assert "train 18" in found["train would choose"]["found"]
    assert found["method"]["found"].startswith("mae, 18 images")
    said = found["all images"]["found"].splitlines()
    assert said[0] == "18 images read; 2 fail:" and found["all images"]["state"] == "warning"
    assert sorted(line.partition(":")[0] for line in said[1:]) == ["cat/3.png", "dog/5.png"]
