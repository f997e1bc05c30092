# SPDX-License-Identifier: Apache-2.0
"""The codes of all rows by feature: what trees are grown from, dense or sparse."""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Int32, UInt8, UInt16, UInt32

from jboost.entry.representation import show_fields


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseCodes:
    """The codes of a matrix by feature, of which only some entries are stored.

    Attributes:
      starts: where the entries of each feature begin; from the last one on, entries
        mean nothing.
      rows: of the entries, ascending within a feature.
      codes: of the entries.
      absent: the code of entries that are not stored: 0 where they are missing, that
        of 0.0 where they are zero.
      num_rows: N.
    """

    starts: Int32[Array, "F+1"]
    rows: Int32[Array, " E"]
    codes: UInt8[Array, " E"] | UInt16[Array, " E"]
    absent: UInt8[Array, " F"] | UInt16[Array, " F"]
    num_rows: int = field(metadata=dict(static=True))

    def __repr__(self) -> str:
        """Its fields: the arrays would fill pages."""
        return show_fields(self)

    @property
    def num_features(self) -> int:
        """F."""
        return self.absent.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, F), as that of the matrix."""
        return self.num_rows, self.num_features

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """Starts, rows, codes, absent: the operands of kernels."""
        return self.starts, self.rows, self.codes, self.absent


Codes = UInt8[Array, "F N"] | UInt16[Array, "F N"] | UInt32[Array, "F N"] | SparseCodes


def count_rows(columns: Codes) -> int:
    """N."""
    sparse = isinstance(columns, SparseCodes)
    return columns.num_rows if sparse else columns.shape[1]
