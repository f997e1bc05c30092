# SPDX-License-Identifier: Apache-2.0
"""Training stays within stated memory, what cannot fit is refused, nothing piles up."""

import gc
import os
import subprocess
import sys
import time
import weakref
from dataclasses import fields
from pathlib import Path

import jax
import numpy as np
import pytest

import jboost as jb
from jboost.boosting.memory_needs import refuse_large_model, refuse_large_table
from jboost.boosting.settings import read_settings
from jboost.entry import memory, programs
from jboost.training import chunks, record
from jboost.training.sharded import padded_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
from limits import PLAIN, padded_size, training_memory

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 4)).astype(np.float32)
Y = X[:, 0] ** 2
LOSS = jb.losses.squared_error
CODES = jb.apply_bins(jb.fit_bins(X), X)


def fit(x=X, y=Y, loss=LOSS, **settings):
    return jb.fit(x, y, loss, **{"num_rounds": 2, "max_depth": 2, **settings})


def table(*shape):
    """Returns a table that takes the memory of one number."""
    return np.broadcast_to(np.float32(1), shape)


# ---- what is refused ----------------------------------------------------------------

LARGE = {
    "rounds": (lambda: fit(num_rounds=10**9), "num_rounds=1,000,000,000"),
    "scores": (lambda: fit(num_scores=10**5, loss=jb.losses.softmax), "100,000 scores"),
    "folds": (
        lambda: jb.cross_validate(X, Y, folds=100, num_rounds=10**7), "100 times",
    ),
    "boost": (
        lambda: jb.boost(CODES, Y, LOSS, jax.random.key(0), num_rounds=10**9), "rounds",
    ),
    "boost, deep": (
        lambda: jb.boost(
            CODES, Y, LOSS, jax.random.key(0), num_rounds=10**6, max_depth=20
        ),
        "max_depth=20",
    ),
    "rows": (lambda: fit(table(10**9, 2), table(10**9)), "1,000,000,000 rows"),
    "staged": (
        lambda: jb.staged_predict(fit(num_rounds=200)[0], table(10**8, 4)),
        "100,000,000 rows",
    ),
    "interactions": (
        lambda: jb.explanation.shap_interactions(
            fit(table(20, 3000), Y[:20])[0], table(10**5, 3000)
        ),
        "(100000, 3000, 3000, 1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_what_cannot_fit_is_refused_at_once(name, monkeypatch):
    """With the memory of a laptop; no array of these sizes is made."""
    monkeypatch.setattr(memory, "available_memory", lambda: 8 * 2.0**30)
    call, words = LARGE[name]
    begun = time.process_time()
    with pytest.raises(MemoryError) as caught:
        call()
    assert words in str(caught.value), caught.value
    assert "8.0 GiB" in str(caught.value)
    assert time.process_time() - begun < 20  # a fit of few rows, and its programs


def test_tables_beyond_32_bits_are_refused_at_once():
    rows = 2**31
    for call in (
        lambda: fit(table(rows, 1), table(rows)),
        lambda: fit(table(2**20, 2**11), np.zeros(2**20)),
        lambda: jb.cross_validate(table(rows, 1), table(rows)),
        lambda: jb.predict(fit(X[:, :1])[0], table(rows, 1)),
    ):
        with pytest.raises(ValueError, match="2\\^31 cells"):
            call()


def test_histograms_that_cannot_fit_are_refused(monkeypatch):
    x = RNG.normal(size=(3000, 8)).astype(np.float32)
    size = 64 * 8 * 256 * 2 * 4
    monkeypatch.setattr(memory, "_LITTLE", 0)
    settings: dict = dict(max_depth=7, min_child_samples=1)
    monkeypatch.setattr(memory, "total_memory", lambda: float(size))
    fit(x, x[:, 0], **settings)
    monkeypatch.setattr(memory, "total_memory", lambda: size - 1.0)
    with pytest.raises(MemoryError, match="64 nodes x 8 columns x 256 bins"):
        fit(x, x[:, 0], **settings)
    fit(x, x[:, 0], **{**settings, "max_leaves": 32})


@pytest.mark.parametrize(
    "sizes", [(10**7, 28, 1), (10**5, 5000, 1), (10**6, 28, 10), (10**8, 2, 1)]
)
def test_less_than_what_the_formula_says_is_not_refused(sizes, monkeypatch):
    rows, columns, scores = sizes
    case = {**PLAIN, "scores": scores, "loss": "logistic"}
    formula = training_memory(rows, columns, **case)
    settings = read_settings(dict(num_scores=scores, num_rounds=3))
    monkeypatch.setattr(memory, "available_memory", lambda: 0.75 * formula)
    refuse_large_table(table(rows, columns), settings)
    refuse_large_model(settings)
    monkeypatch.setattr(memory, "available_memory", lambda: formula / 20)
    with pytest.raises(MemoryError):
        refuse_large_table(table(rows, columns), settings)


def test_numbers_of_rounds_are_free_where_training_stops_early():
    noise = RNG.normal(size=200)
    stops = dict(early_stopping_rounds=1, validation=(X, noise))
    model, history = fit(num_rounds=10**9, **stops)
    assert len(history.train_loss) < 50
    model, _ = fit(num_rounds=10**9, callbacks=lambda number, *_: number == 2)
    assert model.num_rounds == 3


def test_the_limits_of_the_process_count():
    code = (
        "import resource, numpy as np, jax\n"
        "from jboost.entry.memory import available_memory, total_memory\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))\n"
        "assert available_memory() < 2**40 and total_memory() < 2**40\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))\n"
        "assert 2**27 < available_memory() <= 2**28\n"
        "assert 2**27 < total_memory() <= 2**28\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_control_groups_count(tmp_path, monkeypatch):
    """Both versions, limits of parents, and pages of files that can be given up."""
    new, old = tmp_path / "a" / "b", tmp_path / "memory" / "c"
    for folder, files in {
        new: {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": ""},
        new.parent: {
            "memory.max": "1000\n", "memory.current": "900\n",
            "memory.stat": "anon 7\nfile 300\n",
        },
        old: {
            "memory.limit_in_bytes": "700\n", "memory.usage_in_bytes": "600\n",
            "memory.stat": "cache 1\ntotal_cache 50\n",
        },
    }.items():  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    groups, read = "3:cpu:/x\n4:memory:/c\n0::/a/b\n", memory._read_text
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(
        memory, "_read_text",
        lambda path: groups if str(path) == "/proc/self/cgroup" else read(path),
    )  # fmt: skip
    assert sorted(memory._find_group_limits()) == [150.0, 400.0]


def test_available_memory_is_that_of_the_system():
    found = memory.available_memory()
    assert found is not None
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**26 < found < 64 * total


# ---- what piles up ------------------------------------------------------------------


def test_models_of_callbacks_take_the_time_of_the_new_rounds():
    """A model costs as much after 300 rounds as after 50: views, no copies."""
    models, addresses = {}, set()

    def keep(number, history, model):
        if number in (50, 280, 290):
            models[number] = model
        if number > 280:
            addresses.add(model.leaf_value.unsafe_buffer_pointer())

    model, _ = fit(num_rounds=300, max_depth=1, callbacks=keep)
    assert len(addresses) < 5
    for number, early in models.items():
        expected = jb.truncate(model, number + 1)
        for field in fields(jb.Ensemble):
            pair = getattr(early, field.name), getattr(expected, field.name)
            if field.metadata.get("static"):
                assert pair[0] == pair[1]
            else:
                jax.tree.map(np.testing.assert_array_equal, *pair)


def test_rounds_keep_the_memory_of_their_trees_only():
    """Chunks of one round: the model would keep the memory of 16."""
    model, _ = fit(num_rounds=1)
    one = sum(array.nbytes for array in jax.tree.leaves(model))

    def size(array):
        while isinstance(array, np.ndarray) and array.base is not None:
            array = array.base
        return getattr(array, "nbytes", 0)

    del model
    kept, add = [], record.Record.add

    def spy(self, trees, *rest):
        kept.append(max(map(size, jax.tree.leaves(trees))))
        add(self, trees, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record.Record, "add", spy)
        fit(num_rounds=1)
    assert max(kept) <= 4 * one < chunks.MOST_ROUNDS * one


def boom(*_):
    raise RuntimeError


@pytest.mark.parametrize(
    "settings",
    [
        dict(callbacks=boom),
        dict(metrics={"m": boom}),
        dict(loss=lambda score, target: jax.numpy.log(target) * score),
        dict(loss=lambda score, target: boom()),
        {},
    ],
    ids=["callback", "metric", "start", "loss", "none"],
)
@pytest.mark.usefixtures("young_heap")
def test_no_cycle_keeps_the_rows(settings):
    fit()
    gc.collect()
    gc.disable()
    try:
        before = sum(array.nbytes for array in jax.live_arrays())
        try:
            fit(**settings)
        except Exception as error:
            assert settings, error
        after = sum(array.nbytes for array in jax.live_arrays())
    finally:
        gc.enable()
    assert after - before < X.nbytes / 4


@pytest.mark.usefixtures("young_heap")
def test_many_fits_and_predictions_keep_nothing():
    """Neither losses nor their data nor programs; a change of memory is measured by
    experiments/limits.py."""
    model, _ = fit()
    rows, losses = np.zeros((3000, 4), np.float32), []

    def run(count):
        for number in range(count):
            scale = np.float32(1 + number / 100)

            def loss(score, target, scale=scale):
                return scale * (score - target) ** 2

            losses.append(weakref.ref(loss))
            fit(loss=loss)
            jb.predict(model, rows[: 1 + 37 * number % 3000])
        del loss
        gc.collect()
        kept = programs._programs, programs._small_programs
        return [*map(len, kept), len(jax.live_arrays())]

    assert run(2) == run(12)
    assert not any(each() for each in losses)


# ---- the formula --------------------------------------------------------------------


def test_the_formula_counts_codes_and_histograms():
    found = training_memory(10**6, 28, **PLAIN)
    assert found > 2**20 * (28 + 32 + 9 * 4) + 32 * 28 * 256 * 2 * 4
    codes = jb.parts.prepare_codes(jb.apply_bins(jb.fit_bins(X), X))
    sizes = codes.columns.nbytes + codes.packed.nbytes
    assert sizes == 200 * (4 + 8)
    for size in (100, 1000, 1025, 8192, 9000, 20_000, 10**6, 10**7):
        assert padded_size(size) == padded_rows(size)
