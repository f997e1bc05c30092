# SPDX-License-Identifier: Apache-2.0
"""More rounds after those of a model.

In: two models on the same features. Out: one with the trees of both. Trees of
different depth are brought to one layout; no prediction changes by that.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from jboost.model.ensemble import Ensemble, Links


def append_rounds(before: Ensemble, after: Ensemble) -> Ensemble:
    """The rounds of ``before``, then those of ``after``, from the score of ``before``.

    Heaps become as deep as the deeper ones; beside linked trees they are linked, too.
    What the leaves were fitted to is kept if both models know it.
    """
    linked = before.links is not None or after.links is not None
    if linked:
        before, after = _link(before), _link(after)
        width = max(before.feature.shape[2], after.feature.shape[2])
    else:
        width = 2 ** max(before.max_depth, after.max_depth) - 1
    words = max(_words(before), _words(after))
    parts = [_take_arrays(model, width, words) for model in (before, after)]
    arrays: dict[str, Any] = {}
    for name, first in parts[0].items():
        second = parts[1][name]
        join = lambda a, b: np.concatenate([a, b])  # noqa: E731
        known = first is not None and second is not None
        arrays[name] = jax.tree.map(join, first, second) if known else None
    arrays = jax.device_put(arrays)
    left_child = arrays.pop("left_child")
    links = None
    if left_child is not None:
        depth = max(before.max_depth, after.max_depth)
        links = Links(left_child=left_child, max_depth=depth)
    names = after.feature_names or before.feature_names
    return replace(before, **arrays, links=links, feature_names=names)


def _words(model):
    """Words of the sets of categories."""
    return 0 if model.left_codes is None else model.left_codes.shape[3]


def _take_arrays(model, width, words):
    """What has a place per round, with ``width`` nodes a tree."""
    short = width - model.feature.shape[2]

    def pad(array, fill):
        array = np.asarray(array)
        return np.pad(array, ((0, 0), (0, 0), (0, short)), constant_values=fill)

    arrays: dict[str, Any] = dict(
        feature=pad(model.feature, 0),
        threshold=pad(model.threshold, np.inf),
        missing_left=pad(model.missing_left, True),
        left_codes=None,
        left_child=None,
    )
    if words:
        codes = np.zeros((*arrays["feature"].shape, words), np.uint32)
        if model.left_codes is not None:
            old = np.asarray(model.left_codes)
            codes[:, :, : old.shape[2], : old.shape[3]] = old
        arrays["left_codes"] = codes
    if model.links is not None:
        node = np.arange(width, dtype=np.int32)
        left_child = pad(model.links.left_child, 0)
        arrays["left_child"] = np.where(node < width - short, left_child, node)

    def widen(values):
        if model.links is not None:
            return pad(values, 0)
        values = np.asarray(values)  # a leaf's rows all go left from where it was
        wide = np.zeros((*values.shape[:2], width + 1), values.dtype)
        wide[:, :, :: (width + 1) // values.shape[2]] = values
        return wide

    arrays["leaf_value"] = widen(model.leaf_value)
    arrays["sums"] = _map_leaves(widen, model.sums)
    return arrays


def _map_leaves(change, sums):
    """``change`` made to what each leaf has; l2 is a tree's."""
    if sums is None:
        return None
    return sums._replace(
        gradient=change(sums.gradient),
        curvature=change(sums.curvature),
        weight=change(sums.weight),
        l2=np.asarray(sums.l2),
    )


def _link(model: Ensemble) -> Ensemble:
    """A model whose trees are linked; heaps keep their numbers of nodes.

    A node that a heap does not split is a leaf, and those below it are not reached;
    unless one is split to which all its rows go on.
    """
    if model.links is not None:
        return model
    depth, num_inner = model.max_depth, model.feature.shape[2]
    num_nodes = 2 * num_inner + 1
    node = np.arange(num_nodes, dtype=np.int32)
    extend = ((0, 0), (0, 0), (0, num_nodes - num_inner))
    inner = np.pad(np.asarray(model.is_split), extend)
    levels = [slice(2**level - 1, 2 ** (level + 1) - 1) for level in range(depth + 1)]
    for above, below in reversed([*pairwise(levels)]):
        inner[:, :, above] |= inner[:, :, below][:, :, ::2]
    reached = np.zeros_like(inner)
    reached[:, :, 0] = True
    for above, below in pairwise(levels):
        going_on = reached[:, :, above] & inner[:, :, above]
        reached[:, :, below] = np.repeat(going_on, 2, axis=2)
    inner &= reached
    # All rows of a node that is not split come to the leftmost leaf below it.
    height = (
        depth + 1 - np.array([(number + 1).bit_length() for number in node.tolist()])
    )
    leftmost = ((node + 1) << height) - 2**depth
    leaf = reached & ~inner

    def spread(values):
        return np.where(leaf, np.asarray(values)[:, :, leftmost], np.float32(0))

    def fill(array, value):
        array = np.pad(np.asarray(array), extend)
        return np.where(inner, array, np.asarray(value, array.dtype))

    arrays: dict[str, Any] = dict(
        feature=fill(model.feature, 0),
        threshold=fill(model.threshold, np.inf),
        missing_left=fill(model.missing_left, True),
        leaf_value=spread(model.leaf_value),
        sums=_map_leaves(spread, model.sums),
    )
    if model.left_codes is not None:
        arrays["left_codes"] = np.pad(np.asarray(model.left_codes), (*extend, (0, 0)))
    left_child: Any = np.where(inner, 2 * node + 1, node).astype(np.int32)
    return replace(model, **arrays, links=Links(left_child, depth))
