# SPDX-License-Identifier: Apache-2.0
"""Calls at once: from threads, from an asyncio server, from joblib's processes."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import jax
import joblib
import numpy as np
import pytest
from joblib.externals.loky import get_reusable_executor
from sklearn.model_selection import cross_val_score
from tables import SMALL, make_regression, same_bits

import jboost as jb
from jboost.entry import programs
from jboost.sklearn import JBoostRegressor

X, Y = make_regression()
BINS = jb.fit_bins(X)


def fourth_power(score, target):
    return (score - target) ** 4


CALLS = {
    "sampled": lambda: jb.fit(X, Y, fourth_power, subsample=0.7, **SMALL)[0],
    "stream": lambda: jb.fit(
        jb.stream([(X[:90], Y[:90]), (X[90:], Y[90:])], memory="64 MiB", bins=BINS),
        **SMALL,
    )[0],
}


@pytest.fixture(scope="module")
def alone():
    """What each call returns by itself."""
    return {name: call() for name, call in CALLS.items()}


def test_threads_that_fit_and_predict_at_once_get_what_each_gets_alone(alone):
    scores = {
        name: (jb.predict(model, X), jb.predict(model, X[:2]))
        for name, model in alone.items()
    }
    with programs._lock:  # all compile again, at once
        programs._programs.clear()
        programs._small_programs.clear()

    def work(number):
        name = [*CALLS][number % len(CALLS)]
        same_bits(CALLS[name](), alone[name])
        for name, model in alone.items():
            found = jb.predict(model, X), jb.predict(model, X[:2])
            same_bits(found, scores[name])

    with ThreadPoolExecutor(6) as pool:
        assert [*pool.map(work, range(6))] == [None] * 6


def test_a_server_predicts_while_it_trains(alone):
    model = alone["sampled"]
    scores = np.asarray(jb.predict(model, X))

    async def answer(number):
        if number % 2:
            return jb.predict(model, X[:number])
        return await asyncio.to_thread(jb.predict, model, X[:number])

    async def serve():
        training = asyncio.to_thread(CALLS["sampled"])
        return await asyncio.gather(training, *map(answer, range(1, 60)))

    trained, *answers = asyncio.run(serve())
    same_bits(trained, alone["sampled"])
    for number, found in enumerate(answers, 1):
        same_bits(np.asarray(found), scores[:number])


def fail(number, history, model):
    if number == 2:
        raise ValueError("own")


def test_workers_of_joblib_return_scores_and_errors():
    estimator = JBoostRegressor(**SMALL)
    expected = cross_val_score(estimator, X, Y, cv=2)
    with joblib.parallel_config("threading"):
        found = cross_val_score(estimator, X, Y, cv=2, n_jobs=2)
    np.testing.assert_array_equal(found, expected)
    with get_reusable_executor(max_workers=1) as pool:  # joblib itself starts two
        found = pool.submit(cross_val_score, estimator, X, Y, cv=2).result()
        np.testing.assert_array_equal(found, expected)
        with pytest.raises(jb.TrainingError, match="own") as caught:
            pool.submit(jb.fit, X, Y, callbacks=fail, **SMALL).result()
    assert caught.value.model.num_rounds == len(caught.value.history.train_loss) == 3
    same_bits(
        jax.tree.map(np.shape, caught.value.model),
        jax.tree.map(np.shape, jb.fit(X, Y, **{**SMALL, "num_rounds": 3})[0]),
    )
