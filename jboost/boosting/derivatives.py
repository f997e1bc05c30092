# SPDX-License-Identifier: Apache-2.0
"""Derivatives of a round: evaluated, scaled, and projected for trees of all scores.

Out: a :class:`RoundPlan`. A tree of all scores grows along a random direction u, as in
SketchBoost (Iosipoi and Vakhrushev 2022, section 3.3), in any units of the scores: with
g~ik = g_ik / sqrt(m_k), m_k the mean curvature, and random signs z_i of the rows,

    u~ = C^-a sum_i w_i z_i g~i,    C = sum_i w_i g~i g~i',    u_k = u~_k / sqrt(m_k),

where a = 1/2 if scores compete, else 1.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt8, UInt32

from jboost.boosting.auto import decide_by_data, needs_minimizer
from jboost.boosting.first_sums import ShardStatistics, SumGuesses, sum_first
from jboost.boosting.groups import draw_bag
from jboost.boosting.method import Method
from jboost.boosting.state import (
    BoostState,
    Data,
    Problem,
    bind_groups,
    bind_objective,
    find_minima,
)
from jboost.entry.collectives import count_rows, first_row, most, use_shards
from jboost.entry.context import vary
from jboost.kernels import grow_cpu
from jboost.kernels.exact_sums import skip_on_cpu, split_weights
from jboost.kernels.library import choose
from jboost.kernels.xla import add_halves, exponent_above, power_of_two, round_alone
from jboost.numerics.derivatives import weigh
from jboost.numerics.exact import sum_rows
from jboost.numerics.random import derive_seeds, hash_words
from jboost.objective.curvature import (
    INFORMED,
    Chosen,
    count_lost,
    derivatives,
    informed_derivatives,
    least_curvature,
    mean_positive,
    round_seed,
    smoothing_scale,
)
from jboost.objective.evaluation import known_targets, weighted_mean
from jboost.objective.probing import raise_curvature, renew_probe
from jboost.trees.limits import TreeLimits, count_in
from jboost.trees.splitting import UNBOUNDED


class RowDerivatives(NamedTuple):
    """Derivatives of every row, before weights.

    Attributes:
      mean: the divisor for "relative" regularization; otherwise 1.
      first_mean: the mean curvature of the first round; 1 if it is not used.
      concentration: N / N_eff of the first round, see :func:`_concentrate`; 1 if it is
        not used.
      value_unit: the unit of leaf values fitted with these derivatives, in units of
        the values that the splits see.
      factor: the factor already applied to each row's derivatives; None: 1.
      known: mask of rows with a known target of this score; None: all rows.
    """

    gradient: Float[Array, "*K N"]
    curvature: Float[Array, "*K N"]
    mean: Float[Array, "*K"]
    first_mean: Float[Array, "*K"]
    concentration: Float[Array, "*K"]
    value_unit: Float[Array, "*K"]
    factor: Float[Array, "*K N"] | None = None
    known: Bool[Array, "*K N"] | None = None


class RawDerivatives(NamedTuple):
    """Gradient and positive curvature by one policy; see :class:`RowDerivatives`."""

    gradient: Float[Array, "K N"]
    curvature: Float[Array, "K N"]
    factor: Float[Array, "K N"] | None = None
    known: Bool[Array, "K N"] | None = None


class Policy(NamedTuple):
    """Properties of a curvature policy that determine how its values are scaled.

    Attributes:
      unit: whether the curvature is 1, whatever the scale of the loss.
      raised: whether the curvature is raised to a least value.
      by_start: whether this least value depends on the start of training.
      varies: whether the concentration of information is measured.
    """

    unit: bool
    raised: bool
    by_start: bool
    varies: bool


class Scaling(NamedTuple):
    """Rules for scaling derivatives, without the loss.

    If ``relative``, they are divided by the mean curvature. There is one policy, or one
    of the splits and one of the leaves.
    """

    relative: bool
    policies: tuple[Policy, ...]


def choose_scaling(problem: Problem) -> Scaling:
    """Returns how the derivatives of a problem are scaled."""
    method = problem.method
    loss: Any = problem.loss
    num_scores = 1 if loss is None else loss.num_scores
    given = problem.arrays.given is not None
    minima = loss is not None and needs_minimizer(loss)

    def describe(curvature):
        has_least = curvature == "function" or (minima and curvature != "unit")
        raised = not given and has_least
        by_start = raised and curvature == "auto" and num_scores > 1
        varies = curvature != "unit" and not given and minima
        return Policy(curvature == "unit", raised, by_start, varies)

    policies = tuple(describe(curvature) for curvature in list_policies(method))
    return Scaling(method.regularization == "relative", policies)


def differentiate(
    problem: Problem,
    state: BoostState,
    smooth: bool | None = None,
    leave_out: bool = True,
) -> tuple[BoostState, tuple[RawDerivatives, ...]]:
    """Evaluates the derivatives of every row.

    ``smooth`` is that of :func:`jboost.objective.curvature.derivatives`. Unless
    ``leave_out``, :func:`jboost.boosting.round_programs.split_pairs` replaces
    derivatives that are not finite. The state has new minimizers where parameters of
    the loss have moved them, and new sizes where rows are sharded. Derivatives are
    returned for each policy.
    """
    method, weights = problem.method, problem.data.weights
    if problem.loss.coupled:
        return _differentiate_groups(problem, state)
    objective = bind_objective(problem, state)
    if problem.loss.estimate is not None and state.minimizer is not None:
        # The parameters have changed, and with them the minimum of a row may move.
        objective = find_minima(objective, problem.data)
        state = state._replace(minimizer=objective.minimizer, kinks=objective.kinks)

    delta = None
    alone = problem.loss.num_scores == 1  # others may have scores without minima
    if state.sizes is not None and alone and (problem.loss.piecewise_linear or smooth):
        guess, (scores, sizes) = state.sizes.smoothing, (state.scores, state.sizes)
        delta, found = smoothing_scale(objective, scores, weights, guess)
        state = state._replace(sizes=sizes._replace(smoothing=found))

    def evaluate(curvature):
        if curvature not in INFORMED:
            return *derivatives(
                objective, state.scores, weights, curvature, smooth, raised=False,
                delta=delta,
            ), None  # fmt: skip
        seed = round_seed(state.words, state.round)
        gradient, positive, factor = informed_derivatives(
            objective, state.scores, weights, curvature, seed
        )
        if factor is not None:
            factor = jnp.where(jnp.isfinite(factor), factor, 0.0)
        return gradient, positive, factor

    known = known_targets(problem.loss, problem.data.targets)
    policies = list_policies(method)
    if problem.arrays.given is not None:
        raw = RawDerivatives(*problem.arrays.given, known=known)
        return state, (raw,) * len(policies)
    raw = tuple(RawDerivatives(*evaluate(each), known) for each in policies)
    if problem.loss.quadratic and "function" not in policies:
        return state, raw
    return _leave_out(state, raw, weights) if leave_out else (state, raw)


def _leave_out(state, raw, weights):
    """Returns the state, and 0 for both derivatives where one is NaN or infinite."""
    kept, counts = [], []
    for each in raw:
        pair = each.gradient, each.curvature
        finite = jnp.isfinite(each.gradient) & jnp.isfinite(each.curvature)
        lost = ~jnp.all(finite, axis=0) & (weights > 0)
        gradient, positive = (jnp.where(finite, values, 0.0) for values in pair)
        kept.append(each._replace(gradient=gradient, curvature=positive))
        counts.append(count_lost(jnp.any(lost), lambda lost=lost: lost))
    return note_lost(state, counts[0]), tuple(kept)


def note_lost(state: BoostState, lost: Int32[Array, "2"]) -> BoostState:
    """Records the :func:`count_lost` of the first round that loses derivatives."""
    noted = jnp.concatenate([state.round[None], lost])
    first = (state.lost[1] == 0) & (lost[0] > 0)
    return state._replace(lost=jnp.where(first, noted, state.lost))


def _differentiate_groups(problem, state):
    weights, groups = problem.data.weights, problem.data.groups
    if groups.kind != "ids" and problem.leaves_out:
        # Rows outside the bag leave their group.
        weights = jnp.where(draw_rows(problem, state), weights, 0.0)
    objective = bind_groups(problem, state, weights)
    gradient, probe = renew_probe(objective, state.scores, state.probe, state.round)
    raw = tuple(
        RawDerivatives(
            gradient,
            jnp.ones_like(gradient)
            if policy == "unit"
            else raise_curvature(probe, objective.weights),
        )
        for policy in list_policies(problem.method)
    )
    return _leave_out(state._replace(probe=probe), raw, weights)


def draw_rows(problem: Problem, state: BoostState) -> Bool[Array, " N"]:
    """Draws the rows that the splits of a round are found from."""
    share, weights = problem.arrays.numbers.subsample, problem.data.weights
    if share is None:
        return weights > 0
    seed, share = round_seeds(state)[0], jax.lax.stop_gradient(share)
    return draw_bag(problem.data.groups, seed, weights, share)


def round_seeds(state: BoostState) -> UInt32[Array, "seeds 2"]:
    """Returns the seeds of a round: one for the rows, and one for each tree."""
    num_scores = state.steps.shape[0]
    uses = jnp.arange(num_scores + 1, dtype=jnp.int32)
    return derive_seeds(state.words, (num_scores + 1) * state.round + uses)


def scale_derivatives(
    scaling: Scaling,
    weights: Float[Array, " N"],
    state: BoostState,
    raw: tuple[RawDerivatives, ...],
    first: ShardStatistics | None = None,
) -> tuple[RowDerivatives, RowDerivatives, ShardStatistics | None]:
    """Scales the derivatives for the splits and those for the leaf values.

    Both pairs are the same unless ``method.leaf_curvature`` differs from the curvature
    of the splits. Then "relative" divides both by the mean curvature of the splits,
    except for unit curvature, which is independent of the scale of the loss: each pair
    is then divided by its own mean.
    """
    (shape, first), *rest = (
        _scale(scaling, weights, state, policy, each, first)
        for policy, each in zip(scaling.policies, raw, strict=True)
    )
    if not rest:
        return shape, shape, first
    ((fitted, _),) = rest
    if not scaling.policies[0].unit:
        fitted = fitted._replace(
            mean=shape.mean,
            first_mean=shape.first_mean,
            concentration=shape.concentration,
        )
        return shape, fitted, first
    mean = weighted_mean(fitted.curvature, weights)
    unit = 1 / jnp.where(mean > 0, mean, 1.0)
    return shape, fitted._replace(value_unit=unit), first


def _scale(scaling, weights, state, policy, raw, first):
    """Returns one scaled pair, and the first sums with ``holds`` updated."""
    gradient, positive, factor, known = raw
    if policy.raised:
        mean = mean_positive(positive, weights) if first is None else first.mean
        least = least_curvature(mean, state.coupling.start if policy.by_start else None)
        positive = jnp.maximum(positive, least[:, None])
        if first is not None:
            first = first._replace(holds=first.least >= least)
    one = jnp.ones(state.steps.shape[0], jnp.float32)
    if policy.unit or not scaling.relative:
        units = (one, one, one, one)
        return RowDerivatives(gradient, positive, *units, factor, known), first
    if first is None:
        mean = weighted_mean(positive, weights)
    else:
        mean = jax.lax.cond(
            jnp.all(first.holds),
            lambda *_: first.mean,
            weighted_mean, positive, weights,
        )  # fmt: skip
    flat = mean == 0  # no row has any curvature: all count alike
    positive = jnp.where(flat[:, None], 1.0, positive)
    if first is not None:
        first = first._replace(holds=first.holds & ~flat)
    # Means are over all rows; those without a target have no curvature.
    mean = _share_among_scores(mean / state.known_shares, flat, state, factor, weights)
    first_mean = jnp.where(state.round > 0, state.first_mean, mean)
    concentration = one
    if policy.varies:
        concentration = skip_on_cpu(
            state.round == 0,
            partial(_concentrate, weights),
            lambda state, *_: state.concentration,
            state, gradient, positive,
        )  # fmt: skip
    mean = concentration * _follow(mean, first_mean)
    pair = RowDerivatives(
        gradient, positive, mean, first_mean, concentration, one, factor, known
    )
    return pair, first


def list_policies(method: Method) -> tuple[Chosen, ...]:
    """Returns the policy of the splits and, if it differs, that of the leaves."""
    if method.leaf_curvature == method.curvature:
        return (method.curvature,)
    return method.curvature, method.leaf_curvature


def _concentrate(weights, state, gradient, curvature):
    """Returns N / N_eff: the rows per equally informative row, for each score.

    After the first round, it is that of the state.

    The information of a row is i = (h + g^2 / phi) / 2 with phi = mean g^2 / mean h,
    which is near 1 for a likelihood. The N rows hold as much as N_eff = (sum i)^2 /
    sum i^2 equally informative ones. For a logistic loss at a constant probability p,
    N / N_eff is 1 / (4 p (1 - p)). Times the mean curvature, this is 1/4, the greatest
    curvature that a row can have, however rare positive rows are.

    The result is 1 for scores that interact (those that compete share the curvature of
    a row already), and for scores where some row has a minimum of its own: far from it,
    the curvature may be anything.
    """
    # Rows of weight 0 may hold anything, and have a derivative in their weight.
    known = jnp.isfinite(gradient) & jnp.isfinite(curvature)
    gradient, curvature = (
        jnp.where(known, values, 0.0) for values in (gradient, curvature)
    )
    # Divided by the largest, so that squares of squares are finite.
    counted = jnp.where((weights > 0)[None, :], jnp.abs(gradient), 0.0)
    greatest = most(jnp.max(counted, axis=1, keepdims=True))
    greatest = jax.lax.stop_gradient(greatest)
    square = jnp.square(gradient / jnp.where(greatest > 0, greatest, 1.0))
    information = (_relate(curvature, weights) + _relate(square, weights)) / 2
    found = weighted_mean(jnp.square(information), weights)
    varies = state.endless
    if state.coupling is not None:
        varies &= ~state.coupling.competing & (state.coupling.start == 0)
    found = jnp.where(varies, found * state.known_shares, 1.0)
    return jnp.where(state.round > 0, state.concentration, found)


def _relate(values, weights):
    """Divides by the weighted mean; returns 1 where that is 0."""
    mean = weighted_mean(values, weights)[:, None]
    return jnp.where(mean > 0, values / jnp.where(mean > 0, mean, 1.0), 1.0)


def _follow(mean, first):
    """Returns the present mean; if that is less than the first, their geometric mean.

    Where the fit flattens the loss (logistic), regularization must not fade as fast as
    the curvature, because rows fitted by chance flatten it, too; nor must it
    stay constant, which would prevent a perfect fit of separable classes.
    """
    share = jnp.sqrt(jnp.minimum(mean / first, 1.0))
    return jnp.maximum(mean, first) * share


def _share_among_scores(mean, flat, state, factor, weights):
    """Returns the mean curvature of each score, or of all that compete."""
    if state.coupling is not None:
        # Scores that compete for a row (softmax) share the curvature of the row: the
        # sum of their means, in units that give all of them the same move.
        competing, move = state.coupling.competing, state.coupling.move
        squares = jnp.square(move)
        if factor is not None:  # the curvature has its unit, too
            width = jax.lax.cond(
                jnp.any(competing),
                weighted_mean,
                lambda factor, weights: jnp.ones_like(mean),
                factor, weights,
            )  # fmt: skip
            squares = squares / jnp.where(width > 0, width, 1.0)
        squares = jnp.where(competing, squares, 1.0)
        total = add_halves(jnp.where(competing, round_alone(mean * squares), 0.0))
        mean = jnp.where(competing, total / squares, mean)
    return jnp.where(flat | ~(mean > 0), 1.0, mean)


_SIGNS = 1 << 30  # keeps signs apart from the other draws of a tree's seed
_MOST_ROWS, _LEAST_ROWS = 4096, 256  # limits on the rows that a direction is drawn from
_MOST_TERMS = 1 << 22  # limit on rows x K^2, the products of gradients of two scores
_UNROLLED = 16  # the most steps of a loop that are written out
_LEAST_SPREAD = 1e-5  # share of the largest eigenvalue; below it no gradient has a part


class Projection(NamedTuple):
    """Derivatives along one direction, for a tree of all scores.

    The derivatives of rows have a leading axis of length 1. ``units`` are those of the
    leaf values, without derivatives of rows, for
    :func:`shaping_limits`.
    """

    derivatives: RowDerivatives
    units: RowDerivatives


def _draw_projection(seed, shape, fitted, weights, competing):
    """Draws the direction of a round; returns the derivatives along it."""
    shape, fitted, weights = jax.lax.stop_gradient((shape, fitted, weights))
    shape, fitted = (_share_loss(each, weights) for each in (shape, fitted))
    direction = _draw_direction(seed, fitted, weights, competing)
    size, magnitude = jnp.square(direction), jnp.abs(direction)
    one, nothing = jnp.ones(1, jnp.float32), None

    def replace_zero(value):
        return jnp.where(value > 0, value, 1.0)[None]

    derivatives = RowDerivatives(
        gradient=_add_scores(direction, shape.gradient)[None],
        curvature=_add_scores(size, shape.curvature)[None],
        mean=replace_zero(_add_scores(size, shape.mean)),
        first_mean=one, concentration=one, value_unit=one,
        known=None if shape.known is None else jnp.any(shape.known, 0, keepdims=True),
    )  # fmt: skip
    units: Any = derivatives._replace(gradient=nothing, curvature=nothing, known=None)
    return Projection(
        derivatives,
        units._replace(
            mean=replace_zero(_add_scores(magnitude, fitted.mean)),
            value_unit=replace_zero(jnp.max(magnitude * fitted.value_unit)),
        ),
    )


def _share_loss(each, weights):
    """Divides the derivatives of each score by the mean factor of its rows.

    That factor, a power of the information, has a unit of its own for each score. Only
    derivatives of one loss can be added up along a direction.
    """
    if each.factor is None:
        return each
    factor = weighted_mean(each.factor, weights)
    factor = jnp.where(factor > 0, factor, 1.0)
    return each._replace(
        gradient=each.gradient / factor[:, None],
        curvature=each.curvature / factor[:, None],
        mean=each.mean / factor,
    )


def _draw_direction(seed, fitted, weights, competing):
    root = jnp.sqrt(fitted.mean)
    rows, number, counted = _pick_rows(weights, len(root))
    bits = hash_words(number.astype(jnp.uint32), derive_seeds(seed, jnp.int32(_SIGNS)))
    signs = jnp.where(bits >> 31 == 0, jnp.float32(1), jnp.float32(-1))
    gradient = fitted.gradient[:, rows] / root[:, None]
    direct = _direct_by_rows if len(root) > _LEAST_ROWS else _direct_by_scores
    step, size = direct(gradient, signs, counted, competing)
    # If all rows have weight 0, every score counts alike.
    step = jnp.where(jnp.any(step != 0), step, 1.0) / (size * root)
    # A power of two rounds nothing; divided by it, no square overflows.
    return step * power_of_two(-exponent_above(jnp.max(jnp.abs(step))))


def _direct_by_scores(gradient, signs, counted, competing):
    """Returns u~ in units that keep every score within float32, and these units."""
    num_scores = len(gradient)
    upper = np.triu_indices(num_scores)
    products = round_alone(gradient[upper[0]] * gradient[upper[1]])
    terms = jnp.concatenate([signs[None, :] * gradient, products])
    sums = sum_rows(terms, counted)
    signed, products = sums[:num_scores], sums[num_scores:]
    matrix = jnp.zeros((num_scores, num_scores), jnp.float32).at[upper].set(products)
    size = _choose_units(jnp.diagonal(matrix), competing)
    matrix, signed = matrix / (size[:, None] * size[None, :]), signed / size
    return _divide_by_root(matrix, signed, competing), size


def _direct_by_rows(gradient, signs, counted, competing):
    """Computes :func:`_direct_by_scores` for more scores than drawn rows.

    Let G be the gradients times the root of the weights, one line for each drawn row.
    Then C = G'G and C^-a G' s = G' (G G')^-a s, so the smaller matrix G G' replaces C.
    """
    size = _choose_units(sum_rows(round_alone(gradient**2), counted), competing)
    scale = jnp.sqrt(counted)
    table = gradient.T * scale[:, None] / size[None, :]
    table = jnp.where((counted > 0)[:, None], table, 0.0)
    # Only one shard has a given row; the others have zeros.
    table = most(jnp.maximum(table, 0.0)) - most(jnp.maximum(-table, 0.0))
    signed = signs * most(scale)

    def multiply(row):
        return _sum_scores(round_alone(table * row[None, :]))

    share = _divide_by_root(jax.lax.map(multiply, table), signed, competing)
    return _sum_scores(round_alone(table * share[:, None]).T), size


def _sum_scores(terms):
    with use_shards(None):  # all shards have the same terms
        return sum_rows(terms)


def _choose_units(own, competing):
    return jnp.where(competing | (own == 0), 1.0, jnp.sqrt(own))


def _divide_by_root(matrix, vector, competing):
    """Returns matrix^-a vector within the space that the gradients span."""
    values, axes = jnp.linalg.eigh(matrix, symmetrize_input=False, UPLO="U")
    spanned = values > _LEAST_SPREAD * values[-1]
    known = jnp.where(spanned, values, 1.0)
    spread = jnp.where(competing, jnp.sqrt(known), known)
    spread = jnp.where(spanned, spread, jnp.inf)
    share = add_halves(round_alone(axes * vector[:, None])) / spread
    return add_halves(round_alone(axes.T * share[:, None]))


def _pick_rows(weights, num_scores):
    """Returns some rows, evenly spaced among all, their numbers and weights.

    Rows that do not exist have weight 0. Padding does not change the choice: it ends
    at the last row of positive weight.
    """
    count = max(_LEAST_ROWS, _MOST_TERMS // num_scores**2)
    if num_scores <= _LEAST_ROWS:
        count = min(count, _MOST_ROWS, count_rows(len(weights)))
    own, step = (jnp.arange(n, dtype=jnp.int32) for n in (len(weights), count))
    last = most(jnp.max(jnp.where(weights > 0, first_row() + own + 1, 0)))
    among = np.int32(count)  # a Python integer has 64 bits under jax_enable_x64
    whole, rest = jax.lax.div(last, among), jax.lax.rem(last, among)
    spaced = step * whole + jax.lax.div(step * rest, among)
    number = jnp.where(last > count, spaced, step)
    row = number - first_row()
    inside = (row >= 0) & (row < len(weights)) & (number < last)
    row = jnp.where(inside, row, 0)
    return row, number, jnp.where(inside, weights[row], 0.0)


def _add_scores(factors, values):
    """Returns sum_k factors[k] values[k], added in this order in every program.

    Score by score: where XLA calls YNNPACK, a sum over the first axis takes ten times
    as long on a CPU.
    """

    def add(total, each):
        factor, value = each
        return total + round_alone(factor * value), None

    start = vary(jnp.zeros_like(values[0]), values)
    scan = partial(jax.lax.scan, add)
    # A GPU runs each step of a loop as several kernels.
    run = choose(xla=scan, cuda=partial(scan, unroll=min(len(factors), _UNROLLED)))
    return run(start, (factors, values))[0]


class RoundPlan(NamedTuple):
    """Inputs of the trees of a round, score by score.

    Attributes:
      for_splits: derivatives for the splits.
      for_leaves: derivatives for the leaf values.
      in_bag: mask of the rows that the splits are found from; None in programs that
        use all.
      whole: whether leaf values are fitted to all rows, in the bag or not.
      limits: numbers that shape the trees, "auto" resolved.
      shard_sums: sums over the shards of rows in the bag, if rows are sharded and
        splits and leaf values have the same derivatives; otherwise None.
      sizes, lost: fields of the state after the round.
      projection: derivatives along one direction, for one tree of all scores; otherwise
        None.
    """

    k: Int32[Array, " K"]
    seeds: UInt32[Array, "K 2"]
    for_splits: RowDerivatives
    for_leaves: RowDerivatives
    in_bag: Bool[Array, " N"]
    whole: Bool[Array, ""]
    limits: TreeLimits
    shard_sums: ShardStatistics | None
    sizes: SumGuesses | None
    lost: Int32[Array, "3"]
    projection: Projection | None = None

    def trees(self) -> "TreeTask":
        """Returns the inputs of each score's tree, to be mapped over."""
        return TreeTask(
            self.k, self.seeds, self.for_splits, self.for_leaves, self.shard_sums
        )

    def structure(self) -> "TreeTask":
        """Returns the inputs for the splits of the tree of all scores."""
        assert self.projection is not None
        task = TreeTask(self.k[:1], self.seeds[:1], *self.projection, None)
        return jax.tree.map(lambda array: array[0], task)

    def weights(
        self, data: Data, known: Bool[Array, "*K N"] | None = None
    ) -> Float[Array, "*K N"]:
        """Returns the weights of the rows that leaf values are fitted to, 0 for others.

        Weights of 0 have derivatives, too, unless rows are left out.
        """
        weights = data.weights
        if self.in_bag is not None:
            weights = jnp.where(self.in_bag | self.whole, data.weights, 0.0)
        return weights if known is None else jnp.where(known, weights, 0.0)


class TreeTask(NamedTuple):
    """Inputs of one tree; the fields are those of :class:`RoundPlan`."""

    k: Int32[Array, "*K"]
    seed: UInt32[Array, "*K 2"]
    for_splits: RowDerivatives
    for_leaves: RowDerivatives
    shard_sums: ShardStatistics | None


def start_round(
    problem: Problem,
    scaling: Scaling,
    state: BoostState,
    raw: tuple[RawDerivatives, ...],
) -> RoundPlan:
    """Draws the rows and the seeds of a round, and scales the derivatives."""
    numbers, num_scores = problem.arrays.numbers, state.steps.shape[0]
    seeds = round_seeds(state)
    limits, share = numbers.limits, numbers.subsample
    if scaling.relative:
        limits = count_in(limits, state.weight_unit)
    choices = decide_by_data(
        state.pointed,
        state.least_rows,
        problem.method.leaf_solver,
        limits.min_child_samples,
    )
    weights = problem.data.weights
    in_bag = draw_rows(problem, state)
    first, sizes = None, state.sizes
    if len(scaling.policies) == 1 and raw[0].known is None:  # all rows count alike
        raised = scaling.policies[0].raised
        pair = raw[0].gradient, raw[0].curvature
        first, sizes = sum_first(*pair, weights, in_bag, raised, sizes)
    shape, fitted, first = scale_derivatives(scaling, weights, state, raw, first)
    plan = RoundPlan(
        k=jnp.arange(num_scores, dtype=jnp.int32),
        seeds=seeds[1:],
        for_splits=shape,
        for_leaves=fitted,
        in_bag=in_bag,
        whole=jnp.asarray(share is None or not problem.leaves_out or share >= 1),
        limits=limits._replace(min_child_samples=choices.min_child_samples),
        shard_sums=first,
        sizes=sizes,
        lost=state.lost,
    )
    if not problem.method.share_structure:
        return plan
    coupling = state.coupling
    competing = False if coupling is None else jnp.any(coupling.competing)
    projection = _draw_projection(
        seeds[1], shape, fitted, plan.weights(problem.data), competing
    )
    # Only the sums of one score's tree are known before it grows.
    return plan._replace(projection=projection, shard_sums=None)


def shaping_derivatives(
    data: Data, plan: RoundPlan, shape: RowDerivatives
) -> tuple[Float[Array, " N"], Float[Array, " N"], UInt8[Array, " N"]]:
    """Returns gradient and curvature of every row as a tree's splits see them.

    The last result is how many times each row counts, 0 for rows outside the bag; see
    :func:`jboost.kernels.exact_sums.split_weights`.
    """
    in_bag = plan.in_bag if shape.known is None else plan.in_bag & shape.known
    rows = in_bag, data.weights, shape.gradient, shape.curvature, shape.mean
    run = choose(cpu=grow_cpu.weigh_rows, xla=weigh_rows)
    return run(*jax.lax.stop_gradient(rows))


def weigh_rows(
    in_bag: Bool[Array, " N"],
    weights: Float[Array, " N"],
    gradient: Float[Array, " N"],
    curvature: Float[Array, " N"],
    mean: Float[Array, ""],
) -> tuple[Float[Array, " N"], Float[Array, " N"], UInt8[Array, " N"]]:
    """Computes :func:`shaping_derivatives` in plain XLA: the definition."""
    times, factors = split_weights(jnp.where(in_bag, weights, 0.0))
    gradient = weigh(factors, gradient) / mean
    return gradient, weigh(factors, curvature) / mean, times


def shaping_limits(plan: RoundPlan, task: TreeTask) -> TreeLimits:
    """Returns the limits in the units of the derivatives that shape the tree.

    Leaves are fitted with derivatives in other units where the curvature of the splits
    is "unit"; l1 and bounds are given in the units of the leaves. Monotone constraints
    hold for each score, which the search for a tree of all scores cannot see; see
    :func:`jboost.trees.joint.bound_leaves`.
    """
    limits, values = plan.limits, plan.limits.values
    own: Any = limits.min_child_samples
    if jnp.ndim(own):
        least = own[task.k] if plan.projection is None else jnp.max(own)
        limits = limits._replace(min_child_samples=least)
    if values is None:
        return limits
    if plan.projection is not None:
        values = values._replace(monotone=jnp.zeros_like(values.monotone))
    l1 = values.l1 * (task.for_leaves.mean / task.for_splits.mean)
    bounds = jnp.clip(values.bounds / task.for_leaves.value_unit, -UNBOUNDED, UNBOUNDED)
    return limits._replace(values=values._replace(l1=l1, bounds=bounds))
