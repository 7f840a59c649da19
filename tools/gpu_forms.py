"""Memory and kernels of a step on GPUs with each choice of its form undone, by XLA's compiler.

python tools/gpu_forms.py RECIPE [KEY=VALUE...]

The row "chosen" is the form of `vit_jax.devices.kernels.gpu_forms`. The tool compiles for 8 H100s.
It needs JAX's plugin for CUDA, and no GPU.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.config import Settings
from vit_jax.config.text import load_config
from vit_jax.devices import kernels
from vit_jax.devices.chips import find_slice
from vit_jax.models.block_ops import BlockOps, repeat_plainly
from vit_jax.models.dot_product import dot_product_attention, plain_attention
from vit_jax.planning.compiled import compile_plan
from vit_jax.planning.targets import Target, settle, start_planning

H100 = Target(find_slice("H100:8"))


def pad_in_attention(ops: BlockOps) -> BlockOps:
    """`ops` that pad queries, keys and values of each layer, not the tokens of all layers."""
    kernel = ops.attention_kernel
    assert kernel is not None

    def pad(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), *[(0, 0)] * (x.ndim - 2)))

    def attend(qkv: Any, biases: Any, turns: Any, num_keys: Any, parts: Any = ()) -> jax.Array:
        tokens = qkv[0].shape[1]
        turns = None if turns is None else pad(turns)
        return kernel(tuple(map(pad, qkv)), biases, turns, num_keys or tokens, parts)[:, :tokens]

    return dataclasses.replace(ops, attention_kernel=attend, token_multiple=1)


def without_cudnn(attend: Callable) -> Callable[[BlockOps], BlockOps]:
    """A change to attention by `attend`, which XLA compiles."""
    return lambda ops: dataclasses.replace(
        ops, attend=attend, attention_kernel=None, token_multiple=1
    )


FORMS: dict[str, Callable[[BlockOps], BlockOps]] = {
    "chosen": lambda ops: ops,
    "tokens padded to a multiple of 8": lambda ops: dataclasses.replace(ops, token_multiple=8),
    "padded in attention": pad_in_attention,
    "attention by XLA, heads first": without_cudnn(dot_product_attention),
    "attention by XLA, plain": without_cudnn(plain_attention),
    "norms computed again": lambda ops: dataclasses.replace(ops, recompute_norms=True),
    "norms kept": lambda ops: dataclasses.replace(ops, recompute_norms=False),
    "XLA's order of tokens": lambda ops: dataclasses.replace(ops, repeat=repeat_plainly),
}


def main(recipe: str, *words: str) -> None:
    """Print the table."""
    start_planning(H100)
    config = load_config(recipe)
    keys = {key: json.loads(value) for key, value in (word.split("=") for word in words)}
    config.update_from_flattened_dict(keys | {"auto": False})
    settings, gpu_forms = settle(Settings.of(config), H100), kernels.gpu_forms
    print("| form | GiB of temporaries | ms by kernels | calls of cuDNN's attention |")
    print("|---|---|---|---|")
    for told, change in FORMS.items():

        def find(*args: Any, change: Callable = change) -> dict[str, BlockOps]:
            return {"cudnn": change(gpu_forms(*args)["cudnn"])}

        kernels.gpu_forms = find
        try:
            figures = compile_plan(settings, H100)
        except jax.errors.JaxRuntimeError as error:  # XLA without a device refuses some products
            print(f"| {told} | refused: {str(error)[:60]} | | |", flush=True)
            continue
        ms = 1e3 * sum(row["roofline_s"] for row in figures["kernels"])
        calls = sum(row["count"] for row in figures["kernels"] if "fmha" in row["name"])
        gib = figures["memory_bytes"]["temporaries"] / 2**30
        print(f"| {told} | {gib:.3f} | {ms:.2f} | {calls} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
