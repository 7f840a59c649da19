"""The notebooks of docs/: their form, and those for free accelerators run on a CPU."""

import json
import re
import subprocess
import sys
import types
import venv

import notebooks
import pytest

PATHS = [notebooks.TUTORIAL, *notebooks.FREE]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_has_no_outputs(path):
    """By the schema of nbformat 4.4, as far as it goes here."""
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 4)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        required = {"cell_type": str, "metadata": dict, "source": list}
        if cell["cell_type"] == "code":
            required |= {"outputs": list, "execution_count": types.NoneType}
            assert cell["outputs"] == []
        assert {name: type(value) for name, value in cell.items()} == required
        assert all(line.endswith("\n") for line in cell["source"][:-1])
    assert next(tags for tags, _ in notebooks.code_cells(path) if tags) == ["parameters"]


def test_notebooks_for_free_accelerators():
    assert [path.stem for path in notebooks.FREE] == ["colab", "kaggle"]
    for path in notebooks.FREE:
        assert len(json.loads(path.read_text())["cells"]) <= 12
        words = [command.split()[:2] for command in notebooks.commands(path)]
        done = ["certify", "--config=cifar10", "report", "figures", "export"]
        assert [second for first, second in words if first == "vit_jax"] == done


@pytest.mark.slow
@pytest.mark.parametrize("path", notebooks.FREE, ids=lambda path: path.stem)
def test_a_notebook_runs_on_a_cpu(path, shared_data, tmp_path, monkeypatch):
    shown = []
    display = types.SimpleNamespace(Image=lambda path: path, display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(tmp_path)

    def shell(command):
        words = re.sub(r"^vit_jax ", f"{sys.executable} -m vit_jax.main ", command)
        subprocess.run(words, shell=True, check=True)

    small = {
        "MINUTES": 15, "MODELS": "ViT-Ti/16", "CONFIG": "cifar10:small", "DURATION": "20 steps",
        "DTYPE": "float32", "DATA": str(shared_data),
    }  # fmt: skip
    notebooks.run(path, small, shell)
    assert json.loads((tmp_path / "certificate/certificate.json").read_text())["held"]
    assert json.loads((tmp_path / "runs/cifar10/summary.json").read_text())["step"] == 20
    names = ["curves", "filters", "positions", "rollout"]
    assert [path.rpartition("/")[2] for path in shown] == [f"{name}.png" for name in names]
    assert (tmp_path / "exported/model.safetensors").exists()


@pytest.fixture(scope="module")
def pip(tmp_path_factory):
    """(the words of the newest pip, which reads only metadata, a folder of wheels).

    promise, which has no wheel, is made one.
    """
    folder = tmp_path_factory.mktemp("pip")
    venv.create(folder / "venv", with_pip=True)
    words = [str(folder / "venv/bin/python"), "-m", "pip", "--quiet"]
    make = [*words, "wheel", "--no-deps", f"--wheel-dir={folder / 'wheels'}", "promise"]
    for command in ([*words, "install", "--upgrade", "pip"], make):
        if subprocess.run(command).returncode:
            pytest.skip("pip reaches no packages here")
    return words, folder / "wheels"


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["tpu", "cuda", "jax[cuda12]>=0.10.2"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_packages_resolve(python, extra, pip, tmp_path):
    words, wheels = pip
    root = str(notebooks.ROOT)
    wanted = [root, extra] if "[" in extra else [f"{root}[{extra}]"]
    subprocess.run(
        [*words, "install", "--dry-run", "--ignore-installed", f"--python-version={python}",
         "--only-binary=:all:", f"--find-links={wheels}", f"--target={tmp_path / 'target'}",
         f"--report={tmp_path / 'report'}", *wanted],
        check=True,
    )  # fmt: skip
    found = json.loads((tmp_path / "report").read_text())["install"]
    files = [package["download_info"]["url"].rpartition("/")[2] for package in found]
    made_for = f"-cp{python.replace('.', '')}-"
    assert any(re.match(rf"jaxlib-0\.1\d\..*{made_for}", file) for file in files), files
    assert any(re.match("libtpu-|jax_cuda1[23]_plugin-", file) for file in files), files
