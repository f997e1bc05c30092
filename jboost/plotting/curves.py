# SPDX-License-Identifier: Apache-2.0
"""Draws learning curves.

In: the history of a training run, or a cross-validation. Out: axes with a line per data
set, and a mark at the best round.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jboost.entry.representation import show
from jboost.plotting.canvas import (
    colors,
    ink,
    need_matplotlib,
    open_axes,
    plain,
    tidy,
)
from jboost.selection.model_selection import CrossValidation
from jboost.training.history import UNNAMED, History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FEW = 12  # up to this many rounds, points are drawn in addition to the line


class _Curves(NamedTuple):
    """Holds the data of a plot.

    Attributes:
      lines: {set: [R]}; the training set comes first if it is present.
      widths: {set: [R]}, half the width of the band around the line, for the sets that
        have a band.
      best: the round to mark, or None.
      marked: the set whose line gets the mark.
    """

    lines: dict[str, np.ndarray]
    widths: dict[str, np.ndarray]
    best: int | None
    marked: str


def learning_curve(
    history: History | CrossValidation,
    *,
    metric: str | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the loss or a metric of every data set after each round.

    Rounds count from 0, as in the history. If there is a validation set,
    ``history.best_round`` is marked. For a cross-validation, the lines are means over
    the folds, with bands of one standard error on both sides.

    Args:
      history: from :func:`jboost.fit` or :func:`jboost.cross_validate`.
      metric: one of ``history.metrics``; None draws the loss.
      ax: the axes to draw on; None creates a new figure.

    Returns:
      The axes, with one line per set, "train" first.

    Raises:
      TypeError, ValueError: ``history`` has another type or no rounds, or it does not
        have the metric.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import plotting
      >>> x = np.arange(40.0)[:, None]
      >>> _, history = jb.fit(x, x[:, 0], validation=(x, x[:, 0]), num_rounds=5)
      >>> ax = plotting.learning_curve(history)
      >>> [line.get_label() for line in ax.get_lines()][:2]
      ['train', 'validation']
    """
    _check(history, metric)
    folds = isinstance(history, CrossValidation)
    curves = (_read_folds if folds else _read_history)(history, metric)
    need_matplotlib()
    from matplotlib.ticker import MaxNLocator

    ax = open_axes(ax, (6.4, 4.0))
    own = colors(len(curves.lines))
    for color, (name, values) in zip(own, curves.lines.items(), strict=True):
        rounds = np.arange(len(values))
        ax.plot(
            rounds,
            values,
            # Training loss is only a reference, so its line is less prominent.
            linestyle="--" if name == "train" else "-",
            marker="o" if len(values) <= _FEW else "",
            markersize=4,
            linewidth=1.6,
            color=color,
            label=plain(name),
        )
        if name in curves.widths:
            low, high = values - curves.widths[name], values + curves.widths[name]
            ax.fill_between(rounds, low, high, color=color, alpha=0.2, linewidth=0)
    if curves.best is not None and curves.best >= 0:
        _mark_best(ax, curves, own[list(curves.lines).index(curves.marked)])
    ax.set_xlabel("round")
    ax.set_ylabel("loss" if metric is None else plain(metric))
    whole = MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
    ax.xaxis.set_major_locator(whole)
    tidy(ax)
    ax.legend(frameon=False)
    return ax


def _check(history, metric):
    """Checks that the history has rounds, and that it has the metric."""
    if not isinstance(history, History | CrossValidation):
        hint = ""
        if isinstance(history, tuple) and any(isinstance(h, History) for h in history):
            hint = "; unpack the result of fit: model, history = jb.fit(...)"
        elif isinstance(getattr(history, "history_", None), History):
            hint = ", an estimator; pass its history_"
        raise TypeError(
            "history must be a History or a CrossValidation, got "
            f"{type(history).__name__}{hint}"
        )
    if history.train_loss.shape[-1] == 0:
        raise ValueError("history must have at least one round, got none")
    names: Any = history.metrics
    if isinstance(history, History):
        names = {name for values in names.values() for name in values}
    if metric is not None and metric not in names:
        raise ValueError(
            f"metric must be one of {tuple(sorted(names))} or None for the loss, got "
            f"{show(metric)}"
        )


def _read_history(history, metric) -> _Curves:
    """Returns a line per data set.

    There is no best round without a validation set.
    """
    sets = history.validation_loss
    if sets is not None and not isinstance(sets, dict):
        sets = {UNNAMED: sets}
    if metric is None:
        lines = {"train": history.train_loss, **(sets or {})}
    else:
        lines = {name: values[metric] for name, values in history.metrics.items()}
    best = None if sets is None else history.best_round
    return _Curves(lines, {}, best, next(iter(sets or {}), ""))


def _read_folds(result, metric) -> _Curves:
    """Returns the means over the folds, and their standard errors."""
    tables = {"train": result.train_loss, UNNAMED: result.validation_loss}
    if metric is not None:
        tables = {UNNAMED: result.metrics[metric]}
    lines = {name: table.mean(axis=0) for name, table in tables.items()}
    folds = len(result.train_loss)
    widths = {
        name: table.std(axis=0, ddof=1) / np.sqrt(folds)
        for name, table in tables.items()
        if folds > 1
    }
    return _Curves(lines, widths, result.best_round, UNNAMED)


def _mark_best(ax, curves, color):
    """Draws a point on the curve, and a vertical line through it."""
    best = curves.best
    value = curves.lines[curves.marked][best]
    ax.axvline(best, color=ink(ax), linewidth=0.8, linestyle=":", zorder=1)
    ax.plot(
        [best], [value], "o", color=color, markersize=7, zorder=3,
        label=f"best round: {best} ({value:.4g})",
    )  # fmt: skip
