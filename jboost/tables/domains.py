# SPDX-License-Identifier: Apache-2.0
"""Checks of values: collisions in float32, and domains of built-in losses."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from jboost import losses
from jboost.entry.decorators import fetch
from jboost.entry.messages import show, warn_user
from jboost.losses.groups import check_relevances, check_times
from jboost.tables.frames import check_finite, read_values
from jboost.tables.groups import first_rows
from jboost.tables.sparse import is_sparse, sort_entries

_ROWS = 100_000  # rows per column that are checked
_SHARE = 0.01  # a column is reported if it loses more than this share of its values


def warn_of_collisions(x: Any) -> None:
    """Warns once if distinct values of a column become equal in float32."""
    count = _count_stored if is_sparse(x) else _count_columns
    for feature, dtype, num_rows, before, after in count(x):
        if _warn(f"column {show(feature)} of x", dtype, num_rows, before, after):
            return


def warn_of_rounding(values: Any, name: str) -> None:
    """Warns once if distinct targets or offsets become equal in float32.

    Args:
      values: one or more numbers per row, as the user passed them. JAX arrays are not
        checked: they usually are float32 already.
    """
    values = read_values(values, name)
    if not isinstance(values, np.ndarray):
        return
    head = values[:_ROWS]
    for column in head.reshape(len(head), -1).T if len(head) else ():
        if _warn(name, column.dtype, len(column), *_count_distinct(column)):
            return


def _warn(label, dtype, num_rows, before, after):
    """Warns if too many distinct values become equal; returns whether it warned."""
    if before - after <= _SHARE * before:
        return False
    warn_user(
        f"{label} has {before:.0f} distinct {dtype} values (in its first {num_rows} "
        f"rows) but {after:.0f} in float32, which jboost computes in; subtract a "
        "constant or rescale to keep them distinct"
    )
    return True


def _may_collide(dtype):
    return dtype.kind in "fiu" and dtype.itemsize >= 4 and dtype != np.float32


def _count_distinct(column):
    """Counts distinct values before and after rounding; (0, 0) if rounding is exact."""
    if _may_collide(column.dtype):
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = column.astype(np.float32)
            exact = np.array_equal(rounded.astype(column.dtype), column)
        if not exact:
            return len(np.unique(column)), len(np.unique(rounded))
    return 0, 0


def _count_columns(x):
    """Yields feature, dtype, rows checked, distinct values, and those in float32."""
    for feature, column in first_rows(x, _ROWS):
        yield feature, column.dtype, len(column), *_count_distinct(column)


def _count_stored(x):
    """Returns tuples like :func:`_count_columns`, for entries of a sparse matrix."""
    if not _may_collide(np.dtype(x.dtype)):
        return ()
    stored = sort_entries(x, "x", by_column=True)
    sizes = np.diff(stored.starts)
    feature = np.repeat(np.arange(stored.shape[1]), sizes)
    order = np.lexsort((stored.values, feature))
    values, new = stored.values[order], feature[1:] != feature[:-1]
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = values.astype(np.float32)

    def count(values):
        first = np.append([True], new | (values[1:] != values[:-1]))
        return np.bincount(feature, first[: len(feature)], minlength=len(sizes))

    pairs = zip(sizes, count(values), count(rounded), strict=True)
    return ((feature, x.dtype, *pair) for feature, pair in enumerate(pairs))


class _Domain(NamedTuple):
    """Describes the targets that a loss is defined for.

    Attributes:
      holds: ``holds(targets, num_scores)`` returns a NumPy mask of valid targets.
      hint: ``hint(targets, num_scores)`` returns the end of the error message.
    """

    description: str
    holds: Callable[[np.ndarray, int], np.ndarray]
    hint: Callable[[np.ndarray, int], str] = lambda targets, num_scores: ""


def _hint_classes(targets, num_scores):
    """Suggests the number of scores that the classes need, or counting them from 0."""
    given = f"; num_scores is {num_scores}"
    if not (targets == np.floor(targets)).all() or targets.min() < 0:
        return f"{given}; jboost.sklearn.JBoostClassifier takes labels of any kind"
    if targets.min() == 1 and targets.max() == num_scores:
        return f"{given}; subtract 1 from the classes"
    return f"{given}; pass num_scores={int(targets.max()) + 1}"


_COUNTS = _Domain("numbers >= 0", lambda t, _: t >= 0)
_SHARES = _Domain("numbers from 0 to 1", lambda t, _: (t >= 0) & (t <= 1))
_SIGNS = _Domain("-1 or 1", lambda t, _: np.abs(t) == 1)
_CLASSES = _Domain(
    "classes, the integers from 0 to num_scores - 1",
    lambda t, k: (t >= 0) & (t < k) & (t == np.floor(t)),
    _hint_classes,
)
_DOMAINS: tuple[tuple[Callable[..., Any], _Domain], ...] = (
    (losses.poisson, _COUNTS), (losses.tweedie, _COUNTS),
    (losses.gamma, _Domain("numbers > 0", lambda t, _: t > 0)),
    (losses.logistic, _SHARES), (losses.focal, _SHARES), (losses.softmax, _CLASSES),
    (losses.exponential, _SIGNS), (losses.hinge, _SIGNS),
    (losses.hinge_squared, _SIGNS),
)  # fmt: skip

_GROUP_CHECKS: tuple[tuple[Callable[..., Any], Callable[..., None]], ...] = (
    (losses.cox, check_times), (losses.concordance, check_times),
    (losses.listwise_softmax, check_relevances), (losses.xendcg, check_relevances),
    (losses.lambda_rank, check_relevances), (losses.approx_ndcg, check_relevances),
)  # fmt: skip


def check_domain(
    loss: Any, targets: Any, weights: Any, num_scores: int, name: str
) -> None:
    """Checks that the targets are in the domain of a built-in loss.

    It skips custom losses, traced arrays, and rows of weight 0. Targets [N, K] of
    a loss of one score may hold NaN, which marks labels as missing.
    """
    bare = losses.bare_loss(loss)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((targets, weights))):
        return
    check = next((check for known, check in _GROUP_CHECKS if known is bare), None)
    built_in = any(known is bare for known in losses.LOSSES.values())
    if check is None and not built_in:
        return
    host, weights = fetch((targets, weights))
    if check is not None:
        check(host, weights > 0, name)
    if not built_in or not isinstance(host, np.ndarray) or host.ndim not in (1, 2):
        return  # tracing the loss will raise a better error
    if host.ndim == 2 and bare is losses.softmax:
        return  # tracing will raise a better error here, too
    given = host if host.ndim == 1 else np.where(np.isnan(host), np.float32(1), host)
    check_finite(given, weights, name, host)
    domain = next((domain for known, domain in _DOMAINS if known is bare), None)
    if domain is None:
        return
    counts = (weights > 0).reshape(-1, *(1,) * (host.ndim - 1))
    bad = ~domain.holds(given, num_scores) & counts
    if bad.any():
        row, *column = np.argwhere(bad)[0].tolist()
        hint = domain.hint(given[weights > 0], num_scores)
        raise ValueError(
            f"{name} must contain {domain.description} for losses.{bare.__name__}, "
            f"got {host[row, *column]} in row {row}{hint}"
        )
