# SPDX-License-Identifier: Apache-2.0
"""Refuses training that cannot fit into memory, before work starts.

Only arrays that are certainly needed count: codes, scores, derivatives, two histograms
and the model. This is less than docs/performance.md states: no training that would work
is refused.
"""

from typing import Any

import numpy as np

from jboost.boosting.settings import Settings
from jboost.entry.context import runs_on_cpu
from jboost.entry.memory import require_memory
from jboost.kernels.binning_cpu import packed_shape
from jboost.kernels.library import may_run

_MOST_CELLS = 2**31


def refuse_large_table(x: Any, settings: Settings, num_devices: int = 1) -> None:
    """Refuses a matrix or frame, no other table, if codes and scores cannot fit."""
    shape = getattr(x, "shape", None)
    is_sparse = hasattr(x, "nnz") or hasattr(x, "nse")  # SciPy, JAX
    if not isinstance(shape, tuple) or len(shape) != 2 or is_sparse:
        return
    if not all(isinstance(size, int | np.integer) for size in shape):
        return
    num_rows, num_features = map(int, shape)
    check_cells(-(-num_rows // num_devices) * num_features)
    if not runs_on_cpu():
        return
    blocks, _, width = packed_shape(max(1, num_features), 1)
    codes = num_rows * (num_features + blocks * width * may_run())
    # Scores, gradients and curvatures.
    scores = 12 * num_rows * settings.num_scores
    require_memory(
        codes + scores,
        f"training on {num_rows:,} rows x {num_features:,} columns with num_scores="
        f"{settings.num_scores:,}",
        "give x fewer rows or columns, or train from jb.stream(x, memory=...), which "
        "keeps the codes on disk",
    )


def check_cells(size: int) -> None:
    """Refuses a table too large for 32-bit indices."""
    if size >= _MOST_CELLS:
        raise ValueError(
            "x must have fewer than 2^31 cells (rows, padded, times columns) on a "
            f"device, got {size}"
        )


def refuse_large_model(
    settings: Settings, num_models: int = 1, *, may_stop: bool = False
) -> None:
    """Refuses a model, or the models that are trained together, if they cannot fit.

    If training may end before ``num_rounds``, one round counts.
    """
    if not runs_on_cpu():
        return
    depth, num_scores = settings.max_depth, settings.num_scores
    num_rounds = min(settings.num_rounds, 1) if may_stop else settings.num_rounds
    # A node has 9 bytes, and a leaf 16 for each score.
    model = num_rounds * (9 + 16 * num_scores) * 2**depth
    pairs = 4 * num_scores**2 if num_scores > 1 else 0
    require_memory(
        num_models * model,
        f"a model of num_rounds={settings.num_rounds:,}, max_depth={depth} and "
        f"num_scores={num_scores:,}" + f", {num_models:,} times" * (num_models > 1),
        "use fewer rounds, a smaller max_depth or fewer scores",
    )
    require_memory(
        pairs,
        f"a matrix of second derivatives of num_scores={num_scores:,} scores",
        "use fewer scores",
    )


def refuse_large_histograms(method: Any, num_features: int, *, plain: bool) -> None:
    """Refuses histograms that cannot fit; plain XLA writes all nodes of a level."""
    if method.sorts_rows or not runs_on_cpu():
        return
    nodes = min(method.max_nodes, method.max_leaves or method.max_nodes)
    node = (2 if method.uniform else 3) * num_features * method.num_bins * 4
    require_memory(
        node * (nodes if plain else min(2, nodes)),
        f"the histograms of a level of {nodes:,} nodes x {num_features:,} columns x "
        f"{method.num_bins:,} bins",
        "use a smaller max_bins, max_depth or max_leaves, or a larger "
        "min_child_samples",
        reserved=node * nodes,
    )
