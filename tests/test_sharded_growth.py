# SPDX-License-Identifier: Apache-2.0
"""Trees grown by the CPU kernels on shards of rows are those of one device."""

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jboost.codes.codes import DenseCodes
from jboost.entry.collectives import Shards, use_shards
from jboost.entry.context import use_implementation
from jboost.kernels import calls, levels_cpu
from jboost.trees.category_splits import CategoryLimits
from jboost.trees.grow import grow_levels
from jboost.trees.limits import TreeLimits
from jboost.trees.splitting import ValueLimits

NUM_SHARDS = 4


def limit(num_features, **others):
    """Bounds and signs of leaf values, groups of features, or categories."""
    signs = jnp.arange(num_features, dtype=jnp.int32) % 3 - 1
    bounds = jnp.array([-0.4, 0.4], jnp.float32)
    group = jnp.arange(num_features) % 3
    parts = dict(
        values=ValueLimits(jnp.float32(3.0), bounds, signs),
        groups=jnp.stack([group != each for each in range(3)]),
        categories=CategoryLimits(
            jnp.array([0, 3], jnp.int32), jnp.array([20, 3], jnp.int32), jnp.int32(4)
        ),
    )  # fmt: skip
    wanted = {name: parts[name] for name, use in others.items() if use is True}
    return TreeLimits(**{**others, **wanted})


PLAIN = dict(features=7, bins=64, depth=4, limits={})
# Gradients of few rows are rounded to nearest, of many stochastically.
EVEN, EMPTY = (5000, 5000, 5000, 3001), (17_000, 20_000, 0, 1)
CASES = {
    "few rows": PLAIN | dict(sizes=(1, 0, 0, 0), depth=2),
    "uniform, whole weights": PLAIN | dict(sizes=EMPTY, uniform=True, most_times=3),
    "bag, whole weights, samples": PLAIN
    | dict(
        sizes=EVEN, bag=0.6, most_times=255, missing=0.2,
        limits=dict(min_child_samples=30, colsample_bynode=0.6),
    ),
    "leaves, wide codes": PLAIN
    | dict(sizes=EVEN, bins=700, max_leaves=13, depth=5, missing=0.1),
    "deep, many features, hardly any in the bag": PLAIN
    | dict(
        sizes=(900, 900, 900, 20), features=70, bins=32, depth=8, bag=0.1, missing=0.2
    ),
    "constrained categories": PLAIN
    | dict(
        sizes=EMPTY, bag=0.9, missing=0.1, max_leaves=12,
        limits=dict(values=True, groups=True, categories=True),
    ),
}  # fmt: skip


def make_rows(case):
    count, bins = sum(case["sizes"]), case["bins"]
    rng = np.random.default_rng(count)
    columns = rng.integers(1, bins, (case["features"], count))
    columns[0], columns[3] = columns[0] % 20 + 1, columns[3] % 3 + 1
    columns[rng.random(columns.shape) < case.get("missing", 0.0)] = 0
    gradient = rng.normal(size=count) + np.sin(columns[0]) + columns[1] / bins
    curvature = np.ones(count) if case.get("uniform") else rng.random(count)
    in_bag = rng.random(count) < case.get("bag", 1.0)
    in_bag[0] = True
    times = rng.integers(1, case.get("most_times", 1), count, np.uint8, endpoint=True)
    numbers = gradient.astype(np.float32), curvature.astype(np.float32)
    return (
        columns.astype(np.uint8 if bins <= 256 else np.uint16),
        *numbers,
        in_bag * times,
    )


def pad(array, sizes):
    """Shards of equal length; the padding repeats nothing and is in no bag."""
    longest, parts = max(sizes), np.split(array, np.cumsum(sizes)[:-1], axis=-1)
    lead = [(0, 0)] * (array.ndim - 1)
    return np.concatenate(
        [np.pad(part, [*lead, (0, longest - part.shape[-1])]) for part in parts],
        axis=-1,
    )


@pytest.mark.skipif(not calls.available(), reason="the kernels were not built")
@pytest.mark.parametrize("name", CASES)
def test_shards_grow_the_tree_of_one_device(name):
    case = CASES[name]
    sizes, rows = case["sizes"], make_rows(case)
    limits = limit(case["features"], **case["limits"])
    words = jnp.array([3, 5], jnp.uint32)

    def grow(columns, gradient, curvature, in_bag):
        return grow_levels(
            DenseCodes(columns), gradient, curvature, in_bag, words, limits,
            max_depth=case["depth"], num_bins=case["bins"],
            max_leaves=case.get("max_leaves"), uniform=case.get("uniform", False),
        )  # fmt: skip

    def grow_part(*rows):
        with use_shards(Shards(("rows",), sizes, sum(sizes))):
            tree, leaf = grow(*rows)
        return jax.tree.map(lambda array: array[None], tree), leaf

    row, kinds = P("rows"), (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh(
        (NUM_SHARDS,), ("rows",), axis_types=kinds, devices=jax.devices()[:NUM_SHARDS]
    )
    sharded = jax.shard_map(
        grow_part, mesh=mesh, in_specs=(P(None, "rows"), row, row, row),
        out_specs=row, check_vma=False,
    )  # fmt: skip
    with use_implementation("cpu"):
        tree, leaf = jax.jit(grow)(*map(jnp.asarray, rows))
        trees, leaves = jax.jit(sharded)(*(pad(array, sizes) for array in rows))
    for shard in range(NUM_SHARDS):
        chex.assert_trees_all_equal(jax.tree.map(lambda a, i=shard: a[i], trees), tree)
    leaves = np.asarray(leaves).reshape(NUM_SHARDS, -1)
    leaves = [own[:size] for own, size in zip(leaves, sizes, strict=True)]
    np.testing.assert_array_equal(np.concatenate(leaves), leaf)
    # There was something to compare.
    assert name == "few rows" or len(np.unique(leaf)) > 5


@pytest.mark.skipif(not calls.available(), reason="the kernels were not built")
def test_each_level_exchanges_only_its_nodes():
    """One histogram for the root, then half of the nodes of each level."""
    counts = [levels_cpu.count_pairs(level, 16) for level in range(7)]
    assert counts == [1, 1, 2, 4, 8, 8, 8]
    sizes = dict(max_depth=6, num_bins=8)
    codes = DenseCodes(jnp.zeros((3, 10), jnp.uint8))
    rows = jnp.zeros(10), jnp.ones(10), jnp.ones(10, bool), jnp.zeros(2, jnp.uint32)
    mesh = jax.sharding.AbstractMesh((64,), ("rows",))
    grow = partial(grow_levels, **sizes)

    def grow_part(codes, *rows):
        with use_shards(Shards(("rows",), (10,) * 64, 640)), use_implementation("cpu"):
            return grow(codes, *rows, TreeLimits())

    split = jax.shard_map(
        grow_part, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    lowered = jax.jit(split).trace(codes, *rows).lower(lowering_platforms=("cpu",))
    text = lowered.as_text()
    assert "reduce_scatter" not in text  # sums of gloo's are wrong
    calls = re.findall(r"stablehlo.all_reduce.*?-> tensor<(.*?)>", text, re.S)
    exchanged = [
        int(call.split("x")[0]) for call in calls if call.endswith("x3x3x8xi32")
    ]
    # XLA may share the text of the root and of level 1, which have one node each.
    assert sorted({*exchanged}) == [1, 2, 4, 8, 16]
    assert len(exchanged) in (5, 6)
