"""LeJEPA: every view of an image predicts the mean embedding of its global views.

    loss = (1 - w) * mean |z_v - mean of z over the global views|^2 + w * mean SIGReg(z_v)

where w is `sigreg_weight`, v runs over all views, the global ones included, and SIGReg keeps the
embeddings of each view normal in every direction, so that they cannot collapse. There is no
teacher, no predictor and no stop of gradients.

The batch is taken as a whole: SIGReg and the normalisation of the head are sums over all rows of
the global batch that are not masked, on any mesh.

Source: Balestriero and LeCun 2025 (arXiv:2511.08544), algorithms 1 and 2. From the paper's text:
the two terms, 1,024 directions and 17 points from -5 to 5. The authors' code differs, as
docs/explanation/does_it_learn.md tabulates: weight 0.02, 256 directions, 17 points from 0 to 3 that
count for -t too, and the mean of all views in place of the global ones. Where the text leaves a
choice open, ours is the code's: the weight exp(-t^2 / 2) of the integral (section 4.2 writes
exp(-t^2 / s^2), with s = 1); the mean over the dimensions of an embedding in the first term; and
two hidden layers of 2,048 with batch normalisation and ReLU in the head. Assumed: the weight 0.05
and the 64 dimensions of an embedding.

Axes: B images, V views, D features, K dimensions of an embedding.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.base.errors import InputError
from vit_jax.base.tree import OBJECTIVE, Batch, ModelState, Params
from vit_jax.config import POSITIVE, SHARE, key
from vit_jax.models.contract import Model
from vit_jax.objectives.contract import (
    Collapse,
    LossFn,
    Objective,
    ObjectiveOutput,
    ObjectivePart,
    RunFacts,
    State,
    Term,
    TokenPass,
)
from vit_jax.objectives.other_sizes import at_size, check_resizable, check_size
from vit_jax.objectives.sigreg import draw_directions, sigreg

_DIRECTIONS = 1  # number folded into the key of a step; its directions are drawn from the result
VIEWS = ("global_views", "local_views")
_EPS = 1e-5  # of the batch normalisation


class Norm(nn.Module):
    """Normalises each feature by its mean and variance over the rows that `mask` (N,) keeps."""

    @nn.compact
    def __call__(self, x_ND: jax.Array, mask_N: jax.Array) -> jax.Array:
        scale_D = self.param("scale", nn.initializers.ones, x_ND.shape[-1:])
        bias_D = self.param("bias", nn.initializers.zeros, x_ND.shape[-1:])
        mask_N1, number = mask_N[:, None], jnp.maximum(mask_N.sum(), 1.0)
        mean_1D = (mask_N1 * x_ND).sum(axis=0, keepdims=True) / number
        variance_1D = (mask_N1 * jnp.square(x_ND - mean_1D)).sum(axis=0, keepdims=True) / number
        return (x_ND - mean_1D) * jax.lax.rsqrt(variance_1D + _EPS) * scale_D[None] + bias_D[None]


class Head(nn.Module):
    """The embedding (N, K) of features (N, D); only training needs it.

    Each hidden layer is normalised by the mean and variance of the rows that `mask` (N,) keeps.
    """

    hidden: int
    width: int

    @nn.compact
    def __call__(self, x_ND: jax.Array, mask_N: jax.Array) -> jax.Array:
        for i in range(2):
            x_ND = nn.Dense(self.hidden, use_bias=False, name=f"hidden_{i}")(x_ND)
            x_ND = nn.relu(Norm(name=f"norm_{i}")(x_ND, mask_N))
        return nn.Dense(self.width, name="out")(x_ND)


def features_of_views(model: Model, params: Params, views: jax.Array, rng: jax.Array) -> jax.Array:
    """The features of views (B, V, h, w, channels), float32 (B, V, D), in training.

    For views of another size than the model's images, its positions are resampled.

    Args:
      rng: key of the random stream `dropout`.
    """
    images = views.reshape(-1, *views.shape[2:])
    height, width = views.shape[2:4]
    model, params = at_size(model, params, (height, width))
    x = model.apply(
        {"params": params}, images, train=True, method="features", rngs={"dropout": rng}
    )
    assert isinstance(x, jax.Array)
    return x.astype(jnp.float32).reshape(*views.shape[:2], -1)


class LeJepa(ObjectivePart):
    """Predicts the mean embedding of the global views from every view, kept apart by SIGReg."""

    sigreg_weight: float = key(
        0.05, "share of SIGReg in the loss, lambda in the paper; with 0 the run collapses",
        within=SHARE,
    )  # fmt: skip
    directions: int = key(1024, "random directions of SIGReg, drawn in every step", within=POSITIVE)
    points: int = key(17, "odd number of points of the integral of SIGReg", within="[3, inf)")
    head_width: int = key(2048, "width of the hidden layers of the head", within=POSITIVE)
    embedding_width: int = key(64, "outputs of the head", within=POSITIVE)

    fewest_images = 5000

    def check(self) -> list[str]:
        return [] if self.points % 2 else [f"points={self.points}: needs an odd number, e.g. 17"]

    def bind(self, model: nn.Module, loss: LossFn, facts: RunFacts) -> Objective:
        model = check_resizable(model, "lejepa")
        shapes = {name: facts.shapes[name] for name in VIEWS if name in facts.shapes}
        if sum(shape[1] for shape in shapes.values()) == 1:
            raise InputError(
                "data.num_global=1: objective.name='lejepa' compares views; set "
                "--config.data.num_global=2"
            )
        for name, shape in shapes.items():
            size_key = "data.local_size" if name == "local_views" else "data.image_size"
            check_size(model, (shape[2], shape[3]), size_key)
        bound = _LeJepa(model, Head(self.head_width, self.embedding_width), self)
        return Objective(
            bound.loss,
            init=bound.init,
            passes=tuple(
                TokenPass(model.clone(image_size=shape[2:4]), images=shape[1])
                for shape in shapes.values()
            ),
            needs=("global_views", "mask"),
            couples_rows=True,
            collapse=Collapse(
                f"Raise objective.sigreg_weight, now {self.sigreg_weight}, global_batch_size or "
                "the number of steps, or lower optimizer.peak_lr"
            ),
        )


class _LeJepa(NamedTuple):
    """The functions of the objective `LeJepa` of a model."""

    model: Model
    head: Head
    keys: LeJepa

    def init(self, rng: jax.Array) -> tuple[Params, ModelState]:
        x_1D = jnp.zeros((1, self.model.width))
        return {"head": self.head.init(rng, x_1D, jnp.ones(1))["params"]}, {}

    def loss(
        self, params: Params, state: State, batch: Batch, frozen: Any, rng: jax.Array
    ) -> ObjectiveOutput:
        z_VBK = self.embed(params, batch, rng)
        mask_B, num_global = batch["mask"], batch["global_views"].shape[1]
        centre_BK = z_VBK[:num_global].mean(axis=0)
        distance_B = jnp.square(z_VBK - centre_BK[None]).mean(axis=(0, 2))
        key = jax.random.fold_in(rng, _DIRECTIONS)
        directions_KM = draw_directions(key, z_VBK.shape[-1], self.keys.directions)
        points, weight = self.keys.points, self.keys.sigreg_weight
        statistics = [sigreg(z_BK, directions_KM, mask_B, points=points) for z_BK in z_VBK]
        statistic = sum(statistics, jnp.zeros(())) / len(statistics)
        return ObjectiveOutput(
            loss_sum=jnp.zeros(()),
            weight_sum=mask_B.sum(),
            metric_sums={},
            model_state=state.model_state,
            terms={
                "prediction": Term((mask_B * distance_B).sum(), mask_B.sum(), 1 - weight),
                "sigreg": Term(statistic, jnp.ones(()), weight),
            },
        )

    def embed(self, params: Params, batch: Batch, rng: jax.Array) -> jax.Array:
        """The embeddings of all views, the global ones first: (V, B, K)."""
        kinds = [batch[name] for name in VIEWS if name in batch]
        found = [
            features_of_views(self.model, params, views, jax.random.fold_in(rng, i))
            for i, views in enumerate(kinds, 2)
        ]
        x_BVD = jnp.concatenate(found, axis=1)
        mask_BV = jnp.broadcast_to(batch["mask"][:, None], x_BVD.shape[:2])
        own: Any = params[OBJECTIVE]
        z: Any = self.head.apply(
            {"params": own["head"]}, x_BVD.reshape(-1, x_BVD.shape[-1]), mask_BV.reshape(-1)
        )
        return z.reshape(*x_BVD.shape[:2], -1).swapaxes(0, 1)
