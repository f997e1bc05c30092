# SPDX-License-Identifier: Apache-2.0
"""The implementation in force: who sets it, who sees it, and which program runs."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_predict_kernels import make_model, make_rows

import jboost as jb
from jboost.entry import programs
from jboost.entry.context import current_implementation, use_implementation
from jboost.kernels import calls
from jboost.numerics.exact import sum_rows

pytestmark = pytest.mark.skipif(not calls.available(), reason="no CPU kernels")
MODEL, X = make_model(4, 3, 5), jnp.asarray(make_rows(40, 5))
Y = np.arange(40, dtype=np.float32) % 7
BINNED = jb.apply_bins(jb.fit_bins(X), X)
SQUARED = jb.losses.squared_error


def train(rate, **how):
    return jb.boost(
        BINNED, Y, SQUARED, jax.random.key(0), num_rounds=2, max_depth=2,
        learning_rate=rate, **how,
    )  # fmt: skip


def calls_kernels(function, *operands):
    return "jboost_" in jax.jit(function).lower(*operands).as_text()


def test_blocks_may_be_nested_and_left_by_errors():
    assert current_implementation() is None
    with use_implementation("xla"):
        with pytest.raises(RuntimeError), use_implementation("cpu"):
            assert current_implementation() == "cpu"
            raise RuntimeError
        assert current_implementation() == "xla"
        with use_implementation(None):
            assert current_implementation() is None
    assert current_implementation() is None


def test_a_public_function_sets_it_for_itself():
    """None leaves the implementation of the caller in force."""

    def total(implementation):
        return jb.predict(MODEL, X, implementation=implementation).sum()

    with use_implementation("xla"):
        assert not calls_kernels(partial(total, None))
        assert calls_kernels(partial(total, "cpu"))
        assert current_implementation() == "xla"
    with pytest.raises(ValueError, match="implementation"):
        jb.predict(MODEL, X, implementation="gpu")
    assert current_implementation() is None


def test_another_thread_has_its_own():
    with ThreadPoolExecutor(1) as pool, use_implementation("xla"):
        assert pool.submit(current_implementation).result() is None
        assert pool.submit(calls_kernels, sum_rows, X).result()
        assert not calls_kernels(sum_rows, X)


def test_plain_xla_under_vmap():
    """Rules of ``vmap`` that run after ``boost`` has returned choose nothing else."""
    rates = jnp.array([0.1, 0.5])
    plain = partial(train, implementation="xla")
    run = jax.vmap(jax.jit(plain))
    assert not calls_kernels(run, rates)
    assert not calls_kernels(jax.vmap(plain), rates)
    expected = jax.vmap(partial(train, implementation="cpu"))(rates)
    chex.assert_trees_all_equal(run(rates), expected)


@pytest.mark.parametrize("inner", ["xla", "cpu"])
@pytest.mark.parametrize("outer", ["xla", "cpu"])
def test_derivatives_use_what_the_call_named(inner, outer):
    """The rule of a jitted ``predict`` runs after ``predict`` has returned."""
    total = jax.jit(lambda model: jb.predict(model, X, implementation=inner).sum())
    with use_implementation(outer):
        slope = jax.grad(total, allow_int=True)
        assert calls_kernels(slope, MODEL) == (inner == "cpu")


@pytest.mark.parametrize(
    "run",
    [
        lambda **how: jb.predict(MODEL, X, **how),
        lambda **how: jb.staged_predict(MODEL, X, **how),
        lambda **how: jb.leaf_indices(MODEL, X, **how),
        lambda **how: jb.apply_bins(jb.fit_bins(np.asarray(X)), X, **how),
    ],
    ids=["predict", "staged_predict", "leaf_indices", "apply_bins"],
)
def test_plain_xla_calls_no_kernel(run):
    assert not calls_kernels(partial(run, implementation="xla"))
    assert calls_kernels(partial(run, implementation="cpu"))


def test_equal_shapes_do_not_share_programs():
    texts = []
    for name in ("xla", "cpu", None):
        with use_implementation(name):
            stored = programs.compiled(sum_rows).jitted(X)
            lowered = stored.lower(X)
            texts.append([lowered.as_text(), lowered.compile().as_text()])
            assert programs.compiled(sum_rows).jitted(X) is stored
    for jitted, ready in zip(*texts[:2], strict=True):
        assert "jboost_" not in jitted and "jboost_" in ready
    assert all("jboost_" in text for text in texts[2])


@pytest.mark.parametrize("implementation", ["cpu", None])
def test_callbacks_choose_for_themselves(implementation):
    seen = []
    jb.fit(
        np.asarray(X), Y, num_rounds=1, max_depth=1, implementation=implementation,
        callbacks=lambda *_: seen.append(current_implementation()),
    )  # fmt: skip
    assert seen == [None] and current_implementation() is None
