# SPDX-License-Identifier: Apache-2.0
"""Adaptive losses: which parameters are used, reported and returned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import ROWS, make_regression, same_histories

import jboost as jb

pytestmark = pytest.mark.usefixtures("constant_leaves_of_file")
X, Y = make_regression()
X = np.clip(np.round(2 * X) / 2, -2, 2)  # the same values in all parts of the rows
HELD_OUT = np.arange(ROWS) % 3 == 0
RUN = dict(max_depth=3, learning_rate=0.3, num_rounds=12)


def spread(scores, targets, weights):
    square = jnp.sum(weights * jnp.square(scores - targets)) / jnp.sum(weights)
    return {"scale": jnp.sqrt(square)}


def normal(score, target, parameters):
    ratio = (score - target) / parameters["scale"]
    return jnp.log(parameters["scale"]) + jnp.square(ratio) / 2


NORMAL = jb.losses.adaptive(normal, spread)
FIRST = jb.losses.adaptive(normal, spread, report="first")


def scale_of(scores, rows):
    return np.sqrt(np.mean((scores - Y)[..., rows] ** 2, axis=-1))


def losses_of(scores, rows, scale):
    square = np.mean((scores - Y)[..., rows] ** 2, axis=-1)
    return np.log(scale) + square / scale**2 / 2


def fit(loss, **settings):
    """Training on the rows that are not held out, and the scores of all rounds."""
    model, history = jb.fit(
        X, Y, loss, sample_weight=np.where(HELD_OUT, 0, 1),
        validation=(X[HELD_OUT], Y[HELD_OUT]), **(RUN | settings),
    )  # fmt: skip
    return model, history, np.asarray(jb.staged_predict(model, X), np.float64)


@pytest.mark.parametrize(("loss", "reports_first"), [(NORMAL, False), (FIRST, True)])
def test_losses_are_reported_at_the_parameters_asked_for(loss, reports_first):
    model, history, stages = fit(loss)
    scale = scale_of(stages, ~HELD_OUT)
    reported = scale
    if reports_first:
        reported = scale_of(np.full(ROWS, float(model.init_score)), ~HELD_OUT)
    for found, rows in (
        (history.train_loss, ~HELD_OUT), (history.validation_loss, HELD_OUT),
    ):  # fmt: skip
        expected = losses_of(stages, rows, reported)
        np.testing.assert_allclose(found, expected, rtol=1e-4)  # float32
    # Those of the last round, whatever is reported.
    np.testing.assert_allclose(history.parameters["scale"], scale[-1], rtol=1e-5)


def test_early_stopping_ends_where_the_likelihood_is_best():
    """Reported at the first scale, the loss improves for longer."""
    settings = dict(num_rounds=60, early_stopping_rounds=5)
    model, history, stages = fit(NORMAL, **settings)
    assert model.num_rounds == history.best_round + 1 < len(history.train_loss) < 60
    kept = scale_of(stages[-1], ~HELD_OUT)
    np.testing.assert_allclose(history.parameters["scale"], kept, rtol=1e-5)
    assert fit(FIRST, **settings)[0].num_rounds > model.num_rounds


def test_callbacks_and_errors_see_the_parameters_of_their_round():
    seen = []

    def watch(number, history, model):
        seen.append(float(history.parameters["scale"]))
        if number == 3:
            raise RuntimeError("stop")

    with pytest.raises(jb.TrainingError) as caught:
        fit(NORMAL, callbacks=watch)
    _, _, stages = fit(NORMAL)
    np.testing.assert_allclose(seen, scale_of(stages[:4], ~HELD_OUT), rtol=1e-5)
    assert caught.value.history.parameters["scale"] == np.float32(seen[-1])
    _, history, _ = fit(NORMAL, num_rounds=0)
    np.testing.assert_allclose(
        history.parameters["scale"], np.std(Y[~HELD_OUT]), rtol=1e-5
    )


def test_folds_report_and_return_their_own_parameters():
    folds = [(~HELD_OUT, HELD_OUT)]
    result = jb.cross_validate(X, Y, NORMAL, folds=folds, **RUN)
    _, history, stages = fit(NORMAL)
    np.testing.assert_allclose(result.train_loss[0], history.train_loss, rtol=1e-5)
    np.testing.assert_allclose(
        result.validation_loss[0], history.validation_loss, rtol=1e-5
    )
    best = scale_of(stages[result.best_round], ~HELD_OUT)
    np.testing.assert_allclose(result.parameters["scale"], [best], rtol=1e-5)


def test_the_state_holds_the_current_parameters():
    binned = jb.apply_bins(jb.fit_bins(X), X)
    state = jb.init(binned, Y, FIRST, jax.random.key(0))
    np.testing.assert_allclose(state.parameters["scale"], np.std(Y), rtol=1e-5)
    first = state.parameters
    for _ in range(2):
        state, _ = jb.boost_step(state, binned, Y, FIRST, max_depth=3)
        scores = np.asarray(state.scores, np.float64).reshape(ROWS)
        expected = scale_of(scores, slice(None))
        np.testing.assert_allclose(state.parameters["scale"], expected, rtol=1e-5)
    assert state.first_parameters == first


def test_a_stream_gives_the_parameters_of_memory():
    _, expected = jb.fit(X, Y, NORMAL, subsample=0.7, **RUN)
    batches = jb.streams.array_batches(X, Y, batch_rows=70)
    _, found = jb.fit(
        jb.stream(batches, memory="64 MiB"), loss=NORMAL, subsample=0.7, **RUN
    )
    same_histories(found, expected)


def probabilities(score, cuts):
    above = jax.nn.sigmoid(score - cuts)
    return jnp.append(1.0, above) - jnp.append(above, 0.0)


def ordinal(score, target, cuts):
    """Proportional odds: the logits of being above each cut differ by constants."""
    return -jnp.log(probabilities(score, cuts)[target.astype(jnp.int32)])


def fit_cuts(scores, targets, weights):
    """Each cut makes the mean probability above it the share above it; bisection."""

    def share(values):
        return jnp.sum(weights * values) / jnp.sum(weights)

    def one(cut):
        wanted = share((targets > cut).astype(jnp.float32))

        def halve(_, ends):
            low, high = ends
            middle = (low + high) / 2
            enough = share(jax.nn.sigmoid(scores - middle)) > wanted
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

        ends = jnp.float32(-20), jnp.float32(20)
        return sum(jax.lax.fori_loop(0, 30, halve, ends)) / 2

    return jax.vmap(one)(jnp.arange(2))


def test_an_ordinal_model_gives_probabilities():
    grades = np.digitize(Y, [0.5, 2.0])
    model, history = jb.fit(
        X, grades, jb.losses.adaptive(ordinal, fit_cuts), init_score=0.0, **RUN
    )
    assert history.train_loss[-1] < history.train_loss[0] < np.log(3)
    found = jb.predict(
        model, X, inverse_link=lambda score: probabilities(score, history.parameters)
    )
    assert found.shape == (ROWS, 3)
    chosen = np.asarray(found)[np.arange(ROWS), grades]
    np.testing.assert_allclose(-np.mean(np.log(chosen)), history.train_loss[-1], 1e-4)
    share = np.bincount(grades) / ROWS  # as fit_cuts makes it
    np.testing.assert_allclose(np.mean(found, axis=0), share, atol=1e-4)


def test_huber_learns_from_targets_that_are_mostly_equal():
    """Its delta is the least |r| that is not 0 where the quantile is 0."""
    loss = jb.losses.make_adaptive_huber(alpha=0.5)
    scores, weights = np.zeros(5, np.float32), np.float32([1, 1, 1, 1, 0])
    for targets, expected in (
        ([0, 0, 0, 3, 1], 3), ([0, 0, -2, 3, 1], 2), ([0, 4, 5, 6, 1], 4),
        ([0, 0, 0, 0, 1], 1),
    ):  # fmt: skip
        assert loss.estimate(scores, np.float32(targets), weights) == expected
    zeros = X[:, 0] < 1.2
    y = np.where(zeros, 0, 5 + X[:, 1])
    assert np.mean(zeros) > 0.85
    recipe = jb.recipes.m_tree_boost(alpha=0.8)
    model, history = jb.fit(X, y, **(RUN | recipe))
    assert history.train_loss[-1] < 0.05 * history.train_loss[0]
    assert np.mean(abs(jb.predict(model, X) - y)) < 0.1 * np.mean(abs(y))


def test_report_is_checked():
    with pytest.raises(ValueError, match=r"report .*'last'"):
        jb.losses.adaptive(normal, spread, report="last")
