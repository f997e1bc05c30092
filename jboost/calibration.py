# SPDX-License-Identifier: Apache-2.0
"""Intervals that cover new targets with a promised probability, for any model.

In: a trained model, and rows that it was not trained on. Out: :class:`Intervals`, which
widens the predictions for new rows by a margin that covers enough of those rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float

from jboost.entry import checks
from jboost.entry.arguments import explain_arguments
from jboost.entry.decorators import on_host
from jboost.entry.messages import show
from jboost.model.ensemble import Model
from jboost.model.predicting import predict
from jboost.tables.frames import read_values

ConformalScore = Literal["absolute", "normalized", "quantiles"]
_SCORES = ("absolute", "normalized", "quantiles")


@dataclass(frozen=True, eq=False)
class Intervals:
    """Intervals from :func:`jboost.conformal`.

    Attributes:
      model: the model, or the function that predicts.
      alpha: the largest share of new targets that may lie outside.
      score: the name of the conformal score, as for :func:`jboost.conformal`.
      margin: Q, a number; [K] for K targets.
      inverse_link: the inverse link applied to the model's score, or None.

    Example:
      >>> import numpy as np, jboost as jb
      >>> rng = np.random.default_rng(0)
      >>> x = rng.normal(size=(600, 2))
      >>> y = x[:, 0] + rng.normal(size=600)
      >>> model, _ = jb.fit(x[:300], y[:300], num_rounds=20)
      >>> intervals = jb.conformal(model, x[300:500], y[300:500], alpha=0.1)
      >>> low, high = intervals.predict_interval(x[500:])
      >>> bool(np.allclose(high - low, 2 * intervals.margin, atol=1e-5))
      True
    """

    model: Any
    alpha: float
    score: ConformalScore
    margin: Float[np.ndarray, "*K"]
    inverse_link: Callable[..., Any] | None = None

    def predict_interval(
        self, x: Any, *, offset: Any = None
    ) -> tuple[Float[np.ndarray, "N *K"], Float[np.ndarray, "N *K"]]:
        """Returns the lower and the upper ends of the intervals of new rows.

        Args:
          x: the new rows, in the form that the model takes.
          offset: the offset of the rows, as for :func:`jboost.predict`, if the model
            was trained with one.
        """
        parts = _predict(self.model, x, offset, self.inverse_link, self.score)
        if self.score == "absolute":
            (center,) = parts
            return center - self.margin, center + self.margin
        first, second = parts
        if self.score == "normalized":
            return first - self.margin * second, first + self.margin * second
        # A negative margin narrows; an interval ends as a point, not as nothing.
        center = (first + second) / 2
        low = np.minimum(first - self.margin, center)
        return low, np.maximum(second + self.margin, center)

    def __repr__(self) -> str:
        """Shows everything but the model."""
        return (
            f"Intervals(alpha={self.alpha}, score={self.score!r}, "
            f"margin={np.array2string(self.margin, precision=5)})"
        )


@explain_arguments
@on_host("call it on concrete arrays")
def conformal(
    model: Model | Callable[[Any], Any],
    x_cal: Any,
    y_cal: Any,
    *,
    alpha: float,
    score: ConformalScore = "absolute",
    inverse_link: Callable[..., Any] | None = None,
    offset: Any = None,
) -> Intervals:
    """Makes intervals that cover a new target with probability at least 1 - alpha.

    The scores s of n calibration rows, which were not used in training, give

        Q = the k-th smallest of s_1, ..., s_n,  k = ceil((n + 1) (1 - alpha))

        "absolute":    s = |y - f|              f +- Q
        "normalized":  s = |y - f| / sigma      f +- Q sigma
        "quantiles":   s = max(l - y, y - u)    [l - Q, u + Q]

    A new target lies inside with probability k / (n + 1), or more where scores are
    equal, if its row and the calibration rows are exchangeable (drawn alike), whatever
    the model is. The probability is over the draw of all these rows; it is not promised
    for each value of x. "normalized" and "quantiles" give intervals of a width that
    depends on x. Rows of different weight are not exchangeable; weights are not taken.

    Args:
      model: a model from :func:`jboost.fit`, or a function ``predict(x)`` of all rows:
        the ``predict`` of an estimator, or a function that joins two models.
      x_cal: the calibration rows, in the form that the model takes.
      y_cal: finite targets [N] of these rows. For "absolute" also [N, K] if the model
        predicts K numbers per row; each column is then covered by itself.
      alpha: the probability of a miss, in (0, 1); at least 1 / (n + 1).
      score: "absolute" for predictions f [N]; "normalized" for (f, sigma), sigma > 0 (a
        predicted scale), and "quantiles" for (l, u): two numbers per row, as [N, 2] or
        as a pair of arrays.
      inverse_link: the inverse link of the model's score, as for
        :func:`jboost.predict`; it returns the predictions above.
      offset: the offset of the calibration rows, as for :func:`jboost.predict`.

    Returns:
      Intervals; ``low, high = intervals.predict_interval(x)``.

    Raises:
      TypeError, ValueError: for arguments that do not suit each other; alpha is so
        small that no finite interval from n rows keeps the promise.

    Example:
      >>> import numpy as np, jboost as jb
      >>> rng = np.random.default_rng(0)
      >>> x = rng.normal(size=(600, 2))
      >>> y = x[:, 0] + rng.normal(size=600)
      >>> model, history = jb.fit(x[:300], y[:300], num_rounds=20)
      >>> intervals = jb.conformal(model, x[300:500], y[300:500], alpha=0.1)
      >>> low, high = intervals.predict_interval(x[500:])
      >>> bool(np.mean((low <= y[500:]) & (y[500:] <= high)) > 0.8)
      True

    References:
      Vovk, Gammerman and Shafer 2005, "Algorithmic Learning in a Random World"; Lei,
      G'Sell, Rinaldo, Tibshirani and Wasserman 2018, "Distribution-Free Predictive
      Inference for Regression" (split conformal; section 5.2 for a scale); Romano,
      Patterson and Candes 2019, "Conformalized Quantile Regression".
    """
    checks.check_number("alpha", alpha, above=0.0, most=1 - 1e-9)
    checks.check_word("score", score, _SCORES)
    targets = np.asarray(read_values(y_cal, "y_cal"), np.float64)
    parts = _predict(model, x_cal, offset, inverse_link, score)
    if targets.ndim not in (1, 2) or targets.shape != parts[0].shape:
        raise ValueError(
            f"y_cal must have the shape of the predictions, {parts[0].shape}, got "
            f"{targets.shape}"
        )
    _check_finite("y_cal", targets)
    number, scores = len(targets), _score_rows(targets, parts, score)
    # The fraction that was written or computed: 0.1, or 1 / 9, not its nearest float.
    share = Fraction(str(float(alpha))).limit_denominator(10**12)
    rank = ceil((number + 1) * (1 - share))
    if rank > number:
        raise ValueError(
            f"alpha must be at least 1 / {number + 1} with {number} calibration rows, "
            f"got {alpha}: the interval would be infinite"
        )
    margin = np.partition(scores, rank - 1, axis=0)[rank - 1]
    return Intervals(model, float(alpha), score, np.asarray(margin), inverse_link)


def _score_rows(targets, parts, score):
    """Returns the conformal score of each target, given its predictions."""
    if score == "absolute":
        return np.abs(targets - parts[0])
    if score == "normalized":
        return np.abs(targets - parts[0]) / parts[1]
    low, high = parts
    return np.maximum(low - targets, targets - high)


def _predict(model, x, offset, inverse_link, score):
    """Returns the predictions that a score needs, as arrays of float64."""
    if not callable(model):
        found = predict(model, x, offset=offset, inverse_link=inverse_link)
    elif offset is not None or inverse_link is not None:
        raise ValueError(
            "offset and inverse_link must be None where model is a function, which "
            "applies them itself"
        )
    else:
        found = model(x)
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(found)]
    if score != "absolute" and len(leaves) == 1 and leaves[0].ndim == 2:
        leaves = [*leaves[0].T]
    shapes = [leaf.shape for leaf in leaves]
    expected = 1 if score == "absolute" else 2
    if len(leaves) != expected or len({*shapes}) > 1 or not leaves[0].ndim:
        raise ValueError(
            f"score={show(score)} needs "
            f"{'one number' if expected == 1 else 'two numbers'} "
            f"predicted for each row, got {len(leaves)} of shapes {shapes}"
        )
    for leaf in leaves:
        _check_finite("predictions", leaf)
    if score == "normalized" and not (leaves[1] > 0).all():
        row = int(np.argmin(leaves[1]))
        raise ValueError(
            f"predicted scales must be positive, got {leaves[1][row]} in row {row}"
        )
    return leaves


def _check_finite(name, array):
    """Names the first row that is not finite."""
    bad = ~np.isfinite(array).all(axis=tuple(range(1, array.ndim)))
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"{name} must be finite, got {array[row]} in row {row}")
