"""Zeros that XLA's compiler pads operands of products with, to suit its kernels."""

import math
from collections.abc import Mapping

from vit_jax.planning.instructions import Instruction, Place, called_by
from vit_jax.planning.products import shape_of

_MOVES = ("bitcast", "convert", "copy", "reshape", "transpose")  # keep the number of values


def real_share(
    place: Place, name: str, computations: Mapping[str, Mapping[str, Instruction]]
) -> float:
    """The share of the values of the operand `name` that the compiler has not padded.

    Padding by the program itself (`jnp.pad`) counts as values.
    """
    siblings = place.siblings
    outside = [(outer.instruction, outer.siblings) for outer in place.within]
    each = siblings.get(name)
    while each is not None:
        if each.opcode == "pad" and '/pad"' not in each.attributes:
            before = math.prod(shape_of(siblings[each.operands[0]].type))
            return before / math.prod(shape_of(each.type))
        if each.opcode == "fusion":
            outside.append((each, siblings))
            siblings = computations[called_by(each, "calls")[0]]
            each = list(siblings.values())[-1]
        elif each.opcode == "parameter" and outside:
            number = int(each.attributes.partition(")")[0])
            fusion, siblings = outside.pop()
            each = siblings.get(fusion.operands[number])
        elif each.opcode in _MOVES:
            each = siblings.get(each.operands[0])
        else:
            break
    return 1.0
