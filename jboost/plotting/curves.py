# SPDX-License-Identifier: Apache-2.0
"""Learning curves.

In: the history of a training. Out: axes with a line per set, and the best round.
"""

from typing import TYPE_CHECKING

import numpy as np

from jboost.history import UNNAMED, History
from jboost.plotting.canvas import colours, ink, need_matplotlib, open_axes, plain, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FEW = 12  # rounds: points are seen where lines are short


def learning_curve(
    history: History, *, metric: str | None = None, ax: "Axes | None" = None
) -> "Axes":
    """Draws the loss, or a metric, of every set after each round.

    Rounds count from 0, as in the history. The best round, that of least loss on the
    first validation set, is marked where there is one.

    Args:
      history: from :func:`jboost.fit`.
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
    curves = _read_curves(history, metric)
    need_matplotlib()
    from matplotlib.ticker import MaxNLocator

    ax = open_axes(ax, (6.4, 4.0))
    own = colours(len(curves))
    marker = "o" if len(history.train_loss) <= _FEW else ""
    for number, (name, values) in enumerate(curves.items()):
        ax.plot(
            np.arange(len(values)),
            values,
            # What was learnt from is there for comparison.
            linestyle="--" if name == "train" else "-",
            marker=marker,
            markersize=4,
            linewidth=1.6,
            color=own[number],
            label=plain(name),
        )
    _mark_best(ax, history, curves, own)
    ax.set_xlabel("round")
    ax.set_ylabel("loss" if metric is None else plain(metric))
    whole = MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
    ax.xaxis.set_major_locator(whole)
    tidy(ax)
    ax.legend(frameon=False)
    return ax


def _read_curves(history, metric) -> dict[str, np.ndarray]:
    """{set: [R]}, the training rows first."""
    if not isinstance(history, History):
        hint = ""
        if isinstance(history, tuple) and any(isinstance(h, History) for h in history):
            hint = "; unpack what fit returns: model, history = jb.fit(...)"
        raise TypeError(
            f"history must be a History, got {type(history).__name__}{hint}"
        )
    if len(history.train_loss) == 0:
        raise ValueError("history must have at least one round, got none")
    if metric is not None:
        names = {name for values in history.metrics.values() for name in values}
        if metric not in names:
            raise ValueError(
                f"metric must be one of {tuple(sorted(names))} or None for the loss, "
                f"got {metric!r}"
            )
        return {name: values[metric] for name, values in history.metrics.items()}
    sets = history.validation_loss
    if sets is not None and not isinstance(sets, dict):
        sets = {UNNAMED: sets}
    return {"train": history.train_loss, **(sets or {})}


def _mark_best(ax, history, curves, own):
    """The best round on the first validation set; without one there is none."""
    if history.validation_loss is None:
        return
    best = history.best_round
    first = list(curves)[1]
    value = curves[first][best]
    ax.axvline(best, color=ink(ax), linewidth=0.8, linestyle=":", zorder=1)
    ax.plot(
        [best], [value], "o", color=own[1], markersize=7, zorder=3,
        label=f"best round: {best} ({value:.4g})",
    )  # fmt: skip
