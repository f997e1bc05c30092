# SPDX-License-Identifier: Apache-2.0
"""Models of LightGBM.

In: a text file of LightGBM's, or a model of it that is in memory. Out: an Ensemble with
the same scores. Nothing in the file is ever executed.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jboost.entry.decorators import on_host
from jboost.interchange.category_sets import CategorySplit, code_splits
from jboost.interchange.failures import ForeignError, report_failures
from jboost.interchange.lightgbm_categories import find_categories
from jboost.interchange.linked import build_ensemble, place_sets, round_down
from jboost.model.ensemble import Ensemble
from jboost.model.nodes import LEAF, Nodes

_CATEGORICAL, _DEFAULT_LEFT = 1, 2  # bits of decision_type
_MISSING = ("none", "zero", "nan")  # the two bits after those
_MOST_SCORES = 2**16  # of a model without trees
_ZERO = float(np.float32(1e-35))  # up to here LightGBM takes numbers for 0


@on_host("read the model first")
def read_lightgbm(source: Any) -> Ensemble:
    """Reads a model of LightGBM's; its scores are LightGBM's raw scores.

    ``jb.predict`` gives what LightGBM's ``predict(..., raw_score=True)`` gives, up to
    the rounding of leaf values and sums to float32 (LightGBM uses float64). A threshold
    becomes the greatest float32 that is not above it, so that all x that are float32
    go the same way; others may not where float32 does not tell them from a threshold.
    Boosting "rf" averages its trees: leaf values are divided by their number, and the
    scores are those behind ``predict(...)`` (with ``raw_score=True`` LightGBM gives
    their sum). Where training saw no missing value, NaN is 0 to LightGBM, and goes
    where 0 does. A category that no split lists, an unseen or a missing one goes right;
    a negative one, which is missing to LightGBM, must be NaN here. Categories of 2^24
    and more, of which float32 does not tell neighbors apart, are refused.

    For probabilities of objective "binary" mind LightGBM's parameter ``sigmoid``, which
    multiplies the score (1 unless it was set).

    Args:
      source: the path of a text file (``Booster.save_model``, version 3 or 4), a
        ``lightgbm.Booster``, or a fitted estimator of ``lightgbm.sklearn``. As many
        rounds are read as are saved by default: up to the best where training stopped
        early.

    Returns:
      A model with the sums of curvature and weight (rows) of LightGBM's leaves; sums of
      gradients are not in such files, and NaN. Categories of a data frame are kept;
      where the file does not tell which of its categorical columns were numbers, a
      warning says so, and they are dropped.

    Raises:
      OSError: the file cannot be read.
      TypeError: source is none of these.
      FileError: the file is damaged or none of LightGBM's, or the model cannot be
        carried over: linear trees, large categories, or ``zero_as_missing`` where a
        node sends 0 another way than its threshold says.

    Example:
      >>> import jboost as jb
      >>> jb.interchange.read_lightgbm("model.txt")  # doctest: +SKIP
    """
    name, text = _open(source)
    with report_failures(name, "LightGBM"):
        return _read_text(text)


class _Tree(NamedTuple):
    """A tree as read: values by name, and what is made of its nodes."""

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
        raise ValueError("it does not begin with a line 'tree'")
    head, found, rest = text.partition("\nend of trees\n")
    if not found:
        raise ValueError("it is cut off: there is no line 'end of trees'")
    first, *blocks = head.split("\nTree=")
    header = _read_fields(first)
    num_trees = len(header["tree_sizes"].split())
    if len(blocks) != num_trees:
        raise ValueError(f"there should be {num_trees} trees, there are {len(blocks)}")
    num_scores = int(header["num_tree_per_iteration"])
    if not 1 <= num_scores <= (num_trees or _MOST_SCORES):
        raise ValueError(f"there are {num_trees} trees for {num_scores} scores a round")
    names, infos = (
        header[key].split(" ") for key in ("feature_names", "feature_infos")
    )
    num_features = int(header["max_feature_idx"]) + 1
    if not len(names) == len(infos) == num_features:
        raise ValueError(
            f"there should be {num_features} feature_names and feature_infos, there "
            f"are {len(names)} and {len(infos)}"
        )
    blocks = (_read_fields(f"Tree={block}") for block in blocks)
    trees = [_read_tree(fields, num_features) for fields in blocks]
    scale = num_scores / num_trees if "average_output" in header and num_trees else 1
    splits = [split for i, tree in enumerate(trees) for split in _list_splits(i, tree)]
    known, values = find_categories(infos, rest, splits)
    categories, words = code_splits(splits, known, values)
    nodes = [_make_nodes(tree, scale) for tree in trees]
    return build_ensemble(
        place_sets(nodes, splits, words, categories),
        init_score=np.zeros(num_scores, np.float32),
        num_features=num_features,
        absent="zero",
        feature_names=tuple(names),
        categories=categories,
    )


def _read_fields(text):
    """Lines "key=value"; a key alone has the value ""."""
    lines = (line.partition("=") for line in text.splitlines())
    return {key: value for key, _, value in lines if key}


def _read_tree(fields, num_features):
    if int(fields.get("is_linear", 0)):
        raise ForeignError("has linear trees, which cannot be carried over")
    if int(fields["num_leaves"]) < 2:
        none = np.zeros(0, int)
        return _Tree(fields, none, none.astype(float), none)
    feature = _numbers(fields, "split_feature", int)
    if not 0 <= feature.min() <= feature.max() < num_features:
        raise ValueError(f"split_feature must be below {num_features}")
    return _Tree(
        fields,
        feature=feature,
        threshold=_numbers(fields, "threshold", float),
        decision=_numbers(fields, "decision_type", int),
    )


def _as_integers(words):
    """Of 32 bits, as LightGBM has them."""
    values = np.array([int(word) for word in words], np.int64)
    if values.size and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise ValueError("an integer has more than 32 bits")
    return values


def _numbers(fields, name, kind):
    """As many as there are leaves, or inner nodes."""
    values = fields[name].split()
    values = _as_integers(values) if kind is int else np.array(values, np.float64)
    size = int(fields["num_leaves"]) - (not name.startswith("leaf_"))
    if len(values) != size:
        raise ValueError(f"{name} must have {size} numbers, it has {len(values)}")
    return values


def _list_splits(number, tree):
    """The categories that splits list go left."""
    if not tree.categorical.any():
        return []
    ends = _as_integers(tree.fields["cat_boundaries"].split())
    words = np.array(tree.fields["cat_threshold"].split(), np.uint32)
    places = tree.threshold[tree.categorical].astype(int)
    if (
        ends[0] != 0 or ends[-1] > words.size or np.any(np.diff(ends) < 0)
        or not 0 <= places.min() <= places.max() < len(ends) - 1
        or len(np.unique(places)) < len(places)
    ):  # fmt: skip
        raise ValueError("cat_boundaries must ascend within cat_threshold")
    splits = []
    for node, place in zip(np.flatnonzero(tree.categorical), places, strict=True):
        own = words[ends[place] : ends[place + 1]].astype("<u4", copy=False)
        values = np.flatnonzero(np.unpackbits(own.view(np.uint8), bitorder="little"))
        feature = int(tree.feature[node])
        splits.append(CategorySplit(number, int(node), feature, values, True))
    return splits


def _make_nodes(tree, scale):
    """Inner nodes first, then leaves; LightGBM counts leaves from -1 down."""
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
        if not fields.get(name):  # there are none of a tree that is one leaf
            return np.full(num_inner + num_leaves, np.nan)
        values = _numbers(fields, name, float)
        inner = np.zeros(num_inner)
        if num_inner and name != "leaf_value":
            inner = _numbers(fields, name.replace("leaf_", "internal_"), float)
        return np.concatenate([inner, values])

    threshold, missing_left = _find_sides(tree)
    return Nodes(
        left=children("left_child"),
        right=children("right_child"),
        feature=np.append(tree.feature, np.zeros(num_leaves)).astype(np.int32),
        threshold=np.append(threshold, np.zeros(num_leaves)).astype(np.float32),
        missing_left=np.append(missing_left, np.ones(num_leaves, bool)),
        value=(of_leaves("leaf_value") * scale).astype(np.float32),
        gradient=np.full(num_inner + num_leaves, np.nan),
        curvature=of_leaves("leaf_weight"),
        weight=of_leaves("leaf_count"),
    )


def _find_sides(tree):
    """Thresholds in float32, and whether NaN goes left.

    Where "nan" is the kind of missing values, it goes the default way; where it is
    "none", NaN is 0; where it is "zero", both go the default way, and so do numbers
    that LightGBM takes for 0. Missing categories go right.
    """
    default_left = (tree.decision & _DEFAULT_LEFT) != 0
    kind = tree.decision >> 2 & 3
    if (kind > 2).any():
        raise ValueError("decision_type names an unknown kind of missing values")
    threshold, numeric = tree.threshold, ~tree.categorical
    is_zero = (kind == _MISSING.index("zero")) & numeric
    around = is_zero & (np.abs(threshold) <= _ZERO)
    if (is_zero & ~around & ((threshold > 0) != default_left)).any():
        raise ForeignError(
            "was trained with zero_as_missing, and sends 0 another way than other "
            "numbers on its side of a threshold, which cannot be carried over"
        )
    below = np.nextafter(np.float32(-_ZERO), np.float32(-np.inf))
    threshold = np.where(around, np.where(default_left, _ZERO, below), threshold)
    missing_left = np.where(
        kind == _MISSING.index("none"), threshold >= 0, default_left
    )
    threshold = np.where(numeric, round_down(threshold), np.nan)
    return threshold, missing_left & numeric
