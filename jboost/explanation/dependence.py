# SPDX-License-Identifier: Apache-2.0
"""Partial dependence of scores on one or two features, and individual curves.

These are the scores that rows would have with other values of those features, averaged
or for each row.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import ArrayLike, Float, Shaped

from jboost.entry import checks, feature_checks
from jboost.entry.decorators import on_host
from jboost.entry.messages import show, show_fields
from jboost.model.ensemble import Ensemble, Model, read_model
from jboost.model.nodes import name_values
from jboost.model.predicting import predict
from jboost.model.preparing import check_columns
from jboost.model.wide_thresholds import warn_of_float32
from jboost.tables.columns import is_gap
from jboost.tables.frames import read_frame, read_offset
from jboost.tables.groups import list_orders
from jboost.tables.targets import check_weights

DependenceKind = Literal["average", "individual", "both"]
KINDS = ("average", "individual", "both")
_BLOCK_CELLS = 2**21  # numbers in the copies of x that are predicted at a time

Feature = int | str


class PartialDependence(NamedTuple):
    """Scores on a grid of values of one or two features.

    Attributes:
      names: the names of the features; indices as strings if no names are known.
      grid: the values of each feature: numbers, or categories, in the order of an
        ordered dtype, otherwise sorted.
      average: [G], or [G, H] for two features; with a last axis K for several scores.
        None if not requested.
      individual: the same for each row, [N, G] or [N, G, H]. None if not requested.
      counts: the weight of the rows at each value of the grid for each categorical
        feature; None for a numeric feature.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(300, 2))
      >>> model, _ = jb.fit(x, np.abs(x[:, 0]), num_rounds=30)
      >>> found = jb.partial_dependence(model, x, 0, grid=[-1.0, 0.0, 1.0])
      >>> found.names, found.grid[0].tolist(), found.average.shape
      (('0',), [-1.0, 0.0, 1.0], (3,))
    """

    names: tuple[str, ...]
    grid: tuple[np.ndarray, ...]
    average: Float[np.ndarray, "*grid K"] | Float[np.ndarray, " *grid"] | None
    individual: Float[np.ndarray, "N *grid K"] | Float[np.ndarray, "N *grid"] | None
    counts: tuple[Float[np.ndarray, " G"] | None, ...] | None = None

    def __repr__(self) -> str:
        """Returns the shapes of the fields; the arrays would fill pages."""
        return show_fields(self)

    @property
    def centred(self) -> Float[np.ndarray, "N *grid"]:
        """Individual curves minus their values at the first point of the grid.

        Curves that differ after this subtraction show an interaction (Goldstein et al.
        2015, section 3.2).
        """
        if self.individual is None:
            raise ValueError('individual is None: pass kind="individual" or "both"')
        first = (slice(None), *(slice(1) for _ in self.grid))
        return self.individual - self.individual[first]


@on_host("call jb.predict there")
def partial_dependence(
    model: Model,
    x: Any,
    features: Feature | Sequence[Feature],
    *,
    grid: int | Sequence[Any] = 50,
    kind: DependenceKind = "average",
    inverse_link: Callable[[Any], Any] | None = None,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
) -> PartialDependence:
    """Computes partial dependence and individual conditional expectation (ICE).

    The average is the mean over the rows of the score that they would have if the
    features S had the values z (Friedman 2001, section 8.2):

        average(z) = sum_n w_n F(z_S, x_n without S) / sum_n w_n

    ``individual`` holds the curve of each row (Goldstein et al. 2015).

    Args:
      model: a model from :func:`jboost.fit` or :func:`jboost.cart.fit_tree`.
      x: the rows, as for :func:`jboost.predict`, not sparse.
      features: one or two, by index or name.
      grid: the number of values of each feature: quantiles of its column at the levels
        (g + 1/2) / grid, or all values if there are no more than that; for a
        categorical feature always all categories seen in training. Or the values
        themselves: a sequence for one feature, a pair of sequences for two; NaN is
        missing.
      kind: "average", "individual" or "both".
      inverse_link: a function of the score, as for :func:`jboost.predict`, applied
        before averaging: with ``jax.nn.sigmoid`` averages are mean probabilities.
      sample_weight: weights of the rows, used in averages and quantiles.
      offset: the offset of the rows, as for :func:`jboost.predict`.

    Returns:
      A PartialDependence of NumPy arrays.

    Raises:
      TypeError, ValueError: arguments are invalid, inconsistent or traced.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.random.default_rng(0).normal(size=(300, 2))
      >>> model, _ = jb.fit(x, np.abs(x[:, 0]), num_rounds=30)
      >>> found = jb.partial_dependence(model, x, 0, grid=[-1.0, 0.0, 1.0])
      >>> bool(found.average[1] < min(found.average[0], found.average[2]))
      True
    """
    checks.check_word("kind", kind, KINDS)
    ensemble = read_model(model)
    warn_of_float32(ensemble, "partial_dependence")
    frame = read_frame(x, "x", schema=ensemble.schema, categorical=True)
    matrix = np.asarray(frame.matrix)
    check_columns(ensemble, matrix.shape[1])
    num_rows, weights = len(matrix), np.ones(len(matrix), np.float32)
    if sample_weight is not None:
        weights = check_weights(sample_weight, num_rows, "sample_weight")
    if offset is not None:
        offset = read_offset(offset, num_rows, ensemble.num_scores)
        offset = offset[:, 0] if ensemble.num_scores == 1 else offset
    indices = find_features(ensemble, features)
    orders = list_orders(x)
    axes = [
        _make_axis(
            ensemble, index, values, matrix[:, index], weights, orders.get(index)
        )
        for index, values in zip(indices, _split_grid(grid, len(indices)), strict=True)
    ]
    points = np.array(list(product(*(axis.values for axis in axes))), np.float32)
    shape = (ensemble.num_scores,) if ensemble.num_scores > 1 else ()
    checks.check_link(inverse_link, shape, single=True)
    scores = partial(predict, model, inverse_link=inverse_link)
    average, individual = _evaluate(
        scores, matrix, indices, points, offset, weights, kind
    )
    shape = tuple(len(axis.values) for axis in axes)
    if average is not None:
        average = average.reshape(*shape, *average.shape[1:])
    if individual is not None:
        individual = individual.reshape(num_rows, *shape, *individual.shape[2:])
    names = ensemble.feature_names or tuple(map(str, range(ensemble.num_features)))
    return PartialDependence(
        tuple(names[index] for index in indices),
        tuple(axis.labels for axis in axes),
        average,
        individual,
        tuple(axis.counts for axis in axes),
    )


# ---- the grid -----------------------------------------------------------------------


class _Axis(NamedTuple):
    """A feature's grid: values in the matrix, labels to show, and weights of values.

    Labels of categories never have a float dtype; counts are None for numeric features.
    """

    values: np.ndarray
    labels: np.ndarray
    counts: np.ndarray | None = None


def find_features(model: Ensemble, features: Any) -> list[int]:
    """Returns the indices of one or two features."""
    given = feature_checks.list_features(features, model.feature_names)
    if len(given) not in (1, 2):
        raise ValueError(f"features must be one or two features, got {show(features)}")
    indices = [
        feature_checks.check_feature(
            "features", f, model.num_features, model.feature_names
        )
        for f in given
    ]
    if len({*indices}) < len(indices):
        raise ValueError(f"features must be two different ones, got {show(features)}")
    return indices


def _split_grid(grid, count):
    """Returns the grid argument of each feature."""
    if isinstance(grid, int | np.integer):
        return [checks.check_integer("grid", grid, least=1)] * count
    expected = "grid must be a number of values, or the values themselves"
    if count == 2:
        expected += ", a sequence for each of the two features"
    if isinstance(grid, str) or not np.iterable(grid):
        raise TypeError(f"{expected}, got {show(grid)}")
    parts: list[Any] = [grid] if count == 1 else list(grid)
    if len(parts) != count or any(isinstance(p, str) or not np.ndim(p) for p in parts):
        raise ValueError(f"{expected}, got {show(grid)}")
    if not all(len(part) for part in parts):
        raise ValueError(f"{expected}, at least one, got {show(grid)}")
    return parts


def _make_axis(model, index, asked, column, weights, order):
    """Returns the grid of one feature, from the number of values or the values."""
    categories = model.categories
    if categories is not None and index in categories.features:
        values, labels = _list_categories(categories, index, asked, order)
        # NaN does not equal NaN, so that missing values are compared as inf.
        with_missing = np.where(np.isnan(column), np.inf, column)
        sought = np.where(np.isnan(values), np.inf, values)
        mass = np.asarray(weights, np.float64)
        counts = np.array([mass[with_missing == value].sum() for value in sought])
        return _Axis(values, _as_labels(labels), counts)
    if isinstance(asked, int):
        values = _find_quantiles(column, weights, asked, index)
        return _Axis(values, values)
    try:
        values = np.asarray(asked, np.float32)
    except (TypeError, ValueError):
        raise TypeError(f"grid must hold numbers, got {show(asked)}") from None
    if values.ndim != 1:
        raise ValueError(f"grid must be a sequence of numbers, got {values.shape=}")
    return _Axis(values, values)


def _list_categories(categories, index, asked, order):
    """Returns values and labels of all categories of training, or of those given."""
    group = categories.features.index(index)
    codes = np.asarray(categories.codes)[group]
    known = None if categories.values is None else categories.values[group]
    if isinstance(asked, int):
        values = np.flatnonzero(codes > 0)
        if known is not None and order is not None:
            rank = {level: number for number, level in enumerate(order)}
            ranks = [rank.get(known[value], len(rank)) for value in values]
            values = values[np.argsort(ranks, kind="stable")]
        return values.astype(np.float32), name_values(categories, index, values)
    if known is None:
        return np.asarray(asked, np.float32), asked
    indices = {value: float(index) for index, value in enumerate(known)}
    unknown = [v for v in asked if v not in indices and not is_gap(v)]
    if unknown:
        raise ValueError(
            f"grid must hold categories of training, got {show(unknown[0])}"
        )
    return np.array([indices.get(v, np.nan) for v in asked], np.float32), asked


def _as_labels(labels):
    """Returns categories as an array that is not float, as the grids of numbers are."""
    some = any(map(is_gap, labels))
    array = np.array(labels, object if some else None)
    return array.astype(object) if array.dtype.kind == "f" else array


def _find_quantiles(column, weights, count, index):
    """Returns values of a column: all, or quantiles (never between two values)."""
    used = ~np.isnan(column) & (weights > 0)
    values, group = np.unique(column[used], return_inverse=True)
    if len(values) == 0:
        raise ValueError(f"grid must be given: column {index} of x has no values")
    if len(values) <= count:
        return values
    mass = np.cumsum(np.bincount(group, weights[used]))
    levels = (np.arange(count) + 0.5) / count * mass[-1]
    return values[np.unique(np.searchsorted(mass, levels))]


# ---- scores -------------------------------------------------------------------------


def _evaluate(scores, matrix, indices, points, offset, weights, kind):
    """Returns averages [P, *K] and curves [N, P, *K] at points [P, features].

    Several copies of the matrix are predicted at once. The copies are made once; only
    the columns ``indices`` are overwritten for each block of points.
    """
    num_rows, num_columns = matrix.shape
    most = max(1, _BLOCK_CELLS // matrix.size)
    size = -(-len(points) // -(-len(points) // most))  # blocks of equal size
    block = np.tile(matrix, (size, 1, 1))
    if offset is not None:
        offset = np.concatenate([offset] * size)
    share = np.asarray(weights, np.float64) / np.sum(weights, dtype=np.float64)
    averages, curves = [], []
    for first in range(0, len(points), size):
        some = points[first : first + size]
        block[: len(some), :, indices] = some[:, None]
        found = np.asarray(scores(block.reshape(-1, num_columns), offset=offset))
        found = found.reshape(size, num_rows, *found.shape[1:])[: len(some)]
        averages.append(np.tensordot(share, found, axes=(0, 1)))
        if kind != "average":
            curves.append(found)
    average = individual = None
    if kind != "individual":
        average = np.concatenate(averages).astype(np.float32)
    if kind != "average":
        individual = np.moveaxis(np.concatenate(curves), 0, 1)
    return average, individual
