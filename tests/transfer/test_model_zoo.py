"""Files by name and by address, from a server of this machine."""

import base64
import functools
import hashlib
import http.server
import logging
import shutil
import threading

import jax
import numpy as np
import pytest
from at_fault import at_fault
from etils import epath

from vit_jax.base.errors import InputError
from vit_jax.transfer import load_pretrained, model_zoo, pretrained, read_pretrained


class Server(http.server.SimpleHTTPRequestHandler):
    """Counts what is asked for, and may lie about it."""

    asked: list = []  # noqa: RUF012 (of one test at a time)
    users: list = []  # noqa: RUF012
    lies: dict = {}  # noqa: RUF012

    def do_GET(self):
        self.asked.append(self.path)
        self.users.append(self.headers["Authorization"])
        super().do_GET()

    def send_header(self, keyword, value):
        super().send_header(keyword, self.lies.get(keyword, value))

    def end_headers(self):
        if "x-goog-hash" in self.lies:
            self.send_header("x-goog-hash", "")
        super().end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def server(golden, tmp_path, monkeypatch):
    """(address, the server's class) of a server of the goldens; the cache is a new one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Server.asked, Server.users, Server.lies = [], [], {}
    handler = functools.partial(Server, directory=str(shutil.copytree(golden, tmp_path / "there")))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as there:
        threading.Thread(target=there.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{there.server_port}", Server
        there.shutdown()


def same(a, b):
    assert a[0] == b[0]
    jax.tree.map(np.testing.assert_array_equal, a[1], b[1])


@pytest.mark.parametrize(
    "source", ["vit_finetuned.npz", "timm_vit.safetensors", "hf_vit/model.safetensors"]
)
def test_a_file_is_fetched_once_with_the_files_beside_it(golden, server, source):
    address, seen = server
    local = golden / source
    expected = load_pretrained(local.parent if local.name == "model.safetensors" else local)
    same(load_pretrained(f"{address}/{source}"), expected)
    asked = list(seen.asked)
    assert asked[0] == f"/{source}"
    assert len(asked) == (4 if source.startswith("hf") else 3)
    same(load_pretrained(f"{address}/{source}"), expected)
    assert seen.asked == asked


def test_a_cached_file_that_changed_is_fetched_again(golden, server, tmp_path, caplog):
    address, _ = server
    load_pretrained(f"{address}/vit_finetuned.npz")
    (cached,) = (tmp_path / "cache").rglob("*.npz")
    cached.write_bytes(cached.read_bytes()[:-1])
    expected = load_pretrained(golden / "vit_finetuned.npz")
    same(load_pretrained(f"{address}/vit_finetuned.npz"), expected)
    assert "fetching it again" in caplog.text


def test_passwords_and_tokens_are_sent_and_stay_in_memory(golden, server, tmp_path, caplog):
    caplog.set_level(logging.INFO, "vit_jax")
    address, seen = server
    whole = f"{address.replace('//', '//me:k3y%20word@')}/vit_finetuned.npz?sig=word&token=k3y"
    read = read_pretrained(whole)
    assert seen.asked[0].endswith("?sig=word&token=k3y")
    assert base64.b64decode(seen.users[0].split()[1]) == b"me:k3y word"
    same((read.model, read.variables), load_pretrained(golden / "vit_finetuned.npz"))
    at = address.replace("//", "//***@")
    assert read.source == f"{at}/vit_finetuned.npz?sig=***&token=***"
    with pytest.raises(InputError) as error:
        read_pretrained(whole.replace("vit_finetuned", "none"))
    (note,) = (tmp_path / "cache").rglob(model_zoo._NOTE)
    assert "k3y" not in caplog.text + note.read_text() + str(error.value)
    same((read_pretrained(read.source).model, read.variables), (read.model, read.variables))
    with pytest.raises(InputError, match="what is hidden here is not stored"):
        read_pretrained(read.source.replace("token", "key"))


def files(tmp_path):
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("lies", "said"),
    [
        ({"Content-Length": "999999"}, "cannot be fetched"),
        ({"x-goog-hash": "crc32c=AAAAAA==,md5=AAAA"}, "the server states AAAA"),
    ],
)
def test_what_is_not_what_was_sent_is_refused(server, tmp_path, lies, said):
    address, seen = server
    seen.lies = lies
    with pytest.raises(InputError, match=said):
        load_pretrained(f"{address}/vit_finetuned.npz")
    assert not files(tmp_path)


def test_the_hash_of_the_server_is_checked(golden, server):
    address, seen = server
    content = (golden / "vit_finetuned.npz").read_bytes()
    digest = base64.b64encode(hashlib.md5(content).digest()).decode()
    seen.lies = {"x-goog-hash": f"crc32c=AAAAAA==,md5={digest}"}
    path = model_zoo.locate(f"{address}/vit_finetuned.npz")
    assert path.read_bytes() == content


@pytest.mark.parametrize("source", ["none.npz", "timm_vit.json"])
def test_what_is_not_there(server, tmp_path, source):
    address, _ = server
    said = "404" if source == "none.npz" else "end in .npz or .safetensors"
    with pytest.raises(InputError, match=said):
        load_pretrained(f"{address}/{source}")
    assert not files(tmp_path)


def test_a_server_that_cannot_be_reached(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with at_fault("init_from"):
        load_pretrained("http://127.0.0.1:9/ViT-B_16.npz")


def test_a_name(golden, server, monkeypatch):
    address, _ = server
    entry = model_zoo.Published(f"{address}/vit_finetuned.npz", 10)
    monkeypatch.setitem(model_zoo.PUBLISHED, "ViT-mu/8@test", entry)
    same(load_pretrained("ViT-mu/8@test"), load_pretrained(golden / "vit_finetuned.npz"))
    assert read_pretrained("ViT-mu/8@test").source == "ViT-mu/8@test"
    expected = read_pretrained(golden / "vit_finetuned.npz").spec._replace(loss="softmax")
    assert read_pretrained("ViT-mu/8@test").spec == expected
    changed = entry._replace(num_classes=9)
    monkeypatch.setitem(model_zoo.PUBLISHED, "ViT-mu/8@test", changed)
    with pytest.raises(InputError, match="has 10 classes, but was published with 9"):
        load_pretrained("ViT-mu/8@test")


def test_a_published_file_has_its_loss_however_it_is_called(golden, server, monkeypatch, caplog):
    address, _ = server
    monkeypatch.setattr(model_zoo, "_I21K_CLASSES", 10)
    monkeypatch.setattr(model_zoo, "_GOOGLE", f"{address}/")
    monkeypatch.setattr(pretrained, "_IMAGENET_21K", (10,))
    local, other = golden / "vit_finetuned.npz", golden / "vit_pretrained.npz"
    assert read_pretrained(local).spec.loss is None
    assert pretrained.loss_of(read_pretrained(local)) == "softmax"
    assert "the loss is not stated; assuming softmax" in caplog.text
    entry = model_zoo.Published("gs://vit_finetuned.npz", 10)
    monkeypatch.setitem(model_zoo.PUBLISHED, "ViT-mu/8@test", entry)
    for source in (f"{address}/vit_finetuned.npz", local):
        assert read_pretrained(source).spec.loss == "sigmoid"
    monkeypatch.setitem(model_zoo.PUBLISHED, "ViT-mu/8@test", entry._replace(num_classes=9))
    for source in (local, other):  # of other classes, or another name
        assert read_pretrained(source).spec.loss is None


class Store:
    """Stands for the client of an object store, whose bucket is a folder."""

    def __init__(self, folder):
        self._folder, self._disk = folder, epath.Path(folder)._backend

    def __getattr__(self, name):
        def call(path, *args, **kwargs):
            if "forbidden" in str(path):
                raise RuntimeError("no permission")
            path = str(path).replace("gs://bucket", str(self._folder))
            return getattr(self._disk, name)(path, *args, **kwargs)

        return call


@pytest.fixture
def bucket(golden, tmp_path, monkeypatch):
    """gs://bucket holds the goldens; the cache is a new one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store, disk = Store(golden), epath.Path(golden)._backend

    def backend(path):
        return store if str(path).startswith("gs://") else disk

    monkeypatch.setattr(type(epath.Path(golden)), "_backend", property(backend))
    return tmp_path


def test_a_folder_in_an_object_store_is_read_where_it_is(golden, bucket):
    same(load_pretrained("gs://bucket/hf_vit"), load_pretrained(golden / "hf_vit"))
    assert not list(bucket.iterdir())


def test_a_file_in_an_object_store_is_fetched(golden, bucket):
    source = "vit_finetuned.npz"
    same(load_pretrained(f"gs://bucket/{source}"), load_pretrained(golden / source))
    assert [path.name for path in bucket.rglob("*.npz")] == [source]


@pytest.mark.parametrize("source", ["none", "none.npz", "forbidden", "forbidden.npz"])
def test_what_an_object_store_does_not_give(bucket, source):
    with at_fault("init_from"):
        load_pretrained(f"gs://bucket/{source}")
    assert not [path for path in bucket.rglob("*") if path.is_file()]


def test_the_table():
    table = model_zoo.PUBLISHED
    assert table["ViT-B/16@imagenet21k"] == model_zoo.Published(
        "https://storage.googleapis.com/vit_models/imagenet21k/ViT-B_16.npz", 21_843
    )
    losses = {name: entry.loss for name, entry in table.items()}
    assert losses["ViT-L/16@imagenet21k"] == losses["R26+ViT-S/32@augreg"] == "sigmoid"
    assert losses["BiT-R50x1@imagenet21k"] == "sigmoid"
    assert losses["ViT-L/16@imagenet2012"] == losses["ViT-Ti/16@augreg-imagenet2012"] == "softmax"
    addresses = [entry.address for entry in table.values()]
    assert len(set(addresses)) == len(addresses)
    assert {entry.num_classes for entry in table.values()} == {1000, 21_843}
    downloaded = [(entry.address.rpartition("/")[2], entry.num_classes) for entry in table.values()]
    assert len(set(downloaded)) == len(downloaded)  # so a downloaded file has one loss


def test_what_came_broken_is_fetched_again(golden, server, tmp_path):
    address, handler = server
    there = tmp_path / "there/vit_finetuned.npz"
    there.write_bytes(there.read_bytes()[:-400])
    source = f"{address}/vit_finetuned.npz"
    with at_fault("init_from"):
        read_pretrained(source)
    shutil.copy(golden / "vit_finetuned.npz", there)
    same(load_pretrained(source), load_pretrained(golden / "vit_finetuned.npz"))
    assert handler.asked.count("/vit_finetuned.npz") == 2


@pytest.mark.parametrize(
    ("source", "said"),
    [("ViT-B/16", "; published are ViT-B/16@"), ("vit-b/1", "; did you mean"), ("runs/mine", "")],
)
def test_a_name_without_its_version_lists_those_that_are(source, said):
    with pytest.raises(InputError) as e:
        read_pretrained(source)
    start = f"init_from={source!r}: no such file or directory"
    assert str(e.value).startswith(start + said) and (said or str(e.value) == start)
