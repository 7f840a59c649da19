import ast
import json
import pathlib
import re

import pytest
from at_fault import at_fault, keys_of
from etils import epath
from opened import config_json
from read_settings import decided
from test_base import make_config, set_keys, type_of

from vit_jax.base.errors import InputError, nearest
from vit_jax.config import base, evals, flatten
from vit_jax.config.base import with_values
from vit_jax.config.parts import Key
from vit_jax.config.sections import Log
from vit_jax.config.stored import from_json, parse_stored, read_config, to_json
from vit_jax.config.text import apply_overrides, find_config, load_config, shipped_configs
from vit_jax.config.upgrades import FORMAT
from vit_jax.evaluators.classification import Classification
from vit_jax.experiment.optimizers.optimizers import Lion
from vit_jax.main import parse_flags


@pytest.fixture
def config():
    return make_config()


@pytest.fixture(autouse=True)
def in_repository(request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)


FOLDER = pathlib.Path(__file__).parent
OVERRIDES = (FOLDER / "overrides.txt").read_text().splitlines()


@pytest.mark.parametrize(("word", "value"), [line.split("  ->  ") for line in OVERRIDES])
def test_override(config, word, value):
    """A word of the command line sets its key to this literal of Python."""
    (key, text), value = word.split("=", 1), ast.literal_eval(value)
    expected = flatten(config) | {key: value}
    assert apply_overrides(config, [(key, text)]) == []
    assert flatten(config) == expected
    assert type(flatten(config)[key]) is type(value)


def test_evaluators_are_taken_away_and_added(config):
    config.evals.own = evals.make_entry("knn", train_split="a?", test_split="b?", every="9 steps")
    config.evals.val.update(split="dev", ops="resize", batch_size=32)
    del config.evals["few"]
    assert set_keys(config, evals__test="None", evals__new="knn", evals__new__every="5 %") == []
    assert {*config.evals} == {"own", "val", "new"}
    new = {"train_split": "a?", "test_split": "dev", "ops": "resize", "batch_size": 32}
    assert {k: config.evals.new[k] for k in new} == new and config.evals.new.every == "5 %"
    for name in ("own", "val", "new"):
        assert set_keys(config, **{f"evals__{name}": "None"}) == []
    assert set_keys(config, evals__alone="fewshot") == []
    assert config.evals.alone.train_split == config.data.split and not config.evals.alone.every


@pytest.mark.parametrize("line", (FOLDER / "ops.txt").read_text().splitlines())
def test_an_op_is_taken_away_changed_or_added(config, line):
    """Of a key with these ops, by a word for one op."""
    ops, name, text, changed = re.fullmatch("(.*)  (.*?)=(.*)  ->  (.*)", line).groups()
    for key in ("data.ops", "data.global_ops", "evals.test.ops"):
        assert apply_overrides(config, [(key, ops), (f"{key}.{name}", text)]) == []
        assert flatten(config)[key] == changed


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


def test_a_list_of_strings(config):
    text = "['A, of 1 | x: model.depth=1', \"B | x: model.depth=2\"]"
    for key in ("cells", "finetunings"):
        assert apply_overrides(config, [(f"study.{key}", text)]) == []
        assert config.study[key] == ("A, of 1 | x: model.depth=1", "B | x: model.depth=2")


def test_override_of_wrong_type_changes_nothing(config):
    before = to_json(config)
    assert len(set_keys(config, seed="x", data__image_size="32x48")) == 2
    assert to_json(config) == before


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


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ('"seed"', '"seeed"', "seeed"),
        ('"z_loss"', '"x_loss"', "loss.x_loss"),
        ('"duration": "5e6 examples"', '"duration": 3', "duration"),
        ('"num_draws"', '"num_seeds"', "evals.few.num_seeds"),
        ('"fewshot"', '"fewshots"', "evals.few.type"),
    ],
)
def test_config_of_another_version_names_its_keys(config, old, new, keys):
    with pytest.raises(InputError) as error:
        from_json(to_json(config).replace(old, new))
    assert {*keys_of(error.value)} == {*keys.split()}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"evals": {"test": {}}}', '{"evals": 1}'])
def test_config_json_that_no_run_wrote(text, tmp_path):
    with at_fault(f"{tmp_path}/config.json"):
        parse_stored(text, epath.Path(tmp_path))


def test_a_newer_config_json_is_refused_by_its_version(config, tmp_path):
    content = json.loads(config_json(config)) | {"format_version": FORMAT + 1, "later": 1}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with at_fault("format_version"):
        read_config(epath.Path(tmp_path))


def test_a_stored_config_is_upgraded_from_format_to_format(config, monkeypatch, tmp_path):
    """Through two invented formats: the seed had another name, and was text before."""

    def rename(content):
        for part in ("asked", "resolved"):
            content[part]["seed"] = content[part].pop("random_seed")
        return content

    def as_number(content):
        for part in ("asked", "resolved"):
            content[part]["seed"] = int(content[part]["seed"])
        return content

    config.seed = 7
    content = json.loads(config_json(config)) | {"format_version": FORMAT - 2}
    for part in ("asked", "resolved"):
        content[part]["random_seed"] = str(content[part].pop("seed"))
    upgrades = {FORMAT - 2: rename, FORMAT - 1: as_number}
    monkeypatch.setattr("vit_jax.config.upgrades.UPGRADES", upgrades)
    stored = parse_stored(json.dumps(content), epath.Path(tmp_path))
    assert stored.resolved.seed == stored.asked.seed == 7
    monkeypatch.setattr("vit_jax.config.upgrades.UPGRADES", {FORMAT - 1: as_number})
    with at_fault("format_version"):
        parse_stored(json.dumps(content), epath.Path(tmp_path))


def test_a_list_of_names_needs_no_quotes(config):
    for text in ("top1,loss", "['top1', 'loss']"):
        assert apply_overrides(config, [("log.metrics", text)]) == []
        assert config.log.metrics == ("top1", "loss")
    assert apply_overrides(config, [("log.metrics", "top1")]) == []
    assert config.log.metrics == ("top1",)
    assert apply_overrides(config, [("log.metrics", "top1, loss")])


def test_a_key_that_a_stored_config_lacks_takes_what_it_meant_before(config, monkeypatch, tmp_path):
    """Keys of a section, of a chosen part and of an evaluator, each with and without `before`."""
    config.optimizer.name = "lion"
    later = {"log.later": 2, "optimizer.later": 3, "evals.val.later": 4}
    for class_, before in ((Log, 1), (Lion, 6), (Classification, 7)):
        declared = {"later": Key(int, 0, "added", "", (), "", before, False, None),
                    "later_too": Key(int, 5, "added", "", (), "", ..., False, None)}  # fmt: skip
        declared |= class_.declared()
        monkeypatch.setattr(class_, "declared", lambda declared=declared: declared)
    monkeypatch.setattr(base, "_own_config", base._own_config.__wrapped__)  # made once otherwise
    content = json.loads(config_json(config))
    read = parse_stored(json.dumps(content), epath.Path(tmp_path))
    found = flatten(read.resolved)
    assert [found[key] for key in later] == [1, 6, 7]
    asked = flatten(read.asked)  # is compared with what is asked for now
    assert (asked["log.later"], asked["evals.val.later"]) == (0, 0)
    assert found["log.later_too"] == found["evals.val.later_too"] == 5
    assert read.decided_by["log.later"] == "default"
    again = flatten(from_json(to_json(with_values(read.resolved, later))))
    assert {key: again[key] for key in later} == later
    assert flatten(decided(config)).items() <= found.items()


def test_a_stored_config_names_who_decided_in_text(config, tmp_path):
    content = json.loads(config_json(config))
    content["decided_by"]["seed"] = 3
    with pytest.raises(InputError, match="decided_by: seed=3 is no text"):
        parse_stored(json.dumps(content), epath.Path(tmp_path))


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


def test_a_name_that_is_too_long_for_a_file():
    assert "File name too long" in fault_of("x" * 300)


def test_config_file_gets_its_words(tmp_path):
    path = write(tmp_path, BODY.format(line="c.data.name = arg"))
    assert load_config(f"{path}:a,b=c:d").data.name == "a,b=c:d"
    assert load_config(path).data.name == ""


def test_config_file_is_found_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, BODY.format(line="c.seed = 3"))
    assert load_config("mine.py").seed == 3
    write(tmp_path, BODY.format(line="c.seed = 'x'"), "other.py")
    assert fault_of("other.py").startswith("--config=other.py: other.py:6: seed='x': ")


def test_config_is_found_by_its_name_from_any_folder(tmp_path, monkeypatch):
    repository = pathlib.Path(__file__).parents[2]
    expected = load_config(str(repository / "configs/quickstart.py") + ":debug")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()  # a workdir or a data set may have this name
    assert load_config("quickstart:debug") == expected
    write(tmp_path, BODY.format(line="c.seed = 3"), "quickstart.py")
    assert find_config("quickstart") == repository / "configs/quickstart.py"
    assert load_config("quickstart.py").seed == 3
    for wrong in ("quikstart", "configs/quickstart.py", "pretrain/quickstart"):
        assert fault_of(f"{wrong}:debug") == (
            f"--config={wrong}:debug: no file {wrong!r}, and no shipped config of that name; "
            "did you mean quickstart?"
        )


def test_file_comes_before_a_config_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "x = 1", "quickstart")
    assert "'quickstart' is not a Python file" in fault_of("quickstart")


def test_missing_config_file(tmp_path):
    spec = f"{tmp_path}/nowhere.py:debug"
    assert fault_of(spec) == (
        f"--config={spec}: no file '{tmp_path}/nowhere.py', and no shipped config of that name; "
        f"{nearest('nowhere', list(shipped_configs()))}"
    )
    assert "no file" in fault_of(str(tmp_path))
    assert "is not a Python file" in fault_of(write(tmp_path, "x = 1", "mine.txt"))


BELOW = """import json\n
def helper():\n    return json.loads('{')\n
def get_config(arg=''):\n    return helper()
"""


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (BODY.format(line="c.seed = 'x'"), 6, "seed='x': needs a value of type int"),
        (BODY.format(line="c.seed = 1 / 0"), 6, "ZeroDivisionError: division by zero"),
        (BODY.format(line="{}['colour']"), 6, "KeyError: colour"),
        (BODY.format(line="c.model.wdth = 3"), 6, "wdth: no such key; did you mean width?"),
        (BODY.format(line="c.lr = 3"), 6, "lr: no such key; did you mean optimizer.peak_lr?"),
        (BODY.format(line="c.zzzz = 3"), 6, "zzzz: no such key; known: .* more"),
        ("from vit_jax.config import clasification", 1, "ImportError: .*mean classification?"),
        ("import vit_jax.config as c\nc.knm()", 2, "AttributeError: .*mean knn?"),
        (BELOW, 4, "JSONDecodeError: "),  # the innermost line of the file itself
        ("\nimport no_such_module\n", 2, "ModuleNotFoundError: .*no_such_module"),
        ("\n\nx = (\n", 3, "SyntaxError: .* was never closed"),
        ("x = 1\n", None, "has no function get_config"),
        ("import sys\nsys.exit(0)\n", 2, "SystemExit: 0"),
    ],
)
def test_fault_in_config_file(tmp_path, text, line, says):
    path = write(tmp_path, text)
    at = f"{path}:{line}" if line else path
    fault = fault_of(path)
    assert re.match(f"--config={path}: {at}: {says}", fault)
    assert len(fault) - 2 * len(path) < 200 and "\n" not in fault and "\\n" not in fault


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("pass", "get_config returned NoneType; it must return a ConfigDict"),
        ("from vit_jax.config import InputError; raise InputError('needs MODEL')", "needs MODEL"),
    ],
)
def test_what_get_config_does_not_give(tmp_path, body, says):
    path = write(tmp_path, f"def get_config(arg=''):\n    {body}\n")
    assert fault_of(path) == f"--config={path}: {says}"
