import pytest

from vit_jax.errors import InputError
from vit_jax.models import create_model
from vit_jax.models.variants import VIT_VARIANTS, parse_vit_name
from vit_jax.transfer.rules import abstract_params

# At 224 px, 1000 classes, class token, no hidden layer in the head: as published.
PUBLISHED = {
    "ViT-Ti/16": 5_717_416,
    "ViT-S/16": 22_050_664,
    "ViT-B/16": 86_567_656,
    "ViT-B/32": 88_224_232,
    "ViT-L/16": 304_326_632,
    "ViT-L/32": 306_535_400,
    "ViT-H/14": 632_045_800,
    "ViT-g/14": 1_012_611_432,
    "ViT-G/14": 1_844_440_680,
    "ViT-e/14": 3_807_214_312,
}


# From the papers' tables, apart from the package's own: width, layers, MLP, heads.
SIZES = {
    "mu": (32, 1, 128, 2),
    "Ti": (192, 12, 768, 3),
    "S": (384, 12, 1536, 6),
    "M": (512, 12, 2048, 8),
    "B": (768, 12, 3072, 12),
    "L": (1024, 24, 4096, 16),
    "So400m": (1152, 27, 4304, 16),
    "H": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
    "e": (1792, 56, 15360, 16),
    "22B": (6144, 48, 24576, 48),
}


def count_params(model):
    return sum(leaf.size for leaf in abstract_params(model).values())


def expected_params(variant, patch_size, *, grid, num_classes, pool="token", hidden_head=False):
    width, depth, mlp_dim, num_heads = SIZES[variant]
    norm, attention = 2 * width, 4 * (width * width + width)
    mlp = width * mlp_dim + mlp_dim + mlp_dim * width + width
    block = 2 * norm + attention + mlp
    if variant == "22B":  # norms without bias, one a block; q, k without bias, normalised; v too
        norm, attention = width, attention - 3 * width
        block = norm + attention + mlp + 2 * (width // num_heads)
    token = int(pool == "token")
    total = (patch_size[0] * patch_size[1] * 3 + 1) * width  # embedding
    total += token * width + (token + grid[0] * grid[1]) * width
    total += depth * block + norm
    if pool == "map":
        total += width + attention + norm + mlp
    if hidden_head:
        total += width * width + width
    if num_classes:
        total += width * num_classes + num_classes
    return total


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    # Scanned: traced in no time; test_scan.py shows that the parameters are the same.
    assert count_params(create_model(name, scan=True)) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["ViT-Ti/16", "ViT-L/32"])
def test_published_parameter_counts_unrolled(name):
    assert count_params(create_model(name)) == PUBLISHED[name]


def test_no_variant_is_missing():
    assert {name: tuple(variant) for name, variant in VIT_VARIANTS.items()} == SIZES


@pytest.mark.parametrize("variant", SIZES)
@pytest.mark.parametrize("pool", ["token", "gap", "map"])
def test_parameter_counts_by_formula(variant, pool):
    hidden_head = pool == "gap"
    model = create_model(
        f"ViT-{variant}/14", 21, 224, pool=pool, hidden_head=hidden_head, scan=True
    )
    assert count_params(model) == expected_params(
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
    assert count_params(model) == expected_params("mu", patch_size, grid=grid, num_classes=None)


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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ViT-x9/16", ["ViT-x9/16", "known: mu, Ti, S"]),
        ("ViT-So400/14", ["no variant 'So400'", "did you mean So400m?"]),
        ("ViT-B", ["ViT-B", "ViT-VARIANT/PATCH"]),
        ("ViT-B/0", ["ViT-VARIANT/PATCH"]),
        ("ViT-B/16x", ["ViT-VARIANT/PATCH"]),
        ("Vit-B/16", ["Vit-B/16", "no such model", "did you mean ViT-B/16?"]),
        ("", ["no such model"]),
    ],
)
def test_unknown_names(name, said):
    with pytest.raises(InputError) as error:
        create_model(name)
    for part in said:
        assert part in str(error.value)
