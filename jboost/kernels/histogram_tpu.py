# SPDX-License-Identifier: Apache-2.0
"""Histograms on a TPU: products of one-hot matrices, written as a Pallas kernel.

A TPU has no fast scatter, but its matrix unit multiplies whole tiles. For one feature
and the rows i of a tile,

    sums[pair, bin] = sum over i of placed[pair, i] * hits[bin, i],

where hits[bin, i] is 1 if row i has that code and else 0, and placed[pair, i] is the
row's channel c if the row is in node m, and else 0; pair = m * C + c.

The product is exact on every generation of TPUs. A channel is split into four signed
digits of 8 bits, which bfloat16 represents exactly. Each digit has rows of its own in
``placed``; a product is such a digit or 0, and float32 adds a tile of them without
rounding. The sums of digits are then integers, which are shifted to their places and
added modulo 2^32. As the result fits int32, it equals that of
:func:`jboost.kernels.xla.histogram` bit for bit, for any number of rows.

It has never run on a TPU: interpreters on a CPU run it, and libtpu 0.0.42 and 0.0.50
compile it for TPU v4, v5e, v5p, v6e and 7x without one. (For v4 they refuse products of
int8; for v2 and v3, those of bfloat16.)
"""

import os
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt8, UInt16, UInt32

from jboost.entry.context import vary

_DIGITS = 4
_DIGIT = 8  # bits
_BIAS = 0x00808080  # makes the lower digits, which have a sign, bits from 0 to 255
_SUBLANES = 8  # rows of a register
_LANES = 128  # columns of a register
_FIRST = np.int32(0)  # a block's index: compilers refuse the 64 bits of Python's 0


@dataclass(frozen=True)
class _Tile:
    """The sizes of the tile that one step of the grid processes.

    32 pairs of 4 digits and 256 bins fill the matrix unit. Adding to the sums costs as
    much for many rows as for few: in the schedules that libtpu makes, a row takes a
    quarter to a third fewer instructions in tiles of 2048 rows than in those of 512.
    The blocks fit into the 16 MiB of fast memory of the smallest TPU.
    """

    features: int
    pairs: int
    bins: int
    rows: int

    @staticmethod
    def fit(num_features, num_pairs, num_bins, num_rows) -> "_Tile":
        """Returns a tile no larger than the problem, in whole registers."""
        return _Tile(
            features=min(32, num_features),
            pairs=min(32, _round_up(num_pairs, _SUBLANES)),
            bins=min(256, _round_up(num_bins, _LANES)),
            rows=min(2048, _round_up(num_rows, _LANES)),
        )


@cache
def available() -> bool:
    """Returns whether programs for TPUs may be made here: JAX needs libtpu for that.

    Elsewhere nobody has to wait for Pallas to be loaded and the kernel to be traced.
    """
    return "TPU_LIBRARY_PATH" in os.environ or find_spec("libtpu") is not None


def histogram(
    columns: UInt8[Array, "F N"] | UInt16[Array, "F N"] | UInt32[Array, "F N"],
    channels: Int32[Array, "N C"],
    node: Int32[Array, " N"],
    *,
    num_nodes: int,
    num_bins: int,
    interpret: Any = False,
) -> Int32[Array, "M F B C"]:
    """Sums channels by (node, feature, code).

    The work grows with the product of rows, features, and nodes times channels, rounded
    up to a multiple of 32. Rows without a node cost as much as others.

    Args:
      channels, node, num_nodes, num_bins: the arguments of
        :func:`jboost.trees.histogram.sum_histogram`.
      interpret: how Pallas runs the kernel without a TPU; see
        ``jax.experimental.pallas.pallas_call``.
    """
    # Loading Pallas takes longer than loading all of jboost.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (num_features, num_rows), num_channels = columns.shape, channels.shape[1]
    num_pairs = num_nodes * num_channels
    sizes = num_features, num_pairs, num_bins, num_rows
    if 0 in sizes:
        return jnp.zeros((num_nodes, num_features, num_bins, num_channels), jnp.int32)
    tile = _Tile.fit(*sizes)
    extents = tile.features, tile.pairs, tile.bins, tile.rows
    grid = tuple(map(pl.cdiv, sizes, extents))
    padded = (num_features, grid[1] * tile.pairs, grid[2] * tile.bins)
    # The first pair of each row; that of rows beyond the last one is none.
    inside = (node >= 0) & (node < num_nodes)
    first = jnp.where(inside, node * num_channels, -num_channels)
    padding = grid[3] * tile.rows - num_rows
    first = jnp.pad(first, (0, padding), constant_values=-num_channels)
    operands = columns, channels.T, first[None]
    sums = pl.pallas_call(
        partial(_sum_tile, tile=tile, num_features=num_features),
        grid=grid,
        in_specs=[
            pl.BlockSpec((tile.features, tile.rows), lambda f, p, b, r: (f, r)),
            pl.BlockSpec((num_channels, tile.rows), lambda f, p, b, r: (_FIRST, r)),
            pl.BlockSpec((1, tile.rows), lambda f, p, b, r: (_FIRST, r)),
        ],
        out_specs=pl.BlockSpec(extents[:3], lambda f, p, b, r: (f, p, b)),
        out_shape=_describe(padded, *operands),
        scratch_shapes=[pltpu.VMEM((tile.features, tile.rows), jnp.int32)],
        compiler_params=pltpu.CompilerParams(
            # Only the steps over rows write to the same sums.
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="jboost_histogram",
    )(*operands)
    sums = sums[:, :num_pairs, :num_bins]
    sums = sums.reshape(num_features, num_nodes, num_channels, num_bins)
    return sums.transpose(1, 0, 3, 2)


def _describe(shape, *operands):
    """Describes sums that differ between devices if an operand does."""

    def depend(*operands):
        return vary(jnp.zeros(shape, jnp.int32), *operands)

    return jax.eval_shape(depend, *operands)


def _sum_tile(
    codes_ref, channels_ref, first_ref, sums_ref, wide_ref, *, tile, num_features
):
    """Adds one tile of rows to the sums of one tile of features, pairs and bins.

    Args:
      codes_ref: [features, rows].
      channels_ref: int32 [C, rows].
      first_ref: int32 [1, rows]: the pair of each row's node and channel 0; -C for
        rows without a node. Beyond the last row, codes and channels may be anything.
      sums_ref: int32 [features, pairs, bins].
      wide_ref: int32 [features, rows]; scratch: single rows of narrower integers
        cannot be taken by a traced index.
    """
    from jax.experimental import pallas as pl

    extents = tile.features, tile.pairs, tile.bins, tile.rows
    feature, pair, bin_, row = (
        pl.program_id(axis) * extent for axis, extent in enumerate(extents)
    )

    @pl.when(row == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)

    wide_ref[...] = codes_ref[...].astype(jnp.int32)
    placed = _place(channels_ref[...], first_ref[...], pair, tile)
    code = bin_ + _count((tile.bins, tile.rows), 0)

    def add(each, _):
        hits = _narrow(wide_ref[pl.ds(each, 1), :] == code)
        by_row = (((1,), (1,)), ((), ()))
        sums = jax.lax.dot_general(
            placed, hits, by_row, preferred_element_type=jnp.float32
        ).astype(jnp.int32)
        digits = (
            sums[digit * tile.pairs : (digit + 1) * tile.pairs] << digit * _DIGIT
            for digit in range(_DIGITS)
        )
        sums_ref[each] += sum(digits)

    # Beyond the last feature nothing is kept.
    jax.lax.fori_loop(0, jnp.minimum(tile.features, num_features - feature), add, None)


def _place(channels, first, pair, tile):
    """Returns each row's digits where its node and channels are: [4 * pairs, rows].

    Digit d of pair p is in row d * pairs + p.
    """
    num_channels = channels.shape[0]
    pair += _count((tile.pairs, tile.rows), 0)
    biased = channels + jnp.int32(_BIAS)
    placed = []
    for digit in range(_DIGITS):
        values = biased >> (digit * _DIGIT)  # the last digit keeps its sign
        if digit < _DIGITS - 1:
            values = (values & 0xFF) - 0x80
        rows = jnp.zeros(pair.shape, jnp.int32)
        for channel in range(num_channels):
            here = first + channel == pair
            rows = jnp.where(here, values[channel : channel + 1], rows)
        placed.append(rows)
    return _narrow(jnp.concatenate(placed, axis=0))


def _narrow(values):
    """Rounds nothing: digits and truth values are among the numbers of bfloat16."""
    return values.astype(jnp.float32).astype(jnp.bfloat16)


def _count(shape, axis):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _round_up(size, multiple):
    return -(-size // multiple) * multiple
