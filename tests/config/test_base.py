import copy
import subprocess
import sys

import pytest
from ml_collections import ConfigDict
from read_settings import settings_of, splits_of

from vit_jax.config import (
    REQUIRED,
    SplitKey,
    base_config,
    changed_keys,
    classification,
    fewshot,
    flatten,
    image_hw,
    split_words,
    step_range,
    train_split,
)
from vit_jax.config.node import WrongTypeError
from vit_jax.config.stored import from_json, to_json
from vit_jax.config.text import apply_overrides


def make_config():
    """A config with a value of every type set."""
    c = base_config()
    c.global_batch_size, c.duration = 64, "5e6 examples"
    c.model.name, c.model.patch_size, c.model.scan = "ViT-S/16", (16, 8), True
    c.model.head_bias = -10.0
    c.data.name, c.data.image_size = "cifar10", (32, 48)
    c.data.mean = (0.485, 0.456, 0.406)
    c.optimizer.peak_lr = 1e-3
    c.evals.test = classification(split="test", every="1 epochs", ops="decode", batch_size=360)
    c.evals.val = classification(split="train[:10%]", every="500 steps")
    c.evals.few = fewshot(train_split="train", test_split="test", every="1 epochs")
    return c


@pytest.fixture
def config():
    return make_config()


def set_keys(config, **texts):
    """Call `apply_overrides` with `__` for dots; return its faults."""
    return apply_overrides(config, [(k.replace("__", "."), v) for k, v in texts.items()])


def test_every_key_is_typed():
    def untyped(node, prefix=""):
        for key in node:
            if isinstance(node[key], ConfigDict):
                yield from untyped(node[key], f"{prefix}{key}.")
            elif node.get_type(key) in (type(None), list, dict):
                yield prefix + key

    assert list(untyped(base_config())) == []
    types = {int, float, bool, str, tuple, object}
    assert {type_of(base_config(), key) for key in flatten(base_config())} == types


def type_of(config, key):
    *parents, leaf = key.split(".")
    for parent in parents:
        config = config[parent]
    return config.get_type(leaf)


def test_only_sizes_have_no_type_of_their_own():
    keys = [key for key in flatten(base_config()) if type_of(base_config(), key) is object]
    assert sorted(keys) == [
        "data.image_size", "data.local_size", "data.max_tokens", "data.patch_size",
        "model.patch_size", "model.patch_sizes", "objective.gram_size",
    ]  # fmt: skip


def test_config_is_locked_but_for_the_names_of_evals():
    c = base_config()
    for node in (c, c.model, c.data, c.objective, c.loss, c.optimizer, c.schedule, c.mesh,
                 c.checkpoint, c.log):  # fmt: skip
        with pytest.raises((AttributeError, KeyError), match="brightness"):
            node.brightness = 1
    c.evals.mine = classification(split="test", every="1 epochs")
    with pytest.raises((AttributeError, KeyError), match="brightness"):
        c.evals.mine.brightness = 1


def test_config_file_cannot_set_a_wrong_type(config):
    for key, value in [("seed", "x"), ("duration", 3), ("global_batch_size", 1.5)]:
        with pytest.raises(TypeError, match=key):
            config[key] = value


def test_base_configs_share_nothing():
    one, other = base_config(), base_config()
    one.model.width, one.data.mean = 3, (0.0, 0.0, 0.0)
    one.evals.test = classification(split="test", every="1 epochs")
    assert other.model.width is None
    assert other.data.mean == (0.5, 0.5, 0.5)
    assert not other.evals


def test_required_keys_are_born_unset():
    unset = [key for key, value in flatten(base_config()).items() if value is None]
    assert set(REQUIRED) < set(unset)


def other_value(config, key):
    """A different value for `key` of the same type."""
    value = flatten(config)[key]
    kind = type_of(config, key)
    return {int: 977, float: 0.977, bool: not value, str: "other", tuple: (9, 9, 7), object: 97}[
        kind
    ]


@pytest.mark.parametrize("key", sorted({*flatten(base_config())} - {"plugins"}))  # test_plugins.py
def test_change_of_a_key_on_resume(config, key):
    new = from_json(to_json(config))
    parents, _, leaf = key.rpartition(".")
    (new[parents] if parents else new)[leaf] = other_value(config, key)
    free = key.startswith(("mesh.", "checkpoint.", "stop.", "log.", "job.", "study.")) or key in (
        "data.data_dir",
        "data.reader",
        "data.max_corrupt_fraction",
        "data.tokenizer",
        "data.exclude",
        "auto",
        "model.remat",
        "model.remat_layers",
        "model.kernels",
    )
    expected = {} if free else {key: (flatten(config)[key], flatten(new)[key])}
    assert changed_keys(config, new) == expected
    assert flatten(config)[key] != flatten(new)[key]


def test_evaluators_may_change_on_resume(config):
    new = from_json(to_json(config))
    new.evals.test.every = "7 steps"
    del new.evals.val
    new.evals.more = classification(split="test", every="1 epochs")
    assert changed_keys(config, new) == {}


def test_a_file_of_records_may_move_on_resume(config):
    new = from_json(to_json(config))
    config.data.subset, new.data.subset = "runs/kept.npz", "elsewhere/kept.npz"
    assert changed_keys(config, new) == {}
    new.data.subset = "1000"
    assert changed_keys(config, new) == {"data.subset": ("runs/kept.npz", "1000")}


def test_several_changes_on_resume(config):
    new = from_json(to_json(config))
    new.seed, new.model.scan, new.mesh.fsdp = 1, False, 4
    assert changed_keys(config, new) == {"model.scan": (True, False), "seed": (0, 1)}


def test_size_as_list_is_no_change_on_resume(config):
    config.data.image_size = [32, 48]
    assert changed_keys(from_json(to_json(config)), config) == {}


@pytest.mark.parametrize("arg", ["ViT-B/16,x,debug", "debug,ViT-B/16,x", " ViT-B/16, debug ,x,,"])
def test_debug_may_stand_in_any_place(arg):
    assert split_words(arg, {"debug": "tiny"}) == (["ViT-B/16", "x"], {"debug"})
    assert split_words("", {"debug": "tiny"}) == ([], set())


@pytest.fixture(autouse=True)
def in_repository(request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)


@pytest.mark.parametrize(
    ("size", "hw"), [(8, (8, 8)), ((8, 16), (8, 16)), ([8, 16], (8, 16)), (1, (1, 1))]
)
def test_image_hw(size, hw):
    assert image_hw(size) == hw


def test_step_range():
    assert list(step_range("10:15", "log.profile")) == [10, 11, 12, 13, 14]
    assert step_range("0:1", "log.profile") == range(0, 1)


def test_an_entry_is_typed():
    entry = fewshot(train_split="train", test_split="test", every="1 epochs", shots=[5])
    assert entry.shots == (5,)
    for key in ("batch_size", "num_draws"):
        with pytest.raises(TypeError):
            entry[key] = "many"


def test_splits_that_evaluators_look_at(config):
    config.data.name, config.data.data_dir = "cifar10", "there"
    assert train_split(settings_of(config).data) == SplitKey("cifar10", "train", "there", None)
    config.evals.few.data_name, config.evals.val.data_dir = "cifar100", "here"
    assert splits_of(config, "test") == {"split": SplitKey("cifar10", "test", "there", None)}
    assert splits_of(config, "val")["split"].data_dir == "here"
    assert splits_of(config, "few") == {
        "train_split": SplitKey("cifar100", "train", "there", None),
        "test_split": SplitKey("cifar100", "test", "there", None),
    }


IMPORTS = """
import sys

import vit_jax.config
vit_jax.compare  # its reader of runs is loaded by the call
assert not {"jax", "flax", "numpy"} & sys.modules.keys()

import vit_jax.commands.evaluate
import vit_jax.commands.train
import vit_jax.data
import vit_jax.main
from vit_jax.devices import flops
from vit_jax.experiment import optimizers, schedules
from vit_jax.run import writers
import vit_jax.run.setup.recipes
import vit_jax.run.setup.validation
[getattr(vit_jax, name) for name in vit_jax.__all__]
vit_jax.data.parse_ops("inception_crop|flip", (8, 8))
try:
    vit_jax.data.parse_ops("decode|resize(0)", (8, 8))
except ValueError:
    pass
with writers.MetricWriter(sys.argv[1]) as writer:
    writer.write(1, {"train/loss": 2.0})
heavy = {"tensorflow", "tensorflow_datasets", "sklearn", "torch"} & sys.modules.keys()
assert not heavy, heavy
from vit_jax.config.plugins import has_devices
assert not has_devices()
"""


def test_importing_takes_no_device_and_no_tensorflow(tmp_path):
    """Nor does the use of writers and of the declared ops."""
    command = [sys.executable, "-c", IMPORTS, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_copy_looks_for_no_nearest_key(monkeypatch):
    """Copying asks every section for methods that it lacks; a search for each took 2 ms."""
    config = base_config()
    monkeypatch.setattr("vit_jax.config.node.nearest_key", None)
    assert copy.deepcopy(config) == config


def test_a_copy_has_typed_places_of_its_own():
    """And a key that follows another one follows the copied one."""
    config = base_config()
    config.model.depth, config.plugins = config.model.get_ref("width"), ("one",)
    copied = copy.deepcopy(config)
    copied.model.width, copied.plugins = 3, ()
    assert (copied.model.depth, config.model.depth, config.plugins) == (3, None, ("one",))
    assert copied.is_locked and not copied.evals.is_locked
    with pytest.raises(WrongTypeError, match="width='wide': needs a value of type int"):
        copied.model.width = "wide"
