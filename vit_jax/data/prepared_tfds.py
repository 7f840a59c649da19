"""Prepared TFDS data sets as sources: read once, in file order, and held in memory.

Nothing is ever downloaded or prepared here. What a data set holds is read from the features.json
beside its files, so data sets outside TFDS's catalogue are read as well as those in it.
"""

from __future__ import annotations

import difflib
import math
import pathlib
import re
from collections.abc import Sequence

import numpy as np
import psutil
from etils import epath

from vit_jax.config import InputError
from vit_jax.data import host_ops
from vit_jax.data.host_tf import tf, tfds
from vit_jax.data.sources import Source, fingerprint, numbered, read_pixels

_NAME = re.compile(r"(?P<name>\w+)(/(?P<config>[\w.-]+))?(:(?P<version>\d+\.\d+\.\d+))?")


def tfds_source(
    name: str, *, split: str, data_dir: str | None, other_sources: Sequence[str] = (), **_
) -> Source:
    """A split of the prepared TFDS data set `name[/config][:version]` below `data_dir`.

    `split` is in TFDS notation (`train`, `train[:90%]`, `train+validation`), `data_dir` None is
    TFDS's own default, and without a version the newest one there is read. Where features.json
    fixes the image's size, images are decoded now and the source is one of pixels; otherwise they
    stay encoded. `other_sources` are names that a misspelt `name` may have meant.

    Raises: InputError if the data set or a file is missing, if it has no `image` or no class
      `label`, if there is no such split, or if it does not fit into this host's memory.
    """
    builder = tfds.builder_from_directory(_prepared_folder(name, data_dir, other_sources))
    features, full_name = dict(builder.info.features), builder.info.full_name
    if not (_is_image(features.get("image")) and _is_class_label(features.get("label"))):
        raise InputError(
            f"data.name={name!r}: {full_name} has the features {features}; needed: 'image', "
            "an Image, and 'label', a ClassLabel"
        )
    image_shape = features["image"].shape
    image_shape = None if None in image_shape else (*image_shape[:2], 3)

    try:
        num_examples = builder.info.splits[split].num_examples
    except (ValueError, KeyError) as error:
        raise InputError(f"data.split={split!r} of {full_name}: {error}") from error
    if not num_examples:
        raise InputError(f"data.split={split!r} of {full_name} holds no examples")
    _check_files(builder.info.splits[split].file_instructions, num_examples, image_shape)

    images, labels = _read_all(builder, split)
    if labels.min() < 0:
        raise InputError(f"data.split={split!r} of {full_name} holds unlabelled examples")
    class_names = tuple(features["label"].names)
    if image_shape is None:
        labels_tensor = tf.constant(labels, tf.int32)

        def read(record_id):
            return {
                "image": tf.gather(images, record_id),
                "label": tf.gather(labels_tensor, record_id),
                "mask": tf.ones([]),
            }
    else:
        pixels, mask = _decode_all(images, image_shape)
        read = read_pixels(pixels, labels, mask)

    return Source(
        name=name,
        split=split,
        num_examples=num_examples,
        num_classes=len(class_names),
        class_names=class_names,
        image_shape=image_shape,
        fingerprint=fingerprint(full_name, split, num_examples, class_names),
        read=read,
        record_name=numbered(full_name, split),
    )


def _is_image(feature) -> bool:
    return isinstance(feature, tfds.features.Image)


def _is_class_label(feature) -> bool:
    return isinstance(feature, tfds.features.ClassLabel)


def _prepared_folder(name: str, data_dir: str | None, other_sources) -> epath.Path:
    """The folder of the data set's version: data_dir/name[/config]/version."""
    match = _NAME.fullmatch(name)
    if not match:
        raise InputError(f"data.name={name!r}; needed: a name such as 'cifar10', 'cifar10:3.0.2'")
    root = epath.Path(data_dir or tfds.core.constants.DATA_DIR)
    parent = root / match["name"] / (match["config"] or "")
    found = sorted(p.name for p in parent.iterdir() if p.is_dir()) if parent.exists() else []
    versions = [v for v in found if re.fullmatch(r"\d+\.\d+\.\d+", v)]
    newest = max(versions, key=lambda v: [int(n) for n in v.split(".")], default="")
    folder = parent / (match["version"] or newest)
    if (folder / "dataset_info.json").exists() and (folder / "features.json").exists():
        return folder

    looked_for = folder / "features.json" if folder != parent else parent / "VERSION/features.json"
    there = f" (there: {', '.join(found)})" if found else ""
    raise InputError(
        f"data.name={name!r}: no prepared data set, {looked_for} or the dataset_info.json beside "
        f"it is missing{there}; {_how_to_get(match['name'], name, root, other_sources)}"
    )


def _how_to_get(catalogue_name: str, name: str, root: epath.Path, other_sources) -> str:
    catalogue = tfds.list_builders(with_community_datasets=False)
    if catalogue_name not in catalogue:
        known = [*other_sources, *catalogue]
        close = difflib.get_close_matches(catalogue_name, known, n=1, cutoff=0.7)
        meant = f"did you mean {close[0]!r}? Otherwise " if close else ""
        meant += "write it as README's 'Data sets' says, or "
        return f"{meant}set data.data_dir to the folder that holds {catalogue_name}/"
    manual = tfds.builder_cls(catalogue_name).MANUAL_DOWNLOAD_INSTRUCTIONS
    steps = (
        'prepare it with: python -c "import tensorflow_datasets as tfds; '
        f'tfds.builder({name!r}, data_dir={str(root)!r}).download_and_prepare()"'
    )
    if manual:
        steps += f", once {root / 'downloads/manual'} holds what TFDS cannot download. "
        steps += f"TFDS says: {' '.join(manual.split())}"
    return f"{steps}; or set data.data_dir to the folder that holds {catalogue_name}/"


def _check_files(file_instructions, num_examples, image_shape) -> None:
    """Raises InputError if a file of the split is missing, or if memory does not hold them."""
    encoded_bytes = 0
    for part in file_instructions:
        path = epath.Path(part.filename)
        if not path.exists():
            raise InputError(f"data.data_dir: {path} is missing; copy it there or prepare it anew")
        encoded_bytes += path.stat().length * part.take / part.examples_in_shard
    pixel_bytes = num_examples * np.prod(image_shape) if image_shape else 0
    needed = 2 * (encoded_bytes + pixel_bytes)  # loading holds everything twice for a moment
    available = min(psutil.virtual_memory().available, _container_memory())
    if needed > available:
        raise InputError(
            f"data.split: {num_examples} examples need about {needed / 2**30:.1f} GiB of memory "
            f"to load and this host has {available / 2**30:.1f} GiB free; read a part "
            "(data.split='train[:10%]'), or the same images as data.name='folder', which is "
            "read from disk"
        )


def _container_memory() -> float:
    """What a container (cgroup 2) still allows this process, in bytes; infinite outside of one."""
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        return int(limit) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # none, or "max"
        return math.inf


def _read_all(builder, split: str) -> tuple[tf.Tensor, np.ndarray]:
    """Encoded images as a string tensor (n,) and labels (n,), in file order."""
    features = builder.info.features.items()
    undecoded = {k: tfds.decode.SkipDecoding() for k, f in features if _is_image(f)}
    if builder.info.file_format is tfds.core.FileFormat.ARRAY_RECORD:
        records = list(builder.as_data_source(split, decoders=undecoded))
        images = tf.constant([record["image"] for record in records])
        return images, np.array([record["label"] for record in records])
    records = builder.as_dataset(
        split=split,
        shuffle_files=False,
        decoders=undecoded,
        read_config=tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False),
    )
    records = records.map(lambda record: (record["image"], record["label"]))
    try:
        images, labels = records.batch(builder.info.splits[split].num_examples).get_single_element()
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
        raise InputError(
            f"data.data_dir: {builder.data_dir} is damaged ({error.message}); copy or prepare it "
            "anew"
        ) from error
    return images, labels.numpy()


def _decode_all(images: tf.Tensor, image_shape) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 (n, H, W, 3) and mask (n,): 0 where an image is broken or of another size."""
    num_images = images.shape[0]
    pixels, mask = np.zeros((num_images, *image_shape), np.uint8), np.zeros(num_images)

    def decode(record_id):
        image = host_ops.to_pixels(tf.gather(images, record_id))
        return record_id, tf.ensure_shape(image, image_shape)

    decoded = tf.data.Dataset.range(num_images).map(decode, tf.data.AUTOTUNE).ignore_errors()
    for record_ids, batch in decoded.batch(1024).as_numpy_iterator():
        pixels[record_ids], mask[record_ids] = batch, 1
    return pixels, mask
