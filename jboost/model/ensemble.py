# SPDX-License-Identifier: Apache-2.0
"""The model: trees on raw thresholds in an immutable pytree, and slices of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from jboost.codes.bins import Bins
from jboost.entry import checks
from jboost.entry.decorators import fetch, traceable
from jboost.entry.importing import make_attribute_error
from jboost.entry.messages import make_table, show_fields
from jboost.model.nodes import Nodes, list_nodes
from jboost.numerics.arrays import is_large_elsewhere
from jboost.tables.categories import Categories, column_values
from jboost.tables.frames import Schema
from jboost.tables.sparse import Absent
from jboost.trees.tree import (
    CATEGORICAL,
    NO_TERM,
    BoostedTrees,
    LeafSums,
    Slopes,
    find_ranges,
)

_FEW, _OFTEN = 2**10, 16  # numbers in a small result; results of the same shape
_MANY_BYTES = 2**21  # from this size on, compiling a slice is faster than copying


def take_part(array: Any, index: tuple[Any, ...], sharding: Any = None) -> Any:
    """Returns ``array[index]``, cut in NumPy: JAX compiles a slice for each size.

    Large arrays on another device are cut there: copying them takes longer.

    Args:
      array: a NumPy or JAX array; traced arrays are sliced by JAX.
      index: slices and integers.
      sharding: the sharding of the result of a NumPy array; None: the default device.
    """
    if isinstance(array, Tracer):
        return array[index]
    if is_large_elsewhere(array, _MANY_BYTES):
        return array[index]
    if isinstance(array, jax.Array):
        sharding = find_sharding([array])
    part = np.asarray(array)[index]
    if 2 * part.nbytes < array.nbytes:
        part = part.copy()  # a view would keep the whole array alive
    return jax.device_put(part, sharding)


def place(array: np.ndarray, sharding: Any) -> jax.Array:
    """Returns a NumPy array, which nobody else uses, as a JAX array."""
    if sharding is None and array.size <= _FEW:
        found = _find_shape(array.shape, array.dtype)
        found.num_results += 1
        if found.num_results > _OFTEN:
            return found.copy(array)
    return jax.device_put(array, sharding)


def find_sharding(arrays: Sequence[Any]) -> Any:
    """Returns the sharding of a result of these arrays; None if none is committed."""
    return next((array.sharding for array in arrays if array.committed), None)


class _Shape:
    """Results of one shape."""

    def __init__(self):
        self.num_results = 0
        # For a shape that is used often a compiled copy is faster than `device_put`.
        self.copy = jax.jit(lambda value: value)


@lru_cache(maxsize=64)
def _find_shape(shape, dtype):
    del shape, dtype
    return _Shape()


FORMAT_VERSION = 1


class Model:
    """The base class of all models.

    Attributes:
      single_tree: whether the model is one tree without rounds and initial score.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(4.0)[:, None]
      >>> tree = jb.cart.fit_tree(x, x[:, 0])
      >>> isinstance(tree, jb.model.Model), tree.single_tree
      (True, True)
    """

    single_tree: ClassVar[bool] = False

    def as_ensemble(self) -> "Ensemble":
        """Returns the model as an Ensemble, for prediction and explanation."""
        raise NotImplementedError

    def nodes(self, rounds: slice = slice(None)) -> Nodes:
        """Returns the nodes of all trees, or of some rounds, in one form."""
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # comparing arrays gives no single truth value
class Links:
    """Child indices of linked trees.

    Heaps of depth d have 2^d leaves: too many for deep trees of other libraries.

    Attributes:
      left_child: index of the left child; the right child has the next index. Children
        have higher indices than their parent. A leaf is its own left child, so that
        rows stay in it.
      max_depth: number of splits on the longest path.

    Example:
      >>> from sklearn.ensemble import RandomForestRegressor
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(16.0)[:, None]
      >>> forest = RandomForestRegressor(1, bootstrap=False).fit(x, 4 ** x[:, 0])
      >>> links = jb.interchange.read_sklearn(forest).links
      >>> links.left_child.shape, links.max_depth
      ((1, 1, 31), 15)
    """

    left_child: Int32[Array, "R S I"]
    max_depth: int = field(metadata=dict(static=True))

    def __repr__(self) -> str:
        return show_fields(self)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)  # comparing arrays gives no single truth value
class Ensemble(Model):
    """A trained model for K scores: R rounds of S trees.

    Either each score has trees of its own, S = K, or one tree per round serves all
    scores, S = 1: its leaves hold K values.

    In heap order node i has the children 2i + 1 and 2i + 2; there are I = 2^max_depth
    - 1 inner nodes and L = I + 1 leaves. In linked trees leaves are nodes: L = I.

    Attributes:
      feature: index of the feature; 0 if a node is not split.
      threshold: ``x <= threshold`` goes left; +inf if a node is not split; NaN if
        ``left_codes`` decides.
      missing_left: whether NaN goes left; True if a node is not split.
      leaf_value: the leaf values for each score, including the learning rate.
      init_score: [] for one score per row, else [K].
      num_features: the number of columns that ``predict`` expects.
      format_version: the version of this layout.
      feature_names: names of the columns; None if unknown.
      absent: how entries that a sparse matrix does not store are read: "missing" or
        "zero"; None if the model was trained on dense rows and it was not specified.
      sums: training sums of the leaves, for :func:`jboost.feature_importance`; None if
        unknown.
      left_codes: the codes of categories that go left, as bits (code c is bit c % 32
        of word c // 32); None if no feature is categorical.
      categories: the categorical features; None if there are none.
      links: None for trees in heap order.
      wide_threshold: float64 thresholds of columns with values that float32 cannot
        tell apart, each as two words, the low one first; NaN for other columns. Only
        models of other libraries have them. They replace ``threshold`` for rows that
        are not float32; None if there are no such columns.
      slopes: the linear terms of the leaves, ``feature`` [R, S, L, P], ``slope`` and
        ``center`` [R, K, L, P]; see :class:`jboost.parts.Slopes`. None if leaves are
        constant.
      ranges: the least and greatest value of each feature in these terms; values beyond
        are clipped. None if leaves are constant.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(8.0)[:, None]
      >>> model, _ = jb.fit(x, x[:, 0], num_rounds=3, max_depth=2)
      >>> model.feature.shape, model.leaf_value.shape, float(model.init_score)
      ((3, 1, 3), (3, 1, 4), 3.5)
    """

    feature: Int32[Array, "R S I"]
    threshold: Float[Array, "R S I"]
    missing_left: Bool[Array, "R S I"]
    leaf_value: Float[Array, "R K L"]
    init_score: Float[Array, "*K"]
    num_features: int = field(metadata=dict(static=True))
    format_version: int = field(default=FORMAT_VERSION, metadata=dict(static=True))
    feature_names: tuple[str, ...] | None = field(
        default=None, metadata=dict(static=True)
    )
    absent: Absent | None = field(default=None, metadata=dict(static=True))
    sums: LeafSums | None = None
    left_codes: UInt32[Array, "R S I W"] | None = None
    categories: Categories | None = None
    links: Links | None = None
    wide_threshold: UInt32[Array, "R S I 2"] | None = None
    slopes: Slopes | None = None
    ranges: Float[Array, "F 2"] | None = None

    def __repr__(self) -> str:
        if not hasattr(self.feature, "shape"):  # JAX builds it from other leaves
            return "Ensemble(...)"
        if np.ndim(self.leaf_value) != 3:  # made by vmap
            return f"Ensemble(leaf_value.shape={np.shape(self.leaf_value)})"
        sizes = (
            f"num_rounds={self.num_rounds}, num_scores={self.num_scores}, "
            f"max_depth={self.max_depth}, num_features={self.num_features}"
        )
        return f"Ensemble({sizes})"

    def _repr_html_(self) -> str:
        """Shows the sizes in a notebook."""
        names = "num_rounds", "num_scores", "max_depth", "num_features"
        if np.ndim(self.leaf_value) != 3:  # made by vmap
            return f"<pre>{self!r}</pre>"
        rows = [[name, str(getattr(self, name))] for name in names]
        rows.append(["leaves", "constant" if self.slopes is None else "linear"])
        return make_table("Ensemble", [["", ""], *rows])

    def __getattr__(self, name: str) -> Any:
        """Raises an error that names the function to use instead of a method."""
        raise make_attribute_error("a model", name)

    @property
    def num_rounds(self) -> int:
        """R, the number of rounds."""
        return self.feature.shape[0]

    @property
    def num_scores(self) -> int:
        """K, the number of scores per row."""
        return self.leaf_value.shape[1]

    @property
    def shares_structure(self) -> bool:
        """Whether one tree per round serves K > 1 scores."""
        return self.feature.shape[1] < self.num_scores

    @property
    def max_depth(self) -> int:
        """D, the number of levels of splits."""
        if self.links is not None:
            return self.links.max_depth
        return self.leaf_value.shape[2].bit_length() - 1

    @property
    def schema(self) -> Schema:
        """The names and categories of the columns of tables for prediction."""
        values = column_values(self.categories, self.num_features)
        return Schema(self.feature_names, values)

    def as_ensemble(self) -> "Ensemble":
        """Returns the model itself."""
        return self

    def nodes(self, rounds: slice = slice(None)) -> Nodes:
        """Returns the nodes of all trees, or of some rounds: T = R * K trees.

        A tree that K scores share is listed K times, each time with the leaf values and
        sums of one score.
        """
        return list_nodes(self, rounds)

    @property
    def is_split(self) -> Bool[Array, "R S I"]:
        """Mask of the nodes that are split; others send all rows left, even NaN."""
        if isinstance(self.threshold, Tracer) or isinstance(self.missing_left, Tracer):
            return ~((self.threshold == np.inf) & self.missing_left)
        threshold, missing_left = map(np.asarray, (self.threshold, self.missing_left))
        return jax.device_put(~((threshold == np.inf) & missing_left))


@traceable
def to_ensemble(trees: BoostedTrees, bins: Bins) -> Ensemble:
    """Converts trees on codes to a model on raw values; traceable.

    Law: for every x, ``to_ensemble(trees, bins)`` sends the rows of x to the same
    leaves as the trees send those of ``apply_bins(bins, x)``.

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
    # NumPy arrays stay in NumPy, because JAX would compile for each number of rounds.
    host = isinstance(tree.feature, np.ndarray)
    if tree.left_codes is not None and not isinstance(tree.feature, Tracer):
        # In NumPy, because jax_debug_nans would report the NaN made below in JAX.
        host, tree = True, fetch(tree)
    thresholds = np.asarray(bins.thresholds) if host else jnp.asarray(bins.thresholds)
    # The last threshold is +inf, for nodes that are not split.
    code = (tree.threshold - 1).clip(0, thresholds.shape[1] - 1)
    threshold = thresholds[tree.feature, code]
    if tree.left_codes is not None:
        numpy: Any = np if host else jnp
        divided = tree.threshold == CATEGORICAL
        threshold = numpy.where(divided, numpy.float32(np.nan), threshold)
    categorical = () if bins.categories is None else bins.categories.features
    arrays: dict[str, Any] = dict(
        feature=tree.feature,
        threshold=threshold,
        missing_left=tree.missing_left,
        leaf_value=tree.leaf_value,
        init_score=trees.init_score,
        sums=tree.sums,
        left_codes=tree.left_codes,
        categories=bins.categories,
        slopes=tree.slopes,
        ranges=None if tree.slopes is None else find_ranges(thresholds, categorical),
    )
    return Ensemble(
        **(jax.device_put(arrays) if host else arrays),
        num_features=bins.num_features,
        absent=bins.absent,
    )


@traceable
def truncate(model: Ensemble, num_rounds: int, *, first: int = 0) -> Ensemble:
    """Returns the model with only ``num_rounds`` rounds, beginning with ``first``.

    The initial score stays: scores are ``init_score`` plus the leaf values of these
    rounds alone.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(40.0)[:, None]
      >>> model, history = jb.fit(x, np.sqrt(x[:, 0]), num_rounds=20)
      >>> jb.truncate(model, 5).num_rounds
      5
      >>> jb.truncate(model, 5, first=10).num_rounds  # rounds 10 to 14
      5
    """
    check_model(model)
    checks.check_integer("first", first, least=0, most=model.num_rounds)
    most = model.num_rounds - first
    checks.check_integer("num_rounds", num_rounds, least=0, most=most)
    rounds = (slice(first, first + num_rounds),)
    return map_rounds(lambda array: take_part(array, rounds), model)


def map_rounds(change: Callable[[Any], Any], model: Ensemble) -> Ensemble:
    """Applies ``change`` to all arrays of the model that have an axis of rounds."""
    return replace(model, **jax.tree.map(change, rounds_of(model)))


def rounds_of(model: Ensemble) -> dict[str, Any]:
    """Returns the fields that have an axis of rounds, by name."""
    names = (
        "feature", "threshold", "missing_left", "leaf_value", "sums", "left_codes",
        "links", "wide_threshold", "slopes",
    )  # fmt: skip
    return {name: getattr(model, name) for name in names}


def find_used_features(model: Ensemble) -> Int[np.ndarray, " U"]:
    """Returns the features of the splits and linear terms, ascending."""
    used = np.asarray(model.feature)[np.asarray(model.is_split)]
    if model.slopes is None:
        return np.unique(used)
    terms = np.asarray(model.slopes.feature)
    return np.union1d(used, terms[terms != NO_TERM])


def read_model(model: Any) -> Ensemble:
    """Returns any model as an Ensemble; a single tree becomes one round.

    Stacks of models, as from ``jax.vmap``, are refused.
    """
    if not isinstance(model, Model):
        raise TypeError(
            "model must be an Ensemble or a RegressionTree, got "
            f"{describe_model(model)}"
        )
    model = model.as_ensemble()
    check_model(model)
    return model


def check_model(model: Any) -> None:
    """Checks that ``model`` is a single Ensemble, not a stack from ``jax.vmap``."""
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
    """Describes an object passed instead of a model, and where to find the model."""
    if isinstance(model, tuple) and model and isinstance(model[0], Ensemble):
        return (
            "the pair (model, history) that fit returns; unpack it: "
            "model, history = jb.fit(...)"
        )
    name = type(model).__name__
    estimator = isinstance(getattr(model, "model_", None), Ensemble)
    return f"{name}, an estimator; pass its model_" if estimator else name
