# SPDX-License-Identifier: Apache-2.0
"""Categorical splits and linked trees: kernels, XLA and a naive walk agree."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import needs_cpu_kernels
from test_predict_kernels import (
    OPERATIONS,
    REFUSALS,
    assert_same_bits,
    assert_walks,
    make_model,
    make_rows,
)

import jboost as jb
from jboost.model.ensemble import Links
from jboost.tables.categories import Categories

LARGEST = np.finfo(np.float32).max


def make_categories(places, num_values, num_codes, seed=2):
    """Codes of some values, in disorder; others were not seen."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(1, num_codes + 1, (len(places), num_values))
    codes = np.where(generator.random(codes.shape) < 0.2, 0, codes)
    codes[:, 0] = num_codes
    return Categories(jnp.asarray(codes.astype(np.int32)), tuple(places))


def add_sets(model, places, num_values=40, num_codes=40, seed=3):
    """The nodes on these features get sets of codes, most of them."""
    generator = np.random.default_rng(seed)
    num_words = num_codes // 32 + 1
    shape = (*model.feature.shape, num_words)
    sets = generator.integers(0, 2**32, shape, dtype=np.uint32)
    split = np.isin(model.feature, places) & np.asarray(model.is_split)
    split &= generator.random(split.shape) < 0.9
    return replace(
        model,
        threshold=jnp.where(split, jnp.nan, model.threshold),
        left_codes=jnp.asarray(sets),
        categories=make_categories(places, num_values, num_codes),
    )


def add_values(x, places, num_values=40, seed=4):
    """Columns of categories: values in range and beyond, and missing ones."""
    generator = np.random.default_rng(seed)
    shape = (len(x), len(places))
    values = generator.integers(0, num_values + 3, shape).astype(np.float32)
    odd = generator.choice(np.float32([-0.0, 3e9, LARGEST, np.nan]), shape)
    x = x.copy()
    x[:, places] = np.where(generator.random(shape) < 0.2, odd, values)
    return x


def link(model):
    """The same trees, linked, their leaves at differing depths."""
    generator = np.random.default_rng(5)
    num_rounds, num_scores, num_inner = model.feature.shape
    size = 2 * num_inner + 1
    places = np.ndindex(num_rounds, num_scores)
    left = np.zeros((num_rounds, num_scores, size), np.int32)
    node = np.zeros_like(left)  # of the heap
    for at in places:
        left[at] = np.arange(size)
        used, queue = 1, [0]
        while queue:
            place = queue.pop(generator.integers(len(queue)))
            heap = node[at][place]
            if heap >= num_inner or (heap > 2 and generator.random() < 0.3):
                continue
            left[at][place] = used
            node[at][used : used + 2] = 2 * heap + 1, 2 * heap + 2
            queue += [used, used + 1]
            used += 2
    split = left != np.arange(size)

    def pick(array, at_leaf):
        inner = np.where(split, node, 0).reshape(*left.shape, *(1,) * (array.ndim - 3))
        picked = np.take_along_axis(np.asarray(array), inner, axis=2)
        kept = split.reshape(inner.shape)
        return jnp.asarray(np.where(kept, picked, at_leaf).astype(array.dtype))

    codes = model.left_codes
    values = generator.normal(size=left.shape).astype(np.float32)
    return replace(
        model,
        feature=pick(model.feature, 0),
        threshold=pick(model.threshold, np.inf),
        missing_left=pick(model.missing_left, True),
        left_codes=None if codes is None else pick(codes, 0),
        leaf_value=jnp.asarray(values),
        links=Links(jnp.asarray(left), model.max_depth),
    )


@pytest.mark.parametrize(("linked", "num_codes"), [(False, 300), (True, 40)])
def test_the_definition(linked, num_codes):
    places = [1, 3, 4]
    model = add_sets(make_model(4, 3, 5, num_scores=2), places, num_codes=num_codes)
    model = link(model) if linked else model
    assert_walks(model, add_values(make_rows(150, 5), places), "xla")


@needs_cpu_kernels
@pytest.mark.parametrize(
    "num_rows, num_features, num_rounds, max_depth, num_scores, num_codes",
    [
        (1, 2, 3, 2, 2, 4),
        (1000, 3, 5, 2, 2, 31),
        (700, 40, 6, 4, 2, 32),
        (2000, 8, 10, 6, 2, 255),  # all codes of a byte
        (2000, 8, 4, 6, 2, 256),  # one more
        (3000, 4, 3, 8, 2, 1000),
        (9000, 4, 2, 10, 2, 60),  # more sets than are marked
    ],
)
def test_heaps(num_rows, num_features, num_rounds, max_depth, num_scores, num_codes):
    places = list(range(0, num_features, 2))
    model = make_model(num_rounds, max_depth, num_features, num_scores)
    model = add_sets(model, places, num_codes=num_codes)
    assert_walks(model, add_values(make_rows(num_rows, num_features), places), "cpu")


@needs_cpu_kernels
@pytest.mark.parametrize("sets", [False, True])
@pytest.mark.parametrize(
    "num_rows, num_features, num_rounds, max_depth, num_scores",
    [(1, 2, 3, 2, 2), (77, 40, 6, 4, 2), (1000, 3, 5, 3, 2), (6000, 5, 2, 11, 2)],
)
def test_linked_trees(num_rows, num_features, num_rounds, max_depth, num_scores, sets):
    places = list(range(0, num_features, 2))
    model = make_model(num_rounds, max_depth, num_features, num_scores)
    model = link(add_sets(model, places) if sets else model)
    x = make_rows(num_rows, num_features)
    x = add_values(x, places) if sets else x
    assert_walks(model, x, "cpu")


@needs_cpu_kernels
@pytest.mark.parametrize("linked", [False, True])
def test_memory_that_is_not_copied(linked):
    model = add_sets(make_model(3, 4, 6, 2), [0, 5])
    model = link(model) if linked else model
    x = add_values(make_rows(50_000, 6), [0, 5])
    before = x.copy()
    for kind in (x, np.asfortranarray(x)):
        assert_walks(model, kind, None)
    np.testing.assert_array_equal(x, before)


@needs_cpu_kernels
def test_a_categorical_column_that_is_compared():
    """Numeric thresholds look at codes."""
    model = make_model(5, 3, 3, 2)
    model = replace(model, categories=make_categories([0, 2], 10, 7))
    assert_walks(model, add_values(make_rows(500, 3), [0, 2], 10), None)


@needs_cpu_kernels
@pytest.mark.parametrize("linked", [False, True])
def test_derivatives_and_batches(linked):
    model = add_sets(make_model(3, 3, 5), [0, 2])
    model = link(model) if linked else model
    x = add_values(make_rows(200, 5), [0, 2])

    def total(value, implementation):
        changed = replace(model, leaf_value=value)
        return jnp.sum(jb.predict(changed, x, implementation=implementation) ** 2)

    slope = jax.jit(jax.grad(total), static_argnums=1)
    expected = slope(model.leaf_value, "xla")
    assert_same_bits(slope(model.leaf_value, "cpu"), expected)
    pages = jnp.asarray(x.reshape(4, 50, 5))
    for operation in OPERATIONS if linked else OPERATIONS[:1]:
        bare = jnp.stack([operation(model, page) for page in pages])
        mapped = jax.jit(jax.vmap(operation, (None, 0)))
        assert_same_bits(mapped(model, pages), bare)


@needs_cpu_kernels
def test_links_beyond_the_tree_are_refused():
    model, x = link(make_model(3, 3, 4)), make_rows(50, 4)
    for child in (-1, model.feature.shape[2] - 1, 2**30):
        left_child = model.links.left_child.at[1, 0, 0].set(child)
        bad = replace(model, links=Links(left_child, 3))
        with pytest.raises(REFUSALS, match="must be nodes"):
            jb.predict(bad, x).block_until_ready()
