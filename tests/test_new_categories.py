# SPDX-License-Identifier: Apache-2.0
"""Training goes on with categories that the model has not seen."""

import io
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pandas as pd
import pytest
from tables import same_bits, squared_distance

import jboost as jb
from jboost.sklearn import JBoostRegressor
from jboost.training.continuing import adopt_categories

ROWS, RUN = 200, dict(num_rounds=8, max_depth=3, linear_leaves=False)
WORDS = np.array([f"w{i:02}" for i in range(60)], object)


def make_table(seed, words, missing=0.1):
    """Returns a number and a word per row, and targets that depend on both."""
    random = np.random.default_rng(seed)
    number, place = random.normal(size=ROWS), random.integers(0, len(words), ROWS)
    word = np.where(random.random(ROWS) < missing, None, words[place])
    effect = {word: (7 * i) % 5 - 2.0 for i, word in enumerate(WORDS)} | {None: 0.5}
    y = number + [effect[each] for each in word]
    return pd.DataFrame({"number": number, "word": word}), y.astype(np.float32)


FEW, EARLY = make_table(0, WORDS[:5])
SAME, _ = make_table(1, WORDS[:5])
KINDS = {
    "few": make_table(2, WORDS[:8], missing=0),
    "many": make_table(3, WORDS),  # more codes than a word of a set has bits
    "others": make_table(4, WORDS[10:18]),
}


@pytest.fixture(scope="module")
def model():
    return jb.fit(FEW, EARLY, **RUN)[0]


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize("name", KINDS)
def test_old_trees_stay_and_new_trees_see_all_categories(model, name):
    table, y = KINDS[name]
    both, history = jb.fit(table, y, model=model, validation=(table, y), **RUN)
    old = jb.truncate(both, model.num_rounds)
    unseen = pytest.warns(UserWarning, match="no category that the model knows")
    with unseen if name == "others" else nullcontext():
        scores = jb.predict(model, table)
    for rows in (table, SAME):  # categories new to the model count as missing in it
        run = partial(jb.predict, old, rows)
        plain = hide(rows, WORDS[:5])
        np.testing.assert_array_equal(run(), jb.predict(model, plain))
        np.testing.assert_array_equal(
            jb.leaf_indices(old, rows), jb.leaf_indices(model, plain)
        )
        np.testing.assert_array_equal(
            jb.shap_values(old, rows).values, jb.shap_values(model, plain).values
        )
    # New rounds are those of a fresh model for what the old ones leave.
    fresh, later = jb.fit(table, y, offset=scores, init_score=0.0, **RUN)
    np.testing.assert_allclose(
        jb.predict(both, table),
        scores + jb.predict(fresh, table),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip
    np.testing.assert_allclose(history.train_loss, later.train_loss, rtol=1e-4)
    np.testing.assert_array_equal(history.train_loss, history.validation_loss)
    # Values keep their numbers and codes; the new ones follow.
    (before,), (after,) = model.categories.values[0:1], both.categories.values[0:1]
    seen = {*table["word"].dropna()}
    assert after == (*before, *sorted(seen - {*before}))
    codes = np.asarray(both.categories.codes)[0]
    known = np.asarray(model.categories.codes)[0]
    np.testing.assert_array_equal(codes[: len(before)], known)
    assert sorted(codes) == [*range(1, len(after) + 1)]


def hide(table, known):
    return table.assign(word=table["word"].where(table["word"].isin(known), None))


def test_no_new_category_changes_nothing(model):
    same_bits(adopt_categories(model, model.categories), model)


def test_codes_of_matrices_go_on_alike(model):
    """A matrix of numbers that are not named, and levels that were only declared."""
    table, y = KINDS["few"]
    words = [*WORDS[:8]]
    numbered = [
        np.column_stack([t["number"], pd.Categorical(t["word"], words).codes])
        for t in (FEW, table)
    ]
    for x in numbered:
        x[x[:, 1] < 0, 1] = np.nan
    declared = [t.assign(word=pd.Categorical(t["word"], words)) for t in (FEW, table)]
    expected, _ = jb.fit(table, y, model=model, **RUN)
    scores = jb.predict(expected, table)
    for (first, later), more in (
        (numbered, dict(categorical=[1])), (declared, dict()),
    ):  # fmt: skip
        start, _ = jb.fit(first, EARLY, **more, **RUN)
        both, _ = jb.fit(later, y, model=start, **more, **RUN)
        np.testing.assert_array_equal(jb.predict(both, later), scores)
        np.testing.assert_array_equal(both.leaf_value, expected.leaf_value)


def test_files_checkpoints_exports_and_further_rounds(model, tmp_path):
    table, y = KINDS["many"]
    both, _ = jb.fit(table, y, model=model, **RUN)
    file = io.BytesIO()
    jb.save(both, file)
    file.seek(0)
    same_bits(jb.load(file), both)
    path = tmp_path / "run"
    run = partial(jb.fit, table, y, model=model, checkpoint=path)
    run(**RUN | dict(num_rounds=3))
    same_bits(run(**RUN)[0], both)
    jb.interchange.write_xgboost(both, tmp_path / "model.json")
    np.testing.assert_allclose(
        jb.predict(jb.interchange.read_xgboost(tmp_path / "model.json"), table),
        jb.predict(both, table), rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    third, _ = jb.fit(FEW, EARLY, model=both, **RUN)
    same_bits(third.categories, both.categories)
    compiled = jax.jit(jb.predict)(both, jb.interchange.to_matrix(both, table))
    np.testing.assert_array_equal(compiled, jb.predict(both, table))


@pytest.mark.parametrize("shared", [False, True])
def test_several_scores(shared):
    table, y = KINDS["few"]
    run = dict(RUN, num_scores=2, share_structure=shared)
    first, later = (np.stack([each, -each], axis=1) for each in (EARLY, y))
    start, _ = jb.fit(FEW, first, squared_distance, init_score=0.0, **run)
    both, _ = jb.fit(table, later, squared_distance, model=start, **run)
    plain = hide(table, WORDS[:5])
    old = jb.predict(jb.truncate(both, 8), table)
    np.testing.assert_array_equal(old, jb.predict(start, plain))
    assert np.any(jb.predict(both, table) != jb.predict(both, plain))


def test_categories_that_cannot_be_taken_are_named(model):
    table, y = KINDS["few"]
    named = r"column 1 \('word'\).*'w05', 'w06', 'w07'"
    for call, message in (
        (partial(jb.refit, model, table, y), f"{named}.*fit.x, y, model=model"),
        (partial(jb.refine, model, table, y), named),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    few = dict(num_rounds=1, max_bins=2)  # 31 codes
    full, _ = jb.fit(*make_table(6, WORDS[:31]), **few)
    with pytest.raises(ValueError, match=r"max_bins must be larger.*'word'.*'w31', "):
        jb.fit(*make_table(7, WORDS[:40]), model=full, **few)
    matrix = jb.interchange.to_matrix(model, FEW)
    matrix[3, 1] = 5
    with pytest.raises(ValueError, match="5 categories, from 0 to 4, got 5; pass a da"):
        jb.fit(matrix, EARLY, model=model, num_rounds=1)
    matrix[3, 1] = 77
    with pytest.raises(ValueError, match=r"column 1 \('word'\).*got \[77\]"):
        jb.refit(replace(model, categories=strip(model.categories)), matrix, EARLY)
    weights = np.isin(table["word"], [*WORDS[:5], None]).astype(float)
    refitted = jb.refit(model, table, y, sample_weight=weights)  # unless they weigh 0
    same_bits(
        refitted, jb.refit(model, hide(table, WORDS[:5]), y, sample_weight=weights)
    )


def strip(categories):
    return replace(categories, values=None)


def test_held_out_rows_of_refine_may_have_new_categories(model):
    table, y = KINDS["few"]
    run = partial(jb.refine, model, FEW, EARLY, num_epochs=1)
    held, _ = run(validation=(table, y))
    plain, _ = run(validation=(hide(table, WORDS[:5]), y))
    same_bits(held, plain)


def test_a_column_of_unseen_words_is_reported_once(model):
    table, _ = KINDS["others"]
    regressor = JBoostRegressor(**RUN).fit(FEW, EARLY)
    for call in (
        partial(jb.predict, model, table),
        partial(jb.shap_values, model, table),
        partial(jb.partial_dependence, model, table, "number"),
        partial(regressor.predict, table),
    ):
        with pytest.warns(UserWarning, match="'word' of x .* such as 'w1") as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__]
    jb.predict(model, table.head(1))
