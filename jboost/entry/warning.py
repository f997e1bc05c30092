# SPDX-License-Identifier: Apache-2.0
"""Warns the user, at the user's own line."""

import os
import sys
import warnings

_PACKAGE = os.path.dirname(__file__) + os.sep


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that called the package, however deep the caller is."""
    frame, depth, level = sys._getframe(1), 1, 1
    while frame is not None:
        depth += 1
        if frame.f_code.co_filename.startswith(_PACKAGE):
            level = depth
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)
