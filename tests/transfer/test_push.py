"""The push command, against a server that speaks the Hub's protocol."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from fake_hub import COMMITS, served
from huggingface_hub import ModelCard, constants

from vit_jax.base.errors import InputError
from vit_jax.main import main
from vit_jax.transfer import load_pretrained
from vit_jax.transfer.push import _results

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    with served({}, monkeypatch, tmp_path) as hub:
        yield hub


def equal_logits(sources):
    images = np.random.default_rng(0).uniform(-1, 1, (2, 32, 32, 3)).astype(np.float32)
    first, second = (jax.jit(m.apply)(v, images) for m, v in map(load_pretrained, sources))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("format", ["timm", "hf"])
def test_what_is_pushed_is_read_back(hub, golden, capsys, caplog, format):
    source = golden / ("timm_vit.safetensors" if format == "timm" else "hf_vit")
    words = ["push", str(source), "me/mine", f"--format={format}"]
    words += ["--max_shard_size=20KB"] * (format == "timm")
    assert main([*words, "--dry_run", "--license=mit"]) == 0
    out = capsys.readouterr().out
    assert not hub.repositories
    assert "license: mit" in out
    assert main([*words, "--license=mit"]) == 0
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    files = hub.repositories["me/mine", COMMITS["main"]]
    assert {name: len(content) for name, content in files.items()} == said["files"]
    assert ("model.safetensors.index.json" in files) == (format == "timm")
    assert ("but timm reads one file only" in printed.err) == (format == "timm")
    told = ("README.md", "config.json", "receipt.json")
    assert all(f"== {name}\n{files[name].decode()}" in out for name in told)
    use = 'transformers.ViTForImageClassification.from_pretrained("me/mine")'
    assert (use in out) == (format == "hf") and "timm.create_model" not in out  # reads no shards
    card = ModelCard(files["README.md"].decode()).data
    assert (card.license, card.pipeline_tag) == ("mit", "image-classification")
    assert "hf_writes" not in out + caplog.text + str(files)
    equal_logits([source, "hf:me/mine@main"])


def test_shards_replace_the_whole_file_of_an_earlier_push(hub, golden):
    """A new model in shards is not read as the old one in a file."""
    assert main(["push", str(golden / "timm_vit.safetensors"), "me/mine"]) == 0
    source = golden / "hf_vit"
    assert main(["push", str(source), "me/mine", "--format=hf", "--max_shard_size=20KB"]) == 0
    files = hub.repositories["me/mine", COMMITS["main"]]
    assert "model.safetensors" not in files and "model.safetensors.index.json" in files
    equal_logits([source, "hf:me/mine"])
    shard = min(name for name in files if name.endswith(".safetensors"))
    del files[shard]
    hub.repositories["me/other", COMMITS["main"]] = files
    with pytest.raises(InputError, match=f"has no file {shard}, which its model.safetensors.index"):
        load_pretrained("hf:me/other")
    files["model.safetensors.index.json"] = b"{"
    hub.repositories["me/third", COMMITS["main"]] = files
    with pytest.raises(InputError, match=r"index\.json"):
        load_pretrained("hf:me/third")


def test_a_refused_card_makes_no_repository(hub, golden, capsys):
    hub.refused = "validate-yaml"
    assert main(["push", str(golden / "timm_vit.safetensors"), "me/mine"]) == 2
    assert "--license needs one of its identifiers" in capsys.readouterr().err
    assert not hub.repositories


def test_a_branch_and_a_pull_request(hub, golden, capsys):
    words = ["push", str(golden / "timm_vit.safetensors"), "me/mine"]
    assert main([*words, "--revision=two"]) == 0
    assert "model.safetensors" in hub.repositories["me/mine", "two"]
    assert main([*words, "--pull_request"]) == 0
    assert "model.safetensors" in hub.repositories["me/mine", "refs/pr/1"]
    assert '"address": "http' in capsys.readouterr().out
    assert not hub.repositories["me/mine", COMMITS["main"]]
    equal_logits([golden / "timm_vit.safetensors", "hf:me/mine@two"])


def test_the_same_command_goes_on_after_a_failure(hub, golden, capsys):
    words = ["push", str(golden / "timm_vit.safetensors"), "me/mine"]
    hub.refused = "commit"
    assert main(words) == 2
    assert "cannot be sent" in capsys.readouterr().err
    hub.refused = ""
    assert main(words) == 0
    assert "model.safetensors" in hub.repositories["me/mine", COMMITS["main"]]


def test_a_large_file_that_was_sent_is_not_sent_again(hub, golden, monkeypatch):
    """By Git LFS; the Hub's own protocol, Xet, is in a library."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    words = ["push", str(golden / "timm_vit.safetensors"), "me/mine"]
    hub.large, hub.refused = {}, "commit"
    assert main(words) == 2
    assert "PUT" in {command for command, _ in hub.asked}
    hub.refused, hub.asked[:] = "", []
    assert main(words) == 0
    assert "PUT" not in {command for command, _ in hub.asked}
    equal_logits([golden / "timm_vit.safetensors", "hf:me/mine"])


def test_faults_name_the_flag_and_the_remedy(hub, golden, capsys, monkeypatch):
    source = str(golden / "timm_vit.safetensors")
    assert main(["push", source, "mine", "--format=npz", "--revision=a", "--pull_request"]) == 2
    err = capsys.readouterr().err
    for part in ("'mine': needs OWNER/NAME", "--format=npz: push sends a folder", "--revision=a"):
        assert part in err
    monkeypatch.setenv("HF_TOKEN", "hf_reads")
    assert main(["push", source, "me/mine"]) == 2
    err = capsys.readouterr().err
    assert "set HF_TOKEN" in err
    assert "hf_reads" not in err


def test_the_card_of_a_run(hub, golden, tmp_path, capsys):
    """Results with their split, the recipe as asked and as resolved, figures."""
    run = shutil.copytree(golden / "run_0_2_0", tmp_path / "run")
    config = run / "config.json"
    config.write_text(
        config.read_text()
        .replace("pad_crop(1)", "pad_crop(1)|flip")
        .replace('"split": "test"', '"split": "test?"')
    )
    (run / "figures").mkdir()
    (run / "figures/norms.png").write_bytes(b"a picture")
    assert main(["push", str(run), "me/mine"]) == 0
    files = hub.repositories["me/mine", COMMITS["main"]]
    assert files["norms.png"] == b"a picture"
    recipe, stored = (json.loads(text) for text in
                      (files["recipe.json"], (run / "config.json").read_text()))  # fmt: skip
    assert recipe["asked"]["duration"] == stored["asked"]["duration"]
    text = files["README.md"].decode()
    assert "![norms](norms.png)" in text
    assert f"| duration | `{stored['asked']['duration']}` |" in text
    assert r"| `pad_crop(1)\|flip` |" in text
    assert re.findall(r"arxiv.org/abs/(\S+)", text) == ["2010.11929"]
    assert "evaluate --workdir=" in text
    of_knn = {"config": {"evals": {"near": {"test_split": "val?"}}}, "results": {"near/top1": {}}}
    assert _results(of_knn) == [("near", "top1", {}, None, "val")]
    results = ModelCard(text).data.eval_results
    assert "test/num_examples" in text and "test/num_examples" not in {
        result.metric_name for result in results
    }
    (top1,) = [r for r in results if r.metric_name == "test/top1"]
    assert (top1.metric_type, top1.dataset_name, top1.dataset_split) == (
        "accuracy",
        "digits",
        "test",
    )
