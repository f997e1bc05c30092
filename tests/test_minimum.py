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


@pytest.mark.parametrize("step", [2.0**-20, 1.0])
@pytest.mark.parametrize("power", ["smooth", "kinked"])
def test_minima_of_every_scale(step, power, find):
    """Steps grow from a fraction of the scale, and shrink to it, alike."""

    def slope(c):
        return jnp.sign(c - SIGNED) if power == "kinked" else c - SIGNED

    found = find(slope, step=step * np.abs(SIGNED))
    assert found.strict.all() and not found.jump.any()
    # Neighbouring floats around the sign change: half a unit in the last place.
    np.testing.assert_allclose(found.point, SIGNED, rtol=2.0**-23)


def test_a_far_start_is_no_obstacle(find):
    found = find(lambda c: c - SIGNED, start=np.full_like(SIGNED, 1e18), step=1e15)
    assert found.strict.all()
    # c - 1e-20 rounds to c as soon as c is 1e8 times as large: nothing to lose.
    np.testing.assert_allclose(found.point, SIGNED, rtol=2.0**-22)


def test_zero_is_a_minimum(find):
    found = find(lambda c: c, start=3.0)
    assert found.strict.all()
    assert abs(found.point[0]) < np.finfo(np.float32).tiny  # denormals count as 0


def test_the_midpoint_of_a_flat_interval(find):
    found = find(slope_of([(2, 0), (5, 1)]), start=np.float32([-9, 2.5, 4, 30]))
    assert found.strict.all()
    np.testing.assert_allclose(found.point, 3.5, rtol=1e-6)  # two neighbouring floats


def test_a_jump_to_zero_is_an_edge(find):
    """Hinge: downhill until 1, then flat for ever."""
    found = find(slope_of([(1, 0)]), start=np.float32([-5, 0, 1, 7]))
    assert found.jump.all() and not found.strict.any()
    np.testing.assert_allclose(found.point, 1, rtol=1e-6)
    mirrored = find(lambda c: -slope_of([(1, 0)])(-c), start=np.float32([-7, 0, 5]))
    assert mirrored.jump.all()
    np.testing.assert_allclose(mirrored.point, -1, rtol=1e-6)


ENDLESS = {
    "fades right": lambda c: jax.nn.sigmoid(c) - 1,  # rounds to exactly 0 from 17 on
    "fades left": jax.nn.sigmoid,
    "underflows": lambda c: -jnp.exp(-c),
    "downhill": lambda c: -jnp.ones_like(c),
    "flat": jnp.zeros_like,
    "nan": lambda c: jnp.full_like(c, jnp.nan),
}


def test_nothing_is_found_where_nothing_is(find):
    """All of them side by side, in one program."""

    def slope(c):
        parts = jnp.split(c, len(ENDLESS))
        return jnp.concatenate(
            [of(part) for of, part in zip(ENDLESS.values(), parts, strict=True)]
        )

    found = find(slope, start=np.tile(np.float32([0, 0.5, -3]), len(ENDLESS)))
    found = found.strict.reshape(-1, 3), found.jump.reshape(-1, 3)
    for name, strict, jump in zip(ENDLESS, *found, strict=True):
        assert not strict.any() and not jump.any(), name


def test_a_soft_logistic_target_has_a_minimum(find):
    found = find(lambda c: jax.nn.sigmoid(c) - 0.25)
    assert found.strict.all()
    # sigmoid rounds to 1e-7 near 1/4, where its slope is 3/16
    np.testing.assert_allclose(found.point, -np.log(3), rtol=1e-6)


def test_bounds_are_respected():
    """Outside them the slope is not even a number."""

    def slope(c):
        return jnp.where((c >= 0) & (c <= 1), c - 0.3, jnp.nan)

    found = find_few(slope, start=np.float32([0, 1, 0.3, 0.9]), low=0.0, high=1.0)
    np.testing.assert_allclose(found.point, 0.3, rtol=1e-6)


def test_a_minimum_at_a_bound():
    found = find_few(lambda c: c - 2, start=0.0, low=0.0, high=2.0)
    np.testing.assert_allclose(found.point, 2, rtol=1e-6)


def test_problems_not_wanted_stay_at_their_start(find):
    wanted = np.array([True, False])
    found = find(lambda c: c - 4, start=np.float32([0, 0]), wanted=wanted)
    assert found.strict.tolist() == [True, False]
    np.testing.assert_allclose(found.point, [4, 0], rtol=1e-6)


def test_infinite_slopes_bracket_too(find):
    """|c - 3|^1.5 would have a finite slope; 1/c has none at 0."""
    found = find(lambda c: jnp.where(c <= 0, -jnp.inf, c - 1 / c), step=0.5)
    assert found.strict.all()
    np.testing.assert_allclose(found.point, 1, rtol=1e-6)


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
