# SPDX-License-Identifier: Apache-2.0
"""A single regression tree, as :func:`jboost.cart.fit_tree` returns it.

The nodes stand level by level, and each inner node holds the index of its left child,
so that a deep branch costs nothing where there are no nodes:

    node     0   1   2   3   4        0
    left     1  -1   3  -1  -1       / \\          right = left + 1
                                    1   2
                                       / \\
                                      3   4
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int32

from jboost.entry.messages import show_fields
from jboost.model.ensemble import Ensemble, Links, Model
from jboost.model.nodes import LEAF, Nodes
from jboost.tables.frames import Schema
from jboost.trees.tree import LeafSums

FORMAT_VERSION = 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # comparing arrays gives no single truth value
class RegressionTree(Model):
    """A tree of M nodes, breadth first: level by level, each from left to right.

    Node 0 is the root. Children follow their parent, and a right child follows its
    left sibling, so that the level of a node, its subtree and the order of the leaves
    can be read off ``left``. The arrays are read-only NumPy arrays. Statistics are
    float64; JAX functions, such as ``predict``, round them to float32.

    Attributes:
      left: the left child; -1 in a leaf. The right child is ``left + 1``.
      feature: the column that a node compares; 0 in a leaf.
      threshold: ``x <= threshold`` goes left; +inf in a leaf, and where a node
        separates values from missing values.
      missing_left: whether NaN goes left; True in a leaf.
      value: the weighted mean of the targets, of leaves and inner nodes; [M], or [M,
        K] for K targets per row.
      gain: the reduction of the squared error by the split; 0 in a leaf.
      squared_error: weighted sum of (target - value)^2 over rows (and targets).
      weight: the sum of the rows' weights.
      num_rows: the number of rows of positive weight.
      num_features: the number of columns that ``predict`` expects.
      format_version: the version of this layout.
      feature_names: the names of the columns; None if they are unknown.
      max_depth: the number of splits on the longest path; 0 if the root is a leaf.
        Computed from ``left``.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x, y = np.arange(4.0)[:, None], np.array([0.0, 1.0, 5.0, 5.0])
      >>> tree = jb.cart.fit_tree(x, y)
      >>> tree.left.tolist(), tree.value.tolist()
      ([1, 3, -1, -1, -1], [2.75, 0.5, 5.0, 0.0, 1.0])
    """

    single_tree: ClassVar[bool] = True

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
    # Static, because compiled programs need it where the arrays are traced.
    max_depth: int = field(default=0, metadata=dict(static=True, derived=True))

    def __post_init__(self) -> None:
        """Computes ``max_depth``, unless JAX builds the tree from other leaves."""
        if isinstance(self.left, np.ndarray) and self.left.ndim == 1:
            object.__setattr__(self, "max_depth", _find_depth(self.left != LEAF))

    def __repr__(self) -> str:
        return show_fields(self)

    @property
    def schema(self) -> Schema:
        """The schema of the tables that ``predict`` accepts."""
        return Schema(self.feature_names)

    @property
    def num_nodes(self) -> int:
        """M, the number of nodes."""
        return self.left.shape[0]

    @property
    def num_scores(self) -> int:
        """K, targets per row."""
        return 1 if self.value.ndim == 1 else self.value.shape[1]

    @property
    def num_leaves(self) -> int:
        """(M + 1) / 2: every split replaces one leaf by two."""
        return (self.num_nodes + 1) // 2

    def as_ensemble(self) -> Ensemble:
        """Returns one round: a linked tree that all targets share.

        NumPy arrays stay NumPy arrays, so that another number of nodes compiles
        nothing.
        """
        numpy = _namespace(self.left)
        left, num_scores = numpy.asarray(self.left), self.num_scores
        node = np.arange(self.num_nodes, dtype=np.int32)
        is_leaf = left == LEAF

        def convert(array: Any, dtype: Any) -> Any:
            return _namespace(array).asarray(array, dtype)[None, None]

        module = _namespace(is_leaf, self.value, self.weight)
        value = module.asarray(self.value, np.float32).reshape(-1, num_scores).T
        leaf_value = module.where(is_leaf[None], value, np.float32(0))[None]
        weight = module.where(is_leaf, self.weight, 0)
        cover = module.broadcast_to(convert(weight, np.float32), leaf_value.shape)
        return Ensemble(
            feature=convert(self.feature, np.int32),
            threshold=convert(self.threshold, np.float32),
            missing_left=convert(self.missing_left, bool),
            leaf_value=leaf_value,
            init_score=np.zeros(self.value.shape[1:], np.float32),  # pyright: ignore[reportArgumentType]
            num_features=self.num_features,
            feature_names=self.feature_names,
            # Squared error at score 0: the gradient is -target, the curvature 1.
            sums=LeafSums(
                gradient=-leaf_value * cover,
                curvature=cover,
                weight=cover,
                l2=np.zeros((1, num_scores), np.float32),  # pyright: ignore[reportArgumentType]
            ),
            links=Links(
                convert(numpy.where(is_leaf, node, left), np.int32), self.max_depth
            ),
        )

    def nodes(self, rounds: slice = slice(None)) -> Nodes:
        """Returns a tree for each target, all with the same splits."""
        del rounds  # there is only one

        def repeat(array: Any) -> Any:
            return np.broadcast_to(array, (self.num_scores, self.num_nodes))

        left, weight = np.asarray(self.left), np.asarray(self.weight)
        value = np.asarray(self.value).reshape(self.num_nodes, -1).T
        return Nodes(
            left=repeat(left),
            right=repeat(np.where(left == LEAF, LEAF, left + 1)),
            feature=repeat(self.feature),
            threshold=repeat(self.threshold),
            missing_left=repeat(self.missing_left),
            value=value,
            gradient=-value * weight,  # squared error at score 0
            curvature=repeat(weight),
            weight=repeat(weight),
            l2=repeat(np.float64(0)),
            gain=repeat(self.gain),
        )


def _find_depth(is_split):
    """Returns the number of levels of splits of a tree in breadth-first order."""
    depth, first, size = 0, 0, 1
    while splits := int(is_split[first : first + size].sum()):
        depth, first, size = depth + 1, first + size, 2 * splits
    return depth


def _namespace(*arrays: Any) -> Any:
    """jax.numpy where an array is traced, else NumPy, which compiles nothing."""
    return jnp if any(isinstance(array, Tracer) for array in arrays) else np
