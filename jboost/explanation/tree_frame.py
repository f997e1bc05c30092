# SPDX-License-Identifier: Apache-2.0
"""All nodes of a model, with the columns of XGBoost's ``trees_to_dataframe``."""

from typing import Any

import numpy as np

from jboost.entry.decorators import on_host
from jboost.entry.messages import import_pandas
from jboost.explanation.importance import measure_nodes
from jboost.model.ensemble import Model, read_model
from jboost.model.nodes import LEAF
from jboost.model.sorting import list_terms, name_values, split_values, take_tree

_COLUMNS = (
    "Tree", "Node", "ID", "Feature", "Split", "Yes", "No", "Missing", "Gain", "Cover",
    "Category",
)  # fmt: skip


@on_host("call it on concrete arrays")
def trees_to_dataframe(model: Model) -> Any:
    """Returns all nodes of all trees, with the columns of XGBoost's data frames.

    ``Tree`` is round * K + score, also where the K scores share a tree, which is then
    listed for each of them; ``Node`` counts from the root level by level, and
    ``ID`` combines both. Rows with ``Feature <= Split`` go to the node ``Yes``
    (XGBoost: ``<``); for a categorical feature, rows with a value in ``Category``.
    Missing values go to ``Missing``. A leaf has the feature "Leaf" and its value as
    ``Gain``.

    ``Gain`` and ``Cover`` are the terms that :func:`jboost.feature_importance` sums: a
    gain is half of XGBoost's, ``Cover`` is the sum of the curvature. Both are NaN if
    the model does not hold the training sums.

    If the model has linear leaves, a column ``Slopes`` lists the terms of each leaf as
    (feature, slope, center). The leaf adds ``slope * (x - center)`` for each of them to
    its value, where x is clipped to the row of ``model.ranges`` of the feature; if one
    of these x is missing, the value alone counts.

    Args:
      model: a model from :func:`jboost.fit`, :func:`jboost.cart.fit_tree` or a reader.

    Returns:
      A ``pandas.DataFrame``.

    Raises:
      ImportError: pandas is not installed.
      TypeError: ``model`` is not a model.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(8.0)[:, None]
      >>> model, _ = jb.fit(x, x[:, 0] > 3, num_rounds=1, max_depth=1)
      >>> frame = jb.explanation.trees_to_dataframe(model)  # doctest: +SKIP
      >>> list(frame["Feature"])  # doctest: +SKIP
      ['f0', 'Leaf', 'Leaf']
    """
    ensemble = read_model(model)
    pandas = import_pandas("trees_to_dataframe")
    nodes = model.nodes()
    nodes = nodes._replace(
        gain=_measure(nodes, "gain"), curvature=_measure(nodes, "cover")
    )
    names = ensemble.feature_names
    names = names or tuple(f"f{index}" for index in range(ensemble.num_features))
    rows = []
    for number in range(len(nodes.left)):
        tree = take_tree(nodes, number)
        found = _list_rows(tree, number, names, ensemble)
        if tree.slopes is not None:
            terms = (list_terms(tree, node) for node in range(len(found)))
            named = ([(names[f], *line) for f, *line in each] for each in terms)
            found = [(*row, t or None) for row, t in zip(found, named, strict=True)]
        rows += found
    columns = _COLUMNS if nodes.slopes is None else (*_COLUMNS, "Slopes")
    return pandas.DataFrame(rows, columns=list(columns))


def _measure(nodes, kind):
    """Returns the gain or cover of every node; NaN if training sums are missing."""
    try:
        return measure_nodes(nodes, kind)
    except ValueError:
        return np.full(nodes.left.shape, np.nan)


def _list_rows(tree, number, names, model):
    rows = []
    for node, left in enumerate(tree.left.tolist()):
        label, cover = f"{number}-{node}", float(tree.curvature[node])
        if left == LEAF:
            value = float(tree.value[node])
            rows.append(
                (number, node, label, "Leaf", np.nan, None, None, None, value, cover,
                 None)
            )  # fmt: skip
            continue
        children = [f"{number}-{left}", f"{number}-{left + 1}"]
        threshold, feature = float(tree.threshold[node]), int(tree.feature[node])
        missing = children[0 if tree.missing_left[node] else 1]
        sent = None
        if np.isnan(threshold):  # marks a split by a set of categories
            sets = model.categories, feature
            sent = name_values(*sets, split_values(*sets, tree.left_codes[node])[0])
        gain = float(tree.gain[node])
        rows.append(
            (number, node, label, names[feature], threshold, *children, missing, gain,
             cover, sent)
        )  # fmt: skip
    return rows
