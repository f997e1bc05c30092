# SPDX-License-Identifier: Apache-2.0
"""Rows with their leaves in a given model.

In: a model, and rows as a user passes them. Out: checked targets, weights and offsets
on the device, padded as for training, and the leaf of every row in each tree.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from jboost.model.ensemble import Ensemble, map_rounds
from jboost.model.predicting import leaf_indices
from jboost.numerics.arrays import pad_rows
from jboost.tables.categories import check_values, describe_column, encode
from jboost.tables.domains import check_domain, warn_of_collisions
from jboost.tables.frames import read_frame
from jboost.tables.sparse import is_sparse
from jboost.tables.targets import check_weights
from jboost.training.rows import PaddedRows, put_rows

_MOST_ROUNDS = 16  # the most rounds per computation of leaf indices
_MOST_LEAVES = 2**26  # leaf indices of all rows and rounds at a time


class ModelRows(NamedTuple):
    """Rows on the device, and the table that determines their leaves.

    Attributes:
      x: a matrix with the columns of the model; the table as it was passed if it is
        sparse, or if the model compares columns in float64.
      rows: the rows on the device, without codes.
    """

    x: Any
    rows: PaddedRows


def read_rows(
    model: Ensemble,
    parts: tuple[Any, Any, Any, Any],
    loss: Any,
    padded: bool,
    prefix: str = "",
    *,
    held: bool = False,
) -> ModelRows:
    """Checks rows against the model and the loss, and puts them on the device.

    Args:
      parts: x, y, sample_weight, offset; the last two may be None.
      loss: the loss; the targets must be in its domain.
      padded: whether rows may be padded.
      prefix: the prefix of argument names in errors.
      held: whether the rows are held out, and may have categories that the model lacks.

    Raises:
      TypeError, ValueError: the rows do not suit the model or the loss.
    """
    x, y, weights, offset = parts
    frame = read_frame(
        x, f"{prefix}x", schema=model.schema, sparse=True,
        categorical=model.categories is not None, extend=not held,
    )  # fmt: skip
    matrix, num_scores = frame.matrix, model.num_scores
    if matrix.shape[1] != model.num_features:
        raise ValueError(
            f"{prefix}x must have {model.num_features} columns, as the model was "
            f"trained on, got {matrix.shape[1]}"
        )
    if y is None:
        raise ValueError(f"{prefix}y must be given, got None")
    wide = model.wide_threshold is not None
    if not wide:
        warn_of_collisions(x)
    size = matrix.shape[0]
    if weights is not None:
        weights = check_weights(weights, size, f"{prefix}sample_weight")
    if model.categories is not None and not held:
        _check_known(model, frame, weights)
    rows = put_rows(size, y, weights, offset, num_scores, padded, prefix)
    check_domain(loss, rows.data.targets, rows.data.weights, num_scores, f"{prefix}y")
    return ModelRows(x if wide or is_sparse(x) else matrix, rows)


def _check_known(model, frame, weights):
    """Raises for categories that the model lacks, in rows of positive weight."""
    categories, names = model.categories, model.feature_names
    check_values(frame.matrix, categories.features, "x", names)
    used = slice(None) if weights is None else np.asarray(weights) > 0
    matrix = np.asarray(frame.matrix)[used]
    unseen = np.isnan(encode(categories, matrix)) & ~np.isnan(matrix)
    for feature in categories.features:
        numbers = np.unique(matrix[unseen[:, feature], feature]).astype(int)
        if len(numbers):
            values = frame.categories and frame.categories[feature]
            found = [n if values is None else values[n] for n in numbers[:5].tolist()]
            raise ValueError(
                "x must have the categories of the model in "
                f"{describe_column(feature, names)}, whose splits know no others, got "
                f"{found}; train new rounds with jb.fit(x, y, model=model), or replace "
                "them by missing values, which the model takes them for"
            )


def rounds_at_once(rows: ModelRows) -> int:
    """Returns the number of rounds per computation of leaf indices."""
    return max(1, min(_MOST_ROUNDS, _MOST_LEAVES // max(1, rows.rows.offset.size)))


def find_leaves(
    model: Ensemble, rows: ModelRows
) -> Iterator[Int32[np.ndarray, "R S N"]]:
    """Yields the leaf of each row in each tree, for some rounds at a time.

    Padding has the leaves of row 0.
    """
    total, step = rows.rows.offset.shape[1], rounds_at_once(rows)
    for first in range(0, model.num_rounds, step):
        part = map_rounds(lambda array, f=first: array[f : f + step], model)
        found = np.asarray(leaf_indices(part, rows.x))
        found = found.reshape(rows.rows.size, -1, model.feature.shape[1])
        yield np.ascontiguousarray(pad_rows(found, total).transpose(1, 2, 0))
