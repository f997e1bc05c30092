# SPDX-License-Identifier: Apache-2.0
"""Thresholds and categories of rows that are divided among processes.

In: the rows of each process. Out: on every process the thresholds and categories of all
rows, as one process finds them. One column of all rows is in memory at a time.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from jboost.entry.collectives import gather_tables, num_processes, process_number


def gather_weights(
    weight: Float[np.ndarray, " n"] | None,
) -> Float[np.ndarray, " N"] | None:
    """Returns the weights of the rows of all processes."""
    return None if weight is None else gather_tables(weight)


def gather_columns(
    matrix: Float[np.ndarray, "n F"], features: tuple[int, ...]
) -> Float[np.ndarray, "N F"]:
    """Returns some columns of the rows of all processes; the others are missing."""
    if num_processes() == 1:
        return matrix
    kept = gather_tables(np.ascontiguousarray(matrix[:, list(features)]))
    whole = np.full((len(kept), matrix.shape[1]), np.nan, np.float32)
    whole[:, list(features)] = kept
    return whole


def find_thresholds_together(
    find: Callable[..., list[Any]],
    matrix: Float[np.ndarray, "n F"],
    weight: Float[np.ndarray, " n"] | None,
    max_bins: int,
) -> list[Float[np.ndarray, " _"]]:
    """Finds the thresholds of each feature; each process those of its share.

    Args:
      find: :func:`jboost.codes.thresholds.find_dense_thresholds`.
    """
    if num_processes() == 1:
        return find(matrix, weight, max_bins)
    weight, found = gather_weights(weight), {}
    for feature in range(matrix.shape[1]):
        column = gather_tables(np.ascontiguousarray(matrix[:, feature]))
        if feature % num_processes() == process_number():
            (found[feature],) = find(column[:, None], weight, max_bins)
    features = gather_tables(np.array([*found], np.int32))
    sizes = gather_tables(np.array([len(each) for each in found.values()], np.int32))
    none = [np.zeros(0, np.float32)]
    values = gather_tables(np.concatenate([*none, *found.values()]))
    parts = np.split(values, np.cumsum(sizes)[:-1])
    return [part for _, part in sorted(zip(features, parts, strict=True), key=_first)]


def _first(pair):
    return int(pair[0])
