# SPDX-License-Identifier: Apache-2.0
"""Histograms in plain XLA: the definition, and what runs where nothing else does."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def histogram(columns, channels, node, *, num_nodes, num_bins, rows=None):
    """Sums channels by (node, feature, code); ``rows`` picks the columns' entries.

    Feature by feature: one scatter into a table that stays in cache, which XLA runs
    several times faster than one scatter over all features.
    """
    inside = (node >= 0) & (node < num_nodes)
    channels = jnp.where(inside[:, None], channels, 0)
    first = jnp.where(inside, node, 0) * num_bins

    def sum_feature(codes):
        codes = codes if rows is None else codes[rows]
        key = first + codes.astype(jnp.int32)
        return segment_sum(channels, key, num_nodes * num_bins)

    sums = jax.lax.map(sum_feature, columns)
    shape = (columns.shape[0], num_nodes, num_bins, channels.shape[1])
    return jnp.swapaxes(sums.reshape(shape), 0, 1)


def select_rows(
    chosen: Bool[Array, " N"], size: int
) -> tuple[Int32[Array, " S"], Bool[Array, " S"]]:
    """Positions of the true entries, in order, and which of the ``size`` are filled."""
    num_rows = chosen.shape[0]
    position = jnp.cumsum(chosen.astype(jnp.int32))
    slot = jnp.where(chosen, position - 1, size)
    every = jnp.arange(num_rows, dtype=jnp.int32)
    rows = jnp.zeros(size, jnp.int32).at[slot].set(every, mode="drop")
    return rows, jnp.arange(size, dtype=jnp.int32) < position[-1]


def segment_sum(values, key, num_segments):
    """Sums rows of ``values`` by key, which must lie in [0, num_segments).

    Two channels at a time: a scatter of pairs costs as much as one of single
    numbers; of three, three times as much. Scattered by ``lax``, because ``jnp`` and
    ``jax.ops`` test every key twice, in passes of their own.
    """
    scattered = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    sums = []
    for first in range(0, values.shape[1], 2):
        pair = values[:, first : first + 2]
        zeros = jnp.zeros((num_segments, pair.shape[1]), values.dtype)
        total = jax.lax.scatter_add(
            zeros,
            key[:, None],
            pair,
            scattered,
            mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
        )
        sums.append(total)
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums, axis=1)
