"""A pretrained model and the facts that its source states: images, loss, names of classes."""

import logging
import math
import os
import types
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np
from etils import epath

from vit_jax.base import tree
from vit_jax.base.errors import Faults, InputError
from vit_jax.data.class_names import as_name
from vit_jax.data.division import Division
from vit_jax.data.images.files import warn_once
from vit_jax.data.images.formats import Reading
from vit_jax.data.native import PatchRule
from vit_jax.data.ops import OPS, check_crops, full_size, parse_calls, parse_ops
from vit_jax.data.words import imagenet_names
from vit_jax.models.captioner import CaptionSide
from vit_jax.models.zero_shot import TextSide

logger = logging.getLogger("vit_jax")

_IMAGENET_CLASSES = 1000
_IMAGENET_21K = (21_841, 21_843)  # numbers of classes in different releases
_RESIZES = ("resize", "resize_small", "torchvision_resize", "inception_crop")
_CENTRAL_CROPS = ("central_crop", "torchvision_crop")


class Cut(NamedTuple):
    """Resize and central crop in timm's parameters; `ops_of_cut` gives the ops.

    share: fraction of each side that the central crop keeps; the image is resized to size / share,
      rounded down.
    mode: "center" keeps the aspect ratio and covers that size; "squash" resizes each side
      separately.
    interpolation: Pillow's "nearest", "bilinear" or "bicubic".
    library: the one that crops so. A margin of half a pixel is rounded to even by "timm", and down
      by "vit_jax" and by "transformers", which also resizes the shorter side to the larger size.
    """

    share: float = 1.0
    mode: str = "squash"
    interpolation: str = "bilinear"
    library: str = "timm"

    def resized(self, image_size: tuple[int, int]) -> tuple[int, int]:
        """(height, width) to which an image is resized before it is cropped to `image_size`."""
        height, width = (math.floor(side / self.share) for side in image_size)
        return height, width


class Spec(NamedTuple):
    """Facts about a pretrained model: preprocessing, loss, names of classes; None: not stated.

    image_size: (height, width) in pixels; None also for a model that takes any size.
    resize: the convention by which the source's library resamples position embeddings.
    mean, std: the model's input is (image / 255 - mean) / std, for each channel.
    class_names: in the order of the logits.
    cut: the resize and crop to the image size, as closely as a `Cut` can describe it; None resizes
      the whole image, each side separately.
    ops: the exact preprocessing string for `image_size`; without `decode` it is for pixels of one
      size. None derives it from `cut`. `ops_for` gives the string for any images.
    loss: the loss of the training, softmax or sigmoid; it turns logits into probabilities.
    exif: whether images are turned by their EXIF orientation; None means yes.
    pixel_range, decoding: as the keys of `data`.
    channels: number of channels of the images.
    fault: the reason why the stated preprocessing is not supported (`ops_for` raises it);
      None if it is supported.
    rule: cuts pictures in their own shape, after `ops`, into the model's patches; image_size is
      then the size of what needs one size. None: all images have image_size.
    """

    image_size: tuple[int, int] | None
    resize: str
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    class_names: tuple[str, ...] | None = None
    cut: Cut | None = None
    ops: str | None = None
    loss: str | None = None
    exif: bool | None = None
    pixel_range: tuple[float, ...] | None = None
    decoding: int = 2
    channels: int = 3
    fault: str | None = None
    rule: PatchRule | None = None

    @property
    def reading(self) -> Reading:
        """How the bytes of image files become pixels."""
        return Reading(self.exif is not False, self.channels, self.pixel_range, self.decoding)

    @property
    def stated_reading(self) -> dict[str, Any]:
        """`exif` and `pixel_range` for a JSON file, which states `exif` only if it is False."""
        return {"exif": None if self.exif else self.exif, "pixel_range": self.pixel_range}

    def need_size(self) -> tuple[int, int]:
        """The image size; raises InputError if the model takes images of any size."""
        if self.image_size is None:
            raise InputError("image_size=None: the model takes images of any size; choose one")
        return self.image_size

    def of(self, channels: int) -> "Spec":
        """This spec for images of `channels`; values for other channels give way to their mean."""
        if (len(self.mean), len(self.std), self.channels) == (channels,) * 3:
            return self
        mean, std = (
            values if len(values) == channels else (sum(values) / len(values),) * channels
            for values in (self.mean, self.std)
        )
        return self._replace(mean=mean, std=std, channels=channels)

    def to_values(self, pixels: np.ndarray) -> np.ndarray:
        """Pixels (..., channels), float32, in the model's value range."""
        from vit_jax.data.device_ops import per_channel  # here, because it needs JAX

        per = (per_channel(values, self.channels) for values in (self.mean, self.std))
        mean, std = (np.asarray(values, np.float32) for values in per)
        return (pixels / 255 - mean) / std

    def at(self, image_size: tuple[int, int]) -> "Spec":
        """This spec for another image size; `ops` resize, and are kept if they contain no size."""
        if image_size == self.image_size:
            return self
        ops = None if self.ops is None else with_resize(self.ops)
        calls = () if ops is None else parse_calls(ops, "ops")
        if any(args or "size" in kwargs for _, _, args, kwargs in calls):
            ops = None
        return self._replace(image_size=image_size, ops=ops)


def with_resize(ops: str) -> str:
    """The preprocessing string `ops`, made for images of one size, for files of any size.

    Files are decoded, and resized if `ops` do not: before a central crop they keep their aspect.
    """
    names = [full_size(name) for _, name, _, _ in parse_calls(ops, "ops")]
    if {*names} & {*_RESIZES}:
        return ops if OPS.find(names[0]).takes_encoded else f"decode|{ops}"
    if {*names} & {*_CENTRAL_CROPS}:
        return "decode|resize_small(antialias=True)|central_crop"
    return "decode|resize(antialias=True)"


def ops_of_cut(
    cut: Cut, image_size: tuple[int, int], resized: tuple[int, int] | None = None
) -> str:
    """The preprocessing string for `cut`, equivalent to its library's own preprocessing.

    timm's is transforms_imagenet_eval. `resized` is given where the share has another result.
    Values of pixels may differ by rounding: see `host_ops.torchvision_resize`.
    """
    height, width = resized or cut.resized(image_size)
    if cut.mode == "center" and cut.library == "transformers":
        height = width = max(height, width)
    crop = "torchvision_crop" if cut.library == "timm" else "central_crop"
    quoted = repr(cut.interpolation)
    if cut.mode == "squash":
        if (height, width) == image_size:
            return f"decode|torchvision_resize(filter={quoted})"
        resize = f"torchvision_resize(({height}, {width}), {quoted})"
    elif height == width:
        resize = f"torchvision_resize({height}, {quoted})"
    else:
        resize = f"torchvision_resize(({height}, {width}), {quoted}, cover=True)"
    return f"decode|{resize}|{crop}"


def share_of(side: int, resized: int) -> float:
    """The share for which `Cut.resized` turns n x side into n x resized, about side / resized."""
    share = side / resized
    return share if Fraction(share) * resized <= side else math.nextafter(share, 0.0)


class Pretrained(NamedTuple):
    """A pretrained model.

    source: its name in messages.
    model: the source's model, unrolled.
    params: {leaf name: float32 array} of that model.
    spec: see `Spec`.
    run: step, config and results of a workdir's run; None for other sources.
    model_state: {name: float32 array} of its other variables, such as
      "batch_stats/trunk/norm_root/mean"; empty if the model has none.
    division: which of the user's images its run trained on and which it held out.
    read_text_side: reads the text side, if `model` is the image tower of a model of images and
      texts.
    read_caption_side: reads the part that writes captions, if the model has one.
    """

    source: str
    model: nn.Module
    params: dict[str, np.ndarray]
    spec: Spec
    run: dict[str, Any] | None = None
    model_state: Mapping[str, np.ndarray] = types.MappingProxyType({})
    division: Division = Division()
    read_text_side: Callable[[], TextSide] | None = None
    read_caption_side: Callable[[], CaptionSide] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """The variables for `model.apply`: {"params": ..., and the collections of model_state}."""
        state = tree.unflatten_names(self.model_state)
        return {"params": tree.unflatten_names(self.params), **state}


def ops_for(spec: Spec, data_size: tuple[int, int] | None = None) -> str:
    """The preprocessing string of a source with an image size; see `data.parse_ops`.

    All commands prepare images of one size by it, see `preparation`. For a run it does what the
    run's evaluation does.

    Args:
      spec: of the source.
      data_size: (height, width) of all images; None: they are files of any size. Ops that crop
        these images to another size than the model's are replaced by `with_resize`.

    Raises:
      InputError: if the source's preprocessing is not supported.
    """
    if spec.fault is not None:
        raise InputError(spec.fault)
    size = spec.need_size()
    if spec.ops is None:
        return ops_of_cut(spec.cut or Cut(), size)
    host_ops, faults = parse_ops(spec.ops, size)[0], Faults()
    faults.check(check_crops, host_ops, "ops", data_size)
    made = next((op.gives for op in reversed(host_ops) if op.gives is not None), data_size)
    reads = data_size is not None or any(op.takes_encoded for op in host_ops[:1])
    return spec.ops if reads and not faults and made == size else with_resize(spec.ops)


def preparation(
    spec: Spec, image_shape: tuple[int, ...] | None, *, own_shape: bool = True
) -> tuple[str, PatchRule | None]:
    """The preprocessing string of a source, and the rule that then cuts pictures into patches.

    Args:
      spec: of the source.
      image_shape: (height, width, channels) of all images; None: they are files of any size.
      own_shape: whether what is computed can take pictures in their own shape. If not, or if the
        source has no rule, all images get the source's size, and the rule is None.

    Raises:
      InputError: as `ops_for`.
    """
    if own_shape and spec.rule is not None and spec.fault is None:
        return spec.ops or "decode", spec.rule
    data_size = None if image_shape is None else (image_shape[0], image_shape[1])
    return ops_for(spec, data_size), None


def with_rule(spec: Spec, rule: PatchRule, faults: Faults) -> Spec:
    """`spec` for pictures in their own shape; adds a fault if its ops set the size of images."""
    ops = spec.ops or "decode"
    host_ops, _ = parse_ops(ops, spec.image_size or (1, 1))
    sized = [op.text for op in host_ops if op.gives is not None]
    faults.need(not sized, f"ops={ops!r}: {', '.join(sized)} would change the shape of pictures; "
                "needs ops that set no size, such as decode")  # fmt: skip
    return spec._replace(ops=ops, rule=rule)


def load_image(path: str | os.PathLike | bytes, spec: Spec) -> np.ndarray:
    """Load an image, a file or its bytes, as the model's input: float32 (H, W, channels).

        model, variables = vit_jax.load_pretrained(source)
        image = vit_jax.load_image("cat.jpg", vit_jax.pretrained_spec(source))
        logits = model.apply(variables, image[None])

    Reads JPEG, PNG, WebP, BMP, TIFF and the first frame of a GIF, and turns the image by its EXIF
    orientation unless `spec.exif` is False. If `spec.image_size` is None the image keeps its size.

    The numbers are in the model's value range. A model of pictures in their own shape gets them by
    `predict` or `load_predictor`; here they are squashed to `spec.image_size`, and a warning says
    so.

    Raises:
      OSError: if the file cannot be read.
      InputError: if it cannot be decoded, or `path` is neither a path nor bytes.
    """
    if spec.rule is not None and spec.image_size is not None:
        warn_once(
            f"load_image: the model takes pictures in their own shape, and this squashes them to "
            f"{spec.image_size}; use vit_jax.predict or vit_jax.load_predictor, or give "
            "spec._replace(rule=None)"
        )
    return spec.to_values(load_pixels(path, spec).astype(np.float32))


def load_pixels(path: str | os.PathLike | bytes, spec: Spec) -> np.ndarray:
    """As `load_image`, but the numbers are pixels from 0 to 255."""
    from vit_jax.data.host_tf import tf  # here, because it needs TensorFlow
    from vit_jax.data.images.formats import to_known_format, to_pixels, why_unreadable

    ops = "decode" if spec.image_size is None else ops_for(spec)
    if not isinstance(path, (str, os.PathLike, bytes)):
        raise InputError(
            f"path: got {type(path).__name__}; needs a path, or the bytes of a file; "
            "`load_predictor` takes arrays and images of Pillow too"
        )
    encoded = path if isinstance(path, bytes) else epath.Path(path).read_bytes()
    try:
        with tf.device("cpu"):
            image = tf.constant(to_known_format(encoded, spec.reading))
            if spec.channels != 3:
                image = to_pixels(image, spec.channels)
            for op in parse_ops(ops, spec.image_size or (1, 1))[0]:
                image = op(image, None)
    except tf.errors.OpError:  # whose text is TensorFlow's own
        why = why_unreadable(encoded, spec.reading) or "it is damaged; save it again"
        name = "the bytes" if isinstance(path, bytes) else os.fspath(path)
        raise InputError(f"{name}: not a readable image: {why}") from None
    return image.numpy()


def class_names(spec: Spec, num_classes: int) -> tuple[str, ...]:
    """The source's class names; without them ImageNet's for 1,000 classes, else numbers."""
    if spec.class_names is not None and len(spec.class_names) == num_classes:
        return spec.class_names
    if num_classes == _IMAGENET_CLASSES:
        return tuple(imagenet_names().values())
    return tuple(f"class {i}" for i in range(num_classes))


def loss_of(pretrained: Pretrained, assumed: str = "softmax") -> str:
    """The loss that turns the logits of a source into probabilities: as stated, else `assumed`.

    The assumption is logged, as a warning for ImageNet-21k's number of classes, because its
    published models were trained with the sigmoid.
    """
    if pretrained.spec.loss is None:
        of_21k = pretrained.model.num_classes in _IMAGENET_21K
        say = logger.warning if of_21k else logger.info
        remedy = "state it in the JSON file next to the weights"
        say("%s: the loss is not stated; assuming %s; %s", pretrained.source, assumed, remedy)
    return pretrained.spec.loss or assumed


def class_names_of(names: Any, num_classes: int | None, source: str) -> tuple[str, ...] | None:
    """The source's class names, by `as_name`; None if it states none.

    Raises:
      InputError: if their number is not the number of classes, or they are not strings.
    """
    if names is None or num_classes is None:
        return None
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise InputError(f"init_from={source!r}: its class names are not a list of strings")
    if len(names) != num_classes:
        raise InputError(
            f"init_from={source!r}: {len(names)} class names for {num_classes} classes"
        )
    return tuple(map(as_name, names))


def read_preparation(
    stated: Mapping[str, Any], image_size: tuple[int, int] | None, source: str
) -> dict[str, Any]:
    """Fields of a Spec that this project adds to a format's own: ops, loss, exif, pixel_range.

    Raises:
      InputError: if `ops` cannot be parsed.
    """
    ops = stated.get("ops")
    if ops is not None:
        parse_ops(ops, image_size or (1, 1), key=f"init_from={source!r}: ops")
    found = {"ops": ops} | {key: stated.get(key) for key in ("loss", "exif")}
    return found | {"pixel_range": tuple(stated.get("pixel_range") or ()) or None}
