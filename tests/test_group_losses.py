# SPDX-License-Identifier: Apache-2.0
"""Laws of every loss of groups: masks, empty groups, far scores, equal slopes."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jboost as jb

L = jb.losses
SIZE, EXTRA = 7, 3
GARBAGE = jnp.array([1e30, -3.0, 40.0], jnp.float32)
RELEVANCE = jnp.array([0, 2, 1, 0, 3, 1, 0], jnp.float32)
TIMES = dict(
    time=jnp.array([5, 2, 3, 3, 7, 1, 3], jnp.float32),
    event=jnp.array([1, 1, 0, 1, 1, 0, 1], jnp.float32),
)
ENTRIES = TIMES | dict(entry=jnp.array([0, 1, 0, 2, 4, 0, 0], jnp.float32))
SCORES = jnp.asarray(np.random.default_rng(0).normal(size=SIZE), jnp.float32)

# {name: (loss, targets, whether a common shift of the scores changes nothing)}
CASES = {
    "cox": (L.cox, TIMES, True),
    "cox_breslow": (partial(L.cox, ties="breslow"), TIMES, True),
    "cox_truncated": (L.cox, ENTRIES, True),
    "concordance": (L.concordance, TIMES, True),
    "pairwise_logistic": (L.pairwise_logistic, RELEVANCE, True),
    "listwise_softmax": (L.listwise_softmax, RELEVANCE, True),
    "list_mle": (L.list_mle, RELEVANCE, True),
    "lambda_rank": (partial(L.lambda_rank, at=3), RELEVANCE, True),
    "lambda_rank_both": (
        partial(L.lambda_rank, normalize="both"), RELEVANCE, True,
    ),
    "xendcg": (partial(L.xendcg, key=jax.random.key(0)), RELEVANCE, True),
    "approx_ndcg": (L.approx_ndcg, RELEVANCE, True),
    "bag": (L.bag, (RELEVANCE > 2).astype(jnp.float32), False),
    "bag_negative": (L.bag, jnp.zeros(SIZE), False),
    "random_intercept": (
        partial(L.random_intercept, variances=(0.5, 2.0)), RELEVANCE, False,
    ),
}  # fmt: skip
parametrize = pytest.mark.parametrize("name", CASES)


def pad(values):
    return jnp.concatenate([values, GARBAGE.astype(values.dtype)])


def derive(name, *, hessian=False):
    """A function of scores, targets and where: value, gradient, Hessian."""
    loss = CASES[name][0]

    def bound(scores, targets, where):
        return loss(scores, targets, where=where)

    functions = (bound, jax.grad(bound), jax.hessian(bound))[: 3 if hessian else 2]
    return lambda *arguments: tuple(f(*arguments) for f in functions)


@cache
def compile_all(name, hessian=True):
    """With the Hessian, for padded groups: compiled once for all tests."""
    return jax.jit(derive(name, hessian=hessian))


def measure(name, scores=SCORES, targets=None, where=True):
    """Adds masked rows that hold garbage, and removes them from the results."""
    targets = CASES[name][1] if targets is None else targets
    where = jnp.concatenate([jnp.full(SIZE, where), jnp.zeros(EXTRA, bool)])
    found = compile_all(name)(pad(scores), jax.tree.map(pad, targets), where)
    for array in found[1:]:
        assert not np.delete(array, np.s_[:SIZE], axis=0).any()
    assert not found[2][:, SIZE:].any()
    return found[0], found[1][:SIZE], found[2][:SIZE, :SIZE]


def test_every_loss_has_a_case():
    functions = {getattr(case[0], "func", case[0]) for case in CASES.values()}
    assert functions == {*L.GROUP_LOSSES.values(), L.random_intercept}


@parametrize
def test_masked_rows_change_nothing(name):
    found = measure(name)
    if name == "xendcg":  # draws other labels for another number of rows
        return
    rows = SCORES, CASES[name][1], jnp.ones(SIZE, bool)
    expected = compile_all(name, hessian=False)(*rows)
    for one, other in zip(found[:2], expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=3e-6)


@parametrize
def test_groups_without_rows_are_zero(name):
    for result in measure(name, where=False):
        assert not np.asarray(result).any()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in CASES  # the others draw equal documents together
        if name not in ("bag", "bag_negative", "list_mle", "xendcg", "random_intercept")
    ],
)
def test_groups_without_events_or_relevance_are_zero(name):
    targets = jax.tree.map(jnp.zeros_like, CASES[name][1])
    if name == "cox_truncated":
        targets["entry"] -= 1
    for result in measure(name, targets=targets):
        assert not np.asarray(result).any()


@parametrize
@pytest.mark.parametrize("size", [1.0, 50.0])
def test_far_scores_are_finite(name, size):
    scores = jnp.where(SCORES > 0, size, -size).astype(jnp.float32)
    value, gradient, hessian = measure(name, scores)
    assert np.isfinite(value) and np.isfinite(hessian).all()
    if CASES[name][2]:
        assert abs(gradient.sum()) < 1e-5 * max(1.0, np.abs(gradient).max())
        assert np.abs(hessian.sum(1)).max() < 1e-5 * max(1.0, np.abs(hessian).max())


@parametrize
def test_losses_map_over_groups(name):
    groups = jax.tree.map(lambda v: jnp.stack([v, v[::-1]]), (SCORES, CASES[name][1]))
    groups = (*groups, jnp.stack([SCORES < 9, SCORES > -0.5]))
    found = jax.jit(jax.vmap(derive(name)))(*groups)
    one = compile_all(name, hessian=False)
    for index in range(2):
        expected = one(*jax.tree.map(lambda v, i=index: v[i], groups))
        for mapped, single in zip(found, expected, strict=True):
            np.testing.assert_allclose(mapped[index], single, atol=3e-6)
