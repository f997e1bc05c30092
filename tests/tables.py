# SPDX-License-Identifier: Apache-2.0
"""Small tables that several test files share, and with them compiled programs.

A new shape compiles for seconds, so that tests use these 200 rows and three columns
(with more than 127 distinct values each, hence 256 codes) and trees of depth 3.
"""

import jax.numpy as jnp
import numpy as np

ROWS = 200
SMALL = dict(num_rounds=8, max_depth=3)


def make_columns(seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, 3)).astype(np.float32)


def make_regression(seed=0, noise=0.3):
    """Columns and targets: a step, a square, and noise."""
    x = make_columns(seed)
    error = np.random.default_rng(seed + 1).normal(size=ROWS)
    y = 2 * (x[:, 0] > 0) + x[:, 1] ** 2 + noise * error
    return x, y.astype(np.float32)


def squared_distance(scores, target):
    """Of several scores; a loss whose programs are small."""
    return jnp.sum(jnp.square(scores - target))


def mean_loss(loss, scores, targets, weights=None):
    """The weighted mean of a loss, evaluated row by row."""
    values = np.array(
        [
            float(loss(jnp.float32(s), jnp.asarray(t)))
            for s, t in zip(np.asarray(scores), np.asarray(targets), strict=True)
        ]
    )
    return float(np.average(values, weights=weights))
