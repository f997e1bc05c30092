# SPDX-License-Identifier: Apache-2.0
"""Models for XGBoost.

In: an Ensemble. Out: a file, JSON or UBJSON, that XGBoost loads and predicts the same
from, and with it what reads XGBoost's models: SHAP, ONNX converters, FIL, Treelite.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from jboost.entry import checks
from jboost.entry.decorators import on_host
from jboost.interchange.category_sets import list_values
from jboost.interchange.linked import list_trees
from jboost.interchange.ubjson import write_ubjson
from jboost.interchange.xgboost_categories import CategoryNames, describe_categories
from jboost.interchange.xgboost_reader import LOG, LOGIT, link
from jboost.model.containers import replace_file
from jboost.model.ensemble import Ensemble, check_model
from jboost.model.nodes import LEAF, Nodes

_VERSION = [3, 2, 0]
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
# XGBoost ends names at NUL, and decodes few of the escapes of JSON.
_NOT_IN_UBJSON = re.compile("[\x00\ud800-\udfff]")
_NOT_IN_JSON = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")
_NO_PARENT = 2147483647
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
    """Writes a model as a file of XGBoost's (3.1 or later).

    XGBoost's margins, ``predict(..., output_margin=True)``, are the scores of
    ``jb.predict``, up to the rounding of sums in float32; NaN is missing in both. With
    the default objective, ``predict`` gives the scores, too. An offset of training is
    no part of a model: give it to XGBoost as ``base_margin``.

    Categories of a data frame are written by name, so that XGBoost predicts the same
    from the table of training: strings, and integers that are int64 there, too. That
    includes levels that its dtype declares and that do not occur, up to 65,536 a
    column. For a category that is not in the file XGBoost 3.2 raises an error, or where
    it sorts before the last name of its feature, takes the category that follows it.

    Where categories are integers of a matrix, an unseen one counts as missing here,
    while XGBoost sends it to the left. Values up to the greatest in training are
    written so that both agree; one beyond goes another way where a node sends missing
    values to the right. XGBoost refuses infinite values. Sparse matrices are missing in
    their gaps there, whatever ``absent`` says here.

    Covers (``sum_hessian``) and gains are written where the model knows the sums of its
    leaves, so that SHAP values and importances work; else covers are weights, or 0.

    Args:
      model: from :func:`jboost.fit` or any of the readers; K scores become the classes
        of "multi:softprob" and "multi:softmax", for other objectives K targets.
      path: UBJSON where it ends in ".ubj", else JSON. It is replaced at once, when all
        is written.
      objective: what XGBoost makes of scores in ``predict``: "binary:logistic"
        probabilities, "count:poisson" means, and so on. It does not change the scores.
      categories: "names", or "codes" to leave the names of categories out, which some
        readers of such files need (Treelite). XGBoost must then be given a matrix with
        the positions of categories in ``model.categories.values``, not a data frame,
        whose codes it would take as they are.

    Raises:
      OSError: the file cannot be written.
      TypeError: the model is no Ensemble.
      ValueError: the objective is not known, or does not fit K; a leaf value or an
        initial score is infinite or NaN; XGBoost cannot hold the name of a feature, or
        that of a category (beyond ASCII, floats, booleans).

    Example:
      >>> import json, pathlib, tempfile, numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, _ = jb.fit(x, x[:, 0] > 20, jb.losses.logistic, num_rounds=5)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder, "model.json")
      ...     jb.interchange.write_xgboost(model, path, objective="binary:logistic")
      ...     document = json.loads(path.read_text())
      >>> document["learner"]["objective"]["name"]
      'binary:logistic'
    """
    check_model(model)
    checks.check_word("objective", objective, tuple(_OBJECTIVES))
    checks.check_word("categories", categories, ("names", "codes"))
    if objective.startswith("multi:") and model.num_scores < 2:
        raise ValueError(
            f"objective must be one of a single score, as the model has one, got "
            f"{objective!r}"
        )
    for name in ("leaf_value", "init_score"):
        if not np.isfinite(np.asarray(getattr(model, name))).all():
            raise ValueError(f"{name} of the model must be finite, for XGBoost")
    path = Path(path)
    refused = _NOT_IN_UBJSON if path.suffix == ".ubj" else _NOT_IN_JSON
    _check_feature_names(model.feature_names or (), refused)
    names = describe_categories(model, categories)
    trees = list_trees(model)
    base, trees = _split_init_score(model, trees, objective)
    document = _describe(model, trees, base, objective, names)
    if path.suffix == ".ubj":
        content = write_ubjson(document)
    else:  # XGBoost does not decode what JSON escapes beyond ASCII
        text = json.dumps(document, default=_to_list, ensure_ascii=False)
        content = text.encode("utf-8")
    replace_file(path, [content])


def _check_feature_names(names, refused):
    for name in names:
        if refused.search(name):
            raise ValueError(
                "feature_names of the model must have no lone surrogates, no NUL and, "
                "outside .ubj files, no control characters but newline, return and "
                f"tab, for XGBoost, got {name!r}"
            )


def _split_init_score(model, trees, objective):
    """What XGBoost keeps as base_score, and trees with what that leaves over.

    It keeps a probability or a mean, of which float32 may not tell large scores apart;
    they go to the leaves of the first round.
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
    """The document: numbers of parameters are strings, as XGBoost wants them."""
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
    booster = {
        "cats": names,
        "gbtree_model_param": {
            "num_parallel_tree": "1",
            "num_trees": str(len(trees)),
        },
        "iteration_indptr": list(range(0, len(trees) + 1, num_scores)),
        "tree_info": [i % num_scores for i in range(len(trees))],
        "trees": [
            _describe_tree(model, i, tree, l2[i]) for i, tree in enumerate(trees)
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


def _describe_tree(model, number, tree: Nodes, l2):
    leaf = tree.is_leaf
    size = len(tree.left)
    parents = np.full(size, _NO_PARENT, np.int32)
    for children in (tree.left, tree.right):
        parents[children[~leaf]] = np.flatnonzero(~leaf)
    sets = _list_categories(model, tree)
    sizes = [len(values) for _, values in sets]
    condition = np.where(leaf, tree.value, _float_above(tree.threshold))
    categorical = ~leaf & np.isnan(tree.threshold)
    coded = () if model.categories is None else model.categories.features
    if (np.isin(tree.feature, coded) & ~leaf & ~categorical).any():
        raise ValueError(
            "a tree compares the codes of a categorical feature with a threshold, "
            "which XGBoost cannot: its categories have sets only"
        )
    condition = np.where(categorical, np.float32(_TINY), condition)
    gain, weight = _measure(tree, l2)
    return {
        "base_weights": np.where(leaf, tree.value, weight).astype(np.float32),
        "categories": _integers([v for _, values in sets for v in values]),
        "categories_nodes": _integers([node for node, _ in sets]),
        "categories_segments": np.cumsum([0, *sizes])[:-1].astype(np.int64),
        "categories_sizes": np.array(sizes, np.int64),
        "default_left": (tree.missing_left & ~leaf).astype(np.uint8),
        "id": number,
        "left_children": tree.left,
        "loss_changes": gain.astype(np.float32),
        "parents": parents,
        "right_children": tree.right,
        "split_conditions": condition.astype(np.float32),
        "split_indices": np.where(leaf, 0, tree.feature).astype(np.int32),
        "split_type": categorical.astype(np.uint8),
        "sum_hessian": _cover(tree).astype(np.float32),
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(model.num_features),
            "num_nodes": str(size),
            "size_leaf_vector": "1",
        },
    }


def _float_above(threshold):
    """The t with x < t where x <= threshold; denormals are as 0, and XGBoost's are not.

    Where all values go left, XGBoost's do but for the largest float.
    """
    with np.errstate(over="ignore"):
        above = np.nextafter(threshold, np.float32(np.inf))
    above = np.where(np.abs(threshold) < _TINY, _TINY, above)
    return np.minimum(above, _LARGEST)


def _list_categories(model, tree):
    """(node, values that go right) of the categorical splits.

    Values that were not in training go where missing ones do. XGBoost wants at least
    one; the value after the last is none of training.
    """
    found = []
    for node in np.flatnonzero(~tree.is_leaf & np.isnan(tree.threshold)):
        assert model.categories is not None and tree.left_codes is not None
        feature = int(tree.feature[node])
        _, right, unknown = list_values(
            model.categories, feature, tree.left_codes[node]
        )
        if not tree.missing_left[node]:
            right = np.union1d(right, unknown)
        beyond = [model.categories.codes.shape[1]]
        found.append((int(node), right.tolist() or beyond))
    return found


def _cover(tree):
    """Sums of curvature, or of weights where they are not known."""
    known = np.isfinite(tree.curvature).all()
    return np.nan_to_num(tree.curvature if known else tree.weight)


def _measure(tree, l2):
    """Gain of each split, and -G / (H + l2) of each node; 0 where not known."""
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
    """For JSON: float32 in its shortest form."""
    if array.dtype == np.float32:
        return array.astype("U32").astype(np.float64).tolist()
    return array.tolist()
