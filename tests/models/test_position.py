"""Position embeddings: each kind, at each place, against plain NumPy."""

import functools
import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import numpy_vit
import pytest
from at_fault import at_fault
from numpy_vit import random_params

from vit_jax.base.errors import InputError
from vit_jax.config import POSITIONS
from vit_jax.models import create_model, position
from vit_jax.models.layers import Encoder, EncoderBlock
from vit_jax.models.position import PositionEmbedding, Relative, RelativePositions, sincos_2d
from vit_jax.models.rotary import RotaryFields
from vit_jax.transfer.fit import stack_layers
from vit_jax.transfer.shapes import abstract_params

RNG = np.random.default_rng(0)
IMAGES = RNG.uniform(-1, 1, (2, 4, 6, 3)).astype(np.float32)  # 2 x 3 patches
# (pos_embed, pos_embed_at): all that go together.
KINDS = [
    ("none", None),
    *(
        (kind, place)
        for kind in ("learned_1d", "learned_2d", "relative", "sincos_2d")
        for place in ("stem", "layers", "layers_shared")
        if (kind, place) != ("relative", "stem")
    ),
]


def make(family="ViT", **fields):
    sizes = {"width": 16, "depth": 2, "mlp_dim": 8, "num_heads": 2}
    return create_model(f"{family}-mu/2", 3, (4, 6), **(sizes | fields))


@pytest.mark.parametrize(("grid", "width"), [((2, 3), 8), ((4, 1), 16), ((5, 5), 64)])
def test_sincos_is_sin_x_cos_x_sin_y_cos_y(grid, width):
    ours = sincos_2d(grid, width)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, numpy_vit.sincos(grid, width), atol=1e-6)


MORE = [
    ("learned_1d", "layers", {"pos_embed_class_token": False}),
    ("relative", "layers", {"pos_embed_class_token": False, "qk_norm": True, "qkv_bias": False}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("learned_2d", "stem", {"family": "DeiT"}),
            ("relative", "layers_shared", {"family": "DeiT"}),
            ("relative", None, {"pool": "gap", "parallel": True}),
        )
    ),
]


@pytest.mark.parametrize(
    ("kind", "place", "fields"), [*((kind, place, {}) for kind, place in KINDS), *MORE]
)
def test_every_kind_at_every_place_follows_the_equations(kind, place, fields):
    model = make(pos_embed=kind, pos_embed_at=place, scan=True, **fields)
    params = random_params(model.clone(scan=False), IMAGES)
    expected = [numpy_vit.vit(model, params, image)["tokens"] for image in IMAGES]
    apply = jax.jit(functools.partial(model.apply, method="tokens"))
    found = apply({"params": stack_layers(params)}, IMAGES)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def random_tables(positions):
    tables = jax.eval_shape(positions.init, jax.random.key(0))
    return {name: RNG.standard_normal(t.shape).astype(np.float32) for name, t in tables.items()}


@pytest.mark.parametrize(
    ("grid", "num_prefix"),
    [((2, 3), 0), ((3, 3), 2), ((1, 5), 1), ((5, 1), 1), ((1, 1), 1)],
)
def test_relative_logits_are_those_of_a_vector_for_each_pair(grid, num_prefix):
    num_patches, k = grid[0] * grid[1], 4
    n = num_patches + num_prefix
    positions = RelativePositions(grid, num_prefix, num_prefix, k)
    tables = random_tables(positions)
    q = RNG.standard_normal((2, 3, n, k)).astype(np.float32)
    vectors = numpy_vit.relative_vectors(tables, n, num_patches)
    expected = np.einsum("bhnk,nmk->bhnm", q, vectors)
    found = jax.jit(lambda tables, q: positions.build(tables).logits(q))(tables, q)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_tokens_before_the_patches_without_positions_have_no_logits():
    positions = RelativePositions((2, 3), 2, 0, 4)
    relative = positions.build(random_tables(positions))
    q = RNG.standard_normal((1, 2, 8, 4)).astype(np.float32)
    logits = np.asarray(relative.logits(q))
    assert (logits[:, :, :2] == 0).all()
    assert (logits[..., :2] == 0).all()
    np.testing.assert_array_equal(logits[:, :, 2:, 2:], relative.logits(q[:, :, 2:]))


# Parameters of the positions of 3 x 5 patches, width 8, 2 heads, 3 layers, with a class token; by
# hand: (1 + 15) 8; (3 + 5) 4 + 8; (29 + 2 * 15 + 1) 4.
@pytest.mark.parametrize(
    ("kind", "place", "count"),
    [
        ("none", None, 0),
        ("sincos_2d", "layers", 0),
        ("learned_1d", "stem", 128),
        ("learned_1d", "layers", 384),
        ("learned_1d", "layers_shared", 128),
        ("learned_2d", "stem", 40),
        ("learned_2d", "layers", 120),
        ("relative", None, 720),
        ("relative", "layers_shared", 240),
    ],
)
def test_parameters_of_positions(kind, place, count):
    sizes = {"width": 8, "depth": 3, "mlp_dim": 4, "num_heads": 2}
    model = create_model("ViT-mu/2", 3, (6, 10), pos_embed=kind, pos_embed_at=place, **sizes)
    params = abstract_params(model)
    assert sum(leaf.size for name, leaf in params.items() if "pos_embedding" in name) == count
    assert all(leaf.dtype == np.float32 for leaf in params.values())


@pytest.mark.parametrize(
    ("kind", "place"),
    [pytest.param("learned_2d", "layers", marks=pytest.mark.slow), ("relative", None)],
)
def test_positions_in_bfloat16_are_near(kind, place):
    model = make(pos_embed=kind, pos_embed_at=place)
    params = random_params(model, IMAGES, scale=0.1)
    half = model.clone(dtype=jnp.bfloat16)
    expected, found = (
        np.asarray(jax.jit(functools.partial(m.apply, method="tokens"))({"params": params}, IMAGES))
        for m in (model, half)
    )
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(np.float32), expected, atol=0.1)


@pytest.mark.parametrize("kind", ["learned_1d", "learned_2d", "relative"])
def test_tables_start_normal_and_apart(kind):
    positions = POSITIONS.find(kind)((12, 12), 1, 1, 64)
    leaves = [np.asarray(x).ravel() for x in jax.tree.leaves(positions.init(jax.random.key(0)))]
    values = np.concatenate(leaves)
    assert values.std() == pytest.approx(0.02, rel=0.05)
    assert len(np.unique(values)) > 0.99 * len(values)


@pytest.fixture
def full_compilation():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.slow
@pytest.mark.usefixtures("full_compilation")
def test_relative_positions_take_no_memory_for_pairs_of_tokens():
    tokens, width, heads = 1025, 128, 2
    relative = RelativePositions((32, 32), 1, 1, width // heads)

    def temporaries(positions):
        block = EncoderBlock(num_heads=heads, mlp_dim=4 * width, positions=positions)
        x = jax.ShapeDtypeStruct((1, tokens, width), jnp.float32)
        params = jax.eval_shape(lambda x: block.init(jax.random.key(0), x, 0.0, False), x)

        def loss(params, x):
            return block.apply(params, x, 0.0, False)[0].sum()

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(params, x).compile()
        return step.memory_analysis().temp_size_in_bytes

    without, found = temporaries(None), temporaries(relative)
    assert found < 2.5 * without
    assert found < tokens**2 * width * 4 / 10


def test_remat_keeps_no_logits_of_relative_positions():
    """A product without an axis of images would be kept by "dots"."""
    tokens, width = 65, 16
    relative = RelativePositions((8, 8), 1, 1, width // 2)
    encoder = Encoder(depth=2, num_heads=2, mlp_dim=32, positions=relative, scan=True, remat="dots")
    x = jax.ShapeDtypeStruct((3, tokens, width), jnp.float32)
    params = jax.eval_shape(encoder.init, jax.random.key(0), x)

    def residuals(params, x):
        return jax.vjp(encoder.apply, params, x)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, params, x))
    assert max(leaf.size for leaf in kept) == 2 * 3 * tokens * 32


@pytest.mark.parametrize("place", ["stem", "layers"])
def test_fixed_positions_take_images_of_any_size(place):
    model = make(pos_embed="sincos_2d", pos_embed_at=place)
    params = random_params(model, IMAGES)
    images = RNG.uniform(-1, 1, (1, 6, 8, 3)).astype(np.float32)
    expected = numpy_vit.vit(model, params, images[0])["__call__"]
    found = jax.jit(model.clone(image_size=None).apply)({"params": params}, images)[0]
    np.testing.assert_allclose(found, expected, atol=2e-5)


class Turned(PositionEmbedding):
    """Rotary positions by indices, as a plug-in would have them."""

    collection, acts_on = "", "turns"

    def build(self, tables=None):
        fields = RotaryFields(rotary="indices")
        return fields.turns(self.grid, self.num_prefix, 0, self.width // self.num_heads)


@flax.struct.dataclass
class Constant:
    """The same logit for the first token of all queries, in place of vectors of offsets."""

    value: jax.Array

    def logits(self, q_BHNK):
        B, H, N, _ = q_BHNK.shape
        return jnp.zeros((B, H, N, N), q_BHNK.dtype).at[..., 0].set(self.value)


class Shut(PositionEmbedding):
    """Nobody attends to the first token."""

    acts_on = "logits"

    def init(self, key):
        return jnp.full((), -1e9)

    def build(self, tables=None):
        return Constant(tables)


class ShutForGood(Shut):
    """The same without a table."""

    collection = ""

    def build(self, tables=None):
        return Constant(-1e9)


def built_as(acts_on, gives):
    class Mine(PositionEmbedding):
        collection = ""

        def build(self, tables=None):
            return gives

    Mine.acts_on = acts_on
    return Mine


@pytest.mark.parametrize(
    ("acts_on", "gives", "got"),
    [
        ("tokens", jnp.zeros((1, 1, 16)), "(1, 1, 16); needs (1, 7, 16)"),  # would broadcast
        ("tokens", jnp.zeros((1, 7, 1)), "(1, 7, 1); needs (1, 7, 16)"),
        ("tokens", None, "None; needs (1, 7, 16)"),
        ("turns", jnp.zeros((1, 1, 8)), "(1, 1, 8); needs (1, 7, 8)"),
        ("logits", jnp.zeros((1, 7, 16)), "(1, 7, 16); needs (2, 2, 7, 7) as logits of 2 images"),
        ("nothing", jnp.zeros((1, 7, 16)), "(1, 7, 16); needs None"),
    ],
)
def test_build_of_another_shape_is_refused(acts_on, gives, got, monkeypatch):
    monkeypatch.setitem(POSITIONS, "mine", built_as(acts_on, gives))
    with pytest.raises(
        InputError, match=re.escape(f"Mine.build, which acts on {acts_on}, gave {got}")
    ):
        jax.eval_shape(make(pos_embed="mine").init, jax.random.key(0), IMAGES)


def test_the_shape_of_logits_is_traced_once(monkeypatch):
    traced, logits = [], Relative.logits
    monkeypatch.setattr(Relative, "logits", lambda *args: traced.append(1) or logits(*args))
    position._trace_logits.cache_clear()
    model = make(pos_embed="relative")
    jax.eval_shape(model.init, jax.random.key(0), IMAGES)
    assert len(traced) == model.depth + 1


@pytest.fixture
def more_positions(monkeypatch):
    parts = {"my_turned": Turned, "my_shut": Shut, "my_fixed": ShutForGood}
    for name, part in parts.items():
        monkeypatch.setitem(POSITIONS, name, part)


@pytest.mark.slow
@pytest.mark.usefixtures("more_positions")
def test_own_positions_turn_or_add_to_logits():
    def tokens(**fields):
        model = make(**fields)
        apply = jax.jit(functools.partial(model.apply, method="tokens"))
        return np.asarray(apply({"params": random_params(model, IMAGES)}, IMAGES))

    turned, rotary = tokens(pos_embed="my_turned"), tokens(pos_embed="none", rotary="indices")
    np.testing.assert_array_equal(turned, rotary)
    for kind, place in (("my_shut", "layers"), ("my_shut", "layers_shared"), ("my_fixed", None)):
        model = make(pos_embed=kind, pos_embed_at=place)
        variables = jax.jit(model.init)(jax.random.key(0), IMAGES)
        apply = jax.jit(functools.partial(model.apply, method="tokens"))
        before = apply(variables, IMAGES)
        variables["params"]["class_token"] = jnp.arange(16.0)[None, None]
        np.testing.assert_allclose(apply(variables, IMAGES)[:, 1:], before[:, 1:], atol=1e-6)
        assert model.why_no_positions and model.attention_shape.relative
    with at_fault("pos_embed_at"):
        make(pos_embed="my_shut", pos_embed_at="stem")
    with at_fault("rotary"):
        make(pos_embed="my_turned", rotary="indices")
    with at_fault("pos_embed"):
        make("Axial-ViT", pos_embed="my_turned")
    with at_fault("pos_embed"):
        model.positions((4, 6)).resampled(jnp.zeros(()), (3, 3), None)
