"""The first weights of what an objective trains beside the model: a text tower and a decoder."""

import logging
from collections.abc import Callable

import numpy as np

from vit_jax.base import tree
from vit_jax.config import Settings
from vit_jax.experiment.experiment import Experiment
from vit_jax.models.captioner import CaptionSide
from vit_jax.models.contract import about
from vit_jax.models.zero_shot import TextSide
from vit_jax.run.setup.opener import Files
from vit_jax.transfer.fit import fit_texts, stack_layers

logger = logging.getLogger("vit_jax")

_OF_DECODER = ("image_width", "vocabulary", "length", "width", "depth", "num_heads", "mlp_dim",
               "gelu", "norm", "norm_eps")  # fmt: skip


def first_of_objective(
    settings: Settings,
    experiment: Experiment,
    opened: Files,
    texts: Callable[[], TextSide] | None,
) -> dict[str, np.ndarray]:
    """{leaf name: array} of the objective's parameters that the sources of the run give.

    texts: gives the text side that learns; None: there is none.

    Raises:
      InputError: the text tower of a source has other sizes.
    """
    own, run = dict[str, np.ndarray](), settings.run
    if opened.text_side is not None and texts is not None:
        of_other = run.init_texts_from is not None
        key = "init_texts_from" if of_other else "init_from"
        source = f"{key}={getattr(run, key)!r}"
        own |= fit_texts(opened.text_side, texts().matcher, source, other_images=of_other)
    if opened.caption_side is not None:
        own |= _decoder(opened.caption_side, settings, experiment, opened)
    return {f"{tree.OBJECTIVE}/{name}": array for name, array in own.items()}


def _decoder(
    side: CaptionSide, settings: Settings, experiment: Experiment, opened: Files
) -> dict[str, np.ndarray]:
    """The parameters of the decoder; none, with a warning, if that of the run has other sizes."""
    model, text = experiment.model, opened.preprocessing.text
    assert text is not None  # the run reads captions
    ours, theirs = settings.objective.make_captioner(model, text), side.captioner
    if other := [name for name in _OF_DECODER if getattr(ours, name) != getattr(theirs, name)]:
        logger.warning("init_from=%s: its decoder has another %s, so the decoder starts anew",
                       settings.run.init_from, ", ".join(other))  # fmt: skip
        return {}
    found = tree.unflatten_names(side.params)
    if about(model).stacks_layers:
        found = stack_layers(found)
    return {f"decoder/{name}": array for name, array in tree.flatten_names(found).items()}
