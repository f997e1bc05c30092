# SPDX-License-Identifier: Apache-2.0
"""Sums that are equal to the bit for any order and any sharding of the terms.

A row of weight w adds exactly as much as w rows, for whole numbers w up to 255. After
the sums follow fixed-point numbers (a power of two per channel keeps sums within 31
bits) and cumulative sums (by products with triangular matrices, half the time of
``jnp.cumsum`` on CPU).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped, UInt8, UInt32

from jboost.entry.collectives import current_shards, exchange, most, total
from jboost.kernels import exact_sums
from jboost.kernels.library import choose
from jboost.kernels.xla import exponent_above, power_of_two
from jboost.numerics.derivatives import differentiable, weigh
from jboost.numerics.random import hash_words

_UNROLLED = 128  # channels, at most, in a program that names each


def sum_by_group(
    values: Shaped[Array, " N"],
    group: Int32[Array, " N"],
    num_groups: int,
    weights: Float[Array, " N"] | None = None,
) -> Shaped[Array, " G"]:
    """Sums ``values``, which may be float, by group; see :func:`sum_channels`."""
    return sum_channels((values,), group, num_groups, weights)[0]


def sum_channels(
    channels: Sequence[Shaped[Array, "..."]],
    group: Int32[Array, " N"],
    num_groups: int,
    weights: Float[Array, " N"] | None = None,
    find_size: Callable[[Array], Array] | None = None,
) -> Shaped[Array, "C G"]:
    """Sums each channel by group; the bits do not depend on the order of the rows.

    Floats are added as multiples of a unit, one for each channel; see
    :func:`sum_rows`. A group outside [0, num_groups) is left out. Weights are factors
    of floats; rows of weight 0 may hold anything. With weights, a float channel may be
    one number for all rows. ``find_size`` takes the greatest magnitude of each channel
    on this shard and returns that of all shards, if that needs no collective.
    """
    if not all(channel.dtype == jnp.float32 for channel in channels):
        add = partial(exact_sums.sum_channels, num_groups=num_groups)
        return total(add(group, None, *channels))
    if current_shards() is not None:
        return _sum_sharded_channels(channels, weights, group, num_groups, find_size)
    run = choose(
        cpu=exact_sums.sum_channels_natively,
        xla=exact_sums.sum_channels,
        num_groups=num_groups,
    )
    if weights is None:
        derive = partial(_derive_channels, num_groups)
        return differentiable(run, derive, group, None, *channels)

    derive = partial(_derive_weighted_channels, num_groups)
    return differentiable(run, derive, group, weights, *channels)


def sum_tables(
    tables: Sequence[Float[Array, "K N"]],
    others: Sequence[Float[Array, "..."]],
    group: Int32[Array, " N"],
    num_groups: int,
    weights: Float[Array, " N"] | None = None,
) -> Float[Array, "C G"]:
    """Returns :func:`sum_channels` of all rows of the tables, then of other channels.

    Many rows are summed one at a time: otherwise the program grows with their number.
    """
    rest = group, num_groups, weights
    if sum(map(len, tables)) <= _UNROLLED:
        channels = [row for table in tables for row in table]
        return sum_channels((*channels, *others), *rest)

    def add(row):
        return sum_channels((row,), *rest)[0]

    parts = [jax.lax.map(add, table) for table in tables]
    if others:
        parts.append(sum_channels(others, *rest))
    return jnp.concatenate(parts)


def sum_changes(
    before: Float[Array, " N"],
    after: Float[Array, " N"],
    group: Int32[Array, " N"],
    num_groups: int,
    weights: Float[Array, " N"],
) -> Float[Array, "2 G"]:
    """Sums after - before, and |after| + |before|, by group.

    These are the sums of :func:`sum_channels`; the channels are not stored.
    """
    if current_shards() is not None:
        channels = exact_sums.list_changes(before, after)
        return sum_channels(channels, group, num_groups, weights)
    run = choose(
        cpu=exact_sums.sum_changes_natively,
        xla=exact_sums.sum_changes,
        num_groups=num_groups,
    )
    derive = partial(_derive_changes, num_groups)
    return differentiable(run, derive, group, weights, before, after)


def _derive_changes(num_groups, sums, operands, tangents):
    (group, weights, *losses), (fixed, moved, *changes) = operands, tangents
    channels, changes = jax.jvp(exact_sums.list_changes, tuple(losses), tuple(changes))
    operands, tangents = (group, weights, *channels), (fixed, moved, *changes)
    return _derive_weighted_channels(num_groups, sums, operands, tangents)


def _derive_channels(num_groups, sums, operands, tangents):
    del sums
    group, channels = operands[0], jnp.stack(tangents[2:], axis=1)
    # One more group takes the rows that have none.
    group = jnp.where((group >= 0) & (group < num_groups), group, num_groups)
    return jax.ops.segment_sum(channels, group, num_groups + 1)[:num_groups].T


def _derive_weighted_channels(num_groups, sums, operands, tangents):
    (group, weights, *channels), (_, moved, *changes) = operands, tangents

    def terms(weights, channel):
        return weigh(weights, jnp.broadcast_to(channel, weights.shape))

    changes = [
        jax.jvp(terms, (weights, channel), (moved, change))[1]
        for channel, change in zip(channels, changes, strict=True)
    ]
    return _derive_channels(num_groups, sums, (group,), (None, None, *changes))


def _sum_sharded_channels(channels, weights, group, num_groups, find_size):
    look, add = (
        choose(cpu=cpu, xla=xla, num_groups=num_groups)
        for cpu, xla in (
            (exact_sums.find_group_greatest_natively, exact_sums.find_group_greatest),
            (exact_sums.sum_group_digits_natively, exact_sums.sum_group_digits),
        )
    )
    greatest, others = look(group, weights, *channels)
    greatest = (find_size or most)(greatest)
    digits = add(group, greatest, weights, *channels)
    (digits, kinds), _ = exchange([digits, _count_kinds(others)], [])
    return _join(digits, greatest[:, None], kinds)


def sum_rows(
    values: Float[Array, "*K N"], weights: Float[Array, " N"] | None = None
) -> Float[Array, "*K"]:
    """Sums the last axis; the bits do not depend on the order of the terms.

    Terms are rounded to multiples of 2^-38 times the power of two above the greatest
    magnitude and added as integers; the result is rounded to float32. The error is at
    most N 2^-39 times the greatest magnitude, and that rounding. A sum that holds NaN
    or infinities is NaN or infinite, as in floating point. Rows of weight 0 may hold
    anything. With weights, N is the number of rows that whole weights stand for.
    """
    if current_shards() is not None:
        return sum_each((values, weights))[0]
    run = choose(cpu=exact_sums.sum_rows_natively, xla=exact_sums.sum_rows)
    if weights is None:
        return differentiable(run, _derive_sum, values)
    return differentiable(run, _derive_weighted_sum, values, weights)


def _derive_sum(total, operands, tangents):
    del total, operands
    return jnp.sum(tangents[0], axis=-1)


def _derive_weighted_sum(total, operands, tangents):
    del total

    def terms(values, weights):
        return weigh(jnp.broadcast_to(weights, values.shape), values)

    return jnp.sum(jax.jvp(terms, operands, tangents)[1], axis=-1)


def sum_each(
    *sums: tuple[Float[Array, "..."], Float[Array, "..."] | None],
) -> list[Float[Array, "..."]]:
    """Returns :func:`sum_rows` of each pair of values and weights.

    There are no more collectives than in one sum: two, where rows are sharded.
    """
    if current_shards() is None:
        return [sum_rows(*each) for each in sums]
    greatest, kinds = _look_at(sums)
    _, sizes = exchange([], greatest)
    found, _ = exchange([*_sum_digits(sums, sizes), *kinds], [])
    return _join_each(found[: len(sums)], sizes, found[len(sums) :])


class SpeculativeSums(NamedTuple):
    """Results of :func:`sum_guessed`; ``sizes`` are a guess for the next call."""

    sums: list[Float[Array, "..."]]
    sizes: list[Float[Array, "..."]]
    counts: list[Int32[Array, "..."]]
    extremes: list[Float[Array, "..."]]


def sum_guessed(
    sums: Sequence[tuple[Float[Array, "..."], Float[Array, "..."] | None]],
    guess: Sequence[Float[Array, "..."]],
    counts: Sequence[Int32[Array, "..."]] = (),
    extremes: Sequence[Float[Array, "..."]] = (),
) -> SpeculativeSums:
    """Computes the sums of :func:`sum_each`, by one collective if a guess is right.

    The unit of a sum depends on the greatest term of all shards, but only on the power
    of two above it, which seldom changes from round to round. The sums are made with
    the unit of the guess while the true one is found, and made again if they differ.

    Guesses are estimates of greatest terms, the same on all shards; they change no
    result. The same collective sums the ``counts``, which are integers, and finds the
    greatest of the ``extremes``, which are floats.
    """
    if current_shards() is None:
        return SpeculativeSums(sum_each(*sums), [*guess], [*counts], [*extremes])
    greatest, kinds = _look_at(sums)
    # At least the shard's own greatest, or its multiples might not be in range.
    tried = [jnp.maximum(a, b) for a, b in zip(guess, greatest, strict=True)]
    digits, wanted = _sum_digits(sums, tried), [*greatest, *extremes]
    found, whole = exchange([*digits, *kinds, *counts], wanted)
    digits, rest = found[: len(sums)], found[len(sums) :]
    sizes = whole[: len(sums)]
    right = [
        jnp.all(exact_sums.choose_unit(size)[1] == exact_sums.choose_unit(other)[1])
        for size, other in zip(sizes, guess, strict=True)
    ]

    def sum_again(digits):
        del digits
        return exchange(_sum_digits(sums, sizes), [])[0]

    right = jnp.all(jnp.stack(right))
    digits = jax.lax.cond(right, lambda digits: digits, sum_again, digits)
    found = _join_each(digits, sizes, rest[: len(sums)])
    return SpeculativeSums(found, sizes, rest[len(sums) :], whole[len(sums) :])


def _look_at(sums):
    """Returns the greatest term of each sum on this shard, and kinds of other terms."""
    look = choose(cpu=exact_sums.find_greatest_natively, xla=exact_sums.find_greatest)
    looks = [look(*each) for each in sums]
    kinds = [_count_kinds(others) for _, others in looks]
    return [greatest for greatest, _ in looks], kinds


def _sum_digits(sums, sizes):
    add = choose(cpu=exact_sums.sum_digits_natively, xla=exact_sums.sum_digits)
    pairs = zip(sums, sizes, strict=True)
    return [add(values, size, weights) for (values, weights), size in pairs]


def _count_kinds(others):
    """Returns which kinds of sums are on a shard: NaN, inf, -inf."""
    kinds = (jnp.isnan(others), others == jnp.inf, others == -jnp.inf)
    return jnp.stack(kinds).astype(jnp.int32)


def _join_each(digits, sizes, kinds):
    return [_join(*parts) for parts in zip(digits, sizes, kinds, strict=True)]


def _join(digits, greatest, kinds):
    """Returns the sum over all shards."""
    finite = exact_sums.join_digits(exact_sums.carry(digits), greatest)
    unknown, above, below = kinds > 0
    found = jnp.where(above, jnp.inf, jnp.where(below, -jnp.inf, finite))
    return jnp.where(unknown | (above & below), jnp.nan, found)


_NEAREST_BITS = (
    16  # bits left for a row above which rounding to nearest is exact enough
)


class FixedPoint(NamedTuple):
    """A scale per channel, and a rounding mode, that turn floats into integers.

    Attributes:
      scale, unit: a power of two for each channel, and its inverse.
      stochastic: whether rounding is stochastic instead of to nearest.
    """

    scale: Float[Array, " C"]
    unit: Float[Array, " C"]
    stochastic: Bool[Array, ""]


def choose_scale(
    values: Float[Array, "C N"],
    num_rows: Int[Array, ""],
    times: UInt8[Array, " N"] | None = None,
) -> FixedPoint:
    """Finds the largest scales that keep every sum over rows within 31 bits.

    Rounding is to nearest while at least 16 bits a row remain; below, stochastic.
    Values are finite, and 0 for rows that must not count. ``times`` is how often each
    row counts; None: once.
    """
    weights = None if times is None else times.astype(jnp.float32)
    return fit_scale(sum_rows(jnp.abs(values), weights), num_rows)


def fit_scale(total: Float[Array, " C"], num_rows: Int[Array, ""]) -> FixedPoint:
    """Returns the scales of :func:`choose_scale`, from the sums of magnitudes."""
    total = jnp.maximum(total, jnp.float32(1e-30))
    # The scaled sum stays below 2^30; rounding adds at most 1 a row.
    exponent = jnp.clip(30 - exponent_above(total), -126, 126)
    exponent = jnp.where(jnp.isfinite(total), exponent, -126)  # a row is below 2^2
    return FixedPoint(
        scale=power_of_two(exponent),
        unit=power_of_two(-exponent),
        stochastic=num_rows > 2 ** (31 - _NEAREST_BITS),
    )


def quantize(
    values: Float[Array, "N C"],
    fixed: FixedPoint,
    seed: UInt32[Array, "2"],
    first_row: Int32[Array, ""] | int = 0,
    times: UInt8[Array, " N"] | None = None,
) -> Int32[Array, "N C"]:
    """Rounds each channel to integers: the values in units of ``fixed.unit``.

    Rounding to nearest is followed by the product with ``times``, so that a row counted
    n times gives exactly the sum of n rows. Stochastic rounding comes after the
    product, which would otherwise multiply its error.

    Stochastic rounding goes up with a probability equal to the fraction, by a hash of
    channel, row and seed, so that a sum over many rows stays unbiased.

    Values and ``times`` are those of :func:`choose_scale`. Each tree has a seed of its
    own. ``first_row`` is the number of the first row, if these are not all rows.
    """
    after = None
    if times is not None:
        factor = times.astype(jnp.float32)[:, None]
        values = jnp.where(fixed.stochastic, values * factor, values)
        after = jnp.where(fixed.stochastic, 1, times.astype(jnp.int32)[:, None])
    scaled = values * fixed.scale[None, :]
    row = jnp.arange(values.shape[0], dtype=jnp.uint32)[:, None]
    row = row + jnp.asarray(first_row).astype(jnp.uint32)
    channel = jnp.arange(values.shape[1], dtype=jnp.uint32)[None, :]
    bits = hash_words(row ^ (channel << 31), seed)
    fraction = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    offset = jnp.where(fixed.stochastic, fraction, jnp.float32(0.5))
    # Rows that must not count hold 0 and stay 0: floor(0 + offset) = 0.
    whole = jnp.floor(scaled + offset).astype(jnp.int32)
    return whole if after is None else whole * after


BLOCK = 16
_WHOLE = 4  # BLOCK = 2^4: from this level on no sum starts inside a block


def cumulate(
    values: Float[Array, "*batch N"], *, reverse: bool = False
) -> Float[Array, "*batch N"]:
    """Returns the sums of the values up to each index, or from it on if ``reverse``."""
    size = values.shape[-1]
    if size <= BLOCK:
        return _multiply(values, reverse)
    blocks = -(-size // BLOCK)
    ends = [(0, 0)] * (values.ndim - 1)
    padded = jnp.pad(values, [*ends, (0, blocks * BLOCK - size)])
    rows = padded.reshape(*values.shape[:-1], blocks, BLOCK)
    inside = _multiply(rows, reverse)
    totals = cumulate(inside[..., 0 if reverse else -1], reverse=reverse)
    other = _shift(totals, reverse)
    summed = inside + other[..., None]
    return summed.reshape(*values.shape[:-1], -1)[..., :size]


def cumulate_levels(
    values: Float[Array, "K N"], *, reverse: bool = False
) -> Float[Array, " N"]:
    """Returns the sum of K cumulative sums; the k-th starts again every 2^k places.

    N must be a power of two, at least 2^(K - 1).
    """
    rows, matrices = _divide(values, reverse)
    total = _add_rows(jnp.matmul(rows, matrices, precision=lax.Precision.HIGHEST))
    if len(values) > _WHOLE:
        before = _add_rows(_sums_before(rows, matrices, reverse))
        total = (total.reshape(-1, BLOCK) + before[:, None]).reshape(-1)
    return total


def _add_rows(values):
    """Returns the sum over the first axis; on CPU ``jnp.sum`` is many times slower."""
    rows = values.reshape(len(values), -1)
    ones = jnp.ones(len(values), values.dtype)
    return jnp.matmul(ones, rows, precision=lax.Precision.HIGHEST)


def _divide(values, reverse):
    """Returns rows of a block [K, N / BLOCK, BLOCK], and matrices that sum them."""
    count, size = values.shape
    width = min(size, BLOCK)
    starts = np.arange(width) >> np.minimum(np.arange(count), _WHOLE)[:, None]
    same = starts[:, :, None] == starts[:, None, :]
    matrices = same & np.triu(np.ones((width, width), bool))
    matrices = matrices.transpose(0, 2, 1) if reverse else matrices
    return values.reshape(count, -1, width), jnp.asarray(matrices, values.dtype)


def _sums_before(rows, matrices, reverse):
    """Returns sums before each block, for levels that never start inside a block."""
    totals = jnp.einsum(
        "kbp,kp->kb", rows[_WHOLE:], matrices[_WHOLE:, :, 0 if reverse else -1],
        precision=lax.Precision.HIGHEST,
    )  # fmt: skip
    count, size = totals.shape
    inner, triangles = _divide(totals, reverse)
    sums = jnp.matmul(inner, triangles, precision=lax.Precision.HIGHEST)
    if count > _WHOLE:
        before = _sums_before(inner, triangles, reverse)[:, :, None]
        sums = jnp.concatenate([sums[:_WHOLE], sums[_WHOLE:] + before])
    places = np.arange(size)[::-1] if reverse else np.arange(size)
    begun = places & ((1 << np.arange(count)[:, None]) - 1) > 0
    return jnp.where(begun, _shift(sums.reshape(count, size), reverse), 0)


def _shift(sums, reverse):
    """Returns the sums before each block; subtracting its own total would cancel."""
    ends = [(0, 0)] * (sums.ndim - 1)
    other = sums[..., 1:] if reverse else sums[..., :-1]
    return jnp.pad(other, [*ends, (0, 1) if reverse else (1, 0)])


def _multiply(values, reverse):
    """Multiplies by a triangular matrix of ones."""
    size = values.shape[-1]
    ones = jnp.ones((size, size), values.dtype)
    matrix = jnp.tril(ones) if reverse else jnp.triu(ones)
    return jnp.matmul(values, matrix, precision=lax.Precision.HIGHEST)
