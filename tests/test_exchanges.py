# SPDX-License-Identifier: Apache-2.0
"""How often the devices of a mesh exchange sums, and that guesses change no sum."""

from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jboost as jb
from jboost import losses
from jboost.boosting.first_sums import (
    find_leaf_sizes,
    measure_first,
    no_sizes,
    sum_first,
)
from jboost.entry.collectives import (
    Shards,
    exchange,
    gather,
    gather_rows,
    least,
    most,
    use_shards,
)
from jboost.entry.collectives import (
    total as add_up,
)
from jboost.kernels.exact_sums import split_weights
from jboost.numerics.exact import sum_each, sum_guessed
from jboost.trees.rounding import measure_rows

DEVICES, ROWS = 4, 256
MESH = jax.make_mesh(
    (DEVICES,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:DEVICES],
)  # fmt: skip
SHARDS = Shards(("rows",), (ROWS // DEVICES,) * DEVICES, ROWS)
EXCHANGES = ("psum", "pmax", "pmin", "all_gather", "all_to_all")
RAN = Counter()  # by programs that were traced within count_calls


@cache
def compile_for_shards(function, *static, apart=False):
    def run(*rows):
        with use_shards(SHARDS._replace(apart=apart)):
            found = function(*static, *rows)
            return jax.tree.map(lambda a: jnp.asarray(a)[None], found)

    row = P("rows")
    return jax.jit(
        jax.shard_map(run, mesh=MESH, in_specs=row, out_specs=row, check_vma=False)
    )


def run_in_shards(function, *rows, static=(), **how):
    """Runs a function of rows on every shard; its results are the same on all."""
    found = compile_for_shards(function, *static, **how)(*rows)
    for array in jax.tree.leaves(found):
        array = np.asarray(array)
        assert all(np.array_equal(array[0], each, equal_nan=True) for each in array)
    return jax.tree.map(lambda array: np.asarray(array)[0], found)


def count_calls(monkeypatch, run):
    """Returns the collectives that a device runs, and the result."""
    before = RAN.total()
    for name in EXCHANGES:
        call = getattr(jax.lax, name)

        def count(*args, call=call, name=name, **options):
            jax.debug.callback(lambda: RAN.update([name]))
            return call(*args, **options)

        monkeypatch.setattr(jax.lax, name, count)
    found = jax.block_until_ready(run())
    jax.effects_barrier()
    monkeypatch.undo()
    return (RAN.total() - before) / DEVICES, found


def make_values(seed=0):
    rng = np.random.default_rng(seed)
    values = np.exp(3 * rng.normal(size=ROWS)) * rng.normal(size=ROWS)
    return values.astype(np.float32), rng.random(ROWS).astype(np.float32)


def add(values, weights, guess):
    pairs = (values, weights), (weights, None)
    count = jnp.sum(weights > 0.5, dtype=jnp.int32)
    guesses = guess[0], jnp.float32(0.9)
    found = sum_guessed(pairs, guesses, [count], [jnp.max(values), values[0]])
    return found, sum_each(*pairs)


@pytest.mark.parametrize(
    ("factor", "odd"),
    [(0.0, 1.0), (1e-9, np.nan), (1.0, 1.0), (1.0, np.inf), (1e9, 1.0)],
)
def test_guesses_change_no_sum(monkeypatch, factor, odd):
    values, weights = make_values()
    values[70] *= odd
    guess = np.float32(factor) * np.max(np.abs((values * weights)[np.isfinite(values)]))

    run = partial(run_in_shards, add, values, weights, np.full(DEVICES, guess))
    calls, (found, expected) = count_calls(monkeypatch, run)
    np.testing.assert_array_equal(found.sums, expected)
    assert calls == 3 + (factor != 1)  # two of them are those of sum_each
    assert found.counts[0] == np.sum(weights > 0.5)
    np.testing.assert_array_equal(
        found.extremes, [np.max(values), np.max(values[:: ROWS // DEVICES])]
    )


@pytest.mark.parametrize("apart", [False, True])
def test_exchange(apart):
    numbers = np.arange(2 * ROWS, dtype=np.int32).reshape(ROWS, 2)
    values, _ = make_values()

    def run(numbers, values):
        sums = [jnp.sum(numbers, axis=0), numbers[:3]]
        extremes = [-values[:2].reshape(1, 2), values[0]]
        return (
            exchange(sums, extremes), exchange(sums, []), exchange([], extremes),
            add_up(numbers[:3]),
        )  # fmt: skip

    both, only_sums, only_extremes, expected = run_in_shards(
        run, numbers, values, apart=apart
    )
    np.testing.assert_array_equal(both[0][0], numbers.sum(axis=0))
    np.testing.assert_array_equal(both[0][1], expected)
    parts = values.reshape(DEVICES, -1)
    np.testing.assert_array_equal(both[1][0], np.max(-parts[:, :2], axis=0)[None])
    assert both[1][1] == np.max(parts[:, 0])
    for found, one in ((only_sums, 0), (only_extremes, 1)):
        jax.tree.map(np.testing.assert_array_equal, found[one], both[one])


@pytest.mark.parametrize("size", [3, 2**14 + 3])  # sent whole, and sent in parts
def test_processes_apart_send_to_each_other(size):
    rng = np.random.default_rng(0)
    numbers = rng.integers(-(2**31), 2**31, (DEVICES, size, 2)).astype(np.int32)
    values = rng.normal(size=(ROWS, 2)).astype(np.float32)

    def run(numbers, values):
        found = add_up(numbers[0]), most(values), least(values)
        return *found, gather(values), gather_rows(values)

    found = run_in_shards(run, numbers, values, apart=True)
    parts = values.reshape(DEVICES, -1, 2)
    expected = (
        numbers.sum(axis=0, dtype=np.int32), parts.max(axis=0), parts.min(axis=0),
        values, values,
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def measure(raised, uniform, gradient, curvature, weights):
    sizes = no_sizes(1)
    first, _ = sum_first(
        gradient[None], curvature[None], weights, weights > 0, raised, sizes
    )
    assert first is not None
    first = jax.tree.map(lambda array: array[0], first)
    times, factors = split_weights(weights)
    scaled, mass = (each * factors / first.mean for each in (gradient, curvature))
    rows = scaled, mass, times, uniform
    found = measure_first(first, first.mean, *rows)
    both = sum_each((curvature, weights), (weights, None))
    return found, measure_rows(*rows), first, both


@pytest.mark.parametrize(
    ("raised", "factor", "uniform"),
    [
        (False, 1.0, False), (False, 0.37, True), (False, 1 + 2.0**-22, False),
        (True, 1.0, True), (True, 0.37, False), (True, 1 + 2.0**-22, True),
    ],
)  # fmt: skip
def test_first_sums_measure_what_scaled_derivatives_do(uniform, factor, raised):
    """Also where sums are next to a power of two: that of 256 rows is 2^8."""
    gradient, _ = make_values(1)
    gradient *= np.float32(factor * ROWS / np.sum(np.abs(gradient)))
    curvature = np.full(ROWS, factor, np.float32)
    if not uniform:
        curvature *= 0.5 + np.arange(ROWS, dtype=np.float32) / ROWS
    weights = np.ones(ROWS, np.float32)
    weights[::7] = 0 if uniform else 2.5

    found, expected, first, (total, weight) = run_in_shards(
        measure, gradient, curvature, weights, static=(raised, uniform)
    )
    compared = (0,) if uniform else (0, 1)
    for index in compared:
        assert found.fixed.scale[index] == expected.fixed.scale[index]
    np.testing.assert_array_equal(found.unit, expected.unit)
    assert found.num_in_bag == expected.num_in_bag == np.sum(weights > 0)
    assert first.mean == total / weight
    assert first.least == np.min(curvature[weights > 0])
    assert find_leaf_sizes(None) is None


CASES = {
    # The sums of the round, two levels, leaves, losses.
    "squared": (losses.squared_error, 5),
    # And whether rows have a minimum; the loss changes of the leaves.
    "logistic": (losses.logistic, 8),
    # And the smoothing scale; rows without derivatives; four digits of the medians.
    "absolute": (losses.absolute_error, 10),
}


@pytest.mark.parametrize("name", CASES)
def test_number_of_exchanges_a_round(monkeypatch, name):
    loss, expected = CASES[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2003, 3)).astype(np.float32)
    y = (x[:, 0] + rng.normal(size=len(x))).astype(np.float32)
    if loss is losses.logistic:
        y = (y > 0).astype(np.float32)
    held = (x[:99], y[:99])  # its loss takes no collective of its own

    def run(rounds):
        # Other tests make no programs of so many bins.
        jb.fit(
            x, y, loss, num_rounds=rounds, max_depth=2, max_bins=23, mesh=MESH,
            validation=held, learning_rate=0.01, subsample=1.0, rows_per_threshold=0,
        )  # fmt: skip

    few, _ = count_calls(monkeypatch, partial(run, 2))
    many, _ = count_calls(monkeypatch, partial(run, 12))
    calls = (many - few) / 10
    # More where the greatest term of a sum has passed a power of two.
    assert expected <= calls < expected + 0.75
