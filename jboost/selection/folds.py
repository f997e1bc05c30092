# SPDX-License-Identifier: Apache-2.0
"""Which rows are trained on and which are held out, fold by fold.

In: a number of folds, labels, pairs of index arrays or a splitter. Out: Folds, two
masks of the rows for each fold, or counts where rows are repeated.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Shaped

from jboost.entry import checks
from jboost.tables.columns import find_gap

_EXPECTED = (
    "folds must be an integer, a fold number for each row, pairs (training rows, "
    "held-out rows), or an object with split(x, y, groups)"
)


class Folds(NamedTuple):
    """The rows of each fold; a row may be in no fold, and be held out by several.

    Masks, or counts if some fold repeats rows, as a bootstrap does.

    Attributes:
      train: rows that a fold learns from.
      held_out: rows that it is measured on.
    """

    train: Bool[np.ndarray, "folds N"] | Int[np.ndarray, "folds N"]
    held_out: Bool[np.ndarray, "folds N"] | Int[np.ndarray, "folds N"]

    @property
    def repeated(self) -> bool:
        """Whether some row counts more than once."""
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
      y: the targets, which ``stratify=True`` and splitters ask for; None where rows
        have several.

    Raises:
      TypeError, ValueError: for folds that cannot be read, that leave nothing to
        train on or nothing to hold out, or for labels that do not suit them.
    """
    number = isinstance(folds, int | np.integer) and not isinstance(folds, bool)
    if isinstance(folds, str | bytes | dict):
        raise TypeError(f"{_EXPECTED}, got {folds!r}")
    if not number:
        for name, value in (("stratify", stratify), ("shuffle", not shuffle)):
            if value is not None and value is not False:
                raise ValueError(
                    f"{name} goes with a number of folds, which are then drawn here, "
                    f"got folds={_describe(folds)}"
                )
    if hasattr(folds, "split"):
        return _read_splitter(folds, num_rows, y, groups)
    if groups is not None and not number:
        raise ValueError(
            "groups goes with a number of folds or a splitter, got folds="
            f"{_describe(folds)}"
        )
    if number:
        count = checks.check_integer("folds", folds, least=2, most=num_rows)
        seed = checks.check_integer("seed", seed, least=0, most=2**32 - 1)
        labels = _draw(count, num_rows, y, stratify, groups, shuffle, seed)
        return _from_numbers(labels, np.arange(count))
    if not isinstance(folds, Iterable):
        raise TypeError(f"{_EXPECTED}, got {folds!r}")
    pairs: Any = folds if hasattr(folds, "ndim") else list(folds)
    if _is_flat(pairs):
        return _read_numbers(pairs, num_rows)
    return _read_pairs(pairs, num_rows)


def _describe(folds):
    return type(folds).__name__


def _is_flat(folds):
    """Whether these are numbers of rows rather than pairs."""
    if hasattr(folds, "ndim"):
        return folds.ndim == 1
    return len(folds) > 0 and all(np.isscalar(fold) for fold in folds)


def _from_numbers(labels, names):
    held_out = labels[None, :] == names[:, None]
    return Folds(~held_out, held_out)


def _draw(count, num_rows, y, stratify, groups, shuffle, seed) -> Int[np.ndarray, " N"]:
    """A fold for each row, of sizes that differ by one at most."""
    rng = np.random.default_rng(seed)
    if groups is not None:
        if stratify is not None and stratify is not False:
            raise ValueError(
                "stratify and groups do not go together here; pass folds="
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
    """The rows of each label are dealt out in turn, where the last label stopped."""
    sizes = np.bincount(labels)
    if sizes.max() < count:
        raise ValueError(
            f"{name} must hold some label at least {count} times, as there are folds, "
            f"got {len(sizes)} labels of at most {sizes.max()} rows; numbers are not "
            "labels: pass stratify= labels made of them"
        )
    order = rng.permutation(len(labels)) if shuffle else np.arange(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(len(labels), np.int64)
    fold[order] = np.arange(len(labels)) % count
    return fold


def _draw_groups(count, labels, shuffle, rng):
    """The largest group first, each to the fold of fewest rows."""
    sizes = np.bincount(labels)
    if len(sizes) < count:
        raise ValueError(
            f"groups must hold at least {count} labels, as there are folds, got "
            f"{len(sizes)}"
        )
    order = rng.permutation(len(sizes)) if shuffle else np.arange(len(sizes))
    order = order[np.argsort(-sizes[order], kind="stable")]
    filled, place = np.zeros(count, np.int64), np.empty(len(sizes), np.int64)
    for group in order:
        place[group] = np.argmin(filled)
        filled[place[group]] += sizes[group]
    return place[labels]


def _check_labels(name, labels, num_rows):
    """Labels as numbers from 0."""
    try:
        array = np.asarray(labels)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must hold {num_rows} labels, got {labels!r}") from None
    if array.shape != (num_rows,):
        raise ValueError(f"{name} must hold {num_rows} labels, got shape {array.shape}")
    gap = find_gap(array)
    if gap is not None:
        raise ValueError(
            f"{name} must hold a label in every row, got {array[gap]!r} in row {gap}"
        )
    try:
        return np.unique(array, return_inverse=True)[1]
    except TypeError as error:
        raise TypeError(f"{name} must hold labels of one kind: {error}") from None


def _read_numbers(folds, num_rows):
    labels = np.asarray(folds)
    if labels.dtype.kind not in "iu" or labels.shape != (num_rows,):
        raise ValueError(
            f"folds must be {num_rows} integers, the fold that holds each row out "
            "(negative: none does; words and the like go into groups=), got "
            f"dtype {labels.dtype} and shape {labels.shape}"
        )
    names = np.unique(labels[labels >= 0])
    if len(names) < 1:
        raise ValueError("folds must hold some number >= 0, got negative ones only")
    return _from_numbers(labels, names)


def _read_splitter(splitter, num_rows, y, groups):
    rows = np.zeros((num_rows, 1))
    return _read_pairs(splitter.split(rows, y, groups), num_rows)


def _read_pairs(pairs: Iterable[Any], num_rows: int) -> Folds:
    train, held_out = [], []
    for number, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"{_EXPECTED}, got {pair!r} as fold {number}")
        for name, rows, masks in zip(
            ("training", "held-out"), pair, (train, held_out), strict=True
        ):
            place = f"folds[{number}], its {name} rows,"
            masks.append(_read_rows(place, rows, num_rows))
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


def _read_rows(place, rows, num_rows) -> Bool[np.ndarray, " N"] | Int[np.ndarray, " N"]:
    """A mask, from a mask or places of rows; counts where places repeat."""
    rows = np.asarray(rows)
    if rows.dtype == bool and rows.shape == (num_rows,):
        return rows
    if rows.dtype.kind not in "iu" or rows.ndim != 1 or len(rows) == 0:
        raise ValueError(
            f"{place} must be places of rows or a mask of {num_rows}, got dtype "
            f"{rows.dtype} and shape {rows.shape}"
        )
    if rows.min() < 0 or rows.max() >= num_rows:
        outside = rows[(rows < 0) | (rows >= num_rows)][0]
        raise ValueError(f"{place} must be from 0 to {num_rows - 1}, got {outside}")
    counts = np.bincount(rows, minlength=num_rows)
    return counts if counts.max() > 1 else counts > 0


def check_folds(folds: Folds, weights: Shaped[np.ndarray, " N"]) -> None:
    """Every fold needs rows of positive weight on both sides."""
    for number in range(len(folds.train)):
        for name, mask in zip(("train on", "hold out"), folds, strict=True):
            if not np.any((mask[number] > 0) & (weights > 0)):
                raise ValueError(
                    f"folds must {name} some row of positive weight each, got none in "
                    f"fold {number}"
                )
