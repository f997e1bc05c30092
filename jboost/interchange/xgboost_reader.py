# SPDX-License-Identifier: Apache-2.0
"""Reads models of XGBoost, in memory or from a file (JSON or UBJSON).

Nothing in the file is executed.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float32

from jboost.codes.binning import MOST_VALUES
from jboost.entry.decorators import on_host
from jboost.interchange.linked import (
    CategorySplit,
    ForeignError,
    KnownValues,
    build_ensemble,
    report_failures,
    round_down,
)
from jboost.interchange.xgboost_format import read_categories, read_ubjson
from jboost.model.ensemble import Ensemble, truncate
from jboost.model.nodes import LEAF, Nodes

# Objectives with a probability (LOGIT) or a mean (LOG) as base_score, not a score.
LOGIT = ("binary:logistic", "reg:logistic")
LOG = ("count:poisson", "reg:gamma", "reg:tweedie", "survival:cox", "survival:aft")
_MOST_SCORES = 2**16  # limit for models with fewer trees: scores fill memory
_LEAST_VALUES = 1024  # least categories, if the file does not list them


@on_host("read the model first")
def read_xgboost(source: Any) -> Ensemble:
    """Reads an XGBoost model; its scores are the margins of XGBoost.

    :func:`jboost.predict` returns the result of XGBoost's
    ``predict(..., output_margin=True)``, up to the rounding of sums in float32. The
    function supports several classes or targets, categorical splits, missing values,
    random forests (each of the ``num_parallel_tree`` trees becomes a round) and DART
    (leaf values are multiplied by the weights of their trees).

    XGBoost sends every category that a split does not list to the left, including
    categories that training did not see. The model does the same for the categories
    that the file names, or, if it names none, for integers up to at least 1023. Larger
    values, and values that are not integers, count as missing.

    Args:
      source: the path of a file (".json" or ".ubj", from XGBoost 1.0 or later), an
        ``xgboost.Booster``, or a fitted estimator of ``xgboost.sklearn``. The rounds of
        an estimator are those that its ``predict`` uses.

    Returns:
      A model with the sums of curvature of XGBoost's leaves. Sums of gradients and
      weights are NaN, because XGBoost does not save them.

    Raises:
      OSError: the file cannot be read.
      TypeError: source has another type.
      FileError: the file is damaged or not an XGBoost model, or the model cannot be
        converted: it is not an ensemble of trees (booster "gblinear"), or it has
        categories of 2^24 or more.

    Example:
      >>> import tempfile, numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, _ = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=5, linear_leaves=False)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     jb.interchange.write_xgboost(model, folder + "/model.json")
      ...     again = jb.interchange.read_xgboost(folder + "/model.json")
      >>> bool((jb.predict(again, x) == jb.predict(model, x)).all())
      True
    """
    name, data, num_rounds = _open(source)
    with report_failures(name, "XGBoost"):
        model = _read_document(_parse(data))
    return model if num_rounds is None else truncate(model, num_rounds)


def _open(source):
    """Returns the name of a source, its bytes, and the number of rounds to keep."""
    if isinstance(source, str | os.PathLike):
        return str(source), Path(source).read_bytes(), None
    booster, num_rounds = source, None
    if hasattr(source, "get_booster"):
        booster = source.get_booster()
        best = booster.attributes().get("best_iteration")
        if best is not None:
            parallel = getattr(source, "num_parallel_tree", None) or 1
            num_rounds = (int(best) + 1) * parallel
    if not hasattr(booster, "save_raw"):
        raise TypeError(
            "source must be a path, a Booster or a fitted estimator of XGBoost, got "
            f"{type(source).__name__}"
        )
    return type(source).__name__, bytes(booster.save_raw("ubj")), num_rounds


def _parse(data):
    if data[:1] != b"{":
        raise ForeignError(
            "is not JSON or UBJSON; if it is an XGBoost model in the old binary "
            "format, load it in XGBoost and save it as .json or .ubj"
        )
    # Both formats begin with "{". JSON continues with a quote, "}" or white space;
    # UBJSON continues with the type of a length.
    if data[1:2] in (b'"', b"}") or data[1:2].isspace():
        return json.loads(data)
    return read_ubjson(data)


def _read_document(document):
    learner = document["learner"]
    booster = learner["gradient_booster"]
    kind = booster["name"]
    if kind not in ("gbtree", "dart"):
        raise ForeignError(
            f"must have a booster of trees, 'gbtree' or 'dart', got {kind!r}"
        )
    inner = booster["gbtree"]["model"] if kind == "dart" else booster["model"]
    # XGBoost before 3.4 keeps the weights of DART's trees beside the trees.
    dropped = (booster if kind == "dart" else inner).get("weight_drop") or None
    parameters, categorical = _read_parameters(learner, inner)
    num_scores = len(parameters["init_score"])
    own = [[] for _ in range(num_scores)]
    sizes = [_vector_size(tree) for tree in inner["trees"]]
    for number, (tree, size) in enumerate(zip(inner["trees"], sizes, strict=True)):
        weight = float(dropped[number]) if dropped else 1.0
        if size not in (1, num_scores):
            raise ValueError(f"leaves must have 1 or {num_scores} values, got {size}")
        scores = range(num_scores) if size > 1 else [int(inner["tree_info"][number])]
        for score in scores:
            if not 0 <= score < num_scores:
                raise ValueError(f"tree_info must be below {num_scores}, got {score}")
            nodes = _read_tree(tree, score if size > 1 else 0, size, weight)
            own[score].append((tree, nodes))
    if len({len(trees) for trees in own}) > 1:
        raise ValueError(
            "all classes must have the same number of trees, got "
            f"{[len(trees) for trees in own]}"
        )
    pairs = [pair for trees in zip(*own, strict=True) for pair in trees]
    splits = [
        split
        for number, (tree, nodes) in enumerate(pairs)
        for split in _find_splits(tree, nodes, number)
    ]
    known = _find_known(categorical, splits)
    splits = [_keep_known(split, known[split.feature]) for split in splits]
    return build_ensemble(
        [nodes for _, nodes in pairs],
        **parameters,
        absent="missing",  # as XGBoost reads sparse matrices
        splits=splits,
        known=known,
        values={feature: names for feature, names in categorical.items() if names},
        shared=num_scores > 1 and min(sizes, default=1) > 1,
    )


def _vector_size(tree):
    return max(1, int(tree["tree_param"].get("size_leaf_vector", 1) or 1))


def _read_parameters(learner, model):
    """Returns arguments of build_ensemble, and the names of categories by feature.

    The names are () if the file does not have them.
    """
    own = learner["learner_model_param"]
    num_features = int(own["num_feature"])
    num_scores = max(1, int(own["num_class"]), int(own.get("num_target", 1)))
    if num_scores > max(_MOST_SCORES, len(model["trees"])):
        raise ValueError(
            "num_class and num_target must be at most "
            f"{max(_MOST_SCORES, len(model['trees']))}, got {num_scores}"
        )
    base = np.array(json.loads(own["base_score"]), np.float64).reshape(-1)
    base = link(learner["objective"]["name"], base)
    names = tuple(map(str, learner.get("feature_names", [])))
    types = list(learner.get("feature_types", []))
    if types and len(types) != num_features:
        raise ValueError(
            f"feature_types must have {num_features} entries, got {len(types)}"
        )
    categorical: dict[int, Any] = {f: () for f, t in enumerate(types) if t == "c"}
    encodings = model.get("cats", {}).get("enc", [])
    for feature, encoding in enumerate(encodings):
        found = read_categories(encoding)
        if found:
            categorical[feature] = found
    parameters: dict[str, Any] = dict(
        num_features=num_features,
        init_score=np.broadcast_to(base, num_scores).astype(np.float32),
        feature_names=names or None,
    )
    return parameters, categorical


def link(objective: str, base: Float[np.ndarray, " K"]) -> Float32[np.ndarray, " K"]:
    """Converts XGBoost's base_score to scores, in float32 as XGBoost does."""
    base = base.astype(np.float32)
    with np.errstate(divide="ignore"):
        if objective in LOGIT:
            return -np.log(np.float32(1) / base - np.float32(1))
        return np.log(base) if objective in LOG else base


def _read_tree(tree, score, size, weight):
    """Converts a tree to nodes.

    A tree with several values per leaf is converted once for each score, and ``score``
    selects the value.
    """
    left = _read_array(tree, "left_children", np.int32)
    num_nodes = len(left)
    right = _read_array(tree, "right_children", np.int32, num_nodes)
    leaf = left == LEAF
    conditions = _read_array(tree, "split_conditions", np.float32, num_nodes)
    categorical = np.zeros(num_nodes, bool)
    if "split_type" in tree:
        categorical = _read_array(tree, "split_type", np.int32, num_nodes) == 1
    # XGBoost splits by <, jboost by <=.
    with np.errstate(over="ignore"):
        threshold = round_down(np.nextafter(conditions, np.float32(-np.inf)))
    if np.isnan(threshold[~leaf & ~categorical]).any():
        raise ValueError("split_conditions must not be NaN in a numeric split")
    value = conditions
    # With leaf_weights, the right child of a leaf is the index of its row in them.
    if size > 1 and "leaf_weights" in tree:
        weights = _read_array(tree, "leaf_weights", np.float32).reshape(-1, size)
        place = np.where(leaf, right, 0)
        if place.min(initial=0) < 0:
            raise ValueError(
                "right_children of leaves must be indices of leaf_weights, got "
                f"{place.min()}"
            )
        value = weights[place, score]
    elif size > 1:
        value = _read_array(tree, "base_weights", np.float32, num_nodes * size)
        value = value.reshape(-1, size)[:, score]
    unknown = np.full(num_nodes, np.nan)
    return Nodes(
        left=left,
        right=np.where(leaf, LEAF, right).astype(np.int32),
        feature=_read_array(tree, "split_indices", np.int32, num_nodes),
        threshold=np.where(categorical, np.float32(np.nan), threshold),
        missing_left=_read_array(tree, "default_left", np.int32, num_nodes) != 0,
        value=value * np.float32(weight),
        gradient=unknown,
        curvature=_read_array(tree, "sum_hessian", np.float64, num_nodes) / size,
        weight=unknown,
    )


def _read_array(tree, name, dtype, size=None):
    """Returns a list of numbers as an array, and checks its length if given."""
    values = np.asarray(tree[name])
    if values.ndim != 1 or (size is not None and len(values) != size):
        raise ValueError(f"{name} must have length {size}, got shape {values.shape}")
    if values.size and values.dtype.kind not in "iufb":
        raise ValueError(f"{name} must hold numbers, got {values.dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        read = values.astype(dtype)
    if read.dtype.kind == "i" and not np.array_equal(read, values):
        raise ValueError(f"{name} must hold integers that fit into {read.dtype}")
    return read


def _find_splits(tree, nodes, number):
    """Returns the categorical splits of a tree; the categories they list go right."""
    first = np.asarray(tree.get("categories_segments", []), np.int64)
    sizes = np.asarray(tree.get("categories_sizes", []), np.int64)
    values = np.asarray(tree.get("categories", []), np.int64)
    if values.size and values.min() < 0:
        raise ValueError(f"categories must not be negative, got {values.min()}")
    inside = (first >= 0) & (sizes >= 0) & (first + sizes <= values.size)
    if not inside.all() or sizes.sum() > values.size:
        raise ValueError(
            "categories_segments and categories_sizes must describe disjoint slices of "
            f"categories, which has length {values.size}"
        )
    categorical = ~nodes.is_leaf & np.isnan(nodes.threshold)
    splits = [
        CategorySplit(number, int(node), int(nodes.feature[node]), values[a:b], False)
        for node, a, b in zip(
            tree.get("categories_nodes", []), first, first + sizes, strict=True
        )
        if categorical[node]
    ]
    if len({split.node for split in splits}) != np.count_nonzero(categorical):
        raise ValueError("categories_nodes must list every categorical split once")
    return splits


def _find_known(categorical, splits):
    """Returns the categories of each categorical feature.

    If the file does not name them, they are a range of integers that covers the values
    in the splits with room for more, because XGBoost sends unseen values to the left.
    """
    most = dict.fromkeys(categorical, 0)
    for split in splits:
        largest = int(split.values.max(initial=0))
        most[split.feature] = max(most.get(split.feature, 0), largest)
    known = {}
    for feature, value in most.items():
        names = categorical.get(feature, ())
        least = min(max(_LEAST_VALUES, 2 * value + 2), MOST_VALUES)
        known[feature] = KnownValues(len(names) or max(least, value + 1))
    return known


def _keep_known(split, known):
    """Drops values beyond the names of a feature, which no data frame can hold.

    Our writer lists them where missing values go right: all features share the length
    of the longest list of names.
    """
    return split._replace(values=split.values[split.values < known.length])
