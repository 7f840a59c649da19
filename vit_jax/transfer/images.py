"""Preprocessing of images for a pretrained model, and the names of its classes."""

import os

import numpy as np
from etils import epath

from vit_jax.data.ops import check_crops, parse_ops
from vit_jax.errors import Faults, InputError
from vit_jax.transfer.pretrained import Cut, Spec, ops_of_cut, with_resize

_IMAGENET_CLASSES = 1000


def ops_for(spec: Spec, data_size: tuple[int, int] | None = None) -> str:
    """The preprocessing string of a source with an image size; see `data.parse_ops`.

    All commands prepare images by it. For a run it does what the run's evaluation does.

    Args:
      spec: of the source.
      data_size: (height, width) of all images; None: they are files of any size. Ops that crop
        these images to another size than the model's are replaced by `with_resize`.

    Raises:
      InputError: if the source's preprocessing is not supported.
    """
    if spec.fault is not None:
        raise InputError(spec.fault)
    if spec.ops is None:
        return ops_of_cut(spec.cut or Cut(), spec.image_size)
    host_ops, faults = parse_ops(spec.ops, spec.image_size)[0], Faults()
    faults.check(check_crops, host_ops, "ops", data_size)
    made = next((op.gives for op in reversed(host_ops) if op.gives is not None), data_size)
    reads = data_size is not None or any(op.takes_encoded for op in host_ops[:1])
    return spec.ops if reads and not faults and made == spec.image_size else with_resize(spec.ops)


def load_image(path: str | os.PathLike, spec: Spec) -> np.ndarray:
    """Load a picture as the model's input: float32 (H, W, channels) in its value range.

        model, variables = vit_jax.load_pretrained(source)
        image = vit_jax.load_image("cat.jpg", vit_jax.pretrained_spec(source))
        logits = model.apply(variables, image[None])

    Reads JPEG, PNG, WebP, BMP, TIFF and the first frame of a GIF, and turns the picture by its EXIF
    orientation unless `spec.exif` is False. If `spec.image_size` is None the image keeps its size.

    Raises:
      InputError: if the file cannot be read or decoded.
    """
    from vit_jax.data.device_ops import per_channel  # here, because these need JAX or TensorFlow
    from vit_jax.data.host_tf import tf
    from vit_jax.data.images.formats import to_known_format, to_pixels, why_unreadable

    ops = "decode" if spec.image_size is None else ops_for(spec)
    try:
        encoded = epath.Path(path).read_bytes()
    except OSError as e:
        raise InputError(f"{os.fspath(path)}: not a readable file ({e})") from None
    try:
        with tf.device("cpu"):
            image = tf.constant(to_known_format(encoded, spec.exif is not False))
            if spec.channels != 3:
                image = to_pixels(image, spec.channels)
            for op in parse_ops(ops, spec.image_size or (1, 1))[0]:
                image = op(image, None)
    except tf.errors.OpError:  # whose text is TensorFlow's own
        why = why_unreadable(encoded) or "it is damaged; save it again"
        raise InputError(f"{os.fspath(path)}: not a readable picture: {why}") from None
    per = (per_channel(values, spec.channels) for values in (spec.mean, spec.std))
    mean, std = (np.asarray(values, np.float32) for values in per)
    return (image.numpy().astype(np.float32) / 255 - mean) / std


def class_names(spec: Spec, num_classes: int) -> tuple[str, ...]:
    """The source's class names; without them ImageNet's for 1,000 classes, else numbers."""
    if spec.class_names is not None and len(spec.class_names) == num_classes:
        return spec.class_names
    if num_classes == _IMAGENET_CLASSES:
        from tensorflow_datasets.datasets.siscore.labels import IMAGENET_LABELS_LIST

        return tuple(IMAGENET_LABELS_LIST)  # sorted by synset number
    return tuple(f"class {i}" for i in range(num_classes))
