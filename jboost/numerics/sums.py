# SPDX-License-Identifier: Apache-2.0
"""Sums whose bits do not depend on the order of the terms.

In: float32 or integer arrays, weights. Out: their sums, over an axis or by group. A row
whose weight is a whole number up to 255 adds exactly what so many rows add. Derivatives
are those of plain sums. Where rows are sharded, sums are over all shards, and have the
bits that they have on one device.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from jboost.entry.collectives import current_shards, exchange, most, total
from jboost.kernels import leaves_cpu, reduce_cpu, sums_xla
from jboost.kernels.library import choose
from jboost.numerics.derivatives import differentiable, weigh

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
    :func:`sum_rows`. A group outside [0, num_groups) is left out.

    Args:
      channels: [N] each. With weights, a float channel may be [], for all rows.
      weights: what floats are multiplied by; rows of weight 0 may hold anything.
      find_size: takes the greatest magnitude of each channel on this shard and returns
        that of all shards, if that needs no collective.
    """
    xla, cpu = (
        partial(kernels.sum_channels, num_groups=num_groups)
        for kernels in (sums_xla, leaves_cpu)
    )
    if not all(channel.dtype == jnp.float32 for channel in channels):
        return total(xla(group, None, *channels))
    if current_shards() is not None:
        return _sum_sharded_channels(channels, weights, group, num_groups, find_size)
    run = choose(cpu=cpu, xla=xla)
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

    Of many rows one at a time, or the program would grow with their number.
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
        channels = sums_xla.list_changes(before, after)
        return sum_channels(channels, group, num_groups, weights)
    xla, cpu = (
        partial(kernels.sum_changes, num_groups=num_groups)
        for kernels in (sums_xla, leaves_cpu)
    )
    derive = partial(_derive_changes, num_groups)
    run = choose(cpu=cpu, xla=xla)
    return differentiable(run, derive, group, weights, before, after)


def _derive_changes(num_groups, sums, operands, tangents):
    (group, weights, *losses), (fixed, moved, *changes) = operands, tangents
    channels, changes = jax.jvp(sums_xla.list_changes, tuple(losses), tuple(changes))
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
        choose(
            cpu=partial(cpu, num_groups=num_groups),
            xla=partial(xla, num_groups=num_groups),
        )
        for cpu, xla in (
            (leaves_cpu.find_greatest, sums_xla.find_group_greatest),
            (leaves_cpu.sum_digits, sums_xla.sum_group_digits),
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
    or infinities is NaN or infinite, as in floating point.

    Args:
      weights: what the values are multiplied by; rows of weight 0 may hold anything.
        N is then the number of rows that whole weights stand for.
    """
    if current_shards() is not None:
        return sum_each((values, weights))[0]
    run = choose(cpu=reduce_cpu.sum_rows, xla=sums_xla.sum_rows)
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


class Guessed(NamedTuple):
    """What :func:`sum_guessed` returns.

    Attributes:
      sums: those of :func:`sum_each`.
      sizes: the greatest term of each sum, a guess for the next ones.
      counts: those handed in, over all shards.
      extremes: likewise.
    """

    sums: list[Float[Array, "..."]]
    sizes: list[Float[Array, "..."]]
    counts: list[Int32[Array, "..."]]
    extremes: list[Float[Array, "..."]]


def sum_guessed(
    sums: Sequence[tuple[Float[Array, "..."], Float[Array, "..."] | None]],
    guess: Sequence[Float[Array, "..."]],
    counts: Sequence[Int32[Array, "..."]] = (),
    extremes: Sequence[Float[Array, "..."]] = (),
) -> Guessed:
    """Does what :func:`sum_each` does, by one collective if a guess is right.

    The unit of a sum depends on the greatest term of all shards, but only on the power
    of two above it, which seldom changes from round to round. The sums are made with
    that of the guess while the true one is found, and made again if it is another one.

    Args:
      guess: of the greatest term of each sum, the same on all shards; it changes
        no result.
      counts: integers to be summed over all shards by the same collective.
      extremes: floats of which the greatest of all shards are to be found likewise.
    """
    if current_shards() is None:
        return Guessed(sum_each(*sums), [*guess], [*counts], [*extremes])
    greatest, kinds = _look_at(sums)
    # At least the shard's own greatest, or its multiples might not be in range.
    tried = [jnp.maximum(a, b) for a, b in zip(guess, greatest, strict=True)]
    digits, wanted = _sum_digits(sums, tried), [*greatest, *extremes]
    found, whole = exchange([*digits, *kinds, *counts], wanted)
    digits, rest = found[: len(sums)], found[len(sums) :]
    sizes = whole[: len(sums)]
    right = [
        jnp.all(sums_xla.choose_unit(size)[1] == sums_xla.choose_unit(other)[1])
        for size, other in zip(sizes, guess, strict=True)
    ]

    def sum_again(digits):
        del digits
        return exchange(_sum_digits(sums, sizes), [])[0]

    right = jnp.all(jnp.stack(right))
    digits = jax.lax.cond(right, lambda digits: digits, sum_again, digits)
    found = _join_each(digits, sizes, rest[: len(sums)])
    return Guessed(found, sizes, rest[len(sums) :], whole[len(sums) :])


def _look_at(sums):
    """Returns the greatest term of each sum on this shard, and kinds of other terms."""
    look = choose(cpu=reduce_cpu.find_greatest, xla=sums_xla.find_greatest)
    looks = [look(*each) for each in sums]
    kinds = [_count_kinds(others) for _, others in looks]
    return [greatest for greatest, _ in looks], kinds


def _sum_digits(sums, sizes):
    """Returns the digits of each sum over this shard."""
    add = choose(cpu=reduce_cpu.sum_digits, xla=sums_xla.sum_digits)
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
    finite = sums_xla.join_digits(sums_xla.carry(digits), greatest)
    unknown, above, below = kinds > 0
    found = jnp.where(above, jnp.inf, jnp.where(below, -jnp.inf, finite))
    return jnp.where(unknown | (above & below), jnp.nan, found)
