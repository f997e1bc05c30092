# SPDX-License-Identifier: Apache-2.0
"""Sparse codes in plain XLA: the definition of the kernels' results.

In: the arrays of :class:`jboost.codes.codes.SparseCodes`. Out: histograms, from sums
over stored entries only; the code of each row in a feature.
"""

import jax
import jax.numpy as jnp

from jboost.kernels.xla import segment_sum


def histogram(
    starts, rows, codes, absent, channels, node, *, num_nodes, num_bins
):  # fmt: skip
    """Sums channels by (node, feature, code).

    Entries that are not stored sum to the node's total minus the sum of the stored
    ones, which is exact in integers.
    """
    num_features, num_channels = absent.shape[0], channels.shape[1]
    inside = (node >= 0) & (node < num_nodes)
    channels = jnp.where(inside[:, None], channels, 0)
    node = jnp.where(inside, node, 0)
    feature = _features(starts, rows.shape[0])
    real = feature < num_features
    cell = (node[rows] * num_features + feature) * num_bins + codes.astype(jnp.int32)
    stored = segment_sum(
        jnp.where(real[:, None], channels[rows], 0),
        jnp.where(real, cell, 0),
        num_nodes * num_features * num_bins,
    ).reshape(num_nodes, num_features, num_bins, num_channels)
    total = segment_sum(channels, node, num_nodes)
    rest = total[:, None] - jnp.sum(stored, axis=2, dtype=stored.dtype)
    every = jnp.arange(num_features, dtype=jnp.int32)
    return stored.at[:, every, absent.astype(jnp.int32)].add(rest)


def row_codes(starts, rows, codes, absent, feature):
    """Finds the code of each row i in feature ``feature[i]``, by bisection."""
    row = jnp.arange(feature.shape[0], dtype=jnp.int32)
    last = rows.shape[0] - 1
    end = starts[feature + 1]

    def halve(_, bounds):
        low, high = bounds
        middle = low + ((high - low) >> 1)
        before = (rows[jnp.minimum(middle, last)] < row) & (low < high)
        return jnp.where(before, middle + 1, low), jnp.where(before, high, middle)

    steps = (last + 1).bit_length()
    position, _ = jax.lax.fori_loop(0, steps, halve, (starts[feature], end))
    entry = jnp.minimum(position, last)
    stored = (position < end) & (rows[entry] == row)
    return jnp.where(stored, codes[entry], absent[feature]).astype(jnp.int32)


def _features(starts, num_entries):
    """Returns the feature of each entry; F for padding."""
    ends = jnp.zeros(num_entries + 1, jnp.int32).at[starts[1:]].add(1)
    return jnp.cumsum(ends)[:num_entries]
