# SPDX-License-Identifier: Apache-2.0
"""Recipes: keyword arguments that make ``fit`` a method from the literature.

In: the parameters of the method. Out: a dict with the loss and the options that
implement the method in ``fit`` or ``boost``. You choose the others (``num_rounds``,
``learning_rate``, ``max_depth``):

    model, history = jb.fit(x, y, **jb.recipes.lad_tree_boost(), num_rounds=200)
    trees, scores = jb.boost(binned, y, key=key, **jb.recipes.lad_tree_boost())

A recipe is a plain dict, so that you can change it:
``{**jb.recipes.ls_tree_boost(), "min_child_samples": 10}``. In the docstrings, g is the
derivative of the loss with respect to the score F (Friedman's pseudo-responses are -g),
R_j are the rows of leaf j, and w_i are their weights.
"""

import functools
from collections.abc import Callable
from typing import Any

from jboost.entry.checks import check_integer, check_number
from jboost.losses import (
    Adaptive,
    absolute_error,
    lambda_rank,
    logistic,
    make_adaptive_huber,
    softmax,
    squared_error,
)
from jboost.losses import cox as cox_loss
from jboost.losses import xendcg as xendcg_loss
from jboost.losses.ranking import Normalize
from jboost.losses.survival import Ties

Recipe = dict[str, Any]
Loss = Callable[..., Any] | Adaptive

# Trees are fitted to -g by least squares: the best split maximizes (sum_L w g)^2 / w_L
# + (sum_R w g)^2 / w_R, in nodes of any size. Leaf values are not regularized.
_FULL: Recipe = dict(subsample=1.0, rows_per_threshold=0)  # all rows and thresholds
_NEWTON: Recipe = dict(leaf_solver="newton", **_FULL)  # each leaf by itself, as in MART
_LEAST_SQUARES: Recipe = dict(
    curvature="unit", l2=0.0, min_gain=0.0, min_child_weight=0.0, min_child_samples=1,
    **_FULL,
)  # fmt: skip


def ls_tree_boost() -> Recipe:
    """Returns LS_TreeBoost, also called GBRT or MART: squared error.

    F_0 = mean(y); trees fit the residuals y - F by least squares; gamma_j =
    mean_{R_j} (y - F).

    Returns:
      Keyword arguments of :func:`jboost.fit`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(8.0)[:, None]
      >>> model, _ = jb.fit(x, x[:, 0] ** 2, **jb.recipes.ls_tree_boost(), num_rounds=3)
      >>> float(model.init_score)
      17.5

    References:
      Friedman 2001, Greedy function approximation: a gradient boosting machine,
      algorithm 2.
    """
    return dict(loss=squared_error, leaf_solver="hessian", **_LEAST_SQUARES)


def lad_tree_boost() -> Recipe:
    """Returns LAD_TreeBoost: absolute error.

    F_0 = median(y); trees fit sign(y - F) by least squares; gamma_j =
    median_{R_j} (y - F), the midpoint for an even count.

    Returns:
      Keyword arguments of :func:`jboost.fit`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(8.0)[:, None]
      >>> recipe = jb.recipes.lad_tree_boost()
      >>> model, _ = jb.fit(x, x[:, 0] ** 2, **recipe, num_rounds=3)
      >>> float(model.init_score)
      12.5

    References:
      Friedman 2001, algorithm 3.
    """
    return dict(loss=absolute_error, leaf_solver="exact", **_LEAST_SQUARES)


def m_tree_boost(*, alpha: float = 0.9) -> Recipe:
    """Returns M_TreeBoost: Huber's loss with delta re-estimated in each round.

    F_0 = median(y); delta = the alpha-quantile of |y - F|; trees fit sign(r)
    min(delta, |r|), r = y - F, by least squares; gamma_j = m + mean_{R_j} sign(r - m)
    min(delta, |r - m|) with m = median_{R_j} (r): one step of the Huber estimate of
    location. With ``stochastic``, delta is still estimated from all rows.

    If a fraction alpha of the rows is fitted exactly, delta is the smallest nonzero
    |y - F|. Losses are reported at the delta of the first round.

    Args:
      alpha: 1 - alpha is the breakdown point, the tolerated fraction of outliers.

    Returns:
      Keyword arguments of :func:`jboost.fit`.

    Raises:
      ValueError: alpha is not inside (0, 1).

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(8.0)[:, None]
      >>> recipe = jb.recipes.m_tree_boost(alpha=0.8)
      >>> model, _ = jb.fit(x, x[:, 0] ** 2, **recipe, num_rounds=3)
      >>> float(model.init_score)
      12.5

    References:
      Friedman 2001, algorithm 4; Huber 1964, Robust estimation of a location parameter.
    """
    return dict(
        loss=make_adaptive_huber(alpha=alpha), leaf_solver="median_step",
        init_score="median", **_LEAST_SQUARES,
    )  # fmt: skip


def l2_tree_boost() -> Recipe:
    """Returns L2_TreeBoost: the binomial log-likelihood for targets 0 and 1.

    F_0 = log(mean(y) / (1 - mean(y))); trees fit y - p, p = sigmoid(F), by least
    squares; gamma_j = sum_{R_j} (y - p) / sum_{R_j} p (1 - p), one Newton step.

    Friedman codes targets as -1 and 1, and his F is half the log-odds. Scores and leaf
    values here are twice his; nothing else differs.

    Returns:
      Keyword arguments of :func:`jboost.fit`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x, y = np.arange(8.0)[:, None], np.arange(8) % 4 == 0
      >>> model, _ = jb.fit(x, y, **jb.recipes.l2_tree_boost(), num_rounds=3)
      >>> round(float(model.init_score), 4)  # log(1 / 3)
      -1.0986

    References:
      Friedman 2001, algorithm 5.
    """
    return dict(loss=logistic, leaf_solver="hessian", **_LEAST_SQUARES)


def l2_tree_boost_multiclass(num_classes: int, *, learning_rate: Any = 0.1) -> Recipe:
    """Returns L_K_TreeBoost: the multinomial log-likelihood for classes 0 .. K - 1.

    F_k0 = 0; with p = softmax(F), K trees per round fit y_k - p_k by least squares, all
    at the same F; gamma_jk = (K - 1) / K * sum_{R_jk} (y_k - p_k) / sum_{R_jk} p_k
    (1 - p_k).

    The Newton step of ``fit`` divides by sum 2 p_k (1 - p_k), the sums of magnitudes of
    the Hessian's rows. Therefore the recipe multiplies the learning rate by
    2 (K - 1) / K. Scores equal Friedman's; ``leaf_value`` includes the factor.

    Args:
      num_classes: K.
      learning_rate: Friedman's nu, a number or a schedule. Pass it here and not to
        ``fit``.

    Returns:
      Keyword arguments of :func:`jboost.fit`.

    Raises:
      TypeError, ValueError: num_classes or learning_rate is invalid.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x, y = np.arange(9.0)[:, None], np.arange(9) // 3
      >>> recipe = jb.recipes.l2_tree_boost_multiclass(3, learning_rate=0.3)
      >>> model, _ = jb.fit(x, y, **recipe, num_rounds=3)
      >>> np.argmax(jb.predict(model, x), axis=1).tolist()
      [0, 0, 0, 1, 1, 1, 2, 2, 2]

    References:
      Friedman 2001, algorithm 6.
    """
    num_classes = check_integer("num_classes", num_classes, least=2)
    factor = 2 * (num_classes - 1) / num_classes
    if callable(learning_rate):
        schedule: Callable[[int], Any] = learning_rate
        rate: Any = lambda number: factor * schedule(number)  # noqa: E731
    else:
        check_number("learning_rate", learning_rate, above=0.0)
        rate = factor * learning_rate
    return dict(
        loss=softmax, num_scores=num_classes, init_score=0.0, learning_rate=rate,
        leaf_solver="hessian", **_LEAST_SQUARES,
    )  # fmt: skip


def gradient_boost(loss: Loss) -> Recipe:
    """Returns Gradient_Boost: steepest descent for any loss, one multiplier per tree.

    F_0 = argmin_c sum w l(c, y); a tree f fits -g by least squares, with means as leaf
    values; rho = argmin sum w l(F + rho f, y); the update is F + nu rho f. For squared
    error rho = sum w r f / sum w f^2 with r = y - F.

    Args:
      loss: a loss, as for :func:`jboost.fit`.

    Returns:
      Keyword arguments of :func:`jboost.fit`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(8.0)[:, None]
      >>> recipe = jb.recipes.gradient_boost(jb.losses.log_cosh)
      >>> _, history = jb.fit(x, x[:, 0] ** 2, **recipe, num_rounds=3)
      >>> bool(history.train_loss[2] < history.train_loss[0])
      True

    References:
      Friedman 2001, algorithm 1.
    """
    return dict(loss=loss, leaf_solver="line_search", **_LEAST_SQUARES)


def xgboost(
    loss: Loss,
    *,
    base_score: Any = 0.5,
    l2: float = 1.0,
    min_gain: float = 0.0,
    min_child_weight: float = 1.0,
) -> Recipe:
    """Returns the second-order method of XGBoost, in the units of the loss.

    F_0 = base_score; splits maximize 1/2 [G_L^2 / (H_L + l2) + G_R^2 / (H_R + l2)
    - G^2 / (H + l2)] - min_gain; gamma_j = -G_j / (H_j + l2), where G and H are the
    sums of w l' and w l'' (for K scores, l'' is the sum of magnitudes of a row of the
    Hessian).

    A tree adds 0 if its root has H < min_child_weight. The same holds for every tree of
    a loss with a zero second derivative, such as
    :func:`jboost.losses.absolute_error`; training warns about it. Use
    :func:`lad_tree_boost` or the defaults of ``fit`` for such losses.

    The paper's lambda is ``l2`` and its gamma is ``min_gain``; the gamma of the XGBoost
    library is 2 ``min_gain``. Its squared error is r^2 / 2, half of
    :func:`jboost.losses.squared_error`; with the latter, double l2, min_gain and
    min_child_weight.

    Args:
      loss: a loss, as for :func:`jboost.fit`; its second derivative should be positive.
      base_score: the initial score, one number or K numbers on the scale of the score,
        or "auto". For the logistic loss it is in log-odds, unlike XGBoost's
        probability.
      l2, min_gain, min_child_weight: arguments of :func:`jboost.fit`.

    Returns:
      Keyword arguments of :func:`jboost.fit`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x, y = np.arange(8.0)[:, None], np.arange(8) > 3
      >>> recipe = jb.recipes.xgboost(jb.losses.logistic, base_score=0.0)
      >>> model, _ = jb.fit(x, y, **recipe, num_rounds=3)
      >>> bool(jb.predict(model, x)[7] > 0)
      True

    References:
      Chen and Guestrin 2016, XGBoost: a scalable tree boosting system, equations 2
      to 7.
    """
    return dict(
        loss=loss, curvature="exact", leaf_solver="newton", regularization="absolute",
        init_score=base_score, l2=l2, min_gain=min_gain,
        min_child_weight=min_child_weight, min_child_samples=1,
    )  # fmt: skip


def lambda_mart(*, at: int | None = 30, normalize: Normalize = "both") -> Recipe:
    """Returns LambdaMART, for rankings: trees fitted to lambdas, Newton leaves.

    ``fit`` takes the query of each row as ``groups``.

    Args:
      at, normalize: arguments of :func:`jboost.losses.lambda_rank`.

    Returns:
      Keyword arguments of :func:`jboost.fit`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x, queries = np.arange(40.0)[:, None] % 10, np.arange(40) // 10
      >>> recipe = jb.recipes.lambda_mart()
      >>> model, _ = jb.fit(x, x[:, 0] // 4, groups=queries, **recipe, num_rounds=20)
      >>> scores = jb.predict(model, x)
      >>> bool(scores[9] > scores[0])
      True

    References:
      Burges 2010, From RankNet to LambdaRank to LambdaMART: an overview, section 7;
      Wu et al. 2010, Adapting boosting for information retrieval measures.
    """
    return dict(
        loss=functools.partial(lambda_rank, at=at, normalize=normalize), **_NEWTON
    )


def xendcg() -> Recipe:
    """Returns XE-NDCG-MART, for rankings: cross-entropy with random labels.

    ``fit`` takes the query of each row as ``groups``.

    Returns:
      Keyword arguments of :func:`jboost.fit`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x, queries = np.arange(40.0)[:, None] % 10, np.arange(40) // 10
      >>> recipe = jb.recipes.xendcg()
      >>> model, _ = jb.fit(x, x[:, 0] // 4, groups=queries, **recipe, num_rounds=20)
      >>> scores = jb.predict(model, x)
      >>> bool(scores[9] > scores[0])
      True

    References:
      Bruch 2021, An alternative cross entropy loss for learning-to-rank, algorithm 1.
    """
    return dict(loss=xendcg_loss, **_NEWTON)


def cox(*, ties: Ties = "efron") -> Recipe:
    """Returns boosting of Cox's partial likelihood, for censored times.

    Targets are a dict with ``time`` and ``event``, and, for left truncation, ``entry``.
    All rows are one group; strata are ``{**recipe, "groups": strata}``.

    Args:
      ties: the treatment of tied times, as for :func:`jboost.losses.cox`.

    Returns:
      Keyword arguments of :func:`jboost.fit`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x, event = np.arange(40.0)[:, None] % 10, np.ones(40)
      >>> y = dict(time=20 - x[:, 0], event=event)
      >>> model, _ = jb.fit(x, y, **jb.recipes.cox(), num_rounds=20)
      >>> scores = jb.predict(model, x)
      >>> bool(scores[9] > scores[0])  # the risk rises with x
      True

    References:
      Cox 1972, Regression models and life-tables; Ridgeway 1999, The state of boosting,
      section 4.
    """
    return dict(loss=functools.partial(cox_loss, ties=ties), groups="all", **_FULL)


def stochastic(recipe: Recipe, *, subsample: float = 0.5) -> Recipe:
    """Returns a recipe with stochastic gradient boosting: row sampling in each round.

    Trees and leaf values of each round use max(1, round(subsample N)) rows, drawn
    without replacement. ``history.oob_improvement`` is the decrease of the loss on the
    other rows in each round. The recommended number of rounds maximizes its cumulative
    sum:

        advised = int(np.nancumsum(history.oob_improvement).argmax()) + 1
        model = jb.truncate(model, advised)

    Args:
      recipe: any recipe of this module.
      subsample: the sampling fraction; Friedman recommends about one half.

    Returns:
      The recipe with ``subsample`` and ``leaf_rows="sample"``.

    Raises:
      TypeError, ValueError: subsample is not a number in (0, 1].

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.arange(8.0)[:, None]
      >>> recipe = jb.recipes.stochastic(jb.recipes.ls_tree_boost())
      >>> _, history = jb.fit(x, x[:, 0] ** 2, **recipe, num_rounds=3)
      >>> history.oob_improvement.shape
      (3,)

    References:
      Friedman 2002, Stochastic gradient boosting, algorithm 1.
    """
    check_number("subsample", subsample, above=0.0, most=1.0)
    return dict(recipe, subsample=subsample, leaf_rows="sample")
