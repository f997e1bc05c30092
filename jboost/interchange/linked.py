# SPDX-License-Identifier: Apache-2.0
"""Converts lists of nodes, the tree format of other libraries, to and from Ensembles.

Before that: failures to read become a FileError; splits that list values become sets of
codes, with one code for all unlisted values; columns too fine for float32 are found.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Float32, Int

from jboost.codes.binning import MOST_CELLS, MOST_VALUES
from jboost.model.containers import FileError
from jboost.model.ensemble import Ensemble, Links
from jboost.model.files import check_contents
from jboost.model.nodes import Nodes, sort_nodes, take_tree
from jboost.model.wide_thresholds import pack_float64
from jboost.tables.categories import WORD, Categories, Category
from jboost.tables.sparse import Absent
from jboost.trees.tree import NO_TERM, LeafSums, Slopes

_DAMAGE = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class ForeignError(ValueError):
    """A valid model that cannot be converted.

    The message is a predicate: :func:`report_failures` puts the model's name before it.
    """


@contextmanager
def report_failures(name: str, library: str) -> Iterator[None]:
    """Raises a FileError if the code in the context fails to read a model.

    Args:
      name: the name of the file, or the type of the model in memory.
    """
    try:
        yield
    except ForeignError as error:
        raise FileError(f"{name} {error}") from None
    except _DAMAGE as error:
        raise FileError(
            f"{name} is not a model of {library}, or it is damaged: "
            f"{type(error).__name__}: {error}"
        ) from None


_SHARED = 1  # the code of all values that no split lists; 0 means missing
_MOST_BYTES = 2**28  # arrays up to this size are always allowed
_MOST_GROWTH = 256  # the most bytes of arrays per byte of the trees in the file


class CategorySplit(NamedTuple):
    """Describes a split that lists values.

    Attributes:
      tree, node: indices of the tree and of its node; trees are numbered in the order
        of rounds, K per round.
      goes_left: True if the listed values go left and all other known values go right;
        False for the reverse.
    """

    tree: int
    node: int
    feature: int
    values: Int[np.ndarray, " n"]
    goes_left: bool


class KnownValues(NamedTuple):
    """Holds the categories of a feature; all other values count as missing.

    Attributes:
      length: categories are integers in [0, length).
      listed: the categories, or None if all integers in [0, length) are categories.
    """

    length: int
    listed: Int[np.ndarray, " n"] | None = None


def _code_splits(splits, known, values):
    """Assigns codes to values, in the order of values; unlisted ones share a code.

    Returns the categories, and the codes that go left at each split, as bits [S, W].
    """
    features = tuple(sorted(known))
    size = max(1, *(each.length for each in known.values()))
    _check_table(known, features, size)
    listed: dict[int, list[np.ndarray]] = {feature: [] for feature in features}
    for split in splits:
        listed[split.feature].append(split.values)
    codes = np.zeros((len(features), size), np.int32)
    for row, feature in zip(codes, features, strict=True):
        each = known[feature]
        row[slice(each.length) if each.listed is None else each.listed] = _SHARED
        own = np.unique(np.concatenate([*listed[feature], np.zeros(0, int)]))
        row[own] = _SHARED + 1 + np.arange(own.size)
    rows = dict(zip(features, codes, strict=True))
    names = tuple(values.get(feature) for feature in features)
    named = any(name is not None for name in names)
    categories = Categories(
        codes=codes, features=features, values=names if named else None
    )
    return categories, _pack_sets(splits, rows, int(codes.max()) // WORD + 1)


def _check_table(known, features, size):
    """Checks the limits that training has, before memory is allocated."""
    if size > MOST_VALUES:
        worst = max(features, key=lambda feature: known[feature].length)
        raise ForeignError(
            f"must have categories below {MOST_VALUES}, because float32 cannot "
            f"represent all larger integers, got {size - 1} in feature {worst}; "
            "renumber the categories before training"
        )
    if size * len(features) > MOST_CELLS:
        raise ForeignError(
            "must have a product of the number of categorical features and the number "
            f"of categories of at most {MOST_CELLS}, got {len(features)} features and "
            f"{size} categories; renumber the categories before training"
        )


def _pack_sets(splits, rows, num_words):
    """Packs the codes that go left at each split into 32-bit words."""
    # Every set is as wide as the largest one, so a small file could need much memory.
    held = 8 * sum(split.values.size for split in splits)
    check_growth(4 * len(splits) * num_words, held)
    words = np.zeros((len(splits), num_words), np.uint32)
    most = {feature: int(row.max()) for feature, row in rows.items()}
    for own, split in zip(words, splits, strict=True):
        bits = np.zeros(num_words * WORD, bool)
        # Code 0 (missing) stays unset: nodes have a separate flag for missing values.
        bits[1 : most[split.feature] + 1] = not split.goes_left
        bits[rows[split.feature][split.values]] = split.goes_left
        own[:] = np.packbits(bits, bitorder="little").view("<u4")
    return words


def check_growth(needed: int, held: int) -> None:
    """Checks that arrays are not many times larger than the data in the file.

    All trees share arrays of one shape. A file with one large tree and many small ones
    could thus need far more memory than its own size, and exhaust the memory of the
    process that reads it. Both sizes are in bytes.
    """
    if needed > max(_MOST_BYTES, _MOST_GROWTH * held):
        raise ValueError(
            f"its trees must fit into arrays of at most {_MOST_GROWTH} times their own "
            f"size of {held} bytes, got {needed} bytes"
        )


_WHOLE = 2.0**24  # float32 cannot hold all whole numbers from here on
# Thresholds are that many float32 numbers apart, or a share of the values between them
# that matters (up to 1 / 2^11 on average) is rounded to the other side.
_LEAST_STEPS = 2.0**10
_BINS = 255  # as many bins share the range of a column by default
_TINY = float(np.finfo(np.float32).tiny)


def _find_wide(feature, threshold, ranges):
    """Returns the features that need comparisons in float64.

    A feature needs them if a threshold has a magnitude of 2^24 or more, or if the gap
    between two thresholds is smaller than 1024 float32 steps. Since there may be few
    thresholds, 1/255 of the range of the feature counts as a gap, too.
    """
    found = []
    for index in np.unique(feature).tolist():
        own = np.unique(threshold[feature == index])
        own = own[np.isfinite(own)]
        ends = np.array(ranges.get(index, ()), float)
        narrow = _is_narrow(own) or (ends.size and _is_narrow(ends, _BINS))
        if narrow or np.any(np.abs(own) >= _WHOLE):
            found.append(index)
    return found


def _is_narrow(values, parts=1):
    """Returns whether a gap, in equal parts, is smaller than it may be."""
    size = np.maximum(np.abs(values[1:]), np.abs(values[:-1]))
    with np.errstate(over="ignore", invalid="ignore"):
        step = np.maximum(np.spacing(size.astype(np.float32)), _TINY)
        gap = np.diff(values) / parts
    return bool(np.any((gap < _LEAST_STEPS * step) & (gap > 0)))


# Trees up to this depth are stored in heap order, for a faster prediction kernel.
# Deeper heaps would spend too much memory on unused nodes.
_HEAP_DEPTH = 8
_OF_LEAVES = ("value", "gradient", "curvature", "weight")
_NODE_BYTES = 30  # size of a node in the arrays, without categories and linear terms
_TERM_BYTES = 12  # size of a linear term
_ALL = np.array(
    [-np.inf, np.inf], np.float32
)  # the range of values that are not clipped


def round_down(threshold: Float[np.ndarray, " M"]) -> Float32[np.ndarray, " M"]:
    """Returns the largest float32 that does not exceed each threshold.

    ``x <= threshold`` then has the same result for every float32 x. XLA flushes
    denormals to 0, so the result is never a negative denormal: it would compare as 0.
    """
    with np.errstate(over="ignore"):
        near = threshold.astype(np.float32)
        below = np.nextafter(near, np.float32(-np.inf))
    low = np.where(near > threshold, below, near)
    return np.where((low < 0) & (low > -_TINY), -_TINY, low)


def _place_sets(trees, splits, known, values):
    """Returns the categories, and the trees with the codes that go left."""
    categories, words = None, np.zeros((0, 0), np.uint32)
    if known:
        categories, words = _code_splits(splits, known, values)
    for tree in trees:
        numeric = ~tree.is_leaf & ~np.isnan(tree.threshold)
        if np.isin(tree.feature[numeric], [*known]).any():  # codes are not in order
            raise ValueError("a tree compares a categorical feature with a threshold")
    if not words.shape[1]:
        return categories, trees
    num_nodes = sum(len(tree.left) for tree in trees)
    held = _NODE_BYTES * num_nodes + words.nbytes
    check_growth(4 * words.shape[1] * num_nodes, held)
    sets = [np.zeros((len(tree.left), words.shape[1]), np.uint32) for tree in trees]
    for split, own in zip(splits, words, strict=True):
        sets[split.tree][split.node] = own
    pairs = zip(trees, sets, strict=True)
    return categories, [tree._replace(left_codes=codes) for tree, codes in pairs]


def list_trees(model: Ensemble) -> list[Nodes]:
    """Returns the trees of a model in the order of rounds, K per round.

    Nodes are sorted, and unused ones are left out. The K trees of a round have the same
    splits where all scores share one.
    """
    nodes = model.nodes()
    return [take_tree(nodes, number) for number in range(len(nodes.left))]


def build_ensemble(
    trees: Sequence[Nodes],
    *,
    init_score: Float32[np.ndarray, " K"],
    num_features: int,
    absent: Absent,
    feature_names: tuple[str, ...] | None = None,
    splits: Sequence[CategorySplit] = (),
    known: Mapping[int, KnownValues] | None = None,
    values: Mapping[int, tuple[Category, ...]] | None = None,
    shared: bool = False,
    ranges: Mapping[int, tuple[float, float]] | None = None,
) -> Ensemble:
    """Builds a model from trees; refuses one that :func:`jboost.load` would reject.

    The trees are stored in heap order if the deepest one has at most 8 levels, and as
    linked nodes otherwise. Arrays many times larger than the trees are refused.

    Args:
      trees: the trees in the order of rounds, K per round, with a threshold of NaN at
        categorical splits. Trees of a library that compares in float64 have its exact
        thresholds. Linear terms of their leaves take values from -inf to inf.
      init_score: [K]; K = 1 makes a model with one score per row.
      absent: how the other library reads entries that a sparse matrix does not store.
      known: the categories of each categorical feature; its length exceeds every value
        that the splits list.
      values: the categories that the integers 0, 1, ... represent, for the features
        where they are known.
      shared: whether the K trees of each round have the same splits, which are then
        stored once.
      ranges: the least and the largest value of features, where they are known.
    """
    categories, trees = _place_sets(trees, splits, known or {}, values or {})
    pairs = [sort_nodes(tree) for tree in trees]
    for tree, _ in pairs:
        features = tree.feature[~tree.is_leaf]
        if features.size and not 0 <= features.min() <= features.max() < num_features:
            raise ValueError(
                f"features of a tree must be from 0 to {num_features - 1}, got values "
                f"from {features.min()} to {features.max()}"
            )
    depth = max([1, *(depth for _, depth in pairs)])
    linked = depth > _HEAP_DEPTH
    _check_arrays([tree for tree, _ in pairs], depth, linked)
    pairs = _keep_wide(pairs, ranges or {})
    arrays = _allocate([tree for tree, _ in pairs], depth, linked)
    for number, (tree, _) in enumerate(pairs):
        inner, leaves = _find_places(tree, depth, linked)
        for name, array in arrays.items():
            index = leaves if name in _OF_LEAVES else inner
            kept = tree.is_leaf if name in _OF_LEAVES else ~tree.is_leaf
            own = getattr(tree, name)
            if own is not None:
                array[number, index[kept]] = own[kept]
    shape = (len(trees) // len(init_score), len(init_score))
    arrays = {key: a.reshape(*shape, *a.shape[1:]) for key, a in arrays.items()}
    if shared:
        for name in arrays.keys() - {*_OF_LEAVES}:
            arrays[name] = arrays[name][:, :1]
    exact = arrays.get("exact_threshold")
    wide: Any = None if exact is None else pack_float64(exact)
    slopes = _join_slopes([tree for tree, _ in pairs], depth, linked, shape)
    every: Any = None
    if slopes is not None:
        every = np.tile(_ALL, (num_features, 1))
        every[[*(known or ())]] = 0  # categories have no linear terms
    start: Any = np.float32(init_score if len(init_score) > 1 else init_score[0])
    # The readers do not know the l2 penalty that the leaves were trained with.
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
        wide_threshold=wide,
        slopes=slopes,
        ranges=every,
    )
    check_contents(model)  # the same checks as for jboost's own files
    return jax.device_put(model)


def _check_arrays(trees, depth, linked):
    """Checks the size of the arrays, where each tree takes the space of the largest."""
    each = max((len(t.left) for t in trees), default=0) if linked else 2**depth
    words = [0 if t.left_codes is None else t.left_codes.shape[1] for t in trees]
    terms = [0 if t.slopes is None else t.slopes.feature.shape[1] for t in trees]
    own = [
        _NODE_BYTES + 4 * w + _TERM_BYTES * p for w, p in zip(words, terms, strict=True)
    ]
    size = _NODE_BYTES + 4 * max(words, default=0) + _TERM_BYTES * max(terms, default=0)
    held = sum(len(tree.left) * bytes for tree, bytes in zip(trees, own, strict=True))
    check_growth(len(trees) * each * size, held)


def _keep_wide(pairs, ranges):
    """Keeps the exact thresholds of columns that must be compared in float64."""
    trees = [tree for tree, _ in pairs]
    if not trees or any(tree.exact_threshold is None for tree in trees):
        return pairs
    splits = [~tree.is_leaf & ~np.isnan(tree.exact_threshold) for tree in trees]
    feature, exact = (
        np.concatenate(
            [getattr(t, name)[s] for t, s in zip(trees, splits, strict=True)]
        )
        for name in ("feature", "exact_threshold")
    )
    wide = _find_wide(feature, exact, ranges)

    def keep(tree, split) -> Any:
        kept = split & np.isin(tree.feature, wide)
        return np.where(kept, tree.exact_threshold, np.nan) if wide else None

    return [
        (tree._replace(exact_threshold=keep(tree, split)), depth)
        for (tree, depth), split in zip(pairs, splits, strict=True)
    ]


def _allocate(trees, depth, linked) -> dict[str, Any]:
    """Allocates arrays [trees, ...] without splits and with leaf values of 0.

    A node that links to itself is a leaf, which is why ``left`` counts up.
    """
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
    if trees and trees[0].exact_threshold is not None:
        arrays["exact_threshold"] = np.full(inner, np.nan)
    return arrays


def _join_slopes(trees, depth, linked, shape) -> Any:
    """Returns the linear terms of all leaves; None if all are constant."""
    sizes = [0 if t.slopes is None else t.slopes.feature.shape[1] for t in trees]
    if not any(sizes):
        return None
    leaves = max(len(tree.left) for tree in trees) if linked else 2**depth
    full = (len(trees), leaves, max(sizes))
    arrays: Any = [np.full(full, NO_TERM, np.int32), *np.zeros((2, *full), np.float32)]
    for number, (tree, size) in enumerate(zip(trees, sizes, strict=True)):
        if size:
            index = _find_places(tree, depth, linked)[1][tree.is_leaf]
            for array, own in zip(arrays, tree.slopes, strict=True):
                array[number, index, :size] = own[tree.is_leaf]
    return Slopes(*(array.reshape(*shape, *full[1:]) for array in arrays))


def _find_places(tree, depth, linked):
    """Returns the indices of a tree's nodes in the arrays of inner nodes and of leaves.

    In heap order, node i has the children 2i + 1 and 2i + 2. A leaf above the deepest
    level takes the index of its leftmost descendant there.
    """
    index = np.arange(len(tree.left))
    if linked:
        return index, index
    index[:] = 0
    for node in np.flatnonzero(~tree.is_leaf):
        index[tree.left[node]] = 2 * index[node] + 1
        index[tree.right[node]] = 2 * index[node] + 2
    # Node i is node number i + 1 - 2^l of level l = floor(log2(i + 1)).
    level = np.log2(index + 1).astype(np.int64)
    return index, (index + 1 - (1 << level)) << (depth - level)
