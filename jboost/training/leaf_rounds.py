# SPDX-License-Identifier: Apache-2.0
"""New leaf values for the rounds of a model, round by round as in training.

In: a model, and rows with their loss and settings. Out: the model with the same splits.
``fit`` calls this after rows were held out, and ``refit`` for any rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from jboost.boosting.state import BoostState
from jboost.model.ensemble import Ensemble, map_rounds
from jboost.model.predicting import leaf_indices
from jboost.numerics.arrays import pad_rows
from jboost.objective.faults import warn_of_lost_rows
from jboost.training.chunks import MOST_ROUNDS, ArrayRunner, Job, Position, open_bar
from jboost.training.rows import PaddedRows
from jboost.trees.slopes import GivenLeaves
from jboost.trees.tree import LeafSums, Tree

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
    if job.problem.data.values is None:  # new leaves are constant
        model = replace(model, slopes=None, ranges=None)
    spread, runner = job.rows.spread, ArrayRunner(job)
    position = Position(state, ())
    old: Any = jax.tree.map(np.asarray, (model.leaf_value, model.slopes))
    values = old[0]
    sums = LeafSums(values, values, values, values[..., 0])
    none: Any = None
    every = Tree(none, none, none, values, sums, slopes=old[1])
    parts = [jax.tree.map(lambda array: array[:0], every)]  # no rounds
    first, before = 0, np.asarray(state.lost)
    with open_bar(model.num_rounds, progress) as bar:
        for leaves in find_leaves(model, tables, job.rows):
            count = len(leaves)
            runner.given = [
                GivenLeaves(
                    own if spread is None else spread.put(own, axis=1),
                    *jax.tree.map(lambda array, n=first + i: array[n], old),
                    np.float32(decay),  # type: ignore[arg-type]
                )
                for i, own in enumerate(leaves)
            ]
            chunk = runner.run(position, first, count)
            trees, position = chunk.trees, Position(chunk.state, ())
            bad = ~np.isfinite(np.asarray(trees.leaf_value)).all(axis=(1, 2))
            if bad.any():
                raise ValueError(
                    f"the leaf values of round {first + int(np.argmax(bad))} became "
                    "infinite or NaN: the loss diverges, or its gradient is NaN where "
                    "its value is finite; use a smaller learning_rate, or a larger "
                    "decay or l2"
                )
            before = _check_lost(before, chunk.state, job.rows)
            parts.append(trees)
            first += count
            bar.update(count)
    joined: Any = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    return replace(
        model,
        leaf_value=jax.device_put(joined.leaf_value),
        sums=LeafSums(*jax.device_put(tuple(joined.sums))),
        slopes=jax.device_put(joined.slopes),
        init_score=position.state.init_score,
    )


def _rounds_at_once(rows: PaddedRows) -> int:
    """Returns the number of rounds per computation of leaf indices."""
    return max(1, min(MOST_ROUNDS, _MOST_LEAVES // max(1, rows.offset.size)))


def find_leaves(
    model: Ensemble, tables: Sequence[Any], rows: PaddedRows
) -> Iterator[Int32[np.ndarray, "R S N"]]:
    """Yields the leaf of each row in each tree, for some rounds at a time.

    ``tables`` hold the rows, one after the other. Padding has the leaves of row 0; rows
    that are divided among devices have none.
    """
    total = rows.size if rows.spread is not None else rows.offset.shape[1]
    step = _rounds_at_once(rows)
    model = jax.tree.map(np.asarray, model)  # slices of NumPy arrays need no program
    for first in range(0, model.num_rounds, step):
        part = map_rounds(lambda array, f=first: array[f : f + step], model)
        found = np.concatenate([np.asarray(leaf_indices(part, x)) for x in tables])
        found = found.reshape(rows.size, -1, model.feature.shape[1])
        yield np.ascontiguousarray(pad_rows(found, total).transpose(1, 2, 0))


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
