import pytest
from formulas import SIZES, vit_params

from vit_jax.models import create_model
from vit_jax.models.variants import VIT_VARIANTS, parse_vit_name
from vit_jax.transfer.shapes import abstract_params


def count_params(model):
    return sum(leaf.size for leaf in abstract_params(model).values())


def test_no_variant_is_missing():
    assert {name: tuple(variant) for name, variant in VIT_VARIANTS.items()} == SIZES


@pytest.mark.parametrize(
    ("variant", "pool"),
    [
        *((variant, "token") for variant in SIZES),
        ("Ti", "gap"),
        ("L", "map"),
    ],
)
def test_parameter_counts_by_formula(variant, pool):
    hidden_head = pool == "gap"
    model = create_model(
        f"ViT-{variant}/14", 21, 224, pool=pool, hidden_head=hidden_head, scan=True
    )
    assert count_params(model) == vit_params(
        variant, (14, 14), grid=(16, 16), num_classes=21, pool=pool, hidden_head=hidden_head
    )
    assert model.num_heads == SIZES[variant][3]


@pytest.mark.parametrize(
    ("name", "image_size", "patch_size", "grid"),
    [
        ("ViT-mu/1", (3, 5), (1, 1), (3, 5)),
        ("ViT-mu/7", (21, 28), (7, 7), (3, 4)),
        ("ViT-mu/100", 200, (100, 100), (2, 2)),
    ],
)
def test_any_patch_size_and_image_size(name, image_size, patch_size, grid):
    model = create_model(name, None, image_size)
    assert model.grid == grid
    assert count_params(model) == vit_params("mu", patch_size, grid=grid, num_classes=None)


def test_fields_replace_the_variants_own():
    model = create_model("ViT-B/16", 10, (8, 12), patch_size=(4, 3), width=24, depth=2, num_heads=4)
    assert (model.patch_size, model.grid) == ((4, 3), (2, 4))
    assert (model.width, model.depth, model.mlp_dim, model.num_heads) == (24, 2, 3072, 4)


def test_parse_name():
    names = ("width", "depth", "mlp_dim", "num_heads")
    assert parse_vit_name("ViT-So400m/14") == (dict(zip(names, SIZES["So400m"], strict=True)), 14)


def test_22b_has_a_block_of_its_own():
    model = create_model("ViT-22B/14")
    assert (model.parallel, model.norm, model.qk_norm, model.qkv_bias) == (True, "rms", True, False)
    assert model.pool == "map"
    params = abstract_params(model.clone(scan=True))
    encoder = sum(leaf.size for name, leaf in params.items() if name.startswith("encoder/"))
    assert round(encoder / 1e6) == 21_745  # of these 21 743 M in matrices, as published
