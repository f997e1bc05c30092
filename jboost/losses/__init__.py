# SPDX-License-Identifier: Apache-2.0
"""Built-in losses: plain functions that return one number; smaller is better.

A loss of one row is ``loss(score, target)``, a loss of a group of rows ``loss(scores,
targets, *, where)`` with scores [G], targets with G in front, and ``where`` bool [G],
which marks the real rows. Gradient, curvature, initial score and leaf values are
derived from the function by differentiation, so a custom loss needs nothing but its
formula. Parameters are keyword-only; bind them with ``functools.partial`` or a closure.
``LOSSES`` lists the losses of one row by name, ``GROUP_LOSSES`` those of groups.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
