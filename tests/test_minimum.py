# SPDX-License-Identifier: Apache-2.0
"""Minima of known functions are found to the last bit, or reported as absent."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jboost.objective.minimizers import bisect_minimum
from jboost.objective.minimum import find_minimum

INF = np.float32(np.inf)


@partial(jax.jit, static_argnums=(0, 1))
def run(slope, bisect, start, step, low, high, wanted):
    def exact(c):
        return slope(c), jnp.float32(0)

    if bisect:
        return bisect_minimum(slope, start, step, wanted=wanted)
    return find_minimum(exact, start, step, low=low, high=high, wanted=wanted)


def find_few(slope, start=0.0, step=1.0, low=-INF, high=INF, wanted=True, bisect=False):
    """Solves problems whose numbers may be scalars or arrays."""
    arguments = np.broadcast_arrays(start, step, low, high)
    numbers = [jnp.asarray(np.atleast_1d(a), jnp.float32) for a in arguments]
    wanted = jnp.broadcast_to(jnp.asarray(wanted), numbers[0].shape)
    return jax.tree.map(np.asarray, run(slope, bisect, *numbers, wanted))


@pytest.fixture(params=["few turns", "bisection"])
def find(request):
    return partial(find_few, bisect=request.param == "bisection")


def slope_of(pieces):
    """Slopes -1, values at and between points, 1: a list of (point, slope after)."""

    def slope(c):
        value = jnp.full_like(c, -1.0)
        for point, after in pieces:
            value = jnp.where(c >= point, jnp.float32(after), value)
        return value

    return slope


SCALES = 10.0 ** np.arange(-20, 21)
SIGNED = np.concatenate([SCALES, -SCALES]).astype(np.float32)


@pytest.mark.parametrize("power", ["smooth", "kinked"])
def test_minima_of_every_scale(power, find):
    """Steps grow from a fraction of the scale, and shrink to it, alike.

    A far start is no obstacle where c - 1e-20 rounds to c: there is nothing to lose.
    """
    size, count = np.abs(SIGNED), len(SIGNED)
    start = np.repeat([0.0, 0.0, 1e18], count)
    step = np.concatenate([2.0**-20 * size, size, np.full(count, 1e15)])
    wanted = np.arange(3 * count) < (3 if power == "smooth" else 2) * count
    points = np.tile(SIGNED, 3)

    def slope(c):
        return jnp.sign(c - points) if power == "kinked" else c - points

    found = find(slope, start=start, step=step, wanted=wanted)
    assert found.strict[wanted].all() and not found.jump[wanted].any()
    # Neighbouring floats around the sign change: half a unit in the last place.
    near, far = np.split(found.point, [2 * count])
    np.testing.assert_allclose(near, points[: 2 * count], rtol=2.0**-23)
    if power == "smooth":
        np.testing.assert_allclose(far, SIGNED, rtol=2.0**-22)


def side_by_side(slopes):
    """One slope, and so one program, of problems in blocks of equal size."""

    def slope(c):
        parts = jnp.split(c, len(slopes))
        return jnp.concatenate([of(p) for of, p in zip(slopes, parts, strict=True)])

    return slope


# Slope, four starts, and the minimum.
MINIMA = {
    "zero": (lambda c: c, (3, 1, -2, 0), 0.0),
    "middle of a flat interval": (slope_of([(2, 0), (5, 1)]), (-9, 2.5, 4, 30), 3.5),
    # sigmoid rounds to 1e-7 near 1/4, where its slope is 3/16
    "soft logistic target": (
        lambda c: jax.nn.sigmoid(c) - 0.25, (0, 0, 1, -1), -np.log(3),
    ),
    # |c - 3|^1.5 would have a finite slope; 1/c has none at 0.
    "infinite slope": (
        lambda c: jnp.where(c <= 0, -jnp.inf, c - 1 / c), (0, 0, -1, 2), 1.0,
    ),
}  # fmt: skip


def test_known_minima_are_found(find):
    slopes, starts, points = zip(*MINIMA.values(), strict=True)
    found = find(side_by_side(slopes), start=np.ravel(starts), step=0.5)
    assert found.strict.all()
    tiny = np.finfo(np.float32).tiny  # denormals count as 0
    np.testing.assert_allclose(found.point, np.repeat(points, 4), rtol=1e-6, atol=tiny)


def test_a_jump_to_zero_is_an_edge(find):
    """Hinge: downhill until 1, then flat for ever."""
    edge = slope_of([(1, 0)])
    starts = np.float32([-5, 0, 1, 7, -7, 0, 5, -1])
    found = find(side_by_side([edge, lambda c: -edge(-c)]), start=starts)
    assert found.jump.all() and not found.strict.any()
    np.testing.assert_allclose(found.point, [1] * 4 + [-1] * 4, rtol=1e-6)


ENDLESS = {
    "fades right": lambda c: jax.nn.sigmoid(c) - 1,  # rounds to exactly 0 from 17 on
    "fades left": jax.nn.sigmoid,
    "underflows": lambda c: -jnp.exp(-c),
    "downhill": lambda c: -jnp.ones_like(c),
    "flat": jnp.zeros_like,
    "nan": lambda c: jnp.full_like(c, jnp.nan),
}


def test_nothing_is_found_where_nothing_is(find):
    starts = np.tile(np.float32([0, 0.5, -3]), len(ENDLESS))
    found = find(side_by_side([*ENDLESS.values()]), start=starts)
    found = found.strict.reshape(-1, 3), found.jump.reshape(-1, 3)
    for name, strict, jump in zip(ENDLESS, *found, strict=True):
        assert not strict.any() and not jump.any(), name


def test_bounds_are_respected():
    """Outside them the slope is not even a number; a minimum may be at a bound."""
    high, points = np.float32([1, 1, 1, 1, 2]), np.float32([0.3] * 4 + [2])

    def slope(c):
        return jnp.where((c >= 0) & (c <= high), c - points, jnp.nan)

    starts = np.float32([0, 1, 0.3, 0.9, 0])
    found = find_few(slope, start=starts, low=0.0, high=high)
    np.testing.assert_allclose(found.point, points, rtol=1e-6)


def test_problems_not_wanted_stay_at_their_start(find):
    wanted = np.array([True, False])
    found = find(lambda c: c - 4, start=np.float32([0, 0]), wanted=wanted)
    assert found.strict.tolist() == [True, False]
    np.testing.assert_allclose(found.point, [4, 0], rtol=1e-6)


SMOOTH = {
    "quadratic": lambda r: r,
    "huber": lambda r: jnp.clip(r, -1, 1),
    "root": lambda r: jnp.sign(r) * jnp.sqrt(jnp.abs(r)),
    "log-cosh": jnp.tanh,
    "quartic": lambda r: r**3,
    "exponential": jnp.expm1,
}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_slopes_take_few_turns(name):
    """Of the sum over many rows, as a leaf sees it; bisection takes about 70."""
    rows = jnp.asarray(np.random.default_rng(0).normal(1.0, 1.0, 500), jnp.float32)
    asked = []

    def slope(c):
        return jnp.mean(SMOOTH[name](c - rows))[None]

    def counted(c):
        jax.debug.callback(lambda: asked.append(1))
        return slope(c), jnp.float32(1e-6)

    @jax.jit
    def solve(start, step):
        ends = dict(low=jnp.array([-INF]), high=jnp.array([INF]))
        return find_minimum(counted, start, step, **ends, wanted=jnp.array([True]))

    for step in (0.3, 1.0, 3.0):
        asked.clear()
        found = solve(jnp.zeros(1), jnp.array([step]))
        jax.effects_barrier()
        assert found.strict.all()
        assert 0 < len(asked) <= 16
        assert abs(slope(found.point[0])) <= 1e-5
