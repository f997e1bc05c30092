# SPDX-License-Identifier: Apache-2.0
"""Any parametric distribution as a loss: the negative log-likelihood.

A distribution is any object with ``log_prob(value)``: those of
:mod:`jboost.distributions`, NumPyro, distrax and TensorFlow Probability's JAX
substrate. This module imports none of them.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from jboost.entry.messages import show

_SAMPLES = 8  # targets that are drawn for each row in a round


@dataclass(frozen=True)
class Likelihood:
    """The loss -log p(target) of a distribution; see :func:`likelihood`."""

    make_distribution: Callable[..., Any]

    def __call__(self, score: Any, target: Any) -> Array:
        """Returns -log p(target) for one row."""
        distribution = self.make_distribution(score)
        if not hasattr(distribution, "log_prob"):
            raise TypeError(
                "make_distribution must return an object with log_prob(value), got "
                f"{type(distribution).__name__}"
            )
        value, valid = _read_value(distribution, target)
        return jnp.where(valid, -distribution.log_prob(value), jnp.nan)

    @property
    def __name__(self) -> str:
        inner = self.make_distribution
        return f"likelihood({getattr(inner, '__name__', repr(inner))})"


def likelihood(make_distribution: Callable[..., Any]) -> Likelihood:
    """Makes the loss -log p(target) of a distribution with scores as parameters.

    With "auto", ``curvature`` is the Fisher information of the distribution instead of
    the second derivatives of the loss, which may be negative. It comes from the first
    of these that the distribution provides: ``fisher_information()``, the matrix [P, P]
    for its parameters in the order of ``jax.tree.leaves(distribution)``; the second
    derivative of a KL divergence (``distribution.kl_divergence(other)``, or NumPyro's
    function); ``sample(key, sample_shape)`` (or ``seed=key``), for an estimate in each
    round from eight values drawn per row.

    Args:
      make_distribution: a function of the score of one row, a scalar or [K], that
        returns an object with ``log_prob(value)``, written in jax.numpy. Scales should
        be exponentials of scores, so that units do not matter.

    Returns:
      A loss to pass to :func:`jboost.fit`, with ``num_scores=K``. Targets are converted
      to float32, or to the dtype of samples where ``log_prob`` takes only that (classes
      of a categorical distribution).

    Example:
      >>> import numpy as np, jboost as jb
      >>> rng = np.random.default_rng(0)
      >>> x = rng.uniform(-1, 1, (500, 1))
      >>> y = 1000 * (x[:, 0] + np.exp(x[:, 0]) * rng.normal(size=500))
      >>> loss = jb.losses.likelihood(jb.distributions.normal)
      >>> model, history = jb.fit(x, y, loss, num_scores=2, num_rounds=50, max_depth=2)
      >>> found = jb.predict(model, x, inverse_link=jb.distributions.normal)
      >>> found.icdf(0.9).shape
      (500,)

    References:
      Duan et al. 2020, "NGBoost: natural gradient boosting for probabilistic
      prediction".
    """
    if not callable(make_distribution):
        raise TypeError(
            "make_distribution must be callable as make_distribution(score), got "
            f"{show(make_distribution)}"
        )
    return Likelihood(make_distribution)


class Information(NamedTuple):
    """A function that computes the Fisher information of a row.

    Attributes:
      evaluate: ``evaluate(score, words)`` returns the matrix [K, K], or a scalar for a
        scalar score; ``words`` [2] is the seed of the draws.
      sampled: whether the information is estimated from draws.
    """

    evaluate: Callable[[Array, UInt32[Array, "2"]], Array]
    sampled: bool


def find_information(loss: Likelihood, num_scores: int) -> Information | None:
    """Finds the first source that the distribution provides; None if it has none."""
    make = loss.make_distribution
    score = jnp.zeros((num_scores,) if num_scores > 1 else (), jnp.float32)
    for evaluate in (_from_parameters(make), _from_divergence(make)):
        if _works(evaluate, score):
            return Information(evaluate, sampled=False)
    evaluate = _from_samples(make)
    return Information(evaluate, sampled=True) if _works(evaluate, score) else None


def _works(evaluate, score):
    try:
        found = jax.eval_shape(evaluate, score, jnp.zeros(2, jnp.uint32))
    except Exception:  # whatever a library raises where it has no formula
        return False
    return getattr(found, "shape", None) == score.shape * 2


def _from_parameters(make):
    """J' I J with the information I of the parameters and their derivatives J."""

    def parameters(score):
        leaves = jax.tree.leaves(make(score))
        return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])

    def evaluate(score, words):
        del words
        slopes = jax.jacfwd(parameters)(score)
        slopes = slopes.reshape(len(slopes), -1)  # [P, K]
        own = make(score).fisher_information()
        # Terms one by one: for N rows, XLA's small products and sums are slow on a CPU.
        terms = range(len(slopes))
        inner: Any = sum(own[:, p, None] * slopes[p][None, :] for p in terms)
        found: Any = sum(inner[p][:, None] * slopes[p][None, :] for p in terms)
        return found.reshape(score.shape * 2)

    return evaluate


def _from_divergence(make):
    """The second derivative of KL(p_s || p_t) in t at t = s."""

    def evaluate(score, words):
        del words
        here = make(score)

        def divergence(other):
            there = make(other)
            if hasattr(here, "kl_divergence"):
                return here.kl_divergence(there)
            library = type(here).__module__.partition(".")[0]
            return sys.modules[f"{library}.distributions"].kl_divergence(here, there)

        return jax.hessian(divergence)(score)

    return evaluate


def _from_samples(make):
    """The mean of g g' over targets drawn from the distribution."""

    def evaluate(score, words):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        values = _draw(make(score), key)

        def slope(value):
            return jax.grad(lambda score: make(score).log_prob(value))(score)

        slopes = jax.vmap(slope)(values)
        slopes = slopes.reshape(len(slopes), -1)  # [samples, K]
        found = jnp.mean(slopes[:, :, None] * slopes[:, None, :], axis=0)
        return found.reshape(score.shape * 2)

    return evaluate


def _draw(distribution, key):
    if "seed" in inspect.signature(distribution.sample).parameters:
        return distribution.sample(seed=key, sample_shape=(_SAMPLES,))
    return distribution.sample(key, (_SAMPLES,))


def _read_value(distribution, target):
    """Returns the target in a dtype that ``log_prob`` takes, and whether it has one."""
    if not hasattr(target, "dtype"):  # a pytree
        return target, True
    value = jnp.asarray(target, jnp.float32)
    try:
        jax.eval_shape(distribution.log_prob, value)
    except Exception:  # classes and other integers
        key = jax.random.key(0)
        drawn = jax.eval_shape(lambda: _draw(distribution, key)).dtype
        whole = jnp.asarray(value, drawn)
        return whole, jnp.asarray(whole, jnp.float32) == value
    return value, True
