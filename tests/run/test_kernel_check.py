"""Kernels against the plain forms before the first step; CPUs get stand-ins for kernels."""

import logging
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import pytest
from at_fault import at_fault

from vit_jax.devices.mesh import make_mesh
from vit_jax.devices.sharding import constrain
from vit_jax.models import create_model
from vit_jax.models.block_ops import BlockOps, RowKernels
from vit_jax.models.dot_product import plain_attention
from vit_jax.models.fast_block import FastBlock
from vit_jax.objectives.contract import TokenPass
from vit_jax.objectives.mae import Mae, _Mae
from vit_jax.run.watch import kernel_check
from vit_jax.run.watch.kernel_check import check_kernels

SIZES = {"width": 16, "depth": 1, "mlp_dim": 16, "num_heads": 2, "patch_size": 8}


@pytest.fixture
def mesh():
    return make_mesh(replica=1, data=1, fsdp=1, tensor=1, devices=jax.devices()[:1])


@pytest.mark.parametrize("factor", [1.2, pytest.param(1.0, marks=pytest.mark.slow)])
def test_only_a_form_that_differs_stops_the_run(mesh, factor, caplog):
    """A form without a kernel in a kernel's place, since kernels compile for seconds."""
    caplog.set_level(logging.INFO, "vit_jax")

    def kernel(qkv, biases, turns, num_keys):
        q, k, v = (x + b.astype(x.dtype)[None, None] for x, b in zip(qkv, biases, strict=True))
        return plain_attention(q * q.dtype.type(factor), k[:, :num_keys], v[:, :num_keys])

    model = create_model("ViT-Ti/16", 5, 16, dtype="bfloat16", **SIZES).clone(constrain=constrain)
    model = model.clone(ops=BlockOps(attention_kernel=kernel, token_multiple=8))
    with nullcontext() if factor == 1 else at_fault("model.kernels") as error:
        check_kernels([TokenPass(model)], mesh)
    assert ("kernels agree" in caplog.text) == (factor == 1)
    assert factor == 1 or "--config.model.kernels=plain" in str(error.value)


@pytest.mark.parametrize(
    ("fields", "keeps"),
    [
        ({}, [True]),
        ({"remat": "full"}, [False]),
        ({"remat": "full", "remat_layers": 1}, [True, False]),
    ],
    ids=str,
)
def test_recomputed_layers_are_checked_in_their_own_form(fields, keeps, mesh, monkeypatch):
    checked = []
    monkeypatch.setattr(
        kernel_check, "compare_with_plain",
        lambda model, mesh, tokens: checked.append(model.ops.rows.keeps_hidden) or (0.0, None),
    )  # fmt: skip
    rows = RowKernels(FastBlock, lambda *_: None, lambda _: None)
    ops = BlockOps(attention_kernel=lambda *_: None, rows=rows)
    model = create_model("ViT-Ti/16", 5, 16, **SIZES | {"depth": 2}, **fields).clone(ops=ops)
    check_kernels([TokenPass(model), TokenPass(model)], mesh)
    assert checked == keeps


@pytest.mark.parametrize(("skipped", "decoder"), [(0, False), (1, True)])
def test_padding_of_pictures_is_checked(mesh, skipped, decoder):
    """A form without a kernel in its place, that may count one token too many."""

    def kernel(qkv, biases, turns, num_keys):
        qkv = (x + b.astype(x.dtype)[None, None] for x, b in zip(qkv, biases, strict=True))
        return plain_attention(*qkv, num_keys_B=num_keys + skipped)

    model = create_model("ViT-Ti/16", 5, 16, max_tokens=12, **SIZES).clone(constrain=constrain)
    if decoder:
        model = _Mae(model, Mae(decoder_width=32, decoder_depth=1, decoder_heads=2)).decoder
    model = model.clone(ops=BlockOps(attention_kernel=kernel, token_multiple=8))
    with at_fault("model.kernels") if skipped else nullcontext():
        check_kernels([TokenPass(model)], mesh)


@pytest.mark.slow
def test_the_kernel_of_an_mlp_is_checked(mesh):
    """A plain form in its place, since kernels compile for seconds."""

    def kernel(x, params, drawn, **fields):
        _, _, up, up_bias, down, _ = params
        hidden = jax.nn.gelu(jnp.tanh(x) @ up + up_bias.astype(x.dtype)[None])
        return x + hidden @ down

    model = create_model("ViT-Ti/16", 5, 16, dtype="bfloat16", **SIZES).clone(constrain=constrain)
    ops = BlockOps(
        attention_kernel=lambda qkv, *_: qkv[2],
        rows=RowKernels(FastBlock, lambda *_: kernel, lambda _: None),
        token_multiple=8,
    )
    with at_fault("model.kernels"):
        check_kernels([TokenPass(model.clone(ops=ops))], mesh)


def test_a_model_without_kernels_is_not_checked(mesh, caplog):
    with caplog.at_level(logging.INFO, "vit_jax"):
        check_kernels([TokenPass(create_model("ViT-Ti/16", 5, 16, **SIZES))], mesh)
    assert not caplog.messages


def test_each_number_of_tokens_is_checked_once(mesh, monkeypatch):
    """Hidden patches, patches left out in training only, and crops of another size."""
    compared = []
    monkeypatch.setattr(
        kernel_check, "compare_with_plain",
        lambda model, mesh, tokens: compared.append(tokens) or (0.0, None),
    )  # fmt: skip
    plain = create_model("ViT-Ti/16", 5, 32, **SIZES)
    model = plain.clone(ops=BlockOps(attention_kernel=lambda *_: None, token_multiple=8))
    kept = model.clone(keep_tokens=0.5)
    check_kernels(
        [TokenPass(model, 5), TokenPass(model.clone(image_size=(8, 16)), images=8),
         TokenPass(kept), TokenPass(model), TokenPass(model, learns=False), TokenPass(plain)], mesh
    )  # fmt: skip
    assert compared == [5, 3, 9, 17]
