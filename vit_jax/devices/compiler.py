"""Options of XLA's compilers by platform, each with the reason that it was measured to have."""

from jax.sharding import Mesh

_TPU = {
    # The compiler would split a product with a weight gathered over fsdp into one product a
    # device, with a send between two of them. For a ViT's layers that is slower than the gather:
    # L/16, fsdp 16 on v5e:4x4, 64 images a chip: 889 against 474 Mcycles by its own estimate.
    "xla_tpu_enable_windowed_einsum_for_all_gather": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
}


def compiler_options(mesh: Mesh) -> dict[str, bool]:
    """For `jax.jit(..., compiler_options=)` of the programs that run on `mesh`."""
    return dict(_TPU) if mesh.devices.flat[0].platform == "tpu" else {}
