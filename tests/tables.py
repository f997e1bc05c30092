# SPDX-License-Identifier: Apache-2.0
"""Small tables that several test files share, and with them compiled programs.

A new shape compiles for seconds, so that tests use these 200 rows and three columns
(with more than 127 distinct values each, hence 256 codes) and trees of depth 3.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jboost as jb

ROWS = 200
SMALL = dict(num_rounds=8, max_depth=3)
FULL: dict[str, Any] = dict(subsample=1.0, rows_per_threshold=0)  # nothing is drawn


def make_columns(seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, 3)).astype(np.float32)


def draw(*shape):
    """Multiples of 1/16 in [-8, 8), from raw bits: the same for every NumPy version."""
    bits = np.random.PCG64(sum(shape)).random_raw(int(np.prod(shape)))
    return ((bits >> np.uint64(56)).astype(np.float32) / 16 - 8).reshape(shape)


def make_regression(seed=0, noise=0.3):
    """Columns and targets: a step, a square, and noise."""
    x = make_columns(seed)
    error = np.random.default_rng(seed + 1).normal(size=ROWS)
    y = 2 * (x[:, 0] > 0) + x[:, 1] ** 2 + noise * error
    return x, y.astype(np.float32)


class Classes:
    """Classes as a distribution, for losses.likelihood."""

    def __init__(self, score):
        self.logits = jax.nn.log_softmax(score)

    def log_prob(self, value):
        return self.logits[jnp.asarray(value, jnp.int32)]

    def sample(self, key, sample_shape=()):
        drawn = jax.random.categorical(key, self.logits, shape=sample_shape)
        return jnp.asarray(drawn, jnp.float32)


def squared_distance(scores, target):
    """Of several scores; a loss whose programs are small."""
    return jnp.sum(jnp.square(scores - target))


def find_spread(scores, targets, weights):
    return jnp.sum(weights * jnp.abs(targets - scores)) / jnp.sum(weights)


def huber_in_spreads(score, target, delta):
    return jb.losses.huber(score, target, delta=delta)


def make_steps():
    """Rows with few values, so that each part of them has the same thresholds."""
    x, y = make_regression()
    return np.clip(np.round(2 * x), -2, 2).astype(np.float32), y


def make_runs():
    """Arguments of ``fit`` by name, for whole runs: all that a run can remember.

    Rows and columns are sampled, the rate falls, scores have metrics, validation sets
    and offsets.
    """
    x, y = make_regression()
    several, offset = np.stack([y, -x[:, 0]], 1), 0.1 * x
    spread_huber = jb.losses.adaptive(huber_in_spreads, find_spread, report="first")
    losses: dict[str, Any] = {
        "one": (y, jb.losses.squared_error, offset[:, 0]),
        "several": (several, squared_distance, offset[:, :2]),
        "adaptive": (y, spread_huber, offset[:, 0]),
    }
    runs = {
        name: dict(
            x=x, y=y, loss=loss, offset=offset,
            validation=(x[:50], y[:50], None, offset[:50]),
            metrics={"far": lambda scores, targets, weights: jnp.max(scores)},
            learning_rate=lambda number: 0.5 / (1 + number),
            subsample=0.7, leaf_rows="sample", colsample_bytree=0.7, seed=3,
            max_depth=3,
            num_scores=np.ndim(y),
        )
        for name, (y, loss, offset) in losses.items()
    }  # fmt: skip
    sets = np.c_[x[:, :2], np.round(3 * np.abs(x[:, 2]))].astype(np.float32)
    parts = (sets[:50], *runs["one"]["validation"][1:])
    more = dict(x=sets, validation=parts, categorical=[2])
    return {**runs, "categories": {**runs["one"], **more}}


def mean_loss(loss, scores, targets, weights=None):
    """The weighted mean of a loss, evaluated row by row."""
    values = np.array(
        [
            float(loss(jnp.float32(s), jnp.asarray(t)))
            for s, t in zip(np.asarray(scores), np.asarray(targets), strict=True)
        ]
    )
    return float(np.average(values, weights=weights))


def same_histories(one, other):
    """Asserts that two histories are equal to the bit."""
    one, other = ({**vars(history)} for history in (one, other))
    assert one.pop("choices") == other.pop("choices")
    assert one.pop("best_round") == other.pop("best_round")
    same_bits(one, other)


def same_bits(one, other):
    """Asserts that two pytrees are built alike, their arrays equal to the bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()
