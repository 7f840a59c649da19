"""Plug-ins: found, imported once, stored by a run; untrusted ones never run."""

import logging
import os
import subprocess
import sys

import pytest
from at_fault import at_fault
from etils import epath
from opened import config_json
from read_settings import decided

from vit_jax.base.errors import InputError
from vit_jax.config import Settings, add_plugins, base_config, flatten, own_keys, plugins
from vit_jax.config.registries import FAMILIES, SOURCES
from vit_jax.config.stored import (
    changed_keys,
    from_json,
    read_config,
    say_changes,
    to_json,
)
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.config.upgrades import FORMAT
from vit_jax.job.software import software
from vit_jax.main import main, parse_flags
from vit_jax.run.setup import agreement
from vit_jax.run.setup.validation import find_faults
from vit_jax.transfer import load_pretrained

# It records every time that it runs.
PART = '''
import logging

import flax.linen as nn
from vit_jax.config import key
from vit_jax.config.registries import FAMILIES, SOURCES
from vit_jax.data import DataSet

logging.getLogger("vit_jax").warning("%s runs", __name__)


class Net(nn.Module):
    num_classes: int
    image_size: tuple[int, int]
    token_dim: int = 3

    names, parse = (), dict


class Rings(DataSet):
    """Rings."""

    most: int = key(3, "rings")
    notes: str = key("none", "about them")


FAMILIES["MyNet"] = Net
SOURCES["my_rings"] = Rings
'''
OTHER = """
from vit_jax.config import key
from vit_jax.config.registries import SOURCES
from vit_jax.data import DataSet


class Other(DataSet):
    other: int = key(1, "another")


SOURCES["my_other"] = Other
"""
RUNS = "vit_jax_plugins.part runs"


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """An empty folder, in a process that has not imported any plug-in."""
    monkeypatch.setattr(plugins, "_PLUGINS", {})
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ours = dict(FAMILIES), dict(SOURCES)
    yield
    for registry, parts in zip((FAMILIES, SOURCES), ours, strict=True):
        registry.clear()
        registry.update(parts)
    for name in {*sys.modules} - before:
        if name.startswith(("vit_jax_plugins", "part")):
            del sys.modules[name]


@pytest.fixture
def here(tmp_path):
    return tmp_path / "here"


@pytest.fixture
def ran(caplog):
    """ran() -> number of times that a plug-in has run since the last call."""
    caplog.set_level(logging.WARNING, "vit_jax")

    def ran():
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return len([line for line in lines if line.endswith(" runs")])

    return ran


def forget():
    """As in another process."""
    plugins._PLUGINS.clear()
    FAMILIES.pop("MyNet", None)
    for name in ("my_rings", "my_other"):
        SOURCES.pop(name, None)
    for name in [name for name in sys.modules if name.startswith(("vit_jax_plugins", "part"))]:
        del sys.modules[name]


def test_keys_are_typed_checked_and_suggested(here):
    (here / "part.py").write_text(PART)
    plain, c = base_config(), base_config(plugins=["part.py"])
    assert c.plugins == ("part.py",)
    added = {"model.token_dim": None, "data.most": None, "data.notes": None}
    assert flatten(c) == flatten(plain) | added | {"plugins": ("part.py",)}
    assert own_keys(c, "data") == {}
    with pytest.raises(TypeError, match="token_dim"):
        c.model.token_dim = "x"
    with pytest.raises((AttributeError, KeyError), match="token_dmi"):
        c.model.token_dmi = 3
    faults = apply_overrides(c, [("model.token_dmi", "3"), ("data.most", "x"), ("data.note", "y")])
    assert faults == [
        "--config.model.token_dmi: no such key; did you mean model.token_dim?",
        "--config.data.most='x': needs an int or None",
        "--config.data.note: no such key; did you mean data.notes?",
    ]
    assert apply_overrides(c, [("model.token_dim", "5"), ("model.token_dim", "None")]) == []
    c.model.token_dim = 8
    assert base_config(plugins=["part.py"]).model.token_dim is None
    assert from_json(to_json(c)) == c
    assert "token_dim" not in base_config().model


def test_a_key_of_another_type_is_refused(here):
    (here / "other.py").write_text(OTHER.replace("other: int = key(1", "split: int = key(1"))
    with pytest.raises(InputError) as e:
        base_config(plugins=["other.py"])
    assert [fault.partition(":")[0] for fault in e.value.faults] == ["data.split"]


def test_the_same_code_runs_once(here, ran):
    (here / "part.py").write_text(PART)
    (here / "copies").mkdir()
    (here / "copies/again.py").write_text(PART)
    assert plugins.import_plugins(["part.py", "./part.py", "copies/again.py"]) == ("part.py",)
    assert ran() == 1
    (here / "copies/part.py").write_text(PART + "\n")
    with at_fault("plugins"):
        plugins.import_plugins(["copies/part.py"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no.py", "plugins='no.py': no such file in "),
        ("no_such", "no such module is installed; for a file, add the ending: no_such.py"),
        ("no_such.part", "no such module is installed"),
        ("json", "not a single Python file; name the module that adds the parts"),
        ("a-b", "needs a .py file, or the name of a module"),
        ("broken.py", "broken.py:2: ZeroDivisionError: division by zero"),
        ("worse.py", "worse.py:1: SyntaxError: "),
        ("ends.py", "ends.py:2: SystemExit: 3"),
        ("plain.py", "plain.py:5: TypeError: eps: declare it as `eps: TYPE = key("),
        ("part_of_nothing.py", "part_of_nothing.py:3: TypeError: Own: derive it from the class"),
    ],
)
def test_what_cannot_be_imported(here, capsys, name, says):
    (here / "broken.py").write_text("one = 1\none / 0\n")
    (here / "worse.py").write_text("one = = 1\n")
    (here / "ends.py").write_text("import sys\nsys.exit(3)\n")
    start = "from vit_jax.config import LOSSES\n"
    (here / "part_of_nothing.py").write_text(start + "class Own: pass\nLOSSES['own'] = Own\n")
    (here / "plain.py").write_text(
        start + "from vit_jax.objectives.losses import Loss\n"
        "class Own(Loss):\n    eps: float = 1.0\nLOSSES['own'] = Own\n"
    )
    assert main(["models", f"--config.plugins={name}"]) == 2
    assert says in capsys.readouterr().err


def test_arrays_at_import(here):
    """They would initialize devices before the processes of a job have connected."""
    (here / "early.py").write_text("import jax.numpy as jnp\nMEAN = jnp.zeros(3)\n")
    code = "from vit_jax.config import plugins; plugins.import_plugins(['early.py'])"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert b"early.py: uses JAX devices while it is imported" in done.stderr, done.stderr


def test_beside_the_config_file(tmp_path, here):
    there = tmp_path / "there"
    there.mkdir()
    (there / "part.py").write_text(PART)
    body = "from vit_jax.config import base_config\ndef get_config(arg):\n"
    (there / "mine.py").write_text(f"{body}    return base_config(plugins=['part.py'])\n")
    assert load_config("../there/mine.py").plugins == ("part.py",)
    (there / "late.py").write_text(
        f"{body}    c = base_config()\n    c.plugins = ('other.py',)\n    return c\n"
    )
    (fault,) = find_faults(load_config("../there/late.py"))
    assert fault.startswith("plugins: 'other.py' has not been imported; list it in base_config(")


def test_a_config_file_with_parts(here, ran):
    """It is its own plug-in, and runs once for each time that it is loaded."""
    body = "from vit_jax.config import base_config\n\n\ndef get_config(arg):\n"
    (here / "own.py").write_text(f"{PART}\n{body}    return base_config(plugins=[__file__])\n")
    for _ in range(2):
        config = load_config("own.py")
        assert (config.plugins, config.data.notes, ran()) == (("own.py",), None, 1)
    assert plugins.find_plugin("own.py").content == (here / "own.py").read_bytes()
    (here / "own.py").write_text(f"{PART}\n{body}    return base_config()\n")
    with pytest.raises(InputError, match=r"adds parts.*plugins=\[__file__\]"):
        load_config("own.py")


def test_command_line(here, capsys, json_of):
    (here / "part.py").write_text(PART)
    (here / "other.py").write_text(OTHER)
    words = ["--config=quickstart:debug", "--print_config", "--config.data.notes=mine"]
    printed = json_of(*words, "--config.plugins=part.py,other.py")
    assert (printed["plugins"], printed["data"]["notes"]) == (["part.py", "other.py"], "mine")
    assert base_config().plugins == ()  # no other command has them
    assert main(words) == 2
    assert "--config.data.notes: no such key" in capsys.readouterr().err
    for command in ("export", "predict", "configs"):  # commands that take no config
        assert parse_flags(command, ["--config.plugins", "part.py"]).plugins == ["part.py"]


@pytest.fixture
def workdir(here, tmp_path, ran):
    """Workdir of a run made by another process, with the only copy of its plug-in."""
    (here / "part.py").write_text(PART)
    workdir = epath.Path(tmp_path / "workdir")
    workdir.mkdir()
    c = base_config(plugins=["part.py"])
    plugins.store_plugins(c.plugins, workdir)
    (workdir / "config.json").write_text(config_json(c))
    (here / "part.py").unlink()
    forget()
    ran()
    return workdir


def test_a_stranger_runs_no_code(workdir, here, ran, monkeypatch):
    with at_fault("plugins"), plugins.using(["no.py"], trusted=True):
        pass
    with at_fault(str(workdir)):
        read_config(workdir)
    with plugins.using(), at_fault(str(workdir)):
        read_config(workdir)
    monkeypatch.setattr(sys, "path", [str(workdir / "plugins"), "", *sys.path])
    monkeypatch.chdir(workdir / "plugins")
    with at_fault(str(workdir)):
        read_config(workdir)
    assert ran() == 0
    with plugins.using(trusted=True):
        assert read_config(workdir).plugins == ("part.py",)
    assert ran() == 1
    assert read_config(workdir).data.notes is None  # known from now on
    assert ran() == 0


def test_a_newer_run_runs_no_code(workdir, ran):
    text = (workdir / "config.json").read_text()
    newer = text.replace(f'"format_version": {FORMAT}', '"format_version": 99')
    (workdir / "config.json").write_text(newer)
    with plugins.using(trusted=True), at_fault("format_version"):
        read_config(workdir)
    (workdir / "config.json").write_text(text.replace('"plugins": [', '"plugins": 3, "x": ['))
    with plugins.using(trusted=True), at_fault(f"{workdir}/config.json"):
        read_config(workdir)
    assert ran() == 0


DEBUG = ["--config=quickstart:debug", "--config.mesh.platform=cpu"]
READERS = {
    "evaluate": ["evaluate", "--workdir=RUN"],
    "export": ["export", "--workdir=RUN", "--output=o", "--format=hf"],
    "predict": ["predict", "--workdir=RUN", "x.jpg"],
    "resume": [*DEBUG, "--workdir=RUN"],
    "init_from": [*DEBUG, "--config.init_from=RUN", "--workdir=new"],
    "evaluate of a source": ["evaluate", "--config=evaluate:knn,digits", "--init_from=RUN"],
    "study": ["study", "--config=bit_and_vit:debug", "--workdir=STUDY"],
}


@pytest.mark.parametrize("reader", READERS)
def test_every_command_names_the_flag(workdir, ran, capsys, reader):
    (workdir / "checkpoints").mkdir()
    (epath.Path("x.jpg")).write_bytes(b"")
    if reader == "study":
        epath.Path("STUDY").mkdir()
        workdir.rename("STUDY/ViT__64_training_images__seed_0")
    words = [word.replace("RUN", str(workdir)) for word in READERS[reader]]
    assert main(words) == 2
    assert "--trust_plugins" in capsys.readouterr().err
    assert ran() == 0


def test_load_pretrained_runs_no_code(workdir, ran):
    (workdir / "checkpoints").mkdir()
    with at_fault(str(workdir)):
        load_pretrained(workdir)
    assert ran() == 0


@pytest.mark.parametrize("name", ["../part.py", "/tmp/part.py", "a/b", 3, "part.py\n"])
def test_a_strangers_names(workdir, ran, name):
    text = (workdir / "config.json").read_text()
    (workdir / "config.json").write_text(text.replace('"part.py"', repr(name).replace("'", '"')))
    with plugins.using(trusted=True), at_fault(f"{workdir}/config.json"):
        read_config(workdir)
    assert ran() == 0


def test_module_by_name(workdir, tmp_path, monkeypatch, ran):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    package = tmp_path / "partial"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rings.py").write_text(PART)
    c = base_config(plugins=["partial.rings"])
    assert c.plugins == ("partial.rings",)
    assert read_config(workdir).plugins == ("part.py",)  # the same code
    plugins.store_plugins(c.plugins, workdir)
    (workdir / "config.json").write_text(config_json(c))
    forget()
    ran()
    with at_fault(str(workdir)):
        read_config(workdir)  # an installed module that nobody named does not run
    assert ran() == 0
    with plugins.using(["partial.rings"]):
        assert read_config(workdir) == decided(c)
    assert ran() == 1
    assert sys.modules["partial.rings"].__package__ == "partial"


def test_named_by_the_user(workdir, tmp_path, ran):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "renamed.py").write_text(PART)
    with plugins.using([str(mine / "renamed.py")]):
        assert read_config(workdir).plugins == ("part.py",)
    assert ran() == 1


def test_changed_since_the_run_began(workdir, here):
    (here / "part.py").write_text(PART + "# mended\n")
    with plugins.using(["part.py"], trusted=True):
        read_config(workdir)  # nothing is saved yet
        (workdir / "checkpoints/3").mkdir(parents=True)
        with at_fault("--workdir"):
            read_config(workdir)
        (workdir / "plugins").rmtree()
        assert read_config(workdir).plugins == ("part.py",)


def test_damaged_copy(workdir, ran):
    copy = workdir / "plugins/part.py"
    copy.write_text(copy.read_text() + "\n")
    with plugins.using(trusted=True):
        with at_fault(str(copy)):
            read_config(workdir)
        copy.unlink()
        with at_fault(str(copy)):
            read_config(workdir)
        (workdir / "plugins/digests.json").write_text("{}")
        with at_fault(str(copy)):
            read_config(workdir)
    assert ran() == 0


def test_resume_without_it_is_a_change(workdir):
    with plugins.using(trusted=True):
        stored = read_config(workdir)
    changed = changed_keys(stored, base_config())
    (says,) = [text for text in say_changes(changed) if text.startswith("plugins:")]
    assert says.endswith("--config.plugins=part.py")


def test_one_is_added_on_resume(workdir, here):
    (here / "other.py").write_text(OTHER)
    with plugins.using(trusted=True):
        stored = read_config(workdir)
    c = decided(base_config(plugins=["other.py"]))
    add_plugins(c, stored.plugins)
    assert changed_keys(stored, c) == {}
    plugins.store_plugins(c.plugins, workdir)  # as on resume
    assert sorted(os.listdir(workdir / "plugins")) == ["digests.json", "other.py", "part.py"]
    c.data.other = 2
    assert changed_keys(stored, c) == {"data.other": (None, 2)}


def test_processes_compare_digests(here, monkeypatch):
    (here / "part.py").write_text(PART)
    c, found = base_config(plugins=["part.py"]), {}
    monkeypatch.setattr(agreement.jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement.processes, "agree", lambda _, facts, *rest: found.update(facts))
    agreement.compare_requests(Settings.of(c), {})
    assert found["plug-in part.py"] == plugins.find_plugin("part.py").digest
    assert not {name for name in software() if name.startswith("plug-in")}


def test_files_are_kept_as_they_ran(workdir):
    assert (workdir / "plugins/part.py").read_text() == PART
    assert sorted(os.listdir(workdir / "plugins")) == ["digests.json", "part.py"]
