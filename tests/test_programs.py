# SPDX-License-Identifier: Apache-2.0
"""Programs that are compiled take memory: how many there are is bounded."""

import gc
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import Compilations
from implementations import needs_cpu_kernels
from test_predict_kernels import make_model, make_rows

import jboost as jb
from jboost.entry import programs as executables
from jboost.kernels import calls, prediction
from jboost.model import ensemble
from jboost.streams.folders import added_bytes
from jboost.trees.tree import LeafSums

SIZES = np.random.default_rng(0).integers(1, 2000, 60)
ROWS = make_rows(2000, 5)
TARGETS = np.arange(2000, dtype=np.float32) % 7
MODEL = make_model(9, 3, 5)
COVER = np.ones(MODEL.leaf_value.shape, np.float32)
MODEL = replace(MODEL, sums=LeafSums(COVER, COVER, COVER, COVER[..., 0]))
BINS = jb.fit_bins(ROWS)


def stream_rows(x):
    pairs = [(rows, TARGETS[: len(rows)]) for rows in (x[len(x) // 2 :], x)]
    return jb.stream(pairs, memory="1 MiB")


OPERATIONS = {
    "predict": lambda x: jb.predict(MODEL, x),
    "offset": lambda x: jb.predict(MODEL, x, offset=TARGETS[: len(x)]),
    "columns": lambda x: jb.predict(MODEL, np.asfortranarray(x)),
    "float64": lambda x: jb.predict(MODEL, x.astype(np.float64)),
    "batches": lambda x: jb.predict(MODEL, stream_rows(x)),
    "jax": lambda x: jb.predict(MODEL, jax.device_put(x)),
    "truncate": lambda x: jb.predict(jb.truncate(MODEL, len(x) % 9 + 1), x),
    "staged_predict": lambda x: jb.staged_predict(MODEL, x),
    "leaf_indices": lambda x: jb.leaf_indices(MODEL, x),
    "shap_values": lambda x: jb.shap_values(MODEL, x, offset=TARGETS[: len(x)]),
    "shap_interactions": lambda x: jb.explanation.shap_interactions(MODEL, x[:50]),
    "partial_dependence": lambda x: jb.partial_dependence(MODEL, x, 1, grid=[0, 1]),
    "fit_bins": lambda x: jb.fit_bins(x),
    "apply_bins": lambda x: jb.apply_bins(BINS, x),
}


@needs_cpu_kernels
@pytest.mark.parametrize("run", OPERATIONS.values(), ids=OPERATIONS)
def test_no_program_depends_on_the_number_of_rows(run):
    for repeated in (prediction._find_kind, ensemble._find_shape):
        repeated.cache_clear()  # other tests may have repeated a size
    run(ROWS[:3])
    with Compilations() as compilations:
        for size in SIZES:
            run(ROWS[:size])
    assert not compilations.names


def test_links_are_compiled_for_few_sizes():
    """Powers of four from 64 to 2,048 are four sizes of this one operation."""
    model, link = make_model(2, 2, 5, num_scores=2), lambda score: jnp.expm1(score[0])
    jb.predict(model, ROWS)
    with Compilations() as compilations:
        for size in SIZES:
            found = jb.predict(model, ROWS[:size], inverse_link=link)
            assert found.shape == (size,)
    assert sum("expm1" in name for name in compilations.names) <= 4
    score = np.asarray(jb.predict(model, ROWS[:size])[:, 0])
    np.testing.assert_allclose(found, np.expm1(score), rtol=1e-5)


def test_links_of_many_rows_are_computed_in_blocks(monkeypatch):
    monkeypatch.setattr("jboost.model.scores._LINKED_ROWS", (4, 16))
    for size in (4, 17, 50):
        scores = jb.staged_predict(MODEL, ROWS[:size])
        linked = jb.staged_predict(MODEL, ROWS[:size], inverse_link=jnp.negative)
        np.testing.assert_array_equal(linked, -scores)


def test_permutation_importance_shares_programs():
    def measure(size):
        return jb.explanation.permutation_importance(
            MODEL, ROWS[:size], TARGETS[:size], num_repeats=1
        )

    measure(190)
    with Compilations() as compilations:
        for size in (177, 185, 192):
            measure(size)
    assert not compilations.names


# ---- the store ----


def add_up(x):
    return jnp.sum(jnp.sort(x) * 2)


def count_maps():
    return len(Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("measured", [False, True])
def test_programs_that_are_not_used_are_released(monkeypatch, measured):
    monkeypatch.setattr(executables, "MOST_PROGRAMS", 2)

    def use(size):
        x = np.ones(size, np.float32)
        run = executables.compiled(add_up)
        if measured:
            added_bytes(run, x)
        assert run(x) == 2 * size

    before = count_maps()
    use(3)
    one = count_maps()
    for size in range(4, 16):
        use(size)
    assert len(executables._programs) == 2
    # Without an end each of them would have mappings of its own.
    assert count_maps() - one <= max(6, 2 * (one - before))


def test_the_least_recently_used_program_is_released_first(monkeypatch):
    monkeypatch.setattr(executables, "MOST_PROGRAMS", 2)
    run = executables.compiled(add_up)
    one, two, three = (np.ones(size, np.float32) for size in (21, 22, 23))
    for x in (one, two, one, three):
        run(x)
    with Compilations() as compilations:
        run(one)
        run(three)
    assert not compilations.names
    with Compilations() as compilations:
        run(two)
    assert len(compilations.names) == 1


def test_a_program_that_was_measured_is_not_compiled_again():
    x = np.ones(31, np.float32)
    run = executables.compiled(add_up)
    assert added_bytes(run, jax.ShapeDtypeStruct(x.shape, x.dtype)) > 0
    with Compilations() as compilations:
        assert run(x) == 62
    assert not compilations.names


def test_the_programs_of_a_fit_can_be_released(monkeypatch):
    x = np.arange(20.0)[:, None]
    _, expected = jb.fit(x, x[:, 0], num_rounds=3, max_depth=1)
    monkeypatch.setattr(executables, "MOST_PROGRAMS", 0)
    executables.compiled(add_up)(np.ones(1, np.float32))
    _, history = jb.fit(x, x[:, 0], num_rounds=3, max_depth=1)
    assert not executables._programs
    np.testing.assert_array_equal(history.train_loss, expected.train_loss)


def test_host_calls_work_inside_a_trace():
    """Binning NumPy's memory while something else is being traced gives numbers."""
    expected = jb.apply_bins(BINS, ROWS[:9])

    @jax.jit
    def trace(number):
        assert isinstance(jb.fit_bins(ROWS[:9]).thresholds, np.ndarray)
        return number + jb.apply_bins(BINS, ROWS[:9])

    np.testing.assert_array_equal(trace(0), expected)


# ---- memory of users ----


def is_released(make, use):
    """Whether what ``make()`` gives dies after ``use`` of it."""
    thing = make()
    use(thing)
    known = weakref.ref(thing)
    del thing
    gc.collect()
    return known() is None


def make_metric():
    return lambda scores, targets, weights: jnp.sum(weights * jnp.abs(scores - targets))


def fit_with_metric(metric):
    x = np.arange(20.0)[:, None]
    pair = (x, x[:, 0])
    _, history = jb.fit(
        *pair, num_rounds=3, max_depth=1, validation=pair, metrics={"own": metric}
    )
    assert len(history.metrics["train"]["own"]) == 3


def make_link():
    return jax.jit(lambda score: 2 * score)


def predict_with_link(link):
    for _ in range(2):
        doubled = jb.predict(MODEL, ROWS[:5], inverse_link=link)
        np.testing.assert_array_equal(doubled, 2 * jb.predict(MODEL, ROWS[:5]))


@pytest.mark.parametrize(
    "make, use",
    [
        (make_metric, fit_with_metric),
        (make_link, predict_with_link),
        (lambda: replace(MODEL), lambda model: jb.predict(model, ROWS[:5])),
    ],
    ids=["metric", "link", "model"],
)
def test_what_users_pass_is_released(make, use, young_heap):
    assert is_released(make, use)


def test_models_are_read_anew():
    """Neither a model made from another, nor arrays that change, are mixed up."""
    expected = np.asarray(jb.predict(MODEL, ROWS[:5])) - MODEL.init_score
    other = replace(MODEL, leaf_value=2 * MODEL.leaf_value, init_score=jnp.zeros(()))
    np.testing.assert_allclose(jb.predict(other, ROWS[:5]), 2 * expected, rtol=1e-5)
    changing = jax.tree.map(np.array, other)
    jb.predict(changing, ROWS[:5])
    changing.leaf_value[:] = 0
    np.testing.assert_array_equal(jb.predict(changing, ROWS[:5]), 0)


def test_truncated_models_do_not_keep_the_whole():
    short = jb.truncate(MODEL, 1)
    for part, whole in zip(*map(jax.tree.leaves, (short, MODEL)), strict=True):
        if part.size < whole.size:
            assert not np.shares_memory(np.asarray(part), np.asarray(whole))


@needs_cpu_kernels
@pytest.mark.parametrize("where", ["call", "wait"])
def test_interrupted_calls_keep_their_memory(monkeypatch, where):
    waits = []

    class Running:
        def block_until_ready(self):
            waits.append(0)
            if len(waits) == 1:
                raise KeyboardInterrupt

    def relay(address):
        if where == "call":
            raise KeyboardInterrupt
        return Running()

    monkeypatch.setattr(calls, "_relay", relay)
    monkeypatch.setattr(calls, "_abandoned", [])
    many = np.tile(ROWS, (20, 1))  # few rows need no threads of JAX
    with pytest.raises(KeyboardInterrupt):
        jb.predict(MODEL, many)
    assert len(waits) == 2 or len(calls._abandoned) == 1
