"""What a model says of itself, and that nobody else asks which family it is."""

import ast
import pathlib

import flax.linen as nn
import jax.numpy as jnp
import pytest
from test_families import shrunk

import vit_jax
from vit_jax.config import FAMILIES
from vit_jax.models import create_model
from vit_jax.models.contract import Model, about, with_known
from vit_jax.models.vit import ViT
from vit_jax.transfer.shapes import abstract_params

PACKAGE = pathlib.Path(vit_jax.__file__).parent
OURS = [FAMILIES.find(start) for start in FAMILIES]
CLASSES, FILES = {f.__name__ for f in OURS}, {f.__module__ for f in OURS}
# What other rooms may take from the file of a family; the rest of it is its own.
SHARED = {"find_variant"}


class Plain(nn.Module):
    """A user's own model, with a field that has the name of an answer, and no default."""

    num_classes: int | None
    image_size: tuple[int, int]
    grid: int

    remat_layers = 3

    @nn.compact
    def __call__(self, images, train=False):
        return nn.Dense(self.num_classes)(images.mean(axis=(1, 2)))


def files():
    """The files that may not know a family: all but those of models/ and transfer/."""
    root = PACKAGE.parent
    paths = [*PACKAGE.rglob("*.py"), *(root / "launch").glob("*.py"), *root.glob("configs/*.py")]
    return [p for p in paths if p.relative_to(root).parts[1] not in ("models", "transfer")]


def test_nobody_asks_which_family_a_model_is():
    asked = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            names = {getattr(node, "id", None), getattr(node, "attr", None)} & CLASSES
            if isinstance(node, ast.ImportFrom) and node.module in FILES:
                names = {alias.name for alias in node.names} - SHARED
            asked += [f"{path}:{node.lineno}: {name}" for name in names]
    assert not asked


def test_a_plain_module_gets_the_answers_of_a_model_and_keeps_its_own():
    model = Plain(10, (8, 8), grid=7)
    said = about(model)
    assert isinstance(said, Model) and isinstance(said, Plain) and type(said).__name__ == "Plain"
    assert (said.grid, said.remat_layers, said.image_size) == (7, 3, (8, 8))
    assert (said.dtype, said.remat, said.scan, said.channels) == ("float32", "none", False, 3)
    assert not said.stacks_layers and not said.draws_rows_apart and not said.embeds_patches
    assert said.split_layers() is said.flops_by_sizes is said.block_bytes is None
    for why in (said.attention_shape, said.why_no_weights, said.why_no_positions, said.filters({})):
        assert "Plain" in why


@pytest.mark.parametrize("name", [family.names[0] for family in OURS])
def test_families_answer_for_themselves(name):
    model = shrunk(name)
    assert about(model) is model
    assert model.draws_rows_apart != model.has_batch_statistics
    assert len(model.split_layers()) > 0
    scanned = with_known(model, scan=True, no_such_field=1)
    is_stacked = any("/layers/" in leaf for leaf in abstract_params(scanned))
    assert scanned.stacks_layers == is_stacked
    assert model.dtypes_in_use("head/kernel") == (jnp.float32, jnp.float32)
    assert all(side > 0 for side in model.grid)


def test_of_a_users_subclass_it_is_not_known_whether_rows_are_apart():
    class Own(ViT):
        pass

    model = create_model("ViT-mu/4", 10, 8)
    own = Own(10, (8, 8), (4, 4), 32, 1, num_heads=2, mlp_dim=128)
    assert model.draws_rows_apart and not own.draws_rows_apart
