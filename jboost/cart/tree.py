# SPDX-License-Identifier: Apache-2.0
"""Fits a single regression tree (CART) exactly, to any depth.

In: a matrix, targets, weights. Out: a :class:`jboost.cart.RegressionTree`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float, Shaped

from jboost.cart.least_squares import Rules, grow, make_tree
from jboost.entry import checks, feature_checks
from jboost.entry.decorators import on_host
from jboost.entry.messages import show
from jboost.model.regression_tree import RegressionTree
from jboost.tables.domains import warn_of_collisions
from jboost.tables.frames import read_frame, read_values
from jboost.tables.offsets import check_finite
from jboost.tables.targets import check_targets, check_weights

_DEEPEST = 2**31 - 1  # the limit for max_depth=None


@on_host("call jb.boost there")
def fit_tree(
    x: Any,
    y: Any,
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    max_depth: int | None = None,
    min_child_samples: int = 1,
    min_split_samples: int = 2,
    min_child_weight: float = 0.0,
    min_gain: float = 0.0,
    feature_names: Sequence[str] | None = None,
) -> RegressionTree:
    """Fits a regression tree by least squares, on all distinct values.

    Splits each node by the feature j and the threshold s that minimize

        sum_{x_ij <= s} w_i (y_i - mean_left)^2
            + sum_{x_ij > s} w_i (y_i - mean_right)^2

    (Breiman et al. 1984, section 8.3), until the targets of a node are equal or the
    limits allow no split. Splits without gain are kept (the first split of an
    exclusive or has none); pruning removes them at alpha = 0. Thresholds are midpoints
    of neighboring distinct values, as in :func:`jboost.fit_bins`. Among splits whose
    gains differ only by rounding, the lowest feature wins, then the lowest threshold.

    Missing values go to the side with the larger gain, to the right on a tie; a split
    may also separate values from missing values. If a node had no missing values in
    training, they go to the heavier child, to the left on a tie.

    Runs on the host in float64: one sort per column, then one pass over the rows per
    level, on all cores available to the process.

    Args:
      x: numbers [N, F], an array or a data frame, converted to float32; NaN is
        missing, infinities are values.
      y: finite numbers [N] or [N, K]; for K targets per row, squared errors are summed
        over the targets.
      sample_weight: weights of the rows; rows of weight 0 are ignored.
      max_depth: maximum number of levels of splits; None for no limit.
      min_child_samples: minimum number of rows in a child.
      min_split_samples: minimum number of rows in a node that is split.
      min_child_weight: minimum weight of a child. A child always has more than 1e-12
        of its parent's weight, because float64 sums cannot resolve less.
      min_gain: minimum reduction of the weighted sum of squared errors by a split.
      feature_names: F different names, stored in the tree; default: the column names
        of a data frame.

    Returns:
      A RegressionTree, for :func:`jboost.predict`, :func:`jboost.leaf_indices`,
      :func:`jboost.cart.pruning_path` and :func:`jboost.cart.prune`.

    Raises:
      TypeError, ValueError: an argument is invalid or traced.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.array([[1.0], [2.0], [4.0], [np.nan]])
      >>> tree = jb.cart.fit_tree(x, np.array([1.0, 1.0, 5.0, 5.0]))
      >>> tree.threshold[0], tree.missing_left[0], tree.value
      (np.float32(3.0), np.False_, array([3., 1., 5.]))
    """
    rules = make_rules(
        max_depth, min_child_samples, min_split_samples, min_child_weight, min_gain
    )
    table = check_table(x, y, sample_weight, feature_names)
    warn_of_collisions(x)
    return grow_tree(*table, rules)


def make_rules(
    max_depth: Any,
    min_child_samples: Any,
    min_split_samples: Any,
    min_child_weight: Any,
    min_gain: Any,
) -> Rules:
    """Checks the limits of a tree and returns them."""
    depth = _DEEPEST if max_depth is None else max_depth
    check_integer = partial(checks.check_integer, least=1)
    return Rules(
        max_depth=checks.check_integer("max_depth", depth, least=0),
        min_child_samples=check_integer("min_child_samples", min_child_samples),
        min_split_samples=check_integer("min_split_samples", min_split_samples),
        min_child_weight=check_known("min_child_weight", min_child_weight),
        min_gain=check_known("min_gain", min_gain),
    )


def check_known(name: str, value: Any) -> float:
    """Checks that a value is a finite number >= 0 and returns it."""
    checks.check_number(name, value, least=0.0, finite=False)
    if not np.isfinite(float(value)):  # float64, unlike numbers of ``fit``
        raise ValueError(f"{name} must be a number >= 0.0, got {show(value)}")
    return float(value)


class Table(NamedTuple):
    """Training data of a tree: x in float32, y and weights in float64."""

    matrix: Float[np.ndarray, "N F"]
    targets: Float[np.ndarray, "N *K"]
    weights: Float[np.ndarray, " N"] | None
    names: tuple[str, ...] | None


def check_table(
    x: Any, y: Any, sample_weight: Any, feature_names: Sequence[str] | None = None
) -> Table:
    """Checks the arguments of these names and reads them as arrays."""
    frame = read_frame(x, "x")
    matrix = np.asarray(frame.matrix)
    num_rows = len(matrix)
    weights = None
    if sample_weight is not None:
        with np.errstate(over="ignore"):  # becomes inf, which is rejected
            check_weights(sample_weight, num_rows, "sample_weight", most=1e300)
        weights = np.asarray(read_values(sample_weight, "sample_weight"), np.float64)
    if isinstance(y, tuple | dict) or (isinstance(y, list) and not len(y)):
        raise TypeError(
            "y must be an array of numbers, one row per row of x, got "
            f"{type(y).__name__}"
        )
    with np.errstate(over="ignore"):
        targets = check_targets(y, num_rows, weights, "y")
    check_finite(targets, weights, "y", targets)
    if targets.ndim > 2 or 0 in targets.shape:
        raise ValueError(f"y must be [N] or [N, K], got shape {targets.shape}")
    # Checked in float32, the type of scores, but fitted in float64.
    return Table(
        matrix,
        np.asarray(y if isinstance(y, list) else read_values(y, "y"), np.float64),
        weights,
        feature_checks.check_names(feature_names, frame.names, matrix.shape[1]),
    )


def grow_tree(
    matrix: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray | None,
    names: tuple[str, ...] | None,
    rules: Rules,
) -> RegressionTree:
    """Fits a tree to a checked table."""
    num_features = matrix.shape[1]
    if weights is not None:
        used = weights > 0
        if not used.all():
            matrix, targets, weights = matrix[used], targets[used], weights[used]
        # Without weights, candidate cuts are the same for all columns: faster.
        if weights.min() == weights.max() == 1:
            weights = None
    by_output = np.ascontiguousarray(targets.reshape(len(targets), -1).T)
    nodes = grow(matrix, by_output, weights, rules)
    value = nodes.value[0] if targets.ndim == 1 else nodes.value.T
    arrays = nodes._replace(value=value)._asdict()
    return make_tree(**arrays, num_features=num_features, feature_names=names)


def check_tree(tree: Any) -> None:
    """Raises TypeError unless ``tree`` is a RegressionTree."""
    if not isinstance(tree, RegressionTree):
        raise TypeError(f"tree must be a RegressionTree, got {type(tree).__name__}")
