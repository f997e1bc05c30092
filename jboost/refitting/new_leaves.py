# SPDX-License-Identifier: Apache-2.0
"""refit: gives a model new leaf values for new rows, weights or another loss.

In: a model, rows, a loss. Out: the model with the same splits; its leaf values are
those that training would fit at the same leaves, one round after the other.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int32, Shaped

from jboost import losses
from jboost.boosting.derivatives import (
    RoundPlan,
    choose_scaling,
    differentiate,
    start_round,
)
from jboost.boosting.method import initial_scores, make_method
from jboost.boosting.round import (
    add_trees,
    fit_trees,
    map_scores,
    shaping_limits,
    sum_leaves,
    sum_shared_leaves,
)
from jboost.boosting.settings import (
    LeafSettings,
    Settings,
    learning_rates,
    read_settings,
    takes_settings,
)
from jboost.boosting.state import Arrays, BoostState, Problem, Static
from jboost.codes.codes import DenseCodes
from jboost.entry import checks
from jboost.entry.arguments import explain_arguments
from jboost.entry.decorators import on_host
from jboost.entry.programs import FULL, compiled
from jboost.kernels.library import resolve_implementation, takes_implementation
from jboost.model.ensemble import Ensemble, check_model
from jboost.objective.faults import warn_of_lost_rows
from jboost.objective.tracing import trace_loss
from jboost.refitting.model_rows import (
    ModelRows,
    find_leaves,
    read_rows,
    rounds_at_once,
)
from jboost.training.chunks import Job, open_bar
from jboost.training.rows import PaddedRows
from jboost.training.starting import start
from jboost.trees.tree import LeafSums, Tree


@explain_arguments
@on_host("call jb.refit on concrete arrays")
@takes_implementation
@takes_settings
def refit(
    model: Ensemble,
    x: Any,
    y: Any,
    loss: Callable[..., Any] | losses.Adaptive = losses.squared_error,
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    decay: float = 0.0,
    init_score: Any = "auto",
    progress: bool = False,
    implementation: str | None = None,
    **settings: Unpack[LeafSettings],
) -> Ensemble:
    """Returns the model with new leaf values, fitted to other rows or another loss.

    The splits stay. Round by round, the derivatives of the loss are evaluated at the
    current scores F, the leaves are fitted as in :func:`jboost.fit`, and the new tree
    is added to the scores:

        value = decay * old value + (1 - decay) * learning_rate * fitted value

    so that each round corrects the remaining errors of the rounds before it. The
    initial score is mixed in the same way. This is the method of LightGBM's
    ``Booster.refit(decay_rate=0.9)`` and XGBoost's ``process_type="update",
    updater="refresh"`` (decay 0).

    A leaf without rows of positive weight keeps its old value. With the training rows,
    the loss and the settings of training, and decay 0, the result is the trained model,
    except where leaf values were fitted to a sample of the rows (``leaf_rows``), or
    trees to leaf bounds that the model does not store (``monotone``): refitting uses
    all rows, and new values need not be monotone.

    Args:
      model: a model from :func:`jboost.fit`, a file or another library; for an
        estimator, its ``model_``.
      x, y: the rows, as for :func:`jboost.fit`, with the columns and
        categories of the model. Dense or sparse; not a stream.
      loss: ``loss(score, target) -> scalar`` for one row. It may be another one than in
        training, with the same number of scores K.
      sample_weight: row weights [N], >= 0.
      offset: numbers [N] or [N, K], added to the score.
      decay: the share of the old values that is kept, from 0 (only the rows count) to 1
        (nothing changes).
      init_score: the new initial score: "auto" for the argmin of the weighted loss,
        "median" of the rows' own minimizers, a number or K numbers.
        ``model.init_score`` keeps the old one.
      progress: shows a bar.
      implementation: the kernels to run, as for :func:`jboost.fit`.
      {settings}

    The model does not store the settings of training: pass those that differ from the
    defaults, ``learning_rate`` above all.

    Returns:
      A new model. Its ``sums``, which importance and SHAP values use, are those of the
      given rows: a leaf without rows has weight 0.

    Raises:
      TypeError, ValueError: for invalid arguments; a leaf value became infinite or NaN.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> y = x[:, 0] + x[:, 1] ** 2
      >>> model, history = jb.fit(x, y, num_rounds=20)
      >>> later = jb.refit(model, x, y + 5, decay=0.1)
      >>> bool(np.abs(jb.predict(later, x) - (y + 5)).mean() < 1.0)
      True

    References:
      LightGBM, ``GBDT::RefitTree``; XGBoost, ``TreeRefresher``.
    """
    check_model(model)
    decay = float(checks.check_number("decay", decay, least=0.0, most=1.0))
    # In training, a tree adds nothing if its root is below min_child_weight.
    chosen = read_settings(
        {
            **settings, "init_score": init_score, "num_scores": model.num_scores,
            "min_child_weight": 0.0, "share_structure": model.shares_structure,
        }
    )  # fmt: skip
    rates = np.asarray(learning_rates(chosen.learning_rate, model.num_rounds))
    begin = initial_scores(chosen)
    padded = not isinstance(loss, losses.Adaptive)
    rows = read_rows(model, (x, y, sample_weight, offset), loss, padded)
    with resolve_implementation(rows.rows.data.weights):
        job = Job(_make_problem(chosen, loss, rows.rows), rates, rows.rows, {}, {}, {})
        state, _ = start(job, begin, seed=0)
        if decay > 0:
            mixed = _mix(decay, model.init_score, state.init_score)
            state, _ = start(job, mixed.reshape(-1), seed=0)
        return _refit_rounds(model, rows, job, state, decay, progress)


def _make_problem(settings: Settings, loss: Any, rows: PaddedRows) -> Problem:
    """Traces the loss for the rows, and sorts the settings."""
    num_rows = len(rows.data.weights)
    traced, constants = trace_loss(loss, rows.data.targets, settings.num_scores)
    no_features: Any = np.zeros((0, num_rows), np.uint8)  # the leaves are known
    method, numbers = make_method(
        settings,
        traced,
        DenseCodes(no_features),
        num_rows=num_rows,
        uniform=False,
        max_bins=settings.max_bins,
        num_features=0,
        categories=None,
    )
    return Problem(Static(traced, method), Arrays(constants, numbers, rows.data))


def _refit_rounds(model, rows: ModelRows, job, state, decay, progress):
    """Returns the model with the leaf values of all its rounds."""
    step = rounds_at_once(rows)
    run = compiled(_refit_chunk, job.problem.static, effort=FULL)
    old: Any = np.asarray(model.leaf_value)
    none, no_l2 = old[:0], old[:0, :, 0]
    parts = [Refitted(none, LeafSums(none, none, none, no_l2))]  # no rounds
    first, before = 0, np.asarray(state.lost)
    with open_bar(model.num_rounds, progress) as bar:
        for leaves in find_leaves(model, rows):
            count = len(leaves)
            chunk = [_fill(a, step) for a in (job.rates[first:], leaves, old[first:])]
            state, found = run(
                job.problem.arrays, np.float32(decay), np.int32(count), *chunk, state
            )
            found = jax.tree.map(lambda a, n=count: np.asarray(a)[:n], found)
            bad = ~np.isfinite(found.leaf_value).all(axis=(1, 2))
            if bad.any():
                raise ValueError(
                    f"the leaf values of round {first + int(np.argmax(bad))} became "
                    "infinite or NaN: the loss diverges, or its gradient is NaN where "
                    "its value is finite; use a smaller learning_rate, or a larger "
                    "decay or l2"
                )
            before = _check_lost(before, state, rows.rows)
            parts.append(found)
            first += count
            bar.update(count)
    joined: Any = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    return replace(
        model,
        leaf_value=jax.device_put(joined.leaf_value),
        sums=LeafSums(*jax.device_put(tuple(joined.sums))),
        init_score=state.init_score,
    )


class Refitted(NamedTuple):
    """New values of the leaves of some rounds, and the sums that they come from."""

    leaf_value: Float[Array, "R K L"]
    sums: LeafSums


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


def _mix(decay, old, new):
    # Without decay to the bit, with the sign of a zero.
    return jnp.where(decay > 0, decay * old + (1 - decay) * new, new)


def _refit_chunk(static, arrays, decay, count, rates, leaves, old, state):
    """Refits the first ``count`` of some rounds, traced."""
    problem = Problem(static, arrays)

    def one_round(number, carry):
        state, found = carry
        parts = rates[number], leaves[number], old[number]
        state, trees = _refit_round(problem, decay, *parts, state)

        def store(buffer, value):
            return jax.lax.dynamic_update_index_in_dim(buffer, value, number, 0)

        assert trees.sums is not None
        new = Refitted(trees.leaf_value, trees.sums)
        return state, jax.tree.map(store, found, new)

    zeros = jnp.zeros_like(old)
    sums = LeafSums(zeros, zeros, zeros, jnp.zeros(old.shape[:2], jnp.float32))
    return jax.lax.fori_loop(0, count, one_round, (state, Refitted(zeros, sums)))


def _refit_round(
    problem: Problem,
    decay: Float[Array, ""],
    learning_rate: Float[Array, ""],
    leaf: Int32[Array, "S N"],
    old: Float[Array, "K L"],
    state: BoostState,
) -> tuple[BoostState, Tree]:
    """Makes one round as training does, with the leaf of every row given."""
    state, raw = differentiate(problem, state)
    plan = start_round(problem, choose_scaling(problem), state, raw)
    trees = _sum_old_leaves(problem, plan, leaf, old)
    pointed = state.pointed
    trees = fit_trees(problem, learning_rate, state, plan, trees, leaf, pointed)
    assert trees.sums is not None
    mixed = _mix(decay, old, trees.leaf_value)
    trees = trees._replace(leaf_value=jnp.where(trees.sums.weight > 0, mixed, old))
    return add_trees(problem, state, plan, trees, leaf), trees


def _sum_old_leaves(problem: Problem, plan: RoundPlan, leaf: Any, old: Any) -> Tree:
    """Returns the trees of a round with the sums of their leaves."""
    if problem.method.share_structure:
        tree = _bare_tree(old[0], plan.limits._replace(values=None))
        return sum_shared_leaves(problem.data, plan, tree, leaf[0])

    def sum_tree(parts):
        leaf, old, task = parts
        tree = _bare_tree(old, shaping_limits(plan, task))
        return sum_leaves(problem, plan, task, tree, leaf)

    return map_scores(sum_tree, (leaf, old, plan.trees()))


def _bare_tree(values, limits):
    """Returns a tree without splits, for functions that read only its leaves."""
    none: Any = None
    bounds = None
    if limits.values is not None:
        bounds = jnp.broadcast_to(limits.values.bounds, (len(values), 2))
    return Tree(none, none, none, values, bounds=bounds)
