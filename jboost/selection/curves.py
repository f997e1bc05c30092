# SPDX-License-Identifier: Apache-2.0
"""Curves of cross-validation: what is recorded of each point, round by round.

In: rounds of all runs, from the compiled program. Out: a Curve for each point: losses
by fold and round, the best round, scores of held-out rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float
from tqdm import tqdm

from jboost.boosting.method import Method
from jboost.boosting.state import Problem
from jboost.codes.bins import Bins
from jboost.entry.representation import show
from jboost.entry.results import fetch
from jboost.selection.folds import Folds
from jboost.selection.runs import (
    Rounds,
)
from jboost.training.chunks import (
    no_trees,
)
from jboost.training.comparing import Criterion
from jboost.training.history import UNNAMED, TrainingError, explain_divergence
from jboost.training.metric_calls import GroupMetric, evaluate_metric
from jboost.training.pacing import advance
from jboost.training.record import Record
from jboost.training.rows import PaddedRows
from jboost.training.scoring import describe_call
from jboost.trees.tree import Tree


class Point(NamedTuple):
    """What one point trains with.

    Attributes:
      name: how messages refer to the point; "" if it is the only one.
      problem: its loss and settings, and the rows.
      begin: the initial score, or how to find it.
      metrics: functions bound to the inverse link of the loss.
    """

    name: str
    problem: Problem
    begin: Any
    rates: Float[np.ndarray, " R"]
    metrics: dict[str, Callable[..., Any]]


class Study(NamedTuple):
    """The rows and folds that all points share, and what to record.

    Attributes:
      metrics: names.
      by: the criterion that compares rounds.
      patience: rounds without improvement after which a point stops; None: never.
      keeps_models: whether to keep trees and the scores of held-out rows.
      mesh: whose devices share the runs.
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
      idle: a warning about a fold whose trees have no split.
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
        """How many rounds have been recorded."""
        return len(self.values)

    def copy(self) -> "Curve":
        """Returns a curve to which rounds can be added without changing this one."""
        lists = ("losses", "metrics", "values", "trees", "parameters")
        return replace(self, **{name: [*getattr(self, name)] for name in lists})

    def by_fold(self, name: str | None = None, column: int = 1) -> np.ndarray:
        """Returns a metric or a loss, [folds, R].

        Args:
          name: of the metric; None: the loss.
          column: of the loss: 0 for training rows, 1 for held-out rows.
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
        if trees is not None:  # of all rounds: errors of one have those before it
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
    """Raises for the first fold whose loss is not finite, with its model so far."""
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
