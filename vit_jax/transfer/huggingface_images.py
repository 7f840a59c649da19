"""Reads and writes preprocessor_config.json, the image preprocessing of `transformers`."""

import logging
import operator
import re
from collections.abc import Sequence
from typing import Any

from vit_jax.base.errors import Faults, InputError
from vit_jax.data.native import PatchRule
from vit_jax.transfer.pretrained import (
    Cut,
    Spec,
    ops_of_cut,
    preparation,
    read_preparation,
    share_of,
    with_rule,
)
from vit_jax.transfer.source import READING, Source, read_json
from vit_jax.transfer.timm_blocks import CLIP, IMAGENET

logger = logging.getLogger("vit_jax")

_PIXELS = {
    "do_resize": "true or false", "do_center_crop": "true or false", "do_rescale": "true or false",
    "do_normalize": "true or false", "do_pad": "true or false", "resample": "an int from 0",
    "rescale_factor": "a positive number", "image_mean": "numbers of channels",
    "image_std": "positive numbers of channels", "image_processor_type": "text",
    "feature_extractor_type": "text", "ops": "text", "max_num_patches": "a positive int",
    "patch_size": "a positive int", **READING,
}  # fmt: skip
_PROCESSOR = re.compile(
    r"(ViT|DeiT|Bit|CLIP|Siglip|DINOv3ViT)(ImageProcessor(Fast|Pil)?|FeatureExtractor)"
)
_OF_PATCHES = re.compile(r"Siglip2ImageProcessor(Fast|Pil)?")
_CLIP = {f"image_{key}": list(value) for key, value in CLIP.items()}
# Defaults of the image processor classes. ViT's and DeiT's resize each side separately to (height,
# width), or to an int for both. Bit's keeps the aspect ratio.
_PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {"resample": 2, "do_center_crop": False},
    "DeiT": {"resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224},
    "Bit": {"resample": 3, "size": {"shortest_edge": 224}, "do_center_crop": True,
            "crop_size": 224, **_CLIP},
    "CLIP": {"resample": 3, "size": {"shortest_edge": 224}, "do_center_crop": True,
             "crop_size": 224, **_CLIP},
    "Siglip": {"resample": 3, "do_center_crop": False},
    "DINOv3ViT": {"resample": 2, "do_center_crop": False,
                  **{f"image_{key}": list(value) for key, value in IMAGENET.items()}},
}  # fmt: skip
_OF_ANY_SIZE = ("Bit", "CLIP", "Siglip", "DINOv3ViT")  # processors of towers that take any size
_FILTERS = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
_RESAMPLE = {ours: theirs for theirs, ours in _FILTERS.items()}


def read_pixels(source: Source) -> dict[str, Any]:
    """The values of preprocessor_config.json; {} if the file does not exist."""
    file = source.path / "preprocessor_config.json"
    content = read_json(file) if source.path.is_dir() and file.exists() else {}
    return source.read_stated(content, _PIXELS)


def with_pixels(spec: Spec, pixels: dict[str, Any], default: str, source: str) -> Spec:
    """`spec` with the preprocessing in `pixels`, the values of a preprocessor_config.json.

    `default` is the image processor class where none is stated. A tower's images are resized and
    cropped in proportion where the file has another size than the tower's positions.

    If keys ask for unsupported preprocessing, `fault` names them; the weights are still usable.
    """
    processor = _processor(pixels, default)
    match = _PROCESSOR.fullmatch(processor)
    kind = match[1] if match else "ViT"
    height, width = image_size = spec.need_size()
    given = {"size": {"height": height, "width": width}} | _PROCESSORS[kind] | pixels
    if kind in ("Bit", "CLIP") and isinstance(given["size"], int):
        given["size"] = {"shortest_edge": given["size"]}
    if kind in _OF_ANY_SIZE:
        given |= _in_size(given, image_size, source)
    mean, std = _mean_and_std(given)
    spec = spec._replace(mean=mean, std=std)
    needed = ", ".join(f"{name}ImageProcessor" for name in _PROCESSORS)
    of_processor = f"image_processor_type={processor!r}: needs one of {needed}"
    faults = _pixel_faults(given, image_size) if match else [of_processor]
    resized = _height_width(given["size"])
    if faults or resized is None:  # of None they name the size
        return _with_fault(spec, faults, source)
    in_proportion = _in_proportion(given["size"])
    interpolation = _FILTERS[given["resample"]]
    nearest = max if in_proportion else min  # if no share gives both sides
    share = nearest(map(share_of, image_size, resized))
    cut = Cut(share, "center" if in_proportion else "squash", interpolation, "transformers")
    ops = pixels.get("ops") or ops_of_cut(cut, image_size, resized)
    spec = spec._replace(
        cut=cut,
        **read_preparation(pixels | {"ops": ops, "loss": spec.loss}, image_size, source),
    )
    return spec._replace(ops=None) if ops == ops_of_cut(cut, image_size) else spec


def cuts_patches(pixels: dict[str, Any]) -> bool:
    """Whether a preprocessor_config.json is a Siglip2ImageProcessor's; `pixels`: its values."""
    default = "Siglip2ImageProcessor" if "max_num_patches" in pixels else ""
    return _OF_PATCHES.fullmatch(_processor(pixels, default)) is not None


def with_patches(
    spec: Spec, pixels: dict[str, Any], patch_size: tuple[int, int], source: str
) -> Spec:
    """`spec` with the values of a Siglip2ImageProcessor, which keeps the shape of pictures.

    `fault`: as in `with_pixels`.
    """
    given = {"do_resize": True, "resample": 2, "patch_size": 16, "max_num_patches": 256} | pixels
    resample, side = given["resample"], given["patch_size"]
    mean, std = _mean_and_std(given)
    faults = Faults()
    faults.need(given["do_resize"], "do_resize=False: needs true, for at most max_num_patches")
    faults.need(
        resample == 2, f"resample={resample}: needs 2 (bilinear), because images are patches"
    )
    faults.need(
        (side, side) == patch_size, f"patch_size={side}: needs {patch_size[0]}, the model's"
    )
    stated = {"ops": "decode", "loss": spec.loss} | pixels
    spec = spec._replace(mean=mean, std=std, **read_preparation(stated, spec.image_size, source))
    spec = with_rule(spec, PatchRule(patch_size, given["max_num_patches"]), faults)
    return _with_fault(spec, faults, source) if faults else spec


def _processor(pixels: dict[str, Any], default: str) -> str:
    """The image processor class that a preprocessor_config.json states."""
    return pixels.get("image_processor_type") or pixels.get("feature_extractor_type", default)


def _with_fault(spec: Spec, faults: Sequence[str], source: str) -> Spec:
    """`spec` of a preprocessing with `faults`; a warning names them."""
    where = f"init_from={source!r}: its preprocessor_config.json is not supported"
    fault = str(InputError(*faults, where=where))
    logger.warning("%s; only the weights can be used", fault)
    return spec._replace(fault=fault)


def _in_size(given: dict[str, Any], image_size: tuple[int, int], source: str) -> dict[str, Any]:
    """The keys of sizes in `given`, in proportion for images of `image_size`."""
    resized, crops = _height_width(given["size"]), given["do_center_crop"]
    cropped = _height_width(given.get("crop_size")) if crops else resized
    if resized is None or cropped is None or cropped == image_size:
        return {}
    logger.info("%s: its preprocessor_config.json gives %d x %d; in proportion for %d x %d",
                source, *cropped, *image_size)  # fmt: skip
    height, width = (r * i // c for r, c, i in zip(resized, cropped, image_size, strict=True))
    size = {"shortest_edge": max(height, width)} if _in_proportion(given["size"]) else {
        "height": height, "width": width
    }  # fmt: skip
    crop = {"crop_size": dict(zip(("height", "width"), image_size, strict=True))} if crops else {}
    return {"size": size} | crop


def _mean_and_std(given: dict[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`Spec.mean` and `Spec.std` from the values of a preprocessor_config.json and defaults."""
    scale = 255 * given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 255.0
    mean, std = (0.0,) * 3, (1.0,) * 3
    if given.get("do_normalize", True):
        stated = (given.get(key, 0.5) for key in ("image_mean", "image_std"))
        mean, std = (tuple(v) if isinstance(v, list) else (v,) * 3 for v in stated)
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def _in_proportion(size: Any) -> bool:
    """Whether a size in transformers' form keeps the aspect ratio of images."""
    return isinstance(size, dict) and size.keys() == {"shortest_edge"}


def _pixel_faults(given: dict[str, Any], image_size: tuple[int, int]) -> list[str]:
    """The unsupported values in `given`, a preprocessor_config.json's values and defaults."""
    faults, resample = Faults(), given["resample"]
    faults.need(given.get("do_resize", True), "do_resize=False: needs true, for images of one size")
    faults.need(not given.get("do_pad"), "do_pad=True: needs false; padding is not supported")
    faults.need(resample in _FILTERS, f"resample={resample}: needs 0 (nearest), 2 or 3 (bicubic)")
    resized, crops = _height_width(given["size"]), given["do_center_crop"]
    key, cropped = ("crop_size", _height_width(given.get("crop_size"))) if crops else (
        "size", resized
    )  # fmt: skip
    need = None
    if resized is None:
        key, need = "size", "an int, height and width, or shortest_edge"
    elif _in_proportion(given["size"]) and not crops:
        need = "do_center_crop=true, because this size keeps the aspect ratio of the files"
    elif cropped != image_size:
        need = "{} x {}, the image_size of config.json".format(*image_size)
    elif any(map(operator.lt, resized, cropped)):
        key, need = "size", "at least the crop_size: a larger crop has a black border"
    return faults if need is None else [*faults, f"{key}={given.get(key)!r}: needs {need}"]


def _height_width(size: Any) -> tuple[int, int] | None:
    """(height, width) of a size in transformers' form; None if the form is unknown."""
    match size:
        case {"height": height, "width": width, **rest} if not rest:
            pass
        case {"shortest_edge": height, **rest} if not rest:
            width = height
        case [height, width]:
            pass
        case _:
            height = width = size
    return (height, width) if all(type(s) is int and s > 0 for s in (height, width)) else None


def write_pixels(spec: Spec) -> dict[str, Any]:
    """The values of preprocessor_config.json for the preprocessing in `spec`."""
    pixels = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(spec.mean),
        "image_std": list(spec.std),
        "rescale_factor": 1 / 255,
    }
    ops, rule = preparation(spec, None)
    if rule is not None:
        of_patches = {"patch_size": rule.patch_size[0], "max_num_patches": rule.most}
        kind = {"image_processor_type": "Siglip2ImageProcessor", "resample": 2}
        own = {} if ops == "decode" else {"ops": ops}
        return pixels | kind | of_patches | own | spec.stated_reading
    pixels |= _write_cut(spec.cut or Cut(), spec.need_size())
    if ops != library_ops(spec):
        pixels["ops"] = spec.ops or ops
    return pixels | spec.stated_reading


def _write_cut(cut: Cut, image_size: tuple[int, int]) -> dict[str, Any]:
    """Keys that describe `cut`, with the image processor class that supports them in every version.

    With mode "center" there is one size for both sides: the larger one if images are not square.
    """

    def sides(size: Sequence[int]) -> dict[str, int]:
        return {"height": size[0], "width": size[1]}

    resized = cut.resized(image_size)
    processor, size = "DeiTImageProcessor", sides(resized)
    crop = {"do_center_crop": True, "crop_size": sides(image_size)}
    if cut.mode == "center":
        processor, size = "BitImageProcessor", {"shortest_edge": max(resized)}
    elif resized == image_size:
        processor, crop = "ViTImageProcessor", {"do_center_crop": False}
    pixels = {"resample": _RESAMPLE[cut.interpolation], **crop}
    return pixels | {"image_processor_type": processor, "size": size}


def library_ops(spec: Spec) -> str:
    """The preprocessing string equivalent to what transformers does with `write_pixels`' values."""
    return ops_of_cut((spec.cut or Cut())._replace(library="transformers"), spec.need_size())
