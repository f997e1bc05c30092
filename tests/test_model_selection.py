# SPDX-License-Identifier: Apache-2.0
"""Cross-validation and sweeps against loops of ``fit``, scikit-learn and laws."""

import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from compilations import Compilations
from sklearn import model_selection
from tables import FULL, ROWS, make_regression, make_steps, mean_loss, squared_distance

import jboost as jb
from jboost.entry import programs as executables
from jboost.selection import study
from jboost.selection.folds import make_folds

pytestmark = pytest.mark.usefixtures("constant_leaves_of_file")
SMALL: dict[str, Any] = dict(num_rounds=8, max_depth=3, max_bins=16, **FULL)
X, Y = make_regression()
STEPS, _ = make_steps()  # thresholds that do not depend on weights
LABELS = (np.median(Y) < Y).astype(np.float32)
WEIGHTS = np.random.default_rng(5).integers(1, 4, ROWS).astype(np.float32)
SQUARES = jb.losses.squared_error


def validate(x=X, y=Y, loss=SQUARES, **settings):
    return jb.cross_validate(x, y, loss, **{**SMALL, "folds": 4, **settings})


def sweep(points, loss=SQUARES, **settings):
    return jb.sweep(X, Y, loss, points, **{**SMALL, "folds": 4, **settings})


def mae(scores, targets, weights):
    return jnp.average(jnp.abs(scores - targets), weights=weights)


@pytest.fixture(scope="module")
def plain():
    return validate(return_models=True)


def train(weights, **settings):
    """The scores of all rows after training on weighted ones, by ``fit``."""
    settings = {**SMALL, **settings}
    model, _ = jb.fit(STEPS, Y, SQUARES, sample_weight=weights, **settings)
    return np.asarray(jb.predict(model, STEPS))


def run_loop(result, weights=None, **settings):
    """What a loop of ``fit`` over the folds of a result finds."""
    weights = np.ones(ROWS, np.float32) if weights is None else weights
    losses, scores = [], []
    for held_out in result.held_out:
        found = train(np.where(held_out, 0, weights), **settings)
        losses.append(
            [
                mean_loss(SQUARES, found[p], Y[p], weights[p])
                for p in (~held_out, held_out)
            ]
        )
        scores.append(found)
    return np.array(losses), np.choose(result.held_out.argmax(axis=0), scores)


@pytest.mark.parametrize(
    ("weights", "settings"),
    [
        # Counts come from the curvature where rows weigh the same: a row that weighs
        # nothing is not counted.
        (None, dict(min_child_samples=15)),
        (WEIGHTS, dict(subsample=0.6, colsample_bynode=0.7)),
    ],
    ids=["counts", "weights"],
)
def test_folds_are_runs_with_weights_of_zero(weights, settings):
    """The folds of other losses are compared in test_routes.py."""
    found = validate(x=STEPS, sample_weight=weights, **settings)
    losses, scores = run_loop(found, weights, **settings)
    assert found.best_round == 7  # the loop looks at the last round
    np.testing.assert_array_equal(found.scores, scores)
    # float32 sums in another order than the reference's float64
    np.testing.assert_allclose(found.train_loss[:, -1], losses[:, 0], rtol=1e-6)
    np.testing.assert_allclose(found.validation_loss[:, -1], losses[:, 1], rtol=1e-6)


def test_summaries(plain):
    np.testing.assert_allclose(plain.mean, plain.validation_loss.mean(axis=0))
    error = plain.validation_loss.std(axis=0, ddof=1) / 2
    np.testing.assert_allclose(plain.standard_error, error)
    assert plain.best_round == np.argmin(plain.mean)
    limit = plain.mean[plain.best_round] + error[plain.best_round]
    assert plain.one_se_round == np.flatnonzero(plain.mean <= limit)[0]
    assert 0 < plain.one_se_round < plain.best_round


def test_models_are_those_of_the_scores(plain):
    scores = jax.vmap(jb.predict, (0, None))(plain.models, X)
    expected = np.choose(plain.held_out.argmax(axis=0), np.asarray(scores))
    np.testing.assert_array_equal(plain.scores, expected)
    first = jax.tree.map(lambda array: array[0], plain.models)
    assert first.num_rounds == plain.best_round + 1
    np.testing.assert_array_equal(jb.predict(first, X), scores[0])


def test_a_fold_does_not_see_what_it_holds_out(plain):
    y = Y.copy()
    y[plain.held_out[2]] += 1000
    other = validate(y=y)
    np.testing.assert_array_equal(other.train_loss[2], plain.train_loss[2])
    assert np.all(other.validation_loss[2] > 1e5)
    assert np.all(other.train_loss[[0, 1, 3]] > 2 * plain.train_loss[[0, 1, 3]])


def test_early_stopping_looks_at_the_mean():
    settings = dict(num_rounds=40, learning_rate=0.6, max_depth=3)
    full, stopped = (validate(**settings, early_stopping_rounds=n) for n in (None, 3))
    best = 0
    for number, value in enumerate(full.mean):
        best = number if value < full.mean[best] else best
        if number - best == 3:
            break
    assert number < 39
    assert stopped.best_round == best
    np.testing.assert_array_equal(
        stopped.validation_loss, full.validation_loss[:, : number + 1]
    )


def test_metrics_are_those_of_held_out_rows():
    plain, found = validate(), validate(metrics=dict(mae=mae), by="mae")
    best = found.metrics["mae"][:, found.best_round]
    expected = [np.abs(found.scores - Y)[mask].mean() for mask in found.held_out]
    np.testing.assert_allclose(best, expected, rtol=1e-6)
    np.testing.assert_allclose(found.mean, found.metrics["mae"].mean(axis=0))
    np.testing.assert_array_equal(found.validation_loss, plain.validation_loss)

    def count(scores, targets, weights):
        return len(scores) + 0 * float(np.asarray(weights).sum())

    sizes = validate(folds=3, metrics=dict(count=count), num_rounds=1).metrics["count"]
    assert sorted(sizes[:, 0]) == [66, 67, 67]


def test_several_scores_and_offsets():
    y = np.stack([Y, -Y], axis=1)
    offset = np.stack([Y, 0 * Y], axis=1)
    # Compiles faster.
    simple = dict(curvature="exact", leaf_solver="newton", init_score=0.0)
    found = validate(y=y, loss=squared_distance, num_scores=2, offset=offset, **simple)
    assert found.scores.shape == (ROWS, 2)
    # What the offset explains needs no trees; the rest is the problem of one score.
    np.testing.assert_allclose(found.scores[:, 0], Y, atol=1e-5)
    assert np.abs(found.scores[:, 1] + Y).mean() < np.abs(Y - Y.mean()).mean()


def test_plain_xla_finds_the_same():
    """There the runs are mapped over side by side."""
    settings = dict(max_depth=1, num_rounds=3)
    found = validate(**settings, implementation="xla")
    np.testing.assert_array_equal(found.scores, validate(**settings).scores)


# ---- folds ----


def test_drawn_folds_are_of_equal_size():
    folds = make_folds(7, 100, seed=1)
    assert np.all(folds.held_out.sum(axis=0) == 1)
    assert {*folds.held_out.sum(axis=1)} == {14, 15}
    np.testing.assert_array_equal(folds.train, ~folds.held_out)
    assert np.any(folds.held_out != make_folds(7, 100, seed=2).held_out)
    blocks = make_folds(3, 10, shuffle=False).held_out
    assert [np.flatnonzero(b).tolist() for b in blocks] == [
        [0, 1, 2, 3], [4, 5, 6], [7, 8, 9],
    ]  # fmt: skip


def test_strata_are_shared_out_and_groups_stay_together():
    labels = np.array([*"aaaaaaaabbbbccccccccc"])
    held_out = make_folds(4, len(labels), stratify=labels).held_out
    for label, size in (("a", 8), ("b", 4), ("c", 9)):
        shares = held_out[:, labels == label].sum(axis=1)
        assert {*shares} <= {size // 4, -(-size // 4)}
    groups = np.random.default_rng(0).integers(0, 12, 100)
    held_out = make_folds(4, 100, groups=groups).held_out
    assert all(len({*held_out.argmax(axis=0)[groups == g]}) == 1 for g in range(12))
    assert held_out.sum(axis=1).min() > 10


@pytest.mark.parametrize(
    "splitter",
    [
        model_selection.KFold(3, shuffle=True, random_state=0),
        model_selection.StratifiedKFold(3),
        model_selection.TimeSeriesSplit(3),
        model_selection.ShuffleSplit(3, random_state=0),
    ],
    ids=lambda splitter: type(splitter).__name__,
)
def test_splitters_and_pairs(splitter):
    pairs = list(splitter.split(X, LABELS))
    folds = make_folds(splitter, ROWS, y=LABELS)
    for (train, held_out), masks in zip(pairs, zip(*folds, strict=True), strict=True):
        np.testing.assert_array_equal(np.flatnonzero(masks[0]), np.sort(train))
        np.testing.assert_array_equal(np.flatnonzero(masks[1]), np.sort(held_out))
    for again in (iter(pairs), [tuple(pair) for pair in zip(*folds, strict=True)]):
        np.testing.assert_array_equal(make_folds(again, ROWS).held_out, folds.held_out)


@pytest.mark.parametrize("most", [3, 200])  # repeats, within int8 and beyond
def test_repeated_rows_are_rows_of_more_weight(most):
    rng = np.random.default_rng(8)
    pairs = []
    for _ in range(2):  # each half is drawn from with replacement
        halves = np.split(rng.permutation(ROWS), 2)
        pairs.append([rng.choice(half, 150) for half in halves])
    pairs[0][0] = np.append(pairs[0][0], np.repeat(pairs[0][0][0], most))
    settings = dict(min_child_samples=15)
    found = validate(x=STEPS, folds=pairs, metrics=dict(mae=mae), **settings)
    for fold, pair in enumerate(pairs):
        counts = [np.bincount(rows, minlength=ROWS) for rows in pair]
        weights, held_out = np.float32(counts)
        scores = train(weights, **settings)
        losses = [mean_loss(SQUARES, scores, Y, w) for w in (weights, held_out)]
        np.testing.assert_allclose(found.train_loss[fold, -1], losses[0], rtol=1e-5)
        np.testing.assert_allclose(
            found.validation_loss[fold, -1], losses[1], rtol=1e-5
        )
        np.testing.assert_allclose(
            found.metrics["mae"][fold, -1], mae(scores, Y, held_out), rtol=1e-5
        )
        np.testing.assert_array_equal(found.held_out[fold], held_out > 0)


def test_rows_that_no_fold_holds_out_have_no_score():
    found = validate(folds=np.arange(ROWS) % 5 - 1)
    assert len(found.held_out) == 4
    np.testing.assert_array_equal(np.isnan(found.scores), np.arange(ROWS) % 5 == 0)


def test_strata_of_the_targets():
    held_out = validate(y=LABELS, stratify=True, num_rounds=1).held_out
    assert np.all(held_out[:, LABELS > 0].sum(axis=1) == 25)


# ---- sweeps ----


def test_points_are_cross_validations():
    points = dict(learning_rate=[0.1, 0.5], l2=[0.0, 3.0], max_depth=[3, 1])
    found = sweep(points)
    assert found.validation_loss.shape == (8, 4, 8)
    assert found.points[1] == dict(learning_rate=0.1, l2=0.0, max_depth=1)
    for place in (0, 5, 6):
        alone = validate(**found.points[place])
        np.testing.assert_array_equal(
            found.validation_loss[place], alone.validation_loss
        )
        np.testing.assert_array_equal(found.train_loss[place], alone.train_loss)
        assert found.best_rounds[place] == alone.best_round
    best = np.unravel_index(np.argmin(found.mean), found.mean.shape)
    assert (found.best, found.best_round) == best
    assert found.best_point == found.points[best[0]]
    assert found.table["mean"][found.best] == found.mean.min()
    assert str(found).splitlines()[1].split()[0] == str(
        found.best_point["learning_rate"]
    )


def scaled(score, target, *, scale=1.0):
    return scale * jnp.square(score - target)


def test_side_by_side_points_and_parameters_of_the_loss():
    points = dict(scale=np.array([0.1, 0.5, 5.0]), learning_rate=(0.3, 0.2, 0.1))
    shared = dict(regularization="absolute", metrics=dict(mae=mae))
    found = sweep(points, scaled, grid=False, **shared, by="mae")
    assert len(found.points) == 3
    other = validate(
        loss=lambda score, target: scaled(score, target, scale=0.5),
        learning_rate=0.2, **shared,
    )  # fmt: skip
    np.testing.assert_array_equal(found.metrics["mae"][1], other.metrics["mae"])
    np.testing.assert_array_equal(found.validation_loss[1], other.validation_loss)
    assert found.best == np.argmin(found.metrics["mae"].mean(axis=1).min(axis=1))


def test_a_point_that_diverges_is_left_behind():
    points = [dict(learning_rate=0.2), dict(learning_rate=1e30)]
    found = sweep(points, early_stopping_rounds=20, num_rounds=8)
    chex.assert_tree_all_finite(found.validation_loss[0])
    assert np.isnan(found.validation_loss[1, :, -1]).all()
    assert found.best == 0
    with pytest.raises(jb.TrainingError, match=r"fold \d became .* in round") as caught:
        validate(learning_rate=1e30)
    kept = caught.value
    assert kept.model.num_rounds == kept.round == len(kept.history.train_loss)
    rates = [0.2, 0.2, 1e30]
    with pytest.warns(UserWarning, match=r"fold \d became .*round 2; .* ends at round"):
        ended = validate(
            learning_rate=lambda step: rates[step], num_rounds=3,
            early_stopping_rounds=2,
        )  # fmt: skip
    assert ended.train_loss.shape[1] == 2 and 0 <= ended.best_round < 2


def poisoned(s, t):
    """The branch that is never taken has no derivative."""
    return (s - t) ** 2 + jnp.where(t > 1e9, jnp.sqrt(s - s), 0.0)


def test_a_fold_that_learns_nothing_is_named():
    with pytest.raises(ValueError, match=r"gradient .* NaN in row 0"):
        validate(loss=poisoned, max_depth=1)
    points = dict(init_score=[0.0, 1e4])  # far out, Welsch's loss is flat
    with pytest.raises(
        jb.TrainingError, match=r"fold 0 of points\[1\].*10000.* zero"
    ) as caught:
        sweep(points, jb.losses.welsch, num_rounds=1, max_depth=1, leaf_solver="newton")
    assert caught.value.model.num_rounds == 0
    equal = validate(y=np.ones(ROWS, np.float32))  # nothing to learn
    np.testing.assert_array_equal(equal.train_loss, 0)
    with pytest.raises(ValueError, match="swapped"):
        validate(y=LABELS, loss=lambda s, t: jb.losses.logistic(t, s), max_depth=1)


# ---- programs ----


def test_numbers_and_folds_do_not_recompile(plain):
    with Compilations() as compilations:
        validate(folds=6, seed=3, learning_rate=0.2, num_rounds=5, l2=2.0)
        validate(x=X[:195], y=Y[:195], folds=np.arange(195) % 5, subsample=0.5)
    assert not [name for name in compilations.names if "_run" in name]
    with Compilations() as compilations:
        validate(max_depth=2, max_leaves=3, num_rounds=1)  # a size
    assert any("_run_rounds" in name for name in compilations.names)


def test_points_that_sample_rows_run_beside_those_that_do_not(monkeypatch):
    calls, run = [], study._run_block
    monkeypatch.setattr(study, "_run_block", lambda *a: calls.append(a) or run(*a))
    sweep(dict(subsample=[0.5, 1.0]))
    assert len(calls) == 1


def test_codes_are_not_copied_for_each_fold(monkeypatch):
    operands = {}

    def keep(function, *static, **options):
        def run(*arguments):
            made = executables.compiled(function, *static, **options)
            program = made.jitted(*arguments).lower(*arguments).compile()
            operands[function.__name__] = (program, arguments)
            return program(*arguments)

        return run

    monkeypatch.setattr("jboost.selection.study.compiled", keep)
    validate(max_depth=1)
    program, arguments = operands["_run_rounds"]
    text = program.as_text()
    data = arguments[0].data
    for codes in (data.codes.columns, data.codes.packed):
        size = ",".join(map(str, codes.shape))
        assert f"u8[{size}]" in text
        assert not re.search(rf"u8\[\d+,{size}\]", text)


# ---- errors ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(folds=1), "folds must be an integer from 2"),
        (dict(folds=2.5), "folds must be an integer, a fold number"),
        (dict(folds="five"), "folds must be an integer, a fold number"),
        (dict(folds=np.zeros(7, int)), "folds must be 200 integers"),
        (dict(folds=np.zeros(ROWS)), "got dtype float64"),
        (dict(folds=np.zeros(ROWS, int)), "must train on some row"),
        (dict(folds=[([0, 1], [1, 2])]), "row 1 in both"),
        (dict(folds=[([0, 1], [200])]), "must be from 0 to 199, got 200"),
        (dict(folds=[]), "at least one pair"),
        (dict(folds=[([0, 1], [2])], shuffle=False), "shuffle needs a number"),
        (dict(groups=[1, 2]), r"groups must hold 200 labels, got shape \(2,\)"),
        (dict(groups=np.arange(ROWS) % 2), "at least 4 labels"),
        (dict(groups=LABELS, stratify=True), "StratifiedGroupKFold"),
        (dict(stratify=True), "y must hold some label at least 4 times"),
        (dict(by="nosuch"), r"by must .* \(\).*'nosuch'"),
        (dict(early_stopping_rounds=0), "early_stopping_rounds must be"),
        (dict(loss=jb.losses.logistic, y=Y + np.nan), "y must be finite"),
        (dict(max_depth=0), "max_depth must be"),
        (dict(l2=-1.0), "l2 must be"),
    ],
)
def test_errors(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        validate(**settings)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (dict(num_rounds=[1, 2]), "must not name num_rounds"),
        (dict(max_bins=[16, 32]), "must not name max_bins: all points share"),
        (dict(eta=[0.1]), r"keywords of the loss \(delta\), got 'eta'"),
        (dict(l2=1.0), r"points\['l2'\] must be a list"),
        (dict(l2=[]), "at least one point"),
        ([0.1], r"points\[0\] must be a point"),
        (0.1, "points must be"),
        (dict(l2=[-1.0]), "l2 must be"),
        (dict(delta=[0.1, 0.2]), "by must name a metric"),
    ],
)
def test_errors_of_points(points, message):
    with pytest.raises((ValueError, TypeError), match=message):
        sweep(points, jb.losses.huber)


@pytest.mark.parametrize(
    ("name", "gap"), [("groups", None), ("stratify", np.nan), ("stratify", pd.NA)]
)
def test_labels_that_are_missing_are_named(name, gap):
    labels = np.resize(np.array(["p", "q", "r"], object), ROWS)
    labels[7] = gap
    with pytest.raises(ValueError, match=rf"{name} .*label.* row 7"):
        validate(**{name: labels})
    numbers = np.where(np.arange(ROWS) == 7, np.nan, 1.0)
    with pytest.raises(ValueError, match=rf"{name} .*label.* row 7"):
        validate(**{name: numbers})


def test_errors_of_grids_streams_and_traced_rows():
    with pytest.raises(ValueError, match="equally many values"):
        sweep(dict(l2=[1.0], l1=[1.0, 2.0]), grid=False)
    rows = jb.stream(lambda: iter([(X, Y)]), memory="64 MiB")
    with pytest.raises(ValueError, match="memory"):
        validate(x=rows, y=None)
    with pytest.raises(TypeError, match=r"call jb\.boost"):
        jax.jit(lambda x: validate(x=x))(X)


def test_a_sweep_of_points_that_diverge_at_once_says_so():
    points = dict(learning_rate=[1e5, 1e6])
    with pytest.raises(RuntimeError, match="training rows is not finite after round 0"):
        sweep(
            points, lambda score, target: jnp.exp(jnp.abs(score - target)), max_depth=1
        )


def test_a_failing_metric_is_named():
    with pytest.raises(RuntimeError, match=r"metrics\['bad'\] failed in round 0 .* 0"):
        validate(metrics=dict(bad=lambda scores, targets, weights: 1 / 0))
