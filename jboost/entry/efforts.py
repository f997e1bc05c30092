# SPDX-License-Identifier: Apache-2.0
"""How much work the compiler spends on a program.

In: one of six efforts. Out: options of XLA. Small programs are worth less work.
"""

import os
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

_LEVEL = "xla_backend_optimization_level"


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
        """Returns the options, which are for CPUs; none if XLA lacks one of them.

        A level in the environment variable XLA_FLAGS is not raised.
        """
        options = self.options
        if _LEVEL in os.environ.get("XLA_FLAGS", ""):
            options = tuple(each for each in options if each not in GROUPS.options)
        return options if _are_known(options) else ()


FULL = Effort(())
WHOLE = Effort((("xla_cpu_parallel_codegen_split_count", 1),))
BRISK = Effort((*WHOLE.options, ("xla_cpu_use_fusion_emitters", False)))
QUICK = Effort((*BRISK.options, (_LEVEL, 0)))
GROUPS = Effort(((_LEVEL, 1),))
SMALL_GROUPS = Effort((*BRISK.options, *GROUPS.options))
FEW = 2**15  # numbers in the largest operand, up to which a program runs so shortly


@cache
def _are_known(options):
    if not options:
        return True
    if jax.default_backend() != "cpu":
        return False
    try:
        double = jax.jit(lambda number: number + number, compiler_options=dict(options))
        double.lower(np.float32(0)).compile()
    except Exception:  # the class of the error depends on the version
        return False
    return True
