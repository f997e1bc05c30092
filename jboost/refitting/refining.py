# SPDX-License-Identifier: Apache-2.0
"""refine: trains all leaf values of a model together.

In: a model, rows, a loss, an optax optimizer. Out: the model with the same splits and
the leaf values that the optimizer finds, and the losses on its way.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import ArrayLike, Shaped

from jboost import losses
from jboost.entry import checks
from jboost.entry.arguments import explain_arguments
from jboost.entry.decorators import on_host
from jboost.entry.messages import show, show_fields
from jboost.entry.programs import FULL, compiled
from jboost.kernels.library import resolve_implementation, takes_implementation
from jboost.model.ensemble import Ensemble, check_model
from jboost.objective.faults import describe_lost_slope
from jboost.refitting.descent import (
    DescentPrograms,
    Fixed,
    Part,
    Progress,
    Values,
    current_leaves,
    read_parameters,
    run_epochs,
    start_units,
    trace_rows,
    trace_update,
    usual_rules,
)
from jboost.refitting.model_rows import ModelRows, count_rounds, find_leaves, read_rows
from jboost.tables.targets import match_targets
from jboost.training.chunks import move_bar, open_bar, pace_rounds
from jboost.training.rows import name_sets

_MOST_EPOCHS = 64  # in one call of the compiled program
_LEARNING_RATE = 0.01


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
    optimizer = _check_settings(locals())
    parts = _read_parts(model, loss, x, y, sample_weight, offset, validation)
    with resolve_implementation(parts[0].rows.data.weights):
        programs, fixed, values = _prepare(
            model, loss, parameters, optimizer, parts, batch_size, l2, seed
        )
        limits = num_epochs, early_stopping_epochs
        return _run(model, programs, fixed, values, optimizer, limits, progress)


def _check_settings(given):
    """Checks the settings; returns the optimizer."""
    optimizer = given["optimizer"]
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
    for name, minimum in least.items():
        if given[name] is not None or name in ("num_epochs", "seed"):
            checks.check_integer(name, given[name], least=minimum)
    checks.check_number("l2", given["l2"], least=0.0)
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
        held = read_rows(model, given, loss, True, f"{label} ", held=True)
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
        parameters=read_parameters(parameters),
    )
    constants: list[Any] = []
    row = trace_rows(loss, parts[0].rows.data.targets, values.parameters,
                      model.num_scores, constants)  # fmt: skip
    update = trace_update(optimizer, values, constants)
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
    start = compiled(start_units, row)
    unit, steep, found, lost = start(fixed, (train, *held), values)
    for part, name, rows in zip(parts, ("the data", "validation"), found, strict=False):
        _check_losses(part, name, np.asarray(rows))
    data = parts[0].rows.data
    bad = np.asarray(lost) & (np.asarray(data.weights) > 0)
    if bad.any():
        index = int(np.argmax(bad))
        target = jax.tree.map(lambda t: np.asarray(t[index]).tolist(), data.targets)
        raise ValueError(describe_lost_slope(target, index, "the scores of the model"))
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
    for found in find_leaves(model, given, count_rounds(model, given.rows)):
        leaves[first : first + len(found)] = found  # all scores of a shared tree
        first += len(found)
    init_score = np.asarray(model.init_score).reshape(-1, 1)
    return Part(
        leaves=jax.device_put(leaves),
        targets=given.rows.data.targets,
        weights=given.rows.data.weights,
        offset=jax.device_put(np.asarray(given.rows.offset) + init_score),
    )


def _check_losses(part, name, values):
    """Raises for the first row with a loss that is not finite."""
    data = part.rows.data
    bad = ~np.isfinite(values) & (np.asarray(data.weights) > 0)
    if bad.any():
        row = int(np.argmax(bad))
        target = jax.tree.map(lambda t: np.asarray(t[row]).tolist(), data.targets)
        raise ValueError(
            f"loss must be finite on {name} at the scores of the model, got "
            f"{values[row]} in row {row} for target {show(target)}"
        )


def _run(model, programs, fixed, values, optimizer, limits, progress):
    """Runs the epochs in chunks; returns the refined model and the curves."""
    with usual_rules():
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
    run = compiled(run_epochs, programs, effort=FULL)
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
        leaf_value=compiled(current_leaves)(fixed, best),
        init_score=jax.device_put(init_score + change),
    )
    return refined, Refinement(
        train_loss=train,
        validation_loss=None if fixed.held is None else held,
        best_epoch=int(place.best_epoch),
        parameters=jax.tree.map(np.asarray, best.parameters),
    )
