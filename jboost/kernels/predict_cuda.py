# SPDX-License-Identifier: Apache-2.0
"""Prediction as CUDA kernels: see cuda/predict.cu.

In: values by column, with categories as codes; trees on raw thresholds. Out: scores,
scores by round, leaves; the same to the bit as those of plain XLA.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jboost.kernels.cuda_launch import SHARED_BYTES, Launch, launch
from jboost.kernels.predict_cpu import Trees

_THREADS = 128
_SPREAD = 1024  # blocks that leaf_indices makes of few rows and many trees
_MISSING_LEFT = 30  # bit of a node's word


def predict(
    columns: Float[Array, "F N"],
    trees: Trees,
    leaf_value: Float[Array, "R K L"],
    init_score: Float[Array, " K"],
    *,
    max_depth: int,
    staged: bool,
) -> Float[Array, "N K"] | Float[Array, "R N K"]:
    """Computes the score of each row, or if ``staged`` the scores after each round."""
    num_features, num_rows = columns.shape
    rounds, num_scores, num_leaves = leaf_value.shape
    num_trees = trees.feature.shape[1]
    shape = (rounds, num_rows, num_scores) if staged else (num_rows, num_scores)
    tile = num_features * _THREADS * 4
    shared = tile <= SHARED_BYTES
    operands, numbers = _read_trees(trees, max_depth)
    num_nodes, *others = numbers
    run = Launch(
        "predict",
        (jax.ShapeDtypeStruct(shape, jnp.float32),),
        (-(-num_rows // _THREADS), num_scores if num_trees == num_scores else 1),
        (
            *(num_rows, num_features, rounds, num_trees, num_scores),
            *(num_nodes, num_leaves, *others, shared, staged),
        ),
        tile if shared else 0,
        _THREADS,
    )
    return launch(run, columns, *operands, leaf_value, init_score)


def leaf_indices(
    columns: Float[Array, "F N"], trees: Trees, *, max_depth: int
) -> Int32[Array, "N R S"]:
    """Finds the leaf of each row in each tree."""
    num_rows = columns.shape[1]
    rounds, num_trees = trees.feature.shape[:2]
    operands, numbers = _read_trees(trees, max_depth)
    blocks = -(-num_rows // _THREADS)
    every = rounds * num_trees
    run = Launch(
        "find_leaves",
        (jax.ShapeDtypeStruct((num_rows, rounds, num_trees), jnp.int32),),
        (blocks, max(1, min(every, _SPREAD // max(1, blocks)))),
        (num_rows, every, *numbers),
        threads=_THREADS,
    )
    return launch(run, columns, *operands)


def _read_trees(trees, max_depth):
    """Returns the trees as the kernels take them, and their sizes."""
    word = trees.feature | (trees.missing_left.astype(jnp.int32) << _MISSING_LEFT)
    threshold = jax.lax.bitcast_convert_type(trees.threshold, jnp.int32)
    nodes = jnp.stack([word, threshold], axis=-1)
    sets, left_child = trees.left_codes, trees.left_child
    words = 0 if sets is None else sets.shape[-1]
    linked = left_child is not None
    sets = jnp.zeros(1, jnp.uint32) if sets is None else sets
    left_child = jnp.zeros(1, jnp.int32) if left_child is None else left_child
    sizes = (trees.feature.shape[2], words, max_depth, int(linked))
    return (nodes, sets, left_child), sizes
