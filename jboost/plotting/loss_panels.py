# SPDX-License-Identifier: Apache-2.0
"""Draws a loss, its gradient, its Hessian and the curvature that training uses.

In: a loss and one target. Out: three axes.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import ArrayLike, Shaped

from jboost.boosting.inspection import inspect_loss
from jboost.entry.representation import show
from jboost.losses import Adaptive
from jboost.objective.curvature import Curvature
from jboost.plotting.canvas import colors, ink, open_panels, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REACH = 4.0  # range of scores on both sides, in units of max(1, |minimizer|)
_STEEP = 3.0  # the y-axis ends at this multiple of a high quantile of the curves


def loss(
    loss: Callable[..., Any] | Adaptive,
    target: Any,
    scores: Shaped[ArrayLike, " P"] | None = None,
    *,
    num_scores: int = 1,
    k: int = 0,
    curvature: Curvature | Sequence[Curvature] = "auto",
    axes: "Sequence[Axes] | np.ndarray | None" = None,
) -> np.ndarray:
    """Draws a loss as a function of its score: value, gradient, Hessian and curvature.

    The third panel shows the second derivative, and the positive curvature that
    training uses in its place; they are equal for a quadratic loss. A dotted line marks
    the minimizer of the loss for this target, if there is one. Training derives the
    smoothing scale of the curvature from the data; :func:`jboost.inspect_loss` says
    which scale is used here.

    Args:
      loss, target, num_scores, k: as for :func:`jboost.inspect_loss`.
      scores: the scores to evaluate, ascending; None uses the minimizer (or 0) plus or
        minus 4 max(1, |minimizer|).
      curvature: one policy, or several to compare; see :func:`jboost.fit`.
      axes: three axes to draw on; None creates a new figure.

    Returns:
      Three axes: loss, gradient, curvature.

    Raises:
      TypeError, ValueError: as for :func:`jboost.inspect_loss`.

    Example:
      >>> import jboost as jb
      >>> from jboost import plotting
      >>> axes = plotting.loss(jb.losses.absolute_error, 0.0)
      >>> [ax.get_title() for ax in axes]
      ['loss', 'gradient', 'curvature']
    """
    if isinstance(curvature, str) or callable(curvature):
        policies: tuple[Any, ...] = (curvature,)
    else:
        policies = tuple(curvature)
    if not policies:
        raise ValueError(
            f"curvature must be at least one policy, got {show(curvature)}"
        )
    reports = {
        policy: inspect_loss(
            loss, target, num_scores=num_scores, k=k, scores=scores, reach=_REACH,
            curvature=policy,
        )
        for policy in policies
    }  # fmt: skip
    report = reports[policies[0]]
    panels = open_panels(axes, 3, (10, 3.2))
    own = colors(2 + len(policies))
    at = report.scores
    for ax, name, values in (
        (panels[0], "loss", report.value),
        (panels[1], "gradient", report.gradient),
    ):
        ax.plot(at, _finite(values), color=own[0], linewidth=2)
        ax.set_title(name)
    panels[1].axhline(0, color=ink(panels[1]), linewidth=0.8, alpha=0.5)
    _draw_curvature(panels[2], reports, own)
    for ax in panels:
        tidy(ax)
        ax.set_xlabel("score" if num_scores == 1 else f"score {k}")
        if at[0] <= report.minimizer <= at[-1]:
            ax.axvline(report.minimizer, color=ink(ax), linewidth=0.8, linestyle=":")
    return panels


def _finite(values):
    """Replaces infinities by NaN, which matplotlib draws as gaps."""
    return np.where(np.isfinite(values), values, np.nan)


def _label(policy):
    """Returns a policy in quotation marks, or the name of a function."""
    if isinstance(policy, str):
        return f'"{policy}"'
    return getattr(policy, "__name__", "function")


def _draw_curvature(ax, reports, own):
    """Draws the Hessian, and the curvature of each policy."""
    report = next(iter(reports.values()))
    lines = {"Hessian": _finite(report.hessian)}
    lines |= {_label(policy): _finite(r.curvature) for policy, r in reports.items()}
    for number, (name, values) in enumerate(lines.items()):
        style, width = ("--", 1.6) if number == 0 else ("-", 2)
        # The first policy has the same color as loss and gradient.
        color = own[{0: 1, 1: 0}.get(number, number)]
        ax.plot(
            report.scores, values, style, color=color, linewidth=width, label=name,
            zorder=3 if number == 0 else 2,
        )  # fmt: skip
    ax.set_title("curvature")
    _limit(ax, report.scores, list(lines.values()))
    ax.legend(frameon=False)


def _limit(ax, scores, lines):
    """Sets y-limits that include 0 and exclude poles.

    A pole would otherwise compress the rest of the curves into a flat line.
    """
    # Scores may be spaced unevenly: resample, so that quantiles refer to the x-axis.
    even = np.linspace(scores[0], scores[-1], 401)
    values = np.concatenate([np.interp(even, scores, line) for line in lines])
    values = values[np.isfinite(values)]
    if not values.size:
        return
    top, usual = values.max(), np.quantile(values, 0.96)
    if top > _STEEP * usual > 0:
        top = _STEEP * usual
    low = min(0.0, values.min())
    margin = 0.05 * (top - low) or 0.05
    ax.set_ylim(low - margin, top + margin)
