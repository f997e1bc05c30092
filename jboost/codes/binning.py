# SPDX-License-Identifier: Apache-2.0
"""Turns feature values into small integer codes.

Code 0 is "missing" (NaN); code c >= 1 means that the value lies above threshold c - 2
and at or below threshold c - 1, or stands for a category: 1 for the heaviest of a
feature, 2 for the next, ...
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, ArrayLike, Float, Shaped, UInt8, UInt16, UInt32

from jboost.codes.bins import MISSING, Bins
from jboost.codes.codes import DenseCodes, SparseCodes, pack_codes
from jboost.codes.gathering import find_thresholds, has_missing
from jboost.codes.thresholds import check_max_bins, find_sparse_thresholds
from jboost.entry.context import (
    current_implementation,
    find_mesh,
    is_on_cpu,
    runs_on_cpu,
)
from jboost.entry.decorators import on_host, traceable
from jboost.entry.exchanges import agree, gather_numbers, gather_tables
from jboost.entry.feature_checks import check_feature
from jboost.entry.messages import show, warn_user
from jboost.entry.programs import compiled
from jboost.kernels import binning_cpu, library
from jboost.kernels.binning_cpu import MOST_BINS
from jboost.kernels.calls import call_on_host, host
from jboost.numerics.arrays import flush_denormals
from jboost.tables.categories import (
    Categories,
    Category,
    check_values,
    describe_column,
    encode,
)
from jboost.tables.frames import Frame, read_frame, read_values
from jboost.tables.sparse import Absent, SparseMatrix, check_absent, check_gaps

MOST_VALUES = 2**24  # float32 tells apart integers up to this one
MOST_PACKED = 256  # bins; kernels for GPUs read packed codes of one byte
MOST_CELLS = 2**26  # the most cells of the table of codes: 256 MiB


def find_categorical_features(
    categorical: Any,
    num_features: int,
    feature_names: Sequence[str] | None = None,
    values: tuple[tuple[Category, ...] | None, ...] | None = None,
) -> tuple[int, ...]:
    """Returns the indices of the categorical features, ascending.

    Args:
      categorical: names or indices, "auto" or None.
      values: the categories that the table holds for each column, or None; a column
        with categories is categorical, whatever ``categorical`` is.
    """
    found = {index for index, known in enumerate(values or ()) if known is not None}
    if categorical is None or (isinstance(categorical, str) and categorical == "auto"):
        return tuple(sorted(found))
    expected = "categorical must be 'auto', None or a sequence of features"
    kinds = list | tuple | set | frozenset | range | np.ndarray
    if not isinstance(categorical, kinds):
        raise TypeError(f"{expected}, got {show(categorical)}")
    if isinstance(categorical, np.ndarray):
        categorical = categorical.ravel().tolist()
    features = [
        check_feature("categorical", feature, num_features, feature_names)
        for feature in categorical
    ]
    if len({*features}) < len(features):
        raise ValueError(f"{expected}, each of them once, got {show(categorical)}")
    return tuple(sorted(found.union(features)))


def fit_categories(
    matrix: Float[np.ndarray, "N G"],
    features: tuple[int, ...],
    weight: Float[np.ndarray, " N"] | None,
    max_codes: int,
    values: tuple[tuple[Category, ...] | None, ...] | None = None,
    known: Categories | None = None,
    feature_names: Sequence[str] | None = None,
) -> Categories:
    """Assigns codes to the categories of each feature, the heaviest first.

    If there are more than ``max_codes`` categories, the lightest share the last code.
    Among equal weights, the smaller value comes first. Rows of weight 0 are ignored.

    Args:
      matrix: the categorical columns, checked by
        :func:`jboost.tables.categories.check_values`.
      values: the categories that the numbers represent, as in :class:`Categories`.
      known: the categories of a model that is trained further; they keep their codes,
        and new categories get the next codes.
    """
    if weight is not None:
        matrix, weight = matrix[weight > 0], weight[weight > 0]
    if known is not None and values is None:
        values = known.values  # x is a matrix
    named = values or (None,) * len(features)
    most = []
    for column, own in zip(matrix.T, named, strict=True):
        largest = int(np.max(column, initial=0, where=~np.isnan(column)))
        most.append(max(largest, len(own or ()) - 1))
    size = 1 + max(most, default=0)
    if size > MOST_VALUES or size * len(features) > MOST_CELLS:
        worst = features[int(np.argmax(most))]
        raise ValueError(
            f"x must hold categories as small integers, below {MOST_VALUES} and fewer "
            f"than {MOST_CELLS} for all categorical columns together, got "
            f"{max(most)} in column {worst}; number them 0, 1, 2, ..."
        )
    codes = np.zeros((len(features), size), np.int32)
    if known is not None:
        before = np.asarray(known.codes)
        codes = np.pad(before, ((0, 0), (0, max(0, size - before.shape[1]))))
        size = codes.shape[1]
    for group, column in enumerate(matrix.T):
        present = ~np.isnan(column)
        value = column[present].astype(np.int64)
        mass = np.bincount(value, None if weight is None else weight[present], size)
        seen = np.flatnonzero(np.bincount(value, minlength=size))
        last = codes[group].max()
        seen = seen[codes[group, seen] == 0]
        if known is not None and len(seen):
            place = f"{describe_column(features[group], feature_names)} of x"
            _check_new(place, seen, named[group], last >= max_codes)
        order = seen[np.argsort(-mass[seen], kind="stable")]
        new = np.minimum(last + 1 + np.arange(len(order)), max_codes)
        codes[group, order] = new
    return Categories(codes=codes, features=features, values=values)


def _check_new(place, seen, values, full):
    if values is not None and seen[-1] >= len(values):
        raise ValueError(
            f"{place} must hold the numbers of the model's {len(values)} categories, "
            f"from 0 to {len(values) - 1}, got {seen[-1]}; pass a data frame, which "
            "names new categories"
        )
    if full:
        new = [int(v) if values is None else values[v] for v in seen[:5]]
        raise ValueError(
            f"max_bins must be larger to give codes to categories of {place} that the "
            f"model does not know, such as {new}; or replace them by missing values"
        )


_CELLS = 2**19  # cells in a node's histogram
_BINS_FOR_CATEGORIES = 16  # times max_bins
_FEW_CELLS = 2**20  # up to here a GPU takes codes sooner than it compiles a program


@on_host("fit bins first and call jb.apply_bins there")
@library.takes_implementation
def fit_bins(
    x: Any,
    *,
    max_bins: int | None = 256,
    sample_weight: Shaped[ArrayLike, " N"] | None = None,
    absent: Absent | None = None,
    categorical: Any = "auto",
    implementation: str | None = None,
) -> Bins:
    """Chooses thresholds: midpoints of distinct values, or weighted quantiles.

    A feature with at most ``max_bins - 1`` distinct values gets one bin per value
    and thresholds midway between neighbors, so that split search is exact. Any
    other feature is cut at quantiles of capped weight: no distinct value counts
    for more than one bin, and the bins share the remaining weight equally, so that one
    heavy value (zero, often) does not use up the bins of the others.

    A threshold between neighboring values lo < hi is lo/2 + hi/2 if that lies in
    [lo, hi), else lo; ``x <= threshold`` goes left.

    Args:
      x: numbers [N, F], an array or a data frame (see :func:`jboost.fit`); NaN is
        missing, infinities are values. A sparse matrix
        (``scipy.sparse``, BCOO or BCSR of ``jax.experimental.sparse``) gives the
        thresholds of the dense one, in a time that grows with its stored entries.
      max_bins: the most codes a numeric feature may use, the missing one included;
        None for a bin for every distinct value, however many there are (candidates
        "local" and "exact" of :func:`jboost.boost` choose among them).
      sample_weight: weights of the rows; rows of weight 0 are ignored.
      absent: how entries that a sparse matrix does not store are read: "missing", as
        NaN, or "zero". None: "missing" if x is sparse, or dense with a missing value
        in a row of positive weight; otherwise the bins refuse sparse matrices that do
        not store every entry.
      categorical: "auto": the columns of a data frame that hold strings or declare
        categories; a sequence: these columns as well, by name or index; they hold
        integers 0, 1, 2, ..., NaN where missing; None: no column. The categories of a
        feature get codes from 1 on by falling weight; if there are more than
        ``16 * max_bins - 1``, or 2^19 for all features together, the lightest share
        the last one.
      implementation: "xla" (here NumPy, the definition), "cpu" (the compiled kernel),
        or None for the faster one; all give the same thresholds.

    Returns:
      Bins of as many codes as the data needs, rounded up to a power of two (so
      that similar data shares compiled programs), at most ``max_bins``, or ``16 *
      max_bins`` where there are categories: pass ``max_bins=bins.num_bins`` to
      :func:`jboost.boost`.

    Raises:
      TypeError, ValueError: x is not a numeric matrix, max_bins is neither None nor
        in [2, 65536], or there is no such implementation.

    Example:
      >>> import numpy as np, jboost as jb
      >>> bins = jb.fit_bins(np.array([[1.0], [2.0], [4.0]]))
      >>> np.asarray(bins.thresholds)
      array([[1.5, 3. , inf]], dtype=float32)
    """
    if max_bins is not None:
        check_max_bins(max_bins)
    frame = read_frame(x, "x", sparse=True, categorical=categorical is not None)
    return fit_frame(
        frame, max_bins=max_bins, sample_weight=sample_weight, absent=absent,
        categorical=categorical,
    )  # fmt: skip


def fit_frame(
    frame: Frame,
    *,
    max_bins: int | None,
    sample_weight: Any,
    absent: Absent | None,
    categorical: Any,
    feature_names: Sequence[str] | None = None,
    known: Categories | None = None,
) -> Bins:
    """Fits the bins of :func:`fit_bins` to a table that has been read.

    Within :func:`jboost.entry.exchanges.use_processes` the rows are those of all
    processes, in order of rank; each process passes a dense table.

    Args:
      feature_names: names that replace those of the table.
      known: categories that keep their codes; other categories get the next codes.
    """
    check_absent(absent)
    matrix, names = frame.matrix, feature_names or frame.names
    # A power of two above the number of rows holds a code for each.
    num_rows = sum(gather_numbers(matrix.shape[0]))
    most = int(max_bins or 1 << (num_rows + 1).bit_length())
    size, num_features = matrix.shape
    weight = sample_weight
    with agree():
        if weight is not None:
            weight = np.asarray(read_values(weight, "sample_weight"), np.float64)
            if weight.shape != (size,):
                raise ValueError(
                    f"sample_weight must have shape ({size},), got {weight.shape}"
                )
    indices = find_categorical_features(
        categorical, num_features, names, frame.categories
    )
    listed = find_categorical_features(categorical, num_features, names)
    for index, doubt in enumerate(frame.doubts):
        if doubt is not None and index not in listed:
            warn_user(doubt)
    categories = None
    if indices:
        _refuse_categories(indices, matrix, max_bins)
        matrix = np.asarray(matrix)
        with agree():
            check_values(matrix, indices, "x", names)
        values = frame.categories and tuple(frame.categories[f] for f in indices)
        codes = _most_category_bins(most, num_features) - 1
        columns = gather_tables(np.ascontiguousarray(matrix[:, list(indices)]))
        mass = None if weight is None else gather_tables(weight)
        if known is not None and known.features != indices:
            known = None  # refused by the caller
        categories = fit_categories(columns, indices, mass, codes, values, known, names)
        matrix = encode(categories, matrix)
    if isinstance(matrix, SparseMatrix):
        absent = absent or "missing"
        rows = find_sparse_thresholds(matrix, weight, most, absent)
    else:
        matrix = np.asarray(matrix)
        if not absent and any(gather_numbers(int(has_missing(matrix, weight)))):
            absent = "missing"
        rows = find_thresholds(matrix, weight, most)
    if categories is not None:  # between all codes, whether they occur or not
        for index, codes in zip(indices, np.asarray(categories.codes), strict=True):
            rows[index] = np.arange(1, codes.max(), dtype=np.float32) + np.float32(0.5)
    return pad_thresholds(rows, most, absent, categories)


def _refuse_categories(indices, matrix, max_bins):
    if isinstance(matrix, SparseMatrix):
        raise ValueError(
            "x must be dense where columns are categorical, got a sparse matrix and "
            f"categorical columns {indices}"
        )
    if max_bins is None:
        raise ValueError(
            "candidates must be 'global', candidate_weights 'samples' and max_bins a "
            f"number where columns are categorical, got categorical columns {indices}"
        )


def _most_category_bins(max_bins, num_features):
    """Returns how many codes a categorical feature may have, missing included.

    Two numbers of one bin are neighbors, but two categories of one code have nothing in
    common: categories get more codes, as long as histograms stay small.
    """
    most = max(max_bins, _CELLS // num_features)
    return min(most, _BINS_FOR_CATEGORIES * max_bins, MOST_BINS)


def pad_thresholds(
    rows: Sequence[Float[np.ndarray, " _"]],
    max_bins: int,
    absent: Absent | None = None,
    categories: Categories | None = None,
) -> Bins:
    """Bins of as many codes as the longest row needs, rounded up to a power of two.

    Args:
      rows: ascending thresholds of each feature, without the final +inf; at most
        ``max_bins - 2`` of them, or more between categories.
    """
    needed = max(len(row) for row in rows) + 2
    most = max_bins if categories is None else _most_category_bins(max_bins, len(rows))
    if needed > most and categories is not None:  # a model's own codes
        factor = _BINS_FOR_CATEGORIES if needed * len(rows) <= _CELLS else 1
        raise ValueError(
            f"max_bins must be at least {-(-needed // factor)} to hold the codes that "
            f"the model gives to its categories, got {max_bins}"
        )
    num_bins = min(most, max(4, 1 << (needed - 1).bit_length()))
    thresholds = np.full((len(rows), num_bins - 1), np.inf, np.float32)
    for feature, row in enumerate(rows):
        thresholds[feature, : len(row)] = row
    return Bins(thresholds=thresholds, absent=absent, categories=categories)


@traceable
@library.takes_implementation
def apply_bins(
    bins: Bins, x: Any, *, implementation: str | None = None
) -> UInt8[Array, "N F"] | UInt16[Array, "N F"] | UInt32[Array, "N F"] | SparseCodes:
    """Returns codes: 0 if missing, else 1 + #{thresholds < x}, or that of the category.

    Traceable: may be called under ``jax.jit`` and ``jax.vmap``, except with sparse x.

    Args:
      bins: bins from :func:`fit_bins`.
      x: numbers [N, F], with as many columns as ``bins``; or a sparse matrix, as for
        :func:`fit_bins`.
      implementation: "xla", "cpu" (the compiled kernel), or None for the best where
        the program runs; all give the same codes.

    Returns:
      uint8 codes for up to 256 bins, uint16 for up to 65536, else uint32. For a
      sparse matrix, the codes of its stored entries; :func:`jboost.boost` takes these
      as well (up to 65536 bins).

    Raises:
      TypeError, ValueError: x is not a numeric matrix with that many columns, or
        there is no such implementation; a sparse x is traced.

    Example:
      >>> import numpy as np, jboost as jb
      >>> x = np.array([[1.0], [2.0], [np.nan]])
      >>> jb.apply_bins(jb.fit_bins(x), x).tolist()
      [[1], [2], [0]]
    """
    matrix = read_frame(
        x, "x", schema=bins.schema, sparse=True, categorical=bins.categories is not None
    ).matrix
    if matrix.shape[1] != bins.num_features:
        raise ValueError(
            f"x must have {bins.num_features} columns, as the bins have, "
            f"got {matrix.shape[1]}"
        )
    if isinstance(matrix, SparseMatrix):
        check_gaps(bins.absent, matrix, "x")
        return bin_entries(bins, matrix)
    if bins.categories is not None:
        features, codes = bins.categories.features, bins.categories.codes
        check_values(matrix, features, "x", codes=codes)
        matrix = encode(bins.categories, matrix)
    if _is_on_host(bins, matrix):
        thresholds = np.asarray(bins.thresholds, np.float32)
        found = binning_cpu.find_codes(thresholds, matrix, call_on_host)
        return jax.device_put(found)
    if find_mesh(matrix) is not None:
        return compiled(_apply_in_shards, matrix.sharding)(bins.thresholds, matrix)
    codes = compiled(_apply_bins)(bins.thresholds, matrix)
    # The program may read x where it lies, and the caller may change it.
    return codes if isinstance(x, jax.Array) else jax.block_until_ready(codes)


def _is_on_host(bins, matrix):
    traced = isinstance(bins.thresholds, Tracer)
    if traced or not isinstance(matrix, np.ndarray) or bins.num_bins > MOST_BINS:
        return False
    on_cpu = current_implementation() == "cpu" or runs_on_cpu()
    return (on_cpu or matrix.size <= _FEW_CELLS) and library.may_run()


def bin_columns(
    bins: Bins,
    matrix: Float[np.ndarray, "N F"] | Float[Array, "N F"],
    num_rows: int | None = None,
) -> DenseCodes:
    """Returns codes of a float32 matrix, read in one pass; rows beyond N repeat row 0.

    Args:
      matrix: the rows, which are not copied.
      num_rows: the number of rows of the codes, at least N; default: N.
    """
    total = int(matrix.shape[0] if num_rows is None else num_rows)
    if bins.categories is not None:
        matrix = encode(bins.categories, matrix)
    native = library.may_run() and bins.num_bins <= MOST_BINS
    chosen = current_implementation()
    on_cpu = chosen == "cpu" or runs_on_cpu()
    on_gpu = chosen is None and not on_cpu and library.are_ready()
    packs = (chosen == "cuda" or on_gpu) and bins.num_bins <= MOST_PACKED
    if not native or not (on_cpu or matrix.size <= _FEW_CELLS):
        if isinstance(matrix, jax.Array) and is_on_cpu(matrix) != runs_on_cpu():
            matrix = np.asarray(matrix)  # the rows belong on the default device
        bin_them = compiled(_bin_columns, total, packs)
        return bin_them(bins.thresholds, jax.device_put(matrix))
    thresholds = np.asarray(bins.thresholds, np.float32)
    columns, packed = binning_cpu.find_columns(thresholds, np.asarray(matrix), total)
    packed = packed if on_cpu or packs else None  # both kinds of kernels pack alike
    with jax.default_device(host()) if on_cpu else nullcontext():
        return DenseCodes(*jax.device_put((columns, packed)))


def bin_entries(
    bins: Bins,
    matrix: SparseMatrix,
    num_rows: int | None = None,
    num_entries: int | None = None,
) -> SparseCodes:
    """Returns codes of the stored entries; entries beyond E are padding.

    Args:
      matrix: entries by column.
      num_rows: the number of rows of the codes, at least N (rows beyond N have no
        stored entries); default: N.
      num_entries: the size of the arrays of entries, at least E; default: max(E, 1).
    """
    if isinstance(bins.thresholds, Tracer):
        raise TypeError(
            "bins must not be traced where x is sparse: its entries are sorted and "
            "binned on the host"
        )
    if bins.num_bins > MOST_BINS:
        raise ValueError(
            f"bins must have at most {MOST_BINS} codes where x is sparse, got "
            f"{bins.num_bins}; fit them with max_bins, and with candidates other than "
            "'global' use dense matrices alone"
        )
    thresholds = np.asarray(bins.thresholds)
    size = max(1, matrix.num_entries if num_entries is None else num_entries)
    codes = np.zeros(size, binning_cpu.code_dtype(bins.num_bins))
    rows = np.zeros(size, np.int32)
    rows[: matrix.num_entries] = matrix.places
    values = flush_denormals(matrix.values)
    for feature in np.flatnonzero(np.diff(matrix.starts)):
        part = slice(*matrix.starts[feature : feature + 2])
        codes[part] = 1 + np.searchsorted(thresholds[feature], values[part])
    codes[: matrix.num_entries][np.isnan(values)] = MISSING
    absent = np.full(bins.num_features, MISSING, codes.dtype)
    if bins.absent == "zero":
        absent = (1 + np.sum(thresholds < 0, axis=1)).astype(codes.dtype)
    starts, rows, codes, absent = jax.device_put((matrix.starts, rows, codes, absent))
    num_rows = matrix.shape[0] if num_rows is None else num_rows
    return SparseCodes(starts, rows, codes, absent, num_rows)


def _apply_bins(thresholds, matrix):
    if thresholds.shape[1] >= MOST_BINS:
        return _find_codes(thresholds, matrix)
    run = library.choose(cpu=binning_cpu.find_codes, xla=_find_codes)
    return run(thresholds, matrix)


def _apply_in_shards(sharding, thresholds, matrix):
    rows = PartitionSpec(sharding.spec[0])
    run = jax.shard_map(
        _apply_bins, mesh=sharding.mesh, in_specs=(PartitionSpec(), rows),
        out_specs=rows, check_vma=False,
    )  # fmt: skip
    return run(thresholds, matrix)


def _find_codes(thresholds, matrix):
    values = flush_denormals(matrix)

    def code_column(row, column):
        code = 1 + jnp.searchsorted(row, column, side="left")
        code = jnp.where(jnp.isnan(column), MISSING, code)
        return code.astype(binning_cpu.code_dtype(thresholds.shape[1] + 1))

    return jax.lax.map(lambda pair: code_column(*pair), (thresholds, values.T)).T


def _bin_columns(num_rows, packs, thresholds, matrix):
    columns = _find_codes(thresholds, matrix).T
    shape = (columns.shape[0], num_rows - columns.shape[1])
    padding = jnp.broadcast_to(columns[:, :1], shape)
    codes = DenseCodes(jnp.concatenate([columns, padding], axis=1))
    return pack_codes(codes, MOST_PACKED) if packs else codes
