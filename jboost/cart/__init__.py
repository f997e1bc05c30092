# SPDX-License-Identifier: Apache-2.0
"""Single regression and classification trees (CART), and their pruning."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
