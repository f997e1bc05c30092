# SPDX-License-Identifier: Apache-2.0
"""Models: prediction and files. Imports nothing of training.

A service that only predicts imports this package alone: ``from jboost.model import
load, predict``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
