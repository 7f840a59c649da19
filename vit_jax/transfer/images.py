"""Images as a pretrained model wants them, and the names of its classes."""

import os

import numpy as np
from etils import epath

from vit_jax.errors import InputError
from vit_jax.transfer.rules import Cut, Spec, ops_of_cut

_IMAGENET_CLASSES = 1000


def ops_for(spec: Spec) -> str:
    """The preprocessing string of a source that has an image size; see `data.parse_ops`.

    Raises:
      InputError: if images cannot be prepared as the source states.
    """
    if spec.fault is not None:
        raise InputError(spec.fault)
    return spec.ops or ops_of_cut(spec.cut or Cut(), spec.image_size)


def load_image(path: str | os.PathLike, spec: Spec) -> np.ndarray:
    """A JPEG or PNG file as the model wants it: float32 (H, W, 3) in its value range.

        model, variables = vit_jax.load_pretrained(source)
        image = vit_jax.load_image("cat.jpg", vit_jax.pretrained_spec(source))
        logits = model.apply(variables, image[None])

    Where `spec.image_size` is None the image keeps its size.

    Raises:
      InputError: if it cannot be read or decoded.
    """
    from vit_jax.data import parse_ops  # TensorFlow only now
    from vit_jax.data.host_tf import tf

    ops = "decode" if spec.image_size is None else ops_for(spec)
    try:
        image = tf.constant(epath.Path(path).read_bytes())
        with tf.device("cpu"):
            for op in parse_ops(ops, spec.image_size or (1, 1))[0]:
                image = op(image, None)
    except (OSError, tf.errors.OpError) as e:
        raise InputError(f"{os.fspath(path)}: not a readable JPEG or PNG file ({e})") from None
    mean, std = (np.asarray(values, np.float32) for values in (spec.mean, spec.std))
    return (image.numpy().astype(np.float32) / 255 - mean) / std


def class_names(spec: Spec, num_classes: int) -> tuple[str, ...]:
    """The names that a source states; of 1,000 without names ImageNet's; else numbers."""
    if spec.class_names is not None and len(spec.class_names) == num_classes:
        return spec.class_names
    if num_classes == _IMAGENET_CLASSES:
        from tensorflow_datasets.datasets.siscore.labels import IMAGENET_LABELS_LIST

        return tuple(IMAGENET_LABELS_LIST)  # by the sorted numbers of the synsets
    return tuple(f"class {i}" for i in range(num_classes))
