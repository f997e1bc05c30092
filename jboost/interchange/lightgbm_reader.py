# SPDX-License-Identifier: Apache-2.0
"""Reads models of LightGBM, and finds the categories of their features.

Nothing in a file is executed. Categories are spread over ``feature_infos`` (values seen
in training, or "none"), the parameters (indices of categorical columns), and
``pandas_categorical`` (categories in the order of the columns, but not which columns).
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jboost.entry.decorators import on_host
from jboost.entry.messages import show, warn_user
from jboost.interchange.linked import (
    CategorySplit,
    ForeignError,
    KnownValues,
    build_ensemble,
    check_growth,
    report_failures,
    round_down,
)
from jboost.model.ensemble import Ensemble
from jboost.model.nodes import LEAF, Nodes
from jboost.trees.tree import NO_TERM, Slopes

# Values that no split lists go right, as missing values do, so dropping them does not
# change a prediction. We keep them up to this limit only to bound the arrays.
_MOST_UNLISTED = 2**16


def find_categories(
    infos: Sequence[str], rest: str, splits: Sequence[CategorySplit]
) -> tuple[dict[int, KnownValues], dict[int, tuple[Any, ...]]]:
    """Returns the categories of each feature, and their names where they are known.

    Args:
      infos: the entry of each feature in ``feature_infos``.
      rest: the part of the file after the trees.
      splits: the categorical splits of all trees.
    """
    listed: dict[int, list[np.ndarray]] = {}
    for split in splits:
        listed.setdefault(split.feature, []).append(split.values)
    for feature, info in enumerate(infos):
        if info[:1] not in ("[", "") and info != "none":
            seen = np.array(info.split(":"), np.int64)
            seen = seen[(seen >= 0) & (seen < _MOST_UNLISTED)]
            listed.setdefault(feature, []).append(seen)
    values = {feature: np.unique(np.concatenate(v)) for feature, v in listed.items()}
    names = _place_names(infos, rest, values)
    known = {}
    for feature in values.keys() | names.keys():
        own = values.get(feature, np.zeros(0, np.int64))
        length = max(int(own.max(initial=0)) + 1, len(names.get(feature, ())))
        known[feature] = KnownValues(length, own)
    return known, names


def _place_names(infos, rest, values):
    """Assigns the categories of a data frame to the columns that they fit.

    Returns nothing, and warns, if the file allows more than one assignment.
    """
    lists = _read_names(rest)
    if not lists:
        return {}
    features = sorted(_read_places(rest, len(infos)) | values.keys())
    for whole in (False, True):
        first = _match(lists, features, values, whole)
        last = _match(lists[::-1], features[::-1], values, whole)
        if first is not None and last is not None and first == last[::-1]:
            return dict(zip(first, map(tuple, lists), strict=True))
    warn_user(
        f"the model was trained on a pandas data frame with {len(lists)} columns of "
        "category dtype, but the file does not say which columns; the names of "
        "categories are dropped: predict from the codes (column.cat.codes, with NaN "
        "for missing values)"
    )
    return {}


def _match(lists, features, values, whole):
    """Assigns each list to the first feature that fits; None if a list fits no feature.

    The caller also matches in reverse order: there is exactly one assignment if both
    directions find the same one.

    Args:
      features: indices of the features that may be categorical, in the order to try.
      values: the values of each feature that the file lists.
      whole: whether training must have seen all categories of a list.
    """
    left = iter(features)
    found = []
    for names in lists:
        for feature in left:
            own = values.get(feature, np.zeros(0, np.int64))
            if own.max(initial=-1) < len(names) and (
                not whole or own.size == len(names)
            ):
                found.append(feature)
                break
    return found if len(found) == len(lists) else None


def _read_places(rest, num_features):
    """Returns the indices of the categorical columns that the parameters list."""
    for line in rest.splitlines():
        name, found, value = line.partition(": ")
        if found and name == "[categorical_feature":
            places = {int(v) for v in value.rstrip("]").split(",") if v.isdecimal()}
            return {place for place in places if place < num_features}
    return set()


def _read_names(rest):
    """Returns a list of categories for each pandas column of category dtype."""
    for line in rest.splitlines():
        key, _, value = line.partition(":")
        if key == "pandas_categorical":
            lists = json.loads(value) or []
            if not all(isinstance(names, list) for names in lists):
                raise ValueError(
                    f"pandas_categorical must hold lists, got {value[:60]}"
                )
            return lists
    return []


_CATEGORICAL, _DEFAULT_LEFT = 1, 2  # bits of decision_type
_MISSING = ("none", "zero", "nan")  # the next two bits: values that count as missing
_MOST_SCORES = 2**16  # limit for models without trees: scores fill memory
_ZERO = float(np.float32(1e-35))  # LightGBM treats numbers up to this size as 0


@on_host("read the model first")
def read_lightgbm(source: Any) -> Ensemble:
    """Reads a LightGBM model; its scores are the raw scores of LightGBM.

    :func:`jboost.predict` returns the result of LightGBM's
    ``predict(..., raw_score=True)``, up to the rounding of leaf values and sums to
    float32 (LightGBM uses float64). Differences from LightGBM:

    - Thresholds: a threshold becomes the largest float32 that does not exceed it. Every
      x that is exactly a float32 goes the same way. Another x may not, if it rounds
      across a threshold. Some columns need more precision, because float32 holds few
      numbers between the thresholds or not all whole numbers (Unix seconds, long
      identifiers). They are compared in float64 in every function that takes a model
      and float64 rows, except under ``jit``, in files for other programs, and in
      training that continues from the model, which warns.
    - Boosting "rf" averages its trees: leaf values are divided by the number of trees,
      and the scores correspond to ``predict(...)``. LightGBM's ``raw_score=True``
      returns their sum instead.
    - Missing values: if training saw no missing value, LightGBM reads NaN as 0, so NaN
      goes the way of 0.
    - Linear trees: linear terms take float32 values of x. Columns in them must span at
      least 2^12 steps of float32 in training; subtract a constant from others (Unix
      seconds of one day, for example) before training.
    - Categories: a category that no split lists, an unseen category and a missing value
      go right. LightGBM reads negative categories as missing; pass NaN instead.
      Categories of 2^24 or more are rejected, because float32 cannot represent all of
      them.

    For probabilities of objective "binary", note LightGBM's parameter ``sigmoid`` (1 by
    default), which multiplies the score.

    Args:
      source: the path of a text file (``Booster.save_model``, version 3 or 4), a
        ``lightgbm.Booster``, or a fitted estimator of ``lightgbm.sklearn``. The rounds
        are those that LightGBM saves by default: up to the best round if training
        stopped early.

    Returns:
      A model with the sums of curvature and weight (rows) of LightGBM's leaves. Sums of
      gradients are NaN, because LightGBM does not save them. Categories of a data frame
      are kept. If the file does not determine which columns had category dtype, the
      function warns and drops the names of the categories.

    Raises:
      OSError: the file cannot be read.
      TypeError: source has another type.
      FileError: the file is damaged or not a LightGBM model, or the model cannot be
        converted: it has categories that are too large, linear leaves in columns that
        float32 resolves too coarsely, or was trained with ``zero_as_missing`` and a
        node sends 0 to the other side of its threshold.

    Example:
      >>> import jboost as jb
      >>> jb.interchange.read_lightgbm("model.txt")  # doctest: +SKIP
    """
    name, text = _open(source)
    with report_failures(name, "LightGBM"):
        return _read_text(text)


class _Tree(NamedTuple):
    """Holds the text fields of a tree, and the arrays parsed from them."""

    fields: dict[str, str]
    feature: np.ndarray
    threshold: np.ndarray
    decision: np.ndarray

    @property
    def categorical(self):
        return (self.decision & _CATEGORICAL) != 0


def _open(source):
    if isinstance(source, str | os.PathLike):
        data = Path(source).read_bytes()
        with report_failures(str(source), "LightGBM"):
            return str(source), data.decode("utf-8")
    booster = getattr(source, "booster_", source)
    if not hasattr(booster, "model_to_string"):
        raise TypeError(
            "source must be a path, a Booster or a fitted estimator of LightGBM, got "
            f"{type(source).__name__}"
        )
    return type(source).__name__, booster.model_to_string()


def _read_text(text):
    if not text.startswith("tree\n"):
        raise ValueError("the file must begin with a line 'tree'")
    head, found, rest = text.partition("\nend of trees\n")
    if not found:
        raise ValueError("the file is truncated: it has no line 'end of trees'")
    first, *blocks = head.split("\nTree=")
    header = _read_fields(first)
    num_trees = len(header["tree_sizes"].split())
    if len(blocks) != num_trees:
        raise ValueError(f"the file must have {num_trees} trees, got {len(blocks)}")
    num_scores = int(header["num_tree_per_iteration"])
    if not 1 <= num_scores <= (num_trees or _MOST_SCORES):
        raise ValueError(
            "num_tree_per_iteration must be from 1 to "
            f"{num_trees or _MOST_SCORES}, got {num_scores}"
        )
    names, infos = (
        header[key].split(" ") for key in ("feature_names", "feature_infos")
    )
    num_features = int(header["max_feature_idx"]) + 1
    if not len(names) == len(infos) == num_features:
        raise ValueError(
            f"feature_names and feature_infos must have {num_features} entries, got "
            f"{len(names)} and {len(infos)}"
        )
    blocks = (_read_fields(f"Tree={block}") for block in blocks)
    trees = [_read_tree(fields, num_features) for fields in blocks]
    scale = num_scores / num_trees if "average_output" in header and num_trees else 1
    splits = [split for i, tree in enumerate(trees) for split in _list_splits(i, tree)]
    known, values = find_categories(infos, rest, splits)
    ranges = _read_ranges(infos)
    nodes = [_make_nodes(tree, scale, ranges) for tree in trees]
    _check_terms(nodes, known, ranges, names)
    return build_ensemble(
        nodes,
        init_score=np.zeros(num_scores, np.float32),
        num_features=num_features,
        absent="zero",  # as LightGBM reads sparse matrices
        feature_names=tuple(names),
        splits=splits,
        known=known,
        values=values,
        ranges=ranges,
    )


def _read_ranges(infos):
    """Returns the least and the largest value of the numeric features in training."""
    pairs = {
        i: info[1:-1].split(":") for i, info in enumerate(infos) if info[:1] == "["
    }
    return {i: (float(pair[0]), float(pair[1])) for i, pair in pairs.items()}


def _read_fields(text):
    """Parses lines of the form "key=value"; a key without a value has the value ""."""
    lines = (line.partition("=") for line in text.splitlines())
    return {key: value for key, _, value in lines if key}


def _read_tree(fields, num_features):
    if int(fields["num_leaves"]) < 2:
        none = np.zeros(0, int)
        return _Tree(fields, none, none.astype(float), none)
    feature = _numbers(fields, "split_feature", int)
    if not 0 <= feature.min() <= feature.max() < num_features:
        raise ValueError(
            f"split_feature must be from 0 to {num_features - 1}, got values from "
            f"{feature.min()} to {feature.max()}"
        )
    return _Tree(
        fields,
        feature=feature,
        threshold=_numbers(fields, "threshold", float),
        decision=_numbers(fields, "decision_type", int),
    )


def _as_integers(words):
    """Parses integers and checks that they fit into the 32 bits that LightGBM uses."""
    values = np.array([int(word) for word in words], np.int64)
    if values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise ValueError("integers must fit into 32 bits, got a larger one")
    return values


def _numbers(fields, name, kind):
    """Parses a field that holds one number per leaf, or one per inner node."""
    values = fields[name].split()
    values = _as_integers(values) if kind is int else np.array(values, np.float64)
    size = int(fields["num_leaves"]) - (not name.startswith("leaf_"))
    if len(values) != size:
        raise ValueError(f"{name} must have {size} numbers, got {len(values)}")
    return values


def _list_splits(number, tree):
    """Returns the categorical splits of a tree; the categories they list go left."""
    if not tree.categorical.any():
        return []
    # The threshold of a categorical node is an index i: the node's bit set is the slice
    # cat_threshold[cat_boundaries[i] : cat_boundaries[i + 1]].
    ends = _as_integers(tree.fields["cat_boundaries"].split())
    words = np.array(tree.fields["cat_threshold"].split(), np.uint32)
    indices = tree.threshold[tree.categorical].astype(int)
    if (
        ends[0] != 0 or ends[-1] > words.size or np.any(np.diff(ends) < 0)
        or not 0 <= indices.min() <= indices.max() < len(ends) - 1
        or len(np.unique(indices)) < len(indices)
    ):  # fmt: skip
        raise ValueError(
            "cat_boundaries must ascend within cat_threshold, with one set per node"
        )
    splits = []
    for node, index in zip(np.flatnonzero(tree.categorical), indices, strict=True):
        own = words[ends[index] : ends[index + 1]].astype("<u4", copy=False)
        values = np.flatnonzero(np.unpackbits(own.view(np.uint8), bitorder="little"))
        feature = int(tree.feature[node])
        splits.append(CategorySplit(number, int(node), feature, values, True))
    return splits


def _make_nodes(tree, scale, ranges):
    """Converts a tree to nodes: inner nodes first, then leaves.

    LightGBM numbers leaves -1, -2, ...; leaf -1 becomes the first node after the inner
    ones.
    """
    fields, num_inner = tree.fields, len(tree.feature)
    num_leaves = num_inner + 1
    blank = np.full(num_leaves, LEAF, np.int32)

    def children(name):
        if not num_inner:
            return blank
        child = _numbers(fields, name, int)
        child = np.where(child < 0, num_inner - 1 - child, child).astype(np.int32)
        return np.concatenate([child, blank])

    def of_leaves(name):
        if not fields.get(name):  # absent if the tree is a single leaf
            return np.full(num_inner + num_leaves, np.nan)
        values = _numbers(fields, name, float)
        inner = np.zeros(num_inner)
        if num_inner and name != "leaf_value":
            inner = _numbers(fields, name.replace("leaf_", "internal_"), float)
        return np.concatenate([inner, values])

    value, slopes = of_leaves("leaf_value") * scale, None
    if int(fields.get("is_linear", 0)):
        value[num_inner:], *terms = _read_terms(
            fields, value[num_inner:], scale, ranges
        )
        parts: Any = [np.pad(array, ((num_inner, 0), (0, 0))) for array in terms]
        slopes = Slopes(parts[0] + NO_TERM, *parts[1:])
    exact, missing_left = _find_sides(tree)
    exact = np.append(exact, np.zeros(num_leaves))
    return Nodes(
        left=children("left_child"),
        right=children("right_child"),
        feature=np.append(tree.feature, np.zeros(num_leaves)).astype(np.int32),
        threshold=round_down(exact),
        missing_left=np.append(missing_left, np.ones(num_leaves, bool)),
        value=value.astype(np.float32),
        gradient=np.full(num_inner + num_leaves, np.nan),
        curvature=of_leaves("leaf_weight"),
        weight=of_leaves("leaf_count"),
        exact_threshold=exact,
        slopes=slopes,
    )


def _read_terms(fields, value, scale, ranges) -> Any:
    """Returns the leaf values, and features - NO_TERM, slopes, centers: [L, P] each.

    LightGBM's leaf gives a row the score const + sum_p slope_p x_p, or ``value`` if an
    x_p is missing. Centers with sum_p slope_p center_p = value - const make this value
    + sum_p slope_p (x_p - center_p). Each is the number nearest to 0 in the range of
    the feature, so that x - center is no larger than x; the rest of the sum goes to the
    term that can change the score most. It includes the rounding of the others.

    Args:
      value: the values of the leaves, times ``scale``.
    """
    size = len(value)
    counts = _as_integers(fields["num_features"].split())
    indices = _as_integers(fields["leaf_features"].split())
    const, coeff = (
        np.array(fields[name].split(), np.float64) * scale
        for name in ("leaf_const", "leaf_coeff")
    )
    if (
        not len(counts) == len(const) == size
        or counts.min() < 0 or not counts.sum() == len(indices) == len(coeff)
        or not (np.isfinite(coeff) & (coeff != 0)).all()
    ):  # fmt: skip
        raise ValueError(
            "leaf_features and leaf_coeff must hold num_features numbers for each of "
            f"{size} leaves, without coefficients of 0, got {len(indices)} and "
            f"{len(coeff)}"
        )
    check_growth(32 * size * counts.max(), 32 * (size + len(coeff)))
    given = np.arange(counts.max()) < counts[:, None]
    ends = np.array([ranges.get(index, (0.0, 0.0)) for index in indices.tolist()])
    low, high = ends.reshape(-1, 2).T
    feature = np.zeros(given.shape, np.int32)
    slope, center, reach = (np.zeros(given.shape) for _ in range(3))
    feature[given], slope[given] = indices - NO_TERM, coeff
    center[given] = np.float32(np.clip(0.0, low, high))
    reach[given] = np.abs(coeff) * (high - low)
    linear = counts > 0
    if linear.any():
        rest = (value - const - np.sum(slope * center, axis=1))[linear]
        place = np.flatnonzero(linear), np.argmax(reach[linear], axis=1)
        center[place] += rest / slope[place]
    with np.errstate(over="ignore"):
        slope, center = slope.astype(np.float32), center.astype(np.float32)
    if not (np.isfinite(slope) & np.isfinite(center)).all():
        raise ValueError("leaf_const and leaf_coeff must fit into float32, do not")
    return np.where(linear, value, const), feature, slope, center


_LEAST_RANGE = 2.0**12  # steps of float32: rounding changes 1 in 2^13 of an effect


def _check_terms(trees, known, ranges, names):
    """Checks that linear terms are in numeric columns, which float32 resolves."""
    terms = [tree.slopes.feature for tree in trees if tree.slopes is not None]
    used = np.unique(np.concatenate([[NO_TERM], *(a.ravel() for a in terms)]))
    for feature in used[used != NO_TERM].tolist():
        if not 0 <= feature < len(names) or feature in known:
            raise ValueError(
                f"leaf_features must be indices of numeric features, got {feature}"
            )
        low, high = ranges.get(feature, (0.0, np.inf))
        step = np.spacing(np.float32(max(abs(low), abs(high))))
        if high - low < _LEAST_RANGE * step:
            raise ForeignError(
                f"has linear leaves in the column {show(names[feature])}, which lay "
                f"from {low} to {high} in training: too close to each other for "
                "float32; subtract a constant from it before training"
            )


def _find_sides(tree):
    """Returns thresholds, NaN for sets, and whether NaN goes left.

    It depends on the kind of missing values that LightGBM stores for each node:

    - "nan": NaN goes in the default direction.
    - "none": NaN is read as 0.
    - "zero": NaN, 0 and numbers that LightGBM treats as 0 go in the default direction.

    Missing categories go right.
    """
    default_left = (tree.decision & _DEFAULT_LEFT) != 0
    kind = tree.decision >> 2 & 3
    if (kind > 2).any():
        raise ValueError(
            "decision_type must have a kind of missing values from 0 to 2, got "
            f"{kind.max()}"
        )
    threshold, numeric = tree.threshold, ~tree.categorical
    # jboost has no separate direction for 0. If the threshold is near 0, moving it to
    # one end of [-_ZERO, _ZERO] sends that whole interval in the default direction.
    # Otherwise, 0 must already lie on the default side.
    is_zero = (kind == _MISSING.index("zero")) & numeric
    around = is_zero & (np.abs(threshold) <= _ZERO)
    if (is_zero & ~around & ((threshold > 0) != default_left)).any():
        raise ForeignError(
            "was trained with zero_as_missing and has a node that sends 0 to the other "
            "side of its threshold, which is not supported"
        )
    below = np.nextafter(-_ZERO, -np.inf)
    threshold = np.where(around, np.where(default_left, _ZERO, below), threshold)
    missing_left = np.where(
        kind == _MISSING.index("none"), threshold >= 0, default_left
    )
    return np.where(numeric, threshold, np.nan), missing_left & numeric
