# SPDX-License-Identifier: Apache-2.0
"""Trees as lists of nodes, which is how other libraries keep them.

In: trees, a list of nodes each. Out: an Ensemble; and back, the nodes of an Ensemble
without those that are not split.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Float32, Int32, UInt32

from jboost.interchange.category_sets import CategorySplit, check_growth
from jboost.model.ensemble import Ensemble, Links
from jboost.model.files import check_contents
from jboost.tables.categories import Categories
from jboost.tables.sparse import Absent
from jboost.trees.tree import LeafSums

LEAF = -1
# Up to here trees become heaps: their kernel is the faster one, and the nodes that are
# not split take a bearable amount of memory.
_HEAP_DEPTH = 8
_TINY = np.finfo(np.float32).tiny
_OF_LEAVES = ("value", "gradient", "curvature", "weight")
_NODE_BYTES = 30  # of one node in the arrays, without its set of categories


class Nodes(NamedTuple):
    """One tree; node 0 is the root.

    Attributes:
      left, right: the numbers of a node's children; LEAF in a leaf.
      feature: 0 in a leaf.
      threshold: ``x <= threshold`` goes left; NaN where ``left_codes`` decides.
      missing_left: where NaN goes.
      value: of a leaf; what it is of other nodes does not matter.
      gradient, curvature, weight: sums over the rows of the node that the tree learned
        from; NaN where that is not known.
      left_codes: as in :class:`jboost.Ensemble`; None where no split is categorical.
    """

    left: Int32[np.ndarray, " M"]
    right: Int32[np.ndarray, " M"]
    feature: Int32[np.ndarray, " M"]
    threshold: Float32[np.ndarray, " M"]
    missing_left: Bool[np.ndarray, " M"]
    value: Float32[np.ndarray, " M"]
    gradient: Float[np.ndarray, " M"]
    curvature: Float[np.ndarray, " M"]
    weight: Float[np.ndarray, " M"]
    left_codes: UInt32[np.ndarray, "M W"] | None = None

    @property
    def is_leaf(self) -> Bool[np.ndarray, " M"]:
        """Which nodes are leaves."""
        return self.left == LEAF


def sort_nodes(tree: Nodes, root: int = 0) -> tuple[Nodes, int]:
    """The nodes level by level, a right child behind its left one; and the depth.

    Nodes that the root does not lead to are dropped.

    Raises:
      ValueError: the nodes form no tree.
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
    place = np.full(len(tree.left), LEAF, np.int32)
    place[order] = np.arange(order.size)
    tree = jax.tree.map(lambda array: array[order], tree)
    left = np.where(tree.is_leaf, LEAF, place[tree.left])
    right = np.where(tree.is_leaf, LEAF, left + 1).astype(np.int32)
    return tree._replace(left=left, right=right), len(levels) - 1


def round_down(threshold: Float[np.ndarray, " M"]) -> Float32[np.ndarray, " M"]:
    """The greatest float32 that is not above; denormals are as 0.

    x <= threshold then says the same of all x that are float32.
    """
    with np.errstate(over="ignore"):
        near = threshold.astype(np.float32)
        below = np.nextafter(near, np.float32(-np.inf))
    low = np.where(near > threshold, below, near)
    return np.where((low < 0) & (low > -_TINY), -_TINY, low)


def place_sets(
    trees: Sequence[Nodes],
    splits: Sequence[CategorySplit],
    words: UInt32[np.ndarray, "S W"],
    categories: Categories | None,
) -> list[Nodes]:
    """The trees with the codes that go left at their categorical splits.

    Raises:
      ValueError: a split compares the values of a categorical feature with a threshold,
        which codes are not in the order of; or the arrays would be too large.
    """
    places = () if categories is None else categories.features
    for tree in trees:
        numeric = ~tree.is_leaf & ~np.isnan(tree.threshold)
        if np.isin(tree.feature[numeric], places).any():
            raise ValueError("a tree has a threshold for a categorical feature")
    if not words.shape[1]:
        return list(trees)
    num_nodes = sum(len(tree.left) for tree in trees)
    held = _NODE_BYTES * num_nodes + words.nbytes
    check_growth(4 * words.shape[1] * num_nodes, held)
    sets = [np.zeros((len(tree.left), words.shape[1]), np.uint32) for tree in trees]
    for split, own in zip(splits, words, strict=True):
        sets[split.tree][split.node] = own
    pairs = zip(trees, sets, strict=True)
    return [tree._replace(left_codes=codes) for tree, codes in pairs]


def list_trees(model: Ensemble) -> list[Nodes]:
    """The trees of a model in the order of rounds, K each, sorted.

    Without nodes that are not split. The sums of inner nodes are those of the leaves
    below.
    """
    model = jax.device_get(model)
    places = np.ndindex(model.num_rounds, model.num_scores)
    return [_list_nodes(model, at) for at in places]


def _list_nodes(model, at):
    split = model.is_split[at]
    if model.links is None:
        nodes = np.arange(2 * len(split) + 1)
        left = np.where(nodes < len(split), 2 * nodes + 1, LEAF)
        leaf_place = np.maximum(nodes - len(split), 0)
    else:
        left = model.links.left_child[at]
        leaf_place = np.arange(len(left))
        left = np.where(left == leaf_place, LEAF, left)
    root, left, right = _contract(left, split)
    inner = np.minimum(np.arange(len(left)), len(split) - 1)

    def sums(name):
        if model.sums is None:
            return np.full(len(left), np.nan)
        return getattr(model.sums, name)[at].astype(np.float64)[leaf_place]

    codes = model.left_codes
    tree = Nodes(
        left=left.astype(np.int32),
        right=right.astype(np.int32),
        feature=model.feature[at][inner],
        threshold=model.threshold[at][inner],
        missing_left=model.missing_left[at][inner],
        value=model.leaf_value[at][leaf_place],
        gradient=sums("gradient"),
        curvature=sums("curvature"),
        weight=sums("weight"),
        left_codes=None if codes is None else codes[at][inner],
    )
    tree, _ = sort_nodes(tree, root)
    for name in ("gradient", "curvature", "weight"):
        _sum_up(tree.left, getattr(tree, name))
    return tree


def _contract(left, split):
    """The root, and children, of a tree whose right children follow the left ones.

    What is not split hands all down to its left child, which takes its place.
    """
    kept = np.append(split, np.zeros(len(left) - len(split), bool)) | (left == LEAF)
    target = np.where(kept, np.arange(len(left)), left)
    while (target != target[target]).any():
        target = target[target]
    right = np.where(left == LEAF, LEAF, target[np.minimum(left + 1, len(left) - 1)])
    return int(target[0]), np.where(left == LEAF, LEAF, target[left]), right


def _sum_up(left, sums):
    """Gives each node that is no leaf, later ones first, the sum of its children."""
    for node in np.flatnonzero(left != LEAF)[::-1]:
        sums[node] = sums[left[node]] + sums[left[node] + 1]


def build_ensemble(
    trees: Sequence[Nodes],
    *,
    init_score: Float32[np.ndarray, " K"],
    num_features: int,
    absent: Absent,
    feature_names: tuple[str, ...] | None = None,
    categories: Categories | None = None,
) -> Ensemble:
    """A model of trees in the order of rounds, K trees each.

    In heap order where the deepest has at most 8 levels, else linked.

    Args:
      init_score: [K]; K = 1 makes a model of one score a row.
      absent: how the other library reads entries that a sparse matrix does not store.

    Raises:
      ValueError: the nodes of a tree form none, or look at features that are not there;
        the arrays would be many times what the trees are; or the model is not one that
        :func:`jboost.load` would accept.
    """
    pairs = [sort_nodes(tree) for tree in trees]
    for tree, _ in pairs:
        features = tree.feature[~tree.is_leaf]
        if features.size and not 0 <= features.min() <= features.max() < num_features:
            raise ValueError(f"a tree looks at features beyond the {num_features}")
    depth = max([1, *(depth for _, depth in pairs)])
    linked = depth > _HEAP_DEPTH
    _check_arrays([tree for tree, _ in pairs], depth, linked)
    arrays = _allocate([tree for tree, _ in pairs], depth, linked)
    for number, (tree, _) in enumerate(pairs):
        inner, leaves = _find_places(tree, depth, linked)
        for name, array in arrays.items():
            place = leaves if name in _OF_LEAVES else inner
            kept = tree.is_leaf if name in _OF_LEAVES else ~tree.is_leaf
            own = getattr(tree, name)
            if own is not None:
                array[number, place[kept]] = own[kept]
    shape = (len(trees) // len(init_score), len(init_score))
    arrays = {key: a.reshape(*shape, *a.shape[1:]) for key, a in arrays.items()}
    start: Any = np.float32(init_score if len(init_score) > 1 else init_score[0])
    unknown: Any = np.full(shape, np.nan, np.float32)
    model = Ensemble(
        feature=arrays["feature"],
        threshold=arrays["threshold"],
        missing_left=arrays["missing_left"],
        leaf_value=arrays["value"],
        init_score=start,
        num_features=num_features,
        feature_names=feature_names,
        absent=absent,
        sums=LeafSums(
            gradient=arrays["gradient"],
            curvature=arrays["curvature"],
            weight=arrays["weight"],
            l2=unknown,
        ),
        left_codes=arrays.get("left_codes"),
        categories=categories,
        links=Links(arrays["left"], depth) if linked else None,
    )
    check_contents(model)
    return jax.device_put(model)


def _check_arrays(trees, depth, linked):
    """All trees take as much room as the largest."""
    each = max((len(t.left) for t in trees), default=0) if linked else 2**depth
    words = [0 if t.left_codes is None else t.left_codes.shape[1] for t in trees]
    size = _NODE_BYTES + 4 * max(words, default=0)
    pairs = zip(trees, words, strict=True)
    held = sum(len(tree.left) * (_NODE_BYTES + 4 * own) for tree, own in pairs)
    check_growth(len(trees) * each * size, held)


def _allocate(trees, depth, linked) -> dict[str, Any]:
    """Arrays [trees, ...] in which no node is split and no leaf has a value."""
    num_inner, num_leaves = 2**depth - 1, 2**depth
    if linked:
        num_inner = num_leaves = max(len(tree.left) for tree in trees)
    inner, leaves = (len(trees), num_inner), (len(trees), num_leaves)
    arrays: dict[str, Any] = dict(
        left=np.tile(np.arange(num_inner, dtype=np.int32), (len(trees), 1)),
        feature=np.zeros(inner, np.int32),
        threshold=np.full(inner, np.inf, np.float32),
        missing_left=np.ones(inner, bool),
        **{name: np.zeros(leaves, np.float32) for name in _OF_LEAVES},
    )
    sets = [tree.left_codes for tree in trees if tree.left_codes is not None]
    if sets:
        arrays["left_codes"] = np.zeros((*inner, sets[0].shape[1]), np.uint32)
    return arrays


def _find_places(tree, depth, linked):
    """Where the nodes of a sorted tree go, as inner nodes and as leaves."""
    place = np.arange(len(tree.left))
    if linked:
        return place, place
    place[:] = 0
    for node in np.flatnonzero(~tree.is_leaf):
        place[tree.left[node]] = 2 * place[node] + 1
        place[tree.right[node]] = 2 * place[node] + 2
    # Node i lies on level l = floor(log2(i + 1)), as number i + 1 - 2^l.
    level = np.log2(place + 1).astype(np.int64)
    return place, (place + 1 - (1 << level)) << (depth - level)
