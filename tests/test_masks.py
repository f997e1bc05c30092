# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics of groups that count masked rows are refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jboost as jb
from jboost.objective.group_tracing import check_loss_mask, check_metric_mask

TARGETS = np.random.default_rng(0).normal(size=7).astype(np.float32)


def squares(values, where):
    return jnp.sum(jnp.where(where, values**2, 0.0))


def forgets_the_mask(scores, targets, *, where):
    return jnp.sum((scores - targets) ** 2)


def forgets_it_in_a_maximum(scores, targets, *, where):
    return squares(scores - jnp.max(scores) - targets, where)


def forgets_it_in_a_minimum(scores, targets, *, where):
    return squares(scores - jnp.min(scores) - targets, where)


def forgets_it_beside_noise(scores, targets, *, where, key):
    return jnp.sum((scores + jax.random.normal(key, scores.shape) - targets) ** 2)


def masks(scores, targets, *, where):
    return squares(scores - targets, where)


def masks_noise(scores, targets, *, where, key):
    return squares(scores + jax.random.normal(key, scores.shape) - targets, where)


def divides_by_all_rows(scores, targets, *, where):
    return squares(scores - targets, where) / len(scores)


def check(loss, targets=TARGETS):
    check_loss_mask(loss, targets, 1, (), False)


@pytest.mark.parametrize(
    "loss",
    [
        forgets_the_mask,
        forgets_it_in_a_maximum,
        forgets_it_in_a_minimum,
        forgets_it_beside_noise,
    ],
)
def test_losses_that_count_masked_rows_are_refused(loss):
    with pytest.raises(ValueError, match=f"{loss.__name__} must not depend on rows"):
        check(loss)


def test_losses_that_leave_masked_rows_out_are_accepted():
    check(masks)
    check(masks_noise)
    for name, loss in jb.losses.GROUP_LOSSES.items():
        targets = np.array([0, 2, 1, 0, 1, 3, 0], np.float32)
        if name in ("cox", "concordance"):
            check(loss, {"time": targets + 1, "event": targets > 0})
        else:
            check(loss, targets)


def test_a_factor_is_warned_of():
    with pytest.warns(UserWarning, match="is multiplied by 0.7 where 3"):
        check(divides_by_all_rows)


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda s, t, *, where: jnp.where(where, s, 0.0), "must return a scalar"),
        (lambda s, t, *, where: np.sum(np.asarray(s)), "must be written in jax.numpy"),
        (lambda s, t, *, where: jnp.sum(s[where]), "failed on a group of 7 rows"),
    ],
)
def test_what_is_no_loss_of_a_group_is_named_before_the_mask(loss, match):
    with pytest.raises((TypeError, ValueError), match=match):
        check(loss)


@pytest.mark.parametrize("forgets", [True, False])
def test_metrics(forgets):
    def metric(scores, targets, *, where):
        good = (scores > targets) | forgets & ~where
        return jnp.sum(good & (where | forgets)) / jnp.sum(where | forgets)

    if forgets:
        with pytest.raises(ValueError, match=r"metrics\['m'\] must not depend"):
            check_metric_mask("m", metric, TARGETS, 1)
    else:
        check_metric_mask("m", metric, TARGETS, 1)
