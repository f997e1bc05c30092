# SPDX-License-Identifier: Apache-2.0
"""Built-in metrics: functions of all rows, ``metric(scores, targets, weights)``.

In: the scores of all rows, their targets and weights. Out: one number, which training
reports after each round. Every function is written in ``jax.numpy``, ignores rows of
weight 0, and agrees with the scikit-learn function named in its docstring.

``inverse_link`` converts scores to predictions. If :func:`jboost.fit` gets a metric of
this module, by name or as a function, it binds the inverse link of the loss
(:func:`jboost.losses.inverse_link`). A custom loss has none, so that its score is the
prediction. To bind another: ``{"mae": partial(mae, inverse_link=jnp.exp)}``.

``auc`` and ``average_precision`` need a ranking, which any score provides. ``mae``,
``mse``, ``rmse``, ``mape``, ``r2``, ``poisson_deviance`` and ``gamma_deviance`` need
predictions, which every loss provides. ``log_loss`` and ``brier`` need probabilities,
``accuracy`` and ``error`` need labels: from a bound link or a classification loss
(``logistic``, ``focal``, ``exponential``, ``softmax``; for labels also ``hinge`` and
``hinge_squared``). Targets of two classes are 0 and 1, or -1 and 1.

For targets [N, K] and as many scores, metrics are means over the K columns; NaN marks
a missing target. ``accuracy`` and ``error`` reject targets [N, K].

Metrics of groups, ``metric(scores, targets, *, where, weights)``, see the rows of one
group: ``ndcg``, ``mean_average_precision`` and ``mrr`` the documents of a query,
``concordance_index`` survival times. They are NaN for groups without anything to
compare; the mean over groups leaves these out.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
