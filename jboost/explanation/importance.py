# SPDX-License-Identifier: Apache-2.0
"""Feature importance, from splits or permutations, and the trees as a table.

Training stores sums of gradient, curvature and weight for each leaf; those of an inner
node are sums over the leaves below it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import ArrayLike, Float, Shaped

from jboost import losses
from jboost.boosting.reports import mean_loss
from jboost.boosting.state import Data
from jboost.entry import checks
from jboost.entry.decorators import on_host
from jboost.entry.messages import MOST_LINES, cut, import_pandas, make_table, show
from jboost.entry.programs import compiled
from jboost.metrics import MAXIMIZED
from jboost.model.ensemble import Model, find_used_features, read_model
from jboost.model.nodes import (
    LEAF,
    Nodes,
    list_terms,
    name_values,
    split_values,
    take_tree,
)
from jboost.model.predicting import predict
from jboost.model.wide_thresholds import match_wide
from jboost.numerics.arrays import pad_rows, padded_size
from jboost.objective.tracing import trace_loss
from jboost.tables.domains import check_domain
from jboost.tables.frames import read_frame
from jboost.tables.targets import check_targets, check_weights
from jboost.training.metrics import (
    bind_metrics,
    check_metrics,
    describe_call,
    evaluate_metric,
    try_metrics,
)

ImportanceKind = Literal["improvement", "gain", "cover", "splits"]
KINDS = ("improvement", "gain", "cover", "splits")


class Importance(NamedTuple):
    """One number per feature; larger values mean more important features.

    Attributes:
      names: the names of the features; indices as strings if no names are known.
      values: the importance of each feature.
      deviations: standard deviations over repeats, for permutation importance.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> model, _ = jb.fit(x, 3 * x[:, 1] + x[:, 2], num_rounds=20)
      >>> found = jb.feature_importance(model)
      >>> found.names[np.argmax(found.values)], found.deviations
      ('1', None)
    """

    names: tuple[str, ...]
    values: Float[np.ndarray, " F"]
    deviations: Float[np.ndarray, " F"] | None = None

    def as_dict(self) -> dict[str, float]:
        """Returns {name: value}, the most important feature first."""
        order = np.argsort(-self.values, kind="stable")
        return {self.names[f]: float(self.values[f]) for f in order}

    def to_series(self) -> Any:
        """Returns a ``pandas.Series`` indexed by name, in the order of the features.

        Raises:
          ImportError: pandas is not installed.
        """
        series = import_pandas("to_series").Series
        return series(self.values, index=list(self.names), name="importance")

    def __repr__(self) -> str:
        """Returns a table of the most important features; ``print`` shows all."""
        lines = cut(str(self).splitlines(), MOST_LINES - 1, "features")
        return "\n".join([f"Importance of {len(self.names)} features", *lines])

    def _repr_html_(self) -> str:
        """Shows the most important features, with bars, in a notebook."""
        found = [*self.as_dict().items()][:MOST_LINES]
        rows = [[name, f"{value:.5g}"] for name, value in found]
        title = f"Importance of {len(self.names)} features"
        bars = [value for _, value in found]
        return make_table(title, [["feature", "importance"], *rows], bars)

    def __str__(self) -> str:
        """Returns a table of all features, the most important first."""
        width = max(map(len, self.names))
        lines = [f"{name:<{width}}  {v:12.6g}" for name, v in self.as_dict().items()]
        if self.deviations is None:
            return "\n".join(lines)
        spread = self.deviations[np.argsort(-self.values, kind="stable")]
        pairs = zip(lines, spread, strict=True)
        return "\n".join(f"{line} +- {deviation:.2g}" for line, deviation in pairs)


@on_host("call it on concrete arrays")
def feature_importance(
    model: Model,
    kind: ImportanceKind = "improvement",
    *,
    per_split: bool = False,
) -> Importance:
    """Returns the importance of each feature, from the splits of the trees.

    The kinds are sums over the nodes t that split on the feature (L and R are the
    children), computed from the training rows of the tree:

    ``"improvement"``: the average over trees of sum_t i_t^2 with
    i_t^2 = SSE(t) - SSE(L) - SSE(R), the least-squares improvement (Breiman et al.
    1984; Friedman 2001, eq. 44 and 45) in fitting the pseudo-responses -gradient,
    divided by the tree's mean curvature: for squared error the residuals.
    ``"gain"``: the sum of [G_L^2/(H_L+l2) + G_R^2/(H_R+l2) - G^2/(H+l2)] / 2 (Chen and
    Guestrin 2016, eq. 7, without the cost per leaf), in units of the loss times
    weight; with ``regularization="absolute"`` half of XGBoost's total_gain. Bounds on
    leaf values and l1 are ignored.
    ``"cover"``: the sum of curvature over the rows of the nodes (XGBoost's
    total_cover). ``"splits"``: the number of nodes.

    For a RegressionTree, improvement equals gain, and curvature equals weight. A split
    that several scores share counts once, and its other values are summed over them.
    Linear terms of leaves do not count; :func:`permutation_importance` includes them.

    Args:
      model: a model from :func:`jboost.fit`, :func:`jboost.to_ensemble` or
        :func:`jboost.cart.fit_tree`.
      kind: see above.
      per_split: whether to divide by the number of splits on the feature (as XGBoost's
        "gain" and "cover" do).

    Returns:
      Values in the order of the features; 0 for features that no tree splits on.

    Raises:
      TypeError, ValueError: an argument is invalid, or the model does not hold the
        training sums ("splits" does not need them).

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(200, 3))
      >>> model, _ = jb.fit(x, 3 * x[:, 1] + x[:, 2], num_rounds=20)
      >>> list(jb.feature_importance(model).as_dict())
      ['1', '2', '0']
    """
    ensemble = read_model(model)
    checks.check_word("kind", kind, KINDS)
    nodes, together = model.nodes(), 1
    if model.single_tree:  # a gain is that of all targets
        nodes = jax.tree.map(lambda array: array[:1], nodes)
    elif ensemble.shares_structure:
        together = ensemble.num_scores
    split, features = nodes.is_split[::together], nodes.feature[::together]
    values = split.astype(np.float64)
    if kind != "splits":
        measured = np.where(nodes.is_split, measure_nodes(nodes, kind), 0.0)
        values = measured.reshape(-1, together, split.shape[1]).sum(axis=1)
    total = _sum_by_feature(features, values, ensemble.num_features)
    if checks.check_flag("per_split", per_split):
        counts = _sum_by_feature(features, split, ensemble.num_features)
        total = total / np.maximum(counts, 1)
    elif kind == "improvement":
        total = total / max(1, len(split))
    return Importance(_names(ensemble), total)


@on_host("call it on concrete arrays")
def permutation_importance(
    model: Model,
    x: Any,
    y: Any,
    loss: Callable[..., Any] | losses.Adaptive = losses.squared_error,
    *,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    metric: str | Callable[..., Any] | None = None,
    num_repeats: int = 5,
    seed: int = 0,
) -> Importance:
    """Measures by how much the mean loss rises when a column of ``x`` is shuffled.

    Computes L(permuted) - L(x), averaged over ``num_repeats`` permutations (Breiman
    2001, Random Forests, section 10). The data should be held out from training.
    Features that no tree uses get 0 without being shuffled.

    Args:
      model: a model from :func:`jboost.fit` or :func:`jboost.cart.fit_tree`.
      x, y: rows and targets, as for :func:`jboost.fit`.
      loss: the loss to measure, usually that of training.
      sample_weight: weights of the rows in the mean.
      offset: the offset of the rows, as for :func:`jboost.predict`.
      metric: a metric to use instead of the loss: its name or a function, as for
        :func:`jboost.fit`. For built-in metrics that are maximized, such as "auc", the
        decrease is measured; for custom functions always the increase.
      num_repeats: the number of permutations of each column.
      seed: the random seed of the permutations.

    Returns:
      Mean rises with their standard deviations over repeats.

    Raises:
      TypeError, ValueError: arguments are inconsistent, or the loss or the metric is
        not finite.
      RuntimeError: the metric failed.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(300, 2))
      >>> y = x[:, 0]
      >>> model, _ = jb.fit(x[:200], y[:200], num_rounds=20)
      >>> found = jb.explanation.permutation_importance(model, x[200:], y[200:])
      >>> bool(found.values[0] > 10 * abs(found.values[1]))
      True
    """
    ensemble = read_model(model)
    checks.check_integer("num_repeats", num_repeats, least=1)
    checks.check_integer("seed", seed, least=0)
    matched, wide = match_wide(ensemble, x)
    schema = ensemble.schema._replace(wide=wide)
    frame = read_frame(x, "x", schema=schema, categorical=True)
    matrix = np.array(frame.matrix)  # a copy, because its columns are shuffled in place
    measure = _make_measure(
        model if wide is None else matched,
        ensemble.num_scores, matrix, y, loss, sample_weight, offset, metric,
    )  # fmt: skip
    rises = np.zeros((num_repeats, ensemble.num_features))
    before, measured = measure(), "loss" if metric is None else "metric"
    if not np.isfinite(before):
        raise ValueError(
            f"{measured} must be finite on x and y, got {before}; a target may be "
            f"outside the domain of the {measured}"
        )
    for feature in find_used_features(ensemble):
        column = matrix[:, feature].copy()
        for repeat in range(num_repeats):
            # One seed per shuffle, so that it does not depend on other columns.
            random = np.random.default_rng((seed, int(feature), repeat))
            matrix[:, feature] = random.permutation(column)
            rises[repeat, feature] = measure() - before
        matrix[:, feature] = column
        if np.isnan(rises[:, feature]).any():
            name = _names(ensemble)[feature]
            raise ValueError(
                f"{measured} must be a number where column {show(name)} of x is "
                "shuffled, "
                "got nan"
            )
    return Importance(_names(ensemble), rises.mean(axis=0), rises.std(axis=0))


def _make_measure(model, num_scores, matrix, y, loss, sample_weight, offset, metric):
    """Returns a function () -> the mean loss, or the metric, of the current matrix."""
    num_rows = len(matrix)
    weights = np.ones(num_rows, np.float32)
    if sample_weight is not None:
        weights = check_weights(sample_weight, num_rows, "sample_weight")
    targets = check_targets(y, num_rows, weights, "y")

    def scores():
        return predict(model, matrix, offset=offset)

    if metric is not None:
        return _measure_metric(metric, loss, scores, targets, weights, num_scores)
    check_domain(loss, targets, weights, num_scores, "y")
    traced, constants = trace_loss(loss, targets, num_scores)
    parameters = ()
    if traced.estimate is not None:
        run = compiled(_estimate, traced)
        parameters = run(constants, scores(), targets, weights)
    run, size = compiled(mean_loss, traced), padded_size(num_rows)
    targets = jax.tree.map(partial(pad_rows, size=size), targets)
    weights: Any = np.pad(weights, (0, size - num_rows))
    none: Any = None
    words = np.zeros(2, np.uint32)  # a loss of one row draws nothing

    def measure():
        padded = pad_rows(scores(), size)
        by_score = padded[None] if num_scores == 1 else padded.T
        rows = Data(none, targets, weights)
        return float(run(constants, parameters, rows, by_score, words))

    return measure


def _estimate(loss, constants, scores, targets, weights):
    return loss.estimate(constants, scores, targets, weights)


def _measure_metric(metric, loss, scores, targets, weights, num_scores):
    """Returns the same function for a metric, negated if the metric is maximized."""
    name = metric if isinstance(metric, str) else "metric"
    bound = bind_metrics(check_metrics({name: metric}), loss, num_scores)
    try_metrics(bound, targets, weights, num_scores)
    function = bound[name]
    sign = -1 if losses.bare_loss(function) in MAXIMIZED else 1

    def measure():
        arguments = scores(), targets, weights
        try:
            return sign * evaluate_metric(function, arguments)
        except Exception as error:
            raise RuntimeError(
                f"metric failed: {error!r}; it is called as {describe_call(function)}"
            ) from error

    return measure


def measure_nodes(nodes: Nodes, kind: str) -> Float[np.ndarray, "T M"]:
    """Returns the improvement, gain or cover of every node.

    Improvement and gain are undefined in leaves.
    """
    if nodes.gain is not None:
        return nodes.weight if kind == "cover" else nodes.gain
    _check_known(nodes, kind)
    if kind == "cover":
        return nodes.curvature
    if kind == "gain":
        return _gain(nodes, nodes.gradient, nodes.curvature + nodes.l2) / 2
    scale = _divide(nodes.weight[:, :1], nodes.curvature[:, :1])
    return _gain(nodes, nodes.gradient * scale, nodes.weight)


def _check_known(nodes, kind):
    """Checks that a model holds the sums; models of other libraries may not."""
    needed = {
        "improvement": (nodes.gradient, nodes.curvature, nodes.weight),
        "gain": (nodes.gradient, nodes.curvature, nodes.l2),
        "cover": (nodes.curvature,),
    }[kind]
    # Trees that are not split need no sums.
    used = nodes.is_split.any(axis=1)
    if any(np.isnan(array[used]).any() for array in needed):
        raise ValueError(
            f"model must hold the training sums of its leaves for kind={kind!r}, got a "
            "model of another library without some of them; kind='splits' needs none, "
            "and kind='cover' only those of the curvature"
        )


def _gain(nodes, gradient, mass):
    """Returns the children's G^2 / mass minus the parent's; undefined in leaves."""
    score = _divide(np.square(gradient), mass)
    left, right = (
        np.take_along_axis(score, np.maximum(child, 0), axis=1)
        for child in (nodes.left, nodes.right)
    )
    return left + right - score


def _divide(numerator, denominator):
    return np.where(
        denominator > 0, numerator / np.where(denominator > 0, denominator, 1), 0
    )


def _sum_by_feature(feature, values, num_features):
    return np.bincount(feature.ravel(), values.ravel(), minlength=num_features)


def _names(model):
    return model.feature_names or tuple(map(str, range(model.num_features)))


# ---- the trees as a table -----------------------------------------------------------

_COLUMNS = (
    "Tree", "Node", "ID", "Feature", "Split", "Yes", "No", "Missing", "Gain", "Cover",
    "Category",
)  # fmt: skip


@on_host("call it on concrete arrays")
def trees_to_dataframe(model: Model) -> Any:
    """Returns all nodes of all trees, with the columns of XGBoost's data frames.

    ``Tree`` is round * K + score, also where the K scores share a tree, which is then
    listed for each of them; ``Node`` counts from the root level by level, and
    ``ID`` combines both. Rows with ``Feature <= Split`` go to the node ``Yes``
    (XGBoost: ``<``); for a categorical feature, rows with a value in ``Category``.
    Missing values go to ``Missing``. A leaf has the feature "Leaf" and its value as
    ``Gain``.

    ``Gain`` and ``Cover`` are the terms that :func:`jboost.feature_importance` sums: a
    gain is half of XGBoost's, ``Cover`` is the sum of the curvature. Both are NaN if
    the model does not hold the training sums.

    If the model has linear leaves, a column ``Slopes`` lists the terms of each leaf as
    (feature, slope, center). The leaf adds ``slope * (x - center)`` for each of them to
    its value, where x is clipped to the row of ``model.ranges`` of the feature; if one
    of these x is missing, the value alone counts.

    Args:
      model: a model from :func:`jboost.fit`, :func:`jboost.cart.fit_tree` or a reader.

    Returns:
      A ``pandas.DataFrame``.

    Raises:
      ImportError: pandas is not installed.
      TypeError: ``model`` is not a model.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(8.0)[:, None]
      >>> model, _ = jb.fit(x, x[:, 0] > 3, num_rounds=1, max_depth=1)
      >>> frame = jb.explanation.trees_to_dataframe(model)  # doctest: +SKIP
      >>> list(frame["Feature"])  # doctest: +SKIP
      ['f0', 'Leaf', 'Leaf']
    """
    ensemble = read_model(model)
    pandas = import_pandas("trees_to_dataframe")
    nodes = model.nodes()
    nodes = nodes._replace(
        gain=_measure(nodes, "gain"), curvature=_measure(nodes, "cover")
    )
    names = ensemble.feature_names
    names = names or tuple(f"f{index}" for index in range(ensemble.num_features))
    rows = []
    for number in range(len(nodes.left)):
        tree = take_tree(nodes, number)
        found = _list_rows(tree, number, names, ensemble)
        if tree.slopes is not None:
            terms = (list_terms(tree, node) for node in range(len(found)))
            named = ([(names[f], *line) for f, *line in each] for each in terms)
            found = [(*row, t or None) for row, t in zip(found, named, strict=True)]
        rows += found
    columns = _COLUMNS if nodes.slopes is None else (*_COLUMNS, "Slopes")
    return pandas.DataFrame(rows, columns=list(columns))


def _measure(nodes, kind):
    """Returns the gain or cover of every node; NaN if training sums are missing."""
    try:
        return measure_nodes(nodes, kind)
    except ValueError:
        return np.full(nodes.left.shape, np.nan)


def _list_rows(tree, number, names, model):
    rows = []
    for node, left in enumerate(tree.left.tolist()):
        label, cover = f"{number}-{node}", float(tree.curvature[node])
        if left == LEAF:
            value = float(tree.value[node])
            rows.append(
                (number, node, label, "Leaf", np.nan, None, None, None, value, cover,
                 None)
            )  # fmt: skip
            continue
        children = [f"{number}-{left}", f"{number}-{left + 1}"]
        threshold, feature = float(tree.threshold[node]), int(tree.feature[node])
        missing = children[0 if tree.missing_left[node] else 1]
        sent = None
        if np.isnan(threshold):  # marks a split by a set of categories
            sets = model.categories, feature
            sent = name_values(*sets, split_values(*sets, tree.left_codes[node])[0])
        gain = float(tree.gain[node])
        rows.append(
            (number, node, label, names[feature], threshold, *children, missing, gain,
             cover, sent)
        )  # fmt: skip
    return rows
