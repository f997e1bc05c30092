# SPDX-License-Identifier: Apache-2.0
"""Programs compiled for given shapes, and the memory that they take.

In: a function and its operands, or shapes like theirs. Out: its program; bytes.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MOST_PROGRAMS = 128


def program(
    function: Callable[..., Any],
    static: tuple[Any, ...],
    *operands: Any,
    donate: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """``function`` compiled for these operands, or for shapes like theirs."""
    leaves, structure = jax.tree.flatten(operands)
    shapes = tuple(
        jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves
    )
    return _compile(function, static, donate, structure, shapes)


@lru_cache(maxsize=_MOST_PROGRAMS)
def _compile(function, static, donate, structure, shapes):
    operands = jax.tree.unflatten(structure, shapes)
    run = jax.jit(partial(function, *static), donate_argnums=donate)
    return run.lower(*operands).compile()


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
