# SPDX-License-Identifier: Apache-2.0
"""Operations on leaves, each with a CPU kernel and a definition in plain XLA."""

from functools import partial

from jaxtyping import Array, Float, Int32

from jboost.kernels import leaves_cpu, leaves_xla
from jboost.kernels.library import choose


def add_values(
    scores: Float[Array, "K N"],
    values: Float[Array, "K L"],
    leaf: Int32[Array, "K N"],
    *,
    in_place: bool = False,
) -> Float[Array, "K N"]:
    """Returns scores[k, i] + values[k, leaf[k, i]]; rows without a leaf keep theirs.

    Args:
      in_place: whether the memory of the scores may be reused.
    """
    cpu = partial(leaves_cpu.add_values, in_place=in_place)
    run = choose(cpu=cpu, xla=leaves_xla.add_values)
    return run(scores, values, leaf)


def find_range(
    values: Float[Array, " N"],
    group: Int32[Array, " N"],
    num_groups: int,
) -> tuple[Float[Array, " G"], Float[Array, " G"]]:
    """Finds the least and greatest value of each group; infinite if one is NaN.

    The least of none is inf, the greatest -inf. Values hold no -0.
    """
    cpu, xla = (
        partial(kernels.find_range, num_groups=num_groups)
        for kernels in (leaves_cpu, leaves_xla)
    )
    return choose(cpu=cpu, xla=xla)(values, group)


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
    the sum's slope is below 2^-20 of the sum of kinks it counts as zero, because that
    is what weights in float32 know (0.1 * 500 rows are not 50).

    Args:
      kinks: left, and the jump of the slope at the minimum; for each row or for all.
      scale: a power of two; weights times kinks times scale sum to less than 2^40.
    """
    cpu, xla = (
        partial(kernels.middle_minimizers, num_groups=num_groups)
        for kernels in (leaves_cpu, leaves_xla)
    )
    run = choose(cpu=cpu, xla=xla)
    return run(minimizer, scores, weights, *kinks, scale, group)
