# SPDX-License-Identifier: Apache-2.0
"""Draws explanations: importance, SHAP values and partial dependence.

Features have a bar or a swarm of points each, the most important on top; dependence is
drawn as curves, points, contours or a heat map of one or two features.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jboost.entry.checks import check_integer, check_word
from jboost.entry.messages import show
from jboost.explanation.dependence import Feature, PartialDependence, find_features
from jboost.explanation.dependence import partial_dependence as find_dependence
from jboost.explanation.importance import Importance, ImportanceKind, feature_importance
from jboost.explanation.shap import ShapValues, shap_values
from jboost.model.ensemble import Model, describe_model, read_model
from jboost.plotting.canvas import (
    colors,
    ink,
    label_features,
    open_axes,
    plain,
    shorten,
    tidy,
    write_number,
)
from jboost.tables.columns import is_gap
from jboost.tables.frames import Frame, read_frame
from jboost.tables.groups import list_orders

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOW, _MIDDLE, _HIGH = "#0072B2", "#A65FA8", "#D55E00"  # legible on light and dark
_EDGES = (0.05, 0.95)  # quantiles of a feature at the ends of the color scale
_WIDTH = 0.38  # half the width of a swarm; features are 1 apart
_BINS = 80  # bins along the x-axis; points of a bin are spread vertically
_FULL = 12  # least number of points in the fullest bin of a swarm of full width
_DECILES = np.arange(0.1, 0.95, 0.1)
_LEVELS = 12  # levels of a contour plot
_CROWDED = 46  # characters of tick labels that fit along the x-axis unrotated
_DASHES = dict(linestyle="", marker="_", markersize=10)
_POINTS = dict(linestyle="", marker="o", markersize=7)
_MOST_LINES = 10  # one per category; more categories become a heat map
_MOST_TICKS = 25  # ticks of a numeric axis; every category has one


def importance(
    model: Model | Importance,
    *,
    kind: ImportanceKind = "improvement",
    max_features: int = 20,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the importance of features as bars, the most important on top.

    Args:
      model: a model, or the result of :func:`jboost.feature_importance` or
        :func:`jboost.explanation.permutation_importance`. Deviations, if there are any,
        are drawn as error bars.
      kind: the kind of importance to compute if ``model`` is a model; see
        :func:`jboost.feature_importance`.
      max_features: the maximum number of bars.
      ax: the axes to draw on; None creates a new figure.

    Returns:
      The axes.

    Raises:
      TypeError, ValueError: an argument is invalid, or the model does not have the data
        for this kind of importance.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import plotting
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> model, _ = jb.fit(x, 3 * x[:, 1] + x[:, 2], num_rounds=20)
      >>> [label.get_text() for label in plotting.importance(model).get_yticklabels()]
      ['x1', 'x2', 'x0']
    """
    check_integer("max_features", max_features, least=1)
    name = "importance"
    if not isinstance(model, Importance):
        model, name = feature_importance(model, kind), f"importance ({kind})"
    labels = label_features(model.names, len(model.values))
    # A stable sort keeps features of equal importance in their original order.
    top = np.argsort(-model.values, kind="stable")[:max_features]
    errors = None if model.deviations is None else model.deviations[top]
    ax = open_axes(ax, (6.4, 1.1 + 0.26 * max(3, len(top))))
    ax.barh(
        np.arange(len(top)), model.values[top], 0.72, color=colors(1)[0], xerr=errors,
        error_kw=dict(ecolor=ink(ax), elinewidth=1, capsize=2),
    )  # fmt: skip
    if (model.values[top] < 0).any():
        ax.axvline(0, color=ink(ax), linewidth=0.8)
    return _name_rows(ax, name, labels, top)


def _name_rows(ax, name, labels, top):
    """Labels a row per feature, the first on top, and the x-axis."""
    ax.set_yticks(np.arange(len(top)), [plain(labels[feature]) for feature in top])
    ax.set_ylim(len(top) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    more = f", {len(top)} of {len(labels)} features" if len(top) < len(labels) else ""
    ax.set_xlabel(name + more)
    tidy(ax, "x")
    return ax


def shap_summary(
    shap: ShapValues | Model,
    x: Any = None,
    *,
    kind: Literal["points", "bars"] = "points",
    score: int | None = None,
    feature_names: Sequence[str] | None = None,
    max_features: int = 20,
    max_rows: int = 2000,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the SHAP values of many rows, largest mean |value| on top.

    ``"points"`` draws a swarm per feature: one point per row at its SHAP value, spread
    vertically where points are dense. The color shows the value of the feature, from
    low (blue) to high (orange). It is gray for missing values and for categorical
    features, unless the dtype in x is an ordered one. ``"bars"`` draws the mean of
    |value|.

    Args:
      shap: the result of :func:`jboost.shap_values`, or a model to compute it from.
      x: the rows. It is optional with ShapValues; points then have one color.
      kind: "points" or "bars".
      score: index of the score to draw if there are K > 1 scores. None stacks the bars
        of all scores, and is not possible for points.
      feature_names: names that replace those of the model or of the columns of x.
      max_features: the maximum number of features.
      max_rows: the maximum number of points per feature, a random sample of the rows.
        The order of the features, and the bars, use all rows.
      ax: the axes to draw on; None creates a new figure.

    Returns:
      The axes.

    Raises:
      TypeError, ValueError: an argument is invalid; the message names it.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import plotting
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> model, _ = jb.fit(x, 3 * x[:, 1] + x[:, 2], num_rounds=20)
      >>> ax = plotting.shap_summary(model, x)
      >>> [label.get_text() for label in ax.get_yticklabels()]
      ['x1', 'x2', 'x0']
    """
    check_word("kind", kind, ("points", "bars"))
    check_integer("max_features", max_features, least=1)
    check_integer("max_rows", max_rows, least=1)
    values, matrix, labels = _read_shap(shap, x, feature_names)
    num_scores = values.shape[2]
    if score is not None:
        check_integer("score", score, least=0, most=num_scores - 1)
        values = values[..., score : score + 1]
    elif kind == "points" and num_scores > 1:
        raise ValueError(
            f"score must be an integer from 0 to {num_scores - 1} to draw points of "
            f"one of {num_scores} scores, got None"
        )
    size = np.abs(values).mean(axis=0)  # [F, K]
    top = np.argsort(-size.sum(axis=1), kind="stable")[:max_features]
    ax = open_axes(ax, (6.8, 1.2 + 0.32 * max(3, len(top))))
    if kind == "bars":
        _draw_bars(ax, size[top])
    else:
        _draw_swarms(ax, values[..., 0], matrix, top, max_rows)
    name = "mean |SHAP value|" if kind == "bars" else "SHAP value"
    return _name_rows(ax, name, labels, top)


def _read_shap(
    shap, x, feature_names
) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """Checks the arguments and returns the data to draw.

    These are SHAP values [N, F, K]; the values of the features [N, F], NaN if they have
    no order; and the labels of the features.
    """
    frame = None if x is None else read_frame(x, "x", categorical=True)
    names = None if frame is None else frame.names
    categorical: tuple[int, ...] = ()
    if isinstance(shap, Model):
        if x is None:
            raise ValueError("x must be given if shap is a model, got None")
        model = read_model(shap)
        names, categories = model.feature_names or names, model.categories
        categorical = () if categories is None else categories.features
        shap = shap_values(shap, x)
    if not isinstance(shap, ShapValues):
        raise TypeError(
            "shap must be ShapValues, an Ensemble or a RegressionTree, got "
            f"{describe_model(shap)}"
        )
    values = np.asarray(shap.values)
    if not values.size:
        raise ValueError(f"shap must hold at least one row, got shape {values.shape}")
    values = values[..., None] if values.ndim == 2 else values
    matrix = None if frame is None else _order(frame, list_orders(x), categorical)
    if matrix is not None and matrix.shape != values.shape[:2]:
        raise ValueError(
            f"x must have the {values.shape[:2]} rows and columns of the SHAP values, "
            f"got {matrix.shape}"
        )
    if feature_names is not None and len(feature_names) != values.shape[1]:
        raise ValueError(
            f"feature_names must be {values.shape[1]} names, got {show(feature_names)}"
        )
    labels = label_features(feature_names or names, values.shape[1])
    return values, matrix, labels


def _order(frame: Frame, orders, categorical):
    """Returns the values that determine colors.

    These are ranks in columns with an ordered dtype, NaN in other categorical columns
    and the matrix itself elsewhere.
    """
    matrix = np.array(frame.matrix)
    for index in categorical:
        matrix[:, index] = np.nan
    for index, known in enumerate(frame.categories or ()):
        if known is not None:
            levels = orders.get(index, [])
            rank = {level: float(number) for number, level in enumerate(levels)}
            # The last entry is for missing cells: their index becomes -1.
            ranks = np.array([*(rank.get(v, np.nan) for v in known), np.nan])
            cells = np.asarray(frame.matrix)[:, index]
            matrix[:, index] = ranks[np.nan_to_num(cells, nan=-1).astype(int)]
    return matrix


def _draw_bars(ax, size):
    """Draws a bar per feature; several scores are stacked."""
    own, left = colors(size.shape[1]), np.zeros(len(size))
    for score, width in enumerate(size.T):
        label = f"score {score}"
        ax.barh(np.arange(len(size)), width, 0.72, left, color=own[score], label=label)
        left = left + width
    if size.shape[1] > 1:
        above = dict(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.3)
        ax.legend(frameon=False, ncols=min(size.shape[1], 5), **above)


def _draw_swarms(ax, values, matrix, top, max_rows):
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    rows = np.arange(len(values))
    if len(rows) > max_rows:  # a fixed seed gives the same plot on every call
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:max_rows])
    low, high = values[rows][:, top].min(), values[rows][:, top].max()
    palette = LinearSegmentedColormap.from_list("", [_LOW, _MIDDLE, _HIGH])
    palette = palette.with_extremes(bad="0.6")
    ax.axvline(0, color=ink(ax), linewidth=0.8, alpha=0.6, zorder=1)
    area = 14.0 if len(rows) <= 500 else 7.0
    for index, feature in enumerate(top):
        across = index + _swarm(values[rows, feature], low, high)
        style: dict[str, Any] = dict(s=area, linewidths=0, rasterized=True, zorder=2)
        if matrix is None:
            ax.scatter(values[rows, feature], across, color=colors(1)[0], **style)
            continue
        shade = _shade(matrix[rows, feature])
        ax.scatter(
            values[rows, feature], across, c=shade, cmap=palette, vmin=0, vmax=1,
            plotnonfinite=True, **style,
        )  # fmt: skip
    if matrix is not None and not np.isnan(matrix[:, top]).all():
        _explain_colors(ax, palette, Normalize(0, 1))


def _swarm(values, low, high):
    """Returns the vertical offset of each point.

    Points are binned by SHAP value. The points of a bin alternate above and below the
    center line, so the width of a swarm shows the density.
    """
    bins = np.round((values - low) / ((high - low) or 1.0) * _BINS).astype(int)
    order = np.argsort(bins, kind="stable")
    starts = np.searchsorted(bins[order], bins[order])
    rank = np.empty(len(values), int)
    rank[order] = np.arange(len(values)) - starts  # within its bin
    # 0, 1, -1, 2, -2, ...
    step = (rank + 1) // 2 * np.where(rank % 2 == 1, 1, -1)
    return _WIDTH * step / max(np.abs(step).max(), _FULL / 2)


def _shade(column):
    """Scales a feature to [0, 1] for its color; NaN if missing.

    The scale ends at quantiles, so that outliers do not determine the colors.
    """
    known = column[np.isfinite(column)]
    if not known.size:
        return np.full(len(column), np.nan)
    low, high = np.quantile(known, _EDGES)
    if low == high:
        low, high = known.min(), known.max()
    if low == high:
        return np.where(np.isfinite(column), 0.5, np.nan)
    column = np.where(np.isinf(column), np.sign(column) * 1e30, column)
    return np.clip((column - low) / (high - low), 0, 1)


def _explain_colors(ax, palette, scale):
    from matplotlib.cm import ScalarMappable

    mappable = ScalarMappable(scale, palette)
    bar = ax.figure.colorbar(mappable, ax=ax, aspect=40, pad=0.02, fraction=0.05)
    bar.set_ticks([0, 1], labels=["low", "high"])
    bar.set_label("value", labelpad=-18)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0)


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
    indices = find_features(ensemble, features)
    kind = "both" if len(indices) == 1 else "average"
    found = find_dependence(model, x, indices, grid=grid, kind=kind)
    frame = read_frame(x, "x", schema=ensemble.schema, categorical=True)
    numbers = [
        np.asarray(frame.matrix)[:, index] if _is_number(values) else None
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
    if all(numbers) or _has_cells(found):
        _draw_map(ax, found, average)
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
    """Draws contours, or a heat map if a feature is categorical."""
    categories = found.grid
    if all(map(_is_number, found.grid)):
        if min(average.shape) < 2:
            raise ValueError(
                "grid must have at least two values of each feature, got "
                f"{average.shape}"
            )
        drawn = ax.contourf(*found.grid, average.T, _LEVELS)
        white = dict(colors="white", linewidths=0.4)
        ax.contour(*found.grid, average.T, _LEVELS, **white).set_alpha(0.6)
        categories = (None, None)
    else:
        drawn = ax.imshow(average.T, origin="lower", aspect="auto")
    bar = ax.figure.colorbar(drawn, ax=ax, pad=0.02)
    bar.set_label("score")
    bar.outline.set_visible(False)
    for axis, *names in zip((ax.xaxis, ax.yaxis), found.names, categories, strict=True):
        _name_axis(axis, *names)


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
    marks, style = np.quantile(known, _DECILES), dict(color=ink(ax), linewidth=1)
    if axis == "x":
        ax.vlines(marks, 0, 0.03, transform=ax.get_xaxis_transform(), **style)
    else:
        ax.hlines(marks, 0, 0.02, transform=ax.get_yaxis_transform(), **style)
