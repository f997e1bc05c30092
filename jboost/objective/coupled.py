# SPDX-License-Identifier: Apache-2.0
"""Evaluates a loss that couples the rows of a group, and its gradient.

In: a traced loss bound to its data, and scores [K, N]. Out: a value for each group, and
the gradient of each row. The twin of :mod:`jboost.objective.evaluation`, for which rows
do not depend on each other.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key, UInt32

from jboost.numerics.random_bits import derive, hash_words
from jboost.objective.evaluation import with_scores_first
from jboost.objective.group_tracing import GroupLoss
from jboost.tables.groups import GroupTable, RowGroups

_CHUNK = 1 << 24  # numbers of a chunk of groups that is evaluated at once


class GroupObjective(NamedTuple):
    """Holds a loss of groups and all its inputs except the scores.

    Attributes:
      loss: the programs of one group.
      constants: the numbers and arrays that the loss closes over.
      targets: a pytree of arrays whose first axis is N.
      weights: of the rows; the same in all rows of a group that count. A row of weight
        0 is not in ``where``, unless its whole group has weight 0.
      groups: of the rows.
      parameters: of an adaptive loss, otherwise ().
      words: a seed, for losses that draw random numbers and for random groups.
    """

    loss: GroupLoss
    constants: tuple[Any, ...]
    targets: Any
    weights: Float[Array, " N"]
    groups: RowGroups
    parameters: Any
    words: UInt32[Array, "2"]


class _Batch(NamedTuple):
    """All groups of a table, as the programs of a width take them.

    Attributes:
      rows: of each group; None for all rows as they lie.
      weight: of each group; 0 for padding.
      inputs: targets, where, weights and key of each group.
    """

    rows: Int32[Array, "n G"] | None
    weight: Float[Array, " n"]
    inputs: tuple[Any, Bool[Array, "n G"], Any, Any]


def group_values(
    objective: GroupObjective, scores: Float[Array, "K N"]
) -> tuple[Float[Array, " G"], Float[Array, " G"]]:
    """Returns the loss of each group, and its weight, 0 for padding."""
    batches, _ = _make_batches(objective)
    values = [
        _run(objective, objective.loss.values, batch, _take(scores, batch.rows))
        for batch in batches
    ]
    weights = jnp.concatenate([batch.weight for batch in batches])
    # A group without rows that count may have no finite loss.
    return jnp.where(weights > 0, jnp.concatenate(values), 0.0), weights


def group_gradient(
    objective: GroupObjective, scores: Float[Array, "K N"]
) -> Float[Array, "K N"]:
    """Returns dl/dF for every row, where l is the loss of the row's group.

    It is not multiplied by the weight of the group. 0 in rows that do not count.
    """
    batches, slot = _make_batches(objective)
    parts = []
    for batch in batches:
        rows = _take(scores, batch.rows)
        found = _run(objective, objective.loss.gradients, batch, rows)
        where = batch.inputs[1] & (batch.weight > 0)[:, None]
        where = where.reshape(where.shape + (1,) * (found.ndim - 2))
        found = jnp.where(where, found, 0.0)
        parts.append(found.reshape(-1, *found.shape[2:]))
    if slot is None:
        return with_scores_first(parts[0])
    flat = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    found = flat[jnp.maximum(slot, 0)]
    return jnp.where((slot >= 0)[None], with_scores_first(found), 0.0)


def draw_groups(
    groups: RowGroups, weights: Float[Array, " N"], words: UInt32[Array, "2"]
) -> tuple[tuple[GroupTable, ...], Int32[Array, " S"] | None]:
    """Returns the tables, and the slot of each row in them.

    Random groups are drawn here: rows that count, in the order of their hashes.
    """
    if groups.kind == "ids":
        return groups.tables, groups.slot
    num_rows = weights.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    if groups.kind == "all":
        return (GroupTable(row[None], jnp.int32(num_rows)[None], row[:1]),), None
    counted = weights > 0
    hashes = hash_words(row.astype(jnp.uint32), words)
    order = jnp.lexsort((hashes, ~counted)).astype(jnp.int32)
    slot = jnp.zeros_like(row).at[order].set(row, unique_indices=True)
    number = jnp.arange(-(-num_rows // groups.width), dtype=jnp.int32)
    first = number * groups.width
    size = jnp.clip(jnp.sum(counted, dtype=jnp.int32) - first, 0, groups.width)
    place = jnp.arange(groups.width, dtype=jnp.int32)[None]
    place = first[:, None] + jnp.where(place < size[:, None], place, 0)
    rows = order[jnp.minimum(place, num_rows - 1)]
    return (GroupTable(rows, size, number),), jnp.where(counted, slot, -1)


def number_groups(groups: RowGroups, weights: Float[Array, " N"]) -> Int32[Array, " N"]:
    """Returns the number of each row's group, for estimates of parameters."""
    if groups.number is not None:
        return groups.number
    row = jnp.arange(weights.shape[0], dtype=jnp.int32)
    return row // groups.width if groups.kind == "random" else jnp.zeros_like(row)


def _make_batches(objective):
    """Returns the groups of each table, and the slot of each row."""
    groups, weights = objective.groups, objective.weights
    tables, slot = draw_groups(groups, weights, objective.words)
    return [_make_batch(objective, table) for table in tables], slot


def _make_batch(objective, table):
    groups, inputs = objective.groups, objective.loss.inputs
    rows = None if groups.kind == "all" else table.rows

    def take(array):
        return array[None] if rows is None else array[rows]

    width = table.rows.shape[1]
    inside = jnp.arange(width, dtype=jnp.int32)[None] < table.size[:, None]
    weights = jnp.where(inside, take(objective.weights), 0.0)
    weight = jnp.max(weights, axis=1)
    # A loss need not be finite for a group without rows.
    where = inside & ((weights > 0) | (weight == 0)[:, None])
    own = keys = None
    if inputs.weights and groups.weights is not None:
        own = jnp.where(where, take(groups.weights), 0.0)
    if inputs.key:
        keys = _make_keys(objective.words, table.number)
    targets = jax.tree.map(take, objective.targets)
    return _Batch(rows, weight, (targets, where, own, keys))


def _make_keys(words, number) -> Key[Array, " n"]:
    seeds = derive(words, number)
    return jax.vmap(lambda seed: jax.random.wrap_key_data(seed, impl="threefry2x32"))(
        seeds
    )


def _take(scores, rows):
    """Returns the scores of the rows of each group, [n, G] or [n, G, K]."""
    by_row = scores[0] if scores.shape[0] == 1 else scores.T
    return by_row[None] if rows is None else by_row[rows]


def _run(objective, programs, batch, scores):
    """Evaluates the program of the batch's width at all its groups."""
    loss = objective.loss
    index = loss.widths.index(scores.shape[1])
    program, parameters = programs[index], objective.parameters

    def one(inputs):
        return program(objective.constants, *inputs, parameters)

    count, width = scores.shape[:2]
    size = scores[0].size * (width if loss.by_pairs[index] else 1)
    chunk = max(1, _CHUNK // size)
    if count == 1:
        first = jax.tree.map(lambda array: array[0], (scores, *batch.inputs))
        return one(first)[None]
    if count <= chunk:
        return jax.vmap(one)((scores, *batch.inputs))
    return jax.lax.map(one, (scores, *batch.inputs), batch_size=chunk)
