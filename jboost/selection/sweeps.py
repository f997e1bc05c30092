# SPDX-License-Identifier: Apache-2.0
"""Which settings generalize best: many of them, cross-validated side by side.

In: what ``fit`` takes, folds, and points: values of arguments or of parameters of the
loss. Out: losses by point, fold and round. Points that differ in numbers only run in
one compiled program, all their folds with them.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import ArrayLike, Bool, Float, Int, Shaped

from jboost import losses
from jboost.boosting.settings import FitSettings, read_settings, takes_settings
from jboost.entry import checks
from jboost.entry.arguments import explain_arguments, hint_argument
from jboost.entry.decorators import on_host
from jboost.entry.representation import MOST_LINES, cut, show
from jboost.kernels.library import takes_implementation
from jboost.selection.comparison import SWEPT, Comparison, average, compare, finish
from jboost.training.comparing import BY_LOSS, Criterion
from jboost.training.request import RawRows
from jboost.training.scoring import By, Metrics


@dataclass(frozen=True)
class Sweep:
    """The result of a sweep over P points; R is the largest number of rounds.

    A point that stopped early, or whose training loss became NaN or infinite, has NaN
    in the rounds that it did not make.

    Attributes:
      points: the values that each point set, as given.
      train_loss, validation_loss: as in :class:`CrossValidation`, for each point.
      metrics: {name: [P, folds, R]}.
      mean, standard_error: of the criterion that compares points and rounds.
      best_rounds: the round (from 0) of the best mean of each point; -1 without one,
        so where no mean is finite.
      best: index of the point with the best mean, the first of equal ones.
      held_out: the rows that each fold held out.
      by: as in :class:`CrossValidation`.
    """

    points: tuple[dict[str, Any], ...]
    train_loss: Float[np.ndarray, "P folds R"]
    validation_loss: Float[np.ndarray, "P folds R"]
    metrics: dict[str, Float[np.ndarray, "P folds R"]]
    mean: Float[np.ndarray, "P R"]
    standard_error: Float[np.ndarray, "P R"]
    best_rounds: Int[np.ndarray, " P"]
    best: int
    held_out: Bool[np.ndarray, "folds N"]
    by: Criterion = BY_LOSS

    @property
    def best_point(self) -> dict[str, Any]:
        """Values of the best point: arguments of ``fit``, parameters of the loss."""
        return self.points[self.best]

    @property
    def best_round(self) -> int:
        """Best round of the best point: train it for ``best_round + 1`` rounds."""
        return int(self.best_rounds[self.best])

    @property
    def table(self) -> dict[str, list[Any]]:
        """Columns with one entry per point, for ``pandas.DataFrame``."""
        names = dict.fromkeys(name for point in self.points for name in point)
        columns = {name: [point.get(name) for point in self.points] for name in names}
        reached = np.arange(len(self.points)), self.best_rounds
        made = self.best_rounds >= 0
        for name, array in (
            ("mean", self.mean), ("standard_error", self.standard_error)
        ):  # fmt: skip
            values = array[reached] if array.shape[1] else np.full(len(made), np.nan)
            columns[name] = np.where(made, values, np.nan).tolist()
        return {**columns, "best_round": self.best_rounds.tolist()}

    def __repr__(self) -> str:
        """Shows the best points; ``print`` shows all."""
        _, folds, rounds = self.validation_loss.shape
        sizes = f"{len(self.points)} points, {folds} folds, {rounds} rounds"
        lines = cut(str(self).splitlines(), MOST_LINES - 1, "points")
        title = f"Sweep of {sizes}, by {self.by.name} ({self.by.direction})"
        return "\n".join([title, *lines])

    def __str__(self) -> str:
        """Shows all points, the best one first."""
        table = self.table
        order = np.argsort(self.by.rank(table["mean"]), kind="stable")
        cells = [[*map(_show, (column[i] for column in table.values()))] for i in order]
        widths = [max(map(len, column)) for column in zip(table, *cells, strict=True)]
        lines = [
            [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            for row in ([*table], *cells)
        ]
        return "\n".join(map("  ".join, lines))


def _show(value):
    if isinstance(value, float):
        return f"{value:.5g}"
    return getattr(value, "__name__", str(value))  # of a loss, say


@explain_arguments
@on_host("call jb.boost there")
@takes_implementation
@takes_settings
def sweep(
    x: Any,
    y: Any,
    loss: Callable[..., Any] | losses.Adaptive,
    points: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
    *,
    grid: bool = True,
    folds: Any = 5,
    stratify: Any = None,
    groups: Any = None,
    shuffle: bool = True,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    metrics: Metrics = None,
    by: By = None,
    progress: bool = False,
    feature_names: Sequence[str] | None = None,
    mesh: Mesh | None = None,
    implementation: str | None = None,
    **settings: Unpack[FitSettings],
) -> Sweep:
    """Cross-validates many settings side by side.

    Points that differ only in numbers (learning_rate, l1, l2, max_delta_step,
    min_gain, min_child_weight, min_child_samples, subsample, the colsamples,
    category_l2, category_smoothing, min_category_weight, max_onehot, init_score,
    parameters of the loss) run
    in one compiled program, with all their folds. Each combination of the others
    (max_depth, max_leaves, monotone, interactions, regularization, curvature,
    leaf_solver, loss) has a program of its own; these run one after another.

    Args:
      x, y, loss: as for :func:`jboost.fit`.
      points: {name: values}, of which every combination is tried; or a sequence of
        points {name: value}. A name is an argument listed above or a keyword of the
        loss: ``jb.sweep(x, y, jb.losses.huber, dict(delta=[0.5, 1.0]), ...)``. The
        arguments below hold for what a point does not name.
      grid: False: point i takes the i-th value of each name (for a random search); all
        names then have equally many values.
      by: the criterion that compares rounds and points, as for
        :func:`jboost.cross_validate`. It must name a metric if points differ in their
        loss, because values of different losses are not comparable.
      folds, stratify, groups, shuffle, metrics: as for :func:`jboost.cross_validate`;
        all points have the same folds and seed.
      sample_weight, offset, progress, feature_names, implementation: as for
        :func:`jboost.fit`.
      mesh: as for :func:`jboost.cross_validate`.
      {settings}

    :func:`jboost.fit` explains the hyperparameters at length. Early stopping looks at
    the mean of each point over its folds.

    Returns:
      A Sweep; ``print`` shows the points, the best one first. The losses of a point
      equal those of :func:`jboost.cross_validate` with its settings.

    Raises:
      TypeError, ValueError: for bad arguments, before training.
      TrainingError: no row of a fold has a gradient to learn from at some point.
      TrainingInterrupted: ctrl-C; its ``result`` holds the rounds so far, none of
        the points that had not begun.
      RuntimeError: a metric failed, or no round of any point is the best because
        ``by`` is NaN or infinite in each.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> y = x[:, 0] + x[:, 1] ** 2
      >>> points = dict(learning_rate=[0.01, 0.3], l2=[0.1, 10.0])
      >>> found = jb.sweep(
      ...     x, y, jb.losses.squared_error, points, folds=4, num_rounds=8, max_depth=3
      ... )
      >>> found.validation_loss.shape, found.best_point["learning_rate"]
      ((4, 4, 8), 0.3)
    """
    checks.check_flag("grid", grid)
    listed = _list_points(points, grid, loss)
    rows = RawRows(x, y, sample_weight, offset, feature_names)
    request = Comparison(
        rows, folds, stratify, groups, shuffle, metrics, by, progress, mesh,
        keeps_models=False,
    )  # fmt: skip
    study, curves, interrupted = compare(request, loss, listed, read_settings(settings))
    most = max(curve.num_rounds for curve in curves)

    def stack(pick):
        arrays = [pick(curve) for curve in curves]
        rest = [[(0, 0)] * (a.ndim - 1) + [(0, most - a.shape[-1])] for a in arrays]
        padded = [
            np.pad(array, widths, constant_values=np.nan)
            for array, widths in zip(arrays, rest, strict=True)
        ]
        return np.stack(padded)

    least = [min(curve.values, default=np.inf) for curve in curves]
    result = Sweep(
        points=tuple(listed),
        train_loss=stack(lambda curve: curve.by_fold(column=0)),
        validation_loss=stack(lambda curve: curve.by_fold()),
        metrics={
            name: stack(lambda curve, name=name: curve.by_fold(name))
            for name in study.metrics
        },
        mean=stack(lambda curve: average(curve.by_fold(study.by.metric))[0]),
        standard_error=stack(lambda curve: average(curve.by_fold(study.by.metric))[1]),
        best_rounds=np.array([curve.best for curve in curves]),
        best=int(np.argmin(least)),
        held_out=study.folds.held_out > 0,
        by=study.by,
    )
    return finish(result, interrupted, most)


def _list_points(points: Any, grid: bool, loss: Any) -> list[dict[str, Any]]:
    """Returns one dict per point, and checks the names."""
    if isinstance(points, Mapping):
        for name in points:  # before there are many combinations
            _check_name(name, loss)
        listed = _combine(points, grid)
    elif isinstance(points, Sequence) and not isinstance(points, str):
        for number, point in enumerate(points):
            if not isinstance(point, Mapping):
                raise TypeError(
                    f"points[{number}] must be a point {{name: value}}, got "
                    f"{show(point)}"
                )
        listed = [dict(point) for point in points]
    else:
        raise TypeError(
            "points must be {name: values} or a sequence of points {name: value}, "
            f"got {show(points)}"
        )
    if not listed:
        raise ValueError("points must hold at least one point, got none")
    for name in dict.fromkeys(name for point in listed for name in point):
        _check_name(name, loss)
    return listed


def _combine(points, grid):
    """Returns every combination of the values, or the i-th values of all names."""
    columns = []
    for name, values in points.items():
        array = isinstance(values, np.ndarray | jax.Array) and values.ndim >= 1
        if not array and not isinstance(values, list | tuple | range):
            raise TypeError(
                f"points[{show(name)}] must be a list of values, got {show(values)}"
            )
        columns.append(np.asarray(values).tolist() if array else list(values))
    if not grid and len({*map(len, columns)}) > 1:
        sizes = {name: len(c) for name, c in zip(points, columns, strict=True)}
        raise ValueError(
            f"points must have equally many values under each name if grid=False, "
            f"got {sizes}"
        )
    rows = itertools.product(*columns) if grid else zip(*columns, strict=True)
    return [dict(zip(points, row, strict=True)) for row in rows]


def _check_name(name, loss):
    """Checks that points may differ in this name."""
    if name in SWEPT:
        return
    if name == "num_rounds":
        raise ValueError(
            "points must not name num_rounds: the history of each point holds every "
            "number of rounds up to the one given, and best_rounds the best of them"
        )
    if name in inspect.signature(sweep).parameters:
        raise ValueError(
            f"points must not name {name}: all points share the rows, their codes, "
            "folds and seed; call sweep for each value of it"
        )
    if name not in _keywords(loss):
        raise ValueError(
            f"points must name arguments ({', '.join(SWEPT)}) or keywords of the "
            f"loss ({', '.join(_keywords(loss)) or 'it has none'}), got {show(name)}"
            f"{hint_argument(name, [*SWEPT])}"
        )


def _keywords(loss) -> list[str]:
    """Returns the names of a loss's parameters other than score and target."""
    if isinstance(loss, losses.Adaptive) or not callable(loss):
        return []
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p.name for p in parameters if p.kind in kinds]
    positional = [p for p in parameters if p.kind is kinds[1]][:2]
    return [name for name in named if name not in {p.name for p in positional}]
