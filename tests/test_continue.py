# SPDX-License-Identifier: Apache-2.0
"""Training from a model: m rounds and then n are m + n rounds."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_leaves import add_slopes, staged_scores
from shared_models import expand, share
from tables import SMALL, make_regression, make_runs, same_bits

import jboost as jb
from jboost.model.ensemble import Links
from jboost.tables.categories import Categories
from jboost.training.record import _link, append_rounds

X, Y = make_regression()
LATER = make_regression(seed=5)
RUNS = make_runs()


@pytest.mark.parametrize("name", ["categories", "several", "adaptive"])
def test_rounds_in_two_parts_are_the_rounds(name):
    """With their histories; test_routes.py has other losses and tables."""
    whole, history = jb.fit(**RUNS[name], num_rounds=8)
    first, _ = jb.fit(**RUNS[name], num_rounds=5)
    both, later = jb.fit(**RUNS[name], num_rounds=3, model=first)
    same_bits(both, whole)
    np.testing.assert_array_equal(later.train_loss, history.train_loss[5:])
    np.testing.assert_array_equal(later.validation_loss, history.validation_loss[5:])
    np.testing.assert_array_equal(later.oob_improvement, history.oob_improvement[5:])
    assert later.best_round == np.argmin(history.validation_loss[5:])
    same_bits(later.parameters, history.parameters)


def test_plain_xla_keeps_every_bit():
    """Without kernels, too: in two parts, beside them, and in scores that are sums."""
    run = dict(x=X, y=Y, max_depth=2, implementation="xla")
    whole, _ = jb.fit(**run, num_rounds=8)
    first, _ = jb.fit(**run, num_rounds=5)
    same_bits(jb.fit(**run, num_rounds=3, model=first)[0], whole)
    same_bits(jb.fit(**{**run, "implementation": None}, num_rounds=8)[0], whole)


def test_codes_of_the_model_must_fit_the_bins():
    x = np.arange(120.0)[:, None] % 40
    model, _ = jb.fit(x, x[:, 0] % 7, categorical=[0], num_rounds=1)
    with pytest.raises(ValueError, match="max_bins must be at least 3 "):
        jb.fit(x, x[:, 0], categorical=[0], num_rounds=1, model=model, max_bins=2)
    with pytest.warns(UserWarning, match="no tree of 1 round has a split"):
        jb.fit(
            x,
            x[:, 0],
            categorical=[0],
            num_rounds=1,
            model=model,
            max_bins=3,
            rows_per_threshold=0,
        )


def test_a_model_of_no_rounds_is_a_start():
    none, _ = jb.fit(X, Y, num_rounds=0, max_depth=3)
    one, _ = jb.fit(X, Y, model=none, **SMALL)
    same_bits(one, jb.fit(X, Y, **SMALL)[0])


def test_new_rounds_fit_what_the_model_leaves_on_other_data():
    model, _ = jb.fit(X, Y, **SMALL)
    x, y = LATER
    both, history = jb.fit(x, y, model=model, **SMALL)
    assert both.num_rounds == 16
    same_bits(jb.truncate(both, 8), model)
    stages = np.asarray(jb.staged_predict(both, x))
    losses = np.mean(np.square(stages - y), axis=1)
    np.testing.assert_allclose(history.train_loss, losses[8:], rtol=1e-5)
    assert losses[15] < losses[7]


def test_early_stopping_callbacks_and_errors_count_the_new_rounds():
    x, _ = LATER
    model, _ = jb.fit(X, Y, **SMALL)
    seen = []

    def watch(number, history, model):
        seen.append((number, len(history.train_loss), model.num_rounds))

    noise = np.random.default_rng(0).normal(size=len(Y)).astype(np.float32)
    call = dict(model=model, early_stopping_rounds=2, callbacks=watch)
    both, history = jb.fit(x, noise, validation=(X, Y), **call, **SMALL)
    assert seen == [(n, n + 1, n + 9) for n in range(len(seen))]
    assert len(seen) == history.best_round + 3
    assert both.num_rounds == 8 + history.best_round + 1


def grown(depth, rounds=2, seed=0, score=0.5):
    random = np.random.default_rng(seed)
    shape, leaves = (rounds, 1, 2**depth - 1), (rounds, 1, 2**depth)
    unsplit = random.random(shape) < 0.3
    return jb.Ensemble(
        feature=jnp.asarray(
            np.where(unsplit, 0, random.integers(0, 3, shape)), "int32"
        ),
        threshold=jnp.asarray(
            np.where(unsplit, np.inf, random.normal(size=shape)), "f"
        ),
        missing_left=jnp.asarray(unsplit | (random.random(shape) < 0.5)),
        leaf_value=jnp.asarray(random.normal(size=leaves), jnp.float32),
        init_score=jnp.float32(score),
        num_features=3,
    )


def linked(model):
    """The same trees, each leaf of the heap a node: built node by node."""
    depth, rounds = model.max_depth, model.num_rounds
    size = 2 ** (depth + 1) - 1
    names = ("feature", "threshold", "missing_left")
    fill = dict(feature=0, threshold=np.inf, missing_left=True)
    wide = {
        n: np.full((rounds, 1, size), fill[n], getattr(model, n).dtype) for n in names
    }
    for name in names:
        wide[name][:, :, : size // 2] = getattr(model, name)
    left_child = np.tile(np.arange(size, dtype=np.int32), (rounds, 1, 1))
    left_child[:, :, : size // 2] = 2 * np.arange(size // 2) + 1
    leaf_value = np.zeros((rounds, 1, size), np.float32)
    leaf_value[:, :, size // 2 :] = model.leaf_value
    links = Links(jnp.asarray(left_child), depth)
    arrays = {name: jnp.asarray(array) for name, array in wide.items()}
    return replace(model, **arrays, leaf_value=jnp.asarray(leaf_value), links=links)


@pytest.mark.parametrize("kinds", ["heaps", "first linked", "second linked", "linked"])
@pytest.mark.parametrize("depths", [(2, 3), (3, 2)])
def test_joined_models_add_their_trees(kinds, depths):
    one, other = grown(depths[0]), grown(depths[1], seed=1)
    x = np.where(np.random.default_rng(2).random(X.shape) < 0.2, np.nan, X)
    x = x.astype(np.float32)
    steps, scores = np.zeros(len(x), np.float32), []
    for model in (one, other):
        leaves = np.asarray(jb.leaf_indices(model, x))
        for number in range(2):
            steps = steps + np.asarray(model.leaf_value)[number, 0][leaves[:, number]]
            scores.append(np.asarray(one.init_score) + steps)
    one = linked(one) if kinds in ("first linked", "linked") else one
    other = linked(other) if kinds in ("second linked", "linked") else other
    both = append_rounds(one, other)
    assert both.max_depth == 3
    assert (both.links is None) == (kinds == "heaps")
    np.testing.assert_array_equal(jb.staged_predict(both, x), scores)
    if both.links is not None:  # a node that is not split is a leaf
        leaf = np.asarray(both.links.left_child) == np.arange(both.feature.shape[2])
        found = np.take_along_axis(
            leaf[:, 0], np.asarray(jb.leaf_indices(both, x)).T, axis=1
        )
        assert found.all()


@pytest.mark.parametrize("kinds", ["heaps", "first linked", "second linked"])
@pytest.mark.parametrize("terms", [(2, 3), (3, 0), (0, 1)])
def test_joined_models_keep_linear_leaves(kinds, terms):
    parts = [grown(3), grown(2, seed=1)]
    if terms == (2, 3):
        parts[1] = share(parts[1], 2)
        parts[0] = expand(share(parts[0], 2))
    x = np.where(np.random.default_rng(2).random(X.shape) < 0.2, np.nan, X)
    sloped = [
        add_slopes(part, count) if count else part
        for part, count in zip(parts, terms, strict=True)
    ]
    expected = [
        staged_scores(add_slopes(part, 0) if part.slopes is None else part, x)
        for part in sloped
    ]
    start = expected[0][-1] - np.asarray(sloped[1].init_score)
    expected = np.concatenate([expected[0], start + expected[1]])
    for number, kind in enumerate(("first linked", "second linked")):
        if kinds == kind:
            sloped[number] = _link(sloped[number])
    both = append_rounds(*sloped)
    found = jb.staged_predict(both, x.astype(np.float32), implementation="xla")
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert both.slopes.feature.shape[3] == max(terms)
    if terms == (2, 3):
        other = replace(sloped[1], ranges=2 * sloped[1].ranges)
        with pytest.raises(ValueError, match="ranges of models with linear leaves"):
            append_rounds(sloped[0], other)


def test_training_goes_on_from_linear_leaves():
    model = add_slopes(grown(3, score=1.0))
    run = dict(linear_leaves=False, **SMALL)
    both, history = jb.fit(X, Y, model=model, **run)
    scores = jb.predict(both, X)
    loss = np.mean(np.square(np.asarray(scores) - Y))
    np.testing.assert_allclose(history.train_loss[-1], loss, rtol=1e-5)
    assert both.slopes.feature.shape[:1] == (10,)


@pytest.mark.usefixtures("full_search")
def test_a_node_that_a_heap_does_not_split_is_a_leaf_among_linked_ones():
    other = jb.fit(X, Y, num_rounds=2, max_depth=3, min_child_samples=60)[0]
    assert not np.asarray(other.is_split).all()
    both = append_rounds(linked(grown(3)), other)
    assert both.links is not None
    leaf = np.asarray(both.links.left_child)[2:] == np.arange(15)
    np.testing.assert_array_equal(leaf, ~np.asarray(both.is_split)[2:])


def test_training_goes_on_from_linked_trees():
    model = linked(grown(3, score=1.0))
    both, history = jb.fit(X, Y, model=model, **SMALL)
    loss = np.mean(np.square(np.asarray(jb.predict(both, X)) - Y))
    np.testing.assert_allclose(history.train_loss[-1], loss, rtol=1e-5)
    assert both.num_rounds == 10
    assert both.sums is None  # what the first trees were fitted to is not known


MODEL = grown(3)
CODES = Categories(jnp.array([[1, 2]], jnp.int32), features=(1,))
NAMED = replace(MODEL, feature_names=("a", "b", "c"))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "model must be an Ensemble, got str", dict(model="file")),
        (TypeError, "pair", dict(model=(MODEL, None))),
        (ValueError, "num_scores must be 1, as the model", dict(num_scores=2)),
        (ValueError, "init_score must be 'auto'", dict(init_score=1.0)),
        (
            ValueError, "absent must be 'missing', as the model",
            dict(model=replace(MODEL, absent="missing"), absent="zero"),
        ),
        (ValueError, "x must have 3 columns.*got 2", dict(x=X[:, :2])),
        (
            ValueError, r"those of the model, \(1,\), got none",
            dict(model=replace(MODEL, categories=CODES), categorical=None),
        ),
        (
            ValueError, "expected 'b', got 'd'",
            dict(model=NAMED, feature_names=["a", "d", "c"]),
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model_is_refused(error, message, call):
    with pytest.raises(error, match=message):
        jb.fit(**{**dict(x=X, y=Y, model=MODEL, **SMALL), **call})


def test_names_stay_where_none_are_given():
    both, _ = jb.fit(X, Y, model=NAMED, **SMALL)
    assert both.feature_names == ("a", "b", "c")
    other, _ = jb.fit(X, Y, model=MODEL, feature_names=["a", "b", "c"], **SMALL)
    assert other.feature_names == ("a", "b", "c")
    assert jax.tree.structure(both) == jax.tree.structure(other)


@pytest.mark.usefixtures("constant_leaves")
def test_streams_go_on_as_arrays_do():
    model, _ = jb.fit(X, Y, **SMALL)
    whole, _ = jb.fit(X, Y, model=model, **SMALL)
    rows = jb.stream(
        [(X[:120], Y[:120]), (X[120:], Y[120:])],
        memory="64 MiB",
        bins=jb.fit_bins(X),
    )
    both, _ = jb.fit(rows, model=model, **SMALL)
    same_bits(both, whole)
