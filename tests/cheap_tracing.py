"""Quicker tracing for tests, whose models take longer to trace than to run.

Flax traces an initialiser whenever a module is applied, and a whole model whenever it is
initialised; JAX loads MLIR's dialects for every program. Here each initialiser is traced once for
each shape, each model once for each shape of images, and dialects are loaded once for many
programs. Results stay the same. Processes that tests start trace as users do.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator

import flax.linen as nn
import jax
import numpy as np
from flax.core import meta, scope
from flax.linen import module
from jax._src.interpreters import mlir

_PROGRAMS_OF_A_CONTEXT = 200


def use_cheap_tracing() -> None:
    """Change Flax's parameters and JAX's lowering in this process."""
    scope.Scope.param = _param
    nn.Module.init = _init
    mlir.make_ir_context = ContextOfMany(mlir.make_ir_context)


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
    return _param_of_flax(self, name, traced_once(init_fn, len(args)), *args, unbox=unbox)


_init_of_flax = nn.Module.init
_UNPATCHED = 0
_patched = itertools.count(1)
_patches = _UNPATCHED


@contextlib.contextmanager
def models_of_a_patch() -> Iterator[None]:
    """Trace models anew meanwhile, since a test changes the functions that they call."""
    global _patches
    _patches = next(_patched)
    yield
    _patches = _UNPATCHED


@functools.wraps(_init_of_flax)
def _init(self, rngs, *args, **kwargs):
    """`Module.init`, which traces equal models once for each shape of their arguments."""
    of_arrays = all(isinstance(x, jax.Array | np.ndarray) for x in args)
    is_plain = self.scope is None and of_arrays and not kwargs and _is_hashable(self)
    is_watched = module._context.call_info_stack or [*module._global_interceptor_stack]
    if not is_plain or is_watched:
        return _init_of_flax(self, rngs, *args, **kwargs)
    return _init_traced_once(self, _patches, rngs, *args)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _init_traced_once(model, patches, rngs, *args):
    del patches
    return _init_of_flax(model, rngs, *args)


def _is_hashable(model) -> bool:
    try:
        hash(model)
    except TypeError:
        return False
    return True


def _is_plain(args) -> bool:
    """Whether an initialiser gets a shape and perhaps a dtype."""
    return 1 <= len(args) <= 2 and isinstance(args[0], tuple) and {*map(type, args[0])} <= {int}


def traced_once(init_fn, num_args):
    """`init_fn`, compiled together with those that are the same function of the same values.

    `num_args`: number of its arguments after the key, a shape and perhaps a dtype.
    """
    try:
        return _jitted(_Initialiser(init_fn), num_args)
    except (AttributeError, TypeError):  # no function, or one with unhashable variables
        return init_fn


class _Initialiser:
    """A function that equals those of the same code, module, object, defaults and variables.

    Values are the same if they are equal and of one type: 1 gives other arrays than 1.0 or True.
    """

    def __init__(self, function):
        values = (
            getattr(function, "__self__", None),  # of a method
            *(cell.cell_contents for cell in function.__closure__ or ()),
            *(function.__defaults__ or ()),
            *(function.__kwdefaults__ or {}).values(),
        )
        self.function = function
        self._key = (
            function.__code__,
            id(function.__globals__),
            values,
            tuple(type(value) for value in values),
        )

    def __hash__(self):
        return hash(self._key)

    def __eq__(self, other):
        return self._key == other._key


@functools.cache
def _jitted(initialiser, num_args):
    return jax.jit(initialiser.function, static_argnums=range(1, 1 + num_args))


class ContextOfMany(threading.local):
    """Makes a new MLIR context, into which all dialects are loaded, for every 200th program.

    Every thread has its own, because a context serves one thread at a time.
    """

    def __init__(self, make):
        self._make, self._count, self._context = make, 0, None

    def __call__(self):
        if self._count % _PROGRAMS_OF_A_CONTEXT == 0:
            self._context = self._make()
        self._count += 1
        return self._context
