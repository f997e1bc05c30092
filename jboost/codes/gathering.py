# SPDX-License-Identifier: Apache-2.0
"""Thresholds and categories from rows that are divided among processes.

In: the rows of this process. Out: what the rows of all processes, in order of rank,
give on one process, bit for bit. One column of all rows is in memory at a time, or all
categorical ones. With one process, nothing is exchanged.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from jboost.codes.thresholds import find_dense_thresholds
from jboost.entry.collectives import (
    gather_numbers,
    gather_tables,
    gather_texts,
    num_processes,
    process_number,
)
from jboost.tables.frames import Frame


def check_columns(num_features: int, names: Any) -> None:
    """Checks that the tables of all processes have the same columns.

    Raises:
      ValueError: on all processes, if they do not.
    """
    if num_processes() == 1:
        return
    found = gather_texts(f"{num_features} columns, names {names and list(names)}")
    if len({*found}) > 1:
        listed = "; ".join(f"process {rank}: {text}" for rank, text in enumerate(found))
        raise ValueError(f"x must have the same columns on every process, got {listed}")


def check_frames(frame: Frame, names: Any) -> None:
    """Checks what :func:`check_columns` does, and the categories.

    Raises:
      ValueError: on all processes, if the tables have other columns, or if a data frame
        has categories, whose codes each process has chosen by itself.
    """
    check_columns(frame.matrix.shape[1], names)
    if num_processes() == 1:
        return
    declared = [str(known is not None) for known in frame.categories or ()]
    if any("True" in text for text in gather_texts(" ".join(declared))):
        raise ValueError(
            "x must hold categories as integers where rows are divided among "
            "processes, got a data frame with categorical columns"
        )


def gather_columns(
    matrix: Float[np.ndarray, "n F"],
    features: tuple[int, ...],
    weight: Float[np.ndarray, " n"] | None,
) -> tuple[Float[np.ndarray, "N G"], Float[np.ndarray, " N"] | None]:
    """Returns these columns of all rows, and the weights."""
    columns = gather_tables(np.ascontiguousarray(matrix[:, list(features)]))
    return columns, None if weight is None else gather_tables(weight)


def find_thresholds(
    matrix: Float[np.ndarray, "n F"],
    weight: Float[np.ndarray, " n"] | None,
    max_bins: int,
) -> list[Float[np.ndarray, " _"]]:
    """Finds the thresholds of each feature, without the final +inf.

    Each process cuts its share of the features.
    """
    if num_processes() == 1:
        return find_dense_thresholds(matrix, weight, max_bins)
    weight = None if weight is None else gather_tables(weight)
    own = []
    for feature in range(matrix.shape[1]):
        column = gather_tables(np.ascontiguousarray(matrix[:, feature]))
        if feature % num_processes() == process_number():
            own += find_dense_thresholds(column[:, None], weight, max_bins)
    return join_shares(own)


def join_shares(own: list[Float[np.ndarray, " _"]]) -> list[Float[np.ndarray, " _"]]:
    """Returns the thresholds of every feature.

    Args:
      own: those of the features number r, r + P, r + 2 P, ..., where r is the number of
        this process and P that of processes.
    """
    if num_processes() == 1:
        return own
    sizes = np.array([len(row) for row in own], np.int32)
    numbers = process_number() + num_processes() * np.arange(len(own), dtype=np.int32)
    flat = np.concatenate([*own, np.zeros(0, np.float32)]).astype(np.float32)
    sizes, numbers = gather_tables((sizes, numbers))
    rows = np.split(gather_tables(flat), np.cumsum(sizes)[:-1])
    return [rows[place] for place in np.argsort(numbers)]


def is_missing_anywhere(
    matrix: Float[np.ndarray, "n F"], weight: Float[np.ndarray, " n"] | None
) -> bool:
    """Returns whether a row of positive weight of some process has a missing value."""
    return any(gather_numbers(int(has_missing(matrix, weight))))


def has_missing(
    matrix: Float[np.ndarray, "N F"], weight: Shaped[np.ndarray, " N"] | None
) -> bool:
    """Returns whether a row of positive weight has a missing value."""
    # The minimum needs no other memory.
    if not np.isnan(np.min(matrix, initial=np.inf)):
        return False
    return weight is None or bool(np.isnan(matrix[weight > 0]).any())
