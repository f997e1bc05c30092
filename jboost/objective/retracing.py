# SPDX-License-Identifier: Apache-2.0
"""Traces a loss once, for loops that call ``boost_step`` round by round.

An earlier result of :func:`jboost.objective.tracing.trace_loss` is reused if the
function, the values that it reads, and the shapes of the targets are the same.
"""

import inspect
import weakref
from collections.abc import Hashable, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jboost.entry.decorators import is_tracing
from jboost.entry.programs import IdentityCache
from jboost.losses import Adaptive, Likelihood
from jboost.objective.group_tracing import trace_group_loss
from jboost.objective.tracing import trace_loss

_traced = IdentityCache()
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
# Functions of these packages always compute the same result.
_STABLE = ("jax", "jboost", "numpy", "optax", "functools", "math", "builtins")


class _UnknownState(Exception):
    """A loss reads an object that may change in place."""


def trace_loss_once(
    loss: Any,
    targets: Any,
    num_scores: int = 1,
    curvature: Any = None,
    widths: Sequence[int] | None = None,
    weighted: bool = False,
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the result of ``trace_loss``, cached as long as the loss lives.

    Loss and curvature are traced again if a number, an array or a function that they
    read (from a closure, defaults or global variables) was replaced. Functions that
    read objects that may change in place, such as NumPy arrays, are always traced.

    ``widths``, for :func:`trace_group_loss`, is None for a loss of one row.
    """

    def trace():
        if widths is None:
            return trace_loss(loss, targets, num_scores, curvature)
        return trace_group_loss(loss, targets, widths, num_scores, weighted)

    if is_tracing():  # a compiled step traces once; its tracers must not be kept
        return trace()
    leaves, structure = jax.tree.flatten(targets)
    try:
        reads = _describe((loss, curvature), {})
    except _UnknownState:
        return trace()
    shapes = tuple((a.shape, a.dtype) for a in leaves)
    grouped = None if widths is None else (*widths, weighted)
    return _traced.recall(loss, (reads, structure, shapes, num_scores, grouped), trace)


def _describe(value: Any, seen: dict[int, Any]) -> Hashable:
    """Returns a key that two values share only if they compute the same.

    Raises :class:`_UnknownState` if the value may change in place.
    """
    if isinstance(value, _SCALARS):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(_describe(each, seen) for each in value)
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        return _Identity(value)
    if isinstance(value, ModuleType | BuiltinFunctionType | type):
        return _Identity(value)
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, Adaptive):
        return _describe((value.loss, value.estimate, value.report), seen)
    if isinstance(value, Likelihood):
        return Likelihood, _describe(value.make_distribution, seen)
    if isinstance(value, partial):
        named = tuple(sorted(value.keywords.items()))
        return _describe((value.func, value.args, named), seen)
    if isinstance(value, FunctionType):
        return _Identity(value), _describe_reads(value, seen)
    inner = getattr(value, "__wrapped__", None)  # set by jax.jit
    if inner is not None:
        return _Identity(value), _describe(inner, seen)
    raise _UnknownState


def _describe_reads(function, seen):
    """Describes the values that a function reads besides its arguments."""
    if (function.__module__ or "").partition(".")[0] in _STABLE and (
        inspect.unwrap(function).__closure__ is None  # a decorator has one
    ):
        return ()
    try:
        closure = tuple(cell.cell_contents for cell in function.__closure__ or ())
    except ValueError as error:  # an empty cell
        raise _UnknownState from error
    names = sorted(_global_names(function.__code__) & function.__globals__.keys())
    reads = tuple(function.__globals__[name] for name in names)
    defaults = function.__defaults__ or ()
    named = tuple(sorted((function.__kwdefaults__ or {}).items()))
    return _describe((closure, reads, defaults, named), seen)


def _global_names(code):
    """Returns the names that the code, and functions within it, look up."""
    names = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, type(code)):
            names |= _global_names(constant)
    return names


class _Identity:
    """Compares an object by identity, without keeping it alive."""

    def __init__(self, value):
        self._number = id(value)
        try:
            self._find = weakref.ref(value)
        except TypeError as error:
            raise _UnknownState from error

    def __hash__(self):
        return self._number

    def __eq__(self, other):
        # The number of an object that died may have been given to another one.
        return isinstance(other, _Identity) and (
            self._find() is not None and self._find() is other._find()
        )
