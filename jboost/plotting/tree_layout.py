# SPDX-License-Identifier: Apache-2.0
"""Where the nodes of a tree stand: a tidy layout.

In: for every node its parent, depth and size. Out: places, such that no two nodes
touch, parents stand midway between their children, and subtrees of equal shape are
drawn alike, as close together as their outlines allow (Reingold and Tilford 1981,
Tidier drawings of trees).
"""

from collections.abc import Sequence

import numpy as np


def place_across(
    parents: Sequence[int], sizes: Sequence[float], gap: float
) -> np.ndarray:
    """Where nodes stand across the direction in which the tree grows.

    Args:
      parents: the place of each node's parent, before its own; -1 of the first node.
        A node has no children or two, the left one first.
      sizes: of the nodes, in this direction.
      gap: between neighbors.

    Returns:
      The middle of each node; the least edge of all is 0.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    offset = np.zeros(len(parents))  # of a node from its parent
    # Outlines of the subtrees, level by level from their root: (least, greatest) edge.
    # Kept deepest level first, so that a level is added at the end.
    outlines: list[tuple[list[float], list[float]] | None] = [None] * len(parents)
    for node in reversed(range(len(parents))):
        low, high = [], []
        if children[node]:
            left, right = children[node]
            offset[left], offset[right], low, high = _join(
                outlines[left], outlines[right], gap
            )
            outlines[left] = outlines[right] = None
        half = sizes[node] / 2
        outlines[node] = ([*low, -half], [*high, half])
    places = np.zeros(len(parents))
    for node, parent in enumerate(parents):
        if parent >= 0:
            places[node] = places[parent] + offset[node]
    return places - np.min(places - np.asarray(sizes) / 2)


def _join(left, right, gap):
    """Offsets of two subtrees from the middle between them, and their outline."""
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
    """Where levels begin in the direction in which the tree grows, by depth.

    A level is as wide as its widest node.
    """
    widest = np.zeros(max(depths) + 1)
    np.maximum.at(widest, np.asarray(depths), np.asarray(sizes))
    return np.concatenate([[0.0], np.cumsum(widest[:-1] + gap)])
