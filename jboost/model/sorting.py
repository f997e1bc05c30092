# SPDX-License-Identifier: Apache-2.0
"""One tree with its nodes sorted level by level, siblings side by side.

Drawings, tables, pruning and files of other libraries read trees in this order. Nodes
that the root does not lead to are left out.
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Int, UInt32

from jboost.model.nodes import LEAF, Nodes
from jboost.tables.categories import Categories
from jboost.trees.tree import NO_TERM


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
