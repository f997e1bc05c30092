# SPDX-License-Identifier: Apache-2.0
"""Thresholds and categories from rows that are divided among processes.

The results have the bits of one process that holds all rows in order of rank. One
column of all rows is in memory at a time, or all categorical ones. With one process,
nothing is exchanged.
"""

import json
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from jboost.codes.thresholds import find_dense_thresholds
from jboost.entry.exchanges import (
    gather_numbers,
    gather_tables,
    gather_texts,
    num_processes,
    process_number,
    send_rows,
)
from jboost.entry.messages import show
from jboost.tables.frames import Frame, Schema


def check_columns(num_features: int, names: Any) -> None:
    """Checks that the tables of all processes have the same columns.

    If they do not, all processes raise.
    """
    if num_processes() == 1:
        return
    found = gather_texts(f"{num_features} columns, names {names and list(names)}")
    if len({*found}) > 1:
        listed = "; ".join(f"process {rank}: {text}" for rank, text in enumerate(found))
        raise ValueError(f"x must have the same columns on every process, got {listed}")


def unite_frames(frame: Frame, names: Any, schema: Schema | None = None) -> Frame:
    """Returns the rows of this process with the categories of all processes.

    The categories are numbered as in one table with all rows: first those that occur,
    sorted, then the other levels that dtypes declare.

    Args:
      frame: the table of this process, with categories numbered for it alone.
      schema: the columns of a model that is trained further, or None. Its categories
        keep their numbers.
    """
    if num_processes() == 1:
        return frame
    features = frame.matrix.shape[1]
    check_columns(features, names)
    if not any(gather_numbers(int(frame.categories is not None))):
        return frame
    matrix, numbered = np.array(frame.matrix), frame.categories or ()
    own = [
        _describe_column(frame._replace(matrix=matrix), feature)
        for feature in range(features)
    ]
    columns = zip(*map(json.loads, gather_texts(json.dumps(own))), strict=True)
    labels = names or range(features)
    before = (schema and schema.categories) or (None,) * features
    united = zip(labels, columns, before, strict=True)
    values = [_unite_values(*each) for each in united]
    for feature, known in enumerate(numbered):
        every = values[feature]
        if known and every:
            place = {value: number for number, value in enumerate(every)}
            numbers = np.array([place.get(v, np.nan) for v in known], np.float32)
            column = matrix[:, feature]
            present = ~np.isnan(column)
            column[present] = numbers[column[present].astype(np.int64)]
    return frame._replace(matrix=matrix, categories=tuple(values))


def _describe_column(frame, feature):
    """Returns the kind of a column, the values that occur, and its other values."""
    known = None if frame.categories is None else frame.categories[feature]
    if known is None:
        missing = np.isnan(frame.matrix[:, feature]).all()
        return ["nothing" if missing else "numbers", [], []]
    column = frame.matrix[:, feature]
    occurs = np.isin(np.arange(len(known)), column[~np.isnan(column)])
    values = [[v for v, o in zip(known, occurs, strict=True) if o == kept]
              for kept in (True, False)]  # fmt: skip
    return ["categories", *values]


def _unite_values(label, found, known):
    """Returns a column's values on all processes, known ones first; None if numbers."""
    if all(kind != "categories" for kind, _, _ in found):
        return None
    kinds = []
    for kind, occurring, others in found:
        values = occurring or others
        named = f"categories such as {show(values[0])}" if values else "nothing"
        kinds.append("numbers" if kind == "numbers" else named)
    seen = {value for _, occurring, _ in found for value in occurring}
    declared = {value for _, _, others in found for value in others} - seen
    types = {type(value) for value in seen or declared}
    if "numbers" in kinds or len(types) > 1:
        listed = "; ".join(f"process {rank}: {kind}" for rank, kind in enumerate(kinds))
        raise ValueError(
            f"column {show(label)} of x must hold the same type on every process, got "
            f"{listed}"
        )
    if {type(value) for value in declared} != types:
        declared = set()  # as within one table
    known = known or ()
    return (*known, *sorted(seen - {*known}), *sorted(declared - {*known}))


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
    own, last, count = [], matrix.shape[1] - 1, num_processes()
    for first in range(0, last + 1, count):
        column = send_rows([matrix[:, min(first + q, last)] for q in range(count)])
        if first + process_number() <= last:
            own += find_dense_thresholds(column[:, None], weight, max_bins)
    return join_shares(own)


def join_shares(own: list[Float[np.ndarray, " _"]]) -> list[Float[np.ndarray, " _"]]:
    """Returns the thresholds of every feature.

    Args:
      own: the thresholds of the features r, r + P, r + 2 P, ...; r is the number of
        this process, and P the number of processes.
    """
    if num_processes() == 1:
        return own
    sizes = np.array([len(row) for row in own], np.int32)
    numbers = process_number() + num_processes() * np.arange(len(own), dtype=np.int32)
    flat = np.concatenate([*own, np.zeros(0, np.float32)]).astype(np.float32)
    sizes, numbers = gather_tables((sizes, numbers))
    rows = np.split(gather_tables(flat), np.cumsum(sizes)[:-1])
    return [rows[place] for place in np.argsort(numbers)]


def has_missing(
    matrix: Float[np.ndarray, "N F"], weight: Shaped[np.ndarray, " N"] | None
) -> bool:
    """Returns whether a row of positive weight has a missing value."""
    # The minimum needs no other memory.
    if not np.isnan(np.min(matrix, initial=np.inf)):
        return False
    return weight is None or bool(np.isnan(matrix[weight > 0]).any())
