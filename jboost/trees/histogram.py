# SPDX-License-Identifier: Apache-2.0
"""Sums of integer channels (gradient, curvature, count) per node, feature and bin.

Sums of integers do not depend on their order, so every kernel on every number of
threads gives the same bits, and a sibling's histogram is exactly the parent's minus
the child's. ``quantize`` makes the integers: a power of two times the float, chosen
per tree so that no sum over rows can leave 31 bits.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Int32

from jboost.codes.codes import Codes
from jboost.kernels import histogram_tpu, levels_cuda
from jboost.kernels.calls import call, ints
from jboost.kernels.library import choose


def sum_histogram(
    codes: Codes,
    channels: Int32[Array, "N C"],
    node: Int32[Array, " N"],
    *,
    num_nodes: int,
    num_bins: int,
) -> Int32[Array, "M F B C"]:
    """Sums ``channels`` over the rows of each (node, feature, code).

    histogram[m, f, b, c] = sum of channels[i, c] over rows i with node[i] = m and
    code b in feature f. Under ``vmap`` the batch is processed one by one.

    Of sparse codes only stored entries are summed: the sum of the others is the node's
    minus theirs. Rows with a node outside [0, num_nodes) are left out.
    """
    _check_rows(codes, channels, node)
    sizes = dict(num_nodes=num_nodes, num_bins=num_bins)

    def sum_natively(codes, channels, node):
        result = ints(num_nodes, codes.num_features, num_bins, channels.shape[1])
        codes, entries = codes.operands.codes, codes.operands.entries
        return call("histogram", result, codes, channels, node, entries)

    build = choose(cpu=sum_natively, xla=partial(sum_plain_histogram, **sizes))
    return build(codes, channels, node)


def sum_plain_histogram(
    codes: Codes,
    channels: Int32[Array, "N C"],
    node: Int32[Array, " N"],
    enabled: Bool[Array, ""] | bool = True,
    sizes: Int32[Array, " M"] | None = None,
    *,
    num_nodes: int,
    num_bins: int,
) -> Int32[Array, "M F B C"]:
    """Computes :func:`sum_histogram` in plain XLA, or by a kernel for GPUs or TPUs.

    Sums are 0 unless ``enabled``. ``sizes`` are the numbers of rows of the nodes, if
    they are known and no more than N // 2 in all, as those of smaller children.
    """
    _check_rows(codes, channels, node)
    shape: Any = dict(num_nodes=num_nodes, num_bins=num_bins)

    def build(codes, channels, node):
        run = codes.histogram if sizes is None else codes.child_histogram
        return run(channels, node, **shape)

    def sum_on_gpu(enabled, sizes, codes, channels, node):
        rows = (channels, node, enabled)
        if levels_cuda.takes_packed(codes.packed, **shape):
            width = codes.num_features
            return levels_cuda.packed_histogram(
                codes.packed, *rows, sizes, num_features=width, **shape
            )
        return levels_cuda.histogram(codes.columns, *rows, **shape)

    def sum_on_tpu(codes, channels, node):
        return histogram_tpu.histogram(codes.columns, channels, node, **shape)

    def skip(build, enabled, sizes, *rows):
        del sizes
        if always:
            return build(*rows)
        shape = jax.eval_shape(build, *rows)
        nothing = jnp.zeros(shape.shape, shape.dtype)
        return jax.lax.cond(enabled, build, lambda *_: nothing, *rows)

    always = enabled is True
    on_tpu = not codes.is_sparse and histogram_tpu.available()
    run = choose(
        xla=sequential_vmap(partial(skip, build)),
        cuda=sum_on_gpu if levels_cuda.takes(codes) else None,
        tpu=partial(skip, sum_on_tpu) if on_tpu else None,
    )
    return run(jnp.asarray(enabled), sizes, codes, channels, node)


def _check_rows(codes, channels, node):
    if not codes.num_rows == channels.shape[0] == node.shape[0]:
        raise ValueError(
            f"{codes.shape=}, {channels.shape=} and {node.shape=} differ in N"
        )
