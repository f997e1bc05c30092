# SPDX-License-Identifier: Apache-2.0
"""All nodes of a model as a data frame, a row each.

In: a trained model. Out: a frame with the columns of XGBoost's ``trees_to_dataframe``.
"""

from typing import Any

import numpy as np

from jboost.entry.decorators import on_host
from jboost.entry.representation import import_pandas
from jboost.explanation.importance import measure_nodes
from jboost.model.ensemble import Ensemble, check_model

_COLUMNS = (
    "Tree", "Node", "ID", "Feature", "Split", "Yes", "No", "Missing", "Gain", "Cover",
    "Category",
)  # fmt: skip


@on_host("call it on concrete arrays")
def trees_to_dataframe(model: Ensemble) -> Any:
    """All nodes of all trees, with the columns that XGBoost gives them.

    ``Tree`` is round * K + score, ``Node`` counts from the root level by level, and
    ``ID`` is both. Rows for which ``Feature <= Split`` holds go to the node ``Yes``
    (XGBoost: ``<``), of a categorical feature those whose value is in ``Category``;
    ``Missing`` is where missing values go. A leaf has the feature "Leaf" and its value
    as ``Gain``.

    ``Gain`` and ``Cover`` are what :func:`jboost.feature_importance` sums: a gain is
    half of XGBoost's, ``Cover`` the sum of the curvature. NaN where the model does not
    know them.

    Args:
      model: from :func:`jboost.fit` or a reader.

    Returns:
      A ``pandas.DataFrame``.

    Raises:
      ImportError: pandas is not installed.
      TypeError: ``model`` is not an Ensemble.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(8.0)[:, None]
      >>> model, _ = jb.fit(x, x[:, 0] > 3, num_rounds=1, max_depth=1)
      >>> frame = jb.explanation.trees_to_dataframe(model)  # doctest: +SKIP
      >>> list(frame["Feature"])  # doctest: +SKIP
      ['f0', 'Leaf', 'Leaf']
    """
    check_model(model)
    pandas = import_pandas("trees_to_dataframe")
    nodes = _Nodes(model)
    rows = [
        row
        for place in np.ndindex(*model.leaf_value.shape[:2])
        for row in nodes.rows_of(place, int(place[0] * model.num_scores + place[1]))
    ]
    return pandas.DataFrame(rows, columns=list(_COLUMNS))


class _Nodes:
    """The nodes of all trees, as NumPy arrays [R, K, nodes]."""

    def __init__(self, model: Ensemble):
        self.model = model
        names = (f"f{place}" for place in range(model.num_features))
        self.names = model.feature_names or tuple(names)
        arrays = (model.is_split, model.feature, model.threshold, model.missing_left)
        self.split, self.feature, self.threshold, self.missing_left = (
            np.asarray(array) for array in arrays
        )
        inner = self.split.shape[2]
        self.left = np.broadcast_to(2 * np.arange(inner) + 1, self.split.shape)
        self.value = _of_leftmost_leaf(np.asarray(model.leaf_value))
        if model.links is not None:
            self.left = np.asarray(model.links.left_child)
            self.value = np.asarray(model.leaf_value)
        self.gain = _known(model, "gain", self.value.shape)
        self.cover = _known(model, "cover", self.value.shape)

    def rows_of(self, place: tuple[int, ...], tree: int) -> list[tuple[Any, ...]]:
        """The rows of one tree, level by level."""
        found, pending = [], [0]
        for number, node in enumerate(pending):  # which grows meanwhile
            cover = float(self.cover[(*place, node)])
            if node >= self.split.shape[2] or not self.split[(*place, node)]:
                value = float(self.value[(*place, node)])
                found.append(
                    (tree, number, f"{tree}-{number}", "Leaf", np.nan, None, None,
                     None, value, cover, None)
                )  # fmt: skip
                continue
            left = int(self.left[(*place, node)])
            children = [f"{tree}-{len(pending)}", f"{tree}-{len(pending) + 1}"]
            pending += [left, left + 1]
            here = (*place, node)
            threshold, feature = float(self.threshold[here]), int(self.feature[here])
            missing = children[0 if self.missing_left[here] else 1]
            sent = self._categories(here, feature) if np.isnan(threshold) else None
            found.append(
                (tree, number, f"{tree}-{number}", self.names[feature], threshold,
                 *children, missing, float(self.gain[here]), cover, sent)
            )  # fmt: skip
        return found

    def _categories(self, here, feature) -> list[Any]:
        """The categories that go left."""
        categories: Any = self.model.categories
        group = categories.features.index(feature)
        codes = np.asarray(categories.codes)[group]
        known = np.flatnonzero(codes > 0)
        words = np.asarray(self.model.left_codes)[here]
        bits = words[codes[known] // 32] >> (codes[known] % 32).astype(np.uint32)
        places = known[bits & 1 == 1].tolist()
        values = None if categories.values is None else categories.values[group]
        return places if values is None else [values[place] for place in places]


def _of_leftmost_leaf(leaves):
    """Of every node of heaps what rows that only go left end in."""
    levels = [leaves]
    while levels[0].shape[-1] > 1:
        levels.insert(0, levels[0][..., ::2])
    return np.concatenate(levels, axis=-1)


def _known(model, kind, shape):
    """Gain or cover of every node; NaN where training sums are not known."""
    found = np.full(shape, np.nan)
    try:
        values = measure_nodes(model, kind, leaves=True)
    except ValueError:
        return found
    found[..., : values.shape[-1]] = values
    return found
