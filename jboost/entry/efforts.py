# SPDX-License-Identifier: Apache-2.0
"""How much work the compiler spends on a program.

In: one of six efforts. Out: options of XLA. Small programs are worth less work.
"""

import os
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from jboost.entry.devices import runs_on_cpu

_LEVEL = "xla_backend_optimization_level"
_LIGHT = (_LEVEL, 1)


class Effort(NamedTuple):
    """An effort of the compiler.

    ``FULL`` is for programs on many rows. ``WHOLE`` does the same work in one piece,
    instead of a piece for each thread, which takes two thirds of the time and rounds
    alike. ``BRISK`` takes half the time, but may round a sum of two products in another
    order. ``QUICK`` takes a sixth of the time, and is for programs without a loss: it
    does not contract a * b + c into one rounding, as the others do.

    ``GROUPS`` and, for few rows, ``SMALL_GROUPS`` are for losses of groups, whose short
    loops over the rows of a group the others unroll. They take down to a third of the
    time of ``FULL``; the programs run as fast, but may round in another order.
    """

    options: tuple[tuple[str, Any], ...]

    def known(self) -> tuple[tuple[str, Any], ...]:
        """Returns the options that XLA knows; none of them unless a CPU computes.

        A level in the environment variable XLA_FLAGS is not raised.
        """
        names = _find_known() if runs_on_cpu() else ()
        if _LEVEL in os.environ.get("XLA_FLAGS", ""):
            options = [each for each in self.options if each != _LIGHT]
        else:
            options = [*self.options]
        return tuple(each for each in options if each[0] in names)


# YNNPACK, which XLA calls for sums over an axis, takes several times as long as XLA
# where the axis is short, as that of the scores.
FULL = Effort((("xla_cpu_experimental_ynn_fusion_type", ""),))
WHOLE = Effort((*FULL.options, ("xla_cpu_parallel_codegen_split_count", 1)))
BRISK = Effort((*WHOLE.options, ("xla_cpu_use_fusion_emitters", False)))
QUICK = Effort((*BRISK.options, (_LEVEL, 0)))
GROUPS = Effort((*FULL.options, _LIGHT))
SMALL_GROUPS = Effort((*BRISK.options, _LIGHT))
FEW = 2**15  # numbers in the largest operand, up to which a program runs so shortly


@cache
def _find_known():
    """Returns the names of the options of all efforts that XLA knows."""
    every = dict(QUICK.options)
    if _compiles(every):
        return tuple(every)
    return tuple(name for name, value in every.items() if _compiles({name: value}))


def _compiles(options):
    try:
        double = jax.jit(lambda number: number + number, compiler_options=options)
        double.lower(np.float32(0)).compile()
    except Exception:  # the class of the error depends on the version
        return False
    return True
