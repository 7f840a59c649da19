"""The memory of a program's intermediate values, counted on its jaxpr.

XLA fuses an elementwise operation into what reads its result, and computes it again for every
reader. So only some values take memory: the results of products, reductions, kernels and loops. An
operation on the result of a product that nothing else reads belongs to the product. Every other
result is computed from values in memory wherever it is read, unless a product needs several of them
for it: then it takes memory too. A kernel or a loop reads only values in memory.

A value lives until its last reader, in the order of the jaxpr. A loop keeps all that it stacks, and
while it runs, what one pass needs. Nothing is computed again beyond what the jaxpr says
(`jax.checkpoint`).
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from vit_jax.devices.flops import array_of

_LANES = 128
# Where `fsdp` splits the weights, XLA for GPUs takes so much more than the values of one pass of a
# loop, as it puts products for weights off to the end of the pass.
_GPU_PASS = 1.16
_PRODUCTS = ("dot_general", "conv_general_dilated")
_LOOPS = ("scan", "while", "cond")
# Calls that are part of the program around them. Under `shard_map` sizes are of one device.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint",
          "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map")  # fmt: skip
# Fused like elementwise operations.
_MOVES = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev", "slice",
          "pad", "split", "tile", "iota", "select_n", "clamp", "convert_element_type",
          "sharding_constraint", "copy", "random_fold_in", "random_seed", "random_split",
          "random_unwrap", "random_wrap")  # fmt: skip
# Elementwise, but too costly to compute again for every reader.
_COSTLY = ("erf", "erfc")
_RANDOM = ("random_bits", "rng_bit_generator", "threefry2x32")
# Their results are in memory; their operands are computed where they are read.
_READERS = ("arg", "cum", "reduce", "concatenate", "stack", "dynamic", "gather", "scatter",
            "select_and")  # fmt: skip


class Leaf(NamedTuple):
    """How a device holds an argument or an output of the program.

    share: the part of its elements. For an output, of one that a loop stacks.
    whole_share: the same for an output that no loop stacks.
    split: whether `tensor` splits it, which `share` includes.
    weight: whether it is a parameter.
    """

    share: float = 1.0
    whole_share: float = 1.0
    split: bool = False
    weight: bool = False


class _Rules(NamedTuple):
    """The last arguments of `peak_bytes`."""

    tensor: int
    platform: str
    scale: float


def peak_bytes(
    jaxpr: Jaxpr,
    arguments: Sequence[Leaf],
    outputs: Sequence[Leaf] = (),
    *,
    tensor: int = 1,
    platform: str = "tpu",
    scale: float = 1.0,
) -> int:
    """The most bytes on a device at one time, of all values but the arguments.

    Args:
      jaxpr: of one device, but for what `tensor` splits.
      arguments, outputs: of the jaxpr; without `outputs` each device holds them whole.
      tensor: number of devices over which heads and hidden units are split.
      platform: "tpu", which computes the operands of products where they are read, and pads one
        axis of an array to a multiple of 128; "gpu", which takes more for the passes of a loop over
        weights that `fsdp` splits; or another.
      scale: measured bytes over counted ones, of values other than those the outputs are made of.
    """
    return int(_Program(jaxpr, arguments, _Rules(tensor, platform, scale)).peak(outputs))


def all_bytes(jaxpr: Jaxpr) -> int:
    """The bytes of all values of a program together, of a loop's body once: no peak is higher."""
    values = [_bytes_of(var.aval) for eqn in jaxpr.eqns for var in eqn.outvars]
    return sum(values) + sum(all_bytes(inner) for eqn in jaxpr.eqns for inner in _inner_jaxprs(eqn))


def _bytes_of(aval: Any) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)


class _Value:
    """An array, and the values in memory that it is computed from: itself if it is in memory."""

    def __init__(self, aval: Any, leaf: Leaf | None = None):
        self.size = math.prod(aval.shape)
        self.bytes: float = _bytes_of(aval)
        self.leaf, self.split = leaf, leaf is not None and leaf.split
        self.roots: frozenset[_Value] = frozenset()
        self.operands: frozenset[_Value] = frozenset()  # its roots if it were not in memory
        self.source: _Value | None = None  # if computed from it only
        self.readers, self.by, self.padding = 0, "", 1.0
        self.born, self.dies = math.inf, -1.0
        self.narrow = 0.0  # bytes of an argument's copy in a narrower dtype

    def frees_from(self) -> float:
        """The time from which one of the values that it is computed from is not needed."""
        large = [root.dies for root in self.operands if 2 * root.bytes >= self.bytes]
        return min(large, default=-1.0)

    def live(self, time: float) -> None:
        self.born, self.dies = min(self.born, time), max(self.dies, time)


class _Operation(NamedTuple):
    eqn: JaxprEqn
    operands: list[_Value | None]  # None: a literal
    results: list[_Value]
    inner: "list[_Program]"  # of a loop


class _Program:
    """The operations of a jaxpr and of its calls, in order; number t runs at time 2 t."""

    def __init__(self, jaxpr: Jaxpr, leaves: Sequence[Leaf], rules: _Rules):
        self.rules = rules
        self.operations: list[_Operation] = []
        self.read: set[_Value] = set()  # by what reads from memory only
        self.arguments = [_Value(v.aval, f) for v, f in zip(jaxpr.invars, leaves, strict=True)]
        env: dict[Any, _Value | None] = dict(zip(jaxpr.invars, self.arguments, strict=True))
        self.outputs = self._add(jaxpr, env)
        for value in self.outputs:
            if value is not None:
                value.readers += 1

    def _add(self, jaxpr: Jaxpr, env: dict[Any, _Value | None]) -> list[_Value | None]:
        """Add the operations of `jaxpr`; return its outputs."""

        def read(var: Any) -> _Value | None:
            return None if isinstance(var, Literal) else env.get(var)

        for eqn in jaxpr.eqns:
            operands, inner = [read(var) for var in eqn.invars], _inner_jaxprs(eqn)
            if eqn.primitive.name in _CALLS and inner:
                inside = dict(zip(reversed(inner[0].invars), reversed(operands), strict=False))
                env.update(zip(eqn.outvars, self._add(inner[0], inside), strict=True))
                continue
            results = [_Value(var.aval) for var in eqn.outvars]
            if self.rules.platform == "tpu":
                _pad(eqn, operands, results)
            env.update(zip(eqn.outvars, results, strict=True))
            for value in {value for value in operands if value is not None}:
                value.readers += 1
            programs = []
            if eqn.primitive.name in _LOOPS:
                programs = [self._loop(j, operands) for j in inner]
            self.operations.append(_Operation(eqn, operands, results, programs))
            self._split(self.operations[-1])
        return [read(var) for var in jaxpr.outvars]

    def _loop(self, jaxpr: Jaxpr, operands: list[_Value | None]) -> "_Program":
        given = operands[len(operands) - len(jaxpr.invars) :]
        leaves = [
            Leaf() if v is None else (v.leaf or Leaf())._replace(split=v.split) for v in given
        ]
        return _Program(jaxpr, leaves, self.rules)

    def _split(self, operation: _Operation) -> None:
        """Say which results `tensor` splits."""
        eqn, operands, results, inner = operation
        splits = [value is not None and value.split for value in operands]
        if inner:
            outputs = [value is not None and value.split for value in inner[-1].outputs]
        elif eqn.primitive.name in _PRODUCTS and not _is_batched(eqn):
            outputs = [sum(splits) == 1]  # a product of two split operands sums over `tensor`
        else:
            outputs = [any(splits)] * len(results)
        for value, split in zip(results, outputs, strict=True):
            value.split = split
            if split:
                value.bytes /= self.rules.tensor

    def peak(self, outputs: Sequence[Leaf] = ()) -> float:
        """The most bytes at one time, and the shares of `outputs` applied."""
        working = {}
        for time, operation in enumerate(self.operations):
            if operation.inner:
                working[2 * time] = max(program.pass_peak() for program in operation.inner)
        in_memory: set[_Value] = set()
        while found := self._walk(in_memory) - in_memory:
            in_memory |= found
        # A product computes an operand again that would take no other value's place.
        self._walk({v for v in in_memory if v in self.read or v.dies > v.frees_from()})
        of_outputs = set().union(*(value.roots for value in self.outputs if value is not None))
        for value, leaf in zip(self.outputs, outputs, strict=False):
            if value is None:
                continue
            for root in value.roots:
                if root.size == value.size:
                    root.bytes *= leaf.share if root.by == "loop" else leaf.whole_share
        end = 2 * len(self.operations)
        changes = [0.0] * (end + 2)
        values = {root for op in self.operations for z in op.results for root in z.roots}
        for value in {v for v in values if v.dies >= 0} | self._narrow_copies():
            size = value.bytes * (1.0 if value in of_outputs else self.rules.scale)
            changes[int(value.born)] += size
            changes[int(value.dies) + 1] -= size
        now = itertools.accumulate(changes)
        return max(total + working.get(time, 0.0) for time, total in enumerate(now))

    def pass_peak(self) -> float:
        """The most bytes at one time of one pass of the loop whose body this is."""
        has_loop = any(operation.inner for operation in self.operations)
        leaves = [argument.leaf for argument in self.arguments if argument.leaf is not None]
        is_split = any(leaf.weight and leaf.share < 1 for leaf in leaves)
        puts_off = self.rules.platform == "gpu" and is_split and not has_loop
        return self.peak() * (_GPU_PASS if puts_off else 1.0)

    def _narrow_copies(self) -> set[_Value]:
        """Weights that loops read in a narrower dtype: XLA converts them before the loop."""
        copies: dict[_Value, _Value] = {}
        for time, (eqn, operands, results, inner) in enumerate(self.operations):
            if eqn.primitive.name == "convert_element_type" and operands[0] is not None:
                operands[0].narrow = results[0].bytes
            for program in inner:
                given = operands[len(operands) - len(program.arguments) :]
                for value, argument in zip(given, program.arguments, strict=True):
                    if value is None or value.leaf is None or not value.leaf.weight:
                        continue
                    if 0 < argument.narrow < argument.bytes:
                        copy = copies.setdefault(value, _Value(eqn.outvars[0].aval))
                        ratio = argument.narrow / argument.bytes
                        copy.bytes = value.leaf.share * value.bytes * ratio
                        copy.live(2 * time)
        return set(copies.values())

    def _walk(self, in_memory: set[_Value]) -> set[_Value]:
        """Find the roots of all values and their times; return values that must be in memory."""
        found: set[_Value] = set()
        for time, (eqn, operands, results, inner) in enumerate(self.operations):
            name, now = eqn.primitive.name, 2 * time
            read = [value for value in operands if value is not None]
            if _is_fused(eqn):
                self._fuse(read, results, in_memory, now)
                continue
            carried = _carried(eqn)
            for number, value in enumerate(operands):
                if value is None:
                    continue
                computes = name in _PRODUCTS and self.rules.platform == "tpu"
                if number in carried:  # the result takes its place
                    needed = False
                elif computes:
                    needed = sum(2 * root.bytes >= value.bytes for root in value.roots) > 1
                else:
                    needed = name not in _COSTLY and not name.startswith(_READERS)
                roots = self._roots(value, needed, in_memory, found)
                if needed and not computes:
                    self.read |= roots
                for root in roots:
                    root.live(now - (number in carried))
            for value in results:
                value.roots, value.born, value.dies = frozenset([value]), now, now
                value.by = "loop" if inner else "product" if name in _PRODUCTS + _RANDOM else ""
        for value in self.outputs:
            for root in () if value is None else value.roots:
                root.live(2 * len(self.operations))
        return found

    def _fuse(
        self,
        operands: Sequence[_Value],
        results: Sequence[_Value],
        in_memory: set[_Value],
        now: int,
    ) -> None:
        """Find the roots of the results of an elementwise operation."""
        roots = frozenset().union(*(value.roots for value in operands))
        for value in results:
            value.roots, value.by, value.born, value.dies = roots, "", math.inf, -1
            value.operands = roots
            value.source = operands[0] if len(operands) == 1 else None
            product = next((v for v in operands if _ends(v, value)), None)
            if product is None and value not in in_memory:
                continue
            for root in roots:
                root.live(now - 1)  # the result may take its place
            if product is not None:
                product.born, product.dies, value.by = math.inf, -1, "product"
                value.bytes = min(value.bytes, product.bytes)  # widened only while it is computed
            value.roots, value.born, value.dies = frozenset([value]), now, now

    def _roots(
        self, value: _Value, needed: bool, in_memory: set[_Value], found: set[_Value]
    ) -> frozenset[_Value]:
        """The values in memory from which an operand is read, itself if it is `needed` there."""
        if not needed or value in value.roots or not value.roots:
            return value.roots
        narrowest = value
        while value.source is not None and value.source.roots and value not in in_memory:
            value = value.source
            narrowest = value if value.bytes < narrowest.bytes else narrowest
        if narrowest not in narrowest.roots:
            found.add(narrowest)
        return narrowest.roots


def _pad(eqn: JaxprEqn, operands: Sequence[_Value | None], results: Sequence[_Value]) -> None:
    """Add the padding of one axis to whole lanes, of the axis that needs the least."""
    for value, var in zip(results, eqn.outvars, strict=True):
        value.padding = min(
            (-(-n // _LANES) * _LANES / n for n in array_of(var).shape if n), default=1.0
        )
        if _is_fused(eqn):  # in the layout of an operand
            like = [v.padding for v in operands if v is not None and v.size == value.size]
            value.padding = min([*like, value.padding])
        value.bytes *= value.padding


def _ends(operand: _Value, result: _Value) -> bool:
    """Whether `result` is written instead of the product `operand`, which nothing else reads."""
    return operand.by == "product" and operand.readers == 1 and operand.size == result.size


def _carried(eqn: JaxprEqn) -> range:
    """The numbers of the operands that a scan carries on."""
    if eqn.primitive.name != "scan":
        return range(0)
    first = eqn.params["num_consts"]
    return range(first, first + eqn.params["num_carry"])


def _is_batched(eqn: JaxprEqn) -> bool:
    """Whether a product is of many pairs of matrices, as of queries and keys."""
    return eqn.primitive.name == "dot_general" and bool(eqn.params["dimension_numbers"][1][0])


def _inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    found = jaxprs_in_params(eqn.params)
    return [jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr for jaxpr in found]


def _is_fused(eqn: JaxprEqn) -> bool:
    """Whether an operation is elementwise, or moves elements."""
    name = eqn.primitive.name
    if name in _MOVES:
        return True
    if name in _PRODUCTS + _COSTLY + _RANDOM or name.startswith(_READERS):
        return False
    if name in ("sort", "optimization_barrier") or len(eqn.outvars) != 1 or _inner_jaxprs(eqn):
        return False
    shape = array_of(eqn.outvars[0]).shape
    return all(
        len(given) in (0, len(shape))
        and all(size in (1, whole) for size, whole in zip(given, shape, strict=False))
        for given in (array_of(var).shape for var in eqn.invars)
    )
