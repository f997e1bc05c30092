# SPDX-License-Identifier: Apache-2.0
"""What the host does around training: sets, stopping, metrics, callbacks, inputs."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from compilations import Compilations
from tables import ROWS, SMALL, make_columns, make_regression, same_bits

import jboost as jb
from jboost.training import chunks

pytestmark = pytest.mark.usefixtures("constant_leaves_of_file")
X, Y = make_regression()
OTHER_X, OTHER_Y = make_regression(seed=5)
SQUARES = jb.losses.squared_error


def fit(x=X, y=Y, loss=SQUARES, **settings):
    return jb.fit(x, y, loss, **{**SMALL, **settings})


def squares(model, x, y):
    """Mean squared error after each round."""
    return ((np.asarray(jb.staged_predict(model, x)) - y) ** 2).mean(1)


def test_choices_say_what_auto_stood_for():
    choices = fit()[1].choices
    assert choices["curvature"] == "exact" and choices["leaf_solver"] == "newton"
    assert choices["min_child_samples"] == ROWS // 50 and choices["num_bins"] == 256
    assert choices["l2"] == 1 and choices["parent_rows"] == 10
    assert choices["subsample"] == 0.7 and choices["rows_per_threshold"] == 100
    np.testing.assert_allclose(choices["init_score"], Y.mean(), rtol=1e-6)  # float32
    # What follows from the loss is known before the first round.
    choices = fit(loss=jb.losses.absolute_error, num_rounds=0)[1].choices
    assert choices["curvature"] == "auto" and choices["leaf_solver"] == "exact"
    assert choices["min_child_samples"] == 3 and choices["l2"] == 1
    choices = fit(loss=jb.losses.huber, num_rounds=0)[1].choices
    assert choices["leaf_solver"] == "guarded"


def test_one_validation_set():
    model, history = fit(validation=(OTHER_X, OTHER_Y), early_stopping_rounds=8)
    assert model.num_rounds == 8 and history.best_round == 7  # none to stop for
    expected = squares(model, OTHER_X, OTHER_Y)
    np.testing.assert_allclose(history.validation_loss, expected, rtol=1e-5)  # float32
    assert history.best_round == np.argmin(history.validation_loss)
    chex.assert_trees_all_equal(
        model, fit()[0]
    )  # a validation set does not change the model


def test_named_validation_sets_with_weights():
    weights = np.where(np.arange(ROWS) < 50, 2.0, 0.0)
    sets = {"first": (OTHER_X, OTHER_Y), "second": [OTHER_X, OTHER_Y, weights]}
    model, history = fit(validation=sets)
    assert list(history.validation_loss) == ["first", "second"]
    for name, rows in (("first", ROWS), ("second", 50)):
        expected = squares(model, OTHER_X[:rows], OTHER_Y[:rows])
        # float32 sums
        np.testing.assert_allclose(history.validation_loss[name], expected, rtol=1e-5)
    assert history.best_round == np.argmin(history.validation_loss["first"])


def test_validation_with_an_offset():
    offset = np.linspace(-1, 1, ROWS).astype(np.float32)
    model, history = fit(offset=offset, validation=(OTHER_X, OTHER_Y, None, offset))
    expected = squares(model, OTHER_X, OTHER_Y - offset)
    np.testing.assert_allclose(history.validation_loss, expected, rtol=1e-5)  # float32


def test_early_stopping_returns_the_best_round():
    """Targets of the validation set are noise: it is best early."""
    noise = np.random.default_rng(1).normal(size=ROWS).astype(np.float32) + Y.mean()
    settings = dict(num_rounds=60, learning_rate=0.3, validation=(OTHER_X, noise))
    model, history = fit(early_stopping_rounds=5, **settings)
    best = int(np.argmin(history.validation_loss))
    assert history.best_round == best
    assert model.num_rounds == best + 1
    assert len(history.train_loss) == len(history.validation_loss) == best + 6 < 60
    everything, full = fit(**settings)
    assert everything.num_rounds == 60
    np.testing.assert_array_equal(
        full.validation_loss[: best + 6], history.validation_loss
    )
    chex.assert_trees_all_equal(model, jb.truncate(everything, best + 1))


def test_metrics_in_jax_and_in_numpy():
    kinds = set()

    def jax_mae(scores, targets, weights):
        kinds.add(type(scores))
        return jnp.average(jnp.abs(scores - targets), weights=weights)

    def numpy_mae(scores, targets, weights):
        scores = np.asarray(scores, np.float64)
        kinds.add(type(scores))
        return float(np.average(abs(scores - targets), weights=weights))

    metrics = {"a": jax_mae, "b": numpy_mae}
    model, history = fit(metrics=metrics, validation=(OTHER_X, OTHER_Y))
    assert set(history.metrics) == {"train", "validation"}
    for name, x, y in (("train", X, Y), ("validation", OTHER_X, OTHER_Y)):
        expected = abs(np.asarray(jb.staged_predict(model, x)) - y).mean(1)
        for metric in metrics:
            values = history.metrics[name][metric]
            assert values.shape == (8,)
            np.testing.assert_allclose(values, expected, rtol=1e-5)  # float32 sums
    assert np.ndarray in kinds and any(issubclass(k, jax.core.Tracer) for k in kinds)


def test_a_failing_metric_keeps_the_model():
    def fails(scores, targets, weights):
        raise RuntimeError("no such luck")

    with pytest.raises(jb.TrainingError, match="no such luck") as caught:
        fit(metrics={"a": fails}, validation=(OTHER_X, OTHER_Y))
    assert caught.value.round == 0
    assert caught.value.model.num_rounds == 0


def test_callbacks_see_every_round_in_order():
    seen = []

    def watch(number, history, model):
        assert history.train_loss.shape == (number + 1,)
        assert model.num_rounds == number + 1
        seen.append((number, history.train_loss[-1]))

    model, history = fit(callbacks=[watch, lambda *_: None])
    assert [number for number, _ in seen] == list(range(8))
    np.testing.assert_array_equal([loss for _, loss in seen], history.train_loss)
    assert model.num_rounds == 8


def test_a_callback_stops():
    stops = []

    def stop(number, history, model):
        stops.append(number)
        return np.bool_(number == 4)

    # Every callback is called where one stops.
    model, history = fit(callbacks=[stop, lambda number, *_: stops.append(number)])
    assert model.num_rounds == len(history.train_loss) == 5
    assert stops == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    chex.assert_trees_all_equal(model, jb.truncate(fit()[0], 5))


def test_a_failing_callback_keeps_the_model():
    def fail(number, history, model):
        if number == 3:
            raise KeyError("gone")

    with pytest.raises(jb.TrainingError, match=r"in round 3: .*gone") as e:
        fit(callbacks=fail)
    assert isinstance(e.value.__cause__, KeyError)
    assert e.value.model.num_rounds == 4
    assert len(e.value.history.train_loss) == 4
    chex.assert_trees_all_equal(e.value.model, jb.truncate(fit()[0], 4))

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # passes through
        fit(callbacks=interrupt)


def test_a_loss_that_overflows_keeps_the_model():
    rates = [0.1, 0.1, 0.1, 1e30, 0.1, 0.1, 0.1, 0.1]
    with pytest.raises(jb.TrainingError, match="became inf in round 3") as caught:
        fit(learning_rate=lambda step: rates[step])
    error = caught.value
    assert error.round == 3
    assert len(error.history.train_loss) == 3
    chex.assert_tree_all_finite(error.history.train_loss)
    chex.assert_trees_all_equal(error.model, jb.truncate(fit()[0], 3))
    with pytest.warns(UserWarning, match="became inf in round 3.* ends at round 2"):
        model, history = fit(
            learning_rate=lambda step: rates[step], validation=(OTHER_X, OTHER_Y),
            early_stopping_rounds=5,
        )  # fmt: skip
    assert history.best_round == 2 and len(history.train_loss) == 3
    chex.assert_trees_all_equal(model, error.model)


def test_progress_shows_rounds_and_losses(capfd):
    fit(progress=True, validation=(OTHER_X, OTHER_Y))
    text = capfd.readouterr().err
    assert "8/8" in text and "train=" in text and "validation=" in text
    first, *_, last = text.strip().split("\r")
    assert first.startswith("compiling:") and "0/8" in first and "compil" not in last
    fit(validation=(OTHER_X, OTHER_Y))
    assert capfd.readouterr().err == ""


def make_loss(delta):
    return lambda score, target: jb.losses.huber(score, target, delta=delta)


def fit_huber(delta=1.0, x=X, y=Y, **settings):
    return jb.fit(x, y, make_loss(delta), **{**SMALL, **settings})


@pytest.fixture(scope="module")
def programs():
    """Names of what a first fit compiles: trees of another depth, and other rows."""
    with Compilations() as compilations:
        fit_huber(max_depth=2, x=X[:100], y=Y[:100])
    assert len(compilations.names) > 1
    return set(compilations.names)


def test_validation_targets_take_the_type_of_training_targets():
    counts = np.arange(ROWS) % 3
    _, floats = fit(y=counts.astype(np.float32), validation=(X, counts))
    _, integers = fit(y=counts, validation=(X, counts.astype(np.float64)))
    np.testing.assert_array_equal(floats.validation_loss, floats.train_loss)
    np.testing.assert_array_equal(integers.validation_loss, integers.train_loss)


@pytest.mark.parametrize(
    "change",
    [
        dict(delta=0.8, num_rounds=5),
        dict(num_rounds=19, learning_rate=0.05),
        dict(learning_rate=lambda step: 0.1 / (1 + step)),
        dict(l2=3.0, min_gain=0.1, min_child_weight=2.0, min_child_samples=7),
        dict(subsample=0.5, seed=3),
        dict(colsample_bytree=0.5, colsample_bylevel=0.9, colsample_bynode=0.7),
        dict(x=make_columns(9)[:195], y=1.1 * Y[:195]),
        dict(x=X.astype(np.float64), y=Y.tolist()),
        dict(),
    ],
    ids=lambda change: ", ".join(change) or "fresh lambda",
)
def test_nothing_is_compiled_again(change, programs):
    """All of these are numbers, not sizes; whether rows are sampled is no number."""
    sampled = [name for name in change if "sample_by" in name or name == "subsample"]
    fit_huber(**dict.fromkeys(sampled, 0.95))
    with Compilations() as compilations:
        fit_huber(**change)
    assert not programs & {*compilations.names}


def test_schedules_do_not_recompile_boost():
    codes = jb.apply_bins(jb.fit_bins(X), X)

    def compiled(**settings):
        with Compilations() as compilations:
            key = jax.random.key(0)
            jb.boost(codes, Y, SQUARES, key, **{"max_depth": 1, **settings})
        return compilations.names

    numbers = dict(learning_rate=lambda step: 0.3 / (1 + step), l2=2.0, subsample=0.5)
    assert compiled(num_rounds=2, subsample=0.7)  # the counter counts
    assert not compiled(num_rounds=2, **numbers)


def test_losses_of_rows_are_passed_from_round_to_round(monkeypatch):
    """They are evaluated again in each round where rows are few."""
    settings = dict(loss=jb.losses.huber, num_rounds=6, subsample=0.7)
    model, history = fit(**settings)
    monkeypatch.setattr(chunks, "FEW", 0)
    monkeypatch.setattr(chunks, "_MOST_TRIALS", 0)
    found = []
    evaluate = chunks.loss_values
    monkeypatch.setattr(
        chunks, "loss_values", lambda *rows: found.append(rows) or evaluate(*rows)
    )
    again, passed = fit(**settings)
    chex.assert_trees_all_equal(again, model)
    np.testing.assert_array_equal(passed.train_loss, history.train_loss)
    assert len(found) == 1


def with_column(values):
    x = X.copy()
    x[:, 1] = values
    return x


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize(
    "x",
    [
        with_column(7.0),
        with_column(np.nan),
        with_column(np.where(np.arange(ROWS) % 2, np.inf, -np.inf)),
        np.asfortranarray(X),
        X[::-1][::-1],
        X.tolist(),
        X.astype(np.float16),
        X.astype(">f8"),
        jnp.asarray(X),
        jnp.asarray(X, jnp.bfloat16),
        pd.DataFrame(X, columns=list("abc")),
        np.argsort(np.argsort(X, axis=0), axis=0),
        (1e4 * X).astype(np.int16),
    ],
    ids=["constant", "missing", "infinite", "Fortran", "strides", "list", "float16",
         "big-endian", "jax", "bfloat16", "pandas", "integers", "int16"],
)  # fmt: skip
def test_columns_of_every_kind_train(x):
    model, history = fit(x)
    chex.assert_tree_all_finite(history.train_loss)
    assert history.train_loss[-1] < 0.8 * np.var(Y)
    scores = np.asarray(jb.predict(model, x))
    # The model's own loss: what it predicts for the rows is what it was trained on.
    loss = ((scores - Y) ** 2).mean()
    np.testing.assert_allclose(loss, history.train_loss[-1], rtol=1e-4)
    table = np.asarray(x)
    if np.shape(table) == X.shape and np.array_equal(table.astype(np.float32), X):
        chex.assert_trees_all_equal(
            replace(model, feature_names=None), fit()[0]
        )  # the container does not matter


@pytest.mark.parametrize(
    "y",
    [
        (10 * Y).astype(int), Y > 1, Y.astype(np.float16), Y.tolist(), jnp.asarray(Y),
        pd.Series(Y), np.full(ROWS, 3.0), [np.float32(v) for v in Y],
    ],
    ids=["integers", "booleans", "float16", "list", "jax", "pandas", "one value",
         "list of scalars"],
)  # fmt: skip
def test_targets_of_every_kind_train(y):
    model, history = fit(y=y)
    values = np.asarray(y, np.float64)
    chex.assert_tree_all_finite(history.train_loss)
    assert history.train_loss[-1] <= 0.8 * np.var(values)
    if np.var(values) == 0:
        np.testing.assert_array_equal(jb.predict(model, X), values)


def test_tables_with_next_to_nothing_train():
    """No rounds, one row, no cell, two values."""
    model, history = fit()
    assert history.validation_loss is None and history.metrics == {}
    model, history = fit(num_rounds=0)
    assert model.num_rounds == 0 and history.best_round == -1
    assert history.train_loss.shape == (0,)
    np.testing.assert_allclose(jb.predict(model, X), Y.mean(), rtol=1e-6)  # float32
    model, _ = fit([[1.0, 2.0, 3.0]], [4.0])
    assert np.asarray(jb.predict(model, [[0.0, 0.0, 9.0]])).tolist() == [4.0]
    x = np.full((ROWS, 3), np.nan)
    model, history = fit(x)
    # Means of float32 sums.
    np.testing.assert_allclose(jb.predict(model, x), Y.mean(), rtol=1e-5)
    np.testing.assert_allclose(history.train_loss, np.var(Y), rtol=1e-5)
    x = X > 0
    model, history = fit(x)
    assert history.train_loss[-1] < np.var(Y)
    np.testing.assert_array_equal(jb.predict(model, x), jb.predict(model, x * 1.0))


def test_float64_values_that_collide_are_reported():
    x = X.astype(np.float64)
    x[:, 2] = 1e9 + np.arange(ROWS)
    with pytest.warns(UserWarning, match=r"column 2 of x.*200"):
        fit(x)


def test_inputs_are_left_alone():
    x, y, weights = X.copy(), Y.copy(), np.ones(ROWS)
    for array in (x, y, weights):
        array.flags.writeable = False
    fit(x, y, sample_weight=weights)
    np.testing.assert_array_equal(x, X)


@pytest.mark.usefixtures("full_search")
@pytest.mark.parametrize(("samples", "found"), [(20, True), (21, False)])
def test_counts_are_exact_where_rounding_is_stochastic(samples, found):
    rows = 40_000  # more than 2^15: gradients are rounded stochastically
    x = np.zeros((rows, 1), np.float32)
    x[:20] = 1  # the one split there is has 20 rows on a side
    y = x[:, 0] + np.linspace(0, 0.01, rows, dtype=np.float32)
    with nullcontext() if found else pytest.warns(UserWarning, match="has a split"):
        model, _ = jb.fit(
            x, y, num_rounds=1, max_depth=1, min_child_samples=samples,
            min_child_weight=0.0,
        )  # fmt: skip
    assert bool(np.isfinite(model.threshold).any()) == found


DOMAINS = [
    (jb.losses.logistic, [0, 1], 2),
    (jb.losses.focal, [0.0, 1.0], 1.5),
    (jb.losses.poisson, [0, 3], -1),
    (partial(jb.losses.tweedie, power=1.2), [0.5, 3], -1),
    (jb.losses.gamma, [1.0, 2.0], 0.0),
    (jb.losses.exponential, [-1, 1], 0),
    (jb.losses.hinge, [-1.0, 1.0], 0.5),
    (jb.losses.hinge_squared, [-1, 1], 2),
    (jb.losses.softmax, [0.0, 2.0], 0.5),
    (jb.losses.softmax, [0, 2], 3),
    (jb.losses.softmax, [0, 2], -1),
]


@pytest.mark.parametrize(("loss", "good", "bad"), DOMAINS)
def test_targets_that_a_loss_is_not_defined_for(loss, good, bad):
    """They are looked at before the first round: none need be made."""
    x, good = np.zeros((60, 1), np.float32), np.tile(good, 30)
    num_scores = 3 if loss is jb.losses.softmax else 1
    settings = dict(num_rounds=0, num_scores=num_scores, init_score=0.0)
    bad = np.where(np.arange(60) == 7, bad, good)
    name = getattr(loss, "func", loss).__name__
    message = rf"y (of batch 0 )?must contain .*{name}.* in row 7"
    with pytest.raises(ValueError, match=message):
        jb.fit(x, bad, loss, **settings)
    if (loss, np.max(bad)) not in ((jb.losses.logistic, 2), (jb.losses.softmax, 3)):
        return
    codes, key = jb.apply_bins(jb.fit_bins(x), x), jax.random.key(0)
    model, _ = jb.fit(x, good, loss, **settings)
    for call in (
        lambda: jb.fit(jb.stream([(x, bad)], memory="1 MiB"), None, loss, **settings),
        lambda: jb.boost(codes, bad, loss, key, **settings),
        lambda: jb.cross_validate(x, bad, loss, **settings),
        lambda: jb.explanation.permutation_importance(model, x, bad, loss),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for validation in ((x, bad), {"held_out": (x, bad)}):
        with pytest.raises(ValueError, match="validation.* " + message):
            jb.fit(x, good, loss, validation=validation, **settings)
    # Rows of weight 0 may hold anything; what wraps a loss is found by its values.
    jb.fit(x, bad, loss, sample_weight=np.arange(60) != 7, **settings)
    with pytest.raises(ValueError, match="row 7"):
        jb.fit(x, bad, lambda s, t: loss(s, t), **settings)


def test_a_set_named_like_the_unnamed_one_stays_named():
    x, y = np.zeros((60, 1), np.float32), np.zeros(60, np.float32)
    _, history = jb.fit(x, y, num_rounds=1, validation={"validation": (x, y)})
    assert list(history.validation_loss) == ["validation"]
    with pytest.raises(ValueError, match="other than 'train'"):
        jb.fit(x, y, num_rounds=1, validation={"train": (x, y)})


def test_boost_refuses_codes_beyond_its_bins():
    x = np.arange(600, dtype=np.float32)[:, None]
    binned = jb.apply_bins(jb.fit_bins(x, max_bins=512), x)
    with pytest.raises(ValueError, match="max_bins=256"):
        jb.boost(binned, x[:, 0], jb.losses.squared_error, jax.random.key(0))


def test_minimizers_follow_the_parameters_of_an_adaptive_loss():
    """|score - target - p| is least at target + p; p moves after the first round."""
    targets = np.repeat(np.float32([0, 5]), 30)

    def estimate(scores, targets, weights):
        spread = jnp.mean(jnp.abs(scores - 2.5))
        return jnp.where(spread < 1, 0.0, 20.0).astype(jnp.float32)

    def loss(score, target, parameter):
        return jnp.abs(score - target - parameter)

    model, _ = jb.fit(
        (targets > 0)[:, None],
        targets,
        jb.losses.adaptive(loss, estimate),
        num_rounds=2,
        learning_rate=1.0,
        init_score=2.5,
    )
    scores = jb.predict(model, np.float32([[0], [1]]))
    np.testing.assert_allclose(scores, [20, 25], rtol=1e-6)  # float32


@pytest.mark.usefixtures("full_search")
def test_leaf_values_are_those_of_all_rows_or_of_the_sample():
    run = dict(num_rounds=1, max_depth=2, learning_rate=1.0, l2=0.0, init_score=0.0)
    both = [
        jb.fit(X, Y, **run, subsample=0.5, leaf_rows=rows) for rows in ("all", "sample")
    ]
    (model, history), (sampled, with_rest) = both
    same_bits(model.threshold, sampled.threshold)
    leaves = np.asarray(jb.leaf_indices(model, X))[:, 0]
    for leaf in np.unique(leaves):
        value = np.asarray(model.leaf_value)[0, 0, leaf]
        np.testing.assert_allclose(value, Y[leaves == leaf].mean(), rtol=1e-5)
        assert value != np.asarray(sampled.leaf_value)[0, 0, leaf]
    assert history.oob_improvement is None
    assert with_rest.oob_improvement is not None
