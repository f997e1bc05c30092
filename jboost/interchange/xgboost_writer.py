# SPDX-License-Identifier: Apache-2.0
"""Writes models to JSON or UBJSON files that give the same scores in XGBoost.

Other tools that read XGBoost models can use them, too: SHAP, ONNX converters, FIL,
Treelite.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from jboost.entry import checks
from jboost.entry.decorators import on_host
from jboost.entry.messages import show
from jboost.interchange.linked import list_trees
from jboost.interchange.xgboost_format import (
    CategoryNames,
    describe_categories,
    write_ubjson,
)
from jboost.interchange.xgboost_reader import LOG, LOGIT, link
from jboost.model.containers import replace_file
from jboost.model.ensemble import Ensemble, check_model
from jboost.model.nodes import LEAF, Nodes, split_values
from jboost.model.wide_thresholds import warn_of_float32

_VERSION = [3, 2, 0]  # the version of XGBoost that defines the file format
_LINEAR = {"reg_loss_param": {"scale_pos_weight": "1"}}
_OBJECTIVES: dict[str, dict[str, Any]] = {
    "reg:squarederror": _LINEAR,
    "reg:logistic": _LINEAR,
    "binary:logistic": _LINEAR,
    "binary:logitraw": _LINEAR,
    "binary:hinge": {},
    "reg:absoluteerror": {},
    "reg:squaredlogerror": {},
    "reg:pseudohubererror": {"pseudo_huber_param": {"huber_slope": "1"}},
    "count:poisson": {"poisson_regression_param": {"max_delta_step": "0.7"}},
    "reg:gamma": _LINEAR,
    "reg:tweedie": {"tweedie_regression_param": {"tweedie_variance_power": "1.5"}},
    "multi:softprob": {"softmax_multiclass_param": {}},
    "multi:softmax": {"softmax_multiclass_param": {}},
}
# XGBoost truncates names at NUL, and decodes only some of the JSON escapes.
_NOT_IN_UBJSON = re.compile("[\x00\ud800-\udfff]")
_NOT_IN_JSON = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")
_NO_PARENT = 2147483647  # XGBoost's parent of the root
_TINY = np.finfo(np.float32).tiny
_LARGEST = np.finfo(np.float32).max


@on_host("call it on concrete arrays", runs_jax=False)
def write_xgboost(
    model: Ensemble,
    path: str | os.PathLike[str],
    *,
    objective: str = "reg:squarederror",
    categories: CategoryNames = "names",
) -> None:
    """Writes a model as an XGBoost file, for XGBoost 3.1 or later.

    XGBoost's margins, ``predict(..., output_margin=True)``, are the scores of
    :func:`jboost.predict`, up to the rounding of sums in float32. Both read NaN as
    missing. With the default objective, XGBoost's ``predict`` returns the scores, too.
    A model does not contain the offset of its training: pass it to XGBoost as
    ``base_margin``.

    Categories of a data frame are written by name, so XGBoost predicts the same from
    the same data frame. Names may be strings, or integers if the column is int64 in
    XGBoost, too. Levels that the dtype declares but that do not occur are included, up
    to 65,536 per column. XGBoost 3.2 raises an error for a category that is not in the
    file; if the category sorts before the last name of its feature, XGBoost instead
    silently uses the next name.

    Three inputs are treated differently by XGBoost:

    - An integer category of a matrix that training did not see counts as missing in
      jboost, while XGBoost sends it to the left. For values up to the largest one in
      training, the file makes both agree. For larger values, they differ in nodes that
      send missing values to the right.
    - XGBoost rejects infinite values.
    - XGBoost reads the entries that a sparse matrix does not store as missing,
      regardless of ``absent``.

    If the model has the sums of its leaves, the file contains covers (``sum_hessian``)
    and gains, so SHAP values and importances work. Otherwise covers are row weights, or
    0 if those are unknown, too.

    XGBoost has no linear leaves: train with ``linear_leaves=False``. A model with one
    tree per round for all scores is written with vector leaves, as
    XGBoost does with ``multi_strategy="multi_output_tree"``, for XGBoost 3.2 or later.

    Args:
      model: a model from :func:`jboost.fit` or a reader. K scores become the K classes
        of "multi:softprob" and "multi:softmax", and K targets for other objectives.
      path: the file to write: UBJSON if the name ends in ".ubj", else JSON. An existing
        file is replaced atomically, once all data is written.
      objective: how XGBoost's ``predict`` transforms scores: "binary:logistic" to
        probabilities, "count:poisson" to means, and so on. It does not change scores.
      categories: "names", or "codes" to leave out the names of categories, because some
        tools cannot read them (Treelite). Then pass XGBoost a matrix with the indices
        of categories in ``model.categories.values``. Do not pass a data frame: XGBoost
        would use its codes, which may differ.

    Raises:
      OSError: the file cannot be written.
      TypeError: the model is not an Ensemble.
      ValueError: the objective is unknown or does not fit K; leaves are linear; a leaf
        value or an initial score is infinite or NaN; XGBoost cannot store the name of a
        feature or of a category (strings beyond ASCII, floats, booleans).

    Example:
      >>> import json, pathlib, tempfile, numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> loss = jb.losses.logistic
      >>> model, _ = jb.fit(x, x[:, 0] > 20, loss, num_rounds=5, linear_leaves=False)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "model.json")
      ...     jb.interchange.write_xgboost(model, path, objective="binary:logistic")
      ...     document = json.loads(path.read_text())
      >>> document["learner"]["objective"]["name"]
      'binary:logistic'
    """
    check_model(model)
    if model.slopes is not None:
        raise ValueError(
            "model must have constant leaves for XGBoost, got linear leaves; train it "
            "with linear_leaves=False"
        )
    warn_of_float32(model, "XGBoost")
    checks.check_word("objective", objective, tuple(_OBJECTIVES))
    checks.check_word("categories", categories, ("names", "codes"))
    if objective.startswith("multi:") and model.num_scores < 2:
        raise ValueError(
            "objective must not be a multiclass one for a model with one score, got "
            f"{show(objective)}"
        )
    for name in ("leaf_value", "init_score"):
        if not np.isfinite(np.asarray(getattr(model, name))).all():
            raise ValueError(f"{name} of the model must be finite for XGBoost, is not")
    path = Path(path)
    refused = _NOT_IN_UBJSON if path.suffix == ".ubj" else _NOT_IN_JSON
    _check_feature_names(model.feature_names or (), refused)
    names = describe_categories(model, categories)
    trees = list_trees(model)
    base, trees = _split_init_score(model, trees, objective)
    document = _describe(model, trees, base, objective, names)
    if path.suffix == ".ubj":
        content = write_ubjson(document)
    else:  # XGBoost does not decode JSON escapes beyond ASCII: write UTF-8 instead
        text = json.dumps(document, default=_to_list, ensure_ascii=False)
        content = text.encode("utf-8")
    replace_file(path, [content])


def _check_feature_names(names, refused):
    for name in names:
        if refused.search(name):
            raise ValueError(
                "feature_names of the model must not have lone surrogates, NUL or, "
                "outside .ubj files, control characters other than newline, return "
                f"and tab, which XGBoost cannot store, got {show(name)}"
            )


def _split_init_score(model, trees, objective):
    """Returns base_score and the trees; leaves may include the initial score.

    XGBoost stores base_score as a probability or a mean, which cannot represent large
    scores in float32. In that case, base_score stands for a score of 0 and the leaves
    of the first round include the initial score.
    """
    score = np.atleast_1d(np.asarray(model.init_score, np.float32))
    wide = score.astype(np.float64)
    base = wide
    with np.errstate(over="ignore"):
        if objective in LOGIT:
            base = 1 / (1 + np.exp(-wide))
        elif objective in LOG:
            base = np.exp(wide)
    base = base.astype(np.float32)
    error = np.abs(link(objective, base) - score)
    if (error <= 4e-7 * np.maximum(1, np.abs(score))).all() or not trees:
        return base, trees
    first = [
        tree._replace(value=tree.value + start)
        for tree, start in zip(trees, score, strict=False)
    ]
    neutral = np.float32(0.5 if objective in LOGIT else 1)
    return np.full(score.shape, neutral), first + trees[len(score) :]


def _describe(model, trees, base, objective, names):
    """Returns the document. XGBoost requires parameters to be strings, even numbers."""
    num_scores, multi = model.num_scores, objective.startswith("multi:")
    parameters = dict(_OBJECTIVES[objective])
    if multi:
        parameters["softmax_multiclass_param"] = {"num_class": str(num_scores)}
    categories = model.categories
    coded = () if categories is None else categories.features
    types = ["c" if f in coded else "float" for f in range(model.num_features)]
    l2 = np.zeros(len(trees))
    if model.sums is not None:
        l2 = np.nan_to_num(np.asarray(model.sums.l2, np.float64)).reshape(-1)
    together = num_scores if model.shares_structure else 1  # scores of a tree
    parts = [slice(i, i + together) for i in range(0, len(trees), together)]
    booster = {
        "cats": names,
        "gbtree_model_param": {
            "num_parallel_tree": "1",
            "num_trees": str(len(parts)),
        },
        "iteration_indptr": list(range(0, len(parts) + 1, num_scores // together)),
        "tree_info": [i * together % num_scores for i in range(len(parts))],
        "trees": [
            _describe_tree(model, i, trees[part], l2[part])
            for i, part in enumerate(parts)
        ],
    }
    learner = {
        "attributes": {},
        "feature_names": list(model.feature_names or ()),
        "feature_types": types if coded or model.feature_names else [],
        "gradient_booster": {"model": booster, "name": "gbtree"},
        "learner_model_param": {
            "base_score": "[" + ",".join(map(str, base)) + "]",
            "boost_from_average": "1",
            "num_class": str(num_scores if multi else 0),
            "num_feature": str(model.num_features),
            "num_target": str(1 if multi else num_scores),
        },
        "objective": {"name": objective, **parameters},
    }
    return {"learner": learner, "version": _VERSION}


def _describe_tree(model, number, trees: list[Nodes], l2):
    """Describes a tree, given as often as scores share it."""
    tree, num_scores = trees[0], len(trees)
    leaf = tree.is_leaf
    size = len(tree.left)
    parents = np.full(size, _NO_PARENT, np.int32)
    for children in (tree.left, tree.right):
        parents[children[~leaf]] = np.flatnonzero(~leaf)
    sets = _list_categories(model, tree)
    sizes = [len(values) for _, values in sets]
    several = num_scores > 1
    condition = np.where(
        leaf, 0 if several else tree.value, _float_above(tree.threshold)
    )
    categorical = ~leaf & np.isnan(tree.threshold)
    coded = () if model.categories is None else model.categories.features
    if (np.isin(tree.feature, coded) & ~leaf & ~categorical).any():
        raise ValueError(
            "categorical features must be split by sets of categories for XGBoost, got "
            "a tree that compares codes with a threshold"
        )
    # A placeholder: XGBoost uses only the set of such a node, and JSON has no NaN.
    condition = np.where(categorical, np.float32(_TINY), condition)
    gains, weights = zip(*map(_measure, trees, l2), strict=True)
    values = np.stack([tree.value for tree in trees], axis=1).astype(np.float32)
    described = {
        "base_weights": np.where(leaf[:, None], values, np.stack(weights, axis=1))
        .astype(np.float32)
        .reshape(-1),
        "categories": _integers([v for _, values in sets for v in values]),
        "categories_nodes": _integers([node for node, _ in sets]),
        "categories_segments": np.cumsum([0, *sizes])[:-1].astype(np.int64),
        "categories_sizes": np.array(sizes, np.int64),
        "default_left": (tree.missing_left & ~leaf).astype(np.uint8),
        "id": number,
        "left_children": tree.left,
        "loss_changes": np.sum(gains, axis=0).astype(np.float32),
        "parents": parents,
        "right_children": tree.right,
        "split_conditions": condition.astype(np.float32),
        "split_indices": np.where(leaf, 0, tree.feature).astype(np.int32),
        "split_type": categorical.astype(np.uint8),
        "sum_hessian": np.sum([*map(_cover, trees)], axis=0).astype(np.float32),
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(model.num_features),
            "num_nodes": str(size),
            "size_leaf_vector": str(num_scores),
        },
    }
    if several:  # the right child of a leaf is the index of its values
        described["leaf_weights"] = values[leaf].reshape(-1)
        rows = np.cumsum(leaf, dtype=np.int32) - np.int32(1)
        described["right_children"] = np.where(leaf, rows, tree.right)
        described["parents"] = np.where(parents == _NO_PARENT, -1, parents)
    return described


def _float_above(threshold):
    """Returns thresholds t such that x < t is equivalent to x <= threshold.

    XGBoost compares denormals exactly, while XLA flushes them to 0. A threshold near 0
    therefore becomes the smallest normal number, below which all of them go left. An
    infinite threshold, which sends all values left, becomes the largest float, as
    XGBoost needs a finite one; only that float itself goes right.
    """
    with np.errstate(over="ignore"):
        above = np.nextafter(threshold, np.float32(np.inf))
    above = np.where(np.abs(threshold) < _TINY, _TINY, above)
    return np.minimum(above, _LARGEST)


def _list_categories(model, tree):
    """Returns pairs (node, values that go right) of the categorical splits.

    Values that training did not see go where missing values go. XGBoost requires at
    least one value: if there is none, we list the integer after the last known value.
    """
    found = []
    for node in np.flatnonzero(~tree.is_leaf & np.isnan(tree.threshold)):
        assert model.categories is not None and tree.left_codes is not None
        feature = int(tree.feature[node])
        _, right, unknown = split_values(
            model.categories, feature, tree.left_codes[node]
        )
        if not tree.missing_left[node]:
            right = np.union1d(right, unknown)
        beyond = [model.categories.codes.shape[1]]
        found.append((int(node), right.tolist() or beyond))
    return found


def _cover(tree):
    """Returns sums of curvature, or of weights if those are not known."""
    known = np.isfinite(tree.curvature).all()
    return np.nan_to_num(tree.curvature if known else tree.weight)


def _measure(tree, l2):
    """Returns the gain of each split and -G / (H + l2) of each node; 0 if unknown."""
    mass = tree.curvature + l2
    usable = np.isfinite(tree.gradient) & (mass > 0)
    weight = np.where(usable, -tree.gradient / np.where(usable, mass, 1), 0)
    score = -np.where(usable, tree.gradient, 0) * weight
    split = tree.left != LEAF
    gain = np.where(split, score[tree.left] + score[tree.right] - score, 0)
    return np.nan_to_num(gain), weight


def _integers(values):
    return np.array(list(values), np.int32)


def _to_list(array):
    """Converts an array for JSON; float32 in its shortest decimal form."""
    if array.dtype == np.float32:
        return array.astype("U32").astype(np.float64).tolist()
    return array.tolist()
