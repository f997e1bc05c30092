# SPDX-License-Identifier: Apache-2.0
"""The data of a boosting run, and its state before the first round.

Nothing is checked here, or in the rounds; numbers may be traced.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, UInt32

from jboost.boosting.auto import count_least_rows, needs_minimizer
from jboost.boosting.first_sums import SumGuesses, no_sizes
from jboost.boosting.groups import find_group_start, round_words
from jboost.boosting.method import Method, Numbers
from jboost.codes.codes import Codes
from jboost.entry.collectives import current_shards, gather_rows, some
from jboost.entry.messages import show_fields
from jboost.entry.stages import elementwise, stage
from jboost.objective.coupled import (
    GroupObjective,
    PreparedGroups,
    prepare,
)
from jboost.objective.coupling import find_coupling
from jboost.objective.curvature import is_pointed
from jboost.objective.evaluation import (
    Coupling,
    Kinks,
    Objective,
    known_shares,
    known_targets,
    mean_weight,
)
from jboost.objective.group_tracing import GroupLoss
from jboost.objective.minimizers import find_kinks, find_minimizers, locate_minimizers
from jboost.objective.probing import Probe, start_probe
from jboost.objective.tracing import TracedLoss
from jboost.tables.groups import RowGroups
from jboost.trees.initial import MedianStart, initial_score, median_score
from jboost.trees.joint_start import move_scores


class Data(NamedTuple):
    """One set of rows: those of training, or of a validation set.

    Attributes:
      codes: the codes of the features, with ``order`` if the method sorts rows.
      targets: a pytree of arrays with a leading axis of N rows.
      weights: row weights. Rows of weight 0 do not count and may hold anything.
      groups: the groups of the rows; None for a loss of one row.
      prepared: data of the groups that all rounds share, if there are any.
      offset: scores before the initial score is added; None if rounds do not need them.
      values: the values of the features, clipped to their ranges, for linear leaves;
        None: leaves are constant.
    """

    codes: Codes
    targets: Any
    weights: Float[Array, " N"]
    groups: RowGroups | None = None
    prepared: PreparedGroups | None = None
    offset: Float[Array, "K N"] | None = None
    values: Float[Array, "N F"] | None = None


class Static(NamedTuple):
    """The part of a problem that a program is compiled for."""

    loss: TracedLoss | GroupLoss
    method: Method


class Arrays(NamedTuple):
    """The operands of a program; ``given`` are derivatives that the caller hands in."""

    constants: tuple[Any, ...]
    numbers: Numbers
    data: Data
    given: tuple[Float[Array, "K N"], Float[Array, "K N"]] | None = None


class Problem(NamedTuple):
    """The inputs of all rounds: a static part, and arrays that programs take."""

    static: Static
    arrays: Arrays

    @property
    def loss(self) -> Any:
        """The loss of one row; None in a program that serves all losses."""
        return self.static.loss

    @property
    def method(self) -> Method:
        """Options and sizes that shape the program."""
        return self.static.method

    @property
    def constants(self) -> tuple[Any, ...]:
        """The arrays that the loss closes over."""
        return self.arrays.constants

    @property
    def data(self) -> Data:
        """The training rows."""
        return self.arrays.data

    @property
    def leaves_out(self) -> bool:
        """Whether rounds may fit leaf values to a part of the rows."""
        sampled = self.arrays.numbers.subsample is not None
        return sampled and self.method.leaf_rows == "sample"


class BoostState(NamedTuple):
    """State of a run between two rounds.

    Attributes:
      start: scores of the training rows before the first round, offset included: [N]
        or [N, K] in the states that :func:`jboost.init` and :func:`jboost.boost_step`
        return, [K, N] within a round.
      steps: sums of the leaf values of all trees so far, in the same shape. They are
        kept apart from ``start`` because float32 might lose them in a larger sum.
      minimizer: each row's own minimizer of the loss; inf: none.
      kinks: the kinks of a piecewise linear loss, else None.
      coupling: the interaction of the scores at the start; None for K = 1.
      init_score: the initial score, [] or [K].
      parameters: parameters of an adaptive loss, estimated from ``scores``; else ().
      first_parameters: the parameters of the first round, if losses are reported at
        them; else ().
      pointed: whether the loss resembles |r| at the start: in 75 % of the rows the
        second derivative is at most a tenth of the secant weight.
      endless: whether no row has a minimum of its own, for each score.
      weight_unit: min(1, mean of the positive weights), the weight of the rows that
        limits of regularization are counted in.
      known_shares: share of the rows, by weight, with a known target of each score;
        1 if scores share a target.
      least_rows: minimum rows of a child where ``min_child_samples`` is "auto".
      first_mean: mean curvature of the first round for each score; 1 before it.
      concentration: N / N_eff of the first round, the number of rows per equally
        informative row; 1 before it.
      words: the random seed of the run.
      round: the number of rounds made.
      sizes: guesses that save collectives; None if all rows are on one device.
      lost: the first round with derivatives that are not finite, the number of rows
        that have them, and the first such row; 0 if there was no such round.
      probe: curvature estimates for a loss of groups; None for other losses.

    Example:
      >>> import jax, numpy as np, jboost as jb
      >>> x = np.arange(8.0)[:, None]
      >>> codes = jb.apply_bins(jb.fit_bins(x), x)
      >>> state = jb.init(codes, x[:, 0], jb.losses.squared_error, jax.random.key(0))
      >>> float(state.init_score), int(state.round)
      (3.5, 0)
    """

    start: Float[Array, "..."]
    steps: Float[Array, "..."]
    minimizer: Float[Array, "K N"] | None
    kinks: Kinks | None
    coupling: Coupling | None
    init_score: Float[Array, "*K"]
    parameters: Any
    first_parameters: Any
    pointed: Bool[ArrayLike, ""]
    endless: Bool[ArrayLike, " K"]
    weight_unit: Float[ArrayLike, ""]
    known_shares: Float[ArrayLike, " K"]
    least_rows: Int32[ArrayLike, "*K"]
    first_mean: Float[Array, " K"]
    concentration: Float[Array, " K"]
    words: UInt32[Array, "2"]
    round: Int32[Array, ""]
    sizes: SumGuesses | None
    lost: Int32[Array, "3"]
    probe: Probe | None = None

    @property
    def scores(self) -> Float[Array, "..."]:
        """Scores of the training rows, offset included: ``start + steps``."""
        return self.start + self.steps

    def at(self, scores: Float[Array, "..."]) -> "BoostState":
        """Returns the state at other scores, for loops that change them themselves."""
        return self._replace(start=scores, steps=jnp.zeros_like(scores))

    def __repr__(self) -> str:
        """Shows a summary of the fields; the arrays would fill pages."""
        return show_fields(self)


class StartPoint(NamedTuple):
    """Start of training.

    Attributes:
      init_score: the initial scores, or a request for the median; None: the argmin.
      words: the random seed of the run.
      minimizer: each row's own minimizer, if :func:`own_minimizers` has found it.
    """

    init_score: Float[Array, " K"] | MedianStart | None
    words: UInt32[Array, "2"] | UInt32[np.ndarray, "2"]
    minimizer: Float[Array, "K N"] | None = None


def start_state(
    loss: TracedLoss | GroupLoss,
    constants: tuple[Any, ...],
    data: Data,
    start: StartPoint,
) -> tuple[BoostState, Int32[ArrayLike, ""]]:
    """Makes the state before the first round.

    The second result is the index in ``START_RULES`` of the rule that gave the initial
    score; for losses of groups 1 where all common starts have the same loss.
    """
    if isinstance(loss, GroupLoss):
        return _start_groups(loss, constants, data, start)
    offset, begin = _offset_of(data), start.init_score
    known = None if isinstance(begin, MedianStart) else begin
    scores = offset if known is None else move_scores(offset, known)
    parameters = estimate_parameters(loss, constants, data, scores)
    objective = Objective(loss, constants, data.targets, parameters, None)
    if needs_minimizer(loss):
        objective = find_minima(objective, data, start.minimizer)
    rule = np.int32(0)
    if known is None:
        if begin is None:
            known, rule = initial_score(objective, offset, data.weights)
        else:
            known = median_score(objective, offset, data.weights)
        scores = move_scores(offset, known)
        parameters = estimate_parameters(loss, constants, data, scores)
    known, one, words, number, steps, lost = _begin_rounds(known, start.words, scores)
    pointed = is_pointed(objective, scores, data.weights)
    targets = known_targets(loss, data.targets)
    state = BoostState(
        start=scores,
        steps=steps,
        minimizer=objective.minimizer,
        kinks=objective.kinks,
        coupling=find_coupling(
            objective._replace(parameters=parameters), scores, data.weights
        ),
        init_score=known,
        parameters=parameters,
        first_parameters=parameters if loss.reports_first else (),
        pointed=pointed,
        endless=_are_unbounded(objective.minimizer, one, data.weights),
        weight_unit=find_weight_unit(data.weights),
        known_shares=known_shares(targets, data.weights, len(offset)),
        least_rows=count_least_rows(pointed, objective.kinks, data.weights, targets),
        first_mean=one,
        concentration=one,
        words=words,
        round=number,
        sizes=None if current_shards() is None else no_sizes(offset.shape[0]),
        lost=lost,
    )
    return state, rule


def _start_groups(loss, constants, data, start):
    offset, known = _offset_of(data), start.init_score
    words = jnp.asarray(start.words)
    number = rule = jnp.int32(0)
    if isinstance(known, MedianStart):
        raise ValueError(
            "init_score must be 'auto', a number or K numbers for a loss of groups, "
            "whose rows have no minimizers of their own, got 'median'"
        )
    if known is None:
        parameters = estimate_parameters(loss, constants, data, offset)
        objective = GroupObjective(
            loss, constants, data.targets, data.weights, data.groups, parameters,
            round_words(words, number), data.prepared,
        )  # fmt: skip
        known, fell_back = find_group_start(objective, offset)
        rule = fell_back.astype(jnp.int32)
    scores = move_scores(offset, known)
    parameters = estimate_parameters(loss, constants, data, scores)
    known, one, words, number, steps, lost = _begin_rounds(known, words, scores)
    state = BoostState(
        start=scores, steps=steps, minimizer=None, kinks=None, coupling=None,
        init_score=known,
        parameters=parameters,
        first_parameters=parameters if loss.reports_first else (),
        pointed=np.asarray(False), endless=one > 0,
        weight_unit=find_weight_unit(data.weights), known_shares=one,
        least_rows=count_least_rows(np.asarray(False), None, data.weights),
        first_mean=one, concentration=one, words=words, round=number, sizes=None,
        lost=lost,
        probe=start_probe(scores),
    )  # fmt: skip
    return state, rule


@elementwise
def _begin_rounds(numpy, init_score, words, scores):
    """Returns init_score, ones, words, round, steps and lost; see BoostState."""
    one = numpy.ones(init_score.shape, np.float32)
    init_score = init_score if init_score.shape[0] > 1 else init_score[0]
    steps = numpy.zeros(scores.shape, np.float32)
    lost = numpy.zeros(3, np.int32)
    return init_score, one, numpy.asarray(words), numpy.int32(0), steps, lost


def _offset_of(data):
    assert data.offset is not None
    return data.offset


def find_weight_unit(weights: Float[Array, " N"]) -> Float[ArrayLike, ""]:
    """Returns min(1, mean of the positive weights).

    "Relative" regularization counts rows of this weight. A row of weight k is then k
    rows, and dividing all weights by one number leaves the model as it was.
    """
    return _limit_unit(mean_weight(weights))


@elementwise
def _limit_unit(numpy, mean):
    # Not minimum: its derivative at 1 would be one half.
    return numpy.where(mean < 1, mean, np.float32(1)).astype(np.float32)


@elementwise
def _are_unbounded(numpy, minimizer, one, weights):
    if minimizer is None:  # a quadratic loss
        return one == 0
    bounded = numpy.isfinite(minimizer) & (weights > 0)[None, :]
    return ~some(numpy.any(bounded, axis=1))


def own_minimizers(
    loss: TracedLoss | GroupLoss, constants: tuple[Any, ...], data: Data
) -> Float[Array, "K N"] | None:
    """Finds each row's own minimizer, where it depends on the row's target alone.

    It does not depend on weights, and so not on the folds of a cross-validation. The
    result is None if the method does not need it or it depends on estimated parameters.
    """
    if loss.estimate is not None or not needs_minimizer(loss):
        return None
    assert not isinstance(loss, GroupLoss)
    objective = Objective(loss, constants, data.targets, (), None)
    return find_minimizers(objective, data.weights.shape[0])


def find_minima(
    objective: Objective, data: Data, minimizer: Float[Array, "K N"] | None = None
) -> Objective:
    """Adds the rows' own minimizers to an objective, and kinks if there can be any."""
    if minimizer is None:
        minimizer = locate_minimizers(objective, data.weights.shape[0])
    objective = objective._replace(minimizer=minimizer)
    if objective.loss.piecewise_linear:
        objective = objective._replace(kinks=find_kinks(objective, data.weights))
    return objective


def prepare_groups(
    loss: TracedLoss | GroupLoss,
    constants: tuple[Any, ...],
    data: Data,
    sampled: bool,
) -> Data:
    """Adds the prepared groups to the data if they are the same in all rounds."""
    groups = data.groups
    if groups is None or not isinstance(loss, GroupLoss) or groups.kind == "random":
        return data
    if groups.kind == "all" and sampled:  # rows leave their group
        return data
    words = jnp.zeros(2, jnp.uint32)
    objective = GroupObjective(
        loss, constants, data.targets, data.weights, groups, (), words
    )
    return data._replace(prepared=prepare(objective))


def bind_groups(
    problem: Problem, state: BoostState, weights: Float[Array, " N"]
) -> GroupObjective:
    """Returns the objective of a loss of groups in a round, with these weights."""
    data = problem.data
    assert data.groups is not None
    return GroupObjective(
        problem.loss, problem.constants, data.targets, weights, data.groups,
        state.parameters, round_words(state.words, state.round), data.prepared,
    )  # fmt: skip


def bind_objective(problem: Problem, state: BoostState) -> Objective:
    """Returns the objective of all rows, with the parameters of the state."""
    return Objective(
        problem.loss,
        problem.constants,
        problem.data.targets,
        state.parameters,
        state.minimizer,
        state.kinks,
        state.coupling,
    )


def estimate_parameters(
    loss: TracedLoss | GroupLoss,
    constants: tuple[Any, ...],
    data: Data,
    scores: Float[Array, "K N"],
) -> Any:
    """Returns the parameters of an adaptive loss at these scores; () for others."""
    if loss.estimate is None:
        return ()
    rows = (scores, data.targets, data.weights)
    if isinstance(loss, GroupLoss):
        assert data.groups is not None
        groups = data.groups
        if groups.weights is not None:  # a loss that weighs rows itself
            rows = (*rows[:2], jnp.where(data.weights > 0, groups.weights, 0.0))
        number = groups.number
        if number is None:
            row = jnp.arange(data.weights.shape[0], dtype=jnp.int32)
            random = groups.kind == "random"
            number = row // groups.width if random else jnp.zeros_like(row)
        rows += (number,)
    return _estimate_parameters(loss, constants, *rows)


@stage
def _estimate_parameters(loss, constants, scores, targets, weights, *groups):
    rows = scores[0] if scores.shape[0] == 1 else scores.T
    # Fused with the operations around it, a sum may be rounded differently, and a
    # continued run would differ from one without interruption.
    inputs = gather_rows((rows, targets, weights, *groups))
    inputs = jax.lax.optimization_barrier(inputs)
    return jax.lax.optimization_barrier(loss.estimate(constants, *inputs))


def reported_parameters(loss: TracedLoss | GroupLoss, state: BoostState) -> Any:
    """Returns the loss parameters for the report of a round."""
    return state.first_parameters if loss.reports_first else state.parameters
