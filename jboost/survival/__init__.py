# SPDX-License-Identifier: Apache-2.0
"""Survival curves of Cox models, and how well they predict.

A model trained with :func:`jboost.losses.cox` returns log hazard ratios. With the
baseline hazard of its training rows they become probabilities of survival.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
