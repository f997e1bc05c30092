# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: a bounded store of them, and the memory that they take.

In: a function and its operands, or shapes like theirs. Out: its program; bytes.

A program takes one to several MiB and dozens of memory mappings, of which Linux allows
a process 65,530. JAX keeps every program for as long as its jitted function exists, one
for each combination of shapes. Here each combination has a jitted function of its own,
and the least recently used is released.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jboost.entry.implementation import current_implementation

MOST_PROGRAMS = 64  # one with sorted rows takes up to 600 mappings
_programs: OrderedDict[Any, Any] = OrderedDict()
_lock = Lock()


def compiled(function: Callable[..., Any], *static: Any) -> Callable[..., Any]:
    """``function`` with its static arguments bound, jitted; operands may be traced.

    The static arguments are compared, so that equal losses share programs.
    """
    return partial(_call, function, static)


def _call(function, static, *operands):
    return jitted(function, static, *operands)(*operands)


def jitted(
    function: Callable[..., Any], static: tuple[Any, ...], *operands: Any
) -> Callable[..., Any]:
    """The jitted function that :func:`compiled` calls for these operands."""
    leaves, structure = jax.tree.flatten(operands)
    described = tuple(map(_describe, leaves))
    key = function, static, structure, described, current_implementation()
    return _recall(key, lambda: jax.jit(partial(function, *static)))


def program(
    function: Callable[..., Any],
    static: tuple[Any, ...],
    *operands: Any,
    donate: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """``function`` compiled ahead of time for these operands, or for such shapes."""
    leaves, structure = jax.tree.flatten(operands)
    shapes = tuple(
        jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves
    )

    def compile_now():
        run = jax.jit(partial(function, *static), donate_argnums=donate)
        return run.lower(*jax.tree.unflatten(structure, shapes)).compile()

    key = function, static, structure, shapes, donate, current_implementation()
    return _recall(key, compile_now)


def run(
    function: Callable[..., Any],
    static: tuple[Any, ...],
    *operands: Any,
    donate: tuple[int, ...] = (),
) -> Any:
    """Compiles, if need be, and calls."""
    config: Any = jax.config
    if config.jax_disable_jit:  # compiled programs refuse to run then
        return function(*static, *operands)
    return program(function, static, *operands, donate=donate)(*operands)


def _describe(leaf):
    """The shape and type of an operand."""
    dtype = getattr(leaf, "dtype", None)
    return (type(leaf),) if dtype is None else (leaf.shape, dtype)


def _recall(key, make):
    """The program that is stored under the key, or a new one."""
    with _lock:
        if key in _programs:
            _programs.move_to_end(key)
            return _programs[key]
    made = make()  # without the lock: tracing and compiling may call the user's code
    with _lock:
        made = _programs.setdefault(key, made)
        excess = max(0, len(_programs) - MOST_PROGRAMS)
        released = [_programs.popitem(last=False)[1] for _ in range(excess)]
    for old in released:
        # Frees the program now; reference cycles would keep it for a while.
        getattr(old, "clear_cache", lambda: None)()
    return made


def count_bytes(arrays: Any) -> int:
    """What arrays, or shapes of such, take."""
    return sum(
        math.prod(np.shape(leaf)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(arrays)
    )


def added_bytes(executable: Any) -> int:
    """What a program takes beside its operands: its results and its own room."""
    found = executable.memory_analysis()
    if found is None:
        return 0
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return max(0, results) + found.temp_size_in_bytes
