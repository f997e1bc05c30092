# SPDX-License-Identifier: Apache-2.0
"""Folds: which rows each fold trains on, and which it holds out.

In: a number of folds, labels, pairs of index arrays or a splitter. Out: Folds, two
masks of the rows for each fold, or counts where rows are repeated.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jboost.entry import checks
from jboost.entry.checks import refuse_mask
from jboost.entry.messages import show
from jboost.tables.groups import RowGroups, check_group_weights, find_gap

_EXPECTED = (
    "folds must be an integer, a fold number for each row, pairs (training rows, "
    "held-out rows), or an object with split(x, y, groups)"
)


class Folds(NamedTuple):
    """Masks of rows, or counts if a fold repeats rows, as a bootstrap does.

    A row may be in no fold, and several folds may hold it out.

    Attributes:
      train: rows that a fold trains on.
      held_out: rows that a fold is evaluated on.
    """

    train: Bool[np.ndarray, "folds N"] | Int[np.ndarray, "folds N"]
    held_out: Bool[np.ndarray, "folds N"] | Int[np.ndarray, "folds N"]

    @property
    def repeated(self) -> bool:
        """Whether some row counts more than once in a fold."""
        return bool(self.train.max() > 1 or self.held_out.max() > 1)


def make_folds(
    folds: Any,
    num_rows: int,
    *,
    y: Any = None,
    stratify: Any = None,
    groups: Any = None,
    shuffle: bool = True,
    seed: int = 0,
) -> Folds:
    """Makes the masks; see :func:`jboost.cross_validate` for the arguments.

    Args:
      y: targets for ``stratify=True`` and splitters; None if a row has several.

    Raises:
      TypeError, ValueError: for folds of an unknown kind, folds without training or
        held-out rows, and labels that do not suit them.
    """
    checks.check_flag("shuffle", shuffle)
    number = isinstance(folds, int | np.integer) and not isinstance(folds, bool)
    if isinstance(folds, str | bytes | dict):
        raise TypeError(f"{_EXPECTED}, got {show(folds)}")
    if not number:
        for name, value in (("stratify", stratify), ("shuffle", not shuffle)):
            if value is not None and value is not False:
                raise ValueError(
                    f"{name} needs a number of folds, which are then drawn at random, "
                    f"got folds={type(folds).__name__}"
                )
    if hasattr(folds, "split"):
        rows = np.zeros((num_rows, 1))
        splitter: Any = folds
        return _read_pairs(splitter.split(rows, y, groups), num_rows)
    if groups is not None and not number:
        raise ValueError(
            "groups needs a number of folds or a splitter, got folds="
            f"{type(folds).__name__}"
        )
    if number:
        count = checks.check_integer("folds", folds, least=2, most=num_rows)
        seed = checks.check_integer("seed", seed, least=0, most=2**32 - 1)
        labels = _draw(count, num_rows, y, stratify, groups, shuffle, seed)
        return _from_numbers(labels, np.arange(count))
    if not isinstance(folds, Iterable):
        raise TypeError(f"{_EXPECTED}, got {show(folds)}")
    is_array = hasattr(folds, "ndim")
    pairs: Any = folds if is_array else list(folds)
    flat = pairs.ndim == 1 if is_array else pairs and all(map(np.isscalar, pairs))
    return (_read_numbers if flat else _read_pairs)(pairs, num_rows)


def _from_numbers(labels, names):
    held_out = labels[None, :] == names[:, None]
    return Folds(~held_out, held_out)


def _draw(count, num_rows, y, stratify, groups, shuffle, seed) -> Int[np.ndarray, " N"]:
    """Draws a fold for each row, with sizes that differ by at most one."""
    rng = np.random.default_rng(seed)
    if groups is not None:
        if stratify is not None and stratify is not False:
            raise ValueError(
                "stratify and groups exclude each other; pass folds="
                "sklearn.model_selection.StratifiedGroupKFold(...)"
            )
        labels = _check_labels("groups", groups, num_rows)
        return _draw_groups(count, labels, shuffle, rng)
    if stratify is not None and stratify is not False:
        name = "y" if stratify is True else "stratify"
        labels = _check_labels(name, y if stratify is True else stratify, num_rows)
        return _draw_strata(count, labels, name, shuffle, rng)
    if not shuffle:  # contiguous blocks
        return np.arange(num_rows) * count // num_rows
    return rng.permutation(num_rows) % count


def _draw_strata(count, labels, name, shuffle, rng):
    """Deals the rows of each label out to the folds in turn.

    Each label goes on where the last one stopped, which keeps the folds equally large.
    """
    sizes = np.bincount(labels)
    if sizes.max() < count:
        raise ValueError(
            f"{name} must hold some label at least {count} times, once per fold, "
            f"got {len(sizes)} labels of at most {sizes.max()} rows; for a continuous "
            "target, pass labels of intervals as stratify="
        )
    order = rng.permutation(len(labels)) if shuffle else np.arange(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(len(labels), np.int64)
    fold[order] = np.arange(len(labels)) % count
    return fold


def _draw_groups(count, labels, shuffle, rng):
    """Assigns groups, largest first, to the fold with the fewest rows."""
    sizes = np.bincount(labels)
    if len(sizes) < count:
        raise ValueError(
            f"groups must hold at least {count} labels, one per fold, got {len(sizes)}"
        )
    order = rng.permutation(len(sizes)) if shuffle else np.arange(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    filled, fold = np.zeros(count, np.int64), np.empty(len(sizes), np.int64)
    for group in order:
        fold[group] = np.argmin(filled)
        filled[fold[group]] += sizes[group]
    return fold[labels]


def _check_labels(name, labels, num_rows):
    """Returns labels as integers from 0."""
    labels = refuse_mask(labels, name)
    try:
        array = np.asarray(labels)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must hold {num_rows} labels, got {show(labels)}"
        ) from None
    if array.shape != (num_rows,):
        raise ValueError(f"{name} must hold {num_rows} labels, got shape {array.shape}")
    gap = find_gap(array)
    if gap is not None:
        raise ValueError(
            f"{name} must hold a label in every row, got {show(array[gap])} in "
            f"row {gap}"
        )
    try:
        return np.unique(array, return_inverse=True)[1]
    except TypeError as error:
        raise TypeError(f"{name} must hold labels of one kind: {error}") from None


def _read_numbers(folds, num_rows):
    labels = np.asarray(refuse_mask(folds, "folds"))
    if labels.dtype.kind not in "iu" or labels.shape != (num_rows,):
        raise ValueError(
            f"folds must be {num_rows} integers, the fold that holds each row out "
            "(negative: none does; use groups= for labels), got "
            f"dtype {labels.dtype} and shape {labels.shape}"
        )
    names = np.unique(labels[labels >= 0])
    if len(names) < 1:
        raise ValueError("folds must hold some number >= 0, got negative ones only")
    return _from_numbers(labels, names)


def _read_pairs(pairs: Iterable[Any], num_rows: int) -> Folds:
    train, held_out = [], []
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"{_EXPECTED}, got {show(pair)} as fold {number}")
        for name, rows, masks in zip(
            ("training", "held-out"), pair, (train, held_out), strict=True
        ):
            whole = f"folds[{number}], its {name} rows,"
            masks.append(_read_rows(whole, rows, num_rows))
        both = np.logical_and(train[-1], held_out[-1])
        if np.any(both):
            row = int(np.argmax(both))
            raise ValueError(
                f"folds[{number}] must not hold out rows that it trains on, got row "
                f"{row} in both"
            )
    if not train:
        raise ValueError("folds must hold at least one pair, got none")
    return Folds(np.stack(train), np.stack(held_out))


def _read_rows(name, rows, num_rows) -> Bool[np.ndarray, " N"] | Int[np.ndarray, " N"]:
    """Returns a mask from a mask or indices; counts if indices repeat."""
    rows = np.asarray(refuse_mask(rows, name))
    if rows.dtype == bool and rows.shape == (num_rows,):
        return rows
    if rows.dtype.kind not in "iu" or rows.ndim != 1 or len(rows) == 0:
        raise ValueError(
            f"{name} must be indices of rows or a mask of {num_rows}, got dtype "
            f"{rows.dtype} and shape {rows.shape}"
        )
    if rows.min() < 0 or rows.max() >= num_rows:
        outside = rows[(rows < 0) | (rows >= num_rows)][0]
        raise ValueError(f"{name} must be from 0 to {num_rows - 1}, got {outside}")
    counts = np.bincount(rows, minlength=num_rows)
    return counts if counts.max() > 1 else counts > 0


def check_whole_groups(folds: Folds, groups: RowGroups, weighed: bool) -> None:
    """Checks that no fold trains on a part of a group, or holds out a part.

    Args:
      weighed: whether the loss weighs rows itself. If not, a fold must hold all rows of
        a group equally often.
    """
    for fold, masks in enumerate(zip(*folds, strict=True)):
        for name, mask in zip(("training", "held-out"), masks, strict=True):
            row = _find_divided(mask > 0, groups)
            if row is not None:
                raise ValueError(
                    "folds must not divide a group of the loss, got the group of row "
                    f"{row} divided in fold {fold}"
                )
            if not weighed and mask.max() > 1:
                whole = f"folds[{fold}], how often it holds each of its {name} rows,"
                check_group_weights(groups, mask, whole)


def _find_divided(mask, groups):
    """Returns a row of a group that is only partly in the mask; None: no such group."""
    if groups.number is None:
        return None
    number = np.asarray(groups.number)[: len(mask)]
    count = np.bincount(number, mask, groups.num_groups)
    divided = (count > 0) & (count < np.bincount(number, minlength=groups.num_groups))
    return int(np.argmax(divided[number])) if divided.any() else None
