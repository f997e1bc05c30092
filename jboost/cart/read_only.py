# SPDX-License-Identifier: Apache-2.0
"""Makes trees whose arrays cannot be written to."""

from typing import Any

import numpy as np

from jboost.model.regression_tree import RegressionTree


def make_tree(**arrays: Any) -> RegressionTree:
    """Returns a tree with read-only arrays."""
    for array in arrays.values():
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
    return RegressionTree(**arrays)
