import subprocess
import sys

import pytest
from ml_collections import ConfigDict

from vit_jax.config import (
    FREE_ON_RESUME,
    REQUIRED,
    InputError,
    apply_overrides,
    base_config,
    changed_keys,
    classification,
    collect_faults,
    eval_splits,
    fewshot,
    flatten,
    from_json,
    image_hw,
    load_config,
    model_fields,
    nearest,
    split_words,
    step_range,
    to_json,
    train_split,
)
from vit_jax.main import parse_flags


@pytest.fixture
def config():
    """A config in which something of every type is set."""
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


def set_keys(config, **texts):
    """`apply_overrides` with `__` for the dots; returns its faults."""
    return apply_overrides(config, [(k.replace("__", "."), v) for k, v in texts.items()])


# Keys and types


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
    assert sorted(keys) == ["data.image_size", "model.patch_size"]


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


# Overrides


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("seed", "17", 17),
        ("seed", "-1", -1),
        ("global_batch_size", "4_096", 4096),
        ("optimizer.peak_lr", "3e-4", 3e-4),
        ("optimizer.weight_decay", "1", 1.0),
        ("model.scan", "true", True),
        ("model.scan", "False", False),
        ("model.name", "ViT-B/16", "ViT-B/16"),
        ("data.data_dir", "/a=b c", "/a=b c"),
        ("data.ops", "", ""),
        ("duration", "90 epochs", "90 epochs"),
        ("data.data_dir", "17", "17"),
        ("data.image_size", "224", 224),
        ("data.image_size", "32,48", (32, 48)),
        ("data.image_size", "(32, 48)", (32, 48)),
        ("data.image_size", "[32, 48]", (32, 48)),
        ("model.patch_size", "14", 14),
        ("data.mean", "0.485,0.456,0.406", (0.485, 0.456, 0.406)),
        ("data.std", "1,1,1", (1, 1, 1)),
        ("evals.test.every", "3 steps", "3 steps"),
        ("evals.test.batch_size", "128", 128),
        ("evals.val.batch_size", "128", 128),
        ("evals.few.every", "3 steps", "3 steps"),
        ("evals.few.shots", "1,5", (1, 5)),
        ("evals.few.l2", "[1, 1024.0]", (1, 1024.0)),
        ("evals.few.num_draws", "5", 5),
        ("evals.few.data_name", "cifar100", "cifar100"),
    ],
)
def test_override(config, key, text, value):
    expected = flatten(config) | {key: value}
    assert apply_overrides(config, [(key, text)]) == []
    assert flatten(config) == expected
    assert type(flatten(config)[key]) is type(value)


@pytest.mark.parametrize(
    "key",
    ["init_from", "model.name", "model.patch_size", "model.width", "model.scan", "model.head_bias",
     "data.image_size", "optimizer.grad_clip_norm", "log.profile", "checkpoint.keep_every",
     "evals.test.batch_size", "evals.few.data_name", "evals.test.data_dir"],
)  # fmt: skip
def test_what_is_optional_can_be_none(config, key):
    examples = {int: "3", float: "3", bool: "true", str: "x", object: "3"}
    assert apply_overrides(config, [(key, examples[type_of(config, key)])]) == []
    assert flatten(config)[key] is not None
    assert apply_overrides(config, [(key, "None")]) == []
    assert flatten(config)[key] is None


def test_none_as_a_word_of_its_own(config):
    assert set_keys(config, model__pos_embed="none", model__remat="none") == []
    assert (config.model.pos_embed, config.model.remat) == ("none", "none")


def test_what_is_not_optional_cannot_be_none(config):
    faults = set_keys(config, seed="None", optimizer__weight_decay="None", data__mean="None")
    assert len(faults) == 3
    assert set_keys(config, optimizer__name="None") == []
    assert config.optimizer.name == "None"


@pytest.mark.parametrize(
    ("key", "text", "needed"),
    [
        ("seed", "x", "needs an int"),
        ("seed", "1.5", "needs an int"),
        ("seed", "", "needs an int"),
        ("global_batch_size", "many", "needs an int or None"),
        ("optimizer.peak_lr", "1e", "needs a number or None"),
        ("optimizer.b1", "0,9", "needs a number"),
        ("model.scan", "yes", "needs true or false or None"),
        ("data.image_size", "32x48", "needs a number or several, e.g. 32 or 32,48"),
        ("data.image_size", "{[]: 1}", "needs a number or several"),
        ("data.image_size", "True", "needs a number or several"),
        ("data.image_size", "'ab'", "needs a number or several"),
        ("data.mean", "0.5", "needs numbers with commas between them"),
        ("data.mean", "a,b,c", "needs numbers with commas between them"),
        ("evals.test.batch_size", "many", "needs an int"),
        ("evals.few.shots", "5", "needs numbers with commas"),
        ("evals.few.num_draws", "None", "needs an int"),
    ],
)
def test_override_of_wrong_type(config, key, text, needed):
    before = to_json(config)
    (fault,) = apply_overrides(config, [(key, text)])
    assert fault.startswith(f"--config.{key}={text!r}: {needed}")
    assert to_json(config) == before


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("model.wdth", "did you mean model.width?"),
        ("optimiser.peak_lr", "did you mean optimizer.peak_lr?"),
        ("evals.tset.every", "did you mean evals.test.every?"),
        ("model.name.x", "did you mean model.name?"),
        ("zzzz", "known: checkpoint.every, "),
    ],
)
def test_unknown_key(config, key, hint):
    (fault,) = apply_overrides(config, [(key, "1")])
    assert fault.startswith(f"--config.{key}: no such key; {hint}")


def test_section_given_instead_of_key(config):
    (fault,) = apply_overrides(config, [("schedule", "cosine")])
    assert fault.startswith(
        "--config.schedule: no such key; it holds schedule.cooldown, schedule.name, "
    )
    (fault,) = apply_overrides(config, [("evals.test", "1")])
    assert "it holds evals.test.batch_size, evals.test.data_dir" in fault


def test_all_faults_at_once_and_the_rest_is_set(config):
    faults = set_keys(
        config, sed="1", seed="2", model__width="x", optimizer="adamw", loss__name="l"
    )
    assert [fault.split(":")[0] for fault in faults] == [
        "--config.sed",
        "--config.model.width='x'",
        "--config.optimizer",
    ]
    assert (config.seed, config.loss.name) == (2, "l")


def test_last_override_wins(config):
    assert apply_overrides(config, [("seed", "1"), ("seed", "2")]) == []
    assert config.seed == 2


def test_both_ways_to_write_an_override():
    flags = parse_flags(
        "train",
        ["--config.seed", "-3", "--config=F:debug", "--config.data.data_dir=a=b", "--workdir", "W",
         "--config.data.ops", ""],
    )  # fmt: skip
    assert flags.overrides == [("seed", "-3"), ("data.data_dir", "a=b"), ("data.ops", "")]
    assert (flags.config, flags.workdir) == ("F:debug", "W")


@pytest.mark.parametrize("words", [["--config.seed"], ["--config.seed", "--workdir=W"]])
def test_override_without_value(words):
    with pytest.raises(InputError, match=r"--config\.seed: no value; write --config\.seed=VALUE"):
        parse_flags("train", words)


# JSON


def test_json_round_trip(config):
    again = from_json(to_json(config))
    assert again == config
    assert again.data.image_size == (32, 48)
    assert type(again.data.mean) is tuple
    assert to_json(again) == to_json(config)
    for key in flatten(config):
        assert type_of(again, key) is type_of(config, key), key


def test_config_from_json_is_typed_and_locked(config):
    again = from_json(to_json(config))
    with pytest.raises((AttributeError, KeyError)):
        again.model.brightness = 1
    with pytest.raises(TypeError):
        again.evals.val.batch_size = "many"
    (fault,) = set_keys(again, evals__val__batch_size="many")
    assert "needs an int or None" in fault


def test_config_of_another_version_names_its_keys(config):
    text = to_json(config).replace('"seed"', '"seeed"').replace('"peak_lr"', '"base_lr"')
    with pytest.raises(InputError) as e:
        from_json(text)
    assert "config.json of another version: 4 faults" in str(e.value)
    assert "\n  seed: missing" in str(e.value) and "optimizer.peak_lr: missing" in str(e.value)
    assert "seeed: no such key; did you mean seed?" in str(e.value)
    assert "optimizer.base_lr: no such key" in str(e.value)


def test_config_of_another_version_names_wrong_types(config):
    text = to_json(config).replace('"seed": 0', '"seed": "zero"')
    with pytest.raises(InputError, match=r"another version: seed: .*zero"):
        from_json(text)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"evals": {"test": {}}}', '{"evals": 1}'])
def test_config_json_that_no_run_wrote(text):
    with pytest.raises(InputError, match=r"config\.json: not as a run writes it"):
        from_json(text)


# Resuming


def other_value(config, key):
    """A value of `key` that differs and has its type."""
    value = flatten(config)[key]
    kind = type_of(config, key)
    return {int: 977, float: 0.977, bool: not value, str: "other", tuple: (9, 9, 7), object: 97}[
        kind
    ]


@pytest.mark.parametrize("key", sorted(flatten(base_config())))
def test_change_of_a_key_on_resume(config, key):
    new = from_json(to_json(config))
    parents, _, leaf = key.rpartition(".")
    (new[parents] if parents else new)[leaf] = other_value(config, key)
    free = key.startswith(("mesh.", "checkpoint.", "log.")) or key in (
        "data.data_dir",
        "data.reader",
        "data.max_corrupt_fraction",
        "model.remat",
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
    assert "evals." in FREE_ON_RESUME


def test_several_changes_on_resume(config):
    new = from_json(to_json(config))
    new.seed, new.model.scan, new.mesh.fsdp = 1, False, 4
    assert changed_keys(config, new) == {"model.scan": (True, False), "seed": (0, 1)}


def test_size_as_list_is_no_change_on_resume(config):
    config.data.image_size = [32, 48]
    assert changed_keys(from_json(to_json(config)), config) == {}


# Config files


def write(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(text)
    return str(path)


BODY = """
from vit_jax.config import base_config

def get_config(arg=""):
    c = base_config()
    {line}
    return c
"""


def fault_of(spec):
    with pytest.raises(InputError) as e:
        load_config(spec)
    return str(e.value)


def test_config_file_gets_its_words(tmp_path):
    path = write(tmp_path, BODY.format(line="c.data.name = arg"))
    assert load_config(f"{path}:a,b=c:d").data.name == "a,b=c:d"
    assert load_config(path).data.name == ""


def test_config_file_is_found_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, BODY.format(line="c.seed = 3"))
    assert load_config("mine.py").seed == 3
    write(tmp_path, BODY.format(line="c.seed = 'x'"), "other.py")
    assert fault_of("other.py").startswith("--config=other.py: other.py:6: TypeError: ")


def test_missing_config_file(tmp_path):
    spec = f"{tmp_path}/nowhere.py:debug"
    assert fault_of(spec) == (
        f"--config={spec}: no file '{tmp_path}/nowhere.py'; give the path of a config file"
    )
    assert "no file" in fault_of(str(tmp_path))
    assert "is not a Python file" in fault_of(write(tmp_path, "x = 1", "mine.txt"))


def test_misspelt_key_in_config_file(tmp_path):
    path = write(tmp_path, BODY.format(line="c.model.wdth = 3"))
    fault = fault_of(path)
    assert fault.startswith(f"--config={path}: {path}:6: AttributeError: ")
    assert 'Key "wdth" does not exist' in fault
    assert 'Did you mean "width" instead of "wdth"?' in fault
    assert len(fault) - 2 * len(path) < 200
    assert "\n" not in fault and "\\n" not in fault


def test_unknown_top_level_key_in_config_file(tmp_path):
    path = write(tmp_path, BODY.format(line="c.zzzz = 3"))
    fault = fault_of(path)
    assert f"{path}:6: " in fault and '"zzzz"' in fault
    assert len(fault) - 2 * len(path) < 200


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (BODY.format(line="c.seed = 'x'"), 6, "TypeError: .*seed"),
        (BODY.format(line="c.seed = 1 / 0"), 6, "ZeroDivisionError: division by zero"),
        (BODY.format(line="{}['colour']"), 6, "KeyError: colour"),
        ("\nimport no_such_module\n", 2, "ModuleNotFoundError: .*no_such_module"),
        ("\n\nx = (\n", 3, "SyntaxError: .* was never closed"),
        ("x = 1\n", None, "AttributeError: .*get_config"),
    ],
)
def test_fault_in_config_file(tmp_path, text, line, says):
    path = write(tmp_path, text)
    at = f"{path}:{line}" if line else path
    with pytest.raises(InputError, match=f"^--config={path}: {at}: {says}"):
        load_config(path)


def test_fault_below_a_config_file_is_named_by_its_innermost_line_there(tmp_path):
    text = (
        "import json\n\ndef helper():\n    return json.loads('{')\n\n"
        "def get_config(arg=''):\n    return helper()\n"
    )
    path = write(tmp_path, text)
    assert fault_of(path).startswith(f"--config={path}: {path}:4: JSONDecodeError: ")


def test_config_file_that_returns_nothing(tmp_path):
    path = write(tmp_path, "def get_config(arg=''):\n    pass\n")
    assert fault_of(path) == (
        f"--config={path}: get_config gives NoneType; it must return a ConfigDict"
    )


def test_input_error_in_config_file(tmp_path):
    path = write(
        tmp_path,
        "from vit_jax.config import InputError\n"
        "def get_config(arg=''):\n    raise InputError('needs MODEL')\n",
    )
    assert fault_of(path) == f"--config={path}: needs MODEL"


@pytest.mark.parametrize("arg", ["ViT-B/16,x,debug", "debug,ViT-B/16,x", " ViT-B/16, debug ,x,,"])
def test_debug_may_stand_in_any_place(arg):
    assert split_words(arg, {"debug": "tiny"}) == (["ViT-B/16", "x"], {"debug"})


def test_no_words():
    assert split_words("", {"debug": "tiny"}) == ([], set())


@pytest.mark.parametrize("arg", ["large", "large,debug", "debug,large"])
def test_unknown_word(arg):
    fault = fault_of(f"configs/quickstart.py:{arg}")
    assert fault == (
        f"--config=configs/quickstart.py:{arg}: configs/quickstart.py: unknown word 'large'; "
        "it takes debug: 40 steps of a tiny model"
    )


@pytest.fixture(autouse=True)
def in_repository(request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)


# Small parts


def test_collect_faults():
    collect_faults([], "here")
    with pytest.raises(InputError, match=r"^here: one$"):
        collect_faults(["one"], "here")
    with pytest.raises(InputError, match=r"^here: 2 faults\n  one\n  two$"):
        collect_faults(["one", "two"], "here")


def test_nearest():
    assert nearest("colour", ["color", "size"]) == "did you mean color?"
    assert nearest("zzz", ["color", "size"]) == "known: color, size"


@pytest.mark.parametrize(
    ("size", "hw"), [(8, (8, 8)), ((8, 16), (8, 16)), ([8, 16], (8, 16)), (1, (1, 1))]
)
def test_image_hw(size, hw):
    assert image_hw(size) == hw


@pytest.mark.parametrize(
    "size", [0, -1, 8.0, "8", "88", True, None, (8,), (8, 8, 3), (8, 0), (8, 8.0), (True, 8), {}]
)
def test_image_hw_refuses(size):
    with pytest.raises(InputError) as e:
        image_hw(size, "model.patch_size")
    assert str(e.value) == f"model.patch_size={size!r}: needs a positive int or a pair of them"


def test_step_range():
    assert list(step_range("10:15", "log.profile")) == [10, 11, 12, 13, 14]
    assert step_range("0:1", "log.profile") == range(0, 1)


@pytest.mark.parametrize("text", ["", "10", "10:", ":10", "10:10", "15:10", "-1:5", "1:2:3", "a:b"])
def test_step_range_refuses(text):
    with pytest.raises(InputError) as e:
        step_range(text, "log.profile")
    assert str(e.value).startswith(f"log.profile={text!r}: needs two steps, the smaller first")


def test_model_fields_are_those_set(config):
    assert model_fields(config) == {
        "dtype": "float32", "patch_size": (16, 8), "scan": True, "head_bias": -10.0,
    }  # fmt: skip


def test_classification_entry():
    entry = classification(split="test", every="1 epochs")
    assert entry.to_dict() == {
        "type": "classification", "split": "test", "every": "1 epochs", "ops": "",
        "batch_size": None, "data_name": None, "data_dir": None,
    }  # fmt: skip
    entry.batch_size = 8
    with pytest.raises(TypeError):
        entry.batch_size = "many"


def test_fewshot_entry():
    entry = fewshot(train_split="train", test_split="test", every="1 epochs", shots=[5])
    assert entry.to_dict() == {
        "type": "fewshot", "train_split": "train", "test_split": "test", "every": "1 epochs",
        "ops": "", "batch_size": None, "data_name": None, "data_dir": None, "shots": (5,),
        "l2": (1024.0,), "num_draws": 3,
    }  # fmt: skip
    with pytest.raises(TypeError):
        entry.num_draws = "many"


def test_splits_that_evaluators_look_at(config):
    config.data.name, config.data.data_dir = "cifar10", "there"
    assert train_split(config) == ("cifar10", "train", "there")
    config.evals.few.data_name, config.evals.val.data_dir = "cifar100", "here"
    assert eval_splits(config, config.evals.test) == {"split": ("cifar10", "test", "there")}
    assert eval_splits(config, config.evals.val)["split"].data_dir == "here"
    assert eval_splits(config, config.evals.few) == {
        "train_split": ("cifar100", "train", "there"),
        "test_split": ("cifar100", "test", "there"),
    }


def test_entries_of_another_version_name_their_keys(config):
    text = to_json(config).replace('"num_draws"', '"num_seeds"')
    with pytest.raises(InputError) as e:
        from_json(text)
    assert e.value.faults == ("evals.few.num_draws: missing", "evals.few.num_seeds: no such key")
    text = to_json(config).replace('"fewshot"', '"fewshots"')
    with pytest.raises(InputError, match=r"evals.few.type='fewshots': did you mean fewshot\?"):
        from_json(text)


# Importing

IMPORTS = """
import sys
import {modules}
from jax._src import xla_bridge
heavy = {{"tensorflow", "tensorflow_datasets", "torch"}} & sys.modules.keys()
assert not heavy, heavy
assert not xla_bridge._backends, xla_bridge._backends
"""


@pytest.mark.parametrize(
    "modules",
    [
        "vit_jax, vit_jax.config, vit_jax.recipes",
        "vit_jax.main, vit_jax.validation, vit_jax.commands.train, vit_jax.commands.evaluate",
    ],
)
def test_importing_takes_no_device_and_no_tensorflow(modules):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(modules=modules)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_config_alone_is_light():
    code = "import sys, vit_jax.config; assert not {'jax', 'flax', 'numpy'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
