# SPDX-License-Identifier: Apache-2.0
"""Cross-validation of one setting, and sweeps over many of them side by side.

A fold is a mask of weights; all points that differ in numbers only share a program.
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
from jboost.boosting.settings import StudySettings, read_settings, takes_settings
from jboost.entry import checks
from jboost.entry.arguments import explain_arguments, hint_argument
from jboost.entry.decorators import on_host
from jboost.entry.messages import MOST_LINES, cut, make_table, show
from jboost.kernels.library import takes_implementation
from jboost.model.ensemble import Ensemble
from jboost.selection.comparison import (
    SWEPT,
    Comparison,
    average,
    compare,
    finish,
    keywords_of,
    show_value,
)
from jboost.training.metrics import BY_LOSS, By, Criterion, Metrics
from jboost.training.request import RawRows


@dataclass(frozen=True)
class CrossValidation:
    """The result of cross-validation over R rounds.

    Attributes:
      train_loss: weighted mean loss of the rows that each fold trained on.
      validation_loss: weighted mean loss of the held-out rows of each fold.
      metrics: {name: [folds, R]}, on the held-out rows.
      mean: mean over the folds of the criterion ``by``; all folds count alike.
      standard_error: standard error of ``mean``: the standard deviation over the folds
        (ddof 1) divided by sqrt(folds); NaN for one fold.
      best_round: the round (from 0) of the best mean; -1 if there was no round.
      scores: scores of each row after the best round, offset included, from the fold
        that held it out (a mean over folds, if several did); NaN if none did.
      held_out: the rows that each fold held out.
      models: the ensembles of the best round, every array with a leading axis of
        folds; None without ``return_models``.
      parameters: parameters of an adaptive loss in the best round, every array with a
        leading axis of folds; () for other losses.
      by: the criterion that compares rounds: ("loss", "min"), or the name of a metric
        and "min" or "max".

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> y = x[:, 0] + x[:, 1] ** 2
      >>> found = jb.cross_validate(x, y, folds=4, num_rounds=8, max_depth=3)
      >>> found.by.name, found.mean.shape, found.held_out.shape
      ('loss', (8,), (4, 200))
    """

    train_loss: Float[np.ndarray, "folds R"]
    validation_loss: Float[np.ndarray, "folds R"]
    metrics: dict[str, Float[np.ndarray, "folds R"]]
    mean: Float[np.ndarray, " R"]
    standard_error: Float[np.ndarray, " R"]
    best_round: int
    scores: Float[np.ndarray, "N *K"]
    held_out: Bool[np.ndarray, "folds N"]
    models: Ensemble | None = None
    parameters: Any = ()
    by: Criterion = BY_LOSS

    def __repr__(self) -> str:
        """Shows the best mean; the arrays would fill pages."""
        folds, rounds = self.validation_loss.shape
        found = f"CrossValidation(folds={folds}, num_rounds={rounds}"
        if rounds == 0:
            return f"{found})"
        best = self.best_round
        return (
            f"{found}, best_round={best}, by={self.by.name!r}, "
            f"mean={self.mean[best]:.5g}, "
            f"standard_error={self.standard_error[best]:.2g})"
        )

    @property
    def one_se_round(self) -> int:
        """First round with a mean within one standard error of the best."""
        if self.best_round < 0:
            return -1
        ranks, best = self.by.rank(self.mean), self.best_round
        most = ranks[best] + self.standard_error[best]
        return int(np.argmax(ranks <= np.fmax(most, ranks[best])))


@explain_arguments
@on_host("call jb.boost there")
@takes_implementation
@takes_settings
def cross_validate(
    x: Any,
    y: Any,
    loss: Callable[..., Any] | losses.Adaptive = losses.squared_error,
    *,
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
    return_models: bool = False,
    **settings: Unpack[StudySettings],
) -> CrossValidation:
    """Trains on all folds but one and evaluates on that one, for each fold in turn.

        CV(r) = 1/folds sum_k  [mean loss of the rows of fold k after r rounds of
                                training on the rows outside it]

    (Stone 1974; Geisser 1975). Folds are weights of 0 and 1 in one program, which is
    compiled once per loss, depth and order of magnitude of the number of rows. Each
    run equals ``fit`` with those weights, except that the thresholds of features are
    chosen once from all rows; they depend on x and the weights only.

    Args:
      x, y, loss: arguments of :func:`jboost.fit`; x is in memory, dense or sparse.
      folds: the number of folds, drawn at random with sizes that differ by at most
        one; or an integer per row, the fold that holds it out (negative: none does);
        or pairs (training rows, held-out rows) of indices or masks; or a splitter of
        scikit-learn, with ``split(x, y, groups)``. An index given c times, as in a
        bootstrap, multiplies the weight of its row by c; c is the same in all rows of
        a group if a loss of groups does not take ``weights``.
      stratify: labels [N], or True for y itself: each fold gets its share of every
        label.
      groups: labels [N]: rows with the same label are held out together. For a loss of
        a group (see :func:`jboost.fit`) they are also its groups, and no fold divides
        one. With "all" and :func:`jboost.random_groups` folds divide rows, and the
        held-out rows of a fold form groups of their own. A loss of a group that does
        not take ``where`` needs ``jb.make_groups(ids, padded=False)``, unless it fails
        on a single row and so cannot be one of a row.
      shuffle: False: folds are contiguous blocks of rows.
      sample_weight: weights of both training and held-out losses.
      metrics: metrics of the held-out rows of each fold, as for :func:`jboost.fit`.
      by: the criterion that compares rounds, as for :func:`jboost.fit`; its mean over
        the folds counts.
      offset, progress, feature_names, implementation: arguments of :func:`jboost.fit`.
      mesh: a ``jax.sharding.Mesh`` of this process's devices, which share the models;
        each device holds all rows.
      return_models: whether to keep the model of each fold, of ``best_round + 1``
        rounds.
      {settings}

    The page "Parameters" explains the hyperparameters at length. Early stopping looks
    at the mean over the folds. ``seed`` also seeds the draw of the folds.

    Returns:
      A CrossValidation. ``jax.vmap(jb.predict, (0, None))(result.models, x)`` computes
      the scores of all models.

    Raises:
      TypeError, ValueError: for bad arguments, before training.
      TrainingError: no row of a fold has a gradient to learn from, or its training
        loss became NaN or infinite; holds that fold's model up to that round.
      TrainingInterrupted: ctrl-C; its ``result`` holds the rounds so far.
      RuntimeError: a metric failed, or no round is the best because ``by`` is NaN or
        infinite in each.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> y = x[:, 0] + x[:, 1] ** 2
      >>> result = jb.cross_validate(x, y, folds=4, num_rounds=8, max_depth=3)
      >>> result.validation_loss.shape, result.scores.shape
      ((4, 8), (200,))
      >>> bool(result.mean[result.best_round] < np.var(y))
      True
    """
    checks.check_flag("return_models", return_models)
    rows = RawRows(x, y, sample_weight, offset, feature_names)
    request = Comparison(
        rows, folds, stratify, groups, shuffle, metrics, by, progress, mesh,
        keeps_models=True,
    )  # fmt: skip
    study, [curve], interrupted = compare(
        request, loss, [{}], read_settings(settings, StudySettings)
    )
    best = curve.best_round()
    mean, error = average(curve.by_fold(study.by.metric))
    models = None
    if return_models:
        models = [curve.model(best + 1, fold) for fold in range(*curve.folds)]
        models = jax.tree.map(lambda *leaves: np.stack(leaves), *models)
    result = CrossValidation(
        train_loss=curve.by_fold(name="train"),
        validation_loss=curve.by_fold(),
        metrics={name: curve.by_fold(name) for name in study.metrics},
        mean=mean,
        standard_error=error,
        best_round=best,
        scores=_held_out_scores(study, curve),
        held_out=study.folds.held_out > 0,
        by=study.by,
        models=models,
        parameters=curve.parameters[best + 1],
    )
    return finish(result, interrupted, curve.num_rounds)


def _held_out_scores(study, curve):
    """Returns means over the folds that held a row out; NaN if none did."""
    masks = study.folds.held_out > 0
    total = np.zeros((len(study.rows.offset), masks.shape[1]))
    count = np.zeros(masks.shape[1])
    # Without a round there are no scores.
    for fold, scores in enumerate(curve.scores.get(curve.best_round(), ())):
        total[:, masks[fold]] += scores[:, : masks[fold].sum()]
        count += masks[fold]
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)
    return mean[0] if len(mean) == 1 else mean.T


@dataclass(frozen=True)
class Sweep:
    """The result of a sweep over P points; R is the largest number of rounds.

    A point has NaN in the rounds that it did not make, because it stopped early or its
    training loss became NaN or infinite.

    Attributes:
      points: the values that each point set, as given.
      train_loss, validation_loss: the losses of each point; see
        :class:`CrossValidation`.
      metrics: {name: [P, folds, R]}, on the held-out rows.
      mean, standard_error: mean over the folds of the criterion ``by``, and its
        standard error.
      best_rounds: the round (from 0) of the best mean of each point; -1 if no mean of
        the point is finite.
      best: index of the point with the best mean, the first of equal ones.
      held_out: the rows that each fold held out.
      by: the criterion that compares points and rounds; see :class:`CrossValidation`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> y = x[:, 0] + x[:, 1] ** 2
      >>> points = dict(learning_rate=[0.01, 0.3], l2=[0.1, 10.0])
      >>> found = jb.sweep(
      ...     x, y, jb.losses.squared_error, points, folds=4, num_rounds=8, max_depth=3
      ... )
      >>> found.mean.shape, int(found.best_rounds[0])
      ((4, 8), 7)
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
        rows = self._list_rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            for row in rows
        ]
        return "\n".join(map("  ".join, lines))

    def _repr_html_(self) -> str:
        """Shows the best points in a notebook."""
        title = repr(self).splitlines()[0]
        return make_table(title, self._list_rows()[:MOST_LINES])

    def _list_rows(self):
        """Returns the headings, and a row for each point, the best one first."""
        table = self.table
        order = np.argsort(self.by.rank(table["mean"]), kind="stable")
        columns = [[*map(show_value, column)] for column in table.values()]
        return [[*table], *([column[i] for column in columns] for i in order)]


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
    **settings: Unpack[StudySettings],
) -> Sweep:
    """Cross-validates many settings side by side.

    Points that differ only in numbers (learning_rate, l2, subsample, init_score,
    parameters of the loss, ...) run in one compiled program, with all their folds.
    Each combination of the others (sizes such as max_depth and max_leaves, options,
    monotone, interactions, the loss) has a program of its own; these run one after
    another.

    Args:
      x, y, loss: arguments of :func:`jboost.fit`.
      points: {name: values}, to try every combination; or a sequence of points
        {name: value}. A name is an argument listed above or a keyword of the loss:
        ``jb.sweep(x, y, jb.losses.huber, dict(delta=[0.5, 1.0]), ...)``. The
        arguments below apply to names that a point does not set.
      grid: False: point i takes the i-th value of each name (for a random search); all
        names then have equally many values.
      by: the criterion that compares rounds and points, as for
        :func:`jboost.cross_validate`. It must name a metric if points differ in their
        loss, because values of different losses are not comparable.
      folds, stratify, groups, shuffle, metrics: arguments of
        :func:`jboost.cross_validate`; all points have the same folds and seed.
      sample_weight, offset, progress, feature_names, implementation: arguments of
        :func:`jboost.fit`.
      mesh: devices that share the models, as for :func:`jboost.cross_validate`.
      {settings}

    The page "Parameters" explains the hyperparameters at length. Early stopping looks
    at the mean of each point over its folds.

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
    study, curves, interrupted = compare(
        request, loss, listed, read_settings(settings, StudySettings)
    )
    most = max(curve.num_rounds for curve in curves)

    def stack(pick):
        arrays = [pick(curve) for curve in curves]
        padded = np.full((len(arrays), *arrays[0].shape[:-1], most), np.nan)
        for row, array in zip(padded, arrays, strict=True):
            row[..., : array.shape[-1]] = array
        return padded

    mean = stack(lambda curve: average(curve.by_fold(study.by.metric))[0])
    least = study.by.rank(mean).min(axis=1, initial=np.inf)
    result = Sweep(
        points=tuple(listed),
        train_loss=stack(lambda curve: curve.by_fold(name="train")),
        validation_loss=stack(lambda curve: curve.by_fold()),
        metrics={
            name: stack(lambda curve, name=name: curve.by_fold(name))
            for name in study.metrics
        },
        mean=mean,
        standard_error=stack(lambda curve: average(curve.by_fold(study.by.metric))[1]),
        best_rounds=np.array([curve.best_round() for curve in curves]),
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
    if name not in keywords_of(loss):
        raise ValueError(
            f"points must name arguments ({', '.join(SWEPT)}) or keywords of the "
            f"loss ({', '.join(keywords_of(loss)) or 'it has none'}), got {show(name)}"
            f"{hint_argument(name, [*SWEPT])}"
        )
