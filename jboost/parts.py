# SPDX-License-Identifier: Apache-2.0
"""The parts of training, for boosting loops of your own."""

from jboost.codes.codes import SparseCodes
from jboost.trees.growing import grow_tree
from jboost.trees.histogram import build_histogram
from jboost.trees.splitting import find_split
from jboost.trees.tree import LeafSums, Tree

__all__ = [
    "LeafSums",
    "SparseCodes",
    "Tree",
    "build_histogram",
    "find_split",
    "grow_tree",
]
