# SPDX-License-Identifier: Apache-2.0
"""Estimates the curvature of a loss that couples rows, from products with its Hessian.

A product y = H z with random signs z costs about two gradients, and z y estimates the
diagonal of H without bias (Hutchinson 1990; Bekas, Kokiopoulou and Saad 2007), with the
variance sum_j H_ij^2 over the other rows of the group. Each round computes one product.
The products are averaged over rounds, because scores move slowly.

If the Hessian carries no information (hinge losses, smoothed 0-1 losses), differences
of gradients replace it. Their distance is large enough for the gradient to change.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jboost.numerics.random import derive_seeds, hash_words
from jboost.objective.coupled import (
    GroupObjective,
    PreparedGroups,
    group_gradient,
    linearize_by_group,
)
from jboost.objective.evaluation import weighted_mean

Product = Callable[[Float[Array, "K N"]], Float[Array, "K N"]]

_MEMORY = 10  # number of rounds in the running average
_FLOOR = 0.05  # least curvature of a row, relative to the mean
_SMALL = 8  # the largest group, in rows, that gets its exact diagonal
_INTERVAL = 20  # rounds between updates of the distance and of the use of differences
_DISTANCES = (-10, 10)  # range of the distance, as powers of 4
_CHANGE = 0.25  # relative change of the gradient at the distance of differences
_JUMP = 30  # ratio of the mean curvatures of rounds that restarts the average
_FLAT = 1e-4  # a smaller share of the steepness of the gradient is no curvature
_LEAST_SHARE = 0.25  # H is unused below this share of the curvature by differences


class Probe(NamedTuple):
    """The state of the estimate, passed from round to round.

    Curvatures are averages. ``distance`` is that of differences of gradients, in units
    of the score; ``differs`` says whether differences replace the Hessian.
    """

    curvature: Float[Array, "K N"]
    distance: Float[Array, ""]
    differs: Bool[Array, ""]


def start_probe(scores: Float[Array, "K N"]) -> Probe:
    """Returns the probe before the first round."""
    return Probe(jnp.zeros_like(scores), jnp.float32(1), jnp.asarray(False))


def use_product(
    objective: GroupObjective,
    scores: Float[Array, "K N"],
    probe: Probe,
    use: Callable[[Product], Array],
) -> Array:
    """Calls ``use`` with a function that multiplies by the Hessian."""

    def gradient_at(scores):
        return group_gradient(objective, scores)

    def multiply_again(direction):
        return jax.jvp(gradient_at, (scores,), (direction,))[1]

    if any(objective.loss.by_pairs):
        # The values that linearization stores for many pairs take longer to write and
        # read than to compute again.
        multiply = linearize_by_group(objective, scores) or multiply_again
    else:
        _, multiply = jax.linearize(gradient_at, scores)

    def difference(direction):
        size = _size(objective, direction)
        size = jnp.where(size > 0, size, 1.0)
        move = direction * (probe.distance / size)
        # One after the other: the gradient is compiled once.
        sides = jnp.stack([scores + move, scores - move])
        above, below = jax.lax.map(gradient_at, sides)
        return (above - below) * (size / (2 * probe.distance))

    # Not one condition for each product: a GPU waits for the host at each.
    return jax.lax.cond(probe.differs, lambda: use(difference), lambda: use(multiply))


def renew_probe(
    objective: GroupObjective,
    scores: Float[Array, "K N"],
    probe: Probe,
    round_number: Int32[Array, ""],
) -> tuple[Float[Array, "K N"], Probe]:
    """Computes a round's gradient, and updates the probe; ``words`` seed the signs."""
    signs = _draw_signs(objective.words, scores)

    def gradient_at(scores):
        return group_gradient(objective, scores)

    gradient, product = jax.jvp(gradient_at, (scores,), (signs,))
    found, saddle, probe = _compare(
        objective, scores, signs, gradient, product, probe,
        round_number % _INTERVAL == 0,
    )  # fmt: skip
    found = jnp.where(jnp.isfinite(found), signs * found, 0.0)
    share = 1 / jnp.minimum(round_number + 1, _MEMORY).astype(jnp.float32)
    average = probe.curvature + (found - probe.curvature) * share
    average = jnp.where(_is_outdated(objective, probe.curvature, found), found, average)
    exact = _replace_small(objective, scores, probe, average)
    average = jnp.where(saddle, average, exact)
    return gradient, probe._replace(curvature=average)


def _is_outdated(objective, average, found):
    """Returns whether the curvature is far from the average of earlier rounds.

    The average is then useless. Example: the curvature of a correlation falls with the
    square of the scale of the scores.
    """
    new, old = _mean(objective, found), _mean(objective, jnp.maximum(average, 0.0))
    return (new > _JUMP * old) | ((new > 0) & (_JUMP * new < old))


class _Search(NamedTuple):
    """The search for the distance of differences.

    Attributes:
      power: the base-4 logarithm of the distance.
      turn: 0 during the search, 1 while the gradient below is missing, 2 at the end.
      above, below: the gradients at this distance along the signs and against them.
    """

    power: Int32[Array, ""]
    turn: Int32[Array, ""]
    above: Float[Array, "K N"]
    below: Float[Array, "K N"]


def _compare(objective, scores, signs, gradient, product, probe, due):
    """Returns the product to use, whether the loss is at a saddle, and the probe.

    The distance is the least power of 4 that changes the gradient by a quarter. The
    Hessian is not used if its curvature along the signs is below a quarter of the
    curvature by differences. At a saddle (correlations at equal scores) neither bends
    upward: the distance is then the length of a step.
    """
    wanted = _CHANGE * _size(objective, gradient)
    first, last = _DISTANCES

    def go_on(search):
        return search.turn < 2

    def evaluate(search):
        """Evaluates one gradient: the only place, because it is compiled."""
        distance = _power_of_four(search.power)
        below = search.turn == 1
        move = jnp.where(below, -distance, distance)
        found = group_gradient(objective, scores + move * signs)
        # A change that is not finite is no short one.
        short = due & (search.power < last)
        short &= _size(objective, found - gradient) < wanted
        return _Search(
            power=jnp.where(~below & short, search.power + 1, search.power),
            turn=jnp.where(below, 2, jnp.where(short, 0, 1)),
            above=jnp.where(below, search.above, found),
            below=jnp.where(below, found, search.below),
        )

    known = jnp.round(jnp.log2(probe.distance) / 2).astype(jnp.int32)
    search = _Search(
        power=jnp.where(due, jnp.int32(first), known),
        turn=jnp.where(due | probe.differs, 0, 2),
        above=product, below=product,
    )  # fmt: skip
    search = jax.lax.while_loop(go_on, evaluate, search)
    distance = _power_of_four(search.power)
    difference = (search.above - search.below) / (2 * distance)
    bends = [_mean(objective, signs * each) for each in (product, difference)]
    enough = bends[0] >= _LEAST_SHARE * bends[1]
    # A gradient that jumps at the least distance (lambdas, where documents change
    # places) has no difference quotient to compare with.
    jumps = (search.power == first) & (bends[0] > 0)
    enough |= jumps
    differs = jnp.where(due, ~enough & jnp.isfinite(bends[1]), probe.differs)
    probe = probe._replace(distance=distance, differs=differs)
    found = jnp.where(differs, difference, product)
    steepness = _size(objective, search.above - gradient) / distance
    saddle = due & ~jumps & (jnp.maximum(*bends) < _FLAT * steepness)
    return jnp.where(saddle, steepness * signs, found), saddle, probe


def _mean(objective, values):
    """Returns the sum over scores of the mean over rows that count."""
    counted = (objective.weights > 0).astype(jnp.float32)
    return jnp.sum(weighted_mean(values, counted))


def _size(objective, values):
    """Returns the root of the mean square."""
    return jnp.sqrt(_mean(objective, jnp.square(values)))


def raise_curvature(probe: Probe, weights: Float[Array, " N"]) -> Float[Array, "K N"]:
    """Returns the curvature of every row, at least 1/20 of its mean positive part."""
    positive = jnp.maximum(probe.curvature, 0.0)
    mean = weighted_mean(positive, weights)
    return jnp.maximum(positive, _FLOOR * mean[:, None])


def _draw_signs(words, scores):
    """Returns 1 or -1 for each score of each row, by the row's number."""
    num_scores, num_rows = scores.shape
    seeds = derive_seeds(words, jnp.arange(1, 1 + num_scores, dtype=jnp.int32))
    row = jnp.arange(num_rows, dtype=jnp.uint32)
    bits = jax.vmap(hash_words, (None, 0))(row, seeds)
    return jnp.where(bits >> 31 == 0, jnp.float32(1), jnp.float32(-1))


def _power_of_four(power):
    return jnp.exp2(2 * power.astype(jnp.float32))


def _replace_small(objective, scores, probe, average):
    """Replaces the estimates in small groups by the diagonal of their Hessian."""
    groups = objective.groups
    if groups.kind != "ids":
        return average
    tables = tuple(t for t in groups.tables if t.rows.shape[1] <= _SMALL)
    if not tables:
        return average
    # Tables are in the order of their widths, so that the small ones come first.
    places = sum(table.rows.size for table in tables)
    inside = (groups.slot >= 0) & (groups.slot < places)
    slot = jnp.where(inside, groups.slot, -1)
    part = objective._replace(groups=replace(groups, tables=tables, slot=slot))
    if objective.prepared is not None:
        batches = objective.prepared.batches[: len(tables)]
        part = part._replace(prepared=PreparedGroups(batches, slot))
    place = jnp.concatenate(
        [jnp.arange(t.rows.size, dtype=jnp.int32) % t.rows.shape[1] for t in tables]
    )
    place = jnp.where(inside, place[jnp.maximum(slot, 0)], -1)
    num_scores, width = scores.shape[0], tables[-1].rows.shape[1]

    def add_entry(product, number, diagonal):
        k, at = number // width, number % width
        chosen = (place == at)[None] & (jnp.arange(num_scores, dtype=jnp.int32) == k)[
            :, None
        ]
        direction = chosen.astype(jnp.float32)
        return jnp.where(chosen, product(direction), diagonal)

    def find_diagonal(product):
        add, none = partial(add_entry, product), jnp.zeros_like(scores)
        return jax.lax.fori_loop(0, num_scores * width, add, none)

    exact = use_product(part, scores, probe, find_diagonal)
    return jnp.where(inside[None] & jnp.isfinite(exact), exact, average)
