# SPDX-License-Identifier: Apache-2.0
"""The common part of cross-validation, sweeps and tuning: checks, data, curves."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jboost.boosting.memory_needs import refuse_large_model, refuse_large_table
from jboost.boosting.method import initial_scores
from jboost.boosting.settings import RoundSettings, Settings, declared, learning_rates
from jboost.boosting.sharding import check_mesh
from jboost.entry import feature_checks
from jboost.entry.arguments import takes_mask
from jboost.entry.messages import show, warn_user
from jboost.kernels.library import resolve_implementation
from jboost.losses import Adaptive
from jboost.objective.group_tracing import estimate_in_group, read_inputs
from jboost.objective.tracing import name_of, needs_groups
from jboost.selection.folds import check_whole_groups, make_folds
from jboost.selection.study import Curve, Point, Study, run_points, same_bits
from jboost.tables.domains import check_domain
from jboost.tables.frames import RowSource
from jboost.tables.groups import RowGroups, make_groups, take_first_group
from jboost.tables.targets import check_targets
from jboost.training.metrics import (
    Compared,
    bind_metrics,
    check_metrics,
    describe_gaps,
    read_by,
    try_metrics,
)
from jboost.training.preparing import TrainingRows, bin_arrays, make_problem
from jboost.training.record import TrainingInterrupted
from jboost.training.request import RawRows, may_pad_rows
from jboost.training.sharded import spans_processes

_TOLERANCE = 1e-4
_SEED = 4073  # unlikely to be the seed of a user's targets


def is_of_groups(loss: Any, groups: Any, y: Any, num_scores: int) -> bool:
    """Returns whether a loss is a loss of a group of rows.

    It is if it requires ``where``, or if ``groups`` are not labels. With labels, any
    other loss is evaluated on all rows of one group: losses of a row fail or do not
    return a scalar, or they return the sum over the rows.

    Args:
      loss: the loss with its parameters bound.
      groups: the argument ``groups`` of the call.
      y: the targets as passed to the call.

    Raises:
      ValueError: the loss accepts both a group and a row, and its values differ.
    """
    if needs_groups(loss) or isinstance(groups, str | RowGroups):
        return True
    if groups is None:
        return False
    try:
        y = np.asarray(y) if isinstance(y, list) else y
        index = take_first_group(np.asarray(make_groups(groups).number))
        part = jax.tree.map(lambda leaf: np.asarray(leaf)[index], y)
        part = check_targets(part, len(index), np.zeros(len(index)), "y")
        found = estimate_in_group(loss, part, num_scores)
    except Exception:  # a later check refuses it by name
        return False
    parameters = (found,) if isinstance(loss, Adaptive) else ()
    return _compare(loss, part, parameters, num_scores)


def _compare(loss, part, parameters, num_scores):
    """Tries a loss on a group and on its rows; returns whether it is one of groups."""
    inputs, size = read_inputs(loss), len(jax.tree.leaves(part)[0])
    function = loss
    if isinstance(loss, Adaptive):
        function = loss.loss
        if "groups" in inspect.signature(loss.estimate).parameters:
            return True
    shape = (size,) if num_scores == 1 else (size, num_scores)
    scores = np.random.default_rng(_SEED).normal(size=shape).astype(np.float32)
    named = {"weights": jnp.ones(size, jnp.float32)} if inputs.needs_weights else {}
    named |= {"key": jax.random.key(0)} if inputs.key else {}
    masked = takes_mask(function)
    named |= {"where": jnp.ones(size, bool)} if masked else {}

    # Parameters are arguments: an estimate from few rows may be outside its domain.
    def of_group(scores, targets, parameters):
        return jnp.asarray(function(scores, targets, *parameters, **named))

    def of_row(score, target, parameters):
        return jnp.asarray(function(score, target, *parameters))

    if not _returns_scalar(of_group, scores, part, parameters):
        return False
    first = jax.tree.map(lambda leaf: leaf[0], (scores, part))
    if masked or not _returns_scalar(of_row, *first, parameters):
        return True
    whole = np.asarray(jax.jit(of_group)(scores, part, parameters))
    of_rows = jax.jit(jax.vmap(of_row, (0, 0, None)))
    rows = np.asarray(of_rows(scores, part, parameters))
    # With K > 1 scores, a loss of a row that averages them gives the mean of the rows.
    same = [rows.sum(), *([rows.mean()] if num_scores > 1 else [])]
    slack = _TOLERANCE * np.abs(rows).sum()
    if np.isclose(whole, same, rtol=_TOLERANCE, atol=slack, equal_nan=True).any():
        return False
    raise ValueError(
        "groups must be jb.make_groups(ids, padded=False) if loss "
        f"{name_of(function)} is of a group, and None if it is of a row (folds="
        "[*GroupKFold(5).split(x, groups=ids)] of scikit-learn then hold labels out "
        "together), because it accepts both and does not take where, got labels"
    )


def _returns_scalar(function, *arguments):
    """Returns whether a call succeeds, and returns a number."""
    try:
        return jax.eval_shape(function, *arguments).shape == ()
    except Exception:  # a loss may fail in any way
        return False


# All points share the codes, which these settings decide.
_OF_CODES = ("max_bins", "candidates", "candidate_weights")
SWEPT = (
    "loss",
    *(name for name in declared(RoundSettings) if name not in _OF_CODES),
    "init_score",
)
_Result = TypeVar("_Result")


def keywords_of(loss: Any) -> list[str]:
    """Returns the names of a loss's parameters other than score and target."""
    if isinstance(loss, Adaptive) or not callable(loss):
        return []
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p.name for p in parameters if p.kind in kinds]
    positional = [p for p in parameters if p.kind is kinds[1]][:2]
    return [name for name in named if name not in {p.name for p in positional}]


class Comparison(NamedTuple):
    """The arguments of a call that are not hyperparameters; all points share them.

    Attributes:
      mesh: the devices that share the models; None: one device.
      keeps_models: whether to keep trees and the scores of held-out rows.
    """

    rows: RawRows
    folds: Any
    stratify: Any
    groups: Any
    shuffle: bool
    metrics: Any
    by: Any
    progress: bool
    mesh: Any
    keeps_models: bool


class Opened(NamedTuple):
    """The rows and folds of a comparison, ready for points.

    Attributes:
      study: rows, folds and criterion.
      make: returns a point, checked and traced: of its name in messages, and the values
        that it sets.
    """

    study: Study
    make: Callable[[str, dict[str, Any]], Point]


def open_study(
    request: Comparison, loss: Any, points: list[dict[str, Any]], settings: Settings
) -> Opened:
    """Checks the arguments, and prepares rows and folds.

    Args:
      points: the values that each point sets: names in ``SWEPT`` and keywords of the
        loss. Further points may set values of the same kinds.
      settings: the values that points do not set, with the number of rounds.
    """
    if isinstance(request.rows.x, RowSource):
        raise ValueError(
            "x must hold its rows in memory (an array, a data frame, a sparse matrix), "
            "got a stream; to hold rows out, leave them out of the batches and call fit"
        )
    bound = [_bind(loss, point) for point in points]
    for each in bound:
        settings = settings.with_scores(each, request.rows.y)
    refuse_large_table(request.rows.x, settings)
    number = request.folds if isinstance(request.folds, int | np.integer) else 1
    stops = settings.early_stopping_rounds is not None or not request.keeps_models
    refuse_large_model(settings, int(number), may_stop=stops)
    # An adaptive loss estimates its parameters from all rows it is given, so padding
    # would change them.
    padded = all(may_pad_rows(each, request.groups) for each in bound)
    by, metrics = read_by(request.by, check_metrics(request.metrics))
    request, grouped = _read_groups(request, bound, settings.num_scores)
    each_settings = [_settle(settings, point) for point in points]
    # The rows hold values if a point has linear leaves.
    basis = next((own for own in each_settings if own.linear_leaves), settings)
    given, study = _make_study(request, basis, padded, by, tuple(metrics), grouped)

    def make(name, point):
        own = _settle(settings, point)
        return _make_point(name, _bind(loss, point), own, given, study, metrics)

    return Opened(study, make)


def _bind(loss, point):
    """Returns the loss of a point, with its parameters bound."""
    own = {name: value for name, value in point.items() if name not in SWEPT}
    each = point.get("loss", loss)
    return partial(each, **own) if own else each


def _settle(settings, point):
    """Returns the settings with the values of a point."""
    return settings.replace(**{name: point[name] for name in point if name in SWEPT})


def compare(
    request: Comparison, loss: Any, points: list[dict[str, Any]], settings: Settings
) -> tuple[Study, list[Curve], bool]:
    """Checks all arguments, then trains all folds of all points.

    The last result says whether training was interrupted. For arguments see
    :func:`open_study`.
    """
    settings = settings.with_rounds(stops=True)
    study, make = open_study(request, loss, points, settings)
    made = []
    for index, point in enumerate(points):
        name = f" of points[{index}], {point}" if point else ""
        made.append(make(name, point))
    check_one_loss(study, made, request.by)
    with resolve_implementation(study.rows.data.weights):
        count, progress = settings.num_rounds, request.progress
        curves, interrupted = run_points(study, made, count, progress)
    idle = [curve.idle for curve in curves if curve.idle is not None]
    if idle:
        warn_user(idle[0])
    if count > 0 and not interrupted:
        _tell_gaps(study, made, curves)
    return study, curves, interrupted


def check_one_loss(study: Study, points: Sequence[Point], by: Any) -> None:
    """Raises if points with different losses are to be compared by their loss."""
    if study.by.name == "loss" and not all(
        _have_one_loss(points[0], each) for each in points
    ):
        raise ValueError(
            "by must name a metric if points differ in their loss, because values of "
            f"different losses cannot be compared, got {show(by)}"
        )


def _tell_gaps(study, points, curves):
    """Warns of rounds that could not be compared.

    Raises:
      RuntimeError: no round of any point could be compared.
    """
    compared = []
    for point, curve in zip(points, curves, strict=True):
        for fold, values in enumerate(curve.by_fold(study.by.metric)):
            if not np.isfinite(values).all():
                targets, weights = study.rows.real
                own = weights * (study.folds.held_out[fold] > 0)
                place = f"the held-out rows of fold {fold}{point.name}"
                compared.append(Compared(place, values, targets, own))
    gaps = describe_gaps(study.by, compared)
    if all(curve.best_round() < 0 for curve in curves):
        if gaps is None:
            gaps = "the loss of the training rows is not finite after round 0"
        raise RuntimeError(
            f"no round is the best: {gaps}; pass another by, or folds in which it is "
            "finite (stratify=True gives each fold its share of every label)"
        )
    if gaps is not None:
        warn_user(f"{gaps}; the best round is none of them")


def _make_point(
    name, loss, settings, given: TrainingRows, study: Study, metrics
) -> Point:
    """Checks one point against the data, and traces its loss."""
    data, num_scores = study.rows.data, settings.num_scores
    rates = learning_rates(settings.learning_rate, settings.num_rounds)
    begin = initial_scores(settings)
    check_domain(loss, data.targets, data.weights, num_scores, "y")
    uniform = not given.weighted and not study.folds.repeated
    problem = make_problem(
        settings, loss, given.rows, given.bins, study.names, uniform=uniform,
        ranges=given.ranges,
    )  # fmt: skip
    numbers = problem.arrays.numbers
    if numbers.subsample is None:
        # A traced 1: points and calls that differ in subsample share a program.
        numbers = numbers._replace(subsample=np.float32(1))
        problem = problem._replace(arrays=problem.arrays._replace(numbers=numbers))
    measures = bind_metrics(metrics, loss, num_scores)
    grouped = data.groups is not None
    try_metrics(measures, *study.rows.real, num_scores, grouped)
    return Point(name, problem, begin, np.asarray(rates), measures)


def _read_groups(request, bound, num_scores):
    """Adds groups to the rows for losses of groups, and returns these: all or none."""
    groups, y = request.groups, request.rows.y
    grouped = [is_of_groups(loss, groups, y, num_scores) for loss in bound]
    if any(grouped) != all(grouped):
        raise ValueError(
            "points must have losses of groups, which take where, or losses of rows, "
            "got both"
        )
    if not grouped[0]:
        return request, []
    rows = request.rows._replace(groups=groups)
    labels = fold_labels(groups, request.folds)
    return request._replace(rows=rows, groups=labels), bound


def fold_labels(groups: Any, folds: Any) -> Any:
    """Returns the labels of a loss of groups that determine folds; None: none do."""
    drawn = isinstance(folds, int | np.integer) or hasattr(folds, "split")
    if isinstance(groups, str) or not drawn:
        return None
    return groups.number if isinstance(groups, RowGroups) else groups


def _make_study(request, settings, padded, by, metrics, grouped):
    """Returns the binned rows and the study: rows on the device, folds, criterion.

    Args:
      grouped: the losses of the points if they are losses of groups; otherwise empty.
    """
    loss = max(grouped, key=lambda each: read_inputs(each).needs_weights, default=None)
    given = bin_arrays(request.rows, settings, padded, loss=loss)
    rows, num_features = given.rows, given.bins.num_features
    targets = jax.tree.leaves(rows.data.targets)
    labels = np.asarray(targets[0])[: rows.size] if len(targets) == 1 else None
    folds = make_folds(
        request.folds, rows.size, y=labels, stratify=request.stratify,
        groups=request.groups, shuffle=request.shuffle, seed=settings.seed,
    )  # fmt: skip
    counted = np.asarray(rows.data.weights)[: rows.size] > 0
    for number, masks in enumerate(zip(*folds, strict=True)):
        for name, mask in zip(("train on", "hold out"), masks, strict=True):
            if not np.any((mask > 0) & counted):
                raise ValueError(
                    f"folds must {name} some row of positive weight each, got none in "
                    f"fold {number}"
                )
    if grouped:
        rows = _weigh_groups(rows, folds, grouped, given.weighted)
        given = given._replace(rows=rows)
    mesh = check_mesh(request.mesh)
    if spans_processes(mesh):
        raise ValueError(
            "mesh must hold devices of this process alone, whose models they share, "
            f"got those of {jax.process_count()} processes; divide the points instead"
        )
    return given, Study(
        bins=given.bins,
        rows=rows,
        folds=folds,
        names=feature_checks.check_names(
            request.rows.feature_names, given.schema.names, num_features
        ),
        metrics=metrics,
        by=by,
        patience=settings.early_stopping_rounds,
        seed=settings.seed,
        keeps_models=request.keeps_models,
        mesh=mesh,
    )


def _weigh_groups(rows, folds, losses, weighted):
    """Checks the folds of losses of groups; hands these the counts of rows."""
    masked = all(read_inputs(loss).where for loss in losses)
    if rows.data.groups.kind != "ids" and not masked:
        raise ValueError(
            "groups must be an id for each row where the loss does not take where, "
            f"because held-out rows leave other groups, got {show(rows.data.groups)}"
        )
    takes = [read_inputs(loss).weights for loss in losses]
    check_whole_groups(folds, rows.data.groups, all(takes))
    weighted |= folds.repeated or rows.data.groups.weights is not None
    if weighted and any(takes) != all(takes):
        raise ValueError(
            "points must have losses that take weights, or losses that do not, where "
            "rows have weights, got both"
        )
    return rows.handing_weights() if folds.repeated and takes[0] else rows


def finish(result: _Result, interrupted: bool, num_rounds: int) -> _Result:
    """Returns a result, or raises an error with it if training was interrupted.

    Raises:
      TrainingInterrupted: training was interrupted; the error has the result so far.
    """
    if interrupted:
        raise TrainingInterrupted(
            f"training was interrupted after {num_rounds} rounds; the error's .result "
            "holds them",
            num_rounds,
            result=result,
        )
    return result


def average(values: Float[np.ndarray, "folds R"]):
    """Returns the mean over the folds and its standard error."""
    count = len(values)
    if count < 2:
        return values.mean(axis=0), np.full(values.shape[1], np.nan)
    return values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(count)


def _have_one_loss(one: Point, other: Point) -> bool:
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


def show_value(value: Any) -> str:
    """Returns a value of a point as tables show it."""
    if isinstance(value, float):
        return f"{value:.5g}"
    return getattr(value, "__name__", str(value))  # the name of a loss, say
