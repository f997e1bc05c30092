# SPDX-License-Identifier: Apache-2.0
"""What test_ordered_sketch.py runs in each process."""

import numpy as np

from jboost.entry.exchanges import (
    use_processes,
)
from jboost.sketches.ordered import OrderedSketch

EPS = 1 / 16  # blocks of 784 rows


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


def find_bins(rank, divisions, options):
    """Sketches the share of this process; returns thresholds and a summary.

    Args:
      divisions: for each process r, the number of rows of processes 0, ..., r.
      options: whether there are weights, and whether values are missing, by case.
    """
    found = []
    for ends in divisions:
        x, weight = make_rows(ends[-1])
        part = slice(0 if rank == 0 else ends[rank - 1], ends[rank])
        for weighted, missing in options:
            table = (x if missing else np.nan_to_num(x))[part]
            own = weight[part] if weighted else None
            with use_processes(len(ends) > 1):
                sketch = sketch_rows(table, own, [100 + 31 * rank, 2000], part.start)
                bins, summary = sketch.make_bins(64), sketch.summarize(0)
            found.append((np.asarray(bins.thresholds), bins.absent, *summary))
    return found
