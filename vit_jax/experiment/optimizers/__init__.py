"""Optimizers: optax chains with decoupled weight decay on parameters selected by a regex.

The update of a parameter p with gradient g:

    g <- g + l2 * p                               if l2 is not 0
    g <- g * min(1, grad_clip_norm / ||g||)       norm over all parameters
    d <- m_hat / (sqrt(v_hat) + eps)              adamw; m_hat, v_hat bias-corrected,
         with m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2
         m                                        sgd; m <- g + momentum m
         sign(b1 m + (1 - b1) g)                  lion; then m <- b2 m + (1 - b2) g
         m                                        rmsprop; m <- momentum m + g / sqrt(v + eps),
         with v <- b2 v + (1 - b2) g^2, v = 1 at the start
         m                                        adafactor; m <- b1 m + (1 - b1) g / sqrt(V)
         with V = r c^T / mean(r) for matrices, where r and c are the row and column means of
         V <- b V + (1 - b) (g^2 + eps), b = min(b2, 1 - t^-0.8) at step t
         m                                        lars; m <- momentum m + 0.001 ||p|| / ||g|| g;
         for vectors m <- momentum m + g
         as adamw                                 lamb; then d + weight_decay * p is multiplied by
         ||p|| / ||d + weight_decay * p|| for each leaf that `weight_decay_on` matches but the head
         muon.py has the direction of muon, schedule_free.py the updates of schedule_free
    p <- p - k * schedule(step) * (d + weight_decay * p)
         with k = 1, or layer_decay^(depth + 1 - i) for part i of the model, times embedding_rate
         for the patch embedding

With `weight_decay_end`, weight_decay goes from its value to that one by half a cosine.

Weight decay is added after the momentum and multiplied by the current learning rate. For adamw
this equals optax.adamw. It differs from Loshchilov & Hutter, who multiply the decay by the shape of
the schedule only, not by the base rate. For sgd and rmsprop it differs from L2 regularisation,
where the decay passes through the momentum, in rmsprop also through the root: that is `l2`.

adafactor is the variant of Zhai et al.: a factored second moment whose decay rate is capped at
Adam's 0.999, a first moment in bfloat16, and a learning rate that is not scaled by parameter norms.
Updates are not clipped and moments are not bias-corrected, so the first update is a tenth of later
ones. Vectors, and matrices with a side below 32, keep the full second moment. Scanned layers are
mapped over, so that each layer's own matrix is factored.

Source: Loshchilov & Hutter 2017 (arXiv:1711.05101), algorithms 1 and 2; layer_decay: Clark et al.
2020 (arXiv:2003.10555), Bao et al. 2021 (arXiv:2106.08254).
"""

import functools
import itertools
from typing import Any

import jax.numpy as jnp
import optax

from vit_jax.experiment.optimizers import masks
from vit_jax.experiment.optimizers.layers import over_layers, scale_embedding, scale_layers
from vit_jax.experiment.optimizers.optimizers import Optimizer
from vit_jax.experiment.schedules import Keep, half_cosine, make_ema_decay

__all__ = [
    "LOWERED",
    "Optimizer",
    "lower_rate",
    "make_average",
    "make_optimizer",
    "over_layers",
]

LOWERED = "lowered_rate"  # part of the chain; its state is a factor of the learning rate


def make_average(optimizer: Optimizer, total_steps: int) -> Keep | None:
    """The share of the running averages that stays in an update; None: there are none."""
    if optimizer.averages:
        return lambda step, opt_state: optax.tree.get(opt_state, "keep")
    return make_ema_decay(optimizer.ema_decay, optimizer.ema_decay_end, total_steps)


def make_optimizer(
    optimizer: Optimizer, schedule: optax.Schedule, total_steps: int = 1
) -> optax.GradientTransformation:
    """Make the update at the top of this module, as a chain of named parts.

    The parts: l2 (if it is not 0), frozen_gradients, clip, direction, weight_decay, layer_decay,
    learning_rate, LOWERED (if on_spike is "lower"), frozen_updates; and after_PART for what the
    optimizer does after a PART of them. A part that is turned off does nothing.

    Layers are named as in the unrolled model (`encoder/layer_3/.*`) even if they are scanned. For
    `layer_decay`, i is 0 for the embedding (patches, class token, positions), l + 1 for layer l,
    depth + 1 for the last norm and the head. Parameters that `freeze` matches never change, bit by
    bit; their gradients do not count towards the clipped norm; leaves frozen as a whole have no
    optimizer state.

    Args:
      optimizer: the section `optimizer` of a config, whose part gives the direction.
      schedule: number of the update, from 0 -> learning rate.
      total_steps: length of the run, for `weight_decay_end`.

    Raises:
      InputError: by `init` and `update`: `weight_decay_on` matches no parameter although
        `weight_decay` or `l2` is not 0, `freeze` matches none or all, or `layer_decay` is set for a
        model without layers.
    """
    o, weight_decay_on = optimizer, optimizer.weight_decay_on
    norm, factor = o.grad_clip_norm, o.layer_decay
    clip = optax.identity() if norm is None else optax.clip_by_global_norm(norm)
    direction, after = o.bind(), o.after(weight_decay_on, schedule)
    drop_frozen = optax.identity()
    if o.freeze is not None:
        learns = functools.partial(masks.leaves_that_learn, freeze=o.freeze)
        direction = optax.masked(direction, learns)
        after = {part: optax.masked(tx, learns) for part, tx in after.items()}
        drop_frozen = masks.drop_frozen(o.freeze)
    decay = None
    if o.weight_decay_end is not None:
        decay = functools.partial(
            half_cosine, total_steps=total_steps, first=o.weight_decay, last=o.weight_decay_end
        )
    # Left out if they do nothing, since states are stored with the names of all parts.
    regularise = [("l2", masks.decay_weights(o.l2, weight_decay_on))] if o.l2 else []
    rate = o.embedding_rate
    slow = [] if rate is None else [("embedding_rate", scale_embedding(rate))]
    if (of_texts := o.text_layer_decay) is not None:
        slow.append(("text_layer_decay", scale_layers(of_texts, of_texts=True)))
    lowered = [(LOWERED, _scale_by_state())] if o.on_spike == "lower" else []
    chain = [
        *regularise,
        ("frozen_gradients", drop_frozen),
        ("clip", clip),
        ("direction", direction),
        ("weight_decay", masks.decay_weights(o.weight_decay, weight_decay_on, decay, o.head_decay)),
        ("layer_decay", optax.identity() if factor is None else scale_layers(factor)),
        *slow,
        ("learning_rate", optax.scale_by_learning_rate(schedule)),
        *lowered,
        ("frozen_updates", drop_frozen),
    ]
    followed = [[(k, tx), *([(f"after_{k}", after[k])] if k in after else [])] for k, tx in chain]
    return optax.named_chain(*itertools.chain(*followed))


def lower_rate(opt_state: Any) -> Any:
    """The state with half the number LOWERED; as it is where the optimizer has none."""
    if LOWERED not in opt_state:
        return opt_state
    # Of schedule_free; it is multiplied by LOWERED too, but the point z stays where it is.
    if (ahead := optax.tree.get(opt_state, "ahead")) is not None:
        opt_state = optax.tree.set(opt_state, ahead=optax.tree.scale(2, ahead))
    return opt_state | {LOWERED: opt_state[LOWERED] / 2}


def _scale_by_state() -> optax.GradientTransformation:
    """Multiplies updates by its state, a float32 scalar; 1 at first."""
    return optax.GradientTransformation(
        lambda params: jnp.ones(()),
        lambda updates, scale, params=None: (optax.tree.scale(scale, updates), scale),
    )
