# SPDX-License-Identifier: Apache-2.0
"""Finds rows with a loss or a gradient that cannot be used.

Errors name the first such row. Targets may be infinite or NaN where the loss is finite.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jboost.entry.messages import show, warn_user
from jboost.entry.stages import branch, elementwise, is_any
from jboost.objective.evaluation import Objective, gradients, loss_values

_BESIDE = 2.0**-10  # times 1 + |score|: the distance where a kink must have a gradient
_TRIALS = (0.0, 1.0, -1.0, 10.0, -10.0, 100.0, -100.0)  # added to the offset


def find_gaps(targets: Any, weights: Any) -> Bool[np.ndarray, " N"]:
    """Returns which rows of positive weight have a target that is infinite or NaN."""
    gaps = np.zeros(len(weights), bool)
    for leaf in jax.tree.leaves(targets):
        if jnp.issubdtype(leaf.dtype, np.floating):
            host = np.asarray(leaf)
            gaps |= ~np.isfinite(host).all(axis=tuple(range(1, host.ndim)))
    return gaps & (np.asarray(weights) > 0)


def describe_gap(name: str, target: Any, row: int) -> str:
    """Returns the message that a target, a pytree of numbers, must be finite."""
    return (
        f"{name} must be finite in every row of positive weight, got "
        f"{show(target)} in row {row}; a custom loss may take infinities and NaN if "
        "it returns finite numbers for them"
    )


def describe_lost_slope(target: Any, row: int, place: str) -> str:
    """Returns the message that a gradient must be finite, and how to achieve it."""
    return (
        f"loss must have a gradient wherever it is finite, got NaN in row {row} for "
        f"target {show(target)} at {place}; a branch of jnp.where that is not taken "
        "must be finite, too: replace what it cannot take before, as in "
        "jnp.where(known, f(score, jnp.where(known, target, 0.0)), 0.0)"
    )


def warn_of_lost_rows(
    before: Int32[np.ndarray, "*M 3"], after: Int32[np.ndarray, "*M 3"], num_rows: int
) -> None:
    """Warns of rows with derivatives that became NaN or infinite in some rounds.

    The arguments are ``lost`` of the states of all runs before and after these rounds;
    see :class:`jboost.boosting.state.BoostState`.
    """
    before, after = before.reshape(-1, 3), after.reshape(-1, 3)
    if before[:, 1].any() or not after[:, 1].any():
        return
    number, count, row = after[np.argmax(after[:, 1] > 0)].tolist()
    warn_user(
        f"loss must have finite derivatives wherever it is finite: in round {number} "
        f"its gradient or curvature is NaN or infinite in {count} of {num_rows} rows "
        f"({count / num_rows:.2g} of all), the first of which is row {row}. Such rows "
        "teach a round nothing. Often a branch of jnp.where that is not taken has no "
        "derivative, or a logarithm is taken of what has rounded to 0"
    )


def find_never_finite(
    objective: Objective, offset: Float[np.ndarray, "K N"]
) -> Bool[np.ndarray, " N"]:
    """Returns which rows have no finite loss at the offset nor at scores beside it."""
    objective = objective._replace(minimizer=None)
    typical = [_middle(leaf) for leaf in jax.tree.leaves(objective.targets)]
    never = np.ones(offset.shape[1], bool)
    for step in (*_TRIALS, *typical):
        values = loss_values(objective, jnp.asarray(offset + np.float32(step)))
        never &= ~np.isfinite(values)
    return never


def _middle(leaf):
    """Returns the median of the finite numbers of an array."""
    values = np.asarray(leaf, np.float32)
    values = values[np.isfinite(values)]
    return np.median(values) if values.size else 0.0


def find_lost_slopes(
    objective: Objective, scores: Float[Array, "K N"]
) -> Bool[Array, " N"]:
    """Returns which rows have a gradient that is NaN, at the scores and beside them.

    At a kink a gradient may be NaN, but not beside it.
    """
    objective = objective._replace(minimizer=None)
    lost = _is_lost(gradients(objective, scores))

    def look(lost):
        for side in (_BESIDE, -_BESIDE):
            lost = _both(lost, _is_lost(gradients(objective, _shift(scores, side))))
        return lost

    return branch(is_any(lost), look, lambda lost: lost, lost)


@elementwise
def _is_lost(numpy, slopes):
    return numpy.any(numpy.isnan(slopes), axis=0)


@elementwise
def _shift(numpy, scores, side):
    return scores + side * (1 + numpy.abs(scores))


@elementwise
def _both(numpy, first, second):
    return first & second
