# SPDX-License-Identifier: Apache-2.0
"""Imports packages that jboost does not depend on, where a call needs them."""

from typing import Any


def import_pandas(caller: str) -> Any:
    """Imports pandas, which is not a dependency of jboost.

    Raises:
      ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise ImportError(
            f"{caller} needs pandas, which is not installed: pip install pandas"
        ) from None
    return pandas
