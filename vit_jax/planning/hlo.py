"""Parses the text of a program compiled by XLA: collectives, FLOPs, HBM traffic, estimated cycles.

A loop's body appears once in the text; all counts here multiply it by the loop's trip count.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from vit_jax.planning.instructions import Instruction, Place, called_by, parameters, parse
from vit_jax.planning.padding import real_share
from vit_jax.planning.products import count_flops, dtype_of, is_exact, target_of_call

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all",
               "collective-broadcast")  # fmt: skip
_DTYPE_BITS = {"pred": 8, "bf16": 16, "s4": 4, "u4": 4}
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](?:\{([^{}]*)\})?")
# These take no time and move no bytes; the computations that they call may.
_FREE = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "call",
         "conditional", "after-all", "partition-id", "replica-id")  # fmt: skip
_WORKSPACE = re.compile(r", [us]8\[\d+\](\{[^{}]*\})?\)$")  # the last result of a library's call
_ON_CHIP = re.compile(r"S\([1-9]\d*\)")  # a layout's memory space; HBM has none


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    kind: all-gather, all-reduce, ...
    groups: the groups of devices that communicate, by device number in mesh order; for a
      collective-permute the pairs (from, to).
    size: bytes of the operation's input or output on one device, whichever is larger.
    count: number of executions per step.
    asynchronous: whether computation continues in the meantime.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    size: int
    count: int
    asynchronous: bool

    @property
    def sent(self) -> float:
        """Bytes that a device sends per execution, by the ring algorithm."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.size
        n = len(self.groups[0])
        return self.size * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)


@dataclasses.dataclass(frozen=True)
class Work:
    """The work and the bytes of one instruction of a program per execution, on one device.

    name: the instruction's.
    kind: the function that it calls, the kind of a fusion, or its opcode.
    count: number of executions per step.
    flops: {(dtype of the operands, whether it is exact): FLOPs} of its products.
    bytes: read from and written to HBM.
    """

    name: str
    kind: str
    count: int
    flops: Counter[tuple[str, bool]]
    bytes: int


class Program:
    """A compiled program, parsed from its text.

    Args:
      text: `jax.stages.Compiled.as_text()`.
    """

    def __init__(self, text: str):
        self._computations: dict[str, dict[str, Instruction]] = {}
        self._entry: str | None = None
        partitions = re.search(r"num_partitions=(\d+)", text)
        self.num_devices = int(partitions[1]) if partitions else 1
        current = None
        for line in text.splitlines():
            if line.endswith("{") and (start := re.match(r"(ENTRY )?%?([\w.\-]+) \(", line)):
                current = self._computations.setdefault(start[2], {})
                self._entry = start[2] if start[1] else self._entry
            elif current is not None and (parsed := parse(line)):
                current[parsed.name] = parsed
        if self._entry is None:
            raise ValueError("no entry computation: this is not the text of a compiled program")

    def executed(self, computation: str | None = None) -> Iterator[Instruction]:
        """The instructions outside of fusions, in the order in which they start, loops repeated."""
        assert self._entry is not None
        for each in self._computations[computation or self._entry].values():
            yield each
            bodies = called_by(each, "branch_computations") if each.opcode == "conditional" else []
            if each.opcode == "while":
                times = self._trip_count(each, *called_by(each, "condition"))
                bodies = called_by(each, "body") * times
            elif each.opcode == "call":
                bodies = called_by(each, "to_apply")
            for body in bodies:
                yield from self.executed(body)

    def collectives(self) -> list[Collective]:
        """All collectives of the program; see `_collectives`."""
        return [each for each in self._collectives().values() if len(each.groups[0]) > 1]

    def started(self) -> dict[str, Collective]:
        """{name of the instruction that starts it: collective}, for programs of GPUs.

        There one instruction starts each collective.
        """
        found = self._collectives().items()
        return {name: each for (*_, name), each in found if len(each.groups[0]) > 1}

    def _collectives(self) -> dict[tuple, Collective]:
        """{key: collective}; a key ends with the instruction's name, or with what several share.

        An asynchronous collective appears in several fusions (start, steps, end) with one chain,
        or else one channel, and is counted once, also if a loop runs between its start and its end
        and takes its steps. Others may share a channel. An all-reduce whose
        result each device slices is reported as a reduce-scatter.
        """
        found: dict[tuple, Collective] = {}
        for place in self._places():
            each = place.instruction
            between_slices = _between_slices(each, self.num_devices, place.count)
            if between_slices is not None:
                found[place.computation, each.name] = between_slices
                continue
            kind = each.opcode.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            within = [outer.instruction for outer in place.within]
            fused = [called for outer in within for called in called_by(outer, "calls")]
            asynchronous = each.opcode != kind or any("async" in name for name in fused) or any(
                outer.name.startswith("async") for outer in within
            )  # fmt: skip
            # On GPUs all collectives start and end; between some of them nothing is computed.
            asynchronous = asynchronous and '"is_sync":true' not in each.attributes
            channel = re.search(r"channel_id=(\d+)", each.attributes)
            chain = re.search(r'chain_id="(\d+)"', each.attributes)
            number = chain or (channel if place.within else None)
            where = channel[1] if chain and channel else place.computation
            key = (where, kind, bool(chain), number[1] if number else each.name)
            groups = _groups(each.attributes, self.num_devices)
            if each.opcode != kind:
                size = _started_bytes(each)
            else:
                size = _bytes(each.type) * (len(groups[0]) if kind == "reduce-scatter" else 1)
            if kind == "all-reduce" and any("all-reduce-scatter" in name for name in fused):
                kind = "reduce-scatter"
            earlier = found.get(key)
            found[key] = Collective(
                kind,
                groups,
                max(size, earlier.size if earlier else 0),
                min(place.count, earlier.count if earlier else place.count),
                asynchronous or bool(earlier and earlier.asynchronous),
            )
        return found

    def products(self) -> Counter[str]:
        """{type of the result: how often a device computes a matrix product with it}."""
        found: Counter[str] = Counter()
        for place in self._places():
            if place.instruction.opcode == "dot":
                found[place.instruction.type] += place.count
        return found

    def cycles(self) -> int | None:
        """The compiler's estimate of a step's computation in cycles; None if it gives none.

        The estimate includes neither collectives nor hand-written kernels (kernel_cycles.py).
        """
        total, found = 0, False
        for place in self._places():
            estimate = re.search(r'"estimated_cycles":"(\d+)"', place.instruction.attributes)
            if estimate and not place.within:
                total, found = total + place.count * int(estimate[1]), True
        return total if found else None

    def bytes_accessed(self) -> int:
        """Bytes that a device reads from and writes to HBM in a step.

        If a fusion reads or writes only a slice of an array, only that slice counts.
        """
        return sum(work.count * work.bytes for work in self.work)

    @functools.cached_property
    def work(self) -> list[Work]:
        """The instructions that run one after the other, without those inside of fusions."""
        found: list[Work] = []
        for place in self._places():
            each, siblings = place.instruction, place.siblings
            types = [siblings[name].type for name in each.operands if name in siblings]
            if not place.within and each.opcode not in _FREE and not each.opcode.endswith("-done"):
                number = self._bytes_of(each, siblings)
                found.append(Work(each.name, _kind(each), place.count, Counter(), number))
            if count_flops(each.opcode, each.attributes, each.type, types):
                real = [real_share(place, name, self._computations) for name in each.operands[:2]]
                flops = count_flops(each.opcode, each.attributes, each.type, types, real)
                kind = dtype_of(types[0]), is_exact(each.attributes)
                found[-1].flops[kind] += flops * place.count // found[-1].count
        return found

    def _bytes_of(self, each: Instruction, siblings: Mapping[str, Instruction]) -> int:
        types = [siblings[name].type for name in each.operands if name in siblings]
        if each.opcode in ("copy-start", "slice-start"):  # (result, operand, context)
            return sum(map(_hbm_bytes, _elements(each.type)[:2]))
        if each.opcode.endswith("-start"):
            return _hbm_bytes(each.type)
        if each.opcode == "dynamic-slice":
            return 2 * _hbm_bytes(each.type)
        if each.opcode == "dynamic-update-slice":
            return 2 * _hbm_bytes(types[1])
        body = next((self._computations.get(name, {}) for name in called_by(each, "calls")), {})
        read = [_hbm_bytes(kind) for kind in types]
        written = _hbm_bytes(_WORKSPACE.sub("", each.type) if _calls_library(each) else each.type)
        for i, parameter in parameters(body).items():
            users = [other for other in body.values() if parameter in other.operands]
            if i >= len(read) or not read[i] or not users:
                continue
            sliced = self._sliced_bytes(body, parameter)
            if sliced is not None:
                read[i] = sliced
            updates = [user for user in users if user.opcode == "dynamic-update-slice"
                       and user.operands[0] == parameter]  # fmt: skip
            if len(updates) == len(users) == 1:
                update = _bytes(body[updates[0].operands[1]].type)
                written += update - min(read[i], written)
                read[i] = 0
        return sum(read) + max(written, 0)

    def _sliced_bytes(self, body: dict[str, Instruction], name: str) -> int | None:
        """Bytes of the slices that a computation takes of the array `name`; None if it reads all.

        The slices may be taken in fusions within it.
        """
        total, users = 0, [each for each in body.values() if name in each.operands]
        for user in users:
            part: int | None = None
            if user.opcode in ("dynamic-slice", "slice") and user.operands[0] == name:
                part = _bytes(user.type)
            elif user.opcode == "bitcast":
                part = self._sliced_bytes(body, user.name)
            elif user.opcode == "fusion":
                inner = self._computations[called_by(user, "calls")[0]]
                at = [i for i, operand in enumerate(user.operands) if operand == name]
                parts = [self._sliced_bytes(inner, parameters(inner)[i]) for i in at]
                part = None if None in parts else sum(p for p in parts if p is not None)
            if part is None:
                return None
            total += part
        return total if users else None

    def _places(self) -> Iterator[Place]:
        assert self._entry is not None
        yield from self._walk(self._entry, 1, self._entry, ())

    def _walk(
        self, name: str, count: int, computation: str, within: tuple[Place, ...]
    ) -> Iterator[Place]:
        siblings = self._computations.get(name, {})
        for each in siblings.values():
            place = Place(each, siblings, count, computation, within)
            yield place
            if each.opcode == "while":
                (body,), (condition,) = called_by(each, "body"), called_by(each, "condition")
                times = count * self._trip_count(each, condition)
                yield from self._walk(body, times, body, within)
            elif each.opcode in ("call", "conditional"):
                called = called_by(each, "to_apply") + called_by(each, "branch_computations")
                for inner in called + called_by(each, "calls"):
                    yield from self._walk(inner, count, inner, within)
            else:
                for inner in called_by(each, "calls"):
                    yield from self._walk(inner, count, computation, (*within, place))

    def _trip_count(self, loop: Instruction, condition: str) -> int:
        """The trip count of a loop that counts from 0, as in `jax.lax.scan`; 1 if unknown."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        limits = [
            int(each.attributes.partition(")")[0])  # N of constant(N)
            for each in self._computations.get(condition, {}).values()
            if each.opcode == "constant" and re.match(r"[su]32\[\]", each.type)
        ]
        return limits[0] if len(limits) == 1 else 1


def _kind(each: Instruction) -> str:
    """The name of the instruction in a table of kernels."""
    if each.opcode != "fusion":
        return target_of_call(each.attributes) or each.opcode.removesuffix("-start")
    kinds = re.findall(r'"fusion_backend_config":\{"kind":"(\w+)"|\bkind=(\w+)', each.attributes)
    return f"fusion {next(filter(None, kinds[-1]))}" if kinds else "fusion"


def _calls_library(each: Instruction) -> bool:
    """Whether it calls cuBLAS or cuDNN, whose working memory is a result too."""
    return (target_of_call(each.attributes) or "").startswith("__cu")


def _elements(kind: str) -> list[str]:
    """The types of the arrays in a tuple type, or the array type itself."""
    return [match[0] for match in _ARRAY.finditer(kind)]


def _bytes(kind: str) -> int:
    """The bytes of an array or a tuple of arrays, from the text of its type."""
    return sum(_size(match) for match in _ARRAY.finditer(kind))


def _started_bytes(each: Instruction) -> int:
    """The input or output bytes of a collective's start, whichever are larger.

    Its type is (operands, results, contexts); several arrays form a tuple (first, second, ...). For
    an all-reduce the type is only the results.
    """
    sizes = list(map(_bytes, _elements(each.type)))
    number = len(each.operands)
    return max(sum(sizes[:number]), sum(sizes[number : 2 * number]))


def _hbm_bytes(kind: str) -> int:
    """The bytes in HBM of an array or a tuple of arrays, from the text of its type."""
    return sum(_size(m) for m in _ARRAY.finditer(kind) if not _ON_CHIP.search(m[3] or ""))


def _size(match: re.Match) -> int:
    dtype, dims = match[1], match[2]
    bits = _DTYPE_BITS.get(dtype) or int((re.search(r"\d+", dtype) or ["0"])[0])
    return math.prod(int(d) for d in dims.split(",") if d) * bits // 8


def _between_slices(each: Instruction, in_slice: int, count: int) -> Collective | None:
    """The collective between TPU slices that a send begins, through the hosts; else None.

    The program is for one slice of `in_slice` devices; each device communicates with its
    counterparts in the other slices.
    """
    told = re.search(r'_xla_megascale_transfer_type="(\w+)"', each.attributes)
    if each.opcode != "send" or told is None:
        return None
    kind = {"ONE_TO_ONE": "collective-permute"}.get(told[1], told[1].lower().replace("_", "-"))
    slices = re.search(r'_xla_megascale_target="\{([^}]*)\}', each.attributes)
    ids = re.findall(r"(\d+)(?::(\d+))?", slices[1]) if slices else []  # 5:8 means 5 to 8
    number = sum(int(last or first) - int(first) + 1 for first, last in ids) or 2
    groups = tuple(tuple(range(i, number * in_slice, in_slice)) for i in range(in_slice))
    size = _bytes(_elements(each.type)[0]) * (number if kind == "all-gather" else 1)
    return Collective(kind, groups, size, count, asynchronous=True)


def _groups(attributes: str, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that communicate, from any of XLA's three notations."""
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    if pairs:
        return _listed(pairs[1])
    mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}", attributes
    )
    if mesh:
        return _along_mesh(*mesh.groups())
    text = re.search(r"replica_groups=(\{.*?\}\}|\[[^ ]*?\](?:T\([\d,]*\))?(?=,|$))", attributes)
    if text is None:
        return (tuple(range(num_devices)),)
    if text[1].startswith("{"):
        return _listed(text[1])
    shape, _, source = text[1].partition("<=")
    return tuple(map(tuple, _iota(source).reshape(_numbers(shape)).tolist()))


def _along_mesh(axes: str, device_ids: str | None, along_axes: str) -> tuple[tuple[int, ...], ...]:
    """Groups of devices along some axes of a mesh, or along parts of axes.

    Args:
      axes: sizes of the axes, e.g. 'a'=2,'b'=8.
      device_ids: the devices in mesh order, as an iota such as [8,2]T(1,0) or a list; None means
        0, 1, ...
      along_axes: e.g. 'a','b':(2)4, where (2)4 is the sub-axis of b of size 4 after one of size 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
    if device_ids is None:
        devices = np.arange(math.prod(sizes.values()))
    elif device_ids.startswith("["):
        devices = _iota(device_ids)
    else:
        devices = np.array(_numbers(device_ids))
    # Places that differ only along those (parts of) axes become the same place.
    places = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    for name, before, part in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", along_axes):
        size, place = sizes[name], places[list(sizes).index(name)]
        number = int(part or size)
        step = size // (int(before or 1) * number)
        place -= place // step % number * step
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, *place in zip(devices.ravel().tolist(), *places.tolist(), strict=True):
        groups.setdefault(tuple(place), []).append(device)
    return tuple(map(tuple, groups.values()))


def _iota(text: str) -> np.ndarray:
    """The numbers from 0 in the shape of e.g. [4,2]T(1,0) or [8], transposed as given."""
    shape, _, order = text.partition("T")
    values = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return values.transpose(_numbers(order)) if order else values


def _listed(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d, ]+)", text))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
