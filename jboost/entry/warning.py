# SPDX-License-Identifier: Apache-2.0
"""Issues warnings that point at the user's own line of code."""

import os
import sys
import warnings

# The folder of the whole package, one level above this box.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that called the package, at any depth of the call stack.

    The outermost frame inside the package decides, so that a warning of `fit` that an
    estimator calls points at the line that called the estimator.
    """
    frame, depth, level = sys._getframe(1), 1, 1
    while frame is not None:
        depth += 1
        if frame.f_code.co_filename.startswith(_PACKAGE):
            level = depth
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level + 1)
