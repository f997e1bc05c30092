# SPDX-License-Identifier: Apache-2.0
"""The nodes of trees in one form, whether the trees are in heap order or linked.

Importance, drawings, tables, pruning and files of other libraries read trees in this
form: NumPy arrays of children, splits, leaf values and training sums. The nodes of one
tree are sorted level by level, siblings side by side.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Int32, UInt32

from jboost.tables.categories import Categories
from jboost.trees.tree import NO_TERM, Slopes

LEAF = -1  # the child of a node that has no children


class Nodes(NamedTuple):
    """A tree of M nodes, or several trees along a leading axis T.

    Node 0 is the root. Nodes that the root does not lead to are leaves of value 0.

    Attributes:
      left, right: the indices of a node's children; LEAF in a leaf.
      feature: index of the feature; 0 in a leaf.
      threshold: ``x <= threshold`` goes left; NaN if ``left_codes`` decides.
      missing_left: whether NaN goes left; True in a leaf.
      value: leaf value; meaningless in other nodes unless the model is a single tree.
      gradient, curvature, weight: sums over the training rows of a node; NaN where
        they are not known.
      left_codes: codes that go left, as bits; see :class:`jboost.Ensemble`. None if no
        split is categorical.
      l2: the penalty added to the curvature in a gain; NaN if unknown.
      gain: reduction of the squared error by a split; None if unknown.
      exact_threshold: the threshold before it was rounded, from readers only.
      slopes: the linear terms of leaves, [T, M, P]; None if all leaves are constant.
    """

    left: Int32[np.ndarray, "*T M"]
    right: Int32[np.ndarray, "*T M"]
    feature: Int32[np.ndarray, "*T M"]
    threshold: Float[np.ndarray, "*T M"]
    missing_left: Bool[np.ndarray, "*T M"]
    value: Float[np.ndarray, "*T M"]
    gradient: Float[np.ndarray, "*T M"]
    curvature: Float[np.ndarray, "*T M"]
    weight: Float[np.ndarray, "*T M"]
    left_codes: UInt32[np.ndarray, "*T M W"] | None = None
    l2: Float[np.ndarray, "*T M"] | None = None
    gain: Float[np.ndarray, "*T M"] | None = None
    exact_threshold: Float[np.ndarray, "*T M"] | None = None
    slopes: Slopes | None = None

    @property
    def is_leaf(self) -> Bool[np.ndarray, "*T M"]:
        """Mask of the nodes that are leaves."""
        return self.left == LEAF

    @property
    def is_split(self) -> Bool[np.ndarray, "*T M"]:
        """Mask of the nodes that are split; other inner nodes send all rows left."""
        return ~self.is_leaf & ~((self.threshold == np.inf) & self.missing_left)


def list_nodes(model: Any, rounds: slice = slice(None)) -> Nodes:
    """Returns the nodes of the T = R * K trees of an Ensemble, round by round.

    A tree that K scores share is listed for each of them, with its leaves.
    """

    num_scores = model.num_scores

    def flat(array: Any) -> np.ndarray:
        array = np.asarray(array)[rounds]  # [R, K, ...], or [R, 1, ...]
        array = np.broadcast_to(array, (len(array), num_scores, *array.shape[2:]))
        return array.reshape(-1, *array.shape[2:])

    threshold, missing_left = flat(model.threshold), flat(model.missing_left)
    if model.links is None:
        left, has_value, source = _link_heaps(~((threshold == np.inf) & missing_left))
        sum_up = _sum_heaps
    else:
        child = flat(model.links.left_child)
        source = np.arange(child.shape[1], dtype=np.int32)
        left = np.where(child == source, np.int32(LEAF), child)
        has_value, sum_up = left == LEAF, _sum_linked
    is_leaf = left == LEAF

    def inner(array, fill):
        """Pads to M nodes; leaves hold ``fill``."""
        widths = [(0, 0)] * array.ndim
        widths[1] = (0, left.shape[1] - array.shape[1])
        array = np.pad(array, widths)
        mask = is_leaf.reshape(*is_leaf.shape, *(1,) * (array.ndim - 2))
        return np.where(mask, np.asarray(fill, array.dtype), array)

    def leaves(array, fill=0) -> Any:
        """Returns the values of leaves, and ``fill`` for other nodes."""
        array = flat(array)[:, source]
        mask = has_value.reshape(*has_value.shape, *(1,) * (array.ndim - 2))
        return np.where(mask, array, array.dtype.type(fill))

    def sums(name):
        if model.sums is None:
            return np.full(left.shape, np.nan)
        found = leaves(getattr(model.sums, name)).astype(np.float64)
        return sum_up(found, left)

    codes, slopes = model.left_codes, model.slopes
    if slopes is not None:
        numbers = map(leaves, (slopes.slope, slopes.center))
        slopes = Slopes(leaves(slopes.feature, NO_TERM), *numbers)
    l2 = np.nan if model.sums is None else flat(model.sums.l2)[:, None]
    return Nodes(
        left=left,
        right=np.where(is_leaf, LEAF, left + 1).astype(np.int32),
        feature=inner(flat(model.feature), 0),
        threshold=inner(threshold, np.inf),
        missing_left=inner(missing_left, True),
        value=leaves(model.leaf_value),
        gradient=sums("gradient"),
        curvature=sums("curvature"),
        weight=sums("weight"),
        left_codes=None if codes is None else inner(flat(codes), 0),
        l2=np.broadcast_to(np.asarray(l2, np.float64), left.shape),
        slopes=slopes,
    )


def _link_heaps(split):
    """Finds which nodes of trees in heap order are reached, and which are leaves.

    A node that is not split is a leaf, and the nodes below it are not reached, unless
    one of them is split: then it passes all its rows on to the left.

    Args:
      split: which inner nodes are split, [T, I].

    Returns:
      The left children [T, M]; which nodes are reached leaves [T, M]; and for each
      node the leaf of the heap that rows reach by always going left, [M].
    """
    num_inner = split.shape[1]
    depth, num_nodes = num_inner.bit_length(), 2 * num_inner + 1
    node = np.arange(num_nodes, dtype=np.int32)
    inner = np.pad(split, ((0, 0), (0, num_nodes - num_inner)))
    levels = _levels(num_nodes)
    for above, below in reversed([*pairwise(levels)]):
        inner[:, above] |= inner[:, below][:, ::2]
    reached = np.zeros_like(inner)
    reached[:, 0] = True
    for above, below in pairwise(levels):
        going_on = reached[:, above] & inner[:, above]
        reached[:, below] = np.repeat(going_on, 2, axis=1)
    inner &= reached
    height = depth + 1 - np.array([(i + 1).bit_length() for i in node.tolist()])
    leftmost = ((node + 1) << height) - 2**depth
    return np.where(inner, 2 * node + 1, LEAF), reached & ~inner, leftmost


def _levels(num_nodes):
    depth = (num_nodes + 1).bit_length() - 1
    return [slice(2**level - 1, 2 ** (level + 1) - 1) for level in range(depth)]


def _sum_heaps(sums, left):
    """Sets each inner node of heaps to the sum of its children."""
    for above, below in reversed([*pairwise(_levels(left.shape[1]))]):
        pairs = sums[:, below]
        sums[:, above] += pairs[:, 0::2] + pairs[:, 1::2]
    return sums


def _sum_linked(sums, left):
    """Sets each inner node of linked trees to the sum of its children."""
    tree = np.arange(len(sums))
    # Children have higher indices than their parent.
    for node in range(left.shape[1] - 2, -1, -1):
        child = left[:, node]
        below = sums[tree, child] + sums[tree, np.minimum(child + 1, left.shape[1] - 1)]
        sums[:, node] = np.where(child == LEAF, sums[:, node], below)
    return sums


def take_tree(nodes: Nodes, number: int) -> Nodes:
    """Returns one of several trees, sorted; see :func:`sort_nodes`.

    Nodes that only pass rows on are left out.
    """
    tree = jax.tree.map(lambda array: array[number], nodes)
    kept = tree.is_leaf | tree.is_split
    target = np.where(kept, np.arange(len(kept)), tree.left)
    while (target != target[target]).any():
        target = target[target]
    left = np.where(tree.is_leaf, LEAF, target[tree.left])
    right = np.where(tree.is_leaf, LEAF, target[tree.right])
    tree = tree._replace(left=left.astype(np.int32), right=right.astype(np.int32))
    return sort_nodes(tree, int(target[0]))[0]


def sort_nodes(tree: Nodes, root: int = 0) -> tuple[Nodes, int]:
    """Sorts the nodes of one tree level by level; also returns its depth.

    Drops nodes that the root does not lead to; refuses nodes that form no tree.
    """
    levels, seen = [np.array([root])], 1
    while True:
        inner = levels[-1][~tree.is_leaf[levels[-1]]]
        if not inner.size:
            break
        below = np.stack([tree.left[inner], tree.right[inner]], axis=1).reshape(-1)
        seen += below.size
        if below.min() < 0 or below.max() >= len(tree.left) or seen > len(tree.left):
            raise ValueError(
                "the nodes of a tree must form one, each child below one parent; these "
                f"{len(tree.left)} do not"
            )
        levels.append(below)
    order = np.concatenate(levels)
    if len(np.unique(order)) < len(order):
        raise ValueError("the nodes of a tree must each have one parent")
    index = np.full(len(tree.left), LEAF, np.int32)
    index[order] = np.arange(order.size)
    tree = jax.tree.map(lambda array: array[order], tree)
    left = np.where(tree.is_leaf, LEAF, index[tree.left])
    right = np.where(tree.is_leaf, LEAF, left + 1).astype(np.int32)
    return tree._replace(left=left, right=right), len(levels) - 1


def find_parents(
    left: Int[np.ndarray, " M"],
) -> tuple[Int[np.ndarray, " M"], Int[np.ndarray, " M"]]:
    """Returns the parent and the depth of each node of a sorted tree.

    The right child follows the left one. The parent of the root is LEAF.
    """
    parent, depth = np.full(len(left), LEAF), np.zeros(len(left), np.int64)
    level = np.zeros(1, np.int64)
    while (inner := level[left[level] != LEAF]).size:
        level = np.concatenate([left[inner], left[inner] + 1])
        parent[level] = np.tile(inner, 2)
        depth[level] = depth[parent[level]] + 1
    return parent, depth


def list_terms(tree: Nodes, node: int) -> list[tuple[int, float, float]]:
    """Returns the feature, slope and center of each linear term of a node."""
    if tree.slopes is None:
        return []
    terms = zip(*(array[node].tolist() for array in tree.slopes), strict=True)
    return [term for term in terms if term[0] != NO_TERM]


def split_values(
    categories: Categories, feature: int, words: UInt32[np.ndarray, " W"]
) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"], Int[np.ndarray, " u"]]:
    """Returns the values that go left at a split, go right, and are not known."""
    row = np.asarray(categories.codes)[categories.features.index(feature)]
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
    left = (row < bits.size) & (bits[np.minimum(row, bits.size - 1)] == 1)
    known = row > 0
    right = np.flatnonzero(known & ~left)
    return np.flatnonzero(known & left), right, np.flatnonzero(~known)


def name_values(
    categories: Categories, feature: int, values: Int[np.ndarray, " n"]
) -> list[Any]:
    """Returns the categories that values of a feature represent, or else the values."""
    names = categories.values and categories.values[categories.features.index(feature)]
    return [v if names is None else names[v] for v in values.tolist()]
