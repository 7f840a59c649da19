"""Faults of a config that are found before files or devices are touched."""

import ast
import pathlib
import re
import shlex
from typing import Any

import flax.linen as nn
import pytest
from ml_collections import ConfigDict

import vit_jax.config
from vit_jax.base.errors import InputError
from vit_jax.config import FAMILIES, base_config, classification, fewshot
from vit_jax.config.evals import EVALUATORS
from vit_jax.config.stored import from_json, to_json
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.run.setup.validation import find_faults, validate


def make_config():
    c = base_config()
    c.global_batch_size, c.duration = 64, "10 epochs"
    c.model.name, c.data.name, c.data.image_size = "ViT-mu/4", "digits", 8
    c.optimizer.peak_lr = 1e-3
    c.evals.test = classification(split="test", every="1 epochs")
    c.evals.few = fewshot(train_split="train", test_split="test", every="1 epochs")
    return c


config = pytest.fixture(make_config, name="config")


def test_valid_config(config):
    assert find_faults(config) == []
    validate(config, [], "--config=mine.py")
    assert find_faults(from_json(to_json(config))) == []


FAULTS = pathlib.Path(__file__).with_name("faults.txt")
CASES = [line.split("  ->  ") for line in FAULTS.read_text().splitlines()]


def faults_of(words):
    """Of overrides of a valid config, or of the words after a config's name."""
    pairs = [tuple(word.split("=", 1)) for word in words]
    if pairs[0][0] == "--config":
        with pytest.raises(InputError) as e:
            load_config(pairs[0][1])
        return [*e.value.faults]
    config = make_config()
    return apply_overrides(config, pairs) + find_faults(config)


def is_shown(value, fault):
    """Whether a fault shows the value of its key, or the op of a value that is at fault."""
    try:
        parts = [value, f"{ast.literal_eval(value.title())}"]
    except (SyntaxError, TypeError, ValueError):
        parts = re.split("[|,]", value)
    return any(part in fault for part in parts)


@pytest.mark.parametrize(("text", "remedy"), CASES)
def test_fault(text, remedy):
    """It names a key, the value and the remedy."""
    words = shlex.split(text)
    (fault,) = faults_of(words)
    following = ("data.streams", "model.patch_size", "model.pos_embed", "objective.gram_every",
                 "objective.teacher")  # fmt: skip  # from other keys
    values = dict(word.split("=", 1) for word in words)
    named = re.match(r"(?:--config[.=])?(?P<key>[\w.]*)", fault)["key"]
    fault = fault.removeprefix("--config.")
    assert fault.startswith((*values, *following)) and remedy in fault
    if fault.startswith(f"{named}=") and named in values:
        assert is_shown(values[named], fault)


@pytest.mark.parametrize("order", ["None", "record", "chunk"])
def test_pairs_are_needed_where_images_are_mixed_alone(config, order):
    odd = {"global_batch_size": "63", "data.ops": "flip", "data.order": order}
    assert apply_overrides(config, list(odd.items())) == []
    assert find_faults(config) == []
    config.global_batch_size, config.data.ops = 64, "mixup(0.2)"
    assert find_faults(config) == []


def test_streams_may_be_given_before_the_order_is_known(config):
    config.data.streams = 8
    assert find_faults(config) == []


@pytest.mark.parametrize(
    ("key", "example"), [("seed", 0), ("optimizer.weight_decay", 0.0), ("data.ops", "''")]
)
def test_config_file_that_empties_a_key(config, key, example):
    parents, _, leaf = key.rpartition(".")
    (config[parents] if parents else config)[leaf] = None
    assert find_faults(config) == [f"{key}=None: needs a value, e.g. {example}"]


def test_several_faults_are_all_listed(config):
    overrides = {
        "duration": "90",
        "global_batch_size": "-8",
        "model.name": "ViT-Q/16",
        "data.ops": "flop",
        "data.mean": "1,2",
        "evals.test.ops": "flip",
        "loss.name": "x",
        "optimizer.name": "x",
        "schedule.name": "x",
        "mesh.platform": "x",
        "checkpoint.keep_last": "0",
        "log.profile": "x",
    }
    assert apply_overrides(config, list(overrides.items())) == []
    config.data.name = None
    faults = find_faults(config)
    named = {key: [fault for fault in faults if fault.startswith(key)] for key in overrides}
    assert {key: len(found) for key, found in named.items()} == dict.fromkeys(overrides, 1)
    assert faults[0].startswith("data.name: not set")
    assert len(faults) == len(overrides) + 1


def test_faults_do_not_hide_behind_a_missing_size(config):
    config.data.image_size = None
    config.data.ops = "flop"
    sizes, ops = find_faults(config)
    assert sizes.startswith("data.image_size: not set") and ops.startswith("data.ops: ")


def test_faults_of_overrides_and_of_the_config_in_one_error(config):
    overrides = [("model.wdth", "3"), ("seed", "x"), ("loss.name", "x"), ("mesh.platform", "x")]
    with pytest.raises(InputError) as e:
        validate(config, apply_overrides(config, overrides), "--config=mine.py")
    assert str(e.value).splitlines() == [
        "--config=mine.py: 4 faults",
        "  --config.model.wdth: no such key; did you mean model.width?",
        "  --config.seed='x': needs an int",
        "  loss.name='x': known: softmax, sigmoid",
        "  mesh.platform='x': known: cpu, gpu, tpu",
    ]


def test_field_that_the_family_lacks(config, monkeypatch):
    """ViT has every key of base_config(), so a family with fewer keys is used."""

    class Fewer(nn.Module):
        num_classes: int
        image_size: tuple[int, int]
        patch_size: tuple[int, int]
        dropout: float = 0.0
        dtype: Any = None

        names, parse = (), staticmethod(lambda name: {})

    monkeypatch.setitem(FAMILIES, "Fewer", Fewer)
    config.model.name = "Fewer-mu/4"
    config.model.dropout = 0.1
    config.model.head_bias, config.model.hidden_head = -10.0, True
    head_bias, hidden_head = sorted(find_faults(config))
    assert head_bias.startswith("model.head_bias: Fewer has no such field")
    assert hidden_head.startswith("model.hidden_head: Fewer has no such field")
    config.model.head_bias = config.model.hidden_head = None
    config.model.name = "ViT-mu/4"
    assert find_faults(config) == []


def test_every_field_of_config_is_one_of_some_family():
    fields = set(base_config().model) - {"name", "kernels", "keep_tokens_until", "patch_sizes"}
    known = [set(FAMILIES.keys_of(FAMILIES.find(start))) for start in FAMILIES]
    assert fields == set().union(*known) | {"dtype"}


@pytest.mark.parametrize("kind", EVALUATORS)
def test_an_evaluator_s_helper_makes_its_entries(kind):
    make, keys = getattr(vit_jax.config, kind), EVALUATORS.find(kind).declared()
    required = {k: "1 epochs" for k, declared in keys.items() if declared.default is ...}
    entry = make(**required)
    assert entry.type == kind
    assert set(entry) == {"type", *keys}
    with pytest.raises(InputError) as error:
        make(evry="1 epochs", **(required | {"every": 3}))
    assert [re.split("[:=]", fault)[0] for fault in error.value.faults] == ["evry", "every"]
    with pytest.raises(InputError) as error:
        make()
    assert [fault.partition(":")[0] for fault in error.value.faults] == [*required]


def test_config_that_is_not_born_from_base_config(config):
    assert "model.name: missing; start from base_config()" in find_faults(ConfigDict({"seed": 0}))
    config.evals.own = ConfigDict({"type": "classification", "split": "test", "evry": "1 epochs"})
    faults = find_faults(config)
    assert [fault.split(":")[0] for fault in faults] == [
        f"evals.own.{key}"
        for key in (
            "batch_size",
            "by_class",
            "data_dir",
            "data_name",
            "every",
            "evry",
            "flips",
            "metrics",
            "ops",
        )
    ]
    assert all("make entries with config.classification()" in fault for fault in faults)
