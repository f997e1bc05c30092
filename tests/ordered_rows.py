# SPDX-License-Identifier: Apache-2.0
"""Sketches for test_ordered_sketch.py and for the processes of test_gathering.py."""

import numpy as np

from jboost.entry.exchanges import (
    use_processes,
)
from jboost.sketches.ordered import OrderedSketch

EPS, BLOCK, ROWS = 1 / 16, 784, 20_000  # blocks have 16 (3 / eps + 1) rows
OPTIONS = [(True, True), (False, False)]
ENDS = [  # of the rows of each process
    [9 * BLOCK, 9 * BLOCK, ROWS],
    [8 * BLOCK, 20 * BLOCK, ROWS],
    [BLOCK // 2, 5 * BLOCK + 1, ROWS],
    [0, ROWS - 1, ROWS],
    [200, 300, 900],
]


def make_rows(num_rows, seed=0):
    """Many and few values, missing ones, ones with ties; fractional weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, 5)).astype(np.float32)
    x[:, 1] = rng.integers(0, 380, num_rows)
    x[rng.random(num_rows) < 0.3, 2] = np.nan
    x[:, 3] = np.arange(num_rows) // 3
    x[:, 4] = np.nan
    return x, rng.choice([0, 1, 0.1, 2.5, 1e-9], num_rows) * rng.random(num_rows)


def sketch_rows(x, weight, sizes, first_row=0):
    """Sketches rows in batches of the given sizes, which are repeated."""
    sketch, start, number = OrderedSketch(x.shape[1], EPS, first_row), 0, 0
    while start < len(x):
        rows = slice(start, start + sizes[number % len(sizes)])
        sketch.add(x[rows], None if weight is None else weight[rows])
        start, number = rows.stop, number + 1
    return sketch


def find_bins(rank, divisions):
    """Sketches the share of this process; returns thresholds and a summary.

    With weights and missing values, and without. ``divisions`` holds for each process r
    the number of rows of processes 0, ..., r.
    """
    found = []
    for ends in divisions:
        x, weight = make_rows(ends[-1])
        part = slice(0 if rank == 0 else ends[rank - 1], ends[rank])
        for weighted, missing in OPTIONS:
            table = (x if missing else np.nan_to_num(x))[part]
            own = weight[part] if weighted else None
            with use_processes(len(ends) > 1):
                sketch = sketch_rows(table, own, [100 + 31 * rank, 2000], part.start)
                bins, summary = sketch.make_bins(64), sketch.summarize(0)
            found.append((np.asarray(bins.thresholds), bins.absent, *summary))
    return found
