# SPDX-License-Identifier: Apache-2.0
"""One tree for all scores of a round: its splits from one direction, vectors as leaves.

In: gradient and curvature of every score. Out: derivatives along one direction of the
space of scores, from which a tree is grown as for a single score; the tree with a value
for each score in each leaf.

A round restricts all changes of scores to multiples of a direction u: a leaf may add
c u to the scores of its rows. The objective of c has the gradient sum_k u_k g_k, the
curvature sum_k u_k^2 h_k and the penalty sum_k u_k^2 l2_k. The direction is random, as
in SketchBoost (Iosipoi and Vakhrushev 2022, section 3.3), whose trees of one random
projection of the gradient are as good as those of all scores; other rounds take other
directions, and leaves are fitted with all scores. With gradients in standard units,
g~ik = g_ik / sqrt(m_k), m_k the mean curvature, and random signs z_i of the rows,

    u~ = C^-a sum_i w_i z_i g~i,    C = sum_i w_i g~i g~i',    u_k = u~_k / sqrt(m_k).

Where scores compete, as those of classes do, a = 1/2: u~ has the covariance of a vector
of independent standard normal numbers, within the space that gradients span. Elsewhere
a = 1, so that u'g~ has: targets of large numbers do not hide the others. Unlike
independent numbers, the direction does not depend on the units of the scores, and turns
with them where they are rotated.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from jboost.boosting.row_derivatives import RowDerivatives
from jboost.entry.collectives import count_rows, first_row, most, use_shards
from jboost.kernels.float_bits import exponent_above, power_of_two
from jboost.kernels.varying import vary
from jboost.numerics.derivatives import round_alone
from jboost.numerics.random_bits import derive, hash_words
from jboost.numerics.sums import sum_rows

_SIGNS = 1 << 30  # keeps signs apart from what else a tree's seed draws
_MOST_ROWS, _LEAST_ROWS = 4096, 256  # that a direction is drawn from
_MOST_TERMS = 1 << 22  # of the products of gradients of all scores
_LEAST_SPREAD = 1e-5  # of the largest eigenvalue: a direction that no gradient has


class Line(NamedTuple):
    """Derivatives along one direction, for a tree of all scores.

    Attributes:
      derivatives: with an axis of one tree in front.
      units: those of the leaf values, into which limits on them are converted; see
        :func:`jboost.boosting.structure.shaping_limits`. No derivatives of rows.
    """

    derivatives: RowDerivatives
    units: RowDerivatives


def draw_line(
    seed: UInt32[Array, "2"],
    shape: RowDerivatives,
    fitted: RowDerivatives,
    weights: Float[Array, " N"],
    competing: Bool[Array, ""] | bool,
) -> Line:
    """Draws the direction of a round; returns the derivatives along it.

    Args:
      shape: derivatives of the K scores that shape the tree, and
      fitted: those that its leaves are fitted with.
      weights: of the rows; 0 for rows that the tree does not learn from.
      competing: whether some scores do; see
        :class:`jboost.objective.evaluation.Coupling`.
    """
    shape, fitted, weights = jax.lax.stop_gradient((shape, fitted, weights))
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
    return Line(
        derivatives,
        units._replace(
            mean=replace_zero(_add_scores(magnitude, fitted.mean)),
            value_unit=replace_zero(jnp.max(magnitude * fitted.value_unit)),
        ),
    )


def _draw_direction(seed, fitted, weights, competing):
    root = jnp.sqrt(fitted.mean)
    rows, number, counted = _pick_rows(weights, len(root))
    bits = hash_words(number.astype(jnp.uint32), derive(seed, jnp.int32(_SIGNS)))
    signs = jnp.where(bits >> 31 == 0, jnp.float32(1), jnp.float32(-1))
    gradient = fitted.gradient[:, rows] / root[:, None]
    direct = _direct_by_rows if len(root) > _LEAST_ROWS else _direct_by_scores
    step, size = direct(gradient, signs, counted, competing)
    # Rows that all weigh nothing say nothing: every score then counts alike.
    step = jnp.where(jnp.any(step != 0), step, 1.0) / (size * root)
    # A power of two rounds nothing; divided by it, no square overflows.
    return step * power_of_two(-exponent_above(jnp.max(jnp.abs(step))))


def _direct_by_scores(gradient, signs, counted, competing):
    """Returns u~ in units in which no score is lost in float32, and these units."""
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
    """Returns the same for more scores than rows are drawn.

    With G the gradients times the root of the weights, one row for each, C = G'G, and
    C^-a G' s = G' (G G')^-a s: a matrix of as many rows as are drawn replaces C.
    """
    size = _choose_units(sum_rows(round_alone(gradient**2), counted), competing)
    scale = jnp.sqrt(counted)
    table = gradient.T * scale[:, None] / size[None, :]
    table = jnp.where((counted > 0)[:, None], table, 0.0)
    # Only one shard has a row, the others have zeros.
    table = most(jnp.maximum(table, 0.0)) - most(jnp.maximum(-table, 0.0))
    signed = signs * most(scale)

    def multiply(row):
        return _sum_scores(round_alone(table * row[None, :]))

    share = _divide_by_root(jax.lax.map(multiply, table), signed, competing)
    return _sum_scores(round_alone(table * share[:, None]).T), size


def _sum_scores(terms):
    with use_shards(None):  # all shards have these
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
    return axes @ ((axes.T @ vector) / spread)


def _pick_rows(weights, num_scores):
    """Returns some rows, evenly spaced among all, their numbers and weights.

    Of rows that do not exist the weight is 0. Padding does not change them: the last
    row that counts is the last one.
    """
    count = max(_LEAST_ROWS, _MOST_TERMS // num_scores**2)
    if num_scores <= _LEAST_ROWS:
        count = min(count, _MOST_ROWS, count_rows(len(weights)))
    own, step = (jnp.arange(n, dtype=jnp.int32) for n in (len(weights), count))
    last = most(jnp.max(jnp.where(weights > 0, first_row() + own + 1, 0)))
    whole, rest = jax.lax.div(last, count), jax.lax.rem(last, count)
    spaced = step * whole + jax.lax.div(step * rest, count)
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
    return jax.lax.scan(add, start, (factors, values))[0]
