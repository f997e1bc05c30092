# SPDX-License-Identifier: Apache-2.0
"""How much work the compiler spends on a program.

In: one of four efforts. Out: options of XLA. Small programs are worth less work.
"""

import os
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np


class Effort(NamedTuple):
    """An effort of the compiler.

    ``FULL`` is for programs on many rows: level 1 of LLVM. Its programs run as fast
    and round as those of the default level, which unrolls the short loops over the rows
    of a group, and takes up to three times as long. ``WHOLE`` does the same work in one
    piece, instead of a piece for each thread, which takes two thirds of the time and
    rounds alike. ``BRISK`` takes half the time, but may round a sum of two products in
    another order. ``QUICK`` takes a sixth of the time, and is for programs without a
    loss: it does not contract a * b + c into one rounding, as the others do.
    """

    options: tuple[tuple[str, Any], ...]

    def known(self) -> tuple[tuple[str, Any], ...]:
        """Returns the options, which are for CPUs; none if XLA lacks one of them.

        A level in the environment variable XLA_FLAGS is not raised.
        """
        options = self.options
        if _LEVEL in os.environ.get("XLA_FLAGS", ""):
            options = tuple(option for option in options if option != (_LEVEL, 1))
        return options if _are_known(options) else ()


_LEVEL = "xla_backend_optimization_level"
_WHOLE = (("xla_cpu_parallel_codegen_split_count", 1),)
_BRISK = (*_WHOLE, ("xla_cpu_use_fusion_emitters", False))

FULL = Effort(((_LEVEL, 1),))
WHOLE = Effort((*_WHOLE, (_LEVEL, 1)))
BRISK = Effort((*_BRISK, (_LEVEL, 1)))
QUICK = Effort((*_BRISK, (_LEVEL, 0)))
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
