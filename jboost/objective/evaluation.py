# SPDX-License-Identifier: Apache-2.0
"""Evaluates a traced loss and its derivatives at every row.

The axis of the K scores comes first, so that code written for one score per row can be
mapped over it; the axis of rows is last. For several scores, blocks of rows bound the
memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, UInt32

from jboost.entry.programs import FEW
from jboost.entry.stages import bind_stage, elementwise, runs_in_stages, stage
from jboost.kernels.library import choose
from jboost.numerics.derivatives import differentiable, replace_without_derivative
from jboost.numerics.exact import sum_each, sum_guessed
from jboost.objective.tracing import TracedLoss

# Rows and results per block, for K > 1. A GPU waits for each block.
_FEW_ROWS, _BLOCK_NUMBERS = 2048, 1 << 20
_MANY_ROWS, _MANY_NUMBERS = 1 << 17, 1 << 24


def map_rows(
    objective: "Objective",
    program: Callable[..., Any],
    scores: Any,
    finish: Any = lambda rows: rows,
) -> Any:
    """Evaluates a program at all rows; ``finish`` moves rows to the last axis.

    For K > 1 it evaluates one block of rows at a time to save memory: Hessians take K^2
    numbers per row, and even gradients would otherwise exist in two layouts.
    """
    num_scores, num_rows = scores.shape
    square = program in (objective.loss.hessian, objective.loss.information)
    entries = num_scores**2 if square else num_scores
    if num_scores == 1:
        return finish(evaluate_rows(objective, program, scores))
    # About half of the rows: small tables, perhaps many side by side, are not filled up
    # to a large block.
    half = 1 << max(0, (num_rows - 1).bit_length() - 1)
    rows = min(max(half, _FEW_ROWS), _MANY_ROWS)
    many = max(1, min(rows, _MANY_NUMBERS // entries))
    run = partial(_map_blocks, objective, program, finish)
    small, large = (partial(run, size=n) for n in (block_size(entries), many))
    return choose(xla=small, cuda=large)(objective.targets, scores)


def _map_blocks(objective, program, finish, targets, scores, *, size):
    # XLA may round by the size of a block. Therefore all have one size, whatever the
    # number of rows, and there are two at least: a single one would be no loop.
    num_rows = scores.shape[1]
    short = max(0, size + 1 - num_rows)

    def extend(array, axis=0):
        edges = [(0, short if each == axis else 0) for each in range(array.ndim)]
        return jnp.pad(array, edges, mode="edge") if short else array

    targets, scores = jax.tree.map(extend, targets), extend(scores, 1)
    last = num_rows + short - size

    def evaluate(first):
        def cut(array, axis=0):
            return jax.lax.dynamic_slice_in_dim(array, first, size, axis)

        part = objective._replace(targets=jax.tree.map(cut, targets))
        return finish(evaluate_rows(part, program, cut(scores, 1)))

    def add_block(number, found):
        first = jnp.minimum(number * size, last)  # the last two overlap
        start = (*(0,) * (found.ndim - 1), first)
        return jax.lax.dynamic_update_slice(found, evaluate(first), start)

    block = jax.eval_shape(evaluate, jax.ShapeDtypeStruct((), jnp.int32))
    found = jnp.zeros((*block.shape[:-1], last + size), block.dtype)
    number = -(-(last + size) // size)
    return jax.lax.fori_loop(0, number, add_block, found)[..., :num_rows]


def block_size(entries: int) -> int:
    """Returns the number of rows in a block, by the results of a row."""
    return max(1, min(_FEW_ROWS, _BLOCK_NUMBERS // entries))


def evaluate_rows(objective: Any, program: Callable[..., Any], scores: Array) -> Any:
    """Evaluates a program at all rows at once, with the axis of rows in front."""
    rows = scores[0] if scores.shape[0] == 1 else scores.T
    return differentiable(
        partial(_run_rows, program), partial(_derive_rows, program),
        objective.constants, rows, objective.targets, objective.parameters,
    )  # fmt: skip


def _run_rows(program, constants, rows, targets, parameters):
    def one(score, target):
        return program(constants, score, target, parameters)

    return jax.vmap(one)(rows, targets)


def _derive_rows(program, found, operands, tangents):
    """Returns the change of a program's results along the tangents.

    The change is 0 in rows without a finite result and derivative. Such rows are first
    replaced by a finite row. Otherwise an infinite derivative, multiplied by 0, would
    be NaN and reach the derivative in every value that the rows share.
    """
    constants, rows, targets, parameters = operands
    _, slope = jax.jvp(
        lambda rows: _run_rows(program, constants, rows, targets, parameters),
        (rows,), (jnp.ones_like(rows),),
    )  # fmt: skip
    finite = jnp.isfinite(found) & jnp.isfinite(slope)
    finite = jnp.all(finite.reshape(len(finite), -1), axis=1)
    spare = jnp.argmax(finite)

    def select(values, others):
        shape = (-1,) + (1,) * (values.ndim - 1)
        return jnp.where(finite.reshape(shape), values, others)

    rows, targets = jax.tree.map(lambda a: select(a, a[spare]), (rows, targets))
    inputs = (constants, rows, targets, parameters)
    _, change = jax.jvp(partial(_run_rows, program), inputs, tangents)
    return select(change, 0.0)


def with_scores_first(rows: Array) -> Array:
    """Moves the axis of scores to the front: [N] or [N, K] to [K, N]."""
    return rows[None, :] if rows.ndim == 1 else rows.T


class Kinks(NamedTuple):
    """Describes the kinks of a piecewise linear loss.

    Attributes:
      kind: 0 if kinks can be anywhere; 1 if each row has exactly one, at its own
        minimizer; 2 if, in addition, the slopes are the same for all rows.
      left, right: magnitudes of the slope on each side of the kink, the least of all
        rows; 0 on a side where the loss of a row is constant.
      scale: a power of two; scale times the sum of the weighted slopes of all rows is
        less than 2^40.
    """

    kind: Int32[Array, ""]
    left: Float[Array, ""]
    right: Float[Array, ""]
    scale: Float[Array, ""]


class Coupling(NamedTuple):
    """Describes how the K > 1 scores of a loss interact.

    Attributes:
      competing: whether a score is one of several that compete: moving them
        together in some direction, all by the same amount for softmax, changes no
        row's loss.
      move: the direction of that move: the distance of each score, in its own unit.
      start: the weighted mean of |H_kk| at the initial scores, for scores that interact
        with others but do not compete; otherwise 0.
      self_informed: whether the Fisher information F_kk of a score depends on the score
        itself, as that of a rate does; False for a location, or without F.
    """

    competing: Bool[Array, " K"]
    move: Float[Array, " K"]
    start: Float[Array, " K"]
    self_informed: Bool[Array, " K"]


class Objective(NamedTuple):
    """Holds a traced loss and all its inputs except the scores.

    Attributes:
      constants: the numbers and arrays that the loss closes over.
      targets: a pytree of arrays with a first axis of N.
      parameters: parameters of an adaptive loss, otherwise ().
      minimizer: the minimizer of each row's own loss [K, N], inf where it has none;
        None if no rule needs it.
      kinks: the kinks of a piecewise linear loss, or None if not computed.
      coupling: how the scores interact; None for K = 1, or if not computed.
    """

    loss: TracedLoss
    constants: tuple[Any, ...]
    targets: Any
    parameters: Any
    minimizer: Float[Array, "K N"] | None
    kinks: Kinks | None = None
    coupling: Coupling | None = None


def known_targets(loss: Any, targets: Any) -> Bool[Array, "K N"] | None:
    """Returns which targets are known, where each score has a target of its own.

    None for other losses, and for targets that cannot be NaN.
    """
    if loss is None or loss.coupled or not loss.separate:
        return None
    (array,) = jax.tree.leaves(targets)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return None
    return _are_known(array)


@elementwise
def _are_known(numpy, targets):
    return ~numpy.isnan(targets).T


@elementwise
def _as_numbers(numpy, known):
    del numpy
    return known.astype(np.float32)


def known_shares(
    known: Bool[Array, "K N"] | None, weights: Float[Array, " N"], num_scores: int
) -> Float[ArrayLike, " K"]:
    """Returns, for each score, the share of rows by weight with a known target.

    1 for a score without a known target.
    """
    if known is None:
        return np.ones(num_scores, np.float32)
    return _replace_zero(weighted_mean(_as_numbers(known), weights))


@elementwise
def _replace_zero(numpy, shares):
    return numpy.where(shares > 0, shares, np.float32(1))


def loss_values(objective: Objective, scores: Float[Array, "K N"]):
    """Returns l(F_i, y_i) for every row, [N]."""
    return _loss_values(without_minima(objective), scores)


@stage
def _loss_values(objective, scores):
    return map_rows(objective, objective.loss.value, scores)


class RowPrograms(NamedTuple):
    """Programs of a loss for scores of one shape, to be called from the host.

    Attributes:
      value: computes :func:`loss_values`.
      gradient: computes gradients that do not rest at minima.
    """

    value: Callable[[Float[Array, "K N"]], Float[Array, " N"]]
    gradient: Callable[[Float[Array, "K N"]], Float[Array, "K N"]]


def bind_rows(objective: Objective, scores: Float[Array, "K N"]) -> RowPrograms:
    """Returns the programs of a loss of these rows; the start uses the same ones."""
    operands = without_minima(objective), scores
    return RowPrograms(
        bind_stage(_loss_values, *operands), bind_stage(_raw_gradients, *operands)
    )


def without_minima(objective: Objective) -> Objective:
    """Drops fields that the loss alone does not use: more calls share a program."""
    return objective._replace(minimizer=None, kinks=None, coupling=None)


def gradients(objective: Objective, scores: Float[ArrayLike, "K N"]):
    """Returns dl/dF for every row, [K, N]; zero where a score is the row's minimizer.

    At the kink of |r| any number in [-1, 1] is a subgradient, and the one that
    automatic differentiation returns depends on how the loss is written. We choose 0,
    so that a row at its own minimum exerts no pull.
    """
    raw = _raw_gradients(without_minima(objective), scores)
    return rest_at_minima(objective.minimizer, scores, raw)


def rest_at_minima(
    minimizer: Float[Array, "K N"] | None,
    scores: Float[ArrayLike, "K N"],
    raw: Float[Array, "K N"],
):
    """Returns gradients that are zero where a score is the row's minimizer."""
    return raw if minimizer is None else _rest_at_minima(raw, scores, minimizer)


@stage
def _raw_gradients(objective, scores):
    return map_rows(objective, objective.loss.gradient, scores, with_scores_first)


@elementwise
def _rest_at_minima(numpy, raw, scores, minimizer):
    if numpy is np:
        return np.where(scores == minimizer, 0.0, raw)
    return replace_without_derivative(scores == minimizer, raw, 0.0)


def hessian_matrices(objective: Objective, scores: Float[Array, "K N"]):
    """Returns d2l/dF2 for every row, [N, K, K]."""
    # Those of several scores only judge how scores interact at the start.
    run = _find_hessians if scores.shape[0] == 1 else _judge_hessians
    return run(without_minima(objective), scores)


def _hessian_matrices(objective, scores):
    hessian = evaluate_rows(objective, objective.loss.hessian, scores)
    return hessian.reshape(scores.shape[1], scores.shape[0], scores.shape[0])


_find_hessians = stage(_hessian_matrices)
_judge_hessians = stage(_hessian_matrices, any_rounding=True)


def mean_hessian(
    objective: Objective, scores: Float[Array, "K N"], weights: Float[Array, " N"]
) -> Float[Array, "K K"]:
    """Returns the weighted mean of the Hessians of all rows.

    Computes one column at a time, as the derivative of the gradient along one score: N
    Hessians are in memory at once only if they are few.
    """
    few = scores.size * scores.shape[0] <= FEW
    if runs_in_stages() and few and objective.loss.information is not None:
        # Likelihoods take long to compile, and this program finds minimizers, too.
        rows = _list_entries(hessian_matrices(objective, scores))
        return _square(weighted_mean(rows, weights))
    return _mean_hessian(without_minima(objective), scores, weights)


@elementwise
def _list_entries(numpy, rows):
    del numpy
    return rows.reshape(len(rows), -1).T


@elementwise
def _square(numpy, entries):
    num_scores = round(len(entries) ** 0.5)
    return entries.reshape(num_scores, num_scores)


@partial(stage, any_rounding=True)  # only the steps of a solver depend on it
def _mean_hessian(objective, scores, weights):
    def mean_column(direction):
        rows = row_products(objective, scores, direction)
        return weighted_mean(rows, weights)

    return jax.lax.map(mean_column, jnp.eye(scores.shape[0], dtype=scores.dtype))


def row_products(
    objective: Objective, scores: Float[Array, "K N"], direction: Float[Array, " K"]
) -> Float[Array, "K N"]:
    """Returns the Hessian of each row times one direction."""
    return _row_products(without_minima(objective), scores, direction)


@partial(stage, any_rounding=True)
def _row_products(objective, scores, direction):
    gradient = objective.loss.gradient

    def column(constants, score, target, parameters):
        *constants, direction = constants

        def slope(score):
            return gradient(tuple(constants), score, target, parameters)

        return jax.jvp(slope, (score,), (direction,))[1]

    along = objective._replace(constants=(*objective.constants, direction))
    return map_rows(along, column, scores, with_scores_first)


def hessian_products(
    objective: Objective, scores: Float[Array, "K N"], directions: Float[Array, "N K"]
) -> Float[Array, "K N"]:
    """Returns the Hessian of each row times a direction of its own.

    Each is the derivative of the gradient along that direction, so that no Hessian is
    ever in memory.
    """
    objective = without_minima(objective)
    gradient = objective.loss.gradient

    def product(constants, score, target, parameters):
        target, direction = target

        def slope(score):
            return gradient(constants, score, target, parameters)

        return jax.jvp(slope, (score,), (direction,))[1]

    along = objective._replace(targets=(objective.targets, directions))
    return map_rows(along, product, scores, with_scores_first)


def hessians(objective: Objective, scores: Float[Array, "K N"]):
    """Returns the diagonal of each row's Hessian, [K, N]."""
    if runs_in_stages() and scores.shape[0] == 1:
        # From a program that others share.
        return _take_entries(hessian_matrices(objective, scores))
    if objective.loss.diagonal is not None:
        return _diagonals(without_minima(objective), scores)
    return map_hessians(objective, scores, _take_diagonal)


@elementwise
def _take_entries(numpy, matrices):
    del numpy
    return matrices.reshape(1, -1)


@stage
def _diagonals(objective, scores):
    return map_rows(objective, objective.loss.diagonal, scores, with_scores_first)


def _take_diagonal(rows):
    diagonal = rows if rows.ndim == 1 else jnp.diagonal(rows, axis1=1, axis2=2)
    return with_scores_first(diagonal)


def own_curvatures(objective: Objective, scores: Float[Array, "K N"]):
    """Returns the result of the user's curvature function for every row, [K, N]."""
    return _own_curvatures(without_minima(objective), scores)


@stage
def _own_curvatures(objective, scores):
    return map_rows(objective, objective.loss.curvature, scores, with_scores_first)


def map_hessians(
    objective: Objective,
    scores: Float[Array, "K N"],
    finish: Callable[..., Float[Array, "... N"]],
    *operands: Any,
):
    """Applies ``finish(rows, *operands)`` to the Hessians of blocks of rows.

    The Hessians are [N] for K = 1, else [N, K, K]. ``finish`` must be a function of a
    module: a function made anew in each call would be compiled again.
    """
    num_scores, num_rows = scores.shape
    few = scores.size <= FEW and num_rows <= block_size(num_scores**2)
    if runs_in_stages() and num_scores > 1 and few:
        # The Hessians are a program that others share, the rest is one for all losses.
        return _finish_rows(hessian_matrices(objective, scores), finish, operands)
    return _map_hessians(without_minima(objective), scores, finish, operands)


@stage
def _finish_rows(rows, finish, operands):
    return finish(rows, *operands)


@stage
def _map_hessians(objective, scores, finish, operands):
    def finish_block(rows):
        return finish(rows, *operands)

    return map_rows(objective, objective.loss.hessian, scores, finish_block)


def map_information(
    objective: Objective,
    scores: Float[Array, "K N"],
    seeds: UInt32[Array, "N 2"],
    finish: Callable[..., Float[Array, "... N"]],
    *operands: Any,
):
    """Applies ``finish`` to the information of rows like :func:`map_hessians`."""
    part = without_minima(objective)._replace(targets=seeds, parameters=())
    return _map_information(part, scores, finish, operands)


@stage
def _map_information(objective, scores, finish, operands):
    def finish_block(rows):
        return finish(rows, *operands)

    return map_rows(objective, objective.loss.information, scores, finish_block)


@stage
def weighted_mean(
    values: Float[Array, "*K N"], weights: Float[Array, " N"]
) -> Float[Array, "*K"]:
    """Returns the weighted mean over the last axis, ignoring rows of weight 0."""
    numerator, denominator = sum_each((values, weights), (weights, None))
    return numerator / denominator


def mean_weight(weights: Float[Array, " N"]) -> Float[Array, ""]:
    """Returns the mean of the positive weights."""
    return weighted_mean(weights, _mark_counted(weights))


@elementwise
def _mark_counted(numpy, weights):
    del numpy
    return (weights > 0).astype(np.float32)


def weighted_means(
    pairs: Sequence[tuple[Float[Array, "..."], Float[Array, "..."]]],
    guess: Float[Array, " S"] | None,
) -> tuple[list[Float[Array, ""]], Float[Array, " S"] | None]:
    """Returns :func:`weighted_mean` of each pair of values and weights.

    ``guess`` estimates the greatest terms, two for each pair, if rows are sharded; it
    changes no result. The greatest terms are the second result; see
    :func:`jboost.numerics.exact.sum_guessed`.
    """
    if guess is None:
        return [weighted_mean(*pair) for pair in pairs], None
    sums = [
        part
        for values, weights in pairs
        for part in ((values, weights), (weights, None))
    ]
    found = sum_guessed(sums, list(guess))
    quotients = zip(found.sums[::2], found.sums[1::2], strict=True)
    return [above / below for above, below in quotients], jnp.stack(found.sizes)
