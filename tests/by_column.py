# SPDX-License-Identifier: Apache-2.0
"""The functions that grow trees, on plain arrays of codes by feature [F, N]."""

import jax.numpy as jnp

from jboost.codes.codes import DenseCodes, SparseCodes
from jboost.kernels.library import takes_implementation
from jboost.trees import grow, histogram


def as_codes(columns):
    """Sparse codes stay as they are."""
    return columns if isinstance(columns, SparseCodes) else DenseCodes(columns)


@takes_implementation
def grow_levels(columns, *rows, implementation=None, **sizes):
    """jboost.trees.grow.grow_levels."""
    del implementation
    return grow.grow_levels(as_codes(jnp.asarray(columns)), *rows, **sizes)


def find_leaves(tree, columns):
    """jboost.trees.grow.find_leaves."""
    return grow.find_leaves(tree, as_codes(columns))


@takes_implementation
def sum_histogram(columns, channels, node, *, implementation=None, **sizes):
    """jboost.trees.histogram.sum_histogram."""
    del implementation
    return histogram.sum_histogram(as_codes(columns), channels, node, **sizes)


def sum_child_histogram(columns, channels, node, **sizes):
    """jboost.trees.histogram.sum_plain_histogram of the smaller children."""
    rows = as_codes(columns), channels, node
    count = jnp.bincount(
        jnp.where(node >= 0, node, len(node)), length=sizes["num_nodes"]
    )
    return histogram.sum_plain_histogram(*rows, True, count.astype(jnp.int32), **sizes)
