# SPDX-License-Identifier: Apache-2.0
"""Reads rows as callers of the estimators pass them, and holds some of them out.

In: tables, targets, weights and offsets. Out: arrays with one value for each row of X,
or an error that names the argument.
"""

from typing import Any

import numpy as np
from scipy.sparse import csr_array, issparse
from sklearn.model_selection import GroupShuffleSplit, train_test_split
from sklearn.utils import check_array, column_or_1d
from sklearn.utils.validation import _num_samples

from jboost.entry.arrays import refuse_mask
from jboost.entry.checks import check_number
from jboost.entry.representation import show
from jboost.tables.frames import find_frame, read_values
from jboost.tables.offsets import check_offset
from jboost.tables.sparse import sort_entries
from jboost.tables.targets import check_weights


def read_targets(
    y: Any, name: str = "y", *, several: bool = False, finite: bool = True
) -> np.ndarray:
    """Returns targets as numbers [N].

    Args:
      y: the targets.
      name: the argument's name in errors.
      several: whether they may be [N, K], where NaN and infinities are accepted.
      finite: whether NaN and infinities in [N] are refused.

    Raises:
      ValueError: they are not numbers, or have another shape.
    """
    refuse_none(y)
    y = refuse_mask(y, name)
    cells = np.asarray(y)
    if cells.ndim == 0:
        raise ValueError(
            f"{name} must hold a number for each row, got {type(y).__name__}"
        )
    if cells.dtype.kind in "OSTU":
        words = (cell for cell in cells.ravel() if isinstance(cell, str | bytes))
        word = next(words, None)
        if word is not None:
            raise ValueError(
                f"{name} must hold numbers, got {show(str(word))}; JBoostClassifier "
                "takes strings as labels"
            )
    y = check_array(y, ensure_2d=False, ensure_all_finite=False, input_name=name)
    if several and y.ndim == 2 and y.shape[1] > 1:
        return y
    return check_array(
        column_or_1d(y, warn=True), ensure_2d=False, ensure_all_finite=finite,
        input_name=name,
    )  # fmt: skip


def refuse_none(y: Any) -> None:
    """Raises ValueError, in scikit-learn's words, where there are no targets."""
    if y is None:
        raise ValueError("fit requires y to be passed, but the target y is None")


def check_rows(y: np.ndarray, X: Any) -> None:
    """Raises ValueError unless there is a target for each row of X."""
    num_rows = _num_samples(X)
    if len(y) != num_rows:
        raise ValueError(f"y must have {num_rows} rows, as X has, got shape {y.shape}")


def unite_sets(eval_set: Any, eval_X: Any, eval_y: Any) -> Any:
    """Returns ``eval_set``, or the one set of ``eval_X`` and ``eval_y``."""
    if eval_X is None and eval_y is None:
        return eval_set
    given = {"eval_X": eval_X, "eval_y": eval_y, "eval_set": eval_set}
    names = [name for name, value in given.items() if value is not None]
    if names != ["eval_X", "eval_y"]:
        raise ValueError(
            "eval_X and eval_y must be given together and without eval_set, got "
            + " and ".join(names)
        )
    return eval_X, eval_y


def make_csr(X: Any) -> Any:
    """Returns a sparse matrix of SciPy or JAX by rows, in its own dtype."""
    starts, places, values, shape = sort_entries(X, "X", by_column=False)
    return csr_array((values, places, starts), shape=shape)


def hold_out(
    rows: tuple[Any, ...],
    share: Any,
    seed: int,
    num_scores: int,
    labels: np.ndarray | None = None,
) -> list[tuple[Any, ...]]:
    """Splits rows at random; returns those to train on and those to validate on.

    Args:
      rows: X, targets, weights, offset and groups; None: not given. Groups are not
        divided.
      share: the share of rows (of groups) to validate on.
      seed: fixes the split.
      num_scores: K.
      labels: classes, of which both parts have equal shares.

    Raises:
      ValueError: the rows cannot be split, or have no split with weights on both sides.
    """
    check_number("validation_fraction", share, above=0.0, most=1 - 1e-9)
    X, targets, weights, offset, groups = rows
    num_rows = len(targets)
    if weights is not None:
        weights = np.asarray(check_weights(weights, num_rows, "sample_weight"))
    if offset is not None:
        check_offset(offset, num_rows, num_scores)
        offset = np.asarray(read_values(offset, "offset"))
    parts = _draw_parts(num_rows, share, seed, labels, groups)
    if weights is not None and not all(weights[part].any() for part in parts):
        raise ValueError(
            f"early_stopping_rounds holds out validation_fraction={share} of the rows "
            "and needs rows of positive sample_weight among both parts, got "
            f"{np.count_nonzero(weights)} of {num_rows} rows of positive weight; pass "
            "eval_set or another random_state"
        )
    arrays = (targets, weights, offset, groups)
    return [
        (_take_rows(X, part), *(a if a is None else a[part] for a in arrays))
        for part in parts
    ]


def _take_rows(X, places):
    """Returns rows of a table: a data frame, or a matrix of any kind."""
    frame = None if issparse(X) else find_frame(X, "X")
    if frame is not None:
        return frame[places].to_native()
    return (make_csr(X) if issparse(X) else X)[places]  # coo, dia, bsr have no index


def _draw_parts(num_rows, share, seed, labels, groups):
    """Returns the places of the rows to train on, and of those to validate on."""
    meaning = f"early_stopping_rounds holds out validation_fraction={share}"
    codes = None
    if labels is not None:
        names, codes, counts = np.unique(
            labels, return_inverse=True, return_counts=True
        )
        if counts.min() < 2:
            raise ValueError(
                f"{meaning} of the rows of each class and needs at least 2, got 1 of "
                f"{names.tolist()[counts.argmin()]!r}; pass eval_set"
            )
    if groups is not None and np.all(groups == groups[0]):
        raise ValueError(
            f"{meaning} of the queries and needs at least 2, got 1; pass eval_set"
        )
    places = np.arange(num_rows)
    try:
        if groups is None:
            return train_test_split(
                places, test_size=share, random_state=seed, stratify=codes
            )
        splitter = GroupShuffleSplit(1, test_size=share, random_state=seed)
        return next(splitter.split(places, groups=groups))
    except ValueError as error:
        raise ValueError(
            f"{meaning} of {num_rows} rows, which cannot be done: "
            f"{str(error).rstrip('.')}; pass eval_set or another validation_fraction"
        ) from error
