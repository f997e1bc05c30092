# SPDX-License-Identifier: Apache-2.0
"""Operations on leaves, each with a CPU kernel and a definition in plain XLA.

They add values to scores, and find ranges and order statistics by leaf. On GPUs order
statistics have kernels, too: those of cuda/kinks.cu.

Order statistics are of sums of whole numbers of up to 41 bits, too many for int32:
such a number travels as limbs, each summed in an int32, and is compared as a pair
(high, low) = high * 2^20 + low.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Bool, Float, Int32

from jboost.entry.collectives import current_shards, exchange, total
from jboost.kernels.calls import call, floats, ints
from jboost.kernels.cuda_launch import (
    BLOCKS,
    SHARED_BYTES,
    Launch,
    divide_rows,
    launch,
)
from jboost.kernels.library import choose
from jboost.kernels.xla import from_ordered_bits, ordered_bits, segment_sum
from jboost.numerics.derivatives import differentiable

_LOW = 20  # bits of the lower half of a pair
_MOST = 2.0**40  # a rounded slope
_DIGIT = 8  # bits of a key that are found at a time
_MANY_GROUPS = 1024  # beyond which it is half as many, to bound the table of sums
_WORD = 8  # bytes of a sum of a kernel for GPUs


def add_values(
    scores: Float[Array, "K N"],
    values: Float[Array, "K L"],
    leaf: Int32[Array, "T N"],
    *,
    in_place: bool = False,
) -> Float[Array, "K N"]:
    """Returns scores[k, i] + values[k, leaf[k, i]]; rows without a leaf keep theirs.

    Leaves are those of each score's tree, or of one for all (T = 1); numbers outside
    [0, L) stand for no leaf. With ``in_place`` the memory of the scores may be reused.
    """
    leaf = jnp.broadcast_to(leaf, scores.shape)

    def add_natively(scores, values, leaf):
        # In place without need, XLA copies the scores first.
        result = scores if in_place else floats(*scores.shape)
        return call("add_values", result, scores, values, leaf)

    run = choose(cpu=add_natively, xla=_add_plainly)
    return differentiable(run, _derive_added, scores, values, leaf)


def _add_plainly(scores, values, leaf):
    # Or the product that made the values might become part of a fused addition.
    values = jax.lax.optimization_barrier(values)
    # x + -0 is x, of both zeros, too.
    padded = jnp.pad(values, ((0, 0), (0, 1)), constant_values=-0.0)
    index = _inside(leaf, values.shape[1])
    return scores + jnp.take_along_axis(padded, index, axis=1, mode="clip")


def _derive_added(added, operands, tangents):
    del added
    leaf, num_leaves = operands[2], operands[1].shape[1]
    index = _inside(leaf, num_leaves)
    values = jnp.pad(tangents[1], ((0, 0), (0, 1)))
    return tangents[0] + jnp.take_along_axis(values, index, axis=1, mode="clip")


def find_range(
    values: Float[Array, " N"],
    group: Int32[Array, " N"],
    num_groups: int,
) -> tuple[Float[Array, " G"], Float[Array, " G"]]:
    """Finds the least and greatest value of each group; infinite if one is NaN.

    The least of none is inf, the greatest -inf. Values hold no -0.
    """
    kernel = partial(call, "range_by_group", (floats(num_groups), floats(num_groups)))
    plainly = partial(_find_range_plainly, num_groups=num_groups)
    low, high = choose(cpu=kernel, xla=plainly)(values, group)
    _, (below, high) = exchange([], [-low, high])
    return -below, high


def _find_range_plainly(values, group, *, num_groups):
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


def middle_minimizers(
    minimizer: Float[Array, " N"],
    scores: Float[Array, " N"],
    weights: Float[Array, " N"],
    kinks: tuple[Float[Array, "*N"], Float[Array, "*N"]],
    scale: Float[Array, ""],
    group: Int32[Array, " N"],
    num_groups: int,
) -> Float[Array, " G"]:
    """Computes weighted order statistics: medians, quantiles.

    The middle of all c that minimize, for each group, the sum over its rows of

        w_i (left_i max(r_i - c, 0) + (kink_i - left_i) max(c - r_i, 0)),

    with r = minimizer - score; 0 for groups without weight. Slopes times weight are
    rounded to multiples of 1 / scale, so that their sums are exact in any order; where
    the sum's slope is below 2^-20 of the sum of kinks it counts as zero, because
    weights in float32 are no more precise (0.1 * 500 rows are not 50).

    The derivative is that of the rows that it selects; see :func:`derive_selected`.

    Args:
      kinks: left and kink above, the latter the jump of the slope at the minimum; for
        each row or one number for all.
      scale: a power of two; weights times kinks times scale sum to less than 2^40.
    """
    run = choose(
        cpu=_find_natively, xla=_find_plainly, cuda=_find_on_gpu, num_groups=num_groups
    )
    rows = (minimizer, scores, weights, *kinks, scale, group)
    if current_shards() is not None:
        return run(*rows)
    return differentiable(run, partial(_derive_middle, num_groups), *rows)


def _find_natively(*rows, num_groups):
    if current_shards() is None:
        return call("middle_minimisers", floats(num_groups), *rows)
    shape = (2, 2, num_groups + 1)

    def sum_digits(prefixes, shift, digit):
        result, shift = ints(*shape, 1 << digit), shift.astype(jnp.int32)
        both = jnp.broadcast_to(prefixes, (2, num_groups + 1))
        found = call("sum_kinks_by_digit", result, *rows, both, shift)
        return found[:, : len(prefixes)]

    return _find_middles(call("sum_kinks", ints(*shape), *rows), sum_digits)


def _find_on_gpu(*rows, num_groups):
    *rows, scale, group = rows
    steps = [slopes.ndim for slopes in rows[3:]]  # 0: one number for all rows
    blocks, rows_per_block = divide_rows(len(group), BLOCKS)
    rows = [jnp.reshape(each, -1) for each in (*rows, scale, group)]

    def run(kernel, shape, operands=(), numbers=()):
        size = math.prod(shape) * _WORD
        shared = size <= SHARED_BYTES
        words = Launch(
            kernel,
            (jax.ShapeDtypeStruct((*shape, 2), jnp.uint32),),
            (blocks, 1),
            (len(group), num_groups, *steps, rows_per_block, shared, *numbers),
            size if shared else 0,
            zeroed=(True,),
        )
        return _read_words(launch(words, *rows, *operands))

    def sum_digits(prefixes, shift, digit):
        shape, places = (*prefixes.shape, 1 << digit), jnp.reshape(shift, 1)
        numbers = len(prefixes), digit
        return run("sum_kinks_by_digit", shape, (prefixes, places), numbers)

    sums = jnp.pad(run("sum_kinks", (2, num_groups)), ((0, 0), (0, 0), (0, 1)))
    return _find_middles(sums, sum_digits)


def _read_words(words):
    """Returns numbers of two words, the lowest first, as pairs."""
    low, high = words[..., 0], words[..., 1]
    low, high = low & ((1 << _LOW) - 1), (low >> _LOW) | (high << (32 - _LOW))
    return jnp.stack([high, low]).astype(jnp.int32)


def _derive_middle(num_groups, middle, operands, tangents):
    minimizer, scores, weights, *_, group = operands
    inside = (group >= 0) & (group < num_groups)
    counts = (weights > 0) & ~jnp.isnan(minimizer - scores) & inside
    moved = tangents[0] - tangents[1]
    return derive_selected(middle, minimizer - scores, moved, weights, counts, group)[0]


def derive_selected(
    middle: Float[Array, " G"],
    key: Float[Array, " N"],
    moved: Float[Array, " N"],
    weights: Float[Array, " N"],
    counts: Bool[Array, " N"],
    group: Int32[Array, " N"],
) -> tuple[Float[Array, " G"], Bool[Array, " G"]]:
    """Returns the tangent of an order statistic, and whether two keys define it.

    It is midway between two keys of its group: the greatest key up to it and the least
    from it on, which may be the same. Rows of equal keys move it by the weighted mean
    of their tangents. The tangent is 0 if such keys are missing. ``moved`` are the
    tangents of the keys, and ``counts`` is the mask of the rows to choose from.
    """
    num_groups = middle.shape[0]
    group = jnp.where(counts, group, num_groups)
    here = jnp.append(middle, jnp.nan)[group]
    change, known = jnp.zeros(num_groups, jnp.float32), jnp.ones(num_groups, bool)
    for beside, extreme, nothing in (
        (key <= here, jax.ops.segment_max, -jnp.inf),
        (key >= here, jax.ops.segment_min, jnp.inf),
    ):
        chosen = extreme(jnp.where(beside, key, nothing), group, num_groups + 1)
        selected = jnp.where(beside & (key == chosen[group]), weights, 0.0)
        share = jax.lax.stop_gradient(selected)
        total, sums = (
            jax.ops.segment_sum(parts, group, num_groups + 1)[:num_groups]
            for parts in (share, jnp.where(share > 0, share * moved, 0.0))
        )
        known &= total > 0
        change += sums / jnp.where(total > 0, 2 * total, 1.0)
    return jnp.where(known, change, 0.0), known


def _find_plainly(
    minimizer, scores, weights, left, kink, scale, group, *, num_groups
):  # fmt: skip
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

    return _find_middles(jnp.stack(_pair(jnp.stack(sums), width)), sum_digits)


def _find_middles(sums, sum_digits):
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

    ``table`` holds the sums by the first digit, over all shards.
    """

    def narrow(number, state, sums):
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
    run = sequential_vmap(lambda v, s: segment_sum(v, s, num_segments))
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
