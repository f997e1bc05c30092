# SPDX-License-Identifier: Apache-2.0
"""Runs an algorithm from the host in stages, or traces it as part of one program.

Compiling a program takes a time that grows with its length, and a program that contains
a loss is compiled for every new loss. An algorithm that evaluates the loss in a dozen
places is therefore run from the host at the start of training: within
:func:`run_in_stages` each function decorated with :func:`stage` is a program of its
own, and Python decides how often loops run and which branches are taken. Programs
without the loss serve all losses, and those that are not needed are not compiled.
Elsewhere (``jboost.boost``, cross-validation) the same functions become parts of the
program that is being traced.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from jboost.entry.context import is_on_cpu
from jboost.entry.decorators import fetch
from jboost.entry.programs import FEW, FULL, LIGHT, QUICK, WHOLE, compiled

_P = ParamSpec("_P")
_T = TypeVar("_T")
MANY = 2**18  # numbers in an operand that NumPy takes longer over than XLA
_NARROW = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32}
_ARRAY = "array"  # stands for an array among static operands
_from_host: ContextVar[bool] = ContextVar("from_host", default=False)
_for_host: ContextVar[bool] = ContextVar("for_host", default=False)


@contextmanager
def run_in_stages(on: bool = True) -> Iterator[None]:
    """Runs algorithms from the host within a ``with`` block; no operand is traced.

    Stages hand on NaN for points that are not known yet, so that ``jax_debug_nans`` is
    off in the block.
    """
    hands_nan = on and jax.config.jax_debug_nans  # type: ignore[attr-defined]
    token = _from_host.set(on)
    try:
        with jax.debug_nans(False) if hands_nan else nullcontext():
            yield
    finally:
        _from_host.reset(token)


def for_host(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a program that the host calls, so that it is never differentiated."""

    @functools.wraps(function)
    def run(*operands: _P.args, **keywords: _P.kwargs) -> _T:
        token = _for_host.set(True)
        try:
            return function(*operands, **keywords)
        finally:
            _for_host.reset(token)

    return run


def stage(
    function: Callable[_P, _T], *, any_rounding: bool = False
) -> Callable[_P, _T]:
    """Decorates a function of pytrees that may be compiled on its own.

    Leaves of operands that are not arrays (numbers of Python, the programs of a loss)
    are static, and so hashable.

    Args:
      any_rounding: whether a loss in it need not round as in the programs of rounds.
    """

    @for_host
    def traced(structure, static, *arrays):
        remaining = iter(arrays)
        leaves = [next(remaining) if leaf is _ARRAY else leaf for leaf in static]
        operands, keywords = jax.tree.unflatten(structure, leaves)
        with run_in_stages(False):
            return function(*operands, **keywords)  # type: ignore[call-arg]

    traced.__name__ = function.__name__  # which logs and profiles show

    def find(*operands, **keywords):
        leaves, structure = jax.tree.flatten((operands, keywords))
        arrays = [leaf for leaf in leaves if hasattr(leaf, "dtype")]
        static = tuple(_ARRAY if hasattr(leaf, "dtype") else leaf for leaf in leaves)
        effort = _choose_effort(arrays, static, any_rounding)
        program = compiled(traced, structure, static, effort=effort, small=True)
        return program, arrays

    @functools.wraps(function)
    def run(*operands: Any, **keywords: Any) -> Any:
        if not _from_host.get():
            return function(*operands, **keywords)  # type: ignore[call-arg]
        program, arrays = find(*operands, **keywords)
        return program(*arrays)

    run.find = find  # type: ignore[attr-defined]
    return run


def bind_stage(function: Any, *operands: Any) -> Callable[[Array], Any]:
    """Returns the program of a stage as a function of the last array alone.

    It is for loops: the other operands stay, and the program is looked up once.
    """
    program, arrays = function.find(*operands)
    run, fixed = program.jitted(*arrays), arrays[:-1]
    return lambda last: run(*fixed, last)


def elementwise(
    function: Callable[..., Any], *, in_loop: bool = False
) -> Callable[..., Any]:
    """Decorates ``function(numpy, *operands)``, which NumPy runs from the host.

    It is for stages that round alike wherever they run. With MANY numbers, or on
    another device than the CPU, compiling pays: they are a :func:`stage` there.

    Args:
      in_loop: whether results are arrays of NumPy. Others are put on the device, which
        takes longer than handing them to a program once or twice.
    """

    @functools.wraps(function)
    def traced(*operands: Any) -> Any:
        return function(jnp, *operands)

    staged = stage(traced)

    @functools.wraps(function)
    def run(*operands: Any) -> Any:
        if not _from_host.get():
            return traced(*operands)
        if not all(map(_is_at_hand, jax.tree.leaves(operands))):
            return staged(*operands)
        with np.errstate(all="ignore"):
            found = function(np, *jax.tree.map(np.asarray, fetch(operands)))
        found = jax.tree.map(_narrow, found)
        return found if in_loop else jax.device_put(found)

    return run


def _narrow(values):
    """Narrows 64-bit numbers to 32 bits, as JAX does without ``jax_enable_x64``."""
    narrow = _NARROW.get(values.dtype)
    return values if narrow is None else values.astype(narrow)


def _is_at_hand(leaf):
    """Returns whether NumPy computes with an operand before XLA has compiled that."""
    if not isinstance(leaf, jax.Array):
        return True
    return leaf.size <= MANY and is_on_cpu(leaf)


def _choose_effort(arrays, static, any_rounding):
    """Returns how much work to spend on a program, by the size of its operands.

    Programs of a loss of one score round as those of the rounds do, and those with many
    rows as the one program that shards start with, unless any rounding will do.
    """
    many = any(leaf.size > FEW for leaf in arrays)
    losses = [leaf for leaf in static if not isinstance(leaf, str | int | FunctionType)]
    several = all(getattr(loss, "num_scores", 1) > 1 for loss in losses)
    if not (losses or many):
        return QUICK
    if any_rounding or (several and not many):
        return LIGHT
    return FULL if many else WHOLE


def runs_in_stages() -> bool:
    """Returns whether algorithms run from the host."""
    return _from_host.get()


def may_be_differentiated() -> bool:
    """Returns whether the program being traced may be differentiated."""
    return not (_from_host.get() or _for_host.get())


def for_branches() -> Any:
    """Returns the module, NumPy or ``jax.numpy``, that computes conditions.

    From the host these are numbers that it needs at once: NumPy compiles nothing.
    """
    return np if _from_host.get() else jnp


def is_any(rows: Array) -> Any:
    """Returns whether a row is true, as a condition."""
    return for_branches().any(for_branches().asarray(rows))


def unless_idle(predicate: ArrayLike, step: Callable[[Any], Any], state: Any) -> Any:
    """Returns ``step(state)``; from the host only where the predicate holds.

    The step must return the state where the predicate does not hold.
    """
    return step(state) if not _from_host.get() or predicate else state


def repeat_while(
    unfinished: Callable[[Any], ArrayLike], step: Callable[[Any], Any], state: Any
) -> Any:
    """Repeats a step while unfinished: ``jax.lax.while_loop``, or a Python loop."""
    if not _from_host.get():
        return jax.lax.while_loop(unfinished, step, state)
    while unfinished(state):
        state = step(state)
    return state


def repeat(number: int, step: Callable[[Any, Any], Any], state: Any) -> Any:
    """Runs steps 0 to number - 1: ``jax.lax.fori_loop``, or a Python loop."""
    if not _from_host.get():
        return jax.lax.fori_loop(0, number, step, state)
    for turn in range(number):
        state = step(np.int32(turn), state)
    return state


def map_points(function: Callable[[Any], Any], points: Any) -> Any:
    """Maps a function over points: ``jax.lax.map``, or a loop with NumPy results."""
    if not _from_host.get():
        return jax.lax.map(function, points)
    found = [function(point) for point in np.asarray(points)]
    return np.stack(fetch(found))


def branch(
    predicate: ArrayLike,
    yes: Callable[..., Any],
    no: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Calls one of two functions: ``jax.lax.cond``, or a Python branch."""
    if not _from_host.get():
        return jax.lax.cond(predicate, yes, no, *operands)
    return yes(*operands) if predicate else no(*operands)


def switch(index: Array | int, branches: Sequence[Callable[[], Any]]) -> Any:
    """Calls one of the branches: ``jax.lax.switch``, or Python for a known index."""
    if isinstance(index, int) or _from_host.get():
        return branches[int(index)]()
    return jax.lax.switch(index, branches)
