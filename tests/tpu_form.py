"""The form of a model's blocks on TPUs, for meshes of other devices too."""

from vit_jax.devices.kernels import fastest, tpu_forms


def fastest_on_tpu(model, mesh):
    """The `BlockOps` that are fastest on TPUs by calculation."""
    forms = tpu_forms(model, mesh)
    return forms[fastest(forms)]
