"""Preprocessing on the host: ops that map an image to an image in tf.data.

An op takes uint8 pixels (h, w, 3), or JPEG or PNG bytes if it `takes_encoded`, and returns uint8
pixels; results in floating point are rounded and clipped.

The argument `crop` lets a resize follow data.image_size: "resize_small(crop=0.875)|central_crop"
resizes to 256 for an image size of 224, and to 439 for 384. Cropping an image smaller than `size`
is an error, unless `pad=True` adds a black border.
"""

from __future__ import annotations

import copy
from typing import ClassVar

from vit_jax.config.parts import key
from vit_jax.data import augment
from vit_jax.data.host_tf import tf
from vit_jax.data.images.formats import decode_jpeg, decode_window, scaled_for, to_pixels
from vit_jax.data.ops import HostOp, Hw, Op, SizedOp
from vit_jax.data.order import fold_in
from vit_jax.data.resizing import FILTERS, enlarged_rows, halves_up, resize_rounded

_COUNT = "[1, 65535]"
_CROP_RANGE = "[0.01, 1]"
_CROP = "share of each side that a later crop of `size` keeps"
_ANTIALIAS = "smooth the sides that shrink"
_THIN = 16  # images of this many times the pixels of the crop that follows


class Decode(HostOp):
    """Decode an image file to 8-bit RGB, also from grey, CMYK, alpha, palette and 16 bits."""

    takes_encoded = decodes = True

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return to_pixels(image)


class ScaledDecode(SizedOp):
    """Decode as `decode`, but large JPEGs at a half, a quarter or an eighth of their size.

    For a resize that follows: "scaled_decode(crop=0.875)|resize_small(crop=0.875)|central_crop".
    Both sides stay at least twice `size` / `crop`; smaller JPEGs are decoded at full size. libjpeg
    scales while it decodes, which saves most of the time for photographs of 12 megapixels.

    The result is close to the mean of every 2 x 2, 4 x 4 or 8 x 8 pixels: in smooth images it
    differs from the mean by less than 0.6 of 255 on average, and by at most 5.
    """

    crop: float = key(1.0, _CROP, within=_CROP_RANGE)
    takes_encoded = decodes = True
    full_size, gives = "decode", None

    @property
    def decodes_for(self) -> Hw:
        return _before_crop(self.hw, self.crop)

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        if image.dtype != tf.string:
            return image

        def scaled() -> tf.Tensor:
            shape = tf.image.extract_jpeg_shape(image)
            sides = shape[0], shape[1]
            return scaled_for(self.decodes_for, sides, lambda r: decode_jpeg(image, ratio=r))

        return tf.cond(tf.io.is_jpeg(image), scaled, lambda: to_pixels(image))


class InceptionCrop(SizedOp):
    """Crop a random window and resize it to `size`, bilinearly.

    The window covers `area_min` to `area_max` of the image and has an aspect from 3:4 to 4:3. For a
    JPEG only the window is decoded; the pixels equal the fully decoded image's.

    Source: Szegedy et al. 2014 (arXiv:1409.4842), section 6.
    """

    area_min: float = key(0.05, "smallest share of the image", within="(0, 1]")
    area_max: float = key(1.0, "largest share of the image", within="(0, 1]")
    antialias: bool = key(False, _ANTIALIAS)
    takes_encoded, cuts = True, True

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        def crop_pixels(pixels: tf.Tensor) -> tf.Tensor:
            return tf.image.crop_to_bounding_box(pixels, *self._window(tf.shape(pixels), seed))

        def crop_jpeg() -> tf.Tensor:
            shape = tf.image.extract_jpeg_shape(image)
            window = self._window(shape, seed)

            def decoded(ratio: int) -> tf.Tensor:
                return decode_window(image, shape, window, ratio)

            return scaled_for(self.hw, window[2:], decoded) if self.full_size else decoded(1)

        if image.dtype == tf.string:
            is_jpeg = tf.io.is_jpeg(image)
            image = tf.cond(is_jpeg, crop_jpeg, lambda: crop_pixels(to_pixels(image)))
        else:
            image = crop_pixels(image)
        return _bilinear(image, self.hw, self.antialias)

    def _window(self, shape: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, ...]:
        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            shape,
            tf.zeros([1, 0, 4]),
            seed=seed,
            min_object_covered=0.0,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(self.area_min, self.area_max),
            max_attempts=100,
            use_image_if_no_bounding_boxes=True,
        )
        return begin[0], begin[1], extent[0], extent[1]


class ScaledInceptionCrop(InceptionCrop):
    """Crop as `inception_crop`, but decode large windows of JPEGs as `scaled_decode` does.

    The window is the one that `inception_crop` draws, widened to multiples of 2, 4 or 8 pixels. It
    is at least twice `size` after it was scaled; smaller windows are as `inception_crop`'s.
    """

    full_size = "inception_crop"


class CoveringResize(SizedOp):
    """A resize that may keep the aspect.

    Of a thin image it makes only what the crop after it keeps, as the whole may take gigabytes.
    """

    cut: ClassVar[Crop | None] = None  # the crop after it

    def before(self, after: Op) -> Op:
        if not isinstance(after, Crop):
            return self
        own = copy.copy(self)
        object.__setattr__(own, "cut", after)
        return own

    def _first_kept(self, resized: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """The first pixel that `cut` keeps of an image of the size `resized`; `seed`: of self."""
        assert self.cut is not None
        own_seed = fold_in(seed, 1) if isinstance(self.cut, RandomCrop) else None  # of the next op
        return self.cut._begin(resized - self.cut.hw, own_seed)

    def _is_thin(self, sides: tf.Tensor, resized: tf.Tensor) -> tf.Tensor:
        """Whether an image is enlarged, and `cut` keeps a small part of it."""
        assert self.cut is not None
        kept = self.cut.hw
        is_large = tf.reduce_prod(resized) > _THIN * kept[0] * kept[1]
        return is_large & tf.reduce_all((resized >= kept) & (resized >= sides))


class Resize(SizedOp):
    """Resize to `size` / `crop`, rounded, bilinearly."""

    antialias: bool = key(False, _ANTIALIAS)
    crop: float = key(1.0, _CROP, within=_CROP_RANGE)

    @property
    def gives(self) -> Hw:
        return _before_crop(self.hw, self.crop)

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return _bilinear(image, self.gives, self.antialias)


class ResizeSmall(CoveringResize, Resize):
    """Resize bilinearly to the smallest image that covers `size` / `crop`, keeping the aspect.

    An int `size` gives the shorter side. The longer side is rounded to the nearest pixel.
    """

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        sides, size = tf.shape(image)[:2], self.gives
        # The larger of the two scales size[i] / sides[i] covers both sides.
        i = tf.cast(size[1] * sides[0] > size[0] * sides[1], tf.int32)
        wanted, side = tf.gather(size, i), tf.gather(sides, i)
        resized, cut = (sides * wanted + side // 2) // side, self.cut

        def whole() -> tf.Tensor:
            return _bilinear(image, resized, self.antialias)

        if cut is None:
            return whole()

        def window() -> tf.Tensor:
            return _enlarged_window(image, resized, self._first_kept(resized, seed), cut.hw)

        return tf.cond(self._is_thin(sides, resized), window, whole)


class TorchvisionResize(CoveringResize):
    """Resize as torchvision's Resize does a PIL image, by Pillow's `filter`.

    An int `size` gives the shorter side, and the longer one is rounded down; (H, W) gives both
    sides. With `cover`, (H, W) keeps the aspect and the result is the smallest image that covers
    it, as in timm's ResizeKeepRatio; sides are rounded to nearest, halves to even.

    95 % of the pixels equal Pillow's; the others differ by at most 2 of 255 or, by "nearest", have
    two equally near. Widths are resized first, as in torchvision's tensors; from version 13 on,
    Pillow resizes heights first if they shrink much more.
    """

    filter: str = key("bilinear", "how pixels are weighted", choices=FILTERS)
    cover: bool = key(False, "keep the aspect, and cover (H, W)")
    crop: float = key(1.0, f"of (H, W): {_CROP}", within=_CROP_RANGE)

    @property
    def gives(self) -> Hw:
        return _before_crop(self.hw, self.crop)

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        sides = tf.shape(image)[:2]
        size = self._result(sides)
        # Pillow rounds and clips between the two passes; sharp edges show the difference.
        wide, cut = self._resized(image, tf.stack([sides[0], size[1]])), self.cut

        def whole() -> tf.Tensor:
            return self._resized(wide, size)

        if cut is None:
            return whole()

        def window() -> tf.Tensor:
            top, left = tf.unstack(self._first_kept(size, seed))
            rows = top + tf.range(cut.hw[0])
            columns = wide[:, left : left + cut.hw[1]]
            return halves_up(enlarged_rows(columns, size[0], rows, self.filter))

        return tf.cond(self._is_thin(sides, size), window, whole)

    def _result(self, sides: tf.Tensor) -> tf.Tensor:
        height, width = self.gives
        if self.cover:
            sides = tf.cast(sides, tf.float64)
            ratio = tf.minimum(sides[0] / height, sides[1] / width)
            return tf.cast(tf.round(sides / ratio), tf.int32)
        of_shorter = isinstance(self.size, int)
        return sides * height // tf.reduce_min(sides) if of_shorter else tf.constant(self.gives)

    def _resized(self, image: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        return resize_rounded(image, size, self.filter)


class Crop(SizedOp):
    """Crop the central `size` of the image."""

    cuts = True

    @property
    def needs(self) -> Hw | None:
        return self.hw

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        begin = self._begin(tf.shape(image)[:2] - self.hw, seed)
        shape = (*self.hw, image.shape[-1])  # an image that is too small raises an error
        return tf.ensure_shape(tf.slice(image, tf.concat([begin, [0]], 0), shape), shape)

    def _begin(self, spare: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        return spare // 2


class TorchvisionCrop(Crop):
    """Crop the centre as torchvision's CenterCrop does, for an image that covers `size`.

    A margin that ends in half a pixel is rounded to even; `central_crop` rounds it down, as
    transformers does.
    """

    def _begin(self, spare: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        return spare // 2 + tf.cast(spare % 4 == 3, tf.int32)


class CentralCrop(Crop):
    """Crop the central `size` of the image."""

    pad: bool = key(False, "add a black border to smaller images first")

    @property
    def needs(self) -> Hw | None:
        return None if self.pad else self.hw

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        if self.pad:
            sides = tf.maximum(tf.shape(image)[:2], self.hw)
            image = tf.image.resize_with_crop_or_pad(image, sides[0], sides[1])
        return super().__call__(image, seed)


class RandomCrop(CentralCrop):
    """Crop a random window of `size`, uniform over all positions."""

    def _begin(self, spare: tf.Tensor, seed: tf.Tensor | None) -> tf.Tensor:
        share = tf.random.stateless_uniform([2], seed, alg="philox")
        return tf.cast(share * tf.cast(spare + 1, tf.float32), tf.int32)


class PadCrop(HostOp):
    """Add `padding` black pixels on every side, then crop a random window of the original size.

    Source: He et al. 2015 (arXiv:1512.03385), section 4.2, with padding 4.
    """

    padding: int = key(..., "pixels on every side", within=_COUNT)

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        padding = self.padding
        padded = tf.pad(image, [[padding, padding], [padding, padding], [0, 0]])
        begin = tf.random.stateless_uniform(
            [2], seed, maxval=2 * padding + 1, dtype=tf.int32, alg="philox"
        )
        window = tf.slice(padded, tf.concat([begin, [0]], 0), tf.shape(image))
        return tf.ensure_shape(window, image.shape)


class RandAugment(HostOp):
    """Apply `layers` operations in sequence, each drawn uniformly from the 16 in `augment`.

    With `magnitude_std` each operation draws its magnitude from a normal distribution around
    `magnitude`, cut off at 0.

    Source: Cubuk et al. 2019 (arXiv:1909.13719), section 3. The paper has 14 operations, one of
    them the identity. The release that AugReg used (arXiv:2106.10270) replaces the identity by
    Invert, SolarizeAdd and Cutout; so does this op.
    """

    of_colours = True
    layers: int = key(..., "number of operations", within=_COUNT)
    magnitude: float = key(
        ..., "on the paper's scale of 10; most operations grow further beyond it", within="[0, inf)"
    )
    magnitude_std: float = key(0.0, "its standard deviation", within="[0, inf)")
    published_contrast: bool = key(
        False, "Contrast blends with the release's grey, which is pixels / 256, at most 255"
    )

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        # The function uses only TensorFlow's control flow; skipping autograph's conversion of
        # Python's builds the graph in a fraction of the time.
        as_it_is = tf.autograph.experimental.do_not_convert(augment.random_operations)
        how = self.layers, self.magnitude, self.magnitude_std, self.published_contrast
        return as_it_is(image, seed, *how)


class AutoAugment(HostOp):
    """Apply one of 25 pairs of operations, the policy "v0" for ImageNet in `augment`.

    It has the operations and magnitudes of `randaugment`, but translations are 2.5 times as long.

    Source: Cubuk et al. 2018 (arXiv:1805.09501), with the policy of EfficientNet's release.
    """

    of_colours = True

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        as_it_is = tf.autograph.experimental.do_not_convert(augment.autoaugment_pair)
        return as_it_is(image, seed)


def _before_crop(size: Hw, crop: float) -> Hw:
    """(height, width) of an image whose sides, times `crop`, give `size`."""
    return round(size[0] / crop), round(size[1] / crop)


def _enlarged_window(image: tf.Tensor, resized: tf.Tensor, begin: tf.Tensor, kept: Hw) -> tf.Tensor:
    """The window `kept`, from `begin` on, of `_bilinear` to the larger size `resized`.

    It repeats the operations of `_bilinear`.
    """
    sides = tf.shape(image)[:2]

    def neighbours(axis: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        scale = tf.cast(sides[axis], tf.float32) / tf.cast(resized[axis], tf.float32)
        at = (tf.cast(begin[axis] + tf.range(kept[axis]), tf.float32) + 0.5) * scale - 0.5
        below, above = (tf.cast(round_(at), tf.int32) for round_ in (tf.floor, tf.math.ceil))
        return tf.maximum(below, 0), tf.minimum(above, sides[axis] - 1), at - tf.floor(at)

    (top, bottom, down), (left, right, along) = neighbours(0), neighbours(1)
    columns = [tf.cast(tf.gather(image, x, axis=1), tf.float32) for x in (left, right)]

    def rows(y: tf.Tensor) -> tf.Tensor:
        first, second = (tf.gather(column, y) for column in columns)
        return first + (second - first) * along[:, None]

    values = rows(top) + (rows(bottom) - rows(top)) * down[:, None, None]
    return _rounded(values)


def _bilinear(image: tf.Tensor, size: Hw | tf.Tensor, antialias: bool) -> tf.Tensor:
    """uint8 (h, w, 3) -> uint8 (*size, 3), rounded to nearest."""

    def resized(antialias: bool) -> tf.Tensor:
        return tf.image.resize(image, size, "bilinear", antialias=antialias)

    if antialias:
        shrinks = tf.reduce_any(tf.shape(image)[:2] > size)
        values = tf.cond(shrinks, lambda: resized(True), lambda: resized(False))
    else:
        values = resized(False)
    return _rounded(values)


def _rounded(values: tf.Tensor) -> tf.Tensor:
    return tf.saturate_cast(tf.round(values), tf.uint8)
