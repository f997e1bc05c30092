# SPDX-License-Identifier: Apache-2.0
"""A least-squares tree by the CPU kernel of native/cart.cc.

The data are float64 and never on a device, so that the kernel is called directly
rather than by XLA.
"""

import ctypes
import os
from functools import cache
from typing import Any

import numpy as np
from jaxtyping import Float

from jboost.kernels.calls import find_address

_MOST = 2**32  # no limit on rows or levels is greater in effect


def grow(
    matrix: Float[np.ndarray, "N F"],
    targets: Float[np.ndarray, "K N"],
    weights: Float[np.ndarray, " N"] | None,
    *,
    max_depth: int,
    min_child_samples: int,
    min_split_samples: int,
    min_child_weight: float,
    min_gain: float,
) -> dict[str, np.ndarray]:
    """See :func:`jboost.cart.least_squares.grow`."""
    matrix, targets = np.ascontiguousarray(matrix), np.ascontiguousarray(targets)
    weights = None if weights is None else np.ascontiguousarray(weights)
    num_leaves = max(1, len(matrix) // min_child_samples)
    num_leaves = min(num_leaves, 2 ** min(max_depth, 62))
    nodes = _make_nodes(len(targets), 2 * num_leaves - 1)
    sizes = (*matrix.shape, len(targets))
    limits = (max_depth, min_child_samples, min_split_samples)
    limits = [min(limit, _MOST) for limit in limits]
    num_nodes = _find_kernel()(
        _words(matrix, targets, weights, *sizes),
        _words(*limits, np.float64(min_child_weight), np.float64(min_gain)),
        _words(*nodes.values(), nodes["left"].size),
        _count_threads(),
    )
    if num_nodes < 0:
        raise MemoryError(f"a tree of {len(matrix)} rows does not fit into memory")
    return {name: array[..., :num_nodes].copy() for name, array in nodes.items()}


def _words(*values):
    """Returns a struct of addresses (0 for None), integers and float64 numbers."""
    words = (ctypes.c_int64 * len(values))()
    for i, value in enumerate(values):
        if isinstance(value, np.float64):
            value = value.view(np.int64)
        elif isinstance(value, np.ndarray):
            value = value.ctypes.data
        words[i] = 0 if value is None else value
    return words


def _count_threads():
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not available on every system
        return os.cpu_count() or 1


def _make_nodes(num_targets, size) -> dict[str, Any]:
    return dict(
        left=np.empty(size, np.int32),
        feature=np.empty(size, np.int32),
        threshold=np.empty(size, np.float32),
        missing_left=np.empty(size, np.bool_),
        value=np.empty((num_targets, size)),
        gain=np.empty(size),
        squared_error=np.empty(size),
        weight=np.empty(size),
        num_rows=np.empty(size, np.int32),
    )


@cache
def _find_kernel():
    """Returns the C function; other threads of Python run while it does."""
    word = ctypes.c_int64
    arguments = [ctypes.POINTER(word)] * 3
    return ctypes.CFUNCTYPE(word, *arguments, word)(find_address("grow_cart"))
