# SPDX-License-Identifier: Apache-2.0
"""Summarizes columns by quantiles, and proposes split candidates from them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
