# SPDX-License-Identifier: Apache-2.0
"""A regression tree on its own (CART): fitted exactly, as deep as the data asks.

In: a matrix, targets, weights. Out: a RegressionTree, an immutable pytree with an
index of children, so that depth costs nothing where there are no nodes:

    node     0   1   2   3   4        0
    left     1  -1   3  -1  -1       / \\          right = left + 1
                                    1   2
                                       / \\
                                      3   4
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Shaped

from jboost.cart.least_squares import LEAF, Rules, grow
from jboost.codes.binning import flush_denormals
from jboost.entry import checks
from jboost.entry.decorators import on_host
from jboost.entry.programs import compiled
from jboost.entry.representation import show_fields
from jboost.kernels.library import vary
from jboost.numerics.padding import padded_size
from jboost.tables.collisions import warn_of_collisions
from jboost.tables.frames import Schema, read_frame, read_values
from jboost.tables.targets import check_targets, check_weights

FORMAT_VERSION = 1
_DEEPEST = 2**31 - 1  # what max_depth=None stands for


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RegressionTree:
    """A tree of M nodes, breadth first: level by level, each from left to right.

    Node 0 is the root. Children follow their parent, and the right one its sister, so
    that a node's level, the subtrees and the order of leaves can be read off ``left``.
    Arrays are NumPy's and cannot be written to: statistics are in float64, which JAX
    rounds to float32 where it takes them (``predict`` does).

    Attributes:
      left: the left child; -1 where a node is a leaf. The right one is ``left + 1``.
      feature: 0 in a leaf.
      threshold: ``x <= threshold`` goes left; +inf in a leaf, and where values are
        split from missing ones.
      missing_left: where NaN goes; True in a leaf.
      value: the weighted mean of the targets, of leaves and inner nodes; [M], or [M,
        K] for K targets a row.
      gain: what the split takes off the squared error; 0 in a leaf.
      squared_error: weighted sum of (target - value)^2 over rows (and targets).
      weight: the sum of the rows' weights.
      num_rows: how many rows of positive weight.
      num_features: how many columns ``predict`` expects.
      format_version: of this layout.
      feature_names: of the columns, where they are known.
    """

    left: Int32[Array, " M"] | Int32[np.ndarray, " M"]
    feature: Int32[Array, " M"] | Int32[np.ndarray, " M"]
    threshold: Float[Array, " M"] | Float[np.ndarray, " M"]
    missing_left: Bool[Array, " M"] | Bool[np.ndarray, " M"]
    value: Float[Array, "M *K"] | Float[np.ndarray, "M *K"]
    gain: Float[Array, " M"] | Float[np.ndarray, " M"]
    squared_error: Float[Array, " M"] | Float[np.ndarray, " M"]
    weight: Float[Array, " M"] | Float[np.ndarray, " M"]
    num_rows: Int32[Array, " M"] | Int32[np.ndarray, " M"]
    num_features: int = field(metadata=dict(static=True))
    format_version: int = field(default=FORMAT_VERSION, metadata=dict(static=True))
    feature_names: tuple[str, ...] | None = field(
        default=None, metadata=dict(static=True)
    )

    def __repr__(self) -> str:
        """Its fields: the arrays would fill pages."""
        return show_fields(self)

    @property
    def schema(self) -> Schema:
        """What tables to predict from must be like."""
        return Schema(self.feature_names)

    @property
    def num_nodes(self) -> int:
        """M."""
        return self.left.shape[0]

    @property
    def num_scores(self) -> int:
        """K, targets a row."""
        return 1 if self.value.ndim == 1 else self.value.shape[1]

    @property
    def num_leaves(self) -> int:
        """(M + 1) / 2: every split replaces one leaf by two."""
        return (self.num_nodes + 1) // 2

    @property
    def max_depth(self) -> int:
        """Levels of splits on the longest path; 0 for a root alone."""
        is_split = np.asarray(self.left) != LEAF
        depth, first, size = 0, 0, 1
        while splits := int(is_split[first : first + size].sum()):
            depth, first, size = depth + 1, first + size, 2 * splits
        return depth


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


def make_tree(**arrays: Any) -> RegressionTree:
    """A tree whose arrays cannot be written to."""
    for array in arrays.values():
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
    return RegressionTree(**arrays)


def check_tree(tree: Any) -> None:
    """A RegressionTree."""
    if not isinstance(tree, RegressionTree):
        raise TypeError(f"tree must be a RegressionTree, got {type(tree).__name__}")


def tree_scores(
    tree: RegressionTree, x: Any, offset: Any = None
) -> Float[Array, "N *K"]:
    """What :func:`jboost.predict` returns for a tree: the value of each row's leaf."""
    if offset is not None:
        raise ValueError(
            "offset must be None for a RegressionTree, which is fitted without one, "
            f"got {type(offset).__name__}"
        )
    return _apply(_values, tree, x)


def tree_leaves(tree: RegressionTree, x: Any) -> Int32[Array, " N"]:
    """What :func:`jboost.leaf_indices` returns for a tree: nodes, 0 <= node < M."""
    return _apply(_leaves, tree, x)


def check_plain(implementation: str | None) -> None:
    """Checks the implementation for a tree, which no kernel takes."""
    if implementation not in (None, "xla"):
        raise ValueError(
            f'implementation must be None or "xla" for a RegressionTree, got '
            f"{implementation!r}"
        )


def _apply(function, tree, x):
    """Checks, pads what is NumPy's so that programs are shared, runs, and cuts."""
    matrix = read_frame(x, "x", schema=tree.schema, least_rows=0).matrix
    num_rows, num_columns = matrix.shape
    if num_columns != tree.num_features:
        raise ValueError(
            f"x must have {tree.num_features} columns, as in training, got "
            f"{num_columns}"
        )
    # Statistics stay on the host.
    nodes = (tree.left, tree.feature, tree.threshold, tree.missing_left, tree.value)
    if all(isinstance(array, np.ndarray) for array in nodes):
        nodes = _pad_nodes(nodes)
    run = compiled(function)
    if not isinstance(matrix, np.ndarray):
        return run(nodes, matrix)
    short = padded_size(num_rows) - num_rows
    result = run(nodes, np.pad(matrix, ((0, short), (0, 0))))
    if isinstance(result, Tracer):
        return result[:num_rows]
    return jax.device_put(np.asarray(result)[:num_rows])  # a slice would be compiled


def _pad_nodes(nodes):
    left, *others = nodes
    # A power of two: nodes to which no row comes cost next to nothing.
    short = max(64, 1 << (len(left) - 1).bit_length()) - len(left)
    padded = [np.pad(left, (0, short), constant_values=LEAF)]
    for array in others:
        padded.append(np.pad(array, [(0, short)] + [(0, 0)] * (array.ndim - 1)))
    padded[-1] = padded[-1].astype(np.float32)
    return tuple(padded)


def _values(nodes, matrix):
    value = jnp.asarray(nodes[-1], jnp.float32)
    return value[_find_leaves(nodes, matrix)]


def _leaves(nodes, matrix):
    return _find_leaves(nodes, matrix)


def _find_leaves(nodes, matrix):
    """All rows go down together, until each has come to a leaf."""
    left, feature, threshold, missing_left, _ = map(jnp.asarray, nodes)
    threshold = jax.lax.stop_gradient(threshold.astype(jnp.float32))
    matrix = flush_denormals(jax.lax.stop_gradient(jnp.asarray(matrix)))
    rows = jnp.arange(matrix.shape[0], dtype=jnp.int32)

    def look(array, *index):
        return array.at[index].get(mode="promise_in_bounds")

    def descend(node):
        value = look(matrix, rows, look(feature, node))
        above = value > look(threshold, node)
        right = jnp.where(jnp.isnan(value), ~look(missing_left, node), above)
        child = look(left, node)
        return jnp.where(child == LEAF, node, child + right.astype(jnp.int32))

    def unfinished(node):
        return jnp.any(look(left, node) != LEAF)

    start = vary(jnp.zeros(matrix.shape[0], jnp.int32), *nodes[:-1], matrix)
    return jax.lax.while_loop(unfinished, descend, start)
