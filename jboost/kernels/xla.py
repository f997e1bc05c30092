# SPDX-License-Identifier: Apache-2.0
"""Plain XLA: histograms, the definition and the fallback; exact float32 operations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int32

_MOST_CELLS = 2**25  # cells that one scatter adds on a GPU
_LARGEST = float(np.finfo(np.float32).max)
_MOST_SUMS = 2**14  # sums in a feature's table, including its copies


def histogram(columns, channels, node, *, num_nodes, num_bins, rows=None):
    """Sums channels by (node, feature, code); ``rows`` picks the columns' entries.

    On a CPU feature by feature: one scatter into a table that stays in cache, which XLA
    runs several times faster than one scatter over all features. On a GPU over many
    features at once, and into several copies of small tables: threads that add to the
    same number wait for each other.
    """
    inside = (node >= 0) & (node < num_nodes)
    channels = jnp.where(inside[:, None], channels, 0)
    node = jnp.where(inside, node, 0)
    num_features, num_channels = columns.shape[0], channels.shape[1]

    def sum_one_by_one(columns, channels, node):
        def sum_feature(codes):
            codes = codes if rows is None else codes[rows]
            key = node * num_bins + codes.astype(jnp.int32)
            return segment_sum(channels, key, num_nodes * num_bins)

        return jax.lax.map(sum_feature, columns)

    def sum_in_groups(columns, channels, node):
        copies = max(1, _MOST_SUMS // (num_nodes * num_bins))
        size = copies * num_nodes * num_bins
        copy = jnp.arange(node.shape[0], dtype=jnp.int32) % copies
        first = (copy * num_nodes + node) * num_bins

        def sum_group(columns):
            codes = columns if rows is None else columns[:, rows]
            table = size * jnp.arange(len(columns), dtype=jnp.int32)[:, None]
            keys = (table + first[None] + codes.astype(jnp.int32)).reshape(-1)
            values = jnp.broadcast_to(channels[None], (len(columns), *channels.shape))
            values = values.reshape(-1, num_channels)
            sums = segment_sum(values, keys, len(columns) * size)
            sums = sums.reshape(len(columns), copies, size // copies, num_channels)
            return jnp.sum(sums, axis=1, dtype=sums.dtype)

        most = _MOST_CELLS // max(1, size, node.shape[0])
        group = max(1, min(num_features, most))
        whole = num_features // group * group
        groups = columns[:whole].reshape(-1, group, columns.shape[1])
        sums = jax.lax.map(sum_group, groups)
        parts = [sums.reshape(whole, *sums.shape[2:])]
        if whole < num_features:
            parts.append(sum_group(columns[whole:]))
        return jnp.concatenate(parts)

    sums = jax.lax.platform_dependent(
        columns, channels, node, cpu=sum_one_by_one, default=sum_in_groups
    )
    shape = (num_features, num_nodes, num_bins, num_channels)
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


def power_of_two(exponent):
    """Returns 2^exponent for -126 <= exponent <= 127; exp2 is not exact everywhere."""
    return ((exponent + 127) << 23).view(np.float32)


def exponent_above(value):
    """Returns the e with 2^(e-1) <= value < 2^e, for normal positive values."""
    return (value.view(np.int32) >> 23) - 126


def ordered_bits(x):
    """Maps float32 to uint32 of the same order; -0 comes just before 0."""
    bits = x.view(np.uint32)
    flip = _module(x).where(bits >> 31 != 0, np.uint32(2**32 - 1), np.uint32(2**31))
    return bits ^ flip


def from_ordered_bits(ordered):
    """Inverts :func:`ordered_bits`."""
    above = ordered >> 31 != 0
    flip = _module(ordered).where(above, np.uint32(2**31), np.uint32(2**32 - 1))
    return (ordered ^ flip).view(np.float32)


def _module(x):
    return jnp if isinstance(x, jax.Array) else np


def add_halves(terms: Float[Array, "K *n"]) -> Float[Array, "*n"]:
    """Sums the first axis by halves: (t0 + t2) + (t1 + t3), then the rest.

    The order is the same in every program, that of ``jnp.sum`` is not. Products are to
    be rounded by :func:`round_alone` first.
    """
    while len(terms) > 1:
        half = len(terms) // 2
        both = terms[:half] + terms[half : 2 * half]
        terms = jnp.concatenate([both, terms[2 * half :]])
    return terms[0]


def round_alone(product: Float[ArrayLike, "*n"]) -> Any:
    """Returns a product that XLA does not contract with a sum into one FMA.

    It does so in some programs and not in others, by where the other summand comes
    from. The clip changes no finite number.
    """
    numpy: Any = np if isinstance(product, np.ndarray) else jnp
    return numpy.clip(product, -_LARGEST, _LARGEST)
