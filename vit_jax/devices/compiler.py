"""Options of XLA's compilers by platform, each with the measurement behind it."""

from jax.sharding import Mesh

_TPU = {
    # By default the compiler replaces the product with a weight gathered over fsdp by one product
    # per device with sends in between. For a ViT's layers that is slower than the gather: L/16,
    # fsdp 16 on v5e:4x4, 64 images per chip: 889 against 474 Mcycles by its own estimate.
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
}


def compiler_options(mesh: Mesh) -> dict[str, bool]:
    """The argument `compiler_options` of `jax.jit` for programs that run on `mesh`."""
    return dict(_TPU) if mesh.devices.flat[0].platform == "tpu" else {}
