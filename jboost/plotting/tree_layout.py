# SPDX-License-Identifier: Apache-2.0
"""Computes a tidy layout of a tree.

In: the parent, depth and size of every node. Out: positions. No two nodes touch,
parents are centered over their children, subtrees of equal shape look the same, and
subtrees are as close together as their outlines allow (Reingold and Tilford 1981,
Tidier drawings of trees).
"""

from collections.abc import Sequence

import numpy as np


def place_across(
    parents: Sequence[int], sizes: Sequence[float], gap: float
) -> np.ndarray:
    """Returns positions perpendicular to the direction in which the tree grows.

    Args:
      parents: the index of each node's parent, which precedes the node; -1 for the
        root, which is first. A node has no children or two, the left one first.
      sizes: the sizes of the nodes in this direction.
      gap: the minimum distance between neighbors.

    Returns:
      The center of each node; the smallest edge is at 0.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    offset = np.zeros(len(parents))  # of a node from its parent
    # For each subtree, the smallest and largest edge of each level, relative to its
    # root. The deepest level comes first, so adding a level is an append.
    outlines: list[tuple[list[float], list[float]] | None] = [None] * len(parents)
    for node in reversed(range(len(parents))):
        low, high = [], []
        if children[node]:
            left, right = children[node]
            offset[left], offset[right], low, high = _join(
                outlines[left], outlines[right], gap
            )
            outlines[left] = outlines[right] = None  # no longer needed: frees memory
        half = sizes[node] / 2
        outlines[node] = ([*low, -half], [*high, half])
    places = np.zeros(len(parents))
    for node, parent in enumerate(parents):
        if parent >= 0:
            places[node] = places[parent] + offset[node]
    return places - np.min(places - np.asarray(sizes) / 2)


def _join(left, right, gap):
    """Returns the offsets of two subtrees from their parent, and the joint outline."""
    (left_low, left_high), (right_low, right_high) = left, right
    common = min(len(left_low), len(right_low))
    reach = np.subtract(left_high[-common:], right_low[-common:])
    half = (float(reach.max()) + gap) / 2
    low = [edge + half for edge in right_low[:-common]]
    low += [edge - half for edge in left_low]
    if len(left_low) < len(right_low):
        high = [edge + half for edge in right_high]
    else:
        high = [edge - half for edge in left_high[: len(left_high) - common]]
        high += [edge + half for edge in right_high]
    return -half, half, low, high


def place_along(
    depths: Sequence[int], sizes: Sequence[float], gap: float
) -> np.ndarray:
    """Returns the start of each level in the direction in which the tree grows.

    Args:
      depths: the depth of each node.
      sizes: the sizes of the nodes in this direction; a level is as wide as its widest
        node.
      gap: the distance between levels.
    """
    widest = np.zeros(max(depths) + 1)
    np.maximum.at(widest, np.asarray(depths), np.asarray(sizes))
    return np.concatenate([[0.0], np.cumsum(widest[:-1] + gap)])
