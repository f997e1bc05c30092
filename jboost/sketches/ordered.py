# SPDX-License-Identifier: Apache-2.0
"""Bins from quantile sketches, and the sketch of rows in their global order.

Its bits depend on the rows and their order alone, not on batches or processes; those of
:class:`jboost.sketches.QuantileSketch`, which takes rows in any order, depend on both.
"""

from functools import reduce
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int64

from jboost.codes.binning import pad_thresholds
from jboost.codes.bins import Bins
from jboost.codes.gathering import has_missing, join_shares
from jboost.codes.thresholds import check_max_bins, cut_positions, midpoints
from jboost.entry.decorators import on_host
from jboost.entry.exchanges import (
    gather_numbers,
    gather_tables,
    num_processes,
    process_number,
)
from jboost.numerics.arrays import padded_size
from jboost.sketches.sketch import (
    EMPTY,
    FAN,
    PendingRows,
    QuantileSketch,
    capacity,
    join_weights,
    num_ranks,
    summarize_pending,
    summarize_sketch,
)
from jboost.sketches.summary import (
    QuantileSummary,
    find_candidates,
    merge_summaries,
    prune_summary,
    spread_between,
    summarize_column,
)

_LEAST_SHARE = 4  # the error is at most 1/4 of a bin's share of the weight


@on_host("call it on concrete arrays")
def bins_from_sketch(sketch: QuantileSketch, *, max_bins: int = 256) -> Bins:
    """Chooses thresholds like :func:`jb.fit_bins`, for streamed rows.

    A threshold is midway between two adjacent entries lo < hi of the summary. If all
    values are known (a feature with at most 24 / eps distinct values), thresholds equal
    those of ``fit_bins``, up to rounding of fractional weights. Otherwise, unknown
    values can lie between lo and hi; their total weight is at most the sketch's error.

    Bins have equal shares of capped weight, as in ``fit_bins``. With ``eps <= 1 / (8 *
    max_bins)``, the error is less than 1/6 of a bin's share of the weight that remains
    without the heavy values.

    Args:
      sketch: the sketch of all rows.
      max_bins: the maximum number of codes per feature, including the missing code.

    Returns:
      Bins with as many codes as necessary, rounded up to a power of two, at most
      ``max_bins``.

    Raises:
      ValueError: max_bins is not in [2, 65536], or is greater than 1 + 1 / (4 eps),
        where the error would exceed 1/4 of a bin's share.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import sketches
      >>> sketch = sketches.make_sketch(1)
      >>> for value in (1.0, 4.0, 2.0):
      ...     sketch = sketches.update_sketch(sketch, [[value]])
      >>> np.asarray(sketches.bins_from_sketch(sketch).thresholds)
      array([[1.5, 3. , inf]], dtype=float32)
    """
    check_max_bins(max_bins)
    most = 1 + int(1 / (_LEAST_SHARE * sketch.eps))
    if _LEAST_SHARE * sketch.eps * (max_bins - 1) > 1:
        raise ValueError(
            f"max_bins must be at most {most} for a sketch made with eps={sketch.eps} "
            f"(1 + 1/(4 eps)), got {max_bins}"
        )
    rows = [
        cut_summary(summarize_sketch(sketch, feature), int(max_bins))
        for feature in range(sketch.num_features)
    ]
    absent = "missing" if np.any(sketch.missing > 0) else None
    return pad_thresholds(rows, int(max_bins), absent)


def cut_summary(summary: QuantileSummary, max_bins: int) -> Float[np.ndarray, " C"]:
    """Chooses the thresholds of one feature; see :func:`bins_from_sketch`."""
    lower = np.arange(summary.num_entries - 1)
    if summary.num_entries > max_bins - 1:
        between = spread_between(summary)
        lower = cut_positions(summary.weight, max_bins - 1, between)
    return _thresholds_above(summary, lower)


@on_host("call it on concrete arrays", runs_jax=False)
def find_thresholds(summary: QuantileSummary, *, eps: float) -> Float[np.ndarray, " C"]:
    """Returns thresholds at split candidates with ranks less than ``eps`` apart.

    There is one threshold above each candidate of :func:`find_candidates` except the
    largest, midway to the next value in the summary. If there are few distinct values,
    each is a candidate, and the thresholds equal those of exact search.

    Args:
      summary: the summary of a feature, or of the rows of one node weighted with
        Hessians.
      eps: the bound on the distance of ranks, as in :func:`find_candidates`.

    Returns:
      Ascending thresholds; ``x <= threshold`` goes left.

    Raises:
      TypeError, ValueError: the errors of :func:`find_candidates`.

    Example:
      >>> import numpy as np, jboost as jb
      >>> from jboost import sketches
      >>> summary = sketches.make_summary(np.arange(100), np.ones(100))
      >>> sketches.find_thresholds(summary, eps=0.3).tolist()
      [0.5, 25.5, 50.5, 75.5]
    """
    candidates = find_candidates(summary, eps=eps).value
    return _thresholds_above(summary, np.searchsorted(summary.value, candidates[:-1]))


def _thresholds_above(summary, lower):
    """Returns the thresholds between the given entries and the next ones."""
    return midpoints(summary.value[lower], summary.value[lower + 1])


_HEIGHTS = FAN.bit_length() - 1  # heights of the binary tree for each level

Nodes = dict[tuple[int, int], QuantileSummary]  # keys are height and number


class _Layout(NamedTuple):
    """The rows and nodes that the processes hold; see :class:`OrderedSketch`.

    Attributes:
      blocks: the block of each row that is not in a node; ``weight`` belongs to these.
      nodes: height and number of each node, then its number of entries in each feature.
        Height -1 is padding.
    """

    blocks: Int64[np.ndarray, " n"]
    weight: Float[np.ndarray, " n"] | None
    nodes: Int64[np.ndarray, "m 2+F"]


class OrderedSketch:
    """Summarizes rows in global order, with an error of at most ``eps``.

    Rows with the same global number // B form a block, B = 16 (b_1 + 1), with b_l as in
    :class:`jboost.sketches.QuantileSketch`. Full blocks are the leaves of a binary
    tree. Nodes 2 i and 2 i + 1 of height h are merged into node i of height h + 1 as
    soon as both exist. Three heights form a level: level 1 begins with the blocks,
    level 2 with nodes of 8 blocks, level 3 with nodes of 64::

        height 3         0                        level 2: pruned to b_2 + 1 entries
        height 2     0       1
        height 1   0   1   2   3
        height 0  0 1 2 3 4 5 6 7   8   9 ...     level 1: pruned to b_1 + 1 entries

    A node is exact if its rows have at most 8 (b_1 + 1) distinct values. If the union
    of two nodes of level l has more values, the nodes are merged as well, but exact
    ones are pruned to b_l + 1 entries first. A node that is not exact is pruned to
    b_{l+1} + 1 entries when it enters level l + 1. At the end, all nodes without a
    parent are merged, and the last block if it is not full, which is exact. So the
    result is a function of the rows and their order, not of the order of merges.

    Error: a row is pruned at most once in each level, so the error is that of
    ``QuantileSketch``, at most eps * W, and at most 1.2 eps times the weight of all but
    any 1 / (8 eps) values. A feature with at most 24 / eps distinct values is exact.

    Several processes: a process keeps the rows of blocks that it shares with others,
    and nodes that cannot be merged without others. At the end, the processes exchange
    both, feature by feature, and each finishes its share of the features.

    Memory: there are at most two nodes of each height below log2(N / B), one if the
    process has the first row, with at most max(8 (b_1 + 1), 2^(h mod 3) (b_l + 1))
    entries of 28 bytes for each feature; and at most 2 B rows, or B.

    Args:
      num_features: F.
      eps: the error bound, relative to the weight of a feature's non-missing values.
      first_row: the global number of this process's first row.

    Example:
      >>> import numpy as np
      >>> sketch = OrderedSketch(1, eps=1 / 2048)
      >>> sketch.add(np.array([[1.0], [4.0], [2.0]], np.float32), None)
      >>> np.asarray(sketch.make_bins(256).thresholds)
      array([[1.5, 3. , inf]], dtype=float32)
    """

    def __init__(self, num_features: int, eps: float, first_row: int = 0):
        self.eps = eps
        self.num_features = num_features
        self._first_row = self._end = first_row
        self._missing = False
        self._nodes: list[Nodes] = [{} for _ in range(num_features)]
        self._head: list[PendingRows] = []  # rows of a block begun before first_row
        self._tail: list[PendingRows] = []  # rows of the block that is not full yet

    def __repr__(self) -> str:
        rows = f"{self._first_row}:{self._end}"
        return f"OrderedSketch(num_features={self.num_features}, rows={rows})"

    @property
    def num_bytes(self) -> int:
        """The bytes of all entries and rows."""
        entries = sum(
            field.nbytes
            for nodes in self._nodes
            for summary in nodes.values()
            for field in summary
        )
        rows = (*self._head, *self._tail)
        return entries + sum(
            part.x.nbytes + (0 if part.weight is None else part.weight.nbytes)
            for part in rows
        )

    def add(
        self, x: Float[np.ndarray, "n F"], weight: Float[np.ndarray, " n"] | None
    ) -> None:
        """Adds the next rows of this process, which are copied.

        Args:
          x: checked numbers; NaN is missing.
          weight: finite and >= 0; None: 1 each.
        """
        self._missing = self._missing or has_missing(x, weight)
        size, done = block_size(self.eps), 0
        while done < len(x):
            part = slice(done, done + size - self._end % size)
            rows = np.array(x[part], order="F")
            own = None if weight is None else weight[part].astype(np.float64)
            self._tail.append(PendingRows(rows, own))
            self._end += len(rows)
            done += len(rows)
            if self._end % size == 0:
                self._close_block()

    def summarize(self, feature: int) -> QuantileSummary:
        """Summarizes one feature of all rows; every process must call it."""
        return self._finish(self._exchange_layout(), feature)

    def make_bins(self, max_bins: int) -> Bins:
        """Chooses thresholds from all rows; every process must call it.

        They follow from the summaries as in :func:`jboost.sketches.bins_from_sketch`.
        """
        missing = any(gather_numbers(int(self._missing)))
        layout, own = self._exchange_layout(), []
        for feature in range(self.num_features):
            is_own = feature % num_processes() == process_number()
            summary = self._finish(layout, feature, is_own)
            if is_own:
                own.append(cut_summary(summary, max_bins))
        return pad_thresholds(
            join_shares(own), max_bins, "missing" if missing else None
        )

    def _close_block(self):
        """Summarizes the rows of a full block; keeps those of a partial block."""
        block = self._end // block_size(self.eps) - 1
        rows, self._tail = self._tail, []
        if block * block_size(self.eps) < self._first_row:
            self._head = rows
            return
        for feature, nodes in enumerate(self._nodes):
            _add_block(nodes, block, summarize_pending(rows, feature), self.eps)

    def _exchange_layout(self):
        """Returns the layout of the rows and nodes of all processes."""
        spans = gather_tables(np.array([[self._first_row, self._end]], np.int64))
        assert np.all(spans[:, 0] == np.r_[0, spans[:-1, 1]]), spans
        rows, size = (*self._head, *self._tail), block_size(self.eps)
        counts = [
            sum(len(part.x) for part in side) for side in (self._head, self._tail)
        ]
        blocks = np.array([self._first_row // size, self._end // size])
        weight = None
        if any(gather_numbers(int(any(part.weight is not None for part in rows)))):
            weight = gather_tables(join_weights(rows))
        nodes = [
            (*key, *(nodes[key].num_entries for nodes in self._nodes))
            for key in self._nodes[0]
        ]
        padding = (-1, 0, *(_count_padding(nodes) for nodes in self._nodes))
        return _Layout(
            blocks=gather_tables(np.repeat(blocks, counts)),
            weight=weight,
            nodes=gather_tables(np.array([*nodes, padding], np.int64)),
        )

    def _finish(self, layout, feature, is_own=True):
        """Summarizes one feature of all rows; returns EMPTY if ``is_own`` is false."""
        columns = [part.x[:, feature] for part in (*self._head, *self._tail)]
        column = gather_tables(np.concatenate([np.zeros(0, np.float32), *columns]))
        own = self._nodes[feature]
        tables = [np.stack(summary, axis=1) for summary in own.values()]
        table = gather_tables(
            np.concatenate([*tables, np.zeros((_count_padding(own), 4))])
        )
        if not is_own:
            return EMPTY
        nodes: Nodes = {}
        ends = np.cumsum(layout.nodes[:, 2 + feature])[:-1]
        keys = layout.nodes[:, :2].tolist()
        for (height, number), entries in zip(keys, np.split(table, ends), strict=True):
            if height >= 0:
                value, *others = entries.T
                summary = QuantileSummary(value.astype(np.float32), *others)
                _add_node(nodes, height, number, summary, self.eps)
        rest = EMPTY
        for block in np.unique(layout.blocks).tolist():
            here = slice(*np.searchsorted(layout.blocks, [block, block + 1]))
            weight = None if layout.weight is None else layout.weight[here]
            rest = summarize_column(column[here], weight)
            if here.stop - here.start == block_size(self.eps):
                _add_block(nodes, block, rest, self.eps)
                rest = EMPTY
        return reduce(merge_summaries, (nodes[key] for key in sorted(nodes)), rest)


def block_size(eps: float) -> int:
    """Returns B, the number of rows of a block."""
    return 2 * capacity(0, eps)


def _add_block(nodes, block, summary, eps):
    """Adds the exact summary of a full block."""
    if summary.num_entries > capacity(0, eps):
        summary = prune_summary(summary, num_ranks(1, eps))
    _add_node(nodes, 0, block, summary, eps)


def _add_node(nodes, height, number, summary, eps):
    """Adds a node, and all nodes that are now complete."""
    while (height, number ^ 1) in nodes:
        level = height // _HEIGHTS + 1
        summary = _join(nodes.pop((height, number ^ 1)), summary, level, eps)
        height, number = height + 1, number // 2
        if height % _HEIGHTS == 0 and not summary.is_exact:
            summary = prune_summary(summary, num_ranks(level + 1, eps))
    nodes[height, number] = summary


def _join(first, second, level, eps):
    """Merges two nodes of a level; prunes exact ones if the result is not exact."""
    pair = first, second
    if all(node.is_exact for node in pair):
        merged = merge_summaries(*pair)
        if merged.num_entries <= capacity(0, eps):
            return merged
    ranks = num_ranks(level, eps)
    return merge_summaries(
        *(prune_summary(node, ranks) if node.is_exact else node for node in pair)
    )


def _count_padding(nodes):
    """Returns the number of padding entries; few sizes exist, as each is compiled."""
    size = sum(summary.num_entries for summary in nodes.values())
    return padded_size(size) - size
