# SPDX-License-Identifier: Apache-2.0
"""The stages of a round as separate programs, for loops that run on the host.

In: a problem and the state after a round. Out: the next state and its trees, equal bit
for bit to those of :func:`jboost.boosting.round.grow_round`, which runs the same stages
as one traced function:

    derive    derivatives of every row      compiled for each loss
    grow      sample, grow, sum leaves      compiled once for all losses
    finish    leaf values, scores, losses   compiled for each loss

A new loss costs only the compilation of the first and the last. The search for the
exact values of leaves is compiled when a leaf first needs it: most losses never do.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jboost.boosting.leaf_values import fit_leaves, sum_leaves
from jboost.boosting.method import Method, Numbers
from jboost.boosting.reports import report_round
from jboost.boosting.round import add_trees, map_scores
from jboost.boosting.row_derivatives import RowDerivatives, row_derivatives
from jboost.boosting.row_sample import Round, sample_rows
from jboost.boosting.state import (
    Arrays,
    BoostState,
    Data,
    Problem,
    Static,
    bind_objective,
)
from jboost.boosting.structure import grow_structure
from jboost.numerics.packing import pack
from jboost.objective.curvature import needs_smoothing
from jboost.trees.tree import Tree


class Grown(NamedTuple):
    """The trees of a round before their leaves have values.

    Attributes:
      now: the round, without the derivatives of the rows.
      trees: splits, and sums of the leaves.
      leaf: of every row, for each score.
      complete: that of :class:`Derived`.
    """

    now: Round
    trees: Tree
    leaf: Int32[Array, "K N"]
    complete: Bool[Array, ""]


class Stored(NamedTuple):
    """What rounds leave behind, in arrays with a leading axis of rounds.

    Attributes:
      words: of a :class:`Summary`; see :func:`jboost.numerics.packing.pack`.
      snapshots: scores, where metrics need them.
      parameters: of an adaptive loss after each round; () for other losses.
    """

    words: Int32[Array, "R W"]
    snapshots: tuple[Float[Array, "R K N"], ...]
    parameters: Any


class Summary(NamedTuple):
    """The small results of a round.

    Attributes:
      losses: of the training rows, then of each validation set.
      improvement: out of the bag; None if all rows are in the bag.
      complete: whether no program left anything out. If not, the rounds from here on
        must be made again by programs that contain everything.
    """

    trees: Tree
    losses: Float[Array, " S"]
    improvement: Float[Array, ""] | None
    complete: Bool[Array, ""]


def for_derivatives(static: Static) -> Static:
    """Returns the part of the options that ``derive`` depends on."""
    method = replace(
        static.method, leaf_solver="newton", order_statistics=False, max_depth=1,
        num_bins=2, max_nodes=1, max_leaves=None, uniform=False, categorical=False,
        candidates="global", candidate_weights="samples",
    )  # fmt: skip
    return Static(static.loss, method)


def for_growth(method: Method) -> Method:
    """Returns the part of the options that ``grow`` depends on, without the loss."""
    return replace(
        method, curvature="exact", leaf_solver="newton", leaf_curvature="exact",
        order_statistics=False, regularization="relative",
    )  # fmt: skip


def without_loss(state: BoostState) -> BoostState:
    """Returns the state without what has another shape for another loss."""
    return state._replace(
        minimizer=None, kinks=None, coupling=None, parameters=(), first_parameters=()
    )


class Derived(NamedTuple):
    """The derivatives of a round.

    Attributes:
      shape: those that shape the trees.
      fitted: those that leaves are fitted with; None if they are the same.
      complete: whether ``smooth`` was right.
    """

    shape: RowDerivatives
    fitted: RowDerivatives | None
    complete: Bool[Array, ""]


def derive(
    static: Static, smooth: bool | None, arrays: Arrays, state: BoostState
) -> tuple[BoostState | None, Derived]:
    """Computes the derivatives of all rows.

    Args:
      smooth: see :func:`jboost.objective.curvature.derivatives`.

    Returns:
      The state, if the parameters of an adaptive loss have changed it; and derivatives.
    """
    problem = Problem(static, arrays)
    new, shape, fitted = row_derivatives(problem, state, smooth)
    complete, method = jnp.asarray(True), problem.method
    if smooth is False:
        for curvature in {method.curvature, method.leaf_curvature}:
            objective, weights = bind_objective(problem, state), problem.data.weights
            complete &= ~needs_smoothing(objective, state.scores, weights, curvature)
    derived = Derived(shape, None if fitted is shape else fitted, complete)
    return None if static.loss.estimate is None else new, derived


def grow(
    method: Method,
    numbers: Numbers,
    data: Data,
    state: BoostState,
    derived: Derived,
) -> Grown:
    """Grows the trees of a round, and sums the derivatives in their leaves."""
    static: Any = Static(None, method)  # type: ignore[arg-type]
    problem = Problem(static, Arrays((), numbers, data))
    shape, fitted = derived.shape, derived.fitted
    now = sample_rows(problem, state, shape, shape if fitted is None else fitted)

    def grow_one(one):
        tree, leaf = grow_structure(problem, now, one)
        return sum_leaves(data, now, one, tree, leaf), leaf

    trees, leaf = map_scores(grow_one, now.trees())
    rest: Any = now.fitted._replace(gradient=None, curvature=None)
    nothing: Any = None
    now = now._replace(shape=nothing, fitted=rest)
    return Grown(now, trees, leaf, derived.complete)


class Finish(NamedTuple):
    """The options that ``finish`` depends on besides loss and method.

    Attributes:
      keep: whether metrics need the scores.
      bagged: whether rounds leave rows out.
      rescue: whether leaves whose Newton step falls short get their exact value.
      kind: of the kinks of a piecewise linear loss, if it is known.
    """

    keep: bool
    bagged: bool
    rescue: bool
    kind: int | None


class Options(NamedTuple):
    """What the programs of a round contain; see :func:`choose_stages`."""

    smooth: bool | None
    finish: Finish


def choose_stages(
    problem: Problem, state: BoostState, reports: tuple[bool, bool], whole: bool
) -> Options:
    """Decides from concrete values what the programs of a round must contain.

    Args:
      state: before the first round.
      reports: ``keep`` and ``bagged`` of :class:`Finish`.
      whole: whether to include what is rarely needed.
    """
    method, kinks = problem.method, state.kinks
    smooth, rescue, kind = None, True, None
    if problem.loss.estimate is None:  # parameters may move the rows' minimizers
        if kinks is not None:
            kind = int(kinks.kind)
        policies = {method.curvature, method.leaf_curvature}
        looks = not problem.loss.quadratic and bool(policies & {"auto", "secant"})
        known = state.minimizer is not None and np.any(np.isfinite(state.minimizer))
        if looks and known:
            smooth = True
        elif not whole and not problem.loss.straight:
            smooth = False
    if not whole and method.leaf_solver == "guarded":
        rescue = bool(state.pointed)
    return Options(smooth, Finish(*reports, rescue, kind))


def finish(
    static: Static,
    options: Finish,
    arrays: Arrays,
    rate: Float[Array, ""],
    sets: tuple[Data, ...],
    state: BoostState,
    set_scores: tuple[Float[Array, "K N"], ...],
    grown: Grown,
    entry: Int32[Array, ""],
    stored: Stored,
) -> tuple[BoostState, tuple[Float[Array, "K N"], ...], Stored]:
    """Fits the leaves, adds the trees to the scores, and stores the round.

    Args:
      sets: the rows of the validation sets, and ``set_scores`` their scores.
      entry: where the round is stored.
    """
    problem, now, before, solving = Problem(static, arrays), grown.now, state, state
    if options.kind is not None:
        assert state.kinks is not None
        kind: Any = options.kind
        solving = state._replace(kinks=state.kinks._replace(kind=kind))

    def fit_one(one):
        each, tree, leaf = one
        return fit_leaves(
            problem, rate, solving, now, each, tree, leaf, rescue=options.rescue
        )

    trees, complete = map_scores(fit_one, (now.trees(), grown.trees, grown.leaf))
    state = add_trees(problem, state, now, trees, grown.leaf)
    report = report_round(
        problem, options.keep, sets, before, state, set_scores, trees,
        now.in_bag if options.bagged else None,
    )  # fmt: skip
    made = Stored(
        pack(
            Summary(
                trees,
                report.losses,
                report.improvement,
                grown.complete & jnp.all(complete),
            )
        ),
        report.snapshots,
        state.parameters,
    )

    def store(buffer, value):  # at[].set compiles to more than this
        return jax.lax.dynamic_update_index_in_dim(buffer, value, entry, 0)

    return state, report.set_scores, jax.tree.map(store, stored, made)
