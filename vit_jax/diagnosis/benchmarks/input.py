"""Measures the input pipeline on this host against plain pipelines on the same images."""

import collections
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from vit_jax import data
from vit_jax.config import Settings
from vit_jax.data import order
from vit_jax.data.elements import PARALLEL_CALLS, Elements
from vit_jax.data.host_tf import tf
from vit_jax.data.images.formats import to_pixels
from vit_jax.data.preprocessing import eval_batch
from vit_jax.diagnosis.benchmarks.rounds import measure, spread, spread_of_ratio
from vit_jax.run.setup.sources import training_order

_NUM_ROUNDS = 7
_MOST_ROWS = 128  # maximum rows of the global batch that are read
_IMAGES_A_ROUND = 512


def measure_input(
    settings: Settings, source: data.Source, *, num_rounds: int | None = None
) -> dict[str, Any]:
    """CPU milliseconds per image of a config's training input pipeline, on one host.

    The pipeline produces the first rows of each global batch, at most 128, as one host of several
    would. For encoded images, the same rounds also time other tf.data pipelines on the same
    records, with JPEGs in memory:

    decode: decodes the whole image and does nothing else.
    full_size: the pipeline without scaling of JPEGs, if the ops scale them.
    fused_float32, unfused_float32: a bilinear Inception crop, a random flip, and normalisation to
      float32 in [-1, 1], all on the host; the fused one decodes only the window.

    A round reads several batches from each pipeline, each from start to end.

    Args:
      settings: resolved; names the ops.
      source: the training data.
      num_rounds: rounds to time, after one that is not; None: 7.

    Returns:
      Figures for JSON: `cpu_ms_per_image`, {"median", "min", "max"} of the rounds for each
      pipeline, and likewise `ratio_to_*`, the ratio of the pipeline to another in one round.

    Raises:
      InputError: the data are missing, or do not fit the ops.
    """
    image_size, run = settings.data.image_size, settings.run
    host_ops, _ = data.parse_ops(settings.data.ops, image_size)
    spec = eval_batch(settings.data, run.global_batch_size, host_ops, "data.ops")
    rows = np.arange(min(run.global_batch_size, _MOST_ROWS))
    num_batches = max(1, _IMAGES_A_ROUND // len(rows))
    num_rounds = num_rounds or _NUM_ROUNDS
    data_order = training_order(settings.data, run, source)
    where: dict[str, Any] = {"seed": run.seed, "rows": rows, "data_order": data_order}
    makers: dict[str, Callable[..., Iterator]] = {}
    makers["pipeline"] = functools.partial(data.host_batches, source, spec, **where)
    full_size = data.at_full_size(host_ops)
    if source.encoded and full_size != host_ops:
        unscaled = eval_batch(settings.data, spec.size, full_size, "data.ops")
        makers["full_size"] = functools.partial(data.host_batches, source, unscaled, **where)
    if source.encoded:
        loads: dict[str, Callable[..., Any]] = {
            "decode": lambda image, key: tf.shape(to_pixels(image)),
            "fused_float32": functools.partial(plain_load, image_size, True),
            "unfused_float32": functools.partial(plain_load, image_size, False),
        }
        for name, load in loads.items():
            makers[name] = functools.partial(plain_batches, source, load, spec.size, **where)
    calls = round_calls(makers, num_batches, 1 + num_rounds)
    measure(calls, 1)  # warm-up
    costs = measure(calls, num_rounds)
    images = num_batches * len(rows)
    cpu_ms = {name: [1e3 * c.cpu_s / images for c in found] for name, found in costs.items()}
    figures = {
        "data": source.name,
        "ops": settings.data.ops,
        "image_size": list(image_size),
        "rows": len(rows),
        "images": images * num_rounds,
        "cpu_cores": PARALLEL_CALLS,
        "cpu_ms_per_image": {name: spread(values) for name, values in cpu_ms.items()},
    }
    pipeline = cpu_ms.pop("pipeline")
    return figures | {
        f"ratio_to_{name}": spread_of_ratio(pipeline, values) for name, values in cpu_ms.items()
    }


def round_calls(
    makers: dict[str, Callable[..., Iterator]], num_batches: int, num_rounds: int
) -> dict[str, Callable[[], object]]:
    """{name: function that reads the batches of one round}, to be called `num_rounds` times.

    All pipelines are built in advance, because that takes seconds. Each round reads its own
    pipeline to the end, so that no prefetching falls into another round.
    """
    steps = [range(i * num_batches, (i + 1) * num_batches) for i in range(num_rounds)]

    def reader(make: Callable[..., Iterator]) -> Callable[[], object]:
        rounds = iter([make(steps=s) for s in steps])
        return lambda: collections.deque(next(rounds), maxlen=0)

    return {name: reader(make) for name, make in makers.items()}


def plain_batches(
    source: data.Source,
    load: Callable,
    global_batch_size: int,
    *,
    steps: range,
    seed: int,
    rows: np.ndarray,
    data_order: data.Order,
) -> Iterator[tuple]:
    """Batches of (load(image, key), label) for the records that `data.host_batches` reads."""

    def arrange(step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        positions = step * global_batch_size + tf.constant(rows, tf.int64)
        return data_order(positions), order.keys(positions, seed)

    def read(record_id: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        example = source.read(record_id)
        return load(example["image"], key), example["label"]

    # Records that cannot be decoded are skipped; the pipeline masks them.
    numbers = tf.data.Dataset.range(steps.start, steps.stop)
    examples = numbers.map(arrange).unbatch().map(read, PARALLEL_CALLS).ignore_errors()
    return Elements(examples.batch(len(rows)).prefetch(2))


def plain_load(
    image_size: tuple[int, int], fused: bool, image: tf.Tensor, key: tf.Tensor
) -> tf.Tensor:
    """JPEG bytes -> float32 (H, W, 3), as common with `tf.image`; `fused` decodes the window."""
    is_jpeg = tf.io.is_jpeg(image)
    begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.cond(
            is_jpeg,
            lambda: tf.image.extract_jpeg_shape(image),
            lambda: tf.shape(to_pixels(image)),
        ),
        tf.zeros([1, 0, 4]),
        seed=key,
        min_object_covered=0.0,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.05, 1.0),
        max_attempts=100,
        use_image_if_no_bounding_boxes=True,
    )
    window = [*tf.unstack(begin)[:2], *tf.unstack(extent)[:2]]
    pixels = tf.cond(
        is_jpeg & fused,
        lambda: tf.io.decode_and_crop_jpeg(image, window, channels=3),
        lambda: tf.image.crop_to_bounding_box(
            tf.io.decode_image(image, channels=3, expand_animations=False), *window
        ),
    )
    pixels = tf.image.resize(pixels, image_size, "bilinear")
    pixels = tf.image.stateless_random_flip_left_right(pixels, key)
    return pixels / 127.5 - 1.0  # per-channel constants would cost 1.5 times as much
