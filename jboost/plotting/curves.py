# SPDX-License-Identifier: Apache-2.0
"""Learning curves, panels of a loss and its derivatives, and the search of settings."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import ArrayLike, Shaped

from jboost.boosting.inspection import inspect_loss
from jboost.entry.messages import show
from jboost.losses import Adaptive
from jboost.objective.curvature import Curvature
from jboost.plotting.canvas import (
    colors,
    ink,
    need_matplotlib,
    open_axes,
    open_panels,
    plain,
    tidy,
)
from jboost.selection.cross_validation import CrossValidation
from jboost.selection.tuning import Tuned
from jboost.training.record import UNNAMED, History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REACH = 4.0  # range of scores on both sides, in units of max(1, |minimizer|)
_STEEP = 3.0  # the y-axis ends at this multiple of a high quantile of the curves
_FEW = 12  # up to this many rounds, points are drawn in addition to the line


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
      history: a history from :func:`jboost.fit`, or the result of
        :func:`jboost.cross_validate`.
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
    check_history(history, metric)
    lines, widths, marked = read_curves(history, metric)
    need_matplotlib()
    from matplotlib.ticker import MaxNLocator

    ax = open_axes(ax, (6.4, 4.0))
    own = colors(len(lines))
    for color, (name, values) in zip(own, lines.items(), strict=True):
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
        if name in widths:
            low, high = values - widths[name], values + widths[name]
            ax.fill_between(rounds, low, high, color=color, alpha=0.2, linewidth=0)
    best = history.best_round
    if marked is not None and best >= 0:
        value, color = lines[marked][best], own[list(lines).index(marked)]
        ax.axvline(best, color=ink(ax), linewidth=0.8, linestyle=":", zorder=1)
        ax.plot(
            [best], [value], "o", color=color, markersize=7, zorder=3,
            label=f"best round: {best} ({value:.4g})",
        )  # fmt: skip
    ax.set_xlabel("round")
    ax.set_ylabel("loss" if metric is None else plain(metric))
    whole = MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
    ax.xaxis.set_major_locator(whole)
    tidy(ax)
    ax.legend(frameon=False)
    return ax


def check_history(history: Any, metric: str | None) -> None:
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


def read_curves(
    history: History | CrossValidation, metric: str | None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], str | None]:
    """Returns the curves by set, the widths of their bands, and the set of the best.

    Histories have no bands. Bands of folds are one standard error wide on both sides.
    """
    if isinstance(history, CrossValidation):
        return _read_folds(history, metric)
    return _read_history(history, metric)


def _read_history(history, metric):
    sets = history.validation_loss
    if sets is not None and not isinstance(sets, dict):
        sets = {UNNAMED: sets}
    if metric is None:
        lines = {"train": history.train_loss, **(sets or {})}
    else:
        lines = {name: values[metric] for name, values in history.metrics.items()}
    return lines, {}, None if sets is None else next(iter(sets))


def _read_folds(result, metric):
    """Returns the means over the folds, their standard errors, and the marked set."""
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
    return lines, widths, UNNAMED


def loss(
    loss: Callable[..., Any] | Adaptive,
    target: Any,
    scores: Shaped[ArrayLike, " P"] | None = None,
    *,
    num_scores: int = 1,
    k: int = 0,
    curvature: Curvature | Sequence[Curvature] = "auto",
    axes: "Sequence[Axes] | np.ndarray | None" = None,
) -> np.ndarray:
    """Draws a loss as a function of its score: value, gradient, Hessian and curvature.

    The third panel shows the second derivative, and the positive curvature that
    training uses in its place; they are equal for a quadratic loss. A dotted line marks
    the minimizer of the loss for this target, if there is one. Training derives the
    smoothing scale of the curvature from the data; :func:`jboost.inspect_loss` returns
    the scale that is used here.

    Args:
      loss, target, num_scores, k: arguments of :func:`jboost.inspect_loss`.
      scores: the scores to evaluate, ascending; None uses the minimizer (or 0) plus or
        minus 4 max(1, |minimizer|).
      curvature: one policy, or several to compare; see :func:`jboost.fit`.
      axes: three axes to draw on; None creates a new figure.

    Returns:
      Three axes: loss, gradient, curvature.

    Raises:
      TypeError, ValueError: as for :func:`jboost.inspect_loss`.

    Example:
      >>> import jboost as jb
      >>> from jboost import plotting
      >>> axes = plotting.loss(jb.losses.absolute_error, 0.0)
      >>> [ax.get_title() for ax in axes]
      ['loss', 'gradient', 'curvature']
    """
    if isinstance(curvature, str) or callable(curvature):
        policies: tuple[Any, ...] = (curvature,)
    else:
        policies = tuple(curvature)
    if not policies:
        raise ValueError(
            f"curvature must be at least one policy, got {show(curvature)}"
        )
    reports = {
        policy: inspect_loss(
            loss, target, num_scores=num_scores, k=k, scores=scores, reach=_REACH,
            curvature=policy,
        )
        for policy in policies
    }  # fmt: skip
    report = reports[policies[0]]
    panels = open_panels(axes, 3, (10, 3.2))
    own = colors(2 + len(policies))
    at = report.scores
    for ax, name, values in (
        (panels[0], "loss", report.value),
        (panels[1], "gradient", report.gradient),
    ):
        ax.plot(at, _finite(values), color=own[0], linewidth=2)
        ax.set_title(name)
    panels[1].axhline(0, color=ink(panels[1]), linewidth=0.8, alpha=0.5)
    _draw_curvature(panels[2], reports, own)
    for ax in panels:
        tidy(ax)
        ax.set_xlabel("score" if num_scores == 1 else f"score {k}")
        if at[0] <= report.minimizer <= at[-1]:
            ax.axvline(report.minimizer, color=ink(ax), linewidth=0.8, linestyle=":")
    return panels


def _finite(values):
    """Replaces infinities by NaN, which matplotlib draws as gaps."""
    return np.where(np.isfinite(values), values, np.nan)


def _label(policy):
    """Returns a policy in quotation marks, or the name of a function."""
    if isinstance(policy, str):
        return f'"{policy}"'
    return getattr(policy, "__name__", "function")


def _draw_curvature(ax, reports, own):
    """Draws the Hessian, and the curvature of each policy."""
    report = next(iter(reports.values()))
    lines = {"Hessian": _finite(report.hessian)}
    lines |= {_label(policy): _finite(r.curvature) for policy, r in reports.items()}
    for number, (name, values) in enumerate(lines.items()):
        style, width = ("--", 1.6) if number == 0 else ("-", 2)
        # The first policy has the same color as loss and gradient.
        color = own[{0: 1, 1: 0}.get(number, number)]
        ax.plot(
            report.scores, values, style, color=color, linewidth=width, label=name,
            zorder=3 if number == 0 else 2,
        )  # fmt: skip
    ax.set_title("curvature")
    _limit(ax, report.scores, list(lines.values()))
    ax.legend(frameon=False)


def _limit(ax, scores, lines):
    """Sets y-limits that include 0 and exclude poles.

    A pole would otherwise compress the rest of the curves into a flat line.
    """
    # Scores may be spaced unevenly: resample, so that quantiles refer to the x-axis.
    even = np.linspace(scores[0], scores[-1], 401)
    values = np.concatenate([np.interp(even, scores, line) for line in lines])
    values = values[np.isfinite(values)]
    if not values.size:
        return
    top, usual = values.max(), np.quantile(values, 0.96)
    if top > _STEEP * usual > 0:
        top = _STEEP * usual
    low = min(0.0, values.min())
    margin = 0.05 * (top - low) or 0.05
    ax.set_ylim(low - margin, top + margin)


def tuning(
    tuned: Tuned, *, axes: "Sequence[Axes] | np.ndarray | None" = None
) -> np.ndarray:
    """Draws the settings that were tried, and how much each name matters.

    The left panel shows the criterion of each setting, the first one on the left, and
    the best one so far; the members of the model are filled. The worst quarter of the
    settings may be beyond its y-axis. The right panel shows ``tuned.importance``.

    Args:
      tuned: the result of :func:`jboost.tune`, without the model.
      axes: two axes to draw on; None creates a new figure.

    Returns:
      Two axes: settings, importance.

    Raises:
      TypeError: ``tuned`` has another type.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import plotting
      >>> x = np.arange(40.0)[:, None]
      >>> few = dict(folds=2, num_rounds=8, max_depth=2)
      >>> _, tuned = jb.tune(x, x[:, 0], trials=3, **few)
      >>> [ax.get_xlabel() for ax in plotting.tuning(tuned)]
      ['setting', 'importance']
    """
    if not isinstance(tuned, Tuned):
        hint = "; unpack the result: model, tuned = jb.tune(...)"
        hint = hint if isinstance(tuned, tuple) else ""
        raise TypeError(f"tuned must be a Tuned, got {type(tuned).__name__}{hint}")
    left, right = panels = open_panels(axes, 2, (10, 3.6))
    color, other = colors(2)
    values, number = tuned.values, np.arange(len(tuned.points))
    best = np.fmin.accumulate if tuned.by.direction == "min" else np.fmax.accumulate
    members = [member.setting for member in tuned.members]
    left.plot(number, values, "o", color=color, markerfacecolor="none", label="tried")
    left.plot(members, values[members], "o", color=color, label="in the model")
    left.step(number, best(values), where="post", color=other, label="best so far")
    ranks = np.sort(tuned.by.rank(values))
    ranks = ranks[np.isfinite(ranks)]
    sign = 1 if tuned.by.direction == "min" else -1
    end = ranks[0] + 1.1 * (ranks[3 * len(ranks) // 4] - ranks[0])
    if end > ranks[0]:
        least = ranks[0] - 0.05 * (end - ranks[0])
        left.set_ylim(*sorted((sign * least, sign * end)))
    left.set_xlabel("setting")
    left.set_ylabel(plain(tuned.by.name))
    left.legend(frameon=False)
    found = sorted(tuned.importance.items(), key=lambda pair: pair[1])
    right.barh([plain(name) for name, _ in found], [each for _, each in found])
    right.set_xlabel("importance")
    tidy(left)
    tidy(right, grid="x")
    return panels
