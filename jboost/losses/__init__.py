# SPDX-License-Identifier: Apache-2.0
"""Built-in losses: plain functions, ``loss(score, target) -> scalar``.

A loss is a function of the score and the target of one row; smaller is better.
Gradient, Hessian, initial score and leaf values are derived from the function by
differentiation, so a custom loss needs nothing but its formula. Parameters are
keyword-only; bind them with ``functools.partial`` or a closure.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
