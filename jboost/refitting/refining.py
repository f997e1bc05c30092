# SPDX-License-Identifier: Apache-2.0
"""refine: trains all leaf values of a model together.

In: a model, rows, a loss, an optax optimizer. Out: the model with the same splits and
the leaf values v of the step with the least loss, and the losses on its way. Scores are
linear in the values: F_k(i) = offset_k(i) + init_k + sum_r v[r, k, leaf(r, k, i)].
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Key, Shaped

from jboost import losses
from jboost.entry import checks
from jboost.entry.arguments import explain_arguments
from jboost.entry.decorators import on_host
from jboost.entry.messages import show, show_fields
from jboost.entry.programs import LOOP, compiled
from jboost.kernels.library import resolve_implementation, takes_implementation
from jboost.losses.names import widen_loss
from jboost.model.ensemble import Ensemble, check_model
from jboost.model.predicting import predict
from jboost.numerics.derivatives import weigh
from jboost.numerics.exact import sum_channels, sum_rows
from jboost.objective.evaluation import with_scores_first
from jboost.objective.faults import describe_lost_slope
from jboost.objective.jaxprs import Program, trace_program
from jboost.objective.tracing import trace_loss
from jboost.refitting.new_leaves import ModelRows, read_rows
from jboost.tables.targets import match_targets
from jboost.training.chunks import move_bar, open_bar, pace_rounds
from jboost.training.host_loop import find_leaves
from jboost.training.rows import name_sets
from jboost.trees.leaf_operations import add_values

_MOST_EPOCHS = 64  # the most epochs in one call of the compiled program
_LEARNING_RATE = 0.01


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
      offset: the offset, the initial score of the given model, and its linear terms.
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


@dataclass(frozen=True)
class Refinement:
    """The curves of :func:`jboost.refine`.

    Attributes:
      train_loss: the weighted mean loss of the training rows before the first epoch,
        and after each, [1 + epochs].
      validation_loss: the same for the validation rows; None without these.
      best_epoch: the number of epochs that led to the returned values; 0: they are
        the given ones.
      parameters: the parameters of the loss that go with the returned values; () if
        there are none.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(600, 3))
      >>> y = x[:, 0] + x[:, 1] ** 2
      >>> model, _ = jb.fit(x[:400], y[:400], num_rounds=10)
      >>> _, curves = jb.refine(model, x[:400], y[:400], validation=(x[400:], y[400:]))
      >>> len(curves.train_loss) == len(curves.validation_loss) > curves.best_epoch
      True
    """

    train_loss: np.ndarray
    validation_loss: np.ndarray | None
    best_epoch: int
    parameters: Any

    def __repr__(self) -> str:
        """Shows its fields: the arrays would fill pages."""
        return show_fields(self)


@explain_arguments
@on_host("call jb.refine on concrete arrays")
@takes_implementation
def refine(
    model: Ensemble,
    x: Any,
    y: Any,
    loss: Callable[..., Any] = losses.squared_error,
    *,
    validation: Any = None,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    parameters: Any = (),
    optimizer: optax.GradientTransformation | None = None,
    num_epochs: int = 500,
    early_stopping_epochs: int | None = 20,
    l2: float = 1.0,
    batch_size: int | None = None,
    seed: int = 0,
    progress: bool = False,
    implementation: str | None = None,
) -> tuple[Ensemble, Refinement]:
    """Trains all leaf values of a model together, with an optax optimizer.

    Boosting fits each tree once, at a small learning rate, and never returns to it.
    This function keeps the splits and descends the weighted mean loss in all leaf
    values v[r, k, l] and the initial scores at once:

        F_k(i) = offset_k(i) + init_k + sum_r v[r, k, leaf(r, k, i)]

    Linear leaves keep their slopes; their linear terms count as part of the offset.

    The leaf of each row is found once; a step costs two passes over the leaves. The
    values with the least loss on ``validation`` are returned (without it, those with
    the least loss and penalty on the training rows). The values of the model are among
    them, so that the result is never worse there.

    The optimizer works on ``Values(leaf, init_score, parameters)``, where changes of
    the scores are counted in their standard deviation over the rows: one unit of
    ``leaf`` is this deviation divided by R, so that a learning rate of 0.01 of Adam
    moves a score by about 1 % of it. The loss is divided by that deviation times the
    mean magnitude of its gradient. Units of the target and of the loss do not matter.

    It helps models of few rounds or small trees, of many classes, and where there is
    little noise; expect little if the number of rounds was chosen on the same
    validation rows. The page "New leaf values" has figures.

    Args:
      model: a model from :func:`jboost.fit`, a file or another library; for an
        estimator, its ``model_``.
      x, y: the rows, as for :func:`jboost.fit`, with the columns and
        categories of the model. Dense or sparse; not a stream. Memory: one byte for
        each row, round and score (two or four if a tree has more than 256 or 65,536
        leaves).
      loss: ``loss(score, target) -> scalar`` for one row, or ``loss(score, target,
        parameters)`` if ``parameters`` are given. It may be another one than in
        training; not adaptive.
      validation: (x, y), (x, y, sample_weight) or (x, y, sample_weight, offset); the
        values with the least loss on these rows are returned.
      sample_weight: row weights [N], >= 0.
      offset: numbers [N] or [N, K], added to the score.
      parameters: the parameters of the loss, a pytree of numbers or arrays, trained
        along with the leaves, in their own units. A positive number is best given by
        its logarithm.
      optimizer: an ``optax.GradientTransformation``; None: ``optax.adam(0.01)``.
      num_epochs: the number of passes over the rows.
      early_stopping_epochs: epochs without improvement before a stop; None: never stop.
      l2: pulls leaf values to the given ones; counted in average rows, like that of
        :func:`jboost.fit`, if all trees move together.
      batch_size: rows of a step, drawn anew in each epoch; None: all rows.
      seed: the random seed of the batches.
      progress: shows a bar.
      implementation: the kernels to run, as for :func:`jboost.fit`.

    Returns:
      The new model, which keeps the ``sums`` of training, and a
      :class:`jboost.Refinement`: the losses by epoch, and the parameters.

    Raises:
      TypeError, ValueError: for invalid arguments, or a loss that is not finite at the
        scores of the model.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(600, 3))
      >>> y = x[:, 0] + x[:, 1] ** 2
      >>> held_out = (x[400:], y[400:])
      >>> model, history = jb.fit(x[:400], y[:400], num_rounds=10)
      >>> better, curves = jb.refine(model, x[:400], y[:400], validation=held_out)
      >>> loss = curves.validation_loss
      >>> bool(loss[curves.best_epoch] < 0.9 * loss[0])
      True

    References:
      Fully corrective boosting: Johnson and Zhang (2014), "Learning nonlinear
      functions using regularized greedy forest"; Adam: Kingma and Ba (2015).
    """
    check_model(model)
    optimizer = _check_settings(
        optimizer, l2, num_epochs=num_epochs, batch_size=batch_size, seed=seed,
        early_stopping_epochs=early_stopping_epochs,
    )  # fmt: skip
    parts = _read_parts(model, loss, x, y, sample_weight, offset, validation)
    with resolve_implementation(parts[0].rows.data.weights):
        programs, fixed, values = _prepare(
            model, loss, parameters, optimizer, parts, batch_size, l2, seed
        )
        limits = num_epochs, early_stopping_epochs
        return _run(model, programs, fixed, values, optimizer, limits, progress)


def _check_settings(optimizer, l2, **integers):
    """Checks the settings; returns the optimizer."""
    if optimizer is None:
        optimizer = optax.adam(_LEARNING_RATE)
    if not callable(getattr(optimizer, "init", None)) or not callable(
        getattr(optimizer, "update", None)
    ):
        raise TypeError(
            "optimizer must be an optax.GradientTransformation, such as "
            f"optax.adam(0.01), got {show(optimizer)}"
        )
    least = dict(num_epochs=0, early_stopping_epochs=1, batch_size=1, seed=0)
    for name, value in integers.items():
        if value is not None or name in ("num_epochs", "seed"):
            checks.check_integer(name, value, least=least[name])
    checks.check_number("l2", l2, least=0.0)
    return optimizer


def _read_parts(model, loss, x, y, sample_weight, offset, validation):
    """Reads the training rows, and the validation rows if there are any."""
    if isinstance(loss, losses.Adaptive):
        raise ValueError(
            "loss must not be adaptive, because all values are trained together; pass "
            "the loss with its parameters as loss(score, target, parameters), and "
            f"parameters=, got {show(loss)}"
        )
    train = read_rows(model, (x, y, sample_weight, offset), loss, padded=True)
    sets = name_sets(validation)
    if len(sets) > 1:
        raise ValueError(f"validation must be one set of rows, got {[*sets]}")
    parts = [train]
    for label, (*rows, groups) in sets.values():
        given: Any = tuple(rows)
        if groups is not None:
            raise ValueError(
                f"{label} must have no groups, because the loss is of one row, got "
                f"{type(groups).__name__}"
            )
        if (given[3] is None) != (offset is None):
            raise ValueError(
                f"{label} must be (x, y, sample_weight, offset) with an offset if and "
                "only if refine is given one (sample_weight may be None)"
            )
        held = read_rows(model, given, loss, True, None, f"{label} ", held=True)
        data, known = held.rows.data, train.rows.data.targets
        targets = match_targets(data.targets, known, data.weights, f"{label} y")
        data = data._replace(targets=targets)
        parts.append(held._replace(rows=held.rows._replace(data=data)))
    return parts


def _prepare(model, loss, parameters, optimizer, parts, batch, l2, seed):
    """Traces loss and optimizer; returns programs, fixed arrays and first values."""
    old = jnp.asarray(model.leaf_value)
    values = Values(
        leaf=jnp.zeros_like(old),
        init_score=jnp.zeros(model.num_scores, jnp.float32),
        parameters=_read_parameters(parameters),
    )
    constants: list[Any] = []
    row = _trace_rows(loss, parts[0].rows.data.targets, values.parameters,
                      model.num_scores, constants)  # fmt: skip
    update = _trace_update(optimizer, values, constants)
    train, *held = (_make_part(model, part) for part in parts)
    num_rows = len(train.weights)
    batch = None if batch is None or batch >= num_rows else batch
    ones = jnp.ones(model.num_scores, jnp.float32)
    fixed = Fixed(
        constants=tuple(constants),
        old=old,
        unit=ones,
        loss_unit=jnp.float32(1),
        pull=jnp.float32(0),
        train=train,
        held=held[0] if held else None,
        key=jax.random.key(seed),
    )
    start = compiled(_start_units, row)
    unit, steep, found, lost = start(fixed, (train, *held), values)
    _check_start(parts, found, lost)
    loss_unit = float(np.sum(np.asarray(unit) * np.asarray(steep)))
    rounds = max(1, model.num_rounds)
    counted = np.count_nonzero(np.asarray(train.weights))
    fixed = fixed._replace(
        unit=unit,
        loss_unit=jnp.float32(loss_unit if loss_unit > 0 else 1),
        pull=jnp.float32(l2 / (counted * rounds)),
    )
    return DescentPrograms(row, update, batch), fixed, values


def _make_part(model, given: ModelRows) -> Part:
    """Finds the leaves of all rows."""
    num_leaves = model.leaf_value.shape[2]
    small = np.min_scalar_type(max(0, num_leaves - 1))
    leaves = np.zeros(
        (model.num_rounds, model.num_scores, given.rows.offset.shape[1]), small
    )
    first = 0
    for found in find_leaves(model, [given.x], given.rows):
        leaves[first : first + len(found)] = found  # all scores of a shared tree
        first += len(found)
    init_score = np.asarray(model.init_score).reshape(-1, 1)
    offset = np.asarray(given.rows.offset) + init_score
    if model.slopes is not None:
        zeros = jax.tree.map(jnp.zeros_like, (model.leaf_value, model.init_score))
        lines = replace(model, leaf_value=zeros[0], init_score=zeros[1])
        added = np.asarray(predict(lines, given.x))
        offset[:, : len(added)] += added.reshape(len(added), -1).T
    return Part(
        leaves=jax.device_put(leaves),
        targets=given.rows.data.targets,
        weights=given.rows.data.weights,
        offset=jax.device_put(offset),
    )


def _check_start(parts, found, lost):
    """Raises for the first row with a loss that is not finite, or a NaN gradient."""
    for part, name, rows in zip(parts, ("the data", "validation"), found, strict=False):
        values = np.asarray(rows)
        if bad := _find_row(part, ~np.isfinite(values)):
            row, target = bad
            raise ValueError(
                f"loss must be finite on {name} at the scores of the model, got "
                f"{values[row]} in row {row} for target {show(target)}"
            )
    if bad := _find_row(parts[0], np.asarray(lost)):
        row, target = bad
        raise ValueError(describe_lost_slope(target, row, "the scores of the model"))


def _find_row(part, bad):
    """Returns the first bad row of positive weight, and its target; None: no row."""
    data = part.rows.data
    bad = bad & (np.asarray(data.weights) > 0)
    if not bad.any():
        return None
    row = int(np.argmax(bad))
    return row, jax.tree.map(lambda t: np.asarray(t[row]).tolist(), data.targets)


def _run(model, programs, fixed, values, optimizer, limits, progress):
    """Runs the epochs in chunks; returns the refined model and the curves."""
    with _usual_rules():
        state = optimizer.init(values)
    place = Progress(
        epoch=jnp.int32(0),
        values=values,
        optimizer=state,
        best=values,
        best_loss=jnp.float32(jnp.inf),
        best_epoch=jnp.int32(0),
        over=jnp.asarray(False),
    )
    run = compiled(_run_epochs, programs, effort=LOOP)
    empty: Any = np.full(_MOST_EPOCHS, np.nan, np.float32)
    chunks: list[np.ndarray] = []
    num_epochs, patience = limits
    total = num_epochs + 1  # losses are evaluated before each epoch
    patience = np.int32(2**31 - 1 if patience is None else patience)
    with open_bar(total, progress, unit="epoch") as bar:
        for first, count in pace_rounds(total, most=_MOST_EPOCHS):
            place, curves = run(fixed, np.int32(count), patience, place, (empty, empty))
            made = int(place.epoch) - first
            chunks.append(np.stack(curves)[:, :made])
            train, held = chunks[-1][:, -1]
            shown = {"train": train}
            move_bar(bar, made, shown if fixed.held is None else shown | {"held": held})
            if place.over:
                break
    train, held = np.concatenate(chunks, axis=1)
    best = place.best
    init_score = np.asarray(model.init_score)
    change = np.asarray(best.init_score * fixed.unit).reshape(init_score.shape)
    refined = replace(
        model,
        leaf_value=compiled(_current_leaves)(fixed, best),
        init_score=jax.device_put(init_score + change),
    )
    return refined, Refinement(
        train_loss=train,
        validation_loss=None if fixed.held is None else held,
        best_epoch=int(place.best_epoch),
        parameters=jax.tree.map(np.asarray, best.parameters),
    )


def _read_parameters(parameters: Any) -> Any:
    """Returns the parameters of a loss as float32 arrays."""

    def read(leaf):
        array = np.asarray(leaf)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"parameters must be a pytree of numbers, got {show(leaf)}")
        return jnp.asarray(array.astype(np.float32))

    return jax.tree.map(read, parameters)


def _trace_rows(
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


def _trace_update(
    optimizer: optax.GradientTransformation, values: Any, constants: list[Any]
) -> Program:
    """Traces a step of the optimizer: (gradients, state, values) -> (changes, state).

    Raises:
      TypeError: the optimizer needs other arguments.
    """
    try:
        with _usual_rules():
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
def _usual_rules() -> Iterator[None]:
    """Sets JAX's default promotion rules, which optimizers rely on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _run_epochs(
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
    train_loss, gradient = _differentiate(programs.loss, fixed, fixed.train, values)
    if fixed.held is None:
        held_loss = jnp.float32(jnp.nan)
        penalty = fixed.pull / 2 * jnp.sum(jnp.square(values.leaf))
        watched = train_loss + fixed.loss_unit * penalty
    else:
        found, _ = _evaluate_rows(programs.loss, fixed, fixed.held, values)
        weights = fixed.held.weights
        held_loss = _mean(found, weights, sum_rows(weights))
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
        _, gradient = _differentiate(
            programs.loss, fixed, part, progress.values, total=total
        )
        return _step(programs, fixed, progress, gradient), None

    return jax.lax.scan(step, progress, order)[0]


def _differentiate(
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


def _current_leaves(fixed: Fixed, values: Values) -> Float[Array, "R K L"]:
    """Returns the leaf values: the old ones plus changes in scores' units over R."""
    unit = fixed.unit / max(1, values.leaf.shape[0])
    new = fixed.old + values.leaf * unit[None, :, None]
    # Unchanged values keep their bits, including the sign of a zero.
    return jnp.where(values.leaf == 0, fixed.old, new)


def _start_units(
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
    rounds = _current_leaves(fixed, values), part.leaves
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
