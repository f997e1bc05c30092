# SPDX-License-Identifier: Apache-2.0
"""Distributions with parameters computed from a score, without dependencies.

``normal(score)`` and its like map the score of one row to a distribution: pass them to
:func:`jboost.losses.likelihood` to train, and to :func:`jboost.predict` as
``inverse_link`` to predict. Locations are scores and scales are exponentials of scores,
so that a change of the units of the targets shifts and scales the scores.

Distributions are immutable pytrees with ``log_prob``, ``cdf``, ``icdf``, ``sample``,
``mean``, ``variance`` and, where it has a closed form, ``fisher_information``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
