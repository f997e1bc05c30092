# SPDX-License-Identifier: Apache-2.0
"""Ranges and order statistics by group in plain XLA: the definitions.

Order statistics are of sums of whole numbers of up to 41 bits, too many for int32:
such a number travels as limbs, each summed in an int32, and is compared as a pair
(high, low) = high * 2^20 + low.
"""

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from jboost.entry.collectives import exchange, total
from jboost.kernels import xla
from jboost.kernels.float_bits import from_ordered_bits, ordered_bits

_LOW = 20  # bits of the lower half of a pair
_MOST = 2.0**40  # a rounded slope
_DIGIT = 8  # bits of a key that are found at a time
_MANY_GROUPS = 1024  # beyond which it is half as many, to bound the table of sums


def find_range(values, group, *, num_groups):
    """See :func:`jboost.trees.leaf_operations.find_range`."""
    unknown = jnp.isnan(values)
    group = _inside(group, num_groups)
    low, high = (
        ordered_bits(jnp.where(unknown, end, values)) for end in (-jnp.inf, jnp.inf)
    )
    # A GPU has atomic extremes of integers, but not of floats.
    none, least = ordered_bits(jnp.array([jnp.inf, -jnp.inf], jnp.float32))
    low = jnp.full(num_groups + 1, none).at[group].min(low)
    high = jnp.full(num_groups + 1, least).at[group].max(high)
    low, high = from_ordered_bits(low), from_ordered_bits(high)
    return low[:num_groups], high[:num_groups]


def add_values(scores, values, leaf):
    """See :func:`jboost.trees.leaf_operations.add_values`."""
    num_leaves = values.shape[1]
    # Or the product that made the values might become part of a fused addition.
    values = jax.lax.optimization_barrier(values)
    # x + -0 is x, of both zeros, too.
    values = jnp.pad(values, ((0, 0), (0, 1)), constant_values=-0.0)
    index = _inside(leaf, num_leaves)
    return scores + jnp.take_along_axis(values, index, axis=1, mode="clip")


def middle_minimizers(
    minimizer, scores, weights, left, kink, scale, group, *, num_groups
):
    """See :func:`jboost.trees.leaf_operations.middle_minimizers`."""
    key = minimizer - scores
    key = jnp.where(key == 0, 0.0, key)  # one zero
    counts = (weights > 0) & ~jnp.isnan(key)
    group = jnp.where(counts, _inside(group, num_groups), num_groups)
    width = 30 - key.shape[0].bit_length()  # bits of a limb: sums stay below 2^31
    kinks = _limbs(_round(weights * kink * scale, counts), width)
    lefts = _limbs(_round(weights * left * scale, counts), width)
    sums = [_sum_limbs(limbs, group, num_groups + 1) for limbs in (lefts, kinks)]
    key = ordered_bits(key)

    def sum_digits(prefixes, shift, digit):
        size = 1 << digit

        def sum_one(prefix):
            leading = key >> shift
            same = (leading >> digit) == ((prefix[group] >> shift) >> digit)
            segment = group * size + (leading & (size - 1)).astype(jnp.int32)
            segment = jnp.where(same, segment, num_groups * size)
            sums = _sum_limbs(kinks, segment, (num_groups + 1) * size)
            return _pair(sums.reshape(num_groups + 1, size, -1), width)

        return jnp.stack(jax.lax.map(sum_one, prefixes))

    return find_middles(jnp.stack(_pair(jnp.stack(sums), width)), sum_digits)


def find_middles(sums, sum_digits):
    """Finds the middle minimizer of each group by sums over rows.

    The digits of each group's key are found one after the other, as in a radix sort:
    kinks are summed by the next digit over the rows that share the digits found so far.
    The sums of a shard are exchanged here, those by the first digit with the totals.

    Args:
      sums: the sums of left and kink, as pairs [2, 2, G + 1]; the last group holds the
        rows without a group.
      sum_digits: takes the digits so far, [E, G + 1] for one end of the middle or both,
        the place of the next one, and its number of bits. Returns the sums by that
        digit as pairs [2, E, G + 1, 2^digit].
    """
    digit = _DIGIT if sums.shape[-1] - 1 <= _MANY_GROUPS else _DIGIT // 2
    start = jnp.zeros((1, sums.shape[-1]), jnp.uint32)
    table = sum_digits(start, jnp.uint32(32 - digit), digit)
    (sums, table), _ = exchange([sums, table], [])
    sums, table = _carry(*sums), _carry(*table)
    wanted, whole = ((sums[0][i], sums[1][i]) for i in range(2))
    num_groups = whole[0].size - 1
    # Slopes within 2^-20 of their sum are no slopes.
    slack = whole[0]
    one = (jnp.zeros_like(slack), jnp.ones_like(slack))
    first = _carry(wanted[0], wanted[1] - slack)
    first = _where(_reaches(first, one), first, one)
    last = _carry(wanted[0], wanted[1] + slack + 1)
    ends = (_where(_reaches(whole, end), end, whole) for end in (first, last))
    target = tuple(jnp.stack(parts) for parts in zip(*ends, strict=True))
    low, high = _select(sum_digits, digit, table, target)
    return jnp.where(_reaches(whole, one), low / 2 + high / 2, 0.0)[:num_groups]


def _select(sum_digits, digit, table, target):
    """Finds the least key of each group where the cumulative kinks reach the target.

    Args:
      table: the sums by the first digit, over all shards.
    """

    def narrow(number, state, sums):
        """Finds a digit."""
        prefix, below = state
        shift = 32 - digit * (number + 1)
        # Up to each digit, and before it. A low part is below 2^20, of 256 digits.
        upto = [jnp.cumsum(part, axis=-1) for part in sums]
        before = [jnp.pad(part, ((0, 0), (0, 0), (1, 0)))[..., :-1] for part in upto]
        before, upto = (
            _carry(high + below[0][..., None], low + below[1][..., None])
            for high, low in (before, upto)
        )
        reached = _reaches(upto, (target[0][..., None], target[1][..., None]))
        found = jnp.argmax(reached, axis=-1)[..., None]
        below = tuple(
            jnp.take_along_axis(part, found, axis=-1)[..., 0] for part in before
        )
        return prefix | (found[..., 0].astype(jnp.uint32) << jnp.uint32(shift)), below

    def look(number, state):
        shift = jnp.uint32(32 - digit * (number + 1))
        sums = total(sum_digits(state[0], shift, digit))
        return narrow(number, state, _carry(*sums))

    zero = jnp.zeros(target[0].shape, jnp.int32)
    state = narrow(0, (zero.astype(jnp.uint32), (zero, zero)), table)
    return from_ordered_bits(jax.lax.fori_loop(1, 32 // digit, look, state)[0])


def _inside(group, num_groups):
    """Returns the group, or ``num_groups`` for rows outside."""
    return jnp.where((group >= 0) & (group < num_groups), group, num_groups)


def _round(values, counts):
    """Returns floor(x + 1/2), at most 2^40; 0 for rows that do not count."""
    values = values + 0.5
    values = jnp.floor(jnp.where(values < _MOST, values, _MOST))
    return jnp.where(counts, values, 0.0)


def _limbs(values, width):
    """Cuts whole numbers into int32 of ``width`` bits each, least first; exact."""
    limbs = []
    for number in reversed(range(-(-41 // width))):
        limb = jnp.floor(values * 2.0 ** (-width * number))
        values = values - limb * 2.0 ** (width * number)
        limbs.append(limb.astype(jnp.int32))
    return jnp.stack(limbs[::-1], axis=1)


def _sum_limbs(limbs, segment, num_segments):
    run = sequential_vmap(lambda v, s: xla.segment_sum(v, s, num_segments))
    return run(limbs, segment)


def _pair(limbs, width):
    """Sums of limbs as pairs."""
    high = low = jnp.zeros(limbs.shape[:-1], jnp.int32)
    for number in range(limbs.shape[-1]):
        limb, shift = limbs[..., number], width * number
        if shift >= _LOW:
            high += limb << (shift - _LOW)
        else:
            high += limb >> (_LOW - shift)
            low += (limb & ((1 << (_LOW - shift)) - 1)) << shift
    return _carry(high, low)


def _carry(high, low):
    return high + (low >> _LOW), low & ((1 << _LOW) - 1)


def _reaches(first, second):
    """Returns first >= second, for pairs."""
    same = (first[0] == second[0]) & (first[1] >= second[1])
    return (first[0] > second[0]) | same


def _where(condition, first, second):
    pairs = zip(first, second, strict=True)
    return tuple(jnp.where(condition, a, b) for a, b in pairs)
