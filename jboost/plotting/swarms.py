# SPDX-License-Identifier: Apache-2.0
"""Draws a summary of the SHAP values of many rows.

In: ShapValues, or a model and rows. Out: axes with a swarm of points or a bar per
feature, the most important on top.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from jboost.entry.checks import check_integer, check_word
from jboost.entry.messages import show
from jboost.explanation.shap import ShapValues, shap_values
from jboost.model.ensemble import Model, describe_model, read_model
from jboost.plotting.canvas import colors, ink, label_features, open_axes, plain, tidy
from jboost.tables.frames import Frame, read_frame
from jboost.tables.groups import list_orders

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LOW, _MIDDLE, _HIGH = "#0072B2", "#A65FA8", "#D55E00"  # legible on light and dark
_EDGES = (0.05, 0.95)  # quantiles of a feature at the ends of the color scale
_WIDTH = 0.38  # half the width of a swarm; features are 1 apart
_BINS = 80  # along the x-axis; points of a bin are spread vertically
_FULL = 12  # least number of points in the fullest bin of a swarm of full width


class _Table(NamedTuple):
    """Holds the data of a plot, in the order of the features."""

    values: np.ndarray  # [N, F, K]
    matrix: np.ndarray | None  # [N, F], values of the features, NaN if unordered
    labels: list[str]


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
    values, matrix, labels = _read(shap, x, feature_names)
    values = _choose_score(values, score, kind)
    size = np.abs(values).mean(axis=0)  # [F, K]
    top = np.argsort(-size.sum(axis=1), kind="stable")[:max_features]
    ax = open_axes(ax, (6.8, 1.2 + 0.32 * max(3, len(top))))
    if kind == "bars":
        _draw_bars(ax, size[top])
    else:
        _draw_swarms(ax, values[..., 0], matrix, top, max_rows)
    ax.set_yticks(np.arange(len(top)), [plain(labels[feature]) for feature in top])
    ax.set_ylim(len(top) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    name = "mean |SHAP value|" if kind == "bars" else "SHAP value"
    more = f", {len(top)} of {len(labels)} features" if len(top) < len(labels) else ""
    ax.set_xlabel(name + more)
    tidy(ax, "x")
    return ax


def _read(shap, x, feature_names) -> _Table:
    """Checks the arguments and returns the data to draw."""
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
    return _Table(values, matrix, labels)


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


def _choose_score(values, score, kind):
    """Returns SHAP values [N, F, K] of the scores to draw."""
    num_scores = values.shape[2]
    if score is None and kind == "points" and num_scores > 1:
        raise ValueError(
            f"score must be an integer from 0 to {num_scores - 1} to draw points of "
            f"one of {num_scores} scores, got None"
        )
    if score is None:
        return values
    check_integer("score", score, least=0, most=num_scores - 1)
    return values[..., score : score + 1]


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
