"""Files of the Hugging Face Hub, from a server of this machine that speaks its protocol."""

import json
import logging
import os
import subprocess
import sys

import huggingface_hub
import jax
import numpy as np
import pytest
from asked import prepare
from at_fault import at_fault
from fake_hub import COMMITS, Hub, move_hub, served
from huggingface_hub import constants
from images import write_images

from vit_jax.config.text import apply_overrides, load_config
from vit_jax.transfer import load_pretrained, read_pretrained
from vit_jax.transfer.model_zoo import PUBLISHED, Published, fetch_from_hub, parse_address

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def hub(golden, tmp_path, monkeypatch):
    """The server's class; its address and a new cache are huggingface_hub's."""
    files = {path.name: path.read_bytes() for path in (golden / "hf_vit").iterdir()}
    del files["io.npz"]
    with served({("org/vit", COMMITS["main"]): files}, monkeypatch, tmp_path):
        yield Hub


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fetched(hub):
    return sorted(file for method, file in hub.asked if method == "GET")


def test_a_repository_is_fetched_once(hub, golden):
    folder = fetch_from_hub("org/vit")
    assert content_of(folder) == hub.repositories["org/vit", COMMITS["main"]]
    assert fetched(hub) == ["config.json", "model.safetensors"]
    assert fetch_from_hub("org/vit") == folder
    assert fetched(hub) == ["config.json", "model.safetensors"]
    assert not logging.getLogger("huggingface_hub").propagate  # or retries are printed twice
    found, expected = load_pretrained(folder), load_pretrained(golden / "hf_vit")
    assert found[0] == expected[0]
    jax.tree.map(np.testing.assert_array_equal, found[1], expected[1])


def test_all_files_are_of_the_revision_asked_for(hub):
    newer = hub.repositories["org/vit", COMMITS["main"]]
    older = newer | {"config.json": b"{}", "preprocessor_config.json": b"[]"}
    hub.repositories["org/vit", COMMITS["older"]] = older
    assert content_of(fetch_from_hub("org/vit", revision="older")) == older
    assert content_of(fetch_from_hub("org/vit")) == newer
    assert content_of(fetch_from_hub("org/vit", revision=COMMITS["older"])) == older


def test_an_address_of_the_hub_goes_through_its_cache(hub, golden, tmp_path):
    address = f"{constants.ENDPOINT}/org/vit/resolve/main/model.safetensors"
    assert parse_address(address) == ("org/vit", "model.safetensors", "main")
    assert parse_address("https://example.org/org/vit/resolve/main/model.safetensors") is None
    found = load_pretrained(f"{address}?download=true")
    jax.tree.map(np.testing.assert_array_equal, found[1], load_pretrained(golden / "hf_vit")[1])
    assert (tmp_path / "hub/models--org--vit/snapshots").is_dir()


def test_a_published_name_of_the_hub_keeps_the_value_range_beside_it(hub, golden, monkeypatch):
    weights = golden / "timm_efficientnet.safetensors"
    config = {"width": 0.125, "depth": 0.3, "pretrained_cfg": {"input_size": [3, 64, 64]}}
    files = {"model.safetensors": weights.read_bytes(), "config.json": json.dumps(config).encode()}
    hub.repositories["timm/tf_efficientnet_b9", COMMITS["main"]] = files
    entry = Published("timm:tf_efficientnet_b9", 10)
    monkeypatch.setitem(PUBLISHED, "EfficientNet-B9@test", entry)
    found = read_pretrained("EfficientNet-B9@test")
    assert (found.source, found.model.image_size) == ("EfficientNet-B9@test", (64, 64))
    assert (found.spec.mean, found.spec.loss) == ((0.485, 0.456, 0.406), "softmax")


def test_a_file_with_its_json_in_a_folder(hub, golden):
    files = {
        "in/timm.safetensors": (golden / "timm_vit.safetensors").read_bytes(),
        "in/timm.json": (golden / "timm_vit.json").read_bytes(),
    }
    hub.repositories["org/timm", COMMITS["main"]] = files
    path = fetch_from_hub("org/timm", "in/timm.safetensors")
    assert path.name == "timm.safetensors"
    assert content_of(path.parent) == {name[3:]: content for name, content in files.items()}


@pytest.mark.parametrize(
    ("repo_id", "revision", "why"),
    [
        ("org/none", None, "does not exist"),
        ("org/gated", None, "terms"),
        ("org/vit", "v9", "no revision 'v9'"),
        ("org/empty", None, "no file model.safetensors"),
        ("org/down", None, "not reached ("),
        ("org/cut", None, "model.safetensors cannot be fetched ("),
        ("a/b/c", None, ""),
    ],
)
def test_refusals_name_the_source_and_why(hub, repo_id, revision, why, capfd):
    hub.repositories["org/empty", COMMITS["main"]] = {}
    hub.repositories["org/cut", COMMITS["main"]] = {"model.safetensors": bytes(1000)}
    with at_fault("init_from") as error:
        fetch_from_hub(repo_id, revision=revision)
    assert str(error.value).startswith(f"init_from='hf:{repo_id}") and why in str(error.value)
    assert "Retrying" not in capfd.readouterr().err


def test_without_the_network_the_cache_serves_what_is_complete(hub, monkeypatch):
    folder = fetch_from_hub("org/vit")
    huggingface_hub.hf_hub_download("org/vit", "config.json", revision="main")
    hub.repositories["org/half", COMMITS["main"]] = hub.repositories["org/vit", COMMITS["main"]]
    huggingface_hub.hf_hub_download("org/half", "model.safetensors")
    move_hub(monkeypatch, "http://127.0.0.1:9")
    assert fetch_from_hub("org/vit") == folder
    with at_fault("init_from"):  # whether it has JSON files is unknown
        fetch_from_hub("org/half")


@pytest.mark.parametrize(
    ("source", "repository", "golden_files"),
    [
        ("hf:org/vit", "org/vit", None),
        ("hf:org/vit@older", "org/vit", None),
        ("timm:vit_tiny.x", "timm/vit_tiny.x", "timm_vit"),
    ],
)
def test_sources_by_short_names(hub, golden, source, repository, golden_files):
    files = hub.repositories["org/vit", COMMITS["main"]]
    if golden_files:
        weights, config = (golden / f"{golden_files}.{end}" for end in ("safetensors", "json"))
        files = {"model.safetensors": weights.read_bytes(), "config.json": config.read_bytes()}
    hub.repositories = {(repository, COMMITS["older" if "@" in source else "main"]): files}
    Hub.repositories = hub.repositories
    found = read_pretrained(source)
    assert found.source == source
    expected = read_pretrained(golden / ("timm_vit.safetensors" if golden_files else "hf_vit"))
    assert found.model == expected.model
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


@pytest.mark.parametrize(
    "source",
    ["timm:none", "hf:org/vit@v9", "vit_base_patch16_224.augreg_in21k",
     "google/vit-base-patch16-224"],
)  # fmt: skip
def test_what_is_no_repository(hub, source):
    with at_fault("init_from"):
        read_pretrained(source)


def test_fine_tuning_starts_from_the_hub(hub, tmp_path):
    """finetune:MODEL,folder with hf:, up to the point where training begins."""
    names = ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png")
    write_images(tmp_path / "own", dict.fromkeys(names, np.zeros((30, 40, 3), np.uint8)))
    config = load_config("finetune:ViT-mu/8,folder")
    sizes = {"depth": "2", "mlp_dim": "64", "num_heads": "4"}
    overrides = [(f"model.{field}", size) for field, size in sizes.items()]
    overrides += [("init_from", "hf:org/vit"), ("data.data_dir", str(tmp_path / "own"))]
    assert apply_overrides(config, overrides) == []
    run = prepare(config, tmp_path / "run")
    assert (run.resolved.config.data.image_size, run.resolved.config.model.gelu) == (32, "exact")
    assert "embedding/kernel" in run.initial_params and "head/kernel" not in run.initial_params
    assert fetched(hub) == ["config.json", "model.safetensors"]


PROGRAM = """
from vit_jax.base.errors import InputError
from vit_jax.transfer.model_zoo import fetch_from_hub
print(fetch_from_hub("org/vit"))
try:
    fetch_from_hub("org/other")
except InputError as e:
    print(e)
"""


@pytest.mark.slow
def test_the_environment_of_huggingface_hub_applies(hub, tmp_path):
    """HF_ENDPOINT and HF_HOME, then HF_HUB_OFFLINE."""
    said = []
    for offline in ("0", "1"):
        env = {"HF_ENDPOINT": constants.ENDPOINT, "HF_HOME": str(tmp_path / "home")}
        env |= {"HF_HUB_OFFLINE": offline}
        asked = len(hub.asked)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=os.environ | env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines())
        assert (len(hub.asked) > asked) == (offline == "0")
    assert said[0][0] == said[1][0]
    assert said[0][0].startswith(f"{tmp_path}/home/hub/models--org--vit/snapshots/")
    assert "does not exist" in said[0][1]
    assert "HF_HUB_OFFLINE is set" in said[1][1]
