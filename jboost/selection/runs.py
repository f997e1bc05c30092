# SPDX-License-Identifier: Apache-2.0
"""Many models trained on the same rows in one compiled program, and their curves.

In: rows on the device, folds, parameters of the runs. Out: a Curve for each point. All
runs share codes and targets; rows outside a run's training set have weight 0 in it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Float, Int8, Int32, UInt32
from tqdm import tqdm

from jboost.boosting.method import Method, Numbers
from jboost.boosting.reports import mean_loss, weigh_losses
from jboost.boosting.round import grow_round
from jboost.boosting.state import (
    Arrays,
    BoostState,
    Data,
    Problem,
    StartPoint,
    Static,
    own_minimizers,
    reported_parameters,
    start_state,
)
from jboost.codes.bins import Bins
from jboost.entry.context import current_implementation
from jboost.entry.decorators import fetch
from jboost.entry.messages import show
from jboost.entry.programs import FULL, compiled
from jboost.numerics.padding import padded_size
from jboost.objective.evaluation import Objective, loss_values
from jboost.objective.group_tracing import GroupLoss
from jboost.objective.tracing import TracedLoss
from jboost.selection.folds import Folds
from jboost.training.chunks import MOST_ROUNDS, advance, no_trees
from jboost.training.history import UNNAMED, TrainingError, explain_divergence
from jboost.training.metrics import Criterion, GroupMetric, evaluate_metric
from jboost.training.record import Record
from jboost.training.rows import PaddedRows
from jboost.training.scoring import describe_call
from jboost.training.starting import has_split
from jboost.trees.initial import MedianStart
from jboost.trees.slopes import is_unbounded
from jboost.trees.tree import Tree

_LEAST_RUNS = 8  # fewer are padded, so that small numbers of runs share a program


class Shared(NamedTuple):
    """Data that all runs share.

    Attributes:
      offset: the scores before the initial score is added.
      counts: how often each row counts in the training set of each fold; negative: how
        often it counts in the fold's held-out loss.
      watched: the held-out rows of each fold, padded by repeating one. The scores of
        these rows are returned; empty if no scores are needed.
      constants: constants of the loss; None for those that differ between runs.
      words: the seed of the random numbers.
    """

    data: Data
    counts: Int8[Array, "folds N"] | Int32[Array, "folds N"]
    watched: Int32[Array, "folds M"]
    constants: tuple[Any, ...]
    words: UInt32[Array, "2"] | np.ndarray


class Run(NamedTuple):
    """Parameters that differ between runs, with a leading axis of runs.

    Attributes:
      fold: index of the fold that selects the training rows.
      numbers: numeric hyperparameters of the method.
      constants: constants of the loss; None for those that all runs share.
      init_score: None for the minimizer of the loss.
    """

    fold: Int32[Array, ""] | np.ndarray
    numbers: Numbers
    constants: tuple[Any, ...]
    init_score: Float[Array, " K"] | MedianStart | None


class StartCheck(NamedTuple):
    """Problems of a run before its first round.

    Attributes:
      found, row, value: whether the loss of a row of positive weight is not finite; the
        first such row, and its loss.
      endless: the result of :func:`jboost.trees.slopes.is_unbounded`.
    """

    found: Bool[Array, ""]
    row: Int32[Array, ""]
    value: Float[Array, ""]
    endless: Bool[ArrayLike, ""]


class Rounds(NamedTuple):
    """Rounds of one run; only the first ``count`` entries of each array are valid.

    Attributes:
      trees: None if they are not kept.
      losses: mean losses of the training rows, and of the held-out rows.
      moved: whether any leaf has a value other than 0.
      split: whether a tree has a split.
      scores: scores of the watched rows after each round.
      parameters: parameters of an adaptive loss after each round; () for other losses.
    """

    state: BoostState
    trees: Tree | None
    losses: Float[Array, "R 2"]
    moved: Bool[Array, " R"]
    split: Bool[Array, " R"]
    scores: Float[Array, "R K M"]
    parameters: Any


def pad_runs(number: int, mesh: Mesh | None = None) -> int:
    """Returns the padded number of runs, so that similar numbers share programs.

    With a mesh, all devices get the same number.
    """
    devices = 1 if mesh is None else mesh.size
    return -(-padded_size(number, _LEAST_RUNS) // devices) * devices


def share(
    rows: PaddedRows,
    folds: Folds,
    constants: tuple[Any, ...],
    *,
    seed: int,
    watches: bool,
) -> Shared:
    """Moves the folds to the device."""
    size, most = len(rows.data.weights), max(folds.train.max(), folds.held_out.max())
    dtype = np.int8 if most <= np.iinfo(np.int8).max else np.int32
    counts = np.zeros((pad_runs(len(folds.train)), size), dtype)
    counts[: len(folds.train), : rows.size] += folds.train.astype(dtype)
    counts[: len(folds.train), : rows.size] -= folds.held_out.astype(dtype)
    longest = int(np.count_nonzero(folds.held_out, axis=1).max())
    watched = np.zeros((len(counts), padded_size(longest) if watches else 0), np.int32)
    for number, mask in enumerate(folds.held_out if watches else ()):
        held_out = np.flatnonzero(mask)
        watched[number] = held_out[-1]
        watched[number, : len(held_out)] = held_out
    return Shared(
        data=rows.data,
        counts=jax.device_put(counts),
        watched=jax.device_put(watched),
        constants=constants,
        words=np.array([0, seed], np.uint32),  # seed_from_key(jax.random.key(seed))
    )


def start_runs(
    loss: TracedLoss | GroupLoss,
    method: Method,
    shared: Shared,
    runs: Run,
    mesh: Mesh | None,
) -> tuple[BoostState, StartCheck]:
    """Returns the states of all runs before the first round, and their problems.

    With a mesh, its devices share the runs.
    """
    return _compile(mesh, _start_runs, loss, method)(shared, runs)


def run_rounds(
    loss: TracedLoss | GroupLoss,
    method: Method,
    keeps_trees: bool,
    shared: Shared,
    runs: Run,
    rates: np.ndarray,
    counts: np.ndarray,
    state: BoostState,
    *,
    mesh: Mesh | None,
) -> Rounds:
    """Runs ``counts`` rounds of each run.

    Args:
      rates: [runs, 16], the learning rates of these rounds.
      counts: numbers of rounds; 0 for runs that have ended.
      mesh: the devices that share the runs; None: one device.
    """
    run = _compile(mesh, _run_rounds, loss, method, keeps_trees)
    return run(shared, runs, rates, counts, state)


def _compile(mesh, function, *static):
    """Compiles a function of the shared data and of the runs."""
    if mesh is None:
        return compiled(function, *static, effort=FULL)
    return compiled(_run_on_devices, mesh, function, static, effort=FULL)


def _run_on_devices(mesh, function, static, shared, *runs):
    """Divides the runs among devices, which exchange nothing."""
    each = PartitionSpec(mesh.axis_names)
    specs = (PartitionSpec(), *[each] * len(runs))
    run = jax.shard_map(
        partial(function, *static), mesh=mesh, in_specs=specs, out_specs=each,
        check_vma=False,
    )  # fmt: skip
    return run(shared, *runs)


def _over_runs(function: Callable[..., Any], operands: Any) -> Any:
    """Maps over runs.

    CPU kernels already use all threads for one run, and a sequential map can skip work
    in single runs; other devices need the parallelism of vmap.
    """
    if current_implementation() == "cpu":
        return jax.lax.map(lambda each: function(*each), operands)
    return jax.vmap(function)(*operands)


def _start_runs(loss, method, shared, runs):
    minimizer = None
    if all(constant is not None for constant in shared.constants):
        minimizer = own_minimizers(loss, shared.constants, shared.data)

    def start_run(run):
        data, constants = data_of(shared, run), _constants_of(shared, run)
        start = StartPoint(run.init_score, shared.words, minimizer)
        state, _ = start_state(loss, constants, data, start)
        if isinstance(loss, GroupLoss):
            return state, _find_group_doubt(loss, constants, shared.data, state)
        objective = Objective(loss, constants, data.targets, state.parameters, None)
        values = loss_values(objective, state.scores)
        bad = ~jnp.isfinite(values) & (shared.data.weights > 0)
        row = jnp.argmax(bad).astype(jnp.int32)
        objective = objective._replace(minimizer=state.minimizer)
        endless = is_unbounded(objective, state.scores, data.weights)
        return state, StartCheck(jnp.any(bad), row, values[row], endless)

    return _over_runs(start_run, (runs,))


def _find_group_doubt(loss, constants, data, state):
    values, weights = weigh_losses(
        loss, constants, state.parameters, data, state.scores, state.words
    )
    bad = ~jnp.isfinite(values) & (weights > 0)
    at = jnp.argmax(bad).astype(jnp.int32)
    row = jnp.int32(0)
    if data.groups.kind == "ids":
        row = jnp.concatenate([table.rows[:, 0] for table in data.groups.tables])[at]
    return StartCheck(jnp.any(bad), row, values[at], jnp.asarray(False))


def _run_rounds(loss, method, keeps_trees, shared, runs, rates, counts, state):
    def make(run, rates, count, state):
        data, constants = data_of(shared, run), _constants_of(shared, run)
        problem = Problem(Static(loss, method), Arrays(constants, run.numbers, data))
        held_out = _repeat_rows(shared.data, -shared.counts[run.fold])

        def measure(state, part):
            parameters = reported_parameters(loss, state)
            return mean_loss(
                loss, constants, parameters, part, state.scores, state.words
            )

        def one_round(number, made):
            after, trees, _ = grow_round(problem, rates[number], made.state)
            losses = [measure(after, part) for part in (data, held_out)]

            def store(buffer, value):
                return jax.lax.dynamic_update_index_in_dim(buffer, value, number, 0)

            return Rounds(
                state=after,
                trees=jax.tree.map(store, made.trees, trees) if keeps_trees else None,
                losses=store(made.losses, jnp.stack(losses)),
                moved=store(made.moved, jnp.any(trees.leaf_value != 0)),
                split=store(made.split, has_split(trees)),
                scores=store(made.scores, after.scores[:, shared.watched[run.fold]]),
                parameters=jax.tree.map(store, made.parameters, after.parameters),
            )

        empty = _no_rounds(method, keeps_trees, shared.watched.shape[1], state)
        return jax.lax.fori_loop(0, count, one_round, empty)

    return _over_runs(make, (runs, rates, counts, state))


def _no_rounds(method, keeps_trees, num_watched, state):
    """Returns empty buffers for the rounds of one run."""
    num_scores, trees = state.steps.shape[0], None
    if keeps_trees:
        trees = jax.tree.map(
            lambda a: jnp.zeros((MOST_ROUNDS, *a.shape[1:]), a.dtype),
            no_trees(method, num_scores, 1),
        )
    return Rounds(
        state=state,
        trees=trees,
        losses=jnp.zeros((MOST_ROUNDS, 2), jnp.float32),
        moved=jnp.zeros(MOST_ROUNDS, bool),
        split=jnp.zeros(MOST_ROUNDS, bool),
        scores=jnp.zeros((MOST_ROUNDS, num_scores, num_watched), jnp.float32),
        parameters=jax.tree.map(
            lambda a: jnp.zeros((MOST_ROUNDS, *a.shape), a.dtype), state.parameters
        ),
    )


def data_of(shared: Shared, run: Run) -> Data:
    """Returns the rows with a run's weights: 0 outside its training set."""
    return _repeat_rows(shared.data, shared.counts[run.fold])


def _repeat_rows(data, counts):
    """Multiplies weights by counts; 0 for negative counts."""
    groups = data.groups
    if groups is None or groups.weights is None:
        weights = jnp.maximum(counts, 0).astype(jnp.float32) * data.weights
        return data._replace(weights=weights)
    # The loss weighs rows itself; the core's weights only mark the rows that count.
    own = jnp.maximum(counts, 1).astype(jnp.float32) * groups.weights
    weights = jnp.where(counts > 0, data.weights, 0.0)
    return data._replace(weights=weights, groups=replace(groups, weights=own))


def _constants_of(shared, run):
    pairs = zip(shared.constants, run.constants, strict=True)
    return tuple(common if own is None else own for common, own in pairs)


class Point(NamedTuple):
    """The inputs of training for one point.

    Attributes:
      name: the name of the point in messages; "" if it is the only one.
      problem: its loss and settings, and the rows.
      begin: the initial score, or the rule that finds it.
      metrics: functions bound to the inverse link of the loss.
    """

    name: str
    problem: Problem
    begin: Any
    rates: Float[np.ndarray, " R"]
    metrics: dict[str, Callable[..., Any]]


class Study(NamedTuple):
    """The rows and folds that all points share, and the quantities to record.

    Attributes:
      metrics: names of the metrics.
      by: the criterion that compares rounds.
      patience: rounds without improvement after which a point stops; None: never.
      keeps_models: whether to keep trees and the scores of held-out rows.
      mesh: the devices that share the runs; None: one device.
    """

    bins: Bins
    rows: PaddedRows
    folds: Folds
    names: tuple[str, ...] | None
    metrics: tuple[str, ...]
    by: Criterion
    patience: int | None
    seed: int
    keeps_models: bool
    mesh: Mesh | None = None


@dataclass
class Curve:
    """The rounds of one point so far; lists have one entry per round.

    Attributes:
      method: the method of the point.
      functions: metrics by name.
      init_score: initial score of each fold, [folds] or [folds, K].
      losses: mean losses of the training and of the held-out rows, each [folds, 2].
      metrics: {name: [folds]}, on the held-out rows.
      values: the criterion of each round as a rank: the least is best.
      trees: trees of each chunk of rounds, [folds, R, ...].
      best: the best round; -1 while there is none.
      scores: scores of the held-out rows after the best round, [folds, K, M].
      parameters: parameters of an adaptive loss, at the start and after each round;
        () for other losses.
      over: whether the point has stopped.
      idle: a warning about a fold without a split in its trees; None: no warning.
    """

    method: Method
    functions: dict[str, Callable[..., Any]]
    init_score: np.ndarray
    losses: list[np.ndarray] = field(default_factory=list)
    metrics: list[dict[str, np.ndarray]] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    best: int = -1
    scores: np.ndarray | None = None
    parameters: list[Any] = field(default_factory=list)
    over: bool = False
    idle: str | None = None

    @property
    def num_rounds(self) -> int:
        """The number of recorded rounds."""
        return len(self.values)

    def copy(self) -> "Curve":
        """Returns a copy that can grow by rounds without changing this curve."""
        lists = ("losses", "metrics", "values", "trees", "parameters")
        return replace(self, **{name: [*getattr(self, name)] for name in lists})

    def by_fold(self, name: str | None = None, column: int = 1) -> np.ndarray:
        """Returns a metric or a loss, [folds, R].

        Args:
          name: the name of the metric; None: the loss.
          column: the column of the loss: 0 for training rows, 1 for held-out rows.
        """
        num_folds = len(self.init_score)
        rows = [losses[:, column] for losses in self.losses]
        if name is not None:
            rows = [values[name] for values in self.metrics]
        return np.array(rows, np.float64).reshape(len(rows), num_folds).T


def same_loss(one: Point, other: Point) -> bool:
    """Returns whether two points have the same loss with the same constants."""
    loss, other_loss = one.problem.loss, other.problem.loss
    if loss.coupled:
        if loss != other_loss:
            return False
        programs = [*loss.values, *filter(None, [loss.estimate])]
    else:
        if replace(loss, curvature=None) != replace(other_loss, curvature=None):
            return False
        programs = [each for each in (loss.value, loss.estimate) if each is not None]
    used = {index for program in programs for index in program.constants}
    constants = one.problem.constants, other.problem.constants
    return all(same_bits(*(each[i] for each in constants)) for i in used)


def same_bits(one, other):
    """Returns whether two arrays have the same bits."""
    if one is other:
        return True
    one, other = np.asarray(one), np.asarray(other)
    like = (one.shape, one.dtype) == (other.shape, other.dtype)
    return like and one.tobytes() == other.tobytes()


def by_point(array, num_points, num_folds):
    """Returns [runs, ...] without padding as [points, folds, ...], on the host."""
    array = np.asarray(array)[: num_points * num_folds]
    return array.reshape(num_points, num_folds, *array.shape[1:])


def record_chunk(
    study: Study, curves: list[Curve], made: Rounds, count: int, bar: tqdm
) -> list[Curve]:
    """Returns the curves with a chunk of rounds, where they have not stopped."""
    curves = [curve.copy() for curve in curves]
    num_folds = len(study.folds.train)
    watches = made.scores.shape[-1] > 0
    seen = made.scores if watches else None
    fields = (made.losses, made.trees, seen, made.parameters)
    losses, trees, scores, parameters = jax.tree.map(
        lambda a: by_point(a, len(curves), num_folds), fetch(fields)
    )
    for point, curve in enumerate(curves):
        if curve.over:
            continue
        if trees is not None:  # trees of all rounds; an error keeps those before it
            own = jax.tree.map(lambda a: a[point, :, :count], trees)  # noqa: B023
            curve.trees.append(own)
        for entry in range(count):
            seen = None if scores is None else scores[point, :, entry]
            current = jax.tree.map(lambda a: a[point, :, entry], parameters)  # noqa: B023
            _record_round(study, curve, losses[point, :, entry], seen, current)
            if curve.over:
                break
    least = min(curve.values[curve.best] for curve in curves if curve.values)
    shown = -least if study.by.direction == "max" else least
    advance(bar, count, {"best": shown})
    return curves


def _record_round(study, curve, losses, scores, parameters):
    """Adds one round to a curve, and stops the curve where it ends."""
    number = curve.num_rounds
    if not np.isfinite(losses[:, 0]).all():
        if study.keeps_models:
            _raise_at(study, curve, losses[:, 0])
        curve.over = True  # a sweep goes on with its other points
        return
    measured = _measure(study, curve, scores)
    value = losses[:, 1] if study.by.name == "loss" else measured[study.by.name]
    value = float(study.by.rank(np.mean(value, dtype=np.float64)))
    curve.losses.append(losses)
    curve.metrics.append(measured)
    curve.parameters.append(parameters)
    curve.values.append(value)
    if value < (np.inf if curve.best < 0 else curve.values[curve.best]):
        curve.best = number
        curve.scores = scores if study.keeps_models else None
    if study.patience is not None and number - curve.best >= study.patience:
        curve.over = True


def _measure(study, curve, scores):
    """Returns {metric: [folds]} on the held-out rows."""
    number = curve.num_rounds
    values: dict[str, list[float]] = {name: [] for name in study.metrics}
    for fold, held_out in enumerate(study.folds.held_out if values else ()):
        rows = np.flatnonzero(held_out)
        score = scores[fold, :, : len(rows)]
        score = score[0] if score.shape[0] == 1 else score.T
        targets, weights = jax.tree.map(lambda a: a[rows], study.rows.real)  # noqa: B023
        arguments = (score, targets, weights * held_out[rows].astype(weights.dtype))
        groups = study.rows.data.groups
        whole = None if groups is None else _spread_rows(study, rows, arguments)
        for name, function in curve.functions.items():
            try:
                grouped = isinstance(function, GroupMetric)
                operands: Any = whole if grouped else arguments
                values[name].append(evaluate_metric(function, operands, groups))
            except Exception as error:
                raise RuntimeError(
                    f"metrics[{show(name)}] failed in round {number} on the held-out "
                    "rows "
                    f"of fold {fold}: {error!r}; it is called as "
                    f"{describe_call(function)}"
                ) from error
    return {name: np.array(column) for name, column in values.items()}


def _raise_at(study, curve, losses):
    """Raises for the first fold without a finite loss, with its model so far."""
    fold, number = int(np.argmax(~np.isfinite(losses))), curve.num_rounds
    before = curve.by_fold(column=0)[fold]
    raise TrainingError(
        f"the loss of the training rows of fold {fold} became {losses[fold]} in round "
        f"{number}; {explain_divergence(before, losses[fold])}; the error's .model "
        "and .history hold the earlier rounds of that fold",
        make_record(study, curve, fold),
        number,
    )


def make_record(study: Study, curve: Curve, fold: int) -> Record:
    """Returns the rounds of one fold as ``fit`` would have recorded them."""
    parameters = [jax.tree.map(lambda a: a[fold], each) for each in curve.parameters]
    record = Record(
        bins=study.bins,
        init_score=curve.init_score[fold],
        set_names=(UNNAMED,),
        named=False,
        no_trees=no_trees(curve.method, study.rows.offset.shape[0]),
        choices={},
        bagged=False,
        feature_names=study.names,
        metric_names=study.metrics,
        measured=(UNNAMED,),
        by=study.by,
        parameters=parameters[:1],
    )
    trees = record.no_trees
    if curve.trees:
        join = lambda *arrays: np.concatenate([a[fold] for a in arrays])  # noqa: E731
        trees = jax.tree.map(join, *curve.trees)
    metrics = [[each[name][fold] for name in study.metrics] for each in curve.metrics]
    number = curve.num_rounds
    record.add(
        trees,
        curve.by_fold(column=0)[fold],
        curve.by_fold()[fold][:, None],
        np.array(metrics).reshape(number, 1, len(study.metrics)),
        None,
        parameters[1:],
    )
    return record


def _spread_rows(study, rows, arguments):
    """Returns scores, targets and weights of all rows; only ``rows`` have a weight."""
    score, _, weight = arguments
    data = study.rows.data
    scores = np.zeros((len(data.weights), *score.shape[1:]), np.float32)
    weights = np.zeros(len(data.weights), np.float32)
    scores[rows], weights[rows] = score, weight
    return scores, data.targets, weights
