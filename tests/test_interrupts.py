# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any moment: what is whole is kept, and nothing else is harmed."""

import itertools
import pickle
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from tables import SMALL, make_regression, same_bits, same_histories

import jboost as jb
from jboost.sklearn import JBoostClassifier, JBoostRegressor
from jboost.training.chunks import wait_for
from jboost.training.host_loop import run_rounds

X, Y = make_regression()
ENDLESS = dict(max_depth=3, num_rounds=1_000_000)

# Python reports exceptions that are lost in callbacks of weak references and of the
# garbage collector (one press of ctrl-C of several hundred); see pressing_after.
random_moments = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@contextmanager
def pressing_after(seconds):
    """Raises KeyboardInterrupt at a moment, as Python does after ctrl-C.

    Presses again after a second.
    """
    over = False

    def press(*_):
        if not over:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        over = True
        end_alarms(before)


def end_alarms(before):
    """In this order, since an alarm that Python has not handled yet may set another.

    With the system's own handler, that one would end the process.
    """
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def press_in(round):
    """A callback during which ctrl-C is pressed."""

    def watch(number, history, model):
        if number == round:
            signal.raise_signal(signal.SIGINT)

    return watch


def stream_rows():
    batches = [(X[:120], Y[:120]), (X[120:], Y[120:])]
    return jb.stream(batches, memory="64 MiB", bins=jb.fit_bins(X))


RUNS = {
    "arrays": lambda **call: jb.fit(X, Y, **call),
    "stream": lambda **call: jb.fit(stream_rows(), **call),
    "reports": lambda **call: jb.fit(
        X, Y, **call, validation=(X[:50], Y[:50]), subsample=0.7, leaf_rows="sample",
        early_stopping_rounds=1_000_000,
        metrics={"far": lambda scores, targets, weights: jnp.max(scores)},
    ),
    "continued": lambda **call: jb.fit(X, Y, **call, model=jb.fit(X, Y, **SMALL)[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_ctrl_c_keeps_the_rounds_that_are_whole(name):
    run = RUNS[name]
    with pytest.raises(KeyboardInterrupt) as caught:
        run(**SMALL, callbacks=press_in(4))
    error = caught.value
    assert isinstance(error, jb.TrainingInterrupted)
    assert error.round == 5
    assert "no file keeps them" in str(error)
    whole, told = run(**{**SMALL, "num_rounds": 5})
    before = whole.num_rounds - 5
    # Early stopping would leave the best rounds; the error has all of them.
    assert error.model.num_rounds == before + 5
    same_bits(jb.truncate(error.model, whole.num_rounds), whole)
    same_bits(vars(error.history)["train_loss"], told.train_loss)
    same_bits(error.history.validation_loss, told.validation_loss)
    same_bits(error.history.metrics, told.metrics)


@random_moments
def test_ctrl_c_at_any_moment():
    """Between any two steps of Python: lists of the record may differ in length."""
    call = dict(
        validation=(X[:50], Y[:50]), subsample=0.7, leaf_rows="sample",
        callbacks=lambda *_: None,
    )  # fmt: skip
    jb.fit(X, Y, **SMALL, **call)
    chance, found = np.random.default_rng(0), []
    latest = 0.1
    for _ in range(60):
        if len(found) == 3:
            break
        try:
            with pressing_after(chance.uniform(0.02, latest)):
                jb.fit(X, Y, **ENDLESS, **call)
        except jb.TrainingInterrupted as error:
            found.append(error)
        except KeyboardInterrupt:
            latest *= 1.2  # a slow machine had nothing to keep yet
    assert len(found) == 3
    most = max(error.round for error in found)
    whole, told = jb.fit(X, Y, **{**SMALL, "num_rounds": most}, **call)
    for error in found:
        kept = error.round
        assert error.model.num_rounds == kept
        same_bits(error.model, jb.truncate(whole, kept))
        for name in ("train_loss", "validation_loss", "oob_improvement"):
            same_bits(getattr(error.history, name), getattr(told, name)[:kept])


def test_ctrl_c_is_seen_during_a_long_round():
    """Python handles no signals while JAX waits in the main thread."""

    @jax.jit
    def multiply(times, matrix):
        return jax.lax.fori_loop(0, times, lambda _, m: m @ matrix, matrix)

    def start(times):
        return multiply(times, jnp.eye(300))

    start(1).block_until_ready()
    begun, times = time.perf_counter(), 64
    start(times).block_until_ready()
    # At most: other processes share the machine.
    slow = start(int(0.6 * times / (time.perf_counter() - begun)))
    begun = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), pressing_after(0.1):
        wait_for(slow, 1)
    assert not slow.is_ready() and time.perf_counter() - begun < 1
    wait_for(slow, 1)
    assert slow.is_ready()
    # Elsewhere no signals come, and nothing is done about them.
    before = threading.active_count()
    other = threading.Thread(target=wait_for, args=(slow, 1))
    other.start()
    other.join()
    assert threading.active_count() <= before  # a thread of before may end meanwhile


@random_moments
def test_ctrl_c_leaves_a_checkpoint_whole(tmp_path):
    path, chance = tmp_path / "run", np.random.default_rng(1)
    call = dict(max_depth=3, checkpoint=path, checkpoint_rounds=1)
    jb.fit(X, Y, **SMALL)
    kept, delay = [], 0.05
    for number in range(12):
        if not kept or kept[-1] == kept[0]:
            delay *= 2  # a slow machine has made no round, or none since it went on
        elif number >= 4:
            break
        try:
            with pressing_after(delay * chance.uniform(0.5, 1.5)):
                jb.fit(X, Y, **call, num_rounds=100_000)
        except KeyboardInterrupt as error:
            if path.exists():
                kept.append(jb.load(path).num_rounds)
            if isinstance(error, jb.TrainingInterrupted) and kept:
                assert kept[-1] <= error.model.num_rounds
                assert f"checkpoint {str(path)!r} keeps" in str(error)
        assert {*tmp_path.iterdir()} <= {path}
    assert kept == sorted(kept) and kept[-1] > kept[0]
    final = kept[-1] + 2
    model, history = jb.fit(X, Y, **call, num_rounds=final)
    whole, told = jb.fit(X, Y, max_depth=3, num_rounds=final)
    same_bits(model, whole)
    same_histories(history, told)


def test_an_interrupt_of_tracing_clears_jaxs_caches():
    """Which it may have damaged; other interrupts leave them."""
    other = jax.jit(lambda number: number + 1)
    for loss, kept in ((None, 1), (press_in_loss, 0)):
        other(1.0)
        with pytest.raises(KeyboardInterrupt):
            if loss is None:
                jb.fit(X, Y, **SMALL, callbacks=[press_in(1)])
            else:
                jb.fit(X, Y, loss, **SMALL)
        assert other._cache_size() == kept


def press_in_loss(score, target):
    raise KeyboardInterrupt


def press_in_fit(_, frame):
    """Ctrl-C in ``fit``, but not in the code of JAX; elsewhere it would end the tests.

    JAX's caches do not survive an exception in each of their instructions.
    """
    while frame is not None and frame.f_code is not run_rounds.__code__:
        if "jax" in Path(frame.f_code.co_filename).parts:
            return
        frame = frame.f_back
    if frame is not None:
        raise KeyboardInterrupt


def test_more_presses_harm_nothing(tmp_path, monkeypatch):
    """Of which some come while the first one is handled.

    A person presses a few times in a row, not a thousand times a second: Python's locks
    do not survive an exception in each of their instructions.
    """
    # Some come in callbacks of the garbage collector, where they are lost.
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: None)
    call = dict(max_depth=3, checkpoint=tmp_path / "run", checkpoint_rounds=1)
    jb.fit(X, Y, **call, num_rounds=2)
    chance, kinds = np.random.default_rng(2), []

    def press_again(number, frame):
        signal.setitimer(signal.ITIMER_REAL, next(delays))
        press_in_fit(number, frame)

    before = signal.signal(signal.SIGALRM, press_again)
    for _ in range(5):
        few = [*chance.uniform(1e-4, 2e-3, size=2)]
        delays = itertools.chain(few, itertools.repeat(0.05))
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.03, 0.1))
        try:
            jb.fit(X, Y, **call, num_rounds=100_000)
        except KeyboardInterrupt as error:
            kinds.append(type(error))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    end_alarms(before)
    assert len(kinds) == 5
    number = jb.load(tmp_path / "run").num_rounds
    model, _ = jb.fit(X, Y, **call, num_rounds=number + 1)
    same_bits(model, jb.fit(X, Y, max_depth=3, num_rounds=number + 1)[0])
    assert {*tmp_path.iterdir()} == {tmp_path / "run"}


def test_cross_validation_and_sweeps_keep_their_rounds():
    call = dict(folds=2, max_depth=3)
    points = dict(max_depth=[2, 3], l2=[1.0, 2.0])  # two programs
    jb.cross_validate(X, Y, **call, num_rounds=1)
    with pytest.raises(jb.TrainingInterrupted) as caught, pressing_after(0.25):
        jb.cross_validate(X, Y, **call, num_rounds=100_000, return_models=True)
    error = caught.value
    found = error.result
    assert (error.model, error.history) == (None, None)
    assert 0 < error.round == len(found.mean) < 100_000
    whole = jb.cross_validate(X, Y, **call, num_rounds=error.round, return_models=True)
    same_bits(
        *[{k: v for k, v in vars(each).items() if k != "by"} for each in (found, whole)]
    )
    first = points | dict(max_depth=[2])
    jb.sweep(X, Y, jb.losses.squared_error, first, **call, num_rounds=1)
    with pytest.raises(jb.TrainingInterrupted) as caught, pressing_after(0.25):
        jb.sweep(X, Y, jb.losses.squared_error, points, **call, num_rounds=100_000)
    found = caught.value.result
    assert found.best in (0, 1)
    assert (found.best_rounds[2:] == -1).all() and (found.best_rounds[:2] >= 0).all()
    assert np.isnan(found.validation_loss[2:]).all()
    # Points that run side by side may be interrupted within one chunk of rounds.
    known = np.isfinite(found.validation_loss[:2])
    assert known[..., 0].all() and (known[..., 1:] <= known[..., :-1]).all()
    assert "nan" in str(found)


def test_errors_survive_the_way_between_processes():
    """joblib's pool breaks where an error cannot be read."""

    def fail(number, history, model):
        if number == 2:
            raise ValueError("own")

    for kind, callback in ((jb.TrainingError, fail), (KeyboardInterrupt, press_in(2))):
        with pytest.raises(kind) as caught:
            jb.fit(X, Y, **SMALL, callbacks=callback)
        error: Any = caught.value
        error.add_note("a note")
        other = pickle.loads(pickle.dumps(error))
        assert type(other) is type(error) and str(other) == str(error)
        assert other.round == error.round and other.__notes__ == ["a note"]
        same_bits(other.model, error.model)
        same_histories(other.history, error.history)


def test_an_estimator_keeps_the_rounds_and_no_older_model():
    labels = np.where(Y > 1, "high", "low")
    estimator = JBoostClassifier(callbacks=press_in(2), **SMALL)
    with pytest.raises(NotFittedError):
        estimator.predict(X)
    with pytest.raises(jb.TrainingInterrupted) as caught:
        estimator.fit(X, labels)
    assert estimator.n_iter_ == len(estimator.history_.train_loss) == 3
    same_bits(estimator.get_booster(), caught.value.model)
    expected = JBoostClassifier(max_depth=3, num_rounds=3).fit(X, labels).predict(X)
    np.testing.assert_array_equal(estimator.predict(X), expected)
    # What cannot be trained leaves no model of other rows behind.
    regressor = JBoostRegressor(**SMALL).fit(X, Y)
    with pytest.raises(ValueError):
        regressor.fit(X[:, :2], np.full(len(Y), np.nan))
    with pytest.raises(NotFittedError):
        regressor.predict(X)
