# SPDX-License-Identifier: Apache-2.0
"""The caches: of compiled programs, and of values computed from an object.

Each key has its own jitted function; the least recently used ones are released.
"""

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache, partial
from threading import Lock
from typing import Any, NamedTuple

import jax
import numpy as np

from jboost.entry.context import current_implementation, default_platform, runs_on_cpu
from jboost.entry.decorators import is_tracing

_LEVEL = "xla_backend_optimization_level"
_LESS = (_LEVEL, 1)


class CompileOptions(NamedTuple):
    """An effort of the compiler.

    ``FULL`` is for losses of one score: their models have the bits of
    :func:`jboost.boost`. ``WHOLE`` does the same work in one piece, instead of a piece
    for each thread, which takes two thirds of the time and rounds alike: for few rows.
    ``LIGHT`` takes less than half the time, and the programs run as fast, but may round
    a sum of two products in another order. ``QUICK`` takes a sixth of the time, and is
    for short studies and for programs without a loss on few rows: arithmetic in it runs
    up to ten times as long. It does not contract a * b + c into one rounding, as the
    others do.

    ``GROUPS`` is for losses of groups with many rows: as ``LIGHT``, it does not unroll
    the short loops over the rows of a group. It takes down to a third of the time of
    ``FULL``. ``LOOP`` is ``FULL`` for programs that contain the rounds: a GPU runs
    their kernels as CUDA graphs. For others, which get new buffers in each call, a
    graph would have to be recorded anew.
    """

    options: tuple[tuple[str, Any], ...]
    graphs: bool = False

    def known(self) -> tuple[tuple[str, Any], ...]:
        """Returns the options that XLA knows; a level in XLA_FLAGS is not raised."""
        if default_platform() in ("gpu", "cuda"):
            return () if self.graphs else _find_known(NO_GRAPHS)
        names = _find_known(QUICK.options) if self.options and runs_on_cpu() else ()
        kept = _LEVEL in os.environ.get("XLA_FLAGS", "")
        options = (each for each in self.options if not (kept and each == _LESS))
        return tuple(each for each in options if each[0] in dict(names))


# YNNPACK, which XLA calls for sums over an axis, takes several times as long as XLA
# where the axis is short, as that of the scores.
FULL = CompileOptions((("xla_cpu_experimental_ynn_fusion_type", ""),))
WHOLE = CompileOptions((*FULL.options, ("xla_cpu_parallel_codegen_split_count", 1)))
_BRISK = (*WHOLE.options, ("xla_cpu_use_fusion_emitters", False))
QUICK = CompileOptions((*_BRISK, (_LEVEL, 0)))
GROUPS = CompileOptions((*FULL.options, _LESS))
LOOP = FULL._replace(graphs=True)
LIGHT = CompileOptions((*_BRISK, _LESS))
NO_GRAPHS = (("xla_gpu_enable_command_buffer", ""),)
FEW = 2**15  # numbers in the largest operand of a program that runs only briefly


@cache
def _find_known(options):
    """Returns those of the options that XLA knows on the default platform."""
    if _compiles(dict(options)):
        return options
    return tuple(each for each in options if _compiles(dict([each])))


def _compiles(options):
    try:
        double = jax.jit(lambda number: number + number, compiler_options=options)
        double.lower(np.float32(0)).compile()
    except Exception:  # the class of the error depends on the version
        return False
    return True


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
        """Returns the program for a loop with operands of the same shapes in each turn.

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
        effort = self.effort or CompileOptions(())
        options = None if is_part else dict(effort.known())
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
      donate: which operands the program may overwrite with its results.
      effort: an effort of this module, such as ``FULL``, ignored if the program becomes
        part of another one; None for programs without a loss.
      small: whether the program is small, so that more such programs are kept.
    """
    return Compiled(function, static, donate, effort, small)


def _describe(leaf):
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


_MOST_VALUES = 8  # values kept for one object


class IdentityCache:
    """Values computed from objects, found by the object's identity.

    The objects are held weakly: with an object its values are released. NumPy arrays,
    which may change in place, and objects without weak references are not cached.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], dict[Hashable, Any]]] = {}

    def recall(self, owner: Any, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns the value cached for this owner and key, or calls ``make`` for it."""
        if isinstance(owner, np.ndarray):
            return make()
        number = id(owner)
        entry = self._entries.get(number)
        if entry is None or entry[0]() is not owner:
            try:
                reference = weakref.ref(owner, lambda _: self._release(number))
            except TypeError:
                return make()
            entry = self._entries[number] = reference, {}
        values = entry[1]
        if key not in values:
            made = make()
            if len(values) >= _MOST_VALUES:
                values.clear()
            values[key] = made
        return values[key]

    def _release(self, number):
        entry = self._entries.get(number)
        # Another object may have taken the place, and the number, of the dead one.
        if entry is not None and entry[0]() is None:
            del self._entries[number]
