# SPDX-License-Identifier: Apache-2.0
"""Evaluates a loss that couples the rows of a group, and its gradient.

There is a value for each group, and a gradient for each row. The counterpart for losses
of single rows is :mod:`jboost.objective.evaluation`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.kernels.library import choose
from jboost.numerics.random import derive_seeds, hash_words
from jboost.objective.evaluation import with_scores_first
from jboost.objective.group_tracing import GroupLoss
from jboost.tables.groups import GroupTable, RowGroups

_T = TypeVar("_T")
_CHUNK = 1 << 19  # numbers of a chunk of groups: its buffers stay in the cache
_CHUNK_ON_GPU = 1 << 25  # there each chunk is waited for
_MOST_KEPT = 1 << 23  # numbers that products with the Hessian share


class GroupObjective(NamedTuple):
    """Holds a loss of groups and all its inputs except the scores.

    Attributes:
      targets: a pytree of arrays with a first axis of N.
      weights: row weights, equal in all rows of a group that count. A row of weight 0
        is not in ``where``, unless its whole group has weight 0.
      parameters: parameters of an adaptive loss, otherwise ().
      words: a seed, for losses that draw random numbers and for random groups.
      prepared: the result of :func:`prepare`, if rows keep their groups and count in
        the same way; their weights may change.
    """

    loss: GroupLoss
    constants: tuple[Any, ...]
    targets: Any
    weights: Float[Array, " N"]
    groups: RowGroups
    parameters: Any
    words: UInt32[Array, "2"]
    prepared: "PreparedGroups | None" = None


class Batch(NamedTuple):
    """All groups of a table, and the intermediate results that no score changes.

    Attributes:
      rows: the rows of each group; None for one group of all rows in order.
      inputs: targets, where, and weights for the loss, of each group.
      values, gradients: results of the early programs of the loss.
    """

    rows: Int32[Array, "n G"] | None
    where: Bool[Array, "n G"]
    number: Int32[Array, " n"]
    inputs: tuple[Any, Bool[Array, "n G"], Any]
    values: Any
    gradients: Any


class PreparedGroups(NamedTuple):
    """The groups of a set of rows, and the intermediate results that no score changes.

    There is a batch for each table. ``slot`` is the place of each row in the tables;
    None for one group of all rows in order.
    """

    batches: tuple[Batch, ...]
    slot: Int32[Array, " N"] | None


def prepare(objective: GroupObjective) -> PreparedGroups:
    """Gathers the targets of all groups, and runs the early programs of the loss."""
    tables, slot = draw_groups(objective.groups, objective.weights, objective.words)
    return PreparedGroups(tuple(_prepare(objective, table) for table in tables), slot)


def group_values(
    objective: GroupObjective, scores: Float[Array, "K N"]
) -> tuple[Float[Array, " G"], Float[Array, " G"]]:
    """Returns the loss of each group, and its weight, 0 for padding."""
    values, weights = [], []
    for batch in _find_prepared(objective).batches:
        rows = _take(scores, batch.rows)
        values.append(_run(objective, objective.loss.values, batch, rows, batch.values))
        weights.append(_weigh(objective, batch))
    weight = jnp.concatenate(weights)
    # A group without rows that count may have no finite loss.
    return jnp.where(weight > 0, jnp.concatenate(values), 0.0), weight


def group_gradient(
    objective: GroupObjective, scores: Float[Array, "K N"]
) -> Float[Array, "K N"]:
    """Returns dl/dF for every row, where l is the loss of the row's group.

    It is not multiplied by the weight of the group. 0 in rows that do not count.
    """
    prepared = _find_prepared(objective)
    found = []
    for batch in prepared.batches:
        rows, programs = _take(scores, batch.rows), objective.loss.gradients
        found.append(_run(objective, programs, batch, rows, batch.gradients))
    return _place(objective, prepared, found)


def linearize_by_group(
    objective: GroupObjective, scores: Float[Array, "K N"]
) -> Callable[[Float[Array, "K N"]], Float[Array, "K N"]] | None:
    """Returns a function that multiplies by the Hessian; None if it keeps too much.

    All groups are linearized at once: a loop over chunks would store its residuals
    where they are made, which keeps XLA from dividing the work among threads.
    """
    prepared = _find_prepared(objective)
    parts, total = [], 0
    for batch in prepared.batches:
        rows, programs = _take(scores, batch.rows), objective.loss.gradients
        one, operands, _ = _bind(objective, programs, batch, rows, batch.gradients)
        structure: list[Any] = []

        def keep(each, one=one, structure=structure):
            score, *rest = each
            product = jax.linearize(lambda score: one((score, *rest)), score)[1]
            kept, found = jax.tree.flatten(product)
            structure[:] = [found]
            return kept

        shapes = jax.eval_shape(jax.vmap(keep), operands)
        total += sum(each.size for each in shapes)
        parts.append((keep, operands, structure))
    if total > _MOST_KEPT:
        return None
    kept = [jax.vmap(keep)(operands) for keep, operands, _ in parts]

    def multiply(direction):
        found = []
        for batch, numbers, (*_, structure) in zip(
            prepared.batches, kept, parts, strict=True
        ):
            product = jax.vmap(lambda n, d, s=structure[0]: s.unflatten(n)(d))
            found.append(product(numbers, _take(direction, batch.rows)))
        return _place(objective, prepared, found)

    return multiply


def _place(objective, prepared, found):
    """Moves results from the groups of each batch to their rows, [K, N]; else 0."""
    parts = []
    for batch, values in zip(prepared.batches, found, strict=True):
        where = batch.where & (_weigh(objective, batch) > 0)[:, None]
        where = where.reshape(where.shape + (1,) * (values.ndim - 2))
        values = jnp.where(where, values, 0.0)
        parts.append(values.reshape(-1, *values.shape[2:]))
    if prepared.slot is None:
        return with_scores_first(parts[0])
    flat = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    found = with_scores_first(flat[jnp.maximum(prepared.slot, 0)])
    return jnp.where((prepared.slot >= 0)[None], found, 0.0)


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


def map_groups(function: Callable[[Any], _T], operands: Any, chunk: int) -> _T:
    """Maps a function over groups, axis 0 of ``operands``, ``chunk`` at a time."""
    count = len(jax.tree.leaves(operands)[0])
    if count == 1:
        found = function(jax.tree.map(lambda array: array[0], operands))
        return jax.tree.map(lambda array: array[None], found)
    if count <= chunk:
        return jax.vmap(function)(operands)
    num_chunks = -(-count // chunk)
    chunk = -(-count // num_chunks)

    def cut(number):
        first = jnp.minimum(number * chunk, count - chunk)  # the last two may overlap
        return jax.tree.map(
            lambda array: jax.lax.dynamic_slice_in_dim(array, first, chunk), operands
        )

    # Operands are carried to the next step, and results from the last one. Cut where
    # they are used, or stored where they are made, they would be fused with loops over
    # all pairs of a group. XLA neither vectorizes such loops nor divides them among
    # threads.
    def step(carried, number):
        operands, before = carried
        return (cut(number + 1), jax.vmap(function)(operands)), before

    first = cut(jnp.int32(0))
    shapes = jax.eval_shape(jax.vmap(function), first)
    nothing = jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), shapes)
    number = jnp.arange(num_chunks, dtype=jnp.int32)
    (_, last), found = jax.lax.scan(step, (first, nothing), number)
    again = num_chunks * chunk - count

    def join(found, last):
        rest = found[1:].reshape(-1, *found.shape[2:])
        return jnp.concatenate([rest, last[again:]])

    return jax.tree.map(join, found, last)


def _find_prepared(objective):
    return prepare(objective) if objective.prepared is None else objective.prepared


def _prepare(objective, table):
    groups, loss = objective.groups, objective.loss
    rows = None if groups.kind == "all" else table.rows

    def take(array):
        return array[None] if rows is None else array[rows]

    width = table.rows.shape[1]
    inside = jnp.arange(width, dtype=jnp.int32)[None] < table.size[:, None]
    counts = inside & (take(objective.weights) > 0)
    # A loss need not be finite for a group without rows.
    where = inside & (counts | ~jnp.any(counts, axis=1)[:, None])
    own = None
    if loss.inputs.weights and groups.weights is not None:
        own = jnp.where(where, take(groups.weights), 0.0)
    inputs = (jax.tree.map(take, objective.targets), where, own)
    index = loss.widths.index(width)

    def find(programs):
        run = partial(programs[index], objective.constants)
        return _map_chunks(lambda each: run(*each), inputs, loss, index, width)

    return Batch(
        rows, where, table.number, inputs, find(loss.early_values),
        find(loss.early_gradients),
    )  # fmt: skip


def _weigh(objective, batch):
    """Returns the weight of each group: that of its rows that count; 0 for padding."""
    weights = objective.weights
    weights = weights[None] if batch.rows is None else weights[batch.rows]
    return jnp.max(jnp.where(batch.where, weights, 0.0), axis=1)


def _take(scores, rows):
    """Returns the scores of the rows of each group, [n, G] or [n, G, K]."""
    by_row = scores[0] if scores.shape[0] == 1 else scores.T
    return by_row[None] if rows is None else by_row[rows]


def _run(objective, programs, batch, scores, early):
    """Evaluates the program of the batch's width at all its groups."""
    one, operands, index = _bind(objective, programs, batch, scores, early)
    return _map_chunks(one, operands, objective.loss, index, scores[0].size)


def _bind(objective, programs, batch, scores, early):
    """Returns the program of a group, its operands by group, and its index."""
    loss, keys = objective.loss, None
    index = loss.widths.index(scores.shape[1])
    if loss.inputs.key:
        keys = jax.vmap(partial(jax.random.wrap_key_data, impl="threefry2x32"))(
            derive_seeds(objective.words, batch.number)
        )
    run = partial(programs[index], objective.constants)

    def one(each):
        score, key, inputs, early = each
        return run(score, key, objective.parameters, *inputs, early)

    operands = (scores, keys, batch.inputs, early)
    return one, operands, index


def _map_chunks(function, operands, loss, index, size):
    """Maps a function over groups of ``size`` numbers, many at a time."""
    numbers = size**2 if loss.by_pairs[index] else size
    small, large = (max(1, most // numbers) for most in (_CHUNK, _CHUNK_ON_GPU))
    run = partial(map_groups, function)
    if len(jax.tree.leaves(operands)[0]) <= small:
        return run(operands, small)
    return choose(xla=partial(run, chunk=small), cuda=partial(run, chunk=large))(
        operands
    )
