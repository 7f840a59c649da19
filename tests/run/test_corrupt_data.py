"""Runs on partly corrupt data: records are masked and counted; too many stop the run."""

import json
import pathlib
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from asked import count_steps, train_and_evaluate
from etils import epath
from prepared import break_image, labelled_images, prepare
from read_settings import settings_of

from vit_jax.checkpoints import restore
from vit_jax.config import base_config, text
from vit_jax.config.text import apply_overrides, load_config
from vit_jax.data.host_tf import tf
from vit_jax.data.order import record_order
from vit_jax.main import main
from vit_jax.run import loop
from vit_jax.run.watch.guards import CorruptDataError, CorruptRecords

pytestmark = pytest.mark.usefixtures("one_device", "never_with_checks", "experiments_made_once")

FILE = str(pathlib.Path(__file__).parents[2] / "configs/quickstart.py") + ":debug"
CORRUPT = [3, 50, 51, 90]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """100 records of 8 x 8 images in TFDS's format; four of them are not images."""
    root = tmp_path_factory.mktemp("data")
    images = np.random.default_rng(0).integers(0, 256, (100, 8, 8, 3), np.uint8)
    examples = [{"image": image, "label": i % 10} for i, image in enumerate(images)]
    prepare(root, "noise", labelled_images(10, shape=(8, 8, 3), encoding_format="png"), examples)
    (file,) = (root / "noise/1.0.0").glob("*.tfrecord*")
    for record in CORRUPT:
        break_image(file, record)
    return root


def make_config(data_dir, **overrides):
    config = load_config(FILE)
    fields = {
        "data.name": "noise",
        "data.data_dir": str(data_dir),
        "duration": "8 steps",
        "log.every": "2 steps",
        "checkpoint.every": "4 steps",
        "schedule.warmup": "0 steps",
        "global_batch_size": "16",
        "model.depth": "1",
    } | {key.replace("__", "."): value for key, value in overrides.items()}
    assert not apply_overrides(config, list(fields.items()))
    config.data.ops = "decode"
    del config.evals["test"]
    return config


def corrupt_rows(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert not any("masked" in name for row in rows for name in row)  # of one batch
    return {row["step"]: row["train/corrupt"] for row in rows if "train/corrupt" in row}


@pytest.mark.slow
def test_corrupt_records_are_counted_over_the_run_and_its_resumption(data_dir, tmp_path):
    config = make_config(data_dir, data__reader="offsets")
    train_and_evaluate(config, tmp_path / "a")
    ids = record_order(100, config.seed)(tf.range(8 * 16, dtype=tf.int64)).numpy()
    expected = {step: int(np.isin(ids[: step * 16], CORRUPT).sum()) for step in (2, 4, 6, 8)}
    assert corrupt_rows(tmp_path / "a") == expected and expected[8] > 4
    assert restore.read_meta(epath.Path(tmp_path / "a/checkpoints/4"))["corrupt"] == expected[4]

    shutil.rmtree(tmp_path / "a/checkpoints/8")
    (tmp_path / "a/summary.json").unlink()
    train_and_evaluate(make_config(data_dir, data__reader="memory"), tmp_path / "a")
    assert corrupt_rows(tmp_path / "a") == expected


@pytest.mark.slow
def test_a_run_stops_above_the_limit_and_goes_on_with_a_higher_one(
    data_dir, tmp_path, monkeypatch, capsys
):
    config = make_config(data_dir, data__max_corrupt_fraction="0.01")
    monkeypatch.setattr(loop, "compile_step", count_steps())
    monkeypatch.setattr(text, "load_config", lambda name: config)
    assert main([f"--config={FILE}", f"--workdir={tmp_path}"]) == 1
    error = capsys.readouterr().err
    assert re.search(r"step \d: \d of \d+ examples .*data\.max_corrupt_fraction=0\.01", error)
    assert "Traceback" not in error
    config.data.max_corrupt_fraction = 0.5
    assert train_and_evaluate(config, tmp_path)["step"] == 8


def test_the_limit():
    config = base_config()
    config.data.num_examples = 50
    config.data.max_corrupt_fraction = 0.1
    few = CorruptRecords({"corrupt": 2}, settings_of(config).data, lambda steps: 10 * steps)
    few.count([jnp.float32(1), jnp.float32(2)], 1, None)  # 5 of 10, but the data set has 50
    few.count([], 5, None)
    with pytest.raises(CorruptDataError, match=r"step 5: 6 of 50 .* nothing is saved"):
        few.count([jnp.float32(1)], 5, None)
    assert few.total == 6
    with pytest.raises(CorruptDataError, match="last save: step 4"):
        few.count([], 5, 4)
    few.count([], 6, 4)
    config.data.max_corrupt_fraction = 0.0
    CorruptRecords({}, settings_of(config).data, lambda steps: 10 * steps).count([], 1, None)
