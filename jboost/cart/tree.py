# SPDX-License-Identifier: Apache-2.0
"""Fits a single regression tree (CART) exactly, to any depth.

In: a matrix, targets, weights. Out: a :class:`jboost.cart.RegressionTree`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float, Shaped

from jboost.cart.least_squares import Rules, grow
from jboost.entry import checks
from jboost.entry.decorators import on_host
from jboost.model.regression_tree import RegressionTree, make_tree
from jboost.tables.collisions import warn_of_collisions
from jboost.tables.frames import read_frame, read_values
from jboost.tables.targets import check_targets, check_weights

_DEEPEST = 2**31 - 1  # what max_depth=None stands for


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

    In each node the feature j and the threshold s that minimize

        sum_{x_ij <= s} w_i (y_i - mean_left)^2
            + sum_{x_ij > s} w_i (y_i - mean_right)^2

    (Breiman et al. 1984, section 8.3), until the targets of a node are equal or a limit
    forbids every split. A split that gains nothing is made, too (the first one of an
    exclusive or does not), because pruning takes it back at no price. Thresholds lie
    midway between neighboring distinct values, as in :func:`jboost.fit_bins`. Of
    splits whose gains differ by rounding alone, the one with the lowest feature, then
    the lowest threshold is taken.

    Missing values go to the side where they gain more, the right one if it is a tie;
    a split may also part values from missing ones. Where training saw none, they follow
    the heavier child, the left one if it is a tie.

    The host does this in float64, with one sort per column and then one pass over the
    rows of each level, on all cores that the process may use.

    Args:
      x: numbers [N, F], an array or a data frame, made float32; NaN is missing,
        infinities are values.
      y: finite numbers [N] or [N, K]; for K targets a row, squared errors are summed
        over them.
      sample_weight: weights of the rows; those of weight 0 are not looked at.
      max_depth: levels of splits; None for as many as it takes.
      min_child_samples: least number of rows of a child.
      min_split_samples: least number of rows of a node that is split.
      min_child_weight: least weight of a child; in any case a child has more than
        1e-12 of its parent's weight, below which sums of float64 say nothing.
      min_gain: least fall of the weighted sum of squared errors by a split.
      feature_names: F different names, kept in the tree; those of a data frame's
        columns if not given.

    Returns:
      A RegressionTree, for :func:`jboost.predict`, :func:`jboost.leaf_indices`,
      :func:`jboost.cart.pruning_path` and :func:`jboost.cart.prune`.

    Raises:
      TypeError, ValueError: bad arguments, named; or they are being traced.

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
    tree = grow_tree(table.matrix, table.targets, table.weights, rules)
    return replace(tree, feature_names=table.names)


def make_rules(
    max_depth: Any,
    min_child_samples: Any,
    min_split_samples: Any,
    min_child_weight: Any,
    min_gain: Any,
) -> Rules:
    """Checks the limits of a tree."""
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
    """A finite number >= 0."""
    checks.check_number(name, value, least=0.0)
    return float(value)


class Table(NamedTuple):
    """What a tree is fitted to: x in float32, y and weights in float64."""

    matrix: Float[np.ndarray, "N F"]
    targets: Float[np.ndarray, "N *K"]
    weights: Float[np.ndarray, " N"] | None
    names: tuple[str, ...] | None


def check_table(
    x: Any, y: Any, sample_weight: Any, feature_names: Sequence[str] | None = None
) -> Table:
    """Checks the arguments of the same names."""
    frame = read_frame(x, "x")
    matrix = np.asarray(frame.matrix)
    num_rows = len(matrix)
    weights = None
    if sample_weight is not None:
        with np.errstate(over="ignore"):  # is an infinity, which is refused
            check_weights(sample_weight, num_rows, "sample_weight")
        weights = np.asarray(read_values(sample_weight, "sample_weight"), np.float64)
    if isinstance(y, tuple | dict) or (isinstance(y, list) and not len(y)):
        raise TypeError(
            f"y must be an array of numbers, one row per row of x, got "
            f"{type(y).__name__}"
        )
    with np.errstate(over="ignore"):
        targets = check_targets(y, num_rows, weights, "y")
    if targets.ndim > 2 or 0 in targets.shape:
        raise ValueError(f"y must be [N] or [N, K], got shape {targets.shape}")
    # Checked as float32, in which scores are, but used as they came.
    return Table(
        matrix,
        np.asarray(y if isinstance(y, list) else read_values(y, "y"), np.float64),
        weights,
        checks.check_names(feature_names, frame.names, matrix.shape[1]),
    )


def grow_tree(
    matrix: np.ndarray, targets: np.ndarray, weights: np.ndarray | None, rules: Rules
) -> RegressionTree:
    """Fits a tree to a checked table."""
    num_features = matrix.shape[1]
    if weights is not None:
        used = weights > 0
        if not used.all():
            matrix, targets, weights = matrix[used], targets[used], weights[used]
        if weights.min() == weights.max() == 1:
            weights = None
    by_output = np.ascontiguousarray(targets.reshape(len(targets), -1).T)
    nodes = grow(matrix, by_output, weights, rules)
    value = nodes.value[0] if targets.ndim == 1 else nodes.value.T
    return make_tree(**nodes._replace(value=value)._asdict(), num_features=num_features)


def check_tree(tree: Any) -> None:
    """A RegressionTree."""
    if not isinstance(tree, RegressionTree):
        raise TypeError(f"tree must be a RegressionTree, got {type(tree).__name__}")
