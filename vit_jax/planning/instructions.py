"""The instructions in the text of a program compiled by XLA, line by line."""

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple


class Instruction(NamedTuple):
    """One line: `%name = type opcode(operands), attributes`; constants begin with their value."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


@dataclasses.dataclass(frozen=True)
class Place:
    """An instruction, those beside it by name, its number of executions, and the places of its
    enclosing fusions, outermost first.
    """

    instruction: Instruction
    siblings: Mapping[str, Instruction]
    count: int
    computation: str
    within: tuple["Place", ...]


def parse(line: str) -> Instruction | None:
    """The instruction of a line; None: it has none."""
    start = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)
    if not start:
        return None
    rest = line[start.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    end = _closing("(" + rest) - 1
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[:end]))
    attributes = rest if opcode in ("constant", "parameter") else rest[end:]
    return Instruction(start[1], kind, opcode, operands, attributes)


def _closing(text: str) -> int:
    """The index of the bracket that closes the first one."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    return len(text)


def called_by(each: Instruction, role: str) -> list[str]:
    """The computations that an instruction calls in a role, such as body or calls."""
    match = re.search(rf"\b{role}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", each.attributes)
    if not match:
        return []
    return re.findall(r"[\w.\-]+", match[1]) if match[1] else [match[2]]


def parameters(body: dict[str, Instruction]) -> dict[int, str]:
    """{position: name} of a computation's parameters."""
    return {
        int(each.attributes.partition(")")[0]): each.name
        for each in body.values()
        if each.opcode == "parameter"
    }
