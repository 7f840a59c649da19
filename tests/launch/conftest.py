"""Fixtures that import the launchers, which are scripts, as modules."""

import importlib.util
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def load(name):
    """Import launch/NAME.py under a name that no installed package has."""
    launch = str(ROOT / "launch")
    if launch not in sys.path:
        sys.path.append(launch)
    spec = importlib.util.spec_from_file_location(f"launch_{name}", f"{launch}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launcher(name):
    """A fixture called `name` that returns the launcher of that name."""
    return pytest.fixture(scope="session", name=name)(lambda: load(name))


local, slurm, kubernetes, tpu_vm, skypilot = map(
    launcher, ("local", "slurm", "kubernetes", "tpu_vm", "skypilot")
)


@pytest.fixture
def call(capfd, monkeypatch):
    """call(launcher, *words) -> (exit code, standard output, standard error), as typed by a user.

    It runs in the repository's root, to which the configs' paths are relative.
    """
    monkeypatch.chdir(ROOT)

    def call(launcher, *words):
        monkeypatch.setattr(sys, "argv", [launcher.__file__, *words])
        try:
            code = launcher.launcher_main(launcher.define_flags(), launcher.launch)
        except SystemExit as e:  # raised by argparse
            code = e.code
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def refused(call, tmp_path):
    """refused(launcher, *words) -> the error message; the exit code is 2 and nothing is written."""

    def refused(launcher, *words):
        code, out, err = call(launcher, *words)
        assert (code, out) == (2, ""), err
        assert "Traceback" not in err
        assert list(tmp_path.iterdir()) == []
        return err

    return refused
