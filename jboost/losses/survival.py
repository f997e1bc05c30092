# SPDX-License-Identifier: Apache-2.0
"""Losses of survival times, for one group of rows.

In: scores [G], and targets with the time of each row and whether it had the event then
(1) or was censored (0); larger scores mean higher risk and shorter times. Out: one
number. With one group for all rows these are the usual losses; with a group for each
stratum, rows are compared only within their stratum.
"""

import math

import jax
import jax.numpy as jnp

from jboost.losses.group_targets import check_names
from jboost.losses.groups import clear, log, softplus, weigh_rows
from jboost.losses.parameters import built_in
from jboost.losses.risk_sets import Ties, check_ties, find_risk_sets, sum_risks

# Risks are scaled to exp(-RANGE / 2) .. exp(RANGE / 2), whose sums float32 can hold.
RANGE = 140.0
ROOT = math.exp(-RANGE / 4)


@built_in(ties=check_ties)
def cox(scores, targets, *, where=None, weights=None, ties: Ties = "efron"):
    """Returns the negative log partial likelihood of the proportional hazards model.

    -sum_t [sum_{i in D_t} w_i s_i - sum_{l < d} mean_{D_t}(w) log(R_t - (l / d) E_t)],
    where D_t contains the d events at time t, R_t = sum_i w_i exp(s_i) over the rows at
    risk (entry_i < t <= time_i) and E_t the same sum over D_t. With Breslow's
    approximation the term (l / d) E_t is left out. Weights enter as in R's
    ``survival::coxph``.

    Scores that are more than 140 below the largest one count as 140 below in R_t.

    Args:
      scores: [G], log hazard ratios.
      targets: a mapping with ``time`` [G], ``event`` [G] (1 or 0) and optionally
        ``entry`` [G] for left truncation, entry < time; times count as float32.
      where: bool [G], the real rows; all by default.
      weights: [G], row weights; rows of weight 0 count as masked.
      ties: "efron" or "breslow", the approximation for events at the same time.

    Returns:
      A scalar; 0 if there is no event, NaN if a time is NaN or not after its entry.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> targets = dict(time=jnp.array([1.0, 2.0, 3.0]), event=jnp.array([1, 0, 1]))
      >>> float(jnp.exp(jb.losses.cox(jnp.zeros(3), targets))).__round__(5)
      3.0

    References:
      Cox 1972, "Regression models and life-tables"; Breslow 1974; Efron 1977, "The
      efficiency of Cox's likelihood function for censored data", section 5. Strata are
      groups.
    """
    weights = weigh_rows(scores, where, weights)
    sets = find_risk_sets(targets, weights, ties)
    relative, risks = scale_risks(scores[sets.order], sets.weight)
    sums = jnp.where(sets.event, sum_risks(sets, risks), 1)
    logs = log(sums, ROOT)
    terms = sets.event_weight * logs - sets.weight * relative
    return jnp.where(sets.valid, jnp.sum(clear(terms, sets.event)), jnp.nan)


def scale_risks(scores, weights):
    """Returns scores less the largest one, and w exp(score) times a common factor."""
    real = weights > 0
    top = jnp.max(jnp.where(real, scores, -jnp.inf))
    top = jax.lax.stop_gradient(clear(top, jnp.isfinite(top)))
    relative = clear(scores - top, real)
    # The square of e^(x / 2) is more accurate than e^(x + RANGE / 2), because x + 70
    # would round x.
    root = jnp.exp(jnp.maximum(relative, -RANGE) / 2) * (1 / ROOT)
    return relative, weights * jnp.square(root)


@built_in()
def concordance(scores, targets, *, where=None, weights=None):
    """Returns a smooth upper bound of 1 - concordance index.

    The mean of log2(1 + exp(s_j - s_i)) over the pairs in which i had the event before
    j's time, weighted by w_i w_j. Since log2(1 + e^x) >= 1[x > 0], it is at least the
    share of discordant pairs. At equal scores it is 1.

    It compares all pairs of a group: G^2 numbers. For many rows, draw groups at random
    in each round.

    Args:
      scores: [G]; larger scores mean higher risk.
      targets: a mapping with ``time`` [G] and ``event`` [G] (1 or 0). Of rows with the
        same time, events come before censored rows. Times of entry do not matter.
      where: bool [G], the real rows; all by default.
      weights: [G], row weights.

    Returns:
      A scalar; 0 if no pair can be compared.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> targets = dict(time=jnp.array([1.0, 2.0]), event=jnp.array([1, 0]))
      >>> float(jb.losses.concordance(jnp.zeros(2), targets)).__round__(5)
      1.0

    References:
      Raykar et al. 2007, "On ranking in survival analysis: bounds on the concordance
      index", section 4.1 (log-sigmoid bound).
    """
    check_names(targets)
    weights = weigh_rows(scores, where, weights)
    scores = clear(scores, weights > 0)
    time, event = (
        jnp.asarray(targets["time"]),
        jnp.asarray(targets["event"], jnp.float32) > 0,
    )
    last = ~event[None, :] & (time[:, None] == time[None, :])
    pairs = event[:, None] & ((time[:, None] < time[None, :]) | last)
    pairs = jnp.where(pairs, weights[:, None] * weights[None, :], 0)
    total = jnp.sum(pairs)
    excess = softplus(scores[None, :] - scores[:, None]) / jnp.log(2.0)
    return jnp.sum(pairs * excess) / jnp.where(total > 0, total, 1)
