"""The name of a config's model where it is shown."""

from vit_jax.config import image_hw
from vit_jax.config.sections import Model
from vit_jax.models import find_family
from vit_jax.models.variants import Variant


def describe_model(model: Model) -> str:
    """The model's name with the config's patch size.

    Where the config changes sizes of the variant, they take the variant's place.
    """
    name, fields = model.name, find_family(model.name).parse(model.name)
    variant, slash, patch = name.partition("/")
    patch_size = model.own.get("patch_size")
    if patch_size is not None and str(fields.get("patch_size")) == patch:
        patch = "x".join(map(str, dict.fromkeys(image_hw(patch_size))))
    sizes = {key: model.own.get(key) for key in Variant._fields}
    if all(size in (None, fields.get(key)) for key, size in sizes.items()):
        return f"{variant}{slash}{patch}"
    shown = (f"{key} {size or fields[key]}" for key, size in sizes.items() if key in fields)
    return f"{name.partition('-')[0]}{slash}{patch} ({', '.join(shown)})"
