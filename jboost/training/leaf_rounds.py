# SPDX-License-Identifier: Apache-2.0
"""New leaf values for the rounds of a model, round by round as in training.

In: a model, and rows with their loss and settings. Out: the model with the same splits.
``fit`` calls this after rows were held out, and ``refit`` for any rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int32

from jboost.boosting.derivatives import (
    RoundPlan,
    choose_scaling,
    differentiate,
    start_round,
)
from jboost.boosting.round import (
    add_shared_slopes,
    add_slopes,
    add_trees,
    fit_trees,
    map_scores,
    shaping_limits,
    sum_leaves,
    sum_shared_leaves,
)
from jboost.boosting.sharding import EVERYWHERE, rows_of, spec_of_state
from jboost.boosting.state import BoostState, Problem
from jboost.entry.programs import FULL, compiled
from jboost.kernels.xla import round_alone
from jboost.model.ensemble import Ensemble, map_rounds
from jboost.model.predicting import leaf_indices
from jboost.numerics.arrays import pad_rows
from jboost.objective.faults import warn_of_lost_rows
from jboost.training.chunks import Job, open_bar
from jboost.training.rows import PaddedRows
from jboost.training.sharded import compile_shards, spec_of_arrays
from jboost.trees.tree import LeafSums, Slopes, Tree

_MOST_ROUNDS = 16  # the most rounds per computation of leaf indices
_MOST_LEAVES = 2**26  # leaf indices of all rows and rounds at a time


def refit_rounds(
    model: Ensemble,
    tables: Sequence[Any],
    job: Job,
    state: BoostState,
    decay: float = 0.0,
    progress: bool = False,
) -> Ensemble:
    """Returns the model with new leaf values in all its rounds; see :func:`refit`.

    Args:
      tables: the tables of the rows of the job, one after the other, which determine
        their leaves.
      job: the rows, their loss and settings, and the learning rate of each round.
      state: the state of the rows before the first round.
      decay: the share of the old values that is kept.

    Raises:
      ValueError: a leaf value became infinite or NaN.
    """
    step, spread = _rounds_at_once(job.rows), job.rows.spread
    if job.problem.data.values is None:  # new leaves are constant
        model = replace(model, slopes=None, ranges=None)
    static = job.problem.static
    run: Any = compiled(_refit_chunk, static, effort=FULL)
    if spread is not None:
        state_spec = spec_of_state(spread.shards)
        leaves_spec = PartitionSpec(None, None, *rows_of(spread.shards))
        specs = (spec_of_arrays(spread.shards), EVERYWHERE, EVERYWHERE, EVERYWHERE)
        specs += (leaves_spec, EVERYWHERE, state_spec)
        results = (state_spec, EVERYWHERE)
        run = compile_shards(
            _refit_chunk, (static,), spread, specs, results, effort=FULL
        )
    old: Any = Leaves(model.leaf_value, model.slopes)
    old = jax.tree.map(np.asarray, old)
    none, no_l2 = old.leaf_value[:0], old.leaf_value[:0, :, 0]
    no_slopes = jax.tree.map(lambda array: array[:0], old.slopes)
    parts = [Refitted(none, LeafSums(none, none, none, no_l2), no_slopes)]  # no rounds
    first, before = 0, np.asarray(state.lost)
    with open_bar(model.num_rounds, progress) as bar:
        for leaves in find_leaves(model, tables, job.rows):
            count = len(leaves)
            rates, leaves, values = (
                jax.tree.map(lambda array: _fill(array, step), arrays)
                for arrays in (
                    job.rates[first:], leaves,
                    jax.tree.map(lambda array, n=first: array[n:], old),
                )
            )  # fmt: skip
            if spread is not None:
                leaves = spread.put(leaves, axis=2)
            chunk = (np.int32(count), rates, leaves, values)
            state, found = run(job.problem.arrays, np.float32(decay), *chunk, state)
            found = jax.tree.map(lambda a, n=count: np.asarray(a)[:n], found)
            bad = ~np.isfinite(found.leaf_value).all(axis=(1, 2))
            if bad.any():
                raise ValueError(
                    f"the leaf values of round {first + int(np.argmax(bad))} became "
                    "infinite or NaN: the loss diverges, or its gradient is NaN where "
                    "its value is finite; use a smaller learning_rate, or a larger "
                    "decay or l2"
                )
            before = _check_lost(before, state, job.rows)
            parts.append(found)
            first += count
            bar.update(count)
    joined: Any = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    return replace(
        model,
        leaf_value=jax.device_put(joined.leaf_value),
        sums=LeafSums(*jax.device_put(tuple(joined.sums))),
        slopes=jax.device_put(joined.slopes),
        init_score=state.init_score,
    )


def _rounds_at_once(rows: PaddedRows) -> int:
    """Returns the number of rounds per computation of leaf indices."""
    return max(1, min(_MOST_ROUNDS, _MOST_LEAVES // max(1, rows.offset.size)))


def find_leaves(
    model: Ensemble, tables: Sequence[Any], rows: PaddedRows
) -> Iterator[Int32[np.ndarray, "R S N"]]:
    """Yields the leaf of each row in each tree, for some rounds at a time.

    ``tables`` hold the rows, one after the other. Padding has the leaves of row 0; rows
    that are divided among devices have none.
    """
    total = rows.size if rows.spread is not None else rows.offset.shape[1]
    step = _rounds_at_once(rows)
    for first in range(0, model.num_rounds, step):
        part = map_rounds(lambda array, f=first: array[f : f + step], model)
        found = np.concatenate([np.asarray(leaf_indices(part, x)) for x in tables])
        found = found.reshape(rows.size, -1, model.feature.shape[1])
        yield np.ascontiguousarray(pad_rows(found, total).transpose(1, 2, 0))


class Leaves(NamedTuple):
    """The values and slopes of the leaves of some rounds."""

    leaf_value: Float[Array, "R K L"]
    slopes: Slopes | None


class Refitted(NamedTuple):
    """New values of the leaves of some rounds, and the sums that they come from."""

    leaf_value: Float[Array, "R K L"]
    sums: LeafSums
    slopes: Slopes | None


def _fill(array, length):
    """Returns the first entries; zeros follow if there are fewer."""
    array = array[:length]
    short = length - len(array)
    return np.pad(array, ((0, short), *((0, 0),) * (array.ndim - 1)))


def _check_lost(before, state, rows: PaddedRows):
    """Warns of rows without derivatives; raises if they are all."""
    after, size = np.asarray(state.lost), int(np.count_nonzero(rows.real[1]))
    if after[1] >= size:
        raise ValueError(
            f"the leaf values of round {after[0] - 1} became so large that no row has "
            "finite derivatives: the loss diverges; use a smaller learning_rate, or a "
            "larger decay or l2"
        )
    warn_of_lost_rows(before, after, size)
    return after


def mix(decay: Any, old: Any, new: Any) -> Any:
    """Returns ``decay`` of the old values and the rest of the new ones."""
    # Without decay to the bit, with the sign of a zero.
    return jnp.where(decay > 0, decay * old + (1 - decay) * new, new)


def _refit_chunk(static, arrays, decay, count, rates, leaves, old, state):
    """Refits the first ``count`` of some rounds, traced."""
    problem = Problem(static, arrays)

    def one_round(number, carry):
        state, found = carry
        own = jax.tree.map(lambda array: array[number], old)
        parts = rates[number], leaves[number], own
        state, trees = _refit_round(problem, decay, *parts, state)

        def store(buffer, value):
            return jax.lax.dynamic_update_index_in_dim(buffer, value, number, 0)

        assert trees.sums is not None
        new = Refitted(trees.leaf_value, trees.sums, trees.slopes)
        return state, jax.tree.map(store, found, new)

    zeros = jnp.zeros_like(old.leaf_value)
    sums = LeafSums(zeros, zeros, zeros, jnp.zeros(zeros.shape[:2], jnp.float32))
    start = Refitted(zeros, sums, jax.tree.map(jnp.zeros_like, old.slopes))
    return jax.lax.fori_loop(0, count, one_round, (state, start))


def _refit_round(
    problem: Problem,
    decay: Float[Array, ""],
    learning_rate: Float[Array, ""],
    leaf: Int32[Array, "S N"],
    old: Leaves,
    state: BoostState,
) -> tuple[BoostState, Tree]:
    """Makes one round as training does, with the leaf of every row given."""
    state, raw = differentiate(problem, state)
    plan = start_round(problem, choose_scaling(problem), state, raw)
    trees = _sum_old_leaves(problem, state, plan, leaf, old)
    pointed = state.pointed
    trees = fit_trees(problem, learning_rate, state, plan, trees, leaf, pointed)
    assert trees.sums is not None
    filled, slopes, before = trees.sums.weight > 0, trees.slopes, old.slopes
    if slopes is not None and before is not None:
        # With decay around the old centers, so that old and new terms can be added.
        moved = round_alone(slopes.slope * (before.center - slopes.center))
        moved = jnp.sum(jnp.where(slopes.feature >= 0, moved, 0.0), axis=-1)
        moved = trees.leaf_value + jnp.where(decay > 0, moved, 0.0)
        trees = trees._replace(
            leaf_value=moved,
            slopes=Slopes(
                jnp.where(decay > 0, before.feature, slopes.feature),
                mix(decay, before.slope, slopes.slope),
                jnp.where(decay > 0, before.center, slopes.center),
            ),
        )
    mixed = mix(decay, old.leaf_value, trees.leaf_value)
    trees = trees._replace(leaf_value=jnp.where(filled, mixed, old.leaf_value))
    if trees.slopes is not None and old.slopes is not None:
        # One tree of all scores has the same terms for each.
        shared = jnp.any(filled, axis=0, keepdims=True)
        keep = filled if len(trees.slopes.feature) == len(filled) else shared
        trees = trees._replace(
            slopes=jax.tree.map(
                lambda new, before: jnp.where(keep[..., None], new, before),
                trees.slopes, old.slopes,
            )
        )  # fmt: skip
    return add_trees(problem, state, plan, trees, leaf), trees


def _sum_old_leaves(problem, state, plan: RoundPlan, leaf: Any, old: Leaves) -> Tree:
    """Returns the trees of a round with the sums and slopes of their leaves."""
    terms = None if old.slopes is None else old.slopes.feature
    if problem.method.share_structure:
        tree = _bare_tree(old.leaf_value[0], plan.limits._replace(values=None))
        trees = sum_shared_leaves(problem.data, plan, tree, leaf[0])
        own = None if terms is None else terms[0]
        return add_shared_slopes(problem, state, plan, trees, leaf[0], own)

    def sum_tree(parts):
        leaf, values, task, terms = parts
        tree = _bare_tree(values, shaping_limits(plan, task))
        tree = sum_leaves(problem, plan, task, tree, leaf)
        return add_slopes(problem, state, plan, task, tree, leaf, terms)

    return map_scores(sum_tree, (leaf, old.leaf_value, plan.trees(), terms))


def _bare_tree(values, limits):
    """Returns a tree without splits, for functions that read only its leaves."""
    none: Any = None
    bounds = None
    if limits.values is not None:
        bounds = jnp.broadcast_to(limits.values.bounds, (len(values), 2))
    return Tree(none, none, none, values, bounds=bounds)
