"""FLOPs of the instructions in the text of a program compiled by XLA.

XLA counts none of calls into cuBLAS and cuDNN; here they count by their shapes, like products. As
in `devices.flops`, a multiply-add counts 2 and elementwise operations count nothing.
"""

import math
import re
from collections.abc import Sequence

from vit_jax.devices.flops import CUDNN_PRODUCTS

_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_EXACT = re.compile(r'operand_precision"?[=:][{\["]+highest', re.IGNORECASE)
# The places of input, kernel and output in (result, operand 0, operand 1) of a convolution.
_CONVOLUTIONS = {
    "__cudnn$convForward": (1, 2, 0),
    "__cudnn$convBiasActivationForward": (1, 2, 0),
    "__cudnn$convBackwardInput": (0, 2, 1),
    "__cudnn$convBackwardFilter": (1, 0, 2),
}


def target_of_call(attributes: str) -> str:
    """The function that a custom call calls; "" for other instructions."""
    found = _TARGET.search(attributes)
    return found[1] if found else ""


def count_flops(
    opcode: str,
    attributes: str,
    result: str,
    operands: Sequence[str],
    real: Sequence[float] = (1.0, 1.0),
) -> int:
    """FLOPs of one instruction, given the texts of its attributes and types.

    Args:
      real: the shares of the values of the first two operands that the compiler has not padded.
    """
    target = target_of_call(attributes)
    if opcode == "convolution" or target in _CONVOLUTIONS:
        shapes = [shape_of(text) for text in (result, *operands[:2])]
        places = _CONVOLUTIONS.get(target, (1, 2, 0))
        given, kernel, output = (shapes[at] for at in places)
        real_given, real_kernel, _ = ((1.0, *real)[at] for at in places)
        return _convolution_flops(given, kernel, output, attributes, real_given, real_kernel)
    if opcode == "dot" or target.startswith("__cublas$"):
        (lhs, *_), contracted = (
            operands,
            _numbers_of("lhs_contracting_(?:dims|dimensions)", attributes),
        )
        sizes = shape_of(lhs)
        pairs = math.prod(shape_of(result)) * math.prod(sizes[axis] for axis in contracted)
        return round(2 * pairs * min(real))
    if target in CUDNN_PRODUCTS:
        logits = _numbers_of('"intermediate_tensor_shape".*?"dimensions', attributes)
        return 2 * CUDNN_PRODUCTS[target] * math.prod(logits) * shape_of(operands[0])[-1]
    return 0


def is_exact(attributes: str) -> bool:
    """Whether a product has `precision="highest"`, in XLA's attributes or those of a call."""
    return _EXACT.search(attributes) is not None


def dtype_of(kind: str) -> str:
    """The dtype of an array, or of the first in a tuple, from the text of its type."""
    found = _ARRAY.search(kind)
    return found[1] if found else ""


def _convolution_flops(
    given: Sequence[int],
    kernel: Sequence[int],
    output: Sequence[int],
    attributes: str,
    real_input: float,
    real_kernel: float,
) -> int:
    """A product of the kernel of one output channel for every output; not with inserted zeros.

    A value of the kernel meets each value of the input at most once.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->\w+", attributes)
    zeros = re.search(r"lhs_dilate=([\dx]+)", attributes)
    assert labels is not None
    values = math.prod(kernel) * real_kernel
    pairs = math.prod(output) * values / kernel[labels[2].index("o")]
    if zeros:
        pairs /= math.prod(int(n) for n in zeros[1].split("x"))
    most = math.prod(given) * real_input * values / given[labels[1].index("f")]
    return round(2 * min(pairs, most))


def shape_of(kind: str) -> list[int]:
    """The sizes of an array, or of the first in a tuple, from the text of its type."""
    found = _ARRAY.search(kind)
    return [int(size) for size in found[2].split(",") if size] if found else []


def _numbers_of(name: str, attributes: str) -> list[int]:
    """The numbers in the first brackets after `name`."""
    found = re.search(rf"{name}\"?[=:]\s*[{{\[]([^}}\]]*)", attributes)
    return [int(number) for number in re.findall(r"\d+", found[1])] if found else []
