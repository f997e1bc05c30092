# SPDX-License-Identifier: Apache-2.0
"""Runs the program of one row at every row.

Results have the axis of rows last. For several scores, blocks of rows bound the memory.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jboost.numerics.derivatives import differentiable

_FEW_ROWS = 2048  # rows per block, for K > 1
_BLOCK_NUMBERS = 1 << 20  # largest number of results per block, for K > 1


def map_rows(
    objective: Any, program: Callable[..., Any], scores, finish=lambda rows: rows
):
    """Evaluates a program at all rows; ``finish`` moves rows to the last axis.

    ``objective`` is a :class:`jboost.objective.evaluation.Objective`.

    For K > 1 it evaluates one block of rows at a time to save memory: Hessians take K^2
    numbers per row, and even gradients would otherwise exist in two layouts.
    """
    num_scores, num_rows = scores.shape
    square = program in (objective.loss.hessian, objective.loss.information)
    entries = num_scores**2 if square else num_scores
    if num_scores == 1:
        return finish(evaluate_rows(objective, program, scores))
    # XLA may round by the size of a block. Therefore all have one size, whatever the
    # number of rows, and there are two at least: a single one would be no loop.
    size = block_size(entries)
    short = max(0, size + 1 - num_rows)

    def extend(array, axis=0):
        edges = [(0, short if each == axis else 0) for each in range(array.ndim)]
        return jnp.pad(array, edges, mode="edge") if short else array

    targets = jax.tree.map(extend, objective.targets)
    scores = extend(scores, 1)
    last = num_rows + short - size

    def evaluate(first):
        def cut(array, axis=0):
            return jax.lax.dynamic_slice_in_dim(array, first, size, axis)

        part = objective._replace(targets=jax.tree.map(cut, targets))
        return finish(evaluate_rows(part, program, cut(scores, 1)))

    def add_block(number, found):
        first = jnp.minimum(number * size, last)  # the last two overlap
        start = (*(0,) * (found.ndim - 1), first)
        return jax.lax.dynamic_update_slice(found, evaluate(first), start)

    block = jax.eval_shape(evaluate, jax.ShapeDtypeStruct((), jnp.int32))
    found = jnp.zeros((*block.shape[:-1], last + size), block.dtype)
    number = -(-(last + size) // size)
    return jax.lax.fori_loop(0, number, add_block, found)[..., :num_rows]


def block_size(entries: int) -> int:
    """Returns the number of rows in a block, by the results of a row."""
    return max(1, min(_FEW_ROWS, _BLOCK_NUMBERS // entries))


def evaluate_rows(objective: Any, program: Callable[..., Any], scores: Array) -> Any:
    """Evaluates a program at all rows at once, with the axis of rows in front."""
    rows = scores[0] if scores.shape[0] == 1 else scores.T
    return differentiable(
        partial(_run_rows, program), partial(_derive_rows, program),
        objective.constants, rows, objective.targets, objective.parameters,
    )  # fmt: skip


def _run_rows(program, constants, rows, targets, parameters):
    def one(score, target):
        return program(constants, score, target, parameters)

    return jax.vmap(one)(rows, targets)


def _derive_rows(program, found, operands, tangents):
    """Returns the change of a program's results along the tangents.

    The change is 0 in rows without a finite result and derivative. Such rows are first
    replaced by a finite row. Otherwise an infinite derivative, multiplied by 0, would
    be NaN and reach the derivative in every value that the rows share.
    """
    constants, rows, targets, parameters = operands
    _, slope = jax.jvp(
        lambda rows: _run_rows(program, constants, rows, targets, parameters),
        (rows,), (jnp.ones_like(rows),),
    )  # fmt: skip
    finite = jnp.isfinite(found) & jnp.isfinite(slope)
    finite = jnp.all(finite.reshape(len(finite), -1), axis=1)
    spare = jnp.argmax(finite)

    def select(values, others):
        shape = (-1,) + (1,) * (values.ndim - 1)
        return jnp.where(finite.reshape(shape), values, others)

    rows, targets = jax.tree.map(lambda a: select(a, a[spare]), (rows, targets))
    inputs = (constants, rows, targets, parameters)
    _, change = jax.jvp(partial(_run_rows, program), inputs, tangents)
    return select(change, 0.0)


def with_scores_first(rows: Array) -> Array:
    """Moves the axis of scores to the front: [N] or [N, K] to [K, N]."""
    return rows[None, :] if rows.ndim == 1 else rows.T
