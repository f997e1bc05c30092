# SPDX-License-Identifier: Apache-2.0
"""Puts raw tables on the device: checked, binned, padded to one of few sizes.

In: a matrix, targets, weights and offset of the training rows or of a validation
set. Out: PaddedRows, which the compiled program takes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Shaped

from jboost.boosting.groups import (
    check_first_group,
    match_groups,
    place_groups,
    read_groups,
)
from jboost.boosting.state import Data
from jboost.codes.binning import bin_columns, bin_entries
from jboost.codes.bins import Bins
from jboost.codes.codes import DenseCodes
from jboost.codes.preparing import sort_rows
from jboost.entry.exchanges import (
    agree,
    gather_numbers,
    gather_tables,
    num_processes,
)
from jboost.entry.messages import show
from jboost.numerics.arrays import pad_rows, padded_size
from jboost.tables.categories import check_values
from jboost.tables.domains import warn_of_rounding
from jboost.tables.frames import Schema, read_frame, read_offset
from jboost.tables.groups import RowGroups
from jboost.tables.sparse import SparseMatrix, check_gaps
from jboost.tables.targets import (
    check_targets,
    check_weights,
    match_targets,
)
from jboost.training.record import UNNAMED
from jboost.training.sharded import RowLayout, padded_rows, spread_rows

_FEW_ROWS = 8192  # compiling takes longer than training on this number of rows
_FEW_COLUMNS = 32


class PaddedRows(NamedTuple):
    """Rows on the device.

    Attributes:
      data: codes, targets, weights and offset of the rows, with padding. A set that was
        held out consists of the training rows, with other weights and without codes.
      size: the number of rows of this process, without padding.
      num_features: the number of columns, without padding.
      spread: the division of the rows among devices; None: all are on one.
    """

    data: Data
    size: int
    num_features: int
    spread: RowLayout | None = None

    @property
    def offset(self) -> Any:
        """Scores before the initial one, [K, N]; 0 where none are given."""
        assert self.data.offset is not None
        return self.data.offset

    def no_steps(self) -> Float[np.ndarray, "K n"]:
        """Returns the steps of the rows of this process before the first round."""
        return np.zeros((len(self.offset), self.size), np.float32)

    @property
    def real(self) -> tuple[Any, np.ndarray]:
        """Targets and weights of this process without padding, on the host."""
        targets, weights = self.fetch((self.data.targets, self.data.weights))
        groups = self.data.groups
        if groups is not None and groups.weights is not None:
            # A loss that takes weights has them all.
            weights = np.where(weights > 0, self.fetch(groups.weights), weights)
        return targets, weights

    def fetch(self, arrays: Any, axis: int = 0) -> Any:
        """Returns arrays of the rows of this process without padding, on the host."""

        def take(array):
            if self.spread is not None:
                return self.spread.fetch(array, axis)
            rows = (slice(None),) * axis + (slice(self.size),)
            return np.asarray(array)[rows]

        return jax.tree.map(take, arrays)

    @property
    def padded(self) -> int:
        """The number of rows that one device would hold, with padding."""
        return (
            len(self.data.weights) if self.spread is None else self.spread.shards.padded
        )

    @property
    def division(self) -> tuple[int, int]:
        """Returns the number of this process's first row, and of all rows."""
        if self.spread is None:
            return 0, self.size
        return self.spread.first_row, sum(self.spread.shards.sizes)

    def gather(self) -> Data:
        """Returns the rows of all processes as one device holds them, without codes.

        With padding, on the host.
        """
        assert self.spread is not None
        total = self.spread.shards.padded
        offset = self.fetch(self.offset, axis=1).T
        every: Any = gather_tables((*self.real, offset))
        targets, weights, offset = every
        pad = partial(pad_rows, size=total)
        weights = np.pad(weights, (0, total - len(weights)))
        none: Any = None
        held: Any = weights
        offset = pad(offset).T
        return Data(none, jax.tree.map(pad, targets), held, offset=offset)

    def put_scores(self, scores: Float[np.ndarray, "K n"]) -> Float[Array, "K N"]:
        """Returns scores of the rows of this process on the device, with padding."""
        if self.spread is not None:
            return self.spread.put(scores, axis=1)
        return jax.device_put(pad_rows(scores.T, self.offset.shape[1]).T)

    def put_weights(self, weights: Float[np.ndarray, " n"]) -> Float[Array, " N"]:
        """Returns weights of the rows of this process on the device; 0 for padding."""
        if self.spread is not None:
            return self.spread.put(weights, padding=np.zeros(1, np.float32))
        total = self.offset.shape[1]
        return jax.device_put(np.pad(weights, (0, total - len(weights))))

    def with_values(
        self, matrix: Any, ranges: Float[Any, "F 2"], num_columns: int = 0
    ) -> "PaddedRows":
        """Returns the rows with the values that linear leaves take.

        Columns beyond those of the matrix, up to ``num_columns``, are missing.
        """
        low, high = np.asarray(ranges).T
        table = np.clip(np.asarray(matrix, np.float32), low, high)
        if (short := num_columns - table.shape[1]) > 0:
            table = np.pad(table, ((0, 0), (0, short)), constant_values=np.nan)
        if self.spread is not None:
            values = self.spread.put(table)
        else:
            values = jax.device_put(pad_rows(table, self.offset.shape[1]))
        return self._replace(data=self.data._replace(values=values))

    def read_codes(self) -> Iterator[Shaped[np.ndarray, "F n"]]:
        """Yields the dense codes without the padding, in one part."""
        codes: Any = self.data.codes
        yield self.fetch(codes.columns, axis=1)[: self.num_features]

    def handing_weights(self) -> "PaddedRows":
        """Returns the same for a loss of groups that is handed weights; 1 if unknown.

        The weights of the rows are then 0 or 1.
        """
        groups = self.data.groups
        if groups is None or groups.weights is not None:
            return self
        groups = replace(groups, weights=self.data.weights)
        return self._replace(data=self.data._replace(groups=groups))

    def sorted(self) -> "PaddedRows":
        """Returns the same with the order of each feature, instead of codes by row."""
        codes: Any = self.data.codes
        codes = DenseCodes(codes.columns, order=sort_rows(np.asarray(codes.columns)))
        return self._replace(data=self.data._replace(codes=codes))


def padded_columns(num_rows: int, num_columns: int) -> int:
    """Rounds the columns of a training run up to 8, 16 or 32 for small tables."""
    if num_rows > _FEW_ROWS or num_columns > _FEW_COLUMNS:
        return num_columns
    return max(8, 1 << (num_columns - 1).bit_length())


def bin_rows(
    bins: Bins,
    matrix: Any,
    y: Any,
    weights: Any,
    offset: Any,
    num_scores: int,
    padded: bool,
    prefix: str,
    *,
    num_columns: int | None = None,
    mesh: Mesh | None = None,
    groups: RowGroups | None = None,
    ranges: Float[np.ndarray, "F 2"] | None = None,
) -> PaddedRows:
    """Checks one set of rows and puts it on the device, or on those of a mesh.

    Padding repeats row 0 at weight 0, so that the loss is as well-defined for it as for
    row 0. (In a sparse matrix such rows store nothing.)

    Args:
      bins: the bins of the training rows.
      matrix, y, weights, offset: features, targets, weights and offset of the rows.
      num_scores: K.
      padded: whether rows are padded.
      prefix: the prefix of the names of y and offset in errors.
      num_columns: the number of columns of dense codes. Those beyond the columns of
        the matrix hold only missing values, so that no split can tell rows apart.
      mesh: the mesh of devices that hold the rows; None: one device.
      groups: the groups of the rows, without padding.
      ranges: the ranges of the features in linear leaves; None: leaves are constant.
    """
    size, spread = matrix.shape[0], None
    if mesh is not None:
        spread = spread_rows(mesh, size, padded)
    with agree():
        rows = put_rows(size, y, weights, offset, num_scores, padded, prefix, spread)
    total = rows.offset.shape[1]
    if spread is not None:
        # The kernel takes no table without rows.
        table = matrix if size else np.zeros((1, bins.num_features), np.float32)
        found = bin_columns(*_add_columns(bins, table, num_columns))
        codes = jax.tree.map(
            lambda array: spread.put(np.asarray(array)[:, :size], axis=1), found
        )
    elif isinstance(matrix, SparseMatrix):
        entries = matrix.num_entries
        entries = padded_size(entries) if padded else entries
        codes = bin_entries(bins, matrix, total, entries)
    else:
        codes = bin_columns(*_add_columns(bins, matrix, num_columns), total)
    data = rows.data._replace(codes=codes, groups=place_groups(groups, total))
    rows = rows._replace(data=data, num_features=bins.num_features)
    if ranges is None:
        return rows
    if isinstance(matrix, SparseMatrix):  # a validation set
        matrix = matrix.to_dense(bins.absent)
    return rows.with_values(matrix, ranges, num_columns or 0)


def join_rows(
    parts: Sequence[PaddedRows], loss: Any, num_scores: int, padded: bool
) -> PaddedRows:
    """Joins sets of rows, one after the other, without their codes."""
    sizes = [part.size for part in parts]

    def join(*arrays):
        return np.concatenate(arrays)

    targets, weights = jax.tree.map(join, *(part.real for part in parts))
    offset = join(*(part.fetch(part.offset, axis=1).T for part in parts))
    offset = offset[:, 0] if num_scores == 1 else offset
    groups: Any = parts[0].data.groups
    if groups is not None and groups.kind == "ids":
        numbers = [np.asarray(part.data.groups.number) for part in parts]  # type: ignore
        shifts = np.cumsum([0, *(1 + np.max(number) for number in numbers)])
        pairs = zip(numbers, shifts[:-1], sizes, strict=True)
        groups = join(*(number[:size] + shift for number, shift, size in pairs))
    elif groups is not None:
        groups = replace(groups, weights=None)
    joined = put_grouped_rows(
        sum(sizes), targets, weights, offset, groups, loss=loss,
        num_scores=num_scores, padded=padded,
        mesh=None if parts[0].spread is None else parts[0].spread.mesh,
    )  # fmt: skip
    if parts[0].data.values is None:
        return joined
    tables = [part.fetch(part.data.values) for part in parts]
    return joined.with_values(join(*tables), np.array([[-np.inf, np.inf]], np.float32))


def put_grouped_rows(
    size: int,
    y: Any,
    weights: Any,
    offset: Any,
    groups: Any,
    *,
    loss: Any,
    num_scores: int,
    padded: bool,
    prefix: str = "",
    mesh: Mesh | None = None,
) -> PaddedRows:
    """Makes the rows of :func:`bin_rows` without codes, but with their groups."""
    spread = None if mesh is None else spread_rows(mesh, size, padded)
    found, factors = read_groups(groups, loss, weights, size, prefix)
    rows = put_rows(size, y, factors, offset, num_scores, padded, prefix, spread)
    if found is None:
        return rows
    own = found.weights is not None
    check_first_group(loss, found, rows.real[0], num_scores, own)
    placed = place_groups(found, len(rows.data.weights))
    return rows._replace(data=rows.data._replace(groups=placed))


def put_rows(
    size: int,
    y: Any,
    weights: Any,
    offset: Any,
    num_scores: int,
    padded: bool,
    prefix: str,
    spread: RowLayout | None = None,
) -> PaddedRows:
    """Makes the rows of :func:`bin_rows`, but without codes and columns."""
    targets = check_targets(y, size, weights, f"{prefix}y", warn=True)
    weights = np.ones(size, np.float32) if weights is None else weights
    scores = np.zeros((size, num_scores), np.float32)
    if offset is not None:
        name = f"{prefix}offset"
        scores = read_offset(offset, size, num_scores, name)
        warn_of_rounding(offset, name)
    none: Any = None
    if spread is not None:
        start = spread.put(scores.T, axis=1)
        data = Data(none, jax.tree.map(spread.put, targets), none, offset=start)
        rows = PaddedRows(data, size, 0, spread)
        return rows._replace(data=data._replace(weights=rows.put_weights(weights)))
    total = padded_rows(size) if padded else size

    pad = partial(pad_rows, size=total)
    data = Data(
        codes=none,
        targets=jax.device_put(jax.tree.map(pad, targets)),
        weights=none,
        offset=jax.device_put(pad(scores).T),
    )
    rows = PaddedRows(data, size, num_features=0)
    return rows._replace(data=data._replace(weights=rows.put_weights(weights)))


def _add_columns(bins, matrix, num_columns):
    """Appends columns of missing values up to ``num_columns``."""
    short = 0 if num_columns is None else num_columns - bins.num_features
    if short <= 0:
        return bins, matrix
    thresholds = np.pad(
        np.asarray(bins.thresholds), ((0, short), (0, 0)), constant_values=np.inf
    )
    filled = np.full((matrix.shape[0], short), np.nan, np.float32)
    matrix = np.concatenate([np.asarray(matrix, np.float32), filled], axis=1)
    return replace(bins, thresholds=thresholds), matrix


def name_sets(validation: Any) -> dict[str, tuple[str, Any]]:
    """Returns the validation sets: {name: (label in errors, parts)}.

    Raises:
      ValueError: they are malformed; their data are not read here.
    """
    if validation is None:
        return {}
    named, sets = isinstance(validation, dict), {}
    for name, parts in (validation if named else {UNNAMED: validation}).items():
        label = f"validation[{show(name)}]" if named else "validation"
        if not isinstance(name, str) or name == "train":
            raise ValueError(
                "validation must name its sets by strings other than 'train', by which "
                f"the history calls the training rows, got {show(name)}"
            )
        if not isinstance(parts, tuple | list) or not 2 <= len(parts) <= 5:
            raise ValueError(
                f"{label} must be (x, y), (x, y, sample_weight), (x, y, sample_weight, "
                "offset) or jb.rows(x, y, ...), got "
                f"{type(parts).__name__}"
                + (f" of {len(parts)}" if isinstance(parts, tuple | list) else "")
            )
        sets[name] = label, (*parts, None, None, None)[:5]
    return sets


def make_sets(
    given: dict[str, tuple[str, Any]],
    bins: Bins,
    schema: Schema,
    training: PaddedRows,
    num_scores: int,
    padded: bool,
    with_offset: bool,
    *,
    loss: Any = None,
    ranges: Any = None,
) -> dict[str, PaddedRows]:
    """Checks the validation sets; returns {name: rows}.

    Args:
      given: the sets, from :func:`name_sets`.
      schema: the schema of the training rows.
      training: the training rows.
      with_offset: whether the training rows have an offset.
      loss: the loss; needed if it may be one of groups.
      ranges: the ranges of the features in linear leaves; None: leaves are constant.
    """
    sets, codes = {}, training.data.codes
    num_columns = None if codes.is_sparse else codes.num_features
    for name, (label, values) in given.items():
        with agree():
            matrix, y, weights, offset, groups = _read_set(
                label, values, bins, schema, training, with_offset
            )
            groups = match_groups(groups, training.data.groups, label)
            size = matrix.shape[0]
            groups, weights = read_groups(groups, loss, weights, size, f"{label} ")
        if sum(gather_numbers(size)) == 0:
            raise ValueError(
                f"{label} x must have a row on some process, got none on any"
            )
        sets[name] = bin_rows(
            bins, matrix, y, weights, offset, num_scores, padded, f"{label} ",
            num_columns=num_columns,
            mesh=None if training.spread is None else training.spread.mesh,
            groups=groups, ranges=ranges,
        )  # fmt: skip
    return sets


def _read_set(label, values, bins, schema, training, with_offset):
    """Checks the rows of a set; returns matrix, y, weights, offset and groups."""
    x, y, weights, offset, groups = values
    if with_offset != (offset is not None):
        raise ValueError(
            f"{label} must be (x, y, sample_weight, offset) with an offset if and "
            "only if fit is given one (sample_weight may be None)"
        )
    matrix = read_frame(
        x, f"{label} x", schema=schema, sparse=True,
        categorical=bins.categories is not None,
        least_rows=int(num_processes() == 1),
    ).matrix  # fmt: skip
    if matrix.shape[1] != bins.num_features:
        raise ValueError(
            f"{label} x must have {bins.num_features} columns, as x has, got "
            f"{matrix.shape[1]}"
        )
    if bins.categories is not None:
        features, codes = bins.categories.features, bins.categories.codes
        check_values(matrix, features, f"{label} x", schema.names, codes=codes)
    if isinstance(matrix, SparseMatrix):
        check_gaps(bins.absent, matrix, f"{label} x")
    if weights is not None:
        name = f"{label} sample_weight"
        alone = num_processes() == 1
        weights = check_weights(weights, matrix.shape[0], name, all_rows=alone)
    y = check_targets(y, matrix.shape[0], weights, f"{label} y", warn=True)
    y = match_targets(y, training.data.targets, weights, f"{label} y")
    return matrix, y, weights, offset, groups
