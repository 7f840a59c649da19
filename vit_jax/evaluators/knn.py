"""k nearest neighbours: accuracy of a vote among similar images, without training.

Axes: N training images, M test images, D features, C classes, K neighbours.
Source: Wu et al. 2018 (arXiv:1805.01978), section 3.4.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.base.errors import InputError
from vit_jax.base.pictures import Images, Pictures
from vit_jax.config import POSITIVE, key
from vit_jax.config.evals import Better
from vit_jax.config.metric_names import PIXELS
from vit_jax.data import order
from vit_jax.evaluators.features import FeatureEvaluator, Features, make_gather
from vit_jax.evaluators.image_table import TableWriter
from vit_jax.evaluators.inputs import EvalInputs, Measure
from vit_jax.experiment.state import TrainState
from vit_jax.models.own_shapes import squash
from vit_jax.models.text import unit

logger = logging.getLogger("vit_jax")

FOLDER = "neighbours"  # in the workdir
_ROWS, _NEAREST = 8, 7  # test images drawn, and training images beside each
_SIDE = 16  # of `Pixels`: more of them would fill the hosts' memory
_SIMILARITIES_AT_ONCE = 1 << 26  # 256 MiB of float32


def votes(
    similarity_MN: np.ndarray, label_N: np.ndarray, num_neighbours: int, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """Labels and weights of each row's nearest neighbours, nearest first; both (M, K).

    A neighbour with similarity s has the weight exp(s / temperature), relative to the nearest
    neighbour's weight.
    """
    num_neighbours = min(num_neighbours, similarity_MN.shape[1])
    nearest_MK = np.argpartition(-similarity_MN, num_neighbours - 1, axis=1)[:, :num_neighbours]
    similarity_MK = np.take_along_axis(similarity_MN, nearest_MK, axis=1)
    order_MK = np.argsort(-similarity_MK, axis=1, kind="stable")
    nearest_MK = np.take_along_axis(nearest_MK, order_MK, axis=1)
    similarity_MK = np.take_along_axis(similarity_MK, order_MK, axis=1).astype(np.float64)
    return label_N[nearest_MK], np.exp((similarity_MK - similarity_MK[:, :1]) / temperature)


class Knn(FeatureEvaluator):
    """Top-1 by a vote among the nearest training images, by frozen features.

    For each k in `num_neighbours` up to the number of training images: `{k}nn_top1`. The similarity
    of two images is the cosine of the angle between their features. Each of the k most similar
    training images votes for its class with weight exp(similarity / temperature). If fewer than k
    can be read, all vote.

    Features are computed on the devices and gathered by every process. Each process then compares
    its share of the test images with all training images, on its host.

    In training, each evaluation writes WORKDIR/neighbours/NAME_STEP.png: a row for each of eight
    test images, with its seven nearest training images. The accuracy shows whether a model learns
    features. Compare it with `baselines`: on small images random weights are far above chance.
    """

    num_neighbours: tuple[int, ...] = key(
        (10, 20, 100, 200), "numbers of training images that vote", within=POSITIVE
    )
    temperature: float = key(
        0.07, "a lower one gives the nearest images more weight", within=POSITIVE
    )

    baselines: bool = key(
        False, "at step 0 of a run, also measure the weights that it begins with, and the pixels"
    )

    @property
    def measures_start(self) -> bool:
        return self.baselines

    def reports(self) -> dict[str, Better]:
        found: dict[str, Better] = {f"{k}nn_top1": "higher" for k in self.num_neighbours}
        return found | {PIXELS + name: "neither" for name in found if self.baselines}

    def lacking(self, sources: Mapping[str, Any]) -> Mapping[str, str]:
        number = sources["train_split"].num_examples
        why = f"train_split has {number} images"
        return {f"{k}nn_top1": why for k in self.num_neighbours if k > number}

    def bind(self, inputs: EvalInputs) -> Measure:
        gather, train_source = make_gather(inputs), inputs.source("train_split")
        writes, table = inputs.folder is not None, TableWriter(inputs, FOLDER)
        num_images = train_source.num_examples
        if inputs.settings.data.name == "unlabelled" and train_source.name == "folder":
            logger.info(
                "evals.%s: the share of images whose neighbours lie in their own folder; it is an "
                "accuracy only if the folders are classes", inputs.name,
            )  # fmt: skip
        numbers = [k for k in self.num_neighbours if k <= num_images]
        if not numbers:
            raise InputError(
                f"num_neighbours={self.num_neighbours}: train_split has {num_images} images; "
                "choose numbers up to that"
            )

        def count(train: Features, test: Features) -> dict[str, float]:
            mine = slice(jax.process_index(), None, jax.process_count())
            my_share = Features(*(column[mine] for column in test))
            hits = _count_hits(train, my_share, numbers, self.temperature, train_source.num_classes)
            hits = multihost_utils.process_allgather(hits).reshape(-1, len(hits)).sum(axis=0)
            top1s = hits / len(test.label_N)
            return {f"{k}nn_top1": float(top1) for k, top1 in zip(numbers, top1s, strict=True)}

        def measure(state: TrainState) -> dict[str, float]:
            train, test = gather(state, "train_split"), gather(state, "test_split")
            found = count(train, test)
            if writes and table.begin(int(state.step)):
                rows = _rows_to_draw(inputs, train, test)
                if jax.process_index() == 0:
                    table.write(rows)
            if writes and self.baselines and int(state.step) == 0:
                of_pixels = make_gather(dataclasses.replace(inputs, model=Pixels()))
                splits = (of_pixels(state, split) for split in ("train_split", "test_split"))
                found |= {PIXELS + name: top1 for name, top1 in count(*splits).items()}
            return found

        return measure


class Pixels(nn.Module):
    """A model whose features are the pixels of the image, made at most 16 pixels high and wide.

    Pictures in their own shape get 16 x 16 pixels.
    """

    def features(self, images: Images, train: bool) -> jax.Array:
        """(B, H, W, C), or pictures of any shape, -> (B, D)."""
        if isinstance(images, Pictures):
            return squash(images, _SIDE).reshape(images.shape[0], -1)
        rows, height, width, channels = images.shape
        shape = (rows, min(height, _SIDE), min(width, _SIDE), channels)
        return jax.image.resize(images, shape, "linear").reshape(rows, -1)


def _count_hits(
    train: Features, test: Features, numbers: Sequence[int], temperature: float, num_classes: int
) -> np.ndarray:
    """Number of correctly classified test images for each number of neighbours."""
    train_ND = unit(train.x_ND)
    hits = np.zeros(len(numbers), np.int32)
    rows = max(_SIMILARITIES_AT_ONCE // len(train_ND), 1)
    for start in range(0, len(test.x_ND), rows):
        some = slice(start, start + rows)
        similarity_MN = unit(test.x_ND[some]) @ train_ND.T
        labels_MK, weights_MK = votes(similarity_MN, train.label_N, max(numbers), temperature)
        for i, k in enumerate(numbers):
            scores_MC = np.zeros((len(labels_MK), num_classes))
            images = np.arange(len(labels_MK))[:, None]
            np.add.at(scores_MC, (images, labels_MK[:, :k]), weights_MK[:, :k])
            hits[i] += (scores_MC.argmax(axis=1) == test.label_N[some]).sum()
    return hits


def _rows_to_draw(inputs: EvalInputs, train: Features, test: Features) -> list[list[np.ndarray]]:
    """K rows of M uint8 images: test images, each followed by its nearest training images."""
    drawn = order.spread(_ROWS, len(test.id_N))
    similarity_KN = unit(test.x_ND[drawn]) @ unit(train.x_ND).T
    id_KM = train.id_N[np.argsort(-similarity_KN, axis=1, kind="stable")[:, :_NEAREST]]
    tests = inputs.images("test_split", test.id_N[drawn])
    trained = inputs.images("train_split", np.unique(id_KM))
    blank = np.zeros_like(
        next(iter((tests | trained).values()))
    )  # of one that fails to be read now
    return [
        [tests.get(at, blank), *(trained.get(near, blank) for near in nearest)]
        for at, nearest in zip(test.id_N[drawn], id_KM, strict=True)
    ]
