"""The software that a run depends on."""

import importlib.metadata

import jax

from vit_jax.job.software import code_digest, software


def test_software_is_the_same_twice_and_knows_the_code(monkeypatch):
    found = software()
    assert found == software() and found["jax"] == jax.__version__
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/mine --xla_b=1 --xla_a=2")
    assert software() == found | {"XLA_FLAGS": "--xla_a=2 --xla_b=1"}


def test_software_names_the_compiler_for_gpus_where_it_is_installed(monkeypatch):
    found, version = software(), importlib.metadata.version
    given = {"nvidia-cudnn-cu13": "9.1", "jax-cuda13-plugin": "1.0"}
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: given.get(name) or version(name)
    )
    assert software() == found | given


def test_code_digest_follows_every_source_file(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_text("x = 1")
    first = code_digest(tmp_path)
    (tmp_path / "inner" / "a.py").write_text("x = 2")
    assert code_digest(tmp_path) != first
