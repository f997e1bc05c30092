# SPDX-License-Identifier: Apache-2.0
"""Descends the loss in all leaf values v at once, with an optax optimizer.

Out: the values of the step with the least loss. Scores are linear in the values:
F_k(i) = offset_k(i) + init_k + sum_r v[r, k, leaf(r, k, i)].
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int32, Key, Shaped

from jboost.entry.messages import show
from jboost.losses.names import widen_loss
from jboost.numerics.derivatives import weigh
from jboost.numerics.exact import sum_channels, sum_rows
from jboost.objective.jaxprs import Program, trace_program
from jboost.objective.row_programs import with_scores_first
from jboost.objective.tracing import trace_loss
from jboost.trees.leaf_operations import add_values


def read_parameters(parameters: Any) -> Any:
    """Returns the parameters of a loss as float32 arrays."""

    def read(leaf):
        array = np.asarray(leaf)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"parameters must be a pytree of numbers, got {show(leaf)}")
        return jnp.asarray(array.astype(np.float32))

    return jax.tree.map(read, parameters)


def trace_rows(
    loss: Any, targets: Any, parameters: Any, num_scores: int, constants: list[Any]
) -> Program:
    """Traces the loss of a row with its derivatives in score and parameters.

    Args:
      targets: the targets of all rows.
      parameters: float32 arrays; if there are none, the loss takes two arguments.
      constants: a list that receives the arrays that the loss closes over.

    Raises:
      TypeError, ValueError: the loss is invalid.
    """
    with_parameters = bool(jax.tree.leaves(parameters))
    loss = widen_loss(loss, targets, num_scores)

    def value(score, target, parameters):
        given = (parameters,) if with_parameters else ()
        return jnp.asarray(loss(score, target, *given), jnp.float32)

    if with_parameters and callable(loss):
        trace_loss(lambda s, t: value(s, t, parameters), targets, num_scores)
    else:
        trace_loss(loss, targets, num_scores)  # raises for an invalid loss
    score = jax.ShapeDtypeStruct((num_scores,) if num_scores > 1 else (), jnp.float32)
    row = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape[1:], t.dtype), targets)
    program = jax.value_and_grad(value, argnums=(0, 2))
    return trace_program(program, (score, row, parameters), constants)


def trace_update(
    optimizer: optax.GradientTransformation, values: Any, constants: list[Any]
) -> Program:
    """Traces a step of the optimizer: (gradients, state, values) -> (changes, state).

    Raises:
      TypeError: the optimizer needs other arguments.
    """
    try:
        with usual_rules():
            state = jax.eval_shape(optimizer.init, values)
            inputs = (values, state, values)
            program = trace_program(optimizer.update, inputs, constants)
    except Exception as error:
        raise TypeError(
            "optimizer must be an optax.GradientTransformation whose update takes "
            f"(gradients, state, values), got {type(error).__name__}: {error}"
        ) from error
    return program


@contextmanager
def usual_rules() -> Iterator[None]:
    """Sets JAX's default promotion rules, which optimizers rely on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Values(NamedTuple):
    """The trained values.

    Attributes:
      leaf: the change of the leaf values, in the unit of scores divided by R.
      init_score: the change of the initial score, in the unit of scores.
      parameters: the parameters of the loss, in their own units.
    """

    leaf: Float[Array, "R K L"]
    init_score: Float[Array, " K"]
    parameters: Any


class Part(NamedTuple):
    """Rows and their leaves.

    Attributes:
      leaves: leaf indices, stored as small integers.
      offset: the offset plus the initial score of the given model.
    """

    leaves: Shaped[Array, "R K N"]
    targets: Any
    weights: Float[Array, " N"]
    offset: Float[Array, "K N"]


class Fixed(NamedTuple):
    """Inputs that all steps share.

    Attributes:
      old: the leaf values of the given model.
      unit: the unit of scores: their standard deviation.
      loss_unit: the unit of the loss, its divisor in the objective.
      pull: the curvature of the penalty on ``Values.leaf``.
      held: the validation rows; None if there are none.
    """

    constants: tuple[Any, ...]
    old: Float[Array, "R K L"]
    unit: Float[Array, " K"]
    loss_unit: Float[Array, ""]
    pull: Float[Array, ""]
    train: Part
    held: Part | None
    key: Key[Array, ""]


class Progress(NamedTuple):
    """The state of the descent.

    Attributes:
      best: the values with the least loss on the validation rows or, without these,
        the least objective on the training rows; those before epoch ``best_epoch``.
      over: whether the loss is not finite, or has not improved for too many epochs.
    """

    epoch: Int32[Array, ""]
    values: Values
    optimizer: Any
    best: Values
    best_loss: Float[Array, ""]
    best_epoch: Int32[Array, ""]
    over: Bool[Array, ""]


# Weighted mean losses of both parts before each epoch; NaN for those that did not run.
Curves = tuple[Float[Array, " E"], Float[Array, " E"]]


class DescentPrograms(NamedTuple):
    """The static part of a descent.

    Attributes:
      loss: (score, target, parameters) of one row -> the loss and its derivatives in
        the score and the parameters.
      update: (gradients, state, values) -> the changes of the values and the next
        state of the optimizer.
      batch: the number of rows of a step; None: all rows.
    """

    loss: Program
    update: Program
    batch: int | None


def run_epochs(
    programs: DescentPrograms,
    fixed: Fixed,
    count: Int32[Array, ""],
    patience: Int32[Array, ""],
    progress: Progress,
    curves: Curves,
) -> tuple[Progress, Curves]:
    """Runs up to ``count`` epochs, traced."""

    def goes_on(carry):
        number, progress, _ = carry
        return (number < count) & ~progress.over

    def run(carry):
        number, progress, curves = carry
        progress, losses = _run_epoch(programs, fixed, patience, progress)

        def store(buffer, value):
            return jax.lax.dynamic_update_index_in_dim(buffer, value, number, 0)

        return number + 1, progress, tuple(map(store, curves, losses))

    return jax.lax.while_loop(goes_on, run, (jnp.int32(0), progress, curves))[1:]


def _run_epoch(programs, fixed, patience, progress):
    """Evaluates the losses, then makes the steps of an epoch."""
    values = progress.values
    train_loss, gradient = differentiate(programs.loss, fixed, fixed.train, values)
    if fixed.held is None:
        held_loss = jnp.float32(jnp.nan)
        penalty = fixed.pull / 2 * jnp.sum(jnp.square(values.leaf))
        watched = train_loss + fixed.loss_unit * penalty
    else:
        held_loss = evaluate(programs.loss, fixed, fixed.held, values)
        watched = held_loss
    better = watched < progress.best_loss
    best = jax.tree.map(
        lambda new, old: jnp.where(better, new, old), values, progress.best
    )
    best_epoch = jnp.where(better, progress.epoch, progress.best_epoch)
    lost = ~(jnp.isfinite(train_loss) & jnp.isfinite(watched))
    progress = progress._replace(
        epoch=progress.epoch + 1,
        best=best,
        best_loss=jnp.where(better, watched, progress.best_loss),
        best_epoch=best_epoch,
        over=lost | (progress.epoch - best_epoch >= patience),
    )
    # The step after the last epoch is not used.
    if programs.batch is None:
        progress = _step(programs, fixed, progress, gradient)
    else:
        progress = _step_in_batches(programs, fixed, progress)
    return progress, (train_loss, held_loss)


def _step(programs, fixed, progress, gradient):
    """Makes one step of the optimizer."""
    values = progress.values
    change, optimizer = programs.update(
        fixed.constants, gradient, progress.optimizer, values
    )
    values = jax.tree.map(lambda value, step: value + step, values, Values(*change))
    return progress._replace(values=values, optimizer=optimizer)


def _step_in_batches(programs, fixed, progress):
    """Makes a step for each batch of the rows, in random order."""
    train, size = fixed.train, programs.batch
    num_rows = train.weights.shape[0]
    key = jax.random.fold_in(fixed.key, progress.epoch)
    order = jax.random.permutation(key, num_rows)
    # The last batch is filled up with rows from the front.
    number = -(-num_rows // size)
    order = jnp.resize(order, number * size).reshape(number, size)
    total = sum_rows(train.weights) * (size / num_rows)

    def step(progress, rows):
        part = Part(
            train.leaves[:, :, rows],
            jax.tree.map(lambda target: target[rows], train.targets),
            train.weights[rows],
            train.offset[:, rows],
        )
        _, gradient = differentiate(
            programs.loss, fixed, part, progress.values, total=total
        )
        return _step(programs, fixed, progress, gradient), None

    return jax.lax.scan(step, progress, order)[0]


def evaluate(
    loss: Program, fixed: Fixed, part: Part, values: Values
) -> Float[Array, ""]:
    """Returns the weighted mean loss of the rows."""
    found, _ = _evaluate_rows(loss, fixed, part, values)
    return _mean(found, part.weights, sum_rows(part.weights))


def differentiate(
    loss: Program,
    fixed: Fixed,
    part: Part,
    values: Values,
    total: Float[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Values]:
    """Returns the weighted mean loss, and the gradient of the objective.

    The objective is the mean loss in its unit, plus pull / 2 times the sum of squares
    of the changes of leaf values. The gradient in the parameters is that of the mean
    loss itself.

    Args:
      total: the divisor of weighted sums; None: the sum of the weights.
    """
    total = sum_rows(part.weights) if total is None else total
    found, (slopes, of_parameters) = _evaluate_rows(loss, fixed, part, values)
    slopes = weigh(jnp.broadcast_to(part.weights, slopes.shape), slopes) / total
    slopes = slopes * (fixed.unit[:, None] / fixed.loss_unit)
    num_rounds, num_scores, num_leaves = values.leaf.shape
    trees = jnp.arange(num_rounds * num_scores, dtype=jnp.int32)

    def sum_leaves(_, step):
        number, leaf = step
        slope = slopes[number % num_scores]
        return None, sum_channels((slope,), leaf.astype(jnp.int32), num_leaves)[0]

    flat = part.leaves.reshape(trees.size, part.leaves.shape[2])
    _, sums = jax.lax.scan(sum_leaves, None, (trees, flat))
    sums = sums.reshape(values.leaf.shape) / num_rounds
    gradient = Values(
        leaf=sums + fixed.pull * values.leaf,
        init_score=sum_rows(slopes),
        parameters=jax.tree.map(
            lambda rows: _mean(rows, part.weights, total), of_parameters
        ),
    )
    return _mean(found, part.weights, total), gradient


def current_leaves(fixed: Fixed, values: Values) -> Float[Array, "R K L"]:
    """Returns the leaf values: the old ones plus changes in scores' units over R."""
    unit = fixed.unit / max(1, values.leaf.shape[0])
    new = fixed.old + values.leaf * unit[None, :, None]
    # Unchanged values keep their bits, including the sign of a zero.
    return jnp.where(values.leaf == 0, fixed.old, new)


def start_units(
    loss: Program, fixed: Fixed, parts: tuple[Part, ...], values: Values
) -> tuple[
    Float[Array, " K"], Float[Array, " K"], list[Float[Array, " _"]], Bool[Array, " N"]
]:
    """Computes the quantities that define the units, and the losses at the start.

    Returns:
      The standard deviation of the scores of the training rows (1 where it is 0),
      without their offset; the mean magnitude of the gradient; the losses of the rows
      of each part; a mask of the training rows with a NaN in their gradient.
    """
    train = parts[0]
    total = sum_rows(train.weights)
    moved = _score(fixed, train, values) - train.offset
    spread = moved - _mean(moved.T, train.weights, total)[:, None]
    unit = jnp.sqrt(_mean(jnp.square(spread).T, train.weights, total))
    found, (slopes, _) = _evaluate_rows(loss, fixed, train, values)
    steep = _mean(jnp.abs(slopes).T, train.weights, total)
    others = [_evaluate_rows(loss, fixed, part, values)[0] for part in parts[1:]]
    lost = jnp.any(jnp.isnan(slopes), axis=0)
    return jnp.where(unit > 0, unit, 1.0), steep, [found, *others], lost


def _score(fixed, part, values):
    """Returns the scores of the rows, [K, N]."""

    def add_round(steps, parts):
        value, leaf = parts
        return add_values(steps, value, leaf.astype(jnp.int32), in_place=True), None

    start = part.offset + (values.init_score * fixed.unit)[:, None]
    rounds = current_leaves(fixed, values), part.leaves
    steps, _ = jax.lax.scan(add_round, jnp.zeros_like(start), rounds)
    return start + steps


def _evaluate_rows(loss, fixed, part, values):
    """Returns losses [N], and derivatives in scores [K, N] and parameters [N, ...]."""
    scores = _score(fixed, part, values)
    rows = scores[0] if scores.shape[0] == 1 else scores.T

    def one(score, target):
        return loss(fixed.constants, score, target, values.parameters)

    found, (slopes, of_parameters) = jax.vmap(one)(rows, part.targets)
    return found, (with_scores_first(slopes), of_parameters)


def _mean(rows, weights, total):
    """Returns the weighted mean over the first axis, ignoring rows of weight 0."""
    values = jnp.moveaxis(rows, 0, -1)
    return sum_rows(weigh(jnp.broadcast_to(weights, values.shape), values)) / total
