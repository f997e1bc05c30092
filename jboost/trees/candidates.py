# SPDX-License-Identifier: Apache-2.0
"""Candidate thresholds from sorted rows: weighted quantiles of each feature.

The quantiles come from running sums of sorted rows. They are exact, so that no
summary with an error of its own is needed: its error here is 0.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt8

from jboost.codes.bins import MISSING
from jboost.codes.codes import DenseCodes
from jboost.kernels.binning_cpu import code_dtype
from jboost.kernels.calls import call, ints
from jboost.kernels.library import choose
from jboost.numerics.exact import choose_scale, quantize

Candidates = Literal["global", "local", "exact"]
CandidateWeights = Literal["samples", "curvature"]

_LARGEST = 2**31 - 1


def accumulate(values: Int32[Array, "N C"]) -> Int32[Array, "N C"]:
    """Returns running sums along N.

    A CPU adds row by row, which is several times faster there than a parallel sum.
    """

    def one_by_one(values):
        def add(total, row):
            return total + row, total + row

        return jax.lax.scan(add, jnp.zeros_like(values[0]), values)[1]

    together = partial(jnp.cumsum, axis=0)
    return jax.lax.platform_dependent(values, cpu=one_by_one, default=together)


class Segments(NamedTuple):
    """Nodes as runs of neighbors in a feature's order, for each of the N positions.

    Attributes:
      code: the code of the row at the position, ascending within a node.
      last: whether the next position belongs to another node.
      below: mass of all positions before the node's first value.
      total: mass of the node's rows that have a value.
    """

    code: Int32[Array, " N"]
    last: Bool[Array, " N"]
    below: Int32[Array, " N"]
    total: Int32[Array, " N"]


def find_bins(
    segments: Segments,
    mass: Int32[Array, " N"],
    running: Int32[Array, " N"],
    num_bins: Int32[Array, ""] | int,
) -> Int32[Array, " N"]:
    """Cuts each node's values into at most ``num_bins`` bins of about equal mass.

    A value lies in bin floor(r / eps), where eps = 1 / num_bins and r is the share of
    the node's mass below the middle of the value's own:

        r(v) = (mass of values below v + mass of v / 2) / mass of all values.

    Candidates are the ends of the bins. So the share of the mass between neighboring
    candidates is less than eps plus half of the shares of the bin's first and last
    values, and a value with a share of 2 eps or more has a bin of its own. Chen and
    Guestrin 2016, eq. 8 and 9, require the same, as far as values can be cut at all.

    Masses are at least 0, and ``running`` are their running sums. The bins ascend
    within a node; the bin of a missing value has no meaning.
    """
    changes = segments.code[1:] != segments.code[:-1]
    ends = jnp.append(changes, True) | segments.last
    begins = jnp.append(True, ends[:-1])
    # Running sums ascend, so their maximum so far is the latest one.
    low = _run(jnp.maximum, jnp.where(begins, running - mass, 0), reverse=False)
    high = _run(jnp.minimum, jnp.where(ends, running, _LARGEST), reverse=True)
    low, high = ((end - segments.below).astype(jnp.float32) for end in (low, high))
    total = jnp.maximum(segments.total, 1).astype(jnp.float32)
    count = jnp.asarray(num_bins, jnp.float32)
    share = (low + high) / 2 * count / total
    return jnp.clip(share, 0, count - 1).astype(jnp.int32)


def _run(choose, values, reverse):
    """Returns running maxima or minima; row by row on a CPU."""

    def one_by_one(values):
        def step(best, value):
            best = choose(best, value)
            return best, best

        first = values[-1] if reverse else values[0]
        return jax.lax.scan(step, first, values, reverse=reverse)[1]

    whole = jax.lax.cummax if choose is jnp.maximum else jax.lax.cummin
    together = partial(whole, reverse=reverse)
    return jax.lax.platform_dependent(values, cpu=one_by_one, default=together)


def propose(
    codes: DenseCodes,
    mass: Int32[Array, " N"],
    *,
    num_bins: int,
) -> tuple[DenseCodes, Int32[Array, "F B"]]:
    """Proposes candidates for a whole tree: at most B - 1 bins of values per feature.

    There is a code for every distinct value, and ``order``. Masses are at least 0, and
    their sum must fit 31 bits. B includes the missing code. Returns the code of each
    row's bin (0 for missing values, 1 for the lowest bin), and the highest code of a
    value in the bins up to each one.
    """
    run = choose(cpu=_propose_natively, xla=_propose_plainly, num_bins=num_bins)
    return run(codes, mass)


def _propose_natively(codes, mass, *, num_bins):
    coarse = jax.ShapeDtypeStruct(codes.columns.shape, code_dtype(num_bins))
    results = coarse, ints(codes.num_features, num_bins)
    columns, highest = call("propose", results, codes.columns, codes.order, mass)
    return DenseCodes(columns), highest


def _propose_plainly(codes, mass, *, num_bins):
    num_rows = mass.shape[0]
    last = jnp.arange(num_rows, dtype=jnp.int32) == num_rows - 1

    def propose_feature(pair):
        codes, rows = pair
        code, part = codes[rows].astype(jnp.int32), mass[rows]
        running = accumulate(part[:, None])[:, 0]
        below = jnp.sum(jnp.where(code == MISSING, part, 0))
        total = jnp.broadcast_to(running[-1] - below, num_rows)
        segments = Segments(code, last, jnp.broadcast_to(below, num_rows), total)
        found = find_bins(segments, part, running, num_bins - 1)
        # The lowest value gets code 1, as from fit_bins. With empty bins below it a
        # split could send missing rows left and all values right, which no threshold
        # between two values expresses.
        lowest = jnp.min(jnp.where(code == MISSING, num_bins, found))
        coarse = jnp.where(code == MISSING, MISSING, 1 + found - lowest)
        highest = jnp.zeros(num_bins, jnp.int32).at[coarse].max(code)
        by_row = jnp.zeros(num_rows, code_dtype(num_bins)).at[rows]
        by_row = by_row.set(coarse.astype(code_dtype(num_bins)), unique_indices=True)
        return by_row, jax.lax.cummax(highest)

    found = jax.lax.map(propose_feature, (codes.columns, codes.order))
    return DenseCodes(found[0]), found[1]


def measure(
    values: Float[Array, " N"], in_bag: UInt8[Array, " N"]
) -> Int32[Array, " N"]:
    """Returns masses as integers: their sum fits 31 bits, and equal ones stay equal.

    The masses are at least 0. ``in_bag`` says how many times each row counts.
    """
    least = jnp.min(jnp.where(in_bag > 0, values, jnp.inf))
    values = jnp.where(in_bag > 0, values, 0.0)
    num_in_bag = jnp.sum(in_bag > 0, dtype=jnp.int32)
    fixed = choose_scale(values[None, :], num_in_bag, in_bag)
    # Rows of equal mass are rounded alike, which keeps their quantiles exact.
    differs = least < jnp.max(values)
    fixed = fixed._replace(stochastic=fixed.stochastic & differs)
    seed = jnp.zeros(2, jnp.uint32)
    return quantize(values[:, None], fixed, seed, times=in_bag)[:, 0]
