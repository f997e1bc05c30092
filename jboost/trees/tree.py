# SPDX-License-Identifier: Apache-2.0
"""Trees on codes, as arrays; the values of linear leaves.

In heap order node i has the children 2i + 1 and 2i + 2. Models are made of them; this
module imports none of the modules that grow them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.entry.messages import show_fields
from jboost.kernels.xla import round_alone

CATEGORICAL = -1  # the threshold of a split by categories
NO_TERM = -1  # the feature of a linear term that a leaf does not have


class LeafSums(NamedTuple):
    """Sums over the training rows of each leaf, from the fit of its value.

    Attributes:
      gradient, curvature: weighted sums, in the loss's units.
      weight: sum of the row weights.
      l2: number added to a node's curvature in a gain.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> x, y = jnp.arange(4.0)[:, None], jnp.array([1.0, 1.0, 5.0, 7.0])
      >>> codes = jb.apply_bins(jb.fit_bins(x), x)
      >>> tree, _ = jb.parts.grow_tree(codes, -y, max_depth=1, l2=0.0)
      >>> tree.sums.gradient.tolist(), tree.sums.weight.tolist()
      ([-2.0, -12.0], [2.0, 2.0])
    """

    gradient: Float[Array, "*T L"]
    curvature: Float[Array, "*T L"]
    weight: Float[Array, "*T L"]
    l2: Float[Array, "*T"]

    def __repr__(self) -> str:
        """Its fields: the arrays would fill pages."""
        return show_fields(self)


class Slopes(NamedTuple):
    """Linear terms of the leaves, P per leaf.

    A leaf gives a row the value ``leaf_value + sum_p slope_p (x_p - center_p)``, where
    x_p is the row's value of ``feature_p``, clipped to the range of the feature; and
    ``leaf_value`` alone if one of these values is missing.

    Attributes:
      feature: index of the feature of each term; -1 for no term.
      slope: change of the score per unit of x, including the learning rate.
      center: mean of x in the training rows of the leaf, weighted by curvature.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.linspace(0, 1, 400)[:, None]
      >>> model, _ = jb.fit(x, x[:, 0], num_rounds=1, max_depth=1, learning_rate=1.0)
      >>> model.slopes.slope.shape
      (1, 1, 2, 1)
    """

    feature: Int32[Array, "*T L P"]
    slope: Float[Array, "*T L P"]
    center: Float[Array, "*T L P"]

    def __repr__(self) -> str:
        """Its fields: the arrays would fill pages."""
        return show_fields(self)


class Tree(NamedTuple):
    """A tree on codes; more axes in front for more trees.

    Splits of a tree that K scores share have an axis of length 1, its leaves one of K.

    Attributes:
      feature: 0 where a node is not split.
      threshold: a code; ``1 <= code <= threshold`` goes left. The highest code if a
        node is not split, -1 for a split by categories.
      missing_left: whether code 0 goes left; True if the node is not split.
      leaf_value: contribution of each leaf to the score.
      sums: sums from the fit of the leaf values; None in a tree that was only grown.
      bounds: least and greatest value of each leaf; None if they are not limited, and
        in a tree with fitted leaf values.
      left_codes: bit c % 32 of word c // 32 is 1 if code c goes left in a split by
        categories; None if no feature holds categories.
      slopes: the linear terms of the leaves; None if leaves are constant.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> x, y = jnp.arange(4.0)[:, None], jnp.array([1.0, 1.0, 5.0, 7.0])
      >>> codes = jb.apply_bins(jb.fit_bins(x), x)
      >>> tree, _ = jb.parts.grow_tree(codes, -y, max_depth=1, l2=0.0)
      >>> tree.feature.tolist(), tree.threshold.tolist(), tree.leaf_value.tolist()
      ([0], [2], [1.0, 6.0])
    """

    feature: Int32[Array, "*T I"]  # I = 2^max_depth - 1
    threshold: Int32[Array, "*T I"]
    missing_left: Bool[Array, "*T I"]
    leaf_value: Float[Array, "*T I+1"]
    sums: LeafSums | None = None
    bounds: Float[Array, "*T I+1 2"] | None = None
    left_codes: UInt32[Array, "*T I W"] | None = None
    slopes: Slopes | None = None

    def __repr__(self) -> str:
        """Its fields: the arrays would fill pages."""
        return show_fields(self)

    @property
    def max_depth(self) -> int:
        """Returns D, the number of levels of splits."""
        return self.feature.shape[-1].bit_length()


class BoostedTrees(NamedTuple):
    """Trees on codes, and the score they start from.

    Attributes:
      trees: a :class:`jboost.parts.Tree` of arrays with axes [R, K] in front.
      init_score: [] for one score, else [K].

    Example:
      >>> import jax, numpy as np, jboost as jb
      >>> x = np.arange(8.0)[:, None]
      >>> codes = jb.apply_bins(jb.fit_bins(x), x)
      >>> trees, _ = jb.boost(
      ...     codes, x[:, 0], jb.losses.squared_error, jax.random.key(0), num_rounds=2
      ... )
      >>> trees.trees.leaf_value.shape, float(trees.init_score)
      ((2, 1, 64), 3.5)
    """

    trees: Tree
    init_score: Float[Array, "*K"]

    def __repr__(self) -> str:
        """Its fields: the arrays would fill pages."""
        return show_fields(self)


def find_ranges(
    thresholds: Float[Any, "F B"], categorical: Sequence[int] = ()
) -> Float[Any, "F 2"]:
    """Returns the least and greatest value of each feature in linear terms.

    They lie beyond the outermost thresholds by s, half the distance between the 16 %
    and the 84 % quantile of the thresholds, which is one standard deviation if the
    values are normally distributed. The range of a categorical feature, and of one
    with fewer than three thresholds, is empty: no leaf has a slope in it.
    """
    numpy: Any = np if isinstance(thresholds, np.ndarray) else jnp
    finite = numpy.isfinite(thresholds)
    thresholds, count = numpy.where(finite, thresholds, 0), numpy.sum(finite, axis=1)

    def quantile(percent):
        place = ((count - 1).clip(0) * percent + 50) // 100
        return numpy.take_along_axis(thresholds, place[:, None], axis=1)[:, 0]

    low, high = quantile(0), quantile(100)
    spread = (quantile(84) - quantile(16)) / 2
    ends = numpy.stack([low - spread, high + spread], axis=1)
    empty = (count < 3) | np.isin(np.arange(len(count)), np.array(categorical, int))
    return numpy.where(empty[:, None], numpy.float32(0), ends)


def clip_values(
    columns: Float[Array, "F N"], ranges: Float[Array, "F 2"]
) -> Float[Array, "F N"]:
    """Clips the values of each feature to its range; NaN stays."""
    return jnp.clip(columns, ranges[:, :1], ranges[:, 1:])


def find_terms(
    slopes: Slopes, read: Callable[[Int32[Array, "*n"]], Float[Array, "*m"]]
) -> list[Float[Array, "*m"]]:
    """Returns the P linear terms; all are 0 for a row that misses one of their values.

    ``read`` returns the clipped values of rows in the given features.
    """
    terms, missing = [], jnp.zeros((), bool)
    for term in range(slopes.feature.shape[-1]):
        feature, slope, center = (part[..., term] for part in slopes)
        x, given = read(jnp.maximum(feature, 0)), feature >= 0
        missing = missing | (given & jnp.isnan(x))
        terms.append(jnp.where(given, round_alone(slope * (x - center)), 0.0))
    return [jnp.where(missing, 0.0, term) for term in terms]


def evaluate(
    values: Float[Array, " L"],
    slopes: Slopes,
    leaf: Int32[Array, " N"],
    read: Callable[[Int32[Array, " N"]], Float[Array, " N"]],
) -> Float[Array, " N"]:
    """Returns the values of a tree with linear leaves for each row: the definition.

    ``read`` returns the clipped value of each row in a feature of its own.
    """
    terms = find_terms(Slopes(*(part[leaf] for part in slopes)), read)
    return sum(terms, start=values[leaf])
