# SPDX-License-Identifier: Apache-2.0
"""Losses of one row: plain functions ``loss(score, target) -> scalar``.

The score is a number, for ``softmax`` a vector; r stands for score - target. All else
is derived by differentiation. Checks of parameters come first; they run in Python while
a loss is traced, and leave nothing in its program.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jboost.entry.checks import check_number
from jboost.losses.groups import softplus

F = TypeVar("F", bound=Callable[..., Any])
Check = Callable[[str, Any], Any]

# Arguments of losses of groups that training passes; all others are parameters.
_PASSED = ("where", "weights", "key")

POSITIVE: Check = partial(check_number, above=0, scalar=False)
NOT_NEGATIVE: Check = partial(check_number, least=0, scalar=False)
SHARE: Check = partial(check_number, above=0, below=1, scalar=False)


class ParameterError(ValueError):
    """Says that a parameter of a loss lies outside its domain."""


def check_parameter(name: str, value: Any, check: Check) -> None:
    """Checks a parameter.

    Args:
      check: called with name and value; raises TypeError or ValueError.

    Raises:
      ParameterError: instead of the ValueError, to distinguish it from the errors
        of a loss that does not accept its data.
      TypeError: the value is not of the right kind.
    """
    try:
        check(name, value)
    except ValueError as error:
        raise ParameterError(str(error)) from None


def built_in(**checks: Check) -> Callable[[F], F]:
    """Decorates a loss with the checks of its parameters, by name.

    A call without data, as in ``fit(x, y, huber(delta=3))``, is answered with the
    argument to pass instead. A loss that names ``where`` is one of groups.
    """

    def declare(function: F) -> F:
        signature, name = inspect.signature(function), function.__name__
        order = tuple(signature.parameters)
        items, check, explain = tuple(checks.items()), check_parameter, _explain_call

        def loss(*arguments, **named):
            given = {**dict(zip(order, arguments, strict=False)), **named}
            if not {*order[:2]} <= given.keys() <= {*order}:
                raise TypeError(explain(name, order, arguments, named))
            for parameter, domain in items:
                if parameter in given:
                    check(f"{parameter} of losses.{name}", given[parameter], domain)
            return function(*arguments, **named)

        # With the globals of the loss's own module, so that doctest finds its example.
        whole: Any = types.FunctionType(
            loss.__code__, function.__globals__, closure=loss.__closure__
        )
        functools.update_wrapper(whole, function)
        whole.__signature__ = signature
        whole.of_groups = "where" in signature.parameters
        return whole

    return declare


def _explain_call(name, order, arguments, named):
    """Explains a call without the data of a loss, or with unknown parameters."""
    parameters = [each for each in order[2:] if each not in _PASSED]
    unknown = [each for each in named if each not in order]
    if unknown:
        known = ", ".join(parameters) or "none"
        return f"{name}() has no parameter {unknown[0]!r}; its parameters are: {known}"
    given = {**dict(zip(parameters, arguments, strict=False)), **named}
    words = [f"{each}={value!r}" for each, value in given.items() if not np.ndim(value)]
    instead = f"jb.losses.{name}"
    if words:
        instead = f"functools.partial({instead}, {', '.join(words)})"
    return (
        f"{name}() must be called with {order[0]} and {order[1]}, which training does; "
        f"pass the loss itself, {instead}"
    )


_POWER = functools.partial(check_number, above=1, below=2, scalar=False)


@built_in()
def squared_error(score, target):
    """Returns r^2; minimized by the mean. The Hessian is 2, as in optax.

    Example:
      >>> import jboost as jb
      >>> float(jb.losses.squared_error(3.0, 1.0))
      4.0
    """
    return jnp.square(_residual(score, target))


@built_in()
def absolute_error(score, target):
    """Returns |r|; minimized by the median (Friedman 2001, algorithm 3).

    Example:
      >>> import jboost as jb
      >>> float(jb.losses.absolute_error(3.0, 1.0))
      2.0
    """
    residual = _residual(score, target)
    return jnp.sign(residual) * residual  # the gradient of jnp.abs at 0 is 1, not 0


@built_in(delta=POSITIVE)
def huber(score, target, *, delta=1.0):
    """Returns r^2 / 2 if |r| <= delta, else delta (|r| - delta / 2).

    See Huber 1964, eq. 2.1.

    Args:
      delta: the threshold of |r| between the quadratic and the linear part, in the
        units of the target.

    Example:
      >>> import jboost as jb
      >>> float(jb.losses.huber(3.0, 1.0, delta=1.0))
      1.5
    """
    magnitude = absolute_error(score, target)
    square = jnp.square(_residual(score, target)) / 2
    return jnp.where(magnitude <= delta, square, delta * (magnitude - delta / 2))


@built_in(delta=POSITIVE)
def pseudo_huber(score, target, *, delta=1.0):
    """Returns delta^2 (sqrt(1 + (r / delta)^2) - 1) (Charbonnier et al. 1997).

    Example:
      >>> import jboost as jb
      >>> round(float(jb.losses.pseudo_huber(3.0, 1.0)), 4)
      1.2361
    """
    ratio = _residual(score, target) / delta
    # sqrt(1 + u) - 1 = u / (sqrt(1 + u) + 1) avoids cancellation near zero.
    return delta**2 * jnp.square(ratio) / (jnp.sqrt(1 + jnp.square(ratio)) + 1)


@built_in()
def log_cosh(score, target):
    """Returns log cosh r: about r^2 / 2 for small |r|, |r| - log 2 for large |r|.

    Example:
      >>> import jboost as jb
      >>> round(float(jb.losses.log_cosh(3.0, 1.0)), 4)
      1.325
    """
    return _log_cosh(_residual(score, target))


@jax.custom_jvp
def _log_cosh(residual):
    near = jnp.square(jnp.tanh(jnp.clip(residual, -1.0, 1.0)))  # keeps small ones
    far = jnp.logaddexp(residual, -residual) - jnp.log(2.0)
    return jnp.where(jnp.abs(residual) < 1, -jnp.log1p(-near) / 2, far)


_log_cosh.defjvps(lambda moved, value, residual: jnp.tanh(residual) * moved)


@built_in(tau=SHARE)
def quantile(score, target, *, tau=0.5):
    """Returns the pinball loss max(-tau r, (1 - tau) r).

    Minimized by the tau-quantile (Koenker and Bassett 1978).

    Example:
      >>> import jboost as jb
      >>> round(float(jb.losses.quantile(3.0, 1.0, tau=0.9)), 4)
      0.2
    """
    residual = _residual(score, target)
    return jnp.where(residual > 0, (1 - tau) * residual, -tau * residual)


@built_in(tau=SHARE)
def expectile(score, target, *, tau=0.5):
    """Returns the asymmetric squared error |tau - 1[r > 0]| r^2 (Newey and Powell).

    Example:
      >>> import jboost as jb
      >>> round(float(jb.losses.expectile(3.0, 1.0, tau=0.9)), 4)
      0.4
    """
    residual = _residual(score, target)
    return jnp.where(residual > 0, 1 - tau, tau) * jnp.square(residual)


@built_in()
def poisson(score, target):
    """Returns exp(score) - target score, for counts; the score is the log of the mean.

    This is the Poisson negative log-likelihood up to a term that does not depend on the
    score (McCullagh and Nelder 1989, chapter 6). Pass log exposure as ``offset``.

    Example:
      >>> import jboost as jb
      >>> float(jb.losses.poisson(0.0, 2))
      1.0
    """
    target = _like(score, target)
    return _defined(target >= 0, jnp.exp(score) - target * score)


@built_in()
def gamma(score, target):
    """Returns target exp(-score) + score, for positive targets.

    The score is the log of the mean. This is half the gamma deviance up to a term that
    does not depend on the score (McCullagh and Nelder 1989, chapter 8).

    Example:
      >>> import jboost as jb
      >>> float(jb.losses.gamma(0.0, 2.0))
      2.0
    """
    target = _like(score, target)
    return _defined(target > 0, target * jnp.exp(-score) + score)


@built_in(power=_POWER)
def tweedie(score, target, *, power=1.5):
    """Returns -target e^((1-p) s) / (1-p) + e^((2-p) s) / (2-p), 1 < p = power < 2.

    For targets that are zero or positive and continuous, such as insurance claims; the
    score s is the log of the mean (Jorgensen 1987).

    Example:
      >>> import jboost as jb
      >>> float(jb.losses.tweedie(0.0, 2.0, power=1.5))
      6.0
    """
    target = _like(score, target)
    zero_part = jnp.exp((2 - power) * score) / (2 - power)
    # For target 0 the other part is 0, where exp may be inf, too.
    inner = jnp.where(target > 0, score, 0)
    value = zero_part - target * jnp.exp((1 - power) * inner) / (1 - power)
    return _defined(target >= 0, value)


@built_in()
def logistic(score, target):
    """Returns the binary cross-entropy log(1 + e^score) - target score.

    The score is the logit; ``target`` is 0 or 1, or a probability (a soft label).

    Example:
      >>> import jboost as jb
      >>> round(float(jb.losses.logistic(0.0, 1)), 4)
      0.6931
    """
    target = _like(score, target)
    value = softplus(score) - target * score
    return _defined((target >= 0) & (target <= 1), value)


@built_in()
def softmax(score, target):
    """Returns the cross-entropy logsumexp(score) - score[target] of K classes.

    Args:
      score: one logit per class (``num_scores=K``).
      target: the class, an integer from 0 to K - 1.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> round(float(jb.losses.softmax(jnp.zeros(3), 2)), 4)
      1.0986
    """
    target = jnp.asarray(target)
    label = target.astype(jnp.int32)
    value = jax.nn.logsumexp(score) - score[label]
    inside = (label >= 0) & (label < score.shape[0])
    if jnp.issubdtype(target.dtype, jnp.floating):
        inside &= label.astype(target.dtype) == target  # reject fractions
    return _defined(inside, value)


@built_in()
def exponential(score, target):
    """Returns exp(-target score) for targets -1 and +1 (Schapire and Singer 1999).

    Example:
      >>> import jboost as jb
      >>> float(jb.losses.exponential(0.0, 1))
      1.0
    """
    target = _like(score, target)
    return _defined(jnp.abs(target) == 1, jnp.exp(-target * score))


@built_in(gamma=NOT_NEGATIVE, alpha=SHARE)
def focal(score, target, *, gamma=2.0, alpha=0.25):
    """Returns -alpha_t (1 - p_t)^gamma log p_t (Lin et al. 2017, eq. 5).

    The score is a logit, p_t is the predicted probability of the true class, and
    alpha_t is alpha for target 1 and 1 - alpha for target 0. Not convex.

    Example:
      >>> import jboost as jb
      >>> round(float(jb.losses.focal(0.0, 1)), 4)
      0.0433
    """
    target = _like(score, target)
    sign = 2 * target - 1
    log_likelihood = jax.nn.log_sigmoid(sign * score)
    balance = alpha * target + (1 - alpha) * (1 - target)
    miss = jnp.exp(gamma * jax.nn.log_sigmoid(-sign * score))
    value = -balance * miss * log_likelihood
    return _defined((target >= 0) & (target <= 1), value)


@built_in()
def hinge(score, target):
    """Returns max(0, 1 - target score) for targets -1 and +1 (Cortes, Vapnik 1995).

    Example:
      >>> import jboost as jb
      >>> float(jb.losses.hinge(0.25, 1))
      0.75
    """
    target = _like(score, target)
    return _defined(jnp.abs(target) == 1, jnp.maximum(0.0, 1 - target * score))


@built_in()
def hinge_squared(score, target):
    """Returns max(0, 1 - target score)^2 for targets -1 and +1.

    Example:
      >>> import jboost as jb
      >>> float(jb.losses.hinge_squared(0.5, 1))
      0.25
    """
    return jnp.square(hinge(score, target))


@built_in(scale=POSITIVE)
def cauchy(score, target, *, scale=1.0):
    """Returns log(1 + (r / scale)^2 / 2) (Barron 2019, alpha = 0). Not convex.

    Example:
      >>> import jboost as jb
      >>> round(float(jb.losses.cauchy(3.0, 1.0)), 4)
      1.0986
    """
    return jnp.log1p(jnp.square(_residual(score, target) / scale) / 2)


@built_in(scale=POSITIVE)
def welsch(score, target, *, scale=1.0):
    """Returns 1 - exp(-(r / scale)^2 / 2) (Barron 2019, alpha = -inf). Not convex.

    Example:
      >>> import jboost as jb
      >>> round(float(jb.losses.welsch(3.0, 1.0)), 4)
      0.8647
    """
    return -jnp.expm1(-jnp.square(_residual(score, target) / scale) / 2)


def _twice_logistic(score):
    return jax.nn.sigmoid(2 * score)


# Functions that map a score to the mean of the target or to class probabilities. For
# exponential see Friedman, Hastie and Tibshirani 2000, lemma 1.
INVERSE_LINKS: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType(
    {
        poisson: jnp.exp,
        gamma: jnp.exp,
        tweedie: jnp.exp,
        logistic: jax.nn.sigmoid,
        focal: jax.nn.sigmoid,
        exponential: _twice_logistic,
        softmax: jax.nn.softmax,
    }
)


def inverse_link(loss: Any) -> Callable[..., Any] | None:
    """Returns the function that maps a score to a mean or to class probabilities.

    It is exp for ``poisson``, ``gamma`` and ``tweedie``; sigmoid for ``logistic`` and
    ``focal``; sigmoid(2 score) for ``exponential``; softmax for ``softmax``. All but
    the last also map the K scores of K targets.

    Args:
      loss: any loss; parameters may be bound with ``functools.partial``.

    Returns:
      A function to pass to :func:`jboost.predict` as ``inverse_link``; None for all
      other losses; their score is the prediction.

    Example:
      >>> import jboost as jb
      >>> link = jb.losses.inverse_link(jb.losses.poisson)
      >>> float(link(0.0))
      1.0
    """
    loss = bare_loss(loss)
    # Compare instead of looking up: a custom loss may not be hashable.
    return next((link for known, link in INVERSE_LINKS.items() if known is loss), None)


def bare_loss(loss: Any) -> Any:
    """Returns the function inside ``functools.partial``.

    Example:
      >>> from functools import partial
      >>> import jboost as jb
      >>> jb.losses.bare_loss(partial(jb.losses.huber, delta=2.0)).__name__
      'huber'
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss


def _residual(score, target):
    return score - _like(score, target)


def _defined(inside, value):
    """Replaces the loss by NaN where the target is invalid; ``fit`` names the row."""
    return jnp.where(inside, value, jnp.nan)


def _like(score, target):
    """Converts the target to the dtype of the score, so that integers are accepted."""
    return jnp.asarray(target, jnp.result_type(score, jnp.float32))
