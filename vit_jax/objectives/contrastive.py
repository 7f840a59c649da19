"""Contrastive pretraining: in a batch, images and their captions have to find each other.

Two towers give images and texts features of a common width, and the loss compares all images of the
global batch with all texts; see `pairs` for its value, and for how a batch is taken over the mesh.
Rows without a usable image or caption are in no pair.

Sources: Zhai et al. 2023 (arXiv:2303.15343) for the sigmoid; Radford et al. 2021
(arXiv:2103.00020), section 2, for the softmax, whose scale is at most 100.

Axes: B rows, T positions of a text, D width of the image tower's features.
"""

from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.base.tree import OBJECTIVE, Batch, ModelState, Params
from vit_jax.config import POSITIVE, key
from vit_jax.config.settings import Settings
from vit_jax.data.tokenizers import TextFacts
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.contract import Model
from vit_jax.models.text import Matcher, TextTower, unit
from vit_jax.models.zero_shot import TOWERS
from vit_jax.objectives.contract import (
    InForm,
    LossFn,
    Objective,
    ObjectiveOutput,
    ObjectivePart,
    RunFacts,
    State,
    TokenPass,
    as_it_is,
    sum_rows,
)
from vit_jax.objectives.forward import apply_in_training
from vit_jax.objectives.pairs import LOSSES, Features, PairLoss, Rows, bytes_passed_on, keys_of

_MAX_SCALE = 100.0  # of the softmax


class Contrastive(ObjectivePart):
    """Matches each image with its caption among the batch's; for zero-shot classification.

    Its own parameters are a text tower, the scale and the bias of the logits and, with
    `common_width`, a projection of the images' features.
    """

    loss: str = key("sigmoid", "of pairs: sigmoid, as SigLIP, or softmax, as CLIP", choices=LOSSES)
    duplicates: str = key(
        "negative",
        "pairs of different rows with equal captions: negatives, or left out",
        choices=("negative", "ignored"),
    )
    text_width: int | None = key(None, "of the text tower; None: as the model's", within=POSITIVE)
    text_depth: int | None = key(
        None, "number of its layers; None: as the model's", within=POSITIVE
    )
    text_heads: int | None = key(None, "of its attention; None: as the model's", within=POSITIVE)
    text_mlp_dim: int | None = key(None, "width of its MLPs; None: as the model's", within=POSITIVE)
    text_lora_rank: int | None = key(
        None, "rank of the LoRA adapters on its query and value; None: none", within=POSITIVE
    )
    causal: bool = key(
        False, "a causal mask, and the end token is pooled; False: the last position"
    )
    common_width: int | None = key(
        None, "images are projected to that many features; None: they keep the model's",
        within=POSITIVE,
    )  # fmt: skip

    takes_pictures = True
    takes_patch_sizes = True
    takes_features = True

    @property
    def learns_texts(self) -> bool:
        return True

    split_params = (
        # Each device looks up its part of the width: tokens are exchanged, and no whole gradient.
        (r"token_embedding/embedding", (None, "fsdp")),
        (r"image_head/kernel", ("fsdp", None)),
    )

    def conflicts(self, settings: Settings) -> list[str]:
        if settings.data.text_length is not None:
            return []
        return [
            f"data.text_length=None: objective.name={self.name!r} reads captions; set it to a "
            "number of tokens, such as --config.data.text_length=64"
        ]

    def make_matcher(
        self, model: nn.Module, text: TextFacts, in_form: InForm = as_it_is
    ) -> Matcher:
        model = check_tower(model, "contrastive")
        width, heads = self.text_width or model.width, self.text_heads or model.num_heads
        of_keys = f"objective.text_width={width}, objective.text_heads={heads}"
        faults = Faults()
        faults.need(width % heads == 0, f"{of_keys}: the heads must divide the width")
        faults.need(
            text.end_id is not None or not self.causal,
            "objective.causal=True: takes the end token, and the tokenizer adds none to a text; "
            "set it to False, or choose another data.tokenizer",
        )
        collect_faults(faults)
        same = ("gelu", "norm", "norm_eps", "dtype", "constrain", "scan", "remat")
        tower = TextTower(
            vocabulary=text.vocabulary,
            length=text.length,
            width=width,
            depth=self.text_depth or model.depth,
            num_heads=heads,
            mlp_dim=self.text_mlp_dim or model.mlp_dim,
            common_width=self.common_width or model.width,
            causal=self.causal,
            lora_rank=self.text_lora_rank,
            end_id=text.end_id,
            **{name: getattr(model, name) for name in same},
        )
        image_width = None if self.common_width is None else model.width
        of_loss = (True, None) if self.loss == "sigmoid" else (False, _MAX_SCALE)
        return Matcher(cast(TextTower, in_form(tower)), image_width, *of_loss)

    def bind(self, model: nn.Module, loss: LossFn, facts: RunFacts) -> Objective:
        assert facts.text is not None  # else `conflicts` has said so
        matcher = self.make_matcher(model, facts.text, facts.in_form)
        bound = BoundContrastive(cast(Model, model), matcher, self)
        of_images = "features" if "features" in facts.shapes else "image"
        passes = (TokenPass(model), TokenPass(matcher.text, facts.text.length))
        return Objective(
            bound.loss,
            init=bound.init,
            passes=passes[of_images == "features" :],
            needs=(of_images, "mask", "text", "text_mask"),
            couples_rows=True,
            passed_on=bytes_passed_on(matcher.text.common_width),
        )


def check_tower(model: nn.Module, objective: str) -> Model:
    """`model`; raises InputError if the objective of that name cannot train it with texts."""
    if type(model) not in TOWERS:
        why = f"does not train a {type(model).__name__}; choose a ViT or a ViTC"
        raise InputError(f"objective.name={objective!r}: {why}")
    return cast(Model, model)


class BoundContrastive(NamedTuple):
    """The functions of the objective `Contrastive` of a model."""

    model: Model
    matcher: Matcher
    keys: Contrastive

    def init(self, rng: jax.Array) -> tuple[Params, ModelState]:
        """The parameters of `matcher`, and no state."""
        text = self.matcher.text.clone(constrain=unconstrained, ops=PLAIN)
        matcher = self.matcher.clone(text=text)
        return matcher.init(rng, *matcher.example_inputs)["params"], {}

    def loss(
        self, params: Params, state: State, batch: Batch, frozen: Any, rng: jax.Array
    ) -> ObjectiveOutput:
        """The sums over a batch."""
        images_BD, model_state = batch.get("features"), state.model_state
        if images_BD is None:
            images_BD, model_state = apply_in_training(
                self.model, params, model_state, batch, rng, method="features"
            )
        sums = self.sums_of(params[OBJECTIVE], images_BD, batch)
        return sums._replace(model_state=model_state)

    def sums_of(self, own: Any, images_BD: jax.Array, batch: Batch) -> ObjectiveOutput:
        """The sums over a batch, for its own parameters and the features of the images."""

        def embed(x: jax.Array, method: str, **options: Any) -> jax.Array:
            found = self.matcher.apply({"params": own}, x, method=method, **options)
            return unit(cast(jax.Array, found))

        scale = self.matcher.scale_of(own["logit_scale"])
        features = Features(
            embed(images_BD.astype(jnp.float32), "image_features"),
            embed(batch["text"], "text_features", train=True),
            scale,
            own.get("logit_bias", jnp.zeros(())),
        )
        mask_B = batch["mask"] * batch["text_mask"]
        pair_loss = PairLoss(self.keys.loss, self.keys.duplicates == "ignored")
        total, of_rows = pair_loss(features, Rows(mask_B, keys_of(batch["text"])))
        rows = of_rows._asdict() | {"scale": jnp.full_like(mask_B, scale)}
        if self.matcher.has_bias:
            rows["bias"] = jnp.full_like(mask_B, features.bias)
        return ObjectiveOutput(total, mask_B.sum(), sum_rows(rows, mask_B), {})
