"""Row 0 of a run: its first weights and the pixels, beside which its features are judged."""

import json
import logging
import pathlib

import numpy as np
import pytest
from asked import count_steps, train_and_evaluate
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from vit_jax.config import knn
from vit_jax.config.text import load_config
from vit_jax.run import loop

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs/mae.py") + ":debug"
SPLITS = {"train_split": "train", "test_split": "test"}


@pytest.mark.usefixtures("one_device", "never_with_checks")
def test_a_run_that_learns_nothing_says_so_beside_step_0_and_the_pixels(
    tmp_path, monkeypatch, caplog
):
    """Its steps move no weight; it has an average, which row 0 leaves out."""
    monkeypatch.setattr(loop, "compile_step", count_steps())
    c, heard = load_config(CONFIG), []
    c.evals = {"near": knn(**SPLITS, every="10 steps", num_neighbours=(5,), baselines=True)}
    c.optimizer.ema_decay = 0.9
    c.stop.metric, c.stop.patience = "near/5nn_top1", 2
    with caplog.at_level(logging.INFO, "vit_jax"):
        summary = train_and_evaluate(
            c, tmp_path, callbacks=[lambda step, state, metrics: heard.append((step, metrics))]
        )
    first, *rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert {*first} == {"step", "near/5nn_top1", "near/pixels_5nn_top1"} and first["step"] == 0
    assert heard[0] == (0, {k: v for k, v in first.items() if k != "step"})
    assert not any("near/pixels_5nn_top1" in row for row in rows)
    assert summary["near/5nn_top1"] == first["near/5nn_top1"] > 0.2
    digits = load_digits()
    pixels = np.rint(digits.data * (255 / 16)) / 127.5 - 1  # grey, so one channel says it all
    held_out = np.arange(len(pixels)) % 5 == 0
    vote = KNeighborsClassifier(
        5, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07)
    ).fit(pixels[~held_out], digits.target[~held_out])
    top1 = (vote.predict(pixels[held_out]) == digits.target[held_out]).mean()
    assert first["near/pixels_5nn_top1"] == pytest.approx(top1, abs=0.003)  # near ties round apart

    (text,) = [r.getMessage() for r in caplog.records if "not become useful" in r.getMessage()]
    assert text.startswith(f"evals.near: 5nn_top1 ends at {100 * summary['near/5nn_top1']:.2f} %")
    # Row 0 is no evaluation that decides: only two of them have passed, the first one the best.
    assert "stopped_early" not in summary

    pictures = sorted((tmp_path / "neighbours").iterdir())
    assert [path.name for path in pictures] == [f"near_{s:08d}.png" for s in (0, 10, 20)]
    shown = np.asarray(Image.open(pictures[-1]))
    assert shown.shape == (8 * 100 + 4, 8 * 100 + 4, 3)
    tiles = (
        shown[:-4, :-4].reshape(8, 100, 8, 100, 3)[:, 10::12, :, 10::12].transpose(0, 2, 1, 3, 4)
    )
    drawn = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    places = [
        [int(np.abs(drawn - tile[..., 0]).sum((1, 2)).argmin()) for tile in row] for row in tiles
    ]
    assert all(held_out[first] and not held_out[rest].any() for first, *rest in places)
    assert len({row[0] for row in places}) == 8
