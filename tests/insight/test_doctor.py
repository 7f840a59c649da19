"""Checks of the machine, against local servers and folders."""

import http.server
import json
import os
import pathlib
import socket
import threading

import pytest
from etils import epath
from PIL import Image

from vit_jax.config import with_values
from vit_jax.errors import InputError
from vit_jax.insight import doctor, reach
from vit_jax.insight.findings import FAILED, OK, WARNING, Finding, bounded
from vit_jax.main import main


@pytest.fixture
def silent():
    """host:port of a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def web():
    """The address of a server that answers every request with the status in `status`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        status = 404

        def do_GET(self):
            self.send_error(self.status)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", Handler
        server.shutdown()


def test_a_check_that_hangs_or_raises_is_a_finding():
    never = threading.Event()
    found = bounded("x", never.wait, 0.05, "wait")
    longer = "on a busy machine wait longer, with --timeout_s=0.1; else wait"
    assert found == Finding("x", FAILED, "no answer within 0.05 s", longer)
    never.set()
    found = bounded("x", lambda: 1 / 0, 10, "mend")
    assert (found.state, found.remedy) == (FAILED, "mend") and "ZeroDivision" in found.found
    assert bounded("x", lambda: Finding("x", OK, "fine"), 10, "").found == "fine"


def test_software_names_what_is_missing(monkeypatch):
    assert doctor.check_software().state == OK
    monkeypatch.setattr(
        doctor, "software", lambda: dict.fromkeys(doctor._SHOWN, "1.0")
        | {"tensorflow": "not installed", "tensorflow-cpu": "not installed"},
    )  # fmt: skip
    found = doctor.check_software()
    assert found.state == FAILED and "tensorflow not installed" in found.found
    assert "pip install" in found.remedy


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
    assert "1 pictures of" in doctor.check_decoding(str(tmp_path)).found
    (tmp_path / "b.jpg").write_text("no picture")
    found = doctor.check_decoding(str(tmp_path))
    assert found.state == WARNING and "1 cannot be decoded" in found.found
    (tmp_path / "c.jpg").symlink_to(tmp_path / "none.jpg")  # a link to no file: also broken
    found = doctor.check_decoding(str(tmp_path))
    assert found.state == WARNING and "2 cannot be decoded" in found.found
    os.mkfifo(tmp_path / "pipe.jpg")  # which nobody writes to
    assert str(tmp_path / "pipe.jpg") not in doctor._some_pictures(str(tmp_path))


def test_folders(tmp_path):
    found = reach.check_data_dir(str(tmp_path / "none"))
    assert found.state == FAILED and found.remedy
    assert reach.check_data_dir(str(tmp_path)).found.endswith("is empty")
    (tmp_path / "cat").mkdir()
    assert reach.check_data_dir(str(tmp_path)) == Finding(
        "data folder", OK, f"{tmp_path}: 1 entries: cat"
    )
    (tmp_path / "split/val").mkdir(parents=True)
    with pytest.raises(InputError, match=r"^--data_dir='.*split' has val/ but no train/"):
        reach.check_data_dir(str(tmp_path / "split"))
    (tmp_path / "loose").mkdir()
    (tmp_path / "loose/1.jpg").touch()
    found = reach.check_data_dir(str(tmp_path / "loose"))
    assert found.state == WARNING and "found 1 picture, no folders of classes" in found.found
    assert "predict" in found.remedy and "data.name=unlabelled" in found.remedy
    assert reach.check_data_dir(str(tmp_path / "loose"), "unlabelled").state == OK
    assert reach.check_workdir(epath.Path(tmp_path / "run")).state == OK
    (tmp_path / "list.csv").write_text("file,label\nloose/1.jpg,cat\n")
    for data_name in (None, "list"):
        assert reach.check_data_dir(str(tmp_path / "list.csv"), data_name).state == OK
    assert reach.check_data_dir(str(tmp_path / "list.csv"), "folder").state == FAILED
    assert doctor._some_pictures(str(tmp_path / "list.csv")) == [str(tmp_path / "loose/1.jpg")]
    with pytest.raises(
        InputError, match=r"^--data_dir='.*1\.jpg': needs a name that ends in \.csv"
    ):
        reach.check_data_dir(str(tmp_path / "loose/1.jpg"))
    (tmp_path / "file").write_text("")
    found = bounded("w", lambda: reach.check_workdir(epath.Path(tmp_path / "file")), 10, "")
    assert found.state == FAILED and "is a file" in found.found


def test_a_bucket_is_written_and_left_clean(tmp_path, monkeypatch):
    """A folder in the place of a bucket, and one that changes what it is given."""

    class Bucket(type(epath.Path(tmp_path))):
        def __fspath__(self):
            return f"mem://{super().__fspath__()}"

    monkeypatch.setattr("vit_jax.run.workdir.check_writable", lambda workdir: None)
    bucket = Bucket(tmp_path)
    monkeypatch.setattr(Bucket, "write_bytes", lambda s, b: pathlib.Path(str(s)).write_bytes(b))
    monkeypatch.setattr(Bucket, "read_bytes", lambda s: pathlib.Path(str(s)).read_bytes())
    monkeypatch.setattr(Bucket, "unlink", lambda s: pathlib.Path(str(s)).unlink())
    assert "removed an object" in reach.check_workdir(bucket).found
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(Bucket, "read_bytes", lambda s: b"")
    assert reach.check_workdir(bucket).state == FAILED
    assert not list(tmp_path.iterdir())


def test_a_bucket_out_of_reach_is_named_in_one_line(monkeypatch):
    class PermissionDeniedError(Exception):
        pass

    class Bucket:
        def __fspath__(self):
            return "gs://pictures/train"

        def is_dir(self):
            raise PermissionDeniedError("libcurl code 6\nmeaning ...")

    monkeypatch.setattr(reach.files, "absolute", lambda path: Bucket())
    found = bounded("d", lambda: reach.check_data_dir("gs://pictures/train"), 10, "")
    assert found.state == FAILED and "curl" not in found.found and "\n" not in found.found
    assert found.found.startswith("gs://pictures: access is denied; check the name of the bucket")


def test_wandb(web, silent, monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    url, handler = web
    monkeypatch.setenv("HOME", str(tmp_path))  # without a .netrc
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", url)
    found = reach.check_wandb(5)
    assert found.state == FAILED and "no key" in found.found and "wandb login" in found.remedy
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert reach.check_wandb(5).state == OK
    handler.status = 503
    assert "503" in reach.check_wandb(5).found
    monkeypatch.setenv("WANDB_BASE_URL", f"http://{silent}")
    assert bounded("W&B", lambda: reach.check_wandb(0.1), 5, "network").state == FAILED
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert reach.check_wandb(5).state == OK


def test_coordinator(silent):
    assert silent in reach.check_cluster(silent, 5).found
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = bounded("c", lambda: reach.check_cluster(f"127.0.0.1:{port}", 5), 10, "firewall")
    assert (found.state, found.remedy) == (FAILED, "firewall")
    found = bounded("c", lambda: reach.check_cluster("host", 5), 10, "")
    assert "HOST:PORT" in found.found


def test_the_command(capsys, tmp_path, monkeypatch, vit_jax_logger):
    def choose(config, mesh, *, may_compile):
        return config if may_compile else with_values(config, {"mesh.fsdp": 8})

    monkeypatch.setattr("vit_jax.planning.search.choose_layout", choose)
    words = ["doctor", "--config=quickstart:debug", "--format=json"]
    assert main(words) == 0
    found = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert {one["state"] for one in found.values()} <= {"ok", "warning"}
    chosen = found["train would choose"]["found"]
    assert "mesh: replica 1, data 1, fsdp 8" in chosen and "train 1,437" in chosen
    assert "attention" in chosen
    # What is asked for and cannot be reached; the pictures of the config are missing too.
    missing = f"--config.data.data_dir={tmp_path / 'no'}"
    assert main(["doctor", "--config=folder:debug", missing]) == 1
    out = capsys.readouterr().out
    assert "failed" in out and "data folder" in out and "→" in out
    for name in ("cat", "dog"):
        for i in range(9):
            path = tmp_path / f"own/{name}/{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    words = ["--config=folder:debug", f"--data_dir={tmp_path / 'own'}", "--format=json"]
    main(["doctor", *words, "--config.global_batch_size=8"])
    found = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert "train 16, val 2" in found["train would choose"]["found"]


def test_wrong_flags(capsys):
    for words, says in (
        (["--format=xml"], "--format=xml"),
        (["--timeout_s=0"], "--timeout_s=0"),
        (["--config.seed=1"], "--config=NAME"),
    ):
        assert main(["doctor", *words]) == 2
        assert says in capsys.readouterr().err
