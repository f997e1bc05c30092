# SPDX-License-Identifier: Apache-2.0
"""Work that only some data need, skipped where that costs less than the work.

In: a condition of one number, and two ways to the same result. Out: that result.
"""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import ArrayLike, Bool


def skip_on_cpu(
    needed: Bool[ArrayLike, ""],
    work: Callable[..., Any],
    skip: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Returns ``work(*operands)``; a CPU calls ``skip`` where the work is not needed.

    Both must give the same result there. On a GPU a condition waits until the host has
    read it, which takes as long as several small kernels, and leaves the GPU idle.
    """

    def look_first(*operands):
        return jax.lax.cond(needed, work, skip, *operands)

    return jax.lax.platform_dependent(*operands, cpu=look_first, default=work)
