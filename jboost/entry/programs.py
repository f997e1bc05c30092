# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled programs, and the memory that programs need.

In: a function, its static arguments, and operands or shapes like theirs. Out: the
compiled program, or the number of bytes that it needs.

This is the one way to compile a function of the library. Two kinds of functions do
not pass through it. Functions of the user (metrics, inverse links) are compiled with
``jax.jit``, which keeps a program only as long as its function exists. Programs that
are called once per prediction of a single row are jitted where they are defined,
because looking up a key takes longer than they run.

Key: the function, its static arguments, the arguments that it may overwrite, the
structure, shapes and dtypes of the operands, and the implementation in force. Static
arguments are compared by value, so that equal losses share programs.

Bound: MOST_PROGRAMS, and SMALL times as many small ones (``jboost.entry.stages``). A
program takes one to several MiB and dozens of memory mappings, of which Linux allows a
process 65,530; a small one takes a dozen. JAX keeps every program for as long as its
jitted function exists, one for each combination of shapes. Therefore each key has a
jitted function of its own, and the least recently used one is released.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import jax
import numpy as np

from jboost.entry.implementation import current_implementation

MOST_PROGRAMS = 64  # a program that sorts rows takes up to 600 mappings
SMALL = 4
_programs: OrderedDict[Any, Any] = OrderedDict()
_small_programs: OrderedDict[Any, Any] = OrderedDict()
_lock = Lock()


class Compiled(NamedTuple):
    """A function that is compiled for each combination of shapes; see `compiled`."""

    function: Callable[..., Any]
    static: tuple[Any, ...]
    donate: tuple[int, ...]
    effort: Any
    small: bool

    def __call__(self, *operands: Any) -> Any:
        """Compiles the function if it has to, and calls it."""
        return self.jitted(*operands)(*operands)

    def jitted(self, *operands: Any) -> Any:
        """Returns the jitted function for operands (or shapes) like these."""
        leaves, structure = jax.tree.flatten(operands)
        described = tuple(map(_describe, leaves))
        key = *self, structure, described, current_implementation()
        if self.small:
            return _recall(_small_programs, SMALL * MOST_PROGRAMS, key, self._jit)
        return _recall(_programs, MOST_PROGRAMS, key, self._jit)

    def of_one_shape(self) -> Callable[..., Any]:
        """Returns the program for loops whose operands have the same shapes each time.

        It is looked up at the first call only, which saves the later ones half a
        hundred microseconds.
        """
        found: list[Any] = []

        def run(*operands):
            if not found:
                found.append(self.jitted(*operands))
            return found[0](*operands)

        return run

    def added_bytes(self, *operands: Any) -> int:
        """Compiles for such shapes; returns the bytes needed besides the operands.

        A later call with operands of these shapes does not compile again.
        """
        return added_bytes(self.jitted(*operands).lower(*operands).compile())

    def _jit(self):
        bound = partial(self.function, *self.static)
        options = dict(self.effort.known()) if self.effort else None
        return jax.jit(bound, donate_argnums=self.donate, compiler_options=options)


def compiled(
    function: Callable[..., Any],
    *static: Any,
    donate: tuple[int, ...] = (),
    effort: Any = None,
    small: bool = False,
) -> Compiled:
    """Returns ``function`` compiled, with its static arguments bound.

    Args:
      function: called as ``function(*static, *operands)``.
      static: hashable arguments.
      donate: which operands the program may overwrite with its results.
      effort: of :mod:`jboost.entry.efforts`; None for ``FULL``.
      small: whether the program is small, so that more such programs are kept.

    Returns:
      A program, to be called with the operands, which may be traced.
    """
    return Compiled(function, static, donate, effort, small)


def _describe(leaf):
    """Returns the shape and dtype of an operand."""
    dtype = getattr(leaf, "dtype", None)
    return (type(leaf),) if dtype is None else (leaf.shape, dtype)


def _recall(programs, most, key, make):
    """Returns the function that is stored under the key, or stores a new one."""
    with _lock:
        if key in programs:
            programs.move_to_end(key)
            return programs[key]
        made = programs[key] = make()
        excess = max(0, len(programs) - most)
        released = [programs.popitem(last=False)[1] for _ in range(excess)]
    for old in released:
        old.clear_cache()  # now: reference cycles would keep the program for a while
    return made


def count_bytes(arrays: Any) -> int:
    """Returns the size of a pytree of arrays, or of shapes."""
    return sum(
        math.prod(np.shape(leaf)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(arrays)
    )


def added_bytes(executable: Any) -> int:
    """Returns what a program needs besides its operands: results and scratch."""
    found = executable.memory_analysis()
    if found is None:
        return 0
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return max(0, results) + found.temp_size_in_bytes
