# SPDX-License-Identifier: Apache-2.0
"""More rounds after those of a model.

In: two models on the same features. Out: one with the trees of both. Trees of
different depth are brought to one layout; no prediction changes by that.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jboost.model.ensemble import Ensemble, Links


def append_rounds(before: Ensemble, after: Ensemble) -> Ensemble:
    """The rounds of ``before``, then those of ``after``, from the score of ``before``.

    Heaps become as deep as the deeper ones; beside linked trees they are linked, too.
    Scores that share trees in one model only have trees of their own in the result.
    What the leaves were fitted to is kept if both models know it.
    """
    if before.shares_structure != after.shares_structure:
        before, after = _repeat_structure(before), _repeat_structure(after)
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
    """Returns a model with linked trees; heaps keep the indices of their nodes."""
    if model.links is not None:
        return model
    nodes = model.nodes()
    is_leaf = nodes.is_leaf

    def by_round(array, size=model.num_scores):
        rounds = array.reshape(model.num_rounds, model.num_scores, *array.shape[1:])
        return rounds[:, :size]

    by_tree: Any = partial(by_round, size=model.feature.shape[1])

    def of_leaves(values) -> Any:
        return by_round(np.where(is_leaf, values, 0).astype(np.float32))

    sums = model.sums
    if sums is not None:
        sums = sums._replace(
            gradient=of_leaves(nodes.gradient),
            curvature=of_leaves(nodes.curvature),
            weight=of_leaves(nodes.weight),
        )
    left_codes = None if nodes.left_codes is None else by_tree(nodes.left_codes)
    own = np.arange(nodes.left.shape[1], dtype=np.int32)
    left_child = np.where(is_leaf, own, nodes.left)
    return replace(
        model,
        feature=by_tree(nodes.feature),
        threshold=by_tree(nodes.threshold),
        missing_left=by_tree(nodes.missing_left),
        leaf_value=of_leaves(nodes.value),
        sums=sums,
        left_codes=left_codes,
        links=Links(by_tree(left_child), model.max_depth),
    )


def _repeat_structure(model: Ensemble) -> Ensemble:
    """Returns the same model with a tree for each score, R rounds of K trees."""
    if not model.shares_structure:
        return model
    names = ("feature", "threshold", "missing_left", "left_codes", "links")
    parts = {name: getattr(model, name) for name in names}
    repeat = partial(np.repeat, repeats=model.num_scores, axis=1)
    return replace(model, **jax.tree.map(repeat, parts))
