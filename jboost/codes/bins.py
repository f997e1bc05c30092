# SPDX-License-Identifier: Apache-2.0
"""The thresholds that turn values into codes.

This module imports neither the code that fits bins nor the code that applies them, so
that prediction and files do not depend on it.
"""

from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import Array, Float

from jboost.tables.categories import Categories, column_values
from jboost.tables.frames import Schema
from jboost.tables.sparse import Absent

MISSING = 0  # the code of a missing value


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bins:
    """Thresholds per feature.

    Attributes:
      thresholds: one row per feature, ascending and padded with +inf; the last column
        is always +inf, so that every value has a code.
      absent: how entries that a sparse matrix does not store are read: "missing" or
        "zero"; None if the bins were fitted to dense rows without this choice.
      categories: the categorical features, or None if there are none. Their thresholds
        lie between the codes of their categories.

    Example:
      >>> import numpy as np, jboost as jb
      >>> bins = jb.fit_bins(np.array([[1.0, 0.0], [2.0, 0.0], [4.0, 7.0]]))
      >>> bins.thresholds.tolist()
      [[1.5, 3.0, inf], [3.5, inf, inf]]
    """

    thresholds: Float[Array, "F B-1"] | Float[np.ndarray, "F B-1"]
    absent: Absent | None = field(default=None, metadata=dict(static=True))
    categories: Categories | None = None

    def __repr__(self) -> str:
        if not hasattr(self.thresholds, "shape"):  # while JAX builds trees of others
            return "Bins(...)"
        found = f"num_features={self.num_features}, num_bins={self.num_bins}"
        if self.categories is not None:
            found += f", categorical={len(self.categories.features)}"
        return f"Bins({found}, absent={self.absent!r})"

    @property
    def num_features(self) -> int:
        """The number of features, F."""
        return self.thresholds.shape[0]

    @property
    def num_bins(self) -> int:
        """The number of codes of a feature, B, including the code of missing values."""
        return self.thresholds.shape[1] + 1

    @property
    def schema(self) -> Schema:
        """The schema that tables must match to be binned; it holds no names."""
        values = column_values(self.categories, self.num_features)
        return Schema(None, values, compared=False)
