"""Plans of ViTs and of big_vision's model for 8 H100s by XLA's compiler, in the same training step.

python tools/gpu_big_vision.py BIG_VISION [NAME...]

BIG_VISION is a checkout of https://github.com/google-research/big_vision. Each NAME (B/16, L/16,
g/14) has 4 unrolled layers, 64 images a chip, AdamW, mean of the patches, no dropout and no remat.
FLOPs count products by their shapes; cuDNN's attention counts the same as its two products and
their four gradients. The tool needs JAX's plugin for CUDA, and no GPU.
"""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.config import FAMILIES, Settings
from vit_jax.config.text import load_config
from vit_jax.devices.chips import find_slice
from vit_jax.planning.compiled import compile_plan
from vit_jax.planning.targets import Target, settle, start_planning

H100 = Target(find_slice("H100:8"))
SAME = {"global_batch_size": 512, "mesh.data": 8, "mesh.fsdp": 1, "model.depth": 4,
        "model.dropout": 0.0, "auto": False}  # fmt: skip


class BigVision(nn.Module):
    """big_vision's model as a family of this package."""

    num_classes: int | None
    image_size: tuple[int, int]
    variant: str
    depth: int
    dtype: jax.typing.DTypeLike = jnp.float32
    dropout: float = 0.0

    # As ours, so that each device updates its part of them.
    split_params = (("Dense_0/kernel", ("fsdp", "tensor")), ("Dense_1/kernel", ("tensor", "fsdp")))

    @staticmethod
    def parse(name: str) -> dict[str, str]:
        return {"variant": name.partition("-")[2]}

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
        from big_vision.models import vit  # its path is an argument

        dtype = jnp.dtype(self.dtype).name
        model = vit.Model(
            self.num_classes, variant=self.variant, depth=self.depth, dtype_mm=dtype, name="model"
        )
        return model(images, train=train)[0]


def main(path: str, *names: str) -> None:
    """Print the table."""
    sys.path.insert(0, path)
    FAMILIES["BigVision"] = BigVision
    start_planning(H100)
    print("| model | GiB of temporaries | ms, each kernel by its roofline | GFLOPs a device |")
    print("|---|---|---|---|")
    for name in names or ("B/16", "L/16", "g/14"):
        for family, own in (("ViT", {"pool": "gap", "remat": "none"}), ("BigVision", {})):
            config = load_config("pretrain:ViT-B/16,imagenet2012")
            config.model = {"name": f"{family}-{name}", "dtype": "bfloat16", "kernels": "auto"}
            config.update_from_flattened_dict(SAME)
            config.model.update(own)
            figures = compile_plan(settle(Settings.of(config), H100), H100)
            kernels = figures["kernels"]
            ms = 1e3 * sum(row["roofline_s"] for row in kernels)
            flops = sum(row["flops"] for row in kernels) / 1e9
            temporaries = figures["memory_bytes"]["temporaries"] / 2**30
            print(f"| {family}-{name} | {temporaries:.2f} | {ms:.2f} | {flops:.1f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
