"""Model families: one file each, and one line in `config.registries.FAMILIES`."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn

from vit_jax.base.errors import Faults, InputError, nearest
from vit_jax.config import FAMILIES, image_hw, sections
from vit_jax.config.drawn import find_fault_of_draws
from vit_jax.config.parts import as_pair
from vit_jax.models.contract import Model, about, as_family, field_names
from vit_jax.models.fields import check_fields, field_defaults


def create_model(
    name: str,
    num_classes: int | None = 1000,
    image_size: int | Sequence[int] | None = 224,
    **fields: Any,
) -> nn.Module:
    """Make the model called `name`, with the sizes of its paper.

        model = create_model("ViT-B/16", num_classes=10, image_size=(32, 48), pool="gap")
        variables = model.init(jax.random.key(0), jnp.zeros((1, 32, 48, 3)))
        logits = model.apply(variables, images)  # images (B, 32, 48, 3), float32

    Args:
      name: family, variant and patch size, e.g. "ViT-Ti/16" or "R50+ViT-B/16"; any patch size is
        allowed. For ResNets: layers and width factor, e.g. "BiT-R50x1"; "EfficientNet-B0".
      num_classes: number of classes; None makes a model without head, which returns the features.
      image_size: height and width in pixels, or one int for both. None accepts images of any size:
        for convolutional networks, and for Transformers with fixed or no positions.
      **fields: any field of the family's module, e.g. `pool`, `scan`, `dtype` (a name or a dtype).

    Raises:
      InputError: the name or a field is unknown, or values contradict each other.
    """
    family = find_family(name)
    fields = check_fields(family, fields, name)
    sizes = {"num_classes": num_classes, "image_size": image_size} | family.parse(name)
    return family(**(check_fields(family, sizes, name) | fields))


def find_family(name: str) -> type[Any]:
    """The family of the model called `name`.

    Raises:
      InputError: if no family has that name.
    """
    try:
        return FAMILIES.find(name)
    except InputError:
        hint = translate_name(name) or nearest(name, known_names())
        raise InputError(f"name={name!r}: no such model; {hint}") from None


def known_names() -> list[str]:
    """The names of the papers' models; the grammar of most families allows more."""
    families = map(FAMILIES.find, FAMILIES)
    return [name for family in families for name in getattr(family, "names", ())]


def fields_of(name: str) -> list[str]:
    """The names of the fields that the model called `name` has.

    Raises:
      InputError: for an unknown name.
    """
    return field_names(find_family(name))


def model_of(model: sections.Model, data: sections.Data, num_classes: int | None = 1) -> Model:
    """The model of a config, on one device, with `num_classes`.

    If pictures keep their shape and `data.image_size` is None, it is a square of about as many
    patches.

    Raises:
      InputError: as `create_model`.
    """
    fields = {"dtype": model.dtype, "channels": data.channels, **model.own}
    image_size, most = data.image_size, data.max_tokens
    if most is not None:
        fields |= {"max_tokens": most, "pack": data.pack}
        if image_size is None:
            patch = image_hw(fields.get("patch_size") or token_stride(model.name), "patch_size")
            image_size = tuple(math.isqrt(most) * side for side in patch)
    return about(create_model(model.name, num_classes, image_size, **fields))


SIZES = (
    "width", "depth", "mlp_dim", "num_heads", "patch_size", "stages", "stem_width",
    "stem_channels", "width_factor", "depth_factor",
)  # fmt: skip


def sizes_of(name: str) -> dict[str, Any]:
    """{field: value} for each of SIZES that the model called `name` has.

    Raises:
      InputError: for an unknown name.
    """
    family = find_family(name)
    sizes = field_defaults(family) | check_fields(family, family.parse(name), name)
    return {field: sizes.get(field) for field in SIZES if field in field_names(family)}


def name_of(model: nn.Module) -> str | None:
    """The name of the model with the family and the sizes of `model`; None if there is none."""
    name = nearest_name(model)
    return None if name is None or other_sizes(model, name) else name


def nearest_name(model: nn.Module) -> str | None:
    """The name, of the family of `model`, with most of its sizes; None: the family has no names."""
    names = [name for name in about(model).possible_names if is_of_family(model, name)]
    return min(names, key=lambda name: len(other_sizes(model, name)), default=None)


def other_sizes(model: nn.Module, name: str) -> dict[str, Any]:
    """{field: size of `model`} for the sizes in which it differs from the model called `name`."""
    sizes = sizes_of(name).items()
    return {field: getattr(model, field) for field, size in sizes if getattr(model, field) != size}


_SIZES_ELSEWHERE = {
    "tiny": "Ti", "small": "S", "medium": "M", "base": "B", "large": "L", "so400m": "So400m",
    "huge": "H", "giant": "g", "gigantic": "G", "b": "B", "l": "L", "h": "H",
}  # fmt: skip


def translate_name(name: str) -> str | None:
    """The hint for a name of timm, torchvision or Hugging Face; None if `name` is none of these.

    "vit_base_patch16_224.augreg_in21k", "vit_b_16" and "google/vit-base-patch16-224" are ViT-B/16,
    "tf_efficientnet_b0.ns_jft_in1k" is EfficientNet-B0, "t2t_vit_14" is T2T-ViT-14.
    """
    plain = name.rpartition("/")[2].lower().replace("-", "_")
    match = re.match(r"(?:tf_)?efficientnet_?(b[0-8]|l2)(?:_|\.|$)", plain)
    if match is not None:
        return f"it is called EfficientNet-{match[1].upper()} here"
    match = re.match(r"t2t_vit_(?:t_)?(\d+)(?:_|\.|$)", plain)
    if match is not None and f"T2T-ViT-{match[1]}" in known_names():
        return f"it is called T2T-ViT-{match[1]} here"
    match = re.match(r"(vit|deit)3?_([a-z0-9]+)_(?:distilled_)?(?:patch)?(\d+)(?:_|\.|$)", plain)
    if match is None or match[2] not in _SIZES_ELSEWHERE:
        return None
    family = {"vit": "ViT", "deit": "DeiT"}[match[1]]
    if family == "DeiT" and "distilled" not in plain:
        family = "ViT"  # the same network, without the distillation token
    return f"it is called {family}-{_SIZES_ELSEWHERE[match[2]]}/{match[3]} here"


def is_of_family(model: nn.Module, name: str) -> bool:
    """Whether `model` is of the family of the model called `name`."""
    family: Any = find_family(name)
    return type(about(model)) is as_family(family)


def token_stride(name: str) -> tuple[int, int]:
    """Height and width in pixels of the image area behind one token of the model `name`.

    The sides of an image must be multiples of it, except for a BiT or an EfficientNet.

    Raises:
      InputError: for an unknown name.
    """
    family = find_family(name)
    fields = check_fields(family, family.parse(name), name)
    fields |= {"num_classes": None, "image_size": None}
    if "pos_embed" in field_names(family):
        fields["pos_embed"] = "none"  # then no image size is needed
    return family(**fields).token_stride


def tiny_fields(name: str) -> dict[str, Any]:
    """{key of `config.model`: value} of a tiny model with the family and token stride of `name`.

    Raises:
      InputError: for an unknown name.
    """
    return as_family(find_family(name)).tiny_fields(name)  # type: ignore[arg-type] # mypy wants a hash of types


def check_model(model: sections.Model, data: sections.Data, faults: Faults) -> None:
    """Check the section `model` together with `data.image_size`, as far as both are known."""
    faults.extend(_find_remat_faults(model.own))
    sizes = {"data.image_size": data.image_size, "model.patch_size": model.own.get("patch_size")}
    wrong = [size for size in sizes.values() if size is not None and as_pair(size) is None]
    takes_pictures = data.max_tokens is None or model.name is None or "max_tokens" in (
        faults.check_in("model.", fields_of, model.name) or ["max_tokens"]
    )  # fmt: skip
    faults.need(
        takes_pictures,
        f"data.max_tokens={data.max_tokens}: model.name={model.name!r} takes images of one size; "
        "choose a ViT, or set data.image_size instead",
    )
    most = data.max_tokens
    has_size = data.image_size is not None if most is None else find_fault_of_draws(most) is None
    if takes_pictures and not wrong and has_size and model.name is not None:
        faults.check_in("model.", model_of, model, data)


def _find_remat_faults(fields: Mapping[str, Any]) -> list[str]:
    """A fault if `model.remat_layers` would change nothing."""
    layers, remat = fields.get("remat_layers"), fields.get("remat")
    if layers is None:
        return []
    if remat in (None, "none"):
        return [
            f"model.remat_layers={layers}: model.remat={remat} recomputes nothing; "
            "set --config.model.remat=full"
        ]
    if fields.get("scan"):
        return [
            f"model.remat_layers={layers}: a scan recomputes all layers; set "
            "--config.model.scan=false or --config.model.remat_layers=None"
        ]
    return []
