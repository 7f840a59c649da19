"""Options of XLA's compilers, and where compiled programs are kept between runs."""

import jax
import pytest
from read_settings import settings_of

from vit_jax.config import base_config
from vit_jax.devices import compiler
from vit_jax.devices.mesh import make_mesh
from vit_jax.evaluators import inputs

KEYS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """JAX without a folder for compiled programs; the user's cache folder is `tmp_path`."""
    before = {key: getattr(jax.config, key) for key in KEYS}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    for key, value in before.items():
        jax.config.update(key, value)


def test_programs_are_kept_for_this_type_of_cpu(unset, tmp_path, monkeypatch):
    compiler.keep_programs()
    kept = jax.config.jax_compilation_cache_dir
    (folder,) = (tmp_path / "vit_jax" / "compiled").iterdir()
    assert kept == str(folder) and folder.name.startswith("cpu-")

    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(compiler.pathlib.Path, "read_text", lambda path: "flags : avx512f\n")
    compiler.keep_programs()  # a home folder that two types of CPU share
    assert jax.config.jax_compilation_cache_dir != kept


def test_a_folder_that_the_user_chose_stays(unset, tmp_path):
    jax.config.update("jax_compilation_cache_dir", "chosen")
    compiler.keep_programs()
    assert jax.config.jax_compilation_cache_dir == "chosen"
    assert not list(tmp_path.iterdir())


def test_without_a_writable_folder_nothing_is_kept(unset, tmp_path):
    (tmp_path / "vit_jax").write_text("a file where the folder should be")
    compiler.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None


def test_evaluators_compile_as_the_step_does(monkeypatch):
    c = base_config()
    c.mesh.deterministic = True
    mesh = make_mesh(replica=1, data=-1, fsdp=1, tensor=1)
    model, size = None, (8, 8)
    evaluator = inputs.EvalInputs("own", settings_of(c), model, mesh, {}, (), size)
    asked = []
    monkeypatch.setattr(inputs, "compiler_options", lambda *_, **given: asked.append(given) or {})
    assert evaluator.jit(jax.numpy.negative)(1.0).sharding == evaluator.replicated
    assert asked == [{"deterministic": True}]


def test_options_that_xla_does_not_know_are_left_out(caplog):
    mesh = make_mesh(replica=1, data=-1, fsdp=1, tensor=1)
    more = {"xla_gpu_deterministic_ops": True, "xla_no_such_option": True}
    assert compiler.compiler_options(mesh, more) == {"xla_gpu_deterministic_ops": True}
    assert "left out: XLA for cpu does not know the option xla_no_such_option" in caplog.text
