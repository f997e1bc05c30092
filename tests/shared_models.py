# SPDX-License-Identifier: Apache-2.0
"""Models whose scores share one tree per round, and the same models without sharing."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import jboost as jb
from jboost.model.ensemble import Links
from jboost.trees.tree import LeafSums

KINDS = ("shallow", "deep", "categories", "absent", "linked")
STRUCTURE = ("feature", "threshold", "missing_left", "left_codes", "links")


def share(model, num_scores=3, seed=0):
    """Gives the trees of a model of one score random leaves for several scores."""
    random = np.random.default_rng(seed)
    num_rounds, _, num_leaves = model.leaf_value.shape
    shape = (num_rounds, num_scores, num_leaves)

    def draw(shape):
        return jnp.asarray(random.normal(size=shape).astype(np.float32))

    sums = None
    if model.sums is not None:
        weight = jnp.broadcast_to(model.sums.weight, shape)
        sums = LeafSums(
            gradient=draw(shape) * weight,
            curvature=jnp.exp(draw(shape)) * weight,
            weight=weight,
            l2=jnp.ones(shape[:2], jnp.float32),
        )
    return replace(
        model, leaf_value=draw(shape), init_score=draw(num_scores), sums=sums
    )


def expand(model):
    """Gives each score a tree of its own with the same structure."""
    parts = {name: getattr(model, name) for name in STRUCTURE}
    repeat = lambda array: jnp.repeat(array, model.num_scores, axis=1)  # noqa: E731
    parts = jax.tree.map(repeat, parts)
    if model.slopes is not None:
        feature = repeat(model.slopes.feature)
        parts["slopes"] = model.slopes._replace(feature=feature)
    return replace(model, **parts)


def link(model):
    """Returns the trees of a heap as linked ones; each node keeps its index."""
    num_nodes = model.feature.shape[2]
    node = np.arange(2 * num_nodes + 1, dtype=np.int32)
    left_child = np.where(node < num_nodes, 2 * node + 1, node)
    above, below = [*[(0, 0)] * 2, (0, num_nodes + 1)], [*[(0, 0)] * 2, (num_nodes, 0)]
    change = lambda array: jnp.pad(array, below)  # noqa: E731
    gradient, curvature, weight, l2 = model.sums
    return replace(
        model,
        feature=jnp.pad(model.feature, above),
        threshold=jnp.pad(model.threshold, above, constant_values=jnp.inf),
        missing_left=jnp.pad(model.missing_left, above, constant_values=True),
        leaf_value=change(model.leaf_value),
        sums=LeafSums(change(gradient), change(curvature), change(weight), l2),
        links=Links(
            jnp.broadcast_to(left_child, (model.num_rounds, 1, node.size)),
            model.max_depth,
        ),
    )


def make_rows(num_rows=400, seed=1):
    """Five columns: the last holds categories; some values are missing."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(num_rows, 5)).astype(np.float32)
    x[:, 4] = random.integers(0, 12, num_rows)
    x[random.random(x.shape) < 0.1] = np.nan
    return x


@cache
def make_model(kind, num_scores=3):
    """Returns a model whose scores share trees, with missing values and more."""
    x = make_rows()
    y = np.nan_to_num(x[:, 0] * x[:, 1] + np.sin(x[:, 4]))
    options = dict(linear_leaves=False)
    if kind == "categories":
        options["categorical"] = [4]
    if kind == "absent":
        options["absent"] = "zero"
    depth = 8 if kind == "deep" else 4
    model, _ = jb.fit(x, y, num_rounds=6, max_depth=depth, **options)
    model = link(model) if kind == "linked" else model
    return share(model, num_scores)
