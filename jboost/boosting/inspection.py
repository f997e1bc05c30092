# SPDX-License-Identifier: Apache-2.0
"""Reports how training treats a loss, and the choices of "auto" for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Shaped

from jboost.boosting.auto import decide_by_loss, needs_minimizer
from jboost.boosting.settings import read_settings
from jboost.entry.checks import check_integer, check_number
from jboost.entry.decorators import on_host
from jboost.entry.messages import make_table, show
from jboost.entry.programs import compiled
from jboost.losses import Adaptive
from jboost.objective.coupling import find_coupling
from jboost.objective.curvature import Curvature, derivatives
from jboost.objective.evaluation import Objective, gradients, hessians, loss_values
from jboost.objective.minimizers import find_minimizers
from jboost.objective.tracing import trace_loss

_POINTS = 400  # scores on either side of the minimizer
_REACH = 30.0  # farthest distance from the minimizer, in max(1, |minimizer|)
_NOISE = 1e-6  # relative to the largest Hessian: below it, a Hessian is rounding error
_CLOSEST = 1e-5  # least distance from the minimizer, in the units of _REACH

Intervals = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class LossReport:
    """A loss along one score, for one target; ``print`` it to read it.

    Attributes:
      scores: the evaluated scores, ascending, [P].
      value, gradient, hessian: value and derivatives of the loss at these scores.
      curvature: the positive curvature that training would use at these scores.
      minima: scores at sign changes of the gradient from negative to positive.
      minimizer: the row's own minimizer as training finds it; NaN: none.
      hessian_zero, hessian_negative: intervals of scores with such a Hessian.
      not_finite: intervals of scores with a value, gradient or Hessian not finite.
      choices: choices of "auto": curvature, leaf_solver, l2 and min_child_samples.

    Example:
      >>> import jboost as jb
      >>> report = jb.inspect_loss(jb.losses.absolute_error, 2.0)
      >>> report.minima, report.minimizer, report.choices["leaf_solver"]
      ((2.0,), 2.0, 'exact')
    """

    scores: np.ndarray
    value: np.ndarray
    gradient: np.ndarray
    hessian: np.ndarray
    curvature: np.ndarray
    minima: tuple[float, ...]
    minimizer: float
    hessian_zero: Intervals
    hessian_negative: Intervals
    not_finite: Intervals
    choices: dict[str, Any]

    def __repr__(self) -> str:
        """As ``str``: the arrays would fill pages."""
        return str(self)

    def _repr_html_(self) -> str:
        """Shows the same in a notebook."""
        title, *lines = str(self).splitlines()
        rows = [[*line.partition(": ")[::2]] for line in lines]
        return make_table(title, [["", ""], *rows])

    def __str__(self) -> str:
        low, high = self.scores[0], self.scores[-1]
        minima = ", ".join(f"{point:.6g}" for point in self.minima) or "none"
        own = "none" if np.isnan(self.minimizer) else f"{self.minimizer:.6g}"
        lines = [
            f"{len(self.scores)} scores from {low:.4g} to {high:.4g}",
            f"minima: {minima}; the row's own minimizer in training: {own}",
            f"Hessian zero: {_describe(self.hessian_zero)}",
            f"Hessian negative: {_describe(self.hessian_negative)}",
            f"value or derivatives not finite: {_describe(self.not_finite)}",
        ]
        lines += [
            f'"auto" {name}: {_explain(name, c)}' for name, c in self.choices.items()
        ]
        return "\n".join(lines)


@on_host("call it on concrete arrays")
def inspect_loss(
    loss: Callable[..., Any] | Adaptive,
    target: Any,
    *,
    num_scores: int = 1,
    k: int = 0,
    scores: Shaped[ArrayLike, " P"] | None = None,
    reach: float = _REACH,
    curvature: Curvature = "auto",
) -> LossReport:
    """Evaluates a loss along one score; the other scores are 0.

    The scores lie around the minimizer (or 0), densely near it and up to ``reach``
    times max(1, |minimizer|) away. The smoothing scale and the least value of the
    curvature, which in training come from the data, are here those of scores that
    are normally distributed about the minimizer, with standard deviation
    max(1, |minimizer|).

    Args:
      loss: a loss that :func:`jboost.fit` accepts.
      target: the target of one row: a number, or the pytree that the loss takes.
      num_scores: K, the number of scores.
      k: index of the score that varies.
      scores: scores to evaluate instead, ascending.
      reach: distance of the farthest scores.
      curvature: the policy to show; see :func:`jboost.fit`.

    Raises:
      TypeError, ValueError: as for :func:`jboost.fit`.

    Example:
      >>> import jboost as jb
      >>> report = jb.inspect_loss(jb.losses.absolute_error, 2.0)
      >>> report.minima, report.choices["leaf_solver"]
      ((2.0,), 'exact')
    """
    num_scores = check_integer("num_scores", num_scores, least=1)
    k = check_integer("k", k, least=0, most=num_scores - 1)
    curvature = read_settings(dict(curvature=curvature)).curvature
    check_number("reach", reach, above=_CLOSEST)
    given = None if scores is None else _check_scores(scores)
    size = 2 * _POINTS + 1 if given is None else len(given)

    def repeat(leaf):
        array = np.asarray(leaf)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"target must hold numbers, got {show(leaf)}")
        narrow = {"f": np.float32, "i": np.int32, "u": np.int32}.get(array.dtype.kind)
        return np.repeat(array.astype(narrow or array.dtype)[None], size, axis=0)

    targets = jax.tree.map(repeat, target)
    own = curvature if callable(curvature) else None
    traced, constants = trace_loss(loss, targets, num_scores, own)
    policy = decide_by_loss(traced, curvature).curvature
    choices = decide_by_loss(traced)
    look = compiled(_look_along, traced, k, policy, size)
    points, minimizer, values = look(constants, targets, given, np.float32(reach))
    points = np.asarray(points)
    minimizer = float(minimizer) if np.isfinite(minimizer) else float("nan")
    value, gradient, hessian, positive = (np.asarray(array) for array in values)
    finite = np.isfinite(value) & np.isfinite(gradient) & np.isfinite(hessian)
    noise = _NOISE * np.max(np.abs(hessian[np.isfinite(hessian)]), initial=0)
    return LossReport(
        scores=points,
        value=value,
        gradient=gradient,
        hessian=hessian,
        curvature=positive,
        minima=_minima(points, gradient, minimizer),
        minimizer=minimizer,
        hessian_zero=_intervals(points, np.abs(hessian) <= noise),
        hessian_negative=_intervals(points, hessian < -noise),
        not_finite=_intervals(points, ~finite),
        choices=dict(
            curvature=choices.curvature,
            leaf_solver=choices.leaf_solver,
            l2=choices.l2,
            min_child_samples=max(choices.min_child_samples, 0) or "auto",
        ),
    )


def _check_scores(scores):
    expected = "scores must be at least two ascending finite numbers"
    points = np.asarray(scores)
    if points.ndim != 1 or points.size < 2 or points.dtype.kind not in "fiu":
        raise ValueError(f"{expected}, got {show(scores)}")
    points = points.astype(np.float32)
    if not np.isfinite(points).all() or (np.diff(points) < 0).any():
        raise ValueError(f"{expected}, got {show(scores)}")
    return points


def _look_along(loss, k, policy, size, constants, targets, points, reach):
    """Returns scores around the minimizer, the minimizer, and the loss there."""
    origin = jnp.zeros((loss.num_scores, size), jnp.float32)
    parameters = ()
    if loss.estimate is not None:
        rows = origin[0] if loss.num_scores == 1 else origin.T
        parameters = loss.estimate(
            constants, rows, targets, jnp.ones(size, jnp.float32)
        )
    objective = Objective(loss, constants, targets, parameters, None)
    # Training skips this search for quadratic losses; the report shows it for all.
    own = find_minimizers(objective, size)
    minimizer = own[k, 0]
    center = jnp.where(jnp.isfinite(minimizer), minimizer, 0.0)
    unit = jnp.maximum(jnp.abs(center), 1.0)
    if points is None:
        side = _CLOSEST * (reach / _CLOSEST) ** jnp.linspace(
            0.0, 1.0, _POINTS, dtype=jnp.float32
        )
        steps = jnp.concatenate([-side[::-1], jnp.zeros(1, jnp.float32), side])
        points = center + unit * steps
    scores = origin.at[k].set(points)
    if needs_minimizer(loss):
        objective = objective._replace(minimizer=own)
    weights = _normal_weights((points - center) / unit)
    coupling = find_coupling(objective, scores, weights)
    objective = objective._replace(coupling=coupling)
    seed = jnp.zeros(2, jnp.uint32)
    positive = derivatives(objective, scores, weights, policy, seed=seed)[1]
    values = (
        loss_values(objective, scores),
        gradients(objective, scores)[k],
        hessians(objective, scores)[k],
        positive[k],
    )
    return points, minimizer, values


def _normal_weights(steps):
    """Returns weights that make unevenly spread scores normally distributed."""
    edges = jnp.concatenate([steps[:1], (steps[1:] + steps[:-1]) / 2, steps[-1:]])
    weights = jnp.diff(edges) * jnp.exp(-jnp.square(steps) / 2)
    # Far from the minimizer all weights underflow to 0.
    return jnp.where(jnp.sum(weights) > 0, weights, 1.0)


def _minima(points, gradient, minimizer):
    """Returns where the gradient turns positive; the minimizer of training is exact."""
    known = np.flatnonzero(np.isfinite(gradient) & (gradient != 0))
    signs = np.sign(gradient[known])
    turns = np.flatnonzero((signs[:-1] < 0) & (signs[1:] > 0))
    found = []
    for turn in turns:
        low, high = points[known[turn]], points[known[turn + 1]]
        inside = low <= minimizer <= high
        found.append(float(minimizer) if inside else float(low / 2 + high / 2))
    return tuple(found)


def _intervals(points, mask) -> Intervals:
    """Returns runs of true entries as (first, last) scores."""
    edges = np.flatnonzero(np.diff(np.r_[False, mask, False].astype(int)))
    pairs = zip(edges[::2], edges[1::2] - 1, strict=True)
    return tuple((float(points[a]), float(points[b])) for a, b in pairs)


def _describe(intervals: Intervals) -> str:
    parts = [f"{a:.4g}" if a == b else f"{a:.4g} to {b:.4g}" for a, b in intervals]
    return ", ".join(parts) or "nowhere"


def _explain(name: str, choice: Any) -> str:
    reasons = {
        ("curvature", "exact"): "the Hessian",
        ("curvature", "auto"): "secant of the gradient about the row's own minimizer, "
        "|Hessian| where it has none",
        ("leaf_solver", "exact"): "the argmin of the leaf's loss",
        ("leaf_solver", "newton"): "-G / (H + l2)",
        ("leaf_solver", "guarded"): "-G / (H + l2), replaced by the argmin in leaves "
        "where it falls short of its predicted decrease, and in all leaves if 75 % of "
        "the rows have almost no curvature",
        ("min_child_samples", "auto"): "one row in 50, from 1 to 20; 3 to 20 for "
        "medians and quantiles; 20 if 75 % of the rows have almost no curvature",
    }
    reason = reasons.get((name, choice))
    return f"{choice} ({reason})" if reason else str(choice)
