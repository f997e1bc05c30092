# SPDX-License-Identifier: Apache-2.0
"""Steps of a level of a tree as CUDA kernels: see the folder cuda/.

Each function returns the same bits as its plain-XLA namesake.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt8, UInt32

from jboost.kernels.binning_cpu import packed_shape
from jboost.kernels.calls import floats, ints
from jboost.kernels.cuda_launch import (
    BLOCKS,
    INT,
    LANES,
    PROCESSORS,
    SHARED_BYTES,
    THREADS,
    Launch,
    divide_rows,
    launch,
)

_CODES, _COLUMNS = 4, 32  # codes in a word; columns of a table
_MOST_LISTED = 8192  # nodes; a block counts the rows of each
_MOST_PASSES = 16  # passes over the nodes; beyond, rows go to the result directly


def takes(codes: Any) -> bool:
    """Returns whether there are kernels for these codes: dense, of up to 16 bits."""
    return not codes.is_sparse and codes.columns.dtype in (jnp.uint8, jnp.uint16)


def histogram(columns, channels, node, enabled=True, *, num_nodes, num_bins):
    """See :func:`jboost.kernels.xla.histogram`; zeros unless ``enabled``.

    There are up to three channels.
    """
    (num_features, num_rows), num_channels = columns.shape, channels.shape[1]
    width = min(num_features, 32)
    cell = num_bins * num_channels * INT
    nodes = min(num_nodes, SHARED_BYTES // cell)
    shared = nodes > 0 and -(-num_nodes // nodes) <= _MOST_PASSES
    if shared:
        features = max(1, min(width, SHARED_BYTES // (cell * nodes)))
    else:
        nodes, features = num_nodes, width
    tables = -(-num_features // features) * -(-num_nodes // nodes)
    blocks, rows = divide_rows(num_rows, BLOCKS // tables)
    run = Launch(
        f"histogram_{_suffix(columns)}_{num_channels}",
        (ints(num_nodes, num_features, num_bins, num_channels),),
        (tables, blocks),
        (num_rows, num_features, num_nodes, num_bins, rows, features, nodes, shared),
        cell * nodes * features if shared else 0,
        zeroed=(True,),
    )
    return launch(run, columns, channels, node, _flag(enabled))


def takes_packed(packed: Array | None, num_nodes: int, num_bins: int) -> bool:
    """Returns whether :func:`packed_histogram` takes these sizes."""
    small = num_nodes <= _MOST_LISTED and num_bins <= 256
    return packed is not None and packed.dtype == jnp.uint8 and small


def packed_histogram(
    packed, channels, node, enabled=True, sizes=None, *, num_features, num_nodes,
    num_bins,
):  # fmt: skip
    """Computes :func:`histogram` faster, from codes by row that :func:`pack` made.

    For one node, the kernel reads all rows, otherwise only the rows with a node.

    Args:
      sizes: the number of rows of each node; None: they are counted.
    """
    enabled, listed = _flag(enabled), num_nodes > 1
    rows, starts = node, jnp.zeros(1, jnp.int32)
    if listed:
        sizes = _count_rows(node, enabled, num_nodes) if sizes is None else sizes
        starts = jnp.pad(jnp.cumsum(sizes, dtype=jnp.int32), (1, 0))
        rows = _list_rows(node, starts, enabled)
    (blocks, num_rows, width), num_channels = packed.shape, channels.shape[1]
    groups = -(-blocks * width // _COLUMNS)
    columns = min(_COLUMNS, blocks * width)  # columns in a group's result
    shape = (num_nodes, groups, num_channels, num_bins, columns)
    run = Launch(
        f"packed_histogram_{num_channels}",
        (ints(*shape),),
        (divide_rows(num_rows, -(-PROCESSORS // groups))[0], groups),
        (num_rows, blocks, width // _CODES, num_nodes, num_bins, columns, listed),
        num_channels * num_bins * _COLUMNS * INT,
        threads=1024,
        zeroed=(True,),
    )
    sums = launch(run, packed, channels, rows, starts, enabled)
    # From [node, group, channel, bin, column] to [node, feature, bin, channel].
    sums = sums.transpose(0, 1, 4, 3, 2)
    sums = sums.reshape(num_nodes, groups * columns, num_bins, num_channels)
    return sums[:, :num_features]


def _count_rows(node, enabled, num_nodes):
    blocks, rows = divide_rows(node.shape[0], BLOCKS)
    run = Launch(
        "count_nodes", (ints(num_nodes),), (blocks, 1),
        (node.shape[0], num_nodes, rows), num_nodes * INT, zeroed=(True,),
    )  # fmt: skip
    return launch(run, node, enabled)


def _list_rows(node, starts, enabled):
    """Returns the rows [N] by node; those of node m from ``starts[m]`` on."""
    num_rows, num_nodes = node.shape[0], starts.shape[0] - 1
    blocks, rows = divide_rows(num_rows, BLOCKS)
    run = Launch(
        "list_nodes", (ints(num_rows), ints(num_nodes)), (blocks, 1),
        (num_rows, num_nodes, rows), 2 * num_nodes * INT, zeroed=(False, True),
    )  # fmt: skip
    return launch(run, node, starts, enabled)[0]


def pack(columns: UInt8[Array, "F N"], num_bins: int) -> UInt8[Array, "blocks N width"]:
    """Arranges codes by row; see :func:`jboost.kernels.binning_cpu.pack`."""
    num_features, num_rows = columns.shape
    blocks, _, width = packed_shape(num_features, num_rows)
    highest = jnp.asarray(min(num_bins, 256) - 1, columns.dtype)
    kept = jnp.minimum(columns, highest)
    kept = jnp.pad(kept, ((0, blocks * width - num_features), (0, 0)))
    return kept.reshape(blocks, width, num_rows).swapaxes(1, 2)


class BestCuts(NamedTuple):
    """The best cut of each node and feature.

    Attributes:
      gain: the gain of the cut; -inf if no cut is admissible.
      place: 2 * threshold + (missing values go left).
      noise: the score of the node; gains are compared to it.
    """

    gain: Float[Array, "M F"]
    place: Int32[Array, "M F"]
    noise: Float[Array, " M"]


class SearchNumbers(NamedTuple):
    """Numbers of the search, the same for all nodes of a level.

    Attributes:
      unit: value of one integer of gradient and of one of curvature.
      limits: l2 in units of the curvature's integers, the least weight of a child, and
        l1, which counts where leaf values are limited.
      counts: the least number of rows of a child, and ``rows_per_threshold``.
      seed: the seed of the tree.
    """

    unit: Float[Array, "2"]
    limits: Float[Array, "3"]
    counts: Int32[Array, "2"]
    seed: UInt32[Array, "2"]
    level: Int32[Array, ""]


def find_cuts(
    histogram: Int32[Array, "M F B C"],
    allowed: Bool[Array, "M F"],
    numbers: SearchNumbers,
    bounds: Float[Array, "M 2"] | None,
    monotone: Int32[Array, " F"] | None,
) -> BestCuts:
    """Finds the best cut of each node and feature.

    Args:
      bounds, monotone: limits of the leaf values below each node, and the constraint on
        each feature; None: leaf values are not limited.
    """
    nodes, features, bins, channels = histogram.shape
    threads = min(256, -(-bins // LANES) * LANES)
    shape = (nodes, features)
    limited = "" if bounds is None else "limited_"
    run = Launch(
        f"search_{limited}{channels}",
        (floats(*shape), ints(*shape), floats(nodes)),
        (nodes * features, 1),
        (features, bins),
        (channels + 3) * (1024 // LANES) * INT,  # enough for 1,024 threads
        threads=threads,
    )
    if bounds is None or monotone is None:
        bounds, monotone = jnp.zeros((1, 2), jnp.float32), jnp.zeros(1, jnp.int32)
    return BestCuts(*launch(run, histogram, allowed, *numbers, bounds, monotone))


_MOST_SORTED = 4096  # categories of a feature; a block sorts them


def takes_categories(num_bins: int) -> bool:
    """Returns whether :func:`find_sets` takes this number of bins."""
    return num_bins <= _MOST_SORTED


class BestSets(NamedTuple):
    """The best set of categories of each node and categorical feature.

    Attributes:
      gain, place: see :class:`BestCuts`; a place counts the codes on the left.
      left, absent: bits of the codes that go left, and of those without rows.
    """

    gain: Float[Array, "M G"]
    place: Int32[Array, "M G"]
    left: UInt32[Array, "M G W"]
    absent: UInt32[Array, "M G W"]


def find_sets(
    histogram, allowed, numbers, bounds, squares, features, num_codes, max_onehot, *,
    num_words,
):  # fmt: skip
    """Finds the best set of categories of each node and categorical feature.

    Args:
      bounds: limits of the leaf values below each node; None: they are not limited.
      squares: the sum of the squared gradients' integers of each node.
    """
    nodes, num_features, bins, channels = histogram.shape
    groups, size = len(features), 1 << (bins - 1).bit_length()
    limited = "" if bounds is None else "limited_"
    sets = jax.ShapeDtypeStruct((nodes, groups, num_words), jnp.uint32)
    run = Launch(
        f"search_categories_{limited}{channels}",
        (floats(nodes, groups), ints(nodes, groups), sets, sets),
        (nodes * groups, 1),
        (num_features, bins, groups, size, num_words),
        (3 * size + 2 * num_words + (channels + 4) * (1024 // LANES)) * INT,
        threads=min(256, max(LANES, size)),
    )
    if bounds is None:
        bounds = jnp.zeros((1, 2), jnp.float32)
    operands = histogram, allowed, *numbers, bounds, squares
    return BestSets(*launch(run, *operands, features, num_codes, max_onehot))


def route_rows(codes, split, *others, slots):
    """See :func:`jboost.trees.levels.route_rows`; returns the fields of ``Moved``."""
    num_rows, sets = codes.num_rows, split.left_codes
    if sets is None:
        sets = jnp.zeros((1, 1), jnp.uint32)
    run = Launch(
        f"route_{_suffix(codes.columns)}",
        (ints(num_rows),) * 3,
        (-(-num_rows // (4 * THREADS)), 1),
        (num_rows, split.feature.shape[0], slots, sets.shape[1]),
    )
    splits = split.feature, split.threshold, split.missing_left, sets
    return launch(run, codes.columns, *splits, *others)


def sample_features(seed, level, fractions, *, slots, num_features):
    """See :func:`jboost.trees.levels.sample_features`."""
    run = Launch(
        "sample_features",
        (jax.ShapeDtypeStruct((slots, num_features), jnp.bool_),),
        (slots, 1),
        (num_features,),
        INT,
        threads=128,
    )
    return launch(run, seed, level, fractions)


def _flag(enabled):
    return jnp.asarray(enabled, jnp.int32)


def _suffix(columns):
    return "u8" if columns.dtype == jnp.uint8 else "u16"
