"""The interface between an objective and the training step.

Axes: B examples, C classes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from vit_jax.base.tree import Batch, ModelState, Params, PyTree
from vit_jax.config import Part, sections
from vit_jax.config.settings import Settings
from vit_jax.data.tokenizers import TextFacts
from vit_jax.models.captioner import Captioner
from vit_jax.models.text import Matcher


class Term(flax.struct.PyTreeNode):
    """A further term of the loss: factor * sum / weight.

    sum: over the batch.
    weight: a function of the batch, not of the parameters; the divisor is max(weight, 1).
    factor: a number, the same in every step.
    """

    sum: jax.Array
    weight: jax.Array
    factor: float = flax.struct.field(pytree_node=False, default=1.0)

    @property
    def mean(self) -> jax.Array:
        """sum / weight, without the factor."""
        return self.sum / at_least_one(self.weight)


# Values of each image, float or bool: (B,), or {name: (B, ...)} that the host finishes.
Rows = jax.Array | dict[str, jax.Array]


def sum_rows(rows: Mapping[str, Rows], mask_B: jax.Array) -> dict[str, Any]:
    """{name: the sums over the rows of a batch}, where those with mask 0 do not count."""

    def add(row: jax.Array) -> jax.Array:
        return (mask_B.reshape(-1, *[1] * (row.ndim - 1)) * row).sum(axis=0)

    return {name: jax.tree.map(add, values) for name, values in rows.items()}


def sums_of_rows(loss_B: jax.Array, mask_B: jax.Array, /, **metrics: Rows) -> dict[str, Any]:
    """The fields of an `ObjectiveOutput` for values by row; rows with mask 0 do not count."""
    first = {"loss_sum": (mask_B * loss_B).sum(), "weight_sum": mask_B.sum()}
    return first | {"metric_sums": sum_rows(metrics, mask_B)}


class ObjectiveOutput(NamedTuple):
    """Sums over a batch; every term is divided once, by its own weight over the global batch.

    loss_sum, weight_sum: the first term of the loss; `weight_sum` also divides the metrics.
    metric_sums: {name: sum, or a dict of sums that the host finishes}.
    model_state: the new one.
    terms: {name: further term of the loss}; each is also logged, as `loss_NAME`.
    objective_state: the new one.
    """

    loss_sum: jax.Array
    weight_sum: jax.Array
    metric_sums: dict[str, Any]
    model_state: ModelState
    terms: dict[str, Term] = {}  # noqa: RUF012 (never changed)
    objective_state: ModelState = {}  # noqa: RUF012

    @property
    def loss(self) -> jax.Array:
        """loss_sum / weight_sum + the sum over `terms` of factor * sum / weight."""
        loss = self.loss_sum / at_least_one(self.weight_sum)
        for term in self.terms.values():
            loss += term.factor * term.mean
        return loss

    @property
    def metrics(self) -> dict[str, Any]:
        """The means of `metric_sums`, or their dicts, and further terms as `loss_NAME`."""
        weight, sums = at_least_one(self.weight_sum), self.metric_sums.items()
        metrics = {k: total if isinstance(total, dict) else total / weight for k, total in sums}
        return metrics | {f"loss_{name}": term.mean for name, term in self.terms.items()}


class State(Protocol):
    """The fields of a `TrainState` that an objective reads; for some, `ema` is the teacher."""

    step: jax.Array
    model_state: ModelState
    ema: Params
    objective_state: ModelState


# loss(params, state, batch, frozen, rng) -> sums over the batch.
LossOfBatch = Callable[[Params, State, Batch, PyTree, jax.Array], ObjectiveOutput]
LossFn = Callable[[jax.Array, jax.Array], jax.Array]  # logits (B, C), labels -> (B,)


class Collapse(NamedTuple):
    """Signs and remedies of a collapse, for an objective without labels; see `Health`.

    low_rank: the remedy if the features fill few directions.
    entropy_limit: the greatest value of its metric `teacher_entropy`, log K for K prototypes;
      None: it has no such metric.
    low_entropy, high_entropy: the remedies if that metric is near 0, or near its greatest value.
    """

    low_rank: str
    entropy_limit: float | None = None
    low_entropy: str = ""
    high_entropy: str = ""


class TokenPass(NamedTuple):
    """Images of one example that pass through Transformer blocks in a step.

    model: a model, or blocks with its fields `width`, `depth`, `num_heads`, `mlp_dim` and `remat`.
    tokens: number of one image's tokens; None: all that the model has for an image of its size.
    images: their number.
    learns: whether gradients flow back through the blocks.
    """

    model: nn.Module
    tokens: int | None = None
    images: int = 1
    learns: bool = True


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss to minimise over a batch, and everything that it needs.

    loss: loss(params, state, batch, frozen, rng) -> `ObjectiveOutput`; pure. The objective's own
      parameters are `params["objective"]`.
    init: rng -> (own parameters, objective_state), both may be {}; None: it has neither. The own
      parameters are trained, averaged and saved with the model's, and left out by exports and
      `init_from`. The state is saved.
    frozen: shapes of the arrays that the step takes beside the state and the batch, such as a
      teacher's; None: none. They are laid out like parameters, not donated and not saved.
    frozen_models: the models whose variables are the trees of the tuple `frozen`.
    reconstruct: (params, images (B, H, W, channels) or `Pictures`, keys (B,)) ->
      `patches.Reconstruction`, for objectives that hide patches; None for others.
    passes: the images that pass through Transformer blocks, to plan exchanges. (): the image
      passes through the model once.
    needs: keys of a batch that it reads.
    couples_rows: whether the loss of a row depends on other rows, as with centres and contrastive
      pairs; then a batch cannot be computed in microbatches.
    needs_average: whether it reads `state.ema`, as when a model is its own teacher.
    skip: state -> its objective_state after a step that leaves its batch out; None: as it is.
    is_single_pass: whether a step is one pass of the images through the model, and the loss one sum
      over them: no further terms, own parameters, teachers or states.
    collapse: signs of a collapse; None: it learns from labels or teachers, and cannot collapse.
    passed_on: bytes of a row that go round all devices that split the batch in a step.
    """

    loss: LossOfBatch
    init: Callable[[jax.Array], tuple[Params, ModelState]] | None = None
    frozen: PyTree | None = None
    frozen_models: tuple[nn.Module, ...] = ()
    reconstruct: Callable[[Params, jax.Array, jax.Array], Any] | None = None
    passes: tuple[TokenPass, ...] = ()
    needs: tuple[str, ...] = ("image", "label", "mask")
    couples_rows: bool = False
    needs_average: bool = False
    skip: Callable[[State], ModelState] | None = None
    is_single_pass: bool = False
    collapse: Collapse | None = None
    passed_on: int = 0


class Teacher(NamedTuple):
    """A frozen model that an objective learns from.

    source: as the user named it.
    weight: its share among the teachers; all shares add up to 1.
    model: in its own value range, for images of its own size.
    variables: {"params": ..., ...}, arrays or their shapes.
    mean, std: its input is (image / 255 - mean) / std, for each channel.
    loss: the loss that it was trained with; None: not stated.
    class_names: in the order of its logits; None: not stated.
    same_classes: whether these are the classes of the data, in the same order.
    """

    source: str
    weight: float
    model: nn.Module
    variables: Mapping[str, Any]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    loss: str | None = None
    class_names: tuple[str, ...] | None = None
    same_classes: bool = True


# in_form(module) -> module, sharded and in the fastest form for the devices of a run.
InForm = Callable[[nn.Module], nn.Module]


def as_it_is(module: nn.Module) -> nn.Module:
    """The `InForm` of a run whose devices are not known."""
    return module


class RunFacts(NamedTuple):
    """Facts about a run that an objective may use.

    mean, std: of the value range of the images of a batch, for each channel.
    teachers: frozen models; () if there are none.
    shapes: {key: shape} of a global batch.
    durations: {config key: steps} for every duration of the run.
    metrics: (logits (B, C), batch) -> {name: rows} of the metrics to log.
    in_form: gives the objective's own blocks the form to compute in.
    text: of the tokenizer of a batch's `text`; None: it has no captions. A plan opens no
      tokenizer and takes the facts of one that a run trains, with `data.vocabulary` ids.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    teachers: tuple[Teacher, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = {}
    durations: Mapping[str, int] = {}
    metrics: Callable[[jax.Array, Batch], dict[str, Any]] = lambda logits_BC, batch: {}
    in_form: InForm = as_it_is
    text: TextFacts | None = None


class ObjectivePart(sections.Objective, Part):
    """An objective, as `objective.name` selects it; its fields are keys of the section `objective`.

    splits_unasked: whether a batch may be computed in microbatches unasked. The loss of a row, and
      what is drawn for it, then depend neither on other rows nor on its place in a microbatch.
    takes_pictures: whether it also learns from `Pictures`, by `data.max_tokens`.
    takes_patch_sizes: whether its steps may have patches of several sizes, `model.patch_sizes`.
    takes_features: whether it also learns from the features of images, by `data.keep_features`.
    needs_average: as in `Objective`; then no optimizer with an average of its own is let pass.
    fewest_images: the fewest images from which a small model was seen to learn, from random weights
      and without labels, features better than the pixels; None: it was not seen. 0: labels, texts
      or a teacher say what to learn.
    split_params: of its own parameters and states, as `models.contract.Model.split_params`.
    """

    splits_unasked = False
    takes_pictures = False
    takes_patch_sizes = False
    takes_features = False
    needs_average = False
    fewest_images: ClassVar[int | None] = 0
    split_params: ClassVar[tuple[tuple[str, tuple[str | None, ...]], ...]] = ()

    @property
    def learns_labels(self) -> bool:
        """Whether it needs labels."""
        return False

    @property
    def teachers(self) -> Mapping[str, float]:
        """{source: weight} of the frozen models that it learns from; the weights add up to 1."""
        return {}

    @property
    def learns_logits(self) -> bool:
        """Whether it learns the logits of its teachers, so that the run has their classes."""
        return False

    @property
    def further_views(self) -> Mapping[str, tuple[str, tuple[int, int]]]:
        """{key of a batch: (own key, size)}: the crops of the global views at further sizes."""
        return {}

    @property
    def watches_layers(self) -> bool:
        """Whether it reads the outputs of single layers, which scan and remat would hide."""
        return False

    @property
    def learns_texts(self) -> bool:
        """Whether its own parameters belong to a `make_matcher`."""
        return False

    def make_matcher(
        self, model: nn.Module, text: TextFacts, in_form: InForm = as_it_is
    ) -> Matcher:
        """The module that compares features of images (B, D) with token ids of texts (K, T).

        Args:
          model: the image tower.
          text: of the tokenizer.
          in_form: as in `RunFacts`.

        Raises:
          InputError: the model or the tokenizer does not suit.
        """
        raise NotImplementedError

    @property
    def writes_captions(self) -> bool:
        """Whether its own parameters hold a `make_captioner`'s, as "decoder"."""
        return False

    def make_captioner(
        self, model: nn.Module, text: TextFacts, in_form: InForm = as_it_is
    ) -> Captioner:
        """The decoder that writes captions from the tokens of `model`; as `make_matcher`."""
        raise NotImplementedError

    def conflicts(self, settings: Settings) -> list[str]:
        """Faults between its keys and other sections of a config, which may have open keys."""
        return []

    def find_conflicts(self, config: Any) -> list[str]:
        """The faults that plug-ins of earlier versions find in a ConfigDict."""
        return []

    def bind(self, model: nn.Module, loss: LossFn, facts: RunFacts) -> Objective:
        """The objective of a run.

        Args:
          model: the model that learns.
          loss: of labels.
          facts: about the run.

        Raises:
          InputError: the model, the facts and the keys do not fit together.
        """
        raise NotImplementedError


def at_least_one(weight: jax.Array) -> jax.Array:
    return jnp.maximum(weight, 1.0)  # all rows of a batch may be masked
