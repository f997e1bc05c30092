# SPDX-License-Identifier: Apache-2.0
"""Says why training learns nothing.

In: a training run, and a state of it. Out: the reason, for a message: gradients that
are zero or not finite, or settings that allow no split.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import ArrayLike, Bool

from jboost.boosting.auto import decide_by_data
from jboost.boosting.sharding import EVERYWHERE
from jboost.boosting.state import (
    Arrays,
    BoostState,
    Problem,
    Static,
    bind_groups,
)
from jboost.codes.bins import Bins
from jboost.entry.programs import compiled
from jboost.objective.coupled import group_gradient
from jboost.objective.curvature import derivatives
from jboost.objective.evaluation import Objective
from jboost.training.rows import PaddedRows
from jboost.training.sharded import compile_for_rows
from jboost.trees.slopes import Slopes, count_group_slopes, count_slopes
from jboost.trees.tree import LeafSums, Tree


def describe_idleness(
    problem: Problem, rows: PaddedRows, state: BoostState
) -> str | None:
    """Explains why no tree can learn from the gradients at a state; None if one can.

    Rows that are all at their own minimum leave nothing to learn, which is no error.
    """
    found = _count_slopes(problem, rows, state)
    if not found.not_finite and not found.stuck():
        return None
    start = np.asarray(state.init_score).tolist()
    branch = (
        ". A gradient is NaN beside a finite loss where a branch of jnp.where that is "
        "not taken has no derivative"
    )
    advice = "look at the loss there with jb.inspect_loss, or pass another init_score"
    if problem.loss.coupled:
        advice = (
            "a ranking needs rows of different relevance in one group, survival an "
            "event with other rows at risk; else pass an offset or another init_score"
        )
    return (
        f"of {found.rows} rows of positive weight, {found.not_finite} have a gradient "
        f"that is NaN or infinite and {found.zero} one that is zero (init_score "
        f"{start}); {advice}{branch if found.not_finite else ''}"
    )


def has_split(trees: Tree) -> Bool[ArrayLike, ""]:
    """Returns whether some tree has rows in more than one leaf; may be traced."""
    assert trees.sums is not None
    return ((trees.sums.weight > 0).sum(axis=-1) > 1).any()


def count_rounds(number: int) -> str:
    """Returns "of 5 rounds" for a message."""
    return f"of {number} round{'' if number == 1 else 's'}"


def describe_limits(
    problem: Problem,
    rows: PaddedRows,
    state: BoostState,
    bins: Bins,
    sums: LeafSums | None = None,
) -> str | None:
    """Explains why no tree of a run has a split; None if there is nothing to learn.

    Without a slope in any row, with one target for all or with constant features, no
    tree would learn.

    Args:
      state: after the last round.
      sums: of a tree of the run, whose first leaf holds all rows; None: not known.
    """
    found = _count_slopes(problem, rows, state)
    targets, weights = rows.real
    real = weights > 0
    alike = all(_is_constant(t[real]) for t in jax.tree.leaves(targets))
    constant = bins.categories is None and not np.isfinite(bins.thresholds).any()
    if found.zero + found.not_finite >= found.rows or alike or constant:
        return None
    method, limits = problem.method, problem.arrays.numbers.limits
    samples = decide_by_data(
        np.asarray(state.pointed), np.asarray(state.least_rows), method.leaf_solver,
        limits.min_child_samples,
    ).min_child_samples  # fmt: skip
    samples = np.min(samples)  # of all scores
    size, reasons = int(found.rows), []
    if samples > size:  # larger numbers have been cut
        reasons.append(
            f"min_child_samples asks for more than the {size} rows there are"
        )
    elif 2 * samples > size:
        reasons.append(
            f"min_child_samples={int(samples)} asks for {2 * int(samples)} rows in two "
            f"children, and there are {size}"
        )
    least, total = float(limits.min_child_weight), _find_curvature(problem, sums)
    if total == 0:
        return None  # which has been said before training
    if total is None and method.regularization == "relative":
        total = size  # an average row has 1
    if total is not None and 2 * least > total:
        reasons.append(
            f"min_child_weight={least:g} asks for a curvature of {2 * least:g} in two "
            f"children, and the rows of a round have {total:.3g}"
        )
    others = {"min_gain": limits.min_gain}
    if total is None:
        others["min_child_weight"] = limits.min_child_weight
    constraints = "interactions and " if limits.groups is not None else ""
    if limits.values is not None:
        others["l1"] = limits.values.l1
        constraints += "monotone and " if np.any(limits.values.monotone) else ""
    named = ", ".join(f"{k}={float(v):g}" for k, v in others.items() if float(v) > 0)
    named = constraints + named if named else constraints.removesuffix(" and ")
    if not reasons and named:
        return f"no split of {size} rows gains enough with {named}"
    return "; ".join(reasons) or f"no split of {size} rows lowers the loss"


def _is_constant(values):
    return values.size == 0 or bool(np.all(values == values.reshape(-1)[0]))


def _find_curvature(problem, sums):
    """Returns the curvature of all rows in the units of ``min_child_weight``."""
    if sums is None:
        return None
    method, limits = problem.method, problem.arrays.numbers.limits
    total, unit = sums.curvature, np.float32(1)
    if method.curvature == "unit":
        total = sums.weight
    elif method.curvature != method.leaf_curvature:
        return None
    elif method.regularization == "relative":
        if limits.l2 == 0:
            return None
        unit = np.asarray(sums.l2)[..., None] / limits.l2  # in which l2 counts, too
    return float(np.max(np.asarray(total) / unit))


def _count_slopes(problem, rows, state) -> Slopes:
    static = (_idleness_program, problem.loss, problem.method.curvature)
    run: Any = compiled(*static)
    if rows.spread is not None:
        run = compile_for_rows(rows.spread, *static, results=EVERYWHERE)
    return run(problem.constants, problem.data, state)


def _idleness_program(loss, curvature, constants, data, state):
    if loss.coupled:
        none: Any = None
        problem = Problem(Static(loss, none), Arrays(constants, none, data))
        objective = bind_groups(problem, state, data.weights)
        slopes = group_gradient(objective, state.scores)
        return count_group_slopes(slopes, data.weights)
    objective = Objective(
        loss, constants, data.targets, state.parameters, state.minimizer, state.kinks,
        state.coupling,
    )  # fmt: skip
    slopes, _ = derivatives(
        objective, state.scores, data.weights, curvature, seed=state.words
    )
    return count_slopes(objective, slopes, state.scores, data.weights)
