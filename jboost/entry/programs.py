# SPDX-License-Identifier: Apache-2.0
"""The cache of compiled programs.

In: a function, its static arguments, and operands. Out: the compiled program.

All functions of the library are compiled here, except for functions of the user
(metrics, inverse links), whose programs ``jax.jit`` keeps only as long as they exist,
and the few programs of small predictions, which looking up a key would delay.

Key: the function, its static arguments, the arguments that it may overwrite, the
structure, shapes and dtypes of the operands, the implementation in force, whether
arrays are put on a CPU, and whether it becomes part of a program. Static arguments are
compared by value.

Bound: MOST_PROGRAMS, and SMALL times as many small ones (``jboost.entry.stages``). A
program takes MiB and dozens of memory mappings, of which Linux allows a process 65,530;
a small one takes a dozen. JAX keeps every program as long as its jitted function.
Therefore each key has one of its own, and the least recently used one is released.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import jax

from jboost.entry.decorators import is_tracing
from jboost.entry.devices import runs_on_cpu
from jboost.entry.implementation import current_implementation

MOST_PROGRAMS = 64  # a program that sorts rows takes up to 600 mappings
SMALL = 4
_programs: OrderedDict[Any, Any] = OrderedDict()
_small_programs: OrderedDict[Any, Any] = OrderedDict()
_lock = Lock()
num_made = [0]  # programs, so far


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
        # A part of another program is compiled with the options of the whole.
        is_part = is_tracing()
        place = current_implementation(), runs_on_cpu(), is_part
        key = *self, structure, described, *place
        make = partial(self._jit, is_part)
        if self.small:
            return _recall(_small_programs, SMALL * MOST_PROGRAMS, key, make)
        return _recall(_programs, MOST_PROGRAMS, key, make)

    def of_one_shape(self) -> Callable[..., Any]:
        """Returns the program for loops whose operands have the same shapes each time.

        It is looked up at the first call only, which saves 50 us later.
        """
        found: list[Any] = []

        def run(*operands):
            if not found:
                found.append(self.jitted(*operands))
            return found[0](*operands)

        return run

    def _jit(self, is_part):
        bound = partial(self.function, *self.static)
        effort = None if is_part else self.effort
        options = None if effort is None else dict(effort.known())
        return jax.jit(bound, donate_argnums=self.donate, compiler_options=options)


def compiled(
    function: Callable[..., Any],
    *static: Any,
    donate: tuple[int, ...] = (),
    effort: Any = None,
    small: bool = False,
) -> Compiled:
    """Returns a program: ``function`` compiled, with its static arguments bound.

    Args:
      function: called as ``function(*static, *operands)``; operands may be traced.
      static: hashable arguments.
      donate: which operands the program may overwrite with its results.
      effort: of :mod:`jboost.entry.efforts`, unless the program becomes part of
        another one; None for programs without a loss.
      small: whether the program is small, so that more such programs are kept.
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
        num_made[0] += 1
        made = programs[key] = make()
        excess = max(0, len(programs) - most)
        released = [programs.popitem(last=False)[1] for _ in range(excess)]
    for old in released:
        old.clear_cache()  # now: reference cycles would keep the program for a while
    return made
