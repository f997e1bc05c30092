# SPDX-License-Identifier: Apache-2.0
"""Reads scikit-learn models: single trees, forests and both kinds of boosting."""

from typing import Any

import numpy as np
from jaxtyping import Float

from jboost.entry.decorators import on_host
from jboost.interchange.linked import (
    CategorySplit,
    ForeignError,
    KnownValues,
    build_ensemble,
    report_failures,
    round_down,
)
from jboost.model.ensemble import Ensemble
from jboost.model.nodes import LEAF, Nodes

_READ = (
    "DecisionTree*, ExtraTree*, RandomForest*, ExtraTrees*, GradientBoosting* and "
    "HistGradientBoosting*, regressors and classifiers"
)


@on_host("read the model first")
def read_sklearn(estimator: Any) -> Ensemble:
    """Reads the trees of a fitted scikit-learn estimator.

    Up to rounding to float32, the scores of :func:`jboost.predict` are:

    - for regressors, the result of ``predict`` (for GradientBoosting and
      HistGradientBoosting the raw predictions, before the inverse link); each output
      becomes a score;
    - for trees and forests that classify, probabilities: of the second class if there
      are two, else of all classes, in the order of ``classes_``;
    - for boosted classifiers, the result of ``decision_function``.

    Thresholds become float32. Trees, forests and GradientBoosting also convert x to
    float32, so every row reaches the same leaf. HistGradientBoosting compares in
    float64, so a row may reach another leaf if its x exceeds a threshold by less than
    float32 can represent. Columns that need this precision, such as Unix seconds, are
    compared in float64, as by :func:`read_lightgbm`. String categories are kept as the
    categories of a data frame; integer categories stay integers.

    Args:
      estimator: one of DecisionTree*, ExtraTree*, RandomForest*, ExtraTrees*,
        GradientBoosting* or HistGradientBoosting*.

    Returns:
      A model with the sum of row weights of each leaf. Sums of gradients and curvature
      are NaN, because scikit-learn does not keep them.

    Raises:
      ImportError: scikit-learn is not installed.
      TypeError: the estimator is of another type.
      ValueError: the estimator is not fitted, or cannot be converted: a classifier with
        several outputs; an ``init`` that is an estimator; numeric categories that are
        negative, too large or not integers.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from sklearn.ensemble import RandomForestRegressor
      >>> x = np.arange(40.0)[:, None]
      >>> forest = RandomForestRegressor(5, random_state=0).fit(x, np.sqrt(x[:, 0]))
      >>> scores = jb.predict(jb.interchange.read_sklearn(forest), x)
      >>> bool(np.allclose(scores, forest.predict(x)))
      True
    """
    try:
        from sklearn import ensemble, tree
        from sklearn.exceptions import NotFittedError
        from sklearn.utils.validation import check_is_fitted
    except ImportError:
        raise ImportError("read_sklearn needs scikit-learn: install it") from None
    families = (
        (tree, "DecisionTree", _read_forest),
        (ensemble, "RandomForest", _read_forest),
        (ensemble, "ExtraTrees", _read_forest),
        (ensemble, "GradientBoosting", _read_boosting),
        (ensemble, "HistGradientBoosting", _read_histograms),
    )
    for module, family, read in families:
        kinds = (getattr(module, family + kind) for kind in ("Regressor", "Classifier"))
        if isinstance(estimator, tuple(kinds)):
            try:
                check_is_fitted(estimator)
            except NotFittedError:
                raise ValueError("estimator must be fitted, but it is not") from None
            name = f"estimator {type(estimator).__name__}"
            with report_failures(name, "scikit-learn"):
                return read(estimator)
    raise TypeError(f"estimator must be one of {_READ}, got {type(estimator).__name__}")


def _build(estimator, trees, init_score, **others):
    names = getattr(estimator, "feature_names_in_", None)
    return build_ensemble(
        trees,
        init_score=np.asarray(init_score, np.float32),
        num_features=int(estimator.n_features_in_),
        absent="zero",  # as scikit-learn reads sparse matrices
        feature_names=None if names is None else tuple(map(str, names)),
        **others,
    )


def _read_forest(estimator):
    """Reads a tree or a forest, which averages the values that an Ensemble adds."""
    if estimator.n_outputs_ > 1 and hasattr(estimator, "classes_"):
        raise ForeignError(
            "must have one output if it is a classifier, got "
            f"{estimator.n_outputs_} outputs"
        )
    members = getattr(estimator, "estimators_", [estimator])
    trees, num_scores = [], 1
    for member in members:
        values = member.tree_.value  # [M, outputs, classes]
        if hasattr(estimator, "classes_"):
            values = values / values.sum(axis=2, keepdims=True)
            values = values[:, 0, 1:] if values.shape[2] == 2 else values[:, 0]
        else:
            values = values[:, :, 0]
        num_scores = values.shape[1]
        trees += [_make_nodes(member.tree_, v / len(members)) for v in values.T]
    return _build(estimator, trees, np.zeros(num_scores), shared=num_scores > 1)


def _read_boosting(estimator):
    from sklearn.dummy import DummyClassifier, DummyRegressor

    members = estimator.estimators_  # [rounds, K]
    constant = isinstance(estimator.init_, DummyClassifier | DummyRegressor)
    if not constant and not isinstance(estimator.init_, str):
        raise ForeignError(
            "must have an init of None or 'zero', got the estimator "
            f"{type(estimator.init_).__name__}"
        )
    start = np.zeros(members.shape[1])
    if constant:
        # A dummy estimator predicts a constant, so one arbitrary row is enough.
        blank = np.zeros((1, estimator.n_features_in_), np.float32)
        start = np.asarray(estimator._raw_predict_init(blank), float).reshape(-1)
    trees = [
        _make_nodes(member.tree_, estimator.learning_rate * member.tree_.value[:, 0, 0])
        for member in members.reshape(-1)
    ]
    return _build(estimator, trees, start)


def _make_nodes(tree, value: Float[np.ndarray, " M"]):
    """Converts a tree of sklearn.tree to nodes.

    scikit-learn sets the feature of leaves to -2; nodes expect a valid index.
    """
    leaf = tree.children_left == LEAF
    missing_left = getattr(tree, "missing_go_to_left", np.zeros(len(leaf), bool))
    weight = np.asarray(tree.weighted_n_node_samples, float)
    return Nodes(
        left=tree.children_left.astype(np.int32),
        right=tree.children_right.astype(np.int32),
        feature=np.where(leaf, 0, tree.feature).astype(np.int32),
        threshold=round_down(tree.threshold),
        missing_left=np.asarray(missing_left).astype(bool),
        value=value.astype(np.float32),
        gradient=np.full(len(leaf), np.nan),
        curvature=np.full(len(leaf), np.nan),
        weight=weight,
    )


def _read_histograms(estimator):
    """Reads HistGradientBoosting.

    Its preprocessor moves categorical columns to the front and encodes them, so indices
    of features and categories are mapped back to the columns and values of x.
    """
    members = [member for row in estimator._predictors for member in row]
    start = np.asarray(estimator._baseline_prediction, float).reshape(-1)
    mask = estimator.is_categorical_
    indices, encodings = np.arange(estimator.n_features_in_), []
    if mask is not None:
        indices = np.concatenate([np.flatnonzero(mask), np.flatnonzero(~mask)])
        encoder = estimator._preprocessor.named_transformers_["encoder"]
        encodings = [_decode(categories) for categories in encoder.categories_]
    splits, trees = [], []
    for number, member in enumerate(members):
        nodes = member.nodes
        trees.append(_make_histogram_nodes(nodes, indices))
        split = nodes["is_categorical"].astype(bool) & ~nodes["is_leaf"].astype(bool)
        for node in np.flatnonzero(split):
            feature = int(nodes["feature_idx"][node])
            words = member.raw_left_cat_bitsets[nodes["bitset_idx"][node]].astype("<u4")
            bits = np.unpackbits(words.view(np.uint8), bitorder="little")
            left = encodings[feature][0][np.flatnonzero(bits)]
            index = int(indices[feature])
            splits.append(CategorySplit(number, int(node), index, left, True))
    known, names = {}, {}
    for index, (value, named) in zip(indices.tolist(), encodings, strict=False):
        known[index] = KnownValues(int(value.max(initial=-1)) + 1, value)
        if named is not None:
            names[index] = named
    bins = zip(indices.tolist(), estimator._bin_mapper.bin_thresholds_, strict=True)
    ranges = {i: (own[0], own[-1]) for i, own in bins if len(own) and i not in known}
    sets = dict(splits=splits, known=known, values=names)
    return _build(estimator, trees, start, ranges=ranges, **sets)


def _decode(categories):
    """Returns the integer for each code of an encoder, and their categories or None.

    Integers represent themselves, and strings become 0, 1, ...; NaN is missing.
    """
    if categories.dtype.kind in "OUSb":
        # c == c is false for NaN, which the encoder lists as a category.
        names = tuple(c for c in categories.tolist() if c is not None and c == c)
        return np.arange(len(names)), names
    values = categories[~np.isnan(categories.astype(float))].astype(float)
    if ((values < 0) | (values != np.floor(values)) | (values >= 2**24)).any():
        raise ForeignError(
            "must have numeric categories that are integers from 0 to 2^24 - 1, got "
            f"{values[:5]}"
        )
    return values.astype(int), None


def _make_histogram_nodes(nodes, indices):
    leaf = nodes["is_leaf"].astype(bool)
    categorical = nodes["is_categorical"].astype(bool)
    unknown = np.full(len(nodes), np.nan)
    exact = np.where(categorical, np.nan, nodes["num_threshold"])
    return Nodes(
        left=np.where(leaf, LEAF, nodes["left"].astype(np.int64)).astype(np.int32),
        right=np.where(leaf, LEAF, nodes["right"].astype(np.int64)).astype(np.int32),
        feature=np.where(leaf, 0, indices[nodes["feature_idx"]]).astype(np.int32),
        threshold=_round_near(exact),
        missing_left=nodes["missing_go_to_left"].astype(bool),
        value=nodes["value"].astype(np.float32),
        gradient=unknown,
        curvature=unknown,
        weight=nodes["count"].astype(float),
        exact_threshold=exact,
    )


def _round_near(threshold):
    """Rounds to the nearest float32, and halfway cases down.

    A threshold of HistGradientBoosting may be a float64 value of x: it must round as x
    does, hence to the nearest. It may also lie halfway between two float32 values: the
    upper one must go right, hence down.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        near = threshold.astype(np.float32)
        below = np.nextafter(near, np.float32(-np.inf))
        halfway = (near > threshold) & (near - threshold >= threshold - below)
    return round_down(np.where(halfway, below, near))
