"""The questions that the rest of the package may ask a model.

Every family is a `Model` and answers for itself. `about` asks any Linen module: one that is no
`Model`, such as a plug-in's, gives the answers of this class, or its own where it has an attribute
of that name. No code outside this folder asks which family a model is; only the tables of names in
`transfer/` know families.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import collect_faults
from vit_jax.config.parts import find_wrong, keys_of_fields
from vit_jax.models.fields import WITHOUT, field_names
from vit_jax.models.patches import draw_among, draw_patches

CONSTANTS = "constants"  # the collection of variables that are neither trained nor updated

_IN_LAYERS = re.compile(r"(?:.*/)?layer(?:s|_(\d+))/")
_HEAD = re.compile(r"(?:head|head_distillation)/")


class AttentionShape(NamedTuple):
    """The sizes of a model's attention between all tokens of an image.

    width: of a head.
    num_tokens: of an image in training; None: the model takes images of any size.
    dropout: the rate at which training drops attention weights.
    relative: whether relative positions add to the logits.
    """

    num_heads: int
    width: int
    num_tokens: int | None
    dropout: float
    relative: bool


class SplitLayer(NamedTuple):
    """A layer whose heads, hidden units or channels are split: what devices exchange for one image.

    part: the layer's number in `tree.parts`; None: it belongs to an objective.
    recomputed: whether the backward pass computes it again.
    reduced, gathered: numbers of values of each array that the forward pass sums, or gathers.
    reduced_back: the same for each array that the backward pass sums.
    """

    part: int | None
    recomputed: bool
    reduced: tuple[int, ...]
    reduced_back: tuple[int, ...]
    gathered: tuple[int, ...] = ()


class Model(nn.Module):
    """The answers of a model that says nothing else; `about` gives them for any Linen module."""

    # The behaviour of a model without fields of these names.
    dtype = WITHOUT["dtype"]
    remat = WITHOUT["remat"]
    remat_layers = WITHOUT["remat_layers"]
    scan = WITHOUT["scan"]
    channels = WITHOUT["channels"]
    keep_tokens = WITHOUT["keep_tokens"]
    max_tokens = WITHOUT["max_tokens"]
    pack = WITHOUT["pack"]

    # (regular expression for the end of a parameter's name, mesh axis of each of its last axes) for
    # names that no other family has; see `devices.sharding.RULES`.
    split_params: ClassVar[tuple[tuple[str, tuple[str | None, ...]], ...]] = ()

    names: ClassVar[tuple[str, ...]] = ()  # of the papers' models; `parse` may take others

    @staticmethod
    def parse(name: str) -> dict[str, Any]:
        """The fields of the model called `name`; raises InputError if there is none."""
        raise NotImplementedError

    @classmethod
    def tiny_fields(cls, name: str) -> dict[str, Any]:
        """{key of `config.model`: value} of a tiny model with the token stride of `name`."""
        return {"name": name}

    @property
    def possible_names(self) -> Sequence[str]:
        """The names that a model with these fields may have."""
        return self.names

    @nn.nowrap
    def find_faults(self) -> list[str]:
        """The faults of its fields: each one's, and those that contradict each other."""
        keys = keys_of_fields(type(self))  # type: ignore[arg-type] # mypy wants a hash of types
        return find_wrong(keys, {name: getattr(self, name) for name in keys})

    def __post_init__(self) -> None:
        collect_faults(self.find_faults())
        super().__post_init__()

    @property
    def stacks_layers(self) -> bool:
        """Whether the parameters of scanned layers are stacked, along a new first axis.

        False for a class whose `scan` keeps the parameters of each layer apart.
        """
        return self.scan

    @property
    def has_batch_statistics(self) -> bool:
        """Whether training computes statistics of a batch, so that its rows depend on each other.

        Such a model takes `mask` in training; see `objectives.forward`.
        """
        return False

    @property
    def num_prefix_tokens(self) -> int:
        """The number of tokens before the image's own."""
        return 0

    @nn.nowrap
    def grid_of(self, image_size: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of the tokens of an image of that size."""
        stride = self.token_stride
        return -(-image_size[0] // stride[0]), -(-image_size[1] // stride[1])

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the tokens; the model must have an image size."""
        assert self.image_size is not None
        return self.grid_of(self.image_size)

    @property
    def embeds_patches(self) -> bool:
        """Whether each token is embedded from one patch of the image, and no other pixels."""
        return False

    @property
    def takes_other_sizes(self) -> bool:
        """Whether its parameters fit images of other sizes once `pos_embedding` is resampled."""
        return False

    def draw_keep(
        self, rows: int, patches: int, *, counts_B: jax.Array | None = None, train: bool
    ) -> jax.Array | None:
        """The patches of each image that a pass keeps, by `keep_tokens`; None: all.

        Objectives that call "encode" of a ViT give it as `keep`. With `counts_B` it keeps some of
        the first patches of each image, see `patches.draw_among`.
        """
        if not train or self.keep_tokens == 1:
            return None
        key, share = self.make_rng("dropout"), self.keep_tokens
        if counts_B is not None:
            return draw_among(key, counts_B, patches, share)
        return draw_patches(key, rows, patches, share)

    @property
    def draws_rows_apart(self) -> bool:
        """Whether a row of a batch, its random draws included, depends on no other row.

        A class outside this package may couple rows: nothing is known of it.
        """
        is_ours = type(self).__module__.startswith("vit_jax.")
        return is_ours and not self.has_batch_statistics

    @property
    def is_random(self) -> bool:
        """Whether training draws random values."""
        rates = ("dropout", "attention_dropout", "stochastic_depth")
        return any(getattr(self, rate, 0.0) for rate in rates) or self.keep_tokens < 1

    @property
    def attention_shape(self) -> AttentionShape | str:
        """The sizes of its attention between all tokens; or why kernels cannot compute it."""
        return f"{type(self).__name__} may call it with arguments that no kernel supports"

    @property
    def why_no_weights(self) -> str | None:
        """Why it has no attention weights between all tokens; None: it has, by its `ops`."""
        has_ops = "ops" in field_names(type(self))
        return None if has_ops else f"a {type(self).__name__} has no attention"

    @property
    def why_no_positions(self) -> str | None:
        """Why it has no position embedding of single patches; None: it has."""
        return f"a {type(self).__name__} has no position embedding"

    @property
    def num_pooled_tokens(self) -> int:
        """The number of first tokens whose mean the head classifies; 0: it pools the others."""
        return 0

    @nn.nowrap
    def filters(self, params: Mapping[str, Any]) -> jax.Array | str:
        """The filters that see the pixels, (height, width, channels, filters), as applied.

        A text says why there are none. `params`: {name: leaf}.
        """
        return f"the first layer of a {type(self).__name__} is not known"

    @property
    def block_bytes(self) -> int | None:
        """The float32 bytes of a block's largest activations for one image; None: not known."""
        return None

    @property
    def num_tokens_in_training(self) -> int | None:
        """The tokens of an image in the blocks while training; None: not known."""
        return None

    @property
    def flops_by_sizes(self) -> int | None:
        """FLOPs of forward and backward pass of one image, by a formula; None: there is none."""
        return None

    @nn.nowrap
    def dtypes_in_use(self, name: str) -> tuple[Any, Any]:
        """The dtypes of the parameter `name` at its first use, and of its gradient there.

        Both are the model's, but heads compute in float32, and a ResNet's kernels are standardised
        in float32.
        """
        if _HEAD.match(name):
            return jnp.float32, jnp.float32
        return self.dtype, self.dtype

    @nn.nowrap
    def reads_again(self, name: str) -> bool:
        """Whether the backward pass reads the parameter `name` for a layer that it recomputes.

        A loop over layers reads its stacked parameters again too.
        """
        layer = _IN_LAYERS.match(name)
        if layer is None or layer[1] is None:
            return layer is not None
        last = self.remat_layers
        return self.remat != "none" and (last is None or int(layer[1]) < last)

    @nn.nowrap
    def split_layers(self, tokens: int | None = None) -> list[SplitLayer] | None:
        """Its layers in order, with what devices that split them exchange; None: not known.

        `tokens`: of an image, with its prefix tokens; None: of an image of the model's size.
        """
        del tokens
        return None


@functools.cache
def as_family(module: Any) -> type[Model]:
    """`module`, with the answers of `Model` to what it does not say itself."""
    if issubclass(module, Model):
        return module
    own: dict[str, Any] = {"__module__": module.__module__, "__doc__": module.__doc__}
    # Fields without a default would be hidden by the properties.
    own |= {name: getattr(module, name, None) for name in field_names(module)}
    own["find_faults"] = nn.nowrap(lambda self: [])  # of its fields nothing is known
    return type(module.__name__, (module, Model), own)


def about(model: nn.Module) -> Model:
    """`model`, which a Linen module of any class becomes with the answers of `Model`."""
    if isinstance(model, Model):
        return model
    module = type(model)
    fields = {name: getattr(model, name) for name in field_names(module)}
    return as_family(module)(**fields)  # type: ignore[arg-type] # mypy wants a hash of instances


def with_known(model: nn.Module, **fields: Any) -> nn.Module:
    """A copy of `model` with those `fields` that its family has; the others are ignored."""
    known = field_names(type(model))
    return model.clone(**{name: value for name, value in fields.items() if name in known})


def for_one_size(model: nn.Module) -> nn.Module:
    """`model` for images of one size, not for pictures in their own shape."""
    return with_known(model, max_tokens=None, pack=None)
