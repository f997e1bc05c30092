# SPDX-License-Identifier: Apache-2.0
"""Draws the importance of features as a bar chart.

In: an Importance, or a model. Out: axes with a bar per feature, the longest on top.
"""

from typing import TYPE_CHECKING

import numpy as np

from jboost.entry.checks import check_integer
from jboost.explanation.importance import Importance, ImportanceKind, feature_importance
from jboost.model.ensemble import Model
from jboost.plotting.canvas import (
    colors,
    ink,
    label_features,
    open_axes,
    plain,
    tidy,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    size = len(model.values)
    labels = label_features(model.names, size)
    # A stable sort keeps features of equal importance in their original order.
    top = np.argsort(-model.values, kind="stable")[:max_features]
    errors = None if model.deviations is None else model.deviations[top]
    ax = open_axes(ax, (6.4, 1.1 + 0.26 * max(3, len(top))))
    places = np.arange(len(top))
    ax.barh(
        places, model.values[top], 0.72, color=colors(1)[0], xerr=errors,
        error_kw=dict(ecolor=ink(ax), elinewidth=1, capsize=2),
    )  # fmt: skip
    ax.set_yticks(places, [plain(labels[feature]) for feature in top])
    ax.set_ylim(len(top) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    if (model.values[top] < 0).any():
        ax.axvline(0, color=ink(ax), linewidth=0.8)
    more = f", {len(top)} of {size} features" if len(top) < size else ""
    ax.set_xlabel(name + more)
    tidy(ax, "x")
    return ax
