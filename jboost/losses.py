# SPDX-License-Identifier: Apache-2.0
"""Losses: plain functions of one row, ``loss(score, target) -> scalar``.

In: the score F(x) of one row (a scalar; for ``softmax`` a vector) and its target.
Out: one number, the smaller the better. r stands for score - target. Gradient,
Hessian, initial score and leaf values follow from the function by differentiation,
so a loss of your own needs nothing but its formula. Parameters are keyword-only;
bind them with ``functools.partial`` or a closure.
"""

import difflib
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float

from jboost.numerics.floats import middle_float
from jboost.numerics.sums import sum_rows

Scalar = Float[ArrayLike, ""]


def squared_error(score, target):
    """r^2. Minimized by the mean (Gauss). The same scale as in optax: Hessian 2.

    Example:
      >>> import jboost as jb
      >>> float(jb.losses.squared_error(3.0, 1.0))
      4.0
    """
    return jnp.square(_residual(score, target))


def absolute_error(score, target):
    """|r|. Minimized by the median (Friedman 2001, Algorithm 3, LAD_TreeBoost)."""
    residual = _residual(score, target)
    return jnp.sign(residual) * residual  # JAX's jnp.abs has gradient +1, not 0, at 0


def huber(score, target, *, delta=1.0):
    """r^2 / 2 where |r| <= delta, else delta (|r| - delta / 2) (Huber 1964, eq. 2.1).

    Args:
      delta: where the loss turns from square to straight, in the target's units.
    """
    magnitude = absolute_error(score, target)
    square = jnp.square(_residual(score, target)) / 2
    return jnp.where(magnitude <= delta, square, delta * (magnitude - delta / 2))


def pseudo_huber(score, target, *, delta=1.0):
    """delta^2 (sqrt(1 + (r / delta)^2) - 1) (Charbonnier et al. 1997)."""
    ratio = _residual(score, target) / delta
    # sqrt(1 + u) - 1 = u / (sqrt(1 + u) + 1): no cancellation near zero.
    return delta**2 * jnp.square(ratio) / (jnp.sqrt(1 + jnp.square(ratio)) + 1)


def log_cosh(score, target):
    """log cosh r: r^2 / 2 near zero, |r| - log 2 far out."""
    residual = _residual(score, target)
    return jnp.logaddexp(residual, -residual) - jnp.log(2.0)


def quantile(score, target, *, tau=0.5):
    """max(tau (target - score), (tau - 1) (target - score)): the pinball loss.

    Minimized by the tau-quantile (Koenker and Bassett 1978).
    """
    residual = _residual(score, target)
    return jnp.where(residual > 0, (1 - tau) * residual, -tau * residual)


def expectile(score, target, *, tau=0.5):
    """|tau - 1[r > 0]| r^2 (Newey and Powell 1987): an asymmetric squared error."""
    residual = _residual(score, target)
    return jnp.where(residual > 0, 1 - tau, tau) * jnp.square(residual)


def poisson(score, target):
    """exp(score) - target score: counts, the score is the log of the mean.

    The negative log-likelihood up to a term without the score (McCullagh and Nelder
    1989, chapter 6). An exposure is an ``offset`` of log exposure.
    """
    target = _like(score, target)
    return _defined(target >= 0, jnp.exp(score) - target * score)


def gamma(score, target):
    """target exp(-score) + score: positive targets, the score is the log of the mean.

    The gamma deviance / 2 up to a term without the score (McCullagh and Nelder 1989,
    chapter 8).
    """
    target = _like(score, target)
    return _defined(target > 0, target * jnp.exp(-score) + score)


def tweedie(score, target, *, power=1.5):
    """-target e^((1-p) s) / (1-p) + e^((2-p) s) / (2-p), for 1 < p = power < 2.

    Zeros with a continuous positive part (claims); the score s is the log of the
    mean (Jorgensen 1987).
    """
    target = _like(score, target)
    zero_part = jnp.exp((2 - power) * score) / (2 - power)
    value = zero_part - target * jnp.exp((1 - power) * score) / (1 - power)
    return _defined(target >= 0, value)


def logistic(score, target):
    """log(1 + e^score) - target score: binary cross-entropy, the score is the logit.

    ``target`` is 0 or 1, or a probability in between (soft targets).
    """
    target = _like(score, target)
    value = jax.nn.softplus(score) - target * score
    return _defined((target >= 0) & (target <= 1), value)


def softmax(score, target):
    """logsumexp(score) - score[target]: cross-entropy of one of K classes.

    Args:
      score: one number per class (``num_scores=K``).
      target: the class, an integer from 0 to K - 1.
    """
    target = jnp.asarray(target)
    label = target.astype(jnp.int32)
    value = jax.nn.logsumexp(score) - score[label]
    inside = (label >= 0) & (label < score.shape[0])
    if jnp.issubdtype(target.dtype, jnp.floating):
        inside &= label.astype(target.dtype) == target  # a fraction is no class
    return _defined(inside, value)


def exponential(score, target):
    """exp(-target score), target -1 or +1 (Schapire and Singer 1999; AdaBoost)."""
    target = _like(score, target)
    return _defined(jnp.abs(target) == 1, jnp.exp(-target * score))


def focal(score, target, *, gamma=2.0, alpha=0.25):
    """-alpha_t (1 - p_t)^gamma log p_t (Lin et al. 2017, eq. 5); score is a logit.

    p_t is the probability given to the class that came, alpha_t is alpha for target
    1 and 1 - alpha for target 0. Not convex in the score.
    """
    target = _like(score, target)
    sign = 2 * target - 1
    log_likelihood = jax.nn.log_sigmoid(sign * score)
    balance = alpha * target + (1 - alpha) * (1 - target)
    miss = jnp.exp(gamma * jax.nn.log_sigmoid(-sign * score))
    value = -balance * miss * log_likelihood
    return _defined((target >= 0) & (target <= 1), value)


def hinge(score, target):
    """max(0, 1 - target score), target -1 or +1 (Cortes and Vapnik 1995)."""
    target = _like(score, target)
    return _defined(jnp.abs(target) == 1, jnp.maximum(0.0, 1 - target * score))


def hinge_squared(score, target):
    """max(0, 1 - target score)^2, target -1 or +1: the smooth hinge."""
    return jnp.square(hinge(score, target))


def cauchy(score, target, *, scale=1.0):
    """log(1 + (r / scale)^2 / 2) (Barron 2019, eq. 10, alpha = 0). Not convex."""
    return jnp.log1p(jnp.square(_residual(score, target) / scale) / 2)


def welsch(score, target, *, scale=1.0):
    """1 - exp(-(r / scale)^2 / 2) (Barron 2019, alpha = -inf). Not convex, bounded."""
    return -jnp.expm1(-jnp.square(_residual(score, target) / scale) / 2)


def _twice_logistic(score):
    return jax.nn.sigmoid(2 * score)


# What a score stands for where that is not the score itself: the mean of the target,
# or the probability of the class (for exponential: Friedman, Hastie and Tibshirani
# 2000, lemma 1).
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

LOSSES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        loss.__name__: loss
        for loss in (
            squared_error, absolute_error, huber, pseudo_huber, log_cosh, quantile,
            expectile, poisson, gamma, tweedie, logistic, softmax, exponential, focal,
            hinge, hinge_squared, cauchy, welsch,
        )
    }
)  # fmt: skip


class _Domain(NamedTuple):
    """The targets that a loss is defined for.

    Attributes:
      words: what errors call them.
      holds: ``holds(targets, num_scores)``, in NumPy, for each target.
    """

    words: str
    holds: Callable[[np.ndarray, int], np.ndarray]


_COUNTS = _Domain("numbers >= 0", lambda t, _: t >= 0)
_SHARES = _Domain("numbers from 0 to 1", lambda t, _: (t >= 0) & (t <= 1))
_SIGNS = _Domain("-1 or 1", lambda t, _: np.abs(t) == 1)
_CLASSES = _Domain(
    "classes, the integers from 0 to num_scores - 1",
    lambda t, k: (t >= 0) & (t < k) & (t == np.floor(t)),
)
_DOMAINS: tuple[tuple[Callable[..., Any], _Domain], ...] = (
    (poisson, _COUNTS), (tweedie, _COUNTS),
    (gamma, _Domain("numbers > 0", lambda t, _: t > 0)),
    (logistic, _SHARES), (focal, _SHARES), (softmax, _CLASSES),
    (exponential, _SIGNS), (hinge, _SIGNS), (hinge_squared, _SIGNS),
)  # fmt: skip


def check_domain(
    loss: Any, targets: Any, weights: Any, num_scores: int, name: str
) -> None:
    """Checks that a loss of this module is defined for the targets.

    Other losses, traced arrays and rows of weight 0 are not checked.

    Args:
      loss: any loss.
      targets: as ``loss`` takes them, with the N rows in front.
      weights: of the rows.
      num_scores: K.
      name: of the targets in errors.

    Raises:
      ValueError: names the first row whose target is not in the loss's domain.
    """
    bare = bare_loss(loss)
    domain = next((domain for known, domain in _DOMAINS if known is bare), None)
    if domain is None or any(
        isinstance(leaf, Tracer) for leaf in jax.tree.leaves((targets, weights))
    ):
        return
    host, weights = jax.device_get((targets, weights))
    if not isinstance(host, np.ndarray) or host.ndim != 1:
        return  # not what the loss takes, as tracing it will say
    bad = ~domain.holds(host, num_scores) & (weights > 0)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(
            f"{name} must hold {domain.words}, for losses.{bare.__name__}, got "
            f"{host[row]} in row {row}"
        )


def inverse_link(loss: Any) -> Callable[..., Any] | None:
    """From the score of one row to a mean or a probability, as the loss implies.

    exp for ``poisson``, ``gamma`` and ``tweedie``; sigmoid for ``logistic`` and
    ``focal``, that of 2 score for ``exponential``; ``jax.nn.softmax`` for ``softmax``.

    Args:
      loss: one of this module, its parameters bound by ``functools.partial`` or not.

    Returns:
      What :func:`jboost.predict` takes as ``inverse_link``; None for every other loss,
      whose score stands for itself.

    Example:
      >>> import jboost as jb
      >>> link = jb.losses.inverse_link(jb.losses.poisson)
      >>> float(link(0.0))
      1.0
    """
    loss = bare_loss(loss)
    # Not looked up: a loss of one's own need not be hashable.
    return next((link for known, link in INVERSE_LINKS.items() if known is loss), None)


def bare_loss(loss: Any) -> Any:
    """The function whose parameters ``functools.partial`` binds."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    return loss


Report = Literal["current", "first"]

# Names of objectives in XGBoost, LightGBM, CatBoost and scikit-learn, in lower case.
_PEERS: Mapping[str, str] = MappingProxyType(
    {
        peer: name
        for name, peers in {
            "squared_error": "reg:squarederror reg:linear regression regression_l2 l2 "
            "mean_squared_error mse l2_root root_mean_squared_error rmse ls "
            "least_squares",
            "absolute_error": "reg:absoluteerror regression_l1 l1 mean_absolute_error "
            "mae lad least_absolute_deviation",
            "pseudo_huber": "reg:pseudohubererror",
            "log_cosh": "logcosh",
            "quantile": "reg:quantileerror pinball multiquantile",
            "expectile": "reg:expectileerror",
            "poisson": "count:poisson",
            "gamma": "reg:gamma",
            "tweedie": "reg:tweedie",
            "logistic": "binary:logistic binary:logitraw reg:logistic binary logloss "
            "log_loss binary_logloss cross_entropy crossentropy xentropy deviance "
            "binomial_deviance binary_crossentropy bce",
            "softmax": "multi:softmax multi:softprob multiclass multi_logloss "
            "multinomial_deviance categorical_crossentropy",
            "hinge": "binary:hinge",
        }.items()
        for peer in peers.split()
    }
)


def suggest_loss(name: str, form: str) -> str:
    """What an unknown name of a loss probably meant, to end an error message.

    Args:
      name: of a loss here, of an objective of another library, or misspelled.
      form: how losses are to be named, such as "jb.losses.{}".
    """
    low = name.lower()
    found = {**{known: known for known in LOSSES}, **_PEERS}
    # CatBoost writes parameters into names: "Quantile:alpha=0.9".
    meant = found.get(low) or found.get(low.split(":")[0])
    if meant is None:
        close = difflib.get_close_matches(low, found, n=1)
        meant = found[close[0]] if close else None
    if meant is None:
        return "; losses are " + ", ".join(form.format(known) for known in LOSSES)
    classes = " with num_scores=(number of classes)" if meant == "softmax" else ""
    return f"; did you mean {form.format(meant)}{classes}?"


class Adaptive(NamedTuple):
    """A loss with parameters that are re-estimated after each round."""

    loss: Callable[..., Any]
    estimate: Callable[..., Any]
    report: Report = "current"


def adaptive(
    loss: Callable[..., Any],
    estimate: Callable[..., Any],
    *,
    report: Report = "current",
) -> Adaptive:
    """Makes a loss with parameters that are re-estimated after each round.

    The first round uses the parameters estimated from the initial score. The
    parameters that belong to the returned model are in ``history.parameters``.

    Args:
      loss: ``loss(score, target, parameters) -> scalar``, for one row.
      estimate: ``estimate(scores, targets, weights) -> parameters`` (any pytree),
        for all N training rows at once; it must ignore rows of weight 0.
      report: the parameters at which losses are reported and compared by early
        stopping, ``history.oob_improvement``, ``cross_validate`` and ``sweep``.
        "current": those estimated after the same round. Use it if the loss values of
        different parameters are comparable, as those of a negative log-likelihood
        that includes its normalizing term. "first": those of the first round. Use it
        if the loss would decrease merely because a parameter does, as Huber's loss
        does with its delta.

    Returns:
      A loss to pass to :func:`jboost.fit`.

    Example:
      >>> import jax.numpy as jnp, jboost as jb
      >>> def scale(scores, targets, weights):
      ...     return jb.losses.weighted_quantile(abs(targets - scores), weights, 0.9)
      >>> def loss(score, target, delta):
      ...     return jb.losses.huber(score, target, delta=delta)
      >>> friedman = jb.losses.adaptive(loss, scale, report="first")
    """
    for name, function in (("loss", loss), ("estimate", estimate)):
        if not callable(function):
            raise TypeError(f"{name} must be callable, got {function!r}")
    if report not in get_args(Report):
        raise ValueError(f"report must be one of {get_args(Report)}, got {report!r}")
    return Adaptive(loss, estimate, report)


def make_adaptive_huber(*, alpha: float = 0.9) -> Adaptive:
    """Returns Huber's loss with delta = the alpha-quantile of |r| in each round.

    Friedman 2001, section 4.4 (M_TreeBoost). Where that quantile is 0, because a
    share alpha of the rows is fitted exactly, delta is the smallest positive |r|: with
    delta = 0 the loss would be constant, and nothing could be learned. It is 1 where
    all rows are fitted exactly.

    Losses are reported at the delta of the first round (``report="first"`` of
    :func:`adaptive`): those of different deltas are not comparable.
    """
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie in (0, 1), got {alpha!r}")

    def estimate(scores, targets, weights):
        sizes = absolute_error(scores, targets)
        positive = (weights > 0) & (sizes > 0)
        least = jnp.min(jnp.where(positive, sizes, jnp.inf))
        delta = weighted_quantile(sizes, weights, alpha)
        return jnp.maximum(delta, jnp.where(jnp.isfinite(least), least, 1.0))

    return adaptive(
        lambda s, t, delta: huber(s, t, delta=delta), estimate, report="first"
    )


def weighted_quantile(
    values: Float[ArrayLike, " N"], weights: Float[ArrayLike, " N"], q: Scalar
) -> Float[Array, ""]:
    """The least value v with sum(weights[values <= v]) >= q sum(weights).

    Found by bisection over the ordered bit patterns of float32 (32 passes over the
    rows): exact, and far cheaper inside a compiled loop than sorting.
    """
    values = jnp.asarray(values, jnp.float32)
    weights = jnp.asarray(weights, jnp.float32)
    wanted = q * sum_rows(weights)

    def halve(_, interval):
        low, high = interval
        middle = middle_float(low, high)
        enough = sum_rows(jnp.where(values <= middle, weights, 0.0)) >= wanted
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    counted = weights > 0
    low = jnp.min(jnp.where(counted, values, jnp.inf))
    high = jnp.max(jnp.where(counted, values, -jnp.inf))
    below = jnp.nextafter(low, jnp.float32(-jnp.inf))
    return jnp.maximum(jax.lax.fori_loop(0, 32, halve, (below, high))[1], low)


def _residual(score, target):
    return score - _like(score, target)


def _defined(inside, value):
    """NaN for a target that the loss is not defined for: fit names the row."""
    return jnp.where(inside, value, jnp.nan)


def _like(score, target):
    """Target in the score's dtype, so that integer targets may be used."""
    return jnp.asarray(target, jnp.result_type(score, jnp.float32))
