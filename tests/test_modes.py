# SPDX-License-Identifier: Apache-2.0
"""Results do not depend on JAX's configuration.

test_routes.py says the same of models with every feature of training. ``.ci/modes``
compares all calls, in more configurations and in processes of their own.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from modes import CALLS, EVERY, SMALL, X, Y, digest

import jboost as jb

NATIVE = EVERY[0]
CHOSEN = {
    "x64": (
        lambda: jax.enable_x64(True),
        (f"model/{NATIVE}", f"sparse/{NATIVE}", "reports"),
    ),
    "nans": (lambda: jax.debug_nans(True), (f"model/{NATIVE}",)),
    "guard": (lambda: jax.transfer_guard("disallow"), (f"select/{NATIVE}",)),
}


@pytest.fixture(scope="module")
def expected():
    """The digests without a mode, made when they are first asked for."""
    return {}


@pytest.mark.parametrize(
    ("mode", "name"), [(m, name) for m, (_, names) in CHOSEN.items() for name in names]
)
def test_results_are_those_of_the_default(mode, name, expected):
    if name not in expected:
        expected[name] = digest(CALLS[name]())
    with CHOSEN[mode][0]():
        assert digest(CALLS[name]()) == expected[name]


def test_digests_tell_types_apart():
    """Otherwise a prediction in float64 would pass."""
    numbers = np.arange(3.0, dtype=np.float32)
    others = [numbers.astype(np.float64), jnp.asarray(numbers), numbers[:2], [*numbers]]
    assert len({digest(each) for each in [numbers, *others]}) == 5


# ---- 64-bit numbers of JAX -----------------------------------------------------------


@pytest.mark.parametrize("implementation", EVERY)
def test_traced_64_bit_numbers_are_rounded(implementation):
    """Rates, targets, weights and rows that the user's own program hands over."""
    use = dict(implementation=implementation)
    bins = jb.fit_bins(X, max_bins=16)
    rate = np.float32(0.3)  # the same number in both

    def run(x, y, rate):
        codes = jb.apply_bins(bins, x, **use)
        trees, scores = jb.boost(
            codes, y, jb.losses.squared_error, jax.random.key(0), sample_weight=y**2,
            offset=y / 2, learning_rate=rate, l2=rate, num_rounds=2,
            max_depth=1, **use,
        )  # fmt: skip
        model = jb.to_ensemble(trees, bins)
        return scores, model, jb.predict(model, x, **use)

    y = np.round(Y * 4) / 4  # so that squares and halves are the same, too
    with jax.enable_x64(True):
        given = jnp.asarray(X), jnp.asarray(y), jnp.float64(rate)
        assert given[0].dtype == jnp.float64
        kinds = {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(run, *given))}
        assert jnp.float64 not in kinds and jnp.int64 not in kinds
        if implementation != NATIVE:  # .ci/modes compares results of plain XLA
            return
        found = jax.jit(run)(*given)
    given = X.astype(np.float32), y.astype(np.float32), rate
    assert digest(found) == digest(jax.jit(run)(*given))


def test_losses_may_return_64_bit_numbers():
    """A user's constants are such; the loss then rounds after the last operation."""
    weights = np.array([0.25, 0.75])

    def loss(score, target):
        return jnp.sum(jnp.asarray(weights) * (score - target) ** 2)

    def train():
        with jax.numpy_dtype_promotion("standard"):
            model, history = jb.fit(X, Y, loss, **SMALL)
        return jb.predict(model, X), history.train_loss

    expected, losses = train()
    with jax.enable_x64(True):
        found, precise = train()
    assert found.dtype == expected.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(precise, losses, rtol=1e-5)
