# SPDX-License-Identifier: Apache-2.0
"""Learning curves.

In: the history of a training, or a cross-validation. Out: axes with a line per set,
and the best round.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jboost.plotting.canvas import (
    colours,
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

_FEW = 12  # rounds: points are seen where lines are short


class _Curves(NamedTuple):
    """What is drawn.

    Attributes:
      lines: {set: [R]}, the training rows first if they are among them.
      widths: {set: [R]}: half the width of a band; of sets without one nothing.
      best: the round that is marked; None for none.
      marked: the set on whose line the mark is.
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
    """Draws the loss, or a metric, of every set after each round.

    Rounds count from 0, as in the history. ``history.best_round`` is marked where there
    is a validation set. Of a cross-validation the lines
    are means over the folds, in bands of one standard error to both sides.

    Args:
      history: from :func:`jboost.fit` or :func:`jboost.cross_validate`.
      metric: one of ``history.metrics``; None for the loss.
      ax: where to draw; None for a new figure.

    Returns:
      The axes, with one line per set, "train" first.

    Raises:
      TypeError, ValueError: no history, one without rounds, or no such metric.

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
    own = colours(len(curves.lines))
    for colour, (name, values) in zip(own, curves.lines.items(), strict=True):
        rounds = np.arange(len(values))
        ax.plot(
            rounds,
            values,
            # What was learned from is there for comparison.
            linestyle="--" if name == "train" else "-",
            marker="o" if len(values) <= _FEW else "",
            markersize=4,
            linewidth=1.6,
            color=colour,
            label=plain(name),
        )
        if name in curves.widths:
            low, high = values - curves.widths[name], values + curves.widths[name]
            ax.fill_between(rounds, low, high, color=colour, alpha=0.2, linewidth=0)
    if curves.best is not None:
        _mark_best(ax, curves, own[list(curves.lines).index(curves.marked)])
    ax.set_xlabel("round")
    ax.set_ylabel("loss" if metric is None else plain(metric))
    whole = MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
    ax.xaxis.set_major_locator(whole)
    tidy(ax)
    ax.legend(frameon=False)
    return ax


def _check(history, metric):
    """A history with rounds, and one of its metrics."""
    if not isinstance(history, History | CrossValidation):
        hint = ""
        if isinstance(history, tuple) and any(isinstance(h, History) for h in history):
            hint = "; unpack what fit returns: model, history = jb.fit(...)"
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
            f"{metric!r}"
        )


def _read_history(history, metric) -> _Curves:
    """A line per set; without a validation set there is no best round."""
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
    """Means over the folds, and their standard errors."""
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


def _mark_best(ax, curves, colour):
    """A point on the line, and a thin line down to the axis."""
    best = curves.best
    value = curves.lines[curves.marked][best]
    ax.axvline(best, color=ink(ax), linewidth=0.8, linestyle=":", zorder=1)
    ax.plot(
        [best], [value], "o", color=colour, markersize=7, zorder=3,
        label=f"best round: {best} ({value:.4g})",
    )  # fmt: skip
