# SPDX-License-Identifier: Apache-2.0
"""Draws partial dependence plots for one or two features.

In: a PartialDependence, or a model, rows and features. Out: for one feature, axes with
the average and the curves of individual rows (points if the feature is categorical);
for two features, a contour plot, lines or a heat map.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jboost.entry.checks import check_integer
from jboost.entry.feature_checks import check_feature, list_features
from jboost.explanation.dependence import Feature, PartialDependence
from jboost.explanation.dependence import partial_dependence as find_dependence
from jboost.model.ensemble import Model, describe_model, read_model
from jboost.plotting.canvas import (
    colors,
    ink,
    open_axes,
    plain,
    shorten,
    tidy,
    write_number,
)
from jboost.tables.columns import is_gap
from jboost.tables.frames import read_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DECILES = np.arange(0.1, 0.95, 0.1)
_LEVELS = 12  # levels of a contour plot
_CROWDED = 46  # characters of tick labels that fit along the x-axis unrotated
_DASHES = dict(linestyle="", marker="_", markersize=10)
_POINTS = dict(linestyle="", marker="o", markersize=7)
_MOST_LINES = 10  # one per category; more categories become a heat map
_MOST_TICKS = 25  # on a numeric axis; every category has a tick


def partial_dependence(
    dependence: PartialDependence | Model,
    x: Any = None,
    features: Feature | Sequence[Feature] | None = None,
    *,
    grid: int | Sequence[Any] = 50,
    score: int | None = None,
    centred: bool = False,
    max_rows: int = 50,
    max_categories: int = 20,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the partial dependence of scores on one or two features.

    For one numeric feature, the average is a thick line, the curves of individual rows
    are thin lines, and marks on the x-axis show the deciles of the feature. For a
    categorical feature, points replace lines, because categories have no order.

    Two numeric features give a contour plot of the average. If one of the two is
    categorical, each category is a line, or the plot is a heat map if there are many.
    Two categorical features give a heat map.

    Args:
      dependence: the result of :func:`jboost.partial_dependence`, or a model to compute
        it from. Individual curves are drawn if the result has them.
      x, features, grid: arguments of :func:`jboost.partial_dependence`; only if
        ``dependence`` is a model.
      score: index of the score to draw if there are K > 1 scores. None draws the
        averages of all scores, which is possible only for one feature.
      centred: draws the change from the first point of the grid, for individual curves
        and their average.
      max_rows: the maximum number of individual curves, a random sample of the rows.
      max_categories: the maximum number of categories per feature. If there are more,
        the most frequent are kept and the other n become "others (n)", their mean
        weighted by frequency.
      ax: the axes to draw on; None creates a new figure.

    Returns:
      The axes.

    Raises:
      TypeError, ValueError: an argument is invalid; the message names it.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import plotting
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> model, _ = jb.fit(x, np.abs(x[:, 1]), num_rounds=20)
      >>> plotting.partial_dependence(model, x, 1).get_xlabel()
      'x1'
    """
    check_integer("max_rows", max_rows, least=0)
    check_integer("max_categories", max_categories, least=2)
    found, columns = _find(dependence, x, features, grid)
    found = _choose_score(found, score, centred)
    for index in range(len(found.grid)):
        found = _gather_categories(found, index, max_categories)
    if len(found.grid) == 1:
        ax = open_axes(ax, (6.0, 4.0))
        _draw_one(ax, found, max_rows)
    else:
        ax = open_axes(ax, (6.4, 4.6))
        _draw_two(ax, found)
    for axis, column in zip("xy", [] if _has_cells(found) else columns, strict=False):
        _mark_deciles(ax, axis, column)
    return ax


def _find(dependence, x, features, grid):
    """Returns the dependence, and the columns of its numeric features."""
    if isinstance(dependence, PartialDependence):
        if x is not None or features is not None:
            raise ValueError(
                "x and features must be None if dependence is a PartialDependence"
            )
        return dependence, []
    model = dependence
    if not isinstance(model, Model):
        raise TypeError(
            "dependence must be a PartialDependence, an Ensemble or a RegressionTree, "
            f"got {describe_model(model)}"
        )
    if x is None or features is None:
        raise ValueError("x and features must be given if dependence is a model")
    ensemble = read_model(model)
    asked: Any = list_features(features, ensemble.feature_names)
    kind = "both" if len(asked) == 1 else "average"
    found = find_dependence(model, x, asked, grid=grid, kind=kind)
    matrix = read_frame(x, "x", schema=ensemble.schema, categorical=True).matrix
    indices = [
        check_feature("features", f, ensemble.num_features, ensemble.feature_names)
        for f in asked
    ]
    numbers = [
        np.asarray(matrix)[:, index] if _is_number(values) else None
        for index, values in zip(indices, found.grid, strict=True)
    ]
    # If one of two features is categorical, the numeric one is on the x-axis: return
    # its column only.
    both = all(column is not None for column in numbers)
    return found, numbers if both else [c for c in numbers if c is not None]


def _is_number(values):
    return values.dtype.kind == "f"


def _choose_score(found, score, centred):
    """Returns the dependence with a last axis for the scores to draw."""
    average, individual = found.average, found.individual
    if centred:
        individual = found.centred
        average = individual.mean(axis=0)
    elif average is None:
        average = individual.mean(axis=0)
    if average.ndim == len(found.grid):
        average = average[..., None]
        individual = None if individual is None else individual[..., None]
    num_scores = average.shape[-1]
    if score is not None:
        check_integer("score", score, least=0, most=num_scores - 1)
        average = average[..., score : score + 1]
        individual = None if individual is None else individual[..., [score]]
    elif num_scores > 1 and len(found.grid) == 2:
        raise ValueError(
            f"score must be an integer from 0 to {num_scores - 1} to draw the "
            f"dependence of one of {num_scores} scores on two features, got None"
        )
    return found._replace(average=average, individual=individual)


def _gather_categories(found, index, most):
    """Merges all but the most frequent categories of a feature into their mean."""
    labels = found.grid[index]
    if _is_number(labels) or len(labels) <= most:
        return found
    weights = [None] * len(found.grid) if found.counts is None else [*found.counts]
    counts = np.ones(len(labels)) if weights[index] is None else weights[index]
    order = np.argsort(-counts, kind="stable")
    kept, rest = np.sort(order[: most - 1]), order[most - 1 :]
    share = counts[rest] if counts[rest].any() else None

    def gather(scores, axis):
        others = np.average(scores.take(rest, axis), axis, share, keepdims=True)
        return np.concatenate([scores.take(kept, axis), others], axis)

    grid = [*found.grid]
    grid[index] = np.append(labels[kept].astype(object), f"others ({len(rest)})")
    weights[index] = np.append(counts[kept], counts[rest].sum())
    individual = found.individual
    return found._replace(
        grid=tuple(grid),
        average=gather(found.average, index),
        individual=None if individual is None else gather(individual, 1 + index),
        counts=tuple(weights),
    )


def _draw_one(ax, found, max_rows):
    """Draws a thick line per score, and thin lines for rows if there is one score.

    Categories have no order, so points and dashes replace the lines.
    """
    values = found.grid[0]
    number = _is_number(values)
    at = values if number else np.arange(len(values))
    own = colors(found.average.shape[-1])
    if found.individual is not None and len(own) == 1:
        # A fixed seed gives the same plot on every call.
        rows = np.random.default_rng(0).permutation(len(found.individual))[:max_rows]
        lines = found.individual[np.sort(rows), :, 0].T
        thin = dict(linewidth=0.7) if number else _DASHES
        ax.plot(at, lines, color=ink(ax), alpha=0.15, zorder=1, **thin)
    heavy = dict(linewidth=2.4, marker="" if len(at) > 1 else "o")
    heavy = heavy if number else _POINTS
    for score, color in enumerate(own):
        own_style = dict(color=color, label=f"score {score}", zorder=3)
        ax.plot(at, found.average[:, score], **own_style, **heavy)
    if len(own) > 1:
        ax.legend(frameon=False)
    _name_axis(ax.xaxis, found.names[0], None if number else values)
    ax.set_ylabel("score")
    tidy(ax)


def _draw_two(ax, found):
    """Draws a contour plot, a line per category, or a heat map."""
    average = found.average[..., 0]
    numbers = [_is_number(values) for values in found.grid]
    if all(numbers):
        _draw_map(ax, found, average)
    elif _has_cells(found):
        _draw_cells(ax, found, average)
    else:
        along = numbers.index(True)
        lines = average if along == 0 else average.T
        categories = found.grid[1 - along]
        for color, line, category in zip(
            colors(len(categories)), lines.T, categories, strict=True
        ):
            label = _write_category(category, 20)
            ax.plot(found.grid[along], line, color=color, linewidth=1.8, label=label)
        title = plain(_label(found.names[1 - along]))
        beside = dict(loc="center left", bbox_to_anchor=(1, 0.5))
        ax.legend(frameon=False, title=title, **beside)
        _name_axis(ax.xaxis, found.names[along], None)
        ax.set_ylabel("score")
        tidy(ax)


def _has_cells(found):
    """Returns whether two features are drawn as a heat map."""
    categories = [values for values in found.grid if not _is_number(values)]
    some = len(found.grid) == 2 and len(categories) > 0
    return some and (len(categories) == 2 or len(categories[0]) > _MOST_LINES)


def _draw_map(ax, found, average):
    across, up = found.grid
    if min(average.shape) < 2:
        raise ValueError(
            f"grid must have at least two values of each feature, got {average.shape}"
        )
    surface = ax.contourf(across, up, average.T, _LEVELS)
    lines = ax.contour(across, up, average.T, _LEVELS, colors="white", linewidths=0.4)
    lines.set_alpha(0.6)
    _add_bar(ax, surface)
    _name_axis(ax.xaxis, found.names[0], None)
    _name_axis(ax.yaxis, found.names[1], None)


def _draw_cells(ax, found, average):
    """Draws a heat map; at least one feature is categorical."""
    cells = ax.imshow(average.T, origin="lower", aspect="auto")
    _add_bar(ax, cells)
    _name_axis(ax.xaxis, found.names[0], found.grid[0])
    _name_axis(ax.yaxis, found.names[1], found.grid[1])


def _add_bar(ax, drawn):
    bar = ax.figure.colorbar(drawn, ax=ax, pad=0.02)
    bar.set_label("score")
    bar.outline.set_visible(False)


def _name_axis(axis, name, categories):
    """Labels an axis with the feature's name, and its ticks with categories."""
    axis.set_label_text(plain(_label(name)))
    if categories is not None:
        numbers = _is_number(categories)
        step = -(-len(categories) // _MOST_TICKS) if numbers else 1
        labels = [
            write_number(value, 3) if numbers else _write_category(value, 16)
            for value in categories[::step]
        ]
        longest = max(map(len, labels))
        crowded = axis.axis_name == "x" and longest * len(labels) > _CROWDED
        indices = np.arange(0, len(categories), step)
        axis.set_ticks(indices, labels, rotation=40 if crowded else 0)
        if crowded:
            # The end of a rotated label stands below its tick.
            for label in axis.get_ticklabels():
                label.set(ha="right", rotation_mode="anchor")


def _write_category(value, longest):
    """Formats a category; None and NaN are missing values."""
    return "missing" if is_gap(value) else plain(shorten(str(value), longest))


def _label(name):
    """Formats a feature's name; a feature without one is named after its index."""
    return f"x{name}" if name.isdecimal() else shorten(name)


def _mark_deciles(ax, axis, column):
    """Draws short marks at the deciles of a feature.

    They show where few rows support the curve.
    """
    known = column[np.isfinite(column)]
    if not known.size:
        return
    marks, color = np.quantile(known, _DECILES), ink(ax)
    if axis == "x":
        transform = ax.get_xaxis_transform()
        ax.vlines(marks, 0, 0.03, transform=transform, color=color, linewidth=1)
    else:
        transform = ax.get_yaxis_transform()
        ax.hlines(marks, 0, 0.02, transform=transform, color=color, linewidth=1)
