"""Captions as a target: a decoder predicts the caption of each image, token by token.

A share of the rows is predicted in parallel: all tokens at once, from the image only. The loss of a
row is the mean over the tokens of its caption, with the end. Rows without a usable image or caption
do not count. Another term may match images with captions, see `contrastive`.

Source: Tschannen et al. 2023 (arXiv:2306.07915), section 3.

Axes: B rows, T positions of a caption, C token ids, M tokens of an image, D their width.
"""

from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import Faults, collect_faults
from vit_jax.base.tree import OBJECTIVE, Batch, ModelState, Params
from vit_jax.config import POSITIVE, key
from vit_jax.data.tokenizers import TextFacts
from vit_jax.models.block_ops import PLAIN, unconstrained
from vit_jax.models.captioner import Captioner
from vit_jax.models.contract import Model
from vit_jax.models.patches import row_keys
from vit_jax.objectives.contract import (
    InForm,
    LossFn,
    Objective,
    ObjectiveOutput,
    RunFacts,
    State,
    Term,
    TokenPass,
    as_it_is,
    sums_of_rows,
)
from vit_jax.objectives.contrastive import BoundContrastive, Contrastive, check_tower
from vit_jax.objectives.forward import apply_in_training
from vit_jax.objectives.pairs import bytes_passed_on

DECODER = "decoder"  # name of its parameters among the objective's own


class Captions(Contrastive):
    """Predicts each image's caption, and with `contrastive_weight` also learns from pairs.

    Its own parameters are a decoder, as wide and with as many heads as the model if its keys are
    None, and, with the weight, `Contrastive`'s parameters, whose keys then count too.
    """

    decoder_width: int | None = key(None, "width of the decoder's tokens", within=POSITIVE)
    decoder_depth: int = key(6, "number of its layers", within=POSITIVE)
    decoder_heads: int | None = key(
        None, "heads of attention in each of its layers", within=POSITIVE
    )
    decoder_mlp_dim: int | None = key(
        None, "hidden width of its MLPs; None: 4 times the width", within=POSITIVE
    )
    parallel_share: float = key(
        0.75, "share of the captions that are predicted in parallel", within="[0, 1]"
    )
    smoothing: float = key(0.0, "probability spread over all other tokens", within="[0, 1)")
    contrastive_weight: float = key(
        0.0, "factor of the contrastive loss; 0: captions only", within="[0, inf)"
    )

    writes_captions = True
    takes_pictures = False  # the decoder would attend to padding
    takes_patch_sizes = False
    takes_features = False  # it reads tokens

    @property
    def learns_texts(self) -> bool:
        return self.contrastive_weight > 0

    def make_captioner(
        self, model: nn.Module, text: TextFacts, in_form: InForm = as_it_is
    ) -> Captioner:
        tower = check_tower(model, "captions")
        width, heads = self.decoder_width or tower.width, self.decoder_heads or tower.num_heads
        faults = Faults()
        of_keys = f"objective.decoder_width={width}, objective.decoder_heads={heads}"
        faults.need(width % heads == 0, f"{of_keys}: the heads must divide the width")
        ends = text.end_id is not None and not text.pads_left
        needs = "needs one that ends texts and puts padding behind them; choose another"
        faults.need(ends, f"data.tokenizer: objective.name='captions' {needs}")
        collect_faults(faults)
        same = ("gelu", "norm", "norm_eps", "dtype", "constrain", "scan", "remat")
        captioner = Captioner(
            image_width=tower.width,
            vocabulary=text.vocabulary,
            length=text.length,
            pad_id=text.pad_id,
            width=width,
            depth=self.decoder_depth,
            num_heads=heads,
            mlp_dim=self.decoder_mlp_dim or 4 * width,
            **{name: getattr(tower, name) for name in same},
        )
        return cast(Captioner, in_form(captioner))

    def bind(self, model: nn.Module, loss: LossFn, facts: RunFacts) -> Objective:
        assert facts.text is not None  # else `conflicts` has said so
        captioner = self.make_captioner(model, facts.text, facts.in_form)
        pairs, passed_on = None, 0
        passes = [TokenPass(model), TokenPass(captioner, facts.text.length)]
        if self.learns_texts:
            matcher = self.make_matcher(model, facts.text, facts.in_form)
            pairs = BoundContrastive(cast(Model, model), matcher, self)
            passes.append(TokenPass(matcher.text, facts.text.length))
            passed_on = bytes_passed_on(matcher.text.common_width)
        assert facts.text.end_id is not None  # else `make_captioner` has said so
        bound = _Captions(cast(Model, model), captioner, self, facts.text.end_id, pairs)
        return Objective(
            bound.loss,
            init=bound.init,
            passes=(*passes,),
            needs=("image", "mask", "text", "text_mask"),
            couples_rows=self.learns_texts,
            passed_on=passed_on,
        )


class _Captions(NamedTuple):
    """The functions of the objective `Captions` of a model; `pairs`: its other term's functions."""

    model: Model
    captioner: Captioner
    keys: Captions
    end_id: int
    pairs: BoundContrastive | None

    def init(self, rng: jax.Array) -> tuple[Params, ModelState]:
        """The parameters of the decoder and of the text side, and no state."""
        captioner = self.captioner.clone(constrain=unconstrained, ops=PLAIN)
        own = captioner.init(rng, *captioner.example_inputs)["params"]
        texts = {} if self.pairs is None else self.pairs.init(jax.random.fold_in(rng, 1))[0]
        return {DECODER: own, **texts}, {}

    def loss(
        self, params: Params, state: State, batch: Batch, frozen: Any, rng: jax.Array
    ) -> ObjectiveOutput:
        """The sums over a batch; fold_in(key, i) draws whether row i is predicted in parallel."""
        draw_key, dropout_key = jax.random.split(rng)

        def read(model: Any, images: jax.Array, **how: Any) -> tuple[jax.Array, jax.Array | None]:
            tokens_BMD = model.tokens(images, **how)
            return tokens_BMD, None if self.pairs is None else model.represent(tokens_BMD)

        (tokens_BMD, features_BD), model_state = apply_in_training(
            self.model, params, state.model_state, batch, dropout_key, method=read
        )
        ids_BT, mask_B = batch["text"], batch["mask"] * batch["text_mask"]
        share, keys_B = self.keys.parallel_share, row_keys(draw_key, len(mask_B))
        is_parallel_B = jax.vmap(lambda key: jax.random.bernoulli(key, share))(keys_B)
        own: Any = params[OBJECTIVE]
        logits_BTC = cast(jax.Array, self.captioner.apply(
            {"params": own[DECODER]}, tokens_BMD, ids_BT, is_parallel_B, train=True
        ))  # fmt: skip
        counted_BT = until_end(ids_BT, self.end_id)
        loss_B = caption_losses(logits_BTC, ids_BT, counted_BT, self.keys.smoothing)
        right_BT = (logits_BTC.argmax(axis=2) == ids_BT) * counted_BT
        right_B = right_BT.sum(axis=1) / counted_BT.sum(axis=1)
        sums = sums_of_rows(loss_B, mask_B, right_tokens=right_B)
        if self.pairs is None:
            return ObjectiveOutput(**sums, model_state=model_state)
        assert features_BD is not None
        of_pairs = self.pairs.sums_of(own, features_BD, batch)
        sums["metric_sums"] |= of_pairs.metric_sums
        term = Term(of_pairs.loss_sum, of_pairs.weight_sum, self.keys.contrastive_weight)
        return ObjectiveOutput(**sums, model_state=model_state, terms={"contrastive": term})


def until_end(ids_BT: jax.Array, end_id: int) -> jax.Array:
    """Whether a position holds a token of its caption, up to the first `end_id`, which counts."""
    is_end_BT = jnp.equal(ids_BT, end_id)
    return jnp.cumsum(is_end_BT, axis=1) == is_end_BT


def caption_losses(
    logits_BTC: jax.Array, ids_BT: jax.Array, counted_BT: jax.Array, smoothing: float
) -> jax.Array:
    """The cross-entropy of each caption (B,): the mean over its positions that count.

    The target of a position is 1 - smoothing for its id, and smoothing / (C - 1) for each other.
    """
    logs_BTC = jax.nn.log_softmax(logits_BTC)
    own_BT = jnp.take_along_axis(logs_BTC, ids_BT[:, :, None], axis=2)[:, :, 0]
    loss_BT = -(1 - smoothing) * own_BT
    if smoothing:
        others_BT = logs_BTC.sum(axis=2) - own_BT
        loss_BT -= smoothing / (logits_BTC.shape[2] - 1) * others_BT
    return (counted_BT * loss_BT).sum(axis=1) / counted_BT.sum(axis=1)
