# SPDX-License-Identifier: Apache-2.0
"""Trees on codes, as arrays.

In heap order node i has the children 2i + 1 and 2i + 2. Models are made of them; this
module imports nothing of what grows them.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int32, UInt32

from jboost.entry.messages import show_fields

CATEGORICAL = -1  # the threshold of a split by categories


class LeafSums(NamedTuple):
    """What a tree's leaves were fitted to: sums over the rows it learned from.

    Attributes:
      gradient, curvature: weighted, in the loss's units.
      weight: of the rows.
      l2: what is added to a node's curvature in a gain.
    """

    gradient: Float[Array, "*T L"]
    curvature: Float[Array, "*T L"]
    weight: Float[Array, "*T L"]
    l2: Float[Array, "*T"]

    def __repr__(self) -> str:
        """Its fields: the arrays would fill pages."""
        return show_fields(self)


class Tree(NamedTuple):
    """A tree on codes; more axes in front for more trees.

    Splits of a tree that K scores share have an axis of length 1, its leaves one of K.

    Attributes:
      feature: 0 where a node is not split.
      threshold: a code; ``1 <= code <= threshold`` goes left. The highest code where
        a node is not split, -1 where categories are.
      missing_left: where code 0 goes; True if not split.
      leaf_value: what each leaf adds to the score.
      sums: what its leaves were fitted to; None in a tree that was only grown.
      bounds: least and greatest value of each leaf; None where they are not limited,
        and in a tree that has its values.
      left_codes: bit c % 32 of word c // 32 says whether code c goes left, where
        categories are split; None where no feature holds categories.
    """

    feature: Int32[Array, "*T I"]  # I = 2^max_depth - 1
    threshold: Int32[Array, "*T I"]
    missing_left: Bool[Array, "*T I"]
    leaf_value: Float[Array, "*T I+1"]
    sums: LeafSums | None = None
    bounds: Float[Array, "*T I+1 2"] | None = None
    left_codes: UInt32[Array, "*T I W"] | None = None

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
      trees: a :class:`jboost.parts.Tree` whose arrays have axes [R, K] in front.
      init_score: [] for one score, else [K].
    """

    trees: Tree
    init_score: Float[Array, "*K"]

    def __repr__(self) -> str:
        """Its fields: the arrays would fill pages."""
        return show_fields(self)
