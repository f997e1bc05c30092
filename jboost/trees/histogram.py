# SPDX-License-Identifier: Apache-2.0
"""Sums of integer channels per node, feature and bin.

In: codes by feature [F, N], integer channels per row [N, C] (gradient, curvature,
and where needed a count), the node of each row. Out: int32 [M, F, B, C].

Sums of integers do not depend on their order, so every kernel on every number of
threads gives the same bits, and a sibling's histogram is exactly the parent's minus
the child's. ``quantize`` makes the integers: a power of two times the float, chosen
per tree so that no sum over rows can leave 31 bits.
"""

from functools import partial

import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Int32

from jboost.codes.codes import Codes, SparseCodes, count_rows
from jboost.entry.decorators import traceable
from jboost.kernels import grow_cpu, sparse_xla, xla
from jboost.kernels.library import choose, takes_implementation


@traceable
@takes_implementation
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
    cpu = partial(grow_cpu.histogram, num_nodes=num_nodes, num_bins=num_bins)
    build = choose(cpu=cpu, xla=_define(columns, num_nodes, num_bins))
    return build(*_operands(columns), channels, node)


def build_in_xla(
    columns: Codes,
    channels: Int32[Array, "N C"],
    node: Int32[Array, " N"],
    *,
    num_nodes: int,
    num_bins: int,
) -> Int32[Array, "M F B C"]:
    """:func:`build_histogram` in plain XLA: the definition."""
    _check_rows(columns, channels, node)
    build = _define(columns, num_nodes, num_bins)
    return build(*_operands(columns), channels, node)


def _define(columns, num_nodes, num_bins):
    sparse = isinstance(columns, SparseCodes)
    define = sparse_xla.histogram if sparse else xla.histogram
    return sequential_vmap(partial(define, num_nodes=num_nodes, num_bins=num_bins))


def _operands(columns):
    return columns.arrays if isinstance(columns, SparseCodes) else (columns,)


def build_child_histogram(
    columns: Codes,
    channels: Int32[Array, "N C"],
    node: Int32[Array, " N"],
    *,
    num_nodes: int,
    num_bins: int,
) -> Int32[Array, "M F B C"]:
    """As :func:`build_in_xla`, where at most N // 2 rows have a node.

    That holds for the smaller children of a level: they are gathered first, which
    halves the work. (Of sparse codes every stored entry is looked at.)
    """
    if isinstance(columns, SparseCodes):
        sizes = dict(num_nodes=num_nodes, num_bins=num_bins)
        return build_in_xla(columns, channels, node, **sizes)
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


def _check_rows(columns, channels, node):
    if not count_rows(columns) == channels.shape[0] == node.shape[0]:
        raise ValueError(
            f"{columns.shape=}, {channels.shape=} and {node.shape=} differ in N"
        )
