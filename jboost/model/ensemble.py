# SPDX-License-Identifier: Apache-2.0
"""The model: trees on raw thresholds, and what can be asked of it.

In: a matrix of floats. Out: scores, scores by round, leaves. The model is an
immutable pytree of arrays; every function here can be jitted, vmapped and, in leaf
values, initial score and offset, differentiated.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Bool, Float, Int32, Shaped, UInt32

from jboost.cart.tree import RegressionTree, check_plain, tree_leaves, tree_scores
from jboost.codes.binning import Bins
from jboost.codes.category_codes import check_values
from jboost.entry import checks
from jboost.entry.decorators import traceable
from jboost.entry.representation import show_fields
from jboost.kernels.library import default_device, may_run, takes_implementation
from jboost.kernels.predict_cpu import Rows, borrow_rows
from jboost.model.scores import find_row_leaves, score_rows, to_host, transform_rows
from jboost.numerics.padding import pad_rows, padded_size
from jboost.streams.batches import checked_batches
from jboost.tables.categories import Categories, column_values
from jboost.tables.frames import RowSource, Schema, read_frame
from jboost.tables.sparse import Absent, check_gaps, is_sparse, read_rows
from jboost.tables.targets import read_offset
from jboost.trees.category_splits import CATEGORICAL
from jboost.trees.tree import BoostedTrees, LeafSums

FORMAT_VERSION = 1
_FEW, _OFTEN = 2**10, 16  # numbers in a small result; results of the same shape
_BLOCK_CELLS = 2**21  # of the columns in use of a sparse x, at a time


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # arrays have no one truth value
class Links:
    """Where the nodes of trees are that are not in heap order.

    Models of other libraries may be too deep for heaps.

    Attributes:
      left_child: the number of a node's left child, which its right child follows; both
        are higher than their parent's. A leaf is its own left child, as all rows go
        left in it.
      max_depth: the most steps from a root to a leaf.
    """

    left_child: Int32[Array, "R K I"]
    max_depth: int = field(metadata=dict(static=True))

    def __repr__(self) -> str:
        """Its fields: the arrays would fill pages."""
        return show_fields(self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # arrays have no one truth value
class Ensemble:
    """A trained model: R rounds of K trees.

    In heap order node i has the children 2i + 1 and 2i + 2, I = 2^max_depth - 1 nodes
    stand above L = I + 1 leaves. In linked trees leaves are nodes, and L = I.

    Attributes:
      feature: 0 where a node is not split.
      threshold: ``x <= threshold`` goes left; +inf where a node is not split; NaN where
        ``left_codes`` decides.
      missing_left: where NaN goes; True where a node is not split.
      leaf_value: learning rate included.
      init_score: [] for one score per row, else [K].
      num_features: how many columns ``predict`` expects.
      format_version: of this layout.
      feature_names: of the columns, where they are known.
      absent: how entries that a sparse matrix does not store are read: "missing" or
        "zero"; None where training saw dense rows and was not told.
      sums: what the leaves were fitted to, for :func:`jboost.feature_importance`;
        None where that is not known.
      left_codes: the codes of categories that go left, as bits (code c is bit c % 32
        of word c // 32); None where no feature is categorical.
      categories: the categorical features; None where there are none.
      links: None for trees in heap order.
    """

    feature: Int32[Array, "R K I"]
    threshold: Float[Array, "R K I"]
    missing_left: Bool[Array, "R K I"]
    leaf_value: Float[Array, "R K L"]
    init_score: Float[Array, "*K"]
    num_features: int = field(metadata=dict(static=True))
    format_version: int = field(default=FORMAT_VERSION, metadata=dict(static=True))
    feature_names: tuple[str, ...] | None = field(
        default=None, metadata=dict(static=True)
    )
    absent: Absent | None = field(default=None, metadata=dict(static=True))
    sums: LeafSums | None = None
    left_codes: UInt32[Array, "R K I W"] | None = None
    categories: Categories | None = None
    links: Links | None = None

    def __repr__(self) -> str:
        """Its sizes: the arrays would fill pages."""
        if not hasattr(self.feature, "shape"):  # while JAX builds trees of other things
            return "Ensemble(...)"
        if np.ndim(self.leaf_value) != 3:  # made by vmap
            return f"Ensemble(leaf_value.shape={np.shape(self.leaf_value)})"
        sizes = (
            f"num_rounds={self.num_rounds}, num_scores={self.num_scores}, "
            f"max_depth={self.max_depth}, num_features={self.num_features}"
        )
        return f"Ensemble({sizes})"

    @property
    def num_rounds(self) -> int:
        """R."""
        return self.feature.shape[0]

    @property
    def num_scores(self) -> int:
        """K."""
        return self.feature.shape[1]

    @property
    def max_depth(self) -> int:
        """D, levels of splits."""
        if self.links is not None:
            return self.links.max_depth
        return self.leaf_value.shape[2].bit_length() - 1

    @property
    def schema(self) -> Schema:
        """What tables to predict from must be like."""
        values = column_values(self.categories, self.num_features)
        return Schema(self.feature_names, values)

    @property
    def is_split(self) -> Bool[Array, "R K I"]:
        """Which nodes are split: the others send everything left, NaN too."""
        if isinstance(self.threshold, Tracer) or isinstance(self.missing_left, Tracer):
            return ~((self.threshold == np.inf) & self.missing_left)
        threshold, missing_left = map(np.asarray, (self.threshold, self.missing_left))
        return jax.device_put(~((threshold == np.inf) & missing_left))


@traceable
def to_ensemble(trees: BoostedTrees, bins: Bins) -> Ensemble:
    """Turns thresholds that are codes into raw ones; traceable.

    Law: ``predict(to_ensemble(trees, bins), x)`` takes the same leaves as the trees
    do on ``apply_bins(bins, x)``, for every x.

    Example:
      >>> import jax, jax.numpy as jnp, jboost as jb
      >>> x, y = jnp.arange(8.0)[:, None], jnp.arange(8.0)
      >>> bins = jb.fit_bins(x)
      >>> trees, scores = jb.boost(
      ...     jb.apply_bins(bins, x), y, jb.losses.squared_error, jax.random.key(0),
      ...     num_rounds=5,
      ... )
      >>> model = jb.to_ensemble(trees, bins)
      >>> bool(jnp.allclose(jb.predict(model, x), scores))
      True
    """
    tree = trees.trees
    # NumPy arrays stay in NumPy, where another number of rounds compiles nothing.
    host = isinstance(tree.feature, np.ndarray)
    if tree.left_codes is not None and not isinstance(tree.feature, Tracer):
        # The NaN below must come from no operation of JAX, for jax_debug_nans.
        host, tree = True, jax.device_get(tree)
    thresholds = np.asarray(bins.thresholds) if host else jnp.asarray(bins.thresholds)
    # The last threshold is +inf: where a node is not split.
    code = (tree.threshold - 1).clip(0, thresholds.shape[1] - 1)
    threshold = thresholds[tree.feature, code]
    if tree.left_codes is not None:
        numpy: Any = np if host else jnp
        divided = tree.threshold == CATEGORICAL
        threshold = numpy.where(divided, numpy.float32(np.nan), threshold)
    arrays: dict[str, Any] = dict(
        feature=tree.feature,
        threshold=threshold,
        missing_left=tree.missing_left,
        leaf_value=tree.leaf_value,
        init_score=trees.init_score,
        sums=tree.sums,
        left_codes=tree.left_codes,
        categories=bins.categories,
    )
    return Ensemble(
        **(jax.device_put(arrays) if host else arrays),
        num_features=bins.num_features,
        absent=bins.absent,
    )


@traceable
@takes_implementation
def predict(
    model: Ensemble | RegressionTree,
    x: Any,
    *,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    inverse_link: Callable[..., Any] | None = None,
    implementation: str | None = None,
) -> Any:
    """The raw score F(x) = init_score + sum of leaf values (+ offset), or its link.

    Args:
      model: from :func:`jboost.fit`, or a tree from :func:`jboost.cart.fit_tree`, whose
        score is the value of the row's leaf.
      x: numbers [N, F], NaN = missing, with the columns that the model was trained
        on; those of a data frame in the same order, too. A float32 NumPy array without
        gaps is read where it lies. A sparse matrix (as for :func:`jboost.fit`)
        is read in blocks of rows, of which only the columns that the model uses are
        looked at; not under ``jit``, and not by a tree from
        :func:`jboost.cart.fit_tree`. Entries that it does not store are what
        ``model.absent`` says; where that is None, every entry must be stored. A
        stream (:func:`jboost.stream`) is read batch by batch; its targets are not
        used.
      offset: [N] or [N, K], added to the score, as in training; the batches of a
        stream hold their own.
      inverse_link: ``inverse_link(score)`` of one row, in jax.numpy, a scalar or [K]:
        what to return instead of the score, an array or a pytree of arrays.
        ``jax.nn.sigmoid`` for probabilities of logistic, ``jax.nn.softmax`` for
        softmax, ``jnp.exp`` for means of poisson, gamma and tweedie;
        :func:`jboost.losses.inverse_link` gives that of a loss.
      implementation: "xla", "cpu" (the compiled kernels), or None for the best where
        the program runs; the results are equal to the bit.

    Returns:
      [N], or [N, K] for K > 1 scores a row; or what ``inverse_link`` makes of them,
      with an axis N in front of each array. Empty where x has no rows.

    Raises:
      TypeError, ValueError: the model is not an Ensemble, x is no numeric matrix, or
        has another number of columns, or the implementation is not there; x is
        sparse, and it or the model is traced, or ``model.absent`` is None.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=20)
      >>> jb.predict(model, x).shape
      (40,)
    """
    if isinstance(x, RowSource):
        run = partial(predict, inverse_link=inverse_link)
        return _predict_batches(run, model, x, offset)
    if isinstance(model, RegressionTree):
        check_plain(implementation)
        checks.check_link(inverse_link, model.value.shape[1:])
        scores = tree_scores(model, x, offset)
        return transform_rows(inverse_link, scores)
    if is_sparse(x):
        run = partial(predict, inverse_link=inverse_link)
        return in_blocks(run, model, x, offset, rows_axis=0)
    task = as_task(model, x, offset)
    checks.check_link(inverse_link, model.init_score.shape)
    base = task.pad_offset(offset, model.num_scores)
    scores = score_rows(task.model, task.rows, base, staged=False)
    return transform_rows(inverse_link, task.cut(scores, rows_axis=0))


def _predict_batches(run, model, x, offset):
    """Predictions for the rows of a stream."""
    if not isinstance(model, RegressionTree):
        check_model(model)
    if offset is not None:
        raise ValueError(
            "offset must not be given where x is a stream, because the batches of the "
            f"stream hold it, got {type(offset).__name__}"
        )
    categorical = getattr(model, "categories", None) is not None
    parts = []
    for batch in checked_batches(x.source, model.schema, categorical):
        own = batch.offset
        own = own if own is None else own[0] if len(own) == 1 else own.T
        parts.append(run(model, batch.x, offset=own))
    if not parts:
        raise ValueError("source must give at least one row, got none")
    # In NumPy: JAX compiles a program for the sizes of the batches.
    return jax.tree.map(lambda *arrays: jax.device_put(np.concatenate(arrays)), *parts)


@traceable
@takes_implementation
def staged_predict(
    model: Ensemble,
    x: Any,
    *,
    offset: Shaped[ArrayLike, "N *K"] | None = None,
    inverse_link: Callable[..., Any] | None = None,
    implementation: str | None = None,
) -> Any:
    """The score after each round, [R, N] or [R, N, K]; see :func:`predict`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=20)
      >>> jb.staged_predict(model, x).shape
      (20, 40)
    """
    if is_sparse(x):
        run = partial(staged_predict, inverse_link=inverse_link)
        return in_blocks(run, model, x, offset, rows_axis=1)
    task = as_task(model, x, offset)
    checks.check_link(inverse_link, model.init_score.shape)
    base = task.pad_offset(offset, model.num_scores)
    stages = score_rows(task.model, task.rows, base, staged=True)
    stages = task.cut(stages, rows_axis=1, rounds_axis=0)
    return transform_rows(inverse_link, stages, staged=True)


@traceable
@takes_implementation
def leaf_indices(
    model: Ensemble | RegressionTree,
    x: Any,
    *,
    implementation: str | None = None,
) -> Int32[Array, "N R *K"] | Int32[Array, " N"]:
    """The leaf of each row in each tree, from 0 to 2^max_depth - 1: [N, R(, K)].

    In linked trees it is the number of the node, as in a tree from
    :func:`jboost.cart.fit_tree`: [N].

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=20)
      >>> jb.leaf_indices(model, x).shape
      (40, 20)
    """
    if isinstance(model, RegressionTree):
        check_plain(implementation)
        return tree_leaves(model, x)
    if is_sparse(x):
        return in_blocks(leaf_indices, model, x, None, rows_axis=0)
    task = as_task(model, x)
    leaves = find_row_leaves(task.model, task.rows)
    return task.cut(leaves, rows_axis=0, rounds_axis=1)


def in_blocks(
    run: Callable[..., Any], model: Ensemble, x: Any, offset: Any, rows_axis: int
) -> Array:
    """Puts a sparse matrix before ``run(model, block)``, some rows at a time.

    A block is dense in the columns that some node looks at. It is filled with what
    absent entries are once; after that only stored entries are written, and undone.
    """
    check_model(model)
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((model, offset))):
        raise TypeError(
            "model and offset must not be traced where x is sparse: its rows are "
            "looked at on the host; inside jit, vmap or grad pass a dense x"
        )
    matrix = read_rows(x, "x", least_rows=0)
    _check_columns(model, matrix.shape[1])
    check_gaps(model.absent, matrix, "x")
    num_rows = matrix.shape[0]
    if offset is not None:
        offset = read_offset(offset, num_rows, model.num_scores)
        offset = offset[:, 0] if model.num_scores == 1 else offset
    model, place, width = keep_used_features(model)
    size = padded_size(min(num_rows, max(1, _BLOCK_CELLS // width)))
    block = np.full((size, width), np.nan if model.absent == "missing" else 0)
    block = block.astype(np.float32)
    fill = block[0, 0]
    results = []
    for first in range(0, max(num_rows, 1), size):
        count = min(size, num_rows - first)
        starts = matrix.starts[first : first + count + 1]
        entries = slice(starts[0], starts[-1])
        rows = np.repeat(np.arange(count), np.diff(starts))
        column = place[matrix.places[entries]]
        used = column < width
        cells = rows[used], column[used]
        block[cells] = matrix.values[entries][used]
        if offset is None:
            result = run(model, block)
        else:
            part = offset[first : first + count]
            rest = np.zeros((size - count, *part.shape[1:]), np.float32)
            result = run(model, block, offset=np.concatenate([part, rest]))
        # Into NumPy: the block may be written to again only when it has been read.
        cut = partial(np.take, indices=np.arange(count), axis=rows_axis)
        results.append(
            jax.tree.map(lambda array, cut=cut: cut(np.asarray(array)), result)
        )
        block[cells] = fill
    join = partial(np.concatenate, axis=rows_axis)
    return jax.tree.map(lambda *parts: jax.device_put(join(parts)), *results)


def keep_used_features(model: Ensemble) -> tuple[Ensemble, np.ndarray, int]:
    """The model on the features that it uses, their places, and how many there are.

    A feature that is not used has the place after the last. Their number is padded,
    so that models share compiled programs.
    """
    feature, split = np.asarray(model.feature), np.asarray(model.is_split)
    used = np.unique(feature[split])
    width = padded_size(len(used), least=8)
    place = np.full(model.num_features, width, np.int32)
    place[used] = np.arange(len(used))
    # Where a node is not split, any feature does: all rows go left.
    feature = jax.device_put(np.where(split, place[feature], 0))
    categories = model.categories
    if categories is not None:
        kept = np.isin(categories.features, used)
        categories = Categories(
            codes=np.asarray(categories.codes)[kept],
            features=tuple(place[np.array(categories.features)[kept]].tolist()),
        )
    model = replace(
        model, feature=feature, num_features=width, feature_names=None, sums=None,
        categories=categories,
    )  # fmt: skip
    return model, place, width


@traceable
def truncate(model: Ensemble, num_rounds: int) -> Ensemble:
    """The model after its first ``num_rounds`` rounds.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=20)
      >>> jb.truncate(model, 5).num_rounds
      5
    """
    check_model(model)
    checks.check_integer("num_rounds", num_rounds, least=0, most=model.num_rounds)
    return map_rounds(lambda array: _cut(array, (slice(num_rounds),)), model)


def map_rounds(change: Callable[[Any], Any], model: Ensemble) -> Ensemble:
    """The model with ``change`` made to every array that has a place per round."""
    names = (
        "feature", "threshold", "missing_left", "leaf_value", "sums", "left_codes",
        "links",
    )  # fmt: skip
    parts = {name: getattr(model, name) for name in names}
    return replace(model, **jax.tree.map(change, parts))


def check_model(model: Any) -> None:
    """An Ensemble, and not what ``fit`` returns."""
    if isinstance(model, tuple) and model and isinstance(model[0], Ensemble):
        raise TypeError(
            "model must be an Ensemble, got the pair (model, history) that fit "
            "returns; unpack it: model, history = jb.fit(...)"
        )
    if not isinstance(model, Ensemble):
        raise TypeError(f"model must be an Ensemble, got {describe_model(model)}")
    shape = np.shape(model.leaf_value)
    if len(shape) != 3:
        raise ValueError(
            "model must be one Ensemble, whose leaf_value has the axes R, K and L, got "
            f"shape {shape}, as jax.vmap makes it; map over the models with "
            "jax.vmap(lambda model: jb.predict(model, x))(models), or take one of them "
            "with jax.tree.map(lambda array: array[0], models)"
        )


def describe_model(model: Any) -> str:
    """What was given as a model; of an estimator, where its model is."""
    name = type(model).__name__
    estimator = isinstance(getattr(model, "model_", None), Ensemble)
    return f"{name}, an estimator; pass its model_" if estimator else name


def _read_rows(model, x):
    known = model.categories is not None
    return read_frame(
        x, "x", schema=model.schema, categorical=known, least_rows=0
    ).matrix


def _check_columns(model, num_columns):
    if num_columns != model.num_features:
        raise ValueError(
            f"x must have {model.num_features} columns, as in training, got "
            f"{num_columns}"
        )


class _Task(NamedTuple):
    """What a public function hands to its compiled program.

    ``num_rows`` and ``num_rounds`` count what was asked for; ``size`` counts the rows
    with those added so that nearby sizes share a program. ``sharding`` is that of
    results that are computed on the host; None for the default device.
    """

    model: Ensemble
    rows: Rows | Array | np.ndarray
    num_rows: int
    size: int
    num_rounds: int
    sharding: Any = None

    def pad_offset(self, offset, num_scores):
        """The offset as [size, K]."""
        if offset is None:
            return None
        offset = read_offset(offset, self.num_rows, num_scores)
        pad = jnp.pad if isinstance(offset, Tracer) else np.pad
        return pad(offset, ((0, self.size - self.num_rows), (0, 0)))

    def cut(self, result, rows_axis, rounds_axis=None):
        """Drops what was added; an array of JAX's."""
        index = [slice(None)] * result.ndim
        index[rows_axis] = slice(self.num_rows)
        if rounds_axis is not None:
            index[rounds_axis] = slice(self.num_rounds)
        return _cut(result, tuple(index), self.sharding)


def as_task(
    model: Ensemble, x: Any, offset: Any = None, *, explain: bool = False
) -> _Task:
    """Checks the arguments; pads or borrows the rows.

    To ``explain`` scores needs the sums of leaves, too.
    """
    check_model(model)
    plain = isinstance(x, np.ndarray) and x.dtype == np.float32 and x.ndim == 2
    matrix = x if plain and x.shape[1] else _read_rows(model, x)
    _check_columns(model, matrix.shape[1])
    if model.categories is not None:
        check_values(matrix, model.categories.features, "x", model.feature_names)
    if matrix.size >= 2**31:
        raise ValueError(f"x must have fewer than 2^31 cells, got {matrix.shape=}")
    ready = _prepare(model, explain)
    rows, num_rounds = matrix.shape[0], model.num_rounds
    operands = _find_arrays(matrix, offset)
    on_host = ready.on_host
    if may_run() and on_host and _runs_on_cpu(ready.devices, operands):
        # Deep models are explained by a compiled program, which takes JAX's arrays.
        model = ready.model if explain else on_host
        sharding = ready.sharding or _find_sharding(operands)
        borrowed = borrow_rows(np.asarray(matrix))
        return _Task(model, borrowed, rows, rows, num_rounds, sharding)
    size = rows
    if not isinstance(matrix, Tracer):
        size = padded_size(rows)
        matrix = pad_rows(matrix, size)
    model = _pad_rounds(ready.model)
    return _Task(model, matrix, rows, size, num_rounds)


class _Prepared(NamedTuple):
    """A model without what prediction does not need.

    Attributes:
      model: other names in it would compile another program.
      on_host: the same in NumPy; None unless it is on CPU devices, and not traced.
      devices: that it is on.
      sharding: that of results; None for the default device.
    """

    model: Ensemble
    on_host: Ensemble | None
    devices: frozenset[Any]
    sharding: Any


_prepared: WeakKeyDictionary[Ensemble, _Prepared] = WeakKeyDictionary()


def _prepare(model, explain):
    """A model for prediction, or to ``explain`` scores, with the sums of leaves.

    Models for prediction are kept, because preparing takes as long as predicting a row.
    """
    known = None if explain else _prepared.get(model)
    if known is not None:
        return known
    sums = model.sums if explain else None
    small = replace(model, sums=sums, feature_names=None, absent=None)
    if small.categories is not None:
        small = replace(small, categories=replace(small.categories, values=None))
    leaves, arrays = jax.tree.leaves(small), _find_arrays(small)
    if any(isinstance(array, Tracer) for array in arrays):
        return _Prepared(small, None, frozenset(), None)
    devices = frozenset(device for array in arrays for device in array.devices())
    on_cpu = all(device.platform == "cpu" for device in devices)
    on_host = to_host(small) if on_cpu else None
    ready = _Prepared(small, on_host, devices, _find_sharding(arrays))
    if not explain and len(arrays) == len(leaves):  # NumPy arrays may change
        _prepared[model] = ready
    return ready


def _runs_on_cpu(devices, operands):
    """Whether the kernels can be called at once, on arrays of one CPU device."""
    device = default_device()
    if device is None or device.platform != "cpu":
        return False
    if any(isinstance(array, Tracer) for array in operands):
        return False
    return devices.union(*(array.devices() for array in operands)) <= {device}


def _pad_rounds(model):
    """Adds rounds that add nothing, up to one of few numbers of rounds."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(model)):
        return model
    short = padded_size(model.num_rounds, least=8) - model.num_rounds

    def pad(array):
        array = np.asarray(array)
        return np.pad(array, ((0, short), *((0, 0),) * (array.ndim - 1)))

    return map_rounds(pad, model)


def _find_arrays(*operands):
    return [leaf for leaf in jax.tree.leaves(operands) if isinstance(leaf, jax.Array)]


def _find_sharding(arrays):
    """That of the result of a program of these operands; None if not committed."""
    return next((array.sharding for array in arrays if array.committed), None)


@jax.jit
def _identity(value):
    """A program for a shape that is used often: faster than ``device_put``."""
    return value


@lru_cache(maxsize=8)
def _count(shape, dtype):
    """Counts the recent results of a shape."""
    del shape, dtype
    return itertools.count()


def _cut(array, index, sharding=None):
    """Part of an array, cut in NumPy, because a slice is compiled for each size."""
    if isinstance(array, Tracer):
        return array[index]
    if isinstance(array, jax.Array):
        sharding = _find_sharding([array])
    part = np.asarray(array)[index]
    if 2 * part.nbytes < array.nbytes:
        part = part.copy()  # a view would keep all of the array
    small = sharding is None and part.size <= _FEW
    if small and next(_count(part.shape, part.dtype)) >= _OFTEN:
        return _identity(part)
    return jax.device_put(part, sharding)
