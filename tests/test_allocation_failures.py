# SPDX-License-Identifier: Apache-2.0
"""Kernels that run out of memory, at any allocation, report it and work again.

The build must have JBOOST_FAULTS, as those of .ci/sanitize do.
"""

import ctypes
import itertools
from contextlib import nullcontext
from functools import partial

import jax
import numpy as np
import pytest
from kernel_calls import list_functions, record_calls, run_everything
from test_predict_kernels import make_model, make_rows

import jboost as jb
from jboost.entry.decorators import is_out_of_memory
from jboost.kernels import calls, grow_cpu

HAS_FAULTS = calls.available() and hasattr(calls.LIBRARY, "jboost_fail_threads")
pytestmark = pytest.mark.skipif(not HAS_FAULTS, reason="needs JBOOST_FAULTS")
ERRORS = MemoryError, jax.errors.JaxRuntimeError, ValueError
EVER = 2**62
# What runs below, besides recorded calls; and what chooses instruction sets.
OTHERS = {
    "open_model", "close_model", "predict_here", "predict_ready", "predict_again",
    "relay", "keep_scratch", "grow_cart", "best_isa", "current_isa", "set_isa",
    "cuda_load", "cuda_error", "cuda_version", "cuda_architecture",
}  # fmt: skip


def plan(what, first, last):
    """Lets events number `first` to `last` fail; returns how many there were before."""
    function = getattr(calls.LIBRARY, f"jboost_fail_{what}")
    function.argtypes, function.restype = [ctypes.c_int64] * 2, ctypes.c_int64
    return function(first, last)


def check_failures(run, what="allocations", expect_errors=True):
    """Fails each event of a call, alone and with all later ones; returns how many.

    Every run must return the result of an undisturbed one, or raise an error; and the
    next one must return that result.
    """
    expected, failed = run(), 0
    for lasts in (False, True):
        for number in itertools.count(1):
            plan(what, number, EVER if lasts else number)
            try:
                assert_same(run(), expected)
            except ERRORS as error:
                failed += 1
                assert is_out_of_memory(error), error
            finally:
                made = plan(what, 0, 0)
            assert_same(run(), expected)
            if made < number:
                break
    assert bool(failed) == expect_errors
    return number - 1


def assert_same(found, expected):
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for one, other in leaves:
        one, other = np.asarray(one), np.asarray(other)
        assert one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.fixture(scope="module")
def recorded():
    return record_calls(run_everything)


def test_every_kernel_is_tested(recorded):
    """So that sanitizers, which run this file, see every kernel."""
    assert {call.name for call in recorded} | OTHERS == list_functions()


@pytest.mark.parametrize("kept", [False, True])
def test_recorded_calls(recorded, kept, monkeypatch):
    monkeypatch.setitem(calls._TYPES, "F", 15)  # pairs of derivatives
    for call in recorded:

        def run(call=call):  # with kept memory, twice
            with grow_cpu.keep_scratch() if kept else nullcontext():
                return [call.run() for _ in range(1 + kept)]

        check_failures(run)


@pytest.mark.parametrize("operation", [jb.predict, jb.staged_predict, jb.leaf_indices])
@pytest.mark.parametrize("size", [1, 300, 5000])
def test_models_that_are_ready(operation, size):
    x = make_rows(size, 6)

    def open_and_predict():  # codes are made in the first call that they pay for
        return operation(make_model(30, 4, 6, 2), x)

    assert check_failures(open_and_predict) > 3


def test_predictions_of_one_shape():
    model, x = make_model(30, 4, 6, 2), make_rows(3, 6)
    for _ in range(20):
        jb.predict(model, x)
    assert check_failures(partial(jb.predict, model, x)) > 0


def test_single_trees(monkeypatch):
    """A thread that cannot be started leaves its work to the others."""
    monkeypatch.setattr("jboost.kernels.grow_cpu._count_threads", lambda: 4)
    x, y = make_rows(30_000, 7), np.arange(30_000) % 97
    grow = partial(jb.cart.fit_tree, x, y, max_depth=2)
    assert check_failures(grow, "threads", expect_errors=False) == 2
    assert check_failures(grow) > 10


def make_stream(x, y):
    batches = [(x[:1500], y[:1500]), (x[1500:], y[1500:])]
    return jb.stream(batches, memory="1 GB", block_rows=500)


@pytest.mark.parametrize(
    "source", [lambda x, y: (x, y), lambda x, y: (make_stream(x, y),)]
)
def test_rounds_before_a_failure_are_kept(source):
    x = make_rows(3001, 6)
    y = np.sign(np.nan_to_num(x[:, 0])) + np.arange(3001) % 5
    fit = partial(jb.fit, num_rounds=20, max_depth=3)
    expected, history = fit(*source(x, y))

    def exhaust(number, history, model):
        if number == 2:
            plan("allocations", 1, EVER)

    with pytest.raises(jb.TrainingError, match="ran out of memory") as caught:
        try:
            fit(*source(x, y), callbacks=exhaust)
        finally:
            plan("allocations", 0, 0)
    error = caught.value
    assert 3 <= error.round == error.model.num_rounds < 20
    assert_same(error.model, jb.truncate(expected, error.round))
    assert_same(error.history.train_loss, history.train_loss[: error.round])
    for number in (1, 10, 100, 1000, 3000):
        with pytest.raises((MemoryError, jb.TrainingError)):
            try:
                plan("allocations", number, EVER)
                fit(*source(x, y))
            finally:
                made = plan("allocations", 0, 0)
        assert made >= number
    assert_same(fit(*source(x, y))[0], expected)
