"""What all tests share: 8 virtual CPU devices, strict shapes, warnings of ours as errors."""

import logging
import os
import pathlib

# Before JAX is used: without these it would look for accelerators.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "error:::vit_jax")
    if hasattr(config, "cache"):
        os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("xdg"))
        # What was compiled once is kept for the next run, and for the processes that tests start.
        kept = {
            "jax_compilation_cache_dir": str(config.cache.mkdir("jax")),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        for name, value in kept.items():
            jax.config.update(name, value)
            os.environ[name.upper()] = str(value)


# Files of few tests that start processes: first, so that no worker is left with them in the end.
LONG_FILES = ("test_resume.py", "test_processes.py", "test_faults.py", "test_elastic.py",
              "test_corrupt_data.py", "test_local.py", "test_train.py")  # fmt: skip


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


@pytest.fixture(autouse=True)
def vit_jax_logger():
    """The package's logger as it is on import, whatever a test or a command made of it."""
    logger = logging.getLogger("vit_jax")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    return logger


@pytest.fixture(scope="session")
def shared_data():
    """The folder of prepared data sets, which are too large for the repository."""
    default = pathlib.Path(__file__).parents[2] / "shared/data"
    path = pathlib.Path(os.environ.get("VIT_JAX_DATA", default))
    if not path.is_dir():
        pytest.skip(f"no prepared data sets at {path}; set VIT_JAX_DATA to where they are")
    return path


@pytest.fixture(scope="session")
def golden():
    """The folder of small files in published formats, with what their makers compute from them."""
    return pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def cheap_compilation():
    """XLA without its costly passes, for models that take longer to compile than to run.

    The arithmetic, the layout over devices and the collectives are the same.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
