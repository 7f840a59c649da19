"""Retrieval: images find their captions, and captions their images.

Axes: N images, M captions, E common width.
Source: Radford et al. 2021 (arXiv:2103.00020), appendix E.2, for the task.
"""

import numpy as np

from vit_jax.base import tree
from vit_jax.base.errors import InputError
from vit_jax.config import SplitEvaluator
from vit_jax.config.evals import Better
from vit_jax.data import captions
from vit_jax.evaluators.features import NothingToMeasureError, make_gather
from vit_jax.evaluators.inputs import EvalInputs, Measure
from vit_jax.experiment.state import TrainState
from vit_jax.models.text import unit
from vit_jax.models.zero_shot import embed_texts, need_text_side

_TOPS = (1, 5, 10)
_PAIRS = 1 << 24  # cosines at once, 64 MiB
_ROUNDING = 2e-6  # of a cosine in float32; such differences are none


def recalls(x_NE: np.ndarray, t_ME: np.ndarray, image_M: np.ndarray) -> dict[str, float]:
    """{"image_to_text_recall1": ..., "text_to_image_recall1": ..., and of 5 and 10}.

    Recall at k is the share of the images that have one of their captions among the k captions with
    the largest cosines, and the share of the captions that have their image among k images. Equal
    cosines, to rounding, count as in random order. A pair whose cosine is NaN has the worst rank,
    and is no rival of others. At most 2^24 cosines are held at a time.

    Args:
      x_NE, t_ME: of images and captions, each of length 1.
      image_M: index of each caption's image; each image has one or more.
    """
    own_M = (x_NE[image_M] * t_ME).sum(axis=1)
    best_N = np.full(len(x_NE), -np.inf, np.float32)
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        np.maximum.at(best_N, image_M, own_M)
    above_N, equal_N = np.zeros(len(x_NE)), np.zeros(len(x_NE))
    above_M, equal_M = np.zeros(len(t_ME)), np.zeros(len(t_ME))
    rows = max(_PAIRS // len(t_ME), 1)
    for first in range(0, len(x_NE), rows):
        part = slice(first, first + rows)
        cosine_RM = x_NE[part] @ t_ME.T
        mine = np.nonzero((image_M >= first) & (image_M < first + rows))[0]
        cosine_RM[image_M[mine] - first, mine] = -np.inf  # own pairs are no rivals
        for own, above, equal, axis in (
            (best_N[part, None], above_N[part], equal_N[part], 1), (own_M, above_M, equal_M, 0),
        ):  # fmt: skip
            above += ((cosine_RM > own + _ROUNDING) | np.isnan(own)).sum(axis=axis)
            equal += (abs(cosine_RM - own) <= _ROUNDING).sum(axis=axis)

    def recall(above: np.ndarray, equal: np.ndarray, top: int) -> float:
        return float(np.clip((top - above) / (equal + 1), 0, 1).mean())

    found = {"image_to_text": (above_N, equal_N), "text_to_image": (above_M, equal_M)}
    return {f"{way}_recall{k}": recall(*ranks, k) for way, ranks in found.items() for k in _TOPS}


class Retrieval(SplitEvaluator):
    """Recall at 1, 5 and 10 of captions by images, and of images by captions.

    The model has a text tower, and the data have captions; an image may have several. Every host
    holds the features of all images and captions.
    """

    learns_classes = True
    output = "features"
    multi_label = None
    reads_captions = True

    def reports(self) -> dict[str, Better]:
        ways = ("image_to_text", "text_to_image")
        counts: dict[str, Better] = {"num_images": "neither", "num_texts": "neither"}
        return counts | {f"{way}_recall{k}": "higher" for way in ways for k in _TOPS}

    def bind(self, inputs: EvalInputs) -> Measure:
        source, gather = inputs.source(), make_gather(inputs)
        if source.captions is None:
            raise InputError(f"split: {source.name} {source.split} has no captions; add them")
        side = need_text_side(inputs.read_text_side, "type='retrieval'")
        tokenizer = side.read_tokenizer()
        texts = captions.usable_of(source, tokenizer)
        ids_of = {record: tokenizer(found) for record, found in texts.items()}

        whole = inputs.jit(lambda kernel: kernel)

        def measure(state: TrainState) -> dict[str, float]:
            images, own = gather(state, "split"), side
            if not side.params:
                own = side._replace(params=tree.flatten_names(state.params[tree.OBJECTIVE]))
            kept = np.array([i in ids_of for i in images.id_N.tolist()])
            if not kept.any():
                raise NothingToMeasureError("split: no image that can be read has a caption")
            x_NE, records = images.x_ND[kept], images.id_N[kept].tolist()
            if own.matcher.image_width is not None:
                x_NE = x_NE @ np.asarray(whole(own.params["image_head/kernel"]))
            ids = [ids_of[record] for record in records]
            t_ME = embed_texts(own, np.concatenate(ids), inputs.replicated)
            image_M = np.repeat(np.arange(len(ids)), [*map(len, ids)])
            counts = {"num_images": len(ids), "num_texts": len(image_M)}
            return counts | recalls(unit(x_NE), t_ME, image_M)

        return measure
