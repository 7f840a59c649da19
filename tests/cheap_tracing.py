"""Quicker tracing for tests, whose models take longer to trace than to run.

Three things that JAX and Flax do again and again are done once; results stay the same. Processes
that tests start do without.
"""

import functools

import jax
import numpy as np
from flax.core import meta, scope
from jax._src.interpreters import mlir

_PROGRAMS_OF_A_CONTEXT = 200


def use_cheap_tracing() -> None:
    """Change Flax's parameters and JAX's lowering in this process."""
    scope.Scope.param = _param
    mlir.make_ir_context = _ContextOfMany(mlir.make_ir_context)


_param_of_flax = scope.Scope.param


def _param(self, name, init_fn, *args, unbox=True, **kwargs):
    """`Scope.param`, which traces the initialiser once for each shape.

    Flax traces it whenever a module is applied, only to compare the shape of its result.
    """
    if not _is_plain(args) or kwargs:
        return _param_of_flax(self, name, init_fn, *args, unbox=unbox, **kwargs)
    if self.has_variable("params", name):
        value = self.get_variable("params", name)
        plain = meta.unbox(value)
        if np.shape(plain) == args[0]:
            self.reserve(name, "params")
            return plain if unbox else value
        return _param_of_flax(self, name, init_fn, *args, unbox=unbox)
    return _param_of_flax(self, name, _traced_once(init_fn), *args, unbox=unbox)


def _is_plain(args) -> bool:
    """Whether an initialiser gets a shape and perhaps a dtype."""
    return 1 <= len(args) <= 2 and isinstance(args[0], tuple) and {*map(type, args[0])} <= {int}


def _traced_once(init_fn):
    try:
        return _jitted(_Initialiser(init_fn))
    except (AttributeError, TypeError):  # no function, or one with unhashable variables
        return init_fn


class _Initialiser:
    """A function that equals those of the same code and variables."""

    def __init__(self, function):
        cells = function.__closure__ or ()
        variables = tuple(cell.cell_contents for cell in cells)
        self.function = function
        self._key = function.__code__, function.__defaults__, variables

    def __hash__(self):
        return hash(self._key)

    def __eq__(self, other):
        return self._key == other._key


@functools.cache
def _jitted(initialiser):
    return jax.jit(initialiser.function, static_argnums=(1, 2))


class _ContextOfMany:
    """Makes a new MLIR context, into which all dialects are loaded, for every 200th program."""

    def __init__(self, make):
        self._make, self._count, self._context = make, 0, None

    def __call__(self):
        if self._count % _PROGRAMS_OF_A_CONTEXT == 0:
            self._context = self._make()
        self._count += 1
        return self._context
