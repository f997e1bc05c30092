# SPDX-License-Identifier: Apache-2.0
"""Models with random linear leaves, and their scores in NumPy."""

from dataclasses import replace

import jax
import numpy as np

import jboost as jb
from jboost.trees.tree import Slopes


def add_slopes(model, num_terms=2, seed=0, low=-1.5, high=1.5):
    """Gives each leaf up to ``num_terms`` random terms; some have none."""
    random = np.random.default_rng(seed)
    shape = (*model.leaf_value.shape, num_terms)
    place = (*model.feature.shape[:2], *shape[2:])
    feature = random.integers(-1, model.num_features, place, np.int32)
    slope, center = random.normal(size=(2, *shape)).astype(np.float32)
    ranges = np.tile(np.float32([low, high]), (model.num_features, 1))
    slopes = Slopes(feature, slope, center)
    return jax.device_put(replace(model, slopes=slopes, ranges=ranges))


def staged_scores(model, x):
    """Returns the scores after each round, [R, N] or [R, N, K], in float64."""
    leaf = np.asarray(jb.leaf_indices(model, x))
    leaf = leaf.reshape(len(x), model.num_rounds, -1)
    low, high = np.asarray(model.ranges).T
    x = np.clip(np.asarray(x, np.float64), low, high)
    rounds, scores = model.leaf_value.shape[:2]
    added = np.zeros((rounds, len(x), scores))
    for r, k in np.ndindex(rounds, scores):
        tree = min(k, model.feature.shape[1] - 1)
        own = leaf[:, r, tree]
        feature = np.asarray(model.slopes.feature)[r, tree][own]
        slope, center = (np.asarray(a)[r, k][own] for a in model.slopes[1:])
        values = np.take_along_axis(x, np.maximum(feature, 0), axis=1)
        terms = np.where(feature < 0, 0.0, slope * (values - center))
        lines = np.where(np.isnan(terms).any(axis=1), 0, terms.sum(axis=1))
        added[r, :, k] = np.asarray(model.leaf_value)[r, k][own] + lines
    found = np.asarray(model.init_score) + np.squeeze(
        np.cumsum(added, axis=0), axis=2 if scores == 1 else ()
    )
    return found
