"""The package as a wheel, in a folder that holds nothing else."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest
from shown_output import is_printed
from worked_parts import write_parts

import vit_jax
from vit_jax.config.text import load_config, shipped_configs
from vit_jax.job.software import code_digest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the sources of a wheel, since setuptools leaves its build files next to them."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("vit_jax", "configs"):
        files = ROOT / folder, source / folder
        shutil.copytree(*files, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / file, source)
    return source


@pytest.fixture(scope="module")
def site(source, tmp_path_factory):
    """Folder that the wheel is installed into."""
    site = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-index", "--no-compile", f"--target={site}", str(source)],
        check=True, cwd=source,
    )  # fmt: skip
    return site


@pytest.fixture
def installed(site, tmp_path):
    """installed(words): run the console script in an empty folder; return the ended process."""

    def installed(*words):
        environment = os.environ | {"PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
        script = [sys.executable, str(site / "bin/vit_jax")]
        return subprocess.run(
            [*script, *words], capture_output=True, text=True, env=environment, cwd=tmp_path
        )

    return installed


def test_what_it_holds(site):
    shipped = {path.name: path.read_bytes() for path in (site / "vit_jax/configs").glob("*.py")}
    assert shipped == {path.name: path.read_bytes() for path in (ROOT / "configs").glob("*.py")}
    assert code_digest(site / "vit_jax") == code_digest()
    page = "vit_jax/insight/page"
    assert {path.name for path in (site / page).iterdir()} == {*os.listdir(ROOT / page)}
    assert (site / f"vit_jax-{vit_jax.__version__}.dist-info").is_dir()
    assert not (site / "configs").exists()


def test_editable_install_is_a_path(source, tmp_path):
    """An import hook would not find the package in a folder that holds a clone called vit_jax."""
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, tmp_path], check=True, cwd=source, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (path,) = (name for name in files.namelist() if "dist-info" not in name)
        assert files.read(path).decode().strip() == str(source)


@pytest.mark.slow
def test_configs_are_found_by_name(installed, tmp_path):
    done = installed("--config=quickstart:debug", "--print_config")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["duration"] == load_config("quickstart:debug").duration
    done = installed("configs")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("    debug  ") == len(shipped_configs())
    done = installed("--config=configs/quickstart.py", f"--workdir={tmp_path / 'run'}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no file 'configs/quickstart.py', and no shipped config" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # the parts without the wheel: test_extending and test_plugins
def test_parts_from_outside(installed, tmp_path):
    """Ten kinds of parts in one run, from files in an otherwise empty folder."""
    names = write_parts(tmp_path)
    trained = installed(
        "--config=mine.py", "--config.plugins=adan.py", "--config.optimizer.name=my_adan",
        "--config.optimizer.b3=0.98", "--config.duration=4 steps", "--config.log.every=4 steps",
        "--config.evals.test.every=4 steps", "--config.evals.worst.every=4 steps",
        "--workdir=run",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert row["train/distance"] >= 0 and "time/images_per_s" in row
    assert 0 < row["train/my_brier"] < 2
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert 0 <= summary["worst/top1"] <= summary["test/top1"] <= 1
    assert 0 < summary["test/my_brier"] < 2 and "test/loss" not in summary

    for name in names:  # only the run's own copies are left
        if name != "flax_msgpack.py":
            (tmp_path / name).unlink()
    words = ("--workdir=run", "--format=my_msgpack", "--output=rings.msgpack")
    refused = installed("export", *words, "--config.plugins=flax_msgpack.py")
    assert refused.returncode == 2 and "--trust_plugins" in refused.stderr
    done = installed("export", *words, "--config.plugins=flax_msgpack.py", "--trust_plugins")
    assert done.returncode == 0, done.stderr
    receipt = json.loads((tmp_path / "rings.msgpack.receipt.json").read_text())
    assert receipt["model"]["family"] == "Mixer" and receipt["model"]["token_dim"] == 8
    assert receipt["read_back"]["largest_logit_difference"] == 0
    assert (receipt["loss"], receipt["computed_in"]) == ("my_poly1", "float32")


END = (
    "finished at step 200: test/top1 90.00%, test/loss 0.8, test/num_examples 360, images_per_s 15"
)


@pytest.mark.parametrize(
    ("printed", "same"),
    [
        ("finished at step 200: test/loss 0.8275, test/top1 89.17%, test/num_examples 360, "
         "images_per_s 1,302.5", True),
        (END.replace("90.00%", "61%").replace("0.8", "1.6"), True),
        (END.replace("90.00%", "10.00%"), False),
        (END.replace("0.8", "2.3"), False),
        (END.replace("360", "359"), False),
        (END.replace("step 200", "step 100"), False),
        (END.replace("top1", "top5"), False),
        (END + ", test/ece 0.1", False),
    ],
)  # fmt: skip
def test_shown_lines_are_compared_by_names_and_near_numbers(printed, same):
    assert is_printed(END, ["another line", printed]) == same


@pytest.mark.slow  # a minute; tests/test_docs.py parses its commands
def test_first_hour(site, tmp_path):
    """Every line that the tutorial shows is printed, with numbers that are near."""
    environment = os.environ | {
        "PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, ROOT / "tests/tutorial_run.py", ROOT / "docs/tutorials/first_hour.md"],
        capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    blocks = json.loads(done.stdout)
    assert sum(bool(shown) for _, _, shown in blocks) >= 4
    for block, printed, shown in blocks:
        lines = printed.splitlines()
        missing = [line for line in shown.splitlines() if not is_printed(line, lines)]
        assert not missing, f"{block}\ndoes not print\n{missing}\nbut\n{printed}"
