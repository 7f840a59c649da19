"""Models as programs images -> outputs, parameters included: what a runtime's file is made of.

A model of images and texts gives two programs, one a tower. The text program takes token ids.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from vit_jax.base.errors import Faults, InputError, collect_faults
from vit_jax.config import LOSSES
from vit_jax.data.device_ops import to_value_range
from vit_jax.models import block_ops
from vit_jax.models.contract import about, with_known
from vit_jax.models.text import unit
from vit_jax.models.zero_shot import TextSide, need_text_side
from vit_jax.transfer.pretrained import Pretrained, loss_of

MOST_BYTES = 2**31 - 2**20  # maximum size of a serialised program, whose lengths have 31 bits

# {what a program gives: the name of one such number}
GIVES = {
    "logits": "logit",
    "probabilities": "probability",
    "features": "feature",
    "image_features": "feature",
    "text_features": "feature",
}

_PRECISIONS = ("float32", "float16", "int8")  # each runtime has some of these


class Choice(NamedTuple):
    """What the program of an export takes and gives, and the pictures that test it.

    takes: "floats", images in the model's value range, or "bytes", uint8 pixels.
    gives: "logits", "probabilities", or "features", the input of the head. Models of images and
      texts also give "image_features" or "text_features", normalised and of one width. For
      "text_features" the program takes token ids, and `takes` and `pictures` do not count.
    precision: "float32"; "float16", or "int8" where a runtime can quantise.
    pictures: folder of the pictures on which the exported file is compared with the model; None:
      parts of the two photographs of scikit-learn. int8 needs one folder in it per class.
    calibration: folder of other pictures, from which int8 takes the ranges of values; if there
      are more than 512, at most 512 of them, evenly spaced. Those that are in `pictures` too are
      left out.
    max_drop: the largest loss of top-1 by int8, as a fraction (0.01: one point).
    """

    takes: str = "floats"
    gives: str = "logits"
    precision: str = "float32"
    pictures: epath.PathLike | None = None
    calibration: epath.PathLike | None = None
    max_drop: float = 0.01

    @property
    def of_texts(self) -> bool:
        """Whether the program takes token ids."""
        return self.gives == "text_features"

    @property
    def of_pairs(self) -> bool:
        """Whether the program is of a tower of a model of images and texts, with its projection."""
        return self.gives in ("image_features", "text_features")

    @property
    def of_classes(self) -> bool:
        """Whether the program gives a number for each class."""
        return self.gives in ("logits", "probabilities")

    def check(self, format: str, precisions: Sequence[str]) -> None:
        """Raise InputError if the runtime `format` with these `precisions` cannot do it."""
        faults = Faults()
        faults.need_known("takes", self.takes, ("floats", "bytes"))
        faults.need_known("gives", self.gives, GIVES)
        if precisions and self.of_texts:
            takes = "is for images, but gives=text_features takes token ids; leave it out"
            faults.need(self.takes == Choice().takes, f"takes={self.takes}: {takes}")
            faults.need(self.pictures is None, f"pictures={self.pictures}: {takes}")
        if not precisions:
            faults.need(
                self == Choice(),
                f"format={format}: takes, gives, precision, pictures, calibration and max_drop are "
                "of programs: stablehlo, onnx and litert; leave them out",
            )
        elif self.precision in {*_PRECISIONS} - {*precisions}:
            faults.append(
                f"precision={self.precision!r}: {format} holds {' and '.join(precisions)} only; "
                "leave it out, or export as onnx or litert"
            )
        elif self.precision not in precisions:
            faults.need_known("precision", self.precision, precisions)
        elif self.precision == "int8" and self.of_texts:
            what = "is tested by top-1 on pictures, and gives=text_features takes token ids"
            faults.append(f"precision=int8: {what}; take float16 or float32")
        elif self.precision == "int8":
            faults.need(
                self.pictures is not None and self.calibration is not None,
                "precision=int8: needs pictures (with a folder per class) and calibration (others)",
            )
            faults.need(
                self.of_classes or self.gives not in GIVES,
                f"precision=int8: is tested by top-1, so gives={self.gives} does not go with it",
            )
            drop = f"max_drop={self.max_drop}: needed: a fraction in [0, 1); 0.01 is one point"
            faults.need(0 <= self.max_drop < 1, f"{drop} of top-1")
        else:
            for name, usual in (("calibration", None), ("max_drop", Choice().max_drop)):
                value = getattr(self, name)
                faults.need(value == usual, f"{name}={value}: is of precision=int8; leave it out")
        collect_faults(faults)


PLAIN = Choice()


class Program(NamedTuple):
    """images (b, *shape) of `dtype` -> outputs (b, n), float32; or token ids (b, L), int32.

    apply: (variables, images) -> outputs.
    samples: images for calibration, as the program takes them.
    """

    apply: Callable[[Any, Any], Any]
    variables: dict[str, Any]
    shape: tuple[int, ...]
    dtype: Any
    precision: str = "float32"
    samples: Sequence[np.ndarray] = ()

    @property
    def call(self) -> Callable[[Any], Any]:
        return partial(self.apply, self.variables)

    @property
    def name(self) -> str:
        """The name of the input, where a format has names."""
        return "images" if len(self.shape) == 3 else "ids"

    @property
    def inputs(self) -> jax.ShapeDtypeStruct:
        """Inputs of any number, for tracing."""
        return jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), *self.shape), self.dtype)


def make_program(pretrained: Pretrained, choice: Choice = PLAIN) -> Program:
    """The program of a model.

    Raises:
      InputError: if `choice` needs classes or a text tower and the model has none, or if the model
        takes images of any size.
    """
    if choice.of_texts:
        return _make_text_program(need_texts(pretrained, choice), choice)
    model, variables, spec = pretrained.model, pretrained.variables, pretrained.spec
    size = model.image_size or spec.image_size
    if size is None:
        raise InputError(
            f"{pretrained.source}: takes images of any size; choose the size of the exported "
            "program with --image_size"
        )
    as_bytes, of_features = choice.takes == "bytes", not choice.of_classes
    if model.num_classes is None:
        if choice.gives == "probabilities":
            what = f"gives=probabilities: {pretrained.source} has no classes; take features"
            raise InputError(what)
        if choice.precision == "int8":
            what = f"precision=int8: is tested by top-1, and {pretrained.source} has no classes"
            raise InputError(f"{what}; take float16 or float32")
    loss = LOSSES.find(loss_of(pretrained))() if choice.gives == "probabilities" else None
    model = with_known(model, dtype=jnp.dtype("float32"))

    def apply(variables: Any, images: jax.Array) -> jax.Array:
        if as_bytes:
            images = to_value_range(images, spec.mean, spec.std)
        found: Any = model.apply(variables, images, method="features" if of_features else None)
        return found if loss is None else loss.probabilities(found)

    shape, dtype = (*size, about(model).channels), np.uint8 if as_bytes else np.float32
    program = Program(apply, variables, shape, dtype, choice.precision)
    if choice.gives != "image_features":
        return program
    head = need_texts(pretrained, choice).params.get("image_head/kernel")

    def apply_in_common(variables: Any, images: jax.Array) -> jax.Array:
        found = apply(variables["tower"], images)
        return unit(found if head is None else found @ variables["head"])

    return program._replace(apply=apply_in_common, variables={"tower": variables, "head": head})


def need_texts(pretrained: Pretrained, choice: Choice) -> TextSide:
    """The text side; an InputError, which names `choice.gives`, says that there is none."""
    return need_text_side(pretrained.read_text_side, f"gives={choice.gives}: {pretrained.source}")


def _make_text_program(side: TextSide, choice: Choice) -> Program:
    """Token ids (b, L), padded as by the model's tokenizer -> features as `embed_texts` gives."""
    text = side.matcher.text.clone(
        dtype=jnp.dtype("float32"), constrain=block_ops.unconstrained, ops=block_ops.PLAIN
    )

    def apply(variables: Any, ids: jax.Array) -> jax.Array:
        return unit(jnp.asarray(text.apply(variables, ids)))

    variables = {"params": side.variables["params"]["text"]}
    return Program(apply, variables, (text.length,), np.int32, choice.precision)
