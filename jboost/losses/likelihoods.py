# SPDX-License-Identifier: Apache-2.0
"""Any parametric distribution as a loss: the negative log-likelihood.

A distribution is any object with ``log_prob(value)``: those of
:mod:`jboost.distributions`, NumPyro, distrax and TensorFlow Probability's JAX
substrate. This module imports none of them.
"""

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import special
from jaxtyping import Array, UInt32

from jboost.entry.messages import show

_SAMPLES = 8  # targets that are drawn for each row in a round
_NODES = 24  # targets that stand for all numbers; even: none at a symmetric kink
_COUNTS = 16  # those that stand for all counts but the least
_LOGITS = 11.5  # the last quantiles
_TURNS = 16  # most turns of loops over polynomials; a search for a quantile has more
_FAR = 40.0  # the last nodes of continuous targets, in deviations from the center
_STRETCH = 4.0  # growth of their distances: 0.5 at the center, 14 at the ends
_BELOW, _ABOVE = 5.0, 8.0  # deviations from the mean that nodes of counts reach
_TAIL = 10.0  # and that in units of variance / mean, the scale of an exponential tail
_EVEN = ((2 * np.arange(_NODES) + 1) / _NODES - 1).astype(np.float32)
_STEPS = _STRETCH * np.linspace(-1, 1, _NODES)
_AWAY = (_FAR / np.sinh(_STRETCH) * np.sinh(_STEPS)).astype(np.float32)
_WIDTHS = np.log(np.cosh(_STEPS)).astype(np.float32)
_NAMED = {"_Real": (-np.inf, np.inf), "_Boolean": (0, 1)}  # supports of NumPyro


@dataclass(frozen=True)
class Likelihood:
    """The loss -log p(target) of a distribution; see :func:`likelihood`.

    Example:
      >>> import jboost as jb
      >>> loss = jb.losses.likelihood(jb.distributions.Normal)
      >>> isinstance(loss, jb.losses.Likelihood)
      True
    """

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

    With "auto", ``curvature`` follows from the Fisher information of the distribution
    ("standardized"), because second derivatives of the loss may be negative. The
    information comes from the first of these that the distribution provides:
    ``fisher_information()``, the matrix [P, P] for its parameters in the order of
    ``jax.tree.leaves(distribution)``; the second derivative of a KL divergence
    (``distribution.kl_divergence(other)``, or NumPyro's function); ``icdf(q)`` without
    a search, for a sum over quantiles, unless values are discrete; ``support`` (an
    object as in NumPyro), ``mean`` and ``variance``, for a sum over values around the
    mean, unless it is a mixture; ``sample(key, sample_shape)`` (or ``seed=key``), for
    an estimate in each round from eight values drawn per row.

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
    sources = (_from_parameters, _from_divergence, _from_quantiles, _from_nodes)
    for evaluate in (source(make) for source in sources):
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


def _from_quantiles(make):
    """The mean of g g' over quantiles with evenly spaced logits.

    The trapezoidal rule is accurate there: the integrand is smooth, and falls off.
    """
    logits = _LOGITS * np.linspace(-1, 1, _NODES)
    levels = (1 / (1 + np.exp(-logits))).astype(np.float32)
    widths = np.log(levels * (1 - levels))

    def evaluate(score, words):
        del words
        distribution = make(jax.lax.stop_gradient(score))
        if not hasattr(distribution, "support") or _is_discrete(distribution):
            raise TypeError("several levels of counts have the same quantile")
        find = jax.vmap(distribution.icdf)
        text = str(jax.make_jaxpr(find)(levels))
        turns = sum(map(int, re.findall(r"length=(\d+)", text)))
        if "while[" in text or turns > _TURNS:
            raise TypeError("a search for quantiles takes longer than other sources")
        return _mean_square(make, score, find(levels), widths, evenly=True)

    return evaluate


def _from_nodes(make):
    """The mean of g g' over nodes around the mean, weighted by their density."""

    def evaluate(score, words):
        del words
        distribution = make(jax.lax.stop_gradient(score))
        place = _place_counts if _is_discrete(distribution) else _place_numbers
        values, widths = jax.lax.stop_gradient(place(distribution))
        return _mean_square(make, score, values, widths, evenly=False)

    return evaluate


def _is_discrete(distribution):
    return getattr(getattr(distribution, "support", None), "is_discrete", False)


def _mean_square(make, score, values, widths, evenly):
    """Returns the mean of g g' over nodes of given widths (logarithms).

    Unless all have the same density, as evenly spaced quantiles do, widths times
    densities are the weights.

    The mean of g is 0 but for rounding. It is not subtracted: where g is all rounding,
    as about large degrees of freedom, F is as large as its square.
    """
    evaluate = jax.value_and_grad(Likelihood(make))
    # Barriers, or XLA would compute densities and slopes again for each use.
    values = jax.lax.optimization_barrier(values)
    losses, slopes = jax.lax.optimization_barrier(
        jax.vmap(lambda value: evaluate(score, value))(values)
    )
    logs = widths if evenly else widths - jax.lax.stop_gradient(losses)
    weights = jax.nn.softmax(jnp.where(jnp.isfinite(logs), logs, -jnp.inf))[None, :]
    slopes = jnp.where(weights > 0, slopes.reshape(len(values), -1).T, 0)
    products = slopes[:, None, :] * (weights * slopes)[None, :, :]
    return jnp.sum(products, axis=2).reshape(score.shape * 2)


def _place_numbers(distribution):
    """Returns nodes, and logarithms of the intervals that they stand for.

    They are placed on the real line, on that of log(y - lower), on that of the logit
    for intervals, or evenly on a circle.
    """
    lower, upper = (float(bound) for bound in _bounds(distribution))
    mean, variance = _moments(distribution)
    if type(distribution.support).__name__ == "_Circular":  # variance 1 - E cos(y - m)
        reach = jnp.minimum(_BELOW * jnp.sqrt(2 * variance), np.pi)
        return mean + reach * _EVEN, np.zeros(_NODES, np.float32)
    if lower == -np.inf and upper < np.inf:
        raise TypeError("support without a lower bound")
    share = 0.0
    slope = 1.0  # derivative of the target by its place on the line, at the mean
    if lower > -np.inf:
        share = (mean - lower) / (upper - lower)
        slope = (mean - lower) * (1 - share)
    # Tails and singular densities raise the variance, which may be infinite: the nodes
    # are no wider than those of a normal density as high at the mean.
    height = jnp.exp(distribution.log_prob(mean)) * slope
    deviation = jnp.sqrt(variance) / slope
    deviation = jnp.fmin(deviation, 0.4 / height)
    if lower == -np.inf:
        center = mean
    elif upper == np.inf:
        center = jnp.log(slope) - jnp.log1p(jnp.square(deviation)) / 2
    else:
        center = special.logit(share)
    line = center + deviation * _AWAY
    if lower == -np.inf:
        return line, _WIDTHS
    # Beyond these are no float32.
    last = 80.0 if upper == np.inf else 14.0
    widths = jnp.where((line > -80.0) & (line < last), _WIDTHS, -jnp.inf)
    line = jnp.clip(line, -80.0, last)
    if upper == np.inf:
        return lower + jnp.exp(line), widths + line
    slopes = jax.nn.log_sigmoid(line) + jax.nn.log_sigmoid(-line)
    return lower + (upper - lower) * jax.nn.sigmoid(line), widths + slopes


def _place_counts(distribution):
    """Returns counts, and logarithms of the numbers of counts that they stand for.

    The least one, which may be inflated, stands for itself. If the others begin next to
    it, they are denser there.
    """
    lower, upper = _bounds(distribution)
    few = isinstance(lower, int) and isinstance(upper, int)
    if few and upper - lower < 2 * _COUNTS:
        values = np.arange(lower, upper + 1)
        return values, np.zeros(len(values), np.float32)
    mean, variance = _moments(distribution)
    # The moments of y - lower where that is not 0.
    others = -jnp.expm1(distribution.log_prob(jnp.float32(lower)))
    square = (variance + jnp.square(mean - lower)) / others
    mean = (mean - lower) / others
    variance = jnp.maximum(square - jnp.square(mean), 0)
    deviation = jnp.sqrt(variance)
    first = jnp.maximum(jnp.floor(mean - _BELOW * deviation), 1.0)
    reach = jnp.maximum(_ABOVE * deviation, _TAIL * variance / mean)
    last = jnp.maximum(jnp.ceil(mean + reach), first + _COUNTS)
    last = jnp.minimum(last, upper - lower + 1.0)
    share = np.linspace(0, 1, _COUNTS + 1).astype(np.float32)
    share = jnp.where(first > 1, share, share * share * share)
    edges = jnp.floor(first + (last - first) * share)
    number = edges[1:] - edges[:-1]
    middle = edges[:-1] + jnp.maximum(jnp.floor((number - 1) / 2), 0)
    values = lower + jnp.concatenate([jnp.zeros(1), middle])
    return values, jnp.concatenate([jnp.zeros(1), jnp.log(number)])


def _bounds(distribution):
    """Returns the bounds of a support, which NumPyro describes by an object."""
    support = distribution.support
    if hasattr(distribution, "mixing_distribution"):
        raise TypeError("a narrow component would be between two nodes")
    if getattr(support, "event_dim", 0):
        raise TypeError("values with axes of their own")
    name = type(support).__name__
    if name in _NAMED:
        return _NAMED[name]
    return support.lower_bound, getattr(support, "upper_bound", np.inf)


def _moments(distribution) -> tuple[Any, Any]:
    """Returns mean and variance, attributes or methods."""
    found = [getattr(distribution, name) for name in ("mean", "variance")]
    values: list[Any] = [each() if callable(each) else each for each in found]
    mean, variance = values
    return jnp.where(jnp.isfinite(mean), mean, 0), variance  # any nodes, but no NaN


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
