# SPDX-License-Identifier: Apache-2.0
"""Rows on disk, and the values of each row that stay in memory.

These are targets, weights and offset, on one device or on the devices of a mesh.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jboost.boosting.state import Data
from jboost.codes.bins import Bins
from jboost.codes.codes import DenseCodes
from jboost.streams.batches import RowBatch
from jboost.streams.blocks import BlockSet, read_rows
from jboost.streams.folders import Folders
from jboost.training.rows import PaddedRows
from jboost.training.sharded import padded_rows, spread_rows

Names = tuple[str, ...] | None


class BlockTable(NamedTuple):
    """Rows on disk.

    Attributes:
      folders: the folders, which remove the files when they are garbage-collected.
      names: the feature names, if the batches are data frames; else None.
      structure: the pytree structure of the targets.
      kinds: arrays without rows, by name: dtypes and shapes of those in the files.
      num_offsets: the number of scores of the offset; 0 without an offset.
      max_bins: the setting that the thresholds were made for; None for given bins.
    """

    blocks: BlockSet
    folders: Folders
    bins: Bins
    names: tuple[str, ...] | None
    structure: Any
    kinds: dict[str, np.ndarray]
    weighted: bool
    num_offsets: int
    max_bins: int | None


def shape_rows(
    first: RowBatch, num_rows: int, num_scores: int, padded: bool, mesh: Mesh | None
) -> PaddedRows:
    """Returns shapes in place of the rows that :func:`load_rows` loads from files.

    Args:
      first: one row, for the dtypes and shapes.
      num_rows: the number of rows of this process.
    """
    spread = None if mesh is None else spread_rows(mesh, num_rows, padded)
    total = padded_rows(num_rows) if padded else num_rows
    if spread is not None:
        total = len(spread.shards.sizes) * spread.length

    def shape(dtype, *sizes) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    data = Data(
        codes=DenseCodes(shape(np.uint8, 0, total)),
        targets=jax.tree.map(
            lambda array: shape(array.dtype, total, *array.shape[1:]), first.targets
        ),
        weights=shape(np.float32, total),
        offset=shape(np.float32, num_scores, total),
    )
    return PaddedRows(data, num_rows, first.x.shape[1], spread)


def load_rows(
    table: BlockTable, num_scores: int, padded: bool, mesh: Mesh | None
) -> PaddedRows:
    """Loads the values of each row that stay in memory: everything except codes.

    Padding repeats row 0 at weight 0; see :func:`jboost.training.rows.bin_rows`.
    """
    if table.num_offsets not in (0, num_scores):
        raise ValueError(
            f"offset of the batches must have {num_scores} scores, as num_scores "
            f"says, got {table.num_offsets}"
        )
    size = table.blocks.num_rows
    spread = None if mesh is None else spread_rows(mesh, size, padded)
    total = padded_rows(size) if padded and spread is None else size

    def load(name):
        like = table.kinds[name]
        whole = np.empty((total, *like.shape[1:]), like.dtype)
        for block in table.blocks.blocks:
            part = read_rows(table.blocks, name, block, like)
            whole[block.first_row : block.first_row + len(part)] = part
        whole[size:] = whole[:1]
        return whole

    def put(array, axis=0, padding=None):
        if spread is not None:
            return spread.put(array, axis, padding)
        return jax.device_put(array)

    leaves = [put(load(f"target {i}")) for i in range(table.structure.num_leaves)]
    weights = np.ones(total, np.float32)
    if table.weighted:
        weights = load("weight")
    weights[size:] = 0
    offset = np.zeros((num_scores, total), np.float32)
    if table.num_offsets:
        offset = np.ascontiguousarray(load("offset").T)
    data = Data(
        codes=DenseCodes(put(np.zeros((0, total), np.uint8), axis=1)),
        targets=jax.tree.unflatten(table.structure, leaves),
        weights=put(weights, padding=np.zeros(1, np.float32)),
        offset=put(offset, axis=1),
    )
    return PaddedRows(data, size, table.blocks.num_features, spread)
