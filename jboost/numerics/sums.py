# SPDX-License-Identifier: Apache-2.0
"""Sums whose bits do not depend on the order of the terms.

In: float32 or integer arrays. Out: their sums, over an axis or by group. Derivatives
are those of plain sums. Where rows are sharded, sums are over all shards, and have the
bits that they have on one device.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from jboost.entry.collectives import current_shards, most, total
from jboost.kernels import leaves_cpu, reduce_cpu, sums_xla
from jboost.kernels.library import choose
from jboost.numerics.derivatives import differentiable


def sum_by_group(
    values: Shaped[Array, " N"],
    group: Int32[Array, " N"],
    num_groups: int,
) -> Shaped[Array, " G"]:
    """Sums ``values``, which may be float, by group; see :func:`sum_channels`."""
    return sum_channels((values,), group, num_groups)[0]


def sum_channels(
    channels: Sequence[Shaped[Array, " N"]],
    group: Int32[Array, " N"],
    num_groups: int,
) -> Shaped[Array, "C G"]:
    """Sums each channel by group; the bits do not depend on the order of the rows.

    Floats are added as multiples of a unit, one for each channel; see
    :func:`sum_rows`. A group outside [0, num_groups) is left out.
    """
    run = partial(sums_xla.sum_channels, num_groups=num_groups)
    if not all(channel.dtype == jnp.float32 for channel in channels):
        return total(run(group, *channels))
    if current_shards() is not None:
        return _sum_sharded_channels(channels, group, num_groups)
    cpu = partial(leaves_cpu.sum_channels, num_groups=num_groups)
    derive = partial(_derive_channels, num_groups)
    return differentiable(choose(cpu=cpu, xla=run), derive, group, *channels)


def _derive_channels(num_groups, sums, operands, tangents):
    del sums
    group, channels = operands[0], jnp.stack(tangents[1:], axis=1)
    # One more group takes the rows that have none.
    group = jnp.where((group >= 0) & (group < num_groups), group, num_groups)
    return jax.ops.segment_sum(channels, group, num_groups + 1)[:num_groups].T


def _sum_sharded_channels(channels, group, num_groups):
    look, add = (
        choose(*(partial(each, num_groups=num_groups) for each in pair))
        for pair in (
            (leaves_cpu.find_greatest, sums_xla.find_group_greatest),
            (leaves_cpu.sum_digits, sums_xla.sum_group_digits),
        )
    )
    greatest, others = look(group, *channels)
    greatest = most(greatest)
    digits, kinds = _collect(
        total, [add(group, greatest, *channels), _count_kinds(others)]
    )
    return _join(digits, greatest[:, None], kinds)


def sum_rows(values: Float[Array, "*K N"]) -> Float[Array, "*K"]:
    """Sums the last axis; the bits do not depend on the order of the terms.

    Terms are rounded to multiples of 2^-38 times the power of two above the greatest
    magnitude and added as integers; the result is rounded to float32. The error is at
    most N 2^-39 times the greatest magnitude, and that rounding. A sum that holds NaN
    or infinities is NaN or infinite, as in floating point.
    """
    if current_shards() is not None:
        return sum_each(values)[0]
    run = choose(cpu=reduce_cpu.sum_rows, xla=sums_xla.sum_rows)
    return differentiable(run, _derive_sum, values)


def _derive_sum(total, operands, tangents):
    del total, operands
    return jnp.sum(tangents[0], axis=-1)


def sum_each(*arrays: Float[Array, "..."]) -> list[Float[Array, "..."]]:
    """Returns :func:`sum_rows` of each array, with no more collectives than of one."""
    if current_shards() is None:
        return [sum_rows(values) for values in arrays]
    look = choose(cpu=reduce_cpu.find_greatest, xla=sums_xla.find_greatest)
    add = choose(cpu=reduce_cpu.sum_digits, xla=sums_xla.sum_digits)
    looks = [look(values) for values in arrays]
    sizes = _collect(most, [greatest for greatest, _ in looks])
    digits = [add(*pair) for pair in zip(arrays, sizes, strict=True)]
    kinds = [_count_kinds(others) for _, others in looks]
    sums = _collect(total, digits + kinds)
    parts = zip(sums[: len(arrays)], sizes, sums[len(arrays) :], strict=True)
    return [_join(*part) for part in parts]


def _count_kinds(others):
    """Returns which kinds of sums are on a shard: NaN, inf, -inf."""
    kinds = (jnp.isnan(others), others == jnp.inf, others == -jnp.inf)
    return jnp.stack(kinds).astype(jnp.int32)


def _join(digits, greatest, kinds):
    """Returns the sum over all shards."""
    finite = sums_xla.join_digits(sums_xla.carry(digits), greatest)
    unknown, above, below = kinds > 0
    found = jnp.where(above, jnp.inf, jnp.where(below, -jnp.inf, finite))
    return jnp.where(unknown | (above & below), jnp.nan, found)


def _collect(collective: Callable[[Array], Array], arrays: list[Array]) -> list[Array]:
    """Applies a collective to several arrays at once."""
    whole = collective(jnp.concatenate([array.reshape(-1) for array in arrays]))
    found, first = [], 0
    for array in arrays:
        found.append(whole[first : first + array.size].reshape(array.shape))
        first += array.size
    return found
