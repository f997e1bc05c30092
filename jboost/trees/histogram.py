# SPDX-License-Identifier: Apache-2.0
"""Sums of integer channels per node, feature and bin.

In: codes by feature [F, N], integer channels per row [N, C] (gradient, curvature,
and where needed a count), the node of each row. Out: int32 [M, F, B, C].

Sums of integers do not depend on their order, so every kernel on every number of
threads gives the same bits, and a sibling's histogram is exactly the parent's minus
the child's. ``quantise`` makes the integers: a power of two times the float, chosen
per tree so that no sum over rows can leave 31 bits.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped, UInt8, UInt16, UInt32

from jboost.entry.decorators import traceable
from jboost.kernels import grow_cpu, leaves_cpu, sparse_xla, sums_xla, xla
from jboost.kernels.library import choose
from jboost.kernels.sums_xla import exponent_above, power_of_two
from jboost.numerics.floats import sum_rows
from jboost.tables.sparse import SparseCodes

Codes = UInt8[Array, "F N"] | UInt16[Array, "F N"] | UInt32[Array, "F N"] | SparseCodes
_NEAREST_BITS = (
    16  # bits left for a row above which rounding to nearest is exact enough
)


@traceable
def build_histogram(
    columns: Codes,
    channels: Int32[Array, "N C"],
    node: Int32[Array, " N"],
    *,
    num_nodes: int,
    num_bins: int,
    implementation: str | None = None,
) -> Int32[Array, "M F B C"]:
    """Sums ``channels`` over the rows of each (node, feature, code).

    histogram[m, f, b, c] = sum of channels[i, c] over rows i with node[i] = m and
    columns[f, i] = b. Under ``vmap`` the batch is worked through one by one.

    Args:
      columns: codes, one row per feature; or those of a sparse matrix, of which only
        stored entries are summed: the others' sum is the node's minus theirs.
      channels: what is summed.
      node: in [0, num_nodes); a row with any other value is left out.
      implementation: "xla", "cpu" (the compiled kernels), or None for the best where
        the program runs.

    Raises:
      ValueError: sizes that differ, or an implementation that is not there.

    Example:
      >>> import jax.numpy as jnp
      >>> from jboost.trees.histogram import build_histogram
      >>> columns = jnp.array([[1, 2, 1]], jnp.uint8)
      >>> channels = jnp.array([[5, 1], [7, 1], [9, 1]], jnp.int32)
      >>> build_histogram(
      ...     columns, channels, jnp.zeros(3, jnp.int32), num_nodes=1, num_bins=3
      ... )[0, 0].tolist()
      [[0, 0], [14, 2], [7, 1]]
    """
    _check_rows(columns, channels, node)
    sizes = dict(num_nodes=num_nodes, num_bins=num_bins)
    sparse = isinstance(columns, SparseCodes)
    define = sparse_xla.histogram if sparse else xla.histogram
    build = choose(
        implementation,
        cpu=partial(grow_cpu.histogram, **sizes),
        xla=sequential_vmap(partial(define, **sizes)),
    )
    return build(*(columns.arrays if sparse else (columns,)), channels, node)


def build_child_histogram(
    columns: Codes,
    channels: Int32[Array, "N C"],
    node: Int32[Array, " N"],
    *,
    num_nodes: int,
    num_bins: int,
) -> Int32[Array, "M F B C"]:
    """As :func:`build_histogram` in plain XLA, where at most N // 2 rows have a node.

    That holds for the smaller children of a level: they are gathered first, which
    halves the work. (Of sparse codes every stored entry is looked at.)
    """
    if isinstance(columns, SparseCodes):
        sizes = dict(num_nodes=num_nodes, num_bins=num_bins)
        return build_histogram(columns, channels, node, **sizes, implementation="xla")
    _check_rows(columns, channels, node)

    def build(columns, channels, node):
        size = max(1, channels.shape[0] // 2)
        rows, chosen = select_rows((node >= 0) & (node < num_nodes), size)
        return xla.histogram(
            columns,
            channels[rows],
            jnp.where(chosen, node[rows], num_nodes),
            num_nodes=num_nodes,
            num_bins=num_bins,
            rows=rows,
        )

    return sequential_vmap(build)(columns, channels, node)


def select_rows(
    chosen: Bool[Array, " N"], size: int
) -> tuple[Int32[Array, " S"], Bool[Array, " S"]]:
    """Positions of the true entries, in order, and which of the ``size`` are filled."""
    num_rows = chosen.shape[0]
    position = jnp.cumsum(chosen.astype(jnp.int32))
    slot = jnp.where(chosen, position - 1, size)
    every = jnp.arange(num_rows, dtype=jnp.int32)
    rows = jnp.zeros(size, jnp.int32).at[slot].set(every, mode="drop")
    return rows, jnp.arange(size) < position[-1]


def sum_by_group(
    values: Shaped[Array, " N"],
    group: Int32[Array, " N"],
    num_groups: int,
    implementation: str | None = None,
) -> Shaped[Array, " G"]:
    """Sums ``values``, which may be float, by group; see :func:`sum_channels`."""
    return sum_channels((values,), group, num_groups, implementation)[0]


def sum_channels(
    channels: Sequence[Shaped[Array, " N"]],
    group: Int32[Array, " N"],
    num_groups: int,
    implementation: str | None = None,
) -> Shaped[Array, "C G"]:
    """Sums each channel by group; the bits do not depend on the order of the rows.

    Floats are added as multiples of a unit, one for each channel; see
    :func:`jboost.numerics.floats.sum_rows`. A group outside [0, num_groups) is left out.
    """
    run = partial(sums_xla.sum_channels, num_groups=num_groups)
    if all(channel.dtype == jnp.float32 for channel in channels):
        cpu = partial(leaves_cpu.sum_channels, num_groups=num_groups)
        run = choose(implementation, cpu=cpu, xla=run)
    return run(group, *channels)


class FixedPoint(NamedTuple):
    """How floats become integers.

    Attributes:
      scale: a power of two for each channel.
      unit: its inverse.
      stochastic: whether rounding is stochastic instead of to nearest.
    """

    scale: Float[Array, " C"]
    unit: Float[Array, " C"]
    stochastic: Bool[Array, ""]


def choose_scale(
    values: Float[Array, "C N"],
    num_rows: Int[Array, ""],
    implementation: str | None = None,
) -> FixedPoint:
    """Finds the largest scales with which no sum over rows can leave 31 bits.

    Rounding is to nearest while at least 16 bits a row remain; below, stochastic.

    Args:
      values: finite; 0 for rows that must not count.
      num_rows: how many rows count.
    """
    total = sum_rows(jnp.abs(values), implementation)
    total = jnp.maximum(total, jnp.float32(1e-30))
    # The scaled sum stays below 2^30; rounding adds at most 1 a row.
    exponent = jnp.clip(30 - exponent_above(total), -126, 126)
    exponent = jnp.where(jnp.isfinite(total), exponent, -126)  # a row is below 2^2
    return FixedPoint(
        scale=power_of_two(exponent),
        unit=power_of_two(-exponent),
        stochastic=num_rows > 2 ** (31 - _NEAREST_BITS),
    )


def quantise(
    values: Float[Array, "N C"],
    fixed: FixedPoint,
    words: UInt32[Array, "2"],
    first_row: Int32[Array, ""] | int = 0,
) -> Int32[Array, "N C"]:
    """Rounds each channel to integers, which times ``fixed.unit`` give the values.

    Stochastically means up with probability equal to the fraction, by a hash of
    channel, row and seed, so that a sum over many rows stays unbiased.

    Args:
      values: finite; 0 for rows that must not count.
      fixed: from :func:`choose_scale`.
      words: seed, another for each tree.
      first_row: the number of the first row, where these are not all rows.
    """
    scaled = values * fixed.scale[None, :]
    row = jnp.arange(values.shape[0], dtype=jnp.uint32)[:, None]
    row = row + jnp.asarray(first_row).astype(jnp.uint32)
    channel = jnp.arange(values.shape[1], dtype=jnp.uint32)[None, :]
    bits = hash_words(row ^ (channel << 31), words)
    fraction = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    offset = jnp.where(fixed.stochastic, fraction, jnp.float32(0.5))
    # Rows that must not count hold 0 and stay 0: floor(0 + offset) = 0.
    return jnp.floor(scaled + offset).astype(jnp.int32)


def hash_words(
    word: UInt32[Array, "*shape"], words: UInt32[Array, "2"]
) -> UInt32[Array, "*shape"]:
    """A seeded bijection of 32-bit words that looks random.

    Two rounds of an xor-shift-multiply mixer (constants: Wellons' lowbias32), each
    after adding a word of the seed; every step can be undone, so distinct words have
    distinct hashes.
    """
    for part in (words[0], words[1]):
        word = word + part
        word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
        word = (word ^ (word >> 15)) * jnp.uint32(0x846CA68B)
        word = word ^ (word >> 16)
    return word


def derive(
    words: UInt32[Array, "2"], index: Int32[Array, "*shape"]
) -> UInt32[Array, "*shape 2"]:
    """Two words for each ``index``-th use of ``words``; cheap to compile and to run."""
    pair = jnp.arange(2, dtype=jnp.uint32)
    number = 2 * jnp.asarray(index)[..., None].astype(jnp.uint32)
    return hash_words(number + pair.reshape((1,) * (number.ndim - 1) + (2,)), words)


def count_rows(columns: Codes) -> int:
    """N."""
    sparse = isinstance(columns, SparseCodes)
    return columns.num_rows if sparse else columns.shape[1]


def _check_rows(columns, channels, node):
    if not count_rows(columns) == channels.shape[0] == node.shape[0]:
        raise ValueError(
            f"{columns.shape=}, {channels.shape=} and {node.shape=} differ in N"
        )
