# SPDX-License-Identifier: Apache-2.0
"""Scores that share one tree per round equal those with trees of their own."""

import io
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from implementations import IMPLEMENTATIONS, each_isa, needs_cpu_kernels
from shared_models import KINDS, expand, make_model, make_rows, share
from tables import FULL, squared_distance

import jboost as jb
from jboost.training.record import append_rounds

OPERATIONS = (jb.predict, jb.staged_predict)
SIMPLE = dict(curvature="exact", leaf_solver="newton", **FULL)  # smaller programs
each_kind = pytest.mark.parametrize("kind", KINDS)


def assert_same(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)


def test_sizes_come_from_the_leaves():
    model = make_model("shallow")
    assert model.shares_structure and not expand(model).shares_structure
    assert model.num_scores == expand(model).num_scores == 3
    assert model.feature.shape[1] == 1 and model.max_depth == 4
    assert repr(model) == repr(expand(model))
    single, _ = jb.fit(
        make_rows(), np.arange(400.0), num_rounds=6, max_depth=4, linear_leaves=False
    )
    assert not single.shares_structure


@pytest.mark.parametrize(
    ("kind", "num_rows"),
    [*zip(KINDS, [40] * 5, strict=True), ("deep", 1), ("linked", 3000)],
)
def test_predictions_have_the_same_bits(kind, num_rows):
    model, x = make_model(kind), make_rows(num_rows)
    other = expand(model)
    for operation in OPERATIONS:
        expected = operation(other, x)
        assert_same(operation(model, np.asfortranarray(x)), expected)
        assert_same(operation(model, x), expected)
        assert operation(model, x[:0]).shape == operation(other, x[:0]).shape
    leaves, expected = jb.leaf_indices(model, x), jb.leaf_indices(other, x)
    assert leaves.shape == (num_rows, 6) and expected.shape == (num_rows, 6, 3)
    assert_same(np.broadcast_to(leaves[..., None], expected.shape), expected)


@pytest.mark.parametrize("kind", ["categories", "linked", "deep"])
def test_plain_xla_finds_the_same_bits(kind):
    model, x = make_model(kind), make_rows(40)
    for operation in (*OPERATIONS, jb.leaf_indices):
        found = operation(model, x, implementation="xla")
        assert_same(found, operation(model, x))
    expected = jb.predict(expand(model), x, implementation="xla")
    assert_same(jb.predict(model, x), expected)


@needs_cpu_kernels
@pytest.mark.parametrize(
    ("kind", "num_scores"),
    [("deep", 2), ("linked", 7), ("shallow", 12), ("linked", 40)],
)
def test_each_instruction_set_adds_all_scores(kind, num_scores):
    x, model = make_rows(700), make_model(kind, num_scores)
    model = append_rounds(append_rounds(model, model), append_rounds(model, model))
    # One float32 addition after the other.
    leaf = np.asarray(jb.leaf_indices(model, x, implementation="xla"))
    values = np.asarray(model.leaf_value)[np.arange(model.num_rounds), :, leaf]
    expected = np.cumsum(values, axis=1, dtype=np.float32)
    expected = (expected + np.asarray(model.init_score)).swapaxes(0, 1)
    for _ in each_isa():
        assert_same(jb.predict(model, x), expected[-1])
        assert_same(jb.staged_predict(model, x), expected)
        assert_same(jb.predict(model, x[:20]), expected[-1, :20])


def test_sparse_rows_offsets_and_links_of_losses():
    from scipy import sparse

    model, x = make_model("absent"), np.nan_to_num(make_rows(50))
    offset = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    for run in (*OPERATIONS, jb.leaf_indices):
        assert_same(run(model, sparse.csr_matrix(x)), run(model, x))
    for options in ({"offset": offset}, {"inverse_link": jax.nn.softmax}):
        for run in OPERATIONS:
            assert_same(run(model, x, **options), run(expand(model), x, **options))


def test_a_truncated_model_shares_trees():
    model, x = make_model("linked"), make_rows(30)
    short = jb.truncate(model, 2)
    assert short.shares_structure and short.num_rounds == 2
    assert_same(jb.predict(short, x), jb.staged_predict(model, x)[1])


@pytest.mark.parametrize(
    ("kind", "implementation"),
    [("deep", IMPLEMENTATIONS[0]), ("linked", IMPLEMENTATIONS[-1])],
)
def test_derivatives_in_leaf_values(kind, implementation):
    model, x = make_model(kind), make_rows(300)
    weights = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)

    @jax.jit
    def derive(model, value):
        def run(value):
            changed = replace(model, leaf_value=value)
            return jb.predict(changed, x, implementation=implementation)

        scores, change = jax.jvp(run, (value,), (value,))
        return scores, change, *jax.vjp(run, value)[1](weights)

    found = derive(model, model.leaf_value)
    for own, other in zip(found, derive(expand(model), model.leaf_value), strict=True):
        assert_same(own, other)


def test_models_can_be_stacked():
    model, x = make_model("shallow"), make_rows(40)
    other = replace(model, leaf_value=2 * np.asarray(model.leaf_value))
    many = jax.tree.map(lambda *arrays: np.stack(arrays), model, other)
    for run in (*OPERATIONS, jb.leaf_indices):
        found = np.asarray(jax.vmap(lambda model, run=run: run(model, x))(many))
        assert_same(found[0], run(model, x))
        assert_same(found[1], run(other, x))


def test_sharded_rows():
    model, x = make_model("categories"), make_rows(64)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=auto)
    spec = jax.sharding.PartitionSpec("rows")
    rows = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    assert_same(jb.predict(model, rows), jb.predict(model, x))


def test_trees_of_targets_share_their_structure():
    x = make_rows(200)[:, :4]
    y = np.stack([np.nan_to_num(x[:, 0]), np.nan_to_num(x[:, 1] ** 2)], axis=1)
    tree = jb.cart.fit_tree(x, y, max_depth=3)
    model = tree.as_ensemble()
    assert model.shares_structure and model.num_scores == 2
    scores = jb.predict(tree, x)
    for k in range(2):
        single = replace(tree, value=tree.value[:, k])
        assert_same(scores[:, k], jb.predict(single, x))
    assert jb.leaf_indices(tree, x).shape == (200,)


@pytest.mark.parametrize(
    ("kind", "cover"), [("categories", "weight"), ("linked", "curvature")]
)
def test_shapley_values_and_interactions(kind, cover):
    model, x = make_model(kind), make_rows(20)
    for run in (jb.shap_values, jb.explanation.shap_interactions):
        found, expected = (run(each, x, cover=cover) for each in (model, expand(model)))
        jax.tree.map(assert_same, found, expected)


def test_shapley_values_in_plain_xla_and_of_sparse_rows():
    from scipy import sparse

    model, x = make_model("absent"), np.nan_to_num(make_rows(20))
    expected = jb.shap_values(expand(model), x, implementation="xla")
    found = jb.shap_values(model, x, implementation="xla")
    jax.tree.map(assert_same, found, expected)
    jax.tree.map(
        assert_same,
        jb.shap_values(model, sparse.csr_matrix(x)),
        jb.shap_values(model, x),
    )


@pytest.fixture(scope="module")
def on_codes():
    """Trees on codes with leaves for three scores, and what they are made from."""
    x = make_rows(200)[:, :4]
    y, bins = np.nan_to_num(x[:, 0]), jb.fit_bins(x, max_bins=16)
    trees, _ = jb.boost(
        jb.apply_bins(bins, x), y, jb.losses.squared_error, jax.random.key(0),
        num_rounds=3, max_depth=2, max_bins=16, **SIMPLE,
    )  # fmt: skip
    model = share(jb.to_ensemble(trees, bins))
    inner = trees.trees._replace(leaf_value=model.leaf_value, sums=model.sums)
    return x, bins, model, trees._replace(trees=inner, init_score=model.init_score)


def test_trees_on_codes_become_a_model(on_codes):
    _, bins, model, together = on_codes
    for run in (jb.to_ensemble, jax.jit(jb.to_ensemble)):
        jax.tree.map(assert_same, run(together, bins), model)


@each_kind
def test_files(kind):
    model, file = make_model(kind), io.BytesIO()
    jb.save(model, file)
    file.seek(0)
    same = jb.load(file)
    assert same.shares_structure
    jax.tree.map(assert_same, same, model)


def test_files_hold_one_tree_per_round_or_one_for_each_score():
    model = make_model("shallow")
    two = jnp.repeat(model.feature, 2, axis=1)
    with pytest.raises(ValueError, match="threshold"):
        jb.save(replace(model, feature=two), io.BytesIO())
    bad = replace(
        model, feature=two, threshold=two.astype(jnp.float32), missing_left=two > 0
    )
    with pytest.raises(ValueError, match="one for each score"):
        jb.save(bad, io.BytesIO())


@pytest.mark.parametrize(
    ("first", "kinds"),
    [("shared", ("shallow", "linked")), ("own", ("deep", "shallow"))],
)
def test_rounds_are_joined(kinds, first):
    x = make_rows(200)
    before, after = (share(make_model(kind), 3, seed=7) for kind in kinds)
    after = replace(after, init_score=before.init_score)
    expected = append_rounds(expand(before), expand(after))
    assert append_rounds(before, after).shares_structure
    assert_same(jb.predict(append_rounds(before, after), x), jb.predict(expected, x))
    mixed = (before, expand(after)) if first == "shared" else (expand(before), after)
    both = append_rounds(*mixed)
    assert not both.shares_structure
    jax.tree.map(assert_same, both, expected)


def test_training_goes_on_from_the_scores():
    model, x = make_model("categories"), make_rows(200)
    y = np.eye(3, dtype=np.float32)[np.arange(200) % 3]
    settings = dict(
        num_scores=3, num_rounds=2, max_depth=2, max_bins=16, share_structure=False,
        linear_leaves=False, **SIMPLE,
    )  # fmt: skip
    found, expected = (
        jb.fit(x, y, squared_distance, model=start, **settings)[0]
        for start in (model, expand(model))
    )
    assert found.num_rounds == 8
    assert_same(jb.predict(found, x), jb.predict(expected, x))


@pytest.mark.usefixtures("full_search")
def test_newton_steps_are_refitted_score_by_score():
    model, x = make_model("linked"), make_rows(200)
    y = np.arange(200) % 3
    settings = dict(decay=0.5, leaf_solver="newton", max_delta_step=0.7, init_score=0.0)
    found, expected = (
        jb.refit(each, x, y, jb.losses.softmax, **settings)
        for each in (model, expand(model))
    )
    assert found.shares_structure
    # XLA rounds sums of several scores at once differently.
    np.testing.assert_allclose(found.leaf_value, expected.leaf_value, atol=1e-6)


def test_refitting_to_the_rows_of_training_changes_nothing():
    x = make_rows(200)
    y = (np.nan_to_num(x[:, 0]) > 0) * 1 + np.isin(x[:, 4], [2, 5])
    settings = dict(
        num_scores=3, share_structure=True, num_rounds=5, max_depth=3, init_score=0.0,
        max_bins=16, linear_leaves=False,
    )  # fmt: skip
    model, _ = jb.fit(x, y, jb.losses.softmax, **settings)
    found = jb.refit(model, x, y, jb.losses.softmax, init_score=0.0)
    # The sum of the scores is nearly free, which amplifies rounding.
    np.testing.assert_allclose(found.leaf_value, model.leaf_value, atol=1e-4)
    assert np.abs(model.leaf_value).max() > 0.1


def test_leaves_are_refined():
    model, x = make_model("linked"), make_rows(200)
    y = np.arange(200) % 3
    found, expected = (
        jb.refine(each, x, y, jb.losses.softmax, num_epochs=3)[0]
        for each in (model, expand(model))
    )
    assert found.shares_structure
    assert_same(jb.predict(found, x), jb.predict(expected, x))


@each_kind
def test_importance_counts_a_split_once(kind):
    model = make_model(kind)
    for name, factor in (
        ("splits", 1 / 3),
        ("gain", 1),
        ("cover", 1),
        ("improvement", 3),
    ):
        found = jb.feature_importance(model, name).values
        expected = jb.feature_importance(expand(model), name).values * factor
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    each = jb.feature_importance(model, "gain", per_split=True).values
    counts = jb.feature_importance(model, "splits").values
    total = jb.feature_importance(model, "gain").values
    np.testing.assert_allclose(each * counts, total, rtol=1e-12)


@each_kind
def test_frames_and_dependence(kind):
    model, x = make_model(kind), make_rows(50)
    frames = map(jb.explanation.trees_to_dataframe, (model, expand(model)))
    first, second = frames
    assert first.equals(second)
    found, expected = (
        jb.explanation.partial_dependence(each, x, [0])
        for each in (model, expand(model))
    )
    jax.tree.map(assert_same, found.average, expected.average)


def test_pictures_show_the_values_of_all_scores():
    model = make_model("shallow")
    dots = [jb.plotting.tree_to_dot(model, 1, k) for k in range(3)]
    assert dots == [jb.plotting.tree_to_dot(expand(model), 1, k) for k in range(3)]
    values = [f"{value:.3g}" for value in np.asarray(model.leaf_value)[1, :, 0]]
    together = jb.plotting.tree_to_dot(model, 1)
    assert ", ".join(values) in together and "score" not in together
    assert together.count("->") == dots[0].count("->")
    wide = make_model("shallow", 12)
    values = np.asarray(wide.leaf_value)[0, :, 0]
    k = int(np.argmax(np.abs(values)))
    assert f'"{k}: {values[k]:.3g}, ' in jb.plotting.tree_to_dot(wide)
    ax = jb.plotting.tree(wide)
    assert any(word.get_text().startswith(f"{k}: ") for word in ax.texts)
    jb.plotting.tree(wide, score=3)


def test_rows_are_looked_up_in_a_tree_on_codes(on_codes):
    x, bins, _, together = on_codes
    codes, rounds = jb.apply_bins(bins, x), range(2)
    trees = [
        jax.tree.map(lambda a, i=i: np.asarray(a)[i], together.trees) for i in rounds
    ]
    for tree in trees:
        leaf = jb.parts.find_leaves(tree, codes)
        assert leaf.shape == (200,)
        values = jb.parts.predict_tree(tree, codes)
        assert_same(values, np.asarray(tree.leaf_value)[:, leaf].T)
    model = jb.to_ensemble(jb.parts.stack_trees(trees, np.zeros(3)), bins)
    values = [np.asarray(jb.parts.predict_tree(tree, codes)) for tree in trees]
    assert_same(jb.predict(model, x), values[0] + values[1])
    assert_same(jb.leaf_indices(model, x)[:, 1], leaf)
