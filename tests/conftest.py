"""Settings for all tests: 8 virtual CPU devices, strict shapes, our own warnings as errors."""

import dataclasses
import functools
import gc
import json
import logging
import os
import pathlib
import signal
import sys

from cheap_compilation import cheap_flags

# Set before JAX is imported: otherwise it looks for accelerators.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["XLA_FLAGS"] = cheap_flags()
os.environ["TF_USE_LEGACY_KERAS"] = "1"  # otherwise TensorFlow loads Keras, which takes long

import jax
import pytest
from cheap_random import use_cheap_keys
from cheap_tracing import models_of_a_patch, use_cheap_tracing

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # read XLA_FLAGS, which libtpu would refuse
del os.environ["XLA_FLAGS"]
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_traceback_in_locations_limit", 0)  # no lines of Python in programs


def pytest_addoption(parser):
    parser.addoption(
        "--unpatched",
        action="store_true",
        help="run with Flax and JAX as users have them: threefry's keys, and each model traced "
        "whenever it is used",
    )


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # so a shell starts a job with `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send Ctrl-C to processes
    if not config.getoption("--unpatched"):
        use_cheap_keys()
        use_cheap_tracing()
    config.addinivalue_line("filterwarnings", "error:::vit_jax")
    if hasattr(config, "cache"):
        os.environ["XDG_CACHE_HOME"] = str(config.cache.mkdir("xdg"))
        # Cache compiled programs for the next run and for the processes that tests start.
        kept = {
            "jax_compilation_cache_dir": str(config.cache.mkdir("jax")),
            "jax_persistent_cache_min_compile_time_secs": 0.1,  # less is quicker compiled than read
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        for name, value in kept.items():
            jax.config.update(name, value)
            os.environ[name.upper()] = str(value)


# Files with a few long tests that start processes run first, so that no worker ends with them.
LONG_FILES = ("test_resume.py", "test_processes.py", "test_faults.py", "test_elastic.py",
              "test_corrupt_data.py", "test_local.py", "test_train.py")  # fmt: skip


# The servers that these start processes from load their libraries once for all of them.
FORKING_FILES = ("test_resume.py", "test_processes.py", "test_faults.py", "test_interrupts.py",
                 "test_stored_run.py")  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With -n: one worker takes all files that start processes."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "processes" if file.endswith(FORKING_FILES) else file

    return Scheduling(config, log)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG_FILES)


def pytest_collection_finish():
    """Keep Python's collector off what is imported, which stays: it takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 10, 10)


def pytest_sessionfinish():
    """Let pytest's last search for garbage, of all that the tests have left, find nothing to do."""
    gc.freeze()


def pytest_unconfigure():
    if "forked" in sys.modules:
        sys.modules["forked"].stop()


@pytest.fixture(autouse=True)
def models_as_patched(request):
    """A test that patches functions, or reads the log, has its own traces of models.

    All others share theirs.
    """
    if {"monkeypatch", "caplog", "interpreted_kernels"}.isdisjoint(request.fixturenames):
        yield
    else:
        with models_of_a_patch():
            yield


@pytest.fixture(autouse=True)
def vit_jax_logger():
    """Reset the package's logger to its state after import."""
    logger = logging.getLogger("vit_jax")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    return logger


@pytest.fixture(scope="session")
def shared_data():
    """The folder of prepared data sets that are too large for the repository."""
    default = pathlib.Path(__file__).parents[2] / "shared/data"
    path = pathlib.Path(os.environ.get("VIT_JAX_DATA", default))
    if not path.is_dir():
        pytest.skip(f"no prepared data sets at {path}; set VIT_JAX_DATA to their folder")
    return path


@pytest.fixture(scope="session")
def golden():
    """The folder of small files in published formats, with their makers' outputs."""
    return pathlib.Path(__file__).parent / "golden"


@pytest.fixture
def json_of(capsys):
    """json_of(*words, code=0): the JSON that the command prints; it must end with `code`."""
    from vit_jax.main import main

    def json_of(*words, code=0):
        capsys.readouterr()
        assert main([*words]) == code
        return json.loads(capsys.readouterr().out)

    return json_of


@pytest.fixture
def interpreted_kernels(monkeypatch):
    """Pallas kernels compute as ordinary operations, on any device and also under remat."""
    from jax.experimental import pallas as pl

    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))


@pytest.fixture(scope="module")
def small_moments_are_split():
    """Split moments of any size over `data`, so that small models show how large ones are split."""
    from vit_jax.devices import sharding

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "SPLIT_FROM", 1)
        yield


@pytest.fixture(scope="module")
def one_device():
    """Let meshes be made of one device, on which a run takes half the time; yield all eight."""
    devices = jax.devices()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: devices[:1])
        yield devices


def _unchecked():
    """Prepare runs without the checks of one image and of the model's outputs, and count no FLOPs.

    They take a third of a short run, and have their own tests in run/test_build.py, evaluators and
    experiment.
    """
    from vit_jax.experiment.experiment import Experiment
    from vit_jax.inference import evaluate
    from vit_jax.run import build
    from vit_jax.run.setup import opener

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experiment, "flops_per_image", 10**6)
        patch.setattr(opener, "check_images", lambda *args: None)
        patch.setattr(evaluate, "check_evaluated_images", lambda *args: None)
        for module in (build, evaluate):
            patch.setattr(module, "check_outputs", lambda *args: None)
        yield


without_checks = pytest.fixture(_unchecked)
never_with_checks = pytest.fixture(_unchecked, scope="module")


@pytest.fixture(scope="module")
def experiments_made_once():
    """Make one experiment for all runs with equal settings, most runs of a file; compile it once.

    A run that is resumed then starts as it does otherwise, but its step is compiled. Processes
    of their own, in the slow tests of run/test_resume.py, show that a compiled step is the same
    whenever it is compiled, of a later size too.
    """
    from vit_jax.experiment import stages
    from vit_jax.run import build, loop

    made, make = [], build.make_experiment
    compiled, compile_step = {}, loop.compile_step

    def compile_once(run):
        experiment = run.experiment
        if id(experiment) not in compiled:
            compiled[id(experiment)] = experiment, compile_step(run)
        return compiled[id(experiment)][1]

    def make_once(settings, mesh, preprocessing=None, teachers=(), last=None):
        if teachers:
            return make(settings, mesh, preprocessing, teachers, last)
        s = settings
        log = dataclasses.replace(s.log, every=1)  # which no step depends on
        sections = s.run, s.model, s.data, s.objective, s.loss, s.optimizer, s.schedule, log, mesh
        for others, last_of_it, experiment in made:
            if others == sections and last_of_it is last:
                return experiment
        experiment = make(settings, mesh, preprocessing, last=last)
        made.append((sections, last, experiment))
        return experiment

    with pytest.MonkeyPatch.context() as patch:
        for module in (build, stages):
            patch.setattr(module, "make_experiment", make_once)
        patch.setattr(loop, "compile_step", compile_once)
        yield
