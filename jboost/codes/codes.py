# SPDX-License-Identifier: Apache-2.0
"""The codes that trees are grown from, dense or sparse, behind one interface.

Both classes have ``num_rows``, ``num_features``, ``shape`` (N, F), ``row_codes``,
``histogram``, ``child_histogram``, ``pack`` and ``operands``. Later stages call these
without distinguishing the two classes.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped, UInt8, UInt16, UInt32

from jboost.entry.context import current_implementation
from jboost.entry.messages import show_fields
from jboost.kernels import binning_cpu, levels_cuda, xla
from jboost.kernels.binning_cpu import CodeOperands
from jboost.kernels.library import choose, may_run


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseCodes:
    """The codes of a dense matrix, stored by feature.

    Attributes:
      columns: the codes by feature.
      packed: the same codes by row, in the layout that the kernels read; None where no
        kernel needs them.
      order: the rows sorted by each feature's code, where trees are grown from sorted
        rows; missing values come first.
      max_bins: the number of bins that the codes were packed for; None if unknown.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.array([[1.0], [2.0], [np.nan]])
      >>> codes = jb.parts.prepare_codes(jb.apply_bins(jb.fit_bins(x), x))
      >>> codes.columns.tolist()
      [[1, 2, 0]]
    """

    columns: UInt8[Array, "F N"] | UInt16[Array, "F N"] | UInt32[Array, "F N"]
    packed: Shaped[Array, "blocks N W"] | None = None
    order: Int32[Array, "F N"] | None = None
    max_bins: int | None = field(default=None, metadata=dict(static=True))
    is_sparse: ClassVar[bool] = False

    def __repr__(self) -> str:
        return show_fields(self)

    @property
    def num_rows(self) -> int:
        """N."""
        return self.columns.shape[1]

    @property
    def num_features(self) -> int:
        """F."""
        return self.columns.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (N, F), the shape of the matrix that was binned."""
        return self.num_rows, self.num_features

    @property
    def operands(self) -> CodeOperands:
        """Returns the codes as the CPU kernels take them."""
        shape = (self.num_features, self.num_rows)
        return CodeOperands(self.columns, self.packed, (), shape)

    def pack(self, num_bins: int) -> "DenseCodes":
        """Adds the codes by row, unless they are there; runs on a CPU only."""
        if self.packed is not None:
            return self
        return replace(self, packed=binning_cpu.pack(self.columns, num_bins))

    def row_codes(self, feature: Int32[Array, " N"]) -> Int32[Array, " N"]:
        """Returns the code of each row i in feature ``feature[i]``."""
        index = feature * self.num_rows + jnp.arange(self.num_rows, dtype=jnp.int32)
        return self.columns.reshape(-1)[index].astype(jnp.int32)

    def histogram(
        self,
        channels: Int32[Array, "N C"],
        node: Int32[Array, " N"],
        *,
        num_nodes: int,
        num_bins: int,
    ) -> Int32[Array, "M F B C"]:
        """Sums channels by node, feature and code, in plain XLA."""
        sizes = dict(num_nodes=num_nodes, num_bins=num_bins)
        return xla.histogram(self.columns, channels, node, **sizes)

    def child_histogram(
        self,
        channels: Int32[Array, "N C"],
        node: Int32[Array, " N"],
        *,
        num_nodes: int,
        num_bins: int,
    ) -> Int32[Array, "M F B C"]:
        """Computes ``histogram`` if at most N // 2 rows have a node.

        The smaller children of a level meet this condition. Their rows are gathered
        first, which halves the work.
        """
        size = max(1, self.num_rows // 2)
        rows, chosen = xla.select_rows((node >= 0) & (node < num_nodes), size)
        node = jnp.where(chosen, node[rows], num_nodes)
        sizes = dict(num_nodes=num_nodes, num_bins=num_bins)
        return xla.histogram(self.columns, channels[rows], node, **sizes, rows=rows)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseCodes:
    """The codes of a sparse matrix by feature; only some entries are stored.

    Attributes:
      starts: the position of each feature's first entry. Entries at and beyond the
        last position are padding.
      rows: the row of each entry, ascending within a feature.
      codes: the code of each entry.
      absent: the code of the entries that are not stored: 0 where they are missing,
        the code of 0.0 where they are zero.
      num_rows: N.

    Example:
      >>> import scipy.sparse, jboost as jb
      >>> x = scipy.sparse.csr_matrix([[0.0, 3.0], [5.0, 0.0], [0.0, 4.0]])
      >>> bins = jb.fit_bins(x, absent="zero")
      >>> codes = jb.apply_bins(bins, x)
      >>> codes.num_rows, codes.rows.tolist()
      (3, [1, 0, 2])
    """

    starts: Int32[Array, "F+1"]
    rows: Int32[Array, " E"]
    codes: UInt8[Array, " E"] | UInt16[Array, " E"]
    absent: UInt8[Array, " F"] | UInt16[Array, " F"]
    num_rows: int = field(metadata=dict(static=True))
    is_sparse: ClassVar[bool] = True

    def __repr__(self) -> str:
        return show_fields(self)

    @property
    def num_features(self) -> int:
        """F."""
        return self.absent.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Returns (N, F), the shape of the matrix that was binned."""
        return self.num_rows, self.num_features

    @property
    def operands(self) -> CodeOperands:
        """Returns the codes as the CPU kernels take them."""
        codes, entries = self.codes[None], (self.starts, self.rows, self.absent)
        return CodeOperands(codes, codes, entries, (self.num_features, self.num_rows))

    def pack(self, num_bins: int) -> "SparseCodes":
        """Returns the codes as they are: kernels read sparse codes by feature."""
        del num_bins
        return self

    def row_codes(self, feature: Int32[Array, " N"]) -> Int32[Array, " N"]:
        """Returns the code of each row i in feature ``feature[i]``, by bisection."""
        row = jnp.arange(feature.shape[0], dtype=jnp.int32)
        last = self.rows.shape[0] - 1
        end = self.starts[feature + 1]

        def halve(_, bounds):
            low, high = bounds
            middle = low + ((high - low) >> 1)
            before = (self.rows[jnp.minimum(middle, last)] < row) & (low < high)
            return jnp.where(before, middle + 1, low), jnp.where(before, high, middle)

        steps, bounds = (last + 1).bit_length(), (self.starts[feature], end)
        position, _ = jax.lax.fori_loop(0, steps, halve, bounds)
        entry = jnp.minimum(position, last)
        stored = (position < end) & (self.rows[entry] == row)
        code = jnp.where(stored, self.codes[entry], self.absent[feature])
        return code.astype(jnp.int32)

    def histogram(
        self,
        channels: Int32[Array, "N C"],
        node: Int32[Array, " N"],
        *,
        num_nodes: int,
        num_bins: int,
    ) -> Int32[Array, "M F B C"]:
        """Sums channels by node, feature and code, in plain XLA.

        Entries that are not stored sum to the node's total minus the sum of the stored
        ones, which is exact in integers.
        """
        num_features, num_channels = self.num_features, channels.shape[1]
        inside = (node >= 0) & (node < num_nodes)
        channels = jnp.where(inside[:, None], channels, 0)
        node = jnp.where(inside, node, 0)
        # The feature of each entry; F for padding.
        num_entries = self.rows.shape[0]
        ends = jnp.zeros(num_entries + 1, jnp.int32).at[self.starts[1:]].add(1)
        feature = jnp.cumsum(ends)[:num_entries]
        real = feature < num_features
        cell = (node[self.rows] * num_features + feature) * num_bins
        cell = cell + self.codes.astype(jnp.int32)
        stored = xla.segment_sum(
            jnp.where(real[:, None], channels[self.rows], 0),
            jnp.where(real, cell, 0),
            num_nodes * num_features * num_bins,
        ).reshape(num_nodes, num_features, num_bins, num_channels)
        total = xla.segment_sum(channels, node, num_nodes)
        rest = total[:, None] - jnp.sum(stored, axis=2, dtype=stored.dtype)
        every = jnp.arange(num_features, dtype=jnp.int32)
        return stored.at[:, every, self.absent.astype(jnp.int32)].add(rest)

    child_histogram = histogram  # looks at every stored entry, however few rows count


Codes: TypeAlias = DenseCodes | SparseCodes


def pack_codes(codes: Codes, num_bins: int) -> Codes:
    """Packs the codes if kernels may read them; otherwise returns them as is."""
    if isinstance(codes, SparseCodes):
        return codes
    small = codes.columns.dtype == jnp.uint8
    on_gpu = small and current_implementation() == "cuda"
    if not (may_run() or on_gpu):
        return codes

    def nothing(columns):  # programs for other platforms return the same shapes
        shape = binning_cpu.packed_shape(*columns.shape)
        return jnp.zeros(shape, columns.dtype)

    run = choose(
        cpu=partial(binning_cpu.pack, num_bins=num_bins),
        cuda=partial(levels_cuda.pack, num_bins=num_bins) if small else None,
        xla=nothing,
    )
    return replace(codes, packed=run(codes.columns))
