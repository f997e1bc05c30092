# SPDX-License-Identifier: Apache-2.0
"""The parts of training, for boosting loops of your own."""

from jboost.codes.codes import DenseCodes, SparseCodes
from jboost.codes.preparing import prepare_codes
from jboost.trees.public import (
    Histogram,
    build_histogram,
    find_leaves,
    find_split,
    fit_leaves,
    grow_tree,
    predict_tree,
    stack_trees,
)
from jboost.trees.splitting import Split
from jboost.trees.tree import LeafSums, Slopes, Tree

__all__ = [
    "DenseCodes",
    "Histogram",
    "LeafSums",
    "Slopes",
    "SparseCodes",
    "Split",
    "Tree",
    "build_histogram",
    "find_leaves",
    "find_split",
    "fit_leaves",
    "grow_tree",
    "predict_tree",
    "prepare_codes",
    "stack_trees",
]
