# SPDX-License-Identifier: Apache-2.0
"""The model: trees on raw thresholds, in one container.

In: trees on codes and the bins that made the codes. Out: an Ensemble, an immutable
pytree of arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.codes.bins import Bins
from jboost.entry import checks
from jboost.entry.decorators import traceable
from jboost.entry.representation import show_fields
from jboost.model.nodes import Nodes, list_nodes
from jboost.model.slices import take_part
from jboost.tables.categories import Categories, column_values
from jboost.tables.frames import Schema
from jboost.tables.sparse import Absent
from jboost.trees.tree import CATEGORICAL, BoostedTrees, LeafSums

FORMAT_VERSION = 1


class Model:
    """The base of all that predicts.

    Attributes:
      single_tree: whether the model is one tree without rounds, which starts from
        score 0.
    """

    single_tree: ClassVar[bool] = False

    def as_ensemble(self) -> "Ensemble":
        """Returns the model in the form that prediction and explanation take."""
        raise NotImplementedError

    def nodes(self, rounds: slice = slice(None)) -> Nodes:
        """Returns the nodes of all trees, or of some rounds, for people and files."""
        raise NotImplementedError


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
class Ensemble(Model):
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

    def as_ensemble(self) -> "Ensemble":
        """Returns the model itself."""
        return self

    def nodes(self, rounds: slice = slice(None)) -> Nodes:
        """Returns the nodes of all trees, or of some rounds; T counts all K scores."""
        return list_nodes(self, rounds)

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
    return map_rounds(lambda array: take_part(array, (slice(num_rounds),)), model)


def map_rounds(change: Callable[[Any], Any], model: Ensemble) -> Ensemble:
    """The model with ``change`` made to every array that has a place per round."""
    names = (
        "feature", "threshold", "missing_left", "leaf_value", "sums", "left_codes",
        "links",
    )  # fmt: skip
    parts = {name: getattr(model, name) for name in names}
    return replace(model, **jax.tree.map(change, parts))


def read_model(model: Any) -> Ensemble:
    """Returns any model as an Ensemble: a single tree as one round of linked trees.

    Raises:
      TypeError: ``model`` is neither an Ensemble nor a RegressionTree.
      ValueError: it is several models, stacked by ``jax.vmap``.
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
    """Checks that ``model`` is an Ensemble, and one only.

    Raises:
      TypeError: it is something else.
      ValueError: it is several models, stacked by ``jax.vmap``.
    """
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
    """Says what was passed instead of a model, and where the model is, if anywhere."""
    if isinstance(model, tuple) and model and isinstance(model[0], Ensemble):
        return (
            "the pair (model, history) that fit returns; unpack it: "
            "model, history = jb.fit(...)"
        )
    name = type(model).__name__
    estimator = isinstance(getattr(model, "model_", None), Ensemble)
    return f"{name}, an estimator; pass its model_" if estimator else name
